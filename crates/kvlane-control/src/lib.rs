//! Changes the fleet: adds, probes and removes workers, and applies what they report.
//!
//! The [`controller`] owns the workers and publishes the snapshot that requests are placed by; [`ingest`] applies KV
//! events; [`discovery`] reads lists of workers; [`parity_check`] compares tokenizers; [`warm_up`] tries transfers of KV blocks;
//! [`stall`] watches for engines that make no progress; `empty_pools` tells a scaler that requests wait;
//! [`index_snapshot`] restores the index after a restart; [`replicas`] exchanges news with other gateways.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

pub mod controller;
pub mod discovery;
mod empty_pools;
pub mod health;
pub mod index_snapshot;
pub mod ingest;
pub mod objects_snapshot;
pub mod pair_check;
pub mod parity_check;
pub mod replicas;
mod snapshot_file;
pub mod stall;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod warm_up;

pub use self::controller::Controller;
