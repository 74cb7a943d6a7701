//! A first user's mistakes: each is answered in one line, where the user looks, with what is wrong and what to do.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use crate::program::{Engine, FAILURE, Running, USAGE, kvlane, run, text};

/// An answer without a body.
macro_rules! answer {
    ($status:literal) => {
        concat!("HTTP/1.1 ", $status, " X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    };
}

/// A gateway on free ports.
const SERVE: [&str; 7] = ["serve", "--port", "0", "--prometheus-port", "0", "--relay-threads", "1"];

/// Command lines: arguments, and the words of one line of the answer.
const LINES: &[(&str, &[&str])] = &[
    // Nothing to do.
    ("", &["kvlane serve --worker-urls http://"]),
    // Slips.
    ("sreve", &["similar", "serve"]),
    ("serve --prot 1", &["similar", "--port"]),
    ("serve --worker-url http://a:1", &["similar", "--worker-urls"]),
    ("serve --port abc", &["--port", "abc", "not a whole number"]),
    ("serve --port 70000", &["--port", "70000", "0 to 65535"]),
    ("serve --host everywhere", &["--host", "everywhere", "0.0.0.0"]),
    ("serve --disable-retries --max-total-retries 2", &["--disable-retries", "cannot be used with"]),
    ("serve --log-level loud", &["--log-level loud", "error, warn, info"]),
    ("serve --kv-connector nix", &["nix", "nixl"]),
    ("serve --queue-timeout-secs 1m", &["--queue-timeout-secs", "not a whole number"]),
    // Flags of others.
    ("check --worker-urls http://a:1 --disable-health-check", &["WARN", "probes cannot be switched off"]),
    ("check --worker-urls http://a:1 --max-tree-size 1", &["WARN", "routing.index_memory"]),
    ("check --worker-urls http://a:1 --dp-aware", &["WARN", "ranks are found out"]),
    ("serve --rate-limit-tokens-per-second 1", &["requests_per_minute"]),
    ("serve --mini-lb", &["--policy random"]),
    ("serve --workers http://a:1", &["--workers", "--worker-urls http://HOST:PORT"]),
    ("serve --url http://a:1", &["--worker-urls http://HOST:PORT"]),
    ("serve --static-backends http://a:1", &["--worker-urls http://HOST:PORT"]),
    ("serve --routing-logic roundrobin", &["--routing-logic", "--policy"]),
    ("serve --session-key x", &["hints.session_headers"]),
    ("serve --k8s-label-selector app=vllm", &["--selector LABEL=VALUE"]),
    ("serve --policy manual", &["the nearest is `session_sticky`"]),
    ("serve --tensor-parallel-size 2", &["flag of the engine"]),
    ("serve --verbose", &["--log-level debug"]),
    ("serve --retry-jitter-facto 1", &["similar", "--retry-jitter-factor"]),
    ("serve --fqdn gpu", &["--help"]),
    // Traces that come with kvlane, by another name.
    ("simulate --trace mooncake", &["trace mooncake: neither a file", "`mooncake-conversation`"]),
    (
        "replay http://127.0.0.1:1 --trace mooncake",
        &["--trace", "mooncake: neither a file", "`weka-agentic`"],
    ),
    ("demo --trace mooncake", &["--trace mooncake: neither a file", "`azure-conversation`"]),
    ("trace stats mooncake", &["mooncake: neither a file", "`mooncake-conversation`"]),
    (
        "trace import mooncake --out /nowhere/t.jsonl",
        &["mooncake: neither a file", "`mooncake-conversation`"],
    ),
    (
        "trace sample mooncake --sample-ratio 0.5 --out /nowhere/t.jsonl",
        &["mooncake: neither a file", "`mooncake-conversation`"],
    ),
];

/// Settings: arguments of `check`, and the words of one line of the answer.
const SETTINGS: &[(&[&str], &[&str])] = &[
    (&["--worker-urls", "gpu:8000"], &["workers[0].url", "no scheme", "http://host:port"]),
    (&["--worker-urls", "10.0.0.7"], &["workers[0].url", "no scheme", "http://host:port"]),
    (&["--worker-urls", "ftp://gpu"], &["ftp", "http://host:port"]),
    (&["--worker-urls", "http://gpu:80000"], &["port must be a number from 1 to 65535"]),
    (&["--worker-urls", "http://a:1,http://b:2"], &["workers[0].url"]),
    (&["--worker-urls", "http://a:1", "http://a:1/v1"], &["http://a:1", "listed twice"]),
    (&["--model-path", "Qwen/Qwen3-8B"], &["tokens.path", "Qwen/Qwen3-8B", "--allow-download"]),
    (&["--model-path", "/models/absent"], &["tokens.path", "/models/absent", "model's directory"]),
    (&["--policy", "cache-aware2"], &["did you mean", "`cache_aware`", "docs/guide.md"]),
    (&["--pool-policy", "llama"], &["--pool-policy llama", "MODEL=POLICY"]),
    (&["--cache-threshold", "0.5"], &["--cache-threshold", "--policy cache_aware"]),
    (&["--timing", "gpt-9@h100"], &["routing.timing", "gpt-9@h100", "did you mean"]),
    (&["--set", "server.port"], &["--set server.port", "section.key=value"]),
    (&["--set", "healht.interval=2s"], &["--set healht.interval=2s", "did you mean `health`"]),
    (&["--set", "health.interval=2"], &["health.interval", "write `2s`"]),
    (&["--health-check-interval-secs", "0"], &["health.interval", "1ms to a year"]),
    (&["--prometheus-host", "0.0.0.0"], &["metrics.host", "--admin-api-key", "--insecure-admin"]),
    (&["--config", "/nowhere/kvlane.yaml"], &["cannot read /nowhere/kvlane.yaml"]),
    (
        &["--tls-cert-path", "/nowhere/c.pem", "--tls-key-path", "/nowhere/k.pem"],
        &["tls.certificate", "/nowhere/c.pem"],
    ),
    (&["--tls-cert-path", "/nowhere/c.pem"], &["tls.private_key", "needs its private key"]),
    (&["--upstream-ca", "/nowhere/ca.pem"], &["tls.upstream_ca", "/nowhere/ca.pem"]),
    (&["--api-keys-file", "/nowhere/keys"], &["auth.keys_file", "/nowhere/keys"]),
    (&["--service-discovery"], &["discovery.kubernetes", "nothing names the pods"]),
    (&["--dns-discovery", "vllm:8000"], &["discovery.dns[0]", "vllm:8000"]),
    (&["--replicas-listen", "localhost"], &["replicas.listen", "HOST:PORT"]),
    (&["--kv-event-source", "tcp://gpu:5557"], &["--kv-event-source", "WORKER=ENDPOINT"]),
];

/// Files: the text, and the words of one line of the answer.
const FILES: &[(&str, &[&str])] = &[
    ("health: {interval: 2}", &["mistake.yaml", "health.interval", "write `2s`", "line 1"]),
    ("health: {interval: soon}", &["health.interval", "\"soon\" is not a duration", "`2s`"]),
    ("worker_urls: [http://a:1]", &["worker_urls", "did you mean `workers`"]),
    ("workers: 5", &["workers", "a list of workers, as in `[http://10.0.0.7:8000]`"]),
    ("workers: [{host: gpu}]", &["workers[0].host", "unknown field `host`"]),
    ("workers: [{model: m}]", &["workers[0]", "missing field `url`"]),
    ("server:\n\tport: 1", &["tab", "spaces", "line 2"]),
    ("server:\n  prot: 1", &["server.prot", "did you mean `port`", "line 2"]),
    ("server: {port: 99999}", &["server.port", "0 to 65535"]),
    ("server: {port: \"80a\"}", &["server.port", "not a whole number"]),
    ("server: {max_payload_size: 64MB}", &["server.max_payload_size", "without a unit"]),
    ("server: {host: example.org}", &["server.host", "not an IP address", "0.0.0.0"]),
    ("server: {reuse_port: 'on'}", &["server.reuse_port", "`true`"]),
    ("server: {port: 1}\nserver: {port: 2}", &["server", "twice", "line 2"]),
    ("server: [", &["mistake.yaml", "line 1"]),
    ("routing: {policy: best}", &["routing.policy", "'best'", "did you mean"]),
    ("routing: {policy: {name: cache_aware, cache_treshold: 1}}", &["cache_treshold", "`cache_threshold`"]),
    ("routing: {pools: {m: {tokenizer: org/absent}}}", &["routing.pools.m.tokenizer", "--allow-download"]),
    ("auth: {keys: [{name: ann, sha256: secret}]}", &["auth.keys[0]", "kvlane key hash"]),
    ("log: {format: xml}", &["log.format", "`json`"]),
    (
        "workers: [{url: 'http://a:1', api_key: {env: KVLANE_NO_SUCH_KEY}}]",
        &["workers[0].api_key", "KVLANE_NO_SUCH_KEY"],
    ),
];

/// Workers: what one does with every connection, and the words of the warning.
const WORKERS: &[(&str, &str, &[&str])] = &[
    (answer!("401"), "", &["answered 401", "--worker-api-key", "--api-key is the key of kvlane's clients"]),
    (answer!("403"), "", &["answered 403", "--worker-api-key"]),
    (answer!("404"), "", &["answered 404", "--health-check-endpoint"]),
    (answer!("404"), "/v1/chat/completions", &["answered 404", "ends before /v1"]),
    (answer!("301"), "", &["answered 301", "https://"]),
    (answer!("400"), "", &["answered 400", "https://"]),
    (answer!("503"), "", &["answered 503", "loading"]),
    // An alert of TLS.
    ("\x15\x03\x01\x00\x02\x02\x16", "", &["not HTTP/1.1", "https://"]),
    ("", "", &["before a response", "https://"]),
];

/// Whether one line of the text has all of the words.
#[track_caller]
fn has_line(said: &str, words: &[&str], what: &str) {
    assert!(
        said.lines().any(|line| words.iter().all(|word| line.contains(word))),
        "{what}: no line has {words:?}: {said}"
    );
}

#[test]
fn a_wrong_command_line_is_answered_with_the_right_one() {
    for (line, words) in LINES {
        let output = run(&line.split_whitespace().collect::<Vec<_>>());
        let said = text(&output.stderr);
        let is_taken = words[0] == "WARN";
        assert_eq!(output.status.code() == Some(0), is_taken, "{line}: {said}");
        has_line(&said, words, line);
    }
}

#[test]
fn a_wrong_setting_is_answered_with_its_key_and_what_to_write() {
    for (args, words) in SETTINGS {
        let output = run(&[&["check"], *args].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(FAILURE), "{args:?}: {said}");
        has_line(&said, words, &format!("{args:?}"));
    }
}

#[test]
fn a_wrong_file_is_answered_with_the_key_the_line_and_what_to_write() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("mistake.yaml");
    for (file, words) in FILES {
        std::fs::write(&path, file).expect("written");
        let output = run(&["check", "--config", path.to_str().expect("UTF-8")]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(FAILURE), "{file}: {said}");
        has_line(&said, words, file);
        assert_eq!(said.matches("error").count(), 1, "{file}: {said}");
    }
}

#[test]
fn what_looks_like_a_mistake_and_is_none_is_taken() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("right.yaml");
    for file in ["workers: [http://a:1]", "workers: http://a:1", "metrics: {host: localhost}", ""] {
        std::fs::write(&path, file).expect("written");
        let output = run(&["check", "--host", "localhost", "--config", path.to_str().expect("UTF-8")]);
        assert_eq!(output.status.code(), Some(0), "{file}: {}", text(&output.stderr));
    }
}

/// A server that sends these bytes on every connection, once it has been sent something. Its port.
fn server(bytes: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut some = [0; 4096];
            // The client may have gone.
            let _ = stream.read(&mut some).and_then(|_| stream.write_all(bytes.as_bytes()));
        }
    });
    port
}

/// Runs a gateway with this worker until it has warned of it in these words.
#[track_caller]
fn warns(url: &str, more: &[&str], words: &[&str]) {
    let mut gateway = Running::start(&[&SERVE[..], &["--worker-urls", url], more].concat());
    gateway.logs(&[&["WARN", "worker unhealthy"], words].concat());
}

#[test]
fn a_worker_that_answers_wrongly_is_warned_about_with_the_remedy() {
    for (bytes, path, words) in WORKERS {
        warns(&format!("http://127.0.0.1:{}{path}", server(bytes)), &[], words);
    }
    // TLS towards a port without it.
    let plain = server(answer!("400"));
    warns(&format!("https://127.0.0.1:{plain}"), &[], &["speaks plain HTTP", "write http://"]);
}

#[test]
fn a_worker_that_cannot_be_reached_is_warned_about_with_the_remedy() {
    warns("http://127.0.0.1:1", &[], &["Connection refused", "start the server"]);
    let mut gateway = Running::start(&[&SERVE[..], &["--worker-urls", "http://127.0.0.1:1"]].concat());
    gateway.logs(&["0 of 1 workers ready", "http://127.0.0.1:1", "Connection refused", "start the server"]);
    // RFC 6761: no name below `invalid` exists.
    warns("http://gpu.invalid:8000", &[], &["cannot be resolved", "correct it, or its DNS record"]);
}

#[test]
fn a_worker_whose_certificate_is_not_trusted_is_warned_about_with_the_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let file = |name: &str, content: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, content).expect("written");
        path.display().to_string()
    };
    let (cert, key) = (file("c.pem", made.cert.pem()), file("k.pem", made.signing_key.serialize_pem()));
    let tls = ["--tls-cert-path", &cert, "--tls-key-path", &key];
    let (_worker, line) = Running::serving(&[&SERVE[..], &tls].concat());
    let address = line.split("metrics=").nth(1).expect("its address").trim();
    warns(&format!("https://{address}"), &[], &["certificate", "set tls.upstream_ca (--upstream-ca)"]);
    warns(&format!("https://{address}"), &["--upstream-ca", &cert], &["another name", "tls_server_name"]);
    warns(&format!("http://{address}"), &[], &["https://"]);
}

#[test]
fn a_url_with_v1_is_taken_without_it_and_said_once() {
    let engine = Engine::start(&[]);
    let url = format!("{}/v1", engine.url);
    let mut gateway = Running::start(&[&SERVE[..], &["--worker-urls", &url]].concat());
    gateway.logs(&["WARN", "must not end in /v1", &url]);
    gateway.logs(&["1 of 1 workers ready"]);
    gateway.logs(&["models", "1 endpoint", "cache knowledge"]);
    gateway.logs(&["clients", "/v1", "this machine only", "without a key"]);
    gateway.logs(&["dashboard", "/dashboard"]);
}

#[test]
fn a_gateway_without_workers_says_how_to_add_one() {
    let mut gateway = Running::start(&SERVE);
    gateway.logs(&["no workers", "--worker-urls http://", "/workers -d"]);
}

#[test]
fn a_port_in_use_is_named_with_its_flag() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    for (flags, words) in [
        (["--port", &port, "--prometheus-port", "0"], &["server.port", "--reuse-port"][..]),
        (["--port", "0", "--prometheus-port", &port], &["metrics.port"]),
    ] {
        let output = run(&[&["serve"], &flags[..]].concat());
        let said = text(&output.stderr);
        has_line(&said, &[&["error", "cannot listen on", &port], words].concat(), "a taken port");
    }
}

#[test]
fn engines_of_one_pool_with_other_block_sizes_are_told_apart_by_the_doctor() {
    let [a, b] = ["16", "32"].map(|size| Engine::start(&["--block-size", size]));
    let said = text(&run(&["doctor", "--no-request", &a.url, &b.url]).stdout);
    has_line(&said, &["16 at", "32 at"], "block sizes");
    has_line(&said, &["same --block-size"], "block sizes");
}

#[test]
fn the_doctor_takes_keys_headers_and_a_ca() {
    let url = format!("http://127.0.0.1:{}", server(answer!("401")));
    let doctor = |args: &[&str]| text(&run(&[&["doctor", "--no-request", &url], args].concat()).stdout);
    has_line(&doctor(&[]), &["needs a key", "--worker-api-key"], "a key");
    for (args, words) in [
        (&["--header", "nonsense"][..], &["--header", "NAME: VALUE"][..]),
        (&["--upstream-ca", "/nowhere/ca.pem"], &["--upstream-ca", "/nowhere/ca.pem"]),
    ] {
        let output = run(&[&["doctor", &url], args].concat());
        assert_eq!(output.status.code(), Some(USAGE), "{args:?}");
        has_line(&text(&output.stderr), words, "doctor");
    }
    let echo = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", echo.local_addr().expect("bound"));
    let mut doctor = kvlane(&["doctor", "--no-request", "--header", "X-Tenant: ops", &url]);
    let mut doctor = doctor.stdout(std::process::Stdio::null()).spawn().expect("it starts");
    let (mut stream, _) = echo.accept().expect("a connection");
    let mut head = [0; 4096];
    let count = stream.read(&mut head).expect("a request");
    assert!(text(&head[..count]).contains("X-Tenant: ops\r\n"), "{}", text(&head[..count]));
    drop((stream, echo));
    doctor.wait().expect("it ends");
}

#[test]
fn completions_and_man_pages_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = text(&run(&["completions", shell]).stdout);
        assert!(script.contains("worker-urls") && script.contains("simulate"), "{shell}");
    }
    let script = run(&["completions", "bash"]).stdout;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvlane.bash");
    std::fs::write(&path, script).expect("written");
    let parsed = Command::new("bash").arg("-n").arg(&path).status();
    assert!(parsed.is_ok_and(|status| status.success()), "bash cannot parse its completions");
    let pages = dir.path().join("man1");
    assert_eq!(run(&["man", pages.to_str().expect("UTF-8")]).status.code(), Some(0));
    let page = std::fs::read_to_string(pages.join("kvlane-serve.1")).expect("a page");
    assert!(page.contains(".TH kvlane-serve 1") && page.contains("worker\\-urls"), "{page}");
}

#[test]
fn help_shows_the_main_flags_and_examples_and_help_all_the_rest() {
    let help = |flag| text(&run(&["serve", flag]).stdout);
    let (main, all) = (help("--help"), help("--help-all"));
    assert!(main.lines().count() < 45, "{main}");
    for words in ["--worker-urls", "--help-all", "Examples:", "kvlane serve --worker-urls"] {
        assert!(main.contains(words), "{words}: {main}");
    }
    assert!(!main.contains("--retry-jitter-factor") && all.contains("--retry-jitter-factor"));
    for group in ["Placement and queue:", "Security:", "Discovery of workers:"] {
        assert!(all.contains(&format!("\n{group}\n")), "{group}: {all}");
    }
}

#[test]
fn figures_are_written_to_stdout_with_json_alone() {
    let output = run(&["roofline", "--preset", "llama-3.1-8b@h100", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(serde_json::from_slice::<serde_json::Value>(&output.stdout).is_ok(), "{}", text(&output.stdout));
}

#[test]
fn a_demo_that_is_kept_prints_its_dashboard_first() {
    let mut demo = kvlane(&["demo", "--keep", "--engines", "1"]);
    let mut demo = demo.stdout(std::process::Stdio::piped()).spawn().expect("it starts");
    let (mut line, mut told) = (String::new(), BufReader::new(demo.stdout.take().expect("piped")));
    told.read_line(&mut line).expect("a line");
    let address =
        line.trim().strip_prefix("Dashboard: http://").and_then(|rest| rest.strip_suffix("/dashboard"));
    let address = address.unwrap_or_else(|| panic!("{line}"));
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 307") && answer.contains("location: /dashboard"), "{answer}");
    let ended = Command::new("kill").args(["-TERM", &demo.id().to_string()]).status();
    assert!(ended.is_ok_and(|status| status.success()), "kill runs");
    assert_eq!(demo.wait().expect("it ends").code(), Some(0));
    told.read_to_string(&mut line).expect("the rest");
    assert!(line.contains("curl -N http://") && line.contains("Ctrl-C ends it"), "{line}");
}
