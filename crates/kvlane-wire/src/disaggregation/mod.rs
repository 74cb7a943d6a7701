//! Prefill/decode disaggregation: the two requests that one request becomes.
//!
//! The first leg asks an engine to compute the prompt and to keep its KV blocks for another; the second asks that other
//! to fetch the blocks and to generate the answer. What they say of each other depends on the engines' connector:
//!
//! | Connector | First leg | Second leg | Legs |
//! |---|---|---|---|
//! | [`Nixl`](Connector::Nixl) | `kv_transfer_params.do_remote_decode` | the object of the first answer | in turn |
//! | [`NixlPush`](Connector::NixlPush) | the same | the object, or where the prefill engine is | at once |
//! | [`Mooncake`](Connector::Mooncake) | and `transfer_id` | the same id, and where the prefill engine is | at once |
//! | [`Sglang`](Connector::Sglang) | `bootstrap_host`, `_port`, `_room` | the same | at once |
//! | [`LmCache`](Connector::LmCache), [`SharedStorage`](Connector::SharedStorage) | nothing | nothing | in turn |
//! | [`LlmdSidecar`](Connector::LlmdSidecar) | none | header [`PREFILLER_HEADER`] | one |
//!
//! vLLM's forms were seen with 0.32, Mooncake's and SGLang's are read in the engines and in their routers.
//!
//! A first leg asks for one token and for nothing that costs work or makes it invalid then. A second leg is the
//! client's body, byte for byte, and the connector's member. Both must have the same one prompt, which engines do not
//! check: [`may_split`] rejects bodies with which they would not.

mod bodies;
mod connector;
mod mooncake;
mod nixl;
mod params;
mod refuse;
mod reported;
pub(crate) mod reserved;
mod sglang;

pub use self::bodies::strip_transfer_params;
pub use self::connector::{Connector, Legs, PREFILLER_HEADER, REQUEST_ID_HEADER, Source, Split};
pub use self::mooncake::{ENGINES_PATH, engine_ids};
pub use self::params::{NoParams, TransferParams, transfer_params};
pub use self::refuse::{WhyNot, may_split};
pub use self::reported::{Reported, reported};

#[cfg(test)]
mod tests;
