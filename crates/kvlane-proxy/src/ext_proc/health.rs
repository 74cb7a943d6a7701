//! gRPC health checks (`grpc.health.v1`), as Kubernetes, Envoy and the charts of other pickers ask for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvlane_fleet::Fleet;
use kvlane_wire::ext_proc::SERVICE;
use kvlane_wire::grpc::{Status, health, health_service};

use super::call::{Call, CallError};
use super::picker::Picker;

/// The path of a check that reports changes.
pub(super) const WATCH_PATH: &str = "/grpc.health.v1.Health/Watch";
/// Whether a service serves; none if there is no such service.
fn serves(fleet: &Fleet, service: &str) -> Option<bool> {
    match service {
        "liveness" => Some(true),
        // llm-d's chart asks for `inference-extension` where there is one replica.
        "" | "readiness" | "inference-extension" | SERVICE => Some(fleet.readiness().ready),
        _ => None,
    }
}

/// Answers a check.
pub(super) async fn check(picker: &Arc<Picker>, call: &mut Call) -> Result<Status, CallError> {
    let Some(request) = call.next().await? else { return Ok(Status::InvalidArgument) };
    match serves(&picker.service.proxy.fleet, health_service(&request)) {
        None => Ok(Status::NotFound),
        serving => {
            let mut out = Vec::new();
            health(&mut out, serving);
            call.send(out)?;
            Ok(Status::Ok)
        }
    }
}

/// Reports the health of a service, and every change of it.
pub(super) async fn watch(picker: &Arc<Picker>, call: &mut Call) -> Result<Status, CallError> {
    let Some(request) = call.next().await? else { return Ok(Status::InvalidArgument) };
    let (service, fleet) = (health_service(&request), &picker.service.proxy.fleet);
    let (mut verdict, mut told) = (fleet.start.watch(), None);
    loop {
        let serving = serves(fleet, service);
        if told != Some(serving) {
            let mut out = Vec::new();
            health(&mut out, serving);
            call.send(out)?;
            told = Some(serving);
        }
        if fleet.stopping.load(Ordering::Relaxed) {
            return Ok(Status::Unavailable);
        }
        tokio::select! {
            changed = verdict.changed() => if changed.is_err() { return Ok(Status::Unavailable) },
            () = call.reset() => return Ok(Status::Ok),
        }
    }
}
