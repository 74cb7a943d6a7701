//! Workers join, drain, are replaced and leave under load, without a failed request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::testing::{
    Client, FakeEngine, TestGateway, chat, chat_stream, config, event, eventually,
};
use serde_json::json;
use tokio::task::JoinSet;

/// Connections that send requests all the time.
const CLIENTS: usize = 12;
/// Changes of the fleet.
const ROUNDS: usize = 12;

/// Answers all requests, streams in pieces, for as long as it is polled.
async fn serve(engine: &FakeEngine, answered: &AtomicUsize) {
    let mut calls = JoinSet::new();
    loop {
        tokio::select! {
            mut call = engine.call() => drop(calls.spawn(async move {
                if !String::from_utf8_lossy(&call.body).contains("stream") {
                    return call.answer(200, "{}").await;
                }
                call.begin_stream().await;
                for word in ["one", "two", "three"] {
                    call.chunk(&event(word)).await;
                    tokio::task::yield_now().await;
                }
                call.chunk("data: [DONE]\n\n").await;
                call.end_stream().await;
            })),
            Some(ended) = calls.join_next() => ended.expect("the gateway reads all of it"),
        }
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends requests until `stop`; returns the number of responses, which must all succeed.
async fn ask(mut client: Client, n: usize, stop: Arc<AtomicBool>) -> usize {
    let mut answered = 0;
    while !stop.load(Ordering::Relaxed) {
        let text = format!("client {n}, request {answered}");
        let streams = (n + answered).is_multiple_of(2);
        let body = if streams { chat_stream("m", &text) } else { chat("m", &text) };
        client.request("POST", "/v1/chat/completions", &body).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 200, "{text}: {reply:?}");
        assert_eq!(reply.text().ends_with("[DONE]\n\n"), streams, "{text}: {reply:?}");
        answered += 1;
    }
    answered
}

fn eligible(gateway: &TestGateway) -> usize {
    let pools = gateway.fleet().pools();
    pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
}

/// Changes the fleet in every way, one after the other, and waits for each change.
async fn churn(gateway: &TestGateway, engines: &[FakeEngine; 3]) {
    let reload = |workers: Vec<WorkerSpec>| {
        let mut next = Config::clone(&gateway.serving().config());
        next.workers = workers;
        gateway.serving().reload(next).expect("right");
    };
    let controller = &gateway.serving().controller;
    for round in 0..ROUNDS {
        let before = &engines[(round + 2) % 3];
        let [one, other, third] = [0, 1, 2].map(|n| &engines[(round + n) % 3]);
        let spec = |engine: &FakeEngine| WorkerSpec::new(engine.url());
        let urls = || controller.workers().iter().map(|worker| worker.url.to_string()).collect::<Vec<_>>();
        let settled = |number: usize| controller.workers().len() == number && eligible(gateway) == number;

        // By the file: all workers are replaced; then one stays, one leaves, one joins.
        assert_eq!(urls(), [before.url()]);
        reload(vec![spec(one)]);
        eventually("another serves", || settled(1) && urls() == [one.url()]).await;
        reload(vec![spec(one), spec(other)]);
        eventually("two serve", || settled(2)).await;
        reload(vec![spec(other), spec(third)]);
        eventually("two others serve", || settled(2)).await;

        // The settings of the only remaining worker change.
        reload(vec![spec(third)]);
        eventually("one serves", || settled(1)).await;
        reload(vec![WorkerSpec { model: Some("m".into()), ..spec(third) }]);
        eventually("its successor serves", || settled(1)).await;

        // By operators: another joins, the first drains, resumes, leaves.
        let joined = gateway.operate("POST", "/workers", json!({"url": one.url()}).to_string()).await;
        assert_eq!(joined.status, 202);
        eventually("both serve", || settled(2)).await;
        let worker = controller.find(&third.url()).expect("it serves");
        let path = format!("/workers/{}", worker.id.0);
        for draining in [true, false] {
            let body = json!({"draining": draining}).to_string();
            assert_eq!(gateway.operate("PUT", &path, body).await.status, 200);
            eventually("it does or does not", || eligible(gateway) == 2 - usize::from(draining)).await;
        }
        assert_eq!(gateway.operate("DELETE", &path, "").await.status, 202);
        eventually("it has left", || settled(1)).await;
        // The file takes over a worker that operators have added.
        reload(vec![spec(one)]);
        eventually("it still serves", || settled(1)).await;
    }
}

/// Invariant: Workers join and leave under load without a failed request or a retry.
///
/// Also held by `a_removed_worker_serves_until_those_added_in_the_same_reload_do`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_join_drain_and_leave_under_load_without_a_failed_request() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.health.interval = Duration::from_millis(2);
    let gateway = TestGateway::start(config, &[&engines[2]]).await;
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), [(); 3].map(|()| AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        clients.spawn(ask(gateway.client().await, n, Arc::clone(&stop)));
    }
    let load = async {
        churn(&gateway, &engines).await;
        stop.store(true, Ordering::Relaxed);
        clients.join_all().await
    };
    let served = tokio::select! {
        served = load => served,
        () = serve(&engines[0], &answered[0]) => unreachable!("it serves forever"),
        () = serve(&engines[1], &answered[1]) => unreachable!("it serves forever"),
        () = serve(&engines[2], &answered[2]) => unreachable!("it serves forever"),
    };
    assert!(served.iter().all(|&served| served > 0), "{served:?}");
    assert!(answered.iter().all(|answered| answered.load(Ordering::Relaxed) > 0), "{answered:?}");
    for name in [r#"retries_total{model="m"}"#, r#"shed_total{model="m",reason="queue_full"}"#] {
        let counted = gateway.metric(&format!("kvlane_{name}")).await;
        assert!(counted.is_none_or(|counted| counted == 0.0), "{name} {counted:?}: no attempt failed");
    }
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains("kvlane_worker_failures_total{"), "{text}");
    gateway.end().await;
}
