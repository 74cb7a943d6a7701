//! Tokenizer sources, settings and load errors.

use std::path::PathBuf;

use thiserror::Error;

/// Location of a tokenizer's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// A model's directory, or its `tokenizer.json`, `*.tiktoken` or `tiktoken.model`; files next to it are read too.
    pub path: PathBuf,
    /// A chat template file that replaces the model's own.
    pub chat_template: Option<PathBuf>,
}

impl Source {
    /// The tokenizer at `path` with its own chat template.
    pub fn at(path: impl Into<PathBuf>) -> Source {
        Source { path: path.into(), chat_template: None }
    }
}

/// Form of message contents for the template, vLLM's `--chat-template-content-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentFormat {
    /// Detected from the template, as in vLLM.
    #[default]
    Auto,
    /// As text.
    String,
    /// As a list of parts.
    OpenAi,
}

/// Limits and settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Memory limit of cached encodings, in bytes.
    pub cache_bytes_max: usize,
    /// Longest output of a template, in bytes.
    pub text_bytes_max: usize,
    /// Instruction limit of a template, in thousands.
    pub template_fuel_k: u32,
    /// Form of message contents for the template.
    pub content_format: ContentFormat,
    /// Whether tools are omitted if `tool_choice` is `none`, vLLM's `--exclude-tools-when-tool-choice-none`.
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

/// Why a tokenizer could not be loaded, and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Neither a file nor a directory.
    #[error("no tokenizer at {path}: {error}; give a model's directory or its tokenizer.json")]
    Absent {
        /// The given path.
        path: PathBuf,
        /// The operating system's error.
        error: std::io::Error,
    },
    /// The directory contains no supported tokenizer.
    #[error(
        "{path} contains no tokenizer.json, *.tiktoken or tiktoken.model; copy the model's tokenizer files there"
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
        /// The operating system's error.
        error: std::io::Error,
    },
    /// A file is too large for a tokenizer.
    #[error("{path} has {bytes} bytes, above the limit of {max} for a tokenizer file; is it the right file?")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// A file's content is not valid.
    #[error("{path} is not usable: {why}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem and what to do.
        why: String,
    },
    /// The chat template does not compile.
    #[error("the chat template of {path} does not compile: {why}; give another with --chat-template")]
    Template {
        /// The file.
        path: PathBuf,
        /// The position and the problem.
        why: String,
    },
}
