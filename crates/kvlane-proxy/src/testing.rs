//! A pool of workers without engines, and answers from memory, for tests of one module.

use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http::request::Parts;
use kvlane_core::load::InFlight;
use kvlane_core::poison_prompts::PromptKey;
use kvlane_core::request::RequestKey;
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::Clock;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::settings;
use kvlane_fleet::snapshot::Served;
use kvlane_fleet::tokenize::{Tokenizers, Tokens};
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Origin, Rank, Worker, WorkerId};
use kvlane_http::connections::{Answer, Connections, ConnectionsConfig, UpstreamError};
use kvlane_http::tls::{Tls, TlsConfig};
use kvlane_http::upstream::{Upstream, UpstreamId};
use kvlane_wire::api::{Api, Repeats};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Duration, Instant};

use crate::account::Account;
use crate::auth::Auth;
use crate::auth::config::Security;
use crate::error_format::ErrorFormat;
use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::routed::Routed;
use crate::settings::Settings;

/// Tokens of the prompt of [`World::routed`].
pub(crate) const PROMPT_TOKENS: u32 = 100;

/// A proxy with one pool.
pub(crate) struct World {
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) pool: Arc<ModelPool>,
}

impl World {
    /// A pool of this many workers, with default settings.
    pub(crate) fn new(workers: u64) -> Self {
        Self::with(workers, Settings::default(), settings::Settings::default())
    }

    pub(crate) fn with(workers: u64, settings: Settings, of_fleet: settings::Settings) -> Self {
        let tokenizers = Tokenizers::start(&Tokens::default(), &Default::default()).expect("threads");
        let drained = tokio::sync::mpsc::unbounded_channel().0;
        let fleet = Fleet::new(of_fleet, Arc::default(), Clock::start(1.0), tokenizers, drained);
        let pool = Arc::new(fleet.new_pool("m"));
        for n in 1..=workers {
            let spec = WorkerSpec::new(format!("http://10.0.0.{n}:8000"));
            let worker = Arc::new(Worker::new(WorkerId(n), &spec, Origin::Config, None).expect("a worker"));
            worker.state().healthy = true;
            pool.join(&worker, Rank { number: 0, source: None }, false, None, Default::default())
                .expect("room");
        }
        let auth = Auth::read(&Security::default()).expect("no keys");
        let tls = Tls::read(&TlsConfig::default()).expect("no files");
        Self { proxy: Arc::new(Proxy::new(Arc::new(fleet), settings, auth, tls)), pool }
    }

    /// The account of a chat request.
    pub(crate) fn account(&self) -> Arc<Account> {
        Account::open(&self.proxy, Some(Api::ChatCompletions), ErrorFormat::OpenAi, &parts(&[]), true)
    }

    /// A request for a stream.
    pub(crate) fn routed(&self) -> Routed {
        let account = self.account();
        let (pool, parts) = (Arc::clone(&self.pool), parts(&[]));
        Routed {
            served: Arc::new(Served { pool, lacking: Arc::default(), adapter: None }),
            chain: Vec::new(),
            prompt_tokens: PROMPT_TOKENS,
            attributes: self.proxy.attribute_reader.load().read(&parts.headers, None, None),
            received: account.received,
            timeline: Arc::clone(&account.timeline),
            name: RequestKey(1),
            deadline: Instant::now() + Duration::from_secs(600),
            charge: None,
            prompt: PromptKey(1),
            may_split: false,
            kept: None,
            repeats: Repeats::Yes,
            alias: None,
        }
    }

    /// A request in flight.
    pub(crate) async fn lease(&self) -> Lease {
        self.proxy.place(&self.routed(), 0, &Arc::default()).await.expect("an endpoint")
    }

    /// The load of the first worker.
    pub(crate) fn load(&self) -> InFlight {
        let load = |load: Option<InFlight>| load.expect("an endpoint");
        let first = |scheduler: &kvlane_core::scheduler::Scheduler| {
            scheduler.pool().endpoints().next().map(|endpoint| endpoint.load.in_flight)
        };
        load(self.pool.router.read(first))
    }
}

/// The head of a chat request with these header fields.
pub(crate) fn parts(fields: &[(&str, &str)]) -> Parts {
    let mut request = Request::post("/v1/chat/completions");
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request").into_parts().0
}

/// The answer of an engine that sends `start` and then what the test sends, over a connection of its own.
pub(crate) async fn answer(start: &str) -> (Result<Answer, UpstreamError>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let upstream = Upstream::new(UpstreamId(1), &url, None, None).expect("an upstream");
    let connections = Connections::new(ConnectionsConfig::default(), Arc::default());
    let head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
    let (method, body) = (http::Method::POST, Bytes::new());
    let engine = async {
        let (mut engine, _) = listener.accept().await.expect("a connection");
        let mut request = vec![0; head.len()];
        engine.read_exact(&mut request).await.expect("a request");
        engine.write_all(start.as_bytes()).await.expect("it reads");
        if start.is_empty() {
            engine.shutdown().await.expect("it is open");
        }
        engine
    };
    tokio::join!(connections.send(&upstream, &method, head, &body, || ()), engine)
}
