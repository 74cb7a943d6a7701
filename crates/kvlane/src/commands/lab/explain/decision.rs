//! One decision: what the policy saw and picked, and what came of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use kvlane_core::decision::{Receipt, ReceiptPair, ReceiptRow};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::policy::Reason;
use kvlane_core::request::Slo;
use serde_json::{Value, json};

/// A decision.
pub(super) struct Decision {
    pub(super) at_s: f64,
    pub(super) policy: &'static str,
    pub(super) receipt: Receipt,
    /// The recorded endpoint and reason.
    pub(super) endpoint: EndpointId,
    pub(super) reason: Reason,
    /// The first leg, if the request was split.
    pub(super) prefill: Option<Prefill>,
    /// Whether the replay's policy picked the same for the same reason.
    pub(super) same: bool,
    pub(super) names: BTreeMap<EndpointId, String>,
    pub(super) waited_s: f64,
    pub(super) ttft_s: Option<f64>,
    pub(super) total_s: Option<f64>,
    pub(super) output_tokens: Option<u32>,
    pub(super) cached_tokens: Option<u32>,
}

/// The first leg of a split request. Times are seconds since the request arrived.
pub(super) struct Prefill {
    /// The recorded endpoint that computed the prompt.
    pub(super) endpoint: EndpointId,
    /// When the prompt was computed.
    pub(super) computed_s: Option<f64>,
    /// When the leg or the transfer failed.
    pub(super) failed_s: Option<f64>,
}

/// Maximum rows shown of a decision, beside the picked ones.
const ROWS_SHOWN: usize = 12;

// === impl Decision ===

impl Decision {
    fn name(&self, id: EndpointId) -> &str {
        self.names.get(&id).map_or("removed", |name| name)
    }

    fn computes(&self, id: EndpointId) -> bool {
        self.prefill.as_ref().is_some_and(|leg| leg.endpoint == id)
    }

    /// The rows, the picked ones first, then by cost.
    fn rows(&self) -> Vec<&ReceiptRow> {
        let mut rows: Vec<&ReceiptRow> = self.receipt.rows.iter().collect();
        let cost = |row: &ReceiptRow| if row.cost.is_nan() { f64::INFINITY } else { row.cost };
        rows.sort_by(|a, b| {
            let first = |row: &ReceiptRow| (row.endpoint != self.endpoint, !self.computes(row.endpoint));
            first(a).cmp(&first(b)).then(cost(a).total_cmp(&cost(b)))
        });
        rows
    }

    /// Whether this pair was picked.
    fn is_picked(&self, pair: &ReceiptPair) -> bool {
        pair.endpoint == self.endpoint && self.computes(pair.prefill)
    }

    /// The cost of the pick, if the policy computed it.
    fn cost(&self) -> Option<f64> {
        let cost = match &self.prefill {
            Some(_) => self.receipt.pairs.iter().find(|pair| self.is_picked(pair))?.cost,
            None => self.receipt.rows.iter().find(|row| row.endpoint == self.endpoint)?.cost,
        };
        cost.is_finite().then_some(cost)
    }

    /// The cheapest way that was not picked: where it would have been answered, where its prompt computed if elsewhere,
    /// and the difference in cost; if the policy has costs.
    fn runner_up(&self) -> Option<(EndpointId, Option<EndpointId>, f64)> {
        let cost = self.cost()?;
        let alone = self.receipt.rows.iter();
        let alone = alone.filter(|row| self.prefill.is_some() || row.endpoint != self.endpoint);
        let split = self.receipt.pairs.iter().filter(|pair| !self.is_picked(pair));
        let ways = alone
            .map(|row| (row.endpoint, None, row.cost))
            .chain(split.map(|pair| (pair.endpoint, Some(pair.prefill), pair.cost)));
        let best = ways.filter(|(.., cost)| cost.is_finite()).min_by(|a, b| a.2.total_cmp(&b.2))?;
        Some((best.0, best.1, best.2 - cost))
    }

    /// Seconds from the computed prompt to the first token.
    fn transfer_s(&self) -> Option<f64> {
        Some(self.ttft_s? - self.prefill.as_ref()?.computed_s?)
    }

    /// The way of the request in words, as `A` or `A, its prompt on B`.
    fn way(&self, endpoint: EndpointId, prefill: Option<EndpointId>) -> String {
        let prefill = prefill.map(|id| format!(", its prompt on {}", self.name(id)));
        format!("{}{}", self.name(endpoint), prefill.unwrap_or_default())
    }

    pub(super) fn json(&self) -> Value {
        let row = |row: &ReceiptRow| {
            json!({
                "worker": self.name(row.endpoint), "picked": row.endpoint == self.endpoint,
                "prefills": self.computes(row.endpoint),
                "overlap_tokens": row.overlap_tokens, "knowledge": row.knowledge.name(),
                "exact_tokens": row.prediction.exact, "approximate_tokens": row.prediction.approximate,
                "requests": row.requests, "prefill_tokens": row.prefill_tokens, "context_tokens": row.context_tokens,
                "cost": if row.cost.is_finite() { Some(row.cost) } else { None },
            })
        };
        let pair = |pair: &ReceiptPair| {
            json!({
                "worker": self.name(pair.endpoint), "prefill": self.name(pair.prefill), "picked": self.is_picked(pair),
                "cost": pair.cost, "terms": pair.terms,
            })
        };
        let Receipt { request, attempt, prompt_tokens, session, output_tokens, .. } = &self.receipt;
        json!({
            "at_unix_s": self.at_s, "request": request.0, "attempt": attempt, "prompt_tokens": prompt_tokens,
            "session": session.map(|session| format!("{:016x}", session.0)), "expected_output_tokens": output_tokens,
            "policy": self.policy, "worker": self.name(self.endpoint), "reason": self.reason.name(),
            "prefill": self.prefill.as_ref().map(|leg| json!({
                "worker": self.name(leg.endpoint), "computed_s": leg.computed_s, "transfer_s": self.transfer_s(),
                "failed_s": leg.failed_s,
            })),
            "replayed_alike": self.same, "waited_s": self.waited_s,
            "candidates": self.rows().into_iter().map(row).collect::<Vec<_>>(),
            "pairs": self.receipt.pairs.iter().map(pair).collect::<Vec<_>>(),
            "runner_up": self.runner_up().map(|(worker, prefill, more)| json!({
                "worker": self.name(worker), "prefill": prefill.map(|id| self.name(id)), "cost_more": more,
            })),
            "ttft_s": self.ttft_s, "total_s": self.total_s, "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
        })
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let Receipt { request, attempt, prompt_tokens, output_tokens, slo, .. } = &self.receipt;
        let targets = if *slo == Slo::NONE { String::new() } else { format!(", {slo}") };
        _ = writeln!(
            out,
            "request {}{}: {prompt_tokens} prompt tokens, {output_tokens} output tokens predicted{targets}",
            request.0,
            if *attempt > 0 { format!(", after {attempt} failed attempts") } else { String::new() }
        );
        let (text, name) = (self.reason.text(), self.reason.name());
        let prefill = self.prefill.as_ref().map(|leg| leg.endpoint);
        _ = writeln!(out, "  placed on {}: {text} ({name})", self.way(self.endpoint, prefill));
        self.write_rows(&mut out);
        self.write_pairs(&mut out);
        if let Some((worker, prefill, more)) = self.runner_up() {
            let way = self.way(worker, prefill);
            _ = writeln!(out, "  next best by {}: {way}, cost higher by {more:.6}", self.policy);
        }
        let came = self.came();
        if !came.is_empty() {
            _ = writeln!(out, "  {}", came.join(", "));
        }
        if !self.same {
            out +=
                "  the replay decided differently: the rows may differ from those of the original decision\n";
        }
        out
    }

    fn write_rows(&self, out: &mut String) {
        _ = writeln!(
            out,
            "  {:<40} {:>8} {:<11} {:>8} {:>10} {:>10} {:>12}",
            "endpoint", "holds", "known", "requests", "to compute", "context", "cost"
        );
        let rows = self.rows();
        for row in rows.iter().take(ROWS_SHOWN) {
            let cost = if row.cost.is_finite() { format!("{:.6}", row.cost) } else { "-".into() };
            let mark = match row.endpoint {
                id if id == self.endpoint => "*",
                id if self.computes(id) => "p",
                _ => " ",
            };
            _ = writeln!(
                out,
                "{mark} {:<40} {:>8} {:<11} {:>8} {:>10} {:>10} {cost:>12}",
                self.name(row.endpoint),
                row.overlap_tokens,
                row.knowledge.name(),
                row.requests,
                row.prefill_tokens,
                row.context_tokens
            );
        }
        if rows.len() > ROWS_SHOWN {
            _ = writeln!(out, "  and {} more", rows.len() - ROWS_SHOWN);
        }
    }

    fn write_pairs(&self, out: &mut String) {
        if self.receipt.pairs.is_empty() {
            return;
        }
        _ = writeln!(out, "  split, the cheapest first (terms in seconds):");
        for pair in &self.receipt.pairs {
            let mark = if self.is_picked(pair) { "*" } else { " " };
            let terms = pair.terms.named().into_iter().filter(|(_, secs)| *secs >= 0.000_000_5);
            let terms: Vec<String> = terms.map(|(name, secs)| format!("{name} {secs:.6}")).collect();
            let way = self.way(pair.endpoint, Some(pair.prefill));
            _ = writeln!(out, "{mark} {:.6} {way}: {}", pair.cost, terms.join(" + "));
        }
    }

    /// What came of it.
    fn came(&self) -> Vec<String> {
        let mut came = Vec::new();
        if self.waited_s >= 0.0005 {
            came.push(format!("queued for {:.3} s", self.waited_s));
        }
        if let Some(Prefill { computed_s, failed_s, .. }) = self.prefill {
            came.extend(computed_s.map(|computed_s| format!("prompt computed after {computed_s:.3} s")));
            came.extend(self.transfer_s().map(|took_s| format!("transfer and a step {took_s:.3} s")));
            came.extend(failed_s.map(|failed_s| match computed_s {
                Some(_) => format!("transfer failed after {failed_s:.3} s"),
                None => format!("prefill failed after {failed_s:.3} s"),
            }));
        }
        came.extend(self.ttft_s.map(|ttft_s| format!("first token after {ttft_s:.3} s")));
        came.extend(self.total_s.map(|total_s| format!("end after {total_s:.3} s")));
        came.extend(self.output_tokens.map(|tokens| format!("{tokens} output tokens")));
        came.extend(self.cached_tokens.map(|tokens| format!("{tokens} cached prompt tokens")));
        came
    }
}
