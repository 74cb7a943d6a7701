//! From a request to an answer that has begun: routes, places, sends, and retries elsewhere.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode};
use http_body_util::BodyExt;
use kvlane_core::decision::{Refused, Rejection};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::Slo;
use kvlane_http::connections::{Answer, Connections};
use kvlane_wire::api::{Api, EnginePath, Repeats};
use kvlane_wire::disaggregation::Connector;
use kvlane_wire::engine::calls::ABORT_PATH;
use kvlane_wire::server_timing::Stage;
use tokio::time::Instant;

use crate::account::Account;
use crate::admission::no_endpoint;
use crate::alias::Alias;
use crate::attempt::{Attempts, Outcome, of_status};
use crate::attempt_trace::Attempt;
use crate::body::Body;
use crate::deadlines::Deadlines;
use crate::endpoint_wait::EndpointWait;
use crate::engine_request::RANK;
use crate::error::ApiError;
use crate::error_format::ErrorFormat;
use crate::hedge::{self, Sending};
use crate::lease::Lease;
use crate::mirror::Copy;
use crate::model::Chain;
use crate::objects::{Named, names_objects};
use crate::passed;
use crate::placement_headers::mark;
use crate::proxy::Proxy;
use crate::relay::{Limits, Relay};
use crate::renamed::{Renamed, names_model};
use crate::resume::{Asked, Continuation, ContinuedRelay};
use crate::route::route;
use crate::routed::Routed;
use crate::streamed::Payload;
use crate::{abort, grpc, lists, realtime, seek, sidecar, split};

/// Answers a client request from the fleet. While no endpoint can serve it, it waits if it may. `row` is none for a path
/// of `server.extra_paths`.
pub(super) async fn forward(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    row: Option<&'static EnginePath>,
    parts: &Parts,
    body: Payload,
    account: &Arc<Account>,
) -> Result<Response<Body>, ApiError> {
    let deadlines = Deadlines::of(&proxy.settings(), parts.uri.path());
    let deadline = Instant::now() + deadlines.total;
    if parts.uri.path() == ABORT_PATH {
        return Box::pin(abort::abort(proxy, upstreams, body.first(), account)).await;
    }
    if let Some(list) = Box::pin(lists::merged(proxy, upstreams, row, parts, account)).await? {
        return Ok(list);
    }
    Box::pin(seek::seek(proxy, upstreams, row, parts, body.first())).await?;
    let mut wait = EndpointWait::new(proxy, parts, account, deadline);
    let repeats = row.map_or(Repeats::Unsent, |row| row.repeats);
    let mut chain = Chain::default();
    loop {
        match serve(proxy, upstreams, (row, &mut chain), parts, &body, account, (deadlines, deadline)).await {
            Err(error) if body.is_spent() => return Err(error),
            Err(error) => {
                if let Err(error) = chain.after(error, repeats) {
                    wait.after(error).await?;
                }
            }
            answered => return answered,
        }
    }
}

/// A copy of a request for `model`.
fn copy(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    row: Option<&'static EnginePath>,
    parts: &Parts,
    body: &Bytes,
    model: String,
) -> Copy {
    let (proxy, upstreams, parts, body) =
        (Arc::clone(proxy), Arc::clone(upstreams), parts.clone(), body.clone());
    Box::pin(async move {
        let (path, api) = (parts.uri.path(), row.and_then(EnginePath::api));
        let account = Account::open(&proxy, api, ErrorFormat::of(path), &parts, false);
        let deadlines = Deadlines::of(&proxy.settings(), path);
        let times = (deadlines, Instant::now() + deadlines.total);
        let mut chain = Chain::of_copy(model);
        if let Ok(answer) =
            serve(&proxy, &upstreams, (row, &mut chain), &parts, &body.into(), &account, times).await
        {
            let mut answer = answer.into_body();
            while let Some(Ok(_)) = answer.frame().await {}
            account.settle();
        }
    })
}

/// Answers a client request from the endpoints that there are.
async fn serve(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    (row, chain): (Option<&'static EnginePath>, &mut Chain),
    parts: &Parts,
    payload: &Payload,
    account: &Arc<Account>,
    (deadlines, deadline): (Deadlines, Instant),
) -> Result<Response<Body>, ApiError> {
    let (body, upload) = (payload.first(), payload.upload());
    realtime::check(proxy, parts)?;
    let api = row.and_then(EnginePath::api);
    let (routed, salted) = match api {
        Some(api) => route(proxy, upstreams, (api, chain), parts, body, account, deadline).await?,
        None => passed::route(proxy, (row, chain), parts, body, account, deadline)?,
    };
    let switch = realtime::fields(parts);
    // What can be sent only once, and sockets, have no copies.
    if let Some(model) = chain.take_mirror().filter(|_| upload.is_none() && switch.is_none()) {
        let metrics = &proxy.fleet.metrics;
        proxy.copies.send(metrics, &model, || copy(proxy, upstreams, row, parts, body, model.clone()));
    }
    let body = salted.unwrap_or_else(|| body.clone());
    let own_query = routed.alias.as_deref().and_then(|alias| passed::renamed_query(parts, alias));
    let sent = own_query.as_ref().unwrap_or(parts);
    if let Some(upload) = upload {
        upload.lock().await.begin_with(body.clone());
    }
    account.set_pool(&routed.served.pool, routed.alias.as_ref());
    routed.served.pool.metrics.shed.arrived(account.received);
    let limits = Limits { idle: deadlines.idle, deadline };
    let mut attempts = Attempts::new(proxy, &routed, excluded_for(&routed, parts), deadlines);
    attempts.take_turn().await?;
    let encoders = sidecar::encoders(proxy, &routed.served.pool, api, &body);
    // Tried again, it encodes by itself.
    let mut encoders = encoders.as_slice();
    let turned_down = |mut answer: Answer, lease: &Lease| {
        mark(&mut answer.headers, lease, &routed.attributes);
        relay(answer, None, account, limits, None)
    };
    loop {
        let mut lease = match attempts.place().await {
            Ok(lease) => lease,
            // The last attempt's error says more.
            Err(refused) => {
                let said = attempts.said();
                let said = said.unwrap_or_else(|| Err(rejected(proxy, &routed, refused)));
                return Box::pin(or_lost(&routed, upstreams, said)).await;
            }
        };
        let sending = Sending {
            upstreams,
            parts: sent,
            body: &body,
            account,
            fields: switch.as_deref().unwrap_or(encoders),
            upload,
        };
        let (lease, outcome) = match split_of(&mut lease, api) {
            Some((leg, how)) => Box::pin(split::answer(attempts.patience(), lease, leg, &sending, how)).await,
            None if !encoders.is_empty() => {
                Box::pin(sidecar::answer(attempts.patience(), lease, None, &sending)).await
            }
            None => hedge::answer(&mut attempts, lease, &sending, turned_down).await,
        };
        match outcome {
            Outcome::Answered(mut answer) => {
                let status = grpc::status_of(answer.status, &answer.headers);
                if status.is_success() {
                    attempts.succeeded();
                }
                if status.is_server_error() {
                    account.failed_at(&lease.endpoint.name, of_status(status));
                }
                let waited_for = if lease.awaits_blocks() { Stage::Transfer } else { Stage::Engine };
                account.timeline.answered(answer.sent, waited_for, lease.attempt().map(Attempt::id));
                mark(&mut answer.headers, &lease, &routed.attributes);
                if let Some(alias) = &routed.alias {
                    alias.mark(&mut answer.headers);
                    proxy.fleet.metrics.note_target(&alias.asked, &alias.target, alias.why());
                }
                let alias = routed.alias.clone().filter(|alias| alias.renames());
                let transcript = Continuation::transcript(proxy, account, api, &body, &answer);
                let Some(transcript) = transcript else {
                    routed.kept.as_ref().map_or(Ok(()), |kept| kept.lost_if(answer.status))?;
                    let names = answer.status.is_success() && names_objects(row, &parts.method);
                    let named = names.then(|| Box::new(Named::new(&lease.worker, routed.attributes)));
                    let answer = relay(answer, Some(lease), account, limits, named);
                    return Ok(renamed(answer, alias.as_deref()));
                };
                drop(attempts);
                let (proxy, upstreams) = (Arc::clone(proxy), Arc::clone(upstreams));
                let (parts, account) = (parts.clone(), Arc::clone(account));
                let excluded = excluded_for(&routed, &parts);
                let routed = Routed { may_split: false, ..routed };
                let asked = Asked { proxy, upstreams, parts, account, routed, excluded };
                let answer = continued(answer, lease, limits, Continuation::new(transcript, asked));
                return Ok(renamed(answer, alias.as_deref()));
            }
            // Without a lease: the engine has finished with this request.
            outcome => {
                account.timeline.failed();
                account.failed_at(&lease.endpoint.name, outcome.describe());
                attempts.failed(lease, outcome, turned_down);
                encoders = &[];
            }
        }
        if payload.is_spent() || !Box::pin(attempts.go_on(upstreams)).await {
            let said =
                attempts.said().unwrap_or_else(|| Err(no_endpoint(proxy, routed.served.name().into())));
            return Box::pin(or_lost(&routed, upstreams, said)).await;
        }
    }
}

/// The answer, or that the object which the request needs is lost: its engine ended while the request was on its way.
async fn or_lost(
    routed: &Routed,
    upstreams: &Connections,
    answered: Result<Response<Body>, ApiError>,
) -> Result<Response<Body>, ApiError> {
    match (answered, &routed.kept) {
        (Err(error), Some(kept)) => Err(kept.or_lost(upstreams, error).await),
        (answered, _) => answered,
    }
}

/// Of a split request its prefill leg, its API and how its blocks travel.
fn split_of(lease: &mut Lease, api: Option<Api>) -> Option<(Lease, (Api, Connector))> {
    let leg = lease.take_leg()?;
    let connector = lease.proxy().fleet.settings().disaggregation.connector?;
    Some((leg, (api?, connector)))
}

/// Endpoints that must not serve the request: those without its model, those of other workers than that of the object it
/// names, and those of other ranks if the client names one.
pub(super) fn excluded_for(routed: &Routed, parts: &Parts) -> Arc<[EndpointId]> {
    let (pool, lacking) = (&routed.served.pool, &routed.served.lacking);
    if let Some(others) =
        routed.kept.as_ref().map(|kept| pool.endpoints_but(kept.worker())).filter(|others| !others.is_empty())
    {
        return lacking.iter().copied().chain(others).collect();
    }
    let asked = parts.headers.get(RANK).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    match asked.map(|rank| pool.of_other_ranks(rank)) {
        Some(others) if !others.is_empty() => lacking.iter().copied().chain(others).collect(),
        _ => Arc::clone(lacking),
    }
}

pub(super) fn rejected(proxy: &Proxy, routed: &Routed, refused: Refused) -> ApiError {
    let (served, targets) = (&routed.served, routed.attributes.slo());
    if targets != Slo::default() {
        served.pool.metrics.slo.refused();
    }
    match refused.why {
        Rejection::NoEndpoint => no_endpoint(proxy, served.name().into()),
        why => {
            served.pool.metrics.shed.refused(proxy.fleet.clock.now(), why);
            let retry_after_s = refused.retry_after.0.div_ceil(1_000_000_000).max(1);
            match why {
                Rejection::SloMissed => ApiError::Late { targets, retry_after_s },
                why => ApiError::Rejected { why, retry_after_s },
            }
        }
    }
}

/// An engine's response as the client's.
fn relay(
    answer: Answer,
    lease: Option<Lease>,
    account: &Arc<Account>,
    limits: Limits,
    named: Option<Box<Named>>,
) -> Response<Body> {
    if answer.status == StatusCode::SWITCHING_PROTOCOLS {
        return realtime::tunnel(answer, lease, account, limits.idle);
    }
    let Answer { status, headers, body, .. } = answer;
    let said = grpc::status_of(status, &headers);
    let mut relay = Relay::new(said, &headers, body, lease, Arc::clone(account), limits);
    relay.named = named;
    response(status, headers, relay)
}

/// Like [`relay`], for a response that continues on another endpoint if its engine dies.
fn continued(
    answer: Answer,
    lease: Lease,
    limits: Limits,
    continuation: Box<Continuation>,
) -> Response<Body> {
    let Answer { status, headers, body, .. } = answer;
    let account = Arc::clone(continuation.account());
    let relay = Relay::new(status, &headers, body, Some(lease), account, limits);
    response(status, headers, ContinuedRelay::new(relay, continuation))
}

/// An answer with the name of the model that the client used.
fn renamed(answer: Response<Body>, alias: Option<&Alias>) -> Response<Body> {
    let Some(alias) = alias.filter(|_| names_model(answer.headers())) else { return answer };
    answer.map(|body| match body {
        Body::Relay(relay) => Body::Relay(Box::pin(Renamed::new(relay, alias))),
        whole => whole,
    })
}

fn response(
    status: StatusCode,
    headers: HeaderMap,
    relay: impl http_body::Body<Data = Bytes, Error = std::io::Error> + Send + 'static,
) -> Response<Body> {
    let mut response = Response::new(Body::Relay(Box::pin(relay)));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

#[cfg(test)]
mod tests {
    use kvlane_core::time::Nanos;
    use kvlane_fleet::worker::config::WorkerSpec;
    use kvlane_fleet::worker::{Origin, Worker, WorkerId};

    use super::*;
    use crate::objects::Kept;
    use crate::testing::{World, parts};

    #[test]
    fn a_request_goes_only_to_the_worker_of_the_object_that_it_names() {
        let world = World::new(3);
        let all = world.pool.endpoints();
        let mut routed = world.routed();
        assert!(excluded_for(&routed, &parts(&[])).is_empty());
        routed.kept = Some(Box::new(Kept::at(&all[1].worker)));
        assert_eq!(*excluded_for(&routed, &parts(&[])), [all[0].id, all[2].id]);
        let spec = WorkerSpec::new("http://10.0.0.9:8000");
        let gone = Worker::new(WorkerId(9), &spec, Origin::Config, None).expect("a worker");
        routed.kept = Some(Box::new(Kept::at(&Arc::new(gone))));
        assert_eq!(
            excluded_for(&routed, &parts(&[])).len(),
            3,
            "that worker has left: no other has the object"
        );
    }

    #[test]
    fn a_rank_that_no_worker_has_excludes_none() {
        let world = World::new(2);
        for rank in ["1", "none", ""] {
            let parts = parts(&[(RANK, rank)]);
            assert!(excluded_for(&world.routed(), &parts).is_empty(), "{rank}");
        }
    }

    #[test]
    fn a_rejection_says_when_to_try_again_in_whole_seconds() {
        let world = World::new(1);
        for (nanos, seconds) in [(0, 1), (1_000_000_000, 1), (1_000_000_001, 2)] {
            let refused = Refused { why: Rejection::QueueFull, retry_after: Nanos(nanos) };
            let error = rejected(&world.proxy, &world.routed(), refused);
            assert!(
                matches!(error, ApiError::Rejected { why: Rejection::QueueFull, retry_after_s } if retry_after_s == seconds),
                "{nanos} ns"
            );
        }
    }
}
