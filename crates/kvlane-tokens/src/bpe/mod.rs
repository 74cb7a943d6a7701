//! Byte-pair encoding of byte-level tokenizers.

use std::borrow::Cow;

/// A byte-level BPE encoder: the same ids as the `tokenizers` library gives, in a fraction of the time.
#[derive(Debug)]
pub struct Bpe {}

/// Why a tokenizer is not encoded here, in words for people; the caller uses the library instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub String);

impl Bpe {
    /// The encoder of a parsed `tokenizer.json`.
    pub fn from_tokenizer(_tokenizer: &serde_json::Value) -> Result<Bpe, Unsupported> {
        Err(Unsupported("no tokenizer is encoded here".into()))
    }

    /// The encoder of tiktoken ranks and their split pattern.
    pub fn from_ranks(
        _ranks: impl Iterator<Item = (Vec<u8>, u32)>,
        _pattern: &str,
    ) -> Result<Bpe, Unsupported> {
        Err(Unsupported("no tokenizer is encoded here".into()))
    }

    /// `text` as the tokenizer's normalizer leaves it. [`Bpe::encode`] does this itself; it is for callers that
    /// look for added tokens in normalized text.
    pub fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        Cow::Borrowed(text)
    }

    /// Appends the ids of `text`, which holds no added token.
    pub fn encode(&self, _text: &str, _out: &mut Vec<u32>) {}

    /// Whether cutting `text` before byte `at` leaves the ids of both sides as they are: the ids of the whole are
    /// those of the left, then those of the right. `false` may be over-cautious, `true` never is.
    pub fn cuts_at(text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        at > 0 && at < bytes.len() && bytes[at] == b' ' && !text[..at].ends_with(char::is_whitespace)
    }
}
