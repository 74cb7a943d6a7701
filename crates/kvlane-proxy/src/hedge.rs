//! Hedging: a second copy of a request whose first copy is late, if the operator has switched it on.
//!
//! Only for streams, only before the first content, only once the first copy has waited for as long as the second is
//! expected to take, and within a budget: the scheduler selects the endpoint, or refuses. The first response wins.
//! The other attempt is dropped, which cancels it at its engine at once.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use kvlane_fleet::metrics::Hedged;
use kvlane_http::address::Protocol;
use kvlane_http::connections::{Answer, Connections, Upload, UpstreamError};
use kvlane_wire::api::Api;
use kvlane_wire::engine::calls::with_rank;
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::account::Account;
use crate::attempt::{Attempts, Outcome};
use crate::body::Body;
use crate::engine_request::{Field, Framing, call_head, request_head};
use crate::lease::Lease;
use crate::realtime;

/// Most requests to the scheduler for a second endpoint.
const ASKED_MAX: u32 = 8;

/// The request as it is sent to any engine.
pub(super) struct Sending<'a> {
    pub(super) upstreams: &'a Arc<Connections>,
    pub(super) parts: &'a Parts,
    pub(super) body: &'a Bytes,
    pub(super) account: &'a Account,
    /// Header fields of its own, instead of others of their names.
    pub(super) fields: &'a [Field],
    /// The body in its place, if it is sent while it arrives.
    pub(super) upload: Option<&'a Mutex<Upload>>,
}

/// The outcome of two copies.
struct Race {
    second: Lease,
    second_won: bool,
    outcome: Outcome,
    /// The outcome of the other copy, if it failed before.
    failed: Option<Outcome>,
}

// === impl Sending ===

impl Sending<'_> {
    pub(super) async fn send(&self, lease: &Lease) -> Result<Answer, UpstreamError> {
        let (upstream, method, sending) = (&lease.worker.upstream, &self.parts.method, || lease.sent());
        if upstream.address.protocol == Protocol::Grpc {
            return Box::pin(self.call(lease)).await;
        }
        if let Some(upload) = self.upload {
            return Box::pin(self.send_upload(upload, lease)).await;
        }
        let framing = Framing::Length(self.body.len() as u64);
        let head = request_head(self.parts, lease, framing, self.account, self.fields);
        if realtime::asks_to_switch(self.parts) {
            return self.upstreams.send_switching(upstream, method, &head, sending).await;
        }
        self.upstreams.send(upstream, method, &head, self.body, sending).await
    }

    async fn call(&self, lease: &Lease) -> Result<Answer, UpstreamError> {
        let head = call_head(self.parts, lease, self.account);
        let head = head.map_err(|error| UpstreamError::Garbage(error.to_string()))?;
        let is_pinned = self.account.api() == Some(Api::EngineGenerate);
        let body = match lease.endpoint.number.filter(|_| is_pinned) {
            Some(rank) => with_rank(self.body, rank),
            None => self.body.clone(),
        };
        self.upstreams.send_http2(&lease.worker.upstream, &head, &body, || lease.sent()).await
    }

    async fn send_upload(&self, upload: &Mutex<Upload>, lease: &Lease) -> Result<Answer, UpstreamError> {
        let mut upload = upload.lock().await;
        let framing = upload.length().map_or(Framing::Chunked, Framing::Length);
        let head = request_head(self.parts, lease, framing, self.account, self.fields);
        let (upstream, method) = (&lease.worker.upstream, &self.parts.method);
        lease.expects_nothing();
        let written = || lease.expects_progress();
        self.upstreams.send_upload(upstream, method, &head, (&mut upload, &written), || lease.sent()).await
    }
}

/// The outcome of the attempt at `lease`, or of a second copy; `relay` makes the client's response of an engine's bad
/// one.
pub(super) async fn answer(
    attempts: &mut Attempts<'_>,
    lease: Lease,
    sending: &Sending<'_>,
    relay: impl FnOnce(Answer, &Lease) -> Response<Body>,
) -> (Lease, Outcome) {
    let patience = attempts.patience();
    match attempts.hedge_delay() {
        None => {
            let outcome = patience.answer(&lease, sending.send(&lease)).await;
            (lease, outcome)
        }
        // Boxed, because it is rare and takes much more memory than the rest.
        Some(delay) => Box::pin(hedged(attempts, lease, sending, relay, delay)).await,
    }
}

/// Like [`answer`], with a second copy after `delay`.
async fn hedged(
    attempts: &mut Attempts<'_>,
    lease: Lease,
    sending: &Sending<'_>,
    relay: impl FnOnce(Answer, &Lease) -> Response<Body>,
    delay: Duration,
) -> (Lease, Outcome) {
    let patience = attempts.patience();
    let raced = {
        let mut first = pin!(patience.answer(&lease, sending.send(&lease)));
        match second(attempts, &lease, first.as_mut(), delay).await {
            SecondCopy::NotNeeded(outcome) => Err(outcome),
            SecondCopy::Refused => {
                attempts.is_not_hedged();
                Err(first.await)
            }
            SecondCopy::Placed(second) => {
                let (second_won, outcome, failed) = {
                    let copy = pin!(patience.answer(&second, sending.send(&second)));
                    race(first, copy).await
                };
                Ok(Race { second, second_won, outcome, failed })
            }
        }
    };
    let Race { second, second_won, outcome, failed } = match raced {
        Err(outcome) => return (lease, outcome),
        Ok(race) => race,
    };
    if outcome.is_answer() {
        let metrics = &lease.proxy().fleet.metrics.faults;
        metrics.note_hedge(if second_won { Hedged::won } else { Hedged::lost });
    }
    let (winner, loser) = if second_won { (second, lease) } else { (lease, second) };
    match failed {
        Some(failed) => attempts.failed(loser, failed, relay),
        // The slower attempt has not failed.
        None => drop(loser),
    }
    (winner, outcome)
}

/// The second copy.
enum SecondCopy {
    /// Not needed: the first copy has an outcome.
    NotNeeded(Outcome),
    /// Refused.
    Refused,
    /// Placed.
    Placed(Lease),
}

/// Waits for the first copy, and after `delay` requests an endpoint for a second one, again if it was too early.
async fn second(
    attempts: &mut Attempts<'_>,
    lease: &Lease,
    mut first: Pin<&mut impl Future<Output = Outcome>>,
    mut delay: Duration,
) -> SecondCopy {
    for _ in 0..ASKED_MAX {
        tokio::select! {
            biased;
            outcome = first.as_mut() => return SecondCopy::NotNeeded(outcome),
            () = sleep(delay) => {}
        }
        match attempts.hedge(lease).await {
            Ok(second) => return SecondCopy::Placed(second),
            Err(Some(early)) => delay = early,
            Err(None) => return SecondCopy::Refused,
        }
    }
    SecondCopy::Refused
}

/// The first success of two attempts, and whether it is the second's; if one fails, the outcome of the other.
async fn race(
    mut first: Pin<&mut impl Future<Output = Outcome>>,
    mut second: Pin<&mut impl Future<Output = Outcome>>,
) -> (bool, Outcome, Option<Outcome>) {
    tokio::select! {
        biased;
        outcome = first.as_mut() => match outcome.is_answer() {
            true => (false, outcome, None),
            false => (true, second.await, Some(outcome)),
        },
        outcome = second.as_mut() => match outcome.is_answer() {
            true => (true, outcome, None),
            false => (false, first.await, Some(outcome)),
        },
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::bounded::Share;
    use kvlane_core::budget::PerSecond;
    use kvlane_fleet::settings;

    use super::*;
    use crate::deadlines::Deadlines;
    use crate::settings::Settings;
    use crate::testing::{World, answer};

    const DELAY: Duration = Duration::from_secs(1);

    /// What becomes of a second copy beside a first one that ends with `first`, in a pool of this many workers.
    async fn copy(workers: u64, budget: f64, first: impl Future<Output = Outcome>) -> SecondCopy {
        let mut of_fleet = settings::Settings::default();
        of_fleet.hedges.share = Share::of(budget);
        of_fleet.hedges.per_second = PerSecond::of(budget);
        let world = World::with(workers, Settings::default(), of_fleet);
        let routed = world.routed();
        let deadlines = Deadlines::of(&Settings::default(), "");
        let mut attempts = Attempts::new(&world.proxy, &routed, Arc::default(), deadlines);
        let lease = attempts.place().await.expect("an endpoint");
        let second = second(&mut attempts, &lease, pin!(first), DELAY).await;
        if let SecondCopy::Placed(second) = &second {
            assert_ne!(second.worker.id, lease.worker.id, "it goes to another worker");
        }
        second
    }

    fn never() -> impl Future<Output = Outcome> {
        std::future::pending()
    }

    /// An attempt that ends after `delay`.
    async fn late(delay: Duration) -> Outcome {
        let _ = tokio::time::timeout(delay, std::future::pending::<()>()).await;
        Outcome::Late(delay)
    }

    async fn answered(status: u16) -> Outcome {
        let (answer, _) = answer(&format!("HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n")).await;
        Outcome::of(answer.map(|answer| (answer, None)).map_err(Into::into))
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_is_placed_only_if_the_first_is_late() {
        assert!(matches!(copy(2, 1.0, late(DELAY / 2)).await, SecondCopy::NotNeeded(_)));
        assert!(matches!(copy(2, 1.0, late(DELAY)).await, SecondCopy::NotNeeded(_)), "both at once");
        assert!(matches!(copy(2, 1.0, never()).await, SecondCopy::Placed(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_is_refused_without_another_worker_or_budget() {
        assert!(matches!(copy(1, 1.0, never()).await, SecondCopy::Refused));
        assert!(matches!(copy(2, 0.0, never()).await, SecondCopy::Refused));
    }

    #[tokio::test]
    async fn the_first_success_wins_and_a_failure_waits_for_the_other_copy() {
        let raced = race(pin!(answered(200)), pin!(never())).await;
        assert!(matches!(raced, (false, Outcome::Answered(_), None)));
        let raced = race(pin!(never()), pin!(answered(200))).await;
        assert!(matches!(raced, (true, Outcome::Answered(_), None)));
        let raced = race(pin!(answered(503)), pin!(answered(200))).await;
        assert!(matches!(raced, (true, Outcome::Answered(_), Some(Outcome::Busy(_)))));
        let raced = race(pin!(late(DELAY)), pin!(answered(502))).await;
        assert!(matches!(raced, (false, Outcome::Late(_), Some(Outcome::Unable(_)))));
    }
}
