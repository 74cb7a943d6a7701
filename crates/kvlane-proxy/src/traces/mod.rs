//! Traces: what became of one request, told to an OpenTelemetry collector.
//!
//! A request begins or continues a trace (W3C Trace Context), and is recorded or not: as its caller says, or by a share.
//! Recorded, it has a span of its own, one for each stage and one for each attempt, whose name goes to the engine as the
//! parent. All of them are made when the request is over, wait in a bounded queue, and are sent by a thread that does
//! nothing else (`export`). There is nothing in them of prompts, answers, keys or sessions.

pub mod config;

use std::borrow::Cow;
use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
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

/// Which trace a request is part of, and who its parent is.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// What others say of the trace. Passed on as it is.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Most attempts of one request that are told of, and most intervals of its stages.
pub const SPANS_MAX: usize = 32;
/// Bytes of a path that are told.
const PATH_LEN_MAX: usize = 256;
/// Bytes of a `tracestate` that are told. All of it is passed on.
const TRACE_STATE_LEN_MAX: usize = 512;
/// The random part of a trace's name, by which a share of them is drawn.
const DRAWN_BITS: u32 = 56;

/// Where finished spans wait for the thread that sends them.
pub struct Traces {
    /// Names this process to collectors.
    pub instance: String,
    queue: mpsc::Sender<Vec<Span>>,
    /// Until that thread takes it.
    waiting: Mutex<Option<mpsc::Receiver<Vec<Span>>>>,
}

/// One request's part of a trace.
#[derive(Debug)]
pub struct RequestTrace {
    /// The trace, and this request's own span in it.
    pub(crate) context: TraceContext,
    /// The caller, if it has said who it is.
    caller: Option<SpanId>,
    /// What is recorded; nothing if it is not.
    pub(crate) record: Option<Record>,
}

#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) clock: Clock,
    /// Nanoseconds since 1970 when that clock showed zero.
    unix_zero: u64,
    pub(crate) api: Option<Api>,
    pub(crate) method: String,
    path: String,
    trace_state: String,
    /// The attempts that are over.
    attempts: Mutex<Vec<Span>>,
}

/// How a request ended.
pub struct Ending<'a> {
    pub(crate) received: Nanos,
    pub(crate) status: u16,
    /// Whether the client left before.
    pub left: bool,
    pub(crate) model: Option<&'a str>,
    pub(crate) request_id: &'a str,
    pub(crate) course: Course,
}

/// The course of a request, as its trace shows it.
pub struct Course {
    /// Its stages, one after the other: from when to when.
    pub stages: Vec<(Stage, Nanos, Nanos)>,
    /// When its answer began.
    pub began: Option<Nanos>,
    /// The attempt that the answer came of.
    pub winner: Option<SpanId>,
}

// === impl Traces ===

impl Traces {
    pub(crate) fn new(config: &Tracing) -> Self {
        let (queue, waiting) = mpsc::channel(config.queue_size.max(1));
        let instance = made_trace().to_string();
        Self { instance, queue, waiting: Mutex::new(Some(waiting)) }
    }

    /// A request has come. Nothing if there are no traces.
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
        });
        let context = TraceContext { trace, span: made_span(), flags };
        Some(Arc::new(RequestTrace { context, caller: caller.map(|caller| caller.span), record }))
    }

    /// Hands spans to the thread that sends them; counts them if it has too many already.
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
    /// Whether it is recorded.
    pub fn is_recorded(&self) -> bool {
        self.record.is_some()
    }

    /// Names the trace.
    pub fn id(&self) -> TraceId {
        self.context.trace
    }

    /// Whether what the client has said of the trace is to be passed on.
    pub fn has_caller(&self) -> bool {
        self.caller.is_some()
    }

    /// What an engine is told: the attempt is its parent. Where nothing is recorded here, the caller stays the parent.
    pub fn outgoing(&self, attempt: Option<SpanId>) -> TraceContext {
        let parent = attempt.or(self.caller.filter(|_| !self.is_recorded()));
        TraceContext { span: parent.unwrap_or(self.context.span), ..self.context }
    }

    /// The request is over: all of its spans, the attempts' among them.
    pub fn finish(&self, ending: &Ending<'_>) -> Vec<Span> {
        let Some(record) = &self.record else { return Vec::new() };
        let mut spans = std::mem::take(&mut *record.attempts());
        let own = self.context.span;
        let Course { stages, began, winner } = &ending.course;
        for &(stage, from, to) in stages {
            let parent = match stage {
                Stage::Send | Stage::Engine => winner.unwrap_or(own),
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
        // To a server an error is what is its own fault (HTTP semantic conventions).
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

    /// One of its spans, in which nothing went wrong so far.
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
}

/// The value of a header that is there once. Twice is as good as not at all.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none()).map(|value| value.as_bytes())
}

/// What others say of the trace: several headers are one list.
fn trace_state(headers: &HeaderMap) -> String {
    let lists: Vec<_> = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok()).collect();
    let mut list = lists.join(",");
    if list.len() > TRACE_STATE_LEN_MAX {
        // ASCII, so any place will do; an entry that is cut says nothing.
        let end = list[..TRACE_STATE_LEN_MAX].rfind(',').unwrap_or(0);
        list.truncate(end);
    }
    list
}

/// Whether a trace is of the share that is recorded: the same answer wherever it is asked.
fn is_drawn(trace: TraceId, ratio: f64) -> bool {
    let drawn = trace.0 as u64 & ((1 << DRAWN_BITS) - 1);
    drawn < (ratio * (1u64 << DRAWN_BITS) as f64) as u64
}

thread_local! {
    /// Names are unlikely to meet, not hard to guess.
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
    fn the_caller_says_whether_a_trace_is_recorded_where_it_is_followed() {
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
    fn an_engine_hears_of_the_attempt_or_of_whom_the_caller_named() {
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
    fn what_others_say_of_a_trace_is_kept_to_a_length() {
        let (long, more) = (format!("a={}", "x".repeat(400)), format!("b={}", "y".repeat(200)));
        let headers = [("traceparent", SAMPLED_CALLER), ("tracestate", &*long), ("tracestate", &*more)];
        let trace = begun(&config(1.0), &headers);
        assert_eq!(trace.record.as_ref().map(|record| record.trace_state.clone()), Some(long));
    }

    proptest! {
        #[test]
        fn who_is_drawn_by_a_share_is_drawn_by_every_larger_one(trace in 1u128.., a in 0.0..=1.0f64, b in 0.0..=1.0f64) {
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(!is_drawn(TraceId(trace), less) || is_drawn(TraceId(trace), more));
            prop_assert!(is_drawn(TraceId(trace), 1.0) && !is_drawn(TraceId(trace), 0.0));
        }
    }

    #[test]
    fn a_share_is_about_as_large_as_it_says() {
        let drawn = (0..10_000).filter(|_| is_drawn(made_trace(), 0.25)).count();
        assert!((2_200..2_800).contains(&drawn), "{drawn}");
    }
}
