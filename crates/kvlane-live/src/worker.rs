//! One engine as the gateway knows it: its address, what it serves, how it fares.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_core::endpoint::EndpointId;

use crate::gateway::ModelPool;

/// Names a worker for as long as the gateway runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// Where an engine is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// What stands in the `Host` header.
    pub authority: String,
    /// Put before every path; empty or beginning with '/'.
    pub base_path: String,
}

/// One engine. A worker that serves several models is an endpoint of several pools.
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its URL as given, without a trailing '/': its name everywhere.
    pub url: Arc<str>,
    /// Where it is reached.
    pub address: Address,
    /// The model it was said to serve; otherwise it is asked.
    pub model: Option<String>,
    /// Requests that failed in a row.
    failures: AtomicU32,
    /// A connection was refused since it was last asked: nobody listened there.
    gone: AtomicBool,
    state: Mutex<State>,
}

/// What changes about a worker.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Whether requests are placed there.
    pub healthy: bool,
    /// Good probes in a row.
    pub successes: u32,
    /// It takes no new requests.
    pub draining: bool,
    /// It leaves when its last request is over.
    pub leaving: bool,
    /// Probes that failed in a row.
    pub probe_failures: u32,
    /// Its place in each pool.
    pub seats: Vec<Seat>,
    /// The names under which it serves them.
    pub names: Vec<ServedName>,
    /// What is wrong with it, if anything is.
    pub problem: Option<String>,
}

/// A worker's place in one pool.
#[derive(Clone)]
pub struct Seat {
    /// The pool.
    pub pool: Arc<ModelPool>,
    /// Its id there.
    pub endpoint: EndpointId,
}

/// One name that a worker serves a model under.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedName {
    /// The name.
    pub name: String,
    /// The base model whose pool it belongs to.
    pub base: String,
    /// What the engine tells of it.
    pub card: serde_json::Value,
}

// === impl Address ===

impl Address {
    /// Reads `http://host[:port][/path]`.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn parse(url: &str) -> Result<Self, String> {
        let uri: http::Uri = url.parse().map_err(|error| format!("'{url}' is no URL ({error})"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(scheme) => {
                return Err(format!("'{url}': {scheme} is not spoken to workers, write http://host:port"));
            }
            None => return Err(format!("'{url}' has no scheme, write http://host:port")),
        }
        let authority =
            uri.authority().ok_or_else(|| format!("'{url}' has no host, write http://host:port"))?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err(format!("'{url}' must name a host and no user, write http://host:port"));
        }
        let port = authority.port_u16();
        if port.is_none() && authority.as_str() != authority.host() {
            return Err(format!("'{url}': its port is no number up to 65535, write http://host:port"));
        }
        if port == Some(0) {
            return Err(format!("'{url}': nobody listens on port 0, write http://host:port"));
        }
        if uri.query().is_some() {
            return Err(format!("'{url}' has a query, write http://host:port"));
        }
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).into(),
            port: port.unwrap_or(80),
            authority: authority.as_str().into(),
            base_path: uri.path().trim_end_matches('/').into(),
        })
    }
}

// === impl Worker ===

impl Worker {
    /// A worker nobody has spoken to yet.
    ///
    /// # Errors
    /// What is wrong with the URL, for people.
    pub fn new(id: WorkerId, url: &str, model: Option<String>) -> Result<Self, String> {
        Ok(Self {
            id,
            url: url.trim_end_matches('/').into(),
            address: Address::parse(url)?,
            model,
            failures: AtomicU32::new(0),
            gone: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    /// What changes, under its lock: keep it short.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It refused a connection: whatever answers there next has started since, and its caches are empty.
    pub fn note_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Whether it was gone since this was last asked.
    pub fn take_gone(&self) -> bool {
        self.gone.swap(false, Ordering::Relaxed)
    }

    /// It answered a request.
    pub fn note_success(&self) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// It failed a request: how many in a row by now.
    pub fn note_failure(&self) -> u32 {
        self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("id", &self.id).field("url", &self.url).finish_non_exhaustive()
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("model", &self.pool.model).field("endpoint", &self.endpoint).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_address_is_http_with_a_host() {
        let address = Address::parse("http://[::1]:8000/engines/a/").expect("right");
        assert_eq!(
            (address.host.as_str(), address.port, address.authority.as_str(), address.base_path.as_str()),
            ("::1", 8000, "[::1]:8000", "/engines/a")
        );
        assert_eq!(Address::parse("http://gpu-1").expect("right").port, 80);
    }

    #[test]
    fn any_other_address_is_refused_with_what_to_write() {
        for url in [
            "",
            "gpu-1:8000",
            "https://gpu-1",
            "ftp://x",
            "http://",
            "http://u@h:1",
            "http://h:1?x=1",
            "http://h:x",
            "http://h:",
            "http://[::1]:x",
            "http://h:80000",
        ] {
            let problem = Address::parse(url).expect_err(url);
            assert!(problem.contains(url), "{problem}");
        }
    }
}
