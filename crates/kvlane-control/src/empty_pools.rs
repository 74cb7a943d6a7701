//! Tells a scaler that requests wait for an endpoint (`routing.empty_pool_webhook`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvlane_fleet::Fleet;
use kvlane_http::client::{Client, origin_and_path};
use serde_json::json;
use tokio::time::sleep;

/// Time between two calls while requests wait.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
const JSON: &str = "content-type: application/json\r\n";
/// Time that a call may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Sends `{"model": "m", "waiting": 3}` for each model that requests begin to wait for, and again while they do.
pub(crate) async fn call(fleet: Arc<Fleet>) {
    let mut fails = false;
    loop {
        fleet.empty_pools.begun().await;
        loop {
            let waiting = fleet.waiting_for_endpoints();
            let waiting: Vec<_> = waiting.into_iter().filter(|(_, requests)| *requests > 0).collect();
            if waiting.is_empty() {
                break;
            }
            let url = fleet.settings().routing.empty_pool_webhook.clone();
            let said = match &url {
                Some(url) => tell(url, &waiting).await,
                None => Ok(()),
            };
            match &said {
                Err(error) if !fails => {
                    tracing::warn!(%error, "routing.empty_pool_webhook failed; it is called again while requests wait");
                }
                Ok(()) if fails => tracing::info!("routing.empty_pool_webhook answers again"),
                _ => {}
            }
            fails = said.is_err();
            tokio::select! {
                () = sleep(AGAIN_AFTER) => {}
                () = fleet.empty_pools.begun() => {}
            }
        }
    }
}

async fn tell(url: &str, waiting: &[(Arc<str>, u32)]) -> Result<(), String> {
    let (origin, path) = origin_and_path(url);
    let client = Client::at(origin, ANSWER_WITHIN)?;
    for (model, requests) in waiting {
        let body = Bytes::from(json!({"model": &**model, "waiting": requests}).to_string());
        match client.post_with(path, JSON, &body).await? {
            (200..=299, _) => {}
            (status, _) => return Err(format!("it answered {status}")),
        }
    }
    Ok(())
}
