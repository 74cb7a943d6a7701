//! Judges the outcome of each request, given the faults applied meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write as _;
use std::time::Instant;

use kvlane_core::time::Nanos;
use kvlane_sim::chaos::Script;

use super::client::{Ending, Reported, Shape};
use super::traffic::{Asked, Expected};

/// Maximum violations printed in full.
const TOLD_MAX: usize = 20;

/// State of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It answers requests, possibly slowly.
    Sound,
    /// Unknown.
    Broken,
}

/// History of each engine's state, and of guaranteed healthy engines.
#[derive(Debug)]
pub(crate) struct FaultHistory {
    /// URL, and its states with their start, in order of time.
    engines: Vec<(String, Vec<(Instant, State)>)>,
    script: Script,
    start: Instant,
}

/// Outcomes of all requests.
#[derive(Debug)]
pub(crate) struct Verdicts {
    truth: FaultHistory,
    /// Requests by outcome.
    pub(crate) counts: BTreeMap<String, u64>,
    pub(crate) violations: u64,
    /// The first of them.
    pub(crate) told: Vec<String>,
    /// All violations, each with its time in seconds.
    log: File,
    /// Earlier answers by prompt.
    answers: HashMap<(Shape, usize), String>,
    pub(crate) asked: u64,
    /// Whether a stream may consist of the output of several engines. A mock engine that continues an answer
    /// generates other words than the first engine, but as many.
    pub(crate) may_continue: bool,
}

// === impl FaultHistory ===

impl FaultHistory {
    /// State at `start`, which is the start of the script.
    pub(crate) fn new(engines: Vec<String>, script: Script, start: Instant) -> Self {
        let engines = engines.into_iter().map(|url| (url, vec![(start, State::Sound)])).collect();
        Self { engines, script, start }
    }

    /// Whether at every time there was an engine that could have answered, and was known to be healthy.
    fn had_healthy(&self, from: Instant, to: Instant) -> bool {
        let since_start = |at: Instant| Nanos(at.saturating_duration_since(self.start).as_nanos() as u64);
        self.script.had_healthy(since_start(from), since_start(to))
    }

    /// Whether the engine of this name answered all the time, apart from faults outside of it.
    fn answered(&self, url: &str, from: Instant, to: Instant) -> bool {
        let engine = self.engines.iter().find(|(name, _)| url.starts_with(name.as_str()));
        engine.is_some_and(|(_, history)| {
            let before = history.iter().rposition(|(at, _)| *at <= from).unwrap_or(0);
            let during = history[before..].iter().take_while(|(at, _)| *at <= to);
            during.into_iter().all(|(_, state)| *state == State::Sound)
        })
    }
}

// === impl Verdicts ===

impl Verdicts {
    /// Violations are written to `log` as they occur.
    pub(crate) fn new(truth: FaultHistory, log: File) -> Self {
        let (counts, answers) = (BTreeMap::new(), HashMap::new());
        Self { truth, counts, violations: 0, told: Vec::new(), log, answers, asked: 0, may_continue: false }
    }

    /// Sets the state of an engine from now on.
    pub(crate) fn note(&mut self, engine: usize, state: State) {
        self.truth.engines[engine].1.push((Instant::now(), state));
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.violations += 1;
        // A full disk does not stop the run; the first violations are printed anyway.
        let _ = writeln!(self.log, "{:9.3} s {what}", self.truth.start.elapsed().as_secs_f64());
        if self.told.len() < TOLD_MAX {
            self.told.push(what);
        }
    }

    /// Records the outcome of a request sent at `from`.
    pub(crate) fn judge(&mut self, asked: &Asked, told: &Reported, from: Instant) {
        self.asked += 1;
        let to = Instant::now();
        let (name, wrong) = self.look(asked, told, from, to);
        *self.counts.entry(name).or_default() += 1;
        if let Some(wrong) = wrong {
            let order = &asked.order;
            let worker = told.worker.as_deref().unwrap_or("unknown");
            self.violated(format!(
                "{} {}{}, {:.1} s, by {worker}: {wrong}",
                order.path,
                if order.stream { "streamed" } else { "whole" },
                if order.h2 { " on h2" } else { "" },
                (to - from).as_secs_f64()
            ));
        }
    }

    /// The class of an outcome, and its violation, if any.
    fn look(
        &mut self,
        asked: &Asked,
        told: &Reported,
        from: Instant,
        to: Instant,
    ) -> (String, Option<String>) {
        let wrong = |name: &str, text: &str| (name.to_owned(), Some(format!("{name}: {text}")));
        match (&told.ending, asked.expected) {
            (Ending::Complete(text), Expected::Answer { prompt }) => {
                let Some(prompt) = prompt else { return ("complete".into(), None) };
                let before = self.answers.entry((asked.order.shape, prompt)).or_insert_with(|| text.clone());
                let alike = before == text || self.may_continue && before.len() == text.len();
                match alike {
                    true => ("complete".into(), None),
                    false => wrong("another answer", &format!("{text:?} where it was {before:?} before")),
                }
            }
            (Ending::Left, _) => ("left".into(), None),
            (Ending::Refused { status, .. }, Expected::Refusal(expected)) if *status == expected => {
                ("refused as it should be".into(), None)
            }
            // Requests that only engines can reject need an engine, too.
            (Ending::Refused { status, code }, Expected::Answer { .. } | Expected::Refusal(_))
                if *status >= 500 || matches!(asked.expected, Expected::Answer { .. }) =>
            {
                let name = format!("error {status} {code}");
                let promised = self.truth.had_healthy(from, to);
                let wrong =
                    promised.then(|| format!("{name}, though there was a healthy engine all the time"));
                (name, wrong)
            }
            (Ending::Failed(event), Expected::Answer { .. }) => {
                self.broken("error event", event, told, from, to)
            }
            // For a body without events, only framing shows that it is incomplete.
            (Ending::Cut(how), Expected::Answer { .. }) if !asked.order.stream => {
                self.broken("whole answer cut", how, told, from, to)
            }
            (ending, _) => {
                let text = format!("{ending:?}");
                let name = text.split(['(', ' ']).next().unwrap_or_default().to_lowercase();
                wrong(&name, &text)
            }
        }
    }

    /// An answer that broke after it had begun, which only its engine may cause.
    fn broken(
        &self,
        name: &str,
        how: &str,
        told: &Reported,
        from: Instant,
        to: Instant,
    ) -> (String, Option<String>) {
        let good = told.worker.as_deref().is_some_and(|url| self.truth.answered(url, from, to));
        let wrong = good.then(|| format!("{name}, though its engine was healthy all the time: {how}"));
        (name.to_owned(), wrong)
    }
}

/// The slope of a least-squares line through points, in units of `y` per unit of `x`.
pub(crate) fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let (mut above, mut below) = (0.0, 0.0);
    for point in points {
        above += (point.0 - x) * (point.1 - y);
        below += (point.0 - x) * (point.0 - x);
    }
    if below > 0.0 { above / below } else { 0.0 }
}
