//! A fake publisher of KV events: the test decides every message, sequence numbers and losses.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_wire::zmtp::{Connection, Event, Socket};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::FeedSpec;
use crate::testing::wait::listen_again;

/// A PUB socket and a replay socket on free ports. Dropping it closes both with all their connections.
pub struct FakeFeed {
    publishes_at: SocketAddr,
    replays_at: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
}

type Message = Vec<Vec<u8>>;

#[derive(Default)]
struct Shared {
    /// The messages of a replay: numbers and payloads.
    history: Mutex<Vec<(u64, Vec<u8>)>>,
    next: Mutex<u64>,
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Message>>>,
    /// Subscriptions so far.
    subscriptions: AtomicUsize,
    /// Replays answered so far.
    replays: AtomicUsize,
    /// Replays end without an end marker.
    markless: AtomicBool,
}

// === impl FakeFeed ===

impl FakeFeed {
    /// A publisher without messages.
    ///
    /// # Panics
    /// No port is free.
    pub async fn start() -> Self {
        let any = || TcpListener::bind("127.0.0.1:0");
        let (publisher, replays) = (any().await.expect("a free port"), any().await.expect("a free port"));
        Self::on(publisher, replays)
    }

    /// The publisher of a restarted engine on the same ports.
    ///
    /// # Panics
    /// Another program has taken the ports.
    pub async fn restart(self) -> Self {
        let (publishes_at, replays_at) = (self.publishes_at.to_string(), self.replays_at.to_string());
        self.stop.cancel();
        Self::on(listen_again(&publishes_at).await, listen_again(&replays_at).await)
    }

    fn on(publisher: TcpListener, replays: TcpListener) -> Self {
        let address = |listener: &TcpListener| listener.local_addr().expect("an address");
        let (publishes_at, replays_at) = (address(&publisher), address(&replays));
        let (shared, stop) = (Arc::new(Shared::default()), CancellationToken::new());
        for (listener, socket) in [(publisher, Socket::Pub), (replays, Socket::Router)] {
            let (shared, stop) = (Arc::clone(&shared), stop.clone());
            tokio::spawn(async move {
                while let Some(Ok((stream, _))) = tokio::select! {
                    accepted = listener.accept() => Some(accepted),
                    () = stop.cancelled() => None,
                } {
                    let (shared, stop) = (Arc::clone(&shared), stop.clone());
                    tokio::spawn(async move {
                        tokio::select! {
                            // A peer that has disconnected is not an error.
                            _ = shared.serve(stream, socket) => {}
                            () = stop.cancelled() => {}
                        }
                    });
                }
            });
        }
        Self { publishes_at, replays_at, shared, stop }
    }

    /// Its addresses, as in a worker's configuration.
    pub fn spec(&self) -> FeedSpec {
        FeedSpec { replay: Some(format!("tcp://{}", self.replays_at)), ..self.spec_without_replay() }
    }

    /// Like [`FakeFeed::spec`], without the replay socket.
    pub fn spec_without_replay(&self) -> FeedSpec {
        FeedSpec::new(&format!("tcp://{}", self.publishes_at))
    }

    /// The body of vLLM's `GET /kv_event_sources` for these feeds.
    pub fn sources(feeds: &[&Self]) -> String {
        let source = |(rank, feed): (usize, &&Self)| {
            let source = serde_json::json!({
                "endpoint": format!("tcp://*:{}", feed.publishes_at.port()),
                "replay_endpoint": format!("tcp://*:{}", feed.replays_at.port()), "topic": "kv",
            });
            (rank.to_string(), source)
        };
        serde_json::Value::Object(feeds.iter().enumerate().map(source).collect()).to_string()
    }

    /// Publishes a batch with the next sequence number.
    pub fn publish(&self, payload: Vec<u8>) -> u64 {
        let seq = self.keep(payload.clone());
        self.send(seq, payload);
        seq
    }

    /// Like [`FakeFeed::publish`], but without sending it to subscribers: only a replay contains it.
    pub fn keep(&self, payload: Vec<u8>) -> u64 {
        let mut next = lock(&self.shared.next);
        let seq = *next;
        *next += 1;
        lock(&self.shared.history).push((seq, payload));
        seq
    }

    /// Sends a batch with a sequence number of the test's choice; no replay contains it.
    pub fn send(&self, seq: u64, payload: Vec<u8>) {
        self.send_frames(vec![b"kv".to_vec(), seq.to_be_bytes().to_vec(), payload]);
    }

    /// Sends any frames.
    pub fn send_frames(&self, frames: Message) {
        lock(&self.shared.subscribers).retain(|subscriber| subscriber.send(frames.clone()).is_ok());
    }

    /// Skips sequence numbers, as if messages had been lost that no replay contains either.
    pub fn lose(&self, messages: u64) {
        *lock(&self.shared.next) += messages;
    }

    /// From now on replays contain no earlier messages.
    pub fn forget_history(&self) {
        lock(&self.shared.history).clear();
    }

    /// Like [`FakeFeed::forget_history`], except for the last message.
    pub fn forget_all_but_the_last(&self) {
        let mut history = lock(&self.shared.history);
        let last = history.len().saturating_sub(1);
        history.drain(..last);
    }

    /// From now on replays have no end marker.
    pub fn omit_end_markers(&self) {
        self.shared.markless.store(true, Ordering::Relaxed);
    }

    /// Closes the connections of all subscribers; they may reconnect.
    pub fn hang_up(&self) {
        lock(&self.shared.subscribers).clear();
    }

    /// Subscriptions so far.
    pub fn subscriptions(&self) -> usize {
        self.shared.subscriptions.load(Ordering::Relaxed)
    }

    /// Replays answered so far.
    pub fn replays(&self) -> usize {
        self.shared.replays.load(Ordering::Relaxed)
    }
}

impl Drop for FakeFeed {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

// === impl Shared ===

impl Shared {
    async fn serve(&self, mut stream: TcpStream, socket: Socket) -> io::Result<()> {
        let mut link = Connection::new(socket);
        let (sender, mut outbox) = mpsc::unbounded_channel();
        let mut subscribed = Some(sender);
        loop {
            while let Some(event) = link.poll().map_err(io::Error::other)? {
                match event {
                    Event::Subscribe(_) => {
                        if let Some(sender) = subscribed.take() {
                            lock(&self.subscribers).push(sender);
                            self.subscriptions.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Event::Message(frames) => self.replay(&mut link, &frames)?,
                    Event::Ready(_) | Event::Cancel(_) => {}
                }
            }
            stream.write_all(&link.take_output()).await?;
            tokio::select! {
                read = stream.read_buf(link.input()) => if read? == 0 { return Ok(()) },
                message = outbox.recv(), if socket == Socket::Pub => match message {
                    Some(frames) => link.send(&frames).map_err(io::Error::other)?,
                    None => return Ok(()),
                },
            }
        }
    }

    fn replay(&self, link: &mut Connection, frames: &[bytes::Bytes]) -> io::Result<()> {
        let from: [u8; 8] =
            frames.last().and_then(|frame| frame[..].try_into().ok()).expect("a number of 8 bytes");
        let from = u64::from_be_bytes(from);
        let mut send = |seq: u64, topic: &[u8], payload: &[u8]| {
            let frames = [&b""[..], topic, &seq.to_be_bytes(), payload];
            link.send(&frames).map_err(io::Error::other)
        };
        for (seq, payload) in lock(&self.history).iter().filter(|(seq, _)| *seq >= from) {
            send(*seq, b"kv", payload)?;
        }
        self.replays.fetch_add(1, Ordering::Relaxed);
        if !self.markless.load(Ordering::Relaxed) {
            send(u64::MAX, b"", b"")?;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
