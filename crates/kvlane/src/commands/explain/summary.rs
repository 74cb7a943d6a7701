//! What a recording holds, and how well it is lived through again.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use anyhow::Result;
use kvlane_core::rates::Rates;
use kvlane_core::recording::{Replay, Tally};
use kvlane_core::request::RequestId;
use kvlane_core::scheduler::{Config, Input};
use kvlane_core::time::Nanos;
use serde_json::{Value, json};

use super::files::{Damage, Files};

/// What a recording holds.
pub(super) struct Summary {
    pub(super) tally: Tally,
    pub(super) damage: Damage,
    pub(super) from_s: f64,
    pub(super) to_s: f64,
    pub(super) bytes: u64,
    /// Requests of clients, and placements by reason and by endpoint.
    pub(super) requests: u64,
    pub(super) by_reason: BTreeMap<&'static str, u64>,
    pub(super) by_endpoint: BTreeMap<String, u64>,
    /// Seconds to first tokens, as the gateway saw them: from a request's arrival.
    pub(super) ttft_s: Vec<f64>,
    /// Prompt tokens of the answers that told, and those of them that came from caches.
    pub(super) told_tokens: (u64, u64),
    /// Prompt tokens of one block.
    pub(super) block_tokens: u32,
    /// How the scheduler was set up last, and its endpoints' rates and capacities at the end.
    pub(super) config: Option<Config>,
    pub(super) endpoints: Vec<(Rates, Option<u64>)>,
    /// Whether events told what caches hold.
    pub(super) exact: bool,
}

/// Lives through all of it.
pub(super) fn read(files: &Files) -> Result<Summary> {
    let mut replay = Replay::new(None);
    let mut summary = Summary {
        tally: Tally::default(),
        damage: Damage::default(),
        from_s: f64::INFINITY,
        to_s: f64::NEG_INFINITY,
        bytes: 0,
        requests: 0,
        by_reason: BTreeMap::new(),
        by_endpoint: BTreeMap::new(),
        ttft_s: Vec::new(),
        told_tokens: (0, 0),
        block_tokens: 16,
        config: None,
        endpoints: Vec::new(),
        exact: false,
    };
    let mut arrived: HashMap<RequestId, Nanos> = HashMap::new();
    summary.damage = files.segments(|head, number, bytes| {
        summary.bytes += bytes.len() as u64;
        replay.segment(
            number,
            bytes,
            |_| false,
            |step| {
                let at_s = head.origin_unix_s + step.at.as_secs_f64();
                (summary.from_s, summary.to_s) = (summary.from_s.min(at_s), summary.to_s.max(at_s));
                match step.input {
                    Input::Arrived { request, block_tokens, overlap } => {
                        summary.block_tokens = *block_tokens;
                        summary.exact |= overlap.iter().any(|(_, prediction)| prediction.exact > 0);
                        summary.requests += u64::from(request.attempt == 0 && request.hedge.is_none());
                        arrived.insert(request.id, step.at);
                    }
                    Input::FirstToken { request } => {
                        let since = arrived.get(request).map(|arrived| (step.at - *arrived).as_secs_f64());
                        summary.ttft_s.extend(since);
                    }
                    Input::Answered { reported, .. } => {
                        summary.told_tokens.0 += u64::from(reported.prompt_tokens);
                        summary.told_tokens.1 +=
                            u64::from(reported.cached_tokens.min(reported.prompt_tokens));
                    }
                    Input::Finished { request } => _ = arrived.remove(request),
                    _ => {}
                }
                if let Some((_, endpoint, reason)) = step.placed {
                    *summary.by_reason.entry(reason.name()).or_default() += 1;
                    let name = step.scheduler.pool().get(endpoint).map(|endpoint| &*endpoint.name);
                    let name = name.unwrap_or("one that left");
                    match summary.by_endpoint.get_mut(name) {
                        Some(count) => *count += 1,
                        None => _ = summary.by_endpoint.insert(name.to_owned(), 1),
                    }
                }
                true
            },
        )
    })?;
    summary.tally = replay.tally();
    if let Some(scheduler) = replay.scheduler() {
        summary.config = Some(scheduler.config().clone());
        let told = |endpoint: &kvlane_core::endpoint::Endpoint| {
            let capacity = endpoint.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens);
            (scheduler.rates(endpoint), capacity)
        };
        summary.endpoints = scheduler.pool().endpoints().map(told).collect();
    }
    summary.ttft_s.sort_by(f64::total_cmp);
    Ok(summary)
}

// === impl Summary ===

impl Summary {
    /// The policy that decided at last.
    pub(super) fn policy(&self) -> &'static str {
        self.config.as_ref().map_or("none", |config| config.policy.name())
    }

    /// A quantile of the times to first token, in seconds.
    pub(super) fn ttft_s(&self, share: f64) -> Option<f64> {
        let last = self.ttft_s.len().checked_sub(1)?;
        Some(self.ttft_s[(share * last as f64).round() as usize])
    }

    /// Their mean.
    pub(super) fn ttft_mean_s(&self) -> Option<f64> {
        (!self.ttft_s.is_empty()).then(|| self.ttft_s.iter().sum::<f64>() / self.ttft_s.len() as f64)
    }

    /// Share of prompt tokens that came from caches, where answers tell.
    pub(super) fn cached_share(&self) -> Option<f64> {
        let (prompt, cached) = self.told_tokens;
        (prompt > 0).then(|| cached as f64 / prompt as f64)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "from_unix_s": self.from_s, "span_s": (self.to_s - self.from_s).max(0.0), "bytes": self.bytes,
            "policy": self.policy(), "requests": self.requests, "placements": self.tally.placed,
            "refused": self.tally.refused, "by_reason": self.by_reason, "by_endpoint": self.by_endpoint,
            "ttft_mean_s": self.ttft_mean_s(), "ttft_p50_s": self.ttft_s(0.5), "ttft_p90_s": self.ttft_s(0.9),
            "ttft_p99_s": self.ttft_s(0.99), "cached_share": self.cached_share(),
            "replay": tally(&self.tally, &self.damage),
        })
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let span_s = (self.to_s - self.from_s).max(0.0);
        let Tally { placed, refused, .. } = self.tally;
        _ = writeln!(
            out,
            "{} requests in {span_s:.0} s, {placed} placements by {}, {refused} refused; {:.1} MB, {:.0} bytes a request",
            self.requests,
            self.policy(),
            self.bytes as f64 / 1e6,
            self.bytes as f64 / self.requests.max(1) as f64
        );
        if let (Some(mean), Some(p50), Some(p90), Some(p99)) =
            (self.ttft_mean_s(), self.ttft_s(0.5), self.ttft_s(0.9), self.ttft_s(0.99))
        {
            _ = writeln!(out, "first token: mean {mean:.3} s, p50 {p50:.3}, p90 {p90:.3}, p99 {p99:.3}");
        }
        if let Some(share) = self.cached_share() {
            _ = writeln!(out, "prompt tokens from caches, as engines tell: {:.1} %", 100.0 * share);
        }
        for (title, counts) in [
            ("why", self.by_reason.iter().map(|(name, count)| (*name, *count)).collect::<Vec<_>>()),
            ("where", self.by_endpoint.iter().map(|(name, count)| (&**name, *count)).collect()),
        ] {
            _ = writeln!(out, "{title}:");
            for (name, count) in counts {
                let share = 100.0 * count as f64 / placed.max(1) as f64;
                _ = writeln!(out, "  {count:>9}  {share:>5.1} %  {name}");
            }
        }
        out += &told(&self.tally, &self.damage);
        out
    }
}

/// How far a replay has met what was recorded.
pub(super) fn tally(tally: &Tally, damage: &Damage) -> Value {
    let Tally { placed, same, other, missed, resumed, lost, damaged, .. } = *tally;
    json!({
        "placements": placed, "same": same, "other": other, "missed": missed, "resumed": resumed,
        "segments_lost": lost, "parts_damaged": damaged + damage.parts,
    })
}

/// The same in words.
pub(super) fn told(tally: &Tally, damage: &Damage) -> String {
    let Tally { placed, same, other, missed, resumed, lost, damaged, .. } = *tally;
    let mut out = String::new();
    if same == placed {
        _ = writeln!(out, "replay: all {placed} placements came out as they were recorded");
    } else {
        _ = writeln!(
            out,
            "replay: {same} of {placed} placements came out as they were recorded, {other} otherwise, {missed} could not be \
             followed"
        );
    }
    if resumed > 0 {
        _ = writeln!(
            out,
            "  it begins {resumed} times in the middle of a run ({lost} parts were lost): what policies and single \
             conversations were like before is not known"
        );
    }
    if damaged + damage.parts > 0 {
        _ = writeln!(out, "  {} parts are damaged or cut off, and left out", damaged + damage.parts);
    }
    out
}
