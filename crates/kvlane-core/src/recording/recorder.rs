//! Recorder: encodes inputs under the scheduler's lock, in a few dozen nanoseconds each and mostly without allocation.

use super::encode::Memory;
use super::shared_blocks;
use crate::block::BlockHash;
use crate::request::RequestId;
use crate::scheduler::{Input, Output, Scheduler};
use crate::time::Nanos;

/// Segment size at which it is passed on. A checkpoint of eight endpoints and a hundred requests in flight takes a
/// fiftieth of it.
const SEGMENT_BYTES: usize = 512 << 10;
/// Size of the prompts' hashes at which a segment is passed on.
const HASHES_MAX: usize = 64 << 10;
/// Age at which a segment is passed on whatever its size: the span that is lost when the process is killed.
const SEGMENT_SPAN: Nanos = Nanos::from_secs(2);

/// A self-contained part of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Number of segments before it, lost ones included.
    pub number: u64,
    /// Its encoded entries: [`super::Entries`].
    pub bytes: Vec<u8>,
    /// Its prompts, each with its number of `hashes`.
    pub prompts: Vec<(RequestId, u32)>,
    /// Every [`shared_blocks`]th block hash of each prompt, for [`super::Sharing`]. Not written to files.
    pub hashes: Vec<BlockHash>,
}

/// Destination of segments.
enum Sink {
    Kept(Vec<Segment>),
    Handed(Box<dyn FnMut(Segment) + Send>),
}

/// Encodes a scheduler's inputs and decisions.
pub struct Recorder {
    sink: Sink,
    memory: Memory,
    segment: Segment,
    begun: Nanos,
}

// === impl Recorder ===

impl Recorder {
    /// A recorder that passes segments to `sink`. `sink` is called under the scheduler's lock, so it must be fast, and
    /// drop segments rather than block.
    pub fn new(sink: impl FnMut(Segment) + Send + 'static) -> Self {
        Self::to(Sink::Handed(Box::new(sink)))
    }

    /// A recorder that keeps all segments in memory.
    pub fn in_memory() -> Self {
        Self::to(Sink::Kept(Vec::new()))
    }

    fn to(sink: Sink) -> Self {
        Self { sink, memory: Memory::default(), segment: Segment::default(), begun: Nanos::ZERO }
    }

    /// The segments of a [`Recorder::in_memory`] recorder, including the unfinished one.
    pub fn segments(&self) -> Vec<Segment> {
        match &self.sink {
            Sink::Kept(segments) => segments.iter().chain([&self.segment]).cloned().collect(),
            Sink::Handed(_) => Vec::new(),
        }
    }

    /// Records the hashes of a prompt about to arrive, for blocks of `block_tokens`.
    pub(crate) fn prompt(&mut self, request: RequestId, chain: &[BlockHash], block_tokens: u32) {
        let before = self.segment.hashes.len();
        let every = chain.chunks_exact(shared_blocks(block_tokens) as usize);
        self.segment.hashes.extend(every.filter_map(|blocks| blocks.last()));
        self.segment.prompts.push((request, (self.segment.hashes.len() - before) as u32));
    }

    /// Records an input, before the scheduler handles it.
    pub(crate) fn record_input(&mut self, now: Nanos, input: &Input, scheduler: &Scheduler) {
        if self.segment.bytes.is_empty() {
            self.memory.clear();
            self.begun = now;
            self.memory.synopsis(&mut self.segment.bytes, now, &scheduler.synopsis());
        }
        self.memory.input(&mut self.segment.bytes, now, input);
    }

    /// Records the decisions that followed from the input.
    pub(crate) fn record_outputs(&mut self, now: Nanos, outputs: &[Output]) {
        for output in outputs {
            match *output {
                Output::Dispatch { request, placement } => {
                    let (endpoint, reason) = (placement.endpoint, placement.reason);
                    let prefill = placement.prefill.map(|leg| leg.endpoint);
                    self.memory.placed(&mut self.segment.bytes, now, request, endpoint, reason, prefill);
                }
                Output::Reject { request, refused } => {
                    self.memory.refused(&mut self.segment.bytes, now, request, refused.why);
                }
                _ => {}
            }
        }
        let Segment { bytes, hashes, .. } = &self.segment;
        if bytes.len() >= SEGMENT_BYTES || hashes.len() >= HASHES_MAX || now - self.begun >= SEGMENT_SPAN {
            self.hand_over();
        }
    }

    /// Passes on the current segment; dropping the recorder does the same.
    pub fn hand_over(&mut self) {
        if self.segment.bytes.is_empty() {
            return;
        }
        let number = self.segment.number + 1;
        // Reserves as much memory as the last segment used.
        let next = Segment {
            number,
            bytes: Vec::with_capacity(self.segment.bytes.len() + 256),
            prompts: Vec::with_capacity(self.segment.prompts.len()),
            hashes: Vec::with_capacity(self.segment.hashes.len()),
        };
        let segment = std::mem::replace(&mut self.segment, next);
        match &mut self.sink {
            Sink::Kept(segments) => segments.push(segment),
            Sink::Handed(hand) => hand(segment),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.hand_over();
    }
}
