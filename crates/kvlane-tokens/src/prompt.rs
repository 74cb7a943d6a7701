//! What a prompt is once it is known.

/// Seconds since 1970-01-01 00:00 UTC, for templates that print the date. Given by the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixTime(pub i64);

/// A prompt in tokens, in memory that is used again from request to request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The token ids, as the engine will count them. After [`Unknown`](crate::Unknown), what it is known to begin with.
    pub tokens: Vec<u32>,
    /// How many of them came out of the cache, or were given as ids, and cost no encoding.
    pub reused_tokens: u32,
    /// The text the tokens were made of; empty if the prompt was given as ids.
    pub text: String,
    /// Said before it is counted: what is remembered for one number is found under that number only, so that nobody learns
    /// by the time it takes whether others have sent the same. 0 is everybody's; others are even.
    pub apart: u64,
}

impl Prompt {
    /// Forgets what it holds and keeps the memory, and who it is apart for.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.reused_tokens = 0;
        self.text.clear();
    }
}
