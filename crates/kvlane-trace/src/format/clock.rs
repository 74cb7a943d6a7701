//! A file's clock: where it starts, and how coarsely it ticks.
//!
//! The Mooncake conversation trace's clock ticks every 3 s, some ticks a few milliseconds off, so ten requests arrive
//! at once, then none for 3 s. A replay of this would measure the clock. Such a clock is detected and the arrivals of
//! a tick are spread evenly over it, in the order of the file.

use super::{Jitter, Options};
use crate::sample::unit;
use crate::trace::{Trace, TraceRequest};

/// A clock with at least this tick, in microseconds, is coarse.
const QUANTUM_US_MIN: u64 = 100_000;

/// Minimum number of distinct times to judge a clock.
const DISTINCT_TIMES_MIN: usize = 32;

/// Maximum deviation of a time from a tick, in microseconds, or as a share of the tick if that is more.
const TICK_US: u64 = 1000;
const TICK_SHARE: u64 = 200;

/// One in this many times may deviate more.
const OFF_TICK_SHARE: usize = 100;

/// Times beyond this many seconds count from 1970, not from the trace's start: it is September 2001.
const UNIX_S_MIN: f64 = 1e9;

/// Makes the arrivals start near zero and, if requested, spreads them. Notes its changes.
pub(super) fn settle(trace: &mut Trace, options: &Options) {
    let Trace { requests, notes, .. } = trace;
    let first_s = requests[0].arrival_s;
    if first_s >= UNIX_S_MIN {
        requests.iter_mut().for_each(|request| request.arrival_s -= first_s);
        notes.push(format!("times count from the first request, at Unix time {first_s:.3} s"));
    } else if first_s < 0.0 {
        requests.iter_mut().for_each(|request| request.arrival_s -= first_s);
    }
    if options.jitter == Jitter::Off {
        return;
    }
    let Some(quantum_s) = quantum_s(requests) else { return };
    let tick = |request: &TraceRequest| (request.arrival_s / quantum_s).round();
    let mut offsets = Vec::new();
    let mut index = 0;
    for lump in requests.chunk_by_mut(|a, b| tick(a) == tick(b)) {
        let start_s = tick(&lump[0]) * quantum_s;
        offsets.clear();
        offsets.extend((index..).take(lump.len()).map(|i| unit(options.seed, i) * quantum_s));
        offsets.sort_unstable_by(f64::total_cmp);
        index += lump.len() as u64;
        for (request, offset) in lump.iter_mut().zip(&offsets) {
            request.arrival_s = start_s + offset;
        }
    }
    notes.push(format!(
        "times are multiples of {quantum_s} s; arrivals are spread evenly over it (seed {})",
        options.seed
    ));
}

/// The tick of the clock in seconds, if it is coarse: the common divisor of all times, or the most common gap for
/// nearly all of them, to the millisecond; and some times are equal.
fn quantum_s(sorted: &[TraceRequest]) -> Option<f64> {
    let micros = |request: &TraceRequest| request.arrival_s * 1e6;
    let mut times: Vec<u64> = Vec::new();
    let mut exact = true;
    for lump in sorted.chunk_by(|a, b| a.arrival_s == b.arrival_s) {
        exact &= (micros(&lump[0]) - micros(&lump[0]).round()).abs() <= 0.01;
        times.push(micros(&lump[0]).round() as u64);
    }
    if times.len() < DISTINCT_TIMES_MIN || times.len() == sorted.len() {
        return None;
    }
    let divisor = if exact { times.iter().copied().fold(0, gcd) } else { 0 };
    let quantum = if divisor >= QUANTUM_US_MIN { divisor } else { common_gap(&times) };
    let off =
        |time: &&u64| (**time % quantum).min(quantum - **time % quantum) > TICK_US.max(quantum / TICK_SHARE);
    let coarse =
        quantum >= QUANTUM_US_MIN && times.iter().filter(off).count() <= times.len() / OFF_TICK_SHARE;
    coarse.then(|| quantum as f64 / 1e6)
}

/// The gap that most neighbours have, to the millisecond.
fn common_gap(times: &[u64]) -> u64 {
    let mut gaps: Vec<u64> = times.windows(2).map(|pair| (pair[1] - pair[0] + 500) / 1000 * 1000).collect();
    gaps.sort_unstable();
    gaps.chunk_by(|a, b| a == b).max_by_key(|equal| equal.len()).map_or(0, |equal| equal[0])
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(times_ms: impl IntoIterator<Item = u64>) -> Trace {
        let request =
            |ms| TraceRequest { arrival_s: ms as f64 / 1e3, input_tokens: 1, ..TraceRequest::default() };
        let requests = times_ms.into_iter().map(request).collect();
        let mut trace = Trace { block_tokens: 16, requests, notes: Vec::new() };
        settle(&mut trace, &Options::default());
        trace
    }

    #[test]
    fn a_tick_that_comes_a_millisecond_early_is_a_tick() {
        let times = (0..400).map(|i| i / 4 * 3000 - u64::from(i / 4 % 25 == 2 && i % 4 < 2));
        let trace = settled(times);
        assert!(trace.notes[0].contains("multiples of 3 s"), "{:?}", trace.notes);
        for (i, request) in trace.requests.iter().enumerate() {
            let tick_s = (i / 4) as f64 * 3.0;
            assert!((tick_s..tick_s + 3.0).contains(&request.arrival_s), "{i}: {}", request.arrival_s);
        }
        assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s < b.arrival_s));
    }

    #[test]
    fn ticks_that_come_a_few_milliseconds_late_are_ticks() {
        let trace = settled((0..400).map(|i| i / 4 * 3000 + if i / 4 % 8 == 2 { 3 } else { 0 }));
        assert!(trace.notes[0].contains("multiples of 3 s"), "{:?}", trace.notes);
    }

    #[test]
    fn times_of_which_many_are_between_the_ticks_are_left_alone() {
        let trace = settled((0..400).map(|i| i / 4 * 3000 + u64::from(i / 4 % 10 == 2) * 701));
        assert_eq!(trace.notes, [""; 0]);
        assert_eq!(trace.requests[8].arrival_s, 6.701);
    }
}
