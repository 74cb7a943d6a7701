//! ZMTP, the protocol of ZeroMQ's sockets: 3.0 ([RFC 23](https://rfc.zeromq.org/spec/23/)) and 3.1
//! ([RFC 37](https://rfc.zeromq.org/spec/37/)), with the NULL mechanism, for the sockets that engines publish KV events
//! on and those that read them.
//!
//! A [`Connection`] is one peer: bytes go in ([`Connection::receive`] or [`Connection::input`]), events come out
//! ([`Connection::poll`]), and what has to be written lies ready ([`Connection::take_output`]), answers to a peer's pings
//! among it. It opens no socket and keeps no time; which peer gets a message is the driver's to say.
//!
//! ```
//! use kvlane_wire::zmtp::{Connection, Event, Socket};
//!
//! /// Passes bytes both ways until there are none, and tells the last event at either end.
//! fn talk(a: &mut Connection, b: &mut Connection) -> Result<[Option<Event>; 2], kvlane_wire::zmtp::ZmtpError> {
//!     let mut last = [None, None];
//!     while a.output_bytes() + b.output_bytes() > 0 {
//!         a.receive(&b.take_output());
//!         last[0] = a.poll()?.or(last[0].take());
//!         b.receive(&a.take_output());
//!         last[1] = b.poll()?.or(last[1].take());
//!     }
//!     Ok(last)
//! }
//!
//! let (mut publisher, mut subscriber) = (Connection::new(Socket::Pub), Connection::new(Socket::Sub));
//! let hello = talk(&mut publisher, &mut subscriber)?;
//! assert!(matches!(hello, [Some(Event::Ready(_)), Some(Event::Ready(_))]));
//! subscriber.subscribe(b"kv")?;
//! assert_eq!(talk(&mut publisher, &mut subscriber)?[0], Some(Event::Subscribe("kv".into())));
//! publisher.send(&["kv@a", "and more"])?;
//! assert_eq!(
//!     talk(&mut publisher, &mut subscriber)?[1],
//!     Some(Event::Message(vec!["kv@a".into(), "and more".into()]))
//! );
//! # Ok::<(), kvlane_wire::zmtp::ZmtpError>(())
//! ```

mod frame;
mod greeting;

use bytes::{Buf, Bytes, BytesMut};

use self::frame::{Header, Kind};

/// Most bytes in one message by default, all its frames together. A batch of KV events with 100,000 tokens takes about
/// half a MiB.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Most frames in one message by default; those of KV events and replays have two to five.
pub const MESSAGE_FRAMES_MAX: usize = 8;
/// Most bytes of a command. The longest one, READY, tells an identity of at most 255 bytes and, with some libraries, a few
/// properties more.
pub const COMMAND_BYTES_MAX: usize = 8 << 10;
/// Most bytes of a ping's context, by RFC 37.
pub const PING_CONTEXT_BYTES_MAX: usize = 16;
/// Frames that are longer do not leave their memory to those that follow.
const LONG_FRAME_BYTES: usize = 1 << 20;
/// Room for reading that [`Connection::input`] makes.
const READ_BYTES: usize = 64 << 10;

/// The frames of one message. They share memory with what was received: a frame that is kept keeps alive what arrived
/// together with it.
pub type Frames = Vec<Bytes>;

/// What a connection is at our end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Socket {
    /// Receives what it subscribed to.
    Sub,
    /// Sends to subscribers.
    Pub,
    /// Sends requests and receives answers, in any order.
    Dealer,
    /// Receives requests and sends answers. As a connection is one peer, its messages carry no frame that names it.
    Router,
}

/// What a peer may send, beyond which the connection ends with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes in one message, all its frames together.
    pub message_bytes: usize,
    /// Frames in one message.
    pub message_frames: usize,
}

/// Who the peer said it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The protocol's minor version that it speaks, the major being 3.
    pub minor: u8,
    /// Its kind of socket.
    pub socket_type: &'static str,
    /// The name it gave itself, empty for most.
    pub identity: Bytes,
}

/// What came out of the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is done: messages may be sent. Always the first event, and the only one of its kind.
    Ready(Peer),
    /// A whole message, of one frame or more.
    Message(Frames),
    /// To a [`Socket::Pub`]: the peer wants messages whose first frame begins with this. It may say so more than once, and
    /// then takes each back.
    Subscribe(Bytes),
    /// To a [`Socket::Pub`]: the peer takes one subscription back.
    Cancel(Bytes),
}

/// Why a connection cannot go on. Once one has been returned, so is every [`Connection::poll`]: close the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// The first bytes are no greeting.
    #[error(
        "the peer does not speak ZMTP: it begins with {begins:?} (is this the port of a ZeroMQ socket, and not of HTTP?)"
    )]
    NotZmtp {
        /// Its first bytes.
        begins: String,
    },
    /// A protocol older than 3.0.
    #[error(
        "the peer speaks ZMTP revision {revision}, and 3.0 is the oldest understood: update its libzmq to 4 or later"
    )]
    Version {
        /// The byte that says so.
        revision: u8,
    },
    /// Another security mechanism than NULL.
    #[error(
        "the peer wants the security mechanism {mechanism}, and only NULL is supported: turn authentication off for \
         this socket, or read it through a proxy that does it"
    )]
    Mechanism {
        /// As the peer names it.
        mechanism: String,
    },
    /// The peer's socket cannot talk to ours.
    #[error(
        "the peer is a {theirs} socket and this end a {ours} socket, which do not go together: is this the right port?"
    )]
    SocketType {
        /// At the other end.
        theirs: String,
        /// At this end.
        ours: &'static str,
    },
    /// The peer sent ERROR in place of READY.
    #[error("the peer refused the connection: {reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
    /// Bytes that the protocol does not allow.
    #[error("the peer broke the protocol: {0}")]
    Malformed(&'static str),
    /// A message or command over its limit.
    #[error("the peer announced {what} of {bytes} bytes, above the limit of {max}")]
    TooLong {
        /// Of what.
        what: &'static str,
        /// As announced, with the frames before it.
        bytes: u64,
        /// The limit.
        max: usize,
    },
    /// A message with too many frames.
    #[error("the peer sent a message of more than {max} frames")]
    TooManyFrames {
        /// The limit.
        max: usize,
    },
    /// Something was to be sent that cannot be: before [`Event::Ready`], without a frame, or not by this kind of socket.
    #[error("this cannot be sent: {0}")]
    Unsendable(&'static str),
}

/// One peer, from its greeting on.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    limits: Limits,
    /// Our name for ourselves, told in READY.
    identity: Bytes,
    state: State,
    /// Received and not yet looked at.
    input: BytesMut,
    output: BytesMut,
    /// Frames of a message that is not yet whole, and their bytes.
    frames: Frames,
    frames_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the peer's version.
    Signature,
    /// Waiting for the rest of its greeting; ours is told.
    Greeting,
    /// Waiting for its READY; its greeting told the minor version.
    Handshake(u8),
    /// The minor version that both speak.
    Open(u8),
    Failed(ZmtpError),
}

// === impl Socket ===

impl Socket {
    /// As READY tells it.
    pub const fn name(self) -> &'static str {
        match self {
            Socket::Sub => "SUB",
            Socket::Pub => "PUB",
            Socket::Dealer => "DEALER",
            Socket::Router => "ROUTER",
        }
    }

    /// The kinds of socket that may be at the other end, by RFC 28 and RFC 29.
    const fn peers(self) -> &'static [&'static str] {
        match self {
            Socket::Sub => &["PUB", "XPUB"],
            Socket::Pub => &["SUB", "XSUB"],
            Socket::Dealer => &["ROUTER", "DEALER", "REP"],
            Socket::Router => &["DEALER", "ROUTER", "REQ"],
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self { message_bytes: MESSAGE_BYTES_MAX, message_frames: MESSAGE_FRAMES_MAX }
    }
}

// === impl Connection ===

impl Connection {
    /// A connection on which nothing was received; what it says first lies ready to be written.
    pub fn new(socket: Socket) -> Self {
        let mut output = BytesMut::new();
        greeting::write_head(&mut output);
        Self {
            socket,
            limits: Limits::default(),
            identity: Bytes::new(),
            state: State::Signature,
            input: BytesMut::new(),
            output,
            frames: Frames::new(),
            frames_bytes: 0,
        }
    }

    /// With other limits.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// With a name for ourselves, of which the first 255 bytes are told to the peer.
    #[must_use]
    pub fn with_identity(mut self, identity: Bytes) -> Self {
        self.identity = identity.slice(..identity.len().min(usize::from(u8::MAX)));
        self
    }

    /// Takes bytes that were read; [`Connection::poll`] until there is nothing more in them.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Where to read into without a copy: append to it, as [`Connection::receive`] does. There is room for 64 KiB.
    pub fn input(&mut self) -> &mut BytesMut {
        self.input.reserve(READ_BYTES);
        &mut self.input
    }

    /// The next event, or none until more bytes come. Reading goes on only once there is none, so what is received and
    /// not yet looked at is bounded by the limits and one reading.
    ///
    /// # Errors
    ///
    /// If the peer does what the protocol or the limits forbid. The connection is of no use then.
    pub fn poll(&mut self) -> Result<Option<Event>, ZmtpError> {
        let result = self.next_event();
        if let Err(error) = &result {
            self.state = State::Failed(error.clone());
            self.input = BytesMut::new();
            self.frames = Frames::new();
        }
        result
    }

    /// Puts a message into the output.
    ///
    /// # Errors
    ///
    /// Before [`Event::Ready`], from a [`Socket::Sub`], and if there is no frame; nothing is sent then.
    pub fn send(&mut self, frames: &[impl AsRef<[u8]>]) -> Result<(), ZmtpError> {
        self.minor()?;
        if self.socket == Socket::Sub {
            return Err(ZmtpError::Unsendable("a SUB socket only subscribes"));
        }
        let Some((last, before)) = frames.split_last() else {
            return Err(ZmtpError::Unsendable("a message has at least one frame"));
        };
        for frame in before {
            frame::write(&mut self.output, Kind::More, &[frame.as_ref()]);
        }
        frame::write(&mut self.output, Kind::Last, &[last.as_ref()]);
        Ok(())
    }

    /// Asks for messages whose first frame begins with `topic`; everything, if it is empty.
    ///
    /// # Errors
    ///
    /// Before [`Event::Ready`], and from anything but a [`Socket::Sub`].
    pub fn subscribe(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        self.change_subscription(1, b"SUBSCRIBE", topic)
    }

    /// Takes a subscription back.
    ///
    /// # Errors
    ///
    /// As [`Connection::subscribe`].
    pub fn cancel(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        self.change_subscription(0, b"CANCEL", topic)
    }

    /// Asks the peer for a sign of life, and tells it to take us for dead after `ttl_ds` tenths of a second of silence;
    /// 0 for never. Whatever is received after this is a sign of life. False, and nothing is sent, if the peer speaks
    /// 3.0, which has no pings.
    ///
    /// # Errors
    ///
    /// Before [`Event::Ready`].
    pub fn ping(&mut self, ttl_ds: u16) -> Result<bool, ZmtpError> {
        let speaks = self.minor()? >= 1;
        if speaks {
            frame::write_command(&mut self.output, b"PING", &[&ttl_ds.to_be_bytes()]);
        }
        Ok(speaks)
    }

    /// Bytes that wait to be written.
    pub fn output_bytes(&self) -> usize {
        self.output.len()
    }

    /// Takes what is to be written.
    pub fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }

    /// The minor version that both speak, once the handshake is done.
    fn minor(&self) -> Result<u8, ZmtpError> {
        match &self.state {
            State::Open(minor) => Ok(*minor),
            State::Failed(error) => Err(error.clone()),
            State::Signature | State::Greeting | State::Handshake(_) => {
                Err(ZmtpError::Unsendable("the handshake is not over"))
            }
        }
    }

    fn change_subscription(&mut self, flag: u8, command: &[u8], topic: &[u8]) -> Result<(), ZmtpError> {
        let minor = self.minor()?;
        if self.socket != Socket::Sub {
            return Err(ZmtpError::Unsendable("only a SUB socket subscribes"));
        }
        if minor >= 1 {
            frame::write_command(&mut self.output, command, &[topic]);
        } else {
            frame::write(&mut self.output, Kind::Last, &[&[flag], topic]);
        }
        Ok(())
    }

    fn next_event(&mut self) -> Result<Option<Event>, ZmtpError> {
        loop {
            match &self.state {
                State::Failed(error) => return Err(error.clone()),
                State::Signature => {
                    greeting::check(&self.input)?;
                    if !greeting::version_is_in(&self.input) {
                        return Ok(None);
                    }
                    greeting::write_rest(&mut self.output);
                    self.state = State::Greeting;
                }
                State::Greeting => {
                    let Some(minor) = greeting::read(&mut self.input)? else {
                        return Ok(None);
                    };
                    self.state = State::Handshake(minor);
                    self.write_ready();
                }
                State::Handshake(minor) => {
                    let minor = *minor;
                    let Some((kind, body)) = self.next_frame()? else {
                        return Ok(None);
                    };
                    if kind != Kind::Command {
                        return Err(ZmtpError::Malformed("a message before the handshake was over"));
                    }
                    if let Some(peer) = self.shake(minor, body)? {
                        self.state = State::Open(minor.min(greeting::MINOR));
                        return Ok(Some(Event::Ready(peer)));
                    }
                }
                State::Open(_) => {
                    let Some((kind, body)) = self.next_frame()? else {
                        return Ok(None);
                    };
                    let event = match kind {
                        Kind::Command => self.command(body)?,
                        Kind::More => self.add_frame(body)?,
                        Kind::Last => {
                            self.add_frame(body)?;
                            self.message()
                        }
                    };
                    if event.is_some() {
                        return Ok(event);
                    }
                }
            }
        }
    }

    /// The next whole frame. Its announced length is held against the limits before its bytes are waited for.
    fn next_frame(&mut self) -> Result<Option<(Kind, Bytes)>, ZmtpError> {
        let Some(Header { kind, header_bytes, body_bytes }) = Header::read(&self.input)? else {
            return Ok(None);
        };
        let (what, max, before) = match kind {
            Kind::Command => ("a command", COMMAND_BYTES_MAX, 0),
            Kind::More | Kind::Last => ("a message", self.limits.message_bytes, self.frames_bytes),
        };
        let bytes = body_bytes.saturating_add(before as u64);
        if bytes > max as u64 {
            return Err(ZmtpError::TooLong { what, bytes, max });
        }
        // At most the limit, so it fits.
        let body_bytes = body_bytes as usize;
        if self.input.len() < header_bytes + body_bytes {
            return Ok(None);
        }
        self.input.advance(header_bytes);
        let body = self.input.split_to(body_bytes).freeze();
        if body_bytes > LONG_FRAME_BYTES {
            // What follows gets memory of its own. Otherwise the connection would keep that of its longest message.
            self.input = BytesMut::from(&self.input[..]);
        }
        Ok(Some((kind, body)))
    }

    /// Looks at a command during the handshake.
    fn shake(&self, minor: u8, body: Bytes) -> Result<Option<Peer>, ZmtpError> {
        let (name, data) = frame::read_command(body)?;
        match &*name {
            b"READY" => greeting::read_ready(self.socket, minor, data).map(Some),
            b"ERROR" => {
                let reason = data.get(1..).unwrap_or_default();
                Err(ZmtpError::Refused { reason: greeting::printable(reason) })
            }
            _ => Ok(None),
        }
    }

    /// Looks at a command after the handshake. Those that we do not know are for peers that do.
    fn command(&mut self, body: Bytes) -> Result<Option<Event>, ZmtpError> {
        let (name, data) = frame::read_command(body)?;
        match &*name {
            b"PING" => {
                // A TTL comes first, which a driver that closes silent connections has no use for.
                let Some(context) = data.get(2..) else {
                    return Err(ZmtpError::Malformed("a PING without its TTL"));
                };
                if context.len() > PING_CONTEXT_BYTES_MAX {
                    return Err(ZmtpError::Malformed("a PING whose context is longer than 16 bytes"));
                }
                frame::write_command(&mut self.output, b"PONG", &[context]);
                Ok(None)
            }
            b"ERROR" => {
                let reason = data.get(1..).unwrap_or_default();
                Err(ZmtpError::Refused { reason: greeting::printable(reason) })
            }
            b"SUBSCRIBE" if self.socket == Socket::Pub => Ok(Some(Event::Subscribe(data))),
            b"CANCEL" if self.socket == Socket::Pub => Ok(Some(Event::Cancel(data))),
            _ => Ok(None),
        }
    }

    fn add_frame(&mut self, body: Bytes) -> Result<Option<Event>, ZmtpError> {
        if self.frames.len() >= self.limits.message_frames {
            return Err(ZmtpError::TooManyFrames { max: self.limits.message_frames });
        }
        self.frames_bytes += body.len();
        self.frames.push(body);
        Ok(None)
    }

    /// What a whole message means to our kind of socket. To a publisher, it is a subscription as 3.0 writes it; what is not
    /// is dropped, as libzmq does.
    fn message(&mut self) -> Option<Event> {
        let frames = std::mem::take(&mut self.frames);
        self.frames_bytes = 0;
        if self.socket != Socket::Pub {
            return Some(Event::Message(frames));
        }
        match frames.as_slice() {
            [only] => match only.first() {
                Some(1) => Some(Event::Subscribe(only.slice(1..))),
                Some(0) => Some(Event::Cancel(only.slice(1..))),
                _ => None,
            },
            _ => None,
        }
    }

    fn write_ready(&mut self) {
        greeting::write_ready(&mut self.output, self.socket, &self.identity);
    }
}

#[cfg(test)]
mod tests;
