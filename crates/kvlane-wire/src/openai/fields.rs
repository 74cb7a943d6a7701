//! The top-level keys of request bodies, by API.

use crate::api::Api;

/// The meaning of a top-level key. Where several keys give the same property, the higher number wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Model,
    Stream,
    OutputTokens(u8),
    SamplingParams,
    PreviousResponse,
    Conversation,
    CacheSalt,
    Lora,
    Session(u8),
    SessionParams,
    Metadata,
    Extensions,
    Tools,
    System,
    Messages,
    Prompts,
    Documents,
}

/// Keys with the same meaning in every API.
pub(super) const SHARED: [(&str, Field); 15] = [
    ("model", Field::Model),
    ("stream", Field::Stream),
    ("max_tokens", Field::OutputTokens(1)),
    ("max_completion_tokens", Field::OutputTokens(2)),
    ("max_output_tokens", Field::OutputTokens(2)),
    ("n_predict", Field::OutputTokens(2)),
    ("sampling_params", Field::SamplingParams),
    ("cache_salt", Field::CacheSalt),
    ("lora_path", Field::Lora),
    ("session_id", Field::Session(4)),
    ("session_params", Field::SessionParams),
    ("prompt_cache_key", Field::Session(2)),
    ("user", Field::Session(1)),
    ("metadata", Field::Metadata),
    ("nvext", Field::Extensions),
];

/// Keys that hold the prompt; error messages name the first one.
pub(super) const fn prompt_fields(api: Api) -> &'static [(&'static str, Field)] {
    match api {
        Api::ChatCompletions => &[("messages", Field::Messages), ("tools", Field::Tools)],
        Api::Completions => &[("prompt", Field::Prompts), ("prompt_embeds", Field::Documents)],
        Api::Embeddings => &[("input", Field::Prompts), ("messages", Field::Messages)],
        Api::Responses => &[
            ("input", Field::Messages),
            ("instructions", Field::System),
            ("tools", Field::Tools),
            ("previous_response_id", Field::PreviousResponse),
            ("conversation", Field::Conversation),
        ],
        Api::Messages => &[("messages", Field::Messages), ("system", Field::System), ("tools", Field::Tools)],
        Api::Rerank => &[("query", Field::Prompts), ("documents", Field::Documents)],
        Api::Score => &[
            ("text_1", Field::Prompts),
            ("text_2", Field::Documents),
            ("queries", Field::Prompts),
            ("documents", Field::Documents),
            ("query", Field::Prompts),
            ("items", Field::Documents),
        ],
        // vLLM accepts a prompt or messages, llama.cpp content.
        Api::Tokenize => &[
            ("prompt", Field::Prompts),
            ("messages", Field::Messages),
            ("tools", Field::Tools),
            ("content", Field::Prompts),
        ],
        Api::Detokenize => &[("tokens", Field::Prompts)],
        Api::Generate => &[("text", Field::Prompts), ("input_ids", Field::Prompts)],
        // Not JSON: see `engine::calls`.
        Api::EngineGenerate | Api::EngineEmbed => &[],
        Api::TokensIn => &[("token_ids", Field::Prompts)],
        Api::Completion => &[("prompt", Field::Prompts)],
        Api::Infill => &[
            ("prompt", Field::Prompts),
            ("input_prefix", Field::Prompts),
            ("input_suffix", Field::Documents),
            ("input_extra", Field::Documents),
        ],
        Api::Embedding => &[("content", Field::Prompts), ("input", Field::Prompts)],
        // vLLM takes an input or messages, SGLang text or token ids.
        Api::Pooling => &[
            ("input", Field::Prompts),
            ("messages", Field::Messages),
            ("text", Field::Prompts),
            ("input_ids", Field::Prompts),
        ],
        Api::Invocations => &[
            ("messages", Field::Messages),
            ("tools", Field::Tools),
            ("prompt", Field::Prompts),
            ("input", Field::Prompts),
            ("text", Field::Prompts),
            ("query", Field::Prompts),
            ("documents", Field::Documents),
        ],
    }
}
