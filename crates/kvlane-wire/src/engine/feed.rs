//! Discovers where an engine publishes its KV events, from the engine's own answer.

use serde_json::Value;

use super::RANKS_MAX;

/// The KV event feed of one data-parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedSource {
    /// The data-parallel rank.
    pub rank: u32,
    /// The address that it publishes on, as the engine reports it: often a bind address, such as `tcp://*:5557`.
    pub endpoint: String,
    /// The address that answers replay requests, if any.
    pub replay: Option<String>,
    /// The topic of its messages, empty if they have none.
    pub topic: String,
    /// Tokens per block, if reported.
    pub block_tokens: Option<u32>,
}

/// Why an engine's answer does not describe its feeds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeedError {
    /// The answer is not JSON, or not JSON of the expected form.
    #[error("cannot read the engine's list of KV event feeds: {0}")]
    Malformed(String),
    /// More ranks than an engine can have.
    #[error("the engine lists {0} KV event feeds; at most {RANKS_MAX} are supported")]
    TooMany(u64),
}

/// The feeds in vLLM's `GET /kv_event_sources`, in order of rank: `{"0": {"endpoint": ..}}`, or a list whose items have
/// a `data_parallel_rank`. Each rank has its own ports. Ranks that publish nowhere are left out.
///
/// # Errors
///
/// [`FeedError`] if the body has another form.
pub fn vllm_feeds(body: &str) -> Result<Vec<FeedSource>, FeedError> {
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

/// The feeds in SGLang's `GET /server_info`, by rank: its `kv_events` has the first rank's ports, and the other ranks'
/// ports follow. Empty if the engine publishes nothing, or its version does not report it.
///
/// # Errors
///
/// [`FeedError`] if the body has another form.
pub fn sglang_feeds(body: &str) -> Result<Vec<FeedSource>, FeedError> {
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

/// The address to connect to for `endpoint`, the publishing address that an engine on `host` reports: `host:port`, or
/// `[host]:port` for an IPv6 address. An address bound to all interfaces is the host's own. `None` if it is not TCP or
/// has no port.
pub fn resolve(endpoint: &str, host: &str) -> Option<String> {
    let (bound, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    let bare = |host: &str| host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let bound = bare(bound);
    let host = if matches!(bound.as_str(), "" | "*" | "0.0.0.0" | "::") { bare(host) } else { bound };
    Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn whole(value: &Value, key: &str) -> Option<u32> {
    value.get(key)?.as_u64().and_then(|number| u32::try_from(number).ok())
}

fn malformed(why: String) -> FeedError {
    FeedError::Malformed(why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feed(
        rank: u32,
        endpoint: &str,
        replay: Option<&str>,
        topic: &str,
        block_tokens: Option<u32>,
    ) -> FeedSource {
        let (endpoint, topic) = (endpoint.to_owned(), topic.to_owned());
        FeedSource { rank, endpoint, replay: replay.map(str::to_owned), topic, block_tokens }
    }

    #[test]
    fn vllm_tells_each_ranks_addresses() {
        // The answer of vLLM 0.32.0, shortened.
        let body = r#"{"1": {"publisher": "zmq", "endpoint": "tcp://*:5558", "replay_endpoint": null, "topic": ""},
            "0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                  "replay_endpoint": "tcp://*:5657", "buffer_steps": 10000, "topic": "kv@127.0.0.1:8001@tiny"}}"#;
        let expected = [
            feed(0, "tcp://*:5557", Some("tcp://*:5657"), "kv@127.0.0.1:8001@tiny", None),
            feed(1, "tcp://*:5558", None, "", None),
        ];
        assert_eq!(vllm_feeds(body).as_deref(), Ok(&expected[..]));
    }

    #[test]
    fn vllm_may_answer_with_a_list() {
        let body = r#"[{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": null, "topic": ""}]"#;
        assert_eq!(vllm_feeds(body), Ok(vec![feed(0, "tcp://10.0.0.1:5557", None, "", None)]));
        assert_eq!(vllm_feeds("[]"), Ok(vec![]));
        assert_eq!(vllm_feeds("{}"), Ok(vec![]));
        assert_eq!(vllm_feeds(r#"{"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}"#), Ok(vec![]));
    }

    #[test]
    fn sglang_tells_the_first_ranks_ports() {
        let body = r#"{"model_path": "m", "kv_events": {"publisher": "zmq", "endpoint_host": "*", "dp_size": 2,
            "endpoint_port_base": 5557, "topic": "kv", "block_size": 16, "replay_endpoint_port_base": 6000}}"#;
        let expected = [
            feed(0, "tcp://*:5557", Some("tcp://*:6000"), "kv", Some(16)),
            feed(1, "tcp://*:5558", Some("tcp://*:6001"), "kv", Some(16)),
        ];
        assert_eq!(sglang_feeds(body).as_deref(), Ok(&expected[..]));
        assert_eq!(sglang_feeds(r#"{"kv_events": null}"#), Ok(vec![]));
        assert_eq!(sglang_feeds(r#"{"version": "0.4"}"#), Ok(vec![]));
    }

    #[test]
    fn an_answer_that_cannot_be_right_says_why() {
        let why = |told: Result<Vec<FeedSource>, FeedError>| told.unwrap_err().to_string();
        assert!(why(vllm_feeds("<html>")).contains("cannot read"));
        assert!(why(vllm_feeds(r#"{"detail": "Not Found"}"#)).contains("without a rank"));
        assert!(why(vllm_feeds(r#"{"0": {}}"#)).contains("rank 0 without `endpoint`"));
        assert!(why(sglang_feeds("[]")).contains("not an object"));
        let many = r#"{"kv_events": {"endpoint_port_base": 5557, "dp_size": 4000000000}}"#;
        assert_eq!(sglang_feeds(many), Err(FeedError::TooMany(4_000_000_000)));
        let beyond = r#"{"kv_events": {"endpoint_port_base": 65535, "dp_size": 2}}"#;
        assert!(why(sglang_feeds(beyond)).contains("no port for rank 1"));
    }

    #[test]
    fn an_address_bound_to_all_interfaces_is_the_workers_own() {
        for bound in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://:::5557"] {
            assert_eq!(resolve(bound, "10.0.0.7").as_deref(), Some("10.0.0.7:5557"), "{bound}");
        }
        assert_eq!(resolve("tcp://*:1", "[fd00::1]").as_deref(), Some("[fd00::1]:1"));
        assert_eq!(resolve("tcp://[fd00::2]:1", "a").as_deref(), Some("[fd00::2]:1"));
        assert_eq!(resolve("tcp://node-3:5557", "10.0.0.7").as_deref(), Some("node-3:5557"));
        for other in ["ipc:///tmp/kv", "inproc://kv", "tcp://*", "tcp://*:0", "tcp://*:70000", ""] {
            assert_eq!(resolve(other, "10.0.0.7"), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_read_or_refused(body in any::<String>(), host in "[*a-z:.\\[\\]]{0,8}", base in any::<u32>(), ranks in any::<u32>()) {
            let _ = (vllm_feeds(&body), sglang_feeds(&body), resolve(&body, &host));
            let told = serde_json::json!({"kv_events": {"endpoint_host": host, "endpoint_port_base": base, "dp_size": ranks}});
            if let Ok(feeds) = sglang_feeds(&told.to_string()) {
                prop_assert!(feeds.len() <= RANKS_MAX && !feeds.is_empty());
            }
        }
    }
}
