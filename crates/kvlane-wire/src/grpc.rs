//! gRPC: frames, status codes and messages, and the health service.
//!
//! A message travels as a flag for compression, its length in four bytes, and its bytes
//! (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>).

use bytes::{Bytes, BytesMut};

use crate::protobuf::{Message, bytes_of, number_of};

/// The health of a service that serves.
const SERVING: u64 = 1;
/// The content type of requests and answers.
pub const CONTENT_TYPE: &str = "application/grpc";
/// The path of a single health check.
pub const HEALTH_CHECK_PATH: &str = "/grpc.health.v1.Health/Check";
/// Bytes before a message.
const PREFIX_BYTES: usize = 5;

/// The field of an answer's trailers that says how the call ended, and the one that says why.
pub const STATUS_FIELD: &str = "grpc-status";
/// See [`STATUS_FIELD`].
pub const MESSAGE_FIELD: &str = "grpc-message";

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Without error.
    Ok = 0,
    /// The client gave it up.
    Cancelled = 1,
    /// An error of unknown kind.
    Unknown = 2,
    /// A message cannot be read.
    InvalidArgument = 3,
    /// It took too long.
    DeadlineExceeded = 4,
    /// What the call names does not exist.
    NotFound = 5,
    /// What the call creates exists.
    AlreadyExists = 6,
    /// The client may not call it.
    PermissionDenied = 7,
    /// A message is too large, or a limit is reached.
    ResourceExhausted = 8,
    /// The server's state does not allow it.
    FailedPrecondition = 9,
    /// Something else has changed meanwhile.
    Aborted = 10,
    /// Beyond the end of something.
    OutOfRange = 11,
    /// The method does not exist.
    Unimplemented = 12,
    /// The server failed.
    Internal = 13,
    /// The server stops, or is overloaded.
    Unavailable = 14,
    /// Data is lost.
    DataLoss = 15,
    /// The client did not say who it is.
    Unauthenticated = 16,
}

impl Status {
    const ALL: [Self; 17] = [
        Self::Ok,
        Self::Cancelled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The status in a field of that name. Values that gRPC does not define are [`Status::Unknown`].
    pub fn read(value: &[u8]) -> Self {
        let code = std::str::from_utf8(value).ok().and_then(|value| value.trim().parse::<usize>().ok());
        code.and_then(|code| Self::ALL.get(code).copied()).unwrap_or(Self::Unknown)
    }

    /// The status of a call that fails with this status of HTTP.
    pub const fn of_http(status: u16) -> Self {
        match status {
            200..=299 => Self::Ok,
            401 => Self::Unauthenticated,
            403 => Self::PermissionDenied,
            404 => Self::NotFound,
            408 | 504 => Self::DeadlineExceeded,
            413 | 429 | 431 => Self::ResourceExhausted,
            405 | 415 => Self::Unimplemented,
            400..=499 => Self::InvalidArgument,
            502 | 503 => Self::Unavailable,
            _ => Self::Internal,
        }
    }

    /// The status of HTTP that stands for this status.
    pub const fn as_http(self) -> u16 {
        match self {
            Self::Ok => 200,
            Self::Cancelled => 499,
            Self::InvalidArgument | Self::FailedPrecondition | Self::OutOfRange => 400,
            Self::Unauthenticated => 401,
            Self::PermissionDenied => 403,
            Self::NotFound => 404,
            Self::AlreadyExists | Self::Aborted => 409,
            Self::ResourceExhausted => 429,
            Self::Unimplemented => 501,
            Self::Unavailable => 503,
            Self::DeadlineExceeded => 504,
            Self::Unknown | Self::Internal | Self::DataLoss => 500,
        }
    }
}

/// A text as the value of [`MESSAGE_FIELD`]: UTF-8, percent-encoded where it is not visible ASCII.
pub fn encode_message(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
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
    /// It is cut off, or something follows it.
    #[error("the call has not exactly one message")]
    NotOne,
}

/// The only message of a body.
///
/// # Errors
/// It is compressed, or there is not exactly one.
pub fn message(body: &[u8]) -> Result<&[u8], FrameError> {
    let (prefix, message) = body.split_at_checked(PREFIX_BYTES).ok_or(FrameError::NotOne)?;
    if prefix[0] != 0 {
        return Err(FrameError::Compressed);
    }
    let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if message.len() == len { Ok(message) } else { Err(FrameError::NotOne) }
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

/// Whether a `grpc.health.v1.HealthCheckResponse` says that the service serves.
pub fn is_serving(answer: &[u8]) -> bool {
    number_of(answer, 1) == Some(SERVING)
}

/// Appends a `grpc.health.v1.HealthCheckResponse`. An unknown service has no status; only `Watch` reports it so.
pub fn health(out: &mut Vec<u8>, serving: Option<bool>) {
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
    fn a_body_has_exactly_one_message() {
        let mut body = Vec::new();
        frame(&mut body, |message| message.0.extend_from_slice(b"four"));
        assert_eq!(message(&body), Ok(&b"four"[..]));
        for cut in 0..body.len() {
            assert_eq!(message(&body[..cut]), Err(FrameError::NotOne), "{cut} bytes");
        }
        assert_eq!(message(&[&body[..], b"x"].concat()), Err(FrameError::NotOne));
        body[0] = 1;
        assert_eq!(message(&body), Err(FrameError::Compressed));
    }

    #[test]
    fn a_status_is_read_as_it_is_written() {
        for status in Status::ALL {
            assert_eq!(Status::read((status as u16).to_string().as_bytes()), status);
        }
        for other in ["17", "-1", "", "x"] {
            assert_eq!(Status::read(other.as_bytes()), Status::Unknown, "{other}");
        }
    }

    #[test]
    fn a_message_is_visible_ascii() {
        assert_eq!(encode_message("100 % of \u{e9}\n"), "100 %25 of %C3%A9%0A");
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
