//! The command line as people meet it: help, what is wrong with an input, and the code it ends with.

use std::io::Write;
use std::net::TcpListener;
use std::process::Stdio;

use crate::program::{FAILURE, Running, USAGE, document, fails, kvlane, run, text};

fn guide() -> String {
    document("guide.md")
}

/// A gateway on free ports.
const SERVE: [&str; 7] = ["serve", "--port", "0", "--prometheus-port", "0", "--relay-threads", "1"];

/// The flags that a command's help lists, each where it is explained.
fn flags(command: &[&str]) -> Vec<String> {
    let help = run(&[command, &["--help-all"]].concat());
    assert_eq!(help.status.code(), Some(0));
    let help = text(&help.stdout);
    let flag = |line: &str| {
        let word = line.trim_start().strip_prefix("-h, ").unwrap_or(line.trim_start());
        let name: String =
            word.strip_prefix("--")?.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
        Some(format!("--{name}"))
    };
    help.lines().filter_map(flag).collect()
}

#[test]
fn help_of_each_command_lists_its_flags() {
    let serve = [
        "--config",
        "--set",
        "--host",
        "--port",
        "--worker-urls",
        "--policy",
        "--pool-policy",
        "--cache-threshold",
        "--balance-abs-threshold",
        "--balance-rel-threshold",
        "--max-payload-size",
        "--max-concurrent-requests",
        "--queue-size",
        "--queue-timeout-secs",
        "--request-timeout-secs",
        "--prometheus-host",
        "--prometheus-port",
        "--health-check-endpoint",
        "--health-check-interval-secs",
        "--health-failure-threshold",
        "--max-worker-retries",
        "--max-total-retries",
        "--disable-retries",
    ];
    let mock_engine = [
        "--port",
        "--model",
        "--served-model-name",
        "--preset",
        "--speed",
        "--block-size",
        "--kv-cache-size",
        "--max-num-seqs",
        "--max-model-len",
        "--seed",
    ];
    let demo = ["--policies", "--speed", "--trace", "--json", "--keep"];
    for (command, expect) in
        [("serve", &serve[..]), ("check", &serve[..]), ("mock-engine", &mock_engine), ("demo", &demo)]
    {
        let listed = flags(&[command]);
        for flag in expect {
            assert!(
                listed.iter().any(|name| name == flag),
                "{command} --help does not list {flag}: {listed:?}"
            );
        }
    }
}

/// What `kvlane ARGS --help` lists as commands.
fn commands(args: &[&str]) -> Vec<String> {
    let help = text(&run(&[args, &["--help"]].concat()).stdout);
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Further lines of a description are indented more.
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !["", "help"].contains(name)).map(str::to_owned).collect()
}

/// The guide, or the document it points to in the command's row.
fn document_of(command: &str) -> (String, String) {
    let guide = guide();
    let begin = format!("| `kvlane {command}` |");
    let row = guide.lines().find(|line| line.starts_with(&begin));
    let row = row.unwrap_or_else(|| panic!("docs/guide.md has no row on {command}"));
    match row.split_once("](").and_then(|(_, link)| link.split(['#', ')']).next()) {
        Some(name) => (format!("docs/{name}"), document(name)),
        None => ("docs/guide.md".to_owned(), guide),
    }
}

#[test]
fn every_flag_is_in_the_guide() {
    let all = commands(&[]);
    assert!(all.len() > 8, "{all:?}");
    for command in &all {
        let (name, text) = document_of(command);
        let inner = commands(&[command]);
        let paths: Vec<Vec<&str>> = match inner.is_empty() {
            true => vec![vec![command]],
            false => inner.iter().map(|inner| vec![command.as_str(), inner]).collect(),
        };
        for path in paths {
            let listed = flags(&path);
            assert!(listed.contains(&"--log-level".to_owned()), "{path:?}: {listed:?}");
            // The one of all commands is in the guide, whatever document has the others.
            for flag in listed.iter().filter(|flag| {
                !["--help", "--help-all", "--log-level", "--log-format"].contains(&flag.as_str())
            }) {
                let explained = [' ', '`', '='].iter().any(|end| text.contains(&format!("`{flag}{end}")));
                assert!(explained, "{name} does not explain {flag} of {path:?}");
            }
        }
    }
    assert!(guide().contains("`--log-level`") && guide().contains("`--log-format json`"));
}

#[test]
fn a_log_for_programs_is_an_object_on_each_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("kvlane.yaml");
    std::fs::write(&file, "log: {format: json}\nserver: {port: 1}\nmetrics: {port: 1}\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    // Two addresses that are one: it logs its configuration, and ends.
    for args in [
        vec!["serve", "--config", file],
        vec!["serve", "--log-format", "json", "--port", "1", "--prometheus-port", "1"],
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let text = String::from_utf8(output.stderr).expect("UTF-8");
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("an object on each line")).collect();
        assert_eq!(
            (&lines[0]["level"], &lines[0]["message"]),
            (&"INFO".into(), &"configuration".into()),
            "{text}"
        );
        let last = lines.last().expect("lines");
        assert_eq!((&last["level"], &last["message"]), (&"ERROR".into(), &"kvlane failed".into()), "{text}");
        assert!(last["timestamp"].is_string() && last["error"].is_string(), "{text}");
    }
    // A flag comes first.
    let output = run(&["serve", "--config", file, "--log-format", "text"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("\nerror: "));
}

#[test]
fn help_and_version_are_no_failures() {
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    for command in [
        "serve",
        "demo",
        "mock-engine",
        "trace",
        "replay",
        "simulate",
        "roofline",
        "calibrate",
        "doctor",
        "check",
        "config",
    ] {
        assert!(text(&help.stdout).contains(command), "{command}");
    }
    let version = run(&["--version"]);
    assert_eq!(version.status.code(), Some(0));
    assert_eq!(text(&version.stdout).trim(), concat!("kvlane ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn what_config_prints_check_takes() {
    let example = run(&["config"]);
    assert_eq!(example.status.code(), Some(0));
    let mut check = kvlane(&["check", "--config", "/dev/stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    check.stdin.take().expect("piped").write_all(&example.stdout).expect("it reads");
    let checked = check.wait_with_output().expect("it ends");
    assert_eq!(checked.status.code(), Some(0));
    let effective: serde_json::Value = serde_json::from_slice(&checked.stdout).expect("JSON");
    assert_eq!(effective["server"]["port"], 30_000);
    assert_eq!(effective["routing"]["policy"]["name"], "fleet_cost");
    assert_eq!(effective["workers"].as_array().map(Vec::len), Some(2));
}

#[test]
fn a_reader_that_has_enough_is_no_failure() {
    for args in [&["config"][..], &["config", "--schema"], &["completions", "bash"], &["doctor", "--help"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = kvlane(args).stdout(writer).output().expect("it starts");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{args:?}");
    }
}

#[test]
fn check_shows_what_the_flags_make_of_it() {
    let urls = ["http://a:1", "http://b:2"];
    let output = run(&[
        "check",
        "--policy",
        "prefixaware",
        "--saturation-inflight",
        "4",
        "--worker-urls",
        urls[0],
        urls[1],
    ]);
    let effective: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(effective["routing"]["policy"]["name"], "prefix_aware");
    assert_eq!(effective["routing"]["policy"]["saturation_inflight"], 4);
    assert_eq!(effective["workers"][1]["url"], urls[1]);
    for (said, name) in
        [(&["--policy", "auto"][..], "fleet_cost"), (&["--timing", "qwen3-32b@h100x2"], "fleet_cost")]
    {
        let output = run(&[&["check"], said].concat());
        let effective: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(effective["routing"]["policy"]["name"], name, "{said:?}");
    }
}

#[test]
fn a_command_line_that_makes_no_sense_ends_with_2_and_points_to_help() {
    fails(&[], USAGE, &["kvlane serve --worker-urls", "kvlane --help"]);
    fails(&["sreve"], USAGE, &["'sreve'", "serve", "--help"]);
    fails(&["serve", "--prot", "1"], USAGE, &["--prot", "--port"]);
    fails(&["serve", "--port", "70000"], USAGE, &["70000", "--port"]);
    fails(&["serve", "--host", "everywhere"], USAGE, &["everywhere", "--host"]);
    fails(&["serve", "--disable-retries", "--max-total-retries", "2"], USAGE, &["cannot be used with"]);
}

#[test]
fn a_configuration_that_cannot_be_ends_with_1_and_says_what_to_write() {
    for command in ["check", "serve"] {
        fails(&[command, "--policy", "best"], FAILURE, &["'best'", "did you mean"]);
        fails(&[command, "--worker-urls", "gpu:1"], FAILURE, &["workers[0].url", "write http://host:port"]);
        fails(&[command, "--worker-urls", "ftp://gpu"], FAILURE, &["ftp", "write http://host:port"]);
        fails(&[command, "--set", "server.port"], FAILURE, &["--set server.port", "write section.key=value"]);
        fails(&[command, "--set", "server.prot=1"], FAILURE, &["server.prot", "unknown field"]);
        fails(&[command, "--pool-policy", "llama"], FAILURE, &["--pool-policy llama", "write MODEL=POLICY"]);
        fails(
            &[command, "--health-check-interval-secs", "0"],
            FAILURE,
            &["health.interval", "1ms to a year"],
        );
        fails(&[command, "--config", "/nowhere/kvlane.yaml"], FAILURE, &["cannot read /nowhere/kvlane.yaml"]);
    }
    fails(&["mock-engine", "--port", "0", "--preset", "gpt@tpu"], FAILURE, &["gpt@tpu", "did you mean"]);
    fails(&["mock-engine", "--port", "0", "--speed", "0"], FAILURE, &["--speed is 0"]);
    fails(&["check", "--cache-threshold", "0.5"], FAILURE, &["--cache-threshold", "--policy cache_aware"]);
    fails(&["check", "--timing", "gpt-9@h100"], FAILURE, &["routing.timing", "gpt-9@h100"]);
    fails(&["demo", "--policies", "best"], FAILURE, &["'best'", "did you mean"]);
    fails(&["demo", "--speed", "0"], FAILURE, &["--speed 0"]);
    fails(&["demo", "--trace", "/nowhere.jsonl"], FAILURE, &["/nowhere.jsonl"]);
}

/// Invariant: `kvlane check` rejects every configuration that `kvlane serve` rejects.
#[test]
fn what_serve_refuses_check_refuses_in_the_same_words() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let taken = file("taken", "");
    let recorder = file("recorder.yaml", &format!("recorder: {{enabled: true, dir: {taken}/recordings}}\n"));
    let key = file("key.yaml", "workers: [{url: 'http://a:1', api_key: {env: KVLANE_NO_SUCH_KEY}}]\n");
    let pool = file("pool.yaml", "routing: {pools: {m: {tokenizer: meta-llama/Llama-3.1-8B}}}\n");
    for (args, words) in [
        (
            &["--tokenizer-path", "meta-llama/Llama-3.1-8B"][..],
            &["tokens.path", "meta-llama/Llama-3.1-8B"][..],
        ),
        (&["--config", &pool], &["routing.pools.m.tokenizer", "meta-llama/Llama-3.1-8B"]),
        (&["--config", &recorder], &["recorder.dir", "is not a directory"]),
        (&["--config", &key], &["workers[0].api_key", "KVLANE_NO_SUCH_KEY"]),
        (&["--api-keys-file", "/nowhere/keys"], &["auth.keys_file", "/nowhere/keys"]),
        (&["--tls-cert-path", "/nowhere/c.pem", "--tls-key-path", "/nowhere/k.pem"], &["tls.certificate"]),
        (&["--timing", "/nowhere/timing.json"], &["routing.timing", "/nowhere/timing.json"]),
    ] {
        let said = ["check", "serve"].map(|command| {
            let args = [&[command, "--port", "0", "--prometheus-port", "0"], args].concat();
            fails(&args, FAILURE, words);
            text(&run(&args).stderr).lines().filter(|line| line.starts_with("error:")).collect::<String>()
        });
        assert_eq!(said[0], said[1].replace("cannot start the gateway: ", ""), "{args:?}");
    }
}

#[test]
fn a_mistake_in_a_file_is_told_once_and_shown() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("bad.yaml");
    std::fs::write(&path, "server:\n  port: 1\n  prot: 2\n").expect("written");
    let path = path.display().to_string();
    for command in ["check", "serve"] {
        let output = run(&[command, "--config", &path]);
        let said = text(&output.stderr);
        assert_eq!(said.matches("unknown field `prot`").count(), 1, "{said}");
        assert_eq!(said.matches("error").count(), 1, "{said}");
        assert!(
            said.contains("bad.yaml") && said.contains("line 3") && said.contains("3 |   prot: 2"),
            "{said}"
        );
    }
}

#[test]
fn a_worker_that_does_not_come_up_is_logged_with_its_cause_and_what_to_do() {
    // Nothing listens on port 1: it is reserved, and below 1024.
    let dead = "http://127.0.0.1:1/v1";
    let mut gateway = Running::start(&[&SERVE[..], &["--worker-urls", dead]].concat());
    gateway.logs(&["WARN", "must not end in /v1", dead]);
    gateway.logs(&[
        "WARN",
        "worker unhealthy",
        "worker=http://127.0.0.1:1 ",
        "Connection refused",
        "start the server",
    ]);
    gateway.signal(&["-TERM"]);
    gateway.ends();
}

#[test]
fn two_signals_with_nothing_in_flight_cut_nothing() {
    let (gateway, _) = Running::serving(&[&SERVE[..], &["--worker-urls", "http://127.0.0.1:1"]].concat());
    gateway.signal(&["-TERM", "-INT"]);
    let log = gateway.ends();
    assert!(log.contains("stopped") && !log.contains("were cut"), "{log}");
}

#[test]
fn a_port_that_is_taken_is_named_with_its_key() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    fails(
        &["serve", "--port", &port, "--prometheus-port", "0"],
        FAILURE,
        &["cannot listen on", &port, "server.port", "--reuse-port"],
    );
    fails(
        &["serve", "--port", "0", "--prometheus-port", &port],
        FAILURE,
        &["cannot listen on", &port, "metrics.port"],
    );
}

#[test]
fn a_worker_given_twice_is_refused_at_the_start() {
    let twice =
        ["serve", "--port", "0", "--prometheus-port", "0", "--worker-urls", "http://h:1", "http://h:1/"];
    fails(&twice, FAILURE, &["http://h:1", "listed twice"]);
}

#[test]
fn serve_and_mock_engine_exit_with_0_on_sigterm() {
    for args in [&SERVE[..], &["mock-engine", "--port", "0"]] {
        let (server, _) = Running::serving(args);
        server.signal(&["-TERM"]);
        server.ends();
    }
}
