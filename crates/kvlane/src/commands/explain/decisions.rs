//! Single decisions: all that the policy saw, what it picked, and what came of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::fmt::Write as _;

use anyhow::Result;
use kvlane_core::decision::{Receipt, ReceiptRow, Rejection};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::policy::Reason;
use kvlane_core::recording::{Entries, Entry, Replay, Tally};
use kvlane_core::request::{RequestId, RequestKey, SchedulingRequest, SessionKey};
use kvlane_core::scheduler::Input;
use serde_json::{Value, json};

use super::files::{Damage, Files};
use super::summary;

/// Which decisions are wanted.
pub(super) enum Wanted {
    /// Those on a request, by its name or its number.
    Request(RequestKey, Option<RequestId>),
    /// Those on the requests of a conversation: its key, or the beginning of it in hexadecimal digits.
    Session(SessionKey, Option<(u64, u32)>),
    /// Those on so many requests with the longest times to first token.
    Worst(usize),
}

/// What was found.
pub(super) struct Decisions {
    found: Vec<Decision>,
    refused: Vec<(f64, RequestId, Rejection)>,
    left_out: u64,
    tally: Tally,
    damage: Damage,
}

/// A decision.
struct Decision {
    at_s: f64,
    policy: &'static str,
    receipt: Receipt,
    /// Where it went, and why, as recorded.
    endpoint: EndpointId,
    reason: Reason,
    /// Whether the replay's policy picked the same for the same reason.
    same: bool,
    names: BTreeMap<EndpointId, String>,
    waited_s: f64,
    ttft_s: Option<f64>,
    total_s: Option<f64>,
    output_tokens: Option<u32>,
    cached_tokens: Option<u32>,
}

/// Rows of a decision that are shown, beside the picked one.
const ROWS_SHOWN: usize = 12;

// === impl Wanted ===

impl Wanted {
    /// A request by what its client or the gateway calls it, or by the gateway's own number.
    pub(super) fn request(name: &str) -> Self {
        Self::Request(RequestKey::named(name.as_bytes()), name.parse().ok().map(RequestId))
    }

    /// A conversation by what its client calls it, or by its key or the eight digits that `/decisions` shows of it.
    pub(super) fn session(name: &str) -> Self {
        let digits = u32::try_from(name.len()).unwrap_or(u32::MAX);
        let key = (8..=16).contains(&digits).then(|| u64::from_str_radix(name, 16).ok()).flatten();
        Self::Session(SessionKey::named(name.as_bytes(), 0), key.map(|key| (key, 64 - 4 * digits)))
    }

    fn is(&self, request: &SchedulingRequest) -> bool {
        match self {
            Self::Request(name, number) => request.name == Some(*name) || *number == Some(request.id),
            Self::Session(named, begins) => request.session.is_some_and(|session| {
                session == *named || begins.is_some_and(|(key, shift)| session.0 >> shift == key)
            }),
            Self::Worst(_) => false,
        }
    }
}

/// Lives through the recording and keeps what is wanted, `shown_max` decisions at most.
pub(super) fn explain(files: &Files, wanted: &Wanted, shown_max: usize) -> Result<Decisions> {
    let worst = match wanted {
        Wanted::Worst(count) => worst(files, *count)?,
        _ => HashSet::new(),
    };
    let mut replay = Replay::new(None);
    let mut decisions = Decisions {
        found: Vec::new(),
        refused: Vec::new(),
        left_out: 0,
        tally: Tally::default(),
        damage: Damage::default(),
    };
    // Those of them that have come in this run of the gateway, with when, and where they are in what was found.
    let followed: RefCell<HashMap<RequestId, (f64, Option<usize>)>> = RefCell::default();
    let mut run = 0;
    decisions.damage = files.segments(|head, number, bytes| {
        if head.origin_unix_s.to_bits() != run {
            run = head.origin_unix_s.to_bits();
            followed.borrow_mut().clear();
        }
        let explained = |input: &Input| match input {
            Input::Arrived { request, .. } => wanted.is(request) || worst.contains(&(run, request.id)),
            Input::Refreshed { request, .. } => followed.borrow().contains_key(request),
            _ => false,
        };
        replay.segment(number, bytes, explained, |step| {
            let at_s = head.origin_unix_s + step.at.as_secs_f64();
            let mut followed = followed.borrow_mut();
            if let Input::Arrived { request, .. } = step.input
                && (wanted.is(request) || worst.contains(&(run, request.id)))
            {
                followed.insert(request.id, (at_s, None));
            }
            if let Some((request, why)) = step.refused
                && followed.contains_key(&request)
            {
                decisions.refused.push((at_s, request, why));
            }
            if let Some((request, endpoint, reason)) = step.placed
                && let Some((arrived_s, place)) = followed.get_mut(&request)
                && let Some(receipt) = step.receipt.filter(|receipt| receipt.request == request)
            {
                if decisions.found.len() >= shown_max {
                    decisions.left_out += 1;
                    return true;
                }
                *place = Some(decisions.found.len());
                let endpoints = step.scheduler.pool().endpoints();
                decisions.found.push(Decision {
                    at_s,
                    policy: step.scheduler.config().policy.name(),
                    receipt: receipt.clone(),
                    endpoint,
                    reason,
                    same: step.picked == Some((endpoint, reason)),
                    names: endpoints.map(|endpoint| (endpoint.id, endpoint.name.to_string())).collect(),
                    waited_s: at_s - *arrived_s,
                    ttft_s: None,
                    total_s: None,
                    output_tokens: None,
                    cached_tokens: None,
                });
            }
            let about = match step.input {
                Input::FirstToken { request }
                | Input::Wrote { request, .. }
                | Input::Answered { request, .. }
                | Input::Finished { request } => followed.get(request).copied(),
                _ => None,
            };
            let Some((arrived_s, Some(place))) = about else { return true };
            let decision = &mut decisions.found[place];
            match step.input {
                Input::FirstToken { .. } => decision.ttft_s = Some(at_s - arrived_s),
                Input::Wrote { output_tokens, .. } => decision.output_tokens = Some(*output_tokens),
                Input::Answered { reported, .. } => decision.cached_tokens = Some(reported.cached_tokens),
                Input::Finished { .. } => decision.total_s = Some(at_s - arrived_s),
                _ => {}
            }
            true
        })
    })?;
    decisions.tally = replay.tally();
    if matches!(wanted, Wanted::Worst(_)) {
        let ttft_s = |decision: &Decision| decision.ttft_s.unwrap_or(0.0);
        decisions.found.sort_by(|a, b| ttft_s(b).total_cmp(&ttft_s(a)));
    }
    Ok(decisions)
}

/// The requests with the longest times to first token, with the run of the gateway that they belong to.
fn worst(files: &Files, count: usize) -> Result<HashSet<(u64, RequestId)>> {
    // The shortest of the longest on top, in nanoseconds.
    let mut longest: BinaryHeap<std::cmp::Reverse<(u64, u64, RequestId)>> = BinaryHeap::new();
    let mut arrived = HashMap::new();
    let mut run = 0;
    files.segments(|head, _, bytes| {
        if head.origin_unix_s.to_bits() != run {
            run = head.origin_unix_s.to_bits();
            arrived.clear();
        }
        for (at, entry) in Entries::new(bytes).flatten() {
            match entry {
                Entry::Input(Input::Arrived { request, .. }) => _ = arrived.insert(request.id, at),
                Entry::Input(Input::FirstToken { request }) => {
                    let Some(since) = arrived.get(&request) else { continue };
                    longest.push(std::cmp::Reverse(((at - *since).0, run, request)));
                    if longest.len() > count {
                        longest.pop();
                    }
                }
                Entry::Input(Input::Finished { request }) => _ = arrived.remove(&request),
                _ => {}
            }
        }
        true
    })?;
    Ok(longest.into_iter().map(|std::cmp::Reverse((_, run, request))| (run, request)).collect())
}

// === impl Decisions ===

impl Decisions {
    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty() && self.refused.is_empty()
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "found": self.found.iter().map(Decision::json).collect::<Vec<_>>(),
            "left_out": self.left_out,
            "refused": self.refused.iter().map(|(at_s, request, why)| json!({
                "at_unix_s": at_s, "request": request.0, "why": why,
            })).collect::<Vec<_>>(),
            "replay": summary::tally(&self.tally, &self.damage),
        })
    }

    /// How far the recording was read.
    pub(super) fn replayed(&self) -> String {
        summary::told(&self.tally, &self.damage).trim_end().replace('\n', "; ")
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        for decision in &self.found {
            out += &decision.text();
            out.push('\n');
        }
        for (at_s, request, why) in &self.refused {
            _ = writeln!(out, "request {} was refused at {at_s:.3} (unix time): {why:?}", request.0);
        }
        if self.left_out > 0 {
            _ = writeln!(out, "{} more decisions are not shown", self.left_out);
        }
        out += &summary::told(&self.tally, &self.damage);
        out
    }
}

// === impl Decision ===

impl Decision {
    fn name(&self, id: EndpointId) -> &str {
        self.names.get(&id).map_or("one that left", |name| name)
    }

    /// The rows, the picked one first, then by cost.
    fn rows(&self) -> Vec<&ReceiptRow> {
        let mut rows: Vec<&ReceiptRow> = self.receipt.rows.iter().collect();
        let cost = |row: &ReceiptRow| if row.cost.is_nan() { f64::INFINITY } else { row.cost };
        rows.sort_by(|a, b| {
            let first = |row: &ReceiptRow| row.endpoint != self.endpoint;
            first(a).cmp(&first(b)).then(cost(a).total_cmp(&cost(b)))
        });
        rows
    }

    /// The cheapest of those that were not picked, and how much more it costs, where the policy has costs.
    fn runner_up(&self) -> Option<(&ReceiptRow, f64)> {
        let rows = self.rows();
        let (picked, rest) = rows.split_first()?;
        let other = rest.first().filter(|row| row.cost.is_finite() && picked.cost.is_finite())?;
        Some((other, other.cost - picked.cost))
    }

    fn json(&self) -> Value {
        let row = |row: &ReceiptRow| {
            json!({
                "worker": self.name(row.endpoint), "picked": row.endpoint == self.endpoint,
                "overlap_tokens": row.overlap_tokens, "knowledge": row.knowledge.name(),
                "exact_tokens": row.prediction.exact, "approximate_tokens": row.prediction.approximate,
                "requests": row.requests, "prefill_tokens": row.prefill_tokens, "context_tokens": row.context_tokens,
                "cost": if row.cost.is_finite() { Some(row.cost) } else { None },
            })
        };
        let Receipt { request, attempt, prompt_tokens, session, output_tokens, .. } = &self.receipt;
        json!({
            "at_unix_s": self.at_s, "request": request.0, "attempt": attempt, "prompt_tokens": prompt_tokens,
            "session": session.map(|session| format!("{:016x}", session.0)), "expected_output_tokens": output_tokens,
            "policy": self.policy, "worker": self.name(self.endpoint), "reason": self.reason.name(),
            "replayed_alike": self.same, "waited_s": self.waited_s,
            "candidates": self.rows().into_iter().map(row).collect::<Vec<_>>(),
            "runner_up": self.runner_up().map(|(other, more)| json!({
                "worker": self.name(other.endpoint), "cost_more": more,
            })),
            "ttft_s": self.ttft_s, "total_s": self.total_s, "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
        })
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let Receipt { request, attempt, prompt_tokens, output_tokens, .. } = &self.receipt;
        _ = writeln!(
            out,
            "request {}{}: {prompt_tokens} prompt tokens, {output_tokens} of answer expected",
            request.0,
            if *attempt > 0 { format!(", tried {attempt} times before") } else { String::new() }
        );
        _ = writeln!(out, "  went to {}: {}", self.name(self.endpoint), because(self.reason));
        _ = writeln!(
            out,
            "  {:<40} {:>8} {:<11} {:>8} {:>10} {:>10} {:>12}",
            "endpoint", "holds", "known", "requests", "to compute", "context", "cost"
        );
        let rows = self.rows();
        for row in rows.iter().take(ROWS_SHOWN) {
            let cost = if row.cost.is_finite() { format!("{:.6}", row.cost) } else { "-".into() };
            _ = writeln!(
                out,
                "{} {:<40} {:>8} {:<11} {:>8} {:>10} {:>10} {cost:>12}",
                if row.endpoint == self.endpoint { "*" } else { " " },
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
        if let Some((other, more)) = self.runner_up() {
            _ = writeln!(
                out,
                "  next best by {}: {}, which costs {more:.6} more",
                self.policy,
                self.name(other.endpoint)
            );
        }
        let mut came = Vec::new();
        if self.waited_s >= 0.0005 {
            came.push(format!("it waited {:.3} s for its place", self.waited_s));
        }
        came.extend(self.ttft_s.map(|ttft_s| format!("first token after {ttft_s:.3} s")));
        came.extend(self.total_s.map(|total_s| format!("over after {total_s:.3} s")));
        came.extend(self.output_tokens.map(|tokens| format!("{tokens} tokens of answer")));
        came.extend(self.cached_tokens.map(|tokens| format!("{tokens} prompt tokens came from the cache")));
        if !came.is_empty() {
            _ = writeln!(out, "  {}", came.join(", "));
        }
        if !self.same {
            out +=
                "  the replay would have decided otherwise: what is shown is not quite what was seen then\n";
        }
        out
    }
}

/// Why, in words.
fn because(reason: Reason) -> &'static str {
    match reason {
        Reason::Random => "it was drawn (random)",
        Reason::Turn => "it was its turn (turn)",
        Reason::LeastLoaded => "it had the least to do (least_loaded)",
        Reason::PrefixHit => "it holds the longest beginning of the prompt (prefix_hit)",
        Reason::PrefixMiss => "nobody holds enough of the prompt, so load decided (prefix_miss)",
        Reason::Imbalance => "the fleet was out of balance, so load decided (imbalance)",
        Reason::Saturated => "whoever holds most of the prompt had too much to do (saturated)",
        Reason::LowestCost => "it cost least (lowest_cost)",
        Reason::Affinity => "its conversation, or prompts that begin like it, go there (affinity)",
    }
}
