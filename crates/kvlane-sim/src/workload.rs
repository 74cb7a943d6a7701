//! A trace as the world plays it: when each request is sent, and which blocks its prompt has.
//!
//! Requests that wait for nobody are roots; all that hangs on a root is one conversation. A root is sent when the trace
//! says (open loop) or when a client is free (closed loop); what hangs on it always waits for the answer before it.

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

/// Who waits for whom in a trace.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The root of each request's conversation.
    pub root: Vec<u32>,
    /// For each root, the requests of its conversation; 0 for others.
    pub size: Vec<u32>,
    /// Requests that wait for nobody, in order of arrival.
    pub roots: Vec<u32>,
    first_child: Vec<u32>,
    next_sibling: Vec<u32>,
}

/// No request.
const NONE: u32 = u32::MAX;

// === impl Plan ===

impl Plan {
    /// The plan of a trace. A request that waits for one that is not before it waits for nobody.
    pub fn new(trace: &Trace) -> Self {
        let count = trace.requests.len();
        let mut plan = Self {
            root: (0..count as u32).collect(),
            size: vec![0; count],
            roots: Vec::new(),
            first_child: vec![NONE; count],
            next_sibling: vec![NONE; count],
        };
        let mut last_child = vec![NONE; count];
        for (index, request) in (0u32..).zip(&trace.requests) {
            match request.after.filter(|&after| after < index) {
                Some(after) => {
                    plan.root[index as usize] = plan.root[after as usize];
                    match last_child[after as usize] {
                        NONE => plan.first_child[after as usize] = index,
                        sibling => plan.next_sibling[sibling as usize] = index,
                    }
                    last_child[after as usize] = index;
                }
                None => plan.roots.push(index),
            }
            plan.size[plan.root[index as usize] as usize] += 1;
        }
        plan
    }

    /// The requests that wait for `request`, in order.
    pub fn children(&self, request: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |request: u32| (request != NONE).then_some(request);
        std::iter::successors(some(self.first_child[request as usize]), move |&child| {
            some(self.next_sibling[child as usize])
        })
    }
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

    #[test]
    fn a_conversation_hangs_on_its_root() {
        let mut builder = Builder::new(1);
        for after in [None, Some(0), None, Some(0), Some(1), Some(9)] {
            builder.push(TraceRequest { after, ..request(1) }, &[]).expect("room");
        }
        let plan = Plan::new(&builder.finish());
        assert_eq!(plan.root, [0, 0, 2, 0, 0, 5]);
        assert_eq!(plan.roots, [0, 2, 5]);
        assert_eq!(plan.children(0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((plan.size[0], plan.size[2]), (4, 1));
    }

    proptest! {
        /// Every request hangs on exactly one root, below the one it waits for.
        #[test]
        fn a_plan_divides_a_trace_into_its_conversations(
            waits in prop::collection::vec(prop::option::of(0u32..60), 0..50),
        ) {
            let mut builder = Builder::new(1);
            for &after in &waits {
                builder.push(TraceRequest { after, ..request(1) }, &[]).expect("room");
            }
            let trace = builder.finish();
            let plan = Plan::new(&trace);
            let count = trace.requests.len() as u32;
            let mut reached = vec![0; count as usize];
            for &root in &plan.roots {
                let (mut found, mut at) = (vec![root], 0);
                while let Some(&request) = found.get(at) {
                    prop_assert!(plan.children(request).is_sorted());
                    found.extend(plan.children(request));
                    at += 1;
                }
                prop_assert_eq!(plan.size[root as usize] as usize, found.len());
                for request in found {
                    reached[request as usize] += 1;
                    prop_assert_eq!(plan.root[request as usize], root);
                }
            }
            prop_assert!(reached.iter().all(|&times| times == 1));
            prop_assert!(plan.roots.is_sorted());
            prop_assert_eq!(plan.size.iter().sum::<u32>(), count);
            for (index, &after) in (0..).zip(&waits) {
                match after.filter(|&after| after < index) {
                    Some(after) => prop_assert!(plan.children(after).any(|child| child == index)),
                    None => prop_assert!(plan.roots.contains(&index)),
                }
            }
        }

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
