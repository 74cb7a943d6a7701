//! A gateway that starts again knows what the one before it gave to whom.

use std::path::Path;
use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, config, eventually};
use serde_json::Value;

fn kept_in(path: &Path) -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("prefix_aware").expect("a policy");
    config.routing.index_snapshot = Some(path.into());
    config
}

fn prompt(n: usize) -> String {
    let system = "the same for all ".repeat(20);
    chat("m", &format!("{system} {}", format!("question {n} ").repeat(30 + n)))
}

/// Asks and lets whoever it is answer: where it went, why, and how much was expected to be cached there.
async fn ask(gateway: &TestGateway, engines: &[&FakeEngine; 2], n: usize) -> (String, String, Value) {
    let served = async {
        tokio::select! { _ = engines[0].answer("{}") => {}, _ = engines[1].answer("{}") => {} }
    };
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", prompt(n)), served);
    assert_eq!(reply.status, 200);
    let said = |name: &str| reply.header(name).expect("told").to_owned();
    let decision = gateway.decisions().await.swap_remove(0);
    (said("x-router-backend"), said("x-router-reason"), decision["overlap_tokens"].clone())
}

#[tokio::test]
async fn after_a_restart_every_prompt_goes_where_its_prefix_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("index.snapshot");
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let mut before = kept_in(&path);
    before.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let gateway = TestGateway::start(before, &engines).await;
    for n in 0..6 {
        ask(&gateway, &engines, n).await;
    }
    let size = gateway.pool("m").router.index_size();
    assert!(size.1 > 100, "{size:?}");
    gateway.end().await;

    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    assert_eq!(gateway.pool("m").router.index_size().1, size.1, "all of it");
    let mut again = Vec::new();
    for n in 0..6 {
        let (_, reason, overlap) = ask(&gateway, &engines, n).await;
        assert_eq!(reason, "prefix_hit");
        again.push(overlap);
    }
    gateway.end().await;
    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    for (n, expect) in again.iter().enumerate() {
        assert_eq!(ask(&gateway, &engines, n).await.2, *expect, "as before it was started a second time");
    }
    gateway.end().await;

    std::fs::write(&path, "nonsense").expect("written");
    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    assert_eq!(gateway.pool("m").router.index_size().1, 0, "what is no snapshot costs nothing else");
    gateway.end().await;
}

#[tokio::test]
async fn what_a_gateway_that_is_killed_knew_is_written_now_and_then() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("index.snapshot");
    let engine = FakeEngine::start("m").await;
    let mut config = kept_in(&path);
    config.routing.index_snapshot_interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (reply, _) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", prompt(0)), engine.answer("{}"));
    assert_eq!(reply.status, 200);
    let long = |path: &Path| std::fs::metadata(path).is_ok_and(|file| file.len() > 400);
    eventually("it is written", || long(&path)).await;
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).expect("a file");
    gateway.end().await;

    let gateway = TestGateway::start(kept_in(&copy), &[&engine]).await;
    assert!(gateway.pool("m").router.index_size().1 > 20);
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_has_started_again_is_expected_to_hold_nothing_and_one_that_is_away_is_not_forgotten()
{
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("index.snapshot");
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = kept_in(&path);
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.health.interval = Duration::from_millis(2);
    let gateway = TestGateway::start(config.clone(), &[&a, &b]).await;
    for n in 0..2 {
        ask(&gateway, &[&a, &b], n).await;
    }
    let blocks = gateway.pool("m").router.index_size().1;
    gateway.end().await;

    // With one engine only: the other's stays in the file.
    let gateway = TestGateway::start(config.clone(), &[&a]).await;
    assert!(gateway.pool("m").router.index_size().1 < blocks);
    gateway.end().await;
    let gateway = TestGateway::start(config.clone(), &[&a, &b]).await;
    assert_eq!(gateway.pool("m").router.index_size().1, blocks);
    gateway.end().await;

    // It is not there when the gateway starts, so it has started since.
    let address = b.authority().to_owned();
    drop(b);
    eventually("nobody listens", || std::net::TcpStream::connect(&address).is_err()).await;
    config.workers.push(kvlane_gateway::config::WorkerSpec::new(format!("http://{address}")));
    config.workers.push(kvlane_gateway::config::WorkerSpec::new(a.url()));
    let serving = kvlane_gateway::serve::Serving::start(config).expect("it starts");
    let worker = serving.controller.find(&format!("http://{address}")).expect("it is configured");
    eventually("it was refused", || worker.state().problem.is_some()).await;
    let mut listener = None;
    eventually("its port is free", || {
        listener = std::net::TcpListener::bind(&address).ok();
        listener.is_some()
    })
    .await;
    let listener = listener.expect("a listener");
    listener.set_nonblocking(true).expect("a socket");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
    let _again = FakeEngine::on(listener, serde_json::json!([{"id": "m"}]));
    eventually("both serve", || {
        let pools = serving.fleet.pools();
        pools
            .iter()
            .map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count()))
            .sum::<usize>()
            == 2
    })
    .await;
    let known = serving.fleet.pools()[0].router.index_size().1;
    assert!(known > 0 && known < blocks, "the other's alone: {known} of {blocks}");
    assert!(serving.shut_down().await.is_nothing());
}
