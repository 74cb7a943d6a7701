//! `kvlane doctor` against engines of every kind and state, as people meet it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvlane_gateway::config::KeySpec;
use kvlane_gateway::testing::{FakeEngine, TestGateway, config};
use kvlane_http::secret::{KeyHash, Secret};
use kvlane_mock::{KvEventsConfig, KvEventsFaults, KvRole, KvTransferConfig, MockConfig, MockEngine};
use kvlane_proxy::auth::Role;
use serde_json::{Value, json};
use syn::visit::{self, Visit};
use syn::{Expr, ExprLit, Lit};
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;

fn doctor(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.arg("doctor").args(args).env_remove("KVLANE_LOG").stdin(Stdio::null());
    command.output().expect("it starts")
}

/// Runs it beside the engines of this test: exit code and what it wrote.
async fn examine(args: &[&str]) -> (Option<i32>, String, String) {
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    let output = spawn_blocking(move || doctor(&args.iter().map(String::as_str).collect::<Vec<_>>())).await;
    let Output { status, stdout, stderr } = output.expect("it ran");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (status.code(), text(stdout), text(stderr))
}

/// Its report.
async fn report(args: &[&str]) -> (Option<i32>, Value) {
    let (code, stdout, stderr) = examine(&[args, &["--json", "-"]].concat()).await;
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    assert_eq!(report["schema"], "kvlane.doctor/1");
    (code, report)
}

/// How a row of the n-th engine came out, and what it said.
#[track_caller]
fn row<'a>(report: &'a Value, n: usize, name: &str) -> (&'a str, &'a str) {
    let checks = report["engines"][n]["checks"].as_array().expect("rows");
    let row =
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}: {report:#}"));
    let verdict = row["verdict"].as_str().expect("a verdict");
    let to_do = matches!(verdict, "warn" | "fail");
    assert_eq!(to_do, row["fix"].is_string(), "what is wrong has a fix: {row}");
    (verdict, row["said"].as_str().expect("text"))
}

async fn mock(config: MockConfig) -> MockEngine {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    MockEngine::start(MockConfig { speed: 100.0, ..config }, listener).expect("a good configuration")
}

fn with_events() -> MockConfig {
    MockConfig { kv_events_config: KvEventsConfig::loopback(), ..MockConfig::default() }
}

fn url(engine: &MockEngine) -> String {
    format!("http://{}", engine.addr())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_everything_passes_every_row() {
    let engine = mock(with_events()).await;
    let (code, report) = report(&[&url(&engine)]).await;
    for name in [
        "reachable",
        "metrics",
        "engine",
        "models",
        "prefix_caching",
        "block_size",
        "tokenizer",
        "chat_template",
        "kv_events",
        "subscribe",
        "events",
        "sequence",
        "event_block_size",
        "clock",
        "replay",
        "usage",
        "prediction",
    ] {
        assert_eq!(row(&report, 0, name).0, "ok", "{name}: {report:#}");
    }
    assert_eq!((code, &report["failures"], &report["warnings"]), (Some(0), &json!(0), &json!(0)));
    assert_eq!(report["engines"][0]["block_tokens"], 16);
    assert_eq!(report["engines"][0]["kv_events"].as_array().map(Vec::len), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_events_is_approximate_and_told_how_not_to_be() {
    let engine = mock(MockConfig::default()).await;
    let (code, stdout, _) = examine(&[&url(&engine)]).await;
    assert_eq!(code, Some(0), "a warning is no failure: {stdout}");
    for word in ["warn  kv_events", "--kv-events-config", "ok    usage", "0 failed"] {
        assert!(stdout.contains(word), "'{word}' is not in {stdout}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_events_are_lies_fails_the_prediction() {
    let kv_events_faults = KvEventsFaults { lie: 1.0, ..KvEventsFaults::default() };
    let engine = mock(MockConfig { kv_events_faults, ..with_events() }).await;
    let (code, report) = report(&[&url(&engine)]).await;
    assert_eq!(code, Some(1));
    assert_eq!(row(&report, 0, "events").0, "ok");
    assert_eq!(row(&report, 0, "usage").0, "fail", "nothing was reused");
    assert_eq!(row(&report, 0, "prediction").0, "fail", "though its events said so");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_feed_that_says_nothing_is_a_failure() {
    let kv_events_faults = KvEventsFaults { silent: Some(0), ..KvEventsFaults::default() };
    let engine = mock(MockConfig { kv_events_faults, ..with_events() }).await;
    let (code, report) = report(&["--timeout-secs", "0.3", &url(&engine)]).await;
    assert_eq!((code, row(&report, 0, "subscribe").0, row(&report, 0, "events").0), (Some(1), "ok", "fail"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_rank_is_listened_to() {
    let engine = mock(MockConfig { data_parallel_size: 2, ..with_events() }).await;
    let (code, report) = report(&[&url(&engine)]).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(report["engines"][0]["kv_events"].as_array().map(Vec::len), Some(2));
    let checks = report["engines"][0]["checks"].as_array().expect("rows");
    assert_eq!(checks.iter().filter(|check| check["name"] == "subscribe").count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_of_one_model_must_be_alike() {
    let (a, b) = (mock(with_events()).await, mock(MockConfig { block_size: 32, ..with_events() }).await);
    let (code, report) = report(&[&url(&a), &url(&b)]).await;
    assert_eq!(code, Some(1));
    let fleet = report["fleet"].as_array().expect("rows");
    let verdict = |name: &str| fleet.iter().find(|row| row["name"] == name).map(|row| row["verdict"].clone());
    assert_eq!(verdict("same_block_size"), Some(json!("fail")));
    assert_eq!(verdict("same_tokenizer"), Some(json!("ok")));
    assert_eq!(verdict("same_model"), Some(json!("ok")));
}

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvlane-tokens/tests/data/tiny")
}

#[tokio::test(flavor = "multi_thread")]
async fn another_tokenizer_than_the_engines_is_named_with_the_first_token_that_differs() {
    let engine = mock(with_events()).await;
    let path = tiny();
    let args = ["--tokenizer-path", path.to_str().expect("UTF-8"), "--no-request", &url(&engine)];
    let (code, report) = report(&args).await;
    assert_eq!(code, Some(1));
    let (verdict, said) = row(&report, 0, "tokenizer");
    assert!(verdict == "fail" && said.contains("token 0 on"), "{said}");
    assert_eq!(row(&report, 0, "usage").0, "skip");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_of_another_kind_is_examined_as_far_as_it_goes() {
    let models = json!([{"id": "m", "meta": {"n_ctx_train": 4096}}]);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let engine = FakeEngine::on(listener, models);
    engine.set_metrics("llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n");
    let (code, report) = report(&["--no-request", "--timeout-secs", "0.5", &engine.url()]).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(report["engines"][0]["engine"], "llamacpp");
    assert_eq!(report["engines"][0]["max_model_len"], 4096);
    let (verdict, said) = row(&report, 0, "kv_events");
    assert!(verdict == "ok" && said.contains("knowledge is approximate"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_there_is_a_failure_and_the_others_are_examined() {
    let engine = mock(with_events()).await;
    let nobody =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let (code, report) = report(&[&format!("http://{nobody}"), &url(&engine)]).await;
    assert_eq!(code, Some(1));
    assert_eq!(row(&report, 0, "reachable").0, "fail");
    assert_eq!(report["engines"][0]["checks"].as_array().map(Vec::len), Some(1));
    assert_eq!(row(&report, 1, "prediction").0, "ok");
}

/// The rows about the configuration's workers and sources: verdicts and findings.
fn of_sources(report: &Value) -> Vec<(&str, &str)> {
    let rows = report["discovery"].as_array().expect("rows");
    let text = |row: &'_ Value, key: &str| row[key].as_str().expect("text").to_owned();
    assert!(rows.iter().all(|row| (row["verdict"] == "fail") == row["fix"].is_string()), "{rows:#?}");
    assert!(rows.iter().all(|row| text(row, "name") == "discovery"));
    rows.iter()
        .map(|row| (row["verdict"].as_str().expect("text"), row["said"].as_str().expect("text")))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_workers_of_a_configuration_and_of_its_sources_are_examined() {
    let files = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let mut engines = Vec::new();
    for _ in 0..3 {
        engines.push(FakeEngine::start("m").await);
    }
    engines[2].require_key("sk-listed");
    let [given, configured, listed] = [engines[0].url(), engines[1].url(), engines[2].url()];
    let list =
        write("workers.yaml", &format!("- {{url: '{listed}', api_key: sk-listed}}\n- url: '{configured}'\n"));
    let config = write(
        "kvlane.yaml",
        &format!("workers: [{{url: '{configured}'}}]\ndiscovery: {{workers_file: {list}}}\n"),
    );
    let (_, told) = report(&["--no-request", "--timeout-secs", "0.5", "--config", &config, &given]).await;
    let named = told["engines"].as_array().expect("engines").iter().map(|engine| engine["url"].as_str());
    let expect = [&*given, &configured, &listed].map(Some);
    assert_eq!(named.collect::<Vec<_>>(), expect, "each once, in this order");
    for n in 0..3 {
        assert_eq!(row(&told, n, "models").0, "ok", "each with its key: {told:#}");
    }
    assert_eq!(of_sources(&told), [("ok", "file names 2 workers")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_names_no_workers_is_a_failure_with_what_to_do() {
    let files = tempfile::tempdir().expect("a directory");
    let (list, config) = (files.path().join("workers.yaml"), files.path().join("kvlane.yaml"));
    // No server is asked for a name that is too long for DNS.
    let name = format!("http://{}:1", "a".repeat(64));
    let discovery = format!("discovery: {{workers_file: {}, dns: ['{name}']}}\n", list.display());
    std::fs::write(&config, discovery).expect("written");
    let config = config.display().to_string();
    let (code, told) = report(&["--config", &config]).await;
    let [absent, no_file, unknown, no_name] = of_sources(&told)[..] else { panic!("{told:#}") };
    assert_eq!((code, no_file), (Some(1), ("fail", "file names no workers")));
    assert_eq!(no_name, ("fail", "dns names no workers"));
    assert!(absent.1.contains("workers.yaml: cannot open"), "{absent:?}");
    assert!(unknown.1.contains(&name) && unknown.1.contains("cannot resolve"), "{unknown:?}");
    std::fs::write(&list, "[]\n").expect("written");
    let (_, told) = report(&["--config", &config]).await;
    assert_eq!(of_sources(&told)[0], ("fail", "file names no workers"));
    assert!(told["discovery"][0]["fix"].as_str().is_some_and(|fix| fix.contains("workers_file")));
}

/// The rows of the whole fleet with this name: verdicts and findings.
fn of_fleet<'a>(report: &'a Value, name: &str) -> Vec<(&'a str, &'a str)> {
    let rows = report["fleet"].as_array().expect("rows").iter().filter(|row| row["name"] == name);
    let text = |row: &'a Value, key: &str| row[key].as_str().expect("text");
    rows.map(|row| {
        let verdict = text(row, "verdict");
        assert_eq!(
            matches!(verdict, "warn" | "fail"),
            row["fix"].is_string(),
            "what is wrong has a fix: {row}"
        );
        (verdict, text(row, "said"))
    })
    .collect()
}

/// A mock engine with this connector and role.
async fn sharing(connector: &str, role: KvRole, more: KvTransferConfig) -> MockEngine {
    let kv_transfer = KvTransferConfig { kv_connector: Some(connector.into()), role, kv_lease: 1e6, ..more };
    mock(MockConfig { kv_transfer, ..MockConfig::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_is_tried_between_engines_that_share_requests() {
    let handshake = KvTransferConfig { kv_transfer_handshake: 200.0, ..KvTransferConfig::default() };
    let prefill = sharing("nixl", KvRole::Prefill, KvTransferConfig::default()).await;
    let decode = sharing("nixl", KvRole::Decode, handshake).await;
    let (from, to) = (url(&prefill), url(&decode));
    let (code, told) = report(&["--prefill", &from, "--decode", &to]).await;
    assert_eq!(code, Some(0), "{told:#}");
    for n in 0..2 {
        assert_eq!(row(&told, n, "kv_connector"), ("ok", "NIXL, for nixl"));
        assert_eq!(told["engines"][n]["role"], ["prefill", "decode"][n]);
    }
    assert_eq!(row(&told, 1, "kv_role"), ("ok", "decode"));
    let [(verdict, said)] = of_fleet(&told, "transfer")[..] else { panic!("{told:#}") };
    assert!(verdict == "ok" && said.starts_with(&format!("{from} to {to}: the first took ")), "{said}");
    assert!(said.contains("as the engines connected"), "{said}");
    let address = prefill.addr().to_string();
    assert_eq!(of_fleet(&told, "side_channel"), [("ok", &*format!("{from}: {address}"))]);
    assert_eq!(of_fleet(&told, "roles"), [("ok", "1 prefill, 1 decode, 0 both")]);
    let (_, silent) = report(&["--prefill", &from, "--decode", &to, "--no-request"]).await;
    assert_eq!(of_fleet(&silent, "transfer"), [("skip", "no request was sent (--no-request)")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_whose_transfers_fail_is_named_with_what_to_do() {
    let plain = KvTransferConfig::default;
    let prefill = sharing("nixl", KvRole::Prefill, plain()).await;
    let good = sharing("nixl", KvRole::Decode, plain()).await;
    let faulty =
        |faults: &str| KvTransferConfig { kv_transfer_faults: faults.parse().expect("faults"), ..plain() };
    let failing = sharing("nixl", KvRole::Decode, faulty("fail=1")).await;
    let hanging = sharing("nixl", KvRole::Decode, faulty("hang=1")).await;
    let [from, good, failing, hanging] = [&prefill, &good, &failing, &hanging].map(url);
    let args = ["--timeout-secs", "1", "--prefill", &from, "--decode", &good, &failing, &hanging];
    let (code, told) = report(&args).await;
    let [fine, failed, hung] = of_fleet(&told, "transfer")[..] else { panic!("{told:#}") };
    assert_eq!((code, fine.0, failed.0, hung.0), (Some(1), "ok", "fail", "fail"));
    assert!(failed.1.starts_with(&format!("{from} to {failing}: decode: ")) && failed.1.contains("500"));
    assert!(hung.1.starts_with(&format!("{from} to {hanging}")) && hung.1.contains("no answer within 6s"));
    assert_eq!(of_fleet(&told, "side_channel")[0].0, "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_the_connector_or_in_another_role_is_told_so() {
    let prefill = sharing("nixl", KvRole::Prefill, KvTransferConfig::default()).await;
    let producer = sharing("nixl", KvRole::Prefill, KvTransferConfig::default()).await;
    let none = mock(MockConfig::default()).await;
    let [from, producer, none] = [&prefill, &producer, &none].map(url);
    let (code, told) = report(&["--prefill", &from, &none, "--decode", &producer]).await;
    assert_eq!((code, row(&told, 0, "kv_connector").0), (Some(1), "ok"));
    assert_eq!(row(&told, 1, "kv_connector"), ("fail", "its metrics page has none of NIXL"));
    assert_eq!(row(&told, 2, "kv_role"), ("fail", "decode, but the engine fetches no blocks"));
    let [_, (verdict, said)] = of_fleet(&told, "transfer")[..] else { panic!("{told:#}") };
    assert!(verdict == "fail" && said.contains("has no `kv_transfer_params`"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_of_sglang_are_tried_by_their_bootstrap_port() {
    let prefill = sharing("sglang", KvRole::Prefill, KvTransferConfig::default()).await;
    let decode = sharing("sglang", KvRole::Decode, KvTransferConfig::default()).await;
    let (from, to, port) = (url(&prefill), url(&decode), prefill.addr().port().to_string());
    let (code, told) = report(&["--prefill", &from, &port, "--decode", &to]).await;
    assert_eq!(code, Some(0), "{told:#}");
    assert_eq!(of_fleet(&told, "transfer")[0].0, "ok");
    assert_eq!(of_fleet(&told, "side_channel"), [("ok", &*format!("{from}: 127.0.0.1:{port}"))]);
    assert_eq!(row(&told, 0, "usage").0, "skip", "it serves no request alone");
}

/// An engine with this page that says this about itself.
async fn described(version: &str, root: &str, page: &str, settings: Value) -> FakeEngine {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let engine =
        FakeEngine::on(listener, json!([{"id": "m", "object": "model", "root": root, "parent": null}]));
    engine.set_metrics(page);
    engine.set_page("/version", &json!({"version": version}).to_string());
    engine.set_page("/server_info?config_format=json", &settings.to_string());
    engine
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_do_not_fit_together_are_told_why() {
    let page = |dtype: &str| {
        format!(
            "vllm:num_requests_running 0\nvllm:cache_config_info{{block_size=\"16\",cache_dtype=\"{dtype}\"}} 1\n"
        )
    };
    let settings = |connector: &str, role: &str, tp: u32, host: &str, port: u16| {
        json!({
            "vllm_config": {
                "kv_transfer_config": {"kv_connector": connector, "kv_role": role},
                "parallel_config": {"tensor_parallel_size": tp},
            },
            "vllm_env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port},
        })
    };
    let closed =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let nixl = settings("NixlConnector", "kv_consumer", 2, "localhost", closed.port());
    let prefill = described("0.32.0", "/models/m", &page("auto"), nixl).await;
    let store = settings("LMCacheConnectorV1", "kv_both", 3, "localhost", 1);
    let decode = described("0.31.0", "org/m", &page("fp8"), store).await;
    let (from, to) = (prefill.url(), decode.url());
    let (code, told) = report(&["--no-request", "--prefill", &from, "--decode", &to]).await;
    assert_eq!(code, Some(1));
    assert_eq!(row(&told, 0, "kv_role"), ("fail", "prefill, but the engine only fetches blocks"));
    assert_eq!(row(&told, 1, "kv_connector"), ("fail", "LMCacheConnectorV1, but kvlane's connector is nixl"));
    for (name, words) in [
        ("same_version", "0.32.0 at"),
        ("same_model_path", "org/m at"),
        ("same_kv_dtype", "fp8 at"),
        ("tensor_parallel", "2 at"),
        ("side_channel", "cannot be reached from here"),
    ] {
        let [(verdict, said)] = of_fleet(&told, name)[..] else { panic!("{name}: {told:#}") };
        assert!(verdict == "fail" && said.contains(words), "{name}: {said}");
    }
    let (_, told) = report(&["--no-request", "--prefill", &from, "--kv-connector", "nixl"]).await;
    let expect = "no engine has the role decode or both: no request is split";
    assert_eq!(of_fleet(&told, "roles"), [("fail", expect)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_tells_what_it_found() {
    let engine = FakeEngine::start("m").await;
    engine.set_tokenizer(|_| Some(vec![1, 2, 3]));
    let other = FakeEngine::start("m").await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let at = format!("http://{}", gateway.metrics_address());
    let args = ["--no-request", "--timeout-secs", "0.5", "--gateway", &at, &engine.url(), &other.url()];
    let (code, report) = report(&args).await;
    assert_eq!(code, Some(1));
    let rows = report["gateway"].as_array().expect("rows");
    let verdicts: Vec<_> = rows.iter().map(|row| (row["name"].as_str(), row["verdict"].as_str())).collect();
    let expect = [("ready", "ok"), ("worker", "fail"), ("worker", "warn")];
    assert_eq!(verdicts, expect.map(|(name, verdict)| (Some(name), Some(verdict))));
    gateway.end().await;
}

#[test]
fn what_cannot_be_done_is_a_matter_of_usage() {
    for (args, words) in [
        (&["127.0.0.1:8000"][..], &["http://host:port"][..]),
        (&[], &["<URL>"]),
        (&["http://a", "--tokenizer-path", "/nowhere"], &["--tokenizer-path", "/nowhere"]),
        (&["http://a", "--chat-template", "x"], &["--tokenizer-path"]),
        (&["http://a", "--timeout-secs", "0"], &["0.001 to 3600"]),
        (&["http://a", "--gateway", "b"], &["http://host:port"]),
        (&["--config", "/nowhere.yaml"], &["--config", "/nowhere.yaml"]),
    ] {
        let output = doctor(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{args:?}: '{word}' is not in: {said}");
        }
    }
}

/// The rows of calls such as `checks.warn("row", …)`.
#[derive(Default)]
struct Rows(BTreeSet<String>);

impl Visit<'_> for Rows {
    fn visit_expr_method_call(&mut self, call: &syn::ExprMethodCall) {
        let is_verdict = ["ok", "warn", "fail", "skip"].iter().any(|verdict| call.method == verdict);
        if let (true, Some(Expr::Lit(ExprLit { lit: Lit::Str(row), .. }))) = (is_verdict, call.args.first()) {
            self.0.insert(row.value());
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[test]
fn every_row_is_in_its_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(root.join("../../docs/doctor.md")).expect("docs/doctor.md");
    let mut rows = Rows::default();
    for entry in std::fs::read_dir(root.join("src/commands/doctor")).expect("the sources") {
        let source = std::fs::read_to_string(entry.expect("a file").path()).expect("readable");
        rows.visit_file(&syn::parse_file(&source).expect("Rust"));
    }
    let rows = rows.0;
    assert!(rows.len() > 15, "{rows:?}");
    for row in rows {
        assert!(document.contains(&format!("`{row}`")), "docs/doctor.md does not explain {row}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_and_a_gateway_that_want_keys_are_shown_them() {
    let engine = FakeEngine::start("m").await;
    engine.require_key("sk-worker");
    let (code, without) = report(&[&engine.url(), "--no-request"]).await;
    assert_eq!((code, row(&without, 0, "models").0), (Some(1), "fail"));
    let text = without.to_string();
    assert!(text.contains("set --worker-api-key"), "{text}");
    let (_, with) = report(&[&engine.url(), "--no-request", "--worker-api-key", "sk-worker"]).await;
    assert_eq!(row(&with, 0, "models").0, "ok");

    let mut config = config();
    config.upstream.api_key = Some(Secret::new("sk-worker"));
    let sha256 = KeyHash::of("sk-admin");
    config.auth.keys = vec![KeySpec::new("boss", sha256, Role::Admin)];
    let gateway = TestGateway::start(config, &[&engine]).await;
    let metrics = format!("http://{}", gateway.metrics_address());
    let (url, worker_key) = (engine.url(), ["--worker-api-key", "sk-worker", "--no-request"]);
    let args = [&[&*url, "--gateway", &metrics][..], &worker_key].concat();
    let (_, without) = report(&args).await;
    assert!(without.to_string().contains("set --admin-api-key"), "{without:#}");
    let (_, with) = report(&[&args[..], &["--admin-api-key", "sk-admin"]].concat()).await;
    assert!(with["gateway"].to_string().contains("healthy, token count"), "{with:#}");
    gateway.end().await;
}
