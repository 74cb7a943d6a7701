//! Sockets of a KV event feed: a subscription read for a while, and one replay.

use std::time::Duration;

use bytes::Bytes;
use kvlane_wire::zmtp::{Connection, Event, Frames, Socket};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The number that marks the end of a replay.
const END: u64 = u64::MAX;
/// Maximum messages read of a replay: an engine's default buffer.
const REPLAYED_MAX: usize = 10_000;

/// One message: its number and its payload.
pub(super) type Message = (u64, Bytes);

/// A connection to an engine's socket.
pub(super) struct Peer {
    stream: TcpStream,
    link: Connection,
}

// === impl Peer ===

impl Peer {
    /// Subscribes to topics that begin with `topic`.
    ///
    /// # Errors
    /// The cause, as text.
    pub(super) async fn subscribe(address: &str, topic: &str, patience: Duration) -> Result<Self, String> {
        let mut peer = Self::connect(address, Socket::Sub, patience).await?;
        peer.link.subscribe(topic.as_bytes()).map_err(|error| error.to_string())?;
        peer.flush().await?;
        Ok(peer)
    }

    /// The next message of a subscription.
    ///
    /// # Errors
    /// Why there are no more messages.
    pub(super) async fn next(&mut self) -> Result<Message, String> {
        loop {
            if let Event::Message(frames) = self.event().await? {
                return numbered(&frames);
            }
        }
    }

    /// All messages from `from` on in the engine's buffer.
    ///
    /// # Errors
    /// The cause, as text.
    pub(super) async fn replay(address: &str, from: u64, patience: Duration) -> Result<Vec<Message>, String> {
        let mut peer = Self::connect(address, Socket::Dealer, patience).await?;
        peer.link.send(&[&b""[..], &from.to_be_bytes()]).map_err(|error| error.to_string())?;
        peer.flush().await?;
        let mut messages = Vec::new();
        while messages.len() < REPLAYED_MAX {
            let message = timeout(patience, peer.next()).await;
            let message = message.map_err(|_| {
                format!("no end of the replay within {patience:?} of the last of {} messages", messages.len())
            })??;
            if message.0 == END {
                break;
            }
            messages.push(message);
        }
        Ok(messages)
    }

    async fn connect(address: &str, socket: Socket, patience: Duration) -> Result<Self, String> {
        let greeted = async {
            let stream =
                TcpStream::connect(address).await.map_err(|error| format!("cannot connect: {error}"))?;
            let mut peer = Self { stream, link: Connection::new(socket) };
            match peer.event().await? {
                Event::Ready(_) => Ok(peer),
                _ => Err("the peer sent data before its ZMTP greeting".to_owned()),
            }
        };
        timeout(patience, greeted)
            .await
            .unwrap_or_else(|_| Err(format!("no ZMTP greeting within {patience:?}")))
    }

    async fn event(&mut self) -> Result<Event, String> {
        loop {
            if let Some(event) = self.link.poll().map_err(|error| error.to_string())? {
                return Ok(event);
            }
            self.flush().await?;
            let read = self.stream.read_buf(self.link.input()).await;
            match read.map_err(|error| format!("the connection broke: {error}"))? {
                0 => return Err("the engine closed the connection".into()),
                _ => continue,
            }
        }
    }

    async fn flush(&mut self) -> Result<(), String> {
        let bytes = self.link.take_output();
        self.stream.write_all(&bytes).await.map_err(|error| format!("the connection broke: {error}"))
    }
}

/// The number and the content of a message: its last two frames. A topic, or nothing, precedes them.
fn numbered(frames: &Frames) -> Result<Message, String> {
    let [.., seq, payload] = &frames[..] else { return Err("a message of one frame".into()) };
    match <[u8; 8]>::try_from(&seq[..]) {
        Ok(seq) => Ok((u64::from_be_bytes(seq), payload.clone())),
        Err(_) => Err(format!("a message whose number has {} bytes and not 8", seq.len())),
    }
}
