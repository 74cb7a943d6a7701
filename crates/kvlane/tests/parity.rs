//! The gateway, the endpoint picker and the simulator place the same requests on the same endpoints, for the same reasons.
//!
//! All three call one router. What is compared is all around it: how prompts become blocks and tokens, what the router is told
//! and when. A trace goes through a live gateway, through a
//! live picker, and through a world; then what each decision saw (overlap, requests,
//! tokens in flight, of every endpoint, and how long its answer will be) and what it picked has to be the same, line by
//! line.
//!
//! Time is the one thing that cannot be the same. So it stands still in the gateway, and in the world so little of it
//! passes that no digit shown depends on it: nothing decays then, and no time to a first token is one that teaches. How
//! fast tokens come is learned from answers of three and more, so these are shorter.

use std::net::{Ipv4Addr, TcpListener};
use std::pin::pin;
use std::time::Duration;

use kvlane_core::decision::Receipt;
use kvlane_core::load::LoadReport;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::router;
use kvlane_core::scheduler::{Input, Scheduler};
use kvlane_core::time::Nanos;
use kvlane_core::timing::{Host, TimingModel};
use kvlane_fleet::timings::Timings;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::testing::{
    Client, Context, DataPlane, FakeEngine, GrpcCall, Reply, TestGateway, config, next_call, soon,
};
use kvlane_lab::prompt;
use kvlane_mock::{MockConfig, MockEngine};
use kvlane_sim::fault::Fault;
use kvlane_sim::rules::{Probes, Rules};
use kvlane_sim::{Drive, EngineConfig, GatewaysConfig, Hints, Outcome, Plan, Send, World, WorldConfig};
use kvlane_trace::generate::{Arrivals, Workload, generate};
use kvlane_trace::trace::Trace;
use kvlane_wire::ext_proc::BodyMode;

const ENGINES: usize = 3;
const BLOCK_TOKENS: u32 = 16;
const SEED: u64 = 7;
const MODEL: &str = "m";
const COMPLETIONS: &str = "/v1/completions";
const PRESET: &str = "qwen2.5-7b@a100";

/// Conversations that begin alike, in the order in which one client has them.
fn trace(conversations: u32) -> Trace {
    let mut workload = Workload::by_kind("chat").expect("a kind");
    workload.set_arrivals(Arrivals::Closed { count: conversations });
    let mut trace = generate(&workload, SEED).expect("a workload");
    for request in &mut trace.requests {
        request.output_tokens = 1 + request.output_tokens % 2;
        request.think_s = request.think_s.map(|_| 0.0);
    }
    let plan = Plan::new(&trace);
    let conversation = |root: &u32| {
        let root = *root;
        let plan = &plan;
        (0..trace.requests.len() as u32).filter(move |&request| plan.root[request as usize] == root)
    };
    trace.select(plan.roots.iter().flat_map(conversation).collect::<Vec<_>>())
}

/// Policies but for those that hash prompts: the world's have numbers for text.
fn policies() -> impl Iterator<Item = &'static str> {
    PolicyConfig::NAMES.iter().copied().filter(|name| !["consistent_hash", "prefix_hash"].contains(name))
}

/// The preset's machine, so fast that a run takes no time to speak of.
fn timing() -> TimingModel {
    let mut timing = TimingModel::preset(PRESET).expect("in the tables");
    let hardware = &mut timing.hardware;
    for rate in
        [&mut hardware.peak_flops, &mut hardware.memory_bytes_per_s, &mut hardware.all_reduce_bytes_per_s]
    {
        *rate *= 1e6;
    }
    for secs in [&mut hardware.all_reduce_secs, &mut hardware.layer_secs, &mut hardware.moe_layer_secs] {
        *secs = 0.0;
    }
    timing.host = Host { step_secs: 0.0, sequence_secs: 0.0, request_secs: 0.0 };
    timing
}

fn policy(name: &str) -> PolicyConfig {
    PolicyConfig::by_name(name).expect("a policy")
}

/// A gateway as `kvlane serve` has it, whose blocks are those of the world.
fn gateway_config(name: &str, requests: usize) -> Config {
    let mut config = config();
    config.routing.policy = policy(name);
    config.routing.block_bytes = BLOCK_TOKENS * prompt::BYTES_PER_TOKEN as u32;
    config.routing.receipts = requests as u32;
    config.routing.seed = SEED;
    config
}

/// A world whose router and rules are made from the gateway's configuration.
fn world(config: &Config, engines: usize, faults: Vec<Fault>, timing: TimingModel) -> World {
    let settings = config.fleet_settings(Timings::default());
    World::new(WorldConfig {
        engines: vec![EngineConfig::vllm(timing, BLOCK_TOKENS, 0.9); engines],
        // The engines publish no KV events.
        router: router::Config { exact: None, ..settings.router(MODEL) },
        parts: Vec::new(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: None,
        link: Default::default(),
        routing_delay: Nanos(1),
        reports: None,
        events: Default::default(),
        faults,
        health_delay: Nanos::ZERO,
        attempts_max: 1 + config.retry.max_total_retries as u8,
        rules: Some(Rules {
            first_token: config.timeouts.first_byte_timeout.into(),
            transfer: config.disaggregation.transfer_timeout.into(),
            between_tokens: config.server.stream_idle_timeout.into(),
            backoff: config.retry.backoff(),
            probes: Probes {
                interval: config.health.interval.into(),
                timeout: config.health.timeout.into(),
                thresholds: config.health.thresholds(),
            },
        }),
        reloaded: None,
        hints: Hints::default(),
        client_timeout: None,
        seed: SEED,
        stopwatch: None,
    })
}

/// Engines say how loaded they are before the first request, as mock engines do when the gateway asks after their health.
fn report_idle(world: &World, engines: &[usize]) {
    let engine = EngineConfig::vllm(timing(), BLOCK_TOKENS, 0.9);
    let kv_capacity_tokens = Some(u64::from(engine.blocks) * u64::from(BLOCK_TOKENS));
    let reported = LoadReport { running: 0, waiting: 0, kv_usage_ratio: 0.0, kv_capacity_tokens };
    let endpoints: Vec<_> =
        world.router().read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.id).collect());
    for &engine in engines {
        let endpoint = endpoints[engine];
        world.router().step(Nanos::ZERO, Input::Reported { endpoint, reported }, &mut Vec::new());
    }
}

/// What a world decides about a trace, and which requests succeed.
fn simulated(mut world: World, trace: &Trace, drive: Drive) -> (Vec<String>, Vec<bool>) {
    let plan = Plan::new(trace);
    let requests = 0..trace.requests.len() as u32;
    let run = world.run(&Send { trace, plan: &plan, requests, origin_s: 0.0, drive }, |_| {});
    (world.router().read(decisions), run.outcomes.iter().map(Outcome::is_ok).collect())
}

/// One line for each decision, in order: all but when it was, and how the request is called.
fn decisions(scheduler: &Scheduler) -> Vec<String> {
    let line = |receipt: &Receipt| {
        let Receipt { attempt, prompt_tokens, output_tokens, session, placement, rows, .. } = receipt;
        let place = (placement.endpoint.slot(), placement.overlap_tokens, placement.reason);
        let rows: Vec<_> = rows
            .iter()
            .map(|row| {
                let load = (row.requests, row.prefill_tokens, row.context_tokens);
                (row.endpoint.slot(), row.overlap_tokens, load, format!("{:.5e}", row.cost))
            })
            .collect();
        format!(
            "attempt {attempt}, {prompt_tokens} tokens, {output_tokens} to come, of {session:?}: {place:?} of {rows:?}"
        )
    };
    scheduler.receipts().iter().map(line).collect()
}

/// The decisions that a gateway has made.
fn made(gateway: &TestGateway) -> Vec<String> {
    gateway.fleet().pools()[0].router.read(decisions)
}

/// The session and the body of a request.
fn session_and_body(trace: &Trace, request: u32, stream: bool) -> (String, String) {
    let mut text = Vec::new();
    prompt::append(&mut text, SEED, trace, request);
    let text = String::from_utf8(text).expect("words");
    let options = serde_json::json!({"include_usage": true});
    let body =
        serde_json::json!({"model": MODEL, "prompt": text, "stream": stream, "stream_options": options});
    (Plan::new(trace).root[request as usize].to_string(), body.to_string())
}

/// A request as its client sends it. How long its answer is, only the mock engine is told.
fn request(trace: &Trace, request: u32, stream: bool) -> String {
    let (session, body) = session_and_body(trace, request, stream);
    let output_tokens = trace.requests[request as usize].output_tokens;
    let fields = format!("x-session-id: {session}\r\nx-mock-output-tokens: {output_tokens}\r\n");
    Client::request_bytes("POST", COMPLETIONS, &fields, &body)
}

/// What Envoy says where answers pass through the picker.
fn observed() -> Context {
    let duplex = BodyMode::FullDuplexStreamed;
    Context { modes: Some((duplex, duplex)), subset: None }
}

/// A request that a data plane has sent to the picker, and the address that it got.
async fn picked(plane: &DataPlane, trace: &Trace, request: u32, stream: bool) -> (GrpcCall, String) {
    let (session, body) = session_and_body(trace, request, stream);
    let mut call = plane.begin().await;
    call.head(&observed(), "POST", COMPLETIONS, &[("x-session-id", &session)], false);
    call.body(body.as_bytes(), true);
    let address = call.outcome().await.addresses().swap_remove(0);
    (call, address)
}

/// Sends a request as a data plane does: where the picker says, and its answer through the picker.
async fn sent_by_data_plane(plane: &DataPlane, trace: &Trace, n: u32, stream: bool) {
    let (mut call, address) = picked(plane, trace, n, stream).await;
    let mut engine = Client::connect(address.parse().expect("an address")).await;
    engine.send(request(trace, n, stream)).await;
    let reply = engine.reply().await;
    let kind = reply.header("content-type").expect("a type");
    call.response_head(&[(":status", &reply.status.to_string()), ("content-type", kind)], Some(&address));
    call.response_body(reply.text().as_bytes(), true);
    for _ in 0..2 {
        call.reaction().await.expect("an answer");
    }
    call.half_close();
    assert_eq!(call.status().await, "0");
}

#[track_caller]
fn assert_same(what: &str, live: &[String], simulated: &[String]) {
    for (n, (live, simulated)) in live.iter().zip(simulated).enumerate() {
        assert_eq!(live, simulated, "{what}: decision {n}");
    }
    assert_eq!(live.len(), simulated.len(), "{what}");
}

/// Decisions for an endpoint.
fn count_on(decisions: &[String], slot: usize) -> usize {
    decisions.iter().filter(|line| line.contains(&format!(": ({slot},"))).count()
}

/// A mock engine on a free port.
fn mock() -> MockEngine {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.set_nonblocking(true).expect("a socket option");
    let config =
        MockConfig { model: MODEL.into(), preset: PRESET.into(), speed: 1000.0, ..MockConfig::default() };
    MockEngine::start(config, tokio::net::TcpListener::from_std(listener).expect("on a runtime"))
        .expect("it starts")
}

fn worker(engine: &MockEngine) -> WorkerSpec {
    WorkerSpec::new(format!("http://{}", engine.addr()))
}

/// Several endpoints were picked: a comparison of one with itself would say little.
#[track_caller]
fn assert_spread(what: &str, decisions: &[String]) {
    let most = (0..ENGINES).map(|slot| count_on(decisions, slot)).max().unwrap_or(0);
    assert!(0 < most && most < decisions.len(), "{what}: all of {} on one endpoint", decisions.len());
}

/// Invariant: Gateway, picker and simulator make the same decisions for the same reasons, with every policy.
///
/// Also held by `a_burst_without_answers_is_placed_as_in_the_simulator`,
/// `requests_that_endpoints_fail_are_tried_elsewhere_as_in_the_simulator`.
#[tokio::test]
async fn one_after_the_other_requests_go_to_the_same_mock_engines_as_in_the_simulator() {
    let trace = trace(6);
    assert!(trace.requests.iter().any(|request| request.base.is_some()));
    let engines: Vec<MockEngine> = (0..ENGINES).map(|_| mock()).collect();
    for name in policies() {
        let mut config = gateway_config(name, trace.requests.len());
        config.workers = engines.iter().map(worker).collect();
        let world = world(&config, ENGINES, Vec::new(), timing());
        report_idle(&world, &[0, 1, 2]);
        let gateway = TestGateway::start_at_speed(config, &[], 0.0).await;
        let mut client = Client::connect(gateway.address()).await;
        for n in 0..trace.requests.len() as u32 {
            client.send(request(&trace, n, n % 2 == 0)).await;
            let reply = client.reply().await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            // The client may see the end before the scheduler does.
            gateway.ledger_is_zero().await;
        }
        let live = made(&gateway);
        assert_eq!(live.len(), trace.requests.len());
        assert_spread(name, &live);
        let (simulated, ok) = simulated(world, &trace, Drive::Closed { clients: 1 });
        assert!(ok.iter().all(|&ok| ok));
        assert_same(name, &live, &simulated);
        drop(client);
        gateway.end().await;
        let mut config = gateway_config(name, trace.requests.len());
        config.workers = engines.iter().map(worker).collect();
        config.epp.observe_responses = true;
        let picker = TestGateway::picker_at_speed(config, &[], 0.0).await;
        let plane = picker.data_plane().await;
        for n in 0..trace.requests.len() as u32 {
            sent_by_data_plane(&plane, &trace, n, n % 2 == 0).await;
            picker.ledger_is_zero().await;
        }
        assert_same(&format!("{name}, by the picker"), &made(&picker), &simulated);
        plane.close().await;
        picker.end().await;
    }
    for engine in engines {
        soon("the engine ends", engine.shutdown()).await;
    }
}

#[tokio::test]
async fn a_burst_without_answers_is_placed_as_in_the_simulator() {
    let mut trace = trace(6);
    for (n, request) in trace.requests.iter_mut().enumerate() {
        (request.after, request.think_s) = (None, None);
        // All within a microsecond: no engine has ended a step.
        request.arrival_s = n as f64 * 1e-9;
    }
    assert!(trace.span_s() < 1e-6);
    let slow = TimingModel::preset(PRESET).expect("in the tables");
    for name in policies() {
        let mut engines = Vec::new();
        for _ in 0..ENGINES {
            engines.push(FakeEngine::start(MODEL).await);
        }
        let config = gateway_config(name, trace.requests.len());
        let world = world(&config, ENGINES, Vec::new(), slow.clone());
        let gateway = TestGateway::start_at_speed(config, &engines.iter().collect::<Vec<_>>(), 0.0).await;
        let (mut clients, mut calls) = (Vec::new(), Vec::new());
        for n in 0..trace.requests.len() as u32 {
            let mut client = Client::connect(gateway.address()).await;
            client.send(request(&trace, n, true)).await;
            clients.push(client);
            // At its engine, a prompt is also in the index; the decision alone is known a moment before.
            calls.push(next_call(&engines.iter().collect::<Vec<_>>()).await);
        }
        let live = made(&gateway);
        assert_spread(name, &live);
        assert_same(name, &live, &simulated(world, &trace, Drive::Open { load: 1.0 }).0);
        // Clients that leave end their requests.
        drop((clients, calls));
        gateway.end().await;
        let mut config = gateway_config(name, trace.requests.len());
        config.epp.observe_responses = true;
        let picker = TestGateway::picker_at_speed(config, &engines.iter().collect::<Vec<_>>(), 0.0).await;
        let plane = picker.data_plane().await;
        let mut calls = Vec::new();
        for n in 0..trace.requests.len() as u32 {
            calls.push(picked(&plane, &trace, n, true).await);
        }
        assert_same(&format!("{name}, by the picker"), &made(&picker), &live);
        calls.into_iter().for_each(|(call, _)| call.reset());
        plane.close().await;
        picker.end().await;
    }
}

/// The reply to a client's request, while `broken` answers requests with 502, and `busy` with 503.
async fn reply(client: &mut Client, broken: &FakeEngine, busy: &FakeEngine) -> Reply {
    let (mut reply, engines) = (pin!(client.reply()), [broken, busy]);
    loop {
        tokio::select! {
            reply = &mut reply => return reply,
            (engine, call) = next_call(&engines) => call.answer([502, 503][engine], "{}").await,
        }
    }
}

/// Retries, their budget, circuit breakers and busy endpoints. A retry follows at once: time stands still.
#[tokio::test]
async fn requests_that_endpoints_fail_are_tried_elsewhere_as_in_the_simulator() {
    let trace = trace(6);
    let engines = [mock(), mock(), mock()];
    let (broken, busy) = (FakeEngine::start(MODEL).await, FakeEngine::start(MODEL).await);
    // After the first probe, which is at zero.
    let at = Nanos(1);
    let (mut retried, mut failed) = (0, 0);
    for name in policies() {
        let mut config = gateway_config(name, 3 * trace.requests.len());
        config.retry.initial_backoff = Duration::ZERO;
        config.workers = engines.iter().map(worker).collect();
        let breaker = config.breaker.clone();
        let gateway = TestGateway::start_at_speed(config.clone(), &[&broken, &busy], 0.0).await;
        // Workers join as their first probes are answered.
        let slots: Vec<String> = gateway.fleet().pools()[0].router.read(|scheduler| {
            scheduler.pool().endpoints().map(|endpoint| endpoint.name.to_string()).collect()
        });
        let slot =
            |engine: &FakeEngine| slots.iter().position(|name| *name == engine.url()).expect("it joined");
        let (broken_slot, busy_slot) = (slot(&broken), slot(&busy));
        let faults = vec![
            Fault::Death { at, endpoint: broken_slot, back_at: None },
            Fault::Busy { at, endpoint: busy_slot, retry_after: None, until: None },
        ];
        let world = world(&config, slots.len(), faults, timing());
        let others = (0..slots.len()).filter(|slot| ![broken_slot, busy_slot].contains(slot));
        report_idle(&world, &others.collect::<Vec<_>>());
        let mut client = Client::connect(gateway.address()).await;
        let mut live_ok = Vec::new();
        for n in 0..trace.requests.len() as u32 {
            client.send(request(&trace, n, n % 2 == 0)).await;
            live_ok.push(reply(&mut client, &broken, &busy).await.status == 200);
            gateway.ledger_is_zero().await;
        }
        let live = made(&gateway);
        let (simulated, ok) = simulated(world, &trace, Drive::Closed { clients: 1 });
        assert_same(name, &live, &simulated);
        assert_eq!(live_ok, ok, "{name}: requests that succeed");
        retried += live.iter().filter(|line| !line.starts_with("attempt 0")).count();
        let failures = count_on(&live, broken_slot);
        assert!(
            failures <= breaker.failure_threshold as usize,
            "{name}: the breaker is open after {failures}"
        );
        failed += failures;
        drop(client);
        gateway.end().await;
    }
    assert!(retried > 50 && failed > 20, "{retried} retries, {failed} failures at the broken endpoint");
    for engine in engines {
        soon("the engine ends", engine.shutdown()).await;
    }
}
