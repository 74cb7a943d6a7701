//! The loads of a scenario, validated, and their conversations.

use std::borrow::Cow;
use std::ops::Range;

use kvlane_core::rng::Rng;
use kvlane_trace::generate::{Arrivals, Workload, generate};
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::Trace;

use super::closed::Clients;
use super::{Cell, Open, OpenLoop, RunError, Stage, WorkloadSpec};

/// Load factors for which the times of a trace stay within the range of the clock.
const LOADS: std::ops::RangeInclusive<f64> = 1e-6..=1e9;
/// Latest time of a trace in seconds at its lowest load: 31 years, where the clock's range is 584.
const SECS_MAX: f64 = 1e9;

/// One run of a policy under a seed.
#[derive(Clone, Debug)]
pub(super) enum Point {
    /// A trace at its own times, at a load.
    Load(f64),
    /// One stage, from empty caches.
    Stage(Stage),
    /// All stages in one run.
    Stages(OpenLoop),
    /// A number of clients, and their conversations.
    Clients(Clients),
}

/// Source of requests.
#[derive(Debug)]
pub(crate) enum Source {
    /// A trace, the same for all seeds.
    Trace(Box<(Trace, Plan)>),
    /// A workload, generated for each seed.
    Generated(Box<Workload>),
}

/// The loads of a workload.
pub(super) fn points(spec: &WorkloadSpec) -> Result<Vec<Point>, RunError> {
    let bad = |why: &str| Err(RunError::Workload(why.to_owned()));
    let positive = |value: f64| value > 0.0 && value.is_finite();
    match (&spec.open_loop, &spec.closed_loop) {
        (Some(_), Some(_)) => bad("open_loop and closed_loop exclude each other: remove one"),
        (Some(_), _) | (_, Some(_)) if !spec.load.is_empty() => {
            bad("load scales the arrival times of the trace: remove it, or open_loop or closed_loop")
        }
        (Some(open), None) => {
            let sound = |stage: &Stage| positive(stage.rate) && positive(stage.seconds) && stage.count() > 0;
            if open.stages.is_empty() || !open.stages.iter().chain(&open.warm_up).all(sound) {
                return bad(
                    "open_loop.stages: rate times seconds of each stage must give at least one conversation",
                );
            }
            if !(0.0..1e6).contains(&open.pause_s) {
                return bad("open_loop.pause_s: must be at least 0");
            }
            if open.back_to_back {
                return Ok(vec![Point::Stages(open.clone())]);
            }
            if open.warm_up.is_some() {
                return bad(
                    "open_loop.warm_up: needs back_to_back, because other stages start with empty caches",
                );
            }
            Ok(open.stages.iter().copied().map(Point::Stage).collect())
        }
        (None, Some(closed)) => {
            closed.clients().map(|clients| clients.into_iter().map(Point::Clients).collect()).or_else(bad)
        }
        (None, None) => {
            let loads = if spec.load.is_empty() { &[1.0][..] } else { &spec.load };
            if !loads.iter().all(|load| LOADS.contains(load)) {
                return bad("load: factors must be from 0.000001 to 1000000000");
            }
            Ok(loads.iter().copied().map(Point::Load).collect())
        }
    }
}

// === impl Point ===

impl Point {
    /// Its rows.
    pub(super) fn cells(&self) -> Vec<Cell> {
        match self {
            Self::Load(load) => vec![Cell::Load(*load)],
            Self::Stage(stage) => vec![Cell::Rate(stage.rate)],
            Self::Stages(open) => open.stages.iter().map(|stage| Cell::Rate(stage.rate)).collect(),
            Self::Clients(clients) => vec![Cell::Concurrency(clients.clients)],
        }
    }

    /// Number of its conversations; `None` for all.
    pub(super) fn conversations(&self) -> Option<u32> {
        match self {
            Self::Load(_) => None,
            Self::Stage(stage) => Some(stage.count()),
            Self::Stages(open) => {
                let counts = open.warm_up.iter().chain(&open.stages).map(Stage::count);
                Some(counts.fold(0, u32::saturating_add))
            }
            Self::Clients(clients) => Some(clients.conversations()),
        }
    }
}

// === impl Source ===

impl Source {
    /// Reads the trace, or validates the workload to generate.
    pub(crate) fn new(spec: &WorkloadSpec, open: &Open<'_>) -> Result<Self, RunError> {
        match (&spec.trace, &spec.generate) {
            (Some(path), None) => {
                let trace = open(path).map_err(|source| RunError::Trace { path: path.clone(), source })?;
                let slowest = spec.load.iter().copied().fold(1.0, f64::min);
                let late = |secs: f64| secs / slowest > SECS_MAX;
                if trace
                    .requests
                    .iter()
                    .any(|r| late(r.arrival_s) || r.think_s.is_some_and(|s| late(s.into())))
                {
                    let why = format!("{}: times beyond {SECS_MAX} s cannot be simulated", path.display());
                    return Err(RunError::Workload(why));
                }
                let plan = Plan::new(&trace);
                Ok(Self::Trace(Box::new((trace, plan))))
            }
            (None, Some(workload)) => {
                let mut one = workload.clone();
                one.set_arrivals(Arrivals::Closed { count: 1 });
                generate(&one, 1)?;
                Ok(Self::Generated(Box::new(workload.clone())))
            }
            _ => Err(RunError::Workload("set exactly one of trace and generate".to_owned())),
        }
    }

    /// All requests at their own times.
    pub(super) fn all(&self, seed: u64) -> Result<Cow<'_, (Trace, Plan)>, RunError> {
        match self {
            Self::Trace(read) => Ok(Cow::Borrowed(read)),
            Self::Generated(workload) => {
                let trace = generate(workload, seed)?;
                let plan = Plan::new(&trace);
                Ok(Cow::Owned((trace, plan)))
            }
        }
    }

    /// The first `count` conversations, consecutively.
    pub(crate) fn conversations(&self, count: u32, seed: u64) -> Result<(Trace, Plan), RunError> {
        let made;
        let (trace, plan) = match self {
            Self::Trace(read) => &**read,
            Self::Generated(workload) => {
                let mut workload = workload.clone();
                workload.set_arrivals(Arrivals::Closed { count });
                let trace = generate(&workload, seed)?;
                let plan = Plan::new(&trace);
                made = (trace, plan);
                &made
            }
        };
        if (plan.roots.len() as u64) < u64::from(count) {
            let why = format!("{count} conversations are needed, the trace has {}", plan.roots.len());
            return Err(RunError::Workload(why));
        }
        Ok(conversations(trace, plan, &plan.roots[..count as usize]))
    }
}

// === impl Stage ===

impl Stage {
    /// Conversations that begin in it.
    pub fn count(&self) -> u32 {
        (self.rate * self.seconds).round() as u32
    }
}

/// The conversations of these roots, consecutively.
pub(crate) fn conversations(trace: &Trace, plan: &Plan, roots: &[u32]) -> (Trace, Plan) {
    let mut order: Vec<u32> = Vec::new();
    for &root in roots {
        let from = order.len();
        order.push(root);
        let mut at = from;
        while let Some(&request) = order.get(at) {
            order.extend(plan.children(request));
            at += 1;
        }
        order[from..].sort_unstable();
    }
    let trace = trace.select(order);
    let plan = Plan::new(&trace);
    (trace, plan)
}

/// Sets the start times of consecutive conversations to those of the stages: a Poisson process with a given number of
/// arrivals. Times count from the stage's own start. Returns each stage's requests.
pub(crate) fn retime(trace: &mut Trace, plan: &Plan, stages: &[Stage], seed: u64) -> Vec<Range<u32>> {
    let mut rng = Rng::new(!seed);
    let count = trace.requests.len() as u32;
    let mut roots = plan.roots.iter().copied().peekable();
    let mut ranges = Vec::new();
    for stage in stages {
        let mut begins: Vec<f64> = (0..stage.count()).map(|_| rng.unit() * stage.seconds).collect();
        begins.sort_unstable_by(f64::total_cmp);
        let first = roots.peek().copied().unwrap_or(count);
        for begin_s in begins {
            let Some(root) = roots.next() else { break };
            let end = roots.peek().copied().unwrap_or(count);
            let shift_s = begin_s - trace.requests[root as usize].arrival_s;
            for request in &mut trace.requests[root as usize..end as usize] {
                request.arrival_s += shift_s;
            }
        }
        ranges.push(first..roots.peek().copied().unwrap_or(count));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::TraceRequest;
    use proptest::prelude::*;

    use super::*;

    fn spec(text: &str) -> WorkloadSpec {
        serde_json::from_str(text).expect("a workload")
    }

    #[track_caller]
    fn check_bad(text: &str, expect: &str) {
        let why = points(&spec(text)).map(|_| ()).unwrap_err().to_string();
        assert!(why.contains(expect), "{why}");
    }

    #[test]
    fn loads_that_make_no_sense_are_refused() {
        let stage = r#"{"rate": 1, "seconds": 5}"#;
        let closed = r#""closed_loop": {"concurrency": [1], "conversations": {"total": 3}}"#;
        check_bad(&format!(r#"{{"open_loop": {{"stages": [{stage}]}}, {closed}}}"#), "exclude");
        check_bad(&format!(r#"{{"load": [1], {closed}}}"#), "load scales");
        check_bad(r#"{"open_loop": {"stages": []}}"#, "stages");
        check_bad(r#"{"open_loop": {"stages": [{"rate": 0.1, "seconds": 1}]}}"#, "at least one");
        check_bad(
            &format!(r#"{{"open_loop": {{"stages": [{stage}], "warm_up": {stage}}}}}"#),
            "back_to_back",
        );
        check_bad(r#"{"closed_loop": {"concurrency": [0], "conversations": {"total": 3}}}"#, "at least 1");
        check_bad(r#"{"load": [0]}"#, "factors must be");
        check_bad(r#"{"load": [1e-300]}"#, "factors must be");
    }

    #[test]
    fn a_load_says_how_many_conversations_it_sends() {
        let closed = |text: &str| {
            let text = format!(r#"{{"closed_loop": {{"concurrency": [4], "conversations": {text}}}}}"#);
            points(&spec(&text)).unwrap()[0].conversations()
        };
        assert_eq!((closed(r#"{"total": 10}"#), closed(r#"{"per_client": 10}"#)), (Some(10), Some(40)));
        assert_eq!(points(&spec("{}")).unwrap()[0].conversations(), None);
        let stage = r#"{"rate": 1e9, "seconds": 4}"#;
        let open = format!(r#"{{"open_loop": {{"back_to_back": true, "stages": [{stage}, {stage}]}}}}"#);
        assert_eq!(points(&spec(&open)).unwrap()[0].conversations(), Some(u32::MAX), "more than can be");
    }

    #[test]
    fn a_stage_begins_its_share_of_the_conversations_within_its_seconds() {
        let workload = r#"{"kind": "unshared", "arrivals": {"process": "closed", "count": 1}}"#;
        let source = Source::Generated(Box::new(serde_json::from_str(workload).expect("a workload")));
        let stages = [Stage { rate: 2.0, seconds: 5.0 }, Stage { rate: 1.0, seconds: 3.0 }];
        let (mut trace, plan) = source.conversations(13, 1).unwrap();
        assert_eq!(retime(&mut trace, &plan, &stages, 1), [0..10, 10..13]);
        let within = |range: Range<usize>, seconds: f64| {
            let requests = &trace.requests[range];
            requests.iter().all(|request| (0.0..seconds).contains(&request.arrival_s))
                && requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s)
        };
        assert!(within(0..10, 5.0) && within(10..13, 3.0));
    }

    proptest! {
        /// Every conversation keeps its pace and belongs to one stage, and the stages contain all requests.
        #[test]
        fn retiming_moves_conversations_as_a_whole(
            kind in prop::sample::select(Workload::KINDS.to_vec()),
            stages in prop::collection::vec((1u32..9, 1u32..9), 1..4),
            seed in 0u64..99,
        ) {
            let source = Source::Generated(Box::new(Workload::by_kind(kind).expect("a kind")));
            let stages: Vec<Stage> = stages
                .into_iter()
                .map(|(count, seconds)| Stage { rate: f64::from(count) / f64::from(seconds), seconds: seconds.into() })
                .collect();
            let count = stages.iter().map(Stage::count).sum();
            let (trace, plan) = source.conversations(count, seed).expect("a workload");
            let mut moved = trace.clone();
            let ranges = retime(&mut moved, &plan, &stages, seed);
            prop_assert_eq!(ranges.first().map(|range| range.start), Some(0));
            prop_assert_eq!(ranges.last().map(|range| range.end), Some(trace.requests.len() as u32));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            for (range, stage) in ranges.iter().zip(&stages) {
                let begins: Vec<f64> = range
                    .clone()
                    .filter(|&request| plan.root[request as usize] == request)
                    .map(|root| moved.requests[root as usize].arrival_s)
                    .collect();
                prop_assert_eq!(begins.len() as u32, stage.count());
                prop_assert!(begins.is_sorted() && begins.iter().all(|s| (0.0..stage.seconds).contains(s)));
            }
            for (index, (before, after)) in trace.requests.iter().zip(&moved.requests).enumerate() {
                let root = plan.root[index] as usize;
                let pace = |trace: &Trace| trace.requests[index].arrival_s - trace.requests[root].arrival_s;
                prop_assert!((pace(&trace) - pace(&moved)).abs() < 1e-6);
                prop_assert_eq!(before, &TraceRequest { arrival_s: before.arrival_s, ..*after });
            }
        }
    }
}
