//! TensorRT-LLM (`tensorrt_llm/serve/openai_disagg_service.py`), legs in turn: "context" and "generation".
//!
//! A context server stops after the first token by itself. Its answer is whole if that token ends it.

use super::params::{NoParams, member, text};
use crate::api::Api;
use crate::edit::{Change, edited};
use crate::json::Scanner;

/// A first leg.
pub(super) const PREFILL: &str =
    "\"stream\":false,\"disaggregated_params\":{\"request_type\":\"context_only\"}";

/// The members of a second leg, from the answer to the first, and the members of the client's body that they replace.
pub(super) fn decode(api: Api, answer: &[u8]) -> Result<(String, Option<&'static str>), NoParams> {
    let answer = text(answer)?;
    let choices = member(answer, "choices").map_err(|_| NoParams::NotJson)?.ok_or(NoParams::NoContext)?;
    let choice = first(choices).ok_or(NoParams::NoContext)?;
    let of = |object, name| member(object, name).map_err(|_| NoParams::NotJson);
    if !matches!(of(choice, "finish_reason")?, None | Some("\"length\"" | "\"not_finished\"")) {
        return Err(NoParams::Ended);
    }
    let params = of(choice, "disaggregated_params")?.ok_or(NoParams::NoContext)?;
    let replaces = |key: &str, _: &str| match key {
        "request_type" => Change::Remove,
        _ => Change::Keep,
    };
    let params = edited(params, "\"request_type\":\"generation_only\"", replaces);
    let params = params.ok().and_then(|params| String::from_utf8(params).ok()).ok_or(NoParams::NoContext)?;
    let added = format!("\"disaggregated_params\":{params}");
    // The prompt as the context server read it: a text may give other tokens elsewhere.
    let Some(ids) = of(answer, "prompt_token_ids")?.filter(|ids| ids.starts_with('[')) else {
        return Ok((added, None));
    };
    let name = if api == Api::Completions { "prompt" } else { "prompt_token_ids" };
    Ok((format!("{added},\"{name}\":{ids}"), Some(name)))
}

/// The first item of an array.
fn first(array: &str) -> Option<&str> {
    let mut scanner = Scanner::new(array);
    let mut walk = scanner.array().ok()?;
    walk.item(&mut scanner).ok()?.then(|| scanner.skip().ok())?
}
