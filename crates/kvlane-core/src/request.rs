//! What may influence a placement, and nothing else: no headers, no JSON, no sockets.

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
    /// Endpoints that already failed it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<EndpointId>,
    /// How often it has been placed before. A retry waits in no queue.
    #[serde(default)]
    pub attempt: u32,
}

impl SchedulingRequest {
    /// A request that has not been tried yet.
    pub fn new(id: RequestId, prompt_tokens: u32) -> Self {
        Self { id, prompt_tokens, excluded: Vec::new(), attempt: 0 }
    }
}
