//! What one tenant can learn of what another has sent: nothing that placement, receipts, headers or engines tell.

use kvlane_live::auth::Role;
use kvlane_live::config::{Config, KeySpec};
use kvlane_live::secret::KeyHash;
use kvlane_live::testing::{
    CachingEngine, Client, FakeEngine, Reply, TestGateway, caching_config, caching_gateway, config, tokens,
};
use serde_json::{Value, json};

/// Longer than many blocks, and no block of it is like any other.
fn prompt(of: &str) -> String {
    (0..200).map(|n| format!("{of} {n} ")).collect()
}

fn of_two_tenants(mut config: Config, isolates: bool) -> Config {
    let key = |name: &str| KeySpec {
        name: name.into(),
        sha256: KeyHash::of(&format!("k-{name}")),
        role: Role::User,
        trusted: false,
    };
    config.auth.keys = ["ann", "bob", "carl", "dora", "emil"].map(key).to_vec();
    config.auth.isolate_tenants = isolates;
    config
}

/// What somebody asks, what the engine was sent, and what the client was told.
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

/// All that the last decision says of what is cached.
async fn seen(gateway: &TestGateway) -> (u64, Value) {
    let decision = gateway.decisions().await[0].clone();
    let candidate = &decision["candidates"][0];
    (
        decision["overlap_tokens"].as_u64().expect("a number"),
        json!([candidate["overlap_tokens"], candidate["predicted"]]),
    )
}

#[tokio::test]
async fn what_one_tenant_has_sent_is_news_when_another_sends_it() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(of_two_tenants(config(), true), &[&engine]).await;
    let text = prompt("secret");
    let path = "/v1/completions";
    let (first, reply) = ask(&gateway, &engine, "ann", "", path, completion(&text)).await;
    let (unknown, nothing) = seen(&gateway).await;
    let new = reply.header("x-router-reason").map(str::to_owned);
    assert_eq!(unknown, 0, "nobody has sent it before");
    let salt = first["cache_salt"].as_str().expect("a salt").to_owned();

    ask(&gateway, &engine, "ann", "", path, completion(&text)).await;
    assert!(seen(&gateway).await.0 > 300, "she finds what she has sent");

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
            "as if nobody had sent it: {who}"
        );
        assert_ne!(sent["cache_salt"].as_str().expect("a salt"), salt, "engines keep them apart, too: {who}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn without_isolation_tenants_share_what_they_have_in_common_unless_they_say_a_salt() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(of_two_tenants(config(), false), &[&engine]).await;
    let (text, path) = (prompt("common"), "/v1/completions");
    let (sent, _) = ask(&gateway, &engine, "ann", "", path, completion(&text)).await;
    assert_eq!(sent, completion(&text), "it goes on as it came");
    ask(&gateway, &engine, "bob", "", path, completion(&text)).await;
    assert!(seen(&gateway).await.0 > 300);
    let mut salted = completion(&text);
    salted["cache_salt"] = json!("bobs");
    let (sent, _) = ask(&gateway, &engine, "bob", "", path, salted.clone()).await;
    assert_eq!((seen(&gateway).await.0, sent), (0, salted));
    gateway.end().await;
}

#[tokio::test]
async fn what_engines_tell_of_their_caches_helps_nobody_but_whose_it_is() {
    for (isolates, found) in [(true, 0), (false, 16)] {
        let mut engine = CachingEngine::start().await;
        engine.http.set_tokenizer(|_| Some(tokens(1, 5)));
        let config = of_two_tenants(caching_config(), isolates);
        let (gateway, seats) = caching_gateway(config, &[&engine]).await;
        let stored = engine.store(1, 4);
        engine.feed.publish(stored);
        seats[0].is_right(&engine).await;
        ask(
            &gateway,
            &engine.http,
            "bob",
            "",
            "/v1/completions",
            completion("what somebody else had cached"),
        )
        .await;
        assert_eq!(seen(&gateway).await.0, found, "isolated: {isolates}");
        gateway.end().await;
    }
}

#[tokio::test]
async fn every_api_that_knows_a_salt_is_sent_the_tenants_and_no_other() {
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
            assert_eq!(sent, body, "all else as it came");
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn no_prompt_answer_key_or_tenant_is_in_what_operators_see() {
    let engine = FakeEngine::start("m").await;
    let mut config = of_two_tenants(config(), true);
    let boss =
        KeySpec { name: "boss".into(), sha256: KeyHash::of("k-boss"), role: Role::Admin, trusted: false };
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
