//! Progress of a scenario's jobs, in requests.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::points::Point;

/// How many requests have ended, and of how many. A job's requests are counted when it begins, because generating them
/// costs as much as a short run; those of the jobs that have not begun are estimated from those that have.
pub(super) struct Progress<'a> {
    tell: &'a (dyn Fn(usize, usize) + Sync),
    /// Sizes of all jobs, in conversations.
    all: usize,
    /// Sizes of the jobs that have begun.
    begun: AtomicUsize,
    /// Their requests.
    requests: AtomicUsize,
    /// Requests that have ended.
    over: AtomicUsize,
}

// === impl Progress ===

impl<'a> Progress<'a> {
    pub(super) fn new<'p>(
        points: impl Iterator<Item = &'p Point>,
        tell: &'a (dyn Fn(usize, usize) + Sync),
    ) -> Self {
        let zero = AtomicUsize::default;
        Self { tell, all: points.map(Self::size).sum(), begun: zero(), requests: zero(), over: zero() }
    }

    /// Jobs without a number of conversations have all of one workload.
    fn size(point: &Point) -> usize {
        point.conversations().map_or(1, |count| count.max(1) as usize)
    }

    pub(super) fn begin(&self, point: &Point, requests: usize) {
        self.requests.fetch_add(requests, Ordering::Release);
        self.begun.fetch_add(Self::size(point), Ordering::Release);
    }

    pub(super) fn end_request(&self) {
        let over = self.over.fetch_add(1, Ordering::AcqRel) + 1;
        // In this order the requests of all that has begun are seen: the total is never less than what is over.
        let begun = self.begun.load(Ordering::Acquire).max(1);
        let total = self.requests.load(Ordering::Acquire).saturating_mul(self.all) / begun;
        (self.tell)(over, total);
    }
}
