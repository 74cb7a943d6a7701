//! Executes a matrix or a part of it: starts engines and router, empties caches, warms up, sends requests, stops the
//! processes.
//!
//! A run that fails (a router that does not start, a client that was late) is recorded with its reason, and the
//! matrix continues.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kvlane_trace::record::{Gaps, Record};
use kvlane_trace::trace::Trace;
use serde::{Deserialize, Serialize};

use super::judge::{Named, Recorded, Report, Run};
use super::machine::{machine, version};
use super::process::Process;
use super::stage::{Failure, Stage};
use super::template::{self, Values};
use super::workload::{Source, SourceError};
use super::{Job, Matrix, MatrixError};
use crate::digest::Digest;
use crate::part::Part;
use crate::replay::{Bounds, ReplayReport, replay};

/// Failures of a run whose messages are kept.
const ERRORS_KEPT_MAX: usize = 4;

/// Environment of a matrix.
#[derive(Clone, Debug)]
pub struct Place {
    /// Directory for the matrix's relative paths.
    pub directory: PathBuf,
    /// Directory for logs and for files of routers. Created if necessary.
    pub scratch: PathBuf,
    /// The value of `{kvlane}`.
    pub kvlane: PathBuf,
}

/// Progress events.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A run begins.
    Begins {
        /// Its index in the order, from 0.
        place: usize,
        /// Number of runs.
        of: usize,
        /// The run.
        job: &'a Job,
        /// Number of its requests.
        requests: usize,
    },
    /// Number of its requests that have ended.
    Sent(usize),
    /// The run has ended.
    Ended(&'a Recorded),
}

/// Why a matrix cannot be executed at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It is invalid.
    #[error(transparent)]
    Matrix(#[from] MatrixError),
    /// There are no requests to send.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A file that cannot be written or read.
    #[error("{path}: {why}")]
    File {
        /// Its path.
        path: String,
        /// The cause.
        why: io::Error,
    },
    /// The environment variable is not set.
    #[error("client.api_key_env: the variable {0} is not set")]
    NoKey(String),
    /// Runs that cannot be compared.
    #[error(
        "the parts were measured on different machines or with different routers ({0}): run all parts on equal machines"
    )]
    Mixed(String),
}

/// All runs of one load and one seed. They belong together: a part has all of them, so that changes of the machine
/// affect all routers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The client's machine.
    machine: BTreeMap<String, String>,
    /// The routers, with their reported versions.
    routers: Vec<Named>,
    /// The runs, in order.
    runs: Vec<Recorded>,
}

/// Number of loads and seeds.
pub fn units(matrix: &Matrix) -> usize {
    matrix.loads.values().len() * matrix.seeds.len()
}

/// Digest of all inputs of the results, the machine and the routers' programs excepted: those are compared by [`judge`].
pub fn configuration(matrix: &Matrix, source: &Source) -> String {
    let mut digest = Digest::default();
    // A digest takes any text.
    _ = write!(digest, "{:?}", (matrix, source));
    digest.to_string()
}

/// Judges the runs of all loads and seeds.
///
/// # Errors
/// If they were made on different machines, or by different versions of a router.
pub fn judge(
    matrix: &Matrix,
    source: &Source,
    measured: Vec<Measured>,
) -> Result<(Report, Vec<Recorded>), RunError> {
    let (machine, routers) =
        measured.first().map(|first| (first.machine.clone(), first.routers.clone())).unwrap_or_default();
    for other in &measured {
        if other.machine != machine {
            return Err(RunError::Mixed(format!("{machine:?} and {:?}", other.machine)));
        }
        if let Some((ours, theirs)) = routers.iter().zip(&other.routers).find(|(ours, theirs)| ours != theirs)
        {
            return Err(RunError::Mixed(format!("{ours:?} and {theirs:?}")));
        }
    }
    let recorded: Vec<Recorded> = measured.into_iter().flat_map(|measured| measured.runs).collect();
    let report = Report::new(matrix, source.is_generated(), routers, machine, &recorded);
    Ok((report, recorded))
}

/// Executes the runs of a part of a matrix, in order. Runs in `kept` are not repeated. Requests come from `source`.
///
/// # Errors
/// If the matrix is invalid, or its trace or files do not exist. A run that fails is one of the results.
pub async fn run(
    matrix: &Matrix,
    place: &Place,
    source: &Source,
    part: Part,
    mut kept: impl FnMut(&Job) -> Option<Recorded>,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Vec<Measured>, RunError> {
    matrix.check()?;
    let stage = Stage::new(matrix, place, source)?;
    let order = matrix.order()?;
    let (machine, routers) = (machine(), stage.versions().await);
    let began = Instant::now();
    let mut measured: Vec<Measured> = Vec::new();
    for unit in part.units(units(matrix)) {
        let mut runs: Vec<Recorded> = Vec::new();
        for (n, job) in order.iter().enumerate().skip(unit * routers.len()).take(routers.len()) {
            if let Some(kept) = kept(job) {
                runs.push(kept);
                continue;
            }
            let requests = stage.requests(job)?;
            progress(Progress::Begins { place: n, of: order.len(), job, requests: requests.requests.len() });
            let began_s = began.elapsed().as_secs_f64();
            let mut one = stage.one(job, n, requests, &mut |sent| progress(Progress::Sent(sent))).await?;
            (one.run.place, one.run.began_s) = (n, began_s);
            progress(Progress::Ended(&one));
            runs.push(one);
        }
        measured.push(Measured { machine: machine.clone(), routers: routers.clone(), runs });
    }
    Ok(measured)
}

// === impl Stage ===

impl Stage<'_> {
    fn requests(&self, job: &Job) -> Result<Trace, SourceError> {
        self.source.requests(&self.matrix.workload, &self.matrix.loads, job.load, job.seed)
    }

    /// One run, with its failure if any.
    async fn one(
        &self,
        job: &Job,
        place: usize,
        requests: Trace,
        sent: &mut dyn FnMut(usize),
    ) -> Result<Recorded, RunError> {
        let directory = self.place.scratch.join(format!("run-{place}"));
        let file = |why| RunError::File { path: directory.display().to_string(), why };
        std::fs::create_dir_all(&directory).map_err(file)?;
        let mut run = Run {
            job: job.clone(),
            place,
            began_s: 0.0,
            wall_s: 0.0,
            requests: 0,
            errors_by_class: BTreeMap::new(),
            first_errors: Vec::new(),
            client_lag_p99_s: None,
            itl_p50_s: None,
            itl_p99_s: None,
            router_cpu_s: None,
            router_rss_bytes: None,
            failure: None,
        };
        match self.measure(job, &directory, requests, &mut run, sent).await {
            Ok(records) => {
                // Logs of successful runs are not needed, and may be large.
                let _ = std::fs::remove_dir_all(&directory);
                Ok(Recorded { run, records })
            }
            Err(failure) => {
                run.failure = Some(format!("{failure} (logs: {})", directory.display()));
                Ok(Recorded { run, records: Vec::new() })
            }
        }
    }

    async fn measure(
        &self,
        job: &Job,
        directory: &Path,
        requests: Trace,
        run: &mut Run,
        sent: &mut dyn FnMut(usize),
    ) -> Result<Vec<Record>, Failure> {
        let Some(arm) = self.arms.iter().find(|arm| arm.name == job.router) else {
            return Err(Failure::Ended(format!("unknown router '{}'", job.router)));
        };
        let mut fleet = self.engines(job, directory).await?;
        let mut router = self.router(arm, &mut fleet, job, directory).await?;
        self.warm(&mut router, &mut fleet).await?;
        let before = router.process.as_ref().and_then(Process::usage);
        let requests = Arc::new(requests);
        let config = self.replay(&router.url, requests.clone(), job.seed.into());
        let ReplayReport { records, wall_s, client_lag_s, client, itl_s, first_errors, .. } =
            replay(config, |ended, _| sent(ended)).await?;
        let after = router.process.as_ref().and_then(Process::usage);
        router.check(&mut fleet)?;
        if let (Some(before), Some(after)) = (before, after) {
            run.router_cpu_s = Some((after.cpu_s - before.cpu_s).max(0.0));
            run.router_rss_bytes = Some(after.rss_bytes);
        }
        run.wall_s = wall_s;
        run.client_lag_p99_s = client_lag_s.map(|lag| lag.p99);
        let speed = self.matrix.workload.speed;
        run.itl_p50_s = itl_s.map(|itl| itl.p50 * speed);
        run.itl_p99_s = itl_s.map(|itl| itl.p99 * speed);
        run.first_errors = first_errors.into_iter().take(ERRORS_KEPT_MAX).collect();
        let from_s = self.matrix.warm_up.window_s;
        // By the trace's own times, which are the same behind every router, unlike the due times of later turns.
        let counts = |record: &Record| {
            let asked = requests.requests.get(record.id as usize);
            asked.is_some_and(|asked| asked.arrival_s * speed >= from_s)
        };
        let records: Vec<Record> =
            records.into_iter().filter(counts).map(|record| in_trace_time(record, speed)).collect();
        run.requests = records.len() as u64;
        for record in records.iter().filter(|record| !record.is_ok()) {
            let class = record.error.clone().unwrap_or_else(|| "status".to_owned());
            *run.errors_by_class.entry(class).or_default() += 1;
        }
        let asked = &self.matrix.client;
        let bounds = Bounds { late_s: asked.lag_p99_max_s, cpu_share: asked.cpu_share_max };
        match client.bottleneck(&bounds) {
            why if why.is_empty() => Ok(records),
            why => Err(Failure::Late(why.join("; "))),
        }
    }
    /// The routers with their reported versions.
    async fn versions(&self) -> Vec<Named> {
        let mut found = Vec::new();
        let mut values = Values::default();
        values.set("kvlane", self.place.kvlane.to_string_lossy());
        for arm in &self.arms {
            let program = arm.router.program.clone().unwrap_or_default();
            values.set("program", self.path(template::file(&program, &values).trim_end()));
            let words =
                arm.router.version.as_ref().and_then(|text| self.words("version", text, &values).ok());
            let version = match words {
                Some(words) => version(words).await,
                None => None,
            };
            found.push(Named { router: arm.name.clone(), version });
        }
        found
    }
}

/// A record with times in trace seconds.
fn in_trace_time(record: Record, speed: f64) -> Record {
    let gaps = record.gaps.map(|gaps| Gaps {
        p50_s: gaps.p50_s * speed,
        p99_s: gaps.p99_s * speed,
        max_s: gaps.max_s * speed,
    });
    Record {
        scheduled_s: record.scheduled_s * speed,
        sent_s: record.sent_s * speed,
        first_token_s: record.first_token_s.map(|first| first * speed),
        end_s: record.end_s * speed,
        think_s: record.think_s.map(|think| think * speed),
        gaps,
        stages_s: record.stages_s.into_iter().map(|(stage, seconds)| (stage, seconds * speed)).collect(),
        ..record
    }
}
