//! Clients: one request each, and its outcome, judged independently of the gateway's code.

use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::tls::Trusting;

/// Idle connections kept, and their maximum age: well below the gateway's own limit, because a connection that the
/// gateway closes at the moment of sending is not a failure.
const IDLE_MAX: usize = 64;
const IDLE_FOR: Duration = Duration::from_secs(20);

/// A connection, under TLS or in the clear.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

type Http1 = http1::SendRequest<Full<Bytes>>;
type Http2 = http2::SendRequest<Full<Bytes>>;

/// Expected format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    Chat,
    Completion,
    Messages,
    Responses,
    Embedding,
}

/// A request, and the behaviour of its client.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    pub(crate) body: Bytes,
    pub(crate) shape: Shape,
    pub(crate) stream: bool,
    /// Tokens of the answer.
    pub(crate) tokens: u32,
    /// Over HTTP/2.
    pub(crate) h2: bool,
    /// The client disconnects this long after sending the request.
    pub(crate) leaves_after: Option<Duration>,
    /// The client waits this long before it reads each frame.
    pub(crate) reads_every: Option<Duration>,
}

/// Outcome of a request, as seen by its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// A whole answer with this text.
    Complete(String),
    /// An error instead of an answer, in an envelope that SDKs know.
    Refused { status: u16, code: String },
    /// A stream that ended with an event which says that it failed.
    Failed(String),
    /// It broke off after the answer had begun.
    Cut(String),
    /// The connection broke before an answer.
    Lost(String),
    /// The outcome is invalid for any client.
    Garbled(String),
    /// The request did not end.
    Silent,
    /// The client disconnected.
    Left,
}

/// Outcome of a request, and the worker in the answer's headers.
#[derive(Clone, Debug)]
pub(crate) struct Reported {
    pub(crate) ending: Ending,
    pub(crate) worker: Option<String>,
}

/// Connections to a gateway.
#[derive(Debug)]
pub(crate) struct Client {
    address: SocketAddr,
    patience: Duration,
    tls: Option<Trusting>,
    idle: Mutex<Vec<(Instant, Http1)>>,
    h2: tokio::sync::Mutex<Option<Http2>>,
}

// === impl Client ===

impl Client {
    /// A request counts as lost after `patience`. Without `tls` it uses plaintext.
    pub(crate) fn new(address: SocketAddr, patience: Duration, tls: Option<Trusting>) -> Self {
        Self { address, patience, tls, idle: Mutex::default(), h2: tokio::sync::Mutex::default() }
    }

    /// Sends a request and determines its outcome.
    pub(crate) async fn ask(&self, order: &Order) -> Reported {
        let mut worker = None;
        let lasts = order.leaves_after.unwrap_or(self.patience).min(self.patience);
        let ending = timeout(lasts, self.exchange(order, &mut worker)).await;
        let ending = ending.unwrap_or(match order.leaves_after {
            Some(_) => Ending::Left,
            None => Ending::Silent,
        });
        Reported { ending, worker }
    }

    async fn exchange(&self, order: &Order, worker: &mut Option<String>) -> Ending {
        let request = Request::builder()
            .method(order.method.clone())
            .uri(match order.h2 {
                true => format!(
                    "{}://{}{}",
                    if self.tls.is_some() { "https" } else { "http" },
                    self.address,
                    order.path
                ),
                false => order.path.to_owned(),
            })
            .header("host", self.address.to_string())
            .header("content-type", "application/json")
            .body(Full::new(order.body.clone()));
        let request = match request {
            Ok(request) => request,
            Err(error) => return Ending::Garbled(error.to_string()),
        };
        let mut kept = None;
        let answer = match order.h2 {
            true => match self.http2().await {
                Ok(mut connection) => connection.send_request(request).await,
                Err(error) => return Ending::Lost(error),
            },
            false => match self.http1().await {
                Ok(mut connection) => {
                    let answer = connection.send_request(request).await;
                    kept = Some(connection);
                    answer
                }
                Err(error) => return Ending::Lost(error),
            },
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Ending::Lost(told(&error)),
        };
        *worker =
            answer.headers().get("x-router-backend").and_then(|url| Some(url.to_str().ok()?.to_owned()));
        let ending = read(order, answer).await;
        if let Some(connection) = kept.filter(|_| !matches!(ending, Ending::Cut(_))) {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < IDLE_MAX {
                idle.push((Instant::now(), connection));
            }
        }
        ending
    }

    async fn http1(&self) -> Result<Http1, String> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                Some((since, connection)) if connection.is_ready() && since.elapsed() < IDLE_FOR => {
                    return Ok(connection);
                }
                Some(_) => {}
                None => break,
            }
        }
        let (connection, work) =
            http1::handshake(self.connect(false).await?).await.map_err(|error| told(&error))?;
        // It ends with its sender; errors are reported to the reader.
        tokio::spawn(async move { drop(work.await) });
        Ok(connection)
    }

    async fn http2(&self) -> Result<Http2, String> {
        let mut shared = self.h2.lock().await;
        if let Some(connection) = shared.as_ref().filter(|connection| connection.is_ready()) {
            return Ok(connection.clone());
        }
        let handshake = http2::handshake(TokioExecutor::new(), self.connect(true).await?);
        let (connection, work) = handshake.await.map_err(|error| told(&error))?;
        tokio::spawn(async move { drop(work.await) });
        *shared = Some(connection.clone());
        Ok(connection)
    }

    async fn connect(&self, h2: bool) -> Result<TokioIo<Box<dyn Stream>>, String> {
        let stream = TcpStream::connect(self.address).await.map_err(|error| format!("connect: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        Ok(TokioIo::new(match &self.tls {
            None => Box::new(stream),
            Some(tls) => {
                let stream = tls.connect(stream, self.address, h2).await;
                Box::new(stream.map_err(|error| format!("TLS: {error}"))?)
            }
        }))
    }
}

/// An error with its causes.
fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// Reads an answer to its end.
async fn read(order: &Order, answer: Response<Incoming>) -> Ending {
    let (head, mut body) = answer.into_parts();
    let mut bytes = Vec::new();
    while let Some(frame) = {
        if let Some(pause) = order.reads_every {
            tokio::time::sleep(pause).await;
        }
        body.frame().await
    } {
        match frame {
            Ok(frame) => bytes.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
            Err(error) => return Ending::Cut(format!("{} after {} bytes", told(&error), bytes.len())),
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    if !head.status.is_success() {
        return refused(order, head.status.as_u16(), &head.headers, &text);
    }
    let complete = match order.stream {
        true => stream(order, &text),
        false => whole(order, &text),
    };
    complete.unwrap_or_else(Ending::Garbled)
}

/// An error answer: OpenAI's envelope or Anthropic's, with Retry-After where required.
fn refused(order: &Order, status: u16, headers: &HeaderMap, text: &str) -> Ending {
    let envelope: Value = serde_json::from_str(text).unwrap_or_default();
    let error = &envelope["error"];
    let [message, kind] = ["message", "type"].map(|key| error[key].as_str().unwrap_or_default());
    if message.is_empty() || kind.is_empty() {
        return Ending::Garbled(format!("{status} with {text:?}"));
    }
    let seconds = headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if status == 429 && seconds.is_none() {
        return Ending::Garbled(format!("429 {kind} on {} without Retry-After", order.path));
    }
    // Errors of engines have numbers.
    let code = match &error["code"] {
        Value::String(code) => code.clone(),
        Value::Null => kind.to_owned(),
        code => code.to_string(),
    };
    Ending::Refused { status, code }
}

/// An answer that is not streamed.
fn whole(order: &Order, text: &str) -> Result<Ending, String> {
    let answer: Value = serde_json::from_str(text).map_err(|error| format!("{error} in {text:?}"))?;
    let (said, tokens) = match order.shape {
        Shape::Chat => (&answer["choices"][0]["message"]["content"], &answer["usage"]["completion_tokens"]),
        Shape::Completion => (&answer["choices"][0]["text"], &answer["usage"]["completion_tokens"]),
        Shape::Messages => (&answer["content"][0]["text"], &answer["usage"]["output_tokens"]),
        Shape::Responses => (&answer["output"][0]["content"][0]["text"], &answer["usage"]["output_tokens"]),
        Shape::Embedding => {
            let numbers = answer["data"][0]["embedding"].as_array();
            return match numbers.is_some_and(|numbers| !numbers.is_empty()) {
                true => Ok(Ending::Complete(String::new())),
                false => Err(format!("no embedding in {text:?}")),
            };
        }
    };
    counted(order, said.as_str().unwrap_or_default(), tokens.as_u64())
}

/// Events of a stream: its text, if it ends as its API requires and nothing follows.
fn stream(order: &Order, text: &str) -> Result<Ending, String> {
    let (mut said, mut tokens) = (String::new(), None);
    let mut over: Option<Result<(), String>> = None;
    let Some(events) = text.strip_suffix("\n\n") else {
        return Err(format!("the stream ends within an event: {:?}", tail(text)));
    };
    for event in events.split("\n\n") {
        if let Some(over) = &over {
            // vLLM ends a failed stream in the regular way; SDKs have raised the error by then.
            if over.is_err() && event == "data: [DONE]" {
                continue;
            }
            return Err(format!("{event:?} after {over:?}"));
        }
        let data = event.lines().find_map(|line| line.strip_prefix("data: "));
        let Some(data) = data else {
            // Comments keep a connection alive.
            if event.lines().all(|line| line.starts_with(':')) {
                continue;
            }
            return Err(format!("an event without data: {event:?}"));
        };
        if data == "[DONE]" {
            over = Some(Ok(()));
            continue;
        }
        let data: Value = serde_json::from_str(data).map_err(|error| format!("{error} in {data:?}"))?;
        if data["error"].is_object() || data["type"] == "error" || data["type"] == "response.failed" {
            over = Some(Err(data.to_string()));
            continue;
        }
        match order.shape {
            Shape::Chat => said += data["choices"][0]["delta"]["content"].as_str().unwrap_or_default(),
            Shape::Completion => said += data["choices"][0]["text"].as_str().unwrap_or_default(),
            Shape::Messages => said += data["delta"]["text"].as_str().unwrap_or_default(),
            Shape::Responses if data["type"] == "response.output_text.delta" => {
                said += data["delta"].as_str().unwrap_or_default();
            }
            Shape::Responses | Shape::Embedding => {}
        }
        let usage =
            if data["type"] == "response.completed" { &data["response"]["usage"] } else { &data["usage"] };
        let counts = ["completion_tokens", "output_tokens"].map(|name| usage[name].as_u64());
        tokens = counts.into_iter().flatten().next().or(tokens);
        if data["type"] == "message_stop" || data["type"] == "response.completed" {
            over = Some(Ok(()));
        }
    }
    match over {
        Some(Ok(())) => counted(order, &said, tokens),
        Some(Err(error)) => Ok(Ending::Failed(error)),
        None => Err(format!("the stream ends regularly, but without its last event: {:?}", tail(text))),
    }
}

/// The answer is complete if it has the requested number of words, and reports it.
fn counted(order: &Order, said: &str, tokens: Option<u64>) -> Result<Ending, String> {
    let words = said.split_whitespace().count() as u64;
    let expected = u64::from(order.tokens);
    if words != expected || tokens != Some(expected) {
        return Err(format!("{words} words, reported as {tokens:?}, where {expected} were requested"));
    }
    Ok(Ending::Complete(said.to_owned()))
}

fn tail(text: &str) -> String {
    text.chars().rev().take(200).collect::<Vec<_>>().into_iter().rev().collect()
}

/// The contents of a path, on a new connection; an answer other than 200 is an error.
pub(crate) async fn get(address: SocketAddr, path: &str) -> io::Result<String> {
    send(address, Method::GET, path, "").await
}

/// As [`get`], with another method and a body.
pub(crate) async fn send(address: SocketAddr, method: Method, path: &str, body: &str) -> io::Result<String> {
    let exchange = async {
        let stream = TcpStream::connect(address).await?;
        let handshake = http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await;
        let (mut connection, work) = handshake.map_err(io::Error::other)?;
        tokio::spawn(async move { drop(work.await) });
        let body = Full::new(Bytes::copy_from_slice(body.as_bytes()));
        let request =
            Request::builder().method(method).uri(path).header("host", address.to_string()).body(body);
        let answer =
            connection.send_request(request.map_err(io::Error::other)?).await.map_err(io::Error::other)?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if status.is_success() { Ok(text) } else { Err(io::Error::other(format!("{status} {text}"))) }
    };
    timeout(Duration::from_secs(10), exchange).await?
}
