//! Marks: which prompts the routers of other replicas have sent where, coarsely.
//!
//! A mark is the hash of every few blocks of a prompt, of more of them at its beginning. Hashes are chained, so a mark stands for all tokens before it: an
//! endpoint that was sent a prompt with this mark was sent everything up to it. Two prompts with a common prefix have
//! the marks of that prefix in common. So a set of pairs of mark and endpoint says how much of a new prompt an endpoint
//! was sent, to within an eighth and [`MARK_TOKENS`], in an eighth of a long chain's bytes; and a set does not depend on
//! the order in which its members come, nor on repetitions.
//!
//! Memory is bounded by two generations: when the younger is full, or old, it becomes the older one, and what was in that
//! is forgotten. Marks that are used or sent again are in the younger one.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::Overlap;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::time::Nanos;

/// Prompt tokens between two marks, at most. A prediction falls short by half of this on average.
pub const MARK_TOKENS: usize = 128;
/// Between two marks are at most as many tokens as before them, divided by this: short prompts are many, and the tokens
/// of a prompt's beginning are in most of them.
const BEFORE: usize = 8;

/// Memory of one mark with one holder, the table's spare capacity included.
const MARK_BYTES: usize = 64;
/// Memory of a further holder.
const HOLDER_BYTES: usize = size_of::<EndpointId>() * 2;

type Holders = HashMap<BlockHash, Vec<EndpointId>, FixedState>;

/// Limits of [`Marks`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Memory limit in bytes.
    pub memory_bytes_max: usize,
    /// Marks are kept this long at least, and twice as long at most, unless memory runs out.
    pub age: Nanos,
}

/// Which endpoints were sent which marks. See the module documentation.
pub struct Marks {
    config: Config,
    young: Holders,
    /// What the younger one has not.
    old: Holders,
    young_bytes: usize,
    /// When the younger generation began.
    since: Nanos,
}

/// Where the marks of a prompt are, as numbers of blocks.
#[derive(Clone, Copy)]
struct Places {
    block_tokens: usize,
}

impl Places {
    fn new(block_tokens: u32) -> Self {
        Self { block_tokens: block_tokens.max(1) as usize }
    }

    /// Blocks from the last mark up to `blocks` to the next one: a power of two, so that later strides begin where earlier
    /// ones end.
    fn stride(self, blocks: usize) -> usize {
        let tokens = (blocks * self.block_tokens / BEFORE).min(MARK_TOKENS);
        (tokens / self.block_tokens).checked_ilog2().map_or(1, |log| 1 << log)
    }

    fn next(self, mark: usize) -> usize {
        mark + self.stride(mark)
    }

    /// The last mark up to `blocks`; 0 if there is none.
    fn at_most(self, blocks: usize) -> usize {
        blocks - blocks % self.stride(blocks)
    }
}

/// The marks of a prompt from its beginning, each with the number of blocks that it stands for.
pub fn of(chain: &[BlockHash], block_tokens: u32) -> impl Iterator<Item = (usize, BlockHash)> {
    let places = Places::new(block_tokens);
    let blocks = std::iter::successors(Some(places.next(0)), move |blocks| Some(places.next(*blocks)));
    blocks.take_while(|blocks| *blocks <= chain.len()).map(|blocks| (blocks, chain[blocks - 1]))
}

/// The last mark up to `from` of which `holds` is true, which is so of the first mark and of all up to the one that is sought.
fn last(places: Places, from: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut yes, mut no, mut back) = (1, places.next(from), 1);
    while places.next(yes) < no {
        // Near `from` at first, then further back in strides that double.
        let middle = (yes + no) / 2;
        let probe = places
            .at_most(middle.max(no.saturating_sub(back)))
            .max(places.next(yes))
            .min(places.at_most(no - 1));
        if holds(probe) {
            yes = probe
        } else {
            no = probe
        }
        back *= 2;
    }
    yes
}

// === impl Marks ===

impl Marks {
    /// An empty set.
    pub fn new(config: Config) -> Self {
        let empty = || HashMap::with_hasher(FixedState::with_seed(0));
        Self { config, young: empty(), old: empty(), young_bytes: 0, since: Nanos::ZERO }
    }

    /// Records that `endpoint` was sent a prompt, as far as its marks that the younger generation did not know are taken.
    pub fn insert_prompt(
        &mut self,
        now: Nanos,
        chain: &[BlockHash],
        block_tokens: u32,
        endpoint: EndpointId,
    ) -> impl Iterator<Item = BlockHash> {
        self.turn_if_due(now);
        let places = Places::new(block_tokens);
        let known = |blocks: usize| {
            self.young.get(&chain[blocks - 1]).is_some_and(|holders| holders.contains(&endpoint))
        };
        let known = match places.at_most(chain.len()) {
            0 => 0,
            from if known(1) => last(places, from, known),
            _ => 0,
        };
        let mark = move |blocks: usize| (blocks <= chain.len()).then_some(blocks);
        let new = std::iter::successors(mark(places.next(known)), move |blocks| mark(places.next(*blocks)));
        new.map(move |blocks| {
            self.insert_mark(chain[blocks - 1], endpoint);
            chain[blocks - 1]
        })
    }

    /// Records that `endpoint` was sent a prompt, or prompts, with these marks.
    pub fn insert(&mut self, now: Nanos, marks: &[BlockHash], endpoint: EndpointId) {
        self.turn_if_due(now);
        for mark in marks {
            self.insert_mark(*mark, endpoint);
        }
    }

    fn insert_mark(&mut self, mark: BlockHash, endpoint: EndpointId) {
        let holders = self.young.entry(mark).or_default();
        if holders.contains(&endpoint) {
            return;
        }
        self.young_bytes += if holders.is_empty() { MARK_BYTES } else { HOLDER_BYTES };
        holders.push(endpoint);
        if let Some(holders) = self.old.get_mut(&mark) {
            holders.retain(|holder| *holder != endpoint);
        }
    }

    /// Raises the overlap of each endpoint to what it was sent of this prompt.
    pub fn raise(&self, chain: &[BlockHash], block_tokens: u32, overlap: &mut Overlap) {
        let places = Places::new(block_tokens);
        let holders = |blocks: usize| {
            [&self.young, &self.old].map(|marks| marks.get(&chain[blocks - 1]).map_or(&[][..], Vec::as_slice))
        };
        let most = |blocks: usize| holders(blocks).iter().map(|holders| holders.len()).sum::<usize>();
        // An endpoint that was sent a mark was sent those before it, so that holders become fewer along the chain. From its
        // end, a few probes find each mark that has more of them than the one after it.
        let (mut seen, mut from) = (0, places.at_most(chain.len()));
        while from > 0 && most(1) > seen {
            from = last(places, from, |blocks| most(blocks) > seen);
            for &endpoint in holders(from).into_iter().flatten() {
                if overlap.blocks(endpoint) < from as u32 {
                    overlap.set(endpoint, from as u32);
                }
            }
            seen = most(from);
            from = places.at_most(from - 1);
        }
    }

    /// Forgets what `endpoint` was sent.
    pub fn forget(&mut self, endpoint: EndpointId) {
        for marks in [&mut self.young, &mut self.old] {
            marks.retain(|_, holders| {
                holders.retain(|holder| *holder != endpoint);
                !holders.is_empty()
            });
        }
        self.young_bytes =
            self.young.values().map(|holders| MARK_BYTES + (holders.len() - 1) * HOLDER_BYTES).sum();
    }

    /// All marks and their holders, for a router that begins.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, EndpointId)> {
        let all = self.old.iter().chain(&self.young);
        all.flat_map(|(mark, holders)| holders.iter().map(|holder| (*mark, *holder)))
    }

    fn turn_if_due(&mut self, now: Nanos) {
        if self.young_bytes * 2 >= self.config.memory_bytes_max || self.since + self.config.age <= now {
            self.old = std::mem::take(&mut self.young);
            (self.young_bytes, self.since) = (0, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::ChainSeed;

    const CONFIG: Config = Config { memory_bytes_max: 1 << 20, age: Nanos::from_secs(60) };

    const BLOCK_TOKENS: u32 = 16;

    /// The chain of a prompt, whose blocks are one byte long.
    fn chain(prompt: &[u8]) -> Vec<BlockHash> {
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(prompt, 1, &mut chain);
        chain
    }

    fn endpoint(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    /// The last mark by number of blocks.
    const MARKED: [u32; 200] = {
        let (mut marked, mut at) = ([0; 200], 0);
        while at < 200 {
            let stride = match at {
                0..16 => 1,
                16..32 => 2,
                32..64 => 4,
                _ => 8,
            };
            marked[at] = (at / stride * stride) as u32;
            at += 1;
        }
        marked
    };

    #[test]
    fn marks_are_where_both_directions_find_them() {
        for block_tokens in [1, 3, 16, 64, 128, 1000] {
            let places = Places::new(block_tokens);
            let mut at = 0;
            for _ in 0..500 {
                let next = places.next(at);
                for between in at..next {
                    assert_eq!(places.at_most(between), at, "blocks of {block_tokens} tokens");
                }
                let tokens = (next - at) * block_tokens as usize;
                assert!(next - at == 1 || tokens <= MARK_TOKENS.min(at * block_tokens as usize / BEFORE));
                at = next;
            }
        }
    }

    fn send(marks: &mut Marks, now: Nanos, prompt: &[u8], to: u16) -> usize {
        let chain = chain(prompt);
        marks.insert_prompt(now, &chain, BLOCK_TOKENS, endpoint(to)).count()
    }

    fn overlap(marks: &Marks, prompt: &[u8]) -> Vec<(EndpointId, u32)> {
        let mut overlap = Overlap::default();
        marks.raise(&chain(prompt), BLOCK_TOKENS, &mut overlap);
        let mut held: Vec<_> = overlap.iter().collect();
        held.sort();
        held
    }

    /// A prompt that begins as others do, and then differs.
    fn prompt() -> impl Strategy<Value = Vec<u8>> {
        (0usize..120, 0usize..80, 1u8..3)
            .prop_map(|(common, own, byte)| [vec![0; common], vec![byte; own]].concat())
    }

    proptest! {
        /// Invariant: Marks predict no more than what an endpoint was sent, and fall short by less than an eighth of it or a block, and
        /// than 128 tokens; the order and repetition of what was sent does not matter.
        #[test]
        fn marks_predict_what_was_sent_to_within_a_stride(
            sent in prop::collection::vec((prompt(), 0u16..6), 0..24),
            asked in prompt(),
            again in any::<bool>(),
        ) {
            let (mut marks, mut backwards) = (Marks::new(CONFIG), Marks::new(CONFIG));
            for (prompt, to) in &sent {
                send(&mut marks, Nanos::ZERO, prompt, *to);
            }
            for (prompt, to) in sent.iter().rev().chain(sent.iter().filter(|_| again)) {
                send(&mut backwards, Nanos::ZERO, prompt, *to);
            }
            prop_assert_eq!(overlap(&marks, &asked), overlap(&backwards, &asked));
            let common = |prompt: &[u8]| prompt.iter().zip(&asked).take_while(|(a, b)| a == b).count();
            let expected: Vec<_> = (0..6)
                .map(|slot| {
                    let most = sent.iter().filter(|(_, to)| *to == slot).map(|(prompt, _)| common(prompt)).max();
                    (endpoint(slot), MARKED[most.unwrap_or(0)])
                })
                .filter(|(_, blocks)| *blocks > 0)
                .collect();
            prop_assert_eq!(overlap(&marks, &asked), expected);
        }
    }

    #[test]
    fn marks_are_forgotten_with_their_endpoint_and_with_time_unless_sent_again() {
        let mut marks = Marks::new(CONFIG);
        let prompt = [1; 32];
        assert_eq!(send(&mut marks, Nanos::ZERO, &prompt, 0), 16 + 8);
        assert_eq!(send(&mut marks, Nanos::ZERO, &prompt, 0), 0, "known");
        send(&mut marks, Nanos::ZERO, &prompt, 1);
        marks.forget(endpoint(1));
        assert_eq!(overlap(&marks, &prompt), [(endpoint(0), 32)]);
        assert_eq!(send(&mut marks, CONFIG.age, &prompt[..8], 0), 8, "a new generation");
        assert_eq!(overlap(&marks, &prompt), [(endpoint(0), 32)]);
        send(&mut marks, CONFIG.age + CONFIG.age, &[2; 8], 0);
        assert_eq!(overlap(&marks, &prompt), [(endpoint(0), 8)]);
        assert_eq!(marks.iter().count(), 16);
    }

    #[test]
    fn memory_is_bounded() {
        let mut marks = Marks::new(Config { memory_bytes_max: 100 * MARK_BYTES, ..CONFIG });
        for n in 0..10_000 {
            marks.insert(Nanos::ZERO, &[BlockHash(n)], endpoint(n as u16 % 7));
        }
        assert!((50..=100).contains(&marks.iter().count()), "{}", marks.iter().count());
        assert!(marks.iter().any(|(mark, _)| mark == BlockHash(9_999)));
    }
}
