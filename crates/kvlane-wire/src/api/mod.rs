//! The engines' APIs: [one row for each path](ENGINE_PATHS), and the request bodies that are parsed.

pub mod document;
pub mod object_ids;
pub mod path;
mod table;

pub use table::{Audience, Body, ENGINE_PATHS, EnginePath, Keeps, Repeats, Streams};

/// An API whose request body is parsed, as far as request placement distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI `/v1/chat/completions`.
    ChatCompletions,
    /// OpenAI `/v1/completions`.
    Completions,
    /// OpenAI `/v1/embeddings`.
    Embeddings,
    /// OpenAI `/v1/responses`.
    Responses,
    /// Anthropic `/v1/messages`.
    Messages,
    /// `/rerank` (vLLM, SGLang and llama.cpp; Jina's and Cohere's shape).
    Rerank,
    /// `/score` (vLLM and SGLang).
    Score,
    /// `/classify`, `/pooling`, `/encode`: models that compute a prompt and generate nothing.
    Pooling,
    /// `/tokenize`.
    Tokenize,
    /// `/detokenize`.
    Detokenize,
    /// SGLang's `/generate`.
    Generate,
    /// vLLM's `/inference/v1/generate`, whose prompt is token ids.
    TokensIn,
    /// llama.cpp's `/completion`.
    Completion,
    /// llama.cpp's `/infill`: text before and after a gap.
    Infill,
    /// llama.cpp's `/embedding`.
    Embedding,
    /// Amazon SageMaker's `/invocations`: a body of any of the APIs.
    Invocations,
    /// `Generate` of vLLM's gRPC service.
    EngineGenerate,
    /// `Embed` of vLLM's gRPC service.
    EngineEmbed,
}

impl Api {
    /// Every API, in the order of the enum.
    pub const ALL: [Api; 18] = [
        Api::ChatCompletions,
        Api::Completions,
        Api::Embeddings,
        Api::Responses,
        Api::Messages,
        Api::Rerank,
        Api::Score,
        Api::Pooling,
        Api::Tokenize,
        Api::Detokenize,
        Api::Generate,
        Api::TokensIn,
        Api::Completion,
        Api::Infill,
        Api::Embedding,
        Api::Invocations,
        Api::EngineGenerate,
        Api::EngineEmbed,
    ];

    /// The API at `path` (without query string), if it is one of these.
    pub fn from_path(path: &str) -> Option<Api> {
        EnginePath::of(path)?.0.api()
    }

    /// Whether its body is a gRPC message.
    pub const fn is_grpc(self) -> bool {
        matches!(self, Api::EngineGenerate | Api::EngineEmbed)
    }

    /// Whether the tokens of its prompts can be counted as engines count them.
    pub const fn is_counted(self) -> bool {
        !matches!(self, Api::Rerank | Api::Score | Api::Detokenize | Api::Infill)
    }

    /// Whether a body without a prompt is an error. Where it is not, a prompt may have forms that are not parsed.
    pub const fn needs_prompt(self) -> bool {
        !matches!(self, Api::Pooling | Api::Completion | Api::Infill | Api::Embedding | Api::Invocations)
    }

    /// The API's name as a metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Api::ChatCompletions => "chat_completions",
            Api::Completions => "completions",
            Api::Embeddings => "embeddings",
            Api::Responses => "responses",
            Api::Messages => "messages",
            Api::Rerank => "rerank",
            Api::Score => "score",
            Api::Pooling => "pooling",
            Api::Tokenize => "tokenize",
            Api::Detokenize => "detokenize",
            Api::Generate => "generate",
            Api::TokensIn => "inference_generate",
            Api::Completion => "completion",
            Api::Infill => "infill",
            Api::Embedding => "embedding",
            Api::Invocations => "invocations",
            Api::EngineGenerate => "grpc_generate",
            Api::EngineEmbed => "grpc_embed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_api_has_its_own_label_and_a_path() {
        for (i, a) in Api::ALL.iter().enumerate() {
            assert!(Api::ALL[..i].iter().all(|b| b.name() != a.name() && b != a), "{a:?}");
            assert!(ENGINE_PATHS.iter().any(|row| row.api() == Some(*a)), "{a:?}");
        }
    }
}
