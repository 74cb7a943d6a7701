//! Replaces members of a request body and leaves all others as they are.

use crate::json::{JsonError, Scanner};

/// A body, which must be an object, with `salt` as its only `cache_salt` (vLLM, SGLang), which limits prefix sharing.
///
/// # Errors
/// If the body is not a JSON object.
pub fn with_cache_salt(body: &str, salt: &str) -> Result<Vec<u8>, JsonError> {
    with_member(body, "cache_salt", salt)
}

/// A body, which must be an object, with `model` as its only `model`.
///
/// # Errors
/// If the body is not a JSON object.
pub fn with_model(body: &str, model: &str) -> Result<Vec<u8>, JsonError> {
    with_member(body, "model", model)
}

/// A body, which must be an object, with `priority` as its only `priority`, in the engine's own terms.
///
/// # Errors
/// If the body is not a JSON object.
pub fn with_priority(body: &str, priority: i32) -> Result<Vec<u8>, JsonError> {
    let added = format!("\"priority\":{priority}");
    edited(body, &added, |key, _| if key == "priority" { Change::Remove } else { Change::Keep })
}

/// A body with this text as its only member of that name, whatever escapes its keys use.
fn with_member(body: &str, name: &str, text: &str) -> Result<Vec<u8>, JsonError> {
    let added = format!("\"{name}\":{}", quoted(text));
    edited(body, &added, |key, _| if key == name { Change::Remove } else { Change::Keep })
}

/// What becomes of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It stays, byte for byte.
    Keep,
    /// It is left out.
    Remove,
    /// It gets this value, which is JSON.
    Replace(Vec<u8>),
}

/// An object with `added`, members in JSON without braces, followed by its own members as `change` leaves them: it
/// gets each key, decoded, and the text of its value.
pub(crate) fn edited(
    object: &str,
    added: &str,
    mut change: impl FnMut(&str, &str) -> Change,
) -> Result<Vec<u8>, JsonError> {
    let mut out = Vec::with_capacity(object.len() + added.len() + 8);
    out.push(b'{');
    out.extend_from_slice(added.as_bytes());
    let mut scanner = Scanner::new(object);
    let mut walk = scanner.object()?;
    while let Some(key) = walk.key(&mut scanner)? {
        let value = scanner.skip()?;
        let replaced = match change(&key.decode(), value) {
            Change::Keep => None,
            Change::Remove => continue,
            Change::Replace(value) => Some(value),
        };
        out.extend_from_slice(if out.len() > 1 { b",\"" } else { b"\"" });
        out.extend_from_slice(key.raw().as_bytes());
        out.extend_from_slice(b"\":");
        out.extend_from_slice(replaced.as_deref().unwrap_or(value.as_bytes()));
    }
    scanner.end()?;
    out.push(b'}');
    Ok(out)
}

/// A text as a JSON string.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_salt_is_ours_and_all_else_stays() {
        for (body, expect) in [
            ("{}", json!({"cache_salt": "aa"})),
            (r#" {"model":"m","prompt":"a b"} "#, json!({"cache_salt": "aa", "model": "m", "prompt": "a b"})),
            (r#"{"cache_salt":"theirs"}"#, json!({"cache_salt": "aa"})),
            (
                r#"{"a":1,"cache_salt" : {"x":[1]} ,"b":"\"}"}"#,
                json!({"cache_salt": "aa", "a": 1, "b": "\"}"}),
            ),
            (
                r#"{"cache\u005fsalt":"theirs","cache_salt":null,"in":{"cache_salt":1}}"#,
                json!({"cache_salt": "aa", "in": {"cache_salt": 1}}),
            ),
        ] {
            let salted = with_cache_salt(body, "aa").expect(body);
            let text = std::str::from_utf8(&salted).expect("UTF-8");
            assert_eq!(serde_json::from_str::<Value>(text).expect(text), expect);
            assert_eq!(text.matches("\"aa\"").count(), 1, "{text}");
        }
        for body in ["", "[]", "{", r#"{"a":}"#, "{} x", r#"{"a":1,}"#] {
            assert!(with_cache_salt(body, "aa").is_err(), "{body}");
        }
    }

    proptest! {
        #[test]
        fn whatever_stands_in_a_body_reads_back_but_for_the_salt(
            members in prop::collection::btree_map("[a-z\\\\\"é_]{0,6}|cache_salt", "[ -~é\\n]{0,12}", 0..6),
        ) {
            let mut body = json!(members);
            let salted = with_cache_salt(&body.to_string(), "0f").expect("an object");
            body["cache_salt"] = json!("0f");
            prop_assert_eq!(serde_json::from_slice::<Value>(&salted).expect("JSON"), body);
        }
    }

    #[test]
    fn a_model_is_written_with_the_escapes_it_needs() {
        let edited = with_model(r#"{"model":"a","prompt":"x"}"#, "org/\"m\"").expect("an object");
        let edited: Value = serde_json::from_slice(&edited).expect("JSON");
        assert_eq!(edited, json!({"model": "org/\"m\"", "prompt": "x"}));
    }
}
