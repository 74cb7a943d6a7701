//! Addresses of endpoints as data planes take them: `ip:port`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvlane_fleet::pool::PoolEndpoint;
use tokio::net::lookup_host;
use tokio::time::Instant;

/// The header and the metadata that name the endpoint.
pub(super) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The namespace of the metadata.
pub(super) const DESTINATION_NAMESPACE: &str = "envoy.lb";
/// The metadata that names the endpoint which served a request.
pub(super) const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The metadata that names the endpoints which may be picked, and its namespace.
pub(super) const SUBSET: &str = "x-gateway-destination-endpoint-subset";
pub(super) const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";

/// How long a resolved name is used.
const RESOLVED_FOR: Duration = Duration::from_secs(5);
/// Most names that are kept.
const NAMES_MAX: usize = 4096;

/// Resolved names of workers whose URLs have no IP address.
#[derive(Default)]
pub(super) struct Names {
    resolved: Mutex<HashMap<String, (Instant, Option<String>)>>,
}

// === impl Names ===

impl Names {
    /// The address of an endpoint; none if its name cannot be resolved.
    pub(super) async fn address(&self, endpoint: &PoolEndpoint) -> Option<String> {
        let address = &endpoint.worker.upstream.address;
        let place = address.place();
        if address.host.parse::<IpAddr>().is_ok() {
            return Some(place);
        }
        let now = Instant::now();
        let known = self.resolved.lock().unwrap_or_else(PoisonError::into_inner).get(&place).cloned();
        if let Some((at, resolved)) = known
            && now - at < RESOLVED_FOR
        {
            return resolved;
        }
        let found = lookup_host(&place).await.ok().and_then(|mut all| all.next());
        if found.is_none() {
            let worker = &*endpoint.worker.url;
            tracing::warn!(worker, "cannot resolve the host name of the worker; it is not picked");
        }
        let found = found.map(|address| address.to_string());
        let mut resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        if resolved.len() >= NAMES_MAX {
            resolved.retain(|_, (at, _)| now - *at < RESOLVED_FOR);
        }
        if resolved.len() < NAMES_MAX {
            resolved.insert(place, (now, found.clone()));
        }
        found
    }
}

/// The endpoints that a data plane allows for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Subset(Vec<String>);

// === impl Subset ===

impl Subset {
    /// Reads a subset: a list of `ip:port` or `ip`, or one text with commas between them.
    pub(super) fn read(value: &kvlane_wire::ext_proc::Value<'_>) -> Self {
        let texts = match value {
            kvlane_wire::ext_proc::Value::Text(text) => vec![*text],
            kvlane_wire::ext_proc::Value::List(texts) => texts.clone(),
        };
        // A JSON list may come as one text, too: its quotes and outer brackets are left out.
        let each = texts.iter().flat_map(|text| {
            let text = text.trim();
            let inner = text.strip_prefix("[\"").and_then(|text| text.strip_suffix("\"]"));
            inner.unwrap_or(text).split(',').map(|one| one.trim().trim_matches('"'))
        });
        Self(each.filter(|text| !text.is_empty()).map(str::to_owned).collect())
    }

    /// Whether it contains the address `place`, of a worker on `host`: with its port, or all ports of its host.
    pub(super) fn contains(&self, host: &str, place: &str) -> bool {
        self.0.iter().any(|one| one == place || one.trim_matches(['[', ']']) == host)
    }
}

#[cfg(test)]
mod tests {
    use kvlane_wire::ext_proc::Value;

    use super::*;

    #[test]
    fn a_subset_has_three_spellings() {
        let all = ["10.0.0.1:8000", "10.0.0.2", "[fd00::1]:8000"];
        let list = Subset::read(&Value::List(all.to_vec()));
        assert_eq!(list, Subset::read(&Value::Text("10.0.0.1:8000, 10.0.0.2,[fd00::1]:8000")));
        assert_eq!(list, Subset::read(&Value::Text("[\"10.0.0.1:8000\",\"10.0.0.2\", \"[fd00::1]:8000\"]")));
        for (host, port, inside) in [
            ("10.0.0.1", 8000, true),
            ("10.0.0.1", 8001, false),
            ("10.0.0.2", 8001, true),
            ("10.0.0.3", 8000, false),
            ("fd00::1", 8000, true),
            ("fd00::1", 8001, false),
        ] {
            let place =
                if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
            assert_eq!(list.contains(host, &place), inside, "{place}");
        }
        assert_eq!(Subset::read(&Value::List(vec![])), Subset(vec![]));
        assert_eq!(Subset::read(&Value::Text("")), Subset(vec![]));
    }
}
