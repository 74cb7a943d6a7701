//! Deaths of real engines, as their clients saw them: read from captures, and replayed by a mock engine.
//!
//! Captures are in `data/deaths`, one file for each engine and death; the README there describes how they are made
//! and the meaning of their lines. No part of an answer is in this file: status, body, events and times come from the
//! captures.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::answer::Shape;

/// A way to die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Death {
    /// The process that schedules and holds the KV cache is killed (-9); the API server is not.
    CoreKilled,
    /// That process is stopped, as by a hanging collective.
    CoreStopped,
    /// The API server is killed (-9).
    ServerKilled,
    /// The API server is stopped.
    ServerStopped,
    /// SIGTERM to the API server.
    Terminated,
    /// The process that runs the model is out of memory.
    OutOfMemory,
}

/// The engine whose deaths are replayed: `--deaths-like`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DeathsLike {
    /// vLLM 0.32.
    #[default]
    #[serde(rename = "vllm-0.32")]
    Vllm032,
    /// SGLang 0.5.
    #[serde(rename = "sglang-0.5")]
    Sglang05,
    /// llama.cpp's server 0.6, a single process.
    #[serde(rename = "llamacpp-0.6")]
    Llamacpp06,
}

/// The captures of an engine, by death.
macro_rules! captures {
    ($($engine:ident $folder:literal: $($death:ident $file:literal),+;)+) => {
        const ENGINES: &[(DeathsLike, &str)] = &[$((DeathsLike::$engine, $folder)),+];
        const CAPTURES: &[(DeathsLike, Death, &str, &str)] = &[$($((
            DeathsLike::$engine,
            Death::$death,
            $file,
            include_str!(concat!("../data/deaths/", $folder, "/", $file, ".jsonl")),
        )),+),+];
    };
}

captures! {
    Vllm032 "vllm-0.32":
        CoreKilled "core_killed", CoreStopped "core_stopped", ServerKilled "server_killed",
        ServerStopped "server_stopped", Terminated "terminated", OutOfMemory "out_of_memory";
    Sglang05 "sglang-0.5":
        CoreKilled "core_killed", CoreStopped "core_stopped", ServerKilled "server_killed",
        ServerStopped "server_stopped", Terminated "terminated", OutOfMemory "out_of_memory";
    Llamacpp06 "llamacpp-0.6":
        ServerKilled "server_killed", ServerStopped "server_stopped", Terminated "terminated";
}

/// Fate of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It gets this answer.
    Reply(Reply),
    /// These events are the last of its stream.
    Events {
        /// As bytes on the wire.
        text: String,
        /// Whether the body then ends regularly; otherwise nothing follows.
        whole: bool,
    },
    /// Nothing more is sent. Its connection has the fate of all connections.
    Silence,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) content_type: String,
    pub(crate) body: String,
}

/// Time of a request's arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrivalTime {
    /// Before the death, in the engine.
    Before,
    /// Afterwards, while connections were still accepted.
    After,
}

/// One recorded death.
#[derive(Debug)]
pub(crate) struct Record {
    endings: BTreeMap<(Shape, bool, CaptureRole), Ending>,
    /// APIs whose streams had a head although the engine had done no work for them.
    heads: Vec<Shape>,
    /// Answers of `/health`, by time.
    health: Vec<(Duration, Said)>,
    /// Whether `/metrics` does not answer any more.
    pub(crate) metrics_silent: bool,
    /// The engine continues with its requests and accepts new ones: it got SIGTERM, and finishes first.
    pub(crate) goes_on: bool,
    /// Time from the death to the first answer that it caused.
    pub(crate) speaks_after: Duration,
    /// Time from the death until the port refuses connections and idle ones are closed, if ever.
    pub(crate) closes_after: Option<Duration>,
    /// Whether the server has exited then. Otherwise connections with requests stay open.
    pub(crate) gone: bool,
}

/// Answer of a path for operators: status and body; `None` is no answer, on a connection that stays open.
type Said = Option<(StatusCode, String)>;

/// The engine's death, if any.
#[derive(Debug, Default)]
pub(crate) struct Fate(Mutex<Option<Dying>>);

/// See [`Fate`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dying {
    pub(crate) record: &'static Record,
    pub(crate) since: Instant,
    /// Whether the engine can resume.
    pub(crate) stopped: bool,
}

/// The role of a client in a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CaptureRole {
    /// Sent after the death.
    New,
    /// Sent shortly before, with a long prompt.
    Reading,
    /// During its answer.
    Begun,
}

// === impl Death ===

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = CAPTURES.iter().find(|(_, death, ..)| death == self).map_or("", |(_, _, name, _)| name);
        f.write_str(name)
    }
}

// === impl DeathsLike ===

impl DeathsLike {
    fn name(self) -> &'static str {
        ENGINES.iter().find(|(engine, _)| *engine == self).map_or("", |(_, name)| name)
    }

    /// This death of this engine; `None` if it was not recorded, or the engine has no such part.
    pub(crate) fn record(self, death: Death) -> Option<&'static Record> {
        static RECORDS: LazyLock<BTreeMap<(DeathsLike, Death), Record>> = LazyLock::new(|| {
            let read = |&(engine, death, _, text): &(DeathsLike, Death, &str, &str)| {
                ((engine, death), Record::read(text).expect("a test reads them"))
            };
            CAPTURES.iter().map(read).collect()
        });
        RECORDS.get(&(self, death))
    }
}

impl fmt::Display for DeathsLike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeathsLike {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        ENGINES.iter().find(|(_, name)| *name == text).map(|(engine, _)| *engine).ok_or_else(|| {
            let names: Vec<&str> = ENGINES.iter().map(|(_, name)| *name).collect();
            format!("must be one of {}", names.join(", "))
        })
    }
}

/// Content that arrives this many seconds after a death was generated after it.
const GOES_ON_S: f64 = 1.0;

/// A time of a capture. Times before the death count as zero.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// The relevant part of a line of a capture.
#[derive(Deserialize)]
struct Line {
    line: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    api: String,
    #[serde(default)]
    stream: bool,
    head_at: Option<f64>,
    head: Option<String>,
    body: Option<String>,
    #[serde(default)]
    events: Vec<(f64, String)>,
    framing_ended: Option<bool>,
    at: Option<f64>,
    last_content_at: Option<f64>,
    answer: Option<String>,
    end_at: Option<f64>,
    exit: Option<i32>,
    #[serde(default)]
    from: f64,
    connect: Option<String>,
    status: Option<u16>,
}

// === impl Fate ===

impl Fate {
    fn lock(&self) -> MutexGuard<'_, Option<Dying>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> Option<Dying> {
        *self.lock()
    }

    /// Dies, or stops. False if it is dead already.
    pub(crate) fn meet(&self, dying: Dying) -> bool {
        let mut fate = self.lock();
        let alive = fate.is_none_or(|before| before.stopped);
        if alive {
            *fate = Some(dying);
        }
        alive
    }

    /// Resumes a stopped engine.
    pub(crate) fn heal(&self) {
        self.lock().take_if(|dying| dying.stopped);
    }
}

// === impl Record ===

impl Record {
    fn read(capture: &str) -> Result<Self, serde_json::Error> {
        let lines: Vec<Line> = capture.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let mut record = Self {
            endings: BTreeMap::new(),
            heads: Vec::new(),
            health: Vec::new(),
            metrics_silent: false,
            goes_on: false,
            speaks_after: Duration::ZERO,
            closes_after: None,
            gone: false,
        };
        let (mut spoke, mut closed, mut refuses): (Option<f64>, Option<f64>, Option<f64>) =
            (None, None, None);
        // Time at which the stopped engine resumed.
        let mut undone = f64::INFINITY;
        for line in lines {
            match line.line.as_str() {
                "cause" => undone = line.at.filter(|at| *at > 0.0).unwrap_or(undone),
                "client" => {
                    let (Some(shape), Some(who)) = (Shape::at(&line.api), CaptureRole::named(&line.name))
                    else {
                        continue;
                    };
                    if let Some(at) = line.caused_at() {
                        spoke = Some(spoke.map_or(at, |spoke| spoke.min(at)));
                    }
                    if who != CaptureRole::Begun && line.stream && line.head_at.is_some_and(|at| at < undone)
                    {
                        record.heads.push(shape);
                    }
                    let went_on = line.last_content_at.is_some_and(|at| at > GOES_ON_S);
                    record.goes_on |= who == CaptureRole::Begun && went_on && undone == f64::INFINITY;
                    // The first of several alike.
                    record.endings.entry((shape, line.stream, who)).or_insert_with(|| line.ending());
                }
                "idle_connection" => closed = line.end_at,
                "health" if line.connect.as_deref() == Some("refused") => {
                    refuses.get_or_insert(line.from);
                }
                "health" => {
                    let status = line.status.and_then(|status| StatusCode::from_u16(status).ok());
                    if status.is_some() || line.is_silent() {
                        let said = status.zip(Some(line.body.unwrap_or_default()));
                        record.health.push((seconds(line.from), said));
                    }
                }
                "metrics" => record.metrics_silent |= line.from > 0.0 && line.is_silent(),
                "process" => record.gone = line.exit.is_some(),
                _ => {}
            }
        }
        record.speaks_after = seconds(spoke.unwrap_or_default());
        // The next health status applies from the moment at which clients were informed.
        if let Some((from, _)) = record.health.iter_mut().find(|(from, _)| *from > record.speaks_after) {
            *from = record.speaks_after;
        }
        // Health is polled only four times a second, while an idle connection shows the exact moment.
        record.closes_after =
            refuses.map(|refuses| seconds(closed.map_or(refuses, |closed| closed.min(refuses))));
        Ok(record)
    }

    /// The fate of such a request.
    pub(crate) fn ending(&self, shape: Shape, stream: bool, came: ArrivalTime) -> &Ending {
        let whos = match came {
            ArrivalTime::Before => [CaptureRole::Begun, CaptureRole::Reading, CaptureRole::New],
            ArrivalTime::After => [CaptureRole::New, CaptureRole::Reading, CaptureRole::Begun],
        };
        let of = |shape| whos.iter().find_map(|who| self.endings.get(&(shape, stream, *who)));
        // An API that the engine does not have is answered like its chats.
        of(shape).or_else(|| of(Shape::Chat)).unwrap_or(&Ending::Silence)
    }

    /// The answer of `/health` at this time after the death.
    pub(crate) fn health(&self, after: Duration) -> Said {
        let said = self.health.iter().rev().find(|(from, _)| *from <= after).or(self.health.first());
        said.map_or(Some((StatusCode::OK, String::new())), |(_, said)| said.clone())
    }

    /// Whether a stream has a head before its first token.
    pub(crate) fn has_head(&self, shape: Shape) -> bool {
        self.heads.contains(&shape)
    }
}

// === impl Line ===

impl Line {
    /// Time at which this client noticed the death.
    fn caused_at(&self) -> Option<f64> {
        match self.events.first() {
            Some((at, _)) => Some(*at),
            None => self.head_at.filter(|_| self.is_refusal()),
        }
    }

    fn ending(self) -> Ending {
        if let Some((status, body)) = self.status_of_head().zip(self.body.as_ref())
            && self.is_refusal()
        {
            let content_type = self.header("content-type").unwrap_or("application/json").to_owned();
            return Ending::Reply(Reply { status, content_type, body: body.clone() });
        }
        if !self.events.is_empty() {
            let text = self.events.iter().map(|(_, event)| format!("{event}\n\n")).collect();
            return Ending::Events { text, whole: self.framing_ended == Some(true) };
        }
        Ending::Silence
    }

    /// Whether it is the line of a client with an error answer.
    fn is_refusal(&self) -> bool {
        self.body.is_some() && self.status_of_head().is_some_and(|status| status != StatusCode::OK)
    }

    /// Whether it is of a path for operators without an answer, on a connection that stayed open.
    fn is_silent(&self) -> bool {
        self.answer.as_deref().is_some_and(|answer| answer.starts_with("nothing"))
    }

    fn status_of_head(&self) -> Option<StatusCode> {
        self.head.as_ref()?.split(' ').nth(1)?.parse().ok()
    }

    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.as_ref()?.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

// === impl CaptureRole ===

impl CaptureRole {
    fn named(name: &str) -> Option<Self> {
        match name.split(' ').next()? {
            "new" => Some(Self::New),
            "reading" => Some(Self::Reading),
            "begun" => Some(Self::Begun),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Response;
    use http_body_util::BodyExt;
    use hyper::body::Incoming;
    use serde_json::{Value, json};
    use tokio::net::TcpStream;
    use tokio::task::JoinSet;

    use super::*;
    use crate::testing::{engine, send, text};
    use crate::{Fault, MockConfig, MockEngine};

    const APIS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"];

    /// The lines of a capture as they are, without the reader that is under test.
    fn lines(like: DeathsLike, death: Death) -> Vec<Value> {
        let (.., text) = CAPTURES
            .iter()
            .find(|(engine, of, ..)| (*engine, *of) == (like, death))
            .unwrap_or_else(|| panic!("no capture of {like} for {death}"));
        text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
    }

    /// The line of the first client of this kind.
    fn client(lines: &[Value], name: &str, api: &str, stream: bool) -> Value {
        let found = lines.iter().find(|line| {
            line["line"] == "client" && line["name"] == name && line["api"] == api && line["stream"] == stream
        });
        found.unwrap_or_else(|| panic!("no {name} at {api}")).clone()
    }

    /// The events that the death put at the end of a captured stream, as bytes.
    fn last_events(client: &Value) -> String {
        let events = client["events"].as_array().expect("a list");
        events.iter().map(|event| format!("{}\n\n", event[1].as_str().expect("an event"))).collect()
    }

    /// An engine so slow that nothing ends while a test looks.
    async fn slow_engine(like: DeathsLike) -> MockEngine {
        let engine = engine(MockConfig { deaths_like: like, ..MockConfig::default() }).await;
        engine.cause(Fault::Slow { factor: 1e5 }).expect("a good factor");
        engine
    }

    fn body(api: &str, stream: bool) -> String {
        let prompt = "some words";
        let mut body = match api {
            "/v1/completions" => json!({"prompt": prompt, "max_tokens": 5_000}),
            "/v1/responses" => json!({"input": prompt, "max_output_tokens": 5_000}),
            _ => json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 5_000}),
        };
        body["model"] = "mock".into();
        body["stream"] = stream.into();
        body.to_string()
    }

    async fn page(engine: &MockEngine) -> String {
        text(send(engine.addr(), "/metrics", "").await).await.1
    }

    /// Waits until this many requests are in the engine.
    async fn in_engine(engine: &MockEngine, requests: u64) {
        loop {
            let page = page(engine).await;
            let (_, report) = kvlane_wire::engine::load_report(&page).expect("a report");
            if u64::from(report.running) + u64::from(report.waiting) == requests {
                return;
            }
        }
    }

    /// Stops the clock, so that only a test moves it: a runtime with something to do does not skip waiting times by itself.
    fn hold_time() -> JoinSet<()> {
        tokio::time::pause();
        let mut busy = JoinSet::new();
        busy.spawn(async {
            loop {
                tokio::task::yield_now().await;
            }
        });
        busy
    }

    /// Lets so much time pass. Timers are a millisecond late at the most.
    async fn pass(time: Duration) {
        tokio::time::advance(time + Duration::from_millis(2)).await;
    }

    async fn until_refused(engine: &MockEngine) {
        while TcpStream::connect(engine.addr()).await.is_ok() {}
    }

    async fn chunk(response: &mut Response<Incoming>) -> Option<Bytes> {
        response.body_mut().frame().await?.ok()?.into_data().ok()
    }

    /// What is left of a body, and whether it ends as it should.
    async fn rest(mut response: Response<Incoming>) -> (String, bool) {
        let mut rest = Vec::new();
        loop {
            match response.body_mut().frame().await {
                Some(Ok(frame)) => rest.extend_from_slice(&frame.into_data().unwrap_or_default()),
                Some(Err(_)) => return (String::from_utf8(rest).expect("text"), false),
                None => return (String::from_utf8(rest).expect("text"), true),
            }
        }
    }

    #[test]
    fn every_capture_is_read_and_every_engine_has_a_name() {
        for (like, death, name, _) in CAPTURES {
            let record = like.record(*death).expect("it is in the table");
            assert!(!record.endings.is_empty(), "{like} {name}");
            assert_eq!(lines(*like, *death)[0]["death"], *name);
            assert_eq!(like.to_string().parse(), Ok(*like));
            assert_eq!(json!(like), like.to_string());
        }
        assert!("gpt-5".parse::<DeathsLike>().expect_err("no such engine").contains("vllm-0.32"));
    }

    /// Kills `core` or what stands for it under requests in every API and holds each answer to the capture.
    async fn dies_as_recorded(like: DeathsLike, death: Death, fault: Fault) {
        let capture = lines(like, death);
        let mut engine = slow_engine(like).await;
        let addr = engine.addr();
        let (mut whole, mut streams) = (JoinSet::new(), Vec::new());
        for api in APIS {
            whole.spawn(async move { (api, text(send(addr, api, body(api, false)).await).await) });
            streams.push((api, send(addr, api, body(api, true)).await));
        }
        in_engine(&engine, 8).await;
        let _busy = hold_time();
        let record = like.record(death).expect("it was recorded");
        engine.cause(fault).expect("it was recorded");
        let late = send(addr, APIS[0], body(APIS[0], false)).await;
        let expected = client(&capture, "new whole", APIS[0], false);
        let status = |client: &Value| -> u16 {
            let head = client["head"].as_str().expect("a head");
            head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
        };
        assert_eq!(late.status().as_u16(), status(&expected));
        assert_eq!(text(late).await.1, expected["body"].as_str().expect("a body"));
        pass(record.speaks_after).await;
        while let Some(answered) = whole.join_next().await {
            let (api, (answer, body)) = answered.expect("no panic");
            let expected = client(&capture, "begun whole", api, false);
            assert_eq!(answer.as_u16(), status(&expected), "{api}");
            assert_eq!(body, expected["body"].as_str().expect("a body"), "{api}");
        }
        let mut cut = Vec::new();
        for (api, stream) in streams {
            let expected = client(&capture, "begun stream", api, true);
            assert_eq!(stream.status(), StatusCode::OK);
            let whole = expected["framing_ended"] == true;
            if whole {
                let (rest, ended) = rest(stream).await;
                assert!(rest.ends_with(&last_events(&expected)) && ended, "{api}: {rest}");
            } else {
                cut.push((api, stream));
            }
        }
        let (said, body) = text(send(addr, "/health", "").await).await;
        let health =
            capture.iter().find(|line| line["line"] == "health" && line["from"].as_f64() > Some(0.0));
        let health = health.expect("health was polled");
        assert_eq!((json!(said.as_u16()), json!(body)), (health["status"].clone(), health["body"].clone()));
        pass(record.closes_after.expect("it closes")).await;
        for (api, stream) in cut {
            let (_, ended) = rest(stream).await;
            assert!(!ended, "{api}");
        }
        until_refused(&engine).await;
        engine.died().await;
    }

    /// Invariant: A mock engine that dies answers as the recorded engine did: status, body, events, `/health`, and
    /// when the port closes.
    ///
    /// Also held by `an_engine_out_of_memory_answers_byte_for_byte_as_the_real_one_did`,
    /// `a_terminated_server_never_answers_requests_in_the_engine_and_rejects_others`,
    /// `a_dead_scheduler_says_nothing_until_the_server_follows_it`.
    #[tokio::test]
    async fn a_dead_core_answers_byte_for_byte_as_the_real_one_did() {
        dies_as_recorded(DeathsLike::Vllm032, Death::CoreKilled, Fault::CoreKilled).await;
    }

    #[tokio::test]
    async fn a_stopped_core_leaves_the_server_well_and_everything_else_as_it_is_until_it_goes_on() {
        let capture = lines(DeathsLike::Vllm032, Death::CoreStopped);
        let engine = slow_engine(DeathsLike::Vllm032).await;
        let addr = engine.addr();
        let mut before = send(addr, APIS[0], body(APIS[0], true)).await;
        in_engine(&engine, 1).await;
        engine.cause(Fault::CoreStopped).expect("it was recorded");
        let frozen = page(&engine).await;
        let whole = tokio::spawn(async move { text(send(addr, APIS[0], body(APIS[0], false)).await).await });
        // The head of a stream does not wait for the core.
        let mut after = send(addr, APIS[0], body(APIS[0], true)).await;
        let expected = client(&capture, "new stream", APIS[0], true);
        assert!(expected["head"].as_str().expect("a head").starts_with("HTTP/1.1 200"));
        assert_eq!(after.status(), StatusCode::OK);
        assert_eq!(text(send(addr, "/health", "").await).await, (StatusCode::OK, String::new()));
        assert_eq!(page(&engine).await, frozen);
        engine.cause(Fault::Heal).expect("always");
        assert!(chunk(&mut before).await.is_some());
        assert!(chunk(&mut after).await.is_some());
        assert_eq!(whole.await.expect("no panic").0, StatusCode::OK);
    }

    #[tokio::test]
    async fn a_terminated_server_never_answers_requests_in_the_engine_and_rejects_others() {
        let capture = lines(DeathsLike::Vllm032, Death::Terminated);
        let begun = client(&capture, "begun stream", APIS[0], true);
        assert_eq!((&begun["events"], &begun["end"]), (&json!([]), &json!("silent")));
        let mut engine = slow_engine(DeathsLike::Vllm032).await;
        let addr = engine.addr();
        let mut stream = send(addr, APIS[0], body(APIS[0], true)).await;
        in_engine(&engine, 1).await;
        let _busy = hold_time();
        engine.cause(Fault::Terminated).expect("it was recorded");
        for stream in [false, true] {
            let name = if stream { "new stream" } else { "new whole" };
            let expected = client(&capture, name, APIS[0], stream);
            let (status, body) = text(send(addr, APIS[0], body(APIS[0], stream)).await).await;
            assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(body, expected["body"].as_str().expect("a body"));
        }
        let record = DeathsLike::Vllm032.record(Death::Terminated).expect("it was recorded");
        pass(record.closes_after.expect("it closes")).await;
        until_refused(&engine).await;
        let dead = tokio::spawn(async move { engine.died().await });
        // Nothing, and not the end either.
        let mut frame = std::pin::pin!(stream.body_mut().frame());
        std::future::poll_fn(|cx| {
            assert!(frame.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        assert!(!dead.is_finished());
        drop(stream);
        dead.await.expect("no panic");
    }

    #[tokio::test]
    async fn an_engine_out_of_memory_answers_byte_for_byte_as_the_real_one_did() {
        dies_as_recorded(DeathsLike::Vllm032, Death::OutOfMemory, Fault::OutOfMemory).await;
    }

    #[tokio::test]
    async fn a_dead_scheduler_says_nothing_until_the_server_follows_it() {
        let capture = lines(DeathsLike::Sglang05, Death::CoreKilled);
        for (name, stream) in [("begun whole", false), ("new whole", false), ("new stream", true)] {
            let client = client(&capture, name, APIS[0], stream);
            assert_eq!((&client["head"], &client["end"]), (&Value::Null, &json!("fin")), "{name}");
        }
        let health =
            capture.iter().find(|line| line["line"] == "health" && line["from"].as_f64() > Some(0.0));
        assert!(health.is_some_and(|health| health["answer"] == "nothing within 2 s"));
        let mut engine = slow_engine(DeathsLike::Sglang05).await;
        let addr = engine.addr();
        let stream = send(addr, APIS[0], body(APIS[0], true)).await;
        in_engine(&engine, 1).await;
        let _busy = hold_time();
        engine.cause(Fault::CoreKilled).expect("it was recorded");
        // Neither a head, nor health, nor metrics.
        for (path, body) in
            [(APIS[0], body(APIS[0], true)), ("/health", String::new()), ("/metrics", String::new())]
        {
            let answer = std::pin::pin!(send(addr, path, body));
            tokio::select! {
                biased;
                _ = answer => panic!("{path}"),
                () = pass(Duration::from_secs(1)) => {}
            }
        }
        let record = DeathsLike::Sglang05.record(Death::CoreKilled).expect("it was recorded");
        pass(record.closes_after.expect("it closes")).await;
        assert_eq!(rest(stream).await, (String::new(), false));
        until_refused(&engine).await;
        engine.died().await;
    }

    #[tokio::test]
    async fn a_stopped_scheduler_leaves_streams_without_a_head_and_health_without_an_answer() {
        let capture = lines(DeathsLike::Sglang05, Death::CoreStopped);
        assert_eq!(client(&capture, "new stream", APIS[0], true)["head"], Value::Null);
        let engine = slow_engine(DeathsLike::Sglang05).await;
        let addr = engine.addr();
        engine.cause(Fault::CoreStopped).expect("it was recorded");
        let _busy = hold_time();
        let mut stream = std::pin::pin!(send(addr, APIS[0], body(APIS[0], true)));
        let mut health = std::pin::pin!(send(addr, "/health", ""));
        tokio::select! {
            biased;
            _ = &mut stream => panic!("a head"),
            _ = &mut health => panic!("well"),
            () = pass(Duration::from_secs(3)) => {}
        }
        drop(_busy);
        tokio::time::resume();
        engine.cause(Fault::Heal).expect("always");
        assert_eq!(stream.await.status(), StatusCode::OK);
        assert_eq!(send(addr, "/health", "").await.status(), StatusCode::OK);
    }

    #[tokio::test]
    async fn a_server_that_finishes_first_says_so_and_answers() {
        let capture = lines(DeathsLike::Sglang05, Death::Terminated);
        let health =
            capture.iter().find(|line| line["line"] == "health" && line["from"].as_f64() > Some(0.0));
        let engine = engine(MockConfig { deaths_like: DeathsLike::Sglang05, ..MockConfig::default() }).await;
        engine.cause(Fault::Terminated).expect("it was recorded");
        let (status, said) = text(send(engine.addr(), "/health", "").await).await;
        let expected = health.expect("health was polled");
        assert_eq!(
            (json!(status.as_u16()), json!(said)),
            (expected["status"].clone(), expected["body"].clone())
        );
        assert_eq!(send(engine.addr(), APIS[0], body(APIS[0], false)).await.status(), StatusCode::OK);
    }

    #[tokio::test]
    async fn a_killed_server_closes_every_connection_without_a_word() {
        let capture = lines(DeathsLike::Vllm032, Death::ServerKilled);
        let begun = client(&capture, "begun whole", APIS[0], false);
        assert_eq!((&begun["head"], &begun["end"]), (&Value::Null, &json!("fin")));
        let mut engine = slow_engine(DeathsLike::Vllm032).await;
        let stream = send(engine.addr(), APIS[0], body(APIS[0], true)).await;
        in_engine(&engine, 1).await;
        let _busy = hold_time();
        engine.cause(Fault::ServerKilled).expect("it was recorded");
        let record = DeathsLike::Vllm032.record(Death::ServerKilled).expect("it was recorded");
        pass(record.closes_after.expect("it closes")).await;
        assert!(!rest(stream).await.1);
        until_refused(&engine).await;
        engine.died().await;
    }

    #[tokio::test]
    async fn a_stopped_server_says_nothing_until_it_goes_on() {
        let capture = lines(DeathsLike::Vllm032, Death::ServerStopped);
        let health =
            capture.iter().find(|line| line["line"] == "health" && line["from"].as_f64() > Some(0.0));
        assert!(health.is_some_and(|health| health["connect"] == "accepted" && health["status"].is_null()));
        let engine = slow_engine(DeathsLike::Vllm032).await;
        engine.cause(Fault::ServerStopped).expect("it was recorded");
        let addr = engine.addr();
        let mut health = std::pin::pin!(send(addr, "/health", ""));
        let _busy = hold_time();
        tokio::select! {
            biased;
            _ = &mut health => panic!("nothing is read"),
            () = tokio::time::advance(Duration::from_secs(5)) => {}
        }
        engine.cause(Fault::Heal).expect("always");
        assert_eq!(health.await.status(), StatusCode::OK);
    }

    #[tokio::test]
    async fn a_death_that_was_not_recorded_is_refused_and_changes_nothing() {
        let engine = slow_engine(DeathsLike::Llamacpp06).await;
        let error = engine.cause(Fault::CoreKilled).expect_err("a single process").to_string();
        assert!(error.contains("llamacpp-0.6") && error.contains("core_killed"), "{error}");
        assert_eq!(send(engine.addr(), "/health", "").await.status(), StatusCode::OK);
    }
}
