//! A request whose pool is known.

use std::sync::Arc;

use kvlane_core::block::BlockHash;
use kvlane_core::poison_prompts::PromptKey;
use kvlane_core::request::RequestKey;
use kvlane_core::time::Nanos;
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::worker::WorkerId;
use tokio::time::Instant;

use crate::attributes::Facts;
use crate::limits::Charge;
use crate::timeline::Timeline;

/// A request that knows its pool and is to be placed, perhaps several times.
#[derive(Clone)]
pub struct Routed {
    pub(crate) served: Arc<Served>,
    pub(crate) chain: Vec<BlockHash>,
    pub(crate) prompt_tokens: u32,
    pub(crate) facts: Facts,
    pub(crate) received: Nanos,
    /// Where its time goes.
    pub timeline: Arc<Timeline>,
    /// What its client or the gateway calls it.
    pub name: RequestKey,
    pub(crate) deadline: Instant,
    /// What it was let in with.
    pub charge: Option<Arc<Charge>>,
    /// What its prompt is called when engines die under it.
    pub prompt: PromptKey,
    /// The worker that keeps what it refers to.
    pub pinned: Option<WorkerId>,
}
