//! Builds one [`Config`] from the command line: defaults, then the file, then `--set`, then flags.
//!
//! A flag is another way to write a key: each has one row in [`flags`].

pub(crate) mod document;
mod flags;
mod help;
mod others;
#[cfg(test)]
mod reference;
mod set;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgAction, ArgMatches, Args, Command, FromArgMatches};
use kvlane_gateway::config::{BYTES_PER_TOKEN, Config, FeedSpec, KeySpec, Log, WorkerSpec};
use kvlane_http::address::worker_name;
use kvlane_http::secret::{KeyHash, Secret, revealed};
use kvlane_proxy::auth::Role;
use kvlane_wire::disaggregation::Connector;
use kvlane_wire::yaml::Document;
use serde_json::{Value, json};

use self::flags::Flag;
use self::set::{KEYS, scalar, with};

/// The flags of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct ConfigArgs {
    /// Flags that are more than a key's value.
    more: MoreArgs,
    /// The keys set by flags, with their values.
    keys: Vec<(&'static Flag, Value)>,
    /// Flags of other routers.
    others: Vec<(&'static str, others::Answer)>,
}

/// A key that a flag sets: the flag as written, the key, the value.
type Said = (String, String, Value);

/// How KV blocks travel between workers.
const CONNECTOR: &str = "disaggregation.connector";

/// Flags that are more than a key's value.
#[derive(Args, Clone, Debug)]
struct MoreArgs {
    /// Configuration file (YAML; `kvlane config` prints one with every key).
    #[arg(long)]
    config: Option<PathBuf>,
    /// Set a key of the configuration, as in `--set routing.queue_size=50`. Repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// URLs of the workers: `http://host:port`, separated by spaces.
    #[arg(long, num_args = 1.., value_name = "URL")]
    worker_urls: Vec<String>,
    /// Split requests between workers that prefill and workers that decode (`disaggregation.connector`: sglang if a
    /// `--prefill` has a bootstrap port, else nixl).
    #[arg(long, visible_alias = "vllm-pd-disaggregation")]
    pd_disaggregation: bool,
    /// A worker that prefills, and its bootstrap port if it is SGLang's. Repeatable.
    #[arg(long, num_args = 1..=2, value_names = ["URL", "BOOTSTRAP_PORT"], action = ArgAction::Append)]
    prefill: Vec<String>,
    /// A worker that decodes. Repeatable.
    #[arg(long, num_args = 1.., value_name = "URL")]
    decode: Vec<String>,
    /// Policy that picks the worker that decodes (`routing.policy`); `--policy` if not set.
    #[arg(long, value_name = "POLICY")]
    decode_policy: Option<String>,
    /// Labels of the pods in Kubernetes that are workers, as in `--selector app=vllm tier=gpu`: all must match. Discovers
    /// workers in Kubernetes.
    #[arg(long, visible_alias = "endpoint-selector", num_args = 1.., value_name = "LABEL=VALUE")]
    selector: Vec<String>,
    /// Labels of the pods that only prefill. Discovers workers in Kubernetes.
    #[arg(long, num_args = 1.., value_name = "LABEL=VALUE")]
    prefill_selector: Vec<String>,
    /// Labels of the pods that decode. Discovers workers in Kubernetes.
    #[arg(long, num_args = 1.., value_name = "LABEL=VALUE")]
    decode_selector: Vec<String>,
    /// The InferencePool whose pods are workers. Discovers workers in Kubernetes.
    #[arg(long, value_name = "NAME")]
    pool_name: Option<String>,
    /// Ports of the pods, several for one engine each, as in `8000,8001`; found out if not set
    /// (`discovery.kubernetes.ports`).
    #[arg(long, visible_alias = "endpoint-target-ports", num_args = 1.., value_delimiter = ',', value_name = "PORT")]
    service_discovery_port: Vec<u16>,
    /// Namespaces of the pods; the gateway's own if not set (`discovery.kubernetes.namespaces`).
    #[arg(long, visible_alias = "pool-namespace", num_args = 1.., value_delimiter = ',', value_name = "NAMESPACE")]
    service_discovery_namespace: Vec<String>,
    /// URLs whose host names are resolved again and again, each address being a worker (`discovery.dns`).
    #[arg(long, num_args = 1.., value_name = "URL")]
    dns_discovery: Vec<String>,
    /// Addresses of the gateway's replicas, of all that a host name has: `kvlane-replicas:3006` (`replicas.peers`).
    #[arg(long, num_args = 1.., value_name = "HOST:PORT")]
    replicas_peer: Vec<String>,
    /// Policy of one model's pool, as in `--pool-policy llama=lmetric`. Repeatable.
    #[arg(long, value_name = "MODEL=POLICY")]
    pool_policy: Vec<String>,
    /// Tokens per block of the prefix index, of 4 bytes each (`routing.block_bytes`) [default: 64].
    #[arg(long)]
    block_size: Option<u32>,
    /// KV event feed of a worker: the n-th address is that of its data-parallel rank n. Repeatable; discovered from
    /// the worker by default.
    #[arg(long, alias = "pd-kv-events", num_args = 1.., value_name = "WORKER=ENDPOINT[,ENDPOINT...]")]
    kv_event_source: Vec<String>,
    /// Replay endpoint of a worker that has a `--kv-event-source`, in the same form.
    #[arg(long, num_args = 1.., value_name = "WORKER=ENDPOINT[,ENDPOINT...]")]
    kv_event_replay_source: Vec<String>,
    /// A key for the client APIs, added to `auth.keys` with the role `user`. The variable or the file is safer: flags
    /// are visible to all users of the machine.
    #[arg(long, env = "KVLANE_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<Secret>,
    /// A key for everything, including the admin API: role `admin`.
    #[arg(long, env = "KVLANE_ADMIN_API_KEY", hide_env_values = true, value_name = "KEY")]
    admin_api_key: Option<Secret>,
    /// The key to send to workers (`upstream.api_key`).
    #[arg(long, env = "KVLANE_WORKER_API_KEY", hide_env_values = true, value_name = "KEY")]
    worker_api_key: Option<Secret>,
    /// Keys for the admin and the client APIs, with a name and a role (`auth.keys`).
    #[arg(long, num_args = 1.., value_name = "ID:NAME:ROLE:KEY")]
    control_plane_api_keys: Vec<Secret>,
    /// A key for the client APIs with the name of a tenant (`auth.keys`). Repeatable.
    #[arg(long, value_name = "TENANT:KEY")]
    tenant_api_key: Vec<Secret>,
    /// Certificates of CAs that sign workers' certificates, in one file (`tls.upstream_ca`).
    #[arg(long, visible_alias = "upstream-ca", num_args = 1.., value_name = "FILE")]
    ca_cert_paths: Vec<String>,
    /// Issuer of signed tokens that are accepted as keys (`auth.jwt`).
    #[arg(long, requires_all = ["jwt_audience", "jwt_jwks_uri"], value_name = "URL")]
    jwt_issuer: Option<String>,
    /// Audience of those tokens.
    #[arg(long, requires = "jwt_issuer", value_name = "NAME")]
    jwt_audience: Option<String>,
    /// URL of the issuer's public keys.
    #[arg(long, requires = "jwt_issuer", value_name = "URL")]
    jwt_jwks_uri: Option<String>,
}

// === impl ConfigArgs: the command line ===

impl Args for ConfigArgs {
    fn augment_args(command: Command) -> Command {
        let own = MoreArgs::augment_args(command).args(flags::args());
        own.mut_args(help::placed).args(others::args())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ConfigArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let more = MoreArgs::from_arg_matches(matches)?;
        Ok(Self { more, keys: flags::given(matches), others: others::given(matches) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

// === impl ConfigArgs ===

impl ConfigArgs {
    /// The configuration file, if any.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.more.config.clone()
    }

    /// Log settings. Errors in the configuration are reported when it is loaded.
    pub(crate) fn log(&self) -> Log {
        self.load().map(|config| config.log).unwrap_or_default()
    }

    /// Logs which flags have no effect, and why.
    pub(crate) fn warn(&self) {
        others::ignored(&self.others).for_each(|said| tracing::warn!("{said}"));
    }

    /// The keys that a command line sets, each with its flag and its value, and remarks on the rest of it.
    ///
    /// # Errors
    /// What it says is wrong.
    pub(crate) fn settings(&self) -> Result<(Vec<Said>, Vec<String>)> {
        let remarks = self.others.iter().map(|(name, answer)| others::said(name, *answer)).collect();
        let config = Self { others: Vec::new(), ..self.clone() }.load()?;
        let mut settings = self.flags()?;
        if let Some((_, _, Value::Array(workers))) = settings.iter_mut().find(|(_, key, _)| key == "workers")
        {
            for (written, worker) in workers.iter_mut().zip(&config.workers) {
                if !worker.kv_events.is_empty() {
                    written["kv_events"] = json!(worker.kv_events);
                }
            }
        }
        if !config.auth.keys.is_empty() {
            let keys = revealed(|| json!(config.auth.keys));
            settings.push(("keys, as hashes".into(), "auth.keys".into(), keys));
        }
        Ok((settings, remarks))
    }

    /// The configuration, validated.
    pub(crate) fn load(&self) -> Result<Config> {
        others::refuse(&self.others)?;
        let mut config = Config::default();
        if let Some(path) = &self.more.config {
            config = read(path)?;
        }
        let mut settings = Vec::new();
        for set in &self.more.set {
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
        let keys = [
            ("api-key", Role::User, &self.more.api_key),
            ("admin-api-key", Role::Admin, &self.more.admin_api_key),
        ];
        for (name, role, key) in keys {
            if let Some(key) = key {
                let key = key.read().map_err(|_| anyhow!("--{name} is empty"))?;
                let sha256 = KeyHash::of(&key);
                config.auth.keys.push(KeySpec::new(name, sha256, role));
            }
        }
        for said in &self.more.control_plane_api_keys {
            let flag = "--control-plane-api-keys";
            let said = said.read().map_err(|_| anyhow!("{flag} is empty"))?;
            let parts: Vec<&str> = said.splitn(4, ':').collect();
            let [id, _, role, key] = parts[..] else { bail!("{flag}: write ID:NAME:ROLE:KEY") };
            let role = serde_json::from_value(json!(role))
                .with_context(|| format!("{flag} {id}: the role is admin or user"))?;
            config.auth.keys.push(KeySpec::new(id, KeyHash::of(key), role));
        }
        for said in &self.more.tenant_api_key {
            let said = said.read().map_err(|_| anyhow!("--tenant-api-key is empty"))?;
            let (tenant, key) = said.split_once(':').context("--tenant-api-key: write TENANT:KEY")?;
            let sha256 = KeyHash::of(key);
            config.auth.keys.push(KeySpec::new(tenant, sha256, Role::User));
        }
        if let Some(key) = &self.more.worker_api_key {
            config.upstream.api_key = Some(key.clone());
        }
        Ok(())
    }

    /// Writes the feeds given by flags to the entries of their workers.
    fn feeds(&self, config: &mut Config) -> Result<()> {
        for said in &self.more.kv_event_source {
            let (worker, endpoints) = feeds_of(config, "--kv-event-source", said)?;
            worker.kv_events = endpoints.map(FeedSpec::new).collect();
        }
        for said in &self.more.kv_event_replay_source {
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

    /// Keys set by flags.
    fn flags(&self) -> Result<Vec<Said>> {
        for (flag, value) in self.keys.iter().filter(|(flag, _)| flag.key.ends_with("policy")) {
            others::check_policy(&flag.said(), value.as_str().unwrap_or_default())?;
        }
        let mut set: Vec<_> =
            self.keys.iter().map(|(flag, value)| (flag.said(), flag.key.to_owned(), value.clone())).collect();
        let mut flag = |name: &str, key: &str, value| set.push((name.to_owned(), key.to_owned(), value));
        for pool in &self.more.pool_policy {
            let (model, name) =
                pool.rsplit_once('=').with_context(|| format!("--pool-policy {pool}: write MODEL=POLICY"))?;
            let mut pools = json!({});
            pools[model] = json!({"policy": name});
            flag("--pool-policy", "routing.pools+", pools);
        }
        self.workers(&mut flag)?;
        self.discovery(&mut flag);
        match &self.more.ca_cert_paths[..] {
            [] => {}
            [file] => flag("--ca-cert-paths", "tls.upstream_ca", json!(file)),
            _ => bail!("--ca-cert-paths: put all certificates into one file"),
        }
        if let (Some(issuer), Some(audience), Some(url)) =
            (&self.more.jwt_issuer, &self.more.jwt_audience, &self.more.jwt_jwks_uri)
        {
            let jwt = json!({"issuer": issuer, "audience": audience, "jwks_url": url, "role": "user"});
            flag("--jwt-issuer", "auth.jwt", jwt);
        }
        if let Some(tokens) = self.more.block_size {
            flag("--block-size", "routing.block_bytes", json!(u64::from(tokens) * BYTES_PER_TOKEN as u64));
        }
        Ok(set)
    }
}

// === impl ConfigArgs: workers ===

impl ConfigArgs {
    /// Keys of workers and of disaggregated serving that flags set, as for [`flags`](Self::flags).
    fn workers(&self, flag: &mut impl FnMut(&str, &str, Value)) -> Result<()> {
        let MoreArgs { worker_urls, prefill, decode, decode_policy, pd_disaggregation, .. } = &self.more;
        let mut workers: Vec<Value> = worker_urls.iter().map(|url| json!({"url": url})).collect();
        let mut has_port = false;
        for said in prefill {
            match said.parse::<u16>() {
                // The second value of the flag.
                Ok(port) => {
                    let last = workers.last_mut().filter(|worker| worker["role"] == "prefill");
                    let worker = last.with_context(|| format!("--prefill {said}: the URL comes first"))?;
                    worker["bootstrap_port"] = json!(port);
                    has_port = true;
                }
                Err(_) if said == "none" => {}
                Err(_) => workers.push(json!({"url": said, "role": "prefill"})),
            }
        }
        workers.extend(decode.iter().map(|url| json!({"url": url, "role": "decode"})));
        if !workers.is_empty() {
            let name = if worker_urls.is_empty() { "--prefill" } else { "--worker-urls" };
            flag(name, "workers", json!(workers));
        }
        if *pd_disaggregation && !self.keys.iter().any(|(flag, _)| flag.key == CONNECTOR) {
            flag("--pd-disaggregation", CONNECTOR, json!(Connector::implied(has_port)));
        }
        if let Some(policy) = decode_policy {
            others::check_policy("--decode-policy", policy)?;
            flag("--decode-policy", "routing.policy", json!(policy));
        }
        Ok(())
    }
}

// === impl ConfigArgs: discovery ===

impl ConfigArgs {
    /// Keys of discovery that flags set, as for [`flags`](Self::flags).
    fn discovery(&self, flag: &mut impl FnMut(&str, &str, Value)) {
        let MoreArgs { selector, prefill_selector, decode_selector, pool_name, .. } = &self.more;
        let selectors = [
            ("--selector", "selector", selector),
            ("--prefill-selector", "prefill_selector", prefill_selector),
            ("--decode-selector", "decode_selector", decode_selector),
        ];
        let mut names_pods = false;
        for (name, key, labels) in selectors.into_iter().filter(|(.., labels)| !labels.is_empty()) {
            names_pods = true;
            flag(name, &format!("discovery.kubernetes.{key}"), json!(labels.join(",")));
        }
        if let Some(pool) = pool_name {
            names_pods = true;
            flag("--pool-name", "discovery.kubernetes.inference_pool", json!(pool));
        }
        if names_pods {
            // Other routers need `--service-discovery` beside these.
            flag("--service-discovery", "discovery.kubernetes.enabled", json!(true));
        }
        let MoreArgs { service_discovery_port: ports, service_discovery_namespace: namespaces, .. } =
            &self.more;
        if !ports.is_empty() {
            flag("--service-discovery-port", "discovery.kubernetes.ports", json!(ports));
        }
        if !namespaces.is_empty() {
            flag("--service-discovery-namespace", "discovery.kubernetes.namespaces", json!(namespaces));
        }
        if !self.more.dns_discovery.is_empty() {
            flag("--dns-discovery", "discovery.dns", json!(self.more.dns_discovery));
        }
        if !self.more.replicas_peer.is_empty() {
            flag("--replicas-peer", "replicas.peers", json!(self.more.replicas_peer));
        }
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

/// The configuration in a file, without flags, validated.
pub(crate) fn of_file(path: &Path) -> Result<Config> {
    let config = read(path)?;
    config.validate().with_context(|| format!("in {}", path.display()))?;
    Ok(config)
}

fn read(path: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    from_yaml(&text).with_context(|| format!("in {}", path.display()))
}

/// Reads a configuration file.
pub(crate) fn from_yaml(text: &str) -> Result<Config> {
    Ok(Document::parse(text)?.listed_by(KEYS).read()?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use kvlane_core::policy::PolicyConfig;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ConfigArgs,
    }

    fn args(flags: &[&str]) -> Result<ConfigArgs> {
        Ok(Line::try_parse_from(["kvlane"].iter().chain(flags))?.args)
    }

    fn load(flags: &[&str]) -> Result<Config> {
        args(flags)?.load()
    }

    fn path(file: &Path) -> &str {
        file.to_str().expect("UTF-8")
    }

    /// Invariant: Every configuration key is in the example file at its default; unknown keys are errors.
    ///
    /// Also held by `what_is_wrong_is_named_with_where_it_was_said`.
    #[test]
    fn the_example_file_shows_every_key_at_its_default() {
        let text = document::example();
        let example = from_yaml(&text).expect("the example is right");
        let expect = Config { workers: example.workers.clone(), ..Config::default() };
        assert_eq!(example, expect);
        let written: Value = serde_saphyr::from_str(&text).expect("YAML");
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
        let set = ["--set", "server.port=2", "--set", "routing.queue_size=2"];
        let config =
            load(&[&["--port", "3", "--config", path(file.path())], &set[..]].concat()).expect("right");
        assert_eq!((config.server.port, config.routing.queue_size, config.routing.receipts), (3, 2, 1));
    }

    #[test]
    fn flags_say_how_faults_are_met() {
        let flags = "--retry-initial-backoff-ms=10 --retry-max-backoff-ms=2500 --retry-backoff-multiplier=2 \
                     --retry-jitter-factor=0.5 --cb-failure-threshold=7 --cb-timeout-duration-secs=30";
        let flags: Vec<&str> = flags.split(' ').collect();
        let Config { retry, breaker, .. } = load(&flags).expect("right");
        assert_eq!((retry.initial_backoff.as_millis(), retry.max_backoff.as_millis()), (10, 2500));
        assert_eq!((retry.backoff_multiplier.get(), retry.jitter.get()), (2.0, 0.5));
        assert_eq!((breaker.failure_threshold, breaker.cooldown_max.as_secs()), (7, 30));
        let off = load(&["--disable-circuit-breaker", "--disable-retries"]).expect("right");
        assert_eq!((off.breaker.failure_threshold, off.retry.max_total_retries), (0, 0));
    }

    #[test]
    fn a_policy_can_be_written_as_its_name_alone() {
        let by_file =
            from_yaml("routing: {policy: lmetric, pools: {a: {policy: roundrobin}}}").expect("right");
        assert_eq!(by_file.routing.policy.name(), "lmetric");
        assert_eq!(by_file.routing.pools["a"].policy.as_ref().map(PolicyConfig::name), Some("round_robin"));
        for key in ["routing.policy", "routing.policy.name"] {
            let config = load(&["--set", &format!("{key}=prefix_aware")]).expect("right");
            assert_eq!(config.routing.policy, PolicyConfig::by_name("prefix_aware").expect("a policy"));
        }
    }

    #[test]
    fn a_pool_can_have_a_policy_of_its_own() {
        let flags = ["--pool-policy", "org/llama=lmetric", "--pool-policy", "b=roundrobin"];
        let config = load(&flags).expect("right");
        let named = |pool: &str| config.routing.pools[pool].policy.as_ref().map(PolicyConfig::name);
        assert_eq!((named("org/llama"), named("b")), (Some("lmetric"), Some("round_robin")));
        assert_eq!(config.routing.policy.name(), "fleet_cost");
    }

    #[test]
    fn flags_say_where_a_workers_ranks_publish() {
        let with = |sources: &[&str], replays: &[&str]| {
            let mut flags = vec!["--worker-urls", "http://a:1", "http://b:1/"];
            for (flag, said) in [("--kv-event-source", sources), ("--kv-event-replay-source", replays)] {
                if !said.is_empty() {
                    flags.push(flag);
                    flags.extend(said);
                }
            }
            load(&flags)
        };
        let config =
            with(&["http://b:1=tcp://b:5557,tcp://b:5558"], &["http://b:1=tcp://b:5657"]).expect("right");
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
            let error = format!("{:#}", with(sources, replays).expect_err(word));
            assert!(error.contains(word), "'{word}' is not in: {error}");
        }
        assert!(!load(&["--no-kv-events"]).expect("right").kv_events.enabled);
    }

    #[test]
    fn flags_of_other_routers_name_the_pods() {
        let discovery = |flags: &str| {
            let flags: Vec<&str> = flags.split(' ').collect();
            load(&flags).map(|config| config.discovery)
        };
        let sglang = "--service-discovery --selector app=vllm tier=gpu --service-discovery-port 8000 \
                      --service-discovery-namespace models";
        let config = discovery(sglang).expect("right").kubernetes;
        assert!(config.enabled);
        assert_eq!(config.selector.as_deref(), Some("app=vllm,tier=gpu"));
        assert_eq!((config.ports, config.namespaces), (vec![8000], vec!["models".to_owned()]));

        let split =
            discovery("--service-discovery --prefill-selector a=p --decode-selector a=d b=c").expect("right");
        assert_eq!(split.kubernetes.prefill_selector.as_deref(), Some("a=p"));
        assert_eq!(split.kubernetes.decode_selector.as_deref(), Some("a=d,b=c"));

        let pool = discovery("--pool-name llama --pool-namespace models").expect("right").kubernetes;
        assert_eq!((pool.enabled, pool.inference_pool.as_deref()), (true, Some("llama")));
        assert_eq!(pool.namespaces, ["models"]);
        let by_labels =
            discovery("--endpoint-selector app=x --endpoint-target-ports 8000,8001").expect("right");
        assert_eq!((by_labels.kubernetes.enabled, by_labels.kubernetes.ports), (true, vec![8000, 8001]));

        let others =
            discovery("--workers-file /w.yaml --dns-discovery http://a.b:1 http://c.d:2").expect("right");
        assert_eq!(others.workers_file.as_deref(), Some(Path::new("/w.yaml")));
        assert_eq!(others.dns, ["http://a.b:1", "http://c.d:2"]);
        assert!(!others.kubernetes.enabled);

        for (flags, words) in [
            ("--service-discovery", ["discovery.kubernetes", "nothing names the pods"]),
            ("--selector a=b --pool-name p", ["discovery.kubernetes", "several keys"]),
            ("--selector a=b --service-discovery-port 0", ["discovery.kubernetes.ports", "0"]),
            ("--dns-discovery vllm:8000", ["discovery.dns[0]", "vllm:8000"]),
            ("--dns-discovery http://10.0.0.1:8000", ["discovery.dns[0]", "no host name"]),
            ("--replicas-peer a:3006", ["replicas.listen", "needs an address"]),
            ("--replicas-listen 0.0.0.0:3006 --replicas-peer a", ["replicas.peers[0]", "HOST:PORT"]),
            ("--replicas-listen localhost", ["replicas.listen", "HOST:PORT"]),
        ] {
            let error = format!("{:#}", discovery(flags).expect_err(flags));
            for word in words {
                assert!(error.contains(word), "{flags}: '{word}' is not in: {error}");
            }
        }
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
        let flags = ["--config", path(file.path()), "--pool-policy", "a=lmetric"];
        let pool = &load(&flags).expect("right").routing.pools["a"];
        assert_eq!(pool.policy.as_ref().map(PolicyConfig::name), Some("lmetric"));
        assert_eq!(pool.tokenizer.as_deref(), Some("estimate"));
    }

    #[test]
    fn what_is_wrong_is_named_with_where_it_was_said() {
        let check = |flags: &[&str], words: &[&str]| {
            let error = format!("{:#}", load(flags).expect_err("wrong"));
            for word in words {
                assert!(error.contains(word), "'{word}' is not in: {error}");
            }
        };
        check(
            &["--set", "routing.queue_sice=1"],
            &["--set routing.queue_sice=1", "unknown field `queue_sice`"],
        );
        check(&["--set", "server.port.x=1"], &["server.port.x"]);
        check(&["--set", "server.port"], &["write section.key=value"]);
        check(&["--set", "routing.policy=best"], &["--set routing.policy=best", "policy 'best'"]);
        check(&["--set", "server.request_timeout=1000y"], &["server.request_timeout", "a year"]);
        assert!(load(&["--policy", "cache_aware", "--balance-rel-threshold", "1"]).is_ok());
        check(
            &["--policy", "cache_aware", "--balance-rel-threshold", "0.5"],
            &["'0.5'", "balance_rel_threshold: 0.5", "must be 1 to"],
        );
        check(
            &["--set", r#"routing.policy={"name": "cache_aware", "cache_threshold": 7}"#],
            &["routing.policy: cache_threshold: 7 is out of range: must be 0 to 1"],
        );
        check(&["--set", r#"retry={"jitter": 2}"#], &["retry.jitter: 2 is out of range: must be 0 to 1"]);
        check(&["--set", "server.relay_threads=100000"], &["server.relay_threads", "1024"]);
        check(&["--set", "retry.jitter=2"], &["retry.jitter", "0 to 1"]);
        check(&["--set", "retry.backoff_multiplier=.nan"], &["retry.backoff_multiplier"]);
        check(&["--set", "retry.budget.share=1.5"], &["retry.budget.share", "0 to 1"]);
        check(&["--set", "breaker.cooldown=0s"], &["breaker.cooldown"]);
        check(&["--set", r#"timeouts.routes={"v1": {}}"#], &["timeouts.routes.v1", "must begin with '/'"]);
        let route = r#"timeouts.routes={"/v1/x": {"request_timeout": "0s"}}"#;
        check(&["--set", route], &["timeouts.routes./v1/x.request_timeout", "out of range"]);
        check(&["--set", "server.port=high"], &["server.port", "not a whole number"]);
        check(&["--set", "tokens.source=best"], &["tokens.source", "unknown variant `best`"]);
        check(
            &["--set", "tokens.source=engine", "--tokenizer-path", "/m"],
            &["tokens.path", "/m", "leave one of them out"],
        );
        let many = json!(vec![json!({"requests_per_minute": 1}); 10_001]);
        check(&["--set", &format!("limits={many}")], &["limits: 10001 is out of range: must be 0 to 10000"]);
        check(&["--set", "server.body_timeout=soon"], &["server.body_timeout"]);
        check(&["--set", "health.interval=0s"], &["health.interval"]);
        check(&["--policy", "best"], &["best", "did you mean"]);
        check(
            &["--pool-policy", "m=best"],
            &["--pool-policy", "routing.pools.m.policy", "'best'", "did you mean"],
        );
        check(&["--worker-urls", "gpu:1"], &["workers[0].url", "gpu:1"]);
        check(&["--worker-urls", "http://a", "http://a/"], &["workers[1].url", "twice"]);
        check(&["--policy", "lmetric", "--cache-threshold", "0.5"], &["--cache-threshold", "unknown field"]);
        check(&["--port", "70000"], &["--port", "server.port: 70000", "0 to 65535"]);
        check(&["--queue-timeout-secs", "1m"], &["--queue-timeout-secs", "not a whole number"]);
        check(&["--config", "/nowhere.yaml"], &["/nowhere.yaml"]);
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
                    let flags = ["--config", path(file.path())];
                    let error = format!("{:#}", load(&flags).expect_err(&place));
                    let (section, key) = place[1..].rsplit_once('/').expect("a key in a section");
                    for word in [&section.replace('/', "."), key] {
                        assert!(error.contains(word), "{place} {value}: '{word}' is not in: {error}");
                    }
                    // YAML's words for numbers that are not finite are no numbers.
                    let why = ["is out of range: must be ", " is not a number", " is not a whole number"]
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
        let keys = ["--api-key=sk-client", "--admin-api-key=sk-admin", "--worker-api-key=sk-workers"];
        let flags = [&["--config", path(file.path()), "--port", "1"], &keys[..]].concat();
        let args = args(&flags).expect("right");
        let config = args.load().expect("right");
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
        let world = |more: &[&str]| load(&[&["--prometheus-host", "0.0.0.0"], more].concat());
        let error = format!("{:#}", world(&[]).expect_err("open"));
        assert!(error.contains("metrics.host") && error.contains("--insecure-admin"), "{error}");
        assert!(world(&["--api-key", "k"]).is_err(), "a client's key does not close the admin API");
        assert!(world(&["--admin-api-key", "k"]).is_ok());
        assert!(world(&["--insecure-admin"]).is_ok());
    }

    #[test]
    fn a_mistake_in_the_file_is_shown_with_its_line() {
        let error = from_yaml("server:\n  port: 1\n  prot: 2\n").expect_err("wrong").to_string();
        assert!(error.contains("prot") && error.contains('3'), "{error}");
    }
}
