//! Converts messages to the form that chat templates get (vLLM 0.32, `renderers/chat_utils.py` and `renderers/hf.py`):
//! contents as text or parts, tool call arguments as objects, and only the fields that vLLM passes on, in its order.

use std::borrow::Cow;

use crate::json::{Json, Map, parse};
use crate::media::Image;
use crate::source::ContentFormat;
use crate::unknown::Unknown;

use super::missing;

/// Start of a system text that Claude Code fills with a hash per request. vLLM removes its line.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Properties of the template.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wants {
    /// Contents must be a list of parts.
    pub(crate) parts: bool,
    /// The role `developer` is supported.
    pub(crate) developer: bool,
    /// Tool calls keep their order of keys, instead of the order of the OpenAI client's types.
    pub(crate) calls_as_they_are: bool,
}

// === impl Wants ===

impl Wants {
    pub(crate) fn new(content: ContentFormat, developer: bool, calls_as_they_are: bool) -> Wants {
        Wants { parts: content == ContentFormat::OpenAi, developer, calls_as_they_are }
    }
}

/// The messages in the form for the template; their images are added to `images`.
pub(crate) fn conversation<'a>(
    messages: Vec<Json<'a>>,
    wants: Wants,
    images: &mut Vec<Image<'a>>,
) -> Result<Vec<Map<'a>>, Unknown> {
    let mut out = Vec::with_capacity(messages.len());
    for message in messages {
        let Json::Map(message) = message else { return Err(missing("messages")) };
        out.push(one(message, wants, images)?);
    }
    if !wants.developer && out.iter().any(|message| message.str("role") == Some("developer")) {
        out = developer_to_system(out);
    }
    Ok(out)
}

fn one<'a>(mut message: Map<'a>, wants: Wants, images: &mut Vec<Image<'a>>) -> Result<Map<'a>, Unknown> {
    let Some(Json::Str(role)) = message.take("role") else {
        return Err(Unknown::Body("a message without a role".into()));
    };
    let content = match message.take("content") {
        None => Vec::new(),
        Some(text @ Json::Str(_)) => vec![text],
        Some(Json::List(parts)) => parts,
        Some(_) => return Err(missing("content")),
    };
    let mut parts = Vec::with_capacity(content.len());
    let mut structured = false;
    for part in content {
        match part_of(part, wants.parts)? {
            Some(Part::Text(text)) => match if role == "system" { without_billing(text) } else { Some(text) }
            {
                Some(text) => parts.push(if wants.parts { text_part(text) } else { Json::Str(text) }),
                None => continue,
            },
            Some(Part::Image(_)) if !wants.parts => {
                return Err(Unknown::Media("images in front of a template that takes text"));
            }
            Some(Part::Image(image)) => {
                structured = true;
                images.push(image);
                parts.push(Json::Map(Map(vec![("type".into(), Json::text("image"))])));
            }
            Some(Part::Other(part)) => {
                structured = true;
                parts.push(part);
            }
            None => continue,
        }
    }
    let content =
        if !wants.parts || (role == "tool" && !structured) { joined(parts) } else { Json::List(parts) };
    let mut out = Map(vec![("role".into(), Json::Str(role.clone())), ("content".into(), content)]);
    match role.as_ref() {
        "assistant" => {
            match message.take("tool_calls") {
                Some(Json::List(calls)) if calls.is_empty() => {}
                Some(Json::List(calls)) => {
                    let calls =
                        calls.into_iter().map(|one| call(one, wants)).collect::<Result<Vec<_>, _>>()?;
                    out.set("tool_calls", Json::List(calls));
                }
                _ => {}
            }
            let reasoning = message.take("reasoning").or_else(|| message.take("reasoning_content"));
            if let Some(reasoning) = reasoning {
                out.set("reasoning", reasoning.clone());
                out.set("reasoning_content", reasoning);
            }
        }
        "tool" => {
            if let Some(id) = message.get_mut("tool_call_id") {
                out.set("tool_call_id", std::mem::replace(id, Json::Null));
            }
        }
        _ => {}
    }
    for key in ["name", "task"] {
        if let Some(value @ Json::Str(_)) = message.take(key) {
            out.set(key, value);
        }
    }
    if role == "developer" {
        out.set("tools", message.take("tools").unwrap_or(Json::Null));
    }
    Ok(out)
}

enum Part<'a> {
    Text(Cow<'a, str>),
    Image(Image<'a>),
    Other(Json<'a>),
}

/// Classifies a part: text, a part that a template may handle, or nothing.
fn part_of<'a>(part: Json<'a>, as_part: bool) -> Result<Option<Part<'a>>, Unknown> {
    let mut part = match part {
        Json::Str(text) => return Ok(Some(Part::Text(text))),
        Json::Map(part) => part,
        _ => return Err(Unknown::Body("a content part that is neither text nor an object".into())),
    };
    let field = match part.str("type") {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some("tool_reference") => {
            let Some(Json::Str(name)) = part.take("name") else { return Err(missing("tool_reference")) };
            return Ok(Some(if as_part {
                let entries =
                    vec![("type".into(), Json::text("tool_reference")), ("name".into(), Json::Str(name))];
                Part::Other(Json::Map(Map(entries)))
            } else {
                Part::Text(name)
            }));
        }
        Some("image_url" | "input_image") => {
            return Image::of_part(&mut part).map(|image| Some(Part::Image(image)));
        }
        Some("image_pil" | "image_embeds") => return Err(Unknown::Media("embeddings of images")),
        Some("input_audio" | "audio_url" | "audio_embeds") => return Err(Unknown::Media("audio inputs")),
        Some("video_url" | "video_embeds") => return Err(Unknown::Media("videos")),
        Some("prompt_embeds") => return Err(Unknown::Media("prompt embeddings")),
        _ => return Err(Unknown::Media("content parts of types other than text")),
    };
    match part.take(field) {
        Some(Json::Str(text)) => Ok(Some(Part::Text(text))),
        None => Ok(None),
        Some(_) => Err(missing("text")),
    }
}

fn text_part(text: Cow<'_, str>) -> Json<'_> {
    Json::Map(Map(vec![("type".into(), Json::text("text")), ("text".into(), Json::Str(text))]))
}

/// The texts, joined by line breaks.
fn joined(parts: Vec<Json<'_>>) -> Json<'_> {
    let text = |part| match part {
        Json::Map(mut part) => part.take("text").unwrap_or(Json::text("")),
        other => other,
    };
    let mut parts = parts.into_iter().map(text);
    let Some(first) = parts.next() else { return Json::text("") };
    let Some(second) = parts.next() else { return first };
    let mut whole = String::new();
    for (at, part) in [first, second].into_iter().chain(parts).enumerate() {
        if at > 0 {
            whole.push('\n');
        }
        whole.push_str(part.as_str().unwrap_or_default());
    }
    Json::Str(Cow::Owned(whole))
}

/// A system text without Claude Code's line; `None` if nothing else remains.
fn without_billing(text: Cow<'_, str>) -> Option<Cow<'_, str>> {
    if !text.starts_with(BILLING_HEADER) {
        return Some(text);
    }
    match text.split_once('\n') {
        Some((_, rest)) if !rest.is_empty() => Some(Cow::Owned(rest.to_owned())),
        _ => None,
    }
}

/// A tool call with its arguments as an object; arguments that are not a JSON object become an empty one. The fields
/// are in the order of the OpenAI client's types, through which vLLM passes them unless it has created them itself.
fn call(call: Json<'_>, wants: Wants) -> Result<Json<'_>, Unknown> {
    let bad = || Unknown::Body("a tool call is not of type function".into());
    let Json::Map(mut call) = call else { return Err(bad()) };
    if !matches!(call.str("type"), None | Some("function")) {
        return Err(bad());
    }
    let Some(Json::Map(mut function)) = call.take("function") else { return Err(bad()) };
    let arguments = match function.take("arguments") {
        Some(map @ Json::Map(_)) => map,
        Some(Json::Str(Cow::Borrowed(text))) => object(parse(text).ok()),
        Some(Json::Str(Cow::Owned(text))) => object(parse(&text).ok().map(Json::into_owned)),
        _ => Json::Map(Map::default()),
    };
    if wants.calls_as_they_are {
        function.set("arguments", arguments);
        call.set("function", Json::Map(function));
        return Ok(Json::Map(call));
    }
    let mut entries = vec![("arguments".into(), arguments)];
    if let Some(name) = function.take("name") {
        entries.push(("name".into(), name));
    }
    let function = Json::Map(Map(entries));
    let mut entries = Vec::with_capacity(3);
    if let Some(id) = call.take("id") {
        entries.push(("id".into(), id));
    }
    entries.push(("function".into(), function));
    if let Some(kind) = call.take("type") {
        entries.push(("type".into(), kind));
    }
    Ok(Json::Map(Map(entries)))
}

fn object(json: Option<Json<'_>>) -> Json<'_> {
    match json {
        Some(map @ Json::Map(_)) => map,
        _ => Json::Map(Map::default()),
    }
}

/// For a template without the role `developer`: such messages become system messages, and all system messages are
/// merged into the first.
fn developer_to_system(messages: Vec<Map<'_>>) -> Vec<Map<'_>> {
    let mut texts: Vec<String> = Vec::new();
    let mut scattered = false;
    let mut seen = false;
    let mut out = Vec::with_capacity(messages.len());
    for (at, mut message) in messages.into_iter().enumerate() {
        if message.str("role") == Some("developer") {
            message.set("role", Json::text("system"));
            message.0.retain(|(key, _)| key != "tools");
        }
        if message.str("role") == Some("system") {
            scattered |= at > 0 || seen;
            let text = match message.get("content") {
                Some(Json::Str(text)) => text.to_string(),
                Some(Json::List(parts)) => {
                    let texts: Vec<&str> = parts
                        .iter()
                        .filter_map(|part| match part {
                            Json::Map(part) => part.str("text"),
                            other => other.as_str(),
                        })
                        .collect();
                    texts.join("\n")
                }
                _ => String::new(),
            };
            if !text.is_empty() {
                seen = true;
                texts.push(text);
            }
        }
        out.push(message);
    }
    if !scattered {
        return out;
    }
    out.retain(|message| message.str("role") != Some("system"));
    let first =
        Map(vec![("role".into(), Json::text("system")), ("content".into(), Json::text(texts.join("\n\n")))]);
    out.insert(0, first);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::python::Dumps;

    /// The conversation as JSON.
    fn shown(messages: &str, parts: bool) -> String {
        let Json::List(messages) = parse(messages).expect("JSON") else { panic!("a list") };
        let wants = Wants { parts, developer: false, calls_as_they_are: false };
        let messages = conversation(messages, wants, &mut Vec::new()).expect("a conversation");
        let value = Json::List(messages.into_iter().map(Json::Map).collect()).into_value();
        let mut out = String::new();
        Dumps::default().write(&value, &mut out).expect("JSON");
        out
    }

    #[test]
    fn contents_are_text_or_parts_as_the_template_wants() {
        let messages = r#"[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}, "c"]},
            {"role": "tool", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]}, {"role": "assistant", "content": null}]"#;
        assert_eq!(
            shown(messages, false),
            r#"[{"role": "user", "content": "a"}, {"role": "user", "content": "b\nc"}, {"role": "tool", "content": "d\ne"}, {"role": "assistant", "content": ""}]"#
        );
        assert_eq!(
            shown(messages, true),
            r#"[{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}, {"role": "tool", "content": "d\ne"}, {"role": "assistant", "content": []}]"#
        );
    }

    #[test]
    fn arguments_become_objects_and_what_is_none_an_empty_one() {
        let messages = r#"[{"role": "assistant", "content": "x", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2.0]}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "[1]"}},
            {"id": "3", "type": "function", "function": {"name": "h", "arguments": "no"}}], "reasoning_content": "r", "extra": 1}]"#;
        assert_eq!(
            shown(messages, false),
            r#"[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "function": {"arguments": {"b": 1, "a": [2.0]}, "name": "f"}, "type": "function"}, {"id": "2", "function": {"arguments": {}, "name": "g"}, "type": "function"}, {"id": "3", "function": {"arguments": {}, "name": "h"}, "type": "function"}], "reasoning": "r", "reasoning_content": "r"}]"#
        );
    }

    #[test]
    fn developer_messages_join_the_system_message_where_the_role_is_not_known() {
        let messages = r#"[{"role": "system", "content": "a"}, {"role": "user", "content": "u"}, {"role": "developer", "content": "b"}]"#;
        assert_eq!(
            shown(messages, false),
            r#"[{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "u"}]"#
        );
    }

    #[test]
    fn the_line_with_a_hash_per_request_is_left_out() {
        let messages = r#"[{"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "x-anthropic-billing-header: 2\nrest"}]}]"#;
        assert_eq!(shown(messages, false), r#"[{"role": "system", "content": "rest"}]"#);
    }
}
