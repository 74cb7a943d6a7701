//! A data plane with external processing: speaks Envoy's side of the protocol, and lets a test choose every message.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request};
use kvlane_wire::ext_proc::{BodyMode, PROCESS_PATH};
use kvlane_wire::grpc::{CONTENT_TYPE, Frames, frame};
use kvlane_wire::protobuf::{Field, Message, bytes_of, fields, number_of};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::testing::wait::soon;

/// Largest message of a picker.
const BYTES_MAX: usize = 64 << 10;

/// A connection to a picker.
pub struct DataPlane {
    requests: SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

/// A gRPC call.
pub struct GrpcCall {
    send: SendStream<Bytes>,
    answer: Option<h2::client::ResponseFuture>,
    receive: Option<RecvStream>,
    frames: Frames,
    /// Of head and trailers, as far as they have come.
    fields: HeaderMap,
}

/// What a picker answers to a part of a request.
#[derive(Debug, PartialEq)]
pub enum Reaction {
    /// It answers the part with this number, 1 to 6.
    Part(u64, Changes),
    /// The client gets this answer.
    Immediate {
        /// Its status.
        status: u64,
        /// Its header fields.
        headers: Vec<(String, String)>,
        /// Its body.
        body: String,
    },
}

/// Changes of a part.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    /// Header fields that are set.
    pub set: Vec<(String, String)>,
    /// Header fields that are removed.
    pub remove: Vec<String>,
    /// The whole new body.
    pub body: Option<Vec<u8>>,
    /// A piece of the streamed body, and whether it is the last.
    pub piece: Option<(Vec<u8>, bool)>,
    /// Metadata `envoy.lb`: the destination.
    pub metadata: Option<String>,
    /// Whether the route is selected again.
    pub clear_route_cache: bool,
}

/// What Envoy tells of a request besides its head.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// How bodies are sent; none: not said.
    pub modes: Option<(BodyMode, BodyMode)>,
    /// The subset hint.
    pub subset: Option<Hint>,
}

/// A subset hint, as data planes spell it.
#[derive(Clone, Debug)]
pub enum Hint {
    /// One text.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
}

/// Status, header fields and body of an answer that the client gets instead of an engine's.
pub type Immediate = (u64, Vec<(String, String)>, String);

/// A request's outcome: reactions to its head and body put together.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The answer that the client gets instead of an engine's.
    pub immediate: Option<Immediate>,
    /// The changes, the streamed body in one piece.
    pub changes: Changes,
}

// === impl DataPlane ===

impl DataPlane {
    /// Connects to a picker without TLS.
    ///
    /// # Panics
    /// It does not answer.
    pub async fn connect(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).await.expect("it listens");
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
        let (requests, connection) = builder.handshake(socket).await.expect("HTTP/2");
        let connection = tokio::spawn(async move { _ = connection.await });
        Self { requests, connection }
    }

    /// Begins a call of this method.
    pub async fn call(&self, path: &str) -> GrpcCall {
        self.call_with(path, &[]).await
    }

    /// Begins a call of this method with this metadata.
    ///
    /// # Panics
    /// The connection is closed.
    pub async fn call_with(&self, path: &str, metadata: &[(&str, &str)]) -> GrpcCall {
        let requests = self.requests.clone();
        let mut requests = soon("the connection has room", requests.ready()).await.expect("it is open");
        let request = Request::post(format!("http://picker{path}"));
        let request = request.header("content-type", CONTENT_TYPE).header("te", "trailers");
        let request = metadata.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let (answer, send) =
            requests.send_request(request.body(()).expect("a request"), false).expect("it is open");
        GrpcCall {
            send,
            answer: Some(answer),
            receive: None,
            frames: Frames::default(),
            fields: HeaderMap::new(),
        }
    }

    /// Begins a request.
    pub async fn begin(&self) -> GrpcCall {
        self.call(PROCESS_PATH).await
    }

    /// Sends a whole request in full duplex and reads the pick.
    pub async fn pick(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Outcome {
        self.pick_in(full_duplex(), path, headers, body).await
    }

    /// Like [`DataPlane::pick`], with what Envoy tells besides.
    pub async fn pick_in(
        &self,
        context: Context,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Outcome {
        let mut call = self.begin().await;
        call.head(&context, "POST", path, headers, false);
        call.body(body.as_bytes(), true);
        call.outcome().await
    }

    /// Closes the connection, whatever calls are open.
    ///
    /// # Panics
    /// It has ended before.
    pub async fn close(self) {
        self.connection.abort();
        assert!(soon("the connection ends", self.connection).await.is_err_and(|error| error.is_cancelled()));
    }
}

/// What Envoy says in full duplex, with answers not sent.
pub fn full_duplex() -> Context {
    Context { modes: Some((BodyMode::FullDuplexStreamed, BodyMode::None)), subset: None }
}

// === impl GrpcCall ===

impl GrpcCall {
    /// Sends bytes that need not be frames.
    pub fn send_raw(&mut self, bytes: impl Into<Bytes>) {
        // A call that has been answered may be closed.
        let _ = self.send.send_data(bytes.into(), false);
    }

    /// Sends a message.
    pub fn send(&mut self, write: impl FnOnce(&mut Message)) {
        let mut out = Vec::new();
        frame(&mut out, write);
        self.send_raw(out);
    }

    /// Sends a request's head.
    pub fn head(
        &mut self,
        context: &Context,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        is_all: bool,
    ) {
        let pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "llm")];
        let fields: Vec<_> = pseudo.iter().chain(headers).copied().collect();
        self.send(|message| {
            message.message(2, |head| write_head(head, &fields, is_all));
            if let Some(hint) = &context.subset {
                message.message(8, |metadata| {
                    entry(metadata, "envoy.lb.subset_hint", |object| {
                        entry(object, "x-gateway-destination-endpoint-subset", |value| {
                            write_hint(value, hint)
                        });
                    });
                });
            }
            if let Some((request, response)) = context.modes {
                message.message(11, |config| {
                    config.number(1, request as u64);
                    config.number(2, response as u64);
                });
            }
        });
    }

    /// Sends a piece of a request's body.
    pub fn body(&mut self, bytes: &[u8], is_last: bool) {
        self.send(|message| message.message(4, |piece| write_piece(piece, bytes, is_last)));
    }

    /// Sends an answer's head; `served` is the endpoint that served it.
    pub fn response_head(&mut self, headers: &[(&str, &str)], served: Option<&str>) {
        self.send(|message| {
            message.message(3, |head| write_head(head, headers, false));
            if let Some(served) = served {
                message.message(8, |metadata| {
                    entry(metadata, "envoy.lb", |object| {
                        entry(object, "x-gateway-destination-endpoint-served", |value| {
                            value.bytes(3, served.as_bytes());
                        });
                    });
                });
            }
        });
    }

    /// Sends a piece of an answer's body.
    pub fn response_body(&mut self, bytes: &[u8], is_last: bool) {
        self.send(|message| message.message(5, |piece| write_piece(piece, bytes, is_last)));
    }

    /// Says that nothing more is sent.
    pub fn half_close(&mut self) {
        let _ = self.send.send_data(Bytes::new(), true);
    }

    /// Resets the call.
    pub fn reset(mut self) {
        self.send.send_reset(h2::Reason::CANCEL);
    }

    /// The next message as bytes; none when the call has ended.
    ///
    /// # Panics
    /// The call is reset.
    pub async fn message(&mut self) -> Option<Bytes> {
        soon("the picker answers", self.read()).await
    }

    async fn read(&mut self) -> Option<Bytes> {
        if let Some(answer) = self.answer.take() {
            let answer = answer.await.expect("an answer");
            assert_eq!(answer.status(), 200);
            self.fields = answer.headers().clone();
            self.receive = Some(answer.into_body());
        }
        let receive = self.receive.as_mut()?;
        loop {
            if let Some(message) = self.frames.next(BYTES_MAX).expect("a valid frame") {
                return Some(message);
            }
            match receive.data().await {
                Some(piece) => {
                    let piece = piece.expect("the call is not reset");
                    receive.flow_control().release_capacity(piece.len()).expect("it was received");
                    self.frames.push(piece);
                }
                None => {
                    let trailers = receive.trailers().await.ok().flatten();
                    self.fields.extend(trailers.unwrap_or_default());
                    return None;
                }
            }
        }
    }

    /// A field of the answer's head or trailers, as far as they have come.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name)?.to_str().ok()
    }

    /// The next reaction; none when the call has ended.
    pub async fn reaction(&mut self) -> Option<Reaction> {
        Some(read_reaction(&self.message().await?))
    }

    /// The gRPC status with which the call ends.
    ///
    /// # Panics
    /// It has none.
    pub async fn status(&mut self) -> String {
        while self.message().await.is_some() {}
        self.field("grpc-status").expect("a status").to_owned()
    }

    /// Reactions to head and body, until the body has come back or the call has ended.
    pub async fn outcome(&mut self) -> Outcome {
        let mut outcome = Outcome::default();
        let mut whole: Option<Vec<u8>> = None;
        while let Some(reaction) = self.reaction().await {
            match reaction {
                Reaction::Immediate { status, headers, body } => {
                    outcome.immediate = Some((status, headers, body));
                    break;
                }
                Reaction::Part(_, changes) => {
                    let last = changes.piece.as_ref().is_some_and(|(_, last)| *last);
                    if let Some((piece, _)) = &changes.piece {
                        whole.get_or_insert_default().extend_from_slice(piece);
                    } else if outcome.changes.set.is_empty() {
                        outcome.changes = changes;
                    }
                    if last {
                        break;
                    }
                }
            }
        }
        outcome.changes.piece = whole.map(|whole| (whole, true));
        outcome
    }
}

// === impl Outcome ===

impl Outcome {
    /// The addresses that the data plane may use.
    ///
    /// # Panics
    /// There are none, or header and metadata differ.
    pub fn addresses(&self) -> Vec<String> {
        let header = self.header("x-gateway-destination-endpoint").expect("a destination");
        assert_eq!(self.changes.metadata.as_deref(), Some(header), "header and metadata agree");
        header.split(',').map(str::to_owned).collect()
    }

    /// A header field that is set.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.changes.set.iter().find(|(set, _)| set == name).map(|(_, value)| &**value)
    }

    /// The status of the answer that the client gets instead.
    pub fn status(&self) -> Option<u64> {
        self.immediate.as_ref().map(|(status, ..)| *status)
    }

    /// The body that came back.
    pub fn body(&self) -> &[u8] {
        self.changes.piece.as_ref().map(|(body, _)| &body[..]).unwrap_or_default()
    }
}

fn entry(map: &mut Message, key: &str, value: impl FnOnce(&mut Message)) {
    map.message(1, |entry| {
        entry.bytes(1, key.as_bytes());
        entry.message(2, value);
    });
}

fn write_hint(value: &mut Message, hint: &Hint) {
    match hint {
        Hint::Text(text) => value.bytes(3, text.as_bytes()),
        Hint::List(texts) => value.message(6, |list| {
            for text in texts {
                list.message(1, |item| item.bytes(3, text.as_bytes()));
            }
        }),
    }
}

fn write_head(head: &mut Message, fields: &[(&str, &str)], is_all: bool) {
    head.message(1, |map| {
        for (name, value) in fields {
            map.message(1, |header| {
                header.bytes(1, name.as_bytes());
                header.bytes(3, value.as_bytes());
            });
        }
    });
    head.number(3, is_all.into());
}

fn write_piece(piece: &mut Message, bytes: &[u8], is_last: bool) {
    piece.bytes(1, bytes);
    piece.number(2, is_last.into());
}

fn text(bytes: Option<&[u8]>) -> String {
    String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
}

fn set_headers(mutation: &[u8]) -> Vec<(String, String)> {
    let options = fields(mutation).filter_map(|field| match field {
        (1, Field::Bytes(option)) => bytes_of(option, 1),
        _ => None,
    });
    options.map(|header| (text(bytes_of(header, 1)), text(bytes_of(header, 3)))).collect()
}

fn read_reaction(message: &[u8]) -> Reaction {
    if let Some(answer) = bytes_of(message, 7) {
        return Reaction::Immediate {
            status: bytes_of(answer, 1).and_then(|status| number_of(status, 1)).unwrap_or_default(),
            headers: bytes_of(answer, 2).map(set_headers).unwrap_or_default(),
            body: text(bytes_of(answer, 3)),
        };
    }
    let (part, answer) = fields(message)
        .find_map(|field| match field {
            (part @ 1..=6, Field::Bytes(answer)) => Some((part, answer)),
            _ => None,
        })
        .expect("a part");
    let common = bytes_of(answer, 1).unwrap_or_default();
    let headers = bytes_of(common, 2).unwrap_or_default();
    let removed = fields(headers).filter_map(|field| match field {
        (2, Field::Bytes(name)) => Some(text(Some(name))),
        _ => None,
    });
    let body = bytes_of(common, 3).unwrap_or_default();
    let streamed = bytes_of(body, 3);
    let value = |map: &[u8], key: &str| {
        fields(map).find_map(|field| match field {
            (1, Field::Bytes(entry)) if bytes_of(entry, 1) == Some(key.as_bytes()) => {
                Some(bytes_of(entry, 2).unwrap_or_default().to_vec())
            }
            _ => None,
        })
    };
    let metadata = bytes_of(message, 8).and_then(|object| value(object, "envoy.lb"));
    let metadata = metadata.and_then(|object| value(bytes_of(&object, 5)?, "x-gateway-destination-endpoint"));
    let changes = Changes {
        set: set_headers(headers),
        remove: removed.collect(),
        body: bytes_of(body, 1).map(<[u8]>::to_vec),
        piece: streamed.map(|streamed| {
            (bytes_of(streamed, 1).unwrap_or_default().to_vec(), number_of(streamed, 2) == Some(1))
        }),
        metadata: metadata.map(|value| text(bytes_of(&value, 3))),
        clear_route_cache: number_of(common, 5) == Some(1),
    };
    Reaction::Part(part, changes)
}
