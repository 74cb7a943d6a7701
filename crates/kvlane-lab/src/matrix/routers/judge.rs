//! Results of a matrix: figures with intervals, each router against ours, and behaviour over load.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;
use serde::{Deserialize, Serialize};

use super::{Job, Matrix};
use crate::statistics::ci::Figure;
use crate::statistics::curve::{Crossing, Curve, Within};
use crate::statistics::draws::{Drawn, Estimate, RandomStreams};
use crate::statistics::paired::{Matched, Paired};
use crate::statistics::verdict::{Contrast, at_loads, ranked};

/// The name and version of [`Report`].
pub const SCHEMA: &str = "kvlane.bench/1";

/// The figures of a cell, units last. Times are in trace seconds, except the cost of the router.
pub const FIGURES: [&str; 20] = [
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "e2e_mean_s",
    "e2e_p50_s",
    "e2e_p90_s",
    "e2e_p99_s",
    "tpot_mean_ms",
    "tpot_p90_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "cached_share",
    "split_share",
    "failed_share",
    "out_tok_s",
    "req_s",
    "in_flight",
    "router_cpu_us",
    "router_rss_mib",
];

/// Figures that are compared over load.
const OVER_LOAD: [&str; 4] = ["ttft_mean_s", "ttft_p90_s", "e2e_mean_s", "e2e_p90_s"];

/// A completed run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Its router, load and seed.
    #[serde(flatten)]
    pub job: Job,
    /// Its index in the order.
    pub place: usize,
    /// Its start: seconds since the start of the first run.
    pub began_s: f64,
    /// From the first request's time to the last one's end, in wall-clock seconds.
    pub wall_s: f64,
    /// Number of counted requests.
    pub requests: u64,
    /// Those of them that were not answered in full, by class.
    pub errors_by_class: BTreeMap<String, u64>,
    /// Messages of the first failures.
    pub first_errors: Vec<String>,
    /// The 99th percentile of the client's lateness, in wall-clock seconds.
    pub client_lag_p99_s: Option<f64>,
    /// The median of the time between two tokens of an answer, in trace seconds.
    pub itl_p50_s: Option<f64>,
    /// The 99th percentile of these times.
    pub itl_p99_s: Option<f64>,
    /// CPU time of the router while requests were sent, in seconds; only on Linux and for routers started by the
    /// bench.
    pub router_cpu_s: Option<f64>,
    /// Its resident memory when the last request had ended.
    pub router_rss_bytes: Option<u64>,
    /// Why it is discarded, if it is.
    pub failure: Option<String>,
}

/// A run with the records of its counted requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recorded {
    /// The run.
    pub run: Run,
    /// Its records, in the trace's order, in trace seconds.
    pub records: Vec<Record>,
}

/// The document, schema `kvlane.bench/1`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The matrix.
    pub matrix: Matrix,
    /// Unit of the loads.
    pub load_unit: String,
    /// The client's machine.
    pub machine: BTreeMap<String, String>,
    /// The routers, in the matrix's order, with their reported versions.
    pub routers: Vec<Named>,
    /// The router that the others are compared with.
    pub ours: String,
    /// How much sooner ours gives the first token than the best of the others, in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Every run in order.
    pub runs: Vec<Run>,
    /// Each router at each load.
    pub cells: Vec<Cell>,
    /// Ours against each of the others, request by request.
    pub paired: Vec<Against>,
    /// Behaviour of each router's figures over load; with at least two loads.
    pub over_load: Vec<OverLoad>,
    /// Loads where ours crosses each of the others.
    pub crossings: Vec<CrossedAt>,
}

/// A router and its version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Named {
    /// Its name in the matrix.
    pub router: String,
    /// Its reported version, if any.
    pub version: Option<String>,
}

/// A router at a load, over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The router.
    pub router: String,
    /// The load.
    pub load: f64,
    /// Number of counted runs.
    pub runs: u64,
    /// Their requests.
    pub requests: u64,
    /// Each figure: the mean over the runs, and its interval over runs and requests.
    pub figures: BTreeMap<String, Estimate>,
}

/// Ours against another router at one load. Differences are ours minus theirs: negative, ours is faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against {
    /// The other router.
    pub router: String,
    /// The load.
    pub load: f64,
    /// Times to the first token.
    pub ttft_s: Option<Paired>,
    /// Times to the end.
    pub e2e_s: Option<Paired>,
}

/// A figure of a router over load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OverLoad {
    /// The router.
    pub router: String,
    /// The figure.
    pub figure: String,
    /// Its slope per unit of load.
    pub slope: Option<Estimate>,
    /// Its slope per request in flight.
    pub slope_in_flight: Option<Estimate>,
    /// Its slope over ours: 2 rises twice as fast.
    pub slope_ratio: Option<Estimate>,
    /// Its knee, a load.
    pub knee: Option<Estimate>,
    /// The load up to which it stays within the matrix's bound.
    pub within: Option<Within>,
}

/// Crossings of ours and another router in a figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CrossedAt {
    /// The other router.
    pub router: String,
    /// The figure.
    pub figure: String,
    /// The crossing; `lower_before` refers to ours.
    #[serde(flatten)]
    pub crossing: Crossing,
}

/// A figure of a cell with its draws.
type Figures = BTreeMap<String, Drawn>;

// === impl Report ===

impl Report {
    /// Judges the runs. Failed runs are listed, and otherwise ignored.
    pub fn new(
        matrix: &Matrix,
        generated: bool,
        routers: Vec<Named>,
        machine: BTreeMap<String, String>,
        recorded: &[Recorded],
    ) -> Self {
        let ours = matrix.ours().unwrap_or_default();
        let loads = matrix.loads.values();
        let counted = |router: &str, load: f64| -> Vec<&Recorded> {
            let mut runs: Vec<&Recorded> = recorded
                .iter()
                .filter(|one| {
                    one.run.failure.is_none() && one.run.job.router == router && one.run.job.load == load
                })
                .collect();
            runs.sort_by_key(|one| one.run.job.seed);
            runs
        };
        let mut cells = Vec::new();
        let mut drawn: BTreeMap<(usize, usize), Figures> = BTreeMap::new();
        for (which, named) in routers.iter().enumerate() {
            for (at, &load) in loads.iter().enumerate() {
                let runs = counted(&named.router, load);
                let figures = figures(&runs, (which * loads.len() + at) as u64);
                cells.push(Cell {
                    router: named.router.clone(),
                    load,
                    runs: runs.len() as u64,
                    requests: runs.iter().map(|one| one.run.requests).sum(),
                    figures: figures.iter().map(|(name, drawn)| (name.clone(), drawn.estimate())).collect(),
                });
                drawn.insert((which, at), figures);
            }
        }
        let mut paired = Vec::new();
        for (which, named) in routers.iter().enumerate().filter(|(_, named)| named.router != ours) {
            for (at, &load) in loads.iter().enumerate() {
                let (theirs, own) = (counted(&named.router, load), counted(&ours, load));
                let lots = RandomStreams::of(matrix.order_seed, 0x1000 + (which * loads.len() + at) as u64);
                let compared = |figure: &dyn Fn(&Record) -> Option<f64>| {
                    let matched: Vec<Matched> = theirs
                        .iter()
                        .filter_map(|theirs| {
                            let own = own.iter().find(|own| own.run.job.seed == theirs.run.job.seed)?;
                            Some(Matched::of(&theirs.records, &own.records, figure))
                        })
                        .collect();
                    Paired::of(&matched, lots)
                };
                paired.push(Against {
                    router: named.router.clone(),
                    load,
                    ttft_s: compared(&Record::ttft_s),
                    e2e_s: compared(&|record| Some(record.e2e_s())),
                });
            }
        }
        let (over_load, crossings) = match loads.len() {
            0 | 1 => (Vec::new(), Vec::new()),
            _ => over_load(matrix, &routers, &ours, &loads, &drawn),
        };
        Self {
            schema: SCHEMA.to_owned(),
            matrix: matrix.clone(),
            load_unit: matrix.loads.unit(generated).to_owned(),
            machine,
            routers,
            verdict: verdict(&ours, &cells, &paired),
            ours,
            runs: recorded.iter().map(|one| one.run.clone()).collect(),
            cells,
            paired,
            over_load,
            crossings,
        }
    }

    /// The cell of a router at a load.
    pub fn cell(&self, router: &str, load: f64) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.router == router && cell.load == load)
    }

    /// Whether every run counts and every request was answered.
    pub fn is_clean(&self) -> bool {
        self.runs.iter().all(|run| run.failure.is_none() && run.errors_by_class.is_empty())
    }
}

/// Ours against the best of the others: the one with the lowest mean times to first token over the loads.
fn verdict(ours: &str, cells: &[Cell], paired: &[Against]) -> Option<String> {
    let mut others: Vec<&str> = Vec::new();
    let mut loads: Vec<f64> = Vec::new();
    for one in paired.iter().filter(|one| one.ttft_s.is_some()) {
        if !others.contains(&&*one.router) {
            others.push(&one.router);
        }
        if !loads.contains(&one.load) {
            loads.push(one.load);
        }
    }
    let mean_s = |router: &str, load: f64| {
        let cell = cells.iter().find(|cell| cell.router == router && cell.load == load)?;
        Some(cell.figures.get("ttft_mean_s")?.value)
    };
    let best = *ranked(&others, &loads, mean_s).first()?;
    let among = (others.len() > 1).then(|| format!("the best of {} others", others.len()));
    let against = paired.iter().filter(|one| one.router == best);
    let found: Vec<(f64, Contrast)> =
        against.filter_map(|one| Some((one.load, Contrast::from(&one.ttft_s?)))).collect();
    at_loads(ours, best, among.as_deref(), &found)
}

/// The figures of a cell. `which` selects its random stream.
fn figures(runs: &[&Recorded], which: u64) -> Figures {
    let mut found = Figures::new();
    let lots = |figure: usize| RandomStreams::of(0, which * 64 + figure as u64);
    let mut put = |name: &str, drawn: Option<Drawn>| {
        debug_assert!(FIGURES.contains(&name), "{name}");
        found.extend(drawn.filter(|drawn| drawn.value.is_finite()).map(|drawn| (name.to_owned(), drawn)));
    };
    let of_answers = |latency: &dyn Fn(&Record) -> Option<f64>| -> Vec<Vec<f64>> {
        let of_run = |one: &&Recorded| {
            one.records.iter().filter(|record| record.is_ok()).filter_map(latency).collect()
        };
        runs.iter().map(of_run).collect()
    };
    let ttft = of_answers(&Record::ttft_s);
    let e2e = of_answers(&|record| Some(record.e2e_s()));
    let tpot = of_answers(&|record| record.tpot_s().map(|s| s * 1e3));
    let kinds = [
        ("mean", Figure::Mean),
        ("p50", Figure::Percentile(50)),
        ("p90", Figure::Percentile(90)),
        ("p99", Figure::Percentile(99)),
    ];
    for (n, (name, samples, unit)) in
        [("ttft", &ttft, "s"), ("e2e", &e2e, "s"), ("tpot", &tpot, "ms")].into_iter().enumerate()
    {
        for (kind, figure) in kinds {
            let name = format!("{name}_{kind}_{unit}");
            if FIGURES.contains(&name.as_str()) {
                // The figures of one latency share their random stream, because they are of the same requests.
                put(&name, Drawn::of(samples, figure, lots(n)));
            }
        }
    }
    let shares = |share: &dyn Fn(&Record) -> Option<(f64, f64)>| -> Vec<Vec<(f64, f64)>> {
        runs.iter().map(|one| one.records.iter().filter_map(share).collect()).collect()
    };
    let cached = shares(&|record| {
        record.is_ok().then_some(())?;
        Some((f64::from(record.cached_tokens?), f64::from(record.prompt_tokens)))
    });
    put("cached_share", Drawn::share(&cached, lots(3)));
    let split = shares(&|record| {
        record.is_ok().then_some((f64::from(u8::from(record.prefill_endpoint.is_some())), 1.0))
    });
    put("split_share", Drawn::share(&split, lots(6)));
    let failed = shares(&|record| Some((f64::from(u8::from(!record.is_ok())), 1.0)));
    put("failed_share", Drawn::share(&failed, lots(4)));
    // One figure of each run as a whole: only the seeds vary.
    let of_runs = |figure: &dyn Fn(&Recorded) -> Option<f64>| {
        let samples: Vec<Vec<f64>> = runs.iter().map(|one| figure(one).into_iter().collect()).collect();
        Drawn::of(&samples, Figure::Mean, lots(5))
    };
    put("itl_p50_ms", of_runs(&|one| one.run.itl_p50_s.map(|s| s * 1e3)));
    put("itl_p99_ms", of_runs(&|one| one.run.itl_p99_s.map(|s| s * 1e3)));
    let answers = |one: &Recorded| one.records.iter().filter(|record| record.is_ok()).count() as f64;
    put(
        "out_tok_s",
        of_runs(&|one| {
            let tokens: f64 = one
                .records
                .iter()
                .filter(|record| record.is_ok())
                .map(|record| f64::from(record.output_tokens))
                .sum();
            Some(tokens / span_s(one)?)
        }),
    );
    put("req_s", of_runs(&|one| Some(answers(one) / span_s(one)?)));
    put(
        "in_flight",
        of_runs(&|one| {
            let busy_s: f64 = one.records.iter().map(|record| record.e2e_s()).sum();
            Some(busy_s / span_s(one)?)
        }),
    );
    put(
        "router_cpu_us",
        of_runs(&|one| {
            let answered = answers(one);
            one.run.router_cpu_s.filter(|_| answered > 0.0).map(|cpu_s| cpu_s / answered * 1e6)
        }),
    );
    put("router_rss_mib", of_runs(&|one| one.run.router_rss_bytes.map(|bytes| bytes as f64 / 1_048_576.0)));
    found
}

/// From the first request's time to the last one's end.
fn span_s(one: &Recorded) -> Option<f64> {
    let start_s = one.records.iter().map(|record| record.scheduled_s).fold(f64::INFINITY, f64::min);
    let end_s = one.records.iter().map(|record| record.end_s).fold(f64::NEG_INFINITY, f64::max);
    Some(end_s - start_s).filter(|span_s| *span_s > 0.0)
}

fn over_load(
    matrix: &Matrix,
    routers: &[Named],
    ours: &str,
    loads: &[f64],
    drawn: &BTreeMap<(usize, usize), Figures>,
) -> (Vec<OverLoad>, Vec<CrossedAt>) {
    let (mut found, mut crossings) = (Vec::new(), Vec::new());
    let mut figures: Vec<&str> = OVER_LOAD.to_vec();
    figures.extend(matrix.within.keys().map(String::as_str).filter(|name| !OVER_LOAD.contains(name)));
    for figure in figures {
        let curve = |which: usize, over: &dyn Fn(usize) -> Option<f64>| {
            let point = |at: usize| Some((over(at)?, drawn.get(&(which, at))?.get(figure)?.clone()));
            Curve::new((0..loads.len()).filter_map(point).collect())
        };
        let over_loads = |which: usize| curve(which, &|at| Some(loads[at]));
        let own = routers.iter().position(|named| named.router == ours).map(over_loads);
        for (which, named) in routers.iter().enumerate() {
            let curve_of = over_loads(which);
            let in_flight = curve(which, &|at| Some(drawn.get(&(which, at))?.get("in_flight")?.value));
            let is_other = named.router != ours;
            found.push(OverLoad {
                router: named.router.clone(),
                figure: figure.to_owned(),
                slope: curve_of.slope(),
                slope_in_flight: in_flight.slope(),
                slope_ratio: own.as_ref().filter(|_| is_other).and_then(|own| curve_of.slope_ratio(own)),
                knee: curve_of.knee(),
                within: matrix.within.get(figure).and_then(|bound| curve_of.within(*bound)),
            });
            let crossed = own.as_ref().filter(|_| is_other).map(|own| own.crossings(&curve_of));
            crossings.extend(crossed.unwrap_or_default().into_iter().map(|crossing| CrossedAt {
                router: named.router.clone(),
                figure: figure.to_owned(),
                crossing,
            }));
        }
    }
    (found, crossings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(loads: &[f64], seeds: &[u32]) -> Matrix {
        let value = serde_json::json!({
            "fleet": {"engines": 2, "command": "engine {port}"},
            "workload": {"generate": {"kind": "chat"}, "window_s": 10},
            "loads": {"rate": loads},
            "seeds": seeds,
            "routers": ["kvlane", "nginx"],
            "within": {"ttft_mean_s": 2.5},
        });
        serde_json::from_value(value).expect("a matrix")
    }

    /// A run in which request `id` takes `ttft_s(id)` to its first token, and a second more to its end.
    fn recorded(router: &str, load: f64, seed: u32, ttft_s: impl Fn(u64) -> f64) -> Recorded {
        let record = |id: u64| {
            let scheduled_s = id as f64;
            Record {
                id,
                scheduled_s,
                sent_s: scheduled_s,
                first_token_s: Some(scheduled_s + ttft_s(id)),
                end_s: scheduled_s + ttft_s(id) + 1.0,
                prompt_tokens: 100,
                cached_tokens: Some(25),
                output_tokens: 11,
                status: 200,
                ..Record::default()
            }
        };
        let records: Vec<Record> = (0..100).map(record).collect();
        let run = Run {
            job: Job { router: router.into(), load, seed },
            place: 0,
            began_s: 0.0,
            wall_s: 11.0,
            requests: 100,
            errors_by_class: BTreeMap::new(),
            first_errors: Vec::new(),
            client_lag_p99_s: Some(0.001),
            itl_p50_s: Some(0.1),
            itl_p99_s: Some(0.2),
            router_cpu_s: Some(0.002),
            router_rss_bytes: Some(3 << 20),
            failure: None,
        };
        Recorded { run, records }
    }

    fn judged(matrix: &Matrix, recorded: &[Recorded]) -> Report {
        let named = |router: &str| Named { router: router.into(), version: None };
        Report::new(matrix, true, vec![named("kvlane"), named("nginx")], BTreeMap::new(), recorded)
    }

    #[test]
    fn figures_are_means_over_runs_and_shares_of_all_tokens() {
        let matrix = matrix(&[1.0], &[1, 2]);
        let runs = [recorded("kvlane", 1.0, 1, |_| 1.0), recorded("kvlane", 1.0, 2, |_| 3.0)];
        let report = judged(&matrix, &runs);
        let cell = report.cell("kvlane", 1.0).unwrap();
        let value = |name: &str| cell.figures[name].value;
        assert_eq!((cell.runs, cell.requests), (2, 200));
        assert!((value("ttft_mean_s") - 2.0).abs() < 1e-9 && (value("e2e_mean_s") - 3.0).abs() < 1e-9);
        assert!((value("tpot_mean_ms") - 100.0).abs() < 1e-9);
        assert_eq!((value("cached_share"), value("failed_share")), (0.25, 0.0));
        assert_eq!(value("split_share"), 0.0);
        assert!((value("router_cpu_us") - 20.0).abs() < 1e-9 && value("router_rss_mib") == 3.0);
        // Of two seeds, 1 s and 3 s apart, a draw has either or both.
        let interval = cell.figures["ttft_mean_s"].interval.unwrap();
        assert!((interval.low - 1.0).abs() < 1e-9 && (interval.high - 3.0).abs() < 1e-9, "{interval:?}");
        // 100 requests of 2 s each over 101 s; of 4 s over 103 s.
        assert!(
            (value("in_flight") - (200.0 / 101.0 + 400.0 / 103.0) / 2.0).abs() < 0.01,
            "{}",
            value("in_flight")
        );
        assert!(report.cell("nginx", 1.0).unwrap().figures.is_empty());
        assert!(report.is_clean() && report.over_load.is_empty());
    }

    #[test]
    fn every_figure_of_the_list_is_found() {
        let report = judged(&matrix(&[1.0], &[1]), &[recorded("kvlane", 1.0, 1, |_| 1.0)]);
        let found: Vec<&str> = report.cells[0].figures.keys().map(String::as_str).collect();
        let mut expected = FIGURES.to_vec();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn ours_is_compared_with_each_other_router_request_by_request() {
        let runs = [
            recorded("kvlane", 1.0, 1, |id| 1.0 + id as f64),
            recorded("nginx", 1.0, 1, |id| 1.5 + id as f64),
            // No partner under this seed.
            recorded("nginx", 1.0, 2, |_| 0.1),
        ];
        let report = judged(&matrix(&[1.0], &[1, 2]), &runs);
        assert_eq!(report.paired.len(), 1);
        let ttft = report.paired[0].ttft_s.unwrap();
        assert_eq!((report.paired[0].router.as_str(), ttft.matched), ("nginx", 100));
        assert!((ttft.mean_difference.value + 0.5).abs() < 1e-9 && ttft.faster_share.value == 1.0);
        let said = report.verdict.expect("a verdict");
        assert!(said.starts_with("kvlane gives the first token 1.0 % sooner (0."), "{said}");
        assert!(said.ends_with(") than nginx at the same load."), "{said}");
    }

    #[test]
    fn the_verdict_is_against_the_best_of_the_others_at_every_load() {
        let matrix = matrix(&[1.0, 2.0], &[1]);
        let named = ["kvlane", "nginx", "haproxy", "broken"]
            .map(|router| Named { router: router.into(), version: None });
        let runs: Vec<Recorded> = [1.0, 2.0]
            .iter()
            .flat_map(|&load| {
                [
                    recorded("kvlane", load, 1, move |_| 0.5 * load * load),
                    recorded("nginx", load, 1, |_| 4.0),
                    recorded("haproxy", load, 1, |_| 1.0),
                ]
            })
            .collect();
        let report = Report::new(&matrix, true, named.to_vec(), BTreeMap::new(), &runs);
        assert_eq!(
            report.verdict.as_deref(),
            Some(
                "kvlane against haproxy, the best of 2 others, at the same loads: first token 50 % sooner (50 to 50) at 1, \
                 100 % later (100 to 100) at 2."
            )
        );
        assert!(report.to_text().starts_with("kvlane against haproxy"), "{}", report.to_text());
        let alone = Report::new(&matrix, true, named[..1].to_vec(), BTreeMap::new(), &runs);
        assert_eq!(alone.verdict, None);
    }

    #[test]
    fn a_run_that_failed_is_listed_and_counts_in_nothing() {
        let mut failed = recorded("kvlane", 1.0, 2, |_| 100.0);
        failed.run.failure = Some("the client was late".into());
        let report = judged(&matrix(&[1.0], &[1, 2]), &[recorded("kvlane", 1.0, 1, |_| 1.0), failed]);
        assert_eq!((report.runs.len(), report.cells[0].runs), (2, 1));
        assert!((report.cells[0].figures["ttft_mean_s"].value - 1.0).abs() < 1e-9);
        assert!(!report.is_clean());
    }

    #[test]
    fn over_load_there_are_slopes_knees_bounds_and_crossings() {
        let loads = [1.0, 2.0, 3.0, 4.0];
        let runs: Vec<Recorded> = loads
            .iter()
            .flat_map(|&load| {
                [
                    recorded("kvlane", load, 1, move |_| 1.0 + load / 2.0),
                    recorded("nginx", load, 1, move |_| 0.25 + load),
                ]
            })
            .collect();
        let report = judged(&matrix(&loads, &[1]), &runs);
        let of = |router: &str| {
            report.over_load.iter().find(|one| one.router == router && one.figure == "ttft_mean_s").unwrap()
        };
        let (own, theirs) = (of("kvlane"), of("nginx"));
        assert!(
            (own.slope.unwrap().value - 0.5).abs() < 1e-9
                && (theirs.slope_ratio.unwrap().value - 2.0).abs() < 1e-9
        );
        assert!(own.slope_in_flight.unwrap().value > 0.0 && own.slope_ratio.is_none() && own.knee.is_none());
        let within = theirs.within.unwrap();
        assert!((within.load.value - 2.25).abs() < 1e-9 && within.passed);
        let crossed: Vec<&CrossedAt> =
            report.crossings.iter().filter(|one| one.figure == "ttft_mean_s").collect();
        assert_eq!(crossed.len(), 1);
        assert!((crossed[0].crossing.at - 1.5).abs() < 1e-9 && !crossed[0].crossing.lower_before);
    }
}
