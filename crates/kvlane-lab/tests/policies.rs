//! The matrix of policies: what a run finds does not depend on what runs beside it, and counts again only for the same
//! program.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use kvlane_core::policy::PolicyConfig;
use kvlane_lab::figures::Figures;
use kvlane_lab::matrix::policies::{
    Bench, CellId, Job, Judged, Matrix, Selection, Store, Verdict, Versions, file_name, source_file,
};
use kvlane_lab::scenario::Arm;
use kvlane_trace::TraceError;
use kvlane_trace::trace::{Builder, Trace, TraceRequest};

/// A matrix that takes no time.
const SMALL: &str = r#"
ours: lmetric
loads: [1, 2]
ages_s: [0, 0.5]
age_s: 0.5
seeds: 2
knee: {policy: lmetric, ttft_mean_s: 0.5}
feed: {cache_knowledge: exact, report_interval_s: 0.05, kv_event_delay_s: 0.005}
left_out: [random]
policies: [{arm: queue_only, policy: {name: weighted, queue: 1, prefix: 0, kv: 0}}]
fleets:
  two: {engines: 2, preset: llama-3.1-8b@h100, block_tokens: 64}
  two-kinds:
    - {engines: 1, preset: llama-3.1-8b@h100, block_tokens: 64}
    - {engines: 1, preset: llama-3.1-8b@a100, block_tokens: 64}
workloads:
  - workload: made
    about: Prompts in common.
    generate: {kind: shared-prefix, groups: 3, prompts_per_group: 2, output_tokens: 20, block_tokens: 64}
    send: {seconds: 10}
    on: [{fleet: two, knee: 2, at: [5]}, {fleet: two-kinds, knee: 1.5, full_only: true}]
  - workload: read
    about: A trace.
    trace: a.trace
    context_tokens_max: 5000
    send: {window_s: 20}
    on: [{fleet: two, knee: 1}]
  - workload: drawn
    about: Its conversations.
    trace: a.trace
    send: {conversations: 9}
    on: [{fleet: two, knee: 1}]
"#;

fn small() -> Matrix {
    serde_saphyr::from_str(SMALL).expect("a matrix")
}

/// Conversations of two turns, of which every fifth becomes long.
fn open(_: &Path) -> Result<Trace, TraceError> {
    let mut builder = Builder::new(64);
    for index in 0..120u32 {
        let (arrival_s, input_tokens) =
            (f64::from(index), if index % 10 == 9 { 9000 } else { 900 + 7 * index });
        let after = (index % 2 == 1).then(|| index - 1);
        let request =
            TraceRequest { arrival_s, input_tokens, output_tokens: 9, after, ..TraceRequest::default() };
        builder.push(TraceRequest { session: index / 2, ..request }, &[]);
    }
    Ok(builder.finish())
}

/// What each job found, as text.
fn found(matrix: &Matrix, jobs: &[Job], threads: usize) -> Vec<(Job, Figures)> {
    let cells: Vec<CellId> = jobs.iter().map(|job| job.cell.clone()).collect();
    let bench = Bench::new(matrix, &cells, Path::new(""), &open).expect("a bench");
    let found = Mutex::new(BTreeMap::new());
    bench
        .run(jobs, threads, &|place, figures| _ = found.lock().expect("no panic").insert(place, figures))
        .expect("it runs");
    let found = found.into_inner().expect("no panic");
    assert_eq!(found.len(), jobs.len(), "each is run once");
    jobs.iter().cloned().zip(found.into_values()).collect()
}

fn some() -> Selection {
    let policies = ["lmetric", "power_of_two"].map(str::to_owned).to_vec();
    Selection { policies, full: true, ages_s: Some(vec![0.5]), ..Selection::default() }
}

/// Invariant: A cell of the placement matrix has the same bytes alone, in the whole matrix, and with any number of
/// threads; stored runs are reused only for the same program.
///
/// Also held by `a_run_counts_again_for_the_same_program_only`.
#[test]
fn a_run_finds_the_same_alone_in_the_whole_and_on_several_threads() {
    let matrix = small();
    let jobs = matrix.jobs(&some()).expect("jobs");
    let whole = found(&matrix, &jobs, 1);
    assert_eq!(whole, found(&matrix, &jobs, 2));
    for (job, figures) in whole.iter().step_by(7) {
        let alone = found(&matrix, std::slice::from_ref(job), 1);
        assert_eq!(serde_json::to_string(&alone[0].1).ok(), serde_json::to_string(figures).ok(), "{job:?}");
    }
}

#[test]
fn what_is_found_is_between_the_policies_and_the_bounds() {
    let matrix = small();
    let policies = ["fleet_cost", "round_robin"].map(str::to_owned).to_vec();
    let selection = Selection { policies, full: true, ..some() };
    let (cells, arms) = (matrix.cells(&selection).expect("cells"), matrix.arms(&selection).expect("arms"));
    let bench = Bench::new(&matrix, &cells, Path::new(""), &open).expect("a bench");
    let limits = bench.limits(&cells, &arms, 30, 2, &|_| ()).expect("limits");
    for (cell, limit) in cells.iter().zip(&limits) {
        let names: Vec<&str> = limit.placed.iter().map(|one| one.arm.as_str()).collect();
        assert_eq!(names, arms.iter().map(|arm| arm.arm.as_str()).collect::<Vec<_>>());
        let best_s = limit.placed.iter().map(|one| one.mean_s).fold(f64::INFINITY, f64::min);
        let (found_s, bound_s) = (limit.found.mean_s, limit.bounds.highest_s());
        assert!(found_s <= best_s && bound_s <= found_s && bound_s > 0.0, "{cell:?}: {limit:?}");
        assert_eq!(limit.bounds.work_s.is_some(), cell.workload == "made", "turns wait for answers");
    }
    assert_eq!(
        limits,
        bench.limits(&cells, &arms, 30, 1, &|_| ()).expect("limits"),
        "on any number of threads"
    );
    let refused = bench.limits(&cells, &[], 1, 1, &|_| ()).expect_err("nothing to begin with").to_string();
    assert!(refused.contains("at least one"), "{refused}");
}

#[test]
fn seeds_send_other_requests_and_loads_send_more() {
    let matrix = small();
    for workload in ["made", "read", "drawn"] {
        let selection = Selection { only: vec![workload.to_owned()], ..some() };
        let runs = found(&matrix, &matrix.jobs(&selection).expect("jobs"), 2);
        let of = |load: f64, seed: u32| {
            let one = |(job, _): &&(Job, Figures)| job.cell.of_knee == Some(load) && job.seed == seed;
            &runs.iter().find(one).expect("it was run").1
        };
        assert_ne!(of(1.0, 1)["ttft_mean_s"], of(1.0, 2)["ttft_mean_s"], "{workload}");
        let requests = [1.0, 2.0].map(|load| of(load, 1)["requests"]);
        match workload {
            // Turns that would come after the twenty seconds are left out.
            "read" => assert!(requests[1] > 1.5 * requests[0] && requests[1] <= 40.0, "{requests:?}"),
            "made" => assert_eq!(requests, [20.0, 40.0]),
            _ => assert_eq!(requests, [18.0, 18.0]),
        }
    }
}

#[test]
fn a_conversation_ends_before_its_context_is_too_long() {
    let mut matrix = small();
    matrix.workloads[2].context_tokens_max = Some(5000);
    matrix.workloads[2].send = kvlane_lab::matrix::policies::Pace::Conversations(60);
    let selection = Selection { only: vec!["drawn".to_owned()], ..some() };
    let jobs = matrix.jobs(&selection).expect("jobs");
    let runs = found(&matrix, &jobs[..1], 1);
    assert_eq!(runs[0].1["requests"], 108.0, "of 60 conversations 12 end after one request");
}

#[test]
fn a_file_has_every_policy_but_those_left_out() {
    let matrix = small();
    let arms = matrix.arms(&Selection::default()).expect("arms");
    assert_eq!(arms.len(), PolicyConfig::NAMES.len());
    assert!(arms.iter().all(|arm| arm.arm != "random"));
    let cells = |selection: &Selection| matrix.cells(selection).expect("cells").len();
    assert_eq!(cells(&Selection::default()), 14, "three loads and two, two ages");
    assert_eq!(cells(&Selection { full: true, ..Selection::default() }), 18);
    assert_eq!(cells(&Selection { loads: Some(vec![1.0]), ..Selection::default() }), 6);
    assert_eq!(cells(&Selection { only: vec!["made@two-kinds".to_owned()], ..Selection::default() }), 4);
    let stray = Selection { only: vec!["made@three".to_owned()], ..Selection::default() };
    assert!(matrix.cells(&stray).unwrap_err().to_string().contains("made@three"));
    let stray = Selection { policies: vec!["random".to_owned()], ..Selection::default() };
    assert!(matrix.arms(&stray).unwrap_err().to_string().contains("random"));
}

#[test]
fn a_run_counts_again_for_the_same_program_only() {
    let matrix = small();
    let file = std::env::temp_dir().join(format!("kvlane-matrix-{}.jsonl", std::process::id()));
    _ = std::fs::remove_file(&file);
    let jobs = matrix.jobs(&some()).expect("jobs");
    let (job, other) = (&jobs[0], &jobs[1]);
    let versions = |program: &str, policy: &str| Versions {
        program: program.to_owned(),
        policies: [(file_name(&job.arm.policy), policy.to_owned())].into(),
        traces: [].into(),
    };
    let figures: Figures = [("e2e_mean_s".to_owned(), 0.1 + 0.2)].into();
    let kept =
        Store::open(&file).and_then(|store| store.keep(&matrix, &versions("a", "p"), job, figures.clone()));
    assert_eq!(kept.expect("it is written"), figures);
    // The writer was killed.
    std::fs::OpenOptions::new()
        .append(true)
        .open(&file)
        .and_then(|mut file| std::io::Write::write_all(&mut file, b"{\"schema\":\"kvlane.pla"))
        .expect("it is written");
    let store = Store::open(&file).expect("it is read");
    let find = |program: &str, policy: &str, job: &Job, any: bool| {
        store.find(&matrix, &versions(program, policy), job, any).cloned()
    };
    assert_eq!(find("a", "p", job, false), Some(figures.clone()));
    assert_eq!(find("b", "p", job, false), None, "another program");
    assert_eq!(find("b", "p", job, true), Some(figures.clone()), "whose policy is the same");
    assert_eq!(find("b", "q", job, true), None, "whose policy is another");
    assert_eq!(find("a", "p", other, true), None, "another run");
    let mut louder = small();
    louder.judgement.slo_ttft_s = 1.0;
    assert_eq!(store.find(&louder, &versions("a", "p"), job, true), None, "another judgement");
    let renamed = Job { arm: Arm { arm: "renamed".to_owned(), ..job.arm.clone() }, ..job.clone() };
    assert_eq!(find("a", "p", &renamed, false), Some(figures.clone()), "a name changes nothing");
    // What is written after a line that was cut short is whole.
    store.keep(&matrix, &versions("a", "p"), other, figures.clone()).expect("it is written");
    let store = Store::open(&file).expect("it is read");
    assert_eq!(store.find(&matrix, &versions("a", "p"), other, false), Some(&figures));
    _ = std::fs::remove_file(&file);
}

#[test]
fn a_set_of_parameters_has_the_source_of_its_policy() {
    for name in PolicyConfig::NAMES {
        let source = file_name(&PolicyConfig::by_name(name).expect("a policy"));
        let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvlane-core/src/policy");
        assert!(source_file(&policies, &source).is_some(), "{source}");
    }
}

/// One run of a table made by hand: cell, arm, seed, mean to the end, p99 to the first token.
fn table(rows: &[(&str, &str, u32, f64, f64)]) -> Judged {
    let results = rows.iter().map(|&(cell, policy, seed, e2e_s, ttft_p99_s)| {
        // An arm with a + is ours with other parameters.
        let (name, ours) = policy.split_once('+').map_or((policy, false), |_| ("lmetric", true));
        let mut arm = Arm::new(PolicyConfig::by_name(name).expect("a policy"));
        if ours {
            arm.arm = policy.to_owned();
        }
        let cell = CellId {
            workload: cell.to_owned(),
            fleet: "two".to_owned(),
            load: 1.0,
            of_knee: None,
            age_s: 0.0,
        };
        let figures =
            [("e2e_mean_s", e2e_s), ("ttft_p99_s", ttft_p99_s)].map(|(name, value)| (name.to_owned(), value));
        (Job { cell, arm, seed }, Figures::from(figures))
    });
    Judged::new("lmetric", results.collect())
}

#[test]
fn ours_is_judged_by_the_best_of_the_others_in_each_cell() {
    let judged = table(&[
        ("a", "lmetric", 1, 3.0, 1.0),
        ("a", "lmetric", 2, 5.0, 1.4),
        ("a", "round_robin", 1, 4.0, 1.0),
        ("a", "round_robin", 2, 6.0, 0.8),
        ("a", "least_load", 1, 7.0, 0.5),
        ("a", "least_load", 2, 9.0, 0.5),
        ("a", "lmetric+", 1, 1.0, 0.1),
        ("b", "lmetric", 1, 1.02, 1.0),
        ("b", "least_load", 1, 1.0, 1.0),
        ("b", "round_robin", 1, 2.0, 2.0),
        ("c", "lmetric", 1, 5.0, 1.0),
        ("c", "least_load", 1, 4.0, 2.0),
        ("d", "lmetric", 1, 5.0, 1.0),
    ]);
    assert_eq!(judged.others, ["round_robin", "least_load"], "ours with other parameters is none of them");
    let standings: Vec<_> = judged.standings().map(|(_, standing)| standing).collect();
    assert_eq!(standings.len(), 3, "in d no other policy was run");
    let best: Vec<&str> = standings.iter().map(|standing| standing.best.as_str()).collect();
    assert_eq!(best, ["round_robin", "least_load", "least_load"]);
    assert_eq!(standings[0].e2e_ratio, 4.0 / 5.0);
    let interval = standings[0].e2e_interval.expect("two seeds");
    assert!(interval.low >= 0.75 && interval.high <= 5.0 / 6.0 && interval.low < interval.high);
    assert!((standings[0].ttft_p99_ratio - 1.2 / 0.9).abs() < 1e-12);
    assert_eq!((standings[0].ttft_p99_best.as_str(), standings[0].ttft_p99_best_ratio), ("least_load", 2.4));
    let verdicts: Vec<Verdict> = standings.iter().map(|standing| standing.verdict).collect();
    assert_eq!(verdicts, [Verdict::Better, Verdict::Within, Verdict::Worse]);
    assert_eq!([Verdict::Better, Verdict::Within, Verdict::Worse].map(|one| judged.count(one)), [1, 1, 1]);
    let expect = (5.0 / 4.0_f64 * (1.0 / 1.02) * (4.0 / 5.0)).cbrt();
    assert!((judged.relative_to_best().expect("three cells") - expect).abs() < 1e-12);
    let round_robin = judged.relative("round_robin", "e2e_mean_s").expect("two cells");
    assert!((round_robin - (5.0 / 4.0_f64 * 2.0 / 1.02).sqrt()).abs() < 1e-12);
    assert_eq!(judged.relative("lmetric", "e2e_mean_s"), Some(1.0));
    assert_eq!(judged.relative("random", "e2e_mean_s"), None);
    let violations: Vec<(&str, &str)> =
        judged.violations().iter().map(|(_, cell, figure, _)| (cell.workload.as_str(), *figure)).collect();
    assert_eq!(violations, [("c", "e2e_mean_s"), ("a", "ttft_p99_s")], "1.25 of 1.03 before 1.33 of 1.1");
}
