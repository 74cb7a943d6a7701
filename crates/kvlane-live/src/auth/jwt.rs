//! Who a signed token says somebody is (JWT, RFC 7519; keys as JWK sets, RFC 7517).
//!
//! What signs is decided by the key and never by the token alone: a key verifies the algorithms of its own kind, and there
//! are no shared secrets among them, so no public key can be taken for one. A token must say for whom it is, who made it and
//! when it ends.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::Uri;
use kvlane_core::config::{ConfigError, within, wrong};
use kvlane_http::client::Client;
use kvlane_http::secret::KeyHash;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Identity, NAME_BYTES_MAX, Role};

/// What the names of those begin with who show a token: no key has such a name.
pub(super) const PREFIX: &str = "jwt:";
/// What follows in a name that is a hash of the claim.
const HASHED: char = '#';
/// Clocks may differ by this much.
const LEEWAY_S: f64 = 60.0;
/// The most keys of a set that are kept.
const KEYS_MAX: usize = 256;
/// The most keys that one token is tried with: those that have its id, or any if it names none.
const TRIES_MAX: usize = 8;
/// Tokens that are known to be good; beyond it they are verified anew.
const KNOWN_MAX: usize = 10_000;
/// Time that whoever has the keys may take to tell them.
const FETCH_MAX: Duration = Duration::from_secs(10);
/// The largest file of keys.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Which tokens are believed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JwtSpec {
    /// Who makes them: their `iss`.
    pub issuer: String,
    /// For whom they must be: their `aud`, or one of it.
    pub audience: String,
    /// A file with the keys they are signed with, as a JWK set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jwks_file: Option<PathBuf>,
    /// Where the keys are told: `https`, or `http` on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jwks_url: Option<String>,
    /// Time between two times that they are asked for.
    #[serde(default = "usual_refresh", with = "humantime_serde")]
    pub refresh: Duration,
    /// The claim that says who it is.
    #[serde(default = "usual_claim")]
    pub name_claim: String,
    /// What whoever has a token may do.
    #[serde(default)]
    pub role: Role,
    /// The claim whose values `roles` gives roles to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role_claim: Option<String>,
    /// Roles by the values of that claim.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub roles: BTreeMap<String, Role>,
}

fn usual_refresh() -> Duration {
    Duration::from_secs(600)
}

fn usual_claim() -> String {
    "sub".into()
}

/// Verifies tokens.
pub(crate) struct Jwt {
    pub(crate) spec: JwtSpec,
    keys: ArcSwap<Vec<Key>>,
    known: Mutex<HashMap<[u8; 32], Known>>,
}

/// A token that was verified.
struct Known {
    identity: Arc<Identity>,
    ends_s: f64,
}

/// A key that signs tokens.
struct Key {
    id: Option<String>,
    /// What it may sign with, where it says.
    algorithm: Option<String>,
    public: Public,
}

enum Public {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

/// Why a token is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// It is none, or not of ours, or not signed by whom it should be, or over.
    Bad,
    /// No key that is known can have signed it: there may be a new one.
    UnknownKey,
}

// === impl JwtSpec ===

impl JwtSpec {
    fn validate(&self) -> Result<(), ConfigError> {
        if self.issuer.is_empty() || self.audience.is_empty() {
            return wrong(
                "auth.jwt",
                "issuer and audience say whose tokens are believed: neither may be empty".into(),
            );
        }
        within("auth.jwt.refresh", self.refresh.as_secs(), 10, 7 * 24 * 3600)?;
        match (&self.jwks_file, &self.jwks_url) {
            (Some(_), None) => Ok(()),
            (None, Some(url)) => page(url).map(|_| ()).or_else(|problem| wrong("auth.jwt.jwks_url", problem)),
            _ => wrong("auth.jwt", "say jwks_file or jwks_url, one of them".into()),
        }
    }

    /// Whether a token can open the admin API.
    pub(super) fn names_operators(&self) -> bool {
        self.role != Role::User || self.roles.values().any(|&role| role != Role::User)
    }
}

// === impl Jwt ===

impl Jwt {
    /// Reads the keys, if they are in a file.
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
                return Err(fail(format!("it has {bytes} bytes, {FILE_BYTES_MAX} is the most")));
            }
            let text = std::fs::read(path).map_err(|error| fail(error.to_string()))?;
            keys = key_set(&text).map_err(fail)?;
        }
        Ok(Self { spec: spec.clone(), keys: ArcSwap::from_pointee(keys), known: Mutex::default() })
    }

    /// Begins with the keys that `before` had, if they come from the same place.
    pub(crate) fn inherit(&self, before: &Self) {
        if self.spec.jwks_url.is_some() && self.spec.jwks_url == before.spec.jwks_url {
            self.keys.store(before.keys.load_full());
        }
    }

    /// Asks for the keys. Those that are there stay if that fails.
    pub(crate) async fn fetch(&self) -> Result<(), String> {
        let Some(url) = &self.spec.jwks_url else { return Ok(()) };
        let (base, path) = page(url)?;
        let (status, body) = Client::at(&base, FETCH_MAX)?.get(&path).await?;
        if status != 200 {
            return Err(format!("GET {path} answered {status}"));
        }
        let keys = key_set(&body)?;
        self.keys.store(Arc::new(keys));
        // What a withdrawn key has signed is not believed any longer.
        self.known().clear();
        Ok(())
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<[u8; 32], Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whom `token` names, `now_s` seconds after 1970. `tag` stands for the token.
    pub(super) fn verify(&self, token: &str, tag: [u8; 32], now_s: f64) -> Result<Arc<Identity>, Wrong> {
        if let Some(Known { identity, ends_s }) = self.known().get(&tag)
            && now_s <= *ends_s
        {
            return Ok(Arc::clone(identity));
        }
        let (identity, ends_s) = self.verify_anew(token, now_s)?;
        let identity = Arc::new(identity);
        let mut known = self.known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(tag, Known { identity: Arc::clone(&identity), ends_s });
        Ok(identity)
    }

    fn verify_anew(&self, token: &str, now_s: f64) -> Result<(Identity, f64), Wrong> {
        #[derive(Deserialize)]
        struct Header {
            alg: String,
            kid: Option<String>,
            crit: Option<Value>,
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(Wrong::Bad)?;
        let (header, claims) = signed.split_once('.').ok_or(Wrong::Bad)?;
        let header: Header = from_part(header)?;
        // Whoever needs us to understand something more must not be misunderstood.
        if header.crit.is_some() {
            return Err(Wrong::Bad);
        }
        let signature = base64url(signature).ok_or(Wrong::Bad)?;
        let keys = self.keys.load();
        let may = |key: &&Key| header.kid.is_none() || key.id == header.kid;
        let mut fitting = keys.iter().filter(may).take(TRIES_MAX).peekable();
        if fitting.peek().is_none() {
            return Err(Wrong::UnknownKey);
        }
        if !fitting.any(|key| key.has_signed(&header.alg, signed.as_bytes(), &signature)) {
            return Err(Wrong::Bad);
        }
        self.identity(&from_part(claims)?, now_s)
    }

    /// Whom the claims of a token name that was signed as it should be, and until when.
    fn identity(&self, claims: &Value, now_s: f64) -> Result<(Identity, f64), Wrong> {
        let spec = &self.spec;
        let time = |claim: &str| claims.get(claim).map(|time| time.as_f64().ok_or(Wrong::Bad)).transpose();
        let ends_s = time("exp")?.ok_or(Wrong::Bad)? + LEEWAY_S;
        let begins_s = time("nbf")?.map_or(f64::NEG_INFINITY, |begins_s| begins_s - LEEWAY_S);
        let in_time = begins_s <= now_s && now_s <= ends_s;
        let of_issuer = claims["iss"].as_str() == Some(&spec.issuer);
        let for_us = all(&claims["aud"]).any(|audience| audience == spec.audience);
        let name = claims.get(&spec.name_claim).and_then(Value::as_str).filter(|name| !name.is_empty());
        let (true, true, true, Some(name)) = (in_time, of_issuer, for_us, name) else {
            return Err(Wrong::Bad);
        };
        let told = spec.role_claim.iter().flat_map(|claim| all(&claims[claim.as_str()]));
        let role =
            told.filter_map(|value| spec.roles.get(value)).chain([&spec.role]).max_by_key(|role| role.rank());
        let role = role.copied().unwrap_or_default();
        Ok((Identity { name: name_of(name).into(), role, trusted: false }, ends_s))
    }
}

/// What the subject of a token is called: as the claim says, or by the claim's hash where that is no name. A claim that
/// begins as hashed names do is hashed, too: no claim is written as another one's hash.
fn name_of(claim: &str) -> String {
    let short = claim.len() <= NAME_BYTES_MAX - PREFIX.len();
    if short && !claim.starts_with(HASHED) && claim.bytes().all(|byte| byte.is_ascii_graphic()) {
        return format!("{PREFIX}{claim}");
    }
    format!("{PREFIX}{HASHED}{}", &KeyHash::of(claim).to_hex()[..32])
}

/// A string, or those of a list.
fn all(value: &Value) -> impl Iterator<Item = &str> {
    let list = value.as_array().into_iter().flatten();
    std::iter::once(value).chain(list).filter_map(Value::as_str)
}

// === impl Key ===

impl Key {
    /// Whether it has signed these bytes, in a way that is its own.
    fn has_signed(&self, algorithm: &str, bytes: &[u8], signature: &[u8]) -> bool {
        if self.algorithm.as_deref().is_some_and(|own| own != algorithm) {
            return false;
        }
        let curve = |verifies: &'static dyn signature::VerificationAlgorithm, point: &[u8]| {
            UnparsedPublicKey::new(verifies, point).verify(bytes, signature).is_ok()
        };
        match (&self.public, algorithm) {
            (Public::Rsa { n, e }, _) => {
                let verifies = match algorithm {
                    "RS256" => &signature::RSA_PKCS1_2048_8192_SHA256,
                    "RS384" => &signature::RSA_PKCS1_2048_8192_SHA384,
                    "RS512" => &signature::RSA_PKCS1_2048_8192_SHA512,
                    "PS256" => &signature::RSA_PSS_2048_8192_SHA256,
                    _ => return false,
                };
                RsaPublicKeyComponents { n, e }.verify(verifies, bytes, signature).is_ok()
            }
            (Public::P256(point), "ES256") => curve(&signature::ECDSA_P256_SHA256_FIXED, point),
            (Public::P384(point), "ES384") => curve(&signature::ECDSA_P384_SHA384_FIXED, point),
            (Public::Ed25519(point), "EdDSA") => curve(&signature::ED25519, point),
            _ => false,
        }
    }
}

/// The keys of a JWK set that can verify tokens.
fn key_set(text: &[u8]) -> Result<Vec<Key>, String> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<Value>,
    }
    let set: Set = serde_json::from_slice(text).map_err(|error| format!("it is no JWK set: {error}"))?;
    let keys: Vec<Key> = set.keys.iter().filter_map(key).take(KEYS_MAX).collect();
    if keys.is_empty() {
        return Err("it has no key for RS256, RS384, RS512, PS256, ES256, ES384 or EdDSA".into());
    }
    Ok(keys)
}

fn key(key: &Value) -> Option<Key> {
    let text = |name: &str| key.get(name).and_then(Value::as_str);
    let bytes = |name: &str| base64url(text(name)?);
    // Those that are for something else are none of ours.
    if text("use").is_some_and(|for_what| for_what != "sig") {
        return None;
    }
    let point = |width: usize| {
        let (x, y) = (bytes("x")?, bytes("y")?);
        (x.len() == width && y.len() == width).then(|| [&[4][..], &x, &y].concat())
    };
    let public = match (text("kty")?, text("crv")) {
        ("RSA", _) => Public::Rsa { n: bytes("n")?, e: bytes("e")? },
        ("EC", Some("P-256")) => Public::P256(point(32)?),
        ("EC", Some("P-384")) => Public::P384(point(48)?),
        ("OKP", Some("Ed25519")) => Public::Ed25519(bytes("x").filter(|x| x.len() == 32)?),
        _ => return None,
    };
    Some(Key { id: text("kid").map(str::to_owned), algorithm: text("alg").map(str::to_owned), public })
}

/// A part of a token, as JSON.
fn from_part<T: for<'de> Deserialize<'de>>(part: &str) -> Result<T, Wrong> {
    serde_json::from_slice(&base64url(part).ok_or(Wrong::Bad)?).map_err(|_| Wrong::Bad)
}

/// Undoes base64 in the alphabet of URLs, without padding (RFC 4648, section 5). Bits that stand for nothing must be 0, so
/// that no two texts are the same bytes.
fn base64url(text: &str) -> Option<Vec<u8>> {
    let (mut out, mut held, mut bits) = (Vec::with_capacity(text.len() * 3 / 4), 0u32, 0);
    for byte in text.bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        held = (held << 6 | u32::from(value)) & 0xFFFF;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push((held >> bits) as u8);
        }
    }
    (bits < 6 && held & ((1 << bits) - 1) == 0).then_some(out)
}

/// Where the keys are told: `scheme://host:port`, and the path.
fn page(url: &str) -> Result<(String, String), String> {
    let uri: Uri = url.parse().map_err(|error| format!("'{url}' is no URL ({error})"))?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(format!("'{url}': write https://host/path"));
    };
    let here = authority.host() == "localhost"
        || authority
            .host()
            .trim_matches(['[', ']'])
            .parse()
            .is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    // Whoever can change what comes can make tokens.
    if scheme != "https" && !(scheme == "http" && here) {
        return Err(format!("'{url}': keys are asked for under https, or on this machine"));
    }
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    Ok((format!("{scheme}://{authority}"), path.to_owned()))
}

/// Whether a token is believed that whoever has signed with one of `keys`, a JWK set, may have made. The claims alone are
/// read too.
#[cfg(feature = "testing")]
pub(crate) fn is_believed(keys: &[u8], token: &str, claims: &Value) -> bool {
    let spec = serde_json::json!({"issuer": "i", "audience": ["a"], "jwks_url": "https://h"});
    let (Ok(spec), Ok(keys)) = (serde_json::from_value(spec), key_set(keys)) else { return false };
    let jwt = Jwt { spec, keys: ArcSwap::from_pointee(keys), known: Mutex::default() };
    let _ = jwt.identity(claims, 1e9);
    jwt.verify(token, [0; 32], 1e9).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
    use serde_json::json;

    use super::*;

    const NOW: f64 = 1_700_000_000.0;

    fn encode(bytes: &[u8]) -> String {
        const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let mut out = String::new();
        for chunk in bytes.chunks(3) {
            let held =
                chunk.iter().fold(0u32, |held, &byte| held << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
            let digits = (0..=chunk.len()).map(|n| ALPHABET[(held >> (18 - 6 * n) & 63) as usize] as char);
            out.extend(digits);
        }
        out
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
            let signed = format!(
                "{}.{}",
                encode(header.to_string().as_bytes()),
                encode(claims.to_string().as_bytes())
            );
            let signature = encode(self.0.sign(signed.as_bytes()).as_ref());
            format!("{signed}.{signature}")
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
        let jwt = Jwt::read(&spec()).expect("right");
        jwt.keys.store(Arc::new(key_set(json!({"keys": keys}).to_string().as_bytes()).expect("keys")));
        jwt
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
    fn a_token_is_believed_if_all_of_it_is_right_and_by_nothing_less() {
        let signer = Signer::new();
        let (header, jwt) = (json!({"alg": "EdDSA", "kid": "k"}), verifier(&[signer.jwk("k")]));
        let verify = |claims: &Value| {
            jwt.verify_anew(&signer.token(&header, claims), NOW).map(|(identity, _)| identity)
        };
        let ann = Identity { name: "jwt:ann".into(), role: Role::User, trusted: false };
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
            ("an end that is no number", with(|claims| claims["exp"] = json!("9999999999"))),
            ("not yet", with(|claims| claims["nbf"] = json!(NOW + 61.0))),
            ("another issuer", with(|claims| claims["iss"] = json!("https://evil"))),
            ("no issuer", with(|claims| claims["iss"] = json!(null))),
            ("for others", with(|claims| claims["aud"] = json!(["other"]))),
            ("for nobody", with(|claims| claims["aud"] = json!(null))),
            ("of nobody", with(|claims| claims["sub"] = json!(""))),
            ("of a number", with(|claims| claims["sub"] = json!(7))),
        ] {
            assert_eq!(verify(&claims), Err(Wrong::Bad), "{what}");
        }
    }

    proptest! {
        /// No two subjects have one name, whatever they are and however they imitate each other.
        #[test]
        fn no_two_subjects_have_one_name(one in "(?s).{0,80}", other in "[#a-z ]{0,70}", same in any::<bool>()) {
            let other = if same { one.clone() } else { other };
            let named = name_of(&one);
            prop_assert_eq!(named == name_of(&other), one == other, "{:?} {:?}", one, other);
            // One that calls itself by the name of another.
            let imitation = named.trim_start_matches(PREFIX);
            prop_assert_eq!(named == name_of(imitation), one == imitation, "{:?}", one);
            prop_assert!(named.len() <= NAME_BYTES_MAX && named.bytes().all(|byte| byte.is_ascii_graphic()));
            prop_assert!(super::super::check_name(&named).is_err(), "no key has such a name");
        }
    }

    #[test]
    fn the_key_decides_how_it_is_signed() {
        let (signer, other) = (Signer::new(), Signer::new());
        let jwt = verifier(&[signer.jwk("k"), other.jwk("o")]);
        let verify = |token: &str| jwt.verify_anew(token, NOW).map(|_| ());
        let good = signer.token(&json!({"alg": "EdDSA", "kid": "k"}), &claims());
        assert_eq!(verify(&good), Ok(()));
        assert_eq!(
            verify(&signer.token(&json!({"alg": "EdDSA"}), &claims())),
            Ok(()),
            "any key, if it names none"
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
            json!({"kid": "k"}),
        ] {
            assert_eq!(verify(&signer.token(&header, &claims())), Err(Wrong::Bad), "{header}");
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
            assert_eq!(verify(token), Err(Wrong::Bad), "{token}");
        }
        let strange = signer.token(&json!({"alg": "EdDSA", "kid": "new"}), &claims());
        assert_eq!(verify(&strange), Err(Wrong::UnknownKey));
        let mut bound = signer.jwk("k");
        bound["alg"] = json!("ES256");
        assert_eq!(
            verifier(&[bound]).verify_anew(&good, NOW).err(),
            Some(Wrong::Bad),
            "the key says what it is for"
        );
    }

    #[test]
    fn elliptic_and_rsa_keys_verify_as_their_standards_say() {
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new())
            .expect("random");
        let signer = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P256_SHA256_FIXED_SIGNING,
            document.as_ref(),
            &SystemRandom::new(),
        )
        .expect("a key");
        let point = signer.public_key().as_ref();
        let jwk = json!({"kty": "EC", "crv": "P-256", "kid": "e", "x": encode(&point[1..33]), "y": encode(&point[33..])});
        let signed = format!(
            "{}.{}",
            encode(br#"{"alg":"ES256","kid":"e"}"#),
            encode(claims().to_string().as_bytes())
        );
        let signature = signer.sign(&SystemRandom::new(), signed.as_bytes()).expect("signed");
        let token = format!("{signed}.{}", encode(signature.as_ref()));
        assert!(verifier(&[jwk]).verify_anew(&token, NOW).is_ok());
        // RFC 7515, appendix A.2: RS256.
        let rsa = json!({"kty": "RSA", "n": "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ", "e": "AQAB"});
        let key = key(&rsa).expect("a key");
        let signed = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ";
        let signature = base64url("cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw").expect("base64");
        assert!(key.has_signed("RS256", signed.as_bytes(), &signature));
        assert!(!key.has_signed("RS384", signed.as_bytes(), &signature));
        assert!(!key.has_signed("RS256", &signed.as_bytes()[1..], &signature));
    }

    #[test]
    fn roles_are_what_the_claim_gives_at_most_and_names_are_nobody_elses() {
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
        assert!(super::super::check_name("jwt:ann").is_err(), "no key may be called that");
    }

    #[test]
    fn a_good_token_is_remembered_until_it_ends() {
        let signer = Signer::new();
        let jwt = verifier(&[signer.jwk("k")]);
        let token = signer.token(&json!({"alg": "EdDSA"}), &claims());
        assert!(jwt.verify(&token, [1; 32], NOW).is_ok());
        jwt.keys.store(Arc::default());
        assert!(jwt.verify(&token, [1; 32], NOW).is_ok(), "without its key");
        assert!(jwt.verify(&token, [2; 32], NOW).is_err());
        assert!(jwt.verify(&token, [1; 32], NOW + 361.0).is_err(), "it is over");
    }

    #[test]
    fn what_is_wrong_with_the_settings_is_said() {
        let check = |change: &dyn Fn(&mut JwtSpec), word: &str| {
            let mut spec = spec();
            change(&mut spec);
            let problem = Jwt::read(&spec).err().expect(word).to_string();
            assert!(problem.contains(word), "'{word}' is not in: {problem}");
        };
        check(&|spec| spec.audience.clear(), "audience");
        check(&|spec| spec.jwks_url = None, "jwks_file or jwks_url");
        check(&|spec| spec.jwks_url = Some("http://idp/keys".into()), "https");
        check(&|spec| spec.jwks_file = Some("/keys".into()), "one of them");
        check(
            &|spec| (spec.jwks_url, spec.jwks_file) = (None, Some("/nowhere/jwks".into())),
            "/nowhere/jwks",
        );
        check(&|spec| spec.refresh = Duration::ZERO, "auth.jwt.refresh");
        for set in [
            "",
            "{}",
            r#"{"keys":[]}"#,
            r#"{"keys":[{"kty":"oct","k":"AA"}]}"#,
            r#"{"keys":[{"kty":"RSA","use":"enc","n":"AA","e":"AQAB"}]}"#,
        ] {
            assert!(key_set(set.as_bytes()).is_err(), "{set}");
        }
    }

    proptest! {
        #[test]
        fn base64_reads_back_as_it_was_written_and_in_one_way_only(bytes in prop::collection::vec(any::<u8>(), 0..80), at in 0usize..100, other in any::<char>()) {
            let text = encode(&bytes);
            prop_assert_eq!(base64url(&text), Some(bytes.clone()));
            let mut changed: Vec<char> = text.chars().collect();
            if let Some(place) = changed.get_mut(at) {
                *place = other;
                let changed: String = changed.into_iter().collect();
                prop_assert!(changed == text || base64url(&changed) != Some(bytes));
            }
        }

        #[test]
        fn no_token_whatever_breaks_anything(token in "[A-Za-z0-9_.=-]{0,200}", json in "\\{.{0,80}\\}") {
            let jwt = verifier(&[Signer::new().jwk("k")]);
            prop_assert!(jwt.verify_anew(&token, NOW).is_err());
            let token = format!("{}.{}.AA", encode(json.as_bytes()), encode(json.as_bytes()));
            prop_assert!(jwt.verify_anew(&token, NOW).is_err());
        }
    }
}
