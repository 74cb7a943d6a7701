//! Coding agents: long contexts that grow by tool results, in quick steps, with user input in between.
//!
//! Most answers of an agent are tool calls; the next request appends the result. When the context is full it is
//! compacted: the next prompt is the tools and system prompt again and a summary. Occasionally an agent starts a
//! sub-agent, a separate session with its own tools and system prompt, and continues when that has answered.
//!
//! Defaults are after 676 sessions recorded from Claude Code (callanjfox/kv-cache-tester @94f6046, `traces/`): 44
//! requests in the median session, 148 in the longest tenth; prompts that begin at 23 thousand tokens, 15 of them tools
//! and system prompt; 730 new tokens from request to request in the median, 5,123 in the largest tenth, of which the
//! answer before is a part; 9 s after a tool call, 121 s after other answers; 63 sub-agents in 44,483 requests, of about
//! ten requests each.

use serde::{Deserialize, Serialize};

use super::{
    Arrivals, BLOCK_TOKENS, Draft, SECONDS_MAX, Spread, TOKENS_MAX, TURNS_MAX, a_share, at_least_one,
    next_turn,
};
use crate::trace::TraceRequest;

/// Settings of the agentic workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Versions of the agent, each with its own tools and system prompt, equally likely.
    pub versions: u32,
    /// Tokens of the tools and the system prompt of a version.
    pub head_tokens: Spread,
    /// Tokens of a session's initial text after them.
    pub task_tokens: Spread,
    /// Requests of a session.
    pub turns: Spread,
    /// Tokens of a tool's result, or of user input.
    pub result_tokens: Spread,
    /// Tokens of an answer.
    pub output_tokens: Spread,
    /// Share of answers that are tool calls.
    pub tool_share: f64,
    /// Seconds of a tool call.
    pub tool_s: Spread,
    /// Seconds until user input.
    pub think_s: Spread,
    /// Maximum tokens of prompt and answer together; beyond them the context is compacted.
    pub context_tokens_max: u32,
    /// Tokens of the summary that a context is compacted to.
    pub summary_tokens: Spread,
    /// Share of requests after which a sub-agent is started.
    pub subagent_share: f64,
    /// Tokens of the tools and the system prompt of sub-agents.
    pub subagent_head_tokens: u32,
    /// Tokens of a sub-agent's task.
    pub subagent_task_tokens: Spread,
    /// Requests of a sub-agent.
    pub subagent_turns: Spread,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of sessions.
    pub arrivals: Arrivals,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            versions: 4,
            head_tokens: Spread::fixed(15_213),
            task_tokens: Spread::log_normal(8_000.0, 40_000.0, 150_000.0),
            turns: Spread::log_normal(44.0, 148.0, 561.0),
            result_tokens: Spread::log_normal(500.0, 4_500.0, 60_000.0),
            output_tokens: Spread::log_normal(218.0, 882.0, 8_000.0),
            tool_share: 0.94,
            tool_s: Spread::log_normal(9.0, 77.0, 3_600.0),
            think_s: Spread::log_normal(121.0, 1_592.0, 14_400.0),
            context_tokens_max: 200_000,
            summary_tokens: Spread::log_normal(8_000.0, 20_000.0, 40_000.0),
            subagent_share: 0.0014,
            subagent_head_tokens: 9_041,
            subagent_task_tokens: Spread::log_normal(500.0, 2_000.0, 10_000.0),
            subagent_turns: Spread::log_normal(9.0, 20.0, 60.0),
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

/// Tools and a system prompt: their length, and the first request that begins with them.
#[derive(Clone, Copy)]
struct Head {
    tokens: u32,
    first: Option<u32>,
}

/// State of a session.
#[derive(Clone, Copy)]
struct Agent {
    session: u32,
    /// Index of its head among all heads.
    head: usize,
    turns: u32,
}

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        at_least_one("versions", self.versions)?;
        at_least_one("context_tokens_max", self.context_tokens_max)?;
        a_share("tool_share", self.tool_share)?;
        a_share("subagent_share", self.subagent_share)?;
        if self.versions > VERSIONS_MAX {
            return Err(format!("versions is {}: must be at most {VERSIONS_MAX}", self.versions));
        }
        let subagent_head_tokens = Spread::fixed(self.subagent_head_tokens);
        for (setting, spread, least) in [
            ("head_tokens", &self.head_tokens, 0.0),
            ("subagent_head_tokens", &subagent_head_tokens, 0.0),
            ("task_tokens", &self.task_tokens, 1.0),
            ("result_tokens", &self.result_tokens, 1.0),
            ("output_tokens", &self.output_tokens, 1.0),
            ("summary_tokens", &self.summary_tokens, 1.0),
            ("subagent_task_tokens", &self.subagent_task_tokens, 1.0),
        ] {
            spread.check(setting, least, TOKENS_MAX)?;
        }
        self.turns.check("turns", 1.0, TURNS_MAX)?;
        self.subagent_turns.check("subagent_turns", 1.0, TURNS_MAX)?;
        self.tool_s.check("tool_s", 0.0, SECONDS_MAX)?;
        self.think_s.check("think_s", 0.0, SECONDS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        let mut heads: Vec<Head> = Vec::new();
        for _ in 0..self.versions {
            heads.push(Head { tokens: self.head_tokens.tokens(&mut draft.rng, 0), first: None });
        }
        heads.push(Head { tokens: self.subagent_head_tokens, first: None });
        let mut sessions = 0;
        for arrival_s in draft.starts.clone() {
            let turns = self.turns.tokens(&mut draft.rng, 1);
            let head = draft.rng.below(self.versions as usize);
            let agent = Agent { session: sessions, head, turns };
            sessions += 1;
            let mut request = self.first(draft, &heads, agent, self.task_tokens);
            request.arrival_s = arrival_s;
            let Some(_) = self.run(draft, &mut heads, agent, request, &mut sessions) else { return };
        }
    }

    /// A session's first request, or the one after its context was compacted: its head, and `rest` more.
    fn first(&self, draft: &mut Draft, heads: &[Head], agent: Agent, rest: Spread) -> TraceRequest {
        let Head { tokens, first } = heads[agent.head];
        TraceRequest {
            input_tokens: tokens + rest.tokens(&mut draft.rng, 1),
            output_tokens: self.output_tokens.tokens(&mut draft.rng, 1),
            session: agent.session,
            base: first,
            shared_blocks: tokens / self.block_tokens,
            ..TraceRequest::default()
        }
    }

    /// Adds an agent's requests from its first one on, and those of its sub-agents. Returns its last request.
    fn run(
        &self,
        draft: &mut Draft,
        heads: &mut [Head],
        agent: Agent,
        first: TraceRequest,
        sessions: &mut u32,
    ) -> Option<u32> {
        let is_subagent = agent.head == self.versions as usize;
        let mut request = first;
        for turn in 1.. {
            let index = draft.push(request)?;
            let head = &mut heads[agent.head].first;
            *head = head.or(Some(index));
            if turn == agent.turns {
                return Some(index);
            }
            let mut after = (index, request);
            if !is_subagent && draft.rng.unit() < self.subagent_share {
                let turns = self.subagent_turns.tokens(&mut draft.rng, 1);
                let subagent = Agent { session: *sessions, head: self.versions as usize, turns };
                *sessions += 1;
                let mut task = self.first(draft, heads, subagent, self.subagent_task_tokens);
                super::follow(&mut task, request, index, 0.0);
                let last = self.run(draft, heads, subagent, task, sessions)?;
                after = (last, draft.builder.requests()[last as usize]);
            }
            let calls_tool = is_subagent || draft.rng.unit() < self.tool_share;
            let pause_s = if calls_tool { self.tool_s } else { self.think_s }.draw(&mut draft.rng);
            let result_tokens = self.result_tokens.tokens(&mut draft.rng, 1);
            let output_tokens = self.output_tokens.tokens(&mut draft.rng, 1);
            let mut next =
                next_turn(request, index, result_tokens, output_tokens, pause_s, self.block_tokens);
            if next.input_tokens + next.output_tokens > self.context_tokens_max {
                next = self.first(draft, heads, agent, self.summary_tokens);
            }
            super::follow(&mut next, after.1, after.0, pause_s);
            request = next;
        }
        None
    }
}

/// Most versions of the agent.
const VERSIONS_MAX: u32 = 100_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Workload, generate};
    use crate::trace::Trace;

    fn agents(config: Config) -> Trace {
        let arrivals = Arrivals::Poisson { rate: 1e-6, count: Some(2), seconds: None };
        let fixed = Config {
            versions: 1,
            head_tokens: Spread::fixed(160),
            task_tokens: Spread::fixed(16),
            turns: Spread::fixed(3),
            result_tokens: Spread::fixed(40),
            output_tokens: Spread::fixed(8),
            subagent_share: 0.0,
            subagent_head_tokens: 32,
            subagent_task_tokens: Spread::fixed(16),
            subagent_turns: Spread::fixed(2),
            arrivals,
            ..config
        };
        generate(&Workload::Agentic(fixed), 1).unwrap()
    }

    fn rows(trace: &Trace) -> Vec<(u32, u32, Option<u32>, u32)> {
        trace.requests.iter().map(|r| (r.session, r.input_tokens, r.after, r.shared_blocks)).collect()
    }

    #[test]
    fn a_context_grows_by_answer_and_result_and_versions_share_their_head() {
        let trace = agents(Config::default());
        let expected = [
            (0, 176, None, 0),
            (0, 224, Some(0), 11),
            (0, 272, Some(1), 14),
            (1, 176, None, 10),
            (1, 224, Some(3), 11),
            (1, 272, Some(4), 14),
        ];
        assert_eq!(rows(&trace), expected);
    }

    #[test]
    fn a_full_context_begins_again_with_the_head_and_a_summary() {
        let trace = agents(Config {
            context_tokens_max: 230,
            summary_tokens: Spread::fixed(20),
            ..Config::default()
        });
        assert_eq!(rows(&trace)[1], (0, 180, Some(0), 10));
        assert_eq!(trace.requests[1].base, Some(0));
    }

    #[test]
    fn an_agent_goes_on_when_its_sub_agent_has_answered() {
        let config = Config {
            versions: 1,
            turns: Spread::fixed(2),
            subagent_share: 1.0,
            subagent_turns: Spread::fixed(2),
            arrivals: Arrivals::Closed { count: 1 },
            ..Config::default()
        };
        let trace = generate(&Workload::Agentic(config), 1).unwrap();
        let order: Vec<_> = trace.requests.iter().map(|r| (r.session, r.after)).collect();
        assert_eq!(order, [(0, None), (1, Some(0)), (1, Some(1)), (0, Some(2))]);
        assert_eq!(trace.requests[3].base, Some(0), "its prompt goes on from its own last one");
    }
}
