//! The model of a request: the one that it names, or the default one, and what serves it by the catalogue (`models`).

use std::borrow::Cow;
use std::cell::OnceCell;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use kvlane_core::decision::Rejection;
use kvlane_fleet::catalogue::{ModelSpec, Traits};
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::settings::Settings;
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::worker::WorkerId;
use kvlane_http::address::Protocol;
use kvlane_wire::api::Repeats;
use kvlane_wire::edit;
use kvlane_wire::openai::ParseError;
use serde_json::Value;

use crate::admission::{named_pool, no_endpoint};
use crate::alias::Alias;
use crate::auth::identity;
use crate::error::ApiError;
use crate::grpc::protocol_of;
use crate::proxy::Proxy;

/// Headers that name the model of a request whose body names none: kvlane's own, and those of the Gateway API's body-based
/// routing and of AIBrix.
const HEADERS: [&str; 3] = ["x-kvlane-model", "x-gateway-model-name", "model"];
/// Most names in an error.
const CHOICES_MAX: usize = 8;

/// What serves a request.
pub(super) struct Chosen {
    pub(super) served: Arc<Served>,
    /// The name that it was asked for by, if the catalogue has it.
    pub(super) alias: Option<Arc<Alias>>,
}

/// How far a request has come in the entry of the catalogue that serves it.
#[derive(Default)]
pub(super) struct Chain {
    /// 0 is the target, others are the fallbacks.
    link: usize,
    /// Number of fallbacks, once the entry is known.
    fallbacks: usize,
    /// Why the target cannot serve it.
    first: Option<ApiError>,
    /// A copy goes to this model.
    mirror: Option<String>,
    /// A copy has been sent: none follows, however often the request is tried.
    is_copied: bool,
    /// It is a copy for this model.
    copy_for: Option<String>,
    /// Fallbacks do not apply.
    is_target_only: bool,
}

/// What of a request decides what serves it.
pub(super) struct Request<'a> {
    pub(super) parts: &'a Parts,
    /// The model that its body, form or query names.
    pub(super) named: Option<&'a str>,
    /// The worker that keeps the object which it continues.
    pub(super) keeper: Option<WorkerId>,
    /// A hash of its conversation.
    pub(super) conversation: &'a dyn Fn() -> u64,
    pub(super) has_tools: bool,
}

/// What serves the model that a request names: in its body, form or query, or in a header. If it names none, what serves
/// `routing.default_model`, or the only model.
///
/// # Errors
/// Nothing serves it, or the request names no model, there are several, and none is the default.
pub(super) fn choose(proxy: &Proxy, request: &Request<'_>, chain: &mut Chain) -> Result<Chosen, ApiError> {
    let settings = proxy.fleet.settings();
    let Some(name) = name(&settings, request.parts, request.named) else {
        let served = only(proxy, request.parts)?;
        return Ok(Chosen { served, alias: None });
    };
    match settings.models.get(name) {
        None => {
            let served = named(proxy, request.parts, name)?;
            // A client cannot spend what is kept for when the fleet fails.
            match served.pool.provider.is_some() {
                true => Err(ApiError::UnknownModel(name.into())),
                false => Ok(Chosen { served, alias: None }),
            }
        }
        // Nothing has been sent yet, so nothing can be repeated.
        Some(spec) => loop {
            match by_catalogue(proxy, request, chain, name, spec) {
                Ok(chosen) => return Ok(chosen),
                Err(error) => chain.after(error, Repeats::Yes)?,
            }
        },
    }
}

/// All that serves the model that a request names, whichever a request for it would get.
///
/// # Errors
/// As of [`choose`].
pub(super) fn all(proxy: &Proxy, parts: &Parts, named: Option<&str>) -> Result<Vec<Arc<Served>>, ApiError> {
    let settings = proxy.fleet.settings();
    let Some(name) = name(&settings, parts, named) else { return Ok(vec![only(proxy, parts)?]) };
    let Some(spec) = settings.models.get(name) else { return Ok(vec![named_pool(proxy, name)?]) };
    let all: Vec<_> = spec.models().filter_map(|model| named_pool(proxy, &model).ok()).collect();
    if all.is_empty() { Err(ApiError::UnknownModel(name.into())) } else { Ok(all) }
}

/// What serves a model name in what the request is sent in.
fn named(proxy: &Proxy, parts: &Parts, model: &str) -> Result<Arc<Served>, ApiError> {
    let served = named_pool(proxy, model)?;
    match served.pool.protocol == protocol_of(parts.uri.path()) {
        true => Ok(served),
        false => Err(other_protocol(&served.pool)),
    }
}

fn other_protocol(pool: &ModelPool) -> ApiError {
    ApiError::OtherProtocol { model: pool.model.clone(), over_grpc: pool.protocol == Protocol::Grpc }
}

/// The model that a request names, or the default one.
fn name<'a>(settings: &'a Settings, parts: &'a Parts, named: Option<&'a str>) -> Option<&'a str> {
    let header = |name: &&str| parts.headers.get(*name)?.to_str().ok().filter(|model| !model.is_empty());
    let default = || settings.routing.default_model.as_deref();
    named.or_else(|| HEADERS.iter().find_map(header)).or_else(default)
}

fn by_catalogue(
    proxy: &Proxy,
    request: &Request<'_>,
    chain: &mut Chain,
    name: &str,
    spec: &ModelSpec,
) -> Result<Chosen, ApiError> {
    chain.fallbacks = if chain.is_target_only { 0 } else { spec.fallbacks.len() };
    // What continues an object goes to the model that made it, whatever the weights say now.
    let made_by = request.keeper.and_then(|keeper| model_of(proxy, spec, keeper));
    if let Some(model) = made_by {
        chain.fallbacks = 0;
        let served = named_pool(proxy, &model)?;
        let alias = Alias::new(name, model, served.pool.provider.as_deref(), None);
        return Ok(Chosen { served, alias: Some(Arc::new(alias)) });
    }
    let hash = OnceCell::new();
    let conversation = || *hash.get_or_init(|| (request.conversation)());
    let headers = &request.parts.headers;
    let traits = Traits {
        header: &|name| headers.get(name)?.to_str().ok(),
        key: identity(request.parts).map(|identity| &*identity.name),
        conversation: &conversation,
    };
    let model = match (&chain.copy_for, chain.link) {
        (Some(model), _) => model.clone(),
        (None, 0) => {
            chain.mirror = spec.mirrored(&conversation).filter(|_| !chain.is_copied).map(str::to_owned);
            let target = spec.target(&traits).map(|target| target.model.clone());
            target.ok_or_else(|| ApiError::UnknownModel(name.into()))?
        }
        (None, link) => match spec.fallbacks.get(link - 1) {
            Some(fallback) if fallback.tools || !request.has_tools => fallback.served_as().into_owned(),
            _ => return Err(ApiError::UnknownModel(name.into())),
        },
    };
    let served = named(proxy, request.parts, &model)?;
    let provider = served.pool.provider.as_deref();
    if provider.is_some_and(|provider| !provider.has_budget(proxy.fleet.clock.now())) {
        return Err(ApiError::UnknownModel(name.into()));
    }
    let fallback = chain.first.as_ref().map(why);
    let alias = Alias::new(name, model, provider, fallback);
    Ok(Chosen { served, alias: Some(Arc::new(alias)) })
}

/// The model of an entry of the catalogue that a worker serves.
fn model_of(proxy: &Proxy, spec: &ModelSpec, worker: WorkerId) -> Option<String> {
    let table = proxy.fleet.snapshot();
    let serves = |model: &Cow<'_, str>| {
        table.by_name.get(&**model).is_some_and(|served| !served.pool.endpoints_of(worker).is_empty())
    };
    spec.models().find(serves).map(Cow::into_owned)
}

/// The only model of those that are served in what the request is sent in.
fn only(proxy: &Proxy, parts: &Parts) -> Result<Arc<Served>, ApiError> {
    let (table, protocol) = (proxy.fleet.snapshot(), protocol_of(parts.uri.path()));
    let of_fleet = table.pools.iter().filter(|pool| pool.provider.is_none());
    let (of_fleet, others): (Vec<_>, Vec<_>) = of_fleet.partition(|pool| pool.protocol == protocol);
    match &of_fleet[..] {
        [] => {
            Err(others.first().map_or_else(|| no_endpoint(proxy, String::new()), |pool| other_protocol(pool)))
        }
        [pool] => named_pool(proxy, &pool.model),
        _ => {
            let of_catalogue = proxy.fleet.settings();
            let is_choice = |pool: &ModelPool| pool.provider.is_none() && pool.protocol == protocol;
            let served = table.by_name.iter().filter(|(_, served)| is_choice(&served.pool));
            let names = served.map(|(name, _)| name).chain(of_catalogue.models.keys());
            Err(ApiError::MissingField(choices(names.map(String::as_str).collect())))
        }
    }
}

/// Says which models there are.
fn choices(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    let more = names.len().saturating_sub(CHOICES_MAX);
    names.truncate(CHOICES_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more (GET /v1/models)") };
    format!(
        "`model` is missing and several models are served: name one of {}{more} in the body, or in the header {}",
        names.join(", "),
        HEADERS[0]
    )
}

/// A body, which must be a JSON object, with this model.
pub(super) fn with_model(body: &[u8], model: &str) -> Result<Bytes, ParseError> {
    let text = std::str::from_utf8(body).map_err(|error| ParseError::NotUtf8 { at: error.valid_up_to() })?;
    Ok(edit::with_model(text, model).map_err(ParseError::from)?.into())
}

/// Where a name stands in a body that it was borrowed from, quotes included; none if it was written with escapes.
pub(super) fn place_of(name: &str, body: &[u8]) -> Option<Range<usize>> {
    let start = (name.as_ptr() as usize).checked_sub(body.as_ptr() as usize)?.checked_sub(1)?;
    let at = start..start + name.len() + 2;
    let there = body.get(at.clone())?;
    (there.first() == Some(&b'"') && there.ends_with(b"\"")).then_some(at)
}

/// A body with this model where another one stands.
pub(super) fn with_name(body: &[u8], at: Range<usize>, model: &str) -> Bytes {
    let quoted = Value::from(model).to_string();
    [&body[..at.start], quoted.as_bytes(), &body[at.end..]].concat().into()
}

/// Why a fallback is tried after this error of the target, as `x-router-fallback` and metrics say it.
fn why(error: &ApiError) -> &'static str {
    match error {
        ApiError::UnknownModel(_) | ApiError::OtherProtocol { .. } => "not_served",
        ApiError::NoEndpoint { .. } | ApiError::Rejected { why: Rejection::NoEndpoint, .. } => "no_endpoint",
        ApiError::Rejected { .. } => "queue_full",
        _ => "failed",
    }
}

// === impl Chain ===

impl Chain {
    /// That of a copy of a request.
    pub(super) fn of_copy(model: String) -> Self {
        Self { copy_for: Some(model), ..Self::default() }
    }

    /// One without fallbacks.
    pub(super) fn of_targets() -> Self {
        Self { is_target_only: true, ..Self::default() }
    }

    /// Goes on to the next fallback after this error.
    ///
    /// # Errors
    /// The target's error, if there is no fallback left, if another model would fail in the same way, or if an engine may
    /// have received a request that must not be repeated.
    pub(super) fn after(&mut self, error: ApiError, repeats: Repeats) -> Result<(), ApiError> {
        let elsewhere = match &error {
            ApiError::UnknownModel(_) | ApiError::OtherProtocol { .. } | ApiError::NoEndpoint { .. } => true,
            ApiError::Rejected { why, .. } => {
                matches!(why, Rejection::NoEndpoint | Rejection::QueueFull | Rejection::QueueTimeout)
            }
            ApiError::Upstream { .. } => repeats == Repeats::Yes,
            _ => false,
        };
        let is_left = self.copy_for.is_none() && self.link < self.fallbacks;
        if self.first.is_none() && !(elsewhere && is_left) {
            return Err(error);
        }
        let first = self.first.get_or_insert(error);
        if !is_left {
            let first = std::mem::replace(first, ApiError::NoMemory);
            *self = Self { is_copied: self.is_copied, ..Self::default() };
            return Err(first);
        }
        self.link += 1;
        Ok(())
    }

    /// Whether a fallback is being tried.
    pub(super) fn is_at_fallback(&self) -> bool {
        self.link > 0
    }

    /// The model that gets a copy of the request.
    pub(super) fn take_mirror(&mut self) -> Option<String> {
        self.is_copied |= self.mirror.is_some();
        self.mirror.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_replaced_where_it_stands() {
        let body = br#"{"a":1,"model" : "gpt","b":2}"#;
        let name = str::from_utf8(&body[18..21]).expect("text");
        let at = place_of(name, body).expect("its place");
        assert_eq!(with_name(body, at, "m\"1"), &br#"{"a":1,"model" : "m\"1","b":2}"#[..]);
        assert_eq!(place_of("gpt", body), None, "it is elsewhere");
    }

    #[test]
    fn an_error_names_the_choices() {
        assert_eq!(
            choices(vec!["b", "a", "b"]),
            "`model` is missing and several models are served: name one of a, b in the body, or in the header x-kvlane-model"
        );
        let many: Vec<_> = (10..30).map(|n| format!("m{n}")).collect();
        let text = choices(many.iter().map(String::as_str).collect());
        assert!(text.contains("m17 and 12 more (GET /v1/models) in the body"), "{text}");
    }

    #[test]
    fn the_answer_after_the_last_fallback_is_the_targets_error() {
        let busy = || ApiError::Rejected { why: Rejection::QueueFull, retry_after_s: 7 };
        let mut chain = Chain { fallbacks: 2, ..Chain::default() };
        assert!(chain.after(busy(), Repeats::Yes).is_ok() && chain.is_at_fallback());
        assert!(chain.after(ApiError::UnknownModel("x".into()), Repeats::Yes).is_ok());
        let error = chain.after(ApiError::BadPath, Repeats::Yes).expect_err("no fallback is left");
        assert!(matches!(error, ApiError::Rejected { retry_after_s: 7, .. }), "{error:?}");
        assert!(!chain.is_at_fallback(), "it may begin again");
        assert!(
            chain.after(ApiError::BadPath, Repeats::Yes).is_err(),
            "a fault of the client is one everywhere"
        );
    }
}
