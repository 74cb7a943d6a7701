//! Byte-pair encoding of byte-level tokenizers: GPT-2, Llama 3, Qwen, gpt-oss, DeepSeek, Mistral and similar.
//!
//! The `tokenizers` library needs a tenth of a second of CPU time for a prompt of 100,000 tokens. This encoder gives
//! the same ids many times faster (`benches/bpe.rs`), because it computes only ids: no offsets, no token strings, no
//! characters as stand-ins for bytes. A tokenizer for which equal results are not certain is rejected when it is
//! loaded, and the caller uses the library.
//!
//! Text passes four steps: NFC if the tokenizer requires it (`nfc`), splitting into words (`split`), words that are a
//! token or in the cache (`words`), merges (`merge`).

use std::borrow::Cow;
use std::sync::Mutex;

use self::merge::{Merges, Row};
use self::split::Splitter;
use self::walk::Walk;
use self::words::{Cache, Words};

mod classes;
mod load;
mod merge;
mod nfc;
mod split;
mod walk;
mod words;

/// Longest word that is always merged; longer ones are walked if the merges allow it.
const WALK_MIN: usize = 16;

/// A byte-level BPE encoder: gives the same ids as the `tokenizers` library in a fraction of the time.
#[derive(Debug)]
pub struct Bpe {
    words: Words,
    merges: Merges,
    walk: Option<Walk>,
    splitter: Splitter,
    nfc: bool,
    prefix_space: bool,
    /// Working memory, one per concurrent caller: at most as many as the maximum of concurrent callers so far.
    scratch: Mutex<Vec<Scratch>>,
}

#[derive(Debug)]
struct Scratch {
    cache: Cache,
    row: Row,
}

/// Why a tokenizer is not supported by this encoder; the caller uses the library instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub String);

// === impl Bpe ===

impl Bpe {
    /// The encoder of a parsed `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If its model, normalizer or pre-tokenizer is not supported.
    pub fn from_tokenizer(tokenizer: &serde_json::Value) -> Result<Bpe, Unsupported> {
        load::from_tokenizer(tokenizer)
    }

    /// The encoder of tiktoken ranks and their split pattern.
    ///
    /// # Errors
    ///
    /// If the pattern is not supported, or a byte has no rank.
    pub fn from_ranks(
        ranks: impl Iterator<Item = (Vec<u8>, u32)>,
        pattern: &str,
    ) -> Result<Bpe, Unsupported> {
        load::from_ranks(ranks, pattern)
    }

    /// Applies the tokenizer's normalizer to `text`. [`Bpe::encode`] does this itself; it is for callers that search
    /// for added tokens in normalized text.
    pub fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.nfc { nfc::normalize(text) } else { Cow::Borrowed(text) }
    }

    /// Appends the ids of `text`, which must contain no added token.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut text = self.normalize(text);
        if self.prefix_space && !text.is_empty() && !text.starts_with(' ') {
            text.to_mut().insert(0, ' ');
        }
        let text = &*text;
        let taken = self.scratch.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
        let mut scratch = taken.unwrap_or_else(|| Scratch { cache: Cache::new(), row: Row::default() });
        let Scratch { cache, row } = &mut scratch;
        let bytes = text.as_bytes();
        self.splitter.each(text, |from, to| match self.words.find(bytes, from, to) {
            Some(id) => out.push(id),
            None => cache.encode(bytes, (from, to), out, |out| self.merge(&bytes[from..to], row, out)),
        });
        scratch.row.shrink();
        self.scratch.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(scratch);
    }

    fn merge(&self, word: &[u8], row: &mut Row, out: &mut Vec<u32>) {
        match &self.walk {
            Some(walk) if word.len() > WALK_MIN => walk.encode(word, &self.merges, row, out),
            _ => self.merges.encode(word, row, out),
        }
    }

    /// Whether `text` can be cut before byte `at`: the ids of the whole are those of the left part followed by those of
    /// the right part. `true` is always correct, `false` may be over-cautious.
    ///
    /// True before a space that does not follow white space: every pattern starts a word there, and none looks past it.
    pub fn cuts_at(text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        at > 0 && at < bytes.len() && bytes[at] == b' ' && !text[..at].ends_with(char::is_whitespace)
    }
}
