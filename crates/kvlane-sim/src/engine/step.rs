//! One step: distribution of tokens, duration, results.

use kvlane_core::time::Nanos;
use kvlane_core::timing::StepShape;

use super::config::Batching;
use super::request::EngineEvent;
use super::sequence::NOWHERE;
use super::wheel::Seat;
use super::{Engine, publish};
use crate::pool::Run;

/// A step under construction.
struct Draft {
    now: Nanos,
    shape: StepShape,
    /// Tokens left.
    budget: u32,
    /// Seconds for which it waits for host memory.
    stall_s: f64,
    /// Whether a sequence was preempted.
    preempted: bool,
}

// === impl Engine ===

impl Engine {
    /// Starts a step at `now`, if there is anything to compute.
    pub(super) fn start_step(&mut self, now: Nanos) {
        self.admit_adapters(now);
        let budget = self.config.max_num_batched_tokens;
        let mut draft = Draft { now, shape: StepShape::default(), budget, stall_s: 0.0, preempted: false };
        self.decodes = false;
        match self.config.batching {
            Batching::Mixed => {
                self.decode(&mut draft);
                self.prefill(&mut draft);
            }
            Batching::PrefillFirst => {
                self.prefill(&mut draft);
                if draft.budget == budget {
                    self.decode(&mut draft);
                }
            }
        }
        // Blocks are counted once, however many sequences read them.
        let held = u64::from(self.pool.used()) * u64::from(self.config.block_tokens);
        draft.shape.decode_shared_tokens = draft.shape.decode_context_tokens.saturating_sub(held);
        self.step_end = (draft.budget < budget).then(|| {
            let secs = self.cost.secs(&draft.shape) + draft.stall_s;
            let length = Nanos::from_secs_f64(secs * self.slowdown).max(Nanos(1));
            self.counters.busy += length;
            self.step_length = length;
            now + length
        });
        // Blocks may have been allocated for a transfer without a step that reports it.
        if self.step_end.is_none() {
            self.note_kv_events(now);
        }
    }

    /// Continues the partly computed prompt, then admits requests. The blocks of a preempted sequence may not suffice
    /// for it again, so a step with a preemption admits no request.
    fn prefill(&mut self, draft: &mut Draft) {
        self.continue_prompt(draft);
        if !draft.preempted {
            self.admit_loaded(draft);
            self.admit_waiting(draft);
        }
    }

    /// Gives each decoding sequence a token. Sequences that need a block or have something to report wake, in the
    /// order of admission; the others are not visited.
    fn decode(&mut self, draft: &mut Draft) {
        if self.decoding == 0 {
            return;
        }
        let mut woken = std::mem::take(&mut self.woken);
        self.wheel.swap(self.tick, &mut woken);
        woken.sort_unstable();
        for seat in woken.drain(..) {
            self.wake(seat, draft);
        }
        self.woken = woken;
        self.decodes = self.decoding > 0;
        draft.shape.decode_seqs = self.decoding;
        draft.shape.decode_context_tokens = self.context;
        draft.budget -= self.decoding;
        self.counters.computed_tokens += u64::from(self.decoding);
    }

    fn wake(&mut self, seat: Seat, draft: &mut Draft) {
        let (block_tokens, token_every) = (self.config.block_tokens, self.config.token_every);
        loop {
            let sequence = &mut self.sequences[seat.at as usize];
            let Some(context) = sequence.context(self.tick).filter(|_| sequence.order == seat.order) else {
                return;
            };
            if context == sequence.full_at(block_tokens) && !self.pool.take_free(1, &mut sequence.blocks) {
                self.preempt_last(draft);
                continue;
            }
            if context + 1 == sequence.full_at(block_tokens) {
                let index = sequence.blocks.len() as u32 - 1;
                publish(&mut self.pool, &mut self.gate, sequence, index);
            }
            let ends = context == sequence.end_at();
            if sequence.report(context, token_every) || ends {
                self.due.push(seat);
            }
            if !ends {
                let steps = sequence.wake_at(context + 1, block_tokens) - context;
                self.wheel.put(self.tick, steps, seat);
            }
            return;
        }
    }

    /// Gives the partly computed sequence its next chunk. There is at most one, and it was admitted last: no sequence
    /// is admitted after one that took all remaining tokens.
    fn continue_prompt(&mut self, draft: &mut Draft) {
        let Some(seat) = self.running.last().copied() else { return };
        let sequence = &mut self.sequences[seat.at as usize];
        if sequence.context(self.tick).is_some() {
            return;
        }
        let chunk = (sequence.target() - sequence.computed).min(draft.budget);
        let missing = sequence.missing(sequence.computed + chunk, self.config.block_tokens);
        if self.pool.take_free(missing, &mut sequence.blocks) {
            self.compute(seat, chunk, draft);
        } else {
            self.preempt_last(draft);
        }
    }

    fn preempt_last(&mut self, draft: &mut Draft) {
        let Some(Seat { at, .. }) = self.running.pop() else { return };
        self.leave(at);
        let sequence = &mut self.sequences[at as usize];
        debug_assert_eq!(sequence.chunk, 0, "a sequence of the step in the making keeps its place");
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.computed = 0;
        self.waiting.push_front(at);
        self.gate.open();
        self.counters.preemptions += 1;
        draft.preempted = true;
    }

    /// Ends a sequence's run: removes it from the batch's state.
    pub(super) fn leave(&mut self, at: u32) {
        let sequence = &mut self.sequences[at as usize];
        sequence.order = NOWHERE;
        if let Some(context) = sequence.stop(self.tick) {
            self.decoding -= 1;
            self.context -= u64::from(context);
        }
    }

    /// Seats sequences whose KV blocks have arrived, in the order in which they started to wait.
    fn admit_loaded(&mut self, draft: &mut Draft) {
        let mut index = 0;
        while index < self.loading.len() && self.has_seat(draft) {
            let at = self.loading[index];
            if self.sequences[at as usize].ready_at <= draft.now {
                self.loading.remove(index);
                self.seat(at, draft);
            } else {
                index += 1;
            }
        }
    }

    /// Admits queued requests, first come, first served, while there are tokens, seats and blocks for all of their
    /// known tokens.
    fn admit_waiting(&mut self, draft: &mut Draft) {
        let block_tokens = self.config.block_tokens;
        while self.has_seat(draft) && !self.gate.holds(self.pool.free()) {
            let Some(&at) = self.waiting.front() else { return };
            let head = &self.sequences[at as usize];
            self.found.clear();
            let run = self.pool.find(head.reusable(block_tokens), &mut self.found);
            let needs = head.target().div_ceil(block_tokens) - run.held;
            if needs > self.pool.free() {
                // Alone it always fits; `enqueue` has checked that.
                debug_assert!(self.pool.used() > 0, "a sequence holds the blocks");
                self.gate.close(needs, head.reusable(block_tokens));
                return;
            }
            self.waiting.pop_front();
            self.gate.open();
            self.allocate(at, run, draft);
        }
    }

    fn has_seat(&self, draft: &Draft) -> bool {
        draft.budget > 0 && self.running.len() < self.config.max_num_seqs as usize
    }

    /// Gives the head of the queue its cached blocks, and a seat unless it waits for further ones.
    fn allocate(&mut self, at: u32, run: Run, draft: &mut Draft) {
        let block_tokens = self.config.block_tokens;
        let Self { sequences, pool, counters, events, .. } = self;
        let sequence = &mut sequences[at as usize];
        let request = &sequence.request;
        pool.hold(&self.found, |index| request.block(index), &mut sequence.blocks);
        pool.touch_host((run.blocks..run.blocks + run.host).map(|index| request.block(index)));
        let (here, local) = (run.blocks * block_tokens, (run.blocks + run.host) * block_tokens);
        let (mut loaded_at, mut ready_at) = (draft.now, draft.now);
        let mut remote = 0;
        if sequence.cached_tokens.is_none() {
            if let Some(from) = request.remote {
                remote = from.tokens.min(sequence.target() - 1).saturating_sub(local);
                events.push((draft.now, EngineEvent::Allocated { id: request.id, tokens: remote }));
                if remote > 0 {
                    ready_at = from.ready_at;
                }
            }
            counters.prefix_queried_tokens += u64::from(request.prompt_tokens);
            counters.prefix_hit_tokens += u64::from(here);
            counters.cpu_hit_tokens += u64::from(local - here);
            counters.remote_tokens += u64::from(remote);
            sequence.cached_tokens = Some(local);
        } else {
            counters.late_hit_tokens += u64::from(local.saturating_sub(sequence.computed_max));
        }
        sequence.computed = here;
        sequence.coming = local - here + remote;
        sequence.computed_max = sequence.computed_max.max(local + remote);
        if run.host > 0 {
            let load_s = self.config.load_secs(run.host);
            if self.config.cpu_tier.is_some_and(|tier| tier.overlap) {
                self.bus_free_at = self.bus_free_at.max(draft.now) + Nanos::from_secs_f64(load_s);
                loaded_at = self.bus_free_at;
            } else {
                draft.stall_s += load_s;
            }
        }
        ready_at = ready_at.max(loaded_at);
        if ready_at <= draft.now {
            self.seat(at, draft);
            return;
        }
        // It waits with all its blocks, so only time stands between it and its seat.
        (sequence.loaded_at, sequence.ready_at) = (loaded_at, ready_at);
        let missing = sequence.missing(sequence.target(), block_tokens);
        let fits = pool.take_free(missing, &mut sequence.blocks);
        debug_assert!(fits, "admission has counted the blocks");
        self.loading.push(at);
    }

    /// Starts a sequence that has all blocks that it can get without computing.
    fn seat(&mut self, at: u32, draft: &mut Draft) {
        let block_tokens = self.config.block_tokens;
        self.order += 1;
        let Self { sequences, pool, gate, .. } = self;
        let sequence = &mut sequences[at as usize];
        sequence.order = self.order;
        let found = sequence.computed / block_tokens;
        sequence.computed += std::mem::take(&mut sequence.coming);
        let chunk = (sequence.target() - sequence.computed).min(draft.budget);
        let missing = sequence.missing(sequence.computed + chunk, block_tokens);
        let fits = pool.take_free(missing, &mut sequence.blocks);
        debug_assert!(fits, "admission has counted the blocks");
        for block in found..sequence.computed / block_tokens {
            publish(pool, gate, sequence, block);
        }
        let seat = sequence.seat(at);
        self.running.push(seat);
        self.compute(seat, chunk, draft);
    }

    /// Adds `chunk` tokens of a prompt, whose blocks its sequence has, to the step. Blocks that they fill can be
    /// found from now on: a request admitted to the same step reads them as they are written.
    fn compute(&mut self, seat: Seat, chunk: u32, draft: &mut Draft) {
        let block_tokens = self.config.block_tokens;
        let Self { sequences, pool, gate, counters, .. } = self;
        let sequence = &mut sequences[seat.at as usize];
        let (from, to) = (sequence.computed, sequence.computed + chunk);
        sequence.chunk = chunk;
        if sequence.generated > 0 && chunk == 1 && to == sequence.target() {
            draft.shape.add_decode(from);
        } else {
            draft.shape.add_prefill(from, chunk);
            draft.shape.finished_prefills += u32::from(to == sequence.target());
        }
        for block in from / block_tokens..to / block_tokens {
            publish(pool, gate, sequence, block);
        }
        counters.computed_tokens += u64::from(chunk);
        counters.recomputed_tokens += u64::from(sequence.computed_max.min(to).saturating_sub(from));
        sequence.computed_max = sequence.computed_max.max(to);
        draft.budget -= chunk;
        self.prompts.push(seat);
    }

    /// Emits the events of the step that ends at `end`.
    pub(super) fn end_step(&mut self, end: Nanos) {
        self.counters.steps += 1;
        if self.decodes {
            self.tick += 1;
            self.context += u64::from(self.decoding);
            self.counters.generation_tokens += u64::from(self.decoding);
        }
        let mut due = std::mem::take(&mut self.due);
        due.drain(..).for_each(|seat| self.tell(seat, end));
        self.due = due;
        let mut prompts = std::mem::take(&mut self.prompts);
        prompts.drain(..).for_each(|seat| self.end_chunk(seat, end));
        self.prompts = prompts;
        self.note_kv_events(end);
    }

    fn note_kv_events(&mut self, at: Nanos) {
        if self.config.kv_events {
            self.pool.drain_log(|event| self.kv_events.push((at, event)));
        }
    }

    /// Reports a decoding sequence's tokens, and its end if this was the last.
    fn tell(&mut self, seat: Seat, end: Nanos) {
        let sequence = &self.sequences[seat.at as usize];
        let Some(context) = sequence.context(self.tick).filter(|_| sequence.order == seat.order) else {
            return;
        };
        let generated = sequence.generated_at(context);
        self.report(seat, generated, end);
    }

    /// Reports the latest of `generated` tokens, if it is due, and ends the sequence if it is the last.
    fn report(&mut self, seat: Seat, generated: u32, end: Nanos) {
        let Self { sequences, events, .. } = self;
        let sequence = &sequences[seat.at as usize];
        let id = sequence.request.id;
        let over = generated >= sequence.request.output_tokens;
        if generated == 1 {
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            events.push((end, EngineEvent::FirstToken { id, cached_tokens }));
        } else if let Some(rest) = generated.saturating_sub(1).checked_rem(self.config.token_every) {
            let count = if rest == 0 { self.config.token_every } else { rest };
            if generated > 1 && (rest == 0 || over) {
                events.push((end, EngineEvent::Tokens { id, count }));
            }
        }
        if over {
            events.push((end, EngineEvent::Finished { id }));
            if let Ok(index) = self.running.binary_search(&seat) {
                self.running.remove(index);
            }
            self.leave(seat.at);
            self.forget(seat.at);
        }
    }

    /// Ends a chunk: the prompt's last chunk yields a token, and from then on the sequence decodes.
    fn end_chunk(&mut self, seat: Seat, end: Nanos) {
        let sequence = &mut self.sequences[seat.at as usize];
        if sequence.order != seat.order {
            return;
        }
        sequence.computed += std::mem::take(&mut sequence.chunk);
        if sequence.computed < sequence.target() {
            return;
        }
        if sequence.generated == 0 {
            self.counters.prompt_tokens += u64::from(sequence.request.prompt_tokens);
        }
        if sequence.request.output_tokens > 0 {
            sequence.generated += 1;
            self.counters.generation_tokens += 1;
        }
        let (generated, context) = (sequence.generated, sequence.computed);
        if generated < sequence.request.output_tokens {
            let steps = sequence.decode(self.tick, self.config.block_tokens, self.config.token_every);
            self.wheel.put(self.tick, steps, seat);
            self.decoding += 1;
            self.context += u64::from(context);
        }
        self.report(seat, generated, end);
    }
}
