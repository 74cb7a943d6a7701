//! An answer that goes on elsewhere: what an engine had streamed when it died, the request that makes another engine
//! write the rest, and that rest rewritten so that both read as one stream.
//!
//! A [`Transcript`] stands beside one stream of a completion or a chat. Until the stream breaks it only reads: whole
//! events pass as they are, and one that a piece ends in the middle of is held until it is whole, because half an
//! event cannot be taken back. [`Transcript::resume`] then says how to go on: with another request, whose stream is
//! passed through the same transcript, or with a few bytes because nothing but the end was missing.
//!
//! The text goes on behind `prompt + text`, for a chat by `continue_final_message` (vLLM, SGLang). Where the engine
//! told its token ids (`return_token_ids`, vLLM) the prompt is those, and then the rest is exactly what greedy
//! decoding would have written; text may be cut into other tokens than it was made of. Requests whose answer depends
//! on more than the tokens before it are not continued: see [`Unfit`].

mod chunk;
mod request;

use bytes::Bytes;
use thiserror::Error;

use self::chunk::{Chunk, Head, Seam, Tokens};
use self::request::Request;
use crate::api::Api;
use crate::sse::{Edge, event_end, name_and_data};

/// Why an answer cannot go on elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unfit {
    /// Neither a streamed completion nor a streamed chat.
    #[error("only streamed completions and chats can be continued")]
    Kind,
    /// The body is not JSON as these APIs take it.
    #[error("the request body cannot be read")]
    Body,
    /// The body asks for something that a second request cannot take over, or that nobody knows.
    #[error("the request asks for \"{0}\", which cannot be continued")]
    Key(String),
    /// Several prompts, or token ids that text would have to follow.
    #[error("the prompt is not one text, and the engine told no token ids")]
    Prompt,
    /// A completion without `max_tokens`: the engine's own limit is not known, so what is left of it is not either.
    #[error("the request sets no max_tokens, and what the engine took instead is not known")]
    Limit,
    /// The client is told token ids, and the rest cannot be asked for by them.
    #[error("the client is told token ids, and the rest of the answer cannot be asked for by them")]
    Ids,
    /// The engine is not known to continue a message.
    #[error("the engine is not known to take continue_final_message")]
    Engine,
    /// A tool call has begun, or something else that is no text.
    #[error("the answer holds a tool call, or something else beside text")]
    ToolCall,
    /// The model thinks before it answers.
    #[error("the answer contains reasoning, which no request can repeat")]
    Reasoning,
    /// A chunk that is not one of a completion with one choice.
    #[error("the stream is not that of one completion")]
    Chunk,
    /// The stream said that the engine failed.
    #[error("the engine reported an error in the stream")]
    Error,
    /// The answer is longer than is kept.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
}

/// What an engine can be asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Means {
    /// It takes `continue_final_message` and does as it says.
    pub continues_messages: bool,
    /// The most tokens that a prompt and its answer may have together, if known.
    pub context_tokens: Option<u32>,
}

/// How a broken stream goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send this and pass the answer's body through the transcript.
    Ask {
        /// Where to.
        api: Api,
        /// The body.
        body: Bytes,
    },
    /// Everything was said: send the client these bytes, which may be none, and end the stream well.
    Close(Bytes),
}

/// One stream, perhaps of several parts.
#[derive(Debug)]
pub struct Transcript {
    request: Request,
    bytes_max: usize,
    unfit: Option<Unfit>,
    /// The beginning of an event that is not whole.
    held: Vec<u8>,
    edge: Edge,
    head: Option<Head>,
    /// Whether the client was told who speaks.
    role_told: bool,
    text: String,
    tokens: Tokens,
    finished: bool,
    done: bool,
    /// How the present stream is joined to what came before; none in the first one.
    seam: Option<Seam>,
}

// === impl Transcript ===

impl Transcript {
    /// A transcript of the answer to `body`, of which at most `bytes_max` bytes are kept.
    ///
    /// # Errors
    /// Why no answer to this request can be continued, whatever it will be.
    pub fn begin(api: Api, body: Bytes, bytes_max: usize) -> Result<Self, Unfit> {
        Ok(Self {
            request: Request::read(api, body)?,
            bytes_max,
            unfit: None,
            held: Vec::new(),
            edge: Edge::default(),
            head: None,
            role_told: false,
            text: String::new(),
            tokens: Tokens::default(),
            finished: false,
            done: false,
            seam: None,
        })
    }

    /// Why the answer cannot be continued, if that is settled. While the first stream lasts, what comes after that
    /// passes untouched and nothing is kept.
    pub fn unfit(&self) -> Option<&Unfit> {
        self.unfit.as_ref()
    }

    /// Whether the stream gave a reason to end, or said that it is complete.
    pub fn is_finished(&self) -> bool {
        self.finished || self.done
    }

    /// Characters of the answer that were passed on.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The next bytes of the stream: what of them, and of those held before, the client may have.
    ///
    /// # Errors
    /// Of a second stream: why it does not continue the first. The client must not have it.
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

    /// The stream has come to its regular end: what was held.
    ///
    /// # Errors
    /// As [`Transcript::pass`].
    pub fn end(&mut self) -> Result<Bytes, Unfit> {
        self.edge = Edge::Line;
        let held = std::mem::take(&mut self.held);
        self.read(held.into())
    }

    /// The stream has broken: how it goes on with an engine of these means.
    ///
    /// # Errors
    /// Why it does not.
    pub fn resume(&mut self, means: Means) -> Result<Next, Unfit> {
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
        let continued = self.request.again(&self.text, &self.tokens, means)?;
        // What the last stream did not come to repeat is still to be repeated.
        let mut ids = self.tokens.take_pending_ids();
        ids.extend(self.seam.take().map(|seam| seam.ids).unwrap_or_default());
        self.seam = Some(Seam {
            text: self.text[continued.text_bytes..].into(),
            ids,
            prompt_tokens: self.tokens.prompt,
            before_tokens: continued.tokens,
            prompt_told: continued.tokens > 0 || self.tokens.knows_prompt_ids(),
            from_completion: continued.api != self.request.api,
        });
        self.tokens.resume(continued.tokens, continued.by_ids);
        Ok(Next::Ask { api: continued.api, body: continued.body })
    }

    /// Reads whole events, and gives them back as the client may have them.
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
        // From here on nothing is held and nothing kept.
        self.text = String::new();
        self.tokens = Tokens::default();
        let held = std::mem::take(&mut self.held);
        Ok(if held.is_empty() { events } else { [&events[..], &held].concat().into() })
    }

    /// The answer cannot be continued: of a second stream, that is its end.
    fn note_unfit(&mut self, unfit: Unfit) -> Result<(), Unfit> {
        self.unfit = Some(unfit.clone());
        if self.seam.is_some() { Err(unfit) } else { Ok(()) }
    }

    /// An event of the first stream.
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

    /// An event of a second stream.
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
        if !chunk.says_nothing(self.role_told) {
            chunk.write(head, seam, self.role_told, out);
            self.role_told |= seam.from_completion;
        }
        if let Err(unfit) = self.take(&chunk) {
            // It is no worse for that; it cannot be continued once more.
            self.unfit = Some(unfit);
        }
        Ok(())
    }

    /// What a chunk adds to the answer.
    fn take(&mut self, chunk: &Chunk<'_>) -> Result<(), Unfit> {
        self.role_told |= chunk.role;
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
