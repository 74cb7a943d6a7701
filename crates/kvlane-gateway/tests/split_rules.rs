//! Which requests are split when, and what operators see of it: hedging, continuation, roles that change, breakers.

use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::breaker;
use kvlane_core::budget::PerSecond;
use kvlane_core::disaggregation::Role;
use kvlane_fleet::discovery::{KUBERNETES, Target, Targets};
use kvlane_gateway::config::{Budget, Config, WorkerSpec};
use kvlane_gateway::testing::{
    Call, Client, FakeEngine, TestGateway, chat, chat_stream, event, eventually, in_turn, next_call,
};
use kvlane_wire::disaggregation::Connector;
use serde_json::{Value, json};

fn spec(engine: &FakeEngine, role: Role) -> WorkerSpec {
    WorkerSpec { role, ..WorkerSpec::new(engine.url()) }
}

async fn engines<const N: usize>() -> [FakeEngine; N] {
    let mut engines = Vec::new();
    for _ in 0..N {
        let engine = FakeEngine::start("m").await;
        engine.set_models(json!([{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 1000}]));
        engines.push(engine);
    }
    engines.try_into().ok().expect("so many")
}

/// A gateway that splits requests between these engines.
async fn start(mut config: Config, engines: &[(&FakeEngine, Role)]) -> TestGateway {
    config.disaggregation.connector.get_or_insert(Connector::Nixl);
    config.workers = engines.iter().map(|(engine, role)| spec(engine, *role)).collect();
    TestGateway::start(config, &[]).await
}

/// Answers the prefill leg of the next request.
async fn prefilled(prefill: &FakeEngine) {
    let params = json!({"do_remote_prefill": true, "remote_block_ids": [[1]], "remote_engine_id": "e"});
    prefill.answer(&json!({"choices": [], "kv_transfer_params": params}).to_string()).await;
}

/// The reply to a request that these two share.
async fn shared(gateway: &TestGateway, prefill: &FakeEngine, decode: &FakeEngine) {
    let mut client = gateway.begin(chat("m", "hi")).await;
    prefilled(prefill).await;
    decode.answer("{}").await;
    assert_eq!(client.reply().await.header("x-router-prefill"), Some(prefill.url().as_str()));
}

fn is_whole(call: &Call) -> bool {
    let body: Value = serde_json::from_slice(&call.body).expect("JSON");
    body["kv_transfer_params"].is_null()
}

async fn end(mut call: Call, client: &mut Client) {
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    client.rest().await;
}

/// Invariant: A split request is not hedged, and the copy of a hedged request is not split.
#[tokio::test]
async fn a_hedge_is_not_split_and_a_split_request_is_not_hedged() {
    let mut config = in_turn();
    config.server.relay_threads = 1;
    config.hedge.enabled = true;
    config.hedge.delay = Some(Duration::from_millis(20));
    config.hedge.budget = Budget { share: Share::of(1.0), per_second: PerSecond::of(10.0) };
    let [prefill, a, b] = engines().await;
    let gateway = start(config, &[(&prefill, Role::Prefill), (&a, Role::Decode), (&b, Role::Decode)]).await;
    let decodes = [&a, &b];
    // Both have seen the prompt of the request that is hedged.
    let alone = r#"{"model":"m","prompt":["a","b"],"stream":true}"#;
    for _ in decodes {
        let mut client = gateway.client().await;
        client.request("POST", "/v1/completions", alone).await;
        let (_, mut call) = next_call(&decodes).await;
        call.begin_stream().await;
        call.chunk(&event("one")).await;
        client.head().await;
        end(call, &mut client).await;
    }
    let mut waits = gateway.begin(chat_stream("m", "hi")).await;
    prefilled(&prefill).await;
    let (first, mut split) = next_call(&decodes).await;
    assert!(!is_whole(&split));
    // A later request has a copy. The same thread runs the delays of both, so one of the split request would be here.
    let mut client = gateway.client().await;
    client.request("POST", "/v1/completions", alone).await;
    let (_, mut call) = next_call(&decodes).await;
    let (_, mut copy) = next_call(&decodes).await;
    for call in [&call, &copy] {
        assert_eq!(call.body, alone.as_bytes(), "no copy of the split request is sent");
    }
    copy.begin_stream().await;
    copy.chunk(&event("one")).await;
    client.head().await;
    call.gateway_gone().await;
    end(copy, &mut client).await;
    split.begin_stream().await;
    split.chunk(&event("one")).await;
    waits.head().await;
    end(split, &mut waits).await;
    assert!(first < 2);
    gateway.end_quiet(&[&prefill, &a, &b]).await;
}

/// Invariant: A stream of a split request that breaks continues on one worker.
#[tokio::test]
async fn a_continuation_is_not_split() {
    let mut config = in_turn();
    config.continuation.enabled = true;
    let [prefill, a, b] = engines().await;
    let gateway = start(config, &[(&prefill, Role::Prefill), (&a, Role::Decode), (&b, Role::Decode)]).await;
    let text = |text: &str| {
        let chunk = json!({"id": "a", "object": "text_completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "text": text, "finish_reason": null}]});
        format!("data: {chunk}\n\n")
    };
    let mut client = gateway.client().await;
    let asked = json!({"model": "m", "prompt": "one", "stream": true, "max_tokens": 9});
    client.request("POST", "/v1/completions", &asked.to_string()).await;
    prefilled(&prefill).await;
    let (first, mut call) = next_call(&[&a, &b]).await;
    assert!(!is_whole(&call));
    call.begin_stream().await;
    call.chunk(&text(" two")).await;
    client.head().await;
    client.see(" two").await;
    call.reset();
    let mut next = [&b, &a][first].call().await;
    assert!(is_whole(&next), "{}", String::from_utf8_lossy(&next.body));
    let body: Value = serde_json::from_slice(&next.body).expect("JSON");
    assert_eq!(body["prompt"], "one two");
    next.begin_stream().await;
    next.chunk(&text(" three")).await;
    client.see(" three").await;
    next.chunk("data: {\"id\":\"a\",\"created\":2,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\n").await;
    end(next, &mut client).await;
    gateway.end_quiet(&[&prefill, &a, &b]).await;
}

#[tokio::test]
async fn a_worker_added_with_a_role_gets_its_legs_and_is_listed_with_it() {
    let [prefill, decode] = engines().await;
    let gateway = start(in_turn(), &[(&decode, Role::Decode)]).await;
    gateway.served(&decode, chat("m", "hi")).await;
    let body = json!({"url": prefill.url(), "role": "prefill"}).to_string();
    assert_eq!(gateway.operate("POST", "/workers", body).await.status, 202);
    eventually("it is ready", || {
        gateway.pool("m").router.read(|scheduler| scheduler.pool().eligible().count()) == 2
    })
    .await;
    let listed = gateway.operate("GET", "/workers", "").await.json();
    assert_eq!(
        (&listed["workers"][0]["role"], &listed["workers"][1]["role"]),
        (&json!("decode"), &json!("prefill"))
    );
    shared(&gateway, &prefill, &decode).await;
    let wrong = json!({"url": "http://127.0.0.1:1", "role": "reader"}).to_string();
    assert_eq!(gateway.operate("POST", "/workers", wrong).await.status, 400);
    gateway.end_quiet(&[&prefill, &decode]).await;
}

#[tokio::test]
async fn a_worker_whose_role_changes_gets_other_legs() {
    let [a, b] = engines().await;
    let gateway = start(in_turn(), &[(&a, Role::Prefill), (&b, Role::Decode)]).await;
    shared(&gateway, &a, &b).await;
    // By a reload of the configuration.
    let mut next = Config::clone(&gateway.serving().config());
    next.workers = vec![spec(&a, Role::Decode), spec(&b, Role::Prefill)];
    let reloaded = gateway.serving().reload(next).expect("right");
    assert_eq!(reloaded.replaced.len(), 2);
    let workers = || gateway.serving().controller.workers().len();
    eventually("their predecessors have left", || workers() == 2).await;
    shared(&gateway, &b, &a).await;
    gateway.end_quiet(&[&a, &b]).await;
}

#[tokio::test]
async fn a_pod_whose_role_changes_gets_other_legs() {
    let [a, b] = engines().await;
    let gateway = start(in_turn(), &[]).await;
    let apply = |roles: [Role; 2]| {
        let target = |engine: &FakeEngine, role| Target {
            key: engine.url(),
            spec: spec(engine, role),
            terminating: false,
        };
        let workers = vec![target(&a, roles[0]), target(&b, roles[1])];
        gateway.serving().controller.reconcile(KUBERNETES, &Targets { workers, problems: Vec::new() })
    };
    let workers = || gateway.serving().controller.workers();
    let ready = || workers().len() == 2 && workers().iter().all(|worker| worker.state().healthy);
    apply([Role::Prefill, Role::Decode]);
    eventually("both serve", ready).await;
    shared(&gateway, &a, &b).await;
    apply([Role::Decode, Role::Prefill]);
    eventually("their predecessors have left", ready).await;
    shared(&gateway, &b, &a).await;
    gateway.end_quiet(&[&a, &b]).await;
}

#[tokio::test]
async fn a_transfer_of_legs_that_are_sent_at_once_begins_with_the_answer_to_the_first() {
    let mut config = in_turn();
    config.disaggregation.connector = Some(Connector::Sglang);
    let [prefill, decode] = engines().await;
    let gateway = start(config, &[(&prefill, Role::Prefill), (&decode, Role::Decode)]).await;
    let count = r#"kvlane_kv_transfer_seconds_count{model="m"}"#;
    let ended = || {
        let router = &gateway.pool("m").router;
        router.read(|scheduler| {
            let now = gateway.fleet().clock.now();
            scheduler.transfers().links(now).map(|link| link.ended).sum::<u64>()
        })
    };
    // Without the first leg's answer, nothing is known of the transfer.
    for (computed_first, transfers) in [(false, 0), (true, 1)] {
        let mut client = gateway.begin(chat_stream("m", "hi")).await;
        let (first, mut second) = tokio::join!(prefill.call(), decode.call());
        let mut first = Some(first);
        if computed_first && let Some(first) = first.take() {
            first.answer(200, "{}").await;
            let moving = || {
                gateway.pool("m").router.read(|scheduler| {
                    scheduler.pool().endpoints().map(|endpoint| endpoint.load.in_flight.moving).sum::<u32>()
                })
            };
            eventually("its blocks are on their way", || moving() == 2).await;
        }
        second.begin_stream().await;
        second.chunk(&event("one")).await;
        client.head().await;
        client.see("one").await;
        if let Some(first) = first.take() {
            first.answer(200, "{}").await;
        }
        end(second, &mut client).await;
        gateway.ledger_is_zero().await;
        assert_eq!(ended(), transfers);
        assert_eq!(gateway.metric(count).await.unwrap_or(0.0), transfers as f64);
    }
    gateway.end_quiet(&[&prefill, &decode]).await;
}

#[tokio::test]
async fn the_breaker_of_a_prefill_worker_opens_and_is_shown() {
    let mut config = in_turn();
    config.breaker.failure_threshold = 1;
    let [prefill, decode] = engines().await;
    let gateway = start(config, &[(&prefill, Role::Prefill), (&decode, Role::Decode)]).await;
    let mut client = gateway.begin(chat("m", "hi")).await;
    prefill.call().await.answer(500, "{}").await;
    decode.answer("{}").await;
    assert_eq!(client.reply().await.status, 200);
    gateway.ledger_is_zero().await;
    let opens = || {
        gateway.pool("m").router.read(|scheduler| {
            scheduler.pool().endpoints().any(|endpoint| endpoint.breaker.state() == breaker::State::Open)
        })
    };
    eventually("a breaker opens", opens).await;
    let fleet = gateway.operate("GET", "/fleet", "").await.json();
    let state = |n: usize| fleet["workers"][n]["endpoints"][0]["breaker"]["state"].clone();
    assert_eq!((state(0), state(1)), (json!("open"), json!("closed")), "{fleet:#}");
    gateway.served(&decode, chat("m", "hi")).await;
    gateway.end_quiet(&[&prefill, &decode]).await;
}
