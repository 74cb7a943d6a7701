//! Single decisions: the rows that the policy saw, its pick, and the outcome.

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

/// Selection of decisions.
pub(super) enum Wanted {
    /// Those of a request, by its name or its number.
    Request(RequestKey, Option<RequestId>),
    /// Those of the requests of a conversation: its key, or the beginning of it in hexadecimal digits.
    Session(SessionKey, Option<(u64, u32)>),
    /// Those of this many requests with the longest times to first token.
    Worst(usize),
}

/// The results.
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
    /// The recorded endpoint and reason.
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

/// Maximum rows shown of a decision, beside the picked one.
const ROWS_SHOWN: usize = 12;

// === impl Wanted ===

impl Wanted {
    /// A request by the client's or the gateway's id, or by the gateway's own number.
    pub(super) fn request(name: &str) -> Self {
        Self::Request(RequestKey::named(name.as_bytes()), name.parse().ok().map(RequestId))
    }

    /// A conversation by the client's name, or by its key or the eight digits that `/decisions` shows.
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

/// Replays the recording and keeps the selected decisions, at most `shown_max`.
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
    // Selected requests that have arrived in this run of the gateway, with their time and their index in the results.
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

/// The requests with the longest times to first token, with their run of the gateway.
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

    /// Position in the recording.
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
            _ = writeln!(out, "request {} was rejected at {at_s:.3} (unix time): {why:?}", request.0);
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
        self.names.get(&id).map_or("removed", |name| name)
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

    /// The cheapest row that was not picked, and the difference in cost, if the policy has costs.
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
            "request {}{}: {prompt_tokens} prompt tokens, {output_tokens} output tokens predicted",
            request.0,
            if *attempt > 0 { format!(", after {attempt} failed attempts") } else { String::new() }
        );
        let (text, name) = (self.reason.text(), self.reason.name());
        _ = writeln!(out, "  placed on {}: {text} ({name})", self.name(self.endpoint));
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
                "  next best by {}: {}, cost higher by {more:.6}",
                self.policy,
                self.name(other.endpoint)
            );
        }
        let mut came = Vec::new();
        if self.waited_s >= 0.0005 {
            came.push(format!("queued for {:.3} s", self.waited_s));
        }
        came.extend(self.ttft_s.map(|ttft_s| format!("first token after {ttft_s:.3} s")));
        came.extend(self.total_s.map(|total_s| format!("end after {total_s:.3} s")));
        came.extend(self.output_tokens.map(|tokens| format!("{tokens} output tokens")));
        came.extend(self.cached_tokens.map(|tokens| format!("{tokens} cached prompt tokens")));
        if !came.is_empty() {
            _ = writeln!(out, "  {}", came.join(", "));
        }
        if !self.same {
            out +=
                "  the replay decided differently: the rows may differ from those of the original decision\n";
        }
        out
    }
}
