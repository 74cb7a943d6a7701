//! One run of a trace, or of a part of it, through a world.
//!
//! Every request that is sent ends in exactly one way: answered in full, or with a [`Failure`]. A run ends with its
//! last request.

use std::ops::Range;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use kvlane_core::block::BlockHash;
use kvlane_core::cache_accuracy::ReportedReuse;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::{RequestId, SchedulingRequest, SessionKey};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use kvlane_trace::plan::Plan;
use kvlane_trace::trace::{Trace, TraceRequest};

use super::retry::Failed;
use super::{Event, World};
use crate::engine::{EngineEvent, EngineRequest, Remote};
use crate::outcome::{Failure, Outcome};
use crate::workload::{Drive, prompt_blocks, text_seed};

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
    /// Requests given to engines so far.
    sent: u32,
}

/// A request between sending and end.
#[derive(Default)]
pub(super) struct Flight {
    /// Its prompt's blocks, until an engine has them.
    pub(super) blocks: Option<Vec<BlockHash>>,
    /// The pool that serves it: first the prefill pool, if there is one, then the decode pool.
    pub(super) pool: usize,
    pub(super) node: Option<usize>,
    /// Source of its KV blocks.
    pub(super) source: Option<usize>,
    /// Arrival time of its KV blocks, once known.
    pub(super) sent_by: Option<Nanos>,
    /// Number of failed attempts in the pool.
    pub(super) attempt: u32,
    pub(super) failed: Vec<EndpointId>,
    /// Its number among the requests given to engines, for its last attempt.
    pub(super) sent: u32,
    /// Outcome of its last attempt, after the first.
    pub(super) ended: Option<Failed>,
}

/// The decode pool.
pub(super) const DECODE: usize = 0;

// === impl World ===

impl World {
    /// Sends a trace, or a part of it, from now on, and returns when the last request has ended. `progress` is called
    /// after each request with the number of requests ended.
    pub fn run(&mut self, send: &Send<'_>, mut progress: impl FnMut(usize)) -> Run {
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
            sent: 0,
            send,
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
        let Play { start, outcomes, left, .. } = play;
        assert_eq!(left, 0, "every request that is sent is over some time");
        let end = outcomes.iter().map(|outcome| outcome.end).max().unwrap_or(start);
        Run { start, end, outcomes }
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
                due: Nanos::ZERO,
                first_token: None,
                end: Nanos::ZERO,
                prompt_tokens: request.input_tokens,
                cached_tokens: 0,
                moved_tokens: 0,
                reusable_tokens: self.reusable_tokens(index),
                output_tokens: 0,
                failure: None,
            });
        }
        if self.world.config.reports.is_some() && !self.world.reporting {
            self.world.report(true);
        }
        match self.send.drive {
            Drive::Open { .. } => self.schedule_root(),
            Drive::Closed { clients } => (0..clients.max(1)).for_each(|_| self.start_root()),
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
        let place = self.place_of(root);
        self.began[place] = self.now();
        self.due(root);
    }

    pub(super) fn now(&self) -> Nanos {
        self.world.clock.now()
    }

    fn request(&self, request: u32) -> &TraceRequest {
        &self.send.trace.requests[request as usize]
    }

    fn place_of(&self, request: u32) -> usize {
        (request - self.send.requests.start) as usize
    }

    pub(super) fn outcome(&mut self, request: u32) -> &mut Outcome {
        let place = self.place_of(request);
        &mut self.outcomes[place]
    }

    /// The conversation of a request, as its client would name it.
    fn session(&self, request: u32) -> SessionKey {
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
        let pool = self.world.routers.len() - 1;
        self.flights.insert(request, Flight { pool, ..Flight::default() });
        self.world.resume_reports();
        let run = self.run;
        self.world.clock.schedule(now + self.world.config.routing_delay, Event::Place { run, request });
        if let Some(timeout) = self.world.config.client_timeout {
            self.world.clock.schedule(now + timeout, Event::Timeout { run, request });
        }
    }

    /// Places a request, for the first time or again.
    pub(super) fn place(&mut self, request: u32) {
        let block_tokens = self.world.config.router.block_tokens;
        let (now, id, session) = (self.now(), self.id(request), self.session(request));
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let blocks = prompt_blocks(self.send.trace, request, block_tokens);
        let wanted = SchedulingRequest {
            excluded: flight.failed.as_slice().into(),
            attempt: flight.attempt,
            session: Some(session),
            ..SchedulingRequest::new(id, self.send.trace.requests[request as usize].input_tokens)
        };
        let World { routers, config, scratch, outputs, decisions, .. } = &mut *self.world;
        let started = config.stopwatch.map(|read| read());
        routers[flight.pool].arrive(now, wanted, &blocks, scratch, outputs);
        if let (Some(read), Some(started)) = (config.stopwatch, started) {
            decisions.time += read() - started;
        }
        decisions.count += 1;
        flight.blocks = Some(blocks);
        self.follow();
    }

    /// Applies the router's outputs.
    pub(super) fn follow(&mut self) {
        while !self.world.outputs.is_empty() {
            for output in std::mem::take(&mut self.world.outputs) {
                match output {
                    Output::Dispatch { request, placement } => {
                        self.dispatch((request.0 - self.first_id) as u32, placement.endpoint);
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

    fn dispatch(&mut self, request: u32, endpoint: EndpointId) {
        let now = self.now();
        let TraceRequest { input_tokens, output_tokens, .. } = *self.request(request);
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(blocks) = flight.blocks.take() else { return };
        let (pool, sent_from) = (flight.pool, flight.source);
        let node = self.world.seat_of(pool, endpoint);
        self.sent += 1;
        (flight.node, flight.sent) = (Some(node), self.sent);
        self.outcome(request).endpoint = Some(node as u16);
        let active_faults = &self.world.nodes[node].active_faults;
        let busy = active_faults.busy.last().filter(|_| active_faults.pauses + active_faults.holes == 0);
        if !self.world.nodes[node].alive() {
            return self.attempt_failed(request, node, Failed::Unreachable);
        }
        if let Some(&(_, retry_after)) = busy {
            return self.attempt_failed(request, node, Failed::Busy(retry_after));
        }
        self.await_first_token(request, self.sent);
        if self.world.nodes[node].active_faults.holes > 0 {
            return;
        }
        let mut wanted = EngineRequest {
            id: u64::from(request),
            prompt_blocks: blocks.into(),
            prompt_tokens: input_tokens,
            // A prefill engine yields one token, because engines are asked for one.
            output_tokens: if pool == DECODE { output_tokens } else { 1 },
            output_seed: text_seed(request),
            remote: None,
        };
        let remote = |tokens| Some(Remote { tokens, ready_at: Nanos::MAX });
        if sent_from.is_some() {
            wanted.remote = remote(input_tokens);
        } else if let Some((holder, tokens)) = self.better_holder(node, &wanted) {
            wanted.remote = remote(tokens);
            if let Some(flight) = self.flights.get_mut(&request) {
                flight.source = Some(holder);
            }
        }
        let here = &mut self.world.nodes[node];
        let time = here.time(now);
        here.engine.enqueue(time, wanted);
        self.world.watch(node);
    }

    /// The engine in the pool of `node` that has enough more of a prompt cached to be worth fetching, and the number
    /// of tokens.
    fn better_holder(&mut self, node: usize, request: &EngineRequest) -> Option<(usize, u32)> {
        let tokens_min = self.world.config.fetch_tokens_min?;
        let now = self.now();
        let nodes = &mut self.world.nodes;
        nodes.iter_mut().for_each(|node| node.catch_up(now));
        let cached = |node: usize| nodes[node].engine.cached_tokens(request);
        let fit = |other: &usize| {
            *other != node && nodes[*other].answers() && nodes[*other].pool == nodes[node].pool
        };
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
            self.engine_event(node, event);
        }
        self.world.engine_events = events;
        self.world.tell_kv_events(node);
        self.world.watch(node);
    }

    fn engine_event(&mut self, node: usize, event: EngineEvent) {
        let now = self.now();
        // Events that happened before a request was removed from an engine and were not yet delivered.
        if self.flights.get(&(event.id() as u32)).is_none_or(|flight| flight.node != Some(node)) {
            return;
        }
        let pool = self.world.nodes[node].pool;
        match event {
            EngineEvent::Allocated { id, tokens } => self.send_to(node, id as u32, tokens),
            EngineEvent::FirstToken { id, cached_tokens } => {
                let request = id as u32;
                let prefilled = self.world.routers.len() > 1 && pool == DECODE;
                let outcome = self.outcome(request);
                if !prefilled {
                    outcome.cached_tokens = cached_tokens;
                }
                if pool == DECODE {
                    (outcome.first_token, outcome.output_tokens) = (Some(now), 1);
                }
                let id = self.id(request);
                self.world.routers[pool].progress(now, id, true, 0, &mut self.world.outputs);
                if pool == DECODE {
                    self.await_more(request, 1);
                }
            }
            EngineEvent::Tokens { id, count } => {
                let id = self.id(id as u32);
                self.world.routers[pool].progress(now, id, false, count, &mut self.world.outputs);
            }
            EngineEvent::Finished { id } if pool == DECODE => {
                let request = id as u32;
                let output_tokens = self.request(request).output_tokens;
                self.outcome(request).output_tokens = output_tokens;
                let (now, wrote) = (self.now(), Input::Wrote { request: self.id(request), output_tokens });
                self.world.routers[pool].step(now, wrote, &mut self.world.outputs);
                self.settle(request, None);
            }
            EngineEvent::Finished { id } => self.hand_over(node, id as u32),
            EngineEvent::Rejected { id, why } => self.settle(id as u32, Some(Failure::Refused(why))),
        }
    }

    /// A prompt is computed: its KV blocks are sent from here to the decode engine.
    fn hand_over(&mut self, node: usize, request: u32) {
        self.answered(request);
        self.succeeded(request);
        self.release(request);
        if let Some(flight) = self.flights.get_mut(&request) {
            *flight = Flight { pool: DECODE, source: Some(node), ..Flight::default() };
            self.place(request);
        }
    }

    /// The engine at `node` has room for KV blocks: they are sent.
    fn send_to(&mut self, node: usize, request: u32, tokens: u32) {
        let now = self.now();
        let Some(source) = self.flights.get(&request).and_then(|flight| flight.source) else { return };
        let sender = &self.world.nodes[source];
        if !sender.alive() || sender.active_faults.holes > 0 {
            self.cancel(node, request);
            return self.attempt_failed(request, source, Failed::Broken);
        }
        let World { nodes, .. } = &mut *self.world;
        let bytes = nodes[node].engine.config().timing.kv_bytes_per_token() * u64::from(tokens);
        let ready_at = nodes[source].link.begin(now, bytes);
        let (time, ready_then) = (nodes[node].time(now), nodes[node].time(ready_at));
        nodes[node].engine.ready(time, u64::from(request), ready_then);
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.sent_by = Some(ready_at);
        }
        self.outcome(request).moved_tokens += tokens;
        self.world.watch(node);
    }

    /// Reports the cached tokens of an answer to the router. Transferred blocks were in no cache.
    fn answered(&mut self, request: u32) {
        let Some(&Flight { pool, source, .. }) = self.flights.get(&request) else { return };
        let Outcome { cached_tokens, moved_tokens, .. } = *self.outcome(request);
        if source.is_some() || moved_tokens > 0 {
            return;
        }
        let (now, id) = (self.now(), self.id(request));
        let reported = ReportedReuse { prompt_tokens: self.request(request).input_tokens, cached_tokens };
        self.world.routers[pool].step(
            now,
            Input::Answered { request: id, reported },
            &mut self.world.outputs,
        );
    }

    /// Reports to the router that serves a request that it has ended there.
    pub(super) fn release(&mut self, request: u32) {
        let (now, id) = (self.now(), self.id(request));
        let pool = self.flights.get(&request).map_or(DECODE, |flight| flight.pool);
        self.world.routers[pool].step(now, Input::Finished { request: id }, &mut self.world.outputs);
    }

    /// Reports to the router that an endpoint has answered without failure; a rejection also counts.
    fn succeeded(&mut self, request: u32) {
        let Some(flight) = self.flights.get(&request).filter(|_| self.world.config.rules.is_some()) else {
            return;
        };
        let (now, request) = (self.now(), self.id(request));
        self.world.routers[flight.pool].step(now, Input::Succeeded { request }, &mut self.world.outputs);
    }

    /// Reports to the router that a placed request has ended, and applies the outputs.
    pub(super) fn settle(&mut self, request: u32, failure: Option<Failure>) {
        if failure.is_none() {
            self.answered(request);
        }
        if matches!(failure, None | Some(Failure::Refused(_))) {
            self.succeeded(request);
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
        let Some(flight) = self.flights.get(&request) else { return };
        if let Some(node) = flight.node {
            self.cancel(node, request);
        }
        self.settle(request, Some(Failure::TimedOut));
    }
}
