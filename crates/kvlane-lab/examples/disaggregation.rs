//! Whether a request should be split between two engines, decided for each by its price, against fleets that split none or
//! all: five workloads at three loads on eight engines in virtual time, under several seeds.
//!
//! ```text
//! disaggregation [--only WORKLOAD,...] [--arms ARM,...] [--seeds N] [--first-seed N] [--preset MODEL@GPU]
//!     [--link JSON] [--scale FACTOR] [--threads N] [--detail true]
//! ```
//!
//! Prints a table in Markdown, with a row for each cell: `elastic` is to be at most 2 % worse in mean E2E latency than the
//! better of `colocated` and the best fixed split, and its TTFT p99 at most 5 % worse than that of `colocated`. Figures are
//! means over the seeds; in brackets are the lowest and the highest ratio of a seed. With `--detail`, each arm has a row.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use kvlane_lab::figures::{Figures, mean};
use kvlane_lab::scenario::{Aside, Cell, Scenario, run};
use kvlane_trace::format::{self, Options};
use serde_json::{Value, json};

type Failure = Box<dyn Error>;

/// The figures of an arm under each seed.
type Arms = BTreeMap<String, Vec<Figures>>;

/// Bounds of the two ratios, and the cells within each.
const E2E_MAX: f64 = 1.02;
const TTFT_MAX: f64 = 1.05;

/// The arms by name.
fn arms() -> [(&'static str, Value); 6] {
    let arm = |name: &str, roles: &str, prefill: u32| json!({"arm": name, "policy": "fleet_cost", "roles": roles, "prefill_engines": prefill});
    [
        ("colocated", arm("colocated", "fixed", 0)),
        ("elastic", arm("elastic", "elastic", 0)),
        ("4P4D", arm("4P4D", "fixed", 4)),
        ("2P6D", arm("2P6D", "fixed", 2)),
        ("4P4D-preferred", arm("4P4D-preferred", "preferred", 4)),
        ("2P6D-preferred", arm("2P6D-preferred", "preferred", 2)),
    ]
}

/// The workloads: conversations per second at the three loads, and seconds. At the highest load the colocated fleet is
/// near its limit.
fn workloads() -> [(&'static str, Value, [f64; 3], f64); 5] {
    [
        (
            "agentic",
            json!({
                "kind": "agentic",
                "context_tokens_max": 100_000,
                "task_tokens": {"median": 4000, "p90": 20_000, "max": 60_000},
                "turns": {"median": 15, "p90": 40, "max": 100},
                "think_s": {"median": 20, "p90": 60, "max": 300},
            }),
            [0.3, 0.6, 0.9],
            240.0,
        ),
        (
            "chat",
            json!({"kind": "chat", "think_s": {"median": 10, "p90": 40, "max": 300}}),
            [4.0, 8.0, 12.0],
            90.0,
        ),
        ("rag", json!({"kind": "rag"}), [8.0, 16.0, 24.0], 60.0),
        (
            "long answers",
            json!({
                "kind": "unshared",
                "input_tokens": {"min": 50, "max": 400},
                "output_tokens": {"median": 1200, "p90": 2500, "max": 6000},
            }),
            [10.0, 30.0, 60.0],
            60.0,
        ),
        ("mixed", json!({"kind": "mixed"}), [4.0, 8.0, 12.0], 60.0),
    ]
}

fn main() -> Result<(), Failure> {
    let (mut only, mut wanted) = (String::new(), "colocated,elastic,4P4D,2P6D".to_owned());
    let (mut seeds, mut first_seed, mut threads, mut detail) = (3u32, 1u32, 1, false);
    let (mut preset, mut link) =
        ("llama-3.1-8b@h100".to_owned(), json!({"setup_s": 0.005, "bytes_per_s": 40e9, "slots": 4}));
    let mut scale = 1.0;
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag}: a value is missing"))?;
        match flag.as_str() {
            "--only" => only = value,
            "--arms" => wanted = value,
            "--seeds" => seeds = value.parse()?,
            "--first-seed" => first_seed = value.parse()?,
            "--detail" => detail = value.parse()?,
            "--threads" => threads = value.parse()?,
            "--preset" => preset = value,
            "--link" => link = serde_json::from_str(&value)?,
            "--scale" => scale = value.parse()?,
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let among = |list: &str, name: &str| list.is_empty() || list.split(',').any(|one| one == name);
    let mut out = io::stdout();
    if detail {
        writeln!(
            out,
            "| workload | rate | arm | split | E2E mean | TTFT p50 | TTFT p99 | TPOT p90 | cached | transfer mean | busy |"
        )?;
        writeln!(out, "|---|---|---|---|---|---|---|---|---|---|---|")?;
    } else {
        writeln!(
            out,
            "| workload | rate | split | the best | E2E mean to the best | TTFT p99 to colocated |"
        )?;
        writeln!(out, "|---|---|---|---|---|---|")?;
    }
    let (mut cells, mut kept) = (0, (0, 0));
    for (name, generate, rates, seconds) in
        workloads().into_iter().filter(|workload| among(&only, workload.0))
    {
        let rates = rates.map(|rate| rate * scale);
        let stages: Vec<Value> = rates.iter().map(|rate| json!({"rate": rate, "seconds": seconds})).collect();
        let policies: Vec<Value> =
            arms().into_iter().filter(|(arm, _)| among(&wanted, arm)).map(|(_, arm)| arm).collect();
        let mut found: Vec<Arms> = rates.map(|_| Arms::new()).into();
        // One run for each seed: ratios are of the same requests.
        for seed in first_seed..first_seed.saturating_add(seeds) {
            let scenario: Scenario = serde_json::from_value(json!({
                "scenario": name,
                "fleet": {"engines": 8, "preset": preset, "link": link},
                "workload": {"generate": generate, "open_loop": {"stages": stages}},
                "policies": policies,
                "first_seed": seed,
            }))?;
            let rows = run(
                &scenario,
                Path::new("."),
                &|path| format::open(path, &Options::default()),
                threads,
                Aside::default(),
                &|_, _| {},
            )?;
            for (rate, arms) in rates.iter().zip(&mut found) {
                for row in rows.iter().filter(|row| row.cell == Cell::Rate(*rate)) {
                    arms.entry(row.arm.clone()).or_default().push(row.simulated.clone());
                }
            }
        }
        for (rate, arms) in rates.iter().zip(&found) {
            if detail {
                show_arms(&mut out, name, *rate, arms)?;
            }
            let Some((e2e, ttft)) = show(&mut out, name, *rate, arms, detail)? else { continue };
            cells += 1;
            kept = (kept.0 + u32::from(e2e <= E2E_MAX), kept.1 + u32::from(ttft <= TTFT_MAX));
        }
    }
    writeln!(out, "\nE2E mean within 2 % in {} of {cells} cells, TTFT p99 within 5 % in {}", kept.0, kept.1)?;
    Ok(())
}

/// The mean of a figure over the seeds.
fn mean_of(arms: &Arms, arm: &str, name: &str) -> Option<f64> {
    mean(arms.get(arm)?).get(name).copied()
}

/// The ratio of the means of a figure, and the lowest and the highest ratio of a seed.
fn ratio(arms: &Arms, of: &str, to: &str, name: &str) -> Option<(f64, f64, f64)> {
    let whole = mean_of(arms, of, name)? / mean_of(arms, to, name)?;
    let by_seed =
        arms.get(of)?.iter().zip(arms.get(to)?).filter_map(|(of, to)| Some(of.get(name)? / to.get(name)?));
    let (low, high) = by_seed.fold((f64::INFINITY, 0.0f64), |(low, high), one| (low.min(one), high.max(one)));
    Some((whole, low, high))
}

/// Prints the row of a cell, unless each arm has one, and returns its two ratios. `None` without the arms to compare.
fn show(
    out: &mut impl Write,
    workload: &str,
    rate: f64,
    arms: &Arms,
    detail: bool,
) -> io::Result<Option<(f64, f64)>> {
    let e2e_s = |arm: &str| mean_of(arms, arm, "e2e_mean_s").unwrap_or(f64::INFINITY);
    let fixed = ["colocated", "4P4D", "2P6D"].into_iter().filter(|arm| arms.contains_key(*arm));
    let Some(best) = fixed.min_by(|one, other| e2e_s(one).total_cmp(&e2e_s(other))) else { return Ok(None) };
    let ratios =
        (ratio(arms, "elastic", best, "e2e_mean_s"), ratio(arms, "elastic", "colocated", "ttft_p99_s"));
    let (Some(e2e), Some(ttft)) = ratios else { return Ok(None) };
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    let cell = |(whole, low, high): (f64, f64, f64)| {
        format!("{:+.1} % ({:+.1} to {:+.1})", percent(whole), percent(low), percent(high))
    };
    if !detail {
        let split = mean_of(arms, "elastic", "split_share").unwrap_or(0.0) * 100.0;
        writeln!(out, "| {workload} | {rate} | {split:.0} % | {best} | {} | {} |", cell(e2e), cell(ttft))?;
    }
    Ok(Some((e2e.0, ttft.0)))
}

/// Prints the row of each arm of a cell.
fn show_arms(out: &mut impl Write, workload: &str, rate: f64, arms: &Arms) -> io::Result<()> {
    for arm in arms.keys() {
        let value = |name| mean_of(arms, arm, name).unwrap_or(0.0);
        writeln!(
            out,
            "| {workload} | {rate} | {arm} | {:.0} % | {:.2} s | {:.3} s | {:.3} s | {:.1} ms | {:.0} % | {:.3} s | {:.0} % |",
            value("split_share") * 100.0,
            value("e2e_mean_s"),
            value("ttft_p50_s"),
            value("ttft_p99_s"),
            value("tpot_p90_ms"),
            value("cached_share") * 100.0,
            value("transfer_mean_s"),
            value("busy_share") * 100.0,
        )?;
    }
    Ok(())
}
