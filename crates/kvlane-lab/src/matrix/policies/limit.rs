//! The limit of a cell: the best placement that a search finds, beside those of policies.

use kvlane_core::policy::PolicyConfig;
use kvlane_sim::outcome::Outcome;
use kvlane_sim::world::Run;

use super::{Bench, CellId, Selection};
use crate::limit::{Bounds, Found, Problem, bounds, search};
use crate::scenario::{Arm, CacheKnowledge, RunError};

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
    /// The limit of a cell under a seed, by a search with so many tries that begins with the best of these policies.
    ///
    /// # Errors
    /// If a policy is unknown or the cell was not loaded.
    pub fn limit(
        &self,
        cell: &CellId,
        policies: &[String],
        seed: u32,
        tries: u32,
    ) -> Result<Limit, RunError> {
        let setting = self.setting(cell)?;
        let content = self.content(cell, seed)?;
        let send = content.send();
        let arms = self.matrix.arms(&Selection { policies: policies.to_vec(), ..Selection::default() })?;
        let mut placed = Vec::new();
        let mut best: Option<(f64, Run)> = None;
        for name in policies {
            let Some(arm) = arms.iter().find(|arm| arm.arm == *name) else { continue };
            let arm = self.matrix.told(arm, cell.age_s);
            let run = setting.world(&arm, seed).run(&send, |_| {});
            let mean_s = mean_s(&run);
            placed.push(Placed { arm: arm.arm, mean_s });
            if best.as_ref().is_none_or(|(best_s, _)| mean_s < *best_s) {
                best = Some((mean_s, run));
            }
        }
        let Some((_, run)) = best else {
            return Err(RunError::Policies("at least one is needed to begin with".to_owned()));
        };
        let start = run.outcomes.iter().map(|one| one.endpoint.unwrap_or_default()).collect();
        // Placements are given: the router has nothing to do.
        let idle = Arm {
            cache_knowledge: CacheKnowledge::Approximate,
            report_interval_s: None,
            ..Arm::new(PolicyConfig::RoundRobin(Default::default()))
        };
        let mut evaluate = |engines: &[u16]| -> Vec<f64> {
            let run = setting.world(&idle, seed).run_placed(&send, engines);
            run.outcomes.iter().map(Outcome::e2e_s).collect()
        };
        let problem =
            Problem { trace: &content.trace, plan: &content.plan, engines: setting.engines.len() as u16 };
        let found = search(&problem, start, tries, seed.into(), &mut evaluate);
        let bounds = bounds(&content.trace, &run.outcomes, &setting.engines, idle.routing_delay_s);
        Ok(Limit { requests: run.outcomes.len(), placed, found, bounds })
    }
}

fn mean_s(run: &Run) -> f64 {
    run.outcomes.iter().map(Outcome::e2e_s).sum::<f64>() / run.outcomes.len().max(1) as f64
}
