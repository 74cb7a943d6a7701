//! Workloads: traces are read, generated, sampled and written here, and so are the records of a replay.
//!
//! A [`Trace`] holds arrival times, lengths and block ids, never text. A [`Record`] is the result of one request of a
//! replay.

pub mod adapters;
pub mod format;
pub mod generate;
pub mod plan;
pub mod record;
pub mod sample;
pub mod session;
pub mod trace;
mod zipf;

pub use format::{Format, Options, TraceError};
pub use plan::Plan;
pub use record::Record;
pub use trace::{Trace, TraceRequest};
