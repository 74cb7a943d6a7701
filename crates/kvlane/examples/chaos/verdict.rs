//! Whether each request ended as it may, given what was done to the engines meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use crate::client::{Ending, Shape, Told};
use crate::script::State;
use crate::traffic::{Asked, Expected};

/// Violations that are told in full.
const TOLD_MAX: usize = 20;

/// What each engine was, and when.
#[derive(Debug)]
pub(crate) struct Truth {
    /// URL, and since when it is what, in the order of time.
    engines: Vec<(String, Vec<(Instant, State)>)>,
    /// Time that the gateway has to find out that an engine is well again.
    settles: Duration,
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
    /// What was answered to a prompt before.
    answers: HashMap<(Shape, usize), String>,
    pub(crate) asked: u64,
}

// === impl Truth ===

impl Truth {
    pub(crate) fn new(engines: Vec<String>, settles: Duration) -> Self {
        let start = Instant::now();
        // They were found good before anything was asked.
        let engines = engines.into_iter().map(|url| (url, vec![(start - settles, State::Good)])).collect();
        Self { engines, settles }
    }

    /// Whether an engine was nothing but `states` from `from` to `to`.
    fn only(history: &[(Instant, State)], from: Instant, to: Instant, states: &[State]) -> bool {
        let before = history.iter().rposition(|(at, _)| *at <= from);
        let during = history.iter().skip(before.unwrap_or(0)).take_while(|(at, _)| *at <= to);
        before.is_some() && during.into_iter().all(|(_, state)| states.contains(state))
    }

    /// An engine that was good, and known to be, all the time.
    fn some_good(&self, from: Instant, to: Instant) -> Option<&str> {
        let good = |history: &[_]| Self::only(history, from - self.settles, to, &[State::Good]);
        self.engines.iter().find(|(_, history)| good(history)).map(|(url, _)| url.as_str())
    }

    /// Whether the engine of this name answered all the time, as far as it is to blame.
    fn answered(&self, url: &str, from: Instant, to: Instant) -> bool {
        let engine = self.engines.iter().find(|(name, _)| url.starts_with(name.as_str()));
        engine.is_some_and(|(_, history)| Self::only(history, from, to, &[State::Good, State::Drained]))
    }
}

// === impl Verdicts ===

impl Verdicts {
    pub(crate) fn new(truth: Truth) -> Self {
        let (counts, answers) = (BTreeMap::new(), HashMap::new());
        Self { truth, counts, violations: 0, told: Vec::new(), answers, asked: 0 }
    }

    /// An engine is this from here on.
    pub(crate) fn note(&mut self, engine: usize, state: State) {
        self.truth.engines[engine].1.push((Instant::now(), state));
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.violations += 1;
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
                match before == text {
                    true => ("complete".into(), None),
                    false => wrong("another answer", &format!("{text:?} where it was {before:?} before")),
                }
            }
            (Ending::Left, _) => ("left".into(), None),
            (Ending::Refused { status, .. }, Expected::Refusal(expected)) if *status == expected => {
                ("refused as it should be".into(), None)
            }
            (Ending::Refused { status, code }, Expected::Answer { .. }) => {
                let name = format!("error {status} {code}");
                match self.truth.some_good(from, to) {
                    Some(url) => (name.clone(), Some(format!("{name}, though {url} was good all the time"))),
                    None => (name, None),
                }
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
        let wrong = good.then(|| format!("{name}, though its engine was good all the time: {how}"));
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
