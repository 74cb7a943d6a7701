//! WebSockets (RFC 6455): the handshake is relayed like any other request, and after it bytes are copied both ways.
//!
//! Messages are not read. A socket counts as one request in flight at its endpoint for as long as it is open. Nothing is
//! expected of the engine meanwhile: a socket on which nothing is said is not a stalled engine.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Response, Version, header};
use kvlane_fleet::metrics::FailureKind;
use kvlane_http::connections::{Answer, Switched};
use kvlane_wire::api::{EnginePath, Streams};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep};

use crate::account::Account;
use crate::body::{Body, Connection, Tunnel};
use crate::cors;
use crate::engine_request::Field;
use crate::error::ApiError;
use crate::guard;
use crate::lease::Lease;
use crate::paths::engine_path;
use crate::proxy::Proxy;

/// Bytes in transit in one direction.
const COPY_BYTES: usize = 16 << 10;

/// A WebSocket to an engine.
struct Socket {
    switched: Switched,
    lease: Lease,
    account: Arc<Account>,
    /// Longest silence of both sides.
    idle: Duration,
}

/// Whether a request asks for a WebSocket at a path that has one. HTTP/2 has no such handshake: its extended CONNECT (RFC
/// 8441) is not offered.
pub(super) fn asks_to_switch(parts: &Parts) -> bool {
    let has = |name: HeaderName, token: &str| {
        let lists = parts.headers.get_all(name).iter().filter_map(|list| list.to_str().ok());
        lists.flat_map(|list| list.split(',')).any(|item| item.trim().eq_ignore_ascii_case(token))
    };
    let is_socket = |(row, _): (&EnginePath, bool)| row.streams == Streams::Socket;
    parts.headers.contains_key(header::UPGRADE)
        && parts.version == Version::HTTP_11
        && parts.method == Method::GET
        && has(header::UPGRADE, "websocket")
        && has(header::CONNECTION, "upgrade")
        && engine_path(parts.uri.path()).is_some_and(is_socket)
}

/// The header fields of a handshake that belong to one connection, if the request is one.
pub(super) fn fields(parts: &Parts) -> Option<Vec<Field>> {
    asks_to_switch(parts).then(|| vec![("connection", "Upgrade".into()), ("upgrade", "websocket".into())])
}

/// Rejects handshakes of web pages of other origins: browsers send them without asking first, with the credentials that they
/// have, and let the page read what comes.
///
/// # Errors
/// The origin is not allowed.
pub(super) fn check(proxy: &Proxy, parts: &Parts) -> Result<(), ApiError> {
    if !asks_to_switch(parts) {
        return Ok(());
    }
    let Some(origin) = parts.headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let is_own = origin
        .split_once("://")
        .is_some_and(|(_, host)| guard::host(&parts.uri, &parts.headers) == Some(host));
    if is_own || cors::Asked::of(&proxy.settings(), parts).is_some() {
        return Ok(());
    }
    Err(ApiError::ForeignOrigin(origin.chars().take(200).collect()))
}

/// The response to a client whose engine has switched protocols.
pub(super) fn tunnel(
    answer: Answer,
    lease: Option<Lease>,
    account: &Arc<Account>,
    idle: Duration,
) -> Response<Body> {
    let Answer { status, headers, body, .. } = answer;
    let mut response = Response::new(Body::Whole(None));
    if let (Some(mut lease), Some(switched)) = (lease, body.switch()) {
        lease.begin();
        lease.expects_nothing();
        let account = Arc::clone(account);
        *response.body_mut() = Body::Tunnel(Box::new(Socket { switched, lease, account, idle }));
    }
    *response.status_mut() = status;
    *response.headers_mut() = switching(headers);
    response
}

fn switching(mut headers: HeaderMap) -> HeaderMap {
    headers.remove(header::CONTENT_LENGTH);
    headers
}

/// One direction: bytes that were read and are to be written.
struct Direction {
    bytes: Vec<u8>,
    written: usize,
}

/// Where a direction broke.
enum Broke {
    Reading(io::Error),
    Writing(io::Error),
}

/// How a WebSocket ended.
enum End {
    /// One side closed it.
    Closed,
    /// It was silent.
    Idle,
    /// The client's connection broke.
    Client,
    /// The engine's connection broke.
    Engine(io::Error),
}

// === impl Socket ===

impl Socket {
    /// Copies bytes both ways until one side closes its connection, or both are silent for too long. `ahead` is what the
    /// client has sent already.
    async fn copy(self, client: &mut dyn Connection, ahead: Bytes) {
        let Self { switched: Switched { mut stream, ahead: first }, mut lease, account, idle } = self;
        let (mut up, mut down) = (Direction::new(&ahead), Direction::new(&first));
        drop((ahead, first));
        let (mut alarm, mut moved) = (Box::pin(sleep(idle)), Instant::now());
        let end = poll_fn(|cx| {
            if let Poll::Ready(end) = up.poll(cx, &mut *client, &mut stream, &mut moved) {
                return Poll::Ready(match end {
                    Ok(()) => End::Closed,
                    Err(Broke::Reading(_)) => End::Client,
                    Err(Broke::Writing(error)) => End::Engine(error),
                });
            }
            if let Poll::Ready(end) = down.poll(cx, &mut stream, &mut *client, &mut moved) {
                return Poll::Ready(match end {
                    Ok(()) => End::Closed,
                    Err(Broke::Reading(error)) => End::Engine(error),
                    Err(Broke::Writing(_)) => End::Client,
                });
            }
            // Re-armed only when it fires.
            while alarm.as_mut().poll(cx).is_ready() {
                let until = moved + idle;
                if Instant::now() >= until {
                    return Poll::Ready(End::Idle);
                }
                alarm.as_mut().reset(until);
            }
            Poll::Pending
        });
        match end.await {
            End::Closed => lease.succeeded(),
            End::Idle | End::Client => {}
            End::Engine(error) => {
                let (request_id, worker) = (account.timeline.request_id(), &*lease.worker.url);
                tracing::debug!(request_id, worker, %error, "WebSocket broke");
                lease.failed(FailureKind::mid_stream);
            }
        }
    }
}

impl Tunnel for Socket {
    fn run<'a>(
        self: Box<Self>,
        client: &'a mut dyn Connection,
        ahead: Bytes,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(self.copy(client, ahead))
    }
}

// === impl Direction ===

impl Direction {
    fn new(first: &[u8]) -> Self {
        Self { bytes: first.to_vec(), written: 0 }
    }

    /// Copies what is there; ready when the reader has ended and all is written.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        reader: &mut (impl AsyncRead + Unpin + ?Sized),
        writer: &mut (impl AsyncWrite + Unpin + ?Sized),
        moved: &mut Instant,
    ) -> Poll<Result<(), Broke>> {
        loop {
            while self.written < self.bytes.len() {
                let written = ready!(Pin::new(&mut *writer).poll_write(cx, &self.bytes[self.written..]));
                match written.map_err(Broke::Writing)? {
                    0 => return Poll::Ready(Err(Broke::Writing(io::ErrorKind::WriteZero.into()))),
                    written => self.written += written,
                }
                *moved = Instant::now();
            }
            // TLS may still buffer what was written.
            ready!(Pin::new(&mut *writer).poll_flush(cx)).map_err(Broke::Writing)?;
            self.bytes.resize(COPY_BYTES, 0);
            let mut room = ReadBuf::new(&mut self.bytes);
            let read = Pin::new(&mut *reader).poll_read(cx, &mut room);
            let filled = room.filled().len();
            // Nothing is to be written if nothing was read.
            self.bytes.truncate(filled);
            self.written = 0;
            ready!(read).map_err(Broke::Reading)?;
            if filled == 0 {
                return Poll::Ready(Ok(()));
            }
            *moved = Instant::now();
        }
    }
}
