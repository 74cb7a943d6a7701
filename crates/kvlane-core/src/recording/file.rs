//! Segments in a file: bytes in, bytes out.
//!
//! ```text
//! kvlane recording 1\n
//! frame by frame: what it is u8, its length u32, XXH3-64 of its content u64, its content; numbers little-endian
//! ```
//!
//! A frame is a head (what the file is about, as JSON), a segment, or what prompts of the segment before share. Several
//! files one after the other are a file. One that was cut off, by a kill or a full disk, is good up to the last whole
//! frame; a frame whose hash is another is left out.

use serde::{Deserialize, Serialize};

use super::Segment;
use super::bytes::{Cursor, folded, put, sum, unfolded};
use crate::request::RequestId;
use crate::time::Nanos;

/// How every file begins.
pub const MAGIC: &[u8] = b"kvlane recording 1\n";
/// Bytes of a frame before its content.
const FRAME_HEAD: usize = 13;

const HEAD: u8 = b'H';
const SEGMENT: u8 = b'S';
const PROMPTS: u8 = b'P';

/// What a file is about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// `kvlane.recording/1`.
    pub schema: String,
    /// The pool's model.
    pub model: String,
    /// The gateway's version.
    pub version: String,
    /// When the gateway's time was 0, in seconds since 1970.
    pub origin_unix_s: f64,
    /// The gateway's time when the file was begun.
    pub begun: Nanos,
}

/// What a prompt begins like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Whose prompt.
    pub request: RequestId,
    /// The earlier request that brought this beginning, and its length in units of [`super::shared_blocks`].
    pub base: Option<(RequestId, u32)>,
}

/// A part of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame<'a> {
    /// What follows is about this.
    Head(Head),
    /// A segment.
    Segment {
        /// How many were before it.
        number: u64,
        /// For [`super::Entries`].
        bytes: &'a [u8],
    },
    /// What prompts share.
    Prompts(Vec<Shared>),
    /// A frame that is not what was written: so many bytes.
    Damaged(usize),
    /// The file ends in the middle of a frame, so many bytes before its end.
    Torn(usize),
}

/// The frames of a file.
#[derive(Clone, Debug)]
pub struct Frames<'a>(&'a [u8]);

/// The beginning of a file.
pub fn begin(head: &Head) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    frame(&mut out, HEAD, |out| out.extend(serde_json::to_vec(head).unwrap_or_default()));
    out
}

/// Appends a segment and what its prompts share.
pub fn add(out: &mut Vec<u8>, segment: &Segment, shared: &[Shared]) {
    frame(out, SEGMENT, |out| {
        put(out, segment.number);
        out.extend_from_slice(&segment.bytes);
    });
    if shared.is_empty() {
        return;
    }
    frame(out, PROMPTS, |out| {
        let mut before = 0;
        for Shared { request, base } in shared {
            put(out, folded(request.0.wrapping_sub(before) as i64));
            before = request.0;
            match base {
                None => put(out, 0),
                Some((base, units)) => {
                    put(out, u64::from(*units));
                    put(out, folded(request.0.wrapping_sub(base.0) as i64));
                }
            }
        }
    });
}

fn frame(out: &mut Vec<u8>, kind: u8, content: impl FnOnce(&mut Vec<u8>)) {
    let head = out.len();
    out.extend_from_slice(&[0; FRAME_HEAD]);
    content(out);
    let len = (out.len() - head - FRAME_HEAD) as u32;
    let sum = sum(&out[head + FRAME_HEAD..]);
    out[head] = kind;
    out[head + 1..head + 5].copy_from_slice(&len.to_le_bytes());
    out[head + 5..head + FRAME_HEAD].copy_from_slice(&sum.to_le_bytes());
}

// === impl Frames ===

impl<'a> Frames<'a> {
    /// Those of a file with these bytes, or of several. None if it is no recording.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.starts_with(MAGIC).then_some(Self(bytes))
    }

    /// What is in a frame.
    fn content(kind: u8, content: &'a [u8]) -> Option<Frame<'a>> {
        let mut rest = Cursor(content);
        match kind {
            HEAD => Some(Frame::Head(serde_json::from_slice(content).ok()?)),
            SEGMENT => {
                let number = rest.number()?;
                Some(Frame::Segment { number, bytes: rest.0 })
            }
            PROMPTS => {
                let (mut shared, mut before) = (Vec::new(), 0u64);
                while !rest.0.is_empty() {
                    before = before.wrapping_add(unfolded(rest.number()?) as u64);
                    let units = rest.u32()?;
                    let base = match units {
                        0 => None,
                        _ => Some((RequestId(before.wrapping_sub(unfolded(rest.number()?) as u64)), units)),
                    };
                    shared.push(Shared { request: RequestId(before), base });
                }
                Some(Frame::Prompts(shared))
            }
            _ => None,
        }
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Frame<'a>;

    fn next(&mut self) -> Option<Frame<'a>> {
        // An end of line stands between files that were read one after the other.
        while let Some(rest) = self.0.strip_prefix(MAGIC).or_else(|| self.0.strip_prefix(b"\n")) {
            self.0 = rest;
        }
        if self.0.is_empty() {
            return None;
        }
        let mut rest = Cursor(self.0);
        let mut whole = || {
            let kind = rest.byte()?;
            let len = u32::from_le_bytes(rest.take(4)?.try_into().ok()?);
            let said = rest.u64_le()?;
            let content = rest.take(len as usize)?;
            Some((content, (sum(content) == said).then(|| Self::content(kind, content)).flatten(), rest.0))
        };
        let found = whole();
        if let Some((_, Some(frame), after)) = found {
            self.0 = after;
            return Some(frame);
        }
        // Where another file follows, what was torn or damaged is over there.
        let reach = found.as_ref().map_or(self.0.len(), |(_, _, after)| self.0.len() - after.len());
        let near = &self.0[..self.0.len().min(reach + MAGIC.len() - 1)];
        let next = near.windows(MAGIC.len()).position(|bytes| bytes == MAGIC).filter(|at| *at < reach);
        let len = next.unwrap_or(reach);
        self.0 = &self.0[len..];
        Some(match found {
            Some((content, ..)) if next.is_none() => Frame::Damaged(content.len()),
            _ => Frame::Torn(len),
        })
    }
}
