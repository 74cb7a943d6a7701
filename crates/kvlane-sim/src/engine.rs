//! Continuous batching, one step at a time, after vLLM V1's scheduler (`vllm/v1/core/sched/scheduler.py`).
//!
//! A step gives tokens of its budget to the running sequences in the order of their admission, one to each that
//! decodes and a chunk to each whose prompt is still being computed, then admits waiting requests first come, first
//! served, until budget, seats or blocks run out; the head of the queue blocks the rest. When a running sequence
//! finds no block, the last admitted one is preempted: it gives up all its blocks, returns to the head of the queue
//! and later recomputes what the cache no longer holds. The step's shape gives its length through the timing model.
//!
//! A request leaves in exactly one of three ways: finished, rejected, cancelled.

use kvlane_core::block::BlockHash;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;

/// Size and speed of one engine. Zero counts are taken as one.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// How long a step takes.
    pub timing: TimingModel,
    /// Tokens in a KV block; vLLM's default is 16.
    pub block_tokens: u32,
    /// KV blocks in the cache.
    pub blocks: u32,
    /// Most sequences in one step.
    pub max_num_seqs: u32,
    /// Most tokens in one step.
    pub max_num_batched_tokens: u32,
}

/// One request as an engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRequest {
    /// Chosen by the driver, unique among the requests in flight.
    pub id: u64,
    /// Chained hashes of the prompt's full blocks. Blocks beyond those given are computed and never reused.
    pub prompt_blocks: Vec<BlockHash>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Answer length in tokens; 0 computes the prompt and ends, like an embedding.
    pub output_tokens: u32,
    /// From which the hashes of the answer's full blocks derive.
    pub output_seed: u64,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Its prompt is computed and its first token is out.
    FirstToken {
        /// The request.
        id: u64,
        /// Prompt tokens found in the cache when it was first admitted.
        cached_tokens: u32,
    },
    /// Further tokens are out; the first is not among them.
    Tokens {
        /// The request.
        id: u64,
        /// How many.
        count: u32,
    },
    /// It is over; its blocks are free.
    Finished {
        /// The request.
        id: u64,
    },
    /// It was never admitted.
    Rejected {
        /// The request.
        id: u64,
        /// Why not.
        why: &'static str,
    },
}

/// Counters and gauges of an engine. Counters run from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Sequences admitted and not over.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Blocks that a sequence holds.
    pub kv_blocks_used: u32,
    /// All blocks.
    pub kv_blocks: u32,
    /// Prompt tokens looked up in the cache, once for each request.
    pub prefix_queried_tokens: u64,
    /// Those that were found.
    pub prefix_hit_tokens: u64,
    /// Times a sequence was preempted.
    pub preemptions: u64,
    /// Prompt tokens of requests whose prompt is computed, cached ones included.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub generation_tokens: u64,
    /// Tokens that went through the model.
    pub computed_tokens: u64,
    /// Those that had gone through it before, for the same request, and were lost to preemption.
    pub recomputed_tokens: u64,
    /// Steps ended.
    pub steps: u64,
    /// Time spent in steps.
    pub busy: Nanos,
}

/// One engine.
#[derive(Clone, Debug)]
pub struct Engine {
    config: EngineConfig,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(config: EngineConfig) -> Self {
        Self { config }
    }
    /// Queues a request that arrives at `now`.
    pub fn enqueue(&mut self, _now: Nanos, _request: EngineRequest) {}
    /// Forgets a request and frees its blocks. False if it is not in flight.
    pub fn cancel(&mut self, _now: Nanos, _id: u64) -> bool {
        false
    }
    /// When [`Engine::advance`] next has something to tell; `None` while idle.
    pub fn next_deadline(&self) -> Option<Nanos> {
        None
    }
    /// Runs every step that ends by `now` and appends what happened, in order of time.
    pub fn advance(&mut self, _now: Nanos, _out: &mut Vec<(Nanos, EngineEvent)>) {}
    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        EngineStats::default()
    }
    /// Makes the engine forget what it has cached; blocks in use stay in use.
    pub fn reset_prefix_cache(&mut self) {}
    /// The configuration in force.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }
}
