//! A seeded script of faults in a fleet: the same one for a world in virtual time and for real processes.
//!
//! A [`Script`] is a list of actions with their times, generated from a seed only. It knows which requests must
//! succeed: at any time outside its blackouts one engine, the anchor, has been healthy for a while and stays so for a
//! while, and anchors overlap when they change. The player of a script asks [`Script::had_healthy`] for each request
//! that failed.
//!
//! Faults of one engine do not overlap, except that a feed may have faults while the engine is slow or unreachable,
//! and that an engine may drain during any other fault. So the player does not have to remember the faults of a
//! killed process.

use std::fmt;
use std::ops::Range;

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use serde::{Deserialize, Serialize};

/// An action on a fleet. Engines are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// An engine is killed (SIGKILL).
    Kill {
        /// The engine.
        engine: usize,
    },
    /// An engine fails in a way recorded from real ones. The mock engine replays what clients saw, and when (`kvlane
    /// mock-engine --deaths-like`).
    Die {
        /// The engine.
        engine: usize,
        /// The kind of death.
        death: Death,
    },
    /// A dead engine is started again, with an empty cache.
    Restart {
        /// The engine.
        engine: usize,
    },
    /// An engine is paused, its connections open (SIGSTOP).
    Pause {
        /// The engine.
        engine: usize,
    },
    /// The engine resumes (SIGCONT).
    Resume {
        /// The engine.
        engine: usize,
    },
    /// An engine's steps take longer.
    Slow {
        /// The engine.
        engine: usize,
        /// The factor.
        factor: u32,
    },
    /// An engine resets all its connections, and accepts new ones at once.
    Reset {
        /// The engine.
        engine: usize,
    },
    /// An engine accepts connections and requests and answers none, health probes included. Answers in progress stop.
    BlackHole {
        /// The engine.
        engine: usize,
    },
    /// An engine has its normal speed and answers again.
    Heal {
        /// The engine.
        engine: usize,
    },
    /// An engine's KV events are lost.
    CutFeed {
        /// The engine.
        engine: usize,
    },
    /// An engine reports far more blocks than it holds, as fast as it can.
    FloodFeed {
        /// The engine.
        engine: usize,
    },
    /// An engine's feed works again.
    RestoreFeed {
        /// The engine.
        engine: usize,
    },
    /// An operator drains an engine.
    Drain {
        /// The engine.
        engine: usize,
    },
    /// The engine takes requests again.
    Undrain {
        /// The engine.
        engine: usize,
    },
    /// The router reloads its configuration.
    Reload,
    /// The router gets new certificates.
    RotateCertificates,
}

/// A way in which real engines die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Death {
    /// The scheduler process is killed; the API server answers 500, or nothing.
    CoreKilled,
    /// The scheduler process is stopped; the API server reports that it is healthy.
    CoreStopped,
    /// The API server is killed.
    ServerKilled,
    /// The API server gets SIGTERM, with requests in flight.
    Terminated,
    /// The process that runs the model is out of memory.
    OutOfMemory,
}

impl Death {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::CoreKilled, Self::CoreStopped, Self::ServerKilled, Self::Terminated, Self::OutOfMemory];

    /// Its name in the captures.
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
    /// Time, from the start of the script.
    pub at: Nanos,
    /// The action.
    pub action: Action,
}

/// Parameters of a script.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Number of engines.
    pub engines: usize,
    /// Length of the script.
    pub length: Nanos,
    /// Time at its end without faults.
    pub calm: Nanos,
    /// Mean time between the starts of two faults.
    pub fault_every: Nanos,
    /// Minimum and maximum duration of a fault.
    pub fault: Range<Nanos>,
    /// Time within which the router must detect that an engine is healthy again.
    pub settle: Nanos,
    /// Mean time for which an engine is the anchor.
    pub shift: Nanos,
    /// Number of blackouts, in which all engines are unhealthy.
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

/// A script of faults, in order of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Script {
    /// Its seed.
    pub seed: u64,
    /// Its parameters.
    pub config: Config,
    /// Its actions.
    pub steps: Vec<Step>,
    /// Times without a guaranteed healthy engine.
    pub blackouts: Vec<Range<Nanos>>,
}

/// Faults of one engine in the same lane exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    Process,
    Feed,
    Drain,
}

/// Kinds of faults, as drawn.
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

/// Relative frequency of each kind.
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

/// Largest slow-down factor.
const FACTOR_MAX: usize = 20;
/// Minimum time between two faults of one engine in one lane: signals and connections need some.
const BETWEEN: Nanos = Nanos::from_millis(200);

/// A script under construction.
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
        // Stable: actions at the same time stay in the order of their creation.
        steps.sort_by_key(|step| step.at);
        Self { seed, config: config.clone(), steps, blackouts }
    }

    /// Whether, at every time from `from` to `to`, a request had an engine that was healthy, that the router could
    /// know to be healthy, and that stayed so long enough to receive the request.
    pub fn had_healthy(&self, from: Nanos, to: Nanos) -> bool {
        let known_from = from - self.config.settle;
        self.config.engines > 0
            && self.blackouts.iter().all(|blackout| to < blackout.start || known_from > blackout.end)
    }

    /// Whether an engine has no fault from `from` to `to`, its feed aside.
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
    /// The engine it affects, if any.
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
    /// End of the last fault.
    fn end(&self) -> Nanos {
        self.config.length - self.config.calm
    }

    fn between(&mut self, Range { start, end }: Range<Nanos>) -> Nanos {
        start + Nanos(self.rng.below((end - start).0 as usize + 1) as u64)
    }

    /// Makes all engines unhealthy at once, as often as configured and as time permits.
    fn black_out(&mut self) {
        let count = u64::from(self.config.blackouts);
        for n in 0..count {
            let part = self.end().0 / count;
            let lasts = self.between(self.config.fault.clone());
            // An engine may be unhealthy for a little longer than all are.
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

    /// Reserves an engine as the anchor for each shift, from before it begins to after it ends.
    fn spare_anchors(&mut self) {
        let (shift, settle) = (self.config.shift.0.max(1), self.config.settle);
        let mut start = Nanos::ZERO;
        while start < self.config.length {
            let end = start + self.between(Nanos(shift / 2)..Nanos(shift / 2 + shift));
            let engine = self.rng.below(self.config.engines);
            for lane in [Lane::Process, Lane::Drain] {
                // A request sent just before the anchor changes has as long to be answered.
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

    /// Whether an engine can have this fault in this period.
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
    /// The lanes that it occupies.
    fn lanes(self) -> &'static [Lane] {
        match self {
            // The feed of a process that does not run cannot be changed.
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
                // No action applies to a process that does not run, and no repair to an engine without a fault.
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
