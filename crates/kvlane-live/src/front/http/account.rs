//! What is known of one request from its arrival to its end: its id, and how it will be counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{HeaderMap, HeaderValue, StatusCode};
use kvlane_core::time::Nanos;
use kvlane_wire::api::Api;

use super::REQUEST_ID;
use super::dialect::Dialect;
use crate::gateway::Gateway;
use crate::limits::Left;
use crate::metrics::RequestLabels;

/// The status counted when the client has left before its answer's end.
const CLIENT_CLOSED_REQUEST: u16 = 499;
/// The longest request id that is taken over.
const REQUEST_ID_LEN_MAX: usize = 128;

/// One request's account. It is counted when the last holder lets go.
pub(crate) struct Account {
    gateway: Arc<Gateway>,
    api: Option<Api>,
    /// In whose words its client reads errors.
    pub(super) dialect: Dialect,
    /// Whether it is a client's; scrapes and operators' calls are not counted.
    counted: bool,
    /// When it arrived.
    pub(crate) received: Nanos,
    /// Its id: the client's, or one made here.
    pub(crate) request_id: HeaderValue,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    model: String,
    left: Left,
    status: u16,
    settled: bool,
}

// === impl Account ===

impl Account {
    pub(crate) fn open(
        gateway: &Arc<Gateway>,
        api: Option<Api>,
        dialect: Dialect,
        headers: &HeaderMap,
        counted: bool,
    ) -> Arc<Self> {
        let names = &gateway.config().server.request_id_headers;
        let given = names.iter().find_map(|name| headers.get(name.as_str()).filter(|id| is_usable(id)));
        Arc::new(Self {
            gateway: Arc::clone(gateway),
            api,
            dialect,
            counted,
            received: gateway.clock.now(),
            request_id: given.cloned().unwrap_or_else(made_id),
            state: Mutex::default(),
        })
    }

    pub(crate) fn set_model(&self, model: &str) {
        self.state().model = model.to_owned();
    }

    /// What its client may still use.
    pub(crate) fn set_left(&self, left: Left) {
        self.state().left = left;
    }

    /// Says in an answer's head which request it is for, and what its client may still use.
    pub(crate) fn mark(&self, headers: &mut HeaderMap) {
        headers.insert(REQUEST_ID, self.request_id.clone());
        self.state().left.tell(headers);
    }

    pub(crate) fn set_status(&self, status: StatusCode) {
        self.state().status = status.as_u16();
    }

    /// The answer has come to an end, good or bad, before the client left.
    pub(crate) fn settle(&self) {
        self.state().settled = true;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        let State { model, status, settled, .. } = std::mem::take(&mut *self.state());
        let code = if settled { status } else { CLIENT_CLOSED_REQUEST };
        let api = self.api.map_or("other", Api::name);
        self.gateway.metrics.requests.get_or_create(&RequestLabels { model, api, code }).inc();
    }
}

fn is_usable(id: &HeaderValue) -> bool {
    (1..=REQUEST_ID_LEN_MAX).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// An id nobody else has: the process's random start and a counter.
fn made_id() -> HeaderValue {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static START: std::sync::LazyLock<u64> = std::sync::LazyLock::new(|| {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(std::process::id())
    });
    let id = format!("kvl-{:016x}{:08x}", *START, NEXT.fetch_add(1, Ordering::Relaxed));
    HeaderValue::try_from(id).unwrap_or(HeaderValue::from_static("kvl-0"))
}
