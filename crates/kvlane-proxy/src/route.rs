//! From a request to its pool: parses the body, finds the model, counts the tokens, hashes the blocks.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use kvlane_core::block::ChainSeed;
use kvlane_core::poison_prompts::PromptKey;
use kvlane_core::request::RequestKey;
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::tokenize::Counted;
use kvlane_http::connections::Connections;
use kvlane_wire::api::{Api, Repeats};
use kvlane_wire::disaggregation::{may_split, splits, strip_transfer_params};
use kvlane_wire::engine::calls::{self, SERVICE};
use kvlane_wire::models::max_model_len;
use kvlane_wire::openai::{self, ParsedRequest};
use kvlane_wire::server_timing::Stage;
use tokio::time::Instant;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::account::Account;
use crate::admission::admit;
use crate::attributes::Attributes;
use crate::auth::identity;
use crate::count::{Question, count};
use crate::engine_priority::{ranked, takes_priority};
use crate::error::ApiError;
use crate::model::{self, Chain, Chosen, Request};
use crate::objects::{self, Kept};
use crate::proxy::Proxy;
use crate::routed::Routed;
use crate::salt::salted;

/// Bytes of a body's end that tell its prompt from others with the same full blocks.
const PROMPT_END_BYTES: usize = 1024;
/// Scratch memory for rendered prompts beyond which it is freed after use.
const SCRATCH_BYTES_MAX: usize = 4 << 20;

thread_local! {
    static PROMPT: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Finds the pool, the prompt's blocks, and the body to send if it differs from the client's.
pub(super) async fn route(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    (api, links): (Api, &mut Chain),
    parts: &Parts,
    body: &Bytes,
    account: &Account,
    deadline: Instant,
) -> Result<(Routed, Option<Bytes>), ApiError> {
    let (received, timeline) = (account.received, Arc::clone(&account.timeline));
    timeline.enter(Stage::Parse);
    let name = RequestKey::named(account.request_id.as_bytes());
    let isolates = proxy.settings().auth.isolate_tenants;
    if isolates && api.is_grpc() {
        return Err(ApiError::NotSalted(SERVICE));
    }
    let ((served, alias, named_at), attributes, seed, estimated, salt, (kept, reserved, telling)) =
        rendered(api, body, |parsed, prompt| {
            let reader = proxy.attribute_reader.load();
            let attributes = reader.read(&parts.headers, Some(parsed), identity(parts));
            let before = parsed.previous_response.as_deref().or(parsed.conversation.as_deref());
            let keeper = |id| objects::continued(proxy, id, attributes, isolates);
            let kept = before.map(keeper).transpose()?.flatten();
            let conversation =
                || attributes.session().map_or_else(|| xxh3_64(openai::opening(prompt)), |session| session.0);
            let request = Request {
                parts,
                named: parsed.model.as_deref(),
                keeper: kept.as_ref().map(Kept::worker),
                conversation: &conversation,
                has_tools: openai::has_tools(prompt),
            };
            let Chosen { served, alias } = model::choose(proxy, &request, links)?;
            // An alias of a model shares its blocks; an adapter does not.
            let adapter = served.adapter.as_deref().or(parsed.lora.as_deref());
            let theirs = parsed.cache_salt.as_deref();
            let ours = isolates.then(|| reader.salt(&parts.headers, identity(parts), theirs));
            let salt = ours.as_deref().or(theirs);
            let seed = ChainSeed::new(&served.pool.model, adapter, salt);
            let apart = salt.map_or(0, apart);
            let block_tokens = served.pool.router.block_tokens();
            let estimated = if api.is_grpc() && parsed.token_ids {
                Some(Counted::of(seed, &ids_of(prompt), block_tokens))
            } else if served.pool.counting.is_estimate() {
                Some(Counted::estimate(seed, prompt, block_tokens))
            } else {
                None
            };
            if let (Some(id), None) = (before, &kept) {
                objects::made_by_only(id, &model::all(proxy, parts, parsed.model.as_deref())?)?;
            }
            Ok((
                (served, alias, parsed.model.as_deref().and_then(|name| model::place_of(name, body))),
                attributes,
                seed,
                estimated,
                (ours, apart),
                (kept.map(Box::new), parsed.reserved, parsed.telling),
            ))
        })?;
    let (ours, apart) = salt;
    let pool = &served.pool;
    let counted = match estimated {
        Some(estimated) => estimated,
        None => {
            // A request over a limit is rejected before its tokens are counted. Meanwhile it counts as concurrent.
            account.hold(admit(proxy, (&served, alias.as_deref()), attributes, 0, account)?);
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
    let charge = admit(proxy, (&served, alias.as_deref()), attributes, prompt_tokens, account)?;
    if links.is_at_fallback() && !fits(proxy, &served, prompt_tokens, attributes) {
        return Err(ApiError::UnknownModel(served.name().into()));
    }
    // What only a gateway may say to an engine is not relayed.
    let stripped = reserved.then(|| match api.is_grpc() {
        true => calls::strip_transfer_params(body),
        false => strip_transfer_params(body),
    });
    let stripped = stripped.transpose()?;
    let body = stripped.as_ref().unwrap_or(body);
    // A gRPC request does not name its model.
    let renamed = alias.as_deref().filter(|alias| alias.renames() && !api.is_grpc());
    let renamed = renamed.map(|alias| match named_at.filter(|_| stripped.is_none()) {
        Some(at) => Ok(model::with_name(body, at, &alias.model)),
        None => model::with_model(body, &alias.model),
    });
    let renamed = renamed.transpose()?;
    let body = renamed.as_ref().unwrap_or(body);
    let is_ours = pool.provider.is_none();
    let salted = ours.filter(|_| takes_salt(api) && is_ours).map(|salt| salted(body, &salt)).transpose()?;
    let body = salted.as_ref().unwrap_or(body);
    let told = attributes.engine_priority().filter(|_| takes_priority(api) && is_ours);
    let ranked = told.map(|priority| ranked(body, priority)).transpose()?;
    let body = ranked.as_ref().unwrap_or(body);
    // The last block's hash covers the whole chain, and the rest of the prompt is at the body's end.
    let behind = &body[body.len().saturating_sub(PROMPT_END_BYTES)..];
    let prompt = PromptKey(xxh3_64_with_seed(behind, chain.last().map_or(apart, |block| block.0)));
    let connector = proxy.fleet.settings().disaggregation.connector;
    let connector = connector.filter(|_| pool.router.may_split() && kept.is_none());
    let may_split = connector.is_some_and(|connector| {
        // Most bodies have nothing that needs a second reading.
        !api.is_grpc() && splits(connector, api) && (!telling || may_split(connector, api, body).is_ok())
    });
    let attributes = proxy.objectives.apply(attributes, &served, alias.as_deref());
    let routed = Routed {
        served,
        chain,
        prompt_tokens,
        attributes,
        received,
        name,
        timeline,
        deadline,
        charge,
        prompt,
        may_split,
        kept,
        alias,
        repeats: Repeats::Yes,
    };
    Ok((routed, ranked.or(salted).or(renamed).or(stripped)))
}

/// The token ids of a prompt that was rendered of them.
fn ids_of(prompt: &[u8]) -> Vec<u32> {
    prompt.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect()
}

/// Whether prompt and answer are within the context of the model, as far as its card says.
fn fits(proxy: &Proxy, served: &Served, prompt_tokens: u32, attributes: Attributes) -> bool {
    let table = proxy.fleet.snapshot();
    let longest = table.cards.get(served.name()).and_then(max_model_len);
    let answer = attributes.output_tokens_max().unwrap_or(0);
    longest.is_none_or(|longest| u64::from(prompt_tokens) + u64::from(answer) <= longest)
}

/// Whether engines accept `cache_salt` in bodies of this API.
fn takes_salt(api: Api) -> bool {
    matches!(
        api,
        Api::ChatCompletions
            | Api::Completions
            | Api::Responses
            | Api::Messages
            | Api::TokensIn
            | Api::Embeddings
            | Api::Pooling
            | Api::Rerank
            | Api::Score
            | Api::Invocations
    )
}

/// The key under which encodings of prompts with this salt are cached.
fn apart(salt: &str) -> u64 {
    // Even, and never the key of unsalted prompts.
    xxh3_64(salt.as_bytes()).max(1) << 1
}

/// Parses a body and passes it with its rendered prompt to `read`.
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
