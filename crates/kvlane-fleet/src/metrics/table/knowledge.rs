//! Metrics of cache knowledge: KV events and predictions.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::labels::{
    ChangeLabels, KindLabels, KnowledgeLabels, StateLabels, WorkerLabel, WorkerLabels,
};

rows! {
    Knowledge, "Knowledge", "How well the content of the engines' caches is known: see [knowledge.md](knowledge.md) and [kv-events.md](kv-events.md).";

    pub(crate) worker_knowledge: Family<KnowledgeLabels, Gauge> {
        seconds: false,
        labels: &["worker", "model", "knowledge"],
        help: "1 for the source of cache knowledge",
        meaning: "1 for the source of knowledge about this worker's cache: `exact`, `degraded`, `approximate` or `load_only`; 0 for the others",
        worry: "it is not as configured: `approximate` where there are KV events, or `load_only` anywhere",
    },

    pub(crate) knowledge_changes: Family<ChangeLabels, Counter> {
        seconds: false,
        labels: &["model", "from", "to"],
        help: "Changes of cache knowledge",
        meaning: "Changes of the source of knowledge about a worker's cache",
        worry: "several in an hour: a feed is unstable",
    },

    pub prediction_answers: Family<WorkerLabels, Counter> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Responses that reported reused tokens",
        meaning: "Responses that reported how many tokens were reused",
        worry: "",
    },

    pub prediction_wrong: Family<WorkerLabels, Counter> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Responses whose reuse was predicted wrongly",
        meaning: "Responses whose reuse was predicted wrongly: by more than a block, or by more than a quarter of the prompt where knowledge is approximate",
        worry: "more than a tenth of `kvlane_prediction_answers_total`: see [knowledge.md](knowledge.md)",
    },

    pub prediction_predicted_tokens: Family<WorkerLabels, Counter> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Tokens predicted to be reused",
        meaning: "Tokens predicted to be reused",
        worry: "",
    },

    pub prediction_reported_tokens: Family<WorkerLabels, Counter> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Tokens reported as reused",
        meaning: "Tokens reported as reused",
        worry: "",
    },

    pub prediction_both_tokens: Family<WorkerLabels, Counter> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Tokens predicted and reported",
        meaning: "The smaller of the predicted and the reported tokens, summed over responses",
        worry: "",
    },

    pub prediction_outside_tokens: Family<WorkerLabels, Counter> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Tokens reported beyond the prediction by engines that fetch from a store",
        meaning: "Tokens reported beyond the prediction by engines whose `/metrics` have shown that they fetch from a store or another engine; no part of `kvlane_prediction_reported_tokens_total`",
        worry: "",
    },

    pub prediction_precision_ratio: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Share of recently predicted tokens that was reused",
        meaning: "Of the tokens predicted for recent responses, the share that was reused",
        worry: "below 0.8: caches hold less than predicted: they evict early, or tokens are counted differently",
    },

    pub prediction_recall_ratio: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Share of recently reused tokens that was predicted",
        meaning: "Of the tokens reused in recent responses, the share that was predicted",
        worry: "below 0.8: caches hold more than predicted: other clients use the engines, too",
    },

    pub(crate) kv_feed_state: Family<StateLabels, Gauge> {
        seconds: false,
        labels: &["worker", "state"],
        help: "1 for the state of the KV event feed",
        meaning: "1 for the state of the feed: `live`, `syncing`, `refused` or `absent`; 0 for the others",
        worry: "`syncing` or `refused` for minutes",
    },

    pub(crate) kv_events: Family<KindLabels, Counter> {
        seconds: false,
        labels: &["worker", "kind"],
        help: "KV events by kind, in blocks where they are about blocks",
        meaning: "[KV events](kv-events.md): blocks `stored`, `removed`, `unknown` (removed or copied, but not in the index), `orphaned` (parent not in the index), `refused` (no room in the index); times that the whole cache was `cleared`; events `ignored`, because they say nothing about prefixes",
        worry: "`orphaned`, `unknown` or `refused` grow: the index is incomplete",
    },

    pub(crate) kv_messages: Family<KindLabels, Counter> {
        seconds: false,
        labels: &["worker", "kind"],
        help: "Messages of KV events by outcome",
        meaning: "Messages of KV events: `applied`, `duplicate`, `late`, `lost`, `dropped` (no room in the queue; requested again), `undecodable`",
        worry: "`lost`, `dropped` or `undecodable` grow",
    },

    pub(crate) kv_incidents: Family<KindLabels, Counter> {
        seconds: false,
        labels: &["worker", "kind"],
        help: "Incidents of KV event feeds",
        meaning: "Incidents of the feed: `gap`, `restart`, `replay`, `replay_given_up`, `resync` (all blocks of the endpoint were dropped), `overflow`, `disconnect`, `silence`, `refusal`",
        worry: "any of them repeats",
    },

    pub kv_queue_messages: Family<WorkerLabel, Gauge> {
        seconds: false,
        labels: &["worker"],
        help: "Messages of KV events in the queue",
        meaning: "Messages in the queue",
        worry: "it does not fall back to 0",
    },

    pub kv_event_lag: Family<WorkerLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["worker"],
        help: "Time from the engine's timestamp of the last KV events to their application",
        meaning: "Time from the engine's timestamp of the last message to its application here, by two clocks",
        worry: "more than a second: the engine, the network or the gateway is slow, or the clocks differ",
    },

    pub kv_event_age: Family<WorkerLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["worker"],
        help: "Time since KV events were last applied",
        meaning: "Time since a message was last applied",
        worry: "minutes while requests are placed there",
    },

    pub kv_blocks: Family<WorkerLabels, Gauge> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Blocks that the engine holds according to its KV events",
        meaning: "Blocks that the engine holds according to its events",
        worry: "it falls to 0 without a restart",
    },
}
