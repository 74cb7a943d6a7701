//! The bodies of both legs.

use bytes::Bytes;

use super::connector::{Connector, Split};
use super::params::{NoParams, TransferParams, transfer_params};
use super::{mooncake, nixl, reserved, sglang, trtllm};
use crate::api::Api;
use crate::edit::{Change, edited};
use crate::openai::{ParseError, utf8};

// === impl Split ===

impl Split<'_> {
    /// The body of the first leg. With SGLang it is that of the second: its prefill engine stops after the first token
    /// by itself, as TensorRT-LLM's does. Without a first leg ([`Legs::Decode`]) it is the client's body.
    ///
    /// # Errors
    /// If the body is not a JSON object.
    pub fn prefill_body(&self, body: &[u8]) -> Result<Bytes, ParseError> {
        let mut added = prefill_member(self);
        if matches!(self.connector, Connector::Sglang | Connector::LlmdSidecar) {
            return edit(body, &added, |_| false);
        }
        if self.connector == Connector::TensorRtLlm {
            return edit(body, trtllm::PREFILL, |key| matches!(key, "stream" | "stream_options"));
        }
        let limit = if self.api == Api::Responses { "max_output_tokens" } else { "max_tokens" };
        let comma = if added.is_empty() { "" } else { "," };
        added = format!("\"{limit}\":1,\"stream\":false{comma}{added}");
        let is_stored = self.api == Api::Responses;
        if is_stored {
            added.push_str(",\"store\":false");
        }
        let ends_by_length = self.connector == Connector::Mooncake;
        if ends_by_length {
            added.push_str(mooncake::ENDS_BY_LENGTH);
        }
        edit(body, &added, |key| {
            is_of_the_answer(key)
                || is_stored && key == "store"
                || ends_by_length && mooncake::ends_the_answer(key)
        })
    }

    /// The body of a second leg that is sent after `answer`, that of the first.
    ///
    /// # Errors
    /// Why the answer, or the body, gives none.
    pub fn body_after(&self, body: &[u8], answer: &[u8]) -> Result<Bytes, NoParams> {
        let edited = if self.connector == Connector::TensorRtLlm {
            let (added, replaced) = trtllm::decode(self.api, answer)?;
            edit(body, &added, |key| replaced == Some(key))
        } else {
            let params = self.connector.relays_params().then(|| transfer_params(answer)).transpose()?;
            self.decode_body(body, params)
        };
        edited.map_err(|_| NoParams::Body)
    }

    /// The body of the second leg: the client's, with `params`, the object of the answer to the first leg, or without
    /// it with what the connector says of [`Split::source`]. Without `params`, an engine with [`Connector::Nixl`]
    /// computes the prompt itself.
    ///
    /// # Errors
    /// If the body is not a JSON object.
    pub fn decode_body(&self, body: &[u8], params: Option<TransferParams<'_>>) -> Result<Bytes, ParseError> {
        let added = match params {
            Some(params) => format!("\"kv_transfer_params\":{}", params.json()),
            None => decode_member(self),
        };
        edit(body, &added, |_| false)
    }
}

/// A client's body without reserved members. Needed only where [`ParsedRequest::reserved`](crate::openai::ParsedRequest::reserved) says that there are any; the
/// bodies of both legs are without them anyway.
///
/// # Errors
/// If the body is not a JSON object.
pub fn strip_transfer_params(body: &[u8]) -> Result<Bytes, ParseError> {
    edit(body, "", |_| false)
}

/// The member of `kv_transfer_params` or its like on the first leg, as `"key":value`; empty if there is none.
fn prefill_member(split: &Split<'_>) -> String {
    match split.connector {
        Connector::Nixl | Connector::NixlPush => nixl::PREFILL.into(),
        Connector::Mooncake => mooncake::prefill(split.room),
        Connector::Sglang => sglang::bootstrap(split),
        Connector::LmCache | Connector::SharedStorage | Connector::TensorRtLlm | Connector::LlmdSidecar => {
            String::new()
        }
    }
}

/// The same on the second leg, where the answer to the first does not give it.
fn decode_member(split: &Split<'_>) -> String {
    match split.connector {
        Connector::NixlPush => nixl::decode(split),
        Connector::Mooncake => mooncake::decode(split),
        Connector::Sglang => sglang::bootstrap(split),
        Connector::Nixl
        | Connector::LmCache
        | Connector::SharedStorage
        | Connector::TensorRtLlm
        | Connector::LlmdSidecar => String::new(),
    }
}

/// Whether a member of a body shapes the answer but not the prompt, so that a first leg, whose answer is one token for
/// no reader, does not need it. Some would make it invalid: `min_tokens` above the limit, `stream_options` without
/// `stream`. The others are limits that win over the one of a first leg, or cost work and bytes.
pub(super) fn is_of_the_answer(key: &str) -> bool {
    matches!(
        key,
        "max_tokens"
            | "max_completion_tokens"
            | "max_output_tokens"
            | "min_tokens"
            | "stream"
            | "stream_options"
            | "n"
            | "best_of"
            | "echo"
            | "logprobs"
            | "top_logprobs"
            | "prompt_logprobs"
    )
}

/// The body with `added`, without reserved members and those that `removes` names.
fn edit(body: &[u8], added: &str, removes: impl Fn(&str) -> bool) -> Result<Bytes, ParseError> {
    let edited =
        edited(
            utf8(body)?,
            added,
            |key, value| {
                if removes(key) { Change::Remove } else { reserved::change(key, value) }
            },
        )?;
    Ok(edited.into())
}
