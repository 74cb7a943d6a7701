//! The gateway: configuration, start, reload and stop.
//!
//! [`serve::Serving`] starts proxy, control and admin on their threads and joins them; [`reload`] replaces their
//! configuration while they run.

pub mod config;
mod relays;
pub mod reload;
pub mod serve;
#[cfg(feature = "testing")]
pub mod testing;
