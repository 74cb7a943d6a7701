//! Pods by the EndpointSlices of a Service.

use kvlane_core::disaggregation::Role;

use super::*;
use crate::collection::{SERVICES, SLICES};
use crate::testing::Fault;

fn by_service() -> Kubernetes {
    Kubernetes { enabled: true, service: Some("llm".into()), ..Kubernetes::default() }
}

fn service() -> Value {
    json!({"metadata": {"name": "llm"}, "spec": {"selector": {"app": "llm"}, "ports": [{"port": 80}]}})
}

/// A slice of the Service `llm` with the port 8000 for these endpoints.
fn slice(name: &str, endpoints: Value) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "llm"}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "metrics", "port": 9090, "protocol": "TCP"}, {"name": "http", "port": 8000}],
    })
}

fn endpoint(pod: &str, ip: &str) -> Value {
    json!({
        "addresses": [ip], "conditions": {"ready": true, "serving": true, "terminating": false},
        "targetRef": {"kind": "Pod", "name": pod, "uid": format!("uid-{pod}")},
    })
}

#[tokio::test(start_paused = true)]
async fn endpoints_are_workers_and_their_pods_say_more() {
    let server = server_with(1);
    server.set(&SERVICES, "serving", service());
    server.set(
        &SLICES,
        "serving",
        slice("s1", json!([endpoint("p0001", "10.0.0.1"), endpoint("x", "10.0.0.7")])),
    );
    let annotations = json!({"kvlane.io/kv-events-port": "5557"});
    server.change(&PODS, "serving", "p0001", |pod| {
        pod["metadata"]["annotations"] = annotations;
        pod["metadata"]["labels"]["llm-d.ai/role"] = "decode".into();
    });
    let mut world = World::new(&server, by_service());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.7:8000"]).await;
    assert_eq!(world.published, 1, "not before the pods are known");
    let [first, second] = &world.targets.workers[..] else { panic!("{:?}", world.targets) };
    assert_eq!((first.key.as_str(), first.spec.role), ("uid-p0001:8000", Role::Decode));
    assert_eq!(first.spec.kv_events[0].endpoint, "tcp://10.0.0.1:5557");
    assert_eq!((second.key.as_str(), second.spec.role), ("uid-x:8000", Role::Both));
    assert_eq!(world.problems(), [""; 0]);
    let pods = server.asked().into_iter().find(|path| path.contains("/pods?")).expect("it asks for pods");
    assert!(pods.contains("labelSelector=app%3Dllm&"), "{pods}");

    server.change(&SLICES, "serving", "s1", |slice| {
        slice["endpoints"][0]["conditions"] = json!({"ready": false, "serving": true, "terminating": true});
    });
    world.until_urls(&["!10.0.0.1:8000", "10.0.0.7:8000"]).await;
    server.change(&SLICES, "serving", "s1", |slice| slice["endpoints"] = json!([endpoint("x", "10.0.0.7")]));
    world.until_urls(&["10.0.0.7:8000"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_deleted_drains_before_its_slice_says_so() {
    let server = server_with(1);
    server.set(&SERVICES, "serving", service());
    server.set(&SLICES, "serving", slice("s1", json!([endpoint("p0001", "10.0.0.1")])));
    let mut world = World::new(&server, by_service());
    world.until_urls(&["10.0.0.1:8000"]).await;
    server.change(&PODS, "serving", "p0001", |pod| set_deleted(pod, 30));
    world.until_urls(&["!10.0.0.1:8000"]).await;
    world.until_urls(&[]).await;
    server.change(&PODS, "serving", "p0001", |pod| pod["status"]["phase"] = "Failed".into());
    world.until_left_out("the Service llm in namespace serving has no endpoints").await;
}

#[tokio::test(start_paused = true)]
async fn rights_to_pods_and_services_may_lack() {
    let server = server_with(1);
    server.set(&SERVICES, "serving", service());
    server.set(&SLICES, "serving", slice("s1", json!([endpoint("p0001", "10.0.0.1")])));
    server.change(&PODS, "serving", "p0001", |pod| {
        pod["metadata"]["labels"]["llm-d.ai/role"] = "decode".into()
    });
    server.fault("/services?", 1, Fault::Status(403, "no"));
    let mut world = World::new(&server, by_service());
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(world.targets.workers[0].spec.role, Role::Decode);
    assert!(
        server.asked().iter().any(|path| path.contains("/pods?limit")),
        "all pods of the namespace are asked for"
    );

    server.fault("/pods?", 1, Fault::Status(403, "no"));
    let mut world = World::new(&server, by_service());
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(world.targets.workers[0].spec.role, Role::Both, "without what its pod says");
    assert_eq!(world.seen.status().problem, None);
    world.until("the right is granted", |targets, _| targets.workers[0].spec.role == Role::Decode).await;

    // An API server that starts refuses until it has read the roles.
    server.fault("s?", 12, Fault::Status(403, "no"));
    server.break_watches();
    world
        .until("it refuses", |targets, status| {
            assert_eq!(targets.workers[0].spec.role, Role::Decode, "what pods said is not forgotten");
            status.problem.is_some()
        })
        .await;
    world
        .until("it is in contact again", |targets, status| {
            assert_eq!(targets.workers[0].spec.role, Role::Decode, "what pods said is not forgotten");
            status.problem.is_none()
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn what_may_be_listed_and_not_watched_is_listed_again_and_again() {
    let server = server_with(1);
    server.set(&SERVICES, "serving", service());
    server.set(&SLICES, "serving", slice("s1", json!([endpoint("p0001", "10.0.0.1")])));
    let role =
        |role: &'static str| move |pod: &mut Value| pod["metadata"]["labels"]["llm-d.ai/role"] = role.into();
    server.change(&PODS, "serving", "p0001", role("decode"));
    server.fault("/pods?labelSelector=app%3Dllm&watch=true", usize::MAX, Fault::Status(403, "no"));
    let mut world = World::new(&server, by_service());
    world.until_problem("grant the service account `watch` on `pods`").await;
    let began = Instant::now();
    world
        .until("half a minute", |targets, _| {
            assert_eq!(targets.workers.first().map_or(Role::Decode, |worker| worker.spec.role), Role::Decode);
            began.elapsed() > Duration::from_secs(30)
        })
        .await;
    server.change(&PODS, "serving", "p0001", role("prefill"));
    let seen = world.until("the change", |targets, _| targets.workers[0].spec.role == Role::Prefill).await;
    assert!(seen < Duration::from_secs(7), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn a_service_without_pods_or_that_is_not_there_is_told() {
    let server = Server::new();
    let mut world = World::new(&server, by_service());
    world
        .until_left_out("there is no Service llm in namespace serving: check discovery.kubernetes.service")
        .await;
    server.set(&SERVICES, "serving", service());
    world.until_left_out("the Service llm in namespace serving has no endpoints: check its selector").await;
    server.set(&SLICES, "serving", slice("s1", json!([endpoint("p", "10.0.0.1")])));
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(world.problems(), [""; 0]);
    server.delete(&SLICES, "serving", "s1");
    server.delete(&SERVICES, "serving", "llm");
    world.until_left_out("there is no Service llm").await;
    assert_eq!(world.urls(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn endpoints_without_pods_and_odd_slices() {
    let server = Server::new();
    let by_hand =
        json!([{"addresses": ["10.1.0.1"]}, {"addresses": ["10.1.0.2"], "conditions": {"ready": false}}]);
    server.set(&SLICES, "serving", slice("a", by_hand));
    let change = |name: &str, change: &dyn Fn(&mut Value)| {
        with(slice(name, json!([endpoint("p", "10.0.0.1")])), change)
    };
    server.set(&SLICES, "serving", change("b", &|slice| slice["addressType"] = "FQDN".into()));
    server.set(&SLICES, "serving", change("c", &|slice| slice["ports"] = Value::Null));
    server.set(&SLICES, "serving", change("d", &|slice| slice["endpoints"] = Value::Null));
    server.set(&SLICES, "serving", change("e", &|slice| slice["endpoints"][0]["addresses"][0] = "?".into()));
    let mut world = World::new(&server, by_service());
    world.until_urls(&["10.1.0.1:8000"]).await;
    assert_eq!(world.targets.workers[0].key, "10.1.0.1:8000");
    let told = world.problems().join("\n");
    for part in [
        "EndpointSlice serving/b: its endpoints are host names: use discovery.dns for them",
        "EndpointSlice serving/c: it declares no TCP port",
        "pod serving/p: its address `?` is no IP address",
        "there is no Service llm",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_with_two_address_families_has_each_pod_once() {
    let server = Server::new();
    server.set(&SERVICES, "serving", service());
    let six = with(slice("a", json!([endpoint("p", "fd00::1"), endpoint("q", "fd00::2")])), |slice| {
        slice["addressType"] = "IPv6".into();
    });
    server.set(&SLICES, "serving", six);
    server.set(&SLICES, "serving", slice("b", json!([endpoint("p", "10.0.0.1")])));
    let mut world = World::new(&server, by_service());
    world.until_urls(&["10.0.0.1:8000", "[fd00::2]:8000"]).await;
}
