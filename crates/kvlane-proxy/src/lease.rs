//! A request in flight at an endpoint: dropping the lease reports to the scheduler that it has ended, however it
//! ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvlane_core::cache_accuracy::ReportedReuse;
use kvlane_core::decision::Placement;
use kvlane_core::poison_prompts::{EngineDeath, PromptKey};
use kvlane_core::request::{AnswerEnd, RequestId, Slo};
use kvlane_core::scheduler::{Input, TOKENS_TOLD};
use kvlane_core::time::Nanos;
use kvlane_fleet::metrics::FailureKind;
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};
use kvlane_fleet::worker::Worker;
use kvlane_wire::sse::Usage;
use tokio::time::Instant;

use crate::attempt_trace::Attempt;
use crate::limits::Charge;
use crate::proxy::Proxy;
use crate::routed::Routed;

/// A request in flight at one worker.
pub struct Lease {
    proxy: Arc<Proxy>,
    pool: Arc<ModelPool>,
    /// The worker it is in flight at.
    pub worker: Arc<Worker>,
    /// The endpoint.
    pub endpoint: Arc<PoolEndpoint>,
    request: RequestId,
    /// The scheduler's decision.
    pub placement: Placement,
    prompt_tokens: u32,
    /// Whether its client asks for a stream, and whether it names a conversation.
    streams: bool,
    in_session: bool,
    received: Nanos,
    slo: Slo,
    /// When it was placed.
    pub placed: Nanos,
    /// The request's charge under the limits.
    charge: Option<Arc<Charge>>,
    /// The key of its prompt for counting engine deaths.
    prompt: PromptKey,
    /// Whether any part of it was sent to the worker.
    sent: AtomicBool,
    first_token: Option<Nanos>,
    tokens: u64,
    /// Output tokens not yet reported to the scheduler.
    untold: u32,
    /// Tokens of the answer that another worker wrote before, if it had begun.
    before: Option<u64>,
    /// Tokens of prompt and answer by the engine's count, if it has reported one.
    reported: Option<u64>,
    /// Its answer is not seen.
    passes_by: bool,
    /// Nothing is expected of its engine: its client is to go on.
    idles: AtomicBool,
    /// For a request that is split: its prefill leg, until its blocks have arrived.
    leg: Option<Box<Lease>>,
    /// For a prefill leg: when its prompt was computed, if that is seen.
    prefilled: Option<Nanos>,
    /// What the engine that computed the prompt reports: of a prefill leg, and then of its request.
    prefill_usage: Option<Usage>,
    /// The attempt in the trace.
    attempt: Option<Box<Attempt>>,
    /// What the scheduler learns of the whole answer, under one lock together with the request's end.
    outcome: Vec<Input>,
}

// === impl Lease ===

impl Lease {
    pub(crate) fn new(
        proxy: Arc<Proxy>,
        routed: &Routed,
        endpoint: Arc<PoolEndpoint>,
        request: RequestId,
        placement: Placement,
    ) -> Self {
        let worker = Arc::clone(&endpoint.worker);
        let placed = proxy.fleet.clock.now();
        endpoint.vitals.arrive(placed);
        endpoint.traffic.place();
        let attempt = Attempt::begin(&proxy, routed, &endpoint, &placement, placed);
        Self {
            attempt,
            proxy,
            pool: Arc::clone(&routed.served.pool),
            worker,
            endpoint,
            request,
            placement,
            prompt_tokens: routed.prompt_tokens,
            streams: routed.attributes.streams(),
            in_session: routed.attributes.session().is_some(),
            received: routed.received,
            slo: routed.attributes.slo(),
            placed,
            charge: routed.charge.clone(),
            prompt: routed.prompt,
            sent: AtomicBool::new(false),
            first_token: None,
            tokens: 0,
            untold: 0,
            before: None,
            reported: None,
            passes_by: false,
            idles: AtomicBool::new(false),
            leg: None,
            prefilled: None,
            prefill_usage: None,
            outcome: Vec::new(),
        }
    }

    /// The gateway that placed it.
    pub fn proxy(&self) -> &Arc<Proxy> {
        &self.proxy
    }

    /// The attempt in the trace.
    pub fn attempt(&self) -> Option<&Attempt> {
        self.attempt.as_deref()
    }

    /// Records in the trace that the attempt failed.
    pub fn trace_failure(&self, why: &'static str) {
        if let Some(attempt) = &self.attempt {
            attempt.failed(why);
        }
    }

    /// Its pool.
    pub fn pool(&self) -> &Arc<ModelPool> {
        &self.pool
    }

    /// This lease with its prefill leg.
    pub(crate) fn with_leg(mut self, leg: Option<Self>) -> Self {
        self.leg = leg.map(|mut leg| {
            // The client is charged once.
            leg.charge = None;
            if let (Some(first), Some(second)) = (&mut leg.attempt, &mut self.attempt) {
                first.computes();
                second.decodes(&leg.endpoint.name);
            }
            self.pool.metrics.splits.inc();
            Box::new(leg)
        });
        self
    }

    /// Whether its client asks for a stream.
    pub(crate) fn streams(&self) -> bool {
        self.streams
    }

    /// Whether the scheduler has a use for how its answer ends.
    pub(crate) fn wants_end(&self) -> bool {
        self.in_session && self.pool.router.may_wait()
    }

    /// Whether another worker computes its prompt.
    pub fn is_split(&self) -> bool {
        self.placement.prefill.is_some()
    }

    /// Whether its answer waits for blocks from another worker; unknown where a sidecar sends the prefill leg.
    pub(crate) fn awaits_blocks(&self) -> bool {
        self.leg.as_ref().is_some_and(|leg| leg.prefilled.is_some() || !leg.passes_by)
    }

    /// The name of the endpoint that computes its prompt, if that is another.
    pub(crate) fn prefill_endpoint(&self) -> Option<Arc<str>> {
        let leg = self.placement.prefill?;
        self.pool.endpoint(leg.endpoint).map(|endpoint| Arc::clone(&endpoint.name))
    }

    /// For a split request: prompt tokens that the engine that computed the prompt had cached, if it reports them.
    pub(crate) fn prefill_cached_tokens(&self) -> Option<u32> {
        self.prefill_usage.and_then(|usage| usage.cached_tokens)
    }

    /// Its prefill leg.
    pub(crate) fn take_leg(&mut self) -> Option<Lease> {
        self.leg.take().map(|leg| *leg)
    }

    /// Keeps its prefill leg until its blocks have arrived.
    pub(crate) fn hold(&mut self, leg: Self) {
        self.prefill_usage = leg.prefill_usage;
        self.leg = Some(Box::new(leg));
    }

    /// For a prefill leg: the prompt is computed, and its blocks can be fetched. `usage` is the engine's count.
    pub(crate) fn computed(&mut self, usage: Option<Usage>) {
        let now = self.proxy.fleet.clock.now();
        self.prefilled = Some(now);
        self.prefill_usage = usage;
        if let Some(attempt) = &mut self.attempt {
            attempt.complete(usage.map_or(0, |usage| usage.completion_tokens.into()), usage);
            attempt.end(now);
        }
        self.pool.begin(self.request);
        let reported = usage.and_then(|usage| {
            let cached_tokens = usage.cached_tokens?;
            Some(ReportedReuse { prompt_tokens: usage.prompt_tokens, cached_tokens })
        });
        if let (Some(usage), Some(feed)) = (usage, &self.endpoint.feed) {
            let computed_tokens = usage.prompt_tokens.saturating_sub(usage.cached_tokens.unwrap_or(0));
            feed.note_answer(now, self.received, computed_tokens, self.pool.known_block_tokens());
        }
        let request = self.request;
        let answered = reported.map(|reported| Input::Answered { request, reported });
        self.pool.step_all(answered.into_iter().chain([Input::Succeeded { request }]));
        // From here on its engine makes no progress on it.
        self.pass_by();
    }

    /// The blocks of a split request have arrived. Returns when its prompt had been computed, if that was seen. A sidecar
    /// does not say whether it fetched any.
    fn receive(&mut self) -> Option<Nanos> {
        let is_known = self.awaits_blocks();
        let leg = self.leg.take().filter(|_| is_known)?;
        let tokens = self.prompt_tokens.saturating_sub(self.placement.overlap_tokens);
        self.pool.metrics.transferred_tokens.inc_by(tokens.into());
        if let Some(attempt) = &mut self.attempt {
            attempt.received(tokens);
        }
        leg.prefilled
    }

    /// The blocks of a split request did not arrive.
    pub fn transfer_failed(&self) {
        self.lost();
        self.trace_failure(FailureKind::transfer.name());
        self.note_failure(FailureKind::transfer);
        self.pool.step(Input::TransferFailed { request: self.request });
    }

    /// Seconds from now until its whole answer should have arrived.
    pub(crate) fn expected_end_s(&self) -> Option<f64> {
        self.pool.router.read(|scheduler| scheduler.expected_end_s(self.request))
    }

    /// Its answer will not be seen: it says nothing about whether the engine makes progress, and its client is charged
    /// for an answer of the usual length.
    pub(crate) fn pass_by(&mut self) {
        if std::mem::replace(&mut self.passes_by, true) {
            return;
        }
        if !self.idles.load(Ordering::Relaxed) {
            self.endpoint.vitals.leave();
        }
        if let Some(charge) = &self.charge {
            let usual = self.pool.router.read(|scheduler| scheduler.usual_output_tokens());
            charge.note(None, usual as u64);
        }
    }

    /// The client is to go on: silence of the engine is no sign of a stall.
    pub(crate) fn expects_nothing(&self) {
        if !self.passes_by && !self.idles.swap(true, Ordering::Relaxed) {
            self.endpoint.vitals.leave();
        }
    }

    /// The engine is to go on.
    pub(crate) fn expects_progress(&self) {
        if !self.passes_by && self.idles.swap(false, Ordering::Relaxed) {
            self.endpoint.vitals.arrive(self.proxy.fleet.clock.now());
        }
    }

    /// The request is sent to the worker: from here on it uses the worker, and a client that disconnects is charged.
    pub fn sent(&self) {
        if let Some(charge) = self.charge.as_ref().filter(|_| !self.sent.swap(true, Ordering::Relaxed)) {
            charge.sent(self.held_tokens());
        }
    }

    /// Leading prompt tokens that the endpoint is expected to hold that computes the prompt.
    fn held_tokens(&self) -> u32 {
        self.placement.prefill.map_or(self.placement.overlap_tokens, |leg| leg.overlap_tokens)
    }

    /// The worker failed the request: the client is not charged.
    pub(crate) fn lost(&self) {
        if let Some(charge) = self.charge.as_ref().filter(|_| self.sent.swap(false, Ordering::Relaxed)) {
            charge.lost();
        }
    }

    /// The response has begun, and it is not a stream: its prefill is over, but the time to first token and the speed
    /// are unknown.
    pub fn begin(&mut self) {
        self.pool.begin(self.request);
        self.receive();
        if let Some(charge) = &self.charge {
            charge.note(None, self.before.unwrap_or(0));
        }
    }

    /// `tokens` more arrived in a stream at this moment. With the first, its prefill is over.
    pub fn progress(&mut self, moment: Instant, tokens: u32) {
        if tokens == 0 {
            return;
        }
        let first = self.first_token.is_none();
        let now = self.proxy.fleet.clock.at(moment);
        self.endpoint.vitals.hear(now);
        if first {
            self.first_token = Some(now);
            if let Some(attempt) = &mut self.attempt {
                attempt.first_token(now);
            }
            if self.before.is_none() {
                self.pool.metrics.ttft.observe((now - self.received).as_secs_f64());
                self.endpoint.traffic.begin(now - self.placed);
                if self.proxy.settings().hedge.enabled {
                    self.pool.first_tokens.note(now - self.placed);
                }
            }
        }
        self.tokens += u64::from(tokens);
        if let Some(charge) = &self.charge {
            charge.note(None, self.before.unwrap_or(0) + self.tokens);
        }
        // The first token is reported by `first`.
        self.untold = self.untold.saturating_add(tokens - u32::from(first));
        let told = self.untold - self.untold % TOKENS_TOLD;
        if first || told > 0 {
            self.untold -= told;
            self.pool.progress(self.request, first, told);
        }
        if first && let Some(prefilled) = self.receive() {
            self.pool.metrics.kv_transfer.observe((now - prefilled).as_secs_f64());
        }
    }

    /// The response is complete: records its measurements. `usage` is the engine's count, if it reports one, and `end` is
    /// how it ended.
    pub fn complete(&mut self, usage: Option<Usage>, end: AnswerEnd) {
        let now = self.proxy.fleet.clock.now();
        let metrics = &self.pool.metrics;
        // An engine that decodes a split request reports fetched tokens as cached, or the count of the other engine, or
        // none, by its version. Only the engine that computed the prompt says how many were cached.
        let usage = usage.map(|usage| match self.is_split() {
            true => Usage { cached_tokens: self.prefill_cached_tokens(), ..usage },
            false => usage,
        });
        metrics.duration.observe((now - self.received).as_secs_f64());
        if usage.is_some() {
            self.endpoint.vitals.hear(now);
        }
        let output_tokens = usage.map_or(self.tokens, |usage| u64::from(usage.completion_tokens));
        metrics.output_tokens.inc_by(output_tokens);
        if let Some(attempt) = &mut self.attempt {
            attempt.complete(output_tokens, usage);
        }
        if let Some(charge) = &self.charge {
            // Tokens written by another worker are in the prompt that the engine has counted.
            let before = if usage.is_some() { 0 } else { self.before.unwrap_or(0) };
            charge.note(usage.map(|usage| usage.prompt_tokens), before + output_tokens);
        }
        self.reported = usage.map(|usage| u64::from(usage.prompt_tokens) + output_tokens);
        if output_tokens > 0 {
            let output_tokens = u32::try_from(output_tokens).unwrap_or(u32::MAX);
            self.outcome.push(Input::Wrote { request: self.request, output_tokens });
        }
        if end != AnswerEnd::Unknown {
            self.outcome.push(Input::Ended { request: self.request, end });
        }
        metrics.predicted_tokens.inc_by(self.held_tokens().into());
        metrics.prompt_tokens.inc_by(self.prompt_tokens.into());
        if let Some(usage) = usage {
            metrics.input_tokens.inc_by(usage.prompt_tokens.into());
            metrics.cached_tokens.inc_by(usage.cached_tokens.unwrap_or(0).into());
            // Of a split request, the prefill leg has told this of the engine that computed the prompt.
            if let Some(feed) = self.endpoint.feed.as_ref().filter(|_| !self.is_split()) {
                let computed_tokens = usage.prompt_tokens.saturating_sub(usage.cached_tokens.unwrap_or(0));
                feed.note_answer(now, self.received, computed_tokens, self.pool.known_block_tokens());
            }
            if let Some(cached_tokens) = usage.cached_tokens.filter(|_| !self.is_split()) {
                let reported = ReportedReuse { prompt_tokens: usage.prompt_tokens, cached_tokens };
                self.outcome.push(Input::Answered { request: self.request, reported });
            }
        }
        let Some(first) = self.first_token else { return };
        let tpot_s = (self.tokens > 1).then(|| (now - first).as_secs_f64() / (self.tokens - 1) as f64);
        tpot_s.iter().for_each(|tpot_s| metrics.tpot.observe(*tpot_s));
        if self.slo != Slo::default() && self.before.is_none() {
            metrics.slo.answered(self.slo.is_met(first - self.received, tpot_s));
        }
    }

    /// The request continues an answer of which another worker has written this many tokens, if any.
    pub fn continues(&mut self, before: Option<u64>) {
        self.before = before;
    }

    /// The answer continues on another endpoint: counts the tokens from this one. Returns how many tokens there are,
    /// if it has begun.
    pub fn hand_on(self) -> Option<u64> {
        self.trace_failure(FailureKind::mid_stream.name());
        self.pool.metrics.output_tokens.inc_by(self.tokens);
        let written = self.before.unwrap_or(0) + self.tokens;
        (written > 0).then_some(written)
    }

    /// Counts a failure at its endpoint.
    pub(crate) fn note_failure(&self, kind: FailureKind) {
        self.proxy.fleet.metrics.note_failure(&self.worker.url, kind);
        self.endpoint.traffic.fail(kind);
    }

    /// The worker failed the request.
    pub fn failed(&self, kind: FailureKind) {
        self.lost();
        self.trace_failure(kind.name());
        self.note_failure(kind);
        self.pool.step(Input::Failed { request: self.request });
    }

    /// The request is in flight with a prompt that may crash the engine.
    pub fn suspect(&self) {
        self.proxy.fleet.poison_prompts().note_placement(self.prompt, self.worker.engine_key());
    }

    /// The engine has died with the request in flight, or may have: then its probes will show.
    pub fn died(&self, certain: bool) {
        let (prompt, engine, placed) = (self.prompt, self.worker.engine_key(), self.placed);
        let report =
            EngineDeath { prompt, engine, placed, certain: certain || self.worker.upstream.is_gone() };
        self.proxy.fleet.poison_prompts().note_death(self.proxy.fleet.clock.now(), report);
    }

    /// The engine has stalled.
    pub fn stalled(&self) {
        self.lost();
        self.trace_failure(FailureKind::stalled.name());
        self.note_failure(FailureKind::stalled);
    }

    /// The worker reports an error of unknown cause.
    pub fn faulted(&self) {
        self.lost();
        self.trace_failure(FailureKind::status.name());
        self.note_failure(FailureKind::status);
    }

    /// The worker is busy; `retry_after` is the time it gives, if any.
    pub fn busy(&self, retry_after: Option<Duration>) {
        self.lost();
        self.trace_failure("busy");
        self.proxy.fleet.metrics.faults.note_busy(&self.worker.url);
        self.endpoint.traffic.reject();
        let retry_after = retry_after.map(Nanos::from);
        self.pool.step(Input::Busy { request: self.request, retry_after });
    }

    /// The worker has answered the request completely and without error.
    pub fn succeeded(&mut self) {
        self.proxy.fleet.poison_prompts().answered(self.prompt);
        self.outcome.push(Input::Succeeded { request: self.request });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (request, count) = (self.request, self.untold);
        if !self.passes_by && !self.idles.load(Ordering::Relaxed) {
            self.endpoint.vitals.leave();
        }
        let untold = (count > 0).then_some(Input::Tokens { request, count });
        let inputs = untold.into_iter().chain(self.outcome.drain(..));
        self.pool.step_all(inputs.chain([Input::Finished { request }]));
        if let Some(provider) = &self.pool.provider {
            let known = u64::from(self.prompt_tokens) + self.tokens;
            provider.spend(self.proxy.fleet.clock.now(), self.reported.unwrap_or(known));
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::recording::Recorder;

    use super::*;
    use crate::testing::{PROMPT_TOKENS, World};

    #[tokio::test]
    async fn a_dropped_lease_releases_its_own_load_once() {
        let world = World::new(1);
        let (first, second) = (world.lease().await, world.lease().await);
        assert_eq!((world.load().requests, world.load().context_tokens), (2, 2 * u64::from(PROMPT_TOKENS)));
        drop(first);
        assert_eq!((world.load().requests, world.load().context_tokens), (1, PROMPT_TOKENS.into()));
        let endpoint = Arc::clone(&second.endpoint);
        assert!(!endpoint.vitals.is_idle());
        second.failed(FailureKind::broken);
        drop(second);
        assert_eq!(world.load(), Default::default());
        assert!(endpoint.vitals.is_idle());
    }

    #[tokio::test]
    async fn an_answer_with_objectives_is_counted_by_whether_it_met_them() {
        let world = World::new(1);
        for (ttft_ms, counts) in [(None, [0, 0, 0]), (Some(600_000), [1, 0, 0]), (Some(0), [1, 1, 0])] {
            let mut lease = world.lease().await;
            lease.slo.ttft_ms = ttft_ms;
            // The clock counts nanoseconds.
            lease.progress(Instant::now() + Duration::from_millis(1), 1);
            lease.complete(None, AnswerEnd::Unknown);
            assert_eq!(world.pool.metrics.slo.counts(), counts, "{ttft_ms:?}");
        }
    }

    #[tokio::test]
    async fn the_first_token_is_told_at_once_and_the_others_in_batches() {
        let world = World::new(1);
        let mut lease = world.lease().await;
        world.pool.router.record(Some(Recorder::in_memory()));
        let told = || {
            let inputs = world.pool.router.recording().inputs;
            let told = inputs.into_iter().filter_map(|(_, input)| match input {
                Input::FirstToken { .. } => Some(1),
                Input::Tokens { count, .. } => Some(count),
                _ => None,
            });
            told.collect::<Vec<_>>()
        };
        lease.progress(Instant::now(), 0);
        assert!(told().is_empty(), "an event without content");
        for _ in 0..TOKENS_TOLD + 3 {
            lease.progress(Instant::now(), 1);
        }
        assert_eq!(told(), [1, TOKENS_TOLD]);
        drop(lease);
        assert_eq!(told(), [1, TOKENS_TOLD, 2], "the rest, when it ends");
    }
}
