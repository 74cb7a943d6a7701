//! How replicas start, refuse each other, and lose each other.

use super::*;

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
