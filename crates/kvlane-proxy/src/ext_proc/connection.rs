//! gRPC connections of data planes: HTTP/2, one stream for each call.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, header};
use kvlane_wire::ext_proc::PROCESS_PATH;
use kvlane_wire::grpc::{CONTENT_TYPE, HEALTH_CHECK_PATH, Status};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::call::{Call, CallError};
use super::exchange::exchange;
use super::health::{self, WATCH_PATH};
use super::picker::Picker;

/// Most concurrent calls on one connection. Envoy opens one for each request in flight.
const CALLS_MAX: u32 = 100_000;
/// Bytes that a peer may send in one call, and on one connection, before they are read.
const CALL_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// Largest head of a call.
const HEAD_BYTES_MAX: u32 = 64 << 10;
/// Interval of pings: a peer that vanished without closing its connection is noticed.
const PING_EVERY: Duration = Duration::from_secs(30);

/// Serves one connection until its peer closes it, or until its calls have ended after `stop`.
pub(crate) async fn serve(
    picker: Arc<Picker>,
    socket: impl AsyncRead + AsyncWrite + Unpin,
    stop: CancellationToken,
    calls: TaskTracker,
) -> Result<(), h2::Error> {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(CALLS_MAX)
        .initial_window_size(CALL_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(HEAD_BYTES_MAX);
    let mut connection = builder.handshake(socket).await?;
    let mut pings = connection.ping_pong();
    let mut every = interval(PING_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut stopping, mut unanswered) = (false, false);
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(accepted) => {
                    let (request, respond) = accepted?;
                    let picker = Arc::clone(&picker);
                    calls.spawn(async move { call(&picker, request, respond).await });
                }
                None => return Ok(()),
            },
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                connection.graceful_shutdown();
            }
            _ = every.tick() => {
                if std::mem::replace(&mut unanswered, true) {
                    connection.abrupt_shutdown(h2::Reason::NO_ERROR);
                } else if let Some(pings) = &mut pings {
                    let _ = pings.send_ping(h2::Ping::opaque());
                }
            }
            answered = std::future::poll_fn(|cx| match &mut pings {
                Some(pings) => pings.poll_pong(cx),
                None => std::task::Poll::Pending,
            }), if unanswered => {
                unanswered = answered.is_err();
            }
        }
    }
}

/// Answers one call.
async fn call(picker: &Arc<Picker>, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    let (head, request) = request.into_parts();
    // A message carries a piece of a body, and a head.
    let bytes_max = picker.service.proxy.settings().server.max_payload_size + HEAD_BYTES_MAX as usize;
    let mut call = Call::new(request, respond, bytes_max);
    let is_grpc = head
        .headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(CONTENT_TYPE.as_bytes()));
    if !is_grpc {
        call.refuse();
        return;
    }
    let ended = match head.uri.path() {
        PROCESS_PATH if !picker.health_only => exchange(picker, &mut call).await,
        HEALTH_CHECK_PATH => health::check(picker, &mut call).await,
        WATCH_PATH => health::watch(picker, &mut call).await,
        _ => Ok(Status::Unimplemented),
    };
    match ended {
        Ok(status) => call.end(status),
        Err(CallError::Reset(error)) => tracing::debug!(%error, "call of a data plane was reset"),
        Err(error) => {
            tracing::debug!(%error, "call of a data plane ended");
            call.end(Status::InvalidArgument);
        }
    }
}
