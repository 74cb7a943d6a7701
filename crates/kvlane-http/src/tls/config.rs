//! The configuration section `tls`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// TLS towards clients, operators and workers. All files are PEM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The server certificate with its chain; none: plain HTTP.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub private_key: Option<PathBuf>,
    /// CA of client certificates; if set, clients must present one.
    pub client_ca: Option<PathBuf>,
    /// Whether the metrics port uses the certificate too.
    pub metrics: bool,
    /// CA of operators' client certificates on the metrics port; if set, operators must present one.
    pub metrics_client_ca: Option<PathBuf>,
    /// CA of workers with an `https` address; none: the system's list.
    pub upstream_ca: Option<PathBuf>,
    /// The client certificate presented to workers that ask for one.
    pub upstream_certificate: Option<PathBuf>,
    /// Its private key.
    pub upstream_private_key: Option<PathBuf>,
}

impl Default for TlsConfig {
    fn default() -> Self {
        Self {
            certificate: None,
            private_key: None,
            client_ca: None,
            metrics: true,
            metrics_client_ca: None,
            upstream_ca: None,
            upstream_certificate: None,
            upstream_private_key: None,
        }
    }
}

// === impl TlsConfig ===

impl TlsConfig {
    /// The files it names.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        let Self { certificate, private_key, client_ca, metrics_client_ca, .. } = self;
        let Self { upstream_ca, upstream_certificate, upstream_private_key, .. } = self;
        let own = [certificate, private_key, client_ca, metrics_client_ca];
        let upstream = [upstream_ca, upstream_certificate, upstream_private_key];
        own.into_iter().chain(upstream).flatten().cloned()
    }
}
