//! Living through a recording again: every decision with all that the policy saw, held against what happened.
//!
//! A replay follows: a request goes where it went, even where the policy would send it elsewhere this time, so that later
//! decisions see the fleet as it was. Where a recording begins with its scheduler, nothing differs. Where it begins in the
//! middle, or a part was lost, the replay goes on from a [`Checkpoint`](super::Synopsis), and what that leaves out can make
//! it differ for a while: [`Tally`] counts how often.

use std::iter::Peekable;

use super::decode::{Damaged, Entries};
use super::{Checkpoint, Entry};
use crate::decision::{Receipt, Rejection};
use crate::endpoint::EndpointId;
use crate::policy::{PolicyConfig, Reason};
use crate::request::RequestId;
use crate::scheduler::{Input, Output, Scheduler};
use crate::time::Nanos;

/// Lives through segments, one after the other.
#[derive(Default)]
pub struct Replay {
    scheduler: Option<Scheduler>,
    shadow: Option<PolicyConfig>,
    /// The segment to come, if nothing is lost.
    next: u64,
    out: Vec<Output>,
    tally: Tally,
}

/// How well a replay has met what was recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Inputs.
    pub inputs: u64,
    /// Requests that were placed.
    pub placed: u64,
    /// Those for which the replay decided the same for the same reason.
    pub same: u64,
    /// Those that the replay would have placed elsewhere, or for another reason, and placed where they went.
    pub other: u64,
    /// Those that the replay could not place where they went.
    pub missed: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// How often it went on from a synopsis: where the recording begins in the middle, and where something was lost.
    pub resumed: u64,
    /// Segments that were lost.
    pub lost: u64,
    /// Segments that end in bytes nobody wrote.
    pub damaged: u64,
}

/// One input, and what came of it.
pub struct Step<'a> {
    /// When.
    pub at: Nanos,
    /// What the scheduler was told.
    pub input: &'a Input,
    /// The request that was placed upon that, where, and why, as recorded.
    pub placed: Option<(RequestId, EndpointId, Reason)>,
    /// A request that was refused upon that, and why.
    pub refused: Option<(RequestId, Rejection)>,
    /// Where the replay's policy would have sent it, and why.
    pub picked: Option<(EndpointId, Reason)>,
    /// All that the policy saw, if that was asked for.
    pub receipt: Option<&'a Receipt>,
    /// The scheduler as it stands after that.
    pub scheduler: &'a Scheduler,
}

// === impl Replay ===

impl Replay {
    /// One that also asks `shadow` what it would do, if there is one.
    pub fn new(shadow: Option<PolicyConfig>) -> Self {
        Self { shadow, ..Self::default() }
    }

    /// How well it has met what was recorded, so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// The scheduler as it stands.
    pub fn scheduler(&self) -> Option<&Scheduler> {
        self.scheduler.as_ref()
    }

    /// Lives through a segment, the `number`th. `explained` says of which inputs a receipt is wanted; `each` is told every
    /// step and says whether to go on. Whether it did not end before the segment's end.
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
                // Without its input nothing follows from it.
                Ok((_, Entry::Placed { .. } | Entry::Refused { .. })) => {}
            }
        }
        true
    }

    /// A segment begins.
    fn begin(&mut self, now: Nanos, number: u64, mut synopsis: Checkpoint) {
        let follows = self.scheduler.is_some() && number == self.next;
        let lost = if self.scheduler.is_some() { number.saturating_sub(self.next) } else { 0 };
        self.next = number.saturating_add(1);
        if follows {
            return;
        }
        self.tally.lost += lost;
        self.tally.resumed += u64::from(!synopsis.first);
        synopsis.config.shadow = self.shadow.clone();
        synopsis.config.receipts_max = 0;
        self.scheduler = Some(Scheduler::resumed(now, synopsis));
    }

    fn step(
        &mut self,
        at: Nanos,
        input: &Input,
        Outcome { placed, refused, .. }: Outcome,
        explain: bool,
        each: &mut impl FnMut(&Step<'_>) -> bool,
    ) -> bool {
        let Some(scheduler) = &mut self.scheduler else { return true };
        let mut told = input.clone();
        if let Input::Configured { config } = &mut told {
            (config.shadow, config.receipts_max) = (self.shadow.clone(), 0);
        }
        if explain {
            scheduler.set_explained(true);
        }
        self.out.clear();
        let picked = scheduler.step_to(at, told, placed.map(|(_, endpoint, _)| endpoint), &mut self.out);
        self.tally.inputs += 1;
        if let Some((request, endpoint, reason)) = placed {
            let went = self.out.iter().any(|output| {
                matches!(output, Output::Dispatch { request: who, placement }
                    if *who == request && placement.endpoint == endpoint)
            });
            self.tally.placed += 1;
            match (went, picked == Some((endpoint, reason))) {
                (true, true) => self.tally.same += 1,
                (true, false) => self.tally.other += 1,
                (false, _) => self.tally.missed += 1,
            }
        }
        let receipt = scheduler.receipts().iter().next_back();
        let go_on = each(&Step { at, input, placed, refused, picked, receipt, scheduler });
        if explain {
            scheduler.set_explained(false);
        }
        go_on
    }
}

/// What came of an input.
#[derive(Default)]
struct Outcome {
    placed: Option<(RequestId, EndpointId, Reason)>,
    refused: Option<(RequestId, Rejection)>,
    refusals: u64,
}

// === impl Outcome ===

impl Outcome {
    /// Of the input before.
    fn of(entries: &mut Peekable<Entries<'_>>) -> Self {
        let mut outcome = Self::default();
        loop {
            match entries.peek() {
                Some(Ok((_, Entry::Placed { request, endpoint, reason }))) => {
                    outcome.placed = Some((*request, *endpoint, *reason));
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
