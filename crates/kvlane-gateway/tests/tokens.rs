//! Token counting by tokenizer, engine or estimate, and the comparison with the engine's own count.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use kvlane_control::parity_check;
use kvlane_core::cache_accuracy::Feed;
use kvlane_fleet::parity::Parity;
use kvlane_gateway::config::{Config, PoolOverride, TokenSource, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_gateway::testing::{
    FakeEngine, FakeFeed, Reply, TestGateway, Told, batch, chat, config, eventually,
};
use kvlane_tokens::{Prompt, Source, Tokenizer, UnixTime};
use kvlane_wire::api::Api;
use serde_json::{Value, json};
use tokio::net::TcpListener;

fn engine_counts() -> Config {
    let mut config = config();
    config.tokens.source = TokenSource::Engine;
    config
}

/// Counts like the mock engine, four bytes per token, which is what an estimate assumes.
fn as_estimated(question: &Value) -> Option<Vec<u32>> {
    let api = if question["messages"].is_null() { Api::Completions } else { Api::ChatCompletions };
    Some(parity_check::estimated(api, question.to_string().as_bytes()))
}

async fn ask(gateway: &TestGateway, engine: &FakeEngine, body: String) -> Reply {
    gateway.served(engine, body).await
}

async fn parity_of(gateway: &TestGateway, engine: &FakeEngine) -> Value {
    let workers = gateway.operate("GET", "/workers", "").await.json();
    let all = workers["workers"].as_array().expect("a list").clone();
    let its = all.into_iter().find(|worker| worker["url"] == engine.url()).expect("a worker");
    its["parity"].clone()
}

async fn estimates(gateway: &TestGateway, why: &str) -> Option<f64> {
    gateway.metric(&format!("kvlane_prompts_estimated_total{{model=\"m\",why=\"{why}\"}}")).await
}

async fn listed(models: Value) -> FakeEngine {
    FakeEngine::on(TcpListener::bind("127.0.0.1:0").await.expect("a port"), models)
}

#[tokio::test]
async fn an_engine_counts_if_configured() {
    let engine = FakeEngine::start("m").await;
    let gateway = TestGateway::start(engine_counts(), &[&engine]).await;
    engine.set_tokenizer(|question| {
        assert_eq!(question["messages"][0]["content"], "hi", "the engine gets the client's body");
        Some((0..99).collect())
    });
    for _ in 0..2 {
        ask(&gateway, &engine, chat("m", "hi")).await;
    }
    let decisions = gateway.decisions().await;
    assert_eq!(decisions[0]["prompt_tokens"], 99);
    assert_eq!(decisions[0]["overlap_tokens"], 96, "blocks are cut from the engine's tokens: 24 of 4");
    gateway.end().await;
}

#[tokio::test]
async fn a_prompt_that_the_engine_does_not_count_is_estimated_and_served() {
    let engine = FakeEngine::start("m").await;
    let mut config = engine_counts();
    let gateway = TestGateway::start(config.clone(), &[&engine]).await;
    ask(&gateway, &engine, chat("m", "hi")).await;
    assert_eq!(estimates(&gateway, "engine_refused").await, Some(1.0), "it has no /tokenize");
    gateway.end().await;
    config.tokens.engine_timeout = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engine]).await;
    engine.set_tokenizer(|_| None);
    ask(&gateway, &engine, chat("m", "hi")).await;
    assert_eq!(estimates(&gateway, "engine_failed").await, Some(1.0), "it does not answer in time");
    let embedding = json!({"model": "m", "input": "hi"}).to_string();
    let (reply, _) = tokio::join!(gateway.ask("POST", "/v1/embeddings", &embedding), engine.answer("{}"));
    assert_eq!(reply.status, 200);
    assert_eq!(estimates(&gateway, "api").await, Some(1.0), "it would not take such a body");
    let expect = parity_check::estimated(Api::ChatCompletions, chat("m", "hi").as_bytes()).len();
    assert_eq!(gateway.decisions().await[1]["prompt_tokens"], expect);
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_with_the_same_ids_is_verified() {
    let engine = FakeEngine::start("m").await;
    engine.set_tokenizer(as_estimated);
    let gateway = TestGateway::start(config(), &[&engine]).await;
    assert_eq!(parity_of(&gateway, &engine).await, json!({"state": "verified", "why": null}));
    let ready = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(ready["mismatched"], json!([]));
    assert_eq!(ready["pools"][0]["tokens"], json!({"source": "estimate"}));
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_counts_differently_is_reported_and_still_serves() {
    let engine = FakeEngine::start("m").await;
    engine.set_tokenizer(|_| Some(vec![1, 2, 3]));
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let parity = parity_of(&gateway, &engine).await;
    assert_eq!(parity["state"], "mismatch");
    let why = parity["why"].as_str().expect("a reason");
    assert!(why.contains("--tokenizer-path"), "{why}");
    let ready = gateway.operate("GET", "/readiness", "").await;
    assert_eq!(ready.status, 200, "it still serves with approximate knowledge");
    assert_eq!(ready.json()["mismatched"][0]["url"], engine.url());
    ask(&gateway, &engine, chat("m", "hi")).await;
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_cannot_be_compared_is_unverified_with_a_reason() {
    let (silent, odd) = (FakeEngine::start("m").await, FakeEngine::start("m").await);
    odd.set_tokenizer(|_| Some(Vec::new()));
    let gateway = TestGateway::start(config(), &[&silent, &odd]).await;
    for (engine, expect) in [(&silent, "it has no /tokenize"), (&odd, "another form")] {
        let parity = parity_of(&gateway, engine).await;
        assert_eq!(parity["state"], "unverified");
        assert!(parity["why"].as_str().expect("a reason").contains(expect), "{parity}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn engines_of_one_pool_must_agree_on_blocks_and_contexts() {
    let model = |length: u32| json!([{"id": "m", "root": "m", "max_model_len": length}]);
    let page = |size: u32| format!("vllm:cache_config_info{{block_size=\"{size}\"}} 1\n");
    for (lengths, sizes, expect) in [
        ([4096, 4096], [16, 32], "KV blocks have 32 tokens"),
        ([4096, 8192], [16, 16], "max_model_len 8192"),
        ([4096, 4096], [16, 16], ""),
    ] {
        let (a, b) = (listed(model(lengths[0])).await, listed(model(lengths[1])).await);
        for (engine, size) in [(&a, sizes[0]), (&b, sizes[1])] {
            engine.set_metrics(&page(size));
            engine.set_tokenizer(as_estimated);
        }
        // In sequence: the second is compared with the first.
        let gateway = TestGateway::start(config(), &[&a]).await;
        gateway.ask("POST", "/workers", json!({"url": b.url()}).to_string()).await;
        let found = || gateway.serving().controller.find(&b.url()).expect("a worker");
        eventually("it serves", || found().state().healthy).await;
        match (found().parity(), expect) {
            (Parity::Verified, "") => {}
            (Parity::Mismatch(why), expect) if !expect.is_empty() => {
                assert!(why.contains(expect) && why.contains(&a.url()), "{why}");
            }
            (other, expect) => panic!("{other:?} instead of {expect:?}"),
        }
        gateway.end().await;
    }
}

/// An engine of model `m` with blocks of `size` tokens that counts like the estimate.
async fn of_block_size(size: u32) -> FakeEngine {
    let engine = FakeEngine::start("m").await;
    engine.set_metrics(&format!("vllm:cache_config_info{{block_size=\"{size}\"}} 1\n"));
    engine.set_tokenizer(as_estimated);
    engine
}

/// Whether this engine's parity is a mismatch that names the other.
fn differs_from(gateway: &TestGateway, engine: &FakeEngine, other: &FakeEngine) -> bool {
    let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
    matches!(worker.parity(), Parity::Mismatch(why) if why.contains(&other.url()))
}

/// Invariant: Which engine of a pool is reported as different does not depend on the order of registration.
///
/// Also held by `two_engines_compared_at_the_same_time_are_compared_with_each_other`.
#[tokio::test]
async fn which_engine_of_a_pool_differs_does_not_depend_on_the_order_of_registration() {
    for first in [0, 1] {
        let engines = [of_block_size(16).await, of_block_size(32).await];
        let [one, two] = &engines;
        engines[1 - first].set_healthy(false);
        let mut config = config();
        config.health.interval = Duration::from_millis(1);
        config.workers = engines.iter().map(|engine| WorkerSpec::new(engine.url())).collect();
        let serving = Serving::start(config).expect("the gateway starts");
        let gateway = TestGateway::of(serving);
        let worker =
            |engine: &FakeEngine| gateway.serving().controller.find(&engine.url()).expect("a worker");
        eventually("the first one serves", || worker(&engines[first]).state().healthy).await;
        assert_eq!(worker(&engines[first]).parity(), Parity::Verified);
        engines[1 - first].set_healthy(true);
        eventually("both serve", || worker(&engines[1 - first]).state().healthy).await;
        assert!(differs_from(&gateway, two, one), "{first} first: {:?}", worker(two).parity());
        assert_eq!(worker(one).parity(), Parity::Verified, "{first} first");
        // The remaining engine has no other to be compared with.
        gateway.serving().controller.remove(&worker(one));
        eventually("the other is alone", || worker(two).parity() == Parity::Verified).await;
        gateway.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_engines_compared_at_the_same_time_are_compared_with_each_other() {
    let engines = [of_block_size(16).await, of_block_size(32).await];
    let both = Arc::new(Barrier::new(2));
    for engine in &engines {
        let (both, mut met) = (Arc::clone(&both), false);
        engine.set_tokenizer(move |question| {
            // Neither has a result yet when the other is queried.
            if !std::mem::replace(&mut met, true) {
                tokio::task::block_in_place(|| both.wait());
            }
            as_estimated(question)
        });
    }
    let gateway = TestGateway::start(config(), &[&engines[0], &engines[1]]).await;
    assert!(differs_from(&gateway, &engines[1], &engines[0]));
    assert_eq!(parity_of(&gateway, &engines[0]).await["state"], "verified");
    gateway.end().await;
}

#[tokio::test]
async fn the_block_size_of_an_engine_that_differs_does_not_become_the_pools() {
    let engines = [of_block_size(16).await, of_block_size(32).await];
    let feeds = [FakeFeed::start().await, FakeFeed::start().await];
    let mut config = engine_counts();
    config.health.interval = Duration::from_millis(1);
    let spec = |(engine, feed): (&FakeEngine, &FakeFeed)| WorkerSpec {
        kv_events: vec![feed.spec()],
        ..WorkerSpec::new(engine.url())
    };
    config.workers = engines.iter().zip(&feeds).map(spec).collect();
    engines[0].set_healthy(false);
    let gateway = TestGateway::of(Serving::start(config).expect("the gateway starts"));
    let state = |engine: &FakeEngine| {
        let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
        let endpoints = gateway.serving().controller.endpoints_of(worker.id);
        endpoints.first().and_then(|(_, endpoint)| endpoint.feed.as_ref()).map(|feed| feed.seen().state)
    };
    let tokens: Vec<u32> = (0..32).collect();
    feeds[1].publish(batch(None, &[Told::Stored(&[1], None, &tokens, 32, None)]));
    eventually("alone, its block size counts", || state(&engines[1]) == Some(Feed::Live)).await;
    eventually("it is the pool's block size", || gateway.pool("m").router.block_tokens() == 32).await;
    engines[0].set_healthy(true);
    eventually("the other is trusted", || {
        feeds[0].publish(batch(None, &[Told::Stored(&[1, 2], None, &tokens, 16, None)]));
        state(&engines[0]) == Some(Feed::Live) && gateway.pool("m").router.block_tokens() == 16
    })
    .await;
    eventually("it is refused", || state(&engines[1]) == Some(Feed::Refused)).await;
    feeds[1].publish(batch(None, &[Told::Stored(&[3], None, &tokens, 32, None)]));
    eventually("it stays refused", || state(&engines[1]) == Some(Feed::Refused)).await;
    assert_eq!(gateway.pool("m").router.block_tokens(), 16);
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_returns_with_another_block_size_is_compared_again() {
    let engines = [of_block_size(16).await, of_block_size(16).await];
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    let gateway = TestGateway::start(config, &[&engines[0], &engines[1]]).await;
    for engine in &engines {
        assert_eq!(parity_of(&gateway, engine).await["state"], "verified");
    }
    engines[1].set_metrics("vllm:cache_config_info{block_size=\"64\"} 1\n");
    eventually("it is seen", || differs_from(&gateway, &engines[1], &engines[0])).await;
    engines[0].set_metrics("vllm:cache_config_info{block_size=\"64\"} 1\n");
    eventually("they agree again", || !differs_from(&gateway, &engines[1], &engines[0])).await;
    gateway.end().await;
}

/// Invariant: KV events of an engine that counts tokens differently are not used.
///
/// Also held by `the_first_token_that_differs_is_named`.
#[tokio::test]
async fn kv_events_of_an_engine_that_counts_differently_are_not_used_until_it_agrees() {
    let model = |length: u32| json!([{"id": "m", "root": "m", "max_model_len": length}]);
    let (engine, feed) = (listed(model(4096)).await, FakeFeed::start().await);
    let alike = Arc::new(AtomicBool::new(false));
    let counts = Arc::clone(&alike);
    engine.set_tokenizer(move |question| match counts.load(Ordering::Relaxed) {
        true => as_estimated(question),
        false => Some(vec![1]),
    });
    let mut config = config();
    config.health.interval = Duration::from_millis(1);
    config.workers = vec![WorkerSpec { kv_events: vec![feed.spec()], ..WorkerSpec::new(engine.url()) }];
    let gateway = TestGateway::start(config, &[]).await;
    let state = || {
        let worker = gateway.serving().controller.find(&engine.url()).expect("a worker");
        let endpoints = gateway.serving().controller.endpoints_of(worker.id);
        endpoints[0].1.feed.as_ref().expect("a feed").seen().state
    };
    eventually("it is refused", || state() == Feed::Refused).await;
    // Changed models cause another comparison.
    alike.store(true, Ordering::Relaxed);
    engine.set_models(model(8192));
    eventually("it is trusted", || state() == Feed::Live).await;
    gateway.end().await;
}

#[tokio::test]
async fn an_engine_that_was_down_is_compared_again() {
    let engine = FakeEngine::start("m").await;
    engine.set_tokenizer(as_estimated);
    let mut config = config();
    config.health.interval = Duration::from_millis(5);
    config.health.failure_threshold = 1;
    config.health.success_threshold = 1;
    let gateway = TestGateway::start(config, &[&engine]).await;
    let (address, url) = (engine.authority().to_owned(), engine.url());
    let worker = gateway.serving().controller.find(&url).expect("a worker");
    assert_eq!(worker.parity(), Parity::Verified);
    drop(engine);
    // A broken connection makes it unhealthy; a refused one shows that its process has ended.
    eventually("it is gone", || !worker.state().healthy && worker.upstream.is_gone()).await;
    let again = FakeEngine::start_again(&address, json!([{"id": "m", "root": "m", "parent": null}])).await;
    eventually("it is compared", || worker.parity() != Parity::Verified).await;
    assert_eq!(worker.parity(), Parity::Unverified("it has no /tokenize".into()));
    eventually("it is back", || worker.state().healthy).await;
    drop(again);
    gateway.end().await;
}

/// Invariant: Aliases of a model share its blocks; adapters do not.
#[tokio::test]
async fn aliases_of_a_model_share_its_blocks_and_adapters_do_not() {
    let models = json!([
        {"id": "m", "root": "/m", "parent": null},
        {"id": "alias", "root": "/m", "parent": null},
        {"id": "sql", "root": "/sql", "parent": "m"},
    ]);
    let engine = listed(models).await;
    let gateway = TestGateway::start(config(), &[&engine]).await;
    let prompt = "a long prompt ".repeat(20);
    for (name, holds) in [("m", false), ("alias", true), ("sql", false), ("sql", true)] {
        ask(&gateway, &engine, chat(name, &prompt)).await;
        let overlap = gateway.decisions().await[0]["overlap_tokens"].as_u64().expect("a number");
        assert_eq!(overlap > 0, holds, "{name}: {overlap}");
    }
    gateway.end().await;
}

/// A small model's tokenizer and template.
fn tiny() -> PathBuf {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvlane-tokens/tests/data/tiny");
    PathBuf::from(data).canonicalize().expect("the files are there")
}

/// The `/tokenize` response of an engine with these files.
fn counts_with_tiny() -> impl FnMut(&Value) -> Option<Vec<u32>> + Send {
    let tokenizer =
        Tokenizer::load(&Source::at(tiny()), &kvlane_tokens::Config::default()).expect("it loads");
    move |question| {
        let api = if question["messages"].is_null() { Api::Completions } else { Api::ChatCompletions };
        let mut prompt = Prompt::default();
        let body = question.to_string();
        tokenizer.prompt(api, body.as_bytes(), UnixTime(1_700_000_000), &mut prompt).expect("text");
        Some(prompt.tokens)
    }
}

#[tokio::test]
async fn a_tokenizer_counts_like_the_engine_with_the_same_files() {
    let engine = FakeEngine::start("m").await;
    let mut count = counts_with_tiny();
    engine.set_tokenizer(counts_with_tiny());
    let mut config = config();
    config.tokens.path = Some(tiny());
    let gateway = TestGateway::start(config, &[&engine]).await;
    assert_eq!(parity_of(&gateway, &engine).await["state"], "verified");
    let ready = gateway.operate("GET", "/readiness", "").await.json();
    assert_eq!(ready["pools"][0]["tokens"]["source"], "local");
    let body = chat("m", &"Où est le café? ".repeat(30));
    let expect = count(&serde_json::from_str(&body).expect("JSON")).expect("ids").len();
    for overlap in [0, expect / 4 * 4] {
        ask(&gateway, &engine, body.clone()).await;
        let decision = &gateway.decisions().await[0];
        assert_eq!(
            (&decision["prompt_tokens"], &decision["overlap_tokens"]),
            (&json!(expect), &json!(overlap))
        );
    }
    assert!(gateway.metric("kvlane_tokenizer_tokens_total{from=\"cache\"}").await > Some(0.0));
    assert_eq!(gateway.metric("kvlane_tokenize_seconds_count{model=\"m\"}").await, Some(2.0));
    gateway.end().await;
}

#[tokio::test]
async fn the_engines_own_model_directory_is_used_if_readable() {
    let engine = listed(json!([{"id": "m", "root": tiny(), "parent": null}])).await;
    engine.set_tokenizer(counts_with_tiny());
    let elsewhere = listed(json!([{"id": "n", "root": "/nowhere/n", "parent": null}])).await;
    let gateway = TestGateway::start(config(), &[&engine, &elsewhere]).await;
    assert_eq!(parity_of(&gateway, &engine).await["state"], "verified");
    let ready = gateway.operate("GET", "/readiness", "").await.json();
    let mut sources: Vec<_> = ready["pools"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|pool| (pool["model"].as_str(), pool["tokens"]["source"].as_str()))
        .collect();
    sources.sort_unstable();
    assert_eq!(sources, [(Some("m"), Some("local")), (Some("n"), Some("estimate"))]);
    gateway.end().await;
}

#[tokio::test]
async fn a_workers_tokenizer_is_used_where_the_configuration_names_none() {
    let counted = async |tokenizer: PathBuf, tokens: TokenSource| {
        let engine = FakeEngine::start("m").await;
        engine.set_tokenizer(counts_with_tiny());
        let mut config = config();
        config.tokens.source = tokens;
        let spec = WorkerSpec { tokenizer: Some(tokenizer), ..WorkerSpec::new(engine.url()) };
        config.workers = vec![spec];
        let gateway = TestGateway::start(config, &[]).await;
        let ready = gateway.operate("GET", "/readiness", "").await.json();
        gateway.end().await;
        ready["pools"][0]["tokens"]["source"].clone()
    };
    assert_eq!(counted(tiny(), TokenSource::Auto).await, "local");
    assert_eq!(counted("/nowhere".into(), TokenSource::Auto).await, "estimate");
    assert_eq!(counted(tiny(), TokenSource::Engine).await, "engine");
}

#[tokio::test]
async fn a_pool_can_have_its_own_tokenizer() {
    let (m, n) = (FakeEngine::start("m").await, FakeEngine::start("n").await);
    let mut config = config();
    config.tokens.path = Some(tiny());
    let own = PoolOverride { tokenizer: Some("estimate".into()), ..PoolOverride::default() };
    config.routing.pools.insert("n".into(), own);
    let gateway = TestGateway::start(config, &[&m, &n]).await;
    for (model, engine, estimated) in [("m", &m, false), ("n", &n, true)] {
        let body = chat(model, "naïve");
        ask(&gateway, engine, body.clone()).await;
        let decisions = gateway.operate("GET", &format!("/decisions?model={model}"), "").await.json();
        let tokens = decisions["pools"][0]["decisions"][0]["prompt_tokens"].as_u64().expect("a number");
        let estimate = parity_check::estimated(Api::ChatCompletions, body.as_bytes()).len() as u64;
        assert_eq!(tokens == estimate, estimated, "{model}: {tokens}, estimated {estimate}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn the_first_token_that_differs_is_named() {
    let engine = FakeEngine::start("m").await;
    let mut count = counts_with_tiny();
    engine.set_tokenizer(move |question| {
        let mut ids = count(question)?;
        if let Some(id) = ids.get_mut(3) {
            *id += 1;
        }
        Some(ids)
    });
    let mut config = config();
    config.tokens.path = Some(tiny());
    let gateway = TestGateway::start(config, &[&engine]).await;
    let parity = parity_of(&gateway, &engine).await;
    let why = parity["why"].as_str().expect("a reason");
    assert!(parity["state"] == "mismatch" && why.contains("token 3 on"), "{parity}");
    gateway.end().await;
}

/// Invariant: A prompt that cannot be counted is estimated, and its request is served.
///
/// Also held by `a_prompt_that_the_engine_does_not_count_is_estimated_and_served`,
/// `a_full_queue_rejects_prompts_and_cancelled_prompts_are_not_counted`.
#[tokio::test]
async fn a_prompt_that_the_tokenizer_does_not_count_is_estimated_and_served() {
    let engine = FakeEngine::start("m").await;
    let mut config = config();
    config.tokens.path = Some(tiny());
    let gateway = TestGateway::start(config, &[&engine]).await;
    // The model's template takes text only.
    for (part, why) in [
        (json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "refused"),
        (json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "media"),
    ] {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": [part]}]});
        ask(&gateway, &engine, body.to_string()).await;
        assert_eq!(estimates(&gateway, why).await, Some(1.0), "{why}");
    }
    gateway.end().await;
}

#[test]
fn a_missing_tokenizer_is_an_error_at_start() {
    let empty = tempfile::tempdir().expect("a directory");
    for (path, what_to_do) in [
        ("/nowhere/llama".into(), "give a model's directory or its tokenizer.json"),
        (empty.path().to_path_buf(), "copy the model's tokenizer files there"),
    ] {
        let mut config = config();
        config.tokens.path = Some(path.clone());
        let Err(error) = Serving::start(config) else { panic!("it started without {}", path.display()) };
        let said = error.to_string();
        for word in ["tokens.path", path.to_str().expect("UTF-8"), what_to_do] {
            assert!(said.contains(word), "'{word}' is not in: {said}");
        }
    }
}
