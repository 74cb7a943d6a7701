//! Errors of engines as the client sees them: the status, the envelope, and no state left behind.

use std::time::Duration;

use kvlane_gateway::config::{Config, KeySpec, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_gateway::testing::{
    Call, Client, FakeEngine, TestGateway, chat, chat_stream, config, event, eventually,
};
use kvlane_http::secret::KeyHash;
use kvlane_proxy::auth::Role;
use serde_json::{Value, json};
use tokio::net::TcpSocket;

/// One attempt only.
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
async fn a_malformed_response_is_a_bad_gateway() {
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
        assert!(reply.text().contains(&engine.url()), "the message names the worker: {}", reply.text());
        assert_eq!(failures(&gateway, &engine, "garbage").await, Some(n as f64 + 1.0), "{bytes:.40}");
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_connection_closed_or_reset_without_a_response_is_a_bad_gateway() {
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
    engine.close_port();
    let address: std::net::SocketAddr = engine.authority().parse().expect("an address");
    eventually("the engine refuses", || std::net::TcpStream::connect(address).is_err()).await;
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"));
    assert!(reply.text().contains("cannot connect"), "{}", reply.text());
    assert_eq!(failures(&gateway, &engine, "connect").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_accepts_no_connection_is_a_gateway_timeout() {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let engine = FakeEngine::on(socket.listen(1).expect("it listens"), json!([{"id": "m"}]));
    let mut config = without_retries();
    config.upstream.connect_timeout = Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[&engine]).await;
    engine.stop_accepting();
    // When the kernel's queue is full, the next connection attempt waits.
    let mut queued = Vec::new();
    let address: std::net::SocketAddr = engine.authority().parse().expect("an address");
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
        queued.push(stream);
        assert!(queued.len() < 64, "the kernel's queue is not bounded");
    }
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "upstream_error"));
    assert_eq!(failures(&gateway, &engine, "connect_timeout").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_times_out_is_a_504_and_is_cancelled_at_the_engine() {
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
async fn a_silent_stream_is_ended_and_cancelled_at_the_engine() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.stream_idle_timeout = Duration::from_millis(50);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut client, mut call) = gateway.stream(&engine, "one").await;
    call.gateway_gone().await;
    let (last, whole) = client.rest().await;
    assert_eq!((last_error(&last).as_str(), whole), ("stream_silent", true));
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_that_never_ends_is_ended_at_the_request_timeout() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.request_timeout = Duration::from_millis(150);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    let token = event("x");
    let ((seen, whole), ()) = tokio::join!(
        async {
            client.head().await;
            client.rest().await
        },
        async {
            let chunk = format!("{:x}\r\n{token}\r\n", token.len());
            while call.try_send(chunk.as_bytes()).await {
                tokio::task::yield_now().await;
            }
        }
    );
    let last = seen.rsplitn(2, |&byte| byte == b'x').next().unwrap_or_default();
    let last = &last[memchr::memmem::find(last, b"data: ").expect("another event")..];
    assert_eq!((last_error(last).as_str(), whole), ("request_timeout", true));
    gateway.end().await;
}

/// The error code of these bytes, which are an event of a chat.
fn last_error(event: &[u8]) -> String {
    let data = event.strip_prefix(b"data: ").and_then(|event| event.strip_suffix(b"\n\n"));
    let data = data.unwrap_or_else(|| panic!("not one event: {:?}", String::from_utf8_lossy(event)));
    let error = &serde_json::from_slice::<Value>(data).expect("JSON")["error"];
    assert!(error["message"].as_str().is_some_and(|message| message.contains("incomplete")), "{error}");
    error["code"].as_str().expect("a code").to_owned()
}

/// Heads of streams, in both framings.
const STREAM_HEADS: [&str; 2] = [
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncontent-length: 500\r\n\r\n",
];

/// Sends `text` as part of a body with one of [`STREAM_HEADS`].
async fn send_part(call: &mut Call, head: &str, text: &str) {
    if head.contains("chunked") {
        call.chunk(text).await;
    } else {
        call.send(text).await;
    }
}

#[tokio::test]
async fn a_broken_stream_ends_with_an_error_event_of_its_api() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    // Each prompt is another one: a prompt with which several engines broke is tried alone, after a wait.
    let body = |prompt: &str| {
        json!({"model": "m", "stream": true, "max_tokens": 9, "prompt": prompt, "input": prompt, "text": prompt,
            "messages": [{"role": "user", "content": prompt}]})
        .to_string()
    };
    type Read = fn(&str) -> String;
    let openai: Read = |event| last_error(event.as_bytes());
    let anthropic: Read = |event| {
        let data = event.strip_prefix("event: error\ndata: ").expect("an error event");
        let event: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!((&event["type"], &event["error"]["type"]), (&json!("error"), &json!("api_error")));
        assert!(event["error"]["message"].as_str().is_some_and(|message| message.contains("incomplete")));
        "stream_broken".to_owned()
    };
    let responses: Read = |event| {
        let data = event.strip_prefix("event: error\ndata: ").expect("an error event");
        let event: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!("error"), &json!(2)));
        event["code"].as_str().expect("a code").to_owned()
    };
    let paths = [
        ("/v1/chat/completions", openai),
        ("/v1/completions", openai),
        ("/generate", openai),
        ("/v1/messages", anthropic),
        ("/v1/responses", responses),
    ];
    let mut broken = 0.0;
    for (path, read) in paths {
        for (head, reset) in STREAM_HEADS.into_iter().flat_map(|head| [(head, false), (head, true)]) {
            let mut client = gateway.client().await;
            client.request("POST", path, &body(&format!("prompt {broken}"))).await;
            let mut call = engine.call().await;
            call.send(head).await;
            send_part(&mut call, head, "data: 1\n\ndata: 2\n\n").await;
            client.head().await;
            client.see("data: 2\n\n").await;
            // A partial event, which no client could parse.
            send_part(&mut call, head, "event: x\ndata: {\"thi").await;
            if reset {
                call.reset()
            } else {
                drop(call)
            }
            let (last, whole) = client.rest().await;
            assert!(whole, "the stream itself ends properly");
            let last = String::from_utf8(last).expect("text");
            assert_eq!(read(&last), "stream_broken", "{path}: {last}");
            gateway.ledger_is_zero().await;
            broken += 1.0;
        }
    }
    assert_eq!(failures(&gateway, &engine, "mid_stream").await, Some(broken));
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_that_lacks_only_the_end_of_its_connection_is_complete() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    for head in STREAM_HEADS {
        let mut client = gateway.begin(chat_stream("m", "hi")).await;
        let mut call = engine.call().await;
        call.send(head).await;
        send_part(&mut call, head, &[event("one"), "data: [DONE]\n\n".into()].concat()).await;
        client.head().await;
        drop(call);
        let (seen, whole) = client.rest().await;
        assert!(whole && seen.ends_with(b"data: [DONE]\n\n"), "{:?}", String::from_utf8_lossy(&seen));
    }
    assert_eq!(failures(&gateway, &engine, "mid_stream").await, None);
    gateway.end().await;
}

#[tokio::test]
async fn the_client_sees_a_broken_response_that_is_not_an_event_stream() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    let long = "data: ".to_owned() + &"x".repeat(100 << 10);
    for (kind, text) in [
        ("application/json", "{\"half\""),
        ("application/octet-stream", "ab"),
        // An event too long to be held has reached the client in part: no other event can follow it.
        ("text/event-stream", &long),
    ] {
        for head in STREAM_HEADS {
            let head = head.replace("text/event-stream", kind).replace("500", "500000");
            // Another prompt each time: one with which several engines broke is tried alone, after a wait.
            let mut client = gateway.begin(chat_stream("m", &head)).await;
            let mut call = engine.call().await;
            call.send(&head).await;
            send_part(&mut call, &head, text).await;
            client.head().await;
            client.see(&text[text.len() - 2..]).await;
            drop(call);
            assert!(!client.rest().await.1, "{kind}: cut, not ended");
            gateway.ledger_is_zero().await;
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn broken_chunks_break_the_response() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(without_retries(), &[&engine]).await;
    for chunks in ["5\r\nhelloX", "zz\r\n", "5\r\nhello\r\nffffffffffffffffffff\r\n", "5\nhello"] {
        let mut client = gateway.begin(chat("m", chunks)).await;
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
async fn bytes_after_a_response_end_the_connection_and_reach_no_client() {
    let engine = FakeEngine::start("m").await;
    let mut config = without_retries();
    config.server.relay_threads = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\nevil",
    ] {
        let mut client = gateway.begin(chat("m", "hi")).await;
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
async fn without_any_endpoint_every_request_gets_an_error() {
    let mut config = config();
    config.workers = Vec::new();
    let gateway = TestGateway::start(config, &[]).await;
    for (method, path, body) in [
        ("POST", "/v1/chat/completions", chat("m", "hi")),
        ("POST", "/generate", r#"{"text":"a"}"#.into()),
        ("GET", "/v1/files", "".into()),
    ] {
        let reply = gateway.ask(method, path, body).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (503, "no_endpoint_ready"), "{path}");
        assert!(reply.header("retry-after").is_some_and(|after| after.parse::<u64>().is_ok_and(|s| s > 0)));
        assert!(
            reply.text().contains("kvlane has no workers: add one with --worker-urls"),
            "{}",
            reply.text()
        );
    }
    assert_eq!(gateway.ask("GET", "/readiness", "").await.status, 503);
    assert_eq!(gateway.ask("GET", "/liveness", "").await.status, 200);
    assert_eq!(gateway.ask("GET", "/v1/models", "").await.json()["data"], json!([]));
    gateway.end().await;
}

/// Invariant: Where there are keys, only operators are told of workers when no endpoint is ready.
#[tokio::test]
async fn a_client_is_told_why_no_endpoint_is_ready_if_it_may_see_workers() {
    let engine = FakeEngine::start("m").await;
    let key = |name: &str, role| {
        let sha256 = KeyHash::of(&format!("k-{name}"));
        KeySpec::new(name, sha256, role)
    };
    let (mut open, mut locked) = (config(), config());
    // Another worker serves another model: its problem is not the cause.
    let other = WorkerSpec { model: Some("other".into()), ..WorkerSpec::new("http://127.0.0.1:9") };
    open.workers = vec![other, WorkerSpec { model: Some("m".into()), ..WorkerSpec::new(engine.url()) }];
    locked.auth.keys = vec![key("ann", Role::User), key("boss", Role::Admin)];
    locked.workers.clone_from(&open.workers);
    engine.set_healthy(false);
    for (config, who, is_told) in [(open, None, true), (locked, Some("ann"), false)] {
        let gateway = TestGateway::of(Serving::start(config).expect("it starts"));
        let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
        eventually("it has a problem", || worker.state().problem.is_some()).await;
        let mut client = Client::connect(gateway.address()).await;
        let fields = who.map_or_else(String::new, |name| format!("authorization: Bearer k-{name}\r\n"));
        client.request_with("POST", "/v1/chat/completions", &fields, &chat("m", "hi")).await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (503, "no_endpoint_ready"));
        let text = reply.text();
        assert_eq!(text.contains(engine.authority()), is_told, "{text}");
        assert_eq!(text.contains("on the dashboard"), !is_told, "{text}");
        let failures = || gateway.serving().proxy.failures.list();
        eventually("the failure is kept", || !failures().is_empty()).await;
        let reason = &failures()[0].cause.reason;
        assert!(reason.contains(&format!("worker {}: ", engine.url())), "operators are told: {reason}");
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_worker_that_never_answered_a_probe_gets_no_request() {
    let engine = FakeEngine::start("m").await;
    engine.set_healthy(false);
    let mut config = config();
    config.workers = vec![WorkerSpec { model: Some("m".into()), ..WorkerSpec::new(engine.url()) }];
    let serving = Serving::start(config).expect("it starts");
    eventually("it was probed", || engine.probes() > 0).await;
    let mut client = Client::connect(serving.address).await;
    client.request("POST", "/v1/chat/completions", &chat("m", "hi")).await;
    assert_eq!(client.reply().await.status, 503);
    eventually("the problem is shown", || serving.controller.workers()[0].state().problem.is_some()).await;
    client.request("GET", "/readiness", "").await;
    let readiness = client.reply().await;
    assert_eq!(readiness.status, 503);
    assert!(
        readiness.json()["down"][0]["problem"].as_str().is_some_and(|why| why.contains("503")),
        "{readiness:?}"
    );
    TestGateway::of(serving).end_quiet(&[&engine]).await;
}
