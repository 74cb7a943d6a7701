//! One server that requests are sent to: its address, its key, and whether it refuses connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::pki_types::ServerName;

use crate::address::{Address, worker_name};
use crate::network::Allowed;
use crate::secret::Secret;

/// Identifies an upstream among the connections of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UpstreamId(pub u64);

/// A server that requests are sent to.
pub struct Upstream {
    /// Its id.
    pub id: UpstreamId,
    /// Its URL as given, without a trailing `/` or `/v1`.
    pub url: Arc<str>,
    /// Where it is reached.
    pub address: Address,
    /// The name in its certificate, if that is not its host.
    pub tls_server_name: Option<String>,
    /// The value of the `Authorization` header that it gets: `Bearer` and its key.
    authorization: ArcSwapOption<String>,
    /// The networks its address must be in, checked at every connection; none: any address.
    allowed: Option<Arc<ArcSwap<Allowed>>>,
    /// A connection failed since [`take_gone`](Self::take_gone) was called.
    gone: AtomicBool,
    /// Ends of its process that were noticed.
    ends: AtomicU64,
}

// === impl Upstream ===

impl Upstream {
    /// An upstream at `url`. With `allowed`, it is connected to only while its address is in one of those networks.
    ///
    /// # Errors
    /// What is wrong with the URL or the key.
    pub fn new(
        id: UpstreamId,
        url: &str,
        key: Option<&Secret>,
        allowed: Option<Arc<ArcSwap<Allowed>>>,
    ) -> Result<Self, String> {
        // The URL as it was written is parsed too, so that an error quotes it.
        let address = Address::parse(url).and_then(|_| Address::parse(worker_name(url)))?;
        let authorization = ArcSwapOption::from_pointee(key.map(authorization_of).transpose()?);
        let (url, gone) = (worker_name(url).into(), AtomicBool::new(false));
        let ends = AtomicU64::new(0);
        Ok(Self { id, url, address, tls_server_name: None, authorization, allowed, gone, ends })
    }

    /// The same, with a certificate for another name than its host's, such as that of which its address was resolved.
    ///
    /// # Errors
    /// The name is no name of a certificate.
    pub fn with_tls_server_name(mut self, name: Option<&str>) -> Result<Self, String> {
        if let Some(name) = name
            && ServerName::try_from(name).is_err()
        {
            return Err(format!(
                "tls_server_name: '{name}' is not a host name, write the name in the certificate"
            ));
        }
        self.tls_server_name = name.map(str::to_owned);
        Ok(self)
    }

    /// The value of its `Authorization` header.
    pub fn authorization(&self) -> Option<Arc<String>> {
        self.authorization.load_full()
    }

    /// Replaces its key.
    ///
    /// # Errors
    /// Why the key cannot be read; the upstream keeps the previous one.
    pub fn set_key(&self, key: Option<&Secret>) -> Result<(), String> {
        let authorization = key.map(authorization_of).transpose()?;
        self.authorization.store(authorization.map(Arc::new));
        Ok(())
    }

    /// The networks its address must be in.
    pub fn allowed(&self) -> Option<&Arc<ArcSwap<Allowed>>> {
        self.allowed.as_ref()
    }

    /// Notes that a connection to it failed: a process that answers there later has started since, with empty caches.
    pub fn note_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Whether a connection failed since [`take_gone`](Self::take_gone) was called.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Notes that its process has ended: its port refuses connections, or another process answers. What that process had
    /// in memory is lost.
    pub fn note_end(&self) {
        self.ends.fetch_add(1, Ordering::Relaxed);
    }

    /// How often its process was found to have ended. While the number stays, a process that has been reached has lost
    /// nothing, as far as is known.
    pub fn ends(&self) -> u64 {
        self.ends.load(Ordering::Relaxed)
    }

    /// Whether a connection failed since this was called last.
    pub fn take_gone(&self) -> bool {
        self.gone.swap(false, Ordering::Relaxed)
    }
}

fn authorization_of(key: &Secret) -> Result<String, String> {
    let key = key.read().map_err(|problem| format!("api_key: {problem}"))?;
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("api_key: only visible ASCII characters are allowed".into());
    }
    Ok(format!("Bearer {key}"))
}
