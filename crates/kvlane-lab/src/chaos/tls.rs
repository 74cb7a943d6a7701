//! Certificates of a gateway, replaced while it runs, and clients that trust their CA.

use std::error::Error;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// A CA, and the certificate that it issued last.
pub(crate) struct Certificates {
    issuer: Issuer<'static, KeyPair>,
    dir: PathBuf,
    shown: CertificateDer<'static>,
    trusted: Arc<RootCertStore>,
}

/// Clients that trust the CA, over HTTP/1.1 or HTTP/2.
#[derive(Clone)]
pub(crate) struct Trusting {
    http1: TlsConnector,
    http2: TlsConnector,
}

// === impl Certificates ===

impl Certificates {
    /// A new CA, and a first certificate in `dir`.
    pub(crate) fn new(dir: &Path) -> Result<Self, Box<dyn Error>> {
        let (key, mut params) = (KeyPair::generate()?, CertificateParams::new(Vec::new())?);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key)?;
        let mut trusted = RootCertStore::empty();
        trusted.add(root.der().clone())?;
        let (issuer, shown) = (Issuer::new(params, key), root.der().clone());
        let mut certificates = Self { issuer, dir: dir.to_owned(), shown, trusted: Arc::new(trusted) };
        certificates.rotate()?;
        Ok(certificates)
    }

    /// Overwrites the certificate and key with new ones.
    pub(crate) fn rotate(&mut self) -> Result<(), Box<dyn Error>> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec!["127.0.0.1".into()])?.signed_by(&key, &self.issuer)?;
        for (name, text) in [("key.pem", key.serialize_pem()), ("certificate.pem", certificate.pem())] {
            let written = self.dir.join("new.pem");
            fs::write(&written, text)?;
            fs::rename(written, self.dir.join(name))?;
        }
        self.shown = certificate.der().clone();
        Ok(())
    }

    /// The section of the configuration.
    pub(crate) fn settings(&self) -> serde_json::Value {
        let [certificate, private_key] = ["certificate.pem", "key.pem"].map(|name| self.dir.join(name));
        serde_json::json!({"certificate": certificate, "private_key": private_key, "metrics": false})
    }

    pub(crate) fn clients(&self) -> Trusting {
        let connector = |protocol: &[u8]| {
            let mut config = ClientConfig::builder()
                .with_root_certificates(Arc::clone(&self.trusted))
                .with_no_client_auth();
            config.alpn_protocols = vec![protocol.to_vec()];
            TlsConnector::from(Arc::new(config))
        };
        Trusting { http1: connector(b"http/1.1"), http2: connector(b"h2") }
    }

    /// Whether a new connection gets the certificate that was written last.
    pub(crate) async fn are_shown(&self, gateway: SocketAddr) -> io::Result<bool> {
        let stream = self.clients().connect(TcpStream::connect(gateway).await?, gateway, false).await?;
        let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        Ok(shown == Some(&self.shown))
    }
}

// === impl Trusting ===

impl Trusting {
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        gateway: SocketAddr,
        h2: bool,
    ) -> io::Result<TlsStream<TcpStream>> {
        let connector = if h2 { &self.http2 } else { &self.http1 };
        connector.connect(ServerName::IpAddress(gateway.ip().into()), stream).await
    }
}

impl std::fmt::Debug for Trusting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trusting").finish_non_exhaustive()
    }
}
