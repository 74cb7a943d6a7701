//! Where an engine publishes its KV events, as it tells itself.

/// One feed of KV events: that of one data-parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedSource {
    /// The data-parallel rank.
    pub rank: u32,
    /// Where it publishes, as the engine says it: often an address it binds, such as `tcp://*:5557`.
    pub endpoint: String,
    /// Where it answers requests for a replay, if it does.
    pub replay: Option<String>,
    /// The topic of its messages, empty if they have none.
    pub topic: String,
    /// Tokens per block, where told.
    pub block_tokens: Option<u32>,
}

/// Why an engine's answer does not tell where its feeds are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeedError {
    /// It is no JSON, or its JSON is something else.
    #[error("not a list of KV event feeds: {0}")]
    Malformed(String),
}

/// The address to connect to for `endpoint`, which the engine on `host` says it publishes on: `host:port`, or
/// `[host]:port` for an IPv6 address. An address that is bound to all interfaces is the host's own. None if it is not TCP.
pub fn resolve(endpoint: &str, host: &str) -> Option<String> {
    let address = endpoint.strip_prefix("tcp://")?;
    let (bound, port) = address.rsplit_once(':')?;
    port.parse::<u16>().ok()?;
    let bound = bound.trim_start_matches('[').trim_end_matches(']');
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let host = if matches!(bound, "" | "*" | "0.0.0.0" | "::") { host } else { bound };
    Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
}
