//! Reads a response from memory, for fuzzing.

use super::head::{Framing, parse_head};
use super::*;

/// Status and body that would be relayed of a response to a request by `method` that arrives in these pieces before the
/// connection closes; nothing if it is not complete.
pub fn relayed(method: &Method, pieces: &[&[u8]]) -> Option<(StatusCode, Vec<u8>)> {
    let mut pieces = pieces.iter();
    let mut buffer = BytesMut::new();
    let head = loop {
        match parse_head(&buffer, method).ok()? {
            Some((len, head)) => {
                drop(buffer.split_to(len));
                if let Some(head) = head {
                    break head;
                }
            }
            None => buffer.extend_from_slice(pieces.next()?),
        }
    };
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return None;
    }
    let mut body = Http1Body {
        stream: None,
        buffer,
        framing: head.framing,
        reusable: false,
        home: Arc::new(IdleConnections::new(ConnectionsConfig::default())),
        upstream: UpstreamId(0),
    };
    let mut whole = Vec::new();
    loop {
        while !body.is_done() && !body.buffer.is_empty() {
            whole.extend_from_slice(&body.take_piece().ok()?.unwrap_or_default());
        }
        match (pieces.next(), body.framing) {
            (_, Framing::Done) | (None, Framing::UntilClose) => return Some((head.status, whole)),
            (None, _) => return None,
            (Some(piece), _) => body.buffer.extend_from_slice(piece),
        }
    }
}
