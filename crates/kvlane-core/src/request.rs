//! What may influence a placement, and nothing else: no headers, no JSON, no sockets.

use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};

use crate::endpoint::EndpointId;

/// Names a request for as long as it is queued or in flight. The driver hands them out, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

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
    /// How often it has been placed before. A retry waits in no queue.
    #[serde(default)]
    pub attempt: u32,
}

impl SchedulingRequest {
    /// A request that has not been tried yet.
    pub fn new(id: RequestId, prompt_tokens: u32) -> Self {
        Self { id, prompt_tokens, excluded: nobody(), attempt: 0 }
    }
}

/// The empty list, which costs nothing after the first time.
pub fn nobody() -> Arc<[EndpointId]> {
    static NOBODY: LazyLock<Arc<[EndpointId]>> = LazyLock::new(|| Arc::new([]));
    Arc::clone(&NOBODY)
}
