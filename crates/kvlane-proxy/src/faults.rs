//! The configuration sections `timeouts`, `retry`, `continuation` and `hedge`.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_core::bounded::Bounded;
pub use kvlane_core::bounded::Share;
use kvlane_core::budget;
use kvlane_core::config::{TIME, TIME_OR_ZERO};
use kvlane_core::retry::Backoff;
use kvlane_core::section;

/// Growth of each pause over the one before it: 1 to 100.
pub type Multiplier = Bounded<1, 100>;

section! {
    /// How failed attempts are repeated: only before the first byte of a response has been sent to the client.
    pub struct Retry {
        /// Attempts of one request on one worker before another worker is tried.
        pub max_worker_retries: u32 = 1, in 1..=u32::MAX;
        /// Maximum retries of one request.
        pub max_total_retries: u32 = 5;
        /// Pause before the first retry. None if the attempt cost its worker no work: it could not be reached, or was
        /// busy.
        #[serde(with = "humantime_serde")]
        pub initial_backoff: Duration = Duration::from_millis(50), in TIME_OR_ZERO;
        /// Longest pause before a retry.
        #[serde(with = "humantime_serde")]
        pub max_backoff: Duration = Duration::from_secs(30), in TIME_OR_ZERO;
        /// Factor from each pause to the next.
        pub backoff_multiplier: Multiplier = Multiplier::of(1.5);
        /// Random share by which a pause is longer or shorter.
        pub jitter: Share = Share::of(0.2);
        /// Retry budget of a pool.
        pub budget: budget::Config = budget::Config::default();
    }
}

// === impl Retry ===

impl Retry {
    /// The pauses as the core computes them.
    pub fn backoff(&self) -> Backoff {
        Backoff {
            initial: self.initial_backoff.into(),
            max: self.max_backoff.into(),
            multiplier: self.backoff_multiplier.get(),
            jitter: self.jitter.get(),
        }
    }
}

section! {
    /// Whether a stream whose engine dies continues on another endpoint.
    pub struct Continuation {
        /// Whether continuation is on.
        pub enabled: bool = false;
        /// Maximum continuations of one stream. Each is charged to the retry budget.
        pub max_per_request: u32 = 2, in 1..=100;
        /// Maximum bytes kept of an answer, and of an event. A longer answer cannot be continued.
        pub buffer_bytes_max: usize = 1 << 20, in 1 << 10..=1 << 30;
    }
}

section! {
    /// Whether a request is sent to a second endpoint when the first is late with a stream.
    pub struct Hedge {
        /// Whether hedging is on.
        pub enabled: bool = false;
        /// Time after which a first byte is late; null: the 95th percentile of recent times to first token.
        #[serde(with = "humantime_serde")]
        pub delay: Option<Duration> = None, in TIME_OR_ZERO;
        /// Budget of second copies of a pool.
        pub budget: budget::Config = budget::Config::HEDGES;
    }
}

section! {
    /// Deadlines besides those of the section `server`, and exceptions by path.
    pub struct Timeouts {
        /// Timeout of the first byte of a stream; then another endpoint is tried. An answer that is not streamed has
        /// the whole request's time.
        #[serde(with = "humantime_serde")]
        pub first_byte_timeout: Duration = Duration::from_secs(300), in TIME;
        /// Timeouts per path, matched exactly, as in `/v1/embeddings: {first_byte_timeout: 10s, request_timeout: 30s}`.
        pub routes: BTreeMap<String, RouteTimeouts> = BTreeMap::new(), in 0..=1000;
    }
}

section! {
    /// The deadlines of one path, where they differ.
    pub struct RouteTimeouts {
        /// Instead of `server.body_timeout`.
        #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
        pub body_timeout: Option<Duration> = None, in TIME;
        /// Instead of `timeouts.first_byte_timeout`, also for answers that are not streamed.
        #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
        pub first_byte_timeout: Option<Duration> = None, in TIME;
        /// Instead of `server.stream_idle_timeout`, for the worker's silence.
        #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
        pub stream_idle_timeout: Option<Duration> = None, in TIME;
        /// Instead of `server.request_timeout`.
        #[serde(with = "humantime_serde", skip_serializing_if = "Option::is_none")]
        pub request_timeout: Option<Duration> = None, in TIME;
    }
}
