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
    /// A name of the catalogue, else a model of the fleet, or empty if it got no pool.
    pub model: String,
    /// The API, or `other`.
    pub api: &'static str,
    /// HTTP status; 499 when the client disconnected.
    pub code: u16,
}

/// A name of the catalogue, and the model that answered.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TargetLabels {
    /// The name that clients use.
    pub model: String,
    /// The model that workers serve.
    pub target: String,
    /// `target`, or why it is a fallback.
    pub why: &'static str,
}

/// Copies of requests for another model.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct MirrorLabels {
    /// The model that gets them.
    pub model: String,
    /// `sent`, or `dropped` where too many are in flight.
    pub outcome: &'static str,
}

/// A source of discovery.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SourceLabel {
    /// `kubernetes`, `dns` or `file`.
    pub source: &'static str,
}

/// Another replica of the gateway.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReplicaLabel {
    /// Its id, in 16 hexadecimal digits.
    pub replica: String,
}

/// A direction between replicas.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct DirectionLabel {
    /// `sent` or `received`.
    pub direction: &'static str,
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

/// A statistic over the endpoints of a pool.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct StatLabels {
    /// The pool's model.
    pub model: String,
    /// `mean` or `max`.
    pub stat: &'static str,
}

/// Predicted times to first token of a pool.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PredictionLabels {
    /// The pool's model.
    pub model: String,
    /// How far they were off, as a range of percent of the measured time.
    pub error: &'static str,
}

/// Requests with latency objectives.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct SloLabels {
    /// The pool's model.
    pub model: String,
    /// `met`, `missed` or `refused`.
    pub outcome: &'static str,
}

/// The endpoints of a pool that decode split requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct DecodeLabels {
    /// The pool's model.
    pub model: String,
    /// Whether their load is `known` or `unknown`.
    pub load: &'static str,
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
    transfer,
}

// === impl FailureKind ===

impl FailureKind {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::connect,
        Self::connect_timeout,
        Self::broken,
        Self::garbage,
        Self::status,
        Self::mid_stream,
        Self::timeout,
        Self::unfit,
        Self::stalled,
        Self::transfer,
    ];

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
            Self::transfer => "transfer",
        }
    }
}

/// The outcome of an authentication.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct AuthLabels {
    /// `accepted`, `missing`, `invalid` or `forbidden`.
    pub(super) outcome: &'static str,
    /// The name of the key; empty if the key is unknown or absent.
    pub(super) name: String,
}

/// The outcome of a TLS handshake with a client.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct HandshakeLabel {
    /// `done` or `failed`.
    pub(super) outcome: &'static str,
}

/// One source of knowledge about a worker's cache.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct KnowledgeLabels {
    pub(super) worker: String,
    pub(super) model: String,
    pub(super) knowledge: &'static str,
}

/// A change between two sources.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct ChangeLabels {
    pub(super) model: String,
    pub(super) from: &'static str,
    pub(super) to: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct HedgeLabel {
    pub(super) outcome: Hedged,
}

/// Why a request was shed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct ShedLabel {
    pub(super) model: String,
    pub(super) reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct ContinuedLabel {
    pub(super) outcome: Continued,
}

/// A kind of event, message or incident of a feed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct KindLabels {
    pub(super) worker: String,
    pub(super) kind: &'static str,
}

/// One state of a feed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct StateLabels {
    pub(super) worker: String,
    pub(super) state: &'static str,
}

/// One entry of the configuration's limits.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct EntryLabels {
    /// Its key, or `*`.
    pub(super) key: String,
    /// Its model, or `*`.
    pub(super) model: String,
}

/// One entry, and which of its limits.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct LimitedLabels {
    pub(super) key: String,
    pub(super) model: String,
    /// `requests`, `tokens` or `concurrency`.
    pub(super) limit: &'static str,
}

/// A bound that no other metric shows.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct ReachedLabel {
    pub(super) limit: &'static str,
}

/// The place of a panic.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct PanicLabel {
    /// The kind of thread.
    pub(super) thread: &'static str,
}

/// The outcome of a warm-up.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WarmUpLabel {
    /// `ended`, `failed` or `skipped`.
    pub outcome: &'static str,
}

/// What became of a load or unload of an adapter.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct AdapterLabel {
    /// `loaded`, `unloaded` or `failed`.
    pub outcome: &'static str,
}

/// The outcome of a span.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct OutcomeLabel {
    /// `sent`, `dropped`, `failed` or `rejected`.
    pub(super) outcome: &'static str,
}

/// One stage of a model's requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct StageLabels {
    pub(super) model: String,
    pub(super) stage: &'static str,
}

/// The outcome of a second copy of a request.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the variants are the label values, word for word")]
pub enum Hedged {
    /// The second copy was answered first.
    won,
    /// The first copy was answered first.
    lost,
    /// No endpoint took it: no holder of its prefix, or no budget.
    refused,
}

/// The outcome of continuing a broken stream.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the variants are the label values, word for word")]
pub enum Continued {
    /// Another engine has begun to write the rest.
    resumed,
    /// Only the end was missing.
    closed,
    /// The answer is of a kind that cannot be continued.
    unfit,
    /// The limit of continuations was reached.
    exhausted,
    /// No endpoint took the rest: no endpoint, no budget, or a rejection.
    refused,
    /// The other engine's stream does not continue the first.
    misfit,
}

/// A family of histograms.
pub(super) type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;
