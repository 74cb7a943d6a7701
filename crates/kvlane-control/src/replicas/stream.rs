//! One direction of a request between replicas: frames on an HTTP/2 stream.

use std::future::poll_fn;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use kvlane_wire::replica::{DecodeError, Decoder, Frame, Hello};
use tokio::time::timeout;

/// Timeout of each step of opening a connection.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(5);
/// Longest time between two pieces that are sent or received. Everything is told each [`ALL_EVERY`](kvlane_core::replica::ALL_EVERY).
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Bytes that a peer may send on one stream before they are read.
pub(super) const WINDOW: u32 = 1 << 20;
/// Longest explanation of a refusal.
const REFUSAL_BYTES_MAX: usize = 1 << 10;

/// Why a connection or a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    /// No connection, or it broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// HTTP/2 broke.
    #[error("{0}")]
    Http(#[from] h2::Error),
    /// Something that is no frame arrived.
    #[error("{0}")]
    Frame(#[from] DecodeError),
    /// A step took too long.
    #[error("{0} took longer than {1:?}")]
    Late(&'static str, Duration),
    /// The peer does not want it.
    #[error("refused with status {0}: {1}")]
    Refused(http::StatusCode, String),
    /// Frames are missing.
    #[error("the stream began without a hello")]
    NoHello,
    /// The peer ended it.
    #[error("closed by the replica")]
    Closed,
    /// The peer is this process.
    #[error("it is this replica itself")]
    Itself,
    /// The peer is told on another connection.
    #[error("it is a replica with another address")]
    Known,
}

// === impl Ended ===

impl Ended {
    /// Whether the network may be the cause, so that the next attempt may succeed: not where the peer's answer was the
    /// cause, or what it sent is of another protocol.
    pub(super) fn is_of_the_network(&self) -> bool {
        match self {
            Self::Io(error) => error.kind() != io::ErrorKind::InvalidData,
            // A connection that was closed in order has no error of its own.
            Self::Http(error) => match error.get_io() {
                Some(error) => error.kind() != io::ErrorKind::InvalidData,
                None => error.reason() == Some(h2::Reason::NO_ERROR),
            },
            Self::Late(..) | Self::Closed => true,
            Self::Frame(_) | Self::Refused(..) | Self::NoHello | Self::Itself | Self::Known => false,
        }
    }
}

/// Frames that arrive.
pub(super) struct Incoming {
    body: RecvStream,
    decoder: Decoder,
    /// Bytes so far.
    pub(super) bytes: usize,
}

// === impl Incoming ===

impl Incoming {
    pub(super) fn new(body: RecvStream) -> Self {
        Self { body, decoder: Decoder::default(), bytes: 0 }
    }

    /// The next frame; none at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Frame>, Ended> {
        loop {
            if let Some(frame) = self.decoder.frame()? {
                return Ok(Some(frame));
            }
            match self.piece().await? {
                Some(piece) => self.decoder.push(piece),
                None => return Ok(None),
            }
        }
    }

    /// The first frame.
    pub(super) async fn hello(&mut self) -> Result<Hello, Ended> {
        let frame = timeout(STEP_WITHIN, self.next()).await;
        match frame.map_err(|_| Ended::Late("a hello", STEP_WITHIN))?? {
            Some(Frame::Hello(hello)) => Ok(hello),
            _ => Err(Ended::NoHello),
        }
    }

    /// Waits for the end of a stream on which nothing more is said.
    pub(super) async fn end(&mut self) -> Ended {
        loop {
            match self.body.data().await {
                Some(Ok(piece)) => {
                    let _ = self.body.flow_control().release_capacity(piece.len());
                }
                Some(Err(error)) => return error.into(),
                None => return Ended::Closed,
            }
        }
    }

    /// The text of a refusal, shortened.
    pub(super) async fn text(&mut self) -> String {
        let mut text = Vec::new();
        while let Ok(Some(piece)) = self.piece().await {
            text.extend_from_slice(&piece);
            if text.len() >= REFUSAL_BYTES_MAX {
                text.truncate(REFUSAL_BYTES_MAX);
                break;
            }
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    async fn piece(&mut self) -> Result<Option<Bytes>, Ended> {
        let piece = timeout(SILENCE_MAX, self.body.data()).await;
        match piece.map_err(|_| Ended::Late("the next message", SILENCE_MAX))? {
            Some(piece) => {
                let piece = piece?;
                // It never fails for what was received.
                let _ = self.body.flow_control().release_capacity(piece.len());
                self.bytes += piece.len();
                Ok(Some(piece))
            }
            None => Ok(None),
        }
    }
}

/// Waits until the peer has read enough for something to be sent.
pub(super) async fn writable(stream: &mut SendStream<Bytes>) -> Result<(), Ended> {
    stream.reserve_capacity(1);
    capacity(stream).await.map(|_| ())
}

/// Sends all bytes, as fast as the peer reads them.
pub(super) async fn send(stream: &mut SendStream<Bytes>, mut bytes: Bytes) -> Result<(), Ended> {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let room = capacity(stream).await?;
        stream.send_data(bytes.split_to(room.min(bytes.len())), false)?;
    }
    Ok(())
}

async fn capacity(stream: &mut SendStream<Bytes>) -> Result<usize, Ended> {
    // Mostly there is room: then no timer is set.
    if let room @ 1.. = stream.capacity() {
        return Ok(room);
    }
    let room = async {
        loop {
            match stream.capacity() {
                0 => match poll_fn(|cx| stream.poll_capacity(cx)).await {
                    Some(room) => match room? {
                        0 => {}
                        room => return Ok(room),
                    },
                    None => return Err(Ended::Closed),
                },
                room => return Ok(room),
            }
        }
    };
    timeout(SILENCE_MAX, room).await.map_err(|_| Ended::Late("reading by the replica", SILENCE_MAX))?
}

#[cfg(test)]
mod tests {
    use http::Request;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// How the answer to a request ends if the peer, having read something, sends these bytes and closes.
    async fn ended(answer: &[u8], resets: bool) -> Ended {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let peer = async {
            let (mut socket, _) = listener.accept().await.expect("a connection");
            let _ = socket.read(&mut [0; 1 << 10]).await;
            socket.write_all(answer).await.expect("open");
            if resets {
                socket.set_zero_linger().expect("open");
            }
        };
        let own = async {
            let socket = TcpStream::connect(address).await.expect("it listens");
            let (mut requests, connection) = h2::client::handshake(socket).await?;
            let asked = async {
                let (answer, _) = requests.send_request(Request::new(()), true)?;
                answer.await
            };
            let (_, answer) = tokio::join!(connection, asked);
            answer.map(|_| ())
        };
        let (own, ()) = tokio::join!(own, peer);
        own.expect_err("no answer").into()
    }

    #[tokio::test]
    async fn connections_that_break_are_of_the_network_and_other_protocols_are_not() {
        for (answer, resets) in [(&b""[..], false), (b"", true), (b"\0\0\0\x04\0\0\0\0\0", false)] {
            let ended = ended(answer, resets).await;
            assert!(ended.is_of_the_network(), "{ended:?}");
        }
        let ended = ended(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", false).await;
        assert!(!ended.is_of_the_network(), "{ended:?}");
        assert!(!Ended::Refused(http::StatusCode::FORBIDDEN, String::new()).is_of_the_network());
    }
}
