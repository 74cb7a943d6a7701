//! The catalogue of models: names that clients use, apart from the models that workers serve. The section `models`.
//!
//! A name leads to one of its targets: to the first whose conditions a request meets, else by weight. Which one a
//! conversation gets depends on the conversation alone, so all its turns find the same caches. If the target cannot take
//! the request, the declared fallbacks follow, in order.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kvlane_core::config::{ConfigError, Setting, wrong};
use kvlane_core::section;

use crate::worker::config::WorkerSpec;
use crate::worker::provider::Provider;

/// Most fallbacks of a model.
const FALLBACKS_MAX: usize = 8;

section! {
    /// A model as clients name it.
    pub struct ModelSpec {
        /// The models that serve it, as in `[{model: llama-70b, weight: 9}, {model: llama-70b-v2}]`.
        pub targets: Vec<TargetSpec> = Vec::new(), in 1..=64;
        /// Models that serve it while its target has no ready endpoint, fails, or has a full queue, in order.
        pub fallbacks: Vec<FallbackSpec> = Vec::new(), in 0..=FALLBACKS_MAX;
        /// A model that gets copies of a share of the requests. Its answers are discarded, and no client is charged for them.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub mirror: Option<MirrorSpec> = None;
    }
}

section! {
    /// A model that serves a name.
    #[derive(Eq)]
    pub struct TargetSpec {
        /// A model or adapter that workers serve.
        pub model: String;
        /// Its share of the conversations, as a ratio to the other weights. 0: only requests that meet its conditions.
        #[serde(default = "one")]
        pub weight: u32;
        /// Headers that a request must have for this target before all weights, as in `{x-canary: 'yes'}`.
        #[serde(default)]
        pub headers: BTreeMap<String, String>;
        /// Names of keys (`auth.keys`) whose requests go to this target before all weights.
        #[serde(default)]
        pub keys: Vec<String>;
    }
}

section! {
    /// A model that serves a name if its target cannot.
    #[derive(Eq)]
    pub struct FallbackSpec {
        /// A model or adapter that workers serve.
        pub model: String;
        /// The service outside the fleet that serves it (`workers[].provider`), if workers of the fleet do not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub provider: Option<String>;
        /// Whether it can be given tools.
        #[serde(default = "yes")]
        pub tools: bool;
    }
}

section! {
    /// A model that gets copies of requests.
    #[derive(Eq)]
    pub struct MirrorSpec {
        /// A model or adapter that workers serve.
        pub model: String;
        /// The share of the conversations that are copied, in percent.
        pub percent: u32, in 1..=100;
    }
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

/// What of a request decides which target it gets.
pub struct Traits<'a> {
    /// The value of a header.
    pub header: &'a dyn Fn(&str) -> Option<&'a str>,
    /// The name of its key.
    pub key: Option<&'a str>,
    /// A hash of its conversation: the same in every turn. Computed only where it decides.
    pub conversation: &'a dyn Fn() -> u64,
}

/// All entries by their origin. Those that the admin API has set precede those of the configuration, stay over reloads, and
/// end with the process. Those of discovery come last.
#[derive(Default)]
pub struct Entries {
    configured: BTreeMap<String, ModelSpec>,
    set: BTreeMap<String, ModelSpec>,
    found: BTreeMap<String, ModelSpec>,
}

// === impl Entries ===

impl Entries {
    /// Those of the configuration alone.
    pub fn new(configured: BTreeMap<String, ModelSpec>) -> Self {
        Self { configured, ..Self::default() }
    }

    /// Replaces those of the configuration; returns all.
    pub fn configure(&mut self, configured: BTreeMap<String, ModelSpec>) -> BTreeMap<String, ModelSpec> {
        self.configured = configured;
        self.all()
    }

    /// Sets an entry; returns all.
    ///
    /// # Errors
    /// The entry is wrong, or does not go with another one.
    pub fn set(&mut self, name: &str, spec: ModelSpec) -> Result<BTreeMap<String, ModelSpec>, ConfigError> {
        spec.check(&format!("models.{name}"))?;
        let mut all = self.all();
        all.insert(name.into(), spec.clone());
        validate(&all)?;
        self.set.insert(name.into(), spec);
        Ok(all)
    }

    /// Removes an entry that was set; returns all, or nothing if it was not.
    pub fn unset(&mut self, name: &str) -> Option<BTreeMap<String, ModelSpec>> {
        self.set.remove(name)?;
        Some(self.all())
    }

    /// Replaces those of discovery; returns all, and what is wrong with those that were left out.
    pub fn find(&mut self, found: BTreeMap<String, ModelSpec>) -> (BTreeMap<String, ModelSpec>, Vec<String>) {
        self.found.clear();
        let mut problems = Vec::new();
        for (name, spec) in found {
            self.found.insert(name.clone(), spec.clone());
            let checked = spec.check(&format!("models.{name}")).and_then(|()| validate(&self.all()));
            if let Err(problem) = checked {
                problems.push(problem.to_string());
                self.found.remove(&name);
            }
        }
        (self.all(), problems)
    }

    /// Who has named an entry: `admin`, `configuration` or `kubernetes`.
    pub fn set_by(&self, name: &str) -> &'static str {
        match () {
            () if self.set.contains_key(name) => "admin",
            () if self.configured.contains_key(name) => "configuration",
            () => "kubernetes",
        }
    }

    fn all(&self) -> BTreeMap<String, ModelSpec> {
        let by_rank = [&self.found, &self.configured, &self.set];
        by_rank.into_iter().flatten().map(|(name, spec)| (name.clone(), spec.clone())).collect()
    }
}

// === impl ModelSpec ===

impl ModelSpec {
    /// The pools and adapters that can serve it: targets, then fallbacks.
    pub fn models(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let targets = self.targets.iter().map(|target| Cow::Borrowed(&*target.model));
        targets.chain(self.fallbacks.iter().map(FallbackSpec::served_as))
    }

    /// The target of a request.
    pub fn target(&self, request: &Traits<'_>) -> Option<&TargetSpec> {
        let mut conditional = self.targets.iter().filter(|target| target.is_conditional());
        conditional.find(|target| target.is_met_by(request)).or_else(|| self.weighted(request.conversation))
    }

    /// The target whose range of the weights contains this hash.
    fn weighted(&self, conversation: &dyn Fn() -> u64) -> Option<&TargetSpec> {
        let mut weighted = self.targets.iter().filter(|target| target.weight > 0);
        if let (Some(only), None) = (weighted.next(), weighted.next()) {
            return Some(only);
        }
        let total: u64 = self.targets.iter().map(|target| u64::from(target.weight)).sum();
        let mut at = ((u128::from(conversation()) * u128::from(total)) >> 64) as u64;
        self.targets.iter().find(|target| {
            let within = at < u64::from(target.weight);
            at = at.saturating_sub(u64::from(target.weight));
            within
        })
    }

    /// The model that gets a copy of a request of this conversation.
    pub fn mirrored(&self, conversation: &dyn Fn() -> u64) -> Option<&str> {
        let mirror = self.mirror.as_ref()?;
        // Other bits than those that select the target.
        let percent = conversation().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ((percent * 100) >> 32 < u64::from(mirror.percent)).then_some(&mirror.model)
    }
}

// === impl FallbackSpec ===

impl FallbackSpec {
    /// The name under which the fleet has it.
    pub fn served_as(&self) -> Cow<'_, str> {
        match &self.provider {
            Some(provider) => Provider::pool_of(provider, &self.model).into(),
            None => Cow::Borrowed(&*self.model),
        }
    }
}

/// The models of a service outside the fleet that are a fallback of some name.
pub fn models_of<'a>(models: &'a BTreeMap<String, ModelSpec>, provider: &str) -> Vec<&'a str> {
    let fallbacks = models.values().flat_map(|spec| &spec.fallbacks);
    let of_it = fallbacks.filter(|fallback| fallback.provider.as_deref() == Some(provider));
    let mut of_it: Vec<_> = of_it.map(|fallback| &*fallback.model).collect();
    of_it.sort_unstable();
    of_it.dedup();
    of_it
}

// === impl TargetSpec ===

impl TargetSpec {
    /// A target without conditions.
    pub fn new(model: &str, weight: u32) -> Self {
        Self { model: model.into(), weight, headers: BTreeMap::new(), keys: Vec::new() }
    }

    fn is_conditional(&self) -> bool {
        !self.headers.is_empty() || !self.keys.is_empty()
    }

    fn is_met_by(&self, request: &Traits<'_>) -> bool {
        let headers = self.headers.iter().all(|(name, value)| (request.header)(name) == Some(value));
        let of_key = || request.key.is_some_and(|key| self.keys.iter().any(|name| name == key));
        headers && (self.keys.is_empty() || of_key())
    }
}

/// Checks all entries.
///
/// # Errors
/// The first entry that is wrong.
pub fn validate(models: &BTreeMap<String, ModelSpec>) -> Result<(), ConfigError> {
    for (name, spec) in models {
        let field = format!("models.{name}");
        let of_fleet = spec.fallbacks.iter().filter(|to| to.provider.is_none());
        let mut led_to = spec.targets.iter().map(|target| &target.model).chain(of_fleet.map(|to| &to.model));
        if name.is_empty() || spec.targets.iter().any(|target| target.model.is_empty()) {
            return wrong(
                &field,
                "a name is empty: write it as `alias: {targets: [{model: llama-70b}]}`".into(),
            );
        }
        if spec.targets.iter().all(|target| target.weight == 0) {
            return wrong(
                &field,
                "no target has a weight: requests that meet no condition would have no target".into(),
            );
        }
        if let Some(other) = led_to.find(|to| *to != name && models.contains_key(*to)) {
            return wrong(
                &field,
                format!("it leads to `{other}`, which is itself in `models`: name what workers serve"),
            );
        }
    }
    Ok(())
}

/// Checks that each service outside the fleet that is a fallback is among the workers.
///
/// # Errors
/// The first that is not.
pub fn validate_providers(
    models: &BTreeMap<String, ModelSpec>,
    workers: &[WorkerSpec],
) -> Result<(), ConfigError> {
    let known: Vec<_> = workers.iter().filter_map(|worker| Some(&worker.provider.as_ref()?.name)).collect();
    for (name, spec) in models {
        let named = spec.fallbacks.iter().enumerate().filter_map(|(n, to)| Some((n, to.provider.as_ref()?)));
        if let Some((n, unknown)) = named.into_iter().find(|(_, provider)| !known.contains(provider)) {
            return wrong(
                &format!("models.{name}.fallbacks[{n}].provider"),
                format!(
                    "no worker is the provider '{unknown}': add one, as in \
                     `{{url: 'https://api.example.com', provider: {{name: {unknown}}}, api_key: {{file: /run/secrets/{unknown}}}}}`"
                ),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(model: &str, weight: u32) -> TargetSpec {
        TargetSpec::new(model, weight)
    }

    fn of(targets: Vec<TargetSpec>) -> ModelSpec {
        ModelSpec { targets, ..ModelSpec::default() }
    }

    fn pick(
        spec: &ModelSpec,
        conversation: u64,
        header: Option<(&str, &'static str)>,
        key: Option<&str>,
    ) -> String {
        let header = |name: &str| header.filter(|(of, _)| *of == name).map(|(_, value)| value);
        let request = Traits { header: &header, key, conversation: &|| conversation };
        spec.target(&request).expect("a target").model.clone()
    }

    #[test]
    fn conditions_precede_weights() {
        let mut canary = target("canary", 0);
        canary.headers = BTreeMap::from([("x-canary".into(), "yes".into())]);
        let mut testers = target("testers", 0);
        testers.keys = vec!["ann".into()];
        let spec = of(vec![target("stable", 1), canary, testers]);
        for conversation in [0, u64::MAX / 2, u64::MAX] {
            assert_eq!(pick(&spec, conversation, None, None), "stable");
            assert_eq!(pick(&spec, conversation, Some(("x-canary", "yes")), None), "canary");
            assert_eq!(pick(&spec, conversation, Some(("x-canary", "no")), Some("bob")), "stable");
            assert_eq!(pick(&spec, conversation, None, Some("ann")), "testers");
        }
    }

    #[test]
    fn what_was_set_precedes_the_configuration_and_stays_over_reloads() {
        let configured = |model: &str| BTreeMap::from([("alias".to_owned(), of(vec![target(model, 1)]))]);
        let mut entries = Entries::new(configured("m"));
        let leads_to = |all: &BTreeMap<String, ModelSpec>| all["alias"].targets[0].model.clone();
        assert_eq!(leads_to(&entries.set("alias", of(vec![target("set", 1)])).expect("an entry")), "set");
        assert_eq!(leads_to(&entries.configure(configured("m2"))), "set");
        let error = entries.set("other", of(vec![target("alias", 1)])).expect_err("it leads to an alias");
        assert!(error.to_string().contains("itself in `models`"));
        let too_many = of((0..65).map(|n| target(&n.to_string(), 1)).collect());
        assert!(entries.set("other", too_many).is_err(), "64 targets at most");
        assert_eq!(entries.unset("alias").as_ref().map(leads_to), Some("m2".into()));
        assert_eq!(entries.unset("alias"), None);
    }

    #[test]
    fn what_discovery_finds_comes_last_and_what_is_wrong_of_it_is_left_out() {
        let mut entries = Entries::new(BTreeMap::from([("alias".into(), of(vec![target("m", 1)]))]));
        let found = |names: &[(&str, &str)]| {
            names.iter().map(|(name, model)| ((*name).into(), of(vec![target(model, 1)]))).collect()
        };
        let (all, problems) = entries.find(found(&[("alias", "x"), ("loop", "alias"), ("other", "m2")]));
        assert_eq!(
            (all["alias"].targets[0].model.as_str(), all["other"].targets[0].model.as_str()),
            ("m", "m2")
        );
        assert!(
            !all.contains_key("loop") && problems.len() == 1 && problems[0].contains("`alias`"),
            "{problems:?}"
        );
        assert_eq!((entries.set_by("alias"), entries.set_by("other")), ("configuration", "kubernetes"));
        assert_eq!(entries.find(BTreeMap::new()).0.len(), 1);
    }

    #[test]
    fn an_entry_that_leads_nowhere_is_an_error() {
        let wrong = |spec: ModelSpec| {
            validate(&BTreeMap::from([("alias".into(), spec), ("other".into(), of(vec![target("m", 1)]))]))
                .expect_err("a wrong entry")
                .to_string()
        };
        assert!(wrong(of(vec![target("m", 0)])).contains("no target has a weight"));
        assert!(wrong(of(vec![target("", 1)])).contains("a name is empty"));
        assert!(wrong(of(vec![target("other", 1)])).contains("`other`, which is itself in `models`"));
        assert!(validate(&BTreeMap::from([("m".into(), of(vec![target("m", 9), target("m2", 1)]))])).is_ok());
    }

    proptest! {
        /// Invariant: Targets and mirrors get their shares of the conversations, and a conversation keeps its target.
        #[test]
        fn targets_get_their_shares(weights in proptest::collection::vec(0_u32..20, 1..5), percent in 1_u32..=100) {
            prop_assume!(weights.iter().any(|&weight| weight > 0));
            let names: Vec<String> = (0..weights.len()).map(|n| n.to_string()).collect();
            let mut spec = of(names.iter().zip(&weights).map(|(name, &weight)| target(name, weight)).collect());
            spec.mirror = Some(MirrorSpec { model: "copy".into(), percent });
            let (mut got, mut copied) = (vec![0_u32; weights.len()], 0_u32);
            let mut rng = kvlane_core::rng::Rng::new(7);
            for _ in 0..4000 {
                let conversation = rng.next_u64();
                let of = pick(&spec, conversation, None, None);
                prop_assert_eq!(&of, &pick(&spec, conversation, None, None));
                got[of.parse::<usize>().expect("a number")] += 1;
                copied += u32::from(spec.mirrored(&|| conversation).is_some());
            }
            let total: u32 = weights.iter().sum();
            for (got, weight) in got.iter().zip(&weights) {
                let expected = 4000.0 * f64::from(*weight) / f64::from(total);
                prop_assert!((f64::from(*got) - expected).abs() <= 160.0, "{got} of {expected}");
                prop_assert!(*weight > 0 || *got == 0);
            }
            prop_assert!((f64::from(copied) - 40.0 * f64::from(percent)).abs() <= 160.0, "{copied} of {percent} %");
        }
    }
}
