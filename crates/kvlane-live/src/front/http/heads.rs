//! Looks at the heads of HTTP/1 requests as they come in, before hyper does.
//!
//! hyper takes a bare LF for the end of a line and forgets a `Content-Length` beside a `Transfer-Encoding`; when it hands a
//! request over, nobody can tell any more. A server before us may have read such a head otherwise, and think that the request
//! ends elsewhere. Heads are bounded here, too: hyper has one bound for a head and for what it reads of a body at once.
//!
//! What is found is kept until the request is handed over, and is its answer: [`Findings::next`]. The connection ends with it, so
//! nothing behind such a head is looked at.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memchr::memchr;
use tokio::io::ReadBuf;

use super::error::ApiError;
use crate::memory::{Held, Memory};

/// The most that a head may have.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;
/// What is kept of a line: more than a field takes that says how long a body is.
const LINE_BYTES_KEPT: usize = 64;

/// What is wrong with a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    BareLf,
    TwoLengths,
    TooLarge,
    NoMemory,
}

/// What was found on one connection, and how many of its heads have been answered for.
#[derive(Default)]
pub(super) struct Findings {
    handed_over: AtomicU64,
    /// The first bad head's number, from 1, times four, and what is wrong with it.
    bad: AtomicU64,
}

/// Follows what comes in on one connection.
pub(super) struct Heads {
    findings: Arc<Findings>,
    held: Held,
    at: At,
    /// Number of the head that comes next, from 1.
    number: u64,
    /// Bytes and lines of it so far.
    bytes: usize,
    lines: usize,
    line: Line,
    length: Option<u64>,
    is_chunked: bool,
}

/// Where in the stream of requests.
enum At {
    Head,
    /// In a body of which so much is to come.
    Body(u64),
    /// Behind what is followed: a body in chunks, after which no request is read, or a bad head.
    End,
}

/// The line that is being read.
struct Line {
    kept: [u8; LINE_BYTES_KEPT],
    len: usize,
    last: [u8; 2],
}

// === impl Findings ===

impl Findings {
    /// What is wrong with the head of the next request that is handed over.
    pub(super) fn next(&self) -> Result<(), ApiError> {
        let number = self.handed_over.fetch_add(1, Ordering::Relaxed) + 1;
        let bad = self.bad.load(Ordering::Relaxed);
        if bad >> 2 != number {
            return Ok(());
        }
        Err(match bad & 3 {
            0 => ApiError::BadHead("a line of it ends in LF without CR"),
            1 => ApiError::BadHead("it says more than once how long the body is"),
            2 => ApiError::HeadTooLarge { limit: HEAD_BYTES_MAX },
            _ => ApiError::NoMemory,
        })
    }
}

// === impl Heads ===

impl Heads {
    pub(super) fn new(findings: Arc<Findings>, memory: &Arc<Memory>) -> Self {
        Self {
            findings,
            held: memory.share(),
            at: At::Head,
            number: 1,
            bytes: 0,
            lines: 0,
            line: Line::EMPTY,
            length: None,
            is_chunked: false,
        }
    }

    /// Looks at what was read behind `from`.
    pub(super) fn look(&mut self, read: &mut ReadBuf<'_>, mut from: usize) {
        while from < read.filled().len() {
            let bytes = &read.filled()[from..];
            match &mut self.at {
                At::End => return,
                At::Body(left) => {
                    let here = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= here as u64;
                    if *left == 0 {
                        self.at = At::Head;
                    }
                    from += here;
                }
                At::Head => match self.take_line(bytes) {
                    Ok(taken) => from += taken,
                    Err(fault) => {
                        self.findings.bad.store(self.number << 2 | fault as u64, Ordering::Relaxed);
                        self.at = At::End;
                        if matches!(fault, Fault::TooLarge | Fault::NoMemory) {
                            end_head(read);
                        }
                    }
                },
            }
        }
    }

    /// Takes what there is of a head's line; says how much that is.
    fn take_line(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let end = memchr(b'\n', bytes);
        let line = &bytes[..end.map_or(bytes.len(), |at| at + 1)];
        self.bytes += line.len();
        if self.bytes > HEAD_BYTES_MAX {
            return Err(Fault::TooLarge);
        }
        if !self.held.grow_to(self.bytes) {
            return Err(Fault::NoMemory);
        }
        self.line.extend(line);
        if end.is_some() {
            let line = std::mem::replace(&mut self.line, Line::EMPTY);
            self.end_line(&line)?;
        }
        Ok(line.len())
    }

    fn end_line(&mut self, line: &Line) -> Result<(), Fault> {
        if line.last != *b"\r\n" {
            return Err(Fault::BareLf);
        }
        match (self.lines, line.len) {
            // Empty lines before a request are skipped.
            (0, 2) => return Ok(()),
            (_, 2) => {
                self.end();
                return Ok(());
            }
            (0, _) => {}
            _ => match line.field() {
                Some((name, value)) if name.eq_ignore_ascii_case(b"content-length") => {
                    let length = std::str::from_utf8(value).ok().and_then(|value| value.trim().parse().ok());
                    if self.is_chunked || self.length.is_some() {
                        return Err(Fault::TwoLengths);
                    }
                    // hyper takes no other than a number.
                    self.length = Some(length.unwrap_or(u64::MAX));
                }
                Some((name, _)) if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                    if self.length.is_some() {
                        return Err(Fault::TwoLengths);
                    }
                    self.is_chunked = true;
                }
                _ => {}
            },
        }
        self.lines += 1;
        Ok(())
    }

    /// A head has ended.
    fn end(&mut self) {
        self.at = match self.length {
            _ if self.is_chunked => At::End,
            None | Some(0) => At::Head,
            Some(length) => At::Body(length),
        };
        self.number += 1;
        (self.bytes, self.lines, self.length) = (0, 0, None);
        self.held.release();
    }
}

/// Ends a head that is refused, in place of its last bytes or behind them: hyper then hands it over.
fn end_head(read: &mut ReadBuf<'_>) {
    const END: &[u8] = b"\r\n\r\n";
    if read.remaining() >= END.len() {
        return read.put_slice(END);
    }
    let filled = read.filled_mut();
    let len = filled.len().min(END.len());
    let at = filled.len() - len;
    filled[at..].copy_from_slice(&END[END.len() - len..]);
}

// === impl Line ===

impl Line {
    const EMPTY: Self = Self { kept: [0; LINE_BYTES_KEPT], len: 0, last: [0; 2] };

    fn extend(&mut self, bytes: &[u8]) {
        let at = self.len.min(LINE_BYTES_KEPT);
        let kept = bytes.len().min(LINE_BYTES_KEPT - at);
        self.kept[at..at + kept].copy_from_slice(&bytes[..kept]);
        self.len += bytes.len();
        match *bytes {
            [.., before, last] => self.last = [before, last],
            [last] => self.last = [self.last[1], last],
            [] => {}
        }
    }

    /// Its name and what is kept of its value.
    fn field(&self) -> Option<(&[u8], &[u8])> {
        let kept = &self.kept[..self.len.min(LINE_BYTES_KEPT)];
        let colon = memchr(b':', kept)?;
        Some((&kept[..colon], &kept[colon + 1..]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What is found of each request when `text` comes in pieces of these lengths, over and over.
    fn findings(text: &[u8], pieces: &[usize], requests: usize) -> Vec<Option<String>> {
        let (findings, memory) = (Arc::new(Findings::default()), Memory::new(usize::MAX));
        let mut heads = Heads::new(Arc::clone(&findings), &memory);
        let (mut rest, mut lens) = (text, pieces.iter().cycle());
        while !rest.is_empty() {
            let (piece, more) = rest.split_at(rest.len().min(*lens.next().expect("lengths")));
            let mut room = vec![0; piece.len() + 8];
            let mut read = ReadBuf::new(&mut room);
            read.put_slice(b"AB");
            read.put_slice(piece);
            heads.look(&mut read, 2);
            rest = more;
        }
        (0..requests).map(|_| findings.next().err().map(|error| error.to_string())).collect()
    }

    #[test]
    fn the_number_of_the_bad_head_is_right_whatever_comes_before_it() {
        let fine = "\r\nPOST /a HTTP/1.1\r\nContent-Length: 12\r\nx: y\r\n\r\n\n\n\r\n12345678GET / HTTP/1.1\r\n\r\n";
        for (bad, says) in [
            ("GET / HTTP/1.1\nhost: x\r\n\r\n", "LF"),
            ("GET / HTTP/1.1\r\nhost: x\n\r\n", "LF"),
            ("GET / HTTP/1.1\r\nhost: x\r\n\n", "LF"),
            ("\nGET / HTTP/1.1\r\n\r\n", "LF"),
            ("POST / HTTP/1.1\r\ncontent-length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "how long"),
            ("POST / HTTP/1.1\r\nTRANSFER-ENCODING:chunked\r\nx: y\r\nContent-Length:5\r\n\r\n", "how long"),
            ("POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n", "how long"),
            (&*format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(HEAD_BYTES_MAX)), "65536 bytes"),
        ] {
            let text = format!("{fine}{bad}");
            for pieces in [&[1][..], &[2], &[7, 1], &[text.len()]] {
                let found = findings(text.as_bytes(), pieces, 4);
                assert!(found[2].as_deref().is_some_and(|found| found.contains(says)), "{bad}: {found:?}");
                assert_eq!((&found[0], &found[1], &found[3]), (&None, &None, &None), "{bad}");
            }
        }
    }

    #[test]
    fn what_is_behind_a_body_in_chunks_is_not_looked_at() {
        let text =
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\n\n";
        assert_eq!(findings(text, &[5], 2), [None, None]);
    }

    #[test]
    fn a_head_without_end_is_ended() {
        let (findings, memory) = (Arc::new(Findings::default()), Memory::new(usize::MAX));
        for free in [0, 1, 4] {
            let mut heads = Heads::new(Arc::clone(&findings), &memory);
            let mut room = vec![0; HEAD_BYTES_MAX + 1 + free];
            let mut read = ReadBuf::new(&mut room);
            read.put_slice(&[b'x'; HEAD_BYTES_MAX + 1]);
            heads.look(&mut read, 0);
            assert!(read.filled().ends_with(b"x\r\n\r\n"), "{free}");
        }
    }

    #[test]
    fn large_heads_hold_memory_until_they_end() {
        let (findings, memory) = (Arc::new(Findings::default()), Memory::new(20_000));
        let mut heads = Heads::new(Arc::clone(&findings), &memory);
        let mut come = |text: &[u8]| {
            let mut room = text.to_vec();
            room.resize(text.len() + 8, 0);
            let mut read = ReadBuf::new(&mut room);
            read.set_filled(text.len());
            heads.look(&mut read, 0);
        };
        come(&[b'x'; 15_000]);
        assert_eq!(memory.held(), 15_000);
        come(b"\r\n\r\n");
        assert_eq!(memory.held(), 0);
        come(&[b'x'; 20_001]);
        assert!(findings.next().is_ok() && matches!(findings.next(), Err(ApiError::NoMemory)));
    }

    proptest! {
        #[test]
        fn no_bytes_in_no_pieces_are_too_strange(
            text in prop::collection::vec(prop::sample::select(b"\r\n: a0Content-Length:1".to_vec()), 0..400),
            pieces in prop::collection::vec(1_usize..50, 1..5),
        ) {
            prop_assert_eq!(findings(&text, &pieces, 9), findings(&text, &[1], 9));
        }
    }
}
