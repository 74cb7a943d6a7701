//! The whole path of KV events: mock engines tell what they cache, the gateway finds their feeds by itself, and what it
//! knows of each is what it then reuses, token by token.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use kvlane_core::block::ChainSeed;
use kvlane_core::cache_accuracy::Feed;
use kvlane_core::index::Overlap;
use kvlane_core::policy::PolicyConfig;
use kvlane_fleet::feed::Seen;
use kvlane_fleet::tokenize::TokenSource;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::testing::{Client, TestGateway, config, eventually, soon};
use kvlane_mock::{KvEventsConfig, KvEventsFaults, KvEventsHashes, MockConfig, MockEngine};
use serde_json::{Value, json};
use tokio::net::TcpListener;

const BLOCK_TOKENS: u32 = 16;
/// Few enough that conversations push each other out.
const BLOCKS: u32 = 48;

fn mock() -> MockConfig {
    MockConfig {
        model: "m".into(),
        speed: 1000.0,
        block_size: BLOCK_TOKENS,
        kv_cache_size: Some(BLOCKS),
        kv_events_config: KvEventsConfig::loopback(),
        ..MockConfig::default()
    }
}

async fn start(config: MockConfig) -> MockEngine {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    MockEngine::start(config, listener).expect("it starts")
}

/// A gateway that finds these engines' feeds by itself. In turn, so that every engine gets parts of every conversation.
async fn gateway(engines: &[&MockEngine]) -> TestGateway {
    let mut config: Config = config();
    config.routing.policy = PolicyConfig::by_name("round_robin").expect("a policy");
    config.tokens.source = TokenSource::Engine;
    config.workers =
        engines.iter().map(|engine| WorkerSpec::new(format!("http://{}", engine.addr()))).collect();
    TestGateway::start(config, &[]).await
}

/// Whether every feed is live: nothing is missing that it knows of.
fn all_live(gateway: &TestGateway, engines: &[&MockEngine]) -> bool {
    every_feed(gateway, engines, |seen, _| seen.state == Feed::Live)
}

/// Whether every feed is live, and all that each engine has told is applied.
fn caught_up(gateway: &TestGateway, engines: &[&MockEngine]) -> bool {
    every_feed(gateway, engines, |seen, told| {
        seen.state == Feed::Live && seen.seq.map_or(0, |seq| seq + 1) == told
    })
}

/// Whether this holds of what is seen of every feed, and of how many messages its engine has sent.
fn every_feed(gateway: &TestGateway, engines: &[&MockEngine], holds: impl Fn(Seen, u64) -> bool) -> bool {
    let controller = &gateway.serving().controller;
    engines.iter().all(|engine| {
        let worker = controller.find(&format!("http://{}", engine.addr())).expect("it is a worker");
        controller.endpoints_of(worker.id).iter().all(|(_, endpoint)| {
            let told = engine.feed_counts(endpoint.rank.number).expect("it has a feed").batches;
            holds(endpoint.feed.as_ref().expect("its feed was found").seen(), told)
        })
    })
}

/// What each endpoint is known to hold of a prompt, in tokens that it can reuse: not the last one, and whole blocks.
async fn known(gateway: &TestGateway, engine: &MockEngine, body: &Value) -> BTreeMap<String, u64> {
    let mut client = Client::connect(engine.addr()).await;
    let question = json!({"model": "m", "prompt": body["prompt"]});
    client.request("POST", "/tokenize", &question.to_string()).await;
    let tokens: Vec<u32> =
        serde_json::from_value(client.reply().await.json()["tokens"].clone()).expect("ids");
    let (mut chain, mut overlap) = (Vec::new(), Overlap::default());
    ChainSeed::new("m", None, None).chain_tokens(
        &tokens[..tokens.len() - 1],
        BLOCK_TOKENS as usize,
        &mut chain,
    );
    let router = &gateway.pool("m").router;
    router.exact().expect("events are taken").lookup(&chain, &mut overlap);
    let name = |id| router.read(|scheduler| scheduler.pool().get(id).expect("it is there").name.to_string());
    overlap.iter().map(|(id, blocks)| (name(id), u64::from(blocks * BLOCK_TOKENS))).collect()
}

/// Asks, and returns where the request went and what was reused there.
async fn ask(gateway: &TestGateway, body: &Value) -> (String, u64) {
    let reply = gateway.ask("POST", "/v1/completions", body.to_string()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    gateway.ledger_is_zero().await;
    let reused = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (reply.header("x-router-backend").expect("a backend").to_owned(), reused.expect("the mock tells"))
}

/// The prompt of a conversation's turn: everything that was said before, and more. All begin alike.
fn prompt(conversation: u32, turn: u32) -> Value {
    let mut text = "You are a helpful assistant, and so on. ".repeat(8);
    for said in 0..=turn {
        text.push_str(&format!("Turn {said} of conversation {conversation}: what about it? ").repeat(4));
    }
    json!({"model": "m", "prompt": text, "max_tokens": 3, "ignore_eos": true})
}

/// Has conversations, one request after the other, and compares what is known with what is reused. How many had
/// anything to reuse.
async fn converse(gateway: &TestGateway, engines: &[&MockEngine], conversations: u32) -> usize {
    let mut reusing = 0;
    for turn in 0..4 {
        for conversation in 0..conversations {
            eventually("all events are applied", || caught_up(gateway, engines)).await;
            let prompt = prompt(conversation, turn);
            let mut known = known(gateway, engines[0], &prompt).await;
            let (endpoint, reused) = ask(gateway, &prompt).await;
            let known = known.remove(&endpoint).unwrap_or(0);
            assert_eq!(known, reused, "turn {turn} of conversation {conversation} on {endpoint}");
            reusing += usize::from(reused > 0);
        }
    }
    reusing
}

async fn end(gateway: TestGateway, engines: Vec<MockEngine>) {
    gateway.end().await;
    for engine in engines {
        soon("the engine ends", engine.shutdown()).await;
    }
}

#[tokio::test]
async fn what_is_known_is_what_engines_reuse_under_eviction() {
    for (version, hashes) in
        [("0.9.2", KvEventsHashes::Int), ("0.23", KvEventsHashes::Bytes), ("0.33", KvEventsHashes::Int)]
    {
        let config = || MockConfig { kv_events_version: version.into(), kv_events_hashes: hashes, ..mock() };
        let engines = vec![start(config()).await, start(config()).await];
        let all: Vec<&MockEngine> = engines.iter().collect();
        let gateway = gateway(&all).await;
        let reusing = converse(&gateway, &all, 7).await;
        assert!(reusing > 10, "vLLM {version}: only {reusing} requests had anything to reuse");
        let text = gateway.operate("GET", "/metrics", "").await.text();
        let removed = text.lines().any(|line| {
            line.starts_with("kvlane_kv_events_total") && line.contains("removed") && !line.ends_with(" 0")
        });
        assert!(removed, "vLLM {version}: nothing was evicted");
        end(gateway, engines).await;
    }
}

#[tokio::test]
async fn each_data_parallel_rank_is_known_by_itself() {
    let engines = vec![start(MockConfig { data_parallel_size: 2, ..mock() }).await];
    let all: Vec<&MockEngine> = engines.iter().collect();
    let gateway = gateway(&all).await;
    assert!(converse(&gateway, &all, 5).await > 5);
    for rank in 0..2 {
        assert!(engines[0].feed_counts(rank).expect("a feed").batches > 0, "rank {rank} was sent nothing");
    }
    end(gateway, engines).await;
}

#[tokio::test]
async fn lost_repeated_and_late_messages_do_not_last() {
    let faults = KvEventsFaults { drop: 0.2, duplicate: 0.2, reorder: 0.2, ..KvEventsFaults::default() };
    let engines = vec![start(MockConfig { kv_events_faults: faults, ..mock() }).await, start(mock()).await];
    let all: Vec<&MockEngine> = engines.iter().collect();
    let gateway = gateway(&all).await;
    for turn in 0..4 {
        for conversation in 0..7 {
            ask(&gateway, &prompt(conversation, turn)).await;
        }
    }
    let counts = engines[0].feed_counts(0).expect("a feed");
    assert!(counts.dropped > 0 && counts.duplicated > 0 && counts.reordered > 0, "{counts:?}");
    assert_eq!(gateway.pool("m").router.block_tokens(), BLOCK_TOKENS, "the block size is learned");
    let mut nudges = 0;
    for conversation in 0..8 {
        // That the last message was lost shows with the next one, which may be lost as well. A feed that asks for what it
        // lacks is waited for: it asks some times a second, and more requests would only make more gaps.
        while !caught_up(&gateway, &all) {
            eventually("a feed catches up with what it knows of", || all_live(&gateway, &all)).await;
            assert!(nudges < 5000, "it never caught up");
            let mut client = Client::connect(engines[0].addr()).await;
            client.request("POST", "/v1/completions", &prompt(100 + nudges, 0).to_string()).await;
            assert_eq!(client.reply().await.status, 200);
            nudges += 1;
        }
        let prompt = prompt(conversation, 3);
        let mut known = known(&gateway, &engines[0], &prompt).await;
        let (endpoint, reused) = ask(&gateway, &prompt).await;
        assert_eq!(known.remove(&endpoint).unwrap_or(0), reused, "conversation {conversation} on {endpoint}");
    }
    end(gateway, engines).await;
}

#[tokio::test]
async fn an_engine_that_starts_again_on_its_ports_is_known_anew() {
    let mut engines = vec![start(mock()).await, start(mock()).await];
    let gateway = gateway(&engines.iter().collect::<Vec<_>>()).await;
    converse(&gateway, &engines.iter().collect::<Vec<_>>(), 4).await;

    let (http, feed) = (engines[0].addr(), engines[0].feeds()[0]);
    drop(engines.remove(0));
    let config = || {
        let mut config = mock();
        config.kv_events_config.endpoint = format!("tcp://{}", feed.publisher);
        config.kv_events_config.replay_endpoint = feed.replay.map(|replay| format!("tcp://{replay}"));
        config
    };
    // Its sockets close when its tasks have ended, which is soon.
    let again = loop {
        if let Ok(listener) = TcpListener::bind(http).await
            && let Ok(engine) = MockEngine::start(config(), listener)
        {
            break engine;
        }
        tokio::task::yield_now().await;
    };
    engines.insert(0, again);
    let all: Vec<&MockEngine> = engines.iter().collect();
    converse(&gateway, &all, 4).await;
    end(gateway, engines).await;
}
