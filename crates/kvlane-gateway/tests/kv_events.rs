//! KV events: the gateway's index equals the engines' caches, whatever happens to messages, connections, engines and
//! the gateway itself.

use std::time::Duration;

use kvlane_gateway::testing::{
    BLOCK, CachingEngine, FeedEndpoint, TestGateway, Told, batch, caching_config as config, caching_gateway,
    chain, eventually, tokens,
};
use serde_json::{Value, json};

async fn gateway(engines: &[&CachingEngine]) -> (TestGateway, Vec<FeedEndpoint>) {
    caching_gateway(config(), engines).await
}

#[tokio::test]
async fn stored_and_removed_blocks_are_known() {
    let (mut a, mut b) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = gateway(&[&a, &b]).await;
    for prompt in 1..20 {
        let engine = if prompt % 2 == 0 { &mut a } else { &mut b };
        engine.publish(prompt, prompt);
    }
    endpoints[0].is_right(&a).await;
    endpoints[1].is_right(&b).await;
    assert_eq!(endpoints[0].pool.router.block_tokens(), BLOCK, "the block size is learned");
    for (prompt, block) in [(18, 17), (18, 16), (4, 0)] {
        let message = a.remove(prompt, block);
        a.feed.publish(message);
    }
    endpoints[0].is_right(&a).await;
    assert_eq!(endpoints[0].overlap(&chain(&tokens(18, 18), None)), 16);
    let message = a.clear();
    a.feed.publish(message);
    endpoints[0].is_right(&a).await;
    endpoints[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn blocks_of_an_adapter_are_found_with_its_name_only() {
    let a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    let stored = tokens(1, 3);
    a.feed.publish(batch(None, &[Told::Stored(&[1, 2, 3], None, &stored, BLOCK, Some("sql"))]));
    eventually("they are known", || endpoints[0].overlap(&chain(&stored, Some("sql"))) == 3).await;
    assert_eq!(endpoints[0].overlap(&chain(&stored, None)), 0);
    gateway.end().await;
}

#[tokio::test]
async fn events_from_before_the_gateway_started_are_replayed() {
    let mut a = CachingEngine::start().await;
    for prompt in 1..5 {
        let message = a.store(prompt, 3);
        a.feed.keep(message);
    }
    let (gateway, endpoints) = gateway(&[&a]).await;
    endpoints[0].is_right(&a).await;
    assert!(a.feed.replays() >= 1);
    gateway.end().await;
}

/// Invariant: Predicted reuse equals the engine's reuse, whatever happens to messages and connections.
///
/// Also held by `what_is_known_is_what_engines_reuse_under_eviction`.
#[tokio::test]
async fn lost_repeated_and_late_messages_have_no_effect_in_the_end() {
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    endpoints[0].is_right(&a).await;
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
    endpoints[0].is_right(&a).await;
    let seen = endpoints[0].seen().stream;
    assert!(seen.gaps > 0 && seen.duplicates > 0 && seen.replays > 0, "{seen:?}");
    assert_eq!(seen.lost, 0);
    gateway.end().await;
}

#[tokio::test]
async fn a_gap_that_no_replay_fills_drops_all_earlier_blocks_and_no_later_ones() {
    let (mut a, mut b) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        engine.publish(1, 5);
    }
    endpoints[0].is_right(&a).await;
    a.feed.forget_history();
    a.feed.lose(3);
    a.held.clear();
    a.publish(2, 2);
    endpoints[0].is_right(&a).await;
    assert!(endpoints[0].seen().stream.lost >= 3);
    endpoints[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn without_a_replay_socket_a_gap_drops_all_earlier_blocks() {
    let mut a = CachingEngine::start().await;
    let mut config = config();
    config.workers = vec![a.spec(vec![a.feed.spec_without_replay()])];
    let gateway = TestGateway::start(config, &[]).await;
    let endpoint = FeedEndpoint::of(&gateway, &a.http.url(), 0);
    eventually("it is subscribed", || endpoint.seen().connected && a.feed.subscriptions() == 1).await;
    a.publish(1, 4);
    endpoint.is_right(&a).await;
    a.feed.lose(1);
    a.held.clear();
    a.publish(2, 3);
    endpoint.is_right(&a).await;
    a.feed.hang_up();
    a.held.clear();
    endpoint.is_right(&a).await;
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_restarts_on_the_same_ports_is_a_new_engine() {
    let (mut a, mut b) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        for prompt in 1..5 {
            engine.publish(prompt, 5);
        }
    }
    endpoints[0].is_right(&a).await;
    a.feed = a.feed.restart().await;
    a.held.clear();
    endpoints[0].is_right(&a).await;
    a.publish(1, 2);
    endpoints[0].is_right(&a).await;
    endpoints[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn a_broken_connection_costs_nothing() {
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    a.publish(1, 5);
    endpoints[0].is_right(&a).await;
    for prompt in 2..6 {
        let subscriptions = a.feed.subscriptions();
        a.feed.hang_up();
        a.publish(prompt, 2);
        eventually("it is back", || a.feed.subscriptions() > subscriptions).await;
        endpoints[0].is_right(&a).await;
    }
    let seen = endpoints[0].seen();
    assert!(seen.disconnects >= 4, "{seen:?}");
    assert_eq!((seen.stream.cleared, seen.stream.lost), (0, 0), "{seen:?}");
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_refused_connections_has_an_empty_cache() {
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    a.publish(1, 5);
    endpoints[0].is_right(&a).await;
    a.feed.forget_history();
    a.held.clear();
    endpoints[0].feed.start_over();
    endpoints[0].is_right(&a).await;
    gateway.end().await;
}

#[tokio::test]
async fn messages_dropped_from_a_full_queue_are_recovered() {
    let mut a = CachingEngine::start().await;
    let mut config = config();
    config.kv_events.queue_messages = 2;
    let (gateway, endpoints) = caching_gateway(config, &[&a]).await;
    for prompt in 1..300 {
        a.publish(prompt, 3);
    }
    endpoints[0].is_right(&a).await;
    gateway.end().await;
}

#[tokio::test]
async fn all_blocks_of_a_worker_that_has_left_are_removed() {
    let (mut a, mut b) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = gateway(&[&a, &b]).await;
    for engine in [&mut a, &mut b] {
        engine.publish(1, 5);
    }
    endpoints[0].is_right(&a).await;
    endpoints[1].is_right(&b).await;
    let worker = gateway.serving().controller.find(&a.http.url()).expect("it is there");
    gateway.serving().controller.remove(&worker);
    a.publish(2, 5);
    let pool = gateway.pool("m");
    eventually("only the other's is held", || {
        pool.router.exact().expect("events are taken").blocks_held() == 5
            && gateway.serving().controller.workers().len() == 1
    })
    .await;
    let text = gateway.operate("GET", "/metrics", "").await.text();
    assert!(!text.contains(&a.http.url()), "{text}");
    endpoints[1].is_right(&b).await;
    gateway.end().await;
}

#[tokio::test]
async fn operators_see_each_feed() {
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = gateway(&[&a]).await;
    a.publish(1, 5);
    let message = a.remove(1, 4);
    a.feed.publish(message);
    endpoints[0].is_right(&a).await;
    eventually("all messages are applied", || endpoints[0].feed.queue.figures().0 == 0).await;
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

/// Invariant: A snapshot is used only once a replay has confirmed it.
///
/// Also held by `a_file_with_a_changed_or_missing_byte_is_rejected`.
#[tokio::test]
async fn a_restarted_gateway_restores_blocks_and_applies_later_events() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut config = config();
    config.kv_events.snapshot = Some(directory.path().join("kv.snapshot"));
    let (mut same, mut other) = (CachingEngine::start().await, CachingEngine::start().await);
    let (gateway, endpoints) = caching_gateway(config.clone(), &[&same, &other]).await;
    for engine in [&mut same, &mut other] {
        for prompt in 1..8 {
            engine.publish(prompt, 4);
        }
    }
    let message = same.remove(7, 3);
    same.feed.publish(message);
    endpoints[0].is_right(&same).await;
    endpoints[1].is_right(&other).await;
    drop(endpoints);
    assert!(gateway.shut_down().await);

    // One engine runs on meanwhile, and its replay does not reach back to the beginning; the other restarts.
    same.feed.forget_all_but_the_last();
    let message = same.store(9, 2);
    same.feed.keep(message);
    other.feed = other.feed.restart().await;
    other.held.clear();
    let message = other.store(1, 1);
    other.feed.keep(message);
    let (gateway, endpoints) = caching_gateway(config.clone(), &[&same, &other]).await;
    endpoints[0].is_right(&same).await;
    endpoints[1].is_right(&other).await;
    assert_eq!(endpoints[0].seen().stream.cleared, 0, "all restored blocks are correct");
    drop(endpoints);
    assert!(gateway.shut_down().await);

    // Blocks that no replay confirms are not trusted.
    same.feed.forget_history();
    same.feed.lose(5);
    same.held.clear();
    let message = same.store(3, 2);
    same.feed.keep(message);
    let (gateway, endpoints) = caching_gateway(config, &[&same]).await;
    same.publish(4, 1);
    endpoints[0].is_right(&same).await;
    gateway.end().await;
}

#[tokio::test]
async fn an_unusable_snapshot_costs_only_its_entries() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("kv.snapshot");
    std::fs::write(&path, "no snapshot").expect("written");
    let mut config = config();
    config.kv_events.snapshot = Some(path.clone());
    config.kv_events.snapshot_interval = Duration::from_millis(1);
    let mut a = CachingEngine::start().await;
    let (gateway, endpoints) = caching_gateway(config, &[&a]).await;
    a.publish(1, 4);
    endpoints[0].is_right(&a).await;
    let rewritten = || std::fs::read(&path).is_ok_and(|bytes| bytes.starts_with(b"kvlaneKV"));
    eventually("it is written again", rewritten).await;
    gateway.end().await;
}
