//! `fleet_cost`: experimental form.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};
use crate::endpoint::EndpointId;
use crate::load::InFlight;
use crate::time::Nanos;

/// Weights, to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub decode: f64,
    pub stall: f64,
    pub slow: f64,
    pub miss: f64,
    pub kv: f64,
    pub kv_from: f64,
    pub spread: f64,
    pub spread_s: f64,
    pub growth: f64,
    pub memory: f64,
    pub rho_max: f64,
    pub wait: f64,
    /// Weight of the decoders' stall in what is computed again.
    pub again: f64,
    /// Weight of those who wait behind.
    pub queue: f64,
    /// The same for room in the cache.
    pub room: f64,
    pub mode: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            decode: 1.0,
            stall: 1.0,
            slow: 1.0,
            miss: 2.0,
            kv: 0.6,
            kv_from: 0.75,
            spread: 1.0,
            spread_s: 60.0,
            growth: 0.5,
            memory: 256.0,
            rho_max: 0.95,
            wait: 1.0,
            again: 1.0,
            queue: 0.0,
            room: 0.0,
            mode: 0,
        }
    }
}

/// The policy.
pub struct FleetCost {
    config: Config,
    assigned: Vec<(EndpointId, f64, Nanos)>,
    again: f64,
    computed: f64,
    seen: f64,
    asked: f64,
}

// === impl FleetCost ===

impl FleetCost {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, assigned: Vec::new(), again: 0.0, computed: 0.0, seen: 0.0, asked: 0.0 }
    }

    fn assigned(&self, id: EndpointId, now: Nanos) -> f64 {
        match self.assigned.get(id.slot()) {
            Some(&(holder, work, at)) if holder == id => {
                let x = (now - at).as_secs_f64() / self.config.spread_s;
                work / (1.0 + x + 0.5 * x * x)
            }
            _ => 0.0,
        }
    }
}

impl Policy for FleetCost {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let (request, now) = (cx.request, cx.now);
        let out = f64::from(cx.output_tokens);
        let usual = cx.usual_output_tokens;
        let Config { decode, stall, slow, miss, kv, kv_from, spread, growth, again, queue, room, .. } = self.config;
        let best = candidates.iter().map(|row| row.overlap_tokens).max().unwrap_or(0);
        let rho = if self.computed > 0.0 { (self.again / self.computed).min(self.config.rho_max) } else { 0.0 };
        let share = if self.asked > 0.0 { (self.seen / self.asked).min(self.config.rho_max) } else { 0.0 };
        let rho = match self.config.mode { 0 => rho, 1 => share, _ => rho.max(share) };
        let times = 1.0 / (1.0 - rho);
        let seen = candidates.iter().map(|row| row.prediction.approximate.max(row.overlap_tokens)).max().unwrap_or(0);
        let wait = self.config.wait;
        let cold = u64::from(best) * 2 < u64::from(request.prompt_tokens);
        let work = |row: &Candidate| {
            let InFlight { requests, context_tokens, .. } = row.load.in_flight;
            let (tokens, pairs) = (u64::from(row.uncached_tokens(request)), row.uncached_pairs(request));
            let prefill_s = row.rates.prefill_s(tokens, pairs);
            let context = context_tokens + u64::from(request.prompt_tokens) + (out * 0.5) as u64;
            let before_s = row.rates.decode_step_s(requests, context_tokens);
            let step_s = row.rates.decode_step_s(requests + 1, context);
            (prefill_s, before_s, step_s)
        };
        let row = cx.cheapest(candidates, |row| {
            let InFlight { requests, prefilling, prefill_tokens, prefill_pairs, .. } = row.load.in_flight;
            let decoding = f64::from(requests - prefilling);
            let (prefill_s, before_s, step_s) = work(row);
            let queue_s = row.rates.prefill_s(prefill_tokens, prefill_pairs);
            let own = queue_s + prefill_s + decode * out * step_s;
            let stalled = stall * prefill_s * decoding;
            let waiting = f64::from(prefilling);
            let slow = slow * (step_s - before_s) * f64::from(requests) * out.min(usual);
            let capacity = row.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens).map(|c| c as f64);
            let usage = row.load.reported.and_then(|(reported, _)| {
                let capacity = reported.kv_capacity_tokens? as f64;
                let used = f64::from(reported.kv_usage_ratio) * capacity
                    + prefill_tokens as f64
                    + f64::from(row.uncached_tokens(request))
                    + growth * usual * f64::from(requests);
                Some(used / capacity)
            });
            let usage = usage.unwrap_or(0.0);
            let price = kv * usual * step_s * (usage.min(1.0) - kv_from).max(0.0) / (1.0 - kv_from);
            let cold = if cold { spread * self.assigned(row.endpoint, now) / self.config.spread_s } else { 0.0 };
            let kv_wait = wait * usual * step_s * (usage - 1.0).max(0.0);
            let burn = prefill_s * (miss + again * decoding);
            let behind = queue * waiting * prefill_s * times;
            let room = match capacity {
                Some(capacity) if usage > 0.9 => {
                    room * waiting * (f64::from(row.uncached_tokens(request)) + out) / capacity * usual * step_s * times
                }
                _ => 0.0,
            };
            own + slow + stalled + burn * (times - 1.0) + behind + room + price + cold + kv_wait
        });
        let picked = &candidates[row];
        let (prefill_s, _, step_s) = work(picked);
        let uncached = f64::from(picked.uncached_tokens(request));
        let keep = 1.0 - 1.0 / self.config.memory;
        self.again = self.again * keep + f64::from(seen.saturating_sub(picked.overlap_tokens));
        self.seen = self.seen * keep + f64::from(seen);
        self.asked = self.asked * keep + f64::from(request.prompt_tokens);
        self.computed = self.computed * keep + uncached;
        let id = picked.endpoint;
        let added = prefill_s + out * step_s / f64::from(picked.load.in_flight.requests + 1);
        let assigned = self.assigned(id, now) + added;
        if id.slot() >= self.assigned.len() {
            self.assigned.resize(id.slot() + 1, (EndpointId::new(0, 0), 0.0, Nanos::ZERO));
        }
        self.assigned[id.slot()] = (id, assigned, now);
        row
    }
}
