//! Waits in tests: for a condition or a future, never for a time.

use std::future::poll_fn;
use std::io::ErrorKind;
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::yield_now;
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

/// A listener on a port that was in use until a moment ago: a socket closes when its tasks have ended.
///
/// # Panics
/// Another program has taken the port.
pub(super) async fn listen_again(address: &str) -> TcpListener {
    let free = async || loop {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == ErrorKind::AddrInUse => yield_now().await,
            bound => return bound,
        }
    };
    soon("its port is free", free()).await.expect("a listener")
}

/// Waits for `future`.
///
/// # Panics
/// It does not complete within [`PATIENCE`].
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("not completed in time: {what}"))
}

/// Waits for the first of several futures; returns its index, too.
pub(super) async fn first_of<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> (usize, T) {
    let mut waiting: Vec<_> = futures.map(Box::pin).collect();
    poll_fn(|cx| {
        let polled = waiting.iter_mut().enumerate().map(|(n, future)| (n, future.as_mut().poll(cx)));
        let mut ready = polled.filter_map(|(n, poll)| match poll {
            Poll::Ready(value) => Some((n, value)),
            Poll::Pending => None,
        });
        ready.next().map_or(Poll::Pending, Poll::Ready)
    })
    .await
}
