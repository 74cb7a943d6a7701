//! Groups of prompts that begin with the group's system prompt.
//!
//! All prompts are generated first and shuffled once; requests use them in that order, repeatedly. So a prompt is
//! repeated after all others, and then its question is cached too. This is the workload of llm-d's
//! precise-prefix-cache guide (llm-d @d73b625, `guides/precise-prefix-cache-routing/benchmark-templates`,
//! inference-perf's `shared_prefix`, whose settings are the defaults here) and of SGLang's `bench_serving
//! --dataset-name generated-shared-prefix`, which sends every prompt once.

use serde::{Deserialize, Serialize};

use super::{Arrivals, BLOCK_TOKENS, Draft, Spread, TOKENS_MAX, at_least_one};
use crate::trace::TraceRequest;

/// Settings of the shared-prefix workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Groups, each with its own system prompt.
    #[serde(alias = "num_groups")]
    pub groups: u32,
    /// Prompts of each group.
    #[serde(alias = "num_prompts_per_group")]
    pub prompts_per_group: u32,
    /// Tokens of a system prompt.
    #[serde(alias = "system_prompt_len")]
    pub system_prompt_tokens: Spread,
    /// Tokens of a question.
    #[serde(alias = "question_len")]
    pub question_tokens: Spread,
    /// Tokens of an answer.
    #[serde(alias = "output_len")]
    pub output_tokens: Spread,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of the requests.
    pub arrivals: Arrivals,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            groups: 150,
            prompts_per_group: 5,
            system_prompt_tokens: Spread::fixed(6000),
            question_tokens: Spread::fixed(1200),
            output_tokens: Spread::fixed(1000),
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

/// Most prompts.
const PROMPTS_MAX: u64 = 10_000_000;

#[derive(Clone, Copy)]
struct Prompt {
    group: u32,
    tokens: u32,
    /// The first request that has it.
    first: Option<u32>,
}

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        at_least_one("groups", self.groups)?;
        at_least_one("prompts_per_group", self.prompts_per_group)?;
        let prompts = u64::from(self.groups) * u64::from(self.prompts_per_group);
        if prompts > PROMPTS_MAX {
            return Err(format!(
                "groups times prompts_per_group is {prompts}: must be at most {PROMPTS_MAX}"
            ));
        }
        self.system_prompt_tokens.check("system_prompt_tokens", 0.0, TOKENS_MAX)?;
        self.question_tokens.check("question_tokens", 1.0, TOKENS_MAX)?;
        self.output_tokens.check("output_tokens", 1.0, TOKENS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        let rng = &mut draft.rng;
        let mut groups: Vec<(u32, Option<u32>)> =
            (0..self.groups).map(|_| (self.system_prompt_tokens.tokens(rng, 0), None)).collect();
        let mut prompts = Vec::new();
        for (group, &(system_tokens, _)) in (0..).zip(&groups) {
            for _ in 0..self.prompts_per_group {
                let tokens = system_tokens + self.question_tokens.tokens(rng, 1);
                prompts.push(Prompt { group, tokens, first: None });
            }
        }
        for last in (1..prompts.len()).rev() {
            prompts.swap(last, rng.below(last + 1));
        }
        for (session, &arrival_s) in (0..).zip(&draft.starts.clone()) {
            let place = session as usize % prompts.len();
            let prompt = &mut prompts[place];
            let (system_tokens, group_first) = &mut groups[prompt.group as usize];
            // The same prompt is equal to its last token; a group shares the blocks that its system prompt fills.
            let (base, shared_blocks) = match prompt.first {
                first @ Some(_) => (first, u32::MAX),
                None => (*group_first, *system_tokens / self.block_tokens),
            };
            let request = TraceRequest {
                arrival_s,
                input_tokens: prompt.tokens,
                output_tokens: self.output_tokens.tokens(&mut draft.rng, 1),
                session,
                base,
                shared_blocks,
                ..TraceRequest::default()
            };
            let Some(index) = draft.push(request) else { return };
            prompt.first = prompt.first.or(Some(index));
            *group_first = group_first.or(Some(index));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Workload, generate};

    #[test]
    fn a_group_shares_its_system_prompt_and_a_prompt_that_comes_again_all_of_itself() {
        let config = Config {
            groups: 3,
            prompts_per_group: 2,
            system_prompt_tokens: Spread::fixed(100),
            question_tokens: Spread::fixed(30),
            arrivals: Arrivals::Closed { count: 15 },
            ..Config::default()
        };
        let trace = generate(&Workload::SharedPrefix(config), 4).unwrap();
        let shared: Vec<u32> = (0..15).map(|index| trace.reusable_blocks(index)).collect();
        assert_eq!(shared[..6].iter().filter(|&&blocks| blocks == 0).count(), 3, "the first of each group");
        assert_eq!(
            shared[..6].iter().filter(|&&blocks| blocks == 6).count(),
            3,
            "100 tokens fill 6 blocks of 16"
        );
        assert_eq!(shared[6..], [8; 9], "130 tokens fill 8");
        for again in 6..12 {
            let (mut first, mut second) = (Vec::new(), Vec::new());
            trace.blocks(again - 6, &mut first);
            trace.blocks(again, &mut second);
            assert_eq!(first, second, "prompts come again in the same order");
        }
        assert!(
            trace.requests.iter().all(|request| request.input_tokens == 130 && request.output_tokens == 1000)
        );
    }
}
