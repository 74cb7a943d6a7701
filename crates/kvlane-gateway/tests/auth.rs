//! Authentication, forwarded credentials, and allowed addresses of workers.

use std::net::SocketAddr;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use kvlane_gateway::config::{Config, ExtraPath, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_gateway::testing::{Client, FakeEngine, Reply, TestGateway, chat, config, eventually, key, soon};
use kvlane_http::secret::{KeyHash, Secret};
use kvlane_proxy::auth::Role;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::json;

fn three_keys() -> Config {
    let mut config = config();
    config.auth.keys = vec![key("ann", Role::User), key("watch", Role::Viewer), key("boss", Role::Admin)];
    config
}

async fn ask(at: SocketAddr, method: &str, path: &str, fields: &str, body: &str) -> Reply {
    let mut client = Client::connect(at).await;
    client.request_with(method, path, fields, body).await;
    client.reply().await
}

fn bearer(name: &str) -> String {
    format!("authorization: Bearer k-{name}\r\n")
}

/// Invariant: No request without a valid key reaches an engine; a client's key is not forwarded; secrets are never
/// printed.
///
/// Also held by `engines_get_the_workers_own_key_and_never_the_clients`,
/// `keys_are_kept_through_flags_and_never_printed`.
#[tokio::test]
async fn a_client_without_a_valid_key_reaches_no_engine() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(three_keys(), &[&engine]).await;
    let chat = chat("m", "hello");
    for path in ["/v1/chat/completions", "/v1/messages", "/v1/unheard-of"] {
        for (fields, code) in [
            (String::new(), "missing_api_key"),
            ("authorization: Bearer k-unknown\r\n".into(), "invalid_api_key"),
            ("x-api-key: k-unknown\r\n".into(), "invalid_api_key"),
        ] {
            let reply = ask(gateway.address(), "POST", path, &fields, &chat).await;
            assert_eq!(
                (reply.status, reply.header("www-authenticate")),
                (401, Some("Bearer")),
                "{path} {fields}"
            );
            assert!(reply.text().contains(code) && !reply.text().contains("k-unknown"), "{}", reply.text());
        }
        let reply = ask(gateway.address(), "POST", path, &bearer("watch"), &chat).await;
        assert_eq!(reply.status, 403, "a viewer may not use models: {path}");
    }
    assert_eq!(ask(gateway.address(), "GET", "/v1/models", "", "").await.status, 401);
    assert_eq!(ask(gateway.address(), "GET", "/v1/models", &bearer("ann"), "").await.status, 200);
    for path in ["/health", "/liveness", "/readiness"] {
        assert_eq!(ask(gateway.address(), "GET", path, "", "").await.status, 200, "{path}");
    }
    let counted = gateway.metric(r#"kvlane_auth_requests_total{outcome="invalid",name=""}"#).await;
    assert_eq!(counted, None, "the metrics need a key");
    let at = gateway.metrics_address();
    let page = ask(at, "GET", "/metrics", &bearer("watch"), "").await.text();
    for row in [
        r#"kvlane_auth_requests_total{outcome="invalid",name=""} 6"#,
        r#"kvlane_auth_requests_total{outcome="missing",name=""} 5"#,
        r#"kvlane_auth_requests_total{outcome="forbidden",name="watch"} 3"#,
        r#"kvlane_auth_requests_total{outcome="accepted",name="ann"} 1"#,
    ] {
        assert!(page.contains(row), "{row} is not in {page}");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn an_extra_path_is_relayed_for_its_role_only() {
    let engine = FakeEngine::start("m").await;
    let mut config = three_keys();
    let extra = |path: &str, role| ExtraPath { path: path.into(), role };
    config.server.extra_paths = vec![
        extra("/v1/load_lora_adapter", Role::Admin),
        extra("/v1/stats/{}", Role::Viewer),
        extra("/v1/render", Role::User),
    ];
    let gateway = TestGateway::start(config, &[&engine]).await;
    for (method, path, allowed) in [
        ("POST", "/v1/load_lora_adapter", &["boss"][..]),
        ("GET", "/v1/stats/x", &["watch", "boss"]),
        ("POST", "/v1/render", &["ann", "boss"]),
    ] {
        for who in ["ann", "watch", "boss"] {
            let at = gateway.address();
            let fields = bearer(who);
            if allowed.contains(&who) {
                let (reply, _) = tokio::join!(ask(at, method, path, &fields, "{}"), engine.answer("{}"));
                assert_eq!(reply.status, 200, "{who} {path}");
            } else {
                assert_eq!(ask(at, method, path, &fields, "{}").await.status, 403, "{who} {path}");
            }
        }
        assert_eq!(ask(gateway.address(), method, path, "", "{}").await.status, 401, "{path}");
    }
    gateway.end_quiet(&[&engine]).await;
}

#[test]
fn a_known_or_ambiguous_path_cannot_be_an_extra_path() {
    for (path, why) in [
        ("/v1/chat/completions", "relayed by default"),
        ("/v1/files/{}", "relayed by default"),
        ("/workers", "served by the gateway itself"),
        ("/workers/{}", "served by the gateway itself"),
        ("/v1/models", "served by the gateway itself"),
        ("/v1/%63", "is not a valid path"),
        ("v1/x", "is not a valid path"),
        ("/v1/../x", "is not a valid path"),
    ] {
        let mut config = config();
        config.server.extra_paths = vec![ExtraPath { path: path.into(), role: Role::Admin }];
        let error = config.validate().expect_err(path).to_string();
        assert!(error.contains("server.extra_paths") && error.contains(why), "{error}");
    }
}

#[tokio::test]
async fn engines_get_the_workers_own_key_and_never_the_clients() {
    let (plain, keyed) = (FakeEngine::start("plain").await, FakeEngine::start("keyed").await);
    let mut config = three_keys();
    config.workers =
        vec![WorkerSpec { api_key: Some(Secret::new("sk-engine")), ..WorkerSpec::new(keyed.url()) }];
    let gateway = TestGateway::start(config, &[&plain]).await;
    for (engine, model, shown) in [(&plain, "plain", None), (&keyed, "keyed", Some("Bearer sk-engine"))] {
        let fields = bearer("ann") + "x-api-key: k-ann\r\nx-other: stays\r\n";
        let chat = chat(model, "hello");
        let answered = async {
            let call = engine.call().await;
            assert_eq!(call.header("authorization"), shown, "{model}");
            assert_eq!((call.header("x-api-key"), call.header("x-other")), (None, Some("stays")), "{model}");
            assert!(!call.head.contains("k-ann"), "{}", call.head);
            call.answer(200, "{}").await;
        };
        let (reply, ()) =
            tokio::join!(ask(gateway.address(), "POST", "/v1/chat/completions", &fields, &chat), answered);
        assert_eq!(reply.status, 200);
    }
    gateway.end().await;
}

#[tokio::test]
async fn without_keys_a_clients_credentials_are_forwarded_unless_the_worker_has_a_key() {
    let (plain, keyed) = (FakeEngine::start("plain").await, FakeEngine::start("keyed").await);
    let mut config = config();
    config.workers =
        vec![WorkerSpec { api_key: Some(Secret::new("sk-engine")), ..WorkerSpec::new(keyed.url()) }];
    let gateway = TestGateway::start(config, &[&plain]).await;
    for (engine, model, shown) in [(&plain, "plain", "Bearer k-ann"), (&keyed, "keyed", "Bearer sk-engine")] {
        let (chat, fields) = (chat(model, "hello"), bearer("ann"));
        let answered = async {
            let call = engine.call().await;
            assert_eq!(call.header("authorization"), Some(shown), "{model}");
            call.answer(200, "{}").await;
        };
        tokio::join!(ask(gateway.address(), "POST", "/v1/chat/completions", &fields, &chat), answered);
    }
    gateway.end().await;
}

#[tokio::test]
async fn a_viewer_key_reads_and_an_admin_key_changes() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(three_keys(), &[&engine]).await;
    let worker = format!("/workers/{}", gateway.serving().controller.workers()[0].id.0);
    let drain = r#"{"draining": true}"#;
    for at in [gateway.metrics_address(), gateway.address()] {
        let status = async |method: &str, path: &str, fields: &str, body: &str| {
            ask(at, method, path, fields, body).await.status
        };
        for path in ["/workers", &worker, "/decisions", "/list_workers"] {
            assert_eq!(status("GET", path, "", "").await, 401, "{path}");
            assert_eq!(status("GET", path, &bearer("ann"), "").await, 403, "{path}");
            assert_eq!(status("GET", path, &bearer("watch"), "").await, 200, "{path}");
            assert_eq!(status("GET", path, &bearer("boss"), "").await, 200, "{path}");
        }
        for (method, path, body) in [
            ("PUT", &worker[..], drain),
            ("DELETE", &worker, ""),
            ("POST", "/workers", r#"{"url":"http://127.0.0.1:1"}"#),
            ("POST", "/add_worker?url=http://127.0.0.1:1", ""),
            ("POST", "/remove_worker?url=x", ""),
        ] {
            assert_eq!(status(method, path, "", body).await, 401, "{method} {path}");
            assert_eq!(status(method, path, &bearer("ann"), body).await, 403, "{method} {path}");
            assert_eq!(status(method, path, &bearer("watch"), body).await, 403, "{method} {path}");
        }
    }
    assert!(!gateway.serving().controller.workers()[0].state().draining, "nothing has changed");
    let at = gateway.metrics_address();
    assert_eq!(ask(at, "PUT", &worker, &bearer("boss"), drain).await.status, 200);
    assert!(gateway.serving().controller.workers()[0].state().draining);
    let open = ask(gateway.address(), "GET", "/readiness", "", "").await.json();
    assert_eq!(open, json!({"ready": false, "stopping": false}), "workers are not listed without a key");
    let whole = ask(at, "GET", "/readiness", &bearer("watch"), "").await.json();
    assert!(whole["pools"].is_array(), "{whole}");
    gateway.end().await;
}

#[tokio::test]
async fn a_reload_adds_and_removes_keys() {
    let engine = FakeEngine::start("m").await;
    let (ours, fleets) =
        (tempfile::NamedTempFile::new().expect("a file"), tempfile::NamedTempFile::new().expect("a file"));
    std::fs::write(&ours, format!("ann user {}\n", KeyHash::of("k-ann").to_hex())).expect("written");
    std::fs::write(&fleets, "sk-1").expect("written");
    let mut config = config();
    config.workers = vec![WorkerSpec::new(engine.url())];
    config.auth.keys_file = Some(ours.path().into());
    config.upstream.api_key = Some(Secret::File(fleets.path().into()));
    let files = config.files();
    assert!(files.contains(&ours.path().into()) && files.contains(&fleets.path().into()), "{files:?}");
    let gateway = TestGateway::start(config.clone(), &[]).await;
    let served = async |name: &str, shown: &str| {
        let (chat, fields) = (chat("m", "hello"), bearer(name));
        let answered = async {
            let call = engine.call().await;
            assert_eq!(call.header("authorization"), Some(shown));
            call.answer(200, "{}").await;
        };
        tokio::join!(ask(gateway.address(), "POST", "/v1/chat/completions", &fields, &chat), answered)
            .0
            .status
    };
    let status =
        async |name: &str| ask(gateway.address(), "GET", "/v1/models", &bearer(name), "").await.status;
    assert_eq!((served("ann", "Bearer sk-1").await, status("bob").await), (200, 401));
    std::fs::write(&ours, "bob user nonsense\n").expect("written");
    assert!(gateway.serving().reload(config.clone()).expect_err("wrong").contains("SHA-256"));
    std::fs::write(&fleets, " ").expect("written");
    assert!(gateway.serving().reload(config.clone()).is_err(), "an empty key");
    assert_eq!((served("ann", "Bearer sk-1").await, status("bob").await), (200, 401), "as before");
    std::fs::write(&ours, format!("bob user {}\n", KeyHash::of("k-bob").to_hex())).expect("written");
    std::fs::write(&fleets, "sk-2").expect("written");
    let mut files = gateway.serving().reload(config.clone()).expect("right").files;
    files.sort();
    let mut both = [ours.path(), fleets.path()];
    both.sort();
    assert_eq!(files, both, "what has changed is named");
    assert_eq!(gateway.serving().reload(config).expect("right").files, [] as [&std::path::Path; 0]);
    assert_eq!((status("ann").await, served("bob", "Bearer sk-2").await), (401, 200));
    gateway.end().await;
}

#[tokio::test]
async fn an_admin_port_open_to_other_machines_needs_a_key() {
    let mut open = config();
    open.metrics.host = "0.0.0.0".parse().expect("an address");
    let refused = Serving::start(open.clone()).err().expect("it must not start").to_string();
    assert!(refused.contains("metrics.host") && refused.contains("admin"), "{refused}");
    open.auth.keys = vec![key("ann", Role::User)];
    assert!(Serving::start(open.clone()).is_err(), "a user's key does not protect the admin API");
    open.auth.keys = vec![key("boss", Role::Admin)];
    let gateway = TestGateway::start(open.clone(), &[]).await;
    let at = SocketAddr::new([127, 0, 0, 1].into(), gateway.metrics_address().port());
    assert_eq!(ask(at, "GET", "/workers", "", "").await.status, 401);
    assert_eq!(ask(at, "GET", "/metrics", "", "").await.status, 401);
    gateway.end().await;
    open.auth.keys.clear();
    open.auth.open_admin = true;
    TestGateway::start(open, &[]).await.end().await;
}

/// The statuses of `GET /metrics`, `/workers` and `/dashboard`, and of `POST /add_worker`, with these header fields.
async fn statuses(at: SocketAddr, fields: &str) -> [u16; 4] {
    let mut statuses = [0; 4];
    let asked = [
        ("GET", "/metrics"),
        ("GET", "/workers"),
        ("GET", "/dashboard"),
        ("POST", "/add_worker?url=http://127.0.0.1:1"),
    ];
    for (status, (method, path)) in statuses.iter_mut().zip(asked) {
        *status = ask(at, method, path, fields, "").await.status;
    }
    statuses
}

/// Invariant: `auth.open_metrics` opens `/metrics` alone.
#[tokio::test]
async fn open_metrics_opens_the_metrics_alone() {
    let engine = FakeEngine::start("m").await;
    let beyond = |mut config: Config| {
        config.metrics.host = "0.0.0.0".parse().expect("an address");
        config.auth.open_metrics = true;
        config
    };
    let at = |gateway: &TestGateway| SocketAddr::new([127, 0, 0, 1].into(), gateway.metrics_address().port());

    // Without a key, beyond loopback: the admin API is closed to all.
    let gateway = TestGateway::start(beyond(config()), &[&engine]).await;
    assert_eq!(statuses(at(&gateway), "").await, [200, 403, 200, 403]);
    let refused = ask(at(&gateway), "GET", "/workers", "", "").await;
    assert!(refused.text().contains("auth.keys"), "{}", refused.text());
    let ready = ask(at(&gateway), "GET", "/readiness", "", "").await;
    assert_eq!((ready.status, ready.json()), (200, json!({"ready": true, "stopping": false})));
    assert_eq!(
        ask(gateway.address(), "GET", "/metrics", "", "").await.status,
        404,
        "not on the clients' port"
    );
    gateway.end().await;

    // A user's key does not open the admin API.
    let mut users = beyond(config());
    users.auth.keys = vec![key("ann", Role::User)];
    let gateway = TestGateway::start(users, &[]).await;
    for fields in [String::new(), bearer("ann")] {
        assert_eq!(statuses(at(&gateway), &fields).await, [200, 403, 200, 403], "{fields}");
    }
    gateway.end().await;

    // With keys for operators, the admin API needs one.
    let gateway = TestGateway::start(beyond(three_keys()), &[]).await;
    assert_eq!(statuses(at(&gateway), "").await, [200, 401, 200, 401]);
    assert_eq!(statuses(at(&gateway), &bearer("unknown")).await, [200, 401, 200, 401]);
    assert_eq!(statuses(at(&gateway), &bearer("watch")).await, [200, 200, 200, 403]);
    assert_eq!(statuses(at(&gateway), &bearer("boss")).await, [200, 200, 200, 200]);
    gateway.shut_down().await;

    // An open admin API stays open.
    let mut open = beyond(config());
    open.auth.open_admin = true;
    let gateway = TestGateway::start(open, &[]).await;
    assert_eq!(statuses(at(&gateway), "").await, [200; 4]);
    gateway.shut_down().await;

    // On loopback, the admin API needs no more than it does otherwise.
    let mut loopback = config();
    loopback.auth.open_metrics = true;
    let gateway = TestGateway::start(loopback, &[]).await;
    assert_eq!(statuses(gateway.metrics_address(), "").await, [200; 4]);
    gateway.shut_down().await;
    let mut loopback = three_keys();
    loopback.auth.open_metrics = true;
    let gateway = TestGateway::start(loopback, &[]).await;
    assert_eq!(statuses(gateway.metrics_address(), "").await, [200, 401, 200, 401]);
    gateway.end().await;
}

#[tokio::test]
async fn a_page_in_a_browser_on_this_machine_can_neither_read_nor_change() {
    let gateway = TestGateway::start(config(), &[]).await;
    for at in [gateway.metrics_address(), gateway.address()] {
        let mut client = Client::connect(at).await;
        let rebound = "GET /workers HTTP/1.1\r\nhost: evil.example:29000\r\ncontent-length: 0\r\n\r\n";
        client.send(rebound).await;
        assert_eq!(
            client.reply().await.status,
            403,
            "a foreign name that resolves to this machine is rejected"
        );
        let post = async |origin: &str| {
            ask(at, "POST", "/add_worker?url=http://127.0.0.1:1", &format!("origin: {origin}\r\n"), "")
                .await
                .status
        };
        assert_eq!(post("http://evil.example").await, 403);
        assert_eq!(post("null").await, 403);
    }
    assert!(gateway.serving().controller.workers().is_empty());
    let own = ask(
        gateway.metrics_address(),
        "POST",
        "/add_worker?url=http://127.0.0.1:1",
        "origin: http://localhost\r\n",
        "",
    );
    assert_eq!(own.await.status, 200, "the gateway's own page is allowed");
    gateway.shut_down().await;
}

#[tokio::test]
async fn a_worker_outside_the_allowed_networks_is_not_added() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.auth.allowed_networks = vec!["10.0.0.0/8".to_owned().try_into().expect("a network")];
    let gateway = TestGateway::start(config, &[&engine]).await;
    let add = async |body: String| gateway.operate("POST", "/workers", body).await;
    for url in [
        "http://169.254.169.254",
        "http://[::ffff:169.254.169.254]",
        "http://0xa9fea9fe",
        "http://2852039166/",
        "http://127.0.0.1:1",
        "http://localhost:1",
        "http://[::1]:1",
        "http://192.168.0.1:8000",
    ] {
        let reply = add(format!(r#"{{"url":"{url}"}}"#)).await;
        // Where the system does not read a number as an address, it is a name that does not resolve.
        assert!(
            reply.status == 403 || (url.contains("0xa9") || url.contains("28520")),
            "{url}: {}",
            reply.text()
        );
        let query = gateway.operate("POST", &format!("/add_worker?url={url}"), "").await;
        assert_eq!(query.status, reply.status, "{url}");
    }
    let feed = r#"{"url":"http://10.0.0.7:8000","kv_events":{"endpoint":"tcp://169.254.169.254:80"}}"#;
    assert_eq!(add(feed.into()).await.status, 403, "a feed is a connection, too");
    for place in [r#"{"file":"/etc/hostname"}"#, r#"{"env":"HOME"}"#] {
        let reply = add(format!(r#"{{"url":"http://10.0.0.7:8000","api_key":{place}}}"#)).await;
        assert_eq!(reply.status, 400, "files of this machine are not read for the caller: {}", reply.text());
    }
    assert_eq!(gateway.serving().controller.workers().len(), 1, "the configured worker may be anywhere");
    gateway.end().await;
}

/// Invariant: The address of a worker added through the admin API is checked at every connection.
#[tokio::test]
async fn an_added_workers_address_is_checked_at_every_connection() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    let gateway = TestGateway::start(config.clone(), &[]).await;
    let worker = gateway
        .serving()
        .controller
        .add_where_allowed(&WorkerSpec::new(engine.url()))
        .await
        .expect("allowed");
    eventually("it is up", || worker.state().healthy).await;
    config.auth.allowed_networks = vec!["10.0.0.0/8".to_owned().try_into().expect("a network")];
    gateway.serving().reload(config).expect("right");
    let reply = gateway.ask("POST", "/v1/chat/completions", chat("m", "hello")).await;
    assert_eq!(reply.status, 502);
    assert!(reply.text().contains("auth.allowed_networks"), "{}", reply.text());
    gateway.end_quiet(&[&engine]).await;
}

#[tokio::test]
async fn workers_added_at_run_time_do_not_get_the_configured_key() {
    let (ours, added) = (FakeEngine::start("ours").await, FakeEngine::start("added").await);
    let mut config = config();
    config.upstream.api_key = Some(Secret::new("sk-fleet"));
    let gateway = TestGateway::start(config, &[&ours]).await;
    let reply = gateway.operate("POST", "/workers", format!(r#"{{"url":"{}"}}"#, added.url())).await;
    assert_eq!(reply.status, 202);
    eventually("it is up", || {
        gateway.serving().controller.workers().iter().all(|worker| worker.state().healthy)
    })
    .await;
    for (engine, model, shown) in [(&ours, "ours", Some("Bearer sk-fleet")), (&added, "added", None)] {
        let chat = chat(model, "hello");
        let answered = async {
            let call = engine.call().await;
            assert_eq!(call.header("authorization"), shown, "{model}");
            call.answer(200, "{}").await;
        };
        tokio::join!(gateway.ask("POST", "/v1/chat/completions", &chat), answered);
    }
    gateway.end().await;
}

/// An issuer of signed tokens.
struct Issuer(Ed25519KeyPair);

impl Issuer {
    fn new() -> Self {
        let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("random");
        Self(Ed25519KeyPair::from_pkcs8(document.as_ref()).expect("a key"))
    }

    /// A JWK set with its key.
    fn keys(&self) -> String {
        let x = base64url(self.0.public_key().as_ref());
        json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "k", "x": x}]}).to_string()
    }

    fn token(&self, sub: &str) -> String {
        let claims =
            json!({"iss": "https://idp", "aud": "kvlane", "sub": sub, "exp": 99_999_999_999u64, "team": sub});
        let header = json!({"alg": "EdDSA", "kid": "k"});
        let signed = format!(
            "{}.{}",
            base64url(header.to_string().as_bytes()),
            base64url(claims.to_string().as_bytes())
        );
        format!("authorization: Bearer {signed}.{}\r\n", base64url(self.0.sign(signed.as_bytes()).as_ref()))
    }
}

fn base64url(bytes: &[u8]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

#[tokio::test]
async fn a_signed_token_is_accepted_once_the_issuers_keys_are_fetched() {
    let (idp, engine, issuer) =
        (FakeEngine::start("none").await, FakeEngine::start("m").await, Issuer::new());
    let mut config = config();
    config.auth.jwt = serde_json::from_value(json!({
        "issuer": "https://idp", "audience": "kvlane", "jwks_url": format!("{}/keys", idp.url()),
        "role_claim": "team", "roles": {"ops": "admin"},
    }))
    .expect("right");
    let gateway = TestGateway::start(config.clone(), &[&engine]).await;
    config.workers = gateway.serving().config().workers.clone();
    let status = async |fields: &str| ask(gateway.address(), "GET", "/v1/models", fields, "").await.status;
    assert_eq!(status(&issuer.token("ann")).await, 401, "the issuer's keys are not fetched yet");
    assert_eq!(idp.answer(&issuer.keys()).await.0.lines().next(), Some("GET /keys HTTP/1.1"));
    let token = issuer.token("ann");
    // The keys are on their way.
    let told = async { while status(&token).await == 401 {} };
    soon("the keys", told).await;
    assert_eq!(
        (status(&token).await, status("").await, status(&Issuer::new().token("ann")).await),
        (200, 401, 401)
    );
    let operates =
        async |fields: &str| ask(gateway.metrics_address(), "GET", "/workers", fields, "").await.status;
    assert_eq!((operates(&token).await, operates(&issuer.token("ops")).await), (403, 200));
    gateway.serving().reload(config).expect("right");
    assert_eq!(status(&issuer.token("bob")).await, 200, "a reload keeps the fetched keys");
    gateway.end().await;
}
