//! Checkpoint: the part of a scheduler's state that a recording starts from when it starts later than the scheduler.
//!
//! Left out, and learned again: answer lengths per conversation, cache accuracy, breakers and back-offs, a policy's own
//! state, and the queue.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::in_flight::InFlightRequest;
use super::{Config, Scheduler};
use crate::cache_accuracy::{Feed, Prediction};
use crate::disaggregation::Part;
use crate::endpoint::{Endpoint, EndpointId};
use crate::forecast::Usual;
use crate::load::LoadReport;
use crate::queue::{Account, Lane};
use crate::rates::{Fit, Pace};
use crate::request::{RequestId, SchedulingRequest, SessionKey};
use crate::rng::Rng;
use crate::scheduler::learning::Timed;
use crate::time::Nanos;

/// Upper bound of any counter of one request in flight.
const SUM_MAX: u64 = 1 << 40;

/// A scheduler's state at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its configuration.
    pub config: Config,
    /// Whether the scheduler had no endpoints and no requests yet.
    pub first: bool,
    rng: [u64; 4],
    fit: Fit,
    usual: Usual,
    /// By slot: its generation, and the endpoint in it.
    slots: Vec<(u16, Option<CheckpointEndpoint>)>,
    flights: Vec<CheckpointRequest>,
}

/// Checkpoint of an endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct CheckpointEndpoint {
    name: Arc<str>,
    healthy: bool,
    draining: bool,
    #[serde(default)]
    stalled: bool,
    #[serde(default)]
    part: Part,
    feed: Feed,
    reported: Option<(LoadReport, Nanos)>,
    pace: Pace,
}

/// Checkpoint of a request in flight: a compact row, since there are many.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct CheckpointRequest(
    RequestId,
    EndpointId,
    /// Prompt tokens; tokens to prefill; their pairs; tokens of its context, of its answer, of a block.
    (u32, u32, u64, u64, u32, u32),
    Prediction,
    /// Whether its prompt counts as pending prefill; whether its prompt was prefilled.
    (bool, bool),
    Option<SessionKey>,
    /// Tokens to load from below the GPU.
    #[serde(default)]
    u32,
    /// Its TPOT objective in milliseconds, if it should meet it.
    #[serde(default)]
    Option<u32>,
);

// === impl Checkpoint ===

impl Checkpoint {
    /// The endpoints and their display names.
    pub fn endpoints(&self) -> impl Iterator<Item = (EndpointId, &Arc<str>)> {
        (0..).zip(&self.slots).filter_map(|(slot, (generation, endpoint))| {
            endpoint.as_ref().map(|endpoint| (EndpointId::new(slot, *generation), &endpoint.name))
        })
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Takes a checkpoint.
    pub fn synopsis(&self) -> Checkpoint {
        let checkpoint = |(generation, endpoint): (u16, Option<&Endpoint>)| {
            let endpoint = endpoint.map(|endpoint| CheckpointEndpoint {
                name: Arc::clone(&endpoint.name),
                healthy: endpoint.healthy,
                draining: endpoint.draining,
                stalled: endpoint.stalled,
                part: endpoint.part,
                feed: endpoint.cache_accuracy.feed(),
                reported: endpoint.load.reported,
                pace: endpoint.pace,
            });
            (generation, endpoint)
        };
        let slots: Vec<_> = self.pool.slots().map(checkpoint).collect();
        let mut flights: Vec<_> = self.flights.iter().map(CheckpointRequest::of).collect();
        flights.sort_unstable_by_key(|flight| flight.0);
        Checkpoint {
            config: self.config.clone(),
            first: slots.is_empty() && flights.is_empty() && self.queued() == 0,
            rng: self.rng.state(),
            fit: *self.learning.fit(),
            usual: self.learning.forecast.usual(),
            slots,
            flights,
        }
    }

    /// Restores a scheduler from a checkpoint.
    pub fn resumed(now: Nanos, synopsis: Checkpoint) -> Self {
        let Checkpoint { config, first: _, rng, fit, usual, slots, flights } = synopsis;
        let mut scheduler = Self::new(config);
        scheduler.rng = Rng::resumed(rng);
        scheduler.learning.resume(fit, usual);
        for (slot, (generation, endpoint)) in (0..=u16::MAX).zip(slots) {
            let id = EndpointId::new(slot, generation);
            scheduler.pool.skip(id);
            let Some(CheckpointEndpoint { name, healthy, draining, stalled, part, feed, reported, pace }) =
                endpoint
            else {
                continue;
            };
            scheduler.pool.join_at(id, name);
            scheduler.set_health(now, id, healthy);
            if let Some(endpoint) = scheduler.pool.get_mut(id) {
                (endpoint.draining, endpoint.stalled, endpoint.part) = (draining, stalled, part);
                endpoint.load.reported = reported;
                endpoint.pace = pace;
                endpoint.cache_accuracy.set_feed(feed);
            }
        }
        scheduler.update_admission_capacity();
        scheduler.review_parts();
        for flight in flights {
            scheduler.resume(now, flight);
        }
        scheduler
    }

    fn resume(&mut self, now: Nanos, flight: CheckpointRequest) {
        let CheckpointRequest(request, endpoint, tokens, prediction, phase, session, lower_tokens, tpot_ms) =
            flight;
        let (prefilling, computed) = phase;
        let (prompt_tokens, prefill_tokens, prefill_pairs, context_tokens, output_tokens, block_tokens) =
            tokens;
        if self.flights.contains(request) {
            return;
        }
        // Bounds the sums so that none overflows, whatever the file holds.
        let (prefill_pairs, context_tokens) = (prefill_pairs.min(SUM_MAX), context_tokens.min(SUM_MAX));
        let asked = SchedulingRequest { session, ..SchedulingRequest::new(request, prompt_tokens) };
        if let Some(endpoint) = self.pool.get_mut(endpoint) {
            endpoint.computing_since = now;
            let ledger = &mut endpoint.load.in_flight;
            ledger.requests = ledger.requests.saturating_add(1);
            ledger.prefilling = ledger.prefilling.saturating_add(u32::from(prefilling));
            ledger.prefill_tokens = ledger.prefill_tokens.saturating_add(prefill_tokens.into());
            ledger.prefill_pairs = ledger.prefill_pairs.saturating_add(prefill_pairs);
            ledger.context_tokens = ledger.context_tokens.saturating_add(context_tokens);
            ledger.lower_tokens = ledger.lower_tokens.saturating_add(lower_tokens.into());
            if let Some(most_ms) = tpot_ms {
                endpoint.tpots.add(most_ms);
            }
        }
        self.tpots_due += usize::from(tpot_ms.is_some());
        self.flights.insert(InFlightRequest {
            request,
            endpoint,
            era: 0,
            prefill_tokens,
            prefill_pairs,
            lower_tokens,
            context_tokens,
            prompt_tokens,
            block_tokens,
            prediction: Some(prediction),
            prefilling,
            computed,
            is_stream: true,
            timed: Timed::resumed(now, &asked, output_tokens),
            account: Account::of(&asked, Lane::Active),
            output_tokens_due: 0,
            receiving: None,
            leg_of: None,
            is_split: false,
            tpot_ms,
            turn: None,
        });
    }
}

// === impl CheckpointRequest ===

impl CheckpointRequest {
    fn of(flight: &InFlightRequest) -> Self {
        let InFlightRequest { request, endpoint, prompt_tokens, prefill_tokens, prefill_pairs, .. } = *flight;
        let InFlightRequest { context_tokens, block_tokens, prefilling, computed, ref timed, .. } = *flight;
        let tokens =
            (prompt_tokens, prefill_tokens, prefill_pairs, context_tokens, timed.output_tokens, block_tokens);
        let prediction = flight.prediction.unwrap_or_default();
        let InFlightRequest { lower_tokens, tpot_ms, .. } = *flight;
        Self(
            request,
            endpoint,
            tokens,
            prediction,
            (prefilling, computed),
            timed.session(),
            lower_tokens,
            tpot_ms,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{World, config, endpoint};
    use super::*;
    use crate::request::Slo;
    use crate::scheduler::Input;

    #[test]
    fn a_resumed_scheduler_knows_the_loads_and_the_objectives_in_flight() {
        let mut world = World::new(config("fleet_cost"), 1);
        world.step(Input::Fed { endpoint: endpoint(0), feed: Feed::Live });
        let slo = Slo { tpot_ms: Some(1000), ..Slo::default() };
        let request = SchedulingRequest { slo, ..SchedulingRequest::new(RequestId(1), 1000) };
        let held = Prediction { exact: 640, lower: 320, ..Prediction::default() };
        world.step(Input::Arrived { request, overlap: vec![(endpoint(0), held)], block_tokens: 64 });
        let before = world.ledger(0);
        let mut resumed = Scheduler::resumed(world.now, world.scheduler.synopsis());
        let of = resumed.pool.get(endpoint(0)).expect("an endpoint");
        assert_eq!((of.load.in_flight, of.tpots.between(0.0, 2000.0), resumed.tpots_due), (before, 1, 1));
        assert!(before.lower_tokens > 0, "{before:?}");
        resumed.step(world.now, Input::Finished { request: RequestId(1) }, &mut Vec::new());
        let of = resumed.pool.get(endpoint(0)).expect("an endpoint");
        assert_eq!(
            (of.load.in_flight, of.tpots.between(0.0, 2000.0), resumed.tpots_due),
            (Default::default(), 0, 0)
        );
    }
}
