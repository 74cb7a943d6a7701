//! Continuation: a stream whose engine dies continues on another endpoint: the client's bytes, the requests to the
//! other engines, and the final state.

use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::budget::PerSecond;
use kvlane_gateway::config::{Budget, Config, LimitSpec};
use kvlane_gateway::testing::{Call, Client, FakeEngine, TestGateway, config, eventually, next_call};
use serde_json::{Value, json};

fn continuing() -> Config {
    let mut config = config();
    config.continuation.enabled = true;
    config.breaker.failure_threshold = 0;
    config
}

/// Engines that identify as vLLM.
async fn engines<const N: usize>() -> [FakeEngine; N] {
    let mut engines = Vec::new();
    for _ in 0..N {
        let engine = FakeEngine::start("m").await;
        engine.set_models(json!([{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 1000}]));
        engines.push(engine);
    }
    engines.try_into().ok().expect("so many")
}

async fn start<const N: usize>(config: Config, engines: &[FakeEngine; N]) -> TestGateway {
    TestGateway::start(config, &engines.iter().collect::<Vec<_>>()).await
}

/// The next call at any engine, and at which.
async fn call(engines: &[FakeEngine]) -> (usize, Call) {
    let calls =
        engines.iter().enumerate().map(|(n, engine)| Box::pin(async move { (n, engine.call().await) }));
    first_of(calls.collect()).await
}

/// The first of these that is ready.
async fn first_of<T>(mut futures: Vec<std::pin::Pin<Box<impl Future<Output = T>>>>) -> T {
    std::future::poll_fn(|cx| {
        let ready = futures.iter_mut().find_map(|future| match future.as_mut().poll(cx) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        });
        ready.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
    })
    .await
}

fn completion() -> String {
    json!({"model": "m", "prompt": "one", "stream": true, "max_tokens": 9}).to_string()
}

fn chat() -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": "one"}], "stream": true}).to_string()
}

fn text(id: &str, text: &str) -> String {
    let chunk = json!({"id": id, "object": "text_completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": null}]});
    format!("data: {chunk}\n\n")
}

fn said(id: &str, delta: Value) -> String {
    let chunk = json!({"id": id, "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
    format!("data: {chunk}\n\n")
}

const END: &str = concat!(
    "data: {\"id\":\"z\",\"created\":2,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"\",\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    "data: [DONE]\n\n"
);

/// A client that has sent a request, and the engine that has sent it `events`.
async fn begun(
    gateway: &TestGateway,
    engines: &[FakeEngine],
    path: &str,
    body: &str,
    events: &str,
) -> (Client, usize, Call) {
    let mut client = gateway.client().await;
    client.request("POST", path, body).await;
    let (first, mut call) = call(engines).await;
    call.begin_stream().await;
    call.chunk(events).await;
    client.head().await;
    (client, first, call)
}

/// The text of a stream, its ids, and its last data.
fn heard(stream: &[u8]) -> (String, Vec<String>, String) {
    let (mut text, mut ids, mut last) = (String::new(), Vec::new(), String::new());
    for data in
        std::str::from_utf8(stream).expect("text").split("\n\n").filter_map(|e| e.strip_prefix("data: "))
    {
        last = data.into();
        let Ok(chunk) = serde_json::from_str::<Value>(data) else { continue };
        let choice = &chunk["choices"][0];
        text += choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        ids.extend(chunk["id"].as_str().map(str::to_owned));
    }
    ids.dedup();
    (text, ids, last)
}

fn error_code(last: &str) -> String {
    serde_json::from_str::<Value>(last).expect("JSON")["error"]["code"].as_str().expect("a code").into()
}

fn body(call: &Call) -> Value {
    serde_json::from_slice(&call.body).expect("JSON")
}

async fn count(gateway: &TestGateway, outcome: &str) -> f64 {
    let sample = format!(r#"kvlane_continuations_total{{outcome="{outcome}"}}"#);
    gateway.metric(&sample).await.unwrap_or(0.0)
}

#[tokio::test]
async fn a_completion_whose_engine_dies_is_one_stream_for_the_client() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let events = text("a", " two") + &text("a", " three");
    let half = &events[..events.len() - 9];
    let (mut client, first, engine) = begun(&gateway, &engines, "/v1/completions", &completion(), half).await;
    client.see(" two").await;
    engine.reset();
    let mut second = engines[1 - first].call().await;
    assert_eq!(second.target(), "POST /v1/completions");
    let asked = body(&second);
    assert_eq!((&asked["prompt"], &asked["max_tokens"]), (&json!("one two"), &json!(8)));
    second.begin_stream().await;
    second.chunk(&(text("b", " three") + &text("b", " four") + END)).await;
    second.end_stream().await;
    let (stream, ended) = client.rest().await;
    assert!(ended, "it ends properly");
    assert_eq!(heard(&stream), (" three four".into(), vec!["a".into()], "[DONE]".into()));
    assert_eq!(count(&gateway, "resumed").await, 1.0);
    let code = r#"kvlane_requests_total{model="m",api="completions",code="200"}"#;
    assert_eq!(gateway.metric(code).await, Some(1.0));
    assert_eq!(gateway.metric(r#"kvlane_ttft_seconds_count{model="m"}"#).await, Some(1.0), "one first token");
    gateway.end().await;
}

#[tokio::test]
async fn a_chat_is_continued_as_a_message_to_continue() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let events =
        said("a", json!({"role": "assistant", "content": ""})) + &said("a", json!({"content": "two"}));
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/chat/completions", &chat(), &events).await;
    client.see("two").await;
    engine.reset();
    let mut second = engines[1 - first].call().await;
    let asked = body(&second);
    assert_eq!(asked["messages"][1], json!({"role": "assistant", "content": "two"}));
    assert_eq!(
        (&asked["continue_final_message"], &asked["add_generation_prompt"]),
        (&json!(true), &json!(false))
    );
    second.begin_stream().await;
    second.chunk(&said("b", json!({"role": "assistant", "content": ""}))).await;
    second.chunk(&(said("b", json!({"content": " three"})) + END)).await;
    second.end_stream().await;
    let (stream, ended) = client.rest().await;
    assert!(ended && !String::from_utf8_lossy(&stream).contains("role"), "the role is sent once");
    assert_eq!(heard(&stream), (" three".into(), vec!["a".into()], "[DONE]".into()));
    gateway.end().await;
}

#[tokio::test]
async fn a_chat_without_content_is_sent_again_unchanged() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let role = said("a", json!({"role": "assistant", "content": ""}));
    let mut client = gateway.begin(chat()).await;
    let (first, mut engine) = next_call(&[&engines[0], &engines[1]]).await;
    engine.begin_stream().await;
    engine.chunk(&role).await;
    engine.reset();
    let mut second = engines[1 - first].call().await;
    assert_eq!(second.body, chat().into_bytes());
    second.begin_stream().await;
    second
        .chunk(
            &(said("b", json!({"role": "assistant", "content": ""}))
                + &said("b", json!({"content": "x"}))
                + END),
        )
        .await;
    second.end_stream().await;
    client.head().await;
    assert_eq!(heard(&client.rest().await.0), ("x".into(), vec!["b".into(), "z".into()], "[DONE]".into()));
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_whose_engine_reports_an_error_is_continued() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let (mut client, first, mut engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    // As vLLM 0.32 ends the streams of a dead engine: complete, with [DONE].
    engine
        .chunk("data: {\"error\": {\"message\": \"EngineCore encountered an issue.\", \"code\": 500}}\n\ndata: [DONE]\n\n")
        .await;
    engine.end_stream().await;
    let mut second = engines[1 - first].call().await;
    second.begin_stream().await;
    second.chunk(&(text("b", " three") + END)).await;
    second.end_stream().await;
    let (stream, ended) = client.rest().await;
    let (rest, _, last) = heard(&stream);
    assert!(ended && rest.ends_with(" three") && last == "[DONE]", "{}", String::from_utf8_lossy(&stream));
    assert!(!String::from_utf8_lossy(&stream).contains("EngineCore"));
    assert_eq!(count(&gateway, "resumed").await, 1.0);
    gateway.end().await;
}

#[tokio::test]
async fn continuation_is_off_by_default() {
    let engines = engines::<2>().await;
    let mut config = continuing();
    config.continuation = Config::default().continuation;
    let gateway = start(config, &engines).await;
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    let (stream, _) = client.rest().await;
    assert_eq!(error_code(&heard(&stream).2), "stream_broken");
    gateway.end_quiet(&[&engines[1 - first]]).await;
}

#[tokio::test]
async fn a_silent_stream_is_continued() {
    let engines = engines::<2>().await;
    let mut config = continuing();
    // The other engine has the same time for each piece.
    config.server.stream_idle_timeout = Duration::from_secs(1);
    let gateway = start(config, &engines).await;
    let (mut client, first, mut engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.gateway_gone().await;
    let mut second = engines[1 - first].call().await;
    second.begin_stream().await;
    second.chunk(&(text("b", " three") + END)).await;
    second.end_stream().await;
    assert_eq!(heard(&client.rest().await.0), (" three".into(), vec!["a".into()], "[DONE]".into()));
    gateway.end().await;
}

#[tokio::test]
async fn without_another_engine_the_stream_ends_with_the_first_error() {
    let engines = engines::<1>().await;
    let gateway = start(continuing(), &engines).await;
    let (mut client, _, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    let (stream, ended) = client.rest().await;
    assert!(ended, "an event says that it is incomplete");
    assert_eq!(error_code(&heard(&stream).2), "stream_broken");
    assert_eq!(count(&gateway, "refused").await, 1.0);
    gateway.end().await;
}

#[tokio::test]
async fn a_continuation_costs_as_much_retry_budget_as_a_retry() {
    let engines = engines::<2>().await;
    let mut config = continuing();
    config.retry.budget = Budget { share: Share::of(0.0), per_second: PerSecond::of(0.0) };
    let gateway = start(config, &engines).await;
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    assert_eq!(error_code(&heard(&client.rest().await.0).2), "stream_broken");
    assert_eq!(count(&gateway, "refused").await, 1.0);
    gateway.end_quiet(&[&engines[1 - first]]).await;
}

#[tokio::test]
async fn a_stream_is_continued_no_more_often_than_allowed() {
    let engines = engines::<3>().await;
    let mut config = continuing();
    config.continuation.max_per_request = 1;
    let gateway = start(config, &engines).await;
    let (mut client, _, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    let (_, mut second) = call(&engines).await;
    second.begin_stream().await;
    second.chunk(&text("b", " three")).await;
    client.see(" three").await;
    second.reset();
    let (stream, _) = client.rest().await;
    assert_eq!(error_code(&heard(&stream).2), "stream_broken");
    assert_eq!((count(&gateway, "resumed").await, count(&gateway, "exhausted").await), (1.0, 1.0));
    gateway.end().await;
}

#[tokio::test]
async fn a_continued_stream_may_break_again() {
    let engines = engines::<3>().await;
    let gateway = start(continuing(), &engines).await;
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    let (second, mut engine) = call(&engines).await;
    assert_ne!(second, first, "not where it broke");
    engine.begin_stream().await;
    engine.chunk(&text("b", " three")).await;
    client.see(" three").await;
    engine.reset();
    let (third, mut engine) = call(&engines).await;
    assert_ne!(third, second, "not where it broke");
    assert_eq!(
        (&body(&engine)["prompt"], &body(&engine)["max_tokens"]),
        (&json!("one two three"), &json!(7))
    );
    engine.begin_stream().await;
    engine.chunk(&(text("c", " four") + END)).await;
    engine.end_stream().await;
    assert_eq!(heard(&client.rest().await.0), (" four".into(), vec!["a".into()], "[DONE]".into()));
    assert_eq!(count(&gateway, "resumed").await, 2.0);
    gateway.end().await;
}

#[tokio::test]
async fn a_busy_engine_is_skipped() {
    let engines = engines::<3>().await;
    let gateway = start(continuing(), &engines).await;
    let (mut client, _, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    let (_, busy) = call(&engines).await;
    busy.answer(429, "{}").await;
    let (_, mut engine) = call(&engines).await;
    engine.begin_stream().await;
    engine.chunk(&(text("c", " three") + END)).await;
    engine.end_stream().await;
    assert_eq!(heard(&client.rest().await.0).0, " three");
    assert_eq!(count(&gateway, "resumed").await, 1.0);
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_without_its_end_marker_is_completed() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let whole = text("a", " two") + END.strip_suffix("data: [DONE]\n\n").expect("it ends with this marker");
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &whole).await;
    client.see("stop").await;
    engine.reset();
    let (stream, ended) = client.rest().await;
    assert_eq!((&*stream, ended), (&b"data: [DONE]\n\n"[..], true));
    assert_eq!(count(&gateway, "closed").await, 1.0);
    gateway.end_quiet(&[&engines[1 - first]]).await;
}

#[tokio::test]
async fn a_tool_call_that_has_begun_is_not_continued() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let call = json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]});
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/chat/completions", &chat(), &said("a", call)).await;
    client.see("arguments").await;
    engine.reset();
    assert_eq!(error_code(&heard(&client.rest().await.0).2), "stream_broken");
    assert_eq!(count(&gateway, "unfit").await, 1.0);
    gateway.end_quiet(&[&engines[1 - first]]).await;
}

#[tokio::test]
async fn an_engine_that_would_begin_a_new_message_is_not_asked() {
    let engines = engines::<2>().await;
    for engine in &engines {
        engine.set_models(json!([{"id": "m", "object": "model", "owned_by": "another-engine"}]));
    }
    let gateway = start(continuing(), &engines).await;
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/chat/completions", &chat(), &said("a", json!({"content": "two"})))
            .await;
    client.see("two").await;
    engine.reset();
    assert_eq!(error_code(&heard(&client.rest().await.0).2), "stream_broken");
    gateway.end_quiet(&[&engines[1 - first]]).await;
}

#[tokio::test]
async fn a_second_stream_that_does_not_continue_the_first_is_not_relayed() {
    let thinks = said("b", json!({"reasoning": "hm"}));
    // The last one ends as if complete and gives no finish reason.
    for rest in [thinks, said("b", json!({"content": " three"}))] {
        let engines = engines::<2>().await;
        let gateway = start(continuing(), &engines).await;
        let events = said("a", json!({"content": "two"}));
        let (mut client, first, engine) =
            begun(&gateway, &engines, "/v1/chat/completions", &chat(), &events).await;
        client.see("two").await;
        engine.reset();
        let mut second = engines[1 - first].call().await;
        second.begin_stream().await;
        second.chunk(&rest).await;
        second.end_stream().await;
        let (stream, ended) = client.rest().await;
        let text = String::from_utf8(stream.clone()).expect("text");
        assert!(ended && !text.contains("hm") && !text.contains("[DONE]"), "{text}");
        assert_eq!(error_code(&heard(&stream).2), "stream_broken");
        assert_eq!(count(&gateway, "misfit").await, 1.0);
        gateway.end().await;
    }
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_the_request_for_the_rest() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &completion(), &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    let mut second = engines[1 - first].call().await;
    drop(client);
    second.gateway_gone().await;
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_disconnects_is_charged_for_the_tokens_of_each_engine() {
    let engines = engines::<2>().await;
    let limits = vec![LimitSpec { tokens_per_minute: 6000, ..LimitSpec::default() }];
    let all: Vec<_> = engines.iter().collect();
    // Its clock stands still, so no allowance is refilled.
    let gateway = TestGateway::start_at_speed(Config { limits, ..continuing() }, &all, 0.0).await;
    let asked = json!({"model": "m", "prompt": "one", "stream": true, "max_tokens": 900}).to_string();
    let words = |id: &str| text(id, " x").repeat(200);
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &asked, &(words("a") + &text("a", "last"))).await;
    client.see("last").await;
    engine.reset();
    let mut second = engines[1 - first].call().await;
    second.begin_stream().await;
    second.chunk(&(words("b") + &text("b", "end"))).await;
    client.see("end").await;
    drop(client);
    second.gateway_gone().await;
    gateway.ledger_is_zero().await;
    let mut client = gateway.client().await;
    let short = json!({"model": "m", "prompt": "one", "max_tokens": 1}).to_string();
    client.request("POST", "/v1/completions", &short).await;
    let (_, call) = call(&engines).await;
    call.answer(200, "{}").await;
    let left = client.reply().await.header("x-ratelimit-remaining-tokens").and_then(|left| left.parse().ok());
    assert!(left.is_some_and(|left: u32| (5580..5600).contains(&left)), "402 and two prompts: {left:?}");
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_cannot_be_continued_is_relayed_unchanged() {
    let engines = engines::<2>().await;
    let gateway = start(continuing(), &engines).await;
    let two = json!({"model": "m", "prompt": "one", "stream": true, "max_tokens": 9, "n": 2}).to_string();
    let (mut client, first, engine) =
        begun(&gateway, &engines, "/v1/completions", &two, &text("a", " two")).await;
    client.see(" two").await;
    engine.reset();
    assert_eq!(error_code(&heard(&client.rest().await.0).2), "stream_broken");
    eventually("no request is in flight", || {
        gateway.pool("m").router.read(|scheduler| scheduler.in_flight() == 0)
    })
    .await;
    gateway.end_quiet(&[&engines[1 - first]]).await;
}
