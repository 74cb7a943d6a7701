//! The parts of Kubernetes objects that discovery uses. All other fields are skipped while they are parsed: a pod of
//! 10 kB is kept in a few hundred bytes.

mod null;
mod raw;

use std::collections::BTreeMap;

use serde::Deserialize;

use self::null::or_default;

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
    /// An InferenceModelRewrite.
    Rewrite(Rewrite),
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq)]
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
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Service {
    name: String,
    version: String,
    /// The labels of its pods; empty if its endpoints are written by hand.
    pub(crate) selector: BTreeMap<String, String>,
}

/// An InferencePool.
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Objective {
    /// Its name, by which requests refer to it.
    pub(crate) name: String,
    version: String,
    /// Its priority.
    pub(crate) priority: i64,
    /// The InferencePool that it is for.
    pub(crate) pool: Option<String>,
}

/// An InferenceModelRewrite.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rewrite {
    /// Its name.
    pub(crate) name: String,
    version: String,
    /// When it was created, in seconds since 1970.
    pub(crate) created: i64,
    /// The InferencePool that it is for.
    pub(crate) pool: Option<String>,
    /// Its rules, of which the first that matches applies.
    pub(crate) rules: Vec<Rule>,
}

/// A rule of an InferenceModelRewrite.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    /// The names of models that it applies to; empty for all.
    pub(crate) models: Vec<String>,
    /// The models that serve them instead, with their weights.
    pub(crate) targets: Vec<(String, u32)>,
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

// === impl Rewrite ===

impl Object for Rewrite {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn into_any(self) -> Any {
        Any::Rewrite(self)
    }
}
