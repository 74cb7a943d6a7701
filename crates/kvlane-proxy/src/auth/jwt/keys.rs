//! The public keys of a JWK set (RFC 7517), and the algorithms of each.

use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, EllipticCurveKeyParameters, Jwk, KeyAlgorithm,
    OctetKeyPairParameters, PublicKeyUse,
};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde::Deserialize;
use serde_json::Value;

/// Most keys kept of a set; the rest are ignored.
const KEYS_MAX: usize = 256;
/// Base64 characters of a coordinate of P-256 and of an Ed25519 key: 32 bytes.
const P256_CHARS: usize = 43;
/// Base64 characters of a coordinate of P-384: 48 bytes.
const P384_CHARS: usize = 64;

/// A public key that verifies tokens.
pub(super) struct Key {
    /// Its `kid`.
    pub(super) id: Option<String>,
    /// The algorithms of its key type; only its `alg`, if it has one.
    algorithms: Vec<Algorithm>,
    public: DecodingKey,
}

// === impl Key ===

impl Key {
    /// The claims of `token`, if this key signed it by one of its algorithms and the claims are as `expected`.
    pub(super) fn claims(&self, token: &str, expected: &Validation) -> Option<Value> {
        let mut expected = expected.clone();
        expected.algorithms.clone_from(&self.algorithms);
        decode(token, &self.public, &expected).ok().map(|token| token.claims)
    }

    /// None if the key is not for signatures, its type is not supported, or its coordinates have a wrong length.
    fn new(jwk: &Jwk) -> Option<Self> {
        if !matches!(jwk.common.public_key_use, None | Some(PublicKeyUse::Signature)) {
            return None;
        }
        let algorithms: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => {
                &[Algorithm::RS256, Algorithm::RS384, Algorithm::RS512, Algorithm::PS256]
            }
            AlgorithmParameters::EllipticCurve(EllipticCurveKeyParameters { curve, x, y, .. }) => {
                match (curve, x.len(), y.len()) {
                    (EllipticCurve::P256, P256_CHARS, P256_CHARS) => &[Algorithm::ES256],
                    (EllipticCurve::P384, P384_CHARS, P384_CHARS) => &[Algorithm::ES384],
                    _ => return None,
                }
            }
            AlgorithmParameters::OctetKeyPair(OctetKeyPairParameters {
                curve: EllipticCurve::Ed25519,
                x,
                ..
            }) if x.len() == P256_CHARS => &[Algorithm::EdDSA],
            // This includes shared secrets: a client that knows one could sign as the issuer.
            _ => return None,
        };
        let own = jwk.common.key_algorithm;
        let allowed = |algorithm: &&Algorithm| own.is_none_or(|own| own == KeyAlgorithm::from(**algorithm));
        Some(Self {
            id: jwk.common.key_id.clone(),
            algorithms: algorithms.iter().filter(allowed).copied().collect(),
            public: DecodingKey::from_jwk(jwk).ok()?,
        })
    }
}

/// The keys of a JWK set that can verify tokens. Unreadable keys are skipped, as RFC 7517, section 5, asks.
///
/// # Errors
/// The text is not a JWK set, or none of its keys can verify tokens.
pub(super) fn key_set(text: &[u8]) -> Result<Vec<Key>, String> {
    #[derive(Deserialize)]
    struct Set {
        keys: Vec<Value>,
    }
    let set: Set = serde_json::from_slice(text).map_err(|error| format!("not a JWK set: {error}"))?;
    let key = |key: Value| Key::new(&serde_json::from_value(key).ok()?);
    let keys: Vec<Key> = set.keys.into_iter().filter_map(key).take(KEYS_MAX).collect();
    if keys.is_empty() {
        return Err(
            "the JWK set has no public key for RS256, RS384, RS512, PS256, ES256, ES384 or EdDSA".into()
        );
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Base64 text of this many bytes.
    fn bytes(count: usize) -> String {
        use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
        BASE64_URL_SAFE_NO_PAD.encode(vec![7; count])
    }

    fn keys(jwk: Value) -> usize {
        key_set(json!({"keys": [jwk]}).to_string().as_bytes()).map_or(0, |keys| keys.len())
    }

    #[test]
    fn a_key_is_read_if_its_type_can_sign_and_its_size_is_right() {
        let (n, b32, b48) = (bytes(256), bytes(32), bytes(48));
        for good in [
            json!({"kty": "RSA", "n": n, "e": "AQAB"}),
            json!({"kty": "RSA", "n": n, "e": "AQAB", "use": "sig", "alg": "RS256", "kid": "a"}),
            json!({"kty": "EC", "crv": "P-256", "x": b32, "y": b32}),
            json!({"kty": "EC", "crv": "P-384", "x": b48, "y": b48}),
            json!({"kty": "OKP", "crv": "Ed25519", "x": b32}),
        ] {
            assert_eq!(keys(good.clone()), 1, "{good}");
        }
        for bad in [
            json!({"kty": "oct", "k": b32}),
            json!({"kty": "oct", "k": b32, "alg": "HS256", "use": "sig"}),
            json!({"kty": "RSA", "n": n, "e": "AQAB", "use": "enc"}),
            json!({"kty": "RSA", "n": n, "e": "AQAB", "use": "tls"}),
            json!({"kty": "RSA", "n": n, "e": "AQAB", "kid": 7}),
            json!({"kty": "RSA", "n": n}),
            json!({"kty": "RSA", "n": format!("{n}="), "e": "AQAB"}),
            json!({"kty": "RSA", "n": "+/+/", "e": "AQAB"}),
            json!({"kty": "EC", "crv": "P-256", "x": b32}),
            json!({"kty": "EC", "crv": "P-256", "x": b48, "y": b48}),
            json!({"kty": "EC", "crv": "P-256", "x": bytes(31), "y": bytes(33)}),
            json!({"kty": "EC", "crv": "P-384", "x": b32, "y": b32}),
            json!({"kty": "EC", "crv": "P-521", "x": bytes(66), "y": bytes(66)}),
            json!({"kty": "EC", "crv": "secp256k1", "x": b32, "y": b32}),
            json!({"kty": "EC", "crv": "Ed25519", "x": b32, "y": b32}),
            json!({"kty": "OKP", "crv": "X25519", "x": b32}),
            json!({"kty": "OKP", "crv": "Ed448", "x": bytes(57)}),
            json!({"kty": "OKP", "crv": "P-256", "x": b32}),
            json!({"kty": "OKP", "crv": "Ed25519", "x": bytes(31)}),
            json!({"kty": "unheard-of", "x": b32}),
            json!({}),
            json!("a key"),
        ] {
            assert_eq!(keys(bad.clone()), 0, "{bad}");
        }
    }

    #[test]
    fn unreadable_keys_are_skipped_and_the_first_readable_keys_are_kept() {
        let strange = json!({"kty": "EC", "crv": "brainpoolP256r1", "x": "AA", "y": "AA"});
        let key = |n: usize| json!({"kty": "OKP", "crv": "Ed25519", "x": bytes(32), "kid": n.to_string()});
        let all: Vec<Value> = std::iter::once(strange).chain((0..KEYS_MAX + 10).map(key)).collect();
        let read = key_set(json!({"keys": all}).to_string().as_bytes()).expect("keys");
        assert_eq!(read.len(), KEYS_MAX);
        assert_eq!((read[0].id.as_deref(), read[255].id.as_deref()), (Some("0"), Some("255")));
    }

    #[test]
    fn a_set_without_a_usable_key_is_an_error() {
        for (set, word) in [
            ("", "not a JWK set"),
            ("{}", "not a JWK set"),
            (r#"{"keys":{}}"#, "not a JWK set"),
            (r#"{"keys":[]}"#, "no public key"),
            (r#"{"keys":[{"kty":"oct","k":"AA"}]}"#, "no public key"),
        ] {
            let problem = key_set(set.as_bytes()).err().expect(set);
            assert!(problem.contains(word), "{problem}");
        }
    }
}
