//! A scanner that watches server-sent events pass and never holds them up: how many carried tokens, what usage was
//! reported, whether the stream is over.
//!
//! The bytes arrive split anywhere. An event that is whole within one push is judged where it lies; only one that
//! a push ends in the middle of is carried over, and of an event beyond [`EVENT_BYTES_MAX`] only its head, which tells
//! its type, and its tail, which may hold its usage. Any split of a stream gives the same result.
//!
//! An event is judged by its name (`event:`, or the `type` its data begins with) where it has one, which is how
//! Anthropic's messages and OpenAI's responses tell text from the rest, and otherwise as a chunk of a completion. Data
//! is searched, not parsed, except for the usage object itself. The search is sound: inside a JSON string every quote
//! is escaped, so `"usage":` can only be a key.

use memchr::{memchr, memmem};

use crate::json::{Kind, Scanner};

/// Bytes of an event beyond which only [`HEAD_BYTES`] and [`TAIL_BYTES`] of it are looked at.
pub const EVENT_BYTES_MAX: usize = 16 << 10;
/// What is looked at from the start of an oversized event.
const HEAD_BYTES: usize = 8 << 10;
/// What is looked at from the end of an oversized event.
const TAIL_BYTES: usize = EVENT_BYTES_MAX - HEAD_BYTES;

/// What an answer says it cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Prompt tokens served from the prefix cache, where the engine tells.
    pub cached_tokens: Option<u32>,
}

/// Watches one stream. Cheap to make; holds no memory until an event is split.
#[derive(Debug, Default)]
pub struct SseScanner {
    /// The beginning of an event not yet complete, or its head and, from [`HEAD_BYTES`] on, its tail.
    carry: Vec<u8>,
    /// Bytes of that event so far; more than `carry` holds once it is oversized.
    carried: usize,
    edge: Edge,
    tokens: u64,
    counts: Counts,
    done: bool,
}

/// What stands just before the next byte, as far as finding a blank line needs to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Edge {
    /// The start of a line.
    #[default]
    Line,
    /// A carriage return at the start of a line.
    LineReturn,
    /// Something else.
    Within,
}

// === impl SseScanner ===

impl SseScanner {
    /// A scanner at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks at the next bytes of the stream and tells how many events that carry tokens they complete.
    pub fn push(&mut self, mut bytes: &[u8]) -> u32 {
        let before = self.tokens;
        while let Some(end) = event_end(self.edge, bytes) {
            let (event, rest) = bytes.split_at(end);
            if self.carried == 0 {
                self.judge(event);
            } else {
                self.keep(event);
                self.flush();
            }
            self.edge = Edge::Line;
            bytes = rest;
        }
        if !bytes.is_empty() {
            self.edge = match bytes {
                [.., b'\n'] => Edge::Line,
                [.., b'\n', b'\r'] => Edge::LineReturn,
                [b'\r'] if self.edge == Edge::Line => Edge::LineReturn,
                _ => Edge::Within,
            };
            self.keep(bytes);
        }
        u32::try_from(self.tokens - before).unwrap_or(u32::MAX)
    }

    /// The stream has ended: judges an event that lacks its blank line. Returns as [`SseScanner::push`] does.
    pub fn finish(&mut self) -> u32 {
        let before = self.tokens;
        self.flush();
        self.edge = Edge::Line;
        u32::from(self.tokens > before)
    }

    /// Events so far that carried tokens. Engines send one token per event when they keep up.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The usage reported so far, if any; reports spread over several events are joined.
    pub fn usage(&self) -> Option<Usage> {
        self.counts.usage()
    }

    /// Whether the stream said that it is complete.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Adds to the carried event.
    fn keep(&mut self, bytes: &[u8]) {
        self.carried = self.carried.saturating_add(bytes.len());
        self.carry.extend_from_slice(&bytes[..bytes.len().min(EVENT_BYTES_MAX)]);
        if bytes.len() > EVENT_BYTES_MAX {
            self.carry.extend_from_slice(&bytes[bytes.len() - TAIL_BYTES..]);
        }
        // The tail may grow to three times its size before its older part goes, so that moving it costs little.
        let surplus = self.carry.len().saturating_sub(EVENT_BYTES_MAX);
        if surplus > 2 * TAIL_BYTES || surplus > 0 && self.carried > EVENT_BYTES_MAX {
            self.carry.drain(HEAD_BYTES..HEAD_BYTES + surplus);
        }
    }

    /// Judges the carried event, if there is one.
    fn flush(&mut self) {
        if self.carried > 0 {
            let mut event = std::mem::take(&mut self.carry);
            if self.carried > EVENT_BYTES_MAX {
                self.judge_parts(&event[..HEAD_BYTES], &event[event.len() - TAIL_BYTES..]);
            } else {
                self.judge(&event);
            }
            event.clear();
            self.carry = event;
            self.carried = 0;
        }
    }

    /// Looks at a whole event, its blank line included.
    fn judge(&mut self, event: &[u8]) {
        if event.len() > EVENT_BYTES_MAX {
            self.judge_parts(&event[..HEAD_BYTES], &event[event.len() - TAIL_BYTES..]);
        } else {
            self.judge_parts(event, event);
        }
    }

    /// Looks at an event through its first and its last bytes, which are the same for all but oversized ones.
    fn judge_parts(&mut self, head: &[u8], tail: &[u8]) {
    }
}
