//! Hints of clients reach the scheduler, the same at every attempt, and appear nowhere else.

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::testing::{Client, FakeEngine, Reply, TestGateway, chat, config, eventually};
use serde_json::{Value, json};

const SECRET: &str = "sk-very-secret-0123456789";

async fn ask(gateway: &TestGateway, engine: &FakeEngine, fields: &str, body: &str) -> Reply {
    let mut client = gateway.client().await;
    client.request_with("POST", "/v1/chat/completions", fields, body).await;
    let (reply, _) = tokio::join!(client.reply(), engine.answer("{}"));
    gateway.ledger_is_zero().await;
    reply
}

/// Session, tenant and priority of the last decision.
async fn said(gateway: &TestGateway) -> (Value, Value, Value) {
    let newest = gateway.decisions().await.swap_remove(0);
    (newest["session"].clone(), newest["tenant"].clone(), newest["priority"].clone())
}

fn in_session(session: &str) -> String {
    let messages = json!([{"role": "user", "content": "hi"}]);
    json!({"model": "m", "session_id": session, "messages": messages}).to_string()
}

/// Invariant: Session and tenant names are not shown to operators; sessions of one name but of two tenants are two
/// sessions.
///
/// Also held by `sessions_with_one_name_differ_by_tenant`.
#[tokio::test]
async fn hints_reach_the_scheduler_and_names_are_not_shown_to_operators() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    ask(&gateway, &engine, "", &chat("m", "hi")).await;
    assert_eq!(said(&gateway).await, (Value::Null, Value::Null, json!(0)));

    let fields = format!(
        "x-session-id: my-session\r\nauthorization: Bearer {SECRET}\r\nx-smg-priority: interactive\r\n"
    );
    ask(&gateway, &engine, &fields, &chat("m", "hi")).await;
    let (session, tenant, priority) = said(&gateway).await;
    assert!(session.is_string() && tenant.is_string(), "{session} {tenant}");
    assert_eq!(priority, 50);

    ask(&gateway, &engine, &format!("x-api-key: {SECRET}\r\n"), &in_session("my-session")).await;
    let by_body = said(&gateway).await;
    assert_eq!((by_body.0, by_body.1), (session.clone(), tenant), "the body names the same session");
    ask(&gateway, &engine, "", &in_session("my-session")).await;
    assert_ne!(said(&gateway).await.0, session, "a session without a tenant is not this tenant's");

    for path in ["/decisions", "/metrics", "/workers", "/readiness"] {
        let shown = gateway.operate("GET", path, "").await.text();
        assert!(!shown.contains(SECRET) && !shown.contains("my-session"), "{path}: {shown}");
    }
    gateway.end().await;
}

/// Invariant: A retry keeps session, tenant and priority of its request.
#[tokio::test]
async fn a_retry_keeps_session_tenant_and_priority() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let mut client = gateway.client().await;
    let fields = "x-session-id: s\r\nx-llm-d-inference-fairness-id: t\r\nx-priority: -3\r\n";
    client.request_with("POST", "/v1/chat/completions", fields, &chat("m", "hi")).await;
    let (first, second) = tokio::select! { call = a.call() => (call, &b), call = b.call() => (call, &a) };
    first.answer(503, "{}").await;
    let (reply, _) = tokio::join!(client.reply(), second.answer("{}"));
    assert_eq!(reply.status, 200);
    let decisions = gateway.decisions().await;
    let of = |n: usize| ["session", "tenant", "priority"].map(|key| decisions[n][key].clone());
    assert_eq!((&decisions[0]["attempt"], &decisions[1]["attempt"]), (&json!(1), &json!(0)));
    assert_eq!(of(0), of(1));
    assert_eq!(of(0)[2], -3);
    gateway.end().await;
}

#[tokio::test]
async fn absurd_hints_are_ignored_and_reach_the_engine_unchanged() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let long = "x".repeat(30_000);
    for (fields, session, tenant) in [
        (format!("x-session-id: {long}\r\nx-api-key: {long}\r\n"), false, false),
        ("x-session-id:\r\nauthorization: Bearer\r\nx-priority: 1e3\r\n".into(), false, false),
        ("x-session-id: a\r\nx-session-id: b\r\nx-priority: 300\r\nx-priority: x\r\n".into(), true, false),
        (format!("x-priority: {long}\r\nx-smg-priority: \t\r\n"), false, false),
    ] {
        assert_eq!(ask(&gateway, &engine, &fields, &chat("m", "hi")).await.status, 200);
        let (has_session, has_tenant, priority) = said(&gateway).await;
        let shown = &fields[..fields.len().min(80)];
        assert_eq!((has_session.is_string(), has_tenant.is_string()), (session, tenant), "{shown}");
        assert_eq!(priority, 0, "{shown}");
    }
    let mut client = gateway.client().await;
    let request =
        Client::request_bytes("POST", "/v1/chat/completions", "x-session-id: \u{1}\r\n", &chat("m", "hi"));
    let request = request.into_bytes().into_iter().map(|byte| if byte == 1 { 0xff } else { byte });
    client.send(request.collect::<Vec<_>>()).await;
    let (reply, (call, _)) = tokio::join!(client.reply(), engine.answer("{}"));
    assert_eq!(reply.status, 200);
    assert!(call.contains("x-session-id: \u{fffd}"), "{call}");
    assert!(said(&gateway).await.0.is_string(), "any bytes are a name");
    gateway.end().await;
}

#[tokio::test]
async fn thousands_of_sessions_and_tenants_leave_no_series_behind() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.routing.receipts = 10;
    let gateway = TestGateway::start(config, &[&engine]).await;
    ask(&gateway, &engine, "", &chat("m", "hi")).await;
    let series = |text: String| text.lines().filter(|line| !line.starts_with('#')).count();
    // A request is counted when its response has ended, which its client may see earlier.
    let answered = r#"kvlane_requests_total{model="m",api="chat_completions",code="200"}"#;
    gateway.metric_becomes(answered, 1.0).await;
    let before = series(gateway.operate("GET", "/metrics", "").await.text());
    let mut client = gateway.client().await;
    for n in 0..3000 {
        let fields = format!("x-session-id: s{n}\r\nauthorization: Bearer t{n}\r\n");
        client.request_with("POST", "/v1/chat/completions", &fields, &chat("m", "hi")).await;
        let (reply, _) = tokio::join!(client.reply(), engine.answer("{}"));
        assert_eq!(reply.status, 200);
    }
    eventually("all requests have ended", || {
        gateway.pool("m").router.read(|scheduler| scheduler.in_flight()) == 0
    })
    .await;
    assert_eq!(series(gateway.operate("GET", "/metrics", "").await.text()), before);
    assert_eq!(gateway.decisions().await.len(), 10);
    gateway.end().await;
}
