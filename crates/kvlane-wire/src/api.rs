//! Inference APIs: the paths whose request body names a model and carries a prompt.
//!
//! Paths are matched exactly; the gateway relays or rejects any other path.

/// An API of an inference server, as far as request placement distinguishes them.
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
    /// `/rerank`, `/v1/rerank` (vLLM and SGLang; Jina's and Cohere's shape).
    Rerank,
    /// `/score`, `/v1/score` (vLLM and SGLang).
    Score,
    /// `/tokenize`, `/v1/tokenize`.
    Tokenize,
    /// `/detokenize`, `/v1/detokenize`.
    Detokenize,
    /// SGLang's native `/generate`.
    Generate,
}

impl Api {
    /// Every API, in the order of the enum.
    pub const ALL: [Api; 10] = [
        Api::ChatCompletions,
        Api::Completions,
        Api::Embeddings,
        Api::Responses,
        Api::Messages,
        Api::Rerank,
        Api::Score,
        Api::Tokenize,
        Api::Detokenize,
        Api::Generate,
    ];

    /// Every path, with its API.
    pub const PATHS: [(&str, Api); 14] = [
        ("/v1/chat/completions", Api::ChatCompletions),
        ("/v1/completions", Api::Completions),
        ("/v1/embeddings", Api::Embeddings),
        ("/v1/responses", Api::Responses),
        ("/v1/messages", Api::Messages),
        ("/rerank", Api::Rerank),
        ("/v1/rerank", Api::Rerank),
        ("/score", Api::Score),
        ("/v1/score", Api::Score),
        ("/tokenize", Api::Tokenize),
        ("/v1/tokenize", Api::Tokenize),
        ("/detokenize", Api::Detokenize),
        ("/v1/detokenize", Api::Detokenize),
        ("/generate", Api::Generate),
    ];

    /// The API at `path` (without query string), if it is one of these.
    pub fn from_path(path: &str) -> Option<Api> {
        Self::PATHS.iter().find(|(known, _)| *known == path).map(|(_, api)| *api)
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
            Api::Tokenize => "tokenize",
            Api::Detokenize => "detokenize",
            Api::Generate => "generate",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_and_without_its_version_is_the_same_endpoint_where_servers_offer_both() {
        for name in ["rerank", "score", "tokenize", "detokenize"] {
            let api = Api::from_path(&format!("/{name}")).expect("plain path");
            assert_eq!(api.name(), name);
            assert_eq!(Api::from_path(&format!("/v1/{name}")), Some(api));
        }
        assert_eq!(Api::from_path("/v1/chat/completions"), Some(Api::ChatCompletions));
    }

    #[test]
    fn other_paths_are_not_ours() {
        for path in ["", "/", "/v1/models", "/v1/chat/completions/", "/chat/completions", "/V1/messages"] {
            assert_eq!(Api::from_path(path), None, "{path}");
        }
    }

    #[test]
    fn every_endpoint_has_its_own_label() {
        for (i, a) in Api::ALL.iter().enumerate() {
            assert!(Api::ALL[..i].iter().all(|b| b.name() != a.name() && b != a), "{a:?}");
        }
    }
}
