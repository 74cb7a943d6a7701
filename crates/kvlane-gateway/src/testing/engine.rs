//! A fake engine: the test writes its responses, byte by byte if needed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::BytesMut;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::testing::wait::{PATIENCE, eventually, first_of, listen_again, soon};

/// An engine on a free port. Dropping it closes all its sockets.
pub struct FakeEngine {
    url: String,
    calls: tokio::sync::Mutex<mpsc::UnboundedReceiver<Call>>,
    shared: Arc<Shared>,
    /// Stops everything.
    stop: CancellationToken,
    /// Stops listening, and then closes idle connections.
    refuse: CancellationToken,
    /// Closes the port.
    shut: CancellationToken,
    /// Stops accepting, while connections still queue in the kernel.
    deafen: CancellationToken,
}

type Tokenize = Box<dyn FnMut(&Value) -> Option<Vec<u32>> + Send>;

struct Shared {
    /// The body of `/v1/models`.
    models: Mutex<Value>,
    /// The text of `/metrics`.
    metrics: Mutex<String>,
    /// The body of `/kv_event_sources`; 404 while it is empty.
    kv_event_sources: Mutex<String>,
    /// Responses of `/tokenize` to the gateway, by body.
    tokenizer: Mutex<Option<Tokenize>>,
    /// Answers to other GETs, by path and query.
    others: Mutex<HashMap<String, String>>,
    healthy: AtomicBool,
    /// The key that the gateway's own queries need, except health probes; without it they are answered 401.
    key: Mutex<Option<String>>,
    /// Hands calls over after the head, with the rest of the body unread.
    heads_only: AtomicBool,
    connections: AtomicUsize,
    probes: AtomicUsize,
    pages: AtomicUsize,
    calls: mpsc::UnboundedSender<Call>,
    /// Held by every connection on which a request may arrive: not while a test has its [`Call`].
    reading: Arc<()>,
}

/// A request that has reached the engine. The test answers it; dropping it closes its connection.
pub struct Call {
    /// Request line and header fields as received; invalid UTF-8 is replaced.
    pub head: String,
    /// The body as received.
    pub body: Vec<u8>,
    /// The number of its connection, counted from 1.
    pub connection: usize,
    stream: TcpStream,
    back: oneshot::Sender<TcpStream>,
}

// === impl FakeEngine ===

impl FakeEngine {
    /// An engine that serves one model.
    pub async fn start(model: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self::on(listener, json!([{"id": model, "object": "model", "root": model, "parent": null}]))
    }

    /// An engine at the address of one that was dropped.
    pub async fn start_again(authority: &str, models: Value) -> Self {
        Self::on(listen_again(authority).await, models)
    }

    /// An engine on this listener with this list of models.
    ///
    /// # Panics
    /// The listener has no address.
    pub fn on(listener: TcpListener, models: Value) -> Self {
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let (sender, calls) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            models: Mutex::new(models),
            metrics: Mutex::default(),
            kv_event_sources: Mutex::default(),
            tokenizer: Mutex::default(),
            others: Mutex::default(),
            healthy: AtomicBool::new(true),
            key: Mutex::default(),
            heads_only: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            probes: AtomicUsize::new(0),
            pages: AtomicUsize::new(0),
            calls: sender,
            reading: Arc::default(),
        });
        let stop = CancellationToken::new();
        let (refuse, deafen, shut) = (stop.child_token(), stop.child_token(), stop.child_token());
        let engine = Self {
            url,
            calls: tokio::sync::Mutex::new(calls),
            shared: Arc::clone(&shared),
            stop: stop.clone(),
            refuse: refuse.clone(),
            deafen: deafen.clone(),
            shut: shut.clone(),
        };
        tokio::spawn(async move {
            let idle = CancellationToken::new();
            loop {
                let stream = tokio::select! {
                    accepted = listener.accept() => accepted.expect("an engine accepts").0,
                    () = refuse.cancelled() => break,
                    () = shut.cancelled() => break,
                    () = deafen.cancelled() => { refuse.cancelled().await; break }
                };
                let (shared, stop, idle) = (Arc::clone(&shared), stop.clone(), idle.clone());
                let reading = Arc::clone(&shared.reading);
                tokio::spawn(async move {
                    tokio::select! {
                        () = shared.serve(stream, reading, idle) => {}
                        () = stop.cancelled() => {}
                    }
                });
            }
            // Whoever sees an idle connection close finds the port closed.
            drop(listener);
            refuse.cancelled().await;
            idle.cancel();
        });
        engine
    }

    /// Its URL.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// `host:port`.
    pub fn authority(&self) -> &str {
        &self.url["http://".len()..]
    }

    /// Sets the body of `/v1/models`.
    pub fn set_models(&self, models: Value) {
        *self.shared.models.lock().unwrap_or_else(PoisonError::into_inner) = models;
    }

    /// Sets the text of `/metrics`.
    pub fn set_metrics(&self, text: &str) {
        *self.shared.metrics.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
    }

    /// Sets the body of `/kv_event_sources`, which is 404 at first.
    pub fn set_kv_event_sources(&self, json: &str) {
        *self.shared.kv_event_sources.lock().unwrap_or_else(PoisonError::into_inner) = json.into();
    }

    /// Answers a GET of this path with this JSON.
    pub fn set_page(&self, path: &str, json: &str) {
        let mut others = self.shared.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.insert(format!("GET {path} HTTP/1.1"), json.into());
    }

    /// From now on the gateway's own `/tokenize` queries are answered with `tokenize`; otherwise they get a 404.
    /// Where `tokenize` returns none, no response is sent.
    pub fn set_tokenizer(&self, tokenize: impl FnMut(&Value) -> Option<Vec<u32>> + Send + 'static) {
        *self.shared.tokenizer.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(tokenize));
    }

    /// Sets whether `/health` answers 200 or 503.
    pub fn set_healthy(&self, healthy: bool) {
        self.shared.healthy.store(healthy, Ordering::Relaxed);
    }

    /// From now on the gateway's own queries, except health probes, need this key; without it they are answered 401.
    pub fn require_key(&self, key: &str) {
        *self.shared.key.lock().unwrap_or_else(PoisonError::into_inner) = Some(key.into());
    }

    /// From now on hands a request over after its head, with as much of the body as came with it; the rest is left unread.
    pub fn read_heads_only(&self) {
        self.shared.heads_only.store(true, Ordering::Relaxed);
    }

    /// From now on refuses connections. Idle connections close.
    pub fn refuse(&self) {
        self.refuse.cancel();
    }

    /// From now on refuses connections. Open connections stay, so the gateway has no reason to check.
    pub fn close_port(&self) {
        self.shut.cancel();
    }

    /// From now on leaves new connections in the kernel's queue.
    pub fn stop_accepting(&self) {
        self.deafen.cancel();
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Health probes answered so far.
    pub fn probes(&self) -> usize {
        self.shared.probes.load(Ordering::Relaxed)
    }

    /// Reads of its metrics so far.
    pub fn pages_read(&self) -> usize {
        self.shared.pages.load(Ordering::Relaxed)
    }

    /// The next request that is not a probe.
    ///
    /// # Panics
    /// No request arrives.
    pub async fn call(&self) -> Call {
        soon("a request at the engine", async { self.calls.lock().await.recv().await })
            .await
            .expect("an engine")
    }

    /// The next request, if one has arrived. That none has does not mean that none was sent.
    pub async fn call_at_hand(&self) -> Option<Call> {
        self.calls.lock().await.try_recv().ok()
    }

    /// Checks that the test has taken all requests that were ever sent, probes aside. All senders have ended, as after
    /// [`TestGateway::end_quiet`](crate::testing::TestGateway::end_quiet): then each connection ends in bytes that have
    /// arrived.
    ///
    /// # Panics
    /// There is another request.
    pub(super) async fn has_no_more(&self) {
        // Connections are accepted in order: with the answer to this one, all before it have been accepted.
        if let Ok(mut last) = TcpStream::connect(self.authority()).await {
            last.write_all(b"GET /health HTTP/1.1\r\n\r\n").await.expect("the engine reads");
            soon("the engine answers", last.read_u8()).await.expect("an answer");
        }
        let mut calls = self.calls.lock().await;
        let all_read = || Arc::strong_count(&self.shared.reading) == 1;
        eventually("all connections were read to their end", || all_read() || !calls.is_empty()).await;
        if let Ok(Call { head, body, .. }) = calls.try_recv() {
            panic!("one request more at {}: {head}{:.200}", self.url, String::from_utf8_lossy(&body));
        }
    }

    /// Answers the next request with 200 and this JSON, and returns it.
    pub async fn answer(&self, body: &str) -> (String, Vec<u8>) {
        let call = self.call().await;
        let request = (call.head.clone(), call.body.clone());
        call.answer(200, body).await;
        request
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

// === impl Shared ===

impl Shared {
    /// Serves one connection until either side closes it.
    async fn serve(&self, mut stream: TcpStream, mut reading: Arc<()>, idle: CancellationToken) {
        stream.set_nodelay(true).expect("a socket option");
        let connection = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        let mut buffer = BytesMut::new();
        loop {
            let read = tokio::select! {
                read = self.read(&mut stream, &mut buffer) => read,
                () = idle.cancelled() => return,
            };
            let Some((head, body)) = read else { return };
            if let Some((status, kind, text)) = self.probe_answer(&head, &body) {
                if status == 0 {
                    return idle.cancelled().await;
                }
                let answer = answer_bytes(status, kind, &text);
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
                continue;
            }
            let (back, returned) = oneshot::channel();
            if self.calls.send(Call { head, body, connection, stream, back }).is_err() {
                return;
            }
            drop(reading);
            match returned.await {
                Ok(given) => stream = given,
                Err(_) => return,
            }
            reading = Arc::clone(&self.reading);
        }
    }

    async fn read(&self, stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<(String, Vec<u8>)> {
        let end = loop {
            if let Some(at) = memchr::memmem::find(buffer, b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
                assert!(buffer.is_empty(), "the gateway cut a head: {buffer:?}");
                return None;
            }
        };
        let head = String::from_utf8_lossy(&buffer.split_to(end)).into_owned();
        if self.heads_only.load(Ordering::Relaxed) {
            return Some((head, buffer.split().to_vec()));
        }
        let length = field(&head, "content-length").map_or(0, |length| length.parse().expect("a length"));
        assert_eq!(field(&head, "transfer-encoding"), None, "the gateway sends bodies whole");
        while buffer.len() < length {
            if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
                return None;
            }
        }
        Some((head, buffer.split_to(length).to_vec()))
    }

    fn probe_answer(&self, head: &str, body: &[u8]) -> Option<(u16, &'static str, String)> {
        let text = |text: &Mutex<String>| text.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let wanted = self.key.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let shown = field(head, "authorization").and_then(|value| value.strip_prefix("Bearer "));
        if wanted.is_some_and(|wanted| shown != Some(&wanted))
            && field(head, "user-agent") == Some("kvlane")
            && !head.starts_with("GET /health ")
        {
            return Some((401, "text/plain", String::new()));
        }
        let line = head.split("\r\n").next()?;
        if let Some(page) = self.others.lock().unwrap_or_else(PoisonError::into_inner).get(line) {
            return Some((200, "application/json", page.clone()));
        }
        match line {
            "GET /health HTTP/1.1" => {
                self.probes.fetch_add(1, Ordering::Relaxed);
                let status = if self.healthy.load(Ordering::Relaxed) { 200 } else { 503 };
                Some((status, "text/plain", String::new()))
            }
            "GET /v1/models HTTP/1.1" => {
                let models = self.models.lock().unwrap_or_else(PoisonError::into_inner).clone();
                Some((200, "application/json", json!({"object": "list", "data": models}).to_string()))
            }
            "GET /kv_event_sources HTTP/1.1" => match text(&self.kv_event_sources) {
                sources if sources.is_empty() => Some((404, "text/plain", String::new())),
                sources => Some((200, "application/json", sources)),
            },
            "GET /server_info HTTP/1.1" => Some((404, "text/plain", String::new())),
            "GET /metrics HTTP/1.1" => {
                self.pages.fetch_add(1, Ordering::Relaxed);
                Some((200, "text/plain", text(&self.metrics)))
            }
            "POST /tokenize HTTP/1.1" if field(head, "user-agent") == Some("kvlane") => {
                let mut tokenizer = self.tokenizer.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(tokenize) = &mut *tokenizer else { return Some((404, "text/plain", String::new())) };
                let question = serde_json::from_slice(body).expect("a question in JSON");
                let Some(tokens) = tokenize(&question) else { return Some((0, "", String::new())) };
                Some((200, "application/json", json!({"count": tokens.len(), "tokens": tokens}).to_string()))
            }
            // A request for one token, to test whether the engine works, and changes of adapters: the test answers them.
            "POST /v1/completions HTTP/1.1" => None,
            "POST /v1/load_lora_adapter HTTP/1.1" | "POST /v1/unload_lora_adapter HTTP/1.1" => None,
            line if line.starts_with("POST ") && field(head, "user-agent") == Some("kvlane") => {
                Some((404, "text/plain", String::new()))
            }
            _ => None,
        }
    }
}

/// The next request at any of the engines, with the engine's index.
pub async fn next_call(engines: &[&FakeEngine]) -> (usize, Call) {
    first_of(engines.iter().map(|engine| engine.call())).await
}

// === impl Call ===

impl Call {
    /// `METHOD target` of the request line.
    pub fn target(&self) -> &str {
        self.head.split(" HTTP/1.1\r\n").next().unwrap_or_default()
    }

    /// The value of a request header field.
    pub fn header(&self, name: &str) -> Option<&str> {
        field(&self.head, name)
    }

    /// Sends these bytes unchanged.
    ///
    /// # Panics
    /// The connection is broken.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        soon("room to write", self.stream.write_all(bytes.as_ref())).await.expect("the gateway reads");
    }

    /// Sends these bytes for as long as the gateway accepts them; returns whether it accepted all.
    pub async fn try_send(&mut self, bytes: &[u8]) -> bool {
        soon("room to write", self.stream.write_all(bytes)).await.is_ok()
    }

    /// Reads some bytes of what follows the head, where engines read heads only; none at the end.
    pub async fn read(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; 64 << 10];
        let read = soon("bytes from the gateway", self.stream.read(&mut bytes)).await.unwrap_or(0);
        bytes.truncate(read);
        bytes
    }

    /// Reads this many bytes of what follows the head, where engines read heads only.
    ///
    /// # Panics
    /// There are fewer.
    pub async fn read_exact(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        soon("bytes from the gateway", self.stream.read_exact(&mut bytes)).await.expect("so many");
        bytes
    }

    /// Sends a JSON response; the connection stays open.
    pub async fn answer(mut self, status: u16, body: &str) {
        self.send(answer_bytes(status, "application/json", body)).await;
        self.keep();
    }

    /// Begins a chunked event stream.
    pub async fn begin_stream(&mut self) {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        self.send(head).await;
    }

    /// Sends one chunk.
    pub async fn chunk(&mut self, text: &str) {
        self.send(format!("{:x}\r\n{text}\r\n", text.len())).await;
    }

    /// Ends a chunked body; the connection stays open.
    pub async fn end_stream(mut self) {
        self.send("0\r\n\r\n").await;
        self.keep();
    }

    /// The response is complete: waits for the next request on this connection.
    pub fn keep(self) {
        // The engine may have been dropped, and its connections with it.
        let _ = self.back.send(self.stream);
    }

    /// Closes the connection with a reset.
    ///
    /// # Panics
    /// The socket option cannot be set.
    pub fn reset(self) {
        self.stream.set_zero_linger().expect("a socket option");
    }

    /// Waits until the gateway has closed the connection.
    ///
    /// # Panics
    /// The gateway does not close it, or sends more.
    pub async fn gateway_gone(&mut self) {
        let mut byte = [0];
        let read = tokio::time::timeout(PATIENCE, self.stream.read(&mut byte)).await;
        assert!(matches!(read.expect("the gateway closes"), Ok(0) | Err(_)), "the gateway sent more");
    }

    /// Reads until the gateway has closed the connection.
    pub async fn drained(&mut self) {
        let mut bytes = vec![0; 64 << 10];
        while soon("the gateway closes", self.stream.read(&mut bytes)).await.is_ok_and(|read| read > 0) {}
    }
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let fields = head.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
    fields.filter(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
}

fn answer_bytes(status: u16, kind: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status} Scripted\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}
