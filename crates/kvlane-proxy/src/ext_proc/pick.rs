//! Places a request: what serving a client directly does until it sends the request.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Response, header};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::poison_prompts::Standing;
use kvlane_fleet::pool::PoolEndpoint;
use kvlane_wire::disaggregation::{Connector, PREFILLER_HEADER};
use tokio::time::Instant;

use super::destination::Subset;
use super::picker::Picker;
use crate::account::{Account, REQUEST_ID};
use crate::admission::no_endpoint;
use crate::attempt_trace::Attempt;
use crate::auth::is_credential;
use crate::body::Body;
use crate::deadlines::Deadlines;
use crate::endpoint_wait::EndpointWait;
use crate::engine_request::{Field, RANK};
use crate::error::ApiError;
use crate::forward::{excluded_for, rejected};
use crate::guard::{Purpose, shows_workers};
use crate::lease::Lease;
use crate::model::Chain;
use crate::own_api::OwnRequest;
use crate::passed;
use crate::placement_headers::is_ours;
use crate::route::route;
use crate::routed::Routed;
use crate::sidecar;
use crate::traces::TRACEPARENT;

/// Headers that name another model than the body does: those of llm-d and of the Gateway API Inference Extension.
const MODEL_REWRITES: [&str; 2] = ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"];

/// A request that was placed.
pub(super) struct Picked {
    /// The request in flight.
    pub(super) lease: Lease,
    pub(super) routed: Routed,
    /// When it was placed.
    pub(super) at: Instant,
    /// The body to send on, if it differs from the client's.
    pub(super) body: Option<Bytes>,
    /// The addresses that the data plane may use, the chosen one first.
    pub(super) addresses: Vec<String>,
    /// Header fields to set, and to remove.
    pub(super) set: Vec<(HeaderName, Vec<u8>)>,
    pub(super) remove: Vec<HeaderName>,
}

/// What becomes of a request.
pub(super) enum Verdict {
    /// It is sent to an endpoint.
    Pick(Box<Picked>),
    /// The client gets this answer instead.
    Answer(Response<Body>),
}

// === impl Picker ===

impl Picker {
    /// Places an admitted request. While no endpoint can serve it, it waits if it may.
    pub(super) async fn pick(
        &self,
        parts: &Parts,
        purpose: Purpose,
        body: Bytes,
        account: &Arc<Account>,
        subset: Option<&Subset>,
    ) -> Result<Verdict, ApiError> {
        let proxy = &self.service.proxy;
        let deadline = Instant::now() + Deadlines::of(&proxy.settings(), parts.uri.path()).total;
        let mut wait = EndpointWait::new(proxy, parts, account, deadline);
        loop {
            match self.place(parts, purpose, body.clone(), account, subset, deadline).await {
                Err(error) => wait.after(error).await?,
                placed => return placed,
            }
        }
    }

    /// Places a request at one of the endpoints that there are.
    async fn place(
        &self,
        parts: &Parts,
        purpose: Purpose,
        body: Bytes,
        account: &Arc<Account>,
        subset: Option<&Subset>,
        deadline: Instant,
    ) -> Result<Verdict, ApiError> {
        let (proxy, upstreams) = (&self.service.proxy, &self.service.upstreams);
        let rewritten = rewritten(parts, &body)?;
        let body = rewritten.clone().unwrap_or(body);
        if matches!(purpose, Purpose::Own) {
            return self.own(parts, &body).await.map(Verdict::Answer);
        }
        let api = purpose.api();
        let chain = &mut Chain::of_targets();
        let (routed, salted) = match api {
            Some(api) => route(proxy, upstreams, (api, chain), parts, &body, account, deadline).await?,
            None => passed::route(proxy, (purpose.row(), chain), parts, &body, account, deadline)?,
        };
        // The data plane sends one request to one endpoint. A sidecar there can have the prompt computed by another.
        let has_sidecar = proxy.fleet.settings().disaggregation.connector == Some(Connector::LlmdSidecar);
        let routed = Routed { may_split: routed.may_split && has_sidecar, ..routed };
        let attributes = match self.config.observe_responses {
            true => routed.attributes,
            false => routed.attributes.unseen(),
        };
        let routed = Routed { attributes, ..routed };
        let pool = &routed.served.pool;
        account.set_pool(pool, routed.alias.as_ref());
        pool.metrics.shed.arrived(account.received);
        if let Standing::Barred(left) = proxy.standing(routed.prompt) {
            return Err(ApiError::KillsEngines { left });
        }
        let excluded = self.excluded(&routed, parts, subset)?;
        let lease = proxy.place(&routed, 0, &excluded).await;
        let mut lease = lease.map_err(|refused| rejected(proxy, &routed, refused))?;
        let Some(first) = self.names.address(&lease.endpoint).await else {
            return Err(no_endpoint(proxy, routed.served.name().into()));
        };
        let mut addresses = vec![first];
        for other in self.fallbacks(&routed, &lease, &excluded) {
            // Ranks share an address.
            if let Some(address) = self.names.address(&other).await.filter(|one| !addresses.contains(one)) {
                addresses.push(address);
            }
        }
        let mut fields: Vec<Field> =
            sidecar::encoders(proxy, &routed.served.pool, api, &body).into_iter().collect();
        // Without its address, the decode worker computes the prompt.
        if let Some(mut leg) = lease.take_leg()
            && let Some(place) = self.names.address(&leg.endpoint).await
        {
            fields.push((PREFILLER_HEADER, place));
            leg.pass_by();
            lease.hold(leg);
        }
        let (mut set, mut remove) = head_changes(parts, &lease, account);
        remove.retain(|name| !fields.iter().any(|(field, _)| name == *field));
        set.extend(fields.into_iter().map(|(name, value)| (HeaderName::from_static(name), value.into())));
        Ok(Verdict::Pick(Box::new(Picked {
            lease,
            body: salted.or(rewritten),
            addresses,
            set,
            remove,
            routed,
            at: Instant::now(),
        })))
    }

    /// Answers a request to the gateway itself, such as for the list of models.
    async fn own(&self, parts: &Parts, body: &Bytes) -> Result<Response<Body>, ApiError> {
        let port = self.service.port;
        let shows_workers = shows_workers(&self.service.proxy, port, parts);
        let answered = self.service.own.answer(OwnRequest { parts, body, port, shows_workers }).await?;
        answered.ok_or_else(|| ApiError::UnknownPath(parts.uri.path().chars().take(200).collect()))
    }

    /// The endpoints that must not serve a request.
    fn excluded(
        &self,
        routed: &Routed,
        parts: &Parts,
        subset: Option<&Subset>,
    ) -> Result<Arc<[EndpointId]>, ApiError> {
        let excluded = excluded_for(routed, parts);
        let Some(subset) = subset else { return Ok(excluded) };
        let endpoints = routed.served.pool.endpoints();
        let outside = |endpoint: &&Arc<PoolEndpoint>| {
            let address = &endpoint.worker.upstream.address;
            !subset.contains(&address.host, &address.place())
        };
        let outside: Vec<_> = endpoints.iter().filter(outside).map(|endpoint| endpoint.id).collect();
        if outside.len() == endpoints.len() {
            return Err(no_endpoint(&self.service.proxy, routed.served.name().into()));
        }
        Ok(excluded.iter().copied().chain(outside).collect())
    }

    /// The endpoints that the data plane may try if the chosen one fails.
    fn fallbacks(&self, routed: &Routed, lease: &Lease, excluded: &[EndpointId]) -> Vec<Arc<PoolEndpoint>> {
        let pool = &routed.served.pool;
        let most = self.config.fallbacks;
        if most == 0 {
            return Vec::new();
        }
        let others = pool.endpoints();
        let helpers = others.iter().filter(|other| !other.worker.spec.role.serves_requests());
        // Sorted, for it is searched for each endpoint while the scheduler is locked.
        let mut unwanted: Vec<_> =
            excluded.iter().copied().chain([lease.endpoint.id]).chain(helpers.map(|one| one.id)).collect();
        unwanted.sort_unstable();
        let others = pool
            .router
            .read(|scheduler| scheduler.least_busy(most, |id| unwanted.binary_search(&id).is_err()));
        others.into_iter().filter_map(|id| pool.endpoint(id)).collect()
    }
}

/// The body with the model that a header names, if one does.
fn rewritten(parts: &Parts, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
    let named = MODEL_REWRITES.iter().find_map(|name| parts.headers.get(*name)?.to_str().ok());
    let Some(model) = named.filter(|_| !body.is_empty()) else { return Ok(None) };
    let text =
        std::str::from_utf8(body).map_err(|_| ApiError::MissingField("the body is not UTF-8".into()))?;
    let rewritten =
        kvlane_wire::edit::with_model(text, model).map_err(kvlane_wire::openai::ParseError::from)?;
    Ok(Some(rewritten.into()))
}

/// The changes of a head that sending the request directly would make.
fn head_changes(
    parts: &Parts,
    lease: &Lease,
    account: &Account,
) -> (Vec<(HeaderName, Vec<u8>)>, Vec<HeaderName>) {
    let (mut set, mut remove) = (vec![(REQUEST_ID, account.request_id.as_bytes().to_vec())], Vec::new());
    if let Some(trace) = account.timeline.trace() {
        let context = trace.outgoing(lease.attempt().map(Attempt::id)).to_string();
        set.push((TRACEPARENT, context.into()));
    }
    let authorization = lease.worker.upstream.authorization();
    let strips = authorization.is_some() || !lease.proxy().auth().forwards_credentials();
    let unwanted = |name: &&HeaderName| is_ours(name) || (strips && is_credential(name));
    remove.extend(parts.headers.keys().filter(unwanted).cloned());
    if let Some(authorization) = &authorization {
        remove.retain(|name| name != header::AUTHORIZATION);
        set.push((header::AUTHORIZATION, authorization.as_bytes().to_vec()));
    }
    if let Some(rank) = lease.endpoint.number {
        set.push((HeaderName::from_static(RANK), rank.to_string().into()));
    }
    (set, remove)
}

/// A response's header fields and body, if it is whole.
pub(super) fn whole(response: Response<Body>) -> (u16, HeaderMap, Bytes) {
    let (parts, body) = response.into_parts();
    let body = match body {
        Body::Whole(body) => body.unwrap_or_default(),
        Body::Relay(_) | Body::Tunnel(_) => Bytes::new(),
    };
    (parts.status.as_u16(), parts.headers, body)
}
