//! Questions about documents: an instruction, some documents, a question. A few documents are popular.
//!
//! Documents of a prompt are in the order in which they were drawn, so two prompts share the instruction and their
//! common leading documents.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Arrivals, BLOCK_TOKENS, Draft, Spread, TOKENS_MAX, at_least_one};
use crate::trace::TraceRequest;
use crate::zipf::Zipf;

/// Settings of the retrieval workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Documents in all.
    pub documents: u32,
    /// Zipf's exponent: document number `n` is drawn in proportion to `1 / n^skew`. 0 makes all equally likely.
    pub skew: f64,
    /// Documents of a prompt; a document may occur twice.
    pub documents_per_prompt: u32,
    /// Tokens of a document.
    pub document_tokens: Spread,
    /// Tokens of the instruction with which all prompts begin.
    pub instruction_tokens: u32,
    /// Tokens of a question.
    pub question_tokens: Spread,
    /// Tokens of an answer.
    pub output_tokens: Spread,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of the requests.
    pub arrivals: Arrivals,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            documents: 1000,
            skew: 1.0,
            documents_per_prompt: 2,
            document_tokens: Spread::log_normal(3000.0, 8000.0, 30_000.0),
            instruction_tokens: 300,
            question_tokens: Spread::uniform(20.0, 200.0),
            output_tokens: Spread::log_normal(150.0, 400.0, 1500.0),
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

/// Most documents.
const DOCUMENTS_MAX: u32 = 10_000_000;

/// Most documents of a prompt.
const PER_PROMPT_MAX: u32 = 100;

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        at_least_one("documents", self.documents)?;
        if self.documents > DOCUMENTS_MAX {
            return Err(format!("documents is {}: must be at most {DOCUMENTS_MAX}", self.documents));
        }
        if self.documents_per_prompt > PER_PROMPT_MAX {
            return Err(format!(
                "documents_per_prompt is {}: must be at most {PER_PROMPT_MAX}",
                self.documents_per_prompt
            ));
        }
        if !(0.0..=10.0).contains(&self.skew) {
            return Err(format!("skew is {}: must be 0 to 10", self.skew));
        }
        self.document_tokens.check("document_tokens", 1.0, TOKENS_MAX / f64::from(PER_PROMPT_MAX))?;
        Spread::fixed(self.instruction_tokens).check("instruction_tokens", 0.0, TOKENS_MAX)?;
        self.question_tokens.check("question_tokens", 1.0, TOKENS_MAX)?;
        self.output_tokens.check("output_tokens", 1.0, TOKENS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        let lengths: Vec<u32> =
            (0..self.documents).map(|_| self.document_tokens.tokens(&mut draft.rng, 1)).collect();
        let zipf = Zipf::new(self.documents, self.skew);
        // The first request whose prompt begins with these documents.
        let mut firsts: HashMap<Vec<u32>, u32> = HashMap::new();
        for (session, arrival_s) in (0..).zip(draft.starts.clone()) {
            let documents: Vec<u32> =
                (0..self.documents_per_prompt).map(|_| zipf.draw(&mut draft.rng)).collect();
            let (mut base, mut shared_tokens, mut tokens) = (None, 0, self.instruction_tokens);
            for known in 0..=documents.len() {
                tokens += known.checked_sub(1).map_or(0, |last| lengths[documents[last] as usize]);
                if let Some(&first) = firsts.get(&documents[..known]) {
                    (base, shared_tokens) = (Some(first), tokens);
                }
            }
            let request = TraceRequest {
                arrival_s,
                input_tokens: tokens + self.question_tokens.tokens(&mut draft.rng, 1),
                output_tokens: self.output_tokens.tokens(&mut draft.rng, 1),
                session,
                base,
                shared_blocks: shared_tokens / self.block_tokens,
                ..TraceRequest::default()
            };
            let Some(index) = draft.push(request) else { return };
            for known in 0..=documents.len() {
                firsts.entry(documents[..known].to_vec()).or_insert(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::rng::Rng;

    use super::*;
    use crate::generate::{Workload, generate};

    #[test]
    fn prompts_share_the_documents_with_which_both_begin() {
        let config = Config {
            documents: 2,
            document_tokens: Spread::fixed(160),
            instruction_tokens: 32,
            question_tokens: Spread::fixed(10),
            arrivals: Arrivals::Closed { count: 40 },
            ..Config::default()
        };
        let trace = generate(&Workload::Rag(config), 2).unwrap();
        let mut shared: Vec<u32> = trace.requests.iter().map(|request| request.shared_blocks).collect();
        assert_eq!(shared[0], 0);
        shared.sort_unstable();
        // Four orders of two documents: one comes first of all, one shares the instruction, two share a document too.
        assert_eq!(shared[..4], [0, 2, 12, 12]);
        assert_eq!(shared[4..], [22; 36]);
        assert!(trace.requests.iter().all(|request| request.input_tokens == 362));
    }

    #[test]
    fn documents_are_asked_about_as_often_as_zipf_says() {
        let zipf = Zipf::new(100, 1.0);
        let mut rng = Rng::new(1);
        let mut counts = [0u32; 100];
        (0..50_000).for_each(|_| counts[zipf.draw(&mut rng) as usize] += 1);
        let ratio = f64::from(counts[0]) / f64::from(counts[9]);
        assert!((8.0..12.5).contains(&ratio), "{ratio}");
        let flat = Zipf::new(4, 0.0);
        let mut seen = [0; 4];
        (0..4000).for_each(|_| seen[flat.draw(&mut rng) as usize] += 1);
        assert!(seen.iter().all(|&n| n > 800), "{seen:?}");
    }
}
