//! `simulate`: a scenario in virtual time, as `kvlane simulate` runs it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Error, bail, ensure};
use kvlane_lab::catalogue;
use kvlane_lab::scenario::{
    self, Aside, CacheKnowledge, ClosedStart, Group, Plain, Row, Scenario, Stage, show, wall_clock,
};
use kvlane_wire::yaml;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{detached, exception};
use crate::records::{Records, Report};

/// What a simulation found.
#[pyclass(frozen, module = "kvlane._core")]
pub(crate) struct Simulated {
    scenario: Scenario,
    /// Without their records.
    rows: Vec<Row>,
    /// The figures, schema `kvlane.simulate/1`.
    #[pyo3(get)]
    json: String,
    /// Records by the name of their row.
    #[pyo3(get)]
    records: Vec<(String, Py<Records>)>,
}

/// The arguments, as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    scenario: Option<String>,
    document: Option<String>,
    trace: Option<PathBuf>,
    workload: Option<String>,
    policy: Option<Vec<String>>,
    engines: Option<u32>,
    preset: Option<String>,
    model: Option<String>,
    gpu: Option<String>,
    tp: Option<u32>,
    timing: Option<PathBuf>,
    kv_dtype: Option<String>,
    block_tokens: Option<u32>,
    load: Option<Vec<f64>>,
    rate: Option<Vec<(f64, f64)>>,
    concurrency: Option<Vec<u32>>,
    warm_up: Option<u32>,
    stagger_s: Option<f64>,
    length_spread: Option<f64>,
    cache_knowledge: Option<String>,
    seeds: Option<u32>,
    first_seed: Option<u32>,
    jobs: Option<usize>,
    slo_ttft_s: Option<f64>,
    slo_tpot_ms: Option<f64>,
    records: bool,
}

/// Runs a simulation with these settings.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, settings: &Bound<'_, PyAny>) -> PyResult<Simulated> {
    let settings = settings.extract::<Settings>().map_err(|error| named(py, &error))?;
    let (scenario, mut rows) = detached(py, |check| run(&settings, check))?;
    let names: Vec<String> = show::record_files(&rows).map(|(name, _)| name).collect();
    let recorded = rows.iter_mut().map(|row| std::mem::take(&mut row.records)).filter(|row| !row.is_empty());
    let records = names.into_iter().zip(recorded).map(|(name, records)| {
        let name = name.trim_end_matches(".jsonl").to_owned();
        PyResult::Ok((name, Py::new(py, Records(records))?))
    });
    let records = records.collect::<PyResult<_>>()?;
    let json = serde_json::to_string_pretty(&show::to_json(&scenario, &rows)).map_err(exception)?;
    Ok(Simulated { scenario, rows, json, records })
}

/// What is wrong with a setting of the wrong type: pyo3 says which field in the text, and why in the cause.
fn named(py: Python<'_>, error: &PyErr) -> PyErr {
    let (text, cause) = (error.value(py).to_string(), error.cause(py));
    let field = text.rsplit('.').next().unwrap_or_default();
    let why = cause.map_or_else(String::new, |cause| format!(": {}", cause.value(py)));
    PyTypeError::new_err(format!("{field}: cannot take this value{why}"))
}

fn run(settings: &Settings, check: &(dyn Fn() + Sync)) -> Result<(Scenario, Vec<Row>), Error> {
    let (mut scenario, directory) = settings.scenario()?;
    scenario.seeds = settings.seeds.unwrap_or(scenario.seeds);
    scenario.first_seed = settings.first_seed.unwrap_or(scenario.first_seed);
    ensure!(scenario.seeds > 0, "seeds 0: must be at least 1");
    scenario.judgement.slo_ttft_s = settings.slo_ttft_s.unwrap_or(scenario.judgement.slo_ttft_s);
    scenario.judgement.slo_tpot_ms = settings.slo_tpot_ms.unwrap_or(scenario.judgement.slo_tpot_ms);
    let jobs = match settings.jobs {
        Some(0) => bail!("jobs 0: must be at least 1"),
        Some(jobs) => jobs,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let open = |path: &Path| catalogue::open(path, &directory);
    let aside = Aside { stopwatch: Some(wall_clock), records: settings.records };
    let rows = scenario::run(&scenario, &directory, &open, jobs, aside, &|_, _| check())?;
    Ok((scenario, rows))
}

// === impl Settings ===

impl Settings {
    /// The scenario, and the directory for its relative paths.
    fn scenario(&self) -> Result<(Scenario, PathBuf), Error> {
        match (&self.scenario, &self.document) {
            (Some(name), _) => Ok(catalogue::scenario(name)?),
            (_, Some(document)) => Ok((yaml::read(document).context("scenario")?, PathBuf::new())),
            (None, None) => Ok((self.plain()?, PathBuf::new())),
        }
    }

    fn plain(&self) -> Result<Scenario, Error> {
        let cache_knowledge = match self.cache_knowledge.as_deref() {
            None | Some("approximate") => CacheKnowledge::Approximate,
            Some("exact") => CacheKnowledge::Exact,
            Some(other) => bail!("cache_knowledge {other}: must be approximate or exact"),
        };
        let of_clients = [
            ("warm_up", self.warm_up.is_some()),
            ("stagger_s", self.stagger_s.is_some()),
            ("length_spread", self.length_spread.is_some()),
        ];
        if let (None, Some((name, _))) = (&self.concurrency, of_clients.iter().find(|(_, given)| *given)) {
            bail!("{name} needs concurrency: it is of closed-loop clients");
        }
        let usual = ClosedStart::default();
        let policies = || Plain::POLICIES.iter().map(|name| (*name).to_owned()).collect();
        let stage = |&(rate, seconds): &(f64, f64)| Stage { rate, seconds };
        let plain = Plain {
            fleet: Group {
                engines: self.engines.unwrap_or(Plain::ENGINES),
                preset: self.preset.clone(),
                model: self.model.clone(),
                gpu: self.gpu.clone(),
                tp: self.tp.unwrap_or(1),
                timing: self.timing.clone(),
                kv_dtype: self.kv_dtype.clone(),
                block_tokens: self.block_tokens,
                ..Group::default()
            },
            trace: self.trace.clone(),
            workload: self.workload.clone(),
            load: self.load.clone().unwrap_or_default(),
            rate: self.rate.iter().flatten().map(stage).collect(),
            concurrency: self.concurrency.clone().unwrap_or_default(),
            closed: ClosedStart {
                warm_up: self.warm_up.unwrap_or(usual.warm_up),
                stagger_s: self.stagger_s.unwrap_or(usual.stagger_s),
                length_spread: self.length_spread.unwrap_or(usual.length_spread),
            },
            policies: self.policy.clone().unwrap_or_else(policies),
            cache_knowledge,
            ..Plain::default()
        };
        Ok(plain.scenario()?)
    }
}

// === impl Simulated ===

#[pymethods]
impl Simulated {
    /// The tables that the command prints.
    #[getter]
    fn text(&self) -> String {
        show::text(&self.scenario, &self.rows)
    }

    /// The report that the command writes with `--html`.
    fn report(&self) -> Report {
        Report::of(show::page(&self.scenario, &self.rows))
    }
}
