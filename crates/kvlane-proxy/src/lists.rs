//! Lists of objects, merged over the engines that keep them.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use kvlane_fleet::objects::{Maker, ObjectKey, Origin};
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::worker::{Worker, WorkerId};
use kvlane_http::connections::Connections;
use kvlane_wire::api::{EnginePath, Keeps};
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;

use crate::account::Account;
use crate::admission::{admit, no_endpoint};
use crate::auth::identity;
use crate::body::{Body, json_response};
use crate::error::ApiError;
use crate::model;
use crate::objects::short;
use crate::passed;
use crate::proxy::Proxy;
use crate::seek::{ask, fit_workers};

/// Says that some workers' objects are missing in a list.
const INCOMPLETE: HeaderName = HeaderName::from_static("x-router-incomplete");
/// Most workers that are asked, and most at once.
const WORKERS_MAX: usize = 256;
const AT_ONCE: usize = 16;
/// Most pages of one worker, and objects on each of them.
const PAGES_MAX: usize = 32;
const PAGE_OBJECTS: usize = 100;
/// Most bytes of one page, and of all that one worker answers.
const PAGE_BYTES_MAX: usize = 1 << 20;
const WORKER_BYTES_MAX: usize = 4 << 20;
/// Time for one page.
const PAGE_WITHIN: Duration = Duration::from_secs(5);
/// Most objects of a merged list, and their number if the client names none; files come all at once.
const OBJECTS_MAX: usize = 10_000;
const OBJECTS: usize = 20;
const FILES: &str = "/v1/files";
/// Names of the keys of a query: where a list begins, where it ends, and how long it is.
const AFTER: [&str; 2] = ["after", "after_id"];
const BEFORE: [&str; 2] = ["before", "before_id"];
const LIMIT: &str = "limit";

/// What one worker lists.
#[derive(Default)]
struct Listed {
    /// Its first answer, without the objects.
    envelope: Map<String, Value>,
    objects: Vec<Value>,
    /// It has more, or did not answer to the end.
    is_part: bool,
    /// Its answer, if it is no list.
    refusal: Option<(u16, Bytes)>,
}

/// The part of all objects that a client asks for.
struct Wanted<'a> {
    after: Option<&'a str>,
    before: Option<&'a str>,
    limit: usize,
    oldest_first: bool,
}

/// The answer to a request for a list, if it is one and several workers may have objects of it.
pub(super) async fn merged(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    row: Option<&'static EnginePath>,
    parts: &Parts,
    account: &Arc<Account>,
) -> Result<Option<Response<Body>>, ApiError> {
    let is_list = |row: &&EnginePath| row.keeps == Keeps::Object && !row.path.contains("{}");
    let Some(row) = row.filter(is_list).filter(|_| parts.method == Method::GET) else { return Ok(None) };
    if proxy.settings().auth.isolate_tenants {
        return Ok(None);
    }
    let named = passed::named(parts, &[]);
    let (mut workers, served) = match model::all(proxy, parts, named.as_deref()) {
        Ok(all) => {
            let has =
                |worker: WorkerId| all.iter().any(|served| !served.pool.endpoints_of(worker).is_empty());
            let workers = fit_workers(proxy).into_iter().filter(|worker| has(worker.id)).collect();
            (workers, Arc::clone(&all[0]))
        }
        // Without a model, of all.
        Err(ApiError::MissingField(_)) => (fit_workers(proxy), first_served(proxy)?),
        Err(error) => return Err(error),
    };
    if workers.len() <= 1 && proxy.fleet.snapshot().pools.len() <= 1 {
        return Ok(None);
    }
    let attributes = proxy.attribute_reader.load().read(&parts.headers, None, identity(parts));
    // Charged once, however many workers are asked.
    let _charge = admit(proxy, (&served, None), attributes, 0, account)?;
    let left_out = workers.len().saturating_sub(WORKERS_MAX);
    workers.truncate(WORKERS_MAX);
    let asked = workers.len() + left_out;
    let query = parts.uri.query().unwrap_or_default();
    let all = ask_all(proxy, upstreams, parts, workers).await;
    let missing = left_out + all.iter().filter(|(_, listed)| listed.is_part).count();
    if all.iter().all(|(_, listed)| listed.envelope.is_empty()) {
        return refused(proxy, &served, all).map(Some);
    }
    for (worker, listed) in &all {
        let ids = listed.objects.iter().filter_map(|object| object["id"].as_str());
        for id in ids.filter(|id| proxy.fleet.objects.origin(id).is_none()) {
            proxy.fleet.objects.note(ObjectKey::of(id), Origin::new(worker, Maker::Unknown));
        }
    }
    let list = merge(all.into_iter().map(|(_, listed)| listed), &Wanted::of(query, row.path))?;
    let mut response = json_response(StatusCode::OK, &list);
    if missing > 0 {
        let text = format!("the objects of {missing} of {asked} workers are missing or cut");
        response.headers_mut().extend(HeaderValue::try_from(text).ok().map(|value| (INCOMPLETE, value)));
    }
    Ok(Some(response))
}

fn first_served(proxy: &Proxy) -> Result<Arc<Served>, ApiError> {
    let pool = proxy.fleet.snapshot().pools.first().map(|pool| pool.model.clone());
    let served = pool.and_then(|model| proxy.fleet.snapshot().by_name.get(&model).cloned());
    served.ok_or_else(|| no_endpoint(proxy, String::new()))
}

/// What the client gets if no worker has a list: the first answer of one, or that none is there.
fn refused(
    proxy: &Proxy,
    served: &Served,
    all: Vec<(Arc<Worker>, Listed)>,
) -> Result<Response<Body>, ApiError> {
    let refusal = all.into_iter().find_map(|(_, listed)| listed.refusal);
    let Some((status, body)) = refusal else { return Err(no_endpoint(proxy, served.name().into())) };
    let mut response = Response::new(Body::Whole(Some(body)));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, json);
    Ok(response)
}

/// The lists of these workers, in their order.
async fn ask_all(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    parts: &Parts,
    workers: Vec<Arc<Worker>>,
) -> Vec<(Arc<Worker>, Listed)> {
    let (mut asking, mut all, mut next) = (JoinSet::new(), Vec::new(), workers.into_iter().enumerate());
    loop {
        while asking.len() < AT_ONCE
            && let Some((n, worker)) = next.next()
        {
            let (proxy, upstreams, parts) = (Arc::clone(proxy), Arc::clone(upstreams), parts.clone());
            asking.spawn(async move {
                let listed = list(&proxy, &upstreams, &worker, &parts).await;
                (n, worker, listed)
            });
        }
        match asking.join_next().await {
            Some(Ok(listed)) => all.push(listed),
            // A task that panicked is counted and logged by the panic hook.
            Some(Err(_)) => {}
            None => break,
        }
    }
    all.sort_by_key(|(n, ..)| *n);
    all.into_iter().map(|(_, worker, listed)| (worker, listed)).collect()
}

/// All objects of one worker, page by page.
async fn list(proxy: &Proxy, upstreams: &Arc<Connections>, worker: &Worker, parts: &Parts) -> Listed {
    let (path, query) = (parts.uri.path(), parts.uri.query().unwrap_or_default());
    let mut listed = Listed { is_part: true, ..Listed::default() };
    let after_key = if path.ends_with("/messages/batches") { AFTER[1] } else { AFTER[0] };
    let (mut after, mut bytes) = (None::<String>, 0);
    for _ in 0..PAGES_MAX {
        let target = target(path, query, after_key, after.as_deref());
        let limits = (PAGE_WITHIN, PAGE_BYTES_MAX);
        let Ok((status, page)) = ask(proxy, upstreams, worker, parts, &target, limits).await else { break };
        bytes += page.len();
        let parsed = (status == 200).then(|| serde_json::from_slice(&page).ok()).flatten();
        let Some(Value::Object(mut envelope)) = parsed else {
            listed.refusal = Some((status, page));
            break;
        };
        let Some(Value::Array(objects)) = envelope.remove("data") else { break };
        let last = objects.last().and_then(|object| object["id"].as_str()).map(str::to_owned);
        let has_more = envelope.get("has_more") == Some(&Value::Bool(true));
        listed.objects.extend(objects);
        if after.is_none() {
            envelope.insert("data".into(), Value::Null);
            listed.envelope = envelope;
        }
        // A server that does not know the key would answer the same page again.
        if !has_more || last.is_none() || last == after {
            listed.is_part = has_more;
            break;
        }
        if bytes >= WORKER_BYTES_MAX {
            break;
        }
        after = last;
    }
    listed
}

/// The path and query of a page: the client's query, from an object of this worker on.
fn target(path: &str, query: &str, after_key: &str, after: Option<&str>) -> String {
    let is_ours = |pair: &&str| {
        let key = pair.split('=').next().unwrap_or_default();
        key == LIMIT || AFTER.contains(&key) || BEFORE.contains(&key)
    };
    let theirs = query.split('&').filter(|pair| !pair.is_empty() && !is_ours(pair));
    let mut target = format!("{path}?{LIMIT}={PAGE_OBJECTS}");
    theirs.for_each(|pair| target = format!("{target}&{pair}"));
    if let Some(after) = after {
        let after = percent_encoding::utf8_percent_encode(after, percent_encoding::NON_ALPHANUMERIC);
        target = format!("{target}&{after_key}={after}");
    }
    target
}

impl<'a> Wanted<'a> {
    fn of(query: &'a str, path: &str) -> Self {
        let value = |names: &[&str]| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, value)| names.contains(key) && !value.is_empty()).map(|(_, value)| value)
        };
        let usual = if path == FILES { OBJECTS_MAX } else { OBJECTS };
        let limit = value(&[LIMIT]).and_then(|limit| limit.parse().ok()).unwrap_or(usual);
        Self {
            after: value(&AFTER),
            before: value(&BEFORE),
            limit: limit.clamp(1, OBJECTS_MAX),
            oldest_first: value(&["order"]) == Some("asc"),
        }
    }
}

/// One list of all, the last made first.
///
/// # Errors
/// The object after or before which it is to begin or end is in none.
fn merge(all: impl Iterator<Item = Listed>, wanted: &Wanted<'_>) -> Result<Value, ApiError> {
    let (mut envelope, mut objects) = (Map::new(), Vec::new());
    let mut seen = std::collections::HashSet::new();
    for listed in all {
        if envelope.is_empty() {
            envelope = listed.envelope;
        }
        // Engines that share a store list the same objects.
        let is_new = |object: &Value| object["id"].as_str().is_none_or(|id| seen.insert(id.to_owned()));
        objects.extend(listed.objects.into_iter().filter(is_new));
    }
    objects.sort_by(|a, b| {
        let order = older(&a["created_at"], &b["created_at"]);
        if wanted.oldest_first { order } else { order.reverse() }
    });
    let place = |id: &str| {
        let id = percent_encoding::percent_decode_str(id).decode_utf8_lossy();
        let at = objects.iter().position(|object| object["id"] == *id);
        at.ok_or_else(|| ApiError::UnknownObject(short(&id)))
    };
    let (from, to) = match (wanted.after, wanted.before) {
        (Some(after), _) => (place(after)? + 1, objects.len()),
        (None, Some(before)) => {
            let to = place(before)?;
            (to.saturating_sub(wanted.limit), to)
        }
        (None, None) => (0, objects.len()),
    };
    let end = to.min(from + wanted.limit);
    let has_more = if wanted.after.is_none() && wanted.before.is_some() { from > 0 } else { end < to };
    let data: Vec<Value> = objects.drain(from..end).collect();
    let id = |object: Option<&Value>| object.map_or(Value::Null, |object| object["id"].clone());
    envelope.insert("first_id".into(), id(data.first()));
    envelope.insert("last_id".into(), id(data.last()));
    envelope.insert("has_more".into(), json!(has_more));
    envelope.insert("data".into(), Value::Array(data));
    Ok(Value::Object(envelope))
}

/// Which of two times is older: seconds, or texts of RFC 3339.
fn older(a: &Value, b: &Value) -> Ordering {
    match (a, b) {
        (Value::String(a), Value::String(b)) => a.cmp(b),
        _ => a.as_f64().unwrap_or(0.0).total_cmp(&b.as_f64().unwrap_or(0.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(objects: &[(&str, u64)]) -> Listed {
        let objects = objects.iter().map(|(id, at)| json!({"id": id, "created_at": at})).collect();
        let envelope = Map::from_iter([("object".into(), json!("list"))]);
        Listed { envelope, objects, ..Listed::default() }
    }

    fn page(query: &str) -> Result<(Vec<String>, bool), ApiError> {
        let all = [listed(&[("d", 4), ("a", 1)]), listed(&[("c", 3), ("b", 2), ("a", 1)])];
        let list = merge(all.into_iter(), &Wanted::of(query, "/v1/batches"))?;
        let ids = |list: &Value| {
            let data = list["data"].as_array().expect("objects").clone();
            data.iter().map(|object| object["id"].as_str().expect("an id").to_owned()).collect::<Vec<_>>()
        };
        let ids = ids(&list);
        assert_eq!(list["first_id"].as_str(), ids.first().map(String::as_str));
        assert_eq!(list["last_id"].as_str(), ids.last().map(String::as_str));
        assert_eq!(list["object"], "list");
        Ok((ids, list["has_more"].as_bool().expect("told")))
    }

    #[test]
    fn a_merged_list_is_read_page_by_page() {
        for (query, ids, has_more) in [
            ("", "d c b a", false),
            ("limit=3", "d c b", true),
            ("limit=3&after=b", "a", false),
            ("after_id=d&limit=2&x=1", "c b", true),
            ("limit=2&order=asc", "a b", true),
            ("before_id=a&limit=2", "c b", true),
            ("before_id=c&limit=2", "d", false),
            ("after=a", "", false),
            ("limit=0", "d", true),
        ] {
            let ids: Vec<String> = ids.split_whitespace().map(str::to_owned).collect();
            assert_eq!(page(query).expect("a list"), (ids, has_more), "{query}");
        }
        assert!(matches!(page("after=z"), Err(ApiError::UnknownObject(id)) if id == "z"));
    }

    #[test]
    fn a_worker_is_asked_for_its_own_pages() {
        let query = "purpose=batch&limit=3&after=x&before_id=y";
        assert_eq!(target("/v1/files", query, "after", None), "/v1/files?limit=100&purpose=batch");
        assert_eq!(
            target("/v1/files", query, "after", Some("f 1")),
            "/v1/files?limit=100&purpose=batch&after=f%201"
        );
    }
}
