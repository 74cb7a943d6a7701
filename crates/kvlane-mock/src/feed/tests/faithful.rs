use super::*;

/// Invariant: A subscriber of the mock's feed can predict every cache hit; each version's bytes are those of its own
/// publisher.
///
/// Also held by `every_versions_bytes_are_those_of_its_own_publisher`.
#[tokio::test]
async fn a_reader_of_the_feed_can_predict_the_cached_tokens_of_every_prompt() {
    let config = MockConfig {
        kv_cache_size: Some(60),
        lora_modules: vec!["tuned".into()],
        ..feeding(MockConfig::default())
    };
    let engine = engine(config).await;
    let mut live = Client::subscribe(engine.feeds()[0].publisher, "kv@").await;
    let mut mirror = Mirror::default();
    let (mut rng, mut seen, mut hits, mut removals) = (Rng::new(11), 0, 0, 0);
    let mut prompts: Vec<String> = (0..4).map(|n| format!("{n:>60} tokens of a prompt ").repeat(8)).collect();
    for round in 0..120 {
        let at = rng.below(prompts.len());
        let (lora, salt) = ([None, Some("tuned")][rng.below(2)], [None, Some("tenant")][rng.below(2)]);
        let prompt = prompts[at].clone();
        let expected = mirror.cached_tokens(&prompt, lora, salt, 16);
        let more =
            json!({"model": lora.unwrap_or("mock"), "cache_salt": salt, "max_tokens": 1 + rng.below(40)});
        let (answer, cached) = complete(&engine, &prompt, more).await;
        assert_eq!(cached, expected, "round {round}");
        hits += u32::from(cached > 0);
        // The conversation goes on, or begins anew.
        prompts[at] = if prompt.len() < 2400 {
            prompt + &answer
        } else {
            format!("{round:>100} more of it ").repeat(9)
        };
        let made = engine.feed_counts(0).expect("a feed").batches;
        while seen < made {
            let (seq, batch) = live.batch().await;
            assert_eq!(seq, seen);
            removals += batch.to_string().matches("BlockRemoved").count();
            mirror.apply(&batch);
            seen += 1;
        }
        assert!(mirror.blocks.len() <= 60, "{}", mirror.blocks.len());
    }
    assert!(hits > 20 && removals > 100, "{hits} hits, {removals} removals");
    // A turn that goes on with an answer finds the answer's blocks too.
    let prompt = "y".repeat(16 * 4 * 2);
    let (answer, _) = complete(&engine, &prompt, json!({"max_tokens": 33})).await;
    let (_, cached) = complete(&engine, &format!("{prompt}{answer}"), json!({})).await;
    assert_eq!(cached, 4 * 16);
}

#[tokio::test]
async fn a_batch_is_what_vllm_would_write() {
    let config = MockConfig { lora_modules: vec!["a".into(), "b".into()], ..feeding(MockConfig::default()) };
    let engine = engine(config).await;
    complete(&engine, &"x".repeat(3 * 64), json!({"model": "b", "cache_salt": "s"})).await;
    let batches = batches(&engine).await;
    let [batch] = batches.as_slice() else { panic!("{batches:?}") };
    let [ts, events, rank] = batch.as_array().expect("an array").as_slice() else { panic!("{batch}") };
    assert!(ts.as_f64().is_some_and(|ts| ts > 1.6e9), "{ts}");
    assert_eq!(rank, 0);
    let mut event = events[0].clone();
    let names = event["block_hashes"].take();
    let expected = json!({
        "type": "BlockStored",
        "block_hashes": null,
        "parent_block_hash": null,
        "token_ids": vec![0x7878_7878_u32; 48],
        "block_size": 16,
        "lora_id": 2,
        "medium": "GPU",
        "lora_name": "b",
        "extra_keys": [["b", "s"], ["b"], ["b"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    });
    assert_eq!((event, names.as_array().map(Vec::len)), (expected, Some(3)));
    // What follows names the block it follows.
    complete(&engine, &"x".repeat(4 * 64), json!({"model": "b", "cache_salt": "s"})).await;
    let batches = self::batches(&engine).await;
    assert_eq!(batches[1][1][0]["parent_block_hash"], names[2]);
    assert_eq!(batches[1][1][0]["extra_keys"], json!([["b"]]));
}

#[tokio::test]
async fn a_long_prompt_is_a_batch_for_each_step_and_a_short_one_is_none() {
    let config = MockConfig { max_num_batched_tokens: 256, ..feeding(MockConfig::default()) };
    let engine = engine(config).await;
    complete(&engine, "too short", json!({})).await;
    complete(&engine, &"z".repeat(600 * 4), json!({"max_tokens": 17})).await;
    let stored: Vec<usize> = batches(&engine)
        .await
        .iter()
        .map(|batch| batch[1][0]["block_hashes"].as_array().expect("names").len())
        .collect();
    // Tokens 512 to 600 are five blocks and a half. The answer fills that one, and ends before it fills the next.
    assert_eq!(stored, [16, 16, 5, 1]);
}

#[tokio::test]
async fn a_replay_begins_where_it_is_told_and_ends_with_a_mark() {
    let config = MockConfig {
        kv_events_config: KvEventsConfig {
            buffer_steps: 6,
            ..feeding(MockConfig::default()).kv_events_config
        },
        ..MockConfig::default()
    };
    let engine = engine(config).await;
    for n in 0..10 {
        complete(&engine, &format!("{n:>64}"), json!({})).await;
    }
    let address = engine.feeds()[0].replay.expect("configured");
    let numbers = async |from| {
        let replayed = replay(address, from).await;
        replayed.into_iter().map(|(_, seq, _)| seq).collect::<Vec<_>>()
    };
    assert_eq!(numbers(0).await, [4, 5, 6, 7, 8, 9], "only the last six are kept");
    assert_eq!(numbers(7).await, [7, 8, 9]);
    assert_eq!(numbers(10).await, [0; 0]);
    assert_eq!(numbers(u64::MAX).await, [0; 0]);
    // What is no request gets no answer, and the next one does.
    let mut client = Client::connect(Socket::Dealer, address).await;
    client.connection.send(&[b"lone"]).expect("ready");
    client.connection.send(&[b"".as_slice(), &9_u16.to_be_bytes()]).expect("ready");
    assert_eq!(number(&client.message().await[2]), 9);
}

#[tokio::test]
async fn every_version_writes_its_fields_and_replays_in_its_way() {
    for version in VERSIONS {
        let config = MockConfig { kv_events_version: version.to_string(), ..feeding(MockConfig::default()) };
        let engine = engine(config).await;
        complete(&engine, &"x".repeat(64), json!({})).await;
        let replayed = replay(engine.feeds()[0].replay.expect("configured"), 0).await;
        let (before, _, batch) = &replayed[0];
        let topic: Frames = vec![Bytes::new(), "kv@mock".into()];
        assert_eq!(before, &topic[..1 + usize::from(version.replays_topic())], "{version}");
        let event = &batch[1][0];
        assert_eq!(event.is_object(), version.writes_maps(), "{version}");
        let ids = event.get("token_ids").or(event.get(3)).expect("ids");
        assert_eq!(ids, &json!(vec![0x7878_7878_u32; 16]), "{version}");
    }
}

/// What the gateway's own decoder makes of an engine's batches: hashes by the engine's names, of all stored blocks.
async fn linked(engine: &MockEngine) -> Vec<BlockHash> {
    let mut client = Client::connect(Socket::Dealer, engine.feeds()[0].replay.expect("configured")).await;
    client.connection.send(&[b"".as_slice(), &[0; 8]]).expect("ready");
    let (mut batch, mut linker) = (kv::Batch::default(), kv::Linker::default());
    let mut known = BTreeMap::new();
    loop {
        let mut frames = client.message().await;
        let payload = frames.pop().expect("a payload");
        if payload.is_empty() {
            return known.into_values().collect();
        }
        kv::decode(&payload, &mut batch).expect("a batch");
        let before = known.clone();
        let seed = |lora: Option<&str>, salt: Option<&str>| ChainSeed::new("mock", lora, salt);
        let linked = linker.link(
            &batch,
            16,
            seed,
            |name| before.get(&name).copied(),
            |event| match event {
                KvEvent::Stored { blocks, .. } => {
                    known.extend(blocks.iter().map(|block| (block.name, block.hash)))
                }
                other => panic!("{other:?}"),
            },
        );
        assert_eq!((linked.unknown_parents, linked.other_block_size, linked.other_groups), (0, None, 0));
    }
}

#[tokio::test]
async fn what_every_version_writes_is_what_the_gateway_reads() {
    for (version, hashes) in
        VERSIONS.into_iter().zip([KvEventsHashes::Int, KvEventsHashes::Bytes].into_iter().cycle())
    {
        let config = MockConfig {
            kv_events_version: version.to_string(),
            kv_events_hashes: hashes,
            lora_modules: vec!["tuned".into()],
            ..feeding(MockConfig::default())
        };
        let engine = engine(config).await;
        let prompt = "some words of a prompt ".repeat(20);
        // Adapters are named since 0.14, and salts are told since 0.19.
        let (lora, salt) =
            if version >= Version(0, 19, 1) { (Some("tuned"), Some("tenant")) } else { (None, None) };
        complete(&engine, &prompt[..200], json!({"model": lora.unwrap_or("mock"), "cache_salt": salt})).await;
        complete(&engine, &prompt, json!({"model": lora.unwrap_or("mock"), "cache_salt": salt})).await;
        let mut expected = Vec::new();
        ChainSeed::new("mock", lora, salt).chain(prompt.as_bytes(), 64, &mut expected);
        let mut got = linked(&engine).await;
        expected.sort_unstable();
        got.sort_unstable();
        assert_eq!(got, expected, "{version} {hashes:?}");
    }
}

#[tokio::test]
async fn names_can_be_strings_of_32_bytes() {
    let config = MockConfig { kv_events_hashes: KvEventsHashes::Bytes, ..feeding(MockConfig::default()) };
    let engine = engine(config).await;
    complete(&engine, &"x".repeat(64), json!({})).await;
    let batch = batches(&engine).await.remove(0);
    assert_eq!(batch[1][0]["block_hashes"][0].as_array().map(Vec::len), Some(32));
}

#[tokio::test]
async fn a_reset_is_told_with_the_next_step_and_not_before() {
    let engine = engine(feeding(MockConfig::default())).await;
    let prompt = "x".repeat(64);
    complete(&engine, &prompt, json!({})).await;
    let (_, reset) = ask(&engine, "/reset_prefix_cache", json!({})).await;
    assert_eq!(reset["success"], true);
    assert_eq!(batches(&engine).await.len(), 1, "nothing yet");
    complete(&engine, &prompt, json!({})).await;
    let told = batches(&engine).await;
    let kinds: Vec<&Value> =
        told[1][1].as_array().expect("events").iter().map(|event| &event["type"]).collect();
    assert_eq!(kinds, ["AllBlocksCleared", "BlockStored"]);
    // A step that stores nothing is reported as well.
    ask(&engine, "/reset_prefix_cache", json!({})).await;
    complete(&engine, "short", json!({})).await;
    let told = batches(&engine).await;
    assert_eq!(told[2][1], json!([{"type": "AllBlocksCleared"}]));
    assert!(Mirror::of(&told).blocks.is_empty());
}

#[tokio::test]
async fn each_rank_has_its_own_engine_feed_and_metrics() {
    let engine = engine(MockConfig { data_parallel_size: 2, ..feeding(MockConfig::default()) }).await;
    let feeds = engine.feeds();
    assert_eq!(feeds.iter().map(|feed| feed.rank).collect::<Vec<_>>(), [0, 1]);
    let body = json!({"model": "mock", "prompt": "x".repeat(300), "max_tokens": 1}).to_string();
    let cached = async |rank| {
        let answer = text(send_to_rank(engine.addr(), "/v1/completions", body.clone(), rank).await).await;
        assert_eq!(answer.0, StatusCode::OK, "{}", answer.1);
        let answer: Value = serde_json::from_str(&answer.1).expect("JSON");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
    };
    assert_eq!((cached(Some(1)).await, cached(Some(1)).await, cached(Some(0)).await), (0, 64, 0));
    let batch = &replay(feeds[1].replay.expect("configured"), 0).await[0].2;
    assert_eq!(batch[2], 1);
    let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
    for (rank, hits) in [(0, 0), (1, 64)] {
        let line = format!("vllm:prefix_cache_hits_total{{engine=\"{rank}\",model_name=\"mock\"}} {hits}\n");
        assert!(page.contains(&line), "{page}");
        assert!(page.contains(&format!("engine=\"{rank}\",kv_cache_size_tokens")), "{page}");
    }
    assert_eq!(page.matches("# TYPE vllm:prefix_cache_hits_total").count(), 1);
    // Requests without a rank go to the ranks in turn.
    cached(None).await;
    cached(None).await;
    let (_, page) = text(send(engine.addr(), "/metrics", "").await).await;
    for (rank, finished) in [(0, 2), (1, 3)] {
        let line =
            format!("vllm:request_success_total{{engine=\"{rank}\",model_name=\"mock\"}} {finished}\n");
        assert!(page.contains(&line), "{page}");
    }
    let refused = text(send_to_rank(engine.addr(), "/v1/completions", body.clone(), Some(2)).await).await;
    assert_eq!(refused.0, StatusCode::BAD_REQUEST);
    assert!(refused.1.contains("must be 0 to 1"), "{}", refused.1);
}

#[tokio::test]
async fn sources_are_told_as_vllm_tells_them_with_the_ports_in_use() {
    let mut config = feeding(MockConfig { data_parallel_size: 2, ..MockConfig::default() });
    config.kv_events_config.endpoint = "tcp://*:0".into();
    let engine = engine(config).await;
    let (_, sources) = text(send(engine.addr(), "/kv_event_sources", "").await).await;
    let sources: Value = serde_json::from_str(&sources).expect("JSON");
    let feed = engine.feeds()[1];
    let expected = json!({
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": format!("tcp://*:{}", feed.publisher.port()),
        "replay_endpoint": format!("tcp://127.0.0.1:{}", feed.replay.expect("configured").port()),
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "kv@mock",
    });
    assert_eq!(sources["1"], expected);
    let silent = crate::testing::engine(MockConfig::default()).await;
    assert_eq!(text(send(silent.addr(), "/kv_event_sources", "").await).await.1, "{}");
    assert!(silent.feeds().is_empty() && silent.feed_counts(0).is_none());
}

#[tokio::test]
async fn a_taken_port_is_said_and_nothing_starts() {
    let first = engine(feeding(MockConfig::default())).await;
    let mut config = feeding(MockConfig::default());
    config.kv_events_config.endpoint = format!("tcp://{}", first.feeds()[0].publisher);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let error = MockEngine::start(config.clone(), listener).expect_err("taken").to_string();
    assert!(error.contains(&config.kv_events_config.endpoint) && error.contains("rank 0"), "{error}");
}

#[tokio::test]
async fn a_restarted_engine_begins_at_zero_with_the_same_names() {
    let config = feeding(MockConfig::default());
    let names = async |engine: &MockEngine| {
        complete(engine, &"x".repeat(300), json!({})).await;
        let mut told = batches(engine).await;
        assert_eq!(told.len(), 1);
        told[0][1][0]["block_hashes"].take()
    };
    let first = engine(config.clone()).await;
    let mut again = config;
    let [publisher, replay] = [first.feeds()[0].publisher, first.feeds()[0].replay.expect("configured")];
    again.kv_events_config.endpoint = format!("tcp://{publisher}");
    again.kv_events_config.replay_endpoint = Some(format!("tcp://{replay}"));
    let before = names(&first).await;
    let mut live = Client::subscribe(publisher, "").await;
    drop(first);
    assert_eq!(live.stream.read_buf(live.connection.input()).await.expect("closed in order"), 0);
    let second = engine(again).await;
    assert_eq!(names(&second).await, before);
}

#[tokio::test]
async fn only_subscribers_of_the_topic_receive_a_message() {
    let engine = engine(feeding(MockConfig::default())).await;
    let address = engine.feeds()[0].publisher;
    let mut all = Client::subscribe(address, "").await;
    let mut other = Client::subscribe(address, "kv@other").await;
    complete(&engine, &"x".repeat(64), json!({})).await;
    assert_eq!(all.batch().await.0, 0);
    other.connection.subscribe(b"kv@mock").expect("ready");
    other.connection.cancel(b"kv@other").expect("ready");
    other.connection.ping(0).expect("ready");
    other.flush().await;
    // The first that comes is the answer to the ping: no batch came before it.
    assert!(other.stream.read_buf(other.connection.input()).await.expect("open") > 0);
    assert_eq!(other.connection.poll(), Ok(None));
    complete(&engine, &"y".repeat(64), json!({})).await;
    assert_eq!(other.batch().await.0, 1);
}
