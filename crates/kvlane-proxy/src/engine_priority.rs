//! Priorities in the words of engines: what becomes of the member `priority` of a body.

use bytes::Bytes;
use kvlane_core::setting;
use kvlane_wire::api::Api;
use kvlane_wire::edit::with_priority;
use kvlane_wire::openai::ParseError;
use serde::{Deserialize, Serialize};

/// How engines are told priorities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnginePriority {
    /// Not at all: the member passes through unchanged.
    #[default]
    None,
    /// As numbers of which the lowest is first: vLLM with `--scheduling-policy priority`.
    LowestFirst,
    /// As numbers of which the highest is first: SGLang with `--enable-priority-scheduling`.
    HighestFirst,
}

setting!(Text: EnginePriority);

// === impl EnginePriority ===

impl EnginePriority {
    /// The number for an engine; `None` if engines are told nothing.
    pub(crate) fn told(self, priority: i8) -> Option<i32> {
        match self {
            Self::None => None,
            Self::LowestFirst => Some(-i32::from(priority)),
            Self::HighestFirst => Some(priority.into()),
        }
    }
}

/// Whether engines take a `priority` in bodies of this API.
pub(crate) fn takes_priority(api: Api) -> bool {
    matches!(api, Api::ChatCompletions | Api::Completions | Api::Responses | Api::Generate)
}

/// A body with this priority, and no other.
///
/// # Errors
/// The body is no JSON object. It was parsed before, so this does not happen.
pub(crate) fn ranked(body: &[u8], priority: i32) -> Result<Bytes, ParseError> {
    let text = std::str::from_utf8(body).map_err(|error| ParseError::NotUtf8 { at: error.valid_up_to() })?;
    Ok(with_priority(text, priority).map_err(ParseError::from)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_told_the_priority_in_its_own_order_and_no_other() {
        for (engine, expect) in [(EnginePriority::LowestFirst, "-50"), (EnginePriority::HighestFirst, "50")] {
            let told = engine.told(50).expect("told");
            let body =
                ranked(br#"{"prompt":"p","priority":-1000,"pr\u0069ority":7}"#, told).expect("an object");
            assert_eq!(body, format!(r#"{{"priority":{expect},"prompt":"p"}}"#));
        }
        assert_eq!(EnginePriority::None.told(50), None);
    }
}
