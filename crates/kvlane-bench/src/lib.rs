//! Clients that measure: open-loop replay of a trace against any OpenAI-compatible address, and calibration of the engine
//! timing model against one server ([`calibrate`]).
//!
//! A closed-loop client waits for answers before it sends more, so a slow server is offered less load and looks
//! better than it is. This client sends every request at its timestamp whatever is still in flight, and says how
//! late it was itself. Traces carry block ids instead of text: [`prompt`] turns ids into text so that equal ids are
//! equal text, and [`replay`](fn@replay) sends it, reads the streamed answer and writes one
//! [`kvlane_trace::record::Record`] per request.

pub mod calibrate;
pub mod histogram;
pub mod matrix;
pub mod prompt;
pub mod replay;

pub use replay::{Api, ErrorClass, Prompts, ReplayConfig, ReplayError, ReplayReport, replay};
