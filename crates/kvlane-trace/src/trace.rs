//! A trace in normal form: requests in order of arrival, their prompts as a tree.
//!
//! A prompt is not a list of block ids but a branch: it begins with a number of blocks of an earlier request, and the
//! rest is its own. A request then takes a few bytes whether its prompt has ten tokens or a million, so a trace of
//! millions of requests fits into memory, and two prompts share a prefix exactly where their branches coincide.
//! Readers pass ids to a [`Builder`], which finds the branches; [`Trace::blocks`] returns ids.

use std::collections::HashMap;

use kvlane_core::request::AnswerEnd;

/// One request of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TraceRequest {
    /// Arrival time in seconds from the start of the trace.
    pub arrival_s: f64,
    /// Prompt length in tokens, at least 1.
    pub input_tokens: u32,
    /// Answer length in tokens.
    pub output_tokens: u32,
    /// Its conversation. Sessions are numbered in the order of their first request.
    pub session: u32,
    /// The earlier request that has to be answered before this one is sent: the previous turn, or the request that
    /// started this sub-agent.
    pub after: Option<u32>,
    /// Seconds from the end of that answer until this request is sent. If absent, the request is sent at `arrival_s`,
    /// or when that answer ends if that is later.
    pub think_s: Option<f32>,
    /// How its answer ended, if the trace says.
    pub end: AnswerEnd,
    /// The earlier request whose prompt (or prompt and answer) this one begins with.
    pub base: Option<u32>,
    /// Number of leading blocks shared with `base`. They are `base`'s own at the end: otherwise `base` would be
    /// another request.
    pub shared_blocks: u32,
    /// Number of the adapter (LoRA) that it asks for. Requests with different ones share no blocks, whatever `base` says.
    pub adapter: Option<u32>,
}

/// Requests sorted by arrival.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// The requests, by arrival.
    pub requests: Vec<TraceRequest>,
    /// Changes made while reading the file, one sentence each.
    pub notes: Vec<String>,
}

/// The id of a block: the request that introduced it, and its position in that request's prompt and answer.
pub fn block_id(request: u32, position: u32) -> u64 {
    u64::from(request) << 32 | u64::from(position)
}

/// Builds a [`Trace`] from prompts that are lists of ids, or that share a prefix with an earlier one.
///
/// Equal ids mean equal prompts up to the end of that block.
#[derive(Debug, Default)]
pub struct Builder {
    trace: Trace,
    tree: Tree,
}

/// Maximum requests of a trace: their indices have 32 bits.
const REQUESTS_MAX: usize = u32::MAX as usize;

/// The ids of all prompts, each shared prefix once. A request holds the ids that no earlier request has, in one row
/// of four bytes each; branches are found by their position and first id.
#[derive(Debug, Default)]
struct Tree {
    /// Fingerprints of ids, row after row.
    ids: Chunks,
    /// Start of each request's row. It ends where the next one starts.
    rows: Vec<u64>,
    /// Requests by the request they branch off (none for the root), the position and the id there.
    branches: HashMap<(Option<u32>, u32, u64), u32>,
}

/// A vector that grows without being copied, so that it never needs memory for two copies.
#[derive(Debug, Default)]
struct Chunks {
    chunks: Vec<Vec<u32>>,
    len: u64,
}

/// Entries of a chunk.
const CHUNK: u64 = 1 << 20;

/// Prompts kept by [`Trace::select`]: for each request of the whole trace, the requests of the selection that have
/// its blocks up to a position, as a list of those that reached further than all before.
#[derive(Debug)]
struct Reach {
    /// The last entry of each request's list.
    last: Vec<u32>,
    entries: Vec<ReachEntry>,
}

#[derive(Debug)]
struct ReachEntry {
    to: u32,
    kept: u32,
    before: u32,
}

/// No entry.
const NONE: u32 = u32::MAX;

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

    /// Started blocks of a request's prompt; the last one is partial if the length is not a multiple of a block.
    pub fn prompt_blocks(&self, request: u32) -> u32 {
        self.requests[request as usize].input_tokens.div_ceil(self.block_tokens)
    }

    /// Full blocks of a request's prompt that an earlier prompt or answer has: the hits of an infinite cache. At
    /// least one token has to be computed, so the last one is never found.
    pub fn reusable_blocks(&self, request: u32) -> u32 {
        let TraceRequest { input_tokens, shared_blocks, .. } = self.requests[request as usize];
        shared_blocks.min(input_tokens.saturating_sub(1) / self.block_tokens)
    }

    /// The branch of a request as runs, last one first: `(owner, from, to)` are the blocks of the prompt at positions
    /// `from..to`, which `owner` introduced. `to` of the first run is [`Trace::prompt_blocks`].
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

    /// Replaces `out` by the ids of a request's prompt blocks. Equal ids of two requests mean equal prompts up to the
    /// end of that block.
    pub fn blocks(&self, request: u32, out: &mut Vec<u64>) {
        out.clear();
        out.resize(self.prompt_blocks(request) as usize, 0);
        for (owner, from, to) in self.runs(request) {
            for position in from..to {
                out[position as usize] = block_id(owner, position);
            }
        }
    }

    /// The trace of the requests at `order`, in that order, which must be one of arrival. Prompts keep their shared
    /// prefixes, unless one comes before the request whose answer it begins with. Sessions are renumbered. A request
    /// whose `after` is left out or comes later has no predecessor.
    pub fn select(&self, order: impl IntoIterator<Item = u32>) -> Self {
        let mut places = vec![NONE; self.requests.len()];
        let mut sessions: HashMap<u32, u32> = HashMap::new();
        let mut reach = Reach { last: vec![NONE; self.requests.len()], entries: Vec::new() };
        let mut requests = Vec::new();
        for index in order {
            let mut request = self.requests[index as usize];
            let place = requests.len() as u32;
            let known = |after: &u32| places[*after as usize] != NONE;
            request.after = request.after.filter(known).map(|after| places[after as usize]);
            request.think_s = request.think_s.filter(|_| request.after.is_some());
            let next = sessions.len() as u32;
            request.session = *sessions.entry(request.session).or_insert(next);
            (request.base, request.shared_blocks) = reach.keep(self, index, place);
            places[index as usize] = place;
            requests.push(request);
        }
        Self { block_tokens: self.block_tokens, requests, notes: self.notes.clone() }
    }
}

// === impl Reach ===

impl Reach {
    /// Adds a request of the whole trace as the one at `place` of the selection; returns the request of the selection
    /// whose prompt it begins with, and how many blocks of it.
    fn keep(&mut self, whole: &Trace, index: u32, place: u32) -> (Option<u32>, u32) {
        let mut found = (None, 0);
        for (owner, from, to) in whole.runs(index) {
            found = self
                .find(owner, to)
                .filter(|(_, shared)| *shared > from)
                .map_or(found, |(kept, shared)| (Some(kept), shared));
            self.extend(owner, to, place);
            if found.0.is_some() {
                break;
            }
        }
        // A kept request also introduces its answer, with which others may begin.
        self.extend(index, NONE, place);
        found
    }

    /// The request with most of the blocks of `owner` before `to`, and their number. In a tie, the first.
    fn find(&self, owner: u32, to: u32) -> Option<(u32, u32)> {
        let mut entry = self.entry(self.last[owner as usize])?;
        let shared = entry.to.min(to);
        while let Some(before) = self.entry(entry.before).filter(|before| before.to >= shared) {
            entry = before;
        }
        Some((entry.kept, shared))
    }

    fn extend(&mut self, owner: u32, to: u32, kept: u32) {
        let before = self.last[owner as usize];
        if self.entry(before).is_none_or(|entry| entry.to < to) {
            self.last[owner as usize] = self.entries.len() as u32;
            self.entries.push(ReachEntry { to, kept, before });
        }
    }

    fn entry(&self, index: u32) -> Option<&ReachEntry> {
        self.entries.get(index as usize)
    }
}

// === impl Builder ===

impl Builder {
    /// An empty trace with blocks of this many tokens, at least one.
    pub fn new(block_tokens: u32) -> Self {
        let trace = Trace { block_tokens: block_tokens.max(1), ..Trace::default() };
        Self { trace, tree: Tree::default() }
    }

    /// Requests so far.
    pub fn len(&self) -> usize {
        self.trace.requests.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.trace.requests.is_empty()
    }

    /// Tokens of a full block.
    pub fn block_tokens(&self) -> u32 {
        self.trace.block_tokens
    }

    /// The requests so far.
    pub fn requests(&self) -> &[TraceRequest] {
        &self.trace.requests
    }

    /// Adds a request whose prompt's started blocks have these ids. With fewer ids than blocks the rest belongs to
    /// this request alone; `base` and `shared_blocks` are computed, whatever their values in `request`. Returns its
    /// index; `None` beyond 2^32 requests.
    pub fn push(&mut self, request: TraceRequest, ids: &[u64]) -> Option<u32> {
        let index = self.next()?;
        let ids = &ids[..ids.len().min(request.input_tokens.div_ceil(self.trace.block_tokens) as usize)];
        let (base, shared_blocks) = self.tree.insert(index, ids);
        self.trace.requests.push(TraceRequest { base, shared_blocks, ..request });
        Some(index)
    }

    /// Adds a request whose prompt begins with `shared_blocks` blocks of the prompt and answer of its `base`, an
    /// earlier request, up to its own length; the rest is its own. Returns its index; `None` beyond 2^32 requests.
    pub fn branch(&mut self, request: TraceRequest) -> Option<u32> {
        let index = self.next()?;
        let blocks = request.input_tokens.div_ceil(self.trace.block_tokens);
        let shared_blocks = request.shared_blocks.min(blocks);
        let mut base = request.base.filter(|&base| base < index && shared_blocks > 0);
        while let Some(TraceRequest { base: before @ Some(_), shared_blocks: inherited, .. }) =
            base.map(|base| self.trace.requests[base as usize])
            && shared_blocks <= inherited
        {
            base = before;
        }
        let shared_blocks = if base.is_some() { shared_blocks } else { 0 };
        self.tree.rows.push(self.tree.ids.len);
        self.trace.requests.push(TraceRequest { base, shared_blocks, ..request });
        Some(index)
    }

    fn next(&self) -> Option<u32> {
        Some(self.len()).filter(|&len| len < REQUESTS_MAX).map(|len| len as u32)
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

// === impl Tree ===

impl Tree {
    /// Adds the next request; returns the request with which it shares a prefix, and the number of blocks.
    fn insert(&mut self, index: u32, ids: &[u64]) -> (Option<u32>, u32) {
        let (mut owner, mut shared) = (None, 0);
        // Where the row of `owner` continues, and where it ends.
        let (mut at, mut end) = (0, 0);
        while let Some(&id) = ids.get(shared as usize) {
            if at < end && self.ids.get(at) == fingerprint(id) {
                at += 1;
            } else if let Some(&branch) = self.branches.get(&(owner, shared, id)) {
                owner = Some(branch);
                at = self.rows[branch as usize] + 1;
                end = self.rows.get(branch as usize + 1).copied().unwrap_or(self.ids.len);
            } else {
                self.branches.insert((owner, shared, id), index);
                break;
            }
            shared += 1;
        }
        self.rows.push(self.ids.len);
        ids[shared as usize..].iter().for_each(|&id| self.ids.push(fingerprint(id)));
        (owner, shared)
    }
}

/// Four bytes of an id. Counted ids, and those of [`block_id`] at one position, differ in them; of others, one pair
/// in 2^32 does not.
fn fingerprint(id: u64) -> u32 {
    id as u32 ^ ((id >> 32) as u32).wrapping_mul(0x9E37_79B1)
}

// === impl Chunks ===

impl Chunks {
    fn get(&self, index: u64) -> u32 {
        self.chunks[(index / CHUNK) as usize][(index % CHUNK) as usize]
    }

    fn push(&mut self, value: u32) {
        match self.chunks.last_mut().filter(|chunk| (chunk.len() as u64) < CHUNK) {
            Some(chunk) => chunk.push(value),
            None => self.chunks.push(vec![value]),
        }
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
    fn a_prompt_begins_with_the_longest_prefix_of_any_earlier_prompt() {
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
    fn ids_that_count_nothing_are_as_good_as_others() {
        let trace = build(&[vec![u64::MAX, 1 << 60], vec![u64::MAX, 1 << 60, 7], vec![u64::MAX, 7]]);
        assert_eq!(trace.requests.iter().map(|r| r.shared_blocks).collect::<Vec<_>>(), [0, 2, 1]);
    }

    #[test]
    fn who_begins_like_an_earlier_one_has_the_one_that_brought_it_as_base() {
        let mut builder = Builder::new(1);
        builder.push(request(3), &[]);
        builder.branch(TraceRequest { base: Some(0), shared_blocks: 5, ..request(7) });
        builder.branch(TraceRequest { base: Some(1), shared_blocks: 5, ..request(9) });
        builder.branch(TraceRequest { base: Some(1), shared_blocks: 6, ..request(9) });
        builder.branch(TraceRequest { base: Some(3), shared_blocks: 20, ..request(2) });
        builder.branch(TraceRequest { base: Some(5), shared_blocks: 1, ..request(2) });
        let trace = builder.finish();
        let branches: Vec<_> = trace.requests.iter().map(|r| (r.base, r.shared_blocks)).collect();
        assert_eq!(branches, [(None, 0), (Some(0), 5), (Some(0), 5), (Some(1), 6), (Some(0), 2), (None, 0)]);
    }

    #[test]
    fn answers_that_prompts_begin_with_stay_shared_in_a_selection() {
        let mut builder = Builder::new(1);
        builder.push(request(2), &[]);
        builder.branch(TraceRequest { base: Some(0), shared_blocks: 2, ..request(2) });
        for input_tokens in [6, 8] {
            builder.branch(TraceRequest { base: Some(1), shared_blocks: 4, ..request(input_tokens) });
            builder.branch(TraceRequest { base: Some(0), shared_blocks: 3, ..request(input_tokens) });
        }
        let whole = builder.finish();
        let bases = |order: &[u32]| -> Vec<_> {
            whole.select(order.iter().copied()).requests.iter().map(|r| (r.base, r.shared_blocks)).collect()
        };
        assert_eq!(bases(&[1, 4]), [(None, 0), (Some(0), 4)]);
        assert_eq!(bases(&[2, 3, 4, 5]), [(None, 0), (Some(0), 2), (Some(0), 4), (Some(1), 3)]);
    }

    #[test]
    fn a_turn_after_a_dropped_request_does_not_wait_for_it() {
        let mut trace = build(&[vec![1], vec![1, 2], vec![1, 2, 3]]);
        trace.requests[1].after = Some(0);
        trace.requests[2] = TraceRequest { after: Some(1), think_s: Some(2.0), ..trace.requests[2] };
        let kept = trace.select([1, 2]);
        assert_eq!(kept.requests[0].after, None);
        assert_eq!((kept.requests[1].after, kept.requests[1].think_s), (Some(0), Some(2.0)));
        assert_eq!((kept.requests[1].base, kept.requests[1].shared_blocks), (Some(0), 2));
    }

    /// Chained ids, as traces have them: an id covers all blocks before it.
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
        fn a_selection_of_branches_shares_what_the_whole_shares(
            rows in prop::collection::vec((1u32..9, any::<prop::sample::Index>(), 0u32..12, any::<bool>()), 1..30),
        ) {
            let mut builder = Builder::new(1);
            for (index, (input_tokens, base, shared_blocks, _)) in rows.iter().enumerate() {
                let base = (index > 0).then(|| base.index(index) as u32);
                builder.branch(TraceRequest { base, shared_blocks: *shared_blocks, ..request(*input_tokens) });
            }
            let whole = builder.finish();
            let order: Vec<u32> = (0..rows.len() as u32).filter(|&i| rows[i as usize].3).collect();
            let kept = whole.select(order.iter().copied());
            let common = |trace: &Trace, a: u32, b: u32| {
                let (mut x, mut y) = (Vec::new(), Vec::new());
                trace.blocks(a, &mut x);
                trace.blocks(b, &mut y);
                x.iter().zip(&y).take_while(|(x, y)| x == y).count()
            };
            for (i, &x) in (0..).zip(&order) {
                for (j, &y) in (0..).zip(&order) {
                    prop_assert_eq!(common(&kept, i, j), common(&whole, x, y), "{} and {}", x, y);
                }
                let TraceRequest { base, shared_blocks, .. } = kept.requests[i as usize];
                prop_assert!(base.is_none_or(|base| base < i && shared_blocks > 0));
            }
        }

        /// Invariant: Prompts share in a trace's tree exactly what their ids share, in the whole trace and in any
        /// selection.
        ///
        /// Also held by `a_selection_of_branches_shares_what_the_whole_shares`,
        /// `answers_that_prompts_begin_with_stay_shared_in_a_selection`.
        #[test]
        fn prompts_share_in_the_tree_what_their_ids_share(prompts in prompts(), places in prop::collection::vec(0u32..40, 30)) {
            let whole = build(&prompts);
            let mut order: Vec<u32> = (0..prompts.len() as u32).filter(|&i| places[i as usize] < 25).collect();
            order.sort_by_key(|&i| places[i as usize]);
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
