//! The endpoint picker where answers pass through it: tokens are counted, and load follows the endpoint that serves.

use kvlane_core::disaggregation::Role;
use kvlane_gateway::config::WorkerSpec;
use kvlane_gateway::testing::{
    Context, DataPlane, FakeEngine, GrpcCall, Reaction, TestGateway, chat_stream, config, event, in_turn,
};
use kvlane_wire::disaggregation::Connector;
use kvlane_wire::ext_proc::BodyMode;

const CHAT: &str = "/v1/chat/completions";
const EVENTS: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream")];

fn observed() -> Context {
    Context { modes: Some((BodyMode::FullDuplexStreamed, BodyMode::FullDuplexStreamed)), subset: None }
}

async fn begin(plane: &DataPlane) -> (GrpcCall, Vec<String>) {
    let mut call = plane.begin().await;
    call.head(&observed(), "POST", CHAT, &[], false);
    call.body(chat_stream("m", "hi").as_bytes(), true);
    let addresses = call.outcome().await.addresses();
    (call, addresses)
}

async fn piece(call: &mut GrpcCall, text: &str, is_last: bool) {
    call.response_body(text.as_bytes(), is_last);
    let Some(Reaction::Part(4, changes)) = call.reaction().await else { panic!("an answer to the piece") };
    assert_eq!(changes.piece, Some((text.as_bytes().to_vec(), is_last)), "the piece comes back as it is");
}

#[tokio::test]
async fn an_answer_is_counted_as_it_passes() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.epp.observe_responses = true;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let (mut call, addresses) = begin(&plane).await;
    let load = || {
        picker
            .pool("m")
            .router
            .read(|scheduler| scheduler.pool().endpoints().next().expect("an endpoint").load.in_flight)
    };
    assert_eq!((load().requests, load().prefilling), (1, 1));
    call.response_head(&EVENTS, Some(&addresses[0]));
    let Some(Reaction::Part(2, changes)) = call.reaction().await else { panic!("an answer to the head") };
    assert!(changes.set.iter().any(|(name, _)| name == "x-router-backend"), "{changes:?}");
    piece(&mut call, &event("a"), false).await;
    assert_eq!((load().requests, load().prefilling), (1, 0), "the first token ends the prefill");
    piece(&mut call, &event("b"), false).await;
    let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    piece(&mut call, &format!("{usage}\n\ndata: [DONE]\n\n"), false).await;
    piece(&mut call, "", true).await;
    call.half_close();
    assert_eq!(call.status().await, "0");
    assert_eq!(picker.metric(r#"kvlane_output_tokens_total{model="m"}"#).await, Some(2.0));
    assert_eq!(picker.metric(r#"kvlane_cached_tokens_total{model="m"}"#).await, Some(4.0));
    let answered = r#"kvlane_requests_total{model="m",api="chat_completions",code="200"}"#;
    picker.metric_becomes(answered, 1.0).await;
    plane.close().await;
    picker.end().await;
}

/// Invariant: The load of a request belongs to the endpoint that the data plane says has served it.
#[tokio::test]
async fn the_load_follows_the_endpoint_that_served() {
    let engines = [FakeEngine::start("m").await, FakeEngine::start("m").await];
    let mut config = in_turn();
    config.epp.observe_responses = true;
    let picker = TestGateway::picker(config, &[&engines[0], &engines[1]]).await;
    let plane = picker.data_plane().await;
    let (mut call, addresses) = begin(&plane).await;
    let busy = || {
        let requests = |scheduler: &kvlane_core::scheduler::Scheduler| {
            let busy = |endpoint: &&kvlane_core::endpoint::Endpoint| endpoint.load.in_flight.requests > 0;
            scheduler
                .pool()
                .endpoints()
                .filter(busy)
                .map(|endpoint| endpoint.name.to_string())
                .collect::<Vec<_>>()
        };
        picker.pool("m").router.read(requests)
    };
    assert_eq!(busy(), [format!("http://{}", addresses[0])]);
    call.response_head(&EVENTS, Some(&addresses[1]));
    call.reaction().await.expect("an answer");
    assert_eq!(busy(), [format!("http://{}", addresses[1])]);
    let failed =
        format!(r#"kvlane_worker_failures_total{{worker="http://{}",kind="connect"}}"#, addresses[0]);
    assert_eq!(picker.metric(&failed).await, Some(1.0));
    piece(&mut call, &event("a"), true).await;
    assert!(busy().is_empty());
    plane.close().await;
    picker.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_load_and_is_counted() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.epp.observe_responses = true;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    // The picker must have seen an answer to know that the data plane sends them.
    for part in [1, 2, 0] {
        let (mut call, _) = begin(&plane).await;
        if part > 0 {
            call.response_head(&EVENTS, None);
            call.reaction().await.expect("an answer");
        }
        if part > 1 {
            piece(&mut call, &event("a"), false).await;
        }
        // Envoy closes its side and says nothing.
        call.half_close();
        assert_eq!(call.status().await, "0");
        picker.ledger_is_zero().await;
    }
    let left = r#"kvlane_requests_total{model="m",api="chat_completions",code="499"}"#;
    picker.metric_becomes(left, 3.0).await;
    plane.close().await;
    picker.end().await;
}

#[tokio::test]
async fn an_engine_that_is_busy_or_fails_is_known_by_its_status() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.epp.observe_responses = true;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let (mut call, _) = begin(&plane).await;
    call.response_head(&[(":status", "502"), ("content-type", "application/json")], None);
    call.reaction().await.expect("an answer");
    piece(&mut call, "{}", true).await;
    let failed = format!(r#"kvlane_worker_failures_total{{worker="{}",kind="status"}}"#, engine.url());
    assert_eq!(picker.metric(&failed).await, Some(1.0));
    let (mut call, _) = begin(&plane).await;
    call.response_head(&[(":status", "429")], None);
    call.reaction().await.expect("an answer");
    let busy = format!(r#"kvlane_worker_busy_total{{worker="{}"}}"#, engine.url());
    assert_eq!(picker.metric(&busy).await, Some(1.0));
    drop(call);
    plane.close().await;
    picker.end().await;
}

#[tokio::test]
async fn where_answers_are_not_sent_their_ends_are_estimated() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.epp.observe_responses = true;
    let picker = TestGateway::picker(config, &[&engine]).await;
    let plane = picker.data_plane().await;
    let in_flight = || picker.pool("m").router.read(|scheduler| scheduler.in_flight());
    // Envoy closes its side after the pick, for it will send no answer.
    let (mut call, _) = begin(&plane).await;
    call.half_close();
    assert_eq!(call.status().await, "0");
    assert_eq!(in_flight(), 1);
    // It sends heads of answers, and no bodies.
    let mut call = plane.begin().await;
    let heads_only = Context { modes: Some((BodyMode::FullDuplexStreamed, BodyMode::None)), subset: None };
    call.head(&heads_only, "POST", CHAT, &[], false);
    call.body(chat_stream("m", "hi").as_bytes(), true);
    call.outcome().await.addresses();
    call.response_head(&EVENTS, None);
    assert!(matches!(call.reaction().await, Some(Reaction::Part(2, _))));
    assert_eq!(call.status().await, "0");
    assert_eq!(in_flight(), 2);
    plane.close().await;
    picker.ledger_is_zero().await;
    picker.end().await;
}

#[tokio::test]
async fn an_error_of_a_sidecar_is_blamed_on_no_engine_and_its_first_token_ends_the_prefill() {
    let [prefill, decode] = [FakeEngine::start("m").await, FakeEngine::start("m").await];
    let mut config = in_turn();
    config.epp.observe_responses = true;
    config.breaker.failure_threshold = 1;
    config.disaggregation.connector = Some(Connector::LlmdSidecar);
    let spec = |engine: &FakeEngine, role| WorkerSpec { role, ..WorkerSpec::new(engine.url()) };
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    let picker = TestGateway::picker(config, &[]).await;
    let plane = picker.data_plane().await;
    let loads = || {
        let read = |scheduler: &kvlane_core::scheduler::Scheduler| {
            scheduler.pool().endpoints().map(|one| one.load.in_flight.requests).sum::<u32>()
        };
        picker.pool("m").router.read(read)
    };
    let statuses = ["403", "429", "500", "502", "503"];
    for status in statuses {
        let (mut call, addresses) = begin(&plane).await;
        assert_eq!(loads(), 2, "both are reserved");
        call.response_head(&[(":status", status)], Some(&addresses[0]));
        assert!(matches!(call.reaction().await, Some(Reaction::Part(2, _))));
        piece(&mut call, "", true).await;
        call.half_close();
        assert_eq!(call.status().await, "0");
        picker.ledger_is_zero().await;
    }
    let failed = format!(r#"kvlane_worker_failures_total{{worker="{}",kind="transfer"}}"#, decode.url());
    assert_eq!(picker.metric(&failed).await, Some(statuses.len() as f64));
    let (mut call, addresses) = begin(&plane).await;
    call.response_head(&EVENTS, Some(&addresses[0]));
    assert!(matches!(call.reaction().await, Some(Reaction::Part(2, _))));
    piece(&mut call, &event("a"), false).await;
    assert_eq!(loads(), 1, "the prompt is computed");
    piece(&mut call, "data: [DONE]\n\n", true).await;
    call.half_close();
    assert_eq!(call.status().await, "0");
    plane.close().await;
    picker.end().await;
}
