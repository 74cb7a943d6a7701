//! One run of a trace, or of a part of it, through a world.
//!
//! Every request that is sent leaves in exactly one way: answered in full, or with a [`Failure`]. A run is over when
//! the last one has left.

use std::ops::Range;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use kvlane_core::block::BlockHash;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::{RequestId, SchedulingRequest, SessionKey};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use kvlane_core::truth::Reported;
use kvlane_trace::trace::{Trace, TraceRequest};

use super::{Event, TOKEN_EVERY, World};
use crate::engine::{EngineEvent, EngineRequest, Remote};
use crate::fault::Fault;
use crate::outcome::{Failure, Outcome};
use crate::workload::{Drive, Plan, prompt_blocks, text_seed};

/// What to send.
#[derive(Clone, Debug)]
pub struct Send<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Its plan.
    pub plan: &'a Plan,
    /// The part of it, whole conversations.
    pub requests: Range<u32>,
    /// The trace's time, in seconds, at which the run starts.
    pub origin_s: f64,
    /// When conversations begin.
    pub drive: Drive,
}

/// What became of it.
#[derive(Clone, Debug)]
pub struct Run {
    /// When it began.
    pub start: Nanos,
    /// When the last request was over.
    pub end: Nanos,
    /// One for each request, in the order of the trace.
    pub outcomes: Vec<Outcome>,
}

/// A run in progress.
struct Play<'a, 'w> {
    world: &'w mut World,
    send: &'a Send<'a>,
    run: u32,
    start: Nanos,
    /// Id of the first request of the trace.
    first_id: u64,
    outcomes: Vec<Outcome>,
    /// Those sent and not over.
    flights: HashMap<u32, Flight, FixedState>,
    /// Requests of a conversation that are not over, by its root's place in the run.
    left_of: Vec<u32>,
    /// When a conversation began, likewise.
    began: Vec<Nanos>,
    /// Roots of the run that have not begun.
    roots: std::slice::Iter<'a, u32>,
    /// Requests that are not over.
    left: usize,
}

/// A request between being sent and being over.
#[derive(Default)]
struct Flight {
    /// Its prompt's blocks, until an engine has them.
    blocks: Option<Vec<BlockHash>>,
    /// The pool that works on it: first the one that prefills, if that is another, then the one that decodes.
    pool: usize,
    seat: Option<usize>,
    /// Where keys and values come from.
    source: Option<usize>,
    /// When they have come, once that is known.
    sent_by: Option<Nanos>,
    /// How often the pool has failed it.
    attempt: u32,
    failed: Vec<EndpointId>,
}

/// The pool that decodes.
const DECODE: usize = 0;

// === impl World ===

impl World {
    /// Sends a trace, or a part of it, from now on, and ends when the last request is over. `progress` is told after
    /// each request how many are over.
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

    /// What of a prompt an earlier one or its answer has, in whole blocks of the engines. The last token is never
    /// found.
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

    /// Begins the next conversation, if there is one.
    fn start_root(&mut self) {
        let Some(&root) = self.roots.next() else { return };
        let place = self.place_of(root);
        self.began[place] = self.now();
        self.due(root);
    }

    fn now(&self) -> Nanos {
        self.world.clock.now()
    }

    fn request(&self, request: u32) -> &TraceRequest {
        &self.send.trace.requests[request as usize]
    }

    fn place_of(&self, request: u32) -> usize {
        (request - self.send.requests.start) as usize
    }

    fn outcome(&mut self, request: u32) -> &mut Outcome {
        let place = self.place_of(request);
        &mut self.outcomes[place]
    }

    /// The conversation of a request, as its client would name it.
    fn session(&self, request: u32) -> SessionKey {
        let number = self.first_id + u64::from(self.send.plan.root[request as usize]);
        SessionKey::named(number.to_string().as_bytes(), 0)
    }

    fn id(&self, request: u32) -> RequestId {
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
            Event::Step { seat } => self.step(seat.into()),
            // The last one says that all engines are idle; until a request comes there is no other.
            Event::Report => self.world.report(!self.flights.is_empty()),
            Event::Fault(index) => {
                let fault = self.world.config.faults[index];
                if let Fault::Death { endpoint, .. } = fault {
                    let of_engine = |(_, flight): &(&u32, &Flight)| flight.seat == Some(endpoint);
                    let broken: Vec<u32> = self.flights.iter().filter(of_engine).map(|(&r, _)| r).collect();
                    broken.into_iter().for_each(|request| self.count_tokens(request));
                }
                self.world.happen(event);
                if let Fault::Death { endpoint, .. } = fault {
                    self.break_off(endpoint);
                }
            }
            other => {
                self.world.happen(other);
                self.follow(None);
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

    /// A request wants a place, for the first time or again.
    fn place(&mut self, request: u32) {
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
        self.follow(Some(request));
    }

    /// Does what the router has said. The router has learnt by itself of `arrived`, which did not wait.
    fn follow(&mut self, arrived: Option<u32>) {
        while !self.world.outputs.is_empty() {
            for output in std::mem::take(&mut self.world.outputs) {
                match output {
                    Output::Dispatch { request, placement } => {
                        let request = (request.0 - self.first_id) as u32;
                        self.dispatch(request, placement.endpoint, arrived == Some(request));
                    }
                    Output::Reject { request, refused } => {
                        self.over((request.0 - self.first_id) as u32, Some(Failure::Rejected(refused.why)));
                    }
                    Output::Refresh { .. }
                    | Output::Drained { .. }
                    | Output::Knowledge { .. }
                    | Output::Breaker { .. } => {}
                }
            }
        }
    }

    fn dispatch(&mut self, request: u32, endpoint: EndpointId, learnt: bool) {
        let now = self.now();
        let TraceRequest { input_tokens, output_tokens, .. } = *self.request(request);
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(blocks) = flight.blocks.take() else { return };
        let (pool, sent_from) = (flight.pool, flight.source);
        let seat = self.world.first_seat(pool) + endpoint.slot();
        flight.seat = Some(seat);
        if !learnt {
            self.world.routers[pool].learn(now, self.id(request), &blocks, endpoint);
        }
        self.outcome(request).endpoint = Some(seat as u16);
        if !self.world.seats[seat].alive {
            return self.attempt_failed(request, seat);
        }
        let mut wanted = EngineRequest {
            id: u64::from(request),
            prompt_blocks: blocks.into(),
            prompt_tokens: input_tokens,
            // Whoever only prefills yields one token, as engines are asked to.
            output_tokens: if pool == DECODE { output_tokens } else { 1 },
            output_seed: text_seed(request),
            remote: None,
        };
        let remote = |tokens| Some(Remote { tokens, ready_at: Nanos::MAX });
        if sent_from.is_some() {
            wanted.remote = remote(input_tokens);
        } else if let Some((holder, tokens)) = self.better_holder(seat, &wanted) {
            wanted.remote = remote(tokens);
            if let Some(flight) = self.flights.get_mut(&request) {
                flight.source = Some(holder);
            }
        }
        self.world.seats[seat].engine.enqueue(now, wanted);
        self.world.watch(seat);
    }

    /// Who in the pool of `seat` has so much more of a prompt cached that it is worth fetching, and how much.
    fn better_holder(&mut self, seat: usize, request: &EngineRequest) -> Option<(usize, u32)> {
        let tokens_min = self.world.config.fetch_tokens_min?;
        let now = self.now();
        let seats = &mut self.world.seats;
        seats.iter_mut().for_each(|seat| seat.engine.catch_up(now));
        let cached = |seat: usize| seats[seat].engine.cached_tokens(request);
        let fit =
            |other: &usize| *other != seat && seats[*other].alive && seats[*other].pool == seats[seat].pool;
        let holders = (0..seats.len()).filter(fit).map(|other| (other, cached(other)));
        // Of several the first one: whoever reports last must not matter.
        let (holder, tokens) = holders.reduce(|best, other| if other.1 > best.1 { other } else { best })?;
        (tokens >= cached(seat).saturating_add(tokens_min)).then_some((holder, tokens))
    }

    /// An engine's step ends.
    fn step(&mut self, seat: usize) {
        let now = self.now();
        let World { seats, engine_events, .. } = &mut *self.world;
        if seats[seat].step_at != Some(now) {
            return;
        }
        seats[seat].step_at = None;
        seats[seat].engine.advance(now, engine_events);
        let mut events = std::mem::take(engine_events);
        for (_, event) in events.drain(..) {
            self.engine_event(seat, event);
        }
        self.world.engine_events = events;
        self.world.tell_kv_events(seat);
        self.world.watch(seat);
    }

    fn engine_event(&mut self, seat: usize, event: EngineEvent) {
        let now = self.now();
        let pool = self.world.seats[seat].pool;
        match event {
            EngineEvent::Allocated { id, tokens } => self.send_to(seat, id as u32, tokens),
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
            }
            EngineEvent::Tokens { id, count } => {
                let id = self.id(id as u32);
                self.world.routers[pool].progress(now, id, false, count, &mut self.world.outputs);
            }
            EngineEvent::Finished { id } if pool == DECODE => {
                let request = id as u32;
                self.outcome(request).output_tokens = self.request(request).output_tokens;
                self.settle(request, None);
            }
            EngineEvent::Finished { id } => self.hand_over(seat, id as u32),
            EngineEvent::Rejected { id, why } => self.settle(id as u32, Some(Failure::Refused(why))),
        }
    }

    /// A prompt is computed: whoever decodes gets it from here.
    fn hand_over(&mut self, seat: usize, request: u32) {
        self.answered(request);
        self.release(request);
        if let Some(flight) = self.flights.get_mut(&request) {
            *flight = Flight { pool: DECODE, source: Some(seat), ..Flight::default() };
            self.place(request);
        }
    }

    /// The engine at `seat` has room for keys and values: they are sent.
    fn send_to(&mut self, seat: usize, request: u32, tokens: u32) {
        let now = self.now();
        let Some(source) = self.flights.get(&request).and_then(|flight| flight.source) else { return };
        let World { seats, .. } = &mut *self.world;
        if !seats[source].alive {
            seats[seat].engine.cancel(now, u64::from(request));
            self.world.watch(seat);
            return self.attempt_failed(request, source);
        }
        let bytes = seats[seat].engine.config().timing.kv_bytes_per_token() * u64::from(tokens);
        let ready_at = seats[source].link.begin(now, bytes);
        seats[seat].engine.ready(now, u64::from(request), ready_at);
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.sent_by = Some(ready_at);
        }
        self.outcome(request).moved_tokens += tokens;
        self.world.watch(seat);
    }

    /// Tells the router what an answer says of the cache. What came from another engine was in no cache.
    fn answered(&mut self, request: u32) {
        let Some(&Flight { pool, source, .. }) = self.flights.get(&request) else { return };
        let Outcome { cached_tokens, moved_tokens, .. } = *self.outcome(request);
        if source.is_some() || moved_tokens > 0 {
            return;
        }
        let (now, id) = (self.now(), self.id(request));
        let reported = Reported { prompt_tokens: self.request(request).input_tokens, cached_tokens };
        self.world.routers[pool].observe(now, id, reported, &mut self.world.outputs);
    }

    /// Tells the router that works on a request that it is over there.
    fn release(&mut self, request: u32) {
        let (now, id) = (self.now(), self.id(request));
        let pool = self.flights.get(&request).map_or(DECODE, |flight| flight.pool);
        self.world.routers[pool].step(now, Input::Finished { request: id }, &mut self.world.outputs);
    }

    /// Tells the router that a request it has placed is over, and does what follows.
    fn settle(&mut self, request: u32, failure: Option<Failure>) {
        if failure.is_none() {
            self.answered(request);
        }
        self.release(request);
        self.over(request, failure);
        self.follow(None);
    }

    /// A request is over: whoever waits for it may go on.
    fn over(&mut self, request: u32, failure: Option<Failure>) {
        if self.flights.remove(&request).is_none() {
            return;
        }
        let now = self.now();
        let outcome = self.outcome(request);
        (outcome.end, outcome.failure) = (now, failure);
        self.left -= 1;
        let root = self.send.plan.root[request as usize];
        let place = self.place_of(root);
        let run = self.run;
        for child in self.send.plan.children(request) {
            let TraceRequest { arrival_s, think_s, .. } = *self.request(child);
            let at = match think_s {
                Some(think_s) => now + Nanos::from_secs_f64(f64::from(think_s)),
                None => {
                    let after_root_s = arrival_s - self.request(root).arrival_s;
                    now.max(self.began[place] + Nanos::from_secs_f64(after_root_s))
                }
            };
            self.world.clock.schedule(at, Event::Due { run, request: child });
        }
        self.left_of[place] -= 1;
        if self.left_of[place] == 0 && matches!(self.send.drive, Drive::Closed { .. }) {
            self.start_root();
        }
    }

    /// What an endpoint was doing breaks off, and what it was sending does not arrive.
    fn break_off(&mut self, endpoint: usize) {
        let now = self.now();
        let hit = |flight: &Flight| {
            let awaited = flight.source == Some(endpoint) && flight.sent_by.is_none_or(|at| at > now);
            flight.seat == Some(endpoint) || awaited && flight.seat.is_some()
        };
        let mut broken: Vec<u32> =
            self.flights.iter().filter(|(_, flight)| hit(flight)).map(|(&request, _)| request).collect();
        broken.sort_unstable();
        for request in broken {
            // Whoever waited for what was sent has blocks for it.
            if let Some(seat) =
                self.flights.get(&request).and_then(|flight| flight.seat).filter(|&s| s != endpoint)
            {
                self.world.seats[seat].engine.cancel(now, u64::from(request));
                self.world.watch(seat);
            }
            self.attempt_failed(request, endpoint);
        }
    }

    /// Counts what a client has received of an answer that is about to break off.
    fn count_tokens(&mut self, request: u32) {
        let now = self.now();
        let Some(Flight { pool: DECODE, seat: Some(seat), .. }) = self.flights.get(&request) else { return };
        let engine = &mut self.world.seats[*seat].engine;
        engine.catch_up(now);
        let generated = engine.generated_tokens(u64::from(request)).unwrap_or(0);
        let outcome = self.outcome(request);
        if outcome.first_token.is_some() && generated > 0 {
            outcome.output_tokens = 1 + (generated - 1) / TOKEN_EVERY * TOKEN_EVERY;
        }
    }

    /// The endpoint did not answer, or no more.
    fn attempt_failed(&mut self, request: u32, endpoint: usize) {
        let attempts_max = self.world.config.attempts_max;
        let Outcome { first_token, attempts, .. } = *self.outcome(request);
        if first_token.is_some() || attempts >= attempts_max {
            return self.settle(request, Some(Failure::Broken));
        }
        self.release(request);
        self.outcome(request).attempts += 1;
        let prefill = self.world.routers.len() - 1;
        let failed = self.world.seats[endpoint].id;
        if let Some(flight) = self.flights.get_mut(&request) {
            if flight.pool == DECODE && prefill != DECODE {
                // The prompt is gone with whoever had it: it has to be computed again.
                *flight = Flight { pool: prefill, ..Flight::default() };
            } else {
                if flight.seat == Some(endpoint) {
                    flight.failed.push(failed);
                }
                (flight.seat, flight.source, flight.sent_by) = (None, None, None);
                flight.attempt += 1;
            }
        }
        self.follow(None);
        self.place(request);
    }

    /// A client has waited long enough.
    fn give_up(&mut self, request: u32) {
        self.count_tokens(request);
        let Some(flight) = self.flights.get(&request) else { return };
        let now = self.now();
        if let Some(seat) = flight.seat {
            self.world.seats[seat].engine.cancel(now, u64::from(request));
            self.world.watch(seat);
        }
        self.settle(request, Some(Failure::TimedOut));
    }
}
