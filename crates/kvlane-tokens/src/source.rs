//! Where a tokenizer comes from, and what can be wrong there.

use std::path::PathBuf;

use thiserror::Error;

/// Where the files of a tokenizer are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// A model's directory, or its `tokenizer.json`, `*.tiktoken` or `tiktoken.model`; the files beside it are read too.
    pub path: PathBuf,
    /// A file that holds the chat template to use instead of the model's own.
    pub chat_template: Option<PathBuf>,
}

impl Source {
    /// The tokenizer at `path` with its own chat template.
    pub fn at(path: impl Into<PathBuf>) -> Source {
        Source { path: path.into(), chat_template: None }
    }
}

/// How message contents are handed to the template, vLLM's `--chat-template-content-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentFormat {
    /// What the template looks as if it wanted, as vLLM finds out.
    #[default]
    Auto,
    /// As text.
    String,
    /// As a list of parts.
    OpenAi,
}

/// Limits and choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most bytes of cached encodings.
    pub cache_bytes_max: usize,
    /// Most bytes a template may print.
    pub text_bytes_max: usize,
    /// Most instructions a template may take, in thousands.
    pub template_fuel_k: u32,
    /// How message contents are handed to the template.
    pub content_format: ContentFormat,
    /// Whether tools are left out where `tool_choice` is `none`, vLLM's `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            cache_bytes_max: 256 << 20,
            text_bytes_max: 64 << 20,
            template_fuel_k: 20_000,
            content_format: ContentFormat::Auto,
            exclude_tools_when_tool_choice_none: false,
        }
    }
}

/// Why a tokenizer could not be loaded: what is missing, where, and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Neither a file nor a directory.
    #[error("no tokenizer at {path}: {error}; give a model's directory or its tokenizer.json")]
    Absent {
        /// What was asked for.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The directory holds no tokenizer in a known form.
    #[error(
        "{path} holds no tokenizer.json, *.tiktoken or tiktoken.model; copy the model's tokenizer files there"
    )]
    NoTokenizer {
        /// The directory.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// A file is larger than any tokenizer's.
    #[error("{path} has {bytes} bytes, more than the {max} a tokenizer file may have; is it the right file?")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The most that is read.
        max: u64,
    },
    /// A file is not what its name says.
    #[error("{path} is not usable: {why}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do.
        why: String,
    },
    /// The chat template does not compile.
    #[error("the chat template of {path} does not compile: {why}; give another with --chat-template")]
    Template {
        /// The file.
        path: PathBuf,
        /// Where and what.
        why: String,
    },
}
