//! Pods by an InferencePool, and InferenceObjectives.

use super::*;
use crate::collection::{OBJECTIVES, OLD_OBJECTIVES, OLD_REWRITES, POOLS, REWRITES};
use crate::testing::Fault;

fn by_pool() -> Kubernetes {
    Kubernetes { enabled: true, inference_pool: Some("pool".into()), ..Kubernetes::default() }
}

fn pool(labels: Value, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "metadata": {"name": "pool"},
        "spec": {"selector": {"matchLabels": labels}, "targetPorts": ports, "endpointPickerRef": {"name": "epp"}},
    })
}

fn objective(name: &str, priority: Value, pool: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"priority": priority, "poolRef": {"name": pool}}})
}

#[tokio::test(start_paused = true)]
async fn a_pool_appears_changes_and_disappears() {
    let server = server_with(2);
    server.set(
        &PODS,
        "serving",
        with(pod("other", "10.0.9.9"), |pod| pod["metadata"]["labels"]["app"] = "b".into()),
    );
    server.set(&PODS, "elsewhere", pod("not", "10.0.9.1"));
    let mut world = World::new(&server, by_pool());
    world.until_left_out("there is no InferencePool pool in namespace serving: create it, or check").await;
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000, 8001]));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "10.0.0.2:8001"]).await;
    assert_eq!(world.targets.workers[1].key, "uid-p0001:8001");
    world
        .until_left_out(
            "declares the port 8001, which is used all the same; pod p0001 declares 8000: check its",
        )
        .await;
    server.set(&POOLS, "serving", pool(json!({"app": "b"}), &[8000]));
    world.until_urls(&["10.0.9.9:8000"]).await;
    assert_eq!(server.watches(), 6, "the pool, its pods, and objectives and rewrites of two groups");
    server.set(&POOLS, "serving", pool(json!({"app": "none"}), &[8000]));
    world.until_left_out("selects no pod: no pod has the labels `app=none`; check its spec.selector").await;
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    server.delete(&POOLS, "serving", "pool");
    world.until_urls(&[]).await;
    world.until_left_out("there is no InferencePool pool").await;
}

#[tokio::test(start_paused = true)]
async fn workers_stay_while_the_pods_of_another_selector_are_listed() {
    let server = server_with(2);
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    let mut world = World::new(&server, by_pool());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    server.fault("app%3Db", usize::MAX, Fault::Status(500, "not now"));
    server.set(&POOLS, "serving", pool(json!({"app": "b"}), &[8000]));
    world.until_problem("answered 500 (not now)").await;
    assert_eq!(world.urls(), ["10.0.0.1:8000", "10.0.0.2:8000"]);
    server.mend();
    world.until_urls(&[]).await;
}

#[tokio::test(start_paused = true)]
async fn workers_stay_while_the_pools_of_two_namespaces_are_listed_again() {
    let server = server_with(1);
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    server.set(&POOLS, "other", pool(json!({"app": "llm"}), &[8000]));
    server.set(&PODS, "other", with(pod("o", "10.0.9.1"), |pod| pod["metadata"]["uid"] = "o".into()));
    let config = Kubernetes { namespaces: vec!["serving".into(), "other".into()], ..by_pool() };
    let mut world = World::new(&server, config);
    world.until_urls(&["10.0.0.1:8000", "10.0.9.1:8000"]).await;
    world.until("all watches", |_, _| server.watches() == 12).await;
    // The pods are not listed at once.
    server.fault("/pods?", 8, Fault::Status(403, "the API server has just started"));
    server.break_watches();
    let both = |targets: &Targets| assert_eq!(told(targets), ["10.0.0.1:8000", "10.0.9.1:8000"]);
    world
        .until("a problem", |targets, status| {
            both(targets);
            status.problem.is_some()
        })
        .await;
    world
        .until("contact", |targets, status| {
            both(targets);
            status.problem.is_none()
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_selects_nothing_or_wants_another_protocol_is_told() {
    let server = server_with(1);
    server.set(&POOLS, "serving", pool(json!({}), &[8000]));
    let mut world = World::new(&server, by_pool());
    world.until_left_out("the InferencePool pool in namespace serving selects nothing").await;
    let h2c = with(pool(json!({"app": "llm"}), &[8000]), |pool| {
        pool["spec"]["appProtocol"] = "kubernetes.io/h2c".into()
    });
    server.set(&POOLS, "serving", h2c);
    world.until_left_out("its engines are sent HTTP/1.1, which they must accept, too").await;
    assert_eq!(world.urls(), ["10.0.0.1:8000"]);
}

#[tokio::test(start_paused = true)]
async fn the_right_to_one_pool_is_enough() {
    let server = server_with(1);
    server.fault("inferencepools", 1, Fault::Status(403, "no"));
    let mut world = World::new(&server, by_pool());
    world
        .until_problem(
            "the rule {apiGroups: [\"inference.networking.k8s.io\"], resources: [\"inferencepools\"], resourceNames: \
             [\"pool\"], verbs: [\"list\", \"watch\"]}",
        )
        .await;
    let asks = |path: &String| path.contains("fieldSelector=metadata.name%3Dpool");
    assert!(
        server.asked().iter().filter(|path| path.contains("inferencepools")).all(asks),
        "{:?}",
        server.asked()
    );
}

#[tokio::test(start_paused = true)]
async fn a_definition_that_is_not_installed_is_named() {
    let server = server_with(1);
    server.set_absent(&["inference.networking.k8s.io", "llm-d.ai", "inference.networking.x-k8s.io"]);
    let mut world = World::new(&server, by_pool());
    world
        .until_problem(
            "the CustomResourceDefinition inferencepools.inference.networking.k8s.io (v1) is not installed: `kubectl apply",
        )
        .await;
    assert_eq!(world.seen.status().confirmed, None);
    server.set_absent(&["llm-d.ai", "inference.networking.x-k8s.io"]);
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(world.seen.status().problem, None, "objectives need not be there");
}

#[tokio::test(start_paused = true)]
async fn objectives_that_cannot_be_read_hold_nothing_back() {
    let server = server_with(1);
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    server.fault("inferenceobjectives", usize::MAX, Fault::Status(500, "conversion webhook failed"));
    let mut world = World::new(&server, by_pool());
    let took = world.until("the pod", |targets, _| told(targets) == ["10.0.0.1:8000"]).await;
    assert!(took < Duration::from_millis(100), "{took:?}");
    world.until_problem("cannot list inferenceobjectives in namespace serving").await;
}

#[tokio::test(start_paused = true)]
async fn objectives_of_both_groups_have_priorities() {
    let server = server_with(1);
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    server.set(&OBJECTIVES, "serving", objective("a", json!(5), "pool"));
    server.set(&OBJECTIVES, "serving", objective("b", Value::Null, "pool"));
    server.set(&OBJECTIVES, "serving", objective("c", json!(70_000), "pool"));
    server.set(&OBJECTIVES, "serving", objective("d", json!(-129), "pool"));
    server.set(&OBJECTIVES, "serving", objective("e", json!(1), "another pool"));
    server.set(&OLD_OBJECTIVES, "serving", objective("a", json!(-1), "pool"));
    server.set(&OLD_OBJECTIVES, "serving", objective("f", json!(-7), "pool"));
    let mut world = World::new(&server, by_pool());
    let fleet = Arc::clone(&world.fleet);
    let are = |expected: &[(&str, i8)]| {
        let all = fleet.discovery.objectives.load();
        all.iter().map(|(name, priority)| (name.as_str(), *priority)).eq(expected.iter().copied())
    };
    world.until("all", |_, _| are(&[("a", 5), ("b", 0), ("c", 100), ("d", -100), ("f", -7)])).await;
    server.set(&OBJECTIVES, "serving", objective("b", json!(2), "pool"));
    server.delete(&OBJECTIVES, "serving", "a");
    server.delete(&OBJECTIVES, "serving", "c");
    world.until("changes", |_, _| are(&[("a", -1), ("b", 2), ("d", -100), ("f", -7)])).await;
}

fn rewrite(name: &str, created: &str, pool: &str, rules: Value) -> Value {
    json!({
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"poolRef": {"name": pool}, "rules": rules},
    })
}

/// A rule that leads a model on.
fn leads(from: &[&str], to: &[(&str, Value)]) -> Value {
    let matches: Vec<Value> =
        from.iter().map(|from| json!({"model": {"type": "Exact", "value": from}})).collect();
    let targets: Vec<Value> =
        to.iter().map(|(model, weight)| json!({"modelRewrite": model, "weight": weight})).collect();
    json!({"matches": matches, "targets": targets})
}

#[tokio::test(start_paused = true)]
async fn rewrites_of_both_groups_are_names_of_models() {
    let server = server_with(1);
    server.set(&POOLS, "serving", pool(json!({"app": "llm"}), &[8000]));
    let canary = leads(&["gpt", "GPT"], &[("llama", json!(90)), ("llama-2", json!(10))]);
    let (later, earlier) = ("2026-02-01T00:00:00Z", "2026-01-01T00:00:00Z");
    server.set(
        &REWRITES,
        "serving",
        rewrite("a", later, "pool", json!([canary, leads(&["gpt"], &[("no", json!(1))])])),
    );
    server.set(
        &OLD_REWRITES,
        "serving",
        rewrite("b", earlier, "pool", json!([leads(&["GPT"], &[("first", Value::Null)])])),
    );
    server.set(
        &REWRITES,
        "serving",
        rewrite("c", earlier, "another pool", json!([leads(&["x"], &[("y", json!(1))])])),
    );
    let mut world = World::new(&server, by_pool());
    let fleet = Arc::clone(&world.fleet);
    let are = |expected: &[(&str, &[(&str, u32)])]| {
        let settings = fleet.settings();
        let targets = |name: &str| {
            let all = settings.models.get(name)?.targets.iter();
            Some(all.map(|target| (target.model.clone(), target.weight)).collect::<Vec<_>>())
        };
        settings.models.len() == expected.len()
            && expected.iter().all(|(name, expected)| {
                let expected = expected.iter().map(|(model, weight)| ((*model).to_owned(), *weight));
                targets(name) == Some(expected.collect())
            })
    };
    let canary: &[_] = &[("llama", 90), ("llama-2", 10)];
    world.until("all", |_, _| are(&[("GPT", &[("first", 1)]), ("gpt", canary)])).await;
    server.delete(&OLD_REWRITES, "serving", "b");
    world.until("the later one", |_, _| are(&[("GPT", canary), ("gpt", canary)])).await;
    server.set(
        &REWRITES,
        "serving",
        rewrite("a", later, "pool", json!([leads(&[], &[("llama", json!(1))])])),
    );
    world.until("none", |_, _| are(&[])).await;
    world.until_left_out("the InferenceModelRewrite a has a rule for all models, which has no effect").await;
    server.set(
        &REWRITES,
        "serving",
        rewrite("a", later, "pool", json!([leads(&["gpt"], &[("llama", json!(0))])])),
    );
    world.until_left_out("models.gpt: no target has a weight").await;
}
