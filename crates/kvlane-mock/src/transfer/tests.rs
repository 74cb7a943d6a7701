use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use kvlane_wire::api::Api;
use kvlane_wire::disaggregation::{
    Connector, ENGINES_PATH, REQUEST_ID_HEADER, Source, Split, engine_ids, transfer_params,
};
use serde_json::{Value, json};

use crate::testing::{ask, chat, engine, send, send_with, text};
use crate::{Fault, KvRole, KvTransferConfig, KvTransferFaults, MockConfig, MockEngine};

const CHATS: &str = "/v1/chat/completions";

async fn mock(connector: &str, role: KvRole, kv_transfer: KvTransferConfig) -> MockEngine {
    let kv_transfer = KvTransferConfig { kv_connector: Some(connector.into()), role, ..kv_transfer };
    engine(MockConfig { kv_transfer, ..MockConfig::default() }).await
}

/// Settings with a lease that no test outlives: engines are fast.
fn patient() -> KvTransferConfig {
    KvTransferConfig { kv_lease: 1e6, ..KvTransferConfig::default() }
}

/// A prefill and a decode engine.
async fn pair(connector: &str) -> (MockEngine, MockEngine) {
    (mock(connector, KvRole::Prefill, patient()).await, mock(connector, KvRole::Decode, patient()).await)
}

/// A decode engine with these faults of its transfers.
async fn faulty(faults: &str) -> MockEngine {
    let kv_transfer_faults: KvTransferFaults = faults.parse().expect("faults");
    mock("nixl", KvRole::Decode, KvTransferConfig { kv_transfer_faults, ..KvTransferConfig::default() }).await
}

fn long(more: Value) -> Value {
    chat(&"word ".repeat(400), more)
}

fn split(connector: Connector, api: Api, source: Source<'_>) -> Split<'_> {
    Split { connector, api, request_id: "r-1", room: 77, source }
}

async fn leg(engine: &MockEngine, path: &str, body: Bytes) -> (StatusCode, String) {
    text(send_with(engine.addr(), path, body, &[(REQUEST_ID_HEADER, "r-1")]).await).await
}

/// The body of the second leg, after the first at `prefill`.
async fn after_first(prefill: &MockEngine, api: Api, path: &str, body: &Value) -> Bytes {
    let split = split(Connector::Nixl, api, Source::default());
    let body = body.to_string();
    let (status, answer) = leg(prefill, path, split.prefill_body(body.as_bytes()).expect("a body")).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let params = transfer_params(answer.as_bytes()).expect("an object");
    split.decode_body(body.as_bytes(), Some(params)).expect("a body")
}

/// A value of the metrics page.
async fn metric(engine: &MockEngine, name: &str) -> f64 {
    let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
    let row = page.lines().find(|row| row.starts_with(&format!("vllm:{name}{{"))).expect(name);
    row.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Asks until the metric has this value.
async fn becomes(engine: &MockEngine, name: &str, value: f64) {
    let until = async { while metric(engine, name).await != value {} };
    tokio::time::timeout(std::time::Duration::from_secs(60), until).await.expect(name);
}

fn content(answer: &Value) -> &Value {
    &answer["choices"][0]["message"]["content"]
}

fn source(engine: &MockEngine) -> Source<'static> {
    let addr = engine.addr();
    let engine_id = format!("mock-{}", addr.port());
    Source {
        host: addr.ip().to_string().into(),
        port: addr.port(),
        engine_id: engine_id.into(),
        tp_size: 1,
        ..Source::default()
    }
}

#[tokio::test]
async fn the_answer_of_both_legs_is_that_of_one_engine() {
    let responses = json!({"model": "mock", "input": "word ".repeat(400), "max_output_tokens": 9});
    let completion = json!({"model": "mock", "prompt": "word ".repeat(400), "max_tokens": 9, "stream": true});
    for (api, path, body) in [
        (Api::ChatCompletions, CHATS, long(json!({"max_tokens": 9}))),
        (
            Api::ChatCompletions,
            CHATS,
            long(json!({"max_tokens": 9, "stream": true, "stream_options": {"include_usage": true}})),
        ),
        (Api::Completions, "/v1/completions", completion),
        (Api::Messages, "/v1/messages", long(json!({"max_tokens": 9}))),
        (Api::Responses, "/v1/responses", responses),
    ] {
        let (prefill, decode) = pair("nixl").await;
        let alone = engine(MockConfig::default()).await;
        let second = after_first(&prefill, api, path, &body).await;
        assert!(metric(&prefill, "kv_cache_usage_perc").await > 0.0, "its blocks wait");
        let (_, split) = leg(&decode, path, second).await;
        let (_, whole) = text(send(alone.addr(), path, body.to_string()).await).await;
        let created = |text: &str| {
            let parts: Vec<&str> = text.split("\"created").collect();
            parts.iter().map(|part| part.split_once(',').map_or(*part, |(_, rest)| rest)).collect::<String>()
        };
        assert_eq!(created(&split.replace(",\"kv_transfer_params\":null", "")), created(&whole), "{path}");
        let tokens = metric(&decode, "prompt_tokens_total").await;
        assert_eq!(metric(&decode, "external_prefix_cache_hits_total").await, tokens - 1.0);
        becomes(&prefill, "kv_cache_usage_perc", 0.0).await;
        assert_eq!(metric(&decode, "nixl_xfer_time_seconds_count").await, 1.0);
    }
}

#[tokio::test]
async fn cached_tokens_of_a_second_leg_are_those_of_the_first_and_its_blocks_stay() {
    let (prefill, decode) = pair("nixl").await;
    let body = long(json!({"max_tokens": 9}));
    for cached in [0, 31 * 16] {
        let second = after_first(&prefill, Api::ChatCompletions, CHATS, &body).await;
        let (_, answer) = leg(&decode, CHATS, second).await;
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
    }
    let (_, alone) = ask(&decode, CHATS, body).await;
    assert_eq!(alone["usage"]["prompt_tokens_details"]["cached_tokens"], 31 * 16, "what came, stays");
}

#[tokio::test]
async fn another_prompt_or_a_late_second_leg_gets_a_wrong_answer_without_an_error() {
    let (prefill, decode) = pair("nixl").await;
    let body = long(json!({"max_tokens": 9}));
    let (_, right) = ask(&engine(MockConfig::default()).await, CHATS, body.clone()).await;
    let other = chat(&"other ".repeat(400), json!({"max_tokens": 9}));
    let second: Value =
        serde_json::from_slice(&after_first(&prefill, Api::ChatCompletions, CHATS, &other).await)
            .expect("JSON");
    let mut swapped = body.clone();
    swapped["kv_transfer_params"] = second["kv_transfer_params"].clone();
    let (status, answer) = ask(&decode, CHATS, swapped).await;
    assert_eq!(status, StatusCode::OK);
    assert_ne!(content(&answer), content(&right));

    let hasty = KvTransferConfig { kv_lease: 0.0, ..KvTransferConfig::default() };
    let prefill = mock("nixl", KvRole::Prefill, hasty).await;
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &body).await;
    becomes(&prefill, "kv_cache_usage_perc", 0.0).await;
    assert_eq!(metric(&prefill, "nixl_num_kv_expired_reqs_total").await, 1.0);
    let decode = mock("nixl", KvRole::Decode, KvTransferConfig::default()).await;
    let (status, answer) = leg(&decode, CHATS, second).await;
    assert_eq!(status, StatusCode::OK);
    assert_ne!(content(&serde_json::from_str(&answer).expect("JSON")), content(&right));
    assert_eq!(metric(&prefill, "nixl_num_notifications_after_expiry_total").await, 1.0);
}

#[tokio::test]
async fn a_transfer_that_fails_is_an_error_of_the_second_leg() {
    let prefill = mock("nixl", KvRole::Prefill, patient()).await;
    let decode = faulty("fail=1").await;
    let error = json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}});
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &long(json!({}))).await;
    let (status, answer) = leg(&decode, CHATS, second).await;
    assert_eq!(
        (status, serde_json::from_str(&answer).ok()),
        (StatusCode::INTERNAL_SERVER_ERROR, Some(error.clone()))
    );
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &long(json!({"stream": true}))).await;
    let (status, stream) = leg(&decode, CHATS, second).await;
    let events: Vec<&str> = stream.split_terminator("\n\n").collect();
    assert_eq!((status, events.len()), (StatusCode::OK, 3), "{stream}");
    assert!(events[0].contains(r#""delta":{"role":"assistant","content":""}"#));
    assert_eq!(events[1], format!("data: {error}"));
    assert_eq!(events[2], "data: [DONE]");
    assert_eq!(metric(&decode, "nixl_num_failed_transfers_total").await, 2.0);

    decode.cause(Fault::Transfers { faults: KvTransferFaults::default() }).expect("a fault");
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &long(json!({}))).await;
    assert_eq!(leg(&decode, CHATS, second).await.0, StatusCode::OK);
    decode.cause(Fault::Heal).expect("a cure");
    let second =
        after_first(&prefill, Api::ChatCompletions, CHATS, &chat(&"else ".repeat(90), json!({}))).await;
    assert_eq!(leg(&decode, CHATS, second).await.0, StatusCode::INTERNAL_SERVER_ERROR, "as configured");
}

#[tokio::test]
async fn a_prefill_engine_that_dies_between_the_legs_fails_the_second() {
    let (prefill, decode) = pair("nixl").await;
    let body = long(json!({"max_tokens": 9}));
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &body).await;
    drop(prefill);
    assert_eq!(leg(&decode, CHATS, second).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(ask(&decode, CHATS, body).await.0, StatusCode::OK, "it can serve the request alone");
    assert_eq!(metric(&decode, "num_requests_waiting").await, 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_during_a_transfer_frees_the_blocks_of_both_engines() {
    let prefill = mock("nixl", KvRole::Prefill, patient()).await;
    let decode = faulty("hang=1").await;
    let body = long(json!({"stream": true}));
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &body).await;
    let hanging = send(decode.addr(), CHATS, second).await;
    becomes(&decode, "num_requests_waiting", 1.0).await;
    becomes(&decode, "external_prefix_cache_hits_total", metric(&prefill, "prompt_tokens_total").await - 1.0)
        .await;
    drop(hanging);
    becomes(&decode, "num_requests_waiting", 0.0).await;
    becomes(&decode, "kv_cache_usage_perc", 0.0).await;
    becomes(&prefill, "kv_cache_usage_perc", 0.0).await;
    assert_eq!(ask(&decode, "/health", json!(null)).await.0, StatusCode::METHOD_NOT_ALLOWED, "it lives");
}

#[tokio::test]
async fn a_client_that_leaves_during_a_transfer_kills_an_engine_with_the_race() {
    let prefill = mock("nixl", KvRole::Prefill, patient()).await;
    let decode = faulty("hang=1,abort_race=1").await;
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &long(json!({"stream": true}))).await;
    let hanging = send(decode.addr(), CHATS, second).await;
    becomes(&decode, "external_prefix_cache_hits_total", metric(&prefill, "prompt_tokens_total").await - 1.0)
        .await;
    drop(hanging);
    dies(&decode).await;
}

/// Asks until the engine's core is dead, and its server knows.
async fn dies(engine: &MockEngine) {
    let until = async { while send(engine.addr(), "/health", "").await.status() == StatusCode::OK {} };
    tokio::time::timeout(std::time::Duration::from_secs(60), until).await.expect("it dies");
}

#[tokio::test]
async fn a_client_can_kill_an_engine() {
    let (_, decode) = pair("nixl").await;
    let hostile = long(json!({"stream": true, "kv_transfer_params": {"do_remote_prefill": true}}));
    let _hanging = send(decode.addr(), CHATS, hostile.to_string()).await;
    dies(&decode).await;
    let alone = engine(MockConfig::default()).await;
    assert_eq!(
        ask(&alone, CHATS, long(json!({"kv_transfer_params": {"do_remote_prefill": true}}))).await.0,
        200
    );
}

#[tokio::test]
async fn legs_sent_at_once_find_one_another_whichever_comes_first() {
    let body = long(json!({"max_tokens": 9}));
    let (_, right) = ask(&engine(MockConfig::default()).await, CHATS, body.clone()).await;
    for (name, connector) in
        [("nixl-push", Connector::NixlPush), ("mooncake", Connector::Mooncake), ("sglang", Connector::Sglang)]
    {
        for decode_first in [true, false] {
            let (prefill, decode) = pair(name).await;
            let body = body.to_string();
            let split = split(connector, Api::ChatCompletions, source(&prefill));
            let first = split.prefill_body(body.as_bytes()).expect("a body");
            let second = split.decode_body(body.as_bytes(), None).expect("a body");
            let (first, second) = (leg(&prefill, CHATS, first), leg(&decode, CHATS, second));
            // Polled in this order.
            let ((status, _), (_, answer)) = if decode_first {
                let (second, first) = tokio::join!(biased; second, first);
                (first, second)
            } else {
                (first.await, second.await)
            };
            assert_eq!(status, StatusCode::OK);
            assert_eq!(content(&serde_json::from_str(&answer).expect("JSON")), content(&right), "{name}");
        }
    }
}

#[tokio::test]
async fn a_mooncake_engine_tells_its_id() {
    let (prefill, _) = pair("mooncake").await;
    let (_, answer) = text(send(prefill.addr(), ENGINES_PATH, "").await).await;
    assert_eq!(engine_ids(answer.as_bytes()), Ok(vec![(0, source(&prefill).engine_id.into_owned())]));
}

#[tokio::test]
async fn a_second_leg_for_an_unknown_engine_fails() {
    let (prefill, decode) = pair("nixl").await;
    let second = after_first(&prefill, Api::ChatCompletions, CHATS, &long(json!({}))).await;
    let second = String::from_utf8(second.to_vec()).expect("UTF-8").replace("\"mock-", "\"another-");
    assert_eq!(leg(&decode, CHATS, second.into()).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(metric(&prefill, "kv_cache_usage_perc").await > 0.0, "the other engine keeps the blocks");
}

#[tokio::test]
async fn a_first_leg_whose_client_leaves_keeps_nothing() {
    let (prefill, _) = pair("nixl").await;
    let body =
        long(json!({"max_tokens": 9000, "stream": true, "kv_transfer_params": {"do_remote_decode": true}}));
    let mut leaving = send(prefill.addr(), CHATS, body.to_string()).await;
    leaving.body_mut().frame().await.expect("it has begun").expect("a frame");
    drop(leaving);
    becomes(&prefill, "kv_cache_usage_perc", 0.0).await;
}
