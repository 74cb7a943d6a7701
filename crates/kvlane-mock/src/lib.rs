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
//! What it does not model: the engine's text. Answers are words drawn from a hash of the prompt, and a client that
//! sends them back in a later turn finds its own prompt cached but not the answer's part.

mod answer;
mod api;
mod config;
mod driver;
mod error;
mod metrics;
mod serve;
mod stream;
mod tokens;

pub use config::{ConfigError, MockConfig};
pub use serve::MockEngine;
