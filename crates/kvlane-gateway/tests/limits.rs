//! Limits of each client, which do not affect other clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvlane_gateway::config::{Config, KeySpec, LimitSpec, TokenSource};
use kvlane_gateway::testing::{
    Client, FakeEngine, Reply, TestGateway, chat, chat_stream, config, event, eventually, soon,
};
use kvlane_http::secret::KeyHash;
use kvlane_proxy::auth::Role;
use serde_json::json;

const WHO: &str = "x-llm-d-inference-fairness-id";

fn limits(specs: &[LimitSpec]) -> Config {
    let mut config = config();
    config.limits = specs.to_vec();
    config.retry.max_total_retries = 0;
    config
}

fn each() -> LimitSpec {
    LimitSpec::default()
}

fn of(key: &str) -> LimitSpec {
    LimitSpec { key: key.into(), ..each() }
}

/// A gateway whose clock stands still, so no allowance is refilled.
async fn start(specs: &[LimitSpec], engine: &FakeEngine) -> TestGateway {
    TestGateway::start_at_speed(limits(specs), &[engine], 0.0).await
}

async fn begin(gateway: &TestGateway, who: &str, body: &str) -> Client {
    let mut client = gateway.client().await;
    let fields = if who.is_empty() { String::new() } else { format!("{WHO}: {who}\r\n") };
    client.request_with("POST", "/v1/chat/completions", &fields, body).await;
    client
}

/// Sends a request that the engine answers with `answer`.
async fn served(gateway: &TestGateway, engine: &FakeEngine, who: &str, answer: &str) -> Reply {
    let mut client = begin(gateway, who, &chat("m", "hi")).await;
    let (reply, _) = tokio::join!(client.reply(), engine.answer(answer));
    gateway.ledger_is_zero().await;
    reply
}

/// Sends a request that must be rejected.
async fn refused(gateway: &TestGateway, who: &str) -> Reply {
    let reply = begin(gateway, who, &chat("m", "hi")).await.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (429, "rate_limited"), "{reply:?}");
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    reply
}

fn usage(prompt_tokens: u32, completion_tokens: u32) -> String {
    json!({"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}).to_string()
}

fn reload(gateway: &TestGateway, specs: &[LimitSpec]) {
    let mut next = Config::clone(&gateway.serving().config());
    next.limits = specs.to_vec();
    gateway.serving().reload(next).expect("right");
}

#[tokio::test]
async fn a_key_over_its_request_limit_is_rejected_with_retry_after() {
    let engine = FakeEngine::start("m").await;
    let gateway = start(&[LimitSpec { requests_per_minute: 2, ..each() }], &engine).await;
    let first = served(&gateway, &engine, "ann", "{}").await;
    assert_eq!(first.header("x-ratelimit-limit-requests"), Some("2"));
    assert_eq!(first.header("x-ratelimit-remaining-requests"), Some("1"));
    assert_eq!(first.header("x-ratelimit-reset-requests"), Some("30s"));
    assert_eq!(first.header("x-ratelimit-limit-tokens"), None);
    assert_eq!(served(&gateway, &engine, "ann", "{}").await.status, 200);
    let reply = refused(&gateway, "ann").await;
    assert_eq!(reply.header("retry-after"), Some("30"));
    assert_eq!(reply.header("x-ratelimit-remaining-requests"), Some("0"));
    assert_eq!(reply.header("x-ratelimit-reset-requests"), Some("1m0s"));
    for who in ["bob", ""] {
        assert_eq!(served(&gateway, &engine, who, "{}").await.status, 200, "'{who}' is another client");
    }
    assert_eq!(served(&gateway, &engine, "", "{}").await.status, 200);
    refused(&gateway, "").await;
    let sample = r#"kvlane_rate_limited_total{key="*",model="*",limit="requests"}"#;
    assert_eq!(gateway.metric(sample).await, Some(2.0));
    let shown = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!shown.contains("\"ann"), "the client's name is not shown: {shown}");
    assert_eq!(gateway.metric(r#"kvlane_limit_keys{key="*",model="*"}"#).await, Some(3.0));
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn an_entry_for_a_key_replaces_the_general_one() {
    let engine = FakeEngine::start("m").await;
    let specs =
        [LimitSpec { requests_per_minute: 1, ..each() }, LimitSpec { requests_per_minute: 3, ..of("ann") }];
    let gateway = start(&specs, &engine).await;
    for _ in 0..3 {
        assert_eq!(served(&gateway, &engine, "ann", "{}").await.status, 200);
    }
    refused(&gateway, "ann").await;
    assert_eq!(served(&gateway, &engine, "bob", "{}").await.status, 200);
    refused(&gateway, "bob").await;
    gateway.end().await;
}

#[tokio::test]
async fn an_entry_for_a_model_does_not_apply_to_others() {
    let (engine, other) = (FakeEngine::start("m").await, FakeEngine::start("n").await);
    let of_n = LimitSpec { model: "n".into(), requests_per_minute: 1, ..each() };
    let gateway = TestGateway::start_at_speed(limits(&[of_n]), &[&engine, &other], 0.0).await;
    for _ in 0..3 {
        let reply = served(&gateway, &engine, "ann", "{}").await;
        assert_eq!((reply.status, reply.header("x-ratelimit-limit-requests")), (200, None));
    }
    for status in [200, 429] {
        let mut client = begin(&gateway, "ann", &chat("n", "hi")).await;
        if status == 200 {
            other.answer("{}").await;
        }
        assert_eq!(client.reply().await.status, status);
    }
    gateway.end().await;
}

#[tokio::test]
async fn tokens_are_charged_as_the_engine_counts_them() {
    let engine = FakeEngine::start("m").await;
    let gateway = start(&[LimitSpec { tokens_per_minute: 6000, ..each() }], &engine).await;
    let left = |reply: &Reply| {
        reply.header("x-ratelimit-remaining-tokens").expect("told").parse::<u64>().expect("a number")
    };
    let first = left(&served(&gateway, &engine, "ann", &usage(1000, 3000)).await);
    assert!((3000..6000).contains(&first), "the expected tokens are charged at once: {first}");
    let second = left(&served(&gateway, &engine, "ann", &usage(1, 1)).await);
    assert!(second < 2000, "4000 were used: {second}");
    let third = left(&served(&gateway, &engine, "ann", &usage(1000, 3000)).await);
    assert!((1..2000).contains(&third) && third > second - 100, "almost none were used: {third}");
    let reply = refused(&gateway, "ann").await;
    let wait: u64 = reply.header("retry-after").expect("told").parse().expect("a number");
    assert!((20..60).contains(&wait), "some 2000 of 6000 are overdrawn: {wait} s");
    gateway.end().await;
}

/// Invariant: A rate limit counts each request once, and none that no engine answered.
///
/// Also held by `limits_can_change_and_be_removed_while_requests_are_in_flight`.
#[tokio::test]
async fn a_request_that_no_engine_answers_uses_nothing() {
    let engine = FakeEngine::start("m").await;
    let spec = LimitSpec { requests_per_minute: 1, tokens_per_minute: 100, concurrent_requests: 1, ..each() };
    let gateway = start(&[spec], &engine).await;
    for _ in 0..2 {
        let mut client = begin(&gateway, "ann", &chat("m", "hi")).await;
        engine.call().await.reset();
        assert_eq!(client.reply().await.status, 502);
        gateway.ledger_is_zero().await;
    }
    assert_eq!(served(&gateway, &engine, "ann", "{}").await.status, 200);
    refused(&gateway, "ann").await;
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_disconnects_is_charged_for_its_prompt() {
    let engine = FakeEngine::start("m").await;
    let spec = LimitSpec { requests_per_minute: 5, tokens_per_minute: 1_000_000, ..each() };
    let gateway = start(&[spec], &engine).await;
    let prompt = "x".repeat(20_000);
    for _ in 0..5 {
        let client = begin(&gateway, "ann", &chat("m", &prompt)).await;
        let mut call = engine.call().await;
        drop(client);
        call.gateway_gone().await;
        gateway.ledger_is_zero().await;
    }
    let reply = refused(&gateway, "ann").await;
    let left: u64 = reply.header("x-ratelimit-remaining-tokens").expect("told").parse().expect("a number");
    assert!(left < 1_000_000 - 4_000, "an uncached prompt of 5,000 tokens was computed: {left}");
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn tokens_of_a_request_over_a_limit_are_not_counted() {
    let engine = FakeEngine::start("m").await;
    let mut config = limits(&[LimitSpec { requests_per_minute: 1, ..each() }]);
    config.tokens.source = TokenSource::Engine;
    let gateway = TestGateway::start_at_speed(config, &[&engine], 0.0).await;
    let counted = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&counted);
    engine.set_tokenizer(move |_| {
        counts.fetch_add(1, Ordering::Relaxed);
        Some((0..9).collect())
    });
    assert_eq!(served(&gateway, &engine, "", "{}").await.status, 200);
    let once = counted.load(Ordering::Relaxed);
    assert_eq!(once, 1);
    refused(&gateway, "").await;
    assert_eq!(counted.load(Ordering::Relaxed), once);
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_disconnects_in_a_stream_is_charged_for_the_relayed_tokens() {
    let engine = FakeEngine::start("m").await;
    let gateway =
        start(&[LimitSpec { tokens_per_minute: 6000, concurrent_requests: 1, ..each() }], &engine).await;
    let mut client = begin(&gateway, "ann", &chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    for _ in 0..500 {
        call.chunk(&event("x")).await;
    }
    client.head().await;
    call.chunk(&event("last")).await;
    client.see("last").await;
    assert_eq!(
        refused(&gateway, "ann").await.header("retry-after"),
        Some("1"),
        "when the other request ends"
    );
    assert_eq!(gateway.metric(r#"kvlane_limit_requests_active{key="*",model="*"}"#).await, Some(1.0));
    drop(client);
    call.gateway_gone().await;
    gateway.ledger_is_zero().await;
    let mut client = begin(&gateway, "ann", &chat("m", "hi")).await;
    engine.answer("{}").await;
    let left: u64 =
        client.reply().await.header("x-ratelimit-remaining-tokens").expect("told").parse().expect("a number");
    assert!((4000..5490).contains(&left), "501 and a prompt, and the expected tokens of this one: {left}");
    gateway.end().await;
}

#[tokio::test]
async fn limits_can_change_and_be_removed_while_requests_are_in_flight() {
    let engine = FakeEngine::start("m").await;
    let spec = LimitSpec { requests_per_minute: 2, concurrent_requests: 1, ..each() };
    let gateway = start(std::slice::from_ref(&spec), &engine).await;
    let mut client = begin(&gateway, "ann", &chat("m", "hi")).await;
    let call = engine.call().await;
    let other = LimitSpec { concurrent_requests: 2, ..spec.clone() };
    reload(&gateway, std::slice::from_ref(&other));
    let mut second = begin(&gateway, "ann", &chat("m", "hi")).await;
    let (reply, _) = tokio::join!(second.reply(), engine.answer("{}"));
    assert_eq!(reply.status, 200, "two at a time");
    let pool = gateway.pool("m");
    eventually("it has ended", || pool.router.read(|scheduler| scheduler.in_flight()) == 1).await;
    assert_eq!(refused(&gateway, "ann").await.header("retry-after"), Some("30"), "usage is kept");
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    let active = r#"kvlane_limit_requests_active{key="*",model="*"}"#;
    gateway.ledger_is_zero().await;
    assert_eq!(gateway.metric(active).await, Some(0.0));

    // A request that begins under a limit that is removed, and ends after it is added again.
    let mut client = begin(&gateway, "bob", &chat("m", "hi")).await;
    let call = engine.call().await;
    reload(&gateway, &[]);
    assert_eq!(gateway.metric(active).await, None);
    for _ in 0..3 {
        let mut another = begin(&gateway, "ann", &chat("m", "hi")).await;
        let (reply, _) = tokio::join!(another.reply(), engine.answer("{}"));
        assert_eq!(reply.status, 200, "no limit applies");
    }
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains("kvlane_rate_limited_total{"), "{text}");
    reload(&gateway, &[other]);
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    gateway.ledger_is_zero().await;
    assert_eq!(gateway.metric(active).await, Some(0.0));
    gateway.end().await;
}

/// Waits until the counter of a bound exceeds `before`.
async fn is_reached(gateway: &TestGateway, limit: &str, before: f64) {
    let sample = format!(r#"kvlane_limits_reached_total{{limit="{limit}"}}"#);
    let counted = async { while gateway.metric(&sample).await.unwrap_or_default() <= before {} };
    soon(limit, counted).await;
}

#[tokio::test]
async fn bounds_that_no_response_reports_are_counted() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    let head = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(4 << 20));
    client.try_send(head.as_bytes()).await;
    client.closed().await;
    is_reached(&gateway, "head_bytes", 0.0).await;
    gateway.end().await;

    let mut config = config();
    config.server.header_timeout = std::time::Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[&engine]).await;
    for (before, begun) in ["", "POST /v1/chat/completions HTTP/1.1\r\nhost"].into_iter().enumerate() {
        let mut client = gateway.client().await;
        client.send(begun).await;
        client.closed().await;
        is_reached(&gateway, "head_time", before as f64).await;
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_key_and_a_tenant_of_the_same_name_have_separate_limits() {
    let engine = FakeEngine::start("m").await;
    let mut config = limits(&[LimitSpec { requests_per_minute: 1, ..of("ann") }]);
    let key = |name: &str, trusted| KeySpec {
        trusted,
        ..KeySpec::new(name, KeyHash::of(&format!("k-{name}")), Role::User)
    };
    config.auth.keys = vec![key("ann", false), key("edge", true)];
    let gateway = TestGateway::start_at_speed(config, &[&engine], 0.0).await;
    let ask = async |fields: &str, expect: u16| {
        let mut client = gateway.client().await;
        client.request_with("POST", "/v1/chat/completions", fields, &chat("m", "hi")).await;
        if expect == 200 {
            engine.answer("{}").await;
        }
        assert_eq!(client.reply().await.status, expect, "{fields}");
        gateway.ledger_is_zero().await;
    };
    let key = "authorization: Bearer k-ann\r\n";
    let tenant = format!("authorization: Bearer k-edge\r\n{WHO}: ann\r\n");
    ask(key, 200).await;
    ask(key, 429).await;
    ask(&tenant, 200).await;
    ask(&tenant, 429).await;
    gateway.end().await;
}
