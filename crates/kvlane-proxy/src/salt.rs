//! Cache salts that isolate tenants in engines' prefix caches, keyed by a secret.
//!
//! An engine shares a cached block between requests with the same `cache_salt`. If a tenant's salt followed from its
//! name alone, anyone with the name could send requests to an engine under it and learn from `cached_tokens` what the
//! tenant has sent. So a salt is an HMAC-SHA-256, truncated to 128 bits, under a key that only gateways have.

use bytes::Bytes;
use kvlane_core::config::{ConfigError, wrong};
use kvlane_wire::edit::with_cache_salt;
use kvlane_wire::openai::ParseError;
use ring::hmac;
use ring::rand::SystemRandom;

use crate::auth::config::Security;

/// Fewest bytes of a configured key: as many as a salt has.
const KEY_BYTES_MIN: usize = 16;
/// Hexadecimal digits of a salt.
const DIGITS: usize = 32;

/// The key of the salts.
#[derive(Clone, Debug)]
pub struct SaltKey(hmac::Key);

// === impl SaltKey ===

impl SaltKey {
    /// The configured key, if there is one.
    ///
    /// # Errors
    /// The key cannot be read, or is too short.
    pub fn read(config: &Security) -> Result<Option<Self>, ConfigError> {
        let Some(key) = &config.tenant_salt_key else { return Ok(None) };
        let key = key.read().or_else(|problem| wrong("auth.tenant_salt_key", problem))?;
        if key.len() < KEY_BYTES_MIN {
            let problem = format!(
                "it has {} bytes: must have at least {KEY_BYTES_MIN}, such as the output of `openssl rand -hex 32`",
                key.len()
            );
            return wrong("auth.tenant_salt_key", problem);
        }
        Ok(Some(Self(hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()))))
    }

    /// The key that follows from a name, and so is no secret.
    pub(crate) fn of(name: &str) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, name.as_bytes()))
    }

    /// A random key for this process.
    ///
    /// # Panics
    /// The system's random number generator fails.
    #[expect(clippy::expect_used, reason = "it runs at the start, before there are requests")]
    pub fn generate() -> Self {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        Self(key.expect("the system has random numbers, as there are keys of TLS"))
    }

    /// The salt of these `parts`, each of which is hashed with its length.
    pub fn salt(&self, parts: &[&[u8]]) -> String {
        let mut context = hmac::Context::with_key(&self.0);
        for part in parts {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        let digits = context.sign().as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        digits[..DIGITS].to_owned()
    }
}

/// A body with this salt.
///
/// # Errors
/// The body is no JSON object. It was parsed before, so this does not happen.
pub(super) fn salted(body: &[u8], salt: &str) -> Result<Bytes, ParseError> {
    let text = std::str::from_utf8(body).map_err(|error| ParseError::NotUtf8 { at: error.valid_up_to() })?;
    Ok(with_cache_salt(text, salt).map_err(ParseError::from)?.into())
}

#[cfg(test)]
mod tests {
    use kvlane_http::secret::Secret;

    use super::*;

    fn key(key: &str) -> Result<Option<SaltKey>, ConfigError> {
        SaltKey::read(&Security { tenant_salt_key: Some(Secret::new(key)), ..Security::default() })
    }

    #[test]
    fn a_salt_depends_on_the_key() {
        let of = |secret: &str| key(secret).expect("good").expect("there").salt(&[b"a", b"b"]);
        let ours = of("0123456789abcdef");
        assert_eq!((ours.len(), &ours), (DIGITS, &of("0123456789abcdef")));
        assert_ne!(ours, of("0123456789abcdeg"));
        assert_ne!(ours, SaltKey::generate().salt(&[b"a", b"b"]));
        assert_ne!(SaltKey::generate().salt(&[]), SaltKey::generate().salt(&[]));
    }

    #[test]
    fn the_boundaries_between_parts_change_the_salt() {
        let key = SaltKey::generate();
        assert_ne!(key.salt(&[b"ab", b""]), key.salt(&[b"a", b"b"]));
        assert_ne!(key.salt(&[b"ab"]), key.salt(&[b"ab", b""]));
    }

    #[test]
    fn a_short_key_is_rejected_without_being_shown() {
        let error = key("short").expect_err("short").to_string();
        assert!(error.contains("auth.tenant_salt_key") && !error.contains("short;"), "{error}");
        assert!(key("").is_err());
        assert!(SaltKey::read(&Security::default()).is_ok_and(|key| key.is_none()));
    }
}
