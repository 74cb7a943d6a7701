//! What operators see and do: admin API, dashboard, metrics page, history, trace export.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods))]

pub mod admin;
mod api;
mod catalogue;
mod decisions;
mod discovery;
pub mod export;
mod exposition;
mod fleet;
pub mod history;
mod known;
mod page;
mod query;
mod readiness;
mod signals;
mod tenants;
mod whatif;
mod workers;

pub use self::admin::Admin;
