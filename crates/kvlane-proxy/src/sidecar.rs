//! llm-d's routing sidecar: it stands in front of a decode engine, and sends a request's other legs itself, to the
//! engines that headers name.

use std::pin::pin;
use std::time::Duration;

use http::StatusCode;
use kvlane_core::disaggregation::Role;
use kvlane_fleet::pool::ModelPool;
use kvlane_wire::api::Api;
use kvlane_wire::disaggregation::{Connector, ENCODERS_HEADER, PREFILLER_HEADER, has_media};
use tokio::time::sleep;

use crate::attempt::{Outcome, Patience};
use crate::attempt_error::{AttemptError, TransferError};
use crate::engine_request::Field;
use crate::hedge::Sending;
use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::traces::made_span;

/// Most encode workers that a request names; llm-d's sidecar spreads the media of a chat over them.
const ENCODERS_MAX: usize = 8;

/// Places of the encode workers for a chat with media, as llm-d's sidecar takes them. Each request starts with another
/// one.
pub(crate) fn encoders(proxy: &Proxy, pool: &ModelPool, api: Option<Api>, body: &[u8]) -> Option<Field> {
    let connector = proxy.fleet.settings().disaggregation.connector;
    if connector != Some(Connector::LlmdSidecar) || api != Some(Api::ChatCompletions) {
        return None;
    }
    let encodes = |id| pool.endpoint(id).filter(|endpoint| endpoint.worker.spec.role == Role::Encode);
    let fit: Vec<_> = pool.router.read(|scheduler| scheduler.pool().eligible().map(|one| one.id).collect());
    let mut places: Vec<_> =
        fit.into_iter().filter_map(encodes).map(|one| one.worker.upstream.address.place()).collect();
    if places.is_empty() || !has_media(body) {
        return None;
    }
    let start = usize::try_from(made_span().0 % places.len() as u64).unwrap_or(0);
    places.rotate_left(start);
    places.truncate(ENCODERS_MAX);
    Some((ENCODERS_HEADER, places.join(",")))
}

/// Serves a request by a decode worker whose sidecar is told of the others. `leg` is the prefill leg, if another worker
/// computes the prompt: it is over at the first token, or when its prompt should be computed if the answer comes as a
/// whole.
pub(crate) async fn answer(
    patience: Patience,
    mut lease: Lease,
    leg: Option<Lease>,
    sending: &Sending<'_>,
) -> (Lease, Outcome) {
    let mut fields = sending.fields.to_vec();
    let mut leg = leg.map(|mut leg| {
        fields.push((PREFILLER_HEADER, leg.worker.upstream.address.place()));
        leg.pass_by();
        leg
    });
    let told = Sending { fields: &fields, ..*sending };
    let computed = leg.as_ref().filter(|_| !lease.streams()).and_then(Lease::expected_end_s);
    let outcome = {
        let mut answered = pin!(patience.answer(&lease, told.send(&lease)));
        let computed_s = Duration::try_from_secs_f64(computed.unwrap_or(0.0)).unwrap_or(Duration::MAX);
        tokio::select! {
            biased;
            outcome = answered.as_mut() => outcome,
            () = sleep(computed_s), if computed.is_some() => {
                leg = None;
                answered.await
            }
        }
    };
    if let Some(leg) = leg {
        lease.hold(leg);
    }
    (lease, judged(outcome))
}

/// What a sidecar reports may be the fault of any of the engines: the request is then served by one, and no engine is
/// blamed.
fn judged(outcome: Outcome) -> Outcome {
    let status = match &outcome {
        Outcome::Faulty(answer, _) | Outcome::Unable(answer) | Outcome::Busy(answer) => answer.status,
        // An engine that is not on its list of allowed ones.
        Outcome::Answered(answer) if answer.status == StatusCode::FORBIDDEN => answer.status,
        _ => return outcome,
    };
    Outcome::Broken(AttemptError::Transfer(TransferError::Sidecar(status)))
}
