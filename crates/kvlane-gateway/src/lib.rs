//! The gateway: configuration, start, reload and stop.
//!
//! [`serve::Serving`] starts proxy, control and admin on their threads and joins them; [`reload`] replaces their
//! configuration while they run.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

pub mod config;
mod contents;
pub mod discovery;
pub mod inherited;
mod listening;
pub mod mode;
mod relays;
pub mod reload;
pub mod serve;
#[cfg(feature = "testing")]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods, reason = "code of tests")]
pub mod testing;
mod threads;
