//! The open-loop client.
//!
//! Conversations begin at their timestamps, and the next turn is sent when the previous answer has ended and its
//! think time has passed: see [`Plan`]. The number of requests in flight is not limited, since a limit would make the
//! loop a closed one; it is bounded by the trace's length and `request_timeout`. The report contains the lateness of
//! requests, and whether the client was the bottleneck.

mod body;
mod client;
mod clock;
mod error;
pub mod stages;
mod travel;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use kvlane_core::time::Nanos;
use kvlane_trace::plan::Plan;
use kvlane_trace::record::Record;
use kvlane_trace::trace::{Trace, TraceRequest};
use kvlane_wire::models;
use serde_json::{Map, Value};
use tokio::sync::Notify;

use self::body::Bodies;
use self::client::Watch;
pub use self::client::{Bounds, Client};
use self::clock::{Clock, Parts, Word};
pub use self::error::{ErrorClass, ReplayError};
use self::travel::{Arrival, Departure, travel};
use crate::client::{CONNECT_TIMEOUT, Target, bearer};
use crate::prompt::Words;
use crate::prompt::given::Given;
use crate::statistics::histogram::Histogram;
use crate::statistics::summary::Percentiles;

/// Header with the conversation of a request, for a router.
const SESSION: HeaderName = HeaderName::from_static("x-session-id");

/// Header with the length of the answer, for a mock engine.
const OUTPUT_TOKENS: HeaderName = HeaderName::from_static("x-mock-output-tokens");

/// Maximum prompt that is sent, in tokens of the trace: 8 MB of text.
pub const PROMPT_TOKENS_MAX: u32 = 2_000_000;

/// Bytes of a list of models that are read.
const MODELS_BYTES_MAX: usize = 16 << 20;

/// Failures whose messages are kept in a report.
pub const ERRORS_KEPT_MAX: usize = 16;

/// From the call to the replay's start, so that the first bodies are written by then.
const LEAD: Duration = Duration::from_millis(100);

/// Maximum time from the start to an arrival, and maximum think time: one year.
const SECONDS_MAX: f64 = 3.2e7;

/// Settings of a replay.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Address of the server, `http://host:port` or `https://host`; a path before `/v1` is kept.
    pub base_url: String,
    /// The `model` of every request. If empty, given bodies keep theirs.
    pub model: String,
    /// The trace. Arrivals are seconds after the replay's start. A request that comes after another waits for it.
    pub trace: Arc<Trace>,
    /// Arrivals of conversations are divided by this; the pace within a conversation does not change. 1 is the
    /// trace's own.
    pub speed: f64,
    /// Seed of the text; another seed gives text that no cache holds.
    pub seed: u64,
    /// Timeout of a request.
    pub request_timeout: Duration,
    /// Ask for exactly `max_tokens` tokens (`ignore_eos`, an extension of vLLM and SGLang; llama.cpp knows it too).
    pub ignore_eos: bool,
    /// Send the length of each answer as `max_tokens`. Without it, only a mock engine learns the length, by a header.
    pub tell_lengths: bool,
    /// API key, sent as a bearer token.
    pub api_key: Option<String>,
    /// Source of prompts.
    pub prompts: Prompts,
    /// The API, if the prompt does not determine it.
    pub api: Api,
    /// Further headers of every request. They replace those that a replay sends itself.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Further fields of every body. They replace those that a replay writes itself, but for the prompt.
    pub fields: Map<String, Value>,
    /// CAs for an `https` address.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// Ends the replay early when notified: requests in flight are cancelled, and only ended ones are reported.
    pub stop: Arc<Notify>,
}

/// Source of prompts.
#[derive(Clone, Debug)]
pub enum Prompts {
    /// Words from the trace's block ids: equal ids are equal text.
    Words(Words),
    /// Real prompts: the first for the trace's first request and so on, from the first again when all were sent.
    Given(Arc<Vec<Given>>),
}

/// The API of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`, the prompt as one message.
    #[default]
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self {
            base_url: "http://127.0.0.1:30000".into(),
            model: "mock".into(),
            trace: Arc::default(),
            speed: 1.0,
            seed: 0,
            request_timeout: Duration::from_secs(1800),
            ignore_eos: true,
            tell_lengths: true,
            api_key: None,
            prompts: Prompts::Words(Words::default()),
            api: Api::Chat,
            headers: Vec::new(),
            fields: Map::new(),
            tls: None,
            stop: Arc::default(),
        }
    }
}

/// Results of a replay.
#[derive(Clone, Debug)]
pub struct ReplayReport {
    /// One record per request, in the trace's order. Times are seconds since the replay's start, not scaled back.
    pub records: Vec<Record>,
    /// Requests without a record, because the replay was interrupted.
    pub unfinished: usize,
    /// From the start to the last request's end, in seconds.
    pub wall_s: f64,
    /// Lateness of sent requests, in seconds. Large values mean that the client was the bottleneck. `None` for an
    /// empty trace.
    pub client_lag_s: Option<Percentiles>,
    /// Further state of the client.
    pub client: Client,
    /// Seconds between any two tokens of an answer, over the answers that were complete, to within 3 %.
    pub itl_s: Option<Percentiles>,
    /// Messages of the first failures, as text: at most [`ERRORS_KEPT_MAX`].
    pub first_errors: Vec<String>,
}

/// Stops the clock when the replay is dropped.
struct Hold(mpsc::Sender<Word<Departure>>);

/// Sends every request at its time and returns when all have ended. `progress` is called with (ended, total) after
/// each end. Requests in flight are cancelled when the future is dropped.
///
/// # Errors
///
/// Only for invalid settings; a request that fails is a record with an `error`.
pub async fn replay(
    config: ReplayConfig,
    mut progress: impl FnMut(usize, usize),
) -> Result<ReplayReport, ReplayError> {
    check(&config)?;
    let target = Arc::new(target(&config)?);
    let bodies = Bodies::new(&config)?;
    let (trace, speed, timeout) = (config.trace.clone(), config.speed, config.request_timeout);
    let stop = config.stop.clone();
    let plan = Plan::new(&trace);
    let total = trace.requests.len();
    let mut watch = Watch::begin();
    let start = Instant::now() + LEAD;

    let (word, words) = mpsc::channel();
    let (scribe, asked) = mpsc::channel();
    let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
    // Requests in flight end when this is dropped.
    let (_alive, gone) = tokio::sync::watch::channel(());
    let written = word.clone();
    let scribe_target = target.clone();
    spawn("replay-scribe", move || {
        for (request, due) in asked {
            let departure = prepare(&config, &bodies, &scribe_target, request, due);
            if written.send(Word::Written(request, departure)).is_err() {
                return;
            }
        }
    })?;
    let runtime = tokio::runtime::Handle::current();
    let depart = move |departure: Departure| {
        let (target, arrived, mut gone) = (target.clone(), arrived.clone(), gone.clone());
        runtime.spawn(async move {
            tokio::select! {
                biased;
                _ = gone.changed() => {}
                arrival = travel(target, departure, start, timeout) => { arrived.send(arrival).ok(); }
            }
        });
    };
    let clock_trace = trace.clone();
    let roots = roots(&trace, &plan, speed).into_iter();
    let clock = Clock::new(Parts { start, roots, words, scribe });
    spawn("replay-clock", move || {
        clock.run(total, |request| clock_trace.requests[request as usize].input_tokens, depart);
    })?;

    let hold = Hold(word);
    let mut records: Vec<Record> = Vec::with_capacity(total);
    let (mut first_errors, mut itl) = (Vec::new(), Histogram::default());
    while records.len() < total {
        let arrival = tokio::select! {
            biased;
            arrival = arrivals.recv() => arrival,
            () = stop.notified() => break,
            never = watch.look() => match never {},
        };
        let Arrival { record, gaps, failure } = arrival.expect("the clock has let all requests depart");
        let ended = Nanos::from_secs_f64(record.end_s);
        for turn in plan.children(record.id as u32) {
            let root = plan.root[turn as usize];
            let began = Nanos::from_secs_f64(trace.requests[root as usize].arrival_s / speed);
            // If the clock is gone, there is nothing left to send.
            hold.0.send(Word::Due(turn, plan.due(&trace, turn, began, ended))).ok();
        }
        if failure.is_none() {
            itl.merge(&gaps);
        } else if first_errors.len() < ERRORS_KEPT_MAX {
            first_errors.extend(failure.map(|text| format!("request {}: {text}", record.id)));
        }
        records.push(record);
        progress(records.len(), total);
    }
    records.sort_unstable_by_key(|record: &Record| record.id);
    let wall_s = records.iter().map(|record| record.end_s).fold(0.0, f64::max);
    let mut lags: Vec<f64> = records.iter().map(Record::lag_s).collect();
    let client = watch.end(&mut lags);
    let client_lag_s = client.lag_s;
    let unfinished = total - records.len();
    let itl_s = itl.percentiles();
    Ok(ReplayReport { records, unfinished, wall_s, client_lag_s, client, itl_s, first_errors })
}

/// The models that the server serves.
///
/// # Errors
///
/// If the address or key is invalid, or the server does not answer with a list.
pub async fn models(config: &ReplayConfig) -> Result<Vec<String>, ReplayError> {
    let fail = |why: String| ReplayError::Models { url: config.base_url.clone(), why };
    let asked = target(config)?.ask(Method::GET, "/v1/models", CONNECT_TIMEOUT, MODELS_BYTES_MAX).await;
    let (status, body) = asked.map_err(fail)?;
    if status != StatusCode::OK {
        return Err(fail(format!("GET /v1/models answered {status}")));
    }
    let listed = models::parse(&body).map_err(|error| fail(error.to_string()))?;
    Ok(listed.into_iter().filter(|model| model.parent.is_none()).map(|model| model.id).collect())
}

/// The server, with the fields of every request.
fn target(config: &ReplayConfig) -> Result<Target, ReplayError> {
    let mut headers = HeaderMap::new();
    if let Some(key) = &config.api_key {
        headers.extend([bearer(key).ok_or(ReplayError::ApiKey)?]);
    }
    headers.extend(config.headers.iter().cloned());
    let target = Target::new(&config.base_url, config.tls.clone(), headers);
    target.map_err(|why| ReplayError::BaseUrl { url: config.base_url.clone(), why })
}

/// Whether every request can be sent.
fn check(config: &ReplayConfig) -> Result<(), ReplayError> {
    if !(config.speed.is_finite() && config.speed > 0.0) {
        return Err(ReplayError::Speed { speed: config.speed });
    }
    for (index, request) in config.trace.requests.iter().enumerate() {
        let TraceRequest { arrival_s, input_tokens, think_s, .. } = *request;
        if !(0.0..=SECONDS_MAX).contains(&(arrival_s / config.speed)) {
            return Err(ReplayError::Arrival { index, arrival_s });
        }
        if let Some(think_s) = think_s.filter(|&think_s| !(0.0..=SECONDS_MAX as f32).contains(&think_s)) {
            return Err(ReplayError::Think { index, think_s });
        }
        if input_tokens > PROMPT_TOKENS_MAX {
            return Err(ReplayError::TooLong { index, tokens: input_tokens });
        }
    }
    Ok(())
}

/// Start times of conversations, in order. Those with equal timestamps keep the trace's order.
fn roots(trace: &Trace, plan: &Plan, speed: f64) -> Vec<(Nanos, u32)> {
    let due = |root: u32| Nanos::from_secs_f64(trace.requests[root as usize].arrival_s / speed);
    let mut roots: Vec<_> = plan.roots.iter().map(|&root| (due(root), root)).collect();
    roots.sort_unstable();
    roots
}

/// The item that departs for a request due then.
fn prepare(config: &ReplayConfig, bodies: &Bodies, target: &Target, index: u32, due: Nanos) -> Departure {
    let asked = &config.trace.requests[index as usize];
    let (api, body) = bodies.write(index);
    let mut own = vec![
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (ACCEPT, HeaderValue::from_static("text/event-stream")),
        (SESSION, HeaderValue::from(asked.session)),
    ];
    if !config.tell_lengths {
        own.push((OUTPUT_TOKENS, HeaderValue::from(asked.output_tokens.max(1))));
    }
    let shared_tokens = asked.base.map(|_| asked.shared_blocks.saturating_mul(config.trace.block_tokens));
    let record = Record {
        id: u64::from(index),
        scheduled_s: due.as_secs_f64(),
        prompt_tokens: asked.input_tokens,
        session: Some(asked.session),
        base: asked.base.map(u64::from),
        shared_tokens,
        // The last token is never taken from a cache.
        reusable_tokens: match &config.prompts {
            Prompts::Words(_) => Some(shared_tokens.unwrap_or(0).min(asked.input_tokens.saturating_sub(1))),
            Prompts::Given(_) => None,
        },
        after: asked.after.filter(|&after| after < index).map(u64::from),
        think_s: asked.think_s.map(f64::from),
        ..Record::default()
    };
    Departure { request: target.request(Method::POST, api.path(), body.into(), own), record }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), ReplayError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(work);
    spawned.map(|_| ()).map_err(ReplayError::Thread)
}

// === impl Api ===

impl Api {
    /// Its path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

// === impl Hold ===

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.send(Word::Stop).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use kvlane_trace::trace::{Builder, TraceRequest};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const HEADERS: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-router-backend: e1\r\n";
    const EVENTS: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" a\"}}]}\n\n\
        data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" b\"},\"finish_reason\":\"length\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"total_tokens\":11,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";

    /// What the server of a test does with each connection once it has read the request.
    #[derive(Clone, Copy)]
    enum Behaviour {
        Answer,
        NoDone,
        BreakOff,
        CloseAtOnce,
        Refuse,
        Fail,
        Silence,
    }

    /// Reads one request to its end and returns its body.
    async fn read_request(stream: &mut (impl AsyncReadExt + Unpin)) -> Option<String> {
        let mut bytes = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let head = head.to_ascii_lowercase();
                let length =
                    head.split("content-length: ").nth(1)?.split("\r\n").next()?.parse::<usize>().ok()?;
                if body.len() >= length {
                    return Some(body.to_owned());
                }
            }
            if stream.read_buf(&mut bytes).await.ok()? == 0 {
                return None;
            }
        }
    }

    async fn behave(mut stream: TcpStream, behaviour: Behaviour) {
        if read_request(&mut stream).await.is_none() {
            return;
        }
        let length =
            |body: &str| format!("content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        let answer = match behaviour {
            Behaviour::Answer => format!("{HEADERS}{}", length(&format!("{EVENTS}data: [DONE]\n\n"))),
            Behaviour::NoDone => format!("{HEADERS}{}", length(EVENTS)),
            Behaviour::BreakOff => format!("{HEADERS}content-length: 100000\r\n\r\n{EVENTS}"),
            Behaviour::CloseAtOnce => return,
            Behaviour::Refuse => format!("HTTP/1.1 503 No\r\n{}", length("no endpoint ready")),
            Behaviour::Fail => {
                let body = format!(
                    "{EVENTS}data: {{\"error\":{{\"message\":\"out of memory\"}}}}\n\ndata: [DONE]\n\n"
                );
                format!("{HEADERS}{}", length(&body))
            }
            Behaviour::Silence => std::future::pending().await,
        };
        // The client may have given up already; what it recorded is what the test looks at.
        let _ = stream.write_all(answer.as_bytes()).await;
        let _ = stream.shutdown().await;
    }

    async fn server(behaviour: Behaviour) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(behave(stream, behaviour));
            }
        });
        addr
    }

    fn trace(requests: impl IntoIterator<Item = (TraceRequest, Vec<u64>)>, block_tokens: u32) -> Arc<Trace> {
        let mut builder = Builder::new(block_tokens);
        for (request, ids) in requests {
            builder.push(request, &ids);
        }
        Arc::new(builder.finish())
    }

    fn request(i: u64) -> (TraceRequest, Vec<u64>) {
        let arrival_s = i as f64;
        let request =
            TraceRequest { arrival_s, input_tokens: 20, output_tokens: 2, ..TraceRequest::default() };
        (request, vec![1, i + 2])
    }

    fn config(addr: SocketAddr, n: u64) -> ReplayConfig {
        let trace = trace((0..n).map(request), 16);
        ReplayConfig { base_url: format!("http://{addr}"), trace, speed: 1e4, ..Default::default() }
    }

    async fn check(behaviour: Behaviour, class: Option<ErrorClass>) -> Record {
        let mut config = config(server(behaviour).await, 1);
        if class == Some(ErrorClass::Timeout) {
            config.request_timeout = Duration::from_millis(1);
        }
        let mut report = replay(config, |_, _| {}).await.expect("a good configuration");
        assert_eq!(report.records.len(), 1);
        assert_eq!(report.first_errors.len(), usize::from(class.is_some()));
        let record = report.records.remove(0);
        assert_eq!(record.error.as_deref(), class.map(ErrorClass::name), "{:?}", report.first_errors);
        record
    }

    #[tokio::test]
    async fn a_good_answer_is_recorded_with_its_usage_and_endpoint() {
        let record = check(Behaviour::Answer, None).await;
        assert_eq!((record.status, record.endpoint.as_deref()), (200, Some("e1")));
        assert_eq!((record.prompt_tokens, record.cached_tokens, record.output_tokens), (9, Some(4), 2));
        let first = record.first_token_s.expect("tokens came");
        assert!(record.sent_s <= first && first <= record.end_s);
    }

    #[tokio::test]
    async fn a_stream_without_done_is_truncated_and_keeps_what_it_said() {
        let record = check(Behaviour::NoDone, Some(ErrorClass::Truncated)).await;
        assert_eq!((record.status, record.output_tokens, record.cached_tokens), (200, 2, Some(4)));
    }

    #[tokio::test]
    async fn a_connection_that_breaks_is_a_reset() {
        let record = check(Behaviour::BreakOff, Some(ErrorClass::Reset)).await;
        assert_eq!((record.status, record.output_tokens), (200, 2));
        assert_eq!(check(Behaviour::CloseAtOnce, Some(ErrorClass::Reset)).await.status, 0);
    }

    #[tokio::test]
    async fn another_status_is_recorded_with_what_the_server_said() {
        assert_eq!(check(Behaviour::Refuse, Some(ErrorClass::Status)).await.status, 503);
        let config = config(server(Behaviour::Refuse).await, 1);
        let report = replay(config, |_, _| {}).await.expect("a good configuration");
        assert_eq!(report.first_errors, ["request 0: status: 503 no endpoint ready"]);
    }

    #[tokio::test]
    async fn silence_is_a_timeout() {
        assert_eq!(check(Behaviour::Silence, Some(ErrorClass::Timeout)).await.first_token_s, None);
    }

    #[tokio::test]
    async fn a_closed_port_is_a_connect_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        drop(listener);
        let report = replay(config(addr, 1), |_, _| {}).await.expect("a good configuration");
        assert_eq!(report.records[0].error.as_deref(), Some("connect"), "{:?}", report.first_errors);
    }

    #[tokio::test]
    async fn every_request_ends_in_one_record_in_the_traces_order() {
        let mut config = config(server(Behaviour::Answer).await, 20);
        config.trace = trace((0..20).rev().map(request), 16);
        let arrivals: Vec<f64> =
            config.trace.requests.iter().map(|request| request.arrival_s / 1e4).collect();
        let mut calls = Vec::new();
        let report =
            replay(config, |done, total| calls.push((done, total))).await.expect("a good configuration");
        assert_eq!(
            report.records.iter().map(|record| record.id).collect::<Vec<_>>(),
            (0..20).collect::<Vec<_>>()
        );
        assert_eq!(report.records.iter().map(|record| record.scheduled_s).collect::<Vec<_>>(), arrivals);
        assert!(
            report.records.iter().all(|record| record.error.is_none() && record.sent_s >= record.scheduled_s)
        );
        assert_eq!(calls, (1..=20).map(|done| (done, 20)).collect::<Vec<_>>());
        assert!(report.client_lag_s.is_some_and(|lag| 0.0 <= lag.p50 && lag.p50 <= lag.max));
    }

    #[tokio::test]
    async fn an_engine_finds_the_blocks_that_a_trace_repeats_and_no_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let engine = kvlane_mock::MockConfig { speed: 1000.0, ..Default::default() };
        let engine = kvlane_mock::MockEngine::start(engine, listener).expect("a good configuration");
        let prompts: [&[u64]; 3] = [&[1, 2, 3], &[1, 2, 4], &[5, 2, 3]];
        let request = TraceRequest { input_tokens: 1400, output_tokens: 9, ..TraceRequest::default() };
        // The last replay finds the cached prompts of earlier ones; the others repeat their own.
        let cached = async |seed, requests: usize| {
            let config = ReplayConfig {
                base_url: format!("http://{}", engine.addr()),
                trace: trace(prompts[..requests].iter().map(|ids| (request, ids.to_vec())), 512),
                seed,
                ..Default::default()
            };
            let report = replay(config, |_, _| {}).await.expect("a good configuration");
            for record in &report.records {
                assert!(record.is_ok(), "{:?}", report.first_errors);
                assert_eq!(record.output_tokens, 9);
                assert!(
                    (1400..1410).contains(&record.prompt_tokens),
                    "the trace's tokens and a template's few"
                );
            }
            report.records[requests - 1].cached_tokens
        };
        assert_eq!(cached(0, 1).await, Some(0));
        assert_eq!(cached(0, 2).await, Some(1024), "two blocks of 512");
        assert_eq!(cached(0, 3).await, Some(0), "another first block is another prompt");
        assert_eq!(cached(1, 1).await, Some(0), "another seed is other text");
    }

    /// Invariant: The replay is open-loop: no request waits for another's answer.
    #[tokio::test]
    async fn requests_leave_while_earlier_ones_are_unanswered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        // No answer is sent before all three requests have arrived: a client that waits for answers would time out.
        let all_asked = Arc::new(tokio::sync::Barrier::new(3));
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let all_asked = all_asked.clone();
                tokio::spawn(async move {
                    read_request(&mut stream).await;
                    all_asked.wait().await;
                    let body = format!("{EVENTS}data: [DONE]\n\n");
                    let answer = format!("{HEADERS}content-length: {}\r\n\r\n{body}", body.len());
                    stream.write_all(answer.as_bytes()).await
                });
            }
        });
        let report = replay(config(addr, 3), |_, _| {}).await.expect("a good configuration");
        assert!(report.records.iter().all(Record::is_ok), "{:?}", report.first_errors);
    }

    /// A server that answers every request, keeps what it was sent, and closes a connection after a number of answers.
    async fn listening(answers_max: usize) -> (SocketAddr, Arc<std::sync::Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let heard = Arc::new(std::sync::Mutex::new(Vec::new()));
        let hearing = heard.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let hearing = hearing.clone();
                tokio::spawn(async move {
                    for _ in 0..answers_max {
                        let Some(body) = read_request(&mut stream).await else { return };
                        hearing.lock().expect("whole").push(body);
                        let body = format!("{EVENTS}data: [DONE]\n\n");
                        let answer = format!("{HEADERS}content-length: {}\r\n\r\n{body}", body.len());
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        (addr, heard)
    }

    /// A conversation of three turns: the second is due 0.02 s after the answer to the first, the third when it was.
    fn conversation() -> Arc<Trace> {
        let turn = |arrival_s: f64, after: Option<u32>, think_s: Option<f32>| {
            let (request, ids) = request(0);
            (TraceRequest { arrival_s, after, think_s, ..request }, ids)
        };
        trace([turn(0.0, None, None), turn(50.0, Some(0), Some(0.02)), turn(0.01, Some(1), None)], 16)
    }

    fn check_turns(records: &[Record]) {
        assert_eq!(records.iter().map(|record| record.after).collect::<Vec<_>>(), [None, Some(0), Some(1)]);
        assert!((records[1].scheduled_s - records[0].end_s - f64::from(0.02f32)).abs() < 1e-6);
        assert!((records[2].scheduled_s - records[1].end_s).abs() < 1e-6, "its own time has passed");
        assert!(records.iter().all(|record| record.sent_s >= record.scheduled_s));
    }

    /// Invariant: A replayed turn waits for its predecessor's answer and for no other request; the speed does not
    /// change think times.
    ///
    /// Also held by `requests_leave_while_earlier_ones_are_unanswered`.
    #[tokio::test]
    async fn a_turn_is_due_when_the_answer_before_it_is_over_and_its_think_time_whatever_the_speed() {
        let (addr, _) = listening(usize::MAX).await;
        let config = ReplayConfig { trace: conversation(), ..config(addr, 0) };
        let report = replay(config, |_, _| {}).await.expect("a good configuration");
        assert!(report.records.iter().all(Record::is_ok), "{:?}", report.first_errors);
        check_turns(&report.records);
    }

    #[tokio::test]
    async fn a_turn_follows_on_one_that_failed() {
        let config = ReplayConfig { trace: conversation(), ..config(server(Behaviour::Refuse).await, 0) };
        let report = replay(config, |_, _| {}).await.expect("a good configuration");
        assert!(report.records.iter().all(|record| record.status == 503));
        check_turns(&report.records);
    }

    #[tokio::test]
    async fn a_connection_that_the_server_has_closed_is_replaced() {
        let (addr, heard) = listening(1).await;
        let mut config = config(addr, 0);
        let turn = |index: u32| {
            let (request, ids) = request(0);
            (TraceRequest { after: index.checked_sub(1), think_s: Some(0.01), ..request }, ids)
        };
        config.trace = trace((0..10).map(turn), 16);
        let report = replay(config, |_, _| {}).await.expect("a good configuration");
        assert!(report.records.iter().all(Record::is_ok), "{:?}", report.first_errors);
        assert_eq!(heard.lock().expect("whole").len(), 10);
    }

    #[tokio::test]
    async fn a_replay_that_is_stopped_reports_what_had_ended() {
        let (addr, heard) = listening(usize::MAX).await;
        let mut config = config(addr, 3);
        // Two at once, and one that is never awaited.
        config.trace = trace([request(0), request(1), request(20_000_000)], 16);
        let stop = config.stop.clone();
        let stop_at_two = |done, _| {
            if done == 2 {
                stop.notify_one()
            }
        };
        let report = replay(config, stop_at_two).await.expect("a good configuration");
        assert_eq!((report.records.len(), report.unfinished), (2, 1));
        assert_eq!(heard.lock().expect("whole").len(), 2);
    }

    #[tokio::test]
    async fn further_fields_are_in_every_body_and_replace_ours() {
        let (addr, heard) = listening(usize::MAX).await;
        let fields = r#"{"temperature":0,"model":"other","max_tokens":3}"#;
        let config = ReplayConfig {
            fields: serde_json::from_str(fields).expect("an object"),
            api: Api::Completions,
            ..config(addr, 1)
        };
        replay(config, |_, _| {}).await.expect("a good configuration");
        let body: Value = serde_json::from_str(&heard.lock().expect("whole")[0]).expect("JSON");
        assert_eq!(
            (&body["temperature"], &body["model"], &body["max_tokens"]),
            (&0.into(), &"other".into(), &3.into())
        );
        assert_eq!(body["prompt"].as_str().map(str::len), Some(80));
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert_eq!(body.get("ignore_eos"), None, "nothing of ours says how long it is to be");
    }

    #[tokio::test]
    async fn real_prompts_are_sent_as_they_are_and_again_from_the_first() {
        let (addr, heard) = listening(usize::MAX).await;
        let lines = concat!(
            r#"{"messages":[{"role":"user","content":"hi"}]}"#,
            "\n",
            r#"{"prompt":"once"}"#,
            "\n",
            r#"{"body":{"model":"own","prompt":"x","max_tokens":9,"stop":"y"}}"#,
            "\n",
        );
        let given = crate::prompt::given::read(lines.as_bytes()).expect("three prompts");
        // One after the other, so that they arrive in order.
        let turn = |index: u32| {
            let (request, ids) = request(0);
            (TraceRequest { after: index.checked_sub(1), ..request }, ids)
        };
        let config = ReplayConfig {
            trace: trace((0..4).map(turn), 16),
            model: String::new(),
            prompts: Prompts::Given(given.into()),
            ..config(addr, 0)
        };
        let report = replay(config, |_, _| {}).await.expect("a good configuration");
        assert!(report.records.iter().all(Record::is_ok), "{:?}", report.first_errors);
        let bodies: Vec<Value> = heard
            .lock()
            .expect("whole")
            .iter()
            .map(|body| serde_json::from_str(body).expect("JSON"))
            .collect();
        assert_eq!(bodies[0]["messages"][0]["content"], "hi");
        assert_eq!((&bodies[0]["max_tokens"], &bodies[0]["ignore_eos"]), (&2.into(), &true.into()));
        assert_eq!(bodies[1]["prompt"], "once");
        assert_eq!((&bodies[2]["model"], &bodies[2]["max_tokens"]), (&"own".into(), &9.into()));
        assert_eq!((&bodies[2]["stop"], &bodies[2]["stream"]), (&"y".into(), &true.into()));
        assert_eq!(bodies[3], bodies[0]);
    }

    #[tokio::test]
    async fn only_clients_that_trust_its_ca_connect_to_a_tls_server() {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["localhost".into()]).expect("a certificate");
        let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).expect("a key");
        let server =
            rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_no_client_auth()
                .with_single_cert(vec![cert.der().clone()], key)
                .expect("a certificate and its key");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(server));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // Clients that do not trust the CA disconnect.
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                if read_request(&mut stream).await.is_some() {
                    let body = format!("{EVENTS}data: [DONE]\n\n");
                    let answer = format!("{HEADERS}content-length: {}\r\n\r\n{body}", body.len());
                    stream.write_all(answer.as_bytes()).await.expect("the client reads");
                }
            }
        });
        let ask = async |trusted: Option<&rcgen::Certificate>| {
            let mut roots = rustls::RootCertStore::empty();
            trusted.into_iter().for_each(|cert| roots.add(cert.der().clone()).expect("a certificate"));
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let tls = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
            let config = ReplayConfig {
                base_url: format!("https://localhost:{port}/v1"),
                tls: Some(Arc::new(tls)),
                ..config(SocketAddr::from(([127, 0, 0, 1], port)), 1)
            };
            let mut report = replay(config, |_, _| {}).await.expect("a good configuration");
            report.records.remove(0)
        };
        assert!(ask(Some(&cert)).await.is_ok());
        assert_eq!(ask(None).await.error.as_deref(), Some("connect"));
    }

    #[tokio::test]
    async fn an_answer_that_says_it_has_failed_is_no_answer() {
        let record = check(Behaviour::Fail, Some(ErrorClass::Failed)).await;
        assert_eq!((record.status, record.output_tokens), (200, 2));
    }

    #[tokio::test]
    async fn configurations_that_make_no_sense_are_refused_before_anything_is_sent() {
        let good = ReplayConfig { trace: trace([request(0)], 16), ..Default::default() };
        let refuse =
            async |config: ReplayConfig| replay(config, |_, _| {}).await.expect_err("refused").to_string();
        let base = |url: &str| ReplayConfig { base_url: url.into(), ..good.clone() };
        assert!(refuse(base("localhost:8000")).await.contains("http://host:port"));
        assert!(refuse(base("https://localhost")).await.contains("certificates"));
        assert!(refuse(ReplayConfig { speed: f64::NAN, ..good.clone() }).await.contains("speed"));
        assert!(refuse(ReplayConfig { speed: 0.0, ..good.clone() }).await.contains("speed"));
        assert!(
            refuse(ReplayConfig { api_key: Some("a\nb".into()), ..good.clone() }).await.contains("API key")
        );
        let mut late = good.clone();
        Arc::make_mut(&mut late.trace).requests[0].arrival_s = f64::INFINITY;
        assert!(refuse(late).await.contains("request 0"));
        let mut long = good.clone();
        Arc::make_mut(&mut long.trace).requests[0].input_tokens = u32::MAX;
        assert!(refuse(long).await.contains("input tokens"));
    }
}
