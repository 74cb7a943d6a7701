//! The configuration sections `timeouts`, `retry`, `continuation` and `hedge`.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_core::bounded::Bounded;
pub use kvlane_core::bounded::Share;
use kvlane_core::budget::PerSecond;
use kvlane_core::retry::Backoff;
use kvlane_core::time::Nanos;
use serde::{Deserialize, Serialize};

use kvlane_fleet::routing::Budget;

/// Growth of each pause over the one before it: 1 to 100.
pub type Multiplier = Bounded<1, 100>;

/// How failed attempts are repeated: only before the first byte of a response has been sent to the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// Attempts of one request on one worker before it is sent to another.
    pub max_worker_retries: u32,
    /// Attempts of one request after the first.
    pub max_total_retries: u32,
    /// Pause before the first retry. There is no pause if the attempt before it cost its worker no work: the worker
    /// could not be reached, or was busy.
    #[serde(with = "humantime_serde")]
    pub initial_backoff: Duration,
    /// Longest pause.
    #[serde(with = "humantime_serde")]
    pub max_backoff: Duration,
    /// Factor by which each pause is longer than the one before it.
    pub backoff_multiplier: Multiplier,
    /// Largest random change of a pause, as a share of it.
    pub jitter: Share,
    /// Retries allowed per pool, for all requests together.
    pub budget: Budget,
}

// === impl Retry ===

impl Retry {
    /// The pauses as the core computes them.
    pub fn backoff(&self) -> Backoff {
        let nanos = |span: Duration| Nanos(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
        Backoff {
            initial: nanos(self.initial_backoff),
            max: nanos(self.max_backoff),
            multiplier: self.backoff_multiplier.get(),
            jitter: self.jitter.get(),
        }
    }
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            max_worker_retries: 1,
            max_total_retries: 5,
            initial_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(30),
            backoff_multiplier: Multiplier::of(1.5),
            jitter: Share::of(0.2),
            budget: Budget::default(),
        }
    }
}

/// Whether a stream whose engine dies continues on another endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Continuation {
    /// Whether continuation is on.
    pub enabled: bool,
    /// How often one stream may be continued. Each time costs the pool's retry budget as much as a retry.
    pub max_per_request: u32,
    /// Most bytes of a response, and of an event, that are kept for continuation. A longer response cannot be
    /// continued.
    pub buffer_bytes_max: usize,
}

impl Default for Continuation {
    fn default() -> Self {
        Self { enabled: false, max_per_request: 2, buffer_bytes_max: 1 << 20 }
    }
}

/// Whether a request is sent to a second endpoint when the first is late with a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hedge {
    /// Whether hedging is on.
    pub enabled: bool,
    /// When a first byte is late; if absent, when it takes longer than 95% of recent ones.
    #[serde(with = "humantime_serde")]
    pub delay: Option<Duration>,
    /// Second copies allowed per pool, for all requests together.
    pub budget: Budget,
}

impl Default for Hedge {
    fn default() -> Self {
        Self {
            enabled: false,
            delay: None,
            budget: Budget { share: Share::of(0.05), per_second: PerSecond::of(0.0) },
        }
    }
}

/// Deadlines besides those of [`Server`](super::config::Server), and exceptions by path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// Time an engine has for the first byte of a stream. After it the attempt has failed, and the next is made.
    #[serde(with = "humantime_serde")]
    pub first_byte_timeout: Duration,
    /// Exceptions by path.
    pub routes: BTreeMap<String, RouteTimeouts>,
}

/// The deadlines of one path, where they differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouteTimeouts {
    /// Instead of [`Server::body_timeout`](super::config::Server::body_timeout).
    #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    pub body_timeout: Option<Duration>,
    /// Instead of [`Timeouts::first_byte_timeout`], and for responses that are not streams, too.
    #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    pub first_byte_timeout: Option<Duration>,
    /// Instead of [`Server::stream_idle_timeout`](super::config::Server::stream_idle_timeout), for the worker's silence.
    #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    pub stream_idle_timeout: Option<Duration>,
    /// Instead of [`Server::request_timeout`](super::config::Server::request_timeout).
    #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    pub request_timeout: Option<Duration>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { first_byte_timeout: Duration::from_secs(300), routes: BTreeMap::new() }
    }
}
