//! The model of a request: the one that it names, or the default one.

use std::sync::Arc;

use http::request::Parts;
use kvlane_fleet::snapshot::Served;

use crate::admission::{named_pool, no_endpoint};
use crate::error::ApiError;
use crate::proxy::Proxy;

/// Headers that name the model of a request whose body names none: kvlane's own, and those of the Gateway API's body-based
/// routing and of AIBrix.
const HEADERS: [&str; 3] = ["x-kvlane-model", "x-gateway-model-name", "model"];
/// Most names in an error.
const CHOICES_MAX: usize = 8;

/// What serves the model that a request names: in its body, form or query (`named`), or in a header. If it names none, what
/// serves `routing.default_model`, or the only model.
///
/// # Errors
/// Nothing serves it, or the request names no model, there are several, and none is the default.
pub(super) fn served(proxy: &Proxy, parts: &Parts, named: Option<&str>) -> Result<Arc<Served>, ApiError> {
    let header = |name: &&str| parts.headers.get(*name)?.to_str().ok().filter(|model| !model.is_empty());
    if let Some(model) = named.or_else(|| HEADERS.iter().find_map(header)) {
        return named_pool(proxy, model);
    }
    if let Some(model) = &proxy.fleet.settings().routing.default_model {
        return named_pool(proxy, model);
    }
    let table = proxy.fleet.snapshot();
    match &table.pools[..] {
        [] => Err(no_endpoint(proxy, String::new())),
        [pool] => named_pool(proxy, &pool.model),
        _ => Err(ApiError::MissingField(choose(table.by_name.keys().map(String::as_str).collect()))),
    }
}

/// Says which models there are.
fn choose(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    let more = names.len().saturating_sub(CHOICES_MAX);
    names.truncate(CHOICES_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more (GET /v1/models)") };
    format!(
        "`model` is missing and several models are served: name one of {}{more} in the body, or in the header {}",
        names.join(", "),
        HEADERS[0]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_choices() {
        assert_eq!(
            choose(vec!["b", "a"]),
            "`model` is missing and several models are served: name one of a, b in the body, or in the header x-kvlane-model"
        );
        let many: Vec<_> = (10..30).map(|n| format!("m{n}")).collect();
        let text = choose(many.iter().map(String::as_str).collect());
        assert!(text.contains("m17 and 12 more (GET /v1/models) in the body"), "{text}");
    }
}
