//! Readiness: what the gateway waits for at start, and for how long.

use std::time::Duration;

use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_gateway::testing::{FakeEngine, FakeFeed, TestGateway, caching_config, config, eventually, soon};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// A gateway in front of these workers, which need not serve yet.
fn starting(mut config: Config, workers: Vec<WorkerSpec>) -> TestGateway {
    config.workers = workers;
    TestGateway::of(Serving::start(config).expect("the gateway starts"))
}

async fn readiness(gateway: &TestGateway) -> (u16, Value) {
    let reply = gateway.operate("GET", "/readiness", "").await;
    (reply.status, reply.json())
}

async fn is_ready(gateway: &TestGateway) {
    soon("readiness", async { while readiness(gateway).await.0 != 200 {} }).await;
}

/// Waits until this is all that readiness waits for.
async fn waits_only_for(gateway: &TestGateway, what: &str, name: &str) {
    let only = async |gateway: &TestGateway| {
        let (status, told) = readiness(gateway).await;
        assert_eq!((status, &told["ready"]), (503, &json!(false)), "{told}");
        let waits = told["waits_for"].as_array().expect("a list").clone();
        waits.len() == 1 && waits[0]["what"] == what && waits[0]["name"] == name
    };
    soon(what, async { while !only(gateway).await {} }).await;
}

/// Stops waiting for what has not come by now.
fn give_up(gateway: &TestGateway) {
    let mut config = Config::clone(&gateway.serving().config());
    config.health.sync_timeout = Duration::ZERO;
    gateway.serving().reload(config).expect("right");
}

fn patient() -> Config {
    let mut config = caching_config();
    config.health.sync_timeout = Duration::from_secs(3600);
    config
}

#[tokio::test]
async fn readiness_waits_until_kv_events_are_replayed_or_its_bound_has_passed() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let feed = FakeFeed::start().await;
    // It accepts connections and says nothing.
    let mute = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let silent = format!("tcp://{}", mute.local_addr().expect("an address"));
    let with_feed =
        |engine: &FakeEngine, feed| WorkerSpec { kv_events: vec![feed], ..WorkerSpec::new(engine.url()) };
    let workers =
        vec![with_feed(&a, feed.spec()), with_feed(&b, kvlane_gateway::config::FeedSpec::new(&silent))];
    let gateway = starting(patient(), workers);
    waits_only_for(&gateway, "kv_events", &b.url()).await;
    assert_eq!(gateway.operate("GET", "/health", "").await.status, 200, "the process is alive");
    give_up(&gateway);
    is_ready(&gateway).await;
    // What happens to feeds later is no reason to send requests elsewhere.
    drop(feed);
    let endpoints = gateway.pool("m").endpoints();
    let (one, _) = (endpoints[0].feed.clone().expect("a feed"), &endpoints);
    eventually("the feed is away", || !one.seen().connected).await;
    assert_eq!(readiness(&gateway).await.0, 200);
    gateway.end().await;
}

#[tokio::test]
async fn readiness_waits_for_the_first_probe_of_each_worker() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    b.stop_accepting();
    let mut config = patient();
    config.health.timeout = Duration::from_secs(3600);
    let gateway = starting(config, vec![WorkerSpec::new(a.url()), WorkerSpec::new(b.url())]);
    waits_only_for(&gateway, "worker", &b.url()).await;
    b.refuse();
    is_ready(&gateway).await;
    let (_, told) = readiness(&gateway).await;
    assert_eq!((&told["waits_for"], &told["down"][0]["url"]), (&json!([]), &json!(b.url())));
    gateway.shut_down().await;
}

#[tokio::test]
async fn readiness_waits_for_a_source_that_reports_nothing_until_its_bound_has_passed() {
    let (engine, files) = (FakeEngine::start("m").await, tempfile::tempdir().expect("a directory"));
    let mut config = patient();
    config.discovery.workers_file = Some(files.path().join("absent.yaml"));
    config.discovery.sync_timeout = Duration::from_secs(3600);
    let gateway = starting(config, vec![WorkerSpec::new(engine.url())]);
    waits_only_for(&gateway, "discovery", "file").await;
    let mut next = Config::clone(&gateway.serving().config());
    next.discovery.sync_timeout = Duration::from_millis(1);
    gateway.serving().reload(next).expect("right");
    is_ready(&gateway).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_joins_after_the_start_is_not_waited_for() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    b.stop_accepting();
    let mut config = patient();
    config.health.timeout = Duration::from_secs(3600);
    let gateway = starting(config, vec![WorkerSpec::new(a.url())]);
    is_ready(&gateway).await;
    gateway.serving().controller.add(&WorkerSpec::new(b.url())).expect("a worker");
    let (status, told) = readiness(&gateway).await;
    assert_eq!((status, &told["waits_for"]), (200, &json!([])), "{told}");
    b.refuse();
    gateway.shut_down().await;
}

#[tokio::test]
async fn without_an_endpoint_only_a_gateway_that_keeps_requests_is_ready() {
    let gateway = starting(config(), Vec::new());
    waits_only_for(&gateway, "endpoint", "").await;
    let mut keeps = Config::clone(&gateway.serving().config());
    keeps.routing.empty_pool_timeout = Duration::from_secs(60);
    gateway.serving().reload(keeps).expect("right");
    is_ready(&gateway).await;
    gateway.end().await;
}

#[tokio::test]
async fn changes_of_readiness_can_be_watched() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut verdict = gateway.fleet().start.watch();
    soon("it is ready", verdict.wait_for(|ready| *ready)).await.expect("the gateway runs");
    gateway.fleet().stop();
    assert!(!*verdict.borrow(), "it is told before anything else happens");
    gateway.end().await;
}
