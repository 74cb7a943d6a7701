//! Whether a request should be split between two engines, decided for each by its price, against fleets that split none or
//! all: five workloads at three loads on eight engines in virtual time.
//!
//! ```text
//! disaggregation [--only WORKLOAD,...] [--arms ARM,...] [--seeds N] [--preset MODEL@GPU] [--link JSON]
//!     [--scale FACTOR] [--threads N]
//! ```
//!
//! Prints a table in Markdown. `elastic` is to be at most 2 % worse in mean E2E latency than the better of `colocated` and
//! the best fixed split of a cell, and its TTFT p99 at most 5 % worse than that of `colocated`; the last columns say so.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use kvlane_lab::figures::Figures;
use kvlane_lab::scenario::{Aside, Scenario, run};
use kvlane_trace::format::{self, Options};
use serde_json::{Value, json};

type Failure = Box<dyn Error>;

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
    let (mut only, mut wanted, mut seeds, mut threads) = (String::new(), String::new(), 1, 1);
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
            "--threads" => threads = value.parse()?,
            "--preset" => preset = value,
            "--link" => link = serde_json::from_str(&value)?,
            "--scale" => scale = value.parse()?,
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let among = |list: &str, name: &str| list.is_empty() || list.split(',').any(|one| one == name);
    let mut out = io::stdout();
    writeln!(
        out,
        "| workload | rate | arm | split | E2E mean | TTFT p50 | TTFT p99 | TPOT p90 | busy | E2E to best | TTFT p99 to colocated |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|---|")?;
    for (name, generate, rates, seconds) in
        workloads().into_iter().filter(|workload| among(&only, workload.0))
    {
        let stages: Vec<Value> =
            rates.iter().map(|rate| json!({"rate": rate * scale, "seconds": seconds})).collect();
        let policies: Vec<Value> =
            arms().into_iter().filter(|(arm, _)| among(&wanted, arm)).map(|(_, arm)| arm).collect();
        let scenario: Scenario = serde_json::from_value(json!({
            "scenario": name,
            "fleet": {"engines": 8, "preset": preset, "link": link},
            "workload": {"generate": generate, "open_loop": {"stages": stages}},
            "policies": policies,
            "seeds": seeds,
        }))?;
        let rows = run(
            &scenario,
            Path::new("."),
            &|path| format::open(path, &Options::default()),
            threads,
            Aside::default(),
            &|_, _| {},
        )?;
        for rate in rates {
            let cell = format!("rate {}", rate * scale);
            let found: BTreeMap<&str, &Figures> = rows
                .iter()
                .filter(|row| row.cell.to_string() == cell)
                .map(|row| (row.arm.as_str(), &row.simulated))
                .collect();
            show(&mut out, name, rate * scale, &found)?;
        }
    }
    Ok(())
}

/// Prints the rows of a cell.
fn show(out: &mut impl Write, workload: &str, rate: f64, arms: &BTreeMap<&str, &Figures>) -> io::Result<()> {
    let figure = |arm: &str, name: &str| arms.get(arm).and_then(|figures| figures.get(name)).copied();
    let others = ["colocated", "4P4D", "2P6D"].into_iter().filter_map(|arm| figure(arm, "e2e_mean_s"));
    let best = others.fold(f64::INFINITY, f64::min);
    let colocated = figure("colocated", "ttft_p99_s").unwrap_or(f64::NAN);
    for arm in arms.keys() {
        let value = |name| figure(arm, name).unwrap_or(0.0);
        writeln!(
            out,
            "| {workload} | {rate} | {arm} | {:.0} % | {:.2} s | {:.3} s | {:.3} s | {:.1} ms | {:.0} % | {:+.1} % | {:+.1} % |",
            value("split_share") * 100.0,
            value("e2e_mean_s"),
            value("ttft_p50_s"),
            value("ttft_p99_s"),
            value("tpot_p90_ms"),
            value("busy_share") * 100.0,
            (value("e2e_mean_s") / best - 1.0) * 100.0,
            (value("ttft_p99_s") / colocated - 1.0) * 100.0,
        )?;
    }
    Ok(())
}
