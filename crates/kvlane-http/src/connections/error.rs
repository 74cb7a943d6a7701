//! Why an upstream gave no response.

use std::io;
use std::time::Duration;

/// Why an upstream gave no response. It always happens before the first byte of the body.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// The connection failed.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// No connection within `connect_timeout`.
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    /// An idle connection accepted no byte of the request: the upstream had closed it.
    #[error("the upstream had closed the idle connection: {0}")]
    Stale(io::Error),
    /// The connection broke before a complete head had arrived.
    #[error("the connection broke before a response: {0}")]
    Broken(io::Error),
    /// The bytes received are not HTTP/1.1.
    #[error("the answer is not HTTP/1.1: {0}")]
    Garbage(String),
    /// No response began in time.
    #[error("no response began within {0:?}")]
    Silent(Duration),
}

// === impl UpstreamError ===

impl UpstreamError {
    /// Whether the upstream has received nothing of the request.
    pub const fn is_before_sending(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::ConnectTimeout(_) | Self::Stale(_))
    }
}
