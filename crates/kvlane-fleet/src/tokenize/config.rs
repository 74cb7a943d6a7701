//! The configuration section `tokens`: tokenizers, and limits of the work of counting.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlane_core::config::{ConfigError, TIME, wrong};
use kvlane_core::{section, setting};
use kvlane_tokens::ContentFormat;
use serde::{Deserialize, Serialize};

use crate::routing::PoolOverride;

section! {
    /// How the tokens of prompts are counted.
    pub struct Tokens {
        /// Source of token counts if no path is set. auto: a tokenizer in the model directory that the engine
        /// reports, if it can be read, else estimate; engine: the engine's `/tokenize`, for every prompt; estimate:
        /// four bytes are a token.
        pub source: TokenSource = TokenSource::Auto;
        /// The model's tokenizer: its directory, its `tokenizer.json`, `*.tiktoken` or `tiktoken.model`, or its id at the
        /// Hugging Face Hub, as in `Qwen/Qwen3-8B`, whose files are then in the Hub's cache on this machine. Tokens
        /// are counted as the engines count them. A pool's own is in `routing.pools`.
        pub path: Option<PathBuf> = None;
        /// Whether a tokenizer that is given by its id is downloaded if it is not in the Hub's cache. Environment:
        /// `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`.
        pub allow_download: bool = false;
        /// A file with a chat template that replaces the model's own.
        pub chat_template: Option<PathBuf> = None;
        /// Format of message contents for the template: auto, string or openai, as vLLM's
        /// `--chat-template-content-format`.
        pub content_format: Content = Content::Auto;
        /// Tokenizer threads; 0 is one per core.
        pub threads: usize = 0, in 0..=1024;
        /// Maximum queued prompts; further ones are estimated.
        pub queue_size: usize = 1024, in 1..=1_000_000;
        /// Maximum bytes of cached encodings of one tokenizer.
        pub cache_memory: usize = 256 << 20, in 0..=1 << 40;
        /// Timeout of an engine's `/tokenize`; after it the prompt is estimated.
        #[serde(with = "humantime_serde")]
        pub engine_timeout: Duration = Duration::from_secs(1), in TIME;
    }
}

/// How the tokens of a pool's prompts are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSource {
    /// With a tokenizer from the model directory that the engine reports, if this process can read it; else
    /// estimated.
    #[default]
    Auto,
    /// By a worker of the pool, for every prompt.
    Engine,
    /// Estimated: four bytes count as a token.
    Estimate,
}

/// [`ContentFormat`] by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// Detected from the template.
    #[default]
    Auto,
    /// As text.
    String,
    /// As a list of parts.
    OpenAi,
}

/// How the tokens of one pool are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The tokenizer that the engine's model list leads to, or an estimate.
    Auto {
        /// The chat template to use instead of the model's own.
        chat_template: Option<PathBuf>,
    },
    /// This tokenizer.
    Local(kvlane_tokens::Source),
    /// The engine's `/tokenize`.
    Engine,
    /// An estimate by bytes.
    Estimate,
}

setting!(Text: TokenSource, Content);

// === impl Tokens ===

impl Tokens {
    /// Checks what bounds cannot.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match (&self.path, self.source) {
            (Some(path), source @ (TokenSource::Engine | TokenSource::Estimate)) => wrong(
                "tokens.path",
                format!(
                    "{} is not used with tokens.source {source:?}: leave one of them out",
                    path.display()
                ),
            ),
            _ => Ok(()),
        }
    }

    /// The limits of each tokenizer.
    pub fn limits(&self) -> kvlane_tokens::Config {
        kvlane_tokens::Config {
            cache_bytes_max: self.cache_memory,
            content_format: match self.content_format {
                Content::Auto => ContentFormat::Auto,
                Content::String => ContentFormat::String,
                Content::OpenAi => ContentFormat::OpenAi,
            },
            ..kvlane_tokens::Config::default()
        }
    }
}

/// How the tokens of `model`'s pool are counted.
pub fn plan(tokens: &Tokens, pools: &BTreeMap<String, PoolOverride>, model: &str) -> Plan {
    let differs = pools.get(model);
    let chat_template =
        differs.and_then(|pool| pool.chat_template.clone()).or_else(|| tokens.chat_template.clone());
    let local = |path: &Path| {
        Plan::Local(kvlane_tokens::Source { path: path.into(), chat_template: chat_template.clone() })
    };
    match (differs.and_then(|pool| pool.tokenizer.as_deref()), &tokens.path, tokens.source) {
        (Some("engine"), ..) | (None, None, TokenSource::Engine) => Plan::Engine,
        (Some("estimate"), ..) | (None, None, TokenSource::Estimate) => Plan::Estimate,
        (Some("auto"), ..) | (None, None, TokenSource::Auto) => Plan::Auto { chat_template },
        (Some(path), ..) => local(Path::new(path)),
        (None, Some(path), _) => local(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(tokens: Tokens, pool: PoolOverride) -> Plan {
        plan(&tokens, &BTreeMap::from([("m".into(), pool)]), "m")
    }

    fn with(tokenizer: &str) -> PoolOverride {
        PoolOverride { tokenizer: Some(tokenizer.into()), ..PoolOverride::default() }
    }

    #[test]
    fn a_pools_own_tokenizer_precedes_the_common_one() {
        let all = || Tokens { path: Some("/all".into()), ..Tokens::default() };
        assert_eq!(planned(all(), PoolOverride::default()), Plan::Local(kvlane_tokens::Source::at("/all")));
        assert_eq!(planned(all(), with("/own")), Plan::Local(kvlane_tokens::Source::at("/own")));
        assert_eq!(planned(all(), with("engine")), Plan::Engine);
        assert_eq!(planned(all(), with("estimate")), Plan::Estimate);
        assert_eq!(planned(all(), with("auto")), Plan::Auto { chat_template: None });
    }

    #[test]
    fn without_a_path_the_source_decides_how_tokens_are_counted() {
        for (source, expect) in [
            (TokenSource::Auto, Plan::Auto { chat_template: None }),
            (TokenSource::Engine, Plan::Engine),
            (TokenSource::Estimate, Plan::Estimate),
        ] {
            let tokens = Tokens { source, ..Tokens::default() };
            assert_eq!(planned(tokens, PoolOverride::default()), expect);
        }
    }

    #[test]
    fn a_path_that_would_not_be_used_is_an_error() {
        let tokens = Tokens { source: TokenSource::Engine, path: Some("/all".into()), ..Tokens::default() };
        let error = tokens.validate().expect_err("conflicting settings").to_string();
        assert!(error.contains("tokens.path") && error.contains("/all"), "{error}");
    }
}
