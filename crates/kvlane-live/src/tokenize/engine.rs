//! Counting by asking: the engine's own `/tokenize`, as vLLM has it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::{Method, StatusCode};
use kvlane_http::client::ask;
use kvlane_http::connections::Connections;
use kvlane_wire::api::Api;
use serde::Deserialize;
use tokio::time::Instant;

use super::{Counted, Question, Why};
use crate::gateway::Gateway;

/// Bytes of an answer that are read: a million tokens of seven digits and a comma.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// What `/tokenize` answers, as far as it is read.
#[derive(Deserialize)]
pub(crate) struct Tokenized {
    pub(crate) tokens: Vec<u32>,
    pub(crate) max_model_len: Option<u64>,
}

/// Asks one of the pool's workers, each in turn.
pub(super) async fn count(
    gateway: &Arc<Gateway>,
    upstreams: &Arc<Connections>,
    question: &Question<'_>,
) -> Result<Counted, Why> {
    // What `/tokenize` takes is what these take, and it ignores what it does not know (vLLM's
    // `entrypoints/serve/tokenize/protocol.py`).
    if !matches!(question.api, Api::ChatCompletions | Api::Completions) {
        return Err("api");
    }
    let pool = question.pool;
    let turn = gateway.tokenizers.turn.fetch_add(1, Ordering::Relaxed);
    let endpoint = pool.router.read(|scheduler| {
        let eligible = scheduler.pool().eligible().count();
        scheduler.pool().eligible().nth(turn % eligible.max(1)).map(|endpoint| endpoint.id)
    });
    let worker = endpoint.and_then(|endpoint| pool.endpoint(endpoint)).ok_or("no_endpoint")?;
    let limit = gateway
        .config()
        .tokens
        .engine_timeout
        .min(question.deadline.saturating_duration_since(Instant::now()));
    let asked = ask(
        upstreams,
        &worker.worker.upstream,
        &Method::POST,
        "/tokenize",
        question.body,
        limit,
        ANSWER_BYTES_MAX,
    );
    match asked.await {
        Ok((StatusCode::OK, answer)) => {
            let Tokenized { tokens, .. } = tokenized(&answer).map_err(|_| "engine_garbage")?;
            Ok(Counted::of(question.seed, &tokens, pool.router.block_tokens()))
        }
        Ok(_) => Err("engine_refused"),
        Err(problem) => {
            tracing::debug!(model = pool.model, %problem, "a prompt was estimated");
            Err("engine_failed")
        }
    }
}

/// Reads an answer of `/tokenize`.
pub(crate) fn tokenized(answer: &[u8]) -> Result<Tokenized, serde_json::Error> {
    serde_json::from_slice(answer)
}
