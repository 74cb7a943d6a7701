//! Converts Anthropic messages to chat messages (vLLM 0.32, `entrypoints/anthropic/serving.py`).

use std::borrow::Cow;

use crate::json::{Json, Map};
use crate::unknown::Unknown;

use super::chat::{definition, effort, kwargs};
use super::{Chat, Reading, Request, Shape, missing};

/// A system block that changes with every request; see `conversation`.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

pub(super) fn read<'a>(mut body: Map<'a>, reading: Reading) -> Result<Request<'a>, Unknown> {
    let Some(Json::List(given)) = body.take("messages") else { return Err(missing("messages")) };
    let given = given
        .into_iter()
        .map(|message| match message {
            Json::Map(message) => Ok(message),
            _ => Err(missing("messages")),
        })
        .collect::<Result<Vec<_>, _>>()?;

    let mut messages = Vec::with_capacity(given.len() + 1);
    let mut system = texts(body.get("system"))?;
    if reading.system_first {
        for message in given.iter().filter(|message| message.str("role") == Some("system")) {
            system.push_str(&texts(message.get("content"))?);
        }
    }
    if !system.is_empty() {
        messages.push(message("system", Json::text(system)));
    }
    for given in given {
        convert(given, reading.system_first, &mut messages)?;
    }
    let tools = match body.take("tools") {
        Some(Json::List(list)) => Some(tools(list)?),
        _ => None,
    };
    let mut wanted = match body.get_mut("output_config") {
        Some(Json::Map(config)) => effort(config, "effort"),
        _ => None,
    };
    if let Some(Json::Map(thinking)) = body.get("thinking")
        && thinking.str("type") == Some("disabled")
    {
        wanted = Some(Cow::Borrowed(if reading.disabled_effort_low { "low" } else { "none" }));
    }
    Ok(Request::Chat(Box::new(Chat {
        messages,
        tools,
        documents: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: kwargs(&mut body, wanted)?,
        calls_as_they_are: false,
        shape: Shape { add_special: false, truncate: None },
    })))
}

fn message<'a>(role: &'static str, content: Json<'a>) -> Json<'a> {
    Json::Map(Map(vec![("role".into(), Json::text(role)), ("content".into(), content)]))
}

/// The concatenated texts of a system content, without the blocks that change with every request.
fn texts(content: Option<&Json<'_>>) -> Result<String, Unknown> {
    let mut out = String::new();
    match content {
        None | Some(Json::Null) => {}
        Some(Json::Str(text)) => out.push_str(text),
        Some(Json::List(blocks)) => {
            for block in blocks {
                let Json::Map(block) = block else { return Err(missing("system")) };
                if matches!(block.str("type"), Some("tool_addition" | "tool_removal")) {
                    return Err(Unknown::Field("tool_addition"));
                }
                if let Some(text) = block.str("text").filter(|text| !text.starts_with(BILLING_HEADER))
                    && block.str("type") == Some("text")
                {
                    out.push_str(text);
                }
            }
        }
        Some(_) => return Err(missing("system")),
    }
    Ok(out)
}

fn convert<'a>(mut given: Map<'a>, system_first: bool, out: &mut Vec<Json<'a>>) -> Result<(), Unknown> {
    let Some(Json::Str(role)) = given.take("role") else { return Err(missing("role")) };
    if role == "system" {
        let content = given.get("content");
        let text = match content {
            Some(Json::Str(text)) if text.starts_with(BILLING_HEADER) => String::new(),
            content => texts(content)?,
        };
        if !system_first && !text.is_empty() {
            out.push(message("system", Json::text(text)));
        }
        return Ok(());
    }
    let blocks = match given.take("content") {
        Some(text @ Json::Str(_)) => {
            out.push(Json::Map(Map(vec![("role".into(), Json::Str(role)), ("content".into(), text)])));
            return Ok(());
        }
        Some(Json::List(blocks)) => blocks,
        _ => return Err(missing("content")),
    };
    let user = role == "user";
    let mut parts = Vec::new();
    let mut calls = Vec::new();
    let mut reasoning: Option<String> = None;
    for block in blocks {
        let Json::Map(mut block) = block else { return Err(missing("content")) };
        match block.str("type") {
            Some("text") => {
                if let Some(text @ Json::Str(_)) = block.take("text").filter(Json::is_truthy) {
                    parts.push(text);
                }
            }
            Some("image") => {
                if let Some(url) = image(&mut block)? {
                    parts.push(url);
                }
            }
            Some("thinking") => {
                if let Some(Json::Str(text)) = block.take("thinking") {
                    reasoning.get_or_insert_default().push_str(&text);
                }
            }
            Some("redacted_thinking" | "tool_reference") => {}
            Some("tool_use") => calls.push(call(block)?),
            Some("tool_result") if user => result(block, out)?,
            Some("tool_result") => {
                let text = match block.take("content") {
                    None => String::new(),
                    Some(Json::Str(text)) => text.into_owned(),
                    Some(_) => {
                        return Err(Unknown::Body(
                            "a tool result in an assistant message is not text".into(),
                        ));
                    }
                };
                parts.push(Json::text(format!("Tool result: {text}")));
            }
            _ => return Err(Unknown::Field("content")),
        }
    }
    let mut converted = Map(vec![("role".into(), Json::Str(role))]);
    if let Some(reasoning) = reasoning {
        converted.set("reasoning", Json::text(reasoning));
    }
    if !calls.is_empty() {
        converted.set("tool_calls", Json::List(calls));
    }
    let empty = parts.is_empty();
    if !empty {
        let content = if parts.len() == 1 { parts.pop().unwrap_or(Json::Null) } else { Json::List(parts) };
        converted.set("content", content);
    }
    if !(user && empty) {
        out.push(Json::Map(converted));
    }
    Ok(())
}

/// An image as a part of a chat message; none without a source.
fn image<'a>(block: &mut Map<'a>) -> Result<Option<Json<'a>>, Unknown> {
    let Some(Json::Map(mut source)) = block.take("source") else { return Ok(None) };
    let url = match source.str("type") {
        Some("url") => source.take("url").unwrap_or(Json::text("")),
        _ => {
            let kind = source.str("media_type").unwrap_or("image/jpeg");
            Json::text(format!("data:{kind};base64,{}", source.str("data").unwrap_or_default()))
        }
    };
    let part = vec![("type".into(), Json::text("image_url")), ("image_url".into(), url)];
    Ok(Some(Json::Map(Map(part))))
}

fn call(mut block: Map<'_>) -> Result<Json<'_>, Unknown> {
    // Without an id vLLM creates one from the time.
    let Some(id @ Json::Str(_)) = block.take("id").filter(Json::is_truthy) else {
        return Err(Unknown::Body("a tool_use without an id".into()));
    };
    let input = match block.take("input") {
        Some(input @ Json::Map(_)) => input,
        _ => Json::Map(Map::default()),
    };
    let function =
        Map(vec![("name".into(), block.take("name").unwrap_or(Json::text(""))), ("arguments".into(), input)]);
    Ok(Json::Map(Map(vec![
        ("id".into(), id),
        ("type".into(), Json::text("function")),
        ("function".into(), Json::Map(function)),
    ])))
}

fn result<'a>(mut block: Map<'a>, out: &mut Vec<Json<'a>>) -> Result<(), Unknown> {
    let id = block.take("tool_use_id").unwrap_or(Json::text(""));
    let tool = |content| {
        let entries = vec![
            ("role".into(), Json::text("tool")),
            ("tool_call_id".into(), id.clone()),
            ("content".into(), content),
        ];
        Json::Map(Map(entries))
    };
    let (mut references, mut images) = (Vec::new(), Vec::new());
    let text = match block.take("content") {
        Some(text @ Json::Str(_)) => text,
        Some(Json::List(items)) => {
            let mut texts: Vec<String> = Vec::new();
            for item in items {
                let Json::Map(mut item) = item else { continue };
                match item.str("type") {
                    Some("text") => texts.push(item.str("text").unwrap_or_default().to_owned()),
                    Some("image") => images.extend(image(&mut item)?),
                    Some("tool_reference") => {
                        if let Some(name) = item.take("tool_name").or_else(|| item.take("name")) {
                            references.push(Json::Map(Map(vec![
                                ("type".into(), Json::text("tool_reference")),
                                ("name".into(), name),
                            ])));
                        }
                    }
                    _ => {}
                }
            }
            Json::text(texts.join("\n"))
        }
        _ => Json::text(""),
    };
    out.push(tool(text));
    if !images.is_empty() {
        out.push(message("user", Json::List(images)));
    }
    if !references.is_empty() {
        out.push(tool(Json::List(references)));
    }
    Ok(())
}

fn tools<'a>(list: Vec<Json<'a>>) -> Result<Json<'a>, Unknown> {
    let mut out = Vec::with_capacity(list.len());
    for tool in list {
        let Json::Map(mut tool) = tool else { return Err(missing("tools")) };
        let Some(Json::Map(mut schema)) = tool.take("input_schema") else { return Err(missing("tools")) };
        if schema.get("type").is_none() {
            schema.set("type", Json::text("object"));
        }
        tool.set("parameters", Json::Map(schema));
        out.push(Json::Map(Map(vec![
            ("type".into(), Json::text("function")),
            ("function".into(), definition(tool)?),
        ])));
    }
    Ok(Json::List(out))
}
