//! Chat completion bodies, and the chat form that all conversations are converted to (vLLM 0.32:
//! `entrypoints/openai/chat_completion/protocol.py`, `renderers/online_renderer.py`).

use std::borrow::Cow;

use crate::json::{Json, Map};
use crate::unknown::Unknown;

use super::{Reading, Request, Shape, ids, missing, shape};

/// A conversation and the arguments of its template.
#[derive(Debug)]
pub(crate) struct Chat<'a> {
    /// The messages as the client sent them.
    pub(crate) messages: Vec<Json<'a>>,
    /// Tools as serialized by vLLM's models.
    pub(crate) tools: Option<Json<'a>>,
    pub(crate) documents: Option<Json<'a>>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) continue_final_message: bool,
    /// Further variables of the template.
    pub(crate) kwargs: Map<'a>,
    /// Whether tool calls keep their order of keys.
    pub(crate) calls_as_they_are: bool,
    pub(crate) shape: Shape,
}

/// The kind of body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    /// `/tokenize`, which has fewer fields.
    Tokenize,
}

/// Arguments of `apply_chat_template` that are not template variables (transformers 5.0).
const NO_VARIABLES: [&str; 7] = [
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// Variables with a special meaning: setting one is an error in the engine, or affects more than the text.
const RESERVED: [&str; 6] =
    ["chat_template", "tokenize", "messages", "conversation", "conversations", "strftime_now"];

pub(super) fn read<'a>(mut body: Map<'a>, kind: Kind, reading: Reading) -> Result<Request<'a>, Unknown> {
    if body.some("chat_template").is_some() {
        return Err(Unknown::Field("chat_template"));
    }
    for field in ["mm_processor_kwargs", "media_io_kwargs"] {
        if body.some(field).is_some() {
            return Err(Unknown::Field(field));
        }
    }
    let shape = shape(&body, false)?;
    let completion = kind == Kind::Completion;
    if completion && let Some(ids) = forwarded_ids(&body)? {
        return Ok(Request::Ids(ids, None));
    }
    let Some(Json::List(messages)) = body.take("messages") else {
        return Err(missing("messages"));
    };
    let none = completion && reading.exclude_tools_when_none && body.str("tool_choice") == Some("none");
    let tools = match body.take("tools") {
        Some(Json::List(list)) if !none => Some(tools(list)?),
        _ => None,
    };
    let effort = if completion { effort(&mut body, "reasoning_effort") } else { None };
    let documents = if completion { body.take("documents") } else { None };
    Ok(Request::Chat(Box::new(Chat {
        messages,
        tools,
        documents,
        add_generation_prompt: body.get("add_generation_prompt").and_then(Json::as_bool).unwrap_or(true),
        continue_final_message: body.get("continue_final_message").and_then(Json::as_bool).unwrap_or(false),
        kwargs: kwargs(&mut body, effort)?,
        calls_as_they_are: false,
        shape,
    })))
}

/// Further template variables: those of the request, then the one derived from its effort.
pub(super) fn kwargs<'a>(body: &mut Map<'a>, effort: Option<Cow<'a, str>>) -> Result<Map<'a>, Unknown> {
    let mut kwargs = match body.take("chat_template_kwargs") {
        Some(Json::Map(map)) => map,
        None => Map::default(),
        Some(_) => return Err(missing("chat_template_kwargs")),
    };
    if kwargs.0.iter().any(|(key, _)| RESERVED.contains(&key.as_ref())) {
        return Err(Unknown::Field("chat_template_kwargs"));
    }
    if let Some(effort) = effort {
        if kwargs.get("enable_thinking").is_none() {
            kwargs.set("enable_thinking", Json::Bool(effort != "none"));
        }
        kwargs.set("reasoning_effort", Json::Str(effort));
    }
    // Null and "auto" count as absent (`renderers/params.py`, `merge_kwargs`).
    kwargs.0.retain(|(key, value)| {
        !value.is_null() && value.as_str() != Some("auto") && !NO_VARIABLES.contains(&key.as_ref())
    });
    Ok(kwargs)
}

pub(super) fn effort<'a>(map: &mut Map<'a>, key: &str) -> Option<Cow<'a, str>> {
    match map.take(key) {
        Some(Json::Str(effort)) => Some(effort),
        _ => None,
    }
}

/// Tools with the fields of vLLM's models, in their order (`ChatCompletionToolsParam`, `FunctionDefinition`).
fn tools<'a>(list: Vec<Json<'a>>) -> Result<Json<'a>, Unknown> {
    let mut out = Vec::with_capacity(list.len());
    for tool in list {
        let Json::Map(mut tool) = tool else { return Err(missing("tools")) };
        let deferred = tool.take("defer_loading");
        let Some(Json::Map(mut function)) = tool.take("function") else { return Err(missing("tools")) };
        if let (Some(deferred), None) = (&deferred, function.some("defer_loading")) {
            function.set("defer_loading", deferred.clone());
        }
        let mut entries =
            vec![("type".into(), Json::text("function")), ("function".into(), definition(function)?)];
        if let Some(deferred) = deferred {
            entries.push(("defer_loading".into(), deferred));
        }
        out.push(Json::Map(Map(entries)));
    }
    Ok(Json::List(out))
}

/// A function as serialized by vLLM's `FunctionDefinition`.
pub(super) fn definition<'a>(mut function: Map<'a>) -> Result<Json<'a>, Unknown> {
    let Some(name @ Json::Str(_)) = function.take("name") else { return Err(missing("tools")) };
    let mut entries = vec![
        ("name".into(), name),
        ("description".into(), function.take("description").unwrap_or(Json::Null)),
        ("parameters".into(), function.take("parameters").unwrap_or(Json::Null)),
    ];
    for key in ["strict", "defer_loading"] {
        if let Some(value) = function.take(key) {
            entries.push((key.into(), value));
        }
    }
    Ok(Json::Map(Map(entries)))
}

/// Token ids passed on by a prefill stage, which vLLM uses instead of the messages.
fn forwarded_ids(body: &Map<'_>) -> Result<Option<Vec<u32>>, Unknown> {
    let Some(Json::Map(params)) = body.get("kv_transfer_params") else { return Ok(None) };
    match params.some("prompt_token_ids") {
        Some(Json::List(list)) if body.get("echo") != Some(&Json::Bool(true)) => Ok(Some(ids(list)?)),
        _ => Ok(None),
    }
}
