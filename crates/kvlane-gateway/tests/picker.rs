//! The endpoint picker: what a data plane with external processing sends, and what it gets.

use std::time::Duration;

use kvlane_core::disaggregation::Role;
use kvlane_gateway::config::WorkerSpec;
use kvlane_gateway::config::{FallbackSpec, ModelSpec, TargetSpec};
use kvlane_gateway::testing::{
    Context, DataPlane, FakeEngine, Hint, Outcome, Reaction, TestGateway, chat, chat_stream, config,
    eventually, full_duplex, in_turn,
};
use kvlane_wire::disaggregation::Connector;
use kvlane_wire::ext_proc::BodyMode;

const CHAT: &str = "/v1/chat/completions";
const HEALTH: &str = "/grpc.health.v1.Health/Check";

async fn engines<const N: usize>() -> [FakeEngine; N] {
    let mut engines = Vec::new();
    for _ in 0..N {
        engines.push(FakeEngine::start("m").await);
    }
    engines.try_into().map_err(drop).expect("as many")
}

fn authority(engine: &FakeEngine) -> String {
    engine.url().trim_start_matches("http://").to_owned()
}

async fn pick(plane: &DataPlane, text: &str) -> Outcome {
    plane.pick(CHAT, &[], &chat("m", text)).await
}

fn buffered() -> Context {
    Context { modes: Some((BodyMode::Buffered, BodyMode::None)), subset: None }
}

/// Invariant: A pick names the same endpoints in a header and in metadata, and the request's body comes back unchanged.
#[tokio::test]
async fn a_pick_is_in_header_and_metadata_and_the_body_comes_back() {
    let [one, two] = engines().await;
    let picker = TestGateway::picker(config(), &[&one, &two]).await;
    let plane = picker.data_plane().await;
    for len in [1, 20_000, 400_000] {
        let body = chat("m", &"x".repeat(len));
        let mut call = plane.begin().await;
        let headers = [("x-gateway-destination-endpoint", "6.6.6.6:6"), ("x-request-id", "mine")];
        call.head(&full_duplex(), "POST", CHAT, &headers, false);
        for piece in body.as_bytes().chunks(32_000) {
            call.body(piece, false);
        }
        call.body(b"", true);
        let outcome = call.outcome().await;
        let mut addresses = outcome.addresses();
        addresses.sort();
        let mut all = [authority(&one), authority(&two)];
        all.sort();
        assert_eq!(addresses, all, "the chosen one, and the other as a fallback");
        assert!(outcome.body() == body.as_bytes(), "{len} bytes");
        assert!(outcome.changes.clear_route_cache);
        assert_eq!(outcome.header("x-request-id"), Some("mine"));
        assert_eq!(call.status().await, "0", "the call ends with the pick");
    }
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn requests_with_one_prefix_go_to_one_endpoint() {
    let all = engines::<3>().await;
    let picker = TestGateway::picker(config(), &[&all[0], &all[1], &all[2]]).await;
    let plane = picker.data_plane().await;
    let long = "the same beginning ".repeat(40);
    let first = pick(&plane, &long).await.addresses()[0].clone();
    for n in 0..5 {
        assert_eq!(pick(&plane, &format!("{long} {n}")).await.addresses()[0], first);
    }
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn data_planes_that_take_one_endpoint_get_one() {
    let [one, two] = engines().await;
    let mut config = config();
    config.epp.fallbacks = 0;
    let picker = TestGateway::picker(config, &[&one, &two]).await;
    let plane = picker.data_plane().await;
    assert_eq!(pick(&plane, "hi").await.addresses().len(), 1);
    plane.close().await;
    picker.shut_down().await;
}

/// Invariant: A request with a subset hint is placed only on endpoints of the subset, and gets 503 if none of them can
/// serve it.
#[tokio::test]
async fn a_subset_hint_is_obeyed_in_every_spelling() {
    let [one, two] = engines().await;
    let picker = TestGateway::picker(in_turn(), &[&one, &two]).await;
    let plane = picker.data_plane().await;
    let own = authority(&two);
    let other = "10.0.0.9:8000".to_owned();
    for hint in [
        Hint::List(vec![other.clone(), own.clone()]),
        Hint::Text(format!("{other}, {own}")),
        Hint::Text(own.clone()),
    ] {
        for _ in 0..4 {
            let context = Context { subset: Some(hint.clone()), ..full_duplex() };
            let outcome = plane.pick_in(context, CHAT, &[], &chat("m", "hi")).await;
            assert_eq!(outcome.addresses(), std::slice::from_ref(&own), "{hint:?}");
        }
    }
    // Without a port, all ports of the host: both engines are there.
    let context = Context { subset: Some(Hint::Text("127.0.0.1".into())), ..full_duplex() };
    assert_eq!(plane.pick_in(context, CHAT, &[], &chat("m", "hi")).await.addresses().len(), 2);
    for hint in [Hint::List(vec![]), Hint::Text(String::new()), Hint::List(vec![other])] {
        let context = Context { subset: Some(hint), ..full_duplex() };
        let outcome = plane.pick_in(context, CHAT, &[], &chat("m", "hi")).await;
        assert_eq!(outcome.status(), Some(503));
    }
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_request_that_cannot_be_placed_gets_the_gateways_answer() {
    let [engine] = engines().await;
    let mut config = config();
    config.server.max_payload_size = 100_000;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    for (path, body, status, says) in [
        (CHAT, "{", 400, "invalid_body"),
        (CHAT, "", 400, "invalid_body"),
        (CHAT, r#"{"model":"n","messages":[]}"#, 404, "model_not_found"),
        ("/none", "{}", 404, "not_found"),
        ("/v1/../x", "{}", 400, "bad_path"),
        (CHAT, &chat("m", &"x".repeat(100_000)), 413, "body_too_large"),
    ] {
        let outcome = plane.pick(path, &[], body).await;
        let (said, headers, text) = outcome.immediate.expect("an answer");
        assert_eq!(said, status, "{path}: {text}");
        assert!(text.contains(says), "{path}: {text}");
        assert!(headers.iter().any(|(name, _)| name == "content-type"), "{headers:?}");
        assert!(!headers.iter().any(|(name, _)| name == "connection"), "{headers:?}");
    }
    picker.serving().controller.remove(&picker.serving().controller.workers()[0]);
    let outcome = pick(&plane, "hi").await;
    let (status, headers, _) = outcome.immediate.expect("an answer");
    assert_eq!(status, 503);
    assert!(headers.iter().any(|(name, _)| name == "retry-after"), "{headers:?}");
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_request_beyond_the_queue_gets_429_and_one_that_is_given_up_leaves_the_queue() {
    let [engine] = engines().await;
    let mut config = config();
    (config.routing.max_concurrent_requests, config.routing.queue_size) = (1, 1);
    config.epp.observe_responses = true;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let observed =
        Context { modes: Some((BodyMode::FullDuplexStreamed, BodyMode::FullDuplexStreamed)), subset: None };
    let mut first = plane.begin().await;
    first.head(&observed, "POST", CHAT, &[], false);
    first.body(chat("m", "first").as_bytes(), true);
    assert_eq!(first.outcome().await.status(), None);
    let queued = || picker.pool("m").router.read(|scheduler| scheduler.queued());
    for half_close in [false, true] {
        let mut second = plane.begin().await;
        second.head(&observed, "POST", CHAT, &[], false);
        second.body(chat("m", "second").as_bytes(), true);
        eventually("it is queued", || queued() == 1).await;
        let refused = plane.pick_in(observed.clone(), CHAT, &[], &chat("m", "third")).await;
        let (status, headers, _) = refused.immediate.expect("an answer");
        assert_eq!(status, 429);
        assert!(headers.iter().any(|(name, _)| name == "retry-after"), "{headers:?}");
        if half_close {
            second.half_close();
        } else {
            second.reset();
        }
        eventually("it has left", || queued() == 0).await;
    }
    first.reset();
    picker.ledger_is_zero().await;
    plane.close().await;
    picker.end().await;
}

#[tokio::test]
async fn a_buffered_body_follows_the_answer_to_the_head() {
    let [engine] = engines().await;
    let picker = TestGateway::picker(config(), &[&engine]).await;
    let plane = picker.data_plane().await;
    // Envoy that does not say how it sends bodies can only buffer them.
    for context in [buffered(), Context::default()] {
        for rewrite in [None, Some(("x-llm-d-model-name-rewrite", "m"))] {
            let mut call = plane.begin().await;
            call.head(&context, "POST", CHAT, rewrite.as_slice(), false);
            let first = call.reaction().await;
            assert_eq!(first, Some(Reaction::Part(1, Default::default())), "before the body");
            let body = chat(if rewrite.is_some() { "alias" } else { "m" }, "hi");
            call.body(body.as_bytes(), true);
            let Some(Reaction::Part(3, changes)) = call.reaction().await else {
                panic!("an answer to the body")
            };
            let outcome = Outcome { immediate: None, changes };
            assert_eq!(outcome.addresses(), [authority(&engine)]);
            let sent = outcome.changes.body.as_ref().map(|body| serde_json::from_slice(body).expect("JSON"));
            let sent: Option<serde_json::Value> = sent;
            assert_eq!(sent.as_ref().and_then(|body| body["model"].as_str()), rewrite.map(|_| "m"));
            let length = outcome.changes.body.as_ref().map(|body| body.len().to_string());
            assert_eq!(outcome.header("content-length"), length.as_deref());
            assert_eq!(call.status().await, "0");
        }
    }
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_model_is_rewritten_by_the_header_of_either_name() {
    let [engine] = engines().await;
    let picker = TestGateway::picker(config(), &[&engine]).await;
    let plane = picker.data_plane().await;
    for name in ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"] {
        let outcome = plane.pick(CHAT, &[(name, "m")], &chat("unknown", "hi")).await;
        assert_eq!(outcome.addresses(), [authority(&engine)]);
        let body: serde_json::Value = serde_json::from_slice(outcome.body()).expect("JSON");
        assert_eq!((&body["model"], &body["messages"][0]["content"]), (&"m".into(), &"hi".into()));
    }
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_name_of_the_catalogue_leads_to_its_target_whose_name_the_body_gets() {
    let [engine] = engines().await;
    let mut config = config();
    let target = TargetSpec { model: "m".into(), weight: 1, headers: Default::default(), keys: Vec::new() };
    config.models.insert("gpt".into(), ModelSpec { targets: vec![target], ..ModelSpec::default() });
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let outcome = plane.pick(CHAT, &[], &chat("gpt", "hi")).await;
    assert_eq!(outcome.addresses(), [authority(&engine)]);
    let body: serde_json::Value = serde_json::from_slice(outcome.body()).expect("JSON");
    assert_eq!(body["model"], "m");
    plane.close().await;
    picker.shut_down().await;
}

/// A data plane's answers do not say which model gave them, and a fallback may be outside of its reach.
#[tokio::test]
async fn a_name_whose_target_is_not_served_has_no_fallback_behind_a_data_plane() {
    let [engine] = engines().await;
    let mut config = config();
    let target =
        TargetSpec { model: "none".into(), weight: 1, headers: Default::default(), keys: Vec::new() };
    let fallbacks = vec![FallbackSpec { model: "m".into(), provider: None, tools: true }];
    config
        .models
        .insert("gpt".into(), ModelSpec { targets: vec![target], fallbacks, ..ModelSpec::default() });
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let mut call = plane.begin().await;
    call.head(&full_duplex(), "POST", CHAT, &[], false);
    call.body(chat("gpt", "hi").as_bytes(), true);
    let Some(Reaction::Immediate { status, body, .. }) = call.reaction().await else { panic!("an answer") };
    assert_eq!(status, 404, "{body}");
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_data_plane_that_sends_no_whole_bodies_is_told_what_to_set() {
    let [engine] = engines().await;
    let picker = TestGateway::picker(config(), &[&engine]).await;
    let plane = picker.data_plane().await;
    for mode in [BodyMode::Streamed, BodyMode::None] {
        let mut call = plane.begin().await;
        let context = Context { modes: Some((mode, BodyMode::None)), subset: None };
        call.head(&context, "POST", CHAT, &[], false);
        let Some(Reaction::Immediate { status, body, .. }) = call.reaction().await else {
            panic!("an answer")
        };
        assert_eq!(status, 500);
        assert!(body.contains("FULL_DUPLEX_STREAMED"), "{body}");
    }
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_request_without_a_body_is_answered_at_once() {
    let [engine] = engines().await;
    let picker = TestGateway::picker(config(), &[&engine]).await;
    let plane = picker.data_plane().await;
    let mut call = plane.begin().await;
    call.head(&full_duplex(), "GET", "/v1/models", &[], true);
    let Some(Reaction::Immediate { status, body, .. }) = call.reaction().await else { panic!("an answer") };
    assert_eq!(status, 200);
    assert!(body.contains(r#""id":"m""#), "{body}");
    let mut call = plane.begin().await;
    call.head(&full_duplex(), "GET", "/v1/responses/resp_1", &[], true);
    assert_eq!(call.outcome().await.addresses(), [authority(&engine)], "a path that engines serve");
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn clients_need_keys_and_engines_do_not_get_them() {
    let [engine] = engines().await;
    let mut config = config();
    let key = kvlane_gateway::config::KeySpec::new(
        "team",
        kvlane_http::secret::KeyHash::of("sk-team"),
        kvlane_proxy::auth::Role::User,
    );
    config.auth.keys.push(key);
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    assert_eq!(pick(&plane, "hi").await.status(), Some(401));
    let headers = [("authorization", "Bearer sk-team"), ("x-kvlane-forged", "1")];
    let outcome = plane.pick(CHAT, &headers, &chat("m", "hi")).await;
    assert_eq!(outcome.addresses(), [authority(&engine)]);
    assert_eq!(outcome.changes.remove, ["authorization", "x-kvlane-forged"]);
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn what_is_no_part_of_the_protocol_ends_the_call_and_nothing_else() {
    let [engine] = engines().await;
    let mut config = config();
    config.server.max_payload_size = 1000;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    for (bytes, status) in [
        (&[1, 0, 0, 0, 0][..], "3"),
        (&[0, 0xff, 0xff, 0xff, 0xff], "3"),
        (&[0, 0, 0, 0, 2, 0xff, 0xff], "3"),
        (&[0, 0, 0, 0, 0], "3"),
    ] {
        let mut call = plane.begin().await;
        call.send_raw(bytes);
        assert_eq!(call.status().await, status, "{bytes:?}");
    }
    let mut call = plane.begin().await;
    call.send_raw(&b"\0\0"[..]);
    call.half_close();
    assert_eq!(call.status().await, "3", "half a frame");
    let mut call = plane.begin().await;
    call.head(&full_duplex(), "POST", CHAT, &[], false);
    call.half_close();
    assert_eq!(call.status().await, "0", "the client left before its body was complete");
    assert_eq!(plane.call("/envoy.service.auth.v3.Authorization/Check").await.status().await, "12");
    assert_eq!(pick(&plane, "hi").await.addresses().len(), 1, "the connection still works");
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn health_follows_readiness_under_every_name_that_is_asked_for() {
    let [engine] = engines().await;
    let picker = TestGateway::picker(config(), &[&engine]).await;
    let health = DataPlane::connect(picker.serving().health_address.expect("a picker")).await;
    let check = async |name: &str| {
        let mut call = health.call(HEALTH).await;
        call.send(|message| message.bytes(1, name.as_bytes()));
        let answer = call.message().await;
        (answer.map(|answer| answer.to_vec()), call.status().await)
    };
    let (serving, not_serving) = (Some(vec![8, 1]), Some(vec![8, 2]));
    let names = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension"];
    for name in names {
        assert_eq!(check(name).await, (serving.clone(), "0".into()), "{name}");
    }
    assert_eq!(check("other").await, (None, "5".into()));
    let mut watch = health.call("/grpc.health.v1.Health/Watch").await;
    watch.send(|message| message.bytes(1, b"readiness"));
    assert_eq!(watch.message().await.as_deref(), serving.as_deref());
    picker.serving().controller.remove(&picker.serving().controller.workers()[0]);
    assert_eq!(watch.message().await.as_deref(), not_serving.as_deref());
    for name in names {
        assert_eq!(check(name).await, (not_serving.clone(), "0".into()), "{name}");
    }
    assert_eq!(check("liveness").await, (serving, "0".into()));
    let mut call = health.begin().await;
    assert_eq!(call.status().await, "12", "this port picks nothing");
    drop(watch);
    health.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_request_that_passes_by_counts_until_its_answer_should_have_ended() {
    let [engine] = engines().await;
    let mut config = config();
    config.health.interval = Duration::from_millis(50);
    engine.set_metrics(
        "vllm:num_requests_running 7\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n",
    );
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let in_flight = || picker.pool("m").router.read(|scheduler| scheduler.in_flight());
    for n in 0..5 {
        pick(&plane, &format!("number {n}")).await;
    }
    assert!(in_flight() > 0, "the answers are still being written");
    // The engine has none of them any more.
    engine.set_metrics(
        "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n",
    );
    eventually("they are over", || in_flight() == 0).await;
    plane.close().await;
    picker.end().await;
}

/// Invariant: Where answers are not seen, the prompt of a stream counts as computed once the rates say so.
#[tokio::test]
async fn the_prompt_of_a_stream_that_passes_by_is_computed_before_its_answer_ends() {
    let [engine] = engines().await;
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    // An answer takes seconds there, and a short prompt a moment.
    config.routing.timing = Some("deepseek-v3@h200x8".into());
    engine.set_metrics(
        "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n",
    );
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    plane.pick(CHAT, &[], &chat_stream("m", "a stream")).await;
    let load =
        || picker.pool("m").router.read(|scheduler| scheduler.pool().endpoints().next().expect("one").load);
    eventually("its prompt is computed", || {
        let in_flight = load().in_flight;
        (in_flight.requests, in_flight.prefill_tokens) == (1, 0)
    })
    .await;
    plane.close().await;
    picker.end().await;
}

#[tokio::test]
async fn an_objective_of_the_cluster_names_a_priority_and_slo_headers_shed_what_is_less_than_that() {
    let [engine] = engines().await;
    let picker = TestGateway::picker(config(), &[&engine]).await;
    let plane = picker.data_plane().await;
    let objectives = [("batch".to_owned(), -7), ("chat".to_owned(), 30)].into();
    picker.fleet().discovery.objectives.store(std::sync::Arc::new(objectives));
    for (header, objective, priority) in [
        ("x-llm-d-inference-objective", "chat", 30),
        ("x-gateway-inference-objective", "batch", -7),
        ("x-llm-d-inference-objective", "unknown", 0),
    ] {
        let outcome = plane.pick(CHAT, &[(header, objective)], &chat("m", "hi")).await;
        assert_eq!(outcome.status(), None);
        assert_eq!(picker.decisions().await[0]["priority"], priority, "{objective}");
    }
    let impossible = [("x-llm-d-slo-ttft-ms", "0"), ("x-llm-d-inference-objective", "batch")];
    let outcome = plane.pick(CHAT, &impossible, &chat("m", "hi")).await;
    let (status, _, body) = outcome.immediate.expect("an answer");
    assert!(status == 429 && body.contains("slo_missed"), "{status} {body}");
    let outcome = plane.pick(CHAT, &impossible[..1], &chat("m", "hi")).await;
    assert_eq!(outcome.status(), None, "only what has a negative priority is shed");
    plane.close().await;
    picker.shut_down().await;
}

#[tokio::test]
async fn a_request_that_passes_by_is_charged_for_an_answer_of_the_usual_length() {
    let [engine] = engines().await;
    let mut config = config();
    config.health.interval = Duration::from_millis(50);
    // More than one answer of the usual length, and less than two.
    let tokens_per_minute = 1.5 * kvlane_core::forecast::USUAL_TOKENS;
    config.limits = vec![kvlane_gateway::config::LimitSpec {
        tokens_per_minute: tokens_per_minute as u64,
        ..Default::default()
    }];
    engine.set_metrics(
        "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n",
    );
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let headers = [("x-llm-d-inference-fairness-id", "team")];
    assert_eq!(plane.pick(CHAT, &headers, &chat("m", "hi")).await.status(), None);
    picker.ledger_is_zero().await;
    assert_eq!(plane.pick(CHAT, &headers, &chat("m", "hi")).await.status(), Some(429));
    plane.close().await;
    picker.end().await;
}

/// Invariant: A pick for llm-d's sidecar names the decode worker as destination and the prefill worker in a header, whatever
/// the client sends in it.
#[tokio::test]
async fn a_pick_for_a_sidecar_names_the_prefill_and_the_encode_worker_in_headers() {
    let [prefill, decode, encode] = engines().await;
    for connector in [Connector::LlmdSidecar, Connector::Nixl] {
        let mut config = in_turn();
        config.disaggregation.connector = Some(connector);
        let spec = |engine: &FakeEngine, role| WorkerSpec { role, ..WorkerSpec::new(engine.url()) };
        config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
        if connector == Connector::LlmdSidecar {
            config.workers.push(spec(&encode, Role::Encode));
        }
        let picker = TestGateway::picker(config, &[]).await;
        let plane = picker.data_plane().await;
        let body =
            chat("m", "hi").replace("\"hi\"", r#"[{"type":"image_url","image_url":{"url":"data:,"}}]"#);
        let headers = [("x-prefiller-host-port", "6.6.6.6:6"), ("x-encoder-hosts-ports", "6.6.6.6:6")];
        let outcome = plane.pick(CHAT, &headers, &body).await;
        assert_eq!(outcome.addresses(), [authority(&decode)], "the others are for their stage");
        let named = headers.map(|(name, _)| outcome.header(name).map(str::to_owned));
        if connector == Connector::LlmdSidecar {
            assert_eq!(named, [Some(authority(&prefill)), Some(authority(&encode))]);
            assert!(!headers.iter().any(|(name, _)| outcome.changes.remove.iter().any(|one| one == name)));
            // The end of the prefill is estimated as that of the answer is.
            let in_flight = |engine: &FakeEngine| {
                picker.pool("m").router.read(|scheduler| {
                    let own = |one: &&kvlane_core::endpoint::Endpoint| *one.name == *engine.url();
                    scheduler.pool().endpoints().find(own).expect("an endpoint").load.in_flight.requests
                })
            };
            eventually("the prompt is computed", || (in_flight(&prefill), in_flight(&decode)) == (0, 1))
                .await;
        } else {
            assert_eq!(named, [None, None], "it has no sidecar");
            assert!(headers.iter().all(|(name, _)| outcome.changes.remove.iter().any(|one| one == name)));
        }
        plane.close().await;
        picker.shut_down().await;
    }
}
