//! Transfers of KV blocks between engines: a bounded number at a time, the rest queued.
//!
//! A prefill engine's network card sends to a limited number of decode engines at once; a transfer without a slot
//! waits for the first that ends. This queueing, not the wire time of one transfer, makes disaggregated serving slow
//! under load: the decode engine holds the blocks while it waits.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvlane_core::time::Nanos;
use serde::{Deserialize, Serialize};

/// The speed of a link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferConfig {
    /// Seconds before the first byte of a transfer.
    pub setup_s: f64,
    /// Bytes per second of each transfer.
    pub bytes_per_s: f64,
    /// Concurrent transfers; 0 counts as 1.
    pub slots: u32,
    /// Share of the transfers that take `slow_s` longer, and keep their slot so long. Transfers between engines are
    /// two-humped: 0.6 s or 18 to 31 s in the study "elastic P/D".
    #[serde(default)]
    pub slow_share: f64,
    /// By how many seconds.
    #[serde(default)]
    pub slow_s: f64,
    /// Share of the bytes of a prompt that are sent while it is computed, layer by layer, and add nothing to its
    /// transfer.
    #[serde(default)]
    pub overlap: f64,
    /// When the decode engine gets a request whose prompt another engine computes.
    #[serde(default)]
    pub connector: Connector,
}

/// When the decode engine gets a request whose prompt another engine computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// When the prompt is computed: the decode engine then reads the blocks, as with vLLM's NIXL connector.
    #[default]
    Pull,
    /// At once, "fire and forget": the decode engine reserves blocks while the prompt is computed, as in SGLang and with
    /// vLLM's Mooncake connector.
    Push,
}

impl Default for TransferConfig {
    /// One 400 Gbit/s port per engine at its usual rate, four concurrent transfers.
    fn default() -> Self {
        Self {
            setup_s: 0.005,
            bytes_per_s: 40e9,
            slots: 4,
            slow_share: 0.0,
            slow_s: 0.0,
            overlap: 0.0,
            connector: Connector::Pull,
        }
    }
}

/// A link and its queue.
#[derive(Clone, Debug)]
pub struct Transfer {
    config: TransferConfig,
    /// Time at which each busy slot becomes free.
    busy: BinaryHeap<Reverse<Nanos>>,
}

// === impl Transfer ===

impl Transfer {
    /// An idle link.
    pub fn new(config: TransferConfig) -> Self {
        Self { config: TransferConfig { slots: config.slots.max(1), ..config }, busy: BinaryHeap::new() }
    }

    /// Queues a transfer that takes `longer_s` than usual, and returns its completion time. Calls must be in order of
    /// time.
    pub fn begin(&mut self, now: Nanos, bytes: u64, longer_s: f64) -> Nanos {
        let start = if self.busy.len() < self.config.slots as usize {
            now
        } else {
            self.busy.pop().map_or(now, |Reverse(free)| free.max(now))
        };
        let length = self.config.setup_s + bytes as f64 / self.config.bytes_per_s + longer_s;
        let done = start + Nanos::from_secs_f64(length);
        self.busy.push(Reverse(done));
        done
    }

    /// Transfers in progress or queued at `now`.
    pub fn pending(&self, now: Nanos) -> usize {
        self.busy.iter().filter(|Reverse(done)| *done > now).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(slots: u32) -> Transfer {
        Transfer::new(TransferConfig { setup_s: 1.0, bytes_per_s: 10.0, slots, ..TransferConfig::default() })
    }

    #[test]
    fn a_transfer_takes_its_setup_and_its_bytes() {
        assert_eq!(link(1).begin(Nanos::from_secs(5), 20, 0.0), Nanos::from_secs(8));
        assert_eq!(link(1).begin(Nanos::from_secs(5), 20, 7.0), Nanos::from_secs(15), "a slow one");
    }

    #[test]
    fn who_finds_no_slot_waits_for_the_first_that_ends() {
        let mut link = link(2);
        let done = [40, 10, 10, 10].map(|bytes| link.begin(Nanos::ZERO, bytes, 0.0));
        assert_eq!(done, [5, 2, 4, 6].map(Nanos::from_secs));
        assert_eq!(link.pending(Nanos::from_secs(4)), 2);
        assert_eq!(link.begin(Nanos::from_secs(10), 0, 0.0), Nanos::from_secs(11), "idle again");
    }

    proptest! {
        /// Invariant: Transfers never exceed the slots of their link.
        #[test]
        fn no_more_transfers_run_than_there_are_slots_and_none_waits_while_one_is_free(
            slots in 1u32..4,
            steps in prop::collection::vec((0u64..3, 0u64..50), 1..40),
        ) {
            let mut link = link(slots);
            let (mut now, mut spans) = (Nanos::ZERO, Vec::<(Nanos, Nanos)>::new());
            for (after, bytes) in steps {
                now += Nanos::from_secs(after);
                let done = link.begin(now, bytes, 0.0);
                let start = done - Nanos::from_secs_f64(1.0 + bytes as f64 / 10.0);
                let under_way = |at| spans.iter().filter(|(from, to)| *from <= at && at < *to).count();
                prop_assert!(under_way(start) < slots as usize);
                if start > now {
                    prop_assert_eq!(under_way(Nanos(start.0 - 1)), slots as usize, "it waited for a slot");
                }
                spans.push((start, done));
            }
        }
    }
}
