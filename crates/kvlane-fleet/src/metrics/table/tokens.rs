//! Metrics of tokens and caches.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::histogram::Histogram;
use crate::metrics::labels::{EstimateLabels, HistogramFamily, ModelLabel, TokensLabel};

/// Upper bounds in seconds for the time that counting a prompt takes.
const TOKENIZE_BUCKETS: [f64; 12] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

rows! {
    Tokens, "Tokens and caches", "Tokens of requests, and how many of them were cached.";

    pub input_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens, as reported by engines",
        meaning: "Prompt tokens, where the engine reports them",
        worry: "",
    },

    pub output_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Output tokens",
        meaning: "Output tokens: the engine's count if it reports one, else the gateway's",
        worry: "it falls while requests do not: responses break",
    },

    pub output_tokens_usual: Family<ModelLabel, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["model"],
        help: "Mean output tokens of recent responses",
        meaning: "Mean output tokens of recent responses; the initial estimate of a response's length",
        worry: "",
    },

    pub cached_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens that engines reported as cached",
        meaning: "Prompt tokens that the engine reported as cached; of a [split request](disaggregation.md), those that the prefill worker reports",
        worry: "its share of `kvlane_input_tokens_total` falls: other traffic, or caches that are too small",
    },

    pub predicted_cached_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens predicted to be in cache",
        meaning: "Prompt tokens that were predicted to be cached",
        worry: "it is far from `kvlane_cached_tokens_total`: see the predictions below",
    },

    pub prompt_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens of answered requests, as counted here",
        meaning: "Prompt tokens of answered requests as counted here, whether or not the engine reports them: the total for `kvlane_predicted_cached_tokens_total`",
        worry: "",
    },

    pub transferred_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens whose KV blocks were fetched from a prefill worker",
        meaning: "Prompt tokens of [split requests](disaggregation.md) whose KV blocks the decode worker fetched: the prompt less what it was predicted to hold. No part of `kvlane_cached_tokens_total`",
        worry: "",
    },

    pub engine_queried_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens that engines looked for in their caches, by their own counters",
        meaning: "Prompt tokens that engines looked for in their prefix caches, by the counters of their `/metrics`; including requests that did not pass through the gateway",
        worry: "",
    },

    pub engine_hit_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens that engines found in their caches, by their own counters",
        meaning: "Prompt tokens that engines found in their prefix caches, by the same counters",
        worry: "its share of `kvlane_engine_queried_tokens_total` falls",
    },

    pub engine_external_hit_tokens: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Prompt tokens that engines fetched from elsewhere, by their own counters",
        meaning: "Prompt tokens that engines fetched from other engines or stores by a KV connector, by their `/metrics`, where those have it; no part of `kvlane_engine_hit_tokens_total`",
        worry: "",
    },

    pub tokenize: HistogramFamily<ModelLabel> {
        seconds: true,
        labels: &["model"],
        help: "Time until the tokens of a prompt were counted, waiting included",
        meaning: "Time until the tokens of a prompt were counted, waiting included",
        worry: "its 99th percentile nears the time to first token",
    } = Family::new_with_constructor(|| Histogram::new(TOKENIZE_BUCKETS)),

    pub prompts_estimated: Family<EstimateLabels, Counter> {
        seconds: false,
        labels: &["model", "why"],
        help: "Prompts whose tokens could not be counted, by reason",
        meaning: "Prompts of a pool that counts which could not be counted",
        worry: "it grows: placement is less accurate than possible; the label shows what to change",
    },

    pub tokenizer_queue: Gauge {
        seconds: false,
        labels: &[],
        help: "Prompts waiting to be counted",
        meaning: "Prompts waiting to be counted",
        worry: "it stays near `tokens.queue_size`",
    },

    pub tokenizer_cache_bytes: Gauge {
        seconds: false,
        labels: &[],
        help: "Memory of cached encodings",
        meaning: "Memory of cached encodings",
        worry: "it is at `tokens.cache_memory` while most tokens come from `text`",
    },

    pub tokenizer_tokens: Family<TokensLabel, Counter> {
        seconds: false,
        labels: &["from"],
        help: "Tokens counted, from the cache or by encoding",
        meaning: "Tokens counted: from the `cache`, or by encoding `text`",
        worry: "the share from `cache` falls",
    },

    pub index_bytes: Family<ModelLabel, Gauge> {
        seconds: false,
        labels: &["model"],
        help: "Memory counted by the prefix index",
        meaning: "Memory the prefix index counts",
        worry: "it is at `routing.index_memory` or `kv_events.index_memory`: prefixes are dropped early",
    },

    pub index_blocks: Family<ModelLabel, Gauge> {
        seconds: false,
        labels: &["model"],
        help: "Blocks in the prefix index, once per holder",
        meaning: "Blocks in the index, once per holder",
        worry: "it is far below the number of blocks in the caches",
    },
}
