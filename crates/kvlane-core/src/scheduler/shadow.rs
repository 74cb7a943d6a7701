//! Shadow policy: evaluates a second policy on every decision, without effect.
//!
//! It sees the same rows of the same decision and has its own state and randomness. Where the two policies differ, both
//! choices are priced by one measure: the seconds that `fleet_cost` adds up ([`fleet_cost::seconds`]), without that
//! policy's own state. So the gain is that of single decisions: it does not predict the state of the fleet if the
//! shadow policy had made the earlier decisions.

use serde::Serialize;

use super::Config;
use crate::policy::{Candidate, PickContext, Policy, PolicyConfig, Reason, fleet_cost};
use crate::rng::Rng;

/// Separates the shadow's randomness from the scheduler's.
const SEED: u64 = 0x5AD0;

/// The shadow policy and its agreement with the active one.
pub(super) struct Shadow {
    config: PolicyConfig,
    policy: Box<dyn Policy>,
    rng: Rng,
    by_reason: [Agreement; Reason::ALL.len()],
}

/// How often the two policies agreed, and what the shadow's decisions would have saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Agreement {
    /// Decisions.
    pub decisions: u64,
    /// Decisions in which both picked the same endpoint.
    pub agreed: u64,
    /// Sum of estimated seconds of fleet time that the shadow's choices would have saved; negative if they cost more.
    pub gain_s: f64,
    /// Sum of the squared savings, for a confidence interval.
    pub gain_squared_s: f64,
}

/// Results of a shadow policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Shadowed {
    /// The shadow policy's name.
    pub policy: &'static str,
    /// Agreement by the active policy's reason.
    pub by_reason: Vec<(Reason, Agreement)>,
}

// === impl Shadow ===

impl Shadow {
    /// The configured shadow policy, if any.
    pub(super) fn of(config: &Config) -> Option<Box<Self>> {
        let policy = config.shadow_policy.clone()?;
        Some(Box::new(Self {
            policy: policy.build(),
            config: policy,
            rng: Rng::new(config.seed ^ SEED),
            by_reason: Default::default(),
        }))
    }

    /// Evaluates the shadow policy after the active policy has picked a row.
    pub(super) fn decide(&mut self, decided: &PickContext<'_>, rows: &[Candidate], row: usize) {
        let PickContext { request, now, output_tokens, usual_output_tokens, adapter, reason, .. } = *decided;
        let mut cx = PickContext {
            request,
            now,
            output_tokens,
            usual_output_tokens,
            peers: None,
            adapter,
            rng: &mut self.rng,
            reason: Reason::default(),
            work: [None; 2],
            costs: None,
            pairs: None,
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
    /// Total over all reasons.
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
    /// Share of decisions in which both agreed.
    pub fn share(&self) -> f64 {
        if self.decisions == 0 { 1.0 } else { self.agreed as f64 / self.decisions as f64 }
    }

    /// Mean seconds saved per decision, and its standard error.
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
