//! Pods by label selectors: roles, ports and annotations.

use kvlane_core::disaggregation::Role;
use kvlane_fleet::worker::config::{FeedSpec, WorkerSpec};

use super::*;

fn spec<'a>(world: &'a World, key: &str) -> &'a WorkerSpec {
    let found = world.targets.workers.iter().find(|target| target.key == key);
    &found.unwrap_or_else(|| panic!("{key}: {:?}", world.targets)).spec
}

fn annotated(name: &str, ip: &str, annotations: Value) -> Value {
    with(pod(name, ip), |pod| pod["metadata"]["annotations"] = annotations)
}

#[tokio::test(start_paused = true)]
async fn roles_come_from_the_label() {
    let server = Server::new();
    let roles = [
        ("prefill", Role::Prefill),
        ("decode", Role::Decode),
        ("encode", Role::Encode),
        ("both", Role::Both),
        ("prefill-decode", Role::Both),
        ("Prefill_Decode", Role::Both),
        ("encode-prefill-decode", Role::Both),
        ("encode-prefill", Role::Prefill),
        ("", Role::Both),
        ("worker", Role::Both),
    ];
    for (n, (role, _)) in roles.iter().enumerate() {
        let labelled = with(pod(&format!("p{n}"), &format!("10.0.0.{n}")), |pod| {
            pod["metadata"]["labels"]["llm-d.ai/role"] = (*role).into();
        });
        server.set(&PODS, "serving", labelled);
    }
    let mut world = World::new(&server, by_selector());
    world.until("all", |targets, _| targets.workers.len() == roles.len()).await;
    for (n, (label, role)) in roles.iter().enumerate() {
        assert_eq!(spec(&world, &format!("uid-p{n}:8000")).role, *role, "{label}");
    }
    assert_eq!(world.problems().len(), 2);
    assert!(world.problems()[0].starts_with("pod serving/p7: the label llm-d.ai/role is `encode-prefill`"));
    assert!(
        world.problems()[1]
            .starts_with("pod serving/p9: the label llm-d.ai/role is `worker`, which is no role")
    );
}

#[tokio::test(start_paused = true)]
async fn roles_come_from_two_selectors() {
    let server = Server::new();
    let of =
        |name: &str, ip: &str, labels: Value| with(pod(name, ip), |pod| pod["metadata"]["labels"] = labels);
    server.set(&PODS, "serving", of("p", "10.0.0.1", json!({"part": "prefill"})));
    server.set(&PODS, "serving", of("d", "10.0.0.2", json!({"part": "decode", "llm-d.ai/role": "encode"})));
    let config = Kubernetes {
        selector: None,
        prefill_selector: Some("part=prefill".into()),
        decode_selector: Some("part=decode".into()),
        ..by_selector()
    };
    let mut world = World::new(&server, config.clone());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    assert_eq!(spec(&world, "uid-p:8000").role, Role::Prefill);
    assert_eq!(spec(&world, "uid-d:8000").role, Role::Decode, "the selector counts, not the label");
    let config = Kubernetes { decode_selector: config.prefill_selector.clone(), ..config };
    let mut world = World::new(&server, config);
    world
        .until_left_out("pod serving/p: both selectors of roles name it; it is taken for prefill and decode")
        .await;
    assert_eq!(spec(&world, "uid-p:8000").role, Role::Both);
}

#[tokio::test(start_paused = true)]
async fn pods_of_several_namespaces_are_one_fleet() {
    let server = Server::new();
    server.set(&PODS, "serving", pod("a", "10.0.0.1"));
    for (namespace, ip) in [("other", "10.0.0.2"), ("third", "10.0.0.3")] {
        server.set(&PODS, namespace, with(pod("a", ip), |pod| pod["metadata"]["uid"] = namespace.into()));
    }
    let config = Kubernetes { namespaces: vec!["third".into(), "other".into()], ..by_selector() };
    World::new(&server, config).until_urls(&["10.0.0.2:8000", "10.0.0.3:8000"]).await;
}

#[tokio::test(start_paused = true)]
async fn the_port_is_the_one_named_http_or_the_only_one() {
    let server = Server::new();
    let ports = |name: &str, ip: &str, ports: Value| {
        with(pod(name, ip), |pod| pod["spec"]["containers"][0]["ports"] = ports)
    };
    let many = json!([{"containerPort": 9000, "name": "metrics"}, {"containerPort": 8080, "name": "http"}]);
    server.set(&PODS, "serving", ports("a", "10.0.0.1", many));
    let udp = json!([{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 8081, "protocol": "TCP"}]);
    server.set(&PODS, "serving", ports("b", "10.0.0.2", udp));
    server.set(&PODS, "serving", ports("c", "10.0.0.3", json!([{"containerPort": 1}, {"containerPort": 2}])));
    server.set(&PODS, "serving", ports("d", "10.0.0.4", Value::Null));
    let sidecar = with(ports("e", "10.0.0.5", Value::Null), |pod| {
        let always = json!({"restartPolicy": "Always", "ports": [{"containerPort": 8000}]});
        pod["spec"]["initContainers"] = json!([{"ports": [{"containerPort": 1}]}, always]);
    });
    server.set(&PODS, "serving", sidecar);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8080", "10.0.0.2:8081", "10.0.0.5:8000"]).await;
    assert_eq!(
        world.problems(),
        [
            "pod serving/c: it declares the ports 1, 2 and names none of them `http`: name one, or set \
             discovery.kubernetes.ports",
            "pod serving/d: it declares no TCP port: name its port `http` in the manifest, or set \
             discovery.kubernetes.ports",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn configured_ports_are_an_engine_each() {
    let server = server_with(1);
    let feeds = json!({"kvlane.io/kv-events-port": "5557", "kvlane.io/kv-events-replay-port": "6000"});
    server.change(&PODS, "serving", "p0001", |pod| pod["metadata"]["annotations"] = feeds);
    let mut world = World::new(&server, Kubernetes { ports: vec![8000, 8001], ..by_selector() });
    world.until_urls(&["10.0.0.1:8000", "10.0.0.1:8001"]).await;
    let feed = |spec: &WorkerSpec| (spec.kv_events[0].endpoint.clone(), spec.kv_events[0].replay.clone());
    assert_eq!(
        feed(spec(&world, "uid-p0001:8000")),
        ("tcp://10.0.0.1:5557".into(), Some("tcp://10.0.0.1:6000".into()))
    );
    assert_eq!(
        feed(spec(&world, "uid-p0001:8001")),
        ("tcp://10.0.0.1:5558".into(), Some("tcp://10.0.0.1:6001".into()))
    );
    assert_eq!(
        world.problems(),
        [
            "no pod in namespace serving declares the port 8001, which is used all the same; pod p0001 declares 8000: check \
          discovery.kubernetes.ports"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn annotations_say_how_the_engine_is_reached() {
    let server = Server::new();
    let all = json!({
        "kvlane.io/scheme": "https", "kvlane.io/kv-events-port": "5557, 5558",
        "kvlane.io/kv-events-replay-port": "5567", "kvlane.io/kv-events-topic": "kv@",
        "kvlane.io/tokenizer": "/models/qwen", "kvlane.io/model": "qwen", "sglang.ai/bootstrap-port": "8998",
        "unknown": "x",
    });
    server.set(&PODS, "serving", annotated("a", "fd00::1", all));
    let mut world = World::new(&server, by_selector());
    world.until("it", |targets, _| targets.workers.len() == 1).await;
    let feed = |port: u16| FeedSpec {
        endpoint: format!("tcp://[fd00::1]:{port}"),
        replay: Some(format!("tcp://[fd00::1]:{}", port + 10)),
        topic: "kv@".into(),
    };
    let expected = WorkerSpec {
        model: Some("qwen".into()),
        kv_events: vec![feed(5557), feed(5558)],
        bootstrap_port: Some(8998),
        tokenizer: Some("/models/qwen".into()),
        ..WorkerSpec::new("https://[fd00::1]:8000")
    };
    assert_eq!(*spec(&world, "uid-a:8000"), expected);
    assert_eq!(world.problems(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_annotation_that_is_wrong_is_told_and_costs_no_worker() {
    let server = Server::new();
    let wrong = json!({
        "kvlane.io/scheme": "ftp", "kvlane.io/kv-events-port": "many", "kvlane.io/kv-events-replay-port": "70000",
        "kvlane.io/kv-events-topic": "kv", "kvlane.io/tokenizer": " ", "kvlane.io/model": "",
        "sglang.ai/bootstrap-port": "0",
    });
    server.set(&PODS, "serving", annotated("a", "10.0.0.1", wrong));
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(*spec(&world, "uid-a:8000"), WorkerSpec::new("http://10.0.0.1:8000"));
    let told = world.problems().join("\n");
    for part in [
        "pod serving/a: the annotation kvlane.io/scheme is `ftp`: write http or https; http is used",
        "kvlane.io/kv-events-port is `many`: write a port from 1 to 65535",
        "kvlane.io/kv-events-replay-port is `70000`",
        "add kvlane.io/kv-events-port",
        "kvlane.io/tokenizer is ``",
        "kvlane.io/model is ``",
        "sglang.ai/bootstrap-port is `0`",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[tokio::test(start_paused = true)]
async fn bad_pods_are_told_and_cost_no_other() {
    let server = server_with(1);
    server.set(&PODS, "serving", with(pod("a", ""), |pod| pod["spec"]["hostNetwork"] = true.into()));
    server.set(&PODS, "serving", pod("b", "not an address"));
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(world.problems().len(), 2);
    assert!(
        world.problems()[0]
            .starts_with("pod serving/a: it is ready and has no IP address: see `kubectl describe")
    );
    assert_eq!(world.problems()[1], "pod serving/b: its address `not an address` is no IP address");
}

#[tokio::test(start_paused = true)]
async fn pods_of_one_node_that_use_its_network_have_their_ports() {
    let server = Server::new();
    for (name, port) in [("a", 8000), ("b", 8001), ("c", 8001)] {
        let on_node = with(pod(name, "192.168.0.1"), |pod| {
            pod["spec"]["hostNetwork"] = true.into();
            pod["spec"]["containers"][0]["ports"][0]["containerPort"] = port.into();
        });
        server.set(&PODS, "serving", on_node);
    }
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["192.168.0.1:8000", "192.168.0.1:8001"]).await;
    assert_eq!(world.problems().len(), 1, "{:?}", world.problems());
    assert!(
        world.problems()[0]
            .starts_with("pod serving/b: pod serving/c has the same address http://192.168.0.1:8001")
    );
}

#[tokio::test(start_paused = true)]
async fn many_problems_are_told_in_part() {
    let server = Server::new();
    for n in 0..60 {
        server.set(&PODS, "serving", pod(&format!("p{n:02}"), "no address"));
    }
    let mut world = World::new(&server, by_selector());
    world.until_left_out("and 10 more problems like these").await;
    assert_eq!(world.problems().len(), 51);
}
