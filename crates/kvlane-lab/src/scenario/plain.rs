//! A scenario that a few values describe: the flags of `kvlane simulate` without `--scenario`, and the arguments of
//! Python's `kvlane.simulate`.

use std::path::PathBuf;

use kvlane_core::policy::PolicyConfig;
use kvlane_core::suggest::suggest;
use kvlane_trace::generate::Workload;

use super::{Arm, CacheKnowledge, ClosedLoop, Conversations, Group, OpenLoop, Scenario, Stage, WorkloadSpec};

/// One group of equal engines, one workload, and policies with their defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plain {
    /// The engines. One without model, preset and timing file is a [`Plain::PRESET`].
    pub fleet: Group,
    /// A trace. This or `workload`.
    pub trace: Option<PathBuf>,
    /// The kind of a workload to generate, with its default settings.
    pub workload: Option<String>,
    /// Factors on the rate at which conversations begin. At most one of this and the next two.
    pub load: Vec<f64>,
    /// Rates of conversations.
    pub rate: Vec<Stage>,
    /// Numbers of closed-loop clients, each of which has [`Plain::CONVERSATIONS`].
    pub concurrency: Vec<u32>,
    /// The policies to compare, by name.
    pub policies: Vec<String>,
    /// Source of cache knowledge of all of them.
    pub cache_knowledge: CacheKnowledge,
}

/// Why the values describe no scenario.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlainError {
    /// There is neither a trace nor a workload.
    #[error("nothing to simulate: a trace or a workload is required")]
    NoRequests,
    /// There are a trace and a workload.
    #[error("trace and workload exclude each other")]
    TwoWorkloads,
    /// No workload is called so.
    #[error("workload {0}: unknown kind: {meant}", meant = kind(.0))]
    UnknownWorkload(String),
    /// No policy is called so.
    #[error("policy: {meant}", meant = PolicyConfig::unknown(.0))]
    UnknownPolicy(String),
    /// The load is given in two ways.
    #[error("load, rate and concurrency exclude each other")]
    TwoLoads,
}

/// Which kind of workload was meant.
fn kind(name: &str) -> String {
    suggest(name, Workload::KINDS.iter().copied(), "`kvlane trace generate --kinds` lists all.")
}

// === impl Plain ===

impl Plain {
    /// The policies that are compared unless others are named.
    pub const POLICIES: [&str; 4] = ["round_robin", "cache_aware", "lmetric", "fleet_cost"];
    /// The number of engines unless another is given.
    pub const ENGINES: u32 = 4;
    /// The engine unless another is named.
    pub const PRESET: &str = "llama-3.3-70b@h100x4";
    /// Conversations of each closed-loop client.
    pub const CONVERSATIONS: u32 = 10;

    /// The scenario.
    ///
    /// # Errors
    /// A name is unknown, or the values contradict each other.
    pub fn scenario(self) -> Result<Scenario, PlainError> {
        let Self { mut fleet, trace, workload, load, rate, concurrency, policies, cache_knowledge } = self;
        match (&trace, &workload) {
            (None, None) => return Err(PlainError::NoRequests),
            (Some(_), Some(_)) => return Err(PlainError::TwoWorkloads),
            _ => {}
        }
        if [!load.is_empty(), !rate.is_empty(), !concurrency.is_empty()]
            .iter()
            .filter(|given| **given)
            .count()
            > 1
        {
            return Err(PlainError::TwoLoads);
        }
        let by_kind =
            |kind: &String| Workload::by_kind(kind).ok_or(PlainError::UnknownWorkload(kind.clone()));
        let generate = workload.as_ref().map(by_kind).transpose()?;
        let arm = |name: &String| {
            let policy =
                PolicyConfig::by_name(name).ok_or_else(|| PlainError::UnknownPolicy(name.clone()))?;
            Ok(Arm { cache_knowledge, ..Arm::new(policy) })
        };
        let policies = policies.iter().map(arm).collect::<Result<_, _>>()?;
        if fleet.preset.is_none() && fleet.model.is_none() && fleet.timing.is_none() {
            fleet.preset = Some(Self::PRESET.to_owned());
        }
        let open_loop = (!rate.is_empty()).then_some(OpenLoop {
            stages: rate,
            back_to_back: false,
            pause_s: 0.0,
            warm_up: None,
        });
        let closed_loop = (!concurrency.is_empty()).then_some(ClosedLoop {
            concurrency,
            conversations: Conversations::PerClient(Self::CONVERSATIONS),
        });
        Ok(Scenario {
            scenario: workload.unwrap_or_else(|| "trace".to_owned()),
            about: String::new(),
            fleet: fleet.into(),
            workload: WorkloadSpec { trace, generate, adapters: None, load, open_loop, closed_loop },
            policies,
            faults: Vec::new(),
            seeds: 1,
            first_seed: 1,
            judgement: Default::default(),
            published: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat() -> Plain {
        Plain { workload: Some("chat".into()), policies: vec!["least_load".into()], ..Plain::default() }
    }

    #[test]
    fn an_engine_without_a_name_is_the_default_one() {
        let scenario = chat().scenario().expect("a scenario");
        assert_eq!(scenario.fleet.groups[0].preset.as_deref(), Some(Plain::PRESET));
        let fleet = Group { timing: Some("t.json".into()), ..Group::default() };
        let scenario = Plain { fleet, ..chat() }.scenario().expect("a scenario");
        assert_eq!(scenario.fleet.groups[0].preset, None);
    }

    #[test]
    fn what_is_unknown_or_contradictory_is_named() {
        let wrong = |plain: Plain| plain.scenario().expect_err("wrong").to_string();
        assert!(wrong(Plain { workload: None, ..chat() }).starts_with("nothing to simulate"));
        let kind = wrong(Plain { workload: Some("chatter".into()), ..chat() });
        assert!(kind.starts_with("workload chatter: unknown kind: did you mean `chat`"));
        let policy = wrong(Plain { policies: vec!["best".into()], ..chat() });
        assert!(
            policy.starts_with("policy: unknown policy 'best': did you mean ")
                && policy.contains("least_load")
        );
        assert_eq!(
            wrong(Plain { trace: Some("t".into()), ..chat() }),
            "trace and workload exclude each other"
        );
        let twice = Plain { load: vec![1.0], concurrency: vec![1], ..chat() };
        assert_eq!(wrong(twice), "load, rate and concurrency exclude each other");
    }
}
