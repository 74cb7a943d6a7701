//! Listening, accepting, stopping.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::api::{self, Engines, Shared};
use crate::config::{ConfigError, MockConfig};
use crate::driver::Driver;
use crate::fault::{self, Closed, Fault, Faults, Line};
use crate::feed::{Feed, FeedAddresses, FeedCounts, FeedInfo};
use crate::transfer::link::Link;
use crate::transfer::store::Store;

/// Maximum open connections; further ones wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 16_384;

/// Timeout of a request's head.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Pause after a failed accept, mostly because of the process's limit of open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A running mock engine. Dropping it breaks all connections, like a killed process.
#[derive(Debug)]
pub struct MockEngine {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    server: JoinHandle<()>,
    /// The engines and the sockets of their feeds, which end when this is dropped.
    _engines: JoinSet<()>,
    feeds: Vec<FeedInfo>,
    faults: Arc<Faults>,
    /// Address of the control port, if any.
    control: Option<JoinHandle<()>>,
}

// === impl MockEngine ===

impl MockEngine {
    /// Starts an engine that answers on `listener`, on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// If the configuration is invalid, or a socket of the feed cannot be opened; nothing is started then.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn start(config: MockConfig, listener: TcpListener) -> Result<Self, ConfigError> {
        let config = config.settle()?;
        let addr = listener.local_addr()?;
        let mut engines = JoinSet::new();
        let (mut drivers, mut feeds) = (Vec::new(), Vec::new());
        for rank in 0..config.ranks {
            let started =
                config.feed.as_ref().map(|feed| Feed::start(feed, rank, &mut engines)).transpose()?;
            let (feed, info) = started.unzip();
            feeds.extend(info);
            let link = Link::new(&config.transfer, config.seed ^ u64::from(rank));
            let engine = config.engine.clone();
            drivers.push(Driver::new(engine, feed, link, config.speed, config.max_waiting));
        }
        for driver in &drivers {
            let driver = driver.clone();
            engines.spawn(async move { driver.run().await });
        }
        let sources =
            feeds.iter().map(|feed| (feed.addresses.rank.to_string(), feed.source.clone())).collect();
        let faults = Faults::new(drivers.clone(), config.deaths_like, config.transfer.kv_transfer_faults);
        let engine_id = |rank| match config.ranks {
            1 => format!("mock-{}", addr.port()),
            _ => format!("mock-{}_dp{rank}", addr.port()),
        };
        let store = Store::new(
            (0..config.ranks).map(engine_id).collect(),
            Duration::from_secs_f64(config.transfer.kv_lease / config.speed),
        );
        let expiring = store.clone();
        engines.spawn(async move { expiring.expire().await });
        let killed = Arc::downgrade(&faults);
        let kill = Arc::new(move || {
            // An engine without a recording of this death survives.
            killed.upgrade().map(|faults| faults.cause(Fault::CoreKilled));
        });
        let engines_behind = Engines { drivers, store, address: addr };
        let shared = Shared::new(config, engines_behind, Value::Object(sources), faults.fate(), kill);
        let router = api::router(Arc::new(shared));
        let (stop, stopped) = watch::channel(false);
        let server = tokio::spawn(accept(listener, router, stopped, faults.line()));
        Ok(Self { addr, stop, server, _engines: engines, feeds, faults, control: None })
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Addresses of its KV events, by data-parallel rank; empty unless configured.
    pub fn feeds(&self) -> Vec<FeedAddresses> {
        self.feeds.iter().map(|feed| feed.addresses).collect()
    }

    /// Counts of the batches of a rank's feed; `None` if it has none.
    pub fn feed_counts(&self, rank: u32) -> Option<FeedCounts> {
        self.feeds.get(rank as usize).map(FeedInfo::counts)
    }

    /// Applies a fault to the engine.
    ///
    /// # Errors
    ///
    /// If the fault's value is invalid; it is not applied then.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn cause(&self, fault: Fault) -> Result<(), ConfigError> {
        self.faults.cause(fault)
    }

    /// Accepts faults on `listener`, too: `POST /fault` with the fault as JSON. Faults do not affect this listener.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub fn take_faults(&mut self, listener: TcpListener) {
        let stopped = self.stop.subscribe();
        let server =
            accept(listener, fault::control(self.faults.clone()), stopped, watch::channel(Line::default()).1);
        self.control = Some(tokio::spawn(server));
    }

    /// Returns once the engine has died of a [`Fault`] and its last connection has closed.
    pub async fn died(&mut self) {
        if let Err(error) = (&mut self.server).await {
            tracing::error!(addr = %self.addr, %error, "the mock engine's HTTP server failed");
        }
    }

    /// Stops accepting, waits for every answer in progress and closes. Drop the future to cut this short.
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        self.died().await;
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        self.server.abort();
        if let Some(control) = &self.control {
            control.abort();
        }
    }
}

/// Serves until stopped, then until the last connection closes. Connections end with this task.
async fn accept(
    listener: TcpListener,
    router: Router,
    mut stopped: watch::Receiver<bool>,
    line: watch::Receiver<Line>,
) {
    let mut connections = JoinSet::new();
    let mut port = line.clone();
    loop {
        tokio::select! {
            biased;
            () = told_to_stop(&mut stopped) => break,
            () = closed(&mut port) => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, router.clone(), stopped.clone(), line.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "mock engine cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Returns when stopped, or when all handles are dropped.
async fn told_to_stop(stopped: &mut watch::Receiver<bool>) {
    let _ = stopped.wait_for(|&stop| stop).await;
}

/// Returns when the port is to be closed, if ever.
async fn closed(line: &mut watch::Receiver<Line>) {
    if line.wait_for(|line| line.closed.is_some()).await.is_err() {
        std::future::pending().await
    }
}

async fn connection(
    stream: TcpStream,
    router: Router,
    mut stopped: watch::Receiver<bool>,
    mut line: watch::Receiver<Line>,
) {
    let resets_before = line.borrow().resets;
    // Without this, the kernel holds small events back until earlier ones are acknowledged. It fails only on a dead
    // socket, which the server notices by itself.
    let _ = stream.set_nodelay(true);
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut stopping = false;
    loop {
        let Line { black_hole, resets, closed } = *line.borrow_and_update();
        if closed == Some(Closed::All) {
            return;
        }
        if closed == Some(Closed::Idle) && !stopping {
            stopping = true;
            std::pin::Pin::new(&mut connection).graceful_shutdown();
        }
        if resets != resets_before {
            // A loss is reported to the other side at once. Errors of a dead socket are ignored.
            let _ = connection.into_parts().io.into_inner().set_zero_linger();
            return;
        }
        tokio::select! {
            // Shutdown does not wait for connections without a request.
            ended = &mut connection, if !black_hole || stopping => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection broke");
                }
                return;
            }
            Ok(()) = line.changed() => {}
            () = told_to_stop(&mut stopped), if !stopping => {
                stopping = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use http_body_util::BodyExt;
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::testing::{ask, chat, engine, send, text};

    /// The events of a stream without `[DONE]`, which must be there.
    fn events(text: &str) -> Vec<Value> {
        let mut data: Vec<&str> =
            text.split_terminator("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.iter().map(|event| serde_json::from_str(event).expect("an event is JSON")).collect()
    }

    #[tokio::test]
    async fn a_chat_is_answered_with_as_many_tokens_as_asked_and_its_usage() {
        let engine = engine(MockConfig::default()).await;
        let (status, answer) =
            ask(&engine, "/v1/chat/completions", chat("hi", json!({"max_tokens": 7}))).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(answer["object"], "chat.completion");
        assert_eq!(answer["usage"]["completion_tokens"], 7);
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        let content = answer["choices"][0]["message"]["content"].as_str().expect("text");
        assert_eq!(content.split_whitespace().count(), 7, "{content}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }

    #[tokio::test]
    async fn a_streamed_chat_says_the_same_words_one_event_each() {
        let engine = engine(MockConfig::default()).await;
        let (_, whole) = ask(&engine, "/v1/chat/completions", chat("hi", json!({"max_tokens": 300}))).await;
        let more = json!({"max_tokens": 300, "stream": true, "stream_options": {"include_usage": true}});
        let response = send(engine.addr(), "/v1/chat/completions", chat("hi", more).to_string()).await;
        assert!(response.headers()["content-type"].to_str().expect("text").starts_with("text/event-stream"));
        let events = events(&text(response).await.1);
        assert_eq!(events.len(), 1 + 300 + 1);
        assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        let words: String = events[1..301]
            .iter()
            .map(|event| event["choices"][0]["delta"]["content"].as_str().expect("a word"))
            .collect();
        assert_eq!(whole["choices"][0]["message"]["content"], words);
        let reasons: Vec<&Value> =
            events[1..301].iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
        assert_eq!(reasons.iter().filter(|reason| reason.is_null()).count(), 299);
        assert_eq!(reasons[299], "length");
        assert_eq!(events[301]["choices"], json!([]));
        assert_eq!(events[301]["usage"]["completion_tokens"], 300);
    }

    #[tokio::test]
    async fn what_the_gateway_reads_from_a_stream_is_what_the_engine_did() {
        let engine = engine(MockConfig::default()).await;
        let more = json!({"max_tokens": 40, "stream": true, "stream_options": {"include_usage": true}});
        let body = chat(&"word ".repeat(400), more).to_string();
        for cached in [0, 31 * 16] {
            let response = send(engine.addr(), "/v1/chat/completions", body.clone()).await;
            let mut scanner = kvlane_wire::sse::SseScanner::new();
            scanner.push(text(response).await.1.as_bytes());
            let usage = scanner.usage().expect("asked for");
            assert_eq!((usage.completion_tokens, usage.cached_tokens), (40, Some(cached)));
            assert!(scanner.is_done());
        }
        let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
        let (_, report) = kvlane_wire::engine::load_report(&page).expect("a report");
        assert_eq!((report.running, report.waiting), (0, 0));
        assert!(report.kv_capacity_tokens.is_some_and(|tokens| tokens > 900_000), "{report:?}");
        for line in ["vllm:prefix_cache_hits_total", "vllm:generation_tokens_total"] {
            let value = page.lines().find(|row| row.starts_with(line)).and_then(|row| row.rsplit(' ').next());
            let expected = if line.contains("hits") { "496" } else { "80" };
            assert_eq!(value, Some(expected), "{line}");
        }
    }

    #[tokio::test]
    async fn anthropics_messages_and_openais_responses_stream_too() {
        let engine = engine(MockConfig::default()).await;
        let messages =
            json!({"max_tokens": 30, "stream": true, "messages": [{"role": "user", "content": "hi"}]});
        let responses = json!({"max_output_tokens": 30, "stream": true, "input": "hi"});
        for (path, body) in [("/v1/messages", messages), ("/v1/responses", responses)] {
            let (status, stream) = text(send(engine.addr(), path, body.to_string()).await).await;
            assert_eq!(status, StatusCode::OK, "{stream}");
            let mut scanner = kvlane_wire::sse::SseScanner::new();
            assert_eq!(scanner.push(stream.as_bytes()), 30, "{stream}");
            assert_eq!(scanner.usage().map(|usage| usage.completion_tokens), Some(30));
            assert!(scanner.is_done());
            for data in stream.lines().filter_map(|line| line.strip_prefix("data: ")) {
                serde_json::from_str::<Value>(data).expect("an event is JSON");
            }
        }
    }

    #[tokio::test]
    async fn a_completion_takes_text_or_its_ids_and_both_share_blocks() {
        let engine = engine(MockConfig::default()).await;
        let prompt = "some words of a prompt ".repeat(40);
        let (_, tokens) = ask(&engine, "/tokenize", json!({"model": "mock", "prompt": prompt})).await;
        assert_eq!(tokens["count"], 230);
        let (_, back) =
            ask(&engine, "/detokenize", json!({"model": "mock", "tokens": tokens["tokens"]})).await;
        assert_eq!(back["prompt"], prompt.as_str());
        let (_, first) = ask(&engine, "/v1/completions", json!({"model": "mock", "prompt": prompt})).await;
        assert_eq!(first["usage"]["completion_tokens"], 16);
        assert_eq!(first["usage"]["prompt_tokens"], 230);
        let (_, second) =
            ask(&engine, "/v1/completions", json!({"model": "mock", "prompt": tokens["tokens"]})).await;
        assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 14 * 16);
        assert_eq!(second["choices"][0]["text"], first["choices"][0]["text"]);
    }

    #[tokio::test]
    async fn another_salt_or_adapter_finds_nothing_in_the_cache() {
        let engine = engine(MockConfig { lora_modules: vec!["tuned".into()], ..Default::default() }).await;
        let content = "x".repeat(4000);
        let cached = async |more: Value| {
            let (status, answer) = ask(&engine, "/v1/chat/completions", chat(&content, more)).await;
            assert_eq!(status, StatusCode::OK, "{answer}");
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
        };
        assert_eq!(cached(json!({})).await, 0);
        assert!(cached(json!({})).await > 900);
        assert_eq!(cached(json!({"cache_salt": "a"})).await, 0);
        assert_eq!(cached(json!({"model": "tuned"})).await, 0);
        assert!(cached(json!({"model": "tuned"})).await > 900);
    }

    #[tokio::test]
    async fn embeddings_come_one_per_input_and_cost_only_prefill() {
        let engine = engine(MockConfig::default()).await;
        let (status, answer) =
            ask(&engine, "/v1/embeddings", json!({"model": "mock", "input": ["a", "b"]})).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(answer["data"].as_array().map(Vec::len), Some(2));
        assert_ne!(answer["data"][0]["embedding"], answer["data"][1]["embedding"]);
        let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
        assert!(
            page.contains("vllm:generation_tokens_total{engine=\"0\",model_name=\"mock\"} 0\n"),
            "{page}"
        );
    }

    #[tokio::test]
    async fn models_are_listed_with_their_adapters() {
        let config = MockConfig {
            model: "base".into(),
            served_model_name: vec!["a".into(), "b".into()],
            lora_modules: vec!["tuned".into()],
            max_model_len: Some(4096),
            ..Default::default()
        };
        let engine = engine(config).await;
        let (_, page) = text(send(engine.addr(), "/v1/models", "").await).await;
        let list: Value = serde_json::from_str(&page).expect("JSON");
        let rows: Vec<_> =
            list["data"].as_array().expect("a list").iter().map(|row| (&row["id"], &row["parent"])).collect();
        assert_eq!(
            rows,
            [(&json!("a"), &Value::Null), (&json!("b"), &Value::Null), (&json!("tuned"), &json!("a"))]
        );
        assert_eq!(list["data"][0]["max_model_len"], 4096);
    }

    #[tokio::test]
    async fn bad_input_gets_openais_envelope() {
        let engine = engine(MockConfig { max_model_len: Some(100), ..Default::default() }).await;
        let refused = async |path: &str, body: &str, status: u16| {
            let (got, text) = text(send(engine.addr(), path, body.to_owned()).await).await;
            assert_eq!(got.as_u16(), status, "{path} {body}: {text}");
            let error: Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(error["error"]["code"], status);
            error["error"]["message"].as_str().expect("a message").to_owned()
        };
        let chats = "/v1/chat/completions";
        refused(chats, "{", 400).await;
        refused(chats, "{}", 400).await;
        refused(chats, "[]", 400).await;
        refused(chats, &chat("hi", json!({"model": "other"})).to_string(), 404).await;
        refused(chats, &chat("hi", json!({"n": 2})).to_string(), 400).await;
        refused(chats, &chat("hi", json!({"max_tokens": 0})).to_string(), 400).await;
        refused(chats, &chat("hi", json!({"stream_options": 3})).to_string(), 400).await;
        let long = refused(chats, &chat(&"x".repeat(400), json!({})).to_string(), 400).await;
        assert!(long.contains("maximum context length is 100 tokens"), "{long}");
        refused(chats, &chat("hi", json!({"max_tokens": 99})).to_string(), 400).await;
        refused("/v1/completions", r#"{"prompt": ""}"#, 400).await;
        refused("/v1/completions", r#"{"prompt": ["a", "b"]}"#, 400).await;
        refused("/v1/embeddings", &json!({"input": "x".repeat(404)}).to_string(), 400).await;
        refused("/tokenize", "{}", 400).await;
        refused("/nowhere", "{}", 404).await;
        refused(chats, "", 405).await;
    }

    #[tokio::test]
    async fn a_client_that_leaves_frees_its_place() {
        let config = MockConfig { speed: 1.0, ..Default::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let engine = MockEngine::start(config, listener).expect("a good configuration");
        let body = chat("hi", json!({"max_tokens": 100_000, "stream": true})).to_string();
        let mut response = send(engine.addr(), "/v1/chat/completions", body).await;
        response.body_mut().frame().await.expect("a first event").expect("intact");
        let running = async || {
            let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
            kvlane_wire::engine::load_report(&page).expect("a report").1.running
        };
        assert_eq!(running().await, 1);
        drop(response);
        // The close travels through the kernel: ask until the engine has seen it.
        let freed = async { while running().await != 0 {} };
        tokio::time::timeout(Duration::from_secs(60), freed).await.expect("the engine noticed");
        let (_, reset) = ask(&engine, "/reset_prefix_cache", json!({})).await;
        assert_eq!(reset["success"], true);
    }

    #[tokio::test]
    async fn resetting_the_cache_drops_prompts_without_waiting_for_requests() {
        let engine = engine(MockConfig::default()).await;
        let body = chat(&"x".repeat(4000), json!({}));
        ask(&engine, "/v1/chat/completions", body.clone()).await;
        assert_eq!(ask(&engine, "/reset_prefix_cache", json!({})).await.1["success"], true);
        let (_, answer) = ask(&engine, "/v1/chat/completions", body).await;
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    }

    #[tokio::test]
    async fn shutdown_lets_streams_end_and_dropping_breaks_them_off() {
        let body = |n: u32| chat("hi", json!({"max_tokens": n, "stream": true})).to_string();
        let engine_a = engine(MockConfig::default()).await;
        let response = send(engine_a.addr(), "/v1/chat/completions", body(2000)).await;
        let addr = engine_a.addr();
        let (_, (_, text)) = tokio::join!(engine_a.shutdown(), text(response));
        assert_eq!(events(&text).len(), 2001);
        assert!(TcpStream::connect(addr).await.is_err(), "it no longer listens");

        let engine_b = MockEngine::start(
            MockConfig::default(),
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
        )
        .expect("a good configuration");
        let response = send(engine_b.addr(), "/v1/chat/completions", body(100_000)).await;
        drop(engine_b);
        assert!(response.into_body().collect().await.is_err(), "the stream broke off");
    }

    #[tokio::test]
    async fn a_black_hole_takes_connections_and_says_nothing_until_it_is_healed() {
        let engine = engine(MockConfig::default()).await;
        engine.cause(Fault::BlackHole).expect("a fault");
        let mut held = TcpStream::connect(engine.addr()).await.expect("connections are accepted");
        held.write_all(b"GET /health HTTP/1.1\r\nhost: mock\r\n\r\n").await.expect("the kernel takes it");
        let mut answer = [0; 12];
        // A paused clock moves on when every task waits: what is not held has been answered by then.
        tokio::time::pause();
        let minute = Duration::from_secs(60);
        assert!(tokio::time::timeout(minute, held.read_exact(&mut answer)).await.is_err(), "it is answered");
        tokio::time::resume();
        engine.cause(Fault::Heal).expect("a cure");
        held.read_exact(&mut answer).await.expect("it is answered after all");
        assert_eq!(&answer, b"HTTP/1.1 200");
    }

    #[tokio::test]
    async fn a_reset_breaks_every_connection_once() {
        let engine = engine(MockConfig { speed: 1.0, ..MockConfig::default() }).await;
        let more = json!({"max_tokens": 100_000, "stream": true});
        let response = send(engine.addr(), "/v1/chat/completions", chat("hi", more).to_string()).await;
        let mut body = response.into_body();
        body.frame().await.expect("it has begun").expect("a frame");
        engine.cause(Fault::Reset).expect("a fault");
        let broken = loop {
            match body.frame().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break error,
                None => panic!("the stream ended as if it were whole"),
            }
        };
        let source = std::error::Error::source(&broken).map(ToString::to_string).unwrap_or_default();
        assert!(source.contains("reset"), "{broken}: {source}");
        let (status, _) = text(send(engine.addr(), "/health", "").await).await;
        assert_eq!(status, StatusCode::OK, "the next connection is served");
        while text(send(engine.addr(), "/metrics", "").await)
            .await
            .1
            .contains("running{engine=\"0\",model_name=\"mock\"} 1")
        {}
    }

    #[tokio::test]
    async fn faults_are_told_over_http_where_no_fault_reaches() {
        let mut engine = engine(MockConfig::default()).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let control = listener.local_addr().expect("bound");
        engine.take_faults(listener);
        let tell = async |fault: Value| text(send(control, "/fault", fault.to_string()).await).await;
        for fault in ["black_hole", "reset", "heal", "cut_feed", "flood_feed", "restore_feed"] {
            assert_eq!(tell(json!({"fault": fault})).await.0, StatusCode::NO_CONTENT, "{fault}");
        }
        assert_eq!(tell(json!({"fault": "slow", "factor": 2})).await.0, StatusCode::NO_CONTENT);
        for (wrong, what) in [
            (json!({"fault": "slow", "factor": 0}), "factor is 0"),
            (json!({"fault": "slow"}), "factor"),
            (json!({"fault": "flood"}), "black_hole"),
        ] {
            let (status, message) = tell(wrong).await;
            assert!(status.is_client_error() && message.contains(what), "{status} {message}");
        }
    }
}
