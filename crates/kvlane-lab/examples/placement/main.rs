//! Compares policies in virtual time: runs a matrix of workloads, fleets and loads, and determines the best policy of
//! each cell.
//!
//! `placement` is a quick run: one seed, one age of load reports. `placement --full` runs everything. `placement
//! --knees` finds the knees without writing. Results are stored, and reused while the program is the same; with
//! `--keep-baselines`, results of policies whose own source is the same are reused too, whatever else has changed:
//! for work on one policy, not for published results. `placement --limit` searches better placements than any policy's, with the
//! whole trace known, and prints how far `ours` is from them.
//!
//! ```text
//! --matrix FILE          the matrix [matrix.yaml beside this file]
//! --only NAME,...        workloads, or workload@fleet
//! --policies NAME,...    only these
//! --ours NAME            the policy that is compared with the others [the matrix's]
//! --arm NAME={...}       one more policy: --arm 'even={name: weighted, queue: 1}'; or an arm as scenarios have them:
//!                        --arm '{arm: admitting, policy: lmetric, session_admission: true}'
//! --seeds N  --ages S,... --loads PART,...
//! --threads N            [one for each core]
//! --store FILE           what has been run [target/placement/runs.jsonl]
//! --keep-baselines
//! --limit                with --shorter N (runs are shorter by this factor [5]) and --tries N (assignments that are simulated for
//!                        each cell [4000])
//! --write DIRECTORY      write the document and its plots there
//! --part I/N             make only the runs of part I of N, from 1, and write their results to --part-file
//! --part-file FILE       [stdout]
//! --merge FILE...        make no runs: read the results of all parts, whose other flags were the same; a directory
//!                        stands for all files in it
//! --list                 print the cells and policies, and run nothing
//! ```

mod document;
mod limit;
mod map;
mod text;

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvlane_core::policy::PolicyConfig;
use kvlane_lab::digest::digest;
use kvlane_lab::figures::Figures;
use kvlane_lab::matrix::policies::{
    Bench, CellId, Job, Judged, Matrix, Selection, Store, Versions, configuration, file_name, knee,
    source_file,
};
use kvlane_lab::part::{Experiment, Part, Share};
use kvlane_lab::scenario::Arm;
use kvlane_trace::format;

type Failure = Box<dyn Error>;

/// The command line.
struct Options {
    matrix: PathBuf,
    selection: Selection,
    ours: Option<String>,
    arms: Vec<Arm>,
    threads: usize,
    store: PathBuf,
    keep_baselines: bool,
    knees: bool,
    limit: bool,
    effort: limit::Effort,
    list: bool,
    write: Option<PathBuf>,
    share: Share,
}

fn main() -> Result<(), Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    let text = std::fs::read_to_string(&options.matrix)
        .map_err(|why| format!("{}: {why}", options.matrix.display()))?;
    let mut matrix: Matrix =
        serde_saphyr::from_str(&text).map_err(|why| format!("{}: {why}", options.matrix.display()))?;
    matrix.policies.extend(options.arms.iter().cloned());
    if let Some(ours) = &options.ours {
        matrix.ours.clone_from(ours);
    }
    let directory = options.matrix.parent().unwrap_or(Path::new("")).to_owned();
    let mut selection = options.selection.clone();
    if !selection.full {
        selection.seeds = selection.seeds.or(Some(1));
        selection.ages_s = selection.ages_s.or(Some(vec![matrix.age_s]));
    }
    if options.knees {
        return knees(&matrix, &directory, &selection, options.threads);
    }
    if options.list {
        return list(&matrix, &selection);
    }
    if options.limit {
        return limit::print(matrix, &directory, &selection, &options);
    }
    let Some(judged) = judge(&matrix, &directory, &selection, &options)? else { return Ok(()) };
    write!(std::io::stdout(), "{}", text::report(&judged))?;
    if let Some(directory) = &options.write {
        document::write(&matrix, &judged, directory)?;
    }
    Ok(())
}

/// The results of all runs, unless they are divided: then none, and those of a part are written.
fn judge(
    matrix: &Matrix,
    directory: &Path,
    selection: &Selection,
    options: &Options,
) -> Result<Option<Judged>, Failure> {
    let versions = versions(matrix, directory)?;
    let jobs = matrix.jobs(selection)?;
    // A unit is all arms of a cell under a seed, because they have the same requests.
    let arms = matrix.arms(selection)?.len().max(1);
    let units = jobs.len() / arms;
    let experiment = || Experiment::new("placement", configuration(matrix, &versions, &jobs), units);
    let run = |part: Part| {
        let of_part = part.units(units).flat_map(|unit| &jobs[unit * arms..(unit + 1) * arms]);
        let found = figures(matrix, directory, &versions, of_part.cloned().collect(), options)?;
        Ok::<_, Failure>(found.chunks(arms).map(<[_]>::to_vec).collect())
    };
    let Some(found) = options.share.results(experiment, run)? else { return Ok(None) };
    let results = jobs.into_iter().zip(found.into_iter().flatten()).collect();
    Ok(Some(Judged::new(&matrix.ours, results)))
}

/// The figures of jobs. Those that are not stored are run.
fn figures(
    matrix: &Matrix,
    directory: &Path,
    versions: &Versions,
    jobs: Vec<Job>,
    options: &Options,
) -> Result<Vec<Figures>, Failure> {
    if let Some(parent) = options.store.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let store = Store::open(&options.store)?;
    let arms = matrix.arms(&Selection::default())?;
    let ours = arms.iter().find(|arm| arm.arm == matrix.ours).map(|arm| file_name(&arm.policy));
    let known = |job: &Job| {
        let other_program = options.keep_baselines && ours.as_ref() != Some(&file_name(&job.arm.policy));
        store.find(matrix, versions, job, other_program).cloned()
    };
    let mut figures: Vec<Option<Figures>> = jobs.iter().map(known).collect();
    let places: Vec<usize> = (0..jobs.len()).filter(|&place| figures[place].is_none()).collect();
    let missing: Vec<Job> = places.iter().map(|&place| jobs[place].clone()).collect();
    let mut cells: Vec<CellId> = missing.iter().map(|job| job.cell.clone()).collect();
    cells.dedup();
    let bench = Bench::new(matrix, &cells, directory, &|path| {
        format::open(&directory.join(path), &Default::default())
    })?;
    let (begun, over) = (now(), AtomicUsize::new(0));
    let mut err = std::io::stderr();
    writeln!(err, "{} runs, {} of them known", jobs.len(), jobs.len() - missing.len())?;
    let found = bench.run(&missing, options.threads, &|place, figures| {
        let kept = store.keep(matrix, versions, &missing[place], figures);
        progress(begun, over.fetch_add(1, Ordering::Relaxed) + 1, missing.len(), &missing[place]);
        kept
    })?;
    writeln!(err, "\n{:.1} s", begun.elapsed().as_secs_f64())?;
    for (place, kept) in places.into_iter().zip(found) {
        figures[place] = Some(kept?);
    }
    Ok(figures.into_iter().flatten().collect())
}

/// Prints progress: on a terminal in one line, elsewhere occasionally.
fn progress(begun: Instant, over: usize, all: usize, job: &Job) {
    let mut err = std::io::stderr();
    let (begin, end) = if err.is_terminal() { ("\r", "\x1b[K") } else { ("", "\n") };
    if begin.is_empty() && over * 20 / all == (over - 1) * 20 / all {
        return;
    }
    let left_s = begun.elapsed().as_secs_f64() / over as f64 * (all - over) as f64;
    let CellId { workload, fleet, load, .. } = &job.cell;
    _ = write!(err, "{begin}{over}/{all} {left_s:.0} s left  {workload}@{fleet} {load} {}{end}", job.arm.arm);
}

/// Finds the knee of each workload on each fleet.
fn knees(matrix: &Matrix, directory: &Path, selection: &Selection, threads: usize) -> Result<(), Failure> {
    let selection = Selection {
        loads: Some(vec![1.0]),
        full: true,
        ages_s: Some(vec![matrix.age_s]),
        ..selection.clone()
    };
    let cells = matrix.cells(&selection)?;
    let bench = Bench::new(matrix, &cells, directory, &|path| {
        format::open(&directory.join(path), &Default::default())
    })?;
    for cell in &cells {
        let begun = now();
        let found = knee(&bench, cell, selection.seeds.unwrap_or(1), threads, &mut |load, ttft_s| {
            _ = writeln!(std::io::stderr(), "  {load:.3}: {ttft_s:.3} s");
        });
        match found {
            Ok(found) => writeln!(
                std::io::stdout(),
                "{}@{}: {found:.3} (the matrix has {}) {:.1} s",
                cell.workload,
                cell.fleet,
                cell.load,
                begun.elapsed().as_secs_f64()
            )?,
            Err(why) => writeln!(std::io::stdout(), "{}@{}: {why}", cell.workload, cell.fleet)?,
        }
    }
    Ok(())
}

fn list(matrix: &Matrix, selection: &Selection) -> Result<(), Failure> {
    let mut out = std::io::stdout();
    for CellId { workload, fleet, load, of_knee, age_s } in matrix.cells(selection)? {
        let part = of_knee.map_or("as given".to_owned(), |part| format!("{part} of the knee"));
        writeln!(out, "{workload}@{fleet} load {load} ({part}), reports {age_s} s old")?;
    }
    let names: Vec<String> = matrix.arms(selection)?.into_iter().map(|arm| arm.arm).collect();
    writeln!(out, "{} against {}", matrix.ours, names.join(", "))?;
    Ok(())
}

/// Used for progress only.
fn now() -> Instant {
    Instant::now()
}

/// The crate's directory: in the current repository, or in the one of the build.
fn here() -> PathBuf {
    let stands = Path::new("crates/kvlane-lab");
    if stands.is_dir() { stands.to_owned() } else { env!("CARGO_MANIFEST_DIR").into() }
}

/// Digests of this program: its own bytes, the sources of the policies, the traces.
fn versions(matrix: &Matrix, directory: &Path) -> Result<Versions, Failure> {
    let root = here().join("../kvlane-core/src/policy");
    let mut policies = BTreeMap::new();
    for name in PolicyConfig::NAMES.iter().filter_map(|name| Some(file_name(&PolicyConfig::by_name(name)?))) {
        let Some(file) = source_file(&root, &name) else {
            return Err(format!("{}: the source of {name} is not there", root.display()).into());
        };
        policies.insert(name, digest(&std::fs::read(file)?));
    }
    let mut traces = BTreeMap::new();
    for path in matrix.workloads.iter().filter_map(|one| one.trace.as_ref()) {
        let bytes =
            std::fs::read(directory.join(path)).map_err(|why| format!("{}: {why}", path.display()))?;
        traces.insert(path.display().to_string(), digest(&bytes));
    }
    Ok(Versions { program: digest(&std::fs::read(std::env::current_exe()?)?), policies, traces })
}

// === impl Options ===

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut options = Self {
            matrix: here().join("examples/placement/matrix.yaml"),
            selection: Selection::default(),
            ours: None,
            arms: Vec::new(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            store: "target/placement/runs.jsonl".into(),
            keep_baselines: false,
            knees: false,
            limit: false,
            effort: limit::Effort::default(),
            list: false,
            write: None,
            share: Share::Whole,
        };
        let (mut part, mut part_file, mut merge) = (None, PathBuf::from("-"), Vec::new());
        let mut args = args.peekable();
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{flag} needs a value"));
            match flag.as_str() {
                "--full" => options.selection.full = true,
                "--knees" => options.knees = true,
                "--limit" => options.limit = true,
                "--shorter" => options.effort.shorter = value()?.parse()?,
                "--tries" => options.effort.tries = value()?.parse()?,
                "--list" => options.list = true,
                "--keep-baselines" => options.keep_baselines = true,
                "--matrix" => options.matrix = value()?.into(),
                "--write" => options.write = Some(value()?.into()),
                "--store" => options.store = value()?.into(),
                "--part" => part = Some(value()?.parse::<Part>().map_err(|why| format!("--part {why}"))?),
                "--part-file" => part_file = value()?.into(),
                "--merge" => {
                    merge.push(value()?.into());
                    while let Some(file) = args.next_if(|word| !word.starts_with("--")) {
                        merge.push(file.into());
                    }
                }
                "--ours" => options.ours = Some(value()?),
                "--only" => options.selection.only = names(&value()?),
                "--policies" => options.selection.policies = names(&value()?),
                "--threads" => options.threads = value()?.parse()?,
                "--seeds" => options.selection.seeds = Some(value()?.parse()?),
                "--ages" => options.selection.ages_s = Some(numbers(&value()?)?),
                "--loads" => options.selection.loads = Some(numbers(&value()?)?),
                "--arm" => {
                    let text = value()?;
                    // With a name before it, it is a policy; else an arm, as in the matrix.
                    let yaml = match text.split_once('=') {
                        Some((name, policy)) if !name.contains('{') => {
                            format!("{{arm: {name}, policy: {policy}}}")
                        }
                        _ => text.clone(),
                    };
                    options
                        .arms
                        .push(serde_saphyr::from_str(&yaml).map_err(|why| format!("--arm {text}: {why}"))?);
                }
                _ => {
                    return Err(
                        format!("{flag}: unknown flag; the module doc of this file lists all flags").into()
                    );
                }
            }
        }
        options.share = match (part, merge.is_empty()) {
            (Some(part), true) => Share::Part(part, part_file),
            (None, false) => Share::Merge(merge),
            (None, true) => Share::Whole,
            (Some(_), false) => return Err("--part and --merge exclude each other".into()),
        };
        Ok(options)
    }
}

fn names(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

fn numbers(text: &str) -> Result<Vec<f64>, Failure> {
    text.split(',').map(|number| Ok(number.parse()?)).collect()
}
