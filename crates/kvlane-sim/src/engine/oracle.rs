//! A straightforward implementation of the scheduler: every running sequence is visited in every step, the head of
//! the queue is checked in every step.

use std::collections::VecDeque;

use kvlane_core::time::Nanos;
use kvlane_core::timing::StepShape;

use super::config::{Batching, EngineConfig};
use super::request::{EngineEvent, EngineRequest, EngineStats};
use crate::pool::{BlockId, BlockPool, Eviction};
use crate::tier::HostTier;

#[derive(Clone, Debug)]
pub(super) struct PlainEngine {
    config: EngineConfig,
    pool: BlockPool,
    running: Vec<Plain>,
    waiting: VecDeque<Plain>,
    loading: Vec<Plain>,
    bus_free_at: Nanos,
    step_end: Option<Nanos>,
    now: Nanos,
    events: Vec<(Nanos, EngineEvent)>,
    counters: EngineStats,
}

#[derive(Clone, Debug)]
struct Plain {
    request: EngineRequest,
    generated: u32,
    computed: u32,
    computed_max: u32,
    coming: u32,
    ready_at: Nanos,
    chunk: u32,
    cached_tokens: Option<u32>,
    blocks: Vec<BlockId>,
    /// Its prompt, and the tokens it had to recompute, are computed.
    decodes: bool,
}

impl Plain {
    fn target(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }
}

impl PlainEngine {
    pub(super) fn new(config: EngineConfig) -> Self {
        let config = config.settled();
        let mut pool = BlockPool::with_eviction(config.blocks, config.eviction);
        if let Some(tier) = config.cpu_tier.filter(|_| config.eviction != Eviction::Infinite) {
            pool.set_host(HostTier::new(tier.blocks));
        }
        Self {
            pool,
            config,
            running: Vec::new(),
            waiting: VecDeque::new(),
            loading: Vec::new(),
            bus_free_at: Nanos::ZERO,
            step_end: None,
            now: Nanos::ZERO,
            events: Vec::new(),
            counters: EngineStats::default(),
        }
    }

    /// For requests that can be served, with unique ids.
    pub(super) fn enqueue(&mut self, now: Nanos, request: EngineRequest) {
        self.run(now);
        self.now = self.now.max(now);
        self.waiting.push_back(Plain {
            request,
            generated: 0,
            computed: 0,
            computed_max: 0,
            coming: 0,
            ready_at: Nanos::ZERO,
            chunk: 0,
            cached_tokens: None,
            blocks: Vec::new(),
            decodes: false,
        });
        if self.step_end.is_none() {
            self.start_step();
        }
    }

    pub(super) fn cancel(&mut self, now: Nanos, id: u64) -> bool {
        self.run(now);
        let mut all = self.running.iter().chain(&self.waiting).chain(&self.loading);
        let Some(held) = all.find(|s| s.request.id == id).map(|s| s.blocks.clone()) else { return false };
        self.pool.release(&held);
        self.running.retain(|s| s.request.id != id);
        self.waiting.retain(|s| s.request.id != id);
        self.loading.retain(|s| s.request.id != id);
        true
    }

    pub(super) fn advance(&mut self, now: Nanos, out: &mut Vec<(Nanos, EngineEvent)>) {
        self.run(now);
        out.append(&mut self.events);
    }

    pub(super) fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len() as u32,
            waiting: (self.waiting.len() + self.loading.len()) as u32,
            kv_blocks_used: self.pool.used(),
            kv_blocks: self.pool.capacity(),
            ..self.counters
        }
    }

    fn run(&mut self, now: Nanos) {
        loop {
            let ready = self.loading.iter().map(|s| s.ready_at).min();
            let Some(at) = self.step_end.or(ready).filter(|at| *at <= now && *at < Nanos::MAX) else {
                return;
            };
            self.now = self.now.max(at);
            if self.step_end.is_some() {
                self.end_step();
            }
            self.start_step();
        }
    }

    fn start_step(&mut self) {
        let (mut step, mut budget, mut stall_s) =
            (StepShape::default(), self.config.max_num_batched_tokens, 0.0);
        match self.config.batching {
            Batching::Mixed => {
                if !self.go_on(&mut step, &mut budget, |_| true) {
                    self.admit(&mut step, &mut budget, &mut stall_s);
                }
            }
            Batching::PrefillFirst => {
                if !self.go_on(&mut step, &mut budget, |s| !s.decodes) {
                    self.admit(&mut step, &mut budget, &mut stall_s);
                }
                if budget == self.config.max_num_batched_tokens {
                    self.go_on(&mut step, &mut budget, |s| s.decodes);
                }
            }
        }
        let held = u64::from(self.pool.used()) * u64::from(self.config.block_tokens);
        step.decode_shared_tokens = step.decode_context_tokens.saturating_sub(held);
        self.step_end = (budget < self.config.max_num_batched_tokens).then(|| {
            let length = Nanos::from_secs_f64(self.config.timing.step_secs(&step) + stall_s).max(Nanos(1));
            self.counters.busy += length;
            self.now + length
        });
    }

    /// True if a sequence was preempted.
    fn go_on(&mut self, step: &mut StepShape, budget: &mut u32, who: impl Fn(&Plain) -> bool) -> bool {
        let (mut index, before) = (0, self.counters.preemptions);
        while index < self.running.len() && *budget > 0 {
            let s = &mut self.running[index];
            if !who(s) {
                index += 1;
                continue;
            }
            let chunk = (s.target() - s.computed).min(*budget);
            let needed = (s.computed + chunk).div_ceil(self.config.block_tokens);
            if self.pool.take_free(needed.saturating_sub(s.blocks.len() as u32), &mut s.blocks) {
                self.compute(index, chunk, step);
                *budget -= chunk;
                index += 1;
            } else {
                let mut last = self.running.pop().expect("at least the one that needs a block");
                self.pool.release(&last.blocks);
                last.blocks.clear();
                last.computed = 0;
                last.decodes = false;
                self.waiting.push_front(last);
                self.counters.preemptions += 1;
            }
        }
        self.counters.preemptions > before
    }

    fn admit(&mut self, step: &mut StepShape, budget: &mut u32, stall_s: &mut f64) {
        let block_tokens = self.config.block_tokens;
        let seats = self.config.max_num_seqs as usize;
        while *budget > 0 && self.running.len() < seats {
            let Some(first) = self.loading.iter().position(|s| s.ready_at <= self.now) else { break };
            let s = self.loading.remove(first);
            self.seat(s, step, budget);
        }
        while *budget > 0 && self.running.len() < seats {
            let Some(head) = self.waiting.front() else { return };
            let hashes: Vec<_> =
                (0..(head.target() - 1) / block_tokens).map(|index| head.request.block(index)).collect();
            let mut found = Vec::new();
            let run = self.pool.find(hashes.iter().copied(), &mut found);
            if head.target().div_ceil(block_tokens) - run.held > self.pool.free() {
                return;
            }
            let mut s = self.waiting.pop_front().expect("a head");
            self.pool.hold(&found, |index| hashes[index as usize], &mut s.blocks);
            self.pool.touch_host(hashes[run.blocks as usize..][..run.host as usize].iter().copied());
            let (here, local) = (run.blocks * block_tokens, (run.blocks + run.host) * block_tokens);
            let mut total = local;
            s.ready_at = self.now;
            if s.cached_tokens.is_none() {
                if let Some(remote) = s.request.remote {
                    total = total.max(remote.tokens.min(s.target() - 1));
                    let event = EngineEvent::Allocated { id: s.request.id, tokens: total - local };
                    self.events.push((self.now, event));
                    if total > local {
                        s.ready_at = s.ready_at.max(remote.ready_at);
                    }
                }
                self.counters.prefix_queried_tokens += u64::from(s.request.prompt_tokens);
                self.counters.prefix_hit_tokens += u64::from(here);
                self.counters.cpu_hit_tokens += u64::from(local - here);
                self.counters.remote_tokens += u64::from(total - local);
                s.cached_tokens = Some(local);
            } else {
                self.counters.late_hit_tokens += u64::from(local.saturating_sub(s.computed_max));
            }
            s.computed = here;
            s.coming = total - here;
            s.computed_max = s.computed_max.max(total);
            if let Some(tier) = self.config.cpu_tier.filter(|_| run.host > 0) {
                let load_s = self.config.load_secs(run.host);
                if tier.overlap {
                    self.bus_free_at = self.bus_free_at.max(self.now) + Nanos::from_secs_f64(load_s);
                    s.ready_at = s.ready_at.max(self.bus_free_at);
                } else {
                    *stall_s += load_s;
                }
            }
            if s.ready_at <= self.now {
                self.seat(s, step, budget);
            } else {
                let missing = s.target().div_ceil(block_tokens) - s.blocks.len() as u32;
                assert!(self.pool.take_free(missing, &mut s.blocks));
                self.loading.push(s);
            }
        }
    }

    fn seat(&mut self, mut s: Plain, step: &mut StepShape, budget: &mut u32) {
        let block_tokens = self.config.block_tokens;
        let found = s.computed / block_tokens;
        s.computed += std::mem::take(&mut s.coming);
        let chunk = (s.target() - s.computed).min(*budget);
        let needed = (s.computed + chunk).div_ceil(block_tokens);
        assert!(self.pool.take_free(needed.saturating_sub(s.blocks.len() as u32), &mut s.blocks));
        for block in found..s.computed / block_tokens {
            self.pool.publish(s.blocks[block as usize], s.request.block(block), || None);
        }
        self.running.push(s);
        self.compute(self.running.len() - 1, chunk, step);
        *budget -= chunk;
    }

    fn compute(&mut self, index: usize, chunk: u32, step: &mut StepShape) {
        let block_tokens = self.config.block_tokens;
        let s = &mut self.running[index];
        let (from, to) = (s.computed, s.computed + chunk);
        if s.generated > 0 && chunk == 1 && to == s.target() {
            step.add_decode(from);
        } else {
            step.add_prefill(from, chunk);
            step.finished_prefills += u32::from(to == s.target());
        }
        s.chunk = chunk;
        for block in from / block_tokens..to / block_tokens {
            self.pool.publish(s.blocks[block as usize], s.request.block(block), || None);
        }
        self.counters.computed_tokens += u64::from(chunk);
        self.counters.recomputed_tokens += u64::from(s.computed_max.min(to).saturating_sub(from));
        s.computed_max = s.computed_max.max(to);
    }

    fn end_step(&mut self) {
        let Self { running, pool, events, counters, config, now, .. } = self;
        counters.steps += 1;
        running.retain_mut(|s| {
            let computed = std::mem::take(&mut s.chunk);
            s.computed += computed;
            if computed == 0 || s.computed < s.target() {
                return true;
            }
            let EngineRequest { id, prompt_tokens, output_tokens, .. } = s.request;
            if s.generated == 0 {
                counters.prompt_tokens += u64::from(prompt_tokens);
            }
            if output_tokens > 0 {
                counters.generation_tokens += 1;
                s.generated += 1;
            }
            s.decodes = true;
            let over = s.generated >= output_tokens;
            if s.generated == 1 {
                let cached_tokens = s.cached_tokens.expect("it was admitted");
                events.push((*now, EngineEvent::FirstToken { id, cached_tokens }));
            } else if s.generated > 1 && config.token_every > 0 {
                let untold = (s.generated - 2) % config.token_every + 1;
                if untold == config.token_every || over {
                    events.push((*now, EngineEvent::Tokens { id, count: untold }));
                }
            }
            if over {
                events.push((*now, EngineEvent::Finished { id }));
                pool.release(&s.blocks);
            }
            !over
        });
    }
}
