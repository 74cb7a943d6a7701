//! From a request to an answer that has begun: parse, place, send, and again elsewhere if that failed.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use kvlane_core::block::ChainSeed;
use kvlane_core::cache_accuracy::{Feed, Knowledge};
use kvlane_core::decision::{Placement, Refused, Rejection};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::poison_prompts::PromptKey;
use kvlane_core::request::RequestKey;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::tokenize::Counted;
use kvlane_http::connections::{Answer, Connections, is_hop_by_hop};
use kvlane_wire::api::Api;
use kvlane_wire::openai::{self, ParseError, ParsedRequest};
use kvlane_wire::salt::with_cache_salt;
use kvlane_wire::server_timing::Stage;
use tokio::time::Instant;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::account::{Account, REQUEST_ID};
use crate::attempt::{Attempts, Outcome};
use crate::attributes::Facts;
use crate::auth::{identity, is_credential};
use crate::body::Body;
use crate::count::{Question, count};
use crate::deadlines::Deadlines;
use crate::error::ApiError;
use crate::hedge::{self, Sending};
use crate::lease::Lease;
use crate::limits::{Ask, Charge};
use crate::objects::Origin;
use crate::passed::{self, Passing};
use crate::place::Routed;
use crate::proxy::Proxy;
use crate::relay::{Limits, Relay};
use crate::resume::{Asked, Continuation};
use crate::traces::{Attempt, TRACEPARENT, TRACESTATE};

/// Names the data-parallel rank that shall serve a request, to engines that have several.
const RANK: &str = "x-data-parallel-rank";
/// How much of a body's end tells its prompt from others that have the same whole blocks.
const PROMPT_END_BYTES: usize = 1024;
/// Scratch memory for rendered prompts above which it is given back after use.
const SCRATCH_BYTES_MAX: usize = 4 << 20;

thread_local! {
    static PROMPT: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// What a client asks an engine for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    /// An API whose body is parsed.
    Api(Api),
    /// A path that is relayed unparsed.
    Passed(Passing),
}

// === impl Wanted ===

impl Wanted {
    fn api(self) -> Option<Api> {
        if let Self::Api(api) = self { Some(api) } else { None }
    }

    /// Whether the answer names an object that later requests can name.
    fn makes_object(self, parts: &Parts) -> bool {
        match self {
            Self::Api(api) => api == Api::Responses,
            Self::Passed(passing) => passing.makes_object(parts),
        }
    }
}

/// Answers a client request from the fleet.
pub(super) async fn forward(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    wanted: Wanted,
    parts: &Parts,
    body: Bytes,
    account: &Arc<Account>,
) -> Result<Response<Body>, ApiError> {
    let deadlines = Deadlines::of(&proxy.settings(), parts.uri.path());
    let deadline = Instant::now() + deadlines.total;
    let (routed, salted) = match wanted {
        Wanted::Api(api) => route(proxy, upstreams, api, parts, &body, account, deadline).await?,
        Wanted::Passed(passing) => passed::route(proxy, passing, parts, &body, account, deadline)?,
    };
    let body = salted.unwrap_or(body);
    account.set_pool(&routed.served.pool);
    routed.served.pool.metrics.shed.arrived(account.received);
    let limits = Limits { idle: deadlines.idle, deadline };
    let mut attempts = Attempts::new(proxy, &routed, excluded_for(&routed, parts), deadlines);
    attempts.take_turn().await?;
    let sending = Sending { upstreams, parts, body: &body, account };
    let turned_down = |mut answer: Answer, lease: &Lease| {
        mark(&mut answer.headers, lease);
        relay(answer, None, account, limits, None)
    };
    loop {
        let lease = match attempts.place().await {
            Ok(lease) => lease,
            // What the last one did says more.
            Err(refused) => {
                let pool = &routed.served.pool;
                return attempts.said().unwrap_or_else(|| Err(rejected(proxy, pool, refused)));
            }
        };
        let (lease, outcome) = hedge::answer(&mut attempts, lease, &sending, turned_down).await;
        match outcome {
            Outcome::Answered(mut answer) => {
                if answer.status.is_success() {
                    attempts.succeeded();
                }
                account.timeline.answered(answer.sent, lease.attempt().map(Attempt::id));
                mark(&mut answer.headers, &lease);
                let transcript = Continuation::transcript(proxy, account, wanted.api(), &body, &answer);
                let Some(transcript) = transcript else {
                    let makes = wanted.makes_object(parts) && answer.status.is_success();
                    let origin = Origin { worker: lease.worker.id, tenant: routed.facts.tenant() };
                    return Ok(relay(answer, Some(lease), account, limits, makes.then_some(origin)));
                };
                drop(attempts);
                let (proxy, upstreams) = (Arc::clone(proxy), Arc::clone(upstreams));
                let (parts, account) = (parts.clone(), Arc::clone(account));
                let excluded = excluded_for(&routed, &parts);
                let asked = Asked { proxy, upstreams, parts, account, routed, excluded };
                return Ok(continued(answer, lease, limits, Continuation::new(transcript, asked)));
            }
            // Its lease is over: that engine has no more to do for this request.
            outcome => {
                account.timeline.failed();
                attempts.failed(lease, outcome, turned_down);
            }
        }
        if !Box::pin(attempts.go_on(upstreams)).await {
            return attempts.said().unwrap_or_else(|| Err(no_endpoint(proxy)));
        }
    }
}

/// The endpoints that must not serve the request: those that lack its model, and those of other ranks if the client
/// names one.
fn excluded_for(routed: &Routed, parts: &Parts) -> Arc<[EndpointId]> {
    let (pool, lacking) = (&routed.served.pool, &routed.served.lacking);
    if let Some(others) =
        routed.pinned.map(|worker| pool.endpoints_but(worker)).filter(|others| !others.is_empty())
    {
        return lacking.iter().copied().chain(others).collect();
    }
    let asked = parts.headers.get(RANK).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    match asked.map(|rank| pool.of_other_ranks(rank)) {
        Some(others) if !others.is_empty() => lacking.iter().copied().chain(others).collect(),
        _ => Arc::clone(lacking),
    }
}

fn rejected(proxy: &Proxy, pool: &ModelPool, refused: Refused) -> ApiError {
    match refused.why {
        Rejection::NoEndpoint => no_endpoint(proxy),
        why => {
            pool.metrics.shed.refused(proxy.fleet.clock.now(), why);
            let retry_after_s = refused.retry_after.0.div_ceil(1_000_000_000).max(1);
            ApiError::Rejected { why, retry_after_s }
        }
    }
}

/// Finds the pool and the prompt's blocks; and the body as it goes on, if not as it came.
async fn route(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    api: Api,
    parts: &Parts,
    body: &Bytes,
    account: &Account,
    deadline: Instant,
) -> Result<(Routed, Option<Bytes>), ApiError> {
    let (received, timeline) = (account.received, Arc::clone(&account.timeline));
    timeline.enter(Stage::Parse);
    let name = RequestKey::named(account.request_id.as_bytes());
    let isolates = proxy.settings().auth.isolate_tenants;
    let (served, facts, seed, estimated, salt, pinned) = rendered(api, body, |parsed, prompt| {
        let served = match &parsed.model {
            Some(model) => named_pool(proxy, model)?,
            None => only_pool(proxy, api)?,
        };
        // An alias of a model shares its blocks, an adapter does not.
        let adapter = served.adapter.as_deref().or(parsed.lora.as_deref());
        let hints = proxy.attributes.load();
        let theirs = parsed.cache_salt.as_deref();
        let ours = isolates.then(|| hints.salt(&parts.headers, identity(parts), theirs));
        let salt = ours.as_deref().or(theirs);
        let seed = ChainSeed::new(&served.pool.model, adapter, salt);
        let apart = salt.map_or(0, apart);
        let estimates = served.pool.counting.is_estimate();
        let estimated = estimates.then(|| Counted::estimate(seed, prompt, served.pool.router.block_tokens()));
        let facts = hints.read(&parts.headers, Some(parsed), identity(parts));
        let before = parsed.previous_response.as_deref();
        let origin = before.map(|id| passed::object(proxy, id, facts, isolates)).transpose()?.flatten();
        Ok((served, facts, seed, estimated, (ours, apart), origin.map(|origin| origin.worker)))
    })?;
    let (ours, apart) = salt;
    let pool = &served.pool;
    let counted = match estimated {
        Some(estimated) => estimated,
        None => {
            // Who is beyond a limit is turned away before anybody counts tokens for that.
            drop(admit(proxy, &served, facts, 0, account)?);
            let question = Question { pool, api, body, seed, apart, deadline };
            let asked = proxy.fleet.clock.now();
            timeline.enter_at(Stage::Tokenize, asked);
            match Box::pin(count(proxy, upstreams, &question)).await {
                Ok(counted) => {
                    pool.metrics.tokenize.observe((proxy.fleet.clock.now() - asked).as_secs_f64());
                    counted
                }
                Err(why) => {
                    proxy.fleet.metrics.note_estimate(&pool.model, why);
                    rendered(api, body, |_, prompt| {
                        Ok(Counted::estimate(seed, prompt, pool.router.block_tokens()))
                    })?
                }
            }
        }
    };
    timeline.enter(Stage::Place);
    let Counted { chain, tokens: prompt_tokens } = counted;
    let charge = admit(proxy, &served, facts, prompt_tokens, account)?;
    let salted = ours.filter(|_| takes_salt(api)).map(|salt| salted(body, &salt)).transpose()?;
    // The last block's hash is one of the whole chain, and what follows it is at the body's end.
    let behind = &body[body.len().saturating_sub(PROMPT_END_BYTES)..];
    let prompt = PromptKey(xxh3_64_with_seed(behind, chain.last().map_or(apart, |block| block.0)));
    let routed = Routed {
        served,
        chain,
        prompt_tokens,
        facts,
        received,
        name,
        timeline,
        deadline,
        charge,
        prompt,
        pinned,
    };
    Ok((routed, salted))
}

/// Whether engines take a `cache_salt` in bodies of this API.
fn takes_salt(api: Api) -> bool {
    matches!(api, Api::ChatCompletions | Api::Completions | Api::Responses)
}

/// A body with this salt. It has been understood before, so there is no error; were there one, it would not go on as it is.
pub(super) fn salted(body: &[u8], salt: &str) -> Result<Bytes, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| ParseError::NotUtf8 { at: error.valid_up_to() })?;
    Ok(with_cache_salt(text, salt).map_err(ParseError::from)?.into())
}

/// Where encodings are remembered for prompts with this salt.
fn apart(salt: &str) -> u64 {
    // Even, and never everybody's.
    xxh3_64(salt.as_bytes()).max(1) << 1
}

/// Says who answers,
const BACKEND: HeaderName = HeaderName::from_static("x-router-backend");
/// and why it was chosen.
const REASON: HeaderName = HeaderName::from_static("x-router-reason");

/// Tokens that an answer is charged with until its end, where tenants are kept apart.
const ANSWER_TOKENS_APART: f64 = 256.0;

/// Lets a request in, if its client may use so much.
pub(super) fn admit(
    proxy: &Arc<Proxy>,
    served: &Served,
    facts: Facts,
    prompt_tokens: u32,
    account: &Account,
) -> Result<Option<Arc<Charge>>, ApiError> {
    let pool = &served.pool;
    let output_tokens = || {
        let usual = match proxy.settings().auth.isolate_tenants {
            // What a client is charged, and so what it is told to have left, says nothing of others' answers.
            true => ANSWER_TOKENS_APART,
            false => pool.router.read(|scheduler| scheduler.usual_output_tokens()),
        };
        (usual as u64).min(facts.output_tokens_max().map_or(u64::MAX, u64::from))
    };
    let ask = Ask {
        tenant: facts.tenant(),
        model: &pool.model,
        adapter: served.adapter.as_deref(),
        prompt_tokens,
        output_tokens: &output_tokens,
    };
    let (left, admitted) = proxy.limits.admit(proxy.fleet.clock, &ask);
    account.set_left(left);
    admitted.map_err(|limited| {
        proxy.fleet.metrics.limits.note(&limited.key, &limited.model, limited.exceeded.kind);
        ApiError::RateLimited(limited)
    })
}

/// Parses a body and hands it with its rendered prompt to `read`.
fn rendered<T>(
    api: Api,
    body: &[u8],
    read: impl FnOnce(&ParsedRequest<'_>, &[u8]) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    PROMPT.with_borrow_mut(|prompt| {
        let parsed = openai::parse(api, body, prompt)?;
        let done = read(&parsed, prompt);
        if prompt.capacity() > SCRATCH_BYTES_MAX {
            *prompt = Vec::new();
        }
        done
    })
}

pub(super) fn named_pool(proxy: &Proxy, model: &str) -> Result<Arc<Served>, ApiError> {
    let table = proxy.fleet.snapshot();
    if let Some(served) = table.by_name.get(model) {
        return Ok(Arc::clone(served));
    }
    let expected = || proxy.fleet.workers().values().any(|worker| worker.model.as_deref() == Some(model));
    if table.pools.is_empty() || expected() {
        return Err(no_endpoint(proxy));
    }
    Err(ApiError::UnknownModel(model.chars().take(200).collect()))
}

pub(super) fn no_endpoint(proxy: &Proxy) -> ApiError {
    let retry_after_s = proxy.settings().probe_interval.as_secs().max(1);
    ApiError::Rejected { why: Rejection::NoEndpoint, retry_after_s }
}

/// Engines' own APIs name no model; with one pool there is no doubt.
fn only_pool(proxy: &Proxy, api: Api) -> Result<Arc<Served>, ApiError> {
    let engine_api =
        matches!(api, Api::Generate | Api::Tokenize | Api::Detokenize | Api::Rerank | Api::Score);
    match &proxy.fleet.snapshot().pools[..] {
        [] => Err(no_endpoint(proxy)),
        [pool] if engine_api => named_pool(proxy, &pool.model),
        _ => Err(ApiError::MissingField(
            "`model` is missing: name one of those that GET /v1/models lists".into(),
        )),
    }
}

/// The head of the request to the worker.
pub(super) fn request_head(parts: &Parts, lease: &Lease, body_len: usize, account: &Account) -> Vec<u8> {
    let address = &lease.worker.upstream.address;
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut head = Vec::with_capacity(1024);
    let mut put = |pieces: &[&[u8]]| pieces.iter().for_each(|piece| head.extend_from_slice(piece));
    put(&[
        parts.method.as_str().as_bytes(),
        b" ",
        address.base_path.as_bytes(),
        path.as_bytes(),
        b" HTTP/1.1\r\nhost: ",
    ]);
    put(&[address.authority.as_bytes(), b"\r\nx-request-id: ", account.request_id.as_bytes(), b"\r\n"]);
    let trace = account.timeline.trace();
    if let Some(trace) = trace {
        let context = trace.outgoing(lease.attempt().map(Attempt::id)).to_string();
        put(&[b"traceparent: ", context.as_bytes(), b"\r\n"]);
    }
    let authorization = lease.worker.upstream.authorization();
    let strips = authorization.is_some() || !lease.proxy().auth().forwards_credentials();
    if let Some(authorization) = &authorization {
        put(&[b"authorization: ", authorization.as_bytes(), b"\r\n"]);
    }
    for (name, value) in &parts.headers {
        let ours = name == header::HOST
            || name == header::CONTENT_LENGTH
            || name == header::EXPECT
            || name == REQUEST_ID
            || (strips && is_credential(name))
            || (name == RANK && lease.endpoint.number.is_some())
            || (name == TRACEPARENT && trace.is_some())
            || (name == TRACESTATE && trace.is_some_and(|trace| !trace.has_caller()));
        // An answer that is compressed could not be watched.
        if !ours
            && name != header::ACCEPT_ENCODING
            && !is_hop_by_hop(name)
            && !is_ours(name)
            && !named_in_connection(parts, name)
        {
            put(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
        }
    }
    if let Some(rank) = lease.endpoint.number {
        put(&[RANK.as_bytes(), b": ", rank.to_string().as_bytes(), b"\r\n"]);
    }
    if body_len > 0 || parts.method == http::Method::POST || parts.method == http::Method::PUT {
        put(&[b"content-length: ", body_len.to_string().as_bytes(), b"\r\n"]);
    }
    put(&[b"\r\n"]);
    head
}

/// Whether the client's `Connection` header names this field as meant for us alone.
fn named_in_connection(parts: &Parts, name: &HeaderName) -> bool {
    parts.headers.get_all(header::CONNECTION).iter().any(|list| {
        list.to_str()
            .is_ok_and(|list| list.split(',').any(|item| item.trim().eq_ignore_ascii_case(name.as_str())))
    })
}

/// An engine's answer as the client's.
fn relay(
    answer: Answer,
    lease: Option<Lease>,
    account: &Arc<Account>,
    limits: Limits,
    origin: Option<Origin>,
) -> Response<Body> {
    let Answer { status, headers, body, .. } = answer;
    let mut relay = Relay::new(status, &headers, body, lease, Arc::clone(account), limits);
    relay.makes_object = origin;
    response(status, headers, relay)
}

/// As [`relay`], of an answer that goes on elsewhere if its engine dies.
fn continued(
    answer: Answer,
    lease: Lease,
    limits: Limits,
    continuation: Box<Continuation>,
) -> Response<Body> {
    let Answer { status, headers, body, .. } = answer;
    let account = Arc::clone(continuation.account());
    let mut relay = Relay::new(status, &headers, body, Some(lease), account, limits);
    relay.continuation = Some(continuation);
    response(status, headers, relay)
}

fn response(status: StatusCode, headers: HeaderMap, relay: Relay) -> Response<Body> {
    let mut response = Response::new(Body::Relay(Box::pin(relay)));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// Whether a header is a router's own word, which neither a client nor an engine can say.
fn is_ours(name: &HeaderName) -> bool {
    ["x-router-", "x-kvlane-"].into_iter().any(|start| name.as_str().starts_with(start))
}

/// Takes away what is a router's own word.
pub(super) fn unmark(headers: &mut HeaderMap) {
    if headers.keys().any(is_ours) {
        let said: Vec<_> = headers.keys().filter(|name| is_ours(name)).cloned().collect();
        said.iter().for_each(|name| _ = headers.remove(name));
    }
}

/// Says who answers and why.
fn mark(headers: &mut HeaderMap, lease: &Lease) {
    unmark(headers);
    if let Ok(backend) = HeaderValue::from_str(&lease.endpoint.name) {
        headers.insert(BACKEND, backend);
    }
    let Placement { reason, knowledge, feed, .. } = lease.placement;
    let reason = match (knowledge, feed) {
        // Nothing else can be known of it, and nothing speaks against it.
        (Knowledge::Approximate, Feed::Absent) => Ok(HeaderValue::from_static(reason.name())),
        _ => HeaderValue::try_from(format!("{}; knowledge={}", reason.name(), knowledge.name())),
    };
    if let Ok(reason) = reason {
        headers.insert(REASON, reason);
    }
}
