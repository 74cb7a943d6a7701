//! Time since the last use of each block of a prompt, counted in other blocks.
//!
//! An LRU cache holds, at any capacity, the blocks used last. So list all blocks by their last use: a block is found
//! by every cache with at least as many places as the block's own position in the list, its *stack distance*, and one
//! pass over a trace gives the hits of all capacities (R. L. Mattson et al., *Evaluation techniques for storage
//! hierarchies*, IBM Systems Journal 9(2), 1970).
//!
//! A request uses its blocks all at once; among them the first of the prompt counts as used last, because an engine
//! evicts the tail of a prompt before its head. Then along any prompt blocks get older with depth, and neighbours
//! that the same request used last are one [`Piece`]: a list of a few pieces per request represents all its blocks.
//! The number of blocks more recent than a piece is a sum over later requests, in a Fenwick tree.

use kvlane_trace::trace::{Trace, TraceRequest};

/// Nothing follows.
const END: u32 = u32::MAX;

/// Blocks of a prompt that one request was the last to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Their depths: from this one,
    pub(super) from: u32,
    /// to this one, exclusively.
    pub(super) to: u32,
    /// The request that used them last.
    pub(super) last: u32,
    /// Blocks used more recently than the first of them. The next ones have one more each.
    pub(super) newer: u64,
}

/// The blocks of all prompts so far, by last use.
#[derive(Debug)]
pub(super) struct Recency<'a> {
    trace: &'a Trace,
    /// Blocks that each request leaves in a cache: see [`kept_blocks`].
    kept: Vec<u32>,
    /// For each request, the first segment of the blocks it brought.
    heads: Vec<u32>,
    segments: Vec<Segment>,
    /// First of the segments that are free.
    free: u32,
    /// Blocks by the request that used them last.
    blocks: Fenwick,
    /// The branch of the request at hand, leaf first: `(owner, from, to)`.
    path: Vec<(u32, u32, u32)>,
    pieces: Vec<Piece>,
}

/// Blocks that one request brought and one request used last, from where the segment before ends.
#[derive(Clone, Copy, Debug)]
struct Segment {
    end: u32,
    last: u32,
    next: u32,
}

/// Sums over a range, each of whose terms may change.
#[derive(Debug)]
struct Fenwick {
    sums: Vec<u64>,
    total: u64,
}

/// Blocks from its beginning that each request leaves in a cache: the full ones of its prompt; those of its answer,
/// too, if the trace knows answers' blocks, that is, if any prompt goes on with an answer; and all that a later prompt
/// has of it.
pub(super) fn kept_blocks(trace: &Trace) -> Vec<u32> {
    let of_answer = |request: &TraceRequest| {
        request.base.is_some_and(|base| request.shared_blocks > trace.prompt_blocks(base))
    };
    let answers = trace.requests.iter().any(of_answer);
    let full = |request: &TraceRequest| {
        let tokens = request.input_tokens.saturating_add(if answers { request.output_tokens } else { 0 });
        tokens / trace.block_tokens
    };
    let mut kept: Vec<u32> = trace.requests.iter().map(full).collect();
    for (place, request) in trace.requests.iter().enumerate().rev() {
        if let Some(base) = request.base {
            let shared = request.shared_blocks.min(kept[place]);
            kept[base as usize] = kept[base as usize].max(shared);
        }
    }
    kept
}

// === impl Recency ===

impl<'a> Recency<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        let count = trace.requests.len();
        Self {
            trace,
            kept: kept_blocks(trace),
            heads: vec![END; count],
            segments: Vec::new(),
            free: END,
            blocks: Fenwick { sums: vec![0; count + 1], total: 0 },
            path: Vec::new(),
            pieces: Vec::new(),
        }
    }

    /// Blocks that a request leaves in a cache.
    pub(super) fn kept(&self, request: u32) -> u32 {
        self.kept[request as usize]
    }

    /// The branch of the request used last: `(owner, from, to)`, leaf first.
    pub(super) fn path(&self) -> &[(u32, u32, u32)] {
        &self.path
    }

    /// Looks the blocks of a request up, in the order of their depth and as they were before it, then uses them.
    /// Requests come in their order. What is not returned is new.
    pub(super) fn access(&mut self, request: u32) -> &[Piece] {
        self.climb(request);
        self.pieces.clear();
        for place in (0..self.path.len()).rev() {
            let (owner, from, to) = self.path[place];
            self.take(owner, from, to, request);
        }
        for piece in &mut self.pieces {
            piece.newer = self.blocks.total - self.blocks.up_to(piece.last);
        }
        for piece in &self.pieces {
            self.blocks.take(piece.last, u64::from(piece.to - piece.from));
        }
        self.blocks.add(request, u64::from(self.kept[request as usize]));
        &self.pieces
    }

    /// Finds the branch.
    fn climb(&mut self, request: u32) {
        self.path.clear();
        let mut next = Some((request, self.kept[request as usize]));
        while let Some((owner, to)) = next {
            let TraceRequest { base, shared_blocks, .. } = self.trace.requests[owner as usize];
            let from = if base.is_some() { shared_blocks.min(to) } else { 0 };
            if from < to {
                self.path.push((owner, from, to));
            }
            next = base.filter(|_| from > 0).map(|base| (base, from));
        }
    }

    /// Takes the segments of `owner` that lie in `from..to` and puts one in their place. A segment across `to` stays
    /// and begins there.
    fn take(&mut self, owner: u32, from: u32, to: u32, request: u32) {
        let mut head = self.heads[owner as usize];
        let mut at = from;
        while head != END && at < to {
            let Segment { end, last, next } = self.segments[head as usize];
            let stop = end.min(to);
            match self.pieces.last_mut() {
                Some(piece) if piece.last == last => piece.to = stop,
                _ => self.pieces.push(Piece { from: at, to: stop, last, newer: 0 }),
            }
            at = stop;
            if end > to {
                break;
            }
            (self.segments[head as usize].next, self.free) = (self.free, head);
            head = next;
        }
        let segment = Segment { end: to, last: request, next: head };
        self.heads[owner as usize] = if self.free == END {
            self.segments.push(segment);
            self.segments.len() as u32 - 1
        } else {
            let place = self.free;
            self.free = self.segments[place as usize].next;
            self.segments[place as usize] = segment;
            place
        };
    }

    /// Blocks so far, each counted once, and those of them that only the request that brought them has used.
    pub(super) fn distinct(&self) -> (u64, u64) {
        let mut once = 0;
        for (owner, request) in self.trace.requests.iter().enumerate() {
            let mut from = if request.base.is_some() { request.shared_blocks } else { 0 };
            let mut place = self.heads[owner];
            while place != END {
                let Segment { end, last, next } = self.segments[place as usize];
                if last as usize == owner {
                    once += u64::from(end - from);
                }
                (from, place) = (end, next);
            }
        }
        (self.blocks.total, once)
    }
}

// === impl Fenwick ===

impl Fenwick {
    fn add(&mut self, place: u32, more: u64) {
        self.total += more;
        let mut at = place as usize + 1;
        while at < self.sums.len() {
            self.sums[at] += more;
            at += at & at.wrapping_neg();
        }
    }

    fn take(&mut self, place: u32, less: u64) {
        self.total -= less;
        let mut at = place as usize + 1;
        while at < self.sums.len() {
            self.sums[at] -= less;
            at += at & at.wrapping_neg();
        }
    }

    /// The sum up to a place, with it.
    fn up_to(&self, place: u32) -> u64 {
        let mut at = place as usize + 1;
        let mut sum = 0;
        while at > 0 {
            sum += self.sums[at];
            at &= at - 1;
        }
        sum
    }
}

#[cfg(test)]
pub(super) mod tests {
    use kvlane_trace::trace::Builder;
    use proptest::prelude::*;

    use super::*;

    /// Requests of a few lengths that branch off one another: from the head, the middle or into the answer.
    pub(in crate::trace_stats) fn traces() -> impl Strategy<Value = Trace> {
        let request = (0..40u32, 0..14u32, 1..40u32, 0..9u32, 0..4u32, 0..4u32);
        (1..4u32, prop::collection::vec(request, 0..40)).prop_map(|(block_tokens, rows)| {
            let mut builder = Builder::new(block_tokens);
            for (place, &(base, shared_blocks, input_tokens, output_tokens, session, gap)) in
                rows.iter().enumerate()
            {
                let arrival_s =
                    builder.requests().last().map_or(0.0, |before| before.arrival_s) + f64::from(gap);
                let mut request = TraceRequest {
                    arrival_s,
                    input_tokens,
                    output_tokens,
                    session,
                    ..TraceRequest::default()
                };
                if let Some(before) = (base as usize).checked_rem(place + 3).filter(|&before| before < place)
                {
                    let TraceRequest { input_tokens: prompt, output_tokens: answer, .. } =
                        builder.requests()[before];
                    request.base = Some(before as u32);
                    request.shared_blocks = shared_blocks.min((prompt + answer) / block_tokens);
                }
                builder.branch(request);
            }
            builder.finish()
        })
    }

    /// The ids of the blocks that a request leaves in a cache.
    pub(in crate::trace_stats) fn kept_ids(trace: &Trace, kept: u32, request: u32) -> Vec<(u32, u32)> {
        let (mut ids, mut next) = (vec![(0, 0); kept as usize], Some((request, kept)));
        while let Some((owner, to)) = next {
            let TraceRequest { base, shared_blocks, .. } = trace.requests[owner as usize];
            let from = if base.is_some() { shared_blocks.min(to) } else { 0 };
            (from..to).for_each(|depth| ids[depth as usize] = (owner, depth));
            next = base.filter(|_| from > 0).map(|base| (base, from));
        }
        ids
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn a_block_s_place_is_that_in_a_list_by_last_use(trace in traces()) {
            let mut recency = Recency::new(&trace);
            // Most recently used first, with the request that used it last.
            let mut list: Vec<((u32, u32), u32)> = Vec::new();
            let mut uses = std::collections::HashMap::new();
            for request in 0..trace.requests.len() as u32 {
                let ids = kept_ids(&trace, recency.kept(request), request);
                let expect: Vec<_> = ids.iter().map_while(|id| list.iter().position(|(of, _)| of == id)).collect();
                let mut depth = 0;
                for &Piece { from, to, last, newer } in recency.access(request) {
                    prop_assert_eq!(from, depth);
                    for at in from..to {
                        let place = expect[at as usize];
                        prop_assert_eq!(place as u64, newer + u64::from(at - from));
                        prop_assert_eq!(list[place].1, last);
                    }
                    depth = to;
                }
                prop_assert_eq!(depth as usize, expect.len());
                prop_assert!(depth >= trace.reusable_blocks(request));
                list.retain(|(of, _)| !ids.contains(of));
                list.splice(0..0, ids.iter().map(|&id| (id, request)));
                ids.into_iter().for_each(|id| *uses.entry(id).or_insert(0) += 1);
            }
            let once = uses.values().filter(|&&n| n == 1).count() as u64;
            prop_assert_eq!(recency.distinct(), (list.len() as u64, once));
        }
    }
}
