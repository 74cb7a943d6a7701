//! What engines tell of their caches.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What engines tell of their caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvEvents {
    /// Whether the events of engines that publish any are read.
    pub enabled: bool,
    /// Where an engine publishes that does not say so: port of rank 0, each further rank one higher; 0 for nowhere.
    pub port: u16,
    /// Its replay socket, likewise.
    pub replay_port: u16,
    /// Messages of one feed that may wait to be applied; beyond it some are dropped and asked for again.
    pub queue_messages: usize,
    /// Bytes of them.
    pub queue_bytes: usize,
    /// Silence after which a feed that should have said something counts as broken.
    #[serde(with = "humantime_serde")]
    pub silent_after: Duration,
    /// Time between two signs of life asked of an engine's socket; without any for three times as long, the connection
    /// is made anew.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// Bytes that the index of one pool may use.
    pub index_memory: usize,
    /// File in which what engines hold is kept over a restart of the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<PathBuf>,
    /// Time between two writings of it.
    #[serde(with = "humantime_serde")]
    pub snapshot_interval: Duration,
}

impl Default for KvEvents {
    fn default() -> Self {
        Self {
            enabled: true,
            port: 0,
            replay_port: 0,
            queue_messages: 50_000,
            queue_bytes: 32 << 20,
            silent_after: Duration::from_secs(10),
            heartbeat: Duration::from_secs(5),
            index_memory: 1 << 30,
            snapshot: None,
            snapshot_interval: Duration::from_secs(30),
        }
    }
}
