//! Encodes text to token ids, in cached pieces.
//!
//! A tokenizer encodes the text between two added tokens independently of its context. So a text is cut there, and
//! every piece is encoded once and then cached by its content: a conversation's next turn costs only its new message. A
//! long piece of plain text is cut further, at spaces where the encoder is known to begin a word, chosen by content, so
//! that a prompt that grows, or whose beginning changes, is not re-encoded as a whole either.
//!
//! When the tokenizer is loaded, a set of texts checks that pieces give the same ids as the whole (`probe`).

mod added;
mod cache;
mod probe;

use crate::bpe::Bpe;
use crate::tokenizer::{Cut, Stats};
use crate::unknown::Unknown;

pub(crate) use added::AddedToken;
use added::{Added, Piece};
use cache::{Cache, Key};

/// Shortest piece that is cached. Our own encoder encodes shorter ones faster than a lookup.
const REMEMBERED_BYTES_MIN: usize = 24;

/// Where long plain text is cut: not within the first `bytes_min` bytes, then by content, and at any space from
/// `bytes_max` on.
#[derive(Clone, Copy, Debug)]
struct Chunks {
    bytes_min: usize,
    bytes_max: usize,
    /// One in this many of the spaces in between is a cut.
    one_in: u32,
}

const CHUNKS: Chunks = Chunks { bytes_min: 1 << 11, bytes_max: 1 << 14, one_in: 128 };

/// The encoder of plain text.
enum Backend {
    /// Our own encoder.
    Own(Box<Bpe>),
    /// The `tokenizers` library.
    Library(Box<tokenizers::Tokenizer>),
}

/// The parts of a tokenizer, read from its files.
pub(crate) struct Parts {
    /// Our own encoder, if it supports this tokenizer.
    pub(crate) own: Option<Bpe>,
    /// The library's encoder, if any.
    pub(crate) library: Option<tokenizers::Tokenizer>,
    pub(crate) added: Vec<AddedToken>,
    /// Ids before and after a text if special tokens are added.
    pub(crate) before: Vec<u32>,
    pub(crate) behind: Vec<u32>,
    /// Whether a text's first piece is encoded differently from the others.
    pub(crate) positional: bool,
    pub(crate) cache_bytes_max: usize,
}

/// A tokenizer without its templates.
pub(crate) struct Encoder {
    backend: Backend,
    /// Added tokens matched in the original text.
    raw: Added,
    /// Added tokens matched in the normalized text, which our own encoder must do.
    normalized: Added,
    pub(crate) before: Vec<u32>,
    pub(crate) behind: Vec<u32>,
    /// A token to put before a piece that is not the first: its content and id.
    guard: Option<(String, u32)>,
    positional: bool,
    cut: Cut,
    chunks: Chunks,
    cache: Cache,
}

// === impl Encoder ===

impl Encoder {
    /// Joins the parts and checks whether texts may be cut. The error describes the problem in the files.
    pub(crate) fn new(parts: Parts) -> Result<Encoder, String> {
        let Parts { mut own, mut library, added, before, behind, positional, cache_bytes_max } = parts;
        // Our own encoder must give the library's ids for every probe text, cut or not; otherwise the library is used.
        let mut why = None;
        loop {
            let with_own = own.is_some();
            let (normalized, raw): (Vec<AddedToken>, Vec<AddedToken>) =
                added.iter().cloned().partition(|token| token.normalized);
            let guard = guard(&added);
            let backend = match (own.take(), &mut library) {
                (Some(own), _) => Backend::Own(Box::new(own)),
                (None, Some(_)) => Backend::Library(Box::new(library.take().ok_or("no encoder")?)),
                (None, None) => return Err(why.unwrap_or_else(|| "no encoder".to_owned())),
            };
            let mut encoder = Encoder {
                normalized: Added::new(if with_own {
                    normalized_as(&backend, normalized)
                } else {
                    Vec::new()
                })?,
                raw: Added::new(raw)?,
                backend,
                before: before.clone(),
                behind: behind.clone(),
                guard: guard.clone(),
                positional,
                cut: Cut::AtSpecialTokens,
                chunks: CHUNKS,
                cache: Cache::new(cache_bytes_max),
            };
            match encoder.probe(library.as_ref(), &added) {
                Ok(()) => return Ok(encoder),
                Err(difference) if with_own && library.is_none() => return Err(difference),
                Err(difference) if with_own => why = Some(difference),
                Err(difference) => {
                    encoder.cut = Cut::Never(difference);
                    return Ok(encoder);
                }
            }
        }
    }

    pub(crate) fn cut(&self) -> &Cut {
        &self.cut
    }

    pub(crate) fn stats(&self) -> Stats {
        self.cache.stats()
    }

    /// Whether our own encoder is used.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.backend, Backend::Own(_))
    }

    /// Appends the ids of `text`; returns how many came from the cache. Entries cached for one `apart` value are found
    /// only with the same value.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        apart: u64,
        out: &mut Vec<u32>,
    ) -> Result<usize, Unknown> {
        if add_special {
            out.extend_from_slice(&self.before);
        }
        let mut reused = 0;
        match self.cut {
            Cut::AtSpecialTokens => self.raw.split(text, |piece| {
                match piece {
                    Piece::Token(id) => out.push(id),
                    Piece::Text(text, at) => reused += self.piece(text, at == 0, apart, out)?,
                }
                Ok(())
            })?,
            Cut::Never(_) => reused += self.remembered(text, true, apart, out)?,
        }
        if add_special {
            out.extend_from_slice(&self.behind);
        }
        Ok(reused)
    }

    /// Appends the ids of a piece without raw added tokens.
    fn piece(&self, text: &str, first: bool, apart: u64, out: &mut Vec<u32>) -> Result<usize, Unknown> {
        let Backend::Own(own) = &self.backend else { return self.remembered(text, first, apart, out) };
        if self.normalized.is_empty() {
            return self.chunks(text, apart, out);
        }
        let text = own.normalize(text);
        let mut reused = 0;
        self.normalized.split(&text, |piece| {
            match piece {
                Piece::Token(id) => out.push(id),
                Piece::Text(text, _) => reused += self.chunks(text, apart, out)?,
            }
            Ok::<(), Unknown>(())
        })?;
        Ok(reused)
    }

    /// Appends the ids of plain text with our own encoder, in chunks cut at safe positions.
    fn chunks(&self, text: &str, apart: u64, out: &mut Vec<u32>) -> Result<usize, Unknown> {
        let mut rest = text;
        let mut reused = 0;
        while let Some(at) = self.chunks.end(rest) {
            let (chunk, behind) = rest.split_at(at);
            reused += self.remembered(chunk, true, apart, out)?;
            rest = behind;
        }
        Ok(reused + self.remembered(rest, true, apart, out)?)
    }

    /// Appends the ids of an independent text, from the cache if present.
    fn remembered(&self, text: &str, first: bool, apart: u64, out: &mut Vec<u32>) -> Result<usize, Unknown> {
        if text.len() < REMEMBERED_BYTES_MIN && self.is_own() {
            self.plain(text, first, out)?;
            return Ok(0);
        }
        let first = first || !self.positional;
        let key = Key::of(text, apart ^ u64::from(!first));
        if let Some(ids) = self.cache.get(key) {
            out.extend_from_slice(&ids);
            return Ok(ids.len());
        }
        let before = out.len();
        self.plain(text, first, out)?;
        self.cache.put(key, &out[before..]);
        self.cache.count_encoded(out.len() - before);
        Ok(0)
    }

    /// Encodes an independent text and appends its ids.
    fn plain(&self, text: &str, first: bool, out: &mut Vec<u32>) -> Result<(), Unknown> {
        match &self.backend {
            Backend::Own(own) => own.encode(text, out),
            Backend::Library(library) if first || !self.positional => {
                out.extend_from_slice(library_ids(library, text)?.get_ids());
            }
            Backend::Library(library) => {
                let Some((guard, id)) = &self.guard else {
                    return Err(Unknown::Tokenizer("no special token can precede a piece".into()));
                };
                let encoding = library_ids(library, &format!("{guard}{text}"))?;
                match encoding.get_ids().split_first() {
                    Some((first, ids)) if first == id => out.extend_from_slice(ids),
                    _ => {
                        return Err(Unknown::Tokenizer(
                            "a special token was not found before a piece".into(),
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

fn library_ids(library: &tokenizers::Tokenizer, text: &str) -> Result<tokenizers::Encoding, Unknown> {
    library.encode_fast(text, false).map_err(|error| Unknown::Tokenizer(error.to_string()))
}

/// An added token that can precede any text without affecting its own match or the text's encoding.
fn guard(added: &[AddedToken]) -> Option<(String, u32)> {
    let plain = |token: &&AddedToken| {
        !token.normalized && !token.lstrip && !token.rstrip && !token.single_word && !token.content.is_empty()
    };
    added
        .iter()
        .filter(plain)
        .find(|token| {
            added.iter().all(|other| other.id == token.id || !other.content.starts_with(&token.content))
        })
        .map(|token| (token.content.clone(), token.id))
}

/// The tokens with their contents normalized.
fn normalized_as(backend: &Backend, mut tokens: Vec<AddedToken>) -> Vec<AddedToken> {
    if let Backend::Own(own) = backend {
        for token in &mut tokens {
            token.content = own.normalize(&token.content).into_owned();
        }
    }
    tokens
}

// === impl Chunks ===

impl Chunks {
    /// The end of the first chunk of `text`, if that is not the whole text.
    fn end(self, text: &str) -> Option<usize> {
        if text.len() <= self.bytes_min {
            return None;
        }
        let bytes = text.as_bytes();
        let mut end = None;
        for space in memchr::memchr_iter(b' ', &bytes[self.bytes_min..]) {
            let at = self.bytes_min + space;
            if (at >= self.bytes_max || self.is_end(bytes, at)) && Bpe::cuts_at(text, at) {
                end = Some(at);
                break;
            }
        }
        end
    }

    /// Whether the bytes before `at` select it as a cut.
    fn is_end(self, bytes: &[u8], at: usize) -> bool {
        let Some(before) = at.checked_sub(8).and_then(|from| bytes[from..at].first_chunk::<8>()) else {
            return false;
        };
        // Fibonacci hashing: only the highest bits depend on all eight bytes.
        let mixed = u64::from_le_bytes(*before).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed < u64::MAX / u64::from(self.one_in)
    }
}
