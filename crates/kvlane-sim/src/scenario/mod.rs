//! A simulation as a file: which fleet, which workload, which policies, and what was published of the real thing.
//!
//! `kvlane simulate` runs a [`Scenario`], whether it was read from a file or put together from flags.

mod faults;
mod fleet;
mod points;
mod run;

use std::fmt;
use std::path::PathBuf;

use kvlane_core::policy::{PolicyConfig, name_or_config};
use kvlane_trace::generate::Workload;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

pub use faults::FaultSpec;
pub use fleet::{Fleet, Group};
pub(crate) use points::{Source, conversations, retime};
pub(crate) use run::Setting;
pub use run::{Aside, Cell, Open, Row, RunError, run};

use crate::figures::{Figures, Judgement};
use crate::pool::Eviction;

/// A simulation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is called.
    pub scenario: String,
    /// What it shows, and where its figures come from.
    #[serde(default)]
    pub about: String,
    /// The engines.
    pub fleet: Fleet,
    /// The requests.
    pub workload: WorkloadSpec,
    /// The policies to compare, by name or as [`Arm`]s.
    pub policies: Vec<Arm>,
    /// What goes wrong, at times that count from the start of each run.
    #[serde(default)]
    pub faults: Vec<FaultSpec>,
    /// How often each is run, under seeds that count from 1.
    #[serde(default = "one")]
    pub seeds: u32,
    /// What counts as good.
    #[serde(default)]
    pub judgement: Judgement,
    /// What was measured on a real fleet.
    #[serde(default)]
    pub published: Vec<Published>,
}

/// Requests and when they are sent. Exactly one of `trace` and `generate`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkloadSpec {
    /// A trace file, or the name of one that comes with kvlane: `mooncake-conversation`, `weka-agentic` or
    /// `azure-conversation`.
    pub trace: Option<PathBuf>,
    /// A generated workload.
    pub generate: Option<Workload>,
    /// Factors on the rate at which conversations begin, each a run of its own. This is how a trace is sent, and a
    /// generated workload where neither of the following is given.
    pub load: Vec<f64>,
    /// Conversations begin at a rate.
    pub open_loop: Option<OpenLoop>,
    /// A number of clients, each of which begins the next conversation when its last one is over.
    pub closed_loop: Option<ClosedLoop>,
}

/// Conversations begin as a Poisson process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenLoop {
    /// Conversations per second and for how many seconds.
    pub stages: Vec<Stage>,
    /// Whether the stages are one run: a stage begins `pause_s` after the one before is answered, and finds its
    /// caches. Otherwise each is a run of its own.
    #[serde(default)]
    pub back_to_back: bool,
    /// Seconds between two stages.
    #[serde(default)]
    pub pause_s: f64,
    /// A stage before the first that is not reported.
    #[serde(default)]
    pub warm_up: Option<Stage>,
}

/// A rate and how long it lasts: `rate * seconds` conversations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Conversations per second.
    pub rate: f64,
    /// How long.
    pub seconds: f64,
}

/// Clients that wait for their answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClosedLoop {
    /// How many clients, each a run of its own.
    pub concurrency: Vec<u32>,
    /// Conversations of a run.
    pub conversations: Conversations,
}

/// How many conversations a closed loop has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conversations {
    /// So many in all.
    Total(u32),
    /// So many for each client.
    PerClient(u32),
}

/// A policy and what it is given to know.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arm {
    /// What it is called.
    pub arm: String,
    /// The policy.
    pub policy: PolicyConfig,
    /// Whether engines tell the router what they cache, or it goes by its own dispatches.
    pub cache_knowledge: CacheKnowledge,
    /// Seconds from the client to the engine: network, HTTP, tokenising, the decision.
    pub routing_delay_s: f64,
    /// Seconds between two load reports of an engine; no reports if it is `null`.
    pub report_interval_s: Option<f64>,
    /// How old a report is when it arrives, in seconds.
    pub report_age_s: f64,
    /// Seconds from when a block is cached to when the router knows.
    pub kv_event_delay_s: f64,
    /// Seconds it may take longer, drawn for each batch of events.
    pub kv_event_jitter_s: f64,
    /// Share of the batches that are lost.
    pub kv_events_lost: f64,
    /// Share of the batches that come twice.
    pub kv_events_duplicated: f64,
    /// How many of the engines only compute prompts, for the others to answer; 0 for none.
    pub prefill_engines: u32,
    /// Tokens from which an engine fetches what another has cached rather than compute it; never without.
    pub fetch_tokens_min: Option<u32>,
    /// What a full cache loses first, if not what the fleet's does.
    pub eviction: Option<Eviction>,
    /// Whether new conversations wait while those that go on fill the fleet's caches.
    pub session_admission: bool,
    /// Requests that may then wait at the router.
    pub queue_len_max: u32,
    /// How long, in seconds.
    pub queue_timeout_s: f64,
}

/// What the router goes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheKnowledge {
    /// Its own dispatches.
    #[default]
    Approximate,
    /// The engines' KV events.
    Exact,
}

/// Figures of a real fleet, for the arm and the load they were measured at.
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
    /// The figures, by the names that simulated ones have.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Most frequent load reports.
const REPORT_INTERVAL_MIN_S: f64 = 1e-3;

fn one() -> u32 {
    1
}

// === impl Arm ===

impl Arm {
    /// A policy with the rest at its defaults, called by the policy's name.
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
            prefill_engines: 0,
            fetch_tokens_min: None,
            eviction: None,
            session_admission: false,
            queue_len_max: 10_000,
            queue_timeout_s: 86_400.0,
        }
    }

    /// # Errors
    /// If a delay makes no sense.
    pub(crate) fn check(&self) -> Result<(), RunError> {
        let span = |secs: f64| (0.0..1e6).contains(&secs);
        let delays = [
            self.routing_delay_s,
            self.report_age_s,
            self.kv_event_delay_s,
            self.kv_event_jitter_s,
            self.queue_timeout_s,
        ];
        let share = |share: f64| (0.0..=1.0).contains(&share);
        if !share(self.kv_events_lost) || !share(self.kv_events_duplicated) {
            return Err(RunError::Policies(format!(
                "`{}`: shares of KV events are between 0 and 1",
                self.arm
            )));
        }
        let interval = |secs| (REPORT_INTERVAL_MIN_S..1e6).contains(&secs);
        if delays.into_iter().all(span) && self.report_interval_s.is_none_or(interval) {
            return Ok(());
        }
        let why =
            format!("`{}`: delays are seconds, zero or more; a report interval is 0.001 s or more", self.arm);
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
    /// `null` is an interval too: there are no reports.
    #[serde(default, deserialize_with = "given")]
    report_interval_s: Option<Option<f64>>,
    report_age_s: Option<f64>,
    kv_event_delay_s: Option<f64>,
    kv_event_jitter_s: Option<f64>,
    kv_events_lost: Option<f64>,
    kv_events_duplicated: Option<f64>,
    prefill_engines: Option<u32>,
    fetch_tokens_min: Option<u32>,
    eviction: Option<Eviction>,
    session_admission: Option<bool>,
    queue_len_max: Option<u32>,
    queue_timeout_s: Option<f64>,
}

/// Reads what is there, be it `null`.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl<'de> Deserialize<'de> for Arm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrMap;
        impl<'de> Visitor<'de> for NameOrMap {
            type Value = Arm;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a policy's name, or a map with `policy` and, if you like, `arm`")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Arm, E> {
                let policy = PolicyConfig::by_name(name);
                let known =
                    || format!("there is no policy `{name}`: take one of {}", PolicyConfig::NAMES.join(", "));
                policy.map(Arm::new).ok_or_else(|| E::custom(known()))
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
                    prefill_engines: map.prefill_engines.unwrap_or(plain.prefill_engines),
                    fetch_tokens_min: map.fetch_tokens_min.or(plain.fetch_tokens_min),
                    eviction: map.eviction.or(plain.eviction),
                    session_admission: map.session_admission.unwrap_or(plain.session_admission),
                    queue_len_max: map.queue_len_max.unwrap_or(plain.queue_len_max),
                    queue_timeout_s: map.queue_timeout_s.unwrap_or(plain.queue_timeout_s),
                })
            }
        }
        deserializer.deserialize_any(NameOrMap)
    }
}
