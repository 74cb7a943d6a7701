//! Objects that an engine keeps: requests that name one reach its engine, or are told that it is lost.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvlane_gateway::config::Config;
use kvlane_gateway::testing::{Call, Client, FakeEngine, Reply, TestGateway, eventually, in_turn, next_call};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Conversations in flight at once.
const AT_ONCE: usize = 16;
/// Turns of a conversation.
const TURNS: u32 = 5;

/// An engine that keeps responses in memory. One that it does not know it ignores, and begins anew: the worst that an engine
/// could do.
struct KeepingEngine {
    engine: Arc<FakeEngine>,
    serving: JoinHandle<()>,
}

impl KeepingEngine {
    fn of(engine: FakeEngine, name: &str) -> Self {
        let engine = Arc::new(engine);
        let (serves, name) = (Arc::clone(&engine), name.to_owned());
        let serving = tokio::spawn(async move {
            let mut turns: HashMap<String, u64> = HashMap::new();
            let mut made = 0;
            loop {
                let call = serves.call().await;
                let body: Value = serde_json::from_slice(&call.body).expect("JSON");
                let before = body["previous_response_id"].as_str().and_then(|id| turns.get(id)).copied();
                let turn = before.unwrap_or(0) + 1;
                made += 1;
                let id = format!("resp_{name}_{made}");
                turns.insert(id.clone(), turn);
                let output = json!([{"type": "message", "id": "msg_1"}]);
                call.answer(200, &json!({"id": id, "turn": turn, "output": output}).to_string()).await;
            }
        });
        Self { engine, serving }
    }

    fn url(&self) -> String {
        self.engine.url()
    }

    /// Its process ends: all its connections close, and its port refuses others.
    async fn end(self) -> String {
        let authority = self.engine.authority().to_owned();
        self.serving.abort();
        let _ = self.serving.await;
        drop(Arc::into_inner(self.engine).expect("nothing else has it"));
        authority
    }
}

fn probing() -> Config {
    let mut config = in_turn();
    config.health.interval = Duration::from_millis(5);
    config
}

/// A conversation as its client sees it.
#[derive(Clone, Default)]
struct Conversation {
    last: Option<String>,
    turns: u64,
    /// Times it was told that its last response is lost.
    lost: u32,
}

/// The next turn of a conversation. One that is lost begins anew, because its client was told.
async fn take_turn(client: &mut Client, conversation: &mut Conversation) {
    loop {
        let body = json!({"model": "m", "input": "more", "previous_response_id": conversation.last});
        client.request("POST", "/v1/responses", &body.to_string()).await;
        let reply = client.reply().await;
        if reply.status == 404 && reply.error_code() == "object_lost" {
            assert!(conversation.last.is_some(), "{}", reply.text());
            *conversation = Conversation { lost: conversation.lost + 1, ..Conversation::default() };
            continue;
        }
        assert_eq!(reply.status, 200, "{}", reply.text());
        let answer = reply.json();
        conversation.turns += 1;
        assert_eq!(answer["turn"], conversation.turns, "it was begun anew in silence");
        conversation.last = answer["id"].as_str().map(str::to_owned);
        return;
    }
}

/// A turn of each conversation, several at once; returns how many are lost in it.
async fn round(gateway: &TestGateway, conversations: &Arc<Vec<Mutex<Conversation>>>) -> u32 {
    let lost = |all: &[Mutex<Conversation>]| -> u32 {
        all.iter().map(|one| one.lock().unwrap_or_else(PoisonError::into_inner).lost).sum()
    };
    let before = lost(conversations);
    let tasks: Vec<_> = (0..AT_ONCE)
        .map(|first| {
            let (conversations, address) = (Arc::clone(conversations), gateway.address());
            tokio::spawn(async move {
                let mut client = Client::connect(address).await;
                for one in conversations.iter().skip(first).step_by(AT_ONCE) {
                    let mut conversation = one.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    take_turn(&mut client, &mut conversation).await;
                    *one.lock().unwrap_or_else(PoisonError::into_inner) = conversation;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("all turns are right");
    }
    lost(conversations) - before
}

/// Invariant: A turn that names a stored response reaches the engine that has it, or is told that it is lost with its engine;
/// none begins anew in silence. `CONVERSATIONS` sets their number.
#[tokio::test]
async fn every_turn_reaches_its_engine_or_is_told_that_the_response_is_lost() {
    let count = std::env::var("CONVERSATIONS").map_or(64, |count| count.parse().expect("a number"));
    let mut engines = Vec::new();
    for name in ["a", "b", "c", "d"] {
        engines.push(KeepingEngine::of(FakeEngine::start("m").await, name));
    }
    let fakes: Vec<_> = engines.iter().map(|engine| Arc::clone(&engine.engine)).collect();
    let gateway = TestGateway::start(probing(), &fakes.iter().map(AsRef::as_ref).collect::<Vec<_>>()).await;
    drop(fakes);
    let conversations: Arc<Vec<_>> = Arc::new((0..count).map(|_| Mutex::default()).collect());
    let mut lost = 0;
    for _ in 0..3 {
        lost += round(&gateway, &conversations).await;
    }
    assert_eq!(lost, 0, "all engines are there");
    let ended = engines.remove(1);
    let (url, at_it) = (ended.url(), {
        let is_at_it = |one: &&Mutex<Conversation>| {
            let last = one.lock().unwrap_or_else(PoisonError::into_inner).last.clone();
            last.is_some_and(|id| id.starts_with("resp_b_"))
        };
        conversations.iter().filter(is_at_it).count()
    });
    assert!(at_it > 0);
    let authority = ended.end().await;
    // Some turns come while it is away, the others when it is there again.
    let mut turns: Vec<u32> = vec![round(&gateway, &conversations).await];
    let models = json!([{"id": "m", "object": "model", "root": "m", "parent": null}]);
    engines.push(KeepingEngine::of(FakeEngine::start_again(&authority, models).await, "e"));
    let healthy = || {
        let workers = gateway.fleet().workers();
        workers.values().any(|worker| *worker.url == *url && worker.state().healthy)
    };
    eventually("it is back", healthy).await;
    turns.push(round(&gateway, &conversations).await);
    assert_eq!(turns, [u32::try_from(at_it).expect("few"), 0], "each is told once");
    let all: Vec<Conversation> =
        conversations.iter().map(|one| one.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect();
    let whole = all.iter().filter(|one| one.turns == u64::from(TURNS)).count();
    assert_eq!(whole, all.len() - at_it, "the others have all their turns");
    gateway.end().await;
}

async fn one(
    gateway: &TestGateway,
    engines: &[&FakeEngine],
    method: &str,
    path: &str,
    body: &str,
    with: &str,
) -> (Reply, usize) {
    let (reply, maker) = tokio::join!(gateway.ask(method, path, body), async {
        let (maker, call) = next_call(engines).await;
        call.answer(200, with).await;
        maker
    });
    assert_eq!(reply.status, 200, "{}", reply.text());
    (reply, maker)
}

/// Answers of an engine that has these objects, by target, to whatever comes.
fn serve(engine: Arc<FakeEngine>, objects: &[(&str, &str)]) -> JoinHandle<()> {
    let objects: HashMap<String, String> =
        objects.iter().map(|(target, answer)| ((*target).to_owned(), (*answer).to_owned())).collect();
    tokio::spawn(async move {
        loop {
            let call: Call = engine.call().await;
            match objects.get(call.target()) {
                Some(answer) => call.answer(200, answer).await,
                None => call.answer(404, r#"{"error":{"message":"no such object"}}"#).await,
            }
        }
    })
}

#[tokio::test]
async fn what_a_batch_and_an_upload_make_is_at_their_engine() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    let gateway = TestGateway::start(in_turn(), &engines).await;
    for n in 0..3 {
        let (_, maker) =
            one(&gateway, &engines, "POST", "/v1/uploads", "{}", &format!(r#"{{"id":"upload_{n}"}}"#)).await;
        let complete = format!(r#"{{"id":"upload_{n}","file":{{"id":"file-in-{n}"}}}}"#);
        let path = format!("/v1/uploads/upload_{n}/complete");
        let mut makers = vec![one(&gateway, &engines, "POST", &path, "{}", &complete).await.1];
        let batch = format!(r#"{{"id":"batch_{n}","output_file_id":null}}"#);
        let body = format!(r#"{{"input_file_id":"file-in-{n}"}}"#);
        makers.push(one(&gateway, &engines, "POST", "/v1/batches", &body, &batch).await.1);
        let done = format!(r#"{{"id":"batch_{n}","output_file_id":"file-out-{n}"}}"#);
        makers.push(one(&gateway, &engines, "GET", &format!("/v1/batches/batch_{n}"), "", &done).await.1);
        let path = format!("/v1/files/file-out-{n}/content");
        makers.push(one(&gateway, &engines, "GET", &path, "", r#"{"id":"file-of-another"}"#).await.1);
        assert_eq!(makers, [maker; 4]);
        let conversation = format!(r#"{{"id":"conv_{n}"}}"#);
        let (_, maker) = one(&gateway, &engines, "POST", "/v1/conversations", "{}", &conversation).await;
        for named in [format!("\"conv_{n}\""), conversation] {
            let body = format!(r#"{{"model":"m","input":"a","conversation":{named}}}"#);
            assert_eq!(
                one(&gateway, &engines, "POST", "/v1/responses", &body, r#"{"id":"r"}"#).await.1,
                maker
            );
        }
    }
    gateway.end().await;
}

#[tokio::test]
async fn an_unknown_object_is_looked_for_and_an_unknown_response_is_not_begun_anew() {
    let (a, b) = (Arc::new(FakeEngine::start("m").await), Arc::new(FakeEngine::start("m").await));
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let batch = r#"{"id":"batch_1"}"#;
    let serving = [
        serve(Arc::clone(&a), &[]),
        serve(
            Arc::clone(&b),
            &[
                ("GET /v1/batches/batch_1", batch),
                ("POST /v1/batches/batch_1/cancel", batch),
                ("GET /v1/files/file-1", r#"{"id":"file-1"}"#),
                ("POST /v1/batches", r#"{"id":"batch_2"}"#),
            ],
        ),
    ];
    for (method, path, body, status) in [
        ("POST", "/v1/batches/batch_1/cancel", "", 200),
        ("GET", "/v1/batches/batch_1", "", 200),
        ("POST", "/v1/batches", r#"{"input_file_id":"file-1"}"#, 200),
        ("GET", "/v1/batches/batch_9", "", 404),
        ("POST", "/v1/batches", r#"{"input_file_id":"file-9"}"#, 404),
        ("POST", "/v1/responses", r#"{"model":"m","input":"a","previous_response_id":"resp_9"}"#, 404),
        ("POST", "/v1/responses", r#"{"model":"m","input":"a","conversation":{"id":"conv_9"}}"#, 404),
    ] {
        let reply = gateway.ask(method, path, body).await;
        assert_eq!(reply.status, status, "{path} {body}: {}", reply.text());
        if status == 404 {
            assert_eq!(reply.error_code(), "object_not_found", "{path} {body}");
        }
    }
    gateway.end().await;
    serving.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn an_engine_that_has_restarted_is_asked_for_what_it_may_have_on_disk() {
    let engine = FakeEngine::start("m").await;
    let other = FakeEngine::start("m").await;
    let gateway = TestGateway::start(in_turn(), &[&engine, &other]).await;
    let engines = [&engine, &other];
    let (_, maker) = one(&gateway, &engines, "POST", "/v1/files", "{}", r#"{"id":"file-1"}"#).await;
    let worker =
        gateway.fleet().workers().values().find(|worker| *worker.url == *engines[maker].url()).cloned();
    worker.expect("a worker").upstream.note_end();
    for (status, code) in [(200, ""), (404, "object_lost")] {
        let (reply, ()) = tokio::join!(gateway.ask("GET", "/v1/files/file-1/content", ""), async {
            let (asked, call) = next_call(&engines).await;
            assert_eq!(asked, maker);
            call.answer(status, "{}").await;
        });
        assert_eq!(reply.status, status);
        if status == 404 {
            assert_eq!(reply.error_code(), code);
            assert!(reply.text().contains("has ended or restarted"), "{}", reply.text());
        }
    }
    let lost =
        gateway.ask("POST", "/v1/responses", r#"{"model":"m","input":"a","conversation":"file-1"}"#).await;
    assert_eq!((lost.status, lost.error_code().as_str()), (404, "object_lost"), "what continues is not sent");
    gateway.end().await;
}

#[tokio::test]
async fn an_object_of_a_worker_that_has_left_is_lost() {
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let (_, maker) = one(&gateway, &[&a, &b], "POST", "/v1/files", "{}", r#"{"id":"file-1"}"#).await;
    gateway.ledger_is_zero().await;
    let url = [&a, &b][maker].url();
    let worker = gateway.serving().controller.find(&url).expect("a worker");
    gateway.serving().controller.remove(&worker);
    eventually("it has left", || gateway.fleet().workers().len() == 1).await;
    let reply = gateway.ask("GET", "/v1/files/file-1", "").await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "object_lost"));
    assert!(reply.text().contains("has left the fleet"), "{}", reply.text());
    gateway.end().await;
}

#[tokio::test]
async fn lists_are_merged_and_say_what_is_missing() {
    let (a, b) = (Arc::new(FakeEngine::start("m").await), Arc::new(FakeEngine::start("m").await));
    let gateway = TestGateway::start(in_turn(), &[&a, &b]).await;
    let list = |objects: &[(&str, u64)], has_more: bool| {
        let data: Vec<Value> = objects.iter().map(|(id, at)| json!({"id": id, "created_at": at})).collect();
        json!({"object": "list", "data": data, "has_more": has_more}).to_string()
    };
    let (first, second) = (list(&[("f4", 4)], true), list(&[("f1", 1)], false));
    let serving_a = serve(
        Arc::clone(&a),
        &[
            ("GET /v1/files?limit=100&purpose=batch", &first),
            ("GET /v1/files?limit=100&purpose=batch&after=f4", &second),
            ("GET /v1/files/f1", r#"{"id":"f1"}"#),
        ],
    );
    let of_b = list(&[("f3", 3), ("f2", 2)], false);
    let serving_b = serve(Arc::clone(&b), &[("GET /v1/files?limit=100&purpose=batch", &of_b)]);
    let ids = |reply: &Reply| -> Vec<String> {
        let data = reply.json()["data"].as_array().expect("a list").clone();
        data.iter().map(|object| object["id"].as_str().expect("an id").to_owned()).collect()
    };
    let whole = gateway.ask("GET", "/v1/files?purpose=batch", "").await;
    assert_eq!(
        (ids(&whole), whole.header("x-router-incomplete")),
        (vec!["f4".into(), "f3".into(), "f2".into(), "f1".into()], None)
    );
    let page = gateway.ask("GET", "/v1/files?purpose=batch&limit=2&after=f4", "").await;
    assert_eq!((ids(&page), &page.json()["has_more"]), (vec!["f3".into(), "f2".into()], &json!(true)));
    assert_eq!(gateway.ask("GET", "/v1/files/f1", "").await.status, 200, "a list says where its objects are");
    serving_b.abort();
    let _ = serving_b.await;
    let b = Arc::into_inner(b).expect("nothing else has it");
    drop(b);
    let part = gateway.ask("GET", "/v1/files?purpose=batch", "").await;
    assert_eq!(ids(&part), ["f4", "f1"]);
    let missing = part.header("x-router-incomplete").expect("told");
    assert!(missing.contains("1 of 2 workers"), "{missing}");
    gateway.end().await;
    serving_a.abort();
}

fn kept_in(path: &Path) -> Config {
    let mut config = in_turn();
    config.routing.index_snapshot = Some(path.into());
    config
}

#[tokio::test]
async fn objects_are_known_after_a_restart_of_the_gateway_unless_their_engine_has_restarted_too() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("index.snapshot");
    let (a, b) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    let engines = [&a, &b];
    engines.iter().for_each(|engine| engine.set_metrics("process_start_time_seconds 100.5\n"));
    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    let ask = r#"{"model":"m","input":"a"}"#;
    let (_, maker) = one(&gateway, &engines, "POST", "/v1/responses", ask, r#"{"id":"resp_1"}"#).await;
    gateway.end().await;
    let more = r#"{"model":"m","input":"a","previous_response_id":"resp_1"}"#;
    for _ in 0..2 {
        let gateway = TestGateway::start(kept_in(&path), &engines).await;
        let again = one(&gateway, &engines, "POST", "/v1/responses", more, r#"{"id":"resp_2"}"#).await.1;
        assert_eq!(again, maker);
        gateway.end().await;
    }
    engines[maker].set_metrics("process_start_time_seconds 200.5\n");
    let gateway = TestGateway::start(kept_in(&path), &engines).await;
    let lost = gateway.ask("POST", "/v1/responses", more).await;
    assert_eq!((lost.status, lost.error_code().as_str()), (404, "object_lost"));
    gateway.end().await;
}
