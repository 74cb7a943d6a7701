//! Adapters (LoRA): a request for one goes to an engine that has it loaded, by kvlane's placements and by the engines' reports.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::{AdapterSpec, Config};
use kvlane_gateway::testing::{Call, FakeEngine, TestGateway, config, next_call};
use serde_json::{Value, json};

/// A vLLM page on which a request with this adapter runs.
fn page(adapter: &str) -> String {
    format!(
        "vllm:num_requests_running 0\n\
         vllm:lora_requests_info{{max_lora=\"2\",running_lora_adapters=\"{adapter}\",waiting_lora_adapters=\"\"}} 1\n"
    )
}

/// The engine lists its model and these adapters.
fn list(engine: &FakeEngine, adapters: &[&str]) {
    let base = json!({"id": "m", "root": "m", "parent": null});
    let adapters = adapters.iter().map(|name| json!({"id": name, "root": name, "parent": "m"}));
    engine.set_models(std::iter::once(base).chain(adapters).collect());
}

/// Adapters that have so many copies at least.
fn with_adapters(adapters: &[(&str, u32)]) -> Config {
    let mut config = config();
    for (name, copies) in adapters {
        let spec = AdapterSpec { path: format!("/adapters/{name}"), model: None, copies: *copies };
        config.adapters.names.insert((*name).into(), spec);
    }
    config
}

/// The next request at any of the engines, which must be this one. Returns the engine, the request and its body.
async fn asked(engines: &[&FakeEngine], target: &str) -> (usize, Call, Value) {
    let (engine, call) = next_call(engines).await;
    assert_eq!(call.target(), target);
    let body = serde_json::from_slice(&call.body).expect("JSON");
    (engine, call, body)
}

const LOAD: &str = "POST /v1/load_lora_adapter";
const UNLOAD: &str = "POST /v1/unload_lora_adapter";

/// The engine that gets a request for this adapter and answers it.
async fn engine_for(gateway: &TestGateway, engines: &[&FakeEngine], adapter: &str) -> usize {
    let body = json!({"model": adapter, "prompt": "hi"}).to_string();
    let answered = async {
        let (engine, call) = next_call(engines).await;
        call.answer(200, "{}").await;
        engine
    };
    let (reply, engine) = tokio::join!(gateway.ask("POST", "/v1/completions", body), answered);
    assert_eq!(reply.status, 200);
    engine
}

/// Invariant: A request for an adapter is placed as the adapter's, and an engine that reports it counts as having it loaded.
#[tokio::test]
async fn requests_for_an_adapter_go_where_it_was_sent_or_is_reported() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
    engines.iter().for_each(|engine| list(engine, &["sql", "poem"]));
    engines[2].set_metrics(&page("sql"));
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("prefer_loaded").expect("a policy");
    let engines = [&engines[0], &engines[1], &engines[2]];
    let gateway = TestGateway::start(config, &engines).await;
    for _ in 0..6 {
        assert_eq!(engine_for(&gateway, &engines, "sql").await, 2, "it reports the adapter");
    }
    let first = engine_for(&gateway, &engines, "poem").await;
    for _ in 0..6 {
        assert_eq!(engine_for(&gateway, &engines, "poem").await, first, "it was sent there");
    }
    gateway.end().await;
}

/// Invariant: A request for an adapter of the configuration that no worker has waits until a worker has loaded it.
#[tokio::test]
async fn a_request_for_an_adapter_that_no_worker_has_waits_for_its_load() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await];
    let engines = [&engines[0], &engines[1]];
    engines
        .iter()
        .for_each(|engine| engine.set_metrics(&page("").replace("max_lora=\"2\"", "max_lora=\"1\"")));
    let gateway = TestGateway::start(with_adapters(&[("sql", 0), ("law", 0), ("poem", 0)]), &engines).await;
    let mut has = [None, None];
    // The third finds both slots taken: the one of them that was used longer ago makes room.
    for (name, gone) in [("sql", None), ("law", None), ("poem", Some("sql"))] {
        let body = json!({"model": name, "prompt": "hi"}).to_string();
        let loaded = async {
            let mut at = None;
            if let Some(gone) = gone {
                let (engine, call, body) = asked(&engines, UNLOAD).await;
                assert_eq!((has[engine], body), (Some(gone), json!({"lora_name": gone})));
                list(engines[engine], &[]);
                call.answer(200, "Success").await;
                at = Some(engine);
            }
            let (engine, call, body) = asked(&engines, LOAD).await;
            assert_eq!(body, json!({"lora_name": name, "lora_path": format!("/adapters/{name}")}));
            assert!(at.is_none_or(|at| at == engine));
            list(engines[engine], &[name]);
            call.answer(200, "Success").await;
            let (served, call, _) = asked(&engines, "POST /v1/completions").await;
            assert_eq!(served, engine, "it alone has the adapter");
            call.answer(200, "{}").await;
            engine
        };
        let (reply, engine) = tokio::join!(gateway.ask("POST", "/v1/completions", body), loaded);
        assert_eq!(reply.status, 200, "{reply:?}");
        has[engine] = Some(name);
    }
    gateway.metric_becomes(r#"kvlane_adapter_changes_total{outcome="loaded"}"#, 3.0).await;
    gateway.metric_becomes(r#"kvlane_adapter_changes_total{outcome="unloaded"}"#, 1.0).await;
    assert_eq!(
        gateway.ask("POST", "/v1/completions", r#"{"model": "unknown", "prompt": "hi"}"#).await.status,
        404
    );
    gateway.end_quiet(&engines).await;
}

#[tokio::test]
async fn an_adapter_has_its_copies_without_a_request_and_a_failed_load_is_made_elsewhere() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await, FakeEngine::start("m").await];
    let engines = [&engines[0], &engines[1], &engines[2]];
    let gateway = TestGateway::start(with_adapters(&[("sql", 2)]), &engines).await;
    let mut left = engines.to_vec();
    for is_loaded in [false, true, true] {
        let (at, call, _) = asked(&left, LOAD).await;
        let engine = left.remove(at);
        list(engine, if is_loaded { &["sql"] } else { &[] });
        call.answer(if is_loaded { 200 } else { 500 }, "{}").await;
    }
    gateway.metric_becomes(r#"kvlane_adapter_changes_total{outcome="loaded"}"#, 2.0).await;
    gateway.metric_becomes(r#"kvlane_adapter_changes_total{outcome="failed"}"#, 1.0).await;
    assert!(gateway.ask("GET", "/v1/models", "").await.text().contains("\"sql\""));
    gateway.end_quiet(&engines).await;
}

#[tokio::test]
async fn a_request_whose_adapter_cannot_be_loaded_gets_503() {
    let engine = FakeEngine::start("m").await;
    let mut config = with_adapters(&[("sql", 0)]);
    config.adapters.load_timeout = Duration::from_millis(200);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let refused = async {
        let (_, call, _) = asked(&[&engine], LOAD).await;
        call.answer(400, "{}").await;
    };
    let body = json!({"model": "sql", "prompt": "hi"}).to_string();
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/completions", body), refused);
    assert_eq!((reply.status, reply.error_code()), (503, "no_endpoint_ready".into()));
    assert!(reply.text().contains("adapters.load_timeout"), "{}", reply.text());
    gateway.end_quiet(&[&engine]).await;
}
