//! Waits in tests: for a condition or a future, never for a time.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// How long a test waits for what must come before it counts as failed. Nothing is measured with it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `condition` holds.
///
/// # Panics
/// When it has not come to hold within [`PATIENCE`].
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE;
    let mut ticks = interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !condition() {
        assert!(Instant::now() < give_up, "it never came to hold: {what}");
        ticks.tick().await;
    }
}

/// Waits for `future`.
///
/// # Panics
/// When it has not ended within [`PATIENCE`].
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("it never came: {what}"))
}
