//! The fleet as proxy, control and admin share it.
//!
//! Control changes it, the proxy reads it and reports to it, admin shows it. [`Fleet`] holds the published [`snapshot`]:
//! pools, model names and endpoints, replaced whole.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

pub mod adapters;
pub mod catalogue;
pub mod clock;
pub mod decoders;
pub mod disaggregation;
pub mod discovery;
pub mod empty_pools;
pub mod feed;
pub mod file_watch;
pub mod first_tokens;
pub mod fleet;
pub mod metrics;
pub mod objects;
pub mod panics;
pub mod parity;
pub mod pool;
pub mod readiness;
pub mod recording_writer;
pub mod reloads;
pub mod replicas;
pub mod routing;
pub mod settings;
pub mod snapshot;
pub mod timings;
pub mod tokenize;
pub mod traffic;
pub mod vitals;
pub mod worker;

pub use self::fleet::Fleet;
