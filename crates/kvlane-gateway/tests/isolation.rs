//! Isolation of tenants: placement, receipts, headers and engines reveal nothing of another tenant's requests.

use kvlane_gateway::config::{Config, LimitSpec};
use kvlane_gateway::testing::{
    CachingEngine, Client, FakeEngine, Reply, TestGateway, caching_config, caching_gateway, config, key,
    next_call, tokens,
};
use kvlane_http::secret::Secret;
use kvlane_proxy::auth::Role;
use serde_json::{Value, json};

/// A prompt of many blocks, all different.
fn prompt(of: &str) -> String {
    (0..200).map(|n| format!("{of} {n} ")).collect()
}

fn of_two_tenants(mut config: Config, isolates: bool) -> Config {
    config.auth.keys = ["ann", "bob", "carl", "dora", "emil"].map(|name| key(name, Role::User)).to_vec();
    config.auth.isolate_tenants = isolates;
    config
}

/// Sends a request; returns the engine's request and the client's response.
async fn ask(
    gateway: &TestGateway,
    engine: &FakeEngine,
    who: &str,
    fields: &str,
    path: &str,
    body: Value,
) -> (Value, Reply) {
    let mut client = Client::connect(gateway.address()).await;
    let fields = format!("authorization: Bearer k-{who}\r\n{fields}");
    client.request_with("POST", path, &fields, &body.to_string()).await;
    let ((_, sent), reply) = tokio::join!(engine.answer(r#"{"id":"x","choices":[]}"#), client.reply());
    assert_eq!(reply.status, 200);
    (serde_json::from_slice(&sent).expect("JSON"), reply)
}

fn completion(text: &str) -> Value {
    json!({"model": "m", "prompt": text})
}

/// What the last decision shows of cached tokens.
async fn seen(gateway: &TestGateway) -> (u64, Value) {
    let decision = gateway.decisions().await[0].clone();
    let candidate = &decision["candidates"][0];
    (
        decision["overlap_tokens"].as_u64().expect("a number"),
        json!([candidate["overlap_tokens"], candidate["predicted"]]),
    )
}

/// Invariant: With `isolate_tenants`, one tenant's prompt is never a cache hit for another tenant.
///
/// Also held by `kv_events_reveal_nothing_to_other_tenants`.
#[tokio::test]
async fn one_tenants_prompt_is_never_a_cache_hit_for_another() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(of_two_tenants(config(), true), &[&engine]).await;
    let text = prompt("secret");
    let path = "/v1/completions";
    let (first, reply) = ask(&gateway, &engine, "ann", "", path, completion(&text)).await;
    let (unknown, nothing) = seen(&gateway).await;
    let new = reply.header("x-router-reason").map(str::to_owned);
    assert_eq!(unknown, 0, "the prompt is new");
    let salt = first["cache_salt"].as_str().expect("a salt").to_owned();

    ask(&gateway, &engine, "ann", "", path, completion(&text)).await;
    assert!(seen(&gateway).await.0 > 300, "her own prompt is a cache hit");

    let named = "x-llm-d-inference-fairness-id: ann\r\nx-session-id: s\r\n";
    let mut salted = completion(&text);
    salted["cache_salt"] = json!(salt);
    // Each is a tenant that has sent nothing yet.
    for (who, fields, body) in [
        ("bob", "", completion(&text)),
        ("carl", named, completion(&text)),
        ("dora", "", salted),
        ("emil", named, completion(&prompt("other"))),
    ] {
        let (sent, reply) = ask(&gateway, &engine, who, fields, path, body).await;
        assert_eq!(seen(&gateway).await, (0, nothing.clone()), "{who}");
        assert_eq!(
            reply.header("x-router-reason").map(str::to_owned),
            new,
            "as if the prompt were new: {who}"
        );
        assert_ne!(sent["cache_salt"].as_str().expect("a salt"), salt, "engines isolate them, too: {who}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn without_isolation_tenants_share_prefixes_unless_they_send_a_salt() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(of_two_tenants(config(), false), &[&engine]).await;
    let (text, path) = (prompt("common"), "/v1/completions");
    let (sent, _) = ask(&gateway, &engine, "ann", "", path, completion(&text)).await;
    assert_eq!(sent, completion(&text), "it is forwarded unchanged");
    ask(&gateway, &engine, "bob", "", path, completion(&text)).await;
    assert!(seen(&gateway).await.0 > 300);
    let mut salted = completion(&text);
    salted["cache_salt"] = json!("bobs");
    let (sent, _) = ask(&gateway, &engine, "bob", "", path, salted.clone()).await;
    assert_eq!((seen(&gateway).await.0, sent), (0, salted));
    gateway.end().await;
}

#[tokio::test]
async fn kv_events_reveal_nothing_to_other_tenants() {
    for (isolates, found) in [(true, 0), (false, 16)] {
        let mut engine = CachingEngine::start().await;
        engine.http.set_tokenizer(|_| Some(tokens(1, 5)));
        let config = of_two_tenants(caching_config(), isolates);
        let (gateway, endpoints) = caching_gateway(config, &[&engine]).await;
        engine.publish(1, 4);
        endpoints[0].is_right(&engine).await;
        ask(
            &gateway,
            &engine.http,
            "bob",
            "",
            "/v1/completions",
            completion("another tenant's cached prompt"),
        )
        .await;
        assert_eq!(seen(&gateway).await.0, found, "isolated: {isolates}");
        gateway.end().await;
    }
}

#[tokio::test]
async fn every_api_with_a_salt_gets_the_tenants() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(of_two_tenants(caching_config(), true), &[&engine]).await;
    let messages = json!([{"role": "user", "content": "hello"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "m", "messages": messages, "cache_salt": "theirs"})),
        ("/v1/completions", json!({"cache_salt": null, "model": "m", "prompt": "hello"})),
        ("/v1/responses", json!({"model": "m", "input": "hello"})),
    ] {
        let (anns, _) = ask(&gateway, &engine, "ann", "", path, body.clone()).await;
        let (bobs, _) = ask(&gateway, &engine, "bob", "", path, body.clone()).await;
        assert_ne!(anns["cache_salt"], bobs["cache_salt"], "{path}");
        for mut sent in [anns, bobs] {
            assert_eq!(sent["cache_salt"].as_str().map(str::len), Some(32), "{path}");
            sent["cache_salt"] = body.get("cache_salt").cloned().unwrap_or_default();
            let mut body = body.clone();
            body["cache_salt"] = sent["cache_salt"].clone();
            assert_eq!(sent, body, "all other fields are unchanged");
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_is_relayed_unparsed_is_salted_or_rejected() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(of_two_tenants(config(), true), &[&engine]).await;
    let body = json!({"model": "m", "input": "hello", "cache_salt": "theirs"});
    let mut salts = Vec::new();
    for who in ["ann", "bob"] {
        let (mut sent, _) = ask(&gateway, &engine, who, "", "/v1/pooling", body.clone()).await;
        salts.push(sent["cache_salt"].take());
        let mut rest = body.clone();
        rest["cache_salt"].take();
        assert_eq!(sent, rest);
    }
    assert!(salts[0] != salts[1] && salts[0].as_str().is_some_and(|salt| salt.len() == 32), "{salts:?}");
    let refused = async |method: &str, path: &str, body: &str| {
        let mut client = Client::connect(gateway.address()).await;
        client.request_with(method, path, "authorization: Bearer k-ann\r\n", body).await;
        let reply = client.reply().await;
        (reply.status, reply.error_code())
    };
    assert_eq!(
        refused("POST", "/v1/pooling", "hello").await,
        (400, "invalid_body".into()),
        "a body that is not an object cannot be salted"
    );
    assert_eq!(refused("POST", "/v1/pooling", r#"{"cache_salt":[]}"#).await.0, 400);
    assert_eq!(refused("GET", "/v1/files", "").await, (403, "not_isolated".into()));
    assert_eq!(refused("GET", "/v1/files/f", "").await, (404, "object_not_found".into()));
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn only_its_maker_can_use_a_stored_response_and_it_goes_to_its_engine() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = of_two_tenants(config(), true);
    config.routing.policy = kvlane_core::policy::PolicyConfig::RoundRobin(Default::default());
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let send = async |who: &str, method: &str, path: &str, body: Value| {
        let mut client = Client::connect(gateway.address()).await;
        let fields = format!("authorization: Bearer k-{who}\r\n");
        let body = if body.is_null() { String::new() } else { body.to_string() };
        client.request_with(method, path, &fields, &body).await;
        client
    };
    for n in 0..4 {
        let id = format!("resp_{n}");
        let mut client = send("ann", "POST", "/v1/responses", json!({"model": "m", "input": "hello"})).await;
        let (maker, call) = next_call(&[&a, &b]).await;
        call.answer(200, &format!(r#"{{"id":"{id}","output":[]}}"#)).await;
        client.reply().await;
        let path = format!("/v1/responses/{id}");
        let more = json!({"model": "m", "input": "more", "previous_response_id": id});
        for (method, path, body) in [
            ("GET", path.as_str(), Value::Null),
            ("POST", "/v1/responses", more),
            ("DELETE", &path, Value::Null),
        ] {
            let mut others = send("bob", method, path, body.clone()).await;
            let reply = others.reply().await;
            assert_eq!((reply.status, reply.error_code().as_str()), (404, "object_not_found"), "{method}");
            let mut own = send("ann", method, path, body).await;
            let (asked, call) = next_call(&[&a, &b]).await;
            assert_eq!(asked, maker, "{method} {path}");
            call.answer(200, "{}").await;
            assert_eq!(own.reply().await.status, 200);
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn salts_depend_on_the_shared_key_only() {
    let salt_of = async |key: Option<&str>| {
        let engine = FakeEngine::start("m").await;
        let mut config = of_two_tenants(config(), true);
        config.auth.tenant_salt_key = key.map(Secret::new);
        let gateway = TestGateway::start(config, &[&engine]).await;
        let (sent, _) = ask(&gateway, &engine, "ann", "", "/v1/completions", completion("hello")).await;
        gateway.end().await;
        sent["cache_salt"].as_str().expect("a salt").to_owned()
    };
    let (one, other) = (Some("0123456789abcdef"), Some("0123456789abcdeF"));
    assert_eq!(salt_of(one).await, salt_of(one).await);
    assert_ne!(salt_of(one).await, salt_of(other).await);
    assert_ne!(salt_of(None).await, salt_of(None).await, "without a shared key each gateway makes its own");
}

#[tokio::test]
async fn the_admin_api_shows_no_prompt_answer_key_or_tenant() {
    let engine = FakeEngine::start("m").await;
    let mut config = of_two_tenants(config(), true);
    let boss = key("boss", Role::Admin);
    config.auth.keys.push(boss);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut body = completion(&prompt("xyzzy"));
    (body["user"], body["cache_salt"]) = (json!("plugh"), json!("frotz"));
    let fields = "x-session-id: plover\r\nx-llm-d-inference-fairness-id: zork\r\n";
    ask(&gateway, &engine, "ann", fields, "/v1/completions", body).await;
    for path in ["/metrics", "/decisions", "/workers", "/readiness", "/list_workers"] {
        let mut client = Client::connect(gateway.metrics_address()).await;
        client.request_with("GET", path, "authorization: Bearer k-boss\r\n", "").await;
        let page = client.reply().await;
        assert_eq!(page.status, 200, "{path}");
        for secret in ["xyzzy", "plugh", "frotz", "plover", "zork", "k-ann", "k-boss"] {
            assert!(!page.text().contains(secret), "{secret} is in {path}");
        }
    }
    gateway.end().await;
}

/// Response headers that depend on other tenants: the worker, the reason, and the time of each step.
const TELLTALE: [&str; 3] = ["x-router-backend", "x-router-reason", "server-timing"];

#[tokio::test]
async fn isolated_tenants_get_no_headers_about_placement_and_timing() {
    let engine = FakeEngine::start("m").await;
    for isolates in [true, false] {
        let mut config = of_two_tenants(config(), isolates);
        config.auth.keys[4].role = Role::Admin;
        let gateway = TestGateway::start(config, &[&engine]).await;
        for (who, told) in [("ann", !isolates), ("bob", !isolates), ("emil", true)] {
            let fields = format!("authorization: Bearer k-{who}\r\n");
            let mut client = Client::connect(gateway.address()).await;
            let body = completion("hello").to_string();
            client.request_with("POST", "/v1/completions", &fields, &body).await;
            let answer = async {
                let mut call = engine.call().await;
                let head = "HTTP/1.1 200 OK\r\nserver-timing: scheduler;dur=3\r\ncontent-length: 2\r\n\r\n{}";
                call.send(head).await;
                call.keep();
            };
            let (reply, ()) = tokio::join!(client.reply(), answer);
            assert_eq!(reply.status, 200);
            for name in TELLTALE {
                assert_eq!(reply.header(name).is_some(), told, "{name} to {who}, isolated: {isolates}");
            }
            assert!(reply.header("x-request-id").is_some());
        }
        // A client's key gives no access to pages about others.
        for path in ["/decisions", "/workers", "/metrics", "/whatif"] {
            let mut client = Client::connect(gateway.address()).await;
            client.request_with("GET", path, "authorization: Bearer k-ann\r\n", "").await;
            assert_eq!(client.reply().await.status, 403, "{path}");
        }
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_tenants_rate_limit_headers_do_not_depend_on_other_tenants_answers() {
    let engine = FakeEngine::start("m").await;
    let mut config = of_two_tenants(config(), true);
    config.limits = vec![LimitSpec { tokens_per_minute: 100_000, ..LimitSpec::default() }];
    let gateway = TestGateway::start_at_speed(config, &[&engine], 0.0).await;
    let left = async |who: &str, answered: u32| {
        let mut client = Client::connect(gateway.address()).await;
        let fields = format!("authorization: Bearer k-{who}\r\n");
        client.request_with("POST", "/v1/completions", &fields, &completion("hello").to_string()).await;
        let usage = json!({"usage": {"prompt_tokens": 2, "completion_tokens": answered}}).to_string();
        let (_, reply) = tokio::join!(engine.answer(&usage), client.reply());
        gateway.ledger_is_zero().await;
        reply.header("x-ratelimit-remaining-tokens").map(str::to_owned)
    };
    let before = left("ann", 10).await;
    assert!(before.is_some());
    for _ in 0..5 {
        left("bob", 5_000).await;
    }
    assert_eq!(left("carl", 10).await, before, "the same as for the first tenant");
    gateway.end().await;
}
