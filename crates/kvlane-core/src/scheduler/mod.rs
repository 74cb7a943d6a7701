//! Scheduler of one pool: queue, endpoint selection and in-flight ledger as one state machine. [`Input`] in, [`Output`]
//! out.
//!
//! Selecting an endpoint and reserving its load is one step, so two requests never both see an endpoint as idle. Every
//! dispatched request ends with exactly one [`Input::Finished`], whatever its outcome; that input releases all its
//! reservations. Every state change is an [`Input`], and inputs can be serialized: the same inputs in the same order
//! give the same outputs.

mod admission;
mod availability;
mod checkpoint;
mod config;
mod estimated_prefills;
mod in_flight;
mod learned;
mod learning;
mod messages;
mod news;
mod place;
mod predictions;
mod shadow;
mod shortlist;
mod slo;
mod split;

use std::collections::BTreeMap;

use crate::adapters::{AdapterUse, Adapters};
use crate::budget::Budget;
use crate::cache_accuracy::{self, CacheAccuracy, KnowledgeChange, Prediction};
use crate::decaying_counter::DecayingCounter;
use crate::decision::Receipts;
use crate::endpoint::{Endpoint, EndpointId, Pool};
use crate::load::InFlight;
use crate::policy::{Candidate, CostUnit, PairCost, Policy, Reason};
use crate::queue::{Lane, Queue, Waiting};
use crate::rates::{Prefilled, Rates, STEP_TOKENS};
use crate::replica::{Homes, Peers};
use crate::request::{AdapterKey, AnswerEnd, RequestId};
use crate::rng::Rng;
use crate::session_admission::SessionAdmission;
use crate::stall::Expected;
use crate::time::Nanos;

pub use checkpoint::Checkpoint;
pub use config::Config;
pub use messages::{Input, Output};
pub use predictions::Predictions;
pub use shadow::{Agreement, Shadowed};

use admission::Dequeued;
use availability::AvailabilitySummary;
use estimated_prefills::EstimatedPrefills;
use in_flight::{InFlightRequest, InFlightTable, Turn};
use learned::Learned;
use learning::Learning;
use news::Told;
use shadow::Shadow;
use shortlist::Shortlist;
use split::Splits;

/// Output tokens reported to the scheduler in one [`Input::Tokens`]; the last report of an answer may hold fewer.
/// Batching keeps the ledger within a thousandth of a typical context at a sixteenth of the inputs. Gateway and
/// simulator use the same value.
pub const TOKENS_TOLD: u32 = 16;

/// Weight of an output token in fair queueing between tenants, where an uncached prompt token counts 1; same as VTC
/// (arXiv 2401.00588) and AIBrix's `vtc-basic`.
const OUTPUT_WEIGHT: i64 = 2;

/// The scheduler of one pool. See the module documentation.
pub struct Scheduler {
    config: Config,
    pool: Pool,
    flights: InFlightTable,
    queue: Queue,
    admission: Option<SessionAdmission>,
    learning: Learning,
    estimated_prefills: EstimatedPrefills,
    availability: AvailabilitySummary,
    /// Requests in flight that should meet a TPOT objective.
    tpots_due: usize,
    splits: Splits,
    shortlist: Shortlist,
    adapters: Adapters,
    peers: Peers,
    told: Told,
    learned: Learned,
    /// Where conversations are, if there may be other routers.
    homes: Option<Homes>,
    /// No queued request within the search limit can be dispatched until an endpoint accepts more.
    queue_blocked: bool,
    /// Dequeued requests that hold a dispatch slot and wait for [`Input::Refreshed`].
    dequeued: BTreeMap<RequestId, Dequeued>,
    retries: Budget,
    hedges: Budget,
    /// Rate of recently finished requests.
    finished: DecayingCounter,
    policy: Box<dyn Policy>,
    shadow: Option<Box<Shadow>>,
    /// Endpoint that the next placement uses, whatever the policy picks, and the one that computes its prompt.
    forced: Option<(EndpointId, Option<EndpointId>)>,
    /// The policy's own choice for the last placement.
    picked: Option<(EndpointId, Reason)>,
    rng: Rng,
    receipts: Receipts,
    rows: Vec<Candidate>,
    costs: Vec<f64>,
    pairs: Vec<PairCost>,
    overlap_by_slot: Vec<(EndpointId, Prediction)>,
    excluded_by_slot: Vec<Option<EndpointId>>,
}

// === impl Scheduler ===

impl Scheduler {
    /// A scheduler without endpoints.
    pub fn new(config: Config) -> Self {
        Self {
            pool: Pool::default(),
            flights: InFlightTable::default(),
            queue: Queue::new(config.queue_size as usize),
            admission: config.session_admission.then(SessionAdmission::default),
            learning: Learning::new(config.timing.as_deref()),
            estimated_prefills: EstimatedPrefills::default(),
            availability: AvailabilitySummary::default(),
            tpots_due: 0,
            splits: Splits::new(&config),
            shortlist: Shortlist::default(),
            adapters: Adapters::default(),
            peers: Peers::default(),
            told: Told::default(),
            learned: Learned::default(),
            homes: None,
            queue_blocked: false,
            dequeued: BTreeMap::new(),
            retries: Budget::new(&config.retries),
            hedges: Budget::new(&config.hedges),
            finished: DecayingCounter::default(),
            policy: config.policy.build(),
            shadow: Shadow::of(&config),
            forced: None,
            picked: None,
            rng: Rng::new(config.seed),
            receipts: Receipts::new(config.receipts as usize),
            rows: Vec::new(),
            costs: Vec::new(),
            pairs: Vec::new(),
            overlap_by_slot: Vec::new(),
            excluded_by_slot: Vec::new(),
            config,
        }
    }

    /// Applies one input at `now` and appends its consequences to `out`. Threads that race for the scheduler may pass
    /// times that are slightly out of order.
    pub fn step(&mut self, now: Nanos, input: Input, out: &mut Vec<Output>) {
        let (changes_fleet, changes_availability) = (input.changes_fleet(), input.changes_availability());
        self.review_if_due(now, out);
        self.peers.expire(now, &mut self.pool);
        if self.learned.is_due(now) {
            self.review_learned(now);
        }
        while let Some(request) = self.estimated_prefills.pop(now) {
            self.prefilled(now, request);
        }
        match input {
            Input::Joined { endpoint, name, healthy, draining } => {
                self.pool.join(endpoint, name);
                self.set_health(now, endpoint, healthy);
                self.pool.set_draining(endpoint, draining);
            }
            Input::Draining { endpoint, draining } => {
                self.pool.set_draining(endpoint, draining);
                self.report_drained(endpoint, out);
            }
            Input::Assigned { endpoint, part } => self.assign(endpoint, part),
            Input::Left { endpoint } => {
                self.pool.leave(endpoint);
                self.learned.forget(endpoint);
                self.adapters.forget(endpoint);
                self.splits.transfers.forget(endpoint);
                self.review_parts();
            }
            Input::Health { endpoint, healthy } => self.set_health(now, endpoint, healthy),
            Input::Stalled { endpoint, stalled } => self.stall(now, endpoint, stalled),
            Input::Blamed { endpoint } => self.count_failure(now, endpoint, out),
            Input::Reported { endpoint, reported } => self.pool.report(endpoint, now, reported),
            Input::Adapters { endpoint, reported } => {
                if self.pool.get(endpoint).is_some() {
                    self.adapters.report(endpoint, reported);
                }
            }
            Input::Arrived { request, overlap, block_tokens } => {
                let due = request.slo.ttft_ms.map(|most| now + Nanos::from_millis(most.into()));
                let deadline = now + self.config.queue_timeout;
                let waiting = Waiting { request, block_tokens, deadline, due };
                self.arrive(now, waiting, &overlap, out);
            }
            Input::FirstToken { request } => self.first_token(now, request, true, out),
            Input::Begun { request } => self.first_token(now, request, false, out),
            Input::Tokens { request, count } => self.tokens(now, request, count),
            Input::Wrote { request, output_tokens } => self.wrote(now, request, output_tokens),
            Input::Ended { request, end } => self.ended(request, end),
            Input::Answered { request, reported } => self.answered(request, reported, out),
            Input::Fed { endpoint, feed } => self.learn(endpoint, out, |accuracy| accuracy.set_feed(feed)),
            Input::Forgot { endpoint } => {
                self.adapters.forget(endpoint);
                self.learn(endpoint, out, |accuracy| accuracy.forget());
            }
            Input::Counted { endpoint, queries, hits, block_tokens } => {
                self.learn(endpoint, out, |accuracy| accuracy.count(queries, hits, block_tokens));
            }
            Input::Measured { endpoint, own } => {
                if own.fetched_tokens > 0 {
                    self.learn(endpoint, out, CacheAccuracy::fetched);
                }
                self.learning.measured(now, self.pool.get_mut(endpoint), own);
            }
            Input::Failed { .. } | Input::Busy { .. } | Input::Succeeded { .. } => {
                self.apply_outcome(now, &input, out);
            }
            Input::TransferFailed { request } => self.lost(now, request),
            Input::WarmUp { from, to, warm_up } => self.warm_up(now, from, to, warm_up),
            Input::Finished { request } => self.settle(now, request, out),
            Input::Refreshed { request, overlap } => self.refreshed(now, request, &overlap, out),
            Input::Configured { config } => self.configure(now, *config, out),
            Input::Heard { replica, number, shares, services, learned, turns } => {
                self.hear_turns(now, &turns);
                self.heard(now, (replica, number), &shares, &services, &learned, out);
            }
            Input::Tick => {}
        }
        if changes_availability {
            self.review(now, out);
        }
        if changes_fleet {
            self.update_admission_capacity();
        }
        self.drain_queue(now, out);
    }

    /// Like [`Scheduler::step`], but a request placed by this input goes to `forced`, the second of which computes its
    /// prompt, if these endpoints accept requests. Used by a replay, which follows the recorded placements. Returns the policy's own choice and its
    /// reason, if a request was placed.
    pub fn step_to(
        &mut self,
        now: Nanos,
        input: Input,
        forced: Option<(EndpointId, Option<EndpointId>)>,
        out: &mut Vec<Output>,
    ) -> Option<(EndpointId, Reason)> {
        (self.forced, self.picked) = (forced, None);
        self.step(now, input, out);
        self.forced = None;
        self.picked.take()
    }

    /// Whether the next decision is kept with all its rows, to be read from [`Scheduler::receipts`].
    pub fn set_explained(&mut self, explained: bool) {
        self.receipts = Receipts::new(usize::from(explained)).with_all_rows();
    }

    /// What the costs of its decisions count.
    pub fn cost_unit(&self) -> CostUnit {
        self.policy.cost_unit()
    }

    /// Decisions of the shadow policy, if one is configured.
    pub fn shadowed(&self) -> Option<Shadowed> {
        self.shadow.as_deref().map(Shadow::shadowed)
    }

    /// When to step with [`Input::Tick`] if no other input comes before.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let room = self
            .admission
            .as_ref()
            .filter(|_| self.queue.has_gated())
            .and_then(SessionAdmission::next_deadline);
        let gate = self.availability.next_deadline().filter(|_| self.queued() > 0);
        let lease = self.peers.next_deadline().filter(|_| self.queued() > 0);
        self.queue.next_deadline().into_iter().chain(room).chain(gate).chain(lease).min()
    }

    /// The endpoints and their loads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The pool's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Estimated speed of an endpoint of this pool.
    pub fn rates(&self, endpoint: &Endpoint) -> Rates {
        self.learning.rates(endpoint)
    }

    /// Standard errors of an endpoint's rates for prefill and decoding, as shares of the rates.
    pub fn rate_errors(&self, endpoint: &Endpoint) -> [f64; 2] {
        self.learning.rate_errors(endpoint)
    }

    /// How far this pool's times to first token were from their predictions.
    pub fn predictions(&self) -> Predictions {
        self.learning.predictions()
    }

    /// Mean output tokens of recent answers.
    pub fn usual_output_tokens(&self) -> f64 {
        self.learning.forecast.usual_tokens()
    }

    /// The most recent decisions.
    pub fn receipts(&self) -> &Receipts {
        &self.receipts
    }

    /// When an endpoint with requests in flight is expected to make progress; `None` if it is idle.
    pub fn expected(&self, endpoint: EndpointId) -> Option<Expected> {
        let endpoint = self.pool.get(endpoint)?;
        let InFlight { requests, moving, .. } = endpoint.load.in_flight;
        let in_flight = endpoint.in_flight();
        let InFlight { prefill_tokens, prefill_pairs, context_tokens, .. } = in_flight;
        let mut flights = self.flights.iter().filter(|flight| flight.endpoint == endpoint.id);
        let is_seen = flights.any(|flight| flight.is_stream);
        let rates = self.rates(endpoint);
        let decode_s = rates.decode_step_s(in_flight.decoding(), context_tokens);
        let prefill_s = rates.prefill_s(prefill_tokens, prefill_pairs);
        let load_s = rates.load_token_s * in_flight.lower_tokens as f64;
        // One step computes part of the pending prefill, and all prompts may be computed before decoding continues
        // (SGLang).
        let share = (STEP_TOKENS as f64 / prefill_tokens.max(1) as f64).min(1.0);
        let is_learned = self.learning.is_learned() || self.config.timing.is_some();
        let (step_s, token_s) = (load_s + share * prefill_s + decode_s, load_s + prefill_s + decode_s);
        // A request makes no progress while its blocks are on their way.
        (requests > moving).then_some(Expected { step_s, token_s, is_seen, is_learned })
    }

    /// Seconds from now until a request in flight should have its whole answer, by its endpoint's rates and the forecast
    /// answer length; `None` if it is not in flight. For drivers that do not see the answer.
    pub fn expected_end_s(&self, request: RequestId) -> Option<f64> {
        let flight = self.flights.get(request)?;
        let endpoint = self.pool.get(flight.endpoint)?;
        let InFlight { requests, prefill_tokens, prefill_pairs, context_tokens, .. } = endpoint.in_flight();
        let rates = self.rates(endpoint);
        let step_s = rates.decode_step_s(requests, context_tokens);
        Some(rates.prefill_s(prefill_tokens, prefill_pairs) + f64::from(flight.output_tokens_due) * step_s)
    }

    /// The endpoints with the least work in flight among those that accept requests and that `is_wanted`: `most` of them,
    /// the least busy first. For drivers that name others beside the chosen endpoint.
    pub fn least_busy(&self, most: usize, is_wanted: impl Fn(EndpointId) -> bool) -> Vec<EndpointId> {
        let work = |endpoint: &Endpoint| {
            let InFlight { prefill_tokens, context_tokens, requests, .. } = endpoint.in_flight();
            (prefill_tokens, context_tokens, requests, endpoint.id)
        };
        let mut least = Vec::with_capacity(most + 1);
        for endpoint in self.pool.eligible().filter(|endpoint| is_wanted(endpoint.id)) {
            let own = work(endpoint);
            let at = least.partition_point(|other| *other < own);
            if at < most {
                least.truncate(most - 1);
                least.insert(at, own);
            }
        }
        least.into_iter().map(|(_, _, _, id)| id).collect()
    }

    /// How an adapter is used at an endpoint.
    pub fn adapter_use(&self, endpoint: EndpointId, adapter: AdapterKey) -> AdapterUse {
        self.adapters.use_of(endpoint, adapter)
    }

    /// Adapters that an endpoint can have loaded at once, if it has reported that.
    pub fn adapter_slots(&self, endpoint: EndpointId) -> Option<u32> {
        self.adapters.slots_of(endpoint)
    }

    /// Requests dispatched and not yet finished.
    pub fn in_flight(&self) -> usize {
        self.flights.len() - self.splits.legs
    }

    /// Requests waiting for dispatch.
    pub fn queued(&self) -> usize {
        self.queue.len() + self.dequeued.len()
    }

    /// Passes the fleet's KV cache capacity to session admission.
    fn update_admission_capacity(&mut self) {
        if let Some(admission) = &mut self.admission {
            let (endpoints, capacity_tokens) = self.pool.kv_capacity_tokens();
            admission.set_fleet(endpoints, capacity_tokens);
        }
    }

    /// Whether an arriving request may have to wait.
    pub fn may_wait(&self) -> bool {
        self.config.queue_size > 0
            && (self.config.max_concurrent_requests > 0
                || self.admission.is_some()
                || self.may_be_unavailable()
                || self.queued() > 0)
    }

    /// A prompt was prefilled; `seen` is whether its first token was observed.
    fn first_token(&mut self, now: Nanos, request: RequestId, seen: bool, out: &mut Vec<Output>) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        if std::mem::replace(&mut flight.computed, true) {
            return;
        }
        let InFlightRequest { endpoint, era, prediction, prompt_tokens, leg_of, is_split, .. } = *flight;
        self.prefilled(now, request);
        // A prefill leg answers when its prompt is computed.
        if let Some(flight) = self.flights.get_mut(request)
            && (seen || leg_of.is_some())
        {
            if seen {
                self.learning.check(now, &flight.timed);
            }
            self.learning.first_token(now, &mut flight.timed, self.pool.get_mut(endpoint));
        }
        if !self.adapters.is_idle() {
            self.adapters.first_token(now, request, seen);
        }
        if let (false, Some(accuracy)) = (is_split, self.pool.cache_accuracy_mut(endpoint)) {
            accuracy.expect_in_counters(prediction.unwrap_or_default(), prompt_tokens);
        }
        self.begun(now, endpoint, era, out);
        self.received(now, request, seen, out);
        if let Some(of) = leg_of {
            self.computed_elsewhere(now, request, of);
        }
    }

    /// Removes a prompt from the pending prefill: it was prefilled, or should be by estimate.
    fn prefilled(&mut self, now: Nanos, request: RequestId) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        let prefill_tokens = u64::from(std::mem::take(&mut flight.prefill_tokens));
        let prefill_pairs = std::mem::take(&mut flight.prefill_pairs);
        let lower_tokens = std::mem::take(&mut flight.lower_tokens);
        let prefilling = std::mem::take(&mut flight.prefilling);
        if let Some(endpoint) = self.pool.get_mut(flight.endpoint) {
            let ledger = &mut endpoint.load.in_flight;
            ledger.prefill_tokens -= prefill_tokens;
            ledger.prefill_pairs -= prefill_pairs;
            ledger.lower_tokens -= u64::from(lower_tokens);
            ledger.prefilling -= u32::from(prefilling);
            endpoint.computing_since = now;
            let prompts = u64::from(prefilling);
            endpoint.pace.has_prefilled(Prefilled { prompts, tokens: prefill_tokens, pairs: prefill_pairs });
        }
    }

    /// Compares the predicted prefix reuse with the reuse that the answer reports.
    fn answered(
        &mut self,
        request: RequestId,
        reported: cache_accuracy::ReportedReuse,
        out: &mut Vec<Output>,
    ) {
        let Some(flight) = self.flights.get_mut(request).filter(|flight| !flight.is_split) else { return };
        flight.turn = flight.turn.map(|turn| Turn { held_tokens: Some(reported.cached_tokens), ..turn });
        let Some(prediction) = flight.prediction.take() else { return };
        let InFlightRequest { endpoint, prompt_tokens, block_tokens, computed, .. } = *flight;
        self.learn(endpoint, out, |accuracy| {
            if computed {
                accuracy.exclude_from_counters(prediction, prompt_tokens);
            }
            accuracy.observe(prediction, prompt_tokens, reported, block_tokens)
        });
    }

    /// Changes an endpoint's cache accuracy and emits [`Output::Knowledge`] if its knowledge level changes.
    fn learn(
        &mut self,
        endpoint: EndpointId,
        out: &mut Vec<Output>,
        change: impl FnOnce(&mut CacheAccuracy) -> Option<KnowledgeChange>,
    ) {
        if let Some(change) = self.pool.cache_accuracy_mut(endpoint).and_then(change) {
            out.push(Output::Knowledge { endpoint, change });
        }
    }

    fn tokens(&mut self, now: Nanos, request: RequestId, count: u32) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        flight.context_tokens += u64::from(count);
        let endpoint = self.pool.get_mut(flight.endpoint);
        self.learning.tokens(now, &mut flight.timed, endpoint, count);
        charge(&mut self.queue, flight, count);
        if let Some(ledger) = self.pool.in_flight_mut(flight.endpoint) {
            ledger.context_tokens += u64::from(count);
        }
    }

    /// Takes over the answer's final length.
    fn wrote(&mut self, now: Nanos, request: RequestId, output_tokens: u32) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        let endpoint = self.pool.get_mut(flight.endpoint);
        if flight.is_stream {
            self.learning.last_token(now, &mut flight.timed, endpoint);
        } else if flight.leg_of.is_none() {
            self.learning.whole_answer(now, &flight.timed, endpoint, output_tokens);
        }
        let seen = std::mem::replace(&mut flight.timed.output_tokens, output_tokens);
        charge(&mut self.queue, flight, output_tokens.saturating_sub(seen.max(1)));
        // The last token is not part of any later token's context, just as the first one was not counted.
        let context_tokens = u64::from(flight.prompt_tokens) + u64::from(output_tokens.saturating_sub(1));
        let before = std::mem::replace(&mut flight.context_tokens, context_tokens);
        if let Some(ledger) = self.pool.in_flight_mut(flight.endpoint) {
            ledger.context_tokens = ledger.context_tokens - before + context_tokens;
        }
    }

    /// Releases everything that a request has reserved, or removes it from the queue.
    fn settle(&mut self, now: Nanos, request: RequestId, out: &mut Vec<Output>) {
        self.queue_blocked = false;
        self.received(now, request, false, out);
        if !self.adapters.is_idle() {
            self.adapters.finished(request);
        }
        let Some(flight) = self.flights.remove(request) else {
            let dequeued = self.dequeued.remove(&request).map(|dequeued| (dequeued.waiting, Lane::Active));
            if let Some((waiting, Lane::Active)) = dequeued.or_else(|| self.queue.remove(request)) {
                self.leave(now, waiting.request.session, None, Some(AnswerEnd::Unknown));
            }
            return;
        };
        if flight.leg_of.is_some() {
            self.splits.legs -= 1;
        } else {
            self.finished.at(now, 0.0);
            self.finished.add(1.0);
            self.turn_over(now, &flight);
            self.learning.over(&flight.timed);
        }
        if flight.output_tokens_due > 0 {
            self.queue.charge(flight.account, -OUTPUT_WEIGHT * i64::from(flight.output_tokens_due));
        }
        self.tpots_due -= usize::from(flight.tpot_ms.is_some());
        if let Some(endpoint) = self.pool.get_mut(flight.endpoint) {
            endpoint.breaker.over(request);
            let ledger = &mut endpoint.load.in_flight;
            ledger.requests -= 1;
            ledger.prefilling -= u32::from(flight.prefilling);
            ledger.moving -= u32::from(flight.moving());
            ledger.prefill_pairs -= flight.prefill_pairs;
            ledger.lower_tokens -= u64::from(flight.lower_tokens);
            ledger.prefill_tokens -= u64::from(flight.prefill_tokens);
            ledger.context_tokens -= flight.context_tokens;
            if let Some(most_ms) = flight.tpot_ms {
                endpoint.tpots.remove(most_ms);
            }
            self.report_drained(flight.endpoint, out);
        }
    }

    fn report_drained(&self, id: EndpointId, out: &mut Vec<Output>) {
        let drained = self
            .pool
            .get(id)
            .is_some_and(|endpoint| endpoint.draining && endpoint.load.in_flight.requests == 0);
        if drained {
            out.push(Output::Drained { endpoint: id });
        }
    }
}

/// Charges further output tokens to the tenant. The forecast output tokens were charged at placement.
fn charge(queue: &mut Queue, flight: &mut InFlightRequest, count: u32) {
    let beyond = count.saturating_sub(flight.output_tokens_due);
    flight.output_tokens_due = flight.output_tokens_due.saturating_sub(count);
    if beyond > 0 {
        queue.charge(flight.account, OUTPUT_WEIGHT * i64::from(beyond));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::breaker;
    use crate::decision::{Refused, Rejection};
    use crate::disaggregation::{Part, Role, WarmUp};
    use crate::load::LoadReport;
    use crate::policy::PolicyConfig;
    use crate::rates::Work;
    use crate::request::{SchedulingRequest, SessionKey, TenantKey};

    pub(super) fn config(policy: &str) -> Config {
        Config {
            queue_size: 2,
            queue_timeout: Nanos(10),
            receipts: 4,
            seed: 1,
            ..Config::new(PolicyConfig::by_name(policy).expect("a policy"))
        }
    }

    pub(super) struct World {
        pub(super) scheduler: Scheduler,
        pub(super) now: Nanos,
        /// Overlap of every prompt, returned for each [`Output::Refresh`].
        pub(super) known: Vec<(EndpointId, Prediction)>,
        /// Dequeued requests whose prompts have not been looked up again.
        pub(super) unknown: Vec<RequestId>,
        /// Whether [`Output::Refresh`] is left unanswered.
        pub(super) lazy: bool,
    }

    impl World {
        pub(super) fn new(config: Config, endpoints: usize) -> Self {
            let scheduler = Scheduler::new(config);
            let (known, unknown) = (Vec::new(), Vec::new());
            let mut world = Self { scheduler, now: Nanos::ZERO, known, unknown, lazy: false };
            for n in 0..endpoints {
                let endpoint = world.scheduler.pool.next_id().expect("room");
                world.step(joined(endpoint, &format!("e{n}")));
            }
            world
        }

        pub(super) fn step(&mut self, input: Input) -> Vec<Output> {
            let mut out = Vec::new();
            self.now += Nanos(1);
            self.scheduler.step(self.now, input, &mut out);
            self.look_up(&mut out);
            out
        }

        /// Answers every [`Output::Refresh`], as the router does.
        pub(super) fn look_up(&mut self, out: &mut Vec<Output>) {
            loop {
                let asked = out.extract_if(.., |output| matches!(output, Output::Refresh { .. }));
                self.unknown.extend(asked.filter_map(|output| match output {
                    Output::Refresh { request } => Some(request),
                    _ => None,
                }));
                if self.lazy || self.unknown.is_empty() {
                    return;
                }
                let (request, overlap) = (self.unknown.remove(0), self.known.clone());
                self.scheduler.step(self.now, Input::Refreshed { request, overlap }, out);
            }
        }

        pub(super) fn arrive(
            &mut self,
            id: u64,
            prompt_tokens: u32,
            overlap: &[(EndpointId, u32)],
        ) -> Vec<Output> {
            let request = SchedulingRequest::new(RequestId(id), prompt_tokens);
            let prediction = |approximate| Prediction { exact: 0, approximate, lower: 0 };
            let overlap = overlap.iter().map(|&(id, tokens)| (id, prediction(tokens))).collect();
            self.step(Input::Arrived { request, overlap, block_tokens: 16 })
        }

        /// The endpoint that occupies a slot.
        fn occupant(&self, slot: u16) -> EndpointId {
            self.scheduler.pool.endpoints().nth(slot.into()).expect("three endpoints").id
        }

        pub(super) fn ledger(&self, slot: u16) -> InFlight {
            self.scheduler.pool.get(endpoint(slot)).expect("here").load.in_flight
        }
    }

    fn joined(endpoint: EndpointId, name: &str) -> Input {
        Input::Joined { endpoint, name: name.into(), healthy: true, draining: false }
    }

    fn in_a_second(why: Rejection) -> Refused {
        Refused { why, retry_after: Nanos::from_secs(1) }
    }

    pub(super) fn endpoint(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    pub(super) fn placed(out: &[Output]) -> Option<EndpointId> {
        out.iter().find_map(|output| match output {
            Output::Dispatch { placement, .. } => Some(placement.endpoint),
            _ => None,
        })
    }

    /// Invariant: Load is reserved at the decision; uncached prefill tokens are released at the first token; output
    /// tokens are added as they stream.
    ///
    /// Also held by `a_cancelled_request_frees_its_prefill_tokens`.
    #[test]
    fn load_is_reserved_at_the_decision_and_released_step_by_step() {
        let mut world = World::new(config("least_load"), 1);
        world.arrive(1, 100, &[(endpoint(0), 64)]);
        assert_eq!(
            world.ledger(0),
            InFlight {
                requests: 1,
                prefilling: 1,
                prefill_tokens: 36,
                prefill_pairs: 36 * 64 + 36 * 37 / 2,
                context_tokens: 100,
                ..InFlight::default()
            }
        );
        world.step(Input::FirstToken { request: RequestId(1) });
        world.step(Input::Tokens { request: RequestId(1), count: 5 });
        assert_eq!(world.ledger(0), InFlight { requests: 1, context_tokens: 105, ..InFlight::default() });
        world.step(Input::Finished { request: RequestId(1) });
        assert_eq!(world.ledger(0), InFlight::default());
    }

    #[test]
    fn an_answer_is_as_long_as_it_says_however_its_tokens_came() {
        for (seen, said) in [(0, 7), (3, 7), (9, 7)] {
            let mut world = World::new(config("least_load"), 1);
            world.arrive(1, 100, &[(endpoint(0), 64)]);
            world.step(Input::Begun { request: RequestId(1) });
            world.step(Input::Tokens { request: RequestId(1), count: seen });
            world.step(Input::Wrote { request: RequestId(1), output_tokens: said });
            let context_tokens = 100 + u64::from(said) - 1;
            let ledger = InFlight { requests: 1, context_tokens, ..InFlight::default() };
            assert_eq!(world.ledger(0), ledger, "{seen} seen");
            world.step(Input::Finished { request: RequestId(1) });
            assert_eq!(world.ledger(0), InFlight::default());
        }
    }

    #[test]
    fn the_least_busy_endpoints_are_those_with_the_least_work() {
        let mut world = World::new(config("round_robin"), 4);
        let ids: Vec<_> = world.scheduler.pool.endpoints().map(|endpoint| endpoint.id).collect();
        for (id, prompt_tokens) in [(0, 300), (1, 100), (2, 200)] {
            let request = SchedulingRequest::new(RequestId(id), prompt_tokens);
            world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
        }
        assert_eq!(world.scheduler.least_busy(2, |_| true), [ids[3], ids[1]]);
        assert_eq!(world.scheduler.least_busy(9, |id| id != ids[3]), [ids[1], ids[2], ids[0]]);
        assert_eq!(world.scheduler.least_busy(0, |_| true), []);
        world.step(Input::Health { endpoint: ids[1], healthy: false });
        assert_eq!(world.scheduler.least_busy(2, |id| id != ids[3]), [ids[2], ids[0]]);
    }

    #[test]
    fn the_end_of_an_answer_is_expected_later_the_more_work_is_ahead() {
        let mut world = World::new(config("round_robin"), 1);
        let arrived = |id, prompt_tokens| {
            let request = SchedulingRequest::new(RequestId(id), prompt_tokens);
            Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 }
        };
        world.step(arrived(0, 1000));
        let alone = world.scheduler.expected_end_s(RequestId(0)).expect("in flight");
        world.step(arrived(1, 100_000));
        let behind = world.scheduler.expected_end_s(RequestId(0)).expect("in flight");
        assert!(0.0 < alone && alone < behind, "{alone} {behind}");
        world.step(Input::Finished { request: RequestId(0) });
        assert_eq!(world.scheduler.expected_end_s(RequestId(0)), None);
    }

    #[test]
    fn a_prompt_without_an_observed_first_token_counts_as_computed_at_its_estimated_time() {
        let mut world = World::new(config("least_load"), 1);
        for whole_answer in [false, true] {
            let id = RequestId(u64::from(whole_answer));
            let request = SchedulingRequest { whole_answer, ..SchedulingRequest::new(id, 8000) };
            world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
        }
        assert_eq!((world.ledger(0).prefilling, world.ledger(0).prefill_tokens), (2, 16_000));
        let first = InFlight {
            requests: 1,
            prefilling: 1,
            prefill_tokens: 8000,
            prefill_pairs: 4000 * 8001,
            context_tokens: 8000,
            ..InFlight::default()
        };
        let expected_s = Rates::default().seconds_of(&Work::until_first_token(&first, 8000, 4000 * 8001));
        world.now = Nanos::from_secs_f64(expected_s);
        world.step(Input::Tick);
        assert_eq!(
            (world.ledger(0).prefilling, world.ledger(0).prefill_tokens),
            (2, 16_000),
            "just before the estimate"
        );
        world.now += Nanos::from_millis(1);
        world.step(Input::Tick);
        let ledger = world.ledger(0);
        assert_eq!(
            (ledger.requests, ledger.prefilling, ledger.prefill_tokens),
            (2, 1, 8000),
            "only the streaming request still counts as prefilling"
        );
        for id in [1, 0] {
            world.step(Input::Begun { request: RequestId(id) });
            world.step(Input::Finished { request: RequestId(id) });
        }
        assert_eq!(world.ledger(0), InFlight::default());
    }

    #[test]
    fn a_response_that_is_not_streamed_is_charged_the_same_tokens() {
        let served = |stream: bool| {
            let mut world = World::new(Config { max_concurrent_requests: 1, ..config("least_load") }, 1);
            let arrive = |world: &mut World, id: u64, tenant: u64, prompt_tokens: u32| {
                let tenant = Some(TenantKey(tenant));
                let request =
                    SchedulingRequest { tenant, ..SchedulingRequest::new(RequestId(id), prompt_tokens) };
                world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 })
            };
            arrive(&mut world, 0, 2, 3000);
            world.step(Input::Finished { request: RequestId(0) });
            arrive(&mut world, 1, 1, 100);
            arrive(&mut world, 2, 1, 100);
            arrive(&mut world, 3, 2, 100);
            let count = 5000;
            if stream {
                world.step(Input::FirstToken { request: RequestId(1) });
                world.step(Input::Tokens { request: RequestId(1), count: count - 1 });
            } else {
                world.step(Input::Begun { request: RequestId(1) });
            }
            world.step(Input::Wrote { request: RequestId(1), output_tokens: count });
            let out = world.step(Input::Finished { request: RequestId(1) });
            out.iter().find_map(Output::request)
        };
        assert_eq!(served(true), Some(RequestId(3)), "the other tenant has used less");
        assert_eq!(served(false), served(true));
    }

    #[test]
    fn an_answer_that_came_all_at_once_says_nothing_of_speed() {
        let rates_after = |input: fn(RequestId) -> Input| {
            let mut world = World::new(config("least_load"), 1);
            world.arrive(1, 8000, &[]);
            world.now += Nanos::from_millis(60_000);
            world.step(input(RequestId(1)));
            world.step(Input::Wrote { request: RequestId(1), output_tokens: 500 });
            world.scheduler.rates(world.scheduler.pool.get(endpoint(0)).expect("here"))
        };
        assert_eq!(rates_after(|request| Input::Begun { request }), Rates::default());
        assert_ne!(rates_after(|request| Input::FirstToken { request }), Rates::default());
    }

    #[test]
    fn a_cancelled_request_frees_its_prefill_tokens() {
        let mut world = World::new(config("least_load"), 1);
        world.arrive(1, 100, &[]);
        world.step(Input::Finished { request: RequestId(1) });
        assert_eq!(world.ledger(0), InFlight::default());
    }

    /// Invariant: Selection and reservation are one step: no two requests see the same endpoint as idle.
    #[test]
    fn two_requests_in_a_row_never_see_the_same_idle_endpoint() {
        let mut world = World::new(config("least_load"), 2);
        let (a, b) = (placed(&world.arrive(1, 10, &[])), placed(&world.arrive(2, 10, &[])));
        assert!(a.is_some() && b.is_some() && a != b);
    }

    /// Invariant: A retry avoids the endpoints that failed it and is not queued.
    #[test]
    fn a_retry_goes_elsewhere_and_past_the_queue() {
        let mut world = World::new(Config { max_concurrent_requests: 1, ..config("round_robin") }, 2);
        let first = placed(&world.arrive(1, 10, &[])).expect("placed");
        assert_eq!(placed(&world.arrive(2, 10, &[])), None, "waits");
        let out = world.step(Input::Finished { request: RequestId(1) });
        assert!(placed(&out).is_some(), "the queued request is dispatched");
        let mut request = SchedulingRequest::new(RequestId(1), 10);
        (request.attempt, request.excluded) = (1, [first].into());
        let out = world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
        assert!(placed(&out).is_some_and(|second| second != first));
    }

    #[test]
    fn without_a_fit_endpoint_a_request_is_refused() {
        let mut world = World::new(config("cache_aware"), 1);
        world.step(Input::Health { endpoint: endpoint(0), healthy: false });
        let refused =
            [Output::Reject { request: RequestId(1), refused: Refused::at_once(Rejection::NoEndpoint) }];
        assert_eq!(world.arrive(1, 10, &[]), refused);
        world.step(Input::Health { endpoint: endpoint(0), healthy: true });
        assert_eq!(placed(&world.arrive(2, 10, &[])), Some(endpoint(0)));
    }

    /// Invariant: No request is queued while there is capacity, and the queue is bounded in length and time.
    ///
    /// Also held by `the_ledger_returns_to_zero_and_no_request_is_lost_or_answered_twice`.
    #[test]
    fn beyond_the_limits_requests_wait_then_are_shed_then_expire() {
        let mut world = World::new(Config { max_concurrent_requests: 1, ..config("random") }, 1);
        world.arrive(1, 10, &[]);
        assert_eq!((world.arrive(2, 10, &[]), world.arrive(3, 10, &[])), (vec![], vec![]));
        let shed = [Output::Reject { request: RequestId(4), refused: in_a_second(Rejection::QueueFull) }];
        assert_eq!(world.arrive(4, 10, &[]), shed);
        let deadline = world.scheduler.next_deadline().expect("a request is queued");
        world.now = deadline - Nanos(1);
        let expired =
            [Output::Reject { request: RequestId(2), refused: in_a_second(Rejection::QueueTimeout) }];
        assert_eq!(world.step(Input::Tick), expired);
        let out = world.step(Input::Finished { request: RequestId(1) });
        assert!(
            matches!(out[..], [Output::Reject { request: RequestId(3), .. }]),
            "deadline has passed: {out:?}"
        );
        assert_eq!((world.scheduler.queued(), world.scheduler.in_flight()), (0, 0));
    }

    #[test]
    fn a_request_that_arrives_twice_has_one_place() {
        let mut world = World::new(Config { max_concurrent_requests: 1, ..config("round_robin") }, 1);
        assert!(placed(&world.arrive(1, 10, &[])).is_some());
        assert_eq!(world.arrive(1, 10, &[]), [], "already in flight");
        assert_eq!((world.arrive(2, 10, &[]), world.arrive(2, 10, &[])), (vec![], vec![]), "waiting");
        assert_eq!(world.scheduler.queued(), 1);
        assert!(placed(&world.step(Input::Finished { request: RequestId(1) })).is_some());
        world.step(Input::Finished { request: RequestId(2) });
        assert_eq!((world.scheduler.in_flight(), world.scheduler.queued()), (0, 0));
    }

    #[test]
    fn an_endpoint_that_joins_unhealthy_or_draining_gets_no_requests() {
        let mut world = World::new(config("round_robin"), 1);
        for (healthy, draining) in [(false, false), (true, true)] {
            let endpoint = world.scheduler.pool.next_id().expect("room");
            world.step(Input::Joined { endpoint, name: "e".into(), healthy, draining });
        }
        for id in 0..3 {
            assert_eq!(placed(&world.arrive(id, 10, &[])), Some(endpoint(0)));
        }
    }

    /// Invariant: A draining endpoint gets no new requests and reports when it is empty.
    #[test]
    fn a_draining_endpoint_takes_nothing_new_and_tells_when_it_is_empty() {
        let mut world = World::new(config("round_robin"), 2);
        assert_eq!(placed(&world.arrive(1, 10, &[])), Some(endpoint(0)));
        assert_eq!(world.step(Input::Draining { endpoint: endpoint(0), draining: true }), []);
        assert_eq!(placed(&world.arrive(2, 10, &[])), Some(endpoint(1)));
        assert_eq!(placed(&world.arrive(3, 10, &[])), Some(endpoint(1)));
        let out = world.step(Input::Finished { request: RequestId(1) });
        assert_eq!(out, [Output::Drained { endpoint: endpoint(0) }]);
    }

    #[test]
    fn settling_after_the_endpoint_left_touches_no_successor_in_its_slot() {
        let mut world = World::new(config("round_robin"), 1);
        world.arrive(1, 10, &[]);
        world.step(Input::Left { endpoint: endpoint(0) });
        let successor = world.scheduler.pool.next_id().expect("room");
        world.step(joined(successor, "e1"));
        world.arrive(2, 10, &[(endpoint(0), 10)]);
        world.step(Input::Finished { request: RequestId(1) });
        let ledger = world.scheduler.pool.get(successor).expect("here").load.in_flight;
        assert_eq!((ledger.requests, ledger.prefill_tokens, ledger.context_tokens), (1, 10, 10));
    }

    /// Invariant: A decision receipt shows every row the policy saw, the picked one among them.
    #[test]
    fn receipts_keep_the_last_decisions_with_their_rows() {
        let mut world = World::new(config("lmetric"), 2);
        for id in 0..6 {
            world.arrive(id, 100, &[(endpoint(1), 60)]);
        }
        let receipts: Vec<_> = world.scheduler.receipts().iter().collect();
        assert_eq!(receipts.iter().map(|r| r.request.0).collect::<Vec<_>>(), [2, 3, 4, 5]);
        for receipt in receipts {
            assert_eq!(receipt.rows.len(), 2);
            assert_eq!(receipt.rows[1].overlap_tokens, 60);
            let least = receipt.rows.iter().map(|row| row.cost).fold(f64::INFINITY, f64::min);
            let picked = receipt.rows.iter().find(|row| row.endpoint == receipt.placement.endpoint);
            assert_eq!(picked.expect("picked endpoint is a candidate").cost, least);
        }
    }

    /// Sends one turn of a conversation.
    fn said(world: &mut World, id: u64, session: u64, prompt_tokens: u32) -> Vec<Output> {
        let request = SchedulingRequest {
            session: Some(SessionKey(session)),
            ..SchedulingRequest::new(RequestId(id), prompt_tokens)
        };
        world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 })
    }

    fn answered(world: &mut World, id: u64) -> Vec<Output> {
        let request = RequestId(id);
        world.step(Input::FirstToken { request });
        world.step(Input::Finished { request })
    }

    fn limit(world: &mut World, tokens: u64) {
        world.scheduler.admission.as_mut().expect("on").set_limit(tokens);
    }

    /// Invariant: Session admission delays only new conversations, and only while the fleet's caches thrash.
    ///
    /// Also held by `the_limit_is_set_when_the_fleet_thrashes_and_follows_what_is_wasted`.
    #[test]
    fn a_new_conversation_waits_for_room_and_blocks_no_other_request() {
        let patient = Nanos::from_secs(1000);
        let config = Config { session_admission: true, queue_timeout: patient, ..config("round_robin") };
        let mut world = World::new(config, 1);
        limit(&mut world, 1000);
        assert!(placed(&said(&mut world, 1, 1, 900)).is_some());
        assert_eq!(placed(&said(&mut world, 2, 2, 200)), None, "the two conversations do not fit together");
        assert!(placed(&world.arrive(3, 900, &[])).is_some(), "a request without a session is not gated");
        assert!(placed(&said(&mut world, 4, 1, 900)).is_some(), "the active conversation continues");
        [1, 3, 4].into_iter().for_each(|id| assert_eq!(placed(&answered(&mut world, id)), None));
        let idle_at = world.scheduler.next_deadline().expect("the first conversation is idle");
        world.now = idle_at - Nanos(1);
        assert!(placed(&world.step(Input::Tick)).is_some(), "the first conversation has expired");
        assert_eq!(placed(&said(&mut world, 5, 1, 900)), None, "the expired conversation is gated again");
        assert_eq!(placed(&said(&mut world, 6, 3, 10)), None);
        world.step(Input::Finished { request: RequestId(5) });
        limit(&mut world, 10_000);
        world.step(Input::Tick);
        assert_eq!(
            (world.scheduler.queued(), world.scheduler.in_flight()),
            (0, 2),
            "the larger fleet admits it"
        );
    }

    #[test]
    fn a_returning_conversation_goes_before_a_new_one() {
        let patient = Nanos::from_secs(1000);
        let config = Config { session_admission: true, queue_timeout: patient, ..config("round_robin") };
        let mut world = World::new(config, 1);
        limit(&mut world, 1000);
        said(&mut world, 1, 1, 900);
        answered(&mut world, 1);
        world.now += Nanos::from_secs(100);
        assert!(placed(&said(&mut world, 2, 2, 900)).is_some());
        assert_eq!((said(&mut world, 3, 3, 900), said(&mut world, 4, 1, 900)), (vec![], vec![]));
        world.now += Nanos::from_secs(1);
        answered(&mut world, 2);
        world.now += Nanos::from_secs(100);
        let out = world.step(Input::Tick);
        assert_eq!(out[0].request(), Some(RequestId(4)), "{out:?}");
    }

    #[derive(Clone, Debug)]
    enum Act {
        Arrive {
            tokens: u32,
            overlap: u32,
            retry: bool,
            hedge: Option<u64>,
            session: Option<u64>,
            tenant: u64,
            priority: i8,
        },
        LookUp(bool),
        Configure {
            policy: usize,
            max_requests_per_endpoint: u32,
            session_admission: bool,
        },
        Answered(usize, u32),
        Holds(u16, u64),
        Failed(usize),
        Busy(usize, Option<u64>),
        Succeeded(usize),
        FirstToken(usize),
        Tokens(usize, u32),
        Wrote(usize, u32),
        Finish(usize),
        Health(u16, bool),
        Drain(u16, bool),
        Stall(u16, bool),
        Blame(u16),
        Churn(u16),
        Part(u16, usize, Option<u16>, bool),
        TransferFailed(usize),
        WarmUp(u16, u16, WarmUp),
        Wait(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        let any_request = || 0usize..40;
        prop_oneof![
            6 => (
                (0u32..5000, 0u32..6000, any::<bool>(), prop::option::weighted(0.2, 0..1_000_000_000u64)),
                (prop::option::of(0u64..5), 0u64..3, -1i8..2),
            )
                .prop_map(|((tokens, overlap, retry, hedge), (session, tenant, priority))| Act::Arrive {
                    tokens, overlap, retry, hedge, session, tenant, priority
                }),
            2 => any::<bool>().prop_map(Act::LookUp),
            1 => (0usize..PolicyConfig::NAMES.len(), 0u32..4, any::<bool>()).prop_map(
                |(policy, max_requests_per_endpoint, session_admission)| Act::Configure {
                    policy, max_requests_per_endpoint, session_admission
                }),
            2 => (any_request(), 0u32..5000).prop_map(|(r, cached)| Act::Answered(r, cached)),
            1 => (0u16..3, 0u64..8000).prop_map(|(e, tokens)| Act::Holds(e, tokens)),
            2 => any_request().prop_map(Act::Failed),
            1 => (any_request(), prop::option::of(0u64..100)).prop_map(|(r, span)| Act::Busy(r, span)),
            2 => any_request().prop_map(Act::Succeeded),
            4 => any_request().prop_map(Act::FirstToken),
            4 => (any_request(), 0u32..100).prop_map(|(r, n)| Act::Tokens(r, n)),
            1 => (any_request(), 0u32..100).prop_map(|(r, n)| Act::Wrote(r, n)),
            5 => any_request().prop_map(Act::Finish),
            1 => (0u16..3, any::<bool>()).prop_map(|(e, up)| Act::Health(e, up)),
            1 => (0u16..3, any::<bool>()).prop_map(|(e, on)| Act::Drain(e, on)),
            1 => (0u16..3, any::<bool>()).prop_map(|(e, on)| Act::Stall(e, on)),
            1 => (0u16..3).prop_map(Act::Blame),
            1 => (0u16..3).prop_map(Act::Churn),
            2 => (0u16..3, 0..Role::ALL.len(), prop::option::weighted(0.8, 0u16..2), prop::bool::weighted(0.8))
                .prop_map(|(e, role, network, alone)| Act::Part(e, role, network, alone)),
            1 => any_request().prop_map(Act::TransferFailed),
            1 => (0u16..3, 0u16..3, prop_oneof![
                Just(WarmUp::Due),
                Just(WarmUp::Ended { first: Nanos(7), next: Nanos(9), tokens: 64 }),
                Just(WarmUp::Failed { lost: Nanos(5) }),
            ]).prop_map(|(from, to, warm_up)| Act::WarmUp(from, to, warm_up)),
            2 => (0u64..20).prop_map(Act::Wait),
        ]
    }

    /// Ids of prefill legs, in the property below.
    const LEGS: u64 = 1 << 20;

    proptest! {
        /// Invariant: Every request is answered at most once and is never lost; when all have ended, the ledger is
        /// zero.
        #[test]
        fn the_ledger_returns_to_zero_and_no_request_is_lost_or_answered_twice(
            acts in prop::collection::vec(act(), 1..200),
            policy in 0..PolicyConfig::NAMES.len(),
            max_concurrent_requests in 0u32..6,
            max_requests_per_endpoint in 0u32..4,
            failure_threshold in 0u32..3,
            session_admission: bool,
            limited in 0u64..9000,
            second in 1u64..1_000_000_000,
        ) {
            let config = Config {
                max_concurrent_requests,
                max_requests_per_endpoint,
                session_admission,
                breaker: breaker::Config {
                    failure_threshold,
                    cooldown: Nanos(10),
                    cooldown_max: Nanos(200),
                    slow_start: Nanos(20),
                },
                ..config(PolicyConfig::NAMES[policy])
            };
            let mut world = World::new(config, 3);
            if let (Some(admission), true) = (&mut world.scheduler.admission, limited > 0) {
                admission.set_limit(limited);
            }
            let (mut asked, mut answered, mut given_up) = (Vec::new(), Vec::new(), Vec::new());
            let mut firsts = Vec::new();
            for act in acts {
                let out = match act {
                    Act::Arrive { tokens, overlap, retry, hedge, session, tenant, priority } => {
                        let mut request = SchedulingRequest::new(RequestId(asked.len() as u64), tokens);
                        request.attempt = u32::from(retry);
                        // Legs are reported on as requests are.
                        request.leg = (tokens % 3 > 0).then_some(RequestId(LEGS + request.id.0));
                        request.hedge = hedge.map(Nanos);
                        if !retry {
                            firsts.push(request.id);
                        }
                        request.whole_answer = tokens % 2 == 1;
                        (request.session, request.priority) = (session.map(SessionKey), priority);
                        request.tenant = Some(TenantKey(tenant)).filter(|_| tenant > 0);
                        asked.push(request.id);
                        let id = world.scheduler.pool.endpoints().next().expect("never empty").id;
                        let prediction = Prediction { exact: overlap / 2, approximate: overlap, lower: 0 };
                        world.step(Input::Arrived { request, overlap: vec![(id, prediction)], block_tokens: 16 })
                    }
                    Act::LookUp(lazy) => {
                        let mut out = Vec::new();
                        world.lazy = lazy;
                        world.look_up(&mut out);
                        out
                    }
                    Act::Configure { policy, max_requests_per_endpoint, session_admission } => {
                        let policy = PolicyConfig::by_name(PolicyConfig::NAMES[policy]).expect("a policy");
                        let before = world.scheduler.config().clone();
                        let config = Config { policy, max_requests_per_endpoint, session_admission, ..before };
                        world.step(Input::Configured { config: Box::new(config) })
                    }
                    Act::Answered(r, cached_tokens) => {
                        let reported = cache_accuracy::ReportedReuse { prompt_tokens: 5000, cached_tokens };
                        world.step(Input::Answered { request: RequestId(r as u64), reported })
                    }
                    Act::Holds(slot, tokens) => {
                        let reported = LoadReport {
                            running: 0,
                            waiting: 0,
                            kv_usage_ratio: 0.0,
                            kv_capacity_tokens: Some(tokens).filter(|&tokens| tokens > 0),
                        };
                        let endpoint = world.occupant(slot);
                        world.step(Input::Reported { endpoint, reported })
                    }
                    Act::Failed(r) => world.step(Input::Failed { request: RequestId(r as u64) }),
                    Act::Busy(r, span) => {
                        let (request, retry_after) = (RequestId(r as u64), span.map(Nanos));
                        world.step(Input::Busy { request, retry_after })
                    }
                    Act::Succeeded(r) => world.step(Input::Succeeded { request: RequestId(r as u64) }),
                    Act::FirstToken(r) => world.step(Input::FirstToken { request: RequestId(r as u64) }),
                    Act::Tokens(r, count) => world.step(Input::Tokens { request: RequestId(r as u64), count }),
                    Act::Wrote(r, output_tokens) => {
                        world.step(Input::Wrote { request: RequestId(r as u64), output_tokens })
                    }
                    Act::Finish(r) => {
                        let request = RequestId(r as u64);
                        if r < asked.len() && !answered.contains(&request) && !given_up.contains(&request) {
                            given_up.push(request);
                        }
                        world.step(Input::Finished { request })
                    }
                    Act::Health(slot, healthy) => {
                        let endpoint = world.occupant(slot);
                        world.step(Input::Health { endpoint, healthy })
                    }

                    Act::Stall(slot, stalled) => {
                        let endpoint = world.occupant(slot);
                        world.step(Input::Stalled { endpoint, stalled })
                    }
                    Act::Blame(slot) => {
                        let endpoint = world.occupant(slot);
                        world.step(Input::Blamed { endpoint })
                    }
                    Act::Drain(slot, draining) => {
                        let endpoint = world.occupant(slot);
                        world.step(Input::Draining { endpoint, draining })
                    }

                    Act::Churn(slot) => {
                        let endpoint = world.occupant(slot);
                        let mut out = world.step(Input::Left { endpoint });
                        let endpoint = world.scheduler.pool.next_id().expect("room");
                        out.extend(world.step(joined(endpoint, "again")));
                        out
                    }
                    Act::Part(slot, role, network, serves_alone) => {
                        let endpoint = world.occupant(slot);
                        let part = Part { role: Role::ALL[role], network, serves_alone };
                        world.step(Input::Assigned { endpoint, part })
                    }
                    Act::TransferFailed(r) => {
                        world.step(Input::TransferFailed { request: RequestId(r as u64) })
                    }
                    Act::WarmUp(from, to, warm_up) => {
                        let (from, to) = (world.occupant(from), world.occupant(to));
                        world.step(Input::WarmUp { from, to, warm_up })
                    }

                    Act::Wait(span) => {
                        // Long enough for conversations to expire at times.
                        world.now += Nanos(if span == 19 { 100 * second } else { span });
                        world.step(Input::Tick)
                    }
                };
                let again: Vec<EndpointId> = out
                    .iter()
                    .filter_map(|output| match output {
                        Output::Dispatch { request, placement } if !firsts.contains(request) => Some(placement.endpoint),
                        _ => None,
                    })
                    .collect();
                let beyond = |endpoint| again.iter().filter(|&&other| other == endpoint).count() as u32;
                for output in out {
                    if let Output::Dispatch { request, .. } | Output::Reject { request, .. } = output {
                        prop_assert!(!answered.contains(&request) && !given_up.contains(&request), "{request:?}");
                        answered.push(request);
                    }
                    let max_requests_per_endpoint = world.scheduler.config().max_requests_per_endpoint;
                    if let Output::Dispatch { request, placement } = output
                        && max_requests_per_endpoint > 0
                        && firsts.contains(&request)
                    {
                        let requests = world.scheduler.pool.get(placement.endpoint).map(|e| e.load.in_flight.requests);
                        // Retries placed in the same step may have exceeded the limit.
                        let most = max_requests_per_endpoint + beyond(placement.endpoint);
                        prop_assert!(requests <= Some(most), "{requests:?} in flight");
                    }
                }
                let room = world.scheduler.queue.len() > 0 && !world.scheduler.is_full();
                let held = |world: &World| {
                    let first = world.scheduler.queue.first_gated();
                    first.is_some_and(|first| !world.scheduler.may_admit(first))
                };
                let scheduler = &world.scheduler;
                let can_dispatch = |waiting: &Waiting| scheduler.can_dispatch(world.now, &waiting.request);
                let anyone_can = scheduler.queue.in_order(true).any(|(_, waiting)| can_dispatch(waiting));
                prop_assert!(!room || held(&world) || !anyone_can, "a request waits while an endpoint has room");
                if let Some(admission) = &world.scheduler.admission {
                    admission.check();
                }
            }
            let waiting = asked.len() - answered.len() - given_up.len();
            prop_assert_eq!(world.scheduler.queued(), waiting, "arrived = finished + cancelled + queued");
            for _ in 0..2 {
                for &request in &asked {
                    world.step(Input::Finished { request });
                }
            }
            prop_assert_eq!((world.scheduler.in_flight(), world.scheduler.queued()), (0, 0));
            prop_assert!(world.scheduler.admission.as_ref().is_none_or(SessionAdmission::is_idle));
            for endpoint in world.scheduler.pool.endpoints() {
                prop_assert_eq!(endpoint.load.in_flight, InFlight::default());
            }
        }
    }
}
