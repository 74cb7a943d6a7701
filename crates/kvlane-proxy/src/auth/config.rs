//! The configuration section `auth`.

use std::path::PathBuf;

use kvlane_http::network::Network;
use kvlane_http::secret::{KeyHash, Secret};
use serde::{Deserialize, Serialize};

use crate::auth::identity::Role;
use crate::auth::jwt::JwtSpec;

/// Authentication and authorization of clients and operators: keys, roles, tokens and tenants.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Security {
    /// The API keys, by their hashes.
    pub keys: Vec<KeySpec>,
    /// A file with further keys, one per line: `name role sha256 [trusted]`.
    pub keys_file: Option<PathBuf>,
    /// The issuer of signed tokens that are accepted as keys.
    pub jwt: Option<JwtSpec>,
    /// Whether clients need no key although keys are configured.
    pub open_clients: bool,
    /// Whether the admin port may listen on other addresses than loopback without a key.
    pub open_admin: bool,
    /// Whether a client's key is forwarded to workers that have no key of their own.
    pub forward_credentials: bool,
    /// Whether tenants are isolated: no prefix of one tenant is found for another, in the gateway or in engines.
    pub isolate_tenants: bool,
    /// The secret from which tenants' cache salts are derived, the same at all gateways of a fleet; none: a random
    /// one is made at start.
    pub tenant_salt_key: Option<Secret>,
    /// Networks allowed for workers that are added at run time; empty: all addresses that a worker can have.
    pub allowed_networks: Vec<Network>,
}

/// An API key: its name, its hash and what it allows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeySpec {
    /// Its name in limits, logs and metrics.
    pub name: String,
    /// The SHA-256 of the key, in hexadecimal digits.
    pub sha256: KeyHash,
    /// What its holder may do.
    #[serde(default)]
    pub role: Role,
    /// Whether its holder may name the tenant of a request: `hints.tenant_headers`.
    #[serde(default)]
    pub trusted: bool,
}
