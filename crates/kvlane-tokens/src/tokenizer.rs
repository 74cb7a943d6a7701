//! A model's tokenizer and chat template, loaded.

use kvlane_wire::api::Api;

use crate::prompt::{Prompt, UnixTime};
use crate::source::{Config, LoadError, Source};
use crate::unknown::Unknown;

/// A model's tokenizer and chat template. Shared by all threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

/// Where a text may be cut before it is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// At special tokens: pieces encoded apart are the whole encoded, proved on a set of texts when it was loaded.
    AtSpecialTokens,
    /// Nowhere, for this reason: every prompt is encoded as a whole.
    Never(String),
}

/// What the cache of encodings holds and was good for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes held, bookkeeping included.
    pub cache_bytes: u64,
    /// Pieces held.
    pub cache_entries: u64,
    /// Pieces found.
    pub hits: u64,
    /// Pieces that had to be encoded.
    pub misses: u64,
    /// Tokens that came out of the cache.
    pub tokens_reused: u64,
    /// Tokens that were encoded.
    pub tokens_encoded: u64,
}

// === impl Tokenizer ===

impl Tokenizer {
    /// Reads the files of `source` and proves where texts may be cut.
    pub fn load(source: &Source, config: &Config) -> Result<Tokenizer, LoadError> {
        let _ = config;
        let path = source.path.join("tokenizer.json");
        let inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|error| LoadError::Format { path, why: error.to_string() })?;
        Ok(Tokenizer { inner })
    }

    /// The tokens of a request to `api`. After [`Unknown`], `out` holds the tokens it is known to begin with.
    pub fn prompt(&self, api: Api, body: &[u8], now: UnixTime, out: &mut Prompt) -> Result<(), Unknown> {
        let _ = (body, now);
        out.clear();
        Err(Unknown::Api(api.name()))
    }

    /// The text the engine would encode for a request to `api`, where that is not ids.
    pub fn render(&self, api: Api, body: &[u8], now: UnixTime, out: &mut String) -> Result<(), Unknown> {
        let _ = (body, now);
        out.clear();
        Err(Unknown::Api(api.name()))
    }

    /// Appends the tokens of a text; `add_special` as the tokenizer's own beginning and end are wanted or not.
    pub fn text(&self, text: &str, add_special: bool, out: &mut Vec<u32>) -> Result<(), Unknown> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| Unknown::Tokenizer(error.to_string()))?;
        out.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    /// Whether the model has a chat template.
    pub fn has_template(&self) -> bool {
        false
    }

    /// Ids there are, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Where texts may be cut.
    pub fn cut(&self) -> Cut {
        Cut::Never("not probed".into())
    }

    /// What the cache did.
    pub fn stats(&self) -> Stats {
        Stats::default()
    }
}
