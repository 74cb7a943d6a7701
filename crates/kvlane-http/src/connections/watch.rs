//! Detects a dead upstream by its idle connections: a process that dies closes them all, long before the next probe.

use std::future::pending;
use std::io;
use std::time::Duration;

use tokio::time::timeout;

use super::Connections;
use super::idle::{Idle, IdleConnections};
use crate::tls::Stream;
use crate::upstream::{Upstream, UpstreamId};

/// Time to wait for a refusal: a reachable machine refuses at once, and a retry waits for it.
const REFUSAL_WITHIN: Duration = Duration::from_millis(100);

/// An idle connection that is being watched. It returns to the pool unless it was closed.
struct Watched<'a> {
    home: &'a IdleConnections,
    upstream: UpstreamId,
    idle: Option<Idle>,
}

// === impl Connections ===

impl Connections {
    /// Waits until the upstream closes the connection that was used last, while that is idle; forever if there is none.
    pub async fn closed(&self, upstream: UpstreamId) {
        let newest = self.idle.all().get_mut(&upstream).and_then(Vec::pop);
        let mut watched = Watched { home: &self.idle, upstream, idle: newest };
        let Some(Idle { stream, .. }) = &mut watched.idle else { return pending().await };
        while stream.tcp().readable().await.is_ok() && stream.is_silent() {}
        watched.idle = None;
    }

    /// Whether the upstream refuses connections: its process is gone.
    pub async fn refuses(&self, upstream: &Upstream) -> bool {
        let connected = timeout(REFUSAL_WITHIN, self.connect(upstream)).await;
        matches!(connected, Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Whether the upstream accepts a connection. The connection is kept in the pool.
    pub async fn is_there(&self, upstream: &Upstream) -> bool {
        let connect_timeout = self.idle.config.load().connect_timeout;
        let connected: io::Result<Stream> = timeout(connect_timeout, self.connect(upstream))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        connected.map(|stream| self.idle.put(upstream.id, stream)).is_ok()
    }
}

// === impl Watched ===

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if let Some(idle) = self.idle.take() {
            self.home.all().entry(self.upstream).or_default().push(idle);
        }
    }
}
