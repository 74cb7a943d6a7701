//! Hedging: a second copy of a late request: its endpoint, the winner, and the cancelled copy.

use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::budget::PerSecond;
use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::{Budget, Config};
use kvlane_gateway::testing::{
    Call, Client, FakeEngine, TestGateway, chat, chat_stream, config, event, next_call,
};

/// A prompt of many blocks.
fn prompt() -> String {
    "the same words again and again ".repeat(40)
}

/// Two consecutive requests go to two engines, and an engine that has not answered at once is late.
fn hedged() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.server.relay_threads = 1;
    config.retry.initial_backoff = Duration::ZERO;
    config.hedge.enabled = true;
    config.hedge.delay = Some(Duration::from_millis(20));
    config.hedge.budget = Budget { share: Share::of(1.0), per_second: PerSecond::of(10.0) };
    config
}

async fn stream(call: &mut Call, text: &str) {
    call.begin_stream().await;
    call.chunk(&event(text)).await;
}

async fn end(mut call: Call) {
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
}

/// Sends the prompt to all engines.
async fn warm(gateway: &TestGateway, engines: &[&FakeEngine]) {
    for _ in engines {
        let ask = gateway.ask("POST", "/v1/chat/completions", chat("m", &prompt()));
        let (reply, ()) = tokio::join!(ask, async {
            next_call(engines).await.1.answer(200, "{}").await;
        });
        assert_eq!(reply.status, 200);
    }
    gateway.ledger_is_zero().await;
}

async fn ask(gateway: &TestGateway, text: &str) -> Client {
    gateway.begin(chat_stream("m", text)).await
}

/// Answers a later request with its second copy. The same thread runs the delays of both, so a copy of an earlier request
/// would have been sent before.
async fn answer_late(gateway: &TestGateway, engines: &[&FakeEngine]) {
    let mut client = ask(gateway, "late").await;
    let (_, mut call) = next_call(engines).await;
    let (_, mut copy) = next_call(engines).await;
    for call in [&call, &copy] {
        assert_eq!(call.body, chat_stream("m", "late").as_bytes(), "no other copy is sent");
    }
    stream(&mut copy, "answer").await;
    call.gateway_gone().await;
    end(copy).await;
    assert_eq!(client.reply().await.status, 200);
}

async fn hedges(gateway: &TestGateway, outcome: &str) -> Option<f64> {
    gateway.metric(&format!(r#"kvlane_hedges_total{{outcome="{outcome}"}}"#)).await
}

/// Invariant: Of two copies of a hedged request one answers; the other is cancelled and does not count as a failure.
#[tokio::test]
async fn the_first_copy_that_begins_wins_and_the_other_is_cancelled_at_its_engine() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = TestGateway::start(hedged(), &engines).await;
    warm(&gateway, &engines).await;
    for (n, outcome) in [(0, "lost"), (1, "won")] {
        let mut client = ask(&gateway, &prompt()).await;
        let (first, call) = next_call(&engines).await;
        let copy = engines[1 - first].call().await;
        assert_eq!(copy.body, call.body, "the same request");
        let mut calls = [call, copy];
        stream(&mut calls[n], "answer").await;
        client.head().await;
        client.see("answer").await;
        let [call, copy] = calls;
        let (winner, mut loser) = if n == 0 { (call, copy) } else { (copy, call) };
        loser.gateway_gone().await;
        end(winner).await;
        assert!(client.rest().await.1);
        gateway.ledger_is_zero().await;
        assert_eq!(hedges(&gateway, outcome).await, Some(1.0));
    }
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains("kvlane_worker_failures_total{"), "a cancelled copy is not a failure: {text}");
    gateway.end().await;
}

#[tokio::test]
async fn if_one_copy_fails_the_other_answers() {
    for failing in [0, 1] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let engines = [&a, &b];
        let gateway = TestGateway::start(hedged(), &engines).await;
        warm(&gateway, &engines).await;
        let mut client = ask(&gateway, &prompt()).await;
        let (first, call) = next_call(&engines).await;
        let copy = engines[1 - first].call().await;
        let (mut fails, mut answers) = if failing == 0 { (call, copy) } else { (copy, call) };
        fails.send("garbage\r\n\r\n").await;
        fails.gateway_gone().await;
        let failed = engines[if failing == 0 { first } else { 1 - first }].url();
        let label = format!(r#"kvlane_worker_failures_total{{worker="{failed}",kind="garbage"}}"#);
        stream(&mut answers, "answer").await;
        end(answers).await;
        let reply = client.reply().await;
        assert!(reply.status == 200 && reply.text().contains("answer"), "{reply:?}");
        gateway.ledger_is_zero().await;
        assert_eq!(gateway.metric(&label).await, Some(1.0), "{failing}");
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_copy_goes_to_an_engine_without_the_prefix_if_that_is_expected_to_be_sooner() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = TestGateway::start(hedged(), &engines).await;
    let mut client = ask(&gateway, &prompt()).await;
    let (first, call) = next_call(&engines).await;
    let mut copy = engines[1 - first].call().await;
    stream(&mut copy, "answer").await;
    end(copy).await;
    assert_eq!(client.reply().await.status, 200);
    drop(call);
    gateway.ledger_is_zero().await;
    assert_eq!(hedges(&gateway, "won").await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn no_copy_is_sent_before_the_first_has_waited_for_the_expected_time_elsewhere() {
    let (a, b, c) =
        (FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b, &c];
    let gateway = TestGateway::start(hedged(), &engines).await;
    // Two million tokens: a minute, at the assumed rates.
    let mut client = ask(&gateway, &"x".repeat(8 << 20)).await;
    let (_, mut call) = next_call(&engines).await;
    answer_late(&gateway, &engines).await;
    stream(&mut call, "answer").await;
    end(call).await;
    assert_eq!(client.reply().await.status, 200);
    gateway.end_quiet(&engines).await;
}

#[tokio::test]
async fn copies_end_with_their_budget() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let mut config = hedged();
    config.hedge.budget = Budget { share: Share::of(0.0), per_second: PerSecond::of(0.0) };
    let gateway = TestGateway::start(config, &engines).await;
    warm(&gateway, &engines).await;
    let mut client = ask(&gateway, &prompt()).await;
    let (_, mut call) = next_call(&engines).await;
    gateway.metric_becomes(r#"kvlane_hedges_total{outcome="refused"}"#, 1.0).await;
    stream(&mut call, "answer").await;
    end(call).await;
    assert_eq!(client.reply().await.status, 200);
    gateway.end_quiet(&[&a, &b]).await;
}

#[tokio::test]
async fn nothing_is_hedged_if_hedging_is_off_or_the_response_is_not_a_stream() {
    for (enabled, body) in [(false, chat_stream("m", &prompt())), (true, chat("m", &prompt()))] {
        let (a, b, c) =
            (FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await);
        let engines = [&a, &b, &c];
        let mut config = hedged();
        config.hedge.enabled = enabled;
        let gateway = TestGateway::start(config, &engines).await;
        warm(&gateway, &engines).await;
        let mut client = gateway.begin(body).await;
        let (_, call) = next_call(&engines).await;
        let mut hedging = Config::clone(&gateway.serving().config());
        hedging.hedge.enabled = true;
        gateway.serving().reload(hedging).expect("right");
        answer_late(&gateway, &engines).await;
        call.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
        gateway.end_quiet(&engines).await;
    }
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_both_copies() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = TestGateway::start(hedged(), &engines).await;
    warm(&gateway, &engines).await;
    let client = ask(&gateway, &prompt()).await;
    let (first, mut call) = next_call(&engines).await;
    let mut copy = engines[1 - first].call().await;
    drop(client);
    call.gateway_gone().await;
    copy.gateway_gone().await;
    gateway.end().await;
}
