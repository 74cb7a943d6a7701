//! Hints: what the router is told about requests beside their prompts, taken from the trace.

use kvlane_core::request::{AnswerEnd, Claims, SessionKey, Slo};
use kvlane_core::rng::Rng;
use kvlane_trace::trace::TraceRequest;
use serde::{Deserialize, Serialize};

use super::play::Play;

/// The hints that clients and answers of a run give.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Hints {
    /// The conversation of each request.
    pub conversation: bool,
    /// What clients claim about the lengths of their answers.
    pub output: OutputClaim,
    /// How each answer ended, where the trace says: an agent that has called a tool returns.
    pub end: bool,
    /// Which request is the last of its conversation, as its client says.
    pub last: bool,
    /// The latency objectives of each request.
    #[serde(skip_serializing_if = "is_none")]
    pub slo: Slo,
}

fn is_none(slo: &Slo) -> bool {
    *slo == Slo::NONE
}

/// A claimed answer length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputClaim {
    /// Nothing.
    #[default]
    None,
    /// The length.
    Exact,
    /// The length times a factor between a half and two.
    Noisy,
    /// A thousand times the length.
    Wrong,
}

/// The factor of a wrong claim.
const WRONG_FACTOR: u32 = 1000;

// === impl Hints ===

impl Default for Hints {
    fn default() -> Self {
        Self { conversation: true, output: OutputClaim::None, end: false, last: false, slo: Slo::NONE }
    }
}

impl Hints {
    /// What its client claims about a request, with the randomness of a world's seed and its index.
    pub(super) fn claims(&self, request: &TraceRequest, (seed, index): (u64, u32), is_last: bool) -> Claims {
        let tokens = request.output_tokens;
        let output_tokens = match self.output {
            OutputClaim::None => None,
            OutputClaim::Exact => Some(tokens),
            OutputClaim::Noisy => {
                let draw = Rng::new(seed << 32 ^ u64::from(index)).unit();
                // As often above one as below.
                let factor = if draw < 0.5 { 0.5 + draw } else { 2.0 * draw };
                Some((f64::from(tokens) * factor).round() as u32)
            }
            OutputClaim::Wrong => Some(tokens.saturating_mul(WRONG_FACTOR)),
        };
        Claims { output_tokens, is_last: self.last && is_last }
    }
}

// === impl Play ===

impl Play<'_, '_> {
    /// The conversation that a request's client names.
    pub(super) fn told_session(&self, request: u32) -> Option<SessionKey> {
        self.world.config.hints.conversation.then(|| self.session(request))
    }

    /// What a request's client claims about it.
    pub(super) fn claims(&self, request: u32) -> Claims {
        let config = &self.world.config;
        config.hints.claims(self.request(request), (config.seed, request), self.is_last(request))
    }

    /// How a request's answer has ended, if that is told.
    pub(super) fn told_end(&self, request: u32) -> Option<AnswerEnd> {
        let end = self.request(request).end;
        (self.world.config.hints.end && end != AnswerEnd::Unknown).then_some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_as_exact_as_its_kind() {
        let request = TraceRequest { output_tokens: 1000, ..TraceRequest::default() };
        let claimed = |output, index| {
            let hints = Hints { output, last: true, ..Hints::default() };
            hints.claims(&request, (1, index), true)
        };
        assert_eq!(claimed(OutputClaim::None, 0), Claims { output_tokens: None, is_last: true });
        assert_eq!(claimed(OutputClaim::Exact, 0).output_tokens, Some(1000));
        assert_eq!(claimed(OutputClaim::Wrong, 0).output_tokens, Some(1_000_000));
        let noisy = (0..1000).map(|index| claimed(OutputClaim::Noisy, index).output_tokens.expect("a claim"));
        let (below, above): (Vec<u32>, Vec<u32>) = noisy.partition(|tokens| *tokens < 1000);
        assert!(below.iter().all(|tokens| *tokens >= 500) && above.iter().all(|tokens| *tokens <= 2000));
        assert!(below.len().abs_diff(above.len()) < 100, "{} {}", below.len(), above.len());
    }
}
