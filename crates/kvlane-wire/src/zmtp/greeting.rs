//! ZMTP handshake: a greeting of 64 bytes from both ends, then the command READY with properties.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Peer, Socket, ZmtpError, frame};

/// Bytes of a greeting.
const GREETING_BYTES: usize = 64;
/// Our minor version.
pub(super) const MINOR: u8 = 1;
/// Offset of the major version in a greeting.
const MAJOR_AT: usize = 10;
/// Range of the security mechanism, padded with zeros.
const MECHANISM_AT: std::ops::Range<usize> = 12..32;
/// Bytes quoted from a peer that does not speak ZMTP.
const QUOTED_BYTES: usize = 32;

/// Every valid socket type in READY.
const SOCKET_TYPES: [&str; 11] =
    ["PUB", "XPUB", "SUB", "XSUB", "DEALER", "ROUTER", "REQ", "REP", "PUSH", "PULL", "PAIR"];

/// Our greeting: signature, version 3.1, NULL, not a server (which NULL does not use).
const GREETING: [u8; GREETING_BYTES] = {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9]) = (0xFF, 0x7F);
    (greeting[MAJOR_AT], greeting[MAJOR_AT + 1]) = (3, MINOR);
    let null = b"NULL";
    let mut at = 0;
    while at < null.len() {
        greeting[MECHANISM_AT.start + at] = null[at];
        at += 1;
    }
    greeting
};

/// Appends signature and version. libzmq sends its mechanism only after it has received these, and closes without an
/// error if it has already received ours and it differs. So ours is sent later, and the mechanism that a peer requires
/// can be reported.
pub(super) fn write_head(out: &mut BytesMut) {
    out.put_slice(&GREETING[..MECHANISM_AT.start]);
}

/// Appends the rest, once [`version_is_in`].
pub(super) fn write_rest(out: &mut BytesMut) {
    out.put_slice(&GREETING[MECHANISM_AT.start..]);
}

/// Whether the peer's version was received.
pub(super) fn version_is_in(input: &[u8]) -> bool {
    input.len() > MAJOR_AT
}

/// Checks the start of a greeting as early as possible: a peer with another protocol may never send all bytes.
pub(super) fn check(input: &[u8]) -> Result<(), ZmtpError> {
    // The lowest bit of the tenth byte distinguishes a greeting from a long frame of ZMTP 1.0.
    let no_signature = input.first().is_some_and(|&first| first != 0xFF);
    if no_signature || input.get(9).is_some_and(|&tenth| tenth & 1 == 0) {
        let begins = printable(&input[..input.len().min(QUOTED_BYTES)]);
        return Err(ZmtpError::NotZmtp { begins });
    }
    match input.get(MAJOR_AT) {
        Some(&revision) if revision < 3 => Err(ZmtpError::Version { revision }),
        _ => Ok(()),
    }
}

/// Takes the peer's complete greeting and returns its minor version.
pub(super) fn read(input: &mut BytesMut) -> Result<Option<u8>, ZmtpError> {
    let Some(begins) = input.get(..GREETING_BYTES) else {
        return Ok(None);
    };
    let padded = &begins[MECHANISM_AT];
    let mechanism = &padded[..padded.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1)];
    if mechanism != b"NULL" {
        return Err(ZmtpError::Mechanism { mechanism: printable(mechanism) });
    }
    let minor = if begins[MAJOR_AT] > 3 { MINOR } else { begins[MAJOR_AT + 1] };
    input.advance(GREETING_BYTES);
    Ok(Some(minor))
}

/// Appends READY. Only sockets that answer use an identity.
pub(super) fn write_ready(out: &mut BytesMut, socket: Socket, identity: &[u8]) {
    let mut properties = BytesMut::new();
    put_property(&mut properties, b"Socket-Type", socket.name().as_bytes());
    if matches!(socket, Socket::Dealer | Socket::Router) {
        put_property(&mut properties, b"Identity", identity);
    }
    frame::write_command(out, b"READY", &[&properties]);
}

fn put_property(out: &mut BytesMut, name: &[u8], value: &[u8]) {
    out.put_u8(name.len() as u8);
    out.put_slice(name);
    out.put_u32(value.len() as u32);
    out.put_slice(value);
}

/// Reads the properties of a READY. Of duplicates, the last counts, as with libzmq.
pub(super) fn read_ready(ours: Socket, minor: u8, mut data: Bytes) -> Result<Peer, ZmtpError> {
    let mut socket_type = Bytes::new();
    let mut identity = Bytes::new();
    while !data.is_empty() {
        let (name, value) =
            take_property(&mut data).ok_or(ZmtpError::Malformed("READY with a truncated property"))?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = value;
        } else if name.eq_ignore_ascii_case(b"Identity") {
            identity = value;
        }
    }
    if socket_type.is_empty() {
        return Err(ZmtpError::Malformed("READY without a socket type"));
    }
    let known = SOCKET_TYPES.into_iter().find(|name| name.as_bytes() == &*socket_type);
    match known.filter(|name| ours.peers().contains(name)) {
        Some(socket_type) => Ok(Peer { minor, socket_type, identity }),
        None => Err(ZmtpError::SocketType { theirs: printable(&socket_type), ours: ours.name() }),
    }
}

fn take_property(data: &mut Bytes) -> Option<(Bytes, Bytes)> {
    let name = take(data, 1)?;
    let name = take(data, usize::from(name[0]))?;
    let length: [u8; 4] = take(data, 4)?.as_ref().try_into().ok()?;
    let value = take(data, usize::try_from(u32::from_be_bytes(length)).ok()?)?;
    Some((name, value))
}

fn take(data: &mut Bytes, bytes: usize) -> Option<Bytes> {
    (data.len() >= bytes).then(|| data.split_to(bytes))
}

/// A peer's bytes for an error message, with escapes for unprintable ones.
pub(super) fn printable(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(255)].escape_ascii().to_string()
}
