//! Workloads and measurements, nothing else: traces are read, cut and written here, and the records of a replay
//! become a summary.
//!
//! A [`Trace`] is what arrived: times, lengths and block ids, never text. A [`Record`] is what one request of a
//! replay experienced. A [`Summary`] is what to say about many of them.

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
