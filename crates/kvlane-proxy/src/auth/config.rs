//! Who may do what.

use std::path::PathBuf;

use kvlane_http::network::Network;
use kvlane_http::secret::{KeyHash, Secret};
use serde::{Deserialize, Serialize};

use crate::auth::identity::Role;
use crate::auth::jwt::JwtSpec;

/// Who may use the gateway, and who may operate it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Security {
    /// The keys that open it, by their hashes.
    pub keys: Vec<KeySpec>,
    /// A file with more of them, one on a line: `name role sha256 [trusted]`.
    pub keys_file: Option<PathBuf>,
    /// Whose signed tokens are keys, too.
    pub jwt: Option<JwtSpec>,
    /// Whether clients need no key even though there are keys.
    pub open_clients: bool,
    /// Whether the operators' port may listen to the world without a key.
    pub open_admin: bool,
    /// Whether the key a client shows us also goes to workers that have none of their own.
    pub forward_credentials: bool,
    /// Whether what one tenant sent is kept from all others: no prefix of theirs is found, here or in engines.
    pub isolate_tenants: bool,
    /// The secret under which tenants' salts are made, the same at all gateways of a fleet; none: one is made at start.
    pub tenant_salt_key: Option<Secret>,
    /// Networks in which workers that are added while running must be; empty: all but those that no worker is in.
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
