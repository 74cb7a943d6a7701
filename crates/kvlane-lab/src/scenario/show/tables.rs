//! The figures of a simulation for a terminal, and as the tables of its report.

use super::{errors, load_of, verdict};
use crate::figures::{CLASSES, Figures, Overload};
use crate::report::Table;
use crate::scenario::{Group, Row, Scenario};

/// Columns of every row: heading, figure, factor, digits.
const COLUMNS: [(&str, &str, f64, usize); 17] = [
    ("TTFT mean s", "ttft_mean_s", 1.0, 3),
    ("p50", "ttft_p50_s", 1.0, 3),
    ("p90", "ttft_p90_s", 1.0, 3),
    ("p99", "ttft_p99_s", 1.0, 3),
    ("TPOT mean ms", "tpot_mean_ms", 1.0, 1),
    ("p90", "tpot_p90_ms", 1.0, 1),
    ("E2E mean s", "e2e_mean_s", 1.0, 2),
    ("p90", "e2e_p90_s", 1.0, 2),
    ("tok/s out", "out_tok_s", 1.0, 0),
    ("cached %", "cached_share", 100.0, 1),
    ("of at most", "reusable_share", 100.0, 1),
    ("goodput req/s", "goodput_req_s", 1.0, 2),
    ("shed %", "shed_share", 100.0, 1),
    ("failed %", "failed_share", 100.0, 1),
    ("imbalance", "busy_imbalance", 1.0, 2),
    ("preempted", "preemptions", 1.0, 0),
    ("adapter loads", "adapter_loads", 1.0, 0),
];

/// Columns compared with published figures: heading, figure, digits.
const COMPARED: [(&str, &str, usize); 10] = [
    ("tok/s out", "out_tok_s", 0),
    ("TTFT mean s", "ttft_mean_s", 3),
    ("TTFT p50 s", "ttft_p50_s", 3),
    ("TTFT p90 s", "ttft_p90_s", 3),
    ("ITL mean ms", "itl_mean_ms", 1),
    ("TPOT mean ms", "tpot_mean_ms", 1),
    ("E2E mean s", "e2e_mean_s", 2),
    ("req/s", "req_s", 2),
    ("cached", "cached_share", 3),
    ("goodput req/s", "goodput_req_s", 2),
];

/// Widest line of a table on a terminal.
const WIDTH: usize = 120;
/// Spaces between columns.
const GAP: usize = 2;
/// Columns that say which row it is: policy and load.
const KEYS: usize = 2;
/// Beginnings of headings that continue the column before.
const CONTINUE: [&str; 6] = ["p50", "p90", "p99", "sim", "error", "of at most"];

/// The whole output for a terminal.
pub fn text(scenario: &Scenario, rows: &[Row]) -> String {
    let verdict = verdict(rows).map_or_else(String::new, |verdict| format!("\n{verdict}\n"));
    let mut out = format!("{}\n{verdict}\n{}", summary(scenario), narrow(&figures(rows)));
    if rows.iter().any(|row| !row.published.is_empty()) {
        out.push_str(&format!("\nPublished, simulated and the error:\n\n{}", narrow(&comparison(rows))));
    }
    let classes = classes(rows);
    out.push_str(&format!("\n{}\n\n{}", classes_intro(scenario), narrow(&classes)));
    out.push_str(&format!("\n{}\n", decisions(rows)));
    for remark in remarks(scenario, rows) {
        out.push_str(&format!("\n{remark}\n"));
    }
    out
}

/// A table for a terminal: in parts that are at most [`WIDTH`] wide, each with the policy and the load.
fn narrow(table: &Table) -> String {
    let column = |n: usize| table.rows.iter().map(move |row| &row[n]).chain([&table.columns[n]]);
    let width = |n: usize| GAP + column(n).map(|cell| cell.chars().count()).max().unwrap_or(0);
    // A column that continues the one before it stays beside it.
    let continues = |n: usize| CONTINUE.iter().any(|begin| table.columns[n].starts_with(begin));
    let mut parts: Vec<Vec<usize>> = Vec::new();
    let mut used = usize::MAX;
    let mut n = KEYS;
    while n < table.columns.len() {
        let end = (n + 1..table.columns.len()).find(|&next| !continues(next)).unwrap_or(table.columns.len());
        let needs: usize = (n..end).map(width).sum();
        if used.saturating_add(needs) > WIDTH {
            parts.push((0..KEYS).collect());
            used = (0..KEYS).map(width).sum();
        }
        used += needs;
        parts.last_mut().expect("a part was begun").extend(n..end);
        n = end;
    }
    let part = |part: &Vec<usize>| {
        let pick = |row: &Vec<String>| part.iter().map(|&n| row[n].clone()).collect();
        Table { columns: pick(&table.columns), rows: table.rows.iter().map(pick).collect() }.to_text()
    };
    parts.iter().map(part).collect::<Vec<_>>().join("\n")
}

/// Remarks on overloaded fleets: a text for each kind of overload.
pub(super) fn remarks(scenario: &Scenario, rows: &[Row]) -> Vec<String> {
    let texts = [
        (
            Overload::Fleet,
            "Overloaded: requests arrive faster than the fleet serves them, so waits grow with the length of the run. Use \
             more or larger engines (--engines, --preset), or a lower load (--load, --rate, --concurrency).",
        ),
        (
            Overload::SomeEngines,
            "Unevenly loaded: requests queue at some engines while others have less work. Compare other policies (--policy).",
        ),
    ];
    let of = |overload: Overload| -> Vec<String> {
        let concerned =
            rows.iter().filter(|row| Overload::of(&row.simulated, &scenario.judgement) == Some(overload));
        let row = |row: &Row| {
            format!(
                "  {}, {}: mean TTFT {} s, p90 {} s; the busiest engine is busy {} times as long as the mean",
                row.arm,
                load(row),
                number(&row.simulated, "ttft_mean_s", 1.0, 0),
                number(&row.simulated, "ttft_p90_s", 1.0, 0),
                number(&row.simulated, "busy_imbalance", 1.0, 1)
            )
        };
        concerned.map(row).collect()
    };
    texts
        .into_iter()
        .map(|(overload, text)| (of(overload), text))
        .filter(|(rows, _)| !rows.is_empty())
        .map(|(rows, text)| format!("{text}\n{}", rows.join("\n")))
        .collect()
}

/// A summary of the scenario.
pub(super) fn summary(scenario: &Scenario) -> String {
    let engines = |group: &Group| {
        let model = match (&group.preset, &group.model, &group.gpu, &group.timing) {
            (Some(preset), ..) => preset.clone(),
            (_, Some(model), Some(gpu), _) => format!("{model}@{gpu}x{}", group.tp),
            (.., Some(path)) => path.display().to_string(),
            _ => String::new(),
        };
        format!("{} engines, {model}", group.engines)
    };
    let engines: Vec<String> = scenario.fleet.groups.iter().map(engines).collect();
    let about = scenario.about.trim();
    let gap = if about.is_empty() { "" } else { "\n" };
    format!(
        "{}: {}; {} seed{}{gap}{about}",
        scenario.scenario,
        engines.join(" and "),
        scenario.seeds.max(1),
        if scenario.seeds > 1 { "s" } else { "" },
    )
}

fn load(row: &Row) -> String {
    match load_of(row.cell) {
        Some((name, value)) => format!("{name} {value}"),
        None => "all".to_owned(),
    }
}

fn number(figures: &Figures, name: &str, factor: f64, digits: usize) -> String {
    figures.get(name).map_or("-".to_owned(), |value| format!("{:.digits$}", value * factor))
}

/// One row per policy and load.
pub(super) fn figures(rows: &[Row]) -> Table {
    let has_loads = rows.iter().any(|row| row.simulated.contains_key("adapter_loads"));
    let shown = || COLUMNS.iter().filter(|(_, name, ..)| has_loads || *name != "adapter_loads");
    let columns = ["policy", "load"].into_iter().chain(shown().map(|(heading, ..)| *heading));
    let cells = |row: &Row| {
        let mut cells = vec![row.arm.clone(), load(row)];
        cells.extend(shown().map(|&(_, name, factor, digits)| number(&row.simulated, name, factor, digits)));
        cells
    };
    Table { columns: columns.map(str::to_owned).collect(), rows: rows.iter().map(cells).collect() }
}

/// One row per policy and load with published figures: each figure as published, simulated, error.
pub(super) fn comparison(rows: &[Row]) -> Table {
    let shown: Vec<_> = COMPARED
        .iter()
        .filter(|(_, name, _)| rows.iter().any(|row| row.published.contains_key(*name)))
        .collect();
    let mut columns = vec!["policy".to_owned(), "load".to_owned()];
    columns.extend(
        shown.iter().flat_map(|(heading, ..)| [(*heading).to_owned(), "sim".to_owned(), "error".to_owned()]),
    );
    let cells = |row: &Row| {
        let errors = errors(row);
        let mut cells = vec![row.arm.clone(), load(row)];
        for &&(_, name, digits) in &shown {
            cells.push(number(&row.published, name, 1.0, digits));
            cells.push(number(&row.simulated, name, 1.0, digits));
            cells.push(errors.get(name).map_or("-".to_owned(), |error| format!("{:+.1} %", error * 100.0)));
        }
        cells
    };
    let rows = rows.iter().filter(|row| !row.published.is_empty()).map(cells).collect();
    Table { columns, rows }
}

/// Definition of the classes.
pub(super) fn classes_intro(scenario: &Scenario) -> String {
    let judgement = &scenario.judgement;
    format!(
        "By uncached prompt tokens: WARM below {}, MEDIUM below {}, HEAVY from there.\nGood: first token within {} s, then \
         {} ms a token.",
        judgement.medium_from_tokens,
        judgement.heavy_from_tokens,
        judgement.slo_ttft_s,
        judgement.slo_tpot_ms
    )
}

/// Share and time to first token of each class.
pub(super) fn classes(rows: &[Row]) -> Table {
    let mut columns = vec!["policy".to_owned(), "load".to_owned()];
    for class in CLASSES {
        columns.extend([format!("{} %", class.to_uppercase()), "TTFT p50 s".to_owned(), "p90".to_owned()]);
    }
    let cells = |row: &Row| {
        let mut cells = vec![row.arm.clone(), load(row)];
        for class in CLASSES {
            cells.push(number(&row.simulated, &format!("{class}_share"), 100.0, 1));
            cells.push(number(&row.simulated, &format!("{class}_ttft_p50_s"), 1.0, 3));
            cells.push(number(&row.simulated, &format!("{class}_ttft_p90_s"), 1.0, 3));
        }
        cells
    };
    Table { columns, rows: rows.iter().map(cells).collect() }
}

/// Time of decisions on this machine.
pub(super) fn decisions(rows: &[Row]) -> String {
    let mut arms: Vec<(&str, u64, f64)> = Vec::new();
    for row in rows {
        let (count, secs) = (row.decisions.count, row.decisions.time.as_secs_f64());
        match arms.iter_mut().find(|(arm, ..)| *arm == row.arm) {
            Some(arm) => (arm.1, arm.2) = (arm.1 + count, arm.2 + secs),
            None => arms.push((&row.arm, count, secs)),
        }
    }
    let each =
        |(arm, count, secs): &(&str, u64, f64)| format!("{arm} {:.1}", secs / (*count).max(1) as f64 * 1e6);
    format!(
        "Microseconds per decision on this machine: {}",
        arms.iter().map(each).collect::<Vec<_>>().join(", ")
    )
}
