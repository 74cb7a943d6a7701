//! What the routers of one pool, each in a replica of the gateway, tell each other, so that all of them place as one
//! would.
//!
//! Every value has one writer: a router tells what it has itself placed on each endpoint, as totals. A later value
//! replaces an earlier one of the same router, and sums over routers are made by the one that reads. So news may be
//! lost, repeated or come out of order: who has heard the latest news has the same state, whatever else it has heard.
//! Times are never compared between routers: news counts as of the time when it is heard.
//!
//! Prompts are told by the hashes of every few blocks ([`crate::index::marks`]), which is a set that only grows and
//! forgets: it has no order either.

mod estimates;
mod homes;
mod peers;

use serde::{Deserialize, Serialize};

use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::load::InFlight;
use crate::rates::SAMPLES_MAX;
use crate::request::{SessionKey, TenantKey};
use crate::time::Nanos;

pub(crate) use estimates::Estimates;
pub(crate) use homes::Homes;
pub(crate) use peers::Peers;

/// How often a router tells everything: what was lost is repaired, and a router that has nothing in flight shows that it
/// lives.
pub const ALL_EVERY: Nanos = Nanos::from_secs(1);

/// Time without news after which a router's requests in flight no longer count: its process has died, or cannot be
/// reached. Two messages may be lost.
pub const LEASE: Nanos = Nanos(3 * ALL_EVERY.0);

/// One router, from its start to its end: a restarted process is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReplicaId(pub u64);

/// What one router has placed on one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// Its requests in flight.
    pub in_flight: InFlight,
    /// Seconds of work that its policy has placed there since its start.
    #[serde(default)]
    pub placed_s: f64,
    /// How often its breaker of the endpoint has opened, or closed after that: an odd number while requests from there
    /// fail.
    #[serde(default)]
    pub breaker_changes: u32,
}

/// What one router has charged a tenant for service, in one lane of its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// The priority of its requests.
    pub priority: i8,
    /// The lane: 0 active conversations, 1 returning ones, 2 new ones.
    pub lane: u8,
    /// The tenant.
    pub tenant: Option<TenantKey>,
    /// Which count of the router this is: a later one begins at 0.
    pub since: u32,
    /// Tokens, as the queue weighs them.
    pub tokens: i64,
}

/// A turn of a conversation that one router has placed, if where conversations are matters to its placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// The conversation.
    pub session: SessionKey,
    /// Of two turns of a conversation, the one with the larger stamp is the later one, to all routers.
    pub stamp: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
}

/// News of one router.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct News {
    /// Rises with each news of this router.
    pub number: u64,
    /// What it has placed on the endpoints where that has changed; on all of them if it was asked for all.
    pub shares: Vec<(EndpointId, Share)>,
    /// The service of tenants where it has changed; of all if it was asked for all.
    pub services: Vec<Service>,
    /// What it has learned from its own answers where that has changed. Told once a second at most.
    pub learned: Vec<(Subject, Estimate)>,
    /// The last turns of conversations, with their endpoints, where they are new.
    pub turns: Vec<(EndpointId, Turn)>,
    /// Prompts that it has sent.
    pub prompts: Vec<SentPrompt>,
}

/// What an estimate is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject<E = EndpointId> {
    /// Seconds to prefill 4,096 tokens at an endpoint, or at any of the pool.
    Prefill(Option<E>),
    /// Seconds of a decode step without sequences, likewise.
    Step(Option<E>),
    /// Output tokens of the pool's answers, or of those of one [kind](crate::forecast::Kind).
    Answer(Option<u16>),
}

/// What one router has learned from its own answers about one thing: not what it has heard, so that nothing counts twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Its estimate.
    pub value: f64,
    /// The observations that it has made so far.
    pub observations: u32,
}

/// The prompt of a request that was sent to an endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct SentPrompt {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its marks that had not been told before.
    pub marks: Vec<BlockHash>,
}

/// Another router, as one of them knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerState {
    /// The other router.
    pub replica: ReplicaId,
    /// When it was last heard.
    pub heard: Nanos,
    /// Its requests in flight.
    pub requests: u32,
}

/// Context tokens, and their share, that an endpoint's load may change without being news.
const CONTEXT_TOKENS: u64 = 512;
const CONTEXT_SHARE: u64 = 16;

/// Change of an estimate, and of the number of its observations, from which it is news.
const ESTIMATE_CHANGE: f64 = 0.05;
const OBSERVATIONS_CHANGE: f64 = 1.25;

// === impl News ===

impl News {
    /// Whether it says nothing, other than that its router lives.
    pub fn is_empty(&self) -> bool {
        let Self { number: _, shares, services, learned, turns, prompts } = self;
        shares.is_empty()
            && services.is_empty()
            && learned.is_empty()
            && turns.is_empty()
            && prompts.is_empty()
    }
}

// === impl Subject ===

impl<E> Subject<E> {
    /// The endpoint that it is about.
    pub fn endpoint(&self) -> Option<&E> {
        match self {
            Self::Prefill(endpoint) | Self::Step(endpoint) => endpoint.as_ref(),
            Self::Answer(_) => None,
        }
    }

    /// The same with the endpoint as another router, or a person, calls it; `None` if that is not known.
    pub fn named<N>(self, name: impl FnOnce(E) -> Option<N>) -> Option<Subject<N>> {
        Some(match self {
            Self::Prefill(Some(endpoint)) => Subject::Prefill(Some(name(endpoint)?)),
            Self::Step(Some(endpoint)) => Subject::Step(Some(name(endpoint)?)),
            Self::Prefill(None) => Subject::Prefill(None),
            Self::Step(None) => Subject::Step(None),
            Self::Answer(kind) => Subject::Answer(kind),
        })
    }
}

// === impl Estimate ===

impl Estimate {
    /// Whether others should hear of this, if `told` is what they have heard.
    pub(crate) fn is_news(&self, told: &Self) -> bool {
        let more = f64::from(self.observations) > OBSERVATIONS_CHANGE * f64::from(told.observations);
        let fewer = self.observations < told.observations;
        let surer = self.observations < SAMPLES_MAX || told.observations < SAMPLES_MAX;
        // A value without observations is an assumption.
        let is_observed = self.observations > 0;
        fewer
            || is_observed && more && surer
            || is_observed && (self.value - told.value).abs() > ESTIMATE_CHANGE * told.value
    }
}

// === impl Share ===

impl Share {
    /// Whether others should hear of this, if `told` is what they have heard. Answers grow with every token, which is
    /// not worth a message until they have grown a little.
    pub(crate) fn is_news(&self, told: &Self) -> bool {
        let context_tokens = self.in_flight.context_tokens;
        let changed = context_tokens.abs_diff(told.in_flight.context_tokens);
        let rest =
            |share: &Self| Self { in_flight: InFlight { context_tokens: 0, ..share.in_flight }, ..*share };
        rest(self) != rest(told) || changed > CONTEXT_TOKENS.max(context_tokens / CONTEXT_SHARE)
    }
}
