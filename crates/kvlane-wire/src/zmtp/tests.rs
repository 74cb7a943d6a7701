use proptest::prelude::*;

use super::*;

/// A greeting as libzmq 4.3.5 sends it.
fn greeting(minor: u8, mechanism: &[u8]) -> Vec<u8> {
    let mut bytes = [0; 64];
    bytes[..12].copy_from_slice(&[0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, minor]);
    bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
    bytes.to_vec()
}

fn ready(socket_type: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(socket_type.len() as u8);
    body.extend_from_slice(socket_type);
    frame_bytes(4, &body)
}

fn frame_bytes(flags: u8, body: &[u8]) -> Vec<u8> {
    [&[flags, body.len() as u8], body].concat()
}

/// Polls until there are no more events.
fn events(connection: &mut Connection) -> Result<Vec<Event>, ZmtpError> {
    let mut events = Vec::new();
    while let Some(event) = connection.poll()? {
        events.push(event);
    }
    Ok(events)
}

/// A connection after the handshake with a peer of this type, with its output taken.
fn open(socket: Socket, peer: &[u8], minor: u8) -> Connection {
    let mut connection = Connection::new(socket);
    connection.receive(&greeting(minor, b"NULL"));
    connection.receive(&ready(peer));
    let events = events(&mut connection).expect("a valid peer");
    assert!(matches!(events.as_slice(), [Event::Ready(peer)] if peer.minor == minor), "{events:?}");
    connection.take_output();
    connection
}

fn refusal(socket: Socket, bytes: &[u8]) -> ZmtpError {
    let mut connection = Connection::new(socket);
    connection.receive(bytes);
    let error = events(&mut connection).expect_err("refused");
    assert_eq!(connection.poll(), Err(error.clone()), "the error persists");
    error
}

/// Connects two connections and passes bytes until both are silent.
fn talk(a: &mut Connection, b: &mut Connection) -> (Vec<Event>, Vec<Event>) {
    let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
    while a.output_bytes() + b.output_bytes() > 0 {
        b.receive(&a.take_output());
        at_b.extend(events(b).expect("a is a valid peer"));
        a.receive(&b.take_output());
        at_a.extend(events(a).expect("b is a valid peer"));
    }
    (at_a, at_b)
}

fn frames(parts: &[&'static [u8]]) -> Frames {
    parts.iter().copied().map(Bytes::from_static).collect()
}

#[test]
fn every_pair_of_sockets_shakes_hands_and_exchanges_messages() {
    let long = vec![7; 70_000];
    for (one, other) in
        [(Socket::Pub, Socket::Sub), (Socket::Router, Socket::Dealer), (Socket::Dealer, Socket::Dealer)]
    {
        let mut a = Connection::new(one);
        let mut b = Connection::new(other).with_identity(Bytes::from_static(b"me"));
        let (at_a, at_b) = talk(&mut a, &mut b);
        let identity = Bytes::from_static(if other == Socket::Sub { b"" } else { b"me" });
        assert_eq!(at_a, [Event::Ready(Peer { minor: 1, socket_type: other.name(), identity })]);
        assert!(matches!(at_b.as_slice(), [Event::Ready(peer)] if peer.socket_type == one.name()));
        a.send(&[b"", b"topic".as_slice(), &long]).expect("ready");
        assert_eq!(
            talk(&mut a, &mut b).1,
            [Event::Message(vec![Bytes::new(), Bytes::from_static(b"topic"), long.clone().into()])]
        );
        if other == Socket::Dealer {
            b.send(&[b"back"]).expect("ready");
            assert_eq!(talk(&mut a, &mut b).0, [Event::Message(frames(&[b"back"]))]);
        }
    }
}

#[test]
fn subscriptions_are_messages_to_a_3_0_peer_and_commands_to_a_3_1_peer() {
    let mut old = open(Socket::Sub, b"PUB", 0);
    old.subscribe(b"kv").expect("ready");
    old.cancel(b"").expect("ready");
    assert_eq!(old.take_output(), b"\0\x03\x01kv\0\x01\0".as_slice());
    let mut new = open(Socket::Sub, b"XPUB", 1);
    new.subscribe(b"kv").expect("ready");
    new.cancel(b"").expect("ready");
    assert_eq!(new.take_output(), b"\x04\x0c\x09SUBSCRIBEkv\x04\x07\x06CANCEL".as_slice());
}

#[test]
fn a_publisher_takes_subscriptions_in_both_forms_and_drops_what_is_none() {
    for minor in [0, 1] {
        let mut publisher = open(Socket::Pub, b"SUB", minor);
        publisher.receive(b"\0\x03\x01kv\0\x01\0\0\x02hi\0\0\x01\x02\x01a\0\0");
        publisher.receive(b"\x04\x0c\x09SUBSCRIBEkv\x04\x07\x06CANCEL");
        let (subscribe, cancel) = (Event::Subscribe(Bytes::from_static(b"kv")), Event::Cancel(Bytes::new()));
        assert_eq!(
            events(&mut publisher).expect("a valid peer"),
            [subscribe.clone(), cancel.clone(), subscribe, cancel]
        );
    }
}

#[test]
fn a_ping_is_answered_with_its_context_even_within_a_message() {
    let mut connection = open(Socket::Sub, b"PUB", 1);
    connection.receive(b"\x01\x01a\x04\x0a\x04PING\0\x0actx\0\x01b");
    assert_eq!(events(&mut connection).expect("a valid peer"), [Event::Message(frames(&[b"a", b"b"]))]);
    assert_eq!(connection.take_output(), b"\x04\x08\x04PONGctx".as_slice());
}

#[test]
fn only_peers_that_know_pings_are_pinged_and_a_pong_is_no_event() {
    assert_eq!(open(Socket::Sub, b"PUB", 0).ping(600), Ok(false));
    let (mut a, mut b) = (open(Socket::Sub, b"PUB", 1), open(Socket::Pub, b"SUB", 1));
    assert_eq!(a.ping(600), Ok(true));
    assert_eq!(talk(&mut a, &mut b), (vec![], vec![]));
}

#[test]
fn who_does_not_speak_zmtp_is_refused_at_its_first_byte() {
    let error = refusal(Socket::Sub, b"H");
    assert!(matches!(error, ZmtpError::NotZmtp { .. }));
    let error = refusal(Socket::Sub, b"HTTP/1.1 400 Bad Request\r\n").to_string();
    assert!(error.contains("HTTP/1.1 400") && error.contains("does not speak ZMTP"), "{error}");
    assert!(matches!(refusal(Socket::Sub, b"\xFF\0\0\0\0\0\0\0\x01\0"), ZmtpError::NotZmtp { .. }));
}

#[test]
fn an_older_protocol_and_other_mechanisms_are_refused_by_name() {
    // As soon as the version is known: an older peer may send no more bytes.
    let mut old = greeting(0, b"NULL")[..10].to_vec();
    old.push(1);
    assert_eq!(refusal(Socket::Sub, &old), ZmtpError::Version { revision: 1 });
    for mechanism in ["PLAIN", "CURVE", "GSSAPI", "NULLED", ""] {
        let error = refusal(Socket::Sub, &greeting(1, mechanism.as_bytes()));
        assert_eq!(error, ZmtpError::Mechanism { mechanism: mechanism.into() });
        assert!(error.to_string().contains("only NULL is supported"), "{error}");
    }
}

#[test]
fn a_socket_that_does_not_go_with_ours_is_refused() {
    let hello = |socket_type: &[u8]| [greeting(1, b"NULL"), ready(socket_type)].concat();
    for (ours, theirs) in
        [(Socket::Sub, "ROUTER"), (Socket::Dealer, "PUB"), (Socket::Pub, "PUB"), (Socket::Router, "teapot")]
    {
        let error = refusal(ours, &hello(theirs.as_bytes()));
        assert_eq!(error, ZmtpError::SocketType { theirs: theirs.into(), ours: ours.name() });
    }
}

#[test]
fn what_a_peer_says_against_us_is_passed_on() {
    let error = refusal(Socket::Sub, &[greeting(1, b"NULL"), frame_bytes(4, b"\x05ERROR\x03no!")].concat());
    assert_eq!(error, ZmtpError::Refused { reason: "no!".into() });
}

#[test]
fn a_broken_protocol_is_an_error_that_says_what() {
    let mut after = greeting(1, b"NULL");
    for (bytes, what) in [
        (frame_bytes(0, b"early"), "before the end of the handshake"),
        (frame_bytes(4, b""), "without a name"),
        (frame_bytes(4, b"\x09short"), "shorter than its name"),
        (frame_bytes(4, b"\x05READY\x0bSocket-Type\xff\xff\xff\xffSUB"), "truncated property"),
        (frame_bytes(4, b"\x05READY"), "without a socket type"),
        (frame_bytes(5, b"x"), "flags"),
        (frame_bytes(0x80, b"x"), "flags"),
    ] {
        let kept = after.len();
        after.extend_from_slice(&bytes);
        let error = refusal(Socket::Sub, &after).to_string();
        assert!(error.contains(what), "{error}, not {what}");
        after.truncate(kept);
    }
    let mut open = open(Socket::Sub, b"PUB", 1);
    open.receive(b"\x04\x06\x04PING\0");
    assert!(matches!(open.poll(), Err(ZmtpError::Malformed(_))));
}

#[test]
fn a_message_over_its_limits_is_refused_before_it_is_waited_for() {
    let limits = Limits { message_bytes: 300, message_frames: 2 };
    let limited = || open(Socket::Sub, b"PUB", 1).with_limits(limits);
    let long = |flags: u8, bytes: u64| [&[flags | 2], bytes.to_be_bytes().as_slice()].concat();
    let mut connection = limited();
    connection.receive(&long(0, 300));
    assert_eq!(connection.poll(), Ok(None));
    let mut connection = limited();
    connection.receive(&long(0, 301));
    assert_eq!(connection.poll(), Err(ZmtpError::TooLong { what: "a message", bytes: 301, max: 300 }));
    let mut connection = limited();
    connection.receive(&[frame_bytes(1, &[0; 200]), long(0, 101)].concat());
    assert_eq!(connection.poll(), Err(ZmtpError::TooLong { what: "a message", bytes: 301, max: 300 }));
    let mut connection = limited();
    connection.receive(&long(0, u64::MAX));
    assert!(matches!(connection.poll(), Err(ZmtpError::TooLong { bytes: u64::MAX, .. })));
    let mut connection = limited();
    connection.receive(&long(4, COMMAND_BYTES_MAX as u64 + 1));
    assert!(matches!(connection.poll(), Err(ZmtpError::TooLong { what: "a command", .. })));
    let mut connection = limited();
    connection.receive(b"\x01\0\x01\0\0\0");
    assert_eq!(connection.poll(), Err(ZmtpError::TooManyFrames { max: 2 }));
    let mut connection = limited();
    connection.receive(&[b"\x01\0\0\0".as_slice(), b"\x01\0\0\0"].concat());
    assert_eq!(events(&mut connection).map(|events| events.len()), Ok(2), "counted anew for each message");
}

#[test]
fn what_cannot_be_sent_is_refused_and_leaves_no_trace() {
    let mut early = Connection::new(Socket::Dealer);
    early.take_output();
    assert!(matches!(early.send(&[b"x"]), Err(ZmtpError::Unsendable(_))));
    assert!(matches!(early.ping(0), Err(ZmtpError::Unsendable(_))));
    let mut subscriber = open(Socket::Sub, b"PUB", 1);
    assert!(matches!(subscriber.send(&[b"x"]), Err(ZmtpError::Unsendable(_))));
    let mut publisher = open(Socket::Pub, b"SUB", 1);
    assert!(matches!(publisher.subscribe(b""), Err(ZmtpError::Unsendable(_))));
    assert!(matches!(publisher.send(&[] as &[&[u8]]), Err(ZmtpError::Unsendable(_))));
    assert_eq!(early.output_bytes() + subscriber.output_bytes() + publisher.output_bytes(), 0);
}

/// A valid stream to a socket of the given type: handshake, messages, commands.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let message =
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..5).prop_map(|frames| {
            let mut out = BytesMut::new();
            let last = frames.len() - 1;
            for (index, body) in frames.iter().enumerate() {
                let kind = if index == last { Kind::Last } else { Kind::More };
                frame::write(&mut out, kind, &[body]);
            }
            out.to_vec()
        });
    let command = prop::collection::vec(any::<u8>(), 0..12).prop_map(|context| {
        let mut out = BytesMut::new();
        frame::write_command(&mut out, b"PING", &[&[0, 1], &context]);
        out.to_vec()
    });
    let parts = prop::collection::vec(prop_oneof![3 => message, 1 => command], 0..8);
    (0..2_u8, parts)
        .prop_map(|(minor, parts)| [greeting(minor, b"NULL"), ready(b"ROUTER"), parts.concat()].concat())
}

proptest! {
    /// Invariant: Any split of a ZMTP stream gives the same events, and no bytes make the parser panic.
    ///
    /// Also held by `no_bytes_make_it_panic_or_hold_more_than_it_was_given`.
    #[test]
    fn any_split_of_a_stream_gives_the_same_events_and_answers(
        bytes in stream(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let mut whole = Connection::new(Socket::Dealer);
        whole.receive(&bytes);
        let expected = events(&mut whole).expect("a valid stream");
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut split = Connection::new(Socket::Dealer);
        let mut got = Vec::new();
        for pair in cuts.windows(2) {
            split.input().extend_from_slice(&bytes[pair[0]..pair[1]]);
            got.extend(events(&mut split).expect("a valid stream"));
        }
        prop_assert_eq!(got, expected);
        prop_assert_eq!(split.take_output(), whole.take_output());
    }

    #[test]
    fn what_is_sent_is_what_is_received(
        messages in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..MESSAGE_FRAMES_MAX), 0..6),
    ) {
        let (mut a, mut b) = (Connection::new(Socket::Dealer), Connection::new(Socket::Router));
        talk(&mut a, &mut b);
        for message in &messages {
            a.send(message).expect("ready");
        }
        let expected: Vec<Event> = messages
            .into_iter()
            .map(|message| Event::Message(message.into_iter().map(Bytes::from).collect()))
            .collect();
        prop_assert_eq!(talk(&mut a, &mut b).1, expected);
    }

    #[test]
    fn no_bytes_make_it_panic_or_hold_more_than_it_was_given(
        socket in prop::sample::select(vec![Socket::Sub, Socket::Pub, Socket::Dealer, Socket::Router]),
        prefix in 0..3_usize,
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..12),
    ) {
        let peer: &[u8] = match socket {
            Socket::Sub => b"PUB",
            Socket::Pub => b"SUB",
            Socket::Dealer => b"ROUTER",
            Socket::Router => b"DEALER",
        };
        // From the start, after the greeting, and after the handshake, so that random bytes reach every state.
        let hello = [greeting(1, b"NULL"), ready(peer)].concat();
        let known = [0, 64, hello.len()][prefix];
        let mut connection = Connection::new(socket);
        connection.receive(&hello[..known]);
        let mut given = known;
        for piece in pieces {
            connection.receive(&piece);
            given += piece.len();
            while let Ok(Some(_)) = connection.poll() {}
            let held: usize = connection.frames.iter().map(Bytes::len).sum::<usize>() + connection.input.len();
            prop_assert!(held <= given);
        }
    }
}
