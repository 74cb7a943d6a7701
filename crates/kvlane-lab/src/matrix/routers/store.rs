//! Completed runs in files, for continuing an interrupted bench and for inspecting records.
//!
//! Each run has two files: `NAME.jsonl` with its records, and `NAME.json` with its metadata. A run is reused only if
//! all its inputs are the same; the routers' programs are not compared.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};

use kvlane_trace::record;
use serde::{Deserialize, Serialize};

use super::judge::{Recorded, Run};
use super::{Client, Fleet, Job, Matrix, Router, WarmUp, Workload};

/// The name and version of a run's own file.
const SCHEMA: &str = "kvlane.bench-run/1";

/// A directory of runs.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

/// A run's own file.
#[derive(Serialize, Deserialize)]
struct Kept {
    schema: String,
    /// [`Key`] as JSON.
    of: serde_json::Value,
    run: Run,
}

/// All inputs of a run.
#[derive(Serialize)]
struct Key<'a> {
    fleet: &'a Fleet,
    model: &'a str,
    workload: &'a Workload,
    sessions: bool,
    warm_up: &'a WarmUp,
    client: &'a Client,
    router: Option<Router>,
}

// === impl Store ===

impl Store {
    /// Opens a directory, created if necessary.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        Ok(Self { directory: directory.to_owned() })
    }

    /// A stored run with the same inputs.
    pub fn find(&self, matrix: &Matrix, job: &Job) -> Option<Recorded> {
        let path = |extension| self.path(job, extension);
        let text = fs::read(path("json")).ok()?;
        let kept: Kept = serde_json::from_slice(&text).ok()?;
        if kept.schema != SCHEMA || kept.of != key(matrix, job) || kept.run.job != *job {
            return None;
        }
        let records = record::read(BufReader::new(File::open(path("jsonl")).ok()?)).ok()?;
        (records.len() as u64 == kept.run.requests).then_some(Recorded { run: kept.run, records })
    }

    /// Stores a run that counts. Its metadata is written last: without it there is no run.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn keep(&self, matrix: &Matrix, recorded: &Recorded) -> io::Result<()> {
        let job = &recorded.run.job;
        let own = self.path(job, "json");
        match fs::remove_file(&own) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if recorded.run.failure.is_some() {
            return Ok(());
        }
        record::write(&recorded.records, BufWriter::new(File::create(self.path(job, "jsonl"))?))?;
        let kept = Kept { schema: SCHEMA.to_owned(), of: key(matrix, job), run: recorded.run.clone() };
        fs::write(own, serde_json::to_vec_pretty(&kept)?)
    }

    /// Path of a run's records.
    pub fn path(&self, job: &Job, extension: &str) -> PathBuf {
        // Names have no slash but that before a policy.
        let router = job.router.replace('/', "_");
        self.directory.join(format!("{router}-load{}-seed{}.{extension}", job.load, job.seed))
    }
}

fn key(matrix: &Matrix, job: &Job) -> serde_json::Value {
    let arm = matrix.arms().unwrap_or_default().into_iter().find(|arm| arm.name == job.router);
    let key = Key {
        fleet: &matrix.fleet,
        model: &matrix.model,
        workload: &matrix.workload,
        sessions: matches!(matrix.loads, super::Loads::Sessions(_)),
        warm_up: &matrix.warm_up,
        client: &matrix.client,
        router: arm.map(|arm| Router { policies: arm.policy.into_iter().collect(), ..arm.router }),
    };
    serde_json::to_value(key).unwrap_or_default()
}
