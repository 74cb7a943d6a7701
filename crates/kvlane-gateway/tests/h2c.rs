//! HTTP/2 without TLS, by prior knowledge, is served like HTTP/1.1.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, eventually, soon};
use serde_json::Value;
use tokio::net::TcpStream;

async fn connect(gateway: &TestGateway) -> (SendRequest<Full<Bytes>>, tokio::task::JoinHandle<()>) {
    connect_to(gateway.address()).await
}

async fn connect_to(address: SocketAddr) -> (SendRequest<Full<Bytes>>, tokio::task::JoinHandle<()>) {
    let stream = TcpStream::connect(address).await.expect("the gateway listens");
    let (client, connection) =
        handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("it speaks h2c");
    let running = tokio::spawn(async move {
        // The tests check the requests, not how the connection ended.
        let _ = connection.await;
    });
    (client, running)
}

fn request(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let request = Request::post(format!("http://kvlane{path}")).header("te", "trailers");
    request.body(Full::new(body.into())).expect("a request")
}

async fn json(response: Response<Incoming>) -> Value {
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    serde_json::from_slice(&body).expect("JSON")
}

#[tokio::test]
async fn requests_share_a_connection_without_waiting_for_each_other() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (mut client, _running) = connect(&gateway).await;
    let first = client.send_request(request("/v1/chat/completions", chat("m", "one")));
    let call = engine.call().await;
    assert!(call.head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{}", call.head);
    assert_eq!((call.header("host"), call.header("te")), (Some(engine.authority()), None));
    assert_eq!(String::from_utf8_lossy(&call.body), chat("m", "one"));
    let (second, _) = tokio::join!(
        client.send_request(request("/v1/chat/completions", chat("m", "two"))),
        engine.answer(r#"{"n":2}"#)
    );
    let second = second.expect("an answer");
    assert_eq!(second.headers()["x-router-backend"], engine.url());
    assert!(second.headers().contains_key("x-request-id"));
    assert_eq!(json(second).await["n"], 2, "while the first request is still in flight");
    call.answer(200, r#"{"n":1}"#).await;
    assert_eq!(json(soon("the first", first).await.expect("an answer")).await["n"], 1);
    gateway.end().await;
}

#[tokio::test]
async fn a_large_body_reaches_the_engine_unchanged() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (mut client, _running) = connect(&gateway).await;
    let body = chat("m", &"0123456789".repeat(500_000));
    let (response, (_, received)) =
        tokio::join!(client.send_request(request("/v1/chat/completions", body.clone())), engine.answer("{}"));
    assert_eq!(response.expect("an answer").status(), 200);
    assert!(received == body.as_bytes());
    gateway.end().await;
}

#[tokio::test]
async fn events_are_relayed_one_by_one_and_a_break_is_an_error_event() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (mut client, _running) = connect(&gateway).await;
    for breaks in [false, true] {
        let sent = client.send_request(request("/v1/chat/completions", chat_stream("m", "hi")));
        let mut call = engine.call().await;
        call.begin_stream().await;
        call.chunk(&event("token-0")).await;
        let mut response = sent.await.expect("an answer");
        for n in 0..3 {
            let token = event(&format!("token-{n}"));
            if n > 0 {
                call.chunk(&token).await;
            }
            let frame = soon("an event", response.body_mut().frame()).await.expect("a frame").expect("whole");
            assert_eq!(frame.data_ref().map(|data| data.as_ref()), Some(token.as_bytes()));
        }
        if breaks {
            drop(call)
        } else {
            call.end_stream().await
        }
        if breaks {
            let frame = soon("an event", response.body_mut().frame()).await.expect("a frame").expect("whole");
            let last = frame.into_data().expect("data");
            assert!(memchr::memmem::find(&last, b"stream_broken").is_some(), "{last:?}");
        }
        let end = soon("the end", response.body_mut().frame()).await;
        assert!(
            end.is_none_or(|frame| frame.is_ok_and(|frame| frame.data_ref().is_some_and(Bytes::is_empty)))
        );
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_that_the_client_resets_is_cancelled_at_the_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (mut client, _running) = connect(&gateway).await;
    let sent = client.send_request(request("/v1/chat/completions", chat_stream("m", "hi")));
    let mut call = engine.call().await;
    drop(sent);
    call.gateway_gone().await;
    gateway.ledger_is_zero().await;
    let sent = client.send_request(request("/v1/chat/completions", chat_stream("m", "hi")));
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    drop(sent.await.expect("an answer"));
    call.gateway_gone().await;
    gateway.ledger_is_zero().await;
    assert!(client.is_ready(), "the connection stays open");
    gateway.end().await;
}

#[tokio::test]
async fn errors_are_the_same_as_in_http1() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.max_payload_size = 1000;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut client, _running) = connect(&gateway).await;
    for (path, body, status, code) in [
        ("/v1/chat/completions", "{".to_owned(), 400, "invalid_body"),
        ("/v1/chat/completions", chat("n", "hi"), 404, "model_not_found"),
        ("/nowhere", String::new(), 404, "not_found"),
        ("/v1/chat/completions", chat("m", &"x".repeat(5000)), 413, "body_too_large"),
        ("/v1/chat/completions", chat("m", &"x".repeat(5_000_000)), 413, "body_too_large"),
    ] {
        let response = soon("an answer", client.send_request(request(path, body))).await.expect("an answer");
        assert_eq!(response.status(), status);
        assert_eq!(json(response).await["error"]["code"], code);
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_body_of_unknown_length_has_the_same_limit() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.max_payload_size = 1000;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let stream = TcpStream::connect(gateway.address()).await.expect("the gateway listens");
    let (mut client, connection) =
        handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("it speaks h2c");
    tokio::spawn(connection);
    // One frame that ends the stream, without a declared length.
    let body = Unannounced(Full::new(Bytes::from(chat("m", &"x".repeat(3000)))));
    let request = Request::post("http://kvlane/v1/chat/completions").body(body).expect("a request");
    let response = soon("an answer", client.send_request(request)).await.expect("an answer");
    assert_eq!(response.status(), 413);
    gateway.end_quiet(&[&engine]).await;
}

/// A body without a declared length.
struct Unannounced(Full<Bytes>);

impl http_body::Body for Unannounced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

#[tokio::test]
async fn a_client_that_grants_no_flow_control_window_is_disconnected() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.request_timeout = Duration::from_millis(200);
    config.server.body_timeout = Duration::from_millis(200);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut client, _running) = connect(&gateway).await;
    let sent = client.send_request(request("/v1/chat/completions", chat_stream("m", "hi")));
    let mut call = engine.call().await;
    call.begin_stream().await;
    let token = event(&"x".repeat(60_000));
    let chunk = format!("{:x}\r\n{token}\r\n", token.len());
    call.send(&chunk).await;
    let response = sent.await.expect("an answer");
    // The body is not read, so its window stays full.
    while call.try_send(chunk.as_bytes()).await {}
    gateway.ledger_is_zero().await;
    drop(response);
    gateway.end().await;
}

#[tokio::test]
async fn at_shutdown_streams_finish_and_the_connection_closes() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let address = gateway.address();
    let (mut client, running) = connect(&gateway).await;
    let sent = client.send_request(request("/v1/chat/completions", chat_stream("m", "hi")));
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("zero")).await;
    let response = sent.await.expect("an answer");
    let stopping = tokio::spawn(gateway.shut_down());
    eventually("new connections are refused", || std::net::TcpStream::connect(address).is_err()).await;
    call.chunk(&event("one")).await;
    call.end_stream().await;
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    assert_eq!(body, [event("zero"), event("one")].concat());
    assert!(soon("the end", stopping).await.expect("no panic"));
    soon("the connection ends", running).await.expect("no panic");
}

#[tokio::test]
async fn a_gateway_that_shuts_down_asks_clients_of_http2_to_leave_and_serves_new_ones() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.shutdown_delay = Duration::from_secs(3600);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut client, running) = connect(&gateway).await;
    let sent = client.send_request(request("/v1/chat/completions", chat("m", "one")));
    let call = engine.call().await;
    let (address, fleet) = (gateway.address(), gateway.fleet().clone());
    let (hurry, hurried) = tokio::sync::oneshot::channel::<()>();
    let stopping = tokio::spawn(gateway.shut_down_or(async { hurried.await.expect("told") }));
    eventually("it stops", || fleet.stopping.load(std::sync::atomic::Ordering::Relaxed)).await;
    call.answer(200, "{}").await;
    assert_eq!(soon("the answer", sent).await.expect("an answer").status(), 200);
    soon("the connection ends by itself", running).await.expect("no panic");
    let (mut late, _running) = connect_to(address).await;
    for _ in 0..2 {
        let asked = late.send_request(request("/v1/chat/completions", chat("m", "two")));
        let (answer, _) = tokio::join!(asked, engine.answer("{}"));
        assert_eq!(answer.expect("an answer").status(), 200);
    }
    hurry.send(()).expect("it waits");
    soon("the end", stopping).await.expect("no panic");
}
