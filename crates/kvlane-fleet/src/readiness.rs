//! Readiness: whether new requests should be sent to this gateway.
//!
//! At start it waits until the fleet is known: sources of workers have published, workers have been probed, and their
//! KV event feeds have caught up; then an older replica's snapshot has arrived, if one is reached; each for a limited
//! time. From then on an endpoint that takes requests is enough. The HTTP path `/readiness` and gRPC health checks report
//! the same verdict.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvlane_core::cache_accuracy::Feed;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::Fleet;
use crate::replicas::Snapshot;

/// How often the verdict is computed anew for those that watch it.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time from the start in which an older replica is reached, if there is one: names are resolved and connections are
/// opened within milliseconds.
const REACH_WITHIN: Duration = Duration::from_secs(1);
/// Most unmet conditions that are listed; the others are counted.
const LISTED_MAX: usize = 16;

/// How long readiness waits at start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// For the first probes of workers, and for KV event feeds (`health.sync_timeout`).
    pub workers: Duration,
    /// For sources of workers (`discovery.sync_timeout`).
    pub sources: Duration,
    /// For the snapshot of an older replica, from when the workers are known (`replicas.sync_timeout`); zero without
    /// replicas.
    pub snapshot: Duration,
}

/// The start of a gateway, and the last verdict.
pub struct Start {
    began: Instant,
    /// When sources and workers were known, or given up.
    known: OnceLock<Instant>,
    /// The workers of the configuration have been added.
    populated: AtomicBool,
    /// Every worker of the start has a result of its first probe, or is not waited for any more.
    probed: watch::Sender<bool>,
    /// Nothing of the start is waited for any more.
    complete: AtomicBool,
    verdict: watch::Sender<bool>,
}

/// The verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Whether new requests should be sent here.
    pub ready: bool,
    /// The gateway is shutting down.
    pub stopping: bool,
    /// Conditions that are not met: readiness waits for them.
    pub waits_for: Vec<Unmet>,
    /// Conditions of the start that are not met and that are not waited for any more.
    pub given_up: Vec<Unmet>,
}

/// A condition that is not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmet {
    /// Its kind: `endpoint`, `discovery`, `worker`, `kv_events` or `snapshot`.
    pub what: &'static str,
    /// The source, worker or feed.
    pub name: String,
    /// Why it is not met, if that is known.
    pub problem: Option<String>,
}

// === impl Start ===

impl Default for Start {
    fn default() -> Self {
        let (began, complete) = (Instant::now(), AtomicBool::new(false));
        let (probed, verdict) = (watch::Sender::new(false), watch::Sender::new(false));
        let populated = AtomicBool::new(false);
        Self { began, known: OnceLock::new(), populated, probed, complete, verdict }
    }
}

impl Start {
    /// Whether it is over.
    fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }

    /// Whether the workers of the start are known, or given up.
    pub fn is_known(&self) -> bool {
        self.known.get().is_some()
    }

    /// The workers of the configuration have been added, and its sources of workers are known.
    pub fn populate(&self) {
        self.populated.store(true, Ordering::Release);
    }

    /// Waits until every worker of the start has a result of its first probe, or is not waited for any more.
    pub fn probed(&self) -> impl Future<Output = ()> + use<> {
        let mut probed = self.probed.subscribe();
        async move {
            // The fleet outlives it, or the gateway has ended.
            let _ = probed.wait_for(|probed| *probed).await;
        }
    }

    /// Whether the gateway is ready, for those that report each change.
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.verdict.subscribe()
    }
}

// === impl Fleet ===

impl Fleet {
    /// Whether new requests should be sent to this gateway, and what it waits for.
    pub fn readiness(&self) -> Readiness {
        let stopping = self.stopping.load(Ordering::Relaxed);
        let Bounds { workers, sources, snapshot } = self.settings().start;
        let (mut waits_for, mut given_up) = (Vec::new(), Vec::new());
        if !self.start.is_complete() {
            let passed = self.start.began.elapsed();
            let mut note = |unmet: Vec<Unmet>, within: Duration| {
                if passed < within { waits_for.extend(unmet) } else { given_up.extend(unmet) }
            };
            note(self.sources_awaited(), sources);
            note(self.workers_awaited(), workers);
            if waits_for.is_empty() && self.start.populated.load(Ordering::Acquire) {
                self.start.probed.send_if_modified(|before| !std::mem::replace(before, true));
            }
        }
        // With a timeout, requests for an empty pool are kept until it has an endpoint: they must be able to arrive.
        let keeps_requests = !self.settings().routing.empty_pool_timeout.is_zero();
        let serves = || self.pools().iter().any(|pool| pool.takes_requests());
        if !keeps_requests && !serves() {
            let problem = Some("no endpoint takes requests".to_owned());
            waits_for.push(Unmet { what: "endpoint", name: String::new(), problem });
        }
        if waits_for.is_empty() && !self.start.is_complete() {
            let known = self.start.known.get_or_init(Instant::now);
            let reaches = self.start.began.elapsed() < REACH_WITHIN.min(snapshot);
            match self.snapshot_awaited(reaches) {
                Some(unmet) if known.elapsed() < snapshot => waits_for.push(unmet),
                unmet => given_up.extend(unmet.filter(|_| !snapshot.is_zero())),
            }
        }
        let settled = waits_for.is_empty();
        if settled && !stopping && !self.start.complete.swap(true, Ordering::Relaxed) {
            let after_s = self.start.began.elapsed().as_secs_f64();
            let without: Vec<String> = given_up.iter().take(LISTED_MAX).map(Unmet::to_string).collect();
            match given_up.len() {
                0 => tracing::info!(after_s, "ready"),
                unmet => tracing::warn!(after_s, unmet, ?without, "ready, without waiting any longer"),
            }
        }
        let ready = settled && !stopping;
        self.start.verdict.send_if_modified(|before| std::mem::replace(before, ready) != ready);
        Readiness { ready, stopping, waits_for, given_up }
    }

    /// Why no endpoint is ready for `model`, and what to do: the problem of the first worker that is down and may serve
    /// it, or that there are no workers. None if the reason is another one. With an empty name, any worker may.
    pub fn why_none_is_ready(&self, model: &str) -> Option<String> {
        let workers = self.workers();
        if workers.is_empty() {
            return Some("kvlane has no workers: add one with --worker-urls or POST /workers".into());
        }
        workers
            .values()
            .find_map(|worker| Some(format!("worker {}: {}", worker.url, worker.problem_with(model)?)))
    }

    /// The gateway accepts no new clients and ends soon: it is not ready any more.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.readiness();
    }

    /// Keeps the verdict up to date for those that [watch](Start::watch) it.
    pub async fn keep_readiness(&self) {
        loop {
            self.readiness();
            for pool in self.pools() {
                if let Some(decoders) = pool.decoders() {
                    pool.logged_side.log(&pool.model, &decoders);
                }
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Sources that have not published yet, or whose workers have not been added.
    fn sources_awaited(&self) -> Vec<Unmet> {
        let sources = self.discovery.sources();
        let statuses = sources.iter().map(|source| (source.name(), source.status()));
        let silent = statuses.filter(|(_, status)| !status.applied);
        silent
            .map(|(name, status)| Unmet { what: "discovery", name: name.into(), problem: status.problem })
            .collect()
    }

    /// The snapshot of an older replica that was reached, or may still be.
    fn snapshot_awaited(&self, reaches: bool) -> Option<Unmet> {
        let problem = if self.replicas.await_snapshot() {
            "an older replica has not sent all of it"
        } else if reaches && self.replicas.snapshot() == Snapshot::None {
            "no older replica was reached so far"
        } else {
            return None;
        };
        Some(Unmet { what: "snapshot", name: String::new(), problem: Some(problem.into()) })
    }

    /// Workers without the result of a first probe, and KV event feeds of healthy workers that have not caught up.
    fn workers_awaited(&self) -> Vec<Unmet> {
        let workers = self.workers();
        let unknown = workers.values().filter(|worker| {
            let state = worker.state();
            !state.healthy && !state.leaving && state.problem.is_none()
        });
        let mut unmet: Vec<Unmet> = unknown
            .map(|worker| Unmet { what: "worker", name: worker.url.to_string(), problem: None })
            .collect();
        drop(workers);
        for (_, endpoint) in self.snapshot().endpoints() {
            let Some(feed) = endpoint.feed.as_ref().filter(|_| endpoint.worker.state().healthy) else {
                continue;
            };
            let seen = feed.seen();
            let catches_up = match seen.state {
                Feed::Syncing => true,
                // The first attempt to subscribe has had no result yet.
                Feed::Absent => seen.problem.is_none(),
                Feed::Live | Feed::Refused => false,
            };
            if catches_up {
                unmet.push(Unmet { what: "kv_events", name: feed.name.to_string(), problem: seen.problem });
            }
        }
        unmet
    }
}

// === impl Readiness ===

impl Readiness {
    /// What is waited for, for operators.
    pub fn describe_waits(&self) -> Value {
        list(&self.waits_for)
    }

    /// What of the start is not waited for any more, for operators.
    pub fn describe_given_up(&self) -> Value {
        list(&self.given_up)
    }
}

fn list(unmet: &[Unmet]) -> Value {
    let entries = unmet.iter().take(LISTED_MAX);
    let mut listed: Vec<Value> = entries
        .map(|Unmet { what, name, problem }| json!({"what": what, "name": name, "problem": problem}))
        .collect();
    if unmet.len() > LISTED_MAX {
        let more = format!("and {} more", unmet.len() - LISTED_MAX);
        listed.push(json!({"what": "more", "name": more, "problem": null}));
    }
    listed.into()
}

impl std::fmt::Display for Unmet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, name, problem } = self;
        write!(f, "{what} {name}: {}", problem.as_deref().unwrap_or("no result yet"))
    }
}
