//! Members that only a gateway may send to an engine.
//!
//! A client that sends them itself can kill the engine: `{"kv_transfer_params": {"do_remote_prefill": true}}` ends
//! vLLM 0.32's scheduler, and so does a text under that name in `vllm_xargs`, whose members vLLM puts beside it. With a
//! host and a port of the client's choice, the engine connects there.

use crate::edit::{Change, edited};
use crate::json::Scanner;

/// Members of a body: of vLLM, SGLang and TensorRT-LLM.
const RESERVED: [&str; 7] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disaggregated_params",
];

/// vLLM's object of further parameters, where the same names have the same meaning.
const FURTHER: &str = "vllm_xargs";

/// Whether a member of a body is reserved, or has a reserved member.
pub(crate) fn is_reserved(key: &str, value: &str) -> bool {
    RESERVED.contains(&key) || key == FURTHER && change(key, value) != Change::Keep
}

/// What becomes of a member of a client's body.
pub(crate) fn change(key: &str, value: &str) -> Change {
    if RESERVED.contains(&key) {
        return Change::Remove;
    }
    if key != FURTHER || !value.starts_with('{') || !has_reserved(value) {
        return Change::Keep;
    }
    let keep = |key: &str, _: &str| if RESERVED.contains(&key) { Change::Remove } else { Change::Keep };
    edited(value, "", keep).map_or(Change::Remove, Change::Replace)
}

/// Whether an object has a reserved member. Its syntax was checked before.
fn has_reserved(object: &str) -> bool {
    let mut scanner = Scanner::new(object);
    let Ok(mut walk) = scanner.object() else { return false };
    while let Ok(Some(key)) = walk.key(&mut scanner) {
        if RESERVED.contains(&&*key.decode()) || scanner.skip().is_err() {
            return true;
        }
    }
    false
}
