//! Which tenants send the most work, from the decisions that are kept: the last requests, not all since the start.

use std::collections::HashMap;

use kvlane_core::decision::Receipt;
use kvlane_core::request::TenantKey;
use kvlane_core::scheduler::Scheduler;
use kvlane_core::time::Nanos;
use kvlane_fleet::pool::ModelPool;
use kvlane_proxy::Proxy;
use kvlane_proxy::limits::config::ANY;
use serde_json::{Value, json};

use crate::decisions::short;

/// Most tenants that are listed; the others are added up.
const TENANTS_MAX: usize = 10;

/// The requests of one tenant, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Share {
    requests: u64,
    prompt_tokens: u64,
    /// Prompt tokens that the chosen endpoint was not predicted to have cached.
    prefill_tokens: u64,
    /// As forecast when the requests were placed.
    output_tokens: u64,
}

/// What tenants have sent lately.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shares {
    /// Those with the most tokens to compute first; without a key: requests that name no tenant.
    top: Vec<(Option<TenantKey>, Share)>,
    /// All that are not among `top`.
    others: Share,
    /// When the first of the requests was placed.
    since: Option<Nanos>,
}

/// The tenants of a pool with their recent requests.
pub(crate) fn describe(proxy: &Proxy, pool: &ModelPool) -> Value {
    let Shares { top, others, since } =
        pool.router.read(|scheduler: &Scheduler| Shares::of(scheduler.receipts().iter()));
    let names = names(proxy, top.iter().filter_map(|(tenant, _)| *tenant));
    let now = proxy.fleet.clock.now();
    let top: Vec<Value> = top
        .into_iter()
        .map(|(tenant, share)| {
            let mut told = share.describe();
            told["tenant"] = json!(tenant.map(|tenant| short(tenant.0)));
            told["name"] = json!(tenant.and_then(|tenant| names.get(&tenant)));
            told
        })
        .collect();
    json!({
        "span_s": since.map(|since| (now - since).as_secs_f64()), "top": top, "others": others.describe(),
    })
}

/// The names that the configuration has for these tenants. Other names are not kept.
fn names(proxy: &Proxy, tenants: impl Iterator<Item = TenantKey>) -> HashMap<TenantKey, String> {
    let mut names: HashMap<TenantKey, String> = tenants.map(|tenant| (tenant, String::new())).collect();
    if !names.is_empty() {
        let (auth, settings, reader) = (proxy.auth(), proxy.settings(), proxy.attribute_reader.load());
        let limited = settings.limits.iter().map(|limit| &*limit.key).filter(|key| *key != ANY);
        for name in auth.key_names().chain(limited) {
            for tenant in reader.tenants_called(name) {
                names.entry(tenant).and_modify(|known| *known = name.to_owned());
            }
        }
        names.retain(|_, name| !name.is_empty());
    }
    names
}

// === impl Shares ===

impl Shares {
    /// Of these decisions, oldest first. Retries and legs are work, too, and count in tokens, but not as requests.
    fn of<'a>(receipts: impl Iterator<Item = &'a Receipt>) -> Self {
        let (mut by_tenant, mut since) = (HashMap::<Option<TenantKey>, Share>::new(), None);
        for receipt in receipts {
            since.get_or_insert(receipt.at);
            let overlap_tokens =
                receipt.placement.prefill.map_or(receipt.placement.overlap_tokens, |leg| leg.overlap_tokens);
            by_tenant.entry(receipt.tenant).or_default().add(Share {
                requests: u64::from(receipt.attempt == 0),
                prompt_tokens: receipt.prompt_tokens.into(),
                prefill_tokens: receipt.prompt_tokens.saturating_sub(overlap_tokens).into(),
                output_tokens: receipt.output_tokens.into(),
            });
        }
        let mut top: Vec<_> = by_tenant.into_iter().collect();
        top.sort_unstable_by_key(|(tenant, share)| {
            (std::cmp::Reverse(share.prefill_tokens + share.output_tokens), tenant.map(|tenant| tenant.0))
        });
        let mut others = Share::default();
        top.drain(TENANTS_MAX.min(top.len())..).for_each(|(_, share)| others.add(share));
        Self { top, others, since }
    }
}

// === impl Share ===

impl Share {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.prefill_tokens += other.prefill_tokens;
        self.output_tokens += other.output_tokens;
    }

    fn describe(self) -> Value {
        json!({
            "requests": self.requests, "prompt_tokens": self.prompt_tokens, "prefill_tokens": self.prefill_tokens,
            "expected_output_tokens": self.output_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::cache_accuracy::{Feed, Knowledge};
    use kvlane_core::decision::Placement;
    use kvlane_core::endpoint::EndpointId;
    use kvlane_core::policy::Reason;
    use kvlane_core::request::{Claims, RequestId, Slo};

    use super::*;

    /// A decision for a prompt of 100 tokens of which 60 are cached, with 10 output tokens to come.
    fn receipt(second: u64, tenant: Option<u64>, attempt: u32) -> Receipt {
        Receipt {
            at: Nanos::from_secs(second),
            request: RequestId(second),
            attempt,
            prompt_tokens: 100,
            session: None,
            tenant: tenant.map(TenantKey),
            priority: 0,
            claims: Claims::default(),
            slo: Slo::default(),
            output_tokens: 10,
            placement: Placement {
                endpoint: EndpointId::new(0, 0),
                overlap_tokens: 60,
                reason: Reason::default(),
                knowledge: Knowledge::default(),
                feed: Feed::default(),
                prefill: None,
            },
            rows: Vec::new(),
            rows_left_out: 0,
            pairs: Vec::new(),
        }
    }

    #[test]
    fn the_tenant_with_the_most_work_is_first_and_a_retry_is_work_but_no_request() {
        let receipts = [receipt(5, None, 0), receipt(6, Some(7), 0), receipt(7, Some(7), 1)];
        let Shares { top, others, since } = Shares::of(receipts.iter());
        let share = |requests: u64, n: u64| Share {
            requests,
            prompt_tokens: 100 * n,
            prefill_tokens: 40 * n,
            output_tokens: 10 * n,
        };
        assert_eq!(top, [(Some(TenantKey(7)), share(1, 2)), (None, share(1, 1))]);
        assert_eq!((others, since), (Share::default(), Some(Nanos::from_secs(5))));
    }

    #[test]
    fn tenants_beyond_the_listed_ones_are_added_up() {
        let receipts: Vec<Receipt> =
            (0..TENANTS_MAX as u64 + 3).map(|tenant| receipt(tenant, Some(tenant), 0)).collect();
        let Shares { top, others, .. } = Shares::of(receipts.iter());
        assert_eq!((top.len(), others.requests), (TENANTS_MAX, 3));
        assert_eq!(Shares::of([].into_iter()), Shares::default());
    }
}
