//! TLS between processes of one kind: each shows a certificate of one CA, and demands one, in both directions.

use std::io;
use std::path::Path;
use std::sync::Arc;

use kvlane_core::config::ConfigError;
use rustls::pki_types::ServerName;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::files::{certificates, private_key, provider, roots};
use super::stream::Stream;

/// Both directions, with HTTP/2.
pub struct Mutual {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

// === impl Mutual ===

impl Mutual {
    /// Reads the keys `certificate`, `private_key` and `ca` of the section `place`.
    ///
    /// # Errors
    /// The first file that cannot be used.
    pub fn read(place: &str, certificate: &Path, key: &Path, authority: &Path) -> Result<Self, ConfigError> {
        let [of_certificate, of_key, of_authority] =
            ["certificate", "private_key", "ca"].map(|key| format!("{place}.{key}"));
        let chain = certificates(&of_certificate, certificate)?;
        let roots = roots(&of_authority, authority)?;
        let fail = |field: &str, error: &dyn std::fmt::Display| ConfigError {
            field: field.into(),
            problem: error.to_string(),
        };
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots.clone()), provider());
        let verifier = verifier.build().map_err(|error| fail(&of_authority, &error))?;
        let server = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let server = server.map_err(|error| fail(place, &error))?.with_client_cert_verifier(verifier);
        let server = server.with_single_cert(chain.clone(), private_key(&of_key, key)?);
        let mut server = server.map_err(|error| fail(&of_certificate, &error))?;
        let client = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let client = client.map_err(|error| fail(place, &error))?.with_root_certificates(roots);
        let client = client.with_client_auth_cert(chain, private_key(&of_key, key)?);
        let mut client = client.map_err(|error| fail(&of_certificate, &error))?;
        server.alpn_protocols = vec![b"h2".to_vec()];
        client.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { server: Arc::new(server), client: Arc::new(client) })
    }

    /// Handshake with a process that connects.
    ///
    /// # Errors
    /// The handshake fails, for example because the certificate is not of the CA.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<Stream> {
        let stream = TlsAcceptor::from(Arc::clone(&self.server)).accept(stream).await?;
        Ok(Stream::Tls(Box::new(stream.into())))
    }

    /// Handshake with a process that is connected to, whose certificate must be for `name`.
    ///
    /// # Errors
    /// The handshake fails, for example because the certificate is not of the CA or for another name.
    pub async fn connect(&self, name: &str, stream: TcpStream) -> io::Result<Stream> {
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(&self.client)).connect(name, stream).await?;
        Ok(Stream::Tls(Box::new(stream.into())))
    }
}
