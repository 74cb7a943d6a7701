//! Msgpack scanner: walks bytes once and copies nothing.
//!
//! It does not recurse and does not trust counts: an array header that announces four billion items costs nothing until
//! the items arrive. Lists of token ids take most of the time, so they have their own path ([`Scanner::u32s`]).

/// Why bytes are not the expected msgpack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {at}: {expected} expected")]
pub struct MsgpackError {
    /// Offset of the unexpected byte.
    pub at: usize,
    /// What was expected.
    pub expected: &'static str,
}

/// The type of a value, determined by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No value.
    Nil,
    /// True or false.
    Bool,
    /// An integer of any width.
    Int,
    /// A float of either width.
    Float,
    /// Text.
    Str,
    /// Bytes.
    Bin,
    /// A list.
    Array,
    /// Pairs of key and value.
    Map,
    /// An application's own type.
    Ext,
}

/// A position in msgpack bytes.
#[derive(Clone, Debug)]
pub struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Result<T> = std::result::Result<T, MsgpackError>;

/// Decoding of ids that fit into 32 bits, by their first byte: the total length in the lowest byte, then by how much
/// the eight bytes from there are shifted left and right to give the value. Zero for all other bytes.
const IDS: [u32; 256] = {
    let mut ids = [0; 256];
    let mut byte = 0;
    while byte < 0x80 {
        ids[byte] = 1 | 56 << 16;
        byte += 1;
    }
    ids[0xcc] = 2 | 8 << 8 | 56 << 16;
    ids[0xcd] = 3 | 8 << 8 | 48 << 16;
    ids[0xce] = 5 | 8 << 8 | 32 << 16;
    ids
};

// === impl Scanner ===

impl<'a> Scanner<'a> {
    /// A scanner before the first of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset of the next byte.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Number of remaining bytes: an upper bound of the remaining values.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The bytes from `start` up to the current position.
    pub fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start.min(self.at)..self.at]
    }

    /// The type of the next value.
    #[inline]
    pub fn peek(&self) -> Result<Kind> {
        Ok(match self.first("a value")? {
            0xc0 => Kind::Nil,
            0xc2 | 0xc3 => Kind::Bool,
            0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xd3 => Kind::Int,
            0xca | 0xcb => Kind::Float,
            0xa0..=0xbf | 0xd9..=0xdb => Kind::Str,
            0xc4..=0xc6 => Kind::Bin,
            0x90..=0x9f | 0xdc | 0xdd => Kind::Array,
            0x80..=0x8f | 0xde | 0xdf => Kind::Map,
            0xc7..=0xc9 | 0xd4..=0xd8 => Kind::Ext,
            0xc1 => return Err(self.expected("a value")),
        })
    }

    /// Takes a nil, if it is next.
    #[inline]
    pub fn nil(&mut self) -> bool {
        let nil = self.bytes.get(self.at) == Some(&0xc0);
        self.at += usize::from(nil);
        nil
    }

    /// Opens an array; returns its announced number of items.
    #[inline]
    pub fn array(&mut self) -> Result<u32> {
        match self.first("an array")? {
            byte @ 0x90..=0x9f => {
                self.at += 1;
                Ok(u32::from(byte & 0x0f))
            }
            0xdc => Ok(u32::from(u16::from_be_bytes(self.tail("an array")?))),
            0xdd => Ok(u32::from_be_bytes(self.tail("an array")?)),
            _ => Err(self.expected("an array")),
        }
    }

    /// Opens a map; returns its announced number of pairs.
    #[inline]
    pub fn map(&mut self) -> Result<u32> {
        match self.first("a map")? {
            byte @ 0x80..=0x8f => {
                self.at += 1;
                Ok(u32::from(byte & 0x0f))
            }
            0xde => Ok(u32::from(u16::from_be_bytes(self.tail("a map")?))),
            0xdf => Ok(u32::from_be_bytes(self.tail("a map")?)),
            _ => Err(self.expected("a map")),
        }
    }

    /// Takes an integer; every msgpack integer fits.
    pub fn int(&mut self) -> Result<i128> {
        let negative = self.negative();
        let bits = self.bits()?;
        Ok(if negative { i128::from(bits as i64) } else { i128::from(bits) })
    }

    /// Takes an integer as 64 bits, negative ones in two's complement.
    #[inline]
    pub fn bits(&mut self) -> Result<u64> {
        const WANTED: &str = "a whole number";
        Ok(match self.first(WANTED)? {
            byte @ (0x00..=0x7f | 0xe0..=0xff) => {
                self.at += 1;
                i64::from(byte as i8) as u64
            }
            0xcc => u64::from(u8::from_be_bytes(self.tail(WANTED)?)),
            0xcd => u64::from(u16::from_be_bytes(self.tail(WANTED)?)),
            0xce => u64::from(u32::from_be_bytes(self.tail(WANTED)?)),
            0xcf => u64::from_be_bytes(self.tail(WANTED)?),
            0xd0 => i64::from(i8::from_be_bytes(self.tail(WANTED)?)) as u64,
            0xd1 => i64::from(i16::from_be_bytes(self.tail(WANTED)?)) as u64,
            0xd2 => i64::from(i32::from_be_bytes(self.tail(WANTED)?)) as u64,
            0xd3 => i64::from_be_bytes(self.tail(WANTED)?) as u64,
            _ => return Err(self.expected(WANTED)),
        })
    }

    /// Whether the next integer is negative.
    fn negative(&self) -> bool {
        match self.bytes.get(self.at) {
            Some(0xe0..=0xff) => true,
            Some(0xd0..=0xd3) => self.bytes.get(self.at + 1).is_some_and(|byte| *byte >= 0x80),
            _ => false,
        }
    }

    /// Takes an integer or a float.
    pub fn number(&mut self) -> Result<f64> {
        match self.first("a number")? {
            0xca => Ok(f64::from(f32::from_be_bytes(self.tail("a number")?))),
            0xcb => Ok(f64::from_be_bytes(self.tail("a number")?)),
            _ => self.int().map(|int| int as f64),
        }
    }

    /// Takes a UTF-8 string.
    pub fn str(&mut self) -> Result<&'a str> {
        let start = self.at;
        let bytes = self.text()?;
        std::str::from_utf8(bytes).map_err(|_| MsgpackError { at: start, expected: "UTF-8 text" })
    }

    /// Takes a string as bytes without checking for UTF-8, for comparisons.
    #[inline]
    pub fn text(&mut self) -> Result<&'a [u8]> {
        let length = match self.first("text")? {
            byte @ 0xa0..=0xbf => {
                self.at += 1;
                u32::from(byte & 0x1f)
            }
            0xd9 => u32::from(u8::from_be_bytes(self.tail("text")?)),
            0xda => u32::from(u16::from_be_bytes(self.tail("text")?)),
            0xdb => u32::from_be_bytes(self.tail("text")?),
            _ => return Err(self.expected("text")),
        };
        self.take(length)
    }

    /// Takes a byte string.
    #[inline]
    pub fn bin(&mut self) -> Result<&'a [u8]> {
        let length = match self.first("bytes")? {
            0xc4 => u32::from(u8::from_be_bytes(self.tail("bytes")?)),
            0xc5 => u32::from(u16::from_be_bytes(self.tail("bytes")?)),
            0xc6 => u32::from_be_bytes(self.tail("bytes")?),
            _ => return Err(self.expected("bytes")),
        };
        self.take(length)
    }

    /// Takes integers from 0 to `u32::MAX` until `out` is full, four little-endian bytes each.
    #[inline]
    pub fn u32s(&mut self, out: &mut [u8]) -> Result<()> {
        let mut at = self.at;
        let (ids, _) = out.as_chunks_mut::<4>();
        for id in ids {
            // The four encodings are unpredictable for the ids of a large vocabulary, so the code does not branch on
            // them.
            if let Some(word) = self.bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) {
                let form = IDS[usize::from(word[0])];
                if form != 0 {
                    let word = u64::from_be_bytes(*word);
                    *id = (word.wrapping_shl(form >> 8).wrapping_shr(form >> 16) as u32).to_le_bytes();
                    at += (form & 0xff) as usize;
                    continue;
                }
            }
            self.at = at;
            let value = self.int()?;
            *id = u32::try_from(value)
                .map_err(|_| MsgpackError { at, expected: "a token id from 0 to 4294967295" })?
                .to_le_bytes();
            at = self.at;
        }
        self.at = at;
        Ok(())
    }

    /// Skips a value of any type.
    pub fn skip(&mut self) -> Result<()> {
        self.skip_values(1)
    }

    /// Skips `count` values.
    pub fn skip_values(&mut self, count: u64) -> Result<()> {
        // Remaining values. Each takes at least a byte, so the loop ends at the latest with the bytes.
        let mut left = count;
        while left > 0 {
            left -= 1;
            match self.peek()? {
                Kind::Nil | Kind::Bool => self.at += 1,
                Kind::Int => {
                    self.int()?;
                }
                Kind::Float => {
                    self.number()?;
                }
                Kind::Bin => {
                    self.bin()?;
                }
                Kind::Str => {
                    self.text()?;
                }
                Kind::Array => left = left.saturating_add(u64::from(self.array()?)),
                Kind::Map => left = left.saturating_add(2 * u64::from(self.map()?)),
                Kind::Ext => self.ext()?,
            }
        }
        Ok(())
    }

    fn ext(&mut self) -> Result<()> {
        const WANTED: &str = "an extension";
        let length = match self.first(WANTED)? {
            byte @ 0xd4..=0xd8 => {
                self.at += 1;
                1 << (byte - 0xd4)
            }
            0xc7 => u32::from(u8::from_be_bytes(self.tail(WANTED)?)),
            0xc8 => u32::from(u16::from_be_bytes(self.tail(WANTED)?)),
            0xc9 => u32::from_be_bytes(self.tail(WANTED)?),
            _ => return Err(self.expected(WANTED)),
        };
        // Type, then data.
        self.take(1)?;
        self.take(length)?;
        Ok(())
    }

    #[inline]
    fn first(&self, expected: &'static str) -> Result<u8> {
        self.bytes.get(self.at).copied().ok_or(MsgpackError { at: self.at, expected })
    }

    /// The bytes after the first.
    #[inline]
    fn tail<const N: usize>(&mut self, expected: &'static str) -> Result<[u8; N]> {
        let tail = self.bytes.get(self.at + 1..).and_then(<[u8]>::first_chunk);
        let tail = *tail.ok_or(MsgpackError { at: self.at, expected })?;
        self.at += 1 + N;
        Ok(tail)
    }

    #[inline]
    fn take(&mut self, length: u32) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..length as usize).ok_or(MsgpackError {
            at: self.bytes.len(),
            expected: "the rest of a string or of binary data",
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    #[cold]
    fn expected(&self, expected: &'static str) -> MsgpackError {
        MsgpackError { at: self.at, expected }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every encoding of an integer, the shortest first.
    fn forms(value: i64) -> Vec<Vec<u8>> {
        let mut forms = Vec::new();
        let mut form = |fits: bool, head: &[u8], tail: &[u8]| {
            if fits {
                forms.push([head, tail].concat());
            }
        };
        form((-32..128).contains(&value), &[value as u8], &[]);
        form((0..=0xff).contains(&value), &[0xcc], &(value as u8).to_be_bytes());
        form((0..=0xffff).contains(&value), &[0xcd], &(value as u16).to_be_bytes());
        form((0..=0xffff_ffff).contains(&value), &[0xce], &(value as u32).to_be_bytes());
        form(value >= 0, &[0xcf], &(value as u64).to_be_bytes());
        form(i8::try_from(value).is_ok(), &[0xd0], &(value as i8).to_be_bytes());
        form(i16::try_from(value).is_ok(), &[0xd1], &(value as i16).to_be_bytes());
        form(i32::try_from(value).is_ok(), &[0xd2], &(value as i32).to_be_bytes());
        form(true, &[0xd3], &value.to_be_bytes());
        forms
    }

    #[test]
    fn a_count_costs_nothing_until_its_items_are_there() {
        let mut scanner = Scanner::new(&[0xdd, 0xff, 0xff, 0xff, 0xff, 0x01]);
        assert_eq!(scanner.array(), Ok(u32::MAX));
        assert_eq!(scanner.clone().skip_values(u64::from(u32::MAX)).unwrap_err().at, 6);
        assert_eq!(scanner.remaining(), 1);
    }

    #[test]
    fn deep_nesting_is_passed_over_without_recursion() {
        let deep = vec![0x91; 1 << 20];
        assert_eq!(Scanner::new(&deep).skip().unwrap_err().at, deep.len());
        let closed: Vec<u8> = deep.into_iter().chain([0xc0]).collect();
        let mut scanner = Scanner::new(&closed);
        assert_eq!((scanner.skip(), scanner.remaining()), (Ok(()), 0));
    }

    #[test]
    fn every_kind_is_passed_over_whole() {
        let values: [&[u8]; 16] = [
            &[0xc0],
            &[0xc3],
            &[0x7f],
            &[0xe0],
            &[0xca, 0, 0, 0, 0],
            &[0xcb, 0, 0, 0, 0, 0, 0, 0, 0],
            &[0xa2, b'a', 0xff],
            &[0xd9, 1, b'a'],
            &[0xda, 0, 1, b'a'],
            &[0xc4, 1, 0],
            &[0xc5, 0, 1, 0],
            &[0x82, 0x01, 0x02, 0x03, 0x90],
            &[0xde, 0, 1, 0x01, 0x02],
            &[0xd5, 7, 1, 2],
            &[0xc7, 2, 7, 1, 2],
            &[0xdc, 0, 2, 0xc0, 0x91, 0x01],
        ];
        for value in values {
            let followed = [value, &[0x05]].concat();
            let mut scanner = Scanner::new(&followed);
            scanner.skip().unwrap_or_else(|error| panic!("{value:x?}: {error}"));
            assert_eq!((scanner.int(), scanner.remaining()), (Ok(5), 0), "{value:x?}");
            for end in 0..value.len() {
                assert!(Scanner::new(&value[..end]).skip().is_err(), "{value:x?} cut at {end}");
            }
        }
        assert_eq!(Scanner::new(&[0xc1]).peek().unwrap_err().at, 0, "the reserved byte");
    }

    #[test]
    fn a_text_or_bytes_shorter_than_they_say_are_refused() {
        assert!(Scanner::new(&[0xa5, b'a']).str().is_err());
        assert!(Scanner::new(&[0xc6, 0xff, 0xff, 0xff, 0xff, 1]).bin().is_err());
        assert_eq!(Scanner::new(&[0xa1, 0xff]).str().unwrap_err().expected, "UTF-8 text");
    }

    proptest! {
        #[test]
        fn a_whole_number_is_read_in_any_width(value in any::<i64>(), shift in 0..64_u32) {
            let value = value >> shift;
            for form in forms(value) {
                let mut scanner = Scanner::new(&form);
                prop_assert_eq!((scanner.int(), scanner.remaining()), (Ok(i128::from(value)), 0));
            }
        }

        #[test]
        fn ids_are_read_in_any_width(
            ids in prop::collection::vec((any::<u32>(), 0..32_u32, any::<prop::sample::Index>()), 0..40),
            after in prop::collection::vec(any::<u8>(), 0..8),
        ) {
            let ids: Vec<_> = ids.into_iter().map(|(id, shift, form)| (id >> shift, form)).collect();
            let mut bytes: Vec<u8> =
                ids.iter().flat_map(|(id, form)| form.get(&forms(i64::from(*id))).clone()).collect();
            let length = bytes.len();
            bytes.extend(after);
            let mut out = vec![0; 4 * ids.len()];
            let mut scanner = Scanner::new(&bytes);
            prop_assert_eq!(scanner.u32s(&mut out), Ok(()));
            prop_assert_eq!(scanner.at(), length);
            let wanted: Vec<u8> = ids.iter().flat_map(|(id, _)| id.to_le_bytes()).collect();
            prop_assert_eq!(out, wanted);
        }

        #[test]
        fn what_is_no_id_is_refused(value in prop_oneof![i64::MIN..0, (1_i64 << 32)..i64::MAX]) {
            for form in forms(value) {
                prop_assert!(Scanner::new(&form).u32s(&mut [0; 4]).is_err());
            }
        }

        #[test]
        fn any_bytes_are_walked_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut scanner = Scanner::new(&bytes);
            while scanner.skip().is_ok() {}
            prop_assert!(scanner.at() <= bytes.len());
        }
    }
}
