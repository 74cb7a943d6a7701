//! The relay threads: each accepts clients' connections on a socket of its own and serves them with a runtime of its
//! own.
//!
//! The kernel spreads new connections over the sockets without regard to the work of their threads. So a thread that
//! accepts a connection passes it on if another thread has fewer.

use std::net::TcpListener as Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvlane_fleet::metrics::Reached;
use kvlane_proxy::listener::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::listening::{Listening, Origin};

/// Most connections passed to a relay thread and not yet taken by it.
const HANDOVER_MAX: usize = 1024;

/// One relay thread, as the others see it.
struct Lane {
    handover: mpsc::Sender<Handed>,
    /// Its connections.
    open: AtomicUsize,
}

/// A connection on its way to another thread.
struct Handed {
    stream: std::net::TcpStream,
    _accepting: TaskTrackerToken,
}

/// When connections are accepted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accepting {
    /// From when on.
    pub(crate) open: CancellationToken,
    /// Threads that accept, and connections that they have not passed on yet.
    pub(crate) busy: TaskTracker,
}

/// A relay thread before it starts.
pub(crate) struct Relay {
    lanes: Arc<[Lane]>,
    /// Its place among the lanes.
    own: usize,
    handed: mpsc::Receiver<Handed>,
    socket: Bound,
    origin: Origin,
    accepting: Accepting,
    /// Held until it has stopped accepting.
    busy: TaskTrackerToken,
}

// === impl Relay ===

impl Relay {
    /// A relay thread for each of these sockets.
    pub(crate) fn all(Listening { sockets, origin }: Listening, accepting: &Accepting) -> Vec<Self> {
        let (lanes, handed): (Vec<_>, Vec<_>) = sockets
            .iter()
            .map(|_| {
                let (handover, handed) = mpsc::channel(HANDOVER_MAX);
                (Lane { handover, open: AtomicUsize::new(0) }, handed)
            })
            .unzip();
        let lanes: Arc<[Lane]> = lanes.into();
        let relays = sockets.into_iter().zip(handed).enumerate();
        relays
            .map(|(own, (socket, handed))| {
                let (lanes, accepting, busy) =
                    (Arc::clone(&lanes), accepting.clone(), accepting.busy.token());
                Self { lanes, own, handed, socket, origin, accepting, busy }
            })
            .collect()
    }

    /// Accepts connections from the moment it may until the listener stops, and serves them and those passed on by other threads.
    pub(crate) async fn run(self, listener: Arc<Listener>) {
        let Self { lanes, own, mut handed, socket, origin, accepting, busy } = self;
        let runtime = Handle::current();
        let metrics = &listener.service.proxy.fleet.metrics;
        // The connection is counted already.
        let serve = |stream: TcpStream| {
            let (served, lanes) = (listener.spawn(stream), Arc::clone(&lanes));
            runtime.spawn(async move {
                let _ = served.await;
                lanes[own].open.fetch_sub(1, Ordering::Relaxed);
            });
        };
        let spread = |stream: TcpStream| {
            let open = |lane: usize| lanes[lane].open.load(Ordering::Relaxed);
            let fewest = (0..lanes.len()).min_by_key(|&lane| (open(lane), lane != own)).unwrap_or(own);
            let lane = &lanes[fewest];
            lane.open.fetch_add(1, Ordering::Relaxed);
            if fewest == own {
                return serve(stream);
            }
            let passed = stream.into_std().map(|stream| {
                let handed = Handed { stream, _accepting: accepting.busy.token() };
                lane.handover.try_send(handed).is_ok()
            });
            if !matches!(passed, Ok(true)) {
                lane.open.fetch_sub(1, Ordering::Relaxed);
                metrics.limits.reached(Reached::Handover);
                tracing::warn!("client connection dropped: its relay thread is overloaded");
            }
        };
        let taking = async {
            while let Some(Handed { stream, _accepting }) = handed.recv().await {
                match TcpStream::from_std(stream) {
                    Ok(stream) => serve(stream),
                    Err(error) => {
                        lanes[own].open.fetch_sub(1, Ordering::Relaxed);
                        tracing::warn!(%error, "relay thread cannot use a connection");
                    }
                }
            }
        };
        let accept = async {
            // Until all is accepted and passed on.
            let _busy = busy;
            tokio::select! {
                biased;
                () = accepting.open.cancelled() => {}
                () = listener.stop.cancelled() => return,
            }
            match TcpListener::from_std(socket) {
                Ok(socket) => {
                    Listener::accept(metrics, &socket, listener.stop.clone(), spread).await;
                    origin.close(socket, spread).await;
                }
                Err(error) => {
                    tracing::error!(%error, "relay thread cannot use its socket; it accepts no connections");
                }
            }
        };
        tokio::join!(accept, taking);
    }
}
