//! Merge rules: which two tokens are merged, and in which order.
//!
//! Of all neighbouring pairs that merge, the lowest rank is merged first, the leftmost first among equals.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bits of a token id in a packed pair: ids up to a million.
const ID_BITS: u32 = 20;
/// Bits of a merge's rank in a packed pair.
const RANK_BITS: u32 = 64 - 2 * ID_BITS;
/// Exclusive upper bound of token ids.
pub(super) const ID_MAX: u32 = (1 << ID_BITS) - 1;
/// Exclusive upper bound of ranks.
pub(super) const RANK_MAX: u32 = (1 << RANK_BITS) - 1;
/// The rank of a pair that does not merge.
const NONE: u32 = u32::MAX;
/// Longest word, in bytes, that is merged by scanning all pairs each time: its ranks fit into a few registers, and a
/// short array is fastest. Longer words use a queue.
const ROW_MAX: usize = 48;

/// All merges of a tokenizer.
#[derive(Debug)]
pub(super) struct Merges {
    /// Pairs packed as left id, right id, rank, open-addressed with linear probing, at most half full. With one word
    /// per pair, a hundred thousand merges fit into the L2 cache.
    slots: Vec<u64>,
    shift: u32,
    /// The token produced by each rank.
    made: Vec<u32>,
    /// The token of each byte.
    bytes: [u32; 256],
    /// The rank of every pair of bytes, at `left * 256 + right`.
    byte_ranks: Vec<u32>,
}

/// Working memory for one word at a time.
#[derive(Debug, Default)]
pub(super) struct Row {
    ids: Vec<u32>,
    ranks: Vec<u32>,
    before: Vec<u32>,
    after: Vec<u32>,
    queue: BinaryHeap<Reverse<u64>>,
    bits: Vec<u64>,
    made: Vec<u32>,
    /// Left, right and rank of the latest merge.
    last: (u32, u32, u32),
}

/// A token and the last merge that produces it; zeros for a single byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Made {
    pub token: u32,
    pub left: u32,
    pub right: u32,
    pub rank: u32,
}

/// Longest word, in bytes, whose working memory is kept for the next.
const KEPT_MAX: usize = 1 << 16;

// === impl Row ===

impl Row {
    /// A bit set of `len` zeros.
    pub(super) fn bits(&mut self, len: usize) -> &mut [u64] {
        self.bits.clear();
        self.bits.resize(len.div_ceil(64), 0);
        &mut self.bits
    }

    /// Frees the memory of a very long word.
    pub(super) fn shrink(&mut self) {
        if self.ids.capacity() > KEPT_MAX {
            *self = Row::default();
        }
    }
}

// === impl Merges ===

impl Merges {
    /// `pairs` are `(left, right, rank, made)` with ids below [`ID_MAX`] and ranks below [`RANK_MAX`]; of duplicate
    /// pairs the last is used.
    pub(super) fn new(bytes: [u32; 256], pairs: &[(u32, u32, u32, u32)]) -> Merges {
        let size = (pairs.len() * 2).next_power_of_two().max(16);
        let ranks = pairs.iter().map(|pair| pair.2 as usize + 1).max().unwrap_or(0);
        let mut merges = Merges {
            slots: vec![u64::MAX; size],
            shift: 64 - size.trailing_zeros(),
            made: vec![0; ranks],
            bytes,
            byte_ranks: vec![NONE; 1 << 16],
        };
        for &(left, right, rank, made) in pairs {
            debug_assert!(left < ID_MAX && right < ID_MAX && rank < RANK_MAX);
            let key = key(left, right);
            let mut slot = merges.slot(key);
            while merges.slots[slot] != u64::MAX && merges.slots[slot] >> RANK_BITS != key {
                slot = (slot + 1) & (size - 1);
            }
            merges.slots[slot] = key << RANK_BITS | u64::from(rank);
            merges.made[rank as usize] = made;
        }
        for left in 0..256 {
            for right in 0..256 {
                merges.byte_ranks[left << 8 | right] = merges.rank(bytes[left], bytes[right]);
            }
        }
        merges
    }

    /// The rank at which two tokens merge, or [`NONE`].
    #[inline]
    pub(super) fn rank(&self, left: u32, right: u32) -> u32 {
        let key = key(left, right);
        let mask = self.slots.len() - 1;
        let mut slot = self.slot(key);
        loop {
            let found = self.slots[slot & mask];
            if found >> RANK_BITS == key {
                return (found & u64::from(RANK_MAX)) as u32;
            }
            if found == u64::MAX {
                return NONE;
            }
            slot += 1;
        }
    }

    #[inline]
    fn slot(&self, key: u64) -> usize {
        // Fibonacci hashing: the high bits of a product with 2^64 / golden ratio.
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Appends the tokens of one word.
    pub(super) fn encode(&self, word: &[u8], row: &mut Row, out: &mut Vec<u32>) {
        row.ids.clear();
        row.ids.extend(word.iter().map(|&byte| self.bytes[byte as usize]));
        row.ranks.clear();
        row.ranks.extend(
            word.windows(2).map(|pair| self.byte_ranks[usize::from(pair[0]) << 8 | usize::from(pair[1])]),
        );
        row.ranks.push(NONE);
        if word.len() <= ROW_MAX { self.merge_row(row, out) } else { self.merge_queue(row, out) }
    }

    /// The token that `word` encodes as, if it is a single one, and its last merge.
    pub(super) fn made(&self, word: &[u8], row: &mut Row) -> Option<Made> {
        let mut ids = std::mem::take(&mut row.made);
        ids.clear();
        row.last = (0, 0, 0);
        self.encode(word, row, &mut ids);
        let made = match ids[..] {
            [token] => {
                let (left, right, rank) = row.last;
                Some(Made { token, left, right, rank })
            }
            _ => None,
        };
        row.made = ids;
        made
    }

    fn merge_row(&self, row: &mut Row, out: &mut Vec<u32>) {
        let (ids, ranks) = (&mut row.ids[..], &mut row.ranks[..]);
        let mut len = ids.len();
        while len > 1 {
            let lowest = ranks[..len].iter().fold(NONE, |lowest, &rank| lowest.min(rank));
            if lowest == NONE {
                break;
            }
            let at = ranks[..len].iter().position(|&rank| rank == lowest).unwrap_or(0);
            row.last = (ids[at], ids[at + 1], lowest);
            ids[at] = self.made[lowest as usize];
            ids.copy_within(at + 2..len, at + 1);
            ranks.copy_within(at + 1..len, at);
            len -= 1;
            if at + 1 < len {
                ranks[at] = self.rank(ids[at], ids[at + 1]);
            }
            if at > 0 {
                ranks[at - 1] = self.rank(ids[at - 1], ids[at]);
            }
        }
        out.extend_from_slice(&ids[..len]);
    }

    /// Like [`Merges::merge_row`], with the candidates in a queue and the tokens in a linked list, so that a word of n
    /// bytes takes O(n log n) steps.
    fn merge_queue(&self, row: &mut Row, out: &mut Vec<u32>) {
        let len = row.ids.len() as u32;
        row.before.clear();
        row.before.extend((0..len).map(|at| at.wrapping_sub(1)));
        row.after.clear();
        row.after.extend(1..=len);
        let mut queue = std::mem::take(&mut row.queue).into_vec();
        queue.extend(
            row.ranks
                .iter()
                .enumerate()
                .filter(|(_, rank)| **rank != NONE)
                .map(|(at, &rank)| Reverse(u64::from(rank) << 32 | at as u64)),
        );
        row.queue = queue.into();
        while let Some(Reverse(candidate)) = row.queue.pop() {
            let (rank, at) = ((candidate >> 32) as u32, candidate as u32 as usize);
            // An entry is stale if its pair has merged since.
            if row.ranks[at] != rank {
                continue;
            }
            let gone = row.after[at] as usize;
            let after = row.after[gone];
            row.last = (row.ids[at], row.ids[gone], rank);
            row.ids[at] = self.made[rank as usize];
            row.ranks[gone] = NONE;
            row.after[at] = after;
            row.ranks[at] = NONE;
            if after < len {
                row.before[after as usize] = at as u32;
                row.ranks[at] = self.rank(row.ids[at], row.ids[after as usize]);
                if row.ranks[at] != NONE {
                    row.queue.push(Reverse(u64::from(row.ranks[at]) << 32 | at as u64));
                }
            }
            let before = row.before[at];
            if before < len {
                let before = before as usize;
                row.ranks[before] = self.rank(row.ids[before], row.ids[at]);
                if row.ranks[before] != NONE {
                    row.queue.push(Reverse(u64::from(row.ranks[before]) << 32 | before as u64));
                }
            }
        }
        let mut at = 0;
        while at < len {
            out.push(row.ids[at as usize]);
            at = row.after[at as usize];
        }
    }
}

#[inline]
fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << ID_BITS | u64::from(right)
}
