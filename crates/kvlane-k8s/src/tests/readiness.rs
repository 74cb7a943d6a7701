//! When pods join, drain and leave.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_pod_joins_when_it_is_ready_and_has_an_address() {
    let server = Server::new();
    let mut world = World::new(&server, by_selector());
    world
        .until_left_out(
            "no pod in namespace serving has the labels `app=llm`: check discovery.kubernetes.selector",
        )
        .await;
    let starting = with(pod("a", ""), |pod| {
        set_ready(pod, false);
        pod["status"]["phase"] = "Pending".into();
    });
    server.set(&PODS, "serving", starting);
    world.until("no problem", |targets, _| targets.problems.is_empty()).await;
    server.change(&PODS, "serving", "a", |pod| pod["status"]["podIP"] = "10.0.0.1".into());
    server.set(&PODS, "serving", pod("b", "10.0.0.2"));
    world.until_urls(&["10.0.0.2:8000"]).await;
    server.change(&PODS, "serving", "a", |pod| set_ready(pod, true));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    assert_eq!(world.targets.workers[0].key, "uid-a:8000");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pod_drains_at_once_and_leaves_when_it_is_gone() {
    let server = server_with(3);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]).await;
    server.change(&PODS, "serving", "p0002", |pod| set_deleted(pod, 300));
    assert!(
        world.until_urls(&["10.0.0.1:8000", "!10.0.0.2:8000", "10.0.0.3:8000"]).await
            < Duration::from_millis(60)
    );
    server.delete(&PODS, "serving", "p0002");
    world.until_urls(&["10.0.0.1:8000", "10.0.0.3:8000"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_grace_has_passed_leaves_though_its_end_is_not_reported() {
    let server = server_with(2);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    server.change(&PODS, "serving", "p0001", |pod| set_deleted(pod, 30));
    world.until_urls(&["!10.0.0.1:8000", "10.0.0.2:8000"]).await;
    let left = world.until_urls(&["10.0.0.2:8000"]).await.as_secs_f64();
    // The cluster's clock, unlike the test's, does not stand still.
    assert!((20.0..41.0).contains(&left), "30 s of grace and 10 s more: {left}");
    // A forced deletion shortens what is left; a later one does not add to it.
    server.change(&PODS, "serving", "p0002", |pod| set_deleted(pod, 300));
    world.until_urls(&["!10.0.0.2:8000"]).await;
    server.change(&PODS, "serving", "p0002", |pod| set_deleted(pod, 0));
    world.until("that", |_, _| server.watches() == 1).await;
    server.change(&PODS, "serving", "p0002", |pod| set_deleted(pod, 300));
    let left = world.until_urls(&[]).await.as_secs_f64();
    assert!((9.0..12.0).contains(&left), "{left}");
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_grace_is_reckoned_from_its_end_and_never_more_than_the_grace() {
    let server = server_with(2);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    let now = k8s_openapi::jiff::Timestamp::now();
    let hour = Duration::from_secs(3600);
    // Seen late, as after an outage, or by a clock that is ahead; and by one that is behind.
    server.change(&PODS, "serving", "p0001", |pod| set_ends(pod, 300, now - hour));
    server.change(&PODS, "serving", "p0002", |pod| set_ends(pod, 60, now + hour));
    let left = world.until_urls(&["!10.0.0.2:8000"]).await.as_secs_f64();
    assert!((9.0..11.0).contains(&left), "{left}");
    let left = world.until_urls(&[]).await.as_secs_f64();
    assert!((59.0..61.0).contains(&left), "{left}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_has_ended_leaves() {
    let server = server_with(3);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]).await;
    server.change(&PODS, "serving", "p0001", |pod| pod["status"]["phase"] = "Failed".into());
    server.change(&PODS, "serving", "p0003", |pod| pod["status"]["phase"] = "Succeeded".into());
    world.until_urls(&["10.0.0.2:8000"]).await;
    assert_eq!(world.problems(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_terminates_before_it_was_ever_ready_does_not_join() {
    let server = server_with(1);
    server.set(&PODS, "serving", with(pod("z", "10.0.0.9"), |pod| set_deleted(pod, 30)));
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_not_ready_any_more_takes_no_new_requests_until_it_is() {
    let server = server_with(3);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]).await;
    server.change(&PODS, "serving", "p0002", |pod| set_ready(pod, false));
    world.until_urls(&["10.0.0.1:8000", "!10.0.0.2:8000", "10.0.0.3:8000"]).await;
    server.change(&PODS, "serving", "p0002", |pod| set_ready(pod, true));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]).await;
}

#[tokio::test(start_paused = true)]
async fn readiness_is_disregarded_while_more_than_half_are_not_ready() {
    let server = server_with(4);
    let mut world = World::new(&server, by_selector());
    world.until("four", |targets, _| targets.workers.len() == 4).await;
    for name in ["p0001", "p0002"] {
        server.change(&PODS, "serving", name, |pod| set_ready(pod, false));
    }
    world.until_urls(&["!10.0.0.1:8000", "!10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000"]).await;
    server.change(&PODS, "serving", "p0003", |pod| set_ready(pod, false));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000"]).await;
    world.until_left_out("3 of 4 workers are not ready any more, which is more than half").await;
    server.change(&PODS, "serving", "p0001", |pod| set_ready(pod, true));
    world.until_urls(&["10.0.0.1:8000", "!10.0.0.2:8000", "!10.0.0.3:8000", "10.0.0.4:8000"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_of_the_same_name_is_another_engine() {
    let server = server_with(1);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000"]).await;
    server.set(
        &PODS,
        "serving",
        with(pod("p0001", "10.0.0.1"), |pod| pod["metadata"]["uid"] = "again".into()),
    );
    world.until("another key", |targets, _| targets.workers[0].key == "again:8000").await;
}

#[tokio::test(start_paused = true)]
async fn an_address_that_is_used_again_belongs_to_the_newest_pod_that_stays() {
    let server = server_with(1);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000"]).await;
    let newer = |pod: &mut Value| pod["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z".into();
    server.set(&PODS, "serving", with(pod("new", "10.0.0.1"), newer));
    world
        .until_left_out(
            "pod serving/p0001: pod serving/new has the same address http://10.0.0.1:8000 and is newer",
        )
        .await;
    assert_eq!(world.targets.workers[0].key, "uid-new:8000");
    server.change(&PODS, "serving", "new", |pod| set_deleted(pod, 30));
    world.until("the one that stays", |targets, _| targets.workers[0].key == "uid-p0001:8000").await;
    server.delete(&PODS, "serving", "new");
    world.until("no problem", |targets, _| targets.problems.is_empty()).await;
    assert_eq!(world.urls(), ["10.0.0.1:8000"]);
}

#[tokio::test(start_paused = true)]
async fn a_burst_is_published_soon_and_in_few_pieces() {
    let server = server_with(1);
    let mut world = World::new(&server, by_selector());
    world.until_urls(&["10.0.0.1:8000"]).await;
    let began = Instant::now();
    world.until("a quiet second", |_, _| began.elapsed() > Duration::from_secs(1)).await;
    world.published = 0;
    for n in 2..=501 {
        server.set(&PODS, "serving", pod(&format!("p{n:04}"), &format!("10.0.{}.{}", n / 250, n % 250)));
    }
    let first = world.until("some", |targets, _| targets.workers.len() > 1).await;
    let all = world.until("all", |targets, _| targets.workers.len() == 501).await;
    assert!(first < Duration::from_millis(10) && all < Duration::from_millis(110), "{first:?} {all:?}");
    assert!(world.published <= 3, "{}", world.published);
}
