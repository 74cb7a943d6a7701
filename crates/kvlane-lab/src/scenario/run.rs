//! Running a scenario: every policy at every load under every seed, on a number of threads.
//!
//! A job is one policy, one load (or all of them, if they are stages of one run) and one seed. Jobs share no state,
//! and their results are combined in the order of the scenario, so they do not depend on the number of threads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use kvlane_core::index::{approx, exact, sketch};
use kvlane_core::time::Nanos;
use kvlane_core::timing::PresetError;
use kvlane_core::{router, scheduler};
use kvlane_sim::engine::EngineConfig;
use kvlane_sim::fault::{EventFeed, Fault};
use kvlane_sim::outcome::Outcome;
use kvlane_sim::transfer::TransferConfig;
use kvlane_sim::workload::Drive;
use kvlane_sim::world::{
    CellsConfig, Decisions, Exchange, GatewaysConfig, Ramp, ReportFeed, Send, Sketches, World, WorldConfig,
};
use kvlane_trace::TraceError;
use kvlane_trace::generate::WorkloadError;
use kvlane_trace::record::Record;
use kvlane_trace::trace::Trace;
use serde::{Deserialize, Serialize};

use crate::statistics::ci::Interval;

use super::points::{Point, Source, points, retime};
use super::progress::Progress;
use super::{Arm, CacheKnowledge, Published, Roles, Scenario, Stage};
use crate::digest::Digest;
use crate::figures::{Figures, Judgement, mean, play_ramped, request_intervals, seed_intervals, whole};
use crate::matrix::jobs;
use crate::part::Part;

/// Maximum jobs of a scenario.
const JOBS_MAX: usize = 100_000;

/// Memory of the approximate index, and lifetime of its entries: the gateway's defaults.
const INDEX: approx::Config = approx::Config { memory_bytes_max: 256 << 20, ttl: Nanos::from_secs(1800) };
/// Time from a death until the router knows: the gateway detects it by the first failed request.
const HEALTH_DELAY: Nanos = Nanos::from_millis(100);
/// Maximum attempts of a request: the gateway's default.
const ATTEMPTS_MAX: u8 = 5;
/// Time between two samples of the requests in flight.
const SAMPLE_EVERY: Nanos = Nanos::from_millis(100);
/// Most bytes of a cell's sketch.
const SKETCH_BYTES_MAX: usize = 4 << 20;

/// Why a scenario cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The fleet is invalid.
    #[error("fleet: {0}")]
    Fleet(String),
    /// The model or machine is unknown.
    #[error("fleet")]
    Preset(#[from] PresetError),
    /// The workload is invalid.
    #[error("workload: {0}")]
    Workload(String),
    /// The workload to generate is invalid.
    #[error(transparent)]
    Generate(#[from] WorkloadError),
    /// The trace cannot be read.
    #[error("trace {path}", path = path.display())]
    Trace {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: TraceError,
    },
    /// The policies are invalid.
    #[error("policies: {0}")]
    Policies(String),
    /// The limits for goodput are invalid.
    #[error(
        "judgement: slo_ttft_s and slo_tpot_ms must be at least 0, heavy_from_tokens at least medium_from_tokens"
    )]
    Judgement,
    /// There are too many runs.
    #[error("{0} runs, but the maximum is {JOBS_MAX}: use fewer policies, loads or seeds")]
    TooMany(usize),
}

/// Load of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Cell {
    /// Conversations per second.
    Rate(f64),
    /// Clients.
    Concurrency(u32),
    /// Factor on the trace's rate.
    Load(f64),
    /// The whole arm.
    #[default]
    All,
}

/// One policy at one load.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The arm.
    pub arm: String,
    /// The load.
    pub cell: Cell,
    /// Published figures, if any.
    pub published: Figures,
    /// Simulated figures: the mean over the seeds.
    pub simulated: Figures,
    /// 95 % confidence intervals: over the seeds, or over the requests if there was one seed.
    pub intervals: BTreeMap<String, Interval>,
    /// Number of decisions and, if timed, their wall-clock time, over all seeds.
    pub decisions: Decisions,
    /// Records of the requests under the first seed, if [`Aside::records`] is set.
    pub records: Vec<Record>,
    /// Seconds to the first token of each answered request, by its index in the trace, for each seed.
    pub first_tokens: Vec<Vec<(u32, f32)>>,
}

/// Data collected besides the figures.
#[derive(Clone, Copy, Debug, Default)]
pub struct Aside {
    /// Whether decisions are timed.
    pub stopwatch: Option<fn() -> Nanos>,
    /// Whether each request's record is kept: about 500 bytes for each.
    pub records: bool,
}

/// Results of one job for one row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Found {
    figures: Figures,
    intervals: BTreeMap<String, Interval>,
    decisions: Decisions,
    records: Vec<Record>,
    #[serde(default)]
    first_tokens: Vec<(u32, f32)>,
}

/// Monotonic time since the first call: a stopwatch for [`Aside`].
pub fn wall_clock() -> Nanos {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().into()
}

/// A scenario whose inputs are read and validated.
pub struct Simulation<'a> {
    scenario: &'a Scenario,
    setting: Setting,
    source: Source,
    points: Vec<Point>,
    /// Whether records are kept.
    records: bool,
}

/// Opens the trace of a scenario.
pub type Open<'a> = dyn Fn(&Path) -> Result<Trace, TraceError> + 'a;

/// Runs a whole scenario: [`Simulation::new`], [`Simulation::run`] and [`Simulation::rows`].
///
/// # Errors
/// If the scenario is invalid or its trace cannot be read.
pub fn run(
    scenario: &Scenario,
    directory: &Path,
    open: &Open<'_>,
    threads: usize,
    aside: Aside,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Vec<Row>, RunError> {
    let simulation = Simulation::new(scenario, directory, open, aside)?;
    let found = simulation.run(Part::WHOLE, threads, progress)?;
    Ok(simulation.rows(found))
}

/// One row from its results by seed.
fn row(scenario: &Scenario, arm: &Arm, cell: Cell, found: &[&Found]) -> Row {
    let runs: Vec<Figures> = found.iter().map(|found| found.figures.clone()).collect();
    let intervals = match found {
        [one] => one.intervals.clone(),
        _ => seed_intervals(&runs, 1),
    };
    let decisions = found.iter().fold(Decisions::default(), |sum, found| Decisions {
        count: sum.count + found.decisions.count,
        time: sum.time + found.decisions.time,
    });
    let published = published(scenario, arm, cell);
    Row {
        arm: arm.arm.clone(),
        cell,
        published,
        simulated: mean(&runs),
        intervals,
        decisions,
        records: Vec::new(),
        first_tokens: found.iter().map(|found| found.first_tokens.clone()).collect(),
    }
}

/// The arm as a whole, if there are published figures for it. Rates are means over its rows; figures of requests are
/// means over the requests, as in benchmark summaries.
fn whole_arm(scenario: &Scenario, arm: &Arm, rows: &[Row]) -> Option<Row> {
    let published = published(scenario, arm, Cell::All);
    if published.is_empty() {
        return None;
    }
    let simulated: Vec<Figures> = rows.iter().map(|row| row.simulated.clone()).collect();
    Some(Row {
        arm: arm.arm.clone(),
        cell: Cell::All,
        published,
        simulated: whole(&simulated),
        intervals: BTreeMap::new(),
        ..Row::default()
    })
}

/// Published figures of an arm at a load.
fn published(scenario: &Scenario, arm: &Arm, cell: Cell) -> Figures {
    let at = |published: &&Published| published.arm == arm.arm && published.cell() == cell;
    scenario.published.iter().find(at).map(|published| published.figures.clone()).unwrap_or_default()
}

// === impl Cell ===

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(rate) => write!(f, "rate {rate}"),
            Self::Concurrency(clients) => write!(f, "concurrency {clients}"),
            Self::Load(load) => write!(f, "load {load}"),
            Self::All => f.write_str("all loads"),
        }
    }
}

// === impl Published ===

impl Published {
    fn cell(&self) -> Cell {
        match (self.rate, self.concurrency, self.load) {
            (Some(rate), ..) => Cell::Rate(rate),
            (_, Some(clients), _) => Cell::Concurrency(clients),
            (.., Some(load)) => Cell::Load(load),
            _ => Cell::All,
        }
    }
}

/// What is the same for all arms: the fleet, what goes wrong with it, and whether decisions are timed.
pub(crate) struct Setting {
    /// The engines, those that only prefill last.
    pub(crate) engines: Vec<EngineConfig>,
    pub(crate) link: TransferConfig,
    pub(crate) faults: Vec<Fault>,
    pub(crate) stopwatch: Option<fn() -> Nanos>,
}

// === impl Setting ===

impl Setting {
    /// A world for an arm under a seed, at time zero.
    pub(crate) fn world(&self, arm: &Arm, seed: u32) -> World {
        let secs = Nanos::from_secs_f64;
        let exact = arm.cache_knowledge == CacheKnowledge::Exact;
        let exact = exact.then_some(exact::Config { memory_bytes_max: usize::MAX });
        let first = self.engines.first();
        let router = router::Config {
            scheduler: scheduler::Config {
                queue_size: arm.queue_len_max,
                queue_timeout: secs(arm.queue_timeout_s),
                session_admission: arm.session_admission,
                max_requests_per_endpoint: arm.max_requests_per_endpoint,
                prefill_policy: arm.prefill_policy.clone(),
                split_tokens_min: arm.split_tokens_min,
                timing: first.filter(|_| arm.timing).map(|engine| Box::new(engine.timing.clone())),
                seed: seed.into(),
                ..scheduler::Config::new(arm.policy.clone())
            },
            index: INDEX,
            exact,
            block_tokens: first.map_or(1, |engine| engine.block_tokens),
        };
        let mut engines = self.engines.clone();
        if let Some(eviction) = arm.eviction {
            engines.iter_mut().for_each(|engine| engine.eviction = eviction);
        }
        let request_s = first.map_or(0.0, |engine| engine.timing.host.request_secs);
        World::new(WorldConfig {
            parts: arm.parts(engines.len()),
            engines,
            router,
            gateways: arm.gateways(),
            fetch_tokens_min: arm.fetch_tokens_min,
            link: self.link,
            routing_delay: secs(arm.routing_delay_s + request_s),
            reports: arm
                .report_interval_s
                .map(|interval_s| ReportFeed { interval: secs(interval_s), age: secs(arm.report_age_s) }),
            events: EventFeed {
                delay: secs(arm.kv_event_delay_s),
                jitter: secs(arm.kv_event_jitter_s),
                lost: arm.kv_events_lost,
                duplicated: arm.kv_events_duplicated,
            },
            faults: self.faults.clone(),
            health_delay: HEALTH_DELAY,
            attempts_max: ATTEMPTS_MAX,
            rules: None,
            reloaded: None,
            hints: arm.hints,
            client_timeout: None,
            seed: seed.into(),
            stopwatch: self.stopwatch,
        })
    }
}

// === impl Arm ===

impl Arm {
    fn gateways(&self) -> GatewaysConfig {
        let exchange = self.exchange_interval_s.map(|interval_s| Exchange {
            every: Nanos::from_secs_f64(interval_s),
            gap: Nanos::from_secs_f64(self.exchange_gap_s.unwrap_or(interval_s)),
            delay: Nanos::from_secs_f64(self.exchange_delay_s),
            jitter: Nanos::from_secs_f64(self.exchange_jitter_s),
            lost: self.exchange_lost,
            duplicated: 0.0,
        });
        let secs = Nanos::from_secs_f64;
        let size = sketch::Config { bits_per_mark: self.sketch_bits, bytes_max: SKETCH_BYTES_MAX };
        let cells = (self.cells > 1).then(|| CellsConfig {
            count: self.cells,
            policy: self.front_policy.clone(),
            loads_every: secs(self.cell_load_interval_s),
            sketches: self.sketch_interval_s.map(|interval_s| Sketches { every: secs(interval_s), size }),
            delay: secs(self.cell_delay_s),
        });
        GatewaysConfig {
            count: self.gateways,
            cells,
            exchange,
            skew: Nanos::ZERO,
            sample_every: Some(SAMPLE_EVERY),
        }
    }
}

// === impl Simulation ===

impl<'a> Simulation<'a> {
    /// Validates everything that can be validated before the first run. A timing file's path is relative to
    /// `directory`, traces are opened by `open`.
    ///
    /// # Errors
    /// If the scenario is invalid or its trace cannot be read.
    pub fn new(
        scenario: &'a Scenario,
        directory: &Path,
        open: &Open<'_>,
        aside: Aside,
    ) -> Result<Self, RunError> {
        let fleet = &scenario.fleet;
        let engines = fleet.configs(directory)?;
        if scenario.policies.is_empty() {
            return Err(RunError::Policies("at least one is needed".to_owned()));
        }
        for (index, arm) in scenario.policies.iter().enumerate() {
            arm.check()?;
            if arm.prefill_engines > 0 && arm.session_admission {
                let why = format!("`{}`: session_admission and prefill_engines exclude each other", arm.arm);
                return Err(RunError::Policies(why));
            }
            if arm.prefill_engines > 0 && arm.roles == Roles::Elastic {
                let why = format!("`{}`: prefill_engines and roles: elastic exclude each other", arm.arm);
                return Err(RunError::Policies(why));
            }
            if u32::from(arm.cells) > fleet.engines() {
                let why = format!("`{}`: cells must be at most the number of engines", arm.arm);
                return Err(RunError::Policies(why));
            }
            if arm.cells > 1 && arm.prefill_engines > 0 {
                let why = format!("`{}`: cells and prefill_engines exclude each other", arm.arm);
                return Err(RunError::Policies(why));
            }
            if arm.prefill_engines >= fleet.engines() {
                let why = format!("`{}`: prefill_engines must be less than the number of engines", arm.arm);
                return Err(RunError::Policies(why));
            }
            if scenario.policies[..index].iter().any(|other| other.arm == arm.arm) {
                let why = format!("two have the name `{}`: set a different `arm` for each", arm.arm);
                return Err(RunError::Policies(why));
            }
        }
        let known = |arm: &String| scenario.policies.iter().any(|other| other.arm == *arm);
        if let Some(stray) = scenario.published.iter().find(|published| !known(&published.arm)) {
            let why = format!("published: no policy has the name `{}`", stray.arm);
            return Err(RunError::Policies(why));
        }
        if let Some(popularity) = &scenario.workload.adapters {
            popularity.check().map_err(RunError::Workload)?;
        }
        let points = points(&scenario.workload)?;
        let cells: Vec<Cell> = points.iter().flat_map(Point::cells).chain([Cell::All]).collect();
        if let Some(stray) = scenario.published.iter().find(|published| !cells.contains(&published.cell())) {
            let why = format!("published: `{}` is not simulated at {}", stray.arm, stray.cell());
            return Err(RunError::Workload(why));
        }
        let Judgement { slo_ttft_s, slo_tpot_ms, medium_from_tokens, heavy_from_tokens } = scenario.judgement;
        if !(slo_ttft_s >= 0.0 && slo_tpot_ms >= 0.0 && medium_from_tokens <= heavy_from_tokens) {
            return Err(RunError::Judgement);
        }
        let faults =
            scenario.faults.iter().map(|fault| fault.fault(fleet.engines())).collect::<Result<_, _>>()?;
        let simulation = Self {
            scenario,
            setting: Setting { engines, link: fleet.link(), faults, stopwatch: aside.stopwatch },
            points,
            records: aside.records,
            source: Source::new(&scenario.workload, open)?,
        };
        match simulation.jobs() {
            count if count > JOBS_MAX => Err(RunError::TooMany(count)),
            _ => Ok(simulation),
        }
    }

    /// Number of jobs.
    pub fn jobs(&self) -> usize {
        let runs = self.scenario.policies.len().saturating_mul(self.points.len());
        runs.saturating_mul(self.seeds())
    }

    /// Digest of all inputs of the results: the scenario, its engines, its requests, and whether records are kept.
    pub fn configuration(&self) -> String {
        let mut digest = Digest::default();
        let inputs = (self.scenario, &self.setting.engines, &self.source, self.records);
        // A digest takes any text.
        _ = write!(digest, "{inputs:?}");
        digest.to_string()
    }

    /// Runs the jobs of a part on `threads` threads. `progress` is called from any thread with the number of requests
    /// ended and the approximate number of all.
    ///
    /// # Errors
    /// If the requests of a seed cannot be generated.
    pub fn run(
        &self,
        part: Part,
        threads: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Vec<Vec<Found>>, RunError> {
        let jobs: Vec<_> = part.units(self.jobs()).map(|job| self.inputs(job)).collect();
        let progress = Progress::new(jobs.iter().map(|(_, point, _)| *point), progress);
        let job = |place: usize, (): &mut ()| {
            let (arm, point, seed) = jobs[place];
            self.job(arm, point, seed, &progress)
        };
        jobs::run(jobs.len(), threads, &job)
    }

    /// The rows, from the results of all jobs.
    pub fn rows(&self, mut found: Vec<Vec<Found>>) -> Vec<Row> {
        let (scenario, seeds) = (self.scenario, self.seeds());
        let mut rows: Vec<Row> = Vec::new();
        for (arm, of_arm) in scenario.policies.iter().zip(found.chunks_mut(self.points.len() * seeds)) {
            let first = rows.len();
            for (point, of_point) in self.points.iter().zip(of_arm.chunks_mut(seeds)) {
                for (place, cell) in point.cells().into_iter().enumerate() {
                    let of_first = of_point.first_mut().and_then(|found| found.get_mut(place));
                    let records =
                        of_first.map(|found| std::mem::take(&mut found.records)).unwrap_or_default();
                    let seeds: Vec<&Found> = of_point.iter().filter_map(|found| found.get(place)).collect();
                    rows.push(Row { records, ..row(scenario, arm, cell, &seeds) });
                }
            }
            let whole = whole_arm(scenario, arm, &rows[first..]);
            rows.extend(whole);
        }
        rows
    }

    fn seeds(&self) -> usize {
        self.scenario.seeds.max(1) as usize
    }

    /// Arm, point and seed of a job; the seed varies fastest.
    fn inputs(&self, job: usize) -> (&'a Arm, &Point, u32) {
        let (run, seed) = (job / self.seeds(), job % self.seeds());
        let (arm, point) = (run / self.points.len(), run % self.points.len());
        let seed = self.scenario.first_seed.saturating_add(seed as u32);
        (&self.scenario.policies[arm], &self.points[point], seed)
    }

    /// One policy, one point, one seed: the results of each of the point's cells.
    fn job(
        &self,
        arm: &Arm,
        point: &Point,
        seed: u32,
        progress: &Progress<'_>,
    ) -> Result<Vec<Found>, RunError> {
        let mut world = self.setting.world(arm, seed);
        let keep = self.records && seed == self.scenario.first_seed;
        let content_seed = u64::from(seed);
        let mut content = match point.conversations() {
            None => self.source.all(content_seed)?,
            Some(count) => Cow::Owned(self.source.conversations(count, content_seed)?),
        };
        if let Some(popularity) = &self.scenario.workload.adapters {
            content.to_mut().0.draw_adapters(popularity, content_seed);
        }
        if let Point::Clients(clients) = point
            && clients.varies()
        {
            let (trace, plan) = content.to_mut();
            clients.vary(trace, plan, content_seed);
        }
        progress.begin(point, content.0.requests.len());
        let tell: &dyn Fn() = &|| progress.end_request();
        let stages: Vec<Stage> = match point {
            Point::Load(_) | Point::Clients(_) => Vec::new(),
            Point::Stage(stage) => vec![*stage],
            Point::Stages(open) => open.warm_up.iter().chain(&open.stages).copied().collect(),
        };
        let mut ranges = Vec::new();
        if !stages.is_empty() {
            let (trace, plan) = content.to_mut();
            ranges = retime(trace, plan, &stages, content_seed);
        }
        let (trace, plan) = &*content;
        let all = 0..trace.requests.len() as u32;
        // A trace may be a part of another and start late.
        let first_s = trace.requests.first().map_or(0.0, |first| first.arrival_s);
        let (origin_s, drive) = match point {
            Point::Load(load) => (first_s, Drive::Open { load: *load }),
            Point::Clients(clients) => (first_s, Drive::Closed { clients: clients.clients }),
            Point::Stage(_) | Point::Stages(_) => (0.0, Drive::Open { load: 1.0 }),
        };
        let send = |requests| Send { trace, plan, requests, origin_s, drive };
        match point {
            Point::Clients(clients) if clients.is_ramped() => {
                let ramp = clients.ramp(trace, plan);
                Ok(vec![self.play(&mut world, &send(all), Some(&ramp), tell, keep)])
            }
            Point::Load(_) | Point::Clients(_) | Point::Stage(_) => {
                Ok(vec![self.play(&mut world, &send(all), None, tell, keep)])
            }
            Point::Stages(open) => {
                let mut found = Vec::new();
                for requests in ranges {
                    found.push(self.play(&mut world, &send(requests), None, tell, keep));
                    world.rest(Nanos::from_secs_f64(open.pause_s));
                }
                Ok(found.split_off(usize::from(open.warm_up.is_some())))
            }
        }
    }

    /// Plays a part of a trace and computes its figures. Records are kept if `keep` is set.
    fn play(
        &self,
        world: &mut World,
        send: &Send<'_>,
        ramp: Option<&Ramp>,
        tell: &dyn Fn(),
        keep: bool,
    ) -> Found {
        let decided = world.decisions();
        // One step may end several requests.
        let mut told = 0;
        let (run, figures) = play_ramped(world, send, ramp, &self.scenario.judgement, |over| {
            (told..over).for_each(|_| tell());
            told = over;
        });
        let decisions = Decisions {
            count: world.decisions().count - decided.count,
            time: world.decisions().time - decided.time,
        };
        // With several seeds, the intervals are over the seeds.
        let alone = self.scenario.seeds <= 1;
        let intervals = if alone { request_intervals(&run, 1) } else { BTreeMap::new() };
        let record = |outcome: &Outcome| outcome.record(send.trace, run.start);
        let records = if keep { run.outcomes.iter().map(record).collect() } else { Vec::new() };
        let first_token = |outcome: &Outcome| {
            let first = outcome.first_token.filter(|_| outcome.is_ok())?;
            Some((outcome.request, (first - outcome.due).as_secs_f64() as f32))
        };
        let first_tokens = run.outcomes.iter().filter_map(first_token).collect();
        Found { figures, intervals, decisions, records, first_tokens }
    }
}
