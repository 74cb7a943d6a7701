//! What goes wrong on the engines' side, as the client sees it: the status, the envelope, and nothing left behind.

use std::time::Duration;

use kvlane_live::config::{Config, WorkerSpec};
use kvlane_live::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, eventually};
use serde_json::json;
use tokio::net::TcpSocket;

/// One attempt and no more.
fn without_retries() -> Config {
    let mut config = config();
    config.retry.max_total_retries = 0;
    config.breaker.failure_threshold = 0;
    config
}

async fn failures(gateway: &TestGateway, engine: &FakeEngine, kind: &str) -> Option<f64> {
    gateway
        .metric(&format!(r#"kvlane_worker_failures_total{{worker="{}",kind="{kind}"}}"#, engine.url()))
        .await
}

#[tokio::test]
async fn garbage_instead_of_an_answer_is_a_bad_gateway() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(80 << 10));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(500));
    let garbage = [
        "SSH-2.0-OpenSSH_9.9\r\n",
        "\0\x01\x02\r\n\r\n",
        "HTTP/1.1 999999 What\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx: ",
        "HTTP/2 200\r\n\r\n",
        &long,
        &many,
    ];
    for (n, bytes) in garbage.iter().enumerate() {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            let mut call = engine.call().await;
            call.try_send(bytes.as_bytes()).await;
        });
        assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"), "{bytes:.40}");
        assert!(reply.text().contains(&engine.url()), "it says who: {}", reply.text());
        assert_eq!(failures(&gateway, &engine, "garbage").await, Some(n as f64 + 1.0), "{bytes:.40}");
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_connection_closed_or_reset_without_an_answer_is_a_bad_gateway() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    for reset in [false, true] {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            let call = engine.call().await;
            if reset {
                call.reset();
            }
        });
        assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"));
    }
    assert_eq!(failures(&gateway, &engine, "broken").await, Some(2.0));
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_refuses_connections_is_a_bad_gateway() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    engine.refuse();
    let address: std::net::SocketAddr = engine.authority().parse().expect("an address");
    eventually("the engine refuses", || std::net::TcpStream::connect(address).is_err()).await;
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"));
    assert!(reply.text().contains("cannot connect"), "{}", reply.text());
    assert_eq!(failures(&gateway, &engine, "connect").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_takes_no_connection_is_a_gateway_timeout() {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let engine = FakeEngine::on(socket.listen(1).expect("it listens"), json!([{"id": "m"}]));
    let mut config = without_retries();
    config.upstream.connect_timeout = Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[&engine]).await;
    engine.stop_accepting();
    // Whoever fills the kernel's queue leaves the next one waiting.
    let mut queued = Vec::new();
    let address: std::net::SocketAddr = engine.authority().parse().expect("an address");
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        queued.push(stream);
        assert!(queued.len() < 64, "the queue has no end");
    }
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "upstream_error"));
    assert_eq!(failures(&gateway, &engine, "connect_timeout").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_never_answers_is_a_gateway_timeout_and_hears_that_nobody_waits() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.request_timeout = Duration::from_millis(50);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (reply, mut call) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), engine.call());
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "upstream_timeout"));
    call.gateway_gone().await;
    assert_eq!(failures(&gateway, &engine, "timeout").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_that_falls_silent_is_cut() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.stream_idle_timeout = Duration::from_millis(50);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut client = gateway.client().await;
    client.request("POST", "/v1/chat/completions", &chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    let (seen, whole) = client.rest().await;
    assert_eq!((String::from_utf8_lossy(&seen).into_owned(), whole), (event("one"), false));
    call.gateway_gone().await;
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_that_never_ends_is_cut_at_the_request_timeout() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.request_timeout = Duration::from_millis(150);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut client = gateway.client().await;
    client.request("POST", "/v1/chat/completions", &chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    let token = event("x");
    let (whole, ()) = tokio::join!(
        async {
            client.head().await;
            client.rest().await.1
        },
        async {
            let chunk = format!("{:x}\r\n{token}\r\n", token.len());
            while call.try_send(chunk.as_bytes()).await {
                tokio::task::yield_now().await;
            }
        }
    );
    assert!(!whole, "it did not end by itself");
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_that_breaks_is_seen_broken_by_the_client() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    let heads =
        ["transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", "content-length: 500\r\n\r\ndata: 1\n\n"];
    for (head, reset) in [(heads[0], false), (heads[0], true), (heads[1], false), (heads[1], true)] {
        let mut client = gateway.client().await;
        client.request("POST", "/v1/chat/completions", &chat_stream("m", "hi")).await;
        let mut call = engine.call().await;
        call.send(format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{head}")).await;
        client.head().await;
        client.see("data: 1").await;
        if reset {
            call.reset()
        } else {
            drop(call)
        }
        let (_, whole) = client.rest().await;
        assert!(!whole, "after {head:?}, reset: {reset}");
        gateway.ledger_is_zero().await;
    }
    assert_eq!(failures(&gateway, &engine, "mid_stream").await, Some(4.0));
    gateway.end().await;
}

#[tokio::test]
async fn broken_chunks_break_the_answer() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    for chunks in ["5\r\nhelloX", "zz\r\n", "5\r\nhello\r\nffffffffffffffffffff\r\n", "5\nhello"] {
        let mut client = gateway.client().await;
        client.request("POST", "/v1/chat/completions", &chat("m", "hi")).await;
        let mut call = engine.call().await;
        call.send(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}")).await;
        let seen = client.closed().await;
        assert!(!seen.ends_with(b"0\r\n\r\n"), "cut, not ended: {chunks:?}");
        call.gateway_gone().await;
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn bytes_after_an_answer_end_the_connection_and_reach_nobody() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.relay_threads = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\nevil",
    ] {
        let mut client = gateway.client().await;
        client.request("POST", "/v1/chat/completions", &chat("m", "hi")).await;
        let mut call = engine.call().await;
        call.send(answer).await;
        assert_eq!(client.reply().await.text(), "{}");
        call.gateway_gone().await;
        client.request("POST", "/v1/chat/completions", &chat("m", "hi")).await;
        engine.answer(r#"{"good":1}"#).await;
        assert_eq!(client.reply().await.text(), r#"{"good":1}"#);
    }
    gateway.end().await;
}

#[tokio::test]
async fn without_any_endpoint_every_request_is_told_so() {
    let mut config = config();
    config.workers = Vec::new();
    let gateway = TestGateway::start(config, &[]).await;
    for (method, path, body) in [
        ("POST", "/v1/chat/completions", chat("m", "hi")),
        ("POST", "/generate", r#"{"text":"a"}"#.into()),
        ("GET", "/v1/x", "".into()),
    ] {
        let reply = gateway.ask(method, path, body).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (503, "no_endpoint_ready"), "{path}");
        assert!(reply.header("retry-after").is_some_and(|after| after.parse::<u64>().is_ok_and(|s| s > 0)));
    }
    assert_eq!(gateway.ask("GET", "/readiness", "").await.status, 503);
    assert_eq!(gateway.ask("GET", "/liveness", "").await.status, 200);
    assert_eq!(gateway.ask("GET", "/v1/models", "").await.json()["data"], json!([]));
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_never_answered_a_probe_gets_no_request() {
    let engine = FakeEngine::start("m").await;
    engine.set_healthy(false);
    let mut config = config();
    config.workers = vec![WorkerSpec { model: Some("m".into()), ..WorkerSpec::new(engine.url()) }];
    let serving = kvlane_live::serve::Serving::start(config).expect("it starts");
    eventually("it was probed", || engine.probes() > 0).await;
    let mut client = kvlane_live::testing::Client::connect(serving.address).await;
    client.request("POST", "/v1/chat/completions", &chat("m", "hi")).await;
    assert_eq!(client.reply().await.status, 503);
    eventually("the problem is told", || serving.fleet.workers()[0].state().problem.is_some()).await;
    client.request("GET", "/readiness", "").await;
    let readiness = client.reply().await;
    assert_eq!(readiness.status, 503);
    assert!(
        readiness.json()["down"][0]["problem"].as_str().is_some_and(|why| why.contains("503")),
        "{readiness:?}"
    );
    assert!(engine.is_quiet().await);
    assert!(serving.shut_down().await);
}
