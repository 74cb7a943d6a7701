//! The configuration section `tracing`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::config::{ConfigError, LEAST_TIME, within, wrong};
use kvlane_http::secret::Secret;
use serde::{Deserialize, Serialize};

use http::Uri;
use kvlane_wire::otlp::TRACES_PATH;

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

// === impl Tracing ===

impl Tracing {
    /// Checks what types cannot.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Tracing { endpoint, headers, service_name, .. } = self;
        if let Some(endpoint) = endpoint {
            collector(endpoint).or_else(|problem| wrong("tracing.endpoint", problem))?;
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
        within("tracing.queue_size", self.queue_size, 1, 1_000_000)?;
        within("tracing.batch_size", self.batch_size, 1, 100_000)?;
        for (field, value) in [("tracing.interval", self.interval), ("tracing.timeout", self.timeout)] {
            if value < LEAST_TIME || value > Duration::from_secs(3600) {
                return wrong(field, format!("{value:?} is out of range: take {LEAST_TIME:?} to an hour"));
            }
        }
        Ok(())
    }

    /// Files with secrets that the collector is shown.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        self.headers.values().filter_map(|secret| secret.file().map(Into::into))
    }
}

/// A collector's address, and the path that spans are sent to: the usual one, unless the endpoint has one.
pub fn collector(endpoint: &str) -> Result<(String, String), String> {
    let uri: Uri = endpoint.parse().map_err(|error| format!("'{endpoint}' is no URL ({error})"))?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(format!("'{endpoint}' has no scheme or no host, write http://host:4318"));
    };
    let path = match uri.path() {
        "" | "/" => TRACES_PATH,
        path => path,
    };
    let base = format!("{scheme}://{authority}");
    kvlane_http::address::Address::parse(&base)?;
    Ok((base, path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_path_gets_the_usual_one() {
        let check = |endpoint: &str, base: &str, path: &str| {
            assert_eq!(collector(endpoint), Ok((base.to_owned(), path.to_owned())), "{endpoint}");
        };
        check("http://127.0.0.1:4318", "http://127.0.0.1:4318", "/v1/traces");
        check("http://collector:4318/", "http://collector:4318", "/v1/traces");
        check("https://otel.example/otlp/v1/traces", "https://otel.example", "/otlp/v1/traces");
        for wrong in ["collector:4317", "/v1/traces", "grpc://c:4317", "http://"] {
            assert!(collector(wrong).is_err(), "{wrong}");
        }
    }
}
