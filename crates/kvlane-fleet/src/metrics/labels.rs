//! Labels of metrics. They are bounded: models and workers are those of the fleet, all others are closed sets.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

/// The model a request was for.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelLabel {
    /// A model of the fleet.
    pub model: String,
}

/// How a request ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// A model of the fleet, or empty if it got no pool.
    pub model: String,
    /// The API, or `other`.
    pub api: &'static str,
    /// HTTP status; 499 when the client left.
    pub code: u16,
}

/// Why a worker was picked.
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

/// Why a prompt was estimated in a pool that counts.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EstimateLabels {
    /// A model of the fleet.
    pub model: String,
    /// Why its tokens were not counted.
    pub why: &'static str,
}

/// Where tokens that a tokenizer counted came from.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TokensLabel {
    /// `cache`, or `text` that had to be encoded.
    pub from: &'static str,
}

/// What came of a configuration that was to be taken over.
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

/// Ways in which an attempt fails.
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
    /// Its name, for people.
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
