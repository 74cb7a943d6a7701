//! The configuration section `tls`.

use std::path::PathBuf;

use kvlane_core::section;

section! {
    /// TLS towards clients, operators and workers. All files are PEM.
    pub struct TlsConfig {
        /// Certificate of the gateway with its chain, for clients and operators (PEM); null: HTTP without TLS.
        pub certificate: Option<PathBuf> = None;
        /// Private key of the gateway's certificate (PEM).
        pub private_key: Option<PathBuf> = None;
        /// CA of client certificates, which are then required (mTLS).
        pub client_ca: Option<PathBuf> = None;
        /// Whether the metrics port uses the certificate too.
        pub metrics: bool = true;
        /// CA of operators' client certificates on the metrics port, which are then required.
        pub metrics_client_ca: Option<PathBuf> = None;
        /// CA of workers with an `https` address; null: the system's CAs.
        pub upstream_ca: Option<PathBuf> = None;
        /// Client certificate for workers that ask for one.
        pub upstream_certificate: Option<PathBuf> = None;
        /// Private key of that certificate.
        pub upstream_private_key: Option<PathBuf> = None;
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
