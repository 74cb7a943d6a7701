//! Requests that name an object of an engine: where they must go, and which objects an answer names.

use std::sync::Arc;

use http::{Method, StatusCode};
use kvlane_fleet::objects::{Keeper, Maker, ObjectKey, Origin};
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::worker::{Worker, WorkerId};
use kvlane_http::connections::Connections;
use kvlane_wire::api::object_ids::object_ids;
use kvlane_wire::api::{Api, EnginePath, Keeps};

use crate::attributes::Attributes;
use crate::error::{ApiError, Lost};
use crate::proxy::Proxy;

/// Bytes at the start of an answer in which ids are looked for.
const BEGINNING_BYTES_MAX: usize = 16 << 10;
/// Characters of an id in an error.
const ID_CHARS_MAX: usize = 200;

/// An object that a request needs, and the worker that keeps it.
#[derive(Clone)]
pub struct Kept {
    worker: Arc<Worker>,
    /// The ends of its process when the request was routed.
    ends: u64,
    /// What the client gets if the object is lost.
    lost: Lost,
    /// The engine has restarted since it made the object, and may have kept it on disk.
    doubted: bool,
}

/// The object with this id in a request's path; none if this gateway does not know it. An engine that has restarted is asked
/// whether it still has it.
///
/// # Errors
/// The object's worker has left, or tenants are isolated and this tenant has made no such object.
pub(super) fn addressed(
    proxy: &Proxy,
    id: &str,
    attributes: Attributes,
    isolates: bool,
) -> Result<Option<Kept>, ApiError> {
    let Some(origin) = origin(proxy, id, attributes, isolates)? else { return Ok(None) };
    let lost = |left| Lost { id: short(id), worker: (!isolates).then(|| Arc::clone(&origin.url)), left };
    let (worker, doubted) = match origin.keeper(&proxy.fleet.workers()) {
        Keeper::There(worker) => (worker, false),
        Keeper::Restarted(worker) => (worker, true),
        Keeper::Left => return Err(ApiError::LostObject(lost(true))),
    };
    let ends = worker.upstream.ends();
    Ok(Some(Kept { worker, ends, lost: lost(false), doubted }))
}

/// The stored response or conversation that a request continues. Engines keep these in memory, and an engine that ignored an
/// id that it does not know would begin anew.
///
/// # Errors
/// The object is lost, or tenants are isolated and this tenant has made no such object.
pub(super) fn continued(
    proxy: &Proxy,
    id: &str,
    attributes: Attributes,
    isolates: bool,
) -> Result<Option<Kept>, ApiError> {
    match addressed(proxy, id, attributes, isolates)? {
        Some(kept) if kept.doubted => Err(ApiError::LostObject(kept.lost)),
        kept => Ok(kept),
    }
}

/// Whether a response or conversation that this gateway does not know can only be of one worker.
///
/// # Errors
/// Several workers of what serves its model could have made it.
pub(super) fn made_by_only(id: &str, all: &[Arc<Served>]) -> Result<(), ApiError> {
    let endpoints: Vec<_> = all.iter().flat_map(|served| served.pool.endpoints()).collect();
    let first = endpoints.first().map(|endpoint| endpoint.worker.id);
    if endpoints.iter().any(|endpoint| Some(endpoint.worker.id) != first) {
        return Err(ApiError::NotFoundAnywhere { id: short(id), unasked: 0 });
    }
    Ok(())
}

fn origin(
    proxy: &Proxy,
    id: &str,
    attributes: Attributes,
    isolates: bool,
) -> Result<Option<Origin>, ApiError> {
    let origin = proxy.fleet.objects.origin(id);
    let own = Maker::Client(attributes.tenant());
    if isolates && origin.as_ref().is_none_or(|origin| origin.maker != own) {
        return Err(ApiError::UnknownObject(short(id)));
    }
    Ok(origin)
}

/// An id as it is shown in errors.
pub(super) fn short(id: &str) -> String {
    id.chars().take(ID_CHARS_MAX).collect()
}

/// Whether a successful answer names objects that later requests can refer to. Contents of files and results are not looked
/// at: clients have written them.
pub(super) fn names_objects(row: Option<&EnginePath>, method: &Method) -> bool {
    let Some(row) = row else { return false };
    let is_object = row.keeps == Keeps::Object && method != Method::DELETE;
    let creates = !row.path.contains("{}") && method == Method::POST;
    let shows = ["{}", "/complete", "/cancel"].iter().any(|end| row.path.ends_with(end));
    (is_object && (creates || shows)) || row.api() == Some(Api::Responses)
}

/// Stores the objects that an answer names, as it passes.
pub(super) struct Named {
    origin: Origin,
    beginning: Vec<u8>,
}

// === impl Kept ===

impl Kept {
    #[cfg(test)]
    pub(crate) fn at(worker: &Arc<Worker>) -> Self {
        let lost = Lost { id: "resp_1".into(), worker: None, left: false };
        Self { worker: Arc::clone(worker), ends: 0, lost, doubted: false }
    }

    /// The only worker that has it.
    pub(super) fn worker(&self) -> WorkerId {
        self.worker.id
    }

    /// What the client gets for an answer with this status, if it shows that the object is lost.
    pub(super) fn lost_if(&self, status: StatusCode) -> Result<(), ApiError> {
        let is_lost = self.doubted && status == StatusCode::NOT_FOUND;
        if is_lost { Err(ApiError::LostObject(self.lost.clone())) } else { Ok(()) }
    }

    /// That the object is lost, if its engine has ended while the request was on its way; otherwise the request's own error.
    pub(super) async fn or_lost(&self, upstreams: &Connections, error: ApiError) -> ApiError {
        let may_have_ended = matches!(error, ApiError::Upstream { .. } | ApiError::NoEndpoint { .. });
        if self.doubted || !may_have_ended {
            return error;
        }
        let upstream = &self.worker.upstream;
        // Of an engine that died with the request, nothing says yet that its port refuses connections.
        let has_ended = upstream.ends() != self.ends || upstreams.refuses(upstream).await;
        if has_ended { ApiError::LostObject(self.lost.clone()) } else { error }
    }
}

// === impl Named ===

impl Named {
    /// For the answer of this worker's engine to a client with these attributes.
    pub(super) fn new(worker: &Worker, attributes: Attributes) -> Self {
        let origin = Origin::new(worker, Maker::Client(attributes.tenant()));
        Self { origin, beginning: Vec::new() }
    }

    /// Looks at a piece of the answer; returns whether it wants to see more.
    pub(super) fn see(&mut self, proxy: &Proxy, piece: &[u8]) -> bool {
        let room = BEGINNING_BYTES_MAX - self.beginning.len();
        self.beginning.extend_from_slice(&piece[..piece.len().min(room)]);
        let (ids, complete) = object_ids(&self.beginning);
        for id in ids {
            proxy.fleet.objects.note(ObjectKey::of(&id), self.origin.clone());
        }
        !complete && self.beginning.len() < BEGINNING_BYTES_MAX
    }
}
