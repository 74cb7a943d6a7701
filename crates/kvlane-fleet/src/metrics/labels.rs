//! Labels of metrics. They are bounded: models and workers are those of the fleet, all others are closed sets.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::family::Family;

use super::histogram::Histogram;

/// The model a request was for.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelLabel {
    /// A model of the fleet.
    pub model: String,
}

/// The outcome of a request.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// A model of the fleet, or empty if it got no pool.
    pub model: String,
    /// The API, or `other`.
    pub api: &'static str,
    /// HTTP status; 499 when the client disconnected.
    pub code: u16,
}

/// The reason for a placement.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SelectionLabels {
    /// The worker's URL.
    pub worker: String,
    /// The pool's policy.
    pub policy: &'static str,
    /// The policy's reason.
    pub reason: &'static str,
}

/// One worker in one pool.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WorkerLabels {
    /// The worker's URL.
    pub worker: String,
    /// The pool's model.
    pub model: String,
}

/// One worker.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WorkerLabel {
    /// The worker's URL.
    pub worker: String,
}

/// Why a prompt's tokens were estimated in a pool that counts.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EstimateLabels {
    /// A model of the fleet.
    pub model: String,
    /// Why they were not counted.
    pub why: &'static str,
}

/// The source of counted tokens.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TokensLabel {
    /// `cache`, or `text` that had to be encoded.
    pub from: &'static str,
}

/// The result of a configuration reload.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReloadLabel {
    /// `applied`, `unchanged` or `refused`.
    pub result: &'static str,
}

/// Why an attempt on a worker failed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct FailureLabels {
    /// The worker's URL.
    pub worker: String,
    /// What happened.
    pub kind: FailureKind,
}

/// Kinds of failed attempts.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelValue)]
#[allow(non_camel_case_types, missing_docs, reason = "the variants are the label values, word for word")]
pub enum FailureKind {
    connect,
    connect_timeout,
    broken,
    garbage,
    status,
    mid_stream,
    timeout,
    unfit,
    stalled,
}

// === impl FailureKind ===

impl FailureKind {
    /// Its name in logs and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::connect => "connect",
            Self::connect_timeout => "connect_timeout",
            Self::broken => "broken",
            Self::garbage => "garbage",
            Self::status => "status",
            Self::mid_stream => "mid_stream",
            Self::timeout => "timeout",
            Self::unfit => "unfit",
            Self::stalled => "stalled",
        }
    }
}

pub(super) type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;
