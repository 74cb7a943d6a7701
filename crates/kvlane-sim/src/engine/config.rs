//! Size and speed of an engine.

use kvlane_core::timing::TimingModel;

use super::adapters::AdapterSlots;
use crate::pool::Eviction;
use crate::tier::CpuTier;

/// Size and speed of one engine. Zero blocks, tokens and sequences count as one.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Duration of a step.
    pub timing: TimingModel,
    /// Tokens in a KV block; vLLM's default is 16.
    pub block_tokens: u32,
    /// KV blocks in the cache.
    pub blocks: u32,
    /// Maximum sequences in one step. At most `max_num_batched_tokens` are used, as vLLM requires: every running
    /// sequence gets a token in every step.
    pub max_num_seqs: u32,
    /// Maximum tokens in one step.
    pub max_num_batched_tokens: u32,
    /// Tokens after the first that one [`EngineEvent::Tokens`](super::EngineEvent::Tokens) reports: 1 for one event
    /// per token, 0 for no such events.
    pub token_every: u32,
    /// Whether the engine reports changes of its cache, see
    /// [`Engine::take_kv_events`](super::Engine::take_kv_events).
    pub kv_events: bool,
    /// Eviction policy.
    pub eviction: Eviction,
    /// Host memory as a second tier; unused with [`Eviction::Infinite`], which evicts nothing.
    pub cpu_tier: Option<CpuTier>,
    /// Batching of prefill and decode.
    pub batching: Batching,
    /// Slots for adapters; without them, each is always loaded.
    pub adapters: Option<AdapterSlots>,
}

/// Batching of prefill and decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Batching {
    /// Each step decodes and gives its remaining tokens to prompts: vLLM V1's chunked prefill.
    #[default]
    Mixed,
    /// Each step only prefills, whenever a prompt can proceed, or only decodes: SGLang without
    /// `--enable-mixed-chunk`.
    PrefillFirst,
}

// === impl EngineConfig ===

impl EngineConfig {
    /// vLLM's configuration for this model and machine: all memory up to `memory_share` for the cache, and the batch
    /// limits of `get_batch_defaults` (`vllm/engine/arg_utils.py`) for the API server. Every token is reported, KV
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
            adapters: None,
        }
    }

    /// With zeros that would stop the engine replaced by one, and no more seats than tokens.
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

    /// Seconds to load `blocks` blocks from host memory.
    pub(super) fn load_secs(&self, blocks: u32) -> f64 {
        let bytes = self.timing.kv_bytes_per_token() as f64 * f64::from(self.block_tokens);
        self.cpu_tier.map_or(0.0, |tier| tier.load_secs(bytes * f64::from(blocks)))
    }
}
