//! Why requests went where they went.

use http::StatusCode;
use http::request::Parts;
use kvlane_core::decision::{ROWS_MAX, ReceiptRow};
use kvlane_core::timing::TimingFile;
use serde_json::{Value, json};

use super::{query, refused};
use crate::front::http::error::ApiError;
use crate::gateway::{Gateway, ModelPool};

/// Decisions returned at most: they are copied under the lock of the scheduler.
const DECISIONS_MAX: usize = 200;
/// Tokens of a step where a timing file does not tell: vLLM's default on a large GPU.
const CHUNK_TOKENS: u32 = 8192;
/// Decisions returned when the query does not say how many.
const DECISIONS_DEFAULT: usize = 50;

/// The last decisions of every pool, newest first.
pub(super) fn decisions(gateway: &Gateway, parts: &Parts) -> Result<Value, ApiError> {
    let limit = match query(parts, "limit") {
        None => DECISIONS_DEFAULT,
        Some(text) => {
            text.parse().ok().filter(|limit| (1..=DECISIONS_MAX).contains(limit)).ok_or_else(|| {
                refused(StatusCode::BAD_REQUEST, &format!("limit={text}: take 1 to {DECISIONS_MAX}"))
            })?
        }
    };
    let wanted = query(parts, "model");
    let pools = gateway.pools();
    if let Some(model) = &wanted
        && !pools.iter().any(|pool| pool.model == *model)
    {
        return Err(ApiError::UnknownModel(model.chars().take(200).collect()));
    }
    let chosen = pools.iter().filter(|pool| wanted.as_ref().is_none_or(|model| *model == pool.model));
    let timings = gateway.timings.load();
    let pools: Vec<Value> = chosen.map(|pool| pool_decisions(pool, timings.of(&pool.model), limit)).collect();
    Ok(
        json!({"schema": "kvlane.decisions/1", "now_s": gateway.clock.now().as_secs_f64(), "rows_max": ROWS_MAX, "pools": pools}),
    )
}

/// Decisions of one pool. Where it is known how long its engines take, each candidate's first token is predicted: what
/// was queued there and what of this prompt was not cached, computed one after the other.
fn pool_decisions(pool: &ModelPool, timing: Option<&TimingFile>, limit: usize) -> Value {
    let first_token_s = |row: &ReceiptRow, prompt_tokens: u32| {
        let TimingFile { timing, max_num_batched_tokens, .. } = timing?;
        let queued = u32::try_from(row.prefill_tokens).unwrap_or(u32::MAX);
        let uncached = queued.saturating_add(prompt_tokens.saturating_sub(row.overlap_tokens));
        let chunk = max_num_batched_tokens.unwrap_or(CHUNK_TOKENS);
        Some(timing.host.request_secs + timing.prefill_secs(row.overlap_tokens, uncached, chunk))
    };
    let receipts: Vec<_> =
        pool.router.read(|scheduler| scheduler.receipts().iter().rev().take(limit).cloned().collect());
    let name = |endpoint| pool.occupant(endpoint).map(|occupant| occupant.name.to_string());
    let decisions: Vec<Value> = receipts
        .iter()
        .map(|receipt| {
            let rows: Vec<Value> = receipt
                .rows
                .iter()
                .map(|row| {
                    let mut shown = json!({
                        "worker": name(row.endpoint), "overlap_tokens": row.overlap_tokens, "knowledge": row.knowledge.name(),
                        "predicted": {"exact": row.prediction.exact, "approximate": row.prediction.approximate},
                        "requests": row.requests,
                        "prefill_tokens": row.prefill_tokens, "context_tokens": row.context_tokens, "cost": row.cost,
                    });
                    if let Some(secs) = first_token_s(row, receipt.prompt_tokens) {
                        shown["predicted_ttft_s"] = json!(secs);
                    }
                    shown
                })
                .collect();
            json!({
                "at_s": receipt.at.as_secs_f64(), "request": receipt.request.0, "attempt": receipt.attempt,
                "prompt_tokens": receipt.prompt_tokens,
                "session": receipt.session.map(|key| short(key.0)), "tenant": receipt.tenant.map(|key| short(key.0)),
                "priority": receipt.priority, "expected_output_tokens": receipt.output_tokens, "worker": name(receipt.placement.endpoint),
                "overlap_tokens": receipt.placement.overlap_tokens, "reason": receipt.placement.reason.name(),
                "knowledge": receipt.placement.knowledge.name(), "feed": receipt.placement.feed.name(),
                "candidates": rows, "candidates_left_out": receipt.rows_left_out,
            })
        })
        .collect();
    json!({"model": pool.model, "policy": pool.policy(), "decisions": decisions})
}

/// A key as it is shown: enough of it to tell one from another.
fn short(key: u64) -> String {
    format!("{:08x}", key >> 32)
}
