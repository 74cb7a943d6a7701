//! The engine in real time.
//!
//! The engine model runs in virtual time, which is the wall-clock time since the start times the speed. One task
//! sleeps until the step in progress ends, runs the engine up to now and sleeps again; requests arrive and leave in
//! between, under the same lock. The runtime's timers have millisecond granularity, so clients see up to a
//! millisecond of delay, but delays do not accumulate, since steps follow each other in virtual time.
//!
//! A request does not get a queue of events but its [`Progress`]: tokens so far and outcome. A slow reader therefore
//! costs no memory, and reads everything at once later.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvlane_core::adapters::AdapterReport;
use kvlane_core::event::KvEvent;
use kvlane_core::request::AdapterKey;
use kvlane_core::time::Nanos;
use kvlane_sim::{Engine, EngineConfig, EngineEvent, EngineRequest, EngineStats, Remote};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::deaths::ArrivalTime;
use crate::feed::{Feed, Text};
use crate::metrics::{Histogram, Served};
use crate::tokens::Prompt;
use crate::transfer::config::KvTransferFaults;
use crate::transfer::link::{Fortune, Link, LinkCounts};

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finished,
    Rejected(&'static str),
    /// The engine died.
    Died(ArrivalTime),
    /// Its KV blocks did not arrive.
    Failed,
}

/// Progress of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Output tokens.
    pub(crate) produced: u32,
    /// Prompt tokens that came from the cache.
    pub(crate) cached: u32,
    /// Tokens to transfer, once there are blocks for them.
    pub(crate) allocated: Option<u32>,
    /// The blocks that it got are not those of its prompt, so its answer is wrong.
    pub(crate) wrong: bool,
    pub(crate) end: Option<End>,
}

/// The engine's queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueFull;

/// Called with a request's id after its end.
pub(crate) type Keeper = Box<dyn FnOnce(u64) + Send>;

/// What happens to the KV blocks of a request's prompt.
pub(crate) enum Blocks {
    /// They are computed, and freed at its end.
    Own,
    /// They are computed, and kept until [`Driver::release`].
    Kept(Keeper),
    /// They come from elsewhere, see [`Arrival`].
    Remote,
}

/// One engine and its requests.
pub(crate) struct Driver {
    inner: Mutex<Inner>,
    /// The engine has a new deadline since the task started to sleep, or another clock.
    changed: Notify,
    max_waiting: u32,
    block_tokens: u32,
}

struct Inner {
    engine: Engine,
    clock: Clock,
    feed: Option<Feed>,
    slots: HashMap<u64, Slot>,
    next_id: u64,
    served: Served,
    /// Contents of `/metrics` while the engine is paused, permanently if it is dead.
    still: Option<(EngineStats, Served)>,
    dead: bool,
    /// A buffer that is reused between calls.
    events: Vec<(Nanos, EngineEvent)>,
    kv_events: Vec<(Nanos, KvEvent)>,
    /// Wakers to call once the lock is released: waking under the lock could run a drop that needs it.
    wakers: Vec<Waker>,
    /// To be called without the lock, too, and before requests are woken.
    keepers: Vec<(u64, Keeper)>,
    link: Link,
}

/// The engine's time, which runs at its own speed.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// A moment of real time, and the engine's time at it.
    at: (Instant, Nanos),
    /// Engine seconds per second from then on.
    speed: f64,
    /// Normal speed.
    full_speed: f64,
}

/// Speed of a paused engine.
const STILL: f64 = 0.0;

struct Slot {
    arrived: Nanos,
    /// When its latest tokens were produced.
    produced: Nanos,
    cell: Arc<Mutex<Cell>>,
    /// Contents of its blocks for the feed, if there is one.
    text: Option<Arc<Text>>,
    keeper: Option<Keeper>,
}

#[derive(Default)]
struct Cell {
    progress: Progress,
    waker: Option<Waker>,
    /// Of the transfer to it.
    transfer_waker: Option<Waker>,
}

/// A request in the engine. Dropping it before its end cancels the request.
pub(crate) struct Ticket {
    driver: Arc<Driver>,
    id: u64,
    cell: Arc<Mutex<Cell>>,
    /// The transfer to it, which ends with it.
    transfer: Option<AbortHandle>,
}

/// The transfer of KV blocks to a request.
pub(crate) struct Arrival {
    driver: Arc<Driver>,
    id: u64,
    cell: Arc<Mutex<Cell>>,
}

/// Locks, also if a holder panicked: every update is complete before its lock is released.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Driver ===

impl Driver {
    pub(crate) fn new(
        config: EngineConfig,
        feed: Option<Feed>,
        link: Link,
        speed: f64,
        max_waiting: u32,
    ) -> Arc<Self> {
        let config = EngineConfig { kv_events: feed.is_some(), ..config };
        let block_tokens = config.block_tokens;
        let transfers = LinkCounts::default();
        let (ttft, itl, e2e) = (Histogram::ttft(), Histogram::itl(), Histogram::e2e());
        let served = Served { finished: 0, ttft, itl, e2e, transfers };
        let inner = Inner {
            engine: Engine::new(config),
            clock: Clock { at: (Instant::now(), Nanos::ZERO), speed, full_speed: speed },
            feed,
            slots: HashMap::new(),
            next_id: 0,
            served,
            still: None,
            dead: false,
            events: Vec::new(),
            kv_events: Vec::new(),
            wakers: Vec::new(),
            keepers: Vec::new(),
            link,
        };
        Arc::new(Self { inner: Mutex::new(inner), changed: Notify::new(), max_waiting, block_tokens })
    }

    /// Runs the engine while it is polled.
    pub(crate) async fn run(&self) {
        loop {
            let deadline =
                self.up_to_date(|inner, _| inner.engine.next_deadline().map(|at| inner.clock.wall(at)));
            match deadline {
                // A step does not change once begun, so arrivals can wait for its end.
                Some(deadline) => tokio::select! {
                    () = tokio::time::sleep_until(deadline) => {}
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// Queues a request.
    pub(crate) fn submit(
        self: &Arc<Self>,
        prompt: Prompt,
        output_tokens: u32,
        blocks: Blocks,
    ) -> Result<Ticket, QueueFull> {
        let cell = Arc::<Mutex<Cell>>::default();
        let (prompt_tokens, output_seed) = (prompt.tokens, prompt.key);
        let adapter = prompt.lora.as_deref().map(|name| AdapterKey::named(name.as_bytes()));
        let prompt = prompt.answered(self.block_tokens, output_tokens);
        let id = self.up_to_date(|inner, now| {
            let id = inner.next_id;
            inner.next_id += 1;
            if inner.dead {
                lock(&cell).progress.end = Some(End::Died(ArrivalTime::After));
                return Ok(id);
            }
            if inner.engine.stats().waiting >= self.max_waiting {
                return Err(QueueFull);
            }
            let (text, prompt_blocks) = match &mut inner.feed {
                Some(feed) => {
                    let text = feed.enter(prompt);
                    let blocks = text.engine_blocks();
                    (Some(text), blocks)
                }
                None => (None, prompt.blocks.into()),
            };
            let (keeper, remote) = match blocks {
                Blocks::Own => (None, None),
                Blocks::Kept(keeper) => (Some(keeper), None),
                Blocks::Remote => (None, Some(Remote { tokens: prompt_tokens, ready_at: Nanos::MAX })),
            };
            let keeps = keeper.is_some();
            inner.slots.insert(id, Slot { arrived: now, produced: now, cell: cell.clone(), text, keeper });
            inner.engine.enqueue(
                now,
                EngineRequest {
                    id,
                    prompt_blocks,
                    prompt_tokens,
                    output_tokens,
                    output_seed,
                    remote,
                    adapter,
                },
            );
            if keeps {
                inner.engine.keep(id);
            }
            Ok(id)
        })?;
        Ok(Ticket { driver: self.clone(), id, cell, transfer: None })
    }

    /// Counters of the engine and of the driver.
    pub(crate) fn stats(&self) -> (EngineStats, Served) {
        let inner = lock(&self.inner);
        inner.still.clone().unwrap_or_else(|| (inner.engine.stats(), inner.served.clone()))
    }

    /// The adapters of requests in flight; `None` if the engine has no slots for adapters.
    pub(crate) fn adapter_report(&self) -> Option<AdapterReport> {
        lock(&self.inner).engine.adapter_report()
    }

    /// Empties the prefix cache, unless requests are in flight.
    pub(crate) fn reset_prefix_cache(&self) -> bool {
        self.up_to_date(|inner, _| {
            let idle = inner.slots.is_empty();
            if idle {
                inner.engine.reset_prefix_cache();
            }
            idle
        })
    }

    /// Makes every step take `factor` times as long as at normal speed, including the one in progress. A paused
    /// engine resumes.
    pub(crate) fn slow_down(&self, factor: f64) {
        self.up_to_date(|inner, now| {
            if !inner.dead {
                inner.still = None;
                inner.set_speed(now, inner.clock.full_speed / factor);
            }
        });
        self.changed.notify_one();
    }

    /// Pauses the engine within its step. Requests are accepted and wait; counters do not include them.
    pub(crate) fn stand_still(&self) {
        self.up_to_date(|inner, now| {
            if inner.still.is_none() {
                inner.still = Some((inner.engine.stats(), inner.served.clone()));
                inner.set_speed(now, STILL);
            }
        });
        self.changed.notify_one();
    }

    /// Kills the engine. New requests learn of it at once, requests in flight at [`Driver::tell_of_death`].
    pub(crate) fn die(&self) {
        self.stand_still();
        lock(&self.inner).dead = true;
    }

    /// Reports the death to requests in flight.
    pub(crate) fn tell_of_death(&self) {
        self.up_to_date(|inner, _| {
            for (_, slot) in inner.slots.drain() {
                let mut cell = lock(&slot.cell);
                cell.progress.end = Some(End::Died(ArrivalTime::Before));
                inner.wakers.extend(cell.waker.take());
            }
        });
    }

    /// Disconnects the feed's subscribers, or accepts them again.
    pub(crate) fn cut_feed(&self, cut: bool) {
        if let Some(feed) = &lock(&self.inner).feed {
            feed.cut(cut);
        }
    }

    /// Reports more false blocks.
    pub(crate) fn flood_feed(&self) {
        if let Some(feed) = &mut lock(&self.inner).feed {
            feed.flood();
        }
    }

    /// Removes the blocks reported by a flood.
    pub(crate) fn end_flood(&self) {
        if let Some(feed) = &mut lock(&self.inner).feed {
            feed.end_flood();
        }
    }

    /// Frees the blocks that a request has kept.
    pub(crate) fn release(&self, id: u64) {
        self.up_to_date(|inner, now| inner.engine.release(now, id));
    }

    /// Sets the faults of transfers to this engine.
    pub(crate) fn fault_transfers(&self, faults: KvTransferFaults) {
        lock(&self.inner).link.faults = faults;
    }

    fn cancel(&self, id: u64) {
        self.up_to_date(|inner, now| {
            if let Some(slot) = inner.slots.remove(&id) {
                inner.engine.cancel(now, id);
                if let Some((feed, text)) = inner.feed.as_mut().zip(slot.text) {
                    feed.cut_off(text);
                }
            }
        });
    }

    /// Runs the engine up to now, then `act`, then wakes requests with progress, and the task if `act` changed when
    /// the engine is to run next: an engine that waits for a transfer can begin a step at once.
    fn up_to_date<T>(&self, act: impl FnOnce(&mut Inner, Nanos) -> T) -> T {
        let (result, wakers, keepers) = {
            let mut inner = lock(&self.inner);
            let now = inner.clock.now();
            inner.catch_up(now);
            let deadline = inner.engine.next_deadline();
            let result = act(&mut inner, now);
            if inner.engine.next_deadline() != deadline {
                self.changed.notify_one();
            }
            (result, std::mem::take(&mut inner.wakers), std::mem::take(&mut inner.keepers))
        };
        keepers.into_iter().for_each(|(id, keeper)| keeper(id));
        wakers.into_iter().for_each(Waker::wake);
        result
    }
}

// === impl Clock ===

impl Clock {
    /// Current virtual time.
    fn now(&self) -> Nanos {
        let (start, shown) = self.at;
        Nanos(shown.0.saturating_add(Nanos::from_secs_f64(start.elapsed().as_secs_f64() * self.speed).0))
    }

    /// Wall-clock time of a virtual time.
    fn wall(&self, at: Nanos) -> Instant {
        let (start, shown) = self.at;
        // A year stands for never, and fits into an `Instant`.
        start + Duration::from_secs_f64(((at - shown).as_secs_f64() / self.speed).min(3.2e7))
    }
}

// === impl Inner ===

impl Inner {
    fn set_speed(&mut self, now: Nanos, speed: f64) {
        self.clock = Clock { at: (Instant::now(), now), speed, ..self.clock };
    }

    /// Runs every step that has ended and updates the requests.
    fn catch_up(&mut self, now: Nanos) {
        let mut events = std::mem::take(&mut self.events);
        self.engine.advance(now, &mut events);
        if let Some(feed) = &mut self.feed {
            self.engine.take_kv_events(&mut self.kv_events);
            feed.tell(&self.kv_events, self.engine.stats().steps, self.engine.next_deadline().is_none());
            self.kv_events.clear();
        }
        for (at, event) in events.drain(..) {
            self.apply(at, event);
        }
        self.events = events;
    }

    fn apply(&mut self, at: Nanos, event: EngineEvent) {
        let (EngineEvent::Allocated { id, .. }
        | EngineEvent::FirstToken { id, .. }
        | EngineEvent::Tokens { id, .. }
        | EngineEvent::Finished { id }
        | EngineEvent::Rejected { id, .. }) = event;
        let Some(slot) = self.slots.get_mut(&id) else {
            return;
        };
        let mut cell = lock(&slot.cell);
        match event {
            EngineEvent::Allocated { tokens, .. } => {
                cell.progress.allocated = Some(tokens);
                self.wakers.extend(cell.transfer_waker.take());
                return;
            }
            EngineEvent::FirstToken { cached_tokens, .. } => {
                cell.progress.cached = cached_tokens;
                cell.progress.produced = 1;
                self.served.ttft.observe((at - slot.arrived).as_secs_f64());
                slot.produced = at;
            }
            EngineEvent::Tokens { count, .. } => {
                cell.progress.produced += count;
                let each = (at - slot.produced).as_secs_f64() / f64::from(count.max(1));
                self.served.itl.observe_times(each, count);
                slot.produced = at;
            }
            EngineEvent::Finished { .. } => {
                cell.progress.end = Some(End::Finished);
                self.served.finished += 1;
                self.served.e2e.observe((at - slot.arrived).as_secs_f64());
            }
            EngineEvent::Rejected { why, .. } => cell.progress.end = Some(End::Rejected(why)),
        }
        self.wakers.extend(cell.waker.take());
        let over = cell.progress.end.is_some();
        drop(cell);
        if over && let Some(slot) = self.slots.remove(&id) {
            // Its last step was reported before its end.
            if let Some((feed, text)) = self.feed.as_mut().zip(slot.text) {
                feed.leave(&text);
            }
            self.keepers.extend(slot.keeper.map(|keeper| (id, keeper)));
        }
    }
}

// === impl Ticket ===

impl Ticket {
    /// Ready once there are more than `seen` tokens or the request has ended.
    pub(crate) fn poll_progress(&self, cx: &Context<'_>, seen: u32) -> Poll<Progress> {
        let mut cell = lock(&self.cell);
        if cell.progress.produced > seen || cell.progress.end.is_some() {
            return Poll::Ready(cell.progress);
        }
        match &mut cell.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// The current progress of the request.
    pub(crate) fn so_far(&self) -> Progress {
        lock(&self.cell).progress
    }

    /// Waits for the first token, or the end.
    pub(crate) async fn begun(&self) -> Progress {
        std::future::poll_fn(|cx| self.poll_progress(cx, 0)).await
    }

    /// Waits for the end.
    pub(crate) async fn ended(&self) -> Progress {
        std::future::poll_fn(|cx| self.poll_progress(cx, u32::MAX)).await
    }

    /// The transfer to it; [`Ticket::attach`] takes the task that drives it.
    pub(crate) fn arrival(&self) -> Arrival {
        Arrival { driver: self.driver.clone(), id: self.id, cell: self.cell.clone() }
    }

    /// Ends the task with this.
    pub(crate) fn attach(&mut self, transfer: AbortHandle) {
        self.transfer = Some(transfer);
    }

    /// The request's number, unique in this engine's life.
    pub(crate) fn number(&self) -> u64 {
        self.id
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(transfer) = &self.transfer {
            transfer.abort();
        }
        let over = lock(&self.cell).progress.end.is_some();
        if !over {
            self.driver.cancel(self.id);
        }
    }
}

// === impl Arrival ===

impl Arrival {
    /// Waits until the request has blocks; returns the number of tokens to transfer.
    pub(crate) async fn allocated(&self) -> u32 {
        std::future::poll_fn(|cx| {
            let mut cell = lock(&self.cell);
            match cell.progress.allocated {
                Some(tokens) => Poll::Ready(tokens),
                None => {
                    cell.transfer_waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Begins the transfer of `tokens` from an address: `right` if they are those of the prompt. Returns when it ends, or `None` if it
    /// never ends.
    ///
    /// # Errors
    /// If it fails.
    pub(crate) fn begin(
        &self,
        tokens: u32,
        right: bool,
        from: &str,
    ) -> Result<Option<Instant>, TransferFailed> {
        lock(&self.cell).progress.wrong = !right;
        self.driver.up_to_date(|inner, now| {
            let fortune = inner.link.begin(now, tokens, from);
            inner.served.transfers = inner.link.counts;
            match fortune {
                Fortune::Fails => Err(TransferFailed),
                Fortune::Hangs => Ok(None),
                Fortune::Arrives(at) => {
                    inner.engine.ready(now, self.id, at);
                    Ok(Some(inner.clock.wall(at)))
                }
            }
        })
    }

    /// Ends the request, since its blocks do not come.
    pub(crate) fn fail(&self) {
        self.driver.up_to_date(|inner, now| {
            let Some(slot) = inner.slots.remove(&self.id) else { return };
            inner.engine.cancel(now, self.id);
            if let Some((feed, text)) = inner.feed.as_mut().zip(slot.text) {
                feed.cut_off(text);
            }
            let mut cell = lock(&slot.cell);
            cell.progress.end = Some(End::Failed);
            inner.wakers.extend(cell.waker.take());
        });
    }
}

/// A transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransferFailed;

#[cfg(test)]
mod tests {
    use kvlane_core::block::ChainSeed;
    use tokio::task::JoinSet;

    use super::*;
    use crate::config::MockConfig;

    /// A driver under paused time: the clock jumps to the next timer whenever every task waits.
    fn driver(config: MockConfig) -> (Arc<Driver>, tokio::task::JoinHandle<()>) {
        let settled = config.settle().expect("a good configuration");
        let mut sockets = JoinSet::new();
        let feed = settled.feed.map(|feed| Feed::start(&feed, 0, &mut sockets).expect("free ports").0);
        let link = Link::new(&settled.transfer, settled.seed);
        let driver = Driver::new(settled.engine, feed, link, settled.speed, settled.max_waiting);
        let task = tokio::spawn({
            let driver = driver.clone();
            async move {
                let _sockets = sockets;
                driver.run().await;
            }
        });
        (driver, task)
    }

    fn prompt(text: &str) -> Prompt {
        Prompt::new(ChainSeed::new("m", None, None), text.into(), 16).expect("short")
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_gets_its_tokens_and_the_next_one_its_prefix() {
        let (driver, _task) = driver(MockConfig::default());
        let text = "x".repeat(64 * 64);
        let first = driver.submit(prompt(&text), 5, Blocks::Own).expect("room").ended().await;
        assert_eq!(first, Progress { produced: 5, end: Some(End::Finished), ..Progress::default() });
        let second = driver.submit(prompt(&text), 5, Blocks::Own).expect("room").ended().await;
        assert_eq!(second, Progress { cached: 63 * 16, ..first });
        let (stats, served) = driver.stats();
        assert_eq!((stats.running, stats.waiting, stats.generation_tokens, served.finished), (0, 0, 10, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn time_runs_at_the_speed_it_was_given() {
        let took = async |speed| {
            let (driver, _task) = driver(MockConfig { speed, ..Default::default() });
            let start = Instant::now();
            driver.submit(prompt(&"x".repeat(8192 * 4)), 100, Blocks::Own).expect("room").ended().await;
            start.elapsed().as_secs_f64()
        };
        let (slow, fast) = (took(1.0).await, took(10.0).await);
        // The paused clock still ticks in milliseconds.
        assert!((slow / 10.0 - fast).abs() <= 0.002, "{slow} s against {fast} s");
        assert!(
            (1.0..3.0).contains(&slow),
            "8,192 tokens of prompt and 100 of answer on an A100 took {slow} s"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_ticket_leaves_the_engine_empty() {
        let (driver, _task) = driver(MockConfig::default());
        let ticket = driver.submit(prompt("some words"), 1000, Blocks::Own).expect("room");
        std::future::poll_fn(|cx| ticket.poll_progress(cx, 3)).await;
        assert_eq!(driver.stats().0.running, 1);
        drop(ticket);
        let (stats, served) = driver.stats();
        assert_eq!((stats.running, stats.kv_blocks_used, served.finished), (0, 0, 0));
        assert!(lock(&driver.inner).slots.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_feed_keeps_no_text_of_a_request_that_has_left() {
        let config = MockConfig {
            kv_events_config: crate::KvEventsConfig::loopback(),
            max_num_seqs: 2,
            kv_cache_size: Some(64),
            ..Default::default()
        };
        let (driver, _task) = driver(config);
        let ask =
            |text: &str, tokens| driver.submit(prompt(&text.repeat(300)), tokens, Blocks::Own).expect("room");
        let [whole, broken, waiting, too_long] = [ask("a", 20), ask("a", 900), ask("b", 20), ask("c", 2000)];
        std::future::poll_fn(|cx| broken.poll_progress(cx, 3)).await;
        drop(broken);
        assert!(lock(&driver.inner).feed.as_ref().is_some_and(|feed| !feed.is_empty()));
        assert!(matches!(too_long.ended().await.end, Some(End::Rejected(_))));
        whole.ended().await;
        waiting.ended().await;
        assert!(lock(&driver.inner).feed.as_ref().is_some_and(Feed::is_empty));
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_waits_for_a_transfer_serves_a_request_that_arrives() {
        let mut config = MockConfig::default();
        config.kv_transfer.kv_transfer_latency = 3600.0;
        let (driver, _task) = driver(config);
        let waiting = driver.submit(prompt(&"x".repeat(4096)), 1, Blocks::Remote).expect("room");
        let arrival = waiting.arrival();
        let ready = arrival.begin(arrival.allocated().await, true, "a").expect("no fault").expect("an end");
        tokio::task::yield_now().await;
        driver.submit(prompt("two"), 1, Blocks::Own).expect("room").ended().await;
        assert!(Instant::now() < ready, "it waited for the transfer to another request");
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_refuses() {
        let config = MockConfig { max_num_seqs: 1, max_waiting_queue_length: 1, ..Default::default() };
        let (driver, _task) = driver(config);
        let running = driver.submit(prompt("one"), 1000, Blocks::Own).expect("room");
        std::future::poll_fn(|cx| running.poll_progress(cx, 0)).await;
        let _waiting = driver.submit(prompt("two"), 1, Blocks::Own).expect("room in the queue");
        assert!(driver.submit(prompt("three"), 1, Blocks::Own).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slowed_engine_takes_longer_from_where_it_is_and_recovers() {
        let (driver, _task) = driver(MockConfig::default());
        let answer = async |driver: &Arc<Driver>, text: &str| {
            let start = Instant::now();
            driver.submit(prompt(text), 200, Blocks::Own).expect("room").ended().await;
            start.elapsed().as_secs_f64()
        };
        let full = answer(&driver, "a").await;
        let ticket = driver.submit(prompt("b"), 200, Blocks::Own).expect("room");
        let start = Instant::now();
        std::future::poll_fn(|cx| ticket.poll_progress(cx, 100)).await;
        let half = start.elapsed().as_secs_f64();
        driver.slow_down(5.0);
        ticket.ended().await;
        let slowed = start.elapsed().as_secs_f64();
        assert!((slowed - half - 5.0 * (full - half)).abs() < 0.1, "{full} s, {half} s and then {slowed} s");
        driver.slow_down(1.0);
        let again = answer(&driver, "c").await;
        assert!((again - full).abs() < 0.01, "{full} s, then {again} s");
    }
}
