//! Sockets of a feed: PUB for new batches, and ROUTER for requests of past ones.
//!
//! The engine passes a batch to the [`Outlet`] and continues: the batch is added to the buffer and to the queue of
//! each subscriber, and is lost for a subscriber whose queue is full, as with ZeroMQ. Every connection is a separate
//! task.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvlane_wire::zmtp::{Connection, Event, Frames, Limits, Socket, ZmtpError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::FeedCounts;
use super::fault::Fate;

/// Connections of one socket beyond which new ones wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 1024;

/// Subscriptions of one connection beyond which it is closed.
const TOPICS_MAX: usize = 1024;

/// Approximate bytes per write.
const WRITE_BYTES: usize = 256 << 10;

/// Bytes of one message from a subscriber: a topic or a sequence number.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Pause after a failed accept, mostly because of the process's limit of open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The sequence number that ends a replay: -1.
const END: [u8; 8] = [0xFF; 8];

/// The batch of one step, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) seq: u64,
    pub(super) payload: Bytes,
}

/// Behaviour of a feed's sockets.
#[derive(Clone, Debug)]
pub(super) struct OutletConfig {
    pub(super) topic: Bytes,
    /// Whether replayed messages have their topic, too.
    pub(super) replay_topic: bool,
    pub(super) buffer_steps: usize,
    pub(super) hwm: usize,
    pub(super) delay: Duration,
}

/// State shared by an engine and its feed's sockets.
#[derive(Debug)]
pub(super) struct Outlet {
    config: OutletConfig,
    state: Mutex<State>,
    /// Whether all connections are cut, including new ones.
    cut: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    /// The latest batches, oldest first.
    buffer: VecDeque<Batch>,
    subscribers: Vec<Subscriber>,
    next_id: u64,
    counts: FeedCounts,
    silent: bool,
}

#[derive(Debug)]
struct Subscriber {
    id: u64,
    topics: Vec<Bytes>,
    queue: mpsc::Sender<Due>,
}

/// A batch in a subscriber's queue.
#[derive(Debug)]
struct Due {
    /// Earliest time of sending; none for at once.
    at: Option<Instant>,
    batch: Batch,
}

/// A registered subscriber, removed when dropped.
struct Seat {
    outlet: Arc<Outlet>,
    id: u64,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Protocol(#[from] ZmtpError),
    #[error("a peer has more than {TOPICS_MAX} subscriptions")]
    TooManyTopics,
    #[error("the connection was cut")]
    Cut,
}

// === impl Outlet ===

impl Outlet {
    pub(super) fn new(config: OutletConfig) -> Arc<Self> {
        Arc::new(Self { config, state: Mutex::default(), cut: watch::Sender::default() })
    }

    /// Stores `made` for replays, and gives each subscriber the batches published in its place.
    pub(super) fn publish(&self, made: Batch, sent: &[Batch], fate: Fate) {
        let at = (!self.config.delay.is_zero()).then(|| Instant::now() + self.config.delay);
        let mut state = self.lock();
        let State { buffer, subscribers, counts, silent, .. } = &mut *state;
        counts.batches += 1;
        counts.dropped += u64::from(fate.dropped);
        counts.duplicated += u64::from(fate.duplicated);
        counts.reordered += u64::from(fate.reordered);
        counts.silenced += u64::from(fate.silenced);
        *silent = fate.silenced;
        if buffer.len() >= self.config.buffer_steps {
            buffer.pop_front();
        }
        if self.config.buffer_steps > 0 {
            buffer.push_back(made);
        }
        for subscriber in subscribers.iter().filter(|one| one.wants(&self.config.topic)) {
            for batch in sent {
                let lost = subscriber.queue.try_send(Due { at, batch: batch.clone() }).is_err();
                counts.overflowed += u64::from(lost);
            }
        }
    }

    pub(super) fn cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }

    pub(super) fn lied(&self) {
        self.lock().counts.lies += 1;
    }

    pub(super) fn counts(&self) -> FeedCounts {
        self.lock().counts
    }

    /// The batches from `seq` on in the buffer; none if connections are cut.
    fn since(&self, seq: u64) -> Option<Vec<Batch>> {
        let state = self.lock();
        let buffer = &state.buffer;
        (!state.silent)
            .then(|| buffer.range(buffer.partition_point(|batch| batch.seq < seq)..).cloned().collect())
    }

    fn join(self: &Arc<Self>) -> (Seat, mpsc::Receiver<Due>) {
        let (sender, queue) = mpsc::channel(self.config.hwm);
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.subscribers.push(Subscriber { id, topics: Vec::new(), queue: sender });
        (Seat { outlet: self.clone(), id }, queue)
    }

    /// Locks, also if a holder panicked: every update is complete before its lock is released.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Subscriber ===

impl Subscriber {
    fn wants(&self, topic: &[u8]) -> bool {
        self.topics.iter().any(|prefix| topic.starts_with(prefix))
    }
}

// === impl Seat ===

impl Seat {
    fn with_topics(&self, act: impl FnOnce(&mut Vec<Bytes>)) -> Result<(), Closed> {
        let mut state = self.outlet.lock();
        let Some(subscriber) = state.subscribers.iter_mut().find(|one| one.id == self.id) else {
            return Ok(());
        };
        act(&mut subscriber.topics);
        if subscriber.topics.len() > TOPICS_MAX { Err(Closed::TooManyTopics) } else { Ok(()) }
    }

    /// Each subscription is removed as often as it was made, so they are stored separately.
    fn apply(&self, event: Event) -> Result<(), Closed> {
        match event {
            // Copied, so that it does not keep alive what was received with it.
            Event::Subscribe(topic) => self.with_topics(|topics| topics.push(Bytes::copy_from_slice(&topic))),
            Event::Cancel(topic) => self.with_topics(|topics| {
                if let Some(at) = topics.iter().position(|one| *one == topic) {
                    topics.swap_remove(at);
                }
            }),
            Event::Ready(_) | Event::Message(_) => Ok(()),
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.outlet.lock().subscribers.retain(|one| one.id != self.id);
    }
}

/// Publishes to all clients that connect, until dropped.
pub(super) async fn publisher(listener: TcpListener, outlet: Arc<Outlet>) {
    serve(listener, |stream| {
        let outlet = outlet.clone();
        async move { report(until_cut(&outlet, publish_to(stream, &outlet)).await) }
    })
    .await;
}

/// Answers requests of past batches, until dropped.
pub(super) async fn replayer(listener: TcpListener, outlet: Arc<Outlet>) {
    serve(listener, |stream| {
        let outlet = outlet.clone();
        async move { report(until_cut(&outlet, replay_to(stream, &outlet)).await) }
    })
    .await;
}

/// Serves a connection until it ends or is cut.
async fn until_cut(outlet: &Outlet, serve: impl Future<Output = Result<(), Closed>>) -> Result<(), Closed> {
    let mut cut = outlet.cut.subscribe();
    tokio::select! {
        biased;
        // Its sender is in the outlet, which is still there.
        _ = cut.wait_for(|cut| *cut) => Err(Closed::Cut),
        ended = serve => ended,
    }
}

fn report(ended: Result<(), Closed>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "KV event feed connection ended");
    }
}

async fn serve<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> F,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    // Without this, the kernel holds small batches back until earlier ones are acknowledged. It fails
                    // only on a dead socket, which is noticed when it is read.
                    let _ = stream.set_nodelay(true);
                    connections.spawn(serve(stream));
                }
                Err(error) => {
                    tracing::warn!(%error, "the KV event feed cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

fn connection(socket: Socket) -> Connection {
    let limits = Limits { message_bytes: MESSAGE_BYTES_MAX, ..Limits::default() };
    Connection::new(socket).with_limits(limits)
}

async fn publish_to(mut stream: TcpStream, outlet: &Arc<Outlet>) -> Result<(), Closed> {
    let mut connection = connection(Socket::Pub);
    let (seat, mut queue) = outlet.join();
    let mut next: Option<Due> = None;
    loop {
        stream.write_all(&connection.take_output()).await?;
        let due = next.as_ref().map(|due| due.at.unwrap_or_else(Instant::now));
        tokio::select! {
            read = stream.read_buf(connection.input()) => {
                if read? == 0 {
                    return Ok(());
                }
                while let Some(event) = connection.poll()? {
                    seat.apply(event)?;
                }
            }
            Some(due) = queue.recv(), if next.is_none() => next = Some(due),
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        let now = Instant::now();
        while connection.output_bytes() < WRITE_BYTES
            && let Some(Due { batch, .. }) = next.take_if(|due| due.at.is_none_or(|at| at <= now))
        {
            connection.send(&[&outlet.config.topic[..], &batch.seq.to_be_bytes(), &batch.payload])?;
            next = queue.try_recv().ok();
        }
    }
}

async fn replay_to(mut stream: TcpStream, outlet: &Outlet) -> Result<(), Closed> {
    let mut connection = connection(Socket::Router);
    loop {
        stream.write_all(&connection.take_output()).await?;
        if stream.read_buf(connection.input()).await? == 0 {
            return Ok(());
        }
        while let Some(event) = connection.poll()? {
            if let Event::Message(request) = event {
                answer(&mut stream, &mut connection, outlet, &request).await?;
            }
        }
    }
}

/// Answers one request with every batch from the number it names on, and an end marker.
async fn answer(
    stream: &mut TcpStream,
    connection: &mut Connection,
    outlet: &Outlet,
    request: &Frames,
) -> Result<(), Closed> {
    let [delimiter, from] = request.as_slice() else {
        tracing::warn!(
            frames = request.len(),
            "invalid KV event replay request: expected an empty frame and a sequence number"
        );
        return Ok(());
    };
    // A number of any length, as vLLM reads it.
    let from = from.iter().fold(0_u64, |number, byte| {
        number.checked_mul(256).map_or(u64::MAX, |number| number | u64::from(*byte))
    });
    let Some(batches) = outlet.since(from) else {
        return Ok(());
    };
    let topic = outlet.config.replay_topic;
    for Batch { seq, payload } in batches {
        let seq = seq.to_be_bytes();
        match topic {
            true => connection.send(&[&delimiter[..], &outlet.config.topic, &seq, &payload])?,
            false => connection.send(&[&delimiter[..], &seq, &payload])?,
        }
        if connection.output_bytes() >= WRITE_BYTES {
            stream.write_all(&connection.take_output()).await?;
        }
    }
    match topic {
        true => connection.send(&[&delimiter[..], b"", &END, b""])?,
        false => connection.send(&[&delimiter[..], &END, b""])?,
    }
    Ok(())
}
