//! Checkpoint: the part of a scheduler's state that a recording starts from when it starts later than the scheduler.
//!
//! Left out, and learned again: answer lengths per conversation, cache accuracy, breakers and back-offs, a policy's own
//! state, the queue, and what is being loaded from below the GPU.

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
        let CheckpointRequest(request, endpoint, tokens, prediction, (prefilling, computed), session) =
            flight;
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
        }
        self.flights.insert(InFlightRequest {
            request,
            endpoint,
            era: 0,
            prefill_tokens,
            prefill_pairs,
            lower_tokens: 0,
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
        Self(request, endpoint, tokens, prediction, (prefilling, computed), timed.session())
    }
}
