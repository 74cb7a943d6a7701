//! Verification of signed tokens: JWT (RFC 7519), with keys of a JWK set (RFC 7517).
//!
//! The `jsonwebtoken` crate reads tokens and keys, and verifies signature, issuer and audience; the cryptography is that of
//! TLS (`ring_provider`). Checked here is what the crate leaves open:
//!
//! - The key determines the allowed algorithms, and shared secrets are not read as keys. So neither `alg: none` nor a
//!   public key used as a secret verifies.
//! - A token with `crit` is rejected: no extension is supported.
//! - `exp` and `nbf` are compared with a time that is an argument. The crate reads the system's clock.
//! - `iss` is a string. The crate accepts a list, too.
//!
//! A verified token is cached until it expires or the keys are fetched again.

mod keys;
mod ring_provider;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::Uri;
use jsonwebtoken::{Algorithm, Validation, decode_header};
use kvlane_core::config::{ConfigError, Setting as _, wrong};
use kvlane_core::section;
use kvlane_http::client::Client;
use kvlane_http::secret::KeyHash;
use serde_json::Value;

use self::keys::{Key, key_set};
use crate::auth::identity::{Identity, NAME_BYTES_MAX, PRIORITY_MAX, Role};

/// Prefix of the names of identities that come from tokens. An API key cannot have such a name.
pub(super) const PREFIX: &str = "jwt:";
/// Follows the prefix in a name that is a hash of the claim.
const HASHED: char = '#';
/// Allowed difference between the issuer's clock and the gateway's.
const LEEWAY_S: f64 = 60.0;
/// Most keys tried for one token: those with its `kid`, or any if it has none.
const TRIES_MAX: usize = 8;
/// Most verified tokens in the cache; beyond it the cache is cleared.
const KNOWN_MAX: usize = 10_000;
/// Timeout of one fetch of the keys.
const FETCH_MAX: Duration = Duration::from_secs(10);
/// The largest file of keys.
const FILE_BYTES_MAX: u64 = 1 << 20;

section! {
    /// The signed tokens that are accepted as keys.
    pub struct JwtSpec {
        /// Their `iss`.
        pub issuer: String;
        /// Their `aud`, or one entry of the list there.
        pub audience: String;
        /// A file with the issuer's public keys, as a JWK set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub jwks_file: Option<PathBuf>;
        /// The URL of the issuer's public keys: `https`, or `http` on this machine.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub jwks_url: Option<String>;
        /// Time between two fetches of the keys; 10m if not set.
        #[serde(default = "usual_refresh", with = "humantime_serde")]
        pub refresh: Duration, in Duration::from_secs(10)..=Duration::from_secs(7 * 24 * 3600);
        /// The claim with the name of the client; `sub` if not set.
        #[serde(default = "usual_claim")]
        pub name_claim: String;
        /// The role of every client with a token.
        #[serde(default)]
        pub role: Role;
        /// The claim whose values are looked up in `roles`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub role_claim: Option<String>;
        /// Roles by the values of that claim.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub roles: BTreeMap<String, Role>;
    }
}

fn usual_refresh() -> Duration {
    Duration::from_secs(600)
}

fn usual_claim() -> String {
    "sub".into()
}

/// Verifies tokens.
pub struct Jwt {
    pub(crate) spec: JwtSpec,
    /// The required claims; each key adds its algorithms.
    expected: Validation,
    trusted: ArcSwap<Trusted>,
}

/// The keys of one fetch, and the tokens verified with them. New keys start with an empty cache, so no token of a
/// withdrawn key stays in it, even if it is being verified while the keys change.
#[derive(Default)]
struct Trusted {
    keys: Arc<Vec<Key>>,
    known: Mutex<HashMap<[u8; 32], Known>>,
}

/// A verified token.
struct Known {
    identity: Arc<Identity>,
    ends_s: f64,
}

/// Why a token is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenError {
    /// It is malformed, has a wrong signature or a wrong claim, or has expired.
    Bad,
    /// No key has its `kid`: the issuer may have a new one.
    UnknownKey,
}

// === impl JwtSpec ===

impl JwtSpec {
    fn validate(&self) -> Result<(), ConfigError> {
        self.check("auth.jwt")?;
        if self.issuer.is_empty() || self.audience.is_empty() {
            return wrong("auth.jwt", "issuer and audience must not be empty".into());
        }
        match (&self.jwks_file, &self.jwks_url) {
            (Some(_), None) => Ok(()),
            (None, Some(url)) => page(url).map(|_| ()).or_else(|problem| wrong("auth.jwt.jwks_url", problem)),
            _ => wrong("auth.jwt", "set either jwks_file or jwks_url".into()),
        }
    }

    /// Whether a token can give access to the admin API.
    pub(super) fn names_operators(&self) -> bool {
        self.role != Role::User || self.roles.values().any(|&role| role != Role::User)
    }
}

// === impl Jwt ===

impl Jwt {
    /// Reads the keys if they are in a file; otherwise there are none until [`Jwt::fetch`].
    pub(super) fn read(spec: &JwtSpec) -> Result<Self, ConfigError> {
        spec.validate()?;
        let mut keys = Vec::new();
        if let Some(path) = &spec.jwks_file {
            let fail = |problem: String| ConfigError {
                field: "auth.jwt.jwks_file".into(),
                problem: format!("{}: {problem}", path.display()),
            };
            let bytes = std::fs::metadata(path).map_err(|error| fail(error.to_string()))?.len();
            if bytes > FILE_BYTES_MAX {
                return Err(fail(format!("the file has {bytes} bytes; a JWK set may have {FILE_BYTES_MAX}")));
            }
            let text = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
            keys = key_set(&text).map_err(fail)?;
        }
        Ok(Self::new(spec.clone(), keys))
    }

    fn new(spec: JwtSpec, keys: Vec<Key>) -> Self {
        ring_provider::install();
        let mut expected = Validation::new(Algorithm::EdDSA);
        expected.algorithms.clear();
        expected.set_issuer(&[&spec.issuer]);
        expected.set_audience(&[&spec.audience]);
        expected.set_required_spec_claims(&["exp", "iss", "aud"]);
        // The crate would compare it with the system's clock: see `identity`.
        expected.validate_exp = false;
        let trusted = Trusted { keys: keys.into(), ..Trusted::default() };
        Self { spec, expected, trusted: ArcSwap::from_pointee(trusted) }
    }

    /// Takes over the keys of `before`, if they come from the same URL.
    pub fn inherit(&self, before: &Self) {
        if self.spec.jwks_url.is_some() && self.spec.jwks_url == before.spec.jwks_url {
            self.trust(Arc::clone(&before.trusted.load().keys));
        }
    }

    /// Fetches the keys. On failure the keys of the last successful fetch stay.
    ///
    /// # Errors
    /// What failed, for the log.
    pub async fn fetch(&self) -> Result<(), String> {
        let Some(url) = &self.spec.jwks_url else { return Ok(()) };
        let (base, path) = page(url)?;
        let (status, body) = Client::at(&base, FETCH_MAX)?.get(&path).await?;
        if status != 200 {
            return Err(format!("GET {path} answered {status}"));
        }
        self.trust(key_set(&body)?.into());
        Ok(())
    }

    /// Verifies with these keys from now on.
    fn trust(&self, keys: Arc<Vec<Key>>) {
        self.trusted.store(Arc::new(Trusted { keys, ..Trusted::default() }));
    }

    /// The identity of `token` at `now_s`, in seconds after 1970. `tag` is a hash of the token.
    pub(super) fn verify(&self, token: &str, tag: [u8; 32], now_s: f64) -> Result<Arc<Identity>, TokenError> {
        let trusted = self.trusted.load();
        if let Some(Known { identity, ends_s }) = trusted.known().get(&tag)
            && now_s <= *ends_s
        {
            return Ok(Arc::clone(identity));
        }
        let (identity, ends_s) = self.verify_anew(&trusted.keys, token, now_s)?;
        let identity = Arc::new(identity);
        let mut known = trusted.known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(tag, Known { identity: Arc::clone(&identity), ends_s });
        Ok(identity)
    }

    fn verify_anew(&self, keys: &[Key], token: &str, now_s: f64) -> Result<(Identity, f64), TokenError> {
        let header = decode_header(token).map_err(|_| TokenError::Bad)?;
        if header.crit.is_some() {
            return Err(TokenError::Bad);
        }
        let may = |key: &&Key| header.kid.is_none() || key.id == header.kid;
        let mut candidates = keys.iter().filter(may).take(TRIES_MAX).peekable();
        if candidates.peek().is_none() {
            return Err(TokenError::UnknownKey);
        }
        let claims = candidates.find_map(|key| key.claims(token, &self.expected)).ok_or(TokenError::Bad)?;
        self.identity(&claims, now_s)
    }

    /// The identity of a token with these claims, whose signature, issuer and audience have been verified, and when
    /// it expires.
    fn identity(&self, claims: &Value, now_s: f64) -> Result<(Identity, f64), TokenError> {
        let spec = &self.spec;
        let time =
            |claim: &str| claims.get(claim).map(|time| time.as_f64().ok_or(TokenError::Bad)).transpose();
        let ends_s = time("exp")?.ok_or(TokenError::Bad)? + LEEWAY_S;
        let begins_s = time("nbf")?.map_or(f64::NEG_INFINITY, |begins_s| begins_s - LEEWAY_S);
        let in_time = begins_s <= now_s && now_s <= ends_s;
        let name = claims.get(&spec.name_claim).and_then(Value::as_str).filter(|name| !name.is_empty());
        let (true, true, Some(name)) = (in_time, claims["iss"].is_string(), name) else {
            return Err(TokenError::Bad);
        };
        let told = spec.role_claim.iter().flat_map(|claim| all(&claims[claim.as_str()]));
        let role =
            told.filter_map(|value| spec.roles.get(value)).chain([&spec.role]).max_by_key(|role| role.rank());
        let role = role.copied().unwrap_or_default();
        Ok((
            Identity { name: name_of(name).into(), role, trusted: false, priority_max: PRIORITY_MAX },
            ends_s,
        ))
    }
}

// === impl Trusted ===

impl Trusted {
    fn known(&self) -> MutexGuard<'_, HashMap<[u8; 32], Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of a client: the claim, or its hash where the claim is too long for a name or has other characters. A
/// claim that begins like a hashed name is hashed, too, so that no claim equals the hash of another one.
fn name_of(claim: &str) -> String {
    let short = claim.len() <= NAME_BYTES_MAX - PREFIX.len();
    if short && !claim.starts_with(HASHED) && claim.bytes().all(|byte| byte.is_ascii_graphic()) {
        return format!("{PREFIX}{claim}");
    }
    format!("{PREFIX}{HASHED}{}", &KeyHash::of(claim).to_hex()[..32])
}

/// A string, or the strings of a list.
fn all(value: &Value) -> impl Iterator<Item = &str> {
    let list = value.as_array().into_iter().flatten();
    std::iter::once(value).chain(list).filter_map(Value::as_str)
}

/// The parts of a URL of keys: `scheme://host:port`, and the path.
fn page(url: &str) -> Result<(String, String), String> {
    let uri: Uri = url.parse().map_err(|error| format!("'{url}' is not a URL: {error}"))?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(format!("'{url}' has no scheme or no host: write https://host/path"));
    };
    let here = authority.host() == "localhost"
        || authority
            .host()
            .trim_matches(['[', ']'])
            .parse()
            .is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    // An attacker who can change the answer can make tokens.
    if scheme != "https" && !(scheme == "http" && here) {
        return Err(format!(
            "'{url}' must begin with https://; http:// is allowed for localhost and loopback addresses only"
        ));
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Ok((format!("{scheme}://{authority}"), path.to_owned()))
}

/// Whether a token is accepted by keys of a JWK set. The claims are read too, as if a key had signed them.
#[cfg(feature = "testing")]
#[expect(clippy::expect_used, reason = "only fuzz targets call it")]
pub fn is_believed(keys: &[u8], token: &str, claims: &Value) -> bool {
    let spec = serde_json::json!({"issuer": "i", "audience": "a", "jwks_url": "https://h"});
    let spec = serde_json::from_value(spec).expect("a spec");
    let Ok(keys) = key_set(keys) else { return false };
    let jwt = Jwt::new(spec, keys);
    let _ = jwt.identity(claims, 1e9);
    jwt.verify(token, [0; 32], 1e9).is_ok()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
    use http::{HeaderMap, header};
    use proptest::prelude::*;
    use ring::hmac;
    use ring::rand::SystemRandom;
    use ring::signature::{
        self, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
        EcdsaSigningAlgorithm, Ed25519KeyPair, KeyPair, RsaPublicKeyComponents,
    };
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::super::{Access, Auth, Denied, REFETCH_MIN};
    use super::*;
    use crate::auth::config::Security;

    const NOW: f64 = 1_700_000_000.0;

    fn encode(bytes: &[u8]) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(bytes)
    }

    /// A token with this header and these claims, signed by `sign`.
    fn token(header: &Value, claims: &Value, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
        let signed =
            format!("{}.{}", encode(header.to_string().as_bytes()), encode(claims.to_string().as_bytes()));
        let signature = encode(&sign(signed.as_bytes()));
        format!("{signed}.{signature}")
    }

    struct Signer(Ed25519KeyPair);

    impl Signer {
        fn new() -> Self {
            let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("random");
            Self(Ed25519KeyPair::from_pkcs8(document.as_ref()).expect("a key"))
        }

        fn jwk(&self, id: &str) -> Value {
            json!({"kty": "OKP", "crv": "Ed25519", "kid": id, "use": "sig", "x": encode(self.0.public_key().as_ref())})
        }

        fn token(&self, header: &Value, claims: &Value) -> String {
            token(header, claims, |signed| self.0.sign(signed).as_ref().to_vec())
        }
    }

    fn spec() -> JwtSpec {
        serde_json::from_value(json!({
            "issuer": "https://idp", "audience": "kvlane", "jwks_url": "https://idp/keys",
            "role_claim": "groups", "roles": {"ops": "admin", "eyes": "viewer"},
        }))
        .expect("right")
    }

    fn verifier(keys: &[Value]) -> Jwt {
        Jwt::new(spec(), key_set(json!({"keys": keys}).to_string().as_bytes()).expect("keys"))
    }

    impl Jwt {
        /// Verifies a token without the cache.
        fn verify_now(&self, token: &str, now_s: f64) -> Result<(Identity, f64), TokenError> {
            self.verify_anew(&self.trusted.load().keys, token, now_s)
        }
    }

    fn claims() -> Value {
        json!({"iss": "https://idp", "aud": ["other", "kvlane"], "sub": "ann", "exp": NOW + 300.0})
    }

    fn with(change: impl FnOnce(&mut Value)) -> Value {
        let mut claims = claims();
        change(&mut claims);
        claims
    }

    #[test]
    fn a_token_is_accepted_only_if_every_part_is_valid() {
        let signer = Signer::new();
        let (header, jwt) = (json!({"alg": "EdDSA", "kid": "k"}), verifier(&[signer.jwk("k")]));
        let verify = |claims: &Value| {
            jwt.verify_now(&signer.token(&header, claims), NOW).map(|(identity, _)| identity)
        };
        let ann =
            Identity { name: "jwt:ann".into(), role: Role::User, trusted: false, priority_max: PRIORITY_MAX };
        assert_eq!(verify(&claims()), Ok(ann.clone()));
        assert_eq!(verify(&with(|claims| claims["aud"] = json!("kvlane"))), Ok(ann.clone()));
        assert_eq!(
            verify(&with(|claims| claims["exp"] = json!(NOW - 59.0))),
            Ok(ann.clone()),
            "clocks differ"
        );
        assert_eq!(verify(&with(|claims| claims["nbf"] = json!(NOW + 59.0))), Ok(ann));
        for (what, claims) in [
            ("over", with(|claims| claims["exp"] = json!(NOW - 61.0))),
            ("endless", with(|claims| _ = claims.as_object_mut().expect("claims").remove("exp"))),
            ("an expiry that is not a number", with(|claims| claims["exp"] = json!("9999999999"))),
            ("an expiry before 1970", with(|claims| claims["exp"] = json!(-1))),
            ("not yet", with(|claims| claims["nbf"] = json!(NOW + 61.0))),
            ("a not-before that is not a number", with(|claims| claims["nbf"] = json!("1"))),
            ("a not-before that is null", with(|claims| claims["nbf"] = json!(null))),
            ("another issuer", with(|claims| claims["iss"] = json!("https://evil"))),
            ("no issuer", with(|claims| claims["iss"] = json!(null))),
            ("a list of issuers", with(|claims| claims["iss"] = json!(["https://idp"]))),
            ("for others", with(|claims| claims["aud"] = json!(["other"]))),
            ("a null audience", with(|claims| claims["aud"] = json!(null))),
            ("an empty list of audiences", with(|claims| claims["aud"] = json!([]))),
            ("an audience that only begins with ours", with(|claims| claims["aud"] = json!("kvlane2"))),
            ("an audience that is an object", with(|claims| claims["aud"] = json!({"kvlane": true}))),
            ("a list of audiences with a number", with(|claims| claims["aud"] = json!(["kvlane", 7]))),
            ("an empty subject", with(|claims| claims["sub"] = json!(""))),
            ("of a number", with(|claims| claims["sub"] = json!(7))),
        ] {
            assert_eq!(verify(&claims), Err(TokenError::Bad), "{what}");
        }
    }

    proptest! {
        /// No two subjects get the same name, even if one subject imitates the other's name.
        #[test]
        fn no_two_subjects_have_one_name(one in "(?s).{0,80}", other in "[#a-z ]{0,70}", same in any::<bool>()) {
            let other = if same { one.clone() } else { other };
            let named = name_of(&one);
            prop_assert_eq!(named == name_of(&other), one == other, "{:?} {:?}", one, other);
            // A subject equal to the name of another one.
            let imitation = named.trim_start_matches(PREFIX);
            prop_assert_eq!(named == name_of(imitation), one == imitation, "{:?}", one);
            prop_assert!(named.len() <= NAME_BYTES_MAX && named.bytes().all(|byte| byte.is_ascii_graphic()));
            prop_assert!(super::super::check_name(&named).is_err(), "an API key cannot have such a name");
        }
    }

    #[test]
    fn the_key_determines_the_signature_algorithm() {
        let (signer, other) = (Signer::new(), Signer::new());
        let jwt = verifier(&[signer.jwk("k"), other.jwk("o")]);
        let verify = |token: &str| jwt.verify_now(token, NOW).map(|_| ());
        let good = signer.token(&json!({"alg": "EdDSA", "kid": "k"}), &claims());
        assert_eq!(verify(&good), Ok(()));
        assert_eq!(
            verify(&signer.token(&json!({"alg": "EdDSA"}), &claims())),
            Ok(()),
            "any key, if the token has no kid"
        );
        let (signed, _) = good.rsplit_once('.').expect("a token");
        for header in [
            json!({"alg": "none", "kid": "k"}),
            json!({"alg": "HS256", "kid": "k"}),
            json!({"alg": "RS256", "kid": "k"}),
            json!({"alg": "ES256", "kid": "k"}),
            json!({"alg": "eddsa", "kid": "k"}),
            json!({"alg": "EdDSA", "kid": "o"}),
            json!({"alg": "EdDSA", "kid": "k", "crit": ["exp"]}),
            json!({"alg": "EdDSA", "kid": "k", "crit": ["b64"], "b64": false}),
            json!({"alg": "EdDSA", "kid": "k", "crit": []}),
            json!({"alg": "EdDSA", "kid": "k", "crit": "exp"}),
            json!({"alg": "EdDSA", "kid": 7}),
            json!({"alg": ["EdDSA"], "kid": "k"}),
            json!({"kid": "k"}),
            json!(["EdDSA"]),
        ] {
            assert_eq!(verify(&signer.token(&header, &claims())), Err(TokenError::Bad), "{header}");
        }
        let public = encode(signer.0.public_key().as_ref());
        for token in [
            "",
            ".",
            "..",
            "a.b.c",
            &format!("{signed}."),
            signed,
            &format!("{signed}.{public}"),
            &format!("{good}="),
        ] {
            assert_eq!(verify(token), Err(TokenError::Bad), "{token}");
        }
        let strange = signer.token(&json!({"alg": "EdDSA", "kid": "new"}), &claims());
        assert_eq!(verify(&strange), Err(TokenError::UnknownKey));
        let mut bound = signer.jwk("k");
        bound["alg"] = json!("ES256");
        assert_eq!(
            verifier(&[bound]).verify_now(&good, NOW).err(),
            Some(TokenError::Bad),
            "the key's use excludes signatures"
        );
    }

    #[test]
    fn a_public_key_is_not_accepted_as_a_shared_secret() {
        let (signer, rsa) = (Signer::new(), vectors());
        let jwk = signer.jwk("k");
        let modulus = rsa["jwk"]["n"].as_str().expect("a modulus");
        let secrets: [&[u8]; 6] = [
            signer.0.public_key().as_ref(),
            jwk["x"].as_str().expect("a point").as_bytes(),
            &jwk.to_string().into_bytes(),
            &BASE64_URL_SAFE_NO_PAD.decode(modulus).expect("base64"),
            modulus.as_bytes(),
            b"",
        ];
        let shared = json!({"kty": "oct", "kid": "s", "k": encode(b"secret"), "alg": "HS256"});
        let jwt = verifier(&[jwk.clone(), rsa["jwk"].clone(), shared]);
        for (n, secret) in secrets.into_iter().enumerate() {
            for kid in ["k", "r"] {
                let token = token(&json!({"alg": "HS256", "kid": kid}), &claims(), |signed| {
                    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), signed).as_ref().to_vec()
                });
                assert_eq!(jwt.verify_now(&token, NOW).err(), Some(TokenError::Bad), "secret {n}, key {kid}");
            }
        }
        let token = token(&json!({"alg": "HS256", "kid": "s"}), &claims(), |signed| {
            hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, b"secret"), signed).as_ref().to_vec()
        });
        assert_eq!(
            jwt.verify_now(&token, NOW).err(),
            Some(TokenError::UnknownKey),
            "shared secrets are not read as keys"
        );
    }

    /// The fuzz target asserts that no token is accepted; this test shows that the function accepts a good one.
    #[cfg(feature = "testing")]
    #[test]
    fn the_fuzzing_entry_accepts_what_its_keys_have_signed() {
        let (signer, other) = (Signer::new(), Signer::new());
        let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": 1e9});
        let token = signer.token(&json!({"alg": "EdDSA"}), &claims);
        let set = |signer: &Signer| json!({"keys": [signer.jwk("k")]}).to_string().into_bytes();
        assert!(is_believed(&set(&signer), &token, &claims));
        assert!(!is_believed(&set(&other), &token, &claims));
    }

    #[test]
    fn a_token_without_a_signature_is_rejected_whatever_its_header_says() {
        let jwt = verifier(&[Signer::new().jwk("k")]);
        for alg in ["none", "None", "NONE", "nOnE", "", "EdDSA", "HS256"] {
            let token = token(&json!({"alg": alg, "kid": "k"}), &claims(), |_| Vec::new());
            assert_eq!(jwt.verify_now(&token, NOW).err(), Some(TokenError::Bad), "{alg}");
            let token = token.trim_end_matches('.');
            assert_eq!(jwt.verify_now(token, NOW).err(), Some(TokenError::Bad), "{alg}");
        }
    }

    #[test]
    fn a_key_of_a_curve_verifies_by_the_algorithm_of_that_curve() {
        let random = SystemRandom::new();
        let make = |algorithm: &'static EcdsaSigningAlgorithm| {
            let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("random");
            EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random).expect("a key")
        };
        let jwk = |signer: &EcdsaKeyPair, curve: &str| {
            let point = &signer.public_key().as_ref()[1..];
            let (x, y) = point.split_at(point.len() / 2);
            json!({"kty": "EC", "crv": curve, "kid": "e", "x": encode(x), "y": encode(y)})
        };
        let token = |signer: &EcdsaKeyPair, alg: &str| {
            token(&json!({"alg": alg, "kid": "e"}), &claims(), |signed| {
                signer.sign(&random, signed).expect("signed").as_ref().to_vec()
            })
        };
        let verify =
            |jwk: Value, token: &str| verifier(&[jwk, Signer::new().jwk("o")]).verify_now(token, NOW).err();
        let (p256, p384) = (make(&ECDSA_P256_SHA256_FIXED_SIGNING), make(&ECDSA_P384_SHA384_FIXED_SIGNING));
        for (signer, curve, own, other) in
            [(&p256, "P-256", "ES256", "ES384"), (&p384, "P-384", "ES384", "ES256")]
        {
            assert_eq!(verify(jwk(signer, curve), &token(signer, own)), None, "{own}");
            for alg in [other, "EdDSA", "RS256", "ES512"] {
                assert_eq!(
                    verify(jwk(signer, curve), &token(signer, alg)),
                    Some(TokenError::Bad),
                    "{own} {alg}"
                );
            }
            let another = if curve == "P-256" { "P-384" } else { "P-256" };
            for curve in [another, "P-521", "Ed25519"] {
                let refused = verify(jwk(signer, curve), &token(signer, own));
                assert_eq!(refused, Some(TokenError::UnknownKey), "a key of {own} under the name of {curve}");
            }
        }
        let mut off = jwk(&p256, "P-256");
        off["y"] = off["x"].clone();
        assert_eq!(
            verify(off, &token(&p256, "ES256")),
            Some(TokenError::Bad),
            "a point that is not on the curve"
        );
    }

    /// Keys and tokens made by OpenSSL with `claims()`: an RSA key of 2048 bits (`jwk`) and one of 1024
    /// (`short_jwk`), whose private keys were not kept.
    fn vectors() -> Value {
        serde_json::from_str(include_str!("jwt/rsa_tokens.json")).expect("JSON")
    }

    #[test]
    fn an_rsa_key_verifies_the_documented_algorithms() {
        let vectors = vectors();
        let jwt = verifier(&[vectors["jwk"].clone()]);
        let verify = |jwt: &Jwt, algorithm: &str| {
            jwt.verify_now(vectors["tokens"][algorithm].as_str().expect("a token"), NOW).err()
        };
        for algorithm in ["RS256", "RS384", "RS512", "PS256"] {
            assert_eq!(verify(&jwt, algorithm), None, "{algorithm}");
        }
        assert_eq!(verify(&jwt, "PS384"), Some(TokenError::Bad), "not a documented algorithm");
        let mut bound = vectors["jwk"].clone();
        bound["alg"] = json!("RS256");
        let bound = verifier(&[bound]);
        assert_eq!(verify(&bound, "RS256"), None);
        for other in ["RS384", "RS512", "PS256"] {
            assert_eq!(verify(&bound, other), Some(TokenError::Bad), "the key's alg excludes {other}");
        }
    }

    #[test]
    fn an_rsa_key_under_2048_bits_verifies_nothing() {
        let vectors = vectors();
        let token = vectors["short_token"].as_str().expect("a token");
        let (signed, signature) = token.rsplit_once('.').expect("a token");
        let bytes = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).expect("base64");
        let n = bytes(vectors["short_jwk"]["n"].as_str().expect("a modulus"));
        let right = RsaPublicKeyComponents { n: &n[..], e: &[1, 0, 1][..] }.verify(
            &signature::RSA_PKCS1_1024_8192_SHA256_FOR_LEGACY_USE_ONLY,
            signed.as_bytes(),
            &bytes(signature),
        );
        assert!(right.is_ok(), "the signature is right");
        let jwt = verifier(&[vectors["short_jwk"].clone()]);
        assert_eq!(jwt.verify_now(token, NOW).err(), Some(TokenError::Bad));
    }

    #[test]
    fn duplicate_claims_and_claims_that_are_not_an_object_are_rejected() {
        let signer = Signer::new();
        let jwt = verifier(&[signer.jwk("k")]);
        let verify = |header: &str, claims: &str| {
            let signed = format!("{}.{}", encode(header.as_bytes()), encode(claims.as_bytes()));
            let signature = encode(signer.0.sign(signed.as_bytes()).as_ref());
            jwt.verify_now(&format!("{signed}.{signature}"), NOW).err()
        };
        let header = r#"{"alg":"EdDSA","kid":"k"}"#;
        let good = r#"{"iss":"https://idp","aud":"kvlane","exp":1700000300,"sub":"ann"}"#;
        assert_eq!(verify(header, good), None);
        for twice in [
            r#""exp":1"#,
            r#""iss":"https://evil""#,
            r#""aud":"other""#,
            r#""sub":"eve""#,
            r#""nbf":1,"nbf":2"#,
        ] {
            for claims in
                [good.replacen('{', &format!("{{{twice},"), 1), good.replace('}', &format!(",{twice}}}"))]
            {
                assert_eq!(verify(header, &claims), Some(TokenError::Bad), "{claims}");
            }
        }
        for claims in
            ["", "null", "7", "[]", r#"[1700000300, 0, "ann", "https://idp", "kvlane"]"#, &format!("{good}x")]
        {
            assert_eq!(verify(header, claims), Some(TokenError::Bad), "{claims}");
        }
        for header in [
            r#"{"alg":"EdDSA","alg":"EdDSA","kid":"k"}"#,
            r#"{"alg":"EdDSA","kid":"k","kid":"k"}"#,
            r#"{"alg":"EdDSA","kid":"k","crit":null,"crit":["x"]}"#,
        ] {
            assert_eq!(verify(header, good), Some(TokenError::Bad), "{header}");
        }
    }

    /// Answers each connection with the next of these bodies, repeating the last one, and counts the connections.
    async fn serve(bodies: Vec<String>) -> (SocketAddr, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        let served = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&served);
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.expect("a head"));
                }
                let body = &bodies[count.fetch_add(1, Ordering::Relaxed).min(bodies.len() - 1)];
                let answer = format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                    body.len()
                );
                stream.write_all(answer.as_bytes()).await.expect("sent");
            }
        });
        (at, served)
    }

    #[tokio::test]
    async fn a_token_of_a_withdrawn_key_is_rejected_although_it_is_cached() {
        let (old, new) = (Signer::new(), Signer::new());
        let set = |keys: &[Value]| json!({"keys": keys}).to_string();
        let bodies = vec![set(&[old.jwk("old"), new.jwk("new")]), set(&[new.jwk("new")]), "{}".into()];
        let (at, _) = serve(bodies).await;
        let jwt =
            Jwt::read(&JwtSpec { jwks_url: Some(format!("http://{at}/keys")), ..spec() }).expect("right");
        let tokens = [(&old, "old", [1; 32]), (&new, "new", [2; 32])]
            .map(|(signer, kid, tag)| (signer.token(&json!({"alg": "EdDSA", "kid": kid}), &claims()), tag));
        let verify = || tokens.each_ref().map(|(token, tag)| jwt.verify(token, *tag, NOW).err());
        assert_eq!(verify(), [Some(TokenError::UnknownKey), Some(TokenError::UnknownKey)], "no key yet");
        jwt.fetch().await.expect("keys");
        assert_eq!(verify(), [None, None]);
        jwt.fetch().await.expect("keys");
        assert_eq!(verify(), [Some(TokenError::UnknownKey), None]);
        let problem = jwt.fetch().await.expect_err("no set");
        assert!(problem.contains("not a JWK set"), "{problem}");
        assert_eq!(
            verify(),
            [Some(TokenError::UnknownKey), None],
            "the keys of the last successful fetch stay"
        );
    }

    #[tokio::test]
    async fn tokens_of_an_unknown_key_cause_one_fetch_after_a_pause() {
        let signer = Signer::new();
        let (at, served) = serve(vec![json!({"keys": [signer.jwk("k")]}).to_string()]).await;
        let jwt = JwtSpec { jwks_url: Some(format!("http://{at}/keys")), ..spec() };
        let auth = Auth::read(&Security { jwt: Some(jwt), ..Security::default() }).expect("right");
        let auth = Arc::new(auth);
        for (strangers, pause) in [(0, usual_refresh()), (100, REFETCH_MIN), (0, usual_refresh())] {
            let jwt = auth.jwt.as_ref().expect("tokens");
            jwt.trust(Arc::default());
            let kept = Arc::clone(&auth);
            // While this task keeps yielding, a paused clock stands still.
            tokio::time::pause();
            let keeping = tokio::spawn(async move { kept.refresh_keys().await });
            while jwt.trusted.load().keys.is_empty() {
                assert!(!keeping.is_finished(), "the keys cannot be fetched");
                tokio::task::yield_now().await;
            }
            let fetched = tokio::time::Instant::now();
            for n in 0..strangers {
                let token = signer.token(&json!({"alg": "EdDSA", "kid": format!("new-{n}")}), &claims());
                let value = format!("Bearer {token}").parse().expect("a value");
                let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value)]);
                assert_eq!(auth.admit(&headers, Access::Use, true, NOW), Err(Denied::Invalid));
            }
            keeping.await.expect("no panic");
            let waited = fetched.elapsed();
            tokio::time::resume();
            // Timers are up to a millisecond late.
            assert_eq!(waited.as_secs(), pause.as_secs(), "{strangers} tokens of unknown keys: {waited:?}");
        }
        assert_eq!(served.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn roles_come_only_from_the_claim_and_names_are_unique() {
        let jwt = verifier(&[Signer::new().jwk("k")]);
        let identity = |claims: Value| jwt.identity(&claims, NOW).expect("right").0;
        let role = |groups: Value| identity(with(|claims| claims["groups"] = groups)).role;
        assert_eq!(role(json!(null)), Role::User);
        assert_eq!(role(json!(["unheard-of"])), Role::User);
        assert_eq!(role(json!("eyes")), Role::Viewer);
        assert_eq!(role(json!(["eyes", "ops"])), Role::Admin);
        let name = |sub: &str| identity(with(|claims| claims["sub"] = json!(sub))).name.to_string();
        let long = "n".repeat(200);
        for sub in ["a b", "é", &long] {
            assert!(name(sub).starts_with("jwt:#") && name(sub).len() <= NAME_BYTES_MAX, "{}", name(sub));
        }
        assert_ne!(name("a b"), name("a c"));
        assert!(super::super::check_name("jwt:ann").is_err(), "an API key cannot have such a name");
    }

    #[test]
    fn a_verified_token_is_cached_until_it_expires() {
        let signer = Signer::new();
        let jwt = verifier(&[signer.jwk("k")]);
        let token = signer.token(&json!({"alg": "EdDSA"}), &claims());
        assert!(jwt.verify(&token, [1; 32], NOW).is_ok());
        let known = std::mem::take(&mut *jwt.trusted.load().known());
        jwt.trusted.store(Arc::new(Trusted { known: Mutex::new(known), ..Trusted::default() }));
        assert!(jwt.verify(&token, [1; 32], NOW).is_ok(), "from the cache, without its key");
        assert!(jwt.verify(&token, [2; 32], NOW).is_err());
        assert!(jwt.verify(&token, [1; 32], NOW + 361.0).is_err(), "it has expired");
    }

    #[test]
    fn invalid_jwt_settings_are_named_in_the_error() {
        let check = |change: &dyn Fn(&mut JwtSpec), word: &str| {
            let mut spec = spec();
            change(&mut spec);
            let problem = Jwt::read(&spec).err().expect(word).to_string();
            assert!(problem.contains(word), "'{word}' is not in: {problem}");
        };
        check(&|spec| spec.audience.clear(), "audience");
        check(&|spec| spec.issuer.clear(), "issuer");
        check(&|spec| spec.jwks_url = None, "either jwks_file or jwks_url");
        check(&|spec| spec.jwks_url = Some("http://idp/keys".into()), "https");
        check(&|spec| spec.jwks_file = Some("/keys".into()), "either jwks_file or jwks_url");
        check(
            &|spec| (spec.jwks_url, spec.jwks_file) = (None, Some("/nowhere/jwks".into())),
            "/nowhere/jwks",
        );
        check(&|spec| spec.refresh = Duration::ZERO, "auth.jwt.refresh");
    }

    proptest! {
        #[test]
        fn a_token_with_one_changed_character_is_rejected(at in any::<prop::sample::Index>(), other in "[A-Za-z0-9_=.+/ -]") {
            let signer = Signer::new();
            let good = signer.token(&json!({"alg": "EdDSA"}), &claims());
            let jwt = verifier(&[signer.jwk("k")]);
            prop_assert!(jwt.verify_now(&good, NOW).is_ok());
            let at = at.index(good.len());
            let changed = format!("{}{other}{}", &good[..at], &good[at + 1..]);
            prop_assert!(changed == good || jwt.verify_now(&changed, NOW).is_err(), "{}", changed);
            let longer = format!("{}{other}{}", &good[..at], &good[at..]);
            prop_assert!(jwt.verify_now(&longer, NOW).is_err(), "{}", longer);
        }

        /// The unused bits of the last character must be 0, so each signature has one encoding only.
        #[test]
        fn a_signature_has_one_encoding_only(other in "[A-Za-z0-9_-]") {
            let signer = Signer::new();
            let good = signer.token(&json!({"alg": "EdDSA"}), &claims());
            let changed = format!("{}{other}", &good[..good.len() - 1]);
            let believed = verifier(&[signer.jwk("k")]).verify_now(&changed, NOW).is_ok();
            prop_assert_eq!(believed, changed == good);
        }

        #[test]
        fn no_input_makes_the_verifier_panic(token in "[A-Za-z0-9_.=-]{0,200}", json in "\\{.{0,80}\\}") {
            let jwt = verifier(&[Signer::new().jwk("k")]);
            prop_assert!(jwt.verify_now(&token, NOW).is_err());
            let token = format!("{}.{}.AA", encode(json.as_bytes()), encode(json.as_bytes()));
            prop_assert!(jwt.verify_now(&token, NOW).is_err());
        }
    }
}
