//! The laboratory: experiments on engines, routers and policies, their statistics and their reports.
//!
//! - Clients that measure: open-loop [replay](fn@replay) of a trace against any OpenAI-compatible address, and
//!   [calibration](calibrate) of the engine timing model against one server.
//!   [`engine_caches`] reads what engines count meanwhile.
//! - Experiments: [`scenario`] is one simulated fleet, [`matrix`] compares policies in virtual time and routers on real
//!   engines.
//!   [`part`] divides either among machines.
//! - [`limit`]: how far a policy is from the best placement that can be found.
//! - [`catalogue`]: the scenarios and traces that come with kvlane.
//! - [`measured`]: published measurements beside the timing model's values.
//! - `chaos` (a feature of its own): a fleet of real processes under faults.
//! - Results: [`statistics`], [`figures`] of a simulated run, [`trace_stats`] of a trace, and the [`report`] that shows
//!   them.
//!
//! A closed-loop client waits for answers before it sends more, so a slow server is offered less load and looks
//! better than it is. The replay client sends every request at its timestamp whatever is still in flight, and says how
//! late it was itself. Traces carry block ids instead of text: [`prompt`] turns ids into text so that equal ids are
//! equal text, and [`replay`](fn@replay) sends it, reads the streamed answer and writes one
//! [`kvlane_trace::record::Record`] per request.

pub mod calibrate;
pub mod catalogue;
#[cfg(feature = "chaos")]
pub mod chaos;
pub mod client;
pub mod digest;
pub mod engine_caches;
pub mod figures;
pub mod limit;
pub mod matrix;
pub mod measured;
pub mod part;
pub mod prompt;
pub mod replay;
pub mod report;
pub mod scenario;
pub mod statistics;
pub mod trace_stats;

pub use replay::{Api, ErrorClass, Prompts, ReplayConfig, ReplayError, ReplayReport, replay};
