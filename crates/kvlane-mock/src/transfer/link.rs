//! The link over which KV blocks come to an engine: how long a transfer takes, and whether it succeeds.

use std::collections::HashSet;

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;

use super::config::{KvTransferConfig, KvTransferFaults};

/// The receiving end of all transfers to an engine.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    latency_s: f64,
    token_s: f64,
    handshake_s: f64,
    /// The engines from which a transfer has begun.
    met: HashSet<String>,
    /// When each slot is free.
    slots: Vec<Nanos>,
    pub(crate) faults: KvTransferFaults,
    rng: Rng,
    pub(crate) counts: LinkCounts,
}

/// Counts of transfers since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LinkCounts {
    pub(crate) ended: u64,
    pub(crate) failed: u64,
    /// Engine seconds of those that have ended.
    pub(crate) seconds: f64,
}

/// What becomes of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fortune {
    Arrives(Nanos),
    Fails,
    Hangs,
}

// === impl Link ===

impl Link {
    pub(crate) fn new(config: &KvTransferConfig, seed: u64) -> Self {
        Self {
            latency_s: config.kv_transfer_latency,
            handshake_s: config.kv_transfer_handshake,
            met: HashSet::new(),
            token_s: 1.0 / config.kv_transfer_tokens_per_second,
            slots: vec![Nanos::ZERO; config.kv_transfer_slots as usize],
            faults: config.kv_transfer_faults,
            rng: Rng::new(seed),
            counts: LinkCounts::default(),
        }
    }

    /// A transfer of `tokens` from the engine at an address begins.
    pub(crate) fn begin(&mut self, now: Nanos, tokens: u32, from: &str) -> Fortune {
        let KvTransferFaults { fail, hang, slow, slow_s, .. } = self.faults;
        // One draw for each, so that a fault's share does not change which transfers others affect.
        let [fails, hangs, is_slow] = [fail, hang, slow].map(|share| self.rng.unit() < share);
        if fails {
            self.counts.failed += 1;
            return Fortune::Fails;
        }
        if hangs {
            return Fortune::Hangs;
        }
        let Some(slot) = self.slots.iter_mut().min() else { return Fortune::Hangs };
        let mut taken_s = self.latency_s + self.token_s * f64::from(tokens);
        if is_slow {
            taken_s += slow_s;
        }
        if !self.met.contains(from) {
            taken_s += self.handshake_s;
            self.met.insert(from.to_owned());
        }
        let end = (*slot).max(now) + Nanos::from_secs_f64(taken_s);
        *slot = end;
        self.counts.ended += 1;
        self.counts.seconds += (end - now).as_secs_f64();
        Fortune::Arrives(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_transfer_from_each_engine_takes_a_handshake_longer() {
        let config = KvTransferConfig {
            kv_transfer_latency: 1.0,
            kv_transfer_handshake: 7.0,
            kv_transfer_tokens_per_second: 100.0,
            ..KvTransferConfig::default()
        };
        let mut link = Link::new(&config, 0);
        let ends = ["a", "a", "b", "a", "b"].map(|from| link.begin(Nanos::ZERO, 100, from));
        assert_eq!(ends, [9, 2, 9, 2, 4].map(|seconds| Fortune::Arrives(Nanos::from_secs(seconds))));
    }

    #[test]
    fn transfers_share_the_slots_and_a_share_of_them_is_slow() {
        let config = KvTransferConfig {
            kv_transfer_latency: 1.0,
            kv_transfer_tokens_per_second: 100.0,
            kv_transfer_slots: 2,
            ..KvTransferConfig::default()
        };
        let mut link = Link::new(&config, 0);
        let mut ends = || link.begin(Nanos::ZERO, 100, "a");
        let at = |seconds| Fortune::Arrives(Nanos::from_secs(seconds));
        assert_eq!([ends(), ends(), ends(), ends(), ends()], [at(2), at(2), at(4), at(4), at(6)]);
        assert_eq!((link.counts.ended, link.counts.seconds), (5, 18.0));
        link.faults = "slow=0.25,slow_s=1000".parse().expect("faults");
        let mut slow = 0;
        for n in 1..=400 {
            let now = Nanos::from_secs(n * 1_000_000);
            slow += u32::from(link.begin(now, 100, "a") == Fortune::Arrives(now + Nanos::from_secs(1002)));
        }
        assert!((70..130).contains(&slow), "{slow}");
        link.faults = "fail=1".parse().expect("faults");
        assert_eq!((link.begin(Nanos::ZERO, 1, "a"), link.counts.failed), (Fortune::Fails, 1));
        link.faults = "hang=1".parse().expect("faults");
        assert_eq!(link.begin(Nanos::ZERO, 1, "a"), Fortune::Hangs);
        for wrong in ["fail", "fail=2", "fail=x", "slow_s=-1", "faster=1"] {
            wrong.parse::<KvTransferFaults>().expect_err(wrong);
        }
    }
}
