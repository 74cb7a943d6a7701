//! Engines whose caches a test fills and empties, and the gateway's knowledge of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvlane_control::testing::{Told, batch};
use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::cache_accuracy::Feed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::Overlap;
use kvlane_fleet::feed::{EventFeed, Seen};
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::tokenize::TokenSource;

use crate::config::{Config, FeedSpec, WorkerSpec};
use crate::testing::engine::FakeEngine;
use crate::testing::feed::FakeFeed;
use crate::testing::gateway::TestGateway;
use crate::testing::wait::eventually;

/// Tokens of a block of a [`CachingEngine`].
pub const BLOCK: u32 = 4;

/// As [`config`](crate::testing::config), with engines that count the tokens of prompts, so that what they say of their caches can
/// be used.
pub fn caching_config() -> Config {
    let mut config = crate::testing::gateway::config();
    config.tokens.source = TokenSource::Engine;
    config
}

/// An engine of the model `m` with its feed and the content of its cache.
pub struct CachingEngine {
    /// Its API.
    pub http: FakeEngine,
    /// Its KV event feed.
    pub feed: FakeFeed,
    /// Its blocks by hash, each with all tokens up to its end.
    pub held: BTreeMap<u64, Vec<u32>>,
}

// === impl CachingEngine ===

impl CachingEngine {
    /// An engine with an empty cache.
    pub async fn start() -> Self {
        let (http, feed) = (FakeEngine::start("m").await, FakeFeed::start().await);
        Self { http, feed, held: BTreeMap::new() }
    }

    /// The engine as a worker with these feeds.
    pub fn spec(&self, feeds: Vec<FeedSpec>) -> WorkerSpec {
        WorkerSpec { kv_events: feeds, ..WorkerSpec::new(self.http.url()) }
    }

    /// Stores the first blocks of a prompt, and publishes that.
    pub fn publish(&mut self, prompt: u64, blocks: u64) {
        let message = self.store(prompt, blocks);
        self.feed.publish(message);
    }

    /// Stores the first blocks of a prompt and returns the KV event message.
    pub fn store(&mut self, prompt: u64, blocks: u64) -> Vec<u8> {
        let names: Vec<u64> = (0..blocks).map(|block| prompt * 1000 + block).collect();
        let tokens = tokens(prompt, blocks);
        for (n, name) in names.iter().enumerate() {
            self.held.insert(*name, tokens[..(n + 1) * BLOCK as usize].to_vec());
        }
        batch(None, &[Told::Stored(&names, None, &tokens, BLOCK, None)])
    }

    /// Removes one block of a prompt and returns the KV event message.
    ///
    /// # Panics
    /// The block is not stored.
    pub fn remove(&mut self, prompt: u64, block: u64) -> Vec<u8> {
        let name = prompt * 1000 + block;
        self.held.remove(&name).expect("it was stored");
        batch(None, &[Told::Removed(&[name])])
    }

    /// Removes all blocks and returns the KV event message.
    pub fn clear(&mut self) -> Vec<u8> {
        self.held.clear();
        batch(None, &[Told::Cleared])
    }
}

/// The tokens of the first blocks of a prompt. No two prompts share a prefix.
pub fn tokens(prompt: u64, blocks: u64) -> Vec<u32> {
    (0..blocks as u32 * BLOCK).map(|n| prompt as u32 * 10_000 + n).collect()
}

/// The block hashes of tokens of model `m`.
pub fn chain(tokens: &[u32], lora: Option<&str>) -> Vec<BlockHash> {
    let mut chain = Vec::new();
    ChainSeed::new("m", lora, None).chain_tokens(tokens, BLOCK as usize, &mut chain);
    chain
}

/// An endpoint of a gateway, with its KV event feed.
pub struct FeedEndpoint {
    /// The pool.
    pub pool: Arc<ModelPool>,
    /// Its id there.
    pub endpoint: EndpointId,
    /// Its feed.
    pub feed: Arc<EventFeed>,
}

// === impl FeedEndpoint ===

impl FeedEndpoint {
    /// The endpoint of a worker's rank.
    ///
    /// # Panics
    /// The worker has no such rank, or no feed.
    pub fn of(gateway: &TestGateway, url: &str, rank: usize) -> Self {
        let worker = gateway.serving().controller.find(url).expect("the worker is there");
        let (pool, endpoint) = gateway.serving().controller.endpoints_of(worker.id).swap_remove(rank);
        Self { pool, endpoint: endpoint.id, feed: endpoint.feed.clone().expect("it has a feed") }
    }

    /// The status of its feed.
    pub fn seen(&self) -> Seen {
        self.feed.seen()
    }

    /// The number of leading blocks of a prompt that it is known to hold.
    ///
    /// # Panics
    /// KV events are off.
    pub fn overlap(&self, chain: &[BlockHash]) -> u32 {
        let mut overlap = Overlap::default();
        self.pool.router.exact().expect("events are taken").lookup(chain, &mut overlap);
        overlap.iter().find(|(id, _)| *id == self.endpoint).map_or(0, |(_, blocks)| blocks)
    }

    /// The number of blocks that it is known to hold.
    ///
    /// # Panics
    /// KV events are off.
    pub fn blocks(&self) -> u64 {
        self.pool.router.exact().expect("events are taken").blocks_of(self.endpoint)
    }

    /// Whether exactly the blocks that the engine holds are known.
    fn knows(&self, held: &BTreeMap<u64, Vec<u32>>) -> bool {
        self.blocks() == held.len() as u64
            && held.values().all(|tokens| {
                let chain = chain(tokens, None);
                let leading = (1..=chain.len())
                    .take_while(|&n| held.values().any(|held| held[..] == tokens[..n * BLOCK as usize]));
                self.overlap(&chain) == leading.count() as u32
            })
    }

    /// Waits until its feed is in `state` and exactly the engine's blocks are known.
    pub async fn becomes(&self, state: Feed, engine: &CachingEngine) {
        let what = format!("{state:?} with what the engine holds");
        eventually(&what, || self.seen().state == state && self.knows(&engine.held)).await;
    }

    /// Waits until its feed is live and exactly the engine's blocks are known.
    pub async fn is_right(&self, engine: &CachingEngine) {
        self.becomes(Feed::Live, engine).await;
    }
}

/// A gateway in front of these engines, subscribed to all of them.
///
/// # Panics
/// The gateway does not start.
pub async fn caching_gateway(config: Config, engines: &[&CachingEngine]) -> (TestGateway, Vec<FeedEndpoint>) {
    caching_gateway_at_speed(config, engines, 1.0).await
}

/// Like [`caching_gateway`], with a clock of this speed.
///
/// # Panics
/// The gateway does not start.
pub async fn caching_gateway_at_speed(
    mut config: Config,
    engines: &[&CachingEngine],
    speed: f64,
) -> (TestGateway, Vec<FeedEndpoint>) {
    config.workers = engines.iter().map(|engine| engine.spec(vec![engine.feed.spec()])).collect();
    let gateway = TestGateway::start_at_speed(config, &[], speed).await;
    let endpoints: Vec<FeedEndpoint> =
        engines.iter().map(|engine| FeedEndpoint::of(&gateway, &engine.http.url(), 0)).collect();
    for (engine, endpoint) in engines.iter().zip(&endpoints) {
        eventually("it is subscribed", || engine.feed.subscriptions() > 0 && endpoint.seen().connected).await;
    }
    (gateway, endpoints)
}
