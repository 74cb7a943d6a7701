//! Comparison of policies: every policy on every workload, fleet and load, at every age of the load reports, under
//! several seeds.
//!
//! A [`Matrix`] is read from a file. [`Matrix::cells`] are the conditions under which all policies are compared, a
//! [`Job`] is one run of one policy in one cell under one seed. Jobs share no state, so a job's figures do not depend
//! on other jobs, and a [`Store`] keeps them for the next time. [`Judged`] determines the best policy of each cell.

mod judge;
mod limit;
mod run;
mod store;

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvlane_core::policy::PolicyConfig;
use kvlane_trace::generate::Workload;
use serde::{Deserialize, Serialize};

pub use judge::{
    CellResult, E2E, E2E_RATIO_MAX, Judged, Measured, Standing, TTFT_P99, TTFT_P99_RATIO_MAX, Verdict,
};
pub use limit::{Limit, Placed};
pub use run::{Bench, Job, knee};
pub use store::{Store, Versions, configuration, file_name, source_file};

use super::jobs::twice;
use crate::figures::Judgement;
use crate::scenario::{Arm, CacheKnowledge, Fleet, RunError};

/// A comparison.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// The policy that is compared with all others, by name.
    pub ours: String,
    /// Engines, by name.
    pub fleets: BTreeMap<String, Fleet>,
    /// Requests.
    pub workloads: Vec<Workloads>,
    /// Loads, as fractions of the knee.
    pub loads: Vec<f64>,
    /// Ages of load reports, in seconds.
    pub ages_s: Vec<f64>,
    /// The age used where only one is needed.
    pub age_s: f64,
    /// Seeds, counted from 1.
    pub seeds: u32,
    /// Inputs of the router, the same for all policies.
    pub feed: Feed,
    /// Policies that are excluded, by name. All others are compared, with their defaults.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Further arms: with other parameters, or with more than a policy. `feed` sets their inputs.
    #[serde(default)]
    pub policies: Vec<Arm>,
    /// Limits for goodput.
    #[serde(default)]
    pub judgement: Judgement,
    /// Definition of a knee.
    pub knee: KneeRule,
}

/// A workload and its fleets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workloads {
    /// Its name.
    pub workload: String,
    /// Its description and source.
    pub about: String,
    /// A trace file. This or `generate`.
    #[serde(default)]
    pub trace: Option<PathBuf>,
    /// A workload to generate.
    #[serde(default)]
    pub generate: Option<Workload>,
    /// Ends a conversation before the first request whose prompt and answer are longer.
    #[serde(default)]
    pub context_tokens_max: Option<u32>,
    /// Unit of the load, and number of requests.
    pub send: Pace,
    /// Its fleets.
    pub on: Vec<On>,
}

/// Unit of the load, and number of requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Pace {
    /// Load is a factor on a trace's own rate. The number of seconds sent is fixed: the part of the trace is longer
    /// by the load factor, from a position drawn from the seed.
    WindowS(f64),
    /// Load is conversations per second, for a number of seconds.
    Seconds(f64),
    /// Load is conversations per second, for a number of conversations. The seed selects those of a trace, and their
    /// order.
    Conversations(u32),
}

/// A fleet for a workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct On {
    /// Its name.
    pub fleet: String,
    /// The load at which it saturates.
    pub knee: f64,
    /// Additional loads.
    #[serde(default)]
    pub at: Vec<f64>,
    /// Whether it is excluded from a quick run.
    #[serde(default)]
    pub full_only: bool,
}

/// Inputs of the router, and their delay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feed {
    /// Source of cache knowledge: own dispatches, or KV events.
    pub cache_knowledge: CacheKnowledge,
    /// Seconds between two load reports of an engine.
    pub report_interval_s: f64,
    /// Delay of KV events, in seconds.
    pub kv_event_delay_s: f64,
}

/// The knee of a workload on a fleet: the highest load up to which a policy meets a limit on TTFT.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KneeRule {
    /// The policy, by name.
    pub policy: String,
    /// Its mean time to first token is at most this, in seconds.
    pub ttft_mean_s: f64,
}

/// A condition under which all policies are compared.
#[derive(Clone, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct CellId {
    /// The workload.
    pub workload: String,
    /// The fleet.
    pub fleet: String,
    /// The load, in the workload's unit.
    pub load: f64,
    /// The same as a fraction of the knee; none if the load is given directly.
    pub of_knee: Option<f64>,
    /// Age of load reports, in seconds.
    pub age_s: f64,
}

/// Selects a part of a matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Workloads, or workload@fleet; all if empty.
    pub only: Vec<String>,
    /// Policies by their arms' names; all if empty.
    pub policies: Vec<String>,
    /// Number of seeds; all if none.
    pub seeds: Option<u32>,
    /// Ages; all if none.
    pub ages_s: Option<Vec<f64>>,
    /// Fractions of the knee; all if none, and then loads given directly too.
    pub loads: Option<Vec<f64>>,
    /// Whether fleets excluded from a quick run are included.
    pub full: bool,
}

// === impl Matrix ===

impl Matrix {
    /// The policies: each with its defaults, unless excluded, then those of the file.
    ///
    /// # Errors
    /// If a name is used twice, or is unknown.
    pub fn arms(&self, selection: &Selection) -> Result<Vec<Arm>, RunError> {
        let bad = |why: String| Err(RunError::Policies(why));
        let all = PolicyConfig::NAMES.iter().filter(|name| !self.left_out.iter().any(|out| out == **name));
        let mut arms: Vec<Arm> = all
            .filter_map(|name| {
                Some(Arm { arm: (*name).to_owned(), ..Arm::new(PolicyConfig::by_name(name)?) })
            })
            .chain(self.policies.iter().cloned())
            .collect();
        if let Some(twice) = twice(arms.iter().map(|arm| arm.arm.as_str())) {
            return bad(format!("two arms have the name `{twice}`: set a different `arm` for each"));
        }
        if let Some(stray) = selection.policies.iter().find(|name| arms.iter().all(|arm| arm.arm != **name)) {
            let names: Vec<&str> = arms.iter().map(|arm| arm.arm.as_str()).collect();
            return bad(format!("unknown policy `{stray}`: known are {}", names.join(", ")));
        }
        if !selection.policies.is_empty() {
            arms.retain(|arm| selection.policies.contains(&arm.arm));
        }
        Ok(arms)
    }

    /// The cells, workload by workload.
    ///
    /// # Errors
    /// If a selected workload does not exist, or its fleet does not exist.
    pub fn cells(&self, selection: &Selection) -> Result<Vec<CellId>, RunError> {
        let mut cells = Vec::new();
        let ages_s = selection.ages_s.as_ref().unwrap_or(&self.ages_s);
        let mut met = vec![false; selection.only.len()];
        for workload in &self.workloads {
            for on in &workload.on {
                if !self.fleets.contains_key(&on.fleet) {
                    let why = format!("{}: unknown fleet `{}`", workload.workload, on.fleet);
                    return Err(RunError::Fleet(why));
                }
                let name = |only: &String| {
                    *only == workload.workload || *only == format!("{}@{}", workload.workload, on.fleet)
                };
                (met.iter_mut().zip(&selection.only)).for_each(|(met, only)| *met |= name(only));
                let asked_for = selection.only.iter().any(name);
                if !asked_for && (!selection.only.is_empty() || on.full_only && !selection.full) {
                    continue;
                }
                let parts = selection.loads.as_ref().unwrap_or(&self.loads);
                let of_knee = parts.iter().map(|part| (rounded(part * on.knee), Some(*part)));
                let given = on.at.iter().filter(|_| selection.loads.is_none()).map(|load| (*load, None));
                for (load, of_knee) in of_knee.chain(given) {
                    cells.extend(ages_s.iter().map(|&age_s| CellId {
                        workload: workload.workload.clone(),
                        fleet: on.fleet.clone(),
                        load,
                        of_knee,
                        age_s,
                    }));
                }
            }
        }
        match met.iter().position(|met| !met) {
            Some(stray) => {
                let names: Vec<&str> = self.workloads.iter().map(|one| one.workload.as_str()).collect();
                let why =
                    format!("unknown workload `{}`: known are {}", selection.only[stray], names.join(", "));
                Err(RunError::Workload(why))
            }
            None => Ok(cells),
        }
    }

    /// Every cell with every policy under every seed. Jobs with the same requests are adjacent.
    ///
    /// # Errors
    /// As [`Matrix::cells`] and [`Matrix::arms`].
    pub fn jobs(&self, selection: &Selection) -> Result<Vec<Job>, RunError> {
        let arms = self.arms(selection)?;
        let seeds = selection.seeds.unwrap_or(self.seeds);
        let mut jobs = Vec::new();
        for cell in self.cells(selection)? {
            for seed in 1..=seeds {
                jobs.extend(arms.iter().map(|arm| Job { cell: cell.clone(), arm: arm.clone(), seed }));
            }
        }
        Ok(jobs)
    }

    /// An arm with the router's inputs at this age of the load reports.
    pub fn told(&self, arm: &Arm, age_s: f64) -> Arm {
        Arm {
            cache_knowledge: self.feed.cache_knowledge,
            report_interval_s: Some(self.feed.report_interval_s),
            report_age_s: age_s,
            kv_event_delay_s: self.feed.kv_event_delay_s,
            ..arm.clone()
        }
    }
}

/// Loads have three digits, more than the accuracy of a knee.
fn rounded(load: f64) -> f64 {
    (load * 1e3).round() / 1e3
}
