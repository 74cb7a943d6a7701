//! Shutdown: no new requests, those in flight finish, and no state is left.

use std::time::Duration;

use kvlane_gateway::config::WorkerSpec;
use kvlane_gateway::serve::{Cut, Serving};
use kvlane_gateway::testing::{
    Client, FakeEngine, TestGateway, chat, chat_stream, config, event, eventually, soon,
};

/// Invariant: Shutdown lets requests finish and accepts no new ones.
///
/// Also held by `a_request_beyond_the_grace_period_is_cut_off`.
#[tokio::test]
async fn a_running_stream_finishes_and_new_connections_are_refused() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (address, metrics) = (gateway.address(), gateway.metrics_address());
    let (mut client, mut call) = gateway.stream(&engine, "one").await;
    let mut idle = gateway.client().await;
    idle.request("GET", "/liveness", "").await;
    assert_eq!(idle.reply().await.status, 200);
    let mut silent = gateway.client().await;

    let pool = gateway.pool("m");
    let stopping = tokio::spawn(gateway.shut_down());
    eventually("new connections are refused", || std::net::TcpStream::connect(address).is_err()).await;
    assert_eq!(idle.closed().await, b"", "an idle connection closes");
    assert_eq!(silent.closed().await, b"", "a connection without any request closes, too");
    assert!(std::net::TcpStream::connect(metrics).is_ok(), "operators can still connect");
    call.chunk(&event("two")).await;
    client.see("two").await;
    assert!(!stopping.is_finished());
    call.end_stream().await;
    assert!(client.rest().await.1, "ended properly");
    // The head of that answer said that the connection stays: the client's next request may be on its way.
    client.request("GET", "/v1/models", "").await;
    let last = client.reply().await;
    assert_eq!((last.status, last.header("connection")), (200, Some("close")));
    client.closed().await;
    assert!(soon("the end", stopping).await.expect("no panic"), "nothing was cut");
    assert!(kvlane_gateway::testing::is_zero(&pool));
    assert!(std::net::TcpStream::connect(metrics).is_err());
}

/// Invariant: A gateway that shuts down reports it first, and serves for `server.shutdown_delay`.
#[tokio::test]
async fn in_the_delay_clients_are_served_and_asked_to_leave() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.shutdown_delay = Duration::from_secs(3600);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (address, metrics) = (gateway.address(), gateway.metrics_address());
    let (fleet, pool) = (gateway.fleet().clone(), gateway.pool("m"));
    let tasks = || fleet.runtimes().iter().map(|runtime| runtime.metrics().num_alive_tasks()).sum::<usize>();
    let idle = tasks();
    let mut kept = gateway.client().await;
    kept.request("GET", "/v1/models", "").await;
    assert_eq!(kept.reply().await.header("connection"), None);
    let (mut client, mut call) = gateway.stream(&engine, "one").await;
    let (hurry, hurried) = tokio::sync::oneshot::channel::<()>();
    let stopping = tokio::spawn(gateway.shut_down_or(async { hurried.await.expect("told") }));
    eventually("it stops", || fleet.stopping.load(std::sync::atomic::Ordering::Relaxed)).await;

    let mut probe = Client::connect(metrics).await;
    probe.request("GET", "/readiness", "").await;
    let reply = probe.reply().await;
    assert_eq!((reply.status, &reply.json()["stopping"]), (503, &serde_json::json!(true)));
    probe.request("GET", "/liveness", "").await;
    assert_eq!(probe.reply().await.status, 200, "operators keep their connections");
    call.chunk(&event("two")).await;
    client.see("two").await;
    call.end_stream().await;
    assert!(client.rest().await.1, "ended properly");
    let mut late = Client::connect(address).await;
    for client in [&mut kept, &mut late, &mut client] {
        client.request("POST", "/v1/chat/completions", &chat("m", "hi")).await;
        engine.answer("{}").await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.header("connection")), (200, Some("close")));
        assert_eq!(client.closed().await, b"");
    }
    // A client sees the end of its connection a moment before its task ends.
    drop(probe);
    eventually("no connection is left", || tasks() <= idle).await;
    hurry.send(()).expect("it waits");
    assert_eq!(soon("the end", stopping).await.expect("no panic"), Cut::default());
    assert!(kvlane_gateway::testing::is_zero(&pool));
}

#[tokio::test]
async fn a_request_of_a_connection_that_has_just_been_accepted_is_answered() {
    let gateway = TestGateway::start(config(), &[]).await;
    let address = gateway.address();
    let mut client = gateway.client().await;
    let stopping = tokio::spawn(gateway.shut_down());
    eventually("new connections are refused", || std::net::TcpStream::connect(address).is_err()).await;
    client.request("GET", "/v1/models", "").await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.header("connection")), (200, Some("close")));
    client.closed().await;
    assert!(soon("the end", stopping).await.expect("no panic"));
}

#[tokio::test]
async fn a_queued_request_finishes_too() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.routing.max_concurrent_requests = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut one, mut two) = (gateway.client().await, gateway.client().await);
    one.request("POST", "/v1/chat/completions", &chat("m", "one")).await;
    let call = engine.call().await;
    two.request("POST", "/v1/chat/completions", &chat("m", "two")).await;
    let pool = gateway.pool("m");
    eventually("the second waits", || pool.router.read(|scheduler| scheduler.queued()) == 1).await;
    let address = gateway.address();
    let stopping = tokio::spawn(gateway.shut_down());
    eventually("new connections are refused", || std::net::TcpStream::connect(address).is_err()).await;
    call.answer(200, "{}").await;
    assert_eq!(one.reply().await.status, 200);
    engine.answer("{}").await;
    assert_eq!(two.reply().await.status, 200);
    assert!(soon("the end", stopping).await.expect("no panic"));
    assert!(kvlane_gateway::testing::is_zero(&pool));
}

#[tokio::test]
async fn a_request_beyond_the_grace_period_is_cut_off() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.shutdown_grace = Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    let pool = gateway.pool("m");
    assert!(!gateway.shut_down().await, "it reports that a request was cut off");
    assert!(!client.rest().await.1);
    call.gateway_gone().await;
    eventually("the ledger is zero", || kvlane_gateway::testing::is_zero(&pool)).await;
}

#[tokio::test]
async fn ending_the_grace_period_early_cuts_only_requests_in_flight() {
    let engine = FakeEngine::start("m").await;
    let start = || {
        let mut config = config();
        config.workers = vec![WorkerSpec::new(engine.url())];
        Serving::start(config).expect("the gateway starts")
    };
    let serving = start();
    eventually("it serves", || serving.controller.workers().iter().all(|worker| worker.state().healthy))
        .await;
    let cut = soon("the end", serving.shut_down_or(std::future::ready(()))).await;
    assert_eq!(cut, Cut::default(), "nothing was in flight");

    let serving = start();
    eventually("it serves", || serving.controller.workers().iter().all(|worker| worker.state().healthy))
        .await;
    let gateway = TestGateway::of(serving);
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    let cut = gateway.shut_down_or(std::future::ready(())).await;
    assert_eq!(cut, Cut { requests: 1, connections: 1 });
    call.gateway_gone().await;
}

#[tokio::test]
async fn a_dropped_gateway_releases_its_ports() {
    let gateway = TestGateway::start(config(), &[]).await;
    let (address, metrics) = (gateway.address(), gateway.metrics_address());
    let mut client = gateway.client().await;
    client.request("GET", "/liveness", "").await;
    assert_eq!(client.reply().await.status, 200);
    drop(gateway);
    client.closed().await;
    for address in [address, metrics] {
        eventually("the port is closed", || std::net::TcpStream::connect(address).is_err()).await;
    }
}

#[tokio::test]
async fn a_gateway_that_fails_to_start_leaves_nothing_running() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut config = config();
    config.metrics.port = taken.local_addr().expect("an address").port();
    let error = Serving::start(config.clone()).err().expect("the port is taken");
    assert!(error.to_string().contains("metrics.port"), "{error}");
    drop(taken);
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    config.server.port = free.port();
    let worker = WorkerSpec::new("http://127.0.0.1:9");
    config.workers = vec![worker.clone(), worker];
    let error = Serving::start(config).err().expect("the same worker twice");
    assert!(error.to_string().contains("is listed twice"), "{error}");
    eventually("the port is free again", || std::net::TcpListener::bind(free).is_ok()).await;
}
