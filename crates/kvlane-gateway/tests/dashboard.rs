//! The dashboard's files, and the API responses that it shows.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{
    Client, FakeEngine, Reply, TestGateway, chat, chat_stream, config, event, eventually, key, soon,
};
use kvlane_proxy::auth::Role;
use serde_json::{Value, json};

const FILES: [(&str, &str); 3] = [
    ("/dashboard", "text/html; charset=utf-8"),
    ("/dashboard.js", "text/javascript; charset=utf-8"),
    ("/dashboard.css", "text/css; charset=utf-8"),
];

fn with_keys() -> Config {
    let mut config = config();
    config.auth.keys = vec![key("ann", Role::User), key("watch", Role::Viewer), key("boss", Role::Admin)];
    config
}

async fn operate_as(gateway: &TestGateway, name: &str, method: &str, path: &str, body: &str) -> Reply {
    let mut client = Client::connect(gateway.metrics_address()).await;
    let fields = if name.is_empty() { String::new() } else { format!("authorization: Bearer k-{name}\r\n") };
    client.request_with(method, path, &fields, body).await;
    client.reply().await
}

async fn fleet(gateway: &TestGateway) -> Value {
    gateway.operate("GET", "/fleet", "").await.json()
}

/// Invariant: The dashboard's files contain no data; its data needs an operator's key.
///
/// Also held by `a_viewer_is_shown_its_permissions`.
#[tokio::test]
async fn the_page_is_public_and_empty_and_its_data_needs_a_key() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(with_keys(), &[&engine]).await;
    for (path, kind) in FILES {
        let reply = operate_as(&gateway, "", "GET", path, "").await;
        assert_eq!((reply.status, reply.header("content-type")), (200, Some(kind)), "{path}");
        let policy = reply.header("content-security-policy").expect("a policy");
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert!(!reply.text().contains(engine.authority()), "{path} has data of the fleet");
        for address in ["http://", "https://", "//cdn"] {
            let rest =
                reply.text().replace("http://www.w3.org/2000/svg", "").replace("http://10.0.0.9:8000", "");
            assert!(!rest.contains(address), "{path} refers to another host: {address}");
        }
        assert_eq!(operate_as(&gateway, "boss", "POST", path, "").await.status, 405, "{path}");
        assert_eq!(gateway.ask("GET", path, "").await.status, 404, "{path} is for operators");
    }
    let root = operate_as(&gateway, "", "GET", "/", "").await;
    assert_eq!((root.status, root.header("location")), (307, Some("/dashboard")));
    assert_eq!(gateway.ask("GET", "/", "").await.status, 404, "it is for operators");
    let page = operate_as(&gateway, "", "GET", "/dashboard", "").await.text();
    assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains(" onclick="), "inline");
    assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=").count());
    for path in ["/fleet", "/history", "/decisions"] {
        assert_eq!(operate_as(&gateway, "", "GET", path, "").await.status, 401, "{path}");
        assert_eq!(operate_as(&gateway, "ann", "GET", path, "").await.status, 403, "{path}");
        assert_eq!(operate_as(&gateway, "watch", "GET", path, "").await.status, 200, "{path}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_viewer_is_shown_its_permissions() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(with_keys(), &[&engine]).await;
    for (name, may_change) in [("watch", false), ("boss", true)] {
        let you = operate_as(&gateway, name, "GET", "/fleet", "").await.json()["you"].clone();
        assert_eq!((&you["name"], &you["may_change"]), (&json!(name), &json!(may_change)));
        let reply = operate_as(&gateway, name, "PUT", "/workers/1", r#"{"draining": false}"#).await;
        assert_eq!(reply.status == 200, may_change, "the shown permission must apply: {}", reply.text());
    }
    gateway.end().await;

    let gateway = TestGateway::start(config(), &[&engine]).await;
    assert_eq!(fleet(&gateway).await["you"], json!({"name": null, "role": "admin", "may_change": true}));
    gateway.end().await;
}

#[tokio::test]
async fn the_fleet_is_listed_with_its_load_and_changes() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[&a, &b]).await;
    let client = gateway.begin(chat_stream("m", &"a long prompt ".repeat(40))).await;
    let call = tokio::select! { call = a.call() => call, call = b.call() => call };
    let told = fleet(&gateway).await;
    assert_eq!(told["schema"], "kvlane.fleet/1");
    assert_eq!(
        (&told["pools"][0]["in_flight"], &told["pools"][0]["policy"]),
        (&json!(1), &json!("cache_aware"))
    );
    let busy: Vec<&Value> = told["workers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|worker| {
            assert_eq!(worker["state"], "serving");
            &worker["endpoints"][0]
        })
        .filter(|endpoint| endpoint["requests"] == 1)
        .collect();
    assert_eq!(busy.len(), 1, "{told}");
    let tokens = |pointer: &str| busy[0].pointer(pointer).and_then(Value::as_u64).expect("a count");
    assert!(tokens("/prefill_tokens") > 100 && tokens("/context_tokens") > 100);
    assert!(tokens("/holds/dispatches_tokens") > 50, "it received that prompt: {}", busy[0]);
    assert_eq!(busy[0]["knowledge"], "approximate");
    assert_eq!(busy[0]["breaker"], json!({"state": "closed", "failures": 0, "opens_for_s": null}));
    drop((call, client));
    gateway.ledger_is_zero().await;
    gateway.operate("PUT", "/workers/1", r#"{"draining": true}"#).await;
    let told = fleet(&gateway).await;
    assert_eq!(told["workers"][0]["state"], "draining");
    gateway.operate("DELETE", "/workers/1", "").await;
    eventually("it has left", || gateway.serving().controller.workers().len() == 1).await;
    assert_eq!(fleet(&gateway).await["workers"][0]["id"], "2");
    gateway.end().await;
}

/// Invariant: A dead engine is detected before the next probe and without a request.
#[tokio::test]
async fn a_dead_engine_is_detected_without_a_probe_or_a_request() {
    let engine = FakeEngine::start("m").await;
    // The next probe is due in an hour.
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let worker = gateway.serving().controller.workers().remove(0);
    assert_eq!(fleet(&gateway).await["workers"][0]["state"], "serving");
    engine.refuse();
    eventually("it is down", || !worker.state().healthy).await;
    let worker = fleet(&gateway).await["workers"][0].clone();
    assert_eq!(worker["state"], "down", "a closed port needs no second probe");
    let problem = worker["problem"].as_str().expect("a problem");
    assert!(problem.contains("refused"), "{problem}");
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_is_down_claims_no_cache() {
    let engine = FakeEngine::start("m").await;
    engine.set_metrics(
        "vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n",
    );
    let gateway = TestGateway::start(config(), &[&engine]).await;
    gateway.served(&engine, chat("m", &"a long prompt ".repeat(40))).await;
    let endpoint = |told: &Value| told["workers"][0]["endpoints"][0].clone();
    let up = endpoint(&fleet(&gateway).await);
    assert!(up["holds"]["dispatches_tokens"].as_u64() > Some(50), "{up}");
    let worker = gateway.serving().controller.workers().remove(0);
    engine.refuse();
    eventually("it is down", || !worker.state().healthy).await;
    let down = endpoint(&fleet(&gateway).await);
    assert_eq!((&down["holds"], &down["reported"]), (&Value::Null, &Value::Null), "{down}");
    assert_eq!(down["traffic"]["requests"], 1, "what was is still told");
    gateway.end().await;
}

#[tokio::test]
async fn an_endpoint_shows_its_requests_errors_rejections_and_times_to_first_token() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.retry.max_total_retries = 0;
    config.breaker.failure_threshold = 0;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let traffic = async || fleet(&gateway).await["workers"][0]["endpoints"][0]["traffic"].clone();
    let none = json!({"requests": 0, "failed": {}, "rejected": 0, "ttft_p50_s": null, "ttft_p90_s": null});
    assert_eq!(traffic().await, none);
    let (reply, ()) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat_stream("m", "hello")), async {
            let mut call = engine.call().await;
            call.begin_stream().await;
            call.chunk(&event("token")).await;
            call.chunk("data: [DONE]\n\n").await;
            call.end_stream().await;
        });
    assert_eq!(reply.status, 200);
    for (answer, status) in [
        ("HTTP/1.1 503 Busy\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n", 503),
        ("HTTP/1.1 502 Bad\r\ncontent-length: 0\r\n\r\n", 502),
        ("", 502),
    ] {
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), async {
            engine.call().await.send(answer).await;
        });
        assert_eq!(reply.status, status, "{answer}");
        gateway.ledger_is_zero().await;
    }
    let told = traffic().await;
    assert_eq!((&told["requests"], &told["rejected"]), (&json!(4), &json!(1)), "{told}");
    assert_eq!(told["failed"], json!({"broken": 1, "status": 1}));
    assert!(told["ttft_p50_s"].as_f64() > Some(0.0) && told["ttft_p50_s"] == told["ttft_p90_s"], "{told}");
    gateway.end().await;
}

#[tokio::test]
async fn the_last_failures_say_when_where_why_and_of_which_request() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.retry.max_total_retries = 0;
    config.breaker.failure_threshold = 0;
    let gateway = TestGateway::start(config, &[&engine]).await;
    assert_eq!(fleet(&gateway).await["failures"], json!([]));
    let mut client = Client::connect(gateway.address()).await;
    client.request_with("POST", "/v1/chat/completions", "x-request-id: lost\r\n", &chat("m", "hi")).await;
    engine.call().await.reset();
    assert_eq!(client.reply().await.status, 502);
    let mut client = Client::connect(gateway.address()).await;
    let streams = chat_stream("m", "hi");
    client.request_with("POST", "/v1/chat/completions", "x-request-id: cut\r\n", &streams).await;
    let mut call = engine.call().await;
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    client.see("one").await;
    call.reset();
    client.rest().await;
    // Neither a client's own error nor an answer is a failure.
    gateway.ask("POST", "/v1/chat/completions", "{}").await;
    gateway.served(&engine, chat("m", "hi")).await;
    eventually("both failures are kept", || gateway.serving().proxy.failures.list().len() == 2).await;
    let failures = fleet(&gateway).await["failures"].clone();
    let endpoint = json!(engine.url());
    for (failure, id, status) in [(&failures[0], "cut", 200), (&failures[1], "lost", 502)] {
        assert_eq!((&failure["request_id"], &failure["status"]), (&json!(id), &json!(status)));
        assert_eq!((&failure["endpoint"], &failure["model"]), (&endpoint, &json!("m")));
        assert!(failure["at_s"].as_f64() > Some(0.0), "{failure}");
        assert_ne!(failure["reason"], "", "{failure}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn tenants_are_listed_with_the_names_of_their_keys() {
    let engine = FakeEngine::start("m").await;
    let mut config = with_keys();
    config.auth.keys.push(key("bulk", Role::User));
    let gateway = TestGateway::start(config, &[&engine]).await;
    for (name, words) in [("ann", 1), ("bulk", 400), ("ann", 1)] {
        let mut client = Client::connect(gateway.address()).await;
        let (key, body) =
            (format!("authorization: Bearer k-{name}\r\n"), chat("m", &format!("{name} ").repeat(words)));
        client.request_with("POST", "/v1/chat/completions", &key, &body).await;
        engine.answer("{}").await;
        assert_eq!(client.reply().await.status, 200);
    }
    let told = operate_as(&gateway, "watch", "GET", "/fleet", "").await.json()["pools"][0]["tenants"].clone();
    let shown: Vec<_> = (0..2).map(|n| (&told["top"][n]["name"], &told["top"][n]["requests"])).collect();
    assert_eq!(shown, [(&json!("bulk"), &json!(1)), (&json!("ann"), &json!(2))], "{told}");
    assert!(told["top"][0]["prefill_tokens"].as_u64() > Some(100), "{told}");
    assert_eq!((&told["others"]["requests"], told["span_s"].as_f64() > Some(0.0)), (&json!(0), true));
    gateway.end().await;
}

#[tokio::test]
async fn the_page_learns_where_clients_connect_and_whether_they_need_a_key() {
    let engine = FakeEngine::start("m").await;
    for (config, need_a_key) in [(config(), false), (with_keys(), true)] {
        let gateway = TestGateway::start(config, &[&engine]).await;
        let told = operate_as(&gateway, "watch", "GET", "/fleet", "").await.json();
        let address = gateway.address().to_string();
        assert_eq!(told["clients"], json!({"address": address, "tls": false, "need_a_key": need_a_key}));
        gateway.end().await;
    }
}

#[tokio::test]
async fn the_policies_of_a_pool_are_listed_with_the_unit_of_their_costs() {
    let engine = FakeEngine::start("m").await;
    for (policy, shadow, unit) in
        [("cache_aware", None, "requests"), ("fleet_cost", Some("least_tokens"), "seconds")]
    {
        let mut config = config();
        config.routing.policy = PolicyConfig::by_name(policy).expect("a policy");
        config.routing.shadow_policy = shadow.map(|name| PolicyConfig::by_name(name).expect("a policy"));
        let gateway = TestGateway::start(config, &[&engine]).await;
        assert_eq!(fleet(&gateway).await["pools"][0]["shadow_policy"], json!(shadow));
        let decisions = gateway.operate("GET", "/decisions", "").await.json();
        assert_eq!(decisions["pools"][0]["cost_unit"], unit);
        gateway.end().await;
    }
}

#[tokio::test]
async fn cached_tokens_are_shown_even_if_responses_do_not_report_them() {
    let engine = FakeEngine::start("m").await;
    let page = |queries: u64, hits: u64| {
        format!("vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n")
    };
    engine.set_metrics(&page(1000, 500));
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let probes = engine.probes();
    eventually("its counters are read", || engine.probes() > probes + 1).await;
    for _ in 0..2 {
        let body = chat_stream("m", &"a long prompt ".repeat(20));
        let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", body), async {
            let mut call = engine.call().await;
            call.begin_stream().await;
            call.chunk(&event("token")).await;
            call.chunk("data: [DONE]\n\n").await;
            call.end_stream().await;
        });
        assert_eq!(reply.status, 200);
    }
    engine.set_metrics(&page(1400, 700));
    let counters = json!({"queried_tokens": 1400, "hit_tokens": 700, "external_hit_tokens": 0});
    let mut told = fleet(&gateway).await;
    // A page that was read while a probe came in may have the totals and not yet the endpoint's counters.
    while told["pools"][0]["totals"]["engine_queried_tokens"] != 400
        || told["workers"][0]["endpoints"][0]["engine_cache"] != counters
    {
        told = soon("the counters", fleet(&gateway)).await;
    }
    let totals = &told["pools"][0]["totals"];
    assert_eq!((&totals["input_tokens"], &totals["cached_tokens"]), (&json!(0), &json!(0)), "not reported");
    assert_eq!(totals["engine_hit_tokens"], 200);
    let (predicted, prompts) = (totals["predicted_cached_tokens"].as_u64(), totals["prompt_tokens"].as_u64());
    assert!(predicted > Some(0) && predicted < prompts, "{totals}");
    assert_eq!(gateway.metric("kvlane_engine_hit_tokens_total{model=\"m\"}").await, Some(200.0));
    gateway.end().await;
}

#[tokio::test]
async fn what_an_engine_fetches_from_a_store_is_counted_apart() {
    let engine = FakeEngine::start("m").await;
    let page = |fetched: u64| {
        format!(
            "vllm:prefix_cache_queries_total 9\nvllm:prefix_cache_hits_total 0\n\
             vllm:external_prefix_cache_hits_total {fetched}\n"
        )
    };
    engine.set_metrics(&page(0));
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    let sample =
        |name: &str| format!(r#"kvlane_prediction_{name}_total{{worker="{}",model="m"}}"#, engine.url());
    let ask = async || {
        let probes = engine.probes();
        eventually("its counters are read", || engine.probes() > probes + 1).await;
        let usage = json!({"prompt_tokens": 900, "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 800}});
        let answer = json!({"usage": usage}).to_string();
        let (reply, _) = tokio::join!(
            gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")),
            engine.answer(&answer)
        );
        assert_eq!(reply.status, 200);
        gateway.ledger_is_zero().await;
    };
    ask().await;
    gateway.metric_becomes(&sample("wrong"), 1.0).await;
    engine.set_metrics(&page(800));
    ask().await;
    gateway.metric_becomes(&sample("answers"), 2.0).await;
    assert_eq!(gateway.metric(&sample("wrong")).await, Some(1.0));
    assert!(gateway.metric(&sample("outside_tokens")).await > Some(700.0));
    gateway.end().await;
}

#[tokio::test]
async fn the_history_has_a_row_per_second_and_can_start_at_a_time() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let rows = |told: &Value| told["pools"][0]["t_s"].as_array().map_or(0, Vec::len);
    let mut told = json!(null);
    // There is one row per second, and requests before the first row are in none.
    while rows(&told) < 1 {
        told = soon("a row", gateway.operate("GET", "/history", "")).await.json();
    }
    let body = chat_stream("m", "hello");
    let (reply, ()) = tokio::join!(gateway.ask("POST", "/v1/chat/completions", body), async {
        let mut call = engine.call().await;
        call.begin_stream().await;
        for _ in 0..3 {
            call.chunk(&event("token")).await;
        }
        call.chunk("data: [DONE]\n\n").await;
        call.end_stream().await;
    });
    assert_eq!(reply.status, 200);
    let newest =
        |told: &Value| told["pools"][0]["ttft_p50_s"].as_array().and_then(|column| column.last()?.as_f64());
    while newest(&told).is_none() {
        told = soon("its row", gateway.operate("GET", "/history", "")).await.json();
    }
    assert_eq!(told["schema"], "kvlane.history/1");
    let pool = &told["pools"][0];
    assert_eq!(pool["model"], "m");
    for (name, column) in pool.as_object().expect("columns").iter().filter(|(name, _)| *name != "model") {
        assert_eq!(column.as_array().map(Vec::len), Some(rows(&told)), "{name}");
    }
    assert!(pool["ttft_p50_s"][rows(&told) - 1].as_f64() > Some(0.0), "{pool}");
    let ended: f64 =
        told["ends"]["answered"].as_array().expect("a column").iter().filter_map(Value::as_f64).sum();
    assert!(ended > 0.0, "{}", told["ends"]);
    let newest = told["pools"][0]["t_s"][rows(&told) - 1].as_f64().expect("a time");
    let later = gateway.operate("GET", &format!("/history?since_s={newest}"), "").await.json();
    assert!(rows(&later) < rows(&told));
    for query in ["since_s=-1", "since_s=soon", "since_s=inf"] {
        assert_eq!(gateway.operate("GET", &format!("/history?{query}"), "").await.status, 400, "{query}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn decisions_are_listed_since_a_time_shortened_or_in_full() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let c = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&a, &b, &c]).await;
    for text in ["one", "two", "three"] {
        let body = chat("m", text);
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", body), async {
            tokio::select! { _ = a.answer("{}") => {}, _ = b.answer("{}") => {}, _ = c.answer("{}") => {} }
        });
    }
    let all = gateway.decisions().await;
    assert_eq!(all.len(), 3);
    let of = |query: String| {
        let gateway = &gateway;
        async move {
            let told = gateway.operate("GET", &format!("/decisions?{query}"), "").await.json();
            told["pools"][0]["decisions"].as_array().cloned().expect("decisions")
        }
    };
    assert_eq!(of(format!("since_s={}", all[0]["at_s"])).await.len(), 0);
    assert_eq!(of(format!("since_s={}", all[2]["at_s"])).await.len(), 2);
    assert_eq!(of(format!("request={}", all[1]["request"])).await, [all[1].clone()]);
    let short = &of("candidates=1".into()).await[0];
    assert_eq!(short["candidates"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        (&short["candidates"][0]["worker"], &short["candidates_left_out"]),
        (&short["worker"], &json!(2))
    );
    for query in ["candidates=0", "candidates=65", "request=x", "since_s=-3"] {
        assert_eq!(gateway.operate("GET", &format!("/decisions?{query}"), "").await.status, 400, "{query}");
    }
    gateway.end().await;
}
