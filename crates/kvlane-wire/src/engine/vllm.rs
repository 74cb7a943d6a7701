//! vLLM (`vllm/v1/metrics/loggers.py`). One line of metrics per data-parallel rank, distinguished by the label `engine`.

use serde_json::Value;

use super::feed::{FeedError, FeedSource, RANKS_MAX, malformed, text, whole};
use super::kind::{
    AdapterPaths, Advice, CacheNames, CacheReset, Capacity, CardNames, EngineKind, FeedQuery, LoadNames,
    PrefixCaching, Settings,
};
use crate::prometheus::{Sample, samples};

/// The sample with the configuration of the cache as labels.
const CACHE_CONFIG: &str = "vllm:cache_config_info";

pub(super) static ENGINE: EngineKind = EngineKind {
    name: "vllm",
    title: "vLLM",
    owner: "vllm",
    load: LoadNames {
        running: "vllm:num_requests_running",
        waiting: "vllm:num_requests_waiting",
        // Renamed from `gpu_` when caches on other devices were added.
        kv_usage: &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
        kv_capacity: Some(Capacity { name: CACHE_CONFIG, tokens: capacity_tokens }),
    },
    cache: CacheNames {
        block_tokens: Some((CACHE_CONFIG, "block_size")),
        // In tokens. Renamed from `gpu_` when caches on other devices were added.
        queried_tokens: &["vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"],
        hit_tokens: &["vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"],
        external_hit_tokens: &["vllm:external_prefix_cache_hits_total"],
    },
    // Renamed from `time_per_output_token_seconds`.
    intervals: &[
        ("vllm:inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_sum"),
        ("vllm:time_per_output_token_seconds_count", "vllm:time_per_output_token_seconds_sum"),
    ],
    // Counters change with the steps that produce tokens, the block usage with every chunk of a prompt.
    progress: &[
        "vllm:iteration_tokens_total_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ],
    rank_label: Some("engine"),
    // `EngineCore encountered an issue` and `EngineDeadError` (`vllm/v1/engine/exceptions.py`), and the validation error
    // of the same object in its `/v1/messages`.
    dead: &[
        "enginecore encountered an issue",
        "enginedeaderror",
        "engine process failed",
        "engine is dead",
        "{'error': {'message': 'en",
    ],
    card: CardNames { max_model_len: Some("/max_model_len"), trained_len: None },
    continues_messages: true,
    feeds: Some(FeedQuery { path: "/kv_event_sources", parse: feeds }),
    cache_reset: Some(CacheReset {
        path: "/reset_prefix_cache",
        needs: Some("vLLM has this path only with VLLM_SERVER_DEV_MODE=1"),
    }),
    adapter_paths: Some(AdapterPaths {
        load: "/v1/load_lora_adapter",
        unload: "/v1/unload_lora_adapter",
        needs: "start vLLM with --enable-lora, and with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
    }),
    versions: &[("/version", "version")],
    prefix_caching: PrefixCaching::Page(prefix_caching),
    settings: Settings {
        // Only with VLLM_SERVER_DEV_MODE=1.
        path: Some("/server_info?config_format=json"),
        max_model_len: Some("max_model_len"),
        block_tokens: Some("block_size"),
        max_num_seqs: Some("max_num_seqs"),
        max_num_batched_tokens: Some("max_num_batched_tokens"),
        kv_capacity_tokens: Some("kv_cache_size_tokens"),
    },
    advice: Advice {
        caching: Some("start the engine with --enable-prefix-caching"),
        kv_events: Some(
            "start the engine with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\
             \"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'; if it is set and the engine \
             is too old to report its port, give --kv-events-port 5557",
        ),
        replay_setting: Some("replay_endpoint in --kv-events-config"),
        replay_gaps: Some("vLLM up to 0.32 loses messages of long replays: lower buffer_steps, or update it"),
        cached_tokens: Some("start the engine with --enable-prompt-tokens-details"),
        ..EngineKind::BARE.advice
    },
    ..EngineKind::BARE
};

/// A rank's cache capacity in tokens: reported directly by newer versions (caches with several layer groups hold less
/// than their blocks suggest), otherwise number of blocks times block size.
fn capacity_tokens(info: &Sample<'_>) -> Option<f64> {
    let number = |label| info.label(label)?.parse::<f64>().ok();
    number("kv_cache_size_tokens").or_else(|| Some(number("block_size")? * number("num_gpu_blocks")?))
}

fn prefix_caching(page: &str) -> Option<bool> {
    let info = samples(page).find(|sample| sample.name == CACHE_CONFIG)?;
    Some(!info.label("enable_prefix_caching")?.eq_ignore_ascii_case("false"))
}

/// The feeds in vLLM's `GET /kv_event_sources`, in order of rank: `{"0": {"endpoint": ..}}`, or a list whose items have
/// a `data_parallel_rank`. Each rank has its own ports. Ranks that publish nowhere are left out.
fn feeds(body: &str) -> Result<Vec<FeedSource>, FeedError> {
    let answer: Value = serde_json::from_str(body).map_err(|error| malformed(error.to_string()))?;
    let told: Vec<(Option<u32>, &Value)> = match &answer {
        Value::Object(by_rank) => by_rank.iter().map(|(rank, feed)| (rank.parse().ok(), feed)).collect(),
        Value::Array(list) => list.iter().map(|feed| (whole(feed, "data_parallel_rank"), feed)).collect(),
        _ => return Err(malformed("neither an object nor a list".to_owned())),
    };
    if told.len() > RANKS_MAX {
        return Err(FeedError::TooMany(told.len() as u64));
    }
    let mut feeds = Vec::new();
    for (rank, feed) in told {
        let publishes = feed.get("publisher").is_none_or(|publisher| publisher == "zmq")
            && feed.get("enable_kv_cache_events").is_none_or(|enabled| enabled == true);
        if !publishes {
            continue;
        }
        let rank = rank.ok_or_else(|| malformed("a feed without a rank".to_owned()))?;
        let endpoint =
            text(feed, "endpoint").ok_or_else(|| malformed(format!("rank {rank} without `endpoint`")))?;
        feeds.push(FeedSource {
            rank,
            endpoint,
            replay: text(feed, "replay_endpoint"),
            topic: text(feed, "topic").unwrap_or_default(),
            block_tokens: whole(feed, "block_size").filter(|tokens| *tokens > 0),
        });
    }
    feeds.sort_by_key(|feed| feed.rank);
    Ok(feeds)
}

#[cfg(test)]
mod tests {
    use super::super::{load_report, load_reports};
    use super::*;

    fn feed(rank: u32, endpoint: &str, replay: Option<&str>, topic: &str) -> FeedSource {
        let (endpoint, topic) = (endpoint.to_owned(), topic.to_owned());
        FeedSource { rank, endpoint, replay: replay.map(str::to_owned), topic, block_tokens: None }
    }

    #[test]
    fn a_page_is_summed_over_ranks_and_its_usage_averaged() {
        let page = concat!(
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n",
            "# TYPE vllm:num_requests_running gauge\n",
            "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3.0\n",
            "vllm:num_requests_running{engine=\"1\",model_name=\"tiny\"} 4.0\n",
            "vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 1.0\n",
            "vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.25\n",
            "vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"tiny\"} 0.75\n",
            "vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"4096\"} 1.0\n",
            "vllm:cache_config_info{block_size=\"32\",engine=\"1\",num_gpu_blocks=\"4096\"} 1.0\n",
        );
        let (kind, reported) = load_report(page).expect("a vLLM page");
        assert_eq!(kind.name, "vllm");
        assert_eq!((reported.running, reported.waiting, reported.kv_usage_ratio), (7, 1, 0.5));
        assert_eq!(reported.kv_capacity_tokens, Some(2 * 32 * 4096));
        let (_, by_rank) = load_reports(page).expect("a vLLM page");
        let of = |rank: usize| (by_rank[rank].0, by_rank[rank].1.running, by_rank[rank].1.waiting);
        assert_eq!((by_rank.len(), of(0), of(1)), (2, (0, 3, 1), (1, 4, 0)));
        assert_eq!((by_rank[1].1.kv_usage_ratio, by_rank[1].1.kv_capacity_tokens), (0.75, Some(32 * 4096)));
    }

    #[test]
    fn the_capacity_it_tells_counts_more_than_its_blocks() {
        let page = concat!(
            "vllm:num_requests_running 0\n",
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\",kv_cache_size_tokens=\"900\"} 1\n",
        );
        assert_eq!(load_report(page).expect("a vLLM page").1.kv_capacity_tokens, Some(900));
    }

    #[test]
    fn an_unknown_capacity_is_none() {
        let page = "vllm:num_requests_running 0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n";
        assert_eq!(load_report(page).expect("a vLLM page").1.kv_capacity_tokens, None);
    }

    #[test]
    fn the_old_name_of_the_usage_gauge_is_read() {
        let page = "vllm:num_requests_running 0\nvllm:gpu_cache_usage_perc 0.5\n";
        assert_eq!(load_report(page).expect("a vLLM page").1.kv_usage_ratio, 0.5);
    }

    #[test]
    fn it_tells_each_ranks_addresses() {
        // The answer of vLLM 0.32.0, shortened.
        let body = r#"{"1": {"publisher": "zmq", "endpoint": "tcp://*:5558", "replay_endpoint": null, "topic": ""},
            "0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                  "replay_endpoint": "tcp://*:5657", "buffer_steps": 10000, "topic": "kv@127.0.0.1:8001@tiny"}}"#;
        let expected = [
            feed(0, "tcp://*:5557", Some("tcp://*:5657"), "kv@127.0.0.1:8001@tiny"),
            feed(1, "tcp://*:5558", None, ""),
        ];
        assert_eq!(feeds(body).as_deref(), Ok(&expected[..]));
    }

    #[test]
    fn it_may_answer_with_a_list() {
        let body = r#"[{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": null, "topic": ""}]"#;
        assert_eq!(feeds(body), Ok(vec![feed(0, "tcp://10.0.0.1:5557", None, "")]));
        assert_eq!(feeds("[]"), Ok(vec![]));
        assert_eq!(feeds("{}"), Ok(vec![]));
        assert_eq!(feeds(r#"{"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}"#), Ok(vec![]));
    }

    #[test]
    fn an_answer_that_cannot_be_right_says_why() {
        let why = |body| feeds(body).unwrap_err().to_string();
        assert!(why("<html>").contains("cannot read"));
        assert!(why(r#"{"detail": "Not Found"}"#).contains("without a rank"));
        assert!(why(r#"{"0": {}}"#).contains("rank 0 without `endpoint`"));
    }
}
