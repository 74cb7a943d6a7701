//! A simulation as a file: fleet, workload, policies, and published figures of the real system.
//!
//! `kvlane simulate` runs a [`Scenario`], read from a file or built from flags.

mod closed;
mod faults;
mod fleet;
mod plain;
mod points;
mod progress;
mod run;
pub mod show;

use std::fmt;
use std::path::PathBuf;

use kvlane_core::disaggregation::{Part, Role};
use kvlane_core::policy::{PolicyConfig, fleet_cost, name_or_config};
use kvlane_sim::Hints;
use kvlane_sim::pool::Eviction;
use kvlane_trace::adapters::Popularity;
use kvlane_trace::generate::Workload;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

pub use closed::{ClosedLoop, ClosedStart, Conversations};
pub use faults::FaultSpec;
pub use fleet::{Fleet, Group};
pub use plain::{Plain, PlainError};
pub(crate) use points::{Source, conversations, retime};
pub(crate) use run::Setting;
pub use run::{Aside, Cell, Found, Open, Row, RunError, Simulation, run, wall_clock};

use crate::figures::{Figures, Judgement};

/// A simulation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name.
    pub scenario: String,
    /// What it shows, and the source of its figures.
    #[serde(default)]
    pub about: String,
    /// The engines.
    pub fleet: Fleet,
    /// The requests.
    pub workload: WorkloadSpec,
    /// The policies to compare, by name or as [`Arm`]s.
    pub policies: Vec<Arm>,
    /// Faults, at times from the start of each run.
    #[serde(default)]
    pub faults: Vec<FaultSpec>,
    /// Number of runs of each, under consecutive seeds.
    #[serde(default = "one")]
    pub seeds: u32,
    /// The first seed.
    #[serde(default = "one")]
    pub first_seed: u32,
    /// Limits for goodput and classes.
    #[serde(default)]
    pub judgement: Judgement,
    /// Measured figures of a real fleet.
    #[serde(default)]
    pub published: Vec<Published>,
}

/// Requests and their arrivals. Exactly one of `trace` and `generate`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkloadSpec {
    /// A trace file, or the name of one that comes with kvlane: `mooncake-conversation`, `weka-agentic` or
    /// `azure-conversation`.
    pub trace: Option<PathBuf>,
    /// A generated workload.
    pub generate: Option<Workload>,
    /// Adapters that conversations ask for, drawn for each. Without it, those of the trace, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Popularity>,
    /// Factors on the rate at which conversations begin; one run for each. The default for traces, and for generated
    /// workloads without either of the following.
    pub load: Vec<f64>,
    /// Conversations begin at a rate.
    pub open_loop: Option<OpenLoop>,
    /// A number of clients, each of which begins its next conversation when the previous one ends.
    pub closed_loop: Option<ClosedLoop>,
}

/// Conversations begin as a Poisson process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenLoop {
    /// Conversations per second, and seconds.
    pub stages: Vec<Stage>,
    /// Whether the stages are one run: a stage begins `pause_s` after the previous one is answered, with its caches.
    /// Otherwise each is a separate run.
    #[serde(default)]
    pub back_to_back: bool,
    /// Seconds between two stages.
    #[serde(default)]
    pub pause_s: f64,
    /// A stage before the first that is not reported.
    #[serde(default)]
    pub warm_up: Option<Stage>,
}

/// A rate and its duration: `rate * seconds` conversations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Conversations per second.
    pub rate: f64,
    /// Duration.
    pub seconds: f64,
}

/// A policy and its inputs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arm {
    /// Its name.
    pub arm: String,
    /// The policy.
    pub policy: PolicyConfig,
    /// Source of cache knowledge: KV events or the router's own dispatches.
    pub cache_knowledge: CacheKnowledge,
    /// Seconds from the client to the engine: network, HTTP, tokenization, decision.
    pub routing_delay_s: f64,
    /// Seconds between two load reports of an engine; `null` for no reports.
    pub report_interval_s: Option<f64>,
    /// Age of a report when it arrives, in seconds.
    pub report_age_s: f64,
    /// Seconds from caching a block until the router knows.
    pub kv_event_delay_s: f64,
    /// Maximum additional seconds, drawn for each batch of events.
    pub kv_event_jitter_s: f64,
    /// Share of the batches that are lost.
    pub kv_events_lost: f64,
    /// Share of the batches that arrive twice.
    pub kv_events_duplicated: f64,
    /// Number of gateways, or of each cell, to which requests go in turns.
    pub gateways: u16,
    /// Number of cells behind a front tier; 1 for one fleet without a front tier.
    pub cells: u16,
    /// The policy by which the front tier chooses a cell.
    pub front_policy: PolicyConfig,
    /// Seconds between two sketches of its prompts that a cell tells the front tier; `null` if it tells none.
    pub sketch_interval_s: Option<f64>,
    /// Bits of a sketch for each mark in it.
    pub sketch_bits: u32,
    /// Seconds between two loads that a cell tells the front tier.
    pub cell_load_interval_s: f64,
    /// Seconds until the front tier has heard a cell.
    pub cell_delay_s: f64,
    /// Seconds between two news that each of them tells the others; `null` if they tell nothing.
    pub exchange_interval_s: Option<f64>,
    /// Least seconds between two news, if a request was placed in between; `null`: as `exchange_interval_s`.
    pub exchange_gap_s: Option<f64>,
    /// Seconds until others have heard.
    pub exchange_delay_s: f64,
    /// Maximum additional seconds, drawn for each news and hearer.
    pub exchange_jitter_s: f64,
    /// Share of news that is lost.
    pub exchange_lost: f64,
    /// Number of engines that only prefill, the last ones; the others only decode. 0 for none.
    pub prefill_engines: u32,
    /// What the engines are for.
    pub roles: Roles,
    /// Picks where prompts are computed that another engine decodes, if `policy` knows no price of that; without it, a
    /// second one like `policy`.
    pub prefill_policy: Option<PolicyConfig>,
    /// Uncached prompt tokens from which a request is split, where its price should not decide.
    pub split_tokens_min: Option<u32>,
    /// Minimum number of tokens for an engine to fetch blocks that another has cached rather than compute them;
    /// without it, never.
    pub fetch_tokens_min: Option<u32>,
    /// Eviction policy, if it differs from the fleet's.
    pub eviction: Option<Eviction>,
    /// Whether new conversations are queued while active ones fill the fleet's caches.
    pub session_admission: bool,
    /// Requests in flight at one engine beyond which further ones are queued; 0 for no limit.
    #[serde(skip_serializing_if = "is_unlimited")]
    pub max_requests_per_endpoint: u32,
    /// Then: maximum requests in the router's queue.
    pub queue_len_max: u32,
    /// And their timeout, in seconds.
    pub queue_timeout_s: f64,
    /// What the router is told about requests beside their prompts.
    #[serde(skip_serializing_if = "is_usual")]
    pub hints: Hints,
    /// Whether the router is told how fast the fleet's first engine is, as `--timing` does, instead of learning it from the start.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub timing: bool,
}

/// What the engines of an arm are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Roles {
    /// For whole requests; with `prefill_engines`, for prompts or for answers, and every request is split.
    #[default]
    Fixed,
    /// With `prefill_engines`, too, but those that decode also serve whole requests, where that costs less.
    Preferred,
    /// All of them for everything: a request is split where that costs less.
    Elastic,
}

/// Cache knowledge of the router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheKnowledge {
    /// Its own dispatches.
    #[default]
    Approximate,
    /// The engines' KV events.
    Exact,
}

/// Published figures of a real fleet, with the arm and the load of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// The arm.
    pub arm: String,
    /// The stage's rate; without this and the next two, figures of the arm as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// The number of clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    /// The load factor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// The figures, with the names of simulated ones.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Minimum interval of load reports.
const REPORT_INTERVAL_MIN_S: f64 = 1e-3;
/// Most bits of a sketch for each mark.
const SKETCH_BITS_MAX: u32 = 64;
/// The front tier's policy, if an arm names none.
const FRONT_POLICY: PolicyConfig = PolicyConfig::FleetCost(fleet_cost::Config { without: None });

fn one() -> u32 {
    1
}

/// Whether hints are those of an arm that names none.
fn is_usual(hints: &Hints) -> bool {
    *hints == Hints::default()
}

/// Whether a number of requests is no limit.
fn is_unlimited(requests: &u32) -> bool {
    *requests == 0
}

// === impl Arm ===

impl Arm {
    /// A policy with the rest at its defaults, named by the policy's name.
    pub fn new(policy: PolicyConfig) -> Self {
        Self {
            arm: policy.name().to_owned(),
            policy,
            cache_knowledge: CacheKnowledge::Approximate,
            routing_delay_s: 0.001,
            report_interval_s: Some(1.0),
            report_age_s: 0.0,
            kv_event_delay_s: 0.005,
            kv_event_jitter_s: 0.0,
            kv_events_lost: 0.0,
            kv_events_duplicated: 0.0,
            gateways: 1,
            cells: 1,
            front_policy: FRONT_POLICY,
            sketch_interval_s: Some(5.0),
            sketch_bits: 6,
            cell_load_interval_s: 0.1,
            cell_delay_s: 0.05,
            exchange_interval_s: Some(0.02),
            exchange_gap_s: None,
            exchange_delay_s: 0.001,
            exchange_jitter_s: 0.0,
            exchange_lost: 0.0,
            prefill_engines: 0,
            roles: Roles::Fixed,
            prefill_policy: None,
            split_tokens_min: None,
            fetch_tokens_min: None,
            eviction: None,
            session_admission: false,
            max_requests_per_endpoint: 0,
            queue_len_max: 10_000,
            queue_timeout_s: 86_400.0,
            hints: Hints::default(),
            timing: false,
        }
    }

    /// # Errors
    /// If a delay is invalid.
    pub(crate) fn check(&self) -> Result<(), RunError> {
        let span = |secs: f64| (0.0..1e6).contains(&secs);
        let delays = [
            self.routing_delay_s,
            self.report_age_s,
            self.kv_event_delay_s,
            self.kv_event_jitter_s,
            self.queue_timeout_s,
            self.exchange_delay_s,
            self.exchange_jitter_s,
            self.cell_delay_s,
        ];
        let share = |share: f64| (0.0..=1.0).contains(&share);
        if !share(self.kv_events_lost) || !share(self.kv_events_duplicated) {
            return Err(RunError::Policies(format!(
                "`{}`: shares of KV events must be between 0 and 1",
                self.arm
            )));
        }
        if !share(self.exchange_lost) || self.gateways == 0 {
            let why = "`exchange_lost` must be between 0 and 1, and `gateways` at least 1";
            return Err(RunError::Policies(format!("`{}`: {why}", self.arm)));
        }
        if self.cells == 0 || !(1..=SKETCH_BITS_MAX).contains(&self.sketch_bits) {
            let why = format!("`cells` must be at least 1, and `sketch_bits` 1 to {SKETCH_BITS_MAX}");
            return Err(RunError::Policies(format!("`{}`: {why}", self.arm)));
        }
        let interval = |secs| (REPORT_INTERVAL_MIN_S..1e6).contains(&secs);
        let intervals = [
            self.report_interval_s,
            self.exchange_interval_s,
            self.exchange_gap_s,
            self.sketch_interval_s,
            Some(self.cell_load_interval_s),
        ];
        if delays.into_iter().all(span) && intervals.into_iter().flatten().all(interval) {
            return Ok(());
        }
        let why = format!(
            "`{}`: delays must be at least 0 s, and report_interval_s, exchange_interval_s, exchange_gap_s, \
             sketch_interval_s and cell_load_interval_s at least 0.001",
            self.arm
        );
        Err(RunError::Policies(why))
    }
}

/// An arm as a map in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ArmMap {
    arm: Option<String>,
    #[serde(deserialize_with = "name_or_config")]
    policy: PolicyConfig,
    cache_knowledge: Option<CacheKnowledge>,
    routing_delay_s: Option<f64>,
    /// `null` is a value too: no reports.
    #[serde(default, deserialize_with = "given")]
    report_interval_s: Option<Option<f64>>,
    report_age_s: Option<f64>,
    kv_event_delay_s: Option<f64>,
    kv_event_jitter_s: Option<f64>,
    kv_events_lost: Option<f64>,
    kv_events_duplicated: Option<f64>,
    gateways: Option<u16>,
    cells: Option<u16>,
    front_policy: Option<PolicyName>,
    #[serde(default, deserialize_with = "given")]
    sketch_interval_s: Option<Option<f64>>,
    sketch_bits: Option<u32>,
    cell_load_interval_s: Option<f64>,
    cell_delay_s: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    exchange_interval_s: Option<Option<f64>>,
    exchange_gap_s: Option<f64>,
    exchange_delay_s: Option<f64>,
    exchange_jitter_s: Option<f64>,
    exchange_lost: Option<f64>,
    prefill_engines: Option<u32>,
    roles: Option<Roles>,
    prefill_policy: Option<PolicyName>,
    split_tokens_min: Option<u32>,
    fetch_tokens_min: Option<u32>,
    eviction: Option<Eviction>,
    session_admission: Option<bool>,
    max_requests_per_endpoint: Option<u32>,
    queue_len_max: Option<u32>,
    queue_timeout_s: Option<f64>,
    hints: Option<Hints>,
    timing: Option<bool>,
}

/// A policy by its name, or with its settings.
#[derive(Deserialize)]
struct PolicyName(#[serde(deserialize_with = "name_or_config")] PolicyConfig);

impl Arm {
    /// The parts of `engines` engines.
    pub(crate) fn parts(&self, engines: usize) -> Vec<Part> {
        let decode = engines.saturating_sub(self.prefill_engines as usize);
        let part = |role, serves_alone| Part { role, network: Some(0), serves_alone };
        match self.roles {
            Roles::Elastic => vec![part(Role::Both, true); engines],
            _ if self.prefill_engines == 0 => Vec::new(),
            roles => {
                let role = |n| if n < decode { Role::Decode } else { Role::Prefill };
                (0..engines).map(|n| part(role(n), roles == Roles::Preferred)).collect()
            }
        }
    }
}

/// Reads a value that is present, including `null`.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl<'de> Deserialize<'de> for Arm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrMap;
        impl<'de> Visitor<'de> for NameOrMap {
            type Value = Arm;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a policy's name, or a map with `policy` and optionally `arm`")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Arm, E> {
                let policy = PolicyConfig::by_name(name);
                policy.map(Arm::new).ok_or_else(|| E::custom(PolicyConfig::unknown(name)))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Arm, A::Error> {
                let map = ArmMap::deserialize(MapAccessDeserializer::new(map))?;
                let plain = Arm::new(map.policy);
                Ok(Arm {
                    arm: map.arm.unwrap_or(plain.arm),
                    policy: plain.policy,
                    cache_knowledge: map.cache_knowledge.unwrap_or(plain.cache_knowledge),
                    routing_delay_s: map.routing_delay_s.unwrap_or(plain.routing_delay_s),
                    report_interval_s: map.report_interval_s.unwrap_or(plain.report_interval_s),
                    report_age_s: map.report_age_s.unwrap_or(plain.report_age_s),
                    kv_event_delay_s: map.kv_event_delay_s.unwrap_or(plain.kv_event_delay_s),
                    kv_event_jitter_s: map.kv_event_jitter_s.unwrap_or(plain.kv_event_jitter_s),
                    kv_events_lost: map.kv_events_lost.unwrap_or(plain.kv_events_lost),
                    kv_events_duplicated: map.kv_events_duplicated.unwrap_or(plain.kv_events_duplicated),
                    gateways: map.gateways.unwrap_or(plain.gateways),
                    cells: map.cells.unwrap_or(plain.cells),
                    front_policy: map.front_policy.map_or(plain.front_policy, |PolicyName(policy)| policy),
                    sketch_interval_s: map.sketch_interval_s.unwrap_or(plain.sketch_interval_s),
                    sketch_bits: map.sketch_bits.unwrap_or(plain.sketch_bits),
                    cell_load_interval_s: map.cell_load_interval_s.unwrap_or(plain.cell_load_interval_s),
                    cell_delay_s: map.cell_delay_s.unwrap_or(plain.cell_delay_s),
                    exchange_interval_s: map.exchange_interval_s.unwrap_or(plain.exchange_interval_s),
                    exchange_gap_s: map.exchange_gap_s.or(plain.exchange_gap_s),
                    exchange_delay_s: map.exchange_delay_s.unwrap_or(plain.exchange_delay_s),
                    exchange_jitter_s: map.exchange_jitter_s.unwrap_or(plain.exchange_jitter_s),
                    exchange_lost: map.exchange_lost.unwrap_or(plain.exchange_lost),
                    prefill_engines: map.prefill_engines.unwrap_or(plain.prefill_engines),
                    roles: map.roles.unwrap_or(plain.roles),
                    prefill_policy: map.prefill_policy.map(|PolicyName(policy)| policy),
                    split_tokens_min: map.split_tokens_min,
                    fetch_tokens_min: map.fetch_tokens_min.or(plain.fetch_tokens_min),
                    eviction: map.eviction.or(plain.eviction),
                    session_admission: map.session_admission.unwrap_or(plain.session_admission),
                    max_requests_per_endpoint: map.max_requests_per_endpoint.unwrap_or_default(),
                    queue_len_max: map.queue_len_max.unwrap_or(plain.queue_len_max),
                    queue_timeout_s: map.queue_timeout_s.unwrap_or(plain.queue_timeout_s),
                    hints: map.hints.unwrap_or(plain.hints),
                    timing: map.timing.unwrap_or(plain.timing),
                })
            }
        }
        deserializer.deserialize_any(NameOrMap)
    }
}
