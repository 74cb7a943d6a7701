//! The seam to the gateway's own API: admin implements it, the proxy serves it on both ports.

use std::pin::Pin;

use bytes::Bytes;
use http::Response;
use http::request::Parts;

use crate::body::Body;
use crate::error::ApiError;

/// The clients of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// Clients; operators too if only this machine reaches it.
    Clients {
        /// Whether only this machine reaches it.
        loopback: bool,
    },
    /// Operators and Prometheus.
    Operators {
        /// Whether only this machine reaches it.
        loopback: bool,
    },
}

/// A request to the gateway itself, which has been admitted.
pub struct OwnRequest<'a> {
    /// Its head.
    pub parts: &'a Parts,
    /// Its body; empty where none is read.
    pub body: &'a Bytes,
    /// The port it arrived at.
    pub port: Port,
    /// Whether its sender may see the workers.
    pub shows_workers: bool,
}

/// The answer; `None` if the path does not exist.
pub type OwnAnswer<'a> = Pin<Box<dyn Future<Output = Result<Option<Response<Body>>, ApiError>> + Send + 'a>>;

/// Answers requests to the gateway itself: health, models, metrics, admin API.
pub trait OwnApi: Send + Sync {
    /// Answers one request.
    fn answer<'a>(&'a self, request: OwnRequest<'a>) -> OwnAnswer<'a>;
}
