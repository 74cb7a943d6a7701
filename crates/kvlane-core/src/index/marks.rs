//! Marks: which prompts the routers of other replicas have sent where, coarsely.
//!
//! A mark is the hash of every few blocks of a prompt. Hashes are chained, so a mark stands for all tokens before it: an
//! endpoint that was sent a prompt with this mark was sent everything up to it. Two prompts with a common prefix have
//! the marks of that prefix in common. So a set of pairs of mark and endpoint says how much of a new prompt an endpoint
//! was sent, to within [`MARK_TOKENS`], in a sixteenth of a chain's bytes or less; and a set does not depend on the order
//! in which its members come, nor on repetitions.
//!
//! Memory is bounded by two generations: when the younger is full, or old, it becomes the older one, and what was in that
//! is forgotten. Marks that are used or sent again are in the younger one.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::Overlap;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::time::Nanos;

/// Prompt tokens between two marks. A prediction falls short by half of this on average.
pub const MARK_TOKENS: u32 = 128;

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
    old: Holders,
    young_bytes: usize,
    /// When the younger generation began.
    since: Nanos,
}

/// Blocks between two marks.
fn stride(block_tokens: u32) -> usize {
    (MARK_TOKENS / block_tokens.max(1)).max(1) as usize
}

/// The marks of a prompt.
pub fn marks_of(chain: &[BlockHash], block_tokens: u32) -> impl Iterator<Item = BlockHash> {
    let stride = stride(block_tokens);
    chain.iter().skip(stride - 1).step_by(stride).copied()
}

// === impl Marks ===

impl Marks {
    /// An empty set.
    pub fn new(config: Config) -> Self {
        let empty = || HashMap::with_hasher(FixedState::with_seed(0));
        Self { config, young: empty(), old: empty(), young_bytes: 0, since: Nanos::ZERO }
    }

    /// Records that `endpoint` was sent a prompt with this mark. Returns whether the younger generation did not know.
    pub fn insert(&mut self, now: Nanos, mark: BlockHash, endpoint: EndpointId) -> bool {
        self.turn_if_due(now);
        let holders = self.young.entry(mark).or_default();
        if holders.contains(&endpoint) {
            return false;
        }
        self.young_bytes += if holders.is_empty() { MARK_BYTES } else { HOLDER_BYTES };
        holders.push(endpoint);
        true
    }

    /// Raises the overlap of each endpoint to what it was sent of this prompt.
    pub fn raise(&self, chain: &[BlockHash], block_tokens: u32, overlap: &mut Overlap) {
        let stride = stride(block_tokens);
        let known = |mark: &BlockHash| self.young.contains_key(mark) || self.old.contains_key(mark);
        let found = chain.iter().skip(stride - 1).step_by(stride).take_while(|mark| known(mark)).count();
        // Whoever holds a mark holds those before it, so the last ones decide, and most holders are seen only once.
        let mut seen = 0;
        for n in (1..=found).rev() {
            let mark = &chain[n * stride - 1];
            let [young, old] =
                [&self.young, &self.old].map(|marks| marks.get(mark).map_or(&[][..], Vec::as_slice));
            if young.len().max(old.len()) <= seen {
                continue;
            }
            for &endpoint in young.iter().chain(old) {
                let blocks = (n * stride) as u32;
                if overlap.blocks(endpoint) < blocks {
                    overlap.set(endpoint, blocks);
                }
            }
            seen = young.len().max(old.len());
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
    const STRIDE: usize = 8;

    /// The chain of a prompt, whose blocks are one byte long.
    fn chain(prompt: &[u8]) -> Vec<BlockHash> {
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(prompt, 1, &mut chain);
        chain
    }

    fn endpoint(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    fn send(marks: &mut Marks, now: Nanos, prompt: &[u8], to: u16) -> usize {
        let chain = chain(prompt);
        marks_of(&chain, BLOCK_TOKENS).filter(|mark| marks.insert(now, *mark, endpoint(to))).count()
    }

    fn overlap(marks: &Marks, prompt: &[u8]) -> Vec<(EndpointId, u32)> {
        let mut overlap = Overlap::default();
        marks.raise(&chain(prompt), BLOCK_TOKENS, &mut overlap);
        let mut held: Vec<_> = overlap.iter().collect();
        held.sort();
        held
    }

    proptest! {
        /// Invariant: Marks predict no more than what an endpoint was sent, and fall short by less than [`MARK_TOKENS`];
        /// the order and repetition of what was sent does not matter.
        #[test]
        fn marks_predict_what_was_sent_to_within_a_stride(
            sent in prop::collection::vec((prop::collection::vec(0u8..2, 0..60), 0u16..3), 0..12),
            asked in prop::collection::vec(0u8..2, 0..60),
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
            let expected: Vec<_> = (0..3)
                .map(|slot| {
                    let most = sent.iter().filter(|(_, to)| *to == slot).map(|(prompt, _)| common(prompt)).max();
                    (endpoint(slot), (most.unwrap_or(0) / STRIDE * STRIDE) as u32)
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
        assert_eq!(send(&mut marks, Nanos::ZERO, &prompt, 0), 4);
        assert_eq!(send(&mut marks, Nanos::ZERO, &prompt, 0), 0, "known");
        send(&mut marks, Nanos::ZERO, &prompt, 1);
        marks.forget(endpoint(1));
        assert_eq!(overlap(&marks, &prompt), [(endpoint(0), 32)]);
        assert_eq!(send(&mut marks, CONFIG.age, &prompt[..8], 0), 1, "a new generation");
        assert_eq!(overlap(&marks, &prompt), [(endpoint(0), 32)]);
        send(&mut marks, CONFIG.age + CONFIG.age, &[2; 8], 0);
        assert_eq!(overlap(&marks, &prompt), [(endpoint(0), 8)]);
        assert_eq!(marks.iter().count(), 2);
    }

    #[test]
    fn memory_is_bounded() {
        let mut marks = Marks::new(Config { memory_bytes_max: 100 * MARK_BYTES, ..CONFIG });
        for n in 0..10_000 {
            marks.insert(Nanos::ZERO, BlockHash(n), endpoint(n as u16 % 7));
        }
        assert!((50..=100).contains(&marks.iter().count()), "{}", marks.iter().count());
        assert!(marks.iter().any(|(mark, _)| mark == BlockHash(9_999)));
    }
}
