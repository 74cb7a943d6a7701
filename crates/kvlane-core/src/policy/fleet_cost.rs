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
    /// Weight of the wait for the first token.
    pub first: f64,
    /// Weight of an even share of cold prompts.
    pub even: f64,
    /// Weight of a long wait.
    pub tail: f64,
    /// Weight of its own computing.
    pub extra: f64,
    pub times_mode: u32,
    pub full: f64,
    pub full_from: f64,
    pub turn: f64,
    pub square: bool,
    pub credit: f64,
    pub care: f64,
    pub prior_share: f64,
    pub prior_tokens: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            decode: 0.3,
            stall: 1.0,
            slow: 0.3,
            miss: 2.0,
            kv: 0.0,
            kv_from: 0.75,
            spread: 1.0,
            spread_s: 60.0,
            growth: 0.5,
            memory: 256.0,
            rho_max: 0.95,
            wait: 1.0,
            again: 1.0,
            queue: 2.0,
            room: 1.0,
            mode: 1,
            first: 1.0,
            even: 1.0,
            tail: 0.0,
            extra: 0.0,
            times_mode: 2,
            full: 0.0,
            full_from: 0.75,
            turn: 4.0,
            square: true,
            credit: 1.0,
            care: 0.0,
            prior_share: 0.5,
            prior_tokens: 1e5,
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
    cold: Vec<(EndpointId, f64)>,
    scale: f64,
    usual_first_s: f64,
    evicted: f64,
}

// === impl FleetCost ===

impl FleetCost {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, assigned: Vec::new(), again: 0.0, computed: 0.0, seen: 0.0, asked: 0.0, cold: Vec::new(), scale: 1.0, usual_first_s: 0.0, evicted: 0.0 }
    }

    fn cold_of(&self, id: EndpointId) -> f64 {
        self.cold.get(id.slot()).filter(|(holder, _)| *holder == id).map_or(0.0, |(_, tokens)| tokens / self.scale)
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
        let Config { decode, stall, slow, miss, kv, kv_from, spread, growth, again, queue, room, first, even, tail, extra, times_mode, full, full_from, .. } = self.config;
        let usual_first_s = self.usual_first_s;
        let best = candidates.iter().map(|row| row.overlap_tokens).max().unwrap_or(0);
        let rho = if self.computed > 0.0 { (self.again / self.computed).min(self.config.rho_max) } else { 0.0 };
        let share = if self.asked > 0.0 { (self.seen / self.asked).min(self.config.rho_max) } else { 0.0 };
        let rho = match self.config.mode { 0 => rho, 1 => share, 3 => if self.computed > 0.0 { (self.evicted / self.computed).min(self.config.rho_max) } else { 0.0 }, 4 => { let e = if self.computed > 0.0 { (self.evicted / self.computed).min(self.config.rho_max) } else { 0.0 }; e * share }, _ => rho.max(share) };
        let times = 1.0 / (1.0 - rho);
        let seen = candidates.iter().map(|row| row.prediction.approximate.max(row.overlap_tokens)).max().unwrap_or(0);
        let prior = self.config.prior_tokens;
        let even_share = ((self.seen + self.config.prior_share * prior) / (self.asked + prior)).min(0.95);
        let rho = if self.config.mode == 5 { even_share.min(self.config.rho_max) } else { rho };
        let times = 1.0 / (1.0 - rho);
        let future = even_share / (1.0 - even_share);
        let (care, credit) = (self.config.care, self.config.credit);
        let even_times = { let f = even_share / (1.0 - even_share); if self.config.square { f * f } else { f } };
        let wait = self.config.wait;
        let _ = best;
        let cold = u64::from(seen) * 2 < u64::from(request.prompt_tokens);
        let work = |row: &Candidate| {
            let InFlight { requests, context_tokens, .. } = row.load.in_flight;
            let (tokens, pairs) = (u64::from(row.uncached_tokens(request)), row.uncached_pairs(request));
            let prefill_s = row.rates.prefill_s(tokens, pairs);
            let context = context_tokens.saturating_add(u64::from(request.prompt_tokens) + (out * 0.5) as u64);
            let before_s = row.rates.decode_step_s(requests, context_tokens);
            let step_s = row.rates.decode_step_s(requests.saturating_add(1), context);
            (prefill_s, before_s, step_s)
        };
        let usual_rate = candidates.iter().map(|row| row.rates.prefill_token_s).sum::<f64>() / candidates.len() as f64;
        let like = |ratio: f64| if (0.75..1.33).contains(&ratio) { 1.0 } else { ratio };
        let row = cx.cheapest(candidates, |row| {
            let InFlight { requests, prefilling, prefill_tokens, prefill_pairs, .. } = row.load.in_flight;
            let decoding = f64::from(requests.saturating_sub(prefilling));
            let (prefill_s, before_s, step_s) = work(row);
            let queue_s = row.rates.prefill_s(prefill_tokens, prefill_pairs);
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
            let kv_wait = wait * usual * step_s * (usage - 1.0).max(0.0);
            let first_s = queue_s + prefill_s + kv_wait;
            let long = if usual_first_s > 0.0 { (first_s / usual_first_s).min(10.0) } else { 1.0 };
            let own = extra * prefill_s + first_s * (first + tail * long) + decode * out * step_s;
            let price = kv * usual * step_s * (usage.min(1.0) - kv_from).max(0.0) / (1.0 - kv_from);
            let cold = if cold { care * future * self.assigned(row.endpoint, now) + even * even_times * usual_rate * like(row.rates.prefill_token_s / usual_rate) * self.cold_of(row.endpoint) + spread * self.assigned(row.endpoint, now) / self.config.spread_s } else { 0.0 };
                        let burn = prefill_s * (miss + again * decoding);
            let t2 = if times_mode == 0 { times } else { 1.0 };
            let t3 = if times_mode == 2 { queue * waiting } else { 0.0 };
            let burn = burn + prefill_s * t3;
            let behind = queue * waiting * prefill_s * t2;
            let room = match capacity {
                Some(capacity) if usage > 0.9 => {
                    room * waiting * (f64::from(row.uncached_tokens(request)) + out) / capacity * usual * step_s * t2
                }
                _ => 0.0,
            };
            let fullness = ((usage.min(1.0) - full_from) / (1.0 - full_from)).max(0.0);
            let room = room + match capacity {
                Some(capacity) => full * f64::from(requests) * (f64::from(row.uncached_tokens(request)) + out) / capacity * usual * step_s * fullness,
                None => 0.0,
            };
            own + slow + stalled + burn * (times - 1.0) + behind + room + price + cold
        });
        let picked = &candidates[row];
        let (prefill_s, _, step_s) = work(picked);
        let uncached = f64::from(picked.uncached_tokens(request));
        let keep = 1.0 - 1.0 / self.config.memory;
        self.again = self.again * keep + f64::from(seen.saturating_sub(picked.overlap_tokens));
        self.evicted = self.evicted * keep + f64::from(seen.saturating_sub(best));
        self.seen = self.seen * keep + f64::from(seen);
        self.asked = self.asked * keep + f64::from(request.prompt_tokens);
        self.computed = self.computed * keep + uncached;
        let id = picked.endpoint;
        let capacity = picked.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens).unwrap_or(300_000) as f64;
        self.scale /= 1.0 - (uncached / (self.config.turn * capacity * candidates.len() as f64)).min(0.5);
        if self.scale > 1e9 {
            let scale = std::mem::replace(&mut self.scale, 1.0);
            self.cold.iter_mut().for_each(|(_, tokens)| *tokens /= scale);
        }
        if cold {
            if id.slot() >= self.cold.len() {
                self.cold.resize(id.slot() + 1, (EndpointId::new(0, 0), 0.0));
            }
            let before = self.cold_of(id);
            self.cold[id.slot()] = (id, (before + uncached) * self.scale);
        }
        let InFlight { prefill_tokens, prefill_pairs, .. } = picked.load.in_flight;
        let first_s = picked.rates.prefill_s(prefill_tokens, prefill_pairs) + prefill_s;
        self.usual_first_s += (first_s - self.usual_first_s) / 256.0;
        let added = prefill_s + out * step_s / f64::from(picked.load.in_flight.requests.saturating_add(1));
        let assigned = self.assigned(id, now) + if cold { added * (1.0 + credit * future) } else { added };
        if id.slot() >= self.assigned.len() {
            self.assigned.resize(id.slot() + 1, (EndpointId::new(0, 0), 0.0, Nanos::ZERO));
        }
        self.assigned[id.slot()] = (id, assigned, now);
        row
    }
}
