//! `Server-Timing`: every response states the time of each stage before its head.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::TokenSource;
use kvlane_gateway::testing::{
    Call, FakeEngine, Reply, TestGateway, chat, chat_stream, config, event, eventually, next_call,
};
use kvlane_wire::server_timing::{Stage, parse};

const CHAT: &str = "/v1/chat/completions";

/// The names of a header's stages.
fn names(value: &str) -> Vec<&str> {
    let named: Vec<_> = parse(value).map(|(name, _)| name).collect();
    assert_eq!(named.len(), value.split(',').count(), "every entry must be readable: {value}");
    named
}

fn stages(reply: &Reply) -> Vec<String> {
    let value = reply.header("server-timing").expect("a header");
    names(value).into_iter().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_response_states_the_time_of_its_stages() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let reply = gateway.served(&engine, chat("m", "hi")).await;
    assert_eq!(stages(&reply), ["read", "parse", "place", "send", "engine"]);
    // A stream states it in its head, once its first bytes have arrived.
    let mut client = gateway.client().await;
    client.request("POST", CHAT, &chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("a")).await;
    let (status, headers) = client.head().await;
    let value = headers.iter().find(|(name, _)| name == "server-timing").map(|(_, value)| value.as_str());
    assert_eq!(status, 200);
    assert_eq!(names(value.expect("a header")), ["read", "parse", "place", "send", "engine"]);
    drop((client, call));
    let count =
        |stage: Stage| format!("kvlane_stage_seconds_count{{model=\"m\",stage=\"{}\"}}", stage.name());
    for stage in [Stage::Read, Stage::Parse, Stage::Place, Stage::Send, Stage::Engine] {
        assert_eq!(gateway.metric(&count(stage)).await, Some(2.0), "{}", stage.name());
    }
    assert_eq!(gateway.metric(&count(Stage::Queue)).await, Some(0.0));
    gateway.end().await;
}

#[tokio::test]
async fn the_stages_add_up_to_at_most_the_requests_duration() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut told_s = 0.0;
    for _ in 0..20 {
        let reply = gateway.served(&engine, chat("m", "hi")).await;
        let one_s: f64 = parse(reply.header("server-timing").expect("a header")).map(|(_, s)| s).sum();
        assert!(one_s > 0.0);
        told_s += one_s;
    }
    gateway.metric_becomes(r#"kvlane_request_duration_seconds_count{model="m"}"#, 20.0).await;
    let whole_s = gateway.metric(r#"kvlane_request_duration_seconds_sum{model="m"}"#).await;
    assert!(whole_s.is_some_and(|whole_s| told_s <= whole_s), "{told_s} s stated, {whole_s:?} s counted");
    gateway.end().await;
}

#[tokio::test]
async fn counting_with_a_tokenizer_has_its_own_stage() {
    let engine = FakeEngine::start("m").await;
    engine.set_tokenizer(|_| Some(vec![1, 2, 3]));
    let mut config = config();
    config.tokens.source = TokenSource::Engine;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let reply = gateway.served(&engine, chat("m", "hi")).await;
    assert_eq!(stages(&reply), ["read", "parse", "tokenize", "place", "send", "engine"]);
    gateway.end().await;
}

#[tokio::test]
async fn the_time_in_the_queue_is_stated() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.routing.max_concurrent_requests = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let queued = || gateway.pool("m").router.read(|scheduler| scheduler.queued());
    let (mut first, mut second) = (gateway.client().await, gateway.client().await);
    first.request("POST", CHAT, &chat("m", "one")).await;
    let call = engine.call().await;
    second.request("POST", CHAT, &chat("m", "two")).await;
    eventually("it waits", || queued() == 1).await;
    call.answer(200, "{}").await;
    assert!(!stages(&first.reply().await).contains(&"queue".to_owned()));
    engine.answer("{}").await;
    assert_eq!(stages(&second.reply().await), ["read", "parse", "place", "queue", "send", "engine"]);
    gateway.end().await;
}

#[tokio::test]
async fn a_failed_attempt_is_in_the_stage_retry() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.retry.initial_backoff = Duration::ZERO;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let engines = [&a, &b];
    let (reply, ()) = tokio::join!(gateway.ask("POST", CHAT, chat("m", "hi")), async {
        next_call(&engines).await.1.send("garbage\r\n\r\n").await;
        let (_, call): (usize, Call) = next_call(&engines).await;
        call.answer(200, "{}").await;
    });
    assert_eq!(stages(&reply), ["read", "parse", "place", "retry", "send", "engine"]);
    gateway.end().await;
}

#[tokio::test]
async fn an_error_of_the_gateway_states_the_stages_so_far() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let reply = gateway.ask("POST", CHAT, "{").await;
    assert_eq!((reply.status, stages(&reply)), (400, vec!["read".to_owned(), "parse".to_owned()]));
    // A request to the admin API has no stages.
    for reply in [gateway.operate("GET", "/workers", "").await, gateway.ask("GET", "/health", "").await] {
        assert_eq!(reply.header("server-timing"), None);
    }
    gateway.end().await;
}

#[tokio::test]
async fn the_engines_own_timing_stays() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let (reply, ()) = tokio::join!(gateway.ask("POST", CHAT, chat("m", "hi")), async {
        let mut call = engine.call().await;
        call.send("HTTP/1.1 200 OK\r\nserver-timing: gpu;dur=4.5\r\ncontent-length: 2\r\n\r\n{}").await;
    });
    let told: Vec<_> = reply.headers.iter().filter(|(name, _)| name == "server-timing").collect();
    assert_eq!((told.len(), told[0].1.as_str()), (2, "gpu;dur=4.5"));
    assert!(names(&told[1].1).contains(&"engine"), "{told:?}");
    gateway.end().await;
}

#[tokio::test]
async fn switched_off_no_timing_is_sent_but_all_is_measured() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.server_timing = false;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let reply = gateway.served(&engine, chat("m", "hi")).await;
    assert_eq!(reply.header("server-timing"), None);
    let engine_s = gateway.metric(r#"kvlane_stage_seconds_count{model="m",stage="engine"}"#).await;
    assert_eq!(engine_s, Some(1.0));
    gateway.end().await;
}
