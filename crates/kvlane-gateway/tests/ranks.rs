//! An engine with several data-parallel ranks is several endpoints.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, config, eventually};

/// A vLLM metrics page of these ranks, each with its number of running requests.
fn page(ranks: &[(u32, u32)]) -> String {
    let line = |(rank, running): &(u32, u32)| {
        format!("vllm:num_requests_running{{engine=\"{rank}\",model_name=\"m\"}} {running}\n")
    };
    ranks.iter().map(line).collect()
}

fn in_turn() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config
}

async fn engine(ranks: &[(u32, u32)]) -> FakeEngine {
    let engine = FakeEngine::start("m").await;
    engine.set_metrics(&page(ranks));
    engine
}

/// The rank of the request as the engine sees it, and the backend in the client's response.
async fn ask(gateway: &TestGateway, engine: &FakeEngine, fields: &str) -> (Vec<String>, String) {
    let mut client = gateway.client().await;
    client.request_with("POST", "/v1/chat/completions", fields, &chat("m", "hi")).await;
    let ((head, _), reply) = tokio::join!(engine.answer("{}"), client.reply());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    let ranks = lines.filter(|(name, _)| name.eq_ignore_ascii_case("x-data-parallel-rank"));
    let ranks = ranks.map(|(_, value)| value.trim().to_owned()).collect();
    (ranks, reply.header("x-router-backend").expect("a backend").to_owned())
}

fn names(gateway: &TestGateway) -> Vec<String> {
    let pool = gateway.pool("m");
    pool.router
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.name.to_string()).collect())
}

#[tokio::test]
async fn each_rank_is_an_endpoint_and_requests_name_it() {
    let engine = engine(&[(0, 3), (1, 5)]).await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    let seats = [format!("{}#0", engine.url()), format!("{}#1", engine.url())];
    assert_eq!(names(&gateway), seats);
    let reported: Vec<Option<u32>> = gateway.pool("m").router.read(|scheduler| {
        let loads = scheduler.pool().endpoints().map(|endpoint| endpoint.load.reported);
        loads.map(|load| load.map(|(reported, _)| reported.running)).collect()
    });
    assert_eq!(reported, [Some(3), Some(5)], "each rank has a load of its own");
    let mut seen = BTreeMap::new();
    for _ in 0..4 {
        let (ranks, backend) = ask(&gateway, &engine, "").await;
        *seen.entry((ranks, backend)).or_insert(0) += 1;
    }
    let each = |rank: usize| ((vec![rank.to_string()], seats[rank].clone()), 2);
    assert_eq!(seen, BTreeMap::from([each(0), each(1)]));
    gateway.end().await;
}

#[tokio::test]
async fn a_client_can_select_the_rank() {
    let engine = engine(&[(0, 0), (1, 0)]).await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    for _ in 0..3 {
        let (ranks, backend) = ask(&gateway, &engine, "X-Data-Parallel-Rank: 1\r\n").await;
        assert_eq!((ranks, backend), (vec!["1".to_owned()], format!("{}#1", engine.url())));
    }
    for unknown in ["7", "none", "-1"] {
        let (ranks, _) = ask(&gateway, &engine, &format!("x-data-parallel-rank: {unknown}\r\n")).await;
        assert!(ranks == ["0"] || ranks == ["1"], "{unknown} is not a rank: {ranks:?}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_with_one_rank_gets_only_the_clients_rank_header() {
    let engine = engine(&[(3, 0)]).await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    assert_eq!(names(&gateway), [engine.url()]);
    assert_eq!(ask(&gateway, &engine, "").await, (vec![], engine.url()));
    let asked = ask(&gateway, &engine, "x-data-parallel-rank: 2\r\n").await;
    assert_eq!(asked, (vec!["2".to_owned()], engine.url()));
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_leaves_loses_all_its_endpoints() {
    let (one, two) = (engine(&[(0, 0), (1, 0), (2, 0)]).await, engine(&[(0, 0)]).await);
    let gateway = TestGateway::start(in_turn(), &[&one, &two]).await;
    assert_eq!(names(&gateway).len(), 4);
    for n in 0..4 {
        let mut client = gateway.begin(chat("m", "hi")).await;
        tokio::select! { _ = one.answer("{}") => {}, _ = two.answer("{}") => {} }
        assert_eq!(client.reply().await.status, 200, "request {n}");
    }
    let worker = gateway.serving().controller.find(&one.url()).expect("it is there");
    gateway.serving().controller.set_draining(&worker, true);
    let eligible = gateway.pool("m").router.read(|scheduler| scheduler.pool().eligible().count());
    assert_eq!(eligible, 1, "draining covers every rank");
    gateway.serving().controller.remove(&worker);
    eventually("its endpoints have left", || names(&gateway) == [two.url()]).await;
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains(&one.url()), "no metric of it is left");
    gateway.end().await;
}

#[tokio::test]
async fn a_failed_request_is_not_retried_on_another_rank_of_the_same_worker() {
    let (bad, good) = (engine(&[(0, 0), (1, 0), (2, 0)]).await, engine(&[(0, 0)]).await);
    let mut config = in_turn();
    config.retry.max_total_retries = 1;
    let gateway = TestGateway::start(config, &[&bad, &good]).await;
    for _ in 0..4 {
        let mut client = gateway.begin(chat("m", "hi")).await;
        let served = tokio::select! {
            call = bad.call() => { call.answer(503, "{}").await; good.answer("{}").await }
            served = good.answer("{}") => served,
        };
        drop(served);
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_returns_with_other_ranks_is_registered_again() {
    let engine = engine(&[(0, 0)]).await;
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    assert_eq!(names(&gateway).len(), 1);
    engine.set_metrics(&page(&[(0, 0), (1, 0)]));
    eventually("it has two endpoints", || names(&gateway).len() == 2).await;
    engine.set_metrics("");
    let probes = engine.probes();
    eventually("it was queried again", || engine.probes() > probes + 30).await;
    assert_eq!(names(&gateway).len(), 2, "a page without load says nothing of ranks");
    engine.set_metrics(&page(&[(0, 0)]));
    eventually("it has one endpoint again", || names(&gateway) == [engine.url()]).await;
    gateway.end().await;
}
