//! What was decided, and the rows that explain it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::cache_accuracy::{Feed, Knowledge, Prediction};
use crate::endpoint::EndpointId;
use crate::policy::{Candidate, Reason};
use crate::request::{RequestId, SchedulingRequest, SessionKey, TenantKey};
use crate::time::Nanos;

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Leading prompt tokens it is expected to hold.
    pub overlap_tokens: u32,
    /// Why it was picked.
    pub reason: Reason,
    /// How the overlap is known.
    pub knowledge: Knowledge,
    /// The state of the endpoint's event feed.
    pub feed: Feed,
}

/// Why a request goes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// No endpoint is healthy and stays, or all such have already failed this request.
    NoEndpoint,
    /// The pool's requests in flight and its queue are both at their limit.
    QueueFull,
    /// It waited in the queue for as long as it may.
    QueueTimeout,
    /// It is a retry or a hedge, and enough requests are sent more than once already.
    BudgetSpent,
}

/// A request that goes nowhere: why, and when to come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Why.
    pub why: Rejection,
    /// Time after which there should be room, as the queue drains; 0 where that is not known.
    pub retry_after: Nanos,
}

// === impl Refused ===

impl Refused {
    /// Refused, and nobody knows until when.
    pub const fn at_once(why: Rejection) -> Self {
        Self { why, retry_after: Nanos::ZERO }
    }
}

/// One decision as it can be shown to a person: all that the policy saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// When.
    pub at: Nanos,
    /// Which request.
    pub request: RequestId,
    /// How often it had been placed before.
    pub attempt: u32,
    /// Its prompt length.
    pub prompt_tokens: u32,
    /// The conversation it is a turn of, if its client says.
    pub session: Option<SessionKey>,
    /// Whom it is for, if its client says.
    pub tenant: Option<TenantKey>,
    /// How urgent it is.
    pub priority: i8,
    /// Output tokens that its answer was expected to have.
    pub output_tokens: u32,
    /// What was decided.
    pub placement: Placement,
    /// The rows the policy saw, at most [`ROWS_MAX`], the picked one always among them.
    pub rows: Vec<ReceiptRow>,
    /// How many more rows there were.
    pub rows_left_out: u32,
}

/// One row of a receipt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReceiptRow {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Leading prompt tokens it was expected to hold.
    pub overlap_tokens: u32,
    /// How that was known.
    pub knowledge: Knowledge,
    /// What each source of knowledge said.
    pub prediction: Prediction,
    /// Requests in flight there before this one.
    pub requests: u32,
    /// Uncached prompt tokens in flight there before this one.
    pub prefill_tokens: u64,
    /// Tokens in flight there before this one.
    pub context_tokens: u64,
    /// The policy's own cost, in its own unit; NaN where the policy gave none.
    pub cost: f64,
}

/// The most rows a receipt keeps.
pub const ROWS_MAX: usize = 64;

/// The last decisions, oldest first. Bounded; memory is reused.
#[derive(Debug)]
pub struct Receipts {
    ring: VecDeque<Receipt>,
    kept_max: usize,
    rows_max: usize,
}

// === impl Receipts ===

impl Receipts {
    /// Keeps the last `kept_max` decisions, or none.
    pub fn new(kept_max: usize) -> Self {
        Self { ring: VecDeque::new(), kept_max, rows_max: ROWS_MAX }
    }

    /// Keeps every row of a decision, however many there are.
    #[must_use]
    pub(crate) fn with_all_rows(self) -> Self {
        Self { rows_max: usize::MAX, ..self }
    }

    /// Keeps another number from here on.
    pub(crate) fn set_kept_max(&mut self, kept_max: usize) {
        self.ring.drain(..self.ring.len().saturating_sub(kept_max));
        self.kept_max = kept_max;
    }

    /// Whether decisions are kept at all.
    pub fn is_on(&self) -> bool {
        self.kept_max > 0
    }

    /// The last decisions, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Receipt> + ExactSizeIterator {
        self.ring.iter()
    }

    pub(crate) fn push(
        &mut self,
        at: Nanos,
        request: &SchedulingRequest,
        output_tokens: u32,
        placement: Placement,
        candidates: &[Candidate],
        costs: &[f64],
    ) {
        let oldest = if self.ring.len() >= self.kept_max { self.ring.pop_front() } else { None };
        let mut rows = oldest.map(|receipt| receipt.rows).unwrap_or_default();
        rows.clear();
        let mut left_out = 0;
        for (candidate, &cost) in candidates.iter().zip(costs) {
            if rows.len() >= self.rows_max - 1 && candidate.endpoint != placement.endpoint {
                left_out += 1;
                continue;
            }
            let load = candidate.load.in_flight;
            rows.push(ReceiptRow {
                endpoint: candidate.endpoint,
                overlap_tokens: candidate.overlap_tokens,
                knowledge: candidate.knowledge,
                prediction: candidate.prediction,
                requests: load.requests,
                prefill_tokens: load.prefill_tokens,
                context_tokens: load.context_tokens,
                cost,
            });
        }
        self.ring.push_back(Receipt {
            at,
            request: request.id,
            attempt: request.attempt,
            prompt_tokens: request.prompt_tokens,
            session: request.session,
            tenant: request.tenant,
            priority: request.priority,
            output_tokens,
            placement,
            rows,
            rows_left_out: left_out,
        });
    }
}
