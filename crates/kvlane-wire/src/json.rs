//! JSON scanner: walks a text once, validates it, and copies only what the caller requests.
//!
//! A gateway's bodies are a few keys around one or many strings, so strings take most of the time: short ones are read
//! eight bytes at a time, lines in blocks whose test compiles to SIMD, and longer ones by `memchr2`. The caller drives:
//! it opens objects and arrays, takes the values it knows and skips the others, so every byte is validated exactly
//! once.
//!
//! Accepts RFC 8259 text, with one leniency that engines written in Python share: a `\u` escape may be an unpaired
//! surrogate, which decodes to U+FFFD. Nesting is limited to [`DEPTH_MAX`]; there is no recursion.

use std::borrow::Cow;

use memchr::{memchr, memchr2};

/// Most containers open at once; serde_json's limit, and beyond what chat bodies use.
pub const DEPTH_MAX: u32 = 128;

/// Terminates a decoded string in [`Scanner::compact`]'s rendering. UTF-8 text cannot contain this byte.
pub(crate) const STRING_END: u8 = 0xFC;

/// A member that clients move without changing the prompt: Anthropic's cache breakpoints, which move to the last
/// message of every turn and would make each turn's rendering differ from the previous one.
pub(crate) const NOT_PROMPT: &str = "cache_control";

/// Why a text is not valid JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonError {
    /// Unexpected byte.
    Syntax {
        /// Offset of the byte.
        at: usize,
        /// What was expected.
        expected: &'static str,
    },
    /// A container nested deeper than [`DEPTH_MAX`].
    TooDeep {
        /// Offset of the opening bracket.
        at: usize,
    },
}

/// Blocks of 32 bytes searched for the end of a string before `memchr2` takes over.
const BLOCKS: usize = 8;

/// The type of a value, determined by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `{`
    Object,
    /// `[`
    Array,
    /// `"`
    String,
    /// A digit or a minus.
    Number,
    /// `true` or `false`.
    Bool,
    /// `null`
    Null,
}

/// A string's text between its quotes; its escapes are validated but not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text<'a> {
    raw: &'a str,
    escaped: bool,
}

/// State of a walk over the members of an object or the items of an array.
#[derive(Debug)]
pub struct Walk {
    first: bool,
}

/// A position in a JSON text.
#[derive(Clone, Debug)]
pub struct Scanner<'a> {
    text: &'a str,
    at: usize,
    depth: u32,
    /// One bit per open container, the innermost lowest; set for an object.
    objects: u128,
}

type Result<T> = std::result::Result<T, JsonError>;

// === impl Text ===

impl<'a> Text<'a> {
    /// The decoded text, borrowed unless it contains escapes.
    pub fn decode(self) -> Cow<'a, str> {
        if !self.escaped {
            return Cow::Borrowed(self.raw);
        }
        let raw = self.raw.as_bytes();
        let (mut bytes, mut at) = (Vec::with_capacity(raw.len()), 0);
        while let Some(run) = memchr(b'\\', &raw[at..]) {
            bytes.extend_from_slice(&raw[at..at + run]);
            // The escapes were validated when the string was read.
            at = escape_into(raw, at + run, &mut bytes).unwrap_or(raw.len());
        }
        bytes.extend_from_slice(&raw[at..]);
        // Decoding whole characters of UTF-8 yields UTF-8.
        Cow::Owned(String::from_utf8(bytes).unwrap_or_default())
    }

    /// The text between the quotes, with its escapes.
    pub fn raw(self) -> &'a str {
        self.raw
    }
}

// === impl Walk ===

impl Walk {
    /// The key of the next member; `None` once the object is closed. The caller must take or skip its value.
    #[inline]
    pub fn key<'a>(&mut self, scanner: &mut Scanner<'a>) -> Result<Option<Text<'a>>> {
        if !self.advance(scanner, b'}', "',' or '}' after an object's member")? {
            return Ok(None);
        }
        scanner.member_key().map(Some)
    }

    /// Whether the array has a next item, which the caller must take or skip.
    #[inline]
    pub fn item(&mut self, scanner: &mut Scanner<'_>) -> Result<bool> {
        self.advance(scanner, b']', "',' or ']' after an array's item")
    }

    fn advance(&mut self, scanner: &mut Scanner<'_>, close: u8, expected: &'static str) -> Result<bool> {
        let byte = scanner.token(expected)?;
        if self.first {
            self.first = false;
            if byte != close {
                return Ok(true);
            }
        } else if byte == b',' {
            scanner.at += 1;
            return Ok(true);
        } else if byte != close {
            return Err(scanner.expected(expected));
        }
        scanner.leave();
        Ok(false)
    }
}

// === impl Scanner ===

impl<'a> Scanner<'a> {
    /// A scanner before the first byte of `text`.
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0, depth: 0, objects: 0 }
    }

    /// Offset of the next byte.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Skips whitespace and returns the type of the next value.
    pub fn peek(&mut self) -> Result<Kind> {
        Ok(match self.token("a value")? {
            b'{' => Kind::Object,
            b'[' => Kind::Array,
            b'"' => Kind::String,
            b'-' | b'0'..=b'9' => Kind::Number,
            b't' | b'f' => Kind::Bool,
            b'n' => Kind::Null,
            _ => return Err(self.expected("a value")),
        })
    }

    /// Opens an object.
    pub fn object(&mut self) -> Result<Walk> {
        self.open(b'{', "an object, '{'")
    }

    /// Opens an array.
    pub fn array(&mut self) -> Result<Walk> {
        self.open(b'[', "an array, '['")
    }

    /// Takes a string.
    pub fn string(&mut self) -> Result<Text<'a>> {
        if self.token("a string")? != b'"' {
            return Err(self.expected("a string"));
        }
        self.quoted()
    }

    /// Takes a string and appends its decoded text to `out`.
    pub fn string_into(&mut self, out: &mut Vec<u8>) -> Result<()> {
        if self.token("a string")? != b'"' {
            return Err(self.expected("a string"));
        }
        self.quoted_into(out)
    }

    /// Takes a number, unparsed.
    pub fn number(&mut self) -> Result<&'a str> {
        self.token("a number")?;
        let bytes = self.text.as_bytes();
        let start = self.at;
        let digits = |mut at: usize| {
            let from = at;
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                at += 1;
            }
            if at == from { Err(JsonError::Syntax { at, expected: "a digit" }) } else { Ok(at) }
        };
        let mut at = start + usize::from(bytes[start] == b'-');
        at = if bytes.get(at) == Some(&b'0') { at + 1 } else { digits(at)? };
        if bytes.get(at) == Some(&b'.') {
            at = digits(at + 1)?;
        }
        if matches!(bytes.get(at), Some(b'e' | b'E')) {
            at += 1;
            at = digits(at + usize::from(matches!(bytes.get(at), Some(b'+' | b'-'))))?;
        }
        self.at = at;
        Ok(&self.text[start..at])
    }

    /// Takes a number: its value if it is an integer from 0 to `u32::MAX`, otherwise `None`.
    pub fn whole(&mut self) -> Result<Option<u32>> {
        self.token("a number")?;
        let bytes = self.text.as_bytes();
        let (mut at, mut value) = (self.at, 0_u64);
        while let Some(digit) = bytes.get(at).filter(|byte| byte.is_ascii_digit()) {
            value = (value * 10 + u64::from(digit - b'0')).min(u64::from(u32::MAX) + 1);
            at += 1;
        }
        let alone = !matches!(bytes.get(at), Some(b'.' | b'e' | b'E'));
        let canonical = at == self.at + 1 || at > self.at && bytes[self.at] != b'0';
        if !(alone && canonical) {
            self.number()?;
            return Ok(None);
        }
        self.at = at;
        Ok(u32::try_from(value).ok())
    }

    /// Takes `true` or `false`.
    pub fn boolean(&mut self) -> Result<bool> {
        let value = self.token("true or false")? == b't';
        self.literal(if value { "true" } else { "false" }, "true or false")?;
        Ok(value)
    }

    /// Takes `null`.
    pub fn null(&mut self) -> Result<()> {
        self.token("null")?;
        self.literal("null", "null")
    }

    /// Skips a value and returns its text.
    pub fn skip(&mut self) -> Result<&'a str> {
        self.peek()?;
        let start = self.at;
        self.value::<false>(&mut Vec::new())?;
        Ok(&self.text[start..self.at])
    }

    /// Skips a value and appends it to `out` in a canonical form: no whitespace, strings decoded, `cache_control`
    /// members left out. The order of keys stays, since chat templates print it as well.
    pub fn compact(&mut self, out: &mut Vec<u8>) -> Result<()> {
        self.value::<true>(out)
    }

    /// Checks that only whitespace follows.
    pub fn end(&mut self) -> Result<()> {
        self.space();
        if self.at < self.text.len() { Err(self.expected("the end of the body")) } else { Ok(()) }
    }

    /// Skips one value, and renders it if requested.
    fn value<const RENDER: bool>(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let floor = self.depth;
        loop {
            let mut ended = true;
            match self.token("a value")? {
                byte @ (b'{' | b'[') => {
                    self.enter(byte == b'{')?;
                    if RENDER {
                        out.push(byte);
                    }
                    let close = byte + 2;
                    debug_assert!(close == b'}' || close == b']');
                    let next = self.token("a value, a key or a closing bracket")?;
                    if next == close {
                        self.leave();
                        if RENDER {
                            out.push(close);
                        }
                    } else {
                        ended = byte == b'{' && self.member::<RENDER>(out)?;
                    }
                }
                b'"' if RENDER => {
                    out.push(b'"');
                    self.quoted_into(out)?;
                    out.push(STRING_END);
                }
                b'"' => drop(self.quoted()?),
                byte => {
                    let start = self.at;
                    match byte {
                        b'-' | b'0'..=b'9' => drop(self.number()?),
                        b't' => self.literal("true", "a value")?,
                        b'f' => self.literal("false", "a value")?,
                        b'n' => self.literal("null", "a value")?,
                        _ => return Err(self.expected("a value")),
                    }
                    if RENDER {
                        out.extend_from_slice(&self.text.as_bytes()[start..self.at]);
                        out.push(b',');
                    }
                }
            }
            while ended {
                if self.depth == floor {
                    return Ok(());
                }
                let in_object = self.objects & 1 == 1;
                let byte = self.token("',' or a closing bracket")?;
                if byte == b',' {
                    self.at += 1;
                    ended = in_object && self.member::<RENDER>(out)?;
                } else if byte == if in_object { b'}' } else { b']' } {
                    self.leave();
                    if RENDER {
                        out.push(byte);
                    }
                } else {
                    return Err(self.expected(if in_object { "',' or '}'" } else { "',' or ']'" }));
                }
            }
        }
    }

    /// Skips a member's key, and its value too if it is not rendered; returns whether the value was skipped.
    fn member<const RENDER: bool>(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        let key = self.member_key()?;
        if !RENDER {
            return Ok(false);
        }
        let key = key.decode();
        if key == NOT_PROMPT {
            self.value::<false>(out)?;
            return Ok(true);
        }
        out.push(b'"');
        out.extend_from_slice(key.as_bytes());
        out.push(STRING_END);
        Ok(false)
    }

    #[inline]
    fn member_key(&mut self) -> Result<Text<'a>> {
        if self.token("a key in quotes")? != b'"' {
            return Err(self.expected("a key in quotes"));
        }
        let key = self.quoted()?;
        if self.token("':' after a key")? != b':' {
            return Err(self.expected("':' after a key"));
        }
        self.at += 1;
        Ok(key)
    }

    fn open(&mut self, bracket: u8, expected: &'static str) -> Result<Walk> {
        if self.token(expected)? != bracket {
            return Err(self.expected(expected));
        }
        self.enter(bracket == b'{')?;
        Ok(Walk { first: true })
    }

    /// Skips an opening bracket.
    fn enter(&mut self, object: bool) -> Result<()> {
        if self.depth == DEPTH_MAX {
            return Err(JsonError::TooDeep { at: self.at });
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(object);
        self.at += 1;
        Ok(())
    }

    /// Skips a closing bracket.
    fn leave(&mut self) {
        self.depth -= 1;
        self.objects >>= 1;
        self.at += 1;
    }

    /// Skips whitespace and returns the next byte without taking it.
    #[inline]
    fn token(&mut self, expected: &'static str) -> Result<u8> {
        self.space();
        self.text.as_bytes().get(self.at).copied().ok_or(JsonError::Syntax { at: self.at, expected })
    }

    #[inline]
    fn space(&mut self) {
        let bytes = self.text.as_bytes();
        while matches!(bytes.get(self.at), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    fn expected(&self, expected: &'static str) -> JsonError {
        JsonError::Syntax { at: self.at, expected }
    }

    fn literal(&mut self, word: &'static str, expected: &'static str) -> Result<()> {
        if !self.text.as_bytes()[self.at..].starts_with(word.as_bytes()) {
            return Err(self.expected(expected));
        }
        self.at += word.len();
        Ok(())
    }

    /// Takes a string at its opening quote.
    #[inline]
    fn quoted(&mut self) -> Result<Text<'a>> {
        let bytes = self.text.as_bytes();
        let start = self.at + 1;
        let (mut at, mut escaped) = (start, false);
        loop {
            at = run_end(bytes, at)?;
            if bytes[at] == b'"' {
                self.at = at + 1;
                return Ok(Text { raw: &self.text[start..at], escaped });
            }
            escaped = true;
            at = escape_end(bytes, at)?;
        }
    }

    /// Takes a string at its opening quote and appends its decoded text to `out`.
    #[inline]
    fn quoted_into(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.text.as_bytes();
        let mut at = self.at + 1;
        loop {
            let end = run_end(bytes, at)?;
            out.extend_from_slice(&bytes[at..end]);
            if bytes[end] == b'"' {
                self.at = end + 1;
                return Ok(());
            }
            at = escape_into(bytes, end, out)?;
        }
    }
}

/// The position of the quote or backslash that ends the plain characters from `at`.
#[inline]
fn run_end(bytes: &[u8], at: usize) -> Result<usize> {
    let found = match first_special(bytes, at, 2) {
        Ok(found) => found,
        Err(at) => long_run_end(bytes, at),
    };
    match bytes.get(found) {
        Some(b'"' | b'\\') => Ok(found),
        Some(_) => {
            Err(JsonError::Syntax { at: found, expected: "control characters in strings to be escaped" })
        }
        None => Err(JsonError::Syntax { at: bytes.len(), expected: "a closing quote" }),
    }
}

/// The position of the first quote, backslash or control character within `words` words from `at`; otherwise the
/// position to continue at.
#[inline]
fn first_special(bytes: &[u8], mut at: usize, words: usize) -> std::result::Result<usize, usize> {
    for _ in 0..words {
        let Some(word) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) else { break };
        let special = special(u64::from_le_bytes(*word));
        if special != 0 {
            return Ok(at + (special.trailing_zeros() / 8) as usize);
        }
        at += 8;
    }
    Err(at)
}

/// The position of the first quote, backslash or control character from `at`, or the end.
fn long_run_end(bytes: &[u8], mut at: usize) -> usize {
    // A line of text is read in blocks, whose test compiles to SIMD without a branch per byte.
    for _ in 0..BLOCKS {
        let Some(block) = bytes.get(at..).and_then(|rest| rest.first_chunk::<32>()) else { break };
        let special =
            block.iter().fold(false, |any, byte| any | (*byte < 0x20) | (*byte == b'"') | (*byte == b'\\'));
        if special {
            return first_special(bytes, at, 4).unwrap_or(at);
        }
        at += 32;
    }
    // For longer text, a search with wider registers pays off.
    let end = at + memchr2(b'"', b'\\', &bytes[at..]).unwrap_or(bytes.len() - at);
    if bytes[at..end].iter().fold(u8::MAX, |least, byte| least.min(*byte)) >= 0x20 {
        return end;
    }
    at + bytes[at..].iter().position(|byte| *byte < 0x20).unwrap_or_default()
}

/// Marks the bytes of a word that may be a quote, a backslash or a control character by their highest bit. The lowest
/// mark is always right; a borrow can only add marks above it.
#[inline]
fn special(word: u64) -> u64 {
    const ONES: u64 = u64::MAX / 0xFF;
    let below = |word: u64, limit: u64| word.wrapping_sub(ONES * limit) & !word;
    let quote = below(word ^ (ONES * u64::from(b'"')), 1);
    let backslash = below(word ^ (ONES * u64::from(b'\\')), 1);
    (below(word, 0x20) | quote | backslash) & (ONES * 0x80)
}

/// The end of the escape at `at`.
fn escape_end(bytes: &[u8], at: usize) -> Result<usize> {
    match bytes.get(at + 1) {
        Some(b'u') => unit(bytes, at).map(|_| at + 6),
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 2),
        _ => Err(not_an_escape(at)),
    }
}

/// Appends the character of the escape at `at`, combined with a following low surrogate; returns the end of what it
/// used. An unpaired surrogate becomes U+FFFD.
fn escape_into(bytes: &[u8], at: usize, out: &mut Vec<u8>) -> Result<usize> {
    let plain = match bytes.get(at + 1) {
        Some(b'u') => {
            let (mut code, mut end) = (unit(bytes, at)?, at + 6);
            if (0xD800..0xDC00).contains(&code) && bytes[end..].starts_with(b"\\u") {
                let low = unit(bytes, end)?;
                if (0xDC00..0xE000).contains(&low) {
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    end += 6;
                }
            }
            let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
            out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            return Ok(end);
        }
        Some(b'b') => 0x08,
        Some(b'f') => 0x0C,
        Some(b'n') => b'\n',
        Some(b'r') => b'\r',
        Some(b't') => b'\t',
        Some(same @ (b'"' | b'\\' | b'/')) => *same,
        _ => return Err(not_an_escape(at)),
    };
    out.push(plain);
    Ok(at + 2)
}

fn not_an_escape(at: usize) -> JsonError {
    JsonError::Syntax { at: at + 1, expected: "an escape: one of \"\\/bfnrtu" }
}

/// The UTF-16 unit of the `\u` escape at `at`.
#[inline]
fn unit(bytes: &[u8], at: usize) -> Result<u32> {
    let digits = bytes.get(at + 2..).and_then(|rest| rest.first_chunk::<4>());
    let value =
        digits.map(|digits| digits.iter().fold(0, |value, digit| value << 4 | HEX[usize::from(*digit)]));
    // A byte that is not a hex digit sets a bit above the sixteen, in any position.
    value
        .filter(|value| *value <= 0xFFFF)
        .ok_or(JsonError::Syntax { at: at + 1, expected: "four hexadecimal digits after \\u" })
}

/// The value of each hex digit; for other bytes, a value above any sum of digits.
const HEX: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte as u8 {
            digit @ b'0'..=b'9' => (digit - b'0') as u32,
            digit @ b'a'..=b'f' => (digit - b'a') as u32 + 10,
            digit @ b'A'..=b'F' => (digit - b'A') as u32 + 10,
            _ => 0x1_0000,
        };
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    use super::*;

    fn accepts(text: &str) -> Result<()> {
        let mut scanner = Scanner::new(text);
        scanner.skip()?;
        scanner.end()
    }

    fn compact(text: &str) -> Vec<u8> {
        let mut out = Vec::new();
        let mut scanner = Scanner::new(text);
        scanner.compact(&mut out).expect("valid JSON");
        assert_eq!(scanner.at(), text.len());
        out
    }

    fn decode(literal: &str) -> String {
        let mut out = Vec::new();
        Scanner::new(literal).string_into(&mut out).expect("a string");
        let text = Scanner::new(literal).string().expect("a string").decode();
        assert_eq!(text.as_bytes(), out, "both ways of decoding agree");
        text.into_owned()
    }

    #[test]
    fn valid_texts_are_accepted() {
        for text in [
            "null",
            " true ",
            "-0.5e+10",
            "0",
            "[]",
            "{}",
            "[[],{}]",
            r#"{"a":[1,2,{"b":null}],"c":"d"}"#,
            "\t[ 1 ,\r\n2 ] ",
            r#""\u00e9\n""#,
            "\"\u{7f}é\"",
        ] {
            assert_eq!(accepts(text), Ok(()), "{text}");
        }
    }

    #[test]
    fn an_error_names_the_byte_and_what_was_expected_there() {
        for (text, at, expected) in [
            ("", 0, "a value"),
            ("[1,]", 3, "a value"),
            ("[1 2]", 3, "',' or ']'"),
            ("{\"a\" 1}", 5, "':' after a key"),
            ("{\"a\":1,}", 7, "a key in quotes"),
            ("{a:1}", 1, "a key in quotes"),
            ("[1}", 2, "',' or ']'"),
            ("\"abc", 4, "a closing quote"),
            ("nul", 0, "a value"),
            ("01", 1, "the end of the body"),
            ("-", 1, "a digit"),
            ("1.e5", 2, "a digit"),
            ("\"\\x\"", 2, "an escape: one of \"\\/bfnrtu"),
            ("\"\\u12g4\"", 2, "four hexadecimal digits after \\u"),
            ("\"\\u12fg\"", 2, "four hexadecimal digits after \\u"),
            ("\"\\u12\"", 2, "four hexadecimal digits after \\u"),
            ("\"a\nb\"", 2, "control characters in strings to be escaped"),
            ("\"0123456789abcdefghij\tb\"", 21, "control characters in strings to be escaped"),
        ] {
            assert_eq!(accepts(text), Err(JsonError::Syntax { at, expected }), "{text}");
        }
    }

    #[test]
    fn what_ends_a_string_is_found_at_any_distance() {
        for length in 0..700 {
            let plain = "x".repeat(length);
            assert_eq!(accepts(&format!("\"{plain}\"")), Ok(()), "{length}");
            assert_eq!(decode(&format!("\"{plain}\\n{plain}\"")), format!("{plain}\n{plain}"));
            for control in ['\0', '\n', '\u{1f}'] {
                let expected = "control characters in strings to be escaped";
                let error = JsonError::Syntax { at: length + 1, expected };
                assert_eq!(accepts(&format!("\"{plain}{control}{plain}\"")), Err(error), "{length}");
            }
            let error = JsonError::Syntax { at: length + 1, expected: "a closing quote" };
            assert_eq!(accepts(&format!("\"{plain}")), Err(error), "{length}");
        }
    }

    #[test]
    fn nesting_ends_at_its_limit_and_not_before() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(accepts(&nested(DEPTH_MAX as usize)), Ok(()));
        assert_eq!(
            accepts(&nested(DEPTH_MAX as usize + 1)),
            Err(JsonError::TooDeep { at: DEPTH_MAX as usize })
        );
        assert_eq!(
            accepts(&"{\"a\":".repeat(1 << 20)),
            Err(JsonError::TooDeep { at: 5 * DEPTH_MAX as usize })
        );
    }

    #[test]
    fn escapes_decode_to_their_characters() {
        assert_eq!(decode(r#""\"\\\/\b\f\n\r\tA\u0041\u00e9\u20AC""#), "\"\\/\u{8}\u{c}\n\r\tAAé€");
        assert_eq!(decode(r#""\ud83d\ude00 \uD83D\uDE00""#), "😀 😀");
    }

    #[test]
    fn half_a_surrogate_pair_decodes_to_the_replacement_character() {
        for (literal, text) in [
            (r#""\ud83d""#, "\u{fffd}"),
            (r#""\ude00x""#, "\u{fffd}x"),
            (r#""\ud83dx""#, "\u{fffd}x"),
            (r#""\ud83d\n""#, "\u{fffd}\n"),
            (r#""\ud83d\ud83d\ude00""#, "\u{fffd}😀"),
            (r#""\ud83d\u0041""#, "\u{fffd}A"),
        ] {
            assert_eq!(decode(literal), text, "{literal}");
        }
    }

    #[test]
    fn a_whole_number_is_taken_only_when_it_fits() {
        for (text, value) in [
            ("0", Some(0)),
            ("4294967295", Some(u32::MAX)),
            ("4294967296", None),
            ("99999999999999999999999999", None),
            ("-1", None),
            ("1.0", None),
            ("1e3", None),
        ] {
            assert_eq!(Scanner::new(text).whole(), Ok(value), "{text}");
        }
        let mut scanner = Scanner::new("007");
        assert_eq!((scanner.whole(), scanner.at()), (Ok(None), 1), "the number is only the first zero");
    }

    #[test]
    fn a_compact_rendering_shows_content_and_not_its_spelling() {
        let plain = compact(r#"{"a":[1,"x/é",{}],"b":null}"#);
        assert_eq!(plain, compact(" { \"\\u0061\" : [ 1 , \"x\\/\\u00e9\" , { } ] ,\n\"b\":null}"));
        assert_ne!(plain, compact(r#"{"a":[1,"x/é",{}],"b":0}"#));
        assert_ne!(compact("[1,2]"), compact("[12]"));
        assert_ne!(compact(r#"["a","b"]"#), compact(r#"["a\",\"b"]"#));
    }

    #[test]
    fn a_compact_rendering_leaves_cache_breakpoints_out_wherever_they_are() {
        for text in [
            r#"{"cache_control":{"type":"ephemeral"},"a":1,"b":[{"c":2}]}"#,
            r#"{"a":1,"cache_control":null,"b":[{"c":2}]}"#,
            r#"{"a":1,"b":[{"c":2,"cache_control":[1,{}]}]}"#,
        ] {
            assert_eq!(compact(text), compact(r#"{"a":1,"b":[{"c":2}]}"#), "{text}");
        }
        assert_eq!(compact(r#"{"cache_control":1}"#), compact("{}"));
    }

    /// Values of every kind, nested.
    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(6, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::btree_map(any::<String>(), inner, 0..6)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_value_that_serde_writes_is_accepted(value in json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
            prop_assert_eq!(accepts(&text.expect("serde writes its own values")), Ok(()));
        }

        #[test]
        fn a_value_renders_alike_however_it_is_laid_out(value in json()) {
            let dense = compact(&value.to_string());
            let pretty = serde_json::to_string_pretty(&value).expect("serde writes its own values");
            prop_assert_eq!(dense, compact(&pretty));
        }

        #[test]
        fn every_string_decodes_to_what_serde_encoded(text: String) {
            let literal = serde_json::to_string(&text).expect("serde writes strings");
            prop_assert_eq!(decode(&literal), text);
        }

        /// Invariant: A body is accepted exactly when it is valid JSON, and never when it is truncated.
        ///
        /// Also held by `a_damaged_value_is_accepted_exactly_when_serde_accepts_it`,
        /// `every_truncation_of_a_body_is_refused`.
        #[test]
        fn text_near_json_is_accepted_exactly_when_serde_accepts_it(
            text in r#"([\[\]{},:]|"[a-z\\"]{0,3}"|true|null|-?[0-9.eE+]{1,4}|\\u[0-9a-f]{2,4}| ){0,12}"#
        ) {
            prop_assert_eq!(accepts(&text).is_ok(), serde_json::from_str::<IgnoredAny>(&text).is_ok(), "{}", text);
        }

        #[test]
        fn a_damaged_value_is_accepted_exactly_when_serde_accepts_it(
            value in json(), at: prop::sample::Index, byte in 0x09_u8..0x7F
        ) {
            let mut text = value.to_string().into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            if let Ok(text) = std::str::from_utf8(&text) {
                prop_assert_eq!(accepts(text).is_ok(), serde_json::from_str::<IgnoredAny>(text).is_ok(), "{}", text);
            }
        }

        #[test]
        fn any_text_is_scanned_without_a_panic(text: String) {
            let mut out = Vec::new();
            let rendered = Scanner::new(&text).compact(&mut out).is_ok();
            prop_assert_eq!(rendered, Scanner::new(&text).skip().is_ok(), "rendering and skipping agree");
        }
    }
}
