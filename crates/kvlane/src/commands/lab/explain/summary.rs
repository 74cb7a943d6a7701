//! Summary of a recording, and accuracy of its replay.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use anyhow::Result;
use kvlane_core::disaggregation::Part;
use kvlane_core::rates::Rates;
use kvlane_core::recording::{Replay, Tally};
use kvlane_core::request::RequestId;
use kvlane_core::scheduler::{Config, Input, Predictions};
use kvlane_core::time::Nanos;
use serde_json::{Value, json};

use super::files::{Damage, Files};

/// Summary of a recording.
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
    /// Times to first token in seconds, from a request's arrival at the gateway.
    pub(super) ttft_s: Vec<f64>,
    /// How far they were from their predictions.
    predictions: Predictions,
    /// Requests that were split, and their transfers.
    pub(super) splits: Splits,
    /// Prompt tokens of the answers with reported cached tokens, and the cached ones among them.
    pub(super) told_tokens: (u64, u64),
    /// Tokens of a block.
    pub(super) block_tokens: u32,
    /// The scheduler's last configuration, and its endpoints at the end.
    pub(super) config: Option<Config>,
    pub(super) endpoints: Vec<EndpointSeen>,
    /// Seconds that a transfer of 4,096 tokens took between two of them, as learned at the end.
    pub(super) transfer_s: Option<f64>,
    /// Whether there were KV events.
    pub(super) exact: bool,
}

/// An endpoint at the end of a recording.
pub(super) struct EndpointSeen {
    pub(super) rates: Rates,
    pub(super) capacity_tokens: Option<u64>,
    pub(super) part: Part,
}

/// Split placements, and what their transfers took.
#[derive(Default)]
pub(super) struct Splits {
    pub(super) placed: u64,
    /// Those whose transfer failed.
    pub(super) failed: u64,
    /// Placements by the endpoint that computed the prompt.
    pub(super) by_prefill: BTreeMap<String, u64>,
    /// Seconds from a computed prompt to the first token, for answers that were streamed.
    pub(super) transfer_s: Vec<f64>,
    /// Requests in flight that were split, with their leg and when its prompt was computed.
    open: HashMap<RequestId, (RequestId, Option<Nanos>)>,
    /// Their legs.
    legs: HashMap<RequestId, RequestId>,
}

/// Replays the whole recording.
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
        predictions: Predictions::default(),
        splits: Splits::default(),
        told_tokens: (0, 0),
        block_tokens: 16,
        config: None,
        endpoints: Vec::new(),
        transfer_s: None,
        exact: false,
    };
    // When a request arrived, and the id of its leg should it be split.
    let mut last = Nanos::ZERO;
    let mut arrived: HashMap<RequestId, (Nanos, Option<RequestId>)> = HashMap::new();
    summary.damage = files.segments(|head, number, bytes| {
        summary.bytes += bytes.len() as u64;
        replay.segment(
            number,
            bytes,
            |_| false,
            |step| {
                last = step.at;
                let at_s = head.origin_unix_s + step.at.as_secs_f64();
                (summary.from_s, summary.to_s) = (summary.from_s.min(at_s), summary.to_s.max(at_s));
                match step.input {
                    Input::Arrived { request, block_tokens, overlap } => {
                        summary.block_tokens = *block_tokens;
                        summary.exact |= overlap.iter().any(|(_, prediction)| prediction.exact > 0);
                        summary.requests += u64::from(request.attempt == 0 && request.hedge.is_none());
                        arrived.insert(request.id, (step.at, request.leg));
                    }
                    Input::FirstToken { request } => {
                        let since =
                            arrived.get(request).map(|(arrived, _)| (step.at - *arrived).as_secs_f64());
                        summary.ttft_s.extend(since);
                        summary.splits.first_token(*request, step.at);
                    }
                    Input::Begun { request } => summary.splits.begun(*request, step.at),
                    Input::TransferFailed { request } => {
                        summary.splits.failed += u64::from(summary.splits.open.contains_key(request));
                    }
                    // The engine that decodes does not say what was cached, but the one that computed the prompt.
                    Input::Answered { request, .. } if summary.splits.open.contains_key(request) => {}
                    Input::Answered { reported, .. } => {
                        summary.told_tokens.0 += u64::from(reported.prompt_tokens);
                        summary.told_tokens.1 +=
                            u64::from(reported.cached_tokens.min(reported.prompt_tokens));
                    }
                    Input::Finished { request } => {
                        arrived.remove(request);
                        summary.splits.finished(*request);
                    }
                    _ => {}
                }
                let name_of = |id| {
                    let found = step.scheduler.pool().get(id);
                    found.map_or("removed", |endpoint| &*endpoint.name)
                };
                if let (Some((request, ..)), Some(prefill)) = (step.placed, step.prefill)
                    && let Some((_, Some(leg))) = arrived.get(&request)
                {
                    summary.splits.placed(request, *leg, name_of(prefill));
                }
                if let Some((_, endpoint, reason)) = step.placed {
                    *summary.by_reason.entry(reason.name()).or_default() += 1;
                    let name = name_of(endpoint);
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
        summary.predictions = scheduler.predictions();
        let told = |endpoint: &kvlane_core::endpoint::Endpoint| {
            let capacity = endpoint.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens);
            let rates = scheduler.rates(endpoint);
            EndpointSeen { rates, capacity_tokens: capacity, part: endpoint.part }
        };
        summary.endpoints = scheduler.pool().endpoints().map(told).collect();
        let links = scheduler.transfers().links(last);
        let (sum_s, count) = links.filter(|link| link.ended > 0).fold((0.0, 0.0), |(sum_s, count), link| {
            (sum_s + link.expected_s * link.ended as f64, count + link.ended as f64)
        });
        summary.transfer_s = (count > 0.0).then(|| sum_s / count);
    }
    summary.ttft_s.sort_by(f64::total_cmp);
    summary.splits.transfer_s.sort_by(f64::total_cmp);
    Ok(summary)
}

/// A quantile of sorted values.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[(share * last as f64).round() as usize])
}

// === impl Splits ===

impl Splits {
    fn placed(&mut self, request: RequestId, leg: RequestId, prefill: &str) {
        self.placed += 1;
        *self.by_prefill.entry(prefill.to_owned()).or_default() += 1;
        self.open.insert(request, (leg, None));
        self.legs.insert(leg, request);
    }

    /// A prompt was computed, if this is a leg.
    fn begun(&mut self, leg: RequestId, at: Nanos) {
        if let Some(open) = self.legs.get(&leg).and_then(|request| self.open.get_mut(request)) {
            open.1.get_or_insert(at);
        }
    }

    fn first_token(&mut self, request: RequestId, at: Nanos) {
        if let Some((_, Some(computed))) = self.open.get(&request) {
            self.transfer_s.push((at - *computed).as_secs_f64());
        }
    }

    fn finished(&mut self, request: RequestId) {
        if let Some((leg, _)) = self.open.remove(&request) {
            self.legs.remove(&leg);
        }
    }

    fn json(&self) -> Value {
        json!({
            "placements": self.placed, "transfers_failed": self.failed, "by_prefill": self.by_prefill,
            "transfer_p50_s": quantile(&self.transfer_s, 0.5), "transfer_p99_s": quantile(&self.transfer_s, 0.99),
        })
    }

    /// One line; none if no request was split.
    fn text(&self, placements: u64) -> Option<String> {
        let Self { placed, failed, .. } = self;
        let share = 100.0 * *placed as f64 / placements.max(1) as f64;
        let took = quantile(&self.transfer_s, 0.5).zip(quantile(&self.transfer_s, 0.99));
        let took = took.map(|(p50, p99)| format!("; transfer and a step: p50 {p50:.3} s, p99 {p99:.3}"));
        (*placed > 0).then(|| {
            format!(
                "{placed} placements ({share:.1} %) were split{}; {failed} transfers failed\n",
                took.unwrap_or_default()
            )
        })
    }
}

// === impl Summary ===

impl Summary {
    /// The last policy.
    pub(super) fn policy(&self) -> &'static str {
        self.config.as_ref().map_or("none", |config| config.policy.name())
    }

    /// A quantile of the times to first token, in seconds.
    pub(super) fn ttft_s(&self, share: f64) -> Option<f64> {
        quantile(&self.ttft_s, share)
    }

    /// Their mean.
    pub(super) fn ttft_mean_s(&self) -> Option<f64> {
        (!self.ttft_s.is_empty()).then(|| self.ttft_s.iter().sum::<f64>() / self.ttft_s.len() as f64)
    }

    /// Share of prompt tokens from caches, over the answers that report it.
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
            "ttft_predictions": self.predictions.counts().map(|(_, count)| count), "splits": self.splits.json(),
            "replay": tally(&self.tally, &self.damage),
        })
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let span_s = (self.to_s - self.from_s).max(0.0);
        let Tally { placed, refused, .. } = self.tally;
        _ = writeln!(
            out,
            "{} requests in {span_s:.0} s, {placed} placements by {}, {refused} rejected; {:.1} MB, {:.0} bytes a request",
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
        let counts = self.predictions.counts().map(|(_, count)| count);
        let ([near, far, ..], all) = (counts, counts.iter().sum::<u64>());
        if all > 0 {
            let share = |count: u64| 100.0 * count as f64 / all as f64;
            let (near, far) = (share(near), share(near + far));
            _ = writeln!(
                out,
                "first token, as predicted: within 15 % for {near:.0} % of {all}, within 35 % for {far:.0} %"
            );
        }
        if let Some(share) = self.cached_share() {
            _ = writeln!(out, "prompt tokens from caches, as reported by engines: {:.1} %", 100.0 * share);
        }
        out += &self.splits.text(placed).unwrap_or_default();
        for (title, counts) in [
            ("why", self.by_reason.iter().map(|(name, count)| (*name, *count)).collect::<Vec<_>>()),
            ("where", self.by_endpoint.iter().map(|(name, count)| (&**name, *count)).collect()),
            (
                "prompts computed elsewhere",
                self.splits.by_prefill.iter().map(|(name, n)| (&**name, *n)).collect(),
            ),
        ] {
            if !counts.is_empty() {
                _ = writeln!(out, "{title}:");
            }
            for (name, count) in counts {
                let share = 100.0 * count as f64 / placed.max(1) as f64;
                _ = writeln!(out, "  {count:>9}  {share:>5.1} %  {name}");
            }
        }
        out += &told(&self.tally, &self.damage);
        out
    }
}

/// Number of replayed placements that equal the recorded ones.
pub(super) fn tally(tally: &Tally, damage: &Damage) -> Value {
    let Tally { placed, same, other, missed, resumed, lost, damaged, .. } = *tally;
    json!({
        "placements": placed, "same": same, "other": other, "missed": missed, "resumed": resumed,
        "segments_lost": lost, "parts_damaged": damaged + damage.parts,
    })
}

/// The same as text.
pub(super) fn told(tally: &Tally, damage: &Damage) -> String {
    let Tally { placed, same, other, missed, resumed, lost, damaged, .. } = *tally;
    let mut out = String::new();
    if same == placed {
        _ = writeln!(out, "replay: all {placed} placements equal the recorded ones");
    } else {
        _ = writeln!(
            out,
            "replay: {same} of {placed} placements equal the recorded ones, {other} differ, {missed} could not be \
             replayed"
        );
    }
    if resumed > 0 {
        _ = writeln!(
            out,
            "  it starts {resumed} times in the middle of a run ({lost} parts were lost): the earlier state of policies and \
             conversations is unknown"
        );
    }
    if damaged + damage.parts > 0 {
        _ = writeln!(out, "  {} parts are damaged or truncated, and left out", damaged + damage.parts);
    }
    out
}
