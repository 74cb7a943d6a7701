//! Envoy's external processing protocol: `envoy.service.ext_proc.v3`.
//!
//! Envoy opens one stream for each request and sends the request's head, its body, and, if it is asked to, those of the
//! answer. Field numbers are those of `external_processor.proto` and `base.proto` of Envoy 1.40; only the messages needed
//! here are implemented, without a copy of a field on the way.

mod answer;

use crate::protobuf::{Field, bytes_of, fields, number_of};

pub use self::answer::{Mutation, Phase, continued, immediate, mutated, streamed_body};

/// The path of the method.
pub const PROCESS_PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// The name of the service, for health checks.
pub const SERVICE: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

/// How Envoy sends bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyMode {
    /// Not at all.
    #[default]
    None,
    /// Piece by piece, each of which must be answered before the next; the head has been sent on before.
    Streamed,
    /// Whole, after the head was answered.
    Buffered,
    /// Like [`BodyMode::Buffered`], up to Envoy's buffer limit.
    BufferedPartial,
    /// Piece by piece, none of which must be answered before the end.
    FullDuplexStreamed,
}

/// How Envoy sends the bodies of a request and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyModes {
    /// The request's body.
    pub request: BodyMode,
    /// The answer's body.
    pub response: BodyMode,
}

/// A message of Envoy.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// What it tells of.
    pub part: Part<'a>,
    message: &'a [u8],
}

/// A part of a request or its answer.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// The request's head.
    RequestHead(Head<'a>),
    /// The answer's head.
    ResponseHead(Head<'a>),
    /// A piece of the request's body.
    RequestBody(Piece<'a>),
    /// A piece of the answer's body.
    ResponseBody(Piece<'a>),
    /// The request's trailers, which end its body.
    RequestTrailers,
    /// The answer's trailers, which end its body.
    ResponseTrailers,
}

/// A head.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    map: &'a [u8],
    /// Whether there is no body.
    pub is_all: bool,
}

/// A piece of a body.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Its bytes.
    pub bytes: &'a [u8],
    /// Whether it is the last one.
    pub is_last: bool,
}

/// A value of Envoy's dynamic metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// Text.
    Text(&'a str),
    /// The texts of a list.
    List(Vec<&'a str>),
}

// === impl Received ===

impl<'a> Received<'a> {
    /// Reads a `ProcessingRequest`; none if it has no part that is known.
    pub fn read(message: &'a [u8]) -> Option<Self> {
        let part = fields(message).find_map(|field| match field {
            (2, Field::Bytes(head)) => Some(Part::RequestHead(Head::of(head))),
            (3, Field::Bytes(head)) => Some(Part::ResponseHead(Head::of(head))),
            (4, Field::Bytes(body)) => Some(Part::RequestBody(Piece::of(body))),
            (5, Field::Bytes(body)) => Some(Part::ResponseBody(Piece::of(body))),
            (6, Field::Bytes(_)) => Some(Part::RequestTrailers),
            (7, Field::Bytes(_)) => Some(Part::ResponseTrailers),
            _ => None,
        })?;
        Some(Self { part, message })
    }

    /// How bodies are sent. Only the first message says so; Envoy before 1.32 does not.
    pub fn body_modes(&self) -> Option<BodyModes> {
        let config = bytes_of(self.message, 11)?;
        let mode = |number| BodyMode::of(number_of(config, number).unwrap_or_default());
        Some(BodyModes { request: mode(1), response: mode(2) })
    }

    /// The dynamic metadata `key` of a filter, if it is text or a list of texts.
    pub fn metadata(&self, filter: &str, key: &str) -> Option<Value<'a>> {
        entry(bytes_of(self.message, 8)?, 1, filter).and_then(|filter| member(filter, key))
    }

    /// The attribute `key` that Envoy was asked to send.
    pub fn attribute(&self, key: &str) -> Option<Value<'a>> {
        // Attributes are grouped by the filter's name; there is one filter.
        let groups = fields(self.message).filter_map(|field| match field {
            (9, Field::Bytes(group)) => bytes_of(group, 2),
            _ => None,
        });
        groups.into_iter().find_map(|group| member(group, key))
    }
}

// === impl Head ===

impl<'a> Head<'a> {
    fn of(message: &'a [u8]) -> Self {
        let is_all = number_of(message, 3).is_some_and(|flag| flag != 0);
        Self { map: bytes_of(message, 1).unwrap_or_default(), is_all }
    }

    /// Its fields: names in lower case, values as bytes. Pseudo-headers such as `:path` are among them.
    pub fn fields(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        fields(self.map).filter_map(|field| match field {
            (1, Field::Bytes(header)) => {
                let name = bytes_of(header, 1)?;
                let raw = bytes_of(header, 3).filter(|raw| !raw.is_empty());
                Some((name, raw.or_else(|| bytes_of(header, 2)).unwrap_or_default()))
            }
            _ => None,
        })
    }
}

// === impl Piece ===

impl<'a> Piece<'a> {
    fn of(message: &'a [u8]) -> Self {
        let is_set = |number| number_of(message, number).is_some_and(|flag| flag != 0);
        Self { bytes: bytes_of(message, 1).unwrap_or_default(), is_last: is_set(2) || is_set(3) }
    }
}

// === impl BodyMode ===

impl BodyMode {
    fn of(number: u64) -> Self {
        match number {
            1 => Self::Streamed,
            2 => Self::Buffered,
            3 => Self::BufferedPartial,
            4 => Self::FullDuplexStreamed,
            _ => Self::None,
        }
    }
}

/// The value of a map's entry: the map is the field `number` of `message`, its values are messages.
fn entry<'a>(message: &'a [u8], number: u64, key: &str) -> Option<&'a [u8]> {
    fields(message).find_map(|field| match field {
        (found, Field::Bytes(entry)) if found == number && bytes_of(entry, 1) == Some(key.as_bytes()) => {
            Some(bytes_of(entry, 2).unwrap_or_default())
        }
        _ => None,
    })
}

/// The member `key` of a `google.protobuf.Struct`.
fn member<'a>(object: &'a [u8], key: &str) -> Option<Value<'a>> {
    let text = |value: &'a [u8]| bytes_of(value, 3).and_then(|text| std::str::from_utf8(text).ok());
    let value = entry(object, 1, key)?;
    if let Some(text) = text(value) {
        return Some(Value::Text(text));
    }
    let list = bytes_of(value, 6)?;
    let items = fields(list).filter_map(|field| match field {
        (1, Field::Bytes(item)) => text(item),
        _ => None,
    });
    Some(Value::List(items.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protobuf::Message;

    fn text(message: &mut Message, key: &str, write: impl FnOnce(&mut Message)) {
        message.message(1, |entry| {
            entry.bytes(1, key.as_bytes());
            entry.message(2, write);
        });
    }

    fn request(part: impl FnOnce(&mut Message)) -> Vec<u8> {
        let mut message = Message::default();
        part(&mut message);
        message.message(8, |metadata| {
            text(metadata, "envoy.lb.subset_hint", |object| {
                text(object, "list", |value| {
                    value.message(6, |list| {
                        list.message(1, |item| item.bytes(3, b"10.0.0.1:80"));
                        list.message(1, |item| item.bytes(3, b"10.0.0.2"));
                    });
                });
                text(object, "text", |value| value.bytes(3, b"10.0.0.1:80,10.0.0.2"));
                text(object, "empty", |value| value.message(6, |_| {}));
                text(object, "number", |value| value.fixed64(2, 0));
            });
        });
        message.message(9, |entry| {
            entry.bytes(1, b"envoy.filters.http.ext_proc");
            entry.message(2, |object| {
                text(object, "upstream.address", |value| value.bytes(3, b"10.0.0.2:80"));
            });
        });
        message.message(11, |config| {
            config.number(1, 4);
            config.number(2, 0);
        });
        message.0
    }

    #[test]
    fn a_head_has_its_fields_and_what_envoy_adds() {
        let message = request(|message| {
            message.message(2, |head| {
                head.message(1, |map| {
                    for (name, value, raw) in
                        [(":path", "", "/v1/x"), ("x-old", "text", ""), ("empty", "", "")]
                    {
                        map.message(1, |header| {
                            header.bytes(1, name.as_bytes());
                            header.bytes(2, value.as_bytes());
                            header.bytes(3, raw.as_bytes());
                        });
                    }
                });
                head.number(3, 1);
            });
        });
        let received = Received::read(&message).expect("a part");
        let Part::RequestHead(head) = received.part else { panic!("{received:?}") };
        let fields: Vec<_> = head.fields().collect();
        let expect: [(&[u8], &[u8]); 3] = [(b":path", b"/v1/x"), (b"x-old", b"text"), (b"empty", b"")];
        assert_eq!(fields, expect);
        assert!(head.is_all);
        let modes = BodyModes { request: BodyMode::FullDuplexStreamed, response: BodyMode::None };
        assert_eq!(received.body_modes(), Some(modes));
        let hint = |key| received.metadata("envoy.lb.subset_hint", key);
        assert_eq!(hint("list"), Some(Value::List(vec!["10.0.0.1:80", "10.0.0.2"])));
        assert_eq!(hint("text"), Some(Value::Text("10.0.0.1:80,10.0.0.2")));
        assert_eq!(hint("empty"), Some(Value::List(vec![])));
        assert_eq!((hint("number"), hint("none"), received.metadata("envoy.lb", "list")), (None, None, None));
        assert_eq!(received.attribute("upstream.address"), Some(Value::Text("10.0.0.2:80")));
    }

    #[test]
    fn a_piece_says_whether_it_is_the_last() {
        for (last, only) in [(false, false), (true, false), (false, true)] {
            let message = request(|message| {
                message.message(5, |body| {
                    body.bytes(1, b"data");
                    body.number(2, last.into());
                    body.number(3, only.into());
                });
            });
            let Some(Received { part: Part::ResponseBody(piece), .. }) = Received::read(&message) else {
                panic!("no piece")
            };
            assert_eq!((piece.bytes, piece.is_last), (&b"data"[..], last || only));
        }
        assert!(Received::read(b"").is_none());
        assert!(Received::read(&[0xff; 9]).is_none());
    }
}
