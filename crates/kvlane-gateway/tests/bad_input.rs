//! Invalid and malicious requests: each is rejected with a reason, and no engine receives it.

use std::time::Duration;

use kvlane_gateway::testing::{Client, FakeEngine, Reply, TestGateway, chat, config, event};
use serde_json::{Value, json};

async fn post(gateway: &TestGateway, path: &str, body: &[u8]) -> Reply {
    let mut client = gateway.client().await;
    client.send(format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len())).await;
    client.send(body).await;
    client.reply().await
}

#[tokio::test]
async fn an_invalid_body_is_rejected_with_the_reason() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let deep = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":{}"a"{}}}]}}"#,
        "[".repeat(5000),
        "]".repeat(5000)
    );
    let valid = chat("m", "hello");
    let truncated = &valid[..valid.len() - 5];
    for (what, body, code) in [
        ("empty", b"".as_slice(), "invalid_body"),
        ("malformed", b"{\"model\": m}", "invalid_body"),
        ("no object", b"[1, 2]", "invalid_body"),
        ("truncated", truncated.as_bytes(), "invalid_body"),
        ("deeply nested", deep.as_bytes(), "invalid_body"),
        (
            "not UTF-8",
            b"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}",
            "invalid_body",
        ),
        ("duplicate key", br#"{"model":"m","model":"n","messages":[]}"#, "invalid_body"),
        ("a second document", br#"{"model":"m","messages":[]}{}"#, "invalid_body"),
        ("no prompt", br#"{"model":"m"}"#, "invalid_body"),
        ("a model that is not a string", br#"{"model":7,"messages":[]}"#, "invalid_body"),
    ] {
        let reply = post(&gateway, "/v1/chat/completions", body).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (400, code), "{what}: {}", reply.text());
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error", "{what}");
        gateway.ledger_is_zero().await;
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn every_api_rejects_empty_unclosed_and_promptless_bodies() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/rerank",
        "/v1/score",
        "/tokenize",
        "/detokenize",
        "/generate",
    ] {
        for body in ["", "{", r#"{"model":"m"}"#] {
            let reply = post(&gateway, path, body.as_bytes()).await;
            assert_eq!((reply.status, reply.error_code().as_str()), (400, "invalid_body"), "{path} {body:?}");
        }
        let reply = gateway.ask("GET", path, "").await;
        assert_eq!((reply.status, reply.error_code().as_str()), (405, "method_not_allowed"), "{path}");
        let envelope = if path == "/v1/messages" { json!("error") } else { Value::Null };
        assert_eq!(reply.json()["type"], envelope, "{path}: each API has its own envelope");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn unknown_models_and_paths_are_not_found() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("gpt-9", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "model_not_found"));
    assert!(reply.text().contains("gpt-9"));
    let huge = "x".repeat(1 << 20);
    let reply = gateway.ask("POST", "/v1/chat/completions", chat(&huge, "hi")).await;
    assert_eq!(reply.status, 404);
    assert!(reply.body.len() < 1000, "a long name is shortened");
    for (method, path) in [("GET", "/"), ("POST", "/v2/chat"), ("GET", "/metrics"), ("GET", "/chat")] {
        let reply = gateway.ask(method, path, "").await;
        assert_eq!((reply.status, reply.error_code().as_str()), (404, "not_found"), "{path}");
    }
    let count = gateway.metric(r#"kvlane_requests_total{model="",api="other",code="404"}"#).await;
    assert_eq!(count, Some(4.0), "unknown paths do not become labels");
    gateway.end().await;
}

#[tokio::test]
async fn a_body_that_is_too_large_is_rejected_announced_or_not() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.max_payload_size = 1000;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let body = chat("m", &"x".repeat(3 << 20));
    let reply = post(&gateway, "/v1/chat/completions", body.as_bytes()).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "body_too_large"));
    assert_eq!(reply.header("connection"), Some("close"));
    assert!(reply.text().contains("1000"), "the limit is in the message: {}", reply.text());

    for chunk in [900, 1001, 70_000] {
        let mut client = gateway.client().await;
        client
            .send("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            .await;
        for piece in body.as_bytes()[..140_000].chunks(chunk) {
            client.send(format!("{:x}\r\n{}\r\n", piece.len(), String::from_utf8_lossy(piece))).await;
        }
        client.send("0\r\n\r\n").await;
        let reply = client.reply().await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (413, "body_too_large"),
            "in chunks of {chunk}"
        );
    }
    let fits = chat("m", "x");
    let fits = chat("m", &"x".repeat(1001 - fits.len()));
    assert_eq!(fits.len(), 1000);
    // The limit itself is allowed.
    gateway.served(&engine, &fits).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_hundred_megabytes_are_rejected_by_default() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat("m", &"0123456789".repeat(10 << 20));
    let reply = post(&gateway, "/v1/chat/completions", body.as_bytes()).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "body_too_large"));
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_client_that_expects_100_continue_is_rejected_before_it_sends_the_body() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    let fields = "host: x\r\nexpect: 100-continue\r\ncontent-length: 999999999\r\n";
    client.send(format!("POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n")).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "body_too_large"));
    client.closed().await;
    gateway.end().await;
}

/// Invariant: A slow client cannot hold resources beyond its timeouts.
///
/// Also held by `a_slow_body_times_out`, `a_client_that_stops_reading_is_disconnected`,
/// `a_client_that_grants_no_flow_control_window_is_disconnected`.
#[tokio::test]
async fn a_slow_head_and_an_idle_connection_are_closed() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.header_timeout = Duration::from_millis(50);
    let gateway = TestGateway::start(config, &[&engine]).await;
    for beginning in [
        "",
        "P",
        "PRI * HTTP/2.0\r\n\r\nSM",
        "POST /v1/chat",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a",
    ] {
        let mut client = gateway.client().await;
        client.send(beginning).await;
        client.closed().await;
    }
    let mut client = gateway.client().await;
    client.request("GET", "/liveness", "").await;
    assert_eq!(client.reply().await.status, 200);
    assert_eq!(client.closed().await, b"", "an idle connection is closed without a response");
    gateway.end().await;
}

#[tokio::test]
async fn a_slow_body_times_out() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.body_timeout = Duration::from_millis(50);
    let gateway = TestGateway::start(config, &[&engine]).await;
    for framing in ["content-length: 100", "transfer-encoding: chunked"] {
        let mut client = gateway.client().await;
        client.send(format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n")).await;
        client.send(if framing.starts_with('c') { "{\"model" } else { "5\r\n{\"mod" }).await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (408, "body_timeout"));
        client.closed().await;
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_client_that_disconnects_while_sending_its_body_leaves_no_state_behind() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"model").await;
    drop(client);
    let reply = gateway.ask("GET", "/liveness", "").await;
    assert_eq!(reply.status, 200);
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn heads_that_are_too_large_are_rejected() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for fields in ["x: y\r\n".repeat(2000), format!("x: {}\r\n", "y".repeat(40 << 10)).repeat(16)] {
        let mut client = gateway.client().await;
        client
            .try_send(format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{fields}\r\n").as_bytes())
            .await;
        assert_eq!(client.head().await.0, 431);
    }
    gateway.end_quiet(&[&engine]).await;
}

/// Invariant: No head is parsed as two requests: an ambiguous one is rejected, an accepted one reaches the engine as
/// one.
///
/// Also held by `a_request_with_two_body_lengths_reaches_no_engine`,
/// `bytes_after_a_request_are_the_next_request`.
#[tokio::test]
async fn smuggled_requests_are_rejected() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = chat("m", "hi");
    let length = body.len();
    let start = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";
    for (what, fields) in [
        ("two lengths", format!("content-length: {length}\r\ncontent-length: 0\r\n")),
        ("a list of lengths", format!("content-length: {length}, 0\r\n")),
        ("a signed length", format!("content-length: +{length}\r\n")),
        ("a length that is not decimal", "content-length: 0x10\r\n".into()),
        ("a folded field", format!("x: a\r\n content-length: 0\r\ncontent-length: {length}\r\n")),
        ("a space before the colon", format!("content-length : {length}\r\n")),
        ("another coding", "transfer-encoding: xchunked\r\n".into()),
        ("chunked not last", "transfer-encoding: chunked, identity\r\n".into()),
        ("a control character", format!("x: a\0b\r\ncontent-length: {length}\r\n")),
        ("a bare CR", format!("x: a\rcontent-length: 0\r\ncontent-length: {length}\r\n")),
    ] {
        let mut client = gateway.client().await;
        let smuggled = Client::request_bytes("GET", "/v1/smuggled", "", "");
        client.send(format!("{start}{fields}\r\n{body}{smuggled}")).await;
        let (status, _) = client.head().await;
        assert_eq!(status, 400, "{what}");
        client.closed().await;
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn bytes_after_a_request_are_the_next_request() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    let first = Client::request_bytes("POST", "/v1/chat/completions", "", &chat("m", "hi"));
    client.send(format!("{first}GET /workers/../secret HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    let (head, _) = engine.answer("{}").await;
    assert!(!head.contains("secret"));
    assert_eq!(client.reply().await.status, 200);
    assert_eq!(client.reply().await.status, 403, "an admin path, and `x` is not a name of this machine");
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_client_that_stops_reading_is_disconnected() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.stream_idle_timeout = Duration::from_millis(200);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let client = gateway.begin(kvlane_gateway::testing::chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    let token = event(&"x".repeat(60_000));
    let chunk = format!("{:x}\r\n{token}\r\n", token.len());
    // The engine sends for as long as its bytes are accepted; the client reads nothing.
    while call.try_send(chunk.as_bytes()).await {}
    gateway.ledger_is_zero().await;
    drop(client);
    gateway.end().await;
}
