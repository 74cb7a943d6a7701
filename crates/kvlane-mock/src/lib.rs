//! A mock engine: looks like vLLM from outside, computes nothing.
//!
//! Behind the OpenAI API stands the engine model of `kvlane-sim` (paged prefix cache, continuous batching, a timing
//! model of a real model on a real GPU), driven by the wall clock times a speed factor. A prompt that shares a prefix
//! with an earlier one gets its first token sooner, a full batch makes everyone wait, and `usage` and `/metrics` say
//! what the cache did, all without a GPU.
//!
//! The way of a request: `api.rs` checks it, `tokens.rs` cuts its prompt into tokens and blocks, `driver.rs` runs the
//! engine and keeps each request's progress, `answer.rs` and `stream.rs` turn progress into bytes.
//!
//! A running engine can be made slow, silent or worse (`fault.rs`), and dies as real engines were seen to (`deaths.rs`).
//!
//! What changes in the cache is told as vLLM tells it (`feed/`): KV events over ZeroMQ, in any of its versions' ways, with
//! faults if so told.
//!
//! What it does not model: the engine's text. Answers are words drawn from a hash of the prompt, four bytes and one token
//! each. A later prompt finds the answer's blocks in the cache only if it goes on with it at the same token: a chat's next
//! turn mostly does not, since what a template puts around the answer is not a multiple of four bytes.

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

pub use config::{ConfigError, MockConfig};
pub use deaths::{Death, DeathsLike};
pub use fault::Fault;
pub use feed::{FeedAddresses, FeedCounts, KvEventsConfig, KvEventsFaults, KvEventsHashes};
pub use serve::MockEngine;
