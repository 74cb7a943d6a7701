//! Decisions, and the rows that explain them.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::cache_accuracy::{Feed, Knowledge, Prediction};
use crate::endpoint::EndpointId;
use crate::policy::{Candidate, PairCost, Reason, SplitTerms};
use crate::request::{Claims, RequestId, SchedulingRequest, SessionKey, Slo, TenantKey};
use crate::time::Nanos;

/// The endpoint chosen for a request, and the one that computes its prompt if that is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Leading prompt tokens that it is expected to hold.
    pub overlap_tokens: u32,
    /// Why it was picked.
    pub reason: Reason,
    /// How the overlap is known.
    pub knowledge: Knowledge,
    /// The state of the endpoint's KV event feed.
    pub feed: Feed,
    /// Where the prompt is computed, if not at `endpoint`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillLeg>,
}

/// The first leg of a split placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillLeg {
    /// The id under which it is in flight.
    pub id: RequestId,
    /// The endpoint that computes the prompt.
    pub endpoint: EndpointId,
    /// Leading prompt tokens that it is expected to hold.
    pub overlap_tokens: u32,
    /// How the overlap is known.
    pub knowledge: Knowledge,
    /// The state of its KV event feed.
    pub feed: Feed,
}

/// Why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// No endpoint is healthy and not draining, or all such endpoints have already failed this request.
    NoEndpoint,
    /// The pool's in-flight limit and its queue limit are both reached.
    QueueFull,
    /// The request waited in the queue until its timeout.
    QueueTimeout,
    /// It is a retry or a hedge, and that budget is spent.
    BudgetSpent,
    /// It should miss its latency objectives on every endpoint, and is not to be placed then.
    SloMissed,
}

/// A rejection: why, and when to retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Why.
    pub why: Rejection,
    /// Time after which the queue should have drained; 0 where that is not known.
    pub retry_after: Nanos,
}

// === impl Refused ===

impl Refused {
    /// A rejection without `retry_after`.
    pub const fn at_once(why: Rejection) -> Self {
        Self { why, retry_after: Nanos::ZERO }
    }
}

/// One decision with everything that the policy saw, for inspection.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// Time of the decision.
    pub at: Nanos,
    /// The request.
    pub request: RequestId,
    /// How often the request had been placed before.
    pub attempt: u32,
    /// Its prompt length.
    pub prompt_tokens: u32,
    /// The conversation it belongs to, if the client says.
    pub session: Option<SessionKey>,
    /// The tenant, if the client says.
    pub tenant: Option<TenantKey>,
    /// Its priority.
    pub priority: i8,
    /// What its client claims about it.
    pub claims: Claims,
    /// Its latency objectives.
    pub slo: Slo,
    /// Forecast output tokens.
    pub output_tokens: u32,
    /// The decision.
    pub placement: Placement,
    /// The rows that the policy saw, at most [`ROWS_MAX`], always including the picked one.
    pub rows: Vec<ReceiptRow>,
    /// Number of rows omitted, and of endpoints that the policy had no need to see.
    pub rows_left_out: u32,
    /// The cheapest ways to split the request, the cheapest first; empty where the policy priced none.
    pub pairs: Vec<ReceiptPair>,
}

/// A way to split a request between two endpoints, and its price.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReceiptPair {
    /// Computes the prompt.
    pub prefill: EndpointId,
    /// Decodes the answer.
    pub endpoint: EndpointId,
    /// The price, in the unit of the rows' costs.
    pub cost: f64,
    /// Its terms.
    pub terms: SplitTerms,
}

/// One row of a receipt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReceiptRow {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Leading prompt tokens that it was expected to hold.
    pub overlap_tokens: u32,
    /// Of these, the tokens that it was expected to hold only below the GPU.
    pub lower_tokens: u32,
    /// How the overlap was known.
    pub knowledge: Knowledge,
    /// The prediction of each source.
    pub prediction: Prediction,
    /// Requests in flight there before this one.
    pub requests: u32,
    /// Uncached prompt tokens in flight there before this one.
    pub prefill_tokens: u64,
    /// Tokens in flight there before this one.
    pub context_tokens: u64,
    /// The policy's own cost, in its own unit; NaN where the policy computed none.
    pub cost: f64,
}

/// The most rows a receipt keeps.
pub const ROWS_MAX: usize = 64;

/// The most recent decisions, oldest first. Bounded; memory is reused.
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

    /// Changes how many decisions are kept.
    pub(crate) fn set_kept_max(&mut self, kept_max: usize) {
        self.ring.drain(..self.ring.len().saturating_sub(kept_max));
        self.kept_max = kept_max;
    }

    /// Whether decisions are kept at all.
    pub fn is_on(&self) -> bool {
        self.kept_max > 0
    }

    /// The kept decisions, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Receipt> + ExactSizeIterator {
        self.ring.iter()
    }

    pub(crate) fn push(
        &mut self,
        at: Nanos,
        request: &SchedulingRequest,
        output_tokens: u32,
        placement: Placement,
        (candidates, unseen): (&[Candidate], u32),
        (costs, priced): (&[f64], &[PairCost]),
    ) {
        let oldest = if self.ring.len() >= self.kept_max { self.ring.pop_front() } else { None };
        let (mut rows, mut pairs) = oldest.map(|receipt| (receipt.rows, receipt.pairs)).unwrap_or_default();
        rows.clear();
        pairs.clear();
        pairs.extend(priced.iter().map(|&PairCost { prefill, row, cost, terms }| ReceiptPair {
            prefill: candidates[prefill].endpoint,
            endpoint: candidates[row].endpoint,
            cost,
            terms,
        }));
        let mut left_out = unseen;
        for (candidate, &cost) in candidates.iter().zip(costs) {
            if rows.len() >= self.rows_max - 1 && candidate.endpoint != placement.endpoint {
                left_out += 1;
                continue;
            }
            let load = candidate.load.in_flight;
            rows.push(ReceiptRow {
                endpoint: candidate.endpoint,
                overlap_tokens: candidate.overlap_tokens,
                lower_tokens: candidate.lower_tokens,
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
            claims: request.claims,
            slo: request.slo,
            output_tokens,
            placement,
            rows,
            rows_left_out: left_out,
            pairs,
        });
    }
}
