//! Accepts connections and serves each in a task of its own: HTTP/1 by [`h1`](crate::h1), HTTP/2 by hyper.
//!
//! A connection stays on the relay thread that it was given to. Both protocols pass their requests to the
//! [`Service`].

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kvlane_fleet::metrics::{Metrics, Reached};
use kvlane_http::tls::{self, Stream};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::deadlines::Deadlines;
use crate::ext_proc::{self, Picker};
use crate::guard;
use crate::h1::{Client, NEXT_WITHIN};
use crate::head::HEAD_BYTES_MAX;
use crate::own_api::Port;
use crate::service::Service;
use crate::socket::Socket;

/// Longest pause between two checks for an HTTP/2 preface that arrives in pieces.
const PREFACE_PAUSE_MAX: Duration = Duration::from_millis(250);
/// Most concurrent streams on one h2c connection.
const H2_STREAMS_MAX: u32 = 1024;

/// The connections of one relay thread.
pub struct Listener {
    /// Answers their requests.
    pub service: Arc<Service>,
    /// Asks clients to leave: connections that are open by then end after their requests.
    pub retire: CancellationToken,
    /// Stops reading new requests.
    pub stop: CancellationToken,
    /// The tasks of open connections.
    pub connections: TaskTracker,
    /// What its connections are for.
    pub front: Front,
}

/// What connections are for.
pub enum Front {
    /// HTTP requests of clients or operators.
    Http,
    /// Requests of a data plane for endpoints, with this TLS configuration if it uses TLS.
    ExtProc(Arc<Picker>, Option<Arc<ServerConfig>>),
}

// === impl Listener ===

impl Listener {
    /// Accepts connections until `stop`, and passes each to `spread`.
    pub async fn accept(
        metrics: &Metrics,
        listener: &TcpListener,
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
                    // Most likely no file descriptor is left: pause instead of spinning.
                    metrics.limits.reached(Reached::Accept);
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves one connection in a task of its own.
    pub fn spawn(self: &Arc<Self>, stream: TcpStream) -> tokio::task::JoinHandle<()> {
        let listener = Arc::clone(self);
        self.connections.spawn(async move {
            if let Err(error) = listener.serve(stream).await {
                tracing::debug!(%error, "connection ended");
            }
        })
    }

    async fn serve(
        self: Arc<Self>,
        stream: TcpStream,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        stream.set_nodelay(true)?;
        let header_timeout = self.service.proxy.settings().server.header_timeout;
        let accepted = Instant::now();
        let stopped = async {
            self.stop.cancelled().await;
            sleep_until(accepted + NEXT_WITHIN).await;
        };
        let first = tokio::select! {
            first = timeout(header_timeout, self.begin(stream)) => first,
            () = stopped => return Ok(()),
        };
        let Ok(begun) = first else {
            self.service.proxy.fleet.metrics.limits.reached(Reached::HeadTime);
            return Ok(());
        };
        let (stream, h2) = begun?;
        let (stream_max, idle_timeout) = {
            let config = self.service.proxy.settings();
            (Deadlines::longest(&config), config.server.stream_idle_timeout)
        };
        let socket = Socket::new(stream, idle_timeout);
        if let Front::ExtProc(picker, _) = &self.front {
            let (picker, stop, calls) = (Arc::clone(picker), self.stop.clone(), self.connections.clone());
            return Ok(Box::pin(ext_proc::serve(picker, socket, stop, calls)).await?);
        }
        if h2 {
            return Ok(Box::pin(self.serve_h2(socket, header_timeout, stream_max)).await?);
        }
        Ok(Client::new(Arc::clone(&self.service), self.stop.clone(), socket).serve().await?)
    }

    async fn serve_h2(
        self: Arc<Self>,
        socket: Socket,
        ping_interval: Duration,
        stream_max: Duration,
    ) -> hyper::Result<()> {
        let stop = self.stop.clone();
        // A client that connects after it was asked to leave has no other place to go yet.
        let retire = if self.retire.is_cancelled() { stop.clone() } else { self.retire.clone() };
        let service = service_fn(move |request: Request<Incoming>| {
            let listener = Arc::clone(&self);
            async move {
                let (parts, mut body) = request.into_parts();
                let strict = guard::is_strict(&parts);
                let mut received = listener.service.receive(parts, strict, &mut body).await;
                let intake = received.take_intake();
                let answer = listener.service.respond(received);
                Ok::<_, Infallible>(match intake {
                    None => answer.await,
                    Some(intake) => Box::pin(intake.pass_on_beside(&mut body, answer)).await,
                })
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
            () = retire.cancelled() => connection.as_mut().graceful_shutdown(),
            () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    }

    /// Detects the client's protocol: TLS or not, and whether HTTP/2.
    async fn begin(&self, stream: TcpStream) -> io::Result<(Stream, bool)> {
        let tls = self.service.proxy.tls();
        let config = match (&self.front, self.service.port) {
            (Front::ExtProc(_, own), _) => own.as_ref(),
            (Front::Http, Port::Clients { .. }) => tls.clients(),
            (Front::Http, Port::Operators { .. }) => tls.operators(),
        };
        let config = config.cloned();
        drop(tls);
        match config {
            Some(config) => {
                let begun = Box::pin(tls::accept(config, stream)).await;
                self.service.proxy.fleet.metrics.auth.note_handshake(begun.is_ok());
                begun
            }
            None if matches!(self.front, Front::ExtProc(..)) => Ok((Stream::Plain(stream), true)),
            None => {
                let h2 = speaks_h2(&stream).await?;
                Ok((Stream::Plain(stream), h2))
            }
        }
    }
}

/// Runs the streams of an h2c connection, each for a limited time. A client that grants a stream no flow-control
/// window would otherwise keep it forever: the response is not polled then, so its deadlines are not checked either.
#[derive(Clone)]
struct Streams {
    stream_max: Duration,
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Streams {
    #[expect(clippy::disallowed_methods, reason = "a stream ends with its connection, which is tracked")]
    fn execute(&self, stream: F) {
        tokio::spawn(timeout(self.stream_max, stream));
    }
}

/// Whether a connection starts with HTTP/2's preface. The bytes are peeked, not consumed.
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
        // Part of a preface. It stays readable, so check again later rather than at once.
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(PREFACE_PAUSE_MAX);
    }
}
