//! Objects as the API server writes them, and what is kept of them.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer};

use super::null::or_default;
use super::{Annotations, Deletion, Endpoint, Objective, Pod, Pool, Port, Rewrite, Rule, Service, Slice};

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawMeta<L: Default, A: Default> {
    name: String,
    uid: String,
    resource_version: String,
    creation_timestamp: Option<String>,
    deletion_timestamp: Option<String>,
    deletion_grace_period_seconds: Option<i64>,
    #[serde(deserialize_with = "or_default", bound(deserialize = "L: Deserialize<'de>"))]
    labels: L,
    #[serde(deserialize_with = "or_default", bound(deserialize = "A: Deserialize<'de>"))]
    annotations: A,
}

/// Labels or annotations that are not used.
#[derive(Default, Deserialize)]
struct Unused {}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Labels {
    #[serde(rename = "llm-d.ai/role")]
    role: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawPod {
    metadata: RawMeta<Labels, Annotations>,
    spec: RawPodSpec,
    status: RawPodStatus,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawPodSpec {
    #[serde(deserialize_with = "or_default")]
    containers: Vec<RawContainer>,
    #[serde(deserialize_with = "or_default")]
    init_containers: Vec<RawContainer>,
    host_network: bool,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawContainer {
    #[serde(deserialize_with = "or_default")]
    ports: Vec<RawPort>,
    restart_policy: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawPort {
    name: Option<String>,
    container_port: Option<u16>,
    /// In an EndpointSlice.
    port: Option<u16>,
    protocol: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawPodStatus {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(deserialize_with = "or_default")]
    conditions: Vec<RawCondition>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawCondition {
    r#type: String,
    status: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawSlice {
    metadata: RawMeta<Unused, Unused>,
    address_type: String,
    #[serde(deserialize_with = "or_default")]
    endpoints: Vec<RawEndpoint>,
    #[serde(deserialize_with = "or_default")]
    ports: Vec<RawPort>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawEndpoint {
    #[serde(deserialize_with = "or_default")]
    addresses: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    conditions: RawEndpointConditions,
    target_ref: Option<RawReference>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawEndpointConditions {
    ready: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawReference {
    kind: String,
    name: String,
    uid: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawService {
    metadata: RawMeta<Unused, Unused>,
    spec: RawServiceSpec,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawServiceSpec {
    #[serde(deserialize_with = "or_default")]
    selector: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawPool {
    metadata: RawMeta<Unused, Unused>,
    spec: RawPoolSpec,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawPoolSpec {
    selector: RawSelector,
    #[serde(deserialize_with = "or_default")]
    target_ports: Vec<RawTargetPort>,
    app_protocol: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawSelector {
    #[serde(deserialize_with = "or_default")]
    match_labels: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawTargetPort {
    number: u16,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawObjective {
    metadata: RawMeta<Unused, Unused>,
    spec: RawObjectiveSpec,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawObjectiveSpec {
    #[serde(deserialize_with = "or_default")]
    priority: i64,
    #[serde(deserialize_with = "or_default")]
    pool_ref: RawReference,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawRewrite {
    metadata: RawMeta<Unused, Unused>,
    spec: RawRewriteSpec,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawRewriteSpec {
    #[serde(deserialize_with = "or_default")]
    pool_ref: RawReference,
    #[serde(deserialize_with = "or_default")]
    rules: Vec<RawRule>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawRule {
    #[serde(deserialize_with = "or_default")]
    matches: Vec<RawMatch>,
    #[serde(deserialize_with = "or_default")]
    targets: Vec<RawTarget>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawMatch {
    #[serde(deserialize_with = "or_default")]
    model: RawModel,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawModel {
    value: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RawTarget {
    model_rewrite: String,
    weight: Option<u32>,
}

// === impl Pod ===

impl From<RawPod> for Pod {
    fn from(raw: RawPod) -> Self {
        let meta = raw.metadata;
        let deletion = meta.deletion_timestamp.map(|at| Deletion {
            at: seconds(&at),
            grace: meta
                .deletion_grace_period_seconds
                .and_then(|grace| u64::try_from(grace).ok())
                .unwrap_or(0),
        });
        // An init container that is always restarted is a sidecar, and may be what takes the requests.
        let sidecar = |container: &RawContainer| container.restart_policy.as_deref() == Some("Always");
        let sidecars = raw.spec.init_containers.into_iter().filter(sidecar);
        let containers = raw.spec.containers.into_iter().chain(sidecars);
        Self {
            name: meta.name,
            uid: meta.uid,
            version: meta.resource_version,
            created: meta.creation_timestamp.as_deref().and_then(seconds).unwrap_or(0),
            deletion,
            role: meta.labels.role,
            annotations: (meta.annotations != Annotations::default()).then(|| Box::new(meta.annotations)),
            ports: containers.flat_map(|container| ports(container.ports)).collect(),
            host_network: raw.spec.host_network,
            ended: matches!(raw.status.phase.as_deref(), Some("Succeeded" | "Failed")),
            ip: raw.status.pod_ip.filter(|ip| !ip.is_empty()),
            ready: raw.status.conditions.iter().any(|is| is.r#type == "Ready" && is.status == "True"),
        }
    }
}

// === impl Slice ===

impl From<RawSlice> for Slice {
    fn from(raw: RawSlice) -> Self {
        let endpoint = |raw: RawEndpoint| {
            let pod = raw.target_ref.filter(|target| target.kind == "Pod" && !target.uid.is_empty());
            Some(Endpoint {
                // More than one address of an endpoint has no meaning: the API calls for the first.
                address: raw.addresses.into_iter().next()?,
                // Not said means ready, as the API has it.
                ready: raw.conditions.ready.unwrap_or(true),
                terminating: raw.conditions.terminating.unwrap_or(false),
                pod: pod.map(|pod| (pod.name, pod.uid)),
            })
        };
        Self {
            name: raw.metadata.name,
            version: raw.metadata.resource_version,
            address_type: raw.address_type,
            endpoints: raw.endpoints.into_iter().filter_map(endpoint).collect(),
            ports: ports(raw.ports).collect(),
        }
    }
}

// === impl Service ===

impl From<RawService> for Service {
    fn from(raw: RawService) -> Self {
        let meta = raw.metadata;
        Self { name: meta.name, version: meta.resource_version, selector: raw.spec.selector }
    }
}

// === impl Pool ===

impl From<RawPool> for Pool {
    fn from(raw: RawPool) -> Self {
        Self {
            name: raw.metadata.name,
            version: raw.metadata.resource_version,
            selector: raw.spec.selector.match_labels,
            ports: raw
                .spec
                .target_ports
                .iter()
                .map(|port| port.number)
                .filter(|number| *number > 0)
                .collect(),
            protocol: raw.spec.app_protocol,
        }
    }
}

// === impl Objective ===

impl From<RawObjective> for Objective {
    fn from(raw: RawObjective) -> Self {
        let pool = raw.spec.pool_ref;
        Self {
            name: raw.metadata.name,
            version: raw.metadata.resource_version,
            priority: raw.spec.priority,
            pool: (!pool.name.is_empty()).then_some(pool.name),
        }
    }
}

// === impl Rewrite ===

impl From<RawRewrite> for Rewrite {
    fn from(raw: RawRewrite) -> Self {
        let (meta, pool) = (raw.metadata, raw.spec.pool_ref);
        let rule = |raw: RawRule| Rule {
            models: raw.matches.into_iter().map(|matched| matched.model.value).collect(),
            // Not said means alike, as the API has it.
            targets: raw
                .targets
                .into_iter()
                .map(|target| (target.model_rewrite, target.weight.unwrap_or(1)))
                .collect(),
        };
        Self {
            name: meta.name,
            version: meta.resource_version,
            created: meta.creation_timestamp.as_deref().and_then(seconds).unwrap_or(0),
            pool: (!pool.name.is_empty()).then_some(pool.name),
            rules: raw.spec.rules.into_iter().map(rule).collect(),
        }
    }
}

/// The declared ports that have a number.
fn ports(raw: Vec<RawPort>) -> impl Iterator<Item = Port> {
    raw.into_iter().filter_map(|port| {
        let number = port.container_port.or(port.port).filter(|number| *number > 0)?;
        let tcp = port.protocol.is_none_or(|protocol| protocol == "TCP");
        Some(Port { name: port.name.filter(|name| !name.is_empty()), number, tcp })
    })
}

/// An RFC 3339 time in seconds since 1970.
fn seconds(time: &str) -> Option<i64> {
    time.parse::<Timestamp>().ok().map(Timestamp::as_second)
}

/// Objects that are read by way of what the API server writes.
macro_rules! read_by {
    ($($object:ty: $raw:ty,)*) => {$(
        impl<'de> Deserialize<'de> for $object {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <$raw>::deserialize(deserializer).map(Self::from)
            }
        }
    )*};
}

read_by! {
    Pod: RawPod,
    Slice: RawSlice,
    Service: RawService,
    Pool: RawPool,
    Objective: RawObjective,
    Rewrite: RawRewrite,
}
