//! Builds one [`Config`] from the command line: defaults, then the file, then `--set`, then flags.
//!
//! A flag is another way to write a key: each has one row in [`ConfigArgs::flags`].

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use kvlane_core::bounded::{AtLeastOne, Share};
use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::{BYTES_PER_TOKEN, Config, FeedSpec, KeySpec, Log, Multiplier, WorkerSpec};
use kvlane_http::address::worker_name;
use kvlane_http::secret::{KeyHash, Secret, revealed};
use kvlane_proxy::auth::Role;
use serde_json::{Value, json};

use crate::yaml;

/// Flags of the configuration.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfigArgs {
    /// Configuration file (YAML; `kvlane config` prints one with every key).
    #[arg(long)]
    config: Option<PathBuf>,
    /// Set a key of the configuration, as in `--set routing.queue_size=50`. Repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// Address of the clients' port.
    #[arg(long)]
    host: Option<IpAddr>,
    /// Port for clients [default: 30000].
    #[arg(long)]
    port: Option<u16>,
    /// URLs of the workers: `http://host:port`, separated by spaces.
    #[arg(long, num_args = 1.., value_name = "URL")]
    worker_urls: Vec<String>,
    /// Placement policy [default: fleet_cost, also called auto].
    #[arg(long)]
    policy: Option<String>,
    /// Policy of one model's pool, as in `--pool-policy llama=lmetric`. Repeatable.
    #[arg(long, value_name = "MODEL=POLICY")]
    pool_policy: Vec<String>,
    /// cache_aware: minimum share of the prompt that must match to place by cache [default: 0.3].
    #[arg(long)]
    cache_threshold: Option<Share>,
    /// cache_aware: difference of requests in flight that counts as imbalance [default: 64].
    #[arg(long)]
    balance_abs_threshold: Option<u32>,
    /// cache_aware: ratio of requests in flight that counts as imbalance [default: 1.5].
    #[arg(long)]
    balance_rel_threshold: Option<AtLeastOne>,
    /// prefix_aware: requests in flight at which an endpoint is skipped [default: 8].
    #[arg(long)]
    saturation_inflight: Option<u32>,
    /// Timing of the engines: a file that `kvlane calibrate` wrote, or `model@gpu` or `model@gpuxN`. A start value;
    /// rates are learned.
    #[arg(long, value_name = "FILE|PRESET")]
    timing: Option<String>,
    /// Tokens per block of the prefix index [default: 64].
    #[arg(long)]
    block_size: Option<u32>,
    /// Maximum request body in bytes.
    #[arg(long)]
    max_payload_size: Option<usize>,
    /// Maximum requests in flight per pool; further ones are queued; 0 is no limit.
    #[arg(long)]
    max_concurrent_requests: Option<u32>,
    /// Maximum queued requests per pool [default: 100].
    #[arg(long)]
    queue_size: Option<u32>,
    /// Timeout of a request in the queue, in seconds [default: 60].
    #[arg(long)]
    queue_timeout_secs: Option<u64>,
    /// Timeout of a whole request, in seconds [default: 1800].
    #[arg(long)]
    request_timeout_secs: Option<u64>,
    /// Address of the metrics and admin port.
    #[arg(long)]
    prometheus_host: Option<IpAddr>,
    /// Port for metrics and the admin API [default: 29000].
    #[arg(long)]
    prometheus_port: Option<u16>,
    /// Path of the health probe [default: /health].
    #[arg(long)]
    health_check_endpoint: Option<String>,
    /// Seconds between two health probes of a worker [default: 2].
    #[arg(long)]
    health_check_interval_secs: Option<u64>,
    /// Timeout of a health probe, in seconds [default: 5].
    #[arg(long)]
    health_check_timeout_secs: Option<u64>,
    /// Failed probes in a row after which a worker is unhealthy [default: 3].
    #[arg(long)]
    health_failure_threshold: Option<u32>,
    /// Successful probes in a row after which it is healthy again [default: 2].
    #[arg(long)]
    health_success_threshold: Option<u32>,
    /// Attempts of one request on one worker before another worker is tried [default: 1].
    #[arg(long)]
    max_worker_retries: Option<u32>,
    /// Maximum retries of one request [default: 5].
    #[arg(long, visible_alias = "retry-max-retries")]
    max_total_retries: Option<u32>,
    /// Disable retries.
    #[arg(long, conflicts_with = "max_total_retries")]
    disable_retries: bool,
    /// Milliseconds before the first retry, if the failed attempt may have cost its worker work [default: 50].
    #[arg(long)]
    retry_initial_backoff_ms: Option<u64>,
    /// Maximum milliseconds before a retry [default: 30000].
    #[arg(long)]
    retry_max_backoff_ms: Option<u64>,
    /// Factor from each pause to the next [default: 1.5].
    #[arg(long)]
    retry_backoff_multiplier: Option<Multiplier>,
    /// Random share by which a pause is longer or shorter [default: 0.2].
    #[arg(long)]
    retry_jitter_factor: Option<Share>,
    /// Circuit breaker: failures in a row after which an endpoint gets no requests for a while [default: 3].
    #[arg(long)]
    cb_failure_threshold: Option<u32>,
    /// Circuit breaker: maximum seconds without requests for an endpoint that fails [default: 60].
    #[arg(long)]
    cb_timeout_duration_secs: Option<u64>,
    /// Disable circuit breakers.
    #[arg(long, conflicts_with = "cb_failure_threshold")]
    disable_circuit_breaker: bool,
    /// Threads that relay requests; 0 is one per core.
    #[arg(long)]
    relay_threads: Option<usize>,
    /// KV event feed of a worker: the n-th address is that of its data-parallel rank n. Repeatable; discovered from
    /// the worker by default.
    #[arg(long, num_args = 1.., value_name = "WORKER=ENDPOINT[,ENDPOINT...]")]
    kv_event_source: Vec<String>,
    /// Replay endpoint of a worker that has a `--kv-event-source`, in the same form.
    #[arg(long, num_args = 1.., value_name = "WORKER=ENDPOINT[,ENDPOINT...]")]
    kv_event_replay_source: Vec<String>,
    /// A key for the client APIs. The variable or `auth.keys` is safer: flags are visible to all users of the
    /// machine.
    #[arg(long, env = "KVLANE_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<Secret>,
    /// A key for everything, including the admin API.
    #[arg(long, env = "KVLANE_ADMIN_API_KEY", hide_env_values = true, value_name = "KEY")]
    admin_api_key: Option<Secret>,
    /// The key to send to workers.
    #[arg(long, env = "KVLANE_WORKER_API_KEY", hide_env_values = true, value_name = "KEY")]
    worker_api_key: Option<Secret>,
    /// A file with one key per line: `name role sha256`, as printed by `kvlane key new`.
    #[arg(long, value_name = "FILE")]
    api_keys_file: Option<PathBuf>,
    /// Allow the admin API beyond loopback without a key.
    #[arg(long)]
    insecure_admin: bool,
    /// Certificate of the gateway, for clients and operators (PEM).
    #[arg(long, value_name = "FILE")]
    tls_cert_path: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE")]
    tls_key_path: Option<PathBuf>,
    /// Collector for traces of requests, in OTLP over HTTP: `http://host:4318`. Without it no traces are sent.
    #[arg(long, env = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", value_name = "URL")]
    otlp_traces_endpoint: Option<String>,
    /// Do not read the KV events of workers.
    #[arg(long)]
    no_kv_events: bool,
    /// The model's tokenizer: its directory, or a tokenizer file in it. Tokens are then counted as the engines count
    /// them.
    #[arg(long, visible_alias = "model-path", value_name = "PATH")]
    tokenizer_path: Option<PathBuf>,
    /// A file with a chat template that replaces the model's own.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
}

// === impl ConfigArgs ===

impl ConfigArgs {
    /// The configuration file, if any.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.config.clone()
    }

    /// Log settings. Errors in the configuration are reported when it is loaded.
    pub(crate) fn log(&self) -> Log {
        self.load().map(|config| config.log).unwrap_or_default()
    }

    /// The configuration, validated.
    pub(crate) fn load(&self) -> Result<Config> {
        let mut config = Config::default();
        if let Some(path) = &self.config {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            config = from_yaml(&text).with_context(|| format!("in {}", path.display()))?;
        }
        let mut settings = Vec::new();
        for set in &self.set {
            let (key, value) =
                set.split_once('=').with_context(|| format!("--set {set}: write section.key=value"))?;
            settings.push((format!("--set {set}"), key.to_owned(), scalar(value)));
        }
        settings.extend(self.flags()?);
        for (said, key, value) in settings {
            config = with(&config, &key, value).with_context(|| said)?;
        }
        self.feeds(&mut config)?;
        self.keys(&mut config)?;
        config.validate()?;
        Ok(config)
    }

    /// The keys given by flags and variables, as hashes.
    fn keys(&self, config: &mut Config) -> Result<()> {
        let keys =
            [("api-key", Role::User, &self.api_key), ("admin-api-key", Role::Admin, &self.admin_api_key)];
        for (name, role, key) in keys {
            if let Some(key) = key {
                let key = key.read().map_err(|_| anyhow!("--{name} is empty"))?;
                let sha256 = KeyHash::of(&key);
                config.auth.keys.push(KeySpec { name: name.into(), sha256, role, trusted: false });
            }
        }
        if let Some(key) = &self.worker_api_key {
            config.upstream.api_key = Some(key.clone());
        }
        Ok(())
    }

    /// Writes the feeds given by flags to the entries of their workers.
    fn feeds(&self, config: &mut Config) -> Result<()> {
        for said in &self.kv_event_source {
            let (worker, endpoints) = feeds_of(config, "--kv-event-source", said)?;
            worker.kv_events = endpoints.map(FeedSpec::new).collect();
        }
        for said in &self.kv_event_replay_source {
            let flag = "--kv-event-replay-source";
            let (worker, endpoints) = feeds_of(config, flag, said)?;
            let mut feeds = worker.kv_events.iter_mut();
            for endpoint in endpoints {
                let Some(feed) = feeds.next() else {
                    bail!("{flag} {said}: this worker has fewer --kv-event-source flags than that");
                };
                feed.replay = Some(endpoint.to_owned());
            }
        }
        Ok(())
    }

    /// Keys set by flags: the flag as written, the key, the value.
    fn flags(&self) -> Result<Vec<(String, String, Value)>> {
        let mut set = Vec::new();
        let mut flag = |name: &str, key: &str, value: Option<Value>| {
            if let Some(value) = value {
                set.push((format!("--{name}"), key.to_owned(), value));
            }
        };
        let secs = |secs: Option<u64>| secs.map(|secs| json!(format!("{secs}s")));
        flag("policy", "routing.policy", self.policy.as_deref().map(policy).transpose()?);
        let mut of_policy = |policy: &str, name: &str, value: Option<Value>| {
            let key = format!("routing.policy.{}", name.replace('-', "_"));
            flag(&format!("{name} needs --policy {policy}"), &key, value);
        };
        of_policy("cache_aware", "cache-threshold", self.cache_threshold.map(|value| json!(value)));
        of_policy("cache_aware", "balance-abs-threshold", self.balance_abs_threshold.map(Value::from));
        of_policy(
            "cache_aware",
            "balance-rel-threshold",
            self.balance_rel_threshold.map(|value| json!(value)),
        );
        of_policy("prefix_aware", "saturation-inflight", self.saturation_inflight.map(Value::from));
        for pool in &self.pool_policy {
            let (model, name) =
                pool.rsplit_once('=').with_context(|| format!("--pool-policy {pool}: write MODEL=POLICY"))?;
            let mut pools = json!({});
            pools[model] = json!({"policy": policy(name)?});
            flag("pool-policy", "routing.pools+", Some(pools));
        }
        flag("timing", "routing.timing", self.timing.clone().map(Value::from));
        flag("host", "server.host", self.host.map(|host| json!(host)));
        flag("port", "server.port", self.port.map(Value::from));
        let workers: Vec<Value> = self.worker_urls.iter().map(|url| json!({"url": url})).collect();
        flag("worker-urls", "workers", (!workers.is_empty()).then_some(Value::Array(workers)));
        let block_bytes = self.block_size.map(|tokens| json!(u64::from(tokens) * BYTES_PER_TOKEN as u64));
        flag("block-size", "routing.block_bytes", block_bytes);
        flag("max-payload-size", "server.max_payload_size", self.max_payload_size.map(Value::from));
        let limit = self.max_concurrent_requests.map(Value::from);
        flag("max-concurrent-requests", "routing.max_concurrent_requests", limit);
        flag("queue-size", "routing.queue_size", self.queue_size.map(Value::from));
        flag("queue-timeout-secs", "routing.queue_timeout", secs(self.queue_timeout_secs));
        flag("request-timeout-secs", "server.request_timeout", secs(self.request_timeout_secs));
        flag("prometheus-host", "metrics.host", self.prometheus_host.map(|host| json!(host)));
        flag("prometheus-port", "metrics.port", self.prometheus_port.map(Value::from));
        flag("health-check-endpoint", "health.path", self.health_check_endpoint.clone().map(Value::from));
        flag("health-check-interval-secs", "health.interval", secs(self.health_check_interval_secs));
        flag("health-check-timeout-secs", "health.timeout", secs(self.health_check_timeout_secs));
        flag(
            "health-failure-threshold",
            "health.failure_threshold",
            self.health_failure_threshold.map(Value::from),
        );
        flag(
            "health-success-threshold",
            "health.success_threshold",
            self.health_success_threshold.map(Value::from),
        );
        flag("max-worker-retries", "retry.max_worker_retries", self.max_worker_retries.map(Value::from));
        flag("max-total-retries", "retry.max_total_retries", self.max_total_retries.map(Value::from));
        flag("disable-retries", "retry.max_total_retries", self.disable_retries.then(|| json!(0)));
        let millis = |millis: Option<u64>| millis.map(|millis| json!(format!("{millis}ms")));
        flag("retry-initial-backoff-ms", "retry.initial_backoff", millis(self.retry_initial_backoff_ms));
        flag("retry-max-backoff-ms", "retry.max_backoff", millis(self.retry_max_backoff_ms));
        let multiplier = self.retry_backoff_multiplier.map(|value| json!(value));
        flag("retry-backoff-multiplier", "retry.backoff_multiplier", multiplier);
        flag("retry-jitter-factor", "retry.jitter", self.retry_jitter_factor.map(|value| json!(value)));
        let threshold = self.cb_failure_threshold.or(self.disable_circuit_breaker.then_some(0));
        flag("cb-failure-threshold", "breaker.failure_threshold", threshold.map(Value::from));
        flag("cb-timeout-duration-secs", "breaker.cooldown_max", secs(self.cb_timeout_duration_secs));
        flag("relay-threads", "server.relay_threads", self.relay_threads.map(Value::from));
        flag("no-kv-events", "kv_events.enabled", self.no_kv_events.then_some(json!(false)));
        flag("api-keys-file", "auth.keys_file", self.api_keys_file.as_ref().map(|path| json!(path)));
        flag("tls-cert-path", "tls.certificate", self.tls_cert_path.as_ref().map(|path| json!(path)));
        flag("tls-key-path", "tls.private_key", self.tls_key_path.as_ref().map(|path| json!(path)));
        flag("otlp-traces-endpoint", "tracing.endpoint", self.otlp_traces_endpoint.clone().map(Value::from));
        flag("insecure-admin", "auth.open_admin", self.insecure_admin.then_some(json!(true)));
        flag("tokenizer-path", "tokens.path", self.tokenizer_path.as_ref().map(|path| json!(path)));
        flag("chat-template", "tokens.chat_template", self.chat_template.as_ref().map(|path| json!(path)));
        Ok(set)
    }
}

/// The worker that `flag` names in `said`, and the given addresses.
fn feeds_of<'a>(
    config: &'a mut Config,
    flag: &str,
    said: &'a str,
) -> Result<(&'a mut WorkerSpec, impl Iterator<Item = &'a str>)> {
    let Some((url, endpoints)) = said.rsplit_once('=') else {
        bail!("{flag} {said}: write WORKER=ENDPOINT, as in http://gpu-1:8000=tcp://gpu-1:5557");
    };
    let same = |worker: &&mut WorkerSpec| worker_name(&worker.url) == worker_name(url);
    let Some(worker) = config.workers.iter_mut().find(same) else {
        bail!("{flag} {said}: '{url}' is not among the workers");
    };
    Ok((worker, endpoints.split(',').map(str::trim)))
}

/// Reads a configuration file.
pub(crate) fn from_yaml(text: &str) -> Result<Config> {
    yaml::read(text)
}

fn policy(name: &str) -> Result<Value> {
    match PolicyConfig::by_name(name) {
        Some(policy) => Ok(serde_json::to_value(policy)?),
        None => bail!("unknown policy '{name}': known are {}", PolicyConfig::NAMES.join(", ")),
    }
}

/// A value after `=`: JSON if it parses, else text.
fn scalar(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// The configuration with one key set. `a.b+` adds entries to the map `a.b`.
fn with(config: &Config, key: &str, value: Value) -> Result<Config> {
    let mut tree = revealed(|| serde_json::to_value(config))?;
    let (path, adds) = key.strip_suffix('+').map_or((key, false), |path| (path, true));
    // Another policy starts with its own default parameters.
    let path = path.strip_suffix("policy.name").map_or(path.to_owned(), |section| format!("{section}policy"));
    let mut at = &mut tree;
    for name in path.split('.') {
        let Value::Object(section) = at else { bail!("{key}: '{name}' is inside a value, not a section") };
        at = section.entry(name).or_insert_with(|| json!({}));
    }
    match (adds, at, value) {
        (true, Value::Object(at), Value::Object(more)) => {
            for (name, value) in more {
                match (at.get_mut(&name), value) {
                    // Other keys of the entry are kept.
                    (Some(Value::Object(entry)), Value::Object(fields)) => entry.extend(fields),
                    (_, value) => _ = at.insert(name, value),
                }
            }
        }
        (_, at, value) => *at = value,
    }
    serde_path_to_error::deserialize(tree).map_err(|error| {
        // The error may be in a key below the one that was set, as in `--set retry={jitter: 2}`.
        let below = error.path().to_string();
        let at = if below.starts_with(key) { &below } else { key };
        anyhow!("{at}: {}", error.inner())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::check::EXAMPLE;

    fn load(args: ConfigArgs) -> Result<Config> {
        args.load()
    }

    /// Invariant: Every configuration key is in the example file at its default; unknown keys are errors.
    ///
    /// Also held by `what_is_wrong_is_named_with_where_it_was_said`.
    #[test]
    fn the_example_file_shows_every_key_at_its_default() {
        let example = from_yaml(EXAMPLE).expect("the example is right");
        let expect = Config { workers: example.workers.clone(), ..Config::default() };
        assert_eq!(example, expect);
        let written: Value = serde_saphyr::from_str(EXAMPLE).expect("YAML");
        let whole = serde_json::to_value(Config::default()).expect("JSON");
        for (section, keys) in whole.as_object().expect("sections") {
            for (key, _) in keys.as_object().into_iter().flatten() {
                assert!(written[section].get(key).is_some(), "{section}.{key} is missing in the example");
            }
        }
    }

    #[test]
    fn flags_win_over_set_and_set_over_the_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(&file, "server: {port: 1}\nrouting: {queue_size: 1, receipts: 1}\n").expect("written");
        let args = ConfigArgs {
            config: Some(file.path().into()),
            set: vec!["server.port=2".into(), "routing.queue_size=2".into()],
            port: Some(3),
            ..ConfigArgs::default()
        };
        let config = load(args).expect("right");
        assert_eq!((config.server.port, config.routing.queue_size, config.routing.receipts), (3, 2, 1));
    }

    #[test]
    fn flags_say_how_faults_are_met() {
        let args = ConfigArgs {
            retry_initial_backoff_ms: Some(10),
            retry_max_backoff_ms: Some(2500),
            retry_backoff_multiplier: Some(Multiplier::of(2.0)),
            retry_jitter_factor: Some(Share::of(0.5)),
            cb_failure_threshold: Some(7),
            cb_timeout_duration_secs: Some(30),
            ..ConfigArgs::default()
        };
        let Config { retry, breaker, .. } = load(args).expect("right");
        assert_eq!((retry.initial_backoff.as_millis(), retry.max_backoff.as_millis()), (10, 2500));
        assert_eq!((retry.backoff_multiplier.get(), retry.jitter.get()), (2.0, 0.5));
        assert_eq!((breaker.failure_threshold, breaker.cooldown_max.as_secs()), (7, 30));
        let off = load(ConfigArgs { disable_circuit_breaker: true, ..ConfigArgs::default() });
        assert_eq!(off.expect("right").breaker.failure_threshold, 0);
    }

    #[test]
    fn a_policy_can_be_written_as_its_name_alone() {
        let by_file =
            from_yaml("routing: {policy: lmetric, pools: {a: {policy: roundrobin}}}").expect("right");
        assert_eq!(by_file.routing.policy.name(), "lmetric");
        assert_eq!(by_file.routing.pools["a"].policy.as_ref().map(PolicyConfig::name), Some("round_robin"));
        for key in ["routing.policy", "routing.policy.name"] {
            let set = vec![format!("{key}=prefix_aware")];
            let config = load(ConfigArgs { set, ..ConfigArgs::default() }).expect("right");
            assert_eq!(config.routing.policy, PolicyConfig::by_name("prefix_aware").expect("a policy"));
        }
    }

    #[test]
    fn a_pool_can_have_a_policy_of_its_own() {
        let pool_policy = vec!["org/llama=lmetric".into(), "b=roundrobin".into()];
        let config = load(ConfigArgs { pool_policy, ..ConfigArgs::default() }).expect("right");
        let named = |pool: &str| config.routing.pools[pool].policy.as_ref().map(PolicyConfig::name);
        assert_eq!((named("org/llama"), named("b")), (Some("lmetric"), Some("round_robin")));
        assert_eq!(config.routing.policy.name(), "fleet_cost");
    }

    #[test]
    fn flags_say_where_a_workers_ranks_publish() {
        let args = |sources: &[&str], replays: &[&str]| ConfigArgs {
            worker_urls: vec!["http://a:1".into(), "http://b:1/".into()],
            kv_event_source: sources.iter().map(|&text| text.into()).collect(),
            kv_event_replay_source: replays.iter().map(|&text| text.into()).collect(),
            ..ConfigArgs::default()
        };
        let config = load(args(&["http://b:1=tcp://b:5557,tcp://b:5558"], &["http://b:1=tcp://b:5657"]))
            .expect("right");
        assert_eq!(config.workers[0].kv_events, []);
        let first = FeedSpec { replay: Some("tcp://b:5657".into()), ..FeedSpec::new("tcp://b:5557") };
        assert_eq!(config.workers[1].kv_events, [first, FeedSpec::new("tcp://b:5558")]);
        for (sources, replays, word) in [
            (&["tcp://b:5557"][..], &[][..], "WORKER=ENDPOINT"),
            (&["http://c:1=tcp://b:5557"], &[], "not among the workers"),
            (&["http://b:1=b:5557"], &[], "workers[1].kv_events[0].endpoint"),
            (&["http://b:1="], &[], "workers[1].kv_events[0].endpoint"),
            (&[], &["http://b:1=tcp://b:5657"], "fewer --kv-event-source"),
        ] {
            let error = format!("{:#}", load(args(sources, replays)).expect_err(word));
            assert!(error.contains(word), "'{word}' is not in: {error}");
        }
        let off = load(ConfigArgs { no_kv_events: true, ..ConfigArgs::default() }).expect("right");
        assert!(!off.kv_events.enabled);
    }

    #[test]
    fn a_worker_in_a_file_has_one_feed_or_several() {
        let read = |text: &str| from_yaml(&format!("workers: [{{url: 'http://a', kv_events: {text}}}]"));
        let feeds = |text: &str| read(text).expect("right").workers[0].kv_events.clone();
        let one = FeedSpec::new("tcp://a:1");
        assert_eq!(feeds("{endpoint: 'tcp://a:1'}"), std::slice::from_ref(&one));
        assert_eq!(
            feeds("[{endpoint: 'tcp://a:1'}, {endpoint: 'tcp://a:2'}]"),
            [one, FeedSpec::new("tcp://a:2")]
        );
        let error = format!("{:#}", read("{endpoints: 1}").expect_err("wrong"));
        assert!(error.contains("unknown field"), "{error}");
    }

    #[test]
    fn a_pools_policy_leaves_its_tokenizer_as_the_file_says() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(&file, "routing: {pools: {a: {tokenizer: estimate}}}\n").expect("written");
        let pool_policy = vec!["a=lmetric".into()];
        let args = ConfigArgs { config: Some(file.path().into()), pool_policy, ..ConfigArgs::default() };
        let pool = &load(args).expect("right").routing.pools["a"];
        assert_eq!(pool.policy.as_ref().map(PolicyConfig::name), Some("lmetric"));
        assert_eq!(pool.tokenizer.as_deref(), Some("estimate"));
    }

    #[test]
    fn what_is_wrong_is_named_with_where_it_was_said() {
        let check = |args: ConfigArgs, words: &[&str]| {
            let error = format!("{:#}", load(args).expect_err("wrong"));
            for word in words {
                assert!(error.contains(word), "'{word}' is not in: {error}");
            }
        };
        let set = |text: &str| ConfigArgs { set: vec![text.into()], ..ConfigArgs::default() };
        check(set("routing.queue_sice=1"), &["--set routing.queue_sice=1", "unknown field `queue_sice`"]);
        check(set("server.port.x=1"), &["server.port.x"]);
        check(set("server.port"), &["write section.key=value"]);
        check(set("routing.policy=best"), &["--set routing.policy=best", "policy 'best'"]);
        check(set("server.request_timeout=1000y"), &["server.request_timeout", "a year"]);
        let of_cache_aware = ConfigArgs { policy: Some("cache_aware".into()), ..ConfigArgs::default() };
        let balance_rel_threshold = Some(AtLeastOne::of(1.0));
        assert!(load(ConfigArgs { balance_rel_threshold, ..of_cache_aware }).is_ok());
        check(
            set(r#"routing.policy={"name": "cache_aware", "cache_threshold": 7}"#),
            &["routing.policy: cache_threshold: 7 is out of range: must be 0 to 1"],
        );
        check(set(r#"retry={"jitter": 2}"#), &["retry.jitter: 2 is out of range: must be 0 to 1"]);
        check(set("server.relay_threads=100000"), &["server.relay_threads", "1024"]);
        check(set("retry.jitter=2"), &["retry.jitter", "0 to 1"]);
        check(set("retry.backoff_multiplier=.nan"), &["retry.backoff_multiplier"]);
        check(set("retry.budget.share=1.5"), &["retry.budget.share", "0 to 1"]);
        check(set("breaker.cooldown=0s"), &["breaker.cooldown"]);
        check(set(r#"timeouts.routes={"v1": {}}"#), &["timeouts.routes.v1", "must begin with '/'"]);
        let route = r#"timeouts.routes={"/v1/x": {"request_timeout": "0s"}}"#;
        check(set(route), &["timeouts.routes./v1/x.request_timeout", "out of range"]);
        check(set("server.port=high"), &["server.port", "invalid type"]);
        check(set("tokens.source=best"), &["tokens.source", "unknown variant `best`"]);
        let args = ConfigArgs {
            set: vec!["tokens.source=engine".into()],
            tokenizer_path: Some("/m".into()),
            ..ConfigArgs::default()
        };
        check(args, &["tokens.path", "/m", "leave one of them out"]);
        check(set("server.body_timeout=soon"), &["server.body_timeout"]);
        check(set("health.interval=0s"), &["health.interval"]);
        check(
            ConfigArgs { policy: Some("best".into()), ..ConfigArgs::default() },
            &["best", "cache_aware, prefix_aware"],
        );
        check(
            ConfigArgs { worker_urls: vec!["gpu:1".into()], ..ConfigArgs::default() },
            &["workers[0].url", "gpu:1"],
        );
        let twice = vec!["http://a".into(), "http://a/".into()];
        check(ConfigArgs { worker_urls: twice, ..ConfigArgs::default() }, &["workers[1].url", "twice"]);
        let args = ConfigArgs {
            policy: Some("lmetric".into()),
            cache_threshold: Some(Share::of(0.5)),
            ..ConfigArgs::default()
        };
        check(args, &["--cache-threshold", "unknown field"]);
        check(
            ConfigArgs { config: Some("/nowhere.yaml".into()), ..ConfigArgs::default() },
            &["/nowhere.yaml"],
        );
    }

    /// The paths of all fractional numbers.
    fn floats(tree: &Value, place: &str) -> Vec<String> {
        let below = |(name, value): (String, &Value)| floats(value, &format!("{place}/{name}"));
        match tree {
            Value::Number(number) if number.is_f64() => vec![place.to_owned()],
            Value::Object(fields) => {
                fields.iter().map(|(name, value)| (name.clone(), value)).flat_map(below).collect()
            }
            Value::Array(values) => {
                values.iter().enumerate().map(|(n, value)| (n.to_string(), value)).flat_map(below).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Invariant: No fractional number of the configuration is outside its bounds, by file, flag or reload.
    ///
    /// Also held by `no_reload_takes_a_number_that_is_not_within_its_bounds`,
    /// `a_number_is_taken_exactly_if_it_is_within_its_bounds`.
    ///
    /// Every fractional number of the configuration, including those of every policy: if it is not finite or far out
    /// of bounds, the file is rejected with the key, the value and the bounds.
    #[test]
    fn no_number_is_taken_that_is_not_within_its_bounds() {
        let mut seen = std::collections::BTreeSet::new();
        for policy in PolicyConfig::NAMES {
            let mut config = Config::default();
            config.routing.policy = PolicyConfig::by_name(policy).expect("a policy");
            let tree = serde_json::to_value(&config).expect("JSON");
            for place in floats(&tree, "") {
                let mut marked = tree.clone();
                *marked.pointer_mut(&place).expect("it is there") = json!("@");
                for value in [".nan", "-.nan", ".inf", "-.inf", "-0.001", "1.1e9"] {
                    let text = marked.to_string().replace(r#""@""#, value);
                    let file = tempfile::NamedTempFile::new().expect("a file");
                    std::fs::write(&file, text).expect("written");
                    let args = ConfigArgs { config: Some(file.path().into()), ..ConfigArgs::default() };
                    let error = format!("{:#}", load(args).expect_err(&place));
                    let (section, key) = place[1..].rsplit_once('/').expect("a key in a section");
                    for word in [&section.replace('/', "."), key] {
                        assert!(error.contains(word), "{place} {value}: '{word}' is not in: {error}");
                    }
                    // YAML's words for numbers that are not finite are no numbers.
                    let why = ["is out of range: must be ", "invalid type"]
                        .into_iter()
                        .any(|why| error.contains(why));
                    assert!(why, "{place} {value}: {error}");
                }
                seen.insert(place);
            }
        }
        for place in [
            "/retry/backoff_multiplier",
            "/retry/jitter",
            "/retry/budget/share",
            "/retry/budget/per_second",
            "/hedge/budget/share",
            "/tracing/sample_ratio",
            "/routing/policy/cache_threshold",
            "/routing/policy/window_s",
        ] {
            assert!(seen.contains(place), "{place} is not among {seen:?}");
        }
    }

    #[test]
    fn keys_are_kept_through_flags_and_never_printed() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let hash = KeyHash::of("k-file").to_hex();
        let text = format!(
            "auth: {{keys: [{{name: ann, sha256: {hash}}}]}}\n\
             workers: [{{url: 'http://a', api_key: sk-worker}}, {{url: 'http://b', api_key: {{env: HOME}}}}]\n"
        );
        std::fs::write(&file, text).expect("written");
        let args = ConfigArgs {
            config: Some(file.path().into()),
            port: Some(1),
            api_key: Some(Secret::new("sk-client")),
            admin_api_key: Some(Secret::new("sk-admin")),
            worker_api_key: Some(Secret::new("sk-workers")),
            ..ConfigArgs::default()
        };
        let config = load(args.clone()).expect("right");
        assert_eq!(config.workers[0].api_key, Some(Secret::new("sk-worker")), "as it was before the flags");
        assert_eq!(config.upstream.api_key, Some(Secret::new("sk-workers")));
        let keys: Vec<_> = config.auth.keys.iter().map(|key| (&*key.name, key.sha256, key.role)).collect();
        let expect = [
            ("ann", KeyHash::of("k-file"), Role::User),
            ("api-key", KeyHash::of("sk-client"), Role::User),
            ("admin-api-key", KeyHash::of("sk-admin"), Role::Admin),
        ];
        assert_eq!(keys, expect);
        let shown = [format!("{args:?} {config:?}"), serde_json::to_string(&config).expect("JSON")];
        for shown in shown {
            assert!(!shown.contains("sk-") && !shown.contains(&hash[..16]), "{shown}");
        }
        assert!(
            serde_json::to_string(&config).expect("JSON").contains(r#"{"env":"HOME"}"#),
            "a place may be shown"
        );
    }

    #[test]
    fn the_admin_api_does_not_listen_to_the_world_without_a_key() {
        let world = ConfigArgs { prometheus_host: "0.0.0.0".parse().ok(), ..ConfigArgs::default() };
        let error = format!("{:#}", load(world.clone()).expect_err("open"));
        assert!(error.contains("metrics.host") && error.contains("--insecure-admin"), "{error}");
        let users = ConfigArgs { api_key: Some(Secret::new("k")), ..world.clone() };
        assert!(load(users).is_err(), "a client's key does not close the admin API");
        let admins = ConfigArgs { admin_api_key: Some(Secret::new("k")), ..world.clone() };
        assert!(load(admins).is_ok());
        assert!(load(ConfigArgs { insecure_admin: true, ..world }).is_ok());
    }

    #[test]
    fn a_mistake_in_the_file_is_shown_with_its_line() {
        let error = from_yaml("server:\n  port: 1\n  prot: 2\n").expect_err("wrong").to_string();
        assert!(error.contains("prot") && error.contains('3'), "{error}");
    }
}
