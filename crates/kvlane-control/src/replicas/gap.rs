//! The shortest time between two news, which sets itself from what the exchange costs.
//!
//! Another replica that has not heard of a placement sends its next request to the same endpoint, so placements should
//! be told at once. But a message costs CPU time at both of its ends, and a replica of many sends many. So the gap
//! between two news grows while the exchange takes more than [`SHARE`] of the CPU time that the gateway takes without it, and
//! shrinks while it takes less. Where requests are few, that share would be next to nothing, and bad placement would cost engines
//! more than it saves: [`ALWAYS`] may be taken in any case.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

/// Share of the CPU time of the rest of the gateway that the exchange may take.
const SHARE: f64 = 0.05;
/// Share of one core that it may always take.
const ALWAYS: f64 = 0.02;
/// Shortest gap. Timers are not more exact than a millisecond.
pub(super) const SHORTEST: Duration = Duration::from_millis(2);
/// Time between two reviews of the gap.
const REVIEW_EVERY: Duration = Duration::from_millis(250);
/// Most that one review changes: CPU time of so short a time is not exact.
const STEP: f64 = 1.5;

/// CPU time so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuTime {
    /// Of the calling thread, which runs the exchange alone.
    thread: Duration,
    /// Of all threads.
    process: Duration,
}

/// The gap.
#[derive(Debug)]
pub(super) struct Gap {
    gap: Duration,
    longest: Duration,
    reviewed: Instant,
    spent: CpuTime,
}

// === impl CpuTime ===

impl CpuTime {
    pub(super) fn now() -> Self {
        let time = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
        Self { thread: time(ClockId::ThreadCPUTime), process: time(ClockId::ProcessCPUTime) }
    }
}

// === impl Gap ===

impl Gap {
    /// The shortest gap, which grows to the longest at most.
    pub(super) fn new(longest: Duration, now: Instant, spent: CpuTime) -> Self {
        Self { gap: SHORTEST.min(longest), longest, reviewed: now, spent }
    }

    pub(super) fn get(&self) -> Duration {
        self.gap
    }

    /// Whether the time of the next review has come.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.reviewed + REVIEW_EVERY
    }

    /// Sets the gap by what was spent since the last review.
    pub(super) fn review(&mut self, now: Instant, spent: CpuTime) {
        let elapsed_s = now.saturating_duration_since(self.reviewed).as_secs_f64();
        let exchange_s = spent.thread.saturating_sub(self.spent.thread).as_secs_f64();
        let all_s = spent.process.saturating_sub(self.spent.process).as_secs_f64();
        (self.reviewed, self.spent) = (now, spent);
        let may_s = (SHARE * (all_s - exchange_s)).max(ALWAYS * elapsed_s);
        // Two reviews at the same moment change nothing.
        let factor = if may_s > 0.0 { (exchange_s / may_s).clamp(1.0 / STEP, STEP) } else { 1.0 };
        self.gap = self.gap.mul_f64(factor).clamp(SHORTEST.min(self.longest), self.longest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The gap after so many seconds in each of which the exchange and the rest of the gateway take so many milliseconds of CPU
    /// time for messages with a gap of 10 ms, and as many more as it is shorter.
    fn settled_ms(mut gap: Gap, exchange_ms: f64, rest_ms: f64, seconds: u32) -> f64 {
        for _ in 0..seconds {
            let messages = 10.0 / (gap.get().as_secs_f64() * 1e3);
            let thread = gap.spent.thread + MS.mul_f64(exchange_ms * messages);
            let process = gap.spent.process + MS.mul_f64(rest_ms) + (thread - gap.spent.thread);
            gap.review(gap.reviewed + Duration::from_secs(1), CpuTime { thread, process });
        }
        (gap.get().as_secs_f64() * 1e3).round()
    }

    fn gap() -> Gap {
        let spent = CpuTime { thread: Duration::ZERO, process: Duration::ZERO };
        Gap::new(20 * MS, Instant::now(), spent)
    }

    /// Invariant: The exchange between replicas takes a twentieth of the CPU time of the rest of the gateway at most, or two per cent
    /// of a core if that is more, unless news would wait longer than `replicas.interval`.
    #[test]
    fn the_gap_grows_until_the_exchange_is_cheap_enough() {
        assert_eq!(settled_ms(gap(), 0.1, 100.0, 50), 2.0, "messages are cheap");
        assert_eq!(settled_ms(gap(), 30.0, 1.0, 50), 15.0, "20 ms a second may always be taken");
        assert_eq!(settled_ms(gap(), 40.0, 800.0, 50), 10.0, "40 of 800 ms");
        assert_eq!(settled_ms(gap(), 400.0, 800.0, 50), 20.0, "and news waits no longer than that");
        assert_eq!(settled_ms(gap(), 40.0, 100.0, 1), 3.0, "step by step");
    }

    #[test]
    fn an_interval_that_is_shorter_than_the_shortest_gap_is_kept() {
        let spent = CpuTime { thread: Duration::ZERO, process: Duration::ZERO };
        let mut gap = Gap::new(MS, Instant::now(), spent);
        gap.review(gap.reviewed, spent);
        assert_eq!(gap.get(), MS);
    }

    #[test]
    fn a_thread_takes_no_more_time_than_its_process() {
        let CpuTime { thread, process } = CpuTime::now();
        assert!(Duration::ZERO < thread && thread <= process, "{thread:?} {process:?}");
    }
}
