//! vLLM's HTTP interface, as far as clients and routers use it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, StatusCode, Uri};
use kvlane_core::block::ChainSeed;
use kvlane_wire::api::Api;
use kvlane_wire::openai;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{Answer, Shape};
use crate::config::Settled;
use crate::deaths::{ArrivalTime, Ending, Fate};
use crate::driver::{Driver, End, QueueFull, Ticket};
use crate::error::ApiError;
use crate::metrics;
use crate::stream::{Stream, rejected};
use crate::tokens::{self, Prompt};

/// Maximum request body, in bytes: 64 Mi tokens of prompt, far above any context length.
const BODY_BYTES_MAX: usize = 256 << 20;

/// Answer length if the client sets none: OpenAI's and vLLM's default for completions.
const OUTPUT_TOKENS_DEFAULT: u32 = 16;

/// Dimensions of an embedding. Its values are arbitrary.
const EMBEDDING_DIMENSIONS: u64 = 16;

/// State of every handler.
pub(crate) struct Shared {
    pub(crate) config: Settled,
    /// One for each data-parallel rank.
    pub(crate) drivers: Vec<Arc<Driver>>,
    /// The answer of `/kv_event_sources`.
    sources: Value,
    /// Failure of the engine.
    fate: Arc<Fate>,
    /// Number of requests that named no rank.
    unranked: AtomicUsize,
    /// Seconds since 1970 at the start.
    created: u64,
    started: Instant,
}

impl Shared {
    pub(crate) fn new(config: Settled, drivers: Vec<Arc<Driver>>, sources: Value, fate: Arc<Fate>) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (unranked, started) = (AtomicUsize::new(0), Instant::now());
        Self { config, drivers, sources, fate, unranked, created, started }
    }

    /// Seconds since 1970, from one reading of the calendar and a monotonic clock.
    fn unix_secs(&self) -> u64 {
        self.created + self.started.elapsed().as_secs()
    }
}

type Extracted = (State<Arc<Shared>>, HeaderMap, Result<Bytes, BytesRejection>);

/// Every route.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let answer =
        |shape| post(move |(State(shared), headers, body): Extracted| generate(shared, shape, headers, body));
    Router::new()
        .route("/health", get(health))
        .route(
            "/version",
            get(async || Json(json!({"version": concat!(env!("CARGO_PKG_VERSION"), "+kvlane-mock")}))),
        )
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", answer(Shape::Chat))
        .route("/v1/completions", answer(Shape::Completion))
        .route("/v1/messages", answer(Shape::Messages))
        .route("/v1/responses", answer(Shape::Responses))
        .route("/v1/embeddings", post(embeddings))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/metrics", get(metrics_page))
        .route(
            "/kv_event_sources",
            get(async |State(shared): State<Arc<Shared>>| Json(shared.sources.clone())),
        )
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .fallback(async |uri: Uri| ApiError {
            status: StatusCode::NOT_FOUND,
            message: format!("no such path: {}", uri.path()),
        })
        .method_not_allowed_fallback(async |uri: Uri| ApiError {
            status: StatusCode::METHOD_NOT_ALLOWED,
            message: format!("{} does not accept this method", uri.path()),
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}

/// A request for the engine.
struct Order {
    prompt: Prompt,
    /// As named by the client.
    model: String,
    stream: bool,
    /// Prompts that were concatenated into one.
    prompts: u32,
    output_tokens_max: Option<u32>,
}

/// Fields that matter to an engine but not to a router.
#[derive(Default, Deserialize)]
struct EngineOptions {
    stream_options: Option<StreamOptions>,
    n: Option<u32>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

impl Shared {
    /// Validates a body and cuts its prompt into blocks.
    fn read(&self, api: Api, body: &[u8]) -> Result<Order, ApiError> {
        let mut rendered = Vec::with_capacity(body.len());
        let parsed = openai::parse(api, body, &mut rendered).map_err(ApiError::bad_request)?;
        let config = &self.config;
        let model = parsed.model.map_or_else(|| config.names[0].clone(), |model| model.into_owned());
        let adapter = config.loras.contains(&model).then_some(model.as_str());
        if adapter.is_none() && !config.names.contains(&model) {
            let message =
                format!("The model `{model}` does not exist; this engine serves {}", config.names.join(", "));
            return Err(ApiError { status: StatusCode::NOT_FOUND, message });
        }
        let seed =
            ChainSeed::new(&config.model, adapter.or(parsed.lora.as_deref()), parsed.cache_salt.as_deref());
        let lora = adapter.or(parsed.lora.as_deref()).map(str::to_owned);
        let salt = parsed.cache_salt.as_deref().map(str::to_owned);
        let (stream, prompts, output_tokens_max) = (parsed.stream, parsed.prompts, parsed.output_tokens_max);
        let mut prompt = Prompt::new(seed, rendered, config.engine.block_tokens)
            .filter(|prompt| prompt.tokens > 0)
            .ok_or_else(|| ApiError::bad_request("the prompt is empty or too long"))?;
        prompt.key ^= config.seed;
        (prompt.lora, prompt.salt) = (lora, salt);
        Ok(Order { prompt, model, stream, prompts, output_tokens_max })
    }

    /// The answer's length, if prompt and answer fit the context.
    fn output_tokens(&self, prompt_tokens: u32, asked: Option<u32>) -> Result<u32, ApiError> {
        let max = self.config.max_model_len;
        let room = max.saturating_sub(prompt_tokens);
        let wanted = asked.unwrap_or(OUTPUT_TOKENS_DEFAULT.min(room.max(1)));
        if wanted == 0 {
            return Err(ApiError::bad_request("max_tokens must be at least 1"));
        }
        if wanted > room {
            return Err(ApiError::bad_request(format!(
                "This model's maximum context length is {max} tokens, but the prompt has {prompt_tokens} and \
                 {wanted} were requested; shorten one of them"
            )));
        }
        Ok(wanted)
    }

    /// The engine that a request names, or else the next one in turn.
    fn rank(&self, headers: &HeaderMap) -> Result<&Arc<Driver>, ApiError> {
        let ranks = self.drivers.len();
        let Some(named) = headers.get("x-data-parallel-rank") else {
            return Ok(&self.drivers[self.unranked.fetch_add(1, Ordering::Relaxed) % ranks]);
        };
        let rank = named.to_str().ok().and_then(|rank| rank.trim().parse::<usize>().ok());
        rank.and_then(|rank| self.drivers.get(rank)).ok_or_else(|| {
            ApiError::bad_request(format!("X-data-parallel-rank is {named:?}; must be 0 to {}", ranks - 1))
        })
    }

    /// Passes the request to the engine, after the delay of the costs outside of its steps.
    async fn submit(
        &self,
        headers: &HeaderMap,
        prompt: Prompt,
        output_tokens: u32,
    ) -> Result<Ticket, ApiError> {
        let driver = self.rank(headers)?;
        let outside_secs = self.config.engine.timing.host.request_secs / self.config.speed;
        if outside_secs > 0.0 {
            // A day stands for never, and fits into a `Duration`.
            tokio::time::sleep(Duration::from_secs_f64(outside_secs.min(86_400.0))).await;
        }
        driver.submit(prompt, output_tokens).map_err(|QueueFull| ApiError {
            status: StatusCode::TOO_MANY_REQUESTS,
            message: format!("the queue is full with {} requests; try again later", self.config.max_waiting),
        })
    }
}

// Answers of an engine that has died.
impl Shared {
    fn ending(&self, shape: Shape, stream: bool, came: ArrivalTime) -> &'static Ending {
        self.fate.get().map_or(&Ending::Silence, |dying| dying.record.ending(shape, stream, came))
    }

    /// Waits until a stream has a head, which may precede its first token. False if it gets none.
    async fn begins(&self, shape: Shape, ticket: &Ticket) -> bool {
        let Some(dying) = self.fate.get() else { return true };
        let has_head = dying.record.has_head(shape) || dying.record.goes_on;
        let progress = if has_head { ticket.so_far() } else { ticket.begun().await };
        match progress.end {
            Some(End::Died(came)) => has_head && !matches!(self.ending(shape, true, came), Ending::Reply(_)),
            _ => true,
        }
    }

    /// The answer to a request whose answer had not begun.
    async fn last_words(&self, shape: Shape, stream: bool, came: ArrivalTime) -> Response {
        match self.ending(shape, stream, came) {
            Ending::Reply(reply) => {
                let kind = HeaderValue::from_str(&reply.content_type)
                    .unwrap_or(HeaderValue::from_static("application/json"));
                (reply.status, [(CONTENT_TYPE, kind)], reply.body.clone()).into_response()
            }
            // The connection stays open until the client, or the engine's end, closes it.
            Ending::Events { .. } | Ending::Silence => std::future::pending().await,
        }
    }
}

/// Reads the length of the answer from a header that routers ignore: it is known from a trace, but not to a model's
/// client.
const OUTPUT_TOKENS: &str = "x-mock-output-tokens";

fn told_length(headers: &HeaderMap) -> Option<u32> {
    headers.get(OUTPUT_TOKENS)?.to_str().ok()?.trim().parse().ok()
}

/// The body, or the client's error in sending it.
fn received(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| ApiError { status: rejection.status(), message: rejection.body_text() })
}

async fn generate(
    shared: Arc<Shared>,
    shape: Shape,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = received(body)?;
    let api = match shape {
        Shape::Chat => Api::ChatCompletions,
        Shape::Completion => Api::Completions,
        Shape::Messages => Api::Messages,
        Shape::Responses => Api::Responses,
    };
    let order = shared.read(api, &body)?;
    let options: EngineOptions = serde_json::from_slice(&body).map_err(ApiError::bad_request)?;
    drop(body);
    if order.prompts > 1 || options.n.is_some_and(|n| n != 1) {
        return Err(ApiError::bad_request(
            "the mock engine answers one prompt with one choice; send several requests",
        ));
    }
    let prompt_tokens = order.prompt.tokens;
    let asked = told_length(&headers).or(order.output_tokens_max);
    let output_tokens = shared.output_tokens(prompt_tokens, asked)?;
    let key = order.prompt.key;
    let ticket = shared.submit(&headers, order.prompt, output_tokens).await?;
    let answer = Answer {
        shape,
        number: ticket.number(),
        model: order.model,
        created: shared.unix_secs(),
        prompt_tokens,
        output_tokens,
        key,
        include_usage: options.stream_options.unwrap_or_default().include_usage,
    };
    if order.stream && shared.begins(shape, &ticket).await {
        let mut response = Response::new(Body::new(Stream::new(ticket, answer, shared.fate.clone())));
        let event_stream = HeaderValue::from_static("text/event-stream; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, event_stream);
        return Ok(response);
    }
    let progress = ticket.ended().await;
    match progress.end {
        Some(End::Rejected(why)) => Err(rejected(why)),
        Some(End::Died(came)) => Ok(shared.last_words(shape, order.stream, came).await),
        _ => Ok(Json(answer.whole(progress)).into_response()),
    }
}

/// Whether the server is alive; the engine core may be dead.
async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let Some(dying) = shared.fate.get() else { return StatusCode::OK.into_response() };
    match dying.record.health(dying.since.elapsed()) {
        Some(said) => said.into_response(),
        None => std::future::pending().await,
    }
}

async fn embeddings((State(shared), headers, body): Extracted) -> Result<Response, ApiError> {
    let order = shared.read(Api::Embeddings, &received(body)?)?;
    let (tokens, key) = (order.prompt.tokens, order.prompt.key);
    if tokens > shared.config.max_model_len {
        return Err(ApiError::bad_request(format!(
            "the input has {tokens} tokens, more than the model's {}",
            shared.config.max_model_len
        )));
    }
    let ticket = shared.submit(&headers, order.prompt, 0).await?;
    match ticket.ended().await.end {
        Some(End::Rejected(why)) => return Err(rejected(why)),
        Some(End::Died(came)) => return Ok(shared.last_words(Shape::Chat, false, came).await),
        _ => {}
    }
    let vector = |index: u32| -> Vec<f64> {
        let mut rng = kvlane_core::rng::Rng::new(key.wrapping_add(u64::from(index)));
        (0..EMBEDDING_DIMENSIONS).map(|_| rng.unit() * 2.0 - 1.0).collect()
    };
    let data: Vec<Value> = (0..order.prompts)
        .map(|index| json!({"object": "embedding", "index": index, "embedding": vector(index)}))
        .collect();
    Ok(Json(json!({
        "id": format!("embd-{key:016x}{:x}", ticket.number()),
        "object": "list",
        "created": shared.unix_secs(),
        "model": order.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }))
    .into_response())
}

async fn tokenize((State(shared), _, body): Extracted) -> Result<Json<Value>, ApiError> {
    let body = received(body)?;
    let mut rendered = Vec::new();
    openai::parse(Api::Tokenize, &body, &mut rendered).map_err(ApiError::bad_request)?;
    let ids: Vec<u32> = tokens::ids(&rendered).collect();
    let max_model_len = shared.config.max_model_len;
    Ok(Json(json!({"count": ids.len(), "max_model_len": max_model_len, "tokens": ids, "token_strs": null})))
}

async fn detokenize((State(_), _, body): Extracted) -> Result<Json<Value>, ApiError> {
    let body = received(body)?;
    let mut rendered = Vec::new();
    openai::parse(Api::Detokenize, &body, &mut rendered).map_err(ApiError::bad_request)?;
    Ok(Json(json!({"prompt": tokens::text(&rendered)})))
}

async fn models(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let config = &shared.config;
    let model = |name: &String, parent: Option<&String>| {
        json!({
            "id": name,
            "object": "model",
            "created": shared.created,
            "owned_by": "kvlane",
            "root": if parent.is_some() { name } else { &config.model },
            "parent": parent,
            "max_model_len": parent.is_none().then_some(config.max_model_len),
        })
    };
    let bases = config.names.iter().map(|name| model(name, None));
    let adapters = config.loras.iter().map(|name| model(name, Some(&config.names[0])));
    Json(json!({"object": "list", "data": bases.chain(adapters).collect::<Vec<_>>()}))
}

async fn metrics_page(State(shared): State<Arc<Shared>>) -> Response {
    if shared.fate.get().is_some_and(|dying| dying.record.metrics_silent) {
        return std::future::pending().await;
    }
    let exposition = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(CONTENT_TYPE, exposition)], metrics::render(&shared)).into_response()
}

/// As in vLLM: rejected, in the body, while requests run; the feed reports it with the next step's batch.
async fn reset_prefix_cache(State(shared): State<Arc<Shared>>) -> Json<Value> {
    // Every rank that can be reset is, whatever the result of the others.
    let refused = shared.drivers.iter().filter(|driver| !driver.reset_prefix_cache()).count();
    let success = refused == 0;
    Json(json!({"success": success}))
}
