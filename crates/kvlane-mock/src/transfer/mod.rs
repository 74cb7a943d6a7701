//! Prefill/decode disaggregation between mock engines, in the forms of [`kvlane_wire::disaggregation`].
//!
//! A first leg's blocks are kept in the prefill engine and entered in its [`store`] under a key that both legs name: the
//! request id of `kv_transfer_params`, the `X-Request-Id`, Mooncake's `transfer_id` or SGLang's room ([`leg`]). A
//! second leg takes seats for its blocks, asks the store for them over HTTP ([`claim`]), waits for as long as the link
//! takes ([`link`]), and computes the last token.
//!
//! As in vLLM 0.32: blocks of which the store has heard nothing for the lease are freed, and a second leg that comes
//! later gets an answer that is wrong, without an error; so does one with another prompt.

pub(crate) mod claim;
pub(crate) mod config;
pub(crate) mod leg;
pub(crate) mod link;
pub(crate) mod store;

#[cfg(test)]
mod tests;
