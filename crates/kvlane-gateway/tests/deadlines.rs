//! Deadlines: each step of a request has a timeout, some paths have their own, and until the first byte of a response
//! another engine can answer.

use std::time::Duration;

use kvlane_gateway::config::{Config, RouteTimeouts};
use kvlane_gateway::testing::{
    Call, FakeEngine, TestGateway, chat, chat_stream, event, eventually, in_turn, next_call,
};

/// Short for a test, and long enough that only silence exceeds it.
const SHORT: Duration = Duration::from_millis(80);

fn at(path: &str, route: RouteTimeouts) -> Config {
    let mut config = in_turn();
    config.timeouts.routes.insert(path.into(), route);
    config
}

async fn failures(gateway: &TestGateway, engine: &FakeEngine, kind: &str) -> Option<f64> {
    let labels = format!(r#"{{worker="{}",kind="{kind}"}}"#, engine.url());
    gateway.metric(&format!("kvlane_worker_failures_total{labels}")).await
}

/// Answers with a stream of one event.
async fn stream(mut call: Call) {
    call.begin_stream().await;
    call.chunk(&event("answer")).await;
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
}

/// Sends a request that another engine answers than the one that received it first; returns the latter.
async fn answered_by_another(
    gateway: &TestGateway,
    engines: [&FakeEngine; 2],
    head: bool,
    dies: bool,
) -> usize {
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let (first, mut call) = next_call(&engines).await;
    if head {
        call.begin_stream().await;
    }
    if dies {
        drop(call);
    } else {
        call.gateway_gone().await;
    }
    let second = engines[1 - first];
    stream(second.call().await).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.header("x-router-backend")), (200, Some(second.url().as_str())));
    assert!(reply.text().starts_with(&event("answer")), "{reply:?}");
    gateway.ledger_is_zero().await;
    first
}

#[tokio::test]
async fn a_stream_that_does_not_begin_in_time_is_retried_elsewhere() {
    for head in [false, true] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let mut config = in_turn();
        config.timeouts.first_byte_timeout = SHORT;
        let gateway = TestGateway::start(config, &[&a, &b]).await;
        let first = answered_by_another(&gateway, [&a, &b], head, false).await;
        assert_eq!(failures(&gateway, [&a, &b][first], "timeout").await, Some(1.0));
        gateway.end().await;
    }
}

/// Invariant: Until the first byte of an answer, another engine can answer the request.
///
/// Also held by `a_stream_that_does_not_begin_in_time_is_retried_elsewhere`,
/// `a_request_at_an_engine_whose_probes_fail_is_answered_elsewhere`.
#[tokio::test]
async fn a_stream_whose_engine_dies_before_its_first_byte_is_retried_elsewhere() {
    for head in [false, true] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
        let first = answered_by_another(&gateway, [&a, &b], head, true).await;
        assert_eq!(failures(&gateway, [&a, &b][first], "broken").await, Some(1.0));
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_request_at_an_engine_whose_probes_fail_is_answered_elsewhere() {
    for (body, head) in [(chat("m", "hi"), false), (chat_stream("m", "hi"), true)] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let mut config = in_turn();
        config.health.interval = Duration::from_millis(5);
        config.health.failure_threshold = 1;
        let gateway = TestGateway::start(config, &[&a, &b]).await;
        let mut client = gateway.begin(body).await;
        let (first, mut call) = next_call(&[&a, &b]).await;
        if head {
            call.begin_stream().await;
        }
        let (first, second) = if first == 0 { (&a, &b) } else { (&b, &a) };
        first.set_healthy(false);
        call.gateway_gone().await;
        second.answer("{}").await;
        assert_eq!(client.reply().await.status, 200);
        assert_eq!(failures(&gateway, first, "unfit").await, Some(1.0));
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_stream_that_has_begun_continues_although_probes_fail() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(5);
    config.health.failure_threshold = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (mut client, mut call) = gateway.stream(&engine, "one").await;
    engine.set_healthy(false);
    let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
    eventually("it is down", || !worker.state().healthy).await;
    call.chunk(&event("two")).await;
    client.see("two").await;
    call.end_stream().await;
    assert!(client.rest().await.1);
    gateway.end().await;
}

#[tokio::test]
async fn a_response_that_is_not_a_stream_has_the_whole_request_timeout_unless_its_path_sets_another() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let own = RouteTimeouts { first_byte_timeout: Some(SHORT), ..RouteTimeouts::default() };
    let mut config = at("/v1/embeddings", own);
    config.timeouts.first_byte_timeout = SHORT;
    config.server.relay_threads = 1;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let (reply, first) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
        let (first, call) = next_call(&[&a, &b]).await;
        // A stream that begins later on the same thread has exceeded its time before.
        let mut client = gateway.begin(chat_stream("m", "late")).await;
        let (late, mut silent) = next_call(&[&a, &b]).await;
        silent.gateway_gone().await;
        stream([&a, &b][1 - late].call().await).await;
        assert_eq!(client.reply().await.status, 200);
        call.answer(200, "{}").await;
        first
    });
    assert_eq!((reply.status, reply.header("x-router-backend")), (200, Some([&a, &b][first].url().as_str())));
    let body = r#"{"model":"m","input":"a"}"#;
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/embeddings", body), async {
        let (first, mut call) = next_call(&[&a, &b]).await;
        call.gateway_gone().await;
        [&a, &b][1 - first].answer("{}").await;
    });
    assert_eq!(reply.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn if_no_engine_begins_in_time_the_client_gets_a_timeout() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.timeouts.first_byte_timeout = SHORT;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (reply, ()) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat_stream("m", "hi")), async {
            engine.call().await.gateway_gone().await;
        });
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "upstream_error"));
    gateway.end().await;
}

#[tokio::test]
async fn a_path_has_its_own_total_and_idle_timeouts() {
    let engine = FakeEngine::start("m").await;
    let own = RouteTimeouts { request_timeout: Some(SHORT), ..RouteTimeouts::default() };
    let mut config = at("/v1/completions", own);
    let own = RouteTimeouts { stream_idle_timeout: Some(SHORT), ..RouteTimeouts::default() };
    config.timeouts.routes.insert("/v1/chat/completions".into(), own);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (reply, ()) =
        tokio::join!(gateway.ask("POST", "/v1/completions", r#"{"model":"m","prompt":"a"}"#), async {
            engine.call().await.gateway_gone().await;
        });
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "upstream_timeout"));
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    client.see("stream_silent").await;
    call.gateway_gone().await;
    gateway.end().await;
}

#[tokio::test]
async fn a_path_has_its_own_body_timeout() {
    let engine = FakeEngine::start("m").await;
    let own = RouteTimeouts { body_timeout: Some(SHORT), ..RouteTimeouts::default() };
    let gateway = TestGateway::start(at("/v1/embeddings", own), &[&engine]).await;
    let mut client = gateway.client().await;
    client.send("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (408, "body_timeout"));
    gateway.end().await;
}
