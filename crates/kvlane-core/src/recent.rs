//! A bounded map that forgets the least recently used entries.
//!
//! It has two generations: a used entry moves into the young one, and when that is full the old generation is dropped
//! and the young one becomes old. So it holds between half of its bound and all of it, and never forgets one of the
//! `max / 2` most recently used entries. A lookup takes one or two hash lookups and maintains no list.

use std::hash::Hash;
use std::mem;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

/// At most `max` values by key.
pub struct Recent<K, V> {
    young: HashMap<K, V, FixedState>,
    old: HashMap<K, V, FixedState>,
    young_max: usize,
}

// === impl Recent ===

impl<K: Hash + Eq, V> Recent<K, V> {
    /// An empty map with room for `max` values, at least two.
    pub fn new(max: usize) -> Self {
        Self { young: HashMap::default(), old: HashMap::default(), young_max: (max / 2).max(1) }
    }

    /// The value of a key; marks it as used.
    pub fn get(&mut self, key: &K) -> Option<&mut V> {
        if let Some((key, value)) = self.old.remove_entry(key) {
            self.insert(key, value);
        }
        self.young.get_mut(key)
    }

    /// The value of a key, inserted as `first` if absent; marks it as used.
    pub fn get_or_insert(&mut self, key: K, first: impl FnOnce() -> V) -> &mut V {
        let value = self.old.remove(&key);
        if self.young.len() >= self.young_max && !self.young.contains_key(&key) {
            self.old = mem::take(&mut self.young);
        }
        self.young.entry(key).or_insert_with(|| value.unwrap_or_else(first))
    }

    /// All entries, in no particular order, without marking them as used.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.young.iter().chain(&self.old)
    }

    /// All values, in no particular order, without marking them as used.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.young.values_mut().chain(self.old.values_mut())
    }

    /// Sets the value of a key.
    pub fn insert(&mut self, key: K, value: V) {
        self.old.remove(&key);
        if self.young.len() >= self.young_max && !self.young.contains_key(&key) {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_holds_and_the_last_half_is_there() {
        let mut recent = Recent::new(8);
        for key in 0..100u32 {
            recent.insert(key, key);
            assert!(recent.young.len() + recent.old.len() <= 8);
            for last in key.saturating_sub(3)..=key {
                assert!(
                    recent.young.contains_key(&last) || recent.old.contains_key(&last),
                    "{last} at {key}"
                );
            }
        }
    }

    #[test]
    fn what_is_used_stays() {
        let mut recent = Recent::new(8);
        recent.insert(7, "kept");
        for key in 100..200 {
            recent.insert(key, "other");
            assert_eq!(recent.get(&7), Some(&mut "kept"));
        }
        assert_eq!(recent.get(&100), None);
    }
}
