//! ZMTP, the protocol of ZeroMQ's sockets: 3.0 ([RFC 23](https://rfc.zeromq.org/spec/23/)) and 3.1
//! ([RFC 37](https://rfc.zeromq.org/spec/37/)), with the NULL mechanism, for the sockets that engines publish KV events
//! on and those that read them.
//!
//! A [`Connection`] is one peer: bytes go in ([`Connection::receive`] or [`Connection::input`]), events come out
//! ([`Connection::poll`]), and output, including replies to a peer's pings, is taken from
//! [`Connection::take_output`]. It opens no socket and reads no clock; the driver selects the peers of a message.
//!
//! ```
//! use kvlane_wire::zmtp::{Connection, Event, Socket};
//!
//! /// Passes bytes both ways until there are none, and returns the last event at either end.
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

/// Default limit of bytes per message, over all its frames. A batch of KV events with 100,000 tokens takes about half a
/// MiB.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Default limit of frames per message; KV events and replays have two to five.
pub const MESSAGE_FRAMES_MAX: usize = 8;
/// Limit of bytes per command. The longest one, READY, has an identity of at most 255 bytes and, with some libraries, a
/// few further properties.
pub const COMMAND_BYTES_MAX: usize = 8 << 10;
/// Most bytes of a ping's context, by RFC 37.
pub const PING_CONTEXT_BYTES_MAX: usize = 16;
/// Frames longer than this release their memory instead of leaving it to later frames.
const LONG_FRAME_BYTES: usize = 1 << 20;
/// Capacity that [`Connection::input`] reserves.
const READ_BYTES: usize = 64 << 10;

/// The frames of one message. They share memory with the received bytes: keeping a frame keeps everything that arrived
/// with it.
pub type Frames = Vec<Bytes>;

/// The socket type of our end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Socket {
    /// Receives messages of its subscriptions.
    Sub,
    /// Sends to subscribers.
    Pub,
    /// Sends requests and receives answers, in any order.
    Dealer,
    /// Receives requests and sends answers. A connection is one peer, so its messages have no frame that identifies the
    /// peer.
    Router,
}

/// Limits for a peer; a violation ends the connection with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes per message, over all its frames.
    pub message_bytes: usize,
    /// Frames per message.
    pub message_frames: usize,
}

/// The peer's description of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its minor protocol version; the major version is 3.
    pub minor: u8,
    /// Its socket type.
    pub socket_type: &'static str,
    /// Its identity, usually empty.
    pub identity: Bytes,
}

/// An event decoded from the received bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is complete: messages may be sent. Always the first event, and occurs once.
    Ready(Peer),
    /// A complete message of one or more frames.
    Message(Frames),
    /// To a [`Socket::Pub`]: the peer subscribes to messages whose first frame begins with this. It may subscribe
    /// several times, and then cancels each.
    Subscribe(Bytes),
    /// To a [`Socket::Pub`]: the peer cancels one subscription.
    Cancel(Bytes),
}

/// Why a connection has failed. Every later [`Connection::poll`] returns the same error: close the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// The first bytes are not a greeting.
    #[error(
        "the peer does not speak ZMTP: its first bytes are {begins:?} (is this the port of a ZeroMQ socket, not of HTTP?)"
    )]
    NotZmtp {
        /// Its first bytes.
        begins: String,
    },
    /// A protocol older than 3.0.
    #[error("the peer speaks ZMTP revision {revision}, older than 3.0: update its libzmq to 4 or later")]
    Version {
        /// The peer's revision byte.
        revision: u8,
    },
    /// A security mechanism other than NULL.
    #[error(
        "the peer requires the security mechanism {mechanism}, but only NULL is supported: disable authentication for \
         this socket, or connect through a proxy that authenticates"
    )]
    Mechanism {
        /// The peer's mechanism.
        mechanism: String,
    },
    /// The socket types are not compatible.
    #[error("the peer's {theirs} socket is not compatible with this {ours} socket: is this the right port?")]
    SocketType {
        /// The peer's socket type.
        theirs: String,
        /// Our socket type.
        ours: &'static str,
    },
    /// The peer sent ERROR instead of READY.
    #[error("the peer refused the connection: {reason}")]
    Refused {
        /// The peer's reason.
        reason: String,
    },
    /// Bytes that violate the protocol.
    #[error("the peer violated the ZMTP protocol: {0}")]
    Malformed(&'static str),
    /// A message or command above its limit.
    #[error("the peer announced {what} of {bytes} bytes, above the limit of {max}")]
    TooLong {
        /// Message or command.
        what: &'static str,
        /// The announced size, with the frames before it.
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
    /// The caller tried to send something invalid: before [`Event::Ready`], without a frame, or from the wrong socket
    /// type.
    #[error("cannot send: {0}")]
    Unsendable(&'static str),
}

/// The connection to one peer, from its greeting on.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    limits: Limits,
    /// Our identity, sent in READY.
    identity: Bytes,
    state: State,
    /// Received bytes that have not been processed.
    input: BytesMut,
    output: BytesMut,
    /// Frames of an incomplete message, and their bytes.
    frames: Frames,
    frames_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the peer's version.
    Signature,
    /// Waiting for the rest of its greeting; ours has been sent.
    Greeting,
    /// Waiting for its READY; holds the minor version of its greeting.
    Handshake(u8),
    /// Holds the minor version that both support.
    Open(u8),
    Failed(ZmtpError),
}

// === impl Socket ===

impl Socket {
    /// The name in READY.
    pub const fn name(self) -> &'static str {
        match self {
            Socket::Sub => "SUB",
            Socket::Pub => "PUB",
            Socket::Dealer => "DEALER",
            Socket::Router => "ROUTER",
        }
    }

    /// The compatible socket types at the other end, by RFC 28 and RFC 29.
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
    /// A new connection; its first output is ready to be written.
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

    /// With an identity, of which the first 255 bytes are sent to the peer.
    #[must_use]
    pub fn with_identity(mut self, identity: Bytes) -> Self {
        self.identity = identity.slice(..identity.len().min(usize::from(u8::MAX)));
        self
    }

    /// Adds received bytes; call [`Connection::poll`] until it returns no event.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// The buffer to read into without a copy: append to it. It has room for 64 KiB.
    pub fn input(&mut self) -> &mut BytesMut {
        self.input.reserve(READ_BYTES);
        &mut self.input
    }

    /// The next event, or `None` until more bytes arrive. Read further bytes only after `None`, so that unprocessed
    /// input is bounded by the limits and one read.
    ///
    /// # Errors
    ///
    /// If the peer violates the protocol or the limits. The connection is unusable then.
    pub fn poll(&mut self) -> Result<Option<Event>, ZmtpError> {
        let result = self.next_event();
        if let Err(error) = &result {
            self.state = State::Failed(error.clone());
            self.input = BytesMut::new();
            self.frames = Frames::new();
        }
        result
    }

    /// Appends a message to the output.
    ///
    /// # Errors
    ///
    /// Before [`Event::Ready`], from a [`Socket::Sub`], and without a frame; nothing is sent then.
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

    /// Subscribes to messages whose first frame begins with `topic`; to all, if it is empty.
    ///
    /// # Errors
    ///
    /// Before [`Event::Ready`], and from any socket except [`Socket::Sub`].
    pub fn subscribe(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        self.change_subscription(1, b"SUBSCRIBE", topic)
    }

    /// Cancels a subscription.
    ///
    /// # Errors
    ///
    /// As [`Connection::subscribe`].
    pub fn cancel(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        self.change_subscription(0, b"CANCEL", topic)
    }

    /// Pings the peer. The peer may treat us as dead after `ttl_ds` tenths of a second of silence; 0 for never.
    /// Anything received after this shows that the peer is alive. Returns false and sends nothing if the peer speaks
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

    /// Number of bytes to be written.
    pub fn output_bytes(&self) -> usize {
        self.output.len()
    }

    /// Takes the bytes to be written.
    pub fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }

    /// The minor version that both support, after the handshake.
    fn minor(&self) -> Result<u8, ZmtpError> {
        match &self.state {
            State::Open(minor) => Ok(*minor),
            State::Failed(error) => Err(error.clone()),
            State::Signature | State::Greeting | State::Handshake(_) => {
                Err(ZmtpError::Unsendable("the handshake is not complete"))
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
                        return Err(ZmtpError::Malformed("message before the end of the handshake"));
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

    /// The next complete frame. Its announced length is checked against the limits before its bytes arrive.
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
        // Bounded by the limit, so it fits.
        let body_bytes = body_bytes as usize;
        if self.input.len() < header_bytes + body_bytes {
            return Ok(None);
        }
        self.input.advance(header_bytes);
        let body = self.input.split_to(body_bytes).freeze();
        if body_bytes > LONG_FRAME_BYTES {
            // Later bytes get new memory. Otherwise the connection would keep the memory of its longest message.
            self.input = BytesMut::from(&self.input[..]);
        }
        Ok(Some((kind, body)))
    }

    /// Handles a command during the handshake.
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

    /// Handles a command after the handshake. Unknown commands are ignored.
    fn command(&mut self, body: Bytes) -> Result<Option<Event>, ZmtpError> {
        let (name, data) = frame::read_command(body)?;
        match &*name {
            b"PING" => {
                // The TTL comes first; it is ignored, since the driver closes silent connections.
                let Some(context) = data.get(2..) else {
                    return Err(ZmtpError::Malformed("PING without a TTL"));
                };
                if context.len() > PING_CONTEXT_BYTES_MAX {
                    return Err(ZmtpError::Malformed("PING with a context longer than 16 bytes"));
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

    /// Interprets a complete message for our socket type. For a publisher it is a subscription in the form of 3.0;
    /// other messages are dropped, as by libzmq.
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
