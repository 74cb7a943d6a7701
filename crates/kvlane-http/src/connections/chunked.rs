//! Chunked transfer coding (RFC 9112, section 7.1), decoded in place.
//!
//! The framing is removed and the data moved together within the buffer it arrived in, so the chunks of one read leave as
//! one piece.

/// The position of the next byte in the coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunked {
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In a chunk's size; how many digits it has so far.
    Size {
        size: u64,
        digits: u8,
    },
    /// After the size, in extensions, until the line ends; how long they are so far.
    Extension {
        size: u64,
        len: u16,
    },
    /// The size line's CR was seen.
    SizeLf {
        size: u64,
    },
    /// In a chunk's data.
    Data {
        left: u64,
    },
    /// After a chunk's data.
    DataCr,
    DataLf,
    /// In the trailer section; length of the current line and of all.
    Trailer {
        line: u16,
        all: u16,
    },
    /// After the last byte.
    Done,
}

/// Most bytes of the extensions of one chunk, and of all trailers.
const EXTRA_BYTES_MAX: u16 = 8192;

/// Most digits of a chunk size on the fast path.
const DIGITS_USUAL: usize = 8;

/// The coding is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("broken chunked coding: expected {0}")]
pub struct ChunkedError(&'static str);

// === impl Chunked ===

impl Chunked {
    /// A decoder at the start of a body.
    pub const fn start() -> Self {
        Self { state: State::Size { size: 0, digits: 0 } }
    }

    /// Whether the last byte of the body has been read.
    pub fn is_done(self) -> bool {
        self.state == State::Done
    }

    /// Decodes `bytes` in place: how many were read, and how many bytes of data now stand at the front. All are read
    /// unless the body ends before.
    pub fn decode(&mut self, bytes: &mut [u8]) -> Result<(usize, usize), ChunkedError> {
        let (mut read, mut data) = (0, 0);
        while read < bytes.len() && self.state != State::Done {
            if let State::Data { left } = self.state {
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - read);
                if read != data {
                    bytes.copy_within(read..read + take, data);
                }
                read += take;
                data += take;
                let left = left - take as u64;
                self.state = if left == 0 { State::DataCr } else { State::Data { left } };
            } else if let Some((state, len)) = self.state.usual(&bytes[read..]) {
                (self.state, read) = (state, read + len);
            } else {
                self.state = self.state.frame(bytes[read])?;
                read += 1;
            }
        }
        Ok((read, data))
    }
}

// === impl State ===

impl State {
    /// Fast path: parses the usual framing of a chunk if all of it is in the buffer, and returns its length. Same result as
    /// [`State::frame`] byte by byte.
    fn usual(self, bytes: &[u8]) -> Option<(Self, usize)> {
        match self {
            Self::DataCr => bytes.starts_with(b"\r\n").then_some((Self::Size { size: 0, digits: 0 }, 2)),
            Self::Size { size: 0, digits: 0 } => {
                let (mut size, mut len) = (0, 0);
                while let Some(digit) = bytes.get(len).and_then(|byte| (*byte as char).to_digit(16)) {
                    (size, len) = (size << 4 | u64::from(digit), len + 1);
                    if len > DIGITS_USUAL {
                        return None;
                    }
                }
                let whole = len > 0 && size > 0 && bytes[len..].starts_with(b"\r\n");
                whole.then_some((Self::Data { left: size }, len + 2))
            }
            _ => None,
        }
    }

    /// The state after one byte of framing.
    fn frame(self, byte: u8) -> Result<Self, ChunkedError> {
        Ok(match (self, byte) {
            (Self::Size { size, digits }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') if digits < 15 => {
                let digit = (byte as char).to_digit(16).unwrap_or(0);
                Self::Size { size: size << 4 | u64::from(digit), digits: digits + 1 }
            }
            (Self::Size { size, digits: 1.. }, b'\r') => Self::SizeLf { size },
            (Self::Size { size, digits: 1.. }, b';' | b' ' | b'\t') => Self::Extension { size, len: 0 },
            (Self::Size { .. }, _) => return Err(ChunkedError("a chunk size in at most 15 hex digits")),
            (Self::Extension { size, .. }, b'\r') => Self::SizeLf { size },
            (Self::Extension { .. }, b'\n') => return Err(ChunkedError("CR LF after a chunk size")),
            (Self::Extension { size, len }, _) if len < EXTRA_BYTES_MAX => {
                Self::Extension { size, len: len + 1 }
            }
            (Self::Extension { .. }, _) => return Err(ChunkedError("shorter chunk extensions")),
            (Self::SizeLf { size: 0 }, b'\n') => Self::Trailer { line: 0, all: 0 },
            (Self::SizeLf { size }, b'\n') => Self::Data { left: size },
            (Self::DataCr, b'\r') => Self::DataLf,
            (Self::DataLf, b'\n') => Self::Size { size: 0, digits: 0 },
            (Self::SizeLf { .. } | Self::DataCr | Self::DataLf, _) => return Err(ChunkedError("CR LF")),
            (Self::Trailer { line: 0, .. }, b'\n') => Self::Done,
            (Self::Trailer { line, all }, b'\r') => Self::Trailer { line, all },
            (Self::Trailer { all, .. }, b'\n') => Self::Trailer { line: 0, all },
            (Self::Trailer { line, all }, _) if all < EXTRA_BYTES_MAX => {
                Self::Trailer { line: line + 1, all: all + 1 }
            }
            (Self::Trailer { .. }, _) => return Err(ChunkedError("shorter trailers")),
            (Self::Data { .. } | Self::Done, _) => self,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes in pieces of at most `step` bytes: the data, and how many bytes were left unread at the end.
    fn decode(bytes: &[u8], step: usize) -> Result<(Vec<u8>, usize, bool), ChunkedError> {
        let (mut chunked, mut out, mut unread) = (Chunked::start(), Vec::new(), 0);
        for piece in bytes.chunks(step) {
            let mut piece = piece.to_vec();
            let (read, data) = chunked.decode(&mut piece)?;
            out.extend_from_slice(&piece[..data]);
            unread += piece.len() - read;
        }
        Ok((out, unread, chunked.is_done()))
    }

    #[test]
    fn any_split_gives_the_same_data() {
        let body = b"5\r\nhello\r\n1;a=b\r\n \r\nA \r\n0123456789\r\n0\r\nx: y\r\n\r\nnext";
        for step in 1..body.len() + 1 {
            let decoded = decode(body, step).expect("well formed");
            assert_eq!(decoded, (b"hello 0123456789".to_vec(), 4, true), "in steps of {step}");
        }
    }

    #[test]
    fn a_body_cut_anywhere_is_not_done() {
        let body = b"5\r\nhello\r\n0\r\n\r\n";
        for len in 0..body.len() {
            assert!(!decode(&body[..len], 3).expect("so far well formed").2, "cut at {len}");
        }
    }

    #[test]
    fn broken_framing_is_an_error() {
        for body in [
            "x\r\n",
            "\r\n",
            "5\nhello",
            "5\r\nhelloworld",
            "5\r\nhello\n",
            "fffffffffffffffff\r\n",
            "-1\r\n",
            "5;x\n",
        ] {
            assert!(decode(body.as_bytes(), 2).is_err(), "{body:?}");
        }
        assert!(decode(&[b"1;".as_slice(), &[b'x'; 9000]].concat(), 100).is_err());
        assert!(decode(&[b"0\r\n".as_slice(), &[b'x'; 9000]].concat(), 100).is_err());
    }
}
