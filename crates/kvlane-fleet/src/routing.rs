//! The configuration of routers: sections `routing` and `breaker`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::config::{TIME, TIME_OR_ZERO};
use kvlane_core::policy::{PolicyConfig, name_or_config};
use kvlane_core::section;
use serde::{Deserialize, Deserializer};

section! {
    /// How requests are placed.
    pub struct Routing {
        /// Placement policy: its name, or its name and parameters, as in `{name: cache_aware, cache_threshold: 0.3}`.
        ///
        /// The policies are fleet_cost (also called auto), cache_aware, prefix_aware, lmetric, least_prefill,
        /// least_tokens, least_load, power_of_two, round_robin, random, or policies of other routers: weighted,
        /// llm_d_affinity, dynamo, aibrix, preble, conductor, kv_aware, smg_least_load, vllm_dp, consistent_hash,
        /// prefix_hash, session_sticky, heavy_warm, linear, heavy_offload, dlpm.
        #[serde(deserialize_with = "name_or_config")]
        pub policy: PolicyConfig = PolicyConfig::FleetCost(Default::default());
        /// A second policy that is evaluated at each decision without effect on placement, for `GET /whatif`.
        #[serde(deserialize_with = "policy_or_none")]
        pub shadow_policy: Option<PolicyConfig> = None;
        /// The model of requests that name none, where several are served; otherwise they get 400.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub default_model: Option<String> = None;
        /// Settings of one model's pool, as in `llama-3.1-8b: {policy: lmetric, timing: llama.json, tokenizer:
        /// /models/llama-3.1-8b}`.
        pub pools: BTreeMap<String, PoolOverride> = BTreeMap::new();
        /// Timing of the engines: a file that `kvlane calibrate` wrote, or a preset such as `qwen3-32b@h100x2`. A
        /// start value: rates are learned from answers in any case. With it, `GET /decisions` contains predicted
        /// TTFT.
        pub timing: Option<String> = None;
        /// Whether new conversations are queued while active ones fill the fleet's caches.
        pub session_admission: bool = false;
        /// Maximum requests in flight per pool; further ones are queued; 0 is no limit.
        pub max_concurrent_requests: u32 = 0;
        /// Maximum requests in flight per endpoint; 0 is no limit. While all are full, requests are queued.
        pub max_requests_per_endpoint: u32 = 0;
        /// Maximum queued requests per pool; further ones get 429.
        pub queue_size: u32 = 100, in 0..=1_000_000;
        /// Timeout of a request in the queue.
        #[serde(with = "humantime_serde")]
        pub queue_timeout: Duration = Duration::from_secs(60), in TIME;
        /// How long requests for a model wait for its first endpoint while it has none, for pools that scale to zero; 0s:
        /// they get 503 at once. At most `queue_size` requests wait per model.
        #[serde(with = "humantime_serde")]
        pub empty_pool_timeout: Duration = Duration::ZERO, in TIME_OR_ZERO;
        /// A URL that gets `{"model": "m", "waiting": 3}` by POST when requests begin to wait for the first endpoint of a model,
        /// and every 10 s while they do: for a scaler that starts engines.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub empty_pool_webhook: Option<String> = None;
        /// Prompt bytes per block of the prefix index: 256 bytes are about 64 tokens.
        pub block_bytes: u32 = 256, in 16..=1 << 20;
        /// Maximum bytes of the approximate prefix index of one pool.
        pub index_memory: usize = 256 << 20;
        /// Time after which an unused prefix counts as evicted by its engine.
        #[serde(with = "humantime_serde")]
        pub index_ttl: Duration = Duration::from_secs(1800), in TIME;
        /// A snapshot file of the approximate index, for restarts of the gateway, as in
        /// `/var/lib/kvlane/index.snapshot`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub index_snapshot: Option<PathBuf> = None;
        /// Time between two snapshots of the approximate index.
        #[serde(with = "humantime_serde")]
        pub index_snapshot_interval: Duration = Duration::from_secs(30), in TIME;
        /// Decisions kept per pool for `GET /decisions`.
        pub receipts: u32 = 1024, in 0..=100_000;
        /// Seed of random choices.
        pub seed: u64 = 0;
    }
}

section! {
    /// Settings of one pool.
    pub struct PoolOverride {
        /// Its policy.
        #[serde(deserialize_with = "some_policy", skip_serializing_if = "Option::is_none")]
        pub policy: Option<PolicyConfig> = None;
        /// The timing of its engines: a timing file, or `model@gpu`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub timing: Option<String> = None;
        /// How its tokens are counted: the path of a tokenizer, `auto`, `engine` or `estimate`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub tokenizer: Option<String> = None;
        /// A file with its chat template.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub chat_template: Option<PathBuf> = None;
    }
}

section! {
    /// When an endpoint that fails requests gets no more of them, and for how long.
    pub struct Breaker {
        /// Circuit breaker: failed requests in a row after which an endpoint gets none for a while; 0 is never.
        pub failure_threshold: u32 = 3;
        /// First cool-down: time without requests for an endpoint that fails. It doubles with each further failure.
        /// Then one request is let through.
        #[serde(with = "humantime_serde")]
        pub cooldown: Duration = Duration::from_secs(1), in TIME;
        /// Circuit breaker: longest cool-down of an endpoint that fails.
        #[serde(with = "humantime_serde")]
        pub cooldown_max: Duration = Duration::from_secs(60), in TIME;
        /// Slow start: time over which the share of a recovered endpoint grows to its full share.
        #[serde(with = "humantime_serde")]
        pub slow_start: Duration = Duration::from_secs(10), in TIME_OR_ZERO;
    }
}

fn some_policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyConfig>, D::Error> {
    name_or_config(deserializer).map(Some)
}

pub(crate) fn policy_or_none<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PolicyConfig>, D::Error> {
    #[derive(Deserialize)]
    struct Said(#[serde(deserialize_with = "name_or_config")] PolicyConfig);

    Ok(Option::<Said>::deserialize(deserializer)?.map(|Said(policy)| policy))
}
