//! Discovers where an engine publishes its KV events, from the engine's own answer.

use serde_json::Value;

/// Most data-parallel ranks of an engine: on a metrics page, further ranks are ignored; among its feeds, they are an error.
pub const RANKS_MAX: usize = 256;

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

pub(super) fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

pub(super) fn whole(value: &Value, key: &str) -> Option<u32> {
    value.get(key)?.as_u64().and_then(|number| u32::try_from(number).ok())
}

pub(super) fn malformed(why: String) -> FeedError {
    FeedError::Malformed(why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ENGINES;
    use super::*;

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
        fn any_answer_is_read_or_refused(body in any::<String>(), host in "[*a-z:.\\[\\]]{0,8}") {
            let _ = resolve(&body, &host);
            for query in ENGINES.iter().filter_map(|engine| engine.feeds.as_ref()) {
                let _ = (query.parse)(&body);
            }
        }
    }
}
