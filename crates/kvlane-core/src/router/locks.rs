//! Counts the acquisitions of a thread's locks.

use std::cell::Cell;

/// Of the scheduler's mutex, and of the locks of the indexes.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Scheduler,
    Shared,
    Exclusive,
}

thread_local! {
    static COUNTS: Cell<[u32; 3]> = const { Cell::new([0; 3]) };
}

pub(super) fn note(kind: Kind) {
    let mut counts = COUNTS.get();
    counts[kind as usize] += 1;
    COUNTS.set(counts);
}

/// Those of `work`: scheduler, shared, exclusive.
pub(super) fn during(work: impl FnOnce()) -> [u32; 3] {
    COUNTS.set([0; 3]);
    work();
    COUNTS.get()
}
