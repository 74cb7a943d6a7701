//! What replicas tell each other: loads, limits, prompts, breakers' findings, conversations.

use super::*;

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
    let in_turn = replica_with("round_robin");
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
    let in_turn = replica_with("round_robin");
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
    let sticky = replica_with("session_sticky");
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
