//! The indexes behind one face.

use std::sync::Arc;
use std::time::Duration;

use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData,
};
use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, LocalBlockHash, PositionalIndexer, RadixTree, RouterEvent,
};
use kvlane_core::block::{BlockHash, ChainSeed, ContentHash};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::{EngineHash, Tier};
use kvlane_core::index::Overlap;
use kvlane_core::index::exact::{Config, ExactIndex};

use crate::cpu::Cpu;
use crate::stream::{Change, Stream, What};

/// Events that are made before any of them is applied, and not timed.
const AHEAD: usize = 1 << 14;

pub trait Index: Sized {
    const NAME: &'static str;
    /// A prompt as it is looked up.
    type Prompt;
    fn new() -> Self;
    /// Applies all changes; how long that took.
    fn apply(&mut self, stream: &Stream) -> Duration;
    fn prompt(contents: &[ContentHash]) -> Self::Prompt;
    /// How many leading blocks each endpoint holds, summed: so that nothing is left out.
    fn lookup(&mut self, prompt: &Self::Prompt) -> u64;
}

pub struct Kvlane {
    pub index: ExactIndex,
    overlap: Overlap,
}

pub fn seed() -> ChainSeed {
    ChainSeed::new("model", None, None)
}

pub fn chain(contents: &[ContentHash]) -> Vec<BlockHash> {
    let mut before = None;
    let next = |&content: &ContentHash| {
        before = Some(seed().next(before, content));
        before.expect("just set")
    };
    contents.iter().map(next).collect()
}

impl Index for Kvlane {
    const NAME: &'static str = "kvlane ExactIndex";
    type Prompt = Vec<BlockHash>;

    fn new() -> Self {
        Self { index: ExactIndex::new(Config { memory_bytes_max: usize::MAX }), overlap: Overlap::default() }
    }

    fn apply(&mut self, stream: &Stream) -> Duration {
        let (seed, mut names) = (seed(), Vec::new());
        let start = Cpu::now();
        for Change { endpoint, what, from, to } in &stream.changes {
            let endpoint = EndpointId::new(*endpoint, 0);
            let blocks = &stream.blocks[*from..*to];
            let applied = match what {
                What::Stored { parent, .. } => {
                    self.index.store_contents(endpoint, seed, *parent, blocks, Tier::Gpu)
                }
                What::Removed => {
                    names.clear();
                    names.extend(blocks.iter().map(|(name, _)| *name));
                    self.index.remove(endpoint, &names, Tier::Gpu)
                }
            };
            assert!(applied.unknown == 0 && applied.refused == 0);
        }
        start.elapsed()
    }

    fn prompt(contents: &[ContentHash]) -> Vec<BlockHash> {
        chain(contents)
    }

    fn lookup(&mut self, prompt: &Vec<BlockHash>) -> u64 {
        self.index.lookup(prompt, &mut self.overlap);
        self.overlap.iter().map(|(_, blocks)| u64::from(blocks)).sum()
    }
}

/// Applies what is stored, for an endpoint so many slots further; how many blocks.
pub fn store(index: &ExactIndex, further: u16, change: &Change, stream: &Stream) -> u32 {
    let What::Stored { parent, .. } = change.what else { return 0 };
    let endpoint = EndpointId::new(change.endpoint + further, 0);
    index.store_contents(endpoint, seed(), parent, &stream.blocks[change.from..change.to], Tier::Gpu).stored
}

fn event(number: usize, change: &Change, stream: &Stream) -> RouterEvent {
    let blocks = &stream.blocks[change.from..change.to];
    let name = |EngineHash(name): EngineHash| ExternalSequenceBlockHash(name);
    let data = match change.what {
        What::Stored { parent, position } => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(name),
            start_position: Some(position),
            blocks: blocks
                .iter()
                .map(|&(engine, ContentHash(content))| KvCacheStoredBlockData {
                    block_hash: name(engine),
                    tokens_hash: LocalBlockHash(content),
                    mm_extra_info: None,
                })
                .collect(),
        }),
        What::Removed => KvCacheEventData::Removed(KvCacheRemoveData {
            block_hashes: blocks.iter().map(|&(engine, _)| name(engine)).collect(),
        }),
    };
    RouterEvent::new(u64::from(change.endpoint), KvCacheEvent { event_id: number as u64, data, dp_rank: 0 })
}

/// Makes some events, then times how they are applied, and so on.
fn in_slices(stream: &Stream, mut apply: impl FnMut(RouterEvent)) -> Duration {
    let mut took = Duration::ZERO;
    let mut events = Vec::with_capacity(AHEAD);
    for (slice, changes) in stream.changes.chunks(AHEAD).enumerate() {
        let numbered = changes.iter().enumerate();
        events.extend(numbered.map(|(at, change)| event(slice * AHEAD + at, change, stream)));
        let start = Cpu::now();
        events.drain(..).for_each(&mut apply);
        took += start.elapsed();
    }
    took
}

fn local(contents: &[ContentHash]) -> Vec<LocalBlockHash> {
    contents.iter().map(|&ContentHash(content)| LocalBlockHash(content)).collect()
}

fn sum(scores: dynamo_kv_router::OverlapScores) -> u64 {
    scores.scores.values().map(|&blocks| u64::from(blocks)).sum()
}

impl Index for RadixTree {
    const NAME: &'static str = "Dynamo RadixTree";
    type Prompt = Vec<LocalBlockHash>;

    fn new() -> Self {
        RadixTree::new()
    }

    fn apply(&mut self, stream: &Stream) -> Duration {
        in_slices(stream, |event| self.apply_event(event).expect("a good event"))
    }

    fn prompt(contents: &[ContentHash]) -> Vec<LocalBlockHash> {
        local(contents)
    }

    fn lookup(&mut self, prompt: &Vec<LocalBlockHash>) -> u64 {
        sum(self.find_matches(prompt.clone(), false))
    }
}

/// Dynamo's concurrent indexes. Their events go through the channel that their worker thread reads; the whole stream is
/// in it before the thread starts, and while it runs this one waits.
pub struct Threaded<T> {
    pub index: Arc<T>,
    pub tasks: flume::Sender<WorkerTask>,
    inbox: Option<flume::Receiver<WorkerTask>>,
    worker: Option<std::thread::JoinHandle<()>>,
}

pub trait Concurrent: SyncIndexer {
    const NAME: &'static str;
    fn new() -> Self;
}

impl Concurrent for ConcurrentRadixTreeCompressed {
    const NAME: &'static str = "Dynamo ConcurrentRadixTreeCompressed";

    fn new() -> Self {
        ConcurrentRadixTreeCompressed::new()
    }
}

impl Concurrent for PositionalIndexer {
    const NAME: &'static str = "Dynamo PositionalIndexer (jumps of 64)";

    fn new() -> Self {
        PositionalIndexer::new(64)
    }
}

impl<T: Concurrent> Index for Threaded<T> {
    const NAME: &'static str = T::NAME;
    type Prompt = Vec<LocalBlockHash>;

    fn new() -> Self {
        let (tasks, inbox) = flume::unbounded();
        Self { index: Arc::new(T::new()), tasks, inbox: Some(inbox), worker: None }
    }

    fn apply(&mut self, stream: &Stream) -> Duration {
        for (number, change) in stream.changes.iter().enumerate() {
            let _ = self.tasks.send(WorkerTask::Event(event(number, change, stream)));
        }
        let (done, all_done) = tokio::sync::oneshot::channel();
        let _ = self.tasks.send(WorkerTask::Flush(done));
        let (index, inbox) = (self.index.clone(), self.inbox.take().expect("applied once"));
        let start = Cpu::now();
        self.worker = Some(std::thread::spawn(move || index.worker(inbox, None).expect("it runs")));
        all_done.blocking_recv().expect("it answers");
        start.elapsed()
    }

    fn prompt(contents: &[ContentHash]) -> Vec<LocalBlockHash> {
        local(contents)
    }

    fn lookup(&mut self, prompt: &Vec<LocalBlockHash>) -> u64 {
        sum(self.index.find_matches(prompt, false))
    }
}

impl<T> Drop for Threaded<T> {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}
