//! One chunk of a streamed completion or chat: read, and rewritten as part of another stream.

use std::borrow::Cow;

use super::Unfit;
use crate::api::Api;
use crate::json::{JsonError, Kind, Scanner};

/// The content of a chunk, as far as resuming needs it.
#[derive(Debug, Default)]
pub(super) struct Chunk<'a> {
    /// The complete chunk.
    json: &'a str,
    id: &'a str,
    created: &'a str,
    model: &'a str,
    /// Number of choices: one, or none in a chunk that only reports usage.
    choices: u32,
    /// It contains the role.
    pub(super) role: bool,
    /// The text that it adds.
    pub(super) text: Cow<'a, str>,
    /// Bytes of its text that the client already has.
    swallowed: usize,
    /// Number of its token ids that the client already has.
    swallowed_ids: usize,
    /// It contains a finish reason.
    pub(super) finished: bool,
    /// It contains reasoning.
    pub(super) reasons: bool,
    /// It contains a tool call or other content beside text.
    pub(super) calls: bool,
    ids: Option<Vec<u32>>,
    prompt_ids: Option<Vec<u32>>,
    usage: Option<Counted>,
}

/// The counts in a usage object.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    prompt: u32,
    completion: u32,
}

/// Fields that are the same in all chunks of a stream, from its first chunk.
#[derive(Debug)]
pub(super) struct Head {
    id: String,
    created: String,
    model: String,
}

/// Tokens of the answer, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    /// Prompt tokens of the request, if the engine reported them.
    pub(super) prompt: Option<u32>,
    /// Tokens whose text the client has. A lower bound: where chunks have neither usage nor ids, one per chunk.
    pub(super) sent: u32,
    /// The last of them, whose text is only whitespace.
    pub(super) blank: u32,
    /// Later tokens without text: parts of a character, or held back by the engine.
    pending: u32,
    /// Output tokens in this stream's last usage.
    counted: u32,
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    pending_ids: Vec<u32>,
    /// A chunk had text without ids.
    ids_lacking: bool,
}

/// How a resumed stream is joined to the previous one.
#[derive(Debug)]
pub(super) struct Seam {
    /// Text that the client already has and the engine will generate again.
    pub(super) text: String,
    /// Token ids that the client already has and the engine will generate again.
    pub(super) ids: Vec<u32>,
    /// Prompt tokens of the request, if the first engine reported them.
    pub(super) prompt_tokens: Option<u32>,
    /// Tokens of the answer that are in this stream's prompt.
    pub(super) before_tokens: u32,
    /// The client already has the prompt's token ids, or this stream's prompt differs from the request's.
    pub(super) prompt_sent: bool,
    /// The chunks are those of a completion, while the client's stream is a chat.
    pub(super) from_completion: bool,
}

// === impl Chunk ===

impl<'a> Chunk<'a> {
    /// Reads a chunk of an answer to `api`.
    pub(super) fn read(data: &'a [u8], api: Api) -> Result<Self, Unfit> {
        let json = std::str::from_utf8(data).map_err(|_| Unfit::Chunk)?.trim_ascii();
        let mut chunk = Self { json, ..Self::default() };
        let mut scanner = Scanner::new(json);
        let failed = chunk.read_top(&mut scanner, api == Api::ChatCompletions).map_err(|_| Unfit::Chunk)?;
        scanner.end().map_err(|_| Unfit::Chunk)?;
        match failed {
            true => Err(Unfit::Error),
            false if chunk.choices > 1 || chunk.id.is_empty() => Err(Unfit::Chunk),
            false => Ok(chunk),
        }
    }

    /// Reads the top level; returns whether it is an error.
    fn read_top(&mut self, scanner: &mut Scanner<'a>, chat: bool) -> Result<bool, JsonError> {
        let mut failed = false;
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            match &*key.decode() {
                "id" => self.id = scanner.skip()?,
                "created" => self.created = scanner.skip()?,
                "model" => self.model = scanner.skip()?,
                "choices" if kind == Kind::Array => {
                    let mut walk = scanner.array()?;
                    while walk.item(scanner)? {
                        self.choices += 1;
                        self.read_choice(scanner, chat)?;
                    }
                }
                "usage" if kind == Kind::Object => self.usage = Some(Counted::read(scanner)?),
                "prompt_token_ids" if kind == Kind::Array => self.prompt_ids = Some(ids(scanner)?),
                "error" => {
                    failed |= kind != Kind::Null;
                    scanner.skip()?;
                }
                _ => drop(scanner.skip()?),
            }
        }
        Ok(failed)
    }

    fn read_choice(&mut self, scanner: &mut Scanner<'a>, chat: bool) -> Result<(), JsonError> {
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            match &*key.decode() {
                "text" if !chat && kind == Kind::String => self.text = scanner.string()?.decode(),
                "delta" if chat && kind == Kind::Object => self.read_delta(scanner)?,
                "finish_reason" => {
                    self.finished |= kind != Kind::Null;
                    scanner.skip()?;
                }
                // Only a choice beyond the first has an index other than 0.
                "index" => self.choices += u32::from(scanner.skip()? != "0"),
                "token_ids" if kind == Kind::Array => self.ids = Some(ids(scanner)?),
                "prompt_token_ids" if kind == Kind::Array => self.prompt_ids = Some(ids(scanner)?),
                "logprobs" => self.calls |= !is_nothing(scanner.skip()?),
                _ => drop(scanner.skip()?),
            }
        }
        Ok(())
    }

    fn read_delta(&mut self, scanner: &mut Scanner<'a>) -> Result<(), JsonError> {
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            match &*key.decode() {
                "role" => {
                    self.role = true;
                    scanner.skip()?;
                }
                "content" if kind == Kind::String => self.text = scanner.string()?.decode(),
                "reasoning" | "reasoning_content" => self.reasons |= !is_nothing(scanner.skip()?),
                // Tool calls, function calls, refusals, audio and any other content.
                _ => self.calls |= !is_nothing(scanner.skip()?),
            }
        }
        Ok(())
    }

    /// Whether the chunk can be dropped, because the client already has its text or ids, or its role.
    pub(super) fn says_nothing(&self, role_sent: bool) -> bool {
        let may_go = (role_sent || !self.role) && (self.role || self.swallowed > 0 || self.swallowed_ids > 0);
        let has_ids = self.ids.as_ref().is_some_and(|ids| ids.len() > self.swallowed_ids);
        let silent = self.text.is_empty() && !has_ids && !self.finished && !self.calls && !self.reasons;
        may_go && silent && self.choices == 1
    }

    /// Appends it as an event of the stream that began with `head`.
    pub(super) fn write(&self, head: &Head, seam: &Seam, role_sent: bool, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(b"data: ");
        // The chunk was read before, so it is valid.
        if self.write_top(head, seam, role_sent, out).is_err() {
            out.truncate(start);
            return;
        }
        out.extend_from_slice(b"\n\n");
    }

    fn write_top(
        &self,
        head: &Head,
        seam: &Seam,
        role_sent: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), JsonError> {
        let mut object = Object::open(out);
        let scanner = &mut Scanner::new(self.json);
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            let value = match &*key.decode() {
                "choices" if kind == Kind::Array => {
                    object.key("choices").push(b'[');
                    let mut walk = scanner.array()?;
                    while walk.item(scanner)? {
                        self.write_choice(scanner, seam, role_sent, object.out)?;
                    }
                    object.out.push(b']');
                    continue;
                }
                "usage" if kind == Kind::Object => {
                    self.write_usage(scanner, seam, object.key("usage"))?;
                    continue;
                }
                // They describe a prompt other than the client's.
                "prompt_token_ids" | "prompt_text" if seam.prompt_sent => {
                    scanner.skip()?;
                    continue;
                }
                "id" => scanner.skip().map(|_| &*head.id)?,
                "created" => scanner.skip().map(|_| &*head.created)?,
                "model" => scanner.skip().map(|_| &*head.model)?,
                "object" if seam.from_completion => scanner.skip().map(|_| "\"chat.completion.chunk\"")?,
                _ => scanner.skip()?,
            };
            object.raw(key.raw(), value);
        }
        object.close();
        Ok(())
    }

    fn write_choice(
        &self,
        scanner: &mut Scanner<'_>,
        seam: &Seam,
        role_sent: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), JsonError> {
        let mut object = Object::open(out);
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            match &*key.decode() {
                "text" if kind == Kind::String => {
                    let value = scanner.skip()?;
                    if seam.from_completion {
                        let mut delta = Object::open(object.key("delta"));
                        if !role_sent {
                            delta.raw("role", "\"assistant\"");
                        }
                        self.write_text(value, delta.key("content"));
                        delta.close();
                    } else {
                        self.write_text(value, object.key("text"));
                    }
                }
                "delta" if kind == Kind::Object => {
                    let mut delta = Object::open(object.key("delta"));
                    let mut walk = scanner.object()?;
                    while let Some(key) = walk.key(scanner)? {
                        let kind = scanner.peek()?;
                        let value = scanner.skip()?;
                        match &*key.decode() {
                            "role" if role_sent => {}
                            "content" if kind == Kind::String => {
                                self.write_text(value, delta.key("content"));
                            }
                            _ => delta.raw(key.raw(), value),
                        }
                    }
                    delta.close();
                }
                "prompt_token_ids" if seam.prompt_sent => drop(scanner.skip()?),
                "token_ids" if self.swallowed_ids > 0 => {
                    scanner.skip()?;
                    let ids = self.ids.as_deref().unwrap_or_default();
                    write_ids(&ids[self.swallowed_ids..], object.key("token_ids"));
                }
                _ => object.raw(key.raw(), scanner.skip()?),
            }
        }
        object.close();
        Ok(())
    }

    /// Writes its text: unchanged, or the part that the client does not have.
    fn write_text(&self, written: &str, out: &mut Vec<u8>) {
        if self.swallowed == 0 {
            out.extend_from_slice(written.as_bytes());
        } else {
            string(&self.text, out);
        }
    }

    /// Writes usage for the whole answer: this stream's prompt contains the earlier part.
    fn write_usage(
        &self,
        scanner: &mut Scanner<'_>,
        seam: &Seam,
        out: &mut Vec<u8>,
    ) -> Result<(), JsonError> {
        let Counted { prompt, completion } = self.usage.unwrap_or_default();
        let total = prompt.saturating_add(completion);
        let prompt = seam.prompt_tokens.unwrap_or(prompt.saturating_sub(seam.before_tokens)).min(total);
        let mut object = Object::open(out);
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let kind = scanner.peek()?;
            match &*key.decode() {
                "prompt_tokens" => count(scanner, object.key("prompt_tokens"), |_| prompt)?,
                "completion_tokens" => count(scanner, object.key("completion_tokens"), |_| total - prompt)?,
                "total_tokens" => count(scanner, object.key("total_tokens"), |_| total)?,
                "prompt_tokens_details" if kind == Kind::Object => {
                    let mut details = Object::open(object.key("prompt_tokens_details"));
                    let mut walk = scanner.object()?;
                    while let Some(key) = walk.key(scanner)? {
                        if scanner.peek()? == Kind::Number {
                            count(scanner, details.key(key.raw()), |told| told.min(prompt))?;
                        } else {
                            details.raw(key.raw(), scanner.skip()?);
                        }
                    }
                    details.close();
                }
                _ => object.raw(key.raw(), scanner.skip()?),
            }
        }
        object.close();
        Ok(())
    }
}

impl Counted {
    fn read(scanner: &mut Scanner<'_>) -> Result<Self, JsonError> {
        let mut counted = Self::default();
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let number = scanner.peek()? == Kind::Number;
            match &*key.decode() {
                "prompt_tokens" if number => counted.prompt = scanner.whole()?.unwrap_or(0),
                "completion_tokens" if number => counted.completion = scanner.whole()?.unwrap_or(0),
                _ => drop(scanner.skip()?),
            }
        }
        Ok(counted)
    }
}

// === impl Head ===

impl Head {
    pub(super) fn of(chunk: &Chunk<'_>) -> Self {
        let or_null = |raw: &str| if raw.is_empty() { "null" } else { raw }.to_owned();
        Self { id: or_null(chunk.id), created: or_null(chunk.created), model: or_null(chunk.model) }
    }

    /// The final chunk of an answer that has reached the request's token limit.
    pub(super) fn last_chunk(&self, api: Api) -> Vec<u8> {
        let (object, said) = match api {
            Api::ChatCompletions => ("chat.completion.chunk", "\"delta\":{}"),
            _ => ("text_completion", "\"text\":\"\""),
        };
        let Self { id, created, model } = self;
        format!(
            "data: {{\"id\":{id},\"object\":\"{object}\",\"created\":{created},\"model\":{model},\"choices\":\
             [{{\"index\":0,{said},\"logprobs\":null,\"finish_reason\":\"length\"}}]}}\n\ndata: [DONE]\n\n"
        )
        .into_bytes()
    }
}

// === impl Tokens ===

impl Tokens {
    /// Counts a chunk after the client's existing text was removed from it. `whole` is whether its stream's prompt is
    /// the request's.
    pub(super) fn take(&mut self, chunk: &Chunk<'_>, whole: bool) {
        if whole {
            let told = chunk.prompt_ids.as_ref().map(|ids| len(ids));
            self.prompt = self.prompt.or(told).or(chunk.usage.map(|usage| usage.prompt));
            if let Some(ids) = &chunk.prompt_ids {
                self.prompt_ids.clone_from(ids);
            }
        }
        let speaks = chunk.choices > 0 && !(chunk.role && chunk.text.is_empty() && chunk.swallowed == 0);
        let came = match (&chunk.usage, &chunk.ids) {
            (Some(usage), _) => usage.completion.saturating_sub(self.counted),
            (None, Some(ids)) => len(ids),
            (None, None) => u32::from(speaks),
        };
        self.pending = self.pending.saturating_add(came);
        self.counted = chunk.usage.map_or(self.counted, |usage| usage.completion.max(self.counted));
        match &chunk.ids {
            Some(ids) if !ids.is_empty() || chunk.text.is_empty() => self.pending_ids.extend_from_slice(ids),
            _ => self.ids_lacking |= speaks,
        }
        if !chunk.text.is_empty() {
            let came = std::mem::take(&mut self.pending);
            self.sent = self.sent.saturating_add(came);
            let blank = chunk.text.trim().is_empty();
            self.blank = if blank { self.blank.saturating_add(came) } else { 0 };
            self.ids.append(&mut self.pending_ids);
        }
    }

    /// Starts another stream, whose prompt contains `tokens` tokens of the answer, as ids or as text.
    pub(super) fn resume(&mut self, tokens: u32, by_ids: bool) {
        (self.sent, self.blank, self.pending, self.counted) = (tokens, 0, 0, 0);
        self.pending_ids.clear();
        self.ids_lacking |= !by_ids && tokens > 0;
    }

    /// Takes the ids whose text has not arrived.
    pub(super) fn take_pending_ids(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.pending_ids)
    }

    /// Whether the client has the request's prompt as token ids.
    pub(super) fn knows_prompt_ids(&self) -> bool {
        !self.prompt_ids.is_empty()
    }

    /// Whether the client gets token ids.
    pub(super) fn sends_ids(&self) -> bool {
        !self.ids.is_empty()
    }

    /// The ids of the prompt and of the client's part of the answer, if all are known.
    pub(super) fn all_ids(&self) -> Option<(&[u32], &[u32])> {
        let told = !self.ids_lacking && !self.prompt_ids.is_empty() && !self.ids.is_empty();
        told.then_some((&self.prompt_ids, &self.ids))
    }

    /// Bytes of stored ids.
    pub(super) fn bytes(&self) -> usize {
        (self.prompt_ids.len() + self.ids.len() + self.pending_ids.len()) * size_of::<u32>()
    }
}

// === impl Seam ===

impl Seam {
    /// Removes the text and ids that the client already has from a chunk. If the engine generates something else, its
    /// output is kept.
    pub(super) fn swallow(&mut self, chunk: &mut Chunk<'_>) {
        let mut common = common(self.text.as_bytes(), chunk.text.as_bytes());
        while !chunk.text.is_char_boundary(common) {
            common -= 1;
        }
        if common < self.text.len() && common < chunk.text.len() {
            self.text.clear();
        } else {
            self.text.drain(..common);
        }
        if common > 0 {
            chunk.swallowed = common;
            chunk.text = chunk.text[common..].to_owned().into();
        }
        let ids = chunk.ids.as_deref().unwrap_or_default();
        chunk.swallowed_ids = self::common(&self.ids, ids);
        if chunk.swallowed_ids < ids.len() {
            self.ids.clear();
        } else {
            self.ids.drain(..chunk.swallowed_ids);
        }
    }
}

/// Length of the common prefix of two sequences.
fn common<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// A JSON object being written.
pub(super) struct Object<'out> {
    out: &'out mut Vec<u8>,
    first: bool,
}

// === impl Object ===

impl<'out> Object<'out> {
    pub(super) fn open(out: &'out mut Vec<u8>) -> Self {
        out.push(b'{');
        Self { out, first: true }
    }

    /// Writes a key in its JSON form and returns the output for its value.
    pub(super) fn key(&mut self, raw: &str) -> &mut Vec<u8> {
        if !std::mem::take(&mut self.first) {
            self.out.push(b',');
        }
        self.out.push(b'"');
        self.out.extend_from_slice(raw.as_bytes());
        self.out.extend_from_slice(b"\":");
        self.out
    }

    pub(super) fn raw(&mut self, key: &str, value: &str) {
        self.key(key).extend_from_slice(value.as_bytes());
    }

    pub(super) fn close(self) {
        self.out.push(b'}');
    }
}

/// Rewrites a count; a value that is not a count is copied.
fn count(
    scanner: &mut Scanner<'_>,
    out: &mut Vec<u8>,
    change: impl FnOnce(u32) -> u32,
) -> Result<(), JsonError> {
    if scanner.peek()? == Kind::Number
        && let Some(told) = scanner.clone().whole()?
    {
        scanner.skip()?;
        number(change(told), out);
    } else {
        out.extend_from_slice(scanner.skip()?.as_bytes());
    }
    Ok(())
}

/// Token ids; empty if one of them is invalid.
fn ids(scanner: &mut Scanner<'_>) -> Result<Vec<u32>, JsonError> {
    let (mut ids, mut sound) = (Vec::new(), true);
    let mut walk = scanner.array()?;
    while walk.item(scanner)? {
        match scanner.peek()? {
            Kind::Number => match scanner.whole()? {
                Some(id) => ids.push(id),
                None => sound = false,
            },
            _ => {
                scanner.skip()?;
                sound = false;
            }
        }
    }
    if !sound {
        ids.clear();
    }
    Ok(ids)
}

fn len(ids: &[u32]) -> u32 {
    u32::try_from(ids.len()).unwrap_or(u32::MAX)
}

/// Whether a JSON value is equivalent to its absence.
pub(super) fn is_nothing(raw: &str) -> bool {
    matches!(raw, "null" | "false" | "\"\"" | "[]" | "{}")
        || raw.parse::<f64>().is_ok_and(|number| number == 0.0)
}

/// Appends a number.
pub(super) fn number(number: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(number.to_string().as_bytes());
}

/// Appends a text as a JSON string.
pub(super) fn string(text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(serde_json::Value::from(text).to_string().as_bytes());
}

/// Appends token ids as an array.
pub(super) fn write_ids<'a>(ids: impl IntoIterator<Item = &'a u32>, out: &mut Vec<u8>) {
    out.push(b'[');
    for (index, id) in ids.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        number(*id, out);
    }
    out.push(b']');
}
