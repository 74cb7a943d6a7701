//! ZMTP frames: a flags byte, a length of one or eight bytes, a body. A command is a frame whose body begins with its
//! name.

use bytes::{BufMut, Bytes, BytesMut};

use super::ZmtpError;

/// More frames of the message follow.
const MORE: u8 = 1;
/// The length takes eight bytes.
const LONG: u8 = 2;
/// A command, not part of a message.
const COMMAND: u8 = 4;

/// The type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A part of a message that is not the last.
    More,
    /// The last part of a message.
    Last,
    Command,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) header_bytes: usize,
    pub(super) body_bytes: u64,
}

// === impl Header ===

impl Header {
    /// Reads the header at the start of `bytes`; `None` if it is incomplete.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<Self>, ZmtpError> {
        let Some(&flags) = bytes.first() else {
            return Ok(None);
        };
        let kind = match flags & !LONG {
            0 => Kind::Last,
            MORE => Kind::More,
            COMMAND => Kind::Command,
            _ => return Err(ZmtpError::Malformed("frame with invalid flags")),
        };
        let (header_bytes, body_bytes) = if flags & LONG == 0 {
            (2, bytes.get(1).map(|&short| u64::from(short)))
        } else {
            (9, bytes.get(1..9).and_then(|long| long.try_into().ok()).map(u64::from_be_bytes))
        };
        Ok(body_bytes.map(|body_bytes| Self { kind, header_bytes, body_bytes }))
    }
}

/// Appends a frame whose body is the concatenation of `parts`.
pub(super) fn write(out: &mut BytesMut, kind: Kind, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.reserve(9 + length);
    let flags = match kind {
        Kind::More => MORE,
        Kind::Last => 0,
        Kind::Command => COMMAND,
    };
    match u8::try_from(length) {
        Ok(short) => out.put_slice(&[flags, short]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(length as u64);
        }
    }
    parts.iter().for_each(|part| out.put_slice(part));
}

/// Appends a command. Only kvlane's own, short names are used.
pub(super) fn write_command(out: &mut BytesMut, name: &[u8], data: &[&[u8]]) {
    let length = [name.len() as u8];
    let parts: Vec<&[u8]> = [&length, name].into_iter().chain(data.iter().copied()).collect();
    write(out, Kind::Command, &parts);
}

/// The name and the data of a command.
pub(super) fn read_command(mut body: Bytes) -> Result<(Bytes, Bytes), ZmtpError> {
    let end = 1 + usize::from(*body.first().ok_or(ZmtpError::Malformed("command without a name"))?);
    if body.len() < end {
        return Err(ZmtpError::Malformed("command shorter than its name"));
    }
    let name = body.split_to(end).slice(1..);
    Ok((name, body))
}
