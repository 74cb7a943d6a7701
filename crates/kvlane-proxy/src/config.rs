//! The configuration sections `server` and `metrics`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use kvlane_core::config::{ConfigError, within, wrong};
use kvlane_wire::path::{PATH_BYTES_MAX, Target, is_plain};
use serde::{Deserialize, Serialize};

use crate::auth::Role;

/// Most paths beside those that are known.
const EXTRA_PATHS_MAX: usize = 64;

/// The address clients talk to, and what is accepted there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Threads that relay requests; 0 is one per core.
    pub relay_threads: usize,
    /// Largest request body in bytes; beyond it 413.
    pub max_payload_size: usize,
    /// What the requests of all clients may hold together, in bytes; beyond it 503.
    pub body_memory: usize,
    /// Time a client has for a request's head, also on an idle connection.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// Time a client has for a request's body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// Time a whole request may take, queue included.
    #[serde(with = "humantime_serde")]
    pub request_timeout: Duration,
    /// Silence between two pieces of an answer after which it counts as broken; also how long a client may leave it
    /// unread.
    #[serde(with = "humantime_serde")]
    pub stream_idle_timeout: Duration,
    /// Time that requests in flight have to end after SIGTERM.
    #[serde(with = "humantime_serde")]
    pub shutdown_grace: Duration,
    /// Time between two looks at whether the configuration file has changed; 0 is never, then only SIGHUP reloads it.
    #[serde(with = "humantime_serde")]
    pub reload_interval: Duration,
    /// Request headers that may carry a request id, in order of preference.
    pub request_id_headers: Vec<String>,
    /// Engine paths that are relayed beside those that the guide lists, each with who may use it.
    pub extra_paths: Vec<ExtraPath>,
    /// Whether answers say in `Server-Timing` where the time until their head went.
    pub server_timing: bool,
}

/// A path of engines that is relayed, though kvlane does not know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraPath {
    /// The path, `{}` standing for one segment.
    pub path: String,
    /// Who may use it: `viewer` and `admin` are operators.
    #[serde(default)]
    pub role: Role,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 30_000,
            relay_threads: 0,
            max_payload_size: 64 << 20,
            body_memory: 1 << 30,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(1800),
            stream_idle_timeout: Duration::from_secs(300),
            shutdown_grace: Duration::from_secs(180),
            reload_interval: Duration::from_secs(1),
            request_id_headers: vec!["x-request-id".into(), "x-correlation-id".into()],
            extra_paths: Vec::new(),
            server_timing: true,
        }
    }
}

// === impl Server ===

impl Server {
    /// Checks the paths that are relayed. `is_own` tells which paths are the gateway's own.
    ///
    /// # Errors
    /// The first path that is wrong.
    pub fn validate_paths(&self, is_own: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        within("server.extra_paths", self.extra_paths.len(), 0, EXTRA_PATHS_MAX)?;
        for ExtraPath { path, .. } in &self.extra_paths {
            let example = path.replace("{}", "x");
            let problem = if !is_plain(&example) || path.len() > PATH_BYTES_MAX {
                "is no path: it begins with `/` and has neither `%`, `;` nor empty or dotted segments"
            } else if Target::of(&example).is_some() {
                "is relayed without being named"
            } else if is_own(&example) || example.starts_with("/v1/models") {
                "is the gateway's own"
            } else {
                continue;
            };
            return wrong("server.extra_paths", format!("'{path}' {problem}"));
        }
        Ok(())
    }
}

/// The address for `/metrics` and the admin API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { host: IpAddr::V4(Ipv4Addr::LOCALHOST), port: 29_000 }
    }
}
