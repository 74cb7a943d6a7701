//! Cache of encodings by text content.
//!
//! Bounded in bytes. When full, evicts entries that were not used since the clock hand last passed them (CLOCK, Corbató
//! 1968).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::tokenizer::Stats;

/// Shards with a lock each.
const SHARDS: usize = 16;

/// Memory of an entry without its ids: slot, map key with its share of empty slots, counts of the `Arc`.
const ENTRY_BYTES: usize = 112;

/// Largest entry, as the inverse of its share of a shard.
const ENTRY_SHARE: usize = 4;

/// Key of a text's content and of everything else that its ids depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u128);

/// Encodings by content, shared by all threads.
pub(super) struct Cache {
    shards: Vec<Mutex<Shard>>,
    shard_bytes_max: usize,
    hits: AtomicU64,
    misses: AtomicU64,
    tokens_reused: AtomicU64,
    tokens_encoded: AtomicU64,
}

#[derive(Default)]
struct Shard {
    places: HashMap<u128, u32, foldhash::fast::FixedState>,
    slots: Vec<Slot>,
    hand: usize,
    bytes: usize,
}

struct Slot {
    key: u128,
    ids: Arc<[u32]>,
    used: bool,
}

// === impl Key ===

impl Key {
    pub(super) fn of(text: &str, kind: u64) -> Key {
        Key(xxh3_128_with_seed(text.as_bytes(), kind))
    }
}

// === impl Cache ===

impl Cache {
    pub(super) fn new(bytes_max: usize) -> Cache {
        Cache {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            shard_bytes_max: bytes_max / SHARDS,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            tokens_reused: AtomicU64::new(0),
            tokens_encoded: AtomicU64::new(0),
        }
    }

    /// The ids of the text with this key.
    pub(super) fn get(&self, key: Key) -> Option<Arc<[u32]>> {
        let mut shard = self.shard(key);
        let place = shard.places.get(&key.0).copied();
        let ids = place.and_then(|place| shard.slots.get_mut(place as usize)).map(|slot| {
            slot.used = true;
            Arc::clone(&slot.ids)
        });
        drop(shard);
        match &ids {
            Some(ids) => {
                self.hits.fetch_add(1, Ordering::Relaxed);
                self.tokens_reused.fetch_add(ids.len() as u64, Ordering::Relaxed);
            }
            None => {
                self.misses.fetch_add(1, Ordering::Relaxed);
            }
        }
        ids
    }

    /// Adds the ids of a text, unless they are too large for a shard.
    pub(super) fn put(&self, key: Key, ids: &[u32]) {
        let bytes = size_of_val(ids) + ENTRY_BYTES;
        if bytes > self.shard_bytes_max / ENTRY_SHARE {
            return;
        }
        let ids: Arc<[u32]> = ids.into();
        let mut shard = self.shard(key);
        if shard.places.contains_key(&key.0) {
            return;
        }
        while shard.bytes + bytes > self.shard_bytes_max {
            shard.evict_one();
        }
        let place = shard.slots.len() as u32;
        shard.places.insert(key.0, place);
        shard.slots.push(Slot { key: key.0, ids, used: false });
        shard.bytes += bytes;
    }

    /// Resets contents and counters.
    pub(super) fn reset(&mut self) {
        *self = Cache::new(self.shard_bytes_max * SHARDS);
    }

    /// Counts encoded tokens.
    pub(super) fn count_encoded(&self, tokens: usize) {
        self.tokens_encoded.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> Stats {
        let mut stats = Stats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            tokens_reused: self.tokens_reused.load(Ordering::Relaxed),
            tokens_encoded: self.tokens_encoded.load(Ordering::Relaxed),
            ..Stats::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            stats.cache_bytes += shard.bytes as u64;
            stats.cache_entries += shard.slots.len() as u64;
        }
        stats
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        // The map uses the other bits of the key.
        lock(&self.shards[(key.0 >> 64) as usize % SHARDS])
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // No statement that modifies a shard can panic half-way, so a poisoned shard is consistent.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Shard ===

impl Shard {
    /// Evicts the next entry that was not used since the hand passed it.
    fn evict_one(&mut self) {
        debug_assert!(!self.slots.is_empty());
        loop {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let slot = &mut self.slots[self.hand];
            if slot.used {
                slot.used = false;
                self.hand += 1;
                continue;
            }
            let gone = self.slots.swap_remove(self.hand);
            self.places.remove(&gone.key);
            if let Some(moved) = self.slots.get(self.hand) {
                self.places.insert(moved.key, self.hand as u32);
            }
            self.bytes -= size_of_val(&*gone.ids) + ENTRY_BYTES;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Invariant: The encoding cache stays within its memory limit, and a chat template within its bounds.
    ///
    /// Also held by `a_template_that_never_ends_or_prints_without_end_is_stopped`.
    #[test]
    fn it_stays_within_its_bytes_and_never_returns_another_texts_ids() {
        let cache = Cache::new(SHARDS * 4096);
        for round in 0..2000_u32 {
            let text = format!("text {}", round * 7 % 500);
            let id = round * 7 % 500;
            let key = Key::of(&text, 0);
            match cache.get(key) {
                Some(ids) => assert_eq!(&ids[..], &vec![id; id as usize % 60][..]),
                None => cache.put(key, &vec![id; id as usize % 60]),
            }
            assert!(cache.stats().cache_bytes <= (SHARDS * 4096) as u64);
        }
        let stats = cache.stats();
        assert!(stats.cache_entries > 100, "{stats:?}");
        assert!(stats.hits > 0 && stats.misses > 500, "{stats:?}");
    }

    #[test]
    fn what_is_asked_for_stays_while_the_rest_goes() {
        let cache = Cache::new(SHARDS * 2048);
        let dear = Key::of("dear", 0);
        cache.put(dear, &[1, 2, 3]);
        for round in 0..5000 {
            assert!(cache.get(dear).is_some(), "evicted in round {round}");
            cache.put(Key::of(&round.to_string(), 0), &[round; 8]);
        }
    }

    #[test]
    fn an_entry_that_would_push_out_much_is_not_kept() {
        let cache = Cache::new(SHARDS * 4096);
        cache.put(Key::of("long", 0), &[0; 1024]);
        assert_eq!(cache.get(Key::of("long", 0)), None);
    }

    #[test]
    fn a_text_at_the_start_and_one_elsewhere_are_two() {
        assert_ne!(Key::of("a", 0), Key::of("a", 1));
    }
}
