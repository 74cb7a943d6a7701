//! Connections to other replicas, on which this one tells its news.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use h2::client::SendRequest;
use http::{Method, Request, StatusCode, header};
use kvlane_fleet::panics::persist;
use kvlane_fleet::replicas::{Snapshot, shown};
use kvlane_http::tls::Stream;
use kvlane_wire::grpc::CONTENT_TYPE;
use kvlane_wire::replica::{Encoder, Frame, Hello, hello};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::listen::Resolver;
use super::members::Members;
use super::outbox::{Budget, Outbox};
use super::stream::{Ended, Incoming, STEP_WITHIN, WINDOW, send, writable};
use super::{NEWS_PATH, OpenOutbox, SNAPSHOT_PATH, Shared, jittered};

/// The first and the longest pause before the next attempt to connect.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Pause where the address is this replica's own, or a second one of another: it may become one of a third.
const PAUSE_KNOWN: Duration = Duration::from_secs(30);
/// Pause before the next attempt to get a snapshot.
const SNAPSHOT_AGAIN: Duration = Duration::from_secs(1);

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
    let problems = &shared.fleet.replicas;
    let _forget = Forget(&shared, address);
    loop {
        let mut stood = false;
        let Err(ended) = session(&shared, address, &name, &mut stood).await;
        match ended {
            Ended::Itself | Ended::Known => {
                problems.set_problem(&address.to_string(), None);
                sleep(jittered(PAUSE_KNOWN)).await;
                continue;
            }
            ended => {
                if problems.set_problem(&address.to_string(), Some(ended.to_string())) {
                    tracing::warn!(%address, problem = %ended, "cannot tell a replica what is in flight here; trying again");
                }
            }
        }
        pause = if stood { PAUSE_FIRST } else { (2 * pause).min(PAUSE_MAX) };
        sleep(jittered(pause)).await;
    }
}

/// Forgets the problem of an address that is no longer a member's.
struct Forget<'a>(&'a Shared, SocketAddr);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.fleet.replicas.set_problem(&self.1.to_string(), None);
    }
}

/// One connection, from its beginning to its end.
async fn session(
    shared: &Arc<Shared>,
    address: SocketAddr,
    name: &str,
    stood: &mut bool,
) -> Result<std::convert::Infallible, Ended> {
    let io = within("connecting", open(shared, address, name)).await?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW).enable_push(false);
    let (requests, connection) =
        within("the HTTP/2 handshake", async { Ok(builder.handshake(io).await?) }).await?;
    let mut work = JoinSet::new();
    work.spawn(async move { connection.await.map_err(Ended::from) });
    let (mut stream, mut answer, peer) = ask(shared, requests.clone(), NEWS_PATH, false).await?;
    let Some(open) = shared.open_outbox(peer.replica) else { return Err(Ended::Known) };
    *stood = true;
    shared.fleet.replicas.set_problem(&address.to_string(), None);
    tracing::info!(replica = shown(peer.replica), %address, "telling a replica what is in flight here");
    if peer.age_ms > shared.hello().age_ms {
        let shared = Arc::clone(shared);
        work.spawn(async move { warm(&shared, requests, &peer).await });
    }
    let OpenOutbox { outbox, .. } = &open;
    tokio::select! {
        ended = tell(shared, outbox, &mut stream) => ended,
        // Nothing more is said; the stream ends with the connection or the replica.
        ended = answer.end() => Err(ended),
        ended = broken(&mut work) => Err(ended),
    }
}

async fn open(shared: &Shared, address: SocketAddr, name: &str) -> Result<Stream, Ended> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    match shared.tls.load_full() {
        Some(tls) => Ok(tls.connect(name, stream).await?),
        None => Ok(Stream::Plain(stream)),
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
) -> Result<std::convert::Infallible, Ended> {
    let mut encoder = Encoder::default();
    let mut budget = Budget::new(shared.config.bandwidth, Instant::now());
    loop {
        outbox.filled().await;
        sleep(budget.pause(Instant::now())).await;
        writable(stream).await?;
        let (news, shed) = outbox.take(budget.marks(Instant::now()));
        shared.fleet.metrics.replicas.replica_marks_shed.inc_by(shed as u64);
        let mut bytes = Vec::new();
        news.iter().for_each(|news| encoder.news(news, &mut bytes));
        budget.spend(Instant::now(), bytes.len());
        shared.count("sent", bytes.len());
        send(stream, bytes.into()).await?;
    }
}

/// Gets a snapshot, unless this replica has one. It ends with its connection.
async fn warm(shared: &Shared, requests: SendRequest<Bytes>, peer: &Hello) -> Result<(), Ended> {
    let replicas = &shared.fleet.replicas;
    loop {
        if matches!(replicas.snapshot(), Snapshot::Arrived { .. }) {
            return std::future::pending().await;
        }
        if replicas.begin_snapshot() {
            // Until it has arrived, the end of this connection lets another one try.
            let mut result = Arriving(shared, Snapshot::None);
            match fetch(shared, requests.clone()).await {
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
        if let Frame::News(news) = frame
            && let Some((pool, news)) = resolver.known(&shared.fleet, news)
        {
            marks += news.prompts.iter().map(|sent| sent.marks.len() as u64).sum::<u64>();
            pool.hear_marks(&news.prompts);
        }
    }
    Ok(marks)
}

/// The reason why one of the tasks of a connection ended.
async fn broken(work: &mut JoinSet<Result<(), Ended>>) -> Ended {
    match work.join_next().await {
        Some(Ok(Err(ended))) => ended,
        _ => Ended::Closed,
    }
}

async fn within<T>(what: &'static str, step: impl Future<Output = Result<T, Ended>>) -> Result<T, Ended> {
    timeout(STEP_WITHIN, step).await.map_err(|_| Ended::Late(what, STEP_WITHIN))?
}
