//! The doctor's request, sent twice, and the reused tokens that the engine reports.

use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kvlane_control::pair_check::{random_prompt, words_of};
use kvlane_core::rng::Rng;
use kvlane_http::client::Client;
use kvlane_wire::engine::{Tokenize, advice};
use kvlane_wire::sse::usage_in_json;
use serde::de::IgnoredAny;
use serde_json::json;

use super::check::Checks;
use super::engine::Facts;
use super::events::Told;
use super::tokens::tokenized;

/// Tokens of a block if unknown.
const BLOCK_TOKENS: u32 = 16;

/// A request that was answered.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) prompt: String,
    /// The prompt's ids, if the engine returns them.
    pub(super) ids: Option<Vec<u32>>,
    prompt_tokens: Option<u32>,
    cached_tokens: Option<u32>,
}

/// A random text of a few blocks, which no cache holds.
pub(super) fn prompt(facts: &Facts, attempt: u32) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = since.as_nanos() as u64 ^ (u64::from(process::id()) << 32) ^ u64::from(attempt);
    let mut rng = Rng::new(seed);
    let words = words_of(facts.block_tokens.unwrap_or(BLOCK_TOKENS));
    // A word may take several tokens.
    let words =
        facts.max_model_len.map_or(words, |max| words.min(u32::try_from(max / 8).unwrap_or(u32::MAX)));
    random_prompt(&mut rng, words)
}

/// Sends a prompt for an answer of one token.
///
/// # Errors
/// The cause, as text.
pub(super) async fn ask(
    engine: &Client,
    form: &Tokenize,
    model: &str,
    prompt: &str,
) -> Result<Asked, String> {
    let body: Bytes =
        json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).to_string().into();
    let (status, answer) = engine.post("/v1/completions", &body).await?;
    if status != 200 {
        let said: String = String::from_utf8_lossy(&answer).chars().take(200).collect();
        return Err(format!("POST /v1/completions answered {status}: {said}"));
    }
    serde_json::from_slice::<IgnoredAny>(&answer)
        .map_err(|error| format!("the answer is not JSON: {error}"))?;
    let usage = usage_in_json(&answer);
    Ok(Asked {
        prompt: prompt.to_owned(),
        ids: tokenized(engine, form, body).await,
        prompt_tokens: usage.map(|usage| usage.prompt_tokens),
        cached_tokens: usage.and_then(|usage| usage.cached_tokens),
    })
}

/// Sends the prompt again: the reused tokens must be reported, and equal the prediction.
pub(super) async fn compare(model: &str, told: Told, facts: &mut Facts, checks: &mut Checks) {
    let Told { asked, stored_tokens, block_tokens, engine } = told;
    facts.block_tokens = facts.block_tokens.or(block_tokens);
    let first = match asked {
        Ok(first) => first,
        Err(problem) => {
            let fix =
                "the doctor sends a small completion: check that the model is up; --no-request skips it";
            return checks.fail("usage", problem, fix);
        }
    };
    let again = match ask(&engine, facts.tokenize(), model, &first.prompt).await {
        Ok(again) => again,
        Err(problem) => {
            return checks.fail(
                "usage",
                problem,
                "the engine answered this request the first time: see \
                                                              its log",
            );
        }
    };
    if let (Some(ids), Some(tokens)) = (&first.ids, first.prompt_tokens)
        && ids.len() != tokens as usize
    {
        checks.warn(
            "prompt_tokens",
            format!("usage reports {tokens} tokens, {} {}", facts.tokenize().path, ids.len()),
            "the engine counts tokens in two ways; predictions are compared with its usage",
        );
    }
    usage(&again, facts, checks);
    let Some(cached) = again.cached_tokens else { return };
    match (stored_tokens, again.prompt_tokens, block_tokens) {
        (Some(stored), Some(prompt), Some(block)) => {
            // At least one token is always computed.
            let predicted = stored.min(prompt.saturating_sub(1) / block * block);
            match predicted == cached {
                true => checks.ok("prediction", format!("{predicted} tokens predicted, {cached} reused")),
                false => checks.fail(
                    "prediction",
                    format!("{predicted} tokens predicted by its events, {cached} reused"),
                    "the events do not match the cache: see event_block_size and tokenizer above; other traffic may have evicted the prompt, so run the doctor again",
                ),
            }
        }
        _ if facts.feeds.is_empty() => checks.skip("prediction", "no KV events to predict from"),
        _ => checks.skip("prediction", "no KV events for this prompt, or the engine returns no token ids"),
    }
}

fn usage(again: &Asked, facts: &Facts, checks: &mut Checks) {
    let fix = advice(facts.kind, |advice| advice.cached_tokens);
    match again.cached_tokens {
        None => {
            checks.fail("usage", "answers do not contain cached_tokens: predictions cannot be checked", fix)
        }
        Some(0) => checks.fail(
            "usage",
            "no token of a repeated prompt was reused",
            "turn prefix caching on; if it is on, the cache is too small or too busy to hold the prompt",
        ),
        Some(cached) => {
            let of = again.prompt_tokens.map_or_else(String::new, |tokens| format!(" of {tokens}"));
            checks.ok("usage", format!("repeated prompt: {cached}{of} tokens were reused"));
        }
    }
}
