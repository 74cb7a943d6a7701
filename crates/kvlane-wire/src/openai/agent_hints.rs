//! Dynamo's `nvext.agent_hints`: what an agent says about its request.

use super::{ParseError, Reader};
use crate::json::{JsonError, Kind};

/// What an agent says about its request. Values of other types than Dynamo's are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentHints {
    /// `osl`: the expected output tokens.
    pub output_tokens: Option<u32>,
    /// `priority`: higher is sooner.
    pub priority: Option<i32>,
}

impl Reader<'_, '_> {
    /// The hints in the value of `nvext`.
    pub(super) fn agent_hints(&mut self) -> Result<AgentHints, ParseError> {
        let mut hints = AgentHints::default();
        if self.scanner.peek()? != Kind::Object {
            self.scanner.skip()?;
            return Ok(hints);
        }
        let mut walk = self.scanner.object()?;
        while let Some(key) = walk.key(&mut self.scanner)? {
            if key.decode() == "agent_hints" && self.scanner.peek()? == Kind::Object {
                hints = self.hints_of_agent()?;
            } else {
                self.scanner.skip()?;
            }
        }
        Ok(hints)
    }

    fn hints_of_agent(&mut self) -> Result<AgentHints, ParseError> {
        let mut hints = AgentHints::default();
        let mut walk = self.scanner.object()?;
        while let Some(key) = walk.key(&mut self.scanner)? {
            match &*key.decode() {
                "osl" => hints.output_tokens = self.whole_number()?,
                "priority" => hints.priority = self.whole_number()?,
                _ => _ = self.scanner.skip()?,
            }
        }
        Ok(hints)
    }

    /// A number of this type, or nothing for any other value.
    fn whole_number<N: std::str::FromStr>(&mut self) -> Result<Option<N>, JsonError> {
        Ok(self.scanner.skip()?.parse().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Api;
    use crate::openai::parse;

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
            let body = format!(r#"{{"prompt":"p","nvext":{nvext}}}"#);
            let parsed = parse(Api::Completions, body.as_bytes(), &mut Vec::new()).expect(&body);
            assert_eq!(parsed.agent_hints, AgentHints { output_tokens, priority }, "{body}");
        }
    }
}
