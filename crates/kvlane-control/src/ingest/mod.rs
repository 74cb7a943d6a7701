//! KV events of engines: from their sockets to the index.
//!
//! ```text
//! socket   reads the subscription and replays, and only queues         thread `ingest`
//! queue    bounded in messages and bytes; marks where messages were dropped
//! apply    sequence, decode, link, Router::apply; state and trust      threads `apply-N`
//! status   the status of each feed, for operators
//! snapshot the index in a file, over a restart of the gateway         thread `snapshot`, if any
//! ```
//!
//! One [`EventFeed`] is one data-parallel rank of one engine, which is one endpoint. It is opened when the endpoint
//! is registered and closed before the endpoint is removed; after [`EventFeed::close`] none of its messages reaches
//! the index. No relay thread ever waits for a feed: the router's locks are held for one batch at a time, and between
//! batches the feeds take turns.

mod allowance;
mod apply;
pub mod discover;
pub mod snapshot;
mod socket;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use kvlane_core::cache_accuracy;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::unix_time;
use kvlane_fleet::feed::{EventFeed, FeedFacts, FoundBy, Source};
use kvlane_fleet::panics::AGAIN;
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};
use kvlane_fleet::worker::Worker;
use kvlane_http::network::Allowed;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use self::apply::{Applier, BLOCK_TOKENS};
use self::discover::is_loopback;
use self::snapshot::{Entry, Key, Writer};
use self::socket::{Patience, subscribe};

/// The threads that read and apply feeds.
pub struct Ingest {
    fleet: Arc<Fleet>,
    sockets: Handle,
    appliers: Vec<Handle>,
    /// Feeds opened so far: each is applied by the next of the appliers.
    opened: AtomicUsize,
    /// Entries of the snapshot that the previous gateway process wrote.
    kept: Mutex<BTreeMap<Key, Entry>>,
}

// === impl Ingest ===

impl Ingest {
    /// Reads on the runtime `sockets` and applies on `appliers`, of which there is at least one. Each should have a
    /// thread of its own.
    pub fn new(fleet: Arc<Fleet>, sockets: Handle, appliers: Vec<Handle>) -> Self {
        let kept = Mutex::new(read_snapshot(&fleet));
        Self { fleet, sockets, appliers, opened: AtomicUsize::new(0), kept }
    }

    /// The feed of a rank of `worker` from `source`; it does nothing before it is opened.
    pub fn feed(&self, worker: &Arc<Worker>, rank: Option<u32>, source: Source) -> Arc<EventFeed> {
        let upstream = &worker.upstream;
        let networks = upstream.allowed().cloned().or_else(|| {
            allowed(&upstream.address.host, &source).map(|allowed| Arc::new(ArcSwap::from_pointee(allowed)))
        });
        let block_tokens = worker.state().compared.as_ref().and_then(|said| said.block_tokens);
        let (name, parity) = (worker.endpoint_name(rank), worker.parity());
        let facts = FeedFacts { name, source, allowed: networks, rank, parity, block_tokens };
        Arc::new(EventFeed::new(&self.fleet.settings().kv_events, facts))
    }

    /// Starts reading `feed` for its endpoint.
    pub fn open(&self, feed: &Arc<EventFeed>, pool: &Arc<ModelPool>, endpoint: EndpointId) {
        // Prompts that arrive before the first event must be cut into blocks of the engine's size, too.
        if let Some(size) = feed.block_tokens.filter(|size| BLOCK_TOKENS.contains(size))
            && !feed.parity().is_mismatch()
            && pool.block_sizes().is_empty()
            && pool.router.set_block_tokens(size)
        {
            tracing::info!(model = pool.model, block_tokens = size, feed = %feed.name, "block size set from the engine's metrics");
        }
        let patience = {
            let settings = self.fleet.settings();
            Patience { connect: settings.upstream.connect_timeout, heartbeat: settings.kv_events.heartbeat }
        };
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&key(feed, pool));
        // Without a replay the entry cannot be verified.
        let mut kept = kept.filter(|_| feed.source.replay.is_some());
        let (fleet, sockets) = (Arc::clone(&self.fleet), self.sockets.clone());
        let (feed, pool) = (Arc::clone(feed), Arc::clone(pool));
        // The events of one feed have to be applied in order, so they stay on one thread.
        let applier = &self.appliers[self.opened.fetch_add(1, Ordering::Relaxed) % self.appliers.len()];
        applier.spawn(async move {
            loop {
                let reader = Arc::clone(&feed);
                let mut tasks = JoinSet::new();
                tasks.spawn_on(async move { subscribe(&reader, patience).await }, &sockets);
                let applier = Applier::new(
                    Arc::clone(&fleet),
                    Arc::clone(&pool),
                    endpoint,
                    Arc::clone(&feed),
                    sockets.clone(),
                    patience,
                    kept.take(),
                );
                tasks.spawn(applier.run());
                let panicked = loop {
                    match tasks.join_next().await {
                        Some(Ok(())) => {}
                        Some(Err(error)) => break error.is_panic(),
                        None => break false,
                    }
                };
                if !panicked {
                    return;
                }
                drop(tasks);
                tracing::error!(feed = %feed.name, "KV event feed task panicked; restarting it");
                if !distrust(&feed, &pool, endpoint) {
                    return;
                }
                tokio::select! {
                    () = sleep(AGAIN) => {}
                    () = feed.closed.cancelled() => return,
                }
            }
        });
    }
}

/// The allowed addresses of a feed of a worker on `host`. None if the configuration sets the feed's address: any is
/// allowed. An engine that announces a feed on another host must not lead to an address that no worker can have, nor
/// from another machine to this one.
fn allowed(host: &str, source: &Source) -> Option<Allowed> {
    let leads_away = |address: &String| {
        let told = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
        !told.trim_start_matches('[').trim_end_matches(']').eq_ignore_ascii_case(host)
    };
    let led_away = source.found_by == FoundBy::Engine
        && [Some(&source.address), source.replay.as_ref()].into_iter().flatten().any(leads_away);
    led_away.then(|| Allowed::anywhere(!is_loopback(host)))
}

/// A task of the feed has panicked: its blocks are dropped until a full replay. Returns whether the feed is still
/// open.
fn distrust(feed: &EventFeed, pool: &ModelPool, endpoint: EndpointId) -> bool {
    let mut stage = feed.stage();
    if !stage.open {
        return false;
    }
    stage.live_at = None;
    pool.router.apply(endpoint, &KvEvent::Cleared);
    {
        let mut seen = feed.seen_mut();
        seen.state = cache_accuracy::Feed::Syncing;
        seen.connected = false;
        seen.problem = Some("a task of this feed panicked; resyncing the feed".into());
    }
    pool.set_feed(endpoint, cache_accuracy::Feed::Syncing);
    drop(stage);
    feed.queue.start_over();
    true
}

/// The key of a feed in a snapshot.
fn key(feed: &EventFeed, pool: &ModelPool) -> Key {
    let (name, address) = (feed.name.to_string(), feed.source.address.clone());
    Key { name, model: pool.model.clone(), address }
}

/// The entries of the configured file. An invalid file only costs its entries.
fn read_snapshot(fleet: &Fleet) -> BTreeMap<Key, Entry> {
    let config = &fleet.settings().kv_events;
    let Some(path) = config.snapshot.as_deref().filter(|_| config.enabled) else { return BTreeMap::new() };
    match snapshot::read(path, unix_time()) {
        Ok(kept) => {
            tracing::info!(path = %path.display(), endpoints = kept.len(), "KV cache snapshot loaded");
            kept
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "KV cache snapshot rejected; starting without it");
            BTreeMap::new()
        }
    }
}

/// Writes the blocks of the engines of all live feeds. Each feed waits only while its own blocks are copied.
///
/// # Errors
/// The file cannot be written; the previous one stays.
pub fn write_snapshot(fleet: &Fleet, path: &Path) -> io::Result<()> {
    let table = fleet.snapshot();
    let endpoints: Vec<(&Arc<ModelPool>, Arc<PoolEndpoint>)> = table.endpoints().collect();
    let live =
        |endpoint: &PoolEndpoint| endpoint.feed.as_ref().is_some_and(|feed| feed.stage().live_at.is_some());
    if !endpoints.iter().any(|(_, endpoint)| live(endpoint)) {
        // The entries of the previous file may still be confirmed.
        return Ok(());
    }
    let mut writer = Writer::create(path, unix_time(), u32::try_from(endpoints.len()).unwrap_or(u32::MAX))?;
    let mut left_out = 0;
    for (pool, endpoint) in &endpoints {
        let (Some(feed), Some(index)) = (&endpoint.feed, pool.router.exact()) else { continue };
        let entry = {
            let stage = feed.stage();
            let Some(position) = stage.live_at else { continue };
            let block_tokens = pool.router.block_tokens();
            Entry { key: key(feed, pool), position, block_tokens, events: index.export(endpoint.id) }
        };
        left_out += usize::from(!writer.add(&entry)?);
    }
    if left_out > 0 {
        tracing::warn!(path = %path.display(), endpoints = left_out, "KV cache snapshot is full; some endpoints are left out");
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn source(address: &str, found_by: FoundBy) -> Source {
        Source { address: address.into(), replay: None, topic: String::new(), found_by }
    }

    #[test]
    fn an_engine_cannot_announce_a_feed_at_a_forbidden_address() {
        for (host, address, refused) in [
            ("10.0.0.7", "169.254.169.254:80", "169.254.169.254"),
            ("10.0.0.7", "[::ffff:169.254.169.254]:80", "::ffff:169.254.169.254"),
            ("10.0.0.7", "[64:ff9b::a9fe:a9fe]:80", "64:ff9b::a9fe:a9fe"),
            ("gpu-1", "metadata.example:80", "169.254.169.254"),
            ("10.0.0.7", "this-machine.example:80", "127.0.0.1"),
            ("fd00::7", "[::1]:80", "::1"),
            ("127.0.0.1", "169.254.169.254:80", "169.254.169.254"),
        ] {
            let allowed = allowed(host, &source(address, FoundBy::Engine)).expect("another host");
            let refused: IpAddr = refused.parse().expect("an address");
            assert!(allowed.check(refused).is_err(), "{host} may announce {address}");
            assert_eq!(
                allowed.check(IpAddr::from([10, 0, 0, 8])),
                Ok(()),
                "another machine of the network is allowed"
            );
        }
        let replay =
            Source { replay: Some("169.254.169.254:80".into()), ..source("10.0.0.7:1", FoundBy::Engine) };
        assert!(allowed("10.0.0.7", &replay).is_some(), "its replay, too");
        let beside = allowed("127.0.0.1", &source("10.0.0.7:1", FoundBy::Engine)).expect("another host");
        assert_eq!(
            beside.check(IpAddr::from([127, 0, 0, 1])),
            Ok(()),
            "an engine on this machine may announce it"
        );
        for (host, address) in
            [("10.0.0.7", "10.0.0.7:5557"), ("fd00::7", "[fd00::7]:1"), ("GPU-1", "gpu-1:1")]
        {
            assert_eq!(allowed(host, &source(address, FoundBy::Engine)), None, "its own host: {address}");
        }
        let configured = source("169.254.1.1:1", FoundBy::Configuration);
        assert_eq!(allowed("10.0.0.7", &configured), None, "the configuration may name any");
    }
}
