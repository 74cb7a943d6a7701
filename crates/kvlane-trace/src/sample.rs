//! Cutting a trace down without breaking its conversations apart.
//!
//! Keeping whole sessions keeps the share of prompts that a cache can serve, where thinning single requests destroys
//! it (36.6 % of the Mooncake conversation trace's blocks at full size, 35 % in a sixteenth of its sessions, 8.5 % in a
//! sixteenth of its requests).

use std::ops::Range;

use crate::trace::Trace;

// === impl Trace ===

impl Trace {
    /// The requests that arrive in `window` (seconds; its start becomes 0), of about `share` of the sessions. Whether a
    /// session stays depends on `seed` and the session alone, so a larger share keeps all that a smaller one keeps.
    pub fn slice(&self, window: Range<f64>, share: f64, seed: u64) -> Self {
        let kept = |request: &u32| {
            let request = &self.requests[*request as usize];
            window.contains(&request.arrival_s) && unit(seed, u64::from(request.session)) < share
        };
        let mut slice = self.select((0..self.requests.len() as u32).filter(kept));
        slice.requests.iter_mut().for_each(|request| request.arrival_s -= window.start);
        slice.notes.push(format!(
            "kept {} of {} requests: those from {} s to {} s of {:.1} % of the sessions (seed {seed})",
            slice.requests.len(),
            self.requests.len(),
            window.start,
            window.end,
            share * 100.0
        ));
        slice
    }
}

/// A number in `[0, 1)` for each index, the same for the same seed: SplitMix64's output function of the two.
pub(crate) fn unit(seed: u64, index: u64) -> f64 {
    let mut z = seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for _ in 0..2 {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
    }
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session;
    use crate::trace::{Builder, TraceRequest};
    use proptest::prelude::*;

    fn trace(rows: impl IntoIterator<Item = (f64, Vec<u64>)>) -> Trace {
        let mut builder = Builder::new(512);
        for (arrival_s, ids) in rows {
            let input_tokens = ids.len() as u32 * 512;
            builder.push(TraceRequest { arrival_s, input_tokens, ..TraceRequest::default() }, &ids);
        }
        let mut trace = builder.finish();
        session::infer(&mut trace);
        trace
    }

    #[test]
    fn a_slice_starts_at_zero_and_leaves_the_window_s_end_out() {
        let whole = trace([(0.0, vec![0, 1]), (10.0, vec![0, 2]), (15.0, vec![0, 3]), (20.0, vec![0, 4])]);
        let slice = whole.slice(10.0..20.0, 1.0, 1);
        let arrivals: Vec<f64> = slice.requests.iter().map(|request| request.arrival_s).collect();
        assert_eq!(arrivals, [0.0, 5.0]);
        assert!(slice.notes[0].starts_with("kept 2 of 4 requests"), "{:?}", slice.notes);
    }

    /// `sessions` conversations of three turns each, interleaved.
    fn conversations(sessions: u64) -> Trace {
        let turn = |turn: u64, session: u64| {
            let ids = std::iter::once(0).chain((0..=turn).map(|block| 1 + session * 8 + block)).collect();
            ((turn * sessions + session) as f64, ids)
        };
        trace((0..3).flat_map(|n| (0..sessions).map(move |session| turn(n, session))))
    }

    proptest! {
        #[test]
        fn sessions_are_kept_or_left_out_whole(share in 0.0..1.0, seed: u64) {
            let slice = conversations(200).slice(0.0..1e9, share, seed);
            let count = slice.requests.iter().map(|request| request.session + 1).max().unwrap_or(0);
            prop_assert_eq!(slice.requests.len() as u32, 3 * count);
            let mut inferred = slice.clone();
            session::infer(&mut inferred);
            prop_assert_eq!(&slice, &inferred);
            prop_assert!((f64::from(count) - 200.0 * share).abs() < 50.0, "{} of 200 at {}", count, share);
        }

        #[test]
        fn a_larger_share_keeps_all_that_a_smaller_one_keeps(low in 0.0..1.0, more in 0.0..1.0, seed: u64) {
            let whole = conversations(50);
            let (few, many) = (whole.slice(0.0..1e9, low, seed), whole.slice(0.0..1e9, low + more, seed));
            let arrivals = |trace: &Trace| trace.requests.iter().map(|request| request.arrival_s).collect::<Vec<_>>();
            let many = arrivals(&many);
            prop_assert!(arrivals(&few).iter().all(|arrival| many.contains(arrival)));
            prop_assert_eq!(whole.slice(0.0..1e9, 1.0, seed).requests.len(), 150);
        }
    }
}
