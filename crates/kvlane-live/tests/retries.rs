//! An attempt that failed before its answer began is made again elsewhere; one that has begun to answer is not.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_live::config::Config;
use kvlane_live::testing::{Call, FakeEngine, TestGateway, chat, chat_stream, config, event, eventually};

/// Requests go round, so that tests know who is next.
fn in_turn() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.health.failure_threshold = 100;
    config
}

/// The next request at any of them, and who got it.
async fn next(engines: &[&FakeEngine]) -> (usize, Call) {
    let mut waiting: Vec<_> = engines.iter().map(|engine| Box::pin(engine.call())).collect();
    std::future::poll_fn(|cx| {
        for (n, call) in waiting.iter_mut().enumerate() {
            if let std::task::Poll::Ready(call) = call.as_mut().poll(cx) {
                return std::task::Poll::Ready((n, call));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

fn in_flight(gateway: &TestGateway) -> u32 {
    let pool = gateway.pool("m");
    pool.router
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.load.in_flight.requests).sum())
}

#[tokio::test]
async fn an_attempt_that_failed_before_its_answer_is_made_elsewhere() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let engines = [&a, &b];
    for failure in ["", "garbage\r\n\r\n", "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 200 O"]
    {
        let (reply, (first, second)) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
                let (first, mut call) = next(&engines).await;
                let body = call.body.clone();
                call.send(failure).await;
                drop(call);
                let (second, call) = next(&engines).await;
                assert_eq!(call.body, body, "the same body again");
                assert_eq!(in_flight(&gateway), 1, "the failed attempt has given back what it held");
                call.answer(200, "{}").await;
                (first, second)
            });
        assert_ne!(first, second, "after {failure:?}");
        assert_eq!(reply.status, 200, "after {failure:?}");
        assert_eq!(reply.header("x-router-backend"), Some(engines[second].url().as_str()));
        gateway.ledger_is_zero().await;
    }
    assert_eq!(gateway.metric(r#"kvlane_retries_total{model="m"}"#).await, Some(4.0));
    gateway.end().await;
}

#[tokio::test]
async fn an_answer_that_has_begun_is_not_asked_for_again() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let mut client = gateway.client().await;
    client.request("POST", "/v1/chat/completions", &chat_stream("m", "hi")).await;
    let (_, mut call) = next(&[&a, &b]).await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    client.see("one").await;
    drop(call);
    assert!(!client.rest().await.1, "broken");
    gateway.ledger_is_zero().await;
    assert!(a.is_quiet().await && b.is_quiet().await);
    assert_eq!(gateway.metric(r#"kvlane_retries_total{model="m"}"#).await, Some(0.0));
    gateway.end().await;
}

#[tokio::test]
async fn attempts_end_after_the_total_and_the_last_failure_is_told() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
    let engines: Vec<&FakeEngine> = engines.iter().collect();
    let mut config = in_turn();
    config.retry.max_total_retries = 1;
    let gateway = TestGateway::start(config, &engines).await;
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        drop(next(&engines).await);
        drop(next(&engines).await);
    });
    assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"));
    assert!(reply.text().contains("(2 attempts)"), "{}", reply.text());
    gateway.ledger_is_zero().await;

    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        next(&engines).await.1.answer(503, r#"{"n":1}"#).await;
        next(&engines).await.1.answer(503, r#"{"n":2}"#).await;
    });
    assert_eq!((reply.status, reply.text().as_str()), (503, r#"{"n":2}"#), "the last answer is relayed");
    for engine in &engines {
        assert!(engine.is_quiet().await);
    }
    let text = gateway.operate("GET", "/metrics", "").await.text();
    let failed = text.lines().filter(|line| line.starts_with("kvlane_worker_failures_total"));
    let failed: f64 = failed.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    assert_eq!(failed, 4.0, "every failed attempt is counted, the last ones too");
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_gets_as_many_attempts_as_it_may_even_when_it_is_alone() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.retry.max_worker_retries = 3;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        for _ in 0..3 {
            drop(engine.call().await);
        }
    });
    assert_eq!(reply.status, 502);
    assert!(reply.text().contains("(3 attempts)"), "{}", reply.text());
    assert!(engine.is_quiet().await);
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        drop(engine.call().await);
        drop(engine.call().await);
        engine.call().await.answer(200, "{}").await;
    });
    assert_eq!(reply.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_lone_worker_that_fails_is_not_asked_twice_by_default() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    let (reply, call) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        drop(engine.call().await);
    });
    let () = call;
    assert_eq!(reply.status, 502);
    assert!(engine.is_quiet().await);
    gateway.end().await;
}

#[tokio::test]
async fn requests_that_fail_make_a_worker_unhealthy() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.health.failure_threshold = 2;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let worker = gateway.serving().fleet.find(&a.url()).expect("a worker");
    let mut failed = 0;
    while failed < 2 {
        assert!(worker.state().healthy, "after {failed} failures");
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            let (who, call) = next(&[&a, &b]).await;
            if who == 0 {
                failed += 1;
                drop(call);
                b.answer("{}").await;
            } else {
                call.answer(200, "{}").await;
            }
        });
        assert_eq!(reply.status, 200);
    }
    assert!(!worker.state().healthy);
    assert_eq!(gateway.metric(&format!(r#"kvlane_worker_health{{worker="{}"}}"#, a.url())).await, Some(0.0));
    let readiness = gateway.ask("GET", "/readiness", "").await;
    assert_eq!((readiness.status, &readiness.json()["pools"][0]["ready"]), (200, &serde_json::json!(1)));
    assert_eq!(readiness.json()["down"][0]["url"], a.url());
    for _ in 0..4 {
        let (reply, _) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), b.answer("{}"));
        assert_eq!(reply.status, 200);
    }
    assert!(a.is_quiet().await, "nothing is placed there");
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_only_says_that_it_cannot_becomes_unhealthy_even_alone() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.health.failure_threshold = 2;
    let gateway = TestGateway::start(config, &[&engine]).await;
    for _ in 0..2 {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            engine.call().await.answer(503, r#"{"busy":1}"#).await;
        });
        assert_eq!((reply.status, reply.text().as_str()), (503, r#"{"busy":1}"#));
        gateway.ledger_is_zero().await;
    }
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (503, "no_endpoint_ready"));
    gateway.end().await;
}

#[tokio::test]
async fn streams_that_break_make_a_worker_unhealthy() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.health.failure_threshold = 3;
    let gateway = TestGateway::start(config, &[&engine]).await;
    for _ in 0..3 {
        let mut client = gateway.client().await;
        client.request("POST", "/v1/chat/completions", &chat_stream("m", "hi")).await;
        let mut call = engine.call().await;
        call.begin_stream().await;
        client.head().await;
        drop(call);
        assert!(!client.rest().await.1);
        gateway.ledger_is_zero().await;
    }
    assert!(!gateway.serving().fleet.workers()[0].state().healthy);
    gateway.end().await;
}

#[tokio::test]
async fn probes_take_a_worker_out_and_bring_it_back() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(5);
    config.health.failure_threshold = 2;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let eligible = || gateway.pool("m").router.read(|scheduler| scheduler.pool().eligible().count());
    a.set_healthy(false);
    eventually("one of two is left", || eligible() == 1).await;
    for _ in 0..4 {
        let (reply, _) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), b.answer("{}"));
        assert_eq!(reply.header("x-router-backend"), Some(b.url().as_str()));
    }
    a.set_healthy(true);
    eventually("both are back", || eligible() == 2).await;
    b.refuse();
    eventually("a worker that cannot be reached is out", || eligible() == 1).await;
    let (reply, _) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), a.answer("{}"));
    assert_eq!(reply.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn good_probes_do_not_hide_that_every_request_fails() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(2);
    config.health.failure_threshold = 2;
    // Far away: once it is out it stays out for this test.
    config.health.success_threshold = u32::MAX;
    let gateway = TestGateway::start(config, &[&engine]).await;
    for _ in 0..2 {
        let probes = engine.probes();
        eventually("it is probed between two requests", || engine.probes() > probes + 2).await;
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            drop(engine.call().await);
        });
        assert_eq!(reply.status, 502);
    }
    assert!(!gateway.serving().fleet.workers()[0].state().healthy);
    let eligible = gateway.pool("m").router.read(|scheduler| scheduler.pool().eligible().count());
    assert_eq!(eligible, 0, "the scheduler knows it too");
    gateway.end().await;
}
