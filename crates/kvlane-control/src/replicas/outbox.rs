//! News that waits to be sent to one replica: bounded, and the latest wins.
//!
//! Loads and usages are totals, so a later one replaces an earlier one. Marks are sent once, when there is room for them: beyond a
//! limit they are left out, and counted.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvlane_core::block::BlockHash;
use kvlane_core::limit::{self, Usage};
use kvlane_core::replica::{Estimate, Service, Share, Subject, Turn};
use kvlane_core::request::{SessionKey, TenantKey};
use kvlane_wire::replica::News;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

/// Most marks that wait.
const MARKS_MAX: usize = 1 << 15;
/// Most usages of limits that wait; of further keys nothing is told until their usage changes again.
const USAGES_MAX: usize = 1 << 14;
/// Most services of tenants that wait, of one pool.
const SERVICES_MAX: usize = 1 << 13;
/// Most estimates that wait, of one pool: more than two for each of 10,000 endpoints.
const LEARNED_MAX: usize = 1 << 15;
/// Most turns of conversations that wait, of one pool; of further conversations nothing is told until their next turn.
const TURNS_MAX: usize = 1 << 15;
/// Bytes of a mark in a frame.
const MARK_BYTES: f64 = 8.0;
/// Share of a second's bytes that marks leave to loads.
const LOADS_SHARE: f64 = 0.25;

/// The news for one replica.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pending: Mutex<Pending>,
    filled: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    pools: BTreeMap<Arc<str>, OfPool>,
    marks: usize,
    /// Usage by entry of `limits` and key, with the number of the news.
    limits: BTreeMap<(String, String), (u64, BTreeMap<u64, Usage>)>,
}

/// What is taken to be sent.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Taken {
    pub(super) news: Vec<News>,
    pub(super) limits: Vec<limit::News>,
}

/// The news of one router.
#[derive(Debug, Default)]
struct OfPool {
    number: u64,
    shares: BTreeMap<Arc<str>, Share>,
    services: BTreeMap<(i8, u8, Option<TenantKey>), Service>,
    learned: BTreeMap<Subject<Arc<str>>, Estimate>,
    turns: BTreeMap<SessionKey, (Arc<str>, Turn)>,
    block_tokens: u32,
    prompts: VecDeque<(Arc<str>, Vec<BlockHash>)>,
    /// There is more than marks that had no room.
    is_new: bool,
}

/// Bytes that may be sent to one replica. They accrue for up to a second; what is sent beyond is waited for.
#[derive(Debug)]
pub(super) struct Budget {
    per_second: f64,
    bytes: f64,
    at: Instant,
}

// === impl Outbox ===

impl Outbox {
    /// Adds news; that of all endpoints replaces all earlier loads. Returns how many marks were left out.
    pub(super) fn put(&self, news: &News, all: bool) -> usize {
        let mut pending = self.pending();
        let Pending { pools, marks, .. } = &mut *pending;
        let waiting = pools.entry(Arc::clone(&news.pool)).or_default();
        waiting.number = news.number;
        waiting.is_new = true;
        if all {
            waiting.shares.clear();
        }
        waiting.shares.extend(news.shares.iter().map(|(name, share)| (Arc::clone(name), *share)));
        let account = |service: &Service| (service.priority, service.lane, service.tenant);
        for service in &news.services {
            if waiting.services.len() < SERVICES_MAX || waiting.services.contains_key(&account(service)) {
                waiting.services.insert(account(service), *service);
            }
        }
        for (of, estimate) in &news.learned {
            if waiting.learned.len() < LEARNED_MAX || waiting.learned.contains_key(of) {
                waiting.learned.insert(of.clone(), *estimate);
            }
        }
        for (name, turn) in &news.turns {
            if waiting.turns.len() < TURNS_MAX || waiting.turns.contains_key(&turn.session) {
                waiting.turns.insert(turn.session, (Arc::clone(name), *turn));
            }
        }
        let mut shed = 0;
        if waiting.block_tokens != news.block_tokens {
            waiting.block_tokens = news.block_tokens;
            shed = waiting.prompts.drain(..).map(|(_, marks)| marks.len()).sum();
            *marks -= shed;
        }
        for (name, told) in &news.prompts {
            let kept = told.len().min(MARKS_MAX - *marks);
            *marks += kept;
            shed += told.len() - kept;
            if kept > 0 {
                waiting.prompts.push_back((Arc::clone(name), told[..kept].to_vec()));
            }
        }
        drop(pending);
        self.filled.notify_one();
        shed
    }

    /// Adds usage under one entry of `limits`.
    pub(super) fn put_limit(&self, news: &limit::News) {
        let mut pending = self.pending();
        let (number, waiting) = pending.limits.entry(news.subject.clone()).or_default();
        *number = news.number;
        for (key, usage) in &news.usages {
            if waiting.len() < USAGES_MAX || waiting.contains_key(key) {
                waiting.insert(*key, *usage);
            }
        }
        drop(pending);
        self.filled.notify_one();
    }

    /// Waits until there is news.
    pub(super) async fn filled(&self) {
        while self.pending().is_empty() {
            self.filled.notified().await;
        }
    }

    /// Takes all loads, and at most so many marks; others wait. None if only marks wait and there is no room for them.
    pub(super) fn take(&self, mut marks_max: usize) -> Taken {
        let mut pending = self.pending();
        let Pending { pools, marks, limits } = &mut *pending;
        let mut news = Vec::new();
        for (pool, waiting) in &mut *pools {
            let mut prompts = Vec::new();
            while marks_max > 0
                && let Some((name, mut told)) = waiting.prompts.pop_front()
            {
                if told.len() > marks_max {
                    waiting.prompts.push_front((Arc::clone(&name), told.split_off(marks_max)));
                }
                marks_max -= told.len();
                *marks -= told.len();
                prompts.push((name, told));
            }
            if std::mem::take(&mut waiting.is_new) || !prompts.is_empty() {
                let shares = std::mem::take(&mut waiting.shares).into_iter().collect();
                let (number, block_tokens) = (waiting.number, waiting.block_tokens);
                let services = std::mem::take(&mut waiting.services).into_values().collect();
                let learned = std::mem::take(&mut waiting.learned).into_iter().collect();
                let turns = std::mem::take(&mut waiting.turns).into_values().collect();
                let pool = Arc::clone(pool);
                news.push(News { pool, number, shares, services, learned, turns, block_tokens, prompts });
            }
        }
        pools.retain(|_, waiting| !waiting.prompts.is_empty());
        let limits = std::mem::take(limits).into_iter().map(|(subject, (number, usages))| limit::News {
            subject,
            number,
            usages: usages.into_iter().collect(),
        });
        Taken { news, limits: limits.collect() }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Pending ===

impl Pending {
    fn is_empty(&self) -> bool {
        self.pools.is_empty() && self.limits.is_empty()
    }
}

// === impl Budget ===

impl Budget {
    /// A budget of a whole second.
    pub(super) fn new(bytes_per_second: u64, now: Instant) -> Self {
        let per_second = bytes_per_second as f64;
        Self { per_second, bytes: per_second, at: now }
    }

    /// Bytes were sent.
    pub(super) fn spend(&mut self, now: Instant, bytes: usize) {
        self.accrue(now);
        self.bytes -= bytes as f64;
    }

    /// Time until something may be sent.
    fn pause(&mut self, now: Instant) -> Duration {
        self.accrue(now);
        Duration::from_secs_f64((-self.bytes / self.per_second).max(0.0))
    }

    /// Waits until something may be sent. A timer that has run out would still cost a turn of the runtime.
    pub(super) async fn wait(&mut self) {
        match self.pause(Instant::now()) {
            Duration::ZERO => {}
            pause => sleep(pause).await,
        }
    }

    /// Marks that may be sent: they leave some bytes to loads.
    pub(super) fn marks(&mut self, now: Instant) -> usize {
        self.accrue(now);
        // The cast saturates.
        ((self.bytes - self.per_second * LOADS_SHARE) / MARK_BYTES) as usize
    }

    fn accrue(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.bytes = (self.bytes + passed * self.per_second).min(self.per_second);
        self.at = now;
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::load::InFlight;

    use super::*;

    fn share(requests: u32) -> Share {
        Share { in_flight: InFlight { requests, ..InFlight::default() }, ..Share::default() }
    }

    fn news(number: u64, shares: &[(&str, u32)], marks: usize) -> News {
        let shares = shares.iter().map(|(name, requests)| ((*name).into(), share(*requests))).collect();
        let prompts =
            if marks == 0 { Vec::new() } else { vec![("a".into(), vec![BlockHash(number); marks])] };
        News { pool: "m".into(), number, shares, block_tokens: 16, prompts, ..News::default() }
    }

    fn loads(news: &News) -> Vec<(&str, u32)> {
        news.shares.iter().map(|(name, share)| (&**name, share.in_flight.requests)).collect()
    }

    /// Invariant: A replica that reads nothing takes bounded memory, and then hears the latest loads.
    #[test]
    fn the_latest_loads_win_and_marks_are_bounded() {
        let outbox = Outbox::default();
        let mut shed = 0;
        for number in 1..=1000 {
            let loads = [("a", number as u32), ("b", 7)];
            shed += outbox.put(&news(number, &loads[..1 + usize::from(number == 3)], 100), false);
        }
        assert_eq!(shed, 100_000 - MARKS_MAX);
        let taken = outbox.take(MARKS_MAX).news;
        assert_eq!((taken.len(), taken[0].number), (1, 1000));
        assert_eq!(loads(&taken[0]), [("a", 1000), ("b", 7)]);
        assert_eq!(taken[0].prompts.iter().map(|(_, marks)| marks.len()).sum::<usize>(), MARKS_MAX);
        assert_eq!(outbox.take(MARKS_MAX), Taken::default());
    }

    #[test]
    fn news_of_all_endpoints_drops_those_that_have_left() {
        let outbox = Outbox::default();
        outbox.put(&news(1, &[("a", 1), ("gone", 2)], 0), false);
        outbox.put(&news(2, &[("a", 3)], 0), true);
        assert_eq!(loads(&outbox.take(0).news[0]), [("a", 3)]);
    }

    #[test]
    fn the_latest_estimates_win_and_are_bounded() {
        let outbox = Outbox::default();
        let learned = |number, endpoints: std::ops::Range<u32>| News {
            learned: endpoints
                .map(|n| {
                    let estimate = Estimate { value: 1.0, observations: number as u32 };
                    (Subject::Step(Some(n.to_string().into())), estimate)
                })
                .collect(),
            ..news(number, &[], 0)
        };
        outbox.put(&learned(1, 0..3), true);
        outbox.put(&learned(2, 1..2), true);
        let taken = outbox.take(0).news;
        let observations: Vec<u32> = taken[0].learned.iter().map(|(_, told)| told.observations).collect();
        assert_eq!(observations, [1, 2, 1], "those that were not told again wait");
        outbox.put(&learned(3, 0..LEARNED_MAX as u32 + 5), true);
        assert_eq!(outbox.take(0).news[0].learned.len(), LEARNED_MAX);
    }

    #[test]
    fn the_last_turns_win_and_are_bounded() {
        let outbox = Outbox::default();
        let turns = |number, sessions: std::ops::Range<u64>| News {
            turns: sessions
                .map(|n| ("a".into(), Turn { session: SessionKey(n), stamp: number, prompt_tokens: 1 }))
                .collect(),
            ..news(number, &[], 0)
        };
        outbox.put(&turns(1, 0..3), false);
        outbox.put(&turns(2, 1..2), true);
        let taken = outbox.take(0);
        assert_eq!(taken.news[0].turns.iter().map(|(_, turn)| turn.stamp).collect::<Vec<_>>(), [1, 2, 1]);
        outbox.put(&turns(3, 0..TURNS_MAX as u64 + 5), false);
        assert_eq!(outbox.take(0).news[0].turns.len(), TURNS_MAX);
    }

    #[test]
    fn marks_without_room_wait_and_loads_do_not() {
        let outbox = Outbox::default();
        outbox.put(&news(1, &[("a", 1)], 10), false);
        outbox.put(&news(2, &[("a", 2)], 10), false);
        let sizes = |news: &News| news.prompts.iter().map(|(_, marks)| marks.len()).collect::<Vec<_>>();
        let taken = outbox.take(13).news;
        assert_eq!((loads(&taken[0]), sizes(&taken[0])), (vec![("a", 2)], vec![10, 3]));
        assert_eq!(outbox.take(0), Taken::default(), "only marks wait");
        outbox.put(&news(3, &[("a", 3)], 0), false);
        let taken = outbox.take(0).news;
        assert_eq!((loads(&taken[0]), sizes(&taken[0])), (vec![("a", 3)], vec![]));
        let taken = outbox.take(100).news;
        assert_eq!((loads(&taken[0]), sizes(&taken[0]), taken[0].number), (vec![], vec![7], 3));
        assert_eq!(outbox.put(&news(4, &[], MARKS_MAX), false), 0, "those that were sent wait no more");
    }

    #[test]
    fn marks_of_other_blocks_are_of_no_use() {
        let outbox = Outbox::default();
        outbox.put(&news(3, &[], 10), false);
        assert_eq!(outbox.put(&News { block_tokens: 32, ..news(4, &[], 1) }, false), 10);
        assert_eq!(outbox.take(100).news[0].prompts, [("a".into(), vec![BlockHash(4)])]);
    }

    #[test]
    fn the_latest_usage_wins_and_keys_are_bounded() {
        let outbox = Outbox::default();
        let news = |number, keys: std::ops::Range<u64>| limit::News {
            subject: ("*".into(), "m".into()),
            number,
            usages: keys.map(|key| (key, Usage { asked: number, ..Usage::default() })).collect(),
        };
        outbox.put_limit(&news(1, 0..3));
        outbox.put_limit(&news(2, 1..2));
        let taken = outbox.take(0).limits;
        let asked: Vec<u64> = taken[0].usages.iter().map(|(_, usage)| usage.asked).collect();
        assert_eq!((taken.len(), taken[0].number, asked), (1, 2, vec![1, 2, 1]));
        outbox.put_limit(&news(3, 0..USAGES_MAX as u64 + 5));
        assert_eq!(outbox.take(0).limits[0].usages.len(), USAGES_MAX);
    }

    #[test]
    fn bytes_accrue_for_a_second() {
        let start = Instant::now();
        let mut budget = Budget::new(1000, start);
        assert_eq!((budget.marks(start), budget.pause(start)), (93, Duration::ZERO));
        budget.spend(start, 900);
        assert_eq!((budget.marks(start), budget.pause(start)), (0, Duration::ZERO));
        budget.spend(start, 600);
        assert_eq!(budget.pause(start), Duration::from_millis(500));
        let later = start + Duration::from_secs(3600);
        assert_eq!((budget.marks(later), budget.pause(later)), (93, Duration::ZERO));
    }
}
