//! What engines publish about their caches is known here, and nothing that goes wrong with it lasts or spreads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::Overlap;
use kvlane_core::truth::Feed;
use kvlane_live::config::{Config, FeedSpec, WorkerSpec};
use kvlane_live::gateway::ModelPool;
use kvlane_live::ingest::{EventFeed, Seen};
use kvlane_live::testing::{self, FakeEngine, FakeFeed, TestGateway, Told, batch, chat, eventually};
use kvlane_live::tokenize::TokenSource;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Tokens of a block of the engines here.
const BLOCK: u32 = 4;

/// Engines count the tokens of prompts, so what they say of their caches can be used.
fn config() -> Config {
    let mut config = testing::config();
    config.tokens.source = TokenSource::Engine;
    config
}

/// An engine with its feed, and what its cache holds.
struct Engine {
    http: FakeEngine,
    feed: FakeFeed,
    held: BTreeMap<u64, Vec<u32>>,
}

impl Engine {
    async fn start() -> Self {
        let (http, feed) = (FakeEngine::start("m").await, FakeFeed::start().await);
        Self { http, feed, held: BTreeMap::new() }
    }

    fn spec(&self, feeds: Vec<FeedSpec>) -> WorkerSpec {
        WorkerSpec { kv_events: feeds, ..WorkerSpec::new(self.http.url()) }
    }

    /// Stores the blocks of a prompt, one after the other, and returns the message.
    fn store(&mut self, prompt: u64, blocks: u64) -> Vec<u8> {
        let names: Vec<u64> = (0..blocks).map(|block| prompt * 1000 + block).collect();
        let tokens = tokens(prompt, blocks);
        for (n, name) in names.iter().enumerate() {
            self.held.insert(*name, tokens[..(n + 1) * BLOCK as usize].to_vec());
        }
        batch(None, &[Told::Stored(&names, None, &tokens, BLOCK, None)])
    }

    fn remove(&mut self, prompt: u64, block: u64) -> Vec<u8> {
        let name = prompt * 1000 + block;
        self.held.remove(&name).expect("it was stored");
        batch(None, &[Told::Removed(&[name])])
    }

    fn clear(&mut self) -> Vec<u8> {
        self.held.clear();
        batch(None, &[Told::Cleared])
    }
}

fn tokens(prompt: u64, blocks: u64) -> Vec<u32> {
    (0..blocks as u32 * BLOCK).map(|n| prompt as u32 * 10_000 + n).collect()
}

fn chain(tokens: &[u32], lora: Option<&str>) -> Vec<BlockHash> {
    let mut chain = Vec::new();
    ChainSeed::new("m", lora, None).chain_tokens(tokens, BLOCK as usize, &mut chain);
    chain
}

/// A seat of a gateway with its feed.
struct Seat {
    pool: Arc<ModelPool>,
    endpoint: EndpointId,
    feed: Arc<EventFeed>,
}

impl Seat {
    fn of(gateway: &TestGateway, url: &str, rank: usize) -> Self {
        let worker = gateway.serving().fleet.find(url).expect("the worker is there");
        let seat = worker.state().seats[rank].clone();
        Self { pool: seat.pool, endpoint: seat.endpoint, feed: seat.feed.expect("it has a feed") }
    }

    fn seen(&self) -> Seen {
        self.feed.seen()
    }

    /// How many leading blocks it is known to hold of a prompt.
    fn overlap(&self, chain: &[BlockHash]) -> u32 {
        let mut overlap = Overlap::default();
        self.pool.router.exact().expect("events are taken").lookup(chain, &mut overlap);
        overlap.iter().find(|(id, _)| *id == self.endpoint).map_or(0, |(_, blocks)| blocks)
    }

    fn blocks(&self) -> u64 {
        self.pool.router.exact().expect("events are taken").blocks_of(self.endpoint)
    }

    /// Whether exactly the blocks that the engine holds are known.
    fn knows(&self, held: &BTreeMap<u64, Vec<u32>>) -> bool {
        self.blocks() == held.len() as u64
            && held.values().all(|tokens| {
                let chain = chain(tokens, None);
                let leading = (1..=chain.len())
                    .take_while(|&n| held.values().any(|held| held[..] == tokens[..n * BLOCK as usize]));
                self.overlap(&chain) == leading.count() as u32
            })
    }

    async fn becomes(&self, state: Feed, engine: &Engine) {
        let what = format!("{state:?} with what the engine holds");
        eventually(&what, || self.seen().state == state && self.knows(&engine.held)).await;
    }

    async fn is_right(&self, engine: &Engine) {
        self.becomes(Feed::Live, engine).await;
    }
}

/// A gateway that reads the feeds of these engines.
async fn gateway_with(mut config: Config, engines: &[&Engine]) -> (TestGateway, Vec<Seat>) {
    config.workers = engines.iter().map(|engine| engine.spec(vec![engine.feed.spec()])).collect();
    let gateway = TestGateway::start(config, &[]).await;
    let seats: Vec<Seat> = engines.iter().map(|engine| Seat::of(&gateway, &engine.http.url(), 0)).collect();
    for (engine, seat) in engines.iter().zip(&seats) {
        eventually("it is subscribed", || engine.feed.subscriptions() > 0 && seat.seen().connected).await;
    }
    (gateway, seats)
}

async fn gateway(engines: &[&Engine]) -> (TestGateway, Vec<Seat>) {
    gateway_with(config(), engines).await
}

#[tokio::test]
async fn what_engines_store_and_remove_is_known() {
    let (mut a, mut b) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway(&[&a, &b]).await;
    for prompt in 1..20 {
        let engine = if prompt % 2 == 0 { &mut a } else { &mut b };
        let message = engine.store(prompt, prompt);
        engine.feed.publish(message);
    }
    seats[0].is_right(&a).await;
    seats[1].is_right(&b).await;
    assert_eq!(seats[0].pool.router.block_tokens(), BLOCK, "the block size is learned");
    for (prompt, block) in [(18, 17), (18, 16), (4, 0)] {
        let message = a.remove(prompt, block);
        a.feed.publish(message);
    }
    seats[0].is_right(&a).await;
    assert_eq!(seats[0].overlap(&chain(&tokens(18, 18), None)), 16);
    let message = a.clear();
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    seats[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn blocks_of_an_adapter_are_found_under_its_name_only() {
    let a = Engine::start().await;
    let (gateway, seats) = gateway(&[&a]).await;
    let stored = tokens(1, 3);
    a.feed.publish(batch(None, &[Told::Stored(&[1, 2, 3], None, &stored, BLOCK, Some("sql"))]));
    eventually("they are known", || seats[0].overlap(&chain(&stored, Some("sql"))) == 3).await;
    assert_eq!(seats[0].overlap(&chain(&stored, None)), 0);
    gateway.end().await;
}

#[tokio::test]
async fn what_was_said_before_the_gateway_came_is_replayed() {
    let mut a = Engine::start().await;
    for prompt in 1..5 {
        let message = a.store(prompt, 3);
        a.feed.keep(message);
    }
    let (gateway, seats) = gateway(&[&a]).await;
    seats[0].is_right(&a).await;
    assert!(a.feed.replays() >= 1);
    gateway.end().await;
}

#[tokio::test]
async fn lost_repeated_and_late_messages_leave_no_trace() {
    let mut a = Engine::start().await;
    let (gateway, seats) = gateway(&[&a]).await;
    seats[0].is_right(&a).await;
    for prompt in 1..60 {
        let message = a.store(prompt, 2);
        match prompt % 6 {
            0 => drop(a.feed.keep(message)),
            1 => {
                let seq = a.feed.publish(message.clone());
                a.feed.send(seq, message);
            }
            2 => {
                let seq = a.feed.keep(message.clone());
                let next = a.remove(prompt, 1);
                a.feed.publish(next);
                a.feed.send(seq, message);
            }
            _ => drop(a.feed.publish(message)),
        }
    }
    seats[0].is_right(&a).await;
    let seen = seats[0].seen().stream;
    assert!(seen.gaps > 0 && seen.duplicates > 0 && seen.replays > 0, "{seen:?}");
    assert_eq!(seen.lost, 0);
    gateway.end().await;
}

#[tokio::test]
async fn what_no_replay_brings_back_costs_everything_before_it_and_nothing_after() {
    let (mut a, mut b) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        let message = engine.store(1, 5);
        engine.feed.publish(message);
    }
    seats[0].is_right(&a).await;
    a.feed.forget_history();
    a.feed.lose(3);
    a.held.clear();
    let message = a.store(2, 2);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    assert!(seats[0].seen().stream.lost >= 3);
    seats[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn without_a_replay_socket_a_gap_costs_everything_before_it() {
    let mut a = Engine::start().await;
    let mut config = config();
    config.workers = vec![a.spec(vec![a.feed.spec_without_replay()])];
    let gateway = TestGateway::start(config, &[]).await;
    let seat = Seat::of(&gateway, &a.http.url(), 0);
    eventually("it is subscribed", || seat.seen().connected && a.feed.subscriptions() == 1).await;
    let message = a.store(1, 4);
    a.feed.publish(message);
    seat.is_right(&a).await;
    a.feed.lose(1);
    a.held.clear();
    let message = a.store(2, 3);
    a.feed.publish(message);
    seat.is_right(&a).await;
    a.feed.hang_up();
    a.held.clear();
    seat.is_right(&a).await;
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_starts_again_on_the_same_ports_is_another_engine() {
    let (mut a, mut b) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        for prompt in 1..5 {
            let message = engine.store(prompt, 5);
            engine.feed.publish(message);
        }
    }
    seats[0].is_right(&a).await;
    a.feed = a.feed.restart().await;
    a.held.clear();
    seats[0].is_right(&a).await;
    let message = a.store(1, 2);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    seats[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_connection_that_breaks_costs_nothing() {
    let mut a = Engine::start().await;
    let (gateway, seats) = gateway(&[&a]).await;
    let message = a.store(1, 5);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    for prompt in 2..6 {
        let subscriptions = a.feed.subscriptions();
        a.feed.hang_up();
        let message = a.store(prompt, 2);
        a.feed.publish(message);
        eventually("it is back", || a.feed.subscriptions() > subscriptions).await;
        seats[0].is_right(&a).await;
    }
    let seen = seats[0].seen();
    assert!(seen.disconnects >= 4, "{seen:?}");
    assert_eq!((seen.stream.cleared, seen.stream.lost), (0, 0), "{seen:?}");
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_refused_connections_has_lost_everything() {
    let mut a = Engine::start().await;
    let (gateway, seats) = gateway(&[&a]).await;
    let message = a.store(1, 5);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    a.feed.forget_history();
    a.held.clear();
    seats[0].feed.start_over();
    seats[0].is_right(&a).await;
    gateway.end().await;
}

#[tokio::test]
async fn garbage_costs_its_sender_trust_and_nobody_else() {
    let (mut a, mut b) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        let message = engine.store(1, 5);
        engine.feed.publish(message);
    }
    seats[0].is_right(&a).await;
    let mut refusals = 0;
    for garbage in [&b"garbage"[..], b"", &[0xDD, 0xFF, 0xFF, 0xFF, 0xFF], &[0xC0], &[0x93, 1, 2, 3]] {
        a.feed.publish(garbage.to_vec());
        a.held.clear();
        seats[0].becomes(Feed::Refused, &a).await;
        refusals += 1;
        for prompt in 1..=16 {
            assert_eq!(seats[0].seen().refusals, refusals);
            let message = a.store(prompt, 2);
            a.feed.publish(message);
        }
        seats[0].is_right(&a).await;
    }
    for frames in [vec![b"one frame".to_vec()], vec![b"kv".to_vec(), b"7 bytes".to_vec(), vec![]]] {
        a.feed.send_frames(frames);
        a.held.clear();
        seats[0].becomes(Feed::Refused, &a).await;
        a.feed.hang_up();
        // What was forgotten is not asked for again: it is not known to be whole.
        eventually("it is believed again", || seats[0].seen().state == Feed::Live).await;
    }
    assert_eq!(seats[0].seen().undecodable, 7);
    seats[1].is_right(&b).await;
    assert_eq!(seats[1].seen().refusals, 0);
    gateway.end().await;
}

#[tokio::test]
async fn blocks_of_another_size_are_refused_until_the_engines_agree() {
    let (mut a, b) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway(&[&a, &b]).await;
    let message = a.store(1, 5);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    let names: Vec<u64> = (0..5).collect();
    let lie = batch(None, &[Told::Stored(&names, None, &tokens(9, 10), 2 * BLOCK, None)]);
    b.feed.publish(lie);
    eventually("it is refused", || seats[1].seen().state == Feed::Refused).await;
    let problem = seats[1].seen().problem.expect("a problem");
    assert!(problem.contains("8 tokens") && problem.contains(&a.http.url()), "{problem}");
    let readiness = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(readiness["kv_events"][0]["problem"], json!(problem));
    assert_eq!((readiness["kv_events"][0]["state"].as_str(), seats[1].blocks()), (Some("refused"), 0));
    seats[0].is_right(&a).await;

    // With the other one gone, its size is the pool's.
    let other = gateway.serving().fleet.find(&a.http.url()).expect("it is there");
    gateway.serving().fleet.remove(&other);
    eventually("it has left", || gateway.serving().fleet.workers().len() == 1).await;
    let more = batch(None, &[Told::Stored(&[7], None, &tokens(8, 2), 2 * BLOCK, None)]);
    b.feed.publish(more);
    eventually("it is believed", || seats[1].seen().state == Feed::Live && seats[1].blocks() == 6).await;
    assert_eq!(seats[1].pool.router.block_tokens(), 2 * BLOCK);
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_that_changes_its_block_size_is_refused() {
    let mut a = Engine::start().await;
    let (gateway, seats) = gateway(&[&a]).await;
    let message = a.store(1, 2);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    let both = [
        Told::Stored(&[1], None, &tokens(3, 1), BLOCK, None),
        Told::Stored(&[2], None, &tokens(4, 2), 2 * BLOCK, None),
    ];
    a.feed.publish(batch(None, &both));
    a.held.clear();
    seats[0].becomes(Feed::Refused, &a).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_that_stays_silent_is_not_believed() {
    let a = Engine::start().await;
    let mut config = config();
    config.kv_events.silent_after = Duration::from_millis(1);
    let (gateway, seats) = gateway_with(config, &[&a]).await;
    eventually("it is live", || seats[0].seen().state == Feed::Live).await;
    let ask = async |cached: u32| {
        let usage = json!({"prompt_tokens": 1000, "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached}});
        let answer = json!({"usage": usage}).to_string();
        let (reply, _) = tokio::join!(
            gateway.ask("POST", "/v1/chat/completions", chat("m", "hi")),
            a.http.answer(&answer)
        );
        assert_eq!(reply.status, 200);
        gateway.ledger_is_zero().await;
    };
    ask(1000).await;
    assert_eq!(seats[0].seen().silences, 0, "an answer from the cache changes nothing in it");
    ask(0).await;
    eventually("it is silent", || seats[0].seen().state == Feed::Syncing).await;
    let problem = seats[0].seen().problem.expect("a problem");
    assert!(problem.starts_with("silent"), "{problem}");
    a.feed.publish(batch(None, &[]));
    eventually("it has spoken", || seats[0].seen().state == Feed::Live).await;
    assert_eq!(seats[0].seen().silences, 1);
    gateway.end().await;
}

#[tokio::test]
async fn each_rank_has_a_feed_of_its_own_and_tells_of_no_other() {
    let http = FakeEngine::start("m").await;
    let feeds = [FakeFeed::start().await, FakeFeed::start().await];
    http.set_kv_event_sources(&FakeFeed::sources(&[&feeds[0], &feeds[1]]));
    let gateway = TestGateway::start(config(), &[&http]).await;
    let seats = [Seat::of(&gateway, &http.url(), 0), Seat::of(&gateway, &http.url(), 1)];
    for (rank, (feed, seat)) in feeds.iter().zip(&seats).enumerate() {
        assert_eq!(*seat.feed.name, *format!("{}#{rank}", http.url()));
        eventually("it is subscribed", || feed.subscriptions() > 0 && seat.seen().connected).await;
        let blocks = rank as u64 + 1;
        let (names, tokens) = ((0..blocks).collect::<Vec<_>>(), tokens(1, blocks));
        feed.publish(batch(Some(rank as u32), &[Told::Stored(&names, None, &tokens, BLOCK, None)]));
        eventually("it is known", || seat.blocks() == blocks).await;
    }
    assert_eq!(seats[0].overlap(&chain(&tokens(1, 2), None)), 1);
    assert_eq!(seats[1].overlap(&chain(&tokens(1, 2), None)), 2);
    feeds[0].publish(batch(Some(1), &[]));
    eventually("it is refused", || seats[0].seen().state == Feed::Refused && seats[0].blocks() == 0).await;
    assert!(seats[0].seen().problem.expect("a problem").contains("rank 1 where rank 0"));
    assert_eq!((seats[1].seen().state, seats[1].blocks()), (Feed::Live, 2));
    gateway.end().await;
}

#[tokio::test]
async fn an_address_that_is_no_feed_is_told_to_operators() {
    let a = Engine::start().await;
    let web = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = web.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = web.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
            let _ = stream.read(&mut [0; 1024]).await;
        }
    });
    let mut config = config();
    config.workers = vec![a.spec(vec![FeedSpec::new(&format!("tcp://{address}"))])];
    let gateway = TestGateway::start(config, &[]).await;
    let seat = Seat::of(&gateway, &a.http.url(), 0);
    eventually("there is a problem", || seat.seen().problem.is_some()).await;
    assert_eq!(seat.seen().state, Feed::Syncing);
    let workers = gateway.operate("GET", "/workers", "").await.json();
    let shown = &workers["workers"][0]["pools"][0]["kv_events"];
    assert_eq!((&shown["state"], &shown["found_by"]), (&json!("syncing"), &json!("configuration")));
    let problem = shown["problem"].as_str().expect("a problem");
    assert!(problem.contains(&address.to_string()) && problem.contains("not speak ZMTP"), "{problem}");
    gateway.end().await;
}

#[tokio::test]
async fn a_peer_that_says_nothing_is_given_up() {
    let a = Engine::start().await;
    let mute = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let mut config = config();
    config.kv_events.heartbeat = Duration::from_millis(5);
    config.workers =
        vec![a.spec(vec![FeedSpec::new(&format!("tcp://{}", mute.local_addr().expect("an address")))])];
    let gateway = TestGateway::start(config, &[]).await;
    let seat = Seat::of(&gateway, &a.http.url(), 0);
    eventually("it is given up", || {
        seat.seen().problem.is_some_and(|problem| problem.contains("no sign of life"))
    })
    .await;
    gateway.end().await;
}

#[tokio::test]
async fn where_nobody_publishes_nothing_is_missed() {
    let a = Engine::start().await;
    let nobody =
        TcpListener::bind("127.0.0.1:0").await.expect("a free port").local_addr().expect("an address");
    let mut config = config();
    config.kv_events.port = nobody.port();
    let gateway = TestGateway::start(config, &[&a.http]).await;
    let seat = Seat::of(&gateway, &a.http.url(), 0);
    eventually("it was tried", || seat.seen().problem.is_some()).await;
    assert_eq!(seat.seen().state, Feed::Absent);
    let readiness = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(
        (&readiness["kv_events"], &readiness["pools"][0]["prefix_knowledge"]),
        (&json!([]), &json!("approximate"))
    );
    gateway.end().await;
}

#[tokio::test]
async fn a_flood_beyond_the_queue_is_caught_up_with() {
    let mut a = Engine::start().await;
    let mut config = config();
    config.kv_events.queue_messages = 2;
    let (gateway, seats) = gateway_with(config, &[&a]).await;
    for prompt in 1..300 {
        let message = a.store(prompt, 3);
        a.feed.publish(message);
    }
    seats[0].is_right(&a).await;
    gateway.end().await;
}

#[tokio::test]
async fn nothing_of_a_worker_that_has_left_stays() {
    let (mut a, mut b) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        let message = engine.store(1, 5);
        engine.feed.publish(message);
    }
    seats[0].is_right(&a).await;
    seats[1].is_right(&b).await;
    let worker = gateway.serving().fleet.find(&a.http.url()).expect("it is there");
    gateway.serving().fleet.remove(&worker);
    let message = a.store(2, 5);
    a.feed.publish(message);
    let pool = gateway.pool("m");
    eventually("only the other's is held", || {
        pool.router.exact().expect("events are taken").blocks_held() == 5
            && gateway.serving().fleet.workers().len() == 1
    })
    .await;
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains(&a.http.url()), "{text}");
    seats[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn operators_see_each_feed() {
    let mut a = Engine::start().await;
    let (gateway, seats) = gateway(&[&a]).await;
    let message = a.store(1, 5);
    a.feed.publish(message);
    let message = a.remove(1, 4);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    let workers = gateway.operate("GET", "/workers", "").await.json();
    let pool = &workers["workers"][0]["pools"][0];
    let shown = &pool["kv_events"];
    let get = |key: &str| shown[key].clone();
    assert_eq!((get("state"), get("seq"), get("blocks")), (json!("live"), json!(1), json!(4)));
    assert_eq!(
        (get("block_tokens"), get("problem"), get("connected")),
        (json!(BLOCK), Value::Null, json!(true))
    );
    assert_eq!((&shown["events"]["stored"], &shown["events"]["removed"]), (&json!(5), &json!(1)));
    assert!(get("last_event_age_s").as_f64().is_some_and(|age| age >= 0.0), "{shown}");
    assert_eq!(pool["knowledge"], json!("exact"));
    let readiness = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(
        (&readiness["kv_events"], &readiness["pools"][0]["knowledge"]["exact"]),
        (&json!([]), &json!(1))
    );
    let worker = a.http.url();
    for (sample, expect) in [
        (format!("kvlane_kv_events_total{{worker=\"{worker}\",kind=\"stored\"}}"), 5.0),
        (format!("kvlane_kv_messages_total{{worker=\"{worker}\",kind=\"applied\"}}"), 2.0),
        (format!("kvlane_kv_incidents_total{{worker=\"{worker}\",kind=\"gap\"}}"), 0.0),
        (format!("kvlane_kv_feed_state{{worker=\"{worker}\",state=\"live\"}}"), 1.0),
        (format!("kvlane_kv_feed_state{{worker=\"{worker}\",state=\"refused\"}}"), 0.0),
        (format!("kvlane_kv_queue_messages{{worker=\"{worker}\"}}"), 0.0),
        (format!("kvlane_kv_blocks{{worker=\"{worker}\",model=\"m\"}}"), 4.0),
    ] {
        assert_eq!(gateway.metric(&sample).await, Some(expect), "{sample}");
    }
    let lag = gateway.metric(&format!("kvlane_kv_event_lag_seconds{{worker=\"{worker}\"}}")).await;
    assert!(lag.is_some_and(|lag| (0.0..60.0).contains(&lag)), "{lag:?}");
    gateway.end().await;
}

#[tokio::test]
async fn a_gateway_that_starts_again_knows_what_it_knew_and_what_was_said_since() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut config = config();
    config.kv_events.snapshot = Some(directory.path().join("kv.snapshot"));
    let (mut same, mut other) = (Engine::start().await, Engine::start().await);
    let (gateway, seats) = gateway_with(config.clone(), &[&same, &other]).await;
    for engine in [&mut same, &mut other] {
        for prompt in 1..8 {
            let message = engine.store(prompt, 4);
            engine.feed.publish(message);
        }
    }
    let message = same.remove(7, 3);
    same.feed.publish(message);
    seats[0].is_right(&same).await;
    seats[1].is_right(&other).await;
    drop(seats);
    assert!(gateway.shut_down().await);

    // One goes on meanwhile, and its replay does not reach back to its beginning; the other starts again.
    same.feed.forget_all_but_the_last();
    let message = same.store(9, 2);
    same.feed.keep(message);
    other.feed = other.feed.restart().await;
    other.held.clear();
    let message = other.store(1, 1);
    other.feed.keep(message);
    let (gateway, seats) = gateway_with(config.clone(), &[&same, &other]).await;
    seats[0].is_right(&same).await;
    seats[1].is_right(&other).await;
    assert_eq!(seats[0].seen().stream.cleared, 0, "all of it was true");
    drop(seats);
    assert!(gateway.shut_down().await);

    // Of what no replay reaches back to, nothing is believed.
    same.feed.forget_history();
    same.feed.lose(5);
    same.held.clear();
    let message = same.store(3, 2);
    same.feed.keep(message);
    let (gateway, seats) = gateway_with(config, &[&same]).await;
    let message = same.store(4, 1);
    same.feed.publish(message);
    seats[0].is_right(&same).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_used_costs_only_what_it_holds() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("kv.snapshot");
    std::fs::write(&path, "no snapshot").expect("written");
    let mut config = config();
    config.kv_events.snapshot = Some(path.clone());
    config.kv_events.snapshot_interval = Duration::from_millis(1);
    let mut a = Engine::start().await;
    let (gateway, seats) = gateway_with(config, &[&a]).await;
    let message = a.store(1, 4);
    a.feed.publish(message);
    seats[0].is_right(&a).await;
    let rewritten = || std::fs::read(&path).is_ok_and(|bytes| bytes.starts_with(b"kvlaneKV"));
    eventually("it is written anew", rewritten).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_whose_blocks_cannot_be_those_of_prompts_is_not_used() {
    let a = Engine::start().await;
    let mut config = config();
    config.tokens.source = TokenSource::Estimate;
    let (gateway, seats) = gateway_with(config, &[&a]).await;
    eventually("it is refused", || seats[0].seen().state == Feed::Refused).await;
    assert!(seats[0].seen().problem.expect("a problem").contains("--tokenizer-path"));
    gateway.end().await;
}
