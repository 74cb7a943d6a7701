//! The sockets of one feed: the subscription, which is kept connected, and replays, which are made on request.
//!
//! Both only queue what they read. A peer that disappears without closing is detected by unanswered pings, or by the
//! kernel's keepalive where its ZeroMQ is too old for pings.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use kvlane_http::network::Allowed;
use kvlane_wire::sequence::Round;
use kvlane_wire::zmtp::{Connection, Event, Frames, Socket, ZmtpError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use kvlane_fleet::feed::EventFeed;
use kvlane_fleet::feed::queue::Item;

/// The first pause after a connection has ended, and the longest; each is twice the one before it.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Time that a peer has to answer the ping after a subscription.
const PONG_MAX: Duration = Duration::from_secs(1);
/// Missed heartbeats after which a peer is given up.
const HEARTBEATS_MISSED_MAX: u32 = 3;
/// The sequence number that marks the end of a replay.
const END: u64 = u64::MAX;

/// Timeouts of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Time to connect.
    pub(super) connect: Duration,
    /// Time between two pings.
    pub(super) heartbeat: Duration,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("cannot connect within {0:?}")]
    ConnectTimeout(Duration),
    #[error("the connection broke: {0}")]
    Broken(io::Error),
    #[error("the engine closed the connection")]
    Closed,
    #[error("no data or heartbeat for {0:?}")]
    Silent(Duration),
    #[error(transparent)]
    Zmtp(#[from] ZmtpError),
    #[error("a new subscription was requested")]
    Asked,
}

/// Keeps the subscription of a feed connected until the feed is closed.
pub(super) async fn subscribe(feed: &EventFeed, patience: Patience) {
    let mut pause = PAUSE_FIRST;
    loop {
        let mut stood = false;
        let ended = tokio::select! {
            ended = subscription(feed, patience, &mut stood) => ended,
            () = feed.reconnect.notified() => Ended::Asked,
            () = feed.closed.cancelled() => return,
        };
        tracing::debug!(feed = %feed.name, address = feed.source.address, %ended, "KV event subscription ended");
        feed.queue.tell(Item::Disconnected(ended.to_string()));
        pause = match (&ended, stood) {
            (Ended::Asked, _) => Duration::ZERO,
            (_, true) => PAUSE_FIRST,
            (_, false) => (2 * pause).min(PAUSE_MAX),
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = feed.closed.cancelled() => return,
        }
        pause = pause.max(PAUSE_FIRST);
    }
}

/// One connection of the subscription, from beginning to end.
async fn subscription(feed: &EventFeed, patience: Patience, stood: &mut bool) -> Ended {
    let exchange = async {
        let mut peer = Peer::connect(&feed.source.address, feed, Socket::Sub, patience).await?;
        loop {
            match peer.event().await? {
                Event::Ready(_) => {
                    peer.link.subscribe(feed.source.topic.as_bytes())?;
                    peer.caught_up_with().await?;
                    *stood = true;
                    feed.queue.tell(Item::Connected);
                }
                Event::Message(frames) => match numbered(&frames) {
                    Ok((seq, payload)) => feed.queue.live(seq, payload),
                    Err(why) => feed.queue.tell(Item::Malformed(why)),
                },
                Event::Subscribe(_) | Event::Cancel(_) => {}
            }
        }
    };
    let result: Result<std::convert::Infallible, Ended> = exchange.await;
    match result {
        Ok(never) => match never {},
        Err(ended) => ended,
    }
}

/// Requests all messages from number `from` on, and queues them.
pub(super) async fn replay(feed: &EventFeed, patience: Patience, round: Round, from: u64) {
    let Some(address) = &feed.source.replay else { return };
    let exchange = async {
        let mut peer = Peer::connect(address, feed, Socket::Dealer, patience).await?;
        loop {
            match peer.event().await? {
                Event::Ready(_) => peer.link.send(&[&b""[..], &from.to_be_bytes()])?,
                Event::Message(frames) => match numbered(&frames) {
                    Ok((END, _)) => return Ok(()),
                    Ok((seq, payload)) => feed.queue.replayed(round, seq, payload).await,
                    Err(why) => return Err(Ended::Broken(io::Error::new(io::ErrorKind::InvalidData, why))),
                },
                Event::Subscribe(_) | Event::Cancel(_) => {}
            }
        }
    };
    let result: Result<(), Ended> = exchange.await;
    feed.queue.tell(match result {
        Ok(()) => Item::ReplayEnded(round),
        Err(why) => Item::ReplayFailed(round, why.to_string()),
    });
}

/// The sequence number and the payload of a message: its last two frames. Before them, subscriptions have the topic,
/// and replays of older engines nothing and of newer ones the topic.
fn numbered(frames: &Frames) -> Result<(u64, Bytes), &'static str> {
    let [.., seq, payload] = &frames[..] else { return Err("a message with one frame") };
    let Ok(seq) = <[u8; 8]>::try_from(&seq[..]) else {
        return Err("a message whose sequence number does not have 8 bytes");
    };
    Ok((u64::from_be_bytes(seq), payload.clone()))
}

/// A connection with its socket.
struct Peer {
    stream: TcpStream,
    link: Connection,
    patience: Patience,
    /// When data last arrived from it.
    heard: Instant,
    next_ping: Instant,
    ready: bool,
    /// The peer answers pings, so its silence is an error. Before the handshake every peer must answer.
    answers: bool,
}

// === impl Peer ===

impl Peer {
    async fn connect(
        address: &str,
        feed: &EventFeed,
        socket: Socket,
        patience: Patience,
    ) -> Result<Self, Ended> {
        let connected = timeout(
            patience.connect,
            connect(address, feed.allowed.as_ref().map(|allowed| allowed.load_full())),
        )
        .await;
        let stream =
            connected.map_err(|_| Ended::ConnectTimeout(patience.connect))?.map_err(Ended::Connect)?;
        let now = Instant::now();
        let next_ping = now + patience.heartbeat;
        let link = Connection::new(socket);
        Ok(Self { stream, link, patience, heard: now, next_ping, ready: false, answers: true })
    }

    /// The peer's next event.
    async fn event(&mut self) -> Result<Event, Ended> {
        loop {
            if let Some(event) = self.link.poll()? {
                self.ready = true;
                return Ok(event);
            }
            self.flush().await?;
            tokio::select! {
                read = self.stream.read_buf(self.link.input()) => match read.map_err(Ended::Broken)? {
                    0 => return Err(Ended::Closed),
                    _ => self.heard = Instant::now(),
                },
                () = sleep_until(self.next_ping) => self.ping()?,
            }
        }
    }

    /// Waits until the peer has processed what was sent, as far as that can be known: it answers a ping in order. A
    /// message that it published before it processed the subscription would be missed by the subscription and by a
    /// replay requested too early, and that would be noticed only at the next message.
    async fn caught_up_with(&mut self) -> Result<(), Ended> {
        let answers = self.link.ping(0)?;
        self.flush().await?;
        if answers {
            let read = self.stream.read_buf(self.link.input());
            // A peer that does not answer has an old library without pings.
            if let Ok(read) = timeout(PONG_MAX, read).await
                && read.map_err(Ended::Broken)? == 0
            {
                return Err(Ended::Closed);
            }
        }
        Ok(())
    }

    fn ping(&mut self) -> Result<(), Ended> {
        let limit = HEARTBEATS_MISSED_MAX * self.patience.heartbeat;
        if self.answers && self.heard.elapsed() >= limit {
            return Err(Ended::Silent(limit));
        }
        if self.ready {
            let tenths = u16::try_from(limit.as_millis() / 100).unwrap_or(u16::MAX);
            self.answers = self.link.ping(tenths.max(1))?;
        }
        self.next_ping = Instant::now() + self.patience.heartbeat;
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Ended> {
        let mut output = self.link.take_output();
        while output.has_remaining() {
            self.stream.write_buf(&mut output).await.map_err(Ended::Broken)?;
        }
        Ok(())
    }
}

/// Connects to the first reachable address of `host:port`.
async fn connect(address: &str, allowed: Option<Arc<Allowed>>) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, format!("cannot resolve {address}"));
    let addresses = match allowed {
        None => lookup_host(address).await?.collect(),
        Some(allowed) => allowed.addresses(address).await?,
    };
    for address in addresses {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }?;
        socket.set_keepalive(true)?;
        match socket.connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}
