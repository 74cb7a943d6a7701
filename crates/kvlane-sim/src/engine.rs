//! Continuous batching, one step at a time, after vLLM V1's scheduler (`vllm/v1/core/sched/scheduler.py`).
//!
//! A step gives tokens of its budget to the running sequences in the order of their admission, one to each that
//! decodes and a chunk to each whose prompt is still being computed, then admits waiting requests first come, first
//! served, until budget, seats or blocks run out; the head of the queue blocks the rest. When a running sequence
//! finds no block, the last admitted one is preempted: it gives up all its blocks, returns to the head of the queue
//! and later recomputes what the cache no longer holds. The step's shape gives its length through the timing model.
//!
//! A request leaves in exactly one of three ways: finished, rejected, cancelled.

use std::collections::VecDeque;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashSet;
use kvlane_core::block::BlockHash;
use kvlane_core::time::Nanos;
use kvlane_core::timing::{StepShape, TimingModel};

use crate::pool::{BlockId, BlockPool};

/// Longest queue; requests beyond it are rejected.
const WAITING_MAX: usize = 100_000;

/// Size and speed of one engine. Zero counts are taken as one.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// How long a step takes.
    pub timing: TimingModel,
    /// Tokens in a KV block; vLLM's default is 16.
    pub block_tokens: u32,
    /// KV blocks in the cache.
    pub blocks: u32,
    /// Most sequences in one step.
    pub max_num_seqs: u32,
    /// Most tokens in one step.
    pub max_num_batched_tokens: u32,
}

/// One request as an engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRequest {
    /// Chosen by the driver, unique among the requests in flight.
    pub id: u64,
    /// Chained hashes of the prompt's full blocks. Blocks beyond those given are its own, see [`own_block`]; a prompt
    /// that shares nothing needs none.
    pub prompt_blocks: Arc<[BlockHash]>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Answer length in tokens; 0 computes the prompt and ends, like an embedding.
    pub output_tokens: u32,
    /// Stands for all text beyond `prompt_blocks`: requests that agree in it and in those blocks are the same text,
    /// answer included, and find each other's.
    pub output_seed: u64,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Its prompt is computed and its first token is out.
    FirstToken {
        /// The request.
        id: u64,
        /// Prompt tokens found in the cache when it was first admitted.
        cached_tokens: u32,
    },
    /// Further tokens are out; the first is not among them.
    Tokens {
        /// The request.
        id: u64,
        /// How many.
        count: u32,
    },
    /// It is over; its blocks are free.
    Finished {
        /// The request.
        id: u64,
    },
    /// It was never admitted.
    Rejected {
        /// The request.
        id: u64,
        /// Why not.
        why: &'static str,
    },
}

/// Counters and gauges of an engine. Counters run from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Sequences admitted and not over.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Blocks that a sequence holds.
    pub kv_blocks_used: u32,
    /// All blocks.
    pub kv_blocks: u32,
    /// Prompt tokens looked up in the cache, once for each request.
    pub prefix_queried_tokens: u64,
    /// Those that were found.
    pub prefix_hit_tokens: u64,
    /// Times a sequence was preempted.
    pub preemptions: u64,
    /// Prompt tokens of requests whose prompt is computed, cached ones included.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub generation_tokens: u64,
    /// Tokens that went through the model.
    pub computed_tokens: u64,
    /// Those that had gone through it before, for the same request, and were lost to preemption.
    pub recomputed_tokens: u64,
    /// Tokens that preempted sequences, once readmitted, found in the cache without having computed them before.
    pub late_hit_tokens: u64,
    /// Steps ended.
    pub steps: u64,
    /// Time spent in steps.
    pub busy: Nanos,
}

/// One engine.
#[derive(Clone, Debug)]
pub struct Engine {
    config: EngineConfig,
    pool: BlockPool,
    /// In the order of admission.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    in_flight: HashSet<u64, FixedState>,
    /// End of the step in progress.
    step_end: Option<Nanos>,
    /// The latest time at which something happened.
    now: Nanos,
    /// What happened since the driver last asked.
    events: Vec<(Nanos, EngineEvent)>,
    counters: EngineStats,
}

/// A request on its way through the engine.
#[derive(Clone, Debug)]
struct Sequence {
    request: EngineRequest,
    /// Output tokens so far.
    generated: u32,
    /// Tokens, of prompt and answer, whose keys and values are in `blocks`.
    computed: u32,
    /// The most `computed` has been.
    computed_max: u32,
    /// Tokens of the step in progress.
    chunk: u32,
    /// Prompt tokens found at the first admission, once there was one.
    cached_tokens: Option<u32>,
    blocks: Vec<BlockId>,
}

// === impl EngineConfig ===

impl EngineConfig {
    /// What vLLM would choose for this model and machine: all memory up to `memory_share` for the cache, and the
    /// batch limits of `get_batch_defaults` (`vllm/engine/arg_utils.py`) for the API server.
    pub fn vllm(timing: TimingModel, block_tokens: u32, memory_share: f64) -> Self {
        let block_tokens = block_tokens.max(1);
        let blocks = timing.kv_capacity_tokens(memory_share) / u64::from(block_tokens);
        let large = timing.hardware.name != "a100" && timing.hardware.memory_bytes >= 70.0 * 1_073_741_824.0;
        let (max_num_seqs, max_num_batched_tokens) = if large { (1024, 8192) } else { (256, 2048) };
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Self { timing, block_tokens, blocks, max_num_seqs, max_num_batched_tokens }
    }
}

// === impl EngineRequest ===

impl EngineRequest {
    /// The hash of block `index` of prompt and answer together.
    pub fn block(&self, index: u32) -> BlockHash {
        match self.prompt_blocks.get(index as usize) {
            Some(hash) => *hash,
            None => own_block(self.output_seed, index),
        }
    }
}

/// The hash of block `index` of a sequence, counted from the beginning of its prompt, if the block is its own: not among
/// the prompt blocks that were given. A later turn whose prompt continues this sequence names its blocks by this
/// function, the answer's too.
pub fn own_block(output_seed: u64, index: u32) -> BlockHash {
    BlockHash(mix(mix(output_seed) ^ u64::from(index)))
}

/// SplitMix64's finaliser (Steele, Lea and Flood, 2014): a bijection whose output bits all depend on all input bits.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

// === impl Sequence ===

impl Sequence {
    /// Tokens to compute until the next output token is known.
    fn target(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }

    /// Hashes of the blocks it may take from a cache: full ones, and never all tokens, for the last one's output is
    /// wanted.
    fn reusable(&self, block_tokens: u32) -> impl Iterator<Item = BlockHash> {
        let blocks = (self.target() - 1) / block_tokens;
        (0..blocks).map(|index| self.request.block(index))
    }

    /// Blocks it lacks for `tokens` tokens.
    fn missing(&self, tokens: u32, block_tokens: u32) -> u32 {
        tokens.div_ceil(block_tokens).saturating_sub(self.blocks.len() as u32)
    }
}

// === impl Engine ===

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(mut config: EngineConfig) -> Self {
        for limit in [
            &mut config.block_tokens,
            &mut config.blocks,
            &mut config.max_num_seqs,
            &mut config.max_num_batched_tokens,
        ] {
            *limit = (*limit).max(1);
        }
        Self {
            pool: BlockPool::new(config.blocks),
            config,
            running: Vec::new(),
            waiting: VecDeque::new(),
            in_flight: HashSet::default(),
            step_end: None,
            now: Nanos::ZERO,
            events: Vec::new(),
            counters: EngineStats::default(),
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
        } else if self.in_flight.contains(&id) {
            Some("a request with this id is in flight")
        } else {
            None
        };
        if let Some(why) = why {
            self.events.push((self.now, EngineEvent::Rejected { id, why }));
            return;
        }
        self.in_flight.insert(id);
        self.waiting.push_back(Sequence {
            request,
            generated: 0,
            computed: 0,
            computed_max: 0,
            chunk: 0,
            cached_tokens: None,
            blocks: Vec::new(),
        });
        if self.step_end.is_none() {
            self.start_step(self.now);
        }
    }

    /// Forgets a request and frees its blocks; nothing more is told of it. False if it is not in flight. The step in
    /// progress takes as long as it would have.
    pub fn cancel(&mut self, now: Nanos, id: u64) -> bool {
        self.run(now);
        if !self.in_flight.remove(&id) {
            return false;
        }
        if let Some(at) = self.running.iter().position(|sequence| sequence.request.id == id) {
            let sequence = self.running.remove(at);
            self.pool.release(&sequence.blocks);
        } else {
            self.waiting.retain(|sequence| sequence.request.id != id);
        }
        true
    }

    /// When [`Engine::advance`] next has something to tell or to do; `None` while idle.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.events.first().map(|(at, _)| *at).or(self.step_end)
    }

    /// Runs every step that ends by `now` and appends what happened, in order of time. [`Nanos::MAX`] runs the engine
    /// dry; it is idle from the end of its last step.
    pub fn advance(&mut self, now: Nanos, out: &mut Vec<(Nanos, EngineEvent)>) {
        self.run(now);
        out.append(&mut self.events);
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            kv_blocks_used: self.pool.used(),
            kv_blocks: self.pool.capacity(),
            ..self.counters
        }
    }

    /// Prompt tokens of `request` that the cache holds.
    pub fn cached_tokens(&self, request: &EngineRequest) -> u32 {
        let blocks = request.prompt_tokens.saturating_sub(1) / self.config.block_tokens;
        self.pool.lookup((0..blocks).map(|index| request.block(index))).blocks * self.config.block_tokens
    }

    /// Makes the engine forget what it has cached; blocks in use stay in use.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget();
    }

    fn run(&mut self, now: Nanos) {
        while let Some(end) = self.step_end.filter(|end| *end <= now) {
            self.now = end;
            self.end_step(end);
            self.start_step(end);
        }
    }

    fn start_step(&mut self, now: Nanos) {
        let mut step = StepShape::default();
        let mut budget = self.config.max_num_batched_tokens;
        self.continue_running(&mut step, &mut budget);
        self.admit(&mut step, &mut budget);
        let tokens = self.config.max_num_batched_tokens - budget;
        self.step_end = (tokens > 0).then(|| {
            let length = Nanos::from_secs_f64(self.config.timing.step_secs(&step)).max(Nanos(1));
            self.counters.busy += length;
            now + length
        });
    }

    /// Gives tokens to the running sequences. One that has to be preempted is not admitted again in the same step: what
    /// it gave up is no longer free for all of it.
    fn continue_running(&mut self, step: &mut StepShape, budget: &mut u32) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[index];
            let chunk = (sequence.target() - sequence.computed).min(*budget);
            let missing = sequence.missing(sequence.computed + chunk, self.config.block_tokens);
            if self.pool.take_free(missing, &mut sequence.blocks) {
                self.compute(index, chunk, step);
                *budget -= chunk;
                index += 1;
            } else {
                self.preempt_last();
            }
        }
    }

    fn preempt_last(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        debug_assert_eq!(sequence.chunk, 0, "a sequence of the step in the making keeps its place");
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.computed = 0;
        self.waiting.push_front(sequence);
        self.counters.preemptions += 1;
    }

    /// Admits waiting requests, first come, first served, while there are tokens, seats and blocks for the whole of
    /// what is known of them.
    fn admit(&mut self, step: &mut StepShape, budget: &mut u32) {
        let block_tokens = self.config.block_tokens;
        while *budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(head) = self.waiting.front() else { return };
            let run = self.pool.lookup(head.reusable(block_tokens));
            let missing = head.target().div_ceil(block_tokens) - run.blocks;
            // Alone it always fits; `enqueue` has seen to that.
            if missing > self.pool.free().saturating_sub(run.idle) && !self.running.is_empty() {
                return;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let mut blocks = std::mem::take(&mut sequence.blocks);
            self.pool.take_cached(sequence.reusable(block_tokens), &mut blocks);
            sequence.blocks = blocks;
            let found = run.blocks * block_tokens;
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(found);
                self.counters.prefix_queried_tokens += u64::from(sequence.request.prompt_tokens);
                self.counters.prefix_hit_tokens += u64::from(found);
            } else {
                self.counters.late_hit_tokens += u64::from(found.saturating_sub(sequence.computed_max));
            }
            sequence.computed = found;
            sequence.computed_max = sequence.computed_max.max(found);
            let chunk = (sequence.target() - found).min(*budget);
            let missing = sequence.missing(found + chunk, block_tokens);
            let fits = self.pool.take_free(missing, &mut sequence.blocks);
            debug_assert!(fits, "admission has counted the blocks");
            self.running.push(sequence);
            self.compute(self.running.len() - 1, chunk, step);
            *budget -= chunk;
        }
    }

    /// Puts `chunk` tokens of a running sequence, whose blocks it has, into the step. Blocks they fill can be found
    /// from now on: a request admitted to the same step reads them as they are written.
    fn compute(&mut self, index: usize, chunk: u32, step: &mut StepShape) {
        let block_tokens = self.config.block_tokens;
        let sequence = &mut self.running[index];
        let (from, to) = (sequence.computed, sequence.computed + chunk);
        sequence.chunk = chunk;
        if sequence.generated > 0 && chunk == 1 && to == sequence.target() {
            step.add_decode(from);
        } else {
            step.add_prefill(from, chunk);
            step.finished_prefills += u32::from(to == sequence.target());
        }
        for block in from / block_tokens..to / block_tokens {
            self.pool.publish(sequence.blocks[block as usize], sequence.request.block(block));
        }
        self.counters.computed_tokens += u64::from(chunk);
        self.counters.recomputed_tokens += u64::from(sequence.computed_max.min(to).saturating_sub(from));
        sequence.computed_max = sequence.computed_max.max(to);
    }

    fn end_step(&mut self, end: Nanos) {
        let Self { running, pool, in_flight, events, counters, .. } = self;
        counters.steps += 1;
        running.retain_mut(|sequence| {
            sequence.computed += std::mem::take(&mut sequence.chunk);
            if sequence.computed < sequence.target() {
                return true;
            }
            let EngineRequest { id, prompt_tokens, output_tokens, .. } = sequence.request;
            if sequence.generated == 0 {
                counters.prompt_tokens += u64::from(prompt_tokens);
            }
            if output_tokens > 0 {
                counters.generation_tokens += 1;
                sequence.generated += 1;
                events.push((
                    end,
                    match sequence.generated {
                        1 => {
                            EngineEvent::FirstToken { id, cached_tokens: sequence.cached_tokens.unwrap_or(0) }
                        }
                        _ => EngineEvent::Tokens { id, count: 1 },
                    },
                ));
            }
            let over = sequence.generated >= output_tokens;
            if over {
                events.push((end, EngineEvent::Finished { id }));
                pool.release(&sequence.blocks);
                in_flight.remove(&id);
            }
            !over
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Map;
    use proptest::prelude::*;

    fn config(blocks: u32) -> EngineConfig {
        EngineConfig {
            timing: TimingModel::preset("qwen2.5-7b@a100").unwrap(),
            block_tokens: 16,
            blocks,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
        }
    }

    /// A request whose prompt is the first `prompt_tokens` tokens of the text called `text`.
    fn request(id: u64, text: u64, prompt_tokens: u32, output_tokens: u32) -> EngineRequest {
        let block = |index: u32| BlockHash(text << 32 | u64::from(index));
        let prompt_blocks = (0..prompt_tokens / 16).map(block).collect();
        EngineRequest { id, prompt_blocks, prompt_tokens, output_tokens, output_seed: id }
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
    fn a_prompt_without_hashes_is_its_own_and_found_by_who_continues_it() {
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
    fn a_preempted_sequence_goes_before_those_who_never_ran() {
        let mut engine = Engine::new(config(8));
        let events =
            serve(&mut engine, [request(1, 1, 32, 40), request(2, 2, 32, 40), request(3, 3, 100, 1)]);
        assert!(engine.stats().preemptions > 0);
        let ends: Vec<&EngineEvent> =
            events.iter().filter(|event| matches!(event, EngineEvent::Finished { .. })).collect();
        assert_eq!(ends, [&finished(1), &finished(2), &finished(3)]);
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
    }

    fn arrival() -> impl Strategy<Value = Arrival> {
        (0u64..40, 0u64..4, 0u32..150, 0u32..60, prop::option::weighted(0.2, 0u64..400)).prop_map(
            |(after_ms, text, prompt_tokens, output_tokens, cancel_after_ms)| Arrival {
                after_ms,
                text,
                prompt_tokens,
                output_tokens,
                cancel_after_ms,
            },
        )
    }

    /// Plays arrivals and cancellations in order of time, then runs dry. Checks the blocks at every point.
    fn play(arrivals: &[Arrival], config: EngineConfig) -> (Vec<(Nanos, EngineEvent)>, Vec<u64>, Engine) {
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
        let mut engine = Engine::new(config);
        let (mut out, mut cancelled) = (Vec::new(), Vec::new());
        for (at, id, cancel) in script {
            engine.advance(at, &mut out);
            if !cancel {
                let Arrival { text, prompt_tokens, output_tokens, .. } = arrivals[id as usize];
                engine.enqueue(at, request(id, text, prompt_tokens, output_tokens));
            } else if engine.cancel(at, id) {
                cancelled.push(id);
            }
            let held: usize = engine.running.iter().map(|sequence| sequence.blocks.len()).sum();
            assert!(engine.pool.used() as usize <= held && engine.pool.used() <= engine.pool.capacity());
            let empty =
                |sequence: &Sequence| sequence.blocks.is_empty() && sequence.computed + sequence.chunk == 0;
            assert!(engine.waiting.iter().all(empty), "who waits holds nothing");
            for sequence in &engine.running {
                let needed = (sequence.computed + sequence.chunk).div_ceil(16) as usize;
                assert_eq!(sequence.blocks.len(), needed, "every computed token has its place");
            }
        }
        engine.advance(Nanos::MAX, &mut out);
        (out, cancelled, engine)
    }

    proptest! {
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
