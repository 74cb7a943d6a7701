//! The engines to examine: those given by URL, those of a configuration, and those that its sources of discovery name.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvlane_core::disaggregation::Role;
use kvlane_fleet::discovery::{DNS, FILE};
use kvlane_fleet::worker::config::{FeedSpec, WorkerSpec};
use kvlane_gateway::config::Config;
use kvlane_gateway::discovery::{Found, find_once};
use kvlane_http::address::worker_name;
use kvlane_http::client::Client;
use kvlane_http::connections::{Connections, ConnectionsConfig};
use kvlane_http::secret::Secret;
use kvlane_http::tls::{Tls, TlsConfig, ToWorkers};
use kvlane_http::upstream::{Upstream, UpstreamId};
use kvlane_wire::disaggregation::Connector;

use super::check::Checks;

/// How engines are reached, from the command line.
pub(super) struct Access<'a> {
    /// Their key.
    pub(super) key: Option<&'a Secret>,
    /// Header fields of every request.
    pub(super) fields: &'a [String],
    /// The CA of their certificates.
    pub(super) authority: Option<&'a Path>,
    /// Time for each answer.
    pub(super) limit: Duration,
}

/// An engine to examine.
pub(super) struct Engine {
    pub(super) client: Client,
    /// The KV event feeds that the configuration or a source gives it, one per rank.
    pub(super) feeds: Vec<FeedSpec>,
    /// What it is used for where two engines share a request.
    pub(super) role: Role,
    /// Its bootstrap port.
    pub(super) bootstrap_port: Option<u16>,
}

/// The workers of a configuration and of its sources.
pub(super) struct Configured {
    config: Config,
    tls: Arc<ToWorkers>,
}

// === impl Engine ===

impl Engine {
    /// The engine at `url`.
    ///
    /// # Errors
    /// What is wrong with the URL, the key, a header field or the CA.
    pub(super) fn at(url: &str, access: &Access<'_>) -> Result<Self, String> {
        let upstream =
            Upstream::new(UpstreamId(0), url, access.key, None).map_err(|error| format!("{url}: {error}"))?;
        let tls = TlsConfig { upstream_ca: access.authority.map(Path::to_owned), ..TlsConfig::default() };
        let tls = Tls::read(&tls).map_err(|error| format!("--upstream-ca: {}", error.problem))?;
        let client = access.client(upstream, &ConnectionsConfig::default(), tls.workers)?;
        Ok(Self { client, feeds: Vec::new(), role: Role::Both, bootstrap_port: None })
    }
}

// === impl Access ===

impl Access<'_> {
    fn client(
        &self,
        upstream: Upstream,
        connections: &ConnectionsConfig,
        tls: Arc<ToWorkers>,
    ) -> Result<Client, String> {
        let connections = ConnectionsConfig { connect_timeout: self.limit, ..connections.clone() };
        let client = Client::new(Arc::new(upstream), Connections::new(connections, tls), self.limit);
        client
            .with_fields(self.fields.iter().map(String::as_str))
            .map_err(|error| format!("--header: {error}"))
    }
}

// === impl Configured ===

impl Configured {
    /// The workers of the configuration in this file; with `authority`, that is the CA of their certificates.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn read(path: &Path, authority: Option<&Path>) -> Result<Self, String> {
        let mut config = crate::config::of_file(path).map_err(|error| format!("--config: {error:#}"))?;
        if let Some(authority) = authority {
            config.tls.upstream_ca = Some(authority.to_owned());
        }
        let tls = Tls::read(&config.tls).map_err(|error| format!("--config: {}: {error}", path.display()))?;
        Ok(Self { config, tls: tls.workers })
    }

    /// Its connector.
    pub(super) fn connector(&self) -> Option<Connector> {
        self.config.disaggregation.connector
    }

    /// Asks its sources once, and adds its workers and theirs to `engines`. The rows are about the sources.
    pub(super) async fn add(&self, engines: &mut Vec<Engine>, access: &Access<'_>) -> Checks {
        let mut checks = Checks::default();
        let mut named: BTreeSet<String> =
            engines.iter().map(|engine| engine.client.url().to_owned()).collect();
        let fix = "correct this entry of `workers`";
        for spec in &self.config.workers {
            if named.insert(worker_name(&spec.url).to_owned()) {
                match self.engine(spec, access) {
                    Ok(engine) => engines.push(engine),
                    Err(problem) => checks.fail("worker_entry", format!("{}: {problem}", spec.url), fix),
                }
            }
        }
        let sources =
            match find_once(&self.config, access.limit.max(self.config.discovery.sync_timeout)).await {
                Ok(sources) => sources,
                Err(error) => {
                    checks.fail("discovery", error.to_string(), "correct the section `discovery`");
                    return checks;
                }
            };
        for Found { source, workers, problems } in sources {
            for problem in problems {
                checks.fail("discovery", format!("{source}: {problem}"), fix_of(source));
            }
            let count = workers.len();
            match count {
                0 => checks.fail("discovery", format!("{source} names no workers"), fix_of(source)),
                1 => checks.ok("discovery", format!("{source} names 1 worker")),
                _ => checks.ok("discovery", format!("{source} names {count} workers")),
            }
            for spec in workers {
                if !named.insert(worker_name(&spec.url).to_owned()) {
                    continue;
                }
                match self.engine(&spec, access) {
                    Ok(engine) => engines.push(engine),
                    Err(problem) => {
                        checks.fail(
                            "discovery",
                            format!("{source}: {}: {problem}", spec.url),
                            fix_of(source),
                        );
                    }
                }
            }
        }
        checks
    }

    /// A worker, with its own key, else that of the command line, else that of all workers.
    fn engine(&self, spec: &WorkerSpec, access: &Access<'_>) -> Result<Engine, String> {
        let key = spec.api_key.as_ref().or(access.key).or(self.config.upstream.api_key.as_ref());
        let upstream = Upstream::new(UpstreamId(0), &spec.url, key, None)?;
        let upstream = upstream.with_tls_server_name(spec.tls_server_name.as_deref())?;
        let client = access.client(upstream, &self.config.upstream, Arc::clone(&self.tls))?;
        let (role, bootstrap_port) = (spec.role, spec.bootstrap_port);
        Ok(Engine { client, feeds: spec.kv_events.clone(), role, bootstrap_port })
    }
}

/// What to do about a source that names no workers, or not all.
fn fix_of(source: &str) -> &'static str {
    match source {
        FILE => "write the workers to discovery.workers_file, as in `- url: http://10.0.0.7:8000`",
        DNS => {
            "correct the host names in discovery.dns, or start the engines: a headless Service lists pods that are ready"
        }
        _ => {
            "compare the labels and names in discovery.kubernetes with `kubectl get pods --show-labels`, and the role of the service account"
        }
    }
}
