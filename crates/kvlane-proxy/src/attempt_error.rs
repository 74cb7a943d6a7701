//! Why an attempt at an engine brought no response.

use kvlane_http::connections::UpstreamError;

use kvlane_fleet::metrics::FailureKind;

/// Why an attempt brought no response. It always happens before the client has received anything.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The connection or the response failed.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// The engine is stalled.
    #[error("its engine stopped making progress before any content arrived")]
    Stalled,
    /// The worker's probes fail.
    #[error("its health probes failed before a response began")]
    Unfit,
}

// === impl AttemptError ===

impl AttemptError {
    /// Its label in metrics and traces.
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Upstream(error) => match error {
                UpstreamError::Connect(_) | UpstreamError::Stale(_) => FailureKind::connect,
                UpstreamError::ConnectTimeout(_) => FailureKind::connect_timeout,
                UpstreamError::Broken(_) => FailureKind::broken,
                UpstreamError::Garbage(_) => FailureKind::garbage,
                UpstreamError::Silent(_) => FailureKind::timeout,
            },
            Self::Unfit => FailureKind::unfit,
            Self::Stalled => FailureKind::stalled,
        }
    }

    /// Whether it is a timeout.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Upstream(UpstreamError::ConnectTimeout(_) | UpstreamError::Silent(_)))
    }

    /// Whether the connection broke after the worker may have received the request.
    pub fn is_broken_connection(&self) -> bool {
        matches!(self, Self::Upstream(UpstreamError::Broken(_)))
    }

    /// Whether the worker has received no byte of the request.
    pub fn is_before_sending(&self) -> bool {
        matches!(self, Self::Upstream(error) if error.is_before_sending())
    }
}
