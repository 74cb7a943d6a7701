//! Who takes whose place: a worker that is to go serves until those do that come for it.

use std::sync::Arc;

use kvlane_core::scheduler::Scheduler;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Worker, WorkerId};
use kvlane_http::address::worker_name;

use super::{AddError, Controller};

// === impl Controller ===

impl Controller {
    /// Puts a worker in the place of all that have its URL. They serve until it does: then they leave, and those that
    /// do not serve leave at once. Whether they take new requests is its to begin with.
    ///
    /// # Errors
    /// Why it cannot be added.
    pub fn replace(self: &Arc<Self>, spec: &WorkerSpec) -> Result<Arc<Worker>, AddError> {
        let worker = self.take_in(self.configured(spec)?, true)?;
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

    /// Lets the workers of a URL leave whose entry has gone from the configuration, for which those of `joining` have come.
    /// They serve until those do; who of those fails is waited for only as long as nobody else serves the same pools.
    /// Whether there was any.
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

    /// Lets a worker stay that was to go when others serve. Whether it does.
    pub fn retain(&self, worker: &Worker) -> bool {
        let mut state = worker.state();
        state.successors.clear();
        !state.leaving
    }

    /// A worker has answered or failed its first probe, or leaves; `done` if nobody need wait for it any more.
    pub(super) fn settle_predecessors(self: &Arc<Self>, worker: &Worker, done: bool) {
        for before in self.workers() {
            {
                let mut state = before.state();
                if state.leaving || !state.successors.contains(&worker.id) {
                    continue;
                }
                if done {
                    state.successors.retain(|id| *id != worker.id);
                }
            }
            self.leave_if_replaced(&before);
        }
    }

    /// Lets a worker leave that was to go, if nothing is left to wait for.
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
            // Somebody may have changed their mind.
            if state.leaving || state.successors != awaited {
                return;
            }
            state.leaving = true;
        }
        self.remove(worker);
    }

    /// Whether it is known of a worker that it serves, or what is wrong with it.
    fn is_judged(&self, id: WorkerId) -> bool {
        let worker = self.fleet.workers().get(&id).cloned();
        worker.is_none_or(|worker| {
            let state = worker.state();
            state.healthy || state.problem.is_some()
        })
    }
}

/// Whether a pool has somebody who takes requests and stays, beside this worker.
fn serves_elsewhere(worker: &Worker, pool: &ModelPool) -> bool {
    let eligible = |scheduler: &Scheduler| -> Vec<_> {
        scheduler.pool().eligible().map(|endpoint| endpoint.id).collect()
    };
    let eligible = pool.router.read(eligible);
    let others = eligible.into_iter().filter_map(|endpoint| pool.endpoint(endpoint));
    let stays = |other: &Worker| other.id != worker.id && other.state().successors.is_empty();
    others.into_iter().any(|endpoint| stays(&endpoint.worker))
}
