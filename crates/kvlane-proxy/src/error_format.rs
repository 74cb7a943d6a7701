//! Error formats of the APIs: a body, or the last event of a stream.

use bytes::Bytes;
use http::StatusCode;
use http::request::Parts;
use kvlane_http::address::Protocol;
use serde_json::{Value, json};

use crate::grpc::{is_call, protocol_of};

/// The API of a client, as far as error formats differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// OpenAI's `{"error": {…}}`; used for the engines' own APIs, too.
    OpenAi,
    /// The same, but typed events in streams.
    Responses,
    /// Anthropic's `{"type": "error", "error": {…}}`.
    Anthropic,
    /// gRPC's status and message, in trailers.
    Grpc,
}

// === impl ErrorFormat ===

impl ErrorFormat {
    /// The format for a request.
    pub(super) fn of_request(parts: &Parts) -> Self {
        let path = parts.uri.path();
        match protocol_of(path) {
            Protocol::Grpc if is_call(parts) => Self::Grpc,
            _ => Self::of(path),
        }
    }

    /// The format for `path` of HTTP.
    pub fn of(path: &str) -> Self {
        let below =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if below("/v1/messages") {
            Self::Anthropic
        } else if below("/v1/responses") {
            Self::Responses
        } else {
            Self::OpenAi
        }
    }

    /// The body of an error. `kind` is OpenAI's `type`; Anthropic's follows from the status. Anthropic errors have no
    /// code; clients ignore ours.
    pub(super) fn envelope(self, status: StatusCode, kind: &str, code: &str, message: &str) -> Value {
        match self {
            Self::OpenAi | Self::Responses | Self::Grpc => {
                json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
            }
            Self::Anthropic => {
                let kind = anthropic_type(status);
                json!({"type": "error", "error": {"type": kind, "message": message, "code": code}})
            }
        }
    }

    /// The event that ends a broken stream of events after `events` others. No `[DONE]` and no `message_stop` follow it: the
    /// answer is not complete.
    pub(super) fn last_event(self, events: u64, code: &str, message: &str) -> Bytes {
        let status = StatusCode::BAD_GATEWAY;
        let event = match self {
            Self::OpenAi | Self::Grpc => {
                format!("data: {}\n\n", self.envelope(status, "api_error", code, message))
            }
            Self::Anthropic => {
                format!("event: error\ndata: {}\n\n", self.envelope(status, "api_error", code, message))
            }
            // Its events are numbered from 0.
            Self::Responses => {
                let event = json!({"type": "error", "code": code, "message": message, "param": null,
                    "sequence_number": events});
                format!("event: error\ndata: {event}\n\n")
            }
        };
        event.into()
    }
}

/// Anthropic's `type` of an error, by the status it comes with (<https://docs.anthropic.com/en/api/errors>).
pub fn anthropic_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_determines_the_error_format() {
        for (path, error_format) in [
            ("/v1/messages", ErrorFormat::Anthropic),
            ("/v1/messages/count_tokens", ErrorFormat::Anthropic),
            ("/v1/messages_of_others", ErrorFormat::OpenAi),
            ("/v1/responses", ErrorFormat::Responses),
            ("/v1/chat/completions", ErrorFormat::OpenAi),
            ("/generate", ErrorFormat::OpenAi),
            ("", ErrorFormat::OpenAi),
        ] {
            assert_eq!(ErrorFormat::of(path), error_format, "{path}");
        }
    }

    #[test]
    fn a_broken_stream_ends_in_one_error_event_of_its_api() {
        let last = |error_format: ErrorFormat| {
            let event =
                String::from_utf8(error_format.last_event(7, "stream_broken", "it broke \"so\"\n").to_vec());
            let event = event.expect("text");
            assert!(event.ends_with("\n\n") && event.trim_end().lines().count() <= 2, "one event: {event:?}");
            let (name, data) = event.split_once("data: ").expect("data");
            (name.to_owned(), serde_json::from_str::<Value>(data).expect("JSON"))
        };
        let error = json!({"message": "it broke \"so\"\n", "type": "api_error", "param": null, "code": "stream_broken"});
        assert_eq!(last(ErrorFormat::OpenAi), (String::new(), json!({"error": error})));
        let error = json!({"type": "api_error", "message": "it broke \"so\"\n", "code": "stream_broken"});
        assert_eq!(
            last(ErrorFormat::Anthropic),
            ("event: error\n".into(), json!({"type": "error", "error": error}))
        );
        let (name, event) = last(ErrorFormat::Responses);
        assert_eq!(
            (name.as_str(), &event["type"], &event["sequence_number"]),
            ("event: error\n", &json!("error"), &json!(7))
        );
    }
}
