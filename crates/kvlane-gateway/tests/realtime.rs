//! WebSockets: bytes pass both ways, and a socket is one request in flight for as long as it is open.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_gateway::config::{LimitSpec, ModelSpec, TargetSpec};
use kvlane_gateway::serve::Cut;
use kvlane_gateway::testing::{Call, Client, FakeEngine, TestGateway, chat, config, eventually};

const KEY: &str = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n";
const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: realtime\r\n\r\n";

/// A client that has asked for a WebSocket.
async fn ask(gateway: &TestGateway, target: &str, fields: &str) -> Client {
    let mut client = gateway.client().await;
    let asked = format!(
        "GET {target} HTTP/1.1\r\nhost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n{KEY}{fields}\r\n"
    );
    client.send(asked).await;
    client
}

/// A WebSocket that is open, with the gateway between its ends.
async fn open(gateway: &TestGateway, engine: &FakeEngine) -> (Client, Call) {
    let mut client = ask(gateway, "/v1/realtime?model=m", "").await;
    let mut call = engine.call().await;
    call.send(SWITCH).await;
    assert_eq!(client.head().await.0, 101);
    (client, call)
}

fn in_flight(gateway: &TestGateway) -> usize {
    gateway.pool("m").router.read(|scheduler| scheduler.in_flight())
}

/// Invariant: An open WebSocket is one request in flight, and none once it is closed by either side.
#[tokio::test]
async fn bytes_pass_both_ways_until_one_side_closes() {
    let (alpha, beta) = (FakeEngine::start("alpha").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[&alpha, &beta]).await;
    for engine_closes in [true, false] {
        let mut client = ask(
            &gateway,
            "/realtime?model=m&x=1",
            "sec-websocket-protocol: realtime\r\nauthorization: Bearer a\r\n",
        )
        .await;
        // Sent before the answer.
        client.send(b"\x81\x02hi").await;
        let mut call = beta.call().await;
        assert_eq!(call.target(), "GET /v1/realtime?model=m&x=1");
        for (name, value) in [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("sec-websocket-version", "13"),
            ("sec-websocket-protocol", "realtime"),
        ] {
            assert_eq!(call.header(name), Some(value), "{name}");
        }
        // The first message comes with the head.
        call.send([SWITCH.as_bytes(), b"\x81\x05hello"].concat()).await;
        let (status, headers) = client.head().await;
        let header =
            |name: &str| headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str());
        assert_eq!(
            (status, header("upgrade"), header("connection")),
            (101, Some("websocket"), Some("upgrade"))
        );
        assert_eq!(header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert_eq!(header("sec-websocket-protocol"), Some("realtime"));
        assert_eq!((header("content-length"), header("transfer-encoding")), (None, None));
        assert_eq!(client.read_exact(7).await, b"\x81\x05hello");
        assert_eq!(call.read_exact(4).await, b"\x81\x02hi");
        assert_eq!(in_flight(&gateway), 1);
        for n in 0..20u8 {
            let large: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8 ^ n).collect();
            let (echo, received) = tokio::join!(
                async {
                    client.send(&large).await;
                    client.read_exact(large.len()).await
                },
                async {
                    let received = call.read_exact(large.len()).await;
                    call.send(&received).await;
                    received
                }
            );
            assert!(received == large && echo == large);
        }
        if engine_closes {
            call.send(b"\x88\x00").await;
            drop(call);
            assert_eq!(client.closed().await, b"\x88\x00");
        } else {
            client.send(b"\x88\x00").await;
            drop(client);
            assert_eq!(call.read_exact(2).await, b"\x88\x00");
            call.drained().await;
        }
        gateway.ledger_is_zero().await;
    }
    gateway.metric_becomes("kvlane_requests_total{model=\"m\",api=\"other\",code=\"101\"}", 2.0).await;
    gateway.end().await;
}

#[tokio::test]
async fn any_other_answer_is_an_ordinary_one() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = ask(&gateway, "/v1/realtime", "").await;
    engine.call().await.answer(403, r#"{"error": "no"}"#).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.text().as_str()), (403, r#"{"error": "no"}"#));
    // The connection serves further requests, and a request that asks for no WebSocket is one like any other.
    client.request("GET", "/v1/realtime", "").await;
    let call = engine.call().await;
    assert_eq!((call.header("upgrade"), call.header("connection")), (None, None));
    call.answer(400, "{}").await;
    assert_eq!(client.reply().await.status, 400);
    // An engine that switches without being asked has failed.
    client.request("GET", "/v1/realtime", "").await;
    engine.call().await.send(SWITCH).await;
    assert_eq!(client.reply().await.status, 502);
    // Other paths have no WebSocket.
    let mut client = ask(&gateway, "/version?x", "").await;
    let call = engine.call().await;
    assert_eq!(call.header("upgrade"), None);
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn an_open_socket_counts_as_a_concurrent_request() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.limits = vec![LimitSpec { concurrent_requests: 1, ..LimitSpec::default() }];
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (client, mut call) = open(&gateway, &engine).await;
    let refused = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!((refused.status, refused.error_code().as_str()), (429, "rate_limited"));
    let mut other = ask(&gateway, "/v1/realtime?model=m", "").await;
    assert_eq!(other.reply().await.status, 429);
    drop(client);
    call.drained().await;
    gateway.ledger_is_zero().await;
    gateway.served(&engine, chat("m", "hi")).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_silent_socket_is_closed() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.stream_idle_timeout = Duration::from_millis(50);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut client, mut call) = open(&gateway, &engine).await;
    client.closed().await;
    call.drained().await;
    gateway.end().await;
}

#[tokio::test]
async fn a_socket_is_no_work_that_its_engine_is_late_with() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (client, call) = open(&gateway, &engine).await;
    let pool = gateway.pool("m");
    eventually("no progress is expected", || pool.endpoints().iter().all(|one| one.vitals.is_idle())).await;
    drop((client, call));
    gateway.end().await;
}

#[tokio::test]
async fn shutdown_waits_for_a_socket_as_for_a_stream() {
    for ends in [true, false] {
        let engine = FakeEngine::start("m").await;
        let gateway = TestGateway::start(config(), &[&engine]).await;
        let address = gateway.address();
        let (mut client, mut call) = open(&gateway, &engine).await;
        let (hurry, hurried) = tokio::sync::oneshot::channel::<()>();
        let stopping = tokio::spawn(gateway.shut_down_or(async { hurried.await.expect("told") }));
        eventually("new connections are refused", || std::net::TcpStream::connect(address).is_err()).await;
        client.send("still there").await;
        assert_eq!(call.read_exact(11).await, b"still there");
        if ends {
            drop(client);
            assert_eq!(stopping.await.expect("no panic"), Cut::default());
        } else {
            hurry.send(()).expect("it waits");
            assert_eq!(stopping.await.expect("no panic").requests, 1);
        }
        call.drained().await;
    }
}

#[tokio::test]
async fn pages_of_other_origins_open_no_socket() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.cors_allowed_origins = vec!["https://chat.example.com".into()];
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut refused = ask(&gateway, "/v1/realtime", "origin: https://evil.example\r\n").await;
    let reply = refused.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (403, "origin_not_allowed"));
    for origin in ["https://chat.example.com", "http://h"] {
        let mut client = ask(&gateway, "/v1/realtime", &format!("origin: {origin}\r\n")).await;
        let mut call = engine.call().await;
        call.send(SWITCH).await;
        assert_eq!(client.head().await.0, 101, "{origin}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_name_of_the_catalogue_in_the_query_becomes_the_engines_own() {
    let engine = FakeEngine::start("org/m").await;
    let target = TargetSpec { model: "org/m".into(), weight: 1, headers: BTreeMap::new(), keys: Vec::new() };
    let mut config = config();
    let spec = ModelSpec { targets: vec![target], ..ModelSpec::default() };
    config.models = BTreeMap::from([("gpt".into(), spec)]);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let _client = ask(&gateway, "/v1/realtime?intent=a&model=gpt", "").await;
    assert_eq!(engine.call().await.target(), "GET /v1/realtime?intent=a&model=org%2Fm");
    gateway.end().await;
}
