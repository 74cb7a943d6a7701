//! A service outside the fleet, such as a public API, and what it may be sent in an hour.

use std::sync::{Arc, Mutex, PoisonError};

use kvlane_core::time::Nanos;

use crate::worker::config::ProviderSpec;

const HOUR_S: f64 = 3600.0;

/// The service, and what is left of its budget.
pub struct Provider {
    /// Its name in the configuration.
    pub name: Arc<str>,
    budget: Option<Mutex<Budget>>,
}

/// Tokens that are restored evenly, up to those of an hour.
struct Budget {
    per_hour: f64,
    /// Below zero if answers were longer than what was left.
    left: f64,
    at: Nanos,
    is_told: bool,
}

// === impl Provider ===

impl Provider {
    /// One whose budget is unused.
    pub fn new(spec: &ProviderSpec) -> Self {
        let budget = spec.tokens_per_hour.map(|tokens| {
            let per_hour = tokens as f64;
            Mutex::new(Budget { per_hour, left: per_hour, at: Nanos::ZERO, is_told: false })
        });
        Self { name: spec.name.as_str().into(), budget }
    }

    /// The name of the pool of one of its models.
    pub fn pool_of(name: &str, model: &str) -> String {
        format!("{name}:{model}")
    }

    /// The name that the service itself has for the model of a pool.
    pub fn own_name<'a>(&self, pool: &'a str) -> &'a str {
        pool.strip_prefix(&*self.name).and_then(|rest| rest.strip_prefix(':')).unwrap_or(pool)
    }

    /// Whether it may get a request now. Those in flight are charged when they end.
    pub fn has_budget(&self, now: Nanos) -> bool {
        self.change(now, 0).is_none_or(|left| left > 0.0)
    }

    /// Charges the tokens of a prompt and its answer.
    pub fn spend(&self, now: Nanos, tokens: u64) {
        self.change(now, tokens);
    }

    fn change(&self, now: Nanos, tokens: u64) -> Option<f64> {
        let mut budget = self.budget.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let restored = (now - budget.at).as_secs_f64() * budget.per_hour / HOUR_S;
        budget.left = (budget.left + restored).min(budget.per_hour) - tokens as f64;
        budget.at = now;
        let is_used_up = budget.left <= 0.0;
        if is_used_up && !budget.is_told {
            tracing::warn!(
                provider = &*self.name,
                tokens_per_hour = budget.per_hour,
                "the budget of a provider is used up; it gets no request until some of it is restored"
            );
        }
        budget.is_told = is_used_up;
        Some(budget.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_restored_evenly_up_to_an_hours() {
        let at = Nanos::from_secs;
        let spec = |tokens| ProviderSpec { name: "p".into(), tokens_per_hour: tokens };
        let provider = Provider::new(&spec(Some(3600)));
        assert!(provider.has_budget(at(0)));
        provider.spend(at(0), 3700);
        assert!(!provider.has_budget(at(100)), "a hundred tokens over it take a hundred seconds");
        assert!(provider.has_budget(at(101)));
        // A day later it has no more than an hour's.
        provider.spend(at(86_400), 3600);
        assert!(!provider.has_budget(at(86_400)));
        assert!(!Provider::new(&spec(Some(0))).has_budget(at(7200)), "nothing is nothing");
        let boundless = Provider::new(&spec(None));
        boundless.spend(at(0), u64::MAX);
        assert!(boundless.has_budget(at(0)));
    }

    #[test]
    fn the_services_own_name_of_a_model_may_have_colons() {
        let provider = Provider::new(&ProviderSpec { name: "p".into(), tokens_per_hour: None });
        assert_eq!(provider.own_name(&Provider::pool_of("p", "m:8b")), "m:8b");
    }
}
