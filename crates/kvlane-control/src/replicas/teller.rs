//! Takes the news of all pools, and puts it into the outboxes of all connections.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvlane_core::limit;
use kvlane_core::replica as core;
use kvlane_core::scheduler::Input;
use kvlane_fleet::pool::ModelPool;
use kvlane_wire::replica::News;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::Shared;
use super::gap::{CpuTime, Gap};
use super::outbox::Outbox;

/// Tells for as long as it is polled: soon after a placement, everything else after `replicas.interval` at most.
pub(super) async fn tell(shared: Arc<Shared>) {
    let interval = shared.config.interval;
    let mut now = Instant::now();
    let mut gap = Gap::new(interval, now, CpuTime::now());
    let (mut all_at, mut limits_at) = (now, now);
    loop {
        placed_or(&shared.fleet.replicas.placed, now + gap.get(), now + interval).await;
        now = Instant::now();
        if gap.is_due(now) {
            gap.review(now, CpuTime::now());
        }
        let is_due = now >= all_at;
        let greets = shared.greeted.swap(false, Ordering::Relaxed);
        let all = greets || is_due;
        if is_due {
            all_at = now + Duration::from_nanos(core::ALL_EVERY.0);
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
            if all || !told.is_empty() {
                put(News { number: shared.number(), ..named(pool, told) });
            }
        }
        // Limiters assume that news comes at about the same pace.
        if greets || now + interval / 2 >= limits_at {
            limits_at = now + interval;
            let now = shared.fleet.clock.now();
            let others = shared.fleet.replicas.live(now);
            for told in shared.limits.tell(now, shared.own, &others, greets) {
                let number = shared.number();
                outboxes.iter().for_each(|outbox| outbox.put_limit(&limit::News { number, ..told.clone() }));
            }
        }
        if pools.is_empty() && all {
            put(News::default());
        }
    }
}

/// Waits until a request has been placed, but until `earliest` at least and until `latest` at most.
async fn placed_or(placed: &Notify, earliest: Instant, latest: Instant) {
    tokio::select! {
        () = placed.notified() => {
            if Instant::now() < earliest {
                sleep_until(earliest).await;
                // Those that were placed meanwhile are told, too.
                tokio::select! { biased; () = placed.notified() => {}, () = std::future::ready(()) => {} }
            }
        }
        () = sleep_until(latest) => {}
    }
}

/// News with the names of endpoints. Those that have left meanwhile have none.
pub(super) fn named(pool: &ModelPool, told: core::News) -> News {
    let core::News { number, shares, services, learned, turns, prompts } = told;
    let name = |id| pool.endpoint(id).map(|endpoint| Arc::clone(&endpoint.name));
    let shares = shares.into_iter().filter_map(|(id, share)| Some((name(id)?, share))).collect();
    let learned =
        learned.into_iter().filter_map(|(of, estimate)| Some((of.named(name)?, estimate))).collect();
    let turns = turns.into_iter().filter_map(|(id, turn)| Some((name(id)?, turn))).collect();
    let prompts = prompts.into_iter().filter_map(|sent| Some((name(sent.endpoint)?, sent.marks))).collect();
    News {
        pool: pool.model.as_str().into(),
        number,
        shares,
        services,
        learned,
        turns,
        block_tokens: pool.router.block_tokens(),
        prompts,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Milliseconds until the next news, at least 2 and at most 20 after the last.
    async fn told_after_ms(placed: &Notify) -> u128 {
        let start = Instant::now();
        placed_or(placed, start + 2 * MS, start + 20 * MS).await;
        start.elapsed().as_millis()
    }

    /// Invariant: A placement is told to other replicas as soon as the gap since the last news has passed, and once.
    #[tokio::test(start_paused = true)]
    async fn a_placement_is_told_after_the_gap_and_other_news_after_the_interval() {
        let placed = Notify::new();
        assert_eq!(told_after_ms(&placed).await, 20, "nothing was placed");
        placed.notify_one();
        assert_eq!(told_after_ms(&placed).await, 2, "it was placed just after the last news");
        let late = async {
            advance(7 * MS).await;
            placed.notify_one();
        };
        assert_eq!(tokio::join!(told_after_ms(&placed), late).0, 7, "the gap has passed");
        placed.notify_one();
        let meanwhile = async {
            advance(MS).await;
            placed.notify_one();
        };
        assert_eq!(tokio::join!(told_after_ms(&placed), meanwhile).0, 2);
        assert_eq!(told_after_ms(&placed).await, 20, "both have been told");
    }
}
