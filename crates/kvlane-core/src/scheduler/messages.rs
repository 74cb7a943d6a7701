//! What a scheduler is told, and what it says.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Config;
use crate::breaker;
use crate::cache_accuracy::{self, Feed, KnowledgeChange, Prediction};
use crate::decision::{Placement, Refused};
use crate::endpoint::EndpointId;
use crate::load::LoadReport;
use crate::request::{RequestId, SchedulingRequest};
use crate::time::Nanos;

/// Everything that can happen to a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// An endpoint comes, idle. Its id is [`Pool::next_id`].
    Joined {
        /// Its id.
        endpoint: EndpointId,
        /// What people call it.
        name: Arc<str>,
        /// Whether requests may be placed there at once.
        healthy: bool,
        /// Whether it takes no new requests.
        draining: bool,
    },
    /// An endpoint stops (or again starts) taking new requests.
    Draining {
        /// Which.
        endpoint: EndpointId,
        /// Stops, or starts.
        draining: bool,
    },
    /// An endpoint is gone. Its requests are settled as usual, its ledger is not needed any more.
    Left {
        /// Which.
        endpoint: EndpointId,
    },
    /// An endpoint was found fit or unfit.
    Health {
        /// Which.
        endpoint: EndpointId,
        /// Fit.
        healthy: bool,
    },
    /// An endpoint has stopped making progress on what is in flight there, or makes progress again.
    Stalled {
        /// Which.
        endpoint: EndpointId,
        /// Stopped.
        stalled: bool,
    },
    /// An endpoint answered a request with an error that was the endpoint's own: another one answered it soundly.
    Blamed {
        /// Which.
        endpoint: EndpointId,
    },
    /// An endpoint said how loaded it is.
    Reported {
        /// Which.
        endpoint: EndpointId,
        /// What it said.
        reported: LoadReport,
    },
    /// A request wants a place, for the first time or again.
    Arrived {
        /// The request.
        request: SchedulingRequest,
        /// Leading prompt tokens per endpoint that is thought to hold any.
        overlap: Vec<(EndpointId, Prediction)>,
        /// Prompt tokens that one block stands for.
        block_tokens: u32,
    },
    /// The first token of the answer came.
    FirstToken {
        /// Whose.
        request: RequestId,
    },
    /// The answer came, or began to, all at once: its prompt is computed, and when its first token was made nobody saw.
    Begun {
        /// Whose.
        request: RequestId,
    },
    /// More tokens of the answer came.
    Tokens {
        /// Whose.
        request: RequestId,
        /// How many.
        count: u32,
    },
    /// The answer came to its end, and has so many tokens: more than were seen to come, where they came several at a
    /// time or all at once.
    Wrote {
        /// Whose.
        request: RequestId,
        /// How many, the first one included.
        output_tokens: u32,
    },
    /// The answer said what it took, before it was over.
    Answered {
        /// Whose.
        request: RequestId,
        /// What it said.
        reported: cache_accuracy::ReportedReuse,
    },
    /// An endpoint's event feed is in another state.
    Fed {
        /// Whose.
        endpoint: EndpointId,
        /// Its state.
        feed: Feed,
    },
    /// An endpoint has lost all that it held.
    Forgot {
        /// Which.
        endpoint: EndpointId,
    },
    /// An endpoint's counters, since it started: prompt tokens looked for in its cache, and found there.
    Counted {
        /// Which.
        endpoint: EndpointId,
        /// Looked for.
        queries: f64,
        /// Found.
        hits: f64,
        /// Prompt tokens that one block stands for.
        block_tokens: u32,
    },
    /// An endpoint failed a request that was placed there: no answer, a broken one, or one that says so. Its
    /// [`Input::Finished`] follows.
    Failed {
        /// Whose.
        request: RequestId,
    },
    /// An endpoint is too busy for a request that was placed there, and said so. That is no failure; it gets no further
    /// ones for a while. Its [`Input::Finished`] follows.
    Busy {
        /// Whose.
        request: RequestId,
        /// For how long, if it said.
        retry_after: Option<Nanos>,
    },
    /// An endpoint has answered a request soundly, or begun to. Its [`Input::Finished`] follows.
    Succeeded {
        /// Whose.
        request: RequestId,
    },
    /// What is known of the prefix of a request whose turn has come: the answer to [`Output::Refresh`].
    Refreshed {
        /// Whose.
        request: RequestId,
        /// Leading prompt tokens per endpoint that is thought to hold any.
        overlap: Vec<(EndpointId, Prediction)>,
    },
    /// The pool is to schedule in another way from here on. What it has learned stays.
    Configured {
        /// How.
        config: Box<Config>,
    },
    /// A request is over, in whatever way, or its client has stopped waiting for a place.
    Finished {
        /// Which.
        request: RequestId,
    },
    /// Nothing but time has passed.
    Tick,
}

/// What follows from an input.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// Send the request there now. Its load is already reserved.
    Dispatch {
        /// The request.
        request: RequestId,
        /// Where and why.
        placement: Placement,
    },
    /// Refuse the request.
    Reject {
        /// The request.
        request: RequestId,
        /// Why, and when to come again.
        refused: Refused,
    },
    /// A waiting request's turn has come, and what is known of its prefix is as old as its wait: tell
    /// [`Input::Refreshed`].
    Refresh {
        /// The request.
        request: RequestId,
    },
    /// An endpoint's breaker stands differently.
    Breaker {
        /// Whose.
        endpoint: EndpointId,
        /// Where it stands.
        state: breaker::State,
    },
    /// A draining endpoint has no request left.
    Drained {
        /// Which.
        endpoint: EndpointId,
    },
    /// What is known of an endpoint's cache is worth more, or less, than it was.
    Knowledge {
        /// Whose.
        endpoint: EndpointId,
        /// From what to what, and why.
        change: KnowledgeChange,
    },
}

// === impl Output ===

impl Output {
    /// The request whose fate it is, if it is one's.
    pub fn request(&self) -> Option<RequestId> {
        match *self {
            Self::Dispatch { request, .. } | Self::Reject { request, .. } => Some(request),
            Self::Refresh { .. } | Self::Drained { .. } | Self::Knowledge { .. } | Self::Breaker { .. } => {
                None
            }
        }
    }
}
