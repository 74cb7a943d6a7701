//! A trace in memory: requests in the order of their arrival, each with its lengths and the ids of its blocks.

use std::path::Path;

use crate::format::{TraceError, mooncake};

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// Seconds since the start of the trace.
    pub arrival_s: f64,
    /// Prompt length in tokens, at least 1.
    pub input_tokens: u32,
    /// Answer length in tokens.
    pub output_tokens: u32,
    /// One id for each started block of the prompt. Equal ids mean equal prompts up to the end of that block. The
    /// last block is partial where `input_tokens` is no multiple of [`Trace::block_tokens`].
    pub blocks: Vec<u64>,
}

/// Requests sorted by arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// The requests, by arrival.
    pub requests: Vec<TraceRequest>,
    /// What was changed on the way from the file to here, one sentence each, for people.
    pub notes: Vec<String>,
}

// === impl Trace ===

impl Trace {
    /// Reads a trace file in the Mooncake format, plain or gzip.
    pub fn open(path: &Path, options: &mooncake::Options) -> Result<Self, TraceError> {
        mooncake::open(path, options)
    }

    /// Seconds from the start of the trace to its last arrival.
    pub fn span_s(&self) -> f64 {
        self.requests.last().map_or(0.0, |request| request.arrival_s)
    }

    /// Prompt tokens of all requests.
    pub fn input_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.input_tokens)).sum()
    }

    /// Answer tokens of all requests.
    pub fn output_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.output_tokens)).sum()
    }
}
