//! Results of earlier runs, so that no run is repeated.
//!
//! A file with one line per run, appended when the run ends, so an interrupted matrix loses only the runs in
//! progress. A result is reused only if all its inputs are the same: the requests, the fleet, the router's inputs,
//! the policy with its parameters, and the program itself.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use kvlane_core::policy::PolicyConfig;
use kvlane_trace::generate::Workload;
use serde::{Deserialize, Serialize};

use super::{Job, Matrix, Pace};
use crate::digest::{Digest, digest};
use crate::figures::{Figures, Judgement};
use crate::scenario::{Arm, Fleet};

/// Format name of lines.
const SCHEMA: &str = "kvlane.placement-run/1";

/// The program that made a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Versions {
    /// Digest of the whole program.
    pub program: String,
    /// Digest of a policy's own source, by [`file_name`].
    pub policies: BTreeMap<String, String>,
    /// Digest of each trace file, by its path in the matrix.
    pub traces: BTreeMap<String, String>,
}

/// Completed runs.
#[derive(Debug)]
pub struct Store {
    file: Mutex<File>,
    runs: BTreeMap<String, Vec<(String, Figures)>>,
}

/// A completed run, as a line.
#[derive(Serialize, Deserialize)]
struct Line {
    schema: String,
    key: String,
    program: String,
    job: Job,
    figures: Figures,
}

/// All inputs of a run's figures except the program.
#[derive(Serialize)]
struct Key<'a> {
    fleet: Option<&'a Fleet>,
    trace: Option<&'a String>,
    generate: Option<&'a Workload>,
    context_tokens_max: Option<u32>,
    send: Option<Pace>,
    load: f64,
    seed: u32,
    arm: &'a Arm,
    judgement: &'a Judgement,
    policy_source: Option<&'a String>,
}

/// Digest of all inputs of these jobs' results, the program excepted.
pub fn configuration(matrix: &Matrix, versions: &Versions, jobs: &[Job]) -> String {
    let mut digest = Digest::default();
    jobs.iter().for_each(|job| digest.add(key(matrix, versions, job).as_bytes()));
    digest.to_string()
}

/// Name of a policy's source file: the policy's own name, not that of a set of parameters.
pub fn file_name(policy: &PolicyConfig) -> String {
    let named = serde_json::to_value(policy).ok();
    named.and_then(|named| Some(named.get("name")?.as_str()?.to_owned())).unwrap_or_default()
}

/// The source file of the policy `name` in kvlane-core's folder `policies`: ours, or one of another project.
pub fn source_file(policies: &Path, name: &str) -> Option<PathBuf> {
    let places = [policies.to_owned(), policies.join("published")];
    places.into_iter().map(|place| place.join(format!("{name}.rs"))).find(|file| file.is_file())
}

// === impl Store ===

impl Store {
    /// Opens or creates the file. Invalid lines, such as a truncated one, are skipped.
    ///
    /// # Errors
    /// If the file can be neither read nor created.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let mut runs: BTreeMap<String, Vec<(String, Figures)>> = BTreeMap::new();
        let mut whole = true;
        let mut reader = BufReader::new(&file);
        let mut line = String::new();
        while reader.read_line(&mut line)? > 0 {
            whole = line.ends_with('\n');
            if let Ok(run) = serde_json::from_str::<Line>(&line)
                && run.schema == SCHEMA
            {
                runs.entry(run.key).or_default().push((run.program, run.figures));
            }
            line.clear();
        }
        if !whole {
            writeln!(file)?;
        }
        Ok(Self { file: Mutex::new(file), runs })
    }

    /// The result of a run by the same program; with `other_program`, by any program whose policy is the same.
    pub fn find(
        &self,
        matrix: &Matrix,
        versions: &Versions,
        job: &Job,
        other_program: bool,
    ) -> Option<&Figures> {
        let runs = self.runs.get(&key(matrix, versions, job))?;
        let same = runs.iter().rev().find(|(program, _)| *program == versions.program);
        same.or(runs.last().filter(|_| other_program)).map(|(_, figures)| figures)
    }

    /// Stores the result of a run, and returns it as it will be read.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn keep(
        &self,
        matrix: &Matrix,
        versions: &Versions,
        job: &Job,
        figures: Figures,
    ) -> io::Result<Figures> {
        let line = Line {
            schema: SCHEMA.to_owned(),
            key: key(matrix, versions, job),
            program: versions.program.clone(),
            job: job.clone(),
            figures,
        };
        let text = serde_json::to_string(&line)? + "\n";
        self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(text.as_bytes())?;
        Ok(serde_json::from_str::<Line>(&text)?.figures)
    }
}

fn key(matrix: &Matrix, versions: &Versions, job: &Job) -> String {
    let workload = matrix.workloads.iter().find(|one| one.workload == job.cell.workload);
    let trace = workload.and_then(|one| one.trace.as_ref());
    let key = Key {
        fleet: matrix.fleets.get(&job.cell.fleet),
        trace: trace.and_then(|path| versions.traces.get(path.to_str()?)),
        generate: workload.and_then(|one| one.generate.as_ref()),
        context_tokens_max: workload.and_then(|one| one.context_tokens_max),
        send: workload.map(|one| one.send),
        load: job.cell.load,
        seed: job.seed,
        arm: &Arm { arm: String::new(), ..matrix.told(&job.arm, job.cell.age_s) },
        judgement: &matrix.judgement,
        policy_source: versions.policies.get(&file_name(&job.arm.policy)),
    };
    digest(serde_json::to_string(&key).unwrap_or_default().as_bytes())
}
