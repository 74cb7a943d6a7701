//! Shared test code of this crate: an engine, and requests to it.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use crate::{MockConfig, MockEngine};

/// Test engines are fast enough to avoid waiting.
pub(crate) async fn engine(config: MockConfig) -> MockEngine {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    MockEngine::start(MockConfig { speed: 1000.0, ..config }, listener).expect("a good configuration")
}

/// Sends one request on a new connection. Dropping the answer closes the connection.
pub(crate) async fn send(addr: SocketAddr, path: &str, body: impl Into<Bytes>) -> Response<Incoming> {
    send_with(addr, path, body, &[]).await
}

/// As [`send`], to the engine of one data-parallel rank.
pub(crate) async fn send_to_rank(
    addr: SocketAddr,
    path: &str,
    body: impl Into<Bytes>,
    rank: Option<u32>,
) -> Response<Incoming> {
    let rank = rank.map(|rank| rank.to_string());
    let headers = rank.as_deref().map(|rank| ("x-data-parallel-rank", rank));
    send_with(addr, path, body, headers.as_slice()).await
}

/// As [`send`], with further headers.
pub(crate) async fn send_with(
    addr: SocketAddr,
    path: &str,
    body: impl Into<Bytes>,
    headers: &[(&str, &str)],
) -> Response<Incoming> {
    let stream = TcpStream::connect(addr).await.expect("listening");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("a fresh connection");
    tokio::spawn(connection);
    let body: Bytes = body.into();
    let method = if body.is_empty() { "GET" } else { "POST" };
    let mut request = Request::builder();
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request
        .method(method)
        .uri(path)
        .header("host", "mock")
        .header("content-type", "application/json")
        .body(Full::new(body))
        .expect("a good request");
    sender.send_request(request).await.expect("an answer")
}

pub(crate) async fn text(response: Response<Incoming>) -> (StatusCode, String) {
    let status = response.status();
    let body = response.into_body().collect().await.expect("a whole answer").to_bytes();
    (status, String::from_utf8(body.to_vec()).expect("text"))
}

pub(crate) async fn ask(engine: &MockEngine, path: &str, body: Value) -> (StatusCode, Value) {
    let (status, text) = text(send(engine.addr(), path, body.to_string()).await).await;
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

pub(crate) fn chat(content: &str, more: Value) -> Value {
    let mut body = json!({"model": "mock", "messages": [{"role": "user", "content": content}]});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}
