//! The gateway's clock, which gives the core its time. Deadlines of sockets and queues use the runtime's own timers.

use std::time::{SystemTime, UNIX_EPOCH};

use kvlane_core::time::Nanos;
use kvlane_tokens::UnixTime;
use tokio::time::Instant;

/// Monotonic time since the gateway's start.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    /// Clock seconds per real second.
    speed: f64,
}

// === impl Clock ===

impl Clock {
    /// A clock that starts at zero and advances `speed` seconds per second.
    pub fn start(speed: f64) -> Self {
        Self { origin: Instant::now(), speed }
    }

    /// Time since the start.
    pub fn now(&self) -> Nanos {
        self.at(Instant::now())
    }

    /// The clock's time at that moment.
    pub fn at(&self, moment: Instant) -> Nanos {
        // Rounded to microseconds: nothing here is more exact, and recordings are shorter.
        let nanos =
            u64::try_from((moment - self.origin).as_micros()).unwrap_or(u64::MAX).saturating_mul(1000);
        // The casts saturate.
        Nanos(if self.speed == 1.0 { nanos } else { (nanos as f64 * self.speed) as u64 })
    }
}

/// Seconds since 1970, by the machine's clock.
pub fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The current date, for chat templates that print it.
pub fn date() -> UnixTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    UnixTime(i64::try_from(since).unwrap_or(i64::MAX))
}
