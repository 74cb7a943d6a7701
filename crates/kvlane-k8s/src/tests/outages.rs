//! What happens while the API server is away, silent, wrong, or refuses.

use super::*;
use crate::testing::Fault;

const BOTH: [&str; 2] = ["10.0.0.1:8000", "10.0.0.2:8000"];

async fn with_two() -> World {
    let mut world = World::new(&server_with(2), by_selector());
    world.until_urls(&BOTH).await;
    let server = world.server.clone();
    world.until("a watch", |_, _| server.watches() == 1).await;
    world
}

/// Waits until it asks no more than it should while something is wrong for a minute.
async fn asks_little(world: &mut World) {
    let (server, before, began) = (world.server.clone(), world.server.asked().len(), Instant::now());
    world.until("a minute", |_, _| began.elapsed() > Duration::from_secs(60)).await;
    let asked = server.asked().len() - before;
    assert!((6..=45).contains(&asked), "{asked} requests within a minute");
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_away_leaves_the_fleet_as_it_was() {
    let mut world = with_two().await;
    let server = world.server.clone();
    server.set_down(true);
    world.until_problem("connection refused").await;
    let confirmed = world.seen.status().confirmed;
    server.lose(&PODS, "serving", "p0001");
    server.set(&PODS, "serving", pod("p0003", "10.0.0.3"));
    asks_little(&mut world).await;
    assert_eq!(world.urls(), BOTH);
    assert_eq!(world.seen.status().confirmed, confirmed, "the age of what is known is told");
    server.set_down(false);
    let back = world.until_urls(&["10.0.0.2:8000", "10.0.0.3:8000"]).await;
    assert!(back <= Duration::from_millis(2100), "{back:?}");
    assert_eq!(world.seen.status().problem, None);
}

#[tokio::test(start_paused = true)]
async fn twenty_restarts_lose_nothing() {
    let mut world = with_two().await;
    let server = world.server.clone();
    for n in 0..20 {
        server.set_down(true);
        world.until_problem("pods in namespace serving").await;
        let name = format!("n{n:02}");
        server.set(&PODS, "serving", pod(&name, &format!("10.0.1.{n}")));
        server.set_down(false);
        world
            .until("the new one", |targets, status| {
                targets.workers.len() == 3 + n && status.problem.is_none()
            })
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_watches_in_time_is_in_contact() {
    let mut world = with_two().await;
    let server = world.server.clone();
    for _ in 0..5 {
        let before = world.seen.status().confirmed;
        let span = world.until("a sign of life", |_, status| status.confirmed > before).await;
        assert!(span <= Duration::from_secs(21), "{span:?}");
        assert_eq!(world.seen.status().problem, None);
    }
    let lists = server.asked().iter().filter(|path| !path.contains("watch=true")).count();
    assert_eq!(lists, 1, "it goes on from where it was");
    let before = world.seen.status().confirmed;
    server.bookmark();
    let span = world.until("a sign of life", |_, status| status.confirmed > before).await;
    assert!(span < Duration::from_secs(1), "{span:?}");
    server.compact();
    server.say("");
    let watched = server.asked().len();
    world.until("another watch", |_, _| server.asked().len() > watched).await;
    let last = server.asked().pop().expect("a request");
    assert!(
        last.contains("watch=true&") && last.ends_with("resourceVersion=103"),
        "from the bookmark on: {last}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_too_old_is_listed_again() {
    let mut world = with_two().await;
    let server = world.server.clone();
    server.set(&PODS, "other", pod("x", "10.0.0.9"));
    server.lose(&PODS, "serving", "p0001");
    server.compact();
    server.break_watches();
    world.until_urls(&["10.0.0.2:8000"]).await;
    // An HTTP status says the same as an event.
    server.lose(&PODS, "serving", "p0002");
    server.fault("watch=true", 1, Fault::Status(410, "too old resource version"));
    world
        .until("both are gone", |targets, status| {
            assert_eq!(status.problem, None, "it is no problem");
            targets.workers.is_empty()
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn what_is_known_is_as_old_as_its_oldest_part() {
    let server = server_with(1);
    server.set(&PODS, "other", pod("o", "10.0.9.1"));
    server.fault("namespaces/other/pods?labelSelector=app%3Dllm&watch", 1, Fault::Hung);
    let config = Kubernetes { namespaces: vec!["serving".into(), "other".into()], ..by_selector() };
    let mut world = World::new(&server, config);
    world.until_urls(&["10.0.0.1:8000", "10.0.9.1:8000"]).await;
    for n in 2..10 {
        server.set(&PODS, "serving", pod(&format!("p{n}"), &format!("10.0.0.{n}")));
        world.until("another", |targets, _| targets.workers.len() == n + 1).await;
        let began = Instant::now();
        world.until("two seconds", |_, _| began.elapsed() > Duration::from_secs(2)).await;
    }
    world.until_problem("cannot watch pods in namespace other: the API server was silent").await;
    let confirmed = world.seen.status().confirmed.expect("it was");
    let age = world.fleet.clock.now() - confirmed;
    assert!(age.0 > 20_000_000_000, "{age:?}");
}

#[tokio::test(start_paused = true)]
async fn versions_that_are_always_too_old_are_no_hot_loop() {
    let mut world = with_two().await;
    world.server.fault("watch=true", usize::MAX, Fault::Status(410, "too old resource version"));
    world.server.break_watches();
    asks_little(&mut world).await;
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_no_hot_loop() {
    let mut world = with_two().await;
    world.server.fault("watch=true", usize::MAX, Fault::Empty);
    world.server.break_watches();
    asks_little(&mut world).await;
    assert_eq!(world.urls(), BOTH);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_hangs_is_noticed() {
    let mut world = with_two().await;
    let server = world.server.clone();
    server.fault("watch=true", 1, Fault::Hung);
    server.break_watches();
    let asked = server.asked().len();
    world
        .until("a watch that hangs", |_, status| {
            assert_eq!(status.problem, None, "one broken connection is no problem");
            server.asked().len() == asked + 2
        })
        .await;
    server.set(&PODS, "serving", pod("p0003", "10.0.0.3"));
    let noticed = world
        .until_problem("cannot watch pods in namespace serving: the API server was silent for 25 s")
        .await;
    assert!(noticed <= Duration::from_secs(26), "{noticed:?}");
    world.until("the new one", |targets, _| targets.workers.len() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_is_noticed() {
    let mut world = with_two().await;
    world.server.fault("pods", usize::MAX, Fault::Silent);
    world.server.break_watches();
    world.until_problem("cannot list pods in namespace serving: the API server was silent for 10 s").await;
    world.server.mend();
    world.until("contact", |_, status| status.problem.is_none()).await;
    world.server.fault("pods", usize::MAX, Fault::Hung);
    world.server.break_watches();
    world.until_problem("the API server's answer did not end in time").await;
    assert_eq!(world.urls(), BOTH);
}

#[tokio::test(start_paused = true)]
async fn answers_that_are_garbage_or_cut_change_nothing() {
    let mut world = with_two().await;
    let server = world.server.clone();
    for (fault, problem) in [
        (Fault::Text("<html>Bad gateway</html>"), "cannot be understood (expected value at line 1"),
        (Fault::Text(""), "cannot be understood (EOF"),
        (Fault::Text(r#"{"items": [{"metadata": 7}]}"#), "is something between it and kvlane?"),
        (Fault::Text("{}"), "cannot be understood (missing field"),
        (Fault::Text(r#"{"metadata": {}, "items": []}"#), "it has no version, or objects without names"),
        (
            Fault::Text(r#"{"metadata": {"resourceVersion": "9"}, "items": [{}]}"#),
            "it has no version, or objects",
        ),
        (Fault::Cut(300), "connection reset"),
        (Fault::Status(503, "etcd is not ready"), "answered 503 (etcd is not ready)"),
        (Fault::Status(429, "too many requests"), "answered 429 (too many requests)"),
        (
            Fault::Status(401, "Unauthorized"),
            "answered 401 (Unauthorized): the token or certificate has expired",
        ),
    ] {
        server.fault("limit=", usize::MAX, fault);
        server.break_watches();
        world.until_problem(problem).await;
        asks_little(&mut world).await;
        assert_eq!(world.urls(), BOTH);
        server.mend();
        world.until("contact", |_, status| status.problem.is_none()).await;
        world.until("a watch", |_, _| server.watches() == 1).await;
    }
    for text in ["not json\n", "{\"type\":\"ADDED\",\"object\":[]}\n", "{\"type\":\"ODD\",\"object\":{}}\n"] {
        server.say(text);
        world
            .until_problem(
                "cannot watch pods in namespace serving: the API server's answer cannot be understood",
            )
            .await;
        world.until("contact", |_, status| status.problem.is_none()).await;
        world.until("a watch", |_, _| server.watches() == 1).await;
    }
    server.say(r#"{"type":"ERROR","object":{"code":500,"message":"etcd lost its leader"}}"#);
    server.say("\n");
    world.until_problem("answered 500 (etcd lost its leader)").await;
    assert_eq!(world.urls(), BOTH);
}

#[tokio::test(start_paused = true)]
async fn events_arrive_in_any_pieces() {
    let mut world = with_two().await;
    let event = json!({"type": "ADDED", "object": pod("p0003", "10.0.0.3")}).to_string();
    let (one, two) = event.split_at(200);
    for piece in ["\n\n", one, two, "\n", &event[..100]] {
        world.server.say(piece);
    }
    world.until("the new one", |targets, _| targets.workers.len() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_right_that_lacks_is_named_with_the_rule_that_grants_it() {
    for (verb, part) in [("list", "limit="), ("watch", "watch=true")] {
        let server = server_with(1);
        server.fault(part, usize::MAX, Fault::Status(403, "pods is forbidden: User \"x\" cannot"));
        let mut world = World::new(&server, by_selector());
        world.until_problem("403").await;
        let problem = world.seen.status().problem.expect("a problem");
        let expected = format!(
            "cannot {verb} pods in namespace serving: the API server answered 403 (pods is forbidden: User \"x\" cannot): \
             grant the service account `{verb}` on `pods` in namespace serving by a Role with the rule {{apiGroups: [\"\"], \
             resources: [\"pods\"], verbs: [\"list\", \"watch\"]}} (deploy/helm/kvlane, templates/role.yaml)"
        );
        assert_eq!(problem, expected);
        asks_little(&mut world).await;
        server.mend();
        world.until_urls(&["10.0.0.1:8000"]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_namespace_that_is_forbidden_costs_no_worker_of_another() {
    let server = server_with(1);
    server.fault("namespaces/other", usize::MAX, Fault::Status(403, "no"));
    let config = Kubernetes { namespaces: vec!["serving".into(), "other".into()], ..by_selector() };
    let mut world = World::new(&server, config);
    world.until("the one", |targets, _| told(targets) == ["10.0.0.1:8000"]).await;
    server.set(&PODS, "serving", pod("p0002", "10.0.0.2"));
    world.until("both", |targets, _| told(targets) == BOTH).await;
    let status = world.seen.status();
    assert!(status.problem.expect("a problem").contains("cannot list pods in namespace other"));
    assert_eq!(status.confirmed, None, "a part was never known");
    server.mend();
    world.until("all", |_, status| status.confirmed.is_some() && status.problem.is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn the_first_publication_waits_a_while_for_all_parts() {
    let server = server_with(1);
    server.set(&PODS, "other", pod("o", "10.0.9.1"));
    server.fault("namespaces/other", 3, Fault::Status(500, "not yet"));
    let config = Kubernetes { namespaces: vec!["serving".into(), "other".into()], ..by_selector() };
    let mut world = World::new(&server, config.clone());
    world.until_urls(&["10.0.0.1:8000", "10.0.9.1:8000"]).await;
    assert_eq!(world.published, 1);
    server.fault("namespaces/other", usize::MAX, Fault::Status(500, "not ever"));
    let mut world = World::new(&server, config);
    let waited = world.until("a part", |targets, _| told(targets) == ["10.0.0.1:8000"]).await;
    assert!((9..=11).contains(&waited.as_secs()), "{waited:?}");
    assert!(world.seen.status().problem.is_some_and(|problem| problem.contains("not ever")));
}

#[tokio::test(start_paused = true)]
async fn long_lists_come_in_pages_and_count_as_a_whole() {
    let server = server_with(1200);
    server.fault("continue=from%2F500", 1, Fault::Status(410, "the continue token is too old"));
    let mut world = World::new(&server, by_selector());
    world.until("all", |targets, _| targets.workers.len() == 1200).await;
    assert_eq!(world.published, 1);
    assert_eq!(server.asked().iter().filter(|path| path.contains("limit=250")).count(), 3 + 5);
}

#[tokio::test(start_paused = true)]
async fn a_selector_that_the_server_refuses_is_told() {
    let server = server_with(1);
    server.fault("limit=", usize::MAX, Fault::Status(400, "unable to parse requirement"));
    let mut world = World::new(&server, by_selector());
    world.until_problem("answered 400 (unable to parse requirement): check the label selector").await;
}
