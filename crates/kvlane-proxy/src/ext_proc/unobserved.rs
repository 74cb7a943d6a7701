//! Requests whose answers do not pass through the picker: their load counts until their answers should have ended.
//!
//! The end is estimated from the endpoint's rates and the usual length of answers, and corrected by the engine's own
//! reports: if an engine reports fewer requests than are counted there, the ones that should have ended first are over;
//! and the estimates of an endpoint are stretched or shortened until the requests counted there are as many as its engine
//! reports. Where several pickers share the engines, each so counts the load of all of them; if they tell each other what
//! they count ([replicas](kvlane_core::replica)), each corrects its own share of it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvlane_core::load::LoadReport;
use kvlane_core::time::Nanos;
use kvlane_fleet::Fleet;
use kvlane_fleet::pool::PoolEndpoint;
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::lease::Lease;

/// How often requests that should have ended are released.
const TICK: Duration = Duration::from_millis(50);
/// A report does not include requests that were placed shortly before it.
const REPORT_LAG: Nanos = Nanos::from_millis(500);
/// Bounds of the factor on estimates, and its largest change by one report.
const FACTOR_MAX: f64 = 50.0;
const FACTOR_STEP: f64 = 1.25;
/// Longest time that a request counts.
const COUNTED_MAX: Nanos = Nanos::from_secs(3600);
/// Most requests that are counted; beyond them the ones that should end first are released.
const REQUESTS_MAX: usize = 200_000;

/// Requests that are counted until their estimated end.
#[derive(Default)]
pub struct Unobserved {
    state: Mutex<State>,
    /// A request was added where there was none.
    added: Notify,
}

#[derive(Default)]
struct State {
    /// By number, with the load that each holds.
    counted: HashMap<u64, Counted>,
    /// By estimated end. May hold requests that are released already.
    ends: BinaryHeap<Reverse<(Nanos, u64)>>,
    next: u64,
    /// What is known about each endpoint, by its address in memory.
    endpoints: HashMap<usize, Known>,
}

struct Counted {
    endpoint: usize,
    placed: Nanos,
    ends: Nanos,
    /// Dropping it releases the load.
    _lease: Lease,
}

/// What is known about an endpoint with requests.
struct Known {
    endpoint: Arc<PoolEndpoint>,
    requests: usize,
    /// The factor on estimates.
    factor: f64,
    /// The time of the last report that was used.
    reported: Option<Nanos>,
}

/// A report of an endpoint's engine.
struct Reported {
    report: LoadReport,
    at: Nanos,
    /// Requests that other pickers count there, as far as they tell.
    elsewhere: u32,
}

// === impl Unobserved ===

impl Unobserved {
    /// Counts a request that has just been placed until its answer should have ended.
    pub(crate) fn count(&self, mut lease: Lease) {
        // It is over when its prompt should be computed.
        if let Some(leg) = lease.take_leg() {
            self.count(leg);
        }
        let placed = lease.placed;
        let expected_s = lease.expected_end_s().unwrap_or_default();
        lease.pass_by();
        let endpoint = Arc::as_ptr(&lease.endpoint) as usize;
        let mut state = self.state();
        let known = state.endpoints.entry(endpoint).or_insert_with(|| Known {
            endpoint: Arc::clone(&lease.endpoint),
            requests: 0,
            factor: 1.0,
            reported: None,
        });
        known.requests += 1;
        let counts = Nanos::from_secs_f64(expected_s * known.factor).min(COUNTED_MAX);
        let (ends, number) = (placed + counts, state.next);
        state.next += 1;
        state.ends.push(Reverse((ends, number)));
        let was_empty = state.counted.is_empty();
        state.counted.insert(number, Counted { endpoint, placed, ends, _lease: lease });
        let surplus = if state.counted.len() > REQUESTS_MAX { state.pop_first() } else { None };
        drop(state);
        drop(surplus);
        if was_empty {
            self.added.notify_one();
        }
    }

    /// Releases requests when they should have ended, for as long as the picker runs.
    pub async fn run(&self, fleet: &Fleet) {
        loop {
            if self.state().counted.is_empty() {
                self.added.notified().await;
            }
            sleep(TICK).await;
            self.release(fleet.clock.now(), |endpoint| reported(fleet, endpoint));
        }
    }

    /// Releases what has ended by `now`, by estimate or by report.
    fn release(&self, now: Nanos, report: impl Fn(&PoolEndpoint) -> Option<Reported>) {
        let mut over = Vec::new();
        {
            let mut state = self.state();
            while state.ends.peek().is_some_and(|Reverse((ends, _))| *ends <= now) {
                over.extend(state.pop_first());
            }
            let news = state.endpoints.iter().filter_map(|(key, known)| {
                let reported = report(&known.endpoint)?;
                (known.reported != Some(reported.at)).then_some((*key, reported))
            });
            let news: Vec<_> = news.collect();
            for (key, reported) in news {
                state.correct(key, &reported, &mut over);
            }
            // An endpoint that is not counted anywhere keeps its factor while it is in a pool.
            state.endpoints.retain(|_, known| known.requests > 0 || Arc::strong_count(&known.endpoint) > 1);
        }
        // Each of them takes the scheduler's lock.
        drop(over);
    }

    /// Requests that are counted.
    pub fn len(&self) -> usize {
        self.state().counted.len()
    }

    /// Whether none is counted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last report of an endpoint's engine.
fn reported(fleet: &Fleet, endpoint: &PoolEndpoint) -> Option<Reported> {
    let pools = fleet.pools();
    let pool = pools
        .iter()
        .find(|pool| pool.endpoint(endpoint.id).is_some_and(|own| std::ptr::eq(&*own, endpoint)))?;
    pool.router.read(|scheduler| {
        let endpoint = scheduler.pool().get(endpoint.id)?;
        let (report, at) = endpoint.load.reported?;
        Some(Reported { report, at, elsewhere: endpoint.elsewhere.requests })
    })
}

// === impl State ===

impl State {
    /// Takes out the request that should end first.
    fn pop_first(&mut self) -> Option<Counted> {
        while let Some(Reverse((_, number))) = self.ends.pop() {
            if let Some(counted) = self.counted.remove(&number) {
                if let Some(known) = self.endpoints.get_mut(&counted.endpoint) {
                    known.requests -= 1;
                }
                return Some(counted);
            }
        }
        None
    }

    /// Uses a report of an endpoint's engine.
    fn correct(&mut self, key: usize, reported: &Reported, over: &mut Vec<Counted>) {
        let Some(known) = self.endpoints.get_mut(&key) else { return };
        let Reported { report, at, elsewhere } = *reported;
        known.reported = Some(at);
        let all_in_engine = report.running as usize + report.waiting as usize;
        let all = known.requests + elsewhere as usize;
        let ratio = (all_in_engine + 1) as f64 / (all + 1) as f64;
        // Those of others are corrected by others.
        let in_engine = (all_in_engine * known.requests).div_ceil(all.max(1));
        known.factor =
            (known.factor * ratio.clamp(1.0 / FACTOR_STEP, FACTOR_STEP)).clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        if known.requests <= in_engine {
            return;
        }
        let seen = |counted: &Counted| counted.endpoint == key && counted.placed + REPORT_LAG <= at;
        let mut by_end: Vec<_> = self
            .counted
            .iter()
            .filter(|(_, counted)| seen(counted))
            .map(|(number, counted)| (counted.ends, *number))
            .collect();
        by_end.sort_unstable();
        let surplus = by_end.len().saturating_sub(in_engine);
        for (_, number) in by_end.into_iter().take(surplus) {
            if let Some(counted) = self.counted.remove(&number) {
                known.requests -= 1;
                over.push(counted);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    const SECOND: Nanos = Nanos::from_secs(1);

    fn report(running: u32) -> LoadReport {
        LoadReport { running, waiting: 0, kv_usage_ratio: 0.0, kv_capacity_tokens: None }
    }

    fn told(report: LoadReport, at: Nanos) -> Reported {
        Reported { report, at, elsewhere: 0 }
    }

    /// `count` requests placed on one endpoint, and when the last was placed.
    async fn counted(world: &World, count: usize) -> (Unobserved, Nanos) {
        let (unobserved, mut placed) = (Unobserved::default(), Nanos::ZERO);
        for _ in 0..count {
            let lease = world.lease().await;
            placed = lease.placed;
            unobserved.count(lease);
        }
        assert_eq!((unobserved.len(), world.load().requests as usize), (count, count));
        (unobserved, placed)
    }

    fn factor(unobserved: &Unobserved) -> f64 {
        unobserved.state().endpoints.values().next().expect("an endpoint").factor
    }

    /// Invariant: A request whose answer is not observed releases its load once its answer should have ended, or when its
    /// engine reports fewer requests than are counted.
    ///
    /// Also held by `an_engine_that_reports_fewer_requests_has_ended_the_first_of_them`.
    #[tokio::test]
    async fn the_load_counts_until_the_answer_should_have_ended() {
        let world = World::new(1);
        let (unobserved, placed) = counted(&world, 3).await;
        assert!(world.pool.endpoints()[0].vitals.is_idle(), "they say nothing about its progress");
        unobserved.release(placed, |_| None);
        assert_eq!(world.load().requests, 3);
        unobserved.release(placed + COUNTED_MAX, |_| None);
        assert!(unobserved.is_empty());
        assert_eq!(world.load(), Default::default());
    }

    #[tokio::test]
    async fn an_engine_that_reports_fewer_requests_has_ended_the_first_of_them() {
        let world = World::new(1);
        let (unobserved, placed) = counted(&world, 5).await;
        unobserved.release(placed, |_| Some(told(report(0), placed)));
        assert_eq!(unobserved.len(), 5, "they may not have reached it when it reported");
        unobserved.release(placed, |_| Some(told(report(2), placed + SECOND)));
        assert_eq!((unobserved.len(), world.load().requests), (2, 2));
        unobserved.release(placed, |_| Some(told(report(0), placed + SECOND)));
        assert_eq!(unobserved.len(), 2, "a report is used once");
        unobserved.release(placed, |_| Some(told(report(9), placed + SECOND + SECOND)));
        assert_eq!(unobserved.len(), 2, "those of other pickers");
    }

    #[tokio::test]
    async fn estimates_stretch_until_they_agree_with_the_engine() {
        let world = World::new(1);
        let (unobserved, placed) = counted(&world, 1).await;
        let mut at = placed;
        for _ in 0..3 {
            at += SECOND;
            unobserved.release(placed, |_| Some(told(report(8), at)));
        }
        assert!((factor(&unobserved) - FACTOR_STEP.powi(3)).abs() < 1e-9);
        for _ in 0..100 {
            at += SECOND;
            unobserved.release(placed, |_| Some(told(report(1), at)));
        }
        assert!((factor(&unobserved) - FACTOR_STEP.powi(3)).abs() < 1e-9, "as many as it reports");
        for _ in 0..100 {
            at += SECOND;
            unobserved.release(placed, |_| Some(told(report(1000), at)));
        }
        assert!((factor(&unobserved) - FACTOR_MAX).abs() < 1e-9, "bounded");
    }

    #[tokio::test]
    async fn pickers_that_tell_each_other_correct_their_own_share() {
        let world = World::new(1);
        let (unobserved, placed) = counted(&world, 4).await;
        let told = |running, at| Some(Reported { elsewhere: 4, ..told(report(running), at) });
        unobserved.release(placed, |_| told(8, placed + SECOND));
        assert!((factor(&unobserved) - 1.0).abs() < 1e-9, "its eight are those of both");
        assert_eq!(unobserved.len(), 4);
        unobserved.release(placed, |_| told(4, placed + SECOND + SECOND));
        assert_eq!(unobserved.len(), 2, "the other picker releases two as well");
    }

    #[tokio::test]
    async fn a_request_that_has_ended_by_report_does_not_end_again_by_estimate() {
        let world = World::new(1);
        let (unobserved, placed) = counted(&world, 2).await;
        unobserved.release(placed, |_| Some(told(report(1), placed + SECOND)));
        assert_eq!(world.load().requests, 1);
        unobserved.release(placed + COUNTED_MAX, |_| None);
        assert_eq!(world.load(), Default::default());
        assert!(unobserved.state().ends.is_empty());
        assert_eq!(unobserved.state().endpoints.len(), 1, "its factor stays while it is in a pool");
    }
}
