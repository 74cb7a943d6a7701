//! What is read of a request's body, and why a body cannot be read.

use std::borrow::Cow;

use thiserror::Error;

use super::agent_hints::AgentHints;
use crate::grpc::FrameError;
use crate::json::{DEPTH_MAX, JsonError};
use crate::protobuf::Invalid;

/// Longest accepted session name. Longer ones are ignored: they would be stored per session, and truncation could merge
/// two sessions.
pub const SESSION_BYTES_MAX: usize = 256;

/// The properties of a body that placement needs, borrowed from the body where possible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedRequest<'a> {
    /// `model`. The caller decides whether its absence is an error: a gateway with one pool may not need it.
    pub model: Option<Cow<'a, str>>,
    /// Whether the answer is to be streamed.
    pub stream: bool,
    /// Limit of output tokens: `max_completion_tokens`, `max_output_tokens`, `max_tokens`, llama.cpp's `n_predict`, or
    /// `max_new_tokens` or `max_tokens` in `sampling_params` (SGLang, vLLM). Negative values, which some engines read as no limit, are ignored.
    pub output_tokens_max: Option<u32>,
    /// `cache_salt`: requests with different salts must not share cached prefixes (vLLM).
    pub cache_salt: Option<Cow<'a, str>>,
    /// Responses' `previous_response_id`: a response stored by one engine and unknown to the others.
    pub previous_response: Option<Cow<'a, str>>,
    /// Responses' `conversation`, an id or an object with one: also stored by one engine.
    pub conversation: Option<Cow<'a, str>>,
    /// SGLang's `lora_path`: the adapter, which is part of a cached block's identity.
    pub lora: Option<Cow<'a, str>>,
    /// The conversation, from the first present of `session_id`, `session_params.id`, `prompt_cache_key`, `user` and
    /// Anthropic's `metadata.user_id`; at most [`SESSION_BYTES_MAX`] bytes.
    pub session: Option<Cow<'a, str>>,
    /// Dynamo's `nvext.agent_hints`.
    pub agent_hints: AgentHints,
    /// Prompts in the batch, at least 1; documents for a reranker.
    pub prompts: u32,
    /// Whether any prompt is given as token ids.
    pub token_ids: bool,
    /// Whether it has members that only a gateway may send to an engine, and which must not be relayed; see
    /// [`strip_transfer_params`](crate::disaggregation::strip_transfer_params).
    pub reserved: bool,
    /// Whether it has members that can be reasons not to split it; see [`may_split`](crate::disaggregation::may_split).
    pub telling: bool,
}

/// Why a body cannot be placed. Always a client error; a retry does not help.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseError {
    /// No bytes, or only whitespace.
    #[error("the request body is empty; send a JSON object")]
    Empty,
    /// The body is not UTF-8.
    #[error("the request body is not UTF-8 at byte {at}; send JSON encoded as UTF-8")]
    NotUtf8 {
        /// Offset of the first invalid byte.
        at: usize,
    },
    /// The body is not JSON, or is truncated.
    #[error("the request body is not valid JSON at byte {at}: expected {expected}")]
    Syntax {
        /// Offset of the first unexpected byte.
        at: usize,
        /// What was expected.
        expected: &'static str,
    },
    /// The body is nested too deeply.
    #[error("the request body nests deeper than {max} levels at byte {at}; flatten it")]
    TooDeep {
        /// Offset of the bracket that exceeds the limit.
        at: usize,
        /// The limit.
        max: u32,
    },
    /// A top-level key that affects placement occurs twice; the engine may use the other value.
    #[error("the request body has the key \"{key}\" again before byte {at}; send it once")]
    DuplicateKey {
        /// The key.
        key: &'static str,
        /// Offset of its second value.
        at: usize,
    },
    /// The body has no prompt.
    #[error("the request body has no \"{field}\"; add it")]
    Missing {
        /// The key that usually holds it.
        field: &'static str,
    },
    /// A value's type is one that no engine accepts there.
    #[error("the request body's \"{field}\" has the wrong type; send {expected}")]
    WrongType {
        /// The key.
        field: &'static str,
        /// The accepted types.
        expected: &'static str,
    },
    /// The body of a gRPC call is not one message.
    #[error("{0}; send one message without compression")]
    Frame(#[from] FrameError),
    /// The message of a gRPC call is not valid.
    #[error(transparent)]
    Message(#[from] Invalid),
}

impl From<JsonError> for ParseError {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::Syntax { at, expected } => Self::Syntax { at, expected },
            JsonError::TooDeep { at } => Self::TooDeep { at, max: DEPTH_MAX },
        }
    }
}
