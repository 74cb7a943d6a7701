//! A request body in one pass: who it is for, its limits, and its prompt rendered for prefix matching.
//!
//! The rendering is not a chat template's text. It only has to grow as the engine's prompt grows: it lists what the
//! prompt is made of, in the order templates print it, so that a conversation's next turn begins with the bytes of
//! this one, and bodies that differ in whitespace, escaping or the order of top-level and message keys render alike.
//! Bytes that no UTF-8 text holds (0xF5 and above) mark where things begin, so no content can imitate structure.
//!
//! Chat: tools, then each message as role, name, call id, reasoning, content, calls, output. Anthropic's `system`
//! and OpenAI's `instructions` come out as a system message. Text parts are decoded and parts of other types, tools
//! and calls are written compactly. Prompts given as token ids become four little-endian bytes each.

use std::borrow::Cow;

use thiserror::Error;

use crate::api::Api;
use crate::json::{DEPTH_MAX, JsonError, Kind, Scanner};

/// Longer session names are ignored: they would be kept per session, and cutting them could merge two sessions.
pub const SESSION_BYTES_MAX: usize = 256;

/// A message begins.
const MESSAGE: u8 = 0xFF;
/// The tool list begins.
const TOOLS: u8 = 0xFE;
/// Another content part, or another prompt of a batch, begins.
const NEXT: u8 = 0xFD;
/// The section of rank 0 of a message begins; the following ranks have the following bytes.
const SECTION: u8 = 0xF5;

/// A system block that Claude Code fills with a hash per request. vLLM leaves it out of the prompt for that reason
/// (`entrypoints/anthropic/serving.py`), and so must a rendering that wants to find the prefix behind it.
const ATTRIBUTION: &[u8] = b"x-anthropic-billing-header";

/// What placing a request needs to know of its body, borrowed from it where it can be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedRequest<'a> {
    /// `model`. Absence is the caller's to judge: a gateway with one pool may not need it.
    pub model: Option<Cow<'a, str>>,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// Most output tokens wanted: `max_completion_tokens`, `max_output_tokens`, `max_tokens` or SGLang's
    /// `sampling_params.max_new_tokens`. Negative ones, which some engines read as no limit, are none.
    pub output_tokens_max: Option<u32>,
    /// `cache_salt`: requests with different salts must not share cached prefixes (vLLM).
    pub cache_salt: Option<Cow<'a, str>>,
    /// SGLang's `lora_path`: the adapter, which is part of what a cached block belongs to.
    pub lora: Option<Cow<'a, str>>,
    /// The conversation this belongs to, by `session_id`, `session_params.id`, `prompt_cache_key`, `user` or
    /// Anthropic's `metadata.user_id`, the first of these that is there; at most [`SESSION_BYTES_MAX`] bytes.
    pub session: Option<Cow<'a, str>>,
    /// Prompts in the batch, at least 1; for a reranker, documents.
    pub prompts: u32,
    /// Whether some prompt is given as token ids.
    pub token_ids: bool,
}

/// Why a body cannot be placed: always the client's to mend, never worth a retry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseError {
    /// No bytes, or only whitespace.
    #[error("the request body is empty; send a JSON object")]
    Empty,
    /// The body is not UTF-8.
    #[error("the request body is not UTF-8 at byte {at}; send JSON encoded as UTF-8")]
    NotUtf8 {
        /// Offset of the first byte that is not.
        at: usize,
    },
    /// The body is not JSON, or is cut short.
    #[error("the request body is not valid JSON at byte {at}: expected {expected}")]
    Syntax {
        /// Offset of the first byte that does not fit.
        at: usize,
        /// What would have fitted.
        expected: &'static str,
    },
    /// The body nests too deeply.
    #[error("the request body nests deeper than {max} levels at byte {at}; flatten it")]
    TooDeep {
        /// Offset of the bracket that is one too many.
        at: usize,
        /// The limit.
        max: u32,
    },
    /// A top-level key that decides the placement is there twice, and the engine may read the other one.
    #[error("the request body has the key \"{key}\" again before byte {at}; send it once")]
    DuplicateKey {
        /// The key.
        key: &'static str,
        /// Offset where its second value begins.
        at: usize,
    },
    /// Nothing to run the model on.
    #[error("the request body has no \"{field}\"; add it")]
    Missing {
        /// The key that usually holds it.
        field: &'static str,
    },
    /// A value of a type that no engine accepts there.
    #[error("the request body's \"{field}\" has the wrong type; send {expected}")]
    WrongType {
        /// The key.
        field: &'static str,
        /// What may be there.
        expected: &'static str,
    },
}

/// What a top-level key means. Where several keys give the same fact, the higher number wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Model,
    Stream,
    OutputTokens(u8),
    SamplingParams,
    CacheSalt,
    Lora,
    Session(u8),
    SessionParams,
    Metadata,
    Tools,
    System,
    Messages,
    Prompts,
    Documents,
}

/// Keys that mean the same on every endpoint.
const SHARED: [(&str, Field); 13] = [
    ("model", Field::Model),
    ("stream", Field::Stream),
    ("max_tokens", Field::OutputTokens(1)),
    ("max_completion_tokens", Field::OutputTokens(2)),
    ("max_output_tokens", Field::OutputTokens(2)),
    ("sampling_params", Field::SamplingParams),
    ("cache_salt", Field::CacheSalt),
    ("lora_path", Field::Lora),
    ("session_id", Field::Session(4)),
    ("session_params", Field::SessionParams),
    ("prompt_cache_key", Field::Session(2)),
    ("user", Field::Session(1)),
    ("metadata", Field::Metadata),
];

/// Keys that hold the prompt; the first is the one to ask for when none is there.
const fn prompt_fields(api: Api) -> &'static [(&'static str, Field)] {
    match api {
        Api::ChatCompletions => &[("messages", Field::Messages), ("tools", Field::Tools)],
        Api::Completions => &[("prompt", Field::Prompts), ("prompt_embeds", Field::Documents)],
        Api::Embeddings => &[("input", Field::Prompts), ("messages", Field::Messages)],
        Api::Responses => {
            &[("input", Field::Messages), ("instructions", Field::System), ("tools", Field::Tools)]
        }
        Api::Messages => {
            &[("messages", Field::Messages), ("system", Field::System), ("tools", Field::Tools)]
        }
        Api::Rerank => &[("query", Field::Prompts), ("documents", Field::Documents)],
        Api::Score => &[
            ("text_1", Field::Prompts),
            ("text_2", Field::Documents),
            ("queries", Field::Prompts),
            ("documents", Field::Documents),
            ("query", Field::Prompts),
            ("items", Field::Documents),
        ],
        // vLLM takes a prompt or messages, llama.cpp content.
        Api::Tokenize => &[
            ("prompt", Field::Prompts),
            ("messages", Field::Messages),
            ("tools", Field::Tools),
            ("content", Field::Prompts),
        ],
        Api::Detokenize => &[("tokens", Field::Prompts)],
        Api::Generate => &[("text", Field::Prompts), ("input_ids", Field::Prompts)],
    }
}

/// Reads the body of a request to `api` and leaves its rendered prompt in `prompt`, which is cleared first and never
/// grows beyond a small multiple of the body.
pub fn parse<'a>(api: Api, body: &'a [u8], prompt: &mut Vec<u8>) -> Result<ParsedRequest<'a>, ParseError> {
    prompt.clear();
    let text = match simdutf8::basic::from_utf8(body) {
        Ok(text) => text,
        Err(_) => return Err(ParseError::NotUtf8 { at: valid_up_to(body) }),
    };
    let mut reader = Reader { scanner: Scanner::new(text), out: prompt };
    if text.trim_ascii_start().is_empty() {
        return Err(ParseError::Empty);
    }

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
            reader.scanner.skip()?;
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

        let start = reader.out.len();
        match field {
            Field::Model => request.model = Some(reader.text(name)?),
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
            // A batch may name one adapter per prompt: then the list as it is written is the key.
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
            Field::Tools => {
                reader.tools()?;
                sections.place(0, start, reader.out);
            }
            Field::System => {
                reader.spoken("system")?;
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
    if found { Ok(request) } else { Err(ParseError::Missing { field: own[0].0 }) }
}

/// The slow way to the same verdict as the SIMD check, which does not say where.
fn valid_up_to(body: &[u8]) -> usize {
    std::str::from_utf8(body).map_or_else(|error| error.valid_up_to(), str::len)
}

impl From<JsonError> for ParseError {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::Syntax { at, expected } => Self::Syntax { at, expected },
            JsonError::TooDeep { at } => Self::TooDeep { at, max: DEPTH_MAX },
        }
    }
}

/// Lengths of the sections at the end of a rendering, which stay in the order of their rank however the keys come.
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
    /// Moves what was written from `start` on before the sections of higher rank. The usual order moves nothing.
    fn place(&mut self, rank: usize, start: usize, out: &mut [u8]) {
        let length = out.len() - start;
        let after: usize = self.lengths[rank + 1..].iter().sum();
        if after > 0 {
            out[start - after..].rotate_right(length);
        }
        self.lengths[rank] += length;
    }
}

/// The body ahead and the rendering behind.
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

    /// A count of tokens: whole, or written as a float as some clients do.
    fn limit(&mut self, field: &'static str) -> Result<Option<u32>, ParseError> {
        if self.scanner.peek()? != Kind::Number {
            return Err(ParseError::WrongType { field, expected: "a whole number" });
        }
        let value: f64 = self.scanner.number()?.parse().unwrap_or(-1.0);
        // The cast saturates.
        Ok((value >= 0.0).then_some(value as u32))
    }

    /// The largest `max_new_tokens` of SGLang's parameters, which are one object or one per prompt.
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
            if key.decode() == "max_new_tokens" && self.scanner.peek()? == Kind::Number {
                limit = self.limit("max_new_tokens")?;
            } else {
                self.scanner.skip()?;
            }
        }
        Ok(limit)
    }

    /// A session's name, if it is one we can use.
    fn session(&mut self) -> Result<Option<Cow<'a, str>>, ParseError> {
        if self.scanner.peek()? != Kind::String {
            self.scanner.skip()?;
            return Ok(None);
        }
        let text = self.scanner.string()?;
        // Six bytes of escape make at least one byte of text: what is longer need not be decoded.
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

    /// Tools, which templates print before any message. An empty list is none.
    fn tools(&mut self) -> Result<(), ParseError> {
        let start = self.out.len();
        self.out.push(TOOLS);
        self.scanner.compact(self.out)?;
        if self.out[start + 1..] == *b"[]" {
            self.out.truncate(start);
        }
        Ok(())
    }

    /// Content that stands outside the messages as one message of `role`.
    fn spoken(&mut self, role: &str) -> Result<(), ParseError> {
        self.out.extend_from_slice(&[MESSAGE, SECTION]);
        self.out.extend_from_slice(role.as_bytes());
        self.out.push(SECTION + CONTENT);
        self.content()
    }

    /// A list of messages or items; a plain string (Responses) is what the user says.
    fn messages(&mut self, field: &'static str) -> Result<(), ParseError> {
        let wrong = ParseError::WrongType { field, expected: "an array of objects" };
        match self.scanner.peek()? {
            Kind::String if field == "input" => return self.spoken("user"),
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

    /// One message. Of a key that is there twice the first counts: only the match suffers if an engine disagrees.
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

    /// What was said: a string, or parts.
    fn content(&mut self) -> Result<(), ParseError> {
        match self.scanner.peek()? {
            Kind::String => self.scanner.string_into(self.out)?,
            Kind::Object => self.part()?,
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
                        Kind::Object => self.part()?,
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

    /// One content part: its text if it has one, so that a part and a plain string read alike, and otherwise
    /// everything it holds.
    fn part(&mut self) -> Result<(), ParseError> {
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
                self.scanner.compact(self.out)?;
            }
        }
        if !is_text {
            self.out.push(b'}');
        }
        Ok(())
    }

    /// One prompt or a batch of them, as text or as token ids. `lead` puts a mark before the first one as well.
    fn prompts(&mut self, field: &'static str, lead: bool, token_ids: &mut bool) -> Result<u32, ParseError> {
        let wrong = ParseError::WrongType { field, expected: "a string, an array of strings or token ids" };
        if lead {
            self.out.push(NEXT);
        }
        match self.scanner.peek()? {
            Kind::String => return self.scanner.string_into(self.out).map(|()| 1).map_err(Into::into),
            Kind::Object => return self.part().map(|()| 1),
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
                Kind::Object => self.part()?,
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
        let wrong = ParseError::WrongType { field, expected: "token ids, whole numbers from 0 to 4294967295" };
        if self.scanner.peek()? != Kind::Number {
            return Err(wrong);
        }
        let id = self.scanner.whole()?.ok_or(wrong)?;
        self.out.extend_from_slice(&id.to_le_bytes());
        Ok(())
    }
}

/// Rank of a message's content among its sections.
const CONTENT: u8 = 4;
