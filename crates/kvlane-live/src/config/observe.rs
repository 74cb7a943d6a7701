//! What is told of requests: traces and logs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::config::{ConfigError, within, wrong};
use kvlane_http::secret::Secret;
use serde::{Deserialize, Serialize};

use super::{Config, LEAST_TIME};
use crate::traces::split;

/// Traces of requests, sent to an OpenTelemetry collector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tracing {
    /// The collector, in OTLP over HTTP: `http://host:4318`, or `https`; with a path, that one instead of `/v1/traces`.
    /// None: no traces.
    pub endpoint: Option<String>,
    /// Header fields that it wants to see, such as `authorization`.
    pub headers: BTreeMap<String, Secret>,
    /// What it is told that this is.
    pub service_name: String,
    /// Share of requests that are recorded, where nobody else has decided.
    pub sample_ratio: Share,
    /// Whether a request that comes with a trace is recorded if that is, and not otherwise.
    pub follow_parent: bool,
    /// Requests whose spans may wait to be sent; what is beyond is dropped.
    pub queue_size: usize,
    /// Spans that are sent at a time, about.
    pub batch_size: usize,
    /// Time that spans wait for others to be sent with.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Time that the collector has for an answer.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
}

/// What is logged, and how it is written. Flags come before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// As `--log-level`: a level, or a filter. None: info.
    pub level: Option<String>,
    /// How a line is written.
    pub format: LogFormat,
}

/// Ways to write a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs: an object on each line.
    Json,
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            endpoint: None,
            headers: BTreeMap::new(),
            service_name: "kvlane".into(),
            sample_ratio: Share::of(1.0),
            follow_parent: true,
            queue_size: 2048,
            batch_size: 512,
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(10),
        }
    }
}

// === impl Config ===

impl Config {
    pub(super) fn validate_tracing(&self) -> Result<(), ConfigError> {
        let Tracing { endpoint, headers, service_name, .. } = &self.tracing;
        if let Some(endpoint) = endpoint {
            split(endpoint).or_else(|problem| wrong("tracing.endpoint", problem))?;
        }
        for name in headers.keys() {
            let ours = ["content-type", "content-length", "host", "transfer-encoding", "connection"];
            let usable = name.parse::<http::HeaderName>().is_ok_and(|name| !ours.contains(&name.as_str()));
            if !usable {
                return wrong("tracing.headers", format!("'{name}' is no header field that may be set"));
            }
        }
        for (name, secret) in headers {
            if let Secret::Plain(value) = secret
                && http::HeaderValue::from_str(value).is_err()
            {
                return wrong("tracing.headers", format!("the value of '{name}' cannot stand in a header"));
            }
        }
        if service_name.is_empty() {
            return wrong("tracing.service_name", "it is empty: write what this is to be called".into());
        }
        within("tracing.queue_size", self.tracing.queue_size, 1, 1_000_000)?;
        within("tracing.batch_size", self.tracing.batch_size, 1, 100_000)?;
        for (field, value) in
            [("tracing.interval", self.tracing.interval), ("tracing.timeout", self.tracing.timeout)]
        {
            if value < LEAST_TIME || value > Duration::from_secs(3600) {
                return wrong(field, format!("{value:?} is out of range: take {LEAST_TIME:?} to an hour"));
            }
        }
        Ok(())
    }

    /// Files with secrets that the collector is shown.
    pub(super) fn files_of_tracing(&self) -> impl Iterator<Item = PathBuf> {
        self.tracing.headers.values().filter_map(|secret| secret.file().map(Into::into))
    }
}
