//! Queries to workers that speak gRPC: health, load and model.

use bytes::Bytes;
use http::HeaderMap;
use kvlane_core::load::LoadReport;
use kvlane_fleet::worker::{ServedName, Worker};
use kvlane_http::client::ask_http2;
use kvlane_wire::engine::calls::{self, HEALTH_PATH, LOADS_PATH, MODEL_PATH, ModelInfo, SERVER, SERVICE};
use kvlane_wire::grpc::{HEALTH_CHECK_PATH, MESSAGE_FIELD, STATUS_FIELD, Status, frame, is_serving, message};

use super::{Controller, PROBE_BYTES_MAX, problem_log};

/// Why a call has no answer.
#[derive(Debug)]
enum CallError {
    /// The server ended it with this status.
    Ended(Status, String),
    /// There was no answer.
    None(String),
}

// === impl Controller ===

impl Controller {
    /// The load of each rank of a worker that is healthy; empty if it does not report it.
    pub(super) async fn grpc_loads(&self, worker: &Worker) -> Result<Vec<(u32, LoadReport)>, String> {
        self.grpc_health(worker).await?;
        let answer = self.call(worker, LOADS_PATH, &[]).await;
        Ok(answer.map(|answer| calls::loads(&answer)).unwrap_or_default())
    }

    /// Whether a worker serves: by the health service of gRPC, which a server that warms up or shuts down answers in the
    /// negative, or by the engine's own method.
    async fn grpc_health(&self, worker: &Worker) -> Result<(), String> {
        let mut service = Vec::new();
        frame(&mut service, |message| message.bytes(1, SERVICE.as_bytes()));
        match self.call(worker, HEALTH_CHECK_PATH, &service[5..]).await {
            Ok(answer) if is_serving(&answer) => return Ok(()),
            Ok(_) => {
                return Err(format!(
                    "{HEALTH_CHECK_PATH} says that {SERVICE} is not serving: it may still be warming up, or shutting down"
                ));
            }
            Err(CallError::Ended(Status::Unimplemented | Status::NotFound, _)) => {}
            Err(error) => return Err(problem(HEALTH_CHECK_PATH, error)),
        }
        let answer =
            self.call(worker, HEALTH_PATH, &[]).await.map_err(|error| problem(HEALTH_PATH, error))?;
        calls::health(&answer).map_err(|said| format!("{HEALTH_PATH} says that it is not healthy: {said}"))
    }

    /// The model that a worker serves.
    pub(super) async fn grpc_model(&self, worker: &Worker) -> Result<ServedName, String> {
        let answer = self.call(worker, MODEL_PATH, &[]).await.map_err(|error| problem(MODEL_PATH, error))?;
        let info = calls::model_info(&answer);
        let ModelInfo { name, card } =
            info.ok_or_else(|| format!("{MODEL_PATH} names no model; give this worker's model"))?;
        Ok(ServedName { base: name.clone(), name, card })
    }

    /// Calls a method with one message; the only message of its answer.
    async fn call(&self, worker: &Worker, path: &'static str, request: &[u8]) -> Result<Bytes, CallError> {
        let mut body = Vec::new();
        frame(&mut body, |message| message.0.extend_from_slice(request));
        let limits = (self.health().timeout, PROBE_BYTES_MAX);
        let asked = ask_http2(&self.upstreams, &worker.upstream, path, &body.into(), limits).await;
        let (fields, answer) = asked.map_err(|error| CallError::None(problem_log::of_error(&error)))?;
        let text =
            |name| fields.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        match status(&fields) {
            Some(Status::Ok) => {
                let message =
                    message(&answer).map_err(|error| CallError::None(format!("{path}: {error}")))?;
                Ok(answer.slice_ref(message))
            }
            Some(status) => Err(CallError::Ended(status, text(MESSAGE_FIELD).unwrap_or_default())),
            None => Err(CallError::None(format!("{path}: the answer is not gRPC; correct the port"))),
        }
    }
}

fn status(fields: &HeaderMap) -> Option<Status> {
    fields.get(STATUS_FIELD).map(|value| Status::read(value.as_bytes()))
}

fn problem(path: &str, error: CallError) -> String {
    match error {
        CallError::Ended(Status::Unimplemented, _) => {
            format!("{path} is not implemented: is it {SERVER}?")
        }
        CallError::Ended(status, said) => format!("{path} ended with {status:?}: {said}"),
        CallError::None(problem) => problem,
    }
}
