//! Engines that die or hang behind a server that still runs: what clients see, and which worker is blamed. The
//! messages are those of real engines (`kvlane-mock/data/deaths`).

use std::time::Duration;

use kvlane_core::breaker::State;
use kvlane_core::endpoint::Endpoint;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{
    Call, FakeEngine, TestGateway, chat, chat_stream, event, eventually, next_call,
};

/// vLLM 0.32's response when its engine core is gone.
const DEAD: &str = r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#;
/// The first event of a chat: no content.
const ROLE: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

/// Requests go round robin, so that tests know the next engine, and one failure opens a breaker.
fn in_turn() -> Config {
    let mut config = kvlane_gateway::testing::in_turn();
    config.breaker.failure_threshold = 1;
    config.breaker.cooldown = Duration::from_secs(3600);
    config.breaker.cooldown_max = Duration::from_secs(3600);
    config
}

/// Ends a stream like a server whose engine has died: complete, with an error event and `[DONE]`.
async fn die_in_stream(mut call: Call) {
    call.begin_stream().await;
    call.chunk(ROLE).await;
    call.chunk(&format!("data: {DEAD}\n\ndata: [DONE]\n\n")).await;
    call.end_stream().await;
}

fn open_breakers(gateway: &TestGateway) -> usize {
    let open = |endpoint: &Endpoint| endpoint.breaker.state() != State::Closed;
    gateway.pool("m").router.read(|scheduler| scheduler.pool().endpoints().filter(|it| open(it)).count())
}

/// Invariant: A request whose engine died before any content is answered by another engine; a failure of unclear
/// cause counts against the engine only if another engine succeeds.
///
/// Also held by
/// `an_error_of_unclear_cause_counts_against_the_engine_only_if_another_engine_succeeds`.
#[tokio::test]
async fn a_request_whose_engine_died_before_any_content_is_retried_elsewhere() {
    for streams in [false, true] {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let engines = [&a, &b];
        let gateway = TestGateway::start(in_turn(), &engines).await;
        let body = if streams { chat_stream("m", "hi") } else { chat("m", "hi") };
        let (reply, dead) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", &body), async {
            let (first, call) = next_call(&engines).await;
            if streams {
                die_in_stream(call).await;
            } else {
                call.answer(500, DEAD).await;
            }
            let mut call = engines[1 - first].call().await;
            if streams {
                call.begin_stream().await;
                call.chunk(&event("hello")).await;
                call.end_stream().await;
            } else {
                call.answer(200, r#"{"hello":1}"#).await;
            }
            first
        });
        assert_eq!(reply.status, 200);
        assert!(reply.text().contains("hello") && !reply.text().contains("EngineCore"), "{}", reply.text());
        gateway.ledger_is_zero().await;
        let failures =
            format!(r#"kvlane_worker_failures_total{{worker="{}",kind="status"}}"#, engines[dead].url());
        assert_eq!((gateway.metric(&failures).await, open_breakers(&gateway)), (Some(1.0), 1));
        gateway.end().await;
    }
}

#[tokio::test]
async fn an_engine_error_after_content_is_relayed_and_counted() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let (dead, mut call) = next_call(&[&a, &b]).await;
    call.begin_stream().await;
    call.chunk(&event("hello")).await;
    client.head().await;
    client.see("hello").await;
    call.chunk(&format!("data: {DEAD}\n\ndata: [DONE]\n\n")).await;
    call.end_stream().await;
    let (rest, ended) = client.rest().await;
    assert!(
        ended && String::from_utf8_lossy(&rest).contains("EngineCore encountered"),
        "the engine's message is unchanged"
    );
    gateway.ledger_is_zero().await;
    let url = [&a, &b][dead].url();
    let failures = format!(r#"kvlane_worker_failures_total{{worker="{url}",kind="mid_stream"}}"#);
    assert_eq!((gateway.metric(&failures).await, open_breakers(&gateway)), (Some(1.0), 1));
    gateway.end().await;
}

#[tokio::test]
async fn an_error_of_unclear_cause_counts_against_the_engine_only_if_another_engine_succeeds() {
    let unclear = r#"{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}"#;
    for (second, status, open) in [(200, 200, 1), (500, 500, 0)] {
        let engines =
            [FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
        let engines: Vec<&FakeEngine> = engines.iter().collect();
        let gateway = TestGateway::start(in_turn(), &engines).await;
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            next_call(&engines).await.1.answer(500, unclear).await;
            next_call(&engines).await.1.answer(second, if second == 200 { "{}" } else { unclear }).await;
        });
        assert_eq!(reply.status, status);
        if status == 500 {
            assert_eq!(reply.text(), unclear, "the engine's response");
        }
        assert_eq!(open_breakers(&gateway), open, "after {second}");
        gateway.end_quiet(&engines).await;
    }
}

#[tokio::test]
async fn a_bad_request_rejected_within_a_stream_is_not_retried() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let refusal = r#"data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}"#;
    let (reply, ()) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat_stream("m", "hi")), async {
            let mut call = next_call(&[&a, &b]).await.1;
            call.begin_stream().await;
            call.chunk(&format!("{refusal}\n\ndata: [DONE]\n\n")).await;
            call.end_stream().await;
        });
    assert!(reply.status == 200 && reply.text().contains("too long"), "{reply:?}");
    assert_eq!(open_breakers(&gateway), 0);
    gateway.end_quiet(&[&a, &b]).await;
}

/// Invariant: A prompt with which two engines died in flight is not sent to a third.
///
/// Also held by `a_prompt_under_which_two_engines_died_is_not_placed_until_that_is_long_ago`.
#[tokio::test]
async fn a_request_with_which_two_engines_died_is_not_sent_to_a_third() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
    let engines: Vec<&FakeEngine> = engines.iter().collect();
    let mut config = in_turn();
    config.breaker.failure_threshold = 0;
    let gateway = TestGateway::start(config, &engines).await;
    // The prompts share a prefix, as prompts of one application do.
    let prompt = |last: &str| chat("m", &format!("{}{last}", "the same words ".repeat(100)));
    let (poison, food) = (&prompt("poison"), &prompt("food"));
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", poison), async {
        next_call(&engines).await.1.answer(500, DEAD).await;
        next_call(&engines).await.1.answer(500, DEAD).await;
    });
    assert_eq!((reply.status, reply.error_code().as_str()), (500, "request_fails_engines"));
    assert_eq!(reply.header("x-should-retry"), Some("false"), "clients would retry it by themselves");
    for _ in 0..2 {
        let again = gateway.ask("POST", "/v1/chat/completions", poison).await;
        assert_eq!((again.status, again.error_code().as_str()), (500, "request_fails_engines"));
    }
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", food), async {
        next_call(&engines).await.1.answer(200, "{}").await;
    });
    assert_eq!(reply.status, 200, "other requests are served");
    gateway.end_quiet(&engines).await;
}

#[tokio::test]
async fn a_request_whose_engines_died_in_mid_stream_is_not_sent_to_a_third() {
    let mut engines =
        vec![FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
    let gateway = TestGateway::start(in_turn(), &engines.iter().collect::<Vec<_>>()).await;
    let poison = chat_stream("m", "poison");
    for _ in 0..2 {
        let mut client = gateway.begin(&poison).await;
        let (dies, mut call) = next_call(&engines.iter().collect::<Vec<_>>()).await;
        call.begin_stream().await;
        call.chunk(&event("hello")).await;
        client.head().await;
        client.see("hello").await;
        let healthy = format!(r#"kvlane_worker_health{{worker="{}"}}"#, engines[dies].url());
        drop(engines.swap_remove(dies));
        call.reset();
        client.rest().await;
        gateway.metric_becomes(&healthy, 0.0).await;
    }
    let reply = gateway.ask("POST", "/v1/chat/completions", &poison).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (500, "request_fails_engines"));
    gateway.end_quiet(&[&engines[0]]).await;
}

#[tokio::test]
async fn requests_in_flight_at_two_deaths_are_tried_one_at_a_time() {
    let engine = FakeEngine::start("m").await;
    let mut config = in_turn();
    config.breaker.failure_threshold = 0;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let ask = async |prompt: &str| gateway.ask("POST", "/v1/chat/completions", chat("m", prompt)).await;
    for death in 1..=2 {
        let (killer, bystander, ()) = tokio::join!(ask("killer"), ask("bystander"), async {
            let (one, other) = (engine.call().await, engine.call().await);
            one.answer(500, DEAD).await;
            other.answer(500, DEAD).await;
        });
        assert_eq!(
            (killer.text(), bystander.text()),
            (DEAD.into(), DEAD.into()),
            "death {death}: neither request is blocked"
        );
    }
    let is = |call: &Call, prompt: &str| String::from_utf8_lossy(&call.body).contains(prompt);
    let (killer, bystander, ()) = tokio::join!(ask("killer"), ask("bystander"), async {
        let first = engine.call().await;
        // A request that is not suspect does not wait for those that are.
        let (clear, ()) = tokio::join!(ask("clear"), async {
            let call = engine.call().await;
            assert!(is(&call, "clear"), "two suspects at once");
            call.answer(200, "{}").await;
        });
        assert_eq!(clear.status, 200);
        let answer = async |call: Call| {
            if is(&call, "killer") { call.answer(500, DEAD).await } else { call.answer(200, "{}").await }
        };
        answer(first).await;
        answer(engine.call().await).await;
    });
    assert_eq!(
        (bystander.status, killer.error_code().as_str()),
        (200, "request_fails_engines"),
        "the third death blocks it"
    );
    gateway.end().await;
}

/// A metrics page of a vLLM core that has taken this many steps.
fn page(steps: u32) -> String {
    format!(
        "vllm:num_requests_running{{engine=\"0\"}} 1\nvllm:iteration_tokens_total_count{{engine=\"0\"}} {steps}\n"
    )
}

/// A gateway that knows these engines' prefill rates and step counters.
async fn of_known_rates(engines: &[&FakeEngine]) -> TestGateway {
    engines.iter().for_each(|engine| engine.set_metrics(&page(0)));
    let mut config = in_turn();
    config.routing.timing = Some("llama-3.1-8b@h100".into());
    TestGateway::start(config, engines).await
}

/// Invariant: A stalled engine gets no requests until it makes progress; a long prefill counts as progress.
///
/// Also held by `a_long_prefill_that_shows_in_the_engines_counters_is_not_a_stall`,
/// `a_stalled_endpoint_gets_no_requests_until_it_recovers_or_all_are_stalled`.
#[tokio::test]
async fn a_stalled_engine_gets_no_requests_until_it_makes_progress() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = of_known_rates(&engines).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let (hangs, mut call) = next_call(&engines).await;
    // A head is no sign of progress: the server sends it while its core is stalled.
    call.begin_stream().await;
    let mut other = engines[1 - hangs].call().await;
    other.begin_stream().await;
    other.chunk(&event("hello")).await;
    other.end_stream().await;
    let reply = client.reply().await;
    assert!(reply.status == 200 && reply.text().contains("hello"), "{reply:?}");
    let stalled = format!(r#"kvlane_worker_stalled{{worker="{}"}}"#, engines[hangs].url());
    assert_eq!(gateway.metric(&stalled).await, Some(1.0));
    call.gateway_gone().await;
    for _ in 0..3 {
        let (reply, _) = tokio::join!(
            gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")),
            engines[1 - hangs].answer("{}")
        );
        assert_eq!(reply.status, 200, "no request is placed there");
    }
    let asked = engines[hangs].call().await;
    assert_eq!(asked.target(), "POST /v1/completions", "it is asked for a token");
    asked.answer(200, r#"{"choices":[{"text":"x"}]}"#).await;
    let worker = gateway.serving().controller.find(&engines[hangs].url()).expect("a worker");
    assert!(worker.state().healthy, "its probes succeeded all the time");
    gateway.metric_becomes(&stalled, 0.0).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_with_content_on_a_stalled_engine_ends_with_an_error() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = of_known_rates(&engines).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let (hangs, mut call) = next_call(&engines).await;
    call.begin_stream().await;
    call.chunk(&event("hello")).await;
    let reply = client.reply().await;
    assert!(reply.status == 200 && reply.text().contains("hello"), "{reply:?}");
    assert!(reply.text().contains("stream_silent") && !reply.text().contains("[DONE]"), "{reply:?}");
    call.gateway_gone().await;
    gateway.end_quiet(&[engines[1 - hangs]]).await;
}

#[tokio::test]
async fn a_long_prefill_that_shows_in_the_engines_counters_is_not_a_stall() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = of_known_rates(&engines).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let (busy, mut call) = next_call(&engines).await;
    // Longer than it takes to detect a stall; each reading of the page shows another step.
    let read = || engines[busy].pages_read();
    let before = read();
    let mut steps = 0;
    eventually("its page was read seven times", || {
        let readings = read() - before;
        if readings > steps {
            steps = readings;
            engines[busy].set_metrics(&page(u32::try_from(steps).expect("few")));
        }
        readings >= 7
    })
    .await;
    call.begin_stream().await;
    call.chunk(&event("hello")).await;
    call.end_stream().await;
    assert!(client.reply().await.text().contains("hello"));
    let stalls = format!(r#"kvlane_worker_stalls_total{{worker="{}"}}"#, engines[busy].url());
    assert_eq!(gateway.metric(&stalls).await, None);
    gateway.end_quiet(&[engines[1 - busy]]).await;
}
