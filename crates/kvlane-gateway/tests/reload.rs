//! Reload of the configuration: completely or not at all, without a failed request.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::{Config, PoolOverride, WorkerSpec};
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, eventually};
use serde_json::json;

/// The gateway's configuration.
fn running(gateway: &TestGateway) -> Config {
    Config::clone(&gateway.serving().config())
}

/// The workers. The order of their arrival is that of their URLs, and so of their ports.
fn urls(gateway: &TestGateway) -> Vec<String> {
    let mut urls: Vec<_> =
        gateway.serving().controller.workers().iter().map(|worker| worker.url.to_string()).collect();
    urls.sort();
    urls
}

fn sorted<const N: usize>(mut urls: [String; N]) -> [String; N] {
    urls.sort();
    urls
}

fn eligible(gateway: &TestGateway) -> usize {
    let pools = gateway.fleet().pools();
    pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
}

async fn reloads(gateway: &TestGateway, result: &str) -> Option<f64> {
    gateway.metric(&format!(r#"kvlane_config_reloads_total{{result="{result}"}}"#)).await
}

/// Invariant: A configuration is applied as a whole or not at all; settings that need a restart keep their values.
///
/// Also held by `settings_that_need_a_restart_are_kept_and_named`, `a_kept_address_keeps_the_key_that_it_needs`.
#[tokio::test]
async fn an_invalid_configuration_changes_nothing_and_is_reported() {
    let (engine, other) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let before = running(&gateway);
    let mut next = before.clone();
    next.retry.max_total_retries = 77;
    next.workers = vec![WorkerSpec::new(other.url())];
    let mut wrong = [next.clone(), next.clone(), next.clone()];
    wrong[0].health.failure_threshold = 0;
    wrong[1].routing.timing = Some("no-such-file.json".into());
    wrong[2].workers.push(WorkerSpec::new("nonsense"));
    for (wrong, word) in
        wrong.into_iter().zip(["health.failure_threshold", "routing.timing", "workers[1].url"])
    {
        let why = gateway.serving().reload(wrong).expect_err(word);
        assert!(why.contains(word), "{why}");
        assert_eq!(running(&gateway), before);
        assert_eq!(urls(&gateway), sorted([engine.url()]));
        let ready = gateway.operate("GET", "/readiness", "").await;
        assert_eq!((ready.status, &ready.json()["configuration"]["problem"]), (200, &json!(why)));
    }
    assert_eq!((reloads(&gateway, "refused").await, reloads(&gateway, "applied").await), (Some(3.0), None));

    gateway.serving().reload(next).expect("right");
    assert_eq!(running(&gateway).retry.max_total_retries, 77);
    eventually("the other worker has replaced it", || urls(&gateway) == sorted([other.url()])).await;
    let ready = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(ready["configuration"], json!({"problem": null, "needs_restart": []}));
    assert_eq!(reloads(&gateway, "applied").await, Some(1.0));
    let same = running(&gateway);
    gateway.serving().reload(same).expect("right");
    assert_eq!(reloads(&gateway, "unchanged").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn settings_that_need_a_restart_are_kept_and_named() {
    let gateway = TestGateway::start(config(), &[]).await;
    let before = running(&gateway);
    let mut next = before.clone();
    next.server.port = 1;
    next.server.relay_threads = 7;
    next.server.max_payload_size = 77;
    next.kv_events.enabled = false;
    next.tokens.threads = 3;
    next.epp.observe_responses = true;
    let reloaded = gateway.serving().reload(next).expect("right");
    assert_eq!(reloaded.needs_restart, ["server.port", "server.relay_threads", "epp", "kv_events", "tokens"]);
    assert_eq!(reloaded.changed, ["server.max_payload_size"]);
    let mut expect = before;
    expect.server.max_payload_size = 77;
    assert_eq!(running(&gateway), expect);
    let ready = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(ready["configuration"]["needs_restart"], json!(reloaded.needs_restart));
    gateway.end().await;
}

#[tokio::test]
async fn limits_hints_and_retries_apply_from_the_next_request_on() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let ask = async |fields: &str| {
        let mut client = gateway.client().await;
        client.request_with("POST", "/v1/chat/completions", fields, &chat("m", "hi")).await;
        let (reply, _) = tokio::join!(client.reply(), engine.answer("{}"));
        assert_eq!(reply.status, 200);
        gateway.ledger_is_zero().await;
        gateway.decisions().await.swap_remove(0)
    };
    let (whose, urgent) = ("authorization: Bearer sk-1\r\n", "x-hurry: 7\r\n");
    let fields = format!("{whose}{urgent}");
    let before = ask(&fields).await;
    assert_eq!(before["priority"], 0);
    let mut next = running(&gateway);
    next.hints.priority_headers = vec!["x-hurry".into()];
    next.server.max_payload_size = 200;
    gateway.serving().reload(next.clone()).expect("right");
    let after = ask(&fields).await;
    assert_eq!(after["priority"], 7);
    assert_eq!(after["tenant"], before["tenant"], "the tenant's key stays");
    let large = gateway.ask("POST", "/v1/chat/completions", chat("m", &"x".repeat(300))).await;
    assert_eq!(large.error_code(), "body_too_large");

    next.hints.tenant_headers.clear();
    gateway.serving().reload(next).expect("right");
    assert!(ask(&fields).await["tenant"].is_null());
    gateway.end().await;
}

#[tokio::test]
async fn a_changed_probe_interval_applies_at_once() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let probes = engine.probes();
    let mut next = running(&gateway);
    assert!(next.health.interval > Duration::from_secs(1000), "no probe would be due");
    next.health.interval = Duration::from_millis(1);
    gateway.serving().reload(next).expect("right");
    eventually("it is probed again", || engine.probes() > probes + 3).await;
    gateway.end().await;
}

#[tokio::test]
async fn configured_workers_join_and_leave_and_operators_changes_persist() {
    let [a, b, c, d] = [(); 4].map(|()| FakeEngine::start("m"));
    let (a, b, c, d) = tokio::join!(a, b, c, d);
    let gateway = TestGateway::start(config(), &[&a, &b, &c]).await;
    let body = json!({"url": d.url()}).to_string();
    assert_eq!(gateway.operate("POST", "/workers", body).await.status, 202);
    assert_eq!(gateway.operate("POST", &format!("/remove_worker?url={}", b.url()), "").await.status, 200);
    gateway.operate("PUT", "/workers/3", r#"{"draining":true}"#).await;
    eventually("it has left", || urls(&gateway) == sorted([a.url(), c.url(), d.url()])).await;

    let mut next = running(&gateway);
    next.workers.remove(0);
    let reloaded = gateway.serving().reload(next).expect("right");
    assert_eq!((reloaded.leaving, reloaded.joining), (vec![a.url()], vec![]));
    eventually("it has left", || urls(&gateway) == sorted([c.url(), d.url()])).await;
    assert!(gateway.serving().controller.find(&c.url()).expect("it is there").state().draining, "still");

    // A trailing slash is no difference, and a worker that an operator has added is taken over.
    let mut next = running(&gateway);
    next.workers =
        vec![WorkerSpec::new(format!("{}/", c.url())), WorkerSpec::new(d.url()), WorkerSpec::new(a.url())];
    let reloaded = gateway.serving().reload(next).expect("right");
    assert_eq!(reloaded.joining, [a.url()]);
    assert_eq!((reloaded.leaving, reloaded.replaced), (vec![b.url()][1..].to_vec(), vec![]));
    eventually("the workers are those of the file", || urls(&gateway) == sorted([c.url(), d.url(), a.url()]))
        .await;
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_drains_with_a_stream_can_join_again_before_it_has_left() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    let (with, mut without) = (running(&gateway), running(&gateway));
    without.workers.clear();
    gateway.serving().reload(without).expect("right");
    eventually("no endpoint takes requests", || eligible(&gateway) == 0).await;
    gateway.serving().reload(with).expect("right");
    eventually("it takes requests", || eligible(&gateway) == 1).await;
    assert_eq!(urls(&gateway).len(), 2, "one leaves, one has joined");
    gateway.served(&engine, chat("m", "hi")).await;
    call.chunk(&event("one")).await;
    client.see("one").await;
    call.end_stream().await;
    assert!(client.rest().await.1, "the stream ended properly");
    eventually("the first has left", || urls(&gateway).len() == 1).await;
    let health = format!(r#"kvlane_worker_health{{worker="{}"}}"#, engine.url());
    assert_eq!(gateway.metric(&health).await, Some(1.0), "the metric is that of the new worker");
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(text.contains("kvlane_worker_selection_total{"), "{text}");
    gateway.end().await;
}

#[tokio::test]
async fn a_changed_worker_serves_until_its_successor_does() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    config.health.failure_threshold = u32::MAX;
    let gateway = TestGateway::start(config, &[&engine]).await;
    engine.set_healthy(false);
    let mut next = running(&gateway);
    next.workers[0].model = Some("m".into());
    let reloaded = gateway.serving().reload(next.clone()).expect("right");
    assert_eq!((reloaded.replaced, reloaded.leaving), (vec![engine.url()], vec![]));
    let successor = gateway.serving().controller.find(&engine.url()).expect("it is there");
    eventually("it was probed", || successor.state().problem.is_some()).await;
    let reply = gateway.served(&engine, chat("m", "hi")).await;
    assert_eq!((reply.status, urls(&gateway).len()), (200, 2), "the predecessor serves");

    // The settings change again: a worker that does not serve leaves at once.
    next.workers[0].model = None;
    gateway.serving().reload(next).expect("right");
    eventually("the serving worker and the last one remain", || urls(&gateway).len() == 2).await;
    assert!(successor.state().leaving);
    engine.set_healthy(true);
    eventually("only the last one serves", || urls(&gateway).len() == 1 && eligible(&gateway) == 1).await;
    gateway.served(&engine, chat("m", "hi")).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_kept_address_keeps_the_key_that_it_needs() {
    let mut config = config();
    config.metrics.host = "0.0.0.0".parse().expect("an address");
    config.auth.open_admin = true;
    let gateway = TestGateway::start(config, &[]).await;
    let before = running(&gateway);
    let mut next = before.clone();
    next.metrics.host = "127.0.0.1".parse().expect("an address");
    next.auth.open_admin = false;
    assert_eq!(next.validate(), Ok(()), "it is valid by itself");
    let why = gateway.serving().reload(next).expect_err("the port listens on all addresses until a restart");
    assert!(why.contains("metrics.host"), "{why}");
    assert_eq!(running(&gateway), before);
    gateway.end().await;
}

#[tokio::test]
async fn a_changed_policy_applies_at_once_and_known_prefixes_stay() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let prompt = chat("m", &"a long prompt ".repeat(50));
    let ask = async || {
        let client = gateway.ask("POST", "/v1/chat/completions", &prompt);
        let served = async {
            tokio::select! { _ = a.answer("{}") => {}, _ = b.answer("{}") => {} }
        };
        let (reply, ()) = tokio::join!(client, served);
        let said = |name: &str| reply.header(name).expect("told").to_owned();
        (said("x-router-backend"), said("x-router-reason"))
    };
    let (first, reason) = ask().await;
    assert_eq!(reason, "turn");
    let mut next = running(&gateway);
    let policy = PolicyConfig::by_name("prefix_aware").expect("a policy");
    next.routing.pools.insert("m".into(), PoolOverride { policy: Some(policy), ..PoolOverride::default() });
    let reloaded = gateway.serving().reload(next).expect("right");
    assert_eq!(reloaded.changed, ["routing.pools"]);
    for _ in 0..3 {
        assert_eq!(ask().await, (first.clone(), "prefix_hit".to_owned()), "it holds the prompt");
    }
    let selected = |policy: &str, reason: &str| {
        format!(r#"kvlane_worker_selection_total{{worker="{first}",policy="{policy}",reason="{reason}"}}"#)
    };
    assert_eq!(gateway.metric(&selected("round_robin", "turn")).await, Some(1.0));
    assert_eq!(gateway.metric(&selected("prefix_aware", "prefix_hit")).await, Some(3.0));
    assert_eq!(gateway.operate("GET", "/decisions", "").await.json()["pools"][0]["policy"], "prefix_aware");
    gateway.end().await;
}

#[tokio::test]
async fn a_limit_that_is_added_queues_requests_and_removing_it_releases_them() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let reload = |most: u32| {
        let mut next = running(&gateway);
        next.routing.max_concurrent_requests = most;
        gateway.serving().reload(next).expect("right");
    };
    reload(1);
    let (mut one, mut two) = (gateway.client().await, gateway.client().await);
    one.request("POST", "/v1/chat/completions", &chat("m", "one")).await;
    let first = engine.call().await;
    two.request("POST", "/v1/chat/completions", &chat("m", "two")).await;
    let pool = gateway.pool("m");
    eventually("the second waits", || pool.router.read(|scheduler| scheduler.queued()) == 1).await;
    reload(0);
    let second = engine.call().await;
    second.answer(200, "{}").await;
    assert_eq!(two.reply().await.status, 200);
    first.answer(200, "{}").await;
    assert_eq!(one.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_removed_worker_serves_until_those_added_in_the_same_reload_do() {
    let [old, new, broken] = [(); 3].map(|()| FakeEngine::start("m"));
    let (old, new, broken) = tokio::join!(old, new, broken);
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&old]).await;
    new.set_healthy(false);
    broken.set_healthy(false);
    let reload = |engines: &[&FakeEngine]| {
        let mut next = running(&gateway);
        next.workers = engines.iter().map(|engine| WorkerSpec::new(engine.url())).collect();
        gateway.serving().reload(next).expect("right")
    };
    let judged = |engine: &FakeEngine| {
        let worker = gateway.serving().controller.find(&engine.url());
        worker.is_some_and(|worker| worker.state().problem.is_some())
    };
    let reloaded = reload(&[&new, &broken]);
    assert_eq!((reloaded.leaving, reloaded.joining.len()), (vec![old.url()], 2));
    eventually("both have failed", || judged(&new) && judged(&broken)).await;
    let _reply = gateway.served(&old, chat("m", "hi")).await;

    // The settings change again, and back.
    reload(&[&old, &new, &broken]);
    new.set_healthy(true);
    eventually("two serve", || eligible(&gateway) == 2).await;
    assert_eq!(urls(&gateway).len(), 3, "it must stay");
    reload(&[&new, &broken]);
    eventually("it has left", || urls(&gateway) == sorted([new.url(), broken.url()])).await;
    assert_eq!(eligible(&gateway), 1, "the broken one was not waited for");
    gateway.end().await;
}
