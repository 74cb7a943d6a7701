//! The configuration sections `server` and `metrics`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use kvlane_core::config::{ConfigError, within, wrong};
use kvlane_wire::path::{PATH_BYTES_MAX, Target, is_plain};
use serde::{Deserialize, Serialize};

use crate::auth::Role;

/// Most extra paths.
const EXTRA_PATHS_MAX: usize = 64;

/// The address for clients, and limits of requests.
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
    /// Memory for the requests of all clients together, in bytes; beyond it 503.
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
    /// Silence between two pieces of a response after which it counts as broken; also how long a client may stop
    /// reading.
    #[serde(with = "humantime_serde")]
    pub stream_idle_timeout: Duration,
    /// Time that requests in flight have to finish after SIGTERM.
    #[serde(with = "humantime_serde")]
    pub shutdown_grace: Duration,
    /// Time between two checks of the configuration file for changes; 0 is never, then only SIGHUP reloads it.
    #[serde(with = "humantime_serde")]
    pub reload_interval: Duration,
    /// Request headers that may carry a request id, in order of preference.
    pub request_id_headers: Vec<String>,
    /// Engine paths that are relayed in addition to those in the guide, each with the role it needs.
    pub extra_paths: Vec<ExtraPath>,
    /// Whether responses state in `Server-Timing` the time spent until their head.
    pub server_timing: bool,
}

/// An engine path that is relayed although kvlane does not know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraPath {
    /// The path; `{}` stands for one segment.
    pub path: String,
    /// The role it needs: `viewer` and `admin` are operators.
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
    /// Checks the extra paths. `is_own` says which paths are the gateway's own.
    ///
    /// # Errors
    /// The first invalid path.
    pub fn validate_paths(&self, is_own: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        within("server.extra_paths", self.extra_paths.len(), 0, EXTRA_PATHS_MAX)?;
        for ExtraPath { path, .. } in &self.extra_paths {
            let example = path.replace("{}", "x");
            let problem = if !is_plain(&example) || path.len() > PATH_BYTES_MAX {
                "is not a valid path: it must begin with `/` and have neither `%`, `;` nor empty or dotted segments"
            } else if Target::of(&example).is_some() {
                "is relayed by default: remove it"
            } else if is_own(&example) || example.starts_with("/v1/models") {
                "is served by the gateway itself"
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
