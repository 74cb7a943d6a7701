//! Reasons why a request's tokens cannot be determined.

use std::borrow::Cow;

use thiserror::Error;

use crate::media::question::NewImage;

/// Why a request's tokens cannot be determined. The caller estimates them. The request itself may be invalid only for
/// [`Unknown::Body`] and [`Unknown::Refused`], and even then the engine decides.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unknown {
    /// The body is invalid for this API.
    #[error("the body is not a valid request of this API: {0}")]
    Body(Cow<'static, str>),
    /// The API has no prompt whose tokens can be counted.
    #[error("tokens of {0} requests cannot be counted")]
    Api(&'static str),
    /// The tokenizer has no chat template.
    #[error("the model has no chat template: give one with --chat-template")]
    NoTemplate,
    /// The template rejects this conversation, as it would in the engine.
    #[error("the chat template rejects the conversation: {0}")]
    Refused(String),
    /// The template failed, or uses an unsupported function.
    #[error("the chat template cannot be rendered: {0}")]
    Template(String),
    /// The rendering exceeded a limit.
    #[error("the chat template exceeded a limit: {0}")]
    Limit(Cow<'static, str>),
    /// The prompt contains content other than text.
    #[error("only the engine can count the tokens of {0}")]
    Media(&'static str),
    /// An image of a size that no engine has been asked about yet.
    #[error("no engine has been asked about the tokens of an image of this size")]
    NewImage(Box<NewImage>),
    /// A field affects the prompt in an unsupported way.
    #[error("field {0} affects the prompt in an unsupported way")]
    Field(&'static str),
    /// The engine itself renders the model's conversations, without a template.
    #[error("the engine renders this model's conversations itself, without its template: {0}")]
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
            Unknown::NewImage(_) => "new_image",
            Unknown::Field(_) => "field",
            Unknown::EngineRenders(_) => "engine_renders",
            Unknown::Tokenizer(_) => "tokenizer",
        }
    }
}
