//! Starts and stops a gateway: threads for the fleet, for operators, for KV events, and relay threads for clients.
//!
//! Each relay thread has a runtime of its own and keeps its connections, with their upstream connections: a request
//! never changes threads. That avoids the wake-ups and the work stealing of a shared runtime, which cost more than
//! relaying a small request. The threads share the router.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use kvlane_admin::Admin;
use kvlane_admin::export::export;
use kvlane_admin::history::History;
use kvlane_admin::history::keep_history;
use kvlane_control::Controller;
use kvlane_control::controller::Tasks;
use kvlane_control::controller::worker_access::check_workers;
use kvlane_control::discovery::file;
use kvlane_control::index_snapshot;
use kvlane_control::index_snapshot::IndexSnapshot;
use kvlane_control::ingest::{Ingest, write_snapshot};
use kvlane_control::objects_snapshot;
use kvlane_control::replicas::Exchange;
use kvlane_control::{stall, warm_up};
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::Clock;
use kvlane_fleet::panics::persist;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::recording_writer;
use kvlane_fleet::settings::Settings;
use kvlane_fleet::timings::Timings;
use kvlane_fleet::tokenize::Tokenizers;
use kvlane_http::tls::Tls;
use kvlane_proxy::Proxy;
use kvlane_proxy::auth::Auth;
use kvlane_proxy::ext_proc::Picker;
use kvlane_proxy::ext_proc::unobserved::Unobserved;
use kvlane_proxy::listener::{Front, Listener};
use kvlane_proxy::own_api::{OwnApi, Port};
use kvlane_proxy::service::Service;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::contents::Contents;
use crate::discovery::Sources;
use crate::inherited::Inherited;
use crate::listening::{Listeners, Listening, bind_named};
use crate::mode::Mode;
use crate::relays::{Accepting, Relay};
use crate::threads::{cores, runtime, thread};

/// How long requests that waited for an endpoint have to get their answer, at the end of the grace period.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Cores for which one thread applies KV events.
const CORES_PER_APPLIER: usize = 8;

/// A running gateway. Dropping it without [`Serving::shut_down`] cuts all connections.
pub struct Serving {
    /// The address for clients.
    pub address: SocketAddr,
    /// The address for health checks alone, if it is an endpoint picker.
    pub health_address: Option<SocketAddr>,
    /// The address for operators.
    pub metrics_address: SocketAddr,
    /// The fleet behind it.
    pub fleet: Arc<Fleet>,
    /// The request path.
    pub proxy: Arc<Proxy>,
    /// Adds, probes and removes workers.
    pub controller: Arc<Controller>,
    /// The last quarter of an hour.
    pub history: Arc<History>,
    /// Exchanges news with other replicas, if it is configured.
    pub exchange: Option<Exchange>,
    config: ArcSwap<Config>,
    /// Find workers.
    pub(crate) sources: Sources,
    /// What was in the files of the configuration; whoever holds it reloads.
    pub(crate) contents: Mutex<Contents>,
    /// Asks clients to leave.
    retire: CancellationToken,
    /// Stops accepting, and reading new requests.
    stop: CancellationToken,
    /// Ends all threads when dropped.
    kill: DropGuard,
    accepting: Accepting,
    connections: TaskTracker,
    /// The runtimes of the relay threads.
    relays: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
}

/// The files that a configuration names, read.
struct Parts {
    timings: Timings,
    auth: Auth,
    tls: Tls,
    tokenizers: Tokenizers,
}

/// The relay threads, for a watchdog.
#[derive(Clone, Debug)]
pub struct RelayThreads {
    runtimes: Vec<Handle>,
}

/// What was cut off at shutdown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Requests without a complete response: queued, or sent to a worker.
    pub requests: usize,
    /// Open connections of clients, idle or not.
    pub connections: usize,
}

/// Reads everything that a configuration names, as [`Serving::start`] does, and starts nothing.
///
/// # Errors
/// The first reason why a gateway would not start, except for ports in use.
pub fn check(config: &Config) -> io::Result<()> {
    Parts::read(config)?;
    // A file that is not there yet is waited for.
    if let Some(path) = config.discovery.workers_file.as_ref().filter(|path| path.exists()) {
        let named = |why| io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display()));
        file::read(path).map_err(named)?;
    }
    Ok(())
}

fn invalid(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

// === impl Parts ===

impl Parts {
    fn read(config: &Config) -> io::Result<Self> {
        config.validate().map_err(invalid)?;
        let timings = Timings::read(&config.routing).map_err(invalid)?;
        let (auth, tls) =
            (Auth::read(&config.auth).map_err(invalid)?, Tls::read(&config.tls).map_err(invalid)?);
        check_workers(&config.workers, config.upstream.api_key.as_ref()).map_err(invalid)?;
        recording_writer::check(&config.recorder)?;
        let tokenizers = Tokenizers::start(&config.tokens, &config.routing.pools)?;
        Ok(Self { timings, auth, tls, tokenizers })
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

    /// Starts an endpoint picker: like [`Serving::start`], with a port for a data plane instead of clients.
    ///
    /// # Errors
    /// As for [`Serving::start`].
    pub fn start_picker(config: Config) -> io::Result<Self> {
        Self::start_picker_at_speed(config, 1.0)
    }

    /// Like [`Serving::start_picker`], in front of mock engines as in [`Serving::start_at_speed`].
    ///
    /// # Errors
    /// As for [`Serving::start`].
    pub fn start_picker_at_speed(config: Config, speed: f64) -> io::Result<Self> {
        Self::start_as(Mode::Picker, config, speed, Inherited::default())
    }

    /// Like [`Serving::start`], in front of mock engines that run `speed` times as fast as real ones: learned and
    /// measured times are in the seconds of the real engines. Deadlines of requests stay in real seconds.
    ///
    /// # Errors
    /// As for [`Serving::start`].
    pub fn start_at_speed(config: Config, speed: f64) -> io::Result<Self> {
        Self::start_as(Mode::Gateway, config, speed, Inherited::default())
    }

    /// Starts either, on the sockets that a service manager has passed; the configuration's addresses are for the others.
    ///
    /// # Errors
    /// As for [`Serving::start`], or a socket that is for none of its listeners.
    pub fn start_on(mode: Mode, config: Config, inherited: Inherited) -> io::Result<Self> {
        Self::start_as(mode, config, 1.0, inherited)
    }

    fn start_as(mode: Mode, config: Config, speed: f64, inherited: Inherited) -> io::Result<Self> {
        let relay_threads = match config.server.relay_threads {
            0 => cores(),
            threads => threads,
        };
        let epp = &config.epp;
        let Listeners { clients, health, metrics } =
            Listeners::open(mode, &config, relay_threads, inherited)?;
        let health_address = health.as_ref().map(Listening::address).transpose()?;
        let (address, metrics_address) = (clients.address()?, metrics.address()?);
        let (accepting, at_once) = (Accepting::default(), Accepting::default());
        at_once.open.cancel();
        let opening = clients.when_ready(accepting.open.clone())?;
        let replicas = config.replicas.address().map_err(invalid)?;
        let replicas = replicas.map(|place| bind_named(place, "replicas.listen")).transpose()?;
        let (retire, stop) = (CancellationToken::new(), CancellationToken::new());
        let (kill, connections) = (CancellationToken::new(), TaskTracker::new());
        let end = kill.clone().drop_guard();
        let workers = config.workers.clone();
        let Parts { timings, auth, tls, tokenizers } = Parts::read(&config)?;
        let (drained, drained_workers) = mpsc::unbounded_channel();
        let fleet = Arc::new(Fleet::new(
            config.fleet_settings(timings),
            Arc::clone(&tls.workers),
            Clock::start(speed),
            tokenizers,
            drained,
        ));
        fleet.record(&config.recorder)?;
        let allowed = auth.allowed();
        let proxy = Arc::new(Proxy::new(Arc::clone(&fleet), config.proxy_settings(), auth, tls));
        let mut threads = Vec::new();

        let runtime = || {
            let runtime = runtime()?;
            fleet.runtimes().push(runtime.handle().clone());
            Ok::<_, io::Error>(runtime)
        };
        let control = runtime()?;
        let sockets = runtime()?;
        let discovery = runtime()?;
        let appliers =
            (0..cores().div_ceil(CORES_PER_APPLIER)).map(|_| runtime()).collect::<io::Result<Vec<_>>>()?;
        let handles = appliers.iter().map(|applier| applier.handle().clone()).collect();
        let ingest = Ingest::new(Arc::clone(&fleet), sockets.handle().clone(), handles);
        let index = Arc::new(IndexSnapshot::read(config.routing.index_snapshot.as_deref(), &fleet.clock));
        if let Some(index) = &config.routing.index_snapshot {
            objects_snapshot::restore(&fleet, &objects_snapshot::beside(index));
        }
        let controller = Controller::new(
            Arc::clone(&fleet),
            config.health.clone(),
            allowed,
            ingest,
            Arc::clone(&index),
            drained_workers,
            Tasks::new(control.handle().clone(), kill.clone()),
        );
        let history = Arc::new(History::default());
        let own: Arc<dyn OwnApi> = Arc::new(Admin {
            proxy: Arc::clone(&proxy),
            controller: Arc::clone(&controller),
            history: Arc::clone(&history),
            clients: matches!(mode, Mode::Gateway).then_some(address),
        });
        let grpc_tls = match mode {
            Mode::Picker if epp.secure_serving => {
                let grpc_tls = kvlane_http::tls::grpc(&config.tls);
                Some(grpc_tls.map_err(invalid)?)
            }
            _ => None,
        };
        let unobserved = Arc::new(Unobserved::default());
        let serves = |port| {
            let (proxy, own) = (Arc::clone(&proxy), Arc::clone(&own));
            Arc::new(Service { proxy, own, upstreams: fleet.new_upstreams(), port })
        };
        let picker = |service| Picker::new(service, Arc::clone(&unobserved), epp.clone());
        let (of_clients, of_operators) = (address.ip().is_loopback(), metrics_address.ip().is_loopback());
        let port = Port::Clients { loopback: of_clients };
        let mut relays = Vec::new();
        for (n, relay) in Relay::all(clients, &accepting).into_iter().enumerate() {
            let service = serves(port);
            let front = match mode {
                Mode::Gateway => Front::Http,
                Mode::Picker => Front::ExtProc(Arc::new(picker(Arc::clone(&service))), grpc_tls.clone()),
            };
            // A stop token of its own: its connections look at it often, and threads should not meet there.
            let (retire, stop) = (retire.child_token(), stop.child_token());
            let listener =
                Arc::new(Listener { service, retire, stop, connections: connections.clone(), front });
            let runtime = runtime()?;
            relays.push(runtime.handle().clone());
            threads.push(thread(&format!("relay-{n}"), runtime, kill.clone(), relay.run(listener))?);
        }
        let asides = [(Some(metrics), "admin"), (health, "health")];
        let asides = asides.into_iter().filter_map(|(listening, name)| Some((listening?, name)));
        for (listening, name) in asides {
            let relay = Relay::all(listening, &at_once).remove(0);
            let service = serves(Port::Operators { loopback: of_operators });
            let front = match name {
                "health" => Front::ExtProc(Arc::new(picker(Arc::clone(&service)).health_only()), None),
                _ => Front::Http,
            };
            let (retire, stop, connections) = (kill.child_token(), kill.child_token(), TaskTracker::new());
            let listener = Arc::new(Listener { service, retire, stop, connections, front });
            threads.push(thread(name, runtime()?, kill.clone(), relay.run(listener))?);
        }
        let (counting, keys) = (Arc::clone(&fleet), Arc::clone(&proxy));
        let (history_kept, shown) = (Arc::clone(&history), Arc::clone(&proxy));
        // In front of mock engines at another speed, the time limits of stall detection would not fit.
        let watched = (speed == 1.0).then(|| fleet.new_upstreams());
        // A data plane that asks for endpoints sends each request to one.
        let pairs = (mode == Mode::Gateway).then(|| fleet.new_upstreams());
        let warming = Arc::clone(&fleet);
        let (counted, counting_of) = (Arc::clone(&unobserved), Arc::clone(&fleet));
        let (starting, opening) = (Arc::clone(&fleet), opening.run(fleet.start.watch()));
        let work = async move {
            tokio::join!(
                opening,
                persist("unobserved requests", || {
                    let (counted, fleet) = (Arc::clone(&counted), Arc::clone(&counting_of));
                    async move { counted.run(&fleet).await }
                }),
                persist("refreshing JWT keys", || {
                    let keys = Arc::clone(&keys);
                    async move { keys.refresh_keys().await }
                }),
                persist("readiness", || {
                    let starting = Arc::clone(&starting);
                    async move { starting.keep_readiness().await }
                }),
                persist("history", || keep_history(Arc::clone(&history_kept), Arc::clone(&shown))),
                persist("stall detection", || stall::watch(Arc::clone(&counting), watched.clone())),
                persist("warm-ups of pairs", || warm_up::watch(Arc::clone(&warming), pairs.clone())),
            );
        };
        let cache_file = config.kv_events.snapshot.clone().filter(|_| config.kv_events.enabled);
        let cache_file = cache_file.map(|path| Keep {
            name: "snapshot",
            path,
            interval: |settings| settings.kv_events.snapshot_interval,
            write: Box::new(write_snapshot),
        });
        let index_file = config.routing.index_snapshot.clone().map(|path| Keep {
            name: "dispatches",
            path,
            interval: |settings| settings.routing.index_snapshot_interval,
            write: Box::new(move |fleet, path| {
                objects_snapshot::write(fleet, &objects_snapshot::beside(path))?;
                index_snapshot::write(&index, fleet, path)
            }),
        });
        for file in [cache_file, index_file].into_iter().flatten() {
            let (name, kept) = (file.name, CancellationToken::new());
            let (retired, ended) = (retire.child_token(), kill.clone());
            let keeping = file.keep(Arc::clone(&fleet), retired, ended, kept.clone());
            threads.push(thread(name, runtime()?, kept, keeping)?);
        }
        let told = CancellationToken::new();
        let telling = export(Arc::clone(&proxy), kill.clone(), told.clone());
        threads.push(thread("traces", runtime()?, told, telling)?);
        threads.push(thread("ingest", sockets, kill.clone(), std::future::ready(()))?);
        for (n, applier) in appliers.into_iter().enumerate() {
            threads.push(thread(&format!("apply-{n}"), applier, kill.clone(), std::future::ready(()))?);
        }
        threads.push(thread("control", control, kill.clone(), work)?);
        let mut exchange = None;
        // Before the first worker, and so before the first pool.
        if replicas.is_some() || config.replicas.broker.is_some() {
            let tls = config.replicas.tls().map_err(invalid)?;
            proxy.share_tenants(&config.replicas.cluster);
            let limits = Arc::clone(&proxy.limits);
            let (started, work) =
                Exchange::start(Arc::clone(&fleet), limits, config.replicas.clone(), tls, replicas)?;
            threads.push(thread("replicas", runtime()?, kill.clone(), work)?);
            exchange = Some(started);
        }
        let sources = Sources::new(
            Arc::clone(&fleet),
            Arc::clone(&controller),
            discovery.handle().clone(),
            kill.child_token(),
        );
        threads.push(thread("discovery", discovery, kill.clone(), std::future::ready(()))?);
        for spec in &workers {
            controller.add(spec).map_err(invalid)?;
        }
        // After the configuration's workers: a URL that both name is theirs.
        sources.configure(&config.discovery);
        fleet.start.populate();
        let contents = Mutex::new(Contents::read(config.files()));
        Ok(Self {
            address,
            health_address,
            metrics_address,
            fleet,
            proxy,
            controller,
            history,
            exchange,
            config: ArcSwap::from_pointee(config),
            sources,
            contents,
            retire,
            stop,
            kill: end,
            accepting,
            connections,
            relays,
            threads,
        })
    }

    /// The configuration in use. Hold the guard for a moment only.
    pub fn config(&self) -> Guard<Arc<Config>> {
        self.config.load()
    }

    /// Waits until the gateway is ready and accepts clients.
    pub fn opened(&self) -> impl Future<Output = ()> + use<> {
        let (mut ready, open) = (self.fleet.start.watch(), self.accepting.open.clone());
        async move {
            // The fleet outlives it, or the gateway has ended.
            let _ = ready.wait_for(|ready| *ready).await;
            open.cancelled().await;
        }
    }

    /// The relay threads, for a watchdog.
    pub fn relay_threads(&self) -> RelayThreads {
        RelayThreads { runtimes: self.relays.clone() }
    }

    /// Replaces the configuration of all parts. Nothing in it can fail any more.
    pub(crate) fn configure(&self, config: Config, timings: Timings, auth: Auth, tls: Tls) {
        self.fleet.set_tls(Arc::clone(&tls.workers));
        self.controller.configure(config.health.clone(), auth.allowed());
        self.proxy.set_security(auth, tls);
        self.fleet.set_settings(config.fleet_settings(timings));
        self.proxy.set_settings(config.proxy_settings());
        self.controller.show_keys();
        self.controller.configure_pools();
        if let Err(error) = self.fleet.record(&config.recorder) {
            tracing::error!(%error, "recorder reconfiguration failed; recording is unchanged");
        }
        self.config.store(Arc::new(config));
        self.fleet.reloads.replaced();
    }

    /// Reports that it is not ready, and goes on for `server.shutdown_delay`, in which load balancers learn of it. Then
    /// stops accepting, lets requests in flight end within `server.shutdown_grace`, and ends.
    pub async fn shut_down(self) -> Cut {
        self.shut_down_or(std::future::pending()).await
    }

    /// Like [`Serving::shut_down`], with a delay and a grace period that end when `hurry` does.
    pub async fn shut_down_or(self, hurry: impl Future<Output = ()>) -> Cut {
        self.fleet.stop();
        self.retire.cancel();
        let (delay, grace) = {
            let settings = self.proxy.settings();
            (settings.server.shutdown_delay, settings.server.shutdown_grace)
        };
        let drained = async {
            if !delay.is_zero() {
                sleep(delay).await;
            }
            self.stop.cancel();
            self.accepting.busy.close();
            self.connections.close();
            let ended = async {
                self.accepting.busy.wait().await;
                self.connections.wait().await;
            };
            timeout(grace, ended).await.is_ok()
        };
        let drained = tokio::select! {
            drained = drained => drained,
            () = hurry => false,
        };
        self.stop.cancel();
        if !drained && self.fleet.empty_pools.close() {
            // They are answered instead of being cut.
            let _ = timeout(ANSWER_WITHIN, self.connections.wait()).await;
        }
        let cut = if drained { Cut::default() } else { self.unfinished() };
        drop(self.kill);
        // The recordings are complete before shutdown is reported.
        self.fleet.recordings.end(&self.fleet.pools());
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

    /// What would be cut off now.
    fn unfinished(&self) -> Cut {
        let in_pool =
            |pool: &Arc<ModelPool>| pool.router.read(|scheduler| scheduler.in_flight() + scheduler.queued());
        let requests = self.fleet.pools().iter().map(in_pool).sum();
        Cut { requests, connections: self.connections.len() }
    }
}

// === impl RelayThreads ===

impl RelayThreads {
    /// Waits until each of them has run a task: one that hangs never does.
    pub async fn respond(&self) {
        let empty = |runtime: &Handle| runtime.spawn(std::future::ready(()));
        let tasks: Vec<_> = self.runtimes.iter().map(empty).collect();
        for task in tasks {
            // A thread that has ended does not hang.
            let _ = task.await;
        }
    }
}

// === impl Cut ===

impl Cut {
    /// Whether nothing was cut off.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Identifies a file: a new one takes its place each time it is written.
fn identity(path: &Path) -> Option<(u64, u64, i64, i64)> {
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
}

/// A file that is written periodically.
struct Keep {
    name: &'static str,
    path: PathBuf,
    interval: fn(&Settings) -> Duration,
    write: Box<WriteFile>,
}

/// Writes a snapshot file.
type WriteFile = dyn Fn(&Fleet, &Path) -> io::Result<()> + Send + Sync;

// === impl Keep ===

impl Keep {
    /// Writes the file periodically, when the gateway begins to shut down, for a successor that starts meanwhile, and
    /// once more at the end, unless a successor has written it since. Then cancels `kept`.
    async fn keep(
        self,
        fleet: Arc<Fleet>,
        retired: CancellationToken,
        kill: CancellationToken,
        kept: CancellationToken,
    ) {
        let (mut retires, mut ends, mut written) = (false, false, None);
        while !ends {
            let pause = (self.interval)(&fleet.settings());
            tokio::select! {
                () = sleep(pause), if !retires => {}
                () = retired.cancelled(), if !retires => retires = true,
                () = kill.cancelled() => ends = true,
            }
            if ends && written.is_some() && written != identity(&self.path) {
                tracing::info!(path = %self.path.display(), "last snapshot not written: another gateway has written the file");
                break;
            }
            // This thread does nothing else, so blocking I/O is fine.
            match (self.write)(&fleet, &self.path) {
                Ok(()) => written = identity(&self.path),
                Err(error) => {
                    tracing::warn!(path = %self.path.display(), %error, "snapshot not written; keeping the previous one");
                }
            }
        }
        kept.cancel();
    }
}
