//! Recordings of the schedulers' inputs.

use std::path::{Path, PathBuf};

use kvlane_core::policy::PolicyConfig;
use kvlane_core::recording::file::{Frame, Frames};
use kvlane_core::recording::{Replay, Tally};
use kvlane_core::request::RequestKey;
use kvlane_core::scheduler::Input;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, chat_stream, config, event, eventually};

/// The recordings in a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    files
}

fn recording_to(dir: &Path) -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("fleet_cost").expect("a policy");
    (config.recorder.enabled, config.recorder.dir) = (true, dir.into());
    config
}

/// Replays a recording: the result, and the inputs.
fn lived_through(bytes: &[u8]) -> (Tally, Vec<Input>) {
    let (mut replay, mut inputs) = (Replay::new(None), Vec::new());
    for frame in Frames::new(bytes).expect("a recording") {
        if let Frame::Segment { number, bytes } = frame {
            replay.segment(
                number,
                bytes,
                |_| false,
                |step| {
                    inputs.push(step.input.clone());
                    true
                },
            );
        }
    }
    (replay.tally(), inputs)
}

/// Sends a request, and lets the chosen engine answer.
async fn ask(gateway: &TestGateway, engines: &[&FakeEngine; 2], id: &str, body: &str) {
    let mut client = gateway.client().await;
    let fields = format!("x-request-id: {id}\r\nx-session-id: {id}\r\n");
    client.request_with("POST", "/v1/chat/completions", &fields, body).await;
    tokio::select! { _ = engines[0].answer("{}") => {}, _ = engines[1].answer("{}") => {} }
    assert_eq!(client.reply().await.status, 200);
}

#[tokio::test]
async fn a_recording_replays_to_the_same_placements_and_contains_no_text() {
    let dir = tempfile::tempdir().expect("a directory");
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(recording_to(dir.path()), &[&a, &b]).await;
    for n in 0..20 {
        let prompt = format!("something secret {}", "and long ".repeat(20 + n));
        ask(&gateway, &[&a, &b], &format!("request-{n}"), &chat("m", &prompt)).await;
    }
    let placed = gateway.decisions().await;
    gateway.end().await;

    let [file] = &files(dir.path())[..] else { panic!("one pool, one file") };
    let bytes = std::fs::read(file).expect("readable");
    let (tally, inputs) = lived_through(&bytes);
    assert_eq!((tally.placed, tally.same, tally.resumed), (20, 20, 0), "{tally:?}");
    assert_eq!(placed.len(), 20);
    let called = |key: RequestKey| {
        inputs
            .iter()
            .filter(|input| matches!(input, Input::Arrived { request, .. } if request.name == Some(key)))
            .count()
    };
    assert_eq!(called(RequestKey::named(b"request-7")), 1);
    let text = String::from_utf8_lossy(&bytes);
    assert!(!text.contains("secret") && !text.contains("request-7"));
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(file).expect("there").permissions());
    assert_eq!(mode & 0o777, 0o600, "readable by its owner only");
}

/// Invariant: Output tokens are reported in batches, and none is left out.
#[tokio::test]
async fn output_tokens_are_reported_in_batches_and_none_is_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(recording_to(dir.path()), &[&engine]).await;
    for complete in [true, false] {
        let mut client = gateway.begin(chat_stream("m", "hi")).await;
        let mut call = engine.call().await;
        call.begin_stream().await;
        for _ in 0..40 {
            call.chunk(&event("word")).await;
        }
        if complete {
            call.end_stream().await;
            client.rest().await;
        } else {
            eventually("two batches were reported", || {
                gateway.pool("m").router.read(|scheduler| {
                    scheduler.pool().endpoints().any(|endpoint| endpoint.load.in_flight.context_tokens > 32)
                })
            })
            .await;
            drop(client);
        }
        gateway.ledger_is_zero().await;
    }
    gateway.end().await;
    let (_, inputs) = lived_through(&std::fs::read(&files(dir.path())[0]).expect("readable"));
    let told = |wanted: usize| {
        let mut ids: Vec<_> = Vec::new();
        let mut counts: Vec<Vec<u32>> = Vec::new();
        for input in &inputs {
            match input {
                Input::Arrived { request, .. } => {
                    ids.push(request.id);
                    counts.push(Vec::new());
                }
                Input::Tokens { request, count } => {
                    let place = ids.iter().position(|id| id == request).expect("it was recorded before");
                    counts[place].push(*count);
                }
                _ => {}
            }
        }
        counts.swap_remove(wanted)
    };
    let whole = told(0);
    assert_eq!(whole.iter().sum::<u32>(), 39, "all after the first, the last ones at the end");
    let (_, lots) = whole.split_last().expect("some were reported");
    assert!(lots.iter().all(|count| count % 16 == 0), "{whole:?}");
    assert!(inputs.iter().any(|input| matches!(input, Input::Wrote { output_tokens: 40, .. })));
    let cut = told(1);
    let (last, lots) = cut.split_last().expect("some were reported");
    assert!(lots.iter().all(|count| count % 16 == 0) && *last > 0, "{cut:?}");
    assert!((32..=39).contains(&cut.iter().sum::<u32>()), "relayed tokens count: {cut:?}");
}

#[tokio::test]
async fn a_reload_starts_and_stops_recording() {
    let dir = tempfile::tempdir().expect("a directory");
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut config = recording_to(dir.path());
    config.recorder.enabled = false;
    let gateway = TestGateway::start(config.clone(), &[&a, &b]).await;
    config.workers = gateway.serving().config().workers.clone();
    let ports = (gateway.address().port(), gateway.metrics_address().port());
    (config.server.port, config.metrics.port) = ports;
    for (enabled, wanted) in [(false, 0), (true, 1), (false, 1), (true, 2)] {
        config.recorder.enabled = enabled;
        gateway.serving().reload(config.clone()).expect("reloaded");
        for n in 0..3 {
            ask(&gateway, &[&a, &b], &format!("{n}"), &chat("m", "hello")).await;
        }
        if !enabled {
            assert_eq!(files(dir.path()).len(), wanted);
        }
    }
    gateway.end().await;
    let files = files(dir.path());
    assert_eq!(files.len(), 2);
    for file in files {
        let (tally, _) = lived_through(&std::fs::read(file).expect("readable"));
        assert_eq!((tally.placed, tally.missed, tally.resumed, tally.damaged), (3, 0, 1, 0), "{tally:?}");
    }
}

#[tokio::test]
async fn a_shadow_policy_is_evaluated_and_shown() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let mut with = config();
    with.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let gateway = TestGateway::start(with.clone(), &[&a, &b]).await;
    assert_eq!(gateway.operate("GET", "/whatif", "").await.status, 404, "off by default");
    gateway.end().await;

    with.routing.shadow_policy = PolicyConfig::by_name("cache_aware");
    let gateway = TestGateway::start(with, &[&a, &b]).await;
    for n in 0..12 {
        ask(&gateway, &[&a, &b], &format!("{n}"), &chat("m", &"the same ".repeat(2000))).await;
    }
    let told = gateway.operate("GET", "/whatif", "").await.json();
    let pool = &told["pools"][0];
    assert_eq!((&told["schema"], &pool["policy"]), (&"kvlane.whatif/1".into(), &"round_robin".into()));
    assert_eq!((&pool["shadow_policy"], &pool["decisions"]), (&"cache_aware".into(), &12.into()));
    let agreed = pool["agreed"].as_u64().expect("a count");
    assert!((1..12).contains(&agreed), "the shadow policy would have stayed at one engine: {told}");
    assert!(pool["gain_s"].as_f64().expect("seconds") > 0.0, "{told}");
    assert_eq!(pool["by_reason"][0]["reason"], "turn");
    gateway.end().await;
}
