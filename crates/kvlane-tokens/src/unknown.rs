//! Why the tokens of a request cannot be known here.

use std::borrow::Cow;

use thiserror::Error;

/// Why a request's tokens are not known. The caller estimates, and nothing is wrong with the request itself unless
/// [`Unknown::Body`] or [`Unknown::Refused`] says so: even then it is for the engine to say.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unknown {
    /// The body is not what this API takes.
    #[error("the body is not a request of this API: {0}")]
    Body(Cow<'static, str>),
    /// The API has no prompt in tokens that could be known here.
    #[error("prompts of {0} are not counted")]
    Api(&'static str),
    /// The tokenizer came without a chat template.
    #[error("the model has no chat template: give one with --chat-template")]
    NoTemplate,
    /// The template refuses this conversation, as it would at the engine.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template failed, or wants something that is not offered here.
    #[error("the chat template cannot be rendered: {0}")]
    Template(String),
    /// The rendering passed one of the limits.
    #[error("the chat template passed a limit: {0}")]
    Limit(Cow<'static, str>),
    /// The prompt holds something other than text.
    #[error("{0} take tokens that only the engine can count")]
    Media(&'static str),
    /// A field changes the prompt in a way that is not known here.
    #[error("field {0} changes the prompt in a way that is not known here")]
    Field(&'static str),
    /// The model's conversations are rendered by the engine itself, not by a template.
    #[error("conversations of this model are rendered by the engine, not by its template: {0}")]
    EngineRenders(&'static str),
    /// The tokenizer failed on the text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
}

impl Unknown {
    /// The reason as a metric label.
    pub const fn name(&self) -> &'static str {
        match self {
            Unknown::Body(_) => "body",
            Unknown::Api(_) => "api",
            Unknown::NoTemplate => "no_template",
            Unknown::Refused(_) => "refused",
            Unknown::Template(_) => "template",
            Unknown::Limit(_) => "limit",
            Unknown::Media(_) => "media",
            Unknown::Field(_) => "field",
            Unknown::EngineRenders(_) => "engine_renders",
            Unknown::Tokenizer(_) => "tokenizer",
        }
    }
}
