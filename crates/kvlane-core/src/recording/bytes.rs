//! Variable-length numbers, and the key tables that shorten repeated keys to two bytes.

use xxhash_rust::xxh3::xxh3_64;

/// Keys of one kind that a segment remembers.
const KEYS: usize = 1 << 11;

/// The unread bytes of a segment.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

/// Table of keys. A key is a hash already, so its low bits select its entry.
#[derive(Clone, Debug)]
pub(super) struct Keys(Vec<u64>);

/// Appends a number, seven bits per byte, lowest first.
pub(super) fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Zigzag encoding: small for small absolute values.
pub(super) const fn folded(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)) as u64
}

pub(super) const fn unfolded(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

/// Checksum of written bytes.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

// === impl Cursor ===

impl<'a> Cursor<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    pub(super) fn u64_le(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    pub(super) fn f64(&mut self) -> Option<f64> {
        Some(f64::from_bits(self.u64_le()?))
    }

    /// A length, and that many bytes.
    pub(super) fn sized(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        self.take(len)
    }
}

// === impl Keys ===

impl Default for Keys {
    fn default() -> Self {
        Self(vec![0; KEYS])
    }
}

impl Keys {
    pub(super) fn clear(&mut self) {
        self.0.fill(0);
    }

    pub(super) fn put(&mut self, out: &mut Vec<u8>, key: u64) {
        let place = key as usize % KEYS;
        if self.0[place] == key {
            return put(out, place as u64 + 1);
        }
        self.0[place] = key;
        out.push(0);
        out.extend_from_slice(&key.to_le_bytes());
    }

    pub(super) fn read(&mut self, from: &mut Cursor<'_>) -> Option<u64> {
        match usize::try_from(from.number()?).ok()? {
            0 => {
                let key = from.u64_le()?;
                self.0[key as usize % KEYS] = key;
                Some(key)
            }
            place => self.0.get(place - 1).copied(),
        }
    }
}
