//! vLLM's HTTP interface, as far as clients and routers use it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
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

use crate::adapters::Adapters;
use crate::answer::{Answer, Shape};
use crate::config::Settled;
use crate::deaths::{ArrivalTime, Ending, Fate};
use crate::driver::{Arrival, Blocks, Driver, End, QueueFull, Ticket};
use crate::error::ApiError;
use crate::metrics;
use crate::stream::{Stream, not_transferred, rejected};
use crate::tokens::{self, Prompt};
use crate::transfer::claim::claim;
use crate::transfer::leg::{Elsewhere, Handover, Leg, Members};
use crate::transfer::store::{self, Entry, Store};

/// Maximum request body, in bytes: 64 Mi tokens of prompt, far above any context length.
const BODY_BYTES_MAX: usize = 256 << 20;

/// Answer length if the client sets none: OpenAI's and vLLM's default for completions.
const OUTPUT_TOKENS_DEFAULT: u32 = 16;

/// Dimensions of an embedding. Its values are arbitrary.
const EMBEDDING_DIMENSIONS: u64 = 16;

/// State of every handler.
pub(crate) struct Shared {
    pub(crate) config: Settled,
    /// Those that it lists now.
    pub(crate) adapters: Adapters,
    /// One for each data-parallel rank.
    pub(crate) drivers: Vec<Arc<Driver>>,
    /// The answer of `/kv_event_sources`.
    sources: Value,
    /// Failure of the engine.
    fate: Arc<Fate>,
    /// First legs whose blocks wait.
    pub(crate) store: Arc<Store>,
    /// Kills the engine's core.
    kill: Arc<dyn Fn() + Send + Sync>,
    address: SocketAddr,
    /// Number of first legs.
    legs: AtomicU32,
    /// Number of requests that named no rank.
    unranked: AtomicUsize,
    /// Seconds since 1970 at the start.
    created: u64,
    started: Instant,
}

impl Shared {
    pub(crate) fn new(
        config: Settled,
        engines: Engines,
        sources: Value,
        fate: Arc<Fate>,
        kill: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        let Engines { drivers, store, address } = engines;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (unranked, legs, started) = (AtomicUsize::new(0), AtomicU32::new(0), Instant::now());
        let adapters = Adapters::new(config.loras.clone());
        Self {
            config,
            adapters,
            drivers,
            sources,
            fate,
            store,
            kill,
            address,
            legs,
            unranked,
            created,
            started,
        }
    }

    /// Seconds since 1970, from one reading of the calendar and a monotonic clock.
    pub(crate) fn unix_secs(&self) -> u64 {
        self.created + self.started.elapsed().as_secs()
    }
}

/// The engines behind an API.
pub(crate) struct Engines {
    pub(crate) drivers: Vec<Arc<Driver>>,
    pub(crate) store: Arc<Store>,
    /// Where they listen.
    pub(crate) address: SocketAddr,
}

type Extracted = (State<Arc<Shared>>, HeaderMap, Result<Bytes, BytesRejection>);

/// Every route.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let answer =
        |shape| post(move |(State(shared), headers, body): Extracted| generate(shared, shape, headers, body));
    let transfers = store::router(shared.store.clone());
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
        .route("/v1/load_lora_adapter", post(load_adapter))
        .route("/v1/unload_lora_adapter", post(unload_adapter))
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
        .merge(transfers)
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
    #[serde(flatten)]
    transfer: Members,
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
        let adapter = self.adapters.has(&model).then_some(model.as_str());
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
    fn rank(&self, headers: &HeaderMap) -> Result<usize, ApiError> {
        let ranks = self.drivers.len();
        let Some(named) = headers.get("x-data-parallel-rank") else {
            return Ok(self.unranked.fetch_add(1, Ordering::Relaxed) % ranks);
        };
        let rank = named.to_str().ok().and_then(|rank| rank.trim().parse::<usize>().ok());
        rank.filter(|rank| *rank < ranks).ok_or_else(|| {
            ApiError::bad_request(format!("X-data-parallel-rank is {named:?}; must be 0 to {}", ranks - 1))
        })
    }

    /// Passes the request to the engine, after the delay of the costs outside of its steps.
    async fn submit(
        &self,
        rank: usize,
        prompt: Prompt,
        output_tokens: u32,
        blocks: Blocks,
    ) -> Result<Ticket, ApiError> {
        let driver = &self.drivers[rank];
        let outside_secs = self.config.engine.timing.host.request_secs / self.config.speed;
        if outside_secs > 0.0 {
            // A day stands for never, and fits into a `Duration`.
            tokio::time::sleep(Duration::from_secs_f64(outside_secs.min(86_400.0))).await;
        }
        driver.submit(prompt, output_tokens, blocks).map_err(|QueueFull| ApiError {
            status: StatusCode::TOO_MANY_REQUESTS,
            message: format!("the queue is full with {} requests; try again later", self.config.max_waiting),
        })
    }
}

// Both legs of a request that two engines share.
impl Shared {
    /// The part that a request has.
    fn leg(&self, headers: &HeaderMap, members: &Members) -> Leg {
        let unique = format!("{:08x}", self.legs.fetch_add(1, Ordering::Relaxed));
        Leg::read(self.config.connector, self.config.transfer.role, headers, members, &unique)
    }

    /// What happens to the blocks of a leg of a prompt.
    fn blocks(&self, leg: &Leg, rank: usize, prompt: u64) -> Blocks {
        match leg {
            Leg::Alone | Leg::Deadly => Blocks::Own,
            Leg::Second(_) => Blocks::Remote,
            Leg::First { key, .. } => {
                let (store, driver, key) = (self.store.clone(), self.drivers[rank].clone(), key.clone());
                Blocks::Kept(Box::new(move |id| {
                    let release = Box::new(move || driver.release(id));
                    store.enter(key, Entry { prompt, release });
                }))
            }
        }
    }

    /// Starts the transfer to a second leg, which ends with it.
    fn fetch(&self, ticket: &mut Ticket, from: Elsewhere, prompt: u64) {
        let arrival = ticket.arrival();
        let race = self.config.transfer.kv_transfer_faults.abort_race.then(|| self.kill.clone());
        ticket.attach(tokio::spawn(transfer(arrival, from, prompt, race)).abort_handle());
    }

    /// The object for the second leg in the answer to a first.
    fn handover(&self, leg: &Leg, rank: usize, prompt_tokens: u32, cached_tokens: u32) -> Value {
        match (leg, self.config.connector) {
            (Leg::First { key, answers: true, .. }, Some(connector)) => Handover {
                connector,
                key,
                engine_id: self.store.engine_id(rank),
                address: self.address,
                prompt_tokens,
                block_tokens: self.config.engine.block_tokens,
                cached_tokens,
            }
            .json(),
            _ => Value::Null,
        }
    }
}

/// Gets the blocks of a request from another engine.
async fn transfer(arrival: Arrival, from: Elsewhere, prompt: u64, race: Option<Arc<dyn Fn() + Send + Sync>>) {
    let Ok(claimed) = claim(&from, prompt).await else { return arrival.fail() };
    let tokens = arrival.allocated().await;
    if tokens == 0 {
        return;
    }
    let Ok(end) = arrival.begin(tokens, claimed.right, &from.address) else { return arrival.fail() };
    let mut race = Race(race);
    match end {
        Some(end) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
    race.0 = None;
}

/// Kills the engine if it is dropped before the end of a transfer.
struct Race(Option<Arc<dyn Fn() + Send + Sync>>);

impl Drop for Race {
    fn drop(&mut self) {
        if let Some(kill) = self.0.take() {
            kill();
        }
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
    let mut output_tokens = shared.output_tokens(prompt_tokens, asked)?;
    let key = order.prompt.key;
    // The seed differs between engines, the prompt does not.
    let prompt = key ^ shared.config.seed;
    let (rank, leg) = (shared.rank(&headers)?, shared.leg(&headers, &options.transfer));
    if let Leg::First { one_token: true, .. } = leg {
        output_tokens = 1;
    }
    if leg == Leg::Deadly {
        (shared.kill)();
    }
    let blocks = shared.blocks(&leg, rank, prompt);
    let mut ticket = shared.submit(rank, order.prompt, output_tokens, blocks).await?;
    let mut cached_tokens = None;
    if let Leg::Second(from) = &leg {
        cached_tokens = from.cached;
        shared.fetch(&mut ticket, from.clone(), prompt);
    }
    let answer = Answer {
        shape,
        number: ticket.number(),
        model: order.model,
        created: shared.unix_secs(),
        prompt_tokens,
        output_tokens,
        key,
        cached_tokens,
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
        Some(End::Failed) => Err(not_transferred()),
        _ => {
            let mut whole = answer.whole(progress);
            if shared.config.connector.is_some() {
                whole["kv_transfer_params"] = shared.handover(&leg, rank, prompt_tokens, progress.cached);
            }
            Ok(Json(whole).into_response())
        }
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
    let rank = shared.rank(&headers)?;
    let ticket = shared.submit(rank, order.prompt, 0, Blocks::Own).await?;
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
    let loaded = shared.adapters.all();
    let adapters = loaded.iter().map(|name| model(name, Some(&config.names[0])));
    Json(json!({"object": "list", "data": bases.chain(adapters).collect::<Vec<_>>()}))
}

async fn load_adapter((State(shared), _, body): Extracted) -> Result<String, ApiError> {
    shared.adapters.load(&received(body)?, &shared.config.names)
}

async fn unload_adapter((State(shared), _, body): Extracted) -> Result<String, ApiError> {
    shared.adapters.unload(&received(body)?)
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
