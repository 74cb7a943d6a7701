//! Prefill/decode disaggregation: the two requests that one request becomes.
//!
//! The first leg asks an engine to compute the prompt and to keep its KV blocks for another; the second asks that other
//! to fetch the blocks and to generate the answer. What they say of each other depends on the engines' connector:
//!
//! | Connector | First leg | Second leg | Legs |
//! |---|---|---|---|
//! | [`Nixl`](Connector::Nixl) | `kv_transfer_params.do_remote_decode` | the object of the first answer | in turn |
//! | [`NixlPush`](Connector::NixlPush) | the same | the object, or where the prefill engine is if that is known | at once, if so |
//! | [`Mooncake`](Connector::Mooncake) | and `transfer_id` | the same id, and where the prefill engine is | at once |
//! | [`Sglang`](Connector::Sglang) | `bootstrap_host`, `_port`, `_room` | the same | at once |
//! | [`LmCache`](Connector::LmCache), [`SharedStorage`](Connector::SharedStorage) | nothing | nothing | in turn |
//! | [`TensorRtLlm`](Connector::TensorRtLlm) | `disaggregated_params.request_type` | the object of the first answer, and its token ids | in turn |
//! | [`LlmdSidecar`](Connector::LlmdSidecar) | none | header [`PREFILLER_HEADER`] | one |
//!
//! vLLM's forms were seen with 0.32; those of Mooncake, SGLang, TensorRT-LLM and llm-d are read in the engines and in
//! their routers.
//!
//! A first leg asks for one token and for nothing that costs work or makes it invalid then, unless its engine stops by
//! itself. A second leg is the
//! client's body, byte for byte, and the connector's member. Both must have the same one prompt, which engines do not
//! check: [`may_split`] rejects bodies with which they would not.

mod bodies;
mod connector;
mod llmd;
mod mooncake;
mod nixl;
mod params;
pub(crate) mod refuse;
mod reported;
pub(crate) mod reserved;
mod sglang;
mod trtllm;

pub use self::bodies::strip_transfer_params;
pub use self::connector::{BOOTSTRAP_PORT, Connector, Legs, REQUEST_ID_HEADER, Source, SourceOf, Split};
pub use self::llmd::{ENCODERS_HEADER, PREFILLER_HEADER, SIDECAR_HEADERS, has_media};
pub use self::mooncake::{ENGINES_PATH, bootstrap_url, engine_ids};
pub use self::params::{NoParams, TransferParams, transfer_params};
pub use self::refuse::{WhyNot, may_split, splits};
pub use self::reported::{Reported, reported};

#[cfg(test)]
mod tests;
