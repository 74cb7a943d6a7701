//! Answers of each API: whole, and as events of a stream.
//!
//! Shapes are vLLM's in every field that clients read. An answer always has the given length, so chats and
//! completions end with the reason `length`, messages with `max_tokens`.

use serde_json::{Value, json};

use crate::driver::Progress;
use crate::error::ApiError;
use crate::tokens;

/// The API of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Shape {
    /// OpenAI `/v1/chat/completions`.
    Chat,
    /// OpenAI `/v1/completions`.
    Completion,
    /// Anthropic `/v1/messages`.
    Messages,
    /// OpenAI `/v1/responses`.
    Responses,
}

/// Metadata of an answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) shape: Shape,
    /// The engine's number of the request.
    pub(crate) number: u64,
    /// The model as the client named it.
    pub(crate) model: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Seed of the words.
    pub(crate) key: u64,
    /// Cached tokens that it reports instead of its own.
    pub(crate) cached_tokens: Option<u32>,
    /// Whether a stream of chunks ends with its usage. Messages and responses always report it.
    pub(crate) include_usage: bool,
}

/// The parts of a token's event around its text.
#[derive(Clone, Debug)]
pub(crate) struct TokenEvent {
    pub(crate) head: String,
    pub(crate) tail: &'static str,
    /// The tail of the last token.
    pub(crate) last_tail: &'static str,
    /// In APIs with numbered events, the first token's number; it follows the tail, and [`NUMBERED_END`] follows it.
    pub(crate) first_number: Option<u32>,
}

/// End of an event whose last field is its number.
pub(crate) const NUMBERED_END: &str = "}\n\n";

/// Events of a response before its first token.
const RESPONSE_OPENING_EVENTS: u32 = 4;

const DONE: &str = "data: [DONE]\n\n";

/// An event with its name, as in Anthropic's messages and OpenAI's responses. `data` has a `type`.
fn named(data: &Value) -> String {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap_or_default())
}

// === impl Shape ===

impl Shape {
    /// The API at this path.
    pub(crate) fn at(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completion,
            "/v1/messages" => Self::Messages,
            "/v1/responses" => Self::Responses,
            _ => return None,
        })
    }
}

// === impl Answer ===

impl Answer {
    fn id(&self) -> String {
        let prefix = match self.shape {
            Shape::Chat => "chatcmpl-",
            Shape::Completion => "cmpl-",
            Shape::Messages => "msg_",
            Shape::Responses => "resp_",
        };
        format!("{prefix}{:016x}{:x}", self.key, self.number)
    }

    /// The seed of its words; a wrong answer has others.
    pub(crate) fn words(&self, wrong: bool) -> u64 {
        if wrong { !self.key } else { self.key }
    }

    fn usage(&self, progress: Progress) -> Value {
        let (prompt, output) = (self.prompt_tokens, progress.produced);
        let cached = self.cached_tokens.unwrap_or(progress.cached);
        let total = prompt.saturating_add(output);
        match self.shape {
            Shape::Chat | Shape::Completion => json!({
                "prompt_tokens": prompt,
                "total_tokens": total,
                "completion_tokens": output,
                "prompt_tokens_details": {"cached_tokens": cached},
            }),
            // Anthropic counts cached tokens separately.
            Shape::Messages => json!({
                "input_tokens": prompt.saturating_sub(cached),
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": output,
            }),
            Shape::Responses => json!({
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": total,
            }),
        }
    }

    /// The answer in one piece.
    pub(crate) fn whole(&self, progress: Progress) -> Value {
        let text = tokens::answer(self.words(progress.wrong), progress.produced);
        let choices = |object: &str, name: &str, value: Value| {
            let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": "length"});
            choice[name] = value;
            json!({
                "id": self.id(),
                "object": object,
                "created": self.created,
                "model": self.model,
                "choices": [choice],
                "usage": self.usage(progress),
            })
        };
        match self.shape {
            Shape::Chat => {
                choices("chat.completion", "message", json!({"role": "assistant", "content": text}))
            }
            Shape::Completion => choices("text_completion", "text", Value::String(text)),
            Shape::Messages => {
                self.message(&[json!({"type": "text", "text": text})], "max_tokens".into(), progress)
            }
            Shape::Responses => self.response("completed", &[self.output_item("completed", &text)], progress),
        }
    }

    /// The part of a stream before its first token.
    pub(crate) fn opening(&self, progress: Progress) -> String {
        match self.shape {
            Shape::Chat => {
                let envelope = self.envelope();
                let delta = r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}"#;
                format!("{envelope}{delta}]}}\n\n")
            }
            Shape::Completion => String::new(),
            Shape::Messages => {
                let message = self.message(&[], Value::Null, Progress { produced: 0, ..progress });
                let block = json!({"type": "text", "text": ""});
                named(&json!({"type": "message_start", "message": message}))
                    + &named(&json!({"type": "content_block_start", "index": 0, "content_block": block}))
            }
            Shape::Responses => {
                let mut response = self.response("in_progress", &[], progress);
                response["usage"] = Value::Null;
                let mut item = self.output_item("in_progress", "");
                item["content"] = json!([]);
                let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
                [
                    json!({"type": "response.created", "sequence_number": 0, "response": response}),
                    json!({"type": "response.in_progress", "sequence_number": 1, "response": response}),
                    json!({"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": item}),
                    json!({
                        "type": "response.content_part.added", "sequence_number": 3, "item_id": item["id"],
                        "output_index": 0, "content_index": 0, "part": part,
                    }),
                ]
                .iter()
                .map(named)
                .collect()
            }
        }
    }

    /// The event of one token.
    pub(crate) fn token_event(&self) -> TokenEvent {
        let (head, tail, last_tail) = match self.shape {
            Shape::Chat => (
                format!(r#"{}{{"index":0,"delta":{{"content":""#, self.envelope()),
                "\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                "\"},\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n",
            ),
            Shape::Completion => (
                format!(r#"{}{{"index":0,"text":""#, self.envelope()),
                "\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                "\",\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n",
            ),
            Shape::Messages => {
                let head = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
                    \"delta\":{\"type\":\"text_delta\",\"text\":\"";
                (head.to_owned(), "\"}}\n\n", "\"}}\n\n")
            }
            Shape::Responses => {
                let head = format!(
                    "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"item_id\":\"{}\",\
                     \"output_index\":0,\"content_index\":0,\"logprobs\":[],\"delta\":\"",
                    self.item_id()
                );
                (head, "\",\"sequence_number\":", "\",\"sequence_number\":")
            }
        };
        let first_number = (self.shape == Shape::Responses).then_some(RESPONSE_OPENING_EVENTS);
        TokenEvent { head, tail, last_tail, first_number }
    }

    /// The part of a stream after its last token.
    pub(crate) fn closing(&self, progress: Progress) -> String {
        match self.shape {
            Shape::Chat | Shape::Completion if self.include_usage => {
                format!("{}],\"usage\":{}}}\n\n{DONE}", self.envelope(), self.usage(progress))
            }
            Shape::Chat | Shape::Completion => DONE.into(),
            Shape::Messages => {
                let delta = json!({"stop_reason": "max_tokens", "stop_sequence": null});
                [
                    json!({"type": "content_block_stop", "index": 0}),
                    json!({"type": "message_delta", "delta": delta, "usage": self.usage(progress)}),
                    json!({"type": "message_stop"}),
                ]
                .iter()
                .map(named)
                .collect()
            }
            Shape::Responses => {
                let text = tokens::answer(self.words(progress.wrong), progress.produced);
                let item = self.output_item("completed", &text);
                let response = self.response("completed", &[self.output_item("completed", &text)], progress);
                let at = |after: u32| {
                    RESPONSE_OPENING_EVENTS.saturating_add(progress.produced).saturating_add(after)
                };
                [
                    json!({
                        "type": "response.output_text.done", "sequence_number": at(0), "item_id": item["id"],
                        "output_index": 0, "content_index": 0, "text": text, "logprobs": [],
                    }),
                    json!({
                        "type": "response.content_part.done", "sequence_number": at(1), "item_id": item["id"],
                        "output_index": 0, "content_index": 0, "part": item["content"][0],
                    }),
                    json!({"type": "response.output_item.done", "sequence_number": at(2), "output_index": 0, "item": item}),
                    json!({"type": "response.completed", "sequence_number": at(3), "response": response}),
                ]
                .iter()
                .map(named)
                .collect()
            }
        }
    }

    /// The end of a stream that the engine rejected.
    pub(crate) fn broken(&self, error: &ApiError) -> String {
        let envelope = error.envelope();
        match self.shape {
            Shape::Chat | Shape::Completion => format!("data: {envelope}\n\n{DONE}"),
            Shape::Messages | Shape::Responses => {
                named(&json!({"type": "error", "error": envelope["error"]}))
            }
        }
    }

    /// A chunk up to its choices.
    fn envelope(&self) -> String {
        let object = match self.shape {
            Shape::Completion => "text_completion",
            _ => "chat.completion.chunk",
        };
        let (id, created, model) = (self.id(), self.created, Value::from(self.model.as_str()));
        format!(r#"data: {{"id":"{id}","object":"{object}","created":{created},"model":{model},"choices":["#)
    }

    fn message(&self, content: &[Value], stop_reason: Value, progress: Progress) -> Value {
        json!({
            "id": self.id(),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": null,
            "usage": self.usage(progress),
        })
    }

    fn response(&self, status: &str, output: &[Value], progress: Progress) -> Value {
        json!({
            "id": self.id(),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": output,
            "usage": self.usage(progress),
        })
    }

    fn item_id(&self) -> String {
        format!("msg_{:016x}{:x}", self.key, self.number)
    }

    fn output_item(&self, status: &str, text: &str) -> Value {
        json!({
            "id": self.item_id(),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        })
    }
}

#[cfg(test)]
mod tests {
    use kvlane_wire::sse::{SseScanner, Usage, usage_in_json};

    use super::*;

    const SHAPES: [Shape; 4] = [Shape::Chat, Shape::Completion, Shape::Messages, Shape::Responses];

    fn answer(shape: Shape) -> Answer {
        Answer {
            shape,
            number: 3,
            model: "a \"quoted\" name".into(),
            created: 1,
            prompt_tokens: 100,
            output_tokens: 5,
            key: 7,
            cached_tokens: None,
            include_usage: true,
        }
    }

    /// The data of every event but `[DONE]`, parsed.
    fn data(stream: &str) -> Vec<Value> {
        assert!(stream.is_empty() || stream.ends_with("\n\n"), "{stream}");
        let data =
            stream.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}")))
            .collect()
    }

    #[test]
    fn every_event_of_every_shape_is_json_named_by_its_type() {
        let progress = Progress { produced: 5, cached: 48, ..Progress::default() };
        for shape in SHAPES {
            let answer = answer(shape);
            for stream in [answer.opening(progress), answer.closing(progress)] {
                let events = data(&stream);
                let names: Vec<&str> =
                    stream.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
                match shape {
                    Shape::Chat | Shape::Completion => {
                        assert!(names.is_empty());
                        assert!(
                            events.iter().all(|event| event["model"] == answer.model.as_str()),
                            "{stream}"
                        );
                    }
                    _ => assert_eq!(events.iter().map(|event| &event["type"]).collect::<Vec<_>>(), names),
                }
            }
        }
    }

    #[test]
    fn usage_says_the_same_in_every_shape_whole_or_streamed() {
        let progress = Progress { produced: 5, cached: 48, ..Progress::default() };
        let expected = Usage { prompt_tokens: 100, completion_tokens: 5, cached_tokens: Some(48) };
        for shape in SHAPES {
            let answer = answer(shape);
            assert_eq!(
                usage_in_json(answer.whole(progress).to_string().as_bytes()),
                Some(expected),
                "{shape:?}"
            );
            let mut scanner = SseScanner::new();
            scanner.push(answer.opening(progress).as_bytes());
            scanner.push(answer.closing(progress).as_bytes());
            assert_eq!((scanner.usage(), scanner.is_done()), (Some(expected), true), "{shape:?}");
        }
    }

    #[test]
    fn a_response_numbers_its_events_without_gaps() {
        let answer = answer(Shape::Responses);
        let progress = Progress { produced: 5, ..Progress::default() };
        let numbers = |stream: &str| -> Vec<u64> {
            data(stream).iter().map(|event| event["sequence_number"].as_u64().expect("numbered")).collect()
        };
        assert_eq!(numbers(&answer.opening(progress)), [0, 1, 2, 3]);
        assert_eq!(answer.token_event().first_number, Some(4));
        assert_eq!(numbers(&answer.closing(progress)), [9, 10, 11, 12]);
    }
}
