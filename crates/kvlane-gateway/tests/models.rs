//! The catalogue of models: aliases, shares, conditions, fallbacks and copies.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_gateway::config::{
    Config, FallbackSpec, LimitSpec, MirrorSpec, ModelSpec, ProviderSpec, TargetSpec, WorkerSpec,
};
use kvlane_gateway::testing::{
    Client, FakeEngine, Reply, TestGateway, chat, chat_stream, config, event, eventually, key, next_call,
};
use kvlane_http::secret::Secret;
use kvlane_proxy::auth::Role;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn target(model: &str, weight: u32) -> TargetSpec {
    TargetSpec { model: model.into(), weight, headers: BTreeMap::new(), keys: Vec::new() }
}

fn of(targets: Vec<TargetSpec>) -> ModelSpec {
    ModelSpec { targets, ..ModelSpec::default() }
}

fn with(name: &str, spec: ModelSpec) -> Config {
    let mut config = config();
    config.models = BTreeMap::from([(name.into(), spec)]);
    config
}

fn fallback(model: &str, tools: bool) -> FallbackSpec {
    FallbackSpec { model: model.into(), provider: None, tools }
}

async fn ask_with(gateway: &TestGateway, fields: &str, body: &str) -> Reply {
    let mut client = Client::connect(gateway.address()).await;
    client.request_with("POST", CHAT, fields, body).await;
    client.reply().await
}

/// Has the only worker of model `a` take no requests, or take them again.
async fn drain(gateway: &TestGateway, engine: &FakeEngine, draining: bool) {
    let controller = &gateway.serving().controller;
    let workers = controller.workers();
    let worker = workers.iter().find(|worker| *worker.url == *engine.url()).expect("the worker");
    controller.set_draining(worker, draining);
    eventually("it drains or resumes", || gateway.fleet().snapshot().serves("a") != draining).await;
}

/// Answers one request as vLLM does; returns the engine's index and the model that it was asked for.
async fn serve<const N: usize>(engines: [&FakeEngine; N]) -> (usize, String) {
    serve_as("x", engines).await
}

/// Answers one request with an object of this id.
async fn serve_as<const N: usize>(id: &str, engines: [&FakeEngine; N]) -> (usize, String) {
    let (index, call) = next_call(&engines).await;
    let body: Value = serde_json::from_slice(&call.body).expect("JSON");
    let model = body["model"].as_str().expect("a model").to_owned();
    let answer = format!(r#"{{"id":"{id}","model":"{model}","choices":[]}}"#);
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        answer.len()
    );
    let mut call = call;
    call.send(format!("{head}{answer}")).await;
    call.keep();
    (index, model)
}

/// Invariant: A client that uses a name of the catalogue sees no other name in its answer; the engine sees only its own.
#[tokio::test]
async fn a_name_of_the_catalogue_is_what_the_client_sees_and_the_engines_own_is_what_it_gets() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(with("gpt", of(vec![target("m", 1)])), &[&engine]).await;
    let (reply, (_, model)) = tokio::join!(gateway.ask("POST", CHAT, chat("gpt", "hi")), serve([&engine]));
    assert_eq!((reply.status, model.as_str()), (200, "m"));
    assert_eq!(reply.json(), json!({"id": "x", "model": "gpt", "choices": []}));
    assert_eq!(reply.header("x-router-model"), Some("m"));
    assert_eq!(reply.header("x-router-fallback"), None);

    let mut client = gateway.begin(chat_stream("gpt", "hi")).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    // The name is cut by a piece's end.
    for piece in [
        "data: {\"id\":\"1\",\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"mod",
        "el\":\"m\"}\n\n",
    ] {
        call.chunk(piece).await;
    }
    call.end_stream().await;
    client.head().await;
    let text = String::from_utf8(client.rest().await.0).expect("text");
    assert_eq!(text.matches(r#""model":"gpt""#).count(), 2, "{text}");

    let ids = |list: Value| -> Vec<String> {
        let data = list["data"].as_array().expect("a list").clone();
        data.iter().map(|card| card["id"].as_str().expect("an id").to_owned()).collect()
    };
    assert_eq!(ids(gateway.ask("GET", "/v1/models", "").await.json()), ["m", "gpt"]);
    assert_eq!(gateway.ask("GET", "/v1/models/gpt", "").await.json()["root"], "m");
    assert_eq!(
        gateway.metric(r#"kvlane_requests_total{model="gpt",api="chat_completions",code="200"}"#).await,
        Some(2.0)
    );
    assert_eq!(
        gateway.metric(r#"kvlane_targets_total{model="gpt",target="m",why="target"}"#).await,
        Some(2.0)
    );
    gateway.end().await;
}

/// Invariant: All turns of a conversation go to the same target of a name.
#[tokio::test]
async fn a_conversation_keeps_its_target_and_others_are_shared_out() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let gateway = TestGateway::start(with("gpt", of(vec![target("a", 1), target("b", 1)])), &[&a, &b]).await;
    let mut served = [0, 0];
    for conversation in 0..24 {
        let mut messages = vec![json!({"role": "system", "content": "the same for all"})];
        let mut first = None;
        for turn in 0..3 {
            messages.push(json!({"role": "user", "content": format!("{conversation} {turn}")}));
            let body = json!({"model": "gpt", "messages": messages}).to_string();
            let (reply, (index, _)) = tokio::join!(gateway.ask("POST", CHAT, &body), serve([&a, &b]));
            assert_eq!(reply.status, 200);
            assert_eq!(*first.get_or_insert(index), index, "conversation {conversation}, turn {turn}");
            messages.push(json!({"role": "assistant", "content": "yes"}));
        }
        served[first.expect("a turn")] += 1;
    }
    assert!(served.iter().all(|&count| count >= 4), "{served:?}");
    gateway.end().await;
}

#[tokio::test]
async fn a_turn_that_continues_a_stored_response_goes_to_the_model_that_made_it() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let gateway = TestGateway::start(with("gpt", of(vec![target("a", 1), target("b", 1)])), &[&a, &b]).await;
    let mut served = [0, 0];
    for conversation in 0..24 {
        let mut before = Value::Null;
        let mut first = None;
        for turn in 0..3 {
            let input = format!("{conversation} {turn}");
            let body = json!({"model": "gpt", "input": input, "previous_response_id": before}).to_string();
            let id = format!("resp_{conversation}_{turn}");
            let (reply, (index, _)) =
                tokio::join!(gateway.ask("POST", "/v1/responses", &body), serve_as(&id, [&a, &b]));
            assert_eq!((reply.status, reply.json()["model"].as_str()), (200, Some("gpt")));
            assert_eq!(*first.get_or_insert(index), index, "conversation {conversation}, turn {turn}");
            before = id.into();
        }
        served[first.expect("a turn")] += 1;
    }
    assert!(served.iter().all(|&count| count >= 4), "{served:?}");
    gateway.end().await;
}

#[tokio::test]
async fn names_are_set_and_removed_by_the_admin_api() {
    let (a, b) = (FakeEngine::start("org/a").await, FakeEngine::start("b").await);
    let gateway = TestGateway::start(with("gpt", of(vec![target("org/a", 1)])), &[&a, &b]).await;
    let served = async |name: &str| {
        let (reply, (_, model)) = tokio::join!(gateway.ask("POST", CHAT, chat(name, "hi")), serve([&a, &b]));
        assert_eq!(reply.status, 200);
        model
    };
    assert_eq!(served("gpt").await, "org/a");
    let body = json!({"targets": [{"model": "b"}]}).to_string();
    let reply = gateway.operate("PUT", "/catalogue/gpt", &body).await;
    assert_eq!((reply.status, reply.json()["set_by"].as_str()), (200, Some("admin")));
    assert_eq!(gateway.operate("PUT", "/catalogue/org%2Fx", &body).await.status, 201);
    assert_eq!((served("gpt").await, served("org/x").await), ("b".into(), "b".into()));
    assert_eq!(gateway.operate("GET", "/catalogue", "").await.json()["total"], 2);
    assert_eq!(gateway.operate("GET", "/catalogue/org%2Fx", "").await.json()["targets"][0]["weight"], 1);
    for (path, body, said) in [
        ("/catalogue/y", r#"{"targets": [{"model": "gpt"}]}"#, "models.y: it leads to `gpt`"),
        ("/catalogue/y", r#"{"targets": []}"#, "models.y.targets"),
        ("/catalogue/y", r#"{"target": []}"#, "unknown field `target`"),
    ] {
        let reply = gateway.operate("PUT", path, body).await;
        assert_eq!(reply.status, 400);
        assert!(reply.text().contains(said), "{}", reply.text());
    }
    assert_eq!(gateway.operate("DELETE", "/catalogue/gpt", "").await.status, 200);
    assert_eq!(
        gateway.operate("DELETE", "/catalogue/gpt", "").await.status,
        409,
        "it is in the configuration"
    );
    assert_eq!(gateway.operate("DELETE", "/catalogue/y", "").await.status, 404);
    assert_eq!(served("gpt").await, "org/a");
    gateway.end().await;
}

#[tokio::test]
async fn a_header_sends_a_request_to_a_canary() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let mut canary = target("b", 0);
    canary.headers = BTreeMap::from([("x-canary".into(), "yes".into())]);
    let gateway = TestGateway::start(with("gpt", of(vec![target("a", 1), canary])), &[&a, &b]).await;
    for (fields, expected) in [("x-canary: yes\r\n", 1), ("x-canary: no\r\n", 0), ("", 0)] {
        let body = chat("gpt", "hi");
        let (reply, (index, _)) = tokio::join!(ask_with(&gateway, fields, &body), serve([&a, &b]));
        assert_eq!((reply.status, index), (200, expected), "{fields}");
    }
    gateway.end().await;
}

/// Invariant: A fallback answers only where it is declared, fits, and its target cannot; the answer says so.
#[tokio::test]
async fn a_declared_fallback_answers_while_its_target_cannot() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    b.set_models(json!([{"id": "b", "object": "model", "root": "b", "parent": null, "max_model_len": 1000}]));
    let spec = ModelSpec {
        fallbacks: vec![fallback("none", true), fallback("b", false)],
        ..of(vec![target("a", 1)])
    };
    let mut config = with("gpt", spec);
    config.routing.max_concurrent_requests = 1;
    config.routing.queue_size = 0;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let body = chat("gpt", "hi");

    // The target's queue is full.
    let mut holder = gateway.begin(chat_stream("a", "hi")).await;
    let mut call = a.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    holder.head().await;
    let (reply, (index, model)) = tokio::join!(gateway.ask("POST", CHAT, &body), serve([&a, &b]));
    assert_eq!((reply.status, index, model.as_str()), (200, 1, "b"));
    assert_eq!(
        (reply.header("x-router-model"), reply.header("x-router-fallback")),
        (Some("b"), Some("queue_full"))
    );
    assert_eq!(reply.json()["model"], "gpt");
    let placed = async |target: &str, why: &str| {
        gateway.metric(&format!(r#"kvlane_targets_total{{model="gpt",target="{target}",why="{why}"}}"#)).await
    };
    assert_eq!((placed("a", "target").await, placed("b", "queue_full").await), (None, Some(1.0)));
    for (why, unfit) in [
        ("tools", json!({"model": "gpt", "messages": [], "tools": [{"type": "function"}]})),
        ("length", json!({"model": "gpt", "messages": [], "max_tokens": 2000})),
    ] {
        let reply = gateway.ask("POST", CHAT, unfit.to_string()).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (429, "queue_full"),
            "{why}: the target's error"
        );
    }
    drop((holder, call));
    gateway.ledger_is_zero().await;

    // The target's only engine takes no requests.
    drain(&gateway, &a, true).await;
    let (reply, _) = tokio::join!(gateway.ask("POST", CHAT, &body), serve([&a, &b]));
    assert_eq!((reply.status, reply.header("x-router-fallback")), (200, Some("no_endpoint")));
    // By its own name it has no fallback.
    assert_eq!(gateway.ask("POST", CHAT, chat("a", "hi")).await.status, 503);
    gateway.end().await;
}

/// Invariant: A copy of a request is charged to no client, and its answer reaches none.
#[tokio::test]
async fn a_copy_is_sent_to_the_mirror_and_its_answer_is_discarded() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let mirror = Some(MirrorSpec { model: "b".into(), percent: 100 });
    let mut config = with("gpt", ModelSpec { mirror, ..of(vec![target("a", 1)]) });
    config.limits = vec![LimitSpec { requests_per_minute: 3, model: "gpt".into(), ..LimitSpec::default() }];
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    for _ in 0..3 {
        let ask = gateway.ask("POST", CHAT, chat("gpt", "hi"));
        let (reply, of_a, of_b) = tokio::join!(ask, serve([&a]), serve([&b]));
        assert_eq!((reply.status, of_a.1.as_str(), of_b.1.as_str()), (200, "a", "b"));
        assert_eq!(reply.header("x-router-model"), Some("a"));
    }
    assert_eq!(gateway.ask("POST", CHAT, chat("gpt", "hi")).await.status, 429, "three requests were charged");
    gateway.ledger_is_zero().await;
    assert_eq!(gateway.metric(r#"kvlane_mirrored_total{model="b",outcome="sent"}"#).await, Some(3.0));
    assert_eq!(
        gateway.metric(r#"kvlane_requests_total{model="gpt",api="chat_completions",code="200"}"#).await,
        Some(3.0)
    );
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_waits_for_an_endpoint_is_copied_once() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let mirror = Some(MirrorSpec { model: "b".into(), percent: 100 });
    let mut config = with("gpt", ModelSpec { mirror, ..of(vec![target("a", 1)]) });
    config.routing.empty_pool_timeout = Duration::from_secs(3600);
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    drain(&gateway, &a, true).await;
    let (reply, of_b, of_a) =
        tokio::join!(gateway.ask("POST", CHAT, chat("gpt", "hi")), serve([&b]), async {
            gateway.metric_becomes(r#"kvlane_waiting_for_endpoints{model="a"}"#, 1.0).await;
            drain(&gateway, &a, false).await;
            serve([&a]).await
        });
    assert_eq!((reply.status, of_a.1.as_str(), of_b.1.as_str()), (200, "a", "b"));
    assert_eq!(gateway.metric(r#"kvlane_mirrored_total{model="b",outcome="sent"}"#).await, Some(1.0));
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_creates_something_has_no_fallback_once_its_target_may_have_received_it() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let spec = ModelSpec { fallbacks: vec![fallback("b", true)], ..of(vec![target("a", 1)]) };
    let gateway = TestGateway::start(with("gpt", spec), &[&a, &b]).await;
    let body = json!({"model": "gpt", "endpoint": "/v1/chat/completions"}).to_string();
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/batches", &body), async {
        drop(a.call().await);
    });
    assert_eq!((reply.status, reply.error_code().as_str()), (502, "upstream_error"));
    assert!(b.call_at_hand().await.is_none());
    gateway.end().await;
}

#[tokio::test]
async fn requests_of_a_key_go_to_its_target() {
    let (a, b) = (FakeEngine::start("a").await, FakeEngine::start("b").await);
    let mut testers = target("b", 0);
    testers.keys = vec!["ann".into()];
    let mut config = with("gpt", of(vec![target("a", 1), testers]));
    config.auth.keys = ["ann", "bob"].map(|name| key(name, Role::User)).to_vec();
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    for (who, expected) in [("ann", 1), ("bob", 0)] {
        let (fields, body) = (format!("authorization: Bearer k-{who}\r\n"), chat("gpt", "hi"));
        let (reply, (index, _)) = tokio::join!(ask_with(&gateway, &fields, &body), serve([&a, &b]));
        assert_eq!((reply.status, index), (200, expected), "{who}");
    }
    gateway.end().await;
}

/// Fallback for `a` at a service outside the fleet that has model `a`, too.
fn with_provider(service: &FakeEngine, tokens_per_hour: Option<u64>) -> Config {
    let outside = FallbackSpec { provider: Some("outside".into()), ..fallback("a", true) };
    let mut config = with("gpt", ModelSpec { fallbacks: vec![outside], ..of(vec![target("a", 1)]) });
    let provider = Some(ProviderSpec { name: "outside".into(), tokens_per_hour });
    let api_key = Some(Secret::new("theirs"));
    config.workers.push(WorkerSpec { provider, api_key, ..WorkerSpec::new(service.url()) });
    config.upstream.api_key = Some(Secret::new("ours"));
    config
}

/// Answers a request at a service outside the fleet, which counts this many tokens.
async fn serve_outside(service: &FakeEngine, tokens: u64) -> Value {
    let call = service.call().await;
    assert_eq!(call.header("authorization"), Some("Bearer theirs"));
    let usage = json!({"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens});
    let asked = serde_json::from_slice(&call.body).expect("JSON");
    call.answer(200, &json!({"id": "x", "model": "a", "choices": [], "usage": usage}).to_string()).await;
    asked
}

/// Invariant: A service outside the fleet gets only requests that fall back to it, within its budget.
#[tokio::test]
async fn a_service_outside_the_fleet_gets_only_what_falls_back_to_it_within_its_budget() {
    let (a, service) = (FakeEngine::start("a").await, FakeEngine::start("unlisted").await);
    let mut config = with_provider(&service, Some(1000));
    config.auth.isolate_tenants = true;
    config.auth.keys = vec![key("ann", Role::Admin)];
    let gateway = TestGateway::start(config, &[&a]).await;
    let ask =
        async |model: &str| ask_with(&gateway, "authorization: Bearer k-ann\r\n", &chat(model, "hi")).await;

    // The same model of the fleet is another one.
    let (reply, (index, _)) = tokio::join!(ask("a"), serve([&a, &service]));
    assert_eq!((reply.status, index), (200, 0));
    let mut client = Client::connect(gateway.address()).await;
    client.request_with("GET", "/v1/models", "authorization: Bearer k-ann\r\n", "").await;
    let listed = client.reply().await.json();
    let ids: Vec<_> =
        listed["data"].as_array().expect("a list").iter().map(|card| card["id"].clone()).collect();
    assert_eq!(ids, ["a", "gpt"]);
    assert_eq!((ask("outside:a").await.status, ask("unlisted").await.status), (404, 404));

    drain(&gateway, &a, true).await;
    assert_eq!(ask("a").await.status, 503, "by its own name it has no fallback");
    let (reply, asked) = tokio::join!(ask("gpt"), serve_outside(&service, 1500));
    assert_eq!((reply.status, reply.header("x-router-model")), (200, Some("outside:a")));
    assert_eq!((&asked["model"], &asked["cache_salt"]), (&json!("a"), &Value::Null), "as they know it");
    gateway.ledger_is_zero().await;
    let reply = ask("gpt").await;
    assert_eq!(
        (reply.status, reply.error_code().as_str()),
        (503, "no_endpoint_ready"),
        "the budget is used up"
    );
    assert!(service.call_at_hand().await.is_none() && service.pages_read() == 0);
    drain(&gateway, &a, false).await;
    let (reply, (index, _)) = tokio::join!(ask("gpt"), serve([&a, &service]));
    assert_eq!((reply.status, index, reply.header("x-router-fallback")), (200, 0, None));
    gateway.end().await;
}

#[tokio::test]
async fn a_reload_leads_to_another_model_of_a_service_outside_the_fleet() {
    let (a, service) = (FakeEngine::start("a").await, FakeEngine::start("unlisted").await);
    let config = with_provider(&service, None);
    let gateway = TestGateway::start(config.clone(), &[&a]).await;
    let mut next = config;
    next.workers.push(WorkerSpec::new(a.url()));
    next.models.get_mut("gpt").expect("its entry").fallbacks[0].model = "b".into();
    gateway.serving().reload(next).expect("a good configuration");
    eventually("it leads there", || gateway.fleet().snapshot().serves("outside:b")).await;
    assert!(!gateway.fleet().snapshot().serves("outside:a"));
    gateway.end().await;
}

#[test]
fn a_provider_must_be_known_and_encrypted() {
    let wrong = |change: fn(&mut Config)| {
        let mut config = config();
        let outside = FallbackSpec { provider: Some("outside".into()), ..fallback("m", true) };
        config.models = BTreeMap::from([(
            "gpt".into(),
            ModelSpec { fallbacks: vec![outside], ..of(vec![target("a", 1)]) },
        )]);
        let provider = Some(ProviderSpec { name: "outside".into(), tokens_per_hour: None });
        config.workers = vec![WorkerSpec { provider, ..WorkerSpec::new("https://api.example.com") }];
        config.validate().expect("good");
        change(&mut config);
        config.validate().expect_err("wrong").to_string()
    };
    let error = wrong(|config| config.workers.clear());
    assert!(error.contains("models.gpt.fallbacks[0].provider") && error.contains("'outside'"), "{error}");
    let error = wrong(|config| config.workers[0].url = "http://api.example.com".into());
    assert!(error.contains("workers[0].provider") && error.contains("https://"), "{error}");
    let error = wrong(|config| config.workers[0].provider.as_mut().expect("one").name = "a:b".into());
    assert!(error.contains("workers[0].provider.name"), "{error}");
}
