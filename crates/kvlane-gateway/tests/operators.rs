//! What operators see: decisions, their reasons, and metrics.

use std::collections::BTreeMap;

use kvlane_core::policy::PolicyConfig;
use kvlane_core::scheduler::TOKENS_TOLD;
use kvlane_core::timing::{TimingFile, TimingModel};
use kvlane_gateway::config::PoolOverride;
use kvlane_gateway::testing::{Client, FakeEngine, TestGateway, chat, chat_stream, config, event};
use serde_json::json;
use tokio::net::TcpListener;

async fn ask(gateway: &TestGateway, engines: &[&FakeEngine], body: &str) -> (String, String) {
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", body), async {
        match engines {
            [one] => drop(one.answer("{}").await),
            [one, two] => tokio::select! { _ = one.answer("{}") => {}, _ = two.answer("{}") => {} },
            _ => unreachable!("one or two"),
        }
    });
    assert_eq!(reply.status, 200, "{}", reply.text());
    gateway.ledger_is_zero().await;
    let header = |name: &str| reply.header(name).expect("a header").to_owned();
    (header("x-router-backend"), header("x-router-reason"))
}

#[tokio::test]
async fn with_a_timing_file_decisions_predict_first_tokens() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("timing.json");
    let mut config = config();
    config.routing.timing = Some(path.display().to_string());
    let why = config.validate().expect_err("the file does not exist").to_string();
    assert!(why.contains("routing.timing") && why.contains("timing.json"), "{why}");
    let timing = TimingModel::preset("llama-3.1-8b@a100").expect("in the tables");
    std::fs::write(&path, TimingFile::new(timing.clone()).to_json()).expect("written");
    config.validate().expect("the file exists");

    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let prompt = chat("m", &"a long shared prompt ".repeat(400));
    let (first, _) = ask(&gateway, &[&a, &b], &prompt).await;
    ask(&gateway, &[&a, &b], &prompt).await;
    let newest = &gateway.decisions().await[0];
    let tokens = newest["prompt_tokens"].as_u64().expect("a number") as u32;
    for row in newest["candidates"].as_array().expect("a list") {
        let overlap = row["overlap_tokens"].as_u64().expect("a number") as u32;
        let expected = timing.prefill_secs(overlap, tokens - overlap, 8192);
        let predicted = row["predicted_ttft_s"].as_f64().expect("a number");
        assert!((predicted - expected).abs() < 1e-9, "{row}");
        assert_eq!(row["worker"] == first.as_str(), overlap > 0);
    }
    gateway.end().await;
}

#[tokio::test]
async fn decisions_show_the_policys_inputs() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[&a, &b]).await;
    let prompt = chat("m", &"a long shared prompt ".repeat(40));
    let (first, reason) = ask(&gateway, &[&a, &b], &prompt).await;
    assert_eq!(reason, "prefix_miss");
    let (second, reason) = ask(&gateway, &[&a, &b], &prompt).await;
    assert_eq!((&second, reason.as_str()), (&first, "prefix_hit"));
    let answer = gateway.operate("GET", "/decisions", "").await.json();
    assert_eq!(answer["schema"], "kvlane.decisions/1");
    assert_eq!(
        (&answer["pools"][0]["model"], &answer["pools"][0]["policy"]),
        (&json!("m"), &json!("cache_aware"))
    );
    let decisions = gateway.decisions().await;
    assert_eq!(decisions.len(), 2);
    let newest = &decisions[0];
    assert_eq!((&newest["worker"], &newest["reason"]), (&json!(first), &json!("prefix_hit")));
    let (overlap, prompt_tokens) = (newest["overlap_tokens"].as_u64(), newest["prompt_tokens"].as_u64());
    assert!(overlap > Some(100) && overlap <= prompt_tokens, "{newest}");
    let candidates = newest["candidates"].as_array().expect("a list");
    assert_eq!(candidates.len(), 2);
    for row in candidates {
        let holds = row["worker"] == first.as_str();
        assert_eq!(row["overlap_tokens"].as_u64().expect("a number") > 0, holds, "{row}");
        assert_eq!((row["requests"].as_u64(), row["prefill_tokens"].as_u64()), (Some(0), Some(0)));
    }
    assert_eq!(decisions[1]["overlap_tokens"], 0);
    let one = gateway.operate("GET", "/decisions?limit=1&model=m", "").await.json();
    assert_eq!(one["pools"][0]["decisions"].as_array().map(Vec::len), Some(1));
    for (query, status) in [("model=other", 404), ("limit=0", 400), ("limit=many", 400), ("limit=201", 400)] {
        let reply = gateway.operate("GET", &format!("/decisions?{query}"), "").await;
        assert_eq!(reply.status, status, "{query}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn tenants_models_and_adapters_never_share_prefixes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let models = json!([{"id": "m", "root": "/m"}, {"id": "sql", "root": "/sql", "parent": "m"}]);
    let engine = FakeEngine::on(listener, models);
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let body = |model: &str, more: serde_json::Value| {
        let mut body = json!({"model": model, "messages": [{"role": "user", "content": "one and the same ".repeat(40)}]});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body.to_string()
    };
    let keys = [
        body("m", json!({})),
        body("m", json!({"cache_salt": "tenant-1"})),
        body("m", json!({"cache_salt": "tenant-2"})),
        body("sql", json!({})),
        body("sql", json!({"cache_salt": "tenant-1"})),
        body("m", json!({"lora_path": "poem"})),
    ];
    for expect in ["prefix_miss", "prefix_hit"] {
        for key in &keys {
            let (_, reason) = ask(&gateway, &[&engine], key).await;
            let overlap = gateway.decisions().await[0]["overlap_tokens"].as_u64().expect("a number");
            assert_eq!((reason.as_str(), overlap > 0), (expect, expect == "prefix_hit"), "{key:.200}");
        }
    }
    // Ids and sampling parameters are not part of the key, nor is the format of the JSON.
    let (_, reason) =
        ask(&gateway, &[&engine], &body("m", json!({"user": "u", "temperature": 0.5, "stream": false})))
            .await;
    assert_eq!(reason, "prefix_hit");
    gateway.end().await;
}

#[tokio::test]
async fn a_pool_can_have_its_own_policy() {
    let (m, n) = (FakeEngine::start("m").await, FakeEngine::start("n").await);
    let mut config = config();
    let policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.routing.pools =
        BTreeMap::from([("n".into(), PoolOverride { policy: Some(policy), ..PoolOverride::default() })]);
    let gateway = TestGateway::start(config, &[&m, &n]).await;
    assert_eq!((gateway.pool("m").policy(), gateway.pool("n").policy()), ("cache_aware", "round_robin"));
    assert_eq!(ask(&gateway, &[&n], &chat("n", "hi")).await, (n.url(), "turn".into()));
    assert_eq!(ask(&gateway, &[&m], &chat("m", "hi")).await, (m.url(), "prefix_miss".into()));
    gateway.end().await;
}

#[tokio::test]
async fn every_policy_places_requests() {
    for name in PolicyConfig::NAMES {
        let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let mut config = config();
        config.routing.policy = PolicyConfig::by_name(name).expect("a policy");
        let gateway = TestGateway::start(config, &[&a, &b]).await;
        for _ in 0..4 {
            let (backend, _) = ask(&gateway, &[&a, &b], &chat("m", "hello")).await;
            assert!(backend == a.url() || backend == b.url());
        }
        assert_eq!(gateway.decisions().await.len(), 4);
        gateway.end().await;
    }
}

/// Samples by name and labels; panics on an invalid line.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut types = BTreeMap::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.split(' ');
            match words.next() {
                Some("TYPE") => {
                    let name = words.next().expect("a name").to_owned();
                    assert!(name.starts_with("kvlane_"), "{name}");
                    assert_eq!(
                        types.insert(name, words.next().expect("a type").to_owned()),
                        None,
                        "listed twice: {line}"
                    );
                }
                Some("HELP" | "UNIT") => {}
                Some("EOF") => assert!(lines.peek().is_none(), "nothing after the end"),
                _ => panic!("{line}"),
            }
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').expect("a value");
        let name = sample.split('{').next().expect("a name");
        assert!(types.keys().any(|family| name.starts_with(family.as_str())), "no type before {line}");
        assert!(sample.ends_with('}') == sample.contains('{'), "{line}");
        let value: f64 = value.parse().expect("a number");
        assert_eq!(samples.insert(sample.to_owned(), value), None, "twice: {line}");
    }
    assert!(text.ends_with("# EOF\n"));
    samples
}

#[tokio::test]
async fn metrics_are_valid_and_count_requests() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", &"prompt ".repeat(30))).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    for n in 0..5 {
        call.chunk(&event(&n.to_string())).await;
    }
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 5, "total_tokens": 65,
        "prompt_tokens_details": {"cached_tokens": 48}}});
    call.chunk(&format!("data: {usage}\n\ndata: [DONE]\n\n")).await;
    call.end_stream().await;
    assert_eq!(client.reply().await.status, 200);
    let answer = json!({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 7}}).to_string();
    let (reply, _) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), engine.answer(&answer));
    assert_eq!(reply.status, 200);
    for n in 0..50 {
        let path = format!("/v1/files/made-up-{n}");
        let reply = tokio::join!(gateway.ask("GET", &path, ""), engine.answer("{}")).0;
        assert_eq!(reply.status, 200);
        gateway.ask("POST", "/v1/chat/completions", chat(&format!("made-up-{n}"), "hi")).await;
    }
    gateway.ledger_is_zero().await;
    let reply = gateway.operate("GET", "/metrics", "").await;
    assert!(
        reply.header("content-type").is_some_and(|kind| kind.starts_with("application/openmetrics-text"))
    );
    let text = reply.text();
    let samples = samples(&text);
    let url = engine.url();
    for (sample, expect) in [
        (r#"kvlane_requests_total{model="m",api="chat_completions",code="200"}"#.to_owned(), 2.0),
        (r#"kvlane_requests_total{model="",api="chat_completions",code="404"}"#.into(), 50.0),
        (r#"kvlane_requests_total{model="m",api="other",code="200"}"#.into(), 50.0),
        (r#"kvlane_input_tokens_total{model="m"}"#.into(), 100.0),
        (r#"kvlane_output_tokens_total{model="m"}"#.into(), 12.0),
        (r#"kvlane_cached_tokens_total{model="m"}"#.into(), 48.0),
        (r#"kvlane_ttft_seconds_count{model="m"}"#.into(), 1.0),
        (r#"kvlane_tpot_seconds_count{model="m"}"#.into(), 1.0),
        (r#"kvlane_request_duration_seconds_count{model="m"}"#.into(), 52.0),
        (r#"kvlane_queue_requests{model="m"}"#.into(), 0.0),
        (r#"kvlane_shed_total{model="m",reason="queue_full"}"#.into(), 0.0),
        (format!(r#"kvlane_worker_health{{worker="{url}"}}"#), 1.0),
        (format!(r#"kvlane_worker_requests_active{{worker="{url}",model="m"}}"#), 0.0),
        (format!(r#"kvlane_worker_prefill_tokens{{worker="{url}",model="m"}}"#), 0.0),
        (format!(r#"kvlane_worker_context_tokens{{worker="{url}",model="m"}}"#), 0.0),
    ] {
        assert_eq!(samples.get(&sample), Some(&expect), "{sample} in {text}");
    }
    let placed: f64 = samples
        .iter()
        .filter(|(name, _)| name.starts_with("kvlane_worker_selection_total"))
        .map(|(_, n)| n)
        .sum();
    assert_eq!(placed, 52.0);
    assert!(samples[r#"kvlane_index_blocks{model="m"}"#] > 0.0);
    assert!(!text.contains("made"), "unknown paths do not become labels");
    gateway.end().await;
}

#[tokio::test]
async fn load_is_shown_while_requests_run() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.begin(chat_stream("m", &"prompt ".repeat(60))).await;
    let mut call = engine.call().await;
    let load = || async {
        let pool = gateway.operate("GET", "/workers/1", "").await.json()["pools"][0].clone();
        let get = |key: &str| pool[key].as_u64().expect("a number");
        (get("requests"), get("prefill_tokens"), get("context_tokens"))
    };
    let (requests, prefill, context) = load().await;
    assert!(requests == 1 && prefill > 90 && context == prefill, "{prefill} {context}");
    call.begin_stream().await;
    call.chunk(&event("a").repeat(1 + TOKENS_TOLD as usize)).await;
    call.chunk(&event("b")).await;
    client.head().await;
    client.see("\"b\"").await;
    let told = context + u64::from(TOKENS_TOLD);
    assert_eq!(load().await, (1, 0, told), "the prefill is over, and tokens were reported in batches");
    call.end_stream().await;
    client.rest().await;
    gateway.ledger_is_zero().await;
    assert_eq!(load().await, (0, 0, 0));
    gateway.end().await;
}

#[tokio::test]
async fn a_response_that_is_not_a_stream_ends_the_prefill_when_it_begins() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.begin(chat("m", "hi")).await;
    let mut call = engine.call().await;
    call.send("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\n{ ").await;
    client.head().await;
    client.see("{ ").await;
    let pool = gateway.operate("GET", "/workers/1", "").await.json()["pools"][0].clone();
    assert_eq!((pool["requests"].as_u64(), pool["prefill_tokens"].as_u64()), (Some(1), Some(0)));
    call.send(" }").await;
    call.keep();
    assert!(client.rest().await.1);
    gateway.end().await;
}

#[tokio::test]
async fn the_openapi_document_is_on_both_ports() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for reply in
        [gateway.ask("GET", "/openapi.yaml", "").await, gateway.operate("GET", "/openapi.yaml", "").await]
    {
        assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/yaml")));
        assert_eq!(reply.text(), include_str!("../../../docs/openapi.yaml"));
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_wrong_method_gets_the_allowed_ones_and_head_is_get_without_a_body() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    for (method, path, allow) in [
        ("POST", "/readiness", "GET, HEAD"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PATCH", "/decisions", "GET, HEAD"),
        ("DELETE", "/workers", "GET, HEAD, POST"),
        ("POST", "/workers/1", "GET, HEAD, PUT, PATCH, DELETE"),
        ("GET", "/add_worker", "POST"),
    ] {
        let reply = gateway.operate(method, path, "").await;
        assert_eq!((reply.status, reply.header("allow")), (405, Some(allow)), "{method} {path}");
        assert_eq!(reply.error_code(), "method_not_allowed");
    }
    let reply = gateway.ask("GET", "/v1/chat/completions", "").await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    for path in ["/liveness", "/workers", "/workers/1", "/decisions", "/metrics"] {
        let mut client = Client::connect(gateway.metrics_address()).await;
        client.request("HEAD", path, "").await;
        assert_eq!(client.head().await.0, 200, "HEAD {path}");
        // The next bytes are the next response: the first had no body.
        client.request("GET", "/liveness", "").await;
        assert_eq!(client.reply().await.text(), "ok\n", "after HEAD {path}");
    }
    gateway.end().await;
}
