//! What goes wrong, and when: drawn from a seed, so that a run can be had again.

use std::time::Duration;

use kvlane_core::rng::Rng;

/// One thing that is done, to one engine if `engine` says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) at: Duration,
    pub(crate) engine: Option<usize>,
    pub(crate) action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// SIGKILL.
    Kill,
    Restart,
    /// SIGSTOP.
    Pause,
    /// SIGCONT.
    Resume,
    Drain,
    Undrain,
    /// The configuration is read again, a little different.
    Reload,
}

/// What can be expected of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Good,
    /// It answers what it was given.
    Drained,
    Broken,
}

// === impl Action ===

impl Action {
    /// What an engine is once this was done; `None` if it is what it was.
    pub(crate) fn makes(self) -> Option<State> {
        match self {
            Self::Kill | Self::Pause => Some(State::Broken),
            Self::Drain => Some(State::Drained),
            Self::Restart | Self::Resume | Self::Undrain => Some(State::Good),
            Self::Reload => None,
        }
    }
}

/// What is done to engines, and what undoes it.
pub(crate) const FAULTS: [(Action, Action); 4] = [
    (Action::Kill, Action::Restart),
    (Action::Kill, Action::Restart),
    (Action::Pause, Action::Resume),
    (Action::Drain, Action::Undrain),
];

/// How often something happens, and how long it lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) every_s: f64,
    pub(crate) lasts_s: f64,
    /// Time after which an engine that was well again counts as good.
    pub(crate) settles_s: f64,
    pub(crate) faults: &'static [(Action, Action)],
    /// Whether the configuration is read again now and then.
    pub(crate) reloads: bool,
}

/// Faults in one engine or several, in the order of time. At each moment one engine at least is good, and has been for
/// as long as it takes to be known as good.
pub(crate) fn draw(seed: u64, engines: usize, lasts: Duration, pace: Pace) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    let mut steps = Vec::new();
    let mut good_from = vec![0.0; engines];
    let mut now = pace.every_s;
    // What is broken is mended before the end.
    while now + 2.0 * pace.lasts_s < lasts.as_secs_f64() {
        let good: Vec<usize> = (0..engines).filter(|engine| good_from[*engine] <= now).collect();
        if good.len() > 1 {
            let engine = good[rng.below(good.len())];
            let until = now + pace.lasts_s * (0.25 + 1.25 * rng.unit());
            let (fault, cure) = pace.faults[rng.below(pace.faults.len())];
            for (at, action) in [(now, fault), (until, cure)] {
                steps.push(Step { at: Duration::from_secs_f64(at), engine: Some(engine), action });
            }
            good_from[engine] = until + pace.settles_s;
        }
        if pace.reloads && rng.below(8) == 0 {
            let at = Duration::from_secs_f64(now + pace.every_s / 2.0);
            steps.push(Step { at, engine: None, action: Action::Reload });
        }
        now += pace.every_s * (0.5 + rng.unit());
    }
    steps.sort_by_key(|step| step.at);
    steps
}
