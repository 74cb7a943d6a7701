//! Named figures of a run.
//!
//! Figures are a map from name to number, units last, so that published figures of a real fleet, simulated ones and
//! the errors between them have the same type.

use std::collections::BTreeMap;

use kvlane_core::time::Nanos;
use kvlane_sim::engine::EngineStats;
use kvlane_sim::outcome::{Failure, Outcome};
use kvlane_sim::world::{Ramp, Run, Sample, Send, Window, World};
use serde::{Deserialize, Serialize};

use crate::statistics::ci::{self, Figure, Interval};
use crate::statistics::summary::Percentiles;

/// Figures by name.
pub type Figures = BTreeMap<String, f64>;

/// Limits for goodput, and for the classes of requests by uncached tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Judgement {
    /// Maximum TTFT in seconds of a request that counts for goodput.
    pub slo_ttft_s: f64,
    /// Maximum mean time between two tokens in milliseconds of a request that counts for goodput.
    pub slo_tpot_ms: f64,
    /// Uncached prompt tokens from which a request is MEDIUM rather than WARM.
    pub medium_from_tokens: u32,
    /// Uncached prompt tokens from which it is HEAVY.
    pub heavy_from_tokens: u32,
}

impl Default for Judgement {
    fn default() -> Self {
        Self { slo_ttft_s: 2.0, slo_tpot_ms: 50.0, medium_from_tokens: 5_000, heavy_from_tokens: 20_000 }
    }
}

/// The names of the classes, by uncached tokens.
pub const CLASSES: [&str; 3] = ["warm", "medium", "heavy"];

/// The figures of a run. `before` and `after` are the engines' counters on either side of it.
pub fn figures(run: &Run, judgement: &Judgement, before: &[EngineStats], after: &[EngineStats]) -> Figures {
    let mut figures = Figures::new();
    let outcomes = &run.outcomes;
    let answered = || outcomes.iter().filter(|outcome| outcome.is_ok());
    let count =
        |what: &dyn Fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| what(outcome)).count() as f64;
    let sum = |what: &dyn Fn(&Outcome) -> f64| answered().map(what).sum::<f64>();
    let span_s = (run.end - run.start).as_secs_f64().max(1e-9);
    let requests = outcomes.len() as f64;
    let ok = answered().count() as f64;
    let mut put = |name: &str, value: f64| {
        if value.is_finite() {
            figures.insert(name.to_owned(), value);
        }
    };
    put("requests", requests);
    put("answered", ok);
    put("shed_share", count(&|o| matches!(o.failure, Some(Failure::Rejected(_)))) / requests);
    put("failed_share", count(&|o| o.failure.is_some()) / requests);
    put("out_tok_s", sum(&|o| f64::from(o.output_tokens)) / span_s);
    put("req_s", ok / span_s);
    for (name, scale, unit, samples) in latencies(run) {
        let mut samples = samples;
        let Some(Percentiles { mean, p50, p90, p99, max }) = Percentiles::of(&mut samples) else { continue };
        for (what, value) in [("mean", mean), ("p50", p50), ("p90", p90), ("p99", p99), ("max", max)] {
            put(&format!("{name}_{what}_{unit}"), value * scale);
        }
    }
    if let Some(session) = Percentiles::of(&mut sessions(run)) {
        for (what, value) in [("mean", session.mean), ("p50", session.p50), ("p90", session.p90)] {
            put(&format!("session_{what}_s"), value);
        }
    }
    let gaps = sum(&|o| f64::from(o.output_tokens.saturating_sub(1)));
    put(
        "itl_mean_ms",
        sum(&|o| o.first_token.map_or(0.0, |first| (o.end - first).as_secs_f64())) / gaps * 1e3,
    );
    let prompts = sum(&|o| f64::from(o.prompt_tokens));
    put("cached_share", sum(&|o| f64::from(o.cached_tokens)) / prompts);
    let later = |tokens: fn(&Outcome) -> u32| {
        answered().filter(|o| o.root != o.request).map(|o| f64::from(tokens(o))).sum::<f64>()
    };
    let prompts_later = later(|o| o.prompt_tokens);
    if prompts_later > 0.0 {
        put("follow_up_cached_share", later(|o| o.cached_tokens) / prompts_later);
    }
    put("moved_share", sum(&|o| f64::from(o.moved_tokens)) / prompts);
    let mut transfers: Vec<f64> = answered().filter_map(Outcome::transfer_s).collect();
    if let Some(Percentiles { mean, p50, p99, .. }) = Percentiles::of(&mut transfers) {
        put("split_share", answered().filter(|outcome| outcome.split.is_some()).count() as f64 / ok);
        for (what, value) in [("mean", mean), ("p50", p50), ("p99", p99)] {
            put(&format!("transfer_{what}_s"), value);
        }
    }
    // What was found was in a cache: requests that run in another order than the trace's, or again, may find more.
    put("reusable_share", sum(&|o| f64::from(o.reusable_tokens.max(o.cached_tokens))) / prompts);
    let Judgement { slo_ttft_s, slo_tpot_ms, medium_from_tokens, heavy_from_tokens } = *judgement;
    let good = count(&|o| {
        o.is_ok()
            && o.ttft_s().is_some_and(|s| s <= slo_ttft_s)
            && o.tpot_s().is_none_or(|s| s * 1e3 <= slo_tpot_ms)
    });
    put("slo_share", good / requests);
    put("goodput_req_s", good / span_s);
    let class = |o: &Outcome| {
        usize::from(o.uncached_tokens() >= medium_from_tokens)
            + usize::from(o.uncached_tokens() >= heavy_from_tokens)
    };
    for (index, name) in CLASSES.into_iter().enumerate() {
        let mut ttfts: Vec<f64> =
            answered().filter(|o| class(o) == index).filter_map(Outcome::ttft_s).collect();
        put(&format!("{name}_share"), ttfts.len() as f64 / ok);
        if let Some(ttft) = Percentiles::of(&mut ttfts) {
            for (what, value) in [("mean", ttft.mean), ("p50", ttft.p50), ("p90", ttft.p90)] {
                put(&format!("{name}_ttft_{what}_s"), value);
            }
        }
    }
    let counters = |what: &dyn Fn(&EngineStats) -> f64| -> Vec<f64> {
        after.iter().zip(before).map(|(after, before)| what(after) - what(before)).collect()
    };
    let busy = counters(&|stats| stats.busy.as_secs_f64());
    put("busy_share", busy.iter().sum::<f64>() / busy.len() as f64 / span_s);
    put("busy_imbalance", imbalance(&busy));
    put("computed_imbalance", imbalance(&counters(&|stats| stats.computed_tokens as f64)));
    let loads: f64 = counters(&|stats| stats.adapter_loads as f64).iter().sum();
    if loads > 0.0 {
        put("adapter_loads", loads);
    }
    put("preemptions", counters(&|stats| stats.preemptions as f64).iter().sum());
    put("recomputed_tokens", counters(&|stats| stats.recomputed_tokens as f64).iter().sum());
    figures
}

/// Plays requests in a world: what happened, and the figures. `progress` gets the number of requests that have ended.
pub fn play(
    world: &mut World,
    send: &Send<'_>,
    judgement: &Judgement,
    progress: impl FnMut(usize),
) -> (Run, Figures) {
    play_ramped(world, send, None, judgement, progress)
}

/// The same; with a ramp, run and figures are of the conversations that count.
pub fn play_ramped(
    world: &mut World,
    send: &Send<'_>,
    ramp: Option<&Ramp>,
    judgement: &Judgement,
    progress: impl FnMut(usize),
) -> (Run, Figures) {
    let (before, sampled, told) = (world.engine_stats(), world.samples().len(), world.exchanged());
    let looked_up = world.lookups();
    let (run, window) = match ramp {
        None => {
            let run = world.run(send, progress);
            let (after, samples) = (world.engine_stats(), sampled..world.samples().len());
            let window = Window { start: run.start, end: run.end, before, after, samples };
            (run, window)
        }
        Some(ramp) => {
            let (mut run, window) = world.run_ramped(send, ramp, progress);
            run.outcomes.retain(|outcome| ramp.counted.contains(&outcome.request));
            (Run { start: window.start, end: window.end, ..run }, window)
        }
    };
    let mut figures = figures(&run, judgement, &window.before, &window.after);
    if let Some(imbalance) = in_flight_imbalance(&world.samples()[window.samples]) {
        figures.insert("in_flight_imbalance".to_owned(), imbalance);
    }
    let telling = world.exchanged();
    let span_s = (run.end - run.start).as_secs_f64();
    if telling.news > told.news && span_s > 0.0 {
        for (name, count) in
            [("told_loads_s", telling.shares - told.shares), ("told_marks_s", telling.marks - told.marks)]
        {
            figures.insert(name.to_owned(), count as f64 / span_s);
        }
    }
    let lookups = world.lookups();
    let found = [
        ("sketch_bytes", lookups.bytes - looked_up.bytes, lookups.sketches - looked_up.sketches),
        ("sketch_marks", lookups.marks - looked_up.marks, lookups.sketches - looked_up.sketches),
        ("false_hit_share", lookups.false_hits - looked_up.false_hits, lookups.lookups - looked_up.lookups),
        (
            "false_hit_tokens",
            lookups.false_tokens - looked_up.false_tokens,
            lookups.lookups - looked_up.lookups,
        ),
    ];
    for (name, sum, count) in found.into_iter().filter(|(.., count)| *count > 0) {
        figures.insert(name.to_owned(), sum as f64 / count as f64);
    }
    (run, figures)
}

/// The latencies of the answered requests in seconds: name, factor to the unit, unit, samples.
fn latencies(run: &Run) -> [(&'static str, f64, &'static str, Vec<f64>); 3] {
    let samples = |latency: fn(&Outcome) -> Option<f64>| -> Vec<f64> {
        run.outcomes.iter().filter(|outcome| outcome.is_ok()).filter_map(latency).collect()
    };
    [
        ("ttft", 1.0, "s", samples(Outcome::ttft_s)),
        ("tpot", 1e3, "ms", samples(Outcome::tpot_s)),
        ("e2e", 1.0, "s", samples(|outcome| Some(outcome.e2e_s()))),
    ]
}

/// Seconds from the first request to the last answer of each conversation with more than one request that was
/// answered in full.
fn sessions(run: &Run) -> Vec<f64> {
    let mut sessions: BTreeMap<u32, (Nanos, Nanos, u32, bool)> = BTreeMap::new();
    for outcome in &run.outcomes {
        let fresh = (outcome.due, outcome.end, 0, true);
        let (due, end, requests, answered) = sessions.entry(outcome.root).or_insert(fresh);
        (*due, *end) = ((*due).min(outcome.due), (*end).max(outcome.end));
        (*requests, *answered) = (*requests + 1, *answered && outcome.is_ok());
    }
    let whole = sessions.into_values().filter(|&(_, _, requests, answered)| requests > 1 && answered);
    whole.map(|(due, end, ..)| (end - due).as_secs_f64()).collect()
}

/// The largest over the mean: 1 is even.
fn imbalance(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.iter().fold(0.0, |most: f64, value| most.max(*value)) / mean
}

/// The most requests in flight at an endpoint over the mean over endpoints: means over time of both.
pub fn in_flight_imbalance(samples: &[Sample]) -> Option<f64> {
    let most: f64 = samples.iter().map(|sample| sample.requests_max as f64).sum();
    let mean: f64 = samples.iter().map(|sample| sample.requests as f64 / sample.endpoints as f64).sum();
    (mean > 0.0).then(|| most / mean)
}

/// Kinds of overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overload {
    /// Requests arrive faster than the fleet serves them: queueing times grow with the length of the run.
    Fleet,
    /// Requests queue at some engines while others have less work.
    SomeEngines,
}

/// Mean TTFT of WARM requests from which a run counts as overloaded, in multiples of the goodput limit: there is little to compute for
/// them, so they have waited for others.
const OVERLOAD_WARM_FACTOR: f64 = 1.0;
/// Mean TTFT of all requests from which it counts as overloaded, too: so long may no prompt take.
const OVERLOAD_TTFT_FACTOR: f64 = 10.0;
/// Busy time of the busiest engine over the mean, from which the load counts as uneven.
const OVERLOAD_IMBALANCE: f64 = 1.5;

// === impl Overload ===

impl Overload {
    /// The kind of overload that the figures of a run show, if any.
    pub fn of(figures: &Figures, judgement: &Judgement) -> Option<Self> {
        let beyond = |figure: &str, factor: f64| {
            figures.get(figure).is_some_and(|ttft_s| *ttft_s >= factor * judgement.slo_ttft_s)
        };
        if !beyond("warm_ttft_mean_s", OVERLOAD_WARM_FACTOR) && !beyond("ttft_mean_s", OVERLOAD_TTFT_FACTOR) {
            return None;
        }
        let imbalance = figures.get("busy_imbalance").copied().unwrap_or(1.0);
        Some(if imbalance < OVERLOAD_IMBALANCE { Self::Fleet } else { Self::SomeEngines })
    }

    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fleet => "fleet",
            Self::SomeEngines => "some_engines",
        }
    }
}

/// Confidence intervals of a single run's latencies, over its requests.
pub fn request_intervals(run: &Run, seed: u64) -> BTreeMap<String, Interval> {
    const FIGURES: [(&str, Figure); 4] = [
        ("mean", Figure::Mean),
        ("p50", Figure::Percentile(50)),
        ("p90", Figure::Percentile(90)),
        ("p99", Figure::Percentile(99)),
    ];
    let latencies = latencies(run);
    let names = latencies.each_ref().map(|(name, scale, unit, _)| (*name, *scale, *unit));
    let samples = latencies.map(|(.., samples)| samples);
    let mut intervals = BTreeMap::new();
    let found = ci::of_all_requests(&samples, &FIGURES.map(|(_, figure)| figure), seed);
    for ((name, scale, unit), of_latency) in names.into_iter().zip(found) {
        for ((what, _), interval) in FIGURES.iter().zip(of_latency) {
            if let Some(Interval { low, high }) = interval {
                let interval = Interval { low: low * scale, high: high * scale };
                intervals.insert(format!("{name}_{what}_{unit}"), interval);
            }
        }
    }
    intervals
}

/// The mean of each figure over the runs that have it.
pub fn mean(runs: &[Figures]) -> Figures {
    let mut sums: BTreeMap<&String, (f64, f64)> = BTreeMap::new();
    for (name, value) in runs.iter().flatten() {
        let (sum, count) = sums.entry(name).or_default();
        (*sum, *count) = (*sum + value, *count + 1.0);
    }
    sums.into_iter().map(|(name, (sum, count))| (name.clone(), sum / count)).collect()
}

/// The figures of several runs as one: figures per second or per run are averaged, figures of answered requests
/// (times, shares of their tokens, classes) are weighted by these, shares of all requests by all.
pub fn whole(runs: &[Figures]) -> Figures {
    let of_all = ["shed_share", "failed_share", "slo_share"];
    let weight = |run: &Figures, name: &str| {
        let count = if of_all.contains(&name) { "requests" } else { "answered" };
        run.get(count).copied().unwrap_or_default()
    };
    let of_requests = |name: &str| {
        name.ends_with("_s") && !name.ends_with("tok_s") && !name.ends_with("req_s")
            || name.ends_with("_ms")
            || name.ends_with("_share") && name != "busy_share"
    };
    let mut whole = mean(runs);
    for (name, value) in whole.iter_mut().filter(|(name, _)| of_requests(name)) {
        let (sum, count) = runs
            .iter()
            .filter_map(|run| Some((run.get(name)?, weight(run, name))))
            .fold((0.0, 0.0), |(sum, count), (value, weight)| (sum + value * weight, count + weight));
        if count > 0.0 {
            *value = sum / count;
        }
    }
    whole
}

/// Confidence intervals of each figure's mean over several runs under different seeds. Empty for one run.
pub fn seed_intervals(runs: &[Figures], seed: u64) -> BTreeMap<String, Interval> {
    let mut values: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
    for (name, value) in runs.iter().flatten() {
        values.entry(name).or_default().push(*value);
    }
    values
        .into_iter()
        .filter_map(|(name, values)| Some((name.clone(), ci::of_seeds(&values, seed)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use kvlane_core::decision::Rejection;
    use proptest::prelude::*;

    use super::*;

    fn outcome(ttft_s: u64, cached_tokens: u32, failure: Option<Failure>) -> Outcome {
        Outcome {
            request: 0,
            root: 0,
            endpoint: Some(0),
            attempts: 1,
            resent: 0,
            due: Nanos::from_secs(1),
            first_token: Some(Nanos::from_secs(1 + ttft_s)),
            end: Nanos::from_secs(1 + ttft_s) + Nanos::from_millis(400),
            prompt_tokens: 30_000,
            cached_tokens,
            moved_tokens: 0,
            reusable_tokens: 30_000,
            output_tokens: 11,
            split: None,
            failure,
        }
    }

    fn run(outcomes: Vec<Outcome>) -> Figures {
        let run = Run { start: Nanos::ZERO, end: Nanos::from_secs(11), outcomes };
        let stats = |busy| EngineStats { busy: Nanos::from_secs(busy), ..EngineStats::default() };
        figures(&run, &Judgement::default(), &[stats(0), stats(1)], &[stats(3), stats(2)])
    }

    #[test]
    fn long_waits_are_the_fleets_or_some_engines() {
        let of = |ttft_mean_s: f64, warm_ttft_mean_s: f64, busy_imbalance: f64| {
            let figures = [
                ("ttft_mean_s", ttft_mean_s),
                ("warm_ttft_mean_s", warm_ttft_mean_s),
                ("busy_imbalance", busy_imbalance),
            ];
            let figures = figures.map(|(name, value)| (name.to_owned(), value)).into();
            Overload::of(&figures, &Judgement::default())
        };
        assert_eq!(of(19.0, 1.9, 1.0), None, "its prompts are long");
        assert_eq!(of(3.6, 2.1, 1.0), Some(Overload::Fleet), "short ones wait, too");
        assert_eq!(of(3.6, 2.1, 2.4), Some(Overload::SomeEngines));
        assert_eq!(of(630.0, 0.1, 1.1), Some(Overload::Fleet));
        assert_eq!(of(630.0, 600.0, 2.4), Some(Overload::SomeEngines));
        assert_eq!(Overload::of(&Figures::new(), &Judgement::default()), None);
    }

    #[test]
    fn requests_are_divided_by_the_work_they_bring() {
        let figures = run(vec![outcome(1, 29_000, None), outcome(3, 20_000, None), outcome(9, 0, None)]);
        for (class, ttft_s) in CLASSES.into_iter().zip([1.0, 3.0, 9.0]) {
            assert_eq!(figures[&format!("{class}_ttft_mean_s")], ttft_s);
        }
        assert!((figures["itl_mean_ms"] - 40.0).abs() < 1e-6);
        assert!((figures["slo_share"] - 1.0 / 3.0).abs() < 1e-9, "one is in time");
        assert_eq!(figures["out_tok_s"], 3.0);
        assert_eq!(figures["busy_imbalance"], 1.5);
    }

    #[test]
    fn who_was_refused_counts_as_shed_and_in_no_latency() {
        let shed = Failure::Rejected(Rejection::QueueFull);
        let figures = run(vec![outcome(1, 0, None), outcome(9, 0, Some(shed))]);
        assert_eq!((figures["shed_share"], figures["answered"], figures["ttft_max_s"]), (0.5, 1.0, 1.0));
    }

    #[test]
    fn a_conversation_takes_from_its_first_request_to_its_last_answer() {
        let turn = |request, root, due_s| {
            let due = Nanos::from_secs(due_s);
            Outcome { request, root, due, end: due + Nanos::from_secs(1), ..outcome(0, 0, None) }
        };
        let broken = Outcome { failure: Some(Failure::Broken), ..turn(4, 3, 90) };
        let figures = run(vec![turn(0, 0, 5), turn(1, 1, 9), turn(2, 0, 25), turn(3, 3, 8), broken]);
        let found = [figures["session_mean_s"], figures["session_p50_s"], figures["session_p90_s"]];
        assert_eq!(found, [21.0; 3], "one alone is none, and one that broke off is none");
    }

    #[test]
    fn a_figure_that_has_no_value_is_left_out() {
        let figures = run(Vec::new());
        assert!(!figures.contains_key("ttft_mean_s") && !figures.contains_key("cached_share"));
        assert_eq!(figures["requests"], 0.0);
    }

    #[test]
    fn of_a_whole_arm_times_are_means_over_requests_and_rates_over_runs() {
        let figures = |answered: f64, ttft_s: f64, out_tok_s: f64| -> Figures {
            [("answered", answered), ("ttft_mean_s", ttft_s), ("out_tok_s", out_tok_s)]
                .map(|(n, v)| (n.to_owned(), v))
                .into()
        };
        let whole = whole(&[figures(10.0, 1.0, 100.0), figures(30.0, 2.0, 300.0)]);
        assert_eq!((whole["ttft_mean_s"], whole["out_tok_s"]), (1.75, 200.0));
    }

    #[test]
    fn the_mean_over_seeds_is_of_those_that_have_the_figure() {
        let figures = |pairs: &[(&str, f64)]| pairs.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        let runs: [Figures; 2] = [figures(&[("a", 1.0), ("b", 2.0)]), figures(&[("a", 3.0)])];
        assert_eq!(mean(&runs), figures(&[("a", 2.0), ("b", 2.0)]));
        let intervals = seed_intervals(&runs, 1);
        assert!(intervals["a"].low >= 1.0 && intervals["a"].high <= 3.0 && !intervals.contains_key("b"));
    }

    fn failures() -> impl Strategy<Value = Option<Failure>> {
        prop::sample::select(vec![
            None,
            Some(Failure::Rejected(Rejection::QueueFull)),
            Some(Failure::Refused("too long")),
            Some(Failure::Broken),
            Some(Failure::TimedOut),
        ])
    }

    proptest! {
        /// For any outcomes, a figure is finite or absent, and shares are between 0 and 1.
        #[test]
        fn a_figure_is_a_number(
            requests in prop::collection::vec(
                (0u64..5, prop::option::of(0u64..5), 0u64..5, 0u32..3, 0u32..40_000, failures()), 0..6),
            engines in prop::collection::vec((0u64..3, 0u64..3), 0..3),
            (end, judgement) in (0u64..20, (0.0..3.0, 0.0..60.0)),
        ) {
            let outcomes: Vec<Outcome> = requests
                .into_iter()
                .map(|(due, ttft, rest, output_tokens, cached_tokens, failure)| {
                    let first = Nanos::from_secs(due + ttft.unwrap_or(0));
                    Outcome {
                        due: Nanos::from_secs(due),
                        first_token: ttft.filter(|_| output_tokens > 0).map(|_| first),
                        end: first + Nanos::from_secs(rest),
                        output_tokens,
                        cached_tokens: cached_tokens.min(30_000),
                        ..outcome(0, 0, failure)
                    }
                })
                .collect();
            let stats = |busy, computed_tokens| EngineStats {
                busy: Nanos::from_secs(busy), computed_tokens, ..EngineStats::default()
            };
            let before = vec![stats(0, 0); engines.len()];
            let after: Vec<EngineStats> = engines.iter().map(|&(busy, tokens)| stats(busy, tokens)).collect();
            let judgement = Judgement { slo_ttft_s: judgement.0, slo_tpot_ms: judgement.1, ..Judgement::default() };
            let run = Run { start: Nanos::ZERO, end: Nanos::from_secs(end), outcomes };
            let figures = figures(&run, &judgement, &before, &after);
            let both = [figures.clone(), figures.clone()];
            for figures in [&figures, &mean(&both), &whole(&both)] {
                for (name, value) in figures {
                    prop_assert!(value.is_finite() && *value >= 0.0, "{} {}", name, value);
                    if name.ends_with("_share") && name != "busy_share" {
                        prop_assert!(*value <= 1.0, "{} {}", name, value);
                    }
                }
            }
            for interval in request_intervals(&run, 1).values().chain(seed_intervals(&both, 1).values()) {
                prop_assert!(interval.low <= interval.high && interval.high.is_finite());
            }
        }
    }
}
