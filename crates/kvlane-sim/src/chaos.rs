//! A seeded script of what goes wrong in a fleet: the same one for a world in virtual time and for real processes.
//!
//! A [`Script`] is a list of actions with their times, made from a seed and nothing else. It knows for which requests a
//! promise holds: at any time outside its blackouts one engine, the anchor, has been sound for a while and stays so for
//! a while, and anchors overlap when they change. Whoever plays it asks [`Script::had_healthy`] of each request that
//! failed.
//!
//! Faults of one engine do not overlap, but that a feed may suffer while the engine is slow or out of reach, and that it
//! may drain whatever else is wrong. So whoever plays the script need not remember what a killed process had wrong with it.

use std::fmt;
use std::ops::Range;

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use serde::{Deserialize, Serialize};

/// Something done to a fleet. Engines count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// An engine dies without a word (SIGKILL).
    Kill {
        /// Which.
        engine: usize,
    },
    /// An engine dies the way that real ones were seen to. What its clients see, and when, is in the captures that a mock engine
    /// replays (`kvlane mock-engine --deaths-like`).
    Die {
        /// Which.
        engine: usize,
        /// How.
        death: Death,
    },
    /// An engine that is dead is started again, with an empty cache.
    Restart {
        /// Which.
        engine: usize,
    },
    /// An engine stands still, its connections open (SIGSTOP).
    Pause {
        /// Which.
        engine: usize,
    },
    /// It goes on (SIGCONT).
    Resume {
        /// Which.
        engine: usize,
    },
    /// An engine's steps take longer.
    Slow {
        /// Which.
        engine: usize,
        /// By which factor.
        factor: u32,
    },
    /// An engine breaks off all its connections, and takes new ones at once.
    Reset {
        /// Which.
        engine: usize,
    },
    /// An engine takes connections and requests and answers none, health probes included. What it was answering stops.
    BlackHole {
        /// Which.
        engine: usize,
    },
    /// An engine is as fast as it was and answers again.
    Heal {
        /// Which.
        engine: usize,
    },
    /// Nothing that an engine says of its cache arrives.
    CutFeed {
        /// Whose.
        engine: usize,
    },
    /// An engine says far more of its cache than is so, as fast as it can.
    FloodFeed {
        /// Whose.
        engine: usize,
    },
    /// An engine's feed is sound again.
    RestoreFeed {
        /// Whose.
        engine: usize,
    },
    /// An operator lets an engine drain.
    Drain {
        /// Which.
        engine: usize,
    },
    /// It takes requests again.
    Undrain {
        /// Which.
        engine: usize,
    },
    /// The router reads its configuration again.
    Reload,
    /// The router gets other certificates.
    RotateCertificates,
}

/// A way in which real engines die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Death {
    /// The process that schedules is killed; its API server answers 500, or nothing.
    CoreKilled,
    /// The process that schedules stands still; its API server says that all is well.
    CoreStopped,
    /// The API server is killed.
    ServerKilled,
    /// The API server is asked to end, with requests in flight.
    Terminated,
    /// The process that runs the model gets no more memory.
    OutOfMemory,
}

impl Death {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::CoreKilled, Self::CoreStopped, Self::ServerKilled, Self::Terminated, Self::OutOfMemory];

    /// Its name, as the captures have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CoreKilled => "core_killed",
            Self::CoreStopped => "core_stopped",
            Self::ServerKilled => "server_killed",
            Self::Terminated => "terminated",
            Self::OutOfMemory => "out_of_memory",
        }
    }
}

/// An action and its time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// When, from the start of the script.
    pub at: Nanos,
    /// What.
    pub action: Action,
}

/// What a script is to be like.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// How many engines there are.
    pub engines: usize,
    /// How long it is.
    pub length: Nanos,
    /// How long at its end everything is sound again.
    pub calm: Nanos,
    /// Mean time between the beginnings of two faults.
    pub fault_every: Nanos,
    /// How long a fault lasts, at least and at most.
    pub fault: Range<Nanos>,
    /// How long the router may take to know that an engine is sound again.
    pub settle: Nanos,
    /// Mean time for which one engine is the anchor.
    pub shift: Nanos,
    /// How often all engines are bad at once.
    pub blackouts: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            engines: 4,
            length: Nanos::from_secs(600),
            calm: Nanos::from_secs(30),
            fault_every: Nanos::from_secs(3),
            fault: Nanos::from_millis(500)..Nanos::from_secs(15),
            settle: Nanos::from_secs(10),
            shift: Nanos::from_secs(40),
            blackouts: 2,
        }
    }
}

/// What goes wrong, in order of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Script {
    /// The seed it was made from.
    pub seed: u64,
    /// What it was to be like.
    pub config: Config,
    /// What is done.
    pub steps: Vec<Step>,
    /// When no engine is sound for sure.
    pub blackouts: Vec<Range<Nanos>>,
}

/// Faults of one engine in the same lane exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    Process,
    Feed,
    Drain,
}

/// What can go wrong, as it is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Kill,
    Die,
    Pause,
    Slow,
    Reset,
    BlackHole,
    CutFeed,
    FloodFeed,
    Drain,
    Reload,
    RotateCertificates,
}

/// How often each is drawn, in proportion.
const KINDS: [(Kind, usize); 11] = [
    (Kind::Kill, 2),
    (Kind::Die, 4),
    (Kind::Pause, 3),
    (Kind::Slow, 3),
    (Kind::Reset, 3),
    (Kind::BlackHole, 3),
    (Kind::CutFeed, 2),
    (Kind::FloodFeed, 2),
    (Kind::Drain, 2),
    (Kind::Reload, 1),
    (Kind::RotateCertificates, 1),
];

/// Slowest engine.
const FACTOR_MAX: usize = 20;
/// Least time between two faults of one engine in one lane: signals and connections need some.
const BETWEEN: Nanos = Nanos::from_millis(200);

/// A script in the making.
struct Draft<'a> {
    config: &'a Config,
    rng: Rng,
    steps: Vec<Step>,
    taken: Vec<(usize, Lane, Range<Nanos>)>,
    blackouts: Vec<Range<Nanos>>,
}

// === impl Script ===

impl Script {
    /// The script of a seed.
    pub fn new(seed: u64, config: &Config) -> Self {
        let mut draft = Draft {
            config,
            rng: Rng::new(seed),
            steps: Vec::new(),
            taken: Vec::new(),
            blackouts: Vec::new(),
        };
        if config.engines > 0 {
            draft.black_out();
            draft.spare_anchors();
        }
        draft.draw_faults();
        let Draft { mut steps, blackouts, .. } = draft;
        // Stable: what is done at one time stays in the order in which it was thought of.
        steps.sort_by_key(|step| step.at);
        Self { seed, config: config.clone(), steps, blackouts }
    }

    /// Whether a request that lived from `from` to `to` had at every time an engine that was sound, that the router could
    /// know to be sound, and that stayed so long enough to be sent the request.
    pub fn had_healthy(&self, from: Nanos, to: Nanos) -> bool {
        let known_from = from - self.config.settle;
        self.config.engines > 0
            && self.blackouts.iter().all(|blackout| to < blackout.start || known_from > blackout.end)
    }

    /// Whether nothing is wrong with an engine from `from` to `to`, its feed aside.
    pub fn is_sound(&self, engine: usize, from: Nanos, to: Nanos) -> bool {
        let (mut process, mut draining, mut sound) = (true, false, true);
        for Step { at, action } in &self.steps {
            if *at > to {
                break;
            }
            if *at >= from {
                sound &= process && !draining;
            }
            match *action {
                _ if action.engine() != Some(engine) => {}
                Action::Kill { .. }
                | Action::Die { .. }
                | Action::Pause { .. }
                | Action::Slow { .. }
                | Action::BlackHole { .. } => {
                    process = false;
                }
                Action::Restart { .. } | Action::Resume { .. } | Action::Heal { .. } => process = true,
                Action::Reset { .. } => sound &= *at < from,
                Action::Drain { .. } => draining = true,
                Action::Undrain { .. } => draining = false,
                _ => {}
            }
        }
        sound && process && !draining
    }
}

// === impl Action ===

impl Action {
    /// The engine it is done to, if it is one.
    pub fn engine(&self) -> Option<usize> {
        match *self {
            Self::Kill { engine }
            | Self::Die { engine, .. }
            | Self::Restart { engine }
            | Self::Pause { engine }
            | Self::Resume { engine }
            | Self::Slow { engine, .. }
            | Self::Reset { engine }
            | Self::BlackHole { engine }
            | Self::Heal { engine }
            | Self::CutFeed { engine }
            | Self::FloodFeed { engine }
            | Self::RestoreFeed { engine }
            | Self::Drain { engine }
            | Self::Undrain { engine } => Some(engine),
            Self::Reload | Self::RotateCertificates => None,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Kill { .. } => "kill",
            Self::Die { .. } => "die",
            Self::Restart { .. } => "restart",
            Self::Pause { .. } => "pause",
            Self::Resume { .. } => "resume",
            Self::Slow { .. } => "slow",
            Self::Reset { .. } => "reset",
            Self::BlackHole { .. } => "black-hole",
            Self::Heal { .. } => "heal",
            Self::CutFeed { .. } => "cut-feed",
            Self::FloodFeed { .. } => "flood-feed",
            Self::RestoreFeed { .. } => "restore-feed",
            Self::Drain { .. } => "drain",
            Self::Undrain { .. } => "undrain",
            Self::Reload => "reload",
            Self::RotateCertificates => "rotate-certificates",
        };
        f.write_str(name)?;
        if let Some(engine) = self.engine() {
            write!(f, " engine-{engine}")?;
        }
        match self {
            Self::Slow { factor, .. } => write!(f, " by {factor}"),
            Self::Die { death, .. } => write!(f, " of {}", death.name()),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:9.3} s {}", self.at.as_secs_f64(), self.action)
    }
}

// === impl Draft ===

impl Draft<'_> {
    /// When the last fault is over.
    fn end(&self) -> Nanos {
        self.config.length - self.config.calm
    }

    fn between(&mut self, Range { start, end }: Range<Nanos>) -> Nanos {
        start + Nanos(self.rng.below((end - start).0 as usize + 1) as u64)
    }

    /// Makes all engines bad at once, as often as is wanted and there is time for.
    fn black_out(&mut self) {
        let count = u64::from(self.config.blackouts);
        for n in 0..count {
            let part = self.end().0 / count;
            let lasts = self.between(self.config.fault.clone());
            // An engine may be bad for a little longer than all are.
            let ragged = self.config.fault.start;
            let room = part.saturating_sub((lasts + ragged + ragged + BETWEEN).0);
            if room == 0 {
                continue;
            }
            let first = Nanos(part * n + self.rng.below(room as usize) as u64);
            let (all_from, all_to) = (first + ragged, first + ragged + lasts);
            for engine in 0..self.config.engines {
                let from = self.between(first..all_from);
                let to = self.between(all_to..all_to + ragged);
                let kind = [Kind::Kill, Kind::Die, Kind::Pause, Kind::BlackHole][self.rng.below(4)];
                self.fault(kind, engine, from..to);
            }
            self.blackouts.push(first..all_to + ragged);
        }
    }

    /// Reserves an engine for each shift, from before it begins to after it ends.
    fn spare_anchors(&mut self) {
        let (shift, settle) = (self.config.shift.0.max(1), self.config.settle);
        let mut start = Nanos::ZERO;
        while start < self.config.length {
            let end = start + self.between(Nanos(shift / 2)..Nanos(shift / 2 + shift));
            let engine = self.rng.below(self.config.engines);
            for lane in [Lane::Process, Lane::Drain] {
                // What was sent just before the anchor changes has as long to be answered.
                self.taken.push((engine, lane, start - settle..end + settle));
            }
            start = end + Nanos(1);
        }
    }

    fn draw_faults(&mut self) {
        let mut at = Nanos::ZERO;
        loop {
            at += self.between(Nanos(1)..self.config.fault_every + self.config.fault_every);
            let to = at + self.between(self.config.fault.clone());
            if at >= self.end() {
                return;
            }
            let to = to.min(self.end());
            let kind = self.kind();
            match kind {
                Kind::Reload => self.steps.push(Step { at, action: Action::Reload }),
                Kind::RotateCertificates => self.steps.push(Step { at, action: Action::RotateCertificates }),
                _ => {
                    let (engines, first) = (self.config.engines, self.rng.below(self.config.engines));
                    let free = |&engine: &usize| self.is_free(kind, engine, &(at..to));
                    let engine = (0..engines).map(|n| (first + n) % engines).find(free);
                    if let Some(engine) = engine {
                        self.fault(kind, engine, at..to);
                    }
                }
            }
        }
    }

    fn kind(&mut self) -> Kind {
        let mut left = self.rng.below(KINDS.iter().map(|(_, weight)| weight).sum());
        for (kind, weight) in KINDS {
            match left.checked_sub(weight) {
                Some(rest) => left = rest,
                None => return kind,
            }
        }
        Kind::Reload
    }

    /// Whether an engine can have this fault from when to when.
    fn is_free(&self, kind: Kind, engine: usize, span: &Range<Nanos>) -> bool {
        let meets =
            |taken: &Range<Nanos>| span.start < taken.end + BETWEEN && taken.start < span.end + BETWEEN;
        self.taken
            .iter()
            .all(|(other, lane, taken)| *other != engine || !kind.lanes().contains(lane) || !meets(taken))
    }

    fn fault(&mut self, kind: Kind, engine: usize, span: Range<Nanos>) {
        let (begin, end) = match kind {
            Kind::Kill => (Action::Kill { engine }, Some(Action::Restart { engine })),
            Kind::Die => {
                let death = Death::ALL[self.rng.below(Death::ALL.len())];
                (Action::Die { engine, death }, Some(Action::Restart { engine }))
            }
            Kind::Pause => (Action::Pause { engine }, Some(Action::Resume { engine })),
            Kind::Slow => {
                let factor = 2 + self.rng.below(FACTOR_MAX - 1) as u32;
                (Action::Slow { engine, factor }, Some(Action::Heal { engine }))
            }
            Kind::Reset => (Action::Reset { engine }, None),
            Kind::BlackHole => (Action::BlackHole { engine }, Some(Action::Heal { engine })),
            Kind::CutFeed => (Action::CutFeed { engine }, Some(Action::RestoreFeed { engine })),
            Kind::FloodFeed => (Action::FloodFeed { engine }, Some(Action::RestoreFeed { engine })),
            Kind::Drain => (Action::Drain { engine }, Some(Action::Undrain { engine })),
            Kind::Reload => (Action::Reload, None),
            Kind::RotateCertificates => (Action::RotateCertificates, None),
        };
        self.steps.push(Step { at: span.start, action: begin });
        let end = end.map(|action| Step { at: span.end, action });
        self.steps.extend(end);
        self.taken.extend(kind.lanes().iter().map(|lane| (engine, *lane, span.clone())));
    }
}

// === impl Kind ===

impl Kind {
    /// The lanes it takes.
    fn lanes(self) -> &'static [Lane] {
        match self {
            // Nobody can do anything to the feed of a process that does not run.
            Self::Kill | Self::Die | Self::Pause => &[Lane::Process, Lane::Feed],
            Self::Slow | Self::Reset | Self::BlackHole => &[Lane::Process],
            Self::CutFeed | Self::FloodFeed => &[Lane::Feed],
            Self::Drain => &[Lane::Drain],
            Self::Reload | Self::RotateCertificates => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn outside_a_blackout_an_engine_was_sound_and_stays_so(
            seed: u64,
            engines in 1usize..8,
            blackouts in 0u32..4,
            at in prop::collection::vec(0u64..600_000, 20),
        ) {
            let config = Config { engines, blackouts, ..Config::default() };
            let script = Script::new(seed, &config);
            for at in at.into_iter().map(Nanos::from_millis) {
                let (from, to) = (at - config.settle, at + config.settle);
                if script.had_healthy(at, to) {
                    prop_assert!((0..engines).any(|engine| script.is_sound(engine, from, to)), "seed {seed} at {at:?}");
                }
            }
        }

        #[test]
        fn what_is_broken_is_mended_in_time(seed: u64, engines in 0usize..8, blackouts in 0u32..4) {
            let config = Config { engines, blackouts, ..Config::default() };
            let script = Script::new(seed, &config);
            prop_assert!(script.steps.is_sorted_by_key(|step| step.at));
            prop_assert!(script.steps.iter().all(|step| step.at <= config.length - config.calm));
            for engine in 0..engines {
                prop_assert!(script.is_sound(engine, config.length - config.calm + Nanos(1), config.length));
                // Nothing is done to a process that does not run, and nothing is mended that is whole.
                let (mut process, mut feed, mut drains) = (None, false, false);
                for action in script.steps.iter().map(|step| step.action).filter(|a| a.engine() == Some(engine)) {
                    match action {
                        Action::Kill { .. }
                        | Action::Die { .. }
                        | Action::Pause { .. }
                        | Action::Slow { .. }
                        | Action::BlackHole { .. } => {
                            prop_assert_eq!(process.replace(action), None);
                        }
                        Action::Reset { .. } => prop_assert_eq!(process, None),
                        Action::Restart { .. } => {
                            let was_dead = matches!(process.take(), Some(Action::Kill { .. } | Action::Die { .. }));
                            prop_assert!(was_dead);
                        }
                        Action::Resume { .. } => prop_assert_eq!(process.take(), Some(Action::Pause { engine })),
                        Action::Heal { .. } => prop_assert!(process.take().is_some()),
                        Action::CutFeed { .. } | Action::FloodFeed { .. } => {
                            let stands = |action| {
                                matches!(action, Action::Kill { .. } | Action::Die { .. } | Action::Pause { .. })
                            };
                            let runs = !process.is_some_and(stands);
                            prop_assert!(runs && !std::mem::replace(&mut feed, true));
                        }
                        Action::RestoreFeed { .. } => prop_assert!(std::mem::take(&mut feed)),
                        Action::Drain { .. } => prop_assert!(!std::mem::replace(&mut drains, true)),
                        Action::Undrain { .. } => prop_assert!(std::mem::take(&mut drains)),
                        Action::Reload | Action::RotateCertificates => {}
                    }
                }
                prop_assert!(process.is_none() && !feed && !drains);
            }
        }
    }

    #[test]
    fn a_script_is_its_seed_and_has_everything_in_it() {
        let script = |seed| Script::new(seed, &Config::default());
        assert_eq!(script(7), script(7));
        assert_ne!(script(7).steps, script(8).steps);
        let names: BTreeSet<String> = script(7)
            .steps
            .iter()
            .map(|step| step.action.to_string().split(' ').next().unwrap_or_default().to_owned())
            .collect();
        assert_eq!(names.len(), 16, "{names:?}");
        assert_eq!(script(7).blackouts.len(), 2);
        let blackout = script(7).blackouts[0].clone();
        let middle = Nanos(blackout.start.0.midpoint(blackout.end.0));
        assert!((0..4).all(|engine| !script(7).is_sound(engine, middle, middle)));
        assert!(!script(7).had_healthy(middle, middle));
    }
}
