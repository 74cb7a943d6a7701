//! Discovery: the workers that were added for a source are those that the source named last.
//!
//! A source changes only the workers that were added for it. A URL that is a worker already, because the
//! configuration, an operator or another source named it first, stays as it is; the source's worker is added when the
//! other one has left. A worker that an operator has removed is not added again until the source names another engine
//! at its URL, or stops naming it for a while.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, MutexGuard, PoisonError};

use kvlane_fleet::discovery::{FILE, Seen, Target, Targets};
use kvlane_fleet::metrics::SourceLabel;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Origin, Worker, WorkerId};
use kvlane_http::address::worker_name;

use super::discovered::{Discovered, Known};
use super::{AddError, Controller};

/// Most workers of a source that are listed with the reason why they were not added.
const LEFT_OUT_MAX: usize = 100;

/// What a source wants changed.
#[derive(Default)]
struct Changes<'a> {
    /// Workers that leave at once.
    gone: Vec<Arc<Worker>>,
    /// Workers that are added, by URL.
    joining: Vec<(&'a str, &'a Target)>,
    /// Workers whose settings have changed.
    replaced: Vec<(&'a str, &'a Target)>,
    /// Workers that begin or cease to drain.
    draining: Vec<(Arc<Worker>, bool)>,
}

// === impl Controller ===

impl Controller {
    /// Keeps the workers of a source equal to what it publishes, until it ends.
    pub async fn follow(self: Arc<Self>, mut seen: Seen) {
        let mut departures = self.departures.subscribe();
        let mut published: Option<Arc<Targets>> = None;
        loop {
            tokio::select! {
                targets = seen.next() => match targets {
                    Some(targets) => published = Some(targets),
                    None => return,
                },
                // A worker that was not added may have room now, or its URL may be free.
                Ok(()) = departures.changed() => {}
            }
            departures.mark_unchanged();
            let Some(targets) = &published else { continue };
            let not_added = self.reconcile(seen.name(), targets);
            for why in seen.applied(not_added) {
                tracing::warn!(source = seen.name(), why, "discovered worker not added");
            }
        }
    }

    /// Makes the workers of a source those of `targets`. Returns what was left out, and why.
    pub fn reconcile(self: &Arc<Self>, source: &'static str, targets: &Targets) -> Vec<String> {
        // Held throughout, so that two sources do not both take a URL.
        let mut discovered = self.discovered();
        let known = discovered.sources.entry(source).or_default();
        let (wanted, mut left_out) = by_url(targets);
        known.dismissed.retain(|(url, key)| wanted.get(&**url).is_some_and(|target| target.key == *key));
        let there = self.staying();
        let changes = self.compare(source, known, &wanted, &there, &mut left_out);
        let departs = |worker: &&Arc<Worker>| {
            is_of(worker, source)
                && !wanted.contains_key(&*worker.url)
                // It waits for its successors already.
                && worker.state().successors.is_empty()
        };
        let departing: Vec<Arc<Worker>> = there.values().filter(departs).cloned().collect();
        let leaving = departing.len() + changes.gone.len();

        for (worker, draining) in &changes.draining {
            self.set_draining(worker, *draining);
        }
        let retires = source == FILE;
        let gone = if retires { changes.gone } else { [changes.gone, departing.clone()].concat() };
        if !gone.is_empty() {
            self.remove_all(&gone);
        }
        for (url, target) in changes.replaced {
            let replaced =
                self.found(&target.spec, source, &target.key).and_then(|worker| self.replace_by(worker));
            if let Err(error) = replaced {
                left_out.push(format!(
                    "{url}: its settings have changed, and the worker stays as it was: {error}"
                ));
            }
        }
        let joined = self.join_all(source, &changes.joining, &mut left_out);
        if retires {
            // An edit of the file replaces workers that still run: they serve until their successors do.
            let successors = [joined.clone(), self.unproven(source, &wanted, &there)].concat();
            for worker in &departing {
                self.retire(&worker.url, &successors);
            }
        }
        note_conflicts(source, &wanted, &there);
        self.add_claimed(&mut discovered);
        let label = SourceLabel { source };
        let metrics = &self.fleet.metrics.discovery;
        metrics.discovery_joins.get_or_create(&label).inc_by(joined.len() as u64);
        metrics.discovery_leaves.get_or_create(&label).inc_by(leaving as u64);
        shortened(left_out)
    }

    /// Notes which of the configuration's workers have URLs of workers that a source named first: each is added when
    /// that one has left. Returns their URLs.
    pub fn claim(&self, workers: &[WorkerSpec]) -> BTreeSet<String> {
        let mut discovered = self.discovered();
        let there = self.staying();
        let holder =
            |spec: &&WorkerSpec| there.get(worker_name(&spec.url)).is_some_and(|worker| worker.is_found());
        discovered.claimed = workers.iter().filter(holder).cloned().collect();
        let urls = || discovered.claimed.iter().map(|spec| worker_name(&spec.url));
        let claimed: BTreeSet<&str> = urls().collect();
        for worker in there.values() {
            note_conflict(worker, Origin::Config.name(), claimed.contains(&*worker.url));
        }
        urls().map(str::to_owned).collect()
    }

    /// Adds the workers of the configuration whose URLs have become free.
    fn add_claimed(self: &Arc<Self>, discovered: &mut Discovered) {
        if discovered.claimed.is_empty() {
            return;
        }
        let there = self.staying();
        discovered.claimed.retain(|spec| {
            let is_free = !there.contains_key(worker_name(&spec.url));
            if is_free && let Err(error) = self.add(spec) {
                tracing::error!(worker = spec.url, %error, "configured worker could not be added");
            }
            !is_free
        });
    }

    /// The workers of a source that it names and that do not serve.
    fn unproven(
        &self,
        source: &'static str,
        wanted: &BTreeMap<&str, &Target>,
        there: &HashMap<Arc<str>, Arc<Worker>>,
    ) -> Vec<WorkerId> {
        let unproven = |worker: &&Arc<Worker>| {
            is_of(worker, source) && wanted.contains_key(&*worker.url) && !worker.state().healthy
        };
        there.values().filter(unproven).map(|worker| worker.id).collect()
    }

    /// Removes a worker for an operator. A source that names it does not add it again.
    pub fn dismiss(self: &Arc<Self>, worker: &Arc<Worker>) {
        if let Origin::Found { source, key } = &worker.origin {
            let mut discovered = self.discovered();
            let known = discovered.sources.entry(source).or_default();
            known.dismissed.insert((worker.url.to_string(), key.clone()));
        }
        self.remove(worker);
    }

    /// Removes the workers of a source that has been switched off.
    pub fn withdraw(self: &Arc<Self>, source: &'static str) {
        self.reconcile(source, &Targets::default());
        self.discovered().sources.remove(source);
    }

    fn discovered(&self) -> MutexGuard<'_, Discovered> {
        self.discovered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The workers that do not leave, by URL: of several with one URL, the last one added.
    fn staying(&self) -> HashMap<Arc<str>, Arc<Worker>> {
        let workers = self.workers().into_iter().filter(|worker| !worker.state().leaving);
        workers.map(|worker| (Arc::clone(&worker.url), worker)).collect()
    }

    /// What has to change so that the workers of `source` are those that it wants.
    fn compare<'a>(
        &self,
        source: &'static str,
        known: &mut Known,
        wanted: &BTreeMap<&'a str, &'a Target>,
        there: &HashMap<Arc<str>, Arc<Worker>>,
        left_out: &mut Vec<String>,
    ) -> Changes<'a> {
        let mut changes = Changes::default();
        let before = std::mem::take(&mut known.terminating);
        for (&url, &target) in wanted {
            match there.get(url) {
                Some(worker) if !is_of(worker, source) => {
                    let first = worker.origin.name();
                    left_out
                        .push(format!("{url}: it is a worker already, named by {first}, and stays as it is"));
                }
                Some(worker) if !is_engine(worker, &target.key) => {
                    changes.gone.push(Arc::clone(worker));
                    changes.joining.extend((!target.terminating).then_some((url, target)));
                }
                Some(worker) => {
                    // It may have been about to leave.
                    self.retain(worker);
                    if !worker.spec.is(&target.spec) && !target.terminating {
                        changes.replaced.push((url, target));
                    }
                    if before.contains(&worker.id) != target.terminating {
                        changes.draining.push((Arc::clone(worker), target.terminating));
                    }
                    if target.terminating {
                        known.terminating.insert(worker.id);
                    }
                }
                None if known.dismissed.contains(&(url.to_owned(), target.key.clone())) => {
                    left_out.push(format!("{url}: an operator has removed it"));
                }
                None => changes.joining.extend((!target.terminating).then_some((url, target))),
            }
        }
        changes
    }

    /// Adds workers, and returns those that could be added.
    fn join_all(
        self: &Arc<Self>,
        source: &'static str,
        joining: &[(&str, &Target)],
        left_out: &mut Vec<String>,
    ) -> Vec<WorkerId> {
        let mut joined = Vec::new();
        for (n, (url, target)) in joining.iter().enumerate() {
            let added =
                self.found(&target.spec, source, &target.key).and_then(|worker| self.take_in(worker, false));
            match added {
                Ok(worker) => joined.push(worker.id),
                Err(error @ AddError::TooMany) => {
                    left_out.push(format!("{url} and {} further workers: {error}", joining.len() - n - 1));
                    break;
                }
                Err(error) => left_out.push(format!("{url}: {error}")),
            }
        }
        joined
    }
}

/// Shows at each worker of another origin whether `source` names it, too.
fn note_conflicts(
    source: &'static str,
    wanted: &BTreeMap<&str, &Target>,
    there: &HashMap<Arc<str>, Arc<Worker>>,
) {
    for worker in there.values() {
        note_conflict(worker, source, !is_of(worker, source) && wanted.contains_key(&*worker.url));
    }
}

/// Notes whether `other` names this worker, too, and logs that once.
fn note_conflict(worker: &Worker, other: &'static str, is_named: bool) {
    let mut state = worker.state();
    if state.also_named_by.contains(&other) == is_named {
        return;
    }
    state.also_named_by.retain(|name| *name != other);
    if is_named {
        state.also_named_by.push(other);
        let first = worker.origin.name();
        tracing::warn!(worker = %worker.url, first, other, "worker is named twice; it stays as the first named it");
    }
}

/// Whether a worker was added for this source.
fn is_of(worker: &Worker, source: &str) -> bool {
    matches!(&worker.origin, Origin::Found { source: of, .. } if *of == source)
}

/// Whether a worker that was found is the engine with this key.
fn is_engine(worker: &Worker, key: &str) -> bool {
    matches!(&worker.origin, Origin::Found { key: of, .. } if of == key)
}

/// Each URL once. Of several workers with one URL, the first that stays is used.
fn by_url(targets: &Targets) -> (BTreeMap<&str, &Target>, Vec<String>) {
    let (mut wanted, mut left_out) = (BTreeMap::<&str, &Target>::new(), Vec::new());
    for target in &targets.workers {
        let url = worker_name(&target.spec.url);
        let Some(other) = wanted.insert(url, target) else { continue };
        let (used, unused) =
            if other.terminating && !target.terminating { (target, other) } else { (other, target) };
        wanted.insert(url, used);
        // The successor of a pod may have its address before that pod has gone.
        if !unused.terminating {
            left_out.push(format!(
                "{url}: it is named twice, by {} and {}; the first is used",
                used.key, unused.key
            ));
        }
    }
    (wanted, left_out)
}

fn shortened(mut left_out: Vec<String>) -> Vec<String> {
    let more = left_out.len().saturating_sub(LEFT_OUT_MAX);
    if more > 0 {
        left_out.truncate(LEFT_OUT_MAX);
        left_out.push(format!("and {more} more"));
    }
    left_out
}
