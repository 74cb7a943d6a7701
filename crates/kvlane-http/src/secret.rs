//! Secrets: keys that `Debug` and `Serialize` never print.
//!
//! The configuration holds a secret itself, or the place to read it from, which may be printed:
//! `sk-1`, `{env: NAME}`, `{file: PATH}`.

use std::cell::Cell;
use std::fmt;
use std::path::{Path, PathBuf};

use kvlane_core::setting;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Printed in place of a secret.
pub const REDACTED: &str = "[redacted]";
/// Largest file of a secret.
const FILE_BYTES_MAX: u64 = 64 << 10;

thread_local! {
    static REVEALS: Cell<bool> = const { Cell::new(false) };
}

/// Serializes secrets in the clear while `work` runs, on this thread. For values that are parsed again at once and never
/// printed: flags are merged into a configuration in that way.
pub fn revealed<T>(work: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            REVEALS.set(self.0);
        }
    }
    let _restore = Restore(REVEALS.replace(true));
    work()
}

/// Whether [`revealed`] is running.
pub fn is_revealed() -> bool {
    REVEALS.get()
}

/// A secret, or the place to read it from.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "Written")]
pub enum Secret {
    /// The secret itself.
    Plain(Box<str>),
    /// The environment variable that holds it.
    Env(String),
    /// The file that holds it; leading and trailing white space is ignored.
    File(PathBuf),
}

/// The written form of a secret.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Plain(Box<str>),
    Place(Place),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Place {
    Env(String),
    File(PathBuf),
}

// === impl Secret ===

setting!(Any: Secret);

impl Secret {
    /// A secret given in the clear.
    pub fn new(secret: impl Into<Box<str>>) -> Self {
        Self::Plain(secret.into())
    }

    /// Reads the secret.
    ///
    /// # Errors
    /// Why it cannot be read; the error does not contain it.
    pub fn read(&self) -> Result<String, String> {
        let read = match self {
            Self::Plain(secret) => secret.to_string(),
            Self::Env(name) => std::env::var(name)
                .map_err(|_| format!("the environment variable {name} is not set, or is not UTF-8"))?,
            Self::File(path) => {
                let cannot = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
                let bytes = std::fs::metadata(path).map_err(cannot)?.len();
                if bytes > FILE_BYTES_MAX {
                    return Err(format!(
                        "{} has {bytes} bytes; a secret may have at most {FILE_BYTES_MAX}",
                        path.display()
                    ));
                }
                std::fs::read_to_string(path).map_err(cannot)?.trim().to_owned()
            }
        };
        if read.is_empty() {
            return Err(format!("{self:?} is empty"));
        }
        Ok(read)
    }

    /// Its file, if it is read from one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Plain(_) | Self::Env(_) => None,
        }
    }
}

impl From<String> for Secret {
    fn from(secret: String) -> Self {
        Self::Plain(secret.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(_) => f.write_str(REDACTED),
            Self::Env(name) => write!(f, "{{env: {name}}}"),
            Self::File(path) => write!(f, "{{file: {}}}", path.display()),
        }
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Plain(secret) => serializer.serialize_str(if is_revealed() { secret } else { REDACTED }),
            Self::Env(name) => Place::Env(name.clone()).serialize(serializer),
            Self::File(path) => Place::File(path.clone()).serialize(serializer),
        }
    }
}

impl From<Written> for Secret {
    fn from(written: Written) -> Self {
        match written {
            Written::Plain(secret) => Self::Plain(secret),
            Written::Place(Place::Env(name)) => Self::Env(name),
            Written::Place(Place::File(path)) => Self::File(path),
        }
    }
}

/// The SHA-256 of a key. A short key can be guessed from it, so it is not printed either.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash(pub [u8; 32]);

// === impl KeyHash ===

setting!(Text: KeyHash);

impl KeyHash {
    /// The hash of `key`.
    pub fn of(key: &str) -> Self {
        Self::of_bytes(key.as_bytes())
    }

    /// The hash of a key that need not be text.
    pub fn of_bytes(key: &[u8]) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, key).as_ref());
        Self(hash)
    }

    /// A new key of 256 random bits, and its hash.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new_key() -> Result<(String, Self), String> {
        let mut random = [0; 32];
        SystemRandom::new().fill(&mut random).map_err(|_| "the system's random number generator failed")?;
        let key = format!("kvl-{}", Self(random).to_hex());
        let hash = Self::of(&key);
        Ok((key, hash))
    }

    /// Parses 64 hexadecimal digits.
    ///
    /// # Errors
    /// The text is something else; the error does not contain it.
    pub fn parse(hex: &str) -> Result<Self, String> {
        let wrong = || {
            "it must be the SHA-256 of a key in 64 hexadecimal digits, as `kvlane key hash` prints it"
                .to_owned()
        };
        let digits: Vec<u32> = hex.chars().map_while(|digit| digit.to_digit(16)).collect();
        if digits.len() != 64 || hex.chars().count() != 64 {
            return Err(wrong());
        }
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
            *byte = (pair[0] * 16 + pair[1]) as u8;
        }
        Ok(Self(hash))
    }

    /// Its 64 hexadecimal digits.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for KeyHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if is_revealed() {
            serializer.serialize_str(&self.to_hex())
        } else {
            serializer.serialize_str(REDACTED)
        }
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let hex = String::deserialize(deserializer)?;
        Self::parse(&hex).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{json, to_value};

    use super::*;

    #[test]
    fn a_secret_is_never_printed_and_is_read_where_it_is_needed() {
        let secret = Secret::new("sk-1");
        assert_eq!(format!("{secret:?}"), REDACTED);
        assert_eq!(to_value(&secret).expect("JSON"), json!(REDACTED));
        assert_eq!(secret.read().as_deref(), Ok("sk-1"));
        let hash = KeyHash::of("sk-1");
        assert_eq!((format!("{hash:?}"), to_value(hash).expect("JSON")), (REDACTED.into(), json!(REDACTED)));
    }

    #[test]
    fn what_is_revealed_reads_back_as_it_was_and_is_hidden_again() {
        let secrets = [Secret::new("sk-1"), Secret::Env("K".into()), Secret::File("/k".into())];
        let written = revealed(|| to_value(&secrets).expect("JSON"));
        assert_eq!(written, json!(["sk-1", {"env": "K"}, {"file": "/k"}]));
        assert_eq!(serde_json::from_value::<[Secret; 3]>(written).expect("secrets"), secrets);
        assert_eq!(to_value(&secrets).expect("JSON")[0], json!(REDACTED));
        let hash = KeyHash::of("sk-1");
        let written = revealed(|| to_value(hash).expect("JSON"));
        assert_eq!(serde_json::from_value::<KeyHash>(written).expect("a hash"), hash);
    }

    #[test]
    fn a_secret_in_a_file_may_end_in_a_line_and_one_that_is_missing_says_where() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(&file, "sk-2\n").expect("written");
        assert_eq!(Secret::File(file.path().into()).read().as_deref(), Ok("sk-2"));
        std::fs::write(&file, " \n").expect("written");
        for (secret, word) in [
            (Secret::File(file.path().into()), "is empty"),
            (Secret::File("/nowhere/key".into()), "/nowhere/key"),
            (Secret::Env("KVLANE_NO_SUCH_KEY".into()), "KVLANE_NO_SUCH_KEY"),
        ] {
            let problem = secret.read().expect_err(word);
            assert!(problem.contains(word), "{problem}");
        }
    }

    #[test]
    fn a_hash_has_64_digits_and_is_not_repeated_when_it_is_wrong() {
        let known = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
        assert_eq!(KeyHash::of("secret"), KeyHash::parse(known).expect("right"));
        assert_eq!(KeyHash::parse(&known.to_uppercase()).expect("right").to_hex(), known);
        for wrong in
            ["", &known[1..], &format!("{known}0"), "sk-plain-key-pasted-by-mistake", &"é".repeat(32)]
        {
            let problem = KeyHash::parse(wrong).expect_err("wrong");
            assert!(wrong.is_empty() || !problem.contains(wrong), "{problem}");
        }
    }
}
