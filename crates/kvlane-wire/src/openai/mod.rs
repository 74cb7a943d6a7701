//! Request bodies, parsed in one pass: model, session, limits, and the prompt rendered for prefix matching.
//!
//! The rendering is not a chat template's output. It must only grow as the engine's prompt grows: it lists the prompt's
//! parts in the order in which templates print them, so that a conversation's next turn begins with the bytes of this
//! one, and bodies that differ in whitespace, escaping or the order of top-level and message keys have the same
//! rendering. Bytes that UTF-8 text cannot contain (0xF5 and above) mark the start of each part, so no content can
//! imitate structure.
//!
//! Chat: tools, then each message as role, name, call id, reasoning, content, calls, output. Anthropic's `system` and
//! OpenAI's `instructions` are rendered as a system message. Text parts are decoded; parts of other types, tools and
//! calls are written compactly. Prompts given as token ids become four little-endian bytes each.

mod agent_hints;
mod fields;
pub(crate) mod parsed;

use std::borrow::Cow;

use xxhash_rust::xxh3::xxh3_128;

pub use self::agent_hints::AgentHints;
use self::fields::{Field, SHARED, prompt_fields};
pub use self::parsed::{ParseError, ParsedRequest, SESSION_BYTES_MAX};
use crate::api::Api;
use crate::disaggregation::refuse::may_forbid;
use crate::disaggregation::reserved::is_reserved;
use crate::engine::calls;
use crate::json::{Kind, Scanner};

/// Bytes of a prompt without messages that stand for its conversation.
const OPENING_BYTES: usize = 256;
/// Where a content part has a file, in base64 or behind a URL.
const FILE_KEYS: [&str; 7] =
    ["image_url", "source", "input_audio", "audio_url", "video_url", "file", "file_data"];
/// Bytes that stand for a longer file: 1,024 tokens, an image of about 0.8 megapixels in Qwen's models (28 x 28 pixels a
/// token).
const FILE_BYTES: usize = 4096;
/// Start of a message.
const MESSAGE: u8 = 0xFF;
/// Start of the tool list.
const TOOLS: u8 = 0xFE;
/// Start of a further content part, or of a further prompt of a batch.
const NEXT: u8 = 0xFD;
/// Start of a message's section of rank 0; the following ranks have the following bytes.
const SECTION: u8 = 0xF5;

/// A system block that Claude Code fills with a hash per request. vLLM excludes it from the prompt for that reason
/// (`entrypoints/anthropic/serving.py`), and so must a rendering that is to match the prefix after it.
const ATTRIBUTION: &[u8] = b"x-anthropic-billing-header";

/// Parses the body of a request to `api` and writes its rendered prompt to `prompt`, which is cleared first. The
/// rendering is at most a small multiple of the body's size.
pub fn parse<'a>(api: Api, body: &'a [u8], prompt: &mut Vec<u8>) -> Result<ParsedRequest<'a>, ParseError> {
    if api.is_grpc() {
        return calls::parse(api, body, prompt);
    }
    prompt.clear();
    let text = utf8(body)?;
    let mut reader = Reader { scanner: Scanner::new(text), out: prompt };
    if text.trim_ascii_start().is_empty() {
        return Err(ParseError::Empty);
    }
    // Renderings are rarely longer than their bodies.
    reader.out.reserve(body.len());

    let own = prompt_fields(api);
    let mut request = ParsedRequest { prompts: 1, ..ParsedRequest::default() };
    let mut sections = Sections::<4>::default();
    let mut seen = 0_u32;
    let mut found = false;
    let (mut output_rank, mut session_rank) = (0, 0);
    let mut walk = reader.scanner.object()?;
    while let Some(key) = walk.key(&mut reader.scanner)? {
        let key = key.decode();
        let known = own.iter().chain(&SHARED).enumerate().find(|(_, (name, _))| *name == key);
        let Some((index, &(name, field))) = known else {
            let value = reader.scanner.skip()?;
            request.reserved |= is_reserved(&key, value);
            request.telling |= may_forbid(&key, value.starts_with('"'));
            continue;
        };
        if seen >> index & 1 == 1 {
            return Err(ParseError::DuplicateKey { key: name, at: reader.scanner.at() });
        }
        seen |= 1 << index;
        let kind = reader.scanner.peek()?;
        if kind == Kind::Null {
            reader.scanner.null()?;
            continue;
        }
        request.telling |= may_forbid(name, kind == Kind::String);

        let start = reader.out.len();
        match field {
            Field::Model => request.model = Some(reader.text(name)?),
            Field::PreviousResponse => request.previous_response = Some(reader.text(name)?),
            Field::Conversation if kind == Kind::Object => {
                let mut walk = reader.scanner.object()?;
                while let Some(key) = walk.key(&mut reader.scanner)? {
                    if key.decode() == "id" {
                        request.conversation = Some(reader.text("conversation.id")?);
                    } else {
                        reader.scanner.skip()?;
                    }
                }
            }
            Field::Conversation => request.conversation = Some(reader.text(name)?),
            Field::CacheSalt => request.cache_salt = Some(reader.text(name)?),
            Field::Stream if kind == Kind::Bool => request.stream = reader.scanner.boolean()?,
            Field::Stream => return Err(ParseError::WrongType { field: name, expected: "true or false" }),
            Field::OutputTokens(rank) => {
                let limit = reader.limit(name)?;
                if rank >= output_rank && limit.is_some() {
                    (request.output_tokens_max, output_rank) = (limit, rank);
                }
            }
            Field::SamplingParams => {
                let limit = reader.sampling_params()?;
                request.output_tokens_max = request.output_tokens_max.or(limit);
            }
            // A batch may name one adapter per prompt: then the unparsed list is the key.
            Field::Lora if kind == Kind::String => request.lora = Some(reader.text(name)?),
            Field::Lora => request.lora = Some(Cow::Borrowed(reader.scanner.skip()?)),
            Field::Session(_) | Field::SessionParams | Field::Metadata => {
                let (rank, session) = match field {
                    Field::Session(rank) => (rank, reader.session()?),
                    Field::SessionParams => (3, reader.session_in("id")?),
                    _ => (1, reader.session_in("user_id")?),
                };
                if rank > session_rank && session.is_some() {
                    (request.session, session_rank) = (session, rank);
                }
            }
            Field::Extensions => request.agent_hints = AgentHints::read(&mut reader.scanner)?,
            Field::Tools => {
                reader.tools()?;
                sections.place(0, start, reader.out);
            }
            Field::System => {
                reader.implied_message("system")?;
                sections.place(1, start, reader.out);
            }
            Field::Messages => {
                reader.messages(name)?;
                sections.place(2, start, reader.out);
                found = true;
            }
            Field::Prompts | Field::Documents => {
                let rank = if field == Field::Prompts { 2 } else { 3 };
                let prompts = reader.prompts(name, rank == 3, &mut request.token_ids)?;
                sections.place(rank, start, reader.out);
                request.prompts = request.prompts.max(prompts);
                found = true;
            }
        }
    }
    reader.scanner.end()?;
    if found || !api.needs_prompt() { Ok(request) } else { Err(ParseError::Missing { field: own[0].0 }) }
}

/// The part of a rendered prompt that is the same in every turn of its conversation and differs from most other
/// conversations: all up to the end of the first message of the user, or the first bytes where there is none.
pub fn opening(prompt: &[u8]) -> &[u8] {
    const USER: &[u8] = &[MESSAGE, SECTION, b'u', b's', b'e', b'r'];
    match memchr::memmem::find(prompt, USER) {
        Some(at) => {
            let after = at + USER.len();
            let end = memchr::memchr(MESSAGE, &prompt[after..]).map_or(prompt.len(), |length| after + length);
            &prompt[..end]
        }
        None => &prompt[..prompt.len().min(OPENING_BYTES)],
    }
}

/// Whether a rendered prompt has tools.
pub fn has_tools(prompt: &[u8]) -> bool {
    prompt.first() == Some(&TOOLS)
}

/// A body as text.
pub(crate) fn utf8(body: &[u8]) -> Result<&str, ParseError> {
    // A second, slow check returns the position of the error, which the SIMD check does not.
    simdutf8::basic::from_utf8(body).map_err(|_| ParseError::NotUtf8 {
        at: std::str::from_utf8(body).map_or_else(|error| error.valid_up_to(), str::len),
    })
}

/// Lengths of the sections at the end of a rendering, which are kept in the order of their rank, whatever the order of
/// keys.
#[derive(Debug)]
struct Sections<const N: usize> {
    lengths: [usize; N],
}

impl<const N: usize> Default for Sections<N> {
    fn default() -> Self {
        Self { lengths: [0; N] }
    }
}

impl<const N: usize> Sections<N> {
    /// Moves the bytes from `start` on before the sections of higher rank. In the usual order nothing moves.
    fn place(&mut self, rank: usize, start: usize, out: &mut [u8]) {
        let length = out.len() - start;
        let after: usize = self.lengths[rank + 1..].iter().sum();
        if after > 0 {
            out[start - after..].rotate_right(length);
        }
        self.lengths[rank] += length;
    }
}

/// The body to read and the rendering written so far.
struct Reader<'a, 'out> {
    scanner: Scanner<'a>,
    out: &'out mut Vec<u8>,
}

impl<'a> Reader<'a, '_> {
    fn text(&mut self, field: &'static str) -> Result<Cow<'a, str>, ParseError> {
        if self.scanner.peek()? != Kind::String {
            return Err(ParseError::WrongType { field, expected: "a string" });
        }
        Ok(self.scanner.string()?.decode())
    }

    /// A number of tokens: an integer, or a float as some clients send.
    fn limit(&mut self, field: &'static str) -> Result<Option<u32>, ParseError> {
        if self.scanner.peek()? != Kind::Number {
            return Err(ParseError::WrongType { field, expected: "a whole number" });
        }
        let value: f64 = self.scanner.number()?.parse().unwrap_or(-1.0);
        // The cast saturates.
        Ok((value >= 0.0).then_some(value as u32))
    }

    /// The largest `max_new_tokens` in SGLang's parameters, which are one object or one per prompt.
    fn sampling_params(&mut self) -> Result<Option<u32>, ParseError> {
        match self.scanner.peek()? {
            Kind::Object => self.sampling_params_of_one(),
            Kind::Array => {
                let mut most = None;
                let mut walk = self.scanner.array()?;
                while walk.item(&mut self.scanner)? {
                    most = most.max(match self.scanner.peek()? {
                        Kind::Object => self.sampling_params_of_one()?,
                        _ => self.scanner.skip().map(|_| None)?,
                    });
                }
                Ok(most)
            }
            _ => Err(ParseError::WrongType { field: "sampling_params", expected: "an object" }),
        }
    }

    fn sampling_params_of_one(&mut self) -> Result<Option<u32>, ParseError> {
        let mut limit = None;
        let mut walk = self.scanner.object()?;
        while let Some(key) = walk.key(&mut self.scanner)? {
            if matches!(&*key.decode(), "max_new_tokens" | "max_tokens")
                && self.scanner.peek()? == Kind::Number
            {
                limit = self.limit("max_new_tokens")?;
            } else {
                self.scanner.skip()?;
            }
        }
        Ok(limit)
    }

    /// A session name, if it is usable.
    fn session(&mut self) -> Result<Option<Cow<'a, str>>, ParseError> {
        if self.scanner.peek()? != Kind::String {
            self.scanner.skip()?;
            return Ok(None);
        }
        let text = self.scanner.string()?;
        // Six bytes of escapes give at least one byte of text: longer text need not be decoded.
        if text.raw().len() > 6 * SESSION_BYTES_MAX {
            return Ok(None);
        }
        Ok(Some(text.decode()).filter(|name| !name.is_empty() && name.len() <= SESSION_BYTES_MAX))
    }

    fn session_in(&mut self, name: &str) -> Result<Option<Cow<'a, str>>, ParseError> {
        let mut session = None;
        if self.scanner.peek()? != Kind::Object {
            self.scanner.skip()?;
            return Ok(None);
        }
        let mut walk = self.scanner.object()?;
        while let Some(key) = walk.key(&mut self.scanner)? {
            if key.decode() == name {
                session = self.session()?;
            } else {
                self.scanner.skip()?;
            }
        }
        Ok(session)
    }

    /// Tools, which templates print before any message. An empty list counts as none.
    fn tools(&mut self) -> Result<(), ParseError> {
        let start = self.out.len();
        self.out.push(TOOLS);
        self.scanner.compact(self.out)?;
        if self.out[start + 1..] == *b"[]" {
            self.out.truncate(start);
        }
        Ok(())
    }

    /// Content outside of the messages, rendered as one message of `role`.
    fn implied_message(&mut self, role: &str) -> Result<(), ParseError> {
        self.out.extend_from_slice(&[MESSAGE, SECTION]);
        self.out.extend_from_slice(role.as_bytes());
        self.out.push(SECTION + CONTENT);
        self.content()
    }

    /// A list of messages or items; a plain string (Responses) is a user message.
    fn messages(&mut self, field: &'static str) -> Result<(), ParseError> {
        let wrong = ParseError::WrongType { field, expected: "an array of objects" };
        match self.scanner.peek()? {
            Kind::String if field == "input" => return self.implied_message("user"),
            Kind::Array => {}
            _ => return Err(wrong),
        }
        let mut walk = self.scanner.array()?;
        while walk.item(&mut self.scanner)? {
            if self.scanner.peek()? != Kind::Object {
                return Err(wrong);
            }
            self.message()?;
        }
        Ok(())
    }

    /// One message. Of a duplicate key the first is used: if an engine disagrees, only the prefix match suffers.
    fn message(&mut self) -> Result<(), ParseError> {
        self.out.push(MESSAGE);
        let mut sections = Sections::<7>::default();
        let mut walk = self.scanner.object()?;
        while let Some(key) = walk.key(&mut self.scanner)? {
            let rank = match &*key.decode() {
                "role" => 0,
                "name" => 1,
                "tool_call_id" | "call_id" => 2,
                "reasoning_content" | "reasoning" | "summary" => 3,
                "content" => CONTENT,
                "tool_calls" | "function_call" | "arguments" => 5,
                "output" => 6,
                _ => u8::MAX,
            };
            if sections.lengths.get(usize::from(rank)) != Some(&0) || self.scanner.peek()? == Kind::Null {
                self.scanner.skip()?;
                continue;
            }
            let start = self.out.len();
            self.out.push(SECTION + rank);
            self.content()?;
            sections.place(usize::from(rank), start, self.out);
        }
        Ok(())
    }

    /// Message content: a string, or parts.
    fn content(&mut self) -> Result<(), ParseError> {
        match self.scanner.peek()? {
            Kind::String => self.scanner.string_into(self.out)?,
            Kind::Object => self.part(false)?,
            Kind::Array => {
                let begin = self.out.len();
                let mut walk = self.scanner.array()?;
                while walk.item(&mut self.scanner)? {
                    let start = self.out.len();
                    if start > begin {
                        self.out.push(NEXT);
                    }
                    let text = self.out.len();
                    match self.scanner.peek()? {
                        Kind::String => self.scanner.string_into(self.out)?,
                        Kind::Object => self.part(false)?,
                        _ => self.scanner.compact(self.out)?,
                    }
                    if self.out[text..].starts_with(ATTRIBUTION) {
                        self.out.truncate(start);
                    }
                }
            }
            _ => self.scanner.compact(self.out)?,
        }
        Ok(())
    }

    /// One content part, or one `within` a tool's result: its text if it has one, so that a part and a plain string render
    /// equally, otherwise the whole part.
    fn part(&mut self, within: bool) -> Result<(), ParseError> {
        let start = self.out.len();
        let mut is_text = false;
        self.out.push(b'{');
        let mut walk = self.scanner.object()?;
        while let Some(key) = walk.key(&mut self.scanner)? {
            let key = key.decode();
            if is_text || key == crate::json::NOT_PROMPT {
                self.scanner.skip()?;
            } else if key == "text" && self.scanner.peek()? == Kind::String {
                is_text = true;
                self.out.truncate(start);
                self.scanner.string_into(self.out)?;
            } else {
                self.out.push(b'"');
                self.out.extend_from_slice(key.as_bytes());
                self.out.push(crate::json::STRING_END);
                let value = self.out.len();
                if key == "content" && !within && self.scanner.peek()? == Kind::Array {
                    let mut walk = self.scanner.array()?;
                    while walk.item(&mut self.scanner)? {
                        self.out.push(NEXT);
                        match self.scanner.peek()? {
                            Kind::Object => self.part(true)?,
                            _ => self.scanner.compact(self.out)?,
                        }
                    }
                    continue;
                }
                self.scanner.compact(self.out)?;
                if FILE_KEYS.contains(&&*key) {
                    self.shorten(value);
                }
            }
        }
        if !is_text {
            self.out.push(b'}');
        }
        Ok(())
    }

    /// What is rendered since `start` is a file, if it is as long as one: it counts as an image does, and not by the bytes
    /// of its base64. Its hash stands for its contents.
    fn shorten(&mut self, start: usize) {
        if self.out.len() - start > FILE_BYTES {
            let hash = xxh3_128(&self.out[start..]);
            self.out.truncate(start);
            self.out.extend_from_slice(&hash.to_le_bytes());
            self.out.resize(start + FILE_BYTES, b' ');
        }
    }

    /// One prompt or a batch, as text or token ids. `lead` writes a mark before the first one as well.
    fn prompts(&mut self, field: &'static str, lead: bool, token_ids: &mut bool) -> Result<u32, ParseError> {
        let wrong = ParseError::WrongType { field, expected: "a string, an array of strings or token ids" };
        if lead {
            self.out.push(NEXT);
        }
        match self.scanner.peek()? {
            Kind::String => return self.scanner.string_into(self.out).map(|()| 1).map_err(Into::into),
            Kind::Object => return self.part(false).map(|()| 1),
            Kind::Array => {}
            _ => return Err(wrong),
        }
        let mut prompts = 0_u32;
        let mut in_ids = false;
        let mut walk = self.scanner.array()?;
        while walk.item(&mut self.scanner)? {
            let kind = self.scanner.peek()?;
            if kind == Kind::Number && in_ids {
                self.token_id(field)?;
                continue;
            }
            if prompts > 0 {
                self.out.push(NEXT);
            }
            prompts = prompts.saturating_add(1);
            in_ids = kind == Kind::Number;
            match kind {
                Kind::String => self.scanner.string_into(self.out)?,
                Kind::Object => self.part(false)?,
                Kind::Number => self.token_id(field)?,
                Kind::Array => {
                    let mut ids = self.scanner.array()?;
                    while ids.item(&mut self.scanner)? {
                        self.token_id(field)?;
                    }
                }
                Kind::Bool | Kind::Null => return Err(wrong),
            }
            *token_ids |= matches!(kind, Kind::Number | Kind::Array);
        }
        Ok(prompts)
    }

    fn token_id(&mut self, field: &'static str) -> Result<(), ParseError> {
        let wrong =
            ParseError::WrongType { field, expected: "token ids, whole numbers from 0 to 4294967295" };
        if self.scanner.peek()? != Kind::Number {
            return Err(wrong);
        }
        let id = self.scanner.whole()?.ok_or(wrong)?;
        self.out.extend_from_slice(&id.to_le_bytes());
        Ok(())
    }
}

/// Rank of the content among a message's sections.
const CONTENT: u8 = 4;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn render(api: Api, body: &[u8]) -> Vec<u8> {
        let mut prompt = b"left over".to_vec();
        parse(api, body, &mut prompt)
            .unwrap_or_else(|error| panic!("{}: {error}", String::from_utf8_lossy(body)));
        prompt
    }

    fn chat(body: &str) -> Vec<u8> {
        render(Api::ChatCompletions, body.as_bytes())
    }

    fn read(api: Api, body: &str) -> ParsedRequest<'_> {
        parse(api, body.as_bytes(), &mut Vec::new()).unwrap_or_else(|error| panic!("{body}: {error}"))
    }

    fn refuse(api: Api, body: &[u8]) -> ParseError {
        parse(api, body, &mut Vec::new()).expect_err("a body that cannot be placed")
    }

    /// A body of each API with its prompt in every usual form.
    const BODIES: [(Api, &str); 22] = [
        (
            Api::ChatCompletions,
            r#"{"model":"m","messages":[{"role":"user","content":"hé\"llo"}],"stream":true}"#,
        ),
        (
            Api::ChatCompletions,
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:x"}}]},
               {"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]},
               {"role":"tool","tool_call_id":"1","content":"done"}],"tools":[{"type":"function"}],"temperature":0.5}"#,
        ),
        (Api::Completions, r#"{"prompt":"once upon","max_tokens":7}"#),
        (Api::Completions, r#"{"prompt":["a","b"]}"#),
        (Api::Completions, r#"{"prompt":[1,2,3]}"#),
        (Api::Completions, r#"{"prompt":[[1,2],[3]]}"#),
        (Api::Embeddings, r#"{"input":["a","b"],"encoding_format":"float"}"#),
        (Api::Embeddings, r#"{"messages":[{"role":"user","content":"a"}]}"#),
        (Api::Responses, r#"{"input":"hi","instructions":"be kind","max_output_tokens":5}"#),
        (
            Api::Responses,
            r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]},{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}]}"#,
        ),
        (
            Api::Messages,
            r#"{"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"hi"}],"max_tokens":9,"metadata":{"user_id":"u"}}"#,
        ),
        (Api::Rerank, r#"{"query":"q","documents":["a",{"text":"b"}]}"#),
        (Api::Score, r#"{"text_1":"q","text_2":["a","b"]}"#),
        (Api::Tokenize, r#"{"prompt":"a"}"#),
        (Api::Tokenize, r#"{"messages":[{"role":"user","content":"a"}]}"#),
        (Api::Tokenize, r#"{"content":"a"}"#),
        (Api::Detokenize, r#"{"tokens":[1,2]}"#),
        (
            Api::Generate,
            r#"{"text":"a","sampling_params":{"max_new_tokens":3,"stop":["x"]},"lora_path":"l"}"#,
        ),
        (
            Api::Generate,
            r#"{"text":["a","b"],"sampling_params":[{"max_new_tokens":3},{"max_new_tokens":4}],"lora_path":["l",null]}"#,
        ),
        (Api::Generate, r#"{"input_ids":[1,2],"text":null,"session_params":{"id":"s"}}"#),
        (Api::Generate, r#"{"input_ids":[[1,2],[3]]}"#),
        (Api::ChatCompletions, r#"{"messages":[]}"#),
    ];

    #[test]
    fn a_request_is_read_whatever_else_it_holds() {
        let body = r#"{"model":"m\u0031","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":64,
            "cache_salt":"tenant-a","user":"u","logit_bias":{"1":[{}]},"seed":null}"#;
        assert_eq!(
            read(Api::ChatCompletions, body),
            ParsedRequest {
                model: Some("m1".into()),
                stream: true,
                output_tokens_max: Some(64),
                previous_response: None,
                conversation: None,
                cache_salt: Some("tenant-a".into()),
                lora: None,
                session: Some("u".into()),
                agent_hints: AgentHints::default(),
                prompts: 1,
                token_ids: false,
                reserved: false,
                telling: false,
            }
        );
    }

    #[test]
    fn hints_of_an_agent_are_no_part_of_the_prompt() {
        let body = |nvext: &str| format!(r#"{{"prompt":"p"{nvext}}}"#);
        let hints = read(Api::Completions, &body(r#","nvext":{"agent_hints":{"osl":9}}"#)).agent_hints;
        assert_eq!(hints, AgentHints { output_tokens: Some(9), priority: None });
        assert_eq!(read(Api::Completions, &body("")).agent_hints, AgentHints::default());
    }

    #[test]
    fn all_turns_of_a_conversation_have_one_opening() {
        let turn = |messages: &str| {
            chat(&format!(r#"{{"messages":[{{"role":"system","content":"s"}},{messages}]}}"#))
        };
        let (first, other) =
            (turn(r#"{"role":"user","content":"a"}"#), turn(r#"{"role":"user","content":"b"}"#));
        let later = turn(
            r#"{"role":"user","content":"a"},{"role":"assistant","content":"x"},{"role":"user","content":"c"}"#,
        );
        assert_eq!(opening(&first), opening(&later));
        assert_ne!(opening(&first), opening(&other));
        assert_eq!(opening(&[b'x'; 1000]).len(), OPENING_BYTES);
        assert!(!has_tools(&first) && has_tools(&chat(r#"{"messages":[],"tools":[{"a":1}]}"#)));
    }

    #[test]
    fn a_conversation_is_an_id_or_an_object_with_one() {
        let conversation = |value: &str| {
            let body = format!(r#"{{"input":"a","conversation":{value}}}"#);
            let mut prompt = Vec::new();
            parse(Api::Responses, body.as_bytes(), &mut prompt)
                .map(|request| request.conversation.map(Cow::into_owned))
        };
        for value in
            [r#""conv_1""#, r#"{"id":"conv_1"}"#, r#"{"object":"conversation","id":"conv_1","a":[1]}"#]
        {
            assert_eq!(conversation(value), Ok(Some("conv_1".into())), "{value}");
        }
        assert_eq!((conversation("null"), conversation("{}")), (Ok(None), Ok(None)));
        for value in ["7", r#"{"id":7}"#, "[]"] {
            assert!(matches!(conversation(value), Err(ParseError::WrongType { .. })), "{value}");
        }
    }

    #[test]
    fn a_body_without_a_model_is_the_callers_to_judge() {
        assert_eq!(read(Api::Completions, r#"{"prompt":"a"}"#).model, None);
        assert_eq!(read(Api::Completions, r#"{"prompt":"a","model":null}"#).model, None);
    }

    #[test]
    fn the_limit_on_output_is_found_under_each_of_its_names() {
        for (api, body, limit) in [
            (Api::Completions, r#"{"prompt":"","max_tokens":5}"#, Some(5)),
            (Api::ChatCompletions, r#"{"messages":[],"max_completion_tokens":6,"max_tokens":5}"#, Some(6)),
            (Api::ChatCompletions, r#"{"messages":[],"max_tokens":5,"max_completion_tokens":6}"#, Some(6)),
            (Api::ChatCompletions, r#"{"messages":[],"max_tokens":5,"max_completion_tokens":null}"#, Some(5)),
            (Api::Responses, r#"{"input":"","max_output_tokens":7.0}"#, Some(7)),
            (Api::Generate, r#"{"text":"","sampling_params":{"top_k":1,"max_new_tokens":8}}"#, Some(8)),
            (
                Api::Generate,
                r#"{"text":[],"sampling_params":[{"max_new_tokens":8},{"max_new_tokens":9},null]}"#,
                Some(9),
            ),
            (Api::Completions, r#"{"prompt":"","max_tokens":-1}"#, None),
            (Api::Completions, r#"{"prompt":"","max_tokens":1e99}"#, Some(u32::MAX)),
        ] {
            assert_eq!(read(api, body).output_tokens_max, limit, "{body}");
        }
    }

    #[test]
    fn the_session_is_the_most_telling_name_that_is_short_enough() {
        let long = "x".repeat(SESSION_BYTES_MAX + 1);
        for (api, body, session) in [
            (
                Api::Completions,
                r#"{"user":"u","session_id":"s","prompt_cache_key":"k","prompt":""}"#.to_owned(),
                Some("s"),
            ),
            (Api::Responses, r#"{"prompt_cache_key":"k","user":"u","input":""}"#.to_owned(), Some("k")),
            (Api::Messages, r#"{"messages":[],"metadata":{"user_id":"u"}}"#.to_owned(), Some("u")),
            (Api::Generate, r#"{"text":"","session_params":{"id":"s","rid":"r"}}"#.to_owned(), Some("s")),
            (Api::Completions, format!(r#"{{"session_id":"{long}","user":"u","prompt":""}}"#), Some("u")),
            (Api::Completions, format!(r#"{{"session_id":"{}","prompt":""}}"#, &long[1..]), Some(&long[1..])),
            (Api::Completions, r#"{"session_id":7,"user":"","prompt":""}"#.to_owned(), None),
        ] {
            assert_eq!(read(api, &body).session.as_deref(), session, "{body}");
        }
    }

    #[test]
    fn an_adapter_list_is_a_key_too() {
        assert_eq!(read(Api::Generate, r#"{"text":"","lora_path":"l"}"#).lora.as_deref(), Some("l"));
        assert_eq!(
            read(Api::Generate, r#"{"text":[],"lora_path":["l",null]}"#).lora.as_deref(),
            Some(r#"["l",null]"#)
        );
        assert_eq!(read(Api::Generate, r#"{"text":"","lora_path":null}"#).lora, None);
    }

    #[test]
    fn prompts_are_counted_and_token_ids_told_apart_from_text() {
        for (api, body, prompts, token_ids) in [
            (Api::Completions, r#"{"prompt":"a"}"#, 1, false),
            (Api::Completions, r#"{"prompt":["a","b","c"]}"#, 3, false),
            (Api::Completions, r#"{"prompt":[1,2,3]}"#, 1, true),
            (Api::Completions, r#"{"prompt":[[1,2],[3]]}"#, 2, true),
            (Api::Completions, r#"{"prompt":[]}"#, 1, false),
            (Api::Rerank, r#"{"query":"q","documents":["a","b","c"]}"#, 3, false),
            (Api::Generate, r#"{"input_ids":[[1],[2]],"text":null}"#, 2, true),
        ] {
            let request = read(api, body);
            assert_eq!((request.prompts, request.token_ids), (prompts, token_ids), "{body}");
        }
    }

    #[test]
    fn token_ids_become_four_bytes_each() {
        assert_eq!(
            render(Api::Completions, br#"{"prompt":[1,256,4294967295]}"#),
            [1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 255, 255]
        );
        assert_eq!(render(Api::Detokenize, br#"{"tokens":[7]}"#), 7_u32.to_le_bytes());
        assert_eq!(render(Api::Completions, br#"{"prompt":[[1],[2]]}"#), [1, 0, 0, 0, NEXT, 2, 0, 0, 0]);
    }

    #[test]
    fn a_text_prompt_is_rendered_as_it_is() {
        assert_eq!(render(Api::Completions, r#"{"prompt":"a\n\u00e9"}"#.as_bytes()), "a\né".as_bytes());
        assert_eq!(render(Api::Generate, br#"{"text":"ab"}"#), b"ab");
        let batch = render(Api::Completions, br#"{"prompt":["a","b"]}"#);
        assert!(batch.starts_with(b"a") && batch.len() == 3, "the first prompt comes first");
    }

    /// Invariant: Spelling, layout and key order of a JSON body do not change the rendered prompt.
    ///
    /// Also held by `layout_and_escaping_do_not_show`.
    #[test]
    fn spelling_and_the_order_of_keys_do_not_show() {
        let plain = chat(
            r#"{"tools":[{"a":"é"}],"messages":[{"role":"user","name":"n","content":"hé"},{"role":"assistant","content":"x"}]}"#,
        );
        for body in [
            r#"{"messages":[{"role":"user","name":"n","content":"hé"},{"role":"assistant","content":"x"}],"tools":[{"a":"é"}]}"#,
            r#"{"messages":[{"content":"h\u00e9","name":"n","role":"user"},{"content":"x","role":"assistant"}],"model":"m","tools":[ {"a" : "\u00e9"} ]}"#,
            r#"{ "messages" : [ {"name":"n", "content":"h\u00E9","\u0072ole":"user" } , {"role":"assistant","content":"x","audio":null} ], "tools":[{"a":"é"}] }"#,
        ] {
            assert_eq!(chat(body), plain, "{body}");
        }
    }

    #[test]
    fn a_text_part_reads_like_a_string() {
        let plain = chat(r#"{"messages":[{"role":"user","content":"hi"}]}"#);
        for content in [
            r#"[{"type":"text","text":"hi"}]"#,
            r#"[{"text":"hi","type":"text"}]"#,
            r#"["hi"]"#,
            r#"[{"type":"input_text","text":"hi","cache_control":{"type":"ephemeral"}}]"#,
        ] {
            assert_eq!(
                chat(&format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#)),
                plain,
                "{content}"
            );
        }
        let instructed = render(Api::Responses, br#"{"input":"hi","instructions":"s"}"#);
        assert_eq!(
            instructed,
            render(Api::Messages, br#"{"messages":[{"role":"user","content":"hi"}],"system":"s"}"#)
        );
        assert_eq!(
            instructed,
            chat(r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}]}"#),
            "the same conversation over three APIs"
        );
    }

    #[test]
    fn what_is_said_differently_renders_differently() {
        let bodies = [
            r#"[{"role":"user","content":"ab"}]"#,
            r#"[{"role":"user","content":"a"},{"role":"user","content":"b"}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#,
            r#"[{"role":"assistant","content":"ab"}]"#,
            r#"[{"role":"user","content":"ab","name":"n"}]"#,
            r#"[{"role":"assistant","content":"ab","tool_calls":[{"id":"1"}]}]"#,
            r#"[{"role":"assistant","content":"ab","tool_calls":[{"id":"2"}]}]"#,
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"ab"}}]}]"#,
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"ac"}}]}]"#,
            r#"[{"role":"user","content":null}]"#,
        ];
        let mut renderings: Vec<Vec<u8>> =
            bodies.iter().map(|messages| chat(&format!(r#"{{"messages":{messages}}}"#))).collect();
        renderings.sort();
        renderings.dedup();
        assert_eq!(renderings.len(), bodies.len());
    }

    #[test]
    fn a_file_counts_as_an_image_does_and_its_contents_show() {
        let file = |byte: &str| byte.repeat(1_000_000);
        let part = |data: &str| {
            format!(r#"{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{data}"}}}}"#)
        };
        let own =
            |data: &str| chat(&format!(r#"{{"messages":[{{"role":"user","content":[{}]}}]}}"#, part(data)));
        let (one, other) = (own(&file("a")), own(&file("b")));
        assert_eq!((one.len(), one == other), (other.len(), false));
        assert!((FILE_BYTES..FILE_BYTES + 64).contains(&one.len()), "{}", one.len());
        // In a tool's result, as Anthropic's clients send screenshots; a long text there stays a text.
        let result = |content: &str| {
            let part = format!(r#"{{"type":"tool_result","tool_use_id":"1","content":{content}}}"#);
            chat(&format!(r#"{{"messages":[{{"role":"user","content":[{part}]}}]}}"#)).len()
        };
        let shot = format!(r#"[{{"type":"image","source":{{"type":"base64","data":"{}"}}}}]"#, file("a"));
        assert!((FILE_BYTES..FILE_BYTES + 128).contains(&result(&shot)));
        let text = file("a");
        assert!(result(&format!("\"{text}\"")) > 1_000_000);
        assert!(result(&format!(r#"[{{"type":"text","text":"{text}"}}]"#)) > 1_000_000);
    }

    #[test]
    fn an_empty_tool_list_is_no_tool_list() {
        let without = chat(r#"{"messages":[{"role":"user","content":"a"}]}"#);
        assert_eq!(chat(r#"{"messages":[{"role":"user","content":"a"}],"tools":[]}"#), without);
        assert_eq!(chat(r#"{"tools":null,"messages":[{"role":"user","content":"a"}]}"#), without);
    }

    #[test]
    fn an_attribution_block_that_changes_with_every_request_does_not_show() {
        let body = |block: &str| {
            format!(
                r#"{{"system":[{block}{{"type":"text","text":"s"}}],"messages":[{{"role":"user","content":"hi"}}]}}"#
            )
        };
        let block = r#"{"type":"text","text":"x-anthropic-billing-header: cc_version=1; cch=5f"},"#;
        assert_eq!(render(Api::Messages, body(block).as_bytes()), render(Api::Messages, body("").as_bytes()));
    }

    #[test]
    fn a_moving_cache_breakpoint_keeps_the_prefix() {
        let marked = r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"x","cache_control":{"type":"ephemeral"}}]}"#;
        let unmarked =
            r#"{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"x"}]}"#;
        let first = render(Api::Messages, format!(r#"{{"messages":[{marked}]}}"#).as_bytes());
        let second = render(
            Api::Messages,
            format!(r#"{{"messages":[{unmarked},{{"role":"user","content":"y"}}]}}"#).as_bytes(),
        );
        assert!(second.starts_with(&first) && second.len() > first.len());
    }

    #[test]
    fn a_key_that_decides_the_placement_may_be_there_once() {
        for (key, body) in [
            ("model", r#"{"model":"a","prompt":"","model":"b"}"#),
            ("prompt", r#"{"prompt":"a","prompt":"b"}"#),
            ("cache_salt", r#"{"cache_salt":null,"prompt":"b","cache_salt":"x"}"#),
            ("model", r#"{"model":"a","prompt":"","\u006dodel":"b"}"#),
        ] {
            let error = refuse(Api::Completions, body.as_bytes());
            assert!(
                matches!(error, ParseError::DuplicateKey { key: found, .. } if found == key),
                "{body}: {error}"
            );
        }
        read(Api::Completions, r#"{"prompt":"a","seed":1,"seed":2}"#);
    }

    #[test]
    fn errors_say_what_and_where_and_what_to_do() {
        for (body, message) in [
            (&b""[..], "the request body is empty; send a JSON object"),
            (b" \n", "the request body is empty; send a JSON object"),
            (b"[]", "the request body is not valid JSON at byte 0: expected an object, '{'"),
            (
                b"{\"prompt\":\"a\xFF\"}",
                "the request body is not UTF-8 at byte 12; send JSON encoded as UTF-8",
            ),
            (
                b"{\"prompt\":\"a\"",
                "the request body is not valid JSON at byte 13: expected ',' or '}' after an object's member",
            ),
            (
                b"{\"prompt\":\"a\"}x",
                "the request body is not valid JSON at byte 14: expected the end of the body",
            ),
            (b"{\"model\":\"a\"}", "the request body has no \"prompt\"; add it"),
            (b"{\"prompt\":null}", "the request body has no \"prompt\"; add it"),
            (
                b"{\"prompt\":true}",
                "the request body's \"prompt\" has the wrong type; send a string, an array of strings or token ids",
            ),
            (
                b"{\"prompt\":\"\",\"model\":5}",
                "the request body's \"model\" has the wrong type; send a string",
            ),
            (
                b"{\"prompt\":\"\",\"stream\":\"yes\"}",
                "the request body's \"stream\" has the wrong type; send true or false",
            ),
            (
                b"{\"prompt\":[1,-1]}",
                "the request body's \"prompt\" has the wrong type; send token ids, whole numbers from 0 to 4294967295",
            ),
            (
                b"{\"prompt\":\"\",\"prompt\":\"\"}",
                "the request body has the key \"prompt\" again before byte 22; send it once",
            ),
        ] {
            assert_eq!(refuse(Api::Completions, body).to_string(), message);
        }
        let deep = [b"{\"x\":".as_slice(), &b"[".repeat(200)].concat();
        assert_eq!(
            refuse(Api::Completions, &deep).to_string(),
            "the request body nests deeper than 128 levels at byte 132; flatten it"
        );
        assert_eq!(
            refuse(Api::ChatCompletions, br#"{"messages":["hi"]}"#).to_string(),
            "the request body's \"messages\" has the wrong type; send an array of objects"
        );
    }

    #[test]
    fn every_truncation_of_a_body_is_refused() {
        for (api, body) in BODIES {
            render(api, body.as_bytes());
            for length in 0..body.len() {
                refuse(api, &body.as_bytes()[..length]);
            }
        }
    }

    #[test]
    fn deep_nesting_is_refused_wherever_it_is() {
        for field in ["messages", "tools", "x", "sampling_params", "metadata"] {
            for bracket in ["[", "{\"a\":", "[{\"content\":"] {
                let body = format!("{{\"{field}\":{}", bracket.repeat(1 << 16));
                let error = refuse(Api::ChatCompletions, body.as_bytes());
                assert!(!matches!(error, ParseError::Missing { .. }), "{field}: {error}");
            }
        }
    }

    /// A message in the forms that clients write.
    fn message() -> impl Strategy<Value = Value> {
        let content = prop_oneof![
            any::<String>().prop_map(Value::from),
            Just(Value::Null),
            prop::collection::vec(
                prop_oneof![
                    any::<String>().prop_map(|text| json!({"type": "text", "text": text})),
                    "[a-z]{0,8}".prop_map(|url| json!({"type": "image_url", "image_url": {"url": url}})),
                ],
                0..3
            )
            .prop_map(Value::from),
        ];
        (prop::sample::select(vec!["system", "user", "assistant", "tool"]), content, any::<Option<String>>())
            .prop_map(|(role, content, call)| {
                let mut message = json!({"role": role, "content": content});
                if let Some(arguments) = call {
                    message["tool_calls"] = json!([{"id": "1", "function": {"arguments": arguments}}]);
                }
                message
            })
    }

    proptest! {
        /// Invariant: The rendering of a conversation's next turn begins with the bytes of this one.
        #[test]
        fn the_next_turn_begins_with_the_bytes_of_this_one(
            messages in prop::collection::vec(message(), 1..6), turn in any::<prop::sample::Index>(), tools: bool
        ) {
            let turn = turn.index(messages.len());
            let body = |messages: &[Value]| {
                let mut body = json!({"model": "m", "messages": messages});
                if tools {
                    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
                }
                chat(&body.to_string())
            };
            let (now, next) = (body(&messages[..turn]), body(&messages));
            prop_assert!(next.starts_with(&now) && next.len() > now.len());
        }

        #[test]
        fn layout_and_escaping_do_not_show(messages in prop::collection::vec(message(), 0..4)) {
            let body = json!({"messages": messages, "tools": [{"name": "é\n"}]});
            let dense = body.to_string();
            let pretty = serde_json::to_string_pretty(&body).expect("serde writes its own values");
            // Everything beyond ASCII escaped, as by Python's json module.
            let escaped: String = dense
                .chars()
                .map(|c| if c.is_ascii() { c.to_string() } else {
                    c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
                })
                .collect();
            prop_assert_eq!(chat(&pretty), chat(&dense));
            prop_assert_eq!(chat(&escaped), chat(&dense));
        }

        /// Invariant: No input makes a decoder panic.
        ///
        /// Also held by `any_text_is_scanned_without_a_panic`, `any_bytes_are_searched_without_a_panic`,
        /// `any_text_is_read_without_a_panic`.
        #[test]
        fn any_bytes_are_parsed_or_refused_without_a_panic(
            api in prop::sample::select(Api::ALL.to_vec()), body: Vec<u8>
        ) {
            let mut prompt = Vec::new();
            prop_assert!(parse(api, &body, &mut prompt).is_err(), "random bytes are not an object with a prompt");
        }

        #[test]
        fn a_damaged_body_is_accepted_only_when_serde_accepts_it(
            (api, body) in prop::sample::select(BODIES.to_vec()), at in any::<prop::sample::Index>(), byte: u8
        ) {
            let mut body = body.as_bytes().to_vec();
            let at = at.index(body.len());
            body[at] = byte;
            let mut prompt = Vec::new();
            if parse(api, &body, &mut prompt).is_ok() {
                let again = serde_json::from_slice::<serde::de::IgnoredAny>(&body);
                prop_assert!(again.is_ok(), "{:?}", String::from_utf8_lossy(&body));
                prop_assert!(prompt.len() <= 4 * body.len());
            }
        }
    }
}
