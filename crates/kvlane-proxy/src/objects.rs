//! Origins of objects that a client can refer to later: stored responses, files, batches.
//!
//! Engines keep such objects in their own memory, so a request that names one must reach the engine that made it. Under
//! `auth.isolate_tenants` an object is found by the tenant that made it and by no other.

use std::sync::{Mutex, PoisonError};

use kvlane_core::recent::Recent;
use kvlane_core::request::TenantKey;
use memchr::memmem;
use xxhash_rust::xxh3::xxh3_128;

use kvlane_fleet::worker::WorkerId;

/// Most objects; beyond that the least recently used one is dropped.
const OBJECTS_MAX: usize = 1 << 16;
/// Bytes at the start of a response in which the object's id is looked for.
const ID_WITHIN_BYTES: usize = 4096;
/// Longest id that is stored.
const ID_BYTES_MAX: usize = 256;

/// The worker and the tenant of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    pub(crate) worker: WorkerId,
    pub(crate) tenant: Option<TenantKey>,
}

/// The origins of recently created objects.
pub struct Objects {
    by_id: Mutex<Recent<u128, Origin>>,
}

// === impl Objects ===

impl Default for Objects {
    fn default() -> Self {
        Self { by_id: Mutex::new(Recent::new(OBJECTS_MAX)) }
    }
}

impl Objects {
    /// Stores the origin of the object that a response starting with `piece` names, if it names one.
    pub fn note(&self, piece: &[u8], origin: Origin) {
        if let Some(id) = first_id(piece) {
            self.lock().insert(xxh3_128(id), origin);
        }
    }

    /// The origin of the object with this id.
    pub fn origin(&self, id: &str) -> Option<Origin> {
        self.lock().get(&xxh3_128(id.as_bytes())).copied()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Recent<u128, Origin>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first `"id": "…"` of a response: engines write an object's own id before the ids of its parts.
fn first_id(piece: &[u8]) -> Option<&[u8]> {
    let piece = &piece[..piece.len().min(ID_WITHIN_BYTES)];
    let after = memmem::find(piece, b"\"id\"")? + b"\"id\"".len();
    let value =
        piece[after..].trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"\"")?;
    let id = &value[..value.iter().position(|&byte| byte == b'"')?];
    let usable = (1..=ID_BYTES_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic);
    usable.then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_id_of_a_response_is_that_of_its_object() {
        for (piece, id) in [
            (r#"{"id":"resp_1","output":[{"id":"msg_1"}]}"#, Some("resp_1")),
            ("event: response.created\ndata: {\"response\": {\"id\" : \"resp_2\"}}\n\n", Some("resp_2")),
            (r#"{"object":"list"}"#, None),
            (r#"{"id":7}"#, None),
            (r#"{"id":""}"#, None),
            (r#"{"id":"a b"}"#, None),
            (r#"{"id":"cut"#, None),
        ] {
            assert_eq!(first_id(piece.as_bytes()), id.map(str::as_bytes), "{piece}");
        }
    }

    #[test]
    fn an_object_is_found_with_its_origin() {
        let (objects, origin) =
            (Objects::default(), Origin { worker: WorkerId(3), tenant: Some(TenantKey(7)) });
        objects.note(br#"{"id":"file-1"}"#, origin);
        assert_eq!(objects.origin("file-1"), Some(origin));
        assert_eq!(objects.origin("file-2"), None);
    }
}
