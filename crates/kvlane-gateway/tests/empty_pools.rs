//! Requests for models without an endpoint: they wait for one, or are told so.

use std::time::Duration;

use kvlane_gateway::config::{Config, LimitSpec, PoolOverride, WorkerSpec};
use kvlane_gateway::testing::{
    Client, FakeEngine, Reply, TestGateway, chat, chat_stream, config, eventually, soon,
};

const CHAT: &str = "/v1/chat/completions";

/// Requests for `m`, which has no worker, wait for up to an hour.
fn patient() -> Config {
    let mut config = config();
    config.routing.empty_pool_timeout = Duration::from_secs(3600);
    config.routing.pools.insert("m".into(), PoolOverride::default());
    config
}

/// Waits until this many requests for `model` wait for an endpoint.
async fn waiting(gateway: &TestGateway, model: &str, requests: u32) {
    let waits = || gateway.fleet().waiting_for_endpoints().get(model).copied().unwrap_or_default();
    eventually("requests wait for an endpoint", || waits() == requests).await;
}

fn add(gateway: &TestGateway, engine: &FakeEngine) {
    gateway.serving().controller.add(&WorkerSpec::new(engine.url())).expect("a worker");
}

async fn answered(client: &mut Client, engine: &FakeEngine) -> Reply {
    engine.answer("{}").await;
    client.reply().await
}

/// Invariant: A request that waits for an endpoint is placed when one joins, and leaves nothing behind if it does not.
///
/// Also held by `a_client_that_leaves_while_its_request_waits_leaves_nothing_behind`.
#[tokio::test]
async fn requests_for_an_empty_pool_are_placed_when_its_first_worker_joins() {
    let (other, engine) = (FakeEngine::start("other model").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(patient(), &[&other]).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(gateway.begin(chat("m", "hi")).await);
    }
    waiting(&gateway, "m", 3).await;
    gateway.metric_becomes(r#"kvlane_waiting_for_endpoints{model="m"}"#, 3.0).await;
    let unknown = gateway.ask("POST", CHAT, chat("unheard of", "hi")).await;
    assert_eq!((unknown.status, unknown.error_code()), (404, "model_not_found".into()));
    // A worker of another model does not wake them.
    let another = FakeEngine::start("yet another").await;
    add(&gateway, &another);
    eventually("it serves", || gateway.fleet().snapshot().serves("yet another")).await;
    gateway.served(&another, chat("yet another", "hi")).await;
    waiting(&gateway, "m", 3).await;
    add(&gateway, &engine);
    for _ in &clients {
        engine.answer("{}").await;
    }
    for client in &mut clients {
        assert_eq!(client.reply().await.status, 200);
    }
    waiting(&gateway, "m", 0).await;
    gateway.metric_becomes(r#"kvlane_waiting_for_endpoints{model="m"}"#, 0.0).await;
    gateway.metric_becomes(r#"kvlane_requests_without_endpoint_total{model="m"}"#, 3.0).await;
    gateway.end_quiet(&[&engine, &other]).await;
}

#[tokio::test]
async fn a_model_that_was_served_before_is_expected_back() {
    let (engine, other) = (FakeEngine::start("served").await, FakeEngine::start("other model").await);
    let gateway = TestGateway::start(patient(), &[&engine, &other]).await;
    let controller = &gateway.serving().controller;
    controller.remove(&controller.find(&engine.url()).expect("a worker"));
    eventually("the worker has left", || controller.find(&engine.url()).is_none()).await;
    let mut client = gateway.begin(chat("served", "hi")).await;
    waiting(&gateway, "served", 1).await;
    add(&gateway, &engine);
    assert_eq!(answered(&mut client, &engine).await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_request_waits_while_all_endpoints_drain_or_are_down() {
    let (draining, new) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(patient(), &[&draining]).await;
    let mut first = gateway.begin(chat_stream("m", "hi")).await;
    let call = draining.call().await;
    let controller = &gateway.serving().controller;
    controller.remove(&controller.find(&draining.url()).expect("a worker"));
    let mut second = gateway.begin(chat("m", "hi")).await;
    waiting(&gateway, "m", 1).await;
    add(&gateway, &new);
    assert_eq!(answered(&mut second, &new).await.status, 200);
    call.answer(200, "{}").await;
    assert_eq!(first.reply().await.status, 200);
    // Undraining is a way to get an endpoint, too.
    let worker = controller.find(&new.url()).expect("a worker");
    controller.set_draining(&worker, true);
    let mut third = gateway.begin(chat("m", "hi")).await;
    waiting(&gateway, "m", 1).await;
    controller.set_draining(&worker, false);
    assert_eq!(answered(&mut third, &new).await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_waited_in_vain_gets_503_with_the_model_and_the_time() {
    let mut config = patient();
    config.routing.empty_pool_timeout = Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[]).await;
    let reply = gateway.ask("POST", CHAT, chat("m", "hi")).await;
    assert_eq!((reply.status, reply.error_code()), (503, "no_endpoint_ready".into()));
    assert!(reply.header("retry-after").is_some(), "{reply:?}");
    let text = reply.text();
    assert!(text.contains("`m`") && text.contains("empty_pool_timeout"), "{text}");
    waiting(&gateway, "m", 0).await;
    gateway.end().await;
}

#[tokio::test]
async fn without_a_timeout_the_answer_comes_at_once_and_is_counted() {
    let mut config = patient();
    config.routing.empty_pool_timeout = Duration::ZERO;
    let gateway = TestGateway::start(config, &[]).await;
    gateway.metric_becomes(r#"kvlane_requests_without_endpoint_total{model="m"}"#, 0.0).await;
    // With an empty fleet, any name may be a model's.
    for model in ["m", "made up"] {
        let reply = gateway.ask("POST", CHAT, chat(model, "hi")).await;
        assert_eq!((reply.status, reply.error_code()), (503, "no_endpoint_ready".into()), "{model}");
        assert!(!reply.text().contains("waiting"), "{}", reply.text());
    }
    gateway.metric_becomes(r#"kvlane_requests_without_endpoint_total{model="m"}"#, 1.0).await;
    gateway.metric_becomes(r#"kvlane_requests_without_endpoint_total{model="other"}"#, 1.0).await;
    gateway.end().await;
}

#[tokio::test]
async fn as_many_requests_wait_as_may_be_queued() {
    let mut config = patient();
    config.routing.queue_size = 2;
    let gateway = TestGateway::start(config, &[]).await;
    let waits = [gateway.begin(chat("m", "1")).await, gateway.begin(chat("m", "2")).await];
    waiting(&gateway, "m", 2).await;
    let reply = gateway.ask("POST", CHAT, chat("m", "3")).await;
    assert_eq!((reply.status, reply.error_code()), (429, "queue_full".into()));
    assert!(reply.header("retry-after").is_some(), "{reply:?}");
    gateway.metric_becomes(r#"kvlane_shed_total{model="m",reason="queue_full"}"#, 1.0).await;
    drop(waits);
    waiting(&gateway, "m", 0).await;
    gateway.end().await;
}

/// Sends a request of a tenant.
async fn begin_as(gateway: &TestGateway, who: &str) -> Client {
    let mut client = gateway.client().await;
    let field = format!("x-llm-d-inference-fairness-id: {who}\r\n");
    client.request_with("POST", CHAT, &field, &chat("m", "hi")).await;
    client
}

/// Invariant: Requests of a client that wait for an endpoint count against its limit of concurrent requests.
#[tokio::test]
async fn requests_that_wait_count_as_concurrent_requests_of_their_client() {
    let mut config = patient();
    config.limits =
        vec![LimitSpec { concurrent_requests: 2, requests_per_minute: 3, ..LimitSpec::default() }];
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start_at_speed(config, &[], 0.0).await;
    let active = r#"kvlane_limit_requests_active{key="*",model="*"}"#;
    let mut ann = [begin_as(&gateway, "ann").await, begin_as(&gateway, "ann").await];
    waiting(&gateway, "m", 2).await;
    gateway.metric_becomes(active, 2.0).await;
    let refused = begin_as(&gateway, "ann").await.reply().await;
    assert_eq!((refused.status, refused.error_code()), (429, "rate_limited".into()));
    let mut bob = begin_as(&gateway, "bob").await;
    waiting(&gateway, "m", 3).await;
    // One that leaves makes room.
    let left = begin_as(&gateway, "cat").await;
    waiting(&gateway, "m", 4).await;
    drop(left);
    waiting(&gateway, "m", 3).await;
    gateway.metric_becomes(active, 3.0).await;

    add(&gateway, &engine);
    let calls = [engine.call().await, engine.call().await, engine.call().await];
    gateway.metric_becomes(active, 3.0).await;
    let refused = begin_as(&gateway, "ann").await.reply().await;
    assert_eq!(refused.status, 429, "those that waited are in flight: {refused:?}");
    for call in calls {
        call.answer(200, "{}").await;
    }
    for client in ann.iter_mut().chain([&mut bob]) {
        assert_eq!(client.reply().await.status, 200, "it keeps its place when it is placed");
    }
    gateway.metric_becomes(active, 0.0).await;
    let mut third = begin_as(&gateway, "ann").await;
    assert_eq!(answered(&mut third, &engine).await.status, 200, "a wait is no request of its own");
    let refused = begin_as(&gateway, "ann").await.reply().await;
    assert_eq!(refused.status, 429, "three a minute: {refused:?}");
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_its_request_waits_leaves_nothing_behind() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(patient(), &[]).await;
    let client = gateway.begin(chat("m", "hi")).await;
    waiting(&gateway, "m", 1).await;
    drop(client);
    waiting(&gateway, "m", 0).await;
    add(&gateway, &engine);
    gateway.served(&engine, chat("m", "hi")).await;
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn at_shutdown_waiting_requests_are_served_within_the_grace_period_and_answered_at_its_end() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(patient(), &[]).await;
    let mut served = gateway.begin(chat("m", "hi")).await;
    waiting(&gateway, "m", 1).await;
    let (controller, fleet) = (gateway.serving().controller.clone(), gateway.fleet().clone());
    let stopping = tokio::spawn(gateway.shut_down());
    eventually("it stops", || fleet.stopping.load(std::sync::atomic::Ordering::Relaxed)).await;
    controller.add(&WorkerSpec::new(engine.url())).expect("a worker");
    assert_eq!(answered(&mut served, &engine).await.status, 200);
    assert!(soon("the end", stopping).await.expect("no panic"), "nothing was cut");

    let mut config = patient();
    config.server.shutdown_grace = Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[]).await;
    let mut told = gateway.begin(chat("m", "hi")).await;
    waiting(&gateway, "m", 1).await;
    gateway.shut_down().await;
    let reply = told.reply().await;
    assert_eq!((reply.status, reply.error_code()), (503, "no_endpoint_ready".into()));
}

#[tokio::test]
async fn a_request_of_a_data_plane_waits_for_an_endpoint_too() {
    let engine = FakeEngine::start("m").await;
    let picker = TestGateway::picker(patient(), &[]).await;
    let plane = picker.data_plane().await;
    let (request, joins) = (chat("m", "hi"), async {
        waiting(&picker, "m", 1).await;
        add(&picker, &engine);
    });
    let (outcome, ()) = tokio::join!(plane.pick(CHAT, &[], &request), joins);
    assert_eq!(outcome.addresses(), [engine.authority()]);
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_scaler_is_told_of_each_model_that_requests_wait_for() {
    let (scaler, engine) = (FakeEngine::start("scaler").await, FakeEngine::start("m").await);
    let mut config = patient();
    config.routing.empty_pool_webhook = Some(format!("{}/wake?by=kvlane", scaler.url()));
    let gateway = TestGateway::start(config, &[]).await;
    let mut clients = Vec::new();
    for waiting in 1..=2 {
        clients.push(gateway.begin(chat("m", "hi")).await);
        self::waiting(&gateway, "m", waiting).await;
        if waiting == 1 {
            let call = scaler.call().await;
            assert_eq!(call.target(), "POST /wake?by=kvlane");
            let told: serde_json::Value = serde_json::from_slice(&call.body).expect("JSON");
            assert_eq!(told, serde_json::json!({"model": "m", "waiting": 1}));
            // A failure does not end it.
            call.answer(500, "{}").await;
        }
    }
    add(&gateway, &engine);
    for _ in &clients {
        engine.answer("{}").await;
    }
    for client in &mut clients {
        assert_eq!(client.reply().await.status, 200);
    }
    eventually("nothing waits", || gateway.fleet().waiting_for_endpoints().get("m") == Some(&0)).await;
    gateway.end().await;
}

#[test]
fn a_webhook_must_be_a_url() {
    let mut config = config();
    config.routing.empty_pool_webhook = Some("wake".into());
    let error = config.validate().expect_err("no URL").to_string();
    assert!(error.contains("routing.empty_pool_webhook"), "{error}");
}
