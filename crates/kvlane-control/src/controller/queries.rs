//! Queries to workers when they are probed: ranks, KV event feeds and models.

use bytes::Bytes;
use http::{Method, StatusCode};
use kvlane_core::load::LoadReport;
use kvlane_fleet::catalogue::models_of;
use kvlane_fleet::worker::provider::Provider;
use kvlane_fleet::worker::{Rank, ServedName, Worker};
use kvlane_http::address::Protocol;
use kvlane_http::client::{AskError, ask};
use kvlane_wire::engine::{ENGINES, FeedQuery};
use kvlane_wire::models;

use super::names::served_names;
use super::{Controller, PROBE_BYTES_MAX, problem_log};
use crate::ingest::discover::{self, FeedsAnswer};

// === impl Controller ===

impl Controller {
    /// The data-parallel ranks of a worker.
    pub(super) async fn ranks(&self, worker: &Worker, reports: &[(u32, LoadReport)]) -> Vec<Rank> {
        let config = self.fleet.settings().kv_events.clone();
        let known = worker.state().ranks.clone();
        // vLLM's gRPC service does not say where its engine publishes.
        let may_ask = config.enabled && worker.upstream.address.protocol == Protocol::Http;
        let told = if may_ask { self.feeds(worker).await } else { FeedsAnswer::Feeds(Vec::new()) };
        discover::ranks(&config, &worker.upstream.address.host, &worker.kv_events, told, reports, &known)
    }

    /// The KV event feeds that a worker announces.
    async fn feeds(&self, worker: &Worker) -> FeedsAnswer {
        for FeedQuery { path, parse } in ENGINES.iter().filter_map(|engine| engine.feeds.as_ref()) {
            let Ok((status, body)) = self.get(worker, path).await else { return FeedsAnswer::Nothing };
            if status.is_server_error() {
                return FeedsAnswer::Nothing;
            }
            if status != StatusCode::OK {
                continue;
            }
            match std::str::from_utf8(&body).map_err(|error| error.to_string()).map(parse) {
                Ok(Ok(feeds)) if !feeds.is_empty() => return FeedsAnswer::Feeds(feeds),
                Ok(Ok(_)) => {}
                // Another server's page at that path.
                Ok(Err(error)) => {
                    tracing::debug!(worker = %worker.url, path, %error, "the engine's list of KV event feeds cannot be parsed")
                }
                Err(error) => {
                    tracing::debug!(worker = %worker.url, path, error, "the engine's list of KV event feeds cannot be parsed")
                }
            }
        }
        FeedsAnswer::Feeds(Vec::new())
    }

    /// The metrics page of a worker that is healthy; empty if it has none.
    pub(super) async fn page(&self, worker: &Worker) -> Result<Bytes, String> {
        let path = self.health().path.clone();
        match self.get(worker, &path).await {
            Ok((status, _)) if status.is_success() => {}
            Ok((status, _)) => return Err(problem_log::of_status(worker, &path, status)),
            Err(error) => return Err(problem_log::of_error(&error)),
        }
        match self.get(worker, "/metrics").await {
            Ok((StatusCode::OK, page)) => Ok(page),
            _ => Ok(Bytes::new()),
        }
    }

    /// The names of the models that a worker serves.
    pub(super) async fn names(&self, worker: &Worker) -> Result<Vec<ServedName>, String> {
        let listed = match worker.upstream.address.protocol {
            Protocol::Http => self.listed(worker).await,
            Protocol::Grpc => self.grpc_model(worker).await.map(|model| vec![model]),
        };
        let Some(model) = &worker.model else { return listed };
        let card = listed.ok().and_then(|names| names.into_iter().find(|served| served.name == *model));
        let made = serde_json::json!({"id": model, "object": "model", "owned_by": "kvlane"});
        let card = card.map_or(made, |served| served.card);
        Ok(vec![ServedName { name: model.clone(), base: model.clone(), card }])
    }

    /// The models that a worker lists.
    async fn listed(&self, worker: &Worker) -> Result<Vec<ServedName>, String> {
        let path = "/v1/models";
        match self.get(worker, path).await {
            Ok((StatusCode::OK, body)) => models::parse(&body)
                .map_err(|error| error.to_string())
                .and_then(served_names)
                .map_err(|problem| format!("{problem}; give this worker's model")),
            Ok((status, _)) => Err(problem_log::of_status(worker, path, status)),
            Err(error) => Err(problem_log::of_error(&error)),
        }
    }

    /// Whether a service outside the fleet answers, and which of its models `models` leads to.
    pub(super) async fn models_of_provider(
        &self,
        worker: &Worker,
        provider: &Provider,
    ) -> Result<Vec<ServedName>, String> {
        let path = "/v1/models";
        match self.get(worker, path).await {
            // Not all of them list their models.
            Ok((status, _)) if status.is_success() || status == StatusCode::NOT_FOUND => {}
            Ok((status, _)) => return Err(problem_log::of_status(worker, path, status)),
            Err(error) => return Err(problem_log::of_error(&error)),
        }
        let served = |model: &&str| {
            let name = Provider::pool_of(&provider.name, model);
            ServedName { base: name.clone(), name, card: serde_json::Value::Null }
        };
        Ok(models_of(&self.fleet.settings().models, &provider.name).iter().map(served).collect())
    }

    pub(super) async fn get(&self, worker: &Worker, path: &str) -> Result<(StatusCode, Bytes), AskError> {
        let limit = self.health().timeout;
        ask(&self.upstreams, &worker.upstream, &Method::GET, path, &Bytes::new(), limit, PROBE_BYTES_MAX)
            .await
    }
}
