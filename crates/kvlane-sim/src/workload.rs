//! A trace as the world plays it: when conversations begin, and which blocks each prompt has.
//!
//! A conversation begins when the trace says (open loop) or when a client is free (closed loop); who waits for whom within
//! it is [`kvlane_trace::plan`]'s.

use kvlane_core::block::BlockHash;
use kvlane_trace::trace::Trace;

use crate::engine::own_block;

/// When conversations begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Drive {
    /// When the trace says, whatever is in flight. `load` is a factor on the rate at which conversations begin; what
    /// happens within one keeps its pace.
    Open {
        /// 2 starts them twice as fast.
        load: f64,
    },
    /// A number of clients, each of which begins the next conversation when its last one is over. The trace's times
    /// do not matter.
    Closed {
        /// How many.
        clients: u32,
    },
}

/// What stands for the text that a request brings into the world, its answer included.
pub fn text_seed(request: u32) -> u64 {
    u64::from(request)
}

/// The hashes of the full blocks, of `block_tokens` each, of a request's prompt. An engine's block is as shared as the
/// trace's block in which it ends.
pub fn prompt_blocks(trace: &Trace, request: u32, block_tokens: u32) -> Vec<BlockHash> {
    let full = trace.requests[request as usize].input_tokens / block_tokens;
    let mut blocks = vec![BlockHash(0); full as usize];
    let (ours, theirs) = (u64::from(block_tokens), u64::from(trace.block_tokens));
    for (owner, from, to) in trace.runs(request) {
        // A block of ours belongs to whoever brought its last token.
        let first = u64::from(from) * theirs / ours;
        let end = (u64::from(to) * theirs / ours).min(u64::from(full));
        let seed = text_seed(owner);
        for index in first..end {
            blocks[index as usize] = own_block(seed, index as u32);
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::{Builder, TraceRequest};
    use proptest::prelude::*;

    use super::*;

    fn request(input_tokens: u32) -> TraceRequest {
        TraceRequest { input_tokens, output_tokens: 1, ..TraceRequest::default() }
    }

    proptest! {
        /// Whatever the two block sizes are, prompts share exactly the engine blocks that lie wholly within what they
        /// share of the trace's.
        #[test]
        fn prompts_share_the_blocks_that_end_in_what_they_share(
            theirs in 1u32..40, ours in 1u32..40, shared in 0u32..8, a in 0u32..8, b in 0u32..8, extra in 0u32..40,
        ) {
            let mut builder = Builder::new(theirs);
            for (own, base) in [(a, 100), (b, 200)] {
                let ids: Vec<u64> = (0..u64::from(shared)).chain(base..base + u64::from(own)).collect();
                let tokens = (shared + own) * theirs + extra;
                if tokens > 0 {
                    builder.push(request(tokens), &ids).expect("room");
                }
            }
            let trace = builder.finish();
            prop_assume!(trace.requests.len() == 2);
            let (x, y) = (prompt_blocks(&trace, 0, ours), prompt_blocks(&trace, 1, ours));
            prop_assert_eq!(x.len() as u32, trace.requests[0].input_tokens / ours);
            let common = x.iter().zip(&y).take_while(|(x, y)| x == y).count() as u32;
            let expected = trace.requests[1].shared_blocks * theirs / ours;
            prop_assert_eq!(common, expected.min(x.len() as u32).min(y.len() as u32));
            prop_assert!(x.iter().chain(&y).all(|hash| *hash != BlockHash(0)));
        }
    }
}
