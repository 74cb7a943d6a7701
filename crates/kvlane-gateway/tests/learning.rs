//! Learning from responses: their length, and the engines' speed.

use std::time::Duration;

use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, eventually};
use serde_json::{Value, json};

/// Answers a request with a stream that reports its number of tokens at the end.
async fn stream(gateway: &TestGateway, engine: &FakeEngine, fields: &str, events: usize, tokens: u32) {
    let mut client = gateway.client().await;
    client.request_with("POST", "/v1/chat/completions", fields, &chat_stream("m", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    for _ in 0..events {
        call.chunk(&event("a few words")).await;
    }
    if tokens > 0 {
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9}});
        call.chunk(&format!("data: {usage}\n\n")).await;
    }
    call.end_stream().await;
    client.rest().await;
    gateway.ledger_is_zero().await;
}

/// Answers a request without a stream.
async fn whole(gateway: &TestGateway, engine: &FakeEngine, prompt: &str, tokens: u32) {
    let answer =
        json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}).to_string();
    let body = chat("m", prompt);
    let (reply, _) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", body), engine.answer(&answer));
    assert_eq!(reply.status, 200);
    gateway.ledger_is_zero().await;
}

/// Mean length of recent responses.
async fn usual(gateway: &TestGateway) -> f64 {
    gateway.metric(r#"kvlane_output_tokens_usual{model="m"}"#).await.expect("a sample")
}

/// Invariant: An answer's length is what its engine reports; a stream of which no token was timed teaches no rate.
///
/// Also held by `an_answer_that_came_all_at_once_says_nothing_of_speed`.
#[tokio::test]
async fn a_responses_length_is_what_its_engine_reports() {
    let mut results = Vec::new();
    for how in ["several tokens an event", "one token an event, and no usage", "all at once"] {
        let engine = FakeEngine::start("m").await;
        let gateway = TestGateway::start(config(), &[&engine]).await;
        for _ in 0..30 {
            match how {
                "all at once" => whole(&gateway, &engine, "hi", 40).await,
                "several tokens an event" => stream(&gateway, &engine, "", 10, 40).await,
                _ => stream(&gateway, &engine, "", 40, 0).await,
            }
        }
        results.push((how, usual(&gateway).await));
        gateway.end().await;
    }
    // The initial estimate still has a small weight.
    for (how, usual) in &results {
        assert!((40.0..70.0).contains(usual) && *usual == results[0].1, "{how}: {results:?}");
    }
}

#[tokio::test]
async fn answer_lengths_are_learned_per_session() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for _ in 0..8 {
        stream(&gateway, &engine, "x-session-id: short\r\n", 5, 5).await;
        stream(&gateway, &engine, "x-session-id: long\r\n", 5, 400).await;
    }
    let decisions = gateway.decisions().await;
    let expected = |n: usize| decisions[n]["expected_output_tokens"].as_u64().expect("a number");
    assert!(expected(1) < 60 && expected(0) > 300, "short {}, long {}", expected(1), expected(0));
    gateway.end().await;
}

#[tokio::test]
async fn first_tokens_are_counted_by_the_error_of_their_prediction() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for _ in 0..3 {
        stream(&gateway, &engine, "", 2, 2).await;
    }
    whole(&gateway, &engine, "hi", 2).await;
    let mut counted = 0.0;
    for error in ["0-15%", "15-35%", "35-100%", "100%+"] {
        let sample = format!(r#"kvlane_ttft_predictions_total{{model="m",error="{error}"}}"#);
        counted += gateway.metric(&sample).await.expect("a sample");
    }
    assert_eq!(counted, 3.0, "streams");
    gateway.end().await;
}

#[tokio::test]
async fn rates_follow_what_an_engine_counts_itself_where_no_answers_are_seen() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let step_s = async || {
        let worker: Value = gateway.operate("GET", "/workers/1", "").await.json();
        worker["pools"][0]["rates"]["step_s"].as_f64().expect("a number")
    };
    let before = step_s().await;
    // Fifty microseconds a step.
    for steps in 0..20 {
        engine.set_metrics(&format!(
            "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n\
             vllm:inter_token_latency_seconds_count {}\nvllm:inter_token_latency_seconds_sum {}\n",
            steps * 1000,
            f64::from(steps) * 0.05
        ));
        let probes = engine.probes();
        eventually("it is read", || engine.probes() > probes + 1).await;
    }
    let after = step_s().await;
    assert!(after < before / 10.0, "{before} {after}");
    gateway.end().await;
}

#[tokio::test]
async fn learned_rates_are_shown_and_follow_responses_that_are_not_streamed() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let rates = || async {
        let worker: Value = gateway.operate("GET", "/workers/1", "").await.json();
        worker["pools"][0]["rates"].clone()
    };
    let before = rates().await;
    assert!(before["prefill_token_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{before}");
    let prompt = "a prompt that is long enough to be timed ".repeat(500);
    for n in 0..5 {
        whole(&gateway, &engine, &format!("{n} {prompt}"), 300).await;
    }
    let after = rates().await;
    for rate in ["step_s", "decode_error"] {
        assert!(after[rate].as_f64() < before[rate].as_f64(), "{rate}: {before} {after}");
    }
    for metric in [
        "kvlane_worker_prefill_tokens_per_second",
        "kvlane_worker_decode_step_seconds",
        "kvlane_worker_prefill_error_ratio",
        "kvlane_worker_decode_error_ratio",
    ] {
        let sample = format!(r#"{metric}{{worker="{}",model="m"}}"#, engine.url());
        assert!(gateway.metric(&sample).await.is_some_and(|value| value > 0.0), "{sample}");
    }
    gateway.end().await;
}
