//! Arrival times of requests, or of sessions if a workload has sessions.

use kvlane_core::rng::Rng;
use serde::{Deserialize, Serialize};

/// Arrival times and number of a workload's requests, or of its sessions' first requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "process", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Arrivals {
    /// At a rate, with exponential gaps.
    Poisson {
        /// Mean number per second.
        rate: f64,
        /// Number in all. Either this or `seconds`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u32>,
        /// Length of the trace: later turns of sessions are left out. Either this or `count`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seconds: Option<f64>,
    },
    /// At rates that change in stages.
    Stages {
        /// The stages, in order.
        stages: Vec<Stage>,
        /// Seconds between the end of a stage and the start of the next, without arrivals.
        #[serde(default)]
        pause_s: f64,
    },
    /// All at the start: for clients that decide themselves when to send the next one.
    Closed {
        /// Number in all.
        count: u32,
    },
}

/// A stage at one rate: exactly `rate` times `seconds` arrivals, rounded, distributed as in a Poisson process with
/// that number of arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Number per second.
    pub rate: f64,
    /// Duration.
    pub seconds: f64,
}

/// Most arrivals of a workload.
const COUNT_MAX: f64 = 64e6;

impl Default for Arrivals {
    /// One per second, 1,000 in all.
    fn default() -> Self {
        Self::Poisson { rate: 1.0, count: Some(1000), seconds: None }
    }
}

// === impl Arrivals ===

impl Arrivals {
    /// Validates the settings; returns the error.
    pub(super) fn check(&self) -> Result<(), String> {
        let positive = |setting: &str, value: f64| {
            let fine = value.is_finite() && value > 0.0;
            if fine { Ok(()) } else { Err(format!("{setting} is {value}: must be above 0")) }
        };
        let count = match self {
            Self::Poisson { rate, count: Some(count), seconds: None } => {
                positive("arrivals.rate", *rate)?;
                f64::from(*count)
            }
            Self::Poisson { rate, count: None, seconds: Some(seconds) } => {
                positive("arrivals.rate", *rate)?;
                positive("arrivals.seconds", *seconds)?;
                rate * seconds
            }
            Self::Poisson { .. } => return Err("arrivals: set either count or seconds".to_owned()),
            Self::Stages { stages, pause_s } => {
                if !(0.0..1e9).contains(pause_s) {
                    return Err(format!("arrivals.pause_s is {pause_s}: must be at least 0"));
                }
                for stage in stages {
                    positive("arrivals.stages.rate", stage.rate)?;
                    positive("arrivals.stages.seconds", stage.seconds)?;
                }
                stages.iter().map(|stage| (stage.rate * stage.seconds).round()).sum()
            }
            Self::Closed { count } => f64::from(*count),
        };
        let fine = (0.5..=COUNT_MAX).contains(&count);
        if fine { Ok(()) } else { Err(format!("arrivals: {count} arrivals: must be 1 to {COUNT_MAX}")) }
    }

    /// End of all arrivals, later turns included, if given.
    pub(super) fn end_s(&self) -> Option<f64> {
        match self {
            Self::Poisson { seconds, .. } => *seconds,
            Self::Stages { .. } | Self::Closed { .. } => None,
        }
    }

    /// The times, in order.
    pub(super) fn starts(&self, rng: &mut Rng) -> Vec<f64> {
        match self {
            Self::Poisson { rate, count, seconds } => {
                let mut now = 0.0;
                let next = || {
                    now += exponential(rng) / rate;
                    Some(now)
                };
                let end = seconds.unwrap_or(f64::INFINITY);
                let count = count.map_or(COUNT_MAX as usize, |count| count as usize);
                std::iter::from_fn(next).take_while(|now| *now < end).take(count).collect()
            }
            Self::Stages { stages, pause_s } => {
                let mut starts: Vec<f64> = Vec::new();
                let mut begin = 0.0;
                for stage in stages {
                    let from = starts.len();
                    let count = (stage.rate * stage.seconds).round() as usize;
                    starts.extend((0..count).map(|_| begin + rng.unit() * stage.seconds));
                    starts[from..].sort_unstable_by(f64::total_cmp);
                    begin += stage.seconds + pause_s;
                }
                starts
            }
            Self::Closed { count } => vec![0.0; *count as usize],
        }
    }
}

/// A draw from the exponential distribution of mean 1.
pub(crate) fn exponential(rng: &mut Rng) -> f64 {
    -(1.0 - rng.unit()).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(arrivals: &Arrivals) -> Vec<f64> {
        arrivals.check().expect("they make sense");
        arrivals.starts(&mut Rng::new(1))
    }

    #[test]
    fn a_poisson_process_has_its_rate_and_exponential_gaps() {
        let times = starts(&Arrivals::Poisson { rate: 4.0, count: Some(20_000), seconds: None });
        assert_eq!(times.len(), 20_000);
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean) * (gap - mean)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.25).abs() < 0.005, "{mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.03, "{variance}");
        let timed = starts(&Arrivals::Poisson { rate: 4.0, count: None, seconds: Some(100.0) });
        assert_eq!(timed, times.into_iter().take_while(|&time| time < 100.0).collect::<Vec<_>>());
    }

    #[test]
    fn a_stage_has_exactly_its_share_and_a_pause_has_no_arrival() {
        let stages = vec![Stage { rate: 15.0, seconds: 50.0 }, Stage { rate: 3.0, seconds: 20.0 }];
        let times = starts(&Arrivals::Stages { stages, pause_s: 30.0 });
        assert_eq!(times.len(), 750 + 60);
        assert!(times.is_sorted());
        assert!(times[..750].iter().all(|time| (0.0..50.0).contains(time)));
        assert!(times[750..].iter().all(|time| (80.0..100.0).contains(time)));
    }

    #[test]
    fn arrivals_that_make_no_sense_are_named() {
        let check = |arrivals: Arrivals, expect: &str| {
            let why = arrivals.check().expect_err("it makes no sense");
            assert!(why.contains(expect), "{why}");
        };
        let poisson = |rate, count, seconds| Arrivals::Poisson { rate, count, seconds };
        check(poisson(0.0, Some(1), None), "arrivals.rate is 0");
        check(poisson(f64::NAN, Some(1), None), "arrivals.rate is NaN");
        check(poisson(1.0, None, None), "count or seconds");
        check(poisson(1.0, Some(1), Some(1.0)), "count or seconds");
        check(poisson(1.0, None, Some(1e12)), "must be 1 to");
        check(Arrivals::Closed { count: 0 }, "0 arrivals");
        check(Arrivals::Stages { stages: Vec::new(), pause_s: 0.0 }, "0 arrivals");
        let stages = vec![Stage { rate: 1.0, seconds: 1.0 }];
        check(Arrivals::Stages { stages, pause_s: -1.0 }, "pause_s is -1");
    }
}
