//! Distributions of lengths and times.

use kvlane_core::rng::Rng;
use serde::{Deserialize, Serialize};

/// A distribution of lengths in tokens or times in seconds. In files a number, `{min, max}` or `{median, p90, max}`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Spread {
    /// Constant.
    Fixed(f64),
    /// Uniform.
    Uniform(Uniform),
    /// Log-normal: a few are much larger than most.
    LogNormal(LogNormal),
}

/// Uniform from `min` to `max`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uniform {
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

/// A log-normal distribution given by two of its percentiles, truncated at `max`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogNormal {
    /// Half are below.
    pub median: f64,
    /// Nine in ten are below.
    pub p90: f64,
    /// Larger values are replaced by this.
    pub max: f64,
}

/// The standard normal distribution's 90th percentile.
const NORMAL_P90: f64 = 1.281_551_565_544_6;

// === impl Spread ===

impl Spread {
    /// Constant `value`.
    pub const fn fixed(value: u32) -> Self {
        Self::Fixed(value as f64)
    }

    /// From `min` to `max`.
    pub const fn uniform(min: f64, max: f64) -> Self {
        Self::Uniform(Uniform { min, max })
    }

    /// Log-normal.
    pub const fn log_normal(median: f64, p90: f64, max: f64) -> Self {
        Self::LogNormal(LogNormal { median, p90, max })
    }

    /// Fails unless all values are from `least` to `most`.
    pub(super) fn check(&self, setting: &str, least: f64, most: f64) -> Result<(), String> {
        let fine = match *self {
            Self::Fixed(value) => least <= value && value <= most,
            Self::Uniform(Uniform { min, max }) => least <= min && min <= max && max <= most,
            Self::LogNormal(LogNormal { median, p90, max }) => {
                0.0 < median && median <= p90 && p90 <= max && least <= max && max <= most
            }
        };
        let wants = "a number, {min, max} or {median, p90, max} in rising order";
        if fine { Ok(()) } else { Err(format!("{setting}: must be {wants}, from {least} to {most}")) }
    }

    /// A draw.
    pub(super) fn draw(&self, rng: &mut Rng) -> f64 {
        match *self {
            Self::Fixed(value) => value,
            Self::Uniform(Uniform { min, max }) => min + (max - min) * rng.unit(),
            Self::LogNormal(LogNormal { median, p90, max }) => {
                (median * (normal(rng) * (p90 / median).ln() / NORMAL_P90).exp()).min(max)
            }
        }
    }

    /// A draw as a number of tokens, at least `min`.
    pub(super) fn tokens(&self, rng: &mut Rng, min: u32) -> u32 {
        let drawn = match *self {
            // Both ends are as likely as the values between.
            Self::Uniform(Uniform { min, max }) => (min + (max - min + 1.0) * rng.unit()).floor().min(max),
            _ => self.draw(rng).round(),
        };
        (drawn as u32).max(min)
    }
}

/// A draw from the standard normal distribution (Box and Muller, 1958).
fn normal(rng: &mut Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.unit()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(spread: Spread) -> Vec<f64> {
        spread.check("s", 0.0, 1e6).expect("it makes sense");
        let mut rng = Rng::new(3);
        let mut draws: Vec<f64> = (0..20_000).map(|_| spread.draw(&mut rng)).collect();
        draws.sort_unstable_by(f64::total_cmp);
        draws
    }

    #[test]
    fn a_log_normal_spread_has_its_percentiles() {
        let draws = draws(Spread::log_normal(100.0, 1000.0, 5000.0));
        assert!((draws[10_000] / 100.0 - 1.0).abs() < 0.05, "{}", draws[10_000]);
        assert!((draws[18_000] / 1000.0 - 1.0).abs() < 0.05, "{}", draws[18_000]);
        assert_eq!(draws[19_999], 5000.0);
    }

    #[test]
    fn a_uniform_spread_has_both_its_ends() {
        let mut rng = Rng::new(1);
        let mut seen = [0; 4];
        (0..1000).for_each(|_| seen[Spread::uniform(1.0, 3.0).tokens(&mut rng, 0) as usize] += 1);
        assert!(seen[0] == 0 && seen[1..].iter().all(|&n| n > 250), "{seen:?}");
    }

    #[test]
    fn a_spread_in_a_file_is_a_number_or_says_what_it_is() {
        for (text, spread) in [
            ("7", Spread::fixed(7)),
            (r#"{"min":1.0,"max":2.0}"#, Spread::uniform(1.0, 2.0)),
            (r#"{"median":1.0,"p90":2.0,"max":3.0}"#, Spread::log_normal(1.0, 2.0, 3.0)),
        ] {
            assert_eq!(serde_json::from_str::<Spread>(text).unwrap(), spread);
        }
        assert!(serde_json::from_str::<Spread>(r#"{"min":1,"max":2,"p90":3}"#).is_err());
    }

    #[test]
    fn a_spread_that_makes_no_sense_is_named() {
        for spread in [
            Spread::Fixed(f64::NAN),
            Spread::fixed(0),
            Spread::uniform(3.0, 2.0),
            Spread::log_normal(5.0, 4.0, 9.0),
            Spread::log_normal(0.0, 4.0, 9.0),
            Spread::fixed(101),
        ] {
            let why = spread.check("question_tokens", 1.0, 100.0).expect_err("it makes no sense");
            assert!(why.starts_with("question_tokens: must be") && why.ends_with("from 1 to 100"), "{why}");
        }
    }
}
