//! Faulty KV event feeds: a fault affects the knowledge of its own endpoint only, is shown to operators, and ends
//! with its cause.

use std::time::Duration;

use kvlane_core::cache_accuracy::Feed;
use kvlane_fleet::tokenize::TokenSource;
use kvlane_gateway::config::FeedSpec;
use kvlane_gateway::testing::{
    BLOCK, CachingEngine, FakeEngine, FakeFeed, FeedEndpoint, TestGateway, Told, batch,
    caching_config as config, caching_gateway, caching_gateway_at_speed, chain, chat, eventually, tokens,
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

async fn gateway(engines: &[&CachingEngine]) -> (TestGateway, Vec<FeedEndpoint>) {
    caching_gateway(config(), engines).await
}

/// Invariant: A bad feed affects its own endpoint only.
///
/// Also held by `a_feed_with_another_block_size_is_refused_until_the_engines_agree`.
#[tokio::test]
async fn invalid_messages_affect_only_their_own_endpoint() {
    let (mut a, mut b) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        engine.publish(1, 5);
    }
    endpoints[0].is_right(&a).await;
    let mut refusals = 0;
    for garbage in [&b"garbage"[..], b"", &[0xDD, 0xFF, 0xFF, 0xFF, 0xFF], &[0xC0], &[0x93, 1, 2, 3]] {
        a.feed.publish(garbage.to_vec());
        a.held.clear();
        endpoints[0].becomes(Feed::Refused, &a).await;
        refusals += 1;
        for prompt in 1..=16 {
            assert_eq!(endpoints[0].seen().refusals, refusals);
            a.publish(prompt, 2);
        }
        endpoints[0].is_right(&a).await;
    }
    for frames in [vec![b"one frame".to_vec()], vec![b"kv".to_vec(), b"7 bytes".to_vec(), vec![]]] {
        a.feed.send_frames(frames);
        a.held.clear();
        endpoints[0].becomes(Feed::Refused, &a).await;
        a.feed.hang_up();
        // Dropped blocks are not requested again, because the replay may be incomplete.
        eventually("it is trusted again", || endpoints[0].seen().state == Feed::Live).await;
    }
    assert_eq!(endpoints[0].seen().undecodable, 7);
    endpoints[1].is_right(&b).await;
    assert_eq!(endpoints[1].seen().refusals, 0);
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_with_another_block_size_is_refused_until_the_engines_agree() {
    let (mut a, b) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = gateway(&[&a, &b]).await;
    a.publish(1, 5);
    endpoints[0].is_right(&a).await;
    let names: Vec<u64> = (0..5).collect();
    let lie = batch(None, &[Told::Stored(&names, None, &tokens(9, 10), 2 * BLOCK, None)]);
    b.feed.publish(lie);
    eventually("it is refused", || endpoints[1].seen().state == Feed::Refused).await;
    let problem = endpoints[1].seen().problem.expect("a problem");
    assert!(problem.contains("8 tokens") && problem.contains(&a.http.url()), "{problem}");
    let readiness = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(readiness["kv_events"][0]["problem"], json!(problem));
    assert_eq!((readiness["kv_events"][0]["state"].as_str(), endpoints[1].blocks()), (Some("refused"), 0));
    endpoints[0].is_right(&a).await;

    // Without the other endpoint, its size is the pool's.
    let other = gateway.serving().controller.find(&a.http.url()).expect("it is there");
    gateway.serving().controller.remove(&other);
    eventually("it has left", || gateway.serving().controller.workers().len() == 1).await;
    let more = batch(None, &[Told::Stored(&[7], None, &tokens(8, 2), 2 * BLOCK, None)]);
    b.feed.publish(more);
    eventually("it is trusted", || endpoints[1].seen().state == Feed::Live && endpoints[1].blocks() == 6)
        .await;
    assert_eq!(endpoints[1].pool.router.block_tokens(), 2 * BLOCK);
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_that_changes_its_block_size_is_refused() {
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    a.publish(1, 2);
    endpoints[0].is_right(&a).await;
    let both = [
        Told::Stored(&[1], None, &tokens(3, 1), BLOCK, None),
        Told::Stored(&[2], None, &tokens(4, 2), 2 * BLOCK, None),
    ];
    a.feed.publish(batch(None, &both));
    a.held.clear();
    endpoints[0].becomes(Feed::Refused, &a).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_silent_feed_is_not_trusted() {
    let a = CachingEngine::start().await;
    let mut config = config();
    config.kv_events.silent_after = Duration::from_millis(1);
    let (gateway, endpoints) = caching_gateway(config, &[&a]).await;
    eventually("it is live", || endpoints[0].seen().state == Feed::Live).await;
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
    assert_eq!(endpoints[0].seen().silences, 0, "a fully cached prompt changes no blocks");
    ask(0).await;
    eventually("it is silent", || endpoints[0].seen().state == Feed::Syncing).await;
    let problem = endpoints[0].seen().problem.expect("a problem");
    assert!(problem.starts_with("silent"), "{problem}");
    a.feed.publish(batch(None, &[]));
    eventually("it has sent a message", || endpoints[0].seen().state == Feed::Live).await;
    assert_eq!(endpoints[0].seen().silences, 1);
    gateway.end().await;
}

#[tokio::test]
async fn each_rank_has_its_own_feed() {
    let http = FakeEngine::start("m").await;
    let feeds = [FakeFeed::start().await, FakeFeed::start().await];
    http.set_kv_event_sources(&FakeFeed::sources(&[&feeds[0], &feeds[1]]));
    let gateway = TestGateway::start(config(), &[&http]).await;
    let endpoints = [FeedEndpoint::of(&gateway, &http.url(), 0), FeedEndpoint::of(&gateway, &http.url(), 1)];
    for (rank, (feed, endpoint)) in feeds.iter().zip(&endpoints).enumerate() {
        assert_eq!(*endpoint.feed.name, *format!("{}#{rank}", http.url()));
        eventually("it is subscribed", || feed.subscriptions() > 0 && endpoint.seen().connected).await;
        let blocks = rank as u64 + 1;
        let (names, tokens) = ((0..blocks).collect::<Vec<_>>(), tokens(1, blocks));
        feed.publish(batch(Some(rank as u32), &[Told::Stored(&names, None, &tokens, BLOCK, None)]));
        eventually("it is known", || endpoint.blocks() == blocks).await;
    }
    assert_eq!(endpoints[0].overlap(&chain(&tokens(1, 2), None)), 1);
    assert_eq!(endpoints[1].overlap(&chain(&tokens(1, 2), None)), 2);
    feeds[0].publish(batch(Some(1), &[]));
    eventually("it is refused", || endpoints[0].seen().state == Feed::Refused && endpoints[0].blocks() == 0)
        .await;
    assert!(endpoints[0].seen().problem.expect("a problem").contains("rank 1, expected rank 0"));
    assert_eq!((endpoints[1].seen().state, endpoints[1].blocks()), (Feed::Live, 2));
    gateway.end().await;
}

#[tokio::test]
async fn an_address_without_a_feed_is_shown_to_operators() {
    let a = CachingEngine::start().await;
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
    let endpoint = FeedEndpoint::of(&gateway, &a.http.url(), 0);
    eventually("there is a problem", || endpoint.seen().problem.is_some()).await;
    assert_eq!(endpoint.seen().state, Feed::Syncing);
    let workers = gateway.operate("GET", "/workers", "").await.json();
    let shown = &workers["workers"][0]["pools"][0]["kv_events"];
    assert_eq!((&shown["state"], &shown["found_by"]), (&json!("syncing"), &json!("configuration")));
    let problem = shown["problem"].as_str().expect("a problem");
    assert!(problem.contains(&address.to_string()) && problem.contains("not speak ZMTP"), "{problem}");
    gateway.end().await;
}

#[tokio::test]
async fn a_peer_that_sends_nothing_is_given_up() {
    let a = CachingEngine::start().await;
    let mute = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let mut config = config();
    config.kv_events.heartbeat = Duration::from_millis(5);
    config.workers =
        vec![a.spec(vec![FeedSpec::new(&format!("tcp://{}", mute.local_addr().expect("an address")))])];
    let gateway = TestGateway::start(config, &[]).await;
    let endpoint = FeedEndpoint::of(&gateway, &a.http.url(), 0);
    eventually("it is given up", || {
        endpoint.seen().problem.is_some_and(|problem| problem.contains("no data or heartbeat"))
    })
    .await;
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_without_a_feed_is_no_error() {
    let a = CachingEngine::start().await;
    let unused =
        TcpListener::bind("127.0.0.1:0").await.expect("a free port").local_addr().expect("an address");
    let mut config = config();
    config.kv_events.port = unused.port();
    let gateway = TestGateway::start(config, &[&a.http]).await;
    let endpoint = FeedEndpoint::of(&gateway, &a.http.url(), 0);
    eventually("it was tried", || endpoint.seen().problem.is_some()).await;
    assert_eq!(endpoint.seen().state, Feed::Absent);
    let readiness = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(
        (&readiness["kv_events"], &readiness["pools"][0]["prefix_knowledge"]),
        (&json!([]), &json!("approximate"))
    );
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_whose_block_hashes_cannot_match_prompts_is_not_used() {
    let a = CachingEngine::start().await;
    let mut config = config();
    config.tokens.source = TokenSource::Estimate;
    let (gateway, endpoints) = caching_gateway(config, &[&a]).await;
    eventually("it is refused", || endpoints[0].seen().state == Feed::Refused).await;
    assert!(endpoints[0].seen().problem.expect("a problem").contains("--tokenizer-path"));
    gateway.end().await;
}

#[tokio::test]
async fn a_feed_that_reports_too_much_waits_without_delaying_others() {
    const NAMES: u64 = 150_000;
    let (a, mut b) = (CachingEngine::start().await, CachingEngine::start().await);
    // The gateway's clock stands still, so the allowance is not refilled.
    let (gateway, endpoints) = caching_gateway_at_speed(config(), &[&a, &b], 0.0).await;
    // Messages that arrive while it catches up are held, and applied at once.
    endpoints[0].is_right(&a).await;
    let names: Vec<u64> = (0..NAMES).collect();
    for _ in 0..10 {
        a.feed.publish(batch(None, &[Told::Removed(&names)]));
    }
    eventually("it waits", || endpoints[0].seen().events.unknown == 7 * NAMES).await;
    b.publish(1, 5);
    endpoints[1].is_right(&b).await;
    let reached = gateway.metric(r#"kvlane_limits_reached_total{limit="kv_event_work"}"#).await;
    assert_eq!(reached, Some(1.0));
    assert_eq!(endpoints[0].seen().events.unknown, 7 * NAMES);
    gateway.end().await;
}

#[tokio::test]
async fn a_message_with_too_many_block_hashes_is_invalid() {
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    a.publish(1, 5);
    endpoints[0].is_right(&a).await;
    let mut message = vec![0x92, 0x01, 0x91, 0x92, 0xAC];
    message.extend_from_slice(b"BlockRemoved\xDD");
    message.extend_from_slice(&15_000_000u32.to_be_bytes());
    message.resize(message.len() + 15_000_000, 0x07);
    a.feed.publish(message);
    a.held.clear();
    endpoints[0].becomes(Feed::Refused, &a).await;
    assert_eq!(endpoints[0].seen().undecodable, 1);
    gateway.end().await;
}
