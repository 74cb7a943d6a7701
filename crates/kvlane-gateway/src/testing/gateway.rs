//! The gateway as `kvlane serve` runs it, for tests.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvlane_core::load::InFlight;
use kvlane_core::policy::PolicyConfig;
use kvlane_fleet::Fleet;
use kvlane_fleet::pool::ModelPool;
use kvlane_http::secret::KeyHash;
use kvlane_proxy::auth::Role;
use serde_json::Value;

use crate::config::{Config, KeySpec, WorkerSpec};
use crate::serve::{Cut, Serving};
use crate::testing::chat::{chat_stream, event};
use crate::testing::client::{Client, Reply};
use crate::testing::data_plane::DataPlane;
use crate::testing::engine::{Call, FakeEngine};
use crate::testing::wait::{eventually, soon};

const CHAT: &str = "/v1/chat/completions";

/// A configuration for tests: free ports, two relay threads, a policy that reports whether it found a prefix, blocks
/// of four prompt bytes, and probes so rare that after each worker's first one none disturbs a test.
pub fn config() -> Config {
    let mut config = Config::default();
    config.server.host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    config.server.port = 0;
    config.server.relay_threads = 2;
    config.metrics.port = 0;
    config.routing.policy = PolicyConfig::CacheAware(Default::default());
    config.routing.block_bytes = 16;
    config.health.interval = Duration::from_secs(3600);
    // Engines get the requests of the test alone.
    config.disaggregation.warm_up_pairs = 0;
    config
}

/// Like [`config`]: two consecutive requests go to two engines, a failed attempt is repeated at once, and no circuit
/// breaker opens.
///
/// # Panics
/// There is no such policy.
pub fn in_turn() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.retry.initial_backoff = Duration::ZERO;
    config.breaker.failure_threshold = 0;
    config
}

/// An API key of this name and role. Its text is the name after `k-`.
pub fn key(name: &str, role: Role) -> KeySpec {
    KeySpec::new(name, KeyHash::of(&format!("k-{name}")), role)
}

/// A running gateway. End it with [`TestGateway::end`], which checks that nothing is left in flight.
pub struct TestGateway {
    serving: Serving,
}

// === impl TestGateway ===

impl TestGateway {
    /// Starts a gateway in front of `engines` and waits until requests are placed on all of them.
    ///
    /// # Panics
    /// The gateway does not start.
    pub async fn start(config: Config, engines: &[&FakeEngine]) -> Self {
        Self::start_at_speed(config, engines, 1.0).await
    }

    /// Like [`TestGateway::start`], with a clock that counts `speed` seconds per second. At 0 it stands still: then
    /// no decision depends on time.
    ///
    /// # Panics
    /// The gateway does not start.
    pub async fn start_at_speed(mut config: Config, engines: &[&FakeEngine], speed: f64) -> Self {
        config.workers.extend(engines.iter().map(|engine| WorkerSpec::new(engine.url())));
        let serving = Serving::start_at_speed(config, speed).expect("the gateway starts");
        let gateway = Self { serving };
        eventually("all workers are healthy", || gateway.all_healthy()).await;
        gateway
    }

    /// Starts an endpoint picker without TLS for `engines`, and waits until requests are placed on all of them.
    ///
    /// # Panics
    /// The picker does not start.
    pub async fn picker(config: Config, engines: &[&FakeEngine]) -> Self {
        Self::picker_at_speed(config, engines, 1.0).await
    }

    /// Like [`TestGateway::picker`], with a clock that counts `speed` seconds per second.
    ///
    /// # Panics
    /// The picker does not start.
    pub async fn picker_at_speed(mut config: Config, engines: &[&FakeEngine], speed: f64) -> Self {
        config.workers.extend(engines.iter().map(|engine| WorkerSpec::new(engine.url())));
        (config.epp.port, config.epp.health_port) = (0, 0);
        config.epp.secure_serving = false;
        let gateway =
            Self { serving: Serving::start_picker_at_speed(config, speed).expect("the picker starts") };
        eventually("all workers are healthy", || gateway.all_healthy()).await;
        gateway
    }

    /// A connection of a data plane to the picker.
    pub async fn data_plane(&self) -> DataPlane {
        DataPlane::connect(self.address()).await
    }

    /// A gateway that was started by other means.
    pub fn of(serving: Serving) -> Self {
        Self { serving }
    }

    /// The address for clients.
    pub fn address(&self) -> SocketAddr {
        self.serving.address
    }

    /// The address for operators.
    pub fn metrics_address(&self) -> SocketAddr {
        self.serving.metrics_address
    }

    /// The running gateway.
    pub fn serving(&self) -> &Serving {
        &self.serving
    }

    /// The fleet behind it.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.serving.fleet
    }

    /// The pool of a model.
    ///
    /// # Panics
    /// There is no such pool.
    pub fn pool(&self, model: &str) -> Arc<ModelPool> {
        let pools = self.fleet().pools();
        Arc::clone(pools.iter().find(|pool| pool.model == model).expect("a pool of that model"))
    }

    /// A client connection.
    pub async fn client(&self) -> Client {
        Client::connect(self.address()).await
    }

    /// Sends one request on a connection of its own and reads the response.
    pub async fn ask(&self, method: &str, path: &str, body: impl AsRef<str>) -> Reply {
        let mut client = self.client().await;
        client.request(method, path, body.as_ref()).await;
        client.reply().await
    }

    /// A client that has sent this chat request.
    pub async fn begin(&self, body: impl AsRef<str>) -> Client {
        let mut client = self.client().await;
        client.request("POST", CHAT, body.as_ref()).await;
        client
    }

    /// A client whose stream has begun: it has received the event `first`, and `engine` goes on.
    pub async fn stream(&self, engine: &FakeEngine, first: &str) -> (Client, Call) {
        let mut client = self.begin(chat_stream("m", "hi")).await;
        let mut call = engine.call().await;
        call.begin_stream().await;
        call.chunk(&event(first)).await;
        client.head().await;
        client.see(&event(first)).await;
        (client, call)
    }

    /// The response to a chat request, which `engine` answers.
    ///
    /// # Panics
    /// Its status is not 200.
    pub async fn served(&self, engine: &FakeEngine, body: impl AsRef<str>) -> Reply {
        let (reply, _) = tokio::join!(self.ask("POST", CHAT, body), engine.answer("{}"));
        assert_eq!(reply.status, 200, "{reply:?}");
        reply
    }

    /// Sends one request to the operators' port and reads the response.
    pub async fn operate(&self, method: &str, path: &str, body: impl AsRef<str>) -> Reply {
        let mut client = Client::connect(self.metrics_address()).await;
        client.request(method, path, body.as_ref()).await;
        client.reply().await
    }

    /// The value of one sample of the exposition, written as `name{labels}` in full.
    pub async fn metric(&self, sample: &str) -> Option<f64> {
        let text = self.operate("GET", "/metrics", "").await.text();
        text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok())
    }

    /// Waits until a sample has this value.
    pub async fn metric_becomes(&self, sample: &str, value: f64) {
        soon(sample, async { while self.metric(sample).await != Some(value) {} }).await;
    }

    /// Decisions of the only pool, newest first.
    pub async fn decisions(&self) -> Vec<Value> {
        let answer = self.operate("GET", "/decisions", "").await.json();
        answer["pools"][0]["decisions"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until no request is in flight or queued, in any pool.
    pub async fn ledger_is_zero(&self) {
        eventually("the ledger is zero", || self.fleet().pools().iter().all(|pool| is_zero(pool))).await;
    }

    /// Checks that no request is in flight, then shuts the gateway down.
    ///
    /// # Panics
    /// A request stays in flight, or a connection does not end.
    pub async fn end(self) {
        self.ledger_is_zero().await;
        let cut = soon("the gateway ends", self.serving.shut_down()).await;
        assert!(cut.is_nothing(), "connections were cut at shutdown: {cut:?}");
    }

    /// Like [`TestGateway::end`], and checks that `engines` were sent nothing but what the test has taken.
    ///
    /// # Panics
    /// Like [`TestGateway::end`], or an engine has another request.
    pub async fn end_quiet(self, engines: &[&FakeEngine]) {
        self.end().await;
        for engine in engines {
            engine.has_no_more().await;
        }
    }

    /// Shuts the gateway down; returns whether all requests ended by themselves.
    pub async fn shut_down(self) -> bool {
        soon("the gateway ends", self.serving.shut_down()).await.is_nothing()
    }

    /// Shuts the gateway down with a grace period that ends when `hurry` does; returns what was cut off.
    pub async fn shut_down_or(self, hurry: impl Future<Output = ()>) -> Cut {
        soon("the gateway ends", self.serving.shut_down_or(hurry)).await
    }

    fn all_healthy(&self) -> bool {
        let serves = |worker: &kvlane_fleet::worker::Worker| {
            worker.state().healthy && !self.serving.controller.endpoints_of(worker.id).is_empty()
        };
        self.serving.controller.workers().iter().all(|worker| serves(worker))
    }
}

/// Whether a pool's ledger has no load.
pub fn is_zero(pool: &ModelPool) -> bool {
    pool.router.read(|scheduler| {
        let idle =
            scheduler.pool().endpoints().all(|endpoint| endpoint.load.in_flight == InFlight::default());
        idle && scheduler.in_flight() == 0 && scheduler.queued() == 0
    })
}
