//! OpenTelemetry spans in OTLP 1.x: encodes an `ExportTraceServiceRequest` in protobuf.
//!
//! Field numbers are those of opentelemetry-proto, `opentelemetry/proto/{trace,common,resource}/v1`. Only the seven
//! messages needed here are implemented, instead of a dependency on a library.

use std::borrow::Cow;

use crate::protobuf::{Field, Message, fields};
use crate::trace_context::{SpanId, TraceId};

/// The path that spans are sent to.
pub const TRACES_PATH: &str = "/v1/traces";
/// The content type of the request.
pub const CONTENT_TYPE: &str = "application/x-protobuf";

/// One span.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Its trace.
    pub trace: TraceId,
    /// Its id within the trace.
    pub id: SpanId,
    /// Its parent, if it has one.
    pub parent: Option<SpanId>,
    /// Whether the parent is in another process.
    pub parent_is_remote: bool,
    /// Flags of the trace context.
    pub flags: u8,
    /// The `tracestate` received with the request.
    pub trace_state: String,
    /// Name of the operation.
    pub name: Cow<'static, str>,
    /// Its kind.
    pub kind: SpanKind,
    /// Start time, in nanoseconds since 1970 (Unix time).
    pub start: u64,
    /// End time.
    pub end: u64,
    /// Its attributes.
    pub attributes: Vec<(&'static str, Value)>,
    /// Error description; empty if the error needs none.
    pub error: Option<Cow<'static, str>>,
}

/// Kinds of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// An operation within the process.
    Internal = 1,
    /// Handling of an incoming request.
    Server = 2,
    /// An outgoing request.
    Client = 3,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    Text(Cow<'static, str>),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A boolean.
    Bool(bool),
}

/// The service that emits the spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource<'a> {
    /// `service.name`.
    pub service_name: &'a str,
    /// `service.version`.
    pub service_version: &'a str,
    /// `service.instance.id`.
    pub service_instance: &'a str,
}

/// Encodes the export request for these spans.
pub fn encode(resource: &Resource<'_>, spans: &[Span]) -> Vec<u8> {
    let described = [
        ("service.name", resource.service_name),
        ("service.version", resource.service_version),
        ("service.instance.id", resource.service_instance),
    ];
    let mut out = Message::default();
    out.message(1, |resource_spans| {
        resource_spans.message(1, |of| {
            for (key, value) in described {
                of.message(1, |attribute| attribute.key_value(key, &Value::Text(value.to_owned().into())));
            }
        });
        resource_spans.message(2, |scope_spans| {
            scope_spans.message(1, |scope| {
                scope.bytes(1, b"kvlane");
                scope.bytes(2, resource.service_version.as_bytes());
            });
            for span in spans {
                scope_spans.message(2, |of| of.span(span));
            }
        });
    });
    out.0
}

/// Number of spans that a collector's answer rejects, and its reason.
pub fn rejected(answer: &[u8]) -> (u64, String) {
    let (mut spans, mut why) = (0, String::new());
    for (_, partial) in fields(answer).filter(|(number, _)| *number == 1) {
        let Field::Bytes(partial) = partial else { continue };
        for field in fields(partial) {
            match field {
                (1, Field::Number(number)) => spans = number,
                (2, Field::Bytes(text)) => why = String::from_utf8_lossy(text).into_owned(),
                _ => {}
            }
        }
    }
    (spans, why)
}

/// Messages of OpenTelemetry.
trait Telemetry {
    fn key_value(&mut self, key: &str, value: &Value);
    fn span(&mut self, span: &Span);
}

impl Telemetry for Message {
    fn key_value(&mut self, key: &str, value: &Value) {
        self.bytes(1, key.as_bytes());
        self.message(2, |any| match value {
            Value::Text(text) => any.bytes(1, text.as_bytes()),
            Value::Bool(is) => any.number(2, u64::from(*is)),
            // Protobuf encodes negative numbers in two's complement.
            Value::Int(number) => any.number(3, *number as u64),
            Value::Float(number) => any.fixed64(4, number.to_bits()),
        });
    }

    fn span(&mut self, span: &Span) {
        self.bytes(1, &span.trace.0.to_be_bytes());
        self.bytes(2, &span.id.0.to_be_bytes());
        if !span.trace_state.is_empty() {
            self.bytes(3, span.trace_state.as_bytes());
        }
        if let Some(parent) = span.parent {
            self.bytes(4, &parent.0.to_be_bytes());
        }
        self.bytes(5, span.name.as_bytes());
        self.number(6, span.kind as u64);
        self.fixed64(7, span.start);
        self.fixed64(8, span.end);
        for (key, value) in &span.attributes {
            self.message(9, |attribute| attribute.key_value(key, value));
        }
        if let Some(error) = &span.error {
            self.message(15, |status| {
                if !error.is_empty() {
                    status.bytes(2, error.as_bytes());
                }
                status.number(3, STATUS_ERROR);
            });
        }
        let remote = if span.parent_is_remote { PARENT_KNOWN | PARENT_REMOTE } else { PARENT_KNOWN };
        self.fixed32(16, u32::from(span.flags) | remote);
    }
}

const STATUS_ERROR: u64 = 2;
/// Flag: it is known whether the parent is in another process.
const PARENT_KNOWN: u32 = 0x100;
/// Flag: the parent is in another process.
const PARENT_REMOTE: u32 = 0x200;

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Int(number.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span() -> Span {
        Span {
            trace: TraceId(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736),
            id: SpanId(0x00f0_67aa_0ba9_02b7),
            parent: Some(SpanId(7)),
            parent_is_remote: true,
            flags: 1,
            trace_state: "a=1".into(),
            name: "chat m".into(),
            kind: SpanKind::Client,
            start: 1_000,
            end: 2_000,
            attributes: vec![("n", Value::Int(-1)), ("x", Value::Float(0.5)), ("b", Value::Bool(true))],
            error: Some("broken".into()),
        }
    }

    /// All fields with this number.
    fn inner<'a>(message: &'a [u8], number: u64) -> Vec<Field<'a>> {
        fields(message).filter(|(n, _)| *n == number).map(|(_, field)| field).collect()
    }

    fn message<'a>(message: &'a [u8], path: &[u64]) -> &'a [u8] {
        path.iter().fold(message, |message, &number| match &inner(message, number)[..] {
            [Field::Bytes(bytes), ..] => bytes,
            other => panic!("field {number}: {other:?}"),
        })
    }

    #[test]
    fn a_span_is_where_the_protocol_has_it() {
        let resource = Resource { service_name: "gate", service_version: "1", service_instance: "i" };
        let body = encode(&resource, &[span(), Span { error: None, parent: None, ..span() }]);
        assert_eq!(message(&body, &[1, 1, 1, 1]), b"service.name");
        assert_eq!(message(&body, &[1, 1, 1, 2, 1]), b"gate");
        assert_eq!(message(&body, &[1, 2, 1, 1]), b"kvlane");
        assert_eq!(inner(message(&body, &[1, 2]), 2).len(), 2, "both spans");
        let first = message(&body, &[1, 2, 2]);
        assert_eq!(message(first, &[1])[..4], [0x4b, 0xf9, 0x2f, 0x35]);
        assert_eq!(message(first, &[2])[..4], [0x00, 0xf0, 0x67, 0xaa]);
        assert_eq!(
            (message(first, &[3]), message(first, &[4])),
            (&b"a=1"[..], &[0, 0, 0, 0, 0, 0, 0, 7][..])
        );
        assert_eq!(message(first, &[5]), b"chat m");
        let numbers = [6, 7, 8, 16].map(|number| inner(first, number).pop());
        assert_eq!(numbers, [3, 1_000, 2_000, 0x301].map(|number| Some(Field::Number(number))));
        assert_eq!(inner(first, 9).len(), 3);
        assert_eq!(inner(message(first, &[9, 2]), 3), [Field::Number(u64::MAX)], "-1");
        assert_eq!(
            (message(first, &[15, 2]), inner(message(first, &[15]), 3)),
            (&b"broken"[..], vec![Field::Number(2)])
        );
    }

    #[test]
    fn what_a_collector_did_not_take_is_read() {
        // partial_success { rejected_spans: 300, error_message: "no" }
        let answer = [10, 7, 8, 0xac, 2, 18, 2, b'n', b'o'];
        assert_eq!(rejected(&answer), (300, "no".into()));
        assert_eq!(rejected(b""), (0, String::new()));
    }

    proptest! {
        #[test]
        fn whatever_a_collector_answers_nothing_panics(answer in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = rejected(&answer);
        }

        #[test]
        fn numbers_are_read_as_they_were_written(number in any::<u64>()) {
            let mut message = Message::default();
            message.number(3, number);
            prop_assert_eq!(fields(&message.0).collect::<Vec<_>>(), vec![(3, Field::Number(number))]);
        }
    }
}
