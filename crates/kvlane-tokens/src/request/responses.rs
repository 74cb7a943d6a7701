//! Converts Responses API input to chat messages (vLLM 0.32, `entrypoints/openai/responses/utils.py` and
//! `protocol.py`).

use crate::json::{Json, Map};
use crate::unknown::Unknown;

use super::chat::{definition, effort, kwargs};
use super::{Chat, Reading, Request, Shape, missing};

pub(super) fn read<'a>(mut body: Map<'a>, reading: Reading) -> Result<Request<'a>, Unknown> {
    for field in ["previous_response_id", "conversation", "prompt", "previous_input_messages"] {
        if body.some(field).is_some() {
            return Err(Unknown::Field(field));
        }
    }
    if body.str("truncation") == Some("auto") {
        return Err(Unknown::Field("truncation"));
    }
    let mut messages = Vec::new();
    if let Some(instructions @ Json::Str(_)) = body.take("instructions").filter(Json::is_truthy) {
        messages.push(Map(vec![("role".into(), Json::text("system")), ("content".into(), instructions)]));
    }
    let mut unfinished = false;
    match body.take("input") {
        Some(text @ Json::Str(_)) => {
            messages.push(Map(vec![("role".into(), Json::text("user")), ("content".into(), text)]));
        }
        Some(Json::List(items)) => {
            unfinished = items.last().is_some_and(is_unfinished);
            // An item may be merged with another item's message, but not with the instructions.
            let first = messages.len();
            for item in items {
                let Json::Map(item) = item else { return Err(missing("input")) };
                add(item, first, &mut messages)?;
            }
        }
        _ => return Err(missing("input")),
    }
    let none = reading.exclude_tools_when_none && body.str("tool_choice") == Some("none");
    let tools = match body.take("tools") {
        Some(Json::List(list)) if !list.is_empty() && !none => Some(tools(list)?),
        _ => None,
    };
    let wanted = match body.get_mut("reasoning") {
        Some(Json::Map(reasoning)) => effort(reasoning, "effort"),
        _ => None,
    };
    Ok(Request::Chat(Box::new(Chat {
        messages: messages.into_iter().map(Json::Map).collect(),
        tools,
        documents: None,
        add_generation_prompt: !unfinished,
        continue_final_message: unfinished,
        kwargs: kwargs(&mut body, wanted)?,
        // `ResponsesRequest.build_tok_params` keeps the default here, unlike chat.
        calls_as_they_are: true,
        shape: Shape { add_special: true, truncate: None },
    })))
}

/// Whether the answer is to continue this item.
fn is_unfinished(item: &Json<'_>) -> bool {
    let Json::Map(item) = item else { return false };
    matches!(item.str("type"), None | Some("message" | "reasoning"))
        && matches!(item.str("status"), Some("in_progress" | "incomplete"))
}

/// Adds an item: as a message, or merged into the preceding assistant message.
fn add<'a>(mut item: Map<'a>, first: usize, messages: &mut Vec<Map<'a>>) -> Result<(), Unknown> {
    match item.str("type") {
        Some("function_call") => {
            if item.some("namespace").is_some() {
                return Err(Unknown::Field("namespace"));
            }
            let function = Map(vec![
                ("name".into(), item.take("name").ok_or_else(|| missing("name"))?),
                ("arguments".into(), item.take("arguments").unwrap_or(Json::Null)),
            ]);
            let call = Json::Map(Map(vec![
                ("id".into(), item.take("call_id").ok_or_else(|| missing("call_id"))?),
                ("function".into(), Json::Map(function)),
                ("type".into(), Json::text("function")),
            ]));
            let message = assistant(messages, first, |_| true);
            match message.get_mut("tool_calls") {
                Some(Json::List(calls)) => calls.push(call),
                _ => message.set("tool_calls", Json::List(vec![call])),
            }
        }
        Some("reasoning") => {
            if item.some("encrypted_content").filter(|content| content.is_truthy()).is_some() {
                return Err(Unknown::Field("encrypted_content"));
            }
            let text = first_text(item.take("content"))
                .or_else(|| first_text(item.take("summary")))
                .unwrap_or(Json::text(""));
            assistant(messages, first, |message| message.some("reasoning").is_none()).set("reasoning", text);
        }
        Some("function_call_output") => messages.push(Map(vec![
            ("role".into(), Json::text("tool")),
            ("content".into(), item.take("output").unwrap_or(Json::Null)),
            ("tool_call_id".into(), item.take("call_id").unwrap_or(Json::Null)),
        ])),
        None | Some("message") if item.str("role") == Some("assistant") => {
            let text = match item.take("content") {
                Some(text @ Json::Str(_)) => Some(text),
                content => first_text(content),
            };
            match text {
                Some(text) => assistant(messages, first, |message| message.some("content").is_none())
                    .set("content", text),
                None => assistant(messages, first, |_| false).set("content", Json::Null),
            }
        }
        None | Some("message") if item.get("role").is_some() => messages.push(item),
        _ => return Err(Unknown::Field("input")),
    }
    Ok(())
}

/// The assistant message at the end, if an item created it and it can be extended; otherwise a new one.
fn assistant<'m, 'a>(
    messages: &'m mut Vec<Map<'a>>,
    first: usize,
    has_room: impl Fn(&Map<'a>) -> bool,
) -> &'m mut Map<'a> {
    let joins = messages.len() > first
        && messages.last().is_some_and(|last| last.str("role") == Some("assistant") && has_room(last));
    if !joins {
        messages.push(Map(vec![("role".into(), Json::text("assistant"))]));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// The text of a list's first part.
fn first_text(parts: Option<Json<'_>>) -> Option<Json<'_>> {
    match parts {
        Some(Json::List(parts)) => match parts.into_iter().next() {
            Some(Json::Map(mut part)) => part.take("text"),
            _ => None,
        },
        _ => None,
    }
}

fn tools<'a>(list: Vec<Json<'a>>) -> Result<Json<'a>, Unknown> {
    let mut out = Vec::with_capacity(list.len());
    for tool in list {
        let Json::Map(mut tool) = tool else { return Err(missing("tools")) };
        if tool.str("type") != Some("function") {
            return Err(Unknown::Field("tools"));
        }
        // vLLM serializes absent fields as null here, except for `strict` and `defer_loading`.
        tool.0.retain(|(key, value)| !value.is_null() || key != "strict");
        out.push(Json::Map(Map(vec![
            ("type".into(), Json::text("function")),
            ("function".into(), definition(tool)?),
        ])));
    }
    Ok(Json::List(out))
}
