//! One run of a trace, or of a part of it, through a world.
//!
//! Every request that is sent ends in exactly one way: answered in full, or with a [`Failure`]. A run ends with its
//! last request. A request that is split between two engines is at both ([`Leg`]).

use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use kvlane_core::block::BlockHash;
use kvlane_core::decision::Placement;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::{RequestId, SchedulingRequest, SessionKey};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::{Trace, TraceRequest};

use super::ramp::{Ramp, Watch, Window};
use super::retry::Failed;
use super::split::{Leg, Prefill, Stage};
use super::{Event, World};
use crate::engine::{EngineEvent, EngineRequest, Remote};
use crate::outcome::{Failure, Outcome};
use crate::workload::{Drive, adapter_key, prompt_blocks, text_seed};

/// Requests of a run.
#[derive(Clone, Debug)]
pub struct Send<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Its plan.
    pub plan: &'a Plan,
    /// The part to send, whole conversations.
    pub requests: Range<u32>,
    /// The trace's time, in seconds, at which the run starts.
    pub origin_s: f64,
    /// Start times of conversations.
    pub drive: Drive,
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Time of its start.
    pub start: Nanos,
    /// Time of the end of its last request.
    pub end: Nanos,
    /// One for each request, in the order of the trace.
    pub outcomes: Vec<Outcome>,
}

/// A run in progress.
pub(super) struct Play<'a, 'w> {
    pub(super) world: &'w mut World,
    send: &'a Send<'a>,
    /// The engine of each request of the trace, unless the router chooses it.
    pub(super) placements: Option<&'a [u16]>,
    pub(super) run: u32,
    start: Nanos,
    /// Id of the first request of the trace.
    first_id: u64,
    outcomes: Vec<Outcome>,
    /// Requests sent and not ended.
    pub(super) flights: HashMap<u32, Flight, FixedState>,
    /// Requests of a conversation that have not ended, by the index of its root in the run.
    left_of: Vec<u32>,
    /// Start time of a conversation, likewise.
    began: Vec<Nanos>,
    /// Roots of the run that have not started.
    roots: std::slice::Iter<'a, u32>,
    /// Requests that have not ended.
    left: usize,
    /// What counts, in a closed loop with a ramp.
    watch: Watch,
}

/// A request between sending and end.
#[derive(Default)]
pub(super) struct Flight {
    /// Its prompt's blocks, until an engine has them.
    pub(super) blocks: Option<Arc<[BlockHash]>>,
    /// Where it is answered, once that engine has it.
    pub(super) answer: Option<Leg>,
    /// Where its prompt is computed, if elsewhere.
    pub(super) prefill: Option<Prefill>,
    /// The gateway that it was sent to.
    pub(super) gateway: usize,
    /// Whether it is on its way to the router: from its client, or after a pause.
    pub(super) comes: bool,
    /// Number of failed attempts.
    pub(super) attempt: u32,
    pub(super) failed: Vec<EndpointId>,
    /// Outcome of its last attempt, after the first.
    pub(super) ended: Option<Failed>,
}

/// Most legs of a request, each of which is in a ledger.
pub(super) const LEGS_MAX: u64 = 2;

// === impl World ===

impl World {
    /// Sends a trace, or a part of it, from now on, and returns when the last request has ended. `progress` is called
    /// after each request with the number of requests ended.
    pub fn run(&mut self, send: &Send<'_>, progress: impl FnMut(usize)) -> Run {
        self.play(send, None, Watch::default(), progress).0
    }

    /// Like [`World::run`] in a closed loop, with a ramp. The window is that of the conversations that count.
    pub fn run_ramped(&mut self, send: &Send<'_>, ramp: &Ramp, progress: impl FnMut(usize)) -> (Run, Window) {
        let (run, watch) = self.play(send, None, Watch::new(ramp), progress);
        let counted = run.outcomes.iter().filter(|outcome| ramp.counted.contains(&outcome.request));
        let last_end = counted.map(|outcome| outcome.end).max().unwrap_or(run.end);
        (run, watch.window(last_end, self))
    }

    /// Like [`World::run`], but each request of the trace is sent to the engine that `engines` has at its position.
    /// The router is told nothing.
    ///
    /// # Panics
    /// If `engines` does not have an engine of the fleet for each request that is sent.
    pub fn run_placed(&mut self, send: &Send<'_>, engines: &[u16]) -> Run {
        self.play(send, Some(engines), Watch::default(), |_| {}).0
    }

    fn play(
        &mut self,
        send: &Send<'_>,
        placements: Option<&[u16]>,
        watch: Watch,
        mut progress: impl FnMut(usize),
    ) -> (Run, Watch) {
        self.runs += 1;
        let Range { start: first, end } = send.requests;
        let roots = &send.plan.roots;
        let roots =
            &roots[roots.partition_point(|&root| root < first)..roots.partition_point(|&root| root < end)];
        let count = (end - first) as usize;
        let mut play = Play {
            run: self.runs,
            start: self.now(),
            first_id: self.sent,
            outcomes: Vec::with_capacity(count),
            flights: HashMap::default(),
            left_of: send.plan.size[first as usize..end as usize].to_vec(),
            began: vec![Nanos::ZERO; count],
            roots: roots.iter(),
            left: count,
            send,
            placements,
            watch,
            world: self,
        };
        play.world.sent += send.trace.requests.len() as u64;
        play.begin();
        while play.left > 0 {
            let Some(event) = play.world.clock.next_event() else { break };
            let left = play.left;
            play.happen(event);
            if play.left < left {
                progress(count - play.left);
            }
        }
        let Play { start, outcomes, left, watch, .. } = play;
        assert_eq!(left, 0, "every request that is sent is over some time");
        let end = outcomes.iter().map(|outcome| outcome.end).max().unwrap_or(start);
        (Run { start, end, outcomes }, watch)
    }
}

// === impl Play ===

impl Play<'_, '_> {
    fn begin(&mut self) {
        let Send { trace, requests, .. } = self.send;
        for (index, request) in
            (requests.start..).zip(&trace.requests[requests.start as usize..requests.end as usize])
        {
            self.outcomes.push(Outcome {
                request: index,
                root: self.send.plan.root[index as usize],
                endpoint: None,
                attempts: 1,
                resent: 0,
                due: Nanos::ZERO,
                first_token: None,
                end: Nanos::ZERO,
                prompt_tokens: request.input_tokens,
                cached_tokens: 0,
                moved_tokens: 0,
                reusable_tokens: self.reusable_tokens(index),
                output_tokens: 0,
                split: None,
                failure: None,
            });
        }
        if self.world.config.reports.is_some() && !self.world.reporting {
            self.world.report(true);
        }
        match self.send.drive {
            Drive::Open { .. } => self.schedule_root(),
            Drive::Closed { clients } => {
                let seed = self.world.config.seed;
                for after in self.watch.starts(clients.max(1), seed) {
                    match after {
                        Nanos::ZERO => self.start_root(),
                        after => self.world.clock.schedule(self.start + after, Event::Root { run: self.run }),
                    }
                }
            }
        }
    }

    /// Tokens of a prompt that an earlier prompt or its answer has, in whole blocks of the engines. The last token is
    /// never found.
    fn reusable_tokens(&self, request: u32) -> u32 {
        let Send { trace, .. } = self.send;
        let TraceRequest { input_tokens, shared_blocks, .. } = *self.request(request);
        let shared = shared_blocks.saturating_mul(trace.block_tokens).min(input_tokens.saturating_sub(1));
        let block_tokens = self.world.config.router.block_tokens.max(1);
        shared / block_tokens * block_tokens
    }

    /// Open loop: schedules the next conversation.
    fn schedule_root(&mut self) {
        let (Drive::Open { load }, Some(&root)) = (self.send.drive, self.roots.as_slice().first()) else {
            return;
        };
        let arrival_s = self.request(root).arrival_s - self.send.origin_s;
        let at = self.start + Nanos::from_secs_f64(arrival_s / load);
        self.world.clock.schedule(at, Event::Root { run: self.run });
    }

    /// Starts the next conversation, if there is one.
    fn start_root(&mut self) {
        let Some(&root) = self.roots.next() else { return };
        self.watch.begins(root, self.world);
        let place = self.place_of(root);
        self.began[place] = self.now();
        self.due(root);
    }

    pub(super) fn now(&self) -> Nanos {
        self.world.clock.now()
    }

    pub(super) fn request(&self, request: u32) -> &TraceRequest {
        &self.send.trace.requests[request as usize]
    }

    fn place_of(&self, request: u32) -> usize {
        (request - self.send.requests.start) as usize
    }

    /// Whether it is the only request of its conversation that has not ended.
    pub(super) fn is_last(&self, request: u32) -> bool {
        self.left_of[self.place_of(self.send.plan.root[request as usize])] == 1
    }

    pub(super) fn outcome(&mut self, request: u32) -> &mut Outcome {
        let place = self.place_of(request);
        &mut self.outcomes[place]
    }

    /// The conversation of a request, as its client would name it.
    pub(super) fn session(&self, request: u32) -> SessionKey {
        let number = self.first_id + u64::from(self.send.plan.root[request as usize]);
        SessionKey::named(number.to_string().as_bytes(), 0)
    }

    pub(super) fn id(&self, request: u32) -> RequestId {
        RequestId(self.first_id + u64::from(request))
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Root { run } if run == self.run => {
                self.start_root();
                self.schedule_root();
            }
            Event::Due { run, request } if run == self.run => self.due(request),
            Event::Place { run, request } if run == self.run => self.place(request),
            Event::Timeout { run, request } if run == self.run => self.give_up(request),
            Event::Step { node } => self.step(node.into()),
            // The last report says that all engines are idle; there is no other until a request arrives.
            Event::Report => self.world.report(!self.flights.is_empty()),
            Event::Fault(index) => self.fault(index),
            Event::Probe { node } | Event::Probed { node, .. } => self.probe(event, node.into()),
            Event::Late { run, request, sent } if run == self.run => self.late(request, sent),
            Event::Stalled { run, request, sent, tokens } if run == self.run => {
                self.stalled(request, sent, tokens);
            }
            Event::Lost { run, request, sent } if run == self.run => self.lost(request, sent),
            other => {
                self.world.happen(other);
                self.follow();
            }
        }
        self.world.watch_queue();
    }

    /// A client sends a request.
    fn due(&mut self, request: u32) {
        let now = self.now();
        self.outcome(request).due = now;
        let gateway = self.next_gateway(request);
        self.flights.insert(request, Flight { gateway, ..Flight::default() });
        self.world.resume_reports();
        let run = self.run;
        self.place_at(now + self.world.config.routing_delay, request);
        if let Some(timeout) = self.world.config.client_timeout {
            self.world.clock.schedule(now + timeout, Event::Timeout { run, request });
        }
    }

    /// Schedules when a request comes to its gateway's router.
    pub(super) fn place_at(&mut self, at: Nanos, request: u32) {
        let run = self.run;
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.comes = true;
            self.world.clock.schedule(at, Event::Place { run, request });
        }
    }

    /// Places a request, for the first time or again. The load balancer has another gateway for it if its own has died.
    pub(super) fn place(&mut self, request: u32) {
        let living = self.world.gateways.first_from(self.gateway_of(request));
        let Some(flight) = self.flights.get_mut(&request) else { return };
        flight.comes = false;
        match living {
            Some(gateway) => flight.gateway = gateway,
            None => return self.over(request, Some(Failure::Broken)),
        }
        let block_tokens = self.world.config.router.block_tokens;
        if let Some(engines) = self.placements {
            let node = engines[request as usize];
            flight.blocks = Some(prompt_blocks(self.send.trace, request, block_tokens).into());
            self.outcome(request).endpoint = Some(node);
            return self.send(request, Stage::Answer, node.into());
        }
        let (now, id) = (self.now(), self.id(request));
        let (session, claims) = (self.told_session(request), self.claims(request));
        let leg = self.next_leg(request);
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let TraceRequest { input_tokens, adapter, .. } = self.send.trace.requests[request as usize];
        let blocks = prompt_blocks(self.send.trace, request, block_tokens);
        let wanted = SchedulingRequest {
            excluded: flight.failed.as_slice().into(),
            attempt: flight.attempt,
            session,
            claims,
            slo: self.world.config.hints.slo,
            leg,
            adapter: adapter.map(adapter_key),
            ..SchedulingRequest::new(id, input_tokens)
        };
        let World { gateways, config, scratch, outputs, decisions, .. } = &mut *self.world;
        let started = config.stopwatch.map(|read| read());
        let time = gateways.time(flight.gateway, now);
        gateways.at(flight.gateway).arrive(time, wanted, &blocks, scratch, outputs);
        if let (Some(read), Some(started)) = (config.stopwatch, started) {
            decisions.time += read() - started;
        }
        decisions.count += 1;
        flight.blocks = Some(blocks.into());
        self.follow();
    }

    /// Applies the router's outputs.
    pub(super) fn follow(&mut self) {
        while !self.world.outputs.is_empty() {
            for output in std::mem::take(&mut self.world.outputs) {
                match output {
                    Output::Dispatch { request, placement } => {
                        self.dispatch((request.0 - self.first_id) as u32, placement);
                    }
                    Output::Reject { request, refused } => {
                        self.rejected((request.0 - self.first_id) as u32, refused.why);
                    }
                    Output::Drained { endpoint } => self.world.drained(endpoint),
                    Output::Refresh { .. } | Output::Knowledge { .. } | Output::Breaker { .. } => {}
                }
            }
        }
    }

    fn dispatch(&mut self, request: u32, placement: Placement) {
        let node = self.world.seat_of(placement.endpoint);
        let flight = self.flights.get(&request);
        assert!(
            flight.is_none_or(|flight| flight.legs().next().is_none()),
            "a request is dispatched once at a time"
        );
        self.world.ledger_changes += LEGS_MAX;
        if let Some(gateway) = flight.map(|flight| flight.gateway) {
            self.world.placed(gateway);
        }
        self.outcome(request).endpoint = Some(node as u16);
        match placement.prefill {
            None => self.send(request, Stage::Answer, node),
            Some(leg) => self.send_prefill(request, leg, placement.endpoint),
        }
    }

    /// Sends a request, or its prefill leg, to an engine.
    pub(super) fn send(&mut self, request: u32, stage: Stage, node: usize) {
        let now = self.now();
        let TraceRequest { input_tokens, output_tokens, adapter, .. } = *self.request(request);
        self.world.given += 1;
        let mut leg = Leg { node, number: self.world.given, source: None, arrives: None };
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(blocks) = flight.blocks.clone() else { return };
        flight.set_leg(stage, leg);
        let active_faults = &self.world.nodes[node].active_faults;
        let busy = active_faults.busy.last().filter(|_| active_faults.pauses + active_faults.holes == 0);
        if !self.world.nodes[node].alive() {
            return self.attempt_failed(request, stage, Failed::Unreachable);
        }
        if let Some(&(_, retry_after)) = busy {
            return self.attempt_failed(request, stage, Failed::Busy(retry_after));
        }
        self.await_first_token(request, stage);
        if self.world.nodes[node].active_faults.holes > 0 {
            return;
        }
        let mut wanted = EngineRequest {
            id: leg.id(request),
            prompt_blocks: blocks,
            prompt_tokens: input_tokens,
            // A prefill leg yields one token, because engines are asked for one.
            output_tokens: if stage == Stage::Prefill { 1 } else { output_tokens },
            output_seed: text_seed(request, adapter),
            remote: None,
            adapter: adapter.map(adapter_key),
        };
        let remote = |tokens| Some(Remote { tokens, ready_at: Nanos::MAX });
        if let Some(sender) = self.sender(request, stage) {
            (wanted.remote, leg.source) = (remote(input_tokens), Some(sender));
        } else if let Some((holder, tokens)) = self.better_holder(node, &wanted) {
            (wanted.remote, leg.source) = (remote(tokens), Some(holder));
        }
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.set_leg(stage, leg);
        }
        let here = &mut self.world.nodes[node];
        let time = here.time(now);
        here.engine.enqueue(time, wanted);
        self.world.watch(node);
    }

    /// Another engine than `node` that has enough more of a prompt cached to be worth fetching, and the number
    /// of tokens.
    fn better_holder(&mut self, node: usize, request: &EngineRequest) -> Option<(usize, u32)> {
        let tokens_min = self.world.config.fetch_tokens_min?;
        let now = self.now();
        let nodes = &mut self.world.nodes;
        nodes.iter_mut().for_each(|node| node.catch_up(now));
        let cached = |node: usize| nodes[node].engine.cached_tokens(request);
        let fit = |other: &usize| *other != node && nodes[*other].answers();
        let holders = (0..nodes.len()).filter(fit).map(|other| (other, cached(other)));
        // The first of several: the order of reports must not matter.
        let (holder, tokens) = holders.reduce(|best, other| if other.1 > best.1 { other } else { best })?;
        (tokens >= cached(node).saturating_add(tokens_min)).then_some((holder, tokens))
    }

    /// An engine's step ends.
    fn step(&mut self, node: usize) {
        let now = self.now();
        let World { nodes, engine_events, .. } = &mut *self.world;
        if nodes[node].step_at != Some(now) {
            return;
        }
        nodes[node].step_at = None;
        let time = nodes[node].time(now);
        nodes[node].engine.advance(time, engine_events);
        let mut events = std::mem::take(engine_events);
        for (_, event) in events.drain(..) {
            self.engine_event(event);
        }
        self.world.engine_events = events;
        self.world.tell_kv_events(node);
        self.world.watch(node);
    }

    fn engine_event(&mut self, event: EngineEvent) {
        let now = self.now();
        let (request, number) = Leg::parts(event.id());
        // Events that happened before a request was removed from an engine and were not yet delivered.
        let Some(stage) = self.flights.get(&request).and_then(|flight| flight.stage_of(number)) else {
            return;
        };
        let id = self.id(request);
        match (event, stage) {
            (EngineEvent::Allocated { tokens, .. }, _) => self.allocated(request, stage, tokens),
            (EngineEvent::FirstToken { cached_tokens, .. }, Stage::Prefill) => {
                self.outcome(request).cached_tokens = cached_tokens;
            }
            (EngineEvent::FirstToken { cached_tokens, .. }, Stage::Answer) => {
                self.abandon_prefill(request);
                let outcome = self.outcome(request);
                (outcome.first_token, outcome.output_tokens) = (Some(now), 1);
                if outcome.split.is_none() {
                    outcome.cached_tokens = cached_tokens;
                }
                self.progress(request, id, true, 0);
                self.await_more(request, 1);
            }
            (EngineEvent::Tokens { count, .. }, _) => {
                self.progress(request, id, false, count);
            }
            (EngineEvent::Finished { .. }, Stage::Prefill) => self.computed(request),
            (EngineEvent::Finished { .. }, Stage::Answer) => {
                let output_tokens = self.request(request).output_tokens;
                self.outcome(request).output_tokens = output_tokens;
                self.tell(request, Input::Wrote { request: id, output_tokens });
                if let Some(end) = self.told_end(request) {
                    self.tell(request, Input::Ended { request: id, end });
                }
                self.settle(request, None);
            }
            (EngineEvent::Rejected { why, .. }, _) => {
                self.succeeded(request, self.leg_id(request, stage));
                self.settle(request, Some(Failure::Refused(why)));
            }
        }
    }

    /// The gateway for a request: that whose turn it is, of the cell that the front tier chooses.
    pub(super) fn next_gateway(&mut self, request: u32) -> usize {
        let cell = if self.world.front.is_some() { self.cell_for(request) } else { 0 };
        self.world.turn += 1;
        let gateway = self.world.gateways.in_turn(cell, self.world.turn);
        self.world.gateways.first_from(gateway).unwrap_or(gateway)
    }

    /// The cell that the front tier chooses for a request.
    fn cell_for(&mut self, request: u32) -> usize {
        let wanted = SchedulingRequest {
            session: self.told_session(request),
            ..SchedulingRequest::new(self.id(request), self.request(request).input_tokens)
        };
        let blocks = prompt_blocks(self.send.trace, request, self.world.config.router.block_tokens);
        self.world.cell_for(&wanted, &blocks)
    }

    /// The gateway that a request was sent to.
    pub(super) fn gateway_of(&self, request: u32) -> usize {
        self.flights.get(&request).map_or(0, |flight| flight.gateway)
    }

    /// Reports to the router that a placed request has ended, and applies the outputs.
    pub(super) fn settle(&mut self, request: u32, failure: Option<Failure>) {
        match failure {
            None => {
                self.answered(request);
                self.succeeded(request, self.id(request));
            }
            Some(_) => self.cancel_legs(request),
        }
        self.release(request);
        self.over(request, failure);
        self.follow();
    }

    /// A request has ended: its dependents may proceed.
    pub(super) fn over(&mut self, request: u32, failure: Option<Failure>) {
        assert!(self.flights.remove(&request).is_some(), "a request is over once");
        let now = self.now();
        let outcome = self.outcome(request);
        (outcome.end, outcome.failure) = (now, failure);
        self.left -= 1;
        let place = self.place_of(self.send.plan.root[request as usize]);
        let run = self.run;
        for child in self.send.plan.children(request) {
            let at = self.send.plan.due(self.send.trace, child, self.began[place], now);
            self.world.clock.schedule(at, Event::Due { run, request: child });
        }
        self.left_of[place] -= 1;
        if self.left_of[place] == 0 && matches!(self.send.drive, Drive::Closed { .. }) {
            self.start_root();
        }
    }

    /// A client gives up waiting.
    fn give_up(&mut self, request: u32) {
        self.count_tokens(request);
        if self.flights.contains_key(&request) {
            self.settle(request, Some(Failure::TimedOut));
        }
    }
}
