//! Access control of a port: by API key, and, where none is needed, by rejecting requests from web pages.
//!
//! A port on loopback needs no key, but browsers on this machine reach it too, and any page can make them send
//! requests. A page cannot send a request that changes something without an `Origin`, and it cannot set a `Host`
//! other than the name under which it reached the gateway.

use std::sync::Arc;

use http::request::Parts;
use http::{HeaderMap, Method, StatusCode, Uri, header};
use kvlane_fleet::clock::unix_time;
use kvlane_wire::api::path::{self, is_plain};
use kvlane_wire::api::{self, Api, EnginePath};

use crate::auth::{self, Access, Role};
use crate::error::ApiError;
use crate::head::FIELDS_MAX;
use crate::own_api::Port;
use crate::paths::{Audience, OwnPath, ends_in_a_name, engine_path};
use crate::proxy::Proxy;

/// The purpose of a request, by its path.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// A path of an engine.
    Engine(&'static EnginePath),
    /// A path that `server.extra_paths` gives to clients.
    Extra,
    /// An engine's path for operators of this role, and the methods that it takes; none for any.
    Operate(Role, Option<&'static str>),
    /// The gateway's own path, or an unknown one.
    Own,
    /// A question which methods a path takes, as browsers ask before a request from another origin.
    Options(&'static str),
}

// === impl Purpose ===

impl Purpose {
    /// The purpose of a request to `path`. An error for a path that another server may parse differently.
    pub(super) fn of(proxy: &Proxy, port: Port, path: &str) -> Result<Self, ApiError> {
        if !is_plain(path) && !ends_in_a_name(path) {
            return Err(ApiError::BadPath);
        }
        if matches!(port, Port::Operators { .. }) {
            return Ok(Self::Own);
        }
        let row = engine_path(path).map(|(row, _)| row);
        if let Some(row) = row.filter(|row| row.audience == api::Audience::Clients) {
            return Ok(Self::Engine(row));
        }
        let config = proxy.settings();
        let extra = config.server.extra_paths.iter().find(|extra| path::matches(&extra.path, path));
        match (extra.map(|extra| extra.role), row) {
            (Some(Role::User), _) => Ok(Self::Extra),
            (Some(role), _) => Ok(Self::Operate(role, None)),
            (None, Some(row)) if row.audience == api::Audience::Closed => {
                Err(ApiError::ClosedPath(path.chars().take(200).collect()))
            }
            // Under other methods some of them change the engine.
            (None, Some(row)) => Ok(Self::Operate(Role::Viewer, Some(row.methods))),
            (None, None) => Ok(Self::Own),
        }
    }

    /// The purpose of a request with this method.
    pub(super) fn asked_with(self, method: &Method, path: &str) -> Self {
        if method != Method::OPTIONS {
            return self;
        }
        match self {
            Self::Engine(row) => Self::Options(row.methods),
            Self::Operate(_, Some(methods)) => Self::Options(methods),
            Self::Own => OwnPath::of(path).map_or(self, |own| Self::Options(own.methods)),
            Self::Extra | Self::Operate(_, None) | Self::Options(_) => self,
        }
    }

    /// The row of an engine's path, if it is for clients.
    pub(super) fn row(self) -> Option<&'static EnginePath> {
        if let Self::Engine(row) = self { Some(row) } else { None }
    }

    /// The API whose body is parsed, if any.
    pub(super) fn api(self) -> Option<Api> {
        self.row()?.api()
    }

    /// The methods that engines take there; none for any.
    pub(super) fn methods(self) -> Option<&'static str> {
        match self {
            Self::Engine(row) => Some(row.methods),
            Self::Operate(_, methods) => methods,
            Self::Extra | Self::Own | Self::Options(_) => None,
        }
    }
}

/// Rejects an HTTP/2 head that would be rejected in HTTP/1, and that hyper accepts.
pub(super) fn is_strict(parts: &Parts) -> Result<(), ApiError> {
    if parts.headers.len() > FIELDS_MAX {
        return Err(ApiError::TooManyFields);
    }
    if parts.headers.get_all(header::HOST).iter().count() > 1 {
        return Err(ApiError::BadHead("it has several `Host` fields"));
    }
    Ok(())
}

/// Authorizes a request, and stores the sender's identity in it.
pub(super) fn admit(proxy: &Proxy, port: Port, parts: &mut Parts, purpose: Purpose) -> Result<(), ApiError> {
    if matches!(purpose, Purpose::Options(_)) {
        // Browsers send no key with it, and the answer says only what the documentation says.
        return Ok(());
    }
    let path = parts.uri.path();
    let auth = proxy.auth();
    let own = if matches!(purpose, Purpose::Own) { OwnPath::of(path) } else { None };
    let operates = own.is_some_and(OwnPath::is_for_operators) || matches!(purpose, Purpose::Operate(..));
    let clients = matches!(port, Port::Clients { .. });
    let needed = match (clients, operates) {
        _ if own.is_some_and(|own| own.audience == Audience::Open) => false,
        (false, _) if auth.opens_metrics() && own.is_some_and(OwnPath::is_metrics) => false,
        // A proxy that is reachable from other machines may be in front of this port.
        (true, _) => auth.clients_need_a_key() || (operates && auth.has_keys()),
        (false, _) => auth.operators_need_a_key(),
    };
    let access = match purpose {
        Purpose::Operate(Role::Admin, _) => Access::Change,
        Purpose::Operate(..) => Access::Look,
        _ if clients && !operates => Access::Use,
        _ => auth::access_of(&parts.method),
    };
    if matches!(purpose, Purpose::Operate(..)) && port == (Port::Clients { loopback: false }) && !needed {
        let message =
            "this path is for operators: configure keys (auth.keys) and send one with the path's role, or listen on \
             loopback only".into();
        return Err(ApiError::Admin { status: StatusCode::FORBIDDEN, message });
    }
    if operates
        && port == (Port::Operators { loopback: false })
        && auth.closes_admin()
        && !own.is_some_and(OwnPath::is_metrics)
    {
        let message =
            "without a key for operators this port serves only /metrics and health: set a key with the role \
             viewer or admin (auth.keys, `kvlane key new`) and send it"
                .into();
        return Err(ApiError::Admin { status: StatusCode::FORBIDDEN, message });
    }
    let admitted = auth.admit(&parts.headers, access, needed, unix_time());
    if let Some((outcome, name)) = auth::outcome(&admitted) {
        proxy.fleet.metrics.auth.note(outcome, name);
    }
    match admitted? {
        Some(identity) => _ = parts.extensions.insert(identity),
        None if operates && !needed => refuse_pages(port, parts, access)?,
        None => {}
    }
    Ok(())
}

/// Rejects requests that a page in a browser may have sent.
fn refuse_pages(port: Port, parts: &Parts, access: Access) -> Result<(), ApiError> {
    let refused =
        |message: &str| Err(ApiError::Admin { status: StatusCode::FORBIDDEN, message: message.into() });
    let host = host(&parts.uri, &parts.headers);
    let (Port::Clients { loopback } | Port::Operators { loopback }) = port;
    if loopback && !host.is_some_and(names_this_machine) {
        return refused("without a key the admin API accepts only `localhost` or an IP address as `Host`");
    }
    let origin = parts.headers.get(header::ORIGIN);
    let own = |origin: &str| origin.split_once("://").map(|(_, rest)| rest) == host;
    if access == Access::Change && origin.is_some_and(|origin| !origin.to_str().is_ok_and(own)) {
        return refused("without a key the admin API accepts no cross-origin changes");
    }
    Ok(())
}

/// The name under which the client addresses the gateway: `host[:port]`.
pub(super) fn host<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let authority = uri.authority().map(http::uri::Authority::as_str);
    authority.or_else(|| headers.get(header::HOST)?.to_str().ok())
}

/// Whether no other party can define this name: an IP address or `localhost`.
fn names_this_machine(host: &str) -> bool {
    let Ok(authority) = host.parse::<http::uri::Authority>() else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

/// Whether this client must not learn about the requests of others: where tenants are isolated, all but administrators.
pub(super) fn keeps_apart(proxy: &Proxy, port: Port, parts: &Parts) -> bool {
    let operates = auth::identity(parts).is_some_and(|identity| identity.role == Role::Admin);
    matches!(port, Port::Clients { .. }) && !operates && proxy.settings().auth.isolate_tenants
}

/// Whether this client may see the workers: every client while there are no keys, otherwise operators.
pub(super) fn shows_workers(proxy: &Proxy, port: Port, parts: &Parts) -> bool {
    let auth = proxy.auth();
    let known = auth::identity(parts).map(Arc::as_ref);
    if port == (Port::Operators { loopback: false }) && auth.closes_admin() {
        return false;
    }
    !auth.has_keys()
        || known.is_some_and(|identity| identity.role != Role::User)
        || (matches!(port, Port::Operators { .. }) && !auth.operators_need_a_key())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_trusted_as_host() {
        for name in ["localhost", "LocalHost:29000", "127.0.0.1:29000", "[::1]:29000", "10.0.0.7"] {
            assert!(names_this_machine(name), "{name}");
        }
        for name in ["evil.example", "localhost.evil.example:29000", "127.0.0.1.evil.example", "", "a b"] {
            assert!(!names_this_machine(name), "{name}");
        }
    }
}
