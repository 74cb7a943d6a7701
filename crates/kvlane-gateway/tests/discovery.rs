//! Discovery: the workers of a source are those that it names, and no others are touched.

use std::sync::Arc;
use std::time::Duration;

use kvlane_core::disaggregation::Role;
use kvlane_core::policy::PolicyConfig;
use kvlane_fleet::discovery::{KUBERNETES, Target, Targets};
use kvlane_fleet::worker::{Worker, WorkerId};
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::testing::{FakeEngine, TestGateway, chat, config, event, eventually, soon};
use serde_json::{Value, json};

fn pod(url: impl Into<String>, key: &str) -> Target {
    Target { key: key.into(), spec: WorkerSpec::new(url), terminating: false }
}

fn named(workers: &[Target]) -> Targets {
    Targets { workers: workers.to_vec(), problems: Vec::new() }
}

/// Applies what Kubernetes names; returns what was left out.
fn apply(gateway: &TestGateway, workers: &[Target]) -> Vec<String> {
    gateway.serving().controller.reconcile(KUBERNETES, &named(workers))
}

fn worker(gateway: &TestGateway, url: &str) -> Arc<Worker> {
    gateway.serving().controller.find(url).expect("it is a worker")
}

fn urls(gateway: &TestGateway) -> Vec<String> {
    gateway.serving().controller.workers().iter().map(|worker| worker.url.to_string()).collect()
}

/// How many endpoints may get requests.
fn eligible(gateway: &TestGateway) -> usize {
    let pools = gateway.fleet().pools();
    pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
}

async fn serves(gateway: &TestGateway, endpoints: usize) {
    eventually("all endpoints serve", || eligible(gateway) == endpoints).await;
}

/// What `GET /workers` says about a URL.
async fn shown(gateway: &TestGateway, url: &str) -> Value {
    let all = gateway.operate("GET", "/workers", "").await.json();
    let all = all["workers"].as_array().cloned().expect("workers");
    all.into_iter().find(|worker| worker["url"] == *url).expect("it is listed")
}

/// A gateway to which discovery leads, with two engines that are not its workers yet.
async fn two_engines(config: Config) -> (TestGateway, FakeEngine, FakeEngine) {
    let engines = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    (TestGateway::start(config, &[]).await, engines.0, engines.1)
}

#[tokio::test]
async fn workers_join_drain_resume_and_leave_as_the_source_says() {
    let (gateway, a, b) = two_engines(config()).await;
    let both = [pod(a.url(), "a"), pod(b.url(), "b")];
    assert_eq!(apply(&gateway, &both), [""; 0]);
    serves(&gateway, 2).await;
    assert_eq!(shown(&gateway, &a.url()).await["source"], "kubernetes");

    let ends = [Target { terminating: true, ..pod(a.url(), "a") }, pod(b.url(), "b")];
    apply(&gateway, &ends);
    assert_eq!(eligible(&gateway), 1, "it drains at once");
    assert!(worker(&gateway, &a.url()).state().draining);
    apply(&gateway, &both);
    assert_eq!(eligible(&gateway), 2, "it is not about to end any more");
    apply(&gateway, &ends);
    apply(&gateway, &both[1..]);
    assert_eq!((urls(&gateway), eligible(&gateway)), (vec![b.url()], 1));
    apply(&gateway, &[]);
    assert_eq!((urls(&gateway), eligible(&gateway)), (vec![], 0));
    assert_eq!(gateway.metric(r#"kvlane_discovery_joins_total{source="kubernetes"}"#).await, Some(2.0));
    assert_eq!(gateway.metric(r#"kvlane_discovery_leaves_total{source="kubernetes"}"#).await, Some(2.0));
    gateway.end().await;
}

#[tokio::test]
async fn a_pod_that_ends_is_not_added() {
    let (gateway, a, _) = two_engines(config()).await;
    let ends = Target { terminating: true, ..pod(a.url(), "a") };
    assert_eq!(apply(&gateway, std::slice::from_ref(&ends)), [""; 0]);
    assert_eq!(urls(&gateway), [""; 0]);
    // Another one has its address already.
    assert_eq!(apply(&gateway, &[ends.clone(), pod(a.url(), "b")]), [""; 0]);
    serves(&gateway, 1).await;
    assert_eq!(apply(&gateway, &[pod(a.url(), "b"), ends]), [""; 0]);
    assert_eq!(eligible(&gateway), 1);
    gateway.end().await;
}

/// Invariant: A worker that a source no longer names gets no request from then on, and those in flight end.
#[tokio::test]
async fn a_worker_that_is_gone_ends_its_requests_and_gets_no_more() {
    let (gateway, a, b) = two_engines(config()).await;
    apply(&gateway, &[pod(a.url(), "a")]);
    serves(&gateway, 1).await;
    let (mut client, mut call) = gateway.stream(&a, "1").await;
    apply(&gateway, &[pod(b.url(), "b")]);
    serves(&gateway, 1).await;
    assert!(worker(&gateway, &a.url()).state().leaving);
    for _ in 0..5 {
        gateway.served(&b, chat("m", "hi")).await;
    }
    call.chunk(&event("[DONE]")).await;
    call.end_stream().await;
    client.see(&event("[DONE]")).await;
    eventually("it leaves", || urls(&gateway) == [b.url()]).await;
    drop(client);
    gateway.end_quiet(&[&a, &b]).await;
}

/// Invariant: Another engine at the URL of a worker starts without knowledge of a cache.
#[tokio::test]
async fn another_engine_at_a_url_is_probed_and_nothing_is_known_of_its_cache() {
    let mut config = config();
    config.health.interval = Duration::from_millis(20);
    let (gateway, a, _) = two_engines(config).await;
    apply(&gateway, &[pod(a.url(), "first")]);
    serves(&gateway, 1).await;
    gateway.served(&a, chat("m", &"hello ".repeat(40))).await;
    let blocks = |gateway: &TestGateway, of: WorkerId| {
        let endpoints = gateway.serving().controller.endpoints_of(of);
        let (pool, endpoint) = endpoints.first().expect("it is registered");
        pool.router.blocks_given(&[endpoint.id])[0]
    };
    let first = worker(&gateway, &a.url());
    assert!(blocks(&gateway, first.id) > 0);

    // The old one still answers a request while the new one joins.
    let (mut client, call) = gateway.stream(&a, "1").await;
    a.set_healthy(false);
    apply(&gateway, &[pod(a.url(), "second")]);
    assert!(first.state().leaving);
    assert_eq!(eligible(&gateway), 0, "the new one has not answered a probe");
    a.set_healthy(true);
    serves(&gateway, 1).await;
    let second = worker(&gateway, &a.url());
    assert_ne!(first.id, second.id);
    assert_eq!(blocks(&gateway, second.id), 0);
    call.end_stream().await;
    client.rest().await;
    eventually("the old one leaves", || urls(&gateway).len() == 1).await;
    assert_eq!(eligible(&gateway), 1);
    drop(client);
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_comes_and_goes_is_there_once_at_the_end() {
    let (gateway, a, _) = two_engines(config()).await;
    for n in 0..50 {
        let key = format!("{}", n / 5);
        apply(&gateway, &[pod(a.url(), &key)]);
        apply(&gateway, &[Target { terminating: true, ..pod(a.url(), &key) }]);
        if n % 2 == 0 {
            apply(&gateway, &[]);
        }
    }
    apply(&gateway, &[pod(a.url(), "9")]);
    serves(&gateway, 1).await;
    assert_eq!(urls(&gateway), [a.url()]);
    gateway.served(&a, chat("m", "hi")).await;
    gateway.end().await;
}

#[tokio::test]
async fn changed_settings_replace_a_worker_that_serves_until_then() {
    let (gateway, a, _) = two_engines(config()).await;
    apply(&gateway, &[pod(a.url(), "a")]);
    serves(&gateway, 1).await;
    let first = worker(&gateway, &a.url()).id;
    let mut changed = pod(a.url(), "a");
    changed.spec.model = Some("other".into());
    apply(&gateway, std::slice::from_ref(&changed));
    assert!(eligible(&gateway) >= 1, "the old one serves");
    eventually("the new one has replaced it", || urls(&gateway).len() == 1).await;
    assert_ne!(worker(&gateway, &a.url()).id, first);
    let pools = || gateway.fleet().pools().iter().map(|pool| pool.model.clone()).collect::<Vec<_>>();
    eventually("its old pool has gone", || pools() == ["other"]).await;
    // Both go at once if the pod goes before the new one serves.
    changed.spec.model = Some("third".into());
    a.set_healthy(false);
    apply(&gateway, std::slice::from_ref(&changed));
    apply(&gateway, &[]);
    assert_eq!((urls(&gateway), eligible(&gateway)), (vec![], 0));
    gateway.end().await;
}

/// Invariant: A source changes only the workers that were added for it.
#[tokio::test]
async fn workers_of_others_stay_as_they_are() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(config(), &[&a]).await;
    let added = gateway.operate("POST", "/workers", json!({"url": b.url()}).to_string()).await;
    assert_eq!(added.status, 202);
    serves(&gateway, 2).await;
    let ids = [a.url(), b.url()].map(|url| worker(&gateway, &url).id);

    let left_out = apply(&gateway, &[pod(a.url(), "a"), Target { terminating: true, ..pod(b.url(), "b") }]);
    assert_eq!(left_out.len(), 2, "{left_out:?}");
    for (url, first) in [(a.url(), "config"), (b.url(), "admin")] {
        let why = left_out.iter().find(|why| why.contains(&url)).expect("it is left out");
        assert!(why.contains(&format!("named by {first}")), "{why}");
        let shown = shown(&gateway, &url).await;
        assert_eq!((&shown["source"], &shown["also_named_by"]), (&json!(first), &json!(["kubernetes"])));
        assert_eq!(shown["draining"], false);
    }
    assert_eq!(apply(&gateway, &[]), [""; 0]);
    assert_eq!([a.url(), b.url()].map(|url| worker(&gateway, &url).id), ids);
    assert_eq!(shown(&gateway, &a.url()).await["also_named_by"], json!([]));
    assert_eq!(eligible(&gateway), 2);
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_is_added_when_its_url_becomes_free() {
    let (gateway, a, _) = two_engines(config()).await;
    gateway.operate("POST", "/workers", json!({"url": a.url()}).to_string()).await;
    serves(&gateway, 1).await;
    let (source, seen) = gateway.fleet().discovery.source(KUBERNETES, gateway.fleet().clock);
    let following = tokio::spawn(Arc::clone(&gateway.serving().controller).follow(seen.clone()));
    source.publish(named(&[pod(a.url(), "a")]));
    eventually("it is left out", || seen.status().not_added.len() == 1).await;
    gateway.operate("DELETE", &format!("/workers/{}", worker(&gateway, &a.url()).id.0), "").await;
    eventually("it is the source's", || urls(&gateway) == [a.url()] && worker(&gateway, &a.url()).is_found())
        .await;
    eventually("nothing is left out", || seen.status().not_added.is_empty()).await;
    serves(&gateway, 1).await;
    following.abort();
    gateway.end().await;
}

#[tokio::test]
async fn a_worker_that_an_operator_has_removed_stays_removed() {
    let (gateway, a, b) = two_engines(config()).await;
    let both = [pod(a.url(), "a"), pod(b.url(), "b")];
    apply(&gateway, &both);
    serves(&gateway, 2).await;
    gateway.operate("DELETE", &format!("/workers/{}", worker(&gateway, &a.url()).id.0), "").await;
    let left_out = apply(&gateway, &both);
    assert!(left_out.len() == 1 && left_out[0].contains("an operator has removed it"), "{left_out:?}");
    assert_eq!(urls(&gateway), [b.url()]);
    // An operator's drain is not the source's to end.
    let path = format!("/workers/{}", worker(&gateway, &b.url()).id.0);
    gateway.operate("PUT", &path, r#"{"draining": true}"#).await;
    apply(&gateway, &both);
    assert_eq!(eligible(&gateway), 0);
    // Another pod at its address.
    assert_eq!(apply(&gateway, &[pod(a.url(), "another"), both[1].clone()]), [""; 0]);
    serves(&gateway, 1).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_reload_leaves_a_url_with_the_source_that_named_it_first() {
    let (gateway, a, _) = two_engines(config()).await;
    apply(&gateway, &[pod(a.url(), "a")]);
    serves(&gateway, 1).await;
    let first = worker(&gateway, &a.url()).id;
    let with = |workers: Vec<WorkerSpec>| Config { workers, ..Config::clone(&gateway.serving().config()) };
    let reloaded = gateway.serving().reload(with(vec![WorkerSpec::new(a.url())])).expect("right");
    assert_eq!(reloaded.joining, [""; 0]);
    assert_eq!(shown(&gateway, &a.url()).await["also_named_by"], json!(["config"]));
    gateway.serving().reload(with(Vec::new())).expect("right");
    assert_eq!(worker(&gateway, &a.url()).id, first);
    assert_eq!(shown(&gateway, &a.url()).await["also_named_by"], json!([]));

    let other = WorkerSpec { model: Some("other".into()), ..WorkerSpec::new(a.url()) };
    let reloaded = gateway.serving().reload(with(vec![other])).expect("right");
    assert_eq!((reloaded.joining, reloaded.replaced), (vec![], vec![]));
    assert_eq!(worker(&gateway, &a.url()).id, first);
    apply(&gateway, &[]);
    eventually("it is the configuration's", || worker(&gateway, &a.url()).is_configured()).await;
    serves(&gateway, 1).await;
    gateway.end().await;
}

#[tokio::test]
async fn what_cannot_be_a_worker_is_left_out_with_its_reason() {
    let mut config = config();
    config.auth.allowed_networks =
        ["127.0.0.0/8", "169.254.0.0/16"].map(|text| text.to_owned().try_into().expect("a network")).into();
    let (gateway, a, b) = two_engines(config).await;
    let mut fed = pod("http://127.0.0.1:9", "fed");
    fed.spec = WorkerSpec {
        kv_events: vec![kvlane_gateway::config::FeedSpec::new("tcp://10.9.9.9:5557")],
        ..fed.spec
    };
    let left_out = apply(
        &gateway,
        &[
            pod(a.url(), "a"),
            pod("10.0.0.1:8000", "bad"),
            pod("http://10.0.0.1:8000", "elsewhere"),
            pod("http://[::ffff:10.0.0.2]:8000", "mapped"),
            pod("http://169.254.169.254", "metadata"),
            fed,
            pod(format!("{}/v1/", b.url()), "b1"),
            pod(b.url(), "b2"),
        ],
    );
    for (url, words) in [
        ("10.0.0.1:8000:", "http://host:port"),
        ("http://10.0.0.1:8000:", "auth.allowed_networks (127.0.0.0/8, 169.254.0.0/16)"),
        ("http://[::ffff:10.0.0.2]:8000:", "auth.allowed_networks"),
        ("http://169.254.169.254:", "hand out credentials"),
        ("http://127.0.0.1:9:", "10.9.9.9 is in none of"),
        (&b.url(), "named twice, by b1 and b2"),
    ] {
        let why = left_out.iter().find(|why| why.starts_with(url));
        assert!(why.is_some_and(|why| why.contains(words)), "{url} {words}: {left_out:#?}");
    }
    assert_eq!(left_out.len(), 6, "{left_out:#?}");
    serves(&gateway, 2).await;
    gateway.end().await;
}

/// Invariant: A source cannot add more workers than a gateway may have; those without room are added later.
#[tokio::test]
async fn a_source_fills_the_fleet_and_no_more() {
    let (gateway, a, _) = two_engines(config()).await;
    // Nothing listens there.
    let mut pods: Vec<Target> = (0..4100u32)
        .map(|n| pod(format!("http://127.{}.{}.{}:9", 1 + n / 65536, n / 256 % 256, n % 256), &n.to_string()))
        .collect();
    let left_out = apply(&gateway, &pods);
    assert!(left_out.len() == 1 && left_out[0].contains("and 3 further workers"), "{left_out:?}");
    assert_eq!(gateway.serving().controller.workers().len(), 4096);
    pods.truncate(10);
    pods.push(pod(a.url(), "a"));
    assert_eq!(apply(&gateway, &pods), [""; 0]);
    serves(&gateway, 1).await;
    assert_eq!(gateway.serving().controller.workers().len(), 11);
    gateway.end().await;
}

#[tokio::test]
async fn a_prefill_worker_is_shown_and_gets_no_request() {
    let mut config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    let (gateway, prefill, decode) = two_engines(config).await;
    let with = |engine: &FakeEngine, role| {
        let mut pod = pod(engine.url(), "key");
        pod.spec.role = role;
        pod
    };
    apply(&gateway, &[with(&prefill, Role::Prefill)]);
    eventually("it has been probed", || worker(&gateway, &prefill.url()).state().healthy).await;
    assert_eq!(eligible(&gateway), 0);
    let refused = gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")).await;
    assert!(refused.status == 404 || refused.status == 503, "{refused:?}");
    apply(&gateway, &[with(&prefill, Role::Prefill), with(&decode, Role::Decode)]);
    serves(&gateway, 1).await;
    for _ in 0..4 {
        gateway.served(&decode, chat("m", "hi")).await;
    }
    let seen = shown(&gateway, &prefill.url()).await;
    assert_eq!(
        (&seen["role"], &seen["healthy"], &seen["pools"]),
        (&json!("prefill"), &json!(true), &json!([]))
    );
    let fleet = gateway.operate("GET", "/fleet", "").await.json();
    assert_eq!(fleet["workers"][1]["role"], "decode");
    assert_eq!(fleet["workers"][1]["source"], "kubernetes");
    gateway.end_quiet(&[&prefill, &decode]).await;
}

/// A file with these workers.
fn listed(urls: &[String]) -> String {
    urls.iter().map(|url| format!("- url: {url}\n")).collect()
}

#[tokio::test]
async fn a_workers_file_is_followed_and_readiness_waits_for_it() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let directory = tempfile::tempdir().expect("a directory");
    let (path, next) = (directory.path().join("workers.yaml"), directory.path().join("next"));
    let mut config = config();
    config.discovery.workers_file = Some(path.clone());
    let gateway = TestGateway::start(config, &[&a]).await;
    let readiness = async || gateway.operate("GET", "/readiness", "").await;
    let problem = || gateway.fleet().discovery.sources()[0].status().problem;
    eventually("the file is missed", || problem().is_some()).await;
    let waits = readiness().await;
    assert_eq!(waits.status, 503, "the file has not been read, though an engine serves");
    let discovery = &waits.json()["discovery"][0];
    assert_eq!(
        (&discovery["source"], &discovery["synced"], &discovery["age_s"]),
        (&json!("file"), &json!(false), &Value::Null)
    );
    assert!(
        discovery["problem"].as_str().is_some_and(|problem| problem.contains("workers.yaml")),
        "{discovery}"
    );
    assert_eq!(gateway.metric(r#"kvlane_discovery_synced{source="file"}"#).await, Some(0.0));
    assert_eq!(gateway.metric(r#"kvlane_discovery_problems{source="file"}"#).await, Some(1.0));

    let write = |text: &str| {
        std::fs::write(&next, text).expect("written");
        std::fs::rename(&next, &path).expect("renamed");
    };
    write(&listed(&[b.url()]));
    serves(&gateway, 2).await;
    soon("the gateway is ready", async { while readiness().await.status != 200 {} }).await;
    let discovery = readiness().await.json()["discovery"][0].clone();
    assert_eq!(
        (&discovery["synced"], &discovery["workers"], &discovery["problem"]),
        (&json!(true), &json!(1), &Value::Null)
    );
    assert_eq!(gateway.metric(r#"kvlane_discovery_workers{source="file"}"#).await, Some(1.0));
    assert!(gateway.metric(r#"kvlane_discovery_age_seconds{source="file"}"#).await.is_some());

    // A broken file leaves the gateway ready and the fleet as it was.
    write("- url: nonsense\n");
    eventually("the file is wrong", || problem().is_some()).await;
    assert_eq!((readiness().await.status, eligible(&gateway)), (200, 2));
    gateway.end().await;
}

#[tokio::test]
async fn the_workers_of_a_file_serve_until_their_successors_do() {
    let mut config = config();
    config.health.interval = Duration::from_millis(20);
    let (gateway, a, b) = two_engines(config).await;
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, listed(&[a.url()])).expect("written");
    let mut next = Config::clone(&gateway.serving().config());
    next.discovery.workers_file = Some(file.path().into());
    gateway.serving().reload(next).expect("right");
    serves(&gateway, 1).await;
    b.set_healthy(false);
    std::fs::write(&file, listed(&[b.url()])).expect("written");
    eventually("the other one is tried", || b.probes() > 1).await;
    assert!(!worker(&gateway, &a.url()).state().leaving);
    // It is in the file again before the other one serves.
    std::fs::write(&file, listed(&[b.url(), a.url()])).expect("written");
    eventually("it stays", || worker(&gateway, &a.url()).state().successors.is_empty()).await;
    std::fs::write(&file, listed(&[b.url()])).expect("written");
    eventually("it waits again", || !worker(&gateway, &a.url()).state().successors.is_empty()).await;
    assert_eq!(eligible(&gateway), 1);
    let same = Config::clone(&gateway.serving().config());
    gateway.serving().reload(same).expect("right");
    b.set_healthy(true);
    eventually("the other one serves", || urls(&gateway) == [b.url()]).await;
    let left = gateway.metric(r#"kvlane_discovery_leaves_total{source="file"}"#).await;
    assert_eq!(left, Some(2.0), "once for each time that the file named it no longer");
    gateway.end().await;
}

#[test]
fn a_check_reads_the_workers_file_that_is_there() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("workers.yaml");
    let mut config = config();
    config.discovery.workers_file = Some(path.clone());
    kvlane_gateway::serve::check(&config).expect("it may be written later");
    std::fs::write(&path, "- url: http://a\n- url: b\n").expect("written");
    let error = kvlane_gateway::serve::check(&config).expect_err("wrong").to_string();
    assert!(error.contains("workers.yaml: [1].url: 'b'") && error.contains("line 2"), "{error}");
}

#[tokio::test]
async fn a_reload_starts_changes_and_stops_a_source() {
    let (gateway, a, b) = two_engines(config()).await;
    let directory = tempfile::tempdir().expect("a directory");
    let [one, other] = ["one.yaml", "other.yaml"].map(|name| directory.path().join(name));
    std::fs::write(&one, listed(&[a.url()])).expect("written");
    std::fs::write(&other, listed(&[a.url(), b.url()])).expect("written");
    let reload = |file: Option<&std::path::PathBuf>| {
        let mut next = Config::clone(&gateway.serving().config());
        next.discovery.workers_file = file.cloned();
        gateway.serving().reload(next).expect("right").changed
    };
    assert_eq!(reload(Some(&one)), ["discovery.workers_file"]);
    serves(&gateway, 1).await;
    let first = worker(&gateway, &a.url()).id;
    reload(Some(&other));
    serves(&gateway, 2).await;
    assert_eq!(worker(&gateway, &a.url()).id, first, "it is in both files");
    assert_eq!(reload(None), ["discovery.workers_file"]);
    eventually("its workers leave", || urls(&gateway).is_empty()).await;
    assert!(gateway.fleet().discovery.sources().is_empty());
    assert_eq!(reload(None), [""; 0]);
    reload(Some(&one));
    serves(&gateway, 1).await;
    gateway.end().await;
}

#[tokio::test]
async fn an_empty_workers_file_is_no_workers() {
    let (gateway, a, _) = two_engines(config()).await;
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, listed(&[a.url()])).expect("written");
    let mut next = Config::clone(&gateway.serving().config());
    next.discovery.workers_file = Some(file.path().into());
    gateway.serving().reload(next).expect("right");
    serves(&gateway, 1).await;
    std::fs::write(&file, "[]\n").expect("written");
    eventually("there are no workers", || urls(&gateway).is_empty()).await;
    gateway.end().await;
}

#[tokio::test]
async fn the_addresses_behind_a_host_name_are_workers() {
    let a = FakeEngine::start("m").await;
    let port = a.authority().rsplit(':').next().expect("a port").to_owned();
    let mut config = config();
    config.discovery.dns = vec![format!("http://localhost:{port}")];
    let gateway = TestGateway::start(config, &[]).await;
    serves(&gateway, 1).await;
    let seen = shown(&gateway, &a.url()).await;
    assert_eq!(seen["source"], "dns");
    gateway.served(&a, chat("m", "hi")).await;
    gateway.end().await;
}
