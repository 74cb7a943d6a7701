//! The comparison for a terminal.

use std::fmt::Write as _;

use kvlane_lab::matrix::policies::{
    CellId, CellResult, E2E, E2E_RATIO_MAX, Judged, TTFT_P99, TTFT_P99_RATIO_MAX, Verdict,
};
use kvlane_lab::report::{Table, number};

/// Names are cut to this.
const NAME_MAX: usize = 20;

/// All of it.
pub(super) fn report(judged: &Judged) -> String {
    let mut out = format!("{}\n{}\n", cells(judged).to_text(), policies(judged).to_text());
    let by_age = ages(judged);
    if by_age.rows.len() > 1 {
        out.push_str(&by_age.to_text());
        out.push('\n');
    }
    let bad = judged.violations();
    for (over, cell, figure, standing) in &bad {
        let (ratio, than) = match *figure {
            E2E => (standing.e2e_ratio, &standing.best),
            _ => (standing.ttft_p99_ratio, &standing.best),
        };
        _ = writeln!(out, "{:30} {figure:11} {ratio:.3} of {than} (bound times {over:.3})", label(cell));
    }
    let counts = [Verdict::Better, Verdict::Within, Verdict::Worse].map(|verdict| judged.count(verdict));
    let [better, within, worse] = counts;
    let tail = bad.iter().filter(|(_, _, figure, _)| *figure == TTFT_P99).count();
    let best_tail =
        judged.standings().filter(|(_, standing)| standing.ttft_p99_best_ratio > TTFT_P99_RATIO_MAX).count();
    _ = writeln!(
        out,
        "{}: {better} cells better than the best other, {within} within {:.0} %, {worse} worse; TTFT p99 more than \
         {:.0} % above its in {tail}, above whichever is best at that in {best_tail}. \
         The best other of each cell takes {} times as long as ours.",
        judged.ours,
        (E2E_RATIO_MAX - 1.0) * 100.0,
        (TTFT_P99_RATIO_MAX - 1.0) * 100.0,
        judged.relative_to_best().map_or("?".to_owned(), |ratio| format!("{ratio:.4}")),
    );
    out
}

/// A cell's name.
pub(super) fn label(CellId { workload, fleet, load, of_knee, age_s }: &CellId) -> String {
    let load = of_knee.map_or(format!("at {load}"), |part| format!("x{part}"));
    format!("{workload}@{fleet} {load} {:.0}ms", age_s * 1e3)
}

fn row(judged: &Judged, cell: &CellResult) -> Vec<String> {
    let of = |arm: &str, figure: &str| cell.arms.get(arm).and_then(|arm| arm.mean.get(figure)).copied();
    let show = |value: Option<f64>| value.map_or(String::new(), number);
    let ours = |figure: &str| of(&judged.ours, figure);
    let Some(standing) = &cell.standing else {
        return vec![label(&cell.cell), show(ours(E2E))];
    };
    let theirs = |figure: &str| of(&standing.best, figure);
    let pair = |figure: &str| format!("{}/{}", show(ours(figure)), show(theirs(figure)));
    let share = |figure: &str| {
        let percent =
            |value: Option<f64>| value.map_or(String::new(), |value| format!("{:.1}", value * 100.0));
        format!("{}/{}", percent(ours(figure)), percent(theirs(figure)))
    };
    let mark = match standing.verdict {
        Verdict::Better => "+",
        Verdict::Within => "",
        Verdict::Worse => "WORSE",
    };
    let tail = if standing.ttft_p99_ratio > TTFT_P99_RATIO_MAX { "TAIL" } else { "" };
    vec![
        label(&cell.cell),
        show(ours(E2E)),
        cut(&standing.best),
        show(theirs(E2E)),
        format!("{:.3}", standing.e2e_ratio),
        pair("ttft_mean_s"),
        pair("tpot_mean_ms"),
        share("cached_share"),
        share("slo_share"),
        pair("computed_imbalance"),
        pair(TTFT_P99),
        format!("{:.2}", standing.ttft_p99_ratio),
        format!("{:.2} {}", standing.ttft_p99_best_ratio, cut(&standing.ttft_p99_best)),
        [mark, tail].join(" ").trim().to_owned(),
    ]
}

fn cells(judged: &Judged) -> Table {
    let head = [
        "cell",
        "E2E s",
        "best other",
        "its",
        "ratio",
        "TTFT s",
        "TPOT ms",
        "cached %",
        "good %",
        "imbal.",
        "TTFT p99",
        "ratio",
        "to the best p99",
        "",
    ];
    Table {
        columns: head.map(str::to_owned).to_vec(),
        rows: judged.cells.iter().map(|cell| row(judged, cell)).collect(),
    }
}

/// Results by the age of load reports.
pub(super) fn ages(judged: &Judged) -> Table {
    let mut ages_s: Vec<f64> = judged.cells.iter().map(|cell| cell.cell.age_s).collect();
    ages_s.sort_by(f64::total_cmp);
    ages_s.dedup();
    let head =
        ["reports", "cells", "better", "within", "worse", "TTFT p99 over the bound", "best other over ours"];
    let rows = ages_s.into_iter().map(|age_s| {
        let cells = judged.cells.iter().filter(|cell| cell.cell.age_s == age_s).cloned().collect();
        let of = Judged { cells, ..judged.clone() };
        let count = |verdict: Verdict| of.count(verdict).to_string();
        let tail = of.standings().filter(|(_, one)| one.ttft_p99_ratio > TTFT_P99_RATIO_MAX).count();
        vec![
            format!("{} ms old", age_s * 1e3),
            of.standings().count().to_string(),
            count(Verdict::Better),
            count(Verdict::Within),
            count(Verdict::Worse),
            tail.to_string(),
            of.relative_to_best().map_or(String::new(), |ratio| format!("{ratio:.4}")),
        ]
    });
    Table { columns: head.map(str::to_owned).to_vec(), rows: rows.collect() }
}

/// Every policy's geometric means over ours, the best first.
pub(super) fn policies(judged: &Judged) -> Table {
    let figures =
        [E2E, "ttft_mean_s", "ttft_p90_s", TTFT_P99, "tpot_mean_ms", "session_mean_s", "goodput_req_s"];
    let mut arms: Vec<&String> = judged.cells.iter().flat_map(|cell| cell.arms.keys()).collect();
    arms.sort();
    arms.dedup();
    let mut rows: Vec<(f64, Vec<String>)> = arms
        .into_iter()
        .map(|arm| {
            let relative = |figure: &&str| judged.relative(arm, figure);
            let cells = figures
                .iter()
                .map(relative)
                .map(|ratio| ratio.map_or(String::new(), |ratio| format!("{ratio:.3}")));
            let best = judged.standings().filter(|(_, standing)| standing.best == *arm).count();
            let row = [arm.clone()].into_iter().chain(cells).chain([best.to_string()]).collect();
            (relative(&E2E).unwrap_or(f64::INFINITY), row)
        })
        .collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    let head =
        ["times ours", "E2E", "TTFT", "TTFT p90", "TTFT p99", "TPOT", "sessions", "goodput", "best other in"];
    Table { columns: head.map(str::to_owned).to_vec(), rows: rows.into_iter().map(|(_, row)| row).collect() }
}

fn cut(name: &str) -> String {
    name.chars().take(NAME_MAX).collect()
}
