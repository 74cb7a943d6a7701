//! Authentication and authorization: API keys, signed tokens and roles.
//!
//! An authenticated client is an [`Identity`]: limits, logs and metrics use its name, and its tenant is proven by the
//! key. [`Auth`] is the compiled configuration; a reload replaces it whole.
//!
//! Only SHA-256 hashes of keys are kept. A presented key is hashed and then looked up under a second, keyed hash that
//! differs in each process, so the time of a lookup reveals nothing to a client that tries keys.

pub mod config;
pub mod identity;
pub mod jwt;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderMap};
use http::request::Parts;
use http::{Method, StatusCode};
use kvlane_core::config::{ConfigError, within, wrong};
use kvlane_fleet::metrics::OTHER_NAMES;
use kvlane_http::network::Allowed;
use kvlane_http::secret::KeyHash;
use ring::hmac;
use ring::rand::SystemRandom;
use tokio::sync::Notify;
use tokio::time::sleep;

use self::identity::NAME_BYTES_MAX;
pub use self::identity::{Access, Identity, PRIORITY_MAX, Role};
pub use self::jwt::Jwt;
pub use self::jwt::JwtSpec;
use self::jwt::TokenError;
use crate::auth::config::{KeySpec, Security};
use crate::limits::config::ANY;

/// Most keys.
const KEYS_MAX: usize = 10_000;
/// Longest key that is checked; signed tokens have a few thousand bytes.
const KEY_BYTES_MAX: usize = 16 << 10;
/// Shortest time between two fetches of the token keys.
const REFETCH_MIN: Duration = Duration::from_secs(10);
/// Largest key file.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The header in which Anthropic clients send their key.
const API_KEY: &str = "x-api-key";

/// Why a request is not authorized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The request has no key.
    #[error("an API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")]
    Missing,
    /// The key is unknown.
    #[error("unknown API key: check that it is complete and has not been revoked")]
    Invalid,
    /// The key's role does not allow the request.
    #[error("the key of `{name}` has the role {role}, which does not allow this")]
    Forbidden {
        /// The name of the key.
        name: Arc<str>,
        /// Its role.
        role: &'static str,
    },
}

/// The compiled keys and roles.
pub struct Auth {
    keys: HashMap<[u8; 32], Arc<Identity>>,
    /// Key of the second hash.
    blind: hmac::Key,
    jwt: Option<Jwt>,
    /// Notifies the task that fetches token keys that a token was signed by an unknown key.
    wanted: Notify,
    open_clients: bool,
    open_metrics: bool,
    open_admin: bool,
    forward_credentials: bool,
    allowed: Arc<Allowed>,
}

// === impl Denied ===

impl Denied {
    /// Its HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Missing | Self::Invalid => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
        }
    }
}

/// The outcome of an authentication and the name of the key, as labels of metrics; none if no key was needed or sent.
pub fn outcome(admitted: &Result<Option<Arc<Identity>>, Denied>) -> Option<(&'static str, &str)> {
    Some(match admitted {
        Ok(None) => return None,
        Ok(Some(identity)) => ("accepted", &identity.name),
        Err(Denied::Missing) => ("missing", ""),
        Err(Denied::Invalid) => ("invalid", ""),
        Err(Denied::Forbidden { name, .. }) => ("forbidden", name),
    })
}

// === impl Auth ===

impl Auth {
    /// Reads the keys and the key files.
    ///
    /// # Errors
    /// The first invalid key, or a file that cannot be read.
    pub fn read(config: &Security) -> Result<Self, ConfigError> {
        let mut specs = config.keys.clone();
        if let Some(path) = &config.keys_file {
            specs.extend(keys_in(path).or_else(|problem| wrong("auth.keys_file", problem))?);
        }
        within("auth.keys", &specs.len(), 0..=KEYS_MAX)?;
        let random = SystemRandom::new();
        let Ok(blind) = hmac::Key::generate(hmac::HMAC_SHA256, &random) else {
            return wrong("auth.keys", "the system's random number generator failed".into());
        };
        let mut keys = HashMap::with_capacity(specs.len());
        for KeySpec { name, sha256, role, trusted, priority_max } in &specs {
            check_name(name).or_else(|problem| wrong("auth.keys", problem))?;
            let identity = Arc::new(Identity {
                name: name.as_str().into(),
                role: *role,
                trusted: *trusted,
                priority_max: *priority_max,
            });
            if let Some(other) = keys.insert(blinded(&blind, *sha256), identity) {
                return wrong("auth.keys", format!("'{}' and '{name}' have the same key", other.name));
            }
        }
        Ok(Self {
            keys,
            blind,
            jwt: config.jwt.as_ref().map(Jwt::read).transpose()?,
            wanted: Notify::new(),
            open_clients: config.open_clients,
            open_metrics: config.open_metrics,
            open_admin: config.open_admin,
            forward_credentials: config.forward_credentials,
            allowed: Arc::new(Allowed::new(&config.allowed_networks)),
        })
    }

    /// Checks the keys, and that no client without a key can operate the gateway from another machine.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(config: &Security, metrics_host: IpAddr) -> Result<(), ConfigError> {
        let auth = Self::read(config)?;
        if !metrics_host.is_loopback() && auth.closes_admin() && !config.open_metrics {
            let problem = format!(
                "{metrics_host}: a client that reaches the admin API can add a worker and so receive prompts. Set a key \
                 with the role admin (`kvlane key new`, --admin-api-key), or listen on loopback, or set --insecure-admin; for \
                 /metrics alone, set --open-metrics",
            );
            return wrong("metrics.host", problem);
        }
        Ok(())
    }

    /// Whether any key is configured, or tokens are accepted.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty() || self.jwt.is_some()
    }

    /// The names of the configured keys.
    pub fn key_names(&self) -> impl Iterator<Item = &str> {
        self.keys.values().map(|identity| &*identity.name)
    }

    /// Whether requests to models need a key: as soon as any key is configured.
    pub fn clients_need_a_key(&self) -> bool {
        self.has_keys() && !self.open_clients
    }

    /// Whether operators need a key: as soon as a key for operators is configured.
    pub fn operators_need_a_key(&self) -> bool {
        self.keys.values().any(|identity| identity.role != Role::User)
            || self.jwt.as_ref().is_some_and(|jwt| jwt.spec.names_operators())
    }

    /// Whether `/metrics` needs no key.
    pub fn opens_metrics(&self) -> bool {
        self.open_metrics
    }

    /// Whether operators can use the admin API only on loopback: there is no key for them.
    pub fn closes_admin(&self) -> bool {
        !self.operators_need_a_key() && !self.open_admin
    }

    /// Whether a client's key may be forwarded to a worker that has no key of its own.
    pub fn forwards_credentials(&self) -> bool {
        self.forward_credentials || !self.has_keys()
    }

    /// Allowed addresses of workers that are added at run time.
    pub fn allowed(&self) -> Arc<Allowed> {
        Arc::clone(&self.allowed)
    }

    /// Authorizes a request at `now_s` seconds after 1970. Where no key is `needed`, requests without a good key are
    /// let in as unauthenticated, and a good key still identifies its holder.
    ///
    /// # Errors
    /// Why the request is rejected.
    pub fn admit(
        &self,
        headers: &HeaderMap,
        access: Access,
        needed: bool,
        now_s: f64,
    ) -> Result<Option<Arc<Identity>>, Denied> {
        if !self.has_keys() && !needed {
            return Ok(None);
        }
        let mut shown = shown(headers).peekable();
        let nothing = shown.peek().is_none();
        let known = shown.find_map(|key| self.whose(key, now_s));
        match known {
            Some(identity) if identity.role.allows(access) => Ok(Some(identity)),
            Some(identity) if needed => {
                Err(Denied::Forbidden { name: Arc::clone(&identity.name), role: identity.role.name() })
            }
            _ if !needed => Ok(None),
            _ => Err(if nothing { Denied::Missing } else { Denied::Invalid }),
        }
    }
}

impl Auth {
    /// The identity of this key or token.
    fn whose(&self, shown: &[u8], now_s: f64) -> Option<Arc<Identity>> {
        let tag = blinded(&self.blind, KeyHash::of_bytes(shown));
        if let Some(identity) = self.keys.get(&tag) {
            return Some(Arc::clone(identity));
        }
        match self.jwt.as_ref()?.verify(std::str::from_utf8(shown).ok()?, tag, now_s) {
            Ok(identity) => Some(identity),
            Err(TokenError::UnknownKey) => {
                self.wanted.notify_one();
                None
            }
            Err(TokenError::Bad) => None,
        }
    }

    /// Takes over the fetched keys and cached tokens of `before`.
    pub fn inherit(&self, before: &Self) {
        if let (Some(jwt), Some(before)) = (&self.jwt, &before.jwt) {
            jwt.inherit(before);
        }
    }

    /// Fetches the token keys, if they have a URL; then waits until the next fetch is due.
    pub async fn refresh_keys(&self) {
        let Some(jwt) = self.jwt.as_ref().filter(|jwt| jwt.spec.jwks_url.is_some()) else {
            return std::future::pending().await;
        };
        let again = match jwt.fetch().await {
            Ok(()) => jwt.spec.refresh,
            Err(problem) => {
                tracing::warn!(url = jwt.spec.jwks_url, problem, "JWKS refresh failed; keeping cached keys");
                REFETCH_MIN
            }
        };
        // Tokens of unknown keys cannot cause more frequent fetches.
        sleep(REFETCH_MIN).await;
        tokio::select! {
            () = sleep(again.saturating_sub(REFETCH_MIN)) => {}
            () = self.wanted.notified() => {}
        }
    }
}

/// The identity of the sender of a request, if known.
pub fn identity(parts: &Parts) -> Option<&Arc<Identity>> {
    parts.extensions.get()
}

/// The access that a request to the admin API needs.
pub fn access_of(method: &Method) -> Access {
    if method == Method::GET || method == Method::HEAD { Access::Look } else { Access::Change }
}

/// Whether a header carries a client's key.
pub fn is_credential(name: &header::HeaderName) -> bool {
    name == header::AUTHORIZATION || name == API_KEY
}

/// The keys in a request's headers.
fn shown(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked("bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    let named = headers.get(API_KEY).map(|value| value.as_bytes().trim_ascii());
    bearer.into_iter().chain(named).filter(|key| (1..=KEY_BYTES_MAX).contains(&key.len()))
}

fn blinded(blind: &hmac::Key, hash: KeyHash) -> [u8; 32] {
    let mut tag = [0; 32];
    tag.copy_from_slice(hmac::sign(blind, &hash.0).as_ref());
    tag
}

/// Names that no key may have because they have other meanings: every key (in limits), keys without a row of their
/// own (in metrics), a request without a key (in logs).
pub const RESERVED: [&str; 3] = [ANY, OTHER_NAMES, ANONYMOUS];
/// The name in logs for an operator without a key.
pub const ANONYMOUS: &str = "anonymous";

/// Checks the name of a key.
///
/// # Errors
/// What a valid name looks like.
pub fn check_name(name: &str) -> Result<(), String> {
    let good = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    if name.starts_with(jwt::PREFIX) {
        return Err(format!(
            "'{name}': names that begin with {} are reserved for signed tokens",
            jwt::PREFIX
        ));
    }
    if RESERVED.contains(&name) {
        return Err(format!(
            "'{name}' is reserved and cannot be the name of a key: it has another meaning in limits, metrics or logs"
        ));
    }
    if good {
        Ok(())
    } else {
        Err(format!("'{name}' is not a valid name: must be 1 to {NAME_BYTES_MAX} visible ASCII characters"))
    }
}

/// The keys in a file.
fn keys_in(path: &Path) -> Result<Vec<KeySpec>, String> {
    let cannot = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let bytes = std::fs::metadata(path).map_err(cannot)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(format!("{} has {bytes} bytes; the maximum is {FILE_BYTES_MAX}", path.display()));
    }
    let text = std::fs::read_to_string(path).map_err(cannot)?;
    let lines = text.lines().enumerate().map(|(n, line)| (n, line.trim()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(n, line)| key_in(line).map_err(|problem| format!("{}:{}: {problem}", path.display(), n + 1)))
        .collect()
}

/// A key on a line: `name role sha256 [trusted]`.
fn key_in(line: &str) -> Result<KeySpec, String> {
    // The line is not quoted in the error: it may be a key that was pasted by mistake.
    let form =
        || "write `name role sha256`, followed by `trusted` if the key's holder may name tenants".to_owned();
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let (&[name, role, hash], rest) = words.split_first_chunk().ok_or_else(form)?;
    let trusted = match rest {
        [] => false,
        ["trusted"] => true,
        _ => return Err(form()),
    };
    let role = Role::by_name(role).ok_or("the role must be user, viewer or admin")?;
    Ok(KeySpec { trusted, ..KeySpec::new(name, KeyHash::parse(hash)?, role) })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn spec(name: &str, key: &str, role: Role) -> KeySpec {
        KeySpec::new(name, KeyHash::of(key), role)
    }

    fn config(keys: &[KeySpec]) -> Security {
        Security { keys: keys.to_vec(), ..Security::default() }
    }

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let field = |&(name, value): &(&'static str, &str)| {
            (header::HeaderName::from_static(name), HeaderValue::from_str(value).expect("a value"))
        };
        fields.iter().map(field).collect()
    }

    fn three() -> Auth {
        let keys = [
            spec("u", "k-user", Role::User),
            spec("v", "k-view", Role::Viewer),
            spec("a", "k-admin", Role::Admin),
        ];
        Auth::read(&config(&keys)).expect("right")
    }

    #[test]
    fn each_role_allows_its_own_access_only() {
        let auth = three();
        let admit = |key: &str, access| {
            auth.admit(&headers(&[("authorization", &format!("Bearer {key}"))]), access, true, 0.0).is_ok()
        };
        use Access::{Change, Look, Use};
        assert_eq!([Use, Look, Change].map(|access| admit("k-user", access)), [true, false, false]);
        assert_eq!([Use, Look, Change].map(|access| admit("k-view", access)), [false, true, false]);
        assert_eq!([Use, Look, Change].map(|access| admit("k-admin", access)), [true, true, true]);
        assert_eq!([Use, Look, Change].map(|access| admit("k-unknown", access)), [false, false, false]);
    }

    #[test]
    fn a_key_is_found_in_every_header_that_clients_use() {
        let auth = three();
        let name = |fields: &[(&'static str, &str)]| {
            auth.admit(&headers(fields), Access::Use, true, 0.0)
                .map(|identity| identity.expect("known").name.to_string())
        };
        let user = Ok("u".to_owned());
        assert_eq!(name(&[("authorization", "Bearer k-user")]), user);
        assert_eq!(name(&[("authorization", "bearer   k-user ")]), user);
        assert_eq!(name(&[("x-api-key", "k-user")]), user);
        assert_eq!(name(&[("authorization", "Bearer other"), ("x-api-key", "k-user")]), user);
        assert_eq!(name(&[]), Err(Denied::Missing));
        assert_eq!(name(&[("authorization", "Bearer ")]), Err(Denied::Missing));
        assert_eq!(name(&[("authorization", "Basic k-user")]), Err(Denied::Missing));
        assert_eq!(name(&[("x-api-key", "k-use")]), Err(Denied::Invalid));
        let hash = KeyHash::of("k-user").to_hex();
        assert_eq!(name(&[("x-api-key", &hash)]), Err(Denied::Invalid), "the hash is not a key");
    }

    #[test]
    fn any_key_makes_keys_mandatory_for_clients_and_an_operators_key_for_operators() {
        let needs = |config: &Security| {
            let auth = Auth::read(config).expect("right");
            (auth.clients_need_a_key(), auth.operators_need_a_key())
        };
        assert_eq!(needs(&config(&[])), (false, false));
        assert_eq!(needs(&config(&[spec("u", "k", Role::User)])), (true, false));
        assert_eq!(needs(&config(&[spec("v", "k", Role::Viewer)])), (true, true));
        let open = Security { open_clients: true, ..config(&[spec("a", "k", Role::Admin)]) };
        assert_eq!(needs(&open), (false, true));
    }

    #[test]
    fn where_no_key_is_needed_a_good_key_identifies_and_a_bad_key_is_ignored() {
        let auth = three();
        let name = |key: &str| {
            let admitted = auth.admit(&headers(&[("x-api-key", key)]), Access::Use, false, 0.0);
            admitted.expect("admitted").map(|identity| identity.name.to_string())
        };
        assert_eq!(name("k-user").as_deref(), Some("u"));
        assert_eq!((name("engine's"), name("k-view")), (None, None));
    }

    #[test]
    fn a_key_file_is_read_line_by_line() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let read = |text: &str| {
            std::fs::write(&file, text).expect("written");
            Auth::read(&Security { keys_file: Some(file.path().into()), ..Security::default() })
        };
        let (one, two) = (KeyHash::of("k1").to_hex(), KeyHash::of("k2").to_hex());
        let auth = read(&format!("# ours\n\nann user {one}\n edge  admin {two}  trusted\n")).expect("right");
        let who = |key: &str| {
            auth.admit(&headers(&[("x-api-key", key)]), Access::Use, true, 0.0).expect("in").expect("known")
        };
        assert_eq!((&*who("k1").name, who("k1").role, who("k1").trusted), ("ann", Role::User, false));
        assert_eq!((&*who("k2").name, who("k2").role, who("k2").trusted), ("edge", Role::Admin, true));
        for (text, word) in [
            ("ann user".to_owned(), ":1: write `name role sha256`"),
            (format!("\nann boss {one}"), ":2: the role must be"),
            (format!("ann user {one} really"), "trusted"),
            ("ann user sk-plain".to_owned(), "SHA-256"),
            (format!("ann user {one}\nbob user {one}"), "'ann' and 'bob' have the same key"),
            (format!("{} user {one}", "n".repeat(65)), "1 to 64"),
            (format!("jwt:ann user {one}"), "reserved for signed tokens"),
            (format!("* user {one}"), "cannot be the name of a key"),
            (format!("other user {one}"), "cannot be the name of a key"),
            (format!("anonymous admin {one}"), "cannot be the name of a key"),
        ] {
            let problem = read(&text).err().expect(word).to_string();
            assert!(problem.contains(word) && !problem.contains("sk-plain"), "{problem}");
        }
        let missing = Security { keys_file: Some("/nowhere/keys".into()), ..Security::default() };
        let problem = Auth::read(&missing).err().expect("no file").to_string();
        assert!(problem.contains("auth.keys_file") && problem.contains("/nowhere/keys"), "{problem}");
    }
}
