//! A file's clock: where it starts, and how coarsely it ticks.
//!
//! The Mooncake conversation trace's clock ticks every 3 s, so ten requests arrive at once, then none for 3 s. Replayed
//! like that a trace measures its own clock. Such a clock is noticed and the arrivals of a tick are spread evenly over
//! it, in the order of the file.

use super::{Jitter, Options};
use crate::sample::unit;
use crate::trace::{Trace, TraceRequest};

/// A clock that ticks at least this coarsely, in microseconds, is not one to replay.
const QUANTUM_US_MIN: u64 = 100_000;

/// Fewer distinct times than this say nothing about the clock.
const DISTINCT_TIMES_MIN: usize = 32;

/// Times beyond this many seconds count from 1970, not from the trace's start: it is September 2001.
const UNIX_S_MIN: f64 = 1e9;

/// Makes the arrivals start near zero and, where asked, not in lumps. Notes what it changes.
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
    let mut offsets = Vec::new();
    let mut index = 0;
    for lump in requests.chunk_by_mut(|a, b| a.arrival_s == b.arrival_s) {
        offsets.clear();
        offsets.extend((index..).take(lump.len()).map(|i| unit(options.seed, i) * quantum_s));
        offsets.sort_unstable_by(f64::total_cmp);
        index += lump.len() as u64;
        for (request, offset) in lump.iter_mut().zip(&offsets) {
            request.arrival_s += offset;
        }
    }
    notes.push(format!(
        "times are multiples of {quantum_s} s; arrivals are spread evenly over it (seed {})",
        options.seed
    ));
}

/// The tick of the clock in seconds, if it is coarse: a common divisor of all times, some of them equal.
fn quantum_s(sorted: &[TraceRequest]) -> Option<f64> {
    let mut quantum = 0;
    let mut distinct = 0;
    for lump in sorted.chunk_by(|a, b| a.arrival_s == b.arrival_s) {
        let micros = lump[0].arrival_s * 1e6;
        if (micros - micros.round()).abs() > 0.01 {
            return None;
        }
        quantum = gcd(quantum, micros.round() as u64);
        distinct += 1;
    }
    let coarse = quantum >= QUANTUM_US_MIN && distinct >= DISTINCT_TIMES_MIN && distinct < sorted.len();
    coarse.then(|| quantum as f64 / 1e6)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
