//! Discovery: workers that something outside of the configuration names, such as Kubernetes, DNS or a file.
//!
//! A source publishes all that it knows, each time it changes, through its [`Source`]. Control keeps the workers that
//! it has added for a source equal to what the source published last. A source that cannot be reached publishes
//! nothing: the fleet stays as it was, and [`Status`] says how old the knowledge is.

pub mod config;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use kvlane_core::time::Nanos;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::worker::config::WorkerSpec;

/// The source that watches a Kubernetes API server.
pub const KUBERNETES: &str = "kubernetes";
/// The source that resolves host names.
pub const DNS: &str = "dns";
/// The source that reads a file.
pub const FILE: &str = "file";

/// A worker that a source names.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Identifies the engine behind the URL, such as a pod's UID and port. The same URL under another key is another
    /// engine, with an empty cache.
    pub key: String,
    /// The worker.
    pub spec: WorkerSpec,
    /// It is about to end and takes no new requests.
    pub terminating: bool,
}

/// All workers that a source names at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// The workers, each URL once.
    pub workers: Vec<Target>,
    /// What was left out and why, a sentence each. For operators.
    pub problems: Vec<String>,
}

/// The end of a source at which it publishes.
#[derive(Clone)]
pub struct Source {
    shared: Arc<Shared>,
    targets: watch::Sender<Option<Arc<Targets>>>,
}

/// What is known about a source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// When its knowledge was last known to be up to date; none before it has published.
    pub confirmed: Option<Nanos>,
    /// Why it cannot be reached or understood, while that is so.
    pub problem: Option<String>,
    /// How many workers it names.
    pub workers: usize,
    /// What it left out and why.
    pub left_out: Vec<String>,
    /// Which of the workers that it names were not added, and why.
    pub not_added: Vec<String>,
    /// Whether the workers that it named first have been added.
    pub applied: bool,
}

/// A source as the rest of the gateway sees it.
#[derive(Clone)]
pub struct Seen {
    shared: Arc<Shared>,
    targets: watch::Receiver<Option<Arc<Targets>>>,
}

struct Shared {
    name: &'static str,
    clock: Clock,
    status: Mutex<Status>,
}

/// The sources of a gateway, and what else they report.
#[derive(Default)]
pub struct Discovery {
    sources: Mutex<Vec<Seen>>,
    /// Priorities by objective name (`InferenceObjective` resources).
    pub objectives: Arc<ArcSwap<BTreeMap<String, i8>>>,
}

// === impl Discovery ===

impl Discovery {
    /// Adds a source, in place of one with the same name.
    pub fn source(&self, name: &'static str, clock: Clock) -> (Source, Seen) {
        let shared = Arc::new(Shared { name, clock, status: Mutex::default() });
        let (sender, targets) = watch::channel(None);
        let seen = Seen { shared: Arc::clone(&shared), targets };
        let mut sources = self.listed();
        sources.retain(|source| source.name() != name);
        sources.push(seen.clone());
        (Source { shared, targets: sender }, seen)
    }

    /// Removes a source that has been stopped.
    pub fn forget(&self, name: &str) {
        self.listed().retain(|source| source.name() != name);
    }

    /// All sources.
    pub fn sources(&self) -> Vec<Seen> {
        self.listed().clone()
    }

    fn listed(&self) -> MutexGuard<'_, Vec<Seen>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether every source has published: before that, the fleet is not complete.
    pub fn is_synced(&self) -> bool {
        self.sources().iter().all(|source| source.status().confirmed.is_some())
    }
}

// === impl Source ===

impl Source {
    /// Replaces all that the source names. It is up to date now.
    pub fn publish(&self, targets: Targets) {
        self.confirm();
        self.put(targets);
    }

    /// Replaces all that the source names. Whether it is up to date is said apart: a source with several parts may
    /// know a change of one part while it cannot reach another.
    pub fn put(&self, targets: Targets) {
        {
            let mut status = self.shared.status();
            status.workers = targets.workers.len();
            status.left_out.clone_from(&targets.problems);
        }
        self.targets.send_if_modified(|before| {
            let changed = before.as_deref() != Some(&targets);
            if changed {
                *before = Some(Arc::new(targets));
            }
            changed
        });
    }

    /// Nothing has changed, and the source is in contact.
    pub fn confirm(&self) {
        let now = self.shared.clock.now();
        let mut status = self.shared.status();
        status.confirmed = Some(now);
        status.problem = None;
    }

    /// The source cannot be reached or understood. What it published stays. Returns whether this is news, to be logged.
    pub fn fail(&self, problem: String) -> bool {
        let mut status = self.shared.status();
        let news = status.problem.as_ref() != Some(&problem);
        status.problem = Some(problem);
        news
    }
}

// === impl Seen ===

impl Seen {
    /// The source's name: `kubernetes`, `dns` or `file`.
    pub fn name(&self) -> &'static str {
        self.shared.name
    }

    /// What is known about it.
    pub fn status(&self) -> Status {
        self.shared.status().clone()
    }

    /// The workers that it names have been added, except for these. Returns those that are news, to be logged.
    pub fn applied(&self, not_added: Vec<String>) -> Vec<String> {
        let mut status = self.shared.status();
        status.applied = true;
        let before = std::mem::replace(&mut status.not_added, not_added);
        status.not_added.iter().filter(|why| !before.contains(why)).cloned().collect()
    }

    /// Waits for the next change, and returns all that the source names; none when the source has ended.
    pub async fn next(&mut self) -> Option<Arc<Targets>> {
        loop {
            self.targets.changed().await.ok()?;
            if let Some(targets) = self.targets.borrow_and_update().clone() {
                return Some(targets);
            }
        }
    }
}

// === impl Shared ===

impl Shared {
    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(urls: &[&str]) -> Targets {
        let target =
            |url: &&str| Target { key: (*url).into(), spec: WorkerSpec::new(*url), terminating: false };
        Targets { workers: urls.iter().map(target).collect(), problems: Vec::new() }
    }

    #[test]
    fn what_was_not_added_is_news_once() {
        let discovery = Discovery::default();
        let (_source, seen) = discovery.source(FILE, Clock::start(1.0));
        let why = |all: &[&str]| all.iter().map(|why| (*why).to_owned()).collect::<Vec<_>>();
        assert_eq!(seen.applied(why(&["a", "b"])), ["a", "b"]);
        assert_eq!(seen.applied(why(&["b", "c"])), ["c"]);
        assert_eq!(seen.applied(why(&["a"])), ["a"], "it is wrong again");
        assert_eq!(seen.status().not_added, ["a"]);
    }

    #[test]
    fn a_source_takes_the_place_of_another_with_its_name() {
        let (discovery, clock) = (Discovery::default(), Clock::start(1.0));
        let (first, _) = discovery.source(DNS, clock);
        first.publish(targets(&["http://a"]));
        let (_second, _) = discovery.source(DNS, clock);
        assert_eq!(discovery.sources().len(), 1);
        assert!(!discovery.is_synced());
        discovery.forget(DNS);
        assert!(discovery.sources().is_empty());
    }

    #[tokio::test]
    async fn a_source_that_fails_keeps_what_it_published() {
        let discovery = Discovery::default();
        let (source, mut seen) = discovery.source("file", Clock::start(1.0));
        assert!(!discovery.is_synced());
        assert!(source.fail("no such file".into()), "the first time is news");
        assert!(!source.fail("no such file".into()));
        assert!(!discovery.is_synced(), "nothing was published");
        source.publish(targets(&["http://a", "http://b"]));
        assert!(discovery.is_synced());
        assert_eq!(seen.next().await.expect("published").workers.len(), 2);
        assert_eq!((seen.status().workers, seen.status().problem), (2, None));
        source.fail("gone".into());
        assert_eq!(seen.status().problem.as_deref(), Some("gone"));
        source.publish(targets(&["http://a", "http://b"]));
        source.publish(targets(&["http://a"]));
        assert_eq!(seen.next().await.expect("published").workers.len(), 1, "what did not change is not told");
    }
}
