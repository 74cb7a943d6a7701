//! What replicas of the gateway tell each other of clients' usage.

use kvlane_core::limit::News;
use kvlane_core::replica::ReplicaId;
use kvlane_core::time::Nanos;

use super::{Limits, lock};

// === impl Limits ===

impl kvlane_fleet::replicas::Limits for Limits {
    fn tell(&self, now: Nanos, own: ReplicaId, others: &[ReplicaId], all: bool) -> Vec<News> {
        let rules = self.rules.load();
        let told = rules.all.iter().map(|rule| {
            let mut limiter = lock(&rule.used);
            limiter.set_replicas(now, own, others.iter().copied());
            let usages = limiter.tell(now, all);
            News { subject: (rule.spec.key.clone(), rule.spec.model.clone()), number: 0, usages }
        });
        told.filter(|news| !news.usages.is_empty()).collect()
    }

    fn hear(&self, now: Nanos, replica: ReplicaId, news: &News) {
        let rules = self.rules.load();
        let (key, model) = &news.subject;
        if let Some(rule) = rules.all.iter().find(|rule| rule.spec.subject() == (key, model)) {
            lock(&rule.used).hear(now, replica, news.number, &news.usages);
        }
    }
}
