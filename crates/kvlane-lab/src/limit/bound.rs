//! Times that no placement goes below.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvlane_core::timing::{StepCost, StepShape};
use kvlane_sim::engine::EngineConfig;
use kvlane_sim::outcome::Outcome;
use kvlane_trace::trace::Trace;

/// Lower bounds of the mean E2E latency, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Each request alone on the fastest engine, with all of its prompt cached that any earlier request or answer had.
    pub alone_s: f64,
    /// The work of all of them, perfectly divided and in the best order. `None` where a request waits for the answer to
    /// another one, so that its time of arrival depends on the placement.
    pub work_s: Option<f64>,
}

// === impl Bounds ===

impl Bounds {
    /// The higher one.
    pub fn highest_s(&self) -> f64 {
        self.work_s.map_or(self.alone_s, |work_s| work_s.max(self.alone_s))
    }
}

/// The bounds for the requests of a run on these engines. Of the outcomes only arrivals and tokens are used.
///
/// The work of a request is what it adds to steps at least ([`StepCost::work_secs_min`]). A fleet is at best one engine
/// that is as fast as all of them; there, the mean time is lowest if the request with the least work left goes first
/// (shortest remaining processing time; Schrage, Operations Research 16 (1968), p. 687).
pub fn bounds(trace: &Trace, outcomes: &[Outcome], engines: &[EngineConfig], delay_s: f64) -> Bounds {
    let costs: Vec<(StepCost, u32)> = engines
        .iter()
        .map(|engine| (engine.timing.compile(), engine.max_num_batched_tokens.max(1)))
        .collect();
    let least = |secs: &dyn Fn(&(StepCost, u32)) -> f64| costs.iter().map(secs).fold(f64::INFINITY, f64::min);
    let alone: f64 =
        outcomes.iter().map(|one| delay_s + least(&|(cost, chunk)| alone_s(one, cost, *chunk))).sum();
    let is_free = |one: &Outcome| trace.requests[one.request as usize].after.is_none();
    let work_s = outcomes.iter().all(is_free).then(|| {
        let jobs = outcomes.iter().map(|one| {
            // Together, the engines are as fast as the sum of what each does in a second.
            let speed: f64 = costs.iter().map(|(cost, _)| 1.0 / work_s(one, cost)).sum();
            (one.due.as_secs_f64(), 1.0 / speed)
        });
        delay_s + shortest_first_s(jobs.collect())
    });
    Bounds { alone_s: alone / outcomes.len().max(1) as f64, work_s }
}

fn prompt(one: &Outcome) -> (u32, u32) {
    let cached = one.reusable_tokens.min(one.prompt_tokens.saturating_sub(1));
    (cached, one.prompt_tokens - cached)
}

fn decode(context: u32) -> StepShape {
    let mut step = StepShape::default();
    step.add_decode(context);
    step
}

/// Contexts of the steps after the first token, as the engine model counts them: without the token that is computed.
fn contexts(one: &Outcome) -> impl Iterator<Item = u32> {
    let first = one.prompt_tokens;
    (1..one.output_tokens).map(move |token| first + token - 1)
}

/// Seconds that a request takes alone.
fn alone_s(one: &Outcome, cost: &StepCost, chunk_tokens: u32) -> f64 {
    let (mut position, mut left) = prompt(one);
    let mut secs = 0.0;
    while left > 0 {
        let tokens = left.min(chunk_tokens);
        let mut step = StepShape::default();
        step.add_prefill(position, tokens);
        (position, left) = (position + tokens, left - tokens);
        step.finished_prefills = u32::from(left == 0);
        secs += cost.secs(&step);
    }
    secs + contexts(one).map(|context| cost.secs(&decode(context))).sum::<f64>()
}

/// Seconds of work of a request.
fn work_s(one: &Outcome, cost: &StepCost) -> f64 {
    let (cached, uncached) = prompt(one);
    let mut step = StepShape::default();
    step.add_prefill(cached, uncached);
    // How often these are read depends on the chunks.
    step.prefill_context_tokens = 0;
    cost.work_secs_min(&step) + contexts(one).map(|context| cost.work_secs_min(&decode(context))).sum::<f64>()
}

/// The lowest mean time in the system of jobs `(arrival, work)`, in seconds, on one machine.
fn shortest_first_s(mut jobs: Vec<(f64, f64)>) -> f64 {
    jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
    // Nonnegative numbers are ordered as their bits are.
    let bits = |secs: f64| secs.max(0.0).to_bits();
    let mut waiting: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
    let (mut now, mut sum) = (0.0_f64, 0.0);
    let mut arrivals = jobs.iter().peekable();
    loop {
        while let Some(&&(at, work)) = arrivals.peek()
            && (at <= now || waiting.is_empty())
        {
            now = now.max(at);
            waiting.push(Reverse((bits(work), bits(at))));
            arrivals.next();
        }
        let Some(Reverse((left, at))) = waiting.pop() else { break };
        let left_s = f64::from_bits(left);
        match arrivals.peek() {
            Some(&&(next, _)) if next < now + left_s => {
                waiting.push(Reverse((bits(left_s - (next - now)), at)));
                now = next;
            }
            _ => {
                now += left_s;
                sum += now - f64::from_bits(at);
            }
        }
    }
    sum / jobs.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_with_the_least_work_left_is_first() {
        // Two jobs at once, 3 s and 1 s: the shorter one ends at 1, the longer one at 4.
        assert_eq!(shortest_first_s(vec![(0.0, 3.0), (0.0, 1.0)]), 2.5);
        // A short one interrupts: 0 to 1, then 1 to 2 the short one, then the rest until 4. Times are 4 and 1.
        assert_eq!(shortest_first_s(vec![(0.0, 3.0), (1.0, 1.0)]), 2.5);
        // Idle time between jobs counts for none of them.
        assert_eq!(shortest_first_s(vec![(10.0, 1.0), (20.0, 1.0)]), 1.0);
        assert_eq!(shortest_first_s(Vec::new()), 0.0);
    }
}
