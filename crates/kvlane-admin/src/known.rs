//! What a pool has learned of an endpoint, copied while the scheduler is locked.

use kvlane_core::endpoint::Endpoint;
use kvlane_core::rates::Rates;
use kvlane_core::scheduler::Scheduler;

/// An endpoint, its rates, and their standard errors for prefill and decoding, as shares of the rates.
pub(crate) struct Known {
    pub(crate) endpoint: Endpoint,
    pub(crate) rates: Rates,
    pub(crate) rate_errors: [f64; 2],
}

// === impl Known ===

impl Known {
    pub(crate) fn of(scheduler: &Scheduler, endpoint: &Endpoint) -> Self {
        let (rates, rate_errors) = (scheduler.rates(endpoint), scheduler.rate_errors(endpoint));
        Self { endpoint: endpoint.clone(), rates, rate_errors }
    }

    /// All endpoints of a pool.
    pub(crate) fn all(scheduler: &Scheduler) -> Vec<Self> {
        scheduler.pool().endpoints().map(|endpoint| Self::of(scheduler, endpoint)).collect()
    }
}
