//! Transfers of KV blocks between endpoints: how long they take, learned per pair, and how many are in flight.
//!
//! A transfer takes a latency and a time per token. Each one that ends corrects a factor of its pair, tracked as a
//! median, and the mean of what exceeded the median: transfers are two-humped (0.6 s or 18 to 31 s in the study
//! "elastic P/D"), so their mean is what a request has to expect, and no median shows it. A transfer that fails counts
//! with the time that was lost. What is learned about all pairs applies to a pair in proportion to what its own
//! transfers have not said. What exceeded the median is forgotten with time; otherwise a pair that was slow would never
//! be tried again.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::WarmUp;
use super::median::Factor;
use super::window::Window;
use crate::endpoint::EndpointId;
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// Seconds before the first byte: a request to the sender and its answer, and registering memory. NIXL over TCP took 8
/// to 18 ms for 2.9 MB on one machine.
const LATENCY_S: f64 = 0.005;
/// Seconds per token: 128 KiB (Llama-3.1-8B) over a 400 Gbit/s port at 40 GB/s.
const TOKEN_S: f64 = 131_072.0 / 40e9;
/// Transfers that count as much as what is known of all pairs.
const PRIOR_SAMPLES: f64 = 4.0;
/// Transfers after which a mean has forgotten most of what was before.
const MEMORY_SAMPLES: f64 = 32.0;
/// Time after which half of what exceeded the median is forgotten, in seconds.
const MEMORY_S: f64 = 60.0;
/// A transfer is slow if it takes this many times the median.
const SLOW: f64 = 2.0;
/// Pairs remembered; beyond it a pair is known by all pairs together.
const PAIRS_MAX: usize = 1 << 16;

/// What is known of the transfers of a pool.
#[derive(Debug, Default)]
pub struct Transfers {
    all: Learned,
    /// Mean seconds by which the first transfer of a pair exceeds the next, and the number of samples.
    handshake_s: f64,
    handshakes: f64,
    pairs: HashMap<(EndpointId, EndpointId), Pair, FixedState>,
    senders: ByEndpoint<Window>,
    receivers: ByEndpoint<Window>,
}

/// What is known of one pair, for people.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Computes prompts.
    pub from: EndpointId,
    /// Decodes them.
    pub to: EndpointId,
    /// Seconds that a transfer of 4,096 tokens is expected to take.
    pub expected_s: f64,
    /// Split requests in flight, and the learned limit.
    pub in_flight: u32,
    /// The limit.
    pub limit: u32,
    /// Transfers that have ended well.
    pub ended: u64,
    /// Transfers that have failed.
    pub failed: u64,
    /// Whether it gets no requests because its warm-up is due, or has failed.
    pub closed: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    learned: Learned,
    window: Window,
    ended: u64,
    failed: u64,
    /// Its warm-up is due, or has failed.
    closed: bool,
}

/// The time that transfers take.
#[derive(Clone, Copy, Debug, Default)]
struct Learned {
    factor: Factor,
    /// Mean seconds beyond the median, as of a time, and the number of samples.
    beyond_s: f64,
    at: Nanos,
    samples: f64,
}

// === impl Learned ===

impl Learned {
    fn beyond_s(&self, now: Nanos) -> f64 {
        let spans = (now - self.at).as_secs_f64() / MEMORY_S;
        self.beyond_s / (1.0 + spans)
    }

    fn see(&mut self, now: Nanos, median_s: f64, taken_s: f64) {
        self.samples = (self.samples + 1.0).min(MEMORY_SAMPLES);
        let before = self.beyond_s(now);
        self.beyond_s = before + ((taken_s - median_s).max(0.0) - before) / self.samples;
        self.at = now;
    }
}

/// Seconds of a transfer before anything is learned.
fn base_s(tokens: u32) -> f64 {
    LATENCY_S + TOKEN_S * f64::from(tokens)
}

// === impl Transfers ===

impl Transfers {
    fn pair(&self, from: EndpointId, to: EndpointId) -> Pair {
        self.pairs.get(&(from, to)).copied().unwrap_or_default()
    }

    /// Median seconds of a transfer of `tokens`.
    fn median_s(&self, pair: &Pair, tokens: u32) -> f64 {
        base_s(tokens) * pair.learned.factor.or(&self.all.factor)
    }

    /// Seconds that a transfer of `tokens` is expected to take: its mean, slow and failed ones included.
    pub fn expected_s(&self, now: Nanos, from: EndpointId, to: EndpointId, tokens: u32) -> f64 {
        let pair = self.pair(from, to);
        let (own, samples) = (pair.learned.beyond_s(now), pair.learned.samples);
        let beyond_s = (own * samples + self.all.beyond_s(now) * PRIOR_SAMPLES) / (samples + PRIOR_SAMPLES);
        let handshake_s = if pair.ended == 0 { self.handshake_s } else { 0.0 };
        self.median_s(&pair, tokens) + beyond_s + handshake_s
    }

    /// Whether the pair may have one more request in flight.
    pub fn has_room(&self, from: EndpointId, to: EndpointId) -> bool {
        let free = |window: Option<&Window>| window.is_none_or(Window::has_room);
        let pair = self.pairs.get(&(from, to));
        free(self.senders.get(from))
            && free(self.receivers.get(to))
            && pair.is_none_or(|pair| pair.window.has_room() && !pair.closed)
    }

    /// Split requests in flight, by their prefill endpoint.
    pub fn in_flight(&self, from: EndpointId) -> u32 {
        self.senders.get(from).map_or(0, Window::in_flight)
    }

    /// The pairs that have been used, in no particular order.
    pub fn links(&self, now: Nanos) -> impl Iterator<Item = Link> {
        self.pairs.iter().map(move |(&(from, to), pair)| Link {
            from,
            to,
            expected_s: self.expected_s(now, from, to, 4096),
            in_flight: pair.window.in_flight(),
            limit: pair.window.limit(),
            ended: pair.ended,
            failed: pair.failed,
            closed: pair.closed,
        })
    }

    /// A request was split between these endpoints.
    pub(crate) fn begin(&mut self, from: EndpointId, to: EndpointId) {
        self.windows(from, to, Window::begin);
    }

    /// A split request is over, whatever its outcome.
    pub(crate) fn end(&mut self, from: EndpointId, to: EndpointId) {
        self.windows(from, to, Window::end);
    }

    fn windows(&mut self, from: EndpointId, to: EndpointId, change: impl Fn(&mut Window)) {
        change(self.senders.get_or_insert(from, Window::default));
        change(self.receivers.get_or_insert(to, Window::default));
        if self.pairs.len() < PAIRS_MAX || self.pairs.contains_key(&(from, to)) {
            change(&mut self.pairs.entry((from, to)).or_default().window);
        }
    }

    /// A transfer of `tokens` took `taken_s`.
    pub(crate) fn ended(&mut self, now: Nanos, from: EndpointId, to: EndpointId, tokens: u32, taken_s: f64) {
        let pair = self.pair(from, to);
        let median_s = self.median_s(&pair, tokens);
        let ratio = taken_s / base_s(tokens);
        self.all.factor.see(ratio);
        self.note(now, from, to, median_s, taken_s);
        if let Some(pair) = self.pairs.get_mut(&(from, to)) {
            pair.learned.factor.see(ratio);
            pair.ended += 1;
        }
    }

    /// A transfer failed after `lost_s`.
    pub(crate) fn failed(&mut self, now: Nanos, from: EndpointId, to: EndpointId, lost_s: f64) {
        self.note(now, from, to, 0.0, lost_s);
        if let Some(pair) = self.pairs.get_mut(&(from, to)) {
            pair.failed += 1;
        }
    }

    /// The warm-up of a pair.
    pub(crate) fn warm_up(&mut self, now: Nanos, from: EndpointId, to: EndpointId, warm_up: WarmUp) {
        if self.pairs.len() < PAIRS_MAX || self.pairs.contains_key(&(from, to)) {
            let closed = matches!(warm_up, WarmUp::Due | WarmUp::Failed { .. });
            self.pairs.entry((from, to)).or_default().closed = closed;
        }
        match warm_up {
            WarmUp::Ended { first, next, tokens } => {
                self.handshakes = (self.handshakes + 1.0).min(MEMORY_SAMPLES);
                let beyond_s = (first - next).as_secs_f64();
                self.handshake_s += (beyond_s - self.handshake_s) / self.handshakes;
                self.ended(now, from, to, tokens, next.as_secs_f64());
            }
            WarmUp::Failed { lost } => self.failed(now, from, to, lost.as_secs_f64()),
            WarmUp::Due | WarmUp::Skipped => {}
        }
    }

    fn note(&mut self, now: Nanos, from: EndpointId, to: EndpointId, median_s: f64, taken_s: f64) {
        self.all.see(now, median_s, taken_s);
        let was_slow = taken_s > SLOW * median_s;
        if let Some(pair) = self.pairs.get_mut(&(from, to)) {
            pair.learned.see(now, median_s, taken_s);
        }
        self.windows(from, to, |window| window.learn(was_slow));
    }

    /// Forgets the pairs of an endpoint that has left.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        self.pairs.retain(|&(from, to), _| from != endpoint && to != endpoint);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: EndpointId = EndpointId::new(0, 0);
    const B: EndpointId = EndpointId::new(1, 0);
    const C: EndpointId = EndpointId::new(2, 0);

    fn used() -> Transfers {
        let mut transfers = Transfers::default();
        for to in [B, C] {
            transfers.begin(A, to);
            transfers.end(A, to);
        }
        transfers
    }

    #[test]
    fn a_pair_is_known_by_its_transfers_and_before_them_by_those_of_others() {
        let mut transfers = used();
        let before = transfers.expected_s(Nanos::ZERO, A, B, 10_000);
        assert!((before - (0.005 + 10_000.0 * TOKEN_S)).abs() < 1e-12);
        (0..100).for_each(|_| transfers.ended(Nanos::ZERO, A, B, 10_000, 10.0 * before));
        let after = transfers.expected_s(Nanos::ZERO, A, B, 10_000) / before;
        assert!((9.0..12.0).contains(&after), "{after}");
        let other = transfers.expected_s(Nanos::ZERO, C, B, 10_000) / before;
        assert!((9.0..12.0).contains(&other), "an unused pair: {other}");
    }

    /// Invariant: The expected time of a transfer is its mean: a rare slow hump counts with its share.
    #[test]
    fn a_rare_slow_hump_counts_with_its_share() {
        let mut transfers = used();
        (0..400).for_each(|n| {
            let taken_s = if n % 5 == 0 { 20.0 } else { 0.6 };
            transfers.ended(Nanos::ZERO, A, B, 10_000, taken_s);
        });
        let mean_s = 0.2 * 20.0 + 0.8 * 0.6;
        let expected_s = transfers.expected_s(Nanos::ZERO, A, B, 10_000);
        assert!((0.5..1.6).contains(&(expected_s / mean_s)), "{expected_s}");
        let later_s = transfers.expected_s(Nanos::from_secs(600), A, B, 10_000);
        assert!(later_s < 0.5 * expected_s, "it is tried again: {later_s}");
    }

    #[test]
    fn a_pair_whose_transfers_fail_is_expected_to_take_what_was_lost() {
        let mut transfers = used();
        (0..20).for_each(|_| transfers.ended(Nanos::ZERO, A, C, 1000, 0.01));
        (0..20).for_each(|_| transfers.failed(Nanos::ZERO, A, B, 7.0));
        let expected = |to| transfers.expected_s(Nanos::ZERO, A, to, 1000);
        assert!(expected(B) > 5.0 && expected(C) < 1.5, "{} {}", expected(B), expected(C));
        let failed: Vec<u64> = [B, C].iter().map(|&to| transfers.pair(A, to).failed).collect();
        assert_eq!(failed, [20, 0]);
    }

    /// Invariant: No request is split between two endpoints before the warm-up of the pair has ended, and after a failed
    /// one, if another way serves it.
    #[test]
    fn a_pair_is_closed_until_its_warm_up_has_ended() {
        let (mut transfers, s) = (Transfers::default(), Nanos::from_secs);
        let mut step = |warm_up| {
            transfers.warm_up(Nanos::ZERO, A, B, warm_up);
            transfers.has_room(A, B)
        };
        let ended = WarmUp::Ended { first: s(7), next: Nanos(20_000_000), tokens: 64 };
        assert_eq!([WarmUp::Due, WarmUp::Failed { lost: s(1) }, ended].map(&mut step), [false, false, true]);
        assert_eq!([WarmUp::Due, WarmUp::Skipped].map(&mut step), [false, true]);
        assert!(transfers.has_room(A, C), "another pair");
        let link = transfers.links(Nanos::ZERO).next().expect("it was used");
        assert_eq!((link.ended, link.failed, link.in_flight, link.closed), (1, 1, 0, false));
    }

    #[test]
    fn the_first_transfer_of_a_pair_is_expected_to_take_a_handshake_longer() {
        let mut transfers = used();
        let tokens = 1000;
        let next = Nanos::from_secs_f64(base_s(tokens));
        let warm_up = WarmUp::Ended { first: Nanos::from_secs(7) + next, next, tokens };
        transfers.warm_up(Nanos::ZERO, A, B, warm_up);
        let expected = |to| transfers.expected_s(Nanos::ZERO, A, to, tokens);
        assert!(expected(B) < 0.1, "its own handshake is over: {}", expected(B));
        assert!((7.0..7.1).contains(&expected(C)), "{}", expected(C));
    }

    #[test]
    fn each_pair_and_each_end_has_a_limit() {
        let mut transfers = Transfers::default();
        (0..4).for_each(|_| transfers.begin(A, B));
        assert!(!transfers.has_room(A, B), "the pair");
        assert!(!transfers.has_room(A, C) && !transfers.has_room(C, B), "its sender, its receiver");
        assert!(transfers.has_room(C, A));
        (0..4).for_each(|_| transfers.end(A, B));
        assert!(transfers.has_room(A, B) && transfers.in_flight(A) == 0);
        transfers.forget(A);
        assert_eq!(transfers.links(Nanos::ZERO).count(), 0);
    }
}
