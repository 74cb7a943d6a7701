//! Adapters (LoRA) for the requests of a trace that names none.

use kvlane_core::rng::Rng;
use serde::{Deserialize, Serialize};

use crate::trace::Trace;
use crate::zipf::Zipf;

/// How often each adapter is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Popularity {
    /// Number of adapters.
    pub count: u32,
    /// Zipf's exponent: adapter number `n` is drawn in proportion to `1 / n^skew`. 0 makes all equally likely.
    #[serde(default = "one")]
    pub skew: f64,
}

/// Most adapters.
const COUNT_MAX: u32 = 100_000;
/// Separates the draws from those of contents and times.
const STREAM: u64 = 0x1A;

fn one() -> f64 {
    1.0
}

// === impl Popularity ===

impl Popularity {
    /// # Errors
    /// If there are no adapters or too many, or the exponent is invalid.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=COUNT_MAX).contains(&self.count) {
            return Err(format!("adapters.count is {}: must be 1 to {COUNT_MAX}", self.count));
        }
        if !(0.0..=100.0).contains(&self.skew) {
            return Err(format!("adapters.skew is {}: must be 0 to 100", self.skew));
        }
        Ok(())
    }
}

// === impl Trace ===

impl Trace {
    /// Draws an adapter for each session, the same for all its requests.
    pub fn draw_adapters(&mut self, popularity: &Popularity, seed: u64) {
        let zipf = Zipf::new(popularity.count, popularity.skew);
        let mut rng = Rng::new(seed ^ STREAM << 56);
        let sessions =
            self.requests.iter().map(|request| request.session).max().map_or(0, |last| last as usize + 1);
        let of: Vec<u32> = (0..sessions).map(|_| zipf.draw(&mut rng)).collect();
        for request in &mut self.requests {
            request.adapter = of.get(request.session as usize).copied();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Workload, generate};

    #[test]
    fn a_session_has_one_adapter_and_the_first_is_the_most_popular() {
        let mut trace = generate(&Workload::by_kind("chat").expect("a kind"), 1).expect("a trace");
        let popularity = Popularity { count: 8, skew: 1.0 };
        trace.draw_adapters(&popularity, 1);
        let mut of = std::collections::BTreeMap::new();
        for request in &trace.requests {
            assert_eq!(*of.entry(request.session).or_insert(request.adapter), request.adapter);
        }
        let count = |wanted| of.values().filter(|adapter| **adapter == Some(wanted)).count();
        assert!(count(0) > count(7) && of.values().all(|adapter| adapter.is_some_and(|n| n < 8)), "{of:?}");
        assert!(Popularity { count: 0, ..popularity }.check().is_err());
        assert!(Popularity { skew: -1.0, ..popularity }.check().is_err());
    }
}
