//! What the published closed loops say of the arithmetic in 8 bits, and of a model in 16 bits beside it.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;

use kvlane_core::timing::{TimingFile, TimingModel};
use kvlane_lab::catalogue;
use kvlane_lab::measured::Measured;
use kvlane_lab::measured::offline::{Offline, OfflineColumn, OfflineTable};
use kvlane_lab::measured::steps::{Regime, Steps};
use kvlane_lab::scenario::{Aside, Cell, Scenario, run};
use serde::Deserialize;

use crate::offline::summary;
use serde_json::json;

/// Values of the arithmetic's efficiency that are compared.
const SHARES: [f64; 5] = [0.50, 0.525, 0.55, 0.60, 0.65];
/// NVIDIA's tables, and the figures of them that are compared.
const NIM: [&str; 2] = ["nim-70b", "nim-70b-long-answers"];
const NIM_FIGURES: [(&str, &str); 3] =
    [("out_tok_s", "output"), ("itl_mean_ms", "time between tokens"), ("ttft_mean_s", "time to first token")];
/// Conversations of a client, as the source has them.
const CONVERSATIONS: u32 = 5;

/// `data/closed-loops.json`.
#[derive(Deserialize)]
struct ClosedLoops {
    source: String,
    clients: Vec<u32>,
    loops: Vec<ClosedLoop>,
}

/// Closed loops of one shape of request, by number of clients.
#[derive(Deserialize)]
struct ClosedLoop {
    engine: String,
    kv_tokens: u64,
    input_tokens: u32,
    output_tokens: u32,
    /// Requests/s, for each number of clients.
    req_s: Vec<f64>,
}

/// The table of 8 bits and of closed loops, as Markdown.
pub(crate) fn eight_bits() -> Result<String, Box<dyn Error>> {
    let mut text = String::from("| Measured | in use |");
    SHARES.iter().for_each(|share| _ = write!(text, " {share} |"));
    text.push_str("\n|---|---|");
    SHARES.iter().for_each(|_| text.push_str("---|"));
    text.push('\n');
    for regime in [Regime::ColdPrompt, Regime::CachedPrompt, Regime::Mixed] {
        let name = format!("steps in 8 bits, {}", regime.name());
        line(&mut text, &name, true, &|share| Ok(summary(&steps(regime, share), 1)))?;
    }
    line(&mut text, "steps of Qwen3-8B in 8 bits in `decode`", true, &|share| {
        Ok(summary(&decode(share), 1))
    })?;
    let loops: ClosedLoops = serde_json::from_str(include_str!("../../data/closed-loops.json"))?;
    for engine in ["qwen3-8b@h100", "qwen3-8b:fp8@h100"] {
        let eight_bits = engine.contains(":fp8");
        for closed in loops.loops.iter().filter(|closed| closed.engine == engine) {
            let ClosedLoop { input_tokens, output_tokens, .. } = closed;
            let name = format!("`{engine}`, {input_tokens} + {output_tokens} tokens: requests/s");
            line(&mut text, &name, eight_bits, &|share| {
                Ok(summary(&closed.errors(&loops.clients, share)?, 1))
            })?;
        }
        let name = format!("`{engine}`, all of these");
        line(&mut text, &name, eight_bits, &|share| {
            let mut errors = Vec::new();
            for closed in loops.loops.iter().filter(|closed| closed.engine == engine) {
                errors.extend(closed.errors(&loops.clients, share)?);
            }
            Ok(summary(&errors, 1))
        })?;
    }
    for scenario in NIM {
        for (figure, name) in NIM_FIGURES {
            let name = format!("`{scenario}`: {name}");
            line(&mut text, &name, true, &|share| Ok(summary(&nim(scenario, figure, share)?, 1)))?;
        }
    }
    for table in Offline::tables().tables.iter().filter(|table| table.name == "trtllm-dense") {
        for column in &table.columns {
            let name = format!("`{}`, offline: output, rows that are not held out", column.engine);
            line(&mut text, &name, true, &|share| Ok(summary(&offline(table, column, share), 1)))?;
        }
    }
    _ = writeln!(text, "\nClosed loops of Qwen3-8B: {}.", loops.source);
    Ok(text)
}

/// A line with the errors at the value in use and, in 8 bits, at each of the others.
fn line(
    text: &mut String,
    name: &str,
    eight_bits: bool,
    cell: &dyn Fn(Option<f64>) -> Result<String, Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    write!(text, "| {name} | {} |", cell(None)?)?;
    for share in SHARES {
        let cell = if eight_bits { cell(Some(share))? } else { String::new() };
        write!(text, " {cell} |")?;
    }
    text.push('\n');
    Ok(())
}

fn set(timing: &mut TimingModel, share: Option<f64>) {
    timing.hardware.efficiency.compute = share.unwrap_or(timing.hardware.efficiency.compute);
}

fn steps(regime: Regime, share: Option<f64>) -> Vec<f64> {
    let steps = Steps::table();
    let rows = steps.rows.iter().filter(|row| row.regime() == regime && row.engine.contains(":fp8"));
    let error = |row: &kvlane_lab::measured::steps::Step| {
        let mut timing = row.timing();
        set(&mut timing, share);
        100.0 * (timing.step_secs(&row.shape()) * 1e3 / row.step_ms - 1.0)
    };
    rows.map(error).collect()
}

fn decode(share: Option<f64>) -> Vec<f64> {
    let measured = Measured::table();
    let sets = measured.sets.iter().filter(|set| set.name == "decode");
    sets.flat_map(|of| of.rows.iter().map(move |row| (of, row)))
        .filter(|(_, row)| row.engine.contains(":fp8"))
        .map(|(of, row)| {
            let modelled = measured.modelled_by(of, row, 0.0, |timing| set(timing, share));
            100.0 * (modelled / row.measured - 1.0)
        })
        .collect()
}

/// Errors of the rows that are not held out.
fn offline(table: &OfflineTable, column: &OfflineColumn, share: Option<f64>) -> Vec<f64> {
    let measured = Measured::table();
    let open = column.rows.iter().enumerate().filter(|(row, _)| !OfflineColumn::is_held_out(*row));
    open.map(|(_, &row)| {
        let modelled = table.modelled_by(&measured, column, row, |timing| set(timing, share));
        100.0 * (modelled / row.3 - 1.0)
    })
    .collect()
}

/// Errors of a table of NVIDIA over its loads.
fn nim(name: &str, figure: &str, share: Option<f64>) -> Result<Vec<f64>, Box<dyn Error>> {
    let (mut scenario, directory) = catalogue::scenario(name)?;
    scenario.seeds = 1;
    let preset = scenario.fleet.groups[0].preset.clone().ok_or("a fleet without a preset")?;
    simulated(&mut scenario, &directory, &preset, share, figure)
}

/// Errors of a figure over the loads of a scenario with one group of engines, in percent.
fn simulated(
    scenario: &mut Scenario,
    directory: &Path,
    preset: &str,
    share: Option<f64>,
    figure: &str,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let files = tempfile::tempdir()?;
    let file = files.path().join("timing.json");
    let mut timing = TimingModel::preset(preset)?;
    set(&mut timing, share);
    std::fs::write(&file, TimingFile::new(timing).to_json())?;
    let group = &mut scenario.fleet.groups[0];
    (group.preset, group.timing) = (None, Some(file));
    let open = |path: &Path| catalogue::open(path, directory);
    let rows = run(scenario, directory, &open, 2, Aside::default(), &|_, _| {})?;
    let loads = rows.iter().filter(|row| row.cell != Cell::All);
    let errors =
        loads.filter_map(|row| Some(100.0 * (row.simulated.get(figure)? / row.published.get(figure)? - 1.0)));
    Ok(errors.collect())
}

// === impl ClosedLoop ===

impl ClosedLoop {
    /// Errors of the requests/s, for each number of clients.
    fn errors(&self, clients: &[u32], share: Option<f64>) -> Result<Vec<f64>, Box<dyn Error>> {
        let mut errors = Vec::new();
        for (&clients, published) in clients.iter().zip(&self.req_s) {
            let mut scenario: Scenario = serde_json::from_value(json!({
                "scenario": "closed-loop",
                "fleet": {"engines": 1, "preset": self.engine, "kv_capacity_tokens": self.kv_tokens},
                "workload": {
                    "generate": {
                        "kind": "unshared", "input_tokens": self.input_tokens, "output_tokens": self.output_tokens,
                    },
                    "closed_loop": {
                        "concurrency": [clients],
                        "conversations": {"total": clients * CONVERSATIONS},
                    },
                },
                "policies": ["round_robin"],
                "published": [{"arm": "round_robin", "concurrency": clients, "req_s": published}],
            }))?;
            errors.extend(simulated(&mut scenario, Path::new("."), &self.engine, share, "req_s")?);
        }
        Ok(errors)
    }
}
