//! Connections to other replicas, on which this one tells its news.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Ping, PingPong, SendStream};
use http::{Method, Request, StatusCode, header};
use kvlane_fleet::panics::persist;
use kvlane_fleet::replicas::{Snapshot, shown};
use kvlane_http::tls::Stream;
use kvlane_wire::grpc::CONTENT_TYPE;
use kvlane_wire::replica::{Encoder, Frame, Hello, hello, limit};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::listen::Resolver;
use super::members::Members;
use super::outbox::{Budget, Outbox, Taken};
use super::pace::{Pace, flows};
use super::stream::{Ended, Incoming, WINDOW, send, writable};
use super::{NEWS_PATH, OpenOutbox, Problem, SNAPSHOT_PATH, Shared, jittered};

/// The first and the longest pause before the next attempt to connect. After a partition, all are connected within a few
/// seconds.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The longest pause where there is a process that does not want the news, or is no replica.
const PAUSE_REFUSED_MAX: Duration = Duration::from_secs(30);
/// Pause where the address is this replica's own, or a second one of another: it may become one of a third.
const PAUSE_KNOWN: Duration = Duration::from_secs(30);
/// Pause before the next attempt to get a snapshot, and before the next look whether it can be used.
const SNAPSHOT_AGAIN: Duration = Duration::from_secs(1);
const READY_AGAIN: Duration = Duration::from_millis(20);
/// Timeout of each step of connecting, and of the answer to a ping.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// How often a replica has to show that it can be reached: TCP alone would notice its loss after minutes.
const PING_EVERY: Duration = Duration::from_secs(1);
/// The same where it is not known, or in doubt, that the link carries all there is: the next answer tells more.
const PING_BUSY_EVERY: Duration = Duration::from_millis(50);

/// Keeps a connection to each member.
pub(super) async fn connect(shared: Arc<Shared>, mut members: watch::Receiver<Members>) {
    let mut tasks = JoinSet::new();
    let mut running: BTreeMap<(SocketAddr, Arc<str>), AbortHandle> = BTreeMap::new();
    loop {
        let wanted = members.borrow_and_update().clone();
        running.retain(|(address, name), task| {
            let stays = wanted.get(address) == Some(name);
            if !stays {
                task.abort();
            }
            stays
        });
        for (address, name) in wanted {
            running.entry((address, name)).or_insert_with_key(|(address, name)| {
                let (shared, address, name) = (Arc::clone(&shared), *address, Arc::clone(name));
                tasks.spawn(async move {
                    let title = format!("connection to replica {address}");
                    persist(&title, || keep(Arc::clone(&shared), address, Arc::clone(&name))).await;
                })
            });
        }
        // Ended ones were aborted.
        while tasks.try_join_next().is_some() {}
        if members.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Keeps the connection to one address.
async fn keep(shared: Arc<Shared>, address: SocketAddr, name: Arc<str>) {
    let mut pause = PAUSE_FIRST;
    let known = Problem { shared: &shared, of: address.to_string() };
    loop {
        let mut has_stood = false;
        let Err(ended) = session(&shared, address, &name, &mut has_stood).await;
        if matches!(ended, Ended::Itself | Ended::Known) {
            known.set(None);
            sleep(jittered(PAUSE_KNOWN)).await;
            continue;
        }
        if known.set(Some(ended.to_string())) {
            tracing::warn!(%address, problem = %ended, "cannot tell a replica what is in flight here; trying again");
        }
        pause = match has_stood {
            true => PAUSE_FIRST,
            false if ended.is_of_the_network() => (2 * pause).min(PAUSE_MAX),
            false => (2 * pause).min(PAUSE_REFUSED_MAX),
        };
        sleep(jittered(pause)).await;
    }
}

/// One connection, from its beginning to its end.
async fn session(
    shared: &Arc<Shared>,
    address: SocketAddr,
    name: &str,
    has_stood: &mut bool,
) -> Result<std::convert::Infallible, Ended> {
    let socket = within("connecting", async { Ok(TcpStream::connect(address).await?) }).await?;
    let io = within("the TLS handshake", secured(shared, name, socket)).await?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW).enable_push(false);
    let (requests, mut connection) =
        within("the HTTP/2 handshake", async { Ok(builder.handshake(io).await?) }).await?;
    let mut work = JoinSet::new();
    let pace = watch::Sender::new(Pace::default());
    if let Some(pings) = connection.ping_pong() {
        work.spawn(ping(pings, pace.clone()));
    }
    work.spawn(async move { connection.await.map_err(Ended::from) });
    let (mut stream, mut answer, peer) = ask(shared, requests.clone(), NEWS_PATH, false).await?;
    let Some(open) = shared.open_outbox(peer.replica) else { return Err(Ended::Known) };
    *has_stood = true;
    shared.fleet.replicas.set_problem(&address.to_string(), None);
    tracing::info!(replica = shown(peer.replica), %address, "telling a replica what is in flight here");
    if peer.age_ms > shared.hello().age_ms {
        let shared = Arc::clone(shared);
        work.spawn(async move { warm(&shared, &peer, || fetch(&shared, requests.clone())).await });
    }
    let OpenOutbox { outbox, .. } = &open;
    tokio::select! {
        ended = tell(shared, outbox, &mut stream, &pace) => ended,
        // Nothing more is said; the stream ends with the connection or the replica.
        ended = answer.end() => Err(ended),
        ended = broken(&mut work) => Err(ended),
    }
}

async fn secured(shared: &Shared, name: &str, socket: TcpStream) -> Result<Stream, Ended> {
    socket.set_nodelay(true)?;
    match shared.tls.load_full() {
        Some(tls) => Ok(tls.connect(name, socket).await?),
        None => Ok(Stream::Plain(socket)),
    }
}

/// Ends when the replica can no longer be reached.
async fn ping(mut pings: PingPong, pace: watch::Sender<Pace>) -> Result<(), Ended> {
    loop {
        pace.send_modify(|pace| pace.ask(Instant::now()));
        within("the answer to a ping", async { Ok(pings.ping(Ping::opaque()).await?) }).await?;
        pace.send_modify(|pace| pace.answer(Instant::now()));
        let is_free = pace.borrow().is_free();
        sleep(if is_free { PING_EVERY } else { PING_BUSY_EVERY }).await;
    }
}

/// Begins a request with a hello, which may be all of it; returns both directions and the other's hello.
async fn ask(
    shared: &Shared,
    requests: SendRequest<Bytes>,
    path: &str,
    is_all: bool,
) -> Result<(SendStream<Bytes>, Incoming, Hello), Ended> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(format!("http://replica{path}"))
        .header(header::CONTENT_TYPE, CONTENT_TYPE)
        .body(())
        .map_err(|error| std::io::Error::other(error.to_string()))?;
    let mut own = Vec::new();
    hello(&mut own, &shared.hello());
    shared.count("sent", own.len());
    within("the answer of the replica", async {
        let (answer, mut stream) = requests.ready().await?.send_request(request, false)?;
        stream.send_data(own.into(), is_all)?;
        let (head, body) = answer.await?.into_parts();
        let mut incoming = Incoming::new(body);
        match head.status {
            StatusCode::OK => {}
            StatusCode::CONFLICT => return Err(Ended::Itself),
            status => return Err(Ended::Refused(status, incoming.text().await)),
        }
        let peer = incoming.hello().await?;
        Ok((stream, incoming, peer))
    })
    .await
}

/// Sends what is put into the outbox.
async fn tell(
    shared: &Shared,
    outbox: &Outbox,
    stream: &mut SendStream<Bytes>,
    pace: &watch::Sender<Pace>,
) -> Result<std::convert::Infallible, Ended> {
    let mut encoder = Encoder::default();
    let mut budget = Budget::new(shared.config.bandwidth, Instant::now());
    let mut paced = pace.subscribe();
    loop {
        outbox.filled().await;
        budget.wait().await;
        flows(&mut paced).await;
        writable(stream).await?;
        let room = pace.borrow().room();
        let Taken { news, limits } = outbox.take(room.min(budget.marks(Instant::now())));
        if news.is_empty() && limits.is_empty() {
            // Marks wait for room.
            sleep(shared.config.interval).await;
            continue;
        }
        let marks = news.iter().flat_map(|news| &news.prompts).map(|(_, marks)| marks.len()).sum();
        pace.send_if_modified(|pace| {
            pace.send(marks);
            false
        });
        let mut bytes = Vec::new();
        news.iter().for_each(|news| encoder.news(news, &mut bytes));
        limits.iter().for_each(|news| limit(&mut bytes, news));
        budget.spend(Instant::now(), bytes.len());
        shared.count("sent", bytes.len());
        send(stream, bytes.into()).await?;
    }
}

/// Gets a snapshot, unless this replica has one; `fetch` returns its number of marks. It ends with its connection.
pub(super) async fn warm<T>(shared: &Shared, peer: &Hello, fetch: impl Fn() -> T) -> Result<(), Ended>
where
    T: Future<Output = Result<u64, Ended>>,
{
    let replicas = &shared.fleet.replicas;
    let _older = replicas.reach_older();
    loop {
        if matches!(replicas.snapshot(), Snapshot::Arrived { .. }) {
            return std::future::pending().await;
        }
        if !shared.fleet.start.is_known() {
            // Endpoints that are not known yet would miss their marks.
            sleep(READY_AGAIN).await;
            continue;
        }
        if replicas.begin_snapshot() {
            // Until it has arrived, the end of this connection lets another one try.
            let mut result = Arriving(shared, Snapshot::None);
            match fetch().await {
                Ok(marks) => {
                    tracing::info!(replica = shown(peer.replica), marks, "snapshot of a replica received");
                    result.1 = Snapshot::Arrived { from: peer.replica, marks };
                }
                Err(why) => tracing::debug!(replica = shown(peer.replica), %why, "no snapshot of a replica"),
            }
        }
        sleep(jittered(SNAPSHOT_AGAIN)).await;
    }
}

/// A snapshot that arrives, with its outcome.
struct Arriving<'a>(&'a Shared, Snapshot);

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.0.fleet.replicas.end_snapshot(self.1.clone());
    }
}

/// Takes over a snapshot. Returns its number of marks.
async fn fetch(shared: &Shared, requests: SendRequest<Bytes>) -> Result<u64, Ended> {
    let (_, mut incoming, _) = ask(shared, requests, SNAPSHOT_PATH, true).await?;
    let (mut resolver, mut marks, mut counted) = (Resolver::default(), 0, 0);
    while let Some(frame) = incoming.next().await? {
        shared.count("received", incoming.bytes - std::mem::replace(&mut counted, incoming.bytes));
        marks += keep_marks(shared, &mut resolver, frame);
    }
    Ok(marks)
}

/// Takes over the marks in one frame of a snapshot. Returns their number.
pub(super) fn keep_marks(shared: &Shared, resolver: &mut Resolver, frame: Frame) -> u64 {
    let Frame::News(news) = frame else { return 0 };
    let Some((pool, news)) = resolver.known(&shared.fleet, news) else { return 0 };
    pool.hear_marks(&news.prompts);
    news.prompts.iter().map(|sent| sent.marks.len() as u64).sum()
}

/// The reason why one of the tasks of a connection ended.
async fn broken(work: &mut JoinSet<Result<(), Ended>>) -> Ended {
    match work.join_next().await {
        Some(Ok(Err(ended))) => ended,
        _ => Ended::Closed,
    }
}

async fn within<T>(what: &'static str, step: impl Future<Output = Result<T, Ended>>) -> Result<T, Ended> {
    timeout(CONNECT_WITHIN, step).await.map_err(|_| Ended::Late(what, CONNECT_WITHIN))?
}
