//! Inference of conversations for traces without sessions.
//!
//! A later turn's prompt begins with the earlier turn's blocks. So a request continues the session of the latest
//! request whose last or second-to-last block it contains; the last one is often partial and changes once it is
//! filled. A prompt's first block does not identify a session: in the Mooncake traces it is the system prompt of all
//! requests. By this rule the Mooncake conversation trace has 8,028 sessions, and a third of its requests are later
//! turns.

use std::collections::HashMap;

use crate::trace::{Trace, block_id};

/// Finds the sessions of a trace from its blocks. A turn is sent after the previous one.
pub fn infer(trace: &mut Trace) {
    // The session of the last request that ended with a block.
    let mut tails: HashMap<u64, u32> = HashMap::new();
    // The last turn of each session.
    let mut turns: Vec<u32> = Vec::new();
    for index in 0..trace.requests.len() as u32 {
        // Its own blocks are the tail of no earlier request.
        let known = trace.runs(index).filter(|(owner, ..)| *owner != index).find_map(|(owner, from, to)| {
            (from.max(1)..to).rev().find_map(|position| tails.get(&block_id(owner, position)).copied())
        });
        let mut tail = [None; 2];
        let (mut next, mut left) = (0, trace.prompt_blocks(index).saturating_sub(1).min(2));
        'runs: for (owner, from, to) in trace.runs(index) {
            for position in (from..to).rev() {
                if left == 0 {
                    break 'runs;
                }
                tail[next] = Some(block_id(owner, position));
                (next, left) = (next + 1, left - 1);
            }
        }
        let session = known.unwrap_or(turns.len() as u32);
        tails.extend(tail.into_iter().flatten().map(|block| (block, session)));
        let request = &mut trace.requests[index as usize];
        request.session = session;
        match turns.get_mut(session as usize) {
            Some(turn) => request.after = Some(std::mem::replace(turn, index)),
            None => turns.push(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Builder, TraceRequest};

    fn check(prompts: &[&[u64]], sessions: &[u32]) -> Trace {
        let mut builder = Builder::new(512);
        for ids in prompts {
            builder.push(
                TraceRequest { input_tokens: (512 * ids.len() as u32).max(1), ..TraceRequest::default() },
                ids,
            );
        }
        let mut trace = builder.finish();
        infer(&mut trace);
        assert_eq!(trace.requests.iter().map(|request| request.session).collect::<Vec<_>>(), sessions);
        trace
    }

    #[test]
    fn a_prompt_that_begins_with_an_earlier_one_continues_its_session() {
        let prompts: [&[u64]; 6] = [
            &[0, 1, 2],
            &[0, 5, 6],
            &[0, 1, 2, 3],
            &[0, 5, 7, 8], // block 6 was partial and became 7
            &[0, 1, 2, 3, 9, 10],
            &[0, 11],
        ];
        let trace = check(&prompts, &[0, 1, 0, 1, 0, 2]);
        let after: Vec<_> = trace.requests.iter().map(|request| request.after).collect();
        assert_eq!(after, [None, None, Some(0), Some(1), Some(2), None]);
    }

    #[test]
    fn a_common_first_block_alone_joins_no_session() {
        check(&[&[0], &[0, 1], &[0], &[]], &[0, 1, 2, 3]);
    }

    #[test]
    fn the_same_prompt_again_is_another_turn() {
        check(&[&[0, 1], &[0, 1], &[0, 1, 2]], &[0, 0, 0]);
    }
}
