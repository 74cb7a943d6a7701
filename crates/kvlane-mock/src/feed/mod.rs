//! KV events in vLLM's format: a batch for each step that changed the cache, in sequence from 0, on a PUB socket; and
//! a ROUTER socket for requests of past batches.
//!
//! `config.rs` has the settings of a feed, `ledger.rs` the tokens of the engine's blocks, `encode.rs` writes batches,
//! `fault.rs` loses some of them, `publish.rs` has the sockets. A batch is written on the engine's task, since its
//! contents must not change meanwhile, and sent on others.
//!
//! Unlike vLLM's engine, the engine model keeps no second copy of a block, so none is reported.

mod config;
mod encode;
mod fault;
mod ledger;
mod publish;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvlane_core::block::BlockHash;
use kvlane_core::event::KvEvent;
use kvlane_core::time::Nanos;
use kvlane_wire::kv::version::Version;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::config::address;
pub use self::config::{KvEventsConfig, KvEventsFaults, KvEventsHashes};
use self::encode::{Encoding, Stored, Writer};
use self::fault::Distortion;
pub(crate) use self::ledger::Text;
use self::ledger::{Ledger, Place};
use self::publish::{Batch, Outlet, OutletConfig};
use crate::config::ConfigError;
use crate::tokens::Prompt;

/// Blocks stored by one batch of a flood, and number of batches after which they are removed.
const FLOOD_BLOCKS: u64 = 50;
const FLOOD_BATCHES: u64 = 200;

/// The group of layers that all blocks belong to.
const GROUP: u32 = 0;

/// Addresses of a rank's feed, as reachable from this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedAddresses {
    /// The data-parallel rank.
    pub rank: u32,
    /// The PUB socket.
    pub publisher: SocketAddr,
    /// The ROUTER socket for past batches, if there is one.
    pub replay: Option<SocketAddr>,
}

/// Counts of a feed's batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeedCounts {
    /// Batches made; the next one has this number.
    pub batches: u64,
    /// Those that were not published.
    pub dropped: u64,
    /// Those that were published twice.
    pub duplicated: u64,
    /// Those published after their successor.
    pub reordered: u64,
    /// Those made after the feed became silent.
    pub silenced: u64,
    /// Requests for which the feed reported false blocks.
    pub lies: u64,
    /// Batches dropped by a subscriber's full queue, counted for each subscriber.
    pub overflowed: u64,
}

/// Settings of all ranks' feeds.
#[derive(Clone, Debug)]
pub(crate) struct FeedConfig {
    pub(crate) events: KvEventsConfig,
    pub(crate) version: Version,
    pub(crate) hashes: KvEventsHashes,
    pub(crate) faults: KvEventsFaults,
    pub(crate) block_tokens: u32,
    /// Adapters in the order of their numbers, which begin at 1.
    pub(crate) loras: Vec<String>,
    pub(crate) seed: u64,
}

/// One rank's feed, at the engine's side.
#[derive(Debug)]
pub(crate) struct Feed {
    rank: u32,
    encoding: Encoding,
    block_tokens: u32,
    loras: Vec<String>,
    ledger: Ledger,
    distortion: Distortion<Batch>,
    outlet: Arc<Outlet>,
    next_seq: u64,
    /// The cache was reset, which is reported with the next step's batch.
    cleared: bool,
    /// Number of the engine's ended steps at the last call.
    steps: u64,
    /// Requests cancelled in a step that is not yet reported.
    cut_off: Vec<Arc<Text>>,
    started: Instant,
    started_unix_secs: f64,
    /// Batches of floods, and number of those removed.
    flooded: u64,
    ebbed: u64,
    /// A buffer that is reused between batches.
    sent: Vec<Batch>,
}

/// A rank's feed at the other side: state for other tasks.
#[derive(Clone, Debug)]
pub(crate) struct FeedInfo {
    pub(crate) addresses: FeedAddresses,
    /// As reported by `/kv_event_sources`.
    pub(crate) source: Value,
    outlet: Arc<Outlet>,
}

// === impl FeedInfo ===

impl FeedInfo {
    pub(crate) fn counts(&self) -> FeedCounts {
        self.outlet.counts()
    }
}

// === impl Feed ===

impl Feed {
    /// Binds the sockets of a rank and starts to serve them among `tasks`.
    pub(crate) fn start(
        config: &FeedConfig,
        rank: u32,
        tasks: &mut JoinSet<()>,
    ) -> Result<(Self, FeedInfo), ConfigError> {
        let events = &config.events;
        let publisher = bind(&events.endpoint, rank)?;
        let replay = events.replay_endpoint.as_deref().map(|endpoint| bind(endpoint, rank)).transpose()?;
        let address = publisher.local_addr()?;
        let replay_address = replay.as_ref().map(TcpListener::local_addr).transpose()?;
        let source = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": told(&events.endpoint, address),
            "replay_endpoint":
                events.replay_endpoint.as_deref().zip(replay_address).map(|(endpoint, at)| told(endpoint, at)),
            "buffer_steps": events.buffer_steps,
            "hwm": events.hwm,
            "max_queue_size": events.max_queue_size,
            "topic": events.topic,
        });
        let outlet = Outlet::new(OutletConfig {
            topic: events.topic.clone().into(),
            replay_topic: config.version.replays_topic(),
            buffer_steps: events.buffer_steps,
            hwm: events.hwm,
            delay: config.faults.delay,
        });
        tasks.spawn(publish::publisher(publisher, outlet.clone()));
        if let Some(replay) = replay {
            tasks.spawn(publish::replayer(replay, outlet.clone()));
        }
        let addresses =
            FeedAddresses { rank, publisher: reachable(address), replay: replay_address.map(reachable) };
        let feed = Self {
            rank,
            encoding: Encoding { version: config.version, hashes: config.hashes },
            block_tokens: config.block_tokens,
            loras: config.loras.clone(),
            ledger: Ledger::default(),
            distortion: Distortion::new(config.faults.clone(), config.seed ^ (u64::from(rank) << 32)),
            outlet: outlet.clone(),
            next_seq: 0,
            cleared: false,
            steps: 0,
            cut_off: Vec::new(),
            started: Instant::now(),
            started_unix_secs: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
            flooded: 0,
            ebbed: 0,
            sent: Vec::new(),
        };
        Ok((feed, FeedInfo { addresses, source, outlet }))
    }

    /// A request is queued. The result must be passed to [`Feed::leave`] or [`Feed::cut_off`].
    pub(crate) fn enter(&mut self, prompt: Prompt) -> Arc<Text> {
        let mask = self.distortion.lie();
        if mask.is_some() {
            self.outlet.lied();
        }
        let text = Arc::new(Text {
            rendered: prompt.rendered,
            prompt_tokens: prompt.tokens,
            key: prompt.key,
            lora: prompt.lora,
            salt: prompt.salt,
            blocks: prompt.blocks.into(),
            mask: mask.unwrap_or(0),
        });
        self.ledger.enter(&text);
        text
    }

    /// A request has ended, and all its steps were reported.
    pub(crate) fn leave(&mut self, text: &Text) {
        self.ledger.leave(text);
    }

    /// A request was cancelled. Its part of the step in progress is reported when that ends.
    pub(crate) fn cut_off(&mut self, text: Arc<Text>) {
        self.cut_off.push(text);
    }

    /// Publishes the engine's changes, one batch per step. `steps` are the engine's ended steps.
    pub(crate) fn tell(&mut self, events: &[(Nanos, KvEvent)], steps: u64, idle: bool) {
        for step in events.chunk_by(|a, b| a.0 == b.0) {
            let mut writer = Writer::new(self.encoding);
            let mut run: Vec<Place> = Vec::new();
            for (_, event) in step {
                match event {
                    KvEvent::Cleared => {
                        self.cleared = true;
                        self.ledger.cleared();
                    }
                    KvEvent::Stored { blocks, .. } => {
                        for block in blocks {
                            self.stored(block.hash, &mut run, &mut writer);
                        }
                    }
                    KvEvent::Removed { blocks, .. } => {
                        self.flush(&mut run, &mut writer);
                        for name in blocks {
                            self.begin(&mut writer);
                            // The engine model's names are its hashes.
                            let hash = self.ledger.removed(BlockHash(name.0));
                            writer.removed(&[name_of(hash)], Some(GROUP));
                        }
                    }
                    // The engine model behind a mock has one tier.
                    KvEvent::Copied { .. } => {}
                }
            }
            self.flush(&mut run, &mut writer);
            self.publish(writer);
        }
        if self.cleared && steps > self.steps {
            let mut writer = Writer::new(self.encoding);
            self.begin(&mut writer);
            self.publish(writer);
        }
        if idle || steps > self.steps {
            for text in std::mem::take(&mut self.cut_off) {
                self.ledger.leave(&text);
            }
        }
        self.steps = steps;
    }

    /// Rejects or accepts connections.
    pub(crate) fn cut(&self, cut: bool) {
        self.outlet.cut(cut);
    }

    /// Publishes blocks of a prompt that no request has, and removes earlier ones.
    pub(crate) fn flood(&mut self) {
        let names = flood_names(self.flooded);
        let token_ids: Vec<u32> =
            (0..FLOOD_BLOCKS as u32 * self.block_tokens).map(|n| n ^ (self.flooded as u32) << 8).collect();
        let mut writer = Writer::new(self.encoding);
        self.begin(&mut writer);
        writer.stored(&Stored {
            names: &names,
            parent: None,
            token_ids: &token_ids,
            block_tokens: self.block_tokens,
            lora: None,
            extra_keys: &vec![Vec::new(); names.len()],
            group: Some(GROUP),
        });
        self.flooded += 1;
        if self.flooded - self.ebbed > FLOOD_BATCHES {
            self.ebb(&mut writer);
        }
        self.publish(writer);
    }

    /// Removes the blocks stored by floods.
    pub(crate) fn end_flood(&mut self) {
        let mut writer = Writer::new(self.encoding);
        while self.ebbed < self.flooded {
            self.ebb(&mut writer);
        }
        self.publish(writer);
    }

    fn ebb(&mut self, writer: &mut Writer) {
        writer.removed(&flood_names(self.ebbed), Some(GROUP));
        self.ebbed += 1;
    }

    /// Adds a block to a run of stored blocks, or starts a new run.
    fn stored(&mut self, hash: BlockHash, run: &mut Vec<Place>, writer: &mut Writer) {
        let Some(place) = self.ledger.stored(hash) else {
            debug_assert!(false, "a block that no request in the engine has was stored");
            return;
        };
        if run.last().is_some_and(|last| place.parent() != Some(last.hash())) {
            self.flush(run, writer);
        }
        run.push(place);
    }

    fn flush(&mut self, run: &mut Vec<Place>, writer: &mut Writer) {
        let Some(first) = run.first() else {
            return;
        };
        self.begin(writer);
        let names: Vec<u64> = run.iter().map(|place| name_of(place.hash())).collect();
        let mut token_ids = Vec::with_capacity(run.len() * self.block_tokens as usize);
        for place in run.iter() {
            place.text.token_ids(place.index, self.block_tokens, &mut token_ids);
        }
        let lora = first.text.lora.as_deref().map(|name| {
            let number = self.loras.iter().position(|known| known == name).unwrap_or(self.loras.len());
            (number as u32 + 1, name)
        });
        let extra_keys: Vec<Vec<&str>> = run
            .iter()
            .map(|place| {
                // vLLM salts the first block only; those after it follow from it.
                let salt = place.text.salt.as_deref().filter(|_| place.index == 0);
                lora.map(|(_, name)| name).into_iter().chain(salt).collect()
            })
            .collect();
        writer.stored(&Stored {
            names: &names,
            parent: first.parent().map(name_of),
            token_ids: &token_ids,
            block_tokens: self.block_tokens,
            lora,
            extra_keys: &extra_keys,
            group: Some(GROUP),
        });
        run.clear();
    }

    /// Before the first event of a batch: the reset that was not yet reported.
    fn begin(&mut self, writer: &mut Writer) {
        if std::mem::take(&mut self.cleared) {
            writer.cleared();
        }
    }

    fn publish(&mut self, writer: Writer) {
        let unix_secs = self.started_unix_secs + self.started.elapsed().as_secs_f64();
        let Some(payload) = writer.finish(unix_secs, self.rank) else {
            return;
        };
        let batch = Batch { seq: self.next_seq, payload: payload.into() };
        self.next_seq += 1;
        let fate = self.distortion.pass(batch.clone(), &mut self.sent);
        self.outlet.publish(batch, &self.sent, fate);
        self.sent.clear();
    }
}

#[cfg(test)]
impl Feed {
    /// Whether every request has left without leaving state behind.
    pub(crate) fn is_empty(&self) -> bool {
        self.ledger.is_empty() && self.cut_off.is_empty()
    }
}

/// Hashes of the blocks of a flood's batch.
fn flood_names(batch: u64) -> Vec<u64> {
    (0..FLOOD_BLOCKS).map(|block| name_of(BlockHash(!(batch * FLOOD_BLOCKS + block)))).collect()
}

/// The engine's name of a block: another bijection of 64 bits, so that it is not mistaken for our hash.
fn name_of(BlockHash(hash): BlockHash) -> u64 {
    let name = (hash ^ (hash >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    name ^ (name >> 32)
}

fn bind(endpoint: &str, rank: u32) -> Result<TcpListener, ConfigError> {
    let unbound = |error: std::io::Error| ConfigError::Feed { endpoint: endpoint.to_owned(), rank, error };
    let address = address(endpoint, rank)
        .ok_or_else(|| unbound(std::io::Error::other("the port or the address is not valid")))?;
    let listener = std::net::TcpListener::bind(address).map_err(unbound)?;
    listener.set_nonblocking(true).map_err(unbound)?;
    TcpListener::from_std(listener).map_err(unbound)
}

/// An endpoint as reported by the engine: as configured, with the actual port.
fn told(endpoint: &str, address: SocketAddr) -> String {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    format!("{host}:{}", address.port())
}

/// Address of a socket that may listen on all interfaces, as reachable from this machine.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

#[cfg(test)]
mod tests;
