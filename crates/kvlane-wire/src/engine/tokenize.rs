//! How an engine is asked for the token ids of a request.

use serde::Deserialize;
use serde_json::{Value, json};

use super::feed::text;
use crate::api::Api;

/// How an engine tokenizes a request, and turns token ids into text.
pub struct Tokenize {
    /// The engine whose form this is, in texts.
    pub like: &'static str,
    /// Path that takes the body of a request, by POST.
    pub path: &'static str,
    /// The APIs whose bodies it takes.
    pub apis: &'static [Api],
    /// Reads the answer.
    pub parse: fn(&[u8]) -> Result<Tokenized, serde_json::Error>,
    /// Path that takes token ids, by POST.
    pub text_path: &'static str,
    /// The body for a model's token ids.
    pub text_body: fn(&str, &[u32]) -> Value,
    /// Reads the text in the answer.
    pub text_parse: fn(&[u8]) -> Option<String>,
}

/// A tokenized request.
#[derive(Deserialize)]
pub struct Tokenized {
    /// The token ids.
    pub tokens: Vec<u32>,
    /// The context length in tokens, if the engine reports it.
    pub max_model_len: Option<u64>,
}

// === impl Tokenize ===

impl Tokenize {
    /// vLLM's form, which SGLang and other servers copy. Fields of a body that the engine does not know are ignored
    /// (`entrypoints/serve/tokenize/protocol.py`).
    pub(super) const VLLM: Self = Self {
        like: "vLLM",
        path: "/tokenize",
        apis: &[Api::ChatCompletions, Api::Completions],
        parse: |answer| serde_json::from_slice(answer),
        text_path: "/detokenize",
        text_body: |model, tokens| json!({"model": model, "tokens": tokens}),
        text_parse: |answer| text(&serde_json::from_slice(answer).ok()?, "prompt"),
    };
}
