//! The index of dispatches over a restart of the gateway.

use std::path::Path;
use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, config, eventually, soon};
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

/// Sends a request and lets the chosen engine answer: returns the worker, the reason, and the predicted cached
/// tokens.
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
async fn after_a_restart_every_prompt_goes_to_the_holder_of_its_prefix() {
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
    assert_eq!(gateway.pool("m").router.index_size().1, size.1, "all blocks are restored");
    let mut again = Vec::new();
    for n in 0..6 {
        let (_, reason, overlap) = ask(&gateway, &engines, n).await;
        assert_eq!(reason, "prefix_hit");
        again.push(overlap);
    }
    gateway.end().await;
    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    for (n, expect) in again.iter().enumerate() {
        assert_eq!(ask(&gateway, &engines, n).await.2, *expect, "as before the second restart");
    }
    gateway.end().await;

    std::fs::write(&path, "nonsense").expect("written");
    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    assert_eq!(gateway.pool("m").router.index_size().1, 0, "an invalid snapshot only costs its entries");
    gateway.end().await;
}

#[tokio::test]
async fn the_dispatch_index_survives_a_killed_gateway() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("index.snapshot");
    let engine = FakeEngine::start("m").await;
    let mut config = kept_in(&path);
    config.routing.index_snapshot_interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    gateway.served(&engine, prompt(0)).await;
    let long = |path: &Path| std::fs::metadata(path).is_ok_and(|file| file.len() > 400);
    eventually("the snapshot is written", || long(&path)).await;
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).expect("a file");
    gateway.end().await;

    let gateway = TestGateway::start(kept_in(&copy), &[&engine]).await;
    assert!(gateway.pool("m").router.index_size().1 > 20);
    gateway.end().await;
}

#[tokio::test]
async fn a_restarted_engine_is_expected_to_be_empty_and_an_absent_one_is_kept_in_the_snapshot() {
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

    // With one engine only: the other's entries stay in the file.
    let gateway = TestGateway::start(config.clone(), &[&a]).await;
    assert!(gateway.pool("m").router.index_size().1 < blocks);
    gateway.end().await;
    let gateway = TestGateway::start(config.clone(), &[&a, &b]).await;
    assert_eq!(gateway.pool("m").router.index_size().1, blocks);
    gateway.end().await;

    // It refuses connections when the gateway starts, so it has restarted since.
    let address = b.authority().to_owned();
    drop(b);
    eventually("the port is closed", || std::net::TcpStream::connect(&address).is_err()).await;
    config.workers.push(kvlane_gateway::config::WorkerSpec::new(format!("http://{address}")));
    config.workers.push(kvlane_gateway::config::WorkerSpec::new(a.url()));
    let serving = kvlane_gateway::serve::Serving::start(config).expect("it starts");
    let worker = serving.controller.find(&format!("http://{address}")).expect("it is configured");
    eventually("a connection was refused", || worker.state().problem.is_some()).await;
    let _again = FakeEngine::start_again(&address, serde_json::json!([{"id": "m"}])).await;
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
    assert!(known > 0 && known < blocks, "only the other engine's blocks: {known} of {blocks}");
    assert!(serving.shut_down().await.is_nothing());
}

#[tokio::test]
async fn a_successor_that_starts_before_the_end_has_the_index_and_its_file_is_not_overwritten() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("index.snapshot");
    let engine = FakeEngine::start("m").await;
    let mut config = kept_in(&path);
    config.routing.index_snapshot_interval = Duration::from_secs(3600);
    config.server.shutdown_delay = Duration::from_secs(3600);
    let gateway = TestGateway::start(config.clone(), &[&engine]).await;
    gateway.served(&engine, prompt(0)).await;
    let blocks = gateway.pool("m").router.index_size().1;
    let (hurry, hurried) = tokio::sync::oneshot::channel::<()>();
    let stopping = tokio::spawn(gateway.shut_down_or(async { hurried.await.expect("told") }));
    eventually("the snapshot is written", || path.exists()).await;

    config.server.shutdown_delay = Duration::ZERO;
    let successor = TestGateway::start(config, &[&engine]).await;
    assert_eq!(successor.pool("m").router.index_size().1, blocks);
    successor.served(&engine, prompt(9)).await;
    successor.end().await;
    let written = std::fs::read(&path).expect("a file");
    hurry.send(()).expect("it waits");
    soon("the end", stopping).await.expect("no panic");
    assert_eq!(std::fs::read(&path).expect("a file"), written, "the successor knows more");
}
