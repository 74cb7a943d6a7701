//! Circuit breakers: the outcome of requests decides whether an endpoint gets more of them.

use std::time::Duration;

use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, event, next_call};

/// Longer than any test.
const FOR_EVER: Duration = Duration::from_secs(3600);

fn in_turn() -> Config {
    let mut config = kvlane_gateway::testing::in_turn();
    config.breaker.failure_threshold = 2;
    config.breaker.cooldown = FOR_EVER;
    config.breaker.cooldown_max = FOR_EVER;
    config
}

/// Sends requests until the first engine has responded like this to `times` of them; the second answers all.
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
async fn an_engine_that_fails_repeatedly_gets_no_more_requests() {
    for what in ["", "HTTP/1.1 502 Bad\r\ncontent-length: 0\r\n\r\n"] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
        until(&gateway, [&a, &b], 2, what).await;
        for _ in 0..4 {
            gateway.served(&b, chat("m", "hi")).await;
        }
        let worker = gateway.serving().controller.find(&a.url()).expect("a worker");
        assert!(worker.state().healthy, "the breaker does not depend on probes");
        gateway.end_quiet(&[&a]).await;
    }
}

#[tokio::test]
async fn broken_streams_count_and_disconnecting_clients_do_not() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    for (leaves, times) in [(true, 6), (false, 2)] {
        let mut seen = 0;
        while seen < times {
            let mut client = gateway.begin(chat_stream("m", "hi")).await;
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
        gateway.served(&b, chat("m", "hi")).await;
    }
    gateway.end_quiet(&[&a]).await;
}

/// Invariant: A busy engine does not open the circuit breaker, and neither do bad requests.
///
/// Also held by `bad_requests_and_odd_responses_open_no_breaker`.
#[tokio::test]
async fn a_busy_engine_is_avoided_for_the_time_it_gives_and_its_breaker_stays_closed() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let busy = "HTTP/1.1 429 Busy\r\nretry-after: 20\r\ncontent-length: 0\r\n\r\n";
    until(&gateway, [&a, &b], 1, busy).await;
    for _ in 0..4 {
        gateway.served(&b, chat("m", "hi")).await;
    }
    let metrics = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!metrics.contains("kvlane_worker_failures_total{"), "{metrics}");
    gateway.end_quiet(&[&a]).await;
}

#[tokio::test]
async fn bad_requests_and_odd_responses_open_no_breaker() {
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
    assert_eq!(seen, [6, 6], "both engines get requests to the end");
    gateway.end().await;
}

#[tokio::test]
async fn the_only_engine_still_gets_requests_when_it_fails() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    for _ in 0..5 {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            drop(engine.call().await);
        });
        assert_eq!(reply.status, 502);
    }
    gateway.served(&engine, chat("m", "hi")).await;
    gateway.end().await;
}
