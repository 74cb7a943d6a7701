//! A scenario that a few values describe: the flags of `kvlane simulate` without `--scenario`, and the arguments of
//! Python's `kvlane.simulate`.

use std::path::PathBuf;

use kvlane_core::policy::PolicyConfig;
use kvlane_core::request::Slo;
use kvlane_core::suggest::suggest;
use kvlane_sim::{Hints, OutputClaim};
use kvlane_trace::generate::Workload;

use super::{
    Arm, CacheKnowledge, ClosedLoop, ClosedStart, Conversations, Group, OpenLoop, Scenario, Stage,
    WorkloadSpec,
};

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
    /// How those begin.
    pub closed: ClosedStart,
    /// The policies to compare, by name.
    pub policies: Vec<String>,
    /// Source of cache knowledge of all of them.
    pub cache_knowledge: CacheKnowledge,
    /// Sets of hints to compare, by name (see [`Plain::HINTS`]), under session admission. Without any, policies get what
    /// they get by default, without session admission.
    pub hints: Vec<String>,
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
    /// No set of hints is called so.
    #[error("hints: {meant}", meant = hint(.0))]
    UnknownHints(String),
    /// The load is given in two ways.
    #[error("load, rate and concurrency exclude each other")]
    TwoLoads,
}

/// Which kind of workload was meant.
fn kind(name: &str) -> String {
    suggest(name, Workload::KINDS.iter().copied(), "`kvlane trace generate --kinds` lists all.")
}

/// Which set of hints was meant.
fn hint(name: &str) -> String {
    let known = Plain::HINTS.map(|(name, _)| name);
    suggest(name, known, "they are none, output, conversation, return, last and all.")
}

// === impl Plain ===

impl Plain {
    /// The policies that are compared unless others are named.
    pub const POLICIES: [&str; 4] = ["round_robin", "cache_aware", "lmetric", "fleet_cost"];
    /// Sets of hints, each with those of the sets that it needs.
    pub const HINTS: [(&str, Hints); 6] = {
        let none =
            Hints { conversation: false, output: OutputClaim::None, end: false, last: false, slo: Slo::NONE };
        let conversation = Hints { conversation: true, ..none };
        [
            ("none", none),
            ("output", Hints { output: OutputClaim::Exact, ..none }),
            ("conversation", conversation),
            ("return", Hints { end: true, ..conversation }),
            ("last", Hints { last: true, ..conversation }),
            ("all", Hints { output: OutputClaim::Exact, end: true, last: true, ..conversation }),
        ]
    };
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
        let Self { mut fleet, trace, workload, load, rate, concurrency, closed, .. } = self;
        let Self { policies, cache_knowledge, hints, .. } = self;
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
        let mut policies: Vec<Arm> = policies.iter().map(arm).collect::<Result<_, _>>()?;
        if !hints.is_empty() {
            let named = |name: &String| {
                let known = Self::HINTS.into_iter().find(|(known, _)| known == name);
                known.ok_or_else(|| PlainError::UnknownHints(name.clone()))
            };
            let sets: Vec<_> = hints.iter().map(named).collect::<Result<_, _>>()?;
            let with = |arm: &Arm, (name, hints): &(&str, Hints)| Arm {
                arm: format!("{} {name}", arm.arm),
                hints: *hints,
                session_admission: true,
                ..arm.clone()
            };
            policies = policies.iter().flat_map(|arm| sets.iter().map(|set| with(arm, set))).collect();
        }
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
            warm_up: (closed.warm_up > 0).then_some(Conversations::PerClient(closed.warm_up)),
            stagger_s: closed.stagger_s,
            length_spread: closed.length_spread,
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
    fn each_policy_is_compared_under_each_set_of_hints() {
        let hints = ["none", "return"].map(str::to_owned).to_vec();
        let scenario = Plain { hints, ..chat() }.scenario().expect("a scenario");
        let arms: Vec<_> = scenario.policies.iter().map(|arm| (arm.arm.as_str(), arm.hints.end)).collect();
        assert_eq!(arms, [("least_load none", false), ("least_load return", true)]);
        assert!(scenario.policies.iter().all(|arm| arm.session_admission));
        let plain = chat().scenario().expect("a scenario");
        assert_eq!((plain.policies[0].hints, plain.policies[0].session_admission), (Hints::default(), false));
    }

    #[test]
    fn what_is_unknown_or_contradictory_is_named() {
        let wrong = |plain: Plain| plain.scenario().expect_err("wrong").to_string();
        assert!(wrong(Plain { workload: None, ..chat() }).starts_with("nothing to simulate"));
        let kind = wrong(Plain { workload: Some("chatter".into()), ..chat() });
        assert!(kind.starts_with("workload chatter: unknown kind: did you mean `chat`"));
        let hints = wrong(Plain { hints: vec!["retrun".into()], ..chat() });
        assert!(hints.starts_with("hints: ") && hints.contains("`return`"), "{hints}");
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
