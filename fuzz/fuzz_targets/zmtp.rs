//! Any bytes as a ZeroMQ peer's, at each kind of socket; cut in two anywhere, they mean the same.
#![no_main]

use std::mem::{Discriminant, discriminant};

use kvlane_wire::zmtp::{Connection, Event, Limits, Socket, ZmtpError};
use libfuzzer_sys::fuzz_target;

/// What they mean: events, and which error ends them if one does. Its text cites what had arrived.
fn events(socket: Socket, pieces: &[&[u8]]) -> Vec<Result<Event, Discriminant<ZmtpError>>> {
    let limits = Limits { message_bytes: 1 << 16, message_frames: 8 };
    let mut connection = Connection::new(socket).with_limits(limits);
    let mut events = Vec::new();
    for piece in pieces {
        connection.receive(piece);
        loop {
            match connection.poll() {
                Ok(Some(event)) => events.push(Ok(event)),
                Ok(None) => break,
                Err(error) => {
                    events.push(Err(discriminant(&error)));
                    return events;
                }
            }
        }
    }
    events
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&cut, bytes)) = bytes.split_first() else { return };
    let (head, tail) = bytes.split_at(usize::from(cut).min(bytes.len()));
    for socket in [Socket::Sub, Socket::Pub, Socket::Dealer, Socket::Router] {
        assert_eq!(events(socket, &[bytes]), events(socket, &[head, tail]));
    }
});
