//! News for the routers of other replicas, and from them: see [`crate::replica`].

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::{Router, read, write};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::index::Overlap;
use crate::index::approx;
use crate::index::marks::{self, Marks};
use crate::replica::{News, PeerState, ReplicaId, SentPrompt};
use crate::scheduler::{Input, Output};
use crate::time::Nanos;

/// Time within which KV events of a prompt arrive that another router has sent: its wait in the engine's queue, its prefill
/// and the events' delay.
const EVENTS_WITHIN: Nanos = Nanos::from_secs(10);
/// Memory for marks of prompts whose KV events may not have arrived.
const FRESH_BYTES_MAX: usize = 8 << 20;
/// Share of the approximate index's memory that marks may take in addition.
const MEMORY_SHARE: usize = 4;
/// Most marks that wait to be told. At 8 bytes a mark, more than a link takes in a second; those beyond it stay untold.
const UNTOLD_MAX: usize = 1 << 17;

/// Marks of the prompts that this router and others have sent.
pub(super) struct Shared {
    /// As long as a dispatch counts.
    sent: Marks,
    /// Those of other routers whose KV events may not have arrived.
    fresh: Marks,
    /// Those of this router that it has not told yet.
    untold: Vec<(EndpointId, BlockHash)>,
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(limits: &approx::Config) -> Self {
        let sent = marks::Config {
            memory_bytes_max: limits.memory_bytes_max / MEMORY_SHARE,
            // A generation lives on as the older one.
            age: Nanos(limits.ttl.0 / 2),
        };
        let fresh = marks::Config { memory_bytes_max: FRESH_BYTES_MAX, age: EVENTS_WITHIN };
        Self { sent: Marks::new(sent), fresh: Marks::new(fresh), untold: Vec::new() }
    }

    fn forget(&mut self, endpoint: EndpointId) {
        self.sent.forget(endpoint);
        self.fresh.forget(endpoint);
        self.untold.retain(|(holder, _)| *holder != endpoint);
    }
}

impl Router {
    /// Begins to keep news for other routers, which know this one as `own`.
    pub fn share(&self, own: ReplicaId) {
        self.state().scheduler.share(own);
        self.shares.store(true, Ordering::Relaxed);
    }

    /// Takes the news for other routers: what has changed since they were last taken, or all loads.
    pub fn tell(&self, all: bool) -> News {
        let mut news = News::default();
        self.state().scheduler.tell(all, &mut news);
        let mut untold = std::mem::take(&mut write(&self.shared).untold);
        untold.sort_by_key(|(endpoint, _)| *endpoint);
        news.prompts = untold.chunk_by(|a, b| a.0 == b.0).map(sent_prompt).collect();
        news
    }

    /// All marks of prompts that this router knows to have been sent, for a router that begins.
    pub fn tell_marks(&self) -> Vec<SentPrompt> {
        let mut by_endpoint: BTreeMap<EndpointId, Vec<BlockHash>> = BTreeMap::new();
        for (mark, endpoint) in read(&self.shared).sent.iter() {
            by_endpoint.entry(endpoint).or_default().push(mark);
        }
        by_endpoint.into_iter().map(|(endpoint, marks)| SentPrompt { endpoint, marks }).collect()
    }

    /// Takes over the news of another router.
    pub fn hear(&self, now: Nanos, replica: ReplicaId, news: News, out: &mut Vec<Output>) {
        let News { number, shares, services, learned, turns, prompts } = news;
        self.step(now, Input::Heard { replica, number, shares, services, learned, turns }, out);
        if prompts.is_empty() {
            return;
        }
        let mut shared = write(&self.shared);
        for SentPrompt { endpoint, marks } in prompts {
            shared.sent.insert(now, &marks, endpoint);
            shared.fresh.insert(now, &marks, endpoint);
        }
    }

    /// Takes over marks of prompts that were sent at an unknown time: a snapshot. Their KV events have arrived.
    pub fn hear_marks(&self, now: Nanos, prompts: &[SentPrompt]) {
        let mut shared = write(&self.shared);
        for SentPrompt { endpoint, marks } in prompts {
            shared.sent.insert(now, marks, *endpoint);
        }
    }

    /// The routers of other replicas that were heard lately.
    pub fn peers(&self) -> Vec<PeerState> {
        self.read(|scheduler| scheduler.peers().collect())
    }

    /// Raises overlaps with dispatches, and with dispatches whose events may not have arrived, to what others have sent.
    pub(super) fn raise_shared(
        &self,
        chain: &[BlockHash],
        block_tokens: u32,
        approximate: &mut Overlap,
        speculation: Option<&mut Overlap>,
    ) {
        if !self.shares.load(Ordering::Relaxed) {
            return;
        }
        let shared = read(&self.shared);
        shared.sent.raise(chain, block_tokens, approximate);
        if let Some(speculation) = speculation {
            shared.fresh.raise(chain, block_tokens, speculation);
        }
    }

    /// Keeps the marks of a dispatched prompt, to be told.
    pub(super) fn note_sent(&self, now: Nanos, chain: &[BlockHash], endpoint: EndpointId) {
        if !self.shares.load(Ordering::Relaxed) {
            return;
        }
        let Shared { sent, untold, .. } = &mut *write(&self.shared);
        let room = UNTOLD_MAX.saturating_sub(untold.len());
        let new = sent.insert_prompt(now, chain, self.block_tokens(), endpoint).take(room);
        untold.extend(new.map(|mark| (endpoint, mark)));
    }

    /// Forgets what was sent to an endpoint.
    pub(super) fn forget_shared(&self, endpoint: EndpointId) {
        if self.shares.load(Ordering::Relaxed) {
            write(&self.shared).forget(endpoint);
        }
    }
}

fn sent_prompt(marks: &[(EndpointId, BlockHash)]) -> SentPrompt {
    SentPrompt { endpoint: marks[0].0, marks: marks.iter().map(|(_, mark)| *mark).collect() }
}
