//! Why the API server was not asked, or did not answer as it should, and what to do about it.

use std::error::Error;

use http::StatusCode;

use crate::collection::{Collection, OBJECTIVES, OLD_OBJECTIVES, POOLS};
use crate::objects::Status;

/// A question to the API server that has no answer.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What kind of failure it is.
    pub(crate) cause: Cause,
    /// What failed, why, and what to do: the same text as long as the reason is the same.
    pub(crate) problem: String,
}

/// Kinds of failures that are treated differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The right to do it lacks.
    Denied,
    /// Its kind of object is not known to the API server.
    Missing,
    /// What was known is too old to go on from.
    Expired,
    /// The connection broke that events came through.
    Cut,
    /// The API server answers, and cannot do it.
    Answered,
    /// The API server is not reached, is silent, or does not accept who asks: another connection, with credentials and
    /// certificates that are read again, may do better.
    Unreachable,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// All objects.
    List,
    /// Changes of objects.
    Watch,
}

// === impl Failure ===

impl Failure {
    /// The API server could not be reached.
    pub(crate) fn unreachable(problem: String) -> Self {
        Self { cause: Cause::Unreachable, problem }
    }

    /// The API server has answered something that cannot be used.
    pub(crate) fn answered(problem: String) -> Self {
        Self { cause: Cause::Answered, problem }
    }

    /// The request failed, or the answer's body.
    pub(crate) fn broken(verb: Verb, of: &Collection, error: &dyn Error) -> Self {
        Self::unreachable(format!("cannot {} {}: {}", verb.name(), of.said(), told(error)))
    }

    /// The API server has refused the request.
    pub(crate) fn refused(verb: Verb, of: &Collection, status: StatusCode, said: &Status) -> Self {
        let (verb, what, code) = (verb.name(), of.said(), status.as_u16());
        let why = match said.message.trim() {
            "" => String::new(),
            message => format!(" ({})", first_line(message)),
        };
        let (cause, problem) = match code {
            401 => (
                Cause::Unreachable,
                format!(
                    "cannot {verb} {what}: the API server answered 401{why}: the token or certificate has expired or is \
                     not one of this cluster's; renew the kubeconfig's credentials, or restart the pod if its service \
                     account was deleted and made again"
                ),
            ),
            403 => (
                Cause::Denied,
                format!(
                    "cannot {verb} {what}: the API server answered 403{why}: grant the service account `{verb}` on \
                     `{}` in namespace {} by a Role with the rule {} (deploy/helm/kvlane, templates/role.yaml)",
                    of.kind.resource,
                    of.namespace,
                    of.rule()
                ),
            ),
            404 => (
                Cause::Missing,
                format!("cannot {verb} {what}: the API server answered 404: {}", missing(of)),
            ),
            410 => (Cause::Expired, format!("cannot {verb} {what}: the API server answered 410{why}")),
            400 if of.labels.is_some() => (
                Cause::Answered,
                format!("cannot {verb} {what}: the API server answered 400{why}: check the label selector"),
            ),
            _ => (Cause::Answered, format!("cannot {verb} {what}: the API server answered {code}{why}")),
        };
        Self { cause, problem }
    }
}

// === impl Verb ===

impl Verb {
    /// Its name in RBAC.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

/// What to do where the API server does not know a kind of object.
fn missing(of: &Collection) -> String {
    let kind = of.kind;
    let crd = format!("{}.{}", kind.resource, kind.group);
    if kind == &POOLS {
        return format!(
            "the CustomResourceDefinition {crd} ({}) is not installed: `kubectl apply -k \
             https://github.com/kubernetes-sigs/gateway-api-inference-extension/config/crd`",
            kind.version
        );
    }
    if kind == &OBJECTIVES || kind == &OLD_OBJECTIVES {
        return format!("the CustomResourceDefinition {crd} ({}) is not installed", kind.version);
    }
    format!("it does not serve {crd} {}: is this address a Kubernetes API server?", kind.version)
}

/// An error and its causes; a cause that an error already contains is not repeated.
pub(crate) fn told(error: &dyn Error) -> String {
    let mut told = error.to_string();
    if let Some(rest) = told.strip_prefix("ServiceError: ") {
        told = rest.to_owned();
    }
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        if !told.contains(&cause) {
            told = format!("{told}: {cause}");
        }
        next = error.source();
    }
    // Libraries add where to read about it.
    told.split(": https://").next().unwrap_or_default().to_owned()
}

/// The beginning of a text from outside.
fn first_line(text: &str) -> String {
    const CHARS_MAX: usize = 300;
    text.lines()
        .next()
        .unwrap_or_default()
        .chars()
        .filter(|char| !char.is_control())
        .take(CHARS_MAX)
        .collect()
}
