//! SGLang (`sglang/srt/metrics/collector.py`), which serves metrics only with `--enable-metrics`.

use serde_json::Value;

use super::feed::{FeedError, FeedSource, RANKS_MAX, malformed, text, whole};
use super::kind::{
    AdapterPaths, Advice, CacheNames, CacheReset, Capacity, CardNames, EngineKind, FeedQuery, LoadNames,
    PrefixCaching, Settings, UsageObject,
};

pub(super) static ENGINE: EngineKind = EngineKind {
    name: "sglang",
    title: "SGLang",
    owner: "sglang",
    load: LoadNames {
        running: "sglang:num_running_reqs",
        waiting: "sglang:num_queue_reqs",
        // `token_usage` is the usage of the fullest pool; older and newer versions both have it.
        kv_usage: &["sglang:token_usage", "sglang:full_token_usage"],
        kv_capacity: Some(Capacity {
            name: "sglang:max_total_num_tokens",
            tokens: |sample| Some(sample.value),
        }),
    },
    cache: CacheNames {
        // Versions before 0.5.11; later ones report it in `/server_info`.
        block_tokens: Some(("sglang:cache_config_info", "page_size")),
        queried_tokens: &["sglang:prompt_tokens_total"],
        // Newer versions label it by where the tokens were found.
        hit_tokens: &["sglang:cached_tokens_total"],
        external_hit_tokens: &[],
    },
    intervals: &[("sglang:inter_token_latency_seconds_count", "sglang:inter_token_latency_seconds_sum")],
    // Its core updates its gauges only every 40 steps, too rarely to show progress within seconds.
    progress: &[],
    rank_label: Some("dp_rank"),
    // In `/generate`, with OpenAI's names.
    usage: Some(UsageObject { key: "\"meta_info\"", adds: false, names: None }),
    card: CardNames { max_model_len: Some("/max_model_len"), trained_len: None },
    continues_messages: true,
    feeds: Some(FeedQuery { path: "/server_info", parse: feeds }),
    cache_reset: Some(CacheReset { path: "/flush_cache", needs: None }),
    adapter_paths: Some(AdapterPaths {
        load: "/load_lora_adapter",
        unload: "/unload_lora_adapter",
        needs: "start SGLang with --enable-lora",
    }),
    versions: &[("/server_info", "version"), ("/get_server_info", "version")],
    prefix_caching: PrefixCaching::Answer("/server_info", |told| {
        Some(!told["disable_radix_cache"].as_bool()?)
    }),
    settings: Settings {
        path: Some("/get_server_info"),
        max_model_len: Some("context_length"),
        block_tokens: Some("page_size"),
        max_num_seqs: Some("max_running_requests"),
        max_num_batched_tokens: Some("chunked_prefill_size"),
        kv_capacity_tokens: Some("max_total_num_tokens"),
    },
    advice: Advice {
        metrics: Some("--enable-metrics"),
        caching_off: Some("--disable-radix-cache"),
        caching: Some("start the engine without --disable-radix-cache"),
        kv_events: Some(
            "start the engine with --kv-events-config '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\
             \"replay_endpoint\":\"tcp://*:5558\"}'",
        ),
        cached_tokens: Some("start the engine with --enable-cache-report"),
        ..EngineKind::BARE.advice
    },
    ..EngineKind::BARE
};

/// The feeds in SGLang's `GET /server_info`, by rank: its `kv_events` has the first rank's ports, and the other ranks'
/// ports follow. Empty if the engine publishes nothing, or its version does not report it.
fn feeds(body: &str) -> Result<Vec<FeedSource>, FeedError> {
    let answer: Value = serde_json::from_str(body).map_err(|error| malformed(error.to_string()))?;
    if !answer.is_object() {
        return Err(malformed("not an object".to_owned()));
    }
    let Some(told) = answer.get("kv_events").filter(|told| !told.is_null()) else { return Ok(Vec::new()) };
    if told.get("publisher").is_some_and(|publisher| publisher != "zmq") {
        return Ok(Vec::new());
    }
    let base =
        whole(told, "endpoint_port_base").ok_or_else(|| malformed("no `endpoint_port_base`".to_owned()))?;
    let host = text(told, "endpoint_host").unwrap_or_else(|| "*".to_owned());
    let replay_base = whole(told, "replay_endpoint_port_base").filter(|port| *port > 0);
    let replay_host = text(told, "replay_endpoint_host").unwrap_or_else(|| host.clone());
    let ranks = whole(told, "dp_size").unwrap_or(1).max(1);
    if ranks as usize > RANKS_MAX {
        return Err(FeedError::TooMany(u64::from(ranks)));
    }
    let address = |host: &str, base: u32, rank: u32| {
        let port = base.checked_add(rank).and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0);
        let port = port
            .ok_or_else(|| malformed(format!("no port for rank {rank}: the first rank's port is {base}")))?;
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        Ok(if bare.contains(':') { format!("tcp://[{bare}]:{port}") } else { format!("tcp://{bare}:{port}") })
    };
    (0..ranks)
        .map(|rank| {
            Ok(FeedSource {
                rank,
                endpoint: address(&host, base, rank)?,
                replay: replay_base.map(|base| address(&replay_host, base, rank)).transpose()?,
                topic: text(told, "topic").unwrap_or_default(),
                block_tokens: whole(told, "block_size").filter(|tokens| *tokens > 0),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::load_report;
    use super::*;

    fn feed(rank: u32, endpoint: &str, replay: &str) -> FeedSource {
        let (endpoint, replay) = (endpoint.to_owned(), Some(replay.to_owned()));
        FeedSource { rank, endpoint, replay, topic: "kv".to_owned(), block_tokens: Some(16) }
    }

    #[test]
    fn a_page_is_read_by_its_names() {
        let page = concat!(
            "sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\"} 5.0\n",
            "sglang:num_queue_reqs{model_name=\"m\",tp_rank=\"0\"} 2.0\n",
            "sglang:token_usage{model_name=\"m\",tp_rank=\"0\"} 0.125\n",
            "sglang:max_total_num_tokens{model_name=\"m\"} 471258.0\n",
        );
        let (kind, reported) = load_report(page).expect("an SGLang page");
        assert_eq!(kind.name, "sglang");
        assert_eq!((reported.running, reported.waiting, reported.kv_usage_ratio), (5, 2, 0.125));
        assert_eq!(reported.kv_capacity_tokens, Some(471_258));
    }

    #[test]
    fn it_tells_the_first_ranks_ports() {
        let body = r#"{"model_path": "m", "kv_events": {"publisher": "zmq", "endpoint_host": "*", "dp_size": 2,
            "endpoint_port_base": 5557, "topic": "kv", "block_size": 16, "replay_endpoint_port_base": 6000}}"#;
        let expected = [feed(0, "tcp://*:5557", "tcp://*:6000"), feed(1, "tcp://*:5558", "tcp://*:6001")];
        assert_eq!(feeds(body).as_deref(), Ok(&expected[..]));
        assert_eq!(feeds(r#"{"kv_events": null}"#), Ok(vec![]));
        assert_eq!(feeds(r#"{"version": "0.4"}"#), Ok(vec![]));
    }

    #[test]
    fn an_answer_that_cannot_be_right_says_why() {
        let why = |body| feeds(body).unwrap_err().to_string();
        assert!(why("[]").contains("not an object"));
        let many = r#"{"kv_events": {"endpoint_port_base": 5557, "dp_size": 4000000000}}"#;
        assert_eq!(feeds(many), Err(FeedError::TooMany(4_000_000_000)));
        let beyond = r#"{"kv_events": {"endpoint_port_base": 65535, "dp_size": 2}}"#;
        assert!(why(beyond).contains("no port for rank 1"));
    }

    proptest! {
        #[test]
        fn any_number_of_ranks_is_limited(host in "[*a-z:.\\[\\]]{0,8}", base in any::<u32>(), ranks in any::<u32>()) {
            let told = serde_json::json!({"kv_events": {"endpoint_host": host, "endpoint_port_base": base, "dp_size": ranks}});
            if let Ok(feeds) = feeds(&told.to_string()) {
                prop_assert!(feeds.len() <= RANKS_MAX && !feeds.is_empty());
            }
        }
    }
}
