//! Exact prompt tokens: renders a request's body with the model's chat template, and encodes the text with the model's
//! tokenizer.
//!
//! ```text
//! body ── request ──► messages, tools, arguments ── template ──► text ── encode ──► token ids
//!             └─ a plain prompt ─────────────────────────────────▲          │
//!             └─ a prompt given as ids ────────────────────────────────────►┘
//! ```
//!
//! Nothing here waits, logs or reads a clock; files are read once, in [`Tokenizer::load`]. If the tokens cannot be
//! determined, the result is [`Unknown`] with the reason, and the caller estimates.

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod bpe;
mod encode;
mod json;
mod load;
mod media;
mod prompt;
mod python;
mod request;
mod source;
mod template;
mod tiktoken;
mod tokenizer;
mod unknown;

pub use media::NewImage;
pub use prompt::{Placed, Prompt, UnixTime};
pub use source::{Config, ContentFormat, LoadError, Source};
pub use tokenizer::{Cut, Stats, Tokenizer};
pub use unknown::Unknown;
