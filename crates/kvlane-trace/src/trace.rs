//! A trace in its normal form: requests in the order of their arrival, their prompts as a tree.
//!
//! A prompt is not a list of block ids but a branch: it begins with so many blocks of an earlier request, and the rest
//! is its own. A request then takes the same few bytes whether its prompt has ten tokens or a million, which is what
//! lets a trace of millions of requests be held in memory, and two prompts share a prefix exactly where their branches
//! run together. Readers give ids to a [`Builder`], which finds the branches; [`Trace::blocks`] gives ids back.

use std::collections::HashMap;

/// One request of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TraceRequest {
    /// Seconds from the start of the trace to when it was sent.
    pub arrival_s: f64,
    /// Prompt length in tokens, at least 1.
    pub input_tokens: u32,
    /// Answer length in tokens.
    pub output_tokens: u32,
    /// The conversation it is a turn of. Sessions are counted in the order of their first request.
    pub session: u32,
    /// The earlier request that has to be answered before this one is sent: the turn before, or the one that started
    /// this sub-agent.
    pub after: Option<u32>,
    /// Seconds from the end of that answer to when this request is sent. Where the trace does not tell, the request is
    /// sent at `arrival_s`, or when that answer ends if that is later.
    pub think_s: Option<f32>,
    /// The earlier request whose prompt (or prompt and answer) this one begins with.
    pub base: Option<u32>,
    /// Blocks of `base`, from its beginning, that this prompt begins with. They are of `base` itself at the end: were
    /// they not, `base` would be another.
    pub shared_blocks: u32,
}

/// Requests sorted by arrival.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// The requests, by arrival.
    pub requests: Vec<TraceRequest>,
    /// What was changed on the way from the file to here, one sentence each, for people.
    pub notes: Vec<String>,
}

/// The id of a block: which request brought it, and its place in that request's prompt and answer.
pub fn block_id(request: u32, position: u32) -> u64 {
    u64::from(request) << 32 | u64::from(position)
}

/// Makes a [`Trace`] out of prompts that are lists of ids. Equal ids mean equal prompts up to the end of that block.
#[derive(Debug)]
pub struct Builder {
    trace: Trace,
    owners: Owners,
    /// Requests the trace may have.
    requests_max: usize,
}

/// Which request brought a block, by the id that a trace gave it. Public traces count their blocks, so most ids are
/// indices of a table; others are looked up.
#[derive(Debug, Default)]
struct Owners {
    dense: Vec<u32>,
    sparse: HashMap<u64, u32>,
}

/// Nobody has brought this block.
const NOBODY: u32 = u32::MAX;

// === impl Trace ===

impl Trace {
    /// Seconds from the start of the trace to its last arrival.
    pub fn span_s(&self) -> f64 {
        self.requests.last().map_or(0.0, |request| request.arrival_s)
    }

    /// Prompt tokens of all requests.
    pub fn input_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.input_tokens)).sum()
    }

    /// Answer tokens of all requests.
    pub fn output_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.output_tokens)).sum()
    }

    /// Started blocks of a request's prompt; the last one is partial where the length is no multiple of a block.
    pub fn prompt_blocks(&self, request: u32) -> u32 {
        self.requests[request as usize].input_tokens.div_ceil(self.block_tokens)
    }

    /// Full blocks of a request's prompt that an earlier prompt or answer has: what a cache that never forgets
    /// would find. At least one token has to be computed, so the last one is never found.
    pub fn reusable_blocks(&self, request: u32) -> u32 {
        let TraceRequest { input_tokens, shared_blocks, .. } = self.requests[request as usize];
        shared_blocks.min(input_tokens.saturating_sub(1) / self.block_tokens)
    }

    /// The branch of a request as runs, last one first: `(owner, from, to)` are the blocks of the prompt at positions
    /// `from..to`, which `owner` brought. `to` of the first run is [`Trace::prompt_blocks`].
    pub fn runs(&self, request: u32) -> impl Iterator<Item = (u32, u32, u32)> + '_ {
        let mut next = Some((request, self.prompt_blocks(request)));
        std::iter::from_fn(move || {
            let (owner, to) = next?;
            let TraceRequest { base, shared_blocks, .. } = self.requests[owner as usize];
            let from = if base.is_some() { shared_blocks.min(to) } else { 0 };
            next = base.filter(|_| from > 0).map(|base| (base, from));
            Some((owner, from, to))
        })
        .filter(|(_, from, to)| from < to)
    }

    /// The ids of a request's prompt blocks, in place of what `out` held. Equal ids of two requests mean equal
    /// prompts up to the end of that block.
    pub fn blocks(&self, request: u32, out: &mut Vec<u64>) {
        out.clear();
        out.resize(self.prompt_blocks(request) as usize, 0);
        for (owner, from, to) in self.runs(request) {
            for position in from..to {
                out[position as usize] = block_id(owner, position);
            }
        }
    }

    /// The trace made of the requests at `order`, in that order, which must be one of arrival. Prompts share what they
    /// shared. A request whose `after` is left out waits for nobody.
    pub fn select(&self, order: impl IntoIterator<Item = u32>) -> Self {
        let mut builder = Builder::new(self.block_tokens);
        let mut places: HashMap<u32, u32> = HashMap::new();
        let mut ids = Vec::new();
        for index in order {
            let mut request = self.requests[index as usize];
            self.blocks(index, &mut ids);
            request.after = request.after.and_then(|after| places.get(&after).copied());
            request.think_s = request.think_s.filter(|_| request.after.is_some());
            places.insert(index, builder.trace.requests.len() as u32);
            builder.push(request, &ids);
        }
        let mut trace = builder.finish();
        trace.notes.clone_from(&self.notes);
        trace
    }
}

// === impl Builder ===

impl Builder {
    /// An empty trace with blocks of this many tokens, at least one.
    pub fn new(block_tokens: u32) -> Self {
        let trace = Trace { block_tokens: block_tokens.max(1), ..Trace::default() };
        Self { trace, owners: Owners::default(), requests_max: NOBODY as usize - 1 }
    }

    /// Requests so far.
    pub fn len(&self) -> usize {
        self.trace.requests.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.trace.requests.is_empty()
    }

    /// Adds a request whose prompt's started blocks have these ids. Fewer ids than blocks leave the rest to this
    /// request alone; `base` and `shared_blocks` are found here, whatever `request` says of them. Returns its index;
    /// `None` beyond four thousand million requests.
    pub fn push(&mut self, request: TraceRequest, ids: &[u64]) -> Option<u32> {
        if self.trace.requests.len() >= self.requests_max {
            return None;
        }
        let index = self.trace.requests.len() as u32;
        let ids = &ids[..ids.len().min(request.input_tokens.div_ceil(self.trace.block_tokens) as usize)];
        let (mut base, mut shared_blocks) = (None, 0);
        for &id in ids {
            let Some(owner) = self.owners.get(id) else { break };
            (base, shared_blocks) = (Some(owner), shared_blocks + 1);
        }
        for &id in &ids[shared_blocks as usize..] {
            self.owners.insert(id, index);
        }
        self.trace.requests.push(TraceRequest { base, shared_blocks, ..request });
        Some(index)
    }

    /// Adds a note.
    pub fn note(&mut self, note: String) {
        self.trace.notes.push(note);
    }

    /// The trace, in the order in which requests were pushed.
    pub fn finish(self) -> Trace {
        self.trace
    }
}

// === impl Owners ===

impl Owners {
    fn get(&self, id: u64) -> Option<u32> {
        match usize::try_from(id).ok().and_then(|id| self.dense.get(id)) {
            Some(&owner) if owner != NOBODY => Some(owner),
            _ => self.sparse.get(&id).copied(),
        }
    }

    /// The table grows by at most as much as it holds, so ids that are no counters do not fill memory.
    fn insert(&mut self, id: u64, owner: u32) {
        let index = usize::try_from(id).unwrap_or(usize::MAX);
        if index >= self.dense.len() && index < 2 * self.dense.len() + 4096 {
            self.dense.resize(index + 1, NOBODY);
        }
        match self.dense.get_mut(index) {
            Some(place) => *place = owner,
            None => _ = self.sparse.insert(id, owner),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(input_tokens: u32) -> TraceRequest {
        TraceRequest { input_tokens, output_tokens: 1, ..TraceRequest::default() }
    }

    /// Prompts of full blocks of one token.
    fn build(prompts: &[Vec<u64>]) -> Trace {
        let mut builder = Builder::new(1);
        for ids in prompts {
            builder.push(request(ids.len() as u32), ids).expect("room");
        }
        builder.finish()
    }

    #[test]
    fn a_prompt_begins_with_the_longest_prefix_anybody_has_had() {
        let trace = build(&[vec![1, 2, 3], vec![1, 2, 4], vec![1, 2, 4, 5], vec![9]]);
        let branch = |i: usize| (trace.requests[i].base, trace.requests[i].shared_blocks);
        assert_eq!([branch(0), branch(1)], [(None, 0), (Some(0), 2)]);
        assert_eq!([branch(2), branch(3)], [(Some(1), 3), (None, 0)]);
        assert_eq!(trace.runs(2).collect::<Vec<_>>(), [(2, 3, 4), (1, 2, 3), (0, 0, 2)]);
        let mut ids = Vec::new();
        trace.blocks(2, &mut ids);
        assert_eq!(ids, [block_id(0, 0), block_id(0, 1), block_id(1, 2), block_id(2, 3)]);
    }

    #[test]
    fn the_last_token_is_never_reused() {
        let trace = build(&[vec![1, 2], vec![1, 2], vec![1, 2, 3]]);
        assert_eq!([0, 1, 2].map(|i| trace.reusable_blocks(i)), [0, 1, 2]);
    }

    #[test]
    fn a_prompt_may_begin_with_an_answer() {
        let mut trace = build(&[vec![1, 2], vec![]]);
        trace.requests[1] = TraceRequest { base: Some(0), shared_blocks: 3, ..request(4) };
        let mut ids = Vec::new();
        trace.blocks(1, &mut ids);
        assert_eq!(ids, [block_id(0, 0), block_id(0, 1), block_id(0, 2), block_id(1, 3)]);
    }

    #[test]
    fn ids_that_count_nothing_cost_no_more_than_others() {
        let trace = build(&[vec![u64::MAX, 1 << 60], vec![u64::MAX, 1 << 60, 7], vec![7]]);
        assert_eq!(trace.requests.iter().map(|r| r.shared_blocks).collect::<Vec<_>>(), [0, 2, 1]);
    }

    #[test]
    fn who_waits_for_somebody_left_out_waits_for_nobody() {
        let mut trace = build(&[vec![1], vec![1, 2], vec![1, 2, 3]]);
        trace.requests[1].after = Some(0);
        trace.requests[2] = TraceRequest { after: Some(1), think_s: Some(2.0), ..trace.requests[2] };
        let kept = trace.select([1, 2]);
        assert_eq!(kept.requests[0].after, None);
        assert_eq!((kept.requests[1].after, kept.requests[1].think_s), (Some(0), Some(2.0)));
        assert_eq!((kept.requests[1].base, kept.requests[1].shared_blocks), (Some(0), 2));
    }

    /// Chained ids, as traces have them: an id tells of all before it.
    fn prompts() -> impl Strategy<Value = Vec<Vec<u64>>> {
        let chain = |ids: Vec<u64>| {
            let extend = |parent: &mut u64, id| {
                *parent = *parent * 3 + id + 1;
                Some(*parent)
            };
            ids.into_iter().scan(0, extend).collect()
        };
        prop::collection::vec(prop::collection::vec(0u64..2, 0..8).prop_map(chain), 0..30)
    }

    proptest! {
        #[test]
        fn prompts_share_in_the_tree_what_their_ids_share(prompts in prompts(), keep in prop::collection::vec(any::<bool>(), 30)) {
            let whole = build(&prompts);
            let order: Vec<u32> = (0..prompts.len() as u32).filter(|&i| keep[i as usize]).collect();
            let kept = whole.select(order.iter().copied());
            let common = |a: &[u64], b: &[u64]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
            let (mut a, mut b) = (Vec::new(), Vec::new());
            for (i, &x) in order.iter().enumerate() {
                kept.blocks(i as u32, &mut a);
                for (j, &y) in order.iter().enumerate() {
                    kept.blocks(j as u32, &mut b);
                    prop_assert_eq!(common(&a, &b), common(&prompts[x as usize], &prompts[y as usize]));
                }
                let longest = order[..i].iter().map(|&y| common(&prompts[x as usize], &prompts[y as usize])).max();
                prop_assert_eq!(kept.requests[i].shared_blocks as usize, longest.unwrap_or(0));
            }
        }
    }
}
