//! Classifies an engine's error by its text: caused by the client, by the engine, or unknown.
//!
//! Engines report a dead core in the same form as a bad request: status 500, or an event
//! `{"error": …}` in a stream whose head was 200. The `code` or `type` in it distinguishes them, and a few sentences
//! that only a server with a dead engine sends.

use memchr::memmem;

use crate::engine::ENGINES;
use crate::sse::{Edge, event_end, name_and_data};

/// Bytes of an error that are examined.
pub const ERROR_BYTES_MAX: usize = 4096;

/// The cause of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client's request: another engine would answer the same.
    Client,
    /// Unknown.
    Unknown,
    /// The engine: it is dead or dying.
    Engine,
}

/// Texts of any server with a dead engine, in lower case.
const DEVICE_IS_GONE: [&str; 2] = ["cuda error", "cuda out of memory"];

/// Error types caused by the client.
const CLIENTS: [&str; 9] = [
    "badrequest",
    "bad_request",
    "invalid_request",
    "notfound",
    "not_found",
    "authentication",
    "permission",
    "too_large",
    "unprocessable",
];

/// Classifies an error by its JSON or text.
pub fn fault(error: &[u8]) -> Fault {
    let error = error[..error.len().min(ERROR_BYTES_MAX)].to_ascii_lowercase();
    let has = |words: &str| memmem::find(&error, words.as_bytes()).is_some();
    if ENGINES.iter().flat_map(|engine| engine.dead).copied().chain(DEVICE_IS_GONE).any(has) {
        return Fault::Engine;
    }
    let value = |key: &str| {
        let after = memmem::find(&error, key.as_bytes())? + key.len();
        error[after..].trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start)
    };
    let is_4xx = |value: &[u8]| {
        let value = value.strip_prefix(b"\"").unwrap_or(value);
        value.first() == Some(&b'4')
            && value.get(1..3).is_some_and(|rest| rest.iter().all(u8::is_ascii_digit))
    };
    let kind = |value: &[u8]| {
        let value = &value[..value.len().min(64)];
        CLIENTS.into_iter().any(|kind| memmem::find(value, kind.as_bytes()).is_some())
    };
    let says = |key, test: &dyn Fn(&[u8]) -> bool| value(key).is_some_and(test);
    // Anthropic's envelope has `"type": "error"` before the error's own type.
    let inner = memmem::rfind(&error, b"\"type\"").map(|at| &error[at + b"\"type\"".len()..]);
    if says("\"code\"", &is_4xx) || says("\"type\"", &kind) || inner.is_some_and(kind) {
        return Fault::Client;
    }
    Fault::Unknown
}

/// The first error among the events at the start of `bytes`: the offset of its event, and its data.
pub fn first_error(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut at = 0;
    while at < bytes.len() {
        let end = event_end(Edge::Line, &bytes[at..]).map_or(bytes.len(), |length| at + length);
        if let Some((name, data)) = name_and_data(&bytes[at..end]) {
            let named = matches!(name, b"error" | b"response.failed");
            if named || data.starts_with(b"{\"error\"") || data.starts_with(b"{\"type\":\"error\"") {
                return Some((at, data));
            }
        }
        at = end;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_engines_say_when_their_core_is_gone_is_their_fault() {
        for error in [
            r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#,
            r#"{"type":"error","error":{"type":"InternalServerError","message":"EngineCore encountered an issue."}}"#,
            r#"{"error": {"message": "CUDA error: an illegal memory access was encountered", "code": 500}}"#,
            r#"{"type":"error","error":{"type":"internal_error","message":"2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, input_value={'error': {'message': 'En...am': None, 'code': 500}}, input_type=dict]"}}"#,
        ] {
            assert_eq!(fault(error.as_bytes()), Fault::Engine, "{error}");
        }
    }

    #[test]
    fn a_bad_request_is_its_clients_fault() {
        for error in [
            r#"{"error":{"message":"max_tokens is too large","type":"BadRequestError","param":null,"code":400}}"#,
            r#"{"error": {"message": "no such LoRA", "type": "NotFoundError", "code": 404}}"#,
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"x"}}"#,
            r#"{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}"#,
        ] {
            assert_eq!(fault(error.as_bytes()), Fault::Client, "{error}");
        }
    }

    #[test]
    fn what_says_nothing_is_not_known() {
        for error in
            ["", "Internal Server Error", r#"{"error":{"message":"4 tokens","code":500}}"#, r#"{"code":"#]
        {
            assert_eq!(fault(error.as_bytes()), Fault::Unknown, "{error}");
        }
    }

    #[test]
    fn the_first_error_of_a_stream_is_found_between_its_events() {
        let chunk = "data: {\"choices\":[{\"delta\":{\"content\":\"{\\\"error\\\"\"}}]}\n\n";
        let error = "data: {\"error\": {\"code\": 500}}\n\n";
        let stream = format!("{chunk}{error}data: [DONE]\n\n");
        let found = first_error(stream.as_bytes()).map(|(at, data)| (at, data.starts_with(b"{\"error\"")));
        assert_eq!(found, Some((chunk.len(), true)));
        assert_eq!(first_error(chunk.as_bytes()), None);
        let named = "event: error\ndata: {\"type\":\"error\"}\n\n";
        assert_eq!(first_error(named.as_bytes()).map(|(at, _)| at), Some(0));
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_fault_and_are_searched_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            fault(&bytes);
            if let Some((at, data)) = first_error(&bytes) {
                prop_assert!(at + data.len() <= bytes.len());
            }
        }
    }
}
