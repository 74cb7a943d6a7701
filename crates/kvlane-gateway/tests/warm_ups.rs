//! Warm-ups: the gateway tries a transfer of KV blocks between two workers before it splits requests between them.

use kvlane_core::disaggregation::Role;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::testing::{Call, FakeEngine, TestGateway, chat, eventually, in_turn, next_call};
use kvlane_http::secret::Secret;
use kvlane_wire::disaggregation::Connector;
use serde_json::{Value, json};

const ERROR: &str =
    r#"{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}"#;

/// A configuration in which pairs are warmed up.
fn warm(connector: Connector) -> Config {
    let mut config = in_turn();
    config.disaggregation.connector = Some(connector);
    config.disaggregation.warm_up_pairs = 16;
    config
}

fn spec(engine: &FakeEngine, role: Role) -> WorkerSpec {
    WorkerSpec { role, ..WorkerSpec::new(engine.url()) }
}

/// A prefill engine's answer.
fn prefilled() -> String {
    let params = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 5600, "tp_size": 1});
    json!({"choices": [], "kv_transfer_params": params}).to_string()
}

fn read(call: &Call) -> Value {
    serde_json::from_slice(&call.body).expect("JSON")
}

/// Answers both transfers of a warm-up.
async fn warmed_up(prefill: &FakeEngine, decode: &FakeEngine) {
    for _ in 0..2 {
        prefill.answer(&prefilled()).await;
        decode.answer(r#"{"usage":{"prompt_tokens":20,"completion_tokens":1}}"#).await;
    }
}

/// Waits until this many warm-ups have had this outcome.
async fn becomes(gateway: &TestGateway, outcome: &str, count: f64) {
    let name = format!(r#"kvlane_pair_warm_ups_total{{outcome="{outcome}"}}"#);
    gateway.metric_becomes(&name, count).await;
}

#[tokio::test]
async fn a_pair_gets_requests_once_a_transfer_has_ended() {
    let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = warm(Connector::Nixl);
    config.upstream.api_key = Some(Secret::new("sk-worker"));
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let gateway = TestGateway::start(config, &[]).await;
    let first = prefill.call().await;
    let asked = read(&first);
    assert_eq!((&asked["max_tokens"], &asked["model"]), (&json!(1), &json!("m")));
    assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], true);
    assert!(first.head.contains("authorization: Bearer sk-worker"), "{}", first.head);

    let mut client = gateway.begin(chat("m", "hi")).await;
    decode.answer("{}").await;
    assert_eq!(client.reply().await.header("x-router-prefill"), None, "its first transfer is not over");

    first.answer(200, &prefilled()).await;
    let second = decode.call().await;
    assert_eq!(read(&second)["kv_transfer_params"]["remote_engine_id"], "e");
    second.answer(200, "{}").await;
    prefill.answer(&prefilled()).await;
    decode.answer("{}").await;
    becomes(&gateway, "ended", 1.0).await;

    let mut client = gateway.begin(chat("m", "hi")).await;
    prefill.answer(&prefilled()).await;
    decode.answer("{}").await;
    assert_eq!(client.reply().await.header("x-router-prefill"), Some(prefill.url().as_str()));
    gateway.end_quiet(&[&prefill, &decode]).await;
}

#[tokio::test]
async fn a_pair_whose_transfer_fails_gets_no_requests() {
    let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = warm(Connector::Nixl);
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let gateway = TestGateway::start(config, &[]).await;
    prefill.answer(&prefilled()).await;
    decode.call().await.answer(500, ERROR).await;
    becomes(&gateway, "failed", 1.0).await;
    let fleet = gateway.operate("GET", "/fleet", "").await.json();
    let closed = json!([{"prefill": prefill.url(), "decode": decode.url(), "failed": 1}]);
    assert_eq!(fleet["pools"][0]["closed_pairs"], closed);
    for _ in 0..3 {
        let mut client = gateway.begin(chat("m", "hi")).await;
        decode.answer("{}").await;
        assert_eq!(client.reply().await.header("x-router-prefill"), None);
    }
    gateway.end_quiet(&[&prefill, &decode]).await;
}

/// What a prefill engine does wrong alone is not the pair's fault: its requests will show whether it goes on.
#[tokio::test]
async fn a_pair_that_could_not_be_tried_gets_requests() {
    let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = warm(Connector::Nixl);
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let gateway = TestGateway::start(config, &[]).await;
    prefill.call().await.answer(503, "{}").await;
    becomes(&gateway, "skipped", 1.0).await;
    let mut client = gateway.begin(chat("m", "hi")).await;
    prefill.answer(&prefilled()).await;
    decode.answer("{}").await;
    assert_eq!(client.reply().await.header("x-router-prefill"), Some(prefill.url().as_str()));
    gateway.end_quiet(&[&prefill, &decode]).await;
}

#[tokio::test]
async fn at_most_a_few_prefill_workers_are_tried_with_each_decode_worker() {
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(FakeEngine::start("m").await);
    }
    let (decode, prefills) = engines.split_last().expect("four");
    let mut config = warm(Connector::Nixl);
    config.disaggregation.warm_up_pairs = 2;
    config.workers = prefills.iter().map(|engine| spec(engine, Role::Prefill)).collect();
    config.workers.push(spec(decode, Role::Decode));
    let gateway = TestGateway::start(config, &[]).await;
    // Which ones are chosen depends on who is ready first.
    let among: Vec<&FakeEngine> = prefills.iter().collect();
    let answering = async {
        loop {
            next_call(&among).await.1.answer(200, &prefilled()).await;
            decode.answer("{}").await;
        }
    };
    tokio::select! {
        () = becomes(&gateway, "ended", 2.0) => {}
        never = answering => never
    }
    gateway.end_quiet(&engines.iter().collect::<Vec<_>>()).await;
}

/// A worker that was away may be another process, which knows no other engine.
#[tokio::test]
async fn a_worker_that_was_away_is_warmed_up_again() {
    let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = warm(Connector::Nixl);
    config.health.interval = std::time::Duration::from_millis(10);
    config.health.failure_threshold = 1;
    config.health.success_threshold = 1;
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let gateway = TestGateway::start(config, &[]).await;
    warmed_up(&prefill, &decode).await;
    becomes(&gateway, "ended", 1.0).await;
    prefill.set_healthy(false);
    let healthy = || gateway.fleet().workers().values().all(|worker| worker.state().healthy);
    eventually("it is unhealthy", || !healthy()).await;
    prefill.set_healthy(true);
    warmed_up(&prefill, &decode).await;
    becomes(&gateway, "ended", 2.0).await;
    gateway.end().await;
}

#[tokio::test]
async fn engines_whose_first_transfer_is_as_any_other_are_not_warmed_up() {
    let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = warm(Connector::SharedStorage);
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let gateway = TestGateway::start(config, &[]).await;
    let mut client = gateway.begin(chat("m", "hi")).await;
    prefill.answer("{}").await;
    decode.answer("{}").await;
    assert_eq!(client.reply().await.header("x-router-prefill"), Some(prefill.url().as_str()));
    gateway.end_quiet(&[&prefill, &decode]).await;
}
