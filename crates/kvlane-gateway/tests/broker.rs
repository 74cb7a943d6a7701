//! Gateways that exchange news through a broker: here one with as much of NATS as they need. `e2e/replicas/test_broker.py` has a
//! real one.

#![cfg(feature = "nats")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use kvlane_core::policy::PolicyConfig;
use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, config, eventually};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::{AbortHandle, JoinSet};

const CHAT: &str = "/v1/chat/completions";
/// So small that news of a few endpoints are several messages.
const MAX_PAYLOAD: usize = 400;

/// A subscription of one connection.
struct Subscription {
    connection: usize,
    sid: String,
    subject: String,
    out: UnboundedSender<Vec<u8>>,
}

#[derive(Default)]
struct State {
    subscriptions: Vec<Subscription>,
    /// Subjects that were published on.
    published: Vec<String>,
    largest: usize,
}

/// A broker; it ends when it is dropped, with its connections.
struct Broker {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    work: AbortHandle,
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.work.abort();
    }
}

impl Broker {
    async fn start(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect("a port");
        let (address, state) = (listener.local_addr().expect("bound"), Arc::new(Mutex::default()));
        let shared = Arc::clone(&state);
        let work = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            for connection in 0.. {
                let (socket, _) = listener.accept().await.expect("a connection");
                connections.spawn(serve(Arc::clone(&shared), connection, socket));
            }
        });
        Self { address, state, work: work.abort_handle() }
    }

    fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.state.lock().expect("no panic"))
    }

    /// Publishes as a client of its own.
    fn publish(&self, subject: &str, payload: &[u8]) {
        publish(&self.state, usize::MAX, subject, None, payload);
    }
}

async fn serve(state: Arc<Mutex<State>>, connection: usize, socket: TcpStream) {
    let (read, mut write) = socket.into_split();
    let (out, mut outgoing) = unbounded_channel::<Vec<u8>>();
    let info = format!(
        "INFO {{\"server_id\":\"s\",\"version\":\"2.9.10\",\"headers\":true,\"max_payload\":{MAX_PAYLOAD}}}\r\n"
    );
    let _ = out.send(info.into_bytes());
    let writing = async {
        while let Some(bytes) = outgoing.recv().await {
            if write.write_all(&bytes).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = writing => {}
        _ = take(&state, connection, BufReader::new(read), &out) => {}
    }
    state.lock().expect("no panic").subscriptions.retain(|other| other.connection != connection);
}

/// Takes what a client sends, until it is gone.
async fn take(
    state: &Mutex<State>,
    connection: usize,
    mut read: BufReader<OwnedReadHalf>,
    out: &UnboundedSender<Vec<u8>>,
) -> Option<()> {
    loop {
        let mut line = String::new();
        read.read_line(&mut line).await.ok().filter(|length| *length > 0)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["PING"] => out.send(b"PONG\r\n".to_vec()).ok()?,
            ["SUB", subject, sid] => state.lock().expect("no panic").subscriptions.push(Subscription {
                connection,
                sid: sid.into(),
                subject: subject.into(),
                out: out.clone(),
            }),
            ["UNSUB", sid, ..] => {
                let is_it = |other: &Subscription| other.connection == connection && other.sid == sid;
                state.lock().expect("no panic").subscriptions.retain(|other| !is_it(other));
            }
            ["PUB", subject, ref rest @ ..] => {
                let length = rest.last()?.parse::<usize>().ok()?;
                let mut payload = vec![0; length + 2];
                read.read_exact(&mut payload).await.ok()?;
                let reply = (rest.len() == 2).then(|| rest[0]);
                publish(state, connection, subject, reply, &payload[..length]);
            }
            _ => {}
        }
    }
}

/// Delivers a message; if nobody listens, the sender hears so at `reply`.
fn publish(state: &Mutex<State>, connection: usize, subject: &str, reply: Option<&str>, payload: &[u8]) {
    let mut state = state.lock().expect("no panic");
    state.published.push(subject.into());
    state.largest = state.largest.max(payload.len());
    let fits = |pattern: &str| {
        let (pattern, subject): (Vec<_>, Vec<_>) =
            (pattern.split('.').collect(), subject.split('.').collect());
        let same = |(one, other): (&&str, &&str)| *one == "*" || one == other;
        pattern.len() == subject.len() && pattern.iter().zip(&subject).all(same)
    };
    let mut is_heard = false;
    for other in state.subscriptions.iter().filter(|other| other.connection != connection) {
        if fits(&other.subject) {
            is_heard = true;
            let reply = reply.map(|reply| format!("{reply} ")).unwrap_or_default();
            let head = format!("MSG {subject} {} {reply}{}\r\n", other.sid, payload.len());
            let _ = other.out.send([head.as_bytes(), payload, b"\r\n"].concat());
        }
    }
    let own = |other: &&Subscription| other.connection == connection && Some(&*other.subject) == reply;
    if let Some(own) = state.subscriptions.iter().find(own).filter(|_| !is_heard) {
        let answer = format!("HMSG {} {} 16 16\r\nNATS/1.0 503\r\n\r\n\r\n", own.subject, own.sid);
        let _ = own.out.send(answer.into_bytes());
    }
}

fn replica(url: &str) -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("prefix_aware").expect("a policy");
    config.replicas.broker = Some(url.into());
    config
}

fn live(gateway: &TestGateway) -> usize {
    gateway.fleet().replicas.live(gateway.fleet().clock.now()).len()
}

fn marks(gateway: &TestGateway) -> usize {
    gateway.pool("m").router.tell_marks().iter().map(|sent| sent.marks.len()).sum()
}

/// The requests that others have in flight.
fn elsewhere(gateway: &TestGateway) -> u32 {
    gateway
        .pool("m")
        .router
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.elsewhere.requests).sum())
}

async fn ask(gateway: &TestGateway, engine: &FakeEngine, n: usize) {
    let prompt = format!("question {n} ").repeat(400);
    let (reply, _) = tokio::join!(gateway.ask("POST", CHAT, chat("m", &prompt)), engine.answer("{}"));
    assert_eq!(reply.status, 200);
}

/// Invariant: Replicas at one broker exchange what connected ones do, and a later one gets a snapshot.
#[tokio::test]
async fn replicas_at_one_broker_know_of_each_other_and_a_later_one_gets_a_snapshot() {
    let broker = Broker::start("127.0.0.1:0").await;
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(&broker.url()), &[&engine]).await;
    let b = TestGateway::start(replica(&broker.url()), &[&engine]).await;
    eventually("both hear each other", || live(&a) == 1 && live(&b) == 1).await;
    let (client, mut call) = a.stream(&engine, "x").await;
    eventually("the other knows of the request", || elsewhere(&b) == 1).await;
    assert_eq!(elsewhere(&a), 0, "it is its own");
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    drop(client);
    eventually("and that it has ended", || elsewhere(&b) == 0).await;
    for n in 0..4 {
        ask(&a, &engine, n).await;
    }
    eventually("the other knows all prompts", || marks(&a) > 0 && marks(&b) == marks(&a)).await;

    let c = TestGateway::start(replica(&broker.url()), &[&engine]).await;
    eventually("a later one has them, too", || marks(&c) == marks(&a)).await;
    let shown = c.operate("GET", "/readiness", "").await.json()["replicas"].take();
    assert_eq!(
        (&shown["snapshot"]["state"], &shown["problems"]),
        (&"arrived".into(), &serde_json::json!({}))
    );
    assert!(shown["peers"][0]["address"].is_null(), "{shown}");
    assert!(broker.read(|state| state.largest) <= MAX_PAYLOAD);
    for gateway in [a, b, c] {
        gateway.end().await;
    }
}

#[tokio::test]
async fn another_cluster_and_garbage_at_the_broker_are_ignored() {
    let broker = Broker::start("127.0.0.1:0").await;
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(&broker.url()), &[&engine]).await;
    let mut other = replica(&broker.url());
    other.replicas.cluster = "kvlane.news.*".into();
    let stranger = TestGateway::start(other, &[&engine]).await;
    let told = |prefix: &'static str| {
        move |state: &State| state.published.iter().any(|subject| subject.starts_with(prefix))
    };
    eventually("both publish", || {
        broker.read(told("kvlane.kvlane.news.")) && broker.read(told("kvlane.kvlane%2Enews%2E%2A.news."))
    })
    .await;
    let own: Vec<String> =
        broker.read(|state| state.subscriptions.iter().map(|one| one.subject.replace('*', "x")).collect());
    for subject in &own {
        for garbage in [&b""[..], b"{}", &[0; 5], &[0xff; 300]] {
            broker.publish(subject, garbage);
        }
    }
    let b = TestGateway::start(replica(&broker.url()), &[&engine]).await;
    eventually("those of a cluster hear each other", || live(&a) == 1 && live(&b) == 1).await;
    assert_eq!(live(&stranger), 0);
    for gateway in [a, b, stranger] {
        gateway.end().await;
    }
}

#[tokio::test]
async fn without_its_broker_a_gateway_serves_and_says_so_until_it_is_back() {
    let broker = Broker::start("127.0.0.1:0").await;
    let (engine, url) = (FakeEngine::start("m").await, broker.url());
    let address = broker.address.to_string();
    drop(broker);
    let a = TestGateway::start(replica(&url), &[&engine]).await;
    let b = TestGateway::start(replica(&url), &[&engine]).await;
    let problems = || a.fleet().replicas.problems();
    eventually("it says so", || problems().contains_key(&url)).await;
    assert_eq!(a.metric("kvlane_replica_problems").await, Some(1.0));
    ask(&a, &engine, 0).await;
    let broker = Broker::start(&address).await;
    eventually("they hear each other", || live(&a) == 1 && live(&b) == 1).await;
    assert!(problems().is_empty(), "{:?}", problems());
    drop(broker);
    eventually("its end is a problem", || !problems().is_empty()).await;
    ask(&a, &engine, 1).await;
    a.end().await;
    b.end().await;
}
