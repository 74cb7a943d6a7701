//! Window: how many transfers an endpoint or a pair of endpoints may have in flight, learned from how long they take.
//!
//! Transfers share a network port, and each waits for those before it. The limit rises while transfers take what they
//! usually take, and falls when they take longer: additive increase and multiplicative decrease, as in TCP.

/// Transfers in flight at first: the cap of the study "elastic P/D", which won with it.
const LIMIT_AT_FIRST: f32 = 4.0;
/// Largest limit.
const LIMIT_MAX: f32 = 256.0;
/// Factor on the limit when a transfer was slow.
const DECREASE: f32 = 0.7;

/// Transfers in flight, and their limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    in_flight: u32,
    limit: f32,
}

// === impl Window ===

impl Default for Window {
    fn default() -> Self {
        Self { in_flight: 0, limit: LIMIT_AT_FIRST }
    }
}

impl Window {
    pub(super) fn has_room(&self) -> bool {
        (self.in_flight as f32) < self.limit.floor()
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit as u32
    }

    pub(super) fn begin(&mut self) {
        self.in_flight += 1;
    }

    pub(super) fn end(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// A transfer has ended after what is usual, or later.
    pub(super) fn learn(&mut self, was_slow: bool) {
        if was_slow {
            self.limit = (self.limit * DECREASE).max(1.0);
        } else if self.in_flight as f32 + 1.0 >= self.limit.floor() {
            self.limit = (self.limit + 1.0 / self.limit).min(LIMIT_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_rises_while_it_is_used_and_falls_when_transfers_are_slow() {
        let mut window = Window::default();
        (0..4).for_each(|_| window.begin());
        assert!(!window.has_room(), "the first limit");
        (0..4).for_each(|_| window.end());
        window.learn(false);
        assert_eq!(window.limit(), 4, "what is not used is not raised");
        (0..100).for_each(|_| {
            while window.has_room() {
                window.begin();
            }
            window.end();
            window.learn(false);
        });
        assert!(window.limit() > 10, "{}", window.limit());
        (0..20).for_each(|_| window.learn(true));
        assert_eq!(window.limit(), 1, "one is always allowed");
    }
}
