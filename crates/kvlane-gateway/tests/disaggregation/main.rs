//! Disaggregated serving: one worker computes a prompt, another decodes its answer; what goes wrong before the first byte
//! is not seen by a client.

mod connectors;

use std::time::Duration;

use kvlane_core::cache_accuracy::Feed;
use kvlane_core::disaggregation::Role;
use kvlane_gateway::config::{Config, LimitSpec, WorkerSpec};
use kvlane_gateway::testing::{
    CachingEngine, Call, FakeEngine, FeedEndpoint, TestGateway, Told, batch, caching_config, chat,
    chat_stream, event, eventually, in_turn, soon,
};
use kvlane_wire::disaggregation::Connector;
use serde_json::{Value, json};

/// A prefill worker, a decode worker, and a gateway that splits every request.
struct World {
    prefill: FakeEngine,
    decode: FakeEngine,
    gateway: TestGateway,
}

/// What a prefill engine says of the blocks, with a field that no version of ours knows.
fn params() -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "h", "remote_port": 5600, "tp_size": 1, "later": {"x": [null]}})
}

impl World {
    async fn new() -> Self {
        Self::with(in_turn(), Connector::Nixl).await
    }

    async fn with(mut config: Config, connector: Connector) -> Self {
        let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
        let spec = |engine: &FakeEngine, role| WorkerSpec { role, ..WorkerSpec::new(engine.url()) };
        config.workers.extend([spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)]);
        if connector == Connector::Mooncake {
            let port = prefill.authority().rsplit(':').next().and_then(|port| port.parse().ok());
            config.workers[0].bootstrap_port = port;
        }
        config.disaggregation.connector = Some(connector);
        let gateway = TestGateway::start(config, &[]).await;
        Self { prefill, decode, gateway }
    }

    /// The prefill leg of the next request, which it answers.
    async fn prefilled(&self) {
        let call = self.prefill.call().await;
        call.answer(200, &json!({"choices": [], "kv_transfer_params": params()}).to_string()).await;
    }

    /// The request at the decode worker, which must be the client's, unchanged.
    async fn alone(&self, body: &str) -> Call {
        let call = self.decode.call().await;
        assert_eq!(String::from_utf8_lossy(&call.body), body);
        call
    }

    /// Requests in flight at the prefill and at the decode worker.
    fn in_flight(&self) -> [u32; 2] {
        [&self.prefill, &self.decode].map(|engine| {
            self.gateway.pool("m").router.read(|scheduler| {
                let own = |endpoint: &&kvlane_core::endpoint::Endpoint| *endpoint.name == *engine.url();
                scheduler.pool().endpoints().find(own).expect("an endpoint").load.in_flight.requests
            })
        })
    }

    /// The question to the prefill worker's bootstrap server, which knows these engine ids by rank.
    async fn tells_engine_ids(&self, ids: &[&str]) {
        let call = self.prefill.call().await;
        assert_eq!(call.target(), "GET /query");
        let ranks = ids.iter().enumerate().map(|(rank, id)| (rank.to_string(), json!({"engine_id": id})));
        call.answer(200, &Value::Object(ranks.collect()).to_string()).await;
    }

    /// Both legs of the next request.
    async fn both(&self) -> (Call, Call) {
        tokio::join!(self.prefill.call(), self.decode.call())
    }

    async fn end(self) {
        self.gateway.ledger_is_zero().await;
        self.gateway.end_quiet(&[&self.prefill, &self.decode]).await;
    }
}

fn read(call: &Call) -> Value {
    serde_json::from_slice(&call.body).expect("JSON")
}

/// Invariant: The second leg of a split request is the client's body and what the first leg's engine says of the KV blocks,
/// unknown fields included.
#[tokio::test]
async fn a_split_request_is_computed_by_one_worker_and_decoded_by_the_other() {
    let world = World::new().await;
    for body in [chat("m", "hi"), chat_stream("m", "hi")] {
        let asked: Value = serde_json::from_str(&body).expect("JSON");
        let streams = asked["stream"] == true;
        let mut client = world.gateway.begin(&body).await;
        let call = world.prefill.call().await;
        let first = read(&call);
        assert_eq!((&first["max_tokens"], &first["stream"]), (&json!(1), &json!(false)), "{first}");
        assert_eq!(first["messages"], asked["messages"]);
        assert_eq!(first["kv_transfer_params"]["do_remote_decode"], true);
        assert!(world.decode.call_at_hand().await.is_none(), "it waits for the prompt");
        call.answer(200, &json!({"choices": [], "kv_transfer_params": params()}).to_string()).await;

        let mut call = world.decode.call().await;
        let mut second = read(&call);
        assert_eq!(second["kv_transfer_params"].take(), params());
        second.as_object_mut().expect("an object").remove("kv_transfer_params");
        assert_eq!(second, asked);
        let reply = if streams {
            call.begin_stream().await;
            call.chunk(&event("one")).await;
            call.chunk("data: [DONE]\n\n").await;
            call.end_stream().await;
            client.reply().await
        } else {
            call.answer(200, r#"{"id":"x"}"#).await;
            client.reply().await
        };
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("x-router-backend"), Some(world.decode.url().as_str()));
        assert_eq!(reply.header("x-router-prefill"), Some(world.prefill.url().as_str()));
        let timing = reply.header("server-timing").expect("stages");
        assert!(timing.contains("prefill;dur=") && timing.contains("transfer;dur="), "{timing}");
        world.gateway.ledger_is_zero().await;
    }
    world.end().await;
}

/// Invariant: Of a split request only what the engine that computed the prompt had cached counts as cached; fetched tokens are
/// counted apart.
///
/// vLLM before 0.31 reports all fetched tokens as cached on the engine that decodes, later versions report the count of
/// the other engine, or 0.
#[tokio::test]
async fn fetched_tokens_are_not_counted_as_cached() {
    let world = World::new().await;
    let usage = |cached: u32| json!({"prompt_tokens": 1000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}});
    let mut cached = 0;
    for (streams, had, told) in [(false, 400, 1000), (true, 300, 999), (false, 200, 0)] {
        let body = if streams { chat_stream("m", "hi") } else { chat("m", "hi") };
        let mut client = world.gateway.begin(body).await;
        let said = json!({"usage": usage(had), "kv_transfer_params": params()}).to_string();
        world.prefill.call().await.answer(200, &said).await;
        let mut call = world.decode.call().await;
        if streams {
            call.begin_stream().await;
            call.chunk(&event("one")).await;
            call.chunk(&format!("data: {}\n\n", json!({"choices": [], "usage": usage(told)}))).await;
            call.chunk("data: [DONE]\n\n").await;
            call.end_stream().await;
        } else {
            call.answer(200, &json!({"usage": usage(told)}).to_string()).await;
        }
        let reply = client.reply().await;
        assert_eq!(reply.header("x-router-prefill-cached-tokens"), Some(&*had.to_string()));
        world.gateway.ledger_is_zero().await;
        cached += had;
    }
    let metric = async |name: &str| world.gateway.metric(&format!("{name}{{model=\"m\"}}")).await;
    assert_eq!(metric("kvlane_cached_tokens_total").await, Some(cached.into()));
    assert_eq!(metric("kvlane_input_tokens_total").await, Some(3000.0));
    assert_eq!(metric("kvlane_splits_total").await, Some(3.0));
    assert!(metric("kvlane_transferred_tokens_total").await > Some(0.0));
    let fleet = world.gateway.operate("GET", "/fleet", "").await.json();
    let totals = &fleet["pools"][0]["totals"];
    assert_eq!((&totals["cached_tokens"], &totals["splits"]), (&json!(cached), &json!(3)), "{totals}");
    world.end().await;
}

/// Invariant: A prefill that fails before the first byte of the answer costs the client time only: one worker serves the
/// request.
#[tokio::test]
async fn after_a_failed_prefill_one_worker_serves_the_request() {
    let world = World::new().await;
    for failure in [
        "",
        "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 500 Error\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"choices\":",
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{\"choices\":[]}",
    ] {
        let body = chat("m", &format!("hi {}", failure.len()));
        let mut client = world.gateway.begin(&body).await;
        let mut call = world.prefill.call().await;
        call.send(failure).await;
        drop(call);
        world.alone(&body).await.answer(200, r#"{"id":"x"}"#).await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.header("x-router-prefill")), (200, None), "after {failure:?}");
        world.gateway.ledger_is_zero().await;
    }
    world.end().await;
}

#[tokio::test]
async fn a_mistake_of_the_client_is_answered_by_the_prefill_worker() {
    let world = World::new().await;
    let mut client = world.gateway.begin(chat("m", "hi")).await;
    world.prefill.call().await.answer(400, r#"{"error":{"message":"no"}}"#).await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.text().as_str()), (400, r#"{"error":{"message":"no"}}"#));
    world.end().await;
}

/// Invariant: A transfer that fails or is late before the first token is not seen by the client, and opens no circuit
/// breaker.
///
/// Also held by `a_late_transfer_is_given_up`.
#[tokio::test]
async fn after_a_failed_transfer_one_worker_serves_the_request() {
    let mut config = in_turn();
    config.breaker.failure_threshold = 1;
    let world = World::with(config, Connector::Nixl).await;
    let error = r#"{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}"#;
    for streams in [false, true] {
        let body = if streams { chat_stream("m", "hi") } else { chat("m", "hi") };
        let mut client = world.gateway.begin(&body).await;
        world.prefilled().await;
        let mut call = world.decode.call().await;
        if streams {
            // vLLM's head, role and error, in this order.
            call.begin_stream().await;
            call.chunk(
                "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
            )
            .await;
            call.chunk(&format!("data: {error}\n\ndata: [DONE]\n\n")).await;
            call.end_stream().await;
        } else {
            call.answer(500, error).await;
        }
        world.alone(&body).await.answer(200, r#"{"id":"x"}"#).await;
        assert_eq!(client.reply().await.status, 200);
        world.gateway.ledger_is_zero().await;
    }
    let failed =
        format!(r#"kvlane_worker_failures_total{{worker="{}",kind="transfer"}}"#, world.decode.url());
    assert_eq!(world.gateway.metric(&failed).await, Some(2.0));
    world.end().await;
}

#[tokio::test]
async fn a_late_transfer_is_given_up() {
    let mut config = in_turn();
    config.disaggregation.transfer_timeout = Duration::from_millis(20);
    let world = World::with(config, Connector::Nixl).await;
    let body = chat_stream("m", "hi");
    let mut client = world.gateway.begin(&body).await;
    world.prefilled().await;
    let mut late = world.decode.call().await;
    let call = world.alone(&body).await;
    late.gateway_gone().await;
    call.answer(200, r#"{"id":"x"}"#).await;
    assert_eq!(client.reply().await.status, 200);
    world.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_leg_that_runs() {
    let world = World::new().await;
    let client = world.gateway.begin(chat("m", "hi")).await;
    let mut call = world.prefill.call().await;
    drop(client);
    call.gateway_gone().await;
    world.gateway.ledger_is_zero().await;
    let client = world.gateway.begin(chat("m", "hi")).await;
    world.prefilled().await;
    let mut call = world.decode.call().await;
    drop(client);
    call.gateway_gone().await;
    world.end().await;
}

/// Invariant: What only a gateway may say to an engine about KV transfers never comes from a client.
#[tokio::test]
async fn transfer_parameters_of_a_client_reach_no_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(in_turn(), &[&engine]).await;
    let mut asked: Value = serde_json::from_str(&chat("m", "hi")).expect("JSON");
    let wanted = asked.clone();
    asked["kv_transfer_params"] = json!({"do_remote_prefill": true, "remote_block_ids": null});
    asked["bootstrap_host"] = json!("10.0.0.1");
    let mut client = gateway.begin(asked.to_string()).await;
    let call = engine.call().await;
    assert_eq!(read(&call), wanted);
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn a_completion_of_several_prompts_is_not_split() {
    let world = World::new().await;
    let body = r#"{"model":"m","prompt":["a","b"]}"#;
    let (reply, ()) = tokio::join!(world.gateway.ask("POST", "/v1/completions", body), async {
        world.alone(body).await.answer(200, r#"{"id":"x"}"#).await;
    });
    assert_eq!((reply.status, reply.header("x-router-prefill")), (200, None));
    world.end().await;
}

/// Invariant: A decode side that is missing, or whose load is unknown, is reported by `/readiness` and `/metrics`.
///
/// vllm-project/router falls back to random placement without a word when it knows nothing of its workers.
#[tokio::test]
async fn a_decode_side_that_is_missing_or_unknown_is_reported() {
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(1);
    let world = World::with(config, Connector::Nixl).await;
    let side = async || {
        world.gateway.operate("GET", "/readiness", "").await.json()["pools"][0]["disaggregation"].take()
    };
    let metric = async |load: &str| {
        world.gateway.metric(&format!("kvlane_decode_endpoints{{model=\"m\",load=\"{load}\"}}")).await
    };
    let until = async |problem: Option<&str>| {
        let told = async {
            loop {
                let told = side().await;
                if told["problem"].as_str().map(|told| told.split(':').next().unwrap_or_default()) == problem
                {
                    return told;
                }
            }
        };
        soon("the state", told).await
    };
    let told = until(Some("the load of decode workers is unknown")).await;
    assert_eq!((&told["prefill"], &told["decode"]), (&json!(1), &json!(1)));
    assert_eq!(told["load_unknown"], json!([world.decode.url()]));
    assert_eq!((metric("known").await, metric("unknown").await), (Some(0.0), Some(1.0)));

    let idle = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n";
    world.decode.set_metrics(idle);
    until(None).await;
    assert_eq!((metric("known").await, metric("unknown").await), (Some(1.0), Some(0.0)));

    world.decode.refuse();
    let told = until(Some("no worker decodes what prefill workers compute")).await;
    assert!(told["problem"].as_str().is_some_and(|problem| problem.contains("whole requests")), "{told}");
    assert_eq!((metric("known").await, metric("unknown").await), (Some(0.0), Some(0.0)));
    assert_eq!(world.gateway.operate("GET", "/readiness", "").await.status, 200, "it serves requests");
    world.gateway.end().await;
}

#[tokio::test]
async fn a_gateway_whose_engines_cannot_serve_alone_is_not_ready_without_a_pair() {
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(1);
    let world = World::with(config, Connector::Sglang).await;
    assert_eq!(world.gateway.operate("GET", "/readiness", "").await.status, 200);
    world.decode.refuse();
    let refused = async { while world.gateway.operate("GET", "/readiness", "").await.status != 503 {} };
    soon("the verdict", refused).await;
    let told = world.gateway.operate("GET", "/readiness", "").await.json();
    let problem = told["pools"][0]["disaggregation"]["problem"].as_str().expect("a problem");
    assert!(problem.contains("requests are rejected"), "{told}");
    world.gateway.end().await;
}

/// Invariant: A client is not charged for a split request that both engines fail.
#[tokio::test]
async fn a_split_request_that_no_engine_answers_uses_nothing_of_a_limit() {
    let mut config = in_turn();
    config.limits = vec![LimitSpec { requests_per_minute: 1, ..LimitSpec::default() }];
    config.retry.max_total_retries = 0;
    let world = World::with(config, Connector::Nixl).await;
    let mut client = world.gateway.begin(chat("m", "hi")).await;
    world.prefill.call().await.reset();
    assert_eq!(client.reply().await.status, 502);
    world.gateway.ledger_is_zero().await;
    let mut client = world.gateway.begin(chat("m", "hi")).await;
    world.prefilled().await;
    world.decode.call().await.answer(200, r#"{"id":"x"}"#).await;
    assert_eq!(client.reply().await.status, 200);
    world.end().await;
}

/// The tokens that a decode engine reports as cached are not its own: vLLM relays those of the prefill engine. So they
/// do not tell whether its feed owes an event; those of the prefill engine do.
#[tokio::test]
async fn a_feed_of_a_decode_engine_owes_no_event_for_blocks_that_it_had() {
    let (prefill, decode) = (CachingEngine::start().await, CachingEngine::start().await);
    let mut config = caching_config();
    config.kv_events.silent_after = Duration::from_millis(1);
    config.disaggregation.connector = Some(Connector::Nixl);
    let spec = |engine: &CachingEngine, role| WorkerSpec { role, ..engine.spec(vec![engine.feed.spec()]) };
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let gateway = TestGateway::start(config, &[]).await;
    let [first, second] = [&prefill, &decode].map(|engine| FeedEndpoint::of(&gateway, &engine.http.url(), 0));
    eventually("both are live", || [&first, &second].iter().all(|feed| feed.seen().state == Feed::Live))
        .await;
    let usage = json!({"prompt_tokens": 1000, "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0}});
    let mut client = gateway.begin(chat("m", "hi")).await;
    let said = json!({"usage": usage, "kv_transfer_params": params()}).to_string();
    prefill.http.call().await.answer(200, &said).await;
    decode.http.call().await.answer(200, &json!({"usage": usage}).to_string()).await;
    assert_eq!(client.reply().await.status, 200);
    gateway.ledger_is_zero().await;
    eventually("the prefill engine owes one", || first.seen().state == Feed::Syncing).await;
    assert_eq!((first.seen().silences, second.seen().silences), (1, 0));
    prefill.feed.publish(batch(None, &[] as &[Told<'_>]));
    eventually("it has sent a message", || first.seen().state == Feed::Live).await;
    assert_eq!((second.seen().state, second.seen().silences), (Feed::Live, 0));
    gateway.end().await;
}
