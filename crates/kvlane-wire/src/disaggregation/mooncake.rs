//! vLLM's Mooncake connector (`vllm/distributed/kv_transfer/kv_connector/v1/mooncake`), read in 0.32.
//!
//! Its engines have fixed roles: `do_remote_prefill` at a `kv_producer`, or `do_remote_decode` at a `kv_consumer`,
//! kills the engine.

use serde_json::Value;

use super::connector::Split;
use crate::edit::quoted;
use crate::engine::RANKS_MAX;

/// Path of a bootstrap server, for a GET, whose answer [`engine_ids`] reads.
pub const ENGINES_PATH: &str = "/query";

/// Members that make a first leg end at its limit of one token: blocks of an answer that ends otherwise, such as with
/// the model's end token, are not sent.
pub(super) const ENDS_BY_LENGTH: &str = ",\"ignore_eos\":true";

/// Whether a member can end an answer before its limit, or contradicts [`ENDS_BY_LENGTH`].
pub(super) fn ends_the_answer(key: &str) -> bool {
    matches!(key, "ignore_eos" | "stop" | "stop_token_ids")
}

/// A first leg: send the blocks to the engine that asks with this id.
pub(super) fn prefill(room: u64) -> String {
    format!(
        "\"kv_transfer_params\":{{\"do_remote_decode\":true,\"do_remote_prefill\":false,\
         \"transfer_id\":\"xfer-{room:016x}\"}}"
    )
}

/// A second leg: ask this engine for the blocks with this id.
pub(super) fn decode(split: &Split<'_>) -> String {
    let source = &split.source;
    format!(
        "\"kv_transfer_params\":{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\
         \"transfer_id\":\"xfer-{:016x}\",\"remote_engine_id\":{},\"remote_bootstrap_addr\":{}}}",
        split.room,
        quoted(&source.engine_id),
        quoted(&bootstrap_url(&source.host, source.port)),
    )
}

/// The URL of a bootstrap server.
pub fn bootstrap_url(host: &str, port: u16) -> String {
    if host.contains(':') { format!("http://[{host}]:{port}") } else { format!("http://{host}:{port}") }
}

/// Engine ids by data-parallel rank, from a bootstrap server's answer:
/// `{"<rank>": {"engine_id": "…", "worker_addr": {…}}}`. At most [`RANKS_MAX`].
///
/// # Errors
/// A description of what is wrong with the answer.
pub fn engine_ids(answer: &[u8]) -> Result<Vec<(u32, String)>, String> {
    let Value::Object(ranks) = serde_json::from_slice(answer).map_err(|error| error.to_string())? else {
        return Err("the answer of a Mooncake bootstrap server is not an object".into());
    };
    if ranks.len() > RANKS_MAX {
        return Err(format!(
            "a Mooncake bootstrap server has {} ranks; at most {RANKS_MAX} are used",
            ranks.len()
        ));
    }
    let mut ids = Vec::with_capacity(ranks.len());
    for (rank, engine) in &ranks {
        let id = engine["engine_id"].as_str();
        let (Ok(rank), Some(id)) = (rank.parse(), id) else {
            return Err(format!("a Mooncake bootstrap server has no `engine_id` for rank {rank:?}"));
        };
        ids.push((rank, id.to_owned()));
    }
    if ids.is_empty() {
        return Err("a Mooncake bootstrap server has no engine: is its prefill engine still starting?".into());
    }
    ids.sort_by_key(|(rank, _)| *rank);
    Ok(ids)
}
