//! `kvlane explain` as people meet it, on a recording of a router whose decisions are known.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use kvlane_core::block::ChainSeed;
use kvlane_core::cache_accuracy::ReportedReuse;
use kvlane_core::disaggregation::{Part, Role};
use kvlane_core::index::approx;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::recording::file::{Head, add, begin};
use kvlane_core::recording::{Recorder, Sharing};
use kvlane_core::request::{RequestId, RequestKey, SchedulingRequest, SessionKey};
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input};
use kvlane_core::time::Nanos;
use serde_json::Value;

fn head() -> Head {
    Head {
        schema: "kvlane.recording/1".into(),
        model: "llama".into(),
        version: "0".into(),
        origin_unix_s: 1e9,
        begun: Nanos::ZERO,
    }
}

/// A router that is recorded into `file`.
fn router(policy: &str, file: &Arc<Mutex<(Vec<u8>, Sharing)>>) -> Router {
    let router = Router::new(router::Config {
        scheduler: scheduler::Config::new(PolicyConfig::by_name(policy).expect("one")),
        index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
        exact: None,
        block_tokens: 16,
    });
    let sink = Arc::clone(file);
    router.record(Some(Recorder::new(move |segment| {
        let (file, sharing) = &mut *sink.lock().expect("no panic");
        add(file, &segment, &sharing.of_segment(&segment));
    })));
    router
}

/// Writes a recording: sixty requests of seven conversations at three endpoints, each answered after a while. Request 40 is
/// slow.
fn recording(dir: &Path, policy: &str) -> PathBuf {
    let file = Arc::new(Mutex::new((begin(&head()), Sharing::new(1000))));
    let router = router(policy, &file);
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

/// A recording of a prefill endpoint, two that decode and many answers in flight there, so that `fleet_cost` splits the
/// forty long prompts that follow. Each prompt is computed after 40 ms, and each first token comes 20 ms later, but for the
/// last request, whose transfer fails.
fn split_recording(dir: &Path) -> PathBuf {
    let file = Arc::new(Mutex::new((begin(&head()), Sharing::new(1000))));
    let router = router("fleet_cost", &file);
    let (mut out, mut scratch) = (Vec::new(), Scratch::default());
    for (n, role) in [(0, Role::Prefill), (1, Role::Decode), (2, Role::Decode)] {
        let joined = router.join(Nanos(1), format!("http://e{n}").into(), true, false, &mut out);
        let part = Part { role, network: Some(7), serves_alone: true };
        router.step(Nanos(2), Input::Assigned { endpoint: joined.expect("room"), part }, &mut out);
    }
    for n in 1000..1060u64 {
        router.arrive(Nanos(3), SchedulingRequest::new(RequestId(n), 2000), &[], &mut scratch, &mut out);
        router.progress(Nanos(4), RequestId(n), true, 1, &mut out);
    }
    for n in 0..40u64 {
        let now = Nanos::from_millis(1000 + n * 100);
        let (request, leg) = (RequestId(n), RequestId(500 + n));
        let prompt = vec![n as u8; 20_000];
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(&prompt, 16, &mut chain);
        let asked = SchedulingRequest { leg: Some(leg), ..SchedulingRequest::new(request, 20_000) };
        router.arrive(now, asked, &chain, &mut scratch, &mut out);
        let computed = now + Nanos::from_millis(40);
        router.begin(computed, leg, &mut out);
        let reported = |cached_tokens| ReportedReuse { prompt_tokens: 20_000, cached_tokens };
        router.step(computed, Input::Answered { request: leg, reported: reported(160) }, &mut out);
        let then = computed + Nanos::from_millis(20);
        if n == 39 {
            router.step(then, Input::TransferFailed { request }, &mut out);
        } else {
            router.progress(then, request, true, 16, &mut out);
            router.step(then, Input::Wrote { request, output_tokens: 17 }, &mut out);
            // As vLLM before 0.31 does: what it fetched is called cached.
            router.step(then, Input::Answered { request, reported: reported(20_000) }, &mut out);
        }
        router.step(then, Input::Finished { request: leg }, &mut out);
        router.step(then, Input::Finished { request }, &mut out);
    }
    router.record(None);
    let path = dir.join("split.kvrec");
    std::fs::write(&path, &file.lock().expect("no panic").0).expect("written");
    path
}

#[test]
fn a_split_request_is_explained_by_both_legs_and_the_terms_of_its_price() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = split_recording(dir.path());
    let found_one = found(&path, &["--request", "3"]);
    let decision = &found_one["decisions"]["found"][0];
    let prefill = &decision["prefill"];
    assert_eq!(prefill["worker"], "http://e0", "{decision}");
    let close = |value: &Value, secs: f64| (value.as_f64().expect("a time") - secs).abs() < 1e-6;
    assert!(close(&prefill["computed_s"], 0.04) && close(&prefill["transfer_s"], 0.02), "{prefill}");
    assert!(close(&decision["ttft_s"], 0.06));
    assert_eq!(decision["cached_tokens"], 160, "not what the other engine fetched");
    let rows = decision["candidates"].as_array().expect("rows");
    assert_eq!(
        (&rows[0]["picked"], &rows[1]["prefills"]),
        (&true.into(), &true.into()),
        "the picked ones first"
    );
    let pairs = decision["pairs"].as_array().expect("pairs");
    assert_eq!((pairs.len(), &pairs[0]["picked"]), (2, &true.into()), "{pairs:?}");
    assert_eq!((&pairs[0]["prefill"], &pairs[0]["worker"]), (&"http://e0".into(), &decision["worker"]));
    for pair in pairs {
        let terms = pair["terms"].as_object().expect("terms");
        let sum: f64 = terms.values().filter_map(Value::as_f64).sum();
        assert!(close(&pair["cost"], sum), "they add up: {pair}");
        for term in ["prompt_s", "transfer_s", "second_step_s", "decode_s"] {
            assert!(terms[term].as_f64() > Some(0.0), "{term}: {pair}");
        }
    }
    let more = decision["runner_up"]["cost_more"].as_f64().expect("a difference");
    assert!(more >= 0.0, "{decision}");
    assert_eq!(found_one["decisions"]["replay"]["same"], 100);

    let told = prints(&path, &["--request", "3"]);
    for words in [
        ", its prompt on http://e0: lowest cost",
        "\np http://e0",
        "transfer 0.0",
        "+ second step",
        "prompt computed after 0.040 s, transfer and a step 0.020 s, first token after 0.060 s",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    let told = prints(&path, &["--request", "39"]);
    assert!(told.contains("transfer failed after 0.060 s"), "{told}");
}

#[test]
fn split_requests_are_summed_up_and_other_policies_are_compared_on_the_same_fleet() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = split_recording(dir.path());
    let all = found(&path, &["--policies", "least_load", "--seeds", "1"]);
    let splits = &all["summary"]["splits"];
    assert_eq!((&splits["placements"], &splits["transfers_failed"]), (&40.into(), &1.into()), "{splits}");
    assert_eq!(splits["by_prefill"], serde_json::json!({"http://e0": 40}));
    assert!((splits["transfer_p50_s"].as_f64().expect("seen") - 0.02).abs() < 1e-6);
    let share = all["summary"]["cached_share"].as_f64().expect("reported");
    assert!((share - 160.0 / 20_000.0).abs() < 1e-9, "only what the prefill endpoint had: {share}");
    let ran = &all["policies"]["ran"]["figures"];
    assert!(
        ran["splits"].as_f64() > Some(0.0) || ran["split_share"].as_f64() > Some(0.0),
        "it splits: {ran}"
    );
    let told = prints(&path, &[]);
    assert!(told.contains("40 placements (40.0 %) were split; transfer and a step: p50 0.020 s"), "{told}");
    assert!(told.contains("prompts computed elsewhere:\n         40"), "{told}");
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
