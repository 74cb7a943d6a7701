//! Replacement of workers: a worker that is to leave serves until its successors do.

use std::sync::Arc;

use kvlane_core::scheduler::Scheduler;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Worker, WorkerId};
use kvlane_http::address::worker_name;

use super::{AddError, Controller};

// === impl Controller ===

impl Controller {
    /// Replaces all workers with this URL. Those that serve leave when the new one serves; those that do not leave at
    /// once. If a replaced worker drains, the new one drains, too.
    ///
    /// # Errors
    /// Why it cannot be added.
    pub fn replace(self: &Arc<Self>, spec: &WorkerSpec) -> Result<Arc<Worker>, AddError> {
        self.replace_by(self.configured(spec)?)
    }

    /// Replaces all workers with the URL of this one by it.
    pub(crate) fn replace_by(self: &Arc<Self>, worker: Worker) -> Result<Arc<Worker>, AddError> {
        let worker = self.take_in(worker, true)?;
        for before in self.workers() {
            if before.url != worker.url || before.id == worker.id {
                continue;
            }
            {
                let mut state = before.state();
                if state.leaving {
                    continue;
                }
                (state.successors, state.may_be_spared) = (vec![worker.id], false);
                worker.state().draining |= state.draining;
            }
            self.leave_if_replaced(&before);
        }
        Ok(worker)
    }

    /// Lets the workers of a URL that is no longer in the configuration leave; `joining` are the workers added in the
    /// same reload. The workers serve until those do; a joining worker that fails is waited for only while no other
    /// worker serves the same pools. Returns whether there was such a worker.
    pub fn retire(self: &Arc<Self>, url: &str, joining: &[WorkerId]) -> bool {
        let mut any = false;
        for worker in self.workers() {
            {
                let mut state = worker.state();
                if *worker.url != *worker_name(url) || state.leaving {
                    continue;
                }
                (state.successors, state.may_be_spared) = (joining.to_vec(), true);
            }
            any = true;
            self.leave_if_replaced(&worker);
        }
        any
    }

    /// Cancels the planned departure of a worker that serves until its successors do. Returns whether it stays.
    pub fn retain(&self, worker: &Worker) -> bool {
        let mut state = worker.state();
        state.successors.clear();
        !state.leaving
    }

    /// Workers have answered or failed their first probe, or leave; `done` if their predecessors need not wait for them
    /// any more.
    pub(super) fn settle_predecessors(self: &Arc<Self>, workers: &[WorkerId], done: bool) {
        for before in self.workers() {
            {
                let mut state = before.state();
                if state.leaving || !state.successors.iter().any(|id| workers.contains(id)) {
                    continue;
                }
                if done {
                    state.successors.retain(|id| !workers.contains(id));
                }
            }
            self.leave_if_replaced(&before);
        }
    }

    /// Removes a worker that is to leave, if it has no successor to wait for.
    fn leave_if_replaced(self: &Arc<Self>, worker: &Arc<Worker>) {
        let (awaited, healthy, may_be_spared) = {
            let state = worker.state();
            (state.successors.clone(), state.healthy, state.may_be_spared)
        };
        let endpoints = self.fleet.snapshot().endpoints_of(worker.id);
        let spared = || {
            may_be_spared
                && awaited.iter().all(|id| self.is_judged(*id))
                && endpoints.iter().all(|(pool, _)| serves_elsewhere(worker, pool))
        };
        if !(awaited.is_empty() || !healthy || spared()) {
            return;
        }
        {
            let mut state = worker.state();
            // The configuration may have changed in the meantime.
            if state.leaving || state.successors != awaited {
                return;
            }
            state.leaving = true;
        }
        self.remove(worker);
    }

    /// Whether the first probes of a worker have had a result, good or bad.
    pub(super) fn is_judged(&self, id: WorkerId) -> bool {
        let worker = self.fleet.workers().get(&id).cloned();
        worker.is_none_or(|worker| {
            let state = worker.state();
            state.healthy || state.problem.is_some()
        })
    }
}

/// Whether a pool has another endpoint, not of this worker, that takes requests and is not to leave.
fn serves_elsewhere(worker: &Worker, pool: &ModelPool) -> bool {
    let eligible = |scheduler: &Scheduler| -> Vec<_> {
        scheduler.pool().eligible().map(|endpoint| endpoint.id).collect()
    };
    let eligible = pool.router.read(eligible);
    let others = eligible.into_iter().filter_map(|endpoint| pool.endpoint(endpoint));
    let stays = |other: &Worker| other.id != worker.id && other.state().successors.is_empty();
    others.into_iter().any(|endpoint| stays(&endpoint.worker))
}
