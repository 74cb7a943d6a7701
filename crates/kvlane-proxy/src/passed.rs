//! Requests that are relayed unparsed: their pool, their worker, their charge and the isolation of tenants.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Uri, header};
use kvlane_core::block::BYTES_PER_TOKEN;
use kvlane_core::poison_prompts::PromptKey;
use kvlane_core::request::RequestKey;
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::worker::WorkerId;
use kvlane_wire::api::{EnginePath, Keeps, Repeats};
use kvlane_wire::multipart::{FieldScanner, Search, boundary};
use kvlane_wire::openai::ParseError;
use kvlane_wire::server_timing::Stage;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use crate::account::Account;
use crate::admission::{admit, named_pool};
use crate::alias::Alias;
use crate::attributes::Attributes;
use crate::auth::identity;
use crate::error::ApiError;
use crate::model::{self, Chain, Chosen, Request};
use crate::objects::{self, Kept};
use crate::proxy::Proxy;
use crate::routed::Routed;
use crate::salt::salted;

/// Where a batch is made of a file.
const BATCHES: &str = "/v1/batches";

/// Finds the pool, and the body to send if it differs from the client's. `row` is none for a path of
/// `server.extra_paths`.
pub(super) fn route(
    proxy: &Arc<Proxy>,
    (row, chain): (Option<&EnginePath>, &mut Chain),
    parts: &Parts,
    body: &Bytes,
    account: &Account,
    deadline: Instant,
) -> Result<(Routed, Option<Bytes>), ApiError> {
    let (reader, isolates) = (proxy.attribute_reader.load(), proxy.settings().auth.isolate_tenants);
    let attributes = reader.read(&parts.headers, None, identity(parts));
    let kept = kept(proxy, row, parts, body, attributes, isolates)?;
    let made_in = kept.as_ref().and_then(|kept| pool_of(proxy, kept.worker()));
    let (served, alias) = match made_in {
        Some(served) => (served, None),
        None => {
            let named = named(parts, body);
            let conversation = || xxh3_64(body);
            let request = Request {
                parts,
                named: named.as_deref(),
                keeper: None,
                conversation: &conversation,
                has_tools: false,
            };
            let Chosen { served, alias } = model::choose(proxy, &request, chain)?;
            (served, alias)
        }
    };
    let is_object = body.trim_ascii_start().starts_with(b"{");
    let renamed = match alias.as_deref().filter(|alias| alias.renames()) {
        Some(alias) if is_object => Some(model::with_model(body, &alias.model)?),
        Some(alias) => kind(parts).and_then(|kind| with_field(kind, body, &alias.model)),
        None => None,
    };
    let body = renamed.as_ref().unwrap_or(body);
    let (mut prompt_tokens, mut with_salt) = (0, None);
    let keeps_prompt = row.map_or(is_object, |row| row.keeps == Keeps::Prompt);
    if keeps_prompt {
        prompt_tokens = u32::try_from(body.len() / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
        if isolates {
            let theirs = cache_salt(body)?;
            let salt = reader.salt(&parts.headers, identity(parts), theirs.as_deref());
            with_salt = Some(salted(body, &salt)?);
        }
    }
    account.timeline.enter(Stage::Place);
    let charge = admit(proxy, (&served, alias.as_deref()), attributes, prompt_tokens, account)?;
    let attributes = proxy.objectives.apply(attributes, &served, alias.as_deref());
    let routed = Routed {
        may_split: false,
        served,
        chain: Vec::new(),
        prompt_tokens: 0,
        attributes,
        received: account.received,
        timeline: Arc::clone(&account.timeline),
        name: RequestKey::named(account.request_id.as_bytes()),
        deadline,
        charge,
        prompt: PromptKey(xxh3_64(body)),
        kept: kept.map(Box::new),
        alias,
        repeats: row.map_or(Repeats::Unsent, |row| row.repeats),
    };
    Ok((routed, with_salt.or(renamed)))
}

/// The object that a request names, if any, with its worker. Where tenants are isolated, only the tenant that made an
/// object may use it.
fn kept(
    proxy: &Proxy,
    row: Option<&EnginePath>,
    parts: &Parts,
    body: &[u8],
    attributes: Attributes,
    isolates: bool,
) -> Result<Option<Kept>, ApiError> {
    let Some(row) = row.filter(|row| row.keeps == Keeps::Object) else { return Ok(None) };
    if isolates && row.object(parts.uri.path()).is_none() {
        return Err(ApiError::NotIsolated(row.path));
    }
    match object_of(row, parts, body) {
        Some(id) => objects::addressed(proxy, &id, attributes, isolates),
        None => Ok(None),
    }
}

/// The id of the object that a request needs: in its path, or that of the input of a batch.
pub(super) fn object_of<'a>(row: &EnginePath, parts: &'a Parts, body: &'a [u8]) -> Option<Cow<'a, str>> {
    #[derive(serde::Deserialize)]
    struct Batch<'a> {
        #[serde(borrow)]
        input_file_id: Option<Cow<'a, str>>,
    }
    let in_path = row.object(parts.uri.path()).map(Cow::Borrowed);
    in_path.or_else(|| {
        (row.path == BATCHES).then(|| serde_json::from_slice::<Batch<'_>>(body).ok()?.input_file_id)?
    })
}

/// A pool that a worker serves.
fn pool_of(proxy: &Proxy, worker: WorkerId) -> Option<Arc<Served>> {
    let worker = proxy.fleet.workers().get(&worker).cloned()?;
    let model = proxy.fleet.snapshot().endpoints_of(worker.id).first().map(|(pool, _)| pool.model.clone())?;
    named_pool(proxy, &model).ok()
}

/// The model that a request names in its JSON body, its form or its query.
pub(super) fn named<'a>(parts: &'a Parts, body: &'a [u8]) -> Option<Cow<'a, str>> {
    in_json(body)
        .or_else(|| in_form(kind(parts)?, body).map(Cow::Owned))
        .or_else(|| in_query(parts.uri.query()?))
}

fn kind(parts: &Parts) -> Option<&str> {
    parts.headers.get(header::CONTENT_TYPE)?.to_str().ok()
}

fn in_json(body: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(serde::Deserialize)]
    struct Named<'a> {
        #[serde(borrow)]
        model: Option<Cow<'a, str>>,
    }
    body.trim_ascii_start()
        .starts_with(b"{")
        .then(|| serde_json::from_slice::<Named<'_>>(body).ok()?.model)?
}

fn in_query(query: &str) -> Option<Cow<'_, str>> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix("model="))?;
    Some(percent_decode_str(value).decode_utf8_lossy()).filter(|model| !model.is_empty())
}

/// The head with the engine's own name in its query, if that names the model.
pub(super) fn renamed_query(parts: &Parts, alias: &Alias) -> Option<Parts> {
    let query = parts.uri.query().filter(|_| alias.renames())?;
    in_query(query)?;
    let own = percent_encode(alias.model.as_bytes(), NON_ALPHANUMERIC);
    let mut is_first = true;
    let pairs =
        query.split('&').map(|pair| match pair.starts_with("model=") && std::mem::take(&mut is_first) {
            true => format!("model={own}"),
            false => pair.to_owned(),
        });
    let target = format!("{}?{}", parts.uri.path(), pairs.collect::<Vec<_>>().join("&"));
    let mut uri = parts.uri.clone().into_parts();
    uri.path_and_query = Some(target.parse().ok()?);
    let mut renamed = parts.clone();
    renamed.uri = Uri::from_parts(uri).ok()?;
    Some(renamed)
}

/// The field `model` of a form, of which this is at least the beginning.
fn in_form(content_type: &str, body: &[u8]) -> Option<String> {
    match FieldScanner::new(&boundary(content_type)?, "model").push(body) {
        Search::Found(model) => Some(model.to_owned()),
        Search::More | Search::Missing => None,
    }
}

/// The form with this value of its field `model`, if it has that field.
fn with_field(content_type: &str, body: &[u8], model: &str) -> Option<Bytes> {
    let mut scanner = FieldScanner::new(&boundary(content_type)?, "model");
    scanner.push(body);
    let at = scanner.value_at()?;
    Some([&body[..at.start], model.as_bytes(), &body[at.end..]].concat().into())
}

/// The `cache_salt` of a body.
fn cache_salt(body: &[u8]) -> Result<Option<String>, ApiError> {
    #[derive(serde::Deserialize)]
    struct Salted {
        cache_salt: Option<String>,
    }
    let salted = serde_json::from_slice::<Salted>(body);
    let expected = "an object whose `cache_salt`, if it has one, is a string";
    let salted = salted.map_err(|error| ParseError::Syntax { at: error.column(), expected })?;
    Ok(salted.cache_salt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_its_model() {
        assert_eq!(in_query("limit=3&model=org%2Fm").as_deref(), Some("org/m"));
        assert_eq!(in_query("submodel=x&limit"), None);
    }

    #[test]
    fn the_model_of_a_query_is_replaced_and_nothing_else() {
        let alias = Alias::new("gpt", "org/m".into(), None, None);
        let renamed = |target: &str, alias: &Alias| {
            let (parts, ()) = http::Request::get(target).body(()).expect("a request").into_parts();
            renamed_query(&parts, alias).map(|parts| parts.uri.to_string())
        };
        assert_eq!(
            renamed("/v1/realtime?submodel=gpt&model=gpt&model=x&a=%20b", &alias).as_deref(),
            Some("/v1/realtime?submodel=gpt&model=org%2Fm&model=x&a=%20b")
        );
        assert_eq!(renamed("/v1/realtime?a=b", &alias), None);
        assert_eq!(renamed("/v1/realtime?model=m", &Alias::new("m", "m".into(), None, None)), None);
    }
}
