use super::*;

#[tokio::test]
async fn dropped_doubled_and_swapped_batches_are_missing_double_and_swapped_and_the_replay_is_whole() {
    let config = MockConfig {
        kv_events_faults: "drop=0.2,duplicate=0.2,reorder=0.2".parse().expect("known"),
        ..feeding(MockConfig::default())
    };
    let engine = engine(config).await;
    let mut live = Client::subscribe(engine.feeds()[0].publisher, "").await;
    for n in 0..60 {
        complete(&engine, &format!("{n:>64}"), json!({})).await;
    }
    let counts = engine.feed_counts(0).expect("a feed");
    assert_eq!((counts.batches, counts.overflowed, counts.silenced), (60, 0, 0));
    assert!(counts.dropped > 0 && counts.duplicated > 0 && counts.reordered > 0, "{counts:?}");
    assert_eq!(batches(&engine).await.len(), 60);
    let mut distortion = Distortion::new("drop=0.2,duplicate=0.2,reorder=0.2".parse().expect("known"), 0);
    let mut expected = Vec::new();
    for seq in 0..60_u64 {
        distortion.pass(seq, &mut expected);
    }
    let mut got = Vec::new();
    for _ in 0..expected.len() {
        got.push(live.batch().await.0);
    }
    assert_eq!(got, expected);
}

#[tokio::test]
async fn a_delayed_batch_is_in_the_replay_before_it_is_published() {
    let config = MockConfig {
        kv_events_faults: "delay=3600s".parse().expect("known"),
        ..feeding(MockConfig::default())
    };
    let engine = engine(config).await;
    let mut live = Client::subscribe(engine.feeds()[0].publisher, "").await;
    complete(&engine, &"x".repeat(64), json!({})).await;
    assert_eq!(batches(&engine).await.len(), 1);
    // A batch that was not held back would come before the answer to this ping.
    live.connection.ping(0).expect("ready");
    live.flush().await;
    assert!(live.stream.read_buf(live.connection.input()).await.expect("open") > 0);
    assert_eq!(live.connection.poll(), Ok(None));
}

#[tokio::test]
async fn a_lie_is_stored_in_the_feed_and_not_in_the_cache() {
    let config =
        MockConfig { kv_events_faults: "lie=1".parse().expect("known"), ..feeding(MockConfig::default()) };
    let engine = engine(MockConfig { kv_cache_size: Some(16), ..config }).await;
    let prompt = "x".repeat(300);
    for times in 1..5 {
        let (_, cached) = complete(&engine, &prompt, json!({})).await;
        assert_eq!(cached, 0, "whatever the feed says");
        let mirror = Mirror::of(&batches(&engine).await);
        assert_eq!(mirror.cached_tokens(&prompt, None, None, 16), 64);
        assert_eq!(engine.feed_counts(0).expect("a feed").lies, times);
    }
}

#[tokio::test]
async fn a_silent_feed_takes_requests_and_does_not_answer() {
    let config =
        MockConfig { kv_events_faults: "silent=1".parse().expect("known"), ..feeding(MockConfig::default()) };
    let engine = engine(config).await;
    let FeedAddresses { publisher, replay, .. } = engine.feeds()[0];
    let mut live = Client::subscribe(publisher, "").await;
    complete(&engine, &"x".repeat(64), json!({})).await;
    assert_eq!(live.batch().await.0, 0);
    complete(&engine, &"y".repeat(64), json!({})).await;
    let counts = engine.feed_counts(0).expect("a feed");
    assert_eq!((counts.batches, counts.silenced), (2, 1));
    let mut asking = Client::connect(Socket::Dealer, replay.expect("configured")).await;
    asking.connection.send(&[b"".as_slice(), &[0; 8]]).expect("ready");
    for client in [&mut live, &mut asking] {
        client.connection.ping(0).expect("ready");
        client.flush().await;
        assert!(client.stream.read_buf(client.connection.input()).await.expect("open") > 0);
        assert_eq!(client.connection.poll(), Ok(None), "a pong and nothing else");
    }
}

#[tokio::test]
async fn a_slow_subscriber_misses_what_exceeds_its_queue_and_others_miss_nothing() {
    let outlet = Outlet::new(OutletConfig {
        topic: "kv".into(),
        replay_topic: true,
        buffer_steps: 100,
        hwm: 4,
        delay: std::time::Duration::ZERO,
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let task = tokio::spawn(publish::publisher(listener, outlet.clone()));
    let mut slow = Client::subscribe(address, "").await;
    // Nothing else runs until this task waits, so the queue fills and takes no more.
    let batch = |seq| Batch { seq, payload: Bytes::from_static(b"\x93") };
    for seq in 0..10 {
        outlet.publish(batch(seq), &[batch(seq)], fault::Fate::default());
    }
    assert_eq!((outlet.counts().batches, outlet.counts().overflowed), (10, 6));
    for seq in 0..4 {
        assert_eq!(number(&slow.message().await[1]), seq);
    }
    outlet.publish(batch(10), &[batch(10)], fault::Fate::default());
    assert_eq!(number(&slow.message().await[1]), 10, "the gap shows in the numbers");
    task.abort();
}

#[tokio::test]
async fn a_cut_feed_accepts_no_connection_until_it_is_restored_and_then_replays_missed_batches() {
    let engine = engine(feeding(MockConfig::default())).await;
    let feed = engine.feeds()[0];
    let mut subscriber = Client::subscribe(feed.publisher, "").await;
    complete(&engine, &"a".repeat(400), json!({})).await;
    subscriber.batch().await;
    engine.cause(Fault::CutFeed).expect("a fault");
    while subscriber.stream.read_buf(subscriber.connection.input()).await.is_ok_and(|read| read > 0) {}
    for address in [feed.publisher, feed.replay.expect("configured")] {
        let mut late = TcpStream::connect(address).await.expect("the port stays open");
        let mut read = Vec::new();
        late.read_to_end(&mut read).await.expect("closed");
        assert!(read.is_empty(), "not even a greeting");
    }
    complete(&engine, &"b".repeat(400), json!({})).await;
    engine.cause(Fault::RestoreFeed).expect("a cure");
    Client::subscribe(feed.publisher, "").await;
    assert!(batches(&engine).await.len() >= 2);
}

#[tokio::test]
async fn a_flood_tells_of_blocks_that_are_all_dropped_when_it_ends() {
    let engine = engine(feeding(MockConfig::default())).await;
    let mut subscriber = Client::subscribe(engine.feeds()[0].publisher, "").await;
    engine.cause(Fault::FloodFeed).expect("a fault");
    let (mut stored, mut removed) = (Vec::new(), Vec::new());
    let mut read = |batch: &Value| {
        for event in batch[1].as_array().expect("events") {
            let names = match event["type"].as_str() {
                Some("BlockStored") => &mut stored,
                _ => &mut removed,
            };
            names.extend(event["block_hashes"].as_array().expect("names").iter().cloned());
        }
    };
    for expected in 0..300 {
        let (seq, batch) = subscriber.batch().await;
        assert_eq!(seq, expected);
        read(&batch);
    }
    engine.cause(Fault::RestoreFeed).expect("a cure");
    let made = engine.feed_counts(0).expect("a feed").batches;
    for _ in 300..made {
        read(&subscriber.batch().await.1);
    }
    assert!(stored.len() >= 300 * FLOOD_BLOCKS as usize);
    assert_eq!(stored, removed, "in this order");
}
