//! The configuration section `kv_events`.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// KV events of engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvEvents {
    /// Whether KV events are read.
    pub enabled: bool,
    /// Port of rank 0 for engines that do not announce their feed, each further rank one higher; 0 for none.
    pub port: u16,
    /// Port of the replay socket, likewise.
    pub replay_port: u16,
    /// Messages of one feed that may be queued; beyond it messages are dropped and requested again.
    pub queue_messages: usize,
    /// Bytes of those messages.
    pub queue_bytes: usize,
    /// Silence after which a feed whose event is due counts as broken.
    #[serde(with = "humantime_serde")]
    pub silent_after: Duration,
    /// Time between two heartbeats on an engine's socket; after three times as long without any, the connection is
    /// made again.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// Most memory of one pool's index, in bytes.
    pub index_memory: usize,
    /// File in which the index is kept over a restart of the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<PathBuf>,
    /// Time between two snapshots.
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
