//! A scanner that walks JSON text once, validating as it goes, and copies nothing it is not asked for.
//!
//! The bodies a gateway sees are a few keys around one or many long strings, so strings are where the time goes:
//! `memchr2` finds the next quote or backslash with SIMD, and a reduction the compiler vectorises looks for control
//! characters. The caller drives: it opens objects and arrays, takes the values it knows and skips the others, so
//! every byte is validated exactly once whichever way it goes.
//!
//! Accepts RFC 8259 text, with one leniency that engines written in Python share: a `\u` escape may name half a
//! surrogate pair, which decodes to U+FFFD. Nesting is limited to [`DEPTH_MAX`]; nothing recurses.

use std::borrow::Cow;

use memchr::{memchr, memchr2};

/// Containers that may be open at once; serde_json's limit, and beyond what chat bodies use.
pub const DEPTH_MAX: u32 = 128;

/// Ends a decoded string inside [`Scanner::compact`]'s rendering. No UTF-8 text holds this byte.
pub(crate) const STRING_END: u8 = 0xFC;

/// Object members that clients move about without changing the prompt: Anthropic's cache breakpoints, which
/// travel to the last message of every turn and would make each turn's rendering differ from the last.
pub(crate) const NOT_PROMPT: &str = "cache_control";

/// Why a text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonError {
    /// Something else was needed at this byte.
    Syntax {
        /// Offset of the byte that does not fit.
        at: usize,
        /// What would have fitted.
        expected: &'static str,
    },
    /// A container opened at this byte, [`DEPTH_MAX`] others being open.
    TooDeep {
        /// Offset of the opening bracket.
        at: usize,
    },
}

/// What a value is, told by its first byte.
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

/// A string of the text, between its quotes, its escapes validated and not yet decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text<'a> {
    raw: &'a str,
    escaped: bool,
}

/// Where a walk over the members of an object or the items of an array stands.
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
    /// One bit per open container, the innermost lowest: set for an object.
    objects: u128,
}

type Result<T> = std::result::Result<T, JsonError>;

// === impl Text ===

impl<'a> Text<'a> {
    /// The characters, borrowed unless an escape had to be decoded.
    pub fn decode(self) -> Cow<'a, str> {
        if !self.escaped {
            return Cow::Borrowed(self.raw);
        }
        let mut bytes = Vec::with_capacity(self.raw.len());
        decode_into(self.raw.as_bytes(), &mut bytes);
        // Decoding whole characters of UTF-8 yields UTF-8.
        Cow::Owned(String::from_utf8(bytes).unwrap_or_default())
    }

    /// The text between the quotes, escapes and all.
    pub fn raw(self) -> &'a str {
        self.raw
    }
}

// === impl Walk ===

impl Walk {
    /// The key of the next member, or none once the object is closed. The caller takes or skips its value.
    #[inline]
    pub fn key<'a>(&mut self, scanner: &mut Scanner<'a>) -> Result<Option<Text<'a>>> {
        if !self.advance(scanner, b'}', "',' or '}' after an object's member")? {
            return Ok(None);
        }
        scanner.member_key().map(Some)
    }

    /// Whether there is a next item in the array, which the caller then takes or skips.
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
    /// Starts before the first byte of `text`.
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0, depth: 0, objects: 0 }
    }

    /// Offset of the next byte.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Passes whitespace and tells what value begins here.
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

    /// Opens the object that must begin here.
    pub fn object(&mut self) -> Result<Walk> {
        self.open(b'{', "an object, '{'")
    }

    /// Opens the array that must begin here.
    pub fn array(&mut self) -> Result<Walk> {
        self.open(b'[', "an array, '['")
    }

    /// Takes the string that must begin here.
    pub fn string(&mut self) -> Result<Text<'a>> {
        if self.token("a string")? != b'"' {
            return Err(self.expected("a string"));
        }
        self.quoted()
    }

    /// Takes the string that must begin here and appends its characters to `out`.
    pub fn string_into(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let text = self.string()?;
        if text.escaped {
            decode_into(text.raw.as_bytes(), out);
        } else {
            out.extend_from_slice(text.raw.as_bytes());
        }
        Ok(())
    }

    /// Takes the number that must begin here, as it is written.
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

    /// Takes the number that must begin here if it is a whole one from 0 to `u32::MAX`; otherwise passes it.
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

    /// Takes the `true` or `false` that must begin here.
    pub fn boolean(&mut self) -> Result<bool> {
        let value = self.token("true or false")? == b't';
        self.literal(if value { "true" } else { "false" }, "true or false")?;
        Ok(value)
    }

    /// Takes the `null` that must begin here.
    pub fn null(&mut self) -> Result<()> {
        self.token("null")?;
        self.literal("null", "null")
    }

    /// Passes the value that begins here and returns it as it is written.
    pub fn skip(&mut self) -> Result<&'a str> {
        self.peek()?;
        let start = self.at;
        self.value::<false>(&mut Vec::new())?;
        Ok(&self.text[start..self.at])
    }

    /// Passes the value that begins here and appends it to `out` in a form that only its content decides: no
    /// whitespace, strings decoded, `cache_control` members left out. The order of keys stays, since chat templates
    /// print it as well.
    pub fn compact(&mut self, out: &mut Vec<u8>) -> Result<()> {
        self.value::<true>(out)
    }

    /// Checks that nothing but whitespace follows.
    pub fn end(&mut self) -> Result<()> {
        self.space();
        if self.at < self.text.len() { Err(self.expected("the end of the body")) } else { Ok(()) }
    }

    /// Passes one value, rendering it if asked to.
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
                b'"' => {
                    let text = self.quoted()?;
                    if RENDER {
                        out.push(b'"');
                        decode_into(text.raw.as_bytes(), out);
                        out.push(STRING_END);
                    }
                }
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

    /// Passes a member's key, and its value too if it is not to be rendered; tells whether it did.
    fn member<const RENDER: bool>(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        let key = self.member_key()?;
        if !RENDER {
            return Ok(false);
        }
        if key.decode() == NOT_PROMPT {
            self.value::<false>(out)?;
            return Ok(true);
        }
        out.push(b'"');
        decode_into(key.raw.as_bytes(), out);
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

    /// Passes the opening bracket here.
    fn enter(&mut self, object: bool) -> Result<()> {
        if self.depth == DEPTH_MAX {
            return Err(JsonError::TooDeep { at: self.at });
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(object);
        self.at += 1;
        Ok(())
    }

    /// Passes the closing bracket here.
    fn leave(&mut self) {
        self.depth -= 1;
        self.objects >>= 1;
        self.at += 1;
    }

    /// Passes whitespace and shows the byte that follows.
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

    /// Takes the string whose opening quote is here.
    #[inline]
    fn quoted(&mut self) -> Result<Text<'a>> {
        let bytes = self.text.as_bytes();
        let start = self.at + 1;
        let mut at = start;
        // Keys and short values end before a SIMD search pays for its start.
        for _ in 0..16 {
            match bytes.get(at) {
                Some(b'"') => {
                    self.at = at + 1;
                    return Ok(Text { raw: &self.text[start..at], escaped: false });
                }
                Some(byte) if *byte >= 0x20 && *byte != b'\\' => at += 1,
                _ => break,
            }
        }
        self.quoted_rest(start, at)
    }

    /// The rest of a string that began at `start`, validated up to `at`.
    fn quoted_rest(&mut self, start: usize, mut at: usize) -> Result<Text<'a>> {
        let bytes = self.text.as_bytes();
        let mut escaped = false;
        loop {
            let Some(run) = memchr2(b'"', b'\\', &bytes[at..]) else {
                return Err(JsonError::Syntax { at: bytes.len(), expected: "a closing quote" });
            };
            plain(&bytes[at..at + run], at)?;
            at += run;
            if bytes[at] == b'"' {
                self.at = at + 1;
                return Ok(Text { raw: &self.text[start..at], escaped });
            }
            escaped = true;
            at += 1;
            match bytes.get(at) {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => at += 1,
                Some(b'u') => {
                    let hex = bytes.get(at + 1..at + 5).unwrap_or_default();
                    if hex.len() < 4 || !hex.iter().all(u8::is_ascii_hexdigit) {
                        return Err(JsonError::Syntax { at, expected: "four hexadecimal digits after \\u" });
                    }
                    at += 5;
                }
                _ => return Err(JsonError::Syntax { at, expected: "an escape: one of \"\\/bfnrtu" }),
            }
        }
    }
}

/// Checks that `run`, which begins at offset `at`, holds no control characters.
#[inline]
fn plain(run: &[u8], at: usize) -> Result<()> {
    // A minimum over all bytes compiles to SIMD without a branch per byte.
    if run.iter().fold(u8::MAX, |least, byte| least.min(*byte)) >= 0x20 {
        return Ok(());
    }
    let offset = run.iter().position(|byte| *byte < 0x20).unwrap_or_default();
    Err(JsonError::Syntax { at: at + offset, expected: "control characters in strings to be escaped" })
}

/// Appends the characters of a validated string.
fn decode_into(mut raw: &[u8], out: &mut Vec<u8>) {
    while let Some(run) = memchr(b'\\', raw) {
        out.extend_from_slice(&raw[..run]);
        raw = &raw[run + 1..];
        let Some((escape, rest)) = raw.split_first() else { return };
        raw = rest;
        match escape {
            b'b' => out.push(0x08),
            b'f' => out.push(0x0C),
            b'n' => out.push(b'\n'),
            b'r' => out.push(b'\r'),
            b't' => out.push(b'\t'),
            b'u' => {
                let (character, rest) = unicode(raw);
                out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                raw = rest;
            }
            same => out.push(*same),
        }
    }
    out.extend_from_slice(raw);
}

/// The character of a `\u` escape whose digits begin `raw`, joined with the low surrogate that may follow, and what
/// is left. Half a pair is U+FFFD.
fn unicode(raw: &[u8]) -> (char, &[u8]) {
    let unit = |raw: &[u8]| {
        raw.iter().take(4).fold(0, |value, digit| value << 4 | char::from(*digit).to_digit(16).unwrap_or_default())
    };
    let (high, rest) = (unit(raw), raw.get(4..).unwrap_or_default());
    if !(0xD800..0xDC00).contains(&high) {
        return (char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER), rest);
    }
    if let Some(second) = rest.strip_prefix(b"\\u") {
        let low = unit(second);
        if (0xDC00..0xE000).contains(&low) {
            let code = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
            let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
            return (character, second.get(4..).unwrap_or_default());
        }
    }
    (char::REPLACEMENT_CHARACTER, rest)
}
