//! Writes `docs/simulator-constants.md`: the fitted constants of the engine model, and the published figures without each.
//!
//! `cargo run --release -p kvlane-lab --example constants` writes the parts that take seconds; `-- --loops` also the part of closed
//! loops, which takes a minute, and `-- --fleets` the part of whole fleets, which takes some minutes. Nothing else in the page is
//! touched.

mod eight_bits;
mod offline;
mod steps;
mod table;

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use eight_bits::eight_bits;
use kvlane_core::timing::{TimingFile, TimingModel};
use kvlane_lab::catalogue;
use kvlane_lab::scenario::{Aside, Cell, Row, Scenario, run};
use offline::offline_tables;
use steps::steps_tables;
use table::{CONSTANTS, table};

/// The page, from the repository's root.
const PAGE: &str = "docs/simulator-constants.md";
/// Where the parts begin and end in it.
const CONSTANTS_MARKS: [&str; 2] = ["<!-- constants -->\n", "<!-- end of constants -->"];
const STEPS_MARKS: [&str; 2] = ["<!-- steps -->\n", "<!-- end of steps -->"];
const EIGHT_BITS_MARKS: [&str; 2] = ["<!-- eight bits -->\n", "<!-- end of eight bits -->"];
const OFFLINE_MARKS: [&str; 2] = ["<!-- offline -->\n", "<!-- end of offline -->"];
const FLEETS_MARKS: [&str; 2] = ["<!-- fleets -->\n", "<!-- end of fleets -->"];

/// A change of a scenario.
enum Change {
    /// None.
    Nothing,
    /// A constant of the engine model is removed.
    Without(fn(&mut TimingModel)),
    /// A setting of the scenario is changed.
    Set(Setting),
}

/// A change of a scenario's settings.
type Setting = fn(&mut Scenario);

/// A published table, and the figures of it that are compared.
struct Fleet {
    scenario: &'static str,
    arm: &'static str,
    figures: &'static [&'static str],
    /// Names of the changes that matter only here.
    settings: &'static [(&'static str, Setting)],
}

const FLEETS: &[Fleet] = &[
    Fleet {
        scenario: "seed-001",
        arm: "precise",
        figures: &["out_tok_s", "itl_mean_ms", "ttft_mean_s"],
        settings: &[
            ("routing_delay_s 0.12 (fitted here) → 0", no_delay),
            (
                "kv_capacity_tokens 314,000 (fitted here) → 307,328, as reported of an earlier build",
                reported_capacity,
            ),
            ("kv_capacity_tokens 314,000 → 334,528, by the formula", no_capacity),
        ],
    },
    Fleet {
        scenario: "seed-001",
        arm: "k8s_service",
        figures: &["out_tok_s", "itl_mean_ms", "ttft_mean_s"],
        settings: &[
            ("routing_delay_s 0.085 (fitted here) → 0", no_delay),
            ("kv_capacity_tokens 314,000 → 334,528", no_capacity),
        ],
    },
    Fleet {
        scenario: "nim-70b",
        arm: "nim",
        figures: &["out_tok_s", "itl_mean_ms", "ttft_mean_s"],
        settings: &[],
    },
    Fleet {
        scenario: "nim-70b-long-answers",
        arm: "nim",
        figures: &["out_tok_s", "itl_mean_ms", "ttft_mean_s"],
        settings: &[],
    },
];

fn no_delay(scenario: &mut Scenario) {
    scenario.policies.iter_mut().for_each(|arm| arm.routing_delay_s = 0.0);
}

fn reported_capacity(scenario: &mut Scenario) {
    scenario.fleet.groups.iter_mut().for_each(|group| group.kv_capacity_tokens = Some(307_328));
}

fn no_capacity(scenario: &mut Scenario) {
    scenario.fleet.groups.iter_mut().for_each(|group| group.kv_capacity_tokens = None);
}

fn main() -> Result<(), Box<dyn Error>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(PAGE);
    let mut text = std::fs::read_to_string(&page)?;
    replace(&mut text, CONSTANTS_MARKS, &table())?;
    replace(&mut text, STEPS_MARKS, &steps_tables())?;
    replace(&mut text, OFFLINE_MARKS, &offline_tables())?;
    let asked = |flag: &str| std::env::args().any(|argument| argument == flag);
    if asked("--loops") {
        replace(&mut text, EIGHT_BITS_MARKS, &eight_bits()?)?;
    }
    if asked("--fleets") {
        replace(&mut text, FLEETS_MARKS, &fleets()?)?;
    }
    std::fs::write(&page, text)?;
    Ok(())
}

/// Replaces what is between the marks.
fn replace(text: &mut String, [begin, end]: [&str; 2], part: &str) -> Result<(), Box<dyn Error>> {
    let from = text.find(begin).ok_or(begin)? + begin.len();
    let to = text.find(end).ok_or(end)?;
    text.replace_range(from..to, part);
    Ok(())
}

/// The table of whole fleets, as Markdown: one seed, mean errors over the published loads.
fn fleets() -> Result<String, Box<dyn Error>> {
    let mut text = String::from(
        "| Scenario, arm | Without | Output | Time between tokens | Time to first token |\n|---|---|---|---|---|\n",
    );
    for fleet in FLEETS {
        let changes = [("", Change::Nothing)]
            .into_iter()
            .chain(CONSTANTS.iter().map(|constant| (constant.name, Change::Without(constant.remove))))
            .chain(fleet.settings.iter().map(|&(name, set)| (name, Change::Set(set))));
        let mut whole = String::new();
        for (name, change) in changes {
            let errors = errors(fleet, &change)?;
            if name.is_empty() {
                whole.clone_from(&errors);
            } else if errors == whole {
                continue;
            }
            let without = if name.is_empty() { "nothing" } else { name };
            writeln!(text, "| `{}`, {} | {without} | {errors} |", fleet.scenario, fleet.arm)?;
        }
    }
    Ok(text)
}

/// Mean errors of the arm's figures over the loads, as cells of a table.
fn errors(fleet: &Fleet, change: &Change) -> Result<String, Box<dyn Error>> {
    let (mut scenario, directory) = catalogue::scenario(fleet.scenario)?;
    scenario.seeds = 1;
    scenario.policies.retain(|arm| arm.arm == fleet.arm);
    scenario.published.retain(|published| published.arm == fleet.arm);
    let files = tempfile::tempdir()?;
    match change {
        Change::Nothing => {}
        Change::Set(set) => set(&mut scenario),
        Change::Without(remove) => {
            for (number, group) in scenario.fleet.groups.iter_mut().enumerate() {
                let name = match (&group.preset, &group.model, &group.gpu) {
                    (Some(preset), ..) => preset.clone(),
                    (None, Some(model), Some(gpu)) if group.tp == 1 => format!("{model}@{gpu}"),
                    (None, Some(model), Some(gpu)) => format!("{model}@{gpu}x{}", group.tp),
                    _ => return Err("a fleet without a preset".into()),
                };
                let mut timing = TimingModel::preset(&name)?;
                remove(&mut timing);
                let file: PathBuf = files.path().join(format!("{number}.json"));
                std::fs::write(&file, TimingFile::new(timing).to_json())?;
                (group.preset, group.model, group.gpu) = (None, None, None);
                group.timing = Some(file);
            }
        }
    }
    let open = |path: &Path| catalogue::open(path, &directory);
    let rows = run(&scenario, &directory, &open, 2, Aside::default(), &|_, _| {})?;
    let cells: Vec<String> = fleet.figures.iter().map(|figure| cell(&rows, figure)).collect();
    Ok(cells.join(" | ").replace('-', "−"))
}

/// Mean error over the loads, and the range; for a figure that is published only of the whole arm, its error.
fn cell(rows: &[Row], figure: &str) -> String {
    let error = |row: &Row| Some(100.0 * (row.simulated.get(figure)? / row.published.get(figure)? - 1.0));
    let loads: Vec<f64> = rows.iter().filter(|row| row.cell != Cell::All).filter_map(error).collect();
    if loads.is_empty() {
        let whole = rows.iter().find(|row| row.cell == Cell::All).and_then(error);
        return whole.map_or_else(String::new, |error| format!("{error:+.0} %"));
    }
    let mean = loads.iter().sum::<f64>() / loads.len() as f64;
    let (least, most) = loads.iter().fold((f64::MAX, f64::MIN), |(l, m), e| (l.min(*e), m.max(*e)));
    format!("{mean:+.0} % ({least:+.0} to {most:+.0})")
}
