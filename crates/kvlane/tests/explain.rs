//! `kvlane explain` as people meet it, on a recording of a router whose decisions are known.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use kvlane_core::block::ChainSeed;
use kvlane_core::cache_accuracy::ReportedReuse;
use kvlane_core::index::approx;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::recording::file::{Head, add, begin};
use kvlane_core::recording::{Recorder, Sharing};
use kvlane_core::request::{RequestId, RequestKey, SchedulingRequest, SessionKey};
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input};
use kvlane_core::time::Nanos;
use serde_json::Value;

/// Writes a recording: sixty requests of seven conversations at three endpoints, each answered after a while. Request 40 is
/// slow.
fn recording(dir: &Path, policy: &str) -> PathBuf {
    let head = Head {
        schema: "kvlane.recording/1".into(),
        model: "llama".into(),
        version: "0".into(),
        origin_unix_s: 1e9,
        begun: Nanos::ZERO,
    };
    let file = Arc::new(Mutex::new((begin(&head), Sharing::new(1000))));
    let router = Router::new(router::Config {
        scheduler: scheduler::Config::new(PolicyConfig::by_name(policy).expect("one")),
        index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
        exact: None,
        block_tokens: 16,
    });
    let sink = Arc::clone(&file);
    router.record(Some(Recorder::new(move |segment| {
        let (file, sharing) = &mut *sink.lock().expect("no panic");
        add(file, &segment, &sharing.of_segment(&segment));
    })));
    let (mut out, mut scratch) = (Vec::new(), Scratch::default());
    for n in 0..3 {
        router.join(Nanos(1), format!("http://e{n}").into(), true, false, &mut out).expect("room");
    }
    for n in 0..60u64 {
        let now = Nanos::from_millis(1000 + n * 100);
        let session = n % 7;
        let prompt = vec![session as u8; 16 * (80 + n as usize)];
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(&prompt, 16, &mut chain);
        let request = SchedulingRequest {
            name: Some(RequestKey::named(format!("req-{n}").as_bytes())),
            session: Some(SessionKey::named(format!("chat-{session}").as_bytes(), 0)),
            ..SchedulingRequest::new(RequestId(n), prompt.len() as u32)
        };
        let reported = ReportedReuse { prompt_tokens: request.prompt_tokens, cached_tokens: 320 };
        router.arrive(now, request, &chain, &mut scratch, &mut out);
        let (then, request) = (now + Nanos::from_millis(if n == 40 { 90 } else { 30 }), RequestId(n));
        router.progress(then, request, true, 16, &mut out);
        router.step(then, Input::Wrote { request, output_tokens: 17 }, &mut out);
        router.step(then, Input::Answered { request, reported }, &mut out);
        router.step(then, Input::Finished { request }, &mut out);
    }
    router.record(None);
    let path = dir.join(format!("{policy}.kvrec"));
    std::fs::write(&path, &file.lock().expect("no panic").0).expect("written");
    path
}

fn kvlane(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.args(args).env_remove("KVLANE_LOG").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Explains; what it printed.
#[track_caller]
fn prints(path: &Path, args: &[&str]) -> String {
    let output = kvlane(&[&["explain", path.to_str().expect("a path")], args].concat());
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn found(path: &Path, args: &[&str]) -> Value {
    let printed = prints(path, &[args, &["--json"]].concat());
    serde_json::from_str(&printed).unwrap_or_else(|why| panic!("{why}: {printed}"))
}

#[test]
fn a_request_is_explained_by_what_the_policy_saw() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = recording(dir.path(), "fleet_cost");
    let found = found(&path, &["--request", "req-12"]);
    assert_eq!(found["schema"], "kvlane.explain/1");
    let decision = &found["decisions"]["found"][0];
    assert_eq!((&decision["request"], &decision["reason"]), (&12.into(), &"lowest_cost".into()));
    let rows = decision["candidates"].as_array().expect("rows");
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[0]["picked"], true);
    assert_eq!(rows[0]["worker"], decision["worker"]);
    assert_eq!(rows[0]["overlap_tokens"], 16 * 85, "all of the turn before it");
    let cost = |row: &Value| row["cost"].as_f64().expect("a cost");
    let more = decision["runner_up"]["cost_more"].as_f64().expect("a difference");
    assert!((cost(&rows[1]) - cost(&rows[0]) - more).abs() < 1e-12 && more > 0.0);
    assert_eq!(decision["replayed_alike"], true);
    assert!((decision["ttft_s"].as_f64().expect("told") - 0.03).abs() < 1e-6);
    assert_eq!((&decision["output_tokens"], &decision["cached_tokens"]), (&17.into(), &320.into()));
    assert_eq!(found["decisions"]["replay"]["same"], 60);

    let told = prints(&path, &["--request", "12"]);
    assert!(told.contains("placed on http://e") && told.contains("next best by fleet_cost"), "{told}");
    assert!(told.contains("all 60 placements equal the recorded ones"), "{told}");
}

#[test]
fn a_conversation_and_the_slowest_requests_are_found() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = recording(dir.path(), "cache_aware");
    let requests = |args: &[&str]| {
        let found = found(&path, args);
        let decisions = found["decisions"]["found"].as_array().expect("some").clone();
        decisions.iter().map(|decision| decision["request"].as_u64().expect("a number")).collect::<Vec<_>>()
    };
    assert_eq!(requests(&["--session", "chat-2"]), (0..9).map(|n| 2 + 7 * n).collect::<Vec<_>>());
    let key = format!("{:016x}", SessionKey::named(b"chat-2", 0).0);
    assert_eq!(requests(&["--session", &key]).len(), 9);
    assert_eq!(requests(&["--session", &key[..8]]).len(), 9, "as /decisions shows it");
    assert_eq!(requests(&["--worst", "1"]), [40]);
    let nobody = kvlane(&["explain", path.to_str().expect("a path"), "--request", "nobody"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert_eq!(text(&nobody.stdout), "", "stdout is for what is found");
    let said = text(&nobody.stderr);
    assert!(said.contains("--request nobody: no such request"), "{said}");
}

#[test]
fn a_recording_is_summed_up_and_other_policies_are_compared() {
    let dir = tempfile::tempdir().expect("a directory");
    recording(dir.path(), "round_robin");
    let all = found(dir.path(), &["--policies", "cache_aware,round_robin", "--seeds", "2"]);
    let summary = &all["summary"];
    assert_eq!((&summary["requests"], &summary["policy"]), (&60.into(), &"round_robin".into()));
    assert_eq!(summary["by_reason"]["turn"], 60);
    assert_eq!(summary["by_endpoint"]["http://e1"], 20);
    let policies = &all["policies"];
    assert_eq!(policies["ran"]["policy"], "round_robin");
    let [cached, same] = &policies["others"].as_array().expect("two")[..] else { panic!("two") };
    let agreed = cached["same_rows"]["agreed"].as_u64().expect("a count");
    assert!(agreed < 60, "it would have stayed with what is cached: {cached}");
    assert_eq!(same["same_rows"]["agreed"], 60, "it is the one that ran");
    assert_eq!(same["figures"], policies["ran"]["figures"]);
    let share = |one: &Value| one["figures"]["cached_share"].as_f64().expect("a share");
    assert!(share(cached) > share(same) + 0.05, "{} {}", share(cached), share(same));
    assert_eq!(policies["model_errors"][0]["figure"], "ttft_mean_s");
    let told = prints(dir.path(), &["--policies", "cache_aware", "--seeds", "1"]);
    assert!(told.contains("error of the model"), "{told}");
}

#[test]
fn a_recording_is_a_trace_to_simulate() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = recording(dir.path(), "round_robin");
    let path = path.to_str().expect("a path");
    let output =
        kvlane(&["simulate", "--trace", path, "--preset", "llama-3.1-8b@h100", "--engines", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("json");
    assert_eq!(told["rows"][0]["simulated"]["requests"], 60.0);
}

#[test]
fn what_cannot_be_explained_is_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let empty = kvlane(&["explain", dir.path().to_str().expect("a path")]);
    assert_eq!(empty.status.code(), Some(1));
    assert!(text(&empty.stderr).contains("contains no recording (.kvrec)"));
    let path = dir.path().join("x.kvrec");
    std::fs::write(&path, "nonsense").expect("written");
    let foreign = kvlane(&["explain", path.to_str().expect("a path")]);
    assert!(text(&foreign.stderr).contains("not a recording of kvlane"));
    let path = recording(dir.path(), "random");
    let wrong = kvlane(&["explain", path.to_str().expect("a path"), "--policies", "best"]);
    assert!(text(&wrong.stderr).contains("unknown policy"));
    let wrong = kvlane(&["explain", path.to_str().expect("a path"), "--model", "other"]);
    assert!(text(&wrong.stderr).contains("the recordings are of llama"));
}
