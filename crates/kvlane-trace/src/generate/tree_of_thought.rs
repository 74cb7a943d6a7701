//! Problems with several thoughts explored in parallel.
//!
//! A problem is sent `branches` times with one and the same prompt. Of the returned thoughts `keep` are followed:
//! each is appended to its prompt, with an instruction, and that is sent `branches` times again, down to `depth`
//! levels. So a level's prompts share all but their last thought, and those of one thought everything. A request is
//! sent when the thought it follows has arrived.

use serde::{Deserialize, Serialize};

use super::{Arrivals, BLOCK_TOKENS, Draft, SECONDS_MAX, Spread, TOKENS_MAX, at_least_one, next_turn};
use crate::trace::TraceRequest;

/// Settings of the tree-of-thought workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Thoughts requested at each point.
    pub branches: u32,
    /// Thoughts of a level that are followed.
    pub keep: u32,
    /// Levels.
    pub depth: u32,
    /// Tokens of the examples with which all problems begin.
    pub examples_tokens: u32,
    /// Tokens of a problem.
    pub problem_tokens: Spread,
    /// Tokens of a thought.
    pub thought_tokens: Spread,
    /// Tokens of the instruction after a thought.
    pub instruction_tokens: Spread,
    /// Seconds from a thought to the requests that follow it.
    pub think_s: Spread,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of problems.
    pub arrivals: Arrivals,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            branches: 3,
            keep: 2,
            depth: 4,
            examples_tokens: 1000,
            problem_tokens: Spread::uniform(100.0, 500.0),
            thought_tokens: Spread::log_normal(150.0, 300.0, 1000.0),
            instruction_tokens: Spread::fixed(50),
            think_s: Spread::fixed(0),
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

/// Most branches, thoughts to follow and levels.
const BRANCHES_MAX: u32 = 1000;

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        for (setting, value) in [("branches", self.branches), ("keep", self.keep), ("depth", self.depth)] {
            at_least_one(setting, value)?;
            if value > BRANCHES_MAX {
                return Err(format!("{setting} is {value}: must be at most {BRANCHES_MAX}"));
            }
        }
        Spread::fixed(self.examples_tokens).check("examples_tokens", 0.0, TOKENS_MAX)?;
        self.problem_tokens.check("problem_tokens", 1.0, TOKENS_MAX)?;
        self.thought_tokens.check("thought_tokens", 1.0, TOKENS_MAX / f64::from(BRANCHES_MAX))?;
        self.instruction_tokens.check("instruction_tokens", 1.0, TOKENS_MAX / f64::from(BRANCHES_MAX))?;
        self.think_s.check("think_s", 0.0, SECONDS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        let mut examples = None;
        for (session, arrival_s) in (0..).zip(draft.starts.clone()) {
            let root = TraceRequest {
                arrival_s,
                input_tokens: self.examples_tokens + self.problem_tokens.tokens(&mut draft.rng, 1),
                session,
                base: examples,
                shared_blocks: self.examples_tokens / self.block_tokens,
                ..TraceRequest::default()
            };
            let mut prompts = vec![root];
            for _ in 0..self.depth {
                let mut thoughts = Vec::new();
                for &prompt in &prompts {
                    let mut request = prompt;
                    for branch in 0..self.branches {
                        request.output_tokens = self.thought_tokens.tokens(&mut draft.rng, 1);
                        let Some(index) = draft.push(request) else { return };
                        thoughts.push((index, request));
                        if branch == 0 {
                            // The others have the same prompt to the last token.
                            (request.base, request.shared_blocks) = (Some(index), u32::MAX);
                        }
                    }
                }
                examples = examples.or(Some(thoughts[0].0));
                for last in (1..thoughts.len()).rev() {
                    thoughts.swap(last, draft.rng.below(last + 1));
                }
                thoughts.truncate(self.keep as usize);
                let follow = |&(index, thought): &(u32, TraceRequest)| {
                    let instruction_tokens = self.instruction_tokens.tokens(&mut draft.rng, 1);
                    let think_s = self.think_s.draw(&mut draft.rng);
                    next_turn(thought, index, instruction_tokens, 0, think_s, self.block_tokens)
                };
                prompts = thoughts.iter().map(follow).collect();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Workload, generate};

    #[test]
    fn thoughts_of_one_place_share_their_prompt_and_what_follows_them_their_answer() {
        let config = Config {
            branches: 2,
            keep: 1,
            depth: 2,
            examples_tokens: 32,
            problem_tokens: Spread::fixed(16),
            thought_tokens: Spread::fixed(32),
            instruction_tokens: Spread::fixed(5),
            arrivals: Arrivals::Poisson { rate: 1e-3, count: Some(2), seconds: None },
            ..Config::default()
        };
        let trace = generate(&Workload::TreeOfThought(config), 1).unwrap();
        let rows: Vec<_> =
            trace.requests.iter().map(|r| (r.session, r.input_tokens, r.shared_blocks)).collect();
        let tree = [(48, 0), (48, 3), (85, 5), (85, 6)];
        assert_eq!(rows[..4], tree.map(|(tokens, shared)| (0, tokens, shared)), "80 tokens fill 5 blocks");
        assert_eq!(rows[4], (1, 48, 2), "problems share the examples");
        let kept = trace.requests[2].after.expect("it follows a thought");
        assert_eq!(trace.requests[3].after, Some(kept));
        assert!(kept < 2);
    }
}
