//! HTTP/1.1 client with a connection pool: one request at a time per connection, bodies as bytes. [`http2`] is for servers
//! that speak gRPC.
//!
//! A library client delivers a response chunk by chunk, as the server framed it: a stream of 32 events costs 32 frames
//! on the way in and 32 on the way out. Here the bytes of one read are one piece, whatever their framing.
//!
//! A pool belongs to one relay thread. A connection returns to the pool only when its response has been read to the exact
//! end. An idle connection that becomes readable is not reused: the upstream has closed it.

mod body;
pub mod chunked;
mod config;
mod error;
mod head;
mod http2;
mod idle;
#[cfg(feature = "testing")]
pub mod pieces;
pub mod upload;
mod watch;
mod write;

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use http::header::HeaderMap;
use http::{Method, Request, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

pub use self::body::{AnswerBody, Switched};
use self::body::{Http1Body, READ_BYTES, Source};
pub use self::chunked::Chunked;
pub use self::config::ConnectionsConfig;
pub use self::error::UpstreamError;
pub use self::head::is_hop_by_hop;
use self::head::{Head, read_head};
use self::http2::Http2;
use self::idle::IdleConnections;
pub use self::upload::Upload;
use self::write::write_all;
use crate::address::{Address, Protocol};
use crate::tls::{Stream, ToWorkers};
use crate::upstream::{Upstream, UpstreamId};

/// The connection pool of one thread.
pub struct Connections {
    idle: Arc<IdleConnections>,
    tls: ArcSwap<ToWorkers>,
    http2: Http2,
}

/// A response whose head has arrived.
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its header fields, without hop-by-hop ones.
    pub headers: HeaderMap,
    /// Its body.
    pub body: AnswerBody,
    /// When the upstream had received the whole request, or as much of it as it read.
    pub sent: Instant,
}

// === impl Connections ===

impl Connections {
    /// An empty pool.
    pub fn new(config: ConnectionsConfig, tls: Arc<ToWorkers>) -> Arc<Self> {
        let (idle, tls) = (IdleConnections::new(config), ArcSwap::new(tls));
        Arc::new(Self { idle: Arc::new(idle), tls, http2: Http2::default() })
    }

    /// Replaces the configuration. Idle connections stay.
    pub fn configure(&self, config: ConnectionsConfig) {
        self.idle.config.store(Arc::new(config));
    }

    /// Replaces the certificates. Idle connections stay.
    pub fn set_tls(&self, tls: Arc<ToWorkers>) {
        self.tls.store(tls);
    }

    /// Sends a request and waits for the head of the response; calls `sending` just before the first byte is sent.
    ///
    /// If the upstream accepts no byte on an idle connection, a new connection is tried. If a connection breaks later, the
    /// engine may have received the request and may be working on it, so the attempt fails (RFC 9110, section 9.2.2: a
    /// client repeats a POST by itself only if it knows that the request was not applied).
    ///
    /// # Errors
    /// Why there is no response.
    pub async fn send(
        self: &Arc<Self>,
        upstream: &Upstream,
        method: &Method,
        head: &[u8],
        body: &Bytes,
        sending: impl Fn(),
    ) -> Result<Answer, UpstreamError> {
        self.send_payload(upstream, method, head, Payload::Whole(body), sending).await
    }

    /// Like [`Connections::send`], with a body that is sent while it arrives; calls `written` once all of it is sent.
    ///
    /// # Errors
    /// Why there is no response.
    pub async fn send_upload(
        self: &Arc<Self>,
        upstream: &Upstream,
        method: &Method,
        head: &[u8],
        (upload, written): (&mut Upload, &(dyn Fn() + Sync)),
        sending: impl Fn(),
    ) -> Result<Answer, UpstreamError> {
        self.send_payload(upstream, method, head, Payload::Upload(upload, written), sending).await
    }

    /// Like [`Connections::send`], without a body, for a head that asks for another protocol. Its response may be 101: then
    /// its body is the connection, see [`AnswerBody::switch`].
    ///
    /// # Errors
    /// Why there is no response.
    pub async fn send_switching(
        self: &Arc<Self>,
        upstream: &Upstream,
        method: &Method,
        head: &[u8],
        sending: impl Fn(),
    ) -> Result<Answer, UpstreamError> {
        self.send_payload(upstream, method, head, Payload::Switch, sending).await
    }

    /// Sends a request over HTTP/2 and waits for the head of the response; calls `sending` just before it is sent. Dropping
    /// the future or the response's body cancels the request.
    ///
    /// If an open connection takes no request any more, a new one is made.
    ///
    /// # Errors
    /// Why there is no response.
    pub async fn send_http2(
        &self,
        upstream: &Upstream,
        head: &Request<()>,
        body: &Bytes,
        sending: impl Fn(),
    ) -> Result<Answer, UpstreamError> {
        let within = self.idle.config.load().connect_timeout;
        let connecting = self.connect_in_time(upstream);
        let (parts, body, sent) =
            self.http2.send(upstream.id, (connecting, within), head, body, sending).await?;
        let body = AnswerBody::of(Source::Http2(Box::new(body)));
        Ok(Answer { status: parts.status, headers: parts.headers, body, sent })
    }

    async fn send_payload(
        self: &Arc<Self>,
        upstream: &Upstream,
        method: &Method,
        head: &[u8],
        mut payload: Payload<'_>,
        sending: impl Fn(),
    ) -> Result<Answer, UpstreamError> {
        if upstream.address.protocol == Protocol::Grpc {
            return Err(UpstreamError::Connect(io::Error::other("the server speaks gRPC, not HTTP/1.1")));
        }
        if let Some(stream) = self.idle.take(upstream.id) {
            sending();
            match self.exchange(stream, upstream.id, method, head, &mut payload).await {
                Err(UpstreamError::Stale(_)) => {}
                answered => return answered,
            }
        }
        // Boxed: connecting is rare, and its future is much larger than the rest.
        let stream = Box::pin(self.connect_in_time(upstream)).await?;
        sending();
        self.exchange(stream, upstream.id, method, head, &mut payload).await
    }

    async fn connect_in_time(&self, upstream: &Upstream) -> Result<Stream, UpstreamError> {
        let within = self.idle.config.load().connect_timeout;
        match timeout(within, self.connect(upstream)).await {
            Ok(connected) => connected.map_err(UpstreamError::Connect),
            Err(_) => Err(UpstreamError::ConnectTimeout(within)),
        }
    }

    async fn connect(&self, upstream: &Upstream) -> io::Result<Stream> {
        let Address { host, port, tls, .. } = &upstream.address;
        let connected = match upstream.allowed() {
            None => TcpStream::connect((host.as_str(), *port)).await,
            Some(allowed) => allowed.load_full().connect(&upstream.address.place()).await,
        };
        let stream = connected.inspect_err(|error| {
            upstream.note_gone();
            if error.kind() == io::ErrorKind::ConnectionRefused {
                upstream.note_end();
            }
        })?;
        stream.set_nodelay(true)?;
        if !tls {
            return Ok(Stream::Plain(stream));
        }
        let name = upstream.tls_server_name.as_deref().unwrap_or(host);
        self.tls.load_full().connect(name, stream).await
    }

    async fn exchange(
        self: &Arc<Self>,
        mut stream: Stream,
        upstream: UpstreamId,
        method: &Method,
        head: &[u8],
        payload: &mut Payload<'_>,
    ) -> Result<Answer, UpstreamError> {
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        let Exchange { head, whole, sent } = match &mut stream {
            Stream::Plain(stream) => {
                let (mut reader, mut writer) = stream.split();
                converse(&mut reader, &mut writer, &mut buffer, method, head, payload).await?
            }
            Stream::Tls(stream) => {
                let (mut reader, mut writer) = tokio::io::split(&mut **stream);
                Box::pin(converse(&mut reader, &mut writer, &mut buffer, method, head, payload)).await?
            }
        };
        if head.status == StatusCode::SWITCHING_PROTOCOLS && !matches!(payload, Payload::Switch) {
            return Err(UpstreamError::Garbage("it switches protocols".into()));
        }
        let body = AnswerBody::of(Source::Http1(Http1Body {
            stream: Some(stream),
            buffer,
            framing: head.framing,
            reusable: head.reusable && whole,
            home: Arc::clone(&self.idle),
            upstream,
        }));
        Ok(Answer { status: head.status, headers: head.headers, body, sent })
    }

    /// Closes the idle connections to this upstream.
    pub fn forget(&self, upstream: UpstreamId) {
        self.http2.forget(upstream);
        self.idle.all().remove(&upstream);
    }

    /// Sends no further request on the open HTTP/2 connection to this upstream: it may lead nowhere.
    pub fn renew(&self, upstream: UpstreamId) {
        self.http2.forget(upstream);
    }

    /// Closes the connections to this upstream that have been idle for longer than `idle_timeout`.
    pub fn sweep(&self, upstream: UpstreamId) {
        self.idle.sweep(upstream);
    }
}

/// The body of a request.
enum Payload<'a> {
    Whole(&'a Bytes),
    Upload(&'a mut Upload, &'a (dyn Fn() + Sync)),
    /// None: another protocol is asked for.
    Switch,
}

// === impl Payload ===

impl Payload<'_> {
    /// Sends head and body. Sets `taken` when the socket accepts the first byte.
    async fn write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        head: &[u8],
        taken: &mut bool,
    ) -> io::Result<()> {
        match self {
            Self::Whole(body) => write_all(stream, head, body, taken).await,
            Self::Switch => write_all(stream, head, &[], taken).await,
            // Boxed: it is rare, and larger than the rest.
            Self::Upload(upload, written) => {
                Box::pin(upload.write(stream, head, taken)).await.inspect(|()| written())
            }
        }
    }
}

/// The outcome of a request on one connection.
struct Exchange {
    head: Head,
    /// Whether the whole request was sent,
    whole: bool,
    /// and when.
    sent: Instant,
}

/// Sends a request and reads the head of the response.
async fn converse(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    buffer: &mut BytesMut,
    method: &Method,
    head: &[u8],
    payload: &mut Payload<'_>,
) -> Result<Exchange, UpstreamError> {
    // A server may reject a large body before reading all of it: so the response is read while the socket accepts no more.
    // Usually the socket accepts everything at once.
    let mut taken = false;
    let came = {
        let mut writing = std::pin::pin!(payload.write(writer, head, &mut taken));
        tokio::select! {
            biased;
            written = writing.as_mut() => Sent::Ended(written),
            parsed = read_head(reader, buffer, method) => Sent::Answered(parsed),
        }
    };
    let sent = Instant::now();
    let (head, whole) = match came {
        Sent::Ended(Ok(())) => (read_head(reader, buffer, method).await?, true),
        Sent::Ended(Err(error)) if !taken => return Err(UpstreamError::Stale(error)),
        // The server may have rejected the request and closed: then its response counts, not the failed write.
        Sent::Ended(Err(error)) => match read_head(reader, buffer, method).await {
            Err(UpstreamError::Broken(_)) => return Err(UpstreamError::Broken(error)),
            answered => (answered?, false),
        },
        Sent::Answered(answered) => (answered?, false),
    };
    Ok(Exchange { head, whole, sent })
}

/// Which came first: the end of writing, or a response.
enum Sent {
    Ended(io::Result<()>),
    Answered(Result<Head, UpstreamError>),
}
