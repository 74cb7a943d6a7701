//! Configuration of a pool's scheduler.

use serde::{Deserialize, Serialize};

use super::shadow::Shadow;
use super::{Output, Scheduler};
use crate::breaker;
use crate::budget;
use crate::policy::PolicyConfig;
use crate::session_admission::SessionAdmission;
use crate::time::Nanos;
use crate::timing::TimingModel;

/// Configuration of a pool's scheduler. A field has the name of its key in the section `routing`; recordings made
/// before have the aliases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// The placement policy.
    pub policy: PolicyConfig,
    /// Picks where prompts are computed that another endpoint decodes, if `policy` knows no price of that; without it, a
    /// second one like `policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_policy: Option<PolicyConfig>,
    /// Uncached prompt tokens from which a request is split between two endpoints, where its price should not decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split_tokens_min: Option<u32>,
    /// Requests in flight in the whole pool beyond which further requests wait; 0 is no limit.
    #[serde(alias = "in_flight_max")]
    pub max_concurrent_requests: u32,
    /// Requests in flight at one endpoint beyond which it accepts none; 0 is no limit. While all endpoints are full,
    /// requests wait.
    #[serde(default, alias = "endpoint_in_flight_max")]
    pub max_requests_per_endpoint: u32,
    /// Requests that may wait; beyond that they are rejected.
    #[serde(alias = "queue_len_max")]
    pub queue_size: u32,
    /// How long a request may wait in the queue.
    pub queue_timeout: Nanos,
    /// Timing model of the endpoints, if known: learned rates start from it. Otherwise they start from typical
    /// hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Box<TimingModel>>,
    /// Whether new conversations wait while active ones fill the fleet's caches.
    #[serde(default)]
    pub session_admission: bool,
    /// Circuit breaker: when a failing endpoint gets no more requests, and for how long.
    #[serde(default)]
    pub breaker: breaker::Config,
    /// How many requests may be retried.
    #[serde(default)]
    pub retries: budget::Config,
    /// How many requests may be sent to a second endpoint because the first is late.
    #[serde(default = "budget::Config::hedges")]
    pub hedges: budget::Config,
    /// Shadow policy: evaluated for every decision, without effect.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "shadow")]
    pub shadow_policy: Option<PolicyConfig>,
    /// Decisions kept for inspection.
    #[serde(alias = "receipts_max")]
    pub receipts: u32,
    /// Seed of all randomness, used at construction; a later change has no effect.
    pub seed: u64,
}

// === impl Config ===

impl Config {
    /// A pool with this policy, without limits and without receipts.
    pub fn new(policy: PolicyConfig) -> Self {
        Self {
            policy,
            prefill_policy: None,
            split_tokens_min: None,
            max_concurrent_requests: 0,
            max_requests_per_endpoint: 0,
            queue_size: 0,
            queue_timeout: Nanos::ZERO,
            timing: None,
            session_admission: false,
            breaker: breaker::Config::default(),
            retries: budget::Config::default(),
            hedges: budget::Config::HEDGES,
            shadow_policy: None,
            receipts: 0,
            seed: 0,
        }
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Changes the configuration. Queued requests keep their place and deadline. A different policy starts in its
    /// initial state. What was learned about endpoints and answers stays; learned speeds are reset if the timing model
    /// changes.
    pub(super) fn configure(&mut self, now: Nanos, config: Config, out: &mut Vec<Output>) {
        self.splits.configure(&self.config, &config);
        if config.policy != self.config.policy {
            self.policy = config.policy.build();
        }
        if config.shadow_policy != self.config.shadow_policy || config.policy != self.config.policy {
            self.shadow = Shadow::of(&config);
        }
        if config.timing != self.config.timing {
            self.learning.set_base(config.timing.as_deref());
            self.pool.endpoints_mut().for_each(|endpoint| endpoint.pace = Default::default());
            self.review_learned(now);
        }
        self.queue.set_len_max(config.queue_size as usize);
        self.receipts.set_kept_max(config.receipts as usize);
        match (config.session_admission, self.admission.is_some()) {
            (true, false) => {
                // Requests already in flight were not admitted; only queued ones are counted.
                let mut admission = SessionAdmission::default();
                self.queue.ungated_sessions().for_each(|session| admission.enter(now, session));
                let dequeued = self.dequeued.values().filter_map(|dequeued| dequeued.waiting.request.session);
                dequeued.for_each(|session| admission.enter(now, session));
                self.flights.forget_turns();
                self.admission = Some(admission);
                self.update_admission_capacity();
            }
            (false, true) => self.admission = None,
            _ => {}
        }
        if config.breaker.failure_threshold == 0 {
            for endpoint in self.pool.endpoints_mut() {
                if endpoint.breaker.close(now) {
                    out.push(Output::Breaker { endpoint: endpoint.id, state: endpoint.breaker.state() });
                }
            }
        }
        self.config = config;
        (0..self.pool.len()).for_each(|slot| self.pool.note_change(slot));
        self.review(now, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breaker::State;
    use crate::decision::Rejection;
    use crate::endpoint::EndpointId;
    use crate::request::RequestId;
    use crate::scheduler::Input;
    use crate::scheduler::tests::{World, config, endpoint, placed};

    fn configure(world: &mut World, config: &Config) -> Vec<Output> {
        world.step(Input::Configured { config: Box::new(config.clone()) })
    }

    #[test]
    fn limits_and_policy_are_taken_over_and_what_is_known_stays() {
        let config = Config {
            max_concurrent_requests: 1,
            queue_timeout: Nanos::from_secs(9),
            ..config("round_robin")
        };
        let mut world = World::new(config.clone(), 2);
        assert_eq!(placed(&world.arrive(0, 10, &[])), Some(endpoint(0)));
        assert_eq!((world.arrive(1, 10, &[]), world.arrive(2, 10, &[])), (vec![], vec![]));
        let roomy = Config { max_concurrent_requests: 2, queue_size: 0, ..config.clone() };
        assert_eq!(
            placed(&configure(&mut world, &roomy)),
            Some(endpoint(1)),
            "the queued request gets the added slot"
        );
        assert_eq!(world.scheduler.queued(), 1, "queued requests stay queued");
        let out = world.arrive(3, 10, &[]);
        assert!(matches!(out[..], [Output::Reject { refused, .. }] if refused.why == Rejection::QueueFull));
        let cached = Config { policy: PolicyConfig::by_name("prefix_aware").expect("one"), ..roomy };
        configure(&mut world, &cached);
        for request in [0, 1] {
            world.step(Input::Finished { request: RequestId(request) });
        }
        let holder: EndpointId = endpoint(0);
        assert_eq!(placed(&world.arrive(4, 100, &[(holder, 96)])), Some(holder));
    }

    #[test]
    fn a_recording_with_the_earlier_names_of_keys_is_read() {
        let config = Config { max_requests_per_endpoint: 2, receipts: 3, ..config("round_robin") };
        let mut text = serde_json::to_string(&config).expect("JSON");
        for (name, earlier) in [
            ("max_concurrent_requests", "in_flight_max"),
            ("max_requests_per_endpoint", "endpoint_in_flight_max"),
            ("queue_size", "queue_len_max"),
            ("receipts", "receipts_max"),
        ] {
            assert!(text.contains(name), "{text}");
            text = text.replace(&format!("\"{name}\""), &format!("\"{earlier}\""));
        }
        assert_eq!(serde_json::from_str::<Config>(&text).expect("JSON"), config);
    }

    #[test]
    fn breakers_that_are_switched_off_are_closed() {
        let mut world = World::new(config("round_robin"), 1);
        let breaker = breaker::Config { failure_threshold: 1, ..breaker::Config::default() };
        configure(&mut world, &Config { breaker, ..config("round_robin") });
        world.arrive(0, 10, &[]);
        world.step(Input::Failed { request: RequestId(0) });
        assert_eq!(world.scheduler.pool().get(endpoint(0)).expect("here").breaker.state(), State::Open);
        let off = breaker::Config { failure_threshold: 0, ..breaker };
        let out = configure(&mut world, &Config { breaker: off, ..config("round_robin") });
        assert_eq!(out, [Output::Breaker { endpoint: endpoint(0), state: State::Closed }]);
    }
}
