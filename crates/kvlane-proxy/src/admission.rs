//! Whether a request may be placed: its model is served, and its client is within its limits.

use std::sync::Arc;
use std::time::Duration;

use kvlane_core::request::TenantKey;
use kvlane_fleet::snapshot::Served;

use crate::account::Account;
use crate::alias::Alias;
use crate::attributes::Attributes;
use crate::error::{ApiError, Told};
use crate::limits::{Ask, Charge, Limited};
use crate::proxy::Proxy;

/// Tokens that an answer is charged until its end, where tenants are isolated.
const ANSWER_TOKENS_APART: f64 = 256.0;

/// Longest name of a model in an error, and for which a request waits.
const NAME_CHARS_MAX: usize = 200;

/// Admits a request if its client is within its limits.
pub(super) fn admit(
    proxy: &Arc<Proxy>,
    (served, alias): (&Served, Option<&Alias>),
    attributes: Attributes,
    prompt_tokens: u32,
    account: &Account,
) -> Result<Option<Arc<Charge>>, ApiError> {
    if !account.is_charged() {
        return Ok(None);
    }
    let pool = &served.pool;
    let output_tokens = || {
        let usual = match proxy.settings().auth.isolate_tenants {
            // A fixed number: the charge, and so the limit headers, reveal nothing of other tenants' answers.
            true => ANSWER_TOKENS_APART,
            false => pool.router.read(|scheduler| scheduler.usual_output_tokens()),
        };
        (usual as u64).min(attributes.output_tokens_max().map_or(u64::MAX, u64::from))
    };
    let ask = Ask {
        tenant: attributes.tenant(),
        model: alias.map_or(&pool.model, |alias| &alias.asked),
        adapter: served.adapter.as_deref().filter(|_| alias.is_none()),
        prompt_tokens,
        output_tokens: &output_tokens,
    };
    let (left, admitted) = proxy.limits.admit(proxy.fleet.clock, &ask, account.let_go());
    account.set_left(left);
    admitted.map_err(|limited| over(proxy, limited))
}

/// Lets a request wait for an endpoint that serves `name`, if its client is within its limit of concurrent requests.
/// It counts until it is admitted, or its account is closed.
pub(super) fn hold(
    proxy: &Arc<Proxy>,
    name: &str,
    tenant: Option<TenantKey>,
    account: &Account,
) -> Result<(), ApiError> {
    if account.holds() {
        return Ok(());
    }
    let model = proxy.fleet.label_of(name);
    let ask = Ask { tenant, model: &model, adapter: Some(name), prompt_tokens: 0, output_tokens: &|| 0 };
    let held = proxy.limits.hold(proxy.fleet.clock, &ask).map_err(|limited| over(proxy, limited))?;
    account.hold(held);
    Ok(())
}

fn over(proxy: &Proxy, limited: Limited) -> ApiError {
    proxy.fleet.metrics.limits.note(&limited.key, &limited.model, limited.exceeded.kind);
    ApiError::RateLimited(limited)
}

/// The pool that serves a model name.
///
/// # Errors
/// No pool serves it, or none yet.
pub(super) fn named_pool(proxy: &Proxy, model: &str) -> Result<Arc<Served>, ApiError> {
    let table = proxy.fleet.snapshot();
    if let Some(served) = table.by_name.get(model) {
        return Ok(Arc::clone(served));
    }
    let name = || model.chars().take(NAME_CHARS_MAX).collect();
    if table.pools.is_empty() || proxy.fleet.expects(model) {
        return Err(no_endpoint(proxy, name()));
    }
    Err(ApiError::UnknownModel(name()))
}

/// No worker serves this model; clients may retry after the next probe.
pub(super) fn no_endpoint(proxy: &Proxy, model: String) -> ApiError {
    let retry_after_s = proxy.settings().probe_interval.as_secs().max(1);
    ApiError::NoEndpoint { model, waited: Duration::ZERO, retry_after_s, told: Told::Where }
}
