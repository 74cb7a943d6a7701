//! What may influence a placement, and nothing else: no headers, no JSON, no sockets.

use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::time::Nanos;

/// Names a request for as long as it is queued or in flight. The driver hands them out, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// Names a conversation: a hash of what its client calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionKey(pub u64);

// === impl SessionKey ===

impl SessionKey {
    /// The key of a conversation that is called `name` by somebody with this `seed`: another seed for each tenant, 0 for
    /// nobody in particular. The same everywhere and always, so that all who hash sessions agree.
    pub fn named(name: &[u8], seed: u64) -> Self {
        Self(xxh3_64_with_seed(name, seed))
    }
}

/// Names whom a request is for, where several share a fleet: a hash of a fairness id or of an API key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TenantKey(pub u64);

/// Names a request as its client or the gateway calls it, whatever becomes of it: a hash, to find it in a recording by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestKey(pub u64);

// === impl RequestKey ===

impl RequestKey {
    /// The key of a request that is called `name`.
    pub fn named(name: &[u8]) -> Self {
        Self(xxh3_64_with_seed(name, 0))
    }
}

/// A request as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulingRequest {
    /// Its id.
    pub id: RequestId,
    /// Prompt length in tokens: counted, or estimated from bytes.
    pub prompt_tokens: u32,
    /// Endpoints it must not go to: they have failed it, or lack its adapter. Shared, since the latter are the same
    /// for all requests.
    #[serde(default = "nobody")]
    pub excluded: Arc<[EndpointId]>,
    /// How often it has been placed before. A retry does not wait for room in the pool, only for an endpoint.
    #[serde(default)]
    pub attempt: u32,
    /// The conversation it is a turn of, if its client says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionKey>,
    /// Whom it is for, if its client says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantKey>,
    /// Of those that wait, higher ones go first; 0 if its client does not say.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub priority: i8,
    /// Most output tokens its client wants, if it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens_max: Option<u32>,
    /// Whether its answer is wanted all at once, so that nobody sees when its first token comes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole_answer: bool,
    /// If it is a second copy of a request in flight, because the first is late: how long that one has waited. It waits in
    /// no queue; the first one's endpoint is among `excluded`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hedge: Option<Nanos>,
    /// The first block of its prompt, which policies that hash prompts go by. [`crate::router::Router::arrive`] fills it in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<BlockHash>,
    /// What it is called, for people who look for it. Nothing is decided by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<RequestKey>,
}

impl SchedulingRequest {
    /// A request that has not been tried yet.
    pub fn new(id: RequestId, prompt_tokens: u32) -> Self {
        Self {
            id,
            prompt_tokens,
            excluded: nobody(),
            attempt: 0,
            session: None,
            tenant: None,
            priority: 0,
            output_tokens_max: None,
            whole_answer: false,
            hedge: None,
            head: None,
            name: None,
        }
    }
}

/// The empty list, which costs nothing after the first time.
pub fn nobody() -> Arc<[EndpointId]> {
    static NOBODY: LazyLock<Arc<[EndpointId]>> = LazyLock::new(|| Arc::new([]));
    Arc::clone(&NOBODY)
}

/// Whether a priority is the one of who says nothing.
fn is_usual(priority: &i8) -> bool {
    *priority == 0
}
