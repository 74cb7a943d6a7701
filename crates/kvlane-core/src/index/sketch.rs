//! Sketch: which prompts a whole fleet was sent, in a few bits for each mark, for a front tier that chooses among fleets.
//!
//! A Bloom filter of [marks](super::marks). It never misses a mark that is in it. A prompt's marks are looked up from its beginning until
//! the first that is missing, so a false hit adds the stride of one mark to a match, and does not find a prompt that was never sent:
//! a rate of false hits as high as one in eighteen (6 bits a mark) adds less than eight tokens to a match on average. At such rates a
//! Bloom filter is smaller than a cuckoo filter, which pays three bits a mark for its buckets
//! (docs/decisions/0020-sketch-of-a-cell.md).
//!
//! Marks are forgotten by building the next sketch from the marks that are still known.

use super::marks;
use crate::block::BlockHash;

/// Most probes of a lookup.
const PROBES_MAX: u32 = 16;
/// Bits of a word.
const WORD_BITS: usize = u64::BITS as usize;

/// Size of a [`Sketch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bits for each mark.
    pub bits_per_mark: u32,
    /// Most bytes: with more marks than fit, each has fewer bits, and false hits are more.
    pub bytes_max: usize,
}

/// A set of marks that may contain others, too. See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sketch {
    words: Vec<u64>,
    probes: u32,
}

// === impl Sketch ===

impl Sketch {
    /// An empty sketch with room for this many marks. Further ones only make false hits more frequent.
    pub fn new(config: Config, marks: usize) -> Self {
        let Config { bits_per_mark, bytes_max } = config;
        let words_max = (bytes_max / size_of::<u64>()).max(1);
        let words = marks.saturating_mul(bits_per_mark as usize).div_ceil(WORD_BITS).clamp(1, words_max);
        let bits_per_mark = (words * WORD_BITS) as f64 / marks.max(1) as f64;
        // With this number half of the bits are set, which makes false hits rarest.
        let probes = (bits_per_mark * std::f64::consts::LN_2).round() as u32;
        Self { words: vec![0; words], probes: probes.clamp(1, PROBES_MAX) }
    }

    /// Adds a mark.
    pub fn insert(&mut self, mark: BlockHash) {
        for bit in self.bits(mark) {
            self.words[bit / WORD_BITS] |= 1 << (bit % WORD_BITS);
        }
    }

    /// Whether a mark was added; it may say so of one that was not.
    pub fn contains(&self, mark: BlockHash) -> bool {
        self.bits(mark).all(|bit| self.words[bit / WORD_BITS] & (1 << (bit % WORD_BITS)) != 0)
    }

    /// Leading blocks of a prompt up to the last of its marks such that all marks to there are in the sketch.
    pub fn blocks(&self, chain: &[BlockHash], block_tokens: u32) -> u32 {
        let known = marks::of(chain, block_tokens).take_while(|(_, mark)| self.contains(*mark));
        known.last().map_or(0, |(blocks, _)| blocks as u32)
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }

    /// The share of marks that were not added of which [`Sketch::contains`] is expected to be true.
    pub fn false_hit_share(&self) -> f64 {
        let set: u64 = self.words.iter().map(|word| u64::from(word.count_ones())).sum();
        let share = set as f64 / (self.words.len() * WORD_BITS) as f64;
        (0..self.probes).fold(1.0, |product, _| product * share)
    }

    /// The bits of a mark: an arithmetic series of two hashes, as good as independent ones (Kirsch and Mitzenmacher, 2006).
    fn bits(&self, BlockHash(mark): BlockHash) -> impl Iterator<Item = usize> + use<> {
        let bits = (self.words.len() * WORD_BITS) as u128;
        let first = mix(mark);
        let step = mix(first) | 1;
        let hashes = std::iter::successors(Some(first), move |hash| Some(hash.wrapping_add(step)));
        hashes.take(self.probes as usize).map(move |hash| ((u128::from(hash) * bits) >> 64) as usize)
    }
}

/// SplitMix64's finaliser.
fn mix(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::rng::Rng;

    const CONFIG: Config = Config { bits_per_mark: 6, bytes_max: 1 << 20 };
    const BLOCK_TOKENS: u32 = 16;

    fn sketch(
        config: Config,
        marks: impl IntoIterator<Item = BlockHash, IntoIter: ExactSizeIterator>,
    ) -> Sketch {
        let marks = marks.into_iter();
        let mut sketch = Sketch::new(config, marks.len());
        marks.for_each(|mark| sketch.insert(mark));
        sketch
    }

    /// Marks that differ from those of other seeds.
    fn draw(seed: u64, count: usize) -> Vec<BlockHash> {
        let mut rng = Rng::new(seed);
        (0..count).map(|_| BlockHash(rng.next_u64())).collect()
    }

    /// Leading blocks by a set that makes no mistakes.
    fn blocks(known: &BTreeSet<BlockHash>, chain: &[BlockHash]) -> u32 {
        let known = marks::of(chain, BLOCK_TOKENS).take_while(|(_, mark)| known.contains(mark));
        known.last().map_or(0, |(blocks, _)| blocks as u32)
    }

    proptest! {
        /// Invariant: A sketch finds at least as much of a prompt as the set of the marks that were put into it, whatever their order and
        /// number, and is no larger than its limit.
        #[test]
        fn a_sketch_misses_no_mark_that_is_in_it(
            prompts in prop::collection::vec((any::<u64>(), 0usize..200), 0..40),
            expected in 0usize..2000,
            bits_per_mark in 1u32..70,
            bytes_max in 0usize..4096,
        ) {
            let config = Config { bits_per_mark, bytes_max };
            let (mut sketch, mut backwards) = (Sketch::new(config, expected), Sketch::new(config, expected));
            let chains: Vec<Vec<BlockHash>> = prompts.iter().map(|&(seed, len)| draw(seed, len)).collect();
            let sent = || chains.iter().flat_map(|chain| marks::of(chain, BLOCK_TOKENS)).map(|(_, mark)| mark);
            sent().for_each(|mark| sketch.insert(mark));
            sent().collect::<Vec<_>>().into_iter().rev().for_each(|mark| backwards.insert(mark));
            prop_assert_eq!(&sketch, &backwards);
            let known: BTreeSet<BlockHash> = sent().collect();
            prop_assert!(known.iter().all(|mark| sketch.contains(*mark)));
            for chain in &chains {
                let longer = [&chain[..], &draw(1, 50)].concat();
                prop_assert!(sketch.blocks(&longer, BLOCK_TOKENS) >= blocks(&known, &longer));
            }
            prop_assert!(sketch.bytes() <= bytes_max.max(size_of::<u64>()));
        }
    }

    #[test]
    fn false_hits_are_as_frequent_as_the_formula_says() {
        let (known, others) = (draw(1, 20_000), draw(2, 100_000));
        for bits_per_mark in [2, 4, 6, 8, 10, 12] {
            let sketch = sketch(Config { bits_per_mark, ..CONFIG }, known.iter().copied());
            let found = others.iter().filter(|mark| sketch.contains(**mark)).count() as f64;
            let probes = (f64::from(bits_per_mark) * std::f64::consts::LN_2).round();
            let formula = (1.0 - (-probes / f64::from(bits_per_mark)).exp()).powf(probes);
            // Four standard deviations of what is counted, and 3 % for the approximation.
            let within = 4.0 * (formula * others.len() as f64).sqrt() + 0.03 * formula * others.len() as f64;
            assert!(
                (found - formula * others.len() as f64).abs() < within,
                "{bits_per_mark}: {found} {formula}"
            );
            assert!((sketch.false_hit_share() / formula - 1.0).abs() < 0.05, "{bits_per_mark}");
        }
    }

    #[test]
    fn a_false_hit_adds_a_stride_and_finds_no_prompt_that_was_never_sent() {
        let sent: Vec<Vec<BlockHash>> = (0..500).map(|seed| draw(seed, 200)).collect();
        let marks: Vec<BlockHash> =
            sent.iter().flat_map(|chain| marks::of(chain, BLOCK_TOKENS)).map(|(_, mark)| mark).collect();
        let sketch = sketch(CONFIG, marks);
        let exceeded = |chain: &[BlockHash], known: u32| {
            f64::from((sketch.blocks(chain, BLOCK_TOKENS) - known) * BLOCK_TOKENS)
        };
        let mean = |tokens: Vec<f64>| tokens.iter().sum::<f64>() / tokens.len() as f64;
        let strangers: Vec<_> = (0..2000).map(|n| exceeded(&draw(10_000 + n, 200), 0)).collect();
        assert!(mean(strangers) < 2.0, "a first mark is one block");
        let longer = |chain: &[BlockHash], seed: u64| [chain, &draw(20_000 + seed, 200)].concat();
        let followers = sent.iter().zip(0..).map(|(chain, seed)| exceeded(&longer(chain, seed), 200));
        let tokens = mean(followers.collect());
        assert!(tokens > 0.0 && tokens < 12.0, "{tokens}");
    }

    #[test]
    fn with_more_marks_than_fit_a_sketch_finds_them_all_and_more_besides() {
        let known = draw(1, 10_000);
        let small = sketch(Config { bytes_max: 2_500, ..CONFIG }, known.iter().copied());
        assert_eq!(small.bytes(), 2_496);
        assert!(known.iter().all(|mark| small.contains(*mark)));
        let found = draw(2, 10_000).iter().filter(|mark| small.contains(**mark)).count();
        assert!((3_500..4_500).contains(&found), "{found} with two bits a mark");
    }
}
