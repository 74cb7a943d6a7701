//! Property: a stream that breaks at any point and is resumed reads like one that did not break. A miniature engine
//! with greedy decoding answers the transcript's requests.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const MEANS: EngineCapabilities =
    EngineCapabilities { continues_messages: true, context_tokens: Some(10_000) };
const ROOM: usize = 1 << 20;

/// An engine whose tokens are bytes, and whose next token depends on all tokens before it.
#[derive(Clone, Copy, Debug)]
struct Engine {
    /// Its chat template trims trailing whitespace of messages. (Llama's trims leading whitespace as well: there, an
    /// answer that begins with whitespace continues from a different context, which only token ids could prevent.)
    trims: bool,
    /// Every chunk reports usage.
    counts: bool,
    /// Most tokens per chunk, as with speculative decoding. A character is never split.
    chunk_tokens: usize,
    /// The first chunk with text also has the role, and no chunk precedes it.
    role_with_text: bool,
}

impl Engine {
    fn next(prompt: &[u32]) -> Option<u8> {
        const WORDS: &[u8] = b"abc \n \"\\{\xC3";
        let hash =
            xxhash_rust::xxh3::xxh3_64(&prompt.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        match (prompt.last(), hash % 61) {
            (Some(0xC3), _) => Some(0xA9),
            (_, 0) => None,
            (_, hash) => Some(WORDS[hash as usize % WORDS.len()]),
        }
    }

    /// Its streamed answer to this body.
    fn stream(self, api: Api, body: &[u8], id: &str) -> String {
        let body: Value = serde_json::from_slice(body).expect("the body is JSON");
        let chat = api == Api::ChatCompletions;
        let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let mut context = match &body["prompt"] {
            Value::Array(ids) => ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect(),
            Value::String(text) => bytes(text),
            _ => bytes(&self.template(&body)),
        };
        let prompt = context.clone();
        let limit = body["max_completion_tokens"].as_u64().or(body["max_tokens"].as_u64()).unwrap_or(200);
        let tells_ids = body["return_token_ids"] == true;
        let usage = |written: usize| {
            let (prompt, written) = (prompt.len(), written);
            json!({"prompt_tokens": prompt, "total_tokens": prompt + written, "completion_tokens": written,
                "prompt_tokens_details": {"cached_tokens": prompt - 1}})
        };
        let mut out = String::new();
        let mut send = |mut choice: Value, written: usize, prompt_ids: bool| {
            let object = if chat { "chat.completion.chunk" } else { "text_completion" };
            let mut chunk = json!({"id": id, "object": object, "created": id.len(), "model": "m"});
            if prompt_ids && tells_ids {
                let of = if chat { &mut chunk } else { &mut choice };
                of["prompt_token_ids"] = json!(prompt);
            }
            chunk["choices"] = json!([choice]);
            if self.counts {
                chunk["usage"] = usage(written);
            }
            out += &format!("data: {chunk}\n\n: ping\n\n");
        };
        if chat && !self.role_with_text {
            let choice =
                json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null});
            send(choice, 0, true);
        }
        let (mut text, mut ids, mut half) = (String::new(), Vec::new(), false);
        let mut role_sent = !self.role_with_text;
        for written in 1.. {
            let next = Self::next(&context);
            let id = next.unwrap_or(0).into();
            match next {
                Some(0xA9) if half => text.push('é'),
                Some(byte) if byte.is_ascii() => text.push(char::from(byte)),
                _ => {}
            }
            half = next == Some(0xC3);
            context.push(id);
            ids.push(id);
            let reason = match next {
                None => json!("stop"),
                Some(_) if written == limit as usize => json!("length"),
                Some(_) => Value::Null,
            };
            if ids.len() < self.chunk_tokens && reason.is_null() && Self::next(&context) != Some(0xC3) {
                continue;
            }
            let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": reason});
            let text = std::mem::take(&mut text);
            if chat {
                choice["delta"] = json!({"content": &text});
            } else {
                choice["text"] = text.as_str().into();
            }
            let told = std::mem::take(&mut ids);
            let first = written == told.len();
            if chat && !role_sent && !(text.is_empty() && reason.is_null()) {
                role_sent = true;
                choice["delta"] = json!({"role": "assistant", "content": choice["delta"]["content"]});
            }
            if tells_ids {
                choice["token_ids"] = json!(told);
            }
            send(choice, written, first && (!chat || self.role_with_text));
            if !reason.is_null() {
                let usage =
                    json!({"id": id.to_string(), "model": "m", "choices": [], "usage": usage(written)});
                out += &format!("data: {usage}\n\n");
                break;
            }
        }
        out + "data: [DONE]\n\n"
    }

    fn template(self, body: &Value) -> String {
        let messages = body["messages"].as_array().expect("messages");
        let said = |content: &Value| {
            let content = content.as_str().expect("text");
            if self.trims { content.trim_end().to_owned() } else { content.to_owned() }
        };
        let turns = messages.iter().map(|message| {
            format!("<{}>{}</>", message["role"].as_str().expect("a role"), said(&message["content"]))
        });
        let text = turns.collect::<String>();
        if body["continue_final_message"] == true {
            text.strip_suffix("</>").expect("a message").to_owned()
        } else {
            text + "<assistant>"
        }
    }
}

/// A client's view of a stream.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    text: String,
    ids: Vec<Value>,
    prompt_ids: Vec<Value>,
    roles: u32,
    /// Number of different ids, creation times and models.
    heads: usize,
    objects: Vec<Value>,
    reasons: Vec<Value>,
    usage: Value,
    done: u32,
}

impl Heard {
    fn of(stream: &[u8]) -> Self {
        let mut heard = Self::default();
        let mut heads = Vec::new();
        let stream = std::str::from_utf8(stream).expect("text");
        assert!(stream.is_empty() || stream.ends_with("\n\n"), "partial event: {stream:?}");
        for data in stream.split("\n\n").filter_map(|event| event.strip_prefix("data: ")) {
            if data == "[DONE]" {
                heard.done += 1;
                continue;
            }
            assert_eq!(heard.done, 0, "a chunk after the end");
            let chunk: Value = serde_json::from_str(data).expect("a chunk is JSON");
            if let Some(choice) = chunk["choices"].get(0) {
                let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
                heard.text += text.unwrap_or_default();
                heard.roles += u32::from(choice["delta"]["role"] == "assistant");
                heard.prompt_ids.extend(choice["prompt_token_ids"].as_array().into_iter().flatten().cloned());
                heard.ids.extend(choice["token_ids"].as_array().into_iter().flatten().cloned());
                heard.objects.push(chunk["object"].clone());
                heads.push((chunk["id"].clone(), chunk["created"].clone()));
                heard
                    .reasons
                    .extend(Some(choice["finish_reason"].clone()).filter(|reason| !reason.is_null()));
            }
            heard.prompt_ids.extend(chunk["prompt_token_ids"].as_array().into_iter().flatten().cloned());
            if chunk["usage"].is_object() {
                heard.usage = chunk["usage"].clone();
            }
        }
        heads.dedup();
        heard.heads = heads.len();
        heard.objects.dedup();
        heard
    }

    /// Without the cached tokens of the first engine, which are lost when its stream breaks.
    fn without_cached(mut self) -> Self {
        if let Some(usage) = self.usage.as_object_mut() {
            usage.remove("prompt_tokens_details");
        }
        self
    }
}

/// Sends a request to `engine`, breaks its streams at `breaks`, and returns the client's bytes.
fn broken(engine: Engine, api: Api, body: &Value, breaks: &[prop::sample::Index], piece: usize) -> Vec<u8> {
    let body = Bytes::from(body.to_string());
    let mut transcript = Transcript::begin(api, body.clone(), ROOM).expect("the request can be continued");
    let mut client = Vec::new();
    let (mut api, mut body) = (api, body);
    for (number, at) in breaks.iter().map(Some).chain([None]).enumerate() {
        let stream = engine.stream(api, &body, &format!("id-{}", "x".repeat(number)));
        let sent = at.map_or(stream.len(), |at| at.index(stream.len()));
        for bytes in stream.as_bytes()[..sent].chunks(piece) {
            client.extend(
                transcript.pass(Bytes::copy_from_slice(bytes)).expect("the stream continues the first"),
            );
        }
        if at.is_none() {
            client.extend(transcript.end().expect("the stream continues the first"));
            break;
        }
        match transcript.resume(MEANS).expect("it can be resumed") {
            Next::Ask { api: next_api, body: next_body } => (api, body) = (next_api, next_body),
            Next::Close(bytes) => {
                client.extend(bytes);
                break;
            }
        }
    }
    client
}

fn request(chat: bool, ids: bool, limit: u32, text: &str, prefilled: bool) -> (Api, Value) {
    let mut body = json!({"stream": true, "max_tokens": limit, "temperature": 0, "min_tokens": 3, "n": 1});
    if ids {
        body["return_token_ids"] = json!(true);
    }
    if !chat {
        body["prompt"] = json!(text);
        return (Api::Completions, body);
    }
    body["messages"] = json!([{"role": "user", "content": text}]);
    if prefilled {
        let said = json!({"content": "so it \"be", "role": "assistant"});
        body["messages"].as_array_mut().expect("messages").push(said);
        body["continue_final_message"] = json!(true);
        body["add_generation_prompt"] = json!(false);
    }
    (Api::ChatCompletions, body)
}

proptest! {
    /// Invariant: A continued stream reads like an unbroken one, wherever and however often it breaks; an unbroken
    /// stream is relayed byte for byte.
    ///
    /// Also held by `a_stream_that_does_not_break_passes_as_it_is`.
    #[test]
    fn a_stream_that_breaks_reads_like_one_that_does_not(
        chat: bool, ids: bool, prefilled: bool, trims: bool, counts: bool, role_with_text: bool, chunk_tokens in 1_usize..4,
        limit in 1_u32..60, text in ".{1,8}",
        breaks in prop::collection::vec(any::<prop::sample::Index>(), 1..4), piece in 1_usize..300,
    ) {
        // Where neither ids nor usage are reported, a chunk counts as one token, and whitespace tokens of a chat cannot
        // be counted.
        let chunk_tokens = if ids || counts && !chat { chunk_tokens } else { 1 };
        let engine = Engine { trims, counts, chunk_tokens, role_with_text };
        let (api, body) = request(chat, ids, limit, &text, prefilled);
        let whole = Heard::of(engine.stream(api, body.to_string().as_bytes(), "id-").as_bytes());
        let mut heard = Heard::of(&broken(engine, api, &body, &breaks, piece));
        if heard.usage.is_null() {
            // It broke between the last token and the usage.
            heard.usage = whole.usage.clone();
        }
        prop_assert_eq!(heard.without_cached(), whole.without_cached());
    }
}

/// A transcript of a chat or a completion that can be resumed.
fn begin(chat: bool) -> Transcript {
    let (api, body) = request(chat, false, 9, "hi", false);
    Transcript::begin(api, body.to_string().into(), ROOM).expect("it can be continued")
}

fn refused(api: Api, body: &str) -> Unfit {
    Transcript::begin(api, Bytes::copy_from_slice(body.as_bytes()), ROOM).expect_err("it cannot be continued")
}

fn pass(transcript: &mut Transcript, bytes: &str) -> String {
    let passed = transcript.pass(Bytes::copy_from_slice(bytes.as_bytes())).expect("it fits");
    String::from_utf8(passed.into()).expect("text")
}

fn text_chunk(text: &str) -> String {
    format!(
        "data: {}\n\n",
        json!({"id": "1", "created": 1, "model": "m", "choices": [{"index": 0, "text": text}]})
    )
}

fn chat_chunk(delta: Value) -> String {
    format!(
        "data: {}\n\n",
        json!({"id": "1", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta}]})
    )
}

/// The next request of a transcript, as JSON.
fn asks(transcript: &mut Transcript) -> (Api, Value) {
    match transcript.resume(MEANS).expect("it can be resumed") {
        Next::Ask { api, body } => (api, serde_json::from_slice(&body).expect("the body is JSON")),
        Next::Close(bytes) => panic!("nothing is missing: {bytes:?}"),
    }
}

/// Invariant: A stream that a second request cannot continue is not continued; a continuation costs the retry budget
/// what a retry costs; continuation is off by default.
///
/// Also held by `a_second_stream_that_does_not_continue_the_first_is_not_relayed`,
/// `a_continuation_costs_as_much_retry_budget_as_a_retry`, `continuation_is_off_by_default`.
#[test]
fn what_a_second_request_cannot_take_over_is_not_continued() {
    let key = |key: &str| Unfit::Key(key.into());
    for (more, unfit) in [
        (r#""n":2"#, key("n")),
        (r#""best_of":2"#, key("best_of")),
        (r#""logprobs":3"#, key("logprobs")),
        (r#""echo":true"#, key("echo")),
        (r#""suffix":"x""#, key("suffix")),
        (r#""frequency_penalty":0.5"#, key("frequency_penalty")),
        (r#""presence_penalty":-1"#, key("presence_penalty")),
        (r#""response_format":{"type":"json_object"}"#, key("response_format")),
        (r#""response_format":{"type":"text","x":1}"#, key("response_format")),
        (r#""structured_outputs":{"regex":"a"}"#, key("structured_outputs")),
        (r#""guided_json":{"type":"object"}"#, key("guided_json")),
        (r#""truncate_prompt_tokens":8"#, key("truncate_prompt_tokens")),
        (r#""kv_transfer_params":{"do_remote_decode":true}"#, key("kv_transfer_params")),
        (r#""what_nobody_knows":1"#, key("what_nobody_knows")),
        (r#""stream":false"#, Unfit::Kind),
    ] {
        let body = format!(r#"{{"stream":true,"max_tokens":9,"prompt":"a",{more}}}"#);
        assert_eq!(refused(Api::Completions, &body), unfit, "{more}");
    }
    for (more, unfit) in [
        (r#""tool_choice":"required""#, key("tool_choice")),
        (r#""logprobs":true"#, key("logprobs")),
        (r#""add_generation_prompt":false"#, key("add_generation_prompt")),
        (r#""include_reasoning":false"#, key("include_reasoning")),
        (r#""functions":[{"name":"f"}]"#, key("functions")),
    ] {
        let body = format!(r#"{{"stream":true,"messages":[{{"role":"user","content":"a"}}],{more}}}"#);
        assert_eq!(refused(Api::ChatCompletions, &body), unfit, "{more}");
    }
    assert_eq!(refused(Api::Messages, r#"{"stream":true}"#), Unfit::Kind);
    assert_eq!(refused(Api::Completions, r#"{"stream":true,"prompt":"a"}"#), Unfit::Limit);
    assert_eq!(refused(Api::Completions, r#"{"stream":true"#), Unfit::Body);
}

#[test]
fn keys_that_ask_for_nothing_in_particular_do_not_matter() {
    let body = json!({"stream": true, "max_tokens": 9, "prompt": "a", "n": 1, "best_of": 1, "logprobs": null,
        "echo": false, "suffix": "", "frequency_penalty": 0.0, "presence_penalty": 0, "response_format": {"type": "text"},
        "guided_regex": null, "x": [], "temperature": 0.7, "seed": 1, "stop": ["\n"], "logit_bias": {"1": 2}});
    assert!(Transcript::begin(Api::Completions, body.to_string().into(), ROOM).is_ok());
    let body = json!({"stream": true, "messages": [], "tools": [{"type": "function"}], "tool_choice": "auto",
        "logprobs": false, "top_logprobs": 0});
    assert!(Transcript::begin(Api::ChatCompletions, body.to_string().into(), ROOM).is_ok());
}

#[test]
fn a_completion_is_asked_for_behind_its_prompt_and_text_with_what_is_left_of_its_limits() {
    let mut transcript = begin(false);
    pass(&mut transcript, &(text_chunk("a \"") + &text_chunk("b ") + "data: {\"id\""));
    let (api, body) = asks(&mut transcript);
    assert_eq!(api, Api::Completions);
    assert_eq!(
        body,
        json!({"stream": true, "max_tokens": 7, "temperature": 0, "min_tokens": 1, "n": 1, "prompt": "hia \"b "})
    );
}

#[test]
fn a_chat_is_asked_for_as_a_message_to_continue_without_its_blank_end() {
    let mut transcript = begin(true);
    pass(&mut transcript, &chat_chunk(json!({"role": "assistant", "content": ""})));
    for content in ["a", "b", "\n", " "] {
        pass(&mut transcript, &chat_chunk(json!({"content": content})));
    }
    let (api, body) = asks(&mut transcript);
    assert_eq!(api, Api::ChatCompletions);
    assert_eq!((&body["max_tokens"], &body["min_tokens"]), (&json!(7), &json!(1)));
    assert_eq!(body["messages"][1], json!({"role": "assistant", "content": "ab"}));
    assert_eq!(
        (&body["continue_final_message"], &body["add_generation_prompt"]),
        (&json!(true), &json!(false))
    );
    // The client already has the whitespace; different output of the engine is kept.
    assert_eq!(pass(&mut transcript, &chat_chunk(json!({"role": "assistant", "content": ""}))), "");
    assert_eq!(pass(&mut transcript, &chat_chunk(json!({"content": "\n"}))), "");
    let rest = Heard::of(pass(&mut transcript, &chat_chunk(json!({"content": "c"}))).as_bytes());
    assert_eq!(rest.text, "c");
    assert_eq!(transcript.text(), "ab\n c");
}

#[test]
fn a_chat_with_token_ids_goes_on_as_a_completion_of_exactly_those() {
    let (api, mut body) = request(true, true, 9, "hi", false);
    body["reasoning_effort"] = json!("low");
    let mut transcript = Transcript::begin(api, body.to_string().into(), ROOM).expect("it can be continued");
    let first = json!({"id": "1", "model": "m", "created": 1, "prompt_token_ids": [5, 6],
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]});
    let token = json!({"id": "1", "model": "m", "created": 1,
        "choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [7]}]});
    pass(&mut transcript, &format!("data: {first}\n\ndata: {token}\n\n"));
    let (api, body) = asks(&mut transcript);
    assert_eq!(api, Api::Completions);
    assert_eq!(
        body,
        json!({"stream": true, "max_tokens": 8, "temperature": 0, "min_tokens": 2, "return_token_ids": true,
            "prompt": [5, 6, 7]})
    );
}

#[test]
fn token_ids_that_had_no_text_yet_are_told_once_however_often_it_breaks() {
    let (api, body) = request(false, true, 9, "hi", false);
    let mut transcript = Transcript::begin(api, body.to_string().into(), ROOM).expect("it can be continued");
    let chunk = |text: &str, ids: Value| {
        let choice = json!({"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": [1]});
        format!("data: {}\n\n", json!({"id": "1", "choices": [choice]}))
    };
    pass(&mut transcript, &(chunk("x", json!([7])) + &chunk("", json!([8])) + &chunk("", json!([9]))));
    for _ in 0..2 {
        assert_eq!(asks(&mut transcript).1["prompt"], json!([1, 7]));
        assert_eq!(pass(&mut transcript, &chunk("", json!([8]))), "");
    }
    let rest = Heard::of(pass(&mut transcript, &chunk("y", json!([9, 10]))).as_bytes());
    assert_eq!((rest.text.as_str(), rest.ids), ("y", vec![json!(10)]));
    assert_eq!(asks(&mut transcript).1["prompt"], json!([1, 7, 8, 9, 10]));
}

#[test]
fn token_ids_that_cannot_be_used_are_not_replaced_by_text() {
    for (more, value) in [("stop", json!("\n")), ("tools", json!([{"type": "function"}]))] {
        let (api, mut body) = request(true, true, 9, "hi", false);
        body[more] = value;
        let mut transcript = Transcript::begin(api, body.to_string().into(), ROOM).expect("a fit request");
        let token = json!({"id": "1", "prompt_token_ids": [1],
            "choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [7]}]});
        pass(&mut transcript, &format!("data: {token}\n\n"));
        assert_eq!(transcript.resume(MEANS), Err(Unfit::Ids), "{more}");
    }
}

#[test]
fn an_engine_that_may_begin_a_new_message_is_not_asked_to_continue_one() {
    let mut transcript = begin(true);
    pass(&mut transcript, &chat_chunk(json!({"content": "a"})));
    assert_eq!(transcript.resume(EngineCapabilities::default()), Err(Unfit::Engine));
    // Any engine can continue a completion, or a chat without any text yet.
    let mut transcript = begin(false);
    pass(&mut transcript, &text_chunk("a"));
    assert!(transcript.resume(EngineCapabilities::default()).is_ok());
    let mut transcript = begin(true);
    pass(&mut transcript, &chat_chunk(json!({"role": "assistant", "content": ""})));
    let (_, body) = request(true, false, 9, "hi", false);
    assert_eq!(
        transcript.resume(EngineCapabilities::default()),
        Ok(Next::Ask { api: Api::ChatCompletions, body: body.to_string().into() })
    );
}

#[test]
fn a_stream_of_which_only_the_end_is_missing_is_ended() {
    let ended =
        "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":\"stop\"}]}\n\n";
    let mut transcript = begin(false);
    pass(&mut transcript, ended);
    assert_eq!(transcript.resume(MEANS), Ok(Next::Close("data: [DONE]\n\n".into())));
    assert_eq!(transcript.resume(MEANS), Ok(Next::Close(Bytes::new())));

    for chat in [false, true] {
        let mut transcript = begin(chat);
        for _ in 0..9 {
            let chunk = if chat { chat_chunk(json!({"content": "x"})) } else { text_chunk("x") };
            pass(&mut transcript, &chunk);
        }
        let Ok(Next::Close(bytes)) = transcript.resume(MEANS) else { panic!("all nine tokens are there") };
        let heard = Heard::of(&bytes);
        assert_eq!((heard.text, heard.reasons, heard.done), (String::new(), vec![json!("length")], 1));
    }
}

#[test]
fn tool_calls_reasoning_and_errors_cannot_be_continued() {
    let call = json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]});
    for (event, unfit) in [
        (chat_chunk(call), Unfit::ToolCall),
        (chat_chunk(json!({"reasoning_content": "hm"})), Unfit::Reasoning),
        (chat_chunk(json!({"reasoning": "hm"})), Unfit::Reasoning),
        ("data: {\"error\":{\"message\":\"out of memory\"}}\n\n".into(), Unfit::Error),
        ("data: {\"id\":\"1\",\"choices\":[{\"index\":1,\"delta\":{}}]}\n\n".into(), Unfit::Chunk),
        ("data: what\n\n".into(), Unfit::Chunk),
    ] {
        let mut transcript = begin(true);
        pass(&mut transcript, &chat_chunk(json!({"content": "a"})));
        // It passes unchanged, and so does everything after it, complete or not.
        assert_eq!(pass(&mut transcript, &format!("{event}data: x")), format!("{event}data: x"));
        assert_eq!(pass(&mut transcript, "y"), "y");
        assert_eq!(transcript.resume(MEANS), Err(unfit));
    }
}

#[test]
fn a_second_stream_that_thinks_or_fails_does_not_reach_the_client() {
    for event in [
        chat_chunk(json!({"reasoning": "hm"})),
        "data: {\"error\":{\"message\":\"out of memory\"}}\n\n".into(),
        "data: {\"id\":\"1\",\"choices\":[{\"index\":0},{\"index\":0}]}\n\n".into(),
    ] {
        let mut transcript = begin(true);
        pass(&mut transcript, &chat_chunk(json!({"content": "a"})));
        asks(&mut transcript);
        assert!(transcript.pass(event.clone().into()).is_err(), "{event}");
    }
}

#[test]
fn an_answer_beyond_the_limit_passes_and_is_forgotten() {
    let (api, body) = request(false, false, 9, "hi", false);
    let mut transcript = Transcript::begin(api, body.to_string().into(), 200).expect("a fit request");
    let long = text_chunk(&"x".repeat(300));
    let (begun, rest) = long.split_at(150);
    assert_eq!(pass(&mut transcript, begun), "");
    assert_eq!(pass(&mut transcript, rest), long);
    assert_eq!(transcript.resume(MEANS), Err(Unfit::TooLong(200)));
    assert_eq!(transcript.text(), "");
}

proptest! {
    #[test]
    fn a_stream_that_does_not_break_passes_as_it_is(
        bytes in prop::collection::vec(prop_oneof![
            Just(text_chunk("a")), Just(": ping\n\n".to_owned()), Just("data: [DONE]\r\n\r\n".to_owned()),
            Just(chat_chunk(json!({"content": "b"})).replace('\n', "\r\n")), any::<String>(), Just("\n".to_owned()),
        ], 0..8),
        chat: bool, piece in 1_usize..40,
    ) {
        let bytes = bytes.concat();
        let mut transcript = begin(chat);
        let mut passed = Vec::new();
        for piece in bytes.as_bytes().chunks(piece) {
            passed.extend(transcript.pass(Bytes::copy_from_slice(piece)).expect("a first stream always passes"));
        }
        passed.extend(transcript.end().expect("a first stream always passes"));
        prop_assert_eq!(passed, bytes.into_bytes());
    }
}
