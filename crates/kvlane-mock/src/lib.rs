//! A mock engine with vLLM's API and no model.
//!
//! Behind the OpenAI API is the engine model of `kvlane-sim` (paged prefix cache, continuous batching, a timing model
//! of a real model on a real GPU), driven by the wall clock times a speed factor. A prompt that shares a prefix with
//! an earlier one gets its first token sooner, a full batch delays all requests, and `usage` and `/metrics` report
//! the cache, all without a GPU.
//!
//! Path of a request: `api.rs` validates it, `tokens.rs` cuts its prompt into tokens and blocks, `driver.rs` runs the
//! engine and keeps each request's progress, `answer.rs` and `stream.rs` turn progress into bytes.
//!
//! Faults can be applied to a running engine (`fault.rs`), including recorded deaths of real engines (`deaths.rs`).
//!
//! Changes of the cache are published as in vLLM (`feed/`): KV events over ZeroMQ, in the format of any of its
//! versions, optionally with faults.
//!
//! Two engines can share a request: one computes its prompt, the other fetches the blocks and decodes (`transfer/`).
//!
//! Text is not modelled. Answers are words drawn from a hash of the prompt, four bytes and one token each. A later
//! prompt finds the answer's blocks in the cache only if it continues at the same token: a chat's next turn mostly
//! does not, since a template's text around the answer is not a multiple of four bytes.

mod adapters;
mod answer;
mod api;
mod config;
mod deaths;
mod driver;
mod error;
mod fault;
mod feed;
mod metrics;
mod serve;
mod stream;
#[cfg(test)]
mod testing;
mod tokens;
mod transfer;

pub use config::{ConfigError, MockConfig};
pub use deaths::{Death, DeathsLike};
pub use fault::Fault;
pub use feed::{FeedAddresses, FeedCounts, KvEventsConfig, KvEventsFaults, KvEventsHashes};
pub use serve::MockEngine;
pub use transfer::config::{KvRole, KvTransferConfig, KvTransferFaults};
