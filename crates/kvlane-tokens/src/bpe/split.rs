//! Splits text into words, across which byte-pair encoding never merges.
//!
//! Tokenizers define words by a regular expression. Few expressions are in use, so each has a hand-written scanner,
//! found by the expression's exact text. A scanner reads the text once from left to right; where an alternative of the
//! expression would backtrack, the scanner computes the length in advance.

use super::classes::{self, CASELESS, HAN, LETTER, LOWER, MARK, NUMBER, SPACE, SYMBOL, UPPER};

/// `ByteLevel`'s own pattern (`tokenizers` 0.23, `pre_tokenizers/byte_level.rs`).
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The three expressions of DeepSeek-V3's `tokenizer.json`, each applied to the pieces of the previous one.
pub(super) const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// A way of splitting, with the variations of its family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Splitter {
    Gpt2,
    Cl100k(Cl100k),
    O200k(O200k),
    DeepSeek,
    /// Numeric characters are split off, one by one or in runs; the rest is split as by GPT-2.
    Digits {
        individual: bool,
    },
}

/// The family of `cl100k_base`: Llama 3, Qwen, GLM, Phi-4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cl100k {
    /// Longest run of numbers in one word.
    digits: usize,
    /// `LETTER`, or `LETTER | MARK` if marks count as letters.
    letter: u8,
    /// White space at the end of the text is one word, with or without line breaks.
    blank_end: bool,
}

/// The family of `o200k_base`, where a word changes from upper to lower case at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct O200k {
    digits: usize,
    /// `'s` and similar contractions belong to the word before them.
    contractions: bool,
    /// A slash may follow the line breaks after symbols.
    slash: bool,
    /// Han characters form words of their own.
    han: bool,
}

/// The supported expressions, exactly as in the tokenizers' files, and their scanners.
#[rustfmt::skip]
const PATTERNS: [(&str, Splitter); 12] = [
    (GPT2, Splitter::Gpt2),
    // tiktoken 0.14, `tiktoken_ext/openai_public.py`: r50k_base, and its form before possessive quantifiers.
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s", Splitter::Gpt2),
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", Splitter::Gpt2),
    // Llama 3, GLM-4, Phi-4, and cl100k_base as converted to `tokenizer.json`.
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::Cl100k(Cl100k { digits: 3, letter: LETTER, blank_end: false })),
    // tiktoken 0.14: cl100k_base.
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        Splitter::Cl100k(Cl100k { digits: 3, letter: LETTER, blank_end: true })),
    // Qwen2 and Qwen3.
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::Cl100k(Cl100k { digits: 1, letter: LETTER, blank_end: false })),
    // Qwen3.5.
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::Cl100k(Cl100k { digits: 1, letter: LETTER | MARK, blank_end: false })),
    // o200k_base and gpt-oss.
    (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::O200k(O200k { digits: 3, contractions: true, slash: true, han: false })),
    // Llama 4: no slash.
    (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::O200k(O200k { digits: 3, contractions: true, slash: false, han: false })),
    // Mistral's tekken (Nemo and later), Nemotron.
    (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::O200k(O200k { digits: 1, contractions: false, slash: true, han: false })),
    (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::O200k(O200k { digits: 3, contractions: false, slash: true, han: false })),
    // Kimi K2, `tokenization_kimi.py`.
    (r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Splitter::O200k(O200k { digits: 3, contractions: true, slash: false, han: true })),
];

impl Splitter {
    /// The scanner of a regular expression, if supported.
    pub(super) fn of_pattern(pattern: &str) -> Option<Splitter> {
        PATTERNS.iter().find(|(known, _)| *known == pattern).map(|(_, splitter)| *splitter)
    }

    /// Calls `word` for every word of `text`, with its byte range `from..to`.
    pub(super) fn each(self, text: &str, mut word: impl FnMut(usize, usize)) {
        let text = Text(text.as_bytes());
        match self {
            Splitter::Gpt2 => each(text, |at| gpt2(text, at), word),
            Splitter::Cl100k(family) => each(text, |at| family.word(text, at), word),
            Splitter::O200k(family) if family.han => each(text, |at| family.word::<true>(text, at), word),
            Splitter::O200k(family) => each(text, |at| family.word::<false>(text, at), word),
            Splitter::DeepSeek => each_piece(
                text,
                deepseek_piece,
                |piece, at| match deepseek_word(piece, at) {
                    Some(end) => end,
                    None => deepseek_rest(piece, at),
                },
                &mut word,
            ),
            Splitter::Digits { individual } => {
                each_piece(text, |text, at| digits_piece(text, at, individual), gpt2, &mut word)
            }
        }
    }
}

#[inline(always)]
fn each(text: Text, end_of: impl Fn(usize) -> usize, mut word: impl FnMut(usize, usize)) {
    let mut at = 0;
    while at < text.0.len() {
        let end = end_of(at);
        debug_assert!(end > at);
        word(at, end);
        at = end;
    }
}

/// Splits twice: into pieces, and each piece into words independently of its context.
#[inline(always)]
fn each_piece<'a>(
    text: Text<'a>,
    piece_end: impl Fn(Text<'a>, usize) -> usize,
    word_end: impl Fn(Text<'a>, usize) -> usize,
    word: &mut impl FnMut(usize, usize),
) {
    let mut at = 0;
    while at < text.0.len() {
        let piece = Text(&text.0[..piece_end(text, at)]);
        while at < piece.0.len() {
            let end = word_end(piece, at);
            word(at, end);
            at = end;
        }
    }
}

// === GPT-2 ===

fn gpt2(text: Text, at: usize) -> usize {
    let (class, bytes) = text.class(at);
    let first = text.0[at];
    if first == b'\''
        && let Some(end) = text.contraction(at, false)
    {
        return end;
    }
    // A space belongs to the following characters, unless these are white space.
    let (class, start) = match first {
        b' ' if at + 1 < text.0.len() => {
            let (next, bytes) = text.class(at + 1);
            if next & SPACE != 0 { (class, at + 1) } else { (next, at + 1 + bytes) }
        }
        _ => (class, at + bytes),
    };
    if class & LETTER != 0 {
        text.while_in(start, LETTER)
    } else if class & NUMBER != 0 {
        text.while_in(start, NUMBER)
    } else if class & SPACE != 0 {
        text.blank(at, false, false)
    } else {
        text.while_not_in(start, SPACE | LETTER | NUMBER)
    }
}

// === impl Cl100k ===

impl Cl100k {
    #[inline(always)]
    fn word(self, text: Text, at: usize) -> usize {
        let (class, bytes) = text.class(at);
        let after = at + bytes;
        if class & self.letter != 0 {
            return text.while_in(after, self.letter);
        }
        if class & NUMBER != 0 {
            return text.numbers(after, self.digits);
        }
        let first = text.0[at];
        if first == b'\''
            && let Some(end) = text.contraction(at, true)
        {
            return end;
        }
        if !is_break(first) && after < text.0.len() {
            let (next, bytes) = text.class(after);
            if next & self.letter != 0 {
                return text.while_in(after + bytes, self.letter);
            }
            if first == b' ' && next & (SPACE | NUMBER) == 0 {
                return self.symbols(text, after + bytes);
            }
        }
        if class & SPACE != 0 { text.blank(at, true, self.blank_end) } else { self.symbols(text, after) }
    }

    fn symbols(self, text: Text, at: usize) -> usize {
        text.breaks(text.while_not_in(at, SPACE | NUMBER | LETTER | self.letter), false)
    }
}

// === impl O200k ===

impl O200k {
    #[inline(always)]
    fn word<const SPLIT_HAN: bool>(self, text: Text, at: usize) -> usize {
        let (class, bytes) = text.class(at);
        let after = at + bytes;
        if SPLIT_HAN && class & HAN != 0 {
            return text.while_in(after, HAN);
        }
        if class & LETTER != 0 {
            let (Cased::Lower(end) | Cased::Upper(end)) = cased::<SPLIT_HAN>(text, at);
            return self.contraction(text, end);
        }
        if class & NUMBER != 0 {
            return text.numbers(after, self.digits);
        }
        let first = text.0[at];
        if !is_break(first) {
            // The first alternative has precedence over the second, with its leading character or without; a mark can
            // be either that character or the word itself.
            match cased::<SPLIT_HAN>(text, after) {
                Cased::Lower(end) => return self.contraction(text, end),
                Cased::Upper(_) if class & MARK != 0 => return self.contraction(text, after),
                Cased::Upper(end) if end > after => return self.contraction(text, end),
                Cased::Upper(_) => {}
            }
            if first == b' ' && after < text.0.len() {
                let (next, bytes) = text.class(after);
                if next & (SPACE | LETTER | NUMBER) == 0 {
                    return self.symbols(text, after + bytes);
                }
            }
        }
        if class & SPACE != 0 { text.blank(at, true, false) } else { self.symbols(text, after) }
    }

    fn contraction(self, text: Text, at: usize) -> usize {
        match self.contractions && text.0.get(at) == Some(&b'\'') {
            true => text.contraction(at, true).unwrap_or(at),
            false => at,
        }
    }

    fn symbols(self, text: Text, at: usize) -> usize {
        text.breaks(text.while_not_in(at, SPACE | LETTER | NUMBER), self.slash)
    }
}

/// The end of a word of both cases, and the alternative that matched.
enum Cased {
    /// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`
    Lower(usize),
    /// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*`; empty where neither matches.
    Upper(usize),
}

/// Scans the run that may be upper case. If lower case follows, the word continues through it; otherwise the word ends
/// after the last character of the run that also counts as lower case.
#[inline(always)]
fn cased<const SPLIT_HAN: bool>(text: Text, mut at: usize) -> Cased {
    let mut after_caseless = None;
    while at < text.0.len() {
        let (class, bytes) = text.class(at);
        if SPLIT_HAN && class & HAN != 0 {
            break;
        }
        if class & LOWER != 0 {
            return Cased::Lower(lower::<SPLIT_HAN>(text, at + bytes));
        }
        if class & (UPPER | CASELESS | MARK) == 0 {
            break;
        }
        at += bytes;
        if class & UPPER == 0 {
            after_caseless = Some(at);
        }
    }
    after_caseless.map_or(Cased::Upper(at), Cased::Lower)
}

#[inline(always)]
fn lower<const SPLIT_HAN: bool>(text: Text, at: usize) -> usize {
    text.scan(at, |class| class & (LOWER | CASELESS | MARK) != 0 && !(SPLIT_HAN && class & HAN != 0))
}

// === DeepSeek ===

/// The first two expressions: up to three numbers, a run of Chinese and Japanese characters, or the text in between.
fn deepseek_piece(text: Text, at: usize) -> usize {
    let (class, bytes) = text.class(at);
    if class & NUMBER != 0 {
        return text.numbers(at + bytes, 3);
    }
    let east_asian = text.east_asian(at);
    let mut end = at + bytes;
    while end < text.0.len() {
        let (class, bytes) = text.class(end);
        if class & NUMBER != 0 || text.east_asian(end) != east_asian {
            break;
        }
        end += bytes;
    }
    end
}

/// The third expression; `None` if it does not match.
#[inline(always)]
fn deepseek_word(text: Text, at: usize) -> Option<usize> {
    let (class, bytes) = text.class(at);
    let first = text.0[at];
    let after = at + bytes;
    if class & (LETTER | MARK) != 0 {
        return Some(text.while_in(after, LETTER | MARK));
    }
    if class & SYMBOL != 0 {
        if first.is_ascii() && text.0.get(after).is_some_and(u8::is_ascii_alphabetic) {
            let letters = text.0[after..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
            return Some(after + letters);
        }
        return Some(text.breaks(text.while_in(after, SYMBOL), false));
    }
    if !is_break(first) && after < text.0.len() {
        let (next, bytes) = text.class(after);
        if next & (LETTER | MARK) != 0 {
            return Some(text.while_in(after + bytes, LETTER | MARK));
        }
        if first == b' ' && next & SYMBOL != 0 {
            return Some(text.breaks(text.while_in(after + bytes, SYMBOL), false));
        }
    }
    (class & SPACE != 0).then(|| text.blank(at, true, false))
}

/// Text that the third expression does not match stays together: numbers, and control characters before no letter.
fn deepseek_rest(text: Text, at: usize) -> usize {
    let mut end = at;
    while end < text.0.len() && (end == at || deepseek_word(text, end).is_none()) {
        end += text.class(end).1;
    }
    end
}

// === Digits ===

/// `tokenizers` uses [`char::is_numeric`] here instead of an expression.
fn digits_piece(text: Text, at: usize, individual: bool) -> usize {
    let numeric = |at| {
        let (code_point, bytes) = text.code_point(at);
        (char::from_u32(code_point).is_some_and(char::is_numeric), bytes)
    };
    let (first, mut bytes) = numeric(at);
    let mut end = at;
    loop {
        end += bytes;
        if end == text.0.len() || (first && individual) {
            return end;
        }
        let next;
        (next, bytes) = numeric(end);
        if next != first {
            return end;
        }
    }
}

// === impl Text ===

/// Valid UTF-8 as bytes; every offset is that of a character's first byte.
#[derive(Clone, Copy)]
struct Text<'a>(&'a [u8]);

fn is_break(byte: u8) -> bool {
    byte == b'\r' || byte == b'\n'
}

impl Text<'_> {
    /// The classes of the character at `at`, and its length in bytes.
    #[inline(always)]
    fn class(self, at: usize) -> (u8, usize) {
        let first = self.0[at];
        if first < 0x80 {
            return (classes::ASCII[first as usize], 1);
        }
        let (code_point, bytes) = self.code_point(at);
        (classes::of(code_point), bytes)
    }

    #[inline(always)]
    fn code_point(self, at: usize) -> (u32, usize) {
        let low = |i: usize| u32::from(self.0[at + i] & 0x3f);
        match u32::from(self.0[at]) {
            first @ ..0x80 => (first, 1),
            first @ 0x80..0xe0 => ((first & 0x1f) << 6 | low(1), 2),
            first @ 0xe0..0xf0 => ((first & 0x0f) << 12 | low(1) << 6 | low(2), 3),
            first => ((first & 0x07) << 18 | low(1) << 12 | low(2) << 6 | low(3), 4),
        }
    }

    /// The end of the run of characters from `at` on whose classes satisfy `pass`.
    #[inline(always)]
    fn scan(self, mut at: usize, pass: impl Fn(u8) -> bool) -> usize {
        while at < self.0.len() {
            let (class, bytes) = self.class(at);
            if !pass(class) {
                break;
            }
            at += bytes;
        }
        at
    }

    #[inline(always)]
    fn while_in(self, at: usize, classes: u8) -> usize {
        self.scan(at, |class| class & classes != 0)
    }

    #[inline(always)]
    fn while_not_in(self, at: usize, classes: u8) -> usize {
        self.scan(at, |class| class & classes == 0)
    }

    /// The end of a run of at most `max` numbers, of which the first ends at `at`.
    fn numbers(self, mut at: usize, max: usize) -> usize {
        for _ in 1..max {
            match at < self.0.len() {
                true => match self.class(at) {
                    (class, bytes) if class & NUMBER != 0 => at += bytes,
                    _ => break,
                },
                false => break,
            }
        }
        at
    }

    fn breaks(self, at: usize, slash: bool) -> usize {
        let mut end = at;
        while self.0.get(end).is_some_and(|&byte| is_break(byte) || (slash && byte == b'/')) {
            end += 1;
        }
        end
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+` at white space; the first alternative only with `breaks`. With `to_end`, `\s++$`
    /// precedes them.
    fn blank(self, at: usize, breaks: bool, to_end: bool) -> usize {
        let (mut end, mut last, mut after_break) = (at, at, None);
        while end < self.0.len() {
            let (class, bytes) = self.class(end);
            if class & SPACE == 0 {
                break;
            }
            last = end;
            end += bytes;
            if is_break(self.0[last]) {
                after_break = Some(end);
            }
        }
        let at_end = end == self.0.len();
        match after_break {
            Some(after_break) if breaks && !(to_end && at_end) => after_break,
            // The last space belongs to the following word, unless it is the only one.
            _ if at_end || last == at => end,
            _ => last,
        }
    }

    /// The end of `'s|'t|'re|'ve|'m|'ll|'d` at an apostrophe. With `any_case`, `ſ` is an s too.
    fn contraction(self, at: usize, any_case: bool) -> Option<usize> {
        let lower = |i: usize| {
            let byte = *self.0.get(at + i)?;
            Some(if any_case { byte.to_ascii_lowercase() } else { byte })
        };
        match (lower(1)?, lower(2)) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(at + 3),
            (0xc5, Some(0xbf)) if any_case => Some(at + 3),
            _ => None,
        }
    }

    /// `[一-龥぀-ゟ゠-ヿ]`
    fn east_asian(self, at: usize) -> bool {
        self.0[at] >= 0xe3 && matches!(self.code_point(at).0, 0x4e00..=0x9fa5 | 0x3040..=0x30ff)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::digits::Digits;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
        SplitDelimiterBehavior,
    };

    use super::*;

    /// Every splitter with the library's equivalent.
    static PAIRS: LazyLock<Vec<(Splitter, PreTokenizerWrapper)>> = LazyLock::new(|| {
        let split = |pattern: &str| {
            let pattern = SplitPattern::Regex(pattern.into());
            PreTokenizerWrapper::from(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap())
        };
        let mut pairs: Vec<_> = PATTERNS.iter().map(|(text, splitter)| (*splitter, split(text))).collect();
        pairs.push((Splitter::DeepSeek, Sequence::new(DEEPSEEK.map(split).to_vec()).into()));
        for individual in [false, true] {
            let stages = vec![Digits::new(individual).into(), split(GPT2)];
            pairs.push((Splitter::Digits { individual }, Sequence::new(stages).into()));
        }
        pairs
    });

    fn theirs(pre_tokenizer: &PreTokenizerWrapper, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        pre_tokenizer.pre_tokenize(&mut pieces).unwrap();
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(piece, _, _)| piece.to_owned()).filter(|piece| !piece.is_empty()).collect()
    }

    fn ours(splitter: Splitter, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        splitter.each(text, |from, to| words.push(text[from..to].to_owned()));
        words
    }

    /// Characters that the expressions distinguish, and characters that are easily assigned to a wrong class.
    const FRAGMENTS: &[&str] = &[
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\u{a0}",
        "\u{2028}",
        "\u{85}",
        "\u{3000}",
        "a",
        "the",
        "Word",
        "XML",
        "iPhone",
        "é",
        "Éa",
        "ß",
        "ǅ",
        "ʰ",
        "ª",
        "中",
        "文字",
        "々",
        "〇",
        "⺀",
        "ひ",
        "ー",
        "゠",
        "・",
        "\u{3040}",
        "\u{3099}",
        "한",
        "ไทย",
        "े",
        "\u{301}",
        "\u{20dd}",
        "'",
        "'s",
        "'S",
        "'ſ",
        "'re",
        "'LL",
        "'ve",
        "'m",
        "'d",
        "'t",
        "’s",
        ".",
        ",",
        "!",
        "-",
        "/",
        "//",
        "\"",
        "$",
        "+",
        "€",
        "«",
        "—",
        "0",
        "7",
        "42",
        "1234567",
        "٣",
        "½",
        "Ⅻ",
        "²",
        "🙂",
        "👩‍💻",
        "\0",
        "\u{1}",
        "\u{200b}",
        "\u{feff}",
        "\u{378}",
        "\u{e000}",
        "𝒳",
        "𐐀",
        "𐐨",
        "𝟙",
    ];

    prop_compose! {
        fn text()(parts in prop::collection::vec(prop_oneof![
            8 => prop::sample::select(FRAGMENTS).prop_map(str::to_owned),
            1 => any::<char>().prop_map(String::from),
            1 => "\\PC{0,8}",
        ], 0..24)) -> String {
            parts.concat()
        }
    }

    proptest! {
        #[test]
        fn every_scanner_splits_as_its_expression(texts in prop::collection::vec(text(), 4)) {
            for text in &texts {
                for (splitter, pre_tokenizer) in &*PAIRS {
                    prop_assert_eq!(ours(*splitter, text), theirs(pre_tokenizer, text), "{:?}", splitter);
                }
            }
        }
    }

    #[test]
    fn every_two_fragments_split_as_their_expression() {
        let text = |a: &str, b: &str| format!("x{a}{b}y {a}{b}{a}");
        let texts: Vec<_> =
            FRAGMENTS.iter().flat_map(|a| FRAGMENTS.iter().map(move |b| text(a, b))).collect();
        for (splitter, pre_tokenizer) in &*PAIRS {
            for text in &texts {
                assert_eq!(ours(*splitter, text), theirs(pre_tokenizer, text), "{splitter:?} {text:?}");
            }
        }
    }

    #[test]
    fn byte_level_splits_by_the_gpt2_expression() {
        let pre_tokenizer = PreTokenizerWrapper::from(ByteLevel::new(false, true, true));
        for text in ["it's 12 o'clock  \n now", "\u{3000}ab", " ' '", "x  "] {
            let mut pieces = PreTokenizedString::from(text);
            pre_tokenizer.pre_tokenize(&mut pieces).unwrap();
            let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let ends: Vec<_> = splits.iter().map(|(_, range, _)| range.1).collect();
            let mut expected = Vec::new();
            Splitter::of_pattern(GPT2).unwrap().each(text, |_, to| expected.push(to));
            assert_eq!(ends, expected, "{text:?}");
        }
    }
}
