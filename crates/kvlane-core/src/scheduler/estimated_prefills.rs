//! Prompts that count as computed when they should be, because nobody will see when they are.
//!
//! An answer that comes all at once begins when it is over. If its prompt counted as work to come until then, an endpoint
//! full of clients that do not stream would look like one that computes prompts all day, and decodes nothing. So its
//! prompt is taken to be computed when the endpoint's rates say it is.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::request::RequestId;
use crate::time::Nanos;

/// Longest time for which a prompt is expected to wait and be computed. It bounds what is kept of requests that are over
/// before.
const EXPECTED_MAX: Nanos = Nanos::from_secs(600);

/// Which prompts, and when.
#[derive(Default)]
pub(super) struct EstimatedPrefills {
    due: BinaryHeap<Reverse<(Nanos, RequestId)>>,
}

// === impl EstimatedPrefills ===

impl EstimatedPrefills {
    /// A request was placed now, and its prompt should be computed `expected_s` later.
    pub(super) fn placed(&mut self, now: Nanos, request: RequestId, expected_s: f64) {
        let due = now + Nanos::from_secs_f64(expected_s).min(EXPECTED_MAX);
        self.due.push(Reverse((due, request)));
    }

    /// The next request whose prompt should be computed by now. It may be over.
    pub(super) fn pop(&mut self, now: Nanos) -> Option<RequestId> {
        let &Reverse((due, request)) = self.due.peek()?;
        (due <= now).then(|| {
            self.due.pop();
            request
        })
    }
}
