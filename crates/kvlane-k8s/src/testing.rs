//! A small API server: lists in pages, watches with bookmarks, and faults. It answers in the process, so that time can be
//! paused, or at a socket.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{pending, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tower_service::Service;

use crate::collection::Kind;

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// The server; clones are the same one.
#[derive(Clone)]
pub(crate) struct Server(Arc<Mutex<Inner>>);

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// It is this status with this message.
    Status(u16, &'static str),
    /// There is none.
    Silent,
    /// It begins and says nothing, and does not end.
    Hung,
    /// It is this text.
    Text(&'static str),
    /// It breaks off after so many bytes.
    Cut(usize),
    /// It ends at once.
    Empty,
}

struct Inner {
    version: u64,
    /// Versions before this one are forgotten.
    oldest: u64,
    /// By path of the collection and name.
    objects: BTreeMap<(String, String), Value>,
    history: Vec<(u64, String, Value)>,
    watchers: Vec<Watcher>,
    faults: Vec<(&'static str, Fault, usize)>,
    is_down: bool,
    /// Groups that are not installed.
    absent: Vec<&'static str>,
    asked: Vec<String>,
    tokens: Vec<String>,
}

struct Watcher {
    query: Query,
    sender: mpsc::UnboundedSender<io::Result<Bytes>>,
}

/// A request, as far as it matters.
#[derive(Clone, Debug, Default)]
struct Query {
    collection: String,
    labels: Vec<(String, String)>,
    name: Option<String>,
    watches: bool,
    version: u64,
    limit: usize,
    from: usize,
    seconds: u64,
}

// === impl Server ===

impl Server {
    /// An API server without objects, at version 100.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            version: 100,
            oldest: 0,
            objects: BTreeMap::new(),
            history: Vec::new(),
            watchers: Vec::new(),
            faults: Vec::new(),
            is_down: false,
            absent: Vec::new(),
            asked: Vec::new(),
            tokens: Vec::new(),
        })))
    }

    /// A client that asks it within the process.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.clone(), "serving")
    }

    /// Answers at a port of the loopback address, as long as the tasks run.
    pub(crate) async fn listen(&self, address: &str) -> (SocketAddr, JoinSet<()>) {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = self.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.expect("a connection");
                let server = server.clone();
                connections.spawn(async move {
                    let answers =
                        service_fn(move |request: Request<Incoming>| server.clone().answer_to(request));
                    // That a client goes away is no error here.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), answers).await;
                });
            }
        });
        (address, tasks)
    }

    async fn answer_to(self, request: Request<Incoming>) -> Result<Answer, Infallible> {
        let token = request.headers().get("authorization").and_then(|value| value.to_str().ok());
        self.lock().tokens.extend(token.map(str::to_owned));
        Ok(self.answer(&request.uri().to_string()).await)
    }

    /// Creates or replaces an object.
    pub(crate) fn set(&self, kind: &Kind, namespace: &str, mut object: Value) {
        let mut inner = self.lock();
        inner.version += 1;
        object["metadata"]["resourceVersion"] = inner.version.to_string().into();
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let key = (path(kind, namespace), name);
        let happened = if inner.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        let collection = key.0.clone();
        inner.objects.insert(key, object.clone());
        inner.tell(&collection, happened, object);
    }

    /// Changes an object.
    pub(crate) fn change(&self, kind: &Kind, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let object = self.lock().objects.get(&(path(kind, namespace), name.to_owned())).cloned();
        let mut object = object.expect("it exists");
        change(&mut object);
        self.set(kind, namespace, object);
    }

    /// Deletes an object.
    pub(crate) fn delete(&self, kind: &Kind, namespace: &str, name: &str) {
        let mut inner = self.lock();
        inner.version += 1;
        let collection = path(kind, namespace);
        let mut object = inner.objects.remove(&(collection.clone(), name.to_owned())).expect("it exists");
        object["metadata"]["resourceVersion"] = inner.version.to_string().into();
        inner.tell(&collection, "DELETED", object);
    }

    /// Deletes an object without telling any watch of it, as if the event were lost.
    pub(crate) fn lose(&self, kind: &Kind, namespace: &str, name: &str) {
        self.lock().objects.remove(&(path(kind, namespace), name.to_owned())).expect("it exists");
    }

    /// Sends all watches a bookmark.
    pub(crate) fn bookmark(&self) {
        let mut inner = self.lock();
        inner.version += 1;
        let version = inner.version.to_string();
        let bookmark =
            json!({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": version}}});
        inner.watchers.retain(|watcher| watcher.send(&bookmark));
    }

    /// Sends all watches this text.
    pub(crate) fn say(&self, text: &str) {
        let text = Bytes::copy_from_slice(text.as_bytes());
        self.lock().watchers.retain(|watcher| watcher.sender.send(Ok(text.clone())).is_ok());
    }

    /// Ends all watches as if the connection broke.
    pub(crate) fn break_watches(&self) {
        for watcher in self.lock().watchers.drain(..) {
            let _ = watcher.sender.send(Err(io::Error::other("connection reset")));
        }
    }

    /// How many watches there are.
    pub(crate) fn watches(&self) -> usize {
        let mut inner = self.lock();
        inner.watchers.retain(|watcher| !watcher.sender.is_closed());
        inner.watchers.len()
    }

    /// Forgets all versions before the present one.
    pub(crate) fn compact(&self) {
        let mut inner = self.lock();
        inner.oldest = inner.version;
    }

    /// So many of the next requests whose path and query contain `part` have this fault.
    pub(crate) fn fault(&self, part: &'static str, times: usize, fault: Fault) {
        self.lock().faults.push((part, fault, times));
    }

    /// No request has a fault.
    pub(crate) fn mend(&self) {
        self.lock().faults.clear();
    }

    /// Refuses connections, or does not. In the process only.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.lock().is_down = is_down;
        if is_down {
            self.break_watches();
        }
    }

    /// A group is not installed.
    pub(crate) fn set_absent(&self, groups: &[&'static str]) {
        self.lock().absent = groups.to_vec();
    }

    /// What it was asked so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.lock().asked.clone()
    }

    /// The tokens that requests had, at the socket.
    pub(crate) fn tokens(&self) -> Vec<String> {
        self.lock().tokens.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no test panics with it")
    }

    async fn answer(&self, uri: &str) -> Answer {
        let fault = {
            let mut inner = self.lock();
            inner.asked.push(uri.to_owned());
            let fault = inner.faults.iter_mut().find(|(part, _, times)| uri.contains(part) && *times > 0);
            fault.map(|(_, fault, times)| {
                *times -= 1;
                *fault
            })
        };
        match fault {
            None | Some(Fault::Cut(_)) => {}
            Some(Fault::Status(code, message)) => return refusal(code, message),
            Some(Fault::Silent) => return pending().await,
            Some(Fault::Hung) => return Response::new(StreamBody::new(stream::pending()).boxed_unsync()),
            Some(Fault::Text(text)) => return whole(StatusCode::OK, text.as_bytes().to_vec()),
            Some(Fault::Empty) => return whole(StatusCode::OK, Vec::new()),
        }
        let query = Query::parse(uri);
        let mut inner = self.lock();
        if inner.absent.iter().any(|group| query.collection.contains(&format!("/{group}/"))) {
            return whole(StatusCode::NOT_FOUND, b"404 page not found\n".to_vec());
        }
        if query.watches {
            return inner.watch(query);
        }
        let list = inner.list(&query);
        drop(inner);
        match fault {
            Some(Fault::Cut(bytes)) => {
                let begun: io::Result<Bytes> = Ok(Bytes::from(list.to_string()).slice(..bytes));
                let parts = [begun, Err(io::Error::other("connection reset"))];
                Response::new(
                    StreamBody::new(stream::iter(parts.map(|part| part.map(Frame::data)))).boxed_unsync(),
                )
            }
            _ => whole(StatusCode::OK, list.to_string().into_bytes()),
        }
    }
}

impl Service<Request<Body>> for Server {
    type Response = Answer;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if self.lock().is_down {
            self.lock().asked.push("refused".into());
            return Box::pin(ready(Err(io::Error::other("connection refused"))));
        }
        let server = self.clone();
        Box::pin(async move { Ok(server.answer(&request.uri().to_string()).await) })
    }
}

// === impl Inner ===

impl Inner {
    fn tell(&mut self, collection: &str, happened: &str, object: Value) {
        let event = json!({"type": happened, "object": object});
        self.history.push((self.version, collection.to_owned(), event.clone()));
        self.watchers
            .retain(|watcher| !watcher.query.wants(collection, &event["object"]) || watcher.send(&event));
    }

    fn list(&self, query: &Query) -> Value {
        let all = self.objects.iter().filter(|((collection, _), object)| query.wants(collection, object));
        let mut all = all.map(|(_, object)| object).skip(query.from);
        let items: Vec<&Value> = all.by_ref().take(query.limit).collect();
        let next =
            if all.next().is_some() { format!("from/{}", query.from + query.limit) } else { String::new() };
        json!({"kind": "List", "metadata": {"resourceVersion": self.version.to_string(), "continue": next}, "items": items})
    }

    fn watch(&mut self, query: Query) -> Answer {
        if query.version < self.oldest {
            let gone =
                json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}});
            return whole(StatusCode::OK, format!("{gone}\n").into_bytes());
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let ends = Instant::now() + Duration::from_secs(query.seconds);
        let watcher = Watcher { query, sender };
        for (version, collection, event) in &self.history {
            if *version > watcher.query.version && watcher.query.wants(collection, &event["object"]) {
                watcher.send(event);
            }
        }
        self.watchers.push(watcher);
        let events = stream::unfold(receiver, move |mut receiver| async move {
            // The server ends a watch in time.
            let event = timeout_at(ends, receiver.recv()).await.ok()??;
            Some((event.map(Frame::data), receiver))
        });
        Response::new(StreamBody::new(events).boxed_unsync())
    }
}

// === impl Watcher ===

impl Watcher {
    fn send(&self, event: &Value) -> bool {
        self.sender.send(Ok(Bytes::from(format!("{event}\n")))).is_ok()
    }
}

// === impl Query ===

impl Query {
    fn parse(uri: &str) -> Self {
        let path = uri.find("/api").map_or(uri, |at| &uri[at..]);
        let (collection, query) = path.split_once('?').unwrap_or((path, ""));
        let mut parsed = Self { collection: collection.into(), limit: usize::MAX, ..Self::default() };
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            let value =
                percent_encoding::percent_decode_str(value).decode_utf8().expect("UTF-8").into_owned();
            let number = || value.parse::<u64>().expect("a number");
            match key {
                "labelSelector" => {
                    let pairs = value.split(',').filter_map(|pair| pair.split_once('='));
                    parsed.labels = pairs.map(|(key, value)| (key.into(), value.into())).collect();
                }
                "fieldSelector" => parsed.name = value.strip_prefix("metadata.name=").map(str::to_owned),
                "watch" => parsed.watches = value == "true",
                "resourceVersion" => parsed.version = number(),
                "limit" => parsed.limit = usize::try_from(number()).expect("small"),
                "timeoutSeconds" => parsed.seconds = number(),
                "continue" => {
                    parsed.from =
                        value.strip_prefix("from/").and_then(|from| from.parse().ok()).expect("a token");
                }
                _ => {}
            }
        }
        parsed
    }

    fn wants(&self, collection: &str, object: &Value) -> bool {
        let meta = &object["metadata"];
        self.collection == collection
            && self.name.as_ref().is_none_or(|name| meta["name"] == name.as_str())
            && self.labels.iter().all(|(key, value)| meta["labels"][key] == value.as_str())
    }
}

fn path(kind: &Kind, namespace: &str) -> String {
    let Kind { group, version, resource, .. } = kind;
    let group = if group.is_empty() { "/api".to_owned() } else { format!("/apis/{group}") };
    format!("{group}/{version}/namespaces/{namespace}/{resource}")
}

fn whole(status: StatusCode, bytes: Vec<u8>) -> Answer {
    let mut answer =
        Response::new(Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = status;
    answer
}

fn refusal(code: u16, message: &str) -> Answer {
    let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": message});
    whole(StatusCode::from_u16(code).expect("a status"), status.to_string().into_bytes())
}
