//! `GET /whatif`: what the shadow policy would have decided for the requests that were placed.

use http::StatusCode;
use kvlane_core::scheduler::{Agreement, Scheduler};
use kvlane_fleet::Fleet;
use kvlane_proxy::error::ApiError;
use serde_json::{Value, json};

use crate::query::refused;

/// For each pool with a shadow policy: how often it agreed since it was set, and its estimated gain:
/// `kvlane.whatif/1`.
pub(super) fn whatif(fleet: &Fleet) -> Result<Value, ApiError> {
    let pools: Vec<Value> = fleet
        .pools()
        .iter()
        .filter_map(|pool| {
            let shadowed = pool.router.read(Scheduler::shadowed)?;
            let mut told = describe(&shadowed.all());
            told["model"] = json!(pool.model);
            told["policy"] = json!(pool.policy());
            told["shadow_policy"] = json!(shadowed.policy);
            let by_reason = shadowed.by_reason.iter().map(|(reason, of)| {
                let mut told = describe(of);
                told["reason"] = json!(reason.name());
                told
            });
            told["by_reason"] = by_reason.collect();
            Some(told)
        })
        .collect();
    if pools.is_empty() {
        let off = "no shadow policy is set: set routing.shadow_policy and reload the configuration";
        return Err(refused(StatusCode::NOT_FOUND, off));
    }
    Ok(json!({"schema": "kvlane.whatif/1", "pools": pools}))
}

fn describe(of: &Agreement) -> Value {
    let (mean_s, error_s) = of.mean_gain_s();
    json!({
        "decisions": of.decisions, "agreed": of.agreed, "agreement": of.share(), "gain_s": of.gain_s,
        "mean_gain_s": mean_s, "mean_gain_error_s": error_s,
    })
}
