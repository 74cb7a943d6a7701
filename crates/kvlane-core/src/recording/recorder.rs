//! The writing end, under the scheduler's lock: a few dozen nanoseconds an input, and no allocation for most.

use super::encode::Memory;
use super::shared_blocks;
use crate::block::BlockHash;
use crate::request::RequestId;
use crate::scheduler::{Input, Output, Scheduler};
use crate::time::Nanos;

/// Bytes from which a segment is handed over. A synopsis of eight endpoints and a hundred requests in flight is a fiftieth
/// of it.
const SEGMENT_BYTES: usize = 512 << 10;
/// Bytes of prompts' hashes from which it is handed over.
const HASHES_MAX: usize = 64 << 10;
/// Time after which it is handed over whatever it holds: so much is lost when the process is killed.
const SEGMENT_SPAN: Nanos = Nanos::from_secs(2);

/// A part of a recording that stands for itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// How many were before it, those that were lost among them.
    pub number: u64,
    /// Its entries: [`super::Entries`].
    pub bytes: Vec<u8>,
    /// The prompts that came, each with how many of `hashes` are its.
    pub prompts: Vec<(RequestId, u32)>,
    /// Of each prompt every [`shared_blocks`]th block, for [`super::Sharing`]. They go into no file.
    pub hashes: Vec<BlockHash>,
}

/// Where segments go.
enum Sink {
    Kept(Vec<Segment>),
    Handed(Box<dyn FnMut(Segment) + Send>),
}

/// Writes down what a scheduler is told and what it does.
pub struct Recorder {
    sink: Sink,
    memory: Memory,
    segment: Segment,
    begun: Nanos,
}

// === impl Recorder ===

impl Recorder {
    /// One that hands segments over. Under a lock: whoever gets them must be quick, and drops them if need be.
    pub fn new(sink: impl FnMut(Segment) + Send + 'static) -> Self {
        Self::to(Sink::Handed(Box::new(sink)))
    }

    /// One that keeps all there is in memory.
    pub fn in_memory() -> Self {
        Self::to(Sink::Kept(Vec::new()))
    }

    fn to(sink: Sink) -> Self {
        Self { sink, memory: Memory::default(), segment: Segment::default(), begun: Nanos::ZERO }
    }

    /// The segments of a [`Recorder::kept`] one, with what has not become one yet.
    pub fn segments(&self) -> Vec<Segment> {
        match &self.sink {
            Sink::Kept(segments) => segments.iter().chain([&self.segment]).cloned().collect(),
            Sink::Handed(_) => Vec::new(),
        }
    }

    /// A prompt is about to come, of which the hashes stand for blocks of so many tokens.
    pub(crate) fn prompt(&mut self, request: RequestId, chain: &[BlockHash], block_tokens: u32) {
        let before = self.segment.hashes.len();
        let every = chain.chunks_exact(shared_blocks(block_tokens) as usize);
        self.segment.hashes.extend(every.filter_map(|blocks| blocks.last()));
        self.segment.prompts.push((request, (self.segment.hashes.len() - before) as u32));
    }

    /// The scheduler, as it stands, is about to be told this.
    pub(crate) fn told(&mut self, now: Nanos, input: &Input, scheduler: &Scheduler) {
        if self.segment.bytes.is_empty() {
            self.memory.clear();
            self.begun = now;
            self.memory.synopsis(&mut self.segment.bytes, now, &scheduler.synopsis());
        }
        self.memory.input(&mut self.segment.bytes, now, input);
    }

    /// This is what came of it.
    pub(crate) fn came(&mut self, now: Nanos, outputs: &[Output]) {
        for output in outputs {
            match *output {
                Output::Dispatch { request, placement } => {
                    let (endpoint, reason) = (placement.endpoint, placement.reason);
                    self.memory.placed(&mut self.segment.bytes, now, request, endpoint, reason);
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

    /// Hands over what there is; so does dropping it.
    pub fn hand_over(&mut self) {
        if self.segment.bytes.is_empty() {
            return;
        }
        let number = self.segment.number + 1;
        // As much room as the last one took.
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
