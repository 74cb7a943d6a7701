//! Reload of the configuration while requests run.
//!
//! A new configuration is read and checked completely before anything changes: the gateway either applies all of it,
//! or stays as it is and reports why. Keys that only a restart can change keep their values and are named. Requests
//! go on: each uses the configuration that is current when it reads it.
//!
//! Workers are compared with those of the previous configuration. An added entry joins; a removed one drains and
//! leaves, but serves until the workers added in the same reload do; a changed one is replaced, and its predecessor
//! serves until it does. An unchanged entry is left alone, so changes that operators made to workers persist, and so
//! do workers they added.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::PoisonError;

use kvlane_control::controller::WORKERS_MAX;
use kvlane_control::controller::worker_access::check_workers;
use kvlane_fleet::metrics::ReloadLabel;
use kvlane_fleet::routing::PoolOverride;
use kvlane_fleet::timings::Timings;
use kvlane_fleet::tokenize::{Plan, Tokenizers, plan};
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_http::address::worker_name;
use kvlane_http::secret::revealed;
use kvlane_http::tls::Tls;
use kvlane_proxy::auth::Auth;
use serde_json::Value;

use crate::config::Config;
use crate::serve::Serving;

/// One row for each key that needs a restart.
macro_rules! needs_restart {
    ($($name:literal => $($part:ident).+,)+) => {
        /// Keys that only a restart changes. A configuration in which they differ is applied without them.
        pub const NEEDS_RESTART: &[&str] = &[$($name,)+ POOL_TOKENS];

        /// Restores the running values of these keys in `next`, and returns those that differed.
        fn keep(running: &Config, next: &mut Config) -> Vec<&'static str> {
            let mut kept = Vec::new();
            $(if next.$($part).+ != running.$($part).+ {
                next.$($part).+.clone_from(&running.$($part).+);
                kept.push($name);
            })+
            kept
        }
    };
}

needs_restart! {
    "server.host" => server.host,
    "server.port" => server.port,
    "server.reuse_port" => server.reuse_port,
    "server.relay_threads" => server.relay_threads,
    "metrics.host" => metrics.host,
    "metrics.port" => metrics.port,
    "tokens.allow_download" => tokens.allow_download,
    "epp" => epp,
    "replicas.listen" => replicas.listen,
    "replicas.broker" => replicas.broker,
    "replicas.broker_user" => replicas.broker_user,
    "replicas.broker_password" => replicas.broker_password,
    "replicas.broker_token" => replicas.broker_token,
    "replicas.cluster" => replicas.cluster,
    "replicas.interval" => replicas.interval,
    "replicas.bandwidth" => replicas.bandwidth,
    "routing.block_bytes" => routing.block_bytes,
    "routing.seed" => routing.seed,
    "routing.index_snapshot" => routing.index_snapshot,
    "disaggregation.connector" => disaggregation.connector,
    "kv_events" => kv_events,
    "tokens" => tokens,
    "tracing.queue_size" => tracing.queue_size,
    "log" => log,
}

/// Token counting of one pool, which is fixed when the pool is opened.
const POOL_TOKENS: &str = "routing.pools.*.tokenizer";

/// The result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Keys with a changed value.
    pub changed: Vec<String>,
    /// Files that the configuration names and whose content has changed, such as those of keys and certificates.
    pub files: Vec<PathBuf>,
    /// Keys that keep their running value until a restart.
    pub needs_restart: Vec<&'static str>,
    /// Workers that join.
    pub joining: Vec<String>,
    /// Workers that leave.
    pub leaving: Vec<String>,
    /// Workers that are replaced.
    pub replaced: Vec<String>,
}

// === impl Serving ===

impl Serving {
    /// Applies another configuration, completely or not at all.
    ///
    /// # Errors
    /// Why it is invalid; nothing changes.
    pub fn reload(&self, next: Config) -> Result<Reloaded, String> {
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        let read = contents.again(next.files());
        let mut reloaded = self.take_over(next).inspect_err(|why| self.refuse_reload(why))?;
        reloaded.files = contents.changed(&read);
        *contents = read;
        self.fleet.reloads.succeeded(reloaded.needs_restart.clone());
        let unchanged = reloaded == Reloaded::default();
        self.note_reload(if unchanged { "unchanged" } else { "applied" });
        if !reloaded.needs_restart.is_empty() {
            tracing::warn!(keys = ?reloaded.needs_restart, "changed keys that take effect only after a restart");
        }
        let Reloaded { changed, files, joining, leaving, replaced, .. } = &reloaded;
        tracing::info!(?changed, ?files, ?joining, ?leaving, ?replaced, "configuration reloaded");
        Ok(reloaded)
    }

    /// Records that a configuration could not be read: nothing changes.
    pub fn refuse_reload(&self, why: &str) {
        tracing::error!(why, "configuration reload failed; keeping the previous configuration");
        self.fleet.reloads.failed(why);
        self.note_reload("refused");
    }

    fn note_reload(&self, result: &'static str) {
        self.fleet.metrics.gateway.config_reloads.get_or_create(&ReloadLabel { result }).inc();
    }

    fn take_over(&self, mut next: Config) -> Result<Reloaded, String> {
        next.validate().map_err(|error| error.to_string())?;
        let running = self.config().clone();
        let needs_restart = keep_all(&self.fleet.tokenizers, &running, &mut next)?;
        // With the kept values it may be invalid: for example, the new addresses need no keys, but the running ones
        // do.
        next.validate()
            .map_err(|error| format!("{error} (with {needs_restart:?} unchanged until the next restart)"))?;
        let timings = Timings::read(&next.routing).map_err(|error| error.to_string())?;
        let auth = Auth::read(&next.auth).map_err(|error| error.to_string())?;
        let tls = Tls::read(&next.tls).map_err(|error| error.to_string())?;
        let replicas = next.replicas.tls().map_err(|error| error.to_string())?;
        check_workers(&next.workers, next.upstream.api_key.as_ref()).map_err(|error| error.to_string())?;
        let changes = WorkerChanges::between(&running.workers, &next.workers);
        let most = self.controller.workers().len() + changes.come.len() + changes.differ.len();
        if most > WORKERS_MAX {
            return Err(format!(
                "workers: there would be {most}, including those that are draining; the maximum is {WORKERS_MAX}"
            ));
        }
        let changed = differences(&running, &next);

        // No step after this can fail.
        let workers = next.workers.clone();
        if let Some(exchange) = &self.exchange {
            exchange.configure(&next.replicas, replicas);
        }
        self.configure(next, timings, auth, tls);
        // The URLs of workers that a source named first: they are added when those leave.
        let claimed = self.controller.claim(&workers);
        let is_claimed = |spec: &WorkerSpec| claimed.contains(worker_name(&spec.url));
        let mut reloaded = Reloaded { changed, needs_restart, ..Reloaded::default() };
        let mut joining = Vec::new();
        for (spec, differs) in changes
            .come
            .iter()
            .map(|spec| (spec, false))
            .chain(changes.differ.iter().map(|spec| (spec, true)))
            .filter(|(spec, _)| !is_claimed(spec))
        {
            // A worker that an operator has added before is the configured one.
            let there = self.controller.find(&spec.url).filter(|worker| self.controller.retain(worker));
            let done = match there {
                Some(worker) if worker.spec.is(spec) => continue,
                Some(_) => self.controller.replace(spec),
                // A worker that an operator has removed stays removed.
                None if differs => continue,
                None => self.controller.add(spec),
            };
            match done {
                Ok(_) if differs => reloaded.replaced.push(spec.url.clone()),
                Ok(worker) => {
                    joining.push(worker.id);
                    reloaded.joining.push(spec.url.clone());
                }
                Err(error) => {
                    tracing::error!(worker = spec.url, %error, "configured worker could not be added")
                }
            }
        }
        for spec in &changes.go {
            if self.controller.find(&spec.url).is_some_and(|worker| worker.is_found()) {
                continue;
            }
            if self.controller.retire(&spec.url, &joining) {
                reloaded.leaving.push(spec.url.clone());
            }
        }
        self.sources.configure(&self.config().discovery);
        Ok(reloaded)
    }
}

/// Like [`keep`], and also for the token counting of each open pool. Tokenizers of pools that are not open are read.
fn keep_all(
    tokenizers: &Tokenizers,
    running: &Config,
    next: &mut Config,
) -> Result<Vec<&'static str>, String> {
    let mut kept = keep(running, next);
    let models: BTreeSet<String> =
        running.routing.pools.keys().chain(next.routing.pools.keys()).cloned().collect();
    for model in models {
        let counts = |pool: &PoolOverride| (pool.tokenizer.clone(), pool.chat_template.clone());
        let of = |config: &Config| config.routing.pools.get(&model).map(counts).unwrap_or_default();
        let (before, after) = (of(running), of(next));
        if before == after {
            continue;
        }
        if tokenizers.is_settled(&model) {
            let pool = next.routing.pools.entry(model).or_default();
            (pool.tokenizer, pool.chat_template) = before;
            kept.push(POOL_TOKENS);
        } else if let Plan::Local(source) = plan(&next.tokens, &next.routing.pools, &model) {
            let read = tokenizers.load(&source, &next.tokens.limits());
            read.map_err(|why| format!("routing.pools.{model}.tokenizer: {why}"))?;
        }
    }
    kept.dedup();
    Ok(kept)
}

/// The differences between two lists of workers.
#[derive(Debug, Default, PartialEq)]
struct WorkerChanges {
    come: Vec<WorkerSpec>,
    go: Vec<WorkerSpec>,
    differ: Vec<WorkerSpec>,
}

// === impl WorkerChanges ===

impl WorkerChanges {
    fn between(before: &[WorkerSpec], after: &[WorkerSpec]) -> Self {
        let by_url = |list: &[WorkerSpec]| -> BTreeMap<String, WorkerSpec> {
            list.iter().map(|spec| (worker_name(&spec.url).to_owned(), spec.clone())).collect()
        };
        let (before, after) = (by_url(before), by_url(after));
        let mut changes = Self::default();
        for (url, spec) in &after {
            match before.get(url) {
                None => changes.come.push(spec.clone()),
                Some(other) if other.is(spec) => {}
                Some(_) => changes.differ.push(spec.clone()),
            }
        }
        changes
            .go
            .extend(before.into_iter().filter(|(url, _)| !after.contains_key(url)).map(|(_, spec)| spec));
        changes
    }
}

/// The keys in which two configurations differ, as `section.key`.
fn differences(one: &Config, other: &Config) -> Vec<String> {
    let sections = |config: &Config| match revealed(|| serde_json::to_value(config)) {
        Ok(Value::Object(sections)) => sections,
        _ => serde_json::Map::new(),
    };
    let (one, other) = (sections(one), sections(other));
    let mut found = Vec::new();
    for (section, value) in &one {
        let after = other.get(section).unwrap_or(&Value::Null);
        match (value, after) {
            _ if value == after => {}
            (Value::Object(keys), Value::Object(others)) => {
                let names: BTreeSet<&String> = keys.keys().chain(others.keys()).collect();
                let differ = names.into_iter().filter(|name| keys.get(*name) != others.get(*name));
                found.extend(differ.map(|name| format!("{section}.{name}")));
            }
            _ => found.push(section.clone()),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvlane_fleet::worker::config::FeedSpec;

    use super::*;

    #[test]
    fn workers_are_compared_by_url_and_then_by_all_fields() {
        let spec = WorkerSpec::new;
        let described = WorkerSpec { model: Some("m".into()), ..spec("http://b") };
        let fed = WorkerSpec { kv_events: vec![FeedSpec::new("tcp://c:1")], ..spec("http://c") };
        let before = [spec("http://a"), spec("http://b"), fed.clone(), spec("http://d/")];
        let after = [spec("http://d"), described.clone(), spec("http://c/"), spec("http://e")];
        let changes = WorkerChanges::between(&before, &after);
        let expect = WorkerChanges {
            come: vec![spec("http://e")],
            go: vec![spec("http://a")],
            differ: vec![described, spec("http://c/")],
        };
        assert_eq!(changes, expect);
        assert_eq!(WorkerChanges::between(&before, &before), WorkerChanges::default());
    }

    #[test]
    fn differences_are_named_by_their_keys() {
        let one = Config::default();
        let mut other = one.clone();
        other.health.interval = Duration::from_secs(9);
        other.routing.pools.insert("m".into(), PoolOverride::default());
        other.workers.push(WorkerSpec::new("http://a"));
        assert_eq!(differences(&one, &other), ["health.interval", "routing.pools", "workers"]);
        assert_eq!(differences(&one, &one), [""; 0]);
    }
}
