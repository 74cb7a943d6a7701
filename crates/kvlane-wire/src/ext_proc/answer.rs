//! Answers to Envoy: `ProcessingResponse` messages, each in a gRPC frame.

use crate::grpc::frame;
use crate::protobuf::Message;

/// Largest piece of a body in one message. Some data planes limit messages to 64 KiB.
const PIECE_BYTES_MAX: usize = 62_000;
/// Replaces the header or adds it.
const OVERWRITE_IF_EXISTS_OR_ADD: u64 = 2;

/// What is answered. The number of its field in `ProcessingResponse`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The request's head.
    RequestHead = 1,
    /// The answer's head.
    ResponseHead = 2,
    /// The request's body.
    RequestBody = 3,
    /// The answer's body.
    ResponseBody = 4,
    /// The request's trailers.
    RequestTrailers = 5,
    /// The answer's trailers.
    ResponseTrailers = 6,
}

/// A change of a request or an answer.
#[derive(Clone, Debug, Default)]
pub struct Mutation<'a> {
    /// Header fields to set.
    pub set: Vec<(&'a str, &'a [u8])>,
    /// Header fields to remove.
    pub remove: Vec<&'a str>,
    /// Another body; only where the body is buffered.
    pub body: Option<&'a [u8]>,
    /// Whether Envoy selects the route again.
    pub clear_route_cache: bool,
    /// Dynamic metadata: filter, key and text.
    pub metadata: Option<(&'a str, &'a str, &'a str)>,
}

/// Appends the answer that changes nothing.
pub fn continued(out: &mut Vec<u8>, phase: Phase) {
    frame(out, |message| message.message(phase as u64, |_| {}));
}

/// Appends an answer to a head or a buffered body.
pub fn mutated(out: &mut Vec<u8>, phase: Phase, mutation: &Mutation<'_>) {
    let Mutation { set, remove, body, clear_route_cache, metadata } = mutation;
    frame(out, |message| {
        message.message(phase as u64, |answer| {
            answer.message(1, |common| {
                if !set.is_empty() || !remove.is_empty() {
                    common.message(2, |headers| headers.headers(set, remove));
                }
                if let Some(body) = body {
                    common.message(3, |mutation| mutation.bytes(1, body));
                }
                if *clear_route_cache {
                    common.number(5, 1);
                }
            });
        });
        if let Some((filter, key, text)) = metadata {
            message.message(8, |object| {
                object.entry(filter, |value| {
                    value.message(5, |object| object.entry(key, |value| value.bytes(3, text.as_bytes())));
                });
            });
        }
    });
}

/// Appends a body in pieces. `is_last` is whether the body ends with it.
pub fn streamed_body(out: &mut Vec<u8>, phase: Phase, body: &[u8], is_last: bool) {
    out.reserve(body.len() + 64 * (1 + body.len() / PIECE_BYTES_MAX));
    let mut left = body;
    loop {
        let (piece, rest) = left.split_at(left.len().min(PIECE_BYTES_MAX));
        left = rest;
        frame(out, |message| {
            message.message(phase as u64, |answer| {
                answer.message(1, |common| {
                    common.message(3, |mutation| {
                        mutation.message(3, |streamed| {
                            if !piece.is_empty() {
                                streamed.bytes(1, piece);
                            }
                            if is_last && left.is_empty() {
                                streamed.number(2, 1);
                            }
                        });
                    });
                });
            });
        });
        if left.is_empty() {
            return;
        }
    }
}

/// Appends the answer that Envoy gives the client instead of sending the request on.
pub fn immediate<'a>(
    out: &mut Vec<u8>,
    status: u16,
    headers: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    body: &[u8],
    details: &str,
) {
    let headers: Vec<_> = headers.into_iter().collect();
    frame(out, |message| {
        message.message(7, |answer| {
            answer.message(1, |code| code.number(1, status.into()));
            if !headers.is_empty() {
                answer.message(2, |mutation| mutation.headers(&headers, &[]));
            }
            answer.bytes(3, body);
            answer.bytes(5, details.as_bytes());
        });
    });
}

/// Messages of Envoy.
trait Envoy {
    fn headers(&mut self, set: &[(&str, &[u8])], remove: &[&str]);
    fn entry(&mut self, key: &str, value: impl FnOnce(&mut Self));
}

impl Envoy for Message {
    fn headers(&mut self, set: &[(&str, &[u8])], remove: &[&str]) {
        for (name, value) in set {
            self.message(1, |option| {
                option.message(1, |header| {
                    header.bytes(1, name.as_bytes());
                    header.bytes(3, value);
                });
                option.number(3, OVERWRITE_IF_EXISTS_OR_ADD);
            });
        }
        remove.iter().for_each(|name| self.bytes(2, name.as_bytes()));
    }

    fn entry(&mut self, key: &str, value: impl FnOnce(&mut Self)) {
        self.message(1, |entry| {
            entry.bytes(1, key.as_bytes());
            entry.message(2, value);
        });
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::grpc::Frames;
    use crate::protobuf::{bytes_of, number_of};

    fn messages(wire: Vec<u8>) -> Vec<Bytes> {
        let mut frames = Frames::default();
        frames.push(wire.into());
        std::iter::from_fn(|| frames.next(1 << 20).expect("valid")).collect()
    }

    fn at<'a>(message: &'a [u8], path: &[u64]) -> &'a [u8] {
        path.iter().fold(message, |message, &number| bytes_of(message, number).expect("the field"))
    }

    #[test]
    fn a_body_comes_back_in_pieces_that_every_data_plane_takes() {
        for len in [0, 1, PIECE_BYTES_MAX, PIECE_BYTES_MAX + 1, 400_000] {
            let body: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let mut out = Vec::new();
            streamed_body(&mut out, Phase::RequestBody, &body, true);
            let pieces = messages(out);
            assert_eq!(pieces.len(), len.div_ceil(PIECE_BYTES_MAX).max(1));
            let mut whole = Vec::new();
            for (n, piece) in pieces.iter().enumerate() {
                let streamed = at(piece, &[3, 1, 3, 3]);
                whole.extend_from_slice(bytes_of(streamed, 1).unwrap_or_default());
                assert_eq!(number_of(streamed, 2) == Some(1), n + 1 == pieces.len());
                assert!(piece.len() < 64 << 10);
            }
            assert_eq!(whole, body);
        }
    }

    #[test]
    fn a_mutation_sets_headers_and_metadata() {
        let mut out = Vec::new();
        let mutation = Mutation {
            set: vec![("x-to", b"10.0.0.1:80")],
            remove: vec!["authorization"],
            clear_route_cache: true,
            metadata: Some(("envoy.lb", "x-to", "10.0.0.1:80")),
            ..Mutation::default()
        };
        mutated(&mut out, Phase::RequestHead, &mutation);
        let [message] = &messages(out)[..] else { panic!("one message") };
        let headers = at(message, &[1, 1, 2]);
        assert_eq!(at(headers, &[1, 1, 1]), b"x-to");
        assert_eq!(at(headers, &[1, 1, 3]), b"10.0.0.1:80");
        assert_eq!(number_of(at(headers, &[1]), 3), Some(OVERWRITE_IF_EXISTS_OR_ADD));
        assert_eq!(at(headers, &[2]), b"authorization");
        assert_eq!(number_of(at(message, &[1, 1]), 5), Some(1));
        assert_eq!(at(message, &[8, 1, 1]), b"envoy.lb");
        let object = at(message, &[8, 1, 2, 5]);
        assert_eq!((at(object, &[1, 1]), at(object, &[1, 2, 3])), (&b"x-to"[..], &b"10.0.0.1:80"[..]));
    }

    #[test]
    fn an_immediate_answer_has_status_headers_and_body() {
        let mut out = Vec::new();
        immediate(&mut out, 429, [("retry-after", &b"2"[..])], b"{}", "queue_full");
        let [message] = &messages(out)[..] else { panic!("one message") };
        let answer = at(message, &[7]);
        assert_eq!(number_of(at(answer, &[1]), 1), Some(429));
        assert_eq!((at(answer, &[2, 1, 1, 1]), at(answer, &[3])), (&b"retry-after"[..], &b"{}"[..]));
        assert_eq!(at(answer, &[5]), b"queue_full");
    }
}
