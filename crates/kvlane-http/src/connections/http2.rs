//! HTTP/2 to servers that speak gRPC: one connection to each, shared by all requests of a thread.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::response::Parts;
use http::{HeaderMap, Request};
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::error::UpstreamError;
use crate::tls::Stream;
use crate::upstream::UpstreamId;

/// Bytes that a server may send in one stream, and on one connection, before they are relayed. A client that reads nothing
/// holds up others only once 256 of them do.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// Largest head of a response.
const HEAD_BYTES_MAX: u32 = 64 << 10;

/// The connections of one thread.
#[derive(Default)]
pub(super) struct Http2 {
    open: Mutex<HashMap<UpstreamId, SendRequest<Bytes>>>,
    /// The tasks that read and write them. Each ends with its connection.
    drivers: TaskTracker,
}

/// The body of a response, and its trailers.
pub(super) struct Http2Body {
    /// None once it was closed.
    stream: Option<RecvStream>,
    /// Resets the stream when it is closed.
    request: SendStream<Bytes>,
    is_done: bool,
    trailers: Option<HeaderMap>,
}

// === impl Http2 ===

impl Http2 {
    /// Closes the connection to this upstream once its requests have ended.
    pub(super) fn forget(&self, upstream: UpstreamId) {
        self.open().remove(&upstream);
    }

    fn open(&self) -> MutexGuard<'_, HashMap<UpstreamId, SendRequest<Bytes>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request; connects first, within this time, if no open connection takes one.
    pub(super) async fn send(
        &self,
        upstream: UpstreamId,
        (connecting, within): (impl Future<Output = Result<Stream, UpstreamError>>, Duration),
        head: &Request<()>,
        body: &Bytes,
        sending: impl Fn(),
    ) -> Result<(Parts, Http2Body, Instant), UpstreamError> {
        let open = self.open().get(&upstream).cloned();
        if let Some(open) = open
            && let Ok(ready) = open.ready().await
        {
            match exchange(ready, head, body, &sending).await {
                Err(UpstreamError::Stale(_)) => {}
                answered => return answered,
            }
        }
        // Boxed: connecting is rare, and its future is much larger than the rest.
        let opened = Box::pin(self.shake_hands(connecting, within)).await?;
        self.open().insert(upstream, opened.clone());
        exchange(opened.ready().await.map_err(broken)?, head, body, &sending).await
    }

    async fn shake_hands(
        &self,
        connecting: impl Future<Output = Result<Stream, UpstreamError>>,
        within: Duration,
    ) -> Result<SendRequest<Bytes>, UpstreamError> {
        let stream = connecting.await?;
        let mut builder = Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEAD_BYTES_MAX)
            .enable_push(false);
        let handshake = timeout(within, builder.handshake(stream)).await;
        let (opened, connection) = handshake.map_err(|_| UpstreamError::Silent(within))?.map_err(broken)?;
        self.drivers.spawn(async move {
            // Each of its requests is told of an error.
            let _ = connection.await;
        });
        Ok(opened)
    }
}

async fn exchange(
    mut connection: SendRequest<Bytes>,
    head: &Request<()>,
    body: &Bytes,
    sending: &impl Fn(),
) -> Result<(Parts, Http2Body, Instant), UpstreamError> {
    sending();
    let (answer, mut request) = connection.send_request(head.clone(), body.is_empty()).map_err(unsent)?;
    if !body.is_empty() {
        // It is sent as the server grants room for it, and takes no memory of its own until then.
        request.send_data(body.clone(), true).map_err(unsent)?;
    }
    let sent = Instant::now();
    let (parts, stream) = answer.await.map_err(unsent)?.into_parts();
    let is_done = stream.is_end_stream();
    let body = Http2Body { stream: Some(stream), request, is_done, trailers: None };
    Ok((parts, body, sent))
}

/// An error before a response. The server has not received the request if it has refused it, or has closed the connection
/// with an earlier request as the last one.
fn unsent(error: h2::Error) -> UpstreamError {
    let is_unread = error.reason() == Some(Reason::REFUSED_STREAM)
        || (error.is_go_away() && error.is_remote() && error.reason() == Some(Reason::NO_ERROR));
    if is_unread { UpstreamError::Stale(into_io(error)) } else { broken(error) }
}

fn broken(error: h2::Error) -> UpstreamError {
    UpstreamError::Broken(into_io(error))
}

fn into_io(error: h2::Error) -> io::Error {
    let text = error.to_string();
    error.into_io().unwrap_or_else(|| io::Error::other(text))
}

// === impl Http2Body ===

impl Http2Body {
    /// Cancels the stream.
    pub(super) fn close(&mut self) {
        if !self.is_done {
            self.request.send_reset(Reason::CANCEL);
        }
        self.stream = None;
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }

    pub(super) fn take_trailers(&mut self) -> Option<HeaderMap> {
        self.trailers.take()
    }

    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.is_done {
            return Poll::Ready(None);
        }
        let Some(stream) = &mut self.stream else {
            let closed = io::Error::new(io::ErrorKind::UnexpectedEof, "the stream was closed");
            return Poll::Ready(Some(Err(closed)));
        };
        while let Some(piece) = ready!(stream.poll_data(cx)) {
            let piece = piece.map_err(into_io)?;
            // It never fails for what was received.
            let _ = stream.flow_control().release_capacity(piece.len());
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(piece)));
            }
        }
        self.trailers = ready!(stream.poll_trailers(cx)).map_err(into_io)?;
        self.is_done = true;
        Poll::Ready(None)
    }
}
