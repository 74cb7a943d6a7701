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
use kvlane_wire::disaggregation::{Connector, Legs, NoParams, REQUEST_ID_HEADER, Split};
use kvlane_wire::server_timing::Stage;
use kvlane_wire::sse::usage_in_json;
use tokio::time::{Instant, sleep_until};

use crate::attempt::{Outcome, Patience};
use crate::attempt_error::{AttemptError, TransferError};
use crate::engine_request::RANK;
use crate::hedge::Sending;
use crate::lease::Lease;
use crate::traces::made_span;
use crate::{kv_source, sidecar};

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
    // A client that leaves from here on is charged.
    lease.sent();
    if connector.legs() == Legs::Decode {
        return sidecar::answer(patience, lease, Some(leg), sending).await;
    }
    let (prefill, room) = (Arc::clone(&leg.worker), made_span().0);
    let found = match kv_source::find(&leg, connector, room).await {
        Ok(found) => found,
        Err(why) => return (lease, no_transfer(why)),
    };
    let mut request_id = sending.account.request_id.to_str().unwrap_or_default().to_owned();
    let mut fields = sending.fields.to_vec();
    if connector == Connector::NixlPush {
        // The engines find one another by it, so two requests to which their client gave the same id must differ.
        request_id += &format!("-{room:016x}");
        fields.push((REQUEST_ID_HEADER, request_id.clone()));
    }
    let mut first_fields = fields.clone();
    first_fields.extend(found.as_ref().and_then(|found| found.rank).map(|rank| (RANK, rank.to_string())));
    let at_once = found.is_some() && connector.legs() == Legs::AtOnce;
    let source = found.map(|found| found.source).unwrap_or_default();
    let split = Split { connector, api, request_id: &request_id, room, source };
    let asked = match split.prefill_body(sending.body) {
        Ok(body) => body,
        Err(_) => return (lease, no_transfer(TransferError::Body)),
    };
    sending.account.timeline.enter(Stage::Prefill);
    let first = Sending { body: &asked, fields: &first_fields, ..*sending };
    let second = Sending { fields: &fields, ..*sending };
    let (lease, outcome) = if at_once {
        both(patience, lease, leg, (&first, &second), &split).await
    } else {
        in_turn(patience, lease, leg, (&first, &second), &split).await
    };
    if !is_success(&outcome) {
        prefill.kv_sources.doubt();
    }
    (lease, outcome)
}

/// First the prompt, then the answer. `second` has the client's body.
async fn in_turn(
    patience: Patience,
    lease: Lease,
    leg: Lease,
    (first, second): (&Sending<'_>, &Sending<'_>),
    split: &Split<'_>,
) -> (Lease, Outcome) {
    let (outcome, said) = prefill(patience, &leg, first).await;
    if !is_success(&outcome) {
        // An error, or the client's own mistake: the other engine would say the same.
        return (failed_leg(&lease, leg, &outcome), outcome);
    }
    kv_source::learn(&leg, split.connector, &split.source, &said);
    then_decode(patience, lease, leg, second, split, &said).await
}

/// The second leg, after the answer to the first.
async fn then_decode(
    patience: Patience,
    mut lease: Lease,
    mut leg: Lease,
    second: &Sending<'_>,
    split: &Split<'_>,
    said: &[u8],
) -> (Lease, Outcome) {
    leg.computed(usage_in_json(said));
    let body = match split.body_after(second.body, said) {
        Ok(body) => body,
        Err(NoParams::Body) => return (lease, no_transfer(TransferError::Body)),
        Err(why) => return (lease, no_transfer(TransferError::NothingToFetch(why))),
    };
    second.account.timeline.enter(Stage::Send);
    let second = Sending { body: &body, ..*second };
    let outcome = in_time(&lease, decode(patience, &lease, &leg.worker, &second)).await;
    // Held until the first token: the prefill engine holds the blocks.
    lease.hold(leg);
    (lease, outcome)
}

/// How two legs sent at once went on.
enum Went {
    /// The second has this outcome.
    Decoded(Outcome),
    /// The first failed.
    Failed(Outcome),
    /// The first was answered, and the blocks are not where the second looks for them.
    Elsewhere(Bytes),
}

/// Both legs at once: the engines find one another.
async fn both(
    patience: Patience,
    mut lease: Lease,
    mut leg: Lease,
    (first, second): (&Sending<'_>, &Sending<'_>),
    split: &Split<'_>,
) -> (Lease, Outcome) {
    let Ok(body) = split.decode_body(second.body, None) else {
        return (lease, no_transfer(TransferError::Body));
    };
    let (asked, worker) = (Sending { body: &body, ..*second }, Arc::clone(&leg.worker));
    let went = {
        let mut decoded = pin!(decode(patience, &lease, &worker, &asked));
        let first = {
            let prefilled = pin!(prefill(patience, &leg, first));
            tokio::select! {
                biased;
                outcome = decoded.as_mut() => Err(outcome),
                prefilled = prefilled => Ok(prefilled),
            }
        };
        match first {
            Err(outcome) => Went::Decoded(outcome),
            Ok((outcome, said)) if is_success(&outcome) => {
                if kv_source::learn(&leg, split.connector, &split.source, &said) {
                    leg.computed(usage_in_json(&said));
                    Went::Decoded(in_time(&lease, decoded).await)
                } else {
                    Went::Elsewhere(said)
                }
            }
            // The other engine would wait without end.
            Ok((failed, _)) => Went::Failed(failed),
        }
    };
    match went {
        Went::Decoded(outcome) => {
            lease.hold(leg);
            (lease, outcome)
        }
        Went::Failed(failed) => (failed_leg(&lease, leg, &failed), failed),
        // The engine was started again since, or has several ranks.
        Went::Elsewhere(said) => then_decode(patience, lease, leg, second, split, &said).await,
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
