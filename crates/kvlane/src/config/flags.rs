//! Flags that set one key: a row each. Help, default and type are those of the key.

use anyhow::{Context, Result, anyhow};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};
use kvlane_core::config::{Key, Kind, Setting as _};
use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use serde_json::{Value, json};

use super::document::{default_of, key_of};
use super::set::{scalar, with};

/// A flag that sets one key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flag {
    /// Its name. One that ends in `-secs` or `-ms` takes a number of them.
    pub(super) name: &'static str,
    /// The key that it sets.
    pub(super) key: &'static str,
    /// Other names.
    pub(super) aliases: [Option<&'static str>; 2],
    /// The variable that sets it, too.
    pub(super) env: Option<&'static str>,
    effect: Effect,
}

/// What a flag does.
#[derive(Clone, Copy, Debug)]
enum Effect {
    /// Sets the key to the given value.
    Value,
    /// Sets the key to this value.
    Switch { to: &'static str, help: &'static str },
    /// Sets the parameter of this policy.
    Parameter { policy: &'static str, help: &'static str },
}

/// The flags, as sglang-router and vllm-router name them.
pub(super) const FLAGS: &[Flag] = &[
    flag("host", "server.host"),
    flag("port", "server.port"),
    flag("reuse-port", "server.reuse_port")
        .switch("true", "Start beside a running kvlane on the same port, which this one succeeds"),
    flag("policy", "routing.policy"),
    flag("cache-threshold", "routing.policy.cache_threshold")
        .or("cache-match-threshold")
        .of("cache_aware", "minimum share of the prompt that must match to place by cache"),
    flag("balance-abs-threshold", "routing.policy.balance_abs_threshold")
        .or("spill-abs-threshold")
        .of("cache_aware", "difference of requests in flight that counts as imbalance"),
    flag("balance-rel-threshold", "routing.policy.balance_rel_threshold")
        .or("spill-rel-threshold")
        .of("cache_aware", "ratio of requests in flight that counts as imbalance"),
    flag("saturation-inflight", "routing.policy.saturation_inflight")
        .of("prefix_aware", "requests in flight at which an endpoint is skipped"),
    flag("timing", "routing.timing"),
    flag("kv-connector", "disaggregation.connector"),
    flag("prefill-policy", "disaggregation.prefill_policy"),
    flag("max-payload-size", "server.max_payload_size"),
    flag("max-concurrent-requests", "routing.max_concurrent_requests"),
    flag("queue-size", "routing.queue_size"),
    flag("queue-timeout-secs", "routing.queue_timeout"),
    flag("request-timeout-secs", "server.request_timeout"),
    flag("header-read-timeout-secs", "server.header_timeout"),
    flag("stream-body-stall-timeout-secs", "server.body_timeout"),
    flag("shutdown-grace-period-secs", "server.shutdown_grace"),
    flag("request-id-headers", "server.request_id_headers"),
    flag("upstream-pool-idle-timeout-secs", "upstream.idle_timeout"),
    flag("prometheus-host", "metrics.host"),
    flag("prometheus-port", "metrics.port"),
    flag("health-check-endpoint", "health.path"),
    flag("health-check-interval-secs", "health.interval"),
    flag("health-check-timeout-secs", "health.timeout"),
    flag("health-failure-threshold", "health.failure_threshold"),
    flag("health-success-threshold", "health.success_threshold"),
    flag("max-worker-retries", "retry.max_worker_retries"),
    flag("max-total-retries", "retry.max_total_retries").or("retry-max-retries"),
    flag("disable-retries", "retry.max_total_retries").switch("0", "Disable retries"),
    flag("retry-initial-backoff-ms", "retry.initial_backoff"),
    flag("retry-max-backoff-ms", "retry.max_backoff"),
    flag("retry-backoff-multiplier", "retry.backoff_multiplier"),
    flag("retry-jitter-factor", "retry.jitter"),
    flag("cb-failure-threshold", "breaker.failure_threshold"),
    flag("cb-timeout-duration-secs", "breaker.cooldown_max"),
    flag("disable-circuit-breaker", "breaker.failure_threshold").switch("0", "Disable circuit breakers"),
    flag("relay-threads", "server.relay_threads"),
    flag("api-keys-file", "auth.keys_file"),
    flag("insecure-admin", "auth.open_admin")
        .switch("true", "Allow the admin API beyond loopback without a key"),
    flag("open-metrics", "auth.open_metrics")
        .switch("true", "Serve /metrics without a key, also beyond loopback"),
    flag("tls-cert-path", "tls.certificate"),
    flag("tls-key-path", "tls.private_key"),
    flag("client-cert-path", "tls.upstream_certificate"),
    flag("client-key-path", "tls.upstream_private_key"),
    flag("log-json", "log.format").switch("json", "Log one JSON object per line"),
    flag("otlp-traces-endpoint", "tracing.endpoint").variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    flag("no-kv-events", "kv_events.enabled").switch("false", "Do not read the KV events of workers"),
    flag("service-discovery", "discovery.kubernetes.enabled")
        .switch("true", "Discover workers in Kubernetes: `--selector` or another flag names the pods"),
    flag("workers-file", "discovery.workers_file"),
    flag("replicas-listen", "replicas.listen"),
    flag("replicas-broker", "replicas.broker"),
    flag("grpc-host", "epp.host"),
    flag("grpc-port", "epp.port"),
    flag("grpc-health-port", "epp.health_port"),
    flag("secure-serving", "epp.secure_serving"),
    flag("observe-responses", "epp.observe_responses"),
    flag("tokenizer-path", "tokens.path").or("model-path").or("model"),
    flag("chat-template", "tokens.chat_template"),
    flag("allow-download", "tokens.allow_download").switch(
        "true",
        "Download a tokenizer that is given by its Hugging Face id and not in the Hub's cache",
    ),
];

const fn flag(name: &'static str, key: &'static str) -> Flag {
    Flag { name, key, aliases: [None; 2], env: None, effect: Effect::Value }
}

/// The flags for the command line.
pub(super) fn args() -> impl Iterator<Item = Arg> {
    let (keys, defaults) = (Config::keys(), json!(Config::default()));
    FLAGS.iter().map(move |flag| flag.arg(&keys, &defaults))
}

/// The flags and variables that a command line has, with the values of their keys.
pub(super) fn given(matches: &ArgMatches) -> Vec<(&'static Flag, Value)> {
    let keys = Config::keys();
    let of = |flag: &'static Flag| match flag.effect {
        Effect::Switch { to, .. } => {
            (matches.value_source(flag.name) == Some(ValueSource::CommandLine)).then(|| (flag, scalar(to)))
        }
        _ => {
            let mut values: Vec<Value> = matches.get_many(flag.name)?.cloned().collect();
            let is_list = is_list(&keys, flag);
            Some((flag, if is_list { json!(values) } else { values.pop()? }))
        }
    };
    FLAGS.iter().filter_map(of).collect()
}

/// Whether a flag takes several values.
fn is_list(keys: &[Key], flag: &Flag) -> bool {
    key_of(keys, flag.key).is_some_and(|key| key.kind == Kind::List)
}

// === impl Flag ===

impl Flag {
    const fn or(self, alias: &'static str) -> Self {
        let aliases = match self.aliases {
            [None, _] => [Some(alias), None],
            [first, _] => [first, Some(alias)],
        };
        Self { aliases, ..self }
    }

    const fn variable(self, env: &'static str) -> Self {
        Self { env: Some(env), ..self }
    }

    const fn of(self, policy: &'static str, help: &'static str) -> Self {
        Self { effect: Effect::Parameter { policy, help }, ..self }
    }

    const fn switch(self, to: &'static str, help: &'static str) -> Self {
        Self { effect: Effect::Switch { to, help }, ..self }
    }

    /// The flag in an error.
    pub(super) fn said(&self) -> String {
        match self.effect {
            Effect::Parameter { policy, .. } => format!("--{} needs --policy {policy}", self.name),
            _ => format!("--{}", self.name),
        }
    }

    /// What it sets its key to, unless it takes a value.
    #[cfg(test)]
    pub(super) fn sets(&self) -> Option<&'static str> {
        match self.effect {
            Effect::Switch { to, .. } => Some(to),
            _ => None,
        }
    }

    /// Its default, as it is written behind the flag.
    fn default(&self, defaults: &Value) -> Option<String> {
        let whole = match self.effect {
            Effect::Switch { .. } => return None,
            Effect::Parameter { policy, .. } => json!({"routing": {"policy": PolicyConfig::by_name(policy)}}),
            Effect::Value => defaults.clone(),
        };
        let default = default_of(&whole, self.key)?;
        let Some(unit) = self.unit() else { return Some(default) };
        let span: humantime_serde::Serde<std::time::Duration> =
            serde_json::from_value(json!(default)).ok()?;
        Some(if unit == "s" { span.as_secs() as u128 } else { span.as_millis() }.to_string())
    }

    fn unit(&self) -> Option<&'static str> {
        let units = [("-secs", "s"), ("-ms", "ms")];
        units.iter().find(|(end, _)| self.name.ends_with(end)).map(|&(_, unit)| unit)
    }

    fn arg(&'static self, keys: &[Key], defaults: &Value) -> Arg {
        let key = key_of(keys, self.key);
        let help = match (self.effect, key) {
            (Effect::Switch { help, .. }, _) => help.to_owned(),
            (Effect::Parameter { policy, help }, _) => format!("{policy}: {help}"),
            (Effect::Value, key) => {
                let doc = key.and_then(|key| key.doc.lines().next()).unwrap_or_default();
                doc.trim_end_matches('.').to_owned()
            }
        };
        let default = self.default(defaults).map(|default| format!(" [default: {default}]"));
        let arg = Arg::new(self.name).long(self.name).help(help + &default.unwrap_or_default());
        let arg = arg.visible_aliases(self.aliases.into_iter().flatten());
        let arg = match self.env {
            Some(env) => arg.env(env),
            None => arg,
        };
        let others = FLAGS.iter().filter(|other| other.key == self.key && other.name != self.name);
        let arg = arg.conflicts_with_all(others.map(|other| other.name));
        match self.effect {
            Effect::Switch { .. } => arg.action(ArgAction::SetTrue),
            _ => {
                let kind = key.map_or(Kind::Any, |key| key.kind);
                let is_number = self.unit().is_some() || matches!(kind, Kind::Integer | Kind::Number);
                let arg = if kind == Kind::List { arg.num_args(1..) } else { arg };
                let arg = arg.allow_negative_numbers(is_number);
                arg.value_name(if is_number { "NUMBER" } else { "VALUE" }).value_parser(move |text: &str| {
                    self.value(kind, text).map_err(|error| format!("{error:#}"))
                })
            }
        }
    }

    /// The key's value for the `text` behind the flag, if it has the key's type.
    fn value(&self, kind: Kind, text: &str) -> Result<Value> {
        let value = match (self.unit(), kind) {
            // Other routers switch it off so.
            (None, Kind::Integer) if self.key == "routing.max_concurrent_requests" && text == "-1" => {
                json!(0)
            }
            (Some(unit), _) => {
                let count: u64 = text.parse().map_err(|_| anyhow!("it is not a whole number"))?;
                json!(format!("{count}{unit}"))
            }
            (None, Kind::Text) => json!(text),
            // Its entries; the whole is checked with the configuration.
            (None, Kind::List) => return Ok(json!(text)),
            (None, _) => scalar(text),
        };
        let mut config = Config::default();
        if let Effect::Parameter { policy, .. } = self.effect {
            config.routing.policy = PolicyConfig::by_name(policy).context("no such policy")?;
        } else if kind == Kind::Any {
            // Which values are right is checked with the whole configuration.
            return Ok(value);
        }
        with(&config, self.key, value.clone())?;
        Ok(value)
    }
}
