//! Inputs and outputs of an engine.

use std::sync::Arc;

use kvlane_core::block::BlockHash;
use kvlane_core::request::AdapterKey;
use kvlane_core::time::Nanos;

/// One request as an engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRequest {
    /// Chosen by the driver, unique among the requests in flight.
    pub id: u64,
    /// Chained hashes of the prompt's full blocks. Blocks beyond these are the request's own, see [`own_block`]; a
    /// prompt without shared prefixes needs none.
    pub prompt_blocks: Arc<[BlockHash]>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Answer length in tokens; 0 computes the prompt and ends, like an embedding.
    pub output_tokens: u32,
    /// Identifies all text beyond `prompt_blocks`: requests with the same value and the same blocks have the same
    /// text, answer included, and match each other's blocks.
    pub output_seed: u64,
    /// Source of the first KV blocks, if it is another engine.
    pub remote: Option<Remote>,
    /// Its adapter. The caller makes sure that blocks of different ones differ.
    pub adapter: Option<AdapterKey>,
}

/// KV blocks that another engine has computed. The request holds blocks for its whole prompt during the transfer, and
/// computes the rest, at least the last token. If it is preempted, it computes all of them itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Prompt tokens transferred.
    pub tokens: u32,
    /// Time of arrival. [`Nanos::MAX`] if the driver does not know yet: it gets [`EngineEvent::Allocated`] when there
    /// are blocks to send to, and answers with [`Engine::ready`](super::Engine::ready).
    pub ready_at: Nanos,
}

/// An event of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// It has blocks for the KV blocks that come from another engine.
    Allocated {
        /// The request.
        id: u64,
        /// Tokens to transfer: those that are not in the cache.
        tokens: u32,
    },
    /// Its prompt is computed and its first token has been generated.
    FirstToken {
        /// The request.
        id: u64,
        /// Prompt tokens found in the cache, host memory included, when it was first admitted.
        cached_tokens: u32,
    },
    /// Further tokens have been generated, not including the first.
    Tokens {
        /// The request.
        id: u64,
        /// Their number.
        count: u32,
    },
    /// It has ended; its blocks are free. TTFT and the mean time between tokens follow from the times of enqueueing,
    /// of [`EngineEvent::FirstToken`] and of this event.
    Finished {
        /// The request.
        id: u64,
    },
    /// It was never admitted.
    Rejected {
        /// The request.
        id: u64,
        /// The reason.
        why: &'static str,
    },
}

/// Counters and gauges of an engine. Counters start at its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Sequences admitted and not ended.
    pub running: u32,
    /// Requests in the queue, and those that wait for KV blocks from elsewhere.
    pub waiting: u32,
    /// Blocks that a sequence holds.
    pub kv_blocks_used: u32,
    /// All blocks.
    pub kv_blocks: u32,
    /// Prompt tokens looked up in the cache, once for each request.
    pub prefix_queried_tokens: u64,
    /// Those that were found.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens found in host memory instead, once for each request.
    pub cpu_hit_tokens: u64,
    /// Prompt tokens that came from another engine instead.
    pub remote_tokens: u64,
    /// Times a sequence was preempted.
    pub preemptions: u64,
    /// Adapters loaded.
    pub adapter_loads: u64,
    /// Prompt tokens of requests whose prompt is computed, cached ones included.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub generation_tokens: u64,
    /// Tokens that went through the model.
    pub computed_tokens: u64,
    /// Those that the request had had before, computed or cached, and lost to preemption.
    pub recomputed_tokens: u64,
    /// Tokens that preempted sequences found in the cache after readmission without having had them before.
    pub late_hit_tokens: u64,
    /// Steps ended.
    pub steps: u64,
    /// Time spent in steps.
    pub busy: Nanos,
}

// === impl EngineEvent ===

impl EngineEvent {
    /// The id of its request.
    pub fn id(&self) -> u64 {
        match *self {
            Self::Allocated { id, .. }
            | Self::FirstToken { id, .. }
            | Self::Tokens { id, .. }
            | Self::Finished { id }
            | Self::Rejected { id, .. } => id,
        }
    }
}

// === impl EngineStats ===

impl EngineStats {
    /// The sum of the counters of a dead engine and of its replacement, with the gauges of the latter.
    pub fn followed_by(self, next: Self) -> Self {
        Self {
            prefix_queried_tokens: self.prefix_queried_tokens + next.prefix_queried_tokens,
            prefix_hit_tokens: self.prefix_hit_tokens + next.prefix_hit_tokens,
            cpu_hit_tokens: self.cpu_hit_tokens + next.cpu_hit_tokens,
            remote_tokens: self.remote_tokens + next.remote_tokens,
            preemptions: self.preemptions + next.preemptions,
            adapter_loads: self.adapter_loads + next.adapter_loads,
            prompt_tokens: self.prompt_tokens + next.prompt_tokens,
            generation_tokens: self.generation_tokens + next.generation_tokens,
            computed_tokens: self.computed_tokens + next.computed_tokens,
            recomputed_tokens: self.recomputed_tokens + next.recomputed_tokens,
            late_hit_tokens: self.late_hit_tokens + next.late_hit_tokens,
            steps: self.steps + next.steps,
            busy: self.busy + next.busy,
            ..next
        }
    }
}

// === impl EngineRequest ===

impl EngineRequest {
    /// The hash of block `index` of prompt and answer together.
    pub fn block(&self, index: u32) -> BlockHash {
        match self.prompt_blocks.get(index as usize) {
            Some(hash) => *hash,
            None => own_block(self.output_seed, index),
        }
    }
}

/// The hash of block `index` of a sequence, counted from the beginning of its prompt, if the block is the sequence's
/// own: not among the given prompt blocks. A later turn that continues this sequence's prompt and answer uses the
/// same function for their blocks.
pub fn own_block(output_seed: u64, index: u32) -> BlockHash {
    BlockHash(mix(mix(output_seed) ^ u64::from(index)))
}

/// SplitMix64's finaliser (Steele, Lea and Flood, 2014): a bijection whose output bits all depend on all input bits.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
