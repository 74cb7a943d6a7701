//! Continuous batching, one step at a time, after vLLM V1's scheduler (`vllm/v1/core/sched/scheduler.py`).
//!
//! A step gives tokens of its budget to the running sequences in the order of their admission, one to each that
//! decodes and a chunk to the one whose prompt is still being computed, then admits waiting requests first come, first
//! served, until budget, seats or blocks run out; the head of the queue blocks the rest. When a running sequence
//! finds no block, the last admitted one is preempted: it gives up all its blocks, returns to the head of the queue
//! and later recomputes what the cache no longer holds. The step's shape gives its length through the timing model.
//!
//! A request leaves in exactly one of three ways: finished, rejected, cancelled.
//!
//! # What a step costs
//!
//! Most steps only decode. All decoding sequences then advance by one token, so only sequences that take or fill a
//! block, report or end are visited; a timing wheel finds them. The progress of the others follows from the step
//! number, and the sum of their contexts from the previous sum. `oracle.rs` is a straightforward implementation of
//! the same scheduler, for tests to compare with.
//!
//! # What is modelled and what is not
//!
//! - A request is admitted when there are blocks for all of its known tokens, as vLLM does with
//!   `scheduler_reserve_full_isl`, but takes only those of its chunk. No blocks are reserved beyond that.
//! - Recomputation is the only preemption, as in vLLM V1. Swapping is not modelled.
//! - Steps follow each other without a gap: the host's part of a step is in the timing model, which assumes asynchronous
//!   scheduling. A token that ends a request ends it in its own step, not one later.
//! - Batches are not padded to the sizes of captured CUDA graphs. Speculative decoding, encoder budgets and
//!   `long_prefill_token_threshold` are not modelled.
//! - [`Batching::PrefillFirst`] is SGLang's order of work in vLLM's memory: blocks instead of a radix tree of tokens,
//!   and no memory reserved for the answers of admitted requests.

mod adapters;
mod config;
mod gate;
#[cfg(test)]
mod oracle;
mod request;
mod sequence;
mod step;
mod wheel;

use std::collections::VecDeque;

use kvlane_core::adapters::AdapterReport;
use kvlane_core::event::{KvEvent, Tier};
use kvlane_core::time::Nanos;
use kvlane_core::timing::StepCost;

pub use self::adapters::AdapterSlots;
use self::adapters::Adapters;
pub use self::config::{Batching, EngineConfig};
use self::gate::Gate;
pub use self::request::{EngineEvent, EngineRequest, EngineStats, Remote, own_block};
use self::sequence::Sequence;
use self::wheel::{Seat, Wheel};
use crate::pool::{BlockId, BlockPool, Eviction, Map};
use crate::tier::HostTier;

/// Longest queue; requests beyond it are rejected.
const WAITING_MAX: usize = 100_000;

/// One engine.
#[derive(Clone, Debug)]
pub struct Engine {
    config: EngineConfig,
    cost: StepCost,
    pool: BlockPool,
    /// Requests in flight, each at one index until it ends.
    sequences: Vec<Sequence>,
    /// Free indices.
    vacant: Vec<u32>,
    in_flight: Map<u64, u32>,
    /// Blocks of requests that keep them after their end; none before it.
    kept: Map<u64, Vec<BlockId>>,
    /// In the order of admission. All but the last decode.
    running: Vec<Seat>,
    waiting: VecDeque<u32>,
    /// Its adapters, if it has slots for them.
    adapters: Option<Box<Adapters>>,
    /// Why the head of the queue waits.
    gate: Gate,
    /// Requests that have blocks and wait for their content, in the order in which they started to wait.
    loading: Vec<u32>,
    /// Time at which the bus to host memory has finished all loads.
    bus_free_at: Nanos,
    /// Number of decode steps ended.
    tick: u64,
    /// Number of decoding sequences.
    decoding: u32,
    /// Sum of their contexts before step `tick`.
    context: u64,
    wheel: Wheel,
    /// Number of admissions.
    order: u64,
    /// Whether the step in progress decodes.
    decodes: bool,
    /// Decoding sequences in it that have something to report at its end, in the order of admission.
    due: Vec<Seat>,
    /// Sequences whose prompts are in it, in the order of admission.
    prompts: Vec<Seat>,
    /// Factor on the duration of a step.
    slowdown: f64,
    /// End of the step in progress.
    step_end: Option<Nanos>,
    /// Lower bound on the duration of steps that only decode and contain all sequences that decode in this one.
    step_length: Nanos,
    /// Time of the last event.
    now: Nanos,
    /// Events since the driver's last call.
    events: Vec<(Nanos, EngineEvent)>,
    kv_events: Vec<(Nanos, KvEvent)>,
    counters: EngineStats,
    /// Reused buffers.
    woken: Vec<Seat>,
    found: Vec<BlockId>,
}

/// Makes the `index`-th block of a sequence findable.
fn publish(pool: &mut BlockPool, gate: &mut Gate, sequence: &Sequence, index: u32) {
    let block = |index| sequence.request.block(index);
    let hash = block(index);
    pool.publish(sequence.blocks[index as usize], hash, || index.checked_sub(1).map(block));
    gate.published(hash);
}

// === impl Engine ===

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(config: EngineConfig) -> Self {
        let config = config.settled();
        let mut pool = BlockPool::with_eviction(config.blocks, config.eviction);
        if let Some(tier) = config.cpu_tier.filter(|_| config.eviction != Eviction::Infinite) {
            pool.set_host(HostTier::new(tier.blocks));
        }
        if config.kv_events {
            pool.set_log(Tier::Gpu);
        }
        Self {
            cost: config.timing.compile(),
            adapters: config.adapters.map(|slots| Box::new(Adapters::new(slots))),
            config,
            pool,
            sequences: Vec::new(),
            vacant: Vec::new(),
            in_flight: Map::default(),
            kept: Map::default(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            gate: Gate::default(),
            loading: Vec::new(),
            bus_free_at: Nanos::ZERO,
            tick: 0,
            decoding: 0,
            context: 0,
            wheel: Wheel::new(),
            order: 0,
            decodes: false,
            due: Vec::new(),
            prompts: Vec::new(),
            slowdown: 1.0,
            step_end: None,
            step_length: Nanos::ZERO,
            now: Nanos::ZERO,
            events: Vec::new(),
            kv_events: Vec::new(),
            counters: EngineStats::default(),
            woken: Vec::new(),
            found: Vec::new(),
        }
    }

    /// The configuration in force.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Queues a request that arrives at `now`, and starts a step if the engine was idle. A request that can never be
    /// served is rejected by an event.
    pub fn enqueue(&mut self, now: Nanos, request: EngineRequest) {
        self.run(now);
        self.now = self.now.max(now);
        let id = request.id;
        let tokens = u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
        let capacity = u64::from(self.pool.capacity()) * u64::from(self.config.block_tokens);
        let why = if request.prompt_tokens == 0 {
            Some("the prompt is empty")
        } else if tokens > capacity.min(u64::from(u32::MAX)) {
            Some("prompt and answer exceed the KV cache")
        } else if self.waiting.len() >= WAITING_MAX {
            Some("the queue is full")
        } else if self.in_flight.contains_key(&id) {
            Some("a request with this id is in flight")
        } else {
            None
        };
        if let Some(why) = why {
            self.events.push((self.now, EngineEvent::Rejected { id, why }));
            return;
        }
        let at = match self.vacant.pop() {
            Some(at) => {
                let blocks = std::mem::take(&mut self.sequences[at as usize].blocks);
                self.sequences[at as usize] = Sequence::new(request, blocks);
                at
            }
            None => {
                self.sequences.push(Sequence::new(request, Vec::new()));
                self.sequences.len() as u32 - 1
            }
        };
        self.in_flight.insert(id, at);
        let (now, adapter) = (self.now, self.sequences[at as usize].request.adapter);
        let is_ready = match (&mut self.adapters, adapter) {
            (Some(adapters), Some(adapter)) => adapters.enter(now, adapter, at),
            _ => true,
        };
        if is_ready {
            self.waiting.push_back(at);
        }
        if self.step_end.is_none() {
            self.start_step(self.now);
        }
    }

    /// Sets the time at which the KV blocks that come from another engine arrive, in answer to
    /// [`EngineEvent::Allocated`]. False if the request waits for none.
    pub fn ready(&mut self, now: Nanos, id: u64, ready_at: Nanos) -> bool {
        self.run(now);
        self.now = self.now.max(now);
        let Some(at) = self.in_flight.get(&id).filter(|at| self.loading.contains(at)) else { return false };
        let sequence = &mut self.sequences[*at as usize];
        sequence.ready_at = ready_at.max(sequence.loaded_at).max(self.now);
        self.run(now);
        true
    }

    /// Makes a request in flight keep its blocks after its end, for another engine, until [`Engine::release`]. False if
    /// it is not in flight.
    pub fn keep(&mut self, id: u64) -> bool {
        let in_flight = self.in_flight.contains_key(&id);
        if in_flight {
            self.kept.insert(id, Vec::new());
        }
        in_flight
    }

    /// Frees the blocks that a request has kept. The next step considers them.
    pub fn release(&mut self, now: Nanos, id: u64) {
        self.run(now);
        if let Some(blocks) = self.kept.remove(&id) {
            self.pool.release(&blocks);
            self.now = self.now.max(now);
            if self.step_end.is_none() && !self.waiting.is_empty() {
                self.start_step(self.now);
            }
        }
    }

    /// Removes a request and frees its blocks; there are no further events for it. False if it is not in flight. The
    /// duration of the step in progress does not change.
    pub fn cancel(&mut self, now: Nanos, id: u64) -> bool {
        self.run(now);
        let Some(&at) = self.in_flight.get(&id) else { return false };
        self.kept.remove(&id);
        let seat = self.sequences[at as usize].seat(at);
        if let Ok(index) = self.running.binary_search(&seat) {
            self.running.remove(index);
            self.leave(at);
        } else if let Some(index) = self.loading.iter().position(|waiter| *waiter == at) {
            self.loading.remove(index);
        } else if let Some(index) = self.waiting.iter().position(|waiter| *waiter == at) {
            self.waiting.remove(index);
            if index == 0 {
                self.gate.open();
            }
        }
        self.forget(at);
        // The next step may be shorter than the one in progress.
        self.step_length = Nanos::ZERO;
        true
    }

    /// Frees the blocks and the index of a request that is in no list any more.
    fn forget(&mut self, at: u32) {
        let sequence = &mut self.sequences[at as usize];
        self.in_flight.remove(&sequence.request.id);
        sequence.request.prompt_blocks = Default::default();
        match self.kept.get_mut(&sequence.request.id) {
            Some(kept) => *kept = std::mem::take(&mut sequence.blocks),
            None => self.pool.release(&sequence.blocks),
        }
        sequence.blocks.clear();
        if let (Some(adapters), Some(adapter)) = (&mut self.adapters, sequence.request.adapter) {
            adapters.leave(self.now, adapter, at);
        }
        self.vacant.push(at);
    }

    /// Time at which [`Engine::advance`] next has an event or work; `None` while idle.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.events.first().map(|(at, _)| *at).or_else(|| self.next_step())
    }

    /// A time before which there are no events, if nothing is enqueued, made ready or cancelled until then; the end
    /// of the step in progress or later, `None` while idle. A driver that has no work at every step advances the
    /// engine to this time, asks again, and so reaches each event's time in a few calls.
    pub fn quiet_until(&self) -> Option<Nanos> {
        let next = self.next_deadline()?;
        let Some(end) = self.step_end.filter(|_| self.events.is_empty() && self.decoding > 0) else {
            return Some(next);
        };
        let admits = self.running.len() < self.config.max_num_seqs as usize
            && !(self.waiting.is_empty() && self.loading.is_empty() && self.adapters_waiting() == 0);
        let only_decodes = self.decodes && self.due.is_empty() && self.prompts.is_empty() && !admits;
        // With one free block per sequence, no sequence is preempted until all of them have needed a block.
        let unhurt = u64::from(self.pool.free() / self.decoding) * u64::from(self.config.block_tokens);
        if !only_decodes || unhurt == 0 {
            return Some(end);
        }
        let left = |seat: &Seat| {
            let sequence = &self.sequences[seat.at as usize];
            sequence.context(self.tick).map(|context| sequence.due_at() - context)
        };
        let steps = self.running.iter().filter_map(left).min().unwrap_or(0);
        // The batch stays and its contexts grow, so no step is shorter than this one.
        Some(end + Nanos(self.step_length.0.saturating_mul(u64::from(steps).min(unhurt))))
    }

    /// End of the step in progress, or else the earliest time at which the next one can begin.
    fn next_step(&self) -> Option<Nanos> {
        let ready = || {
            let adapter = self.adapters.as_ref().and_then(|adapters| adapters.next_at());
            self.loading.iter().map(|at| self.sequences[*at as usize].ready_at).chain(adapter).min()
        };
        self.step_end.or_else(ready).filter(|at| *at < Nanos::MAX)
    }

    /// Runs every step that ends by `now` and appends its events, in order of time. With [`Nanos::MAX`] the engine
    /// runs until it is idle, which is at the end of its last step.
    pub fn advance(&mut self, now: Nanos, out: &mut Vec<(Nanos, EngineEvent)>) {
        self.run(now);
        out.append(&mut self.events);
    }

    /// Runs every step that ends by `now`, and keeps the events for [`Engine::advance`]: for a driver that calls it
    /// only when there are events ([`Engine::quiet_until`]) and needs the engine's state in between.
    pub fn catch_up(&mut self, now: Nanos) {
        self.run(now);
    }

    /// Output tokens of a request so far; `None` if it is not in flight.
    pub fn generated_tokens(&self, id: u64) -> Option<u32> {
        let sequence = &self.sequences[*self.in_flight.get(&id)? as usize];
        Some(sequence.context(self.tick).map_or(sequence.generated, |context| sequence.generated_at(context)))
    }

    /// Makes steps longer by a factor, from the next one on, as with a throttled or shared GPU. 1 is the normal
    /// speed.
    pub fn set_slowdown(&mut self, factor: f64) {
        self.slowdown = if factor > 0.0 && factor.is_finite() { factor } else { 1.0 };
        // The next step may be shorter than the one in progress.
        self.step_length = Nanos::ZERO;
    }

    /// Appends the blocks added to and removed from the cache, in order, each with the end of the step in which it
    /// changed, as vLLM publishes it. Empty unless [`EngineConfig::kv_events`] is set.
    pub fn take_kv_events(&mut self, out: &mut Vec<(Nanos, KvEvent)>) {
        out.append(&mut self.kv_events);
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len() as u32,
            waiting: (self.waiting.len() + self.loading.len() + self.adapters_waiting()) as u32,
            adapter_loads: self.adapters.as_ref().map_or(0, |adapters| adapters.loads),
            kv_blocks_used: self.pool.used(),
            kv_blocks: self.pool.capacity(),
            ..self.counters
        }
    }

    /// Adapters of requests in flight, as vLLM reports them; `None` if it has no slots for adapters.
    pub fn adapter_report(&self) -> Option<AdapterReport> {
        let adapter = |at: &u32| {
            let Sequence { order, ref request, .. } = self.sequences[*at as usize];
            Some((order != sequence::NOWHERE, request.adapter?))
        };
        Some(self.adapters.as_ref()?.report(self.in_flight.values().filter_map(adapter)))
    }

    /// Requests that wait for an adapter.
    fn adapters_waiting(&self) -> usize {
        self.adapters.as_ref().map_or(0, |adapters| adapters.waiting())
    }

    /// Queues the requests whose adapters have been loaded.
    fn admit_adapters(&mut self, now: Nanos) {
        while let Some(at) = self.adapters.as_mut().and_then(|adapters| adapters.next_ready(now)) {
            self.waiting.push_back(at);
        }
    }

    /// Prompt tokens of `request` that the cache holds, host memory included.
    pub fn cached_tokens(&self, request: &EngineRequest) -> u32 {
        let blocks = request.prompt_tokens.saturating_sub(1) / self.config.block_tokens;
        let run = self.pool.lookup((0..blocks).map(|index| request.block(index)));
        (run.blocks + run.host) * self.config.block_tokens
    }

    /// Clears the cache, in every tier; blocks in use stay in use.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget();
        if self.config.kv_events {
            self.kv_events.push((self.now, KvEvent::Cleared));
        }
    }

    fn run(&mut self, now: Nanos) {
        while let Some(at) = self.next_step().filter(|at| *at <= now) {
            self.now = self.now.max(at);
            if self.step_end.is_some() {
                self.end_step(at);
            }
            self.start_step(self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use kvlane_core::block::BlockHash;
    use kvlane_core::timing::{StepShape, TimingModel};
    use proptest::prelude::*;

    use super::oracle::PlainEngine;
    use super::*;
    use crate::tier::CpuTier;

    fn config(blocks: u32) -> EngineConfig {
        EngineConfig {
            timing: TimingModel::preset("qwen2.5-7b@a100").unwrap(),
            block_tokens: 16,
            blocks,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            token_every: 1,
            kv_events: false,
            eviction: Eviction::Lru,
            cpu_tier: None,
            batching: Batching::Mixed,
            adapters: None,
        }
    }

    /// A request whose prompt is the first `prompt_tokens` tokens of the text called `text`.
    fn request(id: u64, text: u64, prompt_tokens: u32, output_tokens: u32) -> EngineRequest {
        let block = |index: u32| BlockHash(text << 32 | u64::from(index));
        let prompt_blocks = (0..prompt_tokens / 16).map(block).collect();
        EngineRequest {
            id,
            prompt_blocks,
            prompt_tokens,
            output_tokens,
            output_seed: id,
            remote: None,
            adapter: None,
        }
    }

    fn drain(engine: &mut Engine) -> Vec<(Nanos, EngineEvent)> {
        let mut out = Vec::new();
        engine.advance(Nanos::MAX, &mut out);
        assert_eq!(engine.next_deadline(), None, "an engine runs dry");
        out
    }

    /// Runs requests that all arrive at once.
    fn serve(engine: &mut Engine, requests: impl IntoIterator<Item = EngineRequest>) -> Vec<EngineEvent> {
        requests.into_iter().for_each(|request| engine.enqueue(Nanos::ZERO, request));
        drain(engine).into_iter().map(|(_, event)| event).collect()
    }

    fn first(id: u64, cached_tokens: u32) -> EngineEvent {
        EngineEvent::FirstToken { id, cached_tokens }
    }

    fn token(id: u64) -> EngineEvent {
        EngineEvent::Tokens { id, count: 1 }
    }

    fn finished(id: u64) -> EngineEvent {
        EngineEvent::Finished { id }
    }

    #[test]
    fn a_request_yields_its_tokens_one_step_each_and_ends() {
        let mut engine = Engine::new(config(100));
        let events = serve(&mut engine, [request(1, 1, 20, 3)]);
        assert_eq!(events, [first(1, 0), token(1), token(1), finished(1)]);
        let stats = engine.stats();
        assert_eq!((stats.steps, stats.prompt_tokens, stats.generation_tokens), (3, 20, 3));
        assert_eq!((stats.running, stats.waiting, stats.kv_blocks_used), (0, 0, 0));
        assert_eq!(stats.computed_tokens, 22, "the last token's keys and values are never needed");
    }

    #[test]
    fn a_step_lasts_as_long_as_the_timing_model_says() {
        let mut engine = Engine::new(config(100));
        engine.enqueue(Nanos::from_secs(5), request(1, 1, 30, 2));
        let (mut prefill, mut decode) = (StepShape::default(), StepShape::default());
        prefill.add_prefill(0, 30);
        prefill.finished_prefills = 1;
        decode.add_decode(30);
        let timing = engine.config().timing.clone();
        let secs = |step| Nanos::from_secs_f64(timing.step_secs(step));
        let first_at = Nanos::from_secs(5) + secs(&prefill);
        let second_at = first_at + secs(&decode);
        assert_eq!(engine.next_deadline(), Some(first_at));
        assert_eq!(
            drain(&mut engine),
            [(first_at, first(1, 0)), (second_at, token(1)), (second_at, finished(1))]
        );
        assert_eq!(engine.stats().busy, second_at - Nanos::from_secs(5));
    }

    #[test]
    fn nothing_happens_before_its_time() {
        let mut engine = Engine::new(config(100));
        engine.enqueue(Nanos::ZERO, request(1, 1, 20, 2));
        let deadline = engine.next_deadline().unwrap();
        let mut out = Vec::new();
        engine.advance(deadline - Nanos(1), &mut out);
        assert_eq!(out, []);
        engine.advance(deadline, &mut out);
        assert_eq!(out, [(deadline, first(1, 0))]);
    }

    #[test]
    fn a_repeated_prompt_is_found_except_for_its_last_token() {
        let mut engine = Engine::new(config(100));
        serve(&mut engine, [request(1, 7, 48, 1)]);
        assert_eq!(engine.cached_tokens(&request(2, 7, 48, 1)), 32);
        let events = serve(&mut engine, [request(2, 7, 48, 1), request(3, 7, 49, 1)]);
        assert!(
            events.contains(&first(2, 32)),
            "48 tokens are 3 blocks, one token must be computed: {events:?}"
        );
        assert!(events.contains(&first(3, 48)), "{events:?}");
        let stats = engine.stats();
        assert_eq!((stats.prefix_queried_tokens, stats.prefix_hit_tokens), (145, 80));
    }

    #[test]
    fn an_answer_is_found_by_the_turn_that_contains_it() {
        let mut engine = Engine::new(config(100));
        let turn = request(1, 7, 40, 30);
        serve(&mut engine, [turn.clone()]);
        let mut next = request(2, 7, 80, 1);
        next.prompt_blocks = (0..5).map(|index| turn.block(index)).collect();
        let events = serve(&mut engine, [next]);
        // 69 tokens have keys and values: 4 full blocks.
        assert_eq!(events, [first(2, 64), finished(2)]);
    }

    #[test]
    fn a_prompt_without_hashes_is_new_and_found_by_its_continuation() {
        let mut engine = Engine::new(config(100));
        let own = |id, output_seed| EngineRequest {
            prompt_blocks: Arc::new([]),
            output_seed,
            ..request(id, 0, 80, 1)
        };
        serve(&mut engine, [own(1, 5)]);
        let mut next = request(2, 7, 100, 1);
        next.prompt_blocks = (0..5).map(|index| own_block(5, index)).collect();
        assert_eq!(serve(&mut engine, [next, own(3, 6), own(4, 5)])[0], first(2, 80));
        assert_eq!(engine.cached_tokens(&own(5, 5)), 64);
        assert_eq!(engine.stats().prefix_hit_tokens, 80 + 64, "none for another seed");
    }

    #[test]
    fn a_forgotten_cache_finds_nothing() {
        let mut engine = Engine::new(config(100));
        serve(&mut engine, [request(1, 7, 64, 1)]);
        engine.reset_prefix_cache();
        assert_eq!(serve(&mut engine, [request(2, 7, 64, 1)])[0], first(2, 0));
    }

    #[test]
    fn a_long_prompt_is_computed_in_chunks_beside_decoding_sequences() {
        let mut engine = Engine::new(config(100));
        let events = serve(&mut engine, [request(1, 1, 10, 6), request(2, 2, 200, 1)]);
        // The first step has begun when the long prompt arrives; then 1 + 63 three times, then 1 + 11.
        let expected =
            [first(1, 0), token(1), token(1), token(1), token(1), first(2, 0), finished(2), token(1)];
        assert_eq!(events[..8], expected);
        assert_eq!(engine.stats().steps, 6);
    }

    #[test]
    fn the_head_of_the_queue_blocks_those_behind_it() {
        let mut engine = Engine::new(config(6));
        let events = serve(&mut engine, [request(1, 1, 48, 20), request(2, 2, 60, 1), request(3, 3, 5, 1)]);
        let position = |wanted: EngineEvent| events.iter().position(|event| *event == wanted).unwrap();
        assert!(position(finished(1)) < position(first(2, 0)), "no blocks for 2 while 1 runs: {events:?}");
        assert!(position(first(2, 0)) <= position(first(3, 0)), "3 would fit and still waits: {events:?}");
    }

    #[test]
    fn no_more_sequences_run_than_there_are_seats() {
        let mut engine = Engine::new(EngineConfig { max_num_seqs: 2, ..config(100) });
        (1..=3).for_each(|id| engine.enqueue(Nanos::ZERO, request(id, id, 10, 5)));
        let mut out = Vec::new();
        engine.advance(engine.next_deadline().unwrap(), &mut out);
        assert_eq!((engine.stats().running, engine.stats().waiting), (2, 1));
        assert_eq!(
            drain(&mut engine).iter().filter(|(_, e)| matches!(e, EngineEvent::Finished { .. })).count(),
            3
        );
    }

    #[test]
    fn the_last_admitted_is_preempted_and_computes_again_only_what_was_lost() {
        // Each needs 5 blocks in the end; 8 are there.
        let mut engine = Engine::new(config(8));
        let events = serve(&mut engine, [request(1, 1, 32, 40), request(2, 2, 32, 40)]);
        let stats = engine.stats();
        assert!(stats.preemptions > 0);
        assert!(stats.recomputed_tokens > 0, "its partial block at least");
        let expected = 2 * (32 + 39) + stats.recomputed_tokens;
        assert_eq!(stats.computed_tokens, expected);
        assert_eq!(stats.generation_tokens, 80);
        assert_eq!(stats.prompt_tokens, 64);
        let first_end = events.iter().position(|event| *event == finished(1)).unwrap();
        assert!(!events[..first_end].contains(&finished(2)));
        for id in [1, 2] {
            assert_eq!(events.iter().filter(|event| **event == first(id, 0)).count(), 1);
        }
    }

    #[test]
    fn a_preempted_sequence_goes_before_those_that_never_ran() {
        let mut engine = Engine::new(config(8));
        let events =
            serve(&mut engine, [request(1, 1, 32, 40), request(2, 2, 32, 40), request(3, 3, 100, 1)]);
        assert!(engine.stats().preemptions > 0);
        let ends: Vec<&EngineEvent> =
            events.iter().filter(|event| matches!(event, EngineEvent::Finished { .. })).collect();
        assert_eq!(ends, [&finished(1), &finished(2), &finished(3)]);
    }

    #[test]
    fn kept_blocks_are_free_only_once_they_are_released() {
        let mut engine = Engine::new(config(8));
        engine.enqueue(Nanos::ZERO, request(1, 1, 100, 1));
        assert!(engine.keep(1) && !engine.keep(2));
        let mut events = Vec::new();
        engine.advance(Nanos::MAX, &mut events);
        assert!(events.iter().any(|(_, event)| *event == EngineEvent::Finished { id: 1 }));
        assert_eq!((engine.stats().running, engine.stats().kv_blocks_used), (0, 7));
        engine.enqueue(Nanos::from_secs(1), request(2, 2, 100, 1));
        engine.advance(Nanos::from_secs(2), &mut events);
        assert_eq!(engine.stats().waiting, 1, "for blocks");
        engine.release(Nanos::from_secs(3), 1);
        engine.release(Nanos::from_secs(3), 1);
        engine.advance(Nanos::MAX, &mut events);
        assert!(events.iter().any(|(_, event)| *event == EngineEvent::Finished { id: 2 }));
        assert_eq!(engine.stats().kv_blocks_used, 0);
    }

    #[test]
    fn a_cancelled_request_frees_its_blocks_and_is_not_heard_of_again() {
        let mut engine = Engine::new(config(10));
        engine.enqueue(Nanos::ZERO, request(1, 1, 100, 50));
        engine.enqueue(Nanos::ZERO, request(2, 2, 100, 50));
        let mut out = Vec::new();
        engine.advance(Nanos::from_millis(50), &mut out);
        assert!(engine.cancel(Nanos::from_millis(50), 2), "from the queue");
        assert!(engine.cancel(Nanos::from_millis(50), 1), "from the batch");
        assert!(!engine.cancel(Nanos::from_millis(50), 1), "once");
        let stats = engine.stats();
        assert_eq!((stats.kv_blocks_used, stats.running, stats.waiting), (0, 0, 0));
        assert_eq!(drain(&mut engine), []);
        assert_eq!(serve(&mut engine, [request(1, 3, 20, 1)]), [first(1, 0), finished(1)], "the id is free");
    }

    #[test]
    fn what_was_evicted_comes_back_from_the_host_while_others_compute() {
        let tier = CpuTier { latency_s: 0.1, ..CpuTier::new(100) };
        let mut engine = Engine::new(EngineConfig { cpu_tier: Some(tier), ..config(8) });
        serve(&mut engine, [request(1, 1, 96, 1)]);
        serve(&mut engine, [request(2, 2, 96, 1)]);
        let start = Nanos::from_secs(9);
        engine.enqueue(start, request(3, 1, 96, 1));
        assert_eq!(
            (engine.stats().waiting, engine.stats().kv_blocks_used),
            (1, 6),
            "it waits with its blocks"
        );
        engine.enqueue(start, request(4, 4, 20, 1));
        let events = drain(&mut engine);
        let ids: Vec<EngineEvent> = events.iter().map(|(_, event)| *event).collect();
        assert_eq!(ids, [first(4, 0), finished(4), first(3, 80), finished(3)]);
        assert!(events[2].0 > start + Nanos::from_millis(100), "after its load");
        assert_eq!((engine.stats().cpu_hit_tokens, engine.stats().prefix_hit_tokens), (48, 32));
    }

    #[test]
    fn without_overlap_the_step_waits_for_the_host() {
        let tier = CpuTier { latency_s: 0.1, overlap: false, ..CpuTier::new(100) };
        let mut engine = Engine::new(EngineConfig { cpu_tier: Some(tier), ..config(7) });
        serve(&mut engine, [request(1, 1, 96, 1)]);
        serve(&mut engine, [request(2, 2, 96, 1)]);
        let start = Nanos::from_secs(9);
        engine.enqueue(start, request(3, 1, 96, 1));
        assert!(engine.next_deadline().unwrap() > start + Nanos::from_millis(100));
        assert_eq!(drain(&mut engine)[0].1, first(3, 80));
    }

    #[test]
    fn keys_and_values_from_elsewhere_need_blocks_and_time_but_no_computation() {
        let mut engine = Engine::new(config(100));
        let remote = |id, ready_at| EngineRequest {
            remote: Some(Remote { tokens: 200, ready_at }),
            ..request(id, id, 100, 2)
        };
        engine.enqueue(Nanos::ZERO, remote(1, Nanos::from_secs(2)));
        engine.enqueue(Nanos::ZERO, remote(2, Nanos::MAX));
        assert_eq!(engine.stats().kv_blocks_used, 14);
        let events = drain(&mut engine);
        let allocated = |id| EngineEvent::Allocated { id, tokens: 99 };
        assert_eq!(events[..2], [(Nanos::ZERO, allocated(1)), (Nanos::ZERO, allocated(2))]);
        assert_eq!(events.len(), 5, "the second one waits for word");
        assert!(events[2].0 > Nanos::from_secs(2));
        assert!(!engine.ready(Nanos::from_secs(3), 1, Nanos::from_secs(3)), "it is over");
        assert!(engine.ready(Nanos::from_secs(3), 2, Nanos::from_secs(4)));
        assert_eq!(engine.next_deadline(), Some(Nanos::from_secs(4)));
        assert_eq!(drain(&mut engine).len(), 3);
        let stats = engine.stats();
        assert_eq!((stats.computed_tokens, stats.remote_tokens, stats.kv_blocks_used), (4, 198, 0));
    }

    #[test]
    fn prompts_first_means_that_answers_wait() {
        let batching = Batching::PrefillFirst;
        let mut engine = Engine::new(EngineConfig { batching, ..config(100) });
        let events = serve(&mut engine, [request(1, 1, 10, 4), request(2, 2, 200, 2)]);
        let expected =
            [first(1, 0), first(2, 0), token(1), token(2), finished(2), token(1), token(1), finished(1)];
        assert_eq!(events, expected);
    }

    #[test]
    fn tokens_are_told_as_often_as_was_asked_and_the_rest_at_the_end() {
        for (token_every, expected) in [(0, vec![]), (3, vec![3, 3, 1]), (7, vec![7]), (9, vec![7])] {
            let mut engine = Engine::new(EngineConfig { token_every, ..config(100) });
            let events = serve(&mut engine, [request(1, 1, 10, 8)]);
            let told: Vec<u32> = events
                .iter()
                .filter_map(|event| match event {
                    EngineEvent::Tokens { count, .. } => Some(*count),
                    _ => None,
                })
                .collect();
            assert_eq!(told, expected, "every {token_every}");
        }
    }

    #[test]
    fn a_request_that_can_never_run_is_rejected_at_once() {
        let mut engine = Engine::new(config(4));
        let now = Nanos::from_secs(3);
        engine.enqueue(now, request(1, 1, 0, 5));
        engine.enqueue(now, request(2, 1, 60, 5));
        engine.enqueue(
            now,
            EngineRequest { prompt_tokens: u32::MAX, output_tokens: u32::MAX, ..request(3, 1, 1, 1) },
        );
        assert_eq!(engine.next_deadline(), Some(now));
        engine.enqueue(now, request(4, 1, 60, 4));
        engine.enqueue(now, request(4, 1, 1, 1));
        let mut rejected = Vec::new();
        engine.advance(now, &mut rejected);
        let ids: Vec<u64> = rejected
            .iter()
            .filter_map(|(at, event)| match event {
                EngineEvent::Rejected { id, .. } if *at == now => Some(*id),
                _ => None,
            })
            .collect();
        assert_eq!(ids, [1, 2, 3, 4]);
        assert_eq!(drain(&mut engine).last().map(|(_, event)| *event), Some(finished(4)));
    }

    #[test]
    fn a_request_without_output_ends_with_its_prompt() {
        let mut engine = Engine::new(config(100));
        assert_eq!(serve(&mut engine, [request(1, 1, 100, 0)]), [finished(1)]);
        assert_eq!((engine.stats().computed_tokens, engine.stats().generation_tokens), (100, 0));
    }

    #[test]
    fn an_engine_that_ran_dry_serves_the_next_request_when_it_arrives() {
        let mut engine = Engine::new(config(100));
        serve(&mut engine, [request(1, 1, 20, 1)]);
        let at = Nanos::from_secs(9);
        engine.enqueue(at, request(2, 1, 20, 1));
        let [(first_at, _), (end, _)] = drain(&mut engine)[..] else { panic!("a token and an end") };
        assert!(at < first_at && first_at == end && end < at + Nanos::from_secs(1));
    }

    #[test]
    fn limits_of_zero_count_as_one() {
        let zero = EngineConfig {
            block_tokens: 0,
            blocks: 0,
            max_num_seqs: 0,
            max_num_batched_tokens: 0,
            ..config(0)
        };
        let mut engine = Engine::new(zero);
        let events = serve(&mut engine, [request(1, 1, 1, 0), request(2, 2, 1, 1)]);
        assert!(matches!(events[..], [EngineEvent::Rejected { id: 2, .. }, EngineEvent::Finished { id: 1 }]));
    }

    #[test]
    fn defaults_are_those_of_vllm() {
        let of = |name| EngineConfig::vllm(TimingModel::preset(name).unwrap(), 16, 0.9);
        let (a100, h100) = (of("qwen2.5-7b@a100"), of("qwen3-32b@h100x2"));
        assert_eq!((a100.max_num_seqs, a100.max_num_batched_tokens), (256, 2048));
        assert_eq!((h100.max_num_seqs, h100.max_num_batched_tokens), (1024, 8192));
        assert_eq!(u64::from(h100.blocks), h100.timing.kv_capacity_tokens(0.9) / 16);
    }

    #[derive(Clone, Debug)]
    struct Arrival {
        after_ms: u64,
        text: u64,
        prompt_tokens: u32,
        output_tokens: u32,
        cancel_after_ms: Option<u64>,
        /// Tokens that come from elsewhere, and when.
        remote: Option<(u32, u64)>,
        /// Whether its answer is the same as that of others with its text.
        same_answer: bool,
    }

    impl Arrival {
        /// As a request in which everything that can happen may happen.
        fn request(&self, id: u64) -> EngineRequest {
            let mut request = request(id, self.text, self.prompt_tokens, self.output_tokens);
            request.remote =
                self.remote.map(|(tokens, ms)| Remote { tokens, ready_at: Nanos::from_millis(ms) });
            if self.same_answer {
                request.output_seed = self.text << 32 | u64::from(self.prompt_tokens);
            }
            request
        }
    }

    fn any_config() -> impl Strategy<Value = EngineConfig> {
        let tier = (0u32..40, 0.0..0.02, any::<bool>()).prop_map(|(blocks, latency_s, overlap)| CpuTier {
            latency_s,
            overlap,
            ..CpuTier::new(blocks)
        });
        let eviction = prop_oneof![
            4 => Just(Eviction::Lru),
            1 => Just(Eviction::Lfu),
            1 => Just(Eviction::SessionLru),
            1 => Just(Eviction::Infinite),
        ];
        let tier = prop::option::weighted(0.3, tier);
        let sizes = (4u32..60, prop_oneof![Just(16u32), 1u32..40], 1u32..12, 4u32..100);
        (sizes, 0u32..5, eviction, tier, any::<bool>()).prop_map(
            |(
                (blocks, block_tokens, max_num_seqs, max_num_batched_tokens),
                token_every,
                eviction,
                cpu_tier,
                mixed,
            )| {
                EngineConfig {
                    block_tokens,
                    max_num_seqs,
                    max_num_batched_tokens,
                    token_every,
                    eviction,
                    cpu_tier,
                    batching: if mixed { Batching::Mixed } else { Batching::PrefillFirst },
                    ..config(blocks)
                }
            },
        )
    }

    fn arrival() -> impl Strategy<Value = Arrival> {
        let cancel = prop::option::weighted(0.2, 0u64..400);
        let remote = prop::option::weighted(0.2, (0u32..200, 0u64..800));
        (0u64..40, 0u64..4, 0u32..150, 0u32..60, cancel, remote, any::<bool>()).prop_map(
            |(after_ms, text, prompt_tokens, output_tokens, cancel_after_ms, remote, same_answer)| Arrival {
                after_ms,
                text,
                prompt_tokens,
                output_tokens,
                cancel_after_ms,
                remote,
                same_answer,
            },
        )
    }

    /// Arrivals and cancellations in order of time: when, whose, and whether it is a cancellation.
    fn script(arrivals: &[Arrival]) -> Vec<(Nanos, u64, bool)> {
        let mut script = Vec::new();
        let mut at = Nanos::ZERO;
        for (id, arrival) in (0u64..).zip(arrivals) {
            at += Nanos::from_millis(arrival.after_ms);
            script.push((at, id, false));
            if let Some(after_ms) = arrival.cancel_after_ms {
                script.push((at + Nanos::from_millis(after_ms), id, true));
            }
        }
        script.sort_by_key(|(at, ..)| *at);
        script
    }

    /// Every computed token has a block, waiting sequences hold none, and the sums over the batch are right.
    #[track_caller]
    fn check_blocks(engine: &Engine) {
        let of = |at: &u32| &engine.sequences[*at as usize];
        assert!(engine.waiting.iter().map(of).all(|waiter| waiter.blocks.is_empty() && waiter.computed == 0));
        let (mut held, mut contexts) = (0, Vec::new());
        for Seat { at, order } in &engine.running {
            let sequence = of(at);
            assert_eq!(sequence.order, *order);
            let decoded = sequence.context(engine.tick);
            contexts.extend(decoded);
            let computed = match decoded {
                Some(context) => context + u32::from(engine.decodes),
                None => sequence.computed + sequence.chunk,
            };
            let needed = computed.div_ceil(engine.config.block_tokens) as usize;
            if sequence.request.remote.is_none() && engine.config.cpu_tier.is_none() {
                assert_eq!(sequence.blocks.len(), needed, "every computed token has its place");
            }
            assert!(sequence.blocks.len() >= needed);
            held += sequence.blocks.len();
        }
        held += engine.loading.iter().map(|at| of(at).blocks.len()).sum::<usize>();
        assert!(engine.pool.used() as usize <= held && engine.pool.used() <= engine.pool.capacity());
        assert_eq!(engine.decoding as usize, contexts.len());
        assert_eq!(engine.context, contexts.iter().map(|context| u64::from(*context)).sum::<u64>());
    }

    /// Plays arrivals and cancellations in order of time, then runs dry. Checks the blocks at every point.
    fn play(arrivals: &[Arrival], config: EngineConfig) -> (Vec<(Nanos, EngineEvent)>, Vec<u64>, Engine) {
        let mut engine = Engine::new(config);
        let (mut out, mut cancelled) = (Vec::new(), Vec::new());
        for (at, id, cancel) in script(arrivals) {
            engine.advance(at, &mut out);
            if !cancel {
                let Arrival { text, prompt_tokens, output_tokens, .. } = arrivals[id as usize];
                engine.enqueue(at, request(id, text, prompt_tokens, output_tokens));
            } else if engine.cancel(at, id) {
                cancelled.push(id);
            }
            check_blocks(&engine);
        }
        engine.advance(Nanos::MAX, &mut out);
        (out, cancelled, engine)
    }

    proptest! {
        /// Invariant: In the engine model every request ends exactly once, every token and block is accounted for,
        /// and the same arrivals give the same events.
        ///
        /// Also held by `blocks_are_conserved_and_used_ones_are_exactly_the_held_ones`,
        /// `the_same_arrivals_give_the_same_events`.
        #[test]
        fn every_request_ends_exactly_once_and_every_token_is_accounted_for(
            arrivals in prop::collection::vec(arrival(), 1..40),
            blocks in 4u32..40,
        ) {
            let (events, cancelled, engine) = play(&arrivals, config(blocks));
            prop_assert!(events.is_sorted_by_key(|(at, _)| *at));
            let mut ends: Map<u64, u32> = Map::default();
            let mut tokens: Map<u64, u32> = Map::default();
            cancelled.iter().for_each(|id| *ends.entry(*id).or_default() += 1);
            for (_, event) in &events {
                match event {
                    EngineEvent::Finished { id } | EngineEvent::Rejected { id, .. } => *ends.entry(*id).or_default() += 1,
                    EngineEvent::FirstToken { id, .. } => {
                        prop_assert!(tokens.insert(*id, 1).is_none(), "one first token");
                    }
                    EngineEvent::Tokens { id, count } => {
                        *tokens.get_mut(id).expect("a first token comes first") += count;
                    }
                    EngineEvent::Allocated { .. } => prop_assert!(false, "nothing comes from elsewhere"),
                }
            }
            for id in 0..arrivals.len() as u64 {
                prop_assert_eq!(ends.get(&id).copied(), Some(1), "request {}", id);
                if events.iter().any(|(_, event)| *event == (EngineEvent::Finished { id })) {
                    let expected = arrivals[id as usize].output_tokens;
                    prop_assert_eq!(tokens.get(&id).copied().unwrap_or(0), expected);
                }
            }
            let stats = engine.stats();
            prop_assert_eq!(stats.generation_tokens, tokens.values().map(|n| u64::from(*n)).sum::<u64>());
            prop_assert_eq!((stats.kv_blocks_used, stats.running, stats.waiting), (0, 0, 0));
            if cancelled.is_empty() {
                let needed: u64 = arrivals
                    .iter()
                    .filter(|a| a.prompt_tokens > 0 && a.prompt_tokens + a.output_tokens <= blocks * 16)
                    .map(|a| u64::from(a.prompt_tokens + a.output_tokens.saturating_sub(1)))
                    .sum();
                prop_assert_eq!(
                    stats.computed_tokens + stats.prefix_hit_tokens + stats.late_hit_tokens,
                    needed + stats.recomputed_tokens
                );
            }
        }

        /// Invariant: The engine model equals a plainly written scheduler, event for event.
        #[test]
        fn it_does_what_the_plain_scheduler_does(
            arrivals in prop::collection::vec(arrival(), 1..60),
            config in any_config(),
        ) {
            let script = script(&arrivals);
            let (mut engine, mut plain) = (Engine::new(config.clone()), PlainEngine::new(config.clone()));
            let (mut out, mut expected) = (Vec::new(), Vec::new());
            for (at, id, cancel) in script {
                let request = arrivals[id as usize].request(id);
                if cancel {
                    prop_assert_eq!(engine.cancel(at, id), plain.cancel(at, id));
                } else if request.prompt_tokens > 0
                    && request.prompt_tokens + request.output_tokens <= config.blocks * config.block_tokens
                {
                    engine.enqueue(at, request.clone());
                    plain.enqueue(at, request);
                }
                engine.advance(at, &mut out);
                plain.advance(at, &mut expected);
                check_blocks(&engine);
                prop_assert_eq!(engine.stats(), plain.stats());
            }
            engine.advance(Nanos::MAX, &mut out);
            plain.advance(Nanos::MAX, &mut expected);
            for (index, pair) in out.iter().zip(&expected).enumerate() {
                prop_assert_eq!(pair.0, pair.1, "event {} of {}", index, expected.len());
            }
            prop_assert_eq!(out.len(), expected.len());
            prop_assert_eq!(engine.stats(), plain.stats());
        }

        #[test]
        fn events_of_the_cache_are_in_order_and_tell_exactly_what_it_holds(
            arrivals in prop::collection::vec(arrival(), 1..40),
            config in any_config(),
        ) {
            let mut engine = Engine::new(EngineConfig { kv_events: true, ..config });
            let (mut out, mut told) = (Vec::new(), Vec::new());
            for (at, id, cancel) in script(&arrivals) {
                if cancel {
                    engine.cancel(at, id);
                } else {
                    engine.enqueue(at, arrivals[id as usize].request(id));
                }
                if id % 16 == 7 {
                    engine.reset_prefix_cache();
                }
            }
            engine.advance(Nanos::MAX, &mut out);
            engine.take_kv_events(&mut told);
            prop_assert!(told.is_sorted_by_key(|(at, _)| *at));
            let mut known = <[BTreeSet<BlockHash>; 2]>::default();
            for (_, event) in told {
                match event {
                    KvEvent::Stored { blocks, tier, .. } => {
                        known[tier as usize].extend(blocks.iter().map(|block| block.hash));
                    }
                    KvEvent::Copied { blocks, tier } => {
                        blocks.iter().for_each(|name| {
                            assert!(known[0].contains(&BlockHash(name.0)));
                            assert!(known[tier as usize].insert(BlockHash(name.0)));
                        });
                    }
                    KvEvent::Removed { blocks, tier } => {
                        blocks.iter().for_each(|name| { known[tier as usize].remove(&BlockHash(name.0)); });
                    }
                    KvEvent::Cleared => known = Default::default(),
                }
            }
            prop_assert_eq!(known, engine.pool.findable());
        }

        #[test]
        fn nothing_is_told_before_it_was_to_be_quiet(
            arrivals in prop::collection::vec(arrival(), 1..40),
            config in any_config(),
        ) {
            let mut script = script(&arrivals).into_iter().peekable();
            let (mut engine, mut all) = (Engine::new(config.clone()), Engine::new(config));
            let (mut out, mut expected) = (Vec::new(), Vec::new());
            loop {
                let (quiet, next) = (engine.quiet_until(), script.peek().map(|(at, ..)| *at));
                match (quiet, next) {
                    (Some(quiet), next) if next.is_none_or(|next| quiet <= next) => {
                        let before = out.len();
                        engine.advance(quiet, &mut out);
                        prop_assert!(out[before..].iter().all(|(at, _)| *at == quiet));
                    }
                    (_, Some(_)) => {
                        let (at, id, cancel) = script.next().expect("it was there");
                        for engine in [&mut engine, &mut all] {
                            if cancel {
                                engine.cancel(at, id);
                            } else {
                                engine.enqueue(at, arrivals[id as usize].request(id));
                            }
                        }
                    }
                    (None, None) => break,
                    (Some(_), None) => unreachable!("nothing is later than never"),
                }
            }
            all.advance(Nanos::MAX, &mut expected);
            prop_assert_eq!(out, expected);
        }

        /// Invariant: Every simulated token is computed, cached or transferred, and no cache hits more than one that
        /// never evicts.
        ///
        /// Also held by `hits_never_exceed_what_a_cache_that_never_forgets_would_have`.
        #[test]
        fn tokens_are_computed_found_or_sent_and_only_stored_tokens_are_found(
            arrivals in prop::collection::vec(arrival(), 1..40),
            config in any_config(),
        ) {
            let mut engine = Engine::new(config.clone());
            let (mut seen, mut bound, mut needed) = (BTreeSet::new(), 0u64, 0u64);
            let block_tokens = config.block_tokens;
            let mut at = Nanos::ZERO;
            for (id, arrival) in (0u64..).zip(&arrivals) {
                at += Nanos::from_millis(arrival.after_ms);
                let request = arrival.request(id);
                let tokens = request.prompt_tokens + request.output_tokens;
                if request.prompt_tokens > 0 && tokens <= config.blocks * block_tokens {
                    let prompt = (0..(request.prompt_tokens - 1) / block_tokens).map(|index| request.block(index));
                    bound += prompt.take_while(|hash| seen.contains(hash)).count() as u64;
                    seen.extend((0..tokens.div_ceil(block_tokens)).map(|index| request.block(index)));
                    needed += u64::from(tokens - u32::from(request.output_tokens > 0));
                }
                engine.enqueue(at, request);
            }
            engine.advance(Nanos::MAX, &mut Vec::new());
            let stats = engine.stats();
            let found = stats.prefix_hit_tokens + stats.cpu_hit_tokens;
            prop_assert!(found <= bound * u64::from(block_tokens), "a cache without end finds {}", bound);
            prop_assert_eq!(
                stats.computed_tokens + found + stats.remote_tokens + stats.late_hit_tokens,
                needed + stats.recomputed_tokens
            );
        }

        #[test]
        fn the_same_arrivals_give_the_same_events(
            arrivals in prop::collection::vec(arrival(), 1..30),
            blocks in 4u32..40,
        ) {
            let (a, _, _) = play(&arrivals, config(blocks));
            let (b, _, _) = play(&arrivals, config(blocks));
            prop_assert_eq!(a, b);
        }

        #[test]
        fn it_does_not_matter_how_often_time_is_told(
            arrivals in prop::collection::vec(arrival(), 1..20),
            every_us in 200u64..20_000,
        ) {
            let quiet: Vec<Arrival> =
                arrivals.iter().map(|a| Arrival { after_ms: 0, cancel_after_ms: None, ..a.clone() }).collect();
            let (expected, _, _) = play(&quiet, config(12));
            let mut engine = Engine::new(config(12));
            for (id, a) in (0u64..).zip(&quiet) {
                engine.enqueue(Nanos::ZERO, request(id, a.text, a.prompt_tokens, a.output_tokens));
            }
            let (mut now, mut out) = (Nanos::ZERO, Vec::new());
            while engine.next_deadline().is_some() {
                engine.advance(now, &mut out);
                now += Nanos::from_micros(every_us);
            }
            prop_assert_eq!(out, expected);
        }
    }
}
