//! The account of one request from its arrival to its end: its id, and how it is counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kvlane_core::time::Nanos;
use kvlane_fleet::metrics::RequestLabels;
use kvlane_fleet::pool::ModelPool;
use kvlane_wire::api::Api;

use crate::alias::Alias;
use crate::error_format::ErrorFormat;
use crate::failures::{Cause, Failure};
use crate::limits::{Charge, Left};
use crate::placement_headers::unmark;
use crate::proxy::Proxy;
use crate::timeline::Timeline;
use crate::traces::{Ending, Traces};

/// The header with the request's id.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The status counted when the client disconnected before the end of the response.
const CLIENT_CLOSED_REQUEST: u16 = 499;
/// The W3C Server Timing header.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Longest request id that is accepted.
const REQUEST_ID_LEN_MAX: usize = 128;

/// One request's account. It is counted when the last holder drops it.
pub struct Account {
    proxy: Arc<Proxy>,
    api: Option<Api>,
    /// The error format of its client.
    pub(super) error_format: ErrorFormat,
    /// Whether it is a client's request; scrapes and requests to the admin API are not counted.
    counted: bool,
    /// When it arrived.
    pub received: Nanos,
    /// Its id: the client's, or a generated one.
    pub request_id: HeaderValue,
    /// The time spent in each stage.
    pub(super) timeline: Arc<Timeline>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The pool, once it is known.
    pool: Option<Arc<ModelPool>>,
    alias: Option<Arc<Alias>>,
    left: Left,
    /// What it holds of its client's limits while it waits.
    held: Option<Arc<Charge>>,
    status: u16,
    settled: bool,
    /// The client does not get headers that depend on the requests of others.
    discreet: bool,
    /// Its answer is not seen, so its status is unknown.
    passes_by: bool,
    /// What failed last; the request may have succeeded after that.
    cause: Option<Box<Cause>>,
    /// Its answer broke off after its head was sent.
    broke: bool,
}

// === impl Account ===

impl Account {
    pub(crate) fn open(
        proxy: &Arc<Proxy>,
        api: Option<Api>,
        error_format: ErrorFormat,
        parts: &Parts,
        counted: bool,
    ) -> Arc<Self> {
        let (config, headers) = (proxy.settings(), &parts.headers);
        let names = &config.server.request_id_headers;
        let given = names.iter().find_map(|name| headers.get(name.as_str()).filter(|id| is_usable(id)));
        let request_id = given.map_or_else(made_id, copy);
        let received = proxy.fleet.clock.now();
        let traced = counted.then(|| Traces::begin(&config.tracing, proxy.fleet.clock, api, parts));
        let trace = traced.flatten();
        Arc::new(Self {
            proxy: Arc::clone(proxy),
            api,
            error_format,
            counted,
            received,
            timeline: Arc::new(Timeline::start(proxy.fleet.clock, received, request_id.clone(), trace)),
            request_id,
            state: Mutex::default(),
        })
    }

    /// Sets what serves the request, and the name that its client used if the catalogue has it.
    pub(crate) fn set_pool(&self, pool: &Arc<ModelPool>, alias: Option<&Arc<Alias>>) {
        let mut state = self.state();
        (state.pool, state.alias) = (Some(Arc::clone(pool)), alias.cloned());
    }

    /// Whether its client is charged for it: not for a copy.
    pub(crate) fn is_charged(&self) -> bool {
        self.counted
    }

    /// The client is one of several isolated tenants: the endpoint, the reason and the time of each step depend on
    /// other tenants' requests, so the response does not contain them.
    pub fn keep_apart(&self) {
        self.state().discreet = true;
    }

    /// Keeps what the request holds of its client's limits while it waits.
    pub(crate) fn hold(&self, held: Option<Arc<Charge>>) {
        self.state().held = held;
    }

    /// Whether it holds anything of its client's limits.
    pub(crate) fn holds(&self) -> bool {
        self.state().held.is_some()
    }

    /// Takes out what it holds of its client's limits.
    pub(crate) fn let_go(&self) -> Option<Arc<Charge>> {
        self.state().held.take()
    }

    /// Sets what is left of the client's limits.
    pub fn set_left(&self, left: Left) {
        self.state().left = left;
    }

    /// Adds the headers for the request id, what is left of the client's limits, and the timing.
    pub fn mark(&self, headers: &mut HeaderMap) {
        headers.insert(REQUEST_ID, self.request_id.clone());
        let (pool, discreet) = {
            let state = self.state();
            state.left.tell(headers);
            (state.pool.clone(), state.discreet)
        };
        if discreet {
            unmark(headers);
            // The engine's own header is removed, too: the engine is shared.
            headers.remove(SERVER_TIMING);
        }
        if !self.counted || (self.api.is_none() && pool.is_none()) {
            return;
        }
        let stages = self.timeline.close();
        if let Some(pool) = pool {
            pool.metrics.stages.observe(&stages);
        }
        if !discreet
            && self.proxy.settings().server.server_timing
            && let Ok(value) = HeaderValue::try_from(stages.format())
        {
            // A proxy or engine may have added its own: several header lines are one list.
            headers.append(SERVER_TIMING, value);
        }
    }

    /// An endpoint was picked, and the answer will not be seen: records the time of each stage until now. The request is
    /// not counted among those that were answered.
    pub(crate) fn picked(&self) {
        let pool = {
            let mut state = self.state();
            (state.passes_by, state.settled) = (true, true);
            state.pool.clone()
        };
        if let Some(pool) = pool {
            pool.metrics.stages.observe(&self.timeline.close());
        }
    }

    /// The API whose body is parsed, if any.
    pub(crate) fn api(&self) -> Option<Api> {
        self.api
    }

    pub(crate) fn set_status(&self, status: StatusCode) {
        self.state().status = status.as_u16();
    }

    /// An attempt at this endpoint failed.
    pub(crate) fn failed_at(&self, endpoint: &Arc<str>, reason: String) {
        let cause = Cause { endpoint: Some(Arc::clone(endpoint)), reason };
        self.state().cause = Some(Box::new(cause));
    }

    /// The client gets an error for this reason, after the attempts that there were.
    pub(crate) fn failed(&self, reason: String) {
        self.state().cause.get_or_insert_default().reason = reason;
    }

    /// The answer broke off after its head was sent: the attempt that failed last says why.
    pub(crate) fn broke_off(&self) {
        self.state().broke = true;
    }

    /// The response has ended, with or without error, before the client disconnected.
    pub fn settle(&self) {
        self.state().settled = true;
    }

    /// The request has ended: writes the log line and the trace, if enabled.
    fn tell(&self, pool: Option<&ModelPool>, status: u16, settled: bool) {
        let model = pool.map(|pool| pool.model.as_str());
        tracing::debug!(
            target: "kvlane::access",
            request_id = self.timeline.request_id(),
            trace_id = self.timeline.trace_id(),
            api = self.api.map_or("other", Api::name),
            model,
            status,
            client_left = !settled,
            duration_s = (self.proxy.fleet.clock.now() - self.received).as_secs_f64(),
            "request"
        );
        let Some(trace) = self.timeline.trace().filter(|trace| trace.is_recorded()) else { return };
        let spans = trace.finish(&Ending {
            received: self.received,
            status,
            left: !settled,
            model,
            request_id: self.timeline.request_id(),
            request_stages: self.timeline.request_stages(),
        });
        self.proxy.traces.tell(&self.proxy.fleet.metrics.spans, spans);
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
        let State { pool, alias, status, settled, passes_by, cause, broke, .. } =
            std::mem::take(&mut *self.state());
        if passes_by {
            return self.tell(pool.as_deref(), 0, true);
        }
        let code = if settled { status } else { CLIENT_CLOSED_REQUEST };
        self.proxy.outcomes.note(code);
        let api = self.api.map_or("other", Api::name);
        self.tell(pool.as_deref(), status, settled);
        let of_pool = || pool.map_or_else(String::new, |pool| pool.model.clone());
        let model = alias.map_or_else(of_pool, |alias| alias.asked.clone());
        if code >= 500 || (broke && settled) {
            let cause = cause.map_or_else(Cause::default, |cause| *cause);
            let (at, request_id) = (self.proxy.fleet.clock.now(), self.timeline.request_id().to_owned());
            let model = model.clone();
            self.proxy.failures.note(Failure { at, request_id, model, status, cause });
        }
        self.proxy.fleet.metrics.requests.requests.get_or_create(&RequestLabels { model, api, code }).inc();
    }
}

fn is_usable(id: &HeaderValue) -> bool {
    (1..=REQUEST_ID_LEN_MAX).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// A value with memory of its own, so that it does not keep the whole head alive.
fn copy(value: &HeaderValue) -> HeaderValue {
    HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone())
}

/// A unique id: the process's random prefix and a counter.
fn made_id() -> HeaderValue {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static START: std::sync::LazyLock<u64> = std::sync::LazyLock::new(|| {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(std::process::id())
    });
    let mut id = *b"kvl-..........................";
    let (start, number) = id[4..].split_at_mut(16);
    put_hex(start, *START);
    put_hex(number, NEXT.fetch_add(1, Ordering::Relaxed));
    HeaderValue::from_bytes(&id).unwrap_or(HeaderValue::from_static("kvl-0"))
}

/// Writes the last hexadecimal digits of a number, as many as there is room for.
fn put_hex(room: &mut [u8], mut number: u64) {
    for digit in room.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(number & 15) as usize];
        number >>= 4;
    }
}
