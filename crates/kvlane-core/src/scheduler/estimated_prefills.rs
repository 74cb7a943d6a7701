//! Estimated prefill ends, for requests whose first token cannot be observed.
//!
//! A non-streamed answer arrives only when it is complete. If its prompt counted as pending prefill until then, an
//! endpoint serving many such requests would appear to prefill all the time and to decode nothing. So its prompt counts
//! as prefilled once the endpoint's rates say so.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::request::RequestId;
use crate::time::Nanos;

/// Upper bound of an estimated wait plus prefill. It limits how long entries of finished requests are kept.
const EXPECTED_MAX: Nanos = Nanos::from_secs(600);

/// Requests by estimated prefill end.
#[derive(Default)]
pub(super) struct EstimatedPrefills {
    due: BinaryHeap<Reverse<(Nanos, RequestId)>>,
}

// === impl EstimatedPrefills ===

impl EstimatedPrefills {
    /// Adds a request placed at `now` whose prompt should be prefilled `expected_s` later.
    pub(super) fn placed(&mut self, now: Nanos, request: RequestId, expected_s: f64) {
        let due = now + Nanos::from_secs_f64(expected_s).min(EXPECTED_MAX);
        self.due.push(Reverse((due, request)));
    }

    /// The next request whose prompt should be prefilled by `now`. It may have finished already.
    pub(super) fn pop(&mut self, now: Nanos) -> Option<RequestId> {
        let &Reverse((due, request)) = self.due.peek()?;
        (due <= now).then(|| {
            self.due.pop();
            request
        })
    }
}
