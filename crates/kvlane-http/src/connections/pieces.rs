//! An answer read out of memory, for whoever tries what bytes may come from a worker.

use super::*;

/// What would be relayed of a worker's answer to a request by `method` that comes in these pieces, and then the
/// connection closes: its status and its body, if they are whole.
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
    let mut body = AnswerBody {
        stream: None,
        buffer,
        framing: head.framing,
        first: None,
        reusable: false,
        home: Connections::new(ConnectionsConfig::default(), Arc::default()),
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
