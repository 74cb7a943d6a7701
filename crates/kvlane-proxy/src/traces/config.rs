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
    /// The collector, OTLP over HTTP: `http://host:4318`, or `https`; a path replaces `/v1/traces`. None: no traces.
    pub endpoint: Option<String>,
    /// Header fields for the collector, such as `authorization`.
    pub headers: BTreeMap<String, Secret>,
    /// The service name in traces.
    pub service_name: String,
    /// Share of requests that are recorded, where no caller has decided.
    pub sample_ratio: Share,
    /// Whether the sampling decision of an incoming trace is followed.
    pub follow_parent: bool,
    /// Requests whose spans may be queued; beyond it they are dropped.
    pub queue_size: usize,
    /// Approximate number of spans in a batch.
    pub batch_size: usize,
    /// Time that spans wait for a batch to fill.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Timeout of the collector's response.
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
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Tracing { endpoint, headers, service_name, .. } = self;
        if let Some(endpoint) = endpoint {
            collector(endpoint).or_else(|problem| wrong("tracing.endpoint", problem))?;
        }
        for name in headers.keys() {
            let ours = ["content-type", "content-length", "host", "transfer-encoding", "connection"];
            let usable = name.parse::<http::HeaderName>().is_ok_and(|name| !ours.contains(&name.as_str()));
            if !usable {
                return wrong(
                    "tracing.headers",
                    format!("the header field '{name}' is invalid or must not be set"),
                );
            }
        }
        for (name, secret) in headers {
            if let Secret::Plain(value) = secret
                && http::HeaderValue::from_str(value).is_err()
            {
                return wrong(
                    "tracing.headers",
                    format!("the value of '{name}' is not a valid header value"),
                );
            }
        }
        if service_name.is_empty() {
            return wrong("tracing.service_name", "it is empty: set the name of this service".into());
        }
        within("tracing.queue_size", self.queue_size, 1, 1_000_000)?;
        within("tracing.batch_size", self.batch_size, 1, 100_000)?;
        for (field, value) in [("tracing.interval", self.interval), ("tracing.timeout", self.timeout)] {
            if value < LEAST_TIME || value > Duration::from_secs(3600) {
                return wrong(field, format!("{value:?} is out of range: must be {LEAST_TIME:?} to an hour"));
            }
        }
        Ok(())
    }

    /// Files with secrets for the collector.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        self.headers.values().filter_map(|secret| secret.file().map(Into::into))
    }
}

/// A collector's address, and the path for spans: the default, unless the endpoint has one.
pub fn collector(endpoint: &str) -> Result<(String, String), String> {
    let uri: Uri = endpoint.parse().map_err(|error| format!("'{endpoint}' is not a URL ({error})"))?;
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
    fn an_endpoint_without_a_path_gets_the_default_path() {
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
