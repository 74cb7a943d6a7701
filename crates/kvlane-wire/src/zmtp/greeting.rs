//! What both ends say before any message: a greeting of 64 bytes, then the command READY with properties.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Peer, Socket, ZmtpError, frame};

/// Bytes of a greeting.
const GREETING_BYTES: usize = 64;
/// The minor version that we say.
pub(super) const MINOR: u8 = 1;
/// Where in a greeting the major version is.
const MAJOR_AT: usize = 10;
/// Where its security mechanism is, padded with zeros.
const MECHANISM_AT: std::ops::Range<usize> = 12..32;
/// Bytes of a peer that is none which are quoted.
const QUOTED_BYTES: usize = 32;

/// Every kind of socket that may call itself one in READY.
const SOCKET_TYPES: [&str; 11] =
    ["PUB", "XPUB", "SUB", "XSUB", "DEALER", "ROUTER", "REQ", "REP", "PUSH", "PULL", "PAIR"];

/// Our greeting: signature, version 3.1, NULL, not a server (which NULL has no use for).
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

/// Appends signature and version. libzmq tells its mechanism only once it has these, and closes without a word if it has
/// ours as well and they differ: so ours is told later, and who turns a NULL peer away can be told by its name.
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

/// Finds fault with the beginning of a greeting, as soon as it can be seen: a peer that speaks something else may never
/// send as many bytes.
pub(super) fn check(input: &[u8]) -> Result<(), ZmtpError> {
    // The lowest bit of the tenth byte is what sets a greeting apart from a long frame of ZMTP 1.0.
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

/// Takes the peer's greeting once it is whole, and tells its minor version.
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

/// Appends READY. Only sockets that answer have a use for an identity.
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

/// Reads the properties of a READY. Of one that is told twice, the last counts, as with libzmq.
pub(super) fn read_ready(ours: Socket, minor: u8, mut data: Bytes) -> Result<Peer, ZmtpError> {
    let mut socket_type = Bytes::new();
    let mut identity = Bytes::new();
    while !data.is_empty() {
        let (name, value) =
            take_property(&mut data).ok_or(ZmtpError::Malformed("a READY with a property cut short"))?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = value;
        } else if name.eq_ignore_ascii_case(b"Identity") {
            identity = value;
        }
    }
    if socket_type.is_empty() {
        return Err(ZmtpError::Malformed("a READY that does not tell the type of its socket"));
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

/// A peer's bytes for an error message: what cannot be printed is escaped.
pub(super) fn printable(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(255)].escape_ascii().to_string()
}
