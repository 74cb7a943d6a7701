//! One rate of one key, as the time at which all its usage will have refilled.

use crate::time::Nanos;

/// Burst: the usage that refills within this time may be used at once.
pub(super) const MINUTE: Nanos = Nanos::from_secs(60);

/// Usage under one rate. Amounts are times: those in which they refill.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    /// When all usage has refilled, that at other routers as far as it was heard.
    pub(super) back: Nanos,
    /// All that was charged here since the key was first seen, less what was returned.
    pub(super) charged: Nanos,
    /// Of that, what other routers may not have heard: charged since the last news, and before it.
    pub(super) recent: [Nanos; 2],
}

// === impl Rate ===

impl Rate {
    /// Charges an amount.
    pub(super) fn charge(&mut self, now: Nanos, amount: Nanos) {
        self.back = self.back.max(now) + amount;
        self.charged += amount;
        self.recent[0] += amount;
    }

    /// Returns the excess of a charge whose refill ends at `charged_back`; the part that has already refilled is not
    /// returned again.
    pub(super) fn give_back(&mut self, now: Nanos, charged_back: Nanos, amount: Nanos) {
        let amount = amount.min(charged_back - now);
        self.back = self.back - amount;
        self.charged = self.charged - amount;
        self.recent[0] = self.recent[0] - amount;
    }

    /// Another router's charges were `before` and are `after`.
    pub(super) fn heard(&mut self, now: Nanos, before: Nanos, after: Nanos) {
        if after > before {
            self.back = self.back.max(now) + (after - before);
        } else {
            self.back = self.back - (before - after);
        }
    }

    /// What other routers may not have heard.
    pub(super) fn untold(&self) -> Nanos {
        self.recent[0] + self.recent[1]
    }
}

/// Time in which `amount` refills, rounded up; zero without a limit.
pub(super) fn span(amount: u64, per_minute: u64) -> Nanos {
    let Some(per_minute) = std::num::NonZeroU64::new(per_minute) else { return Nanos::ZERO };
    let nanos = (u128::from(amount) * u128::from(MINUTE.0)).div_ceil(u128::from(per_minute.get()));
    Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Time until `amount` fits within a minute's worth. A larger amount fits when nothing is used.
pub(super) fn wait(now: Nanos, back: Nanos, amount: u64, per_minute: u64) -> Nanos {
    if per_minute == 0 { Nanos::ZERO } else { (back - now) + span(amount, per_minute).min(MINUTE) - MINUTE }
}

/// The amount that fits now.
pub(super) fn left(now: Nanos, back: Nanos, per_minute: u64) -> Option<u64> {
    let room = MINUTE - (back - now);
    (per_minute > 0).then(|| {
        let amount = u128::from(room.0) * u128::from(per_minute) / u128::from(MINUTE.0);
        u64::try_from(amount).unwrap_or(u64::MAX)
    })
}
