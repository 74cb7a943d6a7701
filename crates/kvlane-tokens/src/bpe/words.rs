//! Words encoded without merging: single-token words, and recently encoded words.

use hashbrown::HashMap;

/// Longest word in the table of short words: its bytes and its length fill 16 bytes.
const SHORT_MAX: usize = 15;
/// Longest word in the cache.
const CACHED_MAX: usize = 31;
/// Most tokens per cached word, so that an entry is one cache line.
const CACHED_TOKENS_MAX: usize = 7;
/// Entries of the cache: 64 bytes each, 256 KB in total, which fits into the L2 cache.
const CACHED_WORDS: usize = 4096;

/// The words that are a single token.
#[derive(Debug)]
pub(super) struct Words {
    /// Short words, open-addressed with linear probing, at most half full.
    slots: Vec<Slot>,
    shift: u32,
    long: HashMap<Box<[u8]>, u32, foldhash::fast::FixedState>,
    long_max: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Zero if the slot is free: a word's key contains its length.
    key: u128,
    id: u32,
}

/// Direct-mapped cache of words with several tokens; a later word replaces an earlier one with the same hash slot.
#[derive(Debug)]
pub(super) struct Cache {
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Entry {
    key: [u128; 2],
    ids: [u32; CACHED_TOKENS_MAX],
    tokens: u32,
}

// === impl Words ===

impl Words {
    pub(super) fn new<'a>(words: impl Iterator<Item = (&'a [u8], u32)>) -> Words {
        let (short, long): (Vec<_>, Vec<_>) = words.partition(|(word, _)| word.len() <= SHORT_MAX);
        let size = (short.len() * 2).next_power_of_two().max(16);
        let mut table = Words {
            slots: vec![Slot::default(); size],
            shift: 64 - size.trailing_zeros(),
            long_max: long.iter().map(|(word, _)| word.len()).max().unwrap_or(0),
            long: long.into_iter().map(|(word, id)| (word.into(), id)).collect(),
        };
        for (word, id) in short {
            let key = load(word, 0, word.len());
            let mut slot = (hash(key) >> table.shift) as usize;
            while table.slots[slot].key != 0 && table.slots[slot].key != key {
                slot = (slot + 1) & (size - 1);
            }
            table.slots[slot] = Slot { key, id };
        }
        table
    }

    /// The token of the word `text[from..to]`, if it is a single one.
    #[inline(always)]
    pub(super) fn find(&self, text: &[u8], from: usize, to: usize) -> Option<u32> {
        if to - from > SHORT_MAX {
            return self.find_long(&text[from..to]);
        }
        let key = load(text, from, to - from);
        let mask = self.slots.len() - 1;
        let mut at = (hash(key) >> self.shift) as usize;
        loop {
            let slot = &self.slots[at & mask];
            if slot.key == key {
                return Some(slot.id);
            }
            if slot.key == 0 {
                return None;
            }
            at += 1;
        }
    }

    #[inline(never)]
    fn find_long(&self, word: &[u8]) -> Option<u32> {
        if word.len() > self.long_max { None } else { self.long.get(word).copied() }
    }
}

// === impl Cache ===

impl Cache {
    pub(super) fn new() -> Cache {
        let free = Entry { key: [0; 2], ids: [0; CACHED_TOKENS_MAX], tokens: 0 };
        Cache { entries: vec![free; CACHED_WORDS] }
    }

    /// Appends the tokens of the word `text[from..to]`; calls `encode` if the word is not cached.
    #[inline(always)]
    pub(super) fn encode(
        &mut self,
        text: &[u8],
        (from, to): (usize, usize),
        out: &mut Vec<u32>,
        encode: impl FnOnce(&mut Vec<u32>),
    ) {
        let bytes = to - from;
        if bytes > CACHED_MAX {
            return encode(out);
        }
        // The last byte holds the length, so that a word differs from the same word with trailing zeros.
        let key = match bytes {
            0..=SHORT_MAX => [load(text, from, bytes), 0],
            16 => [load_16(text, from), 16 << 120],
            _ => [load_16(text, from), load(text, from + 16, bytes - 16)],
        };
        let entry = &mut self.entries[(hash(key[0]) ^ hash(key[1]).rotate_left(29)) as usize % CACHED_WORDS];
        if entry.key == key {
            out.extend_from_slice(&entry.ids[..entry.tokens as usize]);
            return;
        }
        let start = out.len();
        encode(out);
        let tokens = &out[start..];
        if tokens.len() <= CACHED_TOKENS_MAX {
            entry.key = key;
            entry.ids[..tokens.len()].copy_from_slice(tokens);
            entry.tokens = tokens.len() as u32;
        }
    }
}

/// `bytes` (up to 15) bytes of `text` from `from` on, with their number in the last byte.
#[inline(always)]
fn load(text: &[u8], from: usize, bytes: usize) -> u128 {
    let all = match text[from..].first_chunk() {
        Some(&all) => u128::from_le_bytes(all),
        None => {
            let mut all = [0; 16];
            all[..bytes].copy_from_slice(&text[from..from + bytes]);
            u128::from_le_bytes(all)
        }
    };
    (all & ((1 << (8 * bytes)) - 1)) | (bytes as u128) << 120
}

#[inline(always)]
fn load_16(text: &[u8], from: usize) -> u128 {
    let mut all = [0; 16];
    all.copy_from_slice(&text[from..from + 16]);
    u128::from_le_bytes(all)
}

/// Folded product of both halves: every byte affects the high and the low bits. The constants are digits of pi.
#[inline(always)]
fn hash(key: u128) -> u64 {
    let (low, high) = (key as u64, (key >> 64) as u64);
    let product = u128::from(low ^ 0x243f_6a88_85a3_08d3) * u128::from(high ^ 0x1319_8a2e_0370_7344);
    product as u64 ^ (product >> 64) as u64
}
