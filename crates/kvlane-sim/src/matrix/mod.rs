//! Policies against each other: every policy on every workload, fleet and load, at every age of the load reports, under
//! several seeds.
//!
//! A [`Matrix`] is read from a file. [`Matrix::cells`] are what all policies are compared on, a [`Job`] is one run of one
//! of them in one cell under one seed. Jobs share nothing, so a job's figures are the same whatever runs beside it, and
//! a [`Store`] keeps them for the next time. [`Judged`] says who is best where.

mod judge;
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
pub use run::{Bench, Job, knee};
pub use store::{Store, Versions, digest, file_name};

use crate::figures::Judgement;
use crate::scenario::{Arm, CacheKnowledge, Fleet, RunError};

/// What is compared on what.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// The policy that is compared with all others, by name.
    pub ours: String,
    /// Engines, by name.
    pub fleets: BTreeMap<String, Fleet>,
    /// Requests.
    pub workloads: Vec<Workloads>,
    /// Loads, as parts of the knee.
    pub loads: Vec<f64>,
    /// How old load reports are, in seconds.
    pub ages_s: Vec<f64>,
    /// The age where only one is wanted.
    pub age_s: f64,
    /// Seeds, counted from 1.
    pub seeds: u32,
    /// What the router is told, all policies alike.
    pub feed: Feed,
    /// Policies that are left out, by name. All others are compared, with their defaults.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Further ones: with other parameters, or with more than a policy. What they are told is said by `feed`.
    #[serde(default)]
    pub policies: Vec<Arm>,
    /// What counts as good.
    #[serde(default)]
    pub judgement: Judgement,
    /// What a knee is.
    pub knee: KneeRule,
}

/// A workload and where it is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workloads {
    /// What it is called.
    pub workload: String,
    /// What it is, and what it is a piece of.
    pub about: String,
    /// A trace file. This or `generate`.
    #[serde(default)]
    pub trace: Option<PathBuf>,
    /// A workload to be made.
    #[serde(default)]
    pub generate: Option<Workload>,
    /// Ends a conversation before the first request whose prompt and answer are longer.
    #[serde(default)]
    pub context_tokens_max: Option<u32>,
    /// What a load is, and how much is sent.
    pub send: Pace,
    /// The fleets it is run on.
    pub on: Vec<On>,
}

/// What a load is, and how much is sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Pace {
    /// Load is a factor on a trace's own rate. What it sends in so many seconds is sent, whatever the load: a piece of
    /// the trace as much longer as it is sent faster, from a place that the seed draws.
    WindowS(f64),
    /// Load is conversations per second, for so many seconds.
    Seconds(f64),
    /// Load is conversations per second, so many in all. Of a trace, the seed draws which, and in which order.
    Conversations(u32),
}

/// A fleet that a workload is run on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct On {
    /// Its name.
    pub fleet: String,
    /// The load at which it saturates.
    pub knee: f64,
    /// Loads at which it is run besides.
    #[serde(default)]
    pub at: Vec<f64>,
    /// Whether it is left out of a quick look.
    #[serde(default)]
    pub full_only: bool,
}

/// What the router is told of the engines, and when.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feed {
    /// Its own dispatches, or KV events.
    pub cache_knowledge: CacheKnowledge,
    /// Seconds between two load reports of an engine.
    pub report_interval_s: f64,
    /// How late KV events are, in seconds.
    pub kv_event_delay_s: f64,
}

/// The knee of a workload on a fleet: the highest load up to which a policy answers in time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KneeRule {
    /// The policy, by name.
    pub policy: String,
    /// Its mean time to first token is at most this, in seconds.
    pub ttft_mean_s: f64,
}

/// What all policies are compared on.
#[derive(Clone, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct CellId {
    /// Which workload.
    pub workload: String,
    /// On which fleet.
    pub fleet: String,
    /// At which load, in the workload's unit.
    pub load: f64,
    /// The same as a part of the knee; none if the load is given as such.
    pub of_knee: Option<f64>,
    /// How old load reports are, in seconds.
    pub age_s: f64,
}

/// Which part of a matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Workloads, or workload@fleet; all if empty.
    pub only: Vec<String>,
    /// Policies by their arms' names; all if empty.
    pub policies: Vec<String>,
    /// How many seeds; all if none.
    pub seeds: Option<u32>,
    /// Ages; all if none.
    pub ages_s: Option<Vec<f64>>,
    /// Parts of the knee; all if none, and then the loads that are given as such too.
    pub loads: Option<Vec<f64>>,
    /// Whether fleets that are not for a quick look are in.
    pub full: bool,
}

// === impl Matrix ===

impl Matrix {
    /// The policies: each with its defaults, unless left out, then those of the file.
    ///
    /// # Errors
    /// If a name is taken twice, or asked for and not there.
    pub fn arms(&self, selection: &Selection) -> Result<Vec<Arm>, RunError> {
        let bad = |why: String| Err(RunError::Policies(why));
        let all = PolicyConfig::NAMES.iter().filter(|name| !self.left_out.iter().any(|out| out == **name));
        let mut arms: Vec<Arm> = all
            .filter_map(|name| {
                Some(Arm { arm: (*name).to_owned(), ..Arm::new(PolicyConfig::by_name(name)?) })
            })
            .chain(self.policies.iter().cloned())
            .collect();
        if let Some(twice) = (1..arms.len()).find(|&n| arms[..n].iter().any(|arm| arm.arm == arms[n].arm)) {
            return bad(format!("two are called `{}`", arms[twice].arm));
        }
        if let Some(stray) = selection.policies.iter().find(|name| arms.iter().all(|arm| arm.arm != **name)) {
            let names: Vec<&str> = arms.iter().map(|arm| arm.arm.as_str()).collect();
            return bad(format!("there is no `{stray}`: take some of {}", names.join(", ")));
        }
        if !selection.policies.is_empty() {
            arms.retain(|arm| selection.policies.contains(&arm.arm));
        }
        Ok(arms)
    }

    /// The cells, workload after workload.
    ///
    /// # Errors
    /// If a workload is asked for that is not there, or runs on a fleet that is not there.
    pub fn cells(&self, selection: &Selection) -> Result<Vec<CellId>, RunError> {
        let mut cells = Vec::new();
        let ages_s = selection.ages_s.as_ref().unwrap_or(&self.ages_s);
        let mut met = vec![false; selection.only.len()];
        for workload in &self.workloads {
            for on in &workload.on {
                if !self.fleets.contains_key(&on.fleet) {
                    let why = format!("{}: there is no `{}`", workload.workload, on.fleet);
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
                    format!("there is no `{}`: take some of {}", selection.only[stray], names.join(", "));
                Err(RunError::Workload(why))
            }
            None => Ok(cells),
        }
    }

    /// Every cell with every policy under every seed. What runs the same requests comes one after the other.
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

    /// An arm as it is run: with what the router is told at this age of the load reports.
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

/// Loads have three digits, which is more than a knee is known to.
fn rounded(load: f64) -> f64 {
    (load * 1e3).round() / 1e3
}
