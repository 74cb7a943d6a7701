//! Comparison of one policy with the others in each cell.
//!
//! In each cell one policy, ours, is compared with the best of the others. *Best* is the lowest mean E2E latency, the
//! mean over seeds, because that is what a client waits for, and a policy that trades TTFT for TPOT cannot hide it
//! there. TTFT p99 is compared with that of the same policy, because a fleet runs one policy, not one for the mean
//! and another one for the tail. The ratio to the policy with the best TTFT p99 is shown beside it.

use std::collections::BTreeMap;

use crate::statistics::ci::{self, Interval};

use super::{CellId, Job, file_name};
use crate::figures::{Figures, mean, seed_intervals};

/// The figure that decides a cell.
pub const E2E: &str = "e2e_mean_s";
/// The figure of its tail.
pub const TTFT_P99: &str = "ttft_p99_s";

/// Bound on mean E2E latency, relative to the best other policy's.
pub const E2E_RATIO_MAX: f64 = 1.03;
/// Bound on TTFT p99, relative to that of the policy with the best E2E latency.
pub const TTFT_P99_RATIO_MAX: f64 = 1.10;

/// Figures of a policy in a cell under each seed.
type BySeed = BTreeMap<u32, Figures>;

/// A policy in a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The mean of each figure over the seeds.
    pub mean: Figures,
    /// Confidence intervals over further seeds.
    pub intervals: BTreeMap<String, Interval>,
    /// The figures under each seed, in the order of the seeds.
    pub runs: Vec<Figures>,
}

/// All policies in a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct CellResult {
    /// The cell.
    pub cell: CellId,
    /// The policies by their arms' names.
    pub arms: BTreeMap<String, Measured>,
    /// Comparison of ours, if it was run and another was.
    pub standing: Option<Standing>,
}

/// Ours against the others, in a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// The other policy with the best E2E latency.
    pub best: String,
    /// Our mean E2E latency over its.
    pub e2e_ratio: f64,
    /// Confidence interval of that ratio over further seeds: paired by seed, both have the same requests.
    pub e2e_interval: Option<Interval>,
    /// Our TTFT p99 over that of the same policy.
    pub ttft_p99_ratio: f64,
    /// The other policy with the best TTFT p99.
    pub ttft_p99_best: String,
    /// Our TTFT p99 over its.
    pub ttft_p99_best_ratio: f64,
    /// The verdict.
    pub verdict: Verdict,
}

/// Comparison of mean E2E latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Ours is lower than the best of the others.
    Better,
    /// Ours is not lower, but within [`E2E_RATIO_MAX`].
    Within,
    /// Ours is higher.
    Worse,
}

/// All cells.
#[derive(Clone, Debug, Default)]
pub struct Judged {
    /// The policy that is compared with the others.
    pub ours: String,
    /// The policies it is compared with.
    pub others: Vec<String>,
    /// The cells.
    pub cells: Vec<CellResult>,
}

// === impl Judged ===

impl Judged {
    /// Combines results. `ours` is the arm of that name; other arms of the same policy are listed, but not compared
    /// with it.
    pub fn new(ours: &str, results: Vec<(Job, Figures)>) -> Self {
        let policy =
            results.iter().find(|(job, _)| job.arm.arm == ours).map(|(job, _)| file_name(&job.arm.policy));
        let mut others: Vec<String> = Vec::new();
        let mut cells: Vec<(CellId, BTreeMap<String, BySeed>)> = Vec::new();
        for (job, figures) in results {
            let arm = job.arm.arm;
            if Some(file_name(&job.arm.policy)) != policy && !others.contains(&arm) {
                others.push(arm.clone());
            }
            let place = match cells.iter().position(|(cell, _)| *cell == job.cell) {
                Some(place) => place,
                None => {
                    cells.push((job.cell, BTreeMap::new()));
                    cells.len() - 1
                }
            };
            cells[place].1.entry(arm).or_default().insert(job.seed, figures);
        }
        let cells = cells.into_iter().map(|(cell, arms)| {
            let arms: BTreeMap<String, Measured> = arms
                .into_iter()
                .map(|(arm, runs)| (arm, Measured::new(runs.into_values().collect())))
                .collect();
            let standing = standing(ours, &others, &arms);
            CellResult { cell, arms, standing }
        });
        Self { ours: ours.to_owned(), cells: cells.collect(), others }
    }

    /// Cells by their verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.standings().filter(|(_, standing)| standing.verdict == verdict).count()
    }

    /// The cells in which ours was compared.
    pub fn standings(&self) -> impl Iterator<Item = (&CellId, &Standing)> {
        self.cells.iter().filter_map(|one| Some((&one.cell, one.standing.as_ref()?)))
    }

    /// The geometric mean, over the cells that have both, of an arm's figure over ours: above 1, ours is lower. `None`
    /// without such a cell.
    pub fn relative(&self, arm: &str, figure: &str) -> Option<f64> {
        let mut logs = (0.0, 0.0);
        for cell in &self.cells {
            let of = |arm: &str| {
                cell.arms.get(arm).and_then(|arm| arm.mean.get(figure)).filter(|value| **value > 0.0)
            };
            if let (Some(theirs), Some(ours)) = (of(arm), of(&self.ours)) {
                logs = (logs.0 + (theirs / ours).ln(), logs.1 + 1.0);
            }
        }
        (logs.1 > 0.0).then(|| (logs.0 / logs.1).exp())
    }

    /// The geometric mean over the cells of the best other policy of each cell, over ours: the result of choosing the
    /// best policy for each cell.
    pub fn relative_to_best(&self) -> Option<f64> {
        let logs: Vec<f64> = self.standings().map(|(_, standing)| -standing.e2e_ratio.ln()).collect();
        (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
    }

    /// Cells that exceed a bound, the worst first: by what factor, and which bound.
    pub fn violations(&self) -> Vec<(f64, &CellId, &'static str, &Standing)> {
        let mut found = Vec::new();
        for (cell, standing) in self.standings() {
            let e2e = standing.e2e_ratio / E2E_RATIO_MAX;
            let tail = standing.ttft_p99_ratio / TTFT_P99_RATIO_MAX;
            if e2e > 1.0 {
                found.push((e2e, cell, E2E, standing));
            }
            if tail > 1.0 {
                found.push((tail, cell, TTFT_P99, standing));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found
    }
}

// === impl Measured ===

impl Measured {
    fn new(runs: Vec<Figures>) -> Self {
        Self { mean: mean(&runs), intervals: seed_intervals(&runs, 1), runs }
    }
}

/// Comparison of ours in a cell.
fn standing(ours: &str, others: &[String], arms: &BTreeMap<String, Measured>) -> Option<Standing> {
    let mine = arms.get(ours)?;
    // The names are sorted, so ties are always broken in the same way.
    let lowest = |figure: &str| {
        let of = |(name, arm): (&String, &Measured)| Some((name.clone(), *arm.mean.get(figure)?));
        arms.iter()
            .filter(|(name, _)| others.contains(name))
            .filter_map(of)
            .min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let (best, e2e) = lowest(E2E)?;
    let (ttft_p99_best, ttft_p99) = lowest(TTFT_P99)?;
    let theirs = &arms[&best];
    let ratio =
        |mine: &Figures, theirs: &Figures, figure: &str| Some(mine.get(figure)? / theirs.get(figure)?);
    let by_seed: Vec<f64> =
        mine.runs.iter().zip(&theirs.runs).filter_map(|(mine, theirs)| ratio(mine, theirs, E2E)).collect();
    let e2e_ratio = mine.mean.get(E2E)? / e2e;
    Some(Standing {
        e2e_ratio,
        e2e_interval: ci::of_seeds(&by_seed, 1),
        ttft_p99_ratio: ratio(&mine.mean, &theirs.mean, TTFT_P99)?,
        ttft_p99_best_ratio: mine.mean.get(TTFT_P99)? / ttft_p99,
        verdict: match e2e_ratio {
            ratio if ratio < 1.0 => Verdict::Better,
            ratio if ratio <= E2E_RATIO_MAX => Verdict::Within,
            _ => Verdict::Worse,
        },
        best,
        ttft_p99_best,
    })
}
