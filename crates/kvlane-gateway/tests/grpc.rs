//! vLLM's gRPC service: calls are placed by their token ids and relayed to engines with `grpc://` addresses.

use bytes::Bytes;
use kvlane_gateway::config::{Config, FeedSpec, LimitSpec, WorkerSpec};
use kvlane_gateway::testing::{
    Client, DataPlane, FakeEngine, GrpcCall, GrpcEngine, TestGateway, chat, config, eventually, in_turn, key,
    next_grpc_call,
};
use kvlane_proxy::auth::Role;
use kvlane_wire::engine::calls::{ABORT_PATH, MODEL_PATH};
use kvlane_wire::grpc::{Status, frame};
use kvlane_wire::protobuf::{Message, bytes_of, number_of};

const GENERATE: &str = "/vllm.grpc.engine.VllmEngine/Generate";

/// Four tokens to a block.
const BLOCK: usize = 4;

async fn start(mut config: Config, engines: &[&GrpcEngine]) -> TestGateway {
    config.workers.extend(engines.iter().map(|engine| WorkerSpec::new(engine.url())));
    TestGateway::start(config, &[]).await
}

async fn client(gateway: &TestGateway) -> DataPlane {
    DataPlane::connect(gateway.address()).await
}

/// A request for a stream, with a prompt of these tokens, each below 128.
fn write(message: &mut Message, ids: &[u8]) {
    message.bytes(1, b"request-1");
    message.message(2, |tokenized| tokenized.bytes(2, ids));
    message.message(4, |sampling| sampling.number(8, 16));
    message.number(5, 1);
}

/// A call that has been sent.
async fn begin(client: &DataPlane, ids: &[u8]) -> GrpcCall {
    begin_with(client, &[], ids).await
}

async fn begin_with(client: &DataPlane, metadata: &[(&str, &str)], ids: &[u8]) -> GrpcCall {
    let mut call = client.call_with(GENERATE, metadata).await;
    call.send(|message| write(message, ids));
    call.half_close();
    call
}

/// How a call ends that gets no message.
async fn ending(mut call: GrpcCall) -> (String, String) {
    assert_eq!(call.message().await, None);
    let status = call.status().await;
    (status, call.field("grpc-message").unwrap_or_default().to_owned())
}

/// A prompt of so many blocks, which begins with this token.
fn prompt(first: u8, blocks: usize) -> Vec<u8> {
    (0..blocks * BLOCK).map(|n| if n == 0 { first } else { (n % 100) as u8 }).collect()
}

#[tokio::test]
async fn messages_and_trailers_pass_unchanged_and_their_tokens_are_counted() {
    let engine = GrpcEngine::start("g").await;
    let gateway = start(config(), &[&engine]).await;
    let client = client(&gateway).await;
    let ids = prompt(1, 3);
    let mut call = begin_with(&client, &[("x-mine", "kept"), ("grpc-accept-encoding", "gzip")], &ids).await;
    let mut at_engine = engine.call().await;
    let mut sent = Message::default();
    write(&mut sent, &ids);
    assert_eq!(at_engine.message, sent.0);
    assert_eq!((at_engine.path.as_str(), at_engine.field("te")), (GENERATE, Some("trailers")));
    assert_eq!((at_engine.field("x-mine"), at_engine.field("grpc-accept-encoding")), (Some("kept"), None));
    let load = || {
        gateway.pool("g").router.read(|scheduler| {
            scheduler.pool().endpoints().map(|endpoint| endpoint.load.in_flight).next().expect("one")
        })
    };
    assert_eq!((load().requests, load().prefilling, load().context_tokens), (1, 1, 12));
    at_engine.chunk(&[7, 8]);
    let first = call.message().await.expect("a message");
    assert_eq!(bytes_of(&first, 1).and_then(|chunk| bytes_of(chunk, 1)), Some(&[7, 8][..]));
    assert_eq!(load().prefilling, 0, "the first token has come");
    at_engine.chunk(&[9]);
    at_engine.complete(12, 3, 8);
    at_engine.end(Status::Ok, "");
    call.message().await.expect("the second chunk");
    let last = call.message().await.expect("the last message");
    assert_eq!(bytes_of(&last, 2).and_then(|complete| number_of(complete, 5)), Some(8));
    assert_eq!(call.status().await, "0");
    assert_eq!(call.field("x-router-backend"), Some(engine.url().as_str()));
    gateway.ledger_is_zero().await;
    for (sample, value) in [
        ("kvlane_output_tokens_total{model=\"g\"}", 3.0),
        ("kvlane_requests_total{model=\"g\",api=\"grpc_generate\",code=\"200\"}", 1.0),
    ] {
        gateway.metric_becomes(sample, value).await;
    }
    drop(client);
    gateway.end().await;
}

/// Invariant: A gRPC call is placed by its exact token ids.
#[tokio::test]
async fn a_prompt_goes_to_the_engine_that_has_its_prefix() {
    let (a, b) = (GrpcEngine::start("g").await, GrpcEngine::start("g").await);
    let engines = [&a, &b];
    let gateway = start(config(), &engines).await;
    let client = client(&gateway).await;
    let mut home = std::collections::BTreeMap::new();
    for turn in 1..4 {
        for first in 1..5 {
            let mut call = begin(&client, &prompt(first, 4 * turn)).await;
            let (at, mut at_engine) = next_grpc_call(&engines).await;
            at_engine.chunk(&[7]);
            at_engine.complete(16, 1, 0);
            at_engine.end(Status::Ok, "");
            assert_eq!(call.status().await, "0");
            gateway.ledger_is_zero().await;
            assert_eq!(*home.entry(first).or_insert(at), at, "conversation {first}, turn {turn}");
            let overlap = gateway.decisions().await[0]["overlap_tokens"].clone();
            assert_eq!(overlap, 4 * (turn - 1) * BLOCK, "conversation {first}, turn {turn}");
        }
    }
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_call_that_its_client_gives_up_is_given_up_at_the_engine() {
    let engine = GrpcEngine::start("g").await;
    let gateway = start(config(), &[&engine]).await;
    let client = client(&gateway).await;
    for begins in [false, true] {
        let mut call = begin(&client, &prompt(1, 2)).await;
        let mut at_engine = engine.call().await;
        if begins {
            at_engine.chunk(&[7]);
            call.message().await.expect("a message");
        }
        call.reset();
        at_engine.given_up().await;
        gateway.ledger_is_zero().await;
    }
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_call_whose_engine_dies_before_the_first_message_is_answered_by_another() {
    let (a, b) = (GrpcEngine::start("g").await, GrpcEngine::start("g").await);
    let engines = [&a, &b];
    let gateway = start(in_turn(), &engines).await;
    let client = client(&gateway).await;
    let mut call = begin(&client, &prompt(1, 2)).await;
    let (first, _call) = next_grpc_call(&engines).await;
    engines[first].kill();
    let mut at_engine = engines[1 - first].call().await;
    at_engine.chunk(&[7]);
    at_engine.complete(8, 1, 0);
    at_engine.end(Status::Ok, "");
    assert_eq!(call.status().await, "0");
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_call_whose_engine_dies_after_the_first_message_ends_as_unavailable() {
    let engine = GrpcEngine::start("g").await;
    let gateway = start(config(), &[&engine]).await;
    let client = client(&gateway).await;
    let mut call = begin(&client, &prompt(1, 2)).await;
    let mut at_engine = engine.call().await;
    at_engine.chunk(&[7]);
    call.message().await.expect("a message");
    engine.kill();
    let (status, said) = ending(call).await;
    assert_eq!(status, "14");
    assert!(said.starts_with("the answer is incomplete"), "{said}");
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_is_busy_or_failed_is_left_for_another_and_a_clients_error_is_not() {
    let (a, b) = (GrpcEngine::start("g").await, GrpcEngine::start("g").await);
    let engines = [&a, &b];
    let gateway = start(in_turn(), &engines).await;
    let client = client(&gateway).await;
    for status in [Status::ResourceExhausted, Status::Unavailable, Status::Internal] {
        let mut call = begin(&client, &prompt(1, 2)).await;
        let (first, mut at_engine) = next_grpc_call(&engines).await;
        at_engine.end(status, "not now");
        let mut at_engine = engines[1 - first].call().await;
        at_engine.chunk(&[7]);
        at_engine.end(Status::Ok, "");
        assert_eq!(call.status().await, "0", "{status:?}");
    }
    for begins in [false, true] {
        let call = begin(&client, &prompt(1, 2)).await;
        let (_, mut at_engine) = next_grpc_call(&engines).await;
        if begins {
            at_engine.send_raw(Bytes::new());
        }
        at_engine.end(Status::InvalidArgument, "max_tokens is 0 %");
        assert_eq!(ending(call).await, ("3".into(), "max_tokens is 0 %25".into()));
    }
    gateway
        .metric_becomes("kvlane_requests_total{model=\"g\",api=\"grpc_generate\",code=\"400\"}", 2.0)
        .await;
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_call_that_cannot_be_placed_ends_with_a_status_and_a_reason() {
    let engine = GrpcEngine::start("g").await;
    let mut config = config();
    config.auth.keys = vec![key("ann", Role::User)];
    config.limits = vec![LimitSpec { key: "ann".into(), requests_per_minute: 1, ..LimitSpec::default() }];
    config.workers = vec![WorkerSpec::new(engine.url())];
    // Its clock stands still, so no allowance is refilled.
    let gateway = TestGateway::start_at_speed(config, &[], 0.0).await;
    let client = client(&gateway).await;
    let ann = ("authorization", "Bearer k-ann");
    let refused = async |metadata: &[(&str, &str)], bytes: Vec<u8>| {
        let mut call = client.call_with(GENERATE, metadata).await;
        call.send_raw(bytes);
        call.half_close();
        ending(call).await
    };
    let body = |write: &dyn Fn(&mut Message)| {
        let mut body = Vec::new();
        frame(&mut body, |message| write(message));
        body
    };
    let good = body(&|message| write(message, &prompt(1, 2)));
    let (status, said) = refused(&[], good.clone()).await;
    assert!(status == "16" && said.contains("key"), "{status} {said}");
    let (status, said) = refused(&[ann, ("x-kvlane-model", "other")], good.clone()).await;
    assert!(status == "5" && said.contains("`other` does not exist"), "{status} {said}");
    for bad in [b"no frame".to_vec(), body(&|_| {}), body(&|message| message.0.push(0xff)), Vec::new()] {
        let (status, said) = refused(&[ann], bad.clone()).await;
        assert!(status == "3" && !said.is_empty(), "{bad:?}: {status} {said}");
    }
    let mut call = begin_with(&client, &[ann], &prompt(1, 2)).await;
    engine.call().await.end(Status::Ok, "");
    assert_eq!(call.status().await, "0");
    let (status, said) = refused(&[ann], good.clone()).await;
    assert!(status == "8" && said.contains("requests per minute"), "{status} {said}");
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_model_is_served_in_one_protocol() {
    let (http, grpc) = (FakeEngine::start("m").await, GrpcEngine::start("g").await);
    let mut config = config();
    config.workers = vec![WorkerSpec::new(grpc.url())];
    let gateway = TestGateway::start(config, &[&http]).await;
    let client = client(&gateway).await;
    let mut call = begin(&client, &prompt(1, 2)).await;
    grpc.call().await.end(Status::Ok, "");
    assert_eq!(call.status().await, "0", "it names no model: only one is served over gRPC");
    let (status, said) = ending(begin_with(&client, &[("x-kvlane-model", "m")], &prompt(1, 2)).await).await;
    assert!(status == "5" && said.contains("over HTTP only"), "{status} {said}");
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("g", "hi")).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "model_not_found"));
    assert!(reply.text().contains("over the gRPC service"), "{}", reply.text());
    let reply = gateway.ask("POST", GENERATE, "{}").await;
    assert_eq!((reply.status, reply.error_code().as_str()), (415, "not_grpc"));
    drop(client);
    gateway.end_quiet(&[&http]).await;
}

#[tokio::test]
async fn a_worker_that_speaks_another_protocol_than_the_others_of_its_model_gets_no_requests() {
    let (http, grpc) = (FakeEngine::start("m").await, GrpcEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[&http]).await;
    let worker = gateway.serving().controller.add(&WorkerSpec::new(grpc.url())).expect("a good URL");
    eventually("it is probed", || worker.state().problem.is_some()).await;
    let problem = worker.state().problem.clone().expect("a problem");
    assert!(problem.contains("speak HTTP, and this one speaks gRPC"), "{problem}");
    gateway.served(&http, chat("m", "hi")).await;
    gateway.end().await;
}

#[tokio::test]
async fn other_methods_go_to_an_engine_and_an_abort_to_all() {
    let (a, b) = (GrpcEngine::start("g").await, GrpcEngine::start("g").await);
    let gateway = start(config(), &[&a, &b]).await;
    let client = client(&gateway).await;
    let mut call = client.call(MODEL_PATH).await;
    call.send(|_| {});
    call.half_close();
    let model = call.message().await.expect("a message");
    assert_eq!((bytes_of(&model, 6), call.status().await.as_str()), (Some(&b"g"[..]), "0"));
    let mut call = client.call(ABORT_PATH).await;
    call.send(|message| message.bytes(1, b"request-1"));
    call.half_close();
    for engine in [&a, &b] {
        let mut at_engine = engine.call().await;
        assert_eq!(
            (at_engine.path.as_str(), bytes_of(&at_engine.message, 1)),
            (ABORT_PATH, Some(&b"request-1"[..]))
        );
        at_engine.send(|_| {});
        at_engine.end(Status::Ok, "");
    }
    assert_eq!(call.status().await, "0");
    for closed in ["SubscribeKvEvents", "FlushCache", "Unknown"] {
        let mut call = client.call(&format!("/vllm.grpc.engine.VllmEngine/{closed}")).await;
        call.half_close();
        assert_eq!(call.status().await, "5", "{closed}");
    }
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn what_only_a_gateway_may_say_is_not_passed_on() {
    let engine = GrpcEngine::start("g").await;
    let gateway = start(config(), &[&engine]).await;
    let client = client(&gateway).await;
    let mut call = client.call(GENERATE).await;
    call.send(|message| {
        write(message, &prompt(1, 2));
        message.bytes(8, b"{\"remote_host\": \"10.0.0.7\"}");
    });
    call.half_close();
    let mut at_engine = engine.call().await;
    assert_eq!(bytes_of(&at_engine.message, 8), None);
    assert!(bytes_of(&at_engine.message, 2).is_some());
    at_engine.end(Status::Ok, "");
    assert_eq!(call.status().await, "0");
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_call_names_the_rank_that_it_was_placed_at() {
    let engine = GrpcEngine::start("g").await;
    let feeds = vec![FeedSpec::new("tcp://127.0.0.1:1"), FeedSpec::new("tcp://127.0.0.1:2")];
    let mut config = in_turn();
    config.workers = vec![WorkerSpec { kv_events: feeds, ..WorkerSpec::new(engine.url()) }];
    let gateway = TestGateway::start(config, &[]).await;
    let client = client(&gateway).await;
    let mut ranks = Vec::new();
    for _ in 0..2 {
        let mut call = begin(&client, &prompt(1, 2)).await;
        let mut at_engine = engine.call().await;
        ranks.extend(number_of(&at_engine.message, 9));
        at_engine.end(Status::Ok, "");
        assert_eq!(call.status().await, "0");
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1]);
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn tenants_that_are_kept_apart_have_no_grpc() {
    let engine = GrpcEngine::start("g").await;
    let mut config = config();
    config.auth.keys = vec![key("ann", Role::User)];
    config.auth.isolate_tenants = true;
    let gateway = start(config, &[&engine]).await;
    let client = client(&gateway).await;
    let (status, said) =
        ending(begin_with(&client, &[("authorization", "Bearer k-ann")], &prompt(1, 2)).await).await;
    assert!(status == "7" && said.contains("auth.isolate_tenants"), "{status} {said}");
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn an_http_1_client_is_told_that_a_method_is_grpc() {
    let engine = GrpcEngine::start("g").await;
    let gateway = start(config(), &[&engine]).await;
    let mut client = Client::connect(gateway.address()).await;
    client.request_with("POST", GENERATE, "content-type: application/grpc\r\n", "").await;
    let reply = client.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (415, "not_grpc"));
    gateway.end().await;
}
