//! Service of tenants at other routers, so that a tenant with the least service goes first wherever it was served.
//!
//! Each router tells, for each priority, lane and tenant, the total that it has charged: a value with one writer, of which
//! a later one replaces an earlier one. What another one tells is charged here, too.

use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashSet};

use super::account::Account;
use crate::replica::{ReplicaId, Service};

/// Most totals that are kept of this router's own charges, and of those of all others.
const OWN_MAX: usize = 4096;
const HEARD_MAX: usize = 16 * OWN_MAX;

/// What was charged here, and elsewhere.
#[derive(Debug, Default)]
pub(super) struct Services {
    is_told: bool,
    /// Rises when the totals begin anew.
    since: u32,
    totals: HashMap<Account, i64, FixedState>,
    changed: HashSet<Account, FixedState>,
    /// The number of the latest news of each, and its contents.
    heard: HashMap<(ReplicaId, Account), (u64, Service), FixedState>,
}

// === impl Services ===

impl Services {
    /// A tenant is charged here.
    pub(super) fn charged(&mut self, account: Account, tokens: i64) {
        if !self.is_told {
            return;
        }
        if self.totals.len() >= OWN_MAX && !self.totals.contains_key(&account) {
            self.totals.clear();
            self.changed.clear();
            self.since += 1;
        }
        *self.totals.entry(account).or_default() += tokens;
        self.changed.insert(account);
    }

    /// Takes the service of tenants for other routers, where it has changed since the last time; or all.
    pub(super) fn tell(&mut self, all: bool) -> Vec<Service> {
        let Services { is_told, since, totals, changed, .. } = self;
        *is_told = true;
        let changed = std::mem::take(changed);
        let told = totals.iter().filter(|(account, _)| all || changed.contains(*account));
        let mut told: Vec<Service> = told.map(|(account, tokens)| account.service(*since, *tokens)).collect();
        told.sort_unstable_by_key(|service| (service.priority, service.lane, service.tenant));
        told
    }

    /// Another router told something. `charge` gets what is newer than what was heard.
    pub(super) fn hear(
        &mut self,
        replica: ReplicaId,
        number: u64,
        services: &[Service],
        mut charge: impl FnMut(Account, i64),
    ) {
        for service in services {
            let Some(account) = Account::of_service(service) else { continue };
            let heard = &mut self.heard;
            let place = (replica, account);
            if heard.len() >= HEARD_MAX && !heard.contains_key(&place) {
                heard.clear();
            }
            let before = match heard.insert(place, (number, *service)) {
                // An older one.
                Some(known) if number <= known.0 => {
                    heard.insert(place, known);
                    continue;
                }
                Some((_, before)) if before.since == service.since => before.tokens,
                Some(_) => 0,
                // It was charged at an unknown time.
                None => service.tokens,
            };
            let tokens = service.tokens.saturating_sub(before);
            if tokens != 0 {
                charge(account, tokens);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Lane, Queue};
    use super::*;
    use crate::request::TenantKey;

    fn account(tenant: u64) -> Account {
        Account { priority: 0, lane: Lane::Active, tenant: Some(TenantKey(tenant)) }
    }

    fn served(queue: &Queue, tenant: u64) -> i64 {
        let account = account(tenant);
        let band = queue.bands.get(&account.band());
        band.and_then(|band| band.tenants.get(&account.tenant)).map_or(0, |tenant| tenant.served)
    }

    proptest! {
        /// Invariant: Queues that have heard the latest news of each other have served each tenant as much, in whatever order news came,
        /// how often it was repeated, and which older news was lost.
        #[test]
        fn any_order_repetition_and_loss_of_older_news_give_the_same_service(
            charges in prop::collection::vec((0u64..4, 0i64..500), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let mut teller = Queue::new(8);
            let told: Vec<_> = [(0, 0)].into_iter().chain(charges).map(|(tenant, tokens)| {
                (0..4).for_each(|each| teller.charge(account(each), 0));
                teller.charge(account(tenant), tokens);
                teller.tell(true)
            }).collect();
            let hear = |which: &mut dyn Iterator<Item = usize>| {
                let mut queue = Queue::new(8);
                queue.tell(true);
                queue.hear(ReplicaId(1), 0, &(0..4).map(|each| account(each).service(0, 0)).collect::<Vec<_>>());
                for n in which {
                    queue.hear(ReplicaId(1), n as u64 + 1, &told[n]);
                }
                queue
            };
            let straight = hear(&mut (0..told.len()));
            let crooked = hear(&mut order.iter().map(|n| n.index(told.len())).chain((0..told.len()).rev()));
            for tenant in 0..4 {
                prop_assert_eq!(served(&crooked, tenant), served(&straight, tenant));
                prop_assert_eq!(served(&crooked, tenant), served(&teller, tenant));
            }
        }
    }

    #[test]
    fn totals_that_begin_anew_are_charged_whole_and_what_was_before_is_not() {
        let (mut teller, mut queue) = (Queue::new(8), Queue::new(8));
        teller.tell(true);
        teller.charge(account(0), 100);
        queue.hear(ReplicaId(1), 1, &teller.tell(false));
        assert_eq!(served(&queue, 0), 0, "at an unknown time");
        (1..=OWN_MAX as u64).for_each(|tenant| teller.charge(account(tenant), 1));
        teller.charge(account(0), 7);
        queue.hear(ReplicaId(1), 2, &teller.tell(false));
        assert_eq!(served(&queue, 0), 7);
        assert_eq!(teller.tell(false), []);
    }
}
