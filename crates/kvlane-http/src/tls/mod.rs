//! TLS towards clients, operators and workers.
//!
//! [`Tls`] is the configuration with its files at one moment; a reload replaces it as a whole, and open connections keep
//! their certificates. TLS 1.2 and 1.3, by rustls.

mod config;
mod files;
mod mutual;
mod stream;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use kvlane_core::config::{ConfigError, wrong};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub use self::config::TlsConfig;
use self::files::{certificates, private_key, provider, roots};
pub use self::mutual::Mutual;
pub use self::stream::Stream;

/// The systems' lists of trusted CAs: Debian, Red Hat, SUSE, Alpine and BSD.
const SYSTEM_ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// The TLS configurations in use.
pub struct Tls {
    clients: Option<Arc<ServerConfig>>,
    operators: Option<Arc<ServerConfig>>,
    /// Connections to engines.
    pub workers: Arc<ToWorkers>,
}

/// TLS to workers with an `https` address.
#[derive(Default)]
pub struct ToWorkers {
    /// Read at first use if the system's list of CAs is used.
    config: OnceLock<Result<Arc<ClientConfig>, String>>,
}

// === impl Tls ===

impl Tls {
    /// Reads certificates and keys.
    ///
    /// # Errors
    /// The first file that cannot be used.
    pub fn read(config: &TlsConfig) -> Result<Self, ConfigError> {
        let own = match (&config.certificate, &config.private_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (Some(_), None) => return wrong("tls.private_key", "a certificate needs its private key".into()),
            (None, Some(_)) => return wrong("tls.certificate", "a private key needs its certificate".into()),
        };
        let server = |field: &str, authority: &Option<PathBuf>| match own {
            None if authority.is_some() => wrong(field, "it needs tls.certificate".into()),
            None => Ok(None),
            Some(own) => server(own, field, authority.as_deref()).map(Some),
        };
        let clients = server("tls.client_ca", &config.client_ca)?;
        let operators = server("tls.metrics_client_ca", &config.metrics_client_ca)?;
        let workers = ToWorkers::default();
        if config.upstream_ca.is_some() || config.upstream_certificate.is_some() {
            // It is configured, so errors show at the start.
            let _ = workers.config.set(Ok(to_workers(config)?));
        }
        Ok(Self { clients, operators: operators.filter(|_| config.metrics), workers: Arc::new(workers) })
    }

    /// TLS to clients; none: plain HTTP.
    pub fn clients(&self) -> Option<&Arc<ServerConfig>> {
        self.clients.as_ref()
    }

    /// TLS to operators; none: plain HTTP.
    pub fn operators(&self) -> Option<&Arc<ServerConfig>> {
        self.operators.as_ref()
    }
}

/// A client configuration that trusts the CA in `authority`, or the system's list.
///
/// # Errors
/// A file of certificates that cannot be used.
pub fn client(authority: Option<&Path>) -> Result<Arc<ClientConfig>, ConfigError> {
    to_workers(&TlsConfig { upstream_ca: authority.map(Path::to_owned), ..TlsConfig::default() })
}

/// A server configuration for gRPC: with the gateway's certificate, or one that it signs itself, for peers that do not
/// verify it.
///
/// # Errors
/// A file that cannot be used.
pub fn grpc(config: &TlsConfig) -> Result<Arc<ServerConfig>, ConfigError> {
    let mut grpc = match (&config.certificate, &config.private_key) {
        (Some(certificate), Some(key)) => {
            ServerConfig::clone(&*server((certificate, key), "tls.client_ca", config.client_ca.as_deref())?)
        }
        _ => {
            let fail = |error: &dyn std::fmt::Display| ConfigError {
                field: "epp.secure_serving".into(),
                problem: format!("cannot make a certificate: {error}"),
            };
            let made =
                rcgen::generate_simple_self_signed(["localhost".to_owned()]).map_err(|error| fail(&error))?;
            let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
            let builder =
                ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
            let builder = builder.map_err(|error| fail(&error))?.with_no_client_auth();
            builder.with_single_cert(vec![made.cert.into()], key).map_err(|error| fail(&error))?
        }
    };
    grpc.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(grpc))
}

/// TLS handshake with a client: the connection, and whether it negotiated HTTP/2.
pub async fn accept(config: Arc<ServerConfig>, stream: TcpStream) -> io::Result<(Stream, bool)> {
    let stream = TlsAcceptor::from(config).accept(stream).await?;
    let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok((Stream::Tls(Box::new(stream.into())), h2))
}

// === impl ToWorkers ===

impl ToWorkers {
    /// TLS handshake with a worker of this name.
    pub async fn connect(&self, name: &str, stream: TcpStream) -> io::Result<Stream> {
        let config =
            self.config.get_or_init(|| to_workers(&TlsConfig::default()).map_err(|error| error.to_string()));
        let config = config.clone().map_err(io::Error::other)?;
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(config).connect(name, stream).await?;
        Ok(Stream::Tls(Box::new(stream.into())))
    }
}

/// A server configuration; with `authority`, clients need a certificate of that CA.
fn server(
    (certificate, key): (&PathBuf, &PathBuf),
    field: &str,
    authority: Option<&Path>,
) -> Result<Arc<ServerConfig>, ConfigError> {
    let chain = certificates("tls.certificate", certificate)?;
    let key = private_key("tls.private_key", key)?;
    let fail =
        |field: &str, error: rustls::Error| ConfigError { field: field.into(), problem: error.to_string() };
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| fail("tls", error))?;
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(roots(field, path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            let verifier = verifier.or_else(|error| wrong(field, format!("{}: {error}", path.display())))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| fail("tls.certificate", error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn to_workers(config: &TlsConfig) -> Result<Arc<ClientConfig>, ConfigError> {
    let roots = match &config.upstream_ca {
        Some(path) => roots("tls.upstream_ca", path)?,
        None => system_roots()?,
    };
    let fail = |error: rustls::Error| ConfigError {
        field: "tls.upstream_certificate".into(),
        problem: error.to_string(),
    };
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.map_err(fail)?.with_root_certificates(roots);
    let mut client = match (&config.upstream_certificate, &config.upstream_private_key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(certificate), Some(key)) => {
            let chain = certificates("tls.upstream_certificate", certificate)?;
            let key = private_key("tls.upstream_private_key", key)?;
            builder.with_client_auth_cert(chain, key).map_err(fail)?
        }
        _ => {
            return wrong(
                "tls.upstream_certificate",
                "set a certificate and its private key, or neither".into(),
            );
        }
    };
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(client))
}

/// The system's list of CAs. `SSL_CERT_FILE` names another, as for OpenSSL.
fn system_roots() -> Result<RootCertStore, ConfigError> {
    let field = "tls.upstream_ca";
    let said = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let there = || SYSTEM_ROOTS.iter().map(PathBuf::from).find(|path| path.is_file());
    let Some(path) = said.or_else(there) else {
        let problem = "this system has no list of trusted CAs: name a file with the CA of the workers";
        return wrong(field, problem.into());
    };
    let mut roots = RootCertStore::empty();
    // The list may contain certificates that rustls cannot use.
    let (good, _) = roots.add_parsable_certificates(certificates(field, &path)?);
    if good == 0 {
        return wrong(field, format!("{} has no usable certificate", path.display()));
    }
    Ok(roots)
}
