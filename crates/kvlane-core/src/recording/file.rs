//! Recording file format: segments in frames.
//!
//! ```text
//! kvlane recording 1\n
//! per frame: kind u8, length u32, XXH3-64 of the content u64, content; integers are little-endian
//! ```
//!
//! A frame holds a head (metadata as JSON), a segment, or the prefixes shared by the prompts of the preceding segment.
//! Concatenated files are a valid file. A truncated file, after a kill or on a full disk, is readable up to the last
//! complete frame; a frame with a wrong hash is skipped.

use serde::{Deserialize, Serialize};

use super::Segment;
use super::bytes::{Cursor, folded, put, sum, unfolded};
use crate::request::RequestId;
use crate::time::Nanos;

/// The start of every file.
pub const MAGIC: &[u8] = b"kvlane recording 1\n";
/// Header bytes of a frame.
const FRAME_HEAD: usize = 13;

const HEAD: u8 = b'H';
const SEGMENT: u8 = b'S';
const PROMPTS: u8 = b'P';

/// Metadata of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// `kvlane.recording/1`.
    pub schema: String,
    /// The pool's model.
    pub model: String,
    /// The gateway's version.
    pub version: String,
    /// When the gateway's time was 0, in seconds since 1970 (Unix time).
    pub origin_unix_s: f64,
    /// The gateway's time when the file was created.
    pub begun: Nanos,
}

/// The prefix that a prompt shares with an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// The request.
    pub request: RequestId,
    /// The earlier request with this prefix, and the prefix length in units of [`super::shared_blocks`].
    pub base: Option<(RequestId, u32)>,
}

/// A frame of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame<'a> {
    /// Metadata of the following frames.
    Head(Head),
    /// A segment.
    Segment {
        /// Number of segments before it.
        number: u64,
        /// Its entries, for [`super::Entries`].
        bytes: &'a [u8],
    },
    /// Prefixes shared by prompts.
    Prompts(Vec<Shared>),
    /// A frame with a wrong hash, of this many bytes.
    Damaged(usize),
    /// The file ends within a frame; this many bytes are left.
    Torn(usize),
}

/// The frames of a file.
#[derive(Clone, Debug)]
pub struct Frames<'a>(&'a [u8]);

/// The start of a file.
pub fn begin(head: &Head) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    frame(&mut out, HEAD, |out| out.extend(serde_json::to_vec(head).unwrap_or_default()));
    out
}

/// Appends a segment and its prompts' shared prefixes.
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
    /// The frames of a file, or of concatenated files. `None` if it is not a recording.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.starts_with(MAGIC).then_some(Self(bytes))
    }

    /// Decodes the content of a frame.
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
        // Concatenated files may be separated by a newline.
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
        // If another file follows, the truncated or damaged frame ends at its start.
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
