//! Inputs and outputs of a scheduler.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Config;
use crate::adapters::AdapterReport;
use crate::breaker;
use crate::cache_accuracy::{self, Feed, KnowledgeChange, Prediction};
use crate::decision::{Placement, Refused};
use crate::disaggregation::{Part, WarmUp};
use crate::endpoint::EndpointId;
use crate::load::LoadReport;
use crate::rates::OwnMeasures;
use crate::replica::{Estimate, ReplicaId, Service, Share, Subject, Turn};
use crate::request::{AnswerEnd, RequestId, SchedulingRequest};
use crate::time::Nanos;

/// An event in a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// An endpoint joins, idle. Its id is [`Pool::next_id`](crate::endpoint::Pool::next_id).
    Joined {
        /// The endpoint.
        endpoint: EndpointId,
        /// Its display name.
        name: Arc<str>,
        /// Whether it accepts requests at once.
        healthy: bool,
        /// Whether it accepts no new requests.
        draining: bool,
    },
    /// An endpoint's part in disaggregated serving changes. At first it serves requests alone.
    Assigned {
        /// The endpoint.
        endpoint: EndpointId,
        /// Its part.
        part: Part,
    },
    /// An endpoint starts or stops draining: it accepts no new requests while draining.
    Draining {
        /// The endpoint.
        endpoint: EndpointId,
        /// Whether it drains.
        draining: bool,
    },
    /// An endpoint has left the pool. Its requests still finish as usual; its ledger is dropped.
    Left {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// A health check changed an endpoint's state.
    Health {
        /// The endpoint.
        endpoint: EndpointId,
        /// Whether it is healthy.
        healthy: bool,
    },
    /// An endpoint has stopped making progress on its requests in flight, or makes progress again.
    Stalled {
        /// The endpoint.
        endpoint: EndpointId,
        /// Whether it has stopped.
        stalled: bool,
    },
    /// An endpoint answered a request with an error of its own: another endpoint answered the same request
    /// successfully.
    Blamed {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// An endpoint reported its load.
    Reported {
        /// The endpoint.
        endpoint: EndpointId,
        /// Its report.
        reported: LoadReport,
    },
    /// An endpoint reported its adapters.
    Adapters {
        /// The endpoint.
        endpoint: EndpointId,
        /// Its report.
        reported: AdapterReport,
    },
    /// A request arrives, for the first time or as a retry.
    Arrived {
        /// The request.
        request: SchedulingRequest,
        /// Predicted leading prompt tokens cached, per endpoint that holds any.
        overlap: Vec<(EndpointId, Prediction)>,
        /// Prompt tokens per block.
        block_tokens: u32,
    },
    /// The first output token arrived.
    FirstToken {
        /// The request.
        request: RequestId,
    },
    /// A non-streamed answer arrived or began to arrive: its prompt is prefilled, but the time of its first token is
    /// unknown.
    Begun {
        /// The request.
        request: RequestId,
    },
    /// More output tokens arrived.
    Tokens {
        /// The request.
        request: RequestId,
        /// How many.
        count: u32,
    },
    /// The answer ended and has this many output tokens: more than were observed where tokens came in groups or all at
    /// once.
    Wrote {
        /// The request.
        request: RequestId,
        /// Output tokens, the first one included.
        output_tokens: u32,
    },
    /// Why the answer ended, before it is over.
    Ended {
        /// The request.
        request: RequestId,
        /// Why.
        end: AnswerEnd,
    },
    /// The answer reported its prompt's cache reuse, before it ended.
    Answered {
        /// The request.
        request: RequestId,
        /// What the answer reported.
        reported: cache_accuracy::ReportedReuse,
    },
    /// The state of an endpoint's KV event feed changed.
    Fed {
        /// The endpoint.
        endpoint: EndpointId,
        /// The new state.
        feed: Feed,
    },
    /// An endpoint has lost its whole KV cache.
    Forgot {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// An endpoint's cache counters since it started: prompt tokens queried and prompt tokens hit.
    Counted {
        /// The endpoint.
        endpoint: EndpointId,
        /// Tokens queried.
        queries: f64,
        /// Tokens hit.
        hits: f64,
        /// Prompt tokens per block.
        block_tokens: u32,
    },
    /// What an endpoint has measured itself since it started.
    Measured {
        /// The endpoint.
        endpoint: EndpointId,
        /// What it says.
        own: OwnMeasures,
    },
    /// An endpoint failed a dispatched request: no answer, a broken answer or an error answer. Its [`Input::Finished`]
    /// follows.
    Failed {
        /// The request.
        request: RequestId,
    },
    /// The KV blocks of a split request did not arrive: the transfer failed, or took too long. The [`Input::Finished`] of
    /// the request follows. Neither endpoint is to blame for it.
    TransferFailed {
        /// The request.
        request: RequestId,
    },
    /// A transfer between two endpoints that no request needs: see [`WarmUp`].
    WarmUp {
        /// The endpoint that computes prompts.
        from: EndpointId,
        /// The endpoint that decodes answers.
        to: EndpointId,
        /// What is known.
        warm_up: WarmUp,
    },
    /// An endpoint answered that it is too busy for a dispatched request. This is no failure; the endpoint gets no
    /// further requests for a while. Its [`Input::Finished`] follows.
    Busy {
        /// The request.
        request: RequestId,
        /// The endpoint's `Retry-After`, if it sent one.
        retry_after: Option<Nanos>,
    },
    /// An endpoint has answered a request successfully, or begun to. Its [`Input::Finished`] follows.
    Succeeded {
        /// The request.
        request: RequestId,
    },
    /// The prefix lookup of a dequeued request: the answer to [`Output::Refresh`].
    Refreshed {
        /// The request.
        request: RequestId,
        /// Predicted leading prompt tokens cached, per endpoint that holds any.
        overlap: Vec<(EndpointId, Prediction)>,
    },
    /// The pool's configuration changes. What the scheduler has learned stays.
    Configured {
        /// The new configuration.
        config: Box<Config>,
    },
    /// A request is over, whatever its outcome, or its client has stopped waiting in the queue.
    Finished {
        /// The request.
        request: RequestId,
    },
    /// Another router of this pool told what it has placed: see [`crate::replica`].
    Heard {
        /// The other router.
        replica: ReplicaId,
        /// The number of its news.
        number: u64,
        /// What it has placed where.
        shares: Vec<(EndpointId, Share)>,
        /// How much it has served tenants.
        #[serde(default)]
        services: Vec<Service>,
        /// What it has learned from its own answers.
        #[serde(default)]
        learned: Vec<(Subject, Estimate)>,
        /// The last turns of conversations, with their endpoints.
        #[serde(default)]
        turns: Vec<(EndpointId, Turn)>,
    },
    /// Only time has passed.
    Tick,
}

/// A consequence of an input.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// Send the request to this endpoint. Its load is already reserved.
    Dispatch {
        /// The request.
        request: RequestId,
        /// The endpoint and why it was chosen.
        placement: Placement,
    },
    /// Reject the request.
    Reject {
        /// The request.
        request: RequestId,
        /// Why, and when to retry.
        refused: Refused,
    },
    /// A queued request's turn has come, and its prefix lookup is as old as its wait: look the prefix up again and
    /// answer with [`Input::Refreshed`].
    Refresh {
        /// The request.
        request: RequestId,
    },
    /// An endpoint's circuit breaker changed state.
    Breaker {
        /// The endpoint.
        endpoint: EndpointId,
        /// The new state.
        state: breaker::State,
    },
    /// A draining endpoint has no request left.
    Drained {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// The scheduler trusts its knowledge of an endpoint's cache more, or less, than before.
    Knowledge {
        /// The endpoint.
        endpoint: EndpointId,
        /// From which level to which, and why.
        change: KnowledgeChange,
    },
}

// === impl Output ===

impl Output {
    /// The request that this output concerns, if any.
    pub fn request(&self) -> Option<RequestId> {
        match *self {
            Self::Dispatch { request, .. } | Self::Reject { request, .. } => Some(request),
            Self::Refresh { .. } | Self::Drained { .. } | Self::Knowledge { .. } | Self::Breaker { .. } => {
                None
            }
        }
    }
}
