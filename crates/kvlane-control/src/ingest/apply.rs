//! Orders and applies the messages of one feed, and maintains the feed's state.
//!
//! Four things can be wrong with a feed, and each alone keeps its endpoint from being known exactly: its subscription
//! is down or messages are missing ([`cache_accuracy::Feed::Syncing`], by the state machine of
//! [`kvlane_wire::sequence`]); a due event does not arrive (likewise); the feed cannot be used ([`Refusal`]); or the
//! gateway counts tokens differently from the engine. They concern this endpoint and no other.

use std::sync::Arc;
use std::time::Duration;

use kvlane_core::block::ChainSeed;
use kvlane_core::cache_accuracy;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::time::Nanos;
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::unix_time;
use kvlane_fleet::feed::queue::Item;
use kvlane_fleet::feed::{EventFeed, Events, FoundBy};
use kvlane_fleet::metrics::Reached;
use kvlane_fleet::pool::ModelPool;
use kvlane_wire::kv::{Batch, Linker, decode};
use kvlane_wire::sequence::{Cause, Config, Counters, Round, Sequence, Step};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{Instant, sleep_until};

use super::allowance::{Allowance, WORK_PER_S_MAX};
use super::snapshot::Entry;
use super::socket::{Patience, replay};

/// Messages of one feed that are applied before the other feeds have their turn, and the work in them: events, and
/// block hashes.
const MESSAGES_PER_TURN: usize = 8;
const WORK_PER_TURN: u64 = 1 << 16;
/// Valid messages in a row after which a feed that sent an invalid one is trusted again.
const VALID_MESSAGES: u32 = 16;
/// Shortest time between two log lines about the same problem.
const LOG_INTERVAL: Nanos = Nanos::from_secs(60);
/// Valid block sizes: SGLang's smallest page is one token, and vLLM's hybrid models reach some thousands.
pub(super) const BLOCK_TOKENS: std::ops::RangeInclusive<u32> = 1..=65_536;

/// Why a feed cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refusal {
    /// It sent an invalid message, and is trusted again after this many valid ones.
    InvalidMessage { valid_ahead: u32 },
    /// Its block size differs from the pool's.
    BlockSize,
    /// It reports another rank than expected.
    OtherRank,
}

/// Applies one feed.
pub(super) struct Applier {
    feed: Arc<EventFeed>,
    sequence: Sequence,
    /// The subscription to the current engine is connected.
    connected: bool,
    /// The endpoint's blocks from the snapshot, before they are verified.
    kept: Option<Entry>,
    executor: Executor,
    /// The feed is over its allowance, and waits.
    too_busy: bool,
}

/// Carries out the steps of the state machine.
struct Executor {
    fleet: Arc<Fleet>,
    pool: Arc<ModelPool>,
    endpoint: EndpointId,
    feed: Arc<EventFeed>,
    sockets: Handle,
    patience: Patience,
    /// The hash seed of prompts without adapter and salt, which most are.
    seed: ChainSeed,
    batch: Batch,
    linker: Linker,
    replaying: Option<AbortHandle>,
    refusal: Option<Refusal>,
    /// The problem, as text.
    problem: Option<String>,
    silent: bool,
    /// Counters of streams that have ended.
    before: Counters,
    events: Events,
    last_logged: Option<(String, Nanos)>,
    allowance: Allowance,
    /// The endpoint has the pool's block size.
    agreed: Option<u32>,
    /// Blocks were skipped while the feed was refused, so a full replay is needed.
    must_start_over: bool,
}

// === impl Applier ===

impl Applier {
    pub(super) fn new(
        fleet: Arc<Fleet>,
        pool: Arc<ModelPool>,
        endpoint: EndpointId,
        feed: Arc<EventFeed>,
        sockets: Handle,
        patience: Patience,
        kept: Option<Entry>,
    ) -> Self {
        let seed = ChainSeed::new(&pool.model, None, None);
        let executor = Executor {
            fleet,
            pool,
            endpoint,
            feed: Arc::clone(&feed),
            sockets,
            patience,
            seed,
            batch: Batch::default(),
            linker: Linker::default(),
            replaying: None,
            refusal: None,
            problem: None,
            silent: false,
            before: Counters::default(),
            events: Events::default(),
            last_logged: None,
            allowance: Allowance::default(),
            agreed: None,
            must_start_over: false,
        };
        let sequence = Sequence::new(config(&feed));
        Self { feed, sequence, connected: false, kept, executor, too_busy: false }
    }

    /// Applies messages until the feed is closed.
    pub(super) async fn run(mut self) {
        self.resume();
        loop {
            if !self.turn() {
                break;
            }
            if self.feed.queue.figures().0 > 0 && !self.too_busy {
                yield_now().await;
                continue;
            }
            let feed = Arc::clone(&self.feed);
            match self.deadline() {
                Some(deadline) => tokio::select! {
                    () = feed.queue.changed() => {}
                    () = sleep_until(deadline) => {}
                    () = feed.closed.cancelled() => break,
                },
                None => tokio::select! {
                    () = feed.queue.changed() => {}
                    () = feed.closed.cancelled() => break,
                },
            }
        }
        self.executor.stop_replay();
    }

    /// Restores the blocks from the snapshot. They are not trusted until the replay has confirmed them.
    fn resume(&mut self) {
        let Some(Entry { position, block_tokens, events, .. }) = self.kept.take() else { return };
        let feed = Arc::clone(&self.feed);
        let stage = feed.stage();
        if !stage.open || self.executor.agree(block_tokens).is_err() {
            return;
        }
        for event in &events {
            self.executor.pool.router.apply(self.executor.endpoint, event);
        }
        self.sequence = Sequence::resumed(config(&feed), position);
    }

    /// Applies some of the queued messages; returns whether the feed is still open.
    fn turn(&mut self) -> bool {
        let feed = Arc::clone(&self.feed);
        let now = self.executor.fleet.clock.now();
        self.wait_for_allowance(now);
        let before = self.executor.allowance.done();
        for _ in 0..MESSAGES_PER_TURN {
            let mut stage = feed.stage();
            if !stage.open {
                return false;
            }
            if self.too_busy || self.executor.allowance.done() - before > WORK_PER_TURN {
                break;
            }
            let Some(item) = feed.queue.pop() else { break };
            // The position is set again when the feed's state is settled.
            stage.live_at = None;
            self.take(item);
        }
        let mut stage = feed.stage();
        if stage.open {
            let now = self.executor.fleet.clock.now();
            self.sequence.tick(now, &mut |step| self.executor.carry_out(now, step));
            self.executor.check_silence(now);
            if std::mem::take(&mut self.executor.must_start_over) {
                feed.start_over();
            }
            let live = self.settle();
            stage.live_at = self.sequence.position().filter(|_| live);
        }
        stage.open
    }

    /// Notes whether the feed is over its allowance and has to wait.
    fn wait_for_allowance(&mut self, now: Nanos) {
        let waits = !self.executor.allowance.refill(now) && self.feed.queue.figures().0 > 0;
        if waits && !self.too_busy {
            self.executor.fleet.metrics.limits.reached(Reached::KvEventWork);
            self.executor.log_problem(
                now,
                &format!("it reports more than {WORK_PER_S_MAX} blocks and events per second: its messages are delayed"),
            );
        }
        self.too_busy = waits;
    }

    fn take(&mut self, item: Item) {
        let now = self.executor.fleet.clock.now();
        let Self { sequence, executor, connected, .. } = self;
        let mut out = |step: Step<'_>| executor.carry_out(now, step);
        match item {
            Item::Connected => {
                *connected = true;
                sequence.connected(now, &mut out);
                executor.feed.seen_mut().connected = true;
                // The feed is tried again after a reconnect. Blocks that were skipped meanwhile have to be replayed.
                match executor.refusal.take() {
                    None | Some(Refusal::InvalidMessage { .. }) => {}
                    Some(Refusal::BlockSize | Refusal::OtherRank) => executor.must_start_over = true,
                }
            }
            Item::Disconnected(why) => {
                if std::mem::take(connected) {
                    sequence.disconnected();
                    let mut seen = executor.feed.seen_mut();
                    seen.connected = false;
                    seen.disconnects += 1;
                }
                executor.problem =
                    Some(format!("no subscription to {}: {why}", executor.feed.source.address));
            }
            // Messages of an engine that is gone.
            Item::Live { .. } | Item::Overflowed if !*connected => {}
            Item::Live { seq, payload } => sequence.live(now, seq, &payload, &mut out),
            Item::Overflowed => sequence.overflowed(now, &mut out),
            Item::Malformed(why) => executor.reject_message(now, why),
            Item::Replayed { round, seq, payload } => sequence.replayed(now, round, seq, &payload, &mut out),
            Item::ReplayEnded(round) => sequence.replay_ended(now, round, &mut out),
            Item::ReplayFailed(round, why) => {
                sequence.replay_failed(now, round, &mut out);
                executor.log_problem(now, &format!("replay failed: {why}"));
            }
            Item::StartOver => {
                executor.end_of_stream(now, sequence.counters());
                *sequence = Sequence::new(config(&executor.feed));
                *connected = false;
                executor.feed.seen_mut().connected = false;
            }
        }
    }

    /// When the next timer is due.
    fn deadline(&self) -> Option<Instant> {
        let sequence = self.sequence.next_deadline();
        let allowed = self.too_busy.then(|| self.executor.allowance.next());
        let at = [sequence, self.executor.silent_at(), allowed].into_iter().flatten().min()?;
        let ahead = at.0.saturating_sub(self.executor.fleet.clock.now().0);
        Some(Instant::now() + Duration::from_nanos(ahead))
    }

    /// Reports the feed's state to the router and to operators; returns whether the feed is live.
    fn settle(&mut self) -> bool {
        let trusted = self.connected && self.sequence.trusted();
        let executor = &mut self.executor;
        if executor.agreed.is_some() && self.feed.parity().is_mismatch() {
            executor.forget_size();
        }
        let (state, problem) = executor.state_and_problem(self.connected, trusted);
        let mut seen = self.feed.seen_mut();
        seen.seq = self.sequence.position().map(|position| position.seq);
        seen.stream = added(executor.before, self.sequence.counters());
        seen.problem = problem.clone();
        let before = std::mem::replace(&mut seen.state, state);
        if before == state {
            return state == cache_accuracy::Feed::Live;
        }
        if state == cache_accuracy::Feed::Refused {
            seen.refusals += 1;
        }
        drop(seen);
        executor.pool.set_feed(executor.endpoint, state);
        let (feed, model) = (&*executor.feed.name, &executor.pool.model);
        let (from, to, problem) = (before.name(), state.name(), problem.unwrap_or_default());
        match state {
            cache_accuracy::Feed::Refused => {
                tracing::error!(feed, model, from, to, problem, "KV event feed cannot be used");
            }
            _ => tracing::info!(feed, model, from, to, problem, "KV event feed changed state"),
        }
        state == cache_accuracy::Feed::Live
    }
}

// === impl Executor ===

impl Executor {
    fn carry_out(&mut self, now: Nanos, step: Step<'_>) {
        match step {
            Step::Apply { payload, .. } => self.apply(now, payload),
            Step::Replay { round, from } => self.request_replay(round, from),
            Step::Clear(cause) => {
                let name = match cause {
                    Cause::Restarted => "the engine has restarted",
                    Cause::Lost => "messages are lost",
                    Cause::Reconnected => "messages sent while the connection was down cannot be recovered",
                };
                tracing::warn!(feed = %self.feed.name, cause = name, "cached blocks of an endpoint dropped from the index");
                match cause {
                    Cause::Restarted => {
                        self.pool.forget(self.endpoint);
                        self.linker = Linker::default();
                        self.forget_size();
                    }
                    Cause::Lost | Cause::Reconnected => self.clear(),
                }
            }
        }
    }

    fn apply(&mut self, now: Nanos, payload: &[u8]) {
        let decoded = decode(payload, &mut self.batch);
        self.allowance.take(self.batch.work(), payload.len());
        if let Err(why) = decoded {
            return self.reject_message(now, &why.to_string());
        }
        self.feed.note_event(now);
        if let Some(Refusal::InvalidMessage { valid_ahead }) = &mut self.refusal {
            *valid_ahead -= 1;
            if *valid_ahead == 0 {
                self.refusal = None;
            }
        }
        if let (Some(expected), Some(rank)) = (self.feed.rank, self.batch.rank)
            && expected != rank
        {
            let why = format!("it reports data-parallel rank {rank}, expected rank {expected}");
            return self.refuse(Refusal::OtherRank, why);
        }
        if let Some(size) = self.batch.block_tokens()
            && let Err(why) = self.agree(size)
        {
            return self.refuse(Refusal::BlockSize, why);
        }
        self.put(now);
        // A long message's memory is freed before the next one.
        self.batch.clear();
    }

    /// Applies the batch to the index.
    fn put(&mut self, now: Nanos) {
        let Self { pool, endpoint, batch, linker, seed, events, .. } = self;
        let (router, endpoint) = (&pool.router, *endpoint);
        let seeds = |lora: Option<&str>, salt: Option<&str>| match (lora, salt) {
            (None, None) => *seed,
            _ => ChainSeed::new(&pool.model, lora, salt),
        };
        let linked = linker.link(
            batch,
            router.block_tokens(),
            seeds,
            |name| router.hash_of(endpoint, name),
            |event| {
                events.cleared += u64::from(matches!(event, KvEvent::Cleared));
                let applied = router.apply(endpoint, event);
                events.stored += u64::from(applied.stored);
                events.removed += u64::from(applied.removed);
                events.unknown += u64::from(applied.unknown);
                events.refused += u64::from(applied.refused);
            },
        );
        let ignored = &batch.ignored;
        let passed_over = [ignored.unknown_events, ignored.other_groups, ignored.lookahead, ignored.not_ids];
        events.ignored += passed_over.iter().map(|&count| u64::from(count)).sum::<u64>();
        events.ignored += u64::from(linked.other_groups) + u64::from(linked.other_tiers);
        events.orphaned += u64::from(linked.unknown_parent_blocks);
        let lag_s = unix_time() - batch.ts;
        {
            let mut seen = self.feed.seen_mut();
            (seen.events, seen.applied_at) = (*events, Some(now));
            // The two clocks differ, and the engine's timestamp may have any value.
            seen.lag_s = if lag_s.is_finite() { lag_s.max(0.0) } else { 0.0 };
        }
        if let Some(size) = linked.other_block_size {
            let pools = self.pool.router.block_tokens();
            let why = format!("its blocks have {size} tokens, and its earlier blocks had {pools}");
            self.refuse(Refusal::BlockSize, why);
        }
    }

    /// Compares the engine's block size with that of the pool; the first endpoint sets it.
    fn agree(&mut self, size: u32) -> Result<(), String> {
        if self.agreed == Some(size) {
            return Ok(());
        }
        if !BLOCK_TOKENS.contains(&size) {
            return Err(format!("it reports an invalid block size: {size} tokens"));
        }
        if self.feed.parity().is_mismatch() {
            // An endpoint that is not trusted does not set the pool's size.
            let pools = self.pool.router.block_tokens();
            return match size == pools {
                true => Ok(()),
                false => Err(format!("its blocks have {size} tokens, and those of its pool have {pools}")),
            };
        }
        let mut sizes = self.pool.block_sizes();
        let other = sizes.iter().find(|&(&other, &theirs)| other != self.endpoint && theirs != size);
        if let Some((&other, theirs)) = other {
            let name = self.pool.endpoint(other).map(|endpoint| Arc::clone(&endpoint.name));
            let name = name.as_deref().unwrap_or("another worker");
            return Err(format!(
                "its blocks have {size} tokens, and those of {name} have {theirs}: \
                 start all engines of a model with the same block size"
            ));
        }
        sizes.insert(self.endpoint, size);
        if self.pool.router.set_block_tokens(size) {
            tracing::info!(model = self.pool.model, block_tokens = size, feed = %self.feed.name, "block size set from KV events");
        }
        drop(sizes);
        self.agreed = Some(size);
        self.feed.seen_mut().block_tokens = Some(size);
        if self.refusal == Some(Refusal::BlockSize) {
            self.refusal = None;
            self.must_start_over = true;
        }
        Ok(())
    }

    fn forget_size(&mut self) {
        self.agreed = None;
        self.pool.block_sizes().remove(&self.endpoint);
    }

    fn refuse(&mut self, refusal: Refusal, why: String) {
        if self.refusal.as_ref() != Some(&refusal) {
            self.clear();
        }
        if refusal == Refusal::BlockSize {
            self.forget_size();
        }
        self.problem = Some(why);
        self.refusal = Some(refusal);
    }

    /// An invalid message. Its changes are unknown, so all blocks of the endpoint are dropped.
    fn reject_message(&mut self, now: Nanos, why: &str) {
        self.feed.seen_mut().undecodable += 1;
        let why = format!("invalid message: {why}");
        self.log_problem(now, &why);
        self.clear();
        if matches!(self.refusal, None | Some(Refusal::InvalidMessage { .. })) {
            self.refusal = Some(Refusal::InvalidMessage { valid_ahead: VALID_MESSAGES });
            self.problem = Some(why);
        }
    }

    fn clear(&self) {
        self.pool.router.apply(self.endpoint, &KvEvent::Cleared);
    }

    fn request_replay(&mut self, round: Round, from: u64) {
        self.stop_replay();
        let (feed, patience) = (Arc::clone(&self.feed), self.patience);
        let replay = self.sockets.spawn(async move { replay(&feed, patience, round, from).await });
        self.replaying = Some(replay.abort_handle());
    }

    fn stop_replay(&mut self) {
        if let Some(replaying) = self.replaying.take() {
            replaying.abort();
        }
    }

    /// A new engine process has replaced the old one.
    fn end_of_stream(&mut self, now: Nanos, counters: Counters) {
        self.stop_replay();
        self.before = added(self.before, counters);
        self.pool.forget(self.endpoint);
        self.linker = Linker::default();
        self.forget_size();
        self.refusal = None;
        self.feed.note_event(now);
        self.silent = false;
    }

    /// When a due event is overdue.
    fn silent_at(&self) -> Option<Nanos> {
        let after = Nanos::from(self.fleet.settings().kv_events.silent_after);
        self.feed.event_due_since().filter(|_| !self.silent).map(|since| since + after)
    }

    /// Checks whether an event has been due for too long, or has arrived.
    fn check_silence(&mut self, now: Nanos) {
        if self.feed.event_due_since().is_none() {
            self.silent = false;
        } else if self.silent_at().is_some_and(|at| at <= now) {
            self.silent = true;
            self.feed.seen_mut().silences += 1;
        }
    }

    /// The feed's state, and why it is not better.
    fn state_and_problem(&self, connected: bool, trusted: bool) -> (cache_accuracy::Feed, Option<String>) {
        use cache_accuracy::Feed::{Absent, Live, Refused, Syncing};
        if self.refusal.is_some() {
            return (Refused, self.problem.clone());
        }
        if let Some(why) = self.feed.parity().disbelief(self.pool.counting.is_estimate()) {
            return (Refused, Some(why));
        }
        if !connected {
            // The feed's address is only assumed, so its absence is not an error.
            let guessed =
                self.feed.source.found_by == FoundBy::Convention && self.events == Events::default();
            return (if guessed { Absent } else { Syncing }, self.problem.clone());
        }
        if self.silent {
            let why = "silent: the engine answered requests whose prompts fill new blocks, but published no event; \
                       check the topic and the address of its feed";
            return (Syncing, Some(why.into()));
        }
        if !trusted {
            return (Syncing, Some("catching up: missing messages were requested".into()));
        }
        (Live, None)
    }

    /// Logs a problem, unless it was logged a moment ago.
    fn log_problem(&mut self, now: Nanos, what: &str) {
        if let Some((last, at)) = &self.last_logged
            && last == what
            && now - *at < LOG_INTERVAL
        {
            return;
        }
        tracing::warn!(feed = %self.feed.name, problem = what, "KV event feed problem");
        self.last_logged = Some((what.to_owned(), now));
    }
}

fn config(feed: &EventFeed) -> Config {
    Config { replay: feed.source.replay.is_some(), ..Config::default() }
}

fn added(a: Counters, b: Counters) -> Counters {
    Counters {
        applied: a.applied.saturating_add(b.applied),
        gaps: a.gaps.saturating_add(b.gaps),
        lost: a.lost.saturating_add(b.lost),
        duplicates: a.duplicates.saturating_add(b.duplicates),
        late: a.late.saturating_add(b.late),
        overflows: a.overflows.saturating_add(b.overflows),
        restarts: a.restarts.saturating_add(b.restarts),
        replays: a.replays.saturating_add(b.replays),
        cleared: a.cleared.saturating_add(b.cleared),
        given_up: a.given_up.saturating_add(b.given_up),
    }
}

#[cfg(test)]
mod tests {
    use cache_accuracy::Feed;
    use kvlane_fleet::clock::Clock;
    use kvlane_fleet::feed::{FeedFacts, Source};
    use kvlane_fleet::parity::Parity;
    use kvlane_fleet::settings::Settings;
    use kvlane_fleet::tokenize::{Tokenizers, Tokens};
    use kvlane_fleet::worker::config::WorkerSpec;
    use kvlane_fleet::worker::{Origin, Rank, Worker, WorkerId};

    use super::*;
    use crate::testing::{Told, batch};

    /// A feed whose messages the test queues, and the endpoint that it is applied to.
    struct Bench {
        applier: Applier,
        pool: Arc<ModelPool>,
        endpoint: EndpointId,
    }

    impl Bench {
        /// A feed that is connected.
        fn new(rank: Option<u32>, replay: bool) -> Self {
            let tokenizers = Tokenizers::start(&Tokens::default(), &Default::default()).expect("threads");
            let drained = tokio::sync::mpsc::unbounded_channel().0;
            let settings = Settings::default();
            let fleet = Fleet::new(settings, Arc::default(), Clock::start(1.0), tokenizers, drained);
            let worker =
                Worker::new(WorkerId(1), &WorkerSpec::new("http://10.0.0.1:1"), Origin::Config, None)
                    .expect("a worker");
            let source = Source {
                address: "10.0.0.1:2".into(),
                replay: replay.then(|| "10.0.0.1:3".into()),
                topic: String::new(),
                found_by: FoundBy::Configuration,
            };
            let facts = FeedFacts {
                name: "feed".into(),
                source,
                allowed: None,
                rank,
                parity: Parity::Verified,
                block_tokens: None,
            };
            let feed = Arc::new(EventFeed::new(&fleet.settings().kv_events, facts));
            let pool = Arc::new(fleet.new_pool("m"));
            let joined = pool.join(
                &Arc::new(worker),
                Rank { number: 0, source: None },
                false,
                None,
                Default::default(),
            );
            let endpoint = joined.expect("room").id;
            let patience = Patience { connect: Duration::ZERO, heartbeat: Duration::ZERO };
            let (fleet, sockets) = (Arc::new(fleet), Handle::current());
            let applier = Applier::new(fleet, Arc::clone(&pool), endpoint, feed, sockets, patience, None);
            let mut bench = Self { applier, pool, endpoint };
            bench.tell(Item::Connected);
            if replay {
                bench.tell(Item::ReplayEnded(Round(1)));
            }
            bench
        }

        fn turn(&mut self) {
            assert!(self.applier.turn(), "it is open");
        }

        fn tell(&mut self, item: Item) {
            self.applier.feed.queue.tell(item);
            self.turn();
        }

        fn live(&mut self, seq: u64, payload: Vec<u8>) {
            self.applier.feed.queue.live(seq, payload.into());
            self.turn();
        }

        async fn replayed(&mut self, round: u64, seq: u64, payload: Vec<u8>) {
            self.applier.feed.queue.replayed(Round(round), seq, payload.into()).await;
            self.turn();
        }

        /// The feed's state, and how many blocks the index has.
        fn state(&self) -> (Feed, u64) {
            let exact = self.pool.router.exact().expect("events are taken");
            (self.applier.feed.seen().state, exact.blocks_of(self.endpoint))
        }
    }

    /// A message with one block of `size` tokens, which follows block `name - 1`, if that is not 0.
    fn stored(name: u64, size: u32) -> Vec<u8> {
        let tokens: Vec<u32> = (0..size).map(|n| name as u32 * 100 + n).collect();
        batch(None, &[Told::Stored(&[name], (name > 1).then(|| name - 1), &tokens, size, None)])
    }

    #[tokio::test]
    async fn a_message_that_overtook_another_waits_for_it() {
        let mut bench = Bench::new(None, true);
        bench.live(0, stored(1, 4));
        bench.live(2, stored(3, 4));
        assert_eq!(bench.state(), (Feed::Syncing, 1));
        bench.live(1, stored(2, 4));
        assert_eq!(bench.state(), (Feed::Live, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_message_is_applied_from_a_replay() {
        let mut bench = Bench::new(None, true);
        bench.live(0, stored(1, 4));
        tokio::time::advance(Duration::from_nanos(Config::default().replay_interval.0)).await;
        bench.live(2, stored(3, 4));
        bench.replayed(1, 1, stored(2, 4)).await;
        assert_eq!(bench.state(), (Feed::Syncing, 1), "an earlier replay is ignored");
        bench.replayed(2, 1, stored(2, 4)).await;
        bench.tell(Item::ReplayEnded(Round(2)));
        assert_eq!(bench.state(), (Feed::Live, 3));
    }

    #[tokio::test]
    async fn without_a_replay_a_lost_message_drops_all_blocks_before_it() {
        let mut bench = Bench::new(None, false);
        bench.live(0, stored(1, 4));
        bench.live(1, stored(2, 4));
        bench.live(5, stored(1, 4));
        assert_eq!(bench.state(), (Feed::Live, 1));
        assert_eq!(bench.applier.feed.seen().stream.lost, 3);
    }

    #[tokio::test]
    async fn an_invalid_message_drops_all_blocks_until_enough_valid_ones_followed() {
        let mut bench = Bench::new(None, false);
        bench.live(0, stored(1, 4));
        bench.live(1, b"garbage".to_vec());
        assert_eq!(bench.state(), (Feed::Refused, 0));
        for n in 1..=u64::from(VALID_MESSAGES) {
            assert_eq!(bench.state().0, Feed::Refused);
            bench.live(n + 1, stored(n, 4));
        }
        assert_eq!(bench.state(), (Feed::Live, VALID_MESSAGES.into()));
    }

    #[tokio::test]
    async fn a_restarted_engine_starts_without_blocks_and_nothing_of_the_old_one_is_applied() {
        let mut bench = Bench::new(None, false);
        bench.live(0, stored(1, 4));
        bench.applier.feed.queue.start_over();
        bench.live(1, stored(2, 4));
        assert_eq!(bench.state(), (Feed::Syncing, 0));
        bench.tell(Item::Connected);
        bench.live(0, stored(1, 4));
        assert_eq!(bench.state(), (Feed::Live, 1));
    }

    #[tokio::test]
    async fn a_feed_of_another_rank_or_block_size_is_refused() {
        let mut bench = Bench::new(Some(1), false);
        bench.live(0, batch(Some(0), &[Told::Cleared]));
        assert_eq!(bench.state(), (Feed::Refused, 0));
        assert!(bench.applier.feed.seen().problem.is_some_and(|why| why.contains("expected rank 1")));
        let mut bench = Bench::new(None, false);
        let other = bench.pool.router.read(|scheduler| scheduler.pool().next_id()).expect("room");
        bench.pool.block_sizes().insert(other, 16);
        bench.live(0, stored(1, 4));
        assert_eq!(bench.state(), (Feed::Refused, 0));
        assert!(bench.applier.feed.seen().problem.is_some_and(|why| why.contains("another worker have 16")));
    }
}
