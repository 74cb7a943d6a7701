//! The configuration section `tracing`.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::config::{ConfigError, LEAST_TIME, wrong};
use kvlane_core::section;
use kvlane_http::address::{Address, Protocol};
use kvlane_http::secret::Secret;

use http::Uri;
use kvlane_wire::otlp::TRACES_PATH;

/// The bounds of times of the export.
const EXPORT_TIME: RangeInclusive<Duration> = LEAST_TIME..=Duration::from_secs(3600);

section! {
    /// Traces of requests, sent to an OpenTelemetry collector.
    pub struct Tracing {
        /// Collector for traces of requests, in OTLP over HTTP: `http://host:4318`, or `https`; a path replaces
        /// `/v1/traces`. null: no traces are sent.
        pub endpoint: Option<String> = None;
        /// Headers for the collector, as in `{authorization: {file: /run/secrets/otlp}}`.
        pub headers: BTreeMap<String, Secret> = BTreeMap::new();
        /// `service.name` of this gateway.
        pub service_name: String = "kvlane".into();
        /// Share of requests that are sampled if no parent has decided.
        pub sample_ratio: Share = Share::of(1.0);
        /// Whether a request with a trace context is sampled exactly if its parent is.
        pub follow_parent: bool = true;
        /// Maximum requests whose spans are queued; further ones are dropped.
        pub queue_size: usize = 2048, in 1..=1_000_000;
        /// Approximate number of spans in a batch.
        pub batch_size: usize = 512, in 1..=100_000;
        /// Maximum wait of a span for its batch.
        #[serde(with = "humantime_serde")]
        pub interval: Duration = Duration::from_secs(1), in EXPORT_TIME;
        /// Timeout of the collector's answer.
        #[serde(with = "humantime_serde")]
        pub timeout: Duration = Duration::from_secs(10), in EXPORT_TIME;
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
    if Address::parse(&base)?.protocol == Protocol::Grpc {
        return Err(format!("'{endpoint}': spans are sent over HTTP, write http://host:4318"));
    }
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
