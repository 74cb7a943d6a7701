//! Whether each request ended as it may, given what was done to the engines meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write as _;
use std::time::Instant;

use kvlane_core::time::Nanos;
use kvlane_sim::chaos::Script;

use crate::client::{Ending, Shape, Told};
use crate::traffic::{Asked, Expected};

/// Violations that are told in full.
const TOLD_MAX: usize = 20;

/// What can be expected of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// That it answers what it is given, if slowly.
    Sound,
    /// Nothing.
    Broken,
}

/// What each engine was, and when; and when there was one for sure.
#[derive(Debug)]
pub(crate) struct Truth {
    /// URL, and since when it is what, in the order of time.
    engines: Vec<(String, Vec<(Instant, State)>)>,
    script: Script,
    start: Instant,
}

/// What became of all requests.
#[derive(Debug)]
pub(crate) struct Verdicts {
    truth: Truth,
    /// Requests by how they ended.
    pub(crate) counts: BTreeMap<String, u64>,
    pub(crate) violations: u64,
    /// The first of them.
    pub(crate) told: Vec<String>,
    /// All of them, each with its time in seconds.
    log: File,
    /// What was answered to a prompt before.
    answers: HashMap<(Shape, usize), String>,
    pub(crate) asked: u64,
    /// Whether a stream may have been written by several engines. Mock engines that are given the beginning of an answer do
    /// not write what the first one would have, but as much.
    pub(crate) may_continue: bool,
}

// === impl Truth ===

impl Truth {
    /// What holds from `start` on, which is when the script begins.
    pub(crate) fn new(engines: Vec<String>, script: Script, start: Instant) -> Self {
        let engines = engines.into_iter().map(|url| (url, vec![(start, State::Sound)])).collect();
        Self { engines, script, start }
    }

    /// Whether there was an engine at every time that could have answered, and was known to be sound.
    fn had_healthy(&self, from: Instant, to: Instant) -> bool {
        let since_start = |at: Instant| Nanos(at.saturating_duration_since(self.start).as_nanos() as u64);
        self.script.had_healthy(since_start(from), since_start(to))
    }

    /// Whether the engine of this name answered all the time, as far as it is to blame.
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
    /// Violations are written to `log` as they come.
    pub(crate) fn new(truth: Truth, log: File) -> Self {
        let (counts, answers) = (BTreeMap::new(), HashMap::new());
        Self { truth, counts, violations: 0, told: Vec::new(), log, answers, asked: 0, may_continue: false }
    }

    /// An engine is this from here on.
    pub(crate) fn note(&mut self, engine: usize, state: State) {
        self.truth.engines[engine].1.push((Instant::now(), state));
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.violations += 1;
        // A full disk is no reason to end; the first ones are told anyway.
        let _ = writeln!(self.log, "{:9.3} s {what}", self.truth.start.elapsed().as_secs_f64());
        if self.told.len() < TOLD_MAX {
            self.told.push(what);
        }
    }

    /// Takes in how a request ended that was sent at `from`.
    pub(crate) fn judge(&mut self, asked: &Asked, told: &Told, from: Instant) {
        self.asked += 1;
        let to = Instant::now();
        let (name, wrong) = self.look(asked, told, from, to);
        *self.counts.entry(name).or_default() += 1;
        if let Some(wrong) = wrong {
            let order = &asked.order;
            let worker = told.worker.as_deref().unwrap_or("nobody");
            self.violated(format!(
                "{} {}{}, {:.1} s, by {worker}: {wrong}",
                order.path,
                if order.stream { "streamed" } else { "whole" },
                if order.h2 { " on h2" } else { "" },
                (to - from).as_secs_f64()
            ));
        }
    }

    /// What a request counts as, and what is wrong with that.
    fn look(&mut self, asked: &Asked, told: &Told, from: Instant, to: Instant) -> (String, Option<String>) {
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
            // What the gateway leaves to engines to refuse needs an engine, too.
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
            // Framing is all that a body without events has to say that it is not whole.
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

    /// An answer that broke after it had begun, which only its engine may be the cause of.
    fn broken(
        &self,
        name: &str,
        how: &str,
        told: &Told,
        from: Instant,
        to: Instant,
    ) -> (String, Option<String>) {
        let good = told.worker.as_deref().is_some_and(|url| self.truth.answered(url, from, to));
        let wrong = good.then(|| format!("{name}, though its engine was sound all the time: {how}"));
        (name.to_owned(), wrong)
    }
}

/// The slope of a line through points by least squares, in units of `y` for one of `x`.
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
