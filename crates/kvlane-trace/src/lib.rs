//! Workloads and measurements, nothing else: traces are read, cut and written here, and the records of a replay
//! become a summary.
//!
//! A [`Trace`] is what arrived: times, lengths and block ids, never text. A [`Record`] is what one request of a
//! replay experienced. A [`Summary`] is what to say about many of them.

pub mod ci;
pub mod format;
pub mod record;
pub mod report;
pub mod request;
pub mod sample;
pub mod summary;
pub mod trace;

pub use format::TraceError;
pub use record::Record;
pub use request::{Trace, TraceRequest};
pub use summary::{Percentiles, Summary};
