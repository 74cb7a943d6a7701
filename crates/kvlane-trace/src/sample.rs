//! Cutting a trace down without breaking its conversations apart.
//!
//! A trace says nothing of sessions, its blocks do: a later turn's prompt begins with the earlier turn's. So a request
//! continues the session of the latest request whose last or last but one block it contains; the last one is often
//! partial and different once it is filled. A prompt's first block is no sign of a session: in the Mooncake traces it
//! is the system prompt that all share. By this rule the conversation trace has 8,028 sessions, and a third of its
//! requests are later turns. Keeping whole sessions keeps the share of prompts that a cache can serve,
//! where thinning single requests destroys it (36.6 % of the Mooncake conversation trace's blocks at full size, 35 %
//! in a sixteenth of its sessions, 8.5 % in a sixteenth of its requests).

use std::collections::HashMap;
use std::ops::Range;

use crate::request::Trace;

/// The session of each request, as a number that counts sessions in the order of their first request.
pub fn sessions(trace: &Trace) -> Vec<u32> {
    let mut tails: HashMap<u64, u32> = HashMap::new();
    let mut count = 0;
    let mut out = Vec::with_capacity(trace.requests.len());
    for request in &trace.requests {
        let blocks = &request.blocks;
        let known = blocks.iter().skip(1).rev().find_map(|block| tails.get(block).copied());
        let session = known.unwrap_or_else(|| {
            count += 1;
            count - 1
        });
        for tail in blocks.iter().skip(1).rev().take(2) {
            tails.insert(*tail, session);
        }
        out.push(session);
    }
    out
}

// === impl Trace ===

impl Trace {
    /// The requests that arrive in `window` (seconds; its start becomes 0), of about `share` of the sessions. Whether a
    /// session stays depends on `seed` and the session alone, so a larger share keeps all that a smaller one keeps.
    pub fn slice(&self, window: Range<f64>, share: f64, seed: u64) -> Self {
        let requests: Vec<_> = sessions(self)
            .into_iter()
            .zip(&self.requests)
            .filter(|(session, request)| {
                window.contains(&request.arrival_s) && unit(seed, u64::from(*session)) < share
            })
            .map(|(_, request)| {
                let mut request = request.clone();
                request.arrival_s -= window.start;
                request
            })
            .collect();
        let mut notes = self.notes.clone();
        notes.push(format!(
            "kept {} of {} requests: those from {} s to {} s of {:.1} % of the sessions (seed {seed})",
            requests.len(),
            self.requests.len(),
            window.start,
            window.end,
            share * 100.0
        ));
        Self { block_tokens: self.block_tokens, requests, notes }
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
    use crate::request::TraceRequest;
    use proptest::prelude::*;

    fn trace(rows: &[(f64, &[u64])]) -> Trace {
        let request = |&(arrival_s, blocks): &(f64, &[u64])| TraceRequest {
            arrival_s,
            input_tokens: blocks.len() as u32 * 512,
            output_tokens: 1,
            blocks: blocks.to_vec(),
        };
        Trace { block_tokens: 512, requests: rows.iter().map(request).collect(), notes: Vec::new() }
    }

    #[test]
    fn a_prompt_that_begins_with_an_earlier_one_continues_its_session() {
        let rows: [(f64, &[u64]); 6] = [
            (0.0, &[0, 1, 2]),
            (1.0, &[0, 5, 6]),
            (2.0, &[0, 1, 2, 3]),
            (3.0, &[0, 5, 7, 8]), // block 6 was partial and became 7
            (4.0, &[0, 1, 2, 3, 9, 10]),
            (5.0, &[0, 11]),
        ];
        assert_eq!(sessions(&trace(&rows)), [0, 1, 0, 1, 0, 2]);
    }

    #[test]
    fn a_common_first_block_joins_nobody() {
        assert_eq!(sessions(&trace(&[(0.0, &[0]), (0.0, &[0, 1]), (0.0, &[0]), (0.0, &[])])), [0, 1, 2, 3]);
    }

    #[test]
    fn a_slice_starts_at_zero_and_leaves_the_window_s_end_out() {
        let whole = trace(&[(0.0, &[0, 1]), (10.0, &[0, 2]), (15.0, &[0, 3]), (20.0, &[0, 4])]);
        let slice = whole.slice(10.0..20.0, 1.0, 1);
        let arrivals: Vec<f64> = slice.requests.iter().map(|request| request.arrival_s).collect();
        assert_eq!(arrivals, [0.0, 5.0]);
        assert!(slice.notes[0].starts_with("kept 2 of 4 requests"), "{:?}", slice.notes);
    }

    /// `sessions` conversations of three turns each, interleaved.
    fn conversations(sessions: u64) -> Trace {
        let mut whole = trace(&[]);
        for turn in 0..3 {
            for session in 0..sessions {
                let blocks =
                    std::iter::once(0).chain((0..=turn).map(|block| 1 + session * 8 + block)).collect();
                whole.requests.push(TraceRequest {
                    arrival_s: (turn * sessions + session) as f64,
                    input_tokens: 1024,
                    output_tokens: 1,
                    blocks,
                });
            }
        }
        whole
    }

    proptest! {
        #[test]
        fn sessions_are_kept_or_left_out_whole(share in 0.0..1.0, seed: u64) {
            let slice = conversations(200).slice(0.0..1e9, share, seed);
            let ids = sessions(&slice);
            let count = ids.iter().max().map_or(0, |max| max + 1);
            prop_assert_eq!(ids.len() as u32, 3 * count);
            prop_assert!((f64::from(count) - 200.0 * share).abs() < 50.0, "{} of 200 at {}", count, share);
        }

        #[test]
        fn a_larger_share_keeps_all_that_a_smaller_one_keeps(low in 0.0..1.0, more in 0.0..1.0, seed: u64) {
            let whole = conversations(50);
            let (few, many) = (whole.slice(0.0..1e9, low, seed), whole.slice(0.0..1e9, low + more, seed));
            prop_assert!(few.requests.iter().all(|request| many.requests.contains(request)));
            prop_assert_eq!(whole.slice(0.0..1e9, 1.0, seed).requests.len(), 150);
        }
    }
}
