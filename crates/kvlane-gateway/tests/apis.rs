//! The engines' APIs: each path of the table reaches an engine, closed ones do not, and a request finds its model.

use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{
    Client, FakeEngine, Reply, TestGateway, chat, config, in_turn, key, next_call,
};
use kvlane_proxy::auth::Role;
use kvlane_proxy::paths::OwnPath;
use kvlane_wire::api::{Audience, Body, ENGINE_PATHS, EnginePath};
use serde_json::json;

/// A body that has every prompt that an API may need.
const BODY: &str = r#"{"model": "m", "messages": [], "prompt": "a", "input": "a", "query": "a", "documents": ["b"],
    "text_1": "a", "text_2": "b", "text": "a", "token_ids": [1], "tokens": [1]}"#;

fn example(row: &EnginePath) -> String {
    row.path.replace("{}", "a-1")
}

fn body_of(row: &EnginePath, method: &str) -> &'static str {
    if matches!(method, "GET" | "DELETE") || row.body == Body::Empty { "" } else { BODY }
}

async fn ask_with(gateway: &TestGateway, method: &str, path: &str, fields: &str, body: &str) -> Reply {
    let mut client = Client::connect(gateway.address()).await;
    client.request_with(method, path, fields, body).await;
    client.reply().await
}

fn rows(audience: Audience) -> impl Iterator<Item = &'static EnginePath> {
    ENGINE_PATHS.iter().filter(move |row| row.audience == audience)
}

/// Invariant: Every path of the table that is for clients reaches an engine under the table's name, body unchanged.
#[tokio::test]
async fn every_path_for_clients_reaches_an_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    // gRPC methods: `tests/grpc.rs`.
    for row in rows(Audience::Clients).filter(|row| !row.is_grpc()) {
        let path = example(row);
        let mut names = vec![path.clone(), format!("{path}/")];
        let bare =
            path.strip_prefix("/v1").filter(|bare| EnginePath::of(bare).is_some_and(|(of, _)| of == row));
        // The gateway's own decisions are at `/decisions`.
        names.extend(bare.filter(|bare| OwnPath::of(bare).is_none()).map(str::to_owned));
        for (name, method) in
            names.iter().flat_map(|name| row.methods.split(", ").map(move |method| (name, method)))
        {
            let body = body_of(row, method);
            let target = format!("{name}?x=1");
            let (reply, (head, received)) =
                tokio::join!(gateway.ask(method, &target, body), engine.answer("{}"));
            assert!(head.starts_with(&format!("{method} {path}?x=1 HTTP/1.1\r\n")), "{name}: {head}");
            assert_eq!(
                (reply.status, String::from_utf8_lossy(&received).as_ref()),
                (200, body),
                "{method} {name}"
            );
        }
    }
    gateway.end().await;
}

/// Invariant: No path that administers an engine reaches one, by any method or name, unless the configuration opens it.
#[tokio::test]
async fn no_closed_path_reaches_an_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for row in rows(Audience::Closed) {
        let path = example(row);
        for (method, name) in [("POST", path.clone()), ("GET", path.clone()), ("PUT", format!("{path}/"))] {
            let reply = gateway.ask(method, &name, BODY).await;
            assert_eq!((reply.status, reply.error_code().as_str()), (404, "not_found"), "{method} {name}");
            assert!(reply.text().contains("server.extra_paths"), "{}", reply.text());
        }
    }
    assert!(engine.call_at_hand().await.is_none(), "no engine was reached");
    gateway.end().await;
}

fn with_keys() -> Config {
    let mut config = config();
    config.auth.keys = vec![key("user", Role::User), key("viewer", Role::Viewer)];
    config
}

/// Invariant: A viewer reads what engines say of themselves, and cannot change them by the same paths.
#[tokio::test]
async fn what_is_for_operators_needs_their_role_and_is_only_read() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(with_keys(), &[&engine]).await;
    for row in rows(Audience::Operators) {
        // llama.cpp changes its adapters and properties so.
        let changes = ask_with(&gateway, "POST", row.path, "authorization: Bearer k-viewer\r\n", "{}").await;
        assert_eq!((changes.status, changes.header("allow")), (405, Some("GET")), "{}", row.path);
        let refused = ask_with(&gateway, "GET", row.path, "authorization: Bearer k-user\r\n", "").await;
        assert_eq!(refused.status, 403, "{}", row.path);
        // With a query, because the fake engine answers the gateway's own questions by itself.
        let target = format!("{}?x", row.path);
        let allowed = ask_with(&gateway, "GET", &target, "authorization: Bearer k-viewer\r\n", "");
        let (allowed, _) = tokio::join!(allowed, engine.answer("{}"));
        assert_eq!(allowed.status, 200, "{}", row.path);
    }
    gateway.end().await;
}

/// Invariant: A request that names no model goes to the one that a header names, the default one, or the only one; else
/// its answer lists the choices.
#[tokio::test]
async fn a_request_that_names_no_model_finds_one_or_learns_the_choices() {
    let (a, b) = (FakeEngine::start("alpha").await, FakeEngine::start("beta").await);
    for (default, fields, expected) in [
        (None, "x-kvlane-model: beta\r\n", Some(1)),
        (None, "x-gateway-model-name: alpha\r\n", Some(0)),
        (Some("beta"), "", Some(1)),
        (Some("beta"), "x-kvlane-model: alpha\r\n", Some(0)),
        (None, "", None),
    ] {
        let mut config = config();
        config.routing.default_model = default.map(str::to_owned);
        let gateway = TestGateway::start(config, &[&a, &b]).await;
        for (path, body) in [
            ("/v1/chat/completions", r#"{"messages": []}"#),
            ("/tokenize", r#"{"prompt": "a"}"#),
            ("/v1/audio/transcriptions", "--b\r\n"),
        ] {
            let asked = ask_with(&gateway, "POST", path, fields, body);
            let Some(expected) = expected else {
                let reply = asked.await;
                assert_eq!((reply.status, reply.error_code().as_str()), (400, "missing_field"), "{path}");
                assert!(reply.text().contains("alpha, beta"), "{}", reply.text());
                continue;
            };
            let (reply, index) = tokio::join!(asked, async {
                let (index, call) = next_call(&[&a, &b]).await;
                call.answer(200, "{}").await;
                index
            });
            assert_eq!((reply.status, index), (200, expected), "{path} {fields:?} {default:?}");
        }
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_request_that_creates_something_is_sent_again_only_if_no_engine_received_it() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let busy = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";
    for (path, failure, again) in [
        ("/v1/files", "", false),
        ("/v1/batches", "HTTP/1.1 200 O", false),
        ("/v1/files", busy, true),
        ("/v1/chat/completions", "", true),
    ] {
        let (reply, ()) = tokio::join!(gateway.ask("POST", path, BODY), async {
            let (_, mut call) = next_call(&[&a, &b]).await;
            call.send(failure).await;
            drop(call);
            if again {
                next_call(&[&a, &b]).await.1.answer(200, "{}").await;
            }
        });
        assert_eq!(reply.status, if again { 200 } else { 502 }, "{path} {failure:?}");
        assert!(a.call_at_hand().await.is_none() && b.call_at_hand().await.is_none(), "{path} {failure:?}");
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn head_is_answered_where_get_is_and_options_by_the_gateway() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    client.request("HEAD", "/v1/files/f-1/content", "").await;
    let (head, _) = engine.answer("content").await;
    assert!(head.starts_with("GET /v1/files/f-1/content HTTP/1.1\r\n"), "{head}");
    let (status, headers) = client.head().await;
    assert!(status == 200 && headers.contains(&("content-length".into(), "7".into())), "{headers:?}");
    for (path, allow) in [
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/v1/files", "GET, POST, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
    ] {
        let reply = gateway.ask("OPTIONS", path, "").await;
        assert_eq!((reply.status, reply.header("allow")), (204, Some(allow)), "{path}");
        assert_eq!(reply.header("access-control-allow-origin"), None, "no origin is allowed by default");
    }
    assert_eq!(gateway.ask("OPTIONS", "/unknown", "").await.status, 404);
    gateway.end().await;
}

#[tokio::test]
async fn scripts_of_allowed_origins_may_call_and_others_may_not() {
    let engine = FakeEngine::start("m").await;
    let mut config = with_keys();
    config.server.cors_allowed_origins = vec!["https://chat.example.com".into()];
    let gateway = TestGateway::start(config, &[&engine]).await;
    let preflight = |origin: &str| {
        format!(
            "origin: {origin}\r\naccess-control-request-method: POST\r\n\
             access-control-request-headers: authorization, content-type\r\n"
        )
    };
    let path = "/v1/chat/completions";
    let allowed = ask_with(&gateway, "OPTIONS", path, &preflight("https://chat.example.com"), "").await;
    assert_eq!(allowed.status, 204, "without a key");
    for (name, value) in [
        ("access-control-allow-origin", "https://chat.example.com"),
        ("access-control-allow-headers", "authorization, content-type"),
        ("access-control-allow-methods", "POST, OPTIONS"),
    ] {
        assert_eq!(allowed.header(name), Some(value));
    }
    let refused = ask_with(&gateway, "OPTIONS", path, &preflight("https://evil.example"), "").await;
    assert_eq!(refused.header("access-control-allow-origin"), None);
    // The script can read errors, too.
    let fields = "origin: https://chat.example.com\r\n";
    let denied = ask_with(&gateway, "POST", path, fields, &chat("m", "hi")).await;
    assert_eq!(
        (denied.status, denied.header("access-control-allow-origin")),
        (401, Some("https://chat.example.com"))
    );
    gateway.end().await;
}

#[tokio::test]
async fn the_gateways_load_is_the_number_of_its_requests() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let load = async || gateway.ask("GET", "/load", "").await.json();
    assert_eq!(load().await, json!({"server_load": 0}));
    let (client, call) = gateway.stream(&engine, "hi").await;
    assert_eq!(load().await, json!({"server_load": 1}));
    drop((client, call));
    for path in ["/ping", "/health_generate", "/health/"] {
        assert_eq!(gateway.ask("GET", path, "").await.status, 200, "{path}");
    }
    gateway.end().await;
}
