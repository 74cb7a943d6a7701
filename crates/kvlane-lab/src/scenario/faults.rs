//! Faults of a scenario.

use kvlane_core::time::Nanos;
use kvlane_sim::fault::{Fault, Side};
use serde::{Deserialize, Serialize};

use super::RunError;

/// Slowest engine: a step has to end within the time of a run.
const SLOWDOWN_MAX: f64 = 1e4;

/// A fault of an engine, or of gateways. Both are numbered from 0, engines that only prefill last; times are in seconds.
/// Overlapping faults combine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultSpec {
    /// The engine dies: its requests break and its cache is lost.
    Death {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// Time of its return, empty; without it, it does not return.
        #[serde(default)]
        back_at_s: Option<f64>,
    },
    /// Its steps take longer.
    Slow {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// Factor.
        factor: f64,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It pauses, and then answers all its requests.
    Pause {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It resets all its connections, and accepts new ones at once.
    Reset {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
    },
    /// It is unreachable without an error.
    BlackHole {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It answers each new request that it is busy.
    Busy {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// Its `Retry-After` in seconds, if it sends one.
        #[serde(default)]
        retry_after_s: Option<f64>,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// Its KV events are lost.
    CutFeed {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It reports far more blocks than it holds.
    FloodFeed {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// Transfers of KV blocks that it sends fail, or take longer.
    Transfers {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// Share of the transfers that fail.
        #[serde(default)]
        failed_share: f64,
        /// Share of the transfers that take longer.
        #[serde(default)]
        slow_share: f64,
        /// By how many seconds.
        #[serde(default)]
        slow_s: f64,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It gets no new requests.
    Drain {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
    /// It drains and leaves.
    Replace {
        /// Time.
        at_s: f64,
        /// The engine.
        engine: usize,
        /// Time at which an empty engine replaces it; without it, none does.
        #[serde(default)]
        back_at_s: Option<f64>,
    },
    /// A gateway dies: requests without a token are sent again to another one, the others break.
    GatewayDeath {
        /// Time.
        at_s: f64,
        /// The gateway; nothing happens in arms that have fewer.
        gateway: usize,
        /// Time at which a new one starts in its place; without it, none does.
        #[serde(default)]
        back_at_s: Option<f64>,
    },
    /// The first gateways and the others hear nothing from each other.
    Partition {
        /// Time.
        at_s: f64,
        /// How many are on the first side.
        gateways: usize,
        /// End; without it, permanent.
        #[serde(default)]
        until_s: Option<f64>,
    },
}

// === impl FaultSpec ===

impl FaultSpec {
    /// The fault for the world.
    ///
    /// # Errors
    /// If there is no such engine, or a time or a factor is invalid.
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
            Self::Transfers { at_s, engine, failed_share, slow_share, slow_s, until_s } => Fault::Transfers {
                at: at(at_s),
                endpoint: engine,
                failed: failed_share,
                slow: slow_share,
                slow_by: at(slow_s),
                until: until_s.map(at),
            },
            Self::Drain { at_s, engine, until_s } => {
                Fault::Drain { at: at(at_s), endpoint: engine, until: until_s.map(at) }
            }
            Self::Replace { at_s, engine, back_at_s } => {
                Fault::Replace { at: at(at_s), endpoint: engine, back_at: back_at_s.map(at) }
            }
            Self::GatewayDeath { at_s, gateway, back_at_s } => {
                Fault::GatewayDeath { at: at(at_s), gateway, back_at: back_at_s.map(at) }
            }
            Self::Partition { at_s, gateways, until_s } => Fault::Partition {
                at: at(at_s),
                one: Side { first: 0, count: gateways },
                other: Side { first: gateways, count: usize::MAX },
                until: until_s.map(at),
            },
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
            | Self::Transfers { at_s, engine, until_s: end_s, .. }
            | Self::Drain { at_s, engine, until_s: end_s } => (at_s, Some(engine), end_s),
            Self::Reset { at_s, engine } => (at_s, Some(engine), None),
            Self::GatewayDeath { at_s, back_at_s: end_s, .. }
            | Self::Partition { at_s, until_s: end_s, .. } => (at_s, None, end_s),
        };
        let time = |secs: f64| secs >= 0.0 && secs.is_finite();
        let share = |share: f64| (0.0..=1.0).contains(&share);
        if let Some(engine) = engine.filter(|engine| *engine >= engines as usize) {
            return Err(RunError::Fleet(format!(
                "faults: there is no engine {engine}: engines are numbered from 0"
            )));
        }
        if !time(at_s) || end_s.is_some_and(|end_s| !time(end_s) || end_s <= at_s) {
            return Err(RunError::Fleet(
                "faults: times must be at least 0 s, and the end after the start".into(),
            ));
        }
        match self {
            Self::Slow { factor, .. } if !(factor > 0.0 && factor <= SLOWDOWN_MAX) => {
                Err(RunError::Fleet("faults: factor must be above 0 and at most 10000".into()))
            }
            Self::Transfers { failed_share, slow_share, slow_s, .. }
                if !(share(failed_share) && share(slow_share) && time(slow_s)) =>
            {
                Err(RunError::Fleet(
                    "faults: failed_share and slow_share must be between 0 and 1, and slow_s at least 0"
                        .into(),
                ))
            }
            Self::Busy { retry_after_s: Some(secs), .. } if !time(secs) => {
                Err(RunError::Fleet("faults: retry_after_s must be at least 0".into()))
            }
            _ => Ok(()),
        }
    }
}
