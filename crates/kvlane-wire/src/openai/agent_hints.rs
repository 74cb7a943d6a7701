//! Dynamo's `nvext.agent_hints`: what an agent says about its request.

use crate::json::{JsonError, Kind, Scanner};

/// What an agent says about its request. Values of other types than Dynamo's are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentHints {
    /// `osl`: the expected output tokens.
    pub output_tokens: Option<u32>,
    /// `priority`: higher is sooner.
    pub priority: Option<i32>,
}

// === impl AgentHints ===

impl AgentHints {
    /// The hints in the value of `nvext`, which is next in `scanner`.
    pub(super) fn read(scanner: &mut Scanner<'_>) -> Result<Self, JsonError> {
        let mut hints = Self::default();
        if scanner.peek()? != Kind::Object {
            scanner.skip()?;
            return Ok(hints);
        }
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            if key.decode() == "agent_hints" && scanner.peek()? == Kind::Object {
                hints = Self::read_own(scanner)?;
            } else {
                scanner.skip()?;
            }
        }
        Ok(hints)
    }

    fn read_own(scanner: &mut Scanner<'_>) -> Result<Self, JsonError> {
        let mut hints = Self::default();
        let mut walk = scanner.object()?;
        while let Some(key) = walk.key(scanner)? {
            let value = scanner.skip()?;
            match &*key.decode() {
                "osl" => hints.output_tokens = value.parse().ok(),
                "priority" => hints.priority = value.parse().ok(),
                _ => {}
            }
        }
        Ok(hints)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_of_an_agent_are_read_and_useless_ones_ignored() {
        for (nvext, output_tokens, priority) in [
            (
                r#"{"agent_hints":{"osl":1024,"priority":-5,"speculative_prefill":true}}"#,
                Some(1024),
                Some(-5),
            ),
            (r#"{"use_raw_prompt":true,"agent_hints":{"priority":7}}"#, None, Some(7)),
            (r#"{"agent_hints":{"osl":-1,"priority":"high"}}"#, None, None),
            (r#"{"agent_hints":{"osl":1.5,"priority":99999999999}}"#, None, None),
            (r#"{"agent_hints":[1]}"#, None, None),
            (r#"{"osl":1}"#, None, None),
            (r#""x""#, None, None),
            ("null", None, None),
        ] {
            let hints = AgentHints::read(&mut Scanner::new(nvext)).expect(nvext);
            assert_eq!(hints, AgentHints { output_tokens, priority }, "{nvext}");
        }
    }
}
