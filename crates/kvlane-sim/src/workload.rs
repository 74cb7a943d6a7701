//! A trace as the world plays it: start times of conversations, and the blocks of each prompt.
//!
//! A conversation begins at the trace's time (open loop) or when a client is free (closed loop); dependencies within
//! it come from [`kvlane_trace::plan`].

use kvlane_core::block::BlockHash;
use kvlane_core::request::AdapterKey;
use kvlane_trace::trace::{Trace, TraceRequest};

use crate::engine::own_block;

/// When conversations begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Drive {
    /// At the trace's times, regardless of requests in flight. `load` is a factor on the rate at which conversations
    /// begin; the pace within a conversation does not change.
    Open {
        /// 2 starts them twice as fast.
        load: f64,
    },
    /// A number of clients, each of which begins its next conversation when the previous one ends. The trace's times
    /// are ignored.
    Closed {
        /// Number of clients.
        clients: u32,
    },
}

/// Seed of the text that a request introduces, its answer included, as a request with this adapter has it.
pub fn text_seed(request: u32, adapter: Option<u32>) -> u64 {
    u64::from(request) | adapter.map_or(0, |adapter| (u64::from(adapter) + 1) << 32)
}

/// The key of a trace's adapter.
pub fn adapter_key(adapter: u32) -> AdapterKey {
    AdapterKey::named(format!("adapter-{adapter}").as_bytes())
}

/// The hashes of the full blocks, of `block_tokens` each, of a request's prompt. An engine's block is shared if the
/// trace's block in which it ends is shared.
pub fn prompt_blocks(trace: &Trace, request: u32, block_tokens: u32) -> Vec<BlockHash> {
    let TraceRequest { input_tokens, adapter, .. } = trace.requests[request as usize];
    let full = input_tokens / block_tokens;
    let mut blocks = vec![BlockHash(0); full as usize];
    let (ours, theirs) = (u64::from(block_tokens), u64::from(trace.block_tokens));
    for (owner, from, to) in trace.runs(request) {
        // The request that introduced a block's last token determines the block.
        let first = u64::from(from) * theirs / ours;
        let end = (u64::from(to) * theirs / ours).min(u64::from(full));
        let seed = text_seed(owner, adapter);
        for index in first..end {
            blocks[index as usize] = own_block(seed, index as u32);
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::Builder;
    use proptest::prelude::*;

    use super::*;

    fn request(input_tokens: u32) -> TraceRequest {
        TraceRequest { input_tokens, output_tokens: 1, ..TraceRequest::default() }
    }

    proptest! {
        /// For any two block sizes, prompts share exactly the engine blocks that lie entirely within their shared
        /// blocks of the trace.
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
