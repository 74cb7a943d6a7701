//! KV events of an engine during a request of the doctor.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::event::{EngineHash, KvEvent};
use kvlane_http::client::Client;
use kvlane_wire::engine::{EngineKind, advice};
use kvlane_wire::kv::{Batch, Linker, decode};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::Way;
use super::check::Checks;
use super::engine::{Facts, Feed};
use super::feed::{Message, Peer};
use super::request::{Asked, ask, prompt};

/// Maximum requests until events arrive: a publisher needs a moment to register a subscription, without confirmation.
const ATTEMPTS: u32 = 3;
/// Difference of an engine's clock in seconds that is reported.
const CLOCK_OFF_SECS: f64 = 2.0;

/// A request, and its result.
pub(super) struct Told {
    pub(super) asked: Result<Asked, String>,
    /// Leading tokens of its prompt that the engine reported as stored, if it did and the ids are known.
    pub(super) stored_tokens: Option<u32>,
    pub(super) block_tokens: Option<u32>,
    /// The engine, at the requested rank.
    pub(super) engine: Client,
}

/// Results of one feed.
#[derive(Default)]
struct Heard {
    numbers: Vec<u64>,
    linker: Linker,
    /// Seconds by which the engine's clock was ahead when a message arrived.
    ahead_s: Vec<f64>,
    block_tokens: Option<u32>,
    names: BTreeMap<u64, BlockHash>,
    stored: BTreeSet<u64>,
    garbage: Option<String>,
    unknown_parents: u32,
}

/// A message and its feed, or why no more arrive from there.
type FromFeed = (usize, Result<Message, String>);

/// Subscribes, sends a request and listens.
pub(super) async fn listen(
    engine: &Client,
    model: &str,
    way: &Way,
    facts: &Facts,
    checks: &mut Checks,
) -> Told {
    let feeds = &facts.feeds;
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut listening = 0;
    for (n, feed) in feeds.iter().enumerate() {
        listening += usize::from(subscribe(n, feed, way.patience, &tell, checks).await);
    }
    drop(tell);
    let mut heard: Vec<Heard> = feeds.iter().map(|_| Heard::default()).collect();
    let mut last = Told {
        asked: Err("no request was sent".into()),
        stored_tokens: None,
        block_tokens: None,
        engine: engine.clone(),
    };
    // Each rank gets its own request, the first rank last: that request is used further on.
    for n in (0..feeds.len().max(1)).rev() {
        let engine = if feeds.len() > 1 { engine.at_rank(feeds[n].rank) } else { engine.clone() };
        for attempt in 0..ATTEMPTS {
            let prompt = prompt(facts, n as u32 * ATTEMPTS + attempt);
            let asked = ask(&engine, facts.tokenize(), model, &prompt).await;
            let failed = asked.is_err();
            let ids = asked.as_ref().ok().and_then(|asked| asked.ids.clone());
            let mut progress = Progress { model, ids: ids.as_deref(), from: n };
            let until = Instant::now() + way.patience / ATTEMPTS;
            let complete = listening > 0 && progress.listen(&mut told, &mut heard, until).await;
            let (stored_tokens, block_tokens) = progress.result(&heard);
            last = Told { asked, stored_tokens, block_tokens, engine: engine.clone() };
            if complete || failed || listening == 0 {
                break;
            }
        }
    }
    if listening > 0 && last.asked.is_ok() {
        report(feeds, &heard, facts, checks);
        for (feed, heard) in feeds.iter().zip(&heard) {
            replay(feed, heard, way.patience, facts.kind, checks).await;
        }
    }
    last
}

async fn subscribe(
    n: usize,
    feed: &Feed,
    patience: Duration,
    tell: &mpsc::UnboundedSender<FromFeed>,
    checks: &mut Checks,
) -> bool {
    match Peer::subscribe(&feed.address, &feed.topic, patience).await {
        Ok(mut peer) => {
            checks.ok("subscribe", format!("subscribed to {}, rank {}", feed.address, feed.rank));
            let tell = tell.clone();
            tokio::spawn(async move {
                loop {
                    let message = peer.next().await;
                    let over = message.is_err();
                    if tell.send((n, message)).is_err() || over {
                        return;
                    }
                }
            });
            true
        }
        Err(problem) => {
            checks.fail(
                "subscribe",
                format!("{}: {problem}", feed.address),
                "open this port to the gateway: an endpoint tcp://*:5557 listens on all interfaces, tcp://127.0.0.1 only on loopback",
            );
            false
        }
    }
}

/// A prompt whose blocks are awaited.
struct Progress<'a> {
    model: &'a str,
    ids: Option<&'a [u32]>,
    /// Rank of the blocks.
    from: usize,
}

// === impl Progress ===

impl Progress<'_> {
    /// Reads messages until the prompt's blocks have arrived; returns whether they have.
    async fn listen(
        &mut self,
        told: &mut mpsc::UnboundedReceiver<FromFeed>,
        heard: &mut [Heard],
        until: Instant,
    ) -> bool {
        loop {
            if self.complete(heard) {
                return true;
            }
            match timeout_at(until, told.recv()).await {
                Ok(Some((n, Ok((seq, payload))))) => heard[n].take(seq, &payload, self.model),
                Ok(Some((n, Err(problem)))) => heard[n].garbage = Some(problem),
                Ok(None) | Err(_) => return false,
            }
        }
    }

    fn complete(&self, heard: &[Heard]) -> bool {
        let (stored, block_tokens) = self.result(heard);
        match (self.ids, stored, block_tokens) {
            (Some(ids), Some(stored), Some(size)) => {
                stored as usize >= ids.len() / size as usize * size as usize && stored > 0
            }
            // Without ids, any stored block counts.
            (None, _, Some(_)) => !heard[self.from].numbers.is_empty(),
            _ => false,
        }
    }

    /// Leading tokens of the prompt that were stored, and the size of a block.
    fn result(&self, heard: &[Heard]) -> (Option<u32>, Option<u32>) {
        let block_tokens = heard.iter().find_map(|heard| heard.block_tokens);
        let stored = self.ids.zip(block_tokens).map(|(ids, size)| {
            let mut chain = Vec::new();
            ChainSeed::new(self.model, None, None).chain_tokens(ids, size as usize, &mut chain);
            let held = |heard: &Heard| chain.iter().take_while(|hash| heard.stored.contains(&hash.0)).count();
            heard.iter().map(held).max().unwrap_or(0) as u32 * size
        });
        (stored, block_tokens)
    }
}

// === impl Heard ===

impl Heard {
    fn take(&mut self, seq: u64, payload: &[u8], model: &str) {
        let mut batch = Batch::default();
        self.numbers.push(seq);
        if let Err(error) = decode(payload, &mut batch) {
            self.garbage = Some(error.to_string());
            return;
        }
        if let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH) {
            self.ahead_s.push(batch.ts - now.as_secs_f64());
        }
        self.block_tokens = self.block_tokens.or(batch.block_tokens());
        let Self { linker, names, stored, .. } = self;
        let mut told = Vec::new();
        let before = names.clone();
        let linked = linker.link(
            &batch,
            self.block_tokens.unwrap_or(0),
            |lora, salt| ChainSeed::new(model, lora, salt),
            |EngineHash(name)| before.get(&name).copied(),
            |event| told.push(event.clone()),
        );
        self.unknown_parents += linked.unknown_parents;
        for event in told {
            match event {
                KvEvent::Stored { blocks, .. } => {
                    for block in blocks {
                        names.insert(block.name.0, block.hash);
                        stored.insert(block.hash.0);
                    }
                }
                KvEvent::Removed { blocks, .. } => {
                    for EngineHash(name) in blocks {
                        if let Some(hash) = names.get(&name) {
                            stored.remove(&hash.0);
                        }
                    }
                }
                KvEvent::Cleared => stored.clear(),
                KvEvent::Copied { .. } => {}
            }
        }
    }
}

fn report(feeds: &[Feed], heard: &[Heard], facts: &Facts, checks: &mut Checks) {
    let messages: usize = heard.iter().map(|heard| heard.numbers.len()).sum();
    if let Some(garbage) = heard.iter().find_map(|heard| heard.garbage.as_ref()) {
        checks.fail(
            "events",
            format!("cannot parse: {garbage}"),
            "check that the port is the engine's PUB socket; if it is, please report the engine's version",
        );
    } else if messages == 0 {
        return checks.fail(
            "events",
            "no event arrived, although the request was answered",
            "check enable_kv_cache_events and publisher: zmq in --kv-events-config, and that prefix caching is on",
        );
    } else {
        let ranks = |heard_of: bool| {
            let ranks = feeds.iter().zip(heard).filter(|(_, heard)| heard.numbers.is_empty() != heard_of);
            ranks.map(|(feed, _)| feed.rank.to_string()).collect::<Vec<_>>().join(", ")
        };
        match ranks(false).as_str() {
            "" => checks
                .ok("events", format!("{messages} messages after the requests, from rank {}", ranks(true))),
            silent => checks.fail(
                "events",
                format!("no event arrived from rank {silent}, although it answered a request"),
                "check that each rank publishes on its own port, one higher than that of the previous rank",
            ),
        }
    }
    let gap = heard.iter().find_map(|heard| {
        heard
            .numbers
            .windows(2)
            .find(|pair| pair[1] != pair[0].wrapping_add(1))
            .map(|pair| (pair[0], pair[1]))
    });
    match gap {
        None => checks.ok("sequence", "without gaps"),
        Some((before, after)) => checks.warn(
            "sequence",
            format!("message {after} arrived after {before}"),
            "messages are lost on the way: raise hwm in --kv-events-config, or run the gateway closer to the engine",
        ),
    }
    let sizes: BTreeSet<u32> = heard.iter().filter_map(|heard| heard.block_tokens).collect();
    match (sizes.iter().next(), facts.block_tokens) {
        (Some(events), Some(metrics)) if sizes.len() > 1 || *events != metrics => checks.fail(
            "event_block_size",
            format!("{sizes:?} tokens by its events, {metrics} by its metrics"),
            "the address belongs to another engine: correct the endpoint of the feed",
        ),
        (Some(events), _) => checks.ok("event_block_size", format!("{events} tokens")),
        (None, _) => checks.fail(
            "event_block_size",
            "no message contains a stored block",
            "check that prefix caching is on and that the model's layers have full attention",
        ),
    }
    let ahead =
        heard.iter().flat_map(|heard| &heard.ahead_s).copied().min_by(|a, b| a.abs().total_cmp(&b.abs()));
    match ahead {
        Some(ahead) if ahead.abs() > CLOCK_OFF_SECS => checks.warn(
            "clock",
            format!(
                "event timestamps are {:.1} s {}",
                ahead.abs(),
                if ahead > 0.0 { "ahead" } else { "ago" }
            ),
            "synchronize both machines' clocks by NTP; only the reported lag of events depends on them",
        ),
        Some(ahead) => {
            checks.ok("clock", format!("{:.0} ms difference, transit included", 1e3 * ahead.abs()))
        }
        None => checks.skip("clock", "no message to compare clocks with"),
    }
}

async fn replay(
    feed: &Feed,
    heard: &Heard,
    patience: Duration,
    kind: Option<&EngineKind>,
    checks: &mut Checks,
) {
    let (Some(address), Some(&first)) = (&feed.replay, heard.numbers.first()) else { return };
    let fix = format!(
        "check {} and that its port is open; without it, a lost message invalidates all known blocks of the engine",
        advice(kind, |advice| advice.replay_setting)
    );
    let from = first.saturating_sub(1);
    match Peer::replay(address, from, patience).await {
        Err(problem) => checks.fail("replay", format!("{address}: {problem}"), fix),
        Ok(messages) => {
            let numbers: Vec<u64> = messages.iter().map(|(seq, _)| *seq).collect();
            let gap = numbers.windows(2).find(|pair| pair[1] != pair[0].wrapping_add(1));
            match (gap, numbers.contains(&first)) {
                (Some(pair), _) => checks.fail(
                    "replay",
                    format!("{address}: message {} arrived after {}", pair[1], pair[0]),
                    advice(kind, |advice| advice.replay_gaps),
                ),
                (None, false) => {
                    checks.fail("replay", format!("{address}: message {first} was not replayed"), fix);
                }
                (None, true) => checks.ok("replay", format!("{} messages without gaps", numbers.len())),
            }
        }
    }
}
