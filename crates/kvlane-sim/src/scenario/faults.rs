//! What goes wrong in a scenario.

use kvlane_core::time::Nanos;
use serde::{Deserialize, Serialize};

use super::RunError;
use crate::fault::Fault;

/// Slowest engine: a step has to end within the time of a run.
const SLOWDOWN_MAX: f64 = 1e4;

/// Something that goes wrong with an engine: which, counted from 0, those that only prefill last, and when, in seconds.
/// Faults of one engine that overlap add up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultSpec {
    /// It dies: what it was doing breaks off and its cache is lost.
    Death {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// When it is back, empty; never without.
        #[serde(default)]
        back_at_s: Option<f64>,
    },
    /// Its steps take longer.
    Slow {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// By which factor.
        factor: f64,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It stands still, and then answers all that it was given.
    Pause {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It breaks off all its connections, and takes new ones at once.
    Reset {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
    },
    /// It is out of reach, and nobody is told.
    BlackHole {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It says of each new request that it is too busy.
    Busy {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// In how many seconds to come again, if it says.
        #[serde(default)]
        retry_after_s: Option<f64>,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// Nothing that it says of its cache arrives.
    CutFeed {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It says of far more blocks than it has that it has them.
    FloodFeed {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It is given no new requests.
    Drain {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// Until when; for good without.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It drains and leaves.
    Replace {
        /// When.
        at_s: f64,
        /// Which.
        engine: usize,
        /// When another one takes its place, empty; never without.
        #[serde(default)]
        back_at_s: Option<f64>,
    },
}

// === impl FaultSpec ===

impl FaultSpec {
    /// As the world knows it.
    ///
    /// # Errors
    /// If there is no such engine, or a time or a factor makes no sense.
    pub(super) fn fault(self, engines: u32) -> Result<Fault, RunError> {
        let at = Nanos::from_secs_f64;
        let fault = match self {
            Self::Death { at_s, engine, back_at_s } => {
                Fault::Death { at: at(at_s), endpoint: engine, back_at: back_at_s.map(at) }
            }
            Self::Slow { at_s, engine, factor, until_s } => {
                Fault::Slow { at: at(at_s), endpoint: engine, factor, until: until_s.map(at) }
            }
            Self::Pause { at_s, engine, until_s } => {
                Fault::Pause { at: at(at_s), endpoint: engine, until: until_s.map(at) }
            }
            Self::Reset { at_s, engine } => Fault::Reset { at: at(at_s), endpoint: engine },
            Self::BlackHole { at_s, engine, until_s } => {
                Fault::BlackHole { at: at(at_s), endpoint: engine, until: until_s.map(at) }
            }
            Self::Busy { at_s, engine, retry_after_s, until_s } => Fault::Busy {
                at: at(at_s),
                endpoint: engine,
                retry_after: retry_after_s.map(at),
                until: until_s.map(at),
            },
            Self::CutFeed { at_s, engine, until_s } => {
                Fault::CutFeed { at: at(at_s), endpoint: engine, until: until_s.map(at) }
            }
            Self::FloodFeed { at_s, engine, until_s } => {
                Fault::FloodFeed { at: at(at_s), endpoint: engine, until: until_s.map(at) }
            }
            Self::Drain { at_s, engine, until_s } => {
                Fault::Drain { at: at(at_s), endpoint: engine, until: until_s.map(at) }
            }
            Self::Replace { at_s, engine, back_at_s } => {
                Fault::Replace { at: at(at_s), endpoint: engine, back_at: back_at_s.map(at) }
            }
        };
        self.check(engines)?;
        Ok(fault)
    }

    fn check(self, engines: u32) -> Result<(), RunError> {
        let (at_s, engine, end_s) = match self {
            Self::Death { at_s, engine, back_at_s: end_s }
            | Self::Replace { at_s, engine, back_at_s: end_s }
            | Self::Slow { at_s, engine, until_s: end_s, .. }
            | Self::Pause { at_s, engine, until_s: end_s }
            | Self::BlackHole { at_s, engine, until_s: end_s }
            | Self::Busy { at_s, engine, until_s: end_s, .. }
            | Self::CutFeed { at_s, engine, until_s: end_s }
            | Self::FloodFeed { at_s, engine, until_s: end_s }
            | Self::Drain { at_s, engine, until_s: end_s } => (at_s, engine, end_s),
            Self::Reset { at_s, engine } => (at_s, engine, None),
        };
        let time = |secs: f64| secs >= 0.0 && secs.is_finite();
        if engine >= engines as usize {
            return Err(RunError::Fleet(format!("faults: there is no engine {engine}, they count from 0")));
        }
        if !time(at_s) || end_s.is_some_and(|end_s| !time(end_s) || end_s <= at_s) {
            return Err(RunError::Fleet(
                "faults: times are seconds, zero or more, and end after they begin".into(),
            ));
        }
        match self {
            Self::Slow { factor, .. } if !(factor > 0.0 && factor <= SLOWDOWN_MAX) => {
                Err(RunError::Fleet("faults: a factor is above zero and at most 10000".into()))
            }
            Self::Busy { retry_after_s: Some(secs), .. } if !time(secs) => {
                Err(RunError::Fleet("faults: retry_after_s is seconds, zero or more".into()))
            }
            _ => Ok(()),
        }
    }
}
