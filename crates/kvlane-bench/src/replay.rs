//! The open-loop client.
//!
//! A thread of its own owns the clock: it prepares the next request's body ahead of time, waits for its timestamp and
//! hands it to the runtime, whose timers have only millisecond granularity: a trace sped up sixty-fold would see that
//! as 0.1 s. There is no cap on requests in flight, since a cap would turn the loop into a closed one; what bounds
//! them is the trace's length and `request_timeout`. The report says how late requests really left.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kvlane_trace::record::Record;
use kvlane_trace::summary::Percentiles;
use kvlane_trace::trace::Trace;
use kvlane_wire::sse::SseScanner;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;

use crate::prompt;

/// Tells a router which conversation a request is a turn of.
const SESSION: HeaderName = HeaderName::from_static("x-session-id");

/// Tells a mock engine how long the answer is.
const OUTPUT_TOKENS: HeaderName = HeaderName::from_static("x-mock-output-tokens");

/// Longest prompt that is sent, in tokens of the trace: 8 MB of text.
pub const PROMPT_TOKENS_MAX: u32 = 2_000_000;

/// Failures whose words are kept in a report.
pub const ERRORS_KEPT_MAX: usize = 16;

/// Bytes of an error answer that are kept.
const ERROR_DETAIL_BYTES_MAX: usize = 200;

/// Time to open a connection before a request counts as [`ErrorClass::Connect`].
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What to replay, onto what, how fast.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Address of the server, `http://host:port`; a path before `/v1` is kept.
    pub base_url: String,
    /// The `model` of every request.
    pub model: String,
    /// The trace. Arrivals are seconds after the replay's start; who is a turn after whom makes no difference.
    pub trace: Arc<Trace>,
    /// Arrivals are divided by this. 1 is the trace's own pace.
    pub speed: f64,
    /// Another seed gives other text for the same block ids, which no cache has seen.
    pub seed: u64,
    /// A request that is not over after this long is given up.
    pub request_timeout: Duration,
    /// Ask for exactly `max_tokens` tokens (`ignore_eos`, an extension of vLLM and SGLang; llama.cpp knows it too).
    pub ignore_eos: bool,
    /// Tell how long each answer is to be, as `max_tokens`. Without, nobody on the way learns it: a mock engine is told by
    /// a header of its own, and any other engine is not.
    pub tell_lengths: bool,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
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
        }
    }
}

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The address cannot be used.
    #[error("cannot replay onto `{url}`: {why}; give http://host:port")]
    BaseUrl {
        /// As configured.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The speed is not a positive number.
    #[error("speed {speed} is not a positive number; 1 is the trace's own pace")]
    Speed {
        /// As configured.
        speed: f64,
    },
    /// The clock's thread cannot be started.
    #[error("cannot start the replay's clock thread: {0}")]
    Thread(std::io::Error),
    /// The API key cannot be a header's value.
    #[error("the API key contains characters that a header cannot carry")]
    ApiKey,
    /// A request of the trace has no usable timestamp.
    #[error("request {index} of the trace arrives at {arrival_s} s; arrivals are seconds from 0")]
    Arrival {
        /// Its place in the trace.
        index: usize,
        /// What stands there.
        arrival_s: f64,
    },
    /// A request of the trace is longer than this client sends.
    #[error(
        "request {index} of the trace has {tokens} input tokens, more than {PROMPT_TOKENS_MAX}; drop or cut it"
    )]
    TooLong {
        /// Its place in the trace.
        index: usize,
        /// Its length.
        tokens: u32,
    },
}

/// How a request failed. The record's `error` is the class's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// No connection.
    Connect,
    /// Another status than 200.
    Status,
    /// The connection broke before the answer's end.
    Reset,
    /// Not over within `request_timeout`.
    Timeout,
    /// The answer ended in good order but without `[DONE]`.
    Truncated,
}

impl ErrorClass {
    /// Its name, as records carry it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Status => "status",
            Self::Reset => "reset",
            Self::Timeout => "timeout",
            Self::Truncated => "truncated",
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub struct ReplayReport {
    /// One record per request, in the trace's order. Times are seconds since the replay's start, not scaled back.
    pub records: Vec<Record>,
    /// From the start to the last request's end, in seconds.
    pub wall_s: f64,
    /// How late this client sent requests, in seconds. Large lags mean that the client was the bottleneck. `None`
    /// for an empty trace.
    pub client_lag_s: Option<Percentiles>,
    /// What the first failures said, for people: at most [`ERRORS_KEPT_MAX`].
    pub first_errors: Vec<String>,
}

/// Sends every request at its timestamp and returns when all have ended. `progress` is called with (ended, total)
/// after each end.
///
/// # Errors
///
/// Only for configurations that make no sense; a request that fails is a record with an `error`.
pub async fn replay(
    config: ReplayConfig,
    mut progress: impl FnMut(usize, usize),
) -> Result<ReplayReport, ReplayError> {
    let target = Arc::new(Target::new(&config)?);
    let order = schedule(&config)?;
    let (total, timeout) = (order.len(), config.request_timeout);
    let start = Instant::now();
    // Departures wait here only for the runtime to wake up. Dropping `_stop` ends the thread, wherever it is.
    let (departures, mut departing) = tokio::sync::mpsc::unbounded_channel();
    let (_stop, stopped) = std::sync::mpsc::channel();
    let thread_target = target.clone();
    std::thread::Builder::new()
        .name("replay-clock".into())
        .spawn(move || depart(&config, &thread_target, &order, start, &stopped, &departures))
        .map_err(ReplayError::Thread)?;
    let mut in_flight = JoinSet::new();
    let mut records = Vec::with_capacity(total);
    let mut first_errors = Vec::new();
    loop {
        tokio::select! {
            biased;
            Some(departure) = departing.recv() => {
                in_flight.spawn(travel(target.client.clone(), departure, start, timeout));
            }
            Some(ended) = in_flight.join_next() => {
                // Tasks are never aborted, so an error here is a panic of ours: let it surface.
                let (record, failure) = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
                if first_errors.len() < ERRORS_KEPT_MAX {
                    first_errors.extend(failure.map(|text| format!("request {}: {text}", record.id)));
                }
                records.push(record);
                progress(records.len(), total);
            }
            else => break,
        }
    }
    records.sort_unstable_by_key(|record: &Record| record.id);
    let wall_s = records.iter().map(|record| record.end_s).fold(0.0, f64::max);
    let mut lags: Vec<f64> = records.iter().map(Record::lag_s).collect();
    Ok(ReplayReport { records, wall_s, client_lag_s: Percentiles::of(&mut lags), first_errors })
}

/// The order of departure, once every request has been checked. Requests with one timestamp keep the trace's order.
fn schedule(config: &ReplayConfig) -> Result<Vec<u32>, ReplayError> {
    if !(config.speed.is_finite() && config.speed > 0.0) {
        return Err(ReplayError::Speed { speed: config.speed });
    }
    for (index, request) in config.trace.requests.iter().enumerate() {
        // A year of real time is more than any replay; the bound also keeps the duration representable.
        if !(0.0..=3.2e7).contains(&(request.arrival_s / config.speed)) {
            return Err(ReplayError::Arrival { index, arrival_s: request.arrival_s });
        }
        if request.input_tokens > PROMPT_TOKENS_MAX {
            return Err(ReplayError::TooLong { index, tokens: request.input_tokens });
        }
    }
    let arrival_s = |index: u32| config.trace.requests[index as usize].arrival_s;
    let mut order: Vec<u32> = (0..config.trace.requests.len() as u32).collect();
    order.sort_by(|&a, &b| arrival_s(a).total_cmp(&arrival_s(b)));
    Ok(order)
}

/// Sends each request on its way at its time, in `order`. Runs on a thread of its own.
fn depart(
    config: &ReplayConfig,
    target: &Target,
    order: &[u32],
    start: Instant,
    stopped: &Receiver<()>,
    departures: &UnboundedSender<Departure>,
) {
    for &index in order {
        let departure = Departure::prepare(config, target, index);
        let due = start + Duration::from_secs_f64(departure.record.scheduled_s);
        if stopped.recv_timeout(due.saturating_duration_since(Instant::now()))
            != Err(RecvTimeoutError::Timeout)
            || departures.send(departure).is_err()
        {
            return;
        }
    }
}

// === impl Target ===

type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// Everything requests have in common.
struct Target {
    client: HttpClient,
    uri: Uri,
    authorization: Option<HeaderValue>,
    /// The body up to the prompt's text.
    head: String,
}

impl Target {
    fn new(config: &ReplayConfig) -> Result<Self, ReplayError> {
        let wrong = |why: &str| ReplayError::BaseUrl { url: config.base_url.clone(), why: why.into() };
        let uri: Uri = format!("{}/v1/chat/completions", config.base_url.trim_end_matches('/'))
            .parse()
            .map_err(|error: http::uri::InvalidUri| wrong(&error.to_string()))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(wrong("this client does not speak TLS")),
            _ => return Err(wrong("there is no http:// in front")),
        }
        let authorization = match &config.api_key {
            Some(key) => Some(format!("Bearer {key}").try_into().map_err(|_| ReplayError::ApiKey)?),
            None => None,
        };
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        let model = serde_json::Value::from(config.model.as_str());
        let eos = if config.ignore_eos { r#""ignore_eos":true,"# } else { "" };
        let head = format!(
            r#"{{"model":{model},"stream":true,"stream_options":{{"include_usage":true}},{eos}"messages":[{{"role":"user","content":""#
        );
        Ok(Self { client, uri, authorization, head })
    }
}

/// A request that is ready to go and the record that it will fill.
struct Departure {
    request: Request<Full<Bytes>>,
    record: Record,
}

impl Departure {
    fn prepare(config: &ReplayConfig, target: &Target, index: u32) -> Self {
        let asked = &config.trace.requests[index as usize];
        let mut body = target.head.clone().into_bytes();
        prompt::append(&mut body, config.seed, &config.trace, index);
        let output_tokens = asked.output_tokens.max(1);
        match config.tell_lengths {
            true => body.extend_from_slice(format!(r#""}}],"max_tokens":{output_tokens}}}"#).as_bytes()),
            false => body.extend_from_slice(br#""}]}"#),
        }
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = target.uri.clone();
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(value) = &target.authorization {
            headers.insert(AUTHORIZATION, value.clone());
        }
        headers.insert(SESSION, HeaderValue::from(asked.session));
        if !config.tell_lengths {
            headers.insert(OUTPUT_TOKENS, HeaderValue::from(output_tokens));
        }
        let record = Record {
            id: u64::from(index),
            scheduled_s: asked.arrival_s / config.speed,
            prompt_tokens: asked.input_tokens,
            session: Some(asked.session),
            base: asked.base.map(u64::from),
            shared_tokens: asked.base.map(|_| asked.shared_blocks.saturating_mul(config.trace.block_tokens)),
            ..Record::default()
        };
        Self { request, record }
    }
}

/// One request from its departure to its end, with words for its failure if it failed.
async fn travel(
    client: HttpClient,
    departure: Departure,
    start: Instant,
    timeout: Duration,
) -> (Record, Option<String>) {
    let Departure { request, mut record } = departure;
    record.sent_s = start.elapsed().as_secs_f64();
    let outcome = tokio::time::timeout(timeout, exchange(&client, request, start, &mut record)).await;
    record.end_s = start.elapsed().as_secs_f64();
    let failure = match outcome {
        Ok(Ok(())) => return (record, None),
        Ok(Err(failure)) => failure,
        Err(_) => (ErrorClass::Timeout, format!("not over after {} s", timeout.as_secs_f64())),
    };
    record.error = Some(failure.0.name().into());
    (record, Some(format!("{}: {}", failure.0.name(), failure.1)))
}

/// Sends and reads the streamed answer, filling the record as facts arrive, so that they survive a timeout.
async fn exchange(
    client: &HttpClient,
    request: Request<Full<Bytes>>,
    start: Instant,
    record: &mut Record,
) -> Result<(), (ErrorClass, String)> {
    let reset = |error: &dyn std::fmt::Display| (ErrorClass::Reset, format!("after headers: {error}"));
    let answer = client.request(request).await.map_err(|error| {
        let class = if error.is_connect() { ErrorClass::Connect } else { ErrorClass::Reset };
        (class, describe(&error))
    })?;
    record.status = answer.status().as_u16();
    record.endpoint = answer
        .headers()
        .get("x-router-backend")
        .and_then(|value| value.to_str().ok())
        .map(|value| value.chars().take(ERROR_DETAIL_BYTES_MAX).collect());
    let status = answer.status();
    let mut body = answer.into_body();
    if status != StatusCode::OK {
        let mut detail = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|error| reset(&error))?.into_data() else { continue };
            let room = ERROR_DETAIL_BYTES_MAX - detail.len();
            detail.extend_from_slice(&data[..data.len().min(room)]);
            if detail.len() == ERROR_DETAIL_BYTES_MAX {
                break;
            }
        }
        let detail = String::from_utf8_lossy(&detail);
        return Err((ErrorClass::Status, format!("{} {}", status.as_u16(), detail.trim())));
    }
    let mut scanner = SseScanner::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| reset(&error))?.into_data() else { continue };
        if scanner.push(&data) > 0 && record.first_token_s.is_none() {
            record.first_token_s = Some(start.elapsed().as_secs_f64());
        }
        record.output_tokens = u32::try_from(scanner.tokens()).unwrap_or(u32::MAX);
    }
    scanner.finish();
    if let Some(usage) = scanner.usage() {
        record.prompt_tokens = usage.prompt_tokens;
        record.output_tokens = usage.completion_tokens;
        record.cached_tokens = usage.cached_tokens;
    }
    if !scanner.is_done() {
        let detail = format!("the stream ended without [DONE] after {} tokens", scanner.tokens());
        return Err((ErrorClass::Truncated, detail));
    }
    Ok(())
}

/// An error with its causes; the client's own display names only the outermost.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
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
        Silence,
    }

    /// Reads one request to its end and returns its body.
    async fn read_request(stream: &mut TcpStream) -> Option<String> {
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
    async fn a_port_nobody_listens_on_is_a_connect_error() {
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
        // Whoever is last finds what earlier replays left; the others repeat themselves.
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

    #[tokio::test]
    async fn requests_leave_while_earlier_ones_are_unanswered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        // Nobody gets an answer before all three have asked: a client that waits for answers would time out.
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

    #[tokio::test]
    async fn configurations_that_make_no_sense_are_refused_before_anything_is_sent() {
        let good = ReplayConfig { trace: trace([request(0)], 16), ..Default::default() };
        let refuse =
            async |config: ReplayConfig| replay(config, |_, _| {}).await.expect_err("refused").to_string();
        let base = |url: &str| ReplayConfig { base_url: url.into(), ..good.clone() };
        assert!(refuse(base("localhost:8000")).await.contains("http://host:port"));
        assert!(refuse(base("https://localhost")).await.contains("TLS"));
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
