//! The limit of a cell: the best placement that a search finds, beside those of policies.

use kvlane_core::policy::PolicyConfig;
use kvlane_sim::world::Run;

use super::{Bench, CellId};
use crate::limit::{Bounds, Found, Problem, bounds, mean, search};
use crate::matrix::jobs;
use crate::scenario::{Arm, RunError};

/// The seed of the requests, of the policies and of the search.
const SEED: u32 = 1;

/// A policy in a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Its arm's name.
    pub arm: String,
    /// Its mean E2E latency, in seconds.
    pub mean_s: f64,
}

/// How far policies are from the limit of a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// Requests placed.
    pub requests: usize,
    /// The policies, in the order asked for.
    pub placed: Vec<Placed>,
    /// What the search found, from the best of them on.
    pub found: Found,
    /// What no placement goes below.
    pub bounds: Bounds,
}

// === impl Bench ===

impl Bench<'_> {
    /// The limits of cells under the first seed, on `threads` threads, in the order of the cells. Each is found by a search with so
    /// many tries that begins with the best of these policies. `begun` is called with the position of each cell, from any thread.
    ///
    /// # Errors
    /// If there is no policy, or a cell was not loaded.
    pub fn limits(
        &self,
        cells: &[CellId],
        arms: &[Arm],
        tries: u32,
        threads: usize,
        begun: &(dyn Fn(usize) + Sync),
    ) -> Result<Vec<Limit>, RunError> {
        jobs::run(cells.len(), threads, &|place, (): &mut ()| {
            begun(place);
            self.limit(&cells[place], arms, tries)
        })
    }

    fn limit(&self, cell: &CellId, arms: &[Arm], tries: u32) -> Result<Limit, RunError> {
        let setting = self.setting(cell)?;
        let content = self.content(cell, SEED)?;
        let send = content.send();
        let mut placed = Vec::new();
        let mut best: Option<(f64, Run)> = None;
        for arm in arms {
            let run = setting.world(&self.matrix.told(arm, cell.age_s), SEED).run(&send, |_| {});
            let mean_s = mean(&times(&run));
            placed.push(Placed { arm: arm.arm.clone(), mean_s });
            if best.as_ref().is_none_or(|(best_s, _)| mean_s < *best_s) {
                best = Some((mean_s, run));
            }
        }
        let Some((_, run)) = best else {
            return Err(RunError::Policies("at least one is needed to begin with".to_owned()));
        };
        let start = run.outcomes.iter().map(|one| one.endpoint.unwrap_or_default()).collect();
        // Placements are given: the router has nothing to do.
        let idle = Arm { report_interval_s: None, ..Arm::new(PolicyConfig::RoundRobin(Default::default())) };
        let mut evaluate = |engines: &[u16]| times(&setting.world(&idle, SEED).run_placed(&send, engines));
        let problem =
            Problem { trace: &content.trace, plan: &content.plan, engines: setting.engines.len() as u16 };
        let found = search(&problem, start, tries, SEED.into(), &mut evaluate);
        let bounds = bounds(&content.trace, &run.outcomes, &setting.engines, idle.routing_delay_s);
        Ok(Limit { requests: run.outcomes.len(), placed, found, bounds })
    }
}

/// Seconds that each request takes. One that fails would be the shortest of all.
fn times(run: &Run) -> Vec<f64> {
    run.outcomes.iter().map(|one| if one.is_ok() { one.e2e_s() } else { f64::INFINITY }).collect()
}
