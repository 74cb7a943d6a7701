//! An engine that speaks gRPC: answers probes by itself and hands every other call to the test.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response};
use kvlane_wire::engine::calls::{LOADS_PATH, MODEL_PATH};
use kvlane_wire::grpc::{
    CONTENT_TYPE, HEALTH_CHECK_PATH, STATUS_FIELD, Status, encode_message, frame, health, message,
};
use kvlane_wire::protobuf::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use crate::testing::wait::{first_of, soon};

/// An engine that speaks gRPC. Dropping it closes its connections.
pub struct GrpcEngine {
    address: String,
    calls: Mutex<mpsc::UnboundedReceiver<GrpcEngineCall>>,
    accepts: AbortHandle,
    _tasks: JoinSet<()>,
}

/// A call that a test answers.
pub struct GrpcEngineCall {
    /// The path of its method.
    pub path: String,
    /// Its metadata.
    pub fields: HeaderMap,
    /// Its message.
    pub message: Bytes,
    respond: SendResponse<Bytes>,
    answer: Option<SendStream<Bytes>>,
}

// === impl GrpcEngine ===

impl GrpcEngine {
    /// An engine that serves `model` on a free port.
    ///
    /// # Panics
    /// There is no free port.
    pub async fn start(model: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let (calls, received) = mpsc::unbounded_channel();
        let (model, mut tasks) = (Arc::<str>::from(model), JoinSet::new());
        let accepts = tasks.spawn(async move {
            // They end with this task.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&model), calls.clone()));
            }
        });
        Self { address, calls: Mutex::new(received), accepts, _tasks: tasks }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("grpc://{}", self.address)
    }

    /// The next call.
    ///
    /// # Panics
    /// There is none.
    pub async fn call(&self) -> GrpcEngineCall {
        let mut calls = self.calls.lock().await;
        soon("a call at the engine", calls.recv()).await.expect("it runs")
    }

    /// Ends it as a kill does: its port and all its connections are closed.
    pub fn kill(&self) {
        self.accepts.abort();
    }
}

/// The next call at any of the engines, with the engine's index.
pub async fn next_grpc_call(engines: &[&GrpcEngine]) -> (usize, GrpcEngineCall) {
    first_of(engines.iter().map(|engine| engine.call())).await
}

async fn serve(stream: TcpStream, model: Arc<str>, calls: mpsc::UnboundedSender<GrpcEngineCall>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    let mut answers = JoinSet::new();
    while let Some(Ok((request, respond))) = connection.accept().await {
        answers.spawn(answer(request, respond, Arc::clone(&model), calls.clone()));
    }
}

async fn answer(
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    model: Arc<str>,
    calls: mpsc::UnboundedSender<GrpcEngineCall>,
) {
    let (head, mut body) = request.into_parts();
    let mut whole = BytesMut::new();
    while let Some(Ok(piece)) = body.data().await {
        let _ = body.flow_control().release_capacity(piece.len());
        whole.extend_from_slice(&piece);
    }
    let whole = whole.freeze();
    let message = message(&whole).map(|message| whole.slice_ref(message)).unwrap_or_default();
    let path = head.uri.path().to_owned();
    let mut call = GrpcEngineCall { path, fields: head.headers, message, respond, answer: None };
    match call.path.as_str() {
        HEALTH_CHECK_PATH => {
            let mut serving = Vec::new();
            health(&mut serving, Some(true));
            call.send_raw(serving);
            call.end(Status::Ok, "");
        }
        MODEL_PATH => {
            call.send(|message| {
                message.number(3, 4096);
                message.bytes(6, model.as_bytes());
            });
            call.end(Status::Ok, "");
        }
        LOADS_PATH => {
            call.send(|_| {});
            call.end(Status::Ok, "");
        }
        // A test that has ended takes none.
        _ => _ = calls.send(call),
    }
}

// === impl GrpcEngineCall ===

impl GrpcEngineCall {
    /// The value of a field of its metadata.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name)?.to_str().ok()
    }

    /// Sends bytes that need not be a frame.
    pub fn send_raw(&mut self, bytes: impl Into<Bytes>) {
        if self.answer.is_none() {
            self.answer = self.respond.send_response(head(), false).ok();
        }
        if let Some(answer) = &mut self.answer {
            // The caller may have left.
            let _ = answer.send_data(bytes.into(), false);
        }
    }

    /// Sends a message.
    pub fn send(&mut self, write: impl FnOnce(&mut Message)) {
        let mut out = Vec::new();
        frame(&mut out, write);
        self.send_raw(out);
    }

    /// Sends tokens of a stream.
    pub fn chunk(&mut self, ids: &[u8]) {
        self.send(|message| message.message(1, |chunk| chunk.bytes(1, ids)));
    }

    /// Sends the last message of an answer: tokens of the prompt, of the answer, and cached ones.
    pub fn complete(&mut self, prompt: u64, written: u64, cached: u64) {
        self.send(|message| {
            message.message(2, |complete| {
                complete.bytes(2, b"stop");
                complete.number(3, prompt);
                complete.number(4, written);
                complete.number(5, cached);
            });
        });
    }

    /// Ends the call: in trailers, or in the head if nothing was sent.
    pub fn end(&mut self, status: Status, said: &str) {
        let mut fields = HeaderMap::new();
        fields.insert(STATUS_FIELD, (status as u16).into());
        if !said.is_empty() {
            fields.insert("grpc-message", HeaderValue::try_from(encode_message(said)).expect("ASCII"));
        }
        // The caller may have left.
        let _ = match &mut self.answer {
            Some(answer) => answer.send_trailers(fields),
            None => {
                let mut head = head();
                head.headers_mut().extend(fields);
                self.respond.send_response(head, true).map(drop)
            }
        };
    }

    /// Waits until the caller gives the call up.
    ///
    /// # Panics
    /// It does not.
    pub async fn given_up(&mut self) -> Reason {
        let reset = std::future::poll_fn(|cx| match &mut self.answer {
            Some(answer) => answer.poll_reset(cx),
            None => self.respond.poll_reset(cx),
        });
        soon("the call is given up", reset).await.unwrap_or(Reason::CANCEL)
    }
}

fn head() -> Response<()> {
    let mut head = Response::new(());
    head.headers_mut().insert("content-type", HeaderValue::from_static(CONTENT_TYPE));
    head
}
