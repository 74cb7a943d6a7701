//! The router under tokio: `kvlane serve`.
//!
//! [`serve::Serving`] starts it; [`gateway`] joins the core's router with workers and waiting requests; [`front`] is
//! where requests come in; [`upstream`] is how they reach workers; [`fleet`] watches who is there.

pub mod admin;
pub mod auth;
pub mod clock;
pub mod config;
mod exposition;
pub mod feed;
mod first_tokens;
pub mod fleet;
pub mod front;
pub mod gateway;
pub mod hints;
mod history;
pub mod ingest;
mod latency;
pub mod lease;
pub mod limits;
mod memory;
pub mod metrics;
mod objects;
pub mod panics;
pub mod parity;
pub mod parity_check;
pub mod pool;
pub mod recording_writer;
pub mod reload;
pub mod routing;
mod salt;
mod sealed;
pub mod serve;
mod snapshot;
mod stall;
#[cfg(feature = "testing")]
pub mod testing;
mod timeline;
pub mod timings;
pub mod tokenize;
pub mod traces;
mod vitals;
mod warm;
pub mod worker;
