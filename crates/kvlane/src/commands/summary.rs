//! What a person at a terminal wants to know once the gateway has started: workers, models and how their caches are known,
//! addresses, and what is open to whom.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;

use kvlane_core::cache_accuracy::{Feed, Knowledge};
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};
use kvlane_gateway::mode::Mode;
use kvlane_gateway::serve::Serving;

/// Models that are listed; further ones are counted.
const MODELS_MAX: usize = 3;

/// The facts.
pub(crate) struct Summary {
    /// Workers that take requests, and all.
    ready: usize,
    workers: usize,
    /// What is wrong with one that does not.
    problem: Option<String>,
    /// Each model's name, and how the caches of its endpoints are known.
    models: Vec<String>,
    /// Whether a source of discovery names workers.
    finds: bool,
    clients: Open,
    operators: Open,
    /// Envoy sends the requests.
    picks: bool,
}

/// A listener, and who can use it.
struct Open {
    url: String,
    loopback: bool,
    needs_key: bool,
}

// === impl Summary ===

impl Summary {
    /// The state of a gateway.
    pub(crate) fn of(serving: &Serving, mode: Mode) -> Self {
        let (config, auth) = (serving.config(), serving.proxy.auth());
        let has_tls = config.tls.certificate.is_some();
        let picks = mode == Mode::Picker;
        let is_secure = if picks { config.epp.secure_serving } else { has_tls };
        let workers = serving.fleet.workers();
        let ready = workers.values().filter(|worker| worker.state().healthy).count();
        let count = workers.len();
        let problem = workers.values().find_map(|worker| {
            worker.state().problem.as_ref().map(|problem| format!("{}: {problem}", worker.url))
        });
        drop(workers);
        Self {
            ready,
            workers: count,
            problem,
            finds: !serving.fleet.discovery.sources().is_empty(),
            models: serving.fleet.pools().iter().map(|pool| model(pool)).collect(),
            clients: Open::new(serving.address, is_secure, !picks && auth.clients_need_a_key()),
            operators: Open::new(
                serving.metrics_address,
                has_tls && config.tls.metrics,
                auth.operators_need_a_key(),
            ),
            picks,
        }
    }

    /// Says it: on stderr, or as one line of a log for programs. Returns how many workers are ready.
    pub(crate) fn tell(&self, json: bool) -> usize {
        let Self { ready, workers, .. } = *self;
        if json {
            let (clients, operators) = (&self.clients.url, &self.operators.url);
            let (models, problem) = (self.models.join("; "), self.problem.as_deref());
            tracing::info!(ready, workers, problem, models, clients, operators, "started");
        } else if tracing::enabled!(tracing::Level::INFO) {
            // If stderr is closed, it cannot be said.
            let _ = std::io::stderr().write_all(self.text().as_bytes());
        }
        ready
    }

    fn text(&self) -> String {
        let (ready, workers, operators) = (self.ready, self.workers, &self.operators.url);
        let mut text = format!("\nkvlane {}: ", env!("CARGO_PKG_VERSION"));
        text += &match (ready, workers) {
            (_, 0) if self.finds => "no workers found yet (section `discovery`)".to_owned(),
            (_, 0) => format!(
                "no workers. Restart with --worker-urls http://HOST:PORT, or add one: curl {operators}/workers -d \
                 '{{\"url\": \"http://HOST:PORT\"}}'"
            ),
            _ => format!("{ready} of {workers} workers ready"),
        };
        if let Some(problem) = &self.problem {
            text += &format!("; {problem}");
        }
        let named = self.models.iter().take(MODELS_MAX).cloned().collect::<Vec<_>>().join("; ");
        let more = self.models.len().saturating_sub(MODELS_MAX);
        let models = match (self.models.is_empty(), more) {
            (true, _) => "none yet".to_owned(),
            (_, 0) => named,
            (_, more) => format!("{named}; {more} more"),
        };
        let (name, path) = if self.picks { ("data plane", "") } else { ("clients", "/v1") };
        let clients = self.clients.said(path);
        let rows = [
            ("models", models),
            (name, clients),
            ("operators", self.operators.said("")),
            ("dashboard", format!("{operators}/dashboard")),
        ];
        for (name, said) in rows {
            let _ = write!(text, "\n  {name:<11}{said}");
        }
        text + "\n\n"
    }
}

// === impl Open ===

impl Open {
    fn new(address: SocketAddr, tls: bool, needs_key: bool) -> Self {
        let scheme = if tls { "https" } else { "http" };
        // An address that can be pasted: that of all interfaces is none.
        let url = match address.ip() {
            ip if ip.is_unspecified() => format!("{scheme}://localhost:{}", address.port()),
            _ => format!("{scheme}://{address}"),
        };
        Self { url, loopback: address.ip().is_loopback(), needs_key }
    }

    fn said(&self, path: &str) -> String {
        let whom = match self.loopback {
            true => "this machine only",
            false => "open to other machines",
        };
        let key = if self.needs_key { "with a key" } else { "without a key" };
        format!("{}{path}  ({whom}, {key})", self.url)
    }
}

/// A model, and how the caches of its endpoints are known.
fn model(pool: &ModelPool) -> String {
    let endpoints = pool.endpoints();
    let knowledge = |endpoint: &PoolEndpoint| {
        pool.router.read(|scheduler| {
            scheduler
                .pool()
                .get(endpoint.id)
                .map(|known| known.cache_accuracy.knowledge())
                .unwrap_or_default()
        })
    };
    let levels: BTreeSet<Knowledge> = endpoints.iter().map(|endpoint| knowledge(endpoint)).collect();
    let names = levels.iter().map(|level| level.name()).collect::<Vec<_>>().join(" and ");
    let why = endpoints.iter().find_map(|endpoint| why(endpoint, knowledge(endpoint)));
    let why = why.map_or(String::new(), |why| format!(": {why}"));
    let count = match endpoints.len() {
        1 => "1 endpoint".to_owned(),
        count => format!("{count} endpoints"),
    };
    format!("{} ({count}, cache knowledge {names}{why})", pool.model)
}

/// Why the cache of an endpoint is not known exactly.
fn why(endpoint: &PoolEndpoint, knowledge: Knowledge) -> Option<String> {
    let Some(feed) = &endpoint.feed else {
        return Some(format!(
            "no KV events; `kvlane doctor {}` says what its engine needs",
            endpoint.worker.url
        ));
    };
    let seen = feed.seen();
    match (knowledge, seen.state) {
        (Knowledge::Exact, _) => None,
        (_, Feed::Live) => Some("predictions have been wrong".to_owned()),
        (_, state) => Some(format!("KV events {}: {}", state.name(), seen.problem.unwrap_or_default())),
    }
}
