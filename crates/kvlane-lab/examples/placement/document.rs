//! The comparison as a document with tables and plots.

use std::fmt::Write as _;
use std::path::Path;

use kvlane_lab::matrix::policies::{
    CellId, CellResult, E2E, E2E_RATIO_MAX, Judged, Matrix, Measured, TTFT_P99, TTFT_P99_RATIO_MAX, Verdict,
};
use kvlane_lab::report::{Axis, Chart, Mark, Series, number, percent};

use crate::map;
use crate::text::{ages, label, policies};

/// The document's name, and the directory of its plots beside it.
const DOCUMENT: &str = "placement-results.md";
const IMAGES: &str = "images";

/// Policies that are drawn beside ours, and shown in the tables of a workload: those with the best E2E latency there.
const BESIDE: usize = 4;

/// Writes the document and its plots under `directory`.
pub(super) fn write(matrix: &Matrix, judged: &Judged, directory: &Path) -> std::io::Result<()> {
    let images = directory.join(IMAGES);
    std::fs::create_dir_all(&images)?;
    std::fs::write(images.join("placement-map.svg"), map::svg(judged, matrix.age_s))?;
    for (name, cells) in places(judged, matrix.age_s) {
        std::fs::write(
            images.join(format!("placement-{}.svg", file(&name))),
            over_load(judged, &name, &cells).to_svg(),
        )?;
    }
    std::fs::write(directory.join(DOCUMENT), document(matrix, judged))
}

fn document(matrix: &Matrix, judged: &Judged) -> String {
    let mut out = String::from("# Placement: results\n\n");
    let seeds = judged.cells.iter().flat_map(|cell| cell.arms.values()).map(|arm| arm.runs.len()).max();
    _ = write!(
        out,
        "Written by `make placement`: every policy with its published defaults, in virtual time ([simulator](simulator.md)), \
         {} cells of workload, fleet, load and age of the load reports, {} seed(s) each. The matrix is \
         `crates/kvlane-lab/examples/placement/matrix.yaml`.\n\n",
        judged.cells.len(),
        seeds.unwrap_or(0)
    );
    rules(matrix, judged, &mut out);
    verdict(judged, &mut out);
    out.push_str("## Every policy\n\nGeometric means over the cells, as multiples of ours: above 1, ours is lower (of goodput: higher is better). The last column counts the cells in which a policy is the best of the others.\n\n");
    markdown(&policies(judged).columns, &policies(judged).rows, &mut out);
    out.push_str("\n## By the age of the load reports\n\n");
    markdown(&ages(judged).columns, &ages(judged).rows, &mut out);
    _ = write!(
        out,
        "\n## Every cell\n\n![Mean time to the end of every policy in every cell, over the best]({IMAGES}/placement-map.svg)\n\n\
         Reports {} ms old; mean over the seeds, with the 95 % interval of the ratio.\n\n",
        matrix.age_s * 1e3
    );
    cells(judged, matrix.age_s, &mut out);
    violations(judged, &mut out);
    workloads(matrix, judged, &mut out);
    out
}

fn rules(matrix: &Matrix, judged: &Judged, out: &mut String) {
    _ = write!(
        out,
        "## Criteria\n\n\
         - In a cell, the best of the others is the policy with the lowest mean E2E latency, averaged over the seeds.\n\
         - `{}` should take at most {:.0} % longer than that in every cell, less in most, and least on the geometric mean.\n\
         - Its TTFT p99 should be at most {:.0} % above that of the same policy, because a fleet runs one policy, not one for the \
         mean and another one for the tail. The ratio to the best TTFT p99 of any policy is shown beside it.\n\
         - Loads are fractions of the knee: the highest load at which `{}` keeps mean TTFT within {} s. \
         `--knees` finds it. A load written with `at` is given directly: a factor on a trace's rate, or conversations per second.\n\
         - All policies have the same inputs: {} knowledge of caches, KV events {} ms late, load reports every {} ms, as old as the cell says.\n\
         - Goodput counts requests with TTFT ≤ {} s and TPOT ≤ {} ms.\n\n",
        judged.ours,
        (E2E_RATIO_MAX - 1.0) * 100.0,
        (TTFT_P99_RATIO_MAX - 1.0) * 100.0,
        matrix.knee.policy,
        matrix.knee.ttft_mean_s,
        format!("{:?}", matrix.feed.cache_knowledge).to_lowercase(),
        matrix.feed.kv_event_delay_s * 1e3,
        matrix.feed.report_interval_s * 1e3,
        matrix.judgement.slo_ttft_s,
        matrix.judgement.slo_tpot_ms,
    );
}

fn verdict(judged: &Judged, out: &mut String) {
    let [better, within, worse] =
        [Verdict::Better, Verdict::Within, Verdict::Worse].map(|verdict| judged.count(verdict));
    let over = |ratio: fn(&kvlane_lab::matrix::policies::Standing) -> f64| {
        judged.standings().filter(|(_, standing)| ratio(standing) > TTFT_P99_RATIO_MAX).count()
    };
    _ = write!(
        out,
        "## Verdict\n\n| cells | better than the best other | within {:.0} % | worse | TTFT p99 over the bound | over the best TTFT p99 | best other per cell, over ours |\n|---|---|---|---|---|---|---|\n\
         | {} | {better} | {within} | {worse} | {} | {} | {} |\n\n",
        (E2E_RATIO_MAX - 1.0) * 100.0,
        better + within + worse,
        over(|standing| standing.ttft_p99_ratio),
        over(|standing| standing.ttft_p99_best_ratio),
        judged.relative_to_best().map_or("-".to_owned(), |ratio| format!("{ratio:.4}")),
    );
}

/// Ours beside the best other, cell by cell.
fn cells(judged: &Judged, age_s: f64, out: &mut String) {
    let head = [
        "cell",
        "E2E s",
        "best other",
        "its E2E s",
        "ratio",
        "interval",
        "TTFT s",
        "its",
        "TPOT ms",
        "its",
        "cached",
        "its",
        "goodput/s",
        "its",
        "TTFT p99 ratio",
        "to the best at it",
    ];
    let mut rows = Vec::new();
    for cell in judged.cells.iter().filter(|cell| cell.cell.age_s == age_s) {
        let Some(standing) = &cell.standing else { continue };
        let of =
            |arm: &String, figure: &str| cell.arms.get(arm).and_then(|arm| arm.mean.get(figure)).copied();
        let show = |arm: &String, figure: &str| of(arm, figure).map_or("-".to_owned(), number);
        let share = |arm: &String| of(arm, "cached_share").map_or("-".to_owned(), percent);
        let (ours, best) = (&judged.ours, &standing.best);
        let interval = standing.e2e_interval.map(|one| format!("{:.3} to {:.3}", one.low, one.high));
        rows.push(vec![
            label(&cell.cell),
            show(ours, E2E),
            best.clone(),
            show(best, E2E),
            bold(standing.e2e_ratio, 1.0),
            interval.unwrap_or("-".to_owned()),
            show(ours, "ttft_mean_s"),
            show(best, "ttft_mean_s"),
            show(ours, "tpot_mean_ms"),
            show(best, "tpot_mean_ms"),
            share(ours),
            share(best),
            show(ours, "goodput_req_s"),
            show(best, "goodput_req_s"),
            format!("{:.2}", standing.ttft_p99_ratio),
            format!("{:.2} ({})", standing.ttft_p99_best_ratio, standing.ttft_p99_best),
        ]);
    }
    markdown(&head.map(str::to_owned), &rows, out);
}

/// A ratio, bold below `bound`.
fn bold(ratio: f64, bound: f64) -> String {
    if ratio < bound { format!("**{ratio:.3}**") } else { format!("{ratio:.3}") }
}

fn violations(judged: &Judged, out: &mut String) {
    let bad = judged.violations();
    out.push_str("\n## Cells outside the bounds\n\n");
    if bad.is_empty() {
        out.push_str("None.\n");
        return;
    }
    let rows: Vec<Vec<String>> = bad
        .iter()
        .map(|(_, cell, figure, standing)| {
            let (ratio, than) = match *figure {
                E2E => (standing.e2e_ratio, &standing.best),
                _ => (standing.ttft_p99_ratio, &standing.best),
            };
            vec![label(cell), (*figure).to_owned(), format!("{ratio:.3}"), than.clone()]
        })
        .collect();
    markdown(&["cell", "figure", "ratio", "to"].map(str::to_owned), &rows, out);
}

/// Each workload on each fleet: its plot, and the figures of the best policies there.
fn workloads(matrix: &Matrix, judged: &Judged, out: &mut String) {
    for (name, cells) in places(judged, matrix.age_s) {
        let (workload, fleet) = name.split_once('@').unwrap_or((&name, ""));
        let about =
            matrix.workloads.iter().find(|one| one.workload == workload).map(|one| one.about.as_str());
        let knee = cells.iter().find_map(|cell| Some(cell.cell.load / cell.cell.of_knee?));
        _ = write!(
            out,
            "\n## {workload} on {fleet}\n\n{} The knee is at {}.{}\n\n![Mean E2E latency over the load]({IMAGES}/placement-{}.svg)\n\n",
            about.unwrap_or_default(),
            knee.map_or("-".to_owned(), number),
            sent(judged, &cells),
            file(&name),
        );
        figures(judged, &cells, out);
    }
}

/// Number of requests at the knee, and their share of repeated prompt tokens.
fn sent(judged: &Judged, cells: &[&CellResult]) -> String {
    let at_knee = cells.iter().find(|cell| cell.cell.of_knee == Some(1.0));
    let figures = at_knee.and_then(|cell| cell.arms.get(&judged.ours)).map(|arm| &arm.mean);
    let of = |figure: &str| figures.and_then(|figures| figures.get(figure)).copied();
    match (of("requests"), of("reusable_share")) {
        (Some(requests), Some(share)) => format!(
            " There, a run sends {} requests; an infinite cache would find {} of their prompt tokens.",
            number(requests.round()),
            percent(share)
        ),
        _ => String::new(),
    }
}

/// Figures of ours and of the best others in each cell, with intervals.
fn figures(judged: &Judged, cells: &[&CellResult], out: &mut String) {
    let head = [
        "load",
        "policy",
        "E2E mean s",
        "TTFT mean s",
        "p50",
        "p90",
        "p99",
        "TPOT mean ms",
        "p90",
        "cached",
        "goodput/s",
        "good",
        "imbalance",
        "shed",
    ];
    let mut rows = Vec::new();
    for cell in cells {
        for arm in top(judged, &[cell]) {
            let Some(Measured { mean, intervals, .. }) = cell.arms.get(&arm) else { continue };
            let show = |figure: &str| mean.get(figure).map_or("-".to_owned(), |value| number(*value));
            let between = |figure: &str| match intervals.get(figure) {
                Some(one) => format!("{} ({} to {})", show(figure), number(one.low), number(one.high)),
                None => show(figure),
            };
            let share = |figure: &str| mean.get(figure).map_or("-".to_owned(), |value| percent(*value));
            rows.push(vec![
                load(&cell.cell),
                arm.clone(),
                between(E2E),
                between("ttft_mean_s"),
                show("ttft_p50_s"),
                show("ttft_p90_s"),
                between(TTFT_P99),
                between("tpot_mean_ms"),
                show("tpot_p90_ms"),
                share("cached_share"),
                show("goodput_req_s"),
                share("slo_share"),
                show("computed_imbalance"),
                share("shed_share"),
            ]);
        }
    }
    markdown(&head.map(str::to_owned), &rows, out);
}

/// Ours, and the others with the best E2E latency over these cells.
fn top(judged: &Judged, cells: &[&CellResult]) -> Vec<String> {
    let mut others: Vec<(f64, &String)> = judged
        .others
        .iter()
        .filter_map(|arm| {
            let logs = cells.iter().map(|cell| Some(cell.arms.get(arm)?.mean.get(E2E)?.ln()));
            Some((logs.sum::<Option<f64>>()?, arm))
        })
        .collect();
    others.sort_by(|a, b| a.0.total_cmp(&b.0));
    let others = others.into_iter().take(BESIDE).map(|(_, arm)| arm.clone());
    [judged.ours.clone()].into_iter().chain(others).collect()
}

fn over_load(judged: &Judged, name: &str, cells: &[&CellResult]) -> Chart {
    let mut cells = cells.to_vec();
    cells.sort_by(|a, b| a.cell.load.total_cmp(&b.cell.load));
    let series = |arm: String| {
        let of = |cell: &&CellResult| {
            let one = cell.arms.get(&arm)?;
            let value = *one.mean.get(E2E)?;
            let band =
                one.intervals.get(E2E).map_or((value, value), |interval| (interval.low, interval.high));
            Some(((cell.cell.load, value), band))
        };
        let (points, band) = cells.iter().filter_map(of).unzip();
        Series { name: arm.clone(), points, band, mark: Mark::Line }
    };
    Chart {
        title: format!("{name}: mean time to the end (s)"),
        x: Axis::linear("Load"),
        y: Axis::log("s"),
        series: top(judged, &cells).into_iter().map(series).collect(),
    }
}

/// The cells of each workload on each fleet, with reports of this age.
fn places(judged: &Judged, age_s: f64) -> Vec<(String, Vec<&CellResult>)> {
    let mut places: Vec<(String, Vec<&CellResult>)> = Vec::new();
    for cell in judged.cells.iter().filter(|cell| cell.cell.age_s == age_s) {
        let name = format!("{}@{}", cell.cell.workload, cell.cell.fleet);
        match places.iter_mut().find(|(known, _)| *known == name) {
            Some((_, cells)) => cells.push(cell),
            None => places.push((name, vec![cell])),
        }
    }
    places
}

fn load(cell: &CellId) -> String {
    cell.of_knee.map_or(format!("at {}", cell.load), |part| format!("{} ({part} of the knee)", cell.load))
}

fn file(name: &str) -> String {
    name.replace('@', "-")
}

fn markdown(columns: &[String], rows: &[Vec<String>], out: &mut String) {
    _ = writeln!(out, "| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
    for row in rows {
        _ = writeln!(out, "| {} |", row.join(" | "));
    }
}
