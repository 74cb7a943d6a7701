//! A prompt in tokens.

use std::sync::Arc;

/// Seconds since 1970-01-01 00:00 UTC, for templates that print the date. Passed in by the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixTime(pub i64);

/// A prompt in tokens; its memory is reused between requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The token ids, as the engine counts them. After [`Unknown`](crate::Unknown), the known first tokens.
    pub tokens: Vec<u32>,
    /// How many of them came from the cache or were given as ids, and so cost no encoding.
    pub reused_tokens: u32,
    /// The text that was encoded; empty if the prompt was given as ids.
    pub text: String,
    /// Cache partition, set by the caller before encoding: entries of one partition are found only in that partition,
    /// so that response times do not reveal other clients' prompts. 0 is shared; other values must be even.
    pub apart: u64,
    /// Tokens of the other prompts of a request that has several.
    pub other_tokens: u32,
    /// The engine's name for the model's weights, `root` in its `/v1/models`, set by the caller: vLLM puts it into the
    /// names of images.
    pub root: Option<Arc<str>>,
    /// The images among the tokens.
    pub placed: Vec<Placed>,
}

/// An image among the tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The index of its first token.
    pub first: usize,
    /// How many tokens it has.
    pub tokens: usize,
    /// Its name in the keys of blocks.
    pub name: String,
}

impl Prompt {
    /// Clears the contents; keeps the memory, `apart` and `root`.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.reused_tokens = 0;
        self.text.clear();
        self.other_tokens = 0;
        self.placed.clear();
    }
}
