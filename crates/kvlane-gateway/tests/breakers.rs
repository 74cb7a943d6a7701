//! What becomes of requests decides whether an endpoint is given more of them.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, next_call};

/// So long that no test sees its end.
const FOR_EVER: Duration = Duration::from_secs(3600);

fn in_turn() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.retry.initial_backoff = Duration::ZERO;
    config.breaker.failure_threshold = 2;
    config.breaker.cooldown = FOR_EVER;
    config.breaker.cooldown_max = FOR_EVER;
    config
}

/// Asks until the first engine has done this to so many requests; the second answers all.
async fn until(gateway: &TestGateway, engines: [&FakeEngine; 2], times: usize, what: &str) {
    let mut done = 0;
    while done < times {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            let (who, mut call) = next_call(&engines).await;
            if who == 0 {
                done += 1;
                call.send(what).await;
                drop(call);
                engines[1].answer("{}").await;
            } else {
                call.answer(200, "{}").await;
            }
        });
        assert_eq!(reply.status, 200);
        gateway.ledger_is_zero().await;
    }
}

#[tokio::test]
async fn an_engine_that_fails_in_a_row_is_given_no_more() {
    for what in ["", "HTTP/1.1 502 Bad\r\ncontent-length: 0\r\n\r\n"] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
        until(&gateway, [&a, &b], 2, what).await;
        for _ in 0..4 {
            let (reply, _) =
                tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), b.answer("{}"));
            assert_eq!(reply.status, 200);
        }
        assert!(a.is_quiet().await, "nothing is placed there after {what:?}");
        let worker = gateway.serving().controller.find(&a.url()).expect("a worker");
        assert!(worker.state().healthy, "its probes are another matter");
        gateway.end().await;
    }
}

#[tokio::test]
async fn streams_that_break_count_and_a_client_that_leaves_does_not() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    for (leaves, times) in [(true, 6), (false, 2)] {
        let mut seen = 0;
        while seen < times {
            let mut client = gateway.client().await;
            client.request("POST", "/v1/chat/completions", &chat_stream("m", "hi")).await;
            let (who, mut call) = next_call(&[&a, &b]).await;
            call.begin_stream().await;
            call.chunk(&event("one")).await;
            client.head().await;
            client.see("one").await;
            match (who == 0, leaves) {
                (true, true) => {
                    seen += 1;
                    drop(client);
                    call.gateway_gone().await;
                }
                (true, false) => {
                    seen += 1;
                    drop(call);
                    client.rest().await;
                }
                (false, _) => {
                    call.end_stream().await;
                    client.rest().await;
                }
            }
            gateway.ledger_is_zero().await;
        }
    }
    for _ in 0..4 {
        let (reply, _) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), b.answer("{}"));
        assert_eq!(reply.status, 200);
    }
    assert!(a.is_quiet().await);
    gateway.end().await;
}

/// Invariant: A busy engine does not open the circuit breaker, and neither do bad requests.
///
/// Also held by `bad_requests_and_odd_answers_break_nothing`.
#[tokio::test]
async fn an_engine_that_is_busy_is_left_alone_for_as_long_as_it_says_and_is_not_broken() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let busy = "HTTP/1.1 429 Busy\r\nretry-after: 20\r\ncontent-length: 0\r\n\r\n";
    until(&gateway, [&a, &b], 1, busy).await;
    for _ in 0..4 {
        let (reply, _) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), b.answer("{}"));
        assert_eq!(reply.status, 200);
    }
    assert!(a.is_quiet().await, "once was enough");
    let metrics = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!metrics.contains("kvlane_worker_failures_total{"), "{metrics}");
    gateway.end().await;
}

#[tokio::test]
async fn bad_requests_and_odd_answers_break_nothing() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.breaker.failure_threshold = 1;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let mut seen = [0, 0];
    for status in [400, 401, 404, 413, 422, 501].repeat(2) {
        let (reply, who) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
                let (who, call) = next_call(&[&a, &b]).await;
                call.answer(status, "{}").await;
                who
            });
        assert_eq!(reply.status, status);
        seen[who] += 1;
    }
    assert_eq!(seen, [6, 6], "both are given their turns to the end");
    gateway.end().await;
}

#[tokio::test]
async fn a_lone_engine_that_fails_is_still_asked() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    for _ in 0..5 {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            drop(engine.call().await);
        });
        assert_eq!(reply.status, 502);
    }
    let (reply, _) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), engine.answer("{}"));
    assert_eq!(reply.status, 200);
    gateway.end().await;
}
