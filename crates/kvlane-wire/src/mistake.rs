//! Mistakes in values of a configuration, in words: what serde says, with what to write instead.

use kvlane_core::suggest::suggest;

/// Types that take whole numbers, and their bounds.
const WHOLE: [(&str, &str); 8] = [
    ("u8", "0 to 255"),
    ("u16", "0 to 65535"),
    ("u32", "0 to 4294967295"),
    ("u64", "0 or more"),
    ("usize", "0 or more"),
    ("i8", "-128 to 127"),
    ("i32", "-2147483648 to 2147483647"),
    ("i64", "a whole number"),
];

/// What serde says about a wrong value or key, in words, with an example of what is right. `list` says where all keys are.
pub fn in_words(message: &str, list: &str) -> String {
    // Of a parameter of a policy, which names it itself.
    if let Some((key, cause)) = message.split_once(": invalid ").filter(|(key, _)| !key.contains(' ')) {
        return format!("{key}: {}", in_words(&format!("invalid {cause}"), list));
    }
    unknown(message, list)
        .or_else(|| wrong_type(message))
        .or_else(|| of_yaml(message))
        .unwrap_or_else(|| message.into())
}

/// A key that is not known: the nearest known ones.
fn unknown(message: &str, list: &str) -> Option<String> {
    let (what, known) = message.split_once(", expected ")?;
    let name = what.strip_prefix("unknown field ")?.trim_matches('`');
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    Some(format!("{what}: {}", suggest(name, known, list)))
}

/// A value of a wrong type.
fn wrong_type(message: &str) -> Option<String> {
    let (what, expected) = message
        .strip_prefix("invalid type: ")
        .or_else(|| message.strip_prefix("invalid value: "))?
        .split_once(", expected ")?;
    // `integer `2``, `floating point `1.5``, `string "x"`, `map`, `unit value`.
    let (kind, value) = what.split_once(' ').unwrap_or((what, ""));
    let value = value.trim_start_matches("point ").trim_matches('`');
    let is_number = matches!(kind, "integer" | "floating");
    let shown = if value.is_empty() { format!("a {kind}") } else { value.to_owned() };
    if kind == "unit" {
        return Some(format!("the value is missing: expected {expected}"));
    }
    Some(match expected {
        "a duration" if is_number => format!("{value} is not a duration: write `{value}s`, or as in `250ms`"),
        "a duration" => format!("{shown} is not a duration: write it as in `2s`, `250ms` or `1m 30s`"),
        "a boolean" => format!("{shown} is neither `true` nor `false`"),
        "f32" | "f64" => format!("{shown} is not a number: write it as in `0.5`"),
        "a string" if is_number => format!("{value} is a number: write it in quotes, `'{value}'`"),
        "a sequence" if value.is_empty() => format!("{shown} is not a list: write `- ` before each entry"),
        "a sequence" => format!("{value} is not a list: write `[{}]`", value.trim_matches('"')),
        _ if expected.starts_with("struct ") => {
            format!("{shown} has no keys: write it as in `{{key: value}}`")
        }
        _ => {
            let (_, bounds) = WHOLE.iter().find(|(name, _)| *name == expected)?;
            match kind {
                "integer" => format!("{value} is out of range: must be {bounds}"),
                _ => format!("{shown} is not a whole number: write digits, without a unit ({bounds})"),
            }
        }
    })
}

/// A text that is no YAML.
fn of_yaml(message: &str) -> Option<String> {
    if message.starts_with("tabs disallowed") {
        return Some("a tab: YAML is indented with spaces".into());
    }
    let key = message.strip_prefix("duplicate mapping key: ")?.split(',').next()?;
    Some(format!("the key `{key}` is there twice: keep one of them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_value_is_told_with_a_right_one() {
        for (message, words) in [
            ("invalid type: integer `2`, expected a duration", "2 is not a duration: write `2s`"),
            ("invalid value: string \"x\", expected a duration", "as in `2s`"),
            ("invalid value: integer `99999`, expected u16", "99999 is out of range: must be 0 to 65535"),
            ("invalid type: string \"64MB\", expected usize", "\"64MB\" is not a whole number"),
            ("invalid type: floating point `1.5`, expected u32", "1.5 is not a whole number"),
            ("invalid type: string \"http://a\", expected a sequence", "write `[http://a]`"),
            ("invalid type: integer `5`, expected a string", "in quotes, `'5'`"),
            ("invalid type: string \"on\", expected a boolean", "neither `true` nor `false`"),
            ("invalid type: unit value, expected u16", "the value is missing"),
            ("factor: invalid type: string \"x\", expected f64", "factor: \"x\" is not a number"),
            ("duplicate mapping key: server, set DuplicateKeyPolicy", "`server` is there twice"),
            ("tabs disallowed within this context (block indentation)", "with spaces"),
            ("unknown field `prot`, expected `host` or `port`", "unknown field `prot`: use `host` or `port`"),
            ("anything else", "anything else"),
        ] {
            let said = in_words(message, "");
            assert!(said.contains(words), "{message}: {said}");
        }
    }
}
