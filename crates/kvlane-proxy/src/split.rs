//! Disaggregated serving: one engine computes a request's prompt, another fetches its KV blocks and decodes the answer.
//!
//! A stage of the way of every request. The scheduler places a split request at two endpoints, so its lease comes with
//! a second one, its prefill leg. What goes wrong before the first token costs the client time only: the request is
//! then served by one engine. A leg that fails is its engine's fault, as any attempt is. A transfer that fails is not:
//! engines report it like any error, and it counts for the pair.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kvlane_fleet::worker::Worker;
use kvlane_http::connections::UpstreamError;
use kvlane_wire::api::Api;
use kvlane_wire::disaggregation::{Connector, Legs, Source, Split, transfer_params};
use kvlane_wire::server_timing::Stage;
use kvlane_wire::sse::usage_in_json;
use tokio::time::{Instant, sleep_until};

use crate::attempt::{Outcome, Patience};
use crate::attempt_error::{AttemptError, TransferError};
use crate::hedge::Sending;
use crate::lease::Lease;
use crate::traces::made_span;

/// Port of an engine's bootstrap server if its worker has none: the default of SGLang and of vLLM's Mooncake connector.
const BOOTSTRAP_PORT: u16 = 8998;
/// Longest answer of a prefill leg: it names each KV block of the prompt.
const PREFILL_ANSWER_BYTES_MAX: usize = 16 << 20;

/// Serves a request by two engines. The outcome is that of the lease returned with it: of the prefill leg if that one
/// failed.
pub(super) async fn answer(
    patience: Patience,
    lease: Lease,
    leg: Lease,
    sending: &Sending<'_>,
    (api, connector): (Api, Connector),
) -> (Lease, Outcome) {
    let prefill = Arc::clone(&leg.worker);
    let request_id = sending.account.request_id.to_str().unwrap_or_default();
    let split = Split { connector, api, request_id, room: made_span().0, source: source_of(&prefill) };
    let asked = match split.prefill_body(sending.body) {
        Ok(body) => body,
        Err(_) => return (lease, no_transfer(TransferError::Body)),
    };
    // A client that leaves from here on is charged.
    lease.sent();
    sending.account.timeline.enter(Stage::Prefill);
    let first = Sending { body: &asked, ..*sending };
    match connector.legs() {
        Legs::InTurn => in_turn(patience, lease, leg, sending, &first, &split).await,
        Legs::AtOnce | Legs::Decode => at_once(patience, lease, leg, sending, &first, &split).await,
    }
}

/// First the prompt, then the answer.
async fn in_turn(
    patience: Patience,
    mut lease: Lease,
    mut leg: Lease,
    sending: &Sending<'_>,
    first: &Sending<'_>,
    split: &Split<'_>,
) -> (Lease, Outcome) {
    let (outcome, said) = prefill(patience, &leg, first).await;
    if !is_success(&outcome) {
        // An error, or the client's own mistake: the other engine would say the same.
        return (failed_leg(&lease, leg, &outcome), outcome);
    }
    leg.computed(usage_in_json(&said));
    let params = match split.connector.relays_params() {
        true => transfer_params(&said).map(Some),
        false => Ok(None),
    };
    let body = match params.map(|params| split.decode_body(sending.body, params)) {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => return (lease, no_transfer(TransferError::Body)),
        Err(why) => return (lease, no_transfer(TransferError::NothingToFetch(why))),
    };
    sending.account.timeline.enter(Stage::Send);
    let second = Sending { body: &body, ..*sending };
    let outcome = in_time(&lease, decode(patience, &lease, &leg.worker, &second)).await;
    // Held until the first token: the prefill engine holds the blocks.
    lease.hold(leg);
    (lease, outcome)
}

/// Both legs at once: the engines find one another.
async fn at_once(
    patience: Patience,
    mut lease: Lease,
    mut leg: Lease,
    sending: &Sending<'_>,
    first: &Sending<'_>,
    split: &Split<'_>,
) -> (Lease, Outcome) {
    let Ok(body) = split.decode_body(sending.body, None) else {
        return (lease, no_transfer(TransferError::Body));
    };
    let (second, worker) = (Sending { body: &body, ..*sending }, Arc::clone(&leg.worker));
    let end = {
        let mut decoded = pin!(decode(patience, &lease, &worker, &second));
        let first = {
            let prefilled = pin!(prefill(patience, &leg, first));
            tokio::select! {
                biased;
                outcome = decoded.as_mut() => Err(outcome),
                prefilled = prefilled => Ok(prefilled),
            }
        };
        match first {
            Err(outcome) => Ok(outcome),
            Ok((outcome, said)) if is_success(&outcome) => {
                leg.computed(usage_in_json(&said));
                Ok(in_time(&lease, decoded).await)
            }
            // The other engine would wait without end.
            Ok((failed, _)) => Err(failed),
        }
    };
    match end {
        Ok(outcome) => {
            lease.hold(leg);
            (lease, outcome)
        }
        Err(failed) => (failed_leg(&lease, leg, &failed), failed),
    }
}

/// The prefill leg, whose outcome is the attempt's. Of an engine that fails it the client is not charged, whose charge
/// is the other lease's.
fn failed_leg(lease: &Lease, leg: Lease, outcome: &Outcome) -> Lease {
    if !outcome.is_answer() {
        lease.lost();
    }
    leg
}

fn is_success(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Answered(answer) if answer.status.is_success())
}

/// Where the prefill engine is, for connectors that need to be told.
fn source_of(prefill: &Worker) -> Source<'_> {
    Source {
        host: prefill.upstream.address.host.as_str().into(),
        port: prefill.spec.bootstrap_port.unwrap_or(BOOTSTRAP_PORT),
        ..Source::default()
    }
}

fn no_transfer(error: TransferError) -> Outcome {
    Outcome::Broken(AttemptError::Transfer(error))
}

/// Has the prompt computed. Returns the whole answer and its body.
async fn prefill(patience: Patience, leg: &Lease, sending: &Sending<'_>) -> (Outcome, Bytes) {
    let mut body = BytesMut::new();
    let sent = async {
        let mut answer = sending.send(leg).await?;
        // The text of an error says whose fault it is, and is read for that.
        while answer.status.is_success()
            && let Some(piece) = poll_fn(|cx| answer.body.poll_piece(cx)).await
        {
            body.extend_from_slice(&piece.map_err(UpstreamError::Broken)?);
            if body.len() > PREFILL_ANSWER_BYTES_MAX {
                return Err(UpstreamError::Garbage("a prefill answer of more than 16 MiB".into()));
            }
        }
        Ok(answer)
    };
    let outcome = patience.answer(leg, sent).await;
    (outcome, body.freeze())
}

/// Has the answer decoded, for as long as the engine runs that has the blocks.
async fn decode(patience: Patience, lease: &Lease, prefill: &Worker, sending: &Sending<'_>) -> Outcome {
    tokio::select! {
        biased;
        outcome = patience.answer(lease, sending.send(lease)) => outcome,
        () = prefill.unfit() => no_transfer(TransferError::PrefillGone),
    }
}

/// Waits for an answer whose prompt is computed. A stream must begin in time; of a whole answer it cannot be seen when
/// its blocks have arrived.
async fn in_time(lease: &Lease, decoded: impl Future<Output = Outcome>) -> Outcome {
    let limit = lease.proxy().fleet.settings().disaggregation.transfer_timeout;
    let due = Instant::now() + limit;
    tokio::select! {
        biased;
        outcome = decoded => outcome,
        () = sleep_until(due), if lease.streams() => no_transfer(TransferError::Late(limit)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::testing::World;

    #[tokio::test(start_paused = true)]
    async fn a_transfer_is_late_by_its_own_time_only() {
        let world = World::new(1);
        let lease = world.lease().await;
        let limit = world.proxy.fleet.settings().disaggregation.transfer_timeout;
        let answered = |within: Duration| async move {
            let _ = timeout(within, std::future::pending::<()>()).await;
            Outcome::Late(within)
        };
        // The legs are sent at once, and the prompt takes ten times as long as a transfer may.
        let decoded = answered(10 * limit + limit / 2);
        let mut decoded = pin!(decoded);
        assert!(timeout(10 * limit, decoded.as_mut()).await.is_err(), "the prompt is not computed");
        assert!(matches!(in_time(&lease, decoded).await, Outcome::Late(_)), "half of the time was left");
        let late = in_time(&lease, answered(2 * limit)).await;
        assert!(matches!(late, Outcome::Broken(AttemptError::Transfer(TransferError::Late(_)))));
    }
}
