//! Scheduling requests: the properties of a request that may influence its placement.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::time::Nanos;

/// Id of a request while it is queued or in flight. The driver assigns each id once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// Key of a conversation: a hash of the client's name for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionKey(pub u64);

// === impl SessionKey ===

impl SessionKey {
    /// The key of a conversation `name`. `seed` differs per tenant and is 0 without a tenant. Stable across processes
    /// and versions, so that all components that hash sessions agree.
    pub fn named(name: &[u8], seed: u64) -> Self {
        Self(xxh3_64_with_seed(name, seed))
    }
}

/// Key of a tenant, where several share a fleet: a hash of a fairness id or an API key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TenantKey(pub u64);

/// Key of a request by its external id: a hash, used to find it in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestKey(pub u64);

// === impl RequestKey ===

impl RequestKey {
    /// The key of a request with the external id `name`.
    pub fn named(name: &[u8]) -> Self {
        Self(xxh3_64_with_seed(name, 0))
    }
}

/// Key of an adapter (LoRA): a hash of the name that clients and engines call it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AdapterKey(NonZeroU64);

// === impl AdapterKey ===

impl AdapterKey {
    /// The key of an adapter `name`.
    pub fn named(name: &[u8]) -> Self {
        Self(NonZeroU64::new(xxh3_64_with_seed(name, 0)).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) const fn number(self) -> u64 {
        self.0.get()
    }

    pub(crate) fn numbered(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}

/// A request as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulingRequest {
    /// Its id.
    pub id: RequestId,
    /// Prompt length in tokens: exact, or estimated from bytes.
    pub prompt_tokens: u32,
    /// Endpoints that it must not use: they failed it, or lack its adapter. Shared, since the latter are the same for
    /// all requests.
    #[serde(default = "no_endpoints")]
    pub excluded: Arc<[EndpointId]>,
    /// How often it has been placed before. A retry does not wait for the pool's in-flight limit, only for an endpoint.
    #[serde(default)]
    pub attempt: u32,
    /// The conversation it belongs to, if the client says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionKey>,
    /// The tenant, if the client says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantKey>,
    /// Queue priority, higher first; 0 if the client does not say.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub priority: i8,
    /// The client's limit of output tokens, if it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens_max: Option<u32>,
    /// Whether the answer is not streamed, so that its first token cannot be observed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole_answer: bool,
    /// For a hedge, a second copy of a request in flight: how long the first copy has waited. A hedge is never queued;
    /// the first copy's endpoint is among `excluded`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hedge: Option<Nanos>,
    /// The id of its prefill leg, if the request may be split between two endpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leg: Option<RequestId>,
    /// The first block of its prompt, for policies that hash prompts. [`crate::router::Router::arrive`] sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<BlockHash>,
    /// The adapter that its model's name stands for, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterKey>,
    /// Its latency objectives.
    #[serde(default, skip_serializing_if = "Slo::is_none")]
    pub slo: Slo,
    /// Key of its external id. Has no influence on decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<RequestKey>,
    /// What its client claims about it.
    #[serde(default, skip_serializing_if = "Claims::is_none")]
    pub claims: Claims,
}

/// What a client claims about the future of its request. A claim may be wrong: [`crate::forecast`] and
/// [`crate::session_admission`] say what a wrong one costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// Expected output tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u32>,
    /// Whether no other request of its conversation will follow.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_last: bool,
}

// === impl Claims ===

impl Claims {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Why an answer ended, as far as that says whether its conversation goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerEnd {
    /// Not known.
    #[default]
    Unknown,
    /// It calls tools: an agent runs them and returns with their results.
    ToolCalls,
    /// It is complete, or was cut at its longest length: a person reads it.
    Complete,
}

/// Service level objectives of a request, as its client or the configuration states them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slo {
    /// Longest time to first token, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<u32>,
    /// Longest time per output token after the first, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<u32>,
    /// What happens if the request should miss one of them on every endpoint.
    #[serde(default, skip_serializing_if = "IfMissed::is_usual")]
    pub if_missed: IfMissed,
}

/// What happens to a request that should miss its objectives on every endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfMissed {
    /// It is refused if its priority is negative, else placed as best effort.
    #[default]
    ByPriority,
    /// It is placed as if it had no objectives.
    BestEffort,
    /// It is refused.
    Refuse,
}

// === impl Slo ===

impl Slo {
    /// No objectives.
    pub const NONE: Self = Self { ttft_ms: None, tpot_ms: None, if_missed: IfMissed::ByPriority };

    /// Whether an answer met them: its time to first token, and its mean time per token after that, if it has several.
    pub fn is_met(&self, ttft: Nanos, tpot_s: Option<f64>) -> bool {
        self.ttft_ms.is_none_or(|most| ttft <= Nanos::from_millis(most.into()))
            && !self.tpot_ms.zip(tpot_s).is_some_and(|(most, tpot_s)| 1e3 * tpot_s > f64::from(most))
    }

    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ttft = self.ttft_ms.map(|most| format!("first token within {most} ms"));
        let tpot = self.tpot_ms.map(|most| format!("{most} ms per token after it"));
        f.write_str(&ttft.into_iter().chain(tpot).collect::<Vec<_>>().join(", "))
    }
}

// === impl IfMissed ===

crate::setting!(Text: IfMissed);

impl IfMissed {
    /// Whether a request of this priority is refused.
    fn refuses(self, priority: i8) -> bool {
        match self {
            Self::ByPriority => priority < 0,
            Self::BestEffort => false,
            Self::Refuse => true,
        }
    }

    fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

// === impl SchedulingRequest ===

impl SchedulingRequest {
    /// A request that has not been tried yet.
    pub fn new(id: RequestId, prompt_tokens: u32) -> Self {
        Self {
            id,
            prompt_tokens,
            excluded: no_endpoints(),
            attempt: 0,
            session: None,
            tenant: None,
            priority: 0,
            output_tokens_max: None,
            whole_answer: false,
            hedge: None,
            leg: None,
            head: None,
            adapter: None,
            slo: Slo::default(),
            name: None,
            claims: Claims::default(),
        }
    }

    /// Whether it is refused if it should miss its objectives on every endpoint. What has been placed once is not.
    pub(crate) fn is_refused_if_late(&self) -> bool {
        self.attempt == 0 && self.slo.if_missed.refuses(self.priority)
    }
}

/// The empty list, allocated once.
pub fn no_endpoints() -> Arc<[EndpointId]> {
    static NOBODY: LazyLock<Arc<[EndpointId]>> = LazyLock::new(|| Arc::new([]));
    Arc::clone(&NOBODY)
}

/// Whether a priority is the default.
fn is_usual(priority: &i8) -> bool {
    *priority == 0
}
