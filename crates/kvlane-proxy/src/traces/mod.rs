//! Traces: the spans of each request, sent to an OpenTelemetry collector.
//!
//! A request starts or continues a trace (W3C Trace Context), and is recorded or not: as its caller decided, or by a
//! share. A recorded request has a span of its own, one for each stage and one for each attempt; the attempt's id is
//! sent to the engine as the parent. All spans are made when the request has ended, wait in a bounded queue, and are
//! sent by a dedicated thread (`export`). They contain nothing of prompts, answers, keys or sessions.

pub mod config;

use std::borrow::Cow;
use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::header::HeaderName;
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use kvlane_fleet::clock::{Clock, unix_time};
use kvlane_fleet::metrics::SpanMetrics;
use kvlane_wire::api::Api;
use kvlane_wire::otlp::{Span, SpanKind, Value};
use kvlane_wire::server_timing::Stage;
use kvlane_wire::trace_context::{RANDOM, SAMPLED, SpanId, TraceContext, TraceId};
use tokio::sync::mpsc;

use crate::traces::config::Tracing;

/// The W3C header with the trace id and the parent span.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The W3C header with vendor-specific state. Passed on unchanged.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Most recorded attempts of one request, and most intervals of its stages.
pub const SPANS_MAX: usize = 32;
/// Most bytes of a recorded path.
const PATH_LEN_MAX: usize = 256;
/// Most bytes of a recorded `tracestate`. All of it is passed on.
const TRACE_STATE_LEN_MAX: usize = 512;
/// The random bits of a trace id that decide on sampling.
const DRAWN_BITS: u32 = 56;

/// The queue of finished spans for the exporting thread.
pub struct Traces {
    /// Identifies this process to collectors.
    pub instance: String,
    queue: mpsc::Sender<Vec<Span>>,
    /// Until the exporting thread takes it.
    waiting: Mutex<Option<mpsc::Receiver<Vec<Span>>>>,
}

/// One request's part of a trace.
#[derive(Debug)]
pub struct RequestTrace {
    /// The trace, and this request's own span in it.
    pub(crate) context: TraceContext,
    /// The caller's span, if the caller sent one.
    caller: Option<SpanId>,
    /// The record; none if the request is not recorded.
    pub(crate) record: Option<Record>,
}

#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) clock: Clock,
    /// Nanoseconds since 1970 at the clock's zero.
    unix_zero: u64,
    pub(crate) api: Option<Api>,
    pub(crate) method: String,
    path: String,
    trace_state: String,
    /// The spans of finished attempts.
    attempts: Mutex<Vec<Span>>,
    /// Of a split request: the attempt that computes the prompt; 0 without one.
    prefill: AtomicU64,
}

/// The outcome of a request.
pub struct Ending<'a> {
    pub(crate) received: Nanos,
    pub(crate) status: u16,
    /// Whether the client disconnected before the end.
    pub left: bool,
    pub(crate) model: Option<&'a str>,
    pub(crate) request_id: &'a str,
    pub(crate) request_stages: RequestStages,
}

/// The request_stages of a request, as its trace shows it.
pub struct RequestStages {
    /// Its stages in order, with start and end.
    pub stages: Vec<(Stage, Nanos, Nanos)>,
    /// When its response began.
    pub began: Option<Nanos>,
    /// The attempt that was answered.
    pub winner: Option<SpanId>,
}

// === impl Traces ===

impl Traces {
    pub(crate) fn new(config: &Tracing) -> Self {
        let (queue, waiting) = mpsc::channel(config.queue_size.max(1));
        let instance = made_trace().to_string();
        Self { instance, queue, waiting: Mutex::new(Some(waiting)) }
    }

    /// Starts the trace of a request. None if traces are off.
    pub fn begin(
        config: &Tracing,
        clock: Clock,
        api: Option<Api>,
        parts: &Parts,
    ) -> Option<Arc<RequestTrace>> {
        config.endpoint.as_ref()?;
        let headers = &parts.headers;
        let caller = only(headers, &TRACEPARENT).and_then(TraceContext::parse);
        let trace = caller.map_or_else(made_trace, |caller| caller.trace);
        let sampled = match caller {
            Some(caller) if config.follow_parent => caller.is_sampled(),
            _ => is_drawn(trace, config.sample_ratio.get()),
        };
        let random = caller.map_or(RANDOM, |caller| caller.flags & RANDOM);
        let flags = random | if sampled { SAMPLED } else { 0 };
        let record = sampled.then(|| Record {
            clock,
            unix_zero: ((unix_time() * 1e9) as u64).saturating_sub(clock.now().0),
            api,
            method: parts.method.to_string(),
            path: parts.uri.path().chars().take(PATH_LEN_MAX).collect(),
            trace_state: if caller.is_some() { trace_state(headers) } else { String::new() },
            attempts: Mutex::default(),
            prefill: AtomicU64::new(0),
        });
        let context = TraceContext { trace, span: made_span(), flags };
        Some(Arc::new(RequestTrace { context, caller: caller.map(|caller| caller.span), record }))
    }

    /// Queues spans for the exporting thread; counts them as dropped if the queue is full.
    pub fn tell(&self, metrics: &SpanMetrics, spans: Vec<Span>) {
        let count = spans.len();
        if self.queue.try_send(spans).is_err() {
            metrics.note("dropped", count as u64);
        }
    }

    /// The receiver of finished spans, for the one task that exports them; `None` once it is taken.
    pub fn receiver(&self) -> Option<mpsc::Receiver<Vec<Span>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

// === impl RequestTrace ===

impl RequestTrace {
    /// Whether the request is recorded.
    pub fn is_recorded(&self) -> bool {
        self.record.is_some()
    }

    /// The trace id.
    pub fn id(&self) -> TraceId {
        self.context.trace
    }

    /// Whether the client's trace headers are to be passed on.
    pub fn has_caller(&self) -> bool {
        self.caller.is_some()
    }

    /// The trace context for an engine: the attempt is its parent. If the request is not recorded, the caller stays
    /// the parent.
    pub fn outgoing(&self, attempt: Option<SpanId>) -> TraceContext {
        let parent = attempt.or(self.caller.filter(|_| !self.is_recorded()));
        TraceContext { span: parent.unwrap_or(self.context.span), ..self.context }
    }

    /// The request has ended: returns all of its spans, including those of attempts.
    pub fn finish(&self, ending: &Ending<'_>) -> Vec<Span> {
        let Some(record) = &self.record else { return Vec::new() };
        let mut spans = std::mem::take(&mut *record.attempts());
        let own = self.context.span;
        let RequestStages { stages, began, winner } = &ending.request_stages;
        for &(stage, from, to) in stages {
            let parent = match stage {
                Stage::Send | Stage::Engine | Stage::Transfer => winner.unwrap_or(own),
                Stage::Prefill => record.prefill().unwrap_or(own),
                _ => own,
            };
            spans.push(self.span(record, made_span(), parent, stage.name().into(), from, to));
        }
        let now = record.clock.now();
        if let (Some(began), Some(winner)) = (*began, *winner) {
            spans.push(self.span(record, made_span(), winner, "answer".into(), began, now));
        }
        let route = record.api.map(|_| record.path.clone());
        let name = match &route {
            Some(route) => format!("{} {route}", record.method),
            None => record.method.clone(),
        };
        let mut attributes: Vec<(&'static str, Value)> = vec![
            ("http.request.method", record.method.clone().into()),
            ("url.path", record.path.clone().into()),
            ("http.response.status_code", Value::Int(ending.status.into())),
            ("kvlane.request_id", ending.request_id.to_owned().into()),
        ];
        attributes.extend(route.map(|route| ("http.route", route.into())));
        attributes.extend(ending.model.map(|model| ("kvlane.model", model.to_owned().into())));
        if ending.left {
            attributes.push(("error.type", "client_left".into()));
        }
        // For a server only its own faults are errors (HTTP semantic conventions).
        let failed = StatusCode::from_u16(ending.status).is_ok_and(|status| status.is_server_error());
        if failed && !ending.left {
            attributes.push(("error.type", ending.status.to_string().into()));
        }
        spans.push(Span {
            parent: self.caller,
            parent_is_remote: self.caller.is_some(),
            kind: SpanKind::Server,
            attributes,
            error: failed.then_some(Cow::Borrowed("")),
            ..self.span(record, own, own, name.into(), ending.received, now)
        });
        spans
    }

    /// One of its spans, without error so far.
    pub(crate) fn span(
        &self,
        record: &Record,
        id: SpanId,
        parent: SpanId,
        name: Cow<'static, str>,
        from: Nanos,
        to: Nanos,
    ) -> Span {
        Span {
            trace: self.context.trace,
            id,
            parent: Some(parent),
            parent_is_remote: false,
            flags: self.context.flags,
            trace_state: record.trace_state.clone(),
            name,
            kind: SpanKind::Internal,
            start: record.unix_zero.saturating_add(from.0),
            end: record.unix_zero.saturating_add(to.0.max(from.0)),
            attributes: Vec::new(),
            error: None,
        }
    }
}

// === impl Record ===

impl Record {
    pub(crate) fn attempts(&self) -> MutexGuard<'_, Vec<Span>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This attempt computes the prompt of a split request.
    pub(crate) fn note_prefill(&self, attempt: SpanId) {
        self.prefill.store(attempt.0, Ordering::Relaxed);
    }

    fn prefill(&self) -> Option<SpanId> {
        Some(self.prefill.load(Ordering::Relaxed)).filter(|id| *id > 0).map(SpanId)
    }
}

/// The value of a header that occurs once; none if it occurs several times.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none()).map(|value| value.as_bytes())
}

/// The `tracestate`: several headers are one list.
fn trace_state(headers: &HeaderMap) -> String {
    let lists: Vec<_> = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok()).collect();
    let mut list = lists.join(",");
    if list.len() > TRACE_STATE_LEN_MAX {
        // The text is ASCII, so it can be cut anywhere; a partial entry is dropped.
        let end = list[..TRACE_STATE_LEN_MAX].rfind(',').unwrap_or(0);
        list.truncate(end);
    }
    list
}

/// Whether a trace is in the recorded share: the same at every gateway.
fn is_drawn(trace: TraceId, ratio: f64) -> bool {
    let drawn = trace.0 as u64 & ((1 << DRAWN_BITS) - 1);
    drawn < (ratio * (1u64 << DRAWN_BITS) as f64) as u64
}

thread_local! {
    /// Span ids must be unique, not hard to guess.
    static NAMES: RefCell<Rng> = RefCell::new(Rng::new(RandomState::new().hash_one(std::process::id())));
}

fn made_trace() -> TraceId {
    let draw = || u128::from(NAMES.with_borrow_mut(Rng::next_u64));
    TraceId((draw() << 64 | draw()).max(1))
}

pub(crate) fn made_span() -> SpanId {
    SpanId(NAMES.with_borrow_mut(Rng::next_u64).max(1))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use kvlane_core::bounded::Share;
    use proptest::prelude::*;

    use super::*;

    fn begun(config: &Tracing, headers: &[(&'static str, &str)]) -> Arc<RequestTrace> {
        let mut parts = http::Request::post("/v1/completions").body(()).expect("a request").into_parts().0;
        for (name, value) in headers {
            parts.headers.append(*name, HeaderValue::from_str(value).expect("a value"));
        }
        Traces::begin(config, Clock::start(0.0), Some(Api::Completions), &parts).expect("there are traces")
    }

    fn config(sample_ratio: f64) -> Tracing {
        let sample_ratio = Share::of(sample_ratio);
        Tracing { endpoint: Some("http://127.0.0.1:4318".into()), sample_ratio, ..Tracing::default() }
    }

    const SAMPLED_CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const OTHER_CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

    #[test]
    fn the_callers_sampling_decision_counts_where_it_is_followed() {
        for ratio in [0.0, 1.0] {
            let mut config = config(ratio);
            assert!(begun(&config, &[("traceparent", SAMPLED_CALLER)]).is_recorded());
            assert!(!begun(&config, &[("traceparent", OTHER_CALLER)]).is_recorded());
            assert_eq!(begun(&config, &[]).is_recorded(), ratio == 1.0);
            config.follow_parent = false;
            for caller in [SAMPLED_CALLER, OTHER_CALLER] {
                assert_eq!(begun(&config, &[("traceparent", caller)]).is_recorded(), ratio == 1.0);
            }
        }
    }

    #[test]
    fn an_engine_gets_the_attempt_or_the_callers_span_as_parent() {
        let recorded = begun(&config(1.0), &[("traceparent", SAMPLED_CALLER)]);
        let told = recorded.outgoing(Some(SpanId(9))).to_string();
        assert_eq!(told, "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000009-01");
        let other = begun(&config(1.0), &[("traceparent", OTHER_CALLER)]);
        assert_eq!(other.outgoing(None).to_string(), OTHER_CALLER);
        let fresh = begun(&config(0.0), &[("traceparent", "nonsense")]);
        assert!(!fresh.has_caller() && !fresh.outgoing(None).is_sampled());
        let twice = begun(&config(0.0), &[("traceparent", SAMPLED_CALLER), ("traceparent", OTHER_CALLER)]);
        assert!(!twice.has_caller());
    }

    #[test]
    fn a_long_tracestate_is_cut_in_the_record() {
        let (long, more) = (format!("a={}", "x".repeat(400)), format!("b={}", "y".repeat(200)));
        let headers = [("traceparent", SAMPLED_CALLER), ("tracestate", &*long), ("tracestate", &*more)];
        let trace = begun(&config(1.0), &headers);
        assert_eq!(trace.record.as_ref().map(|record| record.trace_state.clone()), Some(long));
    }

    proptest! {
        #[test]
        fn a_trace_in_a_share_is_in_every_larger_share(trace in 1u128.., a in 0.0..=1.0f64, b in 0.0..=1.0f64) {
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(!is_drawn(TraceId(trace), less) || is_drawn(TraceId(trace), more));
            prop_assert!(is_drawn(TraceId(trace), 1.0) && !is_drawn(TraceId(trace), 0.0));
        }
    }

    #[test]
    fn the_sampled_share_is_about_the_configured_one() {
        let drawn = (0..10_000).filter(|_| is_drawn(made_trace(), 0.25)).count();
        assert!((2_200..2_800).contains(&drawn), "{drawn}");
    }
}
