//! `Router`: placement for gateways that are written in Python.
//!
//! The router is the core's; this adds names for endpoints, numbers for requests, a clock for callers who pass no time,
//! and checks of the arguments. Every method but those of KV events holds Python's global lock: they take microseconds,
//! and a thread that gives the lock away may wait milliseconds until it has it again.

mod config;
mod decision;
mod events;

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::cache_accuracy::{Feed, ReportedReuse};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::load::LoadReport;
use kvlane_core::request::{RequestId, SchedulingRequest, SessionKey, Slo, TenantKey};
use kvlane_core::router::{self, Scratch};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use pyo3::exceptions::{PyLookupError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::prompt::Prompt;

pub(crate) use decision::{Applied, Decision, Endpoint};
use events::{Blocks, Name};

/// The latest time, in seconds: a century.
const NOW_MAX_S: f64 = 3.2e9;

/// Places requests at endpoints.
#[pyclass(frozen, module = "kvlane._core")]
pub(crate) struct Router {
    core: router::Router,
    model: String,
    /// The chain seed of prompts without adapter and salt.
    seed: ChainSeed,
    started: Instant,
    state: Mutex<State>,
    feeds: Mutex<HashMap<EndpointId, Arc<Mutex<events::Decoder>>>>,
}

/// What is known beside the core's state.
#[derive(Default)]
struct State {
    next_request: u64,
    requests: HashMap<u64, Request>,
    endpoints: HashMap<String, EndpointId>,
    names: decision::Names,
    /// Decisions on queued requests that have not been polled: at most one for each request that is not settled.
    decided: VecDeque<Decision>,
    /// Reused memory.
    chain: Vec<BlockHash>,
    scratch: Scratch,
    outputs: Vec<Output>,
}

/// A request that waits or is in flight.
struct Request {
    prompt_tokens: u32,
    waits: bool,
    /// Whether any of its answer has arrived.
    begun: bool,
}

// === impl Router ===

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (policy=None, *, model="", block_tokens=16, kv_events=false, timing=None, max_concurrent_requests=0,
        max_requests_per_endpoint=0, queue_size=0, queue_timeout_s=60.0, session_admission=false, seed=0,
        index_memory=256 << 20, index_ttl_s=1800.0, kv_index_memory=1 << 30))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn new(
        policy: Option<&Bound<'_, PyAny>>,
        model: &str,
        block_tokens: u32,
        kv_events: bool,
        timing: Option<PathBuf>,
        max_concurrent_requests: u32,
        max_requests_per_endpoint: u32,
        queue_size: u32,
        queue_timeout_s: f64,
        session_admission: bool,
        seed: u64,
        index_memory: usize,
        index_ttl_s: f64,
        kv_index_memory: usize,
    ) -> PyResult<Self> {
        let scheduler = kvlane_core::scheduler::Config {
            timing: timing.as_deref().map(config::timing).transpose()?.map(Box::new),
            max_concurrent_requests,
            max_requests_per_endpoint,
            queue_size,
            queue_timeout: config::span("queue_timeout_s", queue_timeout_s)?,
            session_admission,
            seed,
            ..kvlane_core::scheduler::Config::new(config::policy(policy)?)
        };
        let config = router::Config {
            scheduler,
            index: kvlane_core::index::approx::Config {
                memory_bytes_max: index_memory,
                ttl: config::span("index_ttl_s", index_ttl_s)?,
            },
            exact: kv_events
                .then_some(kvlane_core::index::exact::Config { memory_bytes_max: kv_index_memory }),
            block_tokens: config::block_tokens(block_tokens)?,
        };
        Ok(Self {
            core: router::Router::new(config),
            model: model.to_owned(),
            seed: ChainSeed::new(model, None, None),
            started: Instant::now(),
            state: Mutex::default(),
            feeds: Mutex::default(),
        })
    }

    /// Adds an endpoint. With `kv_events`, `apply_events` or `stored` will report its cache from its start.
    #[pyo3(signature = (endpoint, *, healthy=true, draining=false, kv_events=false, now=None))]
    fn join(
        &self,
        py: Python<'_>,
        endpoint: &str,
        healthy: bool,
        draining: bool,
        kv_events: bool,
        now: Option<f64>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        if kv_events {
            self.check_events()?;
        }
        let mut state = self.state();
        if state.endpoints.contains_key(endpoint) {
            return Err(PyValueError::new_err(format!("endpoint {endpoint}: has joined already")));
        }
        let mut outputs = std::mem::take(&mut state.outputs);
        let joined = self.core.join(now, endpoint.into(), healthy, draining, &mut outputs);
        let id = joined.ok_or_else(|| {
            PyOverflowError::new_err(format!("endpoint {endpoint}: the router has 65,535 endpoints"))
        })?;
        if kv_events {
            self.core.set_feed(now, id, Feed::Live, &mut outputs);
        }
        state.endpoints.insert(endpoint.to_owned(), id);
        state.names.insert(id, PyString::new(py, endpoint).unbind());
        state.deliver(py, outputs, None);
        Ok(())
    }

    /// Removes an endpoint and what is known of its cache. Its requests must still be settled.
    #[pyo3(signature = (endpoint, *, now=None))]
    fn leave(&self, py: Python<'_>, endpoint: &str, now: Option<f64>) -> PyResult<()> {
        let (now, id) = (self.time(now)?, self.id(endpoint)?);
        let mut outputs = Vec::new();
        py.detach(|| self.core.leave(now, id, &mut outputs));
        self.feeds().remove(&id);
        let mut state = self.state();
        state.deliver(py, outputs, None);
        state.endpoints.remove(endpoint);
        state.names.remove(&id);
        Ok(())
    }

    /// Sets whether requests may be placed at an endpoint.
    #[pyo3(signature = (endpoint, healthy, *, now=None))]
    fn set_health(&self, py: Python<'_>, endpoint: &str, healthy: bool, now: Option<f64>) -> PyResult<()> {
        let endpoint = self.id(endpoint)?;
        self.step(py, now, [Input::Health { endpoint, healthy }])
    }

    /// Sets whether an endpoint accepts no new requests; those in flight go on.
    #[pyo3(signature = (endpoint, draining=true, *, now=None))]
    fn drain(&self, py: Python<'_>, endpoint: &str, draining: bool, now: Option<f64>) -> PyResult<()> {
        let endpoint = self.id(endpoint)?;
        self.step(py, now, [Input::Draining { endpoint, draining }])
    }

    /// Forgets what is known of an endpoint's cache: it has restarted, or dropped its cache.
    #[pyo3(signature = (endpoint, *, now=None))]
    fn forget(&self, py: Python<'_>, endpoint: &str, now: Option<f64>) -> PyResult<()> {
        let (now, id) = (self.time(now)?, self.id(endpoint)?);
        let mut outputs = Vec::new();
        py.detach(|| self.core.forget(now, id, &mut outputs));
        self.feeds().remove(&id);
        self.state().deliver(py, outputs, None);
        Ok(())
    }

    /// An endpoint's own report of its load.
    #[pyo3(signature = (endpoint, *, running, waiting, kv_usage_ratio, kv_capacity_tokens=None, now=None))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn report_load(
        &self,
        py: Python<'_>,
        endpoint: &str,
        running: u32,
        waiting: u32,
        kv_usage_ratio: f32,
        kv_capacity_tokens: Option<u64>,
        now: Option<f64>,
    ) -> PyResult<()> {
        let endpoint = self.id(endpoint)?;
        if !(0.0..=1.0).contains(&kv_usage_ratio) {
            return Err(PyValueError::new_err(format!(
                "kv_usage_ratio {kv_usage_ratio}: must be from 0 to 1"
            )));
        }
        let reported = LoadReport { running, waiting, kv_usage_ratio, kv_capacity_tokens };
        self.step(py, now, [Input::Reported { endpoint, reported }])
    }

    /// Sets the state of an endpoint's KV events: `live` (all have been applied), `syncing` (some are missing),
    /// `refused` or `absent`.
    #[pyo3(signature = (endpoint, feed, *, now=None))]
    fn set_feed(&self, py: Python<'_>, endpoint: &str, feed: &str, now: Option<f64>) -> PyResult<()> {
        let (now, id) = (self.time(now)?, self.id(endpoint)?);
        let states = [Feed::Absent, Feed::Refused, Feed::Syncing, Feed::Live];
        let state = states.into_iter().find(|state| state.name() == feed).ok_or_else(|| {
            PyValueError::new_err(format!("feed {feed}: must be live, syncing, refused or absent"))
        })?;
        if state == Feed::Live {
            self.check_events()?;
        }
        let mut outputs = Vec::new();
        self.core.set_feed(now, id, state, &mut outputs);
        self.state().deliver(py, outputs, None);
        Ok(())
    }

    /// A request arrives: where to send it, or that it waits, or that it is rejected.
    #[pyo3(signature = (tokens=None, *, text=None, block_hashes=None, prompt_tokens=None, lora=None, cache_salt=None,
        session=None, tenant=None, priority=0, output_tokens_max=None, streamed=true, excluded=None, attempt=0,
        slo_ttft_ms=None, slo_tpot_ms=None, now=None))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn arrive(
        &self,
        py: Python<'_>,
        tokens: Option<Bound<'_, PyAny>>,
        text: Option<String>,
        block_hashes: Option<Vec<u64>>,
        prompt_tokens: Option<u32>,
        lora: Option<&str>,
        cache_salt: Option<&str>,
        session: Option<&str>,
        tenant: Option<&str>,
        priority: i8,
        output_tokens_max: Option<u32>,
        streamed: bool,
        excluded: Option<Vec<String>>,
        attempt: u32,
        slo_ttft_ms: Option<u32>,
        slo_tpot_ms: Option<u32>,
        now: Option<f64>,
    ) -> PyResult<Decision> {
        let now = self.time(now)?;
        let prompt = Prompt::of(tokens, text, block_hashes, prompt_tokens)?;
        // Tokens may be an object whose methods run Python: no lock is held meanwhile.
        let mut chain = std::mem::take(&mut self.state().chain);
        let prompt_tokens =
            prompt.hash(self.seed_of(lora, cache_salt), self.core.block_tokens(), &mut chain)?;
        let mut state = self.state();
        let State { scratch, outputs, next_request, requests, endpoints, .. } = &mut *state;
        // An endpoint that has left is not chosen anyway.
        let excluded = excluded.iter().flatten().filter_map(|name| endpoints.get(name).copied());
        let id = *next_request;
        *next_request += 1;
        let mut request = SchedulingRequest {
            attempt,
            session: session.map(|name| SessionKey::named(name.as_bytes(), 0)),
            tenant: tenant.map(|name| TenantKey(SessionKey::named(name.as_bytes(), 1).0)),
            priority,
            output_tokens_max,
            whole_answer: !streamed,
            slo: Slo { ttft_ms: slo_ttft_ms, tpot_ms: slo_tpot_ms, ..Slo::default() },
            ..SchedulingRequest::new(RequestId(id), prompt_tokens)
        };
        let mut excluded = excluded.peekable();
        if excluded.peek().is_some() {
            request.excluded = excluded.collect();
        }
        requests.insert(id, Request { prompt_tokens, waits: true, begun: false });
        let mut outputs = std::mem::take(outputs);
        self.core.arrive(now, request, &chain, scratch, &mut outputs);
        state.chain = chain;
        Ok(state.deliver(py, outputs, Some(id)).unwrap_or_else(|| Decision::queued(id)))
    }

    /// `tokens` of a request's answer have arrived.
    #[pyo3(signature = (request, tokens=1, *, now=None))]
    fn progress(&self, py: Python<'_>, request: u64, tokens: u32, now: Option<f64>) -> PyResult<()> {
        let now = self.time(now)?;
        if tokens == 0 {
            return Err(PyValueError::new_err("tokens 0: must be at least 1"));
        }
        let mut state = self.state();
        let of = state.placed(request)?;
        let first = !std::mem::replace(&mut of.begun, true);
        let mut outputs = std::mem::take(&mut state.outputs);
        self.core.progress(now, RequestId(request), first, tokens - u32::from(first), &mut outputs);
        state.deliver(py, outputs, None);
        Ok(())
    }

    /// A request is over: its load is released, and queued requests may be placed (`poll`).
    #[pyo3(signature = (request, outcome="ok", *, output_tokens=None, prompt_tokens=None, cached_tokens=None,
        retry_after_s=None, now=None))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn settle(
        &self,
        py: Python<'_>,
        request: u64,
        outcome: &str,
        output_tokens: Option<u32>,
        prompt_tokens: Option<u32>,
        cached_tokens: Option<u32>,
        retry_after_s: Option<f64>,
        now: Option<f64>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        let retry_after = retry_after_s.map(|secs| config::span("retry_after_s", secs)).transpose()?;
        let mut state = self.state();
        let (of, id) = (state.known(request)?, RequestId(request));
        if of.waits && outcome != "cancelled" {
            return Err(PyValueError::new_err(format!(
                "request {request} is queued: it can only be cancelled"
            )));
        }
        let prompt_tokens = prompt_tokens.unwrap_or(of.prompt_tokens);
        if cached_tokens.is_some_and(|cached| cached > prompt_tokens) {
            return Err(PyValueError::new_err(format!("cached_tokens must be at most {prompt_tokens}")));
        }
        let began = of.begun;
        let mut inputs = Vec::with_capacity(4);
        match outcome {
            "ok" => {
                let wrote = |output_tokens| Input::Wrote { request: id, output_tokens };
                inputs.extend(output_tokens.filter(|&tokens| tokens > 0).map(wrote));
                inputs.extend(cached_tokens.map(|cached_tokens| Input::Answered {
                    request: id,
                    reported: ReportedReuse { prompt_tokens, cached_tokens },
                }));
                inputs.push(Input::Succeeded { request: id });
            }
            "failed" => inputs.push(Input::Failed { request: id }),
            "busy" => inputs.push(Input::Busy { request: id, retry_after }),
            "cancelled" => {}
            other => {
                let text = format!("outcome {other}: must be ok, failed, busy or cancelled");
                return Err(PyValueError::new_err(text));
            }
        }
        inputs.push(Input::Finished { request: id });
        let mut outputs = std::mem::take(&mut state.outputs);
        if outcome == "ok" && !began {
            self.core.begin(now, id, &mut outputs);
        }
        self.core.step_all(now, inputs, &mut outputs);
        state.requests.remove(&request);
        // Its turn may have come since the last poll.
        state.decided.retain(|decision| decision.request != request);
        state.deliver(py, outputs, None);
        Ok(())
    }

    /// Applies a message that an engine published about its cache: the payload of vLLM's or SGLang's KV events. Messages
    /// must come in the engine's order, and all of them; `set_feed(endpoint, "syncing")` says that one is missing.
    fn apply_events(&self, py: Python<'_>, endpoint: &str, payload: &[u8]) -> PyResult<Applied> {
        self.apply_payload(py, endpoint, payload)
    }

    /// An endpoint has stored blocks of these tokens, by the engine's names; `parent` is the block before them.
    #[pyo3(signature = (endpoint, names, tokens, *, parent=None, lora=None, cache_salt=None, tier="gpu"))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn stored(
        &self,
        py: Python<'_>,
        endpoint: &str,
        names: Vec<Name>,
        tokens: &Bound<'_, PyAny>,
        parent: Option<Name>,
        lora: Option<&str>,
        cache_salt: Option<&str>,
        tier: &str,
    ) -> PyResult<Applied> {
        let seed = self.seed_of(lora, cache_salt);
        self.apply_stored(py, endpoint, Blocks { names, tokens, parent, seed, tier })
    }

    /// An endpoint has removed a copy of each of these blocks.
    #[pyo3(signature = (endpoint, names, *, tier="gpu"))]
    fn removed(&self, py: Python<'_>, endpoint: &str, names: Vec<Name>, tier: &str) -> PyResult<Applied> {
        self.apply_removed(py, endpoint, names, tier)
    }

    /// An endpoint has removed all blocks.
    fn cleared(&self, py: Python<'_>, endpoint: &str) -> PyResult<Applied> {
        Ok(self.apply(py, self.id(endpoint)?, &KvEvent::Cleared))
    }

    /// Decisions on queued requests since the last call. Time passes: requests that have waited too long are rejected.
    #[pyo3(signature = (*, now=None))]
    fn poll(&self, py: Python<'_>, now: Option<f64>) -> PyResult<Vec<Decision>> {
        self.step(py, now, [Input::Tick])?;
        Ok(self.state().decided.drain(..).collect())
    }

    /// When to call `poll` if nothing else happens before, in the router's seconds; `None` while no request waits.
    fn next_deadline(&self) -> Option<f64> {
        self.core.read(|scheduler| scheduler.next_deadline()).map(Nanos::as_secs_f64)
    }

    /// The endpoints in the order of their places.
    #[getter]
    fn endpoints(&self) -> Vec<Endpoint> {
        self.core.read(|scheduler| scheduler.pool().endpoints().map(Endpoint::of).collect())
    }

    /// Requests that are queued.
    #[getter]
    fn queued(&self) -> usize {
        self.core.read(|scheduler| scheduler.queued())
    }

    /// Requests that are placed and not settled.
    #[getter]
    fn in_flight(&self) -> usize {
        self.state().requests.values().filter(|request| !request.waits).count()
    }

    /// The policy's name.
    #[getter]
    fn policy(&self) -> &'static str {
        self.core.read(|scheduler| scheduler.config().policy.name())
    }

    /// Prompt tokens per block.
    #[getter]
    fn block_tokens(&self) -> u32 {
        self.core.block_tokens()
    }

    fn __repr__(&self) -> String {
        let endpoints = self.state().endpoints.len();
        format!("Router({}, {endpoints} endpoints, {} requests in flight)", self.policy(), self.in_flight())
    }
}

impl Router {
    /// The time of a call: what the caller says, or seconds since the router was made.
    fn time(&self, now: Option<f64>) -> PyResult<Nanos> {
        match now {
            None => Ok(self.started.elapsed().into()),
            Some(now_s) if (0.0..NOW_MAX_S).contains(&now_s) => Ok(Nanos::from_secs_f64(now_s)),
            Some(now_s) => {
                Err(PyValueError::new_err(format!("now {now_s}: must be from 0 to {NOW_MAX_S} seconds")))
            }
        }
    }

    fn step(
        &self,
        py: Python<'_>,
        now: Option<f64>,
        inputs: impl IntoIterator<Item = Input>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        let mut state = self.state();
        let mut outputs = std::mem::take(&mut state.outputs);
        self.core.step_all(now, inputs, &mut outputs);
        state.deliver(py, outputs, None);
        Ok(())
    }

    /// The chain seed of prompts with this adapter and salt.
    fn seed_of(&self, lora: Option<&str>, cache_salt: Option<&str>) -> ChainSeed {
        match (lora, cache_salt) {
            (None, None) => self.seed,
            _ => ChainSeed::new(&self.model, lora, cache_salt),
        }
    }

    /// The id of an endpoint.
    fn id(&self, endpoint: &str) -> PyResult<EndpointId> {
        let id = self.state().endpoints.get(endpoint).copied();
        id.ok_or_else(|| {
            PyLookupError::new_err(format!(
                "endpoint {endpoint}: has not joined, or has left; call join() first"
            ))
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn feeds(&self) -> MutexGuard<'_, HashMap<EndpointId, Arc<Mutex<events::Decoder>>>> {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// Keeps the decisions among these outputs; returns the one on the request `own`, if there is one.
    fn deliver(&mut self, py: Python<'_>, mut outputs: Vec<Output>, own: Option<u64>) -> Option<Decision> {
        let mut of_own = None;
        for output in outputs.drain(..) {
            let (request, decision) = match output {
                Output::Dispatch { request: RequestId(request), placement } => {
                    if let Some(request) = self.requests.get_mut(&request) {
                        request.waits = false;
                    }
                    (request, Decision::placed(py, request, placement, &self.names))
                }
                Output::Reject { request: RequestId(request), refused } => {
                    self.requests.remove(&request);
                    (request, Decision::rejected(request, refused))
                }
                // The router answers the first itself; `endpoints` shows the others.
                Output::Refresh { .. }
                | Output::Breaker { .. }
                | Output::Drained { .. }
                | Output::Knowledge { .. } => continue,
            };
            if own == Some(request) {
                of_own = Some(decision);
            } else {
                self.decided.push_back(decision);
            }
        }
        self.outputs = outputs;
        of_own
    }

    /// A request that is queued or in flight.
    fn known(&mut self, request: u64) -> PyResult<&mut Request> {
        self.requests.get_mut(&request).ok_or_else(|| {
            PyLookupError::new_err(format!(
                "request {request} is neither queued nor in flight: it is settled, was rejected, or never arrived"
            ))
        })
    }

    /// A request that is in flight.
    fn placed(&mut self, request: u64) -> PyResult<&mut Request> {
        let of = self.known(request)?;
        match of.waits {
            true => Err(PyValueError::new_err(format!("request {request} is queued: it has no answer yet"))),
            false => Ok(of),
        }
    }
}
