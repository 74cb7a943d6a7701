//! What is listed and watched: objects of one kind in one namespace.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// What a query string keeps of a value.
const VALUE: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'&')
    .add(b'+')
    .add(b'<')
    .add(b'>')
    .add(b'=')
    .add(b'?')
    .add(b'/');

/// A kind of object of the API.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Its API group; empty for the core group.
    pub(crate) group: &'static str,
    /// The version of the group.
    pub(crate) version: &'static str,
    /// Its name in paths and in the rules of roles.
    pub(crate) resource: &'static str,
    /// Its name in manifests.
    pub(crate) name: &'static str,
}

/// Objects of one kind in one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collection {
    /// Their kind.
    pub(crate) kind: &'static Kind,
    /// Their namespace.
    pub(crate) namespace: String,
    /// Only those with these labels.
    pub(crate) labels: Option<String>,
    /// Only the one of this name.
    pub(crate) name: Option<String>,
}

pub(crate) static PODS: Kind = Kind { group: "", version: "v1", resource: "pods", name: "Pod" };
pub(crate) static SERVICES: Kind = Kind { group: "", version: "v1", resource: "services", name: "Service" };
pub(crate) static SLICES: Kind =
    Kind { group: "discovery.k8s.io", version: "v1", resource: "endpointslices", name: "EndpointSlice" };
pub(crate) static POOLS: Kind = Kind {
    group: "inference.networking.k8s.io",
    version: "v1",
    resource: "inferencepools",
    name: "InferencePool",
};
pub(crate) static OBJECTIVES: Kind = Kind {
    group: "llm-d.ai",
    version: "v1alpha2",
    resource: "inferenceobjectives",
    name: "InferenceObjective",
};
/// Where InferenceObjectives were before they moved to llm-d.
pub(crate) static OLD_OBJECTIVES: Kind = Kind {
    group: "inference.networking.x-k8s.io",
    version: "v1alpha2",
    resource: "inferenceobjectives",
    name: "InferenceObjective",
};

pub(crate) static REWRITES: Kind = Kind {
    group: "llm-d.ai",
    version: "v1alpha2",
    resource: "inferencemodelrewrites",
    name: "InferenceModelRewrite",
};
/// Where InferenceModelRewrites were before they moved to llm-d.
pub(crate) static OLD_REWRITES: Kind = Kind {
    group: "inference.networking.x-k8s.io",
    version: "v1alpha2",
    resource: "inferencemodelrewrites",
    name: "InferenceModelRewrite",
};

// === impl Collection ===

impl Collection {
    /// The rule of a Role that grants what discovery does.
    pub(crate) fn rule(&self) -> String {
        let Kind { group, resource, .. } = self.kind;
        let name = self.name.as_ref().map_or(String::new(), |name| format!(", resourceNames: [\"{name}\"]"));
        format!(
            "{{apiGroups: [\"{group}\"], resources: [\"{resource}\"]{name}, verbs: [\"list\", \"watch\"]}}"
        )
    }

    /// The path of a request for a page of at most `limit` objects, which begins at `from`.
    pub(crate) fn list_path(&self, limit: usize, from: &str) -> String {
        let mut path = self.path();
        path.push_str(&format!("limit={limit}"));
        if !from.is_empty() {
            path.push_str("&continue=");
            path.extend(utf8_percent_encode(from, VALUE));
        }
        path
    }

    /// The path of a request for what happens after `version`, which the server ends after some seconds.
    pub(crate) fn watch_path(&self, version: &str, seconds: u64) -> String {
        let mut path = self.path();
        path.push_str(&format!(
            "watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion="
        ));
        path.extend(utf8_percent_encode(version, VALUE));
        path
    }

    /// The path, up to where the next parameter goes.
    fn path(&self) -> String {
        let Kind { group, version, resource, .. } = self.kind;
        let mut path = match *group {
            "" => format!("/api/{version}"),
            group => format!("/apis/{group}/{version}"),
        };
        path.push_str("/namespaces/");
        path.extend(utf8_percent_encode(&self.namespace, VALUE));
        path.push('/');
        path.push_str(resource);
        path.push('?');
        if let Some(labels) = &self.labels {
            path.push_str("labelSelector=");
            path.extend(utf8_percent_encode(labels, VALUE));
            path.push('&');
        }
        if let Some(name) = &self.name {
            path.push_str("fieldSelector=metadata.name%3D");
            path.extend(utf8_percent_encode(name, VALUE));
            path.push('&');
        }
        path
    }

    /// What it is, as in `pods in namespace serving`.
    pub(crate) fn said(&self) -> String {
        format!("{} in namespace {}", self.kind.resource, self.namespace)
    }
}
