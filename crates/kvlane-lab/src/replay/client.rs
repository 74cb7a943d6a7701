//! State of the client. Its measurements are worthless if it was the bottleneck: a request that was sent late, or an
//! answer that was read late, looks like a slow server.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::statistics::histogram::Histogram;
use crate::statistics::summary::Percentiles;

/// Interval of the client's lateness checks.
const LOOK: Duration = Duration::from_millis(5);

/// State of the client.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Client {
    /// Lateness of sent requests, in seconds. `None` if there were none.
    pub lag_s: Option<Percentiles>,
    /// Scheduling delay of its runtime, in seconds: arrivals may have been read this late.
    pub stall_s: Option<Percentiles>,
    /// CPU time of this process as a share of what its threads could have used; `None` if the system does not report
    /// it.
    pub cpu_share: Option<f64>,
}

/// Limits above which the client counts as the bottleneck.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Of the 99th percentiles of lag and stall, in seconds.
    pub late_s: f64,
    /// Of the share of CPU time.
    pub cpu_share: f64,
}

/// Monitors the client during the replay.
pub(super) struct Watch {
    began: Instant,
    cpu_s: Option<f64>,
    stall: Histogram,
}

impl Default for Bounds {
    /// 20 ms late, or nine tenths of the available CPU time.
    fn default() -> Self {
        Self { late_s: 0.02, cpu_share: 0.9 }
    }
}

// === impl Client ===

impl Client {
    /// Reasons why the client was the bottleneck; empty if it was not.
    pub fn bottleneck(&self, bounds: &Bounds) -> Vec<String> {
        let millis = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let late = |all: Option<Percentiles>| all.map(|all| all.p99).filter(|&p99| p99 > bounds.late_s);
        let mut why = Vec::new();
        if let Some(p99) = late(self.lag_s) {
            let bound = millis(bounds.late_s);
            why.push(format!(
                "requests were sent {} late at the 99th percentile, the limit is {bound}",
                millis(p99)
            ));
        }
        if let Some(p99) = late(self.stall_s) {
            let bound = millis(bounds.late_s);
            why.push(format!(
                "the client's tasks ran {} late at the 99th percentile, the limit is {bound}",
                millis(p99)
            ));
        }
        if let Some(share) = self.cpu_share.filter(|&share| share > bounds.cpu_share) {
            let percent = |share: f64| format!("{:.0} %", share * 100.0);
            why.push(format!(
                "the client used {} of the CPU time, the limit is {}",
                percent(share),
                percent(bounds.cpu_share)
            ));
        }
        why
    }
}

// === impl Watch ===

impl Watch {
    pub(super) fn begin() -> Self {
        Self { began: Instant::now(), cpu_s: cpu_s(), stall: Histogram::default() }
    }

    /// Looks until it is dropped.
    pub(super) async fn look(&mut self) -> std::convert::Infallible {
        loop {
            let due = Instant::now() + LOOK;
            tokio::time::sleep_until(due.into()).await;
            self.stall.add(due.elapsed().as_secs_f64(), 1);
        }
    }

    /// How it did, with the lags of its requests.
    pub(super) fn end(&self, lags_s: &mut [f64]) -> Client {
        let could_s = self.began.elapsed().as_secs_f64() * cores() as f64;
        let used_s = self.cpu_s.and_then(|before| Some(cpu_s()? - before));
        Client {
            lag_s: Percentiles::of(lags_s),
            stall_s: self.stall.percentiles(),
            cpu_share: used_s.filter(|_| could_s > 0.0).map(|used_s| used_s / could_s),
        }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// CPU time of this process so far.
fn cpu_s() -> Option<f64> {
    cpu_of_stat(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// User and system time from Linux' `/proc/PID/stat` (proc_pid_stat(5), fields 14 and 15), in hundredths of a second on
/// every architecture. The second field is a name in parentheses that may have anything in it.
fn cpu_of_stat(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(p99: f64) -> Option<Percentiles> {
        Some(Percentiles { mean: 0.0, p50: 0.0, p90: 0.0, p99, max: 10.0 })
    }

    #[test]
    fn a_client_within_its_bounds_is_no_bottleneck() {
        let client = Client { lag_s: all(0.019), stall_s: all(0.019), cpu_share: Some(0.89) };
        assert!(client.bottleneck(&Bounds::default()).is_empty());
        assert!(Client::default().bottleneck(&Bounds::default()).is_empty());
    }

    #[test]
    fn each_bound_is_a_reason_of_its_own() {
        let good = Client { lag_s: all(0.001), stall_s: all(0.001), cpu_share: Some(0.1) };
        for (client, word) in [
            (Client { lag_s: all(0.021), ..good.clone() }, "sent 21.0 ms late"),
            (Client { stall_s: all(0.5), ..good.clone() }, "ran 500.0 ms late"),
            (Client { cpu_share: Some(0.95), ..good.clone() }, "95 % of the CPU"),
        ] {
            let why = client.bottleneck(&Bounds::default());
            assert!(why.len() == 1 && why[0].contains(word), "{why:?}");
        }
    }

    #[test]
    fn cpu_time_is_read_past_a_name_with_spaces_and_parentheses() {
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194304 100 0 0 0 150 50 0 0 20 0 8 0 123";
        assert_eq!(cpu_of_stat(stat), Some(2.0));
        assert_eq!(cpu_of_stat("42 (a) S 1"), None);
    }
}
