//! gRPC: frames, status codes, and the health service.
//!
//! A message travels as a flag for compression, its length in four bytes, and its bytes
//! (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>).

use bytes::{Bytes, BytesMut};

use crate::protobuf::{Message, bytes_of};

/// The content type of requests and answers.
pub const CONTENT_TYPE: &str = "application/grpc";
/// Bytes before a message.
const PREFIX_BYTES: usize = 5;

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Without error.
    Ok = 0,
    /// A message cannot be read.
    InvalidArgument = 3,
    /// What the call names does not exist.
    NotFound = 5,
    /// A message is too large, or a limit is reached.
    ResourceExhausted = 8,
    /// The method does not exist.
    Unimplemented = 12,
    /// The server stops.
    Unavailable = 14,
}

/// A message that is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It is compressed, and no compression was negotiated.
    #[error("the message is compressed")]
    Compressed,
    /// It is larger than allowed.
    #[error("the message has {len} bytes, more than {max}")]
    TooLarge {
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
}

/// Puts messages together from the pieces in which they arrive.
#[derive(Debug, Default)]
pub struct Frames {
    /// The piece that is being read.
    piece: Bytes,
    /// The beginning of a message that is not complete.
    begun: BytesMut,
}

// === impl Frames ===

impl Frames {
    /// Adds a piece. All messages of the piece before must have been taken.
    pub fn push(&mut self, piece: Bytes) {
        if self.begun.is_empty() {
            self.piece = piece;
        } else {
            self.begun.extend_from_slice(&piece);
        }
    }

    /// The next complete message. It shares the memory of its piece if it arrived in one.
    ///
    /// # Errors
    /// The next message is not valid; the rest cannot be read.
    pub fn next(&mut self, max: usize) -> Result<Option<Bytes>, FrameError> {
        let whole = if self.begun.is_empty() { &self.piece[..] } else { &self.begun[..] };
        let Some((prefix, _)) = whole.split_at_checked(PREFIX_BYTES) else { return Ok(self.keep()) };
        if prefix[0] != 0 {
            return Err(FrameError::Compressed);
        }
        let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        if len > max {
            return Err(FrameError::TooLarge { len, max });
        }
        if whole.len() < PREFIX_BYTES + len {
            return Ok(self.keep());
        }
        if !self.begun.is_empty() {
            self.piece = std::mem::take(&mut self.begun).freeze();
        }
        let mut message = self.piece.split_to(PREFIX_BYTES + len);
        Ok(Some(message.split_off(PREFIX_BYTES)))
    }

    /// Whether a message has begun and is not complete.
    pub fn is_within(&self) -> bool {
        !self.begun.is_empty() || !self.piece.is_empty()
    }

    /// Keeps an incomplete message until the next piece.
    fn keep(&mut self) -> Option<Bytes> {
        if self.begun.is_empty() && !self.piece.is_empty() {
            self.begun.extend_from_slice(&self.piece);
            self.piece = Bytes::new();
        }
        None
    }
}

/// Appends a frame whose message is written by `write`.
pub fn frame(out: &mut Vec<u8>, write: impl FnOnce(&mut Message)) {
    let at = out.len();
    let mut message = Message(std::mem::take(out));
    message.0.extend_from_slice(&[0; PREFIX_BYTES]);
    write(&mut message);
    *out = message.0;
    // A message of four gigabytes is never written.
    let len = u32::try_from(out.len() - at - PREFIX_BYTES).unwrap_or(u32::MAX);
    out[at + 1..at + PREFIX_BYTES].copy_from_slice(&len.to_be_bytes());
}

/// The service that a `grpc.health.v1.HealthCheckRequest` names; empty for the whole server.
pub fn health_service(request: &[u8]) -> &str {
    bytes_of(request, 1).and_then(|name| std::str::from_utf8(name).ok()).unwrap_or_default()
}

/// Appends a `grpc.health.v1.HealthCheckResponse`. An unknown service has no status; only `Watch` reports it so.
pub fn health(out: &mut Vec<u8>, serving: Option<bool>) {
    const SERVING: u64 = 1;
    const NOT_SERVING: u64 = 2;
    const SERVICE_UNKNOWN: u64 = 3;
    let status = serving.map_or(SERVICE_UNKNOWN, |serving| if serving { SERVING } else { NOT_SERVING });
    frame(out, |message| message.number(1, status));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_are_the_same_in_whatever_pieces_they_arrive(
            texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..6),
            cuts in prop::collection::vec(1usize..40, 0..60),
        ) {
            let mut wire = Vec::new();
            for text in &texts {
                frame(&mut wire, |message| message.0.extend_from_slice(text));
            }
            let (mut frames, mut read, mut left) = (Frames::default(), Vec::new(), Bytes::from(wire));
            let mut cuts = cuts.into_iter();
            while !left.is_empty() {
                let at = cuts.next().unwrap_or(left.len()).min(left.len());
                frames.push(left.split_to(at));
                while let Some(message) = frames.next(300).expect("valid") {
                    read.push(message.to_vec());
                }
            }
            prop_assert_eq!(read, texts);
            prop_assert!(!frames.is_within());
        }
    }

    #[test]
    fn a_frame_that_is_too_large_or_compressed_is_refused() {
        let mut wire = Vec::new();
        frame(&mut wire, |message| message.0.extend_from_slice(b"four"));
        let mut frames = Frames::default();
        frames.push(wire.clone().into());
        assert_eq!(frames.next(3), Err(FrameError::TooLarge { len: 4, max: 3 }));
        wire[0] = 1;
        let mut frames = Frames::default();
        frames.push(wire.into());
        assert_eq!(frames.next(4), Err(FrameError::Compressed));
    }

    #[test]
    fn a_health_check_names_a_service() {
        let mut request = Message::default();
        request.bytes(1, b"readiness");
        assert_eq!((health_service(&request.0), health_service(b"")), ("readiness", ""));
        let mut out = Vec::new();
        health(&mut out, Some(true));
        assert_eq!(out, [0, 0, 0, 0, 2, 8, 1]);
    }
}
