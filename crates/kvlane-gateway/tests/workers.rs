//! Changes of the fleet while requests run.

use std::time::Duration;

use kvlane_core::policy::PolicyConfig;
use kvlane_fleet::metrics::WorkerLabel;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_gateway::testing::{
    Client, FakeEngine, TestGateway, chat, chat_stream, config, event, eventually,
};
use kvlane_http::secret::Secret;
use serde_json::{Value, json};

fn in_turn() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config
}

fn eligible(gateway: &TestGateway) -> usize {
    let pools = gateway.fleet().pools();
    pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
}

fn workers(gateway: &TestGateway) -> usize {
    gateway.serving().controller.workers().len()
}

#[tokio::test]
async fn workers_are_added_listed_and_removed_over_http() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[]).await;
    let body = |engine: &FakeEngine| json!({"url": engine.url()}).to_string();
    let added = gateway.ask("POST", "/workers", body(&a)).await;
    assert_eq!(added.status, 202);
    let location = added.header("location").expect("a location").to_owned();
    assert_eq!(added.json()["url"], a.url());
    eventually("it serves", || eligible(&gateway) == 1).await;
    gateway.served(&a, chat("m", "hi")).await;

    let again = gateway.ask("POST", "/workers", body(&a)).await;
    assert_eq!((again.status, again.error_code().as_str()), (409, "admin"));
    assert_eq!(gateway.ask("POST", "/workers", body(&b)).await.status, 202);
    eventually("both serve", || eligible(&gateway) == 2).await;
    let list = gateway.ask("GET", "/workers", "").await.json();
    assert_eq!((list["total"].as_u64(), &list["workers"][1]["url"]), (Some(2), &Value::from(b.url())));
    let one = gateway.ask("GET", &location, "").await.json();
    assert_eq!((one["healthy"].as_bool(), one["draining"].as_bool()), (Some(true), Some(false)));
    assert_eq!(one["pools"][0]["model"], "m");
    let by_url = gateway.ask("GET", &format!("/workers/{}", a.url().replace('/', "%2F")), "").await.json();
    assert_eq!(by_url["id"], one["id"]);

    assert_eq!(gateway.ask("DELETE", &location, "").await.status, 202);
    eventually("it has left", || workers(&gateway) == 1).await;
    assert_eq!(gateway.ask("GET", &location, "").await.status, 404);
    assert_eq!(gateway.ask("DELETE", &location, "").await.status, 404);
    gateway.end().await;
}

#[tokio::test]
async fn the_short_paths_of_the_worker_api_work_too() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[]).await;
    let url = engine.url().replace(':', "%3A").replace('/', "%2F");
    let reply = gateway.ask("POST", &format!("/add_worker?url={url}"), "").await;
    assert_eq!(reply.status, 200);
    eventually("it serves", || eligible(&gateway) == 1).await;
    assert_eq!(gateway.ask("GET", "/list_workers", "").await.json(), json!({"urls": [engine.url()]}));
    let reply = gateway.ask("POST", &format!("/remove_worker?url={}", engine.url()), "").await;
    assert_eq!(reply.status, 200);
    eventually("it has left", || workers(&gateway) == 0).await;
    assert_eq!(gateway.ask("GET", "/list_workers", "").await.json(), json!({"urls": []}));
    for (method, path, status) in [
        ("POST", "/add_worker", 400),
        ("POST", "/add_worker?url=nonsense", 400),
        ("POST", "/add_worker?url=ftp://h", 400),
        ("GET", "/add_worker?url=http://h", 405),
        ("POST", "/remove_worker?url=http://unknown:1", 404),
        ("PUT", "/workers", 405),
        ("GET", "/workers/77", 404),
    ] {
        assert_eq!(gateway.ask(method, path, "").await.status, status, "{method} {path}");
    }
    for body in ["", "{}", "[]", r#"{"url": 5}"#, r#"{"url":"http://h:1","else":1}"#] {
        assert_eq!(gateway.ask("POST", "/workers", body).await.status, 400, "{body}");
    }
    gateway.end().await;
}

/// Invariant: A worker that leaves finishes its streams, and then all its state is removed; a restarted worker is
/// expected to have an empty cache.
///
/// Also held by `prefix_entries_are_removed_with_their_worker`, `a_restarted_engine_is_expected_to_have_an_empty_cache`.
#[tokio::test]
async fn a_removed_worker_finishes_its_stream_and_then_its_state_is_removed() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let prompt = chat_stream("m", &"a long prompt ".repeat(100));
    let mut client = gateway.begin(prompt).await;
    let (mut call, gone, stays) =
        tokio::select! { call = a.call() => (call, &a, &b), call = b.call() => (call, &b, &a) };
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    client.head().await;
    client.see("one").await;
    assert!(gateway.pool("m").router.index_size().1 > 10, "its prefix is known");

    let reply = gateway.ask("POST", &format!("/remove_worker?url={}", gone.url()), "").await;
    assert_eq!(reply.status, 200);
    let listed = gateway.ask("GET", "/workers", "").await.json();
    let entry = listed["workers"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|worker| worker["url"] == gone.url())
        .cloned();
    assert_eq!(
        entry.map(|entry| (entry["leaving"].clone(), entry["draining"].clone())),
        Some((true.into(), true.into()))
    );
    let worker = gateway.serving().controller.find(&gone.url()).expect("it drains");
    let undo = gateway.ask("PUT", &format!("/workers/{}", worker.id.0), r#"{"draining":false}"#).await;
    assert_eq!(undo.json()["draining"], true, "removal cannot be undone");
    for _ in 0..4 {
        let reply = gateway.served(stays, chat("m", "hi")).await;
        assert_eq!(reply.header("x-router-backend"), Some(stays.url().as_str()));
    }
    call.chunk(&event("two")).await;
    client.see("two").await;
    assert_eq!(workers(&gateway), 2, "it stays until its stream has ended");
    call.end_stream().await;
    assert!(client.rest().await.1);
    eventually("it has left", || workers(&gateway) == 1).await;
    let label = WorkerLabel { worker: gone.url().as_str().into() };
    let is_shown = || gateway.fleet().metrics.workers.worker_health.get(&label).is_some();
    eventually("its metrics have gone", || !is_shown()).await;

    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains(&gone.url()) && text.contains(&stays.url()), "{text}");
    gateway.ask("DELETE", &format!("/workers/{}", stays.url().replace('/', "%2F")), "").await;
    eventually("no worker is left", || workers(&gateway) == 0).await;
    eventually("the pool has gone with its last endpoint", || gateway.fleet().pools().is_empty()).await;
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains(&stays.url()), "{text}");
    assert!(!text.contains("kvlane_queue_requests{"), "no gauge of a pool that is gone: {text}");
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert_eq!(reply.status, 503);
    gateway.end().await;
}

#[tokio::test]
async fn prefix_entries_are_removed_with_their_worker() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let index = || gateway.pool("m").router.index_size();
    let empty = index();
    for engine in [&a, &b] {
        let (reply, ()) =
            tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", &"xy".repeat(400))), async {
                tokio::select! { _ = a.answer("{}") => {}, _ = b.answer("{}") => {} }
            });
        assert_eq!(reply.status, 200, "{}", engine.url());
    }
    let (full, per_worker) = (index(), index().1 / 2);
    assert!(per_worker > 10);
    gateway.ask("POST", &format!("/remove_worker?url={}", a.url()), "").await;
    eventually("one has left", || workers(&gateway) == 1).await;
    assert_eq!(index().1, full.1 - per_worker, "only the other worker's entries are left");
    let _ = empty;
    gateway.end().await;
}

#[tokio::test]
async fn a_draining_worker_gets_no_requests_until_it_is_resumed() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let reply = gateway.ask("PUT", "/workers/1", r#"{"draining":true}"#).await;
    assert_eq!((reply.status, &reply.json()["draining"]), (200, &Value::from(true)));
    assert_eq!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await.status, 503);
    assert_eq!(gateway.ask("GET", "/readiness", "").await.status, 503);
    assert_eq!(workers(&gateway), 1, "it does not leave");
    gateway.ask("PUT", "/workers/1", r#"{"draining":false}"#).await;
    gateway.served(&engine, chat("m", "hi")).await;
    for body in ["", "{}", r#"{"draining":"yes"}"#, r#"{"draining":true,"x":1}"#] {
        assert_eq!(gateway.ask("PUT", "/workers/1", body).await.status, 400, "{body}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_drains_before_it_is_registered_gets_no_requests() {
    let engine = FakeEngine::start("m").await;
    engine.set_healthy(false);
    let mut config = config();
    config.health.interval = Duration::from_millis(5);
    let gateway = TestGateway::start(config, &[]).await;
    gateway.ask("POST", "/workers", json!({"url": engine.url()}).to_string()).await;
    eventually("it was probed", || engine.probes() > 2).await;
    gateway.ask("PUT", "/workers/1", r#"{"draining":true}"#).await;
    engine.set_healthy(true);
    let worker = gateway.serving().controller.find("1").expect("a worker");
    let in_a_pool = || !gateway.serving().controller.endpoints_of(worker.id).is_empty();
    eventually("it is in a pool and healthy", || worker.state().healthy && in_a_pool()).await;
    assert_eq!(eligible(&gateway), 0);
    assert_eq!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await.status, 503);
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_gets_no_requests_before_it_is_healthy() {
    let engine = FakeEngine::start("m").await;
    engine.set_healthy(false);
    let mut config = config();
    config.health.interval = Duration::from_millis(5);
    config.health.success_threshold = u32::MAX;
    let gateway = TestGateway::start(config, &[]).await;
    gateway.ask("POST", "/workers", json!({"url": engine.url()}).to_string()).await;
    let worker = gateway.serving().controller.find("1").expect("a worker");
    eventually("its problem is known", || worker.state().problem.is_some()).await;
    engine.set_healthy(true);
    eventually("it is in a pool", || !gateway.serving().controller.endpoints_of(worker.id).is_empty()).await;
    assert!(!worker.state().healthy);
    assert_eq!(eligible(&gateway), 0, "the scheduler and the worker agree");
    assert_eq!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await.status, 503);
    gateway.end().await;
}

#[tokio::test]
async fn a_changed_model_list_changes_the_pools() {
    let list = |adapters: &[&str]| {
        let base = json!({"id": "m", "root": "/m", "parent": null});
        let adapters = adapters.iter().map(|name| json!({"id": name, "root": name, "parent": "m"}));
        Value::from_iter(std::iter::once(base).chain(adapters))
    };
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    a.set_models(list(&["sql", "poem"]));
    b.set_models(list(&[]));
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let body = |model: &str| json!({"model": model, "prompt": "hi"}).to_string();
    for _ in 0..4 {
        // The engine without the adapter would answer 404.
        let (reply, _) = tokio::join!(gateway.ask("POST", "/v1/completions", body("sql")), a.answer("{}"));
        assert_eq!(reply.header("x-router-backend"), Some(a.url().as_str()));
    }
    a.set_models(list(&["poem"]));
    b.set_models(list(&["poem", "sql"]));
    let holders = || {
        let on = |engine: &FakeEngine| {
            let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
            let state = worker.state();
            state.names.iter().map(|served| served.name.clone()).collect::<Vec<_>>().join(" ")
        };
        (on(&a), on(&b))
    };
    // A worker's names are known before requests come under them.
    let gets = |engine: &FakeEngine, name: &str| {
        let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
        let snapshot = gateway.fleet().snapshot();
        let own = snapshot.endpoints_of(worker.id);
        snapshot.by_name.get(name).is_some_and(|served| {
            own.iter().any(|(pool, of)| pool.model == served.pool.model && !served.lacking.contains(&of.id))
        })
    };
    eventually("both lists are known", || {
        holders() == ("m poem".into(), "m poem sql".into()) && gets(&b, "sql") && !gets(&a, "sql")
    })
    .await;
    let (reply, _) = tokio::join!(gateway.ask("POST", "/v1/completions", body("sql")), b.answer("{}"));
    assert_eq!(reply.header("x-router-backend"), Some(b.url().as_str()));

    b.set_models(list(&["poem"]));
    eventually("it is unloaded", || holders().1 == "m poem" && !gets(&b, "sql")).await;
    let reply = gateway.ask("POST", "/v1/completions", body("sql")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "model_not_found"));
    let ids = gateway.ask("GET", "/v1/models", "").await.json()["data"].to_string();
    assert!(ids.contains("poem") && !ids.contains("sql"), "{ids}");

    a.set_models(json!([{"id": "other"}]));
    eventually("it serves another model", || holders().0 == "other" && gets(&a, "other")).await;
    let pools = gateway.fleet().pools();
    assert_eq!(pools.iter().map(|pool| pool.model.as_str()).collect::<Vec<_>>(), ["m", "other"]);
    eventually("it gets requests", || eligible(&gateway) == 2).await;
    let (reply, _) = tokio::join!(gateway.ask("POST", "/v1/completions", body("other")), a.answer("{}"));
    assert_eq!(reply.status, 200);
    gateway.end_quiet(&[&b]).await;
}

#[tokio::test]
async fn an_engine_without_a_model_list_serves_its_configured_model() {
    let engine = FakeEngine::start("m").await;
    engine.set_models(json!([]));
    let mut config = config();
    config.workers = vec![WorkerSpec { model: Some("given".into()), ..WorkerSpec::new(engine.url()) }];
    let gateway = TestGateway::start(config, &[]).await;
    let (reply, (_, body)) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("given", "hi")), engine.answer("{}"));
    assert_eq!((reply.status, String::from_utf8_lossy(&body).into_owned()), (200, chat("given", "hi")));
    gateway.end().await;
}

#[tokio::test]
async fn the_load_that_an_engine_reports_is_shown() {
    let engine = FakeEngine::start("m").await;
    engine.set_metrics(
        "vllm:num_requests_running{model_name=\"m\"} 3\nvllm:num_requests_waiting{model_name=\"m\"} 2\n\
         vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\n",
    );
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let reported = gateway.ask("GET", "/workers/1", "").await.json()["pools"][0]["reported"].clone();
    assert_eq!(
        (reported["running"].as_u64(), reported["waiting"].as_u64()),
        (Some(3), Some(2)),
        "{reported}"
    );
    let sample = format!(r#"kvlane_worker_kv_usage_ratio{{worker="{}",model="m"}}"#, engine.url());
    assert_eq!(gateway.metric(&sample).await, Some(0.25));
    gateway.end().await;
}

#[tokio::test]
async fn the_admin_api_is_closed_on_a_public_client_port() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.server.host = "0.0.0.0".parse().expect("an address");
    let gateway = TestGateway::start(config, &[&engine]).await;
    let address =
        std::net::SocketAddr::new("127.0.0.1".parse().expect("an address"), gateway.address().port());
    let mut client = Client::connect(address).await;
    for (method, path) in [
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("DELETE", "/workers/1"),
        ("PUT", "/workers/1"),
        ("POST", "/add_worker?url=http://evil:1"),
        ("POST", "/remove_worker?url=x"),
        ("GET", "/list_workers"),
        ("GET", "/decisions"),
    ] {
        client.request(method, path, "").await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (403, "admin"), "{method} {path}");
        assert!(!reply.text().contains(&engine.url()), "the response names no worker: {}", reply.text());
    }
    for path in ["/liveness", "/readiness", "/v1/models", "/health"] {
        client.request("GET", path, "").await;
        assert_eq!(client.reply().await.status, 200, "{path}");
    }
    assert_eq!(gateway.operate("GET", "/workers", "").await.status, 200, "the operators' port serves it");
    assert_eq!(gateway.operate("POST", "/v1/chat/completions", chat("m", "hi")).await.status, 404);
    gateway.end().await;
}

/// Invariant: A worker and its pools' schedulers agree on whether it is healthy and draining.
///
/// Also held by `a_worker_that_drains_before_it_is_registered_gets_no_requests`.
#[tokio::test]
async fn concurrent_drain_and_health_changes_leave_worker_and_scheduler_in_agreement() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let controller = &gateway.serving().controller;
    let worker = controller.find("1").expect("a worker");
    let pool = gateway.pool("m");
    for _ in 0..2000 {
        std::thread::scope(|scope| {
            for draining in [true, false] {
                let worker = &worker;
                scope.spawn(move || controller.set_draining(worker, draining));
            }
        });
        let scheduled =
            pool.router.read(|scheduler| scheduler.pool().endpoints().all(|endpoint| endpoint.draining));
        assert_eq!(worker.state().draining, scheduled);
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_restarted_engine_is_expected_to_have_an_empty_cache() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.health.interval = Duration::from_millis(5);
    config.health.failure_threshold = 1;
    config.health.success_threshold = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let prompt = "a long prompt ".repeat(100);
    gateway.served(&engine, chat("m", &prompt)).await;
    let pool = gateway.pool("m");
    assert!(pool.router.index_size().1 > 0);
    let address = engine.authority().to_owned();
    let worker = gateway.serving().controller.find(&engine.url()).expect("it is there");
    drop(engine);
    eventually("it is unhealthy, and its port is closed", || {
        eligible(&gateway) == 0 && worker.upstream.is_gone()
    })
    .await;
    let again = FakeEngine::start_again(&address, json!([{"id": "m"}])).await;
    eventually("it is back", || eligible(&gateway) == 1).await;
    assert_eq!(pool.router.index_size().1, 0);
    drop(again);
    gateway.end().await;
}

#[tokio::test]
async fn a_model_whose_only_worker_is_not_up_is_not_ready_rather_than_unknown() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let unused =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let spec = WorkerSpec { model: Some("n".into()), ..WorkerSpec::new(format!("http://{unused}")) };
    gateway.serving().controller.add(&spec).expect("a worker");
    for (model, status) in [("n", 503), ("o", 404)] {
        let reply = gateway.ask("POST", "/v1/chat/completions", chat(model, "hi")).await;
        assert_eq!(reply.status, status, "{model}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_needs_a_key_names_the_flag() {
    let engine = FakeEngine::start("m").await;
    engine.require_key("sk-worker");
    for (key, expect) in [(None, "set --worker-api-key"), (Some("sk-other"), "correct --worker-api-key")] {
        let mut config = config();
        config.upstream.api_key = key.map(Secret::new);
        config.workers = vec![WorkerSpec::new(engine.url())];
        let gateway = TestGateway::of(Serving::start(config).expect("the gateway starts"));
        let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
        eventually("it is down", || worker.state().problem.is_some()).await;
        let problem = worker.state().problem.clone().expect("one");
        assert!(
            problem.starts_with("GET /v1/models answered 401: ") && problem.contains(expect),
            "{problem}"
        );
        gateway.end().await;
    }
    let mut config = config();
    config.upstream.api_key = Some(Secret::new("sk-worker"));
    TestGateway::start(config, &[&engine]).await.end().await;
}

#[tokio::test]
async fn a_worker_url_ending_in_v1_is_the_same_without_it() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.workers = vec![WorkerSpec::new(format!("{}/v1/", engine.url()))];
    let gateway = TestGateway::start(config, &[]).await;
    let worker = gateway.serving().controller.find(&format!("{}/v1", engine.url())).expect("a worker");
    assert_eq!(*worker.url, engine.url());
    let (reply, (head, _)) =
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")), engine.answer("{}"));
    assert_eq!(reply.status, 200);
    assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1"), "{head}");
    let again = gateway.ask("POST", "/workers", json!({"url": engine.url()}).to_string()).await;
    assert_eq!(again.status, 409, "it exists already");
    gateway.end().await;
}
