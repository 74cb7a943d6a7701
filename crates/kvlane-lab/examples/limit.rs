//! How far policies are from the limit, in the cells of a matrix: a search places all requests of a run with the whole
//! trace known, and simulates every assignment it tries. Prints a row for each cell as a Markdown table.
//!
//! ```text
//! --matrix FILE          the matrix [placement/matrix.yaml beside this file]
//! --only NAME,...        workloads, or workload@fleet
//! --loads PART,...       parts of the knee [the matrix's]
//! --policies NAME,...    the policies to compare; the search begins with the best of them
//! --shorter N            runs are shorter by this factor [5]
//! --tries N              assignments that are simulated for each cell [4000]
//! --seed N               [1]
//! --threads N            [one for each core]
//! ```

use std::error::Error;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use kvlane_lab::matrix::policies::{Bench, CellId, Limit, Matrix, Pace, Selection};
use kvlane_trace::format;

type Failure = Box<dyn Error>;

/// Policies that are the best of some cell.
const POLICIES: &str = "fleet_cost,lmetric,lmetric_no_queue,weighted,cache_aware,preble";

struct Options {
    matrix: PathBuf,
    selection: Selection,
    shorter: f64,
    tries: u32,
    seed: u32,
    threads: usize,
}

fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    let text = std::fs::read_to_string(&options.matrix)
        .map_err(|why| format!("{}: {why}", options.matrix.display()))?;
    let mut matrix: Matrix =
        serde_saphyr::from_str(&text).map_err(|why| format!("{}: {why}", options.matrix.display()))?;
    for workload in &mut matrix.workloads {
        workload.send = shorter(workload.send, options.shorter);
    }
    let selection = Selection { ages_s: Some(vec![matrix.age_s]), full: true, ..options.selection.clone() };
    let directory = options.matrix.parent().unwrap_or(Path::new(""));
    let cells = matrix.cells(&selection)?;
    let bench = Bench::new(&matrix, &cells, directory, &|path| {
        format::open(&directory.join(path), &Default::default())
    })?;
    let policies = &selection.policies;
    let mut out = std::io::stdout();
    writeln!(out, "| Cell | requests | {} | search | alone | work |", policies.join(" | "))?;
    writeln!(out, "|---|---|{}---|---|---|", "---|".repeat(policies.len()))?;
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let ratios = Mutex::new(Vec::new());
    let work = || {
        while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            match bench.limit(cell, policies, options.seed, options.tries) {
                Ok(limit) => {
                    _ = writeln!(std::io::stdout(), "{}", row(cell, &limit));
                    _ = writeln!(std::io::stderr(), "{cell:?}: {:?}", limit.found.moves);
                    let share = |one: &kvlane_lab::matrix::policies::Placed| one.mean_s / limit.found.mean_s;
                    let found: Vec<f64> = limit.placed.iter().map(share).collect();
                    ratios.lock().unwrap_or_else(PoisonError::into_inner).push(found);
                }
                Err(why) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(why),
            }
        }
    };
    std::thread::scope(|scope| (0..options.threads).for_each(|_| _ = scope.spawn(work)));
    if let Some(why) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(why.into());
    }
    let ratios = ratios.into_inner().unwrap_or_else(PoisonError::into_inner);
    let means = (0..policies.len()).map(|policy| {
        let logs: f64 = ratios.iter().map(|of_cell| of_cell[policy].ln()).sum();
        format!("{:.3}", (logs / ratios.len().max(1) as f64).exp())
    });
    writeln!(
        out,
        "| geometric mean over the search's |  | {} | 1 |  |  |",
        means.collect::<Vec<_>>().join(" | ")
    )?;
    Ok(())
}

/// Mean E2E latencies in seconds.
fn row(cell: &CellId, limit: &Limit) -> String {
    let CellId { workload, fleet, load, .. } = cell;
    let policies: Vec<String> = limit.placed.iter().map(|one| format!("{:.3}", one.mean_s)).collect();
    let work = limit.bounds.work_s.map_or("–".to_owned(), |work_s| format!("{work_s:.3}"));
    format!(
        "| {workload}@{fleet} {load} | {} | {} | {:.3} | {:.3} | {work} |",
        limit.requests,
        policies.join(" | "),
        limit.found.mean_s,
        limit.bounds.alone_s
    )
}

fn shorter(send: Pace, factor: f64) -> Pace {
    match send {
        Pace::WindowS(seconds) => Pace::WindowS(seconds / factor),
        Pace::Seconds(seconds) => Pace::Seconds(seconds / factor),
        Pace::Conversations(count) => Pace::Conversations((f64::from(count) / factor).ceil() as u32),
    }
}

// === impl Options ===

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let here = Path::new("crates/kvlane-lab");
        let here = if here.is_dir() { here.to_owned() } else { PathBuf::from(env!("CARGO_MANIFEST_DIR")) };
        let names = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let mut options = Self {
            matrix: here.join("examples/placement/matrix.yaml"),
            selection: Selection { policies: names(POLICIES), ..Selection::default() },
            shorter: 5.0,
            tries: 4000,
            seed: 1,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        };
        while let Some(flag) = args.next() {
            let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
            match flag.as_str() {
                "--matrix" => options.matrix = value.into(),
                "--only" => options.selection.only = names(&value),
                "--loads" => {
                    let loads = value.split(',').map(str::parse).collect::<Result<_, _>>()?;
                    options.selection.loads = Some(loads);
                }
                "--policies" => options.selection.policies = names(&value),
                "--shorter" => options.shorter = value.parse()?,
                "--tries" => options.tries = value.parse()?,
                "--seed" => options.seed = value.parse()?,
                "--threads" => options.threads = value.parse::<usize>()?.max(1),
                _ => {
                    return Err(
                        format!("{flag}: unknown flag; the module doc of this file lists all flags").into()
                    );
                }
            }
        }
        Ok(options)
    }
}
