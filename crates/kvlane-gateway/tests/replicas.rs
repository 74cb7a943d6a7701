//! Several gateways in front of the same engines: each knows what the others have in flight and have sent.

use std::net::SocketAddr;
use std::path::PathBuf;

use bytes::Bytes;
use kvlane_core::breaker::State;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::replica::ReplicaId;
use kvlane_gateway::config::{Config, LimitSpec};
use kvlane_gateway::testing::{
    FakeEngine, TestGateway, chat, chat_stream, config, eventually, next_call, soon,
};
use kvlane_wire::replica::{Hello, hello};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const CHAT: &str = "/v1/chat/completions";

/// A gateway that exchanges news, with no peers so far.
fn replica() -> Config {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("prefix_aware").expect("a policy");
    config.replicas.listen = Some("127.0.0.1:0".into());
    config
}

fn address(gateway: &TestGateway) -> SocketAddr {
    gateway.serving().exchange.as_ref().expect("it exchanges news").address.expect("it listens")
}

/// Gives a gateway these peers.
fn set_peers(gateway: &TestGateway, peers: &[SocketAddr]) {
    let mut config = Config::clone(&gateway.serving().config());
    config.replicas.peers = peers.iter().map(SocketAddr::to_string).collect();
    gateway.serving().reload(config).expect("valid");
}

fn live(gateway: &TestGateway) -> usize {
    gateway.fleet().replicas.live(gateway.fleet().clock.now()).len()
}

/// Gives all gateways the same peers, themselves among them, and waits until they hear each other.
async fn meet(gateways: &[&TestGateway]) {
    let all: Vec<SocketAddr> = gateways.iter().map(|gateway| address(gateway)).collect();
    gateways.iter().for_each(|gateway| set_peers(gateway, &all));
    let others = gateways.len() - 1;
    eventually("all hear each other", || gateways.iter().all(|gateway| live(gateway) == others)).await;
}

/// The requests that others have in flight on the only endpoint of `m`.
fn elsewhere(gateway: &TestGateway) -> u32 {
    gateway
        .pool("m")
        .router
        .read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.elsewhere.requests).sum())
}

async fn readiness(gateway: &TestGateway) -> Value {
    gateway.operate("GET", "/readiness", "").await.json()["replicas"].take()
}

/// Sends a request and lets the chosen engine answer. Returns the worker, and the reason for it.
async fn ask(gateway: &TestGateway, engines: &[&FakeEngine; 2], prompt: &str) -> (String, String) {
    let served = async {
        tokio::select! { _ = engines[0].answer("{}") => {}, _ = engines[1].answer("{}") => {} }
    };
    let (reply, ()) = tokio::join!(gateway.ask("POST", CHAT, chat("m", prompt)), served);
    assert_eq!(reply.status, 200);
    let said = |name: &str| reply.header(name).expect("told").to_owned();
    (said("x-router-backend"), said("x-router-reason"))
}

fn prompt(n: usize) -> String {
    format!("question {n} ").repeat(200)
}

/// Invariant: A request in flight at one replica is load at the others until it ends, or until three seconds after its
/// replica was last heard.
#[tokio::test]
async fn a_request_in_flight_is_load_at_the_other_replica_until_it_ends_or_its_replica_dies() {
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(), &[&engine]).await;
    let b = TestGateway::start(replica(), &[&engine]).await;
    meet(&[&a, &b]).await;
    let (client, mut call) = a.stream(&engine, "x").await;
    eventually("the other knows", || elsewhere(&b) == 1).await;
    assert_eq!(elsewhere(&a), 0, "it is its own");
    assert_eq!(readiness(&b).await["peers"][0]["requests"], 1);
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    drop(client);
    eventually("the other knows that it has ended", || elsewhere(&b) == 0).await;

    let shown = readiness(&b).await;
    assert_eq!(shown["peers"].as_array().map(Vec::len), Some(1), "{shown}");
    assert_eq!(
        (&shown["peers"][0]["counts"], &shown["problems"]),
        (&true.into(), &serde_json::json!({})),
        "{shown}"
    );
    let id = shown["peers"][0]["replica"].as_str().expect("an id").to_owned();
    let on_page = b.operate("GET", "/fleet", "").await.json()["replicas"].take();
    assert_eq!(on_page["peers"][0]["replica"], *id, "{on_page}");
    assert_eq!(readiness(&a).await["replica"], *id);
    assert_eq!(b.metric("kvlane_replicas").await, Some(1.0));
    assert!(b.metric(&format!("kvlane_replica_age_seconds{{replica=\"{id}\"}}")).await.is_some());
    for direction in ["sent", "received"] {
        let bytes = b.metric(&format!("kvlane_replica_bytes_total{{direction=\"{direction}\"}}")).await;
        assert!(bytes.is_some_and(|bytes| bytes > 0.0), "{direction}: {bytes:?}");
    }

    let (_client, call) = a.stream(&engine, "x").await;
    eventually("the other knows", || elsewhere(&b) == 1).await;
    assert_eq!(readiness(&b).await["peers"][0]["requests"], 1);
    drop(a);
    eventually("its lease has ended", || elsewhere(&b) == 0).await;
    assert_eq!(live(&b), 0);
    drop(call);
    b.end().await;
}

#[tokio::test]
async fn a_prompt_in_flight_at_one_replica_is_in_the_signals_for_autoscalers_of_the_other() {
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(), &[&engine]).await;
    let b = TestGateway::start(replica(), &[&engine]).await;
    meet(&[&a, &b]).await;
    let queue_s = async |gateway: &TestGateway| gateway.metric(r#"kvlane_queue_seconds{model="m"}"#).await;
    assert_eq!(queue_s(&b).await, Some(0.0));
    let client = a.begin(chat_stream("m", &prompt(1))).await;
    let call = engine.call().await;
    eventually("the other knows", || elsewhere(&b) == 1).await;
    assert!(queue_s(&b).await > Some(0.0));
    assert_eq!(queue_s(&b).await, queue_s(&a).await);
    drop((client, call));
    eventually("the other knows that it has ended", || elsewhere(&b) == 0).await;
    assert_eq!(queue_s(&b).await, Some(0.0));
    a.end().await;
    b.end().await;
}

/// Invariant: What a client uses of its limits at one replica, it has used at the others.
#[tokio::test]
async fn what_is_used_of_a_limit_at_one_replica_is_used_at_the_other() {
    let engine = FakeEngine::start("m").await;
    let mut config = replica();
    let spec = |limit: LimitSpec| LimitSpec { key: "*".into(), ..limit };
    config.limits = vec![
        spec(LimitSpec { requests_per_minute: 3, ..LimitSpec::default() }),
        spec(LimitSpec { model: "m".into(), concurrent_requests: 1, ..LimitSpec::default() }),
    ];
    let a = TestGateway::start(config.clone(), &[&engine]).await;
    let b = TestGateway::start(config, &[&engine]).await;
    meet(&[&a, &b]).await;
    let clients = |gateway: &TestGateway| gateway.serving().proxy.limits.figures()[0].1;
    let (client, mut call) = a.stream(&engine, "x").await;
    eventually("the other knows", || clients(&b) == 1).await;
    let refused = b.ask("POST", CHAT, chat("m", "y")).await;
    assert_eq!(refused.status, 429);
    assert!(refused.text().contains("concurrent requests"), "{}", refused.text());
    call.chunk("data: [DONE]\n\n").await;
    call.end_stream().await;
    drop(client);
    let answers = async {
        loop {
            engine.answer("{}").await;
        }
    };
    let used_up = async {
        while b.ask("POST", CHAT, chat("m", "z")).await.header("x-ratelimit-remaining-requests") != Some("0")
        {
        }
        while !a.ask("POST", CHAT, chat("m", "x")).await.text().contains("requests per minute") {}
    };
    soon("what was used at one is used up at the other", async {
        tokio::select! { () = used_up => {}, () = answers => {} }
    })
    .await;
    a.end().await;
    b.end().await;
}

#[tokio::test]
async fn a_prompt_that_one_replica_has_sent_is_placed_by_the_other_where_it_is_cached() {
    let (one, two) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&one, &two];
    let mut in_turn = replica();
    in_turn.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let a = TestGateway::start(in_turn, &engines).await;
    let b = TestGateway::start(replica(), &engines).await;
    meet(&[&a, &b]).await;
    let mut sent = Vec::new();
    for n in 0..6 {
        sent.push(ask(&a, &engines, &prompt(n)).await.0);
    }
    let marks = |gateway: &TestGateway| {
        gateway.pool("m").router.tell_marks().iter().map(|sent| sent.marks.len()).sum::<usize>()
    };
    eventually("the other knows all prompts", || marks(&b) == marks(&a)).await;
    for (n, worker) in sent.iter().enumerate() {
        assert_eq!(ask(&b, &engines, &prompt(n)).await, (worker.clone(), "prefix_hit".into()), "prompt {n}");
    }
    a.end().await;
    b.end().await;
}

/// The state of the breaker of an engine.
fn breaker(gateway: &TestGateway, engine: &FakeEngine) -> State {
    let pool = gateway.pool("m");
    pool.router.read(|scheduler| {
        let mut endpoints = scheduler.pool().endpoints();
        endpoints.find(|one| *one.name == *engine.url()).expect("an endpoint").breaker.state()
    })
}

#[tokio::test]
async fn an_engine_that_fails_at_one_replica_gets_one_request_of_the_other() {
    let (good, bad) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&good, &bad];
    let mut in_turn = replica();
    in_turn.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let a = TestGateway::start(in_turn.clone(), &engines).await;
    let b = TestGateway::start(in_turn, &engines).await;
    meet(&[&a, &b]).await;
    let served = async |gateway: &TestGateway, bad_status: u16| {
        let engines = async {
            let (mut tried, mut status) = (Vec::new(), 500);
            while status == 500 {
                let (at, call) = next_call(&engines).await;
                status = if at == 1 { bad_status } else { 200 };
                tried.push(at);
                call.answer(status, "{}").await;
            }
            tried
        };
        let (reply, tried) = tokio::join!(gateway.ask("POST", CHAT, chat("m", "x")), engines);
        assert_eq!(reply.status, 200);
        tried
    };
    while breaker(&a, &bad) == State::Closed {
        served(&a, 500).await;
    }
    eventually("the other doubts the engine", || breaker(&b, &bad) == State::HalfOpen).await;
    let mut tried = Vec::new();
    for _ in 0..4 {
        tried.extend(served(&b, 500).await);
    }
    assert_eq!(
        (breaker(&b, &bad), tried.iter().filter(|at| **at == 1).count()),
        (State::Open, 1),
        "{tried:?}"
    );
    while breaker(&a, &bad) != State::Closed {
        served(&a, 200).await;
    }
    eventually("the other tries it again", || breaker(&b, &bad) != State::Open).await;
    while breaker(&b, &bad) != State::Closed {
        served(&b, 200).await;
    }
    a.end().await;
    b.end().await;
}

#[tokio::test]
async fn a_conversation_stays_at_its_engine_whichever_replica_gets_its_next_turn() {
    let (one, two) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&one, &two];
    let mut sticky = replica();
    sticky.routing.policy = PolicyConfig::by_name("session_sticky").expect("a policy");
    let a = TestGateway::start(sticky.clone(), &engines).await;
    let b = TestGateway::start(sticky, &engines).await;
    meet(&[&a, &b]).await;
    let turn = async |gateway: &TestGateway, session: usize| {
        let fields = format!("x-session-id: {session}\r\n");
        let served = async {
            let (at, call) = next_call(&engines).await;
            call.answer(200, "{}").await;
            at
        };
        let mut client = gateway.client().await;
        client.request_with("POST", CHAT, &fields, &chat("m", &prompt(session))).await;
        let (reply, at) = tokio::join!(client.reply(), served);
        (at, reply.header("x-router-reason").expect("told").to_owned())
    };
    let mut places = Vec::new();
    for session in 0..6 {
        places.push(turn(&a, session).await.0);
    }
    // What is in flight is told after the turns before it.
    let client = a.begin(chat_stream("m", "x")).await;
    let (_, call) = next_call(&engines).await;
    eventually("the other knows all turns", || elsewhere(&b) == 1).await;
    for (session, place) in places.into_iter().enumerate() {
        assert_eq!(turn(&b, session).await, (place, "affinity".into()), "conversation {session}");
    }
    drop((client, call));
    a.end().await;
    b.end().await;
}

#[tokio::test]
async fn a_replica_that_starts_gets_what_an_older_one_knows() {
    let (one, two) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&one, &two];
    let a = TestGateway::start(replica(), &engines).await;
    let mut sent = Vec::new();
    for n in 0..4 {
        sent.push(ask(&a, &engines, &prompt(n)).await.0);
    }
    // It reaches the other before it knows its own workers.
    let mut late = replica();
    late.replicas.peers = vec![format!("localhost:{}", address(&a).port())];
    let b = TestGateway::start(late, &engines).await;
    let arrived = async {
        loop {
            let shown = readiness(&b).await;
            if shown["snapshot"]["state"] == "arrived" {
                return shown;
            }
        }
    };
    let shown = soon("the snapshot", arrived).await;
    assert_eq!(shown["snapshot"]["from"], readiness(&a).await["replica"]);
    assert!(shown["snapshot"]["marks"].as_u64().is_some_and(|marks| marks > 0), "{shown}");
    assert_eq!(readiness(&a).await["snapshot"]["state"], "none", "the older one asks none");
    for (n, worker) in sent.iter().enumerate() {
        assert_eq!(ask(&b, &engines, &prompt(n)).await, (worker.clone(), "prefix_hit".into()), "prompt {n}");
    }
    a.end().await;
    b.end().await;
}

/// An older replica that greets, and answers a request for a snapshot only when it is told to; it knows nothing.
async fn slow_elder() -> (SocketAddr, tokio::sync::oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (permit, permitted) = tokio::sync::oneshot::channel();
    let serve = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let mut connection = h2::server::handshake(stream).await.expect("HTTP/2");
        let (mut permitted, mut open) = (Some(permitted), Vec::new());
        while let Some(request) = connection.accept().await {
            let (request, mut respond) = request.expect("valid");
            let mut answer = respond.send_response(http::Response::new(()), false).expect("sent");
            let mut own = Vec::new();
            hello(&mut own, &Hello::new(ReplicaId(7), "kvlane", u64::MAX));
            answer.send_data(own.into(), false).expect("sent");
            if request.uri().path().ends_with("/snapshot") {
                let permitted = permitted.take().expect("asked once");
                tokio::spawn(async move {
                    let _ = permitted.await;
                    let _ = answer.send_data(Bytes::new(), true);
                });
            } else {
                open.push((request, answer));
            }
        }
    });
    (address, permit, serve)
}

async fn waits_for_snapshot(gateway: &TestGateway) {
    let waits = async {
        loop {
            let reply = gateway.operate("GET", "/readiness", "").await;
            let told = reply.json();
            assert_eq!(reply.status, 503, "{told}");
            let waits = told["waits_for"].as_array().expect("a list");
            if waits.len() == 1
                && waits[0]["what"] == "snapshot"
                && told["replicas"]["snapshot"]["state"] == "arriving"
            {
                return;
            }
        }
    };
    soon("it waits for the snapshot", waits).await;
}

async fn is_ready(gateway: &TestGateway) -> Value {
    let ready = async {
        loop {
            let reply = gateway.operate("GET", "/readiness", "").await;
            if reply.status == 200 {
                return reply.json();
            }
        }
    };
    soon("it is ready", ready).await
}

/// Invariant: A replica that reaches an older one is ready when that one's snapshot has arrived, or
/// `replicas.sync_timeout` has passed.
#[tokio::test]
async fn a_replica_that_starts_is_ready_when_the_snapshot_of_an_older_one_has_arrived() {
    let engine = FakeEngine::start("m").await;
    for arrives in [true, false] {
        let (elder, permit, serve) = slow_elder().await;
        let mut late = replica();
        late.replicas.peers = vec![elder.to_string()];
        late.replicas.sync_timeout = std::time::Duration::from_secs(3600);
        let gateway = TestGateway::start(late, &[&engine]).await;
        waits_for_snapshot(&gateway).await;
        if arrives {
            permit.send(()).expect("waited for");
            let told = is_ready(&gateway).await;
            assert_eq!(
                (&told["replicas"]["snapshot"]["state"], &told["given_up"]),
                (&"arrived".into(), &serde_json::json!([]))
            );
        } else {
            let mut hasty = Config::clone(&gateway.serving().config());
            hasty.replicas.sync_timeout = std::time::Duration::ZERO;
            gateway.serving().reload(hasty).expect("valid");
            is_ready(&gateway).await;
            drop(permit);
        }
        gateway.end().await;
        serve.abort();
    }
}

#[tokio::test]
async fn a_replica_that_reaches_no_older_one_does_not_wait() {
    let engine = FakeEngine::start("m").await;
    let mut alone = replica();
    alone.replicas.peers = vec!["127.0.0.1:9".into(), "replicas.invalid:9".into()];
    alone.replicas.sync_timeout = std::time::Duration::from_secs(3600);
    let gateway = TestGateway::start(alone, &[&engine]).await;
    let told = is_ready(&gateway).await;
    assert_eq!(
        (&told["replicas"]["snapshot"]["state"], &told["given_up"]),
        (&"none".into(), &serde_json::json!([]))
    );
    let unresolved = async { while readiness(&gateway).await["problems"]["replicas.invalid:9"].is_null() {} };
    soon("the name that cannot be resolved is a problem", unresolved).await;
    assert!(gateway.metric("kvlane_replica_problems").await.is_some_and(|problems| problems >= 1.0));
    set_peers(&gateway, &[]);
    eventually("problems are forgotten", || gateway.fleet().replicas.problems().is_empty()).await;
    gateway.end().await;
}

#[tokio::test]
async fn pickers_are_replicas_too() {
    let (one, two) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&one, &two];
    let (a, b) =
        (TestGateway::picker(replica(), &engines).await, TestGateway::picker(replica(), &engines).await);
    meet(&[&a, &b]).await;
    let (of_a, of_b) = (a.data_plane().await, b.data_plane().await);
    let long = "the same beginning ".repeat(40);
    let first = of_a.pick(CHAT, &[], &chat("m", &long)).await.addresses()[0].clone();
    eventually("the other knows the prompt", || !b.pool("m").router.tell_marks().is_empty()).await;
    for n in 0..5 {
        let asked = chat("m", &format!("{long} {n}"));
        assert_eq!(of_b.pick(CHAT, &[], &asked).await.addresses()[0], first, "pick {n}");
    }
    of_a.close().await;
    of_b.close().await;
    a.shut_down().await;
    b.shut_down().await;
}

/// The problem that a gateway has with the only peer that it cannot tell anything.
async fn problem(gateway: &TestGateway) -> String {
    let told = async {
        loop {
            let shown = readiness(gateway).await;
            if let Some(why) = shown["problems"].as_object().and_then(|all| all.values().next()) {
                return why.as_str().expect("text").to_owned();
            }
        }
    };
    soon("a problem", told).await
}

#[tokio::test]
async fn a_replica_of_another_cluster_is_refused_and_told_why() {
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(), &[&engine]).await;
    let mut other = replica();
    other.replicas.cluster = "staging".into();
    let b = TestGateway::start(other, &[&engine]).await;
    set_peers(&a, &[address(&b)]);
    let why = problem(&a).await;
    assert!(why.contains("replicas.cluster is 'staging' here and 'kvlane' there"), "{why}");
    assert_eq!((live(&a), live(&b)), (0, 0));
    set_peers(&a, &[]);
    soon("the problem is forgotten", async {
        while readiness(&a).await["problems"] != serde_json::json!({}) {}
    })
    .await;
    a.end().await;
    b.end().await;
}

#[tokio::test]
async fn what_is_no_replica_is_cut_off_and_changes_nothing() {
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(), &[&engine]).await;
    let garbage: [&[u8]; 3] = [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n GET / HTTP/1.1\r\n",
        &[0xff; 100],
        // A frame of 16 MB after the preface of HTTP/2.
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x04\x00\x00\x00\x00\x00",
    ];
    for bytes in garbage {
        let mut stream = TcpStream::connect(address(&a)).await.expect("it listens");
        stream.write_all(bytes).await.expect("sent");
        let mut answer = Vec::new();
        // Closed or reset.
        let _ = soon("it is cut off", stream.read_to_end(&mut answer)).await;
    }
    for body in [&b"no frame"[..], &[0, 0, 0, 0, 1, 0xff], &[0, 0xff, 0xff, 0xff, 0xff]] {
        let stream = TcpStream::connect(address(&a)).await.expect("it listens");
        let (requests, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let request = http::Request::post("http://a/kvlane.replicas/news").body(()).expect("a request");
        let (answer, mut sending) =
            requests.ready().await.expect("ready").send_request(request, false).expect("sent");
        sending.send_data(Bytes::copy_from_slice(body), true).expect("sent");
        assert_eq!(soon("an answer", answer).await.expect("an answer").status(), 400);
        drop(sending);
        connection.abort();
    }
    assert_eq!((live(&a), elsewhere(&a)), (0, 0));
    let b = TestGateway::start(replica(), &[&engine]).await;
    meet(&[&a, &b]).await;
    a.end().await;
    b.end().await;
}

#[tokio::test]
async fn a_replica_that_reads_nothing_delays_no_request_and_no_other_replica() {
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(), &[&engine]).await;
    let b = TestGateway::start(replica(), &[&engine]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let deaf = listener.local_addr().expect("an address");
    let (met, meeting) = tokio::sync::oneshot::channel();
    // It greets, and gives no room for anything that is sent to it.
    let peer = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let mut builder = h2::server::Builder::new();
        let mut connection =
            builder.initial_window_size(64).handshake::<_, Bytes>(stream).await.expect("HTTP/2");
        let (request, mut respond) = connection.accept().await.expect("a request").expect("valid");
        let mut answer = respond.send_response(http::Response::new(()), false).expect("sent");
        let mut own = Vec::new();
        hello(&mut own, &Hello::new(ReplicaId(7), "kvlane", 0));
        answer.send_data(own.into(), false).expect("sent");
        met.send(()).expect("waited for");
        while connection.accept().await.is_some() {}
        drop((request, answer));
    });
    set_peers(&a, &[deaf, address(&b)]);
    soon("the deaf one is met", meeting).await.expect("met");
    eventually("the other hears", || live(&b) == 1).await;
    for n in 0..20 {
        a.served(&engine, chat("m", &prompt(n))).await;
    }
    let (_client, call) = a.stream(&engine, "x").await;
    eventually("the other replica knows", || elsewhere(&b) == 1).await;
    drop(call);
    peer.abort();
    drop(_client);
    a.end().await;
    b.end().await;
}

#[tokio::test]
async fn a_replica_that_can_no_longer_be_reached_is_connected_to_anew() {
    let engine = FakeEngine::start("m").await;
    let a = TestGateway::start(replica(), &[&engine]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    set_peers(&a, &[listener.local_addr().expect("an address")]);
    let mut lost = Vec::new();
    for _ in 0..2 {
        let (stream, _) = soon("a connection", listener.accept()).await.expect("accepted");
        let mut connection = h2::server::handshake(stream).await.expect("HTTP/2");
        let (request, mut respond) = connection.accept().await.expect("a request").expect("valid");
        let mut answer = respond.send_response(http::Response::new(()), false).expect("sent");
        let mut own = Vec::new();
        hello(&mut own, &Hello::new(ReplicaId(7), "kvlane", 0));
        answer.send_data(own.into(), false).expect("sent");
        let mut body = request.into_body();
        let told = async {
            tokio::select! {
                _ = connection.accept() => panic!("it ended"),
                // The hello, and the first news.
                () = async { for _ in 0..2 { body.data().await.expect("more").expect("valid"); } } => {}
            }
        };
        soon("it is told", told).await;
        // The socket stays open, and nothing is read any more.
        lost.push((connection, body, respond, answer));
    }
    let why = problem(&a).await;
    assert!(why.contains("ping took longer"), "{why}");
    drop(lost);
    a.end().await;
}

/// A certificate authority and its file.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
}

impl Authority {
    fn new(directory: &std::path::Path, name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let file = directory.join(format!("{name}.pem"));
        std::fs::write(&file, params.self_signed(&key).expect("a certificate").pem()).expect("written");
        Self { issuer: Issuer::new(params, key), file }
    }

    /// Gives a replica a certificate.
    fn sign(&self, config: &mut Config, name: &str) {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("names");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        let file = |ending: &str, text: String| {
            let file = self.file.with_file_name(format!("{name}.{ending}"));
            std::fs::write(&file, text).expect("written");
            Some(file)
        };
        config.replicas.certificate = file("crt", certificate);
        config.replicas.private_key = file("key", key.serialize_pem());
        config.replicas.ca = Some(self.file.clone());
    }
}

/// Invariant: With certificates, only replicas with one of the same CA exchange news.
#[tokio::test]
async fn replicas_show_each_other_certificates_of_one_ca() {
    let directory = tempfile::tempdir().expect("a directory");
    let [ours, theirs] = ["ours", "theirs"].map(|name| Authority::new(directory.path(), name));
    let engine = FakeEngine::start("m").await;
    let start = async |authority: Option<&Authority>, name: &str| {
        let mut config = replica();
        if let Some(authority) = authority {
            authority.sign(&mut config, name);
        }
        TestGateway::start(config, &[&engine]).await
    };
    let (a, b) = (start(Some(&ours), "a").await, start(Some(&ours), "b").await);
    let (stranger, plain) = (start(Some(&theirs), "stranger").await, start(None, "plain").await);
    // It trusts our certificates, and has none of our CA.
    let mut config = replica();
    theirs.sign(&mut config, "impostor");
    config.replicas.ca = Some(ours.file.clone());
    let impostor = TestGateway::start(config, &[&engine]).await;
    meet(&[&a, &b]).await;
    for other in [&stranger, &plain, &impostor] {
        set_peers(other, &[address(&a)]);
        problem(other).await;
        set_peers(&b, &[address(&a), address(other)]);
        problem(&b).await;
        assert_eq!((live(&a), live(other)), (1, 0));
    }
    for gateway in [a, b, stranger, plain, impostor] {
        gateway.end().await;
    }
}
