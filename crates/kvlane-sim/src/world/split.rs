//! Requests at engines: at one, or split between two of which one computes the prompt and the other answers.
//!
//! A split request takes the way that it takes through the gateway. Its prefill leg asks for one token. With that token
//! the decode engine gets the request (or has it already, see [`Connector`]), and when that engine has room, the KV blocks
//! that it has not cached are sent over the link of the other. The first token that counts is that of the decode engine.

use kvlane_core::decision::PrefillLeg;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::RequestId;
use kvlane_core::scheduler::Input;
use kvlane_core::time::Nanos;

use super::play::{Flight, Play};
use super::retry::Failed;
use super::{Event, World};
use crate::fault::Fault;
use crate::outcome::Split;
use crate::transfer::Connector;

/// A request at an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    pub(super) node: usize,
    /// Its number among the requests given to engines.
    pub(super) number: u32,
    /// The engine that its KV blocks come from, if another.
    pub(super) source: Option<usize>,
    /// Arrival time of its KV blocks, once known.
    pub(super) arrives: Option<Nanos>,
}

/// Which of a request's legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The prompt, for another engine.
    Prefill,
    /// The answer, and the prompt if there is no other leg.
    Answer,
}

/// The prefill leg of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefill {
    /// Its id at the router.
    pub(super) id: RequestId,
    pub(super) leg: Leg,
    /// Where the request is decoded.
    decode: EndpointId,
    /// Whether its answer has come, or is no longer awaited.
    computed: bool,
    /// Tokens that the decode engine awaits, if it has room for them before they are computed.
    awaited: Option<u32>,
}

/// The first id of prefill legs.
const LEGS: u64 = 1 << 63;

/// What becomes of a transfer.
struct Fate {
    fails: bool,
    longer_s: f64,
}

// === impl Leg ===

impl Leg {
    /// The id of the request at its engine.
    pub(super) fn id(&self, request: u32) -> u64 {
        u64::from(self.number) << 32 | u64::from(request)
    }

    /// The request and the number of such an id.
    pub(super) fn parts(id: u64) -> (u32, u32) {
        (id as u32, (id >> 32) as u32)
    }
}

// === impl Flight ===

impl Flight {
    pub(super) fn leg(&self, stage: Stage) -> Option<&Leg> {
        match stage {
            Stage::Prefill => {
                self.prefill.as_ref().filter(|prefill| !prefill.computed).map(|prefill| &prefill.leg)
            }
            Stage::Answer => self.answer.as_ref(),
        }
    }

    pub(super) fn set_leg(&mut self, stage: Stage, leg: Leg) {
        match (stage, &mut self.prefill) {
            (Stage::Prefill, Some(prefill)) => prefill.leg = leg,
            (Stage::Prefill, None) => {}
            (Stage::Answer, _) => self.answer = Some(leg),
        }
    }

    /// The legs that engines have not answered.
    pub(super) fn legs(&self) -> impl Iterator<Item = (Stage, Leg)> {
        [Stage::Prefill, Stage::Answer].into_iter().filter_map(|stage| Some((stage, *self.leg(stage)?)))
    }

    /// The leg with this number among the requests given to engines.
    pub(super) fn stage_of(&self, number: u32) -> Option<Stage> {
        self.legs().find(|(_, leg)| leg.number == number).map(|(stage, _)| stage)
    }

    /// The leg at this node.
    pub(super) fn stage_at(&self, node: usize) -> Option<Stage> {
        self.legs().find(|(_, leg)| leg.node == node).map(|(stage, _)| stage)
    }

    /// The leg whose KV blocks have yet to come from this node.
    pub(super) fn stage_from(&self, node: usize, now: Nanos) -> Option<Stage> {
        let awaits = |leg: &Leg| leg.source == Some(node) && leg.arrives.is_none_or(|at| at > now);
        self.legs().find(|(_, leg)| awaits(leg)).map(|(stage, _)| stage)
    }
}

// === impl World ===

impl World {
    /// Draws what becomes of a transfer from this node.
    fn fate(&mut self, source: usize) -> Fate {
        let link = &self.config.link;
        let rng = &mut self.rng;
        let mut draw = |share: f64| share > 0.0 && rng.unit() < share;
        let mut fate = Fate { fails: false, longer_s: if draw(link.slow_share) { link.slow_s } else { 0.0 } };
        for &index in &self.nodes[source].active_faults.transfers {
            if let Fault::Transfers { failed, slow, slow_by, .. } = self.config.faults[index] {
                fate.fails |= draw(failed);
                fate.longer_s += if draw(slow) { slow_by.as_secs_f64() } else { 0.0 };
            }
        }
        fate
    }
}

// === impl Play ===

impl Play<'_, '_> {
    /// The id for a request's prefill leg, if its router may split it.
    pub(super) fn next_leg(&mut self, request: u32) -> Option<RequestId> {
        self.world.legs += 1;
        self.router_of(request).may_split().then_some(RequestId(LEGS + self.world.legs))
    }

    /// Sends a request's prompt to the engine that computes it, and with [`Connector::Push`] the request to the engine
    /// that answers it.
    pub(super) fn send_prefill(&mut self, request: u32, leg: PrefillLeg, decode: EndpointId) {
        let node = self.world.seat_of(leg.endpoint);
        self.outcome(request).split = Some(Split { prefill: node as u16, computed: None, arrived: None });
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let at = Leg { node, number: 0, source: None, arrives: None };
        flight.prefill = Some(Prefill { id: leg.id, leg: at, decode, computed: false, awaited: None });
        self.send(request, Stage::Prefill, node);
        // If that failed, the request may have been placed again.
        let now_at = self.flights.get(&request).and_then(|flight| flight.prefill).map(|prefill| prefill.id);
        if now_at == Some(leg.id) && self.world.config.link.connector == Connector::Push {
            self.send(request, Stage::Answer, self.world.seat_of(decode));
        }
    }

    /// The engine that sends a leg the blocks of its whole prompt, if another computes that.
    pub(super) fn sender(&self, request: u32, stage: Stage) -> Option<usize> {
        let prefill = self.flights.get(&request)?.prefill?;
        (stage == Stage::Answer).then_some(prefill.leg.node)
    }

    /// The id of a leg at the router.
    pub(super) fn leg_id(&self, request: u32, stage: Stage) -> RequestId {
        let prefill = self.flights.get(&request).and_then(|flight| flight.prefill);
        prefill.filter(|_| stage == Stage::Prefill).map_or(self.id(request), |prefill| prefill.id)
    }

    /// Whether a request waits for its prompt to be computed elsewhere.
    pub(super) fn awaits_prompt(&self, request: u32) -> bool {
        self.flights.get(&request).is_some_and(|flight| flight.leg(Stage::Prefill).is_some())
    }

    /// A prompt is computed: its KV blocks can be sent from there to the decode engine.
    pub(super) fn computed(&mut self, request: u32) {
        let now = self.now();
        let cached_tokens = self.outcome(request).cached_tokens;
        let reported = self.reported(request, cached_tokens);
        let Some(prefill) = self.flights.get_mut(&request).and_then(|flight| flight.prefill.as_mut()) else {
            return;
        };
        prefill.computed = true;
        let Prefill { id, leg, decode, awaited, .. } = *prefill;
        if let Some(split) = &mut self.outcome(request).split {
            split.computed = Some(now);
        }
        self.succeeded(request, id);
        self.began(request, id);
        // Blocks that it has fetched were in no cache.
        if leg.source.is_none() {
            self.tell(request, Input::Answered { request: id, reported });
        }
        if self.world.config.link.connector == Connector::Pull {
            self.send(request, Stage::Answer, self.world.seat_of(decode));
        } else {
            self.await_first_token(request, Stage::Answer);
            if let Some(tokens) = awaited {
                self.transfer(request, Stage::Answer, tokens);
            }
        }
        self.follow();
    }

    /// A request is answered before its prompt is computed elsewhere: the decode engine had all of it.
    pub(super) fn abandon_prefill(&mut self, request: u32) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(leg) = flight.leg(Stage::Prefill).copied() else { return };
        if let Some(prefill) = &mut flight.prefill {
            prefill.computed = true;
        }
        self.cancel(request, leg);
    }

    /// An engine has room for KV blocks from elsewhere: they are sent, as soon as they are computed.
    pub(super) fn allocated(&mut self, request: u32, stage: Stage, tokens: u32) {
        let (now, awaits_prompt) = (self.now(), self.awaits_prompt(request));
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(mut leg) = flight.leg(stage).copied().filter(|leg| leg.source.is_some()) else { return };
        if tokens == 0 {
            leg.arrives = Some(now);
            flight.set_leg(stage, leg);
        } else if let (Stage::Answer, true, Some(prefill)) = (stage, awaits_prompt, &mut flight.prefill) {
            prefill.awaited = Some(tokens);
        } else {
            self.transfer(request, stage, tokens);
        }
    }

    /// Sends KV blocks to a leg.
    fn transfer(&mut self, request: u32, stage: Stage, tokens: u32) {
        let now = self.now();
        let Some(flight) = self.flights.get(&request) else { return };
        let (is_split, leg) =
            (flight.prefill.is_some() && stage == Stage::Answer, flight.leg(stage).copied());
        let Some((mut leg, source)) = leg.and_then(|leg| Some((leg, leg.source?))) else { return };
        let sender = &self.world.nodes[source];
        if !sender.alive() || sender.active_faults.holes > 0 {
            return self.attempt_failed(request, stage, Failed::Transfer);
        }
        let Fate { fails, longer_s } = self.world.fate(source);
        let World { nodes, config, clock, .. } = &mut *self.world;
        let bytes = nodes[leg.node].engine.config().timing.kv_bytes_per_token() * u64::from(tokens);
        // What was sent while the prompt was computed is there.
        let hidden = if is_split { config.link.overlap } else { 0.0 };
        let left = (bytes as f64 * (1.0 - hidden)) as u64;
        let arrives = nodes[source].link.begin(now, left, longer_s);
        leg.arrives = Some(arrives);
        // Engines compute what they cannot fetch from a peer; the prompt of a split request is nowhere else.
        if fails && is_split {
            clock.schedule(arrives, Event::Lost { run: self.run, request, sent: leg.number });
        } else {
            let node = &mut nodes[leg.node];
            let (time, arrives) = (node.time(now), node.time(arrives));
            node.engine.ready(time, leg.id(request), arrives);
            self.outcome(request).moved_tokens += tokens;
        }
        if let Some(split) = self.outcome(request).split.as_mut().filter(|_| is_split && !fails) {
            split.arrived = Some(arrives);
        }
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.set_leg(stage, leg);
        }
        self.world.watch(leg.node);
    }

    /// A transfer fails.
    pub(super) fn lost(&mut self, request: u32, sent: u32) {
        let stage = self.flights.get(&request).and_then(|flight| flight.stage_of(sent));
        if let Some(stage) = stage {
            self.attempt_failed(request, stage, Failed::Transfer);
        }
    }
}
