//! Exchange of news with the other replicas of the gateway: what each has in flight where, and which prompts it has
//! sent (see [`kvlane_core::replica`]).
//!
//! Each replica connects to each other one, tells its own news on that connection, and hears on those that the others
//! have opened: HTTP/2, with TLS in both directions if certificates are configured. [`members`] finds the addresses;
//! [`teller`] takes the news of all pools soon after each placement, as often as its cost allows ([`gap`]), and puts it into an
//! [`outbox`] for each connection, where later news replaces earlier; [`dial`] keeps the connections and sends; [`listen`] hears. A replica that is slow
//! or gone delays nothing but its own news.
//!
//! Where a broker is configured, [`broker`] takes the place of connections: all publish there what they tell, and hear the others.
//!
//! A replica that starts asks the first one that is older for the marks of all prompts that it knows.

#[cfg(feature = "nats")]
mod broker;
mod complaints;
pub mod config;
mod dial;
mod gap;
mod listen;
mod members;
mod outbox;
mod pace;
mod stream;
mod teller;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use kvlane_core::replica::ReplicaId;
use kvlane_fleet::Fleet;
use kvlane_fleet::metrics::DirectionLabel;
use kvlane_fleet::panics::persist;
use kvlane_fleet::replicas::{Limits, shown};
use kvlane_http::tls::Mutual;
use kvlane_wire::replica::Hello;
use tokio::sync::watch;
use tokio::time::Instant;

use self::complaints::Complaints;
use self::config::Replicas;
use self::outbox::Outbox;

/// The path of news, and that of a snapshot.
const NEWS_PATH: &str = "/kvlane.replicas/news";
const SNAPSHOT_PATH: &str = "/kvlane.replicas/snapshot";

/// The exchange of a running gateway.
pub struct Exchange {
    /// The address for other replicas; none with a broker.
    pub address: Option<SocketAddr>,
    shared: Arc<Shared>,
    peers: watch::Sender<Vec<String>>,
}

/// What all connections share.
struct Shared {
    fleet: Arc<Fleet>,
    limits: Arc<dyn Limits>,
    /// This process.
    own: ReplicaId,
    config: Replicas,
    tls: ArcSwapOption<Mutual>,
    started: Instant,
    /// The replicas that are told news, one connection for each.
    outboxes: Mutex<BTreeMap<ReplicaId, Arc<Outbox>>>,
    /// A replica has not been told anything yet.
    greeted: AtomicBool,
    /// Connections that broke or were none of replicas, and replicas that were refused.
    broken: Complaints,
    refused: Complaints,
}

// === impl Exchange ===

impl Exchange {
    /// An exchange that listens on `socket`, or without one goes through the broker, and its work until it is dropped.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn start(
        fleet: Arc<Fleet>,
        limits: Arc<dyn Limits>,
        config: Replicas,
        tls: Option<Mutual>,
        socket: Option<std::net::TcpListener>,
    ) -> std::io::Result<(Self, impl Future<Output = ()> + Send + 'static)> {
        socket.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
        let address = socket.as_ref().map(std::net::TcpListener::local_addr).transpose()?;
        let own = ReplicaId(RandomState::new().hash_one(std::process::id()));
        fleet.replicas.begin(own);
        let tls = ArcSwapOption::from_pointee(tls);
        if let Some(address) = address.filter(|address| tls.load().is_none() && !address.ip().is_loopback()) {
            tracing::warn!(%address, "replicas are heard without TLS: any host that can connect is believed; set replicas.certificate, private_key and ca, or let only replicas reach this port");
        }
        if let Some(address) = address {
            tracing::info!(replica = shown(own), %address, cluster = config.cluster, "listening for other replicas");
        }
        let (peers, seeds) = watch::channel(config.peers.clone());
        let (outboxes, greeted) = (Mutex::default(), AtomicBool::new(false));
        let started = Instant::now();
        let (broken, refused) = (Complaints::default(), Complaints::default());
        let shared =
            Arc::new(Shared { fleet, limits, own, config, tls, started, outboxes, greeted, broken, refused });
        let exchange = Self { address, shared: Arc::clone(&shared), peers };
        let work = async move {
            let Some(socket) = socket.map(Arc::new) else { return through_broker(shared).await };
            let (found, members) = watch::channel(members::Members::new());
            let found = Arc::new(found);
            tokio::join!(
                persist("finding replicas", || members::find(
                    Arc::clone(&shared),
                    seeds.clone(),
                    Arc::clone(&found)
                )),
                persist("telling replicas", || teller::tell(Arc::clone(&shared))),
                persist("connecting to replicas", || dial::connect(Arc::clone(&shared), members.clone())),
                persist("hearing replicas", || listen::listen(Arc::clone(&shared), Arc::clone(&socket))),
            );
        };
        Ok((exchange, work))
    }

    /// Replaces the addresses of other replicas, and the certificates for new connections.
    pub fn configure(&self, config: &Replicas, tls: Option<Mutual>) {
        self.shared.tls.store(tls.map(Arc::new));
        self.peers.send_if_modified(|peers| {
            let differs = *peers != config.peers;
            peers.clone_from(&config.peers);
            differs
        });
    }
}

// === impl Shared ===

impl Shared {
    fn hello(&self) -> Hello {
        let age = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Hello::new(self.own, &self.config.cluster, age)
    }

    /// The number of news: a pool or limit that is made anew goes on where the one before has ended.
    fn number(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn outboxes(&self) -> MutexGuard<'_, BTreeMap<ReplicaId, Arc<Outbox>>> {
        self.outboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An outbox for news to a replica, which gets everything first; none if there is one.
    fn open_outbox(self: &Arc<Self>, replica: ReplicaId) -> Option<OpenOutbox> {
        let outbox = Arc::new(Outbox::default());
        let mut outboxes = self.outboxes();
        if outboxes.contains_key(&replica) {
            return None;
        }
        outboxes.insert(replica, Arc::clone(&outbox));
        self.greeted.store(true, Ordering::Relaxed);
        Some(OpenOutbox { shared: Arc::clone(self), replica, outbox })
    }

    fn count(&self, direction: &'static str, bytes: usize) {
        let label = DirectionLabel { direction };
        self.fleet.metrics.replicas.replica_bytes.get_or_create(&label).inc_by(bytes as u64);
    }
}

/// Exchanges news through the broker for as long as it is polled.
#[cfg(feature = "nats")]
async fn through_broker(shared: Arc<Shared>) {
    tokio::join!(
        persist("telling replicas", || teller::tell(Arc::clone(&shared))),
        persist("exchange through the broker", || broker::exchange(Arc::clone(&shared))),
    );
}

/// The configuration of a build without it names no broker.
#[cfg(not(feature = "nats"))]
async fn through_broker(_: Arc<Shared>) {}

/// The outbox of a connection; it is closed when it is dropped.
struct OpenOutbox {
    shared: Arc<Shared>,
    replica: ReplicaId,
    outbox: Arc<Outbox>,
}

impl Drop for OpenOutbox {
    fn drop(&mut self) {
        self.shared.outboxes().remove(&self.replica);
    }
}

/// The problem with an address or a name in `replicas.peers`, which is forgotten when this is dropped.
struct Problem<'a> {
    shared: &'a Shared,
    of: String,
}

impl Problem<'_> {
    /// Returns whether it is another one than before.
    fn set(&self, why: Option<String>) -> bool {
        self.shared.fleet.replicas.set_problem(&self.of, why)
    }
}

impl Drop for Problem<'_> {
    fn drop(&mut self) {
        self.set(None);
    }
}

/// A pause between half of `pause` and `pause`, so that replicas that start together do not act together.
fn jittered(pause: Duration) -> Duration {
    let unit = (RandomState::new().hash_one(pause) >> 11) as f64 / (1_u64 << 53) as f64;
    pause.mul_f64(0.5 + unit / 2.0)
}
