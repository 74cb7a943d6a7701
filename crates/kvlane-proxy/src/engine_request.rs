//! The head of a request to an engine.

use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, header};
use kvlane_http::connections::is_hop_by_hop;

use crate::account::{Account, REQUEST_ID};
use crate::attempt_trace::Attempt;
use crate::auth::is_credential;
use crate::lease::Lease;
use crate::placement_headers::is_ours;
use crate::traces::{TRACEPARENT, TRACESTATE};

/// Names the data-parallel rank that is to serve a request, for engines with several.
pub(super) const RANK: &str = "x-data-parallel-rank";

/// The compressions that a gRPC client accepts.
const GRPC_ACCEPT_ENCODING: &str = "grpc-accept-encoding";

/// A header field of the gateway's own in a request to an engine.
pub(super) type Field = (&'static str, String);

/// How the end of a request's body is marked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Framing {
    /// By its length in bytes.
    Length(u64),
    /// By chunked transfer coding.
    Chunked,
}

/// The head of the request to the worker, with these fields instead of others of their names.
pub(super) fn request_head(
    parts: &Parts,
    lease: &Lease,
    framing: Framing,
    account: &Account,
    fields: &[Field],
) -> Vec<u8> {
    let address = &lease.worker.upstream.address;
    let mut head = Vec::with_capacity(1024);
    let mut put = |pieces: &[&[u8]]| pieces.iter().for_each(|piece| head.extend_from_slice(piece));
    put(&[
        parts.method.as_str().as_bytes(),
        b" ",
        address.base_path.as_bytes(),
        path_of(parts).as_bytes(),
        b" HTTP/1.1\r\nhost: ",
    ]);
    put(&[address.authority.as_bytes(), b"\r\n"]);
    each_field(parts, lease, account, fields, |name, value| {
        put(&[name.as_bytes(), b": ", value, b"\r\n"]);
    });
    match framing {
        Framing::Chunked => put(&[b"transfer-encoding: chunked\r\n"]),
        Framing::Length(0) if parts.method != http::Method::POST && parts.method != http::Method::PUT => {}
        Framing::Length(length) => put(&[b"content-length: ", length.to_string().as_bytes(), b"\r\n"]),
    }
    put(&[b"\r\n"]);
    head
}

/// The head of a gRPC call to the worker.
pub(super) fn call_head(parts: &Parts, lease: &Lease, account: &Account) -> http::Result<Request<()>> {
    let address = &lease.worker.upstream.address;
    let mut head = Request::post(format!("http://{}{}", address.authority, path_of(parts)))
        .header(header::TE, "trailers");
    if let Some(fields) = head.headers_mut() {
        each_field(parts, lease, account, &[], |name, value| {
            if let (Ok(name), Ok(value)) =
                (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value))
            {
                fields.append(name, value);
            }
        });
    }
    head.body(())
}

fn path_of(parts: &Parts) -> &str {
    parts.uri.path_and_query().map_or("/", |path| path.as_str())
}

/// Calls `put` with each header field of the request to the worker, except those that say where it goes and how its body
/// ends.
fn each_field(
    parts: &Parts,
    lease: &Lease,
    account: &Account,
    fields: &[Field],
    mut put: impl FnMut(&str, &[u8]),
) {
    let is_set = |name: &str| fields.iter().any(|(field, _)| *field == name);
    if !is_set(REQUEST_ID.as_str()) {
        put(REQUEST_ID.as_str(), account.request_id.as_bytes());
    }
    for (name, value) in fields {
        put(name, value.as_bytes());
    }
    let trace = account.timeline.trace();
    if let Some(trace) = trace {
        let context = trace.outgoing(lease.attempt().map(Attempt::id)).to_string();
        put(TRACEPARENT.as_str(), context.as_bytes());
    }
    let authorization = lease.worker.upstream.authorization();
    let strips = authorization.is_some() || !lease.proxy().auth().forwards_credentials();
    if let Some(authorization) = &authorization {
        put(header::AUTHORIZATION.as_str(), authorization.as_bytes());
    }
    for (name, value) in &parts.headers {
        let ours = name == header::HOST
            || name == header::CONTENT_LENGTH
            || name == header::EXPECT
            || name == REQUEST_ID
            || (strips && is_credential(name))
            || is_set(name.as_str())
            || (name == RANK && lease.endpoint.number.is_some())
            || (name == TRACEPARENT && trace.is_some())
            || (name == TRACESTATE && trace.is_some_and(|trace| !trace.has_caller()));
        // Compressed responses could not be inspected.
        if !ours
            && name != header::ACCEPT_ENCODING
            && name != GRPC_ACCEPT_ENCODING
            && !is_hop_by_hop(name)
            && !is_ours(name)
            && !named_in_connection(parts, name)
        {
            put(name.as_str(), value.as_bytes());
        }
    }
    if let Some(rank) = lease.endpoint.number.filter(|_| !is_set(RANK)) {
        put(RANK, rank.to_string().as_bytes());
    }
}

/// Whether the client's `Connection` header lists this field as one for this hop only.
fn named_in_connection(parts: &Parts, name: &HeaderName) -> bool {
    parts.headers.get_all(header::CONNECTION).iter().any(|list| {
        list.to_str()
            .is_ok_and(|list| list.split(',').any(|item| item.trim().eq_ignore_ascii_case(name.as_str())))
    })
}
