//! Upstreams that cost next to nothing and always the same: what `e2e/race` puts behind the proxies it compares.
//!
//! `fixed_upstream COUNT` serves COUNT loopback ports, prints their URLs one per line and runs until its standard input
//! ends. Nothing is modelled: every POST is read whole and answered at once, with one JSON body, or with as many server-sent
//! events as its `max_tokens` when it says `"stream": true`. Each event is written to the socket by itself, as an engine's
//! tokens are, so that a proxy has to carry them one by one; and so many milliseconds after the one before as its `seed` says.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Interval, interval};

/// Ports one process serves at most.
const PORTS_MAX: usize = 64;

/// Open connections of one port beyond which new ones wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 4096;

/// Largest request body; beyond it 413.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Time a client has for a request's head. Proxies keep idle connections for reuse, so this is long.
const HEADER_TIMEOUT: Duration = Duration::from_secs(120);

/// Pause after a failed accept, which is mostly the process's limit of open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

const COMPLETION: &[u8] = br#"{"id":"chatcmpl-race","object":"chat.completion","created":1700000000,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"fixed answer"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1600,"completion_tokens":2,"total_tokens":1602}}"#;
const EVENT: &[u8] = b"data: {\"id\":\"chatcmpl-race\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"},\"finish_reason\":null}]}\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

const MODELS: &[u8] = br#"{"object":"list","data":[{"id":"tiny","object":"model","created":1700000000,"owned_by":"race","max_model_len":131072}]}"#;
const MODEL_INFO: &[u8] = br#"{"model_path":"tiny","tokenizer_path":"tiny","is_generation":true}"#;
const SERVER_INFO: &[u8] = br#"{"model_path":"tiny","served_model_name":"tiny","dp_size":1}"#;
/// An idle vLLM, as far as routers ask.
const METRICS: &[u8] = b"vllm:num_requests_running{model_name=\"tiny\"} 0\nvllm:num_requests_waiting{model_name=\"tiny\"} 0\nvllm:kv_cache_usage_perc{model_name=\"tiny\"} 0\n";

type Answer = Response<Either<Full<Bytes>, Events>>;

/// The body of a streamed answer.
struct Events {
    /// Events still to come, `[DONE]` included.
    left: u32,
    /// Whether the event given last still waits in hyper's buffer.
    unwritten: bool,
    /// When the next one is due, if they have a pace.
    pace: Option<Interval>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(count), None) = (args.next(), args.next()) else {
        return Err("usage: fixed_upstream COUNT".into());
    };
    let count: usize = count.parse()?;
    if !(1..=PORTS_MAX).contains(&count) {
        return Err(format!("fixed_upstream serves 1 to {PORTS_MAX} ports, not {count}").into());
    }

    let runtime = tokio::runtime::Runtime::new()?;
    let listeners = runtime.block_on(async {
        let mut listeners = Vec::with_capacity(count);
        for _ in 0..count {
            listeners.push(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?);
        }
        io::Result::Ok(listeners)
    })?;
    let mut out = io::stdout().lock();
    for listener in listeners {
        writeln!(out, "http://{}", listener.local_addr()?)?;
        runtime.spawn(accept(listener));
    }
    out.flush()?;

    // The parent process holds the other end: this process ends with it.
    let mut ignored = [0; 256];
    while io::stdin().read(&mut ignored)? > 0 {}
    runtime.shutdown_background();
    Ok(())
}

async fn accept(listener: TcpListener) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(async move {
                    serve(stream).await;
                    drop(slot);
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn serve(stream: TcpStream) {
    // Fails only on a dead socket, which the server notices by itself.
    let _ = stream.set_nodelay(true);
    // A proxy that breaks a connection off counts it itself: wrk sees the consequence.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service_fn(answer))
        .await;
}

async fn answer(request: Request<Incoming>) -> Result<Answer, Infallible> {
    if request.method() == Method::POST {
        let Ok(body) = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await else {
            return Ok(empty(StatusCode::PAYLOAD_TOO_LARGE));
        };
        let body = body.to_bytes();
        if !wants_stream(&body) {
            return Ok(whole(COMPLETION, "application/json"));
        }
        let events = Events::of(&body);
        return Ok(typed(Response::new(Either::Right(events)), "text/event-stream"));
    }
    Ok(match request.uri().path() {
        "/health" | "/health_generate" => empty(StatusCode::OK),
        "/v1/models" => whole(MODELS, "application/json"),
        "/get_model_info" | "/model_info" => whole(MODEL_INFO, "application/json"),
        "/get_server_info" | "/server_info" => whole(SERVER_INFO, "application/json"),
        "/metrics" => whole(METRICS, "text/plain; version=0.0.4"),
        _ => empty(StatusCode::NOT_FOUND),
    })
}

fn whole(body: &'static [u8], content_type: &'static str) -> Answer {
    typed(Response::new(Either::Left(Full::new(Bytes::from_static(body)))), content_type)
}

fn typed(mut answer: Answer, content_type: &'static str) -> Answer {
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(Either::Left(Full::default()));
    *answer.status_mut() = status;
    answer
}

/// Whether a body says `"stream": true`, wherever a proxy that writes the JSON anew has put it. The hop from quote to
/// quote is the cheapest way through a long string; escapes do not matter to a load that has none.
fn wants_stream(body: &[u8]) -> bool {
    value(body, "stream").is_some_and(|value| value.starts_with("true"))
}

/// What stands behind a key.
fn value<'a>(body: &'a [u8], key: &str) -> Option<&'a str> {
    let text = std::str::from_utf8(body).ok()?;
    let mut after_key = text.split('"').skip_while(|&piece| piece != key).skip(1);
    Some(after_key.next()?.trim_start_matches([':', ' ']))
}

/// The number behind a key, or 0.
fn number(body: &[u8], key: &str) -> u32 {
    let value = value(body, key).unwrap_or_default();
    let end = value.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(value.len());
    value[..end].parse().unwrap_or(0)
}

// === impl Events ===

impl Events {
    /// Those that a body asks for.
    fn of(body: &[u8]) -> Self {
        let pace = Some(number(body, "seed")).filter(|&ms| ms > 0);
        let pace = pace.map(|ms| interval(Duration::from_millis(ms.into())));
        Self { left: number(body, "max_tokens") + 1, unwritten: false, pace }
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        // hyper writes its buffer out when the body has nothing more for the moment.
        if std::mem::take(&mut self.unwritten) && self.pace.is_none() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(pace) = &mut self.pace {
            ready!(pace.poll_tick(cx));
        }
        self.left -= 1;
        self.unwritten = true;
        let event = if self.left == 0 { DONE } else { EVENT };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(event)))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }
}
