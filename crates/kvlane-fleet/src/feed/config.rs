//! The configuration section `kv_events`.

use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::config::TIME;
use kvlane_core::section;

section! {
    /// KV events of engines.
    pub struct KvEvents {
        /// Whether KV events are read.
        pub enabled: bool = true;
        /// Port of rank 0 for engines that do not announce their feeds, each further rank one higher; 0: none.
        pub port: u16 = 0;
        /// Port of the replay socket, likewise.
        pub replay_port: u16 = 0;
        /// Maximum queued messages of one feed; further ones are dropped and requested again.
        pub queue_messages: usize = 50_000, in 1..=10_000_000;
        /// Maximum bytes of the queued messages of one feed.
        pub queue_bytes: usize = 32 << 20, in 1 << 10..=1 << 40;
        /// Time without an expected event after which a feed counts as broken.
        #[serde(with = "humantime_serde")]
        pub silent_after: Duration = Duration::from_secs(10), in TIME;
        /// Interval of pings to an engine's socket; after three without an answer the gateway reconnects.
        #[serde(with = "humantime_serde")]
        pub heartbeat: Duration = Duration::from_secs(5), in TIME;
        /// Maximum bytes of the index of KV events of one pool.
        pub index_memory: usize = 1 << 30;
        /// A snapshot file of the index of KV events, for restarts of the gateway, as in `/var/lib/kvlane/kv.snapshot`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub snapshot: Option<PathBuf> = None;
        /// Time between two snapshots of the index of KV events.
        #[serde(with = "humantime_serde")]
        pub snapshot_interval: Duration = Duration::from_secs(30), in TIME;
    }
}
