//! Memory of the requests of all clients, in bytes: their bodies, from the first piece that is read until the last
//! attempt has sent them, and unusually large heads.
//!
//! A request that exceeds it is rejected and does not wait: requests that each hold a part and wait for the others'
//! parts would wait forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// Bytes that a request may hold without being counted: every connection takes as much.
const FREE_BYTES: usize = 8 << 10;

/// The memory held, and its maximum.
pub struct Memory {
    held: AtomicUsize,
    most: AtomicUsize,
}

/// A request's share. Returned when dropped.
pub struct Held {
    memory: Arc<Memory>,
    bytes: usize,
}

// === impl Memory ===

impl Memory {
    /// Memory with this maximum.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { held: AtomicUsize::new(0), most: AtomicUsize::new(most) })
    }

    /// Changes the maximum; shares stay.
    pub fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// The bytes held.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// An empty share that can grow.
    pub fn share(self: &Arc<Self>) -> Held {
        Held { memory: Arc::clone(self), bytes: 0 }
    }
}

// === impl Held ===

impl Held {
    /// Grows the share, if there is room; returns whether there was.
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        if bytes <= self.bytes.max(FREE_BYTES) {
            return true;
        }
        let more = bytes - self.bytes;
        let before = self.memory.held.fetch_add(more, Ordering::Relaxed);
        let fits = before.saturating_add(more) <= self.memory.most.load(Ordering::Relaxed);
        if fits {
            self.bytes = bytes;
        } else {
            self.memory.held.fetch_sub(more, Ordering::Relaxed);
        }
        fits
    }

    /// Returns the share.
    pub fn release(&mut self) {
        if self.bytes > 0 {
            self.memory.held.fetch_sub(self.bytes, Ordering::Relaxed);
            self.bytes = 0;
        }
    }

    /// Bytes that keep the share for as long as any part of them is kept.
    pub fn with(self, bytes: Bytes) -> Bytes {
        struct Owner {
            bytes: Bytes,
            _held: Held,
        }
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.bytes
            }
        }
        if self.bytes == 0 { bytes } else { Bytes::from_owner(Owner { bytes, _held: self }) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_returned_with_the_last_part() {
        let memory = Memory::new(100_000);
        let (mut one, mut two) = (memory.share(), memory.share());
        assert!(one.grow_to(60_000) && !two.grow_to(60_000) && two.grow_to(40_000));
        assert!(!one.grow_to(60_001) && one.grow_to(10), "the share keeps its size");
        assert_eq!(memory.held(), 100_000);
        let bytes = one.with(Bytes::from(vec![7; 60_000]));
        let part = bytes.slice(5..6);
        drop((bytes, two));
        assert_eq!((memory.held(), &part[..]), (60_000, &[7][..]));
        drop(part);
        assert_eq!(memory.held(), 0);
    }

    #[test]
    fn small_shares_are_not_counted_and_the_maximum_may_shrink() {
        let memory = Memory::new(20_000);
        let (mut little, mut more) = (memory.share(), memory.share());
        assert!(little.grow_to(FREE_BYTES) && more.grow_to(20_000));
        assert_eq!(memory.held(), 20_000);
        memory.set_most(10_000);
        assert!(!more.grow_to(20_001) && little.grow_to(1), "existing shares stay");
        drop(more);
        assert!(!little.grow_to(10_001) && little.grow_to(10_000));
    }
}
