//! vLLM's NIXL connectors (`vllm/distributed/kv_transfer/kv_connector/v1/nixl`).

use super::connector::Split;
use crate::api::Api;
use crate::edit::quoted;

/// A first leg: keep the blocks for another engine. The nulls are what vLLM's own proxy sends.
pub(super) const PREFILL: &str = "\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,\
    \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";

/// A second leg that is sent with the first, to engines that push: where it registers for the blocks. Without
/// `remote_request_id` the engine dies; its value serves only to renew the lease.
pub(super) fn decode(split: &Split<'_>) -> String {
    let source = &split.source;
    let id = match split.api {
        Api::Completions => format!("cmpl-{}-0", split.request_id),
        Api::Responses => format!("resp_{}", split.request_id),
        _ => format!("chatcmpl-{}", split.request_id),
    };
    let mut sizes = String::new();
    for (name, size) in [("pp_size", source.pp_size), ("dcp_size", source.dcp_size)] {
        if size > 0 {
            sizes += &format!(",\"{name}\":{size}");
        }
    }
    format!(
        "\"kv_transfer_params\":{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_engine_id\":{},\
         \"remote_host\":{},\"remote_port\":{},\"tp_size\":{}{},\"remote_request_id\":{}}}",
        quoted(&source.engine_id),
        quoted(&source.host),
        source.port,
        source.tp_size,
        sizes,
        quoted(&id),
    )
}
