//! What engines tell of their caches: from their sockets to the index.
//!
//! ```text
//! socket   reads the subscription and replays, and only queues     thread `ingest`
//! queue    bounded in messages and bytes; full, it says so
//! apply    sequence, decode, link, Router::apply; state and trust   thread `apply`
//! status   what operators see of it
//! ```
//!
//! One [`EventFeed`] is one data-parallel rank of one engine, which is one endpoint. It is opened when the endpoint takes
//! its seat and closed before it gives it up; after [`EventFeed::close`] nothing of it reaches the index any more. No
//! relay thread ever waits for one: the router's locks are held for one batch at a time, and between batches the feeds
//! take turns.

mod apply;
pub(crate) mod discover;
mod queue;
mod socket;
mod status;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_core::endpoint::EndpointId;
use kvlane_core::time::Nanos;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::apply::{Applier, BLOCK_TOKENS_UNKNOWN};
use self::queue::Queue;
use self::socket::{Patience, subscribe};
pub use self::status::{Events, Seen};
use crate::config::KvEvents;
use crate::gateway::{Gateway, ModelPool};
use crate::worker::Worker;

/// Where one rank of an engine publishes what its cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// `host:port` of its PUB socket.
    pub address: String,
    /// `host:port` of its replay socket, if it has one.
    pub replay: Option<String>,
    /// What its messages' topic begins with.
    pub topic: String,
    /// Who says so.
    pub told_by: ToldBy,
}

/// Who says where an engine publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToldBy {
    /// The configuration of this worker.
    Configuration,
    /// The engine.
    Engine,
    /// Nobody: it is where engines publish by convention, if they do.
    Convention,
}

/// One feed, shared by those who read it, those who apply it and those who look at it.
pub struct EventFeed {
    /// What people call its endpoint.
    pub name: Arc<str>,
    /// Where it comes from.
    pub source: Source,
    /// Which of several ranks; none if the worker has but one.
    rank: Option<u32>,
    queue: Queue,
    /// Asks for the subscription to be made anew.
    reconnect: Notify,
    closed: CancellationToken,
    /// Whether it is open. Held while something of it is applied.
    open: Mutex<bool>,
    seen: Mutex<Seen>,
    /// When a batch came last, in nanoseconds of the gateway's clock; 0 for never.
    spoke_at: AtomicU64,
    /// Since when it owes one; 0 while it does not.
    owes_since: AtomicU64,
}

/// The threads that read and apply feeds.
pub struct Ingest {
    gateway: Arc<Gateway>,
    sockets: Handle,
    appliers: Handle,
}

// === impl Ingest ===

impl Ingest {
    /// Reads on the runtime of `sockets` and applies on that of `appliers`, which should be threads of their own.
    pub(crate) fn new(gateway: Arc<Gateway>, sockets: Handle, appliers: Handle) -> Self {
        Self { gateway, sockets, appliers }
    }

    /// The feed of a rank of `worker` from `source`; nothing happens before it is opened.
    pub(crate) fn feed(&self, worker: &Arc<Worker>, rank: Option<u32>, source: Source) -> Arc<EventFeed> {
        Arc::new(EventFeed::new(&self.gateway.config.kv_events, worker, rank, source))
    }

    /// Begins to read `feed` for its endpoint.
    pub(crate) fn open(&self, feed: &Arc<EventFeed>, pool: &Arc<ModelPool>, endpoint: EndpointId) {
        let config = &self.gateway.config;
        let patience =
            Patience { connect: config.upstream.connect_timeout, heartbeat: config.kv_events.heartbeat };
        let reader = Arc::clone(feed);
        let subscribing = self.sockets.spawn(async move { subscribe(&reader, patience).await });
        let applier = Applier::new(
            Arc::clone(&self.gateway),
            Arc::clone(pool),
            endpoint,
            Arc::clone(feed),
            self.sockets.clone(),
            patience,
        );
        let applying = self.appliers.spawn(applier.run());
        let name = Arc::clone(&feed.name);
        self.appliers.spawn(async move {
            for ended in [subscribing.await, applying.await] {
                if let Err(error) = ended
                    && error.is_panic()
                {
                    tracing::error!(feed = %name, %error, "a task of a KV event feed broke");
                }
            }
        });
    }
}

// === impl EventFeed ===

impl EventFeed {
    fn new(config: &KvEvents, worker: &Arc<Worker>, rank: Option<u32>, source: Source) -> Self {
        Self {
            name: worker.seat_name(rank),
            source,
            rank,
            queue: Queue::new(config.queue_messages, config.queue_bytes),
            reconnect: Notify::new(),
            closed: CancellationToken::new(),
            open: Mutex::new(true),
            seen: Mutex::default(),
            spoke_at: AtomicU64::new(0),
            owes_since: AtomicU64::new(0),
        }
    }

    /// Ends it. When this returns, nothing of it is applied any more.
    pub(crate) fn close(&self, pool: &ModelPool, endpoint: EndpointId) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.closed.cancel();
        pool.block_sizes().remove(&endpoint);
    }

    /// The engine has started again, and its cache is empty: nothing that waits is true any more.
    pub fn start_over(&self) {
        self.queue.start_over();
        self.reconnect.notify_one();
    }

    /// The engine has been out of reach: whether it is still the same one is to be seen from its numbers.
    pub(crate) fn look_again(&self) {
        self.reconnect.notify_one();
    }

    /// The engine has answered a request that was received at `received`, for which it computed so many prompt tokens:
    /// if those fill a block, it has something to tell, before the answer or soon after it.
    pub(crate) fn note_answer(&self, now: Nanos, received: Nanos, computed_tokens: u32, pool: &ModelPool) {
        let block_tokens =
            if pool.block_sizes().is_empty() { BLOCK_TOKENS_UNKNOWN } else { pool.router.block_tokens() };
        let spoken = self.spoke_at.load(Ordering::Relaxed) >= received.0.max(1);
        if computed_tokens < block_tokens || spoken {
            return;
        }
        let first = self.owes_since.compare_exchange(0, now.0.max(1), Ordering::Relaxed, Ordering::Relaxed);
        if first.is_ok() {
            self.queue.wake();
        }
    }

    fn note_speech(&self, now: Nanos) {
        self.spoke_at.store(now.0.max(1), Ordering::Relaxed);
        self.owes_since.store(0, Ordering::Relaxed);
    }

    /// Since when it owes an event.
    fn owes_since(&self) -> Option<Nanos> {
        match self.owes_since.load(Ordering::Relaxed) {
            0 => None,
            since => Some(Nanos(since)),
        }
    }

    /// What was seen of it.
    pub fn seen(&self) -> Seen {
        self.seen_mut().clone()
    }

    /// Messages that wait to be applied, and messages dropped so far for want of room.
    pub fn waiting(&self) -> (usize, u64) {
        self.queue.figures()
    }

    fn seen_mut(&self) -> MutexGuard<'_, Seen> {
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
