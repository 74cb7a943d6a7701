//! Takes the news of all pools, and puts it into the outboxes of all connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvlane_core::limit;
use kvlane_core::replica as core;
use kvlane_core::scheduler::Input;
use kvlane_fleet::pool::ModelPool;
use kvlane_wire::replica::News;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Shared;
use super::outbox::Outbox;

/// How often everything is told: what was lost is repaired, and a replica that has nothing in flight shows that it lives.
const ALL_EVERY: Duration = Duration::from_secs(1);

/// Tells for as long as it is polled.
pub(super) async fn tell(shared: Arc<Shared>) {
    let mut ticks = interval(shared.config.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut all_at = Instant::now();
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let is_due = now >= all_at;
        let greets = shared.greeted.swap(false, Ordering::Relaxed);
        let all = greets || is_due;
        if is_due {
            all_at = now + ALL_EVERY;
        }
        let outboxes: Vec<Arc<Outbox>> = shared.outboxes().values().cloned().collect();
        let put = |news: News| {
            let shed: usize = outboxes.iter().map(|outbox| outbox.put(&news, all)).sum();
            shared.fleet.metrics.replicas.replica_marks_shed.inc_by(shed as u64);
        };
        let pools = shared.fleet.pools();
        for pool in &pools {
            if is_due && !pool.router.peers().is_empty() {
                // Leases end at their time, also when there are no requests.
                pool.step(Input::Tick);
            }
            // Without a connection, prompts are taken now and then, so that the router need not keep them.
            if outboxes.is_empty() && !all {
                continue;
            }
            let told = pool.router.tell(all);
            if all || !(told.shares.is_empty() && told.prompts.is_empty() && told.services.is_empty()) {
                put(News { number: shared.number(), ..named(pool, told) });
            }
        }
        let now = shared.fleet.clock.now();
        let others = shared.fleet.replicas.live(now);
        for told in shared.limits.tell(now, shared.own, &others, greets) {
            let number = shared.number();
            outboxes.iter().for_each(|outbox| outbox.put_limit(&limit::News { number, ..told.clone() }));
        }
        if pools.is_empty() && all {
            put(News::default());
        }
    }
}

/// News with the names of endpoints. Those that have left meanwhile have none.
pub(super) fn named(pool: &ModelPool, told: core::News) -> News {
    let core::News { number, shares, services, learned, prompts } = told;
    let name = |id| pool.endpoint(id).map(|endpoint| Arc::clone(&endpoint.name));
    let shares = shares.into_iter().filter_map(|(id, share)| Some((name(id)?, share))).collect();
    let learned =
        learned.into_iter().filter_map(|(of, estimate)| Some((of.named(name)?, estimate))).collect();
    let prompts = prompts.into_iter().filter_map(|sent| Some((name(sent.endpoint)?, sent.marks))).collect();
    News {
        pool: pool.model.as_str().into(),
        number,
        shares,
        services,
        learned,
        block_tokens: pool.router.block_tokens(),
        prompts,
    }
}
