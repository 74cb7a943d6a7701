//! Latency objectives of requests by client, model and priority: the configuration section `objectives`.
//!
//! The first entry that matches a request gives its targets; a header of the request replaces the target that it names
//! (`hints.ttft_slo_headers`, `hints.tpot_slo_headers`).

use std::collections::BTreeMap;
use std::time::Duration;

use arc_swap::ArcSwap;
use kvlane_core::config::{ConfigError, TIME, within, wrong};
use kvlane_core::request::{IfMissed, Slo, TenantKey};
use kvlane_core::{section, setting};
use kvlane_fleet::snapshot::Served;
use serde::{Deserialize, Serialize};

use crate::alias::Alias;
use crate::attributes::{AttributeReader, Attributes};
use crate::auth::PRIORITY_MAX;
use crate::limits::config::ANY;

section! {
    /// The latency objectives of the requests that it matches.
    #[derive(Eq)]
    pub struct ObjectiveSpec {
        /// The name of a key, or of a tenant that a trusted key's holder names; `*` is all.
        pub key: String = ANY.into();
        /// A base model, an adapter, or a name of `models`; `*` is all.
        pub model: String = ANY.into();
        /// The priority of the requests: a number, or a name of `hints.priorities`; all if not set.
        pub priority: Option<PriorityName> = None;
        /// Target for the time to first token, as in `500ms`, from when the request is received.
        #[serde(with = "humantime_serde")]
        pub ttft: Option<Duration> = None, in TIME;
        /// Target for the mean time per output token after the first, as in `50ms`.
        #[serde(with = "humantime_serde")]
        pub tpot: Option<Duration> = None, in TIME;
        /// What happens to a request that should miss its targets on every endpoint: `refuse`: it gets 429 with
        /// `Retry-After`; `best_effort`: it is placed as if it had none; `by_priority`: it is refused if its priority
        /// is negative, else placed.
        pub if_missed: IfMissed = IfMissed::ByPriority;
    }
}

/// A priority in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PriorityName {
    /// Its number.
    Number(i8),
    /// Its name in `hints.priorities`.
    Name(String),
}

setting!(Any: PriorityName);

/// The objectives of a gateway. Replaced whole.
#[derive(Default)]
pub struct Objectives(ArcSwap<Vec<Entry>>);

struct Entry {
    tenants: Option<[TenantKey; 2]>,
    model: Option<String>,
    priority: Option<i8>,
    slo: Slo,
}

// === impl ObjectiveSpec ===

impl ObjectiveSpec {
    /// Whether it matches every request that the other one matches.
    fn covers(&self, other: &Self, priorities: &BTreeMap<String, i8>) -> bool {
        let all = |own: &str, theirs: &str| own == ANY || own == theirs;
        let number = |spec: &Self| spec.priority.as_ref().map(|priority| priority.number(priorities));
        all(&self.key, &other.key)
            && all(&self.model, &other.model)
            && number(self).is_none_or(|own| number(other) == Some(own))
    }
}

// === impl PriorityName ===

impl PriorityName {
    fn number(&self, priorities: &BTreeMap<String, i8>) -> Option<i8> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Name(name) => priorities.get(name).copied(),
        }
    }
}

/// Checks all entries; `priorities` are those of `hints`.
///
/// # Errors
/// The first entry that is wrong.
pub fn validate(objectives: &[ObjectiveSpec], priorities: &BTreeMap<String, i8>) -> Result<(), ConfigError> {
    for (n, spec) in objectives.iter().enumerate() {
        let field = format!("objectives[{n}]");
        if spec.key.is_empty() || spec.model.is_empty() {
            return wrong(&field, "a key or model is empty: write its name, or '*' for all".into());
        }
        match &spec.priority {
            Some(PriorityName::Number(number)) => {
                within(&format!("{field}.priority"), number, -PRIORITY_MAX..=PRIORITY_MAX)?;
            }
            Some(PriorityName::Name(name)) if !priorities.contains_key(name) => {
                let problem =
                    format!("no priority is called '{name}': add it to hints.priorities, or write a number");
                return wrong(&format!("{field}.priority"), problem);
            }
            _ => {}
        }
        if let Some(first) = objectives[..n].iter().position(|first| first.covers(spec, priorities)) {
            let problem = format!(
                "it is never used, as objectives[{first}] matches all its requests: move it before that"
            );
            return wrong(&field, problem);
        }
    }
    Ok(())
}

// === impl Objectives ===

impl Objectives {
    /// Replaces the configuration. Requests that are routed already keep their targets.
    pub fn configure(
        &self,
        specs: &[ObjectiveSpec],
        priorities: &BTreeMap<String, i8>,
        attributes: &AttributeReader,
    ) {
        let millis =
            |time: Option<Duration>| time.map(|time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX));
        let named = |name: &str| (name != ANY).then(|| name.to_owned());
        let entry = |spec: &ObjectiveSpec| Entry {
            tenants: named(&spec.key).map(|key| attributes.tenants_called(&key)),
            model: named(&spec.model),
            priority: spec.priority.as_ref().and_then(|priority| priority.number(priorities)),
            slo: Slo { ttft_ms: millis(spec.ttft), tpot_ms: millis(spec.tpot), if_missed: spec.if_missed },
        };
        self.0.store(specs.iter().map(entry).collect::<Vec<_>>().into());
    }

    /// Adds the objectives of a request to this model to its attributes.
    pub(crate) fn apply(&self, attributes: Attributes, served: &Served, alias: Option<&Alias>) -> Attributes {
        let models = match alias {
            Some(alias) => [Some(&*alias.asked), None],
            None => [Some(&*served.pool.model), served.adapter.as_deref()],
        };
        let slo = self.of(attributes.tenant(), models, attributes.priority(), attributes.slo());
        attributes.with_slo(slo)
    }

    /// The objectives of a request that asks for one of these names of a model, and whose headers say `said`.
    fn of(&self, tenant: Option<TenantKey>, models: [Option<&str>; 2], priority: i8, said: Slo) -> Slo {
        let entries = self.0.load();
        let matches = |entry: &&Entry| {
            entry.tenants.is_none_or(|named| tenant.is_some_and(|tenant| named.contains(&tenant)))
                && entry.model.as_deref().is_none_or(|model| models.contains(&Some(model)))
                && entry.priority.is_none_or(|own| own == priority)
        };
        let usual = entries.iter().find(matches).map(|entry| entry.slo).unwrap_or_default();
        let (ttft_ms, tpot_ms) = (said.ttft_ms.or(usual.ttft_ms), said.tpot_ms.or(usual.tpot_ms));
        match (ttft_ms, tpot_ms) {
            (None, None) => Slo::default(),
            _ => Slo { ttft_ms, tpot_ms, if_missed: usual.if_missed },
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;
    use crate::attributes;
    use crate::salt::SaltKey;

    fn spec(key: &str, model: &str, priority: Option<PriorityName>, ttft_ms: u64) -> ObjectiveSpec {
        let ttft = (ttft_ms > 0).then(|| Duration::from_millis(ttft_ms));
        ObjectiveSpec { key: key.into(), model: model.into(), priority, ttft, ..ObjectiveSpec::default() }
    }

    fn named(name: &str) -> Option<PriorityName> {
        Some(PriorityName::Name(name.into()))
    }

    #[test]
    fn the_first_entry_that_matches_counts_and_a_header_replaces_its_target() {
        let hints = attributes::Config::default();
        let reader = AttributeReader::new(&hints, SaltKey::generate());
        let mut headers = HeaderMap::new();
        headers.insert("x-llm-d-inference-fairness-id", "ann".parse().expect("a value"));
        let ann = reader.read(&headers, None, None).tenant();
        let specs = [
            spec("ann", "m", None, 100),
            spec("*", "m", named("interactive"), 200),
            ObjectiveSpec { if_missed: IfMissed::Refuse, ..spec("*", "*", named("bulk"), 0) },
            ObjectiveSpec { tpot: Some(Duration::from_millis(50)), ..spec("*", "*", None, 400) },
        ];
        assert_eq!(validate(&specs, &hints.priorities), Ok(()));
        let objectives = Objectives::default();
        objectives.configure(&specs, &hints.priorities, &reader);
        let of =
            |tenant, model, priority| objectives.of(tenant, [None, Some(model)], priority, Slo::default());
        assert_eq!(of(ann, "m", 50).ttft_ms, Some(100));
        assert_eq!(of(None, "m", 50).ttft_ms, Some(200));
        assert_eq!(of(ann, "other", 50).ttft_ms, Some(400));
        assert_eq!(of(None, "m", 1).ttft_ms, Some(400));
        assert_eq!(of(None, "m", -50), Slo::default(), "an entry without targets is an exception");
        let said = Slo { ttft_ms: Some(9), ..Slo::default() };
        let with = |priority| objectives.of(None, [Some("m"), None], priority, said);
        assert_eq!(with(0), Slo { ttft_ms: Some(9), tpot_ms: Some(50), ..Slo::default() });
        assert_eq!(with(-50), Slo { if_missed: IfMissed::Refuse, ..said });
        assert_eq!(Objectives::default().of(ann, [Some("m"), None], 0, said), said);
    }

    #[test]
    fn a_wrong_entry_says_what_is_wrong_where_and_what_to_do() {
        let priorities = attributes::Config::default().priorities;
        for (specs, field, word) in [
            (vec![spec("", "m", None, 1)], "objectives[0]", "'*' for all"),
            (vec![spec("a", "", None, 1)], "objectives[0]", "'*' for all"),
            (vec![spec("*", "*", named("urgent"), 1)], "objectives[0].priority", "hints.priorities"),
            (
                vec![spec("*", "*", Some(PriorityName::Number(101)), 1)],
                "objectives[0].priority",
                "-100 to 100",
            ),
            (
                vec![spec("a", "*", None, 1), spec("*", "*", None, 1), spec("a", "m", named("bulk"), 2)],
                "objectives[2]",
                "objectives[0] matches",
            ),
            (
                vec![spec("*", "m", named("bulk"), 1), spec("*", "m", Some(PriorityName::Number(-50)), 2)],
                "objectives[1]",
                "move it before",
            ),
        ] {
            let error = validate(&specs, &priorities).expect_err(word);
            assert!(error.field == field && error.problem.contains(word), "{error}");
        }
        let apart = [spec("*", "m", named("bulk"), 1), spec("*", "m", None, 1), spec("a", "*", None, 1)];
        assert_eq!(validate(&apart, &priorities), Ok(()));
    }
}
