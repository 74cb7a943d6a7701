//! Adapters (LoRA): a request for one goes to an engine that has it loaded, by kvlane's placements and by the engines' reports.

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::testing::{FakeEngine, TestGateway, config, next_call};
use serde_json::json;

/// A vLLM page on which a request with this adapter runs.
fn page(adapter: &str) -> String {
    format!(
        "vllm:num_requests_running 0\n\
         vllm:lora_requests_info{{max_lora=\"2\",running_lora_adapters=\"{adapter}\",waiting_lora_adapters=\"\"}} 1\n"
    )
}

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
    let names = ["m", "sql", "poem"];
    let card =
        |name: &str| json!({"id": name, "root": name, "parent": if name == "m" { None } else { Some("m") }});
    engines.iter().for_each(|engine| engine.set_models(names.map(card).into_iter().collect()));
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
