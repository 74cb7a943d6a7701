//! The table of paths as documents: `docs/apis.md`, and a part of `docs/openapi.yaml`.

use std::fmt::Write as _;

use super::{Api, Audience, Body, ENGINE_PATHS, EnginePath, Keeps, Repeats, Streams};
use crate::engine;

/// The rows of `docs/apis.md` for one kind of caller, as a Markdown table.
pub fn markdown(audience: Audience) -> String {
    let mut table = match audience {
        Audience::Closed => "| Path | Engines |\n|---|---|\n".to_owned(),
        Audience::Clients | Audience::Operators => {
            "| Path | Methods | `model` is in | Prompt | Answer | Sent again | Engines |\n|---|---|---|---|---|---|---|\n".to_owned()
        }
    };
    for row in ENGINE_PATHS.iter().filter(|row| row.audience == audience) {
        let engines = titles(row.engines);
        // Writing to a string cannot fail.
        let _ = match audience {
            Audience::Closed => writeln!(table, "| `{}` | {engines} |", row.path),
            Audience::Clients | Audience::Operators => writeln!(
                table,
                "| `{}` | {} | {} | {} | {} | {} | {engines} |",
                row.path,
                methods(row),
                model(row),
                prompt(row),
                answer(row),
                again(row),
            ),
        };
    }
    table
}

/// Path items of OpenAPI for the paths of clients, except those that are described by hand, to stand below `paths:`.
pub fn openapi(by_hand: &[&str]) -> String {
    let mut items = String::new();
    // OpenAPI describes HTTP.
    for row in ENGINE_PATHS.iter().filter(|row| row.audience == Audience::Clients && !row.is_grpc()) {
        if by_hand.contains(&row.path) {
            continue;
        }
        // A parameter of OpenAPI has a name.
        let path = row.path.replace("{}", "{id}");
        let _ = writeln!(items, "  {path}:");
        if path != row.path {
            items.push_str("    parameters: [{ $ref: \"#/components/parameters/ObjectId\" }]\n");
        }
        for method in row.methods.split(", ") {
            let operation = method.to_lowercase();
            let _ = writeln!(
                items,
                "    {operation}:\n      tags: [relayed]\n      summary: {}",
                summary(row, method)
            );
            if method != "GET" && method != "DELETE" && matches!(row.body, Body::Parsed(_)) {
                items.push_str("      requestBody: { $ref: \"#/components/requestBodies/Placed\" }\n");
            }
            items.push_str("      responses: { default: { $ref: \"#/components/responses/Workers\" } }\n");
        }
    }
    items
}

fn summary(row: &EnginePath, method: &str) -> String {
    let what = match (row.keeps, row.body) {
        (Keeps::Object, _) if row.object(row.path).is_some() => "Goes to the engine that keeps the object.",
        (Keeps::Object, _) if method == "GET" => "The objects that engines keep.",
        (Keeps::Object, _) => "Creates an object that the engine keeps.",
        (_, Body::Parsed(_)) => "Placed where the prompt is cheapest.",
        (_, Body::Form) => "A form.",
        (_, Body::Empty) if row.streams == Streams::Socket => "A WebSocket.",
        (_, Body::Empty) => "What an engine says of itself.",
        (_, Body::Json | Body::Any) => "Placed by load.",
    };
    format!("{what} Served by {}.", titles(row.engines_of(method)))
}

/// The methods, and of those that fewer engines serve, these.
fn methods(row: &EnginePath) -> String {
    let method = |method: &str| match row.fewer.iter().find(|(of, _)| *of == method) {
        Some((_, engines)) => format!("{method} ({})", titles(engines)),
        None => method.to_owned(),
    };
    row.methods.split(", ").map(method).collect::<Vec<_>>().join(", ")
}

fn titles(engines: &[&'static str]) -> String {
    if engines.is_empty() {
        return "other servers".to_owned();
    }
    let titles = engines.iter().copied().map(|name| engine::named(name).map_or(name, |kind| kind.title));
    titles.collect::<Vec<_>>().join(", ")
}

fn model(row: &EnginePath) -> &'static str {
    if row.is_grpc() {
        return "metadata";
    }
    match (row.body, row.object(row.path)) {
        (_, Some(_)) => "(the object's engine)",
        (Body::Parsed(_) | Body::Json, None) => "body",
        (Body::Form, None) => "form",
        (Body::Any, None) => "body or form",
        (Body::Empty, None) => "query",
    }
}

fn prompt(row: &EnginePath) -> &'static str {
    match (row.body, row.keeps) {
        (Body::Parsed(Api::Detokenize), _) => "token ids",
        (Body::Parsed(api), _) if api.is_counted() => "counted",
        (Body::Parsed(_), _) => "estimated, matched",
        (_, Keeps::Prompt) => "estimated by size",
        _ => "none",
    }
}

fn answer(row: &EnginePath) -> &'static str {
    if row.is_grpc() {
        return "gRPC messages";
    }
    match row.streams {
        Streams::No => "whole",
        Streams::OnRequest => "whole, or events on request",
        Streams::Bytes => "bytes",
        Streams::Socket => "WebSocket",
    }
}

fn again(row: &EnginePath) -> &'static str {
    match row.repeats {
        Repeats::Yes => "yes",
        Repeats::Unsent => "only if unsent",
    }
}
