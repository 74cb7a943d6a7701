//! Queueing, shedding and cancelling: the ledger is zero after each.

use std::time::Duration;

use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, eventually};

fn one_at_a_time() -> Config {
    let mut config = config();
    config.routing.max_concurrent_requests = 1;
    config
}

fn queued(gateway: &TestGateway) -> usize {
    gateway.pool("m").router.read(|scheduler| scheduler.queued())
}

#[tokio::test]
async fn requests_are_queued_and_served_in_order() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(one_at_a_time(), &[&engine]).await;
    let mut clients = Vec::new();
    for n in 0..5 {
        let client = gateway.begin(chat("m", &format!("number {n}"))).await;
        clients.push(client);
        eventually("it is queued or placed", || {
            gateway.pool("m").router.read(|scheduler| scheduler.queued() + scheduler.in_flight()) == n + 1
        })
        .await;
    }
    assert_eq!(queued(&gateway), 4);
    assert_eq!(gateway.metric(r#"kvlane_queue_requests{model="m"}"#).await, Some(4.0));
    for (n, client) in clients.iter_mut().enumerate() {
        let call = engine.call().await;
        assert!(
            String::from_utf8_lossy(&call.body).contains(&format!("number {n}")),
            "first come, first served"
        );
        assert_eq!(queued(&gateway), 4 - n, "one at a time");
        call.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end().await;
}

#[tokio::test]
async fn requests_beyond_the_limit_per_endpoint_are_queued() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await];
    let mut config = config();
    config.routing.max_requests_per_endpoint = 1;
    let gateway = TestGateway::start(config, &[&engines[0], &engines[1]]).await;
    let mut clients = Vec::new();
    for n in 0..3 {
        let client = gateway.begin(chat("m", &format!("number {n}"))).await;
        clients.push(client);
        eventually("it is queued or placed", || {
            gateway.pool("m").router.read(|scheduler| scheduler.queued() + scheduler.in_flight()) == n + 1
        })
        .await;
    }
    assert_eq!(queued(&gateway), 1, "both endpoints are full for the third");
    let (first, second) = (engines[0].call().await, engines[1].call().await);
    second.answer(200, "{}").await;
    let third = engines[1].call().await;
    assert!(String::from_utf8_lossy(&third.body).contains("number 2"), "it goes to the endpoint with room");
    for call in [first, third] {
        call.answer(200, "{}").await;
    }
    for client in &mut clients {
        assert_eq!(client.reply().await.status, 200);
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_full_queue_rejects_with_retry_after() {
    let engine = FakeEngine::start("m").await;
    let mut config = one_at_a_time();
    config.routing.queue_size = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut first, mut second) = (gateway.client().await, gateway.client().await);
    first.request("POST", "/v1/chat/completions", &chat("m", "one")).await;
    let call = engine.call().await;
    second.request("POST", "/v1/chat/completions", &chat("m", "two")).await;
    eventually("the second waits", || queued(&gateway) == 1).await;
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "three")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (429, "queue_full"));
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    assert!(reply.header("retry-after").is_some_and(|after| after.parse::<u64>().is_ok_and(|s| s > 0)));
    assert_eq!(gateway.metric(r#"kvlane_shed_total{model="m",reason="queue_full"}"#).await, Some(1.0));
    let share = gateway.metric(r#"kvlane_shed_ratio{model="m"}"#).await.expect("a share");
    assert!((share - 1.0 / 3.0).abs() < 0.01, "{share}: one of three");
    call.answer(200, "{}").await;
    assert_eq!(first.reply().await.status, 200);
    engine.answer("{}").await;
    assert_eq!(second.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn without_a_queue_the_second_request_is_rejected_at_once() {
    let engine = FakeEngine::start("m").await;
    let mut config = one_at_a_time();
    config.routing.queue_size = 0;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut first = gateway.begin(chat("m", "one")).await;
    let call = engine.call().await;
    assert_eq!(gateway.ask("POST", "/v1/chat/completions", chat("m", "two")).await.status, 429);
    call.answer(200, "{}").await;
    assert_eq!(first.reply().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_waits_too_long_is_rejected() {
    let engine = FakeEngine::start("m").await;
    let mut config = one_at_a_time();
    config.routing.queue_timeout = Duration::from_millis(20);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let mut first = gateway.begin(chat("m", "one")).await;
    let call = engine.call().await;
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "two")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (429, "queue_timeout"));
    assert!(reply.header("retry-after").is_some());
    call.answer(200, "{}").await;
    assert_eq!(first.reply().await.status, 200);
    gateway.end_quiet(&[&engine]).await;
}

/// Invariant: However a request ends, its lease releases everything and the engine is notified: client gone while
/// queued, before the answer, or in mid-stream.
///
/// Also held by `a_client_that_disconnects_before_the_response_cancels_it_at_the_engine`,
/// `a_client_that_disconnects_in_mid_stream_cancels_it_at_the_engine`,
/// `clients_that_connect_and_disconnect_at_random_leave_no_state_behind`.
#[tokio::test]
async fn a_client_that_disconnects_while_queued_leaves_the_queue() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(one_at_a_time(), &[&engine]).await;
    let (mut first, mut second) = (gateway.client().await, gateway.client().await);
    first.request("POST", "/v1/chat/completions", &chat("m", "one")).await;
    let call = engine.call().await;
    second.request("POST", "/v1/chat/completions", &chat("m", "two")).await;
    eventually("the second waits", || queued(&gateway) == 1).await;
    drop(second);
    eventually("the second has left", || queued(&gateway) == 0).await;
    call.answer(200, "{}").await;
    assert_eq!(first.reply().await.status, 200);
    assert_eq!(gateway.metric(LEFT).await, Some(1.0));
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_client_that_disconnects_before_the_response_cancels_it_at_the_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    drop(client);
    call.gateway_gone().await;
    gateway.ledger_is_zero().await;
    gateway.metric_becomes(LEFT, 1.0).await;
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_client_that_disconnects_in_mid_stream_cancels_it_at_the_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (client, mut call) = gateway.stream(&engine, "one").await;
    drop(client);
    // The engine sends nothing more: the gateway must detect the disconnect by itself.
    call.gateway_gone().await;
    gateway.ledger_is_zero().await;
    gateway.metric_becomes(LEFT, 1.0).await;
    let worker = &gateway.serving().controller.workers()[0];
    assert!(worker.state().healthy, "that is not the worker's fault");
    gateway.end().await;
}

/// Clients that disconnected before the response.
const LEFT: &str = r#"kvlane_requests_total{model="m",api="chat_completions",code="499"}"#;

#[tokio::test]
async fn clients_that_connect_and_disconnect_at_random_leave_no_state_behind() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = config();
    config.routing.max_concurrent_requests = 3;
    config.routing.queue_size = 8;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let mut random = kvlane_core::rng::Rng::new(7);
    let mut clients = Vec::new();
    for n in 0..400 {
        let client = gateway.begin(chat_stream("m", &format!("prompt {n}"))).await;
        clients.push(client);
        // Some clients disconnect, at any stage; some are answered, some get broken responses.
        if random.below(2) == 0 {
            clients.swap_remove(random.below(clients.len()));
        }
        for engine in [&a, &b] {
            if let Some(mut call) = engine.call_at_hand().await {
                match random.below(4) {
                    0 => drop(call),
                    1 => call.answer(200, "{}").await,
                    2 => {
                        call.try_send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n")
                            .await;
                        call.reset();
                    }
                    _ => {
                        call.try_send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
                        call.keep();
                    }
                }
            }
        }
    }
    drop(clients);
    drop((a, b));
    gateway.end().await;
}

/// A prompt of hundreds of thousands of tokens cannot be computed in a millisecond.
#[tokio::test]
async fn a_request_that_should_miss_a_configured_target_is_told_which_and_when_to_retry() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    let objective = |text: &str| serde_json::from_str(text).expect("an entry");
    config.objectives = vec![
        objective(r#"{"priority": "bulk", "ttft": "1ms"}"#),
        objective(r#"{"model": "m", "priority": "interactive", "ttft": "1ms", "if_missed": "refuse"}"#),
        objective(r#"{"priority": 7, "ttft": "1ms", "if_missed": "best_effort"}"#),
    ];
    let gateway = TestGateway::start(config, &[&engine]).await;
    let prompt = chat("m", &"long ".repeat(200_000));
    for (fields, targets) in [
        ("x-priority: interactive\r\n", "(first token within 1 ms)"),
        ("x-priority: bulk\r\n", "(first token within 1 ms)"),
        (
            "x-priority: interactive\r\nx-slo-ttft-ms: 2\r\nx-slo-tpot-ms: 3\r\n",
            "within 2 ms, 3 ms per token",
        ),
    ] {
        let mut client = gateway.client().await;
        client.request_with("POST", "/v1/chat/completions", fields, &prompt).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, 429, "{fields}");
        let text = reply.text();
        assert!(text.contains("slo_missed") && text.contains(targets), "{text}");
        let after_s = reply.header("retry-after").and_then(|seconds| seconds.parse::<u64>().ok());
        assert!(after_s.is_some_and(|seconds| seconds > 1), "seconds of prefill are ahead: {after_s:?}");
    }
    for fields in ["x-priority: 7\r\n", ""] {
        let mut client = gateway.client().await;
        client.request_with("POST", "/v1/chat/completions", fields, &prompt).await;
        let (reply, _) = tokio::join!(client.reply(), engine.answer("{}"));
        assert_eq!(reply.status, 200, "{fields}");
    }
    let refused = gateway.metric(r#"kvlane_slo_requests_total{model="m",outcome="refused"}"#).await;
    assert_eq!(refused, Some(3.0));
    gateway.end().await;
}
