//! Connections of other replicas, on which this one hears their news.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, Response, StatusCode};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::replica::{self as core, SentPrompt};
use kvlane_fleet::Fleet;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::replicas::shown;
use kvlane_http::tls::Stream;
use kvlane_wire::replica::{Encoder, Frame, Hello, NAMES_MAX, News, hello};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::outbox::Budget;
use super::stream::{Ended, Incoming, SILENCE_MAX, STEP_WITHIN, WINDOW, send};
use super::teller::named;
use super::{NEWS_PATH, SNAPSHOT_PATH, Shared};

/// Most connections; those beyond it are closed at once.
const CONNECTIONS_MAX: usize = 512;
/// Most requests on one connection: news, and a snapshot.
const REQUESTS_MAX: u32 = 4;
/// Largest head of a request.
const HEAD_BYTES_MAX: u32 = 4 << 10;
/// Pause after a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Marks of a snapshot that are written at once.
const PIECE_MARKS: usize = 1 << 13;

/// Hears for as long as it is polled.
pub(super) async fn listen(shared: Arc<Shared>, socket: Arc<std::net::TcpListener>) {
    let listener = match socket.try_clone().and_then(TcpListener::from_std) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "cannot listen for other replicas"),
    };
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) if connections.len() < CONNECTIONS_MAX => {
                    connections.spawn(serve(Arc::clone(&shared), stream, from));
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept the connection of a replica");
                    sleep(ACCEPT_AGAIN).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Serves one connection.
async fn serve(shared: Arc<Shared>, stream: TcpStream, from: SocketAddr) {
    if let Err(problem) = hear_on(&shared, stream, from).await
        && let Some(not_logged) = shared.broken.due(Instant::now())
    {
        tracing::warn!(%from, %problem, not_logged, "connection to the port of replicas failed");
    }
}

async fn hear_on(shared: &Arc<Shared>, stream: TcpStream, from: SocketAddr) -> Result<(), Ended> {
    let late = |_| Ended::Late("the handshake", STEP_WITHIN);
    stream.set_nodelay(true)?;
    let io = match shared.tls.load_full() {
        Some(tls) => timeout(STEP_WITHIN, tls.accept(stream)).await.map_err(late)??,
        None => Stream::Plain(stream),
    };
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(REQUESTS_MAX)
        .initial_window_size(WINDOW)
        .initial_connection_window_size(2 * WINDOW)
        .max_header_list_size(HEAD_BYTES_MAX);
    let handshake = builder.handshake::<_, Bytes>(io);
    let mut connection = timeout(STEP_WITHIN, handshake).await.map_err(late)??;
    let mut calls = JoinSet::new();
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    let shared = Arc::clone(shared);
                    calls.spawn(async move { call(&shared, request, respond, from).await });
                }
                // Replicas die, and their connections break.
                Some(Err(error)) if error.is_io() => return Ok(()),
                Some(Err(error)) => return Err(error.into()),
                None => return Ok(()),
            },
            Some(_) = calls.join_next() => {}
            () = sleep(SILENCE_MAX), if calls.is_empty() => {
                connection.abrupt_shutdown(h2::Reason::NO_ERROR);
            }
        }
    }
}

/// Answers one request, and logs how it ended.
async fn call(
    shared: &Shared,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    from: SocketAddr,
) {
    let (head, body) = request.into_parts();
    let mut incoming = Incoming::new(body);
    let peer = match incoming.hello().await {
        Ok(peer) => peer,
        Err(problem) => {
            refuse(&mut respond, StatusCode::BAD_REQUEST, problem.to_string());
            if let Some(not_logged) = shared.broken.due(Instant::now()) {
                tracing::warn!(%from, %problem, not_logged, "request on the port of replicas refused");
            }
            return;
        }
    };
    if peer.replica == shared.own {
        return refuse(&mut respond, StatusCode::CONFLICT, String::new());
    }
    if let Err(problem) = admit(shared, &peer) {
        if let Some(not_logged) = shared.refused.due(Instant::now()) {
            tracing::warn!(%from, problem, not_logged, "replica refused");
        }
        return refuse(&mut respond, StatusCode::FORBIDDEN, problem);
    }
    let ended = match head.uri.path() {
        NEWS_PATH => news(shared, &peer, &mut incoming, &mut respond, from).await,
        SNAPSHOT_PATH if shared.fleet.replicas.await_snapshot() => {
            return refuse(&mut respond, StatusCode::SERVICE_UNAVAILABLE, "it waits for one itself".into());
        }
        SNAPSHOT_PATH => snapshot(shared, &mut respond).await,
        _ => return refuse(&mut respond, StatusCode::NOT_FOUND, "no such path".into()),
    };
    if let Err(problem) = ended {
        tracing::info!(replica = shown(peer.replica), %from, %problem, "connection of a replica ended");
    }
}

/// Whether a replica may take part.
pub(super) fn admit(shared: &Shared, peer: &Hello) -> Result<(), String> {
    let own = &shared.config.cluster;
    if peer.cluster != *own {
        return Err(format!(
            "replicas.cluster is '{own}' here and '{}' there: give replicas of one fleet the same name",
            peer.cluster.escape_debug()
        ));
    }
    if !peer.is_readable() {
        return Err(format!(
            "version {} of its messages cannot be read here: update this replica",
            peer.version
        ));
    }
    Ok(())
}

fn refuse(respond: &mut SendResponse<Bytes>, status: StatusCode, why: String) {
    let mut head = Response::new(());
    *head.status_mut() = status;
    // The peer may have gone.
    if let Ok(mut stream) = respond.send_response(head, false) {
        let _ = stream.send_data(why.into(), true);
    }
}

/// The head of an answer, and the own hello.
fn accept(shared: &Shared, respond: &mut SendResponse<Bytes>) -> Result<SendStream<Bytes>, Ended> {
    let mut stream = respond.send_response(Response::new(()), false)?;
    let mut own = Vec::new();
    hello(&mut own, &shared.hello());
    shared.count("sent", own.len());
    stream.send_data(own.into(), false)?;
    Ok(stream)
}

/// Hears the news of one replica.
async fn news(
    shared: &Shared,
    peer: &Hello,
    incoming: &mut Incoming,
    respond: &mut SendResponse<Bytes>,
    from: SocketAddr,
) -> Result<(), Ended> {
    let _answer = accept(shared, respond)?;
    tracing::info!(replica = shown(peer.replica), %from, "hearing a replica");
    let (mut resolver, mut counted) = (Resolver::default(), 0);
    while let Some(frame) = incoming.next().await? {
        shared.count("received", incoming.bytes - std::mem::replace(&mut counted, incoming.bytes));
        shared.fleet.replicas.hear(shared.fleet.clock.now(), peer.replica, Some(from.ip()));
        hear(shared, peer, &mut resolver, frame);
    }
    Err(Ended::Closed)
}

/// Takes over what one frame of a replica tells.
pub(super) fn hear(shared: &Shared, peer: &Hello, resolver: &mut Resolver, frame: Frame) {
    match frame {
        Frame::News(news) => {
            if let Some((pool, news)) = resolver.known(&shared.fleet, news) {
                pool.hear(peer.replica, news);
            }
        }
        Frame::Limit(news) => shared.limits.hear(shared.fleet.clock.now(), peer.replica, &news),
        Frame::Hello(_) | Frame::Unknown => {}
    }
}

/// Sends the marks of all prompts, within the bandwidth for one replica.
async fn snapshot(shared: &Shared, respond: &mut SendResponse<Bytes>) -> Result<(), Ended> {
    let mut stream = accept(shared, respond)?;
    let (mut encoder, mut budget) =
        (Encoder::default(), Budget::new(shared.config.bandwidth, Instant::now()));
    for news in pieces(&shared.fleet) {
        let mut bytes = Vec::new();
        encoder.news(&news, &mut bytes);
        budget.spend(Instant::now(), bytes.len());
        shared.count("sent", bytes.len());
        send(&mut stream, bytes.into()).await?;
        budget.wait().await;
    }
    stream.send_data(Bytes::new(), true)?;
    Ok(())
}

/// The marks of all prompts, in pieces of a bounded size.
pub(super) fn pieces(fleet: &Fleet) -> impl Iterator<Item = News> + Send + use<> {
    fleet.pools().into_iter().flat_map(|pool| {
        pool.router.tell_marks().into_iter().flat_map(move |SentPrompt { endpoint, marks }| {
            let pool = Arc::clone(&pool);
            let parts: Vec<_> = marks.chunks(PIECE_MARKS).map(<[_]>::to_vec).collect();
            parts.into_iter().map(move |marks| {
                let prompts = vec![SentPrompt { endpoint, marks }];
                named(&pool, core::News { prompts, ..core::News::default() })
            })
        })
    })
}

/// Finds the endpoints that a stream names.
#[derive(Default)]
pub(super) struct Resolver {
    /// Those that were found, by pool and name. An endpoint may have left since.
    found: HashMap<Arc<str>, HashMap<Arc<str>, EndpointId>>,
}

// === impl Resolver ===

impl Resolver {
    /// News of a pool that is also here, of endpoints that are also here. Marks of blocks of another size are left out.
    pub(super) fn known(&mut self, fleet: &Fleet, news: News) -> Option<(Arc<ModelPool>, core::News)> {
        let pool = fleet.pools().into_iter().find(|pool| *pool.model == *news.pool)?;
        let found = self.found.entry(news.pool).or_default();
        if found.len() >= NAMES_MAX {
            found.clear();
        }
        // All endpoints by name, if one has to be looked for.
        let mut all = None;
        let mut id = |name: Arc<str>| -> Option<EndpointId> {
            if let Some(id) = found.get(&name)
                && pool.endpoint(*id).is_some_and(|endpoint| endpoint.name == name)
            {
                return Some(*id);
            }
            let all = all.get_or_insert_with(|| {
                let endpoints = pool.endpoints().into_iter();
                endpoints.map(|endpoint| (Arc::clone(&endpoint.name), endpoint.id)).collect::<HashMap<_, _>>()
            });
            let id = all.get(&name).copied()?;
            found.insert(name, id);
            Some(id)
        };
        let mut known = core::News { number: news.number, services: news.services, ..core::News::default() };
        known.shares = news.shares.into_iter().filter_map(|(name, share)| Some((id(name)?, share))).collect();
        let learned = news.learned.into_iter();
        known.learned = learned.filter_map(|(of, estimate)| Some((of.named(&mut id)?, estimate))).collect();
        let turns = news.turns.into_iter();
        known.turns = turns.filter_map(|(name, turn)| Some((id(name)?, turn))).collect();
        if news.block_tokens == pool.router.block_tokens() {
            let prompts = news.prompts.into_iter();
            known.prompts =
                prompts.filter_map(|(name, marks)| Some(SentPrompt { endpoint: id(name)?, marks })).collect();
        }
        Some((pool, known))
    }
}
