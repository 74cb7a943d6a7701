//! What a scheduler tells the routers of other replicas, and hears from them.

use super::Scheduler;
use crate::endpoint::EndpointId;
use crate::replica::{Estimate, News, PeerState, ReplicaId, Service, Share, Subject};
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// What was told.
#[derive(Debug, Default)]
pub(super) struct Told {
    number: u64,
    shares: ByEndpoint<Share>,
    /// Seconds of work placed on each endpoint since the start.
    placed_s: ByEndpoint<f64>,
}

// === impl Told ===

impl Told {
    /// A request was placed, which gives an endpoint this much work.
    pub(super) fn placed(&mut self, endpoint: EndpointId, work_s: f64) {
        *self.placed_s.get_or_insert(endpoint, || 0.0) += work_s;
    }
}

impl Scheduler {
    /// Adds the next news for other routers: what has changed since the last, or all.
    pub fn tell(&mut self, all: bool, news: &mut News) {
        self.told.number += 1;
        news.number = self.told.number;
        news.services = self.queue.tell(all);
        if all {
            news.learned = self.tell_learned();
        }
        for endpoint in self.pool.endpoints() {
            let placed_s = self.told.placed_s.get(endpoint.id).copied().unwrap_or(0.0);
            let share = Share { in_flight: endpoint.load.in_flight, placed_s };
            let told = self.told.shares.get_or_insert(endpoint.id, Share::default);
            if all || share.is_news(told) {
                *told = share;
                news.shares.push((endpoint.id, share));
            }
        }
    }

    /// Another router told what it has placed.
    pub(super) fn heard(
        &mut self,
        now: Nanos,
        (replica, number): (ReplicaId, u64),
        shares: &[(EndpointId, Share)],
        services: &[Service],
        learned: &[(Subject, Estimate)],
    ) {
        // Endpoints may have room again.
        self.queue_blocked = false;
        self.queue.hear(replica, number, services);
        if !self.peers.knows(replica) {
            self.learned.tell_anew();
        }
        self.hear_learned(now, (replica, number), learned);
        let policy = &mut self.policy;
        let placed = |endpoint, work_s| policy.placed_elsewhere(now, endpoint, work_s);
        self.peers.hear(now, replica, number, shares, &mut self.pool, placed);
    }

    /// The routers of other replicas that were heard lately.
    pub fn peers(&self) -> impl Iterator<Item = PeerState> {
        self.peers.states()
    }
}
