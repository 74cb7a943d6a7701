//! A second copy of a request whose first is late, where the operator has switched that on.
//!
//! Only of streams, only before the first byte, only to an endpoint that holds the prompt's prefix, and out of a budget:
//! the scheduler says where, or that it is not to be. Whoever begins to answer first answers. The other is let go, and its
//! engine hears it at once.

use std::pin::{Pin, pin};
use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use tokio::time::sleep;

use super::attempt::{Attempts, Outcome};
use super::forward::request_head;
use super::{Account, Body};
use crate::lease::Lease;
use crate::metrics::Hedged;
use crate::upstream::{Answer, UpstreamError, Upstreams};

/// What is asked, as it is sent to any engine.
pub(super) struct Sending<'a> {
    pub(super) upstreams: &'a Arc<Upstreams>,
    pub(super) parts: &'a Parts,
    pub(super) body: &'a Bytes,
    pub(super) account: &'a Account,
}

/// What two copies came to.
struct Race {
    second: Lease,
    second_won: bool,
    outcome: Outcome,
    /// What the other one failed with, if it did before.
    failed: Option<Outcome>,
}

// === impl Sending ===

impl Sending<'_> {
    async fn send(&self, lease: &Lease) -> Result<Answer, UpstreamError> {
        let head = request_head(self.parts, lease, self.body.len(), self.account);
        self.upstreams.send(&lease.worker, &self.parts.method, &head, self.body, || lease.sent()).await
    }
}

/// What the attempt at `lease` came to, or that of a second copy; `relay` makes an answer of an engine's that cannot.
pub(super) async fn answer(
    attempts: &mut Attempts<'_>,
    lease: Lease,
    sending: &Sending<'_>,
    relay: impl FnOnce(Answer, &Lease) -> Response<Body>,
) -> (Lease, Outcome) {
    let patience = attempts.patience();
    let Some(delay) = attempts.hedge_delay() else {
        let outcome = patience.answer(&lease, sending.send(&lease)).await;
        return (lease, outcome);
    };
    let raced = {
        let mut first = pin!(patience.answer(&lease, sending.send(&lease)));
        let early = tokio::select! {
            biased;
            outcome = first.as_mut() => Some(outcome),
            () = sleep(delay) => None,
        };
        match early {
            Some(outcome) => Err(outcome),
            None => match attempts.hedge(&lease).await {
                None => Err(first.await),
                Some(second) => {
                    let (second_won, outcome, failed) = {
                        let copy = pin!(patience.answer(&second, sending.send(&second)));
                        race(first, copy).await
                    };
                    Ok(Race { second, second_won, outcome, failed })
                }
            },
        }
    };
    let Race { second, second_won, outcome, failed } = match raced {
        Err(outcome) => return (lease, outcome),
        Ok(race) => race,
    };
    if outcome.is_answer() {
        let metrics = &lease.gateway().metrics.faults;
        metrics.note_hedge(if second_won { Hedged::won } else { Hedged::lost });
    }
    let (winner, loser) = if second_won { (second, lease) } else { (lease, second) };
    match failed {
        Some(failed) => attempts.failed(loser, failed, relay),
        // It has done nothing wrong.
        None => drop(loser),
    }
    (winner, outcome)
}

/// The first of two that is an answer, and whether it is the second's; if one fails, what the other one comes to.
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
