//! Reads request bodies as vLLM 0.32 does: a prompt given as ids, a plain text, or a conversation with its template's
//! arguments.
//!
//! Anthropic and Responses conversations are first converted to chat conversations, as in vLLM. Sampling parameters do
//! not affect the prompt and are ignored.

mod anthropic;
mod chat;
mod conversation;
mod responses;

use std::borrow::Cow;

use kvlane_wire::api::Api;
use kvlane_wire::engine::calls::{Prompt, read_prompt};

use crate::json::{Json, Map, parse};
use crate::unknown::Unknown;

pub(crate) use chat::Chat;
pub(crate) use conversation::{Wants, conversation};

/// The prompt source in a body.
#[derive(Debug)]
pub(crate) enum Request<'a> {
    /// Token ids.
    Ids(Vec<u32>, Option<Truncate>),
    /// A text to encode.
    Text(Cow<'a, str>, Shape),
    /// A conversation to render.
    Chat(Box<Chat<'a>>),
    /// Several prompts, each ids or a text.
    List(Vec<Request<'a>>),
}

/// Processing of the text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Whether the tokenizer's own special tokens are added at both ends.
    pub(crate) add_special: bool,
    pub(crate) truncate: Option<Truncate>,
}

/// vLLM's `truncate_prompt_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Truncate {
    /// Tokens to keep.
    pub(crate) tokens: u32,
    /// The side to cut; `None` for the tokenizer's default.
    pub(crate) side: Option<Side>,
}

/// An end of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Settings for reading a body.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    /// vLLM's `--exclude-tools-when-tool-choice-none`.
    pub(crate) exclude_tools_when_none: bool,
    /// Whether later Anthropic system messages are merged into the first.
    pub(crate) system_first: bool,
    /// What Anthropic's `thinking: disabled` becomes: `low` if the template does not support `none`.
    pub(crate) disabled_effort_low: bool,
}

/// Reads the body of a request to `api`.
pub(crate) fn read<'a>(api: Api, body: &'a [u8], reading: Reading) -> Result<Request<'a>, Unknown> {
    if api.is_grpc() {
        return match read_prompt(body).map_err(|error| Unknown::Body(error.to_string().into()))? {
            Prompt::Ids(ids) => Ok(Request::Ids(ids, None)),
            Prompt::Text(text) => Ok(Request::Text(text.into(), Shape { add_special: true, truncate: None })),
        };
    }
    let text = simdutf8::basic::from_utf8(body).map_err(|_| Unknown::Body("not UTF-8".into()))?;
    let Json::Map(body) = parse(text).map_err(|error| Unknown::Body(error.to_string().into()))? else {
        return Err(Unknown::Body("not an object".into()));
    };
    match api {
        Api::ChatCompletions => chat::read(body, chat::Kind::Completion, reading),
        Api::Messages => anthropic::read(body, reading),
        Api::Responses => responses::read(body, reading),
        Api::Tokenize if body.some("messages").is_some() => chat::read(body, chat::Kind::Tokenize, reading),
        Api::Completions | Api::Tokenize => completion(body, "prompt"),
        Api::Embeddings if body.some("messages").is_none() => completion(body, "input"),
        Api::Generate => generate(body),
        Api::TokensIn => completion(body, "token_ids"),
        Api::Completion => completion(body, "prompt"),
        Api::Embedding if body.some("content").is_some() => completion(body, "content"),
        Api::Embedding => completion(body, "input"),
        Api::Pooling if body.some("input").is_some() => completion(body, "input"),
        Api::Pooling if body.some("messages").is_none() => generate(body),
        Api::Invocations if body.some("messages").is_some() => {
            chat::read(body, chat::Kind::Completion, reading)
        }
        Api::Invocations if body.some("prompt").is_some() => completion(body, "prompt"),
        Api::Invocations if body.some("text").is_some() => generate(body),
        Api::Embeddings
        | Api::Pooling
        | Api::Invocations
        | Api::Rerank
        | Api::Score
        | Api::Infill
        | Api::Detokenize
        | Api::EngineGenerate
        | Api::EngineEmbed => Err(Unknown::Api(api.name())),
    }
}

/// A text, ids, or a list of either.
fn completion<'a>(mut body: Map<'a>, field: &'static str) -> Result<Request<'a>, Unknown> {
    if body.some("prompt_embeds").is_some() {
        return Err(Unknown::Media("prompt embeddings"));
    }
    if body.some("suffix").is_some() {
        return Err(Unknown::Field("suffix"));
    }
    let shape = shape(&body, true)?;
    let prompt = body.take(field).ok_or_else(|| missing(field))?;
    plain(prompt, shape, field)
}

/// SGLang's own API: `text` or `input_ids`, single or a list.
fn generate<'a>(mut body: Map<'a>) -> Result<Request<'a>, Unknown> {
    for media in ["image_data", "audio_data", "video_data"] {
        if body.some(media).is_some() {
            return Err(Unknown::Media("images, audio and video"));
        }
    }
    if body.some("input_embeds").is_some() {
        return Err(Unknown::Media("prompt embeddings"));
    }
    let shape = Shape { add_special: true, truncate: None };
    match body.take("input_ids") {
        Some(ids) => plain(ids, shape, "input_ids"),
        None => plain(body.take("text").ok_or_else(|| missing("text"))?, shape, "text"),
    }
}

fn plain<'a>(prompt: Json<'a>, shape: Shape, field: &'static str) -> Result<Request<'a>, Unknown> {
    match prompt {
        Json::Str(text) => Ok(Request::Text(text, shape)),
        Json::List(items) if matches!(items.first(), Some(Json::Int(_) | Json::Uint(_))) => {
            Ok(Request::Ids(ids(&items)?, shape.truncate))
        }
        Json::List(items) => {
            let prompts = items.into_iter().map(|item| match item {
                Json::List(items) => Ok(Request::Ids(ids(&items)?, shape.truncate)),
                Json::Str(text) => Ok(Request::Text(text, shape)),
                _ => Err(missing(field)),
            });
            let mut prompts = prompts.collect::<Result<Vec<_>, _>>()?;
            match prompts.len() {
                0 => Err(missing(field)),
                1 => Ok(prompts.remove(0)),
                _ => Ok(Request::List(prompts)),
            }
        }
        _ => Err(missing(field)),
    }
}

fn ids(items: &[Json<'_>]) -> Result<Vec<u32>, Unknown> {
    items
        .iter()
        .map(|id| id.as_u32().ok_or_else(|| Unknown::Body("a token id is not a 32-bit number".into())))
        .collect()
}

fn missing(field: &'static str) -> Unknown {
    Unknown::Body(format!("{field} is missing or has the wrong type").into())
}

/// The fields that determine the processing of the tokens.
fn shape(body: &Map<'_>, add_special: bool) -> Result<Shape, Unknown> {
    let add_special = body.get("add_special_tokens").and_then(Json::as_bool).unwrap_or(add_special);
    let side = match body.str("truncation_side") {
        Some("left") => Some(Side::Left),
        Some("right") => Some(Side::Right),
        _ => None,
    };
    let truncate = match body.some("truncate_prompt_tokens") {
        None => None,
        // -1 means the model's context length, which is unknown here.
        Some(Json::Int(-1)) => return Err(Unknown::Field("truncate_prompt_tokens")),
        Some(tokens) => {
            Some(Truncate { tokens: tokens.as_u32().ok_or_else(|| missing("truncate_prompt_tokens"))?, side })
        }
    };
    Ok(Shape { add_special, truncate })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_plain(api: Api, body: &str) -> Result<Request<'_>, Unknown> {
        read(api, body.as_bytes(), Reading::default())
    }

    #[test]
    fn a_prompt_is_a_text_ids_or_a_list_of_either() {
        for (body, expect) in [
            (r#"{"prompt": "a b"}"#, "Text(\"a b\", Shape { add_special: true, truncate: None })"),
            (
                r#"{"prompt": ["a", "b"], "add_special_tokens": false}"#,
                "List([Text(\"a\", Shape { add_special: false, truncate: None }), Text(\"b\", Shape { add_special: false, \
                 truncate: None })])",
            ),
            (r#"{"prompt": [1, 2]}"#, "Ids([1, 2], None)"),
            (r#"{"prompt": [[3], [4]]}"#, "List([Ids([3], None), Ids([4], None)])"),
            (r#"{"prompt": [[3]]}"#, "Ids([3], None)"),
        ] {
            assert_eq!(format!("{:?}", read_plain(Api::Completions, body).expect("a prompt")), expect);
        }
        for body in [r#"{"prompt": []}"#, r#"{"prompt": [[3], 4]}"#, r#"{"prompt": ["a", null]}"#] {
            assert!(matches!(read_plain(Api::Completions, body), Err(Unknown::Body(_))), "{body}");
        }
        assert_eq!(
            format!("{:?}", read_plain(Api::Generate, r#"{"input_ids": [7]}"#).expect("ids")),
            "Ids([7], None)"
        );
    }

    #[test]
    fn what_changes_a_prompt_unknowably_is_unknown() {
        let why = |api, body| read_plain(api, body).expect_err("unknown").name();
        assert_eq!(why(Api::Completions, r#"{"prompt": "a", "suffix": "b"}"#), "field");
        assert_eq!(why(Api::Completions, r#"{"prompt": "a", "prompt_embeds": "b"}"#), "media");
        assert_eq!(why(Api::Completions, r#"{"prompt": "a", "truncate_prompt_tokens": -1}"#), "field");
        assert_eq!(why(Api::Completions, r#"{"prompt": [-1]}"#), "body");
        assert_eq!(why(Api::Completions, r#"{"prompt": []}"#), "body");
        assert_eq!(why(Api::Completions, "[]"), "body");
        assert_eq!(why(Api::Rerank, "{}"), "api");
        assert_eq!(why(Api::ChatCompletions, r#"{"messages": [], "chat_template": "x"}"#), "field");
    }
}
