//! Resumes a broken stream on another engine: keeps a transcript of the stream, builds the request for the rest, and
//! rewrites the rest so that the client sees one stream.
//!
//! A [`Transcript`] accompanies one stream of a completion or a chat. Until the stream breaks it only reads: complete
//! events pass unchanged, and a partial event is held until it is complete, because a partial event cannot be
//! retracted. [`Transcript::resume`] then returns how to continue: with another request, whose stream is passed through
//! the same transcript, or with a few bytes if only the end was missing.
//!
//! The new prompt is `prompt + text`, for a chat by `continue_final_message` (vLLM, SGLang). Where the engine reported
//! its token ids (`return_token_ids`, vLLM), the prompt consists of those, and the rest is exactly what greedy decoding
//! would have generated; text may be tokenized differently from the original tokens. Requests whose answer depends on
//! more than the preceding tokens are not resumed: see [`Unfit`].

mod chunk;
mod request;

use bytes::Bytes;
use thiserror::Error;

use self::chunk::{Chunk, Head, Seam, Tokens};
use self::request::Request;
use crate::api::Api;
use crate::sse::{Edge, event_end, name_and_data};

/// Why an answer cannot be resumed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unfit {
    /// Neither a streamed completion nor a streamed chat.
    #[error("only streamed completions and chat completions can be continued")]
    Kind,
    /// The body is not JSON of these APIs.
    #[error("cannot parse the request body")]
    Body,
    /// The body has a field that a second request cannot take over, or that is unknown.
    #[error("the request sets \"{0}\": no second request can continue its answer")]
    Key(String),
    /// Several prompts, or token ids that would have to be followed by text.
    #[error("the prompt is not a single text, and the engine reported no token ids")]
    Prompt,
    /// A completion without `max_tokens`: the engine's own limit is unknown, and so is the remaining number of tokens.
    #[error("the request sets no max_tokens, and the engine's default is unknown")]
    Limit,
    /// The client gets token ids, and the rest cannot be requested by ids.
    #[error("the client receives token ids, and the rest of the answer cannot be requested by token ids")]
    Ids,
    /// The engine is not known to support `continue_final_message`.
    #[error("the engine is not known to support continue_final_message")]
    Engine,
    /// A tool call has begun, or other content beside text.
    #[error("the answer contains a tool call or other content beside text")]
    ToolCall,
    /// The model reasons before it answers.
    #[error("the answer contains reasoning, which no request can repeat")]
    Reasoning,
    /// A chunk that does not belong to a completion with one choice.
    #[error("the stream is not one completion with one choice")]
    Chunk,
    /// The stream reported an engine error.
    #[error("the engine reported an error in the stream")]
    Error,
    /// The answer exceeds the transcript's limit.
    #[error("the answer exceeds {0} bytes")]
    TooLong(usize),
}

/// Capabilities of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCapabilities {
    /// It supports `continue_final_message` correctly.
    pub continues_messages: bool,
    /// Its maximum of prompt and output tokens together, if known.
    pub context_tokens: Option<u32>,
}

/// How to continue a broken stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send this request and pass its answer's body through the transcript.
    Ask {
        /// The API.
        api: Api,
        /// The body.
        body: Bytes,
    },
    /// The answer was complete: send these bytes, possibly none, and end the stream normally.
    Close(Bytes),
}

/// Transcript of one client stream, possibly from several engine streams.
#[derive(Debug)]
pub struct Transcript {
    request: Request,
    bytes_max: usize,
    unfit: Option<Unfit>,
    /// The start of an incomplete event.
    held: Vec<u8>,
    edge: Edge,
    head: Option<Head>,
    /// Whether the client has the role.
    role_sent: bool,
    text: String,
    tokens: Tokens,
    finished: bool,
    done: bool,
    /// How the current stream is joined to the previous one; `None` in the first stream.
    seam: Option<Seam>,
}

// === impl Transcript ===

impl Transcript {
    /// A transcript of the answer to `body`, which keeps at most `bytes_max` bytes.
    ///
    /// # Errors
    /// Why no answer to this request can be resumed.
    pub fn begin(api: Api, body: Bytes, bytes_max: usize) -> Result<Self, Unfit> {
        Ok(Self {
            request: Request::read(api, body)?,
            bytes_max,
            unfit: None,
            held: Vec::new(),
            edge: Edge::default(),
            head: None,
            role_sent: false,
            text: String::new(),
            tokens: Tokens::default(),
            finished: false,
            done: false,
            seam: None,
        })
    }

    /// Why the answer cannot be resumed, if that is known. In the first stream, all further bytes then pass unchanged
    /// and nothing is stored.
    pub fn unfit(&self) -> Option<&Unfit> {
        self.unfit.as_ref()
    }

    /// Whether the stream contained a finish reason or its end marker.
    pub fn is_finished(&self) -> bool {
        self.finished || self.done
    }

    /// The text passed on so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Processes the next bytes of the stream; returns the bytes to send to the client, including those held before.
    ///
    /// # Errors
    /// In a resumed stream: why it does not continue the first. Its bytes must not be sent to the client.
    pub fn pass(&mut self, piece: Bytes) -> Result<Bytes, Unfit> {
        if self.seam.is_none() && self.unfit.is_some() {
            return Ok(piece);
        }
        let mut whole = 0;
        while let Some(end) = event_end(self.edge, &piece[whole..]) {
            whole += end;
            self.edge = Edge::Line;
        }
        let rest = &piece[whole..];
        self.edge = self.edge.after(rest);
        let ready = match (whole, self.held.is_empty()) {
            (0, _) => Bytes::new(),
            (_, true) => piece.slice(..whole),
            _ => {
                self.held.extend_from_slice(&piece[..whole]);
                std::mem::take(&mut self.held).into()
            }
        };
        self.held.extend_from_slice(rest);
        if self.held.len() > self.bytes_max {
            self.note_unfit(Unfit::TooLong(self.bytes_max))?;
        }
        self.read(ready)
    }

    /// The stream has ended regularly; returns the held bytes.
    ///
    /// # Errors
    /// As [`Transcript::pass`].
    pub fn end(&mut self) -> Result<Bytes, Unfit> {
        self.edge = Edge::Line;
        let held = std::mem::take(&mut self.held);
        self.read(held.into())
    }

    /// The stream has broken; returns how to continue on an engine with these capabilities.
    ///
    /// # Errors
    /// Why it cannot be continued.
    pub fn resume(&mut self, means: EngineCapabilities) -> Result<Next, Unfit> {
        self.held = Vec::new();
        self.edge = Edge::Line;
        if self.finished || self.done {
            let end: &[u8] = if self.done { b"" } else { b"data: [DONE]\n\n" };
            self.done = true;
            return Ok(Next::Close(Bytes::from_static(end)));
        }
        if let Some(unfit) = &self.unfit {
            return Err(unfit.clone());
        }
        let sent = self.tokens.sent;
        if let (Some(head), Some(limit)) = (&self.head, self.request.limit)
            && sent > 0
            && sent >= limit
        {
            self.done = true;
            return Ok(Next::Close(head.last_chunk(self.request.api).into()));
        }
        let continued = self.request.continuation(&self.text, &self.tokens, means)?;
        // Ids that the last stream did not repeat must still be repeated.
        let mut ids = self.tokens.take_pending_ids();
        ids.extend(self.seam.take().map(|seam| seam.ids).unwrap_or_default());
        self.seam = Some(Seam {
            text: self.text[continued.text_bytes..].into(),
            ids,
            prompt_tokens: self.tokens.prompt,
            before_tokens: continued.tokens,
            prompt_sent: continued.tokens > 0 || self.tokens.knows_prompt_ids(),
            from_completion: continued.api != self.request.api,
        });
        self.tokens.resume(continued.tokens, continued.by_ids);
        Ok(Next::Ask { api: continued.api, body: continued.body })
    }

    /// Reads complete events and returns those to send to the client.
    fn read(&mut self, events: Bytes) -> Result<Bytes, Unfit> {
        let spliced = self.seam.is_some();
        let mut out = Vec::with_capacity(if spliced { events.len() } else { 0 });
        let mut rest = &events[..];
        while !rest.is_empty() {
            let (event, after) = rest.split_at(event_end(Edge::Line, rest).unwrap_or(rest.len()));
            rest = after;
            if spliced {
                self.splice(event, &mut out)?;
            } else if self.unfit.is_none()
                && let Err(unfit) = self.note(event)
            {
                self.unfit = Some(unfit);
            }
        }
        if spliced {
            return Ok(out.into());
        }
        if self.unfit.is_none() {
            return Ok(events);
        }
        // From here on nothing is held or stored.
        self.text = String::new();
        self.tokens = Tokens::default();
        let held = std::mem::take(&mut self.held);
        Ok(if held.is_empty() { events } else { [&events[..], &held].concat().into() })
    }

    /// The answer cannot be resumed; in a resumed stream this is an error.
    fn note_unfit(&mut self, unfit: Unfit) -> Result<(), Unfit> {
        self.unfit = Some(unfit.clone());
        if self.seam.is_some() { Err(unfit) } else { Ok(()) }
    }

    /// Reads an event of the first stream.
    fn note(&mut self, event: &[u8]) -> Result<(), Unfit> {
        let Some((_, data)) = name_and_data(event) else { return Ok(()) };
        if data.starts_with(b"[DONE]") {
            self.done = true;
            return Ok(());
        }
        let chunk = Chunk::read(data, self.request.api)?;
        if self.head.is_none() {
            self.head = Some(Head::of(&chunk));
        }
        self.take(&chunk)
    }

    /// Rewrites an event of a resumed stream.
    fn splice(&mut self, event: &[u8], out: &mut Vec<u8>) -> Result<(), Unfit> {
        let Some((_, data)) = name_and_data(event) else {
            out.extend_from_slice(event);
            return Ok(());
        };
        if data.starts_with(b"[DONE]") {
            self.done = true;
            out.extend_from_slice(event);
            return Ok(());
        }
        let Some(seam) = &mut self.seam else { return Ok(()) };
        let api = if seam.from_completion { Api::Completions } else { self.request.api };
        let mut chunk = Chunk::read(data, api)?;
        if chunk.reasons && !self.text.is_empty() {
            return Err(Unfit::Reasoning);
        }
        seam.swallow(&mut chunk);
        let head = self.head.get_or_insert_with(|| Head::of(&chunk));
        if !chunk.says_nothing(self.role_sent) {
            chunk.write(head, seam, self.role_sent, out);
            self.role_sent |= seam.from_completion;
        }
        if let Err(unfit) = self.take(&chunk) {
            // The stream can continue, but cannot be resumed again.
            self.unfit = Some(unfit);
        }
        Ok(())
    }

    /// Adds a chunk's content to the transcript.
    fn take(&mut self, chunk: &Chunk<'_>) -> Result<(), Unfit> {
        self.role_sent |= chunk.role;
        self.finished |= chunk.finished;
        if chunk.calls {
            return Err(Unfit::ToolCall);
        }
        if chunk.reasons {
            return Err(Unfit::Reasoning);
        }
        self.text.push_str(&chunk.text);
        let whole = self.seam.as_ref().is_none_or(|seam| seam.before_tokens == 0);
        self.tokens.take(chunk, whole);
        if self.text.len() + self.tokens.bytes() > self.bytes_max {
            return Err(Unfit::TooLong(self.bytes_max));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
