//! Prompts as the engine counts them: a request's body becomes the text that the model's chat template makes of it, and
//! the text becomes the token ids of the model's tokenizer.
//!
//! ```text
//! body ── request ──► messages, tools, arguments ── template ──► text ── encode ──► token ids
//!             └─ a plain prompt ─────────────────────────────────▲          │
//!             └─ a prompt given as ids ────────────────────────────────────►┘
//! ```
//!
//! Nothing here waits, logs or reads a clock; files are read once, in [`Tokenizer::load`]. What cannot be known is
//! [`Unknown`], with the reason, and the caller estimates.

pub mod bpe;
mod encode;
mod json;
mod load;
mod prompt;
mod python;
mod request;
mod source;
mod template;
mod tiktoken;
mod tokenizer;
mod unknown;

pub use prompt::{Prompt, UnixTime};
pub use source::{Config, ContentFormat, LoadError, Source};
pub use tokenizer::{Cut, Stats, Tokenizer};
pub use unknown::Unknown;
