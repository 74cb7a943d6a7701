//! One request of a data plane, from its head to the pick, or to the end of its answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Bytes, BytesMut};
use http::Response;
use http::request::Parts;
use kvlane_wire::ext_proc::{
    BodyMode, BodyModes, Mutation, Part, Phase, Received, continued, immediate, mutated, streamed_body,
};
use kvlane_wire::grpc::Status;
use kvlane_wire::server_timing::Stage;

use super::call::{Call, CallError};
use super::destination::{DESTINATION, DESTINATION_NAMESPACE, SUBSET, SUBSET_NAMESPACE, Subset};
use super::head;
use super::observe::Observer;
use super::pick::{Picked, Verdict, whole};
use super::picker::Picker;
use crate::account::Account;
use crate::attempt_trace::Attempt;
use crate::body::Body;
use crate::error::ApiError;
use crate::error_format::ErrorFormat;
use crate::memory::Held;
use crate::read::{Source, make_room, room};
use crate::service::Received as Admitted;

/// The body of a request, as it arrives in a call.
struct Pieces<'a> {
    call: &'a mut Call,
    /// Whether the data plane sends it.
    comes: bool,
    /// How it ended.
    end: &'a mut End,
}

/// How a request's body ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum End {
    /// There was none.
    #[default]
    None,
    /// With its last piece.
    Piece,
    /// With trailers.
    Trailers,
    /// Not at all: the call is over.
    Cut,
}

/// Serves one call.
pub(super) async fn exchange(picker: &Arc<Picker>, call: &mut Call) -> Result<Status, CallError> {
    let Some(first) = call.next().await? else { return Ok(Status::Ok) };
    let Some(received) = Received::read(&first) else { return Ok(Status::InvalidArgument) };
    let Part::RequestHead(request_head) = received.part else {
        // The data plane sends answers only; there is nothing to pick.
        return pass(call, first).await;
    };
    let modes = received.body_modes();
    let subset = received.metadata(SUBSET_NAMESPACE, SUBSET).map(|value| Subset::read(&value));
    let has_body = !request_head.is_all;
    let parts = match head::parts(&request_head) {
        Ok(parts) => parts,
        Err(error) => return refuse(call, error.into_response(ErrorFormat::OpenAi)),
    };
    // Envoy before 1.32 does not say how it sends bodies, and cannot send them in full duplex.
    let mode = modes.map_or(BodyMode::Buffered, |modes| modes.request);
    let duplex = mode == BodyMode::FullDuplexStreamed;
    if has_body && matches!(mode, BodyMode::None | BodyMode::Streamed) {
        picker.told_bodies.call_once(|| {
            tracing::warn!(
                "the data plane does not send request bodies as a whole: set request_body_mode to \
                 FULL_DUPLEX_STREAMED or BUFFERED"
            );
        });
        let why =
            "the gateway's external processing must send request bodies (FULL_DUPLEX_STREAMED or BUFFERED)";
        let error = ApiError::Admin { status: http::StatusCode::INTERNAL_SERVER_ERROR, message: why.into() };
        return refuse(call, error.into_response(ErrorFormat::of(parts.uri.path())));
    }
    if has_body && !duplex {
        let mut out = Vec::new();
        continued(&mut out, Phase::RequestHead);
        call.send(out)?;
    }
    let mut end = End::default();
    let body = Pieces { call, comes: has_body, end: &mut end };
    let admitted = picker.service.receive(parts, Ok(()), body).await;
    if end == End::Cut {
        return Ok(Status::Ok);
    }
    let Admitted { parts, error_format, account, read, held } = admitted;
    let (purpose, body) = match read {
        Ok((purpose, body)) => (purpose, body.first().clone()),
        Err(error) => return turn_away(picker, call, &parts, &account, error, error_format),
    };
    let picked = tokio::select! {
        picked = picker.pick(&parts, purpose, body.clone(), &account, subset.as_ref()) => picked,
        () = call.given_up(modes.is_some()) => return Ok(Status::Ok),
    };
    drop(held);
    let picked = match picked {
        Ok(Verdict::Pick(picked)) => picked,
        Ok(Verdict::Answer(response)) => {
            account.set_status(response.status());
            account.settle();
            return answer(call, &account, response);
        }
        Err(error) => return turn_away(picker, call, &parts, &account, error, error_format),
    };
    let mut out = Vec::with_capacity(body.len() + 1024);
    answer_pick(&mut out, &picked, &parts, &body, has_body, duplex, end);
    call.send(out)?;
    picked.lease.sent();
    if !picker.config.observe_responses {
        account.picked();
        picker.unobserved.count(picked.lease);
        return Ok(Status::Ok);
    }
    observe(picker, call, *picked, &account, modes.unwrap_or_default()).await
}

/// Writes the answers to a request's head and body.
fn answer_pick(
    out: &mut Vec<u8>,
    picked: &Picked,
    parts: &Parts,
    body: &Bytes,
    has_body: bool,
    duplex: bool,
    end: End,
) {
    let addresses = picked.addresses.join(",");
    let mut set: Vec<(&str, &[u8])> = vec![(DESTINATION, addresses.as_bytes())];
    set.extend(picked.set.iter().map(|(name, value)| (name.as_str(), &value[..])));
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let base_path = &picked.lease.worker.upstream.address.base_path;
    let path = (!base_path.is_empty()).then(|| format!("{base_path}{path}"));
    set.extend(path.as_ref().map(|path| (":path", path.as_bytes())));
    let buffered = picked.body.as_ref().filter(|_| has_body && !duplex);
    let length = buffered.map(|body| body.len().to_string());
    set.extend(length.as_ref().map(|length| ("content-length", length.as_bytes())));
    let mutation = Mutation {
        set,
        remove: picked.remove.iter().map(|name| name.as_str()).collect(),
        body: buffered.map(|body| &body[..]),
        clear_route_cache: true,
        metadata: Some((DESTINATION_NAMESPACE, DESTINATION, &addresses)),
    };
    let phase = if has_body && !duplex { Phase::RequestBody } else { Phase::RequestHead };
    mutated(out, phase, &mutation);
    if has_body && duplex {
        let body = picked.body.as_ref().unwrap_or(body);
        streamed_body(out, Phase::RequestBody, body, end == End::Piece);
    }
    if end == End::Trailers {
        continued(out, Phase::RequestTrailers);
    }
}

/// Watches the answer of a request.
async fn observe(
    picker: &Arc<Picker>,
    call: &mut Call,
    picked: Picked,
    account: &Arc<Account>,
    modes: BodyModes,
) -> Result<Status, CallError> {
    let Picked { lease, routed, addresses, at, .. } = picked;
    let (mut waiting, mut observer) = (Some(lease), None::<Observer>);
    while let Some(message) = call.next().await? {
        let Some(received) = Received::read(&message) else { return Ok(Status::InvalidArgument) };
        let mut out = Vec::new();
        match received.part {
            Part::ResponseHead(head) => {
                picker.sees_answers.store(true, Ordering::Relaxed);
                let Some(lease) = waiting.take() else { return Ok(Status::InvalidArgument) };
                let proxy = &picker.service.proxy;
                account.timeline.answered(at, Stage::Engine, lease.attempt().map(Attempt::id));
                let mut begun =
                    Observer::begin(proxy, &routed, lease, account, &addresses[0], &received, &head).await;
                let marks = begun.marks();
                let set = marks.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
                mutated(&mut out, Phase::ResponseHead, &Mutation { set, ..Mutation::default() });
                if head.is_all || modes.response == BodyMode::None {
                    call.send(out)?;
                    // What follows is not sent here, so its end is not seen.
                    if let Some(lease) = begun.give_up() {
                        picker.unobserved.count(lease);
                    }
                    return Ok(Status::Ok);
                }
                observer = Some(begun);
            }
            Part::ResponseBody(piece) => {
                if let Some(observer) = &mut observer {
                    observer.piece(&message.slice_ref(piece.bytes), piece.is_last);
                }
                match modes.response {
                    BodyMode::FullDuplexStreamed => {
                        streamed_body(&mut out, Phase::ResponseBody, piece.bytes, piece.is_last);
                    }
                    _ => continued(&mut out, Phase::ResponseBody),
                }
            }
            Part::ResponseTrailers => {
                if let Some(observer) = &mut observer {
                    observer.end();
                }
                continued(&mut out, Phase::ResponseTrailers);
            }
            Part::RequestHead(_) | Part::RequestBody(_) | Part::RequestTrailers => {
                return Ok(Status::InvalidArgument);
            }
        }
        call.send(out)?;
    }
    if let Some(lease) = waiting.filter(|_| !picker.sees_answers.load(Ordering::Relaxed)) {
        picker.told_answers.call_once(|| {
            tracing::warn!(
                "epp.observe_responses is on, and the data plane does not send answers: set response_header_mode to \
                 SEND and response_body_mode to FULL_DUPLEX_STREAMED; their ends are estimated until then"
            );
        });
        account.picked();
        picker.unobserved.count(lease);
    }
    // Otherwise, without any part of an answer, the client has left.
    Ok(Status::Ok)
}

/// Lets everything through.
async fn pass(call: &mut Call, first: Bytes) -> Result<Status, CallError> {
    let mut next = Some(first);
    while let Some(message) = next {
        let mut out = Vec::new();
        match Received::read(&message).map(|received| received.part) {
            Some(Part::ResponseHead(_)) => continued(&mut out, Phase::ResponseHead),
            Some(Part::ResponseBody(_)) => continued(&mut out, Phase::ResponseBody),
            Some(Part::ResponseTrailers) => continued(&mut out, Phase::ResponseTrailers),
            _ => return Ok(Status::InvalidArgument),
        }
        call.send(out)?;
        next = call.next().await?;
    }
    Ok(Status::Ok)
}

/// The client gets an error.
fn turn_away(
    picker: &Picker,
    call: &mut Call,
    parts: &Parts,
    account: &Arc<Account>,
    error: ApiError,
    error_format: ErrorFormat,
) -> Result<Status, CallError> {
    let response = picker.service.explain(parts, account, error).into_response(error_format);
    account.set_status(response.status());
    account.settle();
    answer(call, account, response)
}

fn answer(call: &mut Call, account: &Account, mut response: Response<Body>) -> Result<Status, CallError> {
    account.mark(response.headers_mut());
    refuse(call, response)
}

/// The client gets this answer.
fn refuse(call: &mut Call, response: Response<Body>) -> Result<Status, CallError> {
    let (status, headers, body) = whole(response);
    let headers = headers.iter().filter(|(name, _)| *name != http::header::CONNECTION);
    let mut out = Vec::new();
    let code = "kvlane";
    immediate(&mut out, status, headers.map(|(name, value)| (name.as_str(), value.as_bytes())), &body, code);
    call.send(out)?;
    Ok(Status::Ok)
}

impl Source for Pieces<'_> {
    async fn whole(self, _: &mut Parts, limit: usize, held: &mut Held) -> Result<Bytes, ApiError> {
        let Self { call, comes, end } = self;
        let mut whole = BytesMut::new();
        let mut only = Bytes::new();
        if !comes {
            return Ok(only);
        }
        loop {
            let message = match call.next().await {
                Ok(Some(message)) => message,
                Ok(None) | Err(_) => {
                    *end = End::Cut;
                    return Err(ApiError::BodyBroken("the data plane ended the call".into()));
                }
            };
            let (piece, is_last) = match Received::read(&message).map(|received| received.part) {
                Some(Part::RequestBody(piece)) => (piece.bytes, piece.is_last),
                Some(Part::RequestTrailers) => {
                    *end = End::Trailers;
                    break;
                }
                _ => return Err(ApiError::BodyBroken("the data plane sent something else".into())),
            };
            if whole.len() + only.len() + piece.len() > limit {
                return Err(ApiError::TooLarge { limit });
            }
            if whole.is_empty() && only.is_empty() {
                room(held, piece.len())?;
                only = message.slice_ref(piece);
            } else if !piece.is_empty() {
                if whole.is_empty() {
                    make_room(&mut whole, only.len() + piece.len(), limit, held)?;
                    whole.extend_from_slice(&std::mem::take(&mut only));
                } else {
                    make_room(&mut whole, piece.len(), limit, held)?;
                }
                whole.extend_from_slice(piece);
            }
            if is_last {
                *end = End::Piece;
                break;
            }
        }
        Ok(if whole.is_empty() { only } else { whole.freeze() })
    }
}
