//! Workloads and measurements: traces are read, sampled and written here, and the records of a replay are summarized.
//!
//! A [`Trace`] holds arrival times, lengths and block ids, never text. A [`Record`] is the result of one request of a
//! replay. A [`Summary`] summarizes many of them.

pub mod ci;
pub mod curve;
pub mod draws;
pub mod format;
pub mod generate;
pub mod paired;
pub mod plan;
pub mod record;
pub mod report;
pub mod sample;
pub mod session;
pub mod stats;
pub mod summary;
pub mod trace;

pub use format::{Format, Options, TraceError};
pub use plan::Plan;
pub use record::Record;
pub use summary::{Percentiles, Summary};
pub use trace::{Trace, TraceRequest};
