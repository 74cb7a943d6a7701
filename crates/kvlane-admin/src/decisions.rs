//! `GET /decisions`: the last routing decisions of each pool, with the reason for each.

use std::ops::RangeInclusive;

use http::StatusCode;
use http::request::Parts;
use kvlane_core::decision::{ROWS_MAX, Receipt, ReceiptRow};
use kvlane_core::policy::CostUnit;
use kvlane_core::request::RequestId;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingFile;
use kvlane_fleet::Fleet;
use kvlane_fleet::pool::ModelPool;
use kvlane_proxy::error::ApiError;
use serde_json::{Value, json};

use crate::query::{query, refused, since};

/// Most decisions in one response: they are copied under the scheduler's lock.
const DECISIONS_MAX: usize = 200;
/// Tokens per engine step where the timing file does not state them: vLLM's default on a large GPU.
const CHUNK_TOKENS: u32 = 8192;
/// Decisions in a response when the query gives no number.
const DECISIONS_DEFAULT: usize = 50;

/// The last decisions of every pool, newest first.
pub(super) fn decisions(fleet: &Fleet, parts: &Parts) -> Result<Value, ApiError> {
    let limit =
        number(parts, "limit", 1..=DECISIONS_MAX as u64)?.map_or(DECISIONS_DEFAULT, |limit| limit as usize);
    let wanted = query(parts, "model");
    let asked = Asked {
        since: since(parts)?,
        request: number(parts, "request", 0..=u64::MAX)?.map(RequestId),
        limit,
        candidates_max: number(parts, "candidates", 1..=ROWS_MAX as u64)?
            .map_or(ROWS_MAX, |most| most as usize),
    };
    let pools = fleet.pools();
    if let Some(model) = &wanted
        && !pools.iter().any(|pool| pool.model == *model)
    {
        return Err(ApiError::UnknownModel(model.chars().take(200).collect()));
    }
    let chosen = pools.iter().filter(|pool| wanted.as_ref().is_none_or(|model| *model == pool.model));
    let settings = fleet.settings();
    let pools: Vec<Value> =
        chosen.map(|pool| pool_decisions(pool, settings.timings.of(&pool.model), &asked)).collect();
    Ok(
        json!({"schema": "kvlane.decisions/1", "now_s": fleet.clock.now().as_secs_f64(), "rows_max": ROWS_MAX, "pools": pools}),
    )
}

/// The parameters of the query: how many decisions, and how much detail.
struct Asked {
    since: Option<Nanos>,
    request: Option<RequestId>,
    limit: usize,
    candidates_max: usize,
}

/// A numeric query parameter, if present.
fn number(parts: &Parts, key: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
    let Some(text) = query(parts, key) else { return Ok(None) };
    let within = text.parse().ok().filter(|number| range.contains(number));
    within.map(Some).ok_or_else(|| {
        let most = if *range.end() == u64::MAX {
            "a number".into()
        } else {
            format!("{} to {}", range.start(), range.end())
        };
        refused(StatusCode::BAD_REQUEST, &format!("{key}={text}: must be {most}"))
    })
}

/// The rows shown of a receipt: the selected endpoint first, then the one that computes the prompt, then the others by
/// rising cost; in their own order where there is no cost.
fn foremost(receipt: &Receipt, most: usize) -> Vec<ReceiptRow> {
    let mut rows = receipt.rows.clone();
    if rows.len() > most {
        let prefill = receipt.placement.prefill.map(|leg| leg.endpoint);
        let rank = |row: &ReceiptRow| match row.endpoint {
            id if id == receipt.placement.endpoint => 0,
            id if Some(id) == prefill => 1,
            _ => 2,
        };
        rows.sort_by(|a, b| rank(a).cmp(&rank(b)).then(a.cost.total_cmp(&b.cost)));
        rows.truncate(most);
    }
    rows
}

/// Decisions of one pool. If the engine's timing is known, the time to first token of each candidate is predicted
/// from its queued prefill tokens and the uncached tokens of this prompt, computed one after the other.
fn pool_decisions(pool: &ModelPool, timing: Option<&TimingFile>, asked: &Asked) -> Value {
    let first_token_s = |row: &ReceiptRow, prompt_tokens: u32| {
        let TimingFile { timing, max_num_batched_tokens, .. } = timing?;
        let queued = u32::try_from(row.prefill_tokens).unwrap_or(u32::MAX);
        let uncached = queued.saturating_add(prompt_tokens.saturating_sub(row.overlap_tokens));
        let chunk = max_num_batched_tokens.unwrap_or(CHUNK_TOKENS);
        Some(timing.host.request_secs + timing.prefill_secs(row.overlap_tokens, uncached, chunk))
    };
    let wanted = |receipt: &&Receipt| asked.request.is_none_or(|request| receipt.request == request);
    let (receipts, cost_unit): (Vec<_>, CostUnit) = pool.router.read(|scheduler| {
        let newest = scheduler
            .receipts()
            .iter()
            .rev()
            .take_while(|receipt| asked.since.is_none_or(|since| receipt.at > since));
        (newest.filter(wanted).take(asked.limit).cloned().collect(), scheduler.cost_unit())
    });
    let name = |endpoint| pool.endpoint(endpoint).map(|endpoint| endpoint.name.to_string());
    let decisions: Vec<Value> = receipts
        .iter()
        .map(|receipt| {
            let shown = foremost(receipt, asked.candidates_max);
            let left_out = receipt.rows_left_out as usize + receipt.rows.len() - shown.len();
            let rows: Vec<Value> = shown
                .iter()
                .map(|row| {
                    let mut shown = json!({
                        "worker": name(row.endpoint), "overlap_tokens": row.overlap_tokens, "lower_tokens": row.lower_tokens,
                        "knowledge": row.knowledge.name(),
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
                "priority": receipt.priority, "claims": receipt.claims, "slo": receipt.slo, "expected_output_tokens": receipt.output_tokens, "worker": name(receipt.placement.endpoint),
                "overlap_tokens": receipt.placement.overlap_tokens, "reason": receipt.placement.reason.name(),
                "reason_text": receipt.placement.reason.text(),
                "knowledge": receipt.placement.knowledge.name(), "feed": receipt.placement.feed.name(),
                "prefill": receipt.placement.prefill.map(|leg| json!({
                    "worker": name(leg.endpoint), "overlap_tokens": leg.overlap_tokens,
                    "knowledge": leg.knowledge.name(), "feed": leg.feed.name(),
                })),
                "pairs": receipt.pairs.iter().map(|pair| json!({
                    "worker": name(pair.endpoint), "prefill": name(pair.prefill), "cost": pair.cost, "terms": pair.terms,
                })).collect::<Vec<_>>(),
                "candidates": rows, "candidates_left_out": left_out,
            })
        })
        .collect();
    json!({
        "model": pool.model, "policy": pool.policy(), "cost_unit": cost_unit.name(), "decisions": decisions,
    })
}

/// A shortened key, long enough to tell keys apart.
pub(crate) fn short(key: u64) -> String {
    format!("{:08x}", key >> 32)
}
