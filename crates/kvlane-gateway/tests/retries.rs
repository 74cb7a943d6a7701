//! Retries: an attempt that failed before its response began is repeated on another endpoint; one that has begun is
//! not.

use std::time::Duration;

use kvlane_gateway::testing::{
    FakeEngine, TestGateway, chat, chat_stream, event, eventually, in_turn, next_call as next,
};

fn in_flight(gateway: &TestGateway) -> u32 {
    let pool = gateway.pool("m");
    pool.router
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.load.in_flight.requests).sum())
}

/// Invariant: Only an attempt of which the client has received nothing is repeated; a broken stream ends in an error
/// event after whole events, any other broken answer is cut.
///
/// Also held by `a_response_that_has_begun_is_not_retried`,
/// `a_broken_stream_ends_with_an_error_event_of_its_api`, `the_client_sees_a_broken_response_that_is_not_an_event_stream`.
#[tokio::test]
async fn an_attempt_that_failed_before_its_response_is_retried_elsewhere() {
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
                assert_eq!(in_flight(&gateway), 1, "the failed attempt has released its load");
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
async fn a_response_that_has_begun_is_not_retried() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let (_, mut call) = next(&[&a, &b]).await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    client.see("one").await;
    drop(call);
    let (last, _) = client.rest().await;
    assert!(memchr::memmem::find(&last, b"stream_broken").is_some(), "{:?}", String::from_utf8_lossy(&last));
    gateway.ledger_is_zero().await;
    assert_eq!(gateway.metric(r#"kvlane_retries_total{model="m"}"#).await, Some(0.0));
    gateway.end_quiet(&[&a, &b]).await;
}

#[tokio::test]
async fn attempts_stop_at_the_limit_and_the_client_gets_the_last_error() {
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
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        next(&engines).await.1.answer(502, r#"{"n":1}"#).await;
        next(&engines).await.1.answer(504, r#"{"n":2}"#).await;
    });
    assert_eq!(
        (reply.status, reply.text().as_str()),
        (504, r#"{"n":2}"#),
        "also that of a proxy in front of it"
    );
    let text = gateway.operate("GET", "/metrics", "").await.text();
    let failed = text.lines().filter(|line| line.starts_with("kvlane_worker_failures_total"));
    let failed: f64 = failed.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    assert_eq!(failed, 4.0, "every failed attempt is counted, the last ones too");
    gateway.end_quiet(&engines).await;
}

#[tokio::test]
async fn a_worker_gets_its_number_of_attempts_even_when_it_is_alone() {
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
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        drop(engine.call().await);
        drop(engine.call().await);
        engine.call().await.answer(200, "{}").await;
    });
    assert_eq!(reply.status, 200);
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_lone_worker_that_fails_is_not_retried_by_default() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    let (reply, call) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        drop(engine.call().await);
    });
    let () = call;
    assert_eq!(reply.status, 502);
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_busy_engine_is_skipped_and_that_is_no_failure() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let engines = [&a, &b];
    for status in [429, 503] {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            let (first, call) = next(&engines).await;
            call.answer(status, "{}").await;
            let (second, call) = next(&engines).await;
            assert_ne!(first, second);
            call.answer(200, "{}").await;
        });
        assert_eq!(reply.status, 200, "after {status}");
    }
    let text = gateway.operate("GET", "/metrics", "").await.text();
    let total = |name: &str| -> f64 {
        let samples = text.lines().filter(|line| line.starts_with(name));
        samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    assert_eq!((total("kvlane_worker_busy_total"), total("kvlane_worker_failures_total")), (2.0, 0.0));
    gateway.end().await;
}

#[tokio::test]
async fn if_all_engines_are_busy_the_client_gets_their_response_with_retry_after() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let engines = [&a, &b];
    for (said, expect) in [("retry-after: 2\r\n", "2"), ("", "1")] {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            for n in 0..2 {
                let (_, mut call) = next(&engines).await;
                let head = "HTTP/1.1 429 Busy\r\ncontent-type: application/json\r\ncontent-length: 7\r\n";
                call.send(format!("{head}{said}\r\n{{\"n\":{n}}}")).await;
                call.keep();
            }
        });
        assert_eq!((reply.status, reply.text().as_str()), (429, r#"{"n":1}"#));
        assert_eq!(reply.header("retry-after"), Some(expect));
        gateway.ledger_is_zero().await;
    }
    gateway.end_quiet(&[&a, &b]).await;
}

/// Longer than any test.
const FOR_EVER: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn an_attempt_that_may_have_cost_work_is_retried_after_a_pause() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.retry.initial_backoff = FOR_EVER;
    config.retry.max_backoff = FOR_EVER;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let mut client = gateway.begin(chat("m", "hi")).await;
    drop(next(&[&a, &b]).await);
    gateway.ledger_is_zero().await;
    // The pause would end after the request's deadline, so it is not waited for.
    assert_eq!(client.reply().await.status, 502);
    gateway.end_quiet(&[&a, &b]).await;
}

#[tokio::test]
async fn an_attempt_that_reached_no_engine_is_retried_at_once() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.retry.initial_backoff = FOR_EVER;
    config.retry.max_backoff = FOR_EVER;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    a.close_port();
    let address: std::net::SocketAddr = a.authority().parse().expect("an address");
    eventually("it refuses", || std::net::TcpStream::connect(address).is_err()).await;
    for _ in 0..4 {
        gateway.served(&b, chat("m", "hi")).await;
    }
    let retries = gateway.metric(r#"kvlane_retries_total{model="m"}"#).await;
    assert!(retries.is_some_and(|retries| retries >= 2.0), "{retries:?}");
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_disconnects_during_a_pause_is_not_retried() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.retry.initial_backoff = FOR_EVER;
    config.retry.max_backoff = FOR_EVER;
    config.server.request_timeout = 2 * FOR_EVER;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let client = gateway.begin(chat("m", "hi")).await;
    drop(next(&[&a, &b]).await);
    gateway.ledger_is_zero().await;
    drop(client);
    let left = r#"kvlane_requests_total{model="m",api="chat_completions",code="499"}"#;
    gateway.metric_becomes(left, 1.0).await;
    gateway.end_quiet(&[&a, &b]).await;
}

#[tokio::test]
async fn failed_requests_do_not_change_a_workers_health() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.health.failure_threshold = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    for _ in 0..5 {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            drop(engine.call().await);
        });
        assert_eq!(reply.status, 502);
    }
    assert!(gateway.serving().controller.workers()[0].state().healthy);
    gateway.end().await;
}

#[tokio::test]
async fn probes_take_a_worker_out_of_service_and_back() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(5);
    config.health.failure_threshold = 2;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let eligible = || gateway.pool("m").router.read(|scheduler| scheduler.pool().eligible().count());
    a.set_healthy(false);
    eventually("one of two is left", || eligible() == 1).await;
    for _ in 0..4 {
        let reply = gateway.served(&b, chat("m", "hi")).await;
        assert_eq!(reply.header("x-router-backend"), Some(b.url().as_str()));
    }
    a.set_healthy(true);
    eventually("both are back", || eligible() == 2).await;
    b.refuse();
    eventually("a worker that cannot be reached is out", || eligible() == 1).await;
    gateway.served(&a, chat("m", "hi")).await;
    gateway.end().await;
}
