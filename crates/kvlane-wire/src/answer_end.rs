//! How an answer ended, in the words of each API.
//!
//! OpenAI's completions have `finish_reason`, Anthropic's messages `stop_reason`, OpenAI's responses items of the type
//! `function_call`. Answers are searched, not parsed; inside a JSON string every quote is escaped, so `"finish_reason":`
//! can only be a key.

use std::sync::LazyLock;

use kvlane_core::request::AnswerEnd;
use memchr::memmem::Finder;

static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));
static STOP: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"stop_reason\""));
static CALL: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"function_call\""));

/// How a JSON answer ended, searched in `bytes`: the whole answer or its tail.
pub fn end_in_json(bytes: &[u8]) -> AnswerEnd {
    match end_in_chunk(bytes) {
        // vLLM has both keys in a completion, of which the first one counts.
        AnswerEnd::Unknown if FINISH.find(bytes).is_none() => end_in_message(bytes),
        end => end,
    }
}

/// How a completion ended, by a chunk of it.
pub(crate) fn end_in_chunk(bytes: &[u8]) -> AnswerEnd {
    reason(&FINISH, bytes)
}

/// How an Anthropic message ended, by an event of it.
pub(crate) fn end_in_message(bytes: &[u8]) -> AnswerEnd {
    reason(&STOP, bytes)
}

/// How an OpenAI response ended, by its last event.
pub(crate) fn end_in_response(bytes: &[u8]) -> AnswerEnd {
    if CALL.find(bytes).is_some() { AnswerEnd::ToolCalls } else { AnswerEnd::Complete }
}

/// What the last value of this key says.
fn reason(key: &Finder<'_>, bytes: &[u8]) -> AnswerEnd {
    let mut end = AnswerEnd::Unknown;
    let mut rest = bytes;
    while let Some(at) = key.find(rest) {
        rest = &rest[at + key.needle().len()..];
        let value = rest.trim_ascii_start().strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        let Some(word) = value.and_then(|value| value.strip_prefix(b"\"")) else { continue };
        let calls = [&b"tool_calls\""[..], b"tool_use\"", b"function_call\""];
        let is_call = calls.iter().any(|call| word.starts_with(call));
        end = if is_call { AnswerEnd::ToolCalls } else { AnswerEnd::Complete };
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sse::SseScanner;

    #[test]
    fn an_answer_says_whether_it_calls_tools() {
        for (answer, expect) in [
            (
                r#"{"choices":[{"message":{"content":null},"finish_reason":"tool_calls","stop_reason":null}]}"#,
                AnswerEnd::ToolCalls,
            ),
            (r#"{"choices":[{"message":{"content":"x"}, "finish_reason": "stop"}]}"#, AnswerEnd::Complete),
            (r#"{"choices":[{"finish_reason":"function_call"}]}"#, AnswerEnd::ToolCalls),
            (r#"{"choices":[{"finish_reason":"length"}]}"#, AnswerEnd::Complete),
            (r#"{"choices":[{"finish_reason":null,"stop_reason":"END"}]}"#, AnswerEnd::Unknown),
            (
                r#"{"content":[{"type":"tool_use"}],"stop_reason":"tool_use","usage":{}}"#,
                AnswerEnd::ToolCalls,
            ),
            (r#"{"content":[],"stop_reason":"end_turn"}"#, AnswerEnd::Complete),
            (r#"{"content":"\"finish_reason\":\"tool_calls\""}"#, AnswerEnd::Unknown),
            (r#"{"data":[]}"#, AnswerEnd::Unknown),
        ] {
            assert_eq!(end_in_json(answer.as_bytes()), expect, "{answer}");
        }
    }

    #[test]
    fn a_stream_says_so_in_one_of_its_last_events() {
        for (stream, expect) in [
            (
                "data: {\"choices\":[{\"delta\":{},\"finish_reason\":null}]}\n\n\
                 data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n\
                 data: {\"choices\":[],\"usage\":{}}\n\ndata: [DONE]\n\n",
                AnswerEnd::ToolCalls,
            ),
            ("data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n", AnswerEnd::Complete),
            (
                "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"tool_use\"}}\n\n\
                 event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
                AnswerEnd::ToolCalls,
            ),
            (
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[{\"type\":\"function_call\"}]}}\n\n",
                AnswerEnd::ToolCalls,
            ),
            (
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[{\"type\":\"message\"}]}}\n\n",
                AnswerEnd::Complete,
            ),
        ] {
            let mut scanner = SseScanner::new().reading_end();
            scanner.push(stream.as_bytes());
            assert_eq!(scanner.answer_end(), expect, "{stream}");
            let mut other = SseScanner::new();
            other.push(stream.as_bytes());
            assert_eq!(other.answer_end(), AnswerEnd::Unknown, "not read unless asked for");
        }
    }
}
