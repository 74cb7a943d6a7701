//! TLS: certificates of the gateway, of its clients, and of its workers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::testing::{Client, FakeEngine, TestGateway, chat, config, eventually, soon};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its private key, in PEM.
#[derive(Clone)]
struct Own {
    certificate: String,
    key: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn sign(&self, names: &[&str], common: &str) -> Own {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, common);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        Own { certificate, key: key.serialize_pem() }
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.pem.as_bytes()).expect("PEM")).expect("a root");
        roots
    }
}

impl Own {
    fn parts(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes()).expect("PEM");
        (vec![certificate], PrivateKeyDer::from_pem_slice(self.key.as_bytes()).expect("PEM"))
    }
}

/// PEM files.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).expect("written");
        path
    }

    /// Sets this certificate as the gateway's.
    fn show(&self, config: &mut Config, own: &Own) {
        config.tls.certificate = Some(self.write("gateway.pem", &own.certificate));
        config.tls.private_key = Some(self.write("gateway.key", &own.key));
    }
}

/// A client that trusts one authority, offers `alpn`, and may have a certificate.
fn speaker(authority: &Authority, alpn: &[&str], own: Option<&Own>) -> TlsConnector {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.expect("versions").with_root_certificates(authority.roots());
    let mut config = match own.map(Own::parts) {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).expect("a certificate"),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

async fn connect(speaker: &TlsConnector, at: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(at).await.expect("it listens");
    let name = ServerName::try_from("localhost").expect("a name");
    soon("a handshake", speaker.connect(name, stream)).await
}

/// Sends one request and reads the whole response: its first line, or why there is none.
async fn get(speaker: &TlsConnector, at: SocketAddr, path: &str) -> Result<String, std::io::Error> {
    let mut stream = connect(speaker, at).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    match soon("an answer", stream.read_to_string(&mut answer)).await {
        Err(error) if answer.is_empty() => Err(error),
        _ => Ok(answer.lines().next().unwrap_or_default().to_owned()),
    }
}

const OK: &str = "HTTP/1.1 200 OK";

#[tokio::test]
async fn both_ports_serve_tls_with_the_clients_alpn() {
    let (authority, files, engine) = (Authority::new("ca"), Files::new(), FakeEngine::start("m").await);
    let mut config = config();
    files.show(&mut config, &authority.sign(&["localhost"], "gateway"));
    let gateway = TestGateway::start(config.clone(), &[&engine]).await;
    for at in [gateway.address(), gateway.metrics_address()] {
        for (alpn, spoken) in
            [(&[][..], None), (&["http/1.1"], Some("http/1.1")), (&["h2", "http/1.1"], Some("h2"))]
        {
            let stream = connect(&speaker(&authority, alpn, None), at).await.expect("trusted");
            assert_eq!(stream.get_ref().1.alpn_protocol(), spoken.map(str::as_bytes), "{alpn:?}");
        }
        assert_eq!(get(&speaker(&authority, &[], None), at, "/health").await.expect("an answer"), OK);
        assert!(connect(&speaker(&Authority::new("other"), &[], None), at).await.is_err(), "not trusted");
        let mut plain = Client::connect(at).await;
        plain.request("GET", "/health", "").await;
        let seen = plain.closed().await;
        assert!(!seen.starts_with(b"HTTP/"), "nothing is sent without TLS: {seen:?}");
    }
    let stream = connect(&speaker(&authority, &["h2"], None), gateway.address()).await.expect("trusted");
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(hyper_util::rt::TokioExecutor::new(), io).await.expect("h2");
    tokio::spawn(connection);
    let request = http::Request::post("https://localhost/v1/chat/completions");
    let request =
        request.body(http_body_util::Full::new(bytes::Bytes::from(chat("m", "hello")))).expect("a request");
    let (reply, _) = tokio::join!(client.send_request(request), engine.answer(r#"{"id":"over h2"}"#));
    assert_eq!(reply.expect("an answer").status(), 200);
    drop(client);
    gateway.shut_down().await;
}

#[tokio::test]
async fn the_metrics_port_may_stay_without_tls() {
    let (authority, files) = (Authority::new("ca"), Files::new());
    let mut config = config();
    files.show(&mut config, &authority.sign(&["localhost"], "gateway"));
    config.tls.metrics = false;
    let gateway = TestGateway::start(config, &[]).await;
    assert_eq!(gateway.operate("GET", "/liveness", "").await.status, 200);
    assert!(get(&speaker(&authority, &[], None), gateway.address(), "/health").await.is_ok());
    gateway.end().await;
}

/// Invariant: Certificates and keys are replaced all at once or not at all.
///
/// Also held by `a_reload_adds_and_removes_keys`.
#[tokio::test]
async fn a_reload_replaces_the_certificate_and_a_bad_one_changes_nothing() {
    let (authority, files) = (Authority::new("ca"), Files::new());
    let mut config = config();
    let (first, second) = (authority.sign(&["localhost"], "first"), authority.sign(&["localhost"], "second"));
    files.show(&mut config, &first);
    let gateway = TestGateway::start(config.clone(), &[]).await;
    let speaker = speaker(&authority, &[], None);
    let shown = async || {
        let stream = connect(&speaker, gateway.address()).await.expect("trusted");
        stream.get_ref().1.peer_certificates().expect("a certificate")[0].clone().into_owned()
    };
    assert_eq!(vec![shown().await], first.parts().0);
    let mut stands = connect(&speaker, gateway.address()).await.expect("trusted");
    let (certificate, key) =
        (config.tls.certificate.clone().expect("a file"), config.tls.private_key.clone().expect("a file"));
    for (text, name) in
        [("nonsense", "gateway.pem"), (&second.certificate, "gateway.pem"), ("", "gateway.key")]
    {
        files.write(name, text);
        let why = gateway.serving().reload(config.clone()).expect_err("it does not fit");
        assert!(why.contains("tls."), "{why}");
        assert!(!why.contains("BEGIN"), "the key is not in the error: {why}");
        assert_eq!(vec![shown().await], first.parts().0, "as before");
    }
    assert!(
        config.files().contains(&certificate) && config.files().contains(&key),
        "the changed files are watched"
    );
    files.show(&mut config, &second);
    gateway.serving().reload(config).expect("right");
    assert_eq!(vec![shown().await], second.parts().0);
    stands
        .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .expect("written");
    let mut answer = String::new();
    soon("an answer", stands.read_to_string(&mut answer)).await.expect("it goes on");
    assert!(answer.starts_with(OK), "{answer}");
    gateway.end().await;
}

#[tokio::test]
async fn with_mutual_tls_a_client_needs_a_valid_certificate() {
    let (authority, of_clients, other) =
        (Authority::new("ca"), Authority::new("clients"), Authority::new("other"));
    let files = Files::new();
    let mut config = config();
    files.show(&mut config, &authority.sign(&["localhost"], "gateway"));
    config.tls.client_ca = Some(files.write("clients.pem", &of_clients.pem));
    config.tls.metrics_client_ca = config.tls.client_ca.clone();
    let gateway = TestGateway::start(config, &[]).await;
    let (good, bad) = (of_clients.sign(&[], "ann"), other.sign(&[], "eve"));
    for at in [gateway.address(), gateway.metrics_address()] {
        assert_eq!(get(&speaker(&authority, &[], Some(&good)), at, "/health").await.expect("an answer"), OK);
        assert!(get(&speaker(&authority, &[], None), at, "/health").await.is_err(), "none");
        assert!(
            get(&speaker(&authority, &[], Some(&bad)), at, "/health").await.is_err(),
            "a certificate of another authority"
        );
    }
    gateway.end().await;
}

/// Puts a TLS proxy before an engine; returns its URL.
async fn before(engine: &FakeEngine, own: &Own, wants: Option<&Authority>) -> String {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.expect("versions");
    let builder = match wants {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authority.roots()), provider);
            builder.with_client_cert_verifier(verifier.build().expect("a verifier"))
        }
    };
    let (chain, key) = own.parts();
    let acceptor = TlsAcceptor::from(Arc::new(builder.with_single_cert(chain, key).expect("a certificate")));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let behind = engine.authority().to_owned();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, behind) = (acceptor.clone(), behind.clone());
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut engine = TcpStream::connect(behind).await.expect("the engine");
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut engine).await;
            });
        }
    });
    format!("https://localhost:{port}")
}

#[tokio::test]
async fn workers_with_tls_are_served_like_others() {
    let (authority, files, engine) = (Authority::new("ca"), Files::new(), FakeEngine::start("m").await);
    let url = before(&engine, &authority.sign(&["localhost"], "engine"), None).await;
    let mut config = config();
    config.server.relay_threads = 1;
    config.tls.upstream_ca = Some(files.write("ca.pem", &authority.pem));
    config.workers = vec![WorkerSpec::new(&url)];
    let gateway = TestGateway::start(config, &[]).await;
    let before = engine.connections();
    let mut client = gateway.client().await;
    for n in 0..3 {
        client.request("POST", "/v1/chat/completions", &chat("m", &format!("hello {n}"))).await;
        let (reply, _) = tokio::join!(client.reply(), engine.answer("{}"));
        assert_eq!((reply.status, reply.header("x-router-backend")), (200, Some(&url[..])));
    }
    assert_eq!(engine.connections(), before + 1, "its connection is reused");
    client.request("POST", "/v1/chat/completions", &chat("m", &"long ".repeat(400_000))).await;
    let mut call = engine.call().await;
    assert!(call.body.len() > 2_000_000);
    call.begin_stream().await;
    for n in 0..50 {
        call.chunk(&format!("data: {n}\n\n")).await;
        if n == 0 {
            client.head().await;
        }
        client.see(&format!("data: {n}\n\n")).await;
    }
    call.end_stream().await;
    assert!(client.rest().await.1, "it ends properly");
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_with_an_untrusted_certificate_gets_no_request() {
    let (authority, other, files) = (Authority::new("ca"), Authority::new("other"), Files::new());
    let mut config = config();
    config.tls.upstream_ca = Some(files.write("ca.pem", &authority.pem));
    let engines = [FakeEngine::start("m").await, FakeEngine::start("n").await];
    let strange = before(&engines[0], &other.sign(&["localhost"], "engine"), None).await;
    let misnamed = before(&engines[1], &authority.sign(&["elsewhere"], "engine"), None).await;
    config.workers = vec![
        WorkerSpec { model: Some("m".into()), ..WorkerSpec::new(&strange) },
        WorkerSpec { model: Some("n".into()), ..WorkerSpec::new(&misnamed) },
    ];
    let serving = kvlane_gateway::serve::Serving::start(config).expect("it starts");
    let problem = |url: &str| serving.controller.find(url).and_then(|worker| worker.state().problem.clone());
    for url in [&strange, &misnamed] {
        eventually("its certificate is seen", || problem(url).is_some()).await;
        let problem = problem(url).expect("a problem");
        assert!(problem.contains("certificate"), "{problem}");
    }
    assert_eq!(engines.iter().map(FakeEngine::connections).sum::<usize>(), 0);
    serving.shut_down().await;
}

/// As the workers that DNS names: their URLs have addresses, and their certificate the name that was resolved.
#[tokio::test]
async fn a_certificate_is_checked_against_the_name_that_a_worker_is_said_to_have() {
    let (authority, files) = (Authority::new("ca"), Files::new());
    let engines = [FakeEngine::start("m").await, FakeEngine::start("n").await];
    let own = authority.sign(&["engines.test"], "engine");
    let mut config = config();
    config.tls.upstream_ca = Some(files.write("ca.pem", &authority.pem));
    let mut by_address = Vec::new();
    for engine in &engines {
        by_address.push(before(engine, &own, None).await.replace("localhost", "127.0.0.1"));
    }
    let called = |url: &str, model: &str, name: Option<&str>| WorkerSpec {
        model: Some(model.into()),
        tls_server_name: name.map(str::to_owned),
        ..WorkerSpec::new(url)
    };
    config.workers =
        vec![called(&by_address[0], "m", Some("engines.test")), called(&by_address[1], "n", None)];
    let gateway = TestGateway::of(kvlane_gateway::serve::Serving::start(config).expect("it starts"));
    let worker = |url: &str| gateway.serving().controller.find(url).expect("a worker");
    eventually("it is healthy", || worker(&by_address[0]).state().healthy).await;
    gateway.served(&engines[0], chat("m", "hello")).await;
    eventually("its certificate is seen", || worker(&by_address[1]).state().problem.is_some()).await;
    let problem = worker(&by_address[1]).state().problem.clone().expect("a problem");
    assert!(problem.contains("certificate"), "{problem}");
    gateway.end().await;

    let nameless =
        WorkerSpec { tls_server_name: Some("not a name".into()), ..WorkerSpec::new("https://10.0.0.1") };
    let config = Config { workers: vec![nameless], ..kvlane_gateway::testing::config() };
    let Err(why) = kvlane_gateway::serve::Serving::start(config) else { panic!("it has no such name") };
    assert!(why.to_string().contains("tls_server_name: 'not a name'"), "{why}");
}

#[tokio::test]
async fn workers_that_require_a_certificate_get_the_gateways() {
    let (authority, of_clients, files) = (Authority::new("ca"), Authority::new("clients"), Files::new());
    let engine = FakeEngine::start("m").await;
    let url = before(&engine, &authority.sign(&["localhost"], "engine"), Some(&of_clients)).await;
    let own = of_clients.sign(&[], "gateway");
    let mut config = config();
    config.workers = vec![WorkerSpec::new(&url)];
    config.tls.upstream_ca = Some(files.write("ca.pem", &authority.pem));
    config.tls.upstream_certificate = Some(files.write("own.pem", &own.certificate));
    config.tls.upstream_private_key = Some(files.write("own.key", &own.key));
    let gateway = TestGateway::start(config, &[]).await;
    gateway.served(&engine, chat("m", "hello")).await;
    gateway.end().await;
}

#[test]
fn a_missing_or_invalid_file_is_named_in_the_error() {
    let (authority, files) = (Authority::new("ca"), Files::new());
    let (one, other) = (authority.sign(&["localhost"], "one"), authority.sign(&["localhost"], "other"));
    let (pem, key) = (files.write("one.pem", &one.certificate), files.write("other.key", &other.key));
    let check = |change: &dyn Fn(&mut kvlane_http::tls::TlsConfig), words: &[&str]| {
        let mut config = Config::default();
        change(&mut config.tls);
        let problem = config.validate().expect_err("wrong").to_string();
        for word in words {
            assert!(problem.contains(word), "'{word}' is not in: {problem}");
        }
    };
    check(&|tls| tls.certificate = Some(pem.clone()), &["tls.private_key"]);
    check(&|tls| tls.private_key = Some(key.clone()), &["tls.certificate"]);
    check(&|tls| tls.client_ca = Some(pem.clone()), &["tls.client_ca", "tls.certificate"]);
    check(&|tls| tls.upstream_certificate = Some(pem.clone()), &["tls.upstream_certificate", "or neither"]);
    check(&|tls| tls.upstream_ca = Some("/nowhere/ca.pem".into()), &["tls.upstream_ca", "/nowhere/ca.pem"]);
    check(&|tls| tls.upstream_ca = Some(key.clone()), &["tls.upstream_ca", "no certificate"]);
    check(
        &|tls| (tls.certificate, tls.private_key) = (Some(pem.clone()), Some(key.clone())),
        &["tls.certificate"],
    );
}
