//! The configuration of the request path.

use std::time::Duration;

use crate::attributes;
use crate::auth::config::Security;
use crate::config::Server;
use crate::faults::{Continuation, Hedge, Retry, Timeouts};
use crate::limits::config::LimitSpec;
use crate::objectives::ObjectiveSpec;
use crate::traces::config::Tracing;

/// The sections of the configuration that the proxy reads.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `server`.
    pub server: Server,
    /// `timeouts`.
    pub timeouts: Timeouts,
    /// `retry`.
    pub retry: Retry,
    /// `continuation`.
    pub continuation: Continuation,
    /// `hedge`.
    pub hedge: Hedge,
    /// `hints`.
    pub attributes: attributes::Config,
    /// `auth`.
    pub auth: Security,
    /// `limits`.
    pub limits: Vec<LimitSpec>,
    /// `objectives`.
    pub objectives: Vec<ObjectiveSpec>,
    /// `tracing`.
    pub tracing: Tracing,
    /// `health.interval`: how soon a worker that is down may be up again.
    pub probe_interval: Duration,
}
