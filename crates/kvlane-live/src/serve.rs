//! Starts and stops a gateway: one admin thread for probes and operators, two for KV events, and relay threads for
//! clients.
//!
//! Each relay thread has a runtime of its own and keeps the connections it is given, with their upstream connections:
//! a request never changes threads. That spares the wake-ups and the stealing of a shared runtime, which cost more
//! than relaying a small request does. What the threads share is the router.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::auth::keep_keys;
use crate::clock::Clock;
use crate::config::Config;
use crate::fleet::{Fleet, check_workers};
use crate::front::http::{Door, Front};
use crate::gateway::{Gateway, Security};
use crate::history::keep_history;
use crate::ingest::{Ingest, write_snapshot};
use crate::metrics::{Metrics, Reached};
use crate::panics::{guard, persist};
use crate::pool::ModelPool;
use crate::recording_writer;
use crate::stall;
use crate::timings::Timings;
use crate::tokenize::Tokenizers;
use crate::traces::export;
use crate::warm;

/// Connections handed to a relay thread that it has not taken yet.
const HANDOVER_MAX: usize = 1024;

/// A gateway at work. Dropping it without [`Serving::shut_down`] cuts all connections.
pub struct Serving {
    /// Where clients are served.
    pub address: SocketAddr,
    /// Where operators are served.
    pub metrics_address: SocketAddr,
    /// What it shares.
    pub gateway: Arc<Gateway>,
    /// Who serves behind it.
    pub fleet: Arc<Fleet>,
    stop: CancellationToken,
    /// Ends all threads, when dropped at the latest.
    kill: DropGuard,
    connections: TaskTracker,
    threads: Vec<JoinHandle<()>>,
}

/// What a configuration names, read and found to be right.
struct Parts {
    timings: Timings,
    security: Security,
    tokenizers: Tokenizers,
}

/// What was cut when a gateway ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Requests that had no whole answer: queued, or sent to a worker.
    pub requests: usize,
    /// Clients' connections that were open, idle or not.
    pub connections: usize,
}

/// One relay thread, from the acceptor's side.
struct Lane {
    handover: mpsc::Sender<std::net::TcpStream>,
    open: Arc<AtomicUsize>,
}

/// Reads all that a configuration names, as [`Serving::start`] does, and starts nothing.
///
/// # Errors
/// The first thing for which a gateway would not start, ports that are taken apart.
pub fn check(config: &Config) -> io::Result<()> {
    Parts::read(config).map(drop)
}

// === impl Parts ===

impl Parts {
    fn read(config: &Config) -> io::Result<Self> {
        fn invalid(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
            io::Error::new(io::ErrorKind::InvalidInput, why)
        }
        config.validate().map_err(invalid)?;
        let timings = Timings::read(&config.routing).map_err(invalid)?;
        let security = Security::read(config).map_err(invalid)?;
        check_workers(config).map_err(invalid)?;
        recording_writer::check(&config.recorder)?;
        let tokenizers = Tokenizers::start(&config.tokens, &config.routing.pools)?;
        Ok(Self { timings, security, tokenizers })
    }
}

// === impl Serving ===

impl Serving {
    /// Binds both ports, starts the threads, adds the configured workers.
    ///
    /// # Errors
    /// A port that cannot be bound, a thread that cannot be started, or a worker that cannot be added.
    pub fn start(config: Config) -> io::Result<Self> {
        Self::start_at_speed(config, 1.0)
    }

    /// As [`Serving::start`], in front of engines that imitate others `speed` times as fast as real: what is learned and
    /// measured is in the seconds of those others. Deadlines of requests stay in real ones.
    ///
    /// # Errors
    /// The same.
    pub fn start_at_speed(config: Config, speed: f64) -> io::Result<Self> {
        let server = bind(SocketAddr::new(config.server.host, config.server.port), "server.port")?;
        let metrics = bind(SocketAddr::new(config.metrics.host, config.metrics.port), "metrics.port")?;
        let (address, metrics_address) = (server.local_addr()?, metrics.local_addr()?);
        let relay_threads = match config.server.relay_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let (stop, kill, connections) =
            (CancellationToken::new(), CancellationToken::new(), TaskTracker::new());
        let end = kill.clone().drop_guard();
        let workers = config.workers.clone();
        let Parts { timings, security, tokenizers } = Parts::read(&config)?;
        let (drained, drained_workers) = mpsc::unbounded_channel();
        let gateway =
            Arc::new(Gateway::new(config, security, Clock::start(speed), timings, tokenizers, drained));
        gateway.record()?;
        let mut threads = Vec::new();

        let runtime = || {
            let runtime = runtime()?;
            gateway.runtimes.lock().unwrap_or_else(PoisonError::into_inner).push(runtime.handle().clone());
            Ok::<_, io::Error>(runtime)
        };
        let admin = runtime()?;
        let (sockets, appliers) = (runtime()?, runtime()?);
        let ingest = Ingest::new(Arc::clone(&gateway), sockets.handle().clone(), appliers.handle().clone());
        let fleet =
            Fleet::new(Arc::clone(&gateway), ingest, drained_workers, admin.handle().clone(), kill.clone());
        let (of_clients, of_operators) = (address.ip().is_loopback(), metrics_address.ip().is_loopback());
        let door = Door::Clients { loopback: of_clients };
        let mut lanes = Vec::new();
        for n in 0..relay_threads {
            let (handover, connections_in) = mpsc::channel(HANDOVER_MAX);
            let open = Arc::new(AtomicUsize::new(0));
            let front = Arc::new(Front {
                gateway: Arc::clone(&gateway),
                fleet: Arc::clone(&fleet),
                upstreams: gateway.new_upstreams(),
                door,
                // A token of its own: its connections look at it often, and threads should not meet there.
                stop: stop.child_token(),
                connections: connections.clone(),
            });
            lanes.push(Lane { handover, open: Arc::clone(&open) });
            threads.push(thread(
                &format!("relay-{n}"),
                runtime()?,
                kill.clone(),
                relay(front, connections_in, open),
            )?);
        }
        let operators = Arc::new(Front {
            gateway: Arc::clone(&gateway),
            fleet: Arc::clone(&fleet),
            upstreams: gateway.new_upstreams(),
            door: Door::Operators { loopback: of_operators },
            stop: kill.child_token(),
            connections: TaskTracker::new(),
        });
        let stop_accepting = stop.clone();
        let stop_operators = kill.clone();
        let counting = Arc::clone(&gateway);
        // In front of engines that imitate others at another speed, a second is no second.
        let watched = (speed == 1.0).then(|| gateway.new_upstreams());
        let work = async move {
            let server = TcpListener::from_std(server);
            let metrics = TcpListener::from_std(metrics);
            let (Ok(server), Ok(metrics)) = (server, metrics) else { return };
            let counted = &counting.metrics;
            tokio::join!(
                persist("the keys of tokens", || keep_keys(Arc::clone(&counting))),
                persist("the history", || keep_history(Arc::clone(&counting))),
                persist("the watch over stalls", || stall::watch(Arc::clone(&counting), watched.clone())),
                Front::accept(counted, server, stop_accepting, |stream| spread(counted, &lanes, stream)),
                Front::accept(counted, metrics, stop_operators, |stream| drop(operators.spawn(stream))),
            );
        };
        let (snapshot, dispatches) = {
            let config = gateway.config();
            let snapshot = config.kv_events.snapshot.clone().filter(|_| config.kv_events.enabled);
            (snapshot, config.routing.index_snapshot.clone())
        };
        let snapshot = snapshot.map(|path| Keep {
            name: "snapshot",
            path,
            interval: |config| config.kv_events.snapshot_interval,
            write: write_snapshot,
        });
        let dispatches = dispatches.map(|path| Keep {
            name: "dispatches",
            path,
            interval: |config| config.routing.index_snapshot_interval,
            write: warm::write,
        });
        for file in [snapshot, dispatches].into_iter().flatten() {
            let (name, kept) = (file.name, CancellationToken::new());
            let keeping = file.keep(Arc::clone(&gateway), kill.clone(), kept.clone());
            threads.push(thread(name, runtime()?, kept, keeping)?);
        }
        let told = CancellationToken::new();
        let telling = export(Arc::clone(&gateway), kill.clone(), told.clone());
        threads.push(thread("traces", runtime()?, told, telling)?);
        threads.push(thread("ingest", sockets, kill.clone(), std::future::ready(()))?);
        threads.push(thread("apply", appliers, kill.clone(), std::future::ready(()))?);
        threads.push(thread("admin", admin, kill.clone(), work)?);
        for spec in &workers {
            fleet.add(spec).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        }
        Ok(Self { address, metrics_address, gateway, fleet, stop, kill: end, connections, threads })
    }

    /// Stops accepting, lets requests in flight end within the grace, then ends.
    pub async fn shut_down(self) -> Cut {
        self.shut_down_or(std::future::pending()).await
    }

    /// As [`Serving::shut_down`], with a grace that is over when `hurry` is.
    pub async fn shut_down_or(self, hurry: impl Future<Output = ()>) -> Cut {
        self.gateway.stopping.store(true, Ordering::Relaxed);
        self.stop.cancel();
        self.connections.close();
        let grace = self.gateway.config().server.shutdown_grace;
        let drained = tokio::select! {
            drained = timeout(grace, self.connections.wait()) => drained.is_ok(),
            () = hurry => false,
        };
        let cut = if drained { Cut::default() } else { self.unfinished() };
        drop(self.kill);
        // What was told is in the files before anybody says that all is over.
        self.gateway.recordings.end(&self.gateway.pools());
        let (done, joined) = oneshot::channel();
        std::thread::spawn(move || {
            for thread in self.threads {
                let _ = thread.join();
            }
            let _ = done.send(());
        });
        let _ = joined.await;
        cut
    }

    /// What would be cut if all ended at this moment.
    fn unfinished(&self) -> Cut {
        let in_pool =
            |pool: &Arc<ModelPool>| pool.router.read(|scheduler| scheduler.in_flight() + scheduler.queued());
        let requests = self.gateway.pools().iter().map(in_pool).sum();
        Cut { requests, connections: self.connections.len() }
    }
}

// === impl Cut ===

impl Cut {
    /// Whether nothing was cut.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

fn bind(address: SocketAddr, field: &str) -> io::Result<std::net::TcpListener> {
    let explain = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot listen on {address} ({field}): {error}"))
    };
    let listener = std::net::TcpListener::bind(address).map_err(explain)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// A named thread that runs one runtime until its work is done or it is told to end.
fn thread(
    name: &str,
    runtime: Runtime,
    kill: CancellationToken,
    work: impl Future<Output = ()> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let need = !LEISURE.contains(&name);
    std::thread::Builder::new().name(name.into()).spawn(move || {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        guard(&name, need, || {
            runtime.block_on(async {
                tokio::select! {
                    () = async { work.await; kill.cancelled().await } => {}
                    () = kill.cancelled() => {}
                }
            });
            runtime.shutdown_background();
        });
    })
}

/// Threads without which requests are served as well.
const LEISURE: [&str; 3] = ["traces", "snapshot", "dispatches"];

/// A file that is written now and then.
struct Keep {
    name: &'static str,
    path: PathBuf,
    interval: fn(&Config) -> Duration,
    write: fn(&Gateway, &Path) -> io::Result<()>,
}

// === impl Keep ===

impl Keep {
    /// Writes it now and then, and once more at the end. Then cancels `kept`.
    async fn keep(self, gateway: Arc<Gateway>, kill: CancellationToken, kept: CancellationToken) {
        let mut ends = false;
        while !ends {
            let pause = (self.interval)(&gateway.config());
            tokio::select! {
                () = sleep(pause) => {}
                () = kill.cancelled() => ends = true,
            }
            // This thread does nothing else, so the file may take its time.
            if let Err(error) = (self.write)(&gateway, &self.path) {
                tracing::warn!(path = %self.path.display(), %error, "snapshot not written; keeping the previous one");
            }
        }
        kept.cancel();
    }
}

/// Takes connections over and serves them, all on this thread.
async fn relay(
    front: Arc<Front>,
    mut connections: mpsc::Receiver<std::net::TcpStream>,
    open: Arc<AtomicUsize>,
) {
    let runtime = Handle::current();
    while let Some(stream) = connections.recv().await {
        match TcpStream::from_std(stream) {
            Ok(stream) => {
                let served = front.spawn(stream);
                let open = Arc::clone(&open);
                runtime.spawn(async move {
                    let _ = served.await;
                    open.fetch_sub(1, Ordering::Relaxed);
                });
            }
            Err(error) => {
                open.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!(%error, "relay thread cannot use a connection");
            }
        }
    }
}

/// Gives a connection to the thread with the fewest.
fn spread(metrics: &Metrics, lanes: &[Lane], stream: TcpStream) {
    let Some(lane) = lanes.iter().min_by_key(|lane| lane.open.load(Ordering::Relaxed)) else { return };
    match stream.into_std() {
        Ok(stream) => {
            lane.open.fetch_add(1, Ordering::Relaxed);
            if lane.handover.try_send(stream).is_err() {
                lane.open.fetch_sub(1, Ordering::Relaxed);
                metrics.limits.reached(Reached::Handover);
                tracing::warn!("client connection dropped: its relay thread is overloaded");
            }
        }
        Err(error) => tracing::warn!(%error, "cannot pass a connection to a relay thread"),
    }
}
