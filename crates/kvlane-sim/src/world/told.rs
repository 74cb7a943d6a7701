//! What a request's router is told of it: nothing, if placements are given.

use kvlane_core::cache_accuracy::ReportedReuse;
use kvlane_core::request::RequestId;
use kvlane_core::router::Router;
use kvlane_core::scheduler::Input;

use super::World;
use super::play::{LEGS_MAX, Play};
use crate::outcome::Outcome;

// === impl Play ===

impl Play<'_, '_> {
    /// Its router.
    pub(super) fn router_of(&self, request: u32) -> &Router {
        self.world.gateways.at(self.gateway_of(request))
    }

    /// Steps a request's router.
    pub(super) fn tell(&mut self, request: u32, input: Input) {
        if self.placements.is_some() {
            return;
        }
        let (now, gateway) = (self.now(), self.gateway_of(request));
        let World { gateways, outputs, .. } = &mut *self.world;
        gateways.step_one(gateway, now, input, outputs);
    }

    pub(super) fn progress(&mut self, request: u32, id: RequestId, first: bool, tokens: u32) {
        if self.placements.is_some() {
            return;
        }
        let (now, gateway) = (self.now(), self.gateway_of(request));
        let World { gateways, outputs, .. } = &mut *self.world;
        gateways.progress(gateway, now, (id, first, tokens), outputs);
    }

    /// A prompt was computed that is decoded elsewhere.
    pub(super) fn began(&mut self, request: u32, leg: RequestId) {
        let (now, gateway) = (self.now(), self.gateway_of(request));
        let World { gateways, outputs, ledger_changes, .. } = &mut *self.world;
        *ledger_changes += LEGS_MAX;
        let time = gateways.time(gateway, now);
        gateways.at(gateway).begin(time, leg, outputs);
    }

    /// Reports the cached tokens of an answer to the router. Transferred blocks were in no cache.
    pub(super) fn answered(&mut self, request: u32) {
        let Outcome { cached_tokens, moved_tokens, split, .. } = *self.outcome(request);
        if split.is_none() && moved_tokens == 0 {
            let reported = self.reported(request, cached_tokens);
            self.tell(request, Input::Answered { request: self.id(request), reported });
        }
    }

    pub(super) fn reported(&self, request: u32, cached_tokens: u32) -> ReportedReuse {
        ReportedReuse { prompt_tokens: self.request(request).input_tokens, cached_tokens }
    }

    /// Reports to the router that a request has ended at its endpoints.
    pub(super) fn release(&mut self, request: u32) {
        let leg = self.flights.get(&request).and_then(|flight| flight.prefill).map(|prefill| prefill.id);
        self.world.ledger_changes += LEGS_MAX;
        let ids = leg.into_iter().chain([self.id(request)]);
        ids.for_each(|id| self.tell(request, Input::Finished { request: id }));
    }

    /// Reports to the router that an endpoint has answered a leg without failure; a rejection also counts.
    pub(super) fn succeeded(&mut self, request: u32, leg: RequestId) {
        if self.world.config.rules.is_some() {
            self.tell(request, Input::Succeeded { request: leg });
        }
    }
}
