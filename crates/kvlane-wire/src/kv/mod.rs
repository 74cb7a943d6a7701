//! KV events that an engine publishes about its cache, in the formats of vLLM 0.9 to 0.33 and SGLang.
//!
//! A message is a msgpack batch `[ts, [event, ...], rank]`. Its events are arrays with fields in the order of
//! [`version`], or maps with the same field names that omit default values. [`decode()`] reads both into a [`Batch`] and
//! hashes each block's tokens while reading; a [`Linker`] then chains these hashes to the blocks before them and passes
//! on [`KvEvent`]s.

mod batch;
mod decode;
mod image;
pub mod version;

pub use batch::{Batch, Event, Ignored, Linked, Linker, Stored};
pub use decode::{BLOCK_TOKENS_MAX, DecodeError, EVENTS_MAX, NAMES_MAX, PAYLOAD_MAX, decode};
pub use image::image_key;

#[cfg(doc)]
use kvlane_core::event::KvEvent;
