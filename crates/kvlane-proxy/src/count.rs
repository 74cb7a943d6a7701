//! Counts the tokens of a request's prompt: on the tokenizer threads, or by asking an engine's `/tokenize`.
//!
//! If counting fails, the prompt length is estimated and the request continues: the count decides where a prompt is
//! cheapest, never whether it is served.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::{Method, StatusCode};
use kvlane_core::block::ChainSeed;
use kvlane_fleet::clock::date;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::tokenize::threads::{Job, TokenThreads};
use kvlane_fleet::tokenize::{Counted, Counting, Local};
use kvlane_http::client::ask;
use kvlane_http::connections::Connections;
use kvlane_tokens::Unknown;
use kvlane_wire::api::Api;
use kvlane_wire::engine;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::proxy::Proxy;

/// A prompt to count, and its pool.
pub(super) struct Question<'a> {
    pub(super) pool: &'a ModelPool,
    pub(super) api: Api,
    pub(super) body: &'a Bytes,
    pub(super) seed: ChainSeed,
    /// The tenant whose cached encodings may be used: see [`kvlane_tokens::Prompt::apart`].
    pub(super) apart: u64,
    pub(super) deadline: Instant,
}

/// Why a prompt was estimated, as a metric's label.
pub(super) type Why = &'static str;

/// The block hashes and the number of tokens of a prompt.
///
/// # Errors
/// Why the count must be estimated.
pub(super) async fn count(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    question: &Question<'_>,
) -> Result<Counted, Why> {
    match &question.pool.counting {
        Counting::Local(local) => count_here(proxy, upstreams, local, question).await,
        Counting::Engine => ask_engine(proxy, upstreams, question).await,
        Counting::Estimate => Err("estimate"),
    }
}

/// How many images of new sizes an engine is asked about for one request.
const NEW_IMAGES_MAX: usize = 4;

async fn count_here(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    local: &Local,
    question: &Question<'_>,
) -> Result<Counted, Why> {
    let mut asked = 0;
    loop {
        match count_once(&proxy.fleet.tokenizers.threads, local, question).await? {
            Ok(counted) => return Ok(counted),
            Err(Unknown::NewImage(image)) if asked < NEW_IMAGES_MAX => {
                asked += 1;
                let body = Bytes::from(image.question(&question.pool.model).to_string());
                let answer = tokens_of(proxy, upstreams, question, Api::ChatCompletions, &body).await?;
                local.tokenizer.learn_image(&image, &answer, date());
            }
            Err(unknown) => {
                tracing::debug!(model = question.pool.model, %unknown, "prompt tokens estimated");
                return Err(unknown.name());
            }
        }
    }
}

async fn count_once(
    threads: &TokenThreads,
    local: &Local,
    question: &Question<'_>,
) -> Result<Result<Counted, Unknown>, Why> {
    let (answer, answered) = oneshot::channel();
    let job = Job {
        tokenizer: Arc::clone(&local.tokenizer),
        api: question.api,
        body: Bytes::clone(question.body),
        seed: question.seed,
        apart: question.apart,
        root: local.root.clone(),
        block_tokens: question.pool.router.block_tokens(),
        answer,
    };
    if !threads.submit(job) {
        return Err("queue_full");
    }
    match timeout_at(question.deadline, answered).await {
        Ok(Ok(counted)) => Ok(counted),
        Ok(Err(_)) | Err(_) => Err("timeout"),
    }
}

/// Largest response, in bytes: a million tokens of seven digits and a comma.
const ANSWER_BYTES_MAX: usize = 8 << 20;

async fn ask_engine(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    question: &Question<'_>,
) -> Result<Counted, Why> {
    let tokens = tokens_of(proxy, upstreams, question, question.api, question.body).await?;
    Ok(Counted::of(question.seed, &tokens, question.pool.router.block_tokens()))
}

/// The tokens that one of the pool's workers, in turn, tells of a body of `api`.
async fn tokens_of(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    question: &Question<'_>,
    api: Api,
    body: &Bytes,
) -> Result<Vec<u32>, Why> {
    let pool = question.pool;
    let tokenize = engine::tokenize(proxy.fleet.snapshot().cards.get(&pool.model));
    if !tokenize.apis.contains(&api) {
        return Err("api");
    }
    let turn = proxy.fleet.tokenizers.turn.fetch_add(1, Ordering::Relaxed);
    let endpoint = pool.router.read(|scheduler| {
        let eligible = scheduler.pool().eligible().count();
        scheduler.pool().eligible().nth(turn % eligible.max(1)).map(|endpoint| endpoint.id)
    });
    let worker = endpoint.and_then(|endpoint| pool.endpoint(endpoint)).ok_or("no_endpoint")?;
    let limit = proxy
        .fleet
        .settings()
        .tokens
        .engine_timeout
        .min(question.deadline.saturating_duration_since(Instant::now()));
    let asked =
        ask(upstreams, &worker.worker.upstream, &Method::POST, tokenize.path, body, limit, ANSWER_BYTES_MAX);
    match asked.await {
        Ok((StatusCode::OK, answer)) => {
            (tokenize.parse)(&answer).map(|told| told.tokens).map_err(|_| "engine_garbage")
        }
        Ok(_) => Err("engine_refused"),
        Err(problem) => {
            tracing::debug!(model = pool.model, %problem, "prompt tokens estimated");
            Err("engine_failed")
        }
    }
}
