//! The configuration section `tls`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Under which certificates clients, operators and workers are spoken to. All files are PEM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The certificate that clients are shown, with those that vouch for it; none: HTTP in the clear.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub private_key: Option<PathBuf>,
    /// Who vouches for clients: they must show a certificate then.
    pub client_ca: Option<PathBuf>,
    /// Whether the operators' port has the certificate, too.
    pub metrics: bool,
    /// Who vouches for operators, likewise.
    pub metrics_client_ca: Option<PathBuf>,
    /// Who vouches for workers with an `https` address; none: those whom the system trusts.
    pub upstream_ca: Option<PathBuf>,
    /// The certificate that workers are shown which ask for one.
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
