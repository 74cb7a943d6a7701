//! The HTTP front door: HTTP/1.1 and h2c in, one connection one task, one relay thread per connection.
//!
//! A connection is served by [`h1`] or, in HTTP/2, by hyper. Both take a request the same way: `receive` it, with its body
//! read (`read`), and `respond`: `forward` it, and `relay` the answer; [`error`] is where errors become HTTP.

mod account;
mod attempt;
pub mod attempt_error;
pub mod config;
mod count;
mod deadlines;
mod dialect;
pub mod error;
pub mod faults;
mod forward;
mod guard;
mod h1;
mod head;
mod hedge;
mod passed;
mod read;
mod relay;
mod resume;
mod socket;
mod whole;

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kvlane_http::connections::Connections;
use kvlane_http::tls::{self, Stream};
use kvlane_wire::path::allows;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use self::account::Account;
use self::deadlines::Deadlines;
use self::dialect::Dialect;
use self::error::ApiError;
use self::forward::Wanted;
use self::guard::Purpose;
use self::h1::Client;
use self::head::HEAD_BYTES_MAX;
use self::passed::Passing;
use self::read::Source;
use self::relay::Relay;
use self::socket::Socket;
use crate::admin;
use crate::fleet::Fleet;
use crate::gateway::Gateway;
use crate::memory::Held;
use crate::metrics::{Metrics, Reached};

/// The header under which a request id travels on.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest pause between two looks at a preface that comes in pieces.
const PREFACE_PAUSE_MAX: Duration = Duration::from_millis(250);
/// Streams at a time on one h2c connection.
const H2_STREAMS_MAX: u32 = 1024;

/// The body of an answer: our own words, or a worker's.
pub enum Body {
    /// All of it.
    Whole(Option<Bytes>),
    /// A worker's, as it comes.
    Relay(Box<Relay>),
}

/// Whom a port serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    /// Clients; operators too if it is open to this machine only.
    Clients { loopback: bool },
    /// Operators and Prometheus.
    Operators { loopback: bool },
}

/// A request that has come in.
struct Received {
    parts: Parts,
    dialect: Dialect,
    account: Arc<Account>,
    /// What it is for and its body; or why it goes no further.
    read: Result<(Purpose, Bytes), ApiError>,
    /// The memory that its head takes, if it is much.
    held: Held,
}

/// What all connections of one relay thread share.
pub(crate) struct Front {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) upstreams: Arc<Connections>,
    pub(crate) door: Door,
    /// Stops reading new requests.
    pub(crate) stop: CancellationToken,
    pub(crate) connections: TaskTracker,
}

// === impl Front ===

impl Front {
    /// Accepts connections until told to stop, and hands each to `spread`.
    pub(crate) async fn accept(
        metrics: &Metrics,
        listener: TcpListener,
        stop: CancellationToken,
        mut spread: impl FnMut(TcpStream),
    ) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.cancelled() => return,
            };
            match accepted {
                Ok((stream, _)) => spread(stream),
                Err(error) => {
                    // Out of descriptors, most likely: pause instead of spinning.
                    metrics.limits.reached(Reached::Accept);
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves one connection in a task of its own.
    pub(crate) fn spawn(self: &Arc<Self>, stream: TcpStream) -> tokio::task::JoinHandle<()> {
        let front = Arc::clone(self);
        self.connections.spawn(async move {
            if let Err(error) = front.serve(stream).await {
                tracing::debug!(%error, "a connection ended");
            }
        })
    }

    async fn serve(
        self: Arc<Self>,
        stream: TcpStream,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        stream.set_nodelay(true)?;
        let header_timeout = self.gateway.config().server.header_timeout;
        let first = tokio::select! {
            first = timeout(header_timeout, self.begin(stream)) => first,
            () = self.stop.cancelled() => return Ok(()),
        };
        let Ok(begun) = first else {
            self.gateway.metrics.limits.reached(Reached::HeadTime);
            return Ok(());
        };
        let (stream, h2) = begun?;
        let (stream_max, idle_timeout) = {
            let config = self.gateway.config();
            (Deadlines::longest(&config), config.server.stream_idle_timeout)
        };
        let socket = Socket::new(stream, idle_timeout);
        if h2 {
            return Ok(Box::pin(self.serve_h2(socket, header_timeout, stream_max)).await?);
        }
        Ok(Client::new(self, socket).serve().await?)
    }

    async fn serve_h2(
        self: Arc<Self>,
        socket: Socket,
        ping_interval: Duration,
        stream_max: Duration,
    ) -> hyper::Result<()> {
        let stop = self.stop.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let front = Arc::clone(&self);
            async move {
                let (parts, mut body) = request.into_parts();
                let strict = guard::is_strict(&parts);
                let received = front.receive(parts, strict, &mut body).await;
                Ok::<_, Infallible>(front.respond(received).await)
            }
        });
        let mut builder = http2::Builder::new(Streams { stream_max });
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(H2_STREAMS_MAX)
            .max_header_list_size(HEAD_BYTES_MAX as u32)
            .keep_alive_interval(Some(ping_interval));
        let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), service));
        tokio::select! {
            ended = connection.as_mut() => return ended,
            () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    }

    /// Finds out what a client speaks: TLS or not, and whether HTTP/2.
    async fn begin(&self, stream: TcpStream) -> io::Result<(Stream, bool)> {
        let tls = self.gateway.tls();
        let config = match self.door {
            Door::Clients { .. } => tls.clients(),
            Door::Operators { .. } => tls.operators(),
        };
        let config = config.cloned();
        drop(tls);
        match config {
            Some(config) => {
                let begun = Box::pin(tls::accept(config, stream)).await;
                self.gateway.metrics.auth.note_handshake(begun.is_ok());
                begun
            }
            None => {
                let h2 = speaks_h2(&stream).await?;
                Ok((Stream::Plain(stream), h2))
            }
        }
    }

    /// Lets a request in and reads its body; `head` says whether its head is as it should be.
    async fn receive(&self, mut parts: Parts, head: Result<(), ApiError>, body: impl Source) -> Received {
        let path = parts.uri.path();
        let dialect = Dialect::of(path);
        let purpose = head.and_then(|()| Purpose::of(self, path));
        let api = purpose.as_ref().ok().and_then(|purpose| purpose.api());
        let counted = matches!(self.door, Door::Clients { .. });
        let account = Account::open(&self.gateway, api, dialect, &parts, counted);
        let mut held = self.gateway.memory.share();
        let read = match purpose {
            Ok(purpose) if held.grow_to(bytes_of(&parts.headers)) => {
                self.let_in(&mut parts, purpose, body, &account).await
            }
            Ok(_) => Err(ApiError::NoMemory),
            Err(error) => Err(error),
        };
        Received { parts, dialect, account, read, held }
    }

    async fn let_in(
        &self,
        parts: &mut Parts,
        purpose: Purpose,
        body: impl Source,
        account: &Account,
    ) -> Result<(Purpose, Bytes), ApiError> {
        guard::admit(self, parts, purpose)?;
        if self.keeps_apart(parts) {
            account.keep_apart();
        }
        let method = if parts.method == Method::HEAD { "GET" } else { parts.method.as_str() };
        if let Some(allow) = purpose.methods().filter(|allow| !allows(allow, method)) {
            let method = parts.method.as_str().chars().take(32).collect();
            return Err(ApiError::WrongMethod { method, path: parts.uri.path().into(), allow });
        }
        let body = match purpose {
            Purpose::Own if !admin::takes_body(parts) => Bytes::new(),
            _ => read::body(&self.gateway, parts, body).await?,
        };
        Ok((purpose, body))
    }

    /// The answer to a request.
    async fn respond(&self, received: Received) -> Response<Body> {
        let Received { parts, dialect, account, read, held: _held } = received;
        let answered = match read {
            // Boxed, so that a connection whose request is still coming in takes little.
            Ok((purpose, body)) => Box::pin(self.dispatch(&parts, purpose, body, &account)).await,
            Err(error) => Err(error),
        };
        let mut response = match answered {
            Ok(response) => response,
            Err(error) => {
                if let Some(reached) = error.reached() {
                    self.gateway.metrics.limits.reached(reached);
                }
                error.into_response(dialect)
            }
        };
        account.set_status(response.status());
        if !matches!(response.body(), Body::Relay(_)) {
            account.settle();
        }
        account.mark(response.headers_mut());
        response
    }

    async fn dispatch(
        &self,
        parts: &Parts,
        purpose: Purpose,
        body: Bytes,
        account: &Arc<Account>,
    ) -> Result<Response<Body>, ApiError> {
        let wanted = match purpose {
            Purpose::Api(api) => Wanted::Api(api),
            Purpose::Pass(passing) => Wanted::Passed(passing),
            Purpose::Operate(_) => Wanted::Passed(Passing::Extra),
            Purpose::Own => {
                let answered = Box::pin(admin::answer(self, parts, &body)).await?;
                let path = || parts.uri.path().chars().take(200).collect();
                return answered.ok_or_else(|| ApiError::UnknownPath(path()));
            }
        };
        forward::forward(&self.gateway, &self.upstreams, wanted, parts, body, account).await
    }
}

/// What the fields of a head take.
fn bytes_of(headers: &http::HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum()
}

/// Runs the streams of an h2c connection, each for so long at most. A client that grants a stream no room would
/// otherwise keep it for ever: nobody asks for more of an answer that cannot be sent, so nobody looks at its deadline.
#[derive(Clone)]
struct Streams {
    stream_max: Duration,
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        tokio::spawn(timeout(self.stream_max, stream));
    }
}

/// Whether a connection begins with HTTP/2's preface. Looks without taking.
async fn speaks_h2(stream: &TcpStream) -> io::Result<bool> {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let mut first = [0; PREFACE.len()];
    let mut pause = Duration::from_millis(1);
    loop {
        let seen = stream.peek(&mut first).await?;
        if seen == 0 || first[..seen] != PREFACE[..seen] {
            return Ok(false);
        }
        if seen == PREFACE.len() {
            return Ok(true);
        }
        // A preface in pieces. What was seen stays readable, so ask again later rather than at once.
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(PREFACE_PAUSE_MAX);
    }
}

/// A whole answer in JSON.
pub(crate) fn json_response(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    text_response(status, "application/json", value.to_string())
}

/// A whole answer.
pub(crate) fn text_response(status: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(Body::Whole(Some(text.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Relay(relay) => Pin::new(relay).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::Relay(relay) => relay.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Relay(relay) => relay.size_hint(),
        }
    }
}
