//! Protocol Buffers: the wire format, for the few messages that are read and written here.
//!
//! A message is a sequence of numbered fields. Unknown fields are skipped; a message ends at its first invalid field.

/// A decoded field.
#[derive(Debug, PartialEq)]
pub enum Field<'a> {
    /// A number, of any of the three encodings.
    Number(u64),
    /// A string, bytes, or a nested message.
    Bytes(&'a [u8]),
}

/// A message under construction.
#[derive(Debug, Default)]
pub struct Message(pub Vec<u8>);

/// Wire types.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

// === impl Message ===

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn tag(&mut self, field: u64, wire: u64) {
        self.varint(field << 3 | wire);
    }

    /// A number as a varint: `int32`, `uint64`, `bool`, enums. Negative numbers are in two's complement.
    pub fn number(&mut self, field: u64, value: u64) {
        self.tag(field, VARINT);
        self.varint(value);
    }

    /// A number of eight bytes: `fixed64`, `double`.
    pub fn fixed64(&mut self, field: u64, value: u64) {
        self.tag(field, FIXED64);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// A number of four bytes: `fixed32`, `float`.
    pub fn fixed32(&mut self, field: u64, value: u32) {
        self.tag(field, FIXED32);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// A string or bytes.
    pub fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.tag(field, LENGTH);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// A nested message, written by `write`.
    pub fn message(&mut self, field: u64, write: impl FnOnce(&mut Self)) {
        self.tag(field, LENGTH);
        let at = self.0.len();
        // Most nested messages are shorter than 128 bytes, whose length takes one byte.
        self.0.push(0);
        write(self);
        let len = self.0.len() - at - 1;
        if let Ok(short @ 0..0x80) = u8::try_from(len) {
            self.0[at] = short;
            return;
        }
        let mut length = Self::default();
        length.varint(len as u64);
        self.0.splice(at..=at, length.0);
    }
}

/// A message, or a field of it, that is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message is not valid Protocol Buffers")]
pub struct Invalid;

/// The fields of a message with their numbers, up to the first invalid one.
pub fn fields(message: &[u8]) -> impl Iterator<Item = (u64, Field<'_>)> {
    checked_fields(message).map_while(Result::ok)
}

/// The fields of a message with their numbers. The last item is an error if the message is not valid.
pub fn checked_fields(mut left: &[u8]) -> impl Iterator<Item = Result<(u64, Field<'_>), Invalid>> {
    std::iter::from_fn(move || {
        if left.is_empty() {
            return None;
        }
        let field = read_field(&mut left);
        if field.is_none() {
            left = &[];
        }
        Some(field.ok_or(Invalid))
    })
}

fn read_field<'a>(left: &mut &'a [u8]) -> Option<(u64, Field<'a>)> {
    let tag = read_varint(left)?;
    let field = match tag & 7 {
        VARINT => Field::Number(read_varint(left)?),
        FIXED64 => Field::Number(u64::from_le_bytes(take(left, 8)?.try_into().ok()?)),
        LENGTH => {
            let len = usize::try_from(read_varint(left)?).ok()?;
            Field::Bytes(take(left, len)?)
        }
        FIXED32 => Field::Number(u32::from_le_bytes(take(left, 4)?.try_into().ok()?).into()),
        _ => return None,
    };
    Some((tag >> 3, field))
}

/// The first field with this number, if it is a string, bytes or a message.
pub fn bytes_of(message: &[u8], number: u64) -> Option<&[u8]> {
    fields(message).find_map(|field| match field {
        (found, Field::Bytes(bytes)) if found == number => Some(bytes),
        _ => None,
    })
}

/// The first field with this number, if it is a number.
pub fn number_of(message: &[u8], number: u64) -> Option<u64> {
    fields(message).find_map(|field| match field {
        (found, Field::Number(value)) if found == number => Some(value),
        _ => None,
    })
}

/// A message without the fields of these numbers.
///
/// # Errors
/// The message is not valid.
pub fn without(message: &[u8], numbers: &[u64]) -> Result<Vec<u8>, Invalid> {
    let (mut kept, mut left) = (Vec::with_capacity(message.len()), message);
    while !left.is_empty() {
        let before = left;
        let (number, _) = read_field(&mut left).ok_or(Invalid)?;
        if !numbers.contains(&number) {
            kept.extend_from_slice(&before[..before.len() - left.len()]);
        }
    }
    Ok(kept)
}

fn take<'a>(left: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, rest) = left.split_at_checked(len)?;
    *left = rest;
    Some(taken)
}

fn read_varint(left: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = left.split_first()?;
        *left = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_without_some_fields_has_the_others_as_they_were() {
        let mut all = Message::default();
        all.number(1, 300);
        all.bytes(8, b"left out");
        all.fixed32(2, 7);
        all.number(6, 1);
        let mut others = Message::default();
        others.number(1, 300);
        others.fixed32(2, 7);
        assert_eq!(without(&all.0, &[6, 8]), Ok(others.0));
        assert_eq!(without(&all.0[..all.0.len() - 1], &[6]), Err(Invalid));
    }

    #[test]
    fn a_nested_message_of_any_length_is_read_as_written() {
        for len in [0, 1, 126, 127, 128, 129, 16_383, 16_384, 70_000] {
            let text = vec![b'x'; len];
            let mut message = Message::default();
            message.number(1, u64::MAX);
            message.message(2, |inner| {
                inner.message(3, |inner| inner.bytes(4, &text));
                inner.fixed32(5, 7);
            });
            message.fixed64(6, 9);
            let inner = bytes_of(&message.0, 2).expect("the message");
            assert_eq!(bytes_of(inner, 3).and_then(|inner| bytes_of(inner, 4)), Some(&text[..]), "{len}");
            assert_eq!((number_of(inner, 5), number_of(&message.0, 6)), (Some(7), Some(9)));
            assert_eq!(number_of(&message.0, 1), Some(u64::MAX));
        }
    }
}
