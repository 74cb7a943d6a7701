//! Waits in tests: for a condition or a future, never for a time.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// How long a test waits before it fails. It is not a measurement.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `condition` holds.
///
/// # Panics
/// The condition does not hold within [`PATIENCE`].
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    let mut ticks = interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !condition() {
        assert!(Instant::now() < give_up, "condition not met in time: {what}");
        ticks.tick().await;
    }
}

/// Waits for `future`.
///
/// # Panics
/// It does not complete within [`PATIENCE`].
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("not completed in time: {what}"))
}
