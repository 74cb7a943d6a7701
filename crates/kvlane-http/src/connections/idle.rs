//! The idle connections of one thread.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use super::config::ConnectionsConfig;
use crate::tls::Stream;
use crate::upstream::UpstreamId;

/// Idle time from which on the kernel is asked whether the upstream has closed the connection. Up to then the runtime's own
/// readiness is used.
const LOOKED_AT_AFTER: Duration = Duration::from_millis(10);

/// Connections without a request, by upstream; the one used last is the last.
pub(super) struct IdleConnections {
    pub(super) config: ArcSwap<ConnectionsConfig>,
    by_upstream: Mutex<HashMap<UpstreamId, Vec<Idle>>>,
}

pub(super) struct Idle {
    pub(super) stream: Stream,
    pub(super) since: Instant,
}

// === impl IdleConnections ===

impl IdleConnections {
    pub(super) fn new(config: ConnectionsConfig) -> Self {
        Self { config: ArcSwap::from_pointee(config), by_upstream: Mutex::default() }
    }

    pub(super) fn all(&self) -> MutexGuard<'_, HashMap<UpstreamId, Vec<Idle>>> {
        self.by_upstream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take(&self, upstream: UpstreamId) -> Option<Stream> {
        let idle_timeout = self.config.load().idle_timeout;
        let mut idle = self.all();
        let connections = idle.get_mut(&upstream)?;
        while let Some(Idle { mut stream, since }) = connections.pop() {
            let idle = since.elapsed();
            if idle > idle_timeout {
                // The most recently used one is too old, so all are.
                connections.clear();
                return None;
            }
            if (idle < LOOKED_AT_AFTER && stream.seems_silent()) || stream.is_silent() {
                return Some(stream);
            }
        }
        None
    }

    pub(super) fn sweep(&self, upstream: UpstreamId) {
        let idle_timeout = self.config.load().idle_timeout;
        let mut idle = self.all();
        if let Some(connections) = idle.get_mut(&upstream) {
            connections.retain(|connection| connection.since.elapsed() <= idle_timeout);
        }
    }

    pub(super) fn put(&self, upstream: UpstreamId, stream: Stream) {
        let mut idle = self.all();
        let connections = idle.entry(upstream).or_default();
        if connections.len() < self.config.load().idle_max {
            connections.push(Idle { stream, since: Instant::now() });
        }
    }
}
