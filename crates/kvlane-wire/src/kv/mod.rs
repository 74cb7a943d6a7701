//! KV events: what an engine publishes about its cache, as vLLM 0.9 to 0.33 and SGLang write it.
//!
//! A message is a msgpack batch `[ts, [event, ...], rank]`. Its events are arrays, whose fields stand in the order of
//! [`version`], or maps with the same names that leave out what equals its default. [`decode`] reads either into a
//! [`Batch`], hashing each block's tokens as it passes them; a [`Linker`] then chains those hashes to the blocks before
//! them and hands over [`KvEvent`]s.

mod batch;
mod decode;
pub mod version;

pub use batch::{Batch, Event, Ignored, Linked, Linker, Stored};
pub use decode::{BLOCK_TOKENS_MAX, DecodeError, EVENTS_MAX, NAMES_MAX, PAYLOAD_MAX, decode};

#[cfg(doc)]
use kvlane_core::event::KvEvent;
