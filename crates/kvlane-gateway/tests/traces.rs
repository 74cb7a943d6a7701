//! Traces: spans are sent to a collector, and engines get the attempt as their parent.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::budget::PerSecond;
use kvlane_core::disaggregation::Role;
use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::{Budget, Config, WorkerSpec};
use kvlane_gateway::testing::{
    Call, FakeEngine, TestGateway, chat, chat_stream, config, event, in_turn, next_call,
};
use kvlane_http::secret::Secret;
use kvlane_wire::disaggregation::Connector;

const CHAT: &str = "/v1/chat/completions";
const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// The fields of one span as the collector received it.
#[derive(Debug)]
struct Told {
    trace: String,
    id: String,
    parent: String,
    name: String,
    kind: u64,
    start: u64,
    end: u64,
    failed: bool,
    state: String,
    attributes: BTreeMap<String, String>,
}

/// Fields of a protobuf message: numbers, and bytes.
fn fields(mut left: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(left: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = left[0];
            *left = &left[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }
    let mut found = Vec::new();
    while !left.is_empty() {
        let tag = varint(&mut left);
        let (number, len) = match tag & 7 {
            0 => (varint(&mut left), 0),
            1 => (u64::from_le_bytes(left[..8].try_into().expect("eight bytes")), 8),
            2 => (0, varint(&mut left) as usize),
            5 => (u32::from_le_bytes(left[..4].try_into().expect("four bytes")).into(), 4),
            other => panic!("wire type {other}"),
        };
        found.push((tag >> 3, number, &left[..len]));
        left = &left[len..];
    }
    found
}

fn all(message: &[u8], number: u64) -> impl Iterator<Item = &[u8]> {
    fields(message).into_iter().filter(move |field| field.0 == number).map(|field| field.2)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn attribute(message: &[u8]) -> (String, String) {
    let value = all(message, 2).next().expect("a value");
    let value = match fields(value)[0] {
        (1, _, bytes) => text(bytes),
        (4, bits, _) => f64::from_bits(bits).to_string(),
        (_, number, _) => number.to_string(),
    };
    (text(all(message, 1).next().expect("a key")), value)
}

fn spans(body: &[u8]) -> Vec<Told> {
    let scopes: Vec<_> = all(body, 1).flat_map(|resource| all(resource, 2).collect::<Vec<_>>()).collect();
    let spans = scopes.into_iter().flat_map(|scope| all(scope, 2).collect::<Vec<_>>());
    let read = |span: &[u8]| {
        let bytes = |number| all(span, number).next().unwrap_or_default();
        let number =
            |number| fields(span).into_iter().find(|field| field.0 == number).map_or(0, |field| field.1);
        Told {
            trace: hex(bytes(1)),
            id: hex(bytes(2)),
            parent: hex(bytes(4)),
            name: text(bytes(5)),
            kind: number(6),
            start: number(7),
            end: number(8),
            failed: !bytes(15).is_empty(),
            state: text(bytes(3)),
            attributes: all(span, 9).map(attribute).collect(),
        }
    };
    spans.map(read).collect()
}

fn traced(collector: &FakeEngine) -> Config {
    let mut config = config();
    config.tracing.endpoint = Some(collector.url());
    config.tracing.interval = Duration::from_millis(1);
    config
}

/// The next spans that the collector receives.
async fn told(collector: &FakeEngine) -> Vec<Told> {
    let call = collector.call().await;
    assert_eq!(call.target(), "POST /v1/traces");
    assert_eq!(call.header("content-type"), Some("application/x-protobuf"));
    let told = spans(&call.body);
    call.answer(200, "").await;
    told
}

fn named<'a>(spans: &'a [Told], name: &str) -> &'a Told {
    let names: Vec<_> = spans.iter().map(|span| &span.name).collect();
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} among {names:?}"))
}

/// Invariant: Each attempt is its engine's parent span, and no span contains prompts or answers.
///
/// Also held by `a_second_copy_has_an_attempt_span_of_its_own`.
#[tokio::test]
async fn a_request_is_a_span_with_child_spans_for_stages_and_attempts() {
    let (engine, collector) = (FakeEngine::start("m").await, FakeEngine::start("c").await);
    let gateway = TestGateway::start(traced(&collector), &[&engine]).await;
    let mut client = gateway.client().await;
    let fields = format!("traceparent: {CALLER}\r\ntracestate: a=1\r\nx-request-id: r-1\r\n");
    client.request_with("POST", CHAT, &fields, &chat_stream("m", "a secret prompt")).await;
    let mut call = engine.call().await;
    let parent = call.header("traceparent").expect("a parent").to_owned();
    assert_eq!(call.header("tracestate"), Some("a=1"), "passed on unchanged");
    call.begin_stream().await;
    for word in ["a ", "secret ", "answer"] {
        call.chunk(&event(word)).await;
    }
    let usage = r#"{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}"#;
    call.chunk(&format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\ndata: [DONE]\n\n")).await;
    call.end_stream().await;
    assert_eq!(client.reply().await.status, 200);
    drop(client);

    let told = told(&collector).await;
    let root = named(&told, "POST /v1/chat/completions");
    assert_eq!((root.trace.as_str(), root.parent.as_str()), (&CALLER[3..35], &CALLER[36..52]));
    assert_eq!((root.kind, root.failed, root.state.as_str()), (2, false, "a=1"));
    let has = |span: &Told, key: &str, value: &str| {
        assert_eq!(span.attributes.get(key).map(String::as_str), Some(value), "{key} of {span:?}");
    };
    has(root, "http.response.status_code", "200");
    has(root, "http.request.method", "POST");
    has(root, "http.route", CHAT);
    has(root, "kvlane.request_id", "r-1");
    has(root, "kvlane.model", "m");
    let attempt = named(&told, "chat m");
    assert_eq!((attempt.parent.as_str(), attempt.kind), (root.id.as_str(), 3));
    assert_eq!(parent, format!("00-{}-{}-01", root.trace, attempt.id), "the engine's parent is the attempt");
    has(attempt, "gen_ai.operation.name", "chat");
    has(attempt, "gen_ai.request.model", "m");
    has(attempt, "gen_ai.request.stream", "1");
    has(attempt, "gen_ai.usage.input_tokens", "40");
    has(attempt, "gen_ai.usage.output_tokens", "3");
    has(attempt, "gen_ai.usage.cache_read.input_tokens", "16");
    has(attempt, "kvlane.worker", &engine.url());
    has(attempt, "server.address", "127.0.0.1");
    assert!(attempt.attributes.contains_key("gen_ai.response.time_to_first_chunk"));
    for (stage, parent) in [
        ("read", root),
        ("parse", root),
        ("place", root),
        ("send", attempt),
        ("engine", attempt),
        ("answer", attempt),
    ] {
        let stage = named(&told, stage);
        assert_eq!((stage.parent.as_str(), stage.kind), (parent.id.as_str(), 1), "{stage:?}");
        assert!(root.start <= stage.start && stage.start <= stage.end && stage.end <= root.end, "{stage:?}");
    }
    assert!(
        named(&told, "read").end == named(&told, "parse").start,
        "stages follow each other without a gap"
    );
    assert_eq!(told.len(), 8, "{told:?}");
    let all = format!("{told:?}");
    assert!(!all.contains("secret"), "spans contain no prompt and no answer: {all}");
    gateway.end().await;
}

#[tokio::test]
async fn a_failed_attempt_is_a_span_with_the_reason() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let collector = FakeEngine::start("c").await;
    let mut config = traced(&collector);
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.retry.initial_backoff = Duration::ZERO;
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let engines = [&a, &b];
    let (reply, ()) = tokio::join!(gateway.ask("POST", CHAT, chat("m", "hi")), async {
        next_call(&engines).await.1.send("garbage\r\n\r\n").await;
        let (_, call): (usize, Call) = next_call(&engines).await;
        call.answer(200, "{}").await;
    });
    assert_eq!(reply.status, 200);
    let told = told(&collector).await;
    let attempts: Vec<_> = told.iter().filter(|span| span.name == "chat m").collect();
    assert_eq!(attempts.len(), 2, "{told:?}");
    let why = |span: &Told| span.attributes.get("error.type").cloned();
    assert_eq!((attempts[0].failed, why(attempts[0])), (true, Some("garbage".into())));
    assert_eq!((attempts[1].failed, why(attempts[1])), (false, None));
    assert_eq!(named(&told, "retry").parent, named(&told, "POST /v1/chat/completions").id);
    gateway.end().await;
}

#[tokio::test]
async fn an_unrecorded_request_has_no_spans_and_its_caller_stays_the_parent() {
    let (engine, collector) = (FakeEngine::start("m").await, FakeEngine::start("c").await);
    let gateway = TestGateway::start(traced(&collector), &[&engine]).await;
    let caller = CALLER.replace("-01", "-00");
    for (said, expect) in [(caller.as_str(), Some(caller.as_str())), ("nonsense", None)] {
        let mut client = gateway.client().await;
        let fields = format!("traceparent: {said}\r\ntracestate: a=1\r\n");
        client.request_with("POST", CHAT, &fields, &chat("m", "hi")).await;
        let call = engine.call().await;
        match expect {
            Some(_) => assert_eq!(call.header("traceparent"), expect),
            None => {
                assert!(call.header("traceparent").expect("a new one").ends_with("-03"), "{}", call.head);
                assert_eq!(call.header("tracestate"), None, "it belongs to no trace");
            }
        }
        call.answer(200, "{}").await;
        assert_eq!(client.reply().await.status, 200);
    }
    // The second one starts a trace of its own, and is the only one recorded.
    let told = told(&collector).await;
    assert_eq!(named(&told, "POST /v1/chat/completions").parent, "");
    // A batch whose answer has not been read is sent again at shutdown.
    gateway.metric_becomes(r#"kvlane_trace_spans_total{outcome="sent"}"#, told.len() as f64).await;
    gateway.end_quiet(&[&collector]).await;
}

#[tokio::test]
async fn without_a_collector_trace_headers_pass_unchanged() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let mut client = gateway.client().await;
    client.request_with("POST", CHAT, &format!("traceparent: {CALLER}\r\n"), &chat("m", "hi")).await;
    let call = engine.call().await;
    assert_eq!(call.header("traceparent"), Some(CALLER));
    call.answer(200, "{}").await;
    assert_eq!(client.reply().await.status, 200);
    drop(client);
    gateway.end().await;
}

/// Invariant: A slow or unreachable trace collector costs spans, never requests.
#[tokio::test]
async fn an_unreachable_collector_costs_spans_and_no_requests() {
    let (engine, collector) = (FakeEngine::start("m").await, FakeEngine::start("c").await);
    let mut config = traced(&collector);
    config.tracing.queue_size = 1;
    config.tracing.headers.insert("authorization".into(), Secret::new("Bearer t"));
    let gateway = TestGateway::start(config, &[&engine]).await;
    let spans = async |outcome: &str| {
        gateway.metric(&format!("kvlane_trace_spans_total{{outcome=\"{outcome}\"}}")).await.unwrap_or(0.0)
    };
    let ask = || async {
        gateway.served(&engine, chat("m", "hi")).await;
    };
    ask().await;
    let call = collector.call().await;
    assert_eq!(call.header("authorization"), Some("Bearer t"));
    // While the collector does not answer, one request's spans wait and the others are dropped.
    for _ in 0..5 {
        ask().await;
    }
    let dropped = spans("dropped").await;
    assert!(dropped >= 4.0 * 5.0, "{dropped}");
    assert_eq!(spans("sent").await, 0.0);
    call.answer(400, "no").await;
    let call = collector.call().await;
    assert!(spans("failed").await >= 5.0, "rejected spans are dropped");
    // partial_success { rejected_spans: 2 }
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n\x0a\x02\x08\x02";
    let mut call = call;
    call.send(answer).await;
    call.keep();
    gateway.metric_becomes(r#"kvlane_trace_spans_total{outcome="rejected"}"#, 2.0).await;
    assert!(spans("sent").await >= 3.0);
    gateway.end().await;
}

#[tokio::test]
async fn a_reload_starts_and_stops_traces() {
    let (engine, collector) = (FakeEngine::start("m").await, FakeEngine::start("c").await);
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let ask = || async {
        let (reply, (head, _)) =
            tokio::join!(gateway.ask("POST", CHAT, chat("m", "hi")), engine.answer("{}"));
        assert_eq!(reply.status, 200);
        head.contains("traceparent: ")
    };
    assert!(!ask().await);
    let before = Config::clone(&gateway.serving().config());
    let mut next = before.clone();
    next.tracing = traced(&collector).tracing;
    next.tracing.queue_size = 7;
    let reloaded = gateway.serving().reload(next).expect("it is reloaded");
    assert_eq!(reloaded.needs_restart, ["tracing.queue_size"]);
    assert!(ask().await);
    let told = told(&collector).await;
    assert_eq!(named(&told, "chat m").kind, 3);
    gateway.metric_becomes(r#"kvlane_trace_spans_total{outcome="sent"}"#, told.len() as f64).await;
    gateway.serving().reload(before).expect("it is reloaded");
    assert!(!ask().await);
    gateway.end_quiet(&[&collector]).await;
}

#[tokio::test]
async fn a_second_copy_has_an_attempt_span_of_its_own() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let collector = FakeEngine::start("c").await;
    let mut config = traced(&collector);
    config.hedge.enabled = true;
    config.hedge.delay = Some(Duration::from_millis(20));
    config.hedge.budget = Budget { share: Share::of(1.0), per_second: PerSecond::of(10.0) };
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let gateway = TestGateway::start(config, &[&a, &b]).await;
    let mut client = gateway.client().await;
    let prompt = "the same words again and again ".repeat(40);
    // Both hold the prompt's prefix, so that either may get the second copy.
    for _ in 0..2 {
        client.request("POST", CHAT, &chat("m", &prompt)).await;
        next_call(&[&a, &b]).await.1.answer(200, "{}").await;
        client.reply().await;
        told(&collector).await;
    }
    gateway.ledger_is_zero().await;
    client.request("POST", CHAT, &chat_stream("m", &prompt)).await;
    let (_, first) = next_call(&[&a, &b]).await;
    let (_, mut second) = next_call(&[&a, &b]).await;
    let parents = [&first, &second].map(|call| call.header("traceparent").expect("a parent").to_owned());
    assert_ne!(parents[0], parents[1], "each attempt has its own span");
    second.begin_stream().await;
    second.chunk(&event("a")).await;
    second.end_stream().await;
    assert_eq!(client.reply().await.status, 200);
    drop(first);
    let told = told(&collector).await;
    let attempts: Vec<_> = told.iter().filter(|span| span.name == "chat m").collect();
    assert_eq!(attempts.len(), 2, "{told:?}");
    let won = attempts.iter().find(|span| parents[1].contains(&span.id)).expect("the second");
    assert_eq!(
        named(&told, "engine").parent,
        won.id,
        "the stages are those of the attempt that was answered"
    );
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn queued_spans_are_sent_at_shutdown() {
    let (engine, collector) = (FakeEngine::start("m").await, FakeEngine::start("c").await);
    let mut config = traced(&collector);
    config.tracing.interval = Duration::from_secs(3600);
    let gateway = TestGateway::start(config, &[&engine]).await;
    gateway.served(&engine, chat("m", "hi")).await;
    let (_, told) = tokio::join!(gateway.end(), told(&collector));
    assert!(named(&told, "POST /v1/chat/completions").parent.is_empty());
}

/// Both engines of a split request are below spans of their own, and each leg's stages below its span.
#[tokio::test]
async fn each_leg_of_a_split_request_is_a_span_with_its_own_stages() {
    let (prefill, decode) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let collector = FakeEngine::start("c").await;
    let mut config = Config { tracing: traced(&collector).tracing, ..in_turn() };
    let spec = |engine: &FakeEngine, role| WorkerSpec { role, ..WorkerSpec::new(engine.url()) };
    config.workers = vec![spec(&prefill, Role::Prefill), spec(&decode, Role::Decode)];
    config.disaggregation.connector = Some(Connector::Nixl);
    let gateway = TestGateway::start(config, &[]).await;
    let mut client = gateway.begin(chat_stream("m", "hi")).await;
    let usage =
        r#"{"prompt_tokens": 90, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 64}}"#;
    let call = prefill.call().await;
    let first = call.header("traceparent").expect("a parent").to_owned();
    let params = r#"{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]], "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "h", "remote_port": 5600, "tp_size": 1}"#;
    call.answer(200, &format!(r#"{{"usage": {usage}, "kv_transfer_params": {params}}}"#)).await;
    let mut call = decode.call().await;
    let second = call.header("traceparent").expect("a parent").to_owned();
    call.begin_stream().await;
    call.chunk(&event("one")).await;
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    assert_eq!(client.reply().await.status, 200);

    let spans = told(&collector).await;
    let leg = |name: &str| {
        let is_it = |span: &&Told| span.attributes.get("kvlane.leg").is_some_and(|leg| leg == name);
        spans.iter().find(is_it).unwrap_or_else(|| panic!("no {name} leg among {spans:?}"))
    };
    let (computes, answers) = (leg("prefill"), leg("decode"));
    assert_eq!(first, format!("00-{}-{}-03", computes.trace, computes.id));
    assert_eq!(second, format!("00-{}-{}-03", answers.trace, answers.id));
    assert_eq!((&computes.name, computes.kind, &computes.parent), (&answers.name, 3, &answers.parent));
    assert!(computes.end <= answers.end && computes.start <= answers.start);
    assert_eq!(computes.attributes["kvlane.worker"], prefill.url());
    assert_eq!(computes.attributes["gen_ai.usage.cache_read.input_tokens"], "64");
    assert_eq!(answers.attributes["kvlane.prefill_worker"], prefill.url());
    assert!(answers.attributes.contains_key("kvlane.transferred_tokens"), "{answers:?}");
    assert_eq!(named(&spans, "prefill").parent, computes.id);
    assert_eq!(named(&spans, "transfer").parent, answers.id);
    assert!(named(&spans, "prefill").end <= named(&spans, "transfer").start);
    gateway.end_quiet(&[&prefill, &decode]).await;
}
