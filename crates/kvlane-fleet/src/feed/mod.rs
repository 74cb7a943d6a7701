//! KV event feeds: where an engine publishes the changes of its cache, and the state of each feed.
//!
//! An [`EventFeed`] is shared by the task that reads its sockets, the task that applies its messages to the index,
//! and by readers of its [status](Seen): metrics, the admin API, and the request path, which notes responses for
//! which an event is due.

pub mod config;
pub mod queue;
mod status;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use kvlane_core::time::Nanos;
use kvlane_http::network::Allowed;
use kvlane_wire::sequence::Position;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::queue::Queue;
pub use self::status::{Events, Seen};
use crate::feed::config::KvEvents;
use crate::parity::Parity;

/// Prompt tokens assumed to fill a block where the engine's block size is not known.
pub const BLOCK_TOKENS_UNKNOWN: u32 = 256;

/// Where one rank of an engine publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// `host:port` of its PUB socket.
    pub address: String,
    /// `host:port` of its replay socket, if it has one.
    pub replay: Option<String>,
    /// Prefix of its messages' topics.
    pub topic: String,
    /// The origin of this address.
    pub found_by: FoundBy,
}

/// The origin of a feed's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundBy {
    /// The configuration of this worker.
    Configuration,
    /// The engine.
    Engine,
    /// Assumed: the port where engines publish by convention, if they do.
    Convention,
}

/// One feed, shared by its reader, the task that applies it, and readers of its status.
pub struct EventFeed {
    /// The name of its endpoint.
    pub name: Arc<str>,
    /// Where it is published.
    pub source: Source,
    /// The allowed addresses; none: any address, because the configuration names it.
    pub allowed: Option<Arc<ArcSwap<Allowed>>>,
    /// The data-parallel rank; none if the worker has only one.
    pub rank: Option<u32>,
    /// Messages received and not applied yet.
    pub queue: Queue,
    /// Requests a new subscription.
    pub reconnect: Notify,
    /// Cancelled when the feed is closed.
    pub closed: CancellationToken,
    /// Held while messages are applied.
    pub stage: Mutex<Stage>,
    /// The state of the feed, as operators see it.
    pub seen: Mutex<Seen>,
    /// When the last batch arrived, in nanoseconds of the gateway's clock; 0 for never.
    pub spoke_at: AtomicU64,
    /// Since when an event is due; 0 if none is.
    pub event_due_since: AtomicU64,
    /// Whether the engine counts tokens as the gateway does.
    pub parity: Mutex<Parity>,
    /// Tokens of a block, known from the engine's metrics before the first event.
    pub block_tokens: Option<u32>,
}

/// What is known of a feed before it is opened.
pub struct FeedFacts {
    /// The name of its endpoint.
    pub name: Arc<str>,
    /// Where it is published.
    pub source: Source,
    /// The networks it must be in; none: any address, because the configuration names it.
    pub allowed: Option<Arc<ArcSwap<Allowed>>>,
    /// The data-parallel rank, if the worker has several.
    pub rank: Option<u32>,
    /// Whether the engine counts tokens as the gateway does.
    pub parity: Parity,
    /// Tokens of a block, if the engine's metrics state it.
    pub block_tokens: Option<u32>,
}

/// The state of a feed relative to the index.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// Whether the feed is open.
    pub open: bool,
    /// All messages up to here are in the index, and the feed is live.
    pub live_at: Option<Position>,
}

// === impl FoundBy ===

impl FoundBy {
    /// Its name in the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Engine => "engine",
            Self::Convention => "convention",
        }
    }
}

// === impl EventFeed ===

impl EventFeed {
    /// A feed; it is read once it is opened.
    pub fn new(config: &KvEvents, facts: FeedFacts) -> Self {
        let FeedFacts { name, source, allowed, rank, parity, block_tokens } = facts;
        Self {
            name,
            allowed,
            source,
            rank,
            queue: Queue::new(config.queue_messages, config.queue_bytes),
            reconnect: Notify::new(),
            closed: CancellationToken::new(),
            stage: Mutex::new(Stage { open: true, live_at: None }),
            seen: Mutex::default(),
            spoke_at: AtomicU64::new(0),
            event_due_since: AtomicU64::new(0),
            parity: Mutex::new(parity),
            block_tokens,
        }
    }

    /// When its last batch arrived.
    pub fn last_batch(&self) -> Option<Nanos> {
        match self.spoke_at.load(Ordering::Relaxed) {
            0 => None,
            at => Some(Nanos(at)),
        }
    }

    /// Closes the feed. When this returns, no message of it is applied any more.
    pub fn close(&self) {
        *self.stage() = Stage { open: false, live_at: None };
        self.closed.cancel();
    }

    /// The engine has restarted with an empty cache: queued messages are obsolete.
    pub fn start_over(&self) {
        self.queue.start_over();
        self.reconnect.notify_one();
    }

    /// The engine was unreachable: its sequence numbers will show whether it restarted.
    pub fn look_again(&self) {
        self.reconnect.notify_one();
    }

    /// Sets the result of the latest comparison of token ids.
    pub fn set_parity(&self, parity: Parity) {
        *self.parity.lock().unwrap_or_else(PoisonError::into_inner) = parity;
        self.queue.wake();
    }

    /// How the engine's tokens compare with ours.
    pub fn parity(&self) -> Parity {
        self.parity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The engine has answered a request received at `received`, for which it computed this many prompt tokens: if
    /// they fill a block, an event is due, before the response or soon after it.
    pub fn note_answer(&self, now: Nanos, received: Nanos, computed_tokens: u32, block_tokens: Option<u32>) {
        let block_tokens = block_tokens.unwrap_or(BLOCK_TOKENS_UNKNOWN);
        let spoken = self.spoke_at.load(Ordering::Relaxed) >= received.0.max(1);
        if computed_tokens < block_tokens || spoken {
            return;
        }
        let first =
            self.event_due_since.compare_exchange(0, now.0.max(1), Ordering::Relaxed, Ordering::Relaxed);
        if first.is_ok() {
            self.queue.wake();
        }
    }

    /// The engine has sent a message at `now`.
    pub fn note_event(&self, now: Nanos) {
        self.spoke_at.store(now.0.max(1), Ordering::Relaxed);
        self.event_due_since.store(0, Ordering::Relaxed);
    }

    /// Since when an event is due.
    pub fn event_due_since(&self) -> Option<Nanos> {
        match self.event_due_since.load(Ordering::Relaxed) {
            0 => None,
            since => Some(Nanos(since)),
        }
    }

    /// Its part of `GET /workers`; the index holds `blocks` blocks of its endpoint.
    pub fn describe(&self, now: Nanos, blocks: u64) -> Value {
        let seen = self.seen();
        let (waiting, dropped) = self.waiting();
        json!({
            "address": self.source.address, "replay": self.source.replay, "topic": self.source.topic,
            "found_by": self.source.found_by.name(), "state": seen.state.name(), "problem": seen.problem,
            "connected": seen.connected, "seq": seen.seq,
            "last_event_age_s": seen.applied_at.map(|at| (now - at).as_secs_f64()),
            "lag_s": seen.applied_at.map(|_| seen.lag_s), "blocks": blocks, "block_tokens": seen.block_tokens,
            "waiting": waiting, "messages": counts(&seen.messages(dropped)), "incidents": counts(&seen.incidents()),
            "events": counts(&seen.events.by_kind()),
        })
    }

    /// The feed's status.
    pub fn seen(&self) -> Seen {
        self.seen_mut().clone()
    }

    /// Messages queued, and messages dropped so far because the queue was full.
    pub fn waiting(&self) -> (usize, u64) {
        self.queue.figures()
    }

    /// How far the feed has been applied.
    pub fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the feed, to change it.
    pub fn seen_mut(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for EventFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventFeed")
            .field("name", &self.name)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

fn counts(named: &[(&'static str, u64)]) -> Value {
    named.iter().map(|&(name, count)| (name.to_owned(), Value::from(count))).collect()
}
