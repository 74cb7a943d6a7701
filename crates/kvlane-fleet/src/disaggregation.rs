//! The configuration of disaggregated serving: section `disaggregation`.

use std::time::Duration;

use kvlane_core::config::TIME;
use kvlane_core::disaggregation::{Part, Role};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::section;
use kvlane_wire::disaggregation::Connector;

use crate::routing::policy_or_none;
use crate::worker::Worker;

section! {
    /// How the prefill and the decode of a request are shared by two workers.
    pub struct Disaggregation {
        /// How KV blocks get from the engine that computes a prompt to the one that decodes its answer; null: requests
        /// are not split. Workers with the role `both` can do either for one another.
        pub connector: Option<Connector> = None;
        /// Uncached prompt tokens from which a request is split, whatever that costs; without it, its price decides under
        /// the policy `fleet_cost`, and the roles of the workers under any other.
        pub split_tokens_min: Option<u32> = None;
        /// Picks the worker that computes a prompt, where `routing.policy` picks the one that decodes its answer and knows
        /// no price of a split; the same policy if not set.
        #[serde(deserialize_with = "policy_or_none")]
        pub prefill_policy: Option<PolicyConfig> = None;
        /// Longest time from the end of a prefill to the first token of its answer. Then the request is served by one
        /// worker.
        #[serde(with = "humantime_serde")]
        pub transfer_timeout: Duration = Duration::from_secs(10), in TIME;
        /// Most prefill workers per decode worker with which the gateway tries a transfer before requests are split between
        /// them; 0: none. Only for connectors whose first transfer takes longer (`nixl`).
        pub warm_up_pairs: u32 = 16, in 0..=4096;
    }
}

/// The network of all workers of a fleet: they have one connector.
const NETWORK: u16 = 0;

// === impl Disaggregation ===

impl Disaggregation {
    /// The part of a worker's endpoints.
    pub fn part_of(&self, worker: &Worker) -> Part {
        let role = worker.spec.role;
        match self.connector {
            Some(connector) => Part {
                role,
                // An engine that is either one or the other says which.
                network: (role != Role::Both || connector.takes_either_leg()).then_some(NETWORK),
                serves_alone: role == Role::Both || connector.is_elastic(),
            },
            None => Part { role, ..Part::default() },
        }
    }

    /// Whether workers with this role are used.
    pub fn uses(&self, role: Role) -> bool {
        match role {
            Role::Both | Role::Decode => true,
            Role::Prefill => self.connector.is_some(),
            Role::Encode => self.connector == Some(Connector::LlmdSidecar),
        }
    }
}
