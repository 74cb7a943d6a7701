//! Size and speed of an engine.

use kvlane_core::timing::TimingModel;

use crate::pool::Eviction;
use crate::tier::CpuTier;

/// Size and speed of one engine. Zero counts of blocks, tokens and sequences are taken as one.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// How long a step takes.
    pub timing: TimingModel,
    /// Tokens in a KV block; vLLM's default is 16.
    pub block_tokens: u32,
    /// KV blocks in the cache.
    pub blocks: u32,
    /// Most sequences in one step. No more than `max_num_batched_tokens` count, as vLLM demands: every running sequence
    /// gets a token in every step.
    pub max_num_seqs: u32,
    /// Most tokens in one step.
    pub max_num_batched_tokens: u32,
    /// Tokens after the first that one [`EngineEvent::Tokens`](super::EngineEvent::Tokens) tells of: 1 for one event
    /// per token, 0 for no such events.
    pub token_every: u32,
    /// Whether the engine tells what its cache holds, see [`Engine::take_kv_events`](super::Engine::take_kv_events).
    pub kv_events: bool,
    /// What a full cache loses first.
    pub eviction: Eviction,
    /// The host's memory as a second tier; idle with [`Eviction::Infinite`], which loses nothing to it.
    pub cpu_tier: Option<CpuTier>,
    /// How prompts and answers share steps.
    pub batching: Batching,
}

/// How prompts and answers share steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Batching {
    /// Each step decodes and gives prompts what is left of its tokens: vLLM V1's chunked prefill.
    #[default]
    Mixed,
    /// A step is either of prompts, whenever one can go on, or decodes: SGLang without `--enable-mixed-chunk`.
    PrefillFirst,
}

// === impl EngineConfig ===

impl EngineConfig {
    /// What vLLM would choose for this model and machine: all memory up to `memory_share` for the cache, and the
    /// batch limits of `get_batch_defaults` (`vllm/engine/arg_utils.py`) for the API server. Every token is told, KV
    /// events are not.
    pub fn vllm(timing: TimingModel, block_tokens: u32, memory_share: f64) -> Self {
        let block_tokens = block_tokens.max(1);
        let blocks = timing.kv_capacity_tokens(memory_share) / u64::from(block_tokens);
        let large = timing.hardware.name != "a100" && timing.hardware.memory_bytes >= 70.0 * 1_073_741_824.0;
        let (max_num_seqs, max_num_batched_tokens) = if large { (1024, 8192) } else { (256, 2048) };
        Self {
            timing,
            block_tokens,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            max_num_seqs,
            max_num_batched_tokens,
            token_every: 1,
            kv_events: false,
            eviction: Eviction::Lru,
            cpu_tier: None,
            batching: Batching::Mixed,
        }
    }

    /// With every zero that would stop the engine made a one, and no more seats than tokens.
    pub(super) fn settled(mut self) -> Self {
        for limit in [
            &mut self.block_tokens,
            &mut self.blocks,
            &mut self.max_num_seqs,
            &mut self.max_num_batched_tokens,
        ] {
            *limit = (*limit).max(1);
        }
        self.max_num_seqs = self.max_num_seqs.min(self.max_num_batched_tokens);
        self
    }

    /// Seconds to bring `blocks` blocks back from the host's memory.
    pub(super) fn load_secs(&self, blocks: u32) -> f64 {
        let bytes = self.timing.kv_bytes_per_token() as f64 * f64::from(self.block_tokens);
        self.cpu_tier.map_or(0.0, |tier| tier.load_secs(bytes * f64::from(blocks)))
    }
}
