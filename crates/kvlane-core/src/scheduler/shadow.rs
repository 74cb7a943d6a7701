//! A second policy that looks over the first one's shoulder: what would it have done?
//!
//! It sees the same rows of the same decision, has a state and randomness of its own, and changes nothing. Where the two
//! differ, what either choice costs the fleet is estimated by one measure for both: the seconds that `fleet_cost` adds up
//! ([`fleet_cost::seconds`]), without what that policy remembers. So the gain is that of single decisions: it does not know
//! what the fleet would be like if the other policy had made those before.

use serde::Serialize;

use super::Config;
use crate::policy::{Candidate, PickContext, Policy, PolicyConfig, Reason, fleet_cost};
use crate::request::SchedulingRequest;
use crate::rng::Rng;
use crate::time::Nanos;

/// Drawn from another seed than the scheduler's own randomness.
const SEED: u64 = 0x5AD0;

/// The second policy and how often it agreed.
pub(super) struct Shadow {
    config: PolicyConfig,
    policy: Box<dyn Policy>,
    rng: Rng,
    by_reason: [Agreement; Reason::ALL.len()],
}

/// How often two policies decided alike, and what the second one's decisions would have saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Agreement {
    /// Decisions.
    pub decisions: u64,
    /// Those that were the same.
    pub agreed: u64,
    /// Seconds of the fleet's time that the second one's would have saved in all; negative if they cost more.
    pub gain_s: f64,
    /// The squares of those, summed: for an interval.
    pub gain_squared_s: f64,
}

/// What a second policy would have done.
#[derive(Clone, Debug, PartialEq)]
pub struct Shadowed {
    /// Its name.
    pub policy: &'static str,
    /// By the first one's reason.
    pub by_reason: Vec<(Reason, Agreement)>,
}

// === impl Shadow ===

impl Shadow {
    /// The one that a configuration asks for.
    pub(super) fn of(config: &Config) -> Option<Box<Self>> {
        let policy = config.shadow.clone()?;
        Some(Box::new(Self {
            policy: policy.build(),
            config: policy,
            rng: Rng::new(config.seed ^ SEED),
            by_reason: Default::default(),
        }))
    }

    /// The first policy has picked a row.
    pub(super) fn decide(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        output_tokens: u32,
        usual_output_tokens: f64,
        rows: &[Candidate],
        (row, reason): (usize, Reason),
    ) {
        let mut cx = PickContext {
            request,
            now,
            output_tokens,
            usual_output_tokens,
            rng: &mut self.rng,
            reason: Reason::default(),
            costs: None,
        };
        let other = self.policy.pick(&mut cx, rows);
        let Some(reason) = Reason::ALL.iter().position(|known| *known == reason) else { return };
        let agreement = &mut self.by_reason[reason];
        agreement.decisions += 1;
        if other == row {
            agreement.agreed += 1;
            return;
        }
        let seconds =
            |row: usize| fleet_cost::seconds(request, output_tokens, usual_output_tokens, &rows[row]);
        let gain_s = seconds(row) - seconds(other);
        agreement.gain_s += gain_s;
        agreement.gain_squared_s += gain_s * gain_s;
    }

    pub(super) fn shadowed(&self) -> Shadowed {
        let seen = Reason::ALL.into_iter().zip(self.by_reason).filter(|(_, of)| of.decisions > 0);
        Shadowed { policy: self.config.name(), by_reason: seen.collect() }
    }
}

// === impl Shadowed ===

impl Shadowed {
    /// Over all reasons.
    pub fn all(&self) -> Agreement {
        self.by_reason.iter().fold(Agreement::default(), |all, (_, of)| Agreement {
            decisions: all.decisions + of.decisions,
            agreed: all.agreed + of.agreed,
            gain_s: all.gain_s + of.gain_s,
            gain_squared_s: all.gain_squared_s + of.gain_squared_s,
        })
    }
}

// === impl Agreement ===

impl Agreement {
    /// Share of decisions that were the same.
    pub fn share(&self) -> f64 {
        if self.decisions == 0 { 1.0 } else { self.agreed as f64 / self.decisions as f64 }
    }

    /// Seconds saved by one decision on average, and its standard error.
    pub fn mean_gain_s(&self) -> (f64, f64) {
        if self.decisions == 0 {
            return (0.0, 0.0);
        }
        let count = self.decisions as f64;
        let mean = self.gain_s / count;
        let variance = (self.gain_squared_s / count - mean * mean).max(0.0);
        (mean, (variance / count).sqrt())
    }
}
