//! A request whose pool is known.

use std::sync::Arc;

use kvlane_core::block::BlockHash;
use kvlane_core::poison_prompts::PromptKey;
use kvlane_core::request::RequestKey;
use kvlane_core::time::Nanos;
use kvlane_fleet::snapshot::Served;
use kvlane_wire::api::Repeats;
use tokio::time::Instant;

use crate::alias::Alias;
use crate::attributes::Attributes;
use crate::limits::Charge;
use crate::objects::Kept;
use crate::timeline::Timeline;

/// A request whose pool is known, to be placed once or several times.
#[derive(Clone)]
pub struct Routed {
    pub(crate) served: Arc<Served>,
    pub(crate) chain: Vec<BlockHash>,
    pub(crate) prompt_tokens: u32,
    pub(crate) attributes: Attributes,
    pub(crate) received: Nanos,
    /// The time spent in each stage.
    pub timeline: Arc<Timeline>,
    /// The request's key: the client's or the gateway's.
    pub name: RequestKey,
    pub(crate) deadline: Instant,
    /// Its charge under the limits.
    pub charge: Option<Arc<Charge>>,
    /// The key of its prompt for counting engine deaths.
    pub prompt: PromptKey,
    /// Whether one worker may compute its prompt and another decode its answer.
    pub(crate) may_split: bool,
    /// The object that it refers to, which one worker keeps.
    pub kept: Option<Box<Kept>>,
    /// The name of the catalogue that it was asked for by.
    pub(crate) alias: Option<Arc<Alias>>,
    /// Whether it may be sent to another endpoint after it may have reached one.
    pub(crate) repeats: Repeats,
}
