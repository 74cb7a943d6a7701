//! Running a cell: the requests of a workload at a load under a seed, placed by a policy.

use std::collections::BTreeMap;
use std::path::Path;

use kvlane_core::rng::Rng;
use kvlane_sim::workload::Drive;
use kvlane_sim::world::Send;
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::Trace;
use serde::{Deserialize, Serialize};

use super::{CellId, Matrix, Pace, Workloads};
use crate::figures::{Figures, play};
use crate::matrix::jobs;
use crate::scenario::{
    Arm, Fleet, Open, RunError, Setting, Source, Stage, WorkloadSpec, conversations, retime,
};

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its cell.
    pub cell: CellId,
    /// Its arm.
    pub arm: Arm,
    /// Its seed.
    pub seed: u32,
}

/// A matrix with its traces and engines loaded.
pub struct Bench<'a> {
    pub(super) matrix: &'a Matrix,
    settings: BTreeMap<String, Setting>,
    sources: BTreeMap<String, (Source, &'a Workloads)>,
}

/// Requests, and their arrivals.
pub(super) struct Content {
    pub(super) trace: Trace,
    pub(super) plan: Plan,
    drive: Drive,
}

/// The requests of a thread's last job, because the next one may need the same.
#[derive(Default)]
struct Last(Option<(String, u64, u32, Content)>);

/// Accuracy of a knee, as a factor.
const KNEE_FACTOR: f64 = 1.02;
/// Range of the search for a knee, in doublings of the starting load.
const KNEE_DOUBLINGS: u32 = 12;

// === impl Bench ===

impl<'a> Bench<'a> {
    /// Reads the traces of these cells with `open`. Paths of timing files are relative to `directory`.
    ///
    /// # Errors
    /// If the matrix is invalid or a trace cannot be read.
    pub fn new(
        matrix: &'a Matrix,
        cells: &[CellId],
        directory: &Path,
        open: &Open<'_>,
    ) -> Result<Self, RunError> {
        let mut settings = BTreeMap::new();
        for (name, fleet) in
            matrix.fleets.iter().filter(|(name, _)| cells.iter().any(|cell| cell.fleet == **name))
        {
            settings.insert(name.clone(), setting(fleet, directory)?);
        }
        let mut sources = BTreeMap::new();
        for workload in
            matrix.workloads.iter().filter(|one| cells.iter().any(|cell| cell.workload == one.workload))
        {
            let spec = WorkloadSpec {
                trace: workload.trace.clone(),
                generate: workload.generate.clone(),
                ..WorkloadSpec::default()
            };
            let mut source = Source::new(&spec, open)?;
            if let (Source::Trace(read), Some(tokens_max)) = (&mut source, workload.context_tokens_max) {
                **read = short(&read.0, &read.1, tokens_max);
            }
            if matches!((&source, workload.send), (Source::Generated(_), Pace::WindowS(_))) {
                let why = format!("{}: window_s is for traces: set seconds", workload.workload);
                return Err(RunError::Workload(why));
            }
            sources.insert(workload.workload.clone(), (source, workload));
        }
        Ok(Self { matrix, settings, sources })
    }

    /// Runs jobs on `threads` threads. `each` gets the result of each, by its index, in any order, from any thread; what
    /// it returns is in the order of the jobs.
    ///
    /// # Errors
    /// Of the first job that cannot be run.
    pub fn run<T: std::marker::Send>(
        &self,
        jobs: &[Job],
        threads: usize,
        each: &(dyn Fn(usize, Figures) -> T + Sync),
    ) -> Result<Vec<T>, RunError> {
        let job = |place: usize, last: &mut Last| Ok(each(place, self.job(&jobs[place], last)?));
        jobs::run(jobs.len(), threads, &job)
    }

    fn job(&self, job: &Job, last: &mut Last) -> Result<Figures, RunError> {
        let CellId { workload, load, age_s, .. } = &job.cell;
        let setting = self.setting(&job.cell)?;
        let arm = self.matrix.told(&job.arm, *age_s);
        arm.check()?;
        let same = |(name, at, seed, _): &(String, u64, u32, Content)| {
            name == workload && *at == load.to_bits() && *seed == job.seed
        };
        if !last.0.as_ref().is_some_and(same) {
            last.0 = None;
        }
        let (.., content) = match &mut last.0 {
            Some(known) => known,
            none => {
                none.insert((workload.clone(), load.to_bits(), job.seed, self.content(&job.cell, job.seed)?))
            }
        };
        let mut world = setting.world(&arm, job.seed);
        Ok(play(&mut world, &content.send(), &self.matrix.judgement, |_| {}).1)
    }

    /// The engines of a cell.
    pub(super) fn setting(&self, cell: &CellId) -> Result<&Setting, RunError> {
        self.settings.get(&cell.fleet).ok_or_else(|| not_loaded(cell))
    }

    /// The requests of a cell under a seed.
    pub(super) fn content(&self, cell: &CellId, seed: u32) -> Result<Content, RunError> {
        let (source, spec) = self.sources.get(&cell.workload).ok_or_else(|| not_loaded(cell))?;
        content(source, spec.send, cell.load, seed)
    }
}

// === impl Content ===

impl Content {
    /// All of them.
    pub(super) fn send(&self) -> Send<'_> {
        let Self { trace, plan, drive } = self;
        Send { trace, plan, requests: 0..trace.requests.len() as u32, origin_s: 0.0, drive: *drive }
    }
}

fn not_loaded(cell: &CellId) -> RunError {
    RunError::Workload(format!("{} on {} was not loaded", cell.workload, cell.fleet))
}

/// The knee of a workload on a fleet, over a number of seeds: mean TTFT is measured at several loads until the load
/// is known within 2 %. `tried` is called with each load and its result.
///
/// # Errors
/// If a job cannot be run, or there is no knee near the one in the matrix.
pub fn knee(
    bench: &Bench<'_>,
    cell: &CellId,
    seeds: u32,
    threads: usize,
    tried: &mut dyn FnMut(f64, f64),
) -> Result<f64, RunError> {
    let rule = &bench.matrix.knee;
    let arms =
        bench.matrix.arms(&super::Selection { policies: vec![rule.policy.clone()], ..Default::default() })?;
    let mut in_time = |load: f64| -> Result<bool, RunError> {
        let jobs: Vec<Job> = (1..=seeds.max(1))
            .map(|seed| Job { cell: CellId { load, ..cell.clone() }, arm: arms[0].clone(), seed })
            .collect();
        let ttft_s = bench.run(&jobs, threads, &|_, figures| {
            figures.get("ttft_mean_s").copied().unwrap_or(f64::INFINITY)
        })?;
        let mean_s = ttft_s.iter().sum::<f64>() / jobs.len() as f64;
        tried(load, mean_s);
        Ok(mean_s <= rule.ttft_mean_s)
    };
    let (mut low, mut high) = (cell.load, cell.load);
    let within = in_time(cell.load)?;
    let mut step = 1.25;
    for doubling in 0.. {
        if doubling > KNEE_DOUBLINGS {
            return Err(RunError::Workload(format!(
                "{}: no knee found around load {}",
                cell.workload, cell.load
            )));
        }
        let at = if within { high * step } else { low / step };
        let in_time = in_time(at)?;
        if within {
            high = at
        } else {
            low = at
        }
        if in_time != within {
            break;
        }
        if within {
            low = at
        } else {
            high = at
        }
        step *= 1.25;
    }
    while high / low > KNEE_FACTOR {
        let middle = (low * high).sqrt();
        if in_time(middle)? { low = middle } else { high = middle }
    }
    Ok(low)
}

fn setting(fleet: &Fleet, directory: &Path) -> Result<Setting, RunError> {
    Ok(Setting {
        engines: fleet.configs(directory)?,
        link: fleet.link(),
        faults: Vec::new(),
        stopwatch: None,
    })
}

/// A trace without requests whose prompt and answer exceed this length, and without all that depend on them.
fn short(trace: &Trace, plan: &Plan, tokens_max: u32) -> (Trace, Plan) {
    let mut kept = vec![true; trace.requests.len()];
    for index in 0..trace.requests.len() as u32 {
        let request = &trace.requests[index as usize];
        let context = u64::from(request.input_tokens) + u64::from(request.output_tokens);
        kept[index as usize] &= context <= u64::from(tokens_max);
        if !kept[index as usize] {
            plan.children(index).for_each(|child| kept[child as usize] = false);
        }
    }
    let trace = trace.select((0..trace.requests.len() as u32).filter(|&index| kept[index as usize]));
    let plan = Plan::new(&trace);
    (trace, plan)
}

/// The requests of a load under a seed.
fn content(source: &Source, send: Pace, load: f64, seed: u32) -> Result<Content, RunError> {
    let stage = |count: u32| Stage { rate: load, seconds: f64::from(count) / load };
    let timed = |(mut trace, plan): (Trace, Plan), stage: Stage| {
        retime(&mut trace, &plan, &[stage], seed.into());
        // Conversations are consecutive and may overlap in time: the start of each decides.
        Content { trace, plan, drive: Drive::Open { load: 1.0 } }
    };
    match (source, send) {
        (Source::Trace(read), Pace::WindowS(seconds)) => Ok(window(&read.0, seconds, load, seed)),
        (Source::Generated(_), Pace::WindowS(_)) => {
            Err(RunError::Workload("window_s is for traces: set seconds".to_owned()))
        }
        (Source::Trace(read), Pace::Seconds(_) | Pace::Conversations(_)) => {
            let (trace, plan) = &**read;
            let stage = match send {
                Pace::Conversations(count) => stage(count),
                Pace::Seconds(seconds) | Pace::WindowS(seconds) => Stage { rate: load, seconds },
            };
            let mut roots = plan.roots.clone();
            let count = stage.count() as usize;
            if count > roots.len() {
                let why = format!("{count} conversations are needed, the trace has {}", roots.len());
                return Err(RunError::Workload(why));
            }
            let mut rng = Rng::new(seed.into());
            for place in 0..count {
                roots.swap(place, place + rng.below(plan.roots.len() - place));
            }
            Ok(timed(conversations(trace, plan, &roots[..count]), stage))
        }
        (Source::Generated(_), Pace::Seconds(seconds)) => {
            let stage = Stage { rate: load, seconds };
            Ok(timed(source.conversations(stage.count(), seed.into())?, stage))
        }
        (Source::Generated(_), Pace::Conversations(count)) => {
            Ok(timed(source.conversations(count, seed.into())?, stage(count)))
        }
    }
}

/// The requests of a window of a trace at a load, from a position drawn from the seed. A conversation that started
/// before continues as one that starts there; a turn after the window is left out.
fn window(trace: &Trace, seconds: f64, load: f64, seed: u32) -> Content {
    let span_s = seconds * load;
    let start_s = Rng::new(seed.into()).unit() * (trace.span_s() - span_s).max(0.0);
    let piece = trace.slice(start_s..start_s + span_s, 1.0, 0);
    let plan = Plan::new(&piece);
    let due_s = |index: u32| {
        let begin_s = piece.requests[plan.root[index as usize] as usize].arrival_s;
        begin_s / load + (piece.requests[index as usize].arrival_s - begin_s)
    };
    let trace = piece.select((0..piece.requests.len() as u32).filter(|&index| due_s(index) < seconds));
    let plan = Plan::new(&trace);
    Content { trace, plan, drive: Drive::Open { load } }
}
