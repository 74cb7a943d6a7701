//! Closed loops: a number of clients, each of which begins its next conversation when the previous one ends.

use std::ops::Range;

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use kvlane_sim::world::Ramp;
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::Trace;
use serde::{Deserialize, Serialize};

/// Distinguishes the seed of answers' lengths from that of the content.
const LENGTH_SEED: u64 = 0x1E6E_7485;

/// Closed-loop clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClosedLoop {
    /// Numbers of clients; one run for each.
    pub concurrency: Vec<u32>,
    /// Conversations of a run that count.
    pub conversations: Conversations,
    /// Conversations before those that count. With any, each client begins one more after them, so that the load stays the same
    /// until all that count have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_up: Option<Conversations>,
    /// Clients begin at random times within so many seconds; 0: all at once.
    #[serde(default)]
    pub stagger_s: f64,
    /// Answers are longer or shorter by up to this share, uniformly: those that no further request continues.
    #[serde(default)]
    pub length_spread: f64,
}

/// Number of conversations of a closed loop.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conversations {
    /// Number in all.
    Total(u32),
    /// Number for each client.
    PerClient(u32),
}

/// How the flags of `kvlane simulate` begin a closed loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClosedStart {
    /// Conversations of each client before those that count.
    pub warm_up: u32,
    /// Clients begin within so many seconds.
    pub stagger_s: f64,
    /// Answers are longer or shorter by up to this share.
    pub length_spread: f64,
}

/// One number of clients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Clients {
    /// Number of clients.
    pub(super) clients: u32,
    counted: u32,
    warm_up: u32,
    stagger_s: f64,
    length_spread: f64,
}

/// Longest stagger.
const STAGGER_MAX_S: f64 = 1e6;

// === impl Conversations ===

impl Conversations {
    fn of(self, clients: u32) -> u32 {
        match self {
            Self::Total(count) => count,
            Self::PerClient(count) => count.saturating_mul(clients),
        }
    }
}

// === impl ClosedStart ===

impl Default for ClosedStart {
    /// One conversation of each client, and five seconds: enough that clients of one prompt each do not send in lock step.
    fn default() -> Self {
        Self { warm_up: 1, stagger_s: 5.0, length_spread: 0.0 }
    }
}

// === impl ClosedLoop ===

impl ClosedLoop {
    /// Each number of clients.
    ///
    /// # Errors
    /// Why a value is invalid.
    pub(super) fn clients(&self) -> Result<Vec<Clients>, &'static str> {
        let Self { concurrency, conversations, warm_up, stagger_s, length_spread } = self;
        if concurrency.is_empty() || concurrency.iter().any(|&c| c == 0 || conversations.of(c) == 0) {
            return Err("closed_loop: concurrency and conversations must be set, each at least 1");
        }
        if !(0.0..STAGGER_MAX_S).contains(stagger_s) || !(0.0..1.0).contains(length_spread) {
            return Err(
                "closed_loop: stagger_s must be at least 0, and length_spread at least 0 and below 1",
            );
        }
        let of = |&clients: &u32| Clients {
            clients,
            counted: conversations.of(clients),
            warm_up: warm_up.map_or(0, |warm_up| warm_up.of(clients)),
            stagger_s: *stagger_s,
            length_spread: *length_spread,
        };
        Ok(concurrency.iter().map(of).collect())
    }
}

// === impl Clients ===

impl Clients {
    /// Number of all conversations, those that do not count included.
    pub(super) fn conversations(&self) -> u32 {
        let after = if self.warm_up > 0 { self.clients } else { 0 };
        self.counted.saturating_add(self.warm_up).saturating_add(after)
    }

    /// Whether it is played with a ramp.
    pub(super) fn is_ramped(&self) -> bool {
        self.warm_up > 0 || self.stagger_s > 0.0
    }

    /// Whether answers vary.
    pub(super) fn varies(&self) -> bool {
        self.length_spread > 0.0
    }

    /// The ramp of a trace with all conversations.
    pub(super) fn ramp(&self, trace: &Trace, plan: &Plan) -> Ramp {
        let all = trace.requests.len() as u32;
        let first = |conversation: u32| plan.roots.get(conversation as usize).copied().unwrap_or(all);
        let counted: Range<u32> = first(self.warm_up)..first(self.warm_up.saturating_add(self.counted));
        Ramp { stagger: Nanos::from_secs_f64(self.stagger_s), counted }
    }

    /// Varies the answers' lengths. An answer that a later prompt repeats keeps its length: that prompt has it in itself.
    pub(super) fn vary(&self, trace: &mut Trace, plan: &Plan, seed: u64) {
        let mut rng = Rng::new(seed ^ LENGTH_SEED);
        for (index, request) in (0..).zip(&mut trace.requests) {
            let share = self.length_spread * (2.0 * rng.unit() - 1.0);
            if plan.children(index).next().is_none() {
                let tokens = f64::from(request.output_tokens) * (1.0 + share);
                request.output_tokens = (tokens.round() as u32).max(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_trace::generate::{Arrivals, Workload, generate};

    use super::*;

    fn closed(text: &str) -> ClosedLoop {
        serde_json::from_str(text).expect("a closed loop")
    }

    #[test]
    fn a_warm_up_adds_conversations_before_and_after_those_that_count() {
        let all = |text: &str| closed(text).clients().unwrap()[0].conversations();
        assert_eq!(all(r#"{"concurrency": [4], "conversations": {"per_client": 10}}"#), 40);
        let warmed =
            r#"{"concurrency": [4], "conversations": {"per_client": 10}, "warm_up": {"per_client": 2}}"#;
        assert_eq!(all(warmed), 8 + 40 + 4);
        let total = r#"{"concurrency": [4], "conversations": {"total": 10}, "warm_up": {"total": 3}}"#;
        assert_eq!(all(total), 3 + 10 + 4);
    }

    #[test]
    fn a_spread_of_one_or_a_negative_stagger_is_refused() {
        for wrong in [r#""stagger_s": -1"#, r#""length_spread": 1"#] {
            let text = format!(r#"{{"concurrency": [4], "conversations": {{"total": 10}}, {wrong}}}"#);
            assert!(closed(&text).clients().unwrap_err().contains("stagger_s"), "{wrong}");
        }
        let unknown = r#"{"concurrency": [4], "conversations": {"total": 10}, "warmup": {"total": 1}}"#;
        assert!(serde_json::from_str::<ClosedLoop>(unknown).is_err());
    }

    #[test]
    fn lengths_vary_within_the_spread_and_only_where_no_prompt_repeats_them() {
        let mut workload = Workload::by_kind("chat").expect("a kind");
        workload.set_arrivals(Arrivals::Closed { count: 50 });
        let trace = generate(&workload, 1).expect("a trace");
        let plan = Plan::new(&trace);
        let text = r#"{"concurrency": [4], "conversations": {"total": 50}, "length_spread": 0.25}"#;
        let clients = closed(text).clients().unwrap()[0];
        let mut varied = trace.clone();
        clients.vary(&mut varied, &plan, 7);
        let mut changed = 0;
        for (index, (before, after)) in (0..).zip(trace.requests.iter().zip(&varied.requests)) {
            let (before, after) = (f64::from(before.output_tokens), f64::from(after.output_tokens));
            assert!((after - before).abs() <= 0.25 * before + 1.0);
            changed += u32::from(before != after);
            assert!(before == after || plan.children(index).next().is_none());
        }
        assert!(changed > 20, "{changed}");
        let mut again = trace.clone();
        clients.vary(&mut again, &plan, 7);
        assert_eq!(again.requests, varied.requests);
    }
}
