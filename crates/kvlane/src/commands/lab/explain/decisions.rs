//! The selected decisions of a recording, and what came of them.

use std::cell::RefCell;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::fmt::Write as _;

use anyhow::Result;
use kvlane_core::decision::Rejection;
use kvlane_core::recording::{Entries, Entry, Replay, Tally};
use kvlane_core::request::{RequestId, RequestKey, SchedulingRequest, SessionKey};
use kvlane_core::scheduler::Input;
use serde_json::{Value, json};

use super::decision::{Decision, Prefill};
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
    // Prefill legs of the results, with the request they belong to.
    let mut legs: HashMap<RequestId, RequestId> = HashMap::new();
    let mut run = 0;
    decisions.damage = files.segments(|head, number, bytes| {
        if head.origin_unix_s.to_bits() != run {
            run = head.origin_unix_s.to_bits();
            followed.borrow_mut().clear();
            legs.clear();
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
                legs.extend(receipt.placement.prefill.map(|leg| (leg.id, request)));
                decisions.found.push(Decision {
                    at_s,
                    policy: step.scheduler.config().policy.name(),
                    receipt: receipt.clone(),
                    endpoint,
                    reason,
                    prefill: step.prefill.map(|endpoint| Prefill {
                        endpoint,
                        computed_s: None,
                        failed_s: None,
                    }),
                    same: step.picked == Some((endpoint, reason)),
                    names: endpoints.map(|endpoint| (endpoint.id, endpoint.name.to_string())).collect(),
                    waited_s: at_s - *arrived_s,
                    ttft_s: None,
                    total_s: None,
                    output_tokens: None,
                    cached_tokens: None,
                });
            }
            let (Input::FirstToken { request: about }
            | Input::Begun { request: about }
            | Input::Wrote { request: about, .. }
            | Input::Answered { request: about, .. }
            | Input::Failed { request: about }
            | Input::TransferFailed { request: about }
            | Input::Finished { request: about }) = step.input
            else {
                return true;
            };
            let of = legs.get(about);
            let Some(&(arrived_s, Some(place))) = followed.get(of.unwrap_or(about)) else { return true };
            let decision = &mut decisions.found[place];
            let after_s = at_s - arrived_s;
            match (step.input, &mut decision.prefill) {
                (Input::Begun { .. }, Some(leg)) if of.is_some() => leg.computed_s = Some(after_s),
                (Input::Failed { .. }, Some(leg)) if of.is_some() => leg.failed_s = Some(after_s),
                (Input::TransferFailed { .. }, Some(leg)) => leg.failed_s = Some(after_s),
                // The engine that decodes does not say what was cached, but the one that computed the prompt.
                (Input::Answered { .. }, Some(_)) if of.is_none() => {}
                (Input::Answered { reported, .. }, _) => {
                    decision.cached_tokens = Some(reported.cached_tokens)
                }
                _ if of.is_some() => {}
                (Input::FirstToken { .. }, _) => decision.ttft_s = Some(after_s),
                (Input::Wrote { output_tokens, .. }, _) => decision.output_tokens = Some(*output_tokens),
                (Input::Finished { .. }, _) => decision.total_s = Some(after_s),
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
