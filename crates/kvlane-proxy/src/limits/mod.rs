//! Limits of each client: requests and tokens per minute, and concurrent requests.
//!
//! [`Limits`] finds the configuration's entries for a request, each with a [`Limiter`] of the core, and admits the
//! request if all of them do. The result is a [`Charge`], shared by the request's leases: when the last one is
//! dropped, it reports to the limiters what the request used: the tokens of its answer, or, if its client
//! disconnected before that, the prompt tokens that an engine had to compute. A request that was never sent to an
//! engine, or that every engine failed, has used nothing.
//!
//! A request that waits for its first endpoint, or for the count of its tokens, counts as concurrent, too. It holds a
//! charge, which its next admission replaces under the lock of each limiter: between the two no other request can take
//! its place.
//!
//! Tokens are charged when a request arrives: its prompt, and the usual length of answers of its model, but no more
//! than it asks for. At its end the engine's own count replaces them, or the relayed tokens where the engine reports
//! none.

pub mod config;
mod replicas;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use kvlane_core::limit::{Exceeded, Limiter, Permit, Standing};
use kvlane_core::request::TenantKey;
use kvlane_core::time::Nanos;
use kvlane_fleet::clock::Clock;

use crate::attributes::AttributeReader;
use crate::limits::config::{ANY, LimitSpec};

/// The bucket of requests without a tenant. Any other tenant has its own, also under an entry that names a key: a
/// tenant named by a trusted key's holder is not the holder of the key of that name.
const ONE: u64 = 0;

/// All limits of a gateway. Replaced whole.
#[derive(Default)]
pub struct Limits {
    rules: ArcSwap<Rules>,
}

/// The entries of one configuration.
#[derive(Default)]
struct Rules {
    all: Vec<Rule>,
    /// The entries for each named key.
    named: HashMap<TenantKey, Vec<usize>>,
    /// The entries for all others.
    any: Vec<usize>,
}

/// One entry, and its usage.
#[derive(Clone)]
struct Rule {
    spec: LimitSpec,
    used: Arc<Mutex<Limiter>>,
}

/// A request to be admitted.
pub struct Ask<'a> {
    pub(crate) tenant: Option<TenantKey>,
    pub(crate) model: &'a str,
    pub(crate) adapter: Option<&'a str>,
    pub(crate) prompt_tokens: u32,
    /// The expected tokens of its answer. Called only where tokens are limited.
    pub output_tokens: &'a dyn Fn() -> u64,
}

/// The charge of an admitted request. Dropping it reports the usage to the limiters.
pub struct Charge {
    clock: Clock,
    permits: Mutex<Vec<(Arc<Mutex<Limiter>>, Permit)>>,
    prompt_tokens: u32,
    /// One more than the tokens used; 0 while no engine has begun to answer.
    took: AtomicU64,
    /// Engines that were sent the request and have not failed it.
    engines: AtomicU32,
    /// Prompt tokens that the last of them had to compute.
    uncached_tokens: AtomicU32,
}

/// A request is over a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limited {
    /// The key of the entry.
    pub key: String,
    /// Its model.
    pub model: String,
    /// The exceeded limit.
    pub exceeded: Exceeded,
}

/// What is left of a client's limits, for response headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    requests: Option<Rate>,
    tokens: Option<Rate>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rate {
    per_minute: u64,
    left: u64,
    reset: Nanos,
}

fn lock(limiter: &Mutex<Limiter>) -> MutexGuard<'_, Limiter> {
    limiter.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Limits ===

impl Limits {
    /// Replaces the configuration. The usage of an entry is kept while there is an entry with the same key and model.
    pub fn configure(&self, specs: &[LimitSpec], attributes: &AttributeReader) {
        let before = self.rules.load_full();
        let known: HashMap<_, &Rule> = before.all.iter().map(|rule| (rule.spec.subject(), rule)).collect();
        let mut rules = Rules::default();
        for (at, spec) in specs.iter().enumerate() {
            let used = match known.get(&spec.subject()) {
                Some(rule) => {
                    // Requests in flight settle with it, so the limiter stays the same.
                    lock(&rule.used).configure(spec.limiter());
                    Arc::clone(&rule.used)
                }
                None => Arc::new(Mutex::new(Limiter::new(spec.limiter()))),
            };
            rules.all.push(Rule { spec: spec.clone(), used });
            if spec.key == ANY {
                rules.any.push(at);
                continue;
            }
            for key in attributes.tenants_called(&spec.key) {
                rules.named.entry(key).or_default().push(at);
            }
        }
        self.rules.store(Arc::new(rules));
    }

    /// Admits a request if all entries for it do; no charge where there is no entry. `before` is what the request holds
    /// already: it is returned, also if the request is not admitted.
    ///
    /// # Errors
    /// The first limit that is exceeded. Nothing is charged then.
    pub fn admit(
        &self,
        clock: Clock,
        ask: &Ask<'_>,
        before: Option<Arc<Charge>>,
    ) -> (Left, Result<Option<Arc<Charge>>, Limited>) {
        self.charge(clock, ask, before, |limiter, now, key, tokens| limiter.admit(now, key, tokens))
    }

    /// Admits a request that waits: it counts as concurrent, and is charged to no rate.
    ///
    /// # Errors
    /// The first limit that is exceeded. Nothing is held then.
    pub fn hold(&self, clock: Clock, ask: &Ask<'_>) -> Result<Option<Arc<Charge>>, Limited> {
        self.charge(clock, ask, None, |limiter, now, key, _| limiter.hold(now, key)).1
    }

    fn charge(
        &self,
        clock: Clock,
        ask: &Ask<'_>,
        before: Option<Arc<Charge>>,
        enter: impl Fn(&mut Limiter, Nanos, u64, u64) -> Result<Permit, Exceeded>,
    ) -> (Left, Result<Option<Arc<Charge>>, Limited>) {
        let rules = self.rules.load();
        if rules.all.is_empty() {
            return (Left::default(), Ok(None));
        }
        let now = clock.now();
        let (mut permits, mut left, mut limited) = (Vec::new(), Left::default(), None);
        for Rule { spec, used } in rules.about(ask) {
            let tokens = match spec.tokens_per_minute {
                0 => 0,
                _ => u64::from(ask.prompt_tokens).saturating_add((ask.output_tokens)()),
            };
            let key = ask.tenant.map_or(ONE, |tenant| tenant.0);
            let mut limiter = lock(used);
            if let Some(permit) = before.as_ref().and_then(|before| before.give_up(used)) {
                limiter.cancel(now, permit);
            }
            let admitted = enter(&mut limiter, now, key, tokens);
            left.note(spec, limiter.standing(now, key));
            drop(limiter);
            match admitted {
                Ok(permit) => permits.push((Arc::clone(used), permit)),
                Err(exceeded) => {
                    limited = Some(Limited { key: spec.key.clone(), model: spec.model.clone(), exceeded });
                    break;
                }
            }
        }
        let (permits, took) = (Mutex::new(permits), AtomicU64::new(0));
        // On rejection, the charges under the other entries are returned with it.
        let (engines, uncached_tokens) = (AtomicU32::new(0), AtomicU32::new(0));
        let prompt_tokens = ask.prompt_tokens;
        let charge = Charge { clock, permits, prompt_tokens, took, engines, uncached_tokens };
        (left, limited.map_or(Ok(Some(Arc::new(charge))), Err))
    }

    /// Each entry with its key and model, the number of keys it tracks, and its requests in flight.
    pub fn figures(&self) -> Vec<(LimitSpec, usize, u64)> {
        let rules = self.rules.load();
        let figures = |rule: &Rule| {
            let limiter = lock(&rule.used);
            (rule.spec.clone(), limiter.keys(), limiter.in_flight())
        };
        rules.all.iter().map(figures).collect()
    }
}

// === impl Rules ===

impl Rules {
    /// The entries that apply to a request: those that name its key, and of the general ones those for models without
    /// such an entry.
    fn about<'a>(&'a self, ask: &'a Ask<'_>) -> impl Iterator<Item = &'a Rule> {
        let named = ask.tenant.and_then(|tenant| self.named.get(&tenant)).map_or(&[][..], Vec::as_slice);
        let for_model = |rule: &&Rule| {
            let model = &*rule.spec.model;
            model == ANY || model == ask.model || Some(model) == ask.adapter
        };
        let named = named.iter().map(|&at| &self.all[at]);
        let covers = named.clone();
        let any = self.any.iter().map(|&at| &self.all[at]);
        let any = any.filter(move |rule| !covers.clone().any(|own| own.spec.model == rule.spec.model));
        named.chain(any).filter(for_model)
    }
}

// === impl Charge ===

impl Charge {
    /// An engine has answered, with this many tokens so far. The last call counts.
    pub fn note(&self, prompt_tokens: Option<u32>, output_tokens: u64) {
        let prompt_tokens = u64::from(prompt_tokens.unwrap_or(self.prompt_tokens));
        let took = prompt_tokens.saturating_add(output_tokens);
        self.took.store(took.saturating_add(1), Ordering::Relaxed);
    }

    /// The request is sent to an engine that is predicted to hold this many of its prompt's tokens.
    pub fn sent(&self, overlap_tokens: u32) {
        self.uncached_tokens.store(self.prompt_tokens.saturating_sub(overlap_tokens), Ordering::Relaxed);
        self.engines.fetch_add(1, Ordering::Relaxed);
    }

    /// An engine that was sent the request has failed it.
    pub fn lost(&self) {
        self.engines.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes out what is charged to one limiter.
    fn give_up(&self, used: &Arc<Mutex<Limiter>>) -> Option<Permit> {
        let mut permits = self.permits.lock().unwrap_or_else(PoisonError::into_inner);
        let at = permits.iter().position(|(limiter, _)| Arc::ptr_eq(limiter, used))?;
        Some(permits.swap_remove(at).1)
    }

    /// The tokens it used, if it used an engine.
    fn tokens(&mut self) -> Option<u64> {
        let answered = self.took.get_mut().checked_sub(1);
        let sent = (*self.engines.get_mut() > 0).then_some(u64::from(*self.uncached_tokens.get_mut()));
        answered.or(sent)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let now = self.clock.now();
        let permits = std::mem::take(self.permits.get_mut().unwrap_or_else(PoisonError::into_inner));
        let tokens = self.tokens();
        for (used, permit) in permits {
            match tokens {
                Some(tokens) => lock(&used).settle(now, permit, tokens),
                None => lock(&used).cancel(now, permit),
            }
        }
    }
}

// === impl Limited ===

impl Limited {
    /// `Retry-After`, in whole seconds.
    pub fn retry_after_s(&self) -> u64 {
        self.exceeded.retry_after.0.div_ceil(1_000_000_000).max(1)
    }
}

impl std::fmt::Display for Limited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { key, model, exceeded } = self;
        let what = match exceeded.kind.name() {
            "requests" => "requests per minute",
            "tokens" => "tokens per minute",
            _ => "concurrent requests",
        };
        let whom = if key == ANY { "each key" } else { "this key" };
        let of = if model == ANY { String::new() } else { format!(" of `{model}`") };
        write!(f, "rate limit reached: {what}{of} for {whom}; try again in {} s", self.retry_after_s())
    }
}

// === impl Left ===

impl Left {
    /// Keeps the limit of which the least is left.
    fn note(&mut self, spec: &LimitSpec, standing: Standing) {
        let tighter = |so_far: &mut Option<Rate>, per_minute, left: Option<u64>, reset| {
            let Some(left) = left else { return };
            if so_far.is_none_or(|other| left < other.left) {
                *so_far = Some(Rate { per_minute, left, reset });
            }
        };
        let Standing { requests_left, requests_reset, tokens_left, tokens_reset, .. } = standing;
        tighter(&mut self.requests, spec.requests_per_minute, requests_left, requests_reset);
        tighter(&mut self.tokens, spec.tokens_per_minute, tokens_left, tokens_reset);
    }

    /// Adds the headers that OpenAI's clients know.
    pub fn tell(&self, headers: &mut HeaderMap) {
        const NAMES: [[&str; 3]; 2] = [
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
        ];
        for (names, rate) in NAMES.into_iter().zip([self.requests, self.tokens]) {
            let Some(Rate { per_minute, left, reset }) = rate else { continue };
            let values = [HeaderValue::from(per_minute), HeaderValue::from(left), span(reset)];
            for (name, value) in names.into_iter().zip(values) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
    }
}

/// A duration in OpenAI's format: `120ms`, `1s`, `6m0s`.
fn span(span: Nanos) -> HeaderValue {
    let millis = span.0.div_ceil(1_000_000);
    let text = match (millis / 60_000, millis % 60_000) {
        (0, millis @ 0..1000) => format!("{millis}ms"),
        (0, millis) => format!("{}s", millis.div_ceil(1000)),
        (minutes, millis) => format!("{minutes}m{}s", millis / 1000),
    };
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("0ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(key: &str, model: &str) -> LimitSpec {
        LimitSpec { key: key.into(), model: model.into(), requests_per_minute: 60, ..LimitSpec::default() }
    }

    #[test]
    fn an_entry_for_a_key_replaces_the_entry_for_all_keys() {
        let attributes =
            AttributeReader::new(&crate::attributes::Config::default(), crate::salt::SaltKey::generate());
        let limits = Limits::default();
        limits.configure(
            &[spec("*", "*"), spec("a", "*"), spec("*", "m"), spec("b", "m"), spec("a", "lora")],
            &attributes,
        );
        let about = |name: Option<&str>, model: &str, adapter: Option<&str>| -> Vec<String> {
            let tenant = name.map(|name| attributes.tenants_called(name)[0]);
            let ask = Ask { tenant, model, adapter, prompt_tokens: 0, output_tokens: &|| 0 };
            let rules = limits.rules.load();
            rules.about(&ask).map(|rule| format!("{} {}", rule.spec.key, rule.spec.model)).collect()
        };
        assert_eq!(about(None, "m", None), ["* *", "* m"]);
        assert_eq!(about(Some("c"), "m", None), ["* *", "* m"]);
        assert_eq!(about(Some("a"), "m", None), ["a *", "* m"]);
        assert_eq!(about(Some("a"), "m", Some("lora")), ["a *", "a lora", "* m"]);
        assert_eq!(about(Some("b"), "m", None), ["b m", "* *"]);
        assert_eq!(about(Some("b"), "n", None), ["* *"]);
    }

    #[test]
    fn headers_show_the_tightest_of_several_limits() {
        let standing = |left: u64| Standing {
            requests_left: Some(left),
            requests_reset: Nanos::from_millis(90_500),
            tokens_left: None,
            tokens_reset: Nanos::ZERO,
            in_flight: 0,
        };
        let mut left = Left::default();
        let mut headers = HeaderMap::new();
        left.tell(&mut headers);
        assert!(headers.is_empty());
        for (limit, remaining) in [(100, 9), (50, 7), (200, 8)] {
            left.note(&LimitSpec { requests_per_minute: limit, ..spec("*", "*") }, standing(remaining));
        }
        left.tell(&mut headers);
        let value = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        assert_eq!(value("x-ratelimit-limit-requests"), Some("50"));
        assert_eq!(value("x-ratelimit-remaining-requests"), Some("7"));
        assert_eq!(value("x-ratelimit-reset-requests"), Some("1m30s"));
        assert_eq!(headers.len(), 3, "tokens are not limited");
    }

    #[test]
    fn durations_have_openais_format() {
        for (nanos, text) in [
            (0, "0ms"),
            (1, "1ms"),
            (999_000_000, "999ms"),
            (1_000_000_000, "1s"),
            (59_100_000_000, "60s"),
            (360_000_000_000, "6m0s"),
        ] {
            assert_eq!(span(Nanos(nanos)), text);
        }
    }
}
