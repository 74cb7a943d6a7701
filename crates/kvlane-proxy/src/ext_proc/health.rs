//! gRPC health checks (`grpc.health.v1`), as Kubernetes, Envoy and the charts of other pickers ask for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvlane_fleet::Fleet;
use kvlane_wire::ext_proc::SERVICE;
use kvlane_wire::grpc::{Status, health, health_service};
use tokio::time::sleep;

use super::Picker;
use super::connection::{Call, CallError};

/// The path of a single check.
pub(super) const CHECK_PATH: &str = "/grpc.health.v1.Health/Check";
/// The path of a check that reports changes.
pub(super) const WATCH_PATH: &str = "/grpc.health.v1.Health/Watch";
/// How often a watched service is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Whether a service serves; none if there is no such service.
fn serves(fleet: &Fleet, service: &str) -> Option<bool> {
    match service {
        "liveness" => Some(true),
        // llm-d's chart asks for `inference-extension` where there is one replica.
        "" | "readiness" | "inference-extension" | SERVICE => Some(is_ready(fleet)),
        _ => None,
    }
}

/// Whether the picker can pick.
fn is_ready(fleet: &Fleet) -> bool {
    let eligible = || {
        let any = |pool: &Arc<kvlane_fleet::pool::ModelPool>| {
            pool.router.read(|scheduler| scheduler.pool().eligible().next().is_some())
        };
        fleet.pools().iter().any(any)
    };
    !fleet.stopping.load(Ordering::Relaxed) && fleet.discovery.is_synced() && eligible()
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
    let mut told = None;
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
            () = sleep(LOOK_EVERY) => {}
            () = call.reset() => return Ok(Status::Ok),
        }
    }
}
