//! The configuration of routers: sections `routing` and `breaker`, and budgets.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::budget::PerSecond;
use kvlane_core::policy::{PolicyConfig, name_or_config};
use serde::{Deserialize, Deserializer, Serialize};

use kvlane_core::config::{ConfigError, within};

/// How requests are placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Routing {
    /// The policy of every pool that `pools` does not name.
    #[serde(deserialize_with = "name_or_config")]
    pub policy: PolicyConfig,
    /// A second policy that is asked of every decision what it would have done, for `GET /whatif`.
    #[serde(deserialize_with = "policy_or_none")]
    pub shadow_policy: Option<PolicyConfig>,
    /// What differs for the pool of one model.
    pub pools: BTreeMap<String, PoolOverride>,
    /// How long the engines take: a timing file that `kvlane calibrate` wrote, or `model@gpu`. It is learned; with one,
    /// learning begins there.
    pub timing: Option<String>,
    /// Whether new conversations wait while those that go on fill the fleet's caches.
    pub session_admission: bool,
    /// Requests in flight per pool beyond which others wait; 0 is no limit.
    pub max_concurrent_requests: u32,
    /// Requests in flight per endpoint beyond which it takes none; 0 is no limit. While none takes any, they wait.
    pub max_requests_per_endpoint: u32,
    /// Requests that may wait per pool; beyond it they are shed with 429.
    pub queue_size: u32,
    /// Time a request may wait for its place.
    #[serde(with = "humantime_serde")]
    pub queue_timeout: Duration,
    /// Prompt bytes per block of the prefix index.
    pub block_bytes: u32,
    /// Bytes the prefix index of one pool may use.
    pub index_memory: usize,
    /// Time after which an unused prefix counts as evicted.
    #[serde(with = "humantime_serde")]
    pub index_ttl: Duration,
    /// File in which what workers were given is kept over a restart of the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_snapshot: Option<PathBuf>,
    /// Time between two writings of it.
    #[serde(with = "humantime_serde")]
    pub index_snapshot_interval: Duration,
    /// Decisions kept per pool for `GET /decisions`.
    pub receipts: u32,
    /// Seed of random choices.
    pub seed: u64,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            policy: PolicyConfig::FleetCost(Default::default()),
            shadow_policy: None,
            pools: BTreeMap::new(),
            timing: None,
            session_admission: false,
            max_concurrent_requests: 0,
            max_requests_per_endpoint: 0,
            queue_size: 100,
            queue_timeout: Duration::from_secs(60),
            block_bytes: 256,
            index_memory: 256 << 20,
            index_ttl: Duration::from_secs(1800),
            index_snapshot: None,
            index_snapshot_interval: Duration::from_secs(30),
            receipts: 1024,
            seed: 0,
        }
    }
}

/// What differs for one pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolOverride {
    /// Its policy.
    #[serde(deserialize_with = "some_policy", skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyConfig>,
    /// How long its engines take: a timing file, or `model@gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<String>,
    /// Who counts its tokens: the path of a tokenizer, `auto`, `engine` or `estimate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// A file with its chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
}

/// When an endpoint that fails requests is given no more of them, and for how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Breaker {
    /// Failed requests in a row after which it is given none for a while; 0 is never.
    pub failure_threshold: u32,
    /// For how long at first. It doubles with each failure that follows.
    #[serde(with = "humantime_serde")]
    pub cooldown: Duration,
    /// For how long at most.
    #[serde(with = "humantime_serde")]
    pub cooldown_max: Duration,
    /// How long one that comes back is given less than its share.
    #[serde(with = "humantime_serde")]
    pub slow_start: Duration,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            failure_threshold: 3,
            cooldown: Duration::from_secs(1),
            cooldown_max: Duration::from_secs(60),
            slow_start: Duration::from_secs(10),
        }
    }
}

/// A share of the requests, and what is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Budget {
    /// Share of the requests that arrive, 0 to 1.
    pub share: Share,
    /// So many per second in any case.
    pub per_second: PerSecond,
}

impl Default for Budget {
    fn default() -> Self {
        Self { share: Share::of(0.2), per_second: PerSecond::of(10.0) }
    }
}

fn some_policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyConfig>, D::Error> {
    name_or_config(deserializer).map(Some)
}

fn policy_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyConfig>, D::Error> {
    #[derive(Deserialize)]
    struct Said(#[serde(deserialize_with = "name_or_config")] PolicyConfig);

    Ok(Option::<Said>::deserialize(deserializer)?.map(|Said(policy)| policy))
}

/// Checks the whole numbers among a policy's parameters; the others are of bounded types.
pub fn validate_policy(field: &str, policy: &PolicyConfig) -> Result<(), ConfigError> {
    let count = |name: &str, value: u32, most: u32| within(&format!("{field}.{name}"), value, 1, most);
    match policy {
        PolicyConfig::PrefixAware(config) => {
            count("saturation_inflight", config.saturation_inflight, u32::MAX)
        }
        PolicyConfig::Dynamo(config) => count("block_tokens", config.block_tokens, u32::MAX),
        PolicyConfig::ConsistentHash(config) => count("virtual_nodes", config.virtual_nodes, 4096),
        PolicyConfig::PrefixHash(config) => count("virtual_nodes", config.virtual_nodes, 4096),
        PolicyConfig::Dlpm(config) => count("quantum_tokens", config.quantum_tokens, u32::MAX),
        _ => Ok(()),
    }
}
