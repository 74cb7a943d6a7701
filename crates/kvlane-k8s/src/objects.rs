//! The parts of Kubernetes objects that discovery uses. All other fields are skipped while they are parsed: a pod of
//! 10 kB is kept in a few hundred bytes.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer};

/// An object of a collection that is watched.
pub(crate) trait Object: for<'de> Deserialize<'de> + Send + 'static {
    /// Its name, unique in its namespace.
    fn name(&self) -> &str;
    /// Its `resourceVersion`.
    fn version(&self) -> &str;
    /// The object as a variant.
    fn into_any(self) -> Any;
}

/// An object of any kind.
#[derive(Debug)]
pub(crate) enum Any {
    /// A pod.
    Pod(Pod),
    /// An EndpointSlice.
    Slice(Slice),
    /// A Service.
    Service(Service),
    /// An InferencePool.
    Pool(Pool),
    /// An InferenceObjective.
    Objective(Objective),
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "RawPod")]
pub(crate) struct Pod {
    /// Its name.
    pub(crate) name: String,
    /// Its UID.
    pub(crate) uid: String,
    version: String,
    /// When it was created, in seconds since 1970.
    pub(crate) created: i64,
    /// Whether and how it is being deleted.
    pub(crate) deletion: Option<Deletion>,
    /// The value of its label `llm-d.ai/role`.
    pub(crate) role: Option<String>,
    /// Its annotations.
    pub(crate) annotations: Option<Box<Annotations>>,
    /// The ports of its containers, sidecars included.
    pub(crate) ports: Vec<Port>,
    /// Its address is its node's.
    pub(crate) host_network: bool,
    /// All its containers have ended, and none is started again.
    pub(crate) ended: bool,
    /// Its address.
    pub(crate) ip: Option<String>,
    /// Whether its condition `Ready` is true.
    pub(crate) ready: bool,
}

/// How a pod is being deleted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Deletion {
    /// When its grace period ends, in seconds since 1970: `deletionTimestamp` is the time of the request plus the grace.
    pub(crate) at: Option<i64>,
    /// The grace period in seconds.
    pub(crate) grace: u64,
}

/// The annotations of a pod that say how its engine is reached.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Annotations {
    /// `http` or `https`.
    #[serde(rename = "kvlane.io/scheme")]
    pub(crate) scheme: Option<String>,
    /// The port of its KV events, or one for each rank.
    #[serde(rename = "kvlane.io/kv-events-port")]
    pub(crate) kv_events_port: Option<String>,
    /// The port of its replay socket, or one for each rank.
    #[serde(rename = "kvlane.io/kv-events-replay-port")]
    pub(crate) replay_port: Option<String>,
    /// The topic of its KV events.
    #[serde(rename = "kvlane.io/kv-events-topic")]
    pub(crate) topic: Option<String>,
    /// Its model's tokenizer.
    #[serde(rename = "kvlane.io/tokenizer")]
    pub(crate) tokenizer: Option<String>,
    /// Its model.
    #[serde(rename = "kvlane.io/model")]
    pub(crate) model: Option<String>,
    /// The bootstrap port of a prefill worker.
    #[serde(rename = "sglang.ai/bootstrap-port")]
    pub(crate) bootstrap_port: Option<String>,
}

/// A port that a container or an EndpointSlice declares.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Port {
    /// Its name.
    pub(crate) name: Option<String>,
    /// Its number.
    pub(crate) number: u16,
    /// Whether its protocol is TCP.
    pub(crate) tcp: bool,
}

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "RawSlice")]
pub(crate) struct Slice {
    /// Its name.
    pub(crate) name: String,
    version: String,
    /// `IPv4`, `IPv6` or `FQDN`.
    pub(crate) address_type: String,
    /// Its endpoints.
    pub(crate) endpoints: Vec<Endpoint>,
    /// The ports of each endpoint.
    pub(crate) ports: Vec<Port>,
}

/// An endpoint of a slice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Endpoint {
    /// Its address.
    pub(crate) address: String,
    /// Whether it takes requests.
    pub(crate) ready: bool,
    /// Whether it is about to end.
    pub(crate) terminating: bool,
    /// Its pod's name and UID, if it is one.
    pub(crate) pod: Option<(String, String)>,
}

/// A Service.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "RawService")]
pub(crate) struct Service {
    name: String,
    version: String,
    /// The labels of its pods; empty if its endpoints are written by hand.
    pub(crate) selector: BTreeMap<String, String>,
}

/// An InferencePool.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "RawPool")]
pub(crate) struct Pool {
    name: String,
    version: String,
    /// The labels of its pods.
    pub(crate) selector: BTreeMap<String, String>,
    /// Its ports: one engine each.
    pub(crate) ports: Vec<u16>,
    /// `http` or `kubernetes.io/h2c`.
    pub(crate) protocol: Option<String>,
}

/// An InferenceObjective.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "RawObjective")]
pub(crate) struct Objective {
    /// Its name, by which requests refer to it.
    pub(crate) name: String,
    version: String,
    /// Its priority.
    pub(crate) priority: i64,
    /// The InferencePool that it is for.
    pub(crate) pool: Option<String>,
}

/// A page of a list.
#[derive(Deserialize)]
#[serde(bound = "T: Object")]
pub(crate) struct Page<T: Object> {
    /// Where the next page begins, and the list's version.
    pub(crate) metadata: ListMeta,
    /// The objects of this page.
    #[serde(deserialize_with = "or_default")]
    pub(crate) items: Vec<T>,
}

/// Metadata of a list.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct ListMeta {
    /// The version that a watch goes on from.
    pub(crate) resource_version: String,
    /// Where the next page begins; empty on the last page.
    pub(crate) r#continue: String,
}

/// What a watch event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Happened {
    /// The object is new.
    Added,
    /// It is another than before.
    Modified,
    /// It is gone.
    Deleted,
    /// Nothing, up to this version.
    Bookmark,
    /// The watch has failed.
    Error,
}

/// The kind of a watch event.
#[derive(Deserialize)]
pub(crate) struct EventKind {
    /// What has happened.
    pub(crate) r#type: Happened,
}

/// The object of a watch event.
#[derive(Deserialize)]
pub(crate) struct EventObject<T> {
    /// It.
    pub(crate) object: T,
}

/// The object of a bookmark.
#[derive(Deserialize)]
pub(crate) struct Bookmark {
    /// Its version.
    pub(crate) metadata: ListMeta,
}

/// How an API server says that it cannot do something.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Status {
    /// The HTTP status.
    #[serde(deserialize_with = "or_default")]
    pub(crate) code: u16,
    /// What the matter is.
    #[serde(deserialize_with = "or_default")]
    pub(crate) message: String,
}

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

// === impl Pod ===

impl Object for Pod {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn into_any(self) -> Any {
        Any::Pod(Self { version: String::new(), ..self })
    }
}

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

impl Object for Slice {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn into_any(self) -> Any {
        Any::Slice(self)
    }
}

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

impl Object for Service {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn into_any(self) -> Any {
        Any::Service(self)
    }
}

impl From<RawService> for Service {
    fn from(raw: RawService) -> Self {
        let meta = raw.metadata;
        Self { name: meta.name, version: meta.resource_version, selector: raw.spec.selector }
    }
}

// === impl Pool ===

impl Object for Pool {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn into_any(self) -> Any {
        Any::Pool(self)
    }
}

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

impl Object for Objective {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn into_any(self) -> Any {
        Any::Objective(self)
    }
}

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

/// The default for null, which Go writes for an empty list or map.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
