//! What kvlane knows of an inference engine. Each engine's own file fills in one [`EngineKind`].

use std::fmt;

use serde_json::Value;

use super::feed::{FeedError, FeedSource};
use super::tokenize::Tokenize;
use crate::prometheus::Sample;

/// A kind of inference engine. Everything that differs between engines is a field here; what an engine does not have
/// stays as in [`EngineKind::BARE`].
pub struct EngineKind {
    /// Its name in reports and configurations.
    pub name: &'static str,
    /// Its name in texts.
    pub title: &'static str,
    /// The `owned_by` of its models in `GET /v1/models`.
    pub owner: &'static str,
    /// Metrics of its load.
    pub(super) load: LoadNames,
    /// Metrics of its prefix cache.
    pub(super) cache: CacheNames,
    /// Counters of the times between its output tokens: how many, and their seconds together. For renamed ones, the newest
    /// names come first and the first ones present are used.
    pub(super) intervals: &'static [(&'static str, &'static str)],
    /// Metrics that its core changes when it works. Those of its HTTP server are not progress: the server answers, and
    /// counts its answers, while the core hangs.
    pub(super) progress: &'static [&'static str],
    /// The label that distinguishes data-parallel ranks, where one metrics page describes several.
    pub(super) rank_label: Option<&'static str>,
    /// Texts of an error after which the engine is dead, in lower case.
    pub(crate) dead: &'static [&'static str],
    /// The token counts in its answers, if they are not only in `usage`.
    pub(crate) usage: Option<UsageObject>,
    /// Lengths in an entry of its model list.
    pub(crate) card: CardNames,
    /// Whether it supports `continue_final_message`, so that a broken chat can continue on another endpoint.
    pub continues_messages: bool,
    /// Where it describes its KV event feeds. `None` if it publishes no KV events.
    pub feeds: Option<FeedQuery>,
    /// How it tokenizes a request.
    pub tokenize: Tokenize,
    /// How its prefix cache is emptied.
    pub cache_reset: Option<CacheReset>,
    /// How it loads and unloads adapters while it runs.
    pub adapter_paths: Option<AdapterPaths>,
    /// Where it reports its version: paths, each with the key in the answer.
    pub versions: &'static [(&'static str, &'static str)],
    /// Where it reports whether prefix caching is on.
    pub prefix_caching: PrefixCaching,
    /// Whether its cache consists of blocks. If not, it reuses token by token.
    pub has_blocks: bool,
    /// Where it describes its configuration.
    pub settings: Settings,
    /// How an operator turns on what kvlane needs.
    pub advice: Advice,
}

/// An engine's metric names for the fields of a [`LoadReport`](kvlane_core::load::LoadReport). For a renamed gauge, the
/// newest name comes first and the first one present is used.
pub(super) struct LoadNames {
    /// Gauge of sequences in the batch. It identifies the engine.
    pub(super) running: &'static str,
    /// Gauge of requests in the queue.
    pub(super) waiting: &'static str,
    /// Gauges of the KV cache usage, 0 to 1.
    pub(super) kv_usage: &'static [&'static str],
    /// The sample with the KV cache size, if any.
    pub(super) kv_capacity: Option<Capacity>,
}

/// A sample with the size of a KV cache.
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub(super) name: &'static str,
    /// Reads the capacity in tokens.
    pub(super) tokens: fn(&Sample<'_>) -> Option<f64>,
}

/// An engine's metric names for its prefix cache. For a renamed counter, the newest name comes first and the first one
/// present is used.
pub(super) struct CacheNames {
    /// The sample and the label that hold the block size.
    pub(super) block_tokens: Option<(&'static str, &'static str)>,
    /// Counters of prompt tokens looked up in the cache.
    pub(super) queried_tokens: &'static [&'static str],
    /// Counters of prompt tokens found in the cache.
    pub(super) hit_tokens: &'static [&'static str],
    /// Counters of prompt tokens fetched from elsewhere by a KV connector, which the other two leave out.
    pub(super) external_hit_tokens: &'static [&'static str],
}

/// An object in an engine's answers with token counts of its own.
pub(crate) struct UsageObject {
    /// Its key in the answer, with quotes.
    pub(crate) key: &'static str,
    /// Whether it adds to an answer's `usage`; otherwise it is read only without one.
    pub(crate) adds: bool,
    /// Names of its own; OpenAI's names are read too.
    pub(crate) names: Option<ComputedNames>,
}

/// Names of token counts of which the prompt's excludes cached tokens.
pub(crate) struct ComputedNames {
    /// Computed tokens of the prompt.
    pub(crate) computed: &'static str,
    /// Tokens of the prompt from the cache.
    pub(crate) cached: &'static str,
    /// Output tokens.
    pub(crate) output: &'static str,
}

/// JSON pointers to lengths in an entry of a model list.
pub(crate) struct CardNames {
    /// Maximum of prompt and output tokens together.
    pub(crate) max_model_len: Option<&'static str>,
    /// Context length that the model was trained for.
    pub(crate) trained_len: Option<&'static str>,
}

/// Where an engine describes its KV event feeds.
pub struct FeedQuery {
    /// Path of the question, a GET.
    pub path: &'static str,
    /// Reads the answer. Empty if the engine publishes nothing.
    pub parse: fn(&str) -> Result<Vec<FeedSource>, FeedError>,
}

/// How an engine's prefix cache is emptied.
pub struct CacheReset {
    /// Path of the request, a POST without a body.
    pub path: &'static str,
    /// What the engine needs to have this path, if it is not always there.
    pub needs: Option<&'static str>,
}

/// How an engine loads and unloads adapters (LoRA) while it runs.
pub struct AdapterPaths {
    /// Path of a load, a POST of `{"lora_name": …, "lora_path": …}`.
    pub load: &'static str,
    /// Path of an unload, a POST of `{"lora_name": …}`.
    pub unload: &'static str,
    /// What the engine needs to have these paths.
    pub needs: &'static str,
}

/// Where an engine reports whether prefix caching is on.
pub enum PrefixCaching {
    /// Nowhere.
    Unreported,
    /// On its metrics page.
    Page(fn(&str) -> Option<bool>),
    /// In the answer to a GET of this path.
    Answer(&'static str, fn(&Value) -> Option<bool>),
    /// It is always on, in this form.
    Always(&'static str),
}

/// Where an engine describes its configuration, and under which names, at any depth of the answer.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Path of the question, a GET.
    pub path: Option<&'static str>,
    /// Maximum of prompt and output tokens together.
    pub max_model_len: Option<&'static str>,
    /// Tokens of a KV block.
    pub block_tokens: Option<&'static str>,
    /// Maximum sequences in a step.
    pub max_num_seqs: Option<&'static str>,
    /// Maximum tokens in a step.
    pub max_num_batched_tokens: Option<&'static str>,
    /// KV cache capacity in tokens.
    pub kv_capacity_tokens: Option<&'static str>,
}

/// How an operator turns on what kvlane needs. `None`: not needed, or as for [`ASSUMED`](super::ASSUMED).
#[derive(Clone, Copy, Debug)]
pub struct Advice {
    /// The flag for its metrics page, if it is off by default.
    pub metrics: Option<&'static str>,
    /// The flag that turned prefix caching off, if it is named.
    pub caching_off: Option<&'static str>,
    /// What to do if prefix caching is off.
    pub caching: Option<&'static str>,
    /// What to do if it publishes no KV events.
    pub kv_events: Option<&'static str>,
    /// The setting that opens the replay socket of KV events.
    pub replay_setting: Option<&'static str>,
    /// What to do if replayed KV events have gaps.
    pub replay_gaps: Option<&'static str>,
    /// What to do if its answers do not report cached tokens.
    pub cached_tokens: Option<&'static str>,
}

// === impl EngineKind ===

impl EngineKind {
    /// An engine without names of its own: the base of every kind.
    pub(super) const BARE: Self = Self {
        name: "",
        title: "",
        owner: "",
        load: LoadNames { running: "", waiting: "", kv_usage: &[], kv_capacity: None },
        cache: CacheNames {
            block_tokens: None,
            queried_tokens: &[],
            hit_tokens: &[],
            external_hit_tokens: &[],
        },
        intervals: &[],
        progress: &[],
        rank_label: None,
        dead: &[],
        usage: None,
        card: CardNames { max_model_len: None, trained_len: None },
        continues_messages: false,
        feeds: None,
        tokenize: Tokenize::VLLM,
        cache_reset: None,
        adapter_paths: None,
        versions: &[],
        prefix_caching: PrefixCaching::Unreported,
        has_blocks: true,
        settings: Settings {
            path: None,
            max_model_len: None,
            block_tokens: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            kv_capacity_tokens: None,
        },
        advice: Advice {
            metrics: None,
            caching_off: None,
            caching: None,
            kv_events: None,
            replay_setting: None,
            replay_gaps: None,
            cached_tokens: None,
        },
    };

    /// The data-parallel rank of a sample of this engine, if it has one.
    pub(super) fn rank(&self, sample: &Sample<'_>) -> Option<u32> {
        sample.label(self.rank_label?)?.parse().ok()
    }
}

impl PartialEq for EngineKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
