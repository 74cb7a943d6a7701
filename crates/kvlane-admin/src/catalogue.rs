//! The `/catalogue` endpoints of the admin API: the names of models that clients use.

use bytes::Bytes;
use http::{Response, StatusCode};
use kvlane_fleet::Fleet;
use kvlane_fleet::catalogue::ModelSpec;
use kvlane_proxy::body::{Body, json_response};
use kvlane_proxy::error::ApiError;
use serde_json::{Value, json};

use crate::query::{percent_decoded, refused};

pub(super) fn list(fleet: &Fleet) -> Value {
    let settings = fleet.settings();
    let models: Vec<Value> = settings.models.iter().map(|(name, spec)| describe(fleet, name, spec)).collect();
    json!({"models": models, "total": models.len()})
}

pub(super) fn one(fleet: &Fleet, name: &str) -> Result<Value, ApiError> {
    let name = percent_decoded(name);
    let settings = fleet.settings();
    settings.models.get(&*name).map(|spec| describe(fleet, &name, spec)).ok_or_else(|| unknown(&name))
}

/// Sets an entry: 201 if there was none of that name, else 200.
pub(super) fn set(fleet: &Fleet, name: &str, body: &Bytes) -> Result<Response<Body>, ApiError> {
    let name = percent_decoded(name);
    let spec: ModelSpec = serde_json::from_slice(body).map_err(|error| {
        let what =
            format!(r#"the body is not {{"targets": [{{"model": "llama-70b", "weight": 1}}]}}: {error}"#);
        refused(StatusCode::BAD_REQUEST, &what)
    })?;
    let is_new = !fleet.settings().models.contains_key(&*name);
    fleet.set_model(&name, spec).map_err(|error| refused(StatusCode::BAD_REQUEST, &error.to_string()))?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(json_response(status, &one(fleet, &name)?))
}

/// Removes an entry that was set; one of the configuration with the same name applies again.
pub(super) fn remove(fleet: &Fleet, name: &str) -> Result<Response<Body>, ApiError> {
    let name = percent_decoded(name);
    let was = one(fleet, &name)?;
    if fleet.unset_model(&name) {
        return Ok(json_response(StatusCode::OK, &was));
    }
    let what = match fleet.entries().set_by(&name) {
        "kubernetes" => format!("model '{name}' is of an InferenceModelRewrite: change that"),
        _ => format!("model '{name}' is in the configuration: remove it from `models` there and reload"),
    };
    Err(refused(StatusCode::CONFLICT, &what))
}

fn describe(fleet: &Fleet, name: &str, spec: &ModelSpec) -> Value {
    let set_by = fleet.entries().set_by(name);
    json!({"name": name, "set_by": set_by, "targets": spec.targets, "fallbacks": spec.fallbacks, "mirror": spec.mirror})
}

fn unknown(name: &str) -> ApiError {
    let what = format!("model '{name}' is not in the catalogue: GET /catalogue lists all names");
    refused(StatusCode::NOT_FOUND, &what)
}
