//! Decides whether a request's answer can be resumed, and builds the body that requests the rest.

use bytes::Bytes;

use super::chunk::{Object, Tokens, is_nothing, number, string, write_ids};
use super::{EngineCapabilities, Unfit};
use crate::api::Api;
use crate::json::{JsonError, Scanner};

/// Keys with the same meaning for the rest of an answer as for the whole, both in a chat and in a completion.
const SHARED: [&str; 30] = [
    "model",
    "stream",
    "stream_options",
    "stream_interval",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "session_id",
    "prompt_cache_key",
    "cache_salt",
    "lora_path",
    "priority",
    "return_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
];

/// Keys with the same meaning for the rest, or rewritten, that a completion which continues a chat does not take over.
const OWN: [&str; 18] = [
    "verbosity",
    "prompt",
    "messages",
    "tools",
    "parallel_tool_calls",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "include_reasoning",
    "add_special_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "continue_final_message",
    "add_generation_prompt",
];

/// A request whose answer can be resumed, judging by the request alone.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) api: Api,
    /// UTF-8, a JSON object.
    body: Bytes,
    /// Limit of output tokens; `None` without a limit.
    pub(super) limit: Option<u32>,
    /// The prompt is a single text.
    text_prompt: bool,
    /// It has stop strings, so engines hold back text whose tokens they have reported.
    stops: bool,
    /// The model may call a tool.
    tools: bool,
    /// The client itself uses `continue_final_message`.
    prefilled: bool,
}

/// A request for the rest of an answer.
pub(super) struct Continuation {
    pub(super) api: Api,
    pub(super) body: Bytes,
    /// Bytes of the answer's text that it contains.
    pub(super) text_bytes: usize,
    /// Tokens of the answer that it contains.
    pub(super) tokens: u32,
    /// Its prompt consists of token ids.
    pub(super) by_ids: bool,
}

// === impl Request ===

impl Request {
    /// Reads a body as far as resuming depends on it.
    pub(super) fn read(api: Api, body: Bytes) -> Result<Self, Unfit> {
        let mut request =
            Self { api, body, limit: None, text_prompt: false, stops: false, tools: false, prefilled: false };
        match api {
            Api::Completions | Api::ChatCompletions => request.look()?,
            _ => return Err(Unfit::Kind),
        }
        Ok(request)
    }

    fn look(&mut self) -> Result<(), Unfit> {
        let body = self.body.clone();
        let scanner = &mut scanner(&body)?;
        let (mut streams, mut generation_prompt, mut calls) = (false, true, true);
        let (mut limit, mut answer_limit) = (Limit::Absent, Limit::Absent);
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let (key, value) = (key.decode(), scanner.skip()?);
            match (&*key, value) {
                ("prompt", _) => self.text_prompt = value.starts_with('"'),
                ("max_tokens", _) => limit = Limit::read(value).ok_or_else(|| Unfit::Key(key.into()))?,
                ("max_completion_tokens", _) => {
                    answer_limit = Limit::read(value).ok_or_else(|| Unfit::Key(key.into()))?;
                }
                ("stream", _) => streams = value == "true",
                ("continue_final_message", _) => self.prefilled = value == "true",
                ("add_generation_prompt", _) => generation_prompt = value != "false",
                // Hidden reasoning may have preceded the text.
                ("include_reasoning", "false") => return Err(Unfit::Key(key.into())),
                ("stop", _) => self.stops = !is_nothing(value),
                ("tools", _) => self.tools = !is_nothing(value),
                ("messages", _) if !value.starts_with('[') => return Err(Unfit::Body),
                ("tool_choice", "\"none\"") => calls = false,
                ("tool_choice", "\"auto\"") | ("n" | "best_of", "1") => {}
                ("response_format", _) if is_plain_text(value) => {}
                (known, _) if SHARED.contains(&known) || OWN.contains(&known) => {}
                _ if is_nothing(value) => {}
                _ => return Err(Unfit::Key(key.into())),
            }
        }
        scanner.end()?;
        self.tools &= calls;
        let limit = if answer_limit == Limit::Absent { limit } else { answer_limit };
        self.limit = limit.tokens();
        match self.api {
            _ if !streams => Err(Unfit::Kind),
            Api::Completions if limit == Limit::Absent => Err(Unfit::Limit),
            Api::ChatCompletions if !generation_prompt && !self.prefilled => {
                Err(Unfit::Key("add_generation_prompt".into()))
            }
            _ => Ok(()),
        }
    }

    /// The request for what follows `text`.
    pub(super) fn continuation(
        &self,
        text: &str,
        tokens: &Tokens,
        means: EngineCapabilities,
    ) -> Result<Continuation, Unfit> {
        let chat = self.api == Api::ChatCompletions;
        if tokens.sends_ids() {
            let (prompt, said) = tokens.all_ids().filter(|_| !self.stops).ok_or(Unfit::Ids)?;
            let limit = self.limit_by_ids(prompt.len(), tokens.sent, means).ok_or(Unfit::Ids)?;
            let body = self.rewritten(Rest::Ids { prompt, said, limit }, tokens.sent)?;
            let (api, tokens) = (Api::Completions, tokens.sent);
            return Ok(Continuation { api, body, text_bytes: text.len(), tokens, by_ids: true });
        }
        // Templates may trim the end of a message; the engine generates trailing whitespace again.
        let kept = if chat { text.trim_end() } else { text };
        let (body, tokens) = if kept.is_empty() {
            (self.body.clone(), 0)
        } else if chat {
            if !means.continues_messages {
                return Err(Unfit::Engine);
            }
            let sent = tokens.sent - tokens.blank;
            (self.rewritten(Rest::Message(kept), sent)?, sent)
        } else {
            if !self.text_prompt {
                return Err(Unfit::Prompt);
            }
            (self.rewritten(Rest::Text(kept), tokens.sent)?, tokens.sent)
        };
        Ok(Continuation { api: self.api, body, text_bytes: kept.len(), tokens, by_ids: false })
    }

    /// Output limit of a completion that continues a chat after `sent` tokens. `None` if it is unknown, or if a tool
    /// may be called: only the engine's chat endpoint distinguishes a call from text.
    fn limit_by_ids(&self, prompt_tokens: usize, sent: u32, means: EngineCapabilities) -> Option<u32> {
        if self.api == Api::Completions {
            return Some(0);
        }
        let room = || means.context_tokens?.checked_sub(u32::try_from(prompt_tokens).ok()?);
        let limit = self.limit.or_else(room)?.checked_sub(sent)?;
        (limit > 0 && !self.tools).then_some(limit)
    }

    /// The body with another prompt, and with limits reduced by `sent` tokens.
    fn rewritten(&self, rest: Rest<'_>, sent: u32) -> Result<Bytes, Unfit> {
        let chat_by_ids = self.api == Api::ChatCompletions && matches!(rest, Rest::Ids { .. });
        let mut out = Vec::with_capacity(self.body.len() + 64 + rest.len());
        let mut object = Object::open(&mut out);
        let scanner = &mut scanner(&self.body)?;
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let (raw, value) = (key.raw(), scanner.skip()?);
            match &*key.decode() {
                "max_tokens" | "max_completion_tokens" if !chat_by_ids => match value.parse::<u32>() {
                    Ok(limit) => number(limit.saturating_sub(sent).max(1), object.key(raw)),
                    Err(_) => object.raw(raw, value),
                },
                "min_tokens" => match value.parse::<u32>() {
                    Ok(least) => number(least.saturating_sub(sent), object.key(raw)),
                    Err(_) => object.raw(raw, value),
                },
                "prompt" | "messages" => match rest {
                    Rest::Ids { prompt, said, .. } => {
                        write_ids(prompt.iter().chain(said), object.key("prompt"))
                    }
                    Rest::Text(text) => append(value, text, object.key(raw)),
                    Rest::Message(text) if self.prefilled => write_longer(value, text, object.key(raw))?,
                    Rest::Message(text) => write_answered(value, text, object.key(raw)),
                },
                "continue_final_message" | "add_generation_prompt" if self.api == Api::ChatCompletions => {}
                name if chat_by_ids && !SHARED.contains(&name) => {}
                _ => object.raw(raw, value),
            }
        }
        match rest {
            Rest::Ids { limit, .. } if chat_by_ids => number(limit, object.key("max_tokens")),
            Rest::Message(_) => {
                object.raw("continue_final_message", "true");
                object.raw("add_generation_prompt", "false");
            }
            _ => {}
        }
        object.close();
        Ok(out.into())
    }
}

/// How the rest of an answer is requested.
#[derive(Clone, Copy)]
enum Rest<'a> {
    /// By token ids of the prompt and the answer so far; for a chat with an output limit.
    Ids { prompt: &'a [u32], said: &'a [u32], limit: u32 },
    /// By text appended to the prompt.
    Text(&'a str),
    /// By the assistant's message so far.
    Message(&'a str),
}

// === impl Rest ===

impl Rest<'_> {
    /// Approximate number of bytes it adds to a body.
    fn len(self) -> usize {
        match self {
            Self::Ids { prompt, said, .. } => 7 * (prompt.len() + said.len()),
            Self::Text(text) | Self::Message(text) => text.len() + text.len() / 8,
        }
    }
}

/// A limit as set in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Absent,
    /// llama.cpp's -1.
    Endless,
    Tokens(u32),
}

// === impl Limit ===

impl Limit {
    fn read(value: &str) -> Option<Self> {
        match value.parse::<i64>() {
            _ if value == "null" => Some(Self::Absent),
            Ok(limit) => Some(u32::try_from(limit).map_or(Self::Endless, Self::Tokens)),
            Err(_) => None,
        }
    }

    fn tokens(self) -> Option<u32> {
        match self {
            Self::Tokens(limit) => Some(limit),
            Self::Absent | Self::Endless => None,
        }
    }
}

/// A scanner of a body.
fn scanner(body: &[u8]) -> Result<Scanner<'_>, Unfit> {
    std::str::from_utf8(body).map(Scanner::new).map_err(|_| Unfit::Body)
}

impl From<JsonError> for Unfit {
    fn from(_: JsonError) -> Self {
        Self::Body
    }
}

/// Whether a response format has no effect.
fn is_plain_text(value: &str) -> bool {
    let mut scanner = Scanner::new(value);
    let mut read = || {
        let mut walk = scanner.object()?;
        let mut plain = true;
        while let Some(key) = walk.key(&mut scanner)? {
            plain &= key.decode() == "type" && scanner.skip()? == "\"text\"";
        }
        Ok::<_, JsonError>(plain)
    };
    read().unwrap_or(false)
}

/// Writes a JSON string with text appended.
fn append(written: &str, text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(&written.as_bytes()[..written.len() - 1]);
    let at = out.len();
    string(text, out);
    out.remove(at);
}

/// Writes the messages with the assistant's message appended.
fn write_answered(messages: &str, text: &str, out: &mut Vec<u8>) {
    let before = messages[..messages.len() - 1].trim_end();
    out.extend_from_slice(before.as_bytes());
    if !before.ends_with('[') {
        out.push(b',');
    }
    out.extend_from_slice(b"{\"role\":\"assistant\",\"content\":");
    string(text, out);
    out.extend_from_slice(b"}]");
}

/// Writes the messages with text appended to the last one.
fn write_longer(messages: &str, text: &str, out: &mut Vec<u8>) -> Result<(), Unfit> {
    let scanner = &mut Scanner::new(messages);
    let mut last = "";
    let mut walk = scanner.array()?;
    while walk.item(scanner)? {
        last = scanner.skip()?;
    }
    let end = scanner.at() - 1;
    let before = messages[..end].trim_end();
    let scanner = &mut Scanner::new(last);
    let mut content = false;
    out.extend_from_slice(&before.as_bytes()[..before.len() - last.len()]);
    let mut object = Object::open(out);
    let mut walk = scanner.object()?;
    while let Some(key) = walk.key(scanner)? {
        let (raw, value) = (key.raw(), scanner.skip()?);
        if key.decode() == "content" && value.starts_with('"') {
            content = true;
            append(value, text, object.key(raw));
        } else {
            object.raw(raw, value);
        }
    }
    object.close();
    out.push(b']');
    if content { Ok(()) } else { Err(Unfit::Prompt) }
}
