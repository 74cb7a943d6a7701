//! Conversations: every turn's prompt is the previous one, its answer and a new question.
//!
//! Defaults are after the conversation trace of Mooncake (FAST'25): answers, growth of a prompt from turn to turn,
//! time between turns. Conversations end when their turns are over or the context is full.

use serde::{Deserialize, Serialize};

use super::{Arrivals, BLOCK_TOKENS, Draft, SECONDS_MAX, Spread, TOKENS_MAX, TURNS_MAX, at_least_one};
use crate::trace::TraceRequest;

/// Settings of the chat workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Turns of a conversation.
    pub turns: Spread,
    /// Different system prompts, each as likely as the others; 0 for none.
    pub system_prompts: u32,
    /// Tokens of a system prompt.
    pub system_prompt_tokens: Spread,
    /// Tokens of a question.
    pub question_tokens: Spread,
    /// Tokens of an answer.
    pub output_tokens: Spread,
    /// Seconds from an answer's end to the next question.
    pub think_s: Spread,
    /// Most tokens of prompt and answer together.
    pub context_tokens_max: u32,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of conversations.
    pub arrivals: Arrivals,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            turns: Spread::log_normal(3.0, 10.0, 50.0),
            system_prompts: 10,
            system_prompt_tokens: Spread::fixed(512),
            question_tokens: Spread::log_normal(120.0, 4000.0, 60_000.0),
            output_tokens: Spread::log_normal(350.0, 600.0, 2000.0),
            think_s: Spread::log_normal(100.0, 450.0, 3600.0),
            context_tokens_max: 131_072,
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        at_least_one("context_tokens_max", self.context_tokens_max)?;
        self.turns.check("turns", 1.0, TURNS_MAX)?;
        self.system_prompt_tokens.check("system_prompt_tokens", 0.0, TOKENS_MAX)?;
        self.question_tokens.check("question_tokens", 1.0, TOKENS_MAX)?;
        self.output_tokens.check("output_tokens", 1.0, TOKENS_MAX)?;
        self.think_s.check("think_s", 0.0, SECONDS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        // The length of each system prompt and the first request that has it.
        let mut systems: Vec<(u32, Option<u32>)> = (0..self.system_prompts)
            .map(|_| (self.system_prompt_tokens.tokens(&mut draft.rng, 0), None))
            .collect();
        for (session, arrival_s) in (0..).zip(draft.starts.clone()) {
            let system = draft.rng.below(systems.len());
            let (system_tokens, first) = systems.get(system).copied().unwrap_or_default();
            let turns = self.turns.tokens(&mut draft.rng, 1);
            let mut request = TraceRequest {
                arrival_s,
                input_tokens: system_tokens + self.question_tokens.tokens(&mut draft.rng, 1),
                output_tokens: self.output_tokens.tokens(&mut draft.rng, 1),
                session,
                base: first,
                shared_blocks: system_tokens / self.block_tokens,
                ..TraceRequest::default()
            };
            for turn in 0..turns {
                let Some(index) = draft.push(request) else { return };
                if let Some((_, first)) = systems.get_mut(system).filter(|_| turn == 0) {
                    *first = first.or(Some(index));
                }
                let question_tokens = self.question_tokens.tokens(&mut draft.rng, 1);
                let output_tokens = self.output_tokens.tokens(&mut draft.rng, 1);
                let think_s = self.think_s.draw(&mut draft.rng);
                request = super::next_turn(
                    request,
                    index,
                    question_tokens,
                    output_tokens,
                    think_s,
                    self.block_tokens,
                );
                if request.input_tokens + request.output_tokens > self.context_tokens_max {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Workload, generate};

    #[test]
    fn a_turn_begins_with_prompt_and_answer_of_the_one_before() {
        let config = Config {
            turns: Spread::fixed(3),
            system_prompts: 1,
            system_prompt_tokens: Spread::fixed(64),
            question_tokens: Spread::fixed(20),
            output_tokens: Spread::fixed(50),
            think_s: Spread::fixed(10),
            arrivals: Arrivals::Poisson { rate: 1e-6, count: Some(2), seconds: None },
            ..Config::default()
        };
        let trace = generate(&Workload::Chat(config.clone()), 1).unwrap();
        let rows: Vec<_> = trace
            .requests
            .iter()
            .map(|r| (r.session, r.input_tokens, r.after, r.base, r.shared_blocks))
            .collect();
        let first = [(0, 84, None, None, 0), (0, 154, Some(0), Some(0), 8), (0, 224, Some(1), Some(1), 12)];
        assert_eq!(rows[..3], first, "134 tokens fill 8 blocks, 204 fill 12");
        assert_eq!(rows[3], (1, 84, None, Some(0), 4), "the system prompt is shared");
        assert_eq!(trace.requests[1].think_s, Some(10.0));
        assert_eq!(
            trace.requests[1].arrival_s - trace.requests[0].arrival_s,
            11.0,
            "50 tokens at 50 a second"
        );
        let short = Config { context_tokens_max: 210, ..config };
        assert_eq!(generate(&Workload::Chat(short), 1).unwrap().requests.len(), 4, "a full context ends it");
    }
}
