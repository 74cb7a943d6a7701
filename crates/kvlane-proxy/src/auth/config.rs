//! The configuration section `auth`.

use std::path::PathBuf;

use kvlane_core::section;
use kvlane_http::network::Network;
use kvlane_http::secret::{KeyHash, Secret};

use crate::auth::identity::{PRIORITY_MAX, Role};
use crate::auth::jwt::JwtSpec;

section! {
    /// Authentication and authorization of clients and operators: keys, roles, tokens and tenants.
    pub struct Security {
        /// Keys by their hashes, as `kvlane key new NAME` prints them:
        /// `{name: alice, sha256: 9f86d081..., role: user, trusted: false}`.
        pub keys: Vec<KeySpec> = Vec::new();
        /// A file with more keys, one per line: `name role sha256 [trusted]`.
        pub keys_file: Option<PathBuf> = None;
        /// Issuer of signed tokens (JWT) that are accepted as keys, as in `{issuer: 'https://idp.example', audience:
        /// kvlane, jwks_url: 'https://idp.example/jwks'}`. Algorithms: RS256, RS384, RS512, PS256, ES256, ES384,
        /// EdDSA.
        pub jwt: Option<JwtSpec> = None;
        /// Whether clients need no key, even if keys are configured.
        pub open_clients: bool = false;
        /// Whether the admin API may listen beyond loopback without a key.
        pub open_admin: bool = false;
        /// Whether `/metrics` needs no key, even beyond loopback, for Prometheus. It shows the names of models, workers,
        /// keys and limits. Without a key for operators the admin API then answers only while it listens on loopback.
        pub open_metrics: bool = false;
        /// Whether credentials of clients are forwarded to workers without their own key.
        pub forward_credentials: bool = false;
        /// Whether tenants share no cached prefixes, neither in kvlane nor in engines (by `cache_salt` in the body).
        pub isolate_tenants: bool = false;
        /// The secret key of tenants' salts: `{env: NAME}` or `{file: PATH}`, 16 bytes or more, the same at all
        /// gateways of a fleet. null: each gateway generates one at start, so that isolated tenants' prefixes are
        /// cold after its restart.
        pub tenant_salt_key: Option<Secret> = None;
        /// Networks allowed for workers added while running, as in `[10.0.0.0/8]`; empty: all except reserved ones.
        pub allowed_networks: Vec<Network> = Vec::new();
    }
}

section! {
    /// An API key: its name, its hash and what it allows.
    pub struct KeySpec {
        /// Its name in limits, logs and metrics.
        pub name: String;
        /// The SHA-256 of the key, in hexadecimal digits.
        pub sha256: KeyHash;
        /// `user`: use models; `viewer`: read the admin API and the metrics; `admin`: everything.
        #[serde(default)]
        pub role: Role;
        /// Whether its holder may name the tenant of a request (`hints.tenant_headers`); else the key is the tenant.
        #[serde(default)]
        pub trusted: bool;
        /// The highest priority that its requests have: one that asks for more gets this.
        #[serde(default = "highest")]
        pub priority_max: i8;
    }
}

// === impl KeySpec ===

impl KeySpec {
    /// A key that may not name tenants, with any priority.
    pub fn new(name: &str, sha256: KeyHash, role: Role) -> Self {
        Self { name: name.into(), sha256, role, trusted: false, priority_max: PRIORITY_MAX }
    }
}

fn highest() -> i8 {
    PRIORITY_MAX
}
