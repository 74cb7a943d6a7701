//! The addresses that clients and operators talk to.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

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
    /// Whether answers say in `Server-Timing` where the time until their head went.
    pub server_timing: bool,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 30_000,
            relay_threads: 0,
            max_payload_size: 64 << 20,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(1800),
            stream_idle_timeout: Duration::from_secs(300),
            shutdown_grace: Duration::from_secs(180),
            reload_interval: Duration::from_secs(1),
            request_id_headers: vec!["x-request-id".into(), "x-correlation-id".into()],
            server_timing: true,
        }
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
