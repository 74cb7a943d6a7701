//! Records of requests, and reports of them.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use kvlane_lab::report::{Page, Report as LabReport};
use kvlane_trace::record::{self, Record};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::{detached, exception};

/// What each request of a run experienced.
#[pyclass(frozen, module = "kvlane._core")]
pub(crate) struct Records(pub(crate) Vec<Record>);

/// A report as a page.
#[pyclass(frozen, module = "kvlane._core")]
pub(crate) struct Report(Page);

/// Reads records that `kvlane replay`, `bench` or `simulate` wrote with `--records`.
#[pyfunction]
pub(crate) fn read_records(py: Python<'_>, path: PathBuf) -> PyResult<Records> {
    detached(py, |_| Ok(Records(record::open(&path)?)))
}

/// A report of runs by name, the others compared with the first, as `kvlane report` makes it.
#[pyfunction]
pub(crate) fn report(
    py: Python<'_>,
    runs: Vec<(String, Py<Records>)>,
    title: Option<String>,
) -> PyResult<Report> {
    let most = LabReport::RUNS_MAX;
    if runs.is_empty() || runs.len() > most {
        return Err(PyValueError::new_err(format!("{} runs: a report has 1 to {most}", runs.len())));
    }
    let runs: Vec<_> = runs.iter().map(|(name, records)| (name.clone(), records.get().0.clone())).collect();
    if let Some((name, _)) = runs.iter().find(|(_, records)| records.is_empty()) {
        return Err(PyValueError::new_err(format!("run {name}: contains no records")));
    }
    detached(py, |_| Ok(Report(LabReport::of(title.as_deref(), &runs).page())))
}

/// Adds a column with a value for each record.
macro_rules! columns {
    ($columns:ident, $records:expr; $($name:literal: $value:expr,)+) => {
        $({
            let value: fn(&Record) -> _ = $value;
            $columns.set_item($name, PyList::new($columns.py(), $records.iter().map(value))?)?;
        })+
    };
}

// === impl Records ===

#[pymethods]
impl Records {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// A list for each field, by its name; those that no record has are left out.
    fn columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let columns = PyDict::new(py);
        columns! { columns, self.0;
            "id": |record| record.id,
            "ok": |record| record.is_ok(),
            "status": |record| record.status,
            "error": |record| record.error.clone(),
            "scheduled_s": |record| record.scheduled_s,
            "sent_s": |record| record.sent_s,
            "first_token_s": |record| record.first_token_s,
            "end_s": |record| record.end_s,
            "ttft_s": |record| record.ttft_s(),
            "tpot_s": |record| record.tpot_s(),
            "e2e_s": |record| record.e2e_s(),
            "prompt_tokens": |record| record.prompt_tokens,
            "cached_tokens": |record| record.cached_tokens,
            "reusable_tokens": |record| record.reusable_tokens,
            "output_tokens": |record| record.output_tokens,
            "endpoint": |record| record.endpoint.clone(),
            "prefill_endpoint": |record| record.prefill_endpoint.clone(),
            "reason": |record| record.reason.clone(),
            "attempts": |record| record.attempts,
            "session": |record| record.session,
            "base": |record| record.base,
            "shared_tokens": |record| record.shared_tokens,
            "after": |record| record.after,
            "think_s": |record| record.think_s,
            "gap_p50_s": |record| record.gaps.map(|gaps| gaps.p50_s),
            "gap_p99_s": |record| record.gaps.map(|gaps| gaps.p99_s),
            "gap_max_s": |record| record.gaps.map(|gaps| gaps.max_s),
            "request_id": |record| record.request_id.clone(),
        }
        let mut stages: Vec<&String> = self.0.iter().flat_map(|record| record.stages_s.keys()).collect();
        stages.sort_unstable();
        stages.dedup();
        for stage in stages {
            let spent = self.0.iter().map(|record| record.stages_s.get(stage));
            columns.set_item(format!("stage_{stage}_s"), PyList::new(py, spent)?)?;
        }
        Ok(columns)
    }

    /// Writes them as a file, one JSON object on a line.
    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| write(&self.0, &path)).map_err(exception)
    }
}

fn write(records: &[Record], path: &Path) -> Result<(), anyhow::Error> {
    use anyhow::Context as _;
    let place = || path.display().to_string();
    let file = File::create(path).with_context(place)?;
    record::write(records, BufWriter::new(file)).with_context(place)
}

// === impl Report ===

impl Report {
    pub(crate) fn of(page: Page) -> Self {
        Self(page)
    }
}

#[pymethods]
impl Report {
    /// What was found, in a sentence; `None` if there is nothing to compare.
    #[getter]
    fn verdict(&self) -> Option<String> {
        self.0.verdict.clone()
    }

    /// The report as one HTML file.
    fn to_html(&self) -> String {
        self.0.to_html()
    }

    /// Its charts: the name of a file, and the SVG.
    fn plots(&self) -> Vec<(String, String)> {
        self.0.plots()
    }
}
