//! Replay of a recording: every decision with everything that the policy saw, compared with the recorded one.
//!
//! A replay follows the recorded placements, even where its policy would choose another endpoint, so that later
//! decisions see the same fleet state. A recording from the scheduler's start replays without differences. Where a
//! recording starts later, or a segment was lost, the replay continues from a [`Checkpoint`], and the state that a
//! checkpoint omits can cause differences for a while: [`Tally`] counts them.

use std::iter::Peekable;

use super::decode::{Damaged, Entries};
use super::{Checkpoint, Entry};
use crate::decision::{Receipt, Rejection};
use crate::endpoint::EndpointId;
use crate::policy::{PolicyConfig, Reason};
use crate::request::RequestId;
use crate::scheduler::{Input, Output, Scheduler};
use crate::time::Nanos;

/// Replays segments, one after the other.
#[derive(Default)]
pub struct Replay {
    scheduler: Option<Scheduler>,
    shadow: Option<PolicyConfig>,
    /// Number of the next segment if none is lost.
    next: u64,
    out: Vec<Output>,
    tally: Tally,
}

/// Agreement of a replay with the recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Inputs.
    pub inputs: u64,
    /// Requests that were placed.
    pub placed: u64,
    /// Placements with the same endpoint and the same reason.
    pub same: u64,
    /// Placements for which the replay's policy chose another endpoint or reason; the recorded endpoint was used.
    pub other: u64,
    /// Placements that the replay could not make at the recorded endpoint.
    pub missed: u64,
    /// Rejected requests.
    pub refused: u64,
    /// Restarts from a checkpoint: at a recording's start after the scheduler's own, and after lost segments.
    pub resumed: u64,
    /// Lost segments.
    pub lost: u64,
    /// Segments with invalid bytes at the end.
    pub damaged: u64,
}

/// One input and its results.
pub struct Step<'a> {
    /// Time of the input.
    pub at: Nanos,
    /// The input.
    pub input: &'a Input,
    /// The request placed by it, with endpoint and reason, as recorded.
    pub placed: Option<(RequestId, EndpointId, Reason)>,
    /// The endpoint that computed its prompt, if that was another, as recorded.
    pub prefill: Option<EndpointId>,
    /// The request rejected by it, and why, as recorded.
    pub refused: Option<(RequestId, Rejection)>,
    /// The choice of the replay's policy, and its reason.
    pub picked: Option<(EndpointId, Reason)>,
    /// Everything that the policy saw, if requested.
    pub receipt: Option<&'a Receipt>,
    /// The scheduler after the input.
    pub scheduler: &'a Scheduler,
}

// === impl Replay ===

impl Replay {
    /// A replay that also evaluates `shadow`, if given.
    pub fn new(shadow: Option<PolicyConfig>) -> Self {
        Self { shadow, ..Self::default() }
    }

    /// The agreement so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// The scheduler, once a segment has been replayed.
    pub fn scheduler(&self) -> Option<&Scheduler> {
        self.scheduler.as_ref()
    }

    /// Replays segment `number`. `explained` selects the inputs to create a receipt for. `each` is called for every
    /// step and returns whether to continue. Returns false if `each` stopped the replay.
    pub fn segment(
        &mut self,
        number: u64,
        bytes: &[u8],
        explained: impl Fn(&Input) -> bool,
        mut each: impl FnMut(&Step<'_>) -> bool,
    ) -> bool {
        let mut entries = Entries::new(bytes).peekable();
        while let Some(entry) = entries.next() {
            match entry {
                Err(Damaged { .. }) => self.tally.damaged += 1,
                Ok((at, Entry::Synopsis(synopsis))) => self.begin(at, number, *synopsis),
                Ok((at, Entry::Input(input))) => {
                    let outcome = Outcome::of(&mut entries);
                    self.tally.refused += outcome.refusals;
                    let explain = explained(&input);
                    if !self.step(at, &input, outcome, explain, &mut each) {
                        return false;
                    }
                }
                // A result without its input is ignored.
                Ok((_, Entry::Placed { .. } | Entry::Refused { .. })) => {}
            }
        }
        true
    }

    /// Starts a segment.
    fn begin(&mut self, now: Nanos, number: u64, mut synopsis: Checkpoint) {
        let follows = self.scheduler.is_some() && number == self.next;
        let lost = if self.scheduler.is_some() { number.saturating_sub(self.next) } else { 0 };
        self.next = number.saturating_add(1);
        if follows {
            return;
        }
        self.tally.lost += lost;
        self.tally.resumed += u64::from(!synopsis.first);
        synopsis.config.shadow_policy = self.shadow.clone();
        synopsis.config.receipts = 0;
        self.scheduler = Some(Scheduler::resumed(now, synopsis));
    }

    fn step(
        &mut self,
        at: Nanos,
        input: &Input,
        Outcome { placed, prefill, refused, .. }: Outcome,
        explain: bool,
        each: &mut impl FnMut(&Step<'_>) -> bool,
    ) -> bool {
        let Some(scheduler) = &mut self.scheduler else { return true };
        let mut told = input.clone();
        if let Input::Configured { config } = &mut told {
            (config.shadow_policy, config.receipts) = (self.shadow.clone(), 0);
        }
        if explain {
            scheduler.set_explained(true);
        }
        self.out.clear();
        let picked =
            scheduler.step_to(at, told, placed.map(|(_, endpoint, _)| (endpoint, prefill)), &mut self.out);
        self.tally.inputs += 1;
        if let Some((request, endpoint, reason)) = placed {
            let went = self.out.iter().any(|output| {
                matches!(output, Output::Dispatch { request: who, placement }
                    if *who == request
                        && placement.endpoint == endpoint
                        && placement.prefill.map(|leg| leg.endpoint) == prefill)
            });
            self.tally.placed += 1;
            match (went, picked == Some((endpoint, reason))) {
                (true, true) => self.tally.same += 1,
                (true, false) => self.tally.other += 1,
                (false, _) => self.tally.missed += 1,
            }
        }
        let receipt = scheduler.receipts().iter().next_back();
        let go_on = each(&Step { at, input, placed, prefill, refused, picked, receipt, scheduler });
        if explain {
            scheduler.set_explained(false);
        }
        go_on
    }
}

/// The recorded results of an input.
#[derive(Default)]
struct Outcome {
    placed: Option<(RequestId, EndpointId, Reason)>,
    prefill: Option<EndpointId>,
    refused: Option<(RequestId, Rejection)>,
    refusals: u64,
}

// === impl Outcome ===

impl Outcome {
    /// Reads the results of the preceding input.
    fn of(entries: &mut Peekable<Entries<'_>>) -> Self {
        let mut outcome = Self::default();
        loop {
            match entries.peek() {
                Some(Ok((_, Entry::Placed { request, endpoint, reason, prefill }))) => {
                    (outcome.placed, outcome.prefill) = (Some((*request, *endpoint, *reason)), *prefill);
                }
                Some(Ok((_, Entry::Refused { request, why }))) => {
                    outcome.refused = Some((*request, *why));
                    outcome.refusals += 1;
                }
                _ => return outcome,
            }
            entries.next();
        }
    }
}
