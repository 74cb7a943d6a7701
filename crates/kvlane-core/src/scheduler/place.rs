//! Placement: selects an endpoint, or a pair of them, and reserves what the request needs there.

use super::in_flight::{InFlightRequest, Receiving, Turn};
use super::slo::tpot_met_ms;
use super::{OUTPUT_WEIGHT, Output, Scheduler};
use crate::cache_accuracy::{Feed, Knowledge};
use crate::decision::{Placement, PrefillLeg};
use crate::endpoint::EndpointId;
use crate::load::InFlight;
use crate::policy::{Candidate, Pick, PickContext, Reason};
use crate::queue::{Account, Lane, Waiting};
use crate::request::{AdapterKey, AnswerEnd, RequestId, SchedulingRequest};
use crate::time::Nanos;

impl Scheduler {
    /// Selects an endpoint among the rows and reserves its load.
    pub(super) fn place(&mut self, now: Nanos, waiting: &Waiting, lane: Lane, out: &mut Vec<Output>) {
        let Waiting { request, block_tokens, .. } = waiting;
        let explain = self.receipts.is_on();
        if explain {
            self.costs.clear();
            self.costs.resize(self.rows.len(), f64::NAN);
            self.pairs.clear();
        }
        let output_tokens = self.learning.forecast.tokens(request);
        let usual_output_tokens = self.learning.forecast.usual_tokens();
        if let Some(adapter) = request.adapter {
            if request.attempt == 0 && request.hedge.is_none() {
                self.adapters.ask(now, adapter);
            }
            let answer_s = |row: &Candidate| {
                let InFlight { context_tokens, .. } = row.load.in_flight;
                usual_output_tokens * row.rates.decode_step_s(row.load.in_flight.decoding(), context_tokens)
            };
            let endpoints = self.rows.iter().map(|row| (row.endpoint, answer_s(row)));
            self.adapters.look(now, adapter, endpoints);
        }
        let mut cx = PickContext {
            request,
            now,
            output_tokens,
            usual_output_tokens,
            peers: self.peers.salt(),
            adapter: request.adapter.map(|adapter| self.adapters.view(now, adapter)),
            rng: &mut self.rng,
            reason: Reason::default(),
            work: [None; 2],
            costs: explain.then_some(&mut self.costs[..]),
            pairs: explain.then_some(&mut self.pairs),
        };
        let least = self.config.split_tokens_min;
        let pick = Self::pick(&mut self.splits, &mut *self.policy, least, &mut cx, &self.rows);
        let (reason, work) = (cx.reason, cx.work);
        if let (Some(shadow), None) = (&mut self.shadow, pick.prefill) {
            shadow.decide(&cx, &self.rows, pick.row);
        }
        work.into_iter().flatten().for_each(|(endpoint, work_s)| self.told.placed(endpoint, work_s));
        self.picked = Some((self.rows[pick.row].endpoint, reason));
        let Pick { row, prefill } = self.forced_pick(request).unwrap_or(pick);
        let (picked, prefill) = (self.rows[row], prefill.map(|row| self.rows[row]));
        let leg = request.leg.zip(prefill).map(|(id, row)| PrefillLeg {
            id,
            endpoint: row.endpoint,
            overlap_tokens: row.overlap_tokens,
            knowledge: row.knowledge,
            feed: self.feed(row.endpoint),
        });
        let waits_for_adapter = request.adapter.is_some_and(|adapter| {
            let legs = leg.as_ref().zip(prefill.as_ref()).map(|(leg, prefill)| (leg.id, prefill));
            // Both legs are placed, whichever waits.
            let placed = [legs, Some((request.id, &picked))].map(|placed| {
                placed.is_some_and(|(id, row)| self.note_adapter(now, id, adapter, request, row))
            });
            placed.contains(&true)
        });
        let Candidate { endpoint, overlap_tokens, knowledge, prediction, .. } = picked;
        let feed = self.feed(endpoint);
        let placement = Placement { endpoint, overlap_tokens, reason, knowledge, feed, prefill: leg };
        if explain {
            let costs = (&self.costs[..], &self.pairs[..]);
            let rows = (&self.rows[..], self.shortlist.left_out);
            self.receipts.push(now, request, output_tokens, placement, rows, costs);
        }
        if let Some(session) = request.session {
            self.note_turn(session, endpoint, request.prompt_tokens);
        }
        let mut turn = None;
        if let (Some(admission), Some(session)) = (&mut self.admission, request.session) {
            admission.placed(session, request.prompt_tokens, picked.load.in_flight.prefilling > 0);
            let told = matches!(knowledge, Knowledge::Exact).then_some(prediction.exact);
            let end = (!request.claims.is_last).then_some(AnswerEnd::Unknown);
            turn = Some(Turn { session, sent_tokens: prediction.approximate, held_tokens: told, end });
        }
        let account = Account::of(request, lane);
        let mut flight = InFlightRequest {
            account,
            output_tokens_due: output_tokens,
            turn,
            ..self.flight_at(now, request, &picked, *block_tokens)
        };
        if waits_for_adapter || self.adapters.loads_at(endpoint) {
            flight.timed.is_delayed();
        }
        let computed = prefill.as_ref().unwrap_or(&picked).uncached_tokens(request);
        self.queue.charge(account, i64::from(computed) + OUTPUT_WEIGHT * i64::from(output_tokens));
        if let (Some(leg), Some(prefill)) = (leg, &prefill) {
            flight.prefilling = false;
            flight.is_split = true;
            flight.timed.is_delayed();
            let tokens = std::mem::take(&mut flight.prefill_tokens);
            (flight.prefill_pairs, flight.lower_tokens) = (0, 0);
            flight.receiving = Some(Receiving { leg: leg.id, from: leg.endpoint, tokens, since: None });
            let asked = SchedulingRequest { id: leg.id, session: None, ..request.clone() };
            let first = InFlightRequest {
                account,
                leg_of: Some(request.id),
                is_stream: false,
                tpot_ms: None,
                ..self.flight_at(now, &asked, prefill, *block_tokens)
            };
            self.splits.legs += 1;
            self.splits.receiving += 1;
            self.splits.transfers.begin(leg.endpoint, endpoint);
            self.reserve(first);
        } else if request.whole_answer {
            self.estimated_prefills.placed(now, request.id, picked.first_token_s(request));
        }
        self.reserve(flight);
        out.push(Output::Dispatch { request: request.id, placement });
    }

    /// The pick that a replay forces, if it forces one.
    fn forced_pick(&self, request: &SchedulingRequest) -> Option<Pick> {
        let (endpoint, prefill) = self.forced?;
        let row_of = |id| self.rows.iter().position(|row| row.endpoint == id);
        let prefill = prefill.filter(|_| request.leg.is_some()).and_then(row_of);
        row_of(endpoint).map(|row| Pick { row, prefill })
    }

    /// A request, or a leg of it, was placed on this row. Returns whether it waits for its adapter there.
    fn note_adapter(
        &mut self,
        now: Nanos,
        id: RequestId,
        adapter: AdapterKey,
        request: &SchedulingRequest,
        row: &Candidate,
    ) -> bool {
        let at = self.rows.iter().position(|other| other.endpoint == row.endpoint);
        let Some(found) = at.and_then(|at| self.adapters.view(now, adapter).rows.get(at).copied()) else {
            return false;
        };
        self.adapters.placed(now, id, adapter, (row.endpoint, found), row.first_token_s(request))
    }

    fn feed(&self, endpoint: EndpointId) -> Feed {
        self.pool.get(endpoint).map_or(Feed::Absent, |endpoint| endpoint.cache_accuracy.feed())
    }

    /// A request that this row is to compute and decode.
    fn flight_at(
        &self,
        now: Nanos,
        request: &SchedulingRequest,
        row: &Candidate,
        block_tokens: u32,
    ) -> InFlightRequest {
        let (uncached, pairs) = (row.uncached_tokens(request), row.uncached_pairs(request));
        let prefilled = self.pool.get(row.endpoint).map(|endpoint| endpoint.pace.prefilled());
        InFlightRequest {
            request: request.id,
            endpoint: row.endpoint,
            era: 0,
            prefill_tokens: uncached,
            prefill_pairs: pairs,
            lower_tokens: row.lower_tokens,
            context_tokens: u64::from(request.prompt_tokens),
            prompt_tokens: request.prompt_tokens,
            block_tokens,
            prediction: Some(row.prediction),
            prefilling: true,
            computed: false,
            is_stream: !request.whole_answer,
            timed: self.learning.placed(now, request, row, prefilled.unwrap_or_default()),
            account: Account::of(request, Lane::Active),
            output_tokens_due: 0,
            receiving: None,
            leg_of: None,
            is_split: false,
            tpot_ms: tpot_met_ms(row, request),
            turn: None,
        }
    }

    /// Reserves what a request needs at its endpoint.
    fn reserve(&mut self, flight: InFlightRequest) {
        let flight =
            InFlightRequest { era: self.register_with_breaker(flight.endpoint, flight.request), ..flight };
        // A half-open breaker admits one request; if this is that request, queued requests can no longer use it.
        self.queue_blocked = false;
        if let Some(endpoint) = self.pool.get_mut(flight.endpoint) {
            let ledger = &mut endpoint.load.in_flight;
            if ledger.prefilling == 0 {
                endpoint.computing_since = flight.timed.placed();
            }
            ledger.requests += 1;
            ledger.prefilling += u32::from(flight.prefilling);
            ledger.moving += u32::from(flight.moving());
            ledger.prefill_pairs += flight.prefill_pairs;
            ledger.lower_tokens += u64::from(flight.lower_tokens);
            ledger.prefill_tokens += u64::from(flight.prefill_tokens);
            ledger.context_tokens += flight.context_tokens;
            if let Some(most_ms) = flight.tpot_ms {
                endpoint.tpots.add(most_ms);
            }
        }
        self.tpots_due += usize::from(flight.tpot_ms.is_some());
        self.flights.insert(flight);
    }
}
