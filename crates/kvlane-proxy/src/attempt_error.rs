//! Why an attempt at an engine brought no response.

use std::time::Duration;

use http::StatusCode;
use kvlane_http::connections::UpstreamError;

use kvlane_fleet::metrics::FailureKind;
use kvlane_wire::disaggregation::NoParams;

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
    /// The KV blocks that another worker computed did not arrive.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// Why a worker did not get the KV blocks of a split request. Neither worker is to blame for certain.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The request cannot be changed as its prefill needs it.
    #[error("its body cannot be split")]
    Body,
    /// The prefill answer does not say where the blocks are.
    #[error(transparent)]
    NothingToFetch(NoParams),
    /// The prefill worker's bootstrap server does not tell its engine's id.
    #[error(
        "the prefill worker's engine id is unknown: {0}; set the worker's bootstrap_port to that of its engine"
    )]
    Bootstrap(String),
    /// The decode worker's sidecar, or an engine behind it, reports an error.
    #[error(
        "the decode worker's sidecar answered {0}: it may not reach the prefill or encode worker, or not be allowed to"
    )]
    Sidecar(StatusCode),
    /// No token arrived in time.
    #[error("no token arrived within {0:?} of the prefill (disaggregation.transfer_timeout)")]
    Late(Duration),
    /// The prefill worker is no longer healthy.
    #[error("the prefill worker's health probes failed before a response began")]
    PrefillGone,
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
            Self::Transfer(_) => FailureKind::transfer,
        }
    }

    /// Whether it is a timeout.
    pub fn is_timeout(&self) -> bool {
        matches!(
            self,
            Self::Upstream(UpstreamError::ConnectTimeout(_) | UpstreamError::Silent(_))
                | Self::Transfer(TransferError::Late(_))
        )
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
