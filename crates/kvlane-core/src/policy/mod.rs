//! Placement policies: each picks one row of a table of eligible endpoints.
//!
//! A policy sees facts (tokens, load, overlap) and nothing else: no headers, no clock, no sockets, no metrics. To add a
//! policy, add a file with a `Config`, a struct and its `impl Policy`, and one line in `policies!` below. Policies of
//! other projects are in `published/`. A published parameter set of a policy is a constant in the policy's file and one
//! line below.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::adapters::AdapterView;
pub use crate::candidate::Candidate;
use crate::columns::Fleet;
use crate::config::{ConfigError, Kind, Setting, below, within};
pub use crate::cost_unit::CostUnit;
use crate::disaggregation::Transfers;
use crate::endpoint::EndpointId;
pub use crate::reason::Reason;
use crate::request::{SchedulingRequest, SessionKey};
use crate::rng::Rng;
use crate::suggest::suggest;
use crate::time::Nanos;

/// Input of a policy beside the rows, and where it records its reason.
pub struct PickContext<'a> {
    /// The request to place.
    pub request: &'a SchedulingRequest,
    /// The time of the decision.
    pub now: Nanos,
    /// Forecast output tokens of the answer.
    pub output_tokens: u32,
    /// Mean output tokens of the pool's answers.
    pub usual_output_tokens: f64,
    /// If routers of other replicas place on the same endpoints: a number that each of them has another one of.
    pub peers: Option<u64>,
    /// The request's adapter, if it names one.
    pub adapter: Option<AdapterView<'a>>,
    /// The scheduler's random number generator.
    pub rng: &'a mut Rng,
    /// Why the pick was made; set by the policy.
    pub reason: Reason,
    /// Seconds of work that the pick gives to endpoints, for the routers of other replicas; set by a policy that counts them.
    pub work: [Option<(EndpointId, f64)>; 2],
    /// One cost per row if the decision is to be explained; `None` otherwise.
    pub costs: Option<&'a mut [f64]>,
    /// The cheapest pairs of rows, the cheapest first, if the decision is to be explained; `None` otherwise.
    pub pairs: Option<&'a mut Vec<PairCost>>,
}

/// The price of a split between two rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairCost {
    /// Position of the row that computes the prompt.
    pub prefill: usize,
    /// Position of the row that decodes the answer.
    pub row: usize,
    /// The price, in the unit of the rows' costs.
    pub cost: f64,
    /// Its terms.
    pub terms: SplitTerms,
}

/// The terms of a split's price, in seconds. They add up to it. See the second table of [`fleet_cost`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SplitTerms {
    /// Until the prompt is computed, with what it costs others there.
    pub prompt_s: f64,
    /// The transfer.
    pub transfer_s: f64,
    /// The steps for which the request waits at the second endpoint.
    pub second_step_s: f64,
    /// Recomputation of blocks that the copy evicts.
    pub copy_s: f64,
    /// Until the second endpoint has room.
    pub room_s: f64,
    /// Stalls of its decoding by later prompts.
    pub interrupted_s: f64,
    /// The rest: decoding of this request, and what it costs others there.
    pub decode_s: f64,
}

/// Pairs that a decision is explained with.
pub const PAIRS_SHOWN: usize = 8;

// === impl SplitTerms ===

impl SplitTerms {
    /// Those of the second endpoint besides decoding.
    fn second_leg_s(&self) -> f64 {
        self.second_step_s + self.copy_s + self.room_s + self.interrupted_s
    }

    /// The terms with their names, in order.
    pub fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("prompt", self.prompt_s),
            ("transfer", self.transfer_s),
            ("second step", self.second_step_s),
            ("copy", self.copy_s),
            ("room", self.room_s),
            ("interrupted", self.interrupted_s),
            ("decode", self.decode_s),
        ]
    }
}

// === impl PickContext ===

impl PickContext<'_> {
    /// Records a row's cost in the policy's own unit. No effect unless the decision is to be explained.
    pub fn note(&mut self, row: usize, cost: f64) {
        if let Some(costs) = &mut self.costs {
            costs[row] = cost;
        }
    }

    /// Records the price of a pair if it is among the cheapest. No effect unless the decision is to be explained.
    pub fn note_pair(&mut self, prefill: usize, row: usize, cost: f64, terms: impl FnOnce() -> SplitTerms) {
        let Some(pairs) = &mut self.pairs else { return };
        let at = pairs.partition_point(|other| other.cost <= cost);
        if at < PAIRS_SHOWN {
            pairs.truncate(PAIRS_SHOWN - 1);
            pairs.insert(at, PairCost { prefill, row, cost, terms: terms() });
        }
    }

    /// The row with the lowest cost; ties are random. Costs are recorded.
    pub fn cheapest(&mut self, candidates: &[Candidate], cost: impl Fn(&Candidate) -> f64) -> usize {
        self.cheapest_at(candidates, |_, row| cost(row))
    }

    /// Like [`PickContext::cheapest`], with the position of each row.
    fn cheapest_at(&mut self, candidates: &[Candidate], cost: impl Fn(usize, &Candidate) -> f64) -> usize {
        let (mut best, mut best_cost, mut ties) = (0, f64::INFINITY, 0);
        for (row, candidate) in candidates.iter().enumerate() {
            let cost = cost(row, candidate);
            self.note(row, cost);
            if cost < best_cost {
                (best, best_cost, ties) = (row, cost, 1);
            } else if cost == best_cost {
                ties += 1;
                if self.rng.below(ties) == 0 {
                    best = row;
                }
            }
        }
        best
    }

    /// Like [`PickContext::cheapest`], among the rows for which `eligible` is true; the others are recorded with
    /// infinite cost. `None` if there is no such row.
    fn cheapest_of(
        &mut self,
        candidates: &[Candidate],
        eligible: impl Fn(&Candidate) -> bool,
        cost: impl Fn(&Candidate) -> f64,
    ) -> Option<usize> {
        let row = self.cheapest(candidates, |row| if eligible(row) { cost(row) } else { f64::INFINITY });
        if eligible(&candidates[row]) { Some(row) } else { candidates.iter().position(eligible) }
    }

    /// The first row with the lowest cost. Costs are recorded.
    fn first_cheapest(&mut self, candidates: &[Candidate], cost: impl Fn(&Candidate) -> f64) -> usize {
        let (mut best, mut best_cost) = (0, f64::INFINITY);
        for (row, candidate) in candidates.iter().enumerate() {
            let cost = cost(candidate);
            self.note(row, cost);
            if cost < best_cost {
                (best, best_cost) = (row, cost);
            }
        }
        best
    }
}

/// A policy's choice: where a request is decoded, and where its prompt is computed if that is elsewhere. Positions in
/// the table of candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Decodes the answer.
    pub row: usize,
    /// Computes the prompt; `None` if the first does.
    pub prefill: Option<usize>,
}

/// What a policy may ask about pairs of candidates.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    /// Learned times and limits.
    pub transfers: &'a Transfers,
    /// The time of the decision.
    pub now: Nanos,
}

// === impl Pick ===

impl Pick {
    /// One endpoint does both.
    pub const fn alone(row: usize) -> Self {
        Self { row, prefill: None }
    }
}

impl Pairs<'_> {
    /// Whether one more request may be split between these two.
    pub fn has_room(&self, prefill: &Candidate, decode: &Candidate) -> bool {
        self.transfers.has_room(prefill.endpoint, decode.endpoint)
    }

    /// Seconds that the transfer is expected to take: of the tokens that `decode` does not hold.
    pub fn transfer_s(&self, request: &SchedulingRequest, prefill: &Candidate, decode: &Candidate) -> f64 {
        let tokens = decode.uncached_tokens(request);
        self.transfers.expected_s(self.now, prefill.endpoint, decode.endpoint, tokens)
    }
}

/// A placement policy.
pub trait Policy: Send {
    /// Picks a row of a non-empty table.
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize;

    /// What the costs count that it records.
    fn cost_unit(&self) -> CostUnit {
        CostUnit::Score
    }

    /// Picks a row, or a pair of rows of which one [can prefill for the other](Candidate::can_prefill_for), of a table with such a
    /// pair. `None` if
    /// the policy knows no price of a split: then roles decide.
    fn pick_split(
        &mut self,
        cx: &mut PickContext<'_>,
        candidates: &[Candidate],
        pairs: Pairs<'_>,
    ) -> Option<Pick> {
        let _ = (cx, candidates, pairs);
        None
    }

    /// Whether it needs to see only some rows of a large fleet: those on its [shortlist](Policy::shortlist).
    fn has_shortlist(&self) -> bool {
        false
    }

    /// Appends to `listed` the slots of the endpoints of `fleet` that it would pick for a whole request. The table of
    /// candidates then has these and the endpoints that accept requests under conditions, if they accept this one.
    fn shortlist(&mut self, cx: &mut PickContext<'_>, fleet: &Fleet<'_>, listed: &mut Vec<u16>) {
        let _ = (cx, fleet, listed);
    }

    /// The same policy in another replica has given an endpoint work, in seconds as of [`PickContext::work`].
    fn placed_elsewhere(&mut self, now: Nanos, endpoint: EndpointId, work_s: f64) {
        let _ = (now, endpoint, work_s);
    }

    /// Whether it remembers where conversations are.
    fn keeps_sessions(&self) -> bool {
        false
    }

    /// The same policy in another replica has placed the last turn of a conversation.
    fn turn_elsewhere(&mut self, session: SessionKey, endpoint: EndpointId, prompt_tokens: u32) {
        let _ = (session, endpoint, prompt_tokens);
    }
}

macro_rules! policies {
    (
        $( $(#[doc = $doc:literal])* $module:ident :: $Type:ident = $name:literal $(| $alias:literal)* ),+ $(,)? ;
        published:
        $( $(#[doc = $its_doc:literal])* $its:ident :: $ItsType:ident = $its_name:literal $(| $its_alias:literal)* ),+
        $(,)? ;
        $($sets:tt)+
    ) => {
        $( pub mod $module; )+

        /// Policies of other projects and papers, for comparison and for migration.
        pub mod published {
            $( pub mod $its; )+
        }

        use published::{$($its),+};

        policies! { @all
            $( $(#[doc = $doc])* $module::$Type = $name $(| $alias)*, )+
            $( $(#[doc = $its_doc])* $its::$ItsType = $its_name $(| $its_alias)* ),+ ;
            $($sets)+
        }
    };
    (@all
        $( $(#[doc = $doc:literal])* $module:ident :: $Type:ident = $name:literal $(| $alias:literal)* ),+ ;
        $( $set:literal $(| $set_alias:literal)* = $SetType:ident ( $config:expr ) ),+ $(,)? ;
    ) => {
        /// A policy by name, with its parameters.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name")]
        pub enum PolicyConfig {
            $( $(#[doc = $doc])* #[serde(rename = $name $(, alias = $alias)*)] $Type($module::Config), )+
        }

        impl PolicyConfig {
            /// All names of policies, then of sets, in the order of this file.
            pub const NAMES: &'static [&'static str] = &[$($name,)+ $($set,)+];

            /// The names of sets: a policy with parameters other than its defaults.
            pub const SETS: &'static [&'static str] = &[$($set),+];

            /// The policy called `name` (or an alias of it), with its default parameters or those of a set.
            pub fn by_name(name: &str) -> Option<Self> {
                match name {
                    $( $name $(| $alias)* => Some(Self::$Type($module::Config::default())), )+
                    $( $set $(| $set_alias)* => Some(Self::$SetType($config)), )+
                    _ => None,
                }
            }

            /// The policy called `name` (or an alias of it), with the parameters in `deserializer`.
            fn with_parameters<'de, D: Deserializer<'de>>(name: &str, deserializer: D) -> Result<Self, D::Error> {
                match name {
                    $( $name $(| $alias)* => $module::Config::deserialize(deserializer).map(Self::$Type), )+
                    _ => Err(no_policy(name)),
                }
            }

            /// Its name; the name of a set if its parameters are exactly those of the set.
            pub fn name(&self) -> &'static str {
                match self {
                    $( Self::$SetType(config) if *config == $config => $set, )+
                    $( Self::$Type(_) => $name, )+
                }
            }

            /// Builds the policy in its initial state.
            pub fn build(&self) -> Box<dyn Policy> {
                match self {
                    $( Self::$Type(config) => Box::new($module::$Type::new(*config)), )+
                }
            }
        }
    };
}

policies! {
    /// The marginal cost to the fleet, in seconds.
    fleet_cost::FleetCost = "fleet_cost" | "auto",
    /// Uniformly random.
    random::Random = "random",
    /// Each endpoint in turn.
    round_robin::RoundRobin = "round_robin" | "roundrobin",
    /// The less loaded of two random endpoints.
    power_of_two::PowerOfTwo = "power_of_two",
    /// The fewest requests in flight.
    least_load::LeastLoad = "least_load" | "leastloaded" | "least_loaded",
    /// The fewest tokens in flight.
    least_tokens::LeastTokens = "least_tokens",
    /// The fewest uncached prompt tokens to prefill before the first token.
    least_prefill::LeastPrefill = "least_prefill",
    /// The longest prefix while the fleet is balanced, else the least load.
    cache_aware::CacheAware = "cache_aware",
    /// The longest prefix at an endpoint below its saturation limit.
    prefix_aware::PrefixAware = "prefix_aware" | "prefixaware",
    /// Uncached tokens to compute times batch size.
    lmetric::LMetric = "lmetric",
    ;
    published:
    /// A weighted sum of scores: queue, KV cache, prefix, requests, rotation of cold prompts.
    weighted::Weighted = "weighted" | "llm_d_precise",
    /// The endpoints with most of the prompt cached, unless their queue is too long; then the fewest queued tokens.
    llm_d_affinity::LlmDAffinity = "llm_d_affinity",
    /// Prefill and decode blocks, added or multiplied.
    dynamo::Dynamo = "dynamo",
    /// The longest prefix among endpoints with a usual number of requests.
    aibrix::Aibrix = "aibrix",
    /// Exploits a prefix that is most of the prompt, else explores by cost.
    preble::Preble = "preble",
    /// The least predicted time to first token.
    conductor::Conductor = "conductor",
    /// Uncached tokens times batch size; the last token is never credited.
    kv_aware::KvAware = "kv_aware" | "kvaware",
    /// Seconds of queued work, with a barrier before a full KV cache.
    smg_least_load::SmgLeastLoad = "smg_least_load",
    /// Four times the waiting requests plus the running requests.
    vllm_dp::VllmDp = "vllm_dp",
    /// By a hash of the prompt's first block, with bounded loads.
    consistent_hash::ConsistentHash = "consistent_hash" | "consistent_hashing",
    /// By a hash of the prompt's first block; the least loaded endpoint replaces an overloaded owner.
    prefix_hash::PrefixHash = "prefix_hash",
    /// A session stays at its first endpoint, chosen by the fewest tokens placed there.
    session_sticky::SessionSticky = "session_sticky" | "session",
    /// Heavy prompts by decode load, others by cache hit and token load.
    heavy_warm::HeavyWarm = "heavy_warm",
    /// A session stays at its endpoint unless that has too many tokens in flight.
    linear::Linear = "linear",
    /// The same, and the prompts of heavy requests are computed at another endpoint.
    heavy_offload::HeavyOffload = "heavy_offload",
    /// The longest prefix within a client's share at each endpoint.
    dlpm::Dlpm = "dlpm",
    /// The fewest requests in flight among the endpoints that have the adapter loaded.
    prefer_loaded::PreferLoaded = "prefer_loaded",
    ;
    "cache_aware_rust" = CacheAware(cache_aware::RUST),
    "lmetric_no_queue" = LMetric(lmetric::NO_QUEUE),
    "llm_d_default" = Weighted(weighted::LLM_D_DEFAULT),
    "llm_d_perf" = Weighted(weighted::LLM_D_PERF),
    "llm_d_lora" = Weighted(weighted::LLM_D_LORA),
    "llm_d_affinity_5s" = LlmDAffinity(llm_d_affinity::FIVE_SECONDS),
    "dynamo_lmetric" = Dynamo(dynamo::LMETRIC),
    ;
}

// === impl PolicyConfig ===

impl Setting for PolicyConfig {
    const KIND: Kind = Kind::Any;

    /// Checks the whole numbers among the parameters; the others have bounded types.
    fn check(&self, place: &str) -> Result<(), ConfigError> {
        let count = |name: &str, value: u32, most: u32| within(&below(place, name), &value, 1..=most);
        match self {
            Self::PrefixAware(config) => count("saturation_inflight", config.saturation_inflight, u32::MAX),
            Self::Dynamo(config) => count("block_tokens", config.block_tokens, u32::MAX),
            Self::ConsistentHash(config) => count("virtual_nodes", config.virtual_nodes, 4096),
            Self::PrefixHash(config) => count("virtual_nodes", config.virtual_nodes, 4096),
            Self::Dlpm(config) => count("quantum_tokens", config.quantum_tokens, u32::MAX),
            Self::HeavyOffload(config) => count("offloads_max", config.offloads_max, u32::MAX),
            _ => Ok(()),
        }
    }
}

/// Reads a policy from its short form, `lmetric`, or its long form, `{name: lmetric, ...}` with parameters. For serde's
/// `deserialize_with`.
///
/// # Errors
/// The format's error, or an error that lists the valid names.
pub fn name_or_config<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PolicyConfig, D::Error> {
    struct Either;

    impl<'de> Visitor<'de> for Either {
        type Value = PolicyConfig;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a policy's name, or its name and parameters")
        }

        fn visit_str<E: de::Error>(self, name: &str) -> Result<PolicyConfig, E> {
            PolicyConfig::by_name(name).ok_or_else(|| no_policy(name))
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PolicyConfig, A::Error> {
            let (mut name, mut parameters) = (None, Vec::new());
            while let Some(key) = map.next_key::<String>()? {
                match &*key {
                    "name" => name = Some(map.next_value::<String>()?),
                    _ => parameters.push((key, map.next_value()?)),
                }
            }
            let name = name.ok_or_else(|| de::Error::missing_field("name"))?;
            let parameters = Parameters { rest: parameters.into_iter(), value: None, error: PhantomData };
            PolicyConfig::with_parameters(&name, MapAccessDeserializer::new(parameters))
        }
    }

    deserializer.deserialize_any(Either)
}

impl PolicyConfig {
    /// What is said where `name` is no policy.
    pub fn unknown(name: &str) -> String {
        let suggested = suggest(name, Self::NAMES.iter().copied(), "The policies are in docs/guide.md.");
        format!("unknown policy '{name}': {suggested}")
    }
}

fn no_policy<E: de::Error>(name: &str) -> E {
    E::custom(PolicyConfig::unknown(name))
}

/// A parameter's value before its type is known.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a parameter is a number, a name, true or false")]
enum Scalar {
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
}

/// The parameters of a policy. An error in a parameter includes its name.
struct Parameters<E> {
    rest: std::vec::IntoIter<(String, Scalar)>,
    value: Option<(String, Scalar)>,
    error: PhantomData<E>,
}

impl<'de, E: de::Error> MapAccess<'de> for Parameters<E> {
    type Error = E;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, E> {
        self.value = self.rest.next();
        self.value.as_ref().map(|(name, _)| seed.deserialize(name.as_str().into_deserializer())).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, E> {
        let Some((name, value)) = self.value.take() else {
            return Err(E::custom("a value without a name"));
        };
        let value = match value {
            Scalar::Bool(value) => seed.deserialize(Given(value.into_deserializer())),
            Scalar::Unsigned(value) => seed.deserialize(Given(value.into_deserializer())),
            Scalar::Signed(value) => seed.deserialize(Given(value.into_deserializer())),
            Scalar::Float(value) => seed.deserialize(Given(value.into_deserializer())),
            Scalar::Text(value) => seed.deserialize(Given(value.into_deserializer())),
        };
        value.map_err(|error: E| E::custom(format!("{name}: {error}")))
    }
}

/// A value that is given where one may be absent.
struct Given<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Given<D> {
    type Error = D::Error;

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        visitor.visit_some(self.0)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! One-line tables for the policies' tests.

    use super::*;
    use crate::adapters::AdapterRow;
    use crate::load::{InFlight, Load};
    use crate::request::RequestId;

    /// A row of `(overlap tokens, requests, prefill tokens, context tokens)`.
    pub(crate) type Row = (u32, u32, u64, u64);

    fn candidates(rows: &[Row]) -> Vec<Candidate> {
        rows.iter()
            .enumerate()
            .map(|(slot, &(overlap_tokens, requests, prefill_tokens, context_tokens))| {
                let in_flight = InFlight { requests, prefill_tokens, context_tokens, ..InFlight::default() };
                let load = Load { in_flight, reported: None };
                Candidate::approximate(EndpointId::new(slot as u16, 0), overlap_tokens, load)
            })
            .collect()
    }

    /// A policy and its input, for several picks in a row; tests may change the fields in between.
    pub(crate) struct Case {
        pub(crate) policy: Box<dyn Policy>,
        pub(crate) request: SchedulingRequest,
        pub(crate) rows: Vec<Candidate>,
        pub(crate) now: Nanos,
        pub(crate) output_tokens: u32,
        pub(crate) rng: Rng,
        /// If there are any, the request names an adapter.
        pub(crate) adapters: Vec<AdapterRow>,
        /// Costs that the last pick recorded.
        pub(crate) costs: Vec<f64>,
    }

    impl Case {
        /// The policy called `name`, with a prompt of `prompt_tokens`.
        pub(crate) fn new(name: &str, prompt_tokens: u32, rows: &[Row]) -> Self {
            Self::of(&PolicyConfig::by_name(name).expect("a policy"), prompt_tokens, rows)
        }

        /// The same, with these parameters.
        pub(crate) fn of(config: &PolicyConfig, prompt_tokens: u32, rows: &[Row]) -> Self {
            Self {
                policy: config.build(),
                request: SchedulingRequest::new(RequestId(1), prompt_tokens),
                rows: candidates(rows),
                now: Nanos::ZERO,
                output_tokens: 200,
                rng: Rng::new(1),
                adapters: Vec::new(),
                costs: Vec::new(),
            }
        }

        /// The picked row and the reason.
        pub(crate) fn pick(&mut self) -> (usize, Reason) {
            self.costs.clear();
            self.costs.resize(self.rows.len(), f64::NAN);
            let mut cx = PickContext {
                request: &self.request,
                now: self.now,
                output_tokens: self.output_tokens,
                usual_output_tokens: 200.0,
                peers: None,
                adapter: (!self.adapters.is_empty()).then_some(AdapterView {
                    rows: &self.adapters,
                    copies: self.adapters.iter().filter(|row| row.loaded).count() as u32,
                    gap_s: 1.0,
                    seen_s: 60.0,
                    load_gap_s: 20.0,
                }),
                rng: &mut self.rng,
                reason: Reason::default(),
                work: [None; 2],
                costs: Some(&mut self.costs),
                pairs: None,
            };
            let row = self.policy.pick(&mut cx, &self.rows);
            (row, cx.reason)
        }
    }

    /// Compares costs that are sums of seconds, within rounding.
    pub(crate) fn near(costs: &[f64], expect: &[f64]) {
        let apart = |(cost, expect): (&f64, &f64)| (cost - expect).abs() > 1e-9;
        assert!(
            costs.len() == expect.len() && !costs.iter().zip(expect).any(apart),
            "{costs:?} for {expect:?}"
        );
    }

    /// The rows that a policy picks, with reasons, for a prompt of `prompt_tokens`, over many seeds.
    pub(crate) fn picks(config: &str, prompt_tokens: u32, rows: &[Row]) -> Vec<(usize, Reason)> {
        let config: PolicyConfig = serde_json::from_str(config).expect("a policy");
        let mut picks: Vec<_> = (0..64)
            .map(|seed| {
                let mut case = Case::of(&config, prompt_tokens, rows);
                case.rng = Rng::new(seed);
                case.pick()
            })
            .collect();
        picks.sort_unstable();
        picks.dedup();
        picks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::BlockHash;
    use crate::load::{InFlight, Load, LoadReport};
    use crate::rates::Rates;
    use crate::request::{SessionKey, TenantKey};

    #[test]
    fn names_and_the_seeds_aliases_find_their_policy() {
        for &name in PolicyConfig::NAMES {
            assert_eq!(PolicyConfig::by_name(name).expect("a policy").name(), name);
        }
        for (alias, name) in
            [("roundrobin", "round_robin"), ("leastloaded", "least_load"), ("prefixaware", "prefix_aware")]
        {
            assert_eq!(PolicyConfig::by_name(alias).expect("a policy").name(), name);
        }
        assert_eq!(PolicyConfig::by_name("fastest"), None);
    }

    #[test]
    fn a_parameter_that_does_not_exist_is_refused() {
        let parse = serde_json::from_str::<PolicyConfig>;
        assert!(parse(r#"{"name":"cache_aware","cache_threshold":0.5}"#).is_ok());
        assert!(parse(r#"{"name":"cache_aware","cache_treshold":0.5}"#).is_err());
        assert!(parse(r#"{"name":"lmetric","x":1}"#).is_err());
    }

    #[test]
    fn a_sets_parameters_have_its_name_and_no_other() {
        for set in PolicyConfig::SETS {
            let written = serde_json::to_string(&PolicyConfig::by_name(set).expect("a set")).expect("JSON");
            assert!(
                !written.contains(set),
                "a set is serialized as its policy's name and parameters: {written}"
            );
            assert_eq!(serde_json::from_str::<PolicyConfig>(&written).expect("a policy").name(), *set);
        }
        let other = r#"{"name":"llm_d_affinity","penalty_max_ms":5000,"threshold":0.9}"#;
        assert_eq!(serde_json::from_str::<PolicyConfig>(other).expect("a policy").name(), "llm_d_affinity");
    }

    #[test]
    fn a_parameter_that_may_be_absent_can_be_given() {
        let read = |text: &str| name_or_config(&mut serde_json::Deserializer::from_str(text));
        let without = read(r#"{"name":"fleet_cost","without":"stall"}"#).expect("a policy");
        assert_eq!(
            serde_json::to_string(&without).expect("JSON"),
            r#"{"name":"fleet_cost","without":"stall"}"#
        );
        assert!(
            read(r#"{"name":"fleet_cost","without":"stalls"}"#)
                .expect_err("no term")
                .to_string()
                .contains("stalls")
        );
    }

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![3 => 0..5u64, 3 => 0..100_000u64, 1 => 0..u64::MAX / 2, 1 => Just(u64::MAX / 2)]
    }

    fn rate() -> impl Strategy<Value = f64> {
        prop_oneof![4 => 1e-9..1e-2, 1 => Just(0.0), 1 => Just(f64::INFINITY), 1 => Just(f64::NAN)]
    }

    fn count() -> impl Strategy<Value = u32> {
        number().prop_map(|n| u32::try_from(n).unwrap_or(u32::MAX / 2).min(u32::MAX / 2))
    }

    fn reported() -> impl Strategy<Value = Option<(LoadReport, Nanos)>> {
        let usage = prop_oneof![4 => 0f32..1.0, 1 => any::<f32>(), 1 => Just(f32::NAN), 1 => Just(1.0)];
        let reported = (count(), count(), usage, prop::option::of(number()), number());
        prop::option::of(reported.prop_map(|(running, waiting, kv_usage_ratio, kv_capacity_tokens, at)| {
            (LoadReport { running, waiting, kv_usage_ratio, kv_capacity_tokens }, Nanos(at))
        }))
    }

    fn rows() -> impl Strategy<Value = Vec<Candidate>> {
        let ledger = (count(), count(), number(), number(), number());
        let ledger =
            ledger.prop_map(|(requests, prefilling, prefill_tokens, prefill_pairs, context_tokens)| {
                InFlight {
                    requests,
                    prefilling: prefilling.min(requests),
                    prefill_tokens,
                    prefill_pairs,
                    context_tokens,
                    ..InFlight::default()
                }
            });
        let rates = (rate(), rate(), rate(), rate(), rate());
        let row = (0..12u16, 0..3u16, count(), ledger, reported(), rates);
        let row = row.prop_map(|(slot, generation, overlap_tokens, in_flight, reported, rates)| {
            let load = Load { in_flight, reported };
            let mut row = Candidate::approximate(EndpointId::new(slot, generation), overlap_tokens, load);
            let (prefill_token_s, prefill_pair_s, step_s, sequence_s, context_token_s) = rates;
            row.computing_s = prefill_token_s;
            row.rates = Rates {
                prefill_token_s,
                prefill_pair_s,
                load_token_s: 0.2 * prefill_token_s,
                step_s,
                sequence_s,
                context_token_s,
                request_s: 0.0,
                wait_steps: 0.0,
            };
            row
        });
        prop::collection::vec(row, 1..9)
    }

    type Turn = (Vec<Candidate>, (u32, u32, u64), (Option<u64>, Option<u64>, Option<u64>));

    fn turns() -> impl Strategy<Value = Vec<Turn>> {
        let key = || prop::option::of(0..4u64);
        prop::collection::vec((rows(), (count(), count(), number()), (key(), key(), key())), 1..9)
    }

    /// The rows that a policy picks turn by turn, with reasons.
    fn played(name: &str, turns: &[Turn]) -> Vec<(usize, Reason)> {
        let mut case = testing::Case::new(name, 0, &[]);
        let turn = |(rows, (prompt_tokens, output_tokens, now), (session, tenant, head)): &Turn| {
            case.rows.clone_from(rows);
            case.request.prompt_tokens = *prompt_tokens;
            case.request.session = session.map(SessionKey);
            case.request.tenant = tenant.map(TenantKey);
            case.request.head = head.map(BlockHash);
            (case.output_tokens, case.now) = (*output_tokens, Nanos(*now));
            case.pick()
        };
        turns.iter().map(turn).collect()
    }

    proptest! {
        /// Invariant: Every policy picks one of the given rows, and picks the same row again from the same seed.
        #[test]
        fn every_policy_picks_an_existing_row_and_the_same_again(turns in turns()) {
            for name in PolicyConfig::NAMES {
                let picks = played(name, &turns);
                for ((row, _), (rows, ..)) in picks.iter().zip(&turns) {
                    prop_assert!(*row < rows.len(), "{name}");
                }
                prop_assert_eq!(picks, played(name, &turns), "{}", name);
            }
        }
    }
}
