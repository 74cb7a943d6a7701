//! The configuration sections `server` and `metrics`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use kvlane_core::config::{ConfigError, TIME, TIME_OR_ZERO, wrong};
use kvlane_core::section;
use kvlane_wire::api::path::{PATH_BYTES_MAX, is_plain};
use kvlane_wire::api::{Audience, EnginePath};
use serde::{Deserialize, Deserializer};

use crate::auth::Role;

/// The address of a listener: an IP address, or `localhost`.
pub(crate) fn host<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpAddr, D::Error> {
    let said = String::deserialize(deserializer)?;
    match said.as_str() {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        other => other.parse().map_err(|_| {
            serde::de::Error::custom(format!(
                "'{other}' is not an IP address: write 127.0.0.1 for this machine only, 0.0.0.0 for all its networks"
            ))
        }),
    }
}

section! {
    /// The clients' port, and limits of requests.
    pub struct Server {
        /// Address of the clients' port.
        #[serde(deserialize_with = "host")]
        pub host: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        /// Port for clients; 0 takes a free one.
        pub port: u16 = 30_000;
        /// Whether the port may be that of a running kvlane of the same user, which this one succeeds; clients are then
        /// accepted once it is ready. Of an endpoint picker it is `epp.port`. Linux only.
        pub reuse_port: bool = false;
        /// Threads that relay requests; 0 is one per core.
        pub relay_threads: usize = 0, in 0..=1024;
        /// Maximum request body in bytes; larger ones get 413.
        pub max_payload_size: usize = 64 << 20;
        /// Maximum form (`multipart/form-data`) in bytes, of which files are passed on while they arrive; larger ones get 413.
        pub max_upload_size: u64 = 2 << 30, in 1 << 10..=1 << 50;
        /// Maximum memory of the bodies of all requests, in bytes: arriving, queued, or kept for a retry. Beyond it
        /// 503.
        pub body_memory: usize = 1 << 30, in 1 << 20..=1 << 40;
        /// Timeout of a request's head, also on an idle connection.
        #[serde(with = "humantime_serde")]
        pub header_timeout: Duration = Duration::from_secs(60), in TIME;
        /// Timeout of a request's body; of a form that is passed on while it arrives, of silence within it.
        #[serde(with = "humantime_serde")]
        pub body_timeout: Duration = Duration::from_secs(60), in TIME;
        /// Timeout of a whole request, queue included; 504 if no answer has begun by then.
        #[serde(with = "humantime_serde")]
        pub request_timeout: Duration = Duration::from_secs(1800), in TIME;
        /// Timeout of silence within an answer, of the worker or of a client that does not read.
        #[serde(with = "humantime_serde")]
        pub stream_idle_timeout: Duration = Duration::from_secs(300), in TIME;
        /// Time after SIGTERM in which connections are still accepted, while `/readiness` and health checks tell load
        /// balancers to send no more.
        #[serde(with = "humantime_serde")]
        pub shutdown_delay: Duration = Duration::ZERO, in TIME_OR_ZERO;
        /// Time for requests in flight to finish after SIGTERM and `shutdown_delay`.
        #[serde(with = "humantime_serde")]
        pub shutdown_grace: Duration = Duration::from_secs(180), in TIME_OR_ZERO;
        /// Interval of checks whether the configuration file has changed; 0s: only SIGHUP reloads it.
        #[serde(with = "humantime_serde")]
        pub reload_interval: Duration = Duration::from_secs(1), in TIME_OR_ZERO;
        /// Request headers that may carry a request id, in order of preference.
        pub request_id_headers: Vec<String> = vec!["x-request-id".into(), "x-correlation-id".into()];
        /// Engine paths relayed in addition to those in docs/guide.md, as in
        /// `{path: /v1/load_lora_adapter, role: admin}`.
        pub extra_paths: Vec<ExtraPath> = Vec::new(), in 0..=64;
        /// Origins of web pages whose scripts may call the clients' port, as in `https://chat.example.com`, or `*` for all.
        pub cors_allowed_origins: Vec<String> = Vec::new(), in 0..=64;
        /// Whether answers have a `Server-Timing` header with the stages of the time until their head.
        pub server_timing: bool = true;
    }
}

section! {
    /// An engine path that is relayed although kvlane does not know it.
    #[derive(Eq)]
    pub struct ExtraPath {
        /// The path; `{}` is any one segment.
        pub path: String;
        /// The role it needs: `user`, or `viewer` and `admin` for operators.
        #[serde(default)]
        pub role: Role;
    }
}

section! {
    /// The port of `/metrics` and the admin API.
    pub struct Metrics {
        /// Address of the metrics and admin port.
        #[serde(deserialize_with = "host")]
        pub host: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        /// Port for metrics and the admin API; 0 takes a free one.
        pub port: u16 = 29_000;
    }
}

// === impl Server ===

impl Server {
    /// Checks the extra paths. `is_own` says which paths are the gateway's own.
    ///
    /// # Errors
    /// The first invalid path.
    pub fn validate_paths(&self, is_own: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        for ExtraPath { path, .. } in &self.extra_paths {
            let example = path.replace("{}", "x");
            let problem = if !is_plain(&example) || path.len() > PATH_BYTES_MAX {
                "is not a valid path: it must begin with `/` and have neither `%`, `;` nor empty or dotted segments"
            } else if EnginePath::of(&example).is_some_and(|(row, _)| row.audience == Audience::Clients) {
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
