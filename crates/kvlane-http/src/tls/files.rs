//! Files of certificates and keys.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use kvlane_core::config::{ConfigError, wrong};
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Largest file of certificates.
const FILE_BYTES_MAX: u64 = 16 << 20;

pub(super) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| Arc::new(ring::default_provider())))
}

fn contents(field: &str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    let cannot = |error: io::Error| ConfigError {
        field: field.into(),
        problem: format!("cannot read {}: {error}", path.display()),
    };
    let bytes = fs::metadata(path).map_err(cannot)?.len();
    if bytes > FILE_BYTES_MAX {
        return wrong(
            field,
            format!("{} has {bytes} bytes; the maximum is {FILE_BYTES_MAX}", path.display()),
        );
    }
    fs::read(path).map_err(cannot)
}

pub(super) fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let pem = contents(field, path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match read {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => wrong(field, format!("{} has no certificate in PEM", path.display())),
        Err(error) => wrong(field, format!("{}: {error}", path.display())),
    }
}

pub(super) fn private_key(field: &str, path: &Path) -> Result<PrivateKeyDer<'static>, ConfigError> {
    let pem = contents(field, path)?;
    // The parser's error is not repeated: the file is a secret.
    PrivateKeyDer::from_pem_slice(&pem)
        .or_else(|_| wrong(field, format!("{} has no readable private key in PEM", path.display())))
}

pub(super) fn roots(field: &str, path: &Path) -> Result<RootCertStore, ConfigError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(field, path)? {
        roots.add(certificate).or_else(|error| wrong(field, format!("{}: {error}", path.display())))?;
    }
    Ok(roots)
}
