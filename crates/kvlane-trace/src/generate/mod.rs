//! Generated workloads, one file for each kind.
//!
//! Contents and times of requests are independent. A kind of workload defines contents: lengths, shared prefixes,
//! dependencies. [`Arrivals`] define times and numbers. The same seed gives the same requests for any arrivals, and
//! the first hundred of a thousand are those of a hundred, so changing the load does not change the workload.
//! Closed-loop clients ignore the arrivals.

use kvlane_core::rng::Rng;
use serde::{Deserialize, Serialize};

use crate::format::REQUESTS_MAX;
use crate::trace::{Builder, Trace, TraceRequest};

pub mod agentic;
mod arrivals;
pub mod chat;
pub mod mixed;
pub mod rag;
pub mod shared_prefix;
mod spread;
pub mod tree_of_thought;
pub mod unshared;

pub(crate) use arrivals::exponential;
pub use arrivals::{Arrivals, Stage};
pub use spread::Spread;

/// Declares the kinds: the module, the variant of [`Workload`], the kind's name in files.
macro_rules! workloads {
    ($($module:ident $variant:ident $name:literal $doc:literal;)*) => {
        /// A workload: its kind with all its settings. In files the kind is the key `kind`.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum Workload {
            $(#[doc = $doc] #[serde(rename = $name)] $variant($module::Config),)*
        }

        impl Workload {
            /// The names of all kinds.
            pub const KINDS: &[&str] = &[$($name),*];

            /// A kind with its default settings.
            pub fn by_kind(kind: &str) -> Option<Self> {
                match kind {
                    $($name => Some(Self::$variant(Default::default())),)*
                    _ => None,
                }
            }

            /// Its kind's name.
            pub fn kind(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }

            /// Times and number.
            pub fn arrivals(&self) -> &Arrivals {
                match self {
                    $(Self::$variant(config) => &config.arrivals,)*
                }
            }

            /// The same requests at other times.
            pub fn set_arrivals(&mut self, arrivals: Arrivals) {
                match self {
                    $(Self::$variant(config) => config.arrivals = arrivals,)*
                }
            }

            /// Tokens of a block of the trace.
            pub fn block_tokens(&self) -> u32 {
                match self {
                    $(Self::$variant(config) => config.block_tokens,)*
                }
            }

            /// Validates its settings; returns the error.
            fn check(&self) -> Result<(), String> {
                match self {
                    $(Self::$variant(config) => config.check(),)*
                }
            }

            fn fill(&self, draft: &mut Draft) {
                match self {
                    $(Self::$variant(config) => config.fill(draft),)*
                }
            }
        }
    };
}

workloads! {
    chat Chat "chat" "Conversations of several turns, with think times and shared system prompts.";
    shared_prefix SharedPrefix "shared-prefix" "Groups of prompts that begin with the group's system prompt.";
    rag Rag "rag" "Questions about documents, a few of which are popular.";
    agentic Agentic "agentic" "Coding agents with tool calls, sub-agents and long contexts that grow.";
    mixed Mixed "mixed" "Short and long prompts without shared prefixes.";
    tree_of_thought TreeOfThought "tree-of-thought" "Problems with several thoughts explored in parallel.";
    unshared Unshared "unshared" "Prompts without shared prefixes.";
}

/// A workload with invalid settings.
#[derive(Debug, thiserror::Error)]
#[error("workload {kind}: {why}")]
pub struct WorkloadError {
    /// Its kind.
    pub kind: &'static str,
    /// The setting, the error, and the valid values.
    pub why: String,
}

/// A trace under construction.
struct Draft {
    builder: Builder,
    rng: Rng,
    /// Start of each request, or each session.
    starts: Vec<f64>,
    /// Whether it exceeds the maximum length of a trace.
    full: bool,
}

/// Tokens per second assumed for answers when later turns get an arrival time. It matters only to clients that send
/// turns by the clock instead of after the previous answer; 50 is the rate of a loaded 70B model for one reader.
pub const ANSWER_TOKENS_PER_S: f64 = 50.0;

/// Tokens of a block if a workload does not set it: vLLM's.
const BLOCK_TOKENS: u32 = 16;

/// Most tokens of a part of a prompt, or of an answer.
const TOKENS_MAX: f64 = 1e8;

/// Maximum tokens of a prompt and its answer, whatever its parts are: the bound of unlimited growth.
const CONTEXT_TOKENS_MAX: u32 = 1 << 30;

/// Longest pause in seconds: more than a year.
const SECONDS_MAX: f64 = 1e8;

/// Most turns of a session.
const TURNS_MAX: f64 = 1e5;

/// Generates the workload's trace.
///
/// # Errors
///
/// If settings are invalid.
pub fn generate(workload: &Workload, seed: u64) -> Result<Trace, WorkloadError> {
    let error = |why| WorkloadError { kind: workload.kind(), why };
    if workload.block_tokens() == 0 {
        return Err(error("block_tokens is 0: must be at least 1, usually 16".to_owned()));
    }
    workload.arrivals().check().and_then(|()| workload.check()).map_err(error)?;
    // Two streams, so that times affect nothing else.
    let starts = workload.arrivals().starts(&mut Rng::new(!seed));
    let mut draft =
        Draft { builder: Builder::new(workload.block_tokens()), rng: Rng::new(seed), starts, full: false };
    workload.fill(&mut draft);
    if draft.full {
        return Err(error(format!("more than {REQUESTS_MAX} requests: use fewer, or shorter sessions")));
    }
    let mut trace = draft.builder.finish();
    let settings = serde_json::to_string(workload).unwrap_or_default();
    trace.notes.push(format!("made with seed {seed} of {settings}"));
    let arrival_s = |index: u32| trace.requests[index as usize].arrival_s;
    let mut order: Vec<u32> = (0..trace.requests.len() as u32).collect();
    // A turn comes after the earlier ones: leaving one out ends its session.
    let late = workload.arrivals().end_s().map_or(0, |end_s| {
        order.retain(|&index| arrival_s(index) < end_s);
        trace.requests.len() - order.len()
    });
    if late > 0 {
        let end_s = workload.arrivals().end_s().unwrap_or_default();
        trace.notes.push(format!("{late} later turns would have come after {end_s} s and are left out"));
    }
    if late == 0 && order.is_sorted_by(|&a, &b| arrival_s(a) <= arrival_s(b)) {
        return Ok(trace);
    }
    order.sort_by(|&a, &b| arrival_s(a).total_cmp(&arrival_s(b)));
    Ok(trace.select(order))
}

/// Fails unless `value` is at least 1.
fn at_least_one(setting: &str, value: u32) -> Result<(), String> {
    if value > 0 { Ok(()) } else { Err(format!("{setting} is 0: must be at least 1")) }
}

/// Fails unless `value` is a share.
fn a_share(setting: &str, value: f64) -> Result<(), String> {
    if (0.0..=1.0).contains(&value) { Ok(()) } else { Err(format!("{setting} is {value}: must be 0 to 1")) }
}

/// The turn after `before`, which is at `index`: its prompt, its answer, and `more_tokens` of its own.
fn next_turn(
    before: TraceRequest,
    index: u32,
    more_tokens: u32,
    output_tokens: u32,
    think_s: f64,
    block_tokens: u32,
) -> TraceRequest {
    let history = before.input_tokens + before.output_tokens;
    let mut next = TraceRequest {
        input_tokens: (history + more_tokens).min(CONTEXT_TOKENS_MAX),
        output_tokens,
        session: before.session,
        base: Some(index),
        shared_blocks: history / block_tokens,
        ..TraceRequest::default()
    };
    follow(&mut next, before, index, think_s);
    next
}

/// Lets `request` be sent `think_s` after the answer to `before`, which is at `index`.
fn follow(request: &mut TraceRequest, before: TraceRequest, index: u32, think_s: f64) {
    let answered_s = before.arrival_s + f64::from(before.output_tokens) / ANSWER_TOKENS_PER_S;
    request.arrival_s = answered_s + think_s;
    request.after = Some(index);
    request.think_s = Some(think_s as f32);
}

// === impl Draft ===

impl Draft {
    /// Adds a request; `None` if there is no room.
    fn push(&mut self, request: TraceRequest) -> Option<u32> {
        self.full = self.builder.len() >= REQUESTS_MAX;
        if self.full { None } else { self.builder.branch(request) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn of_kind(kind: &str, arrivals: Arrivals) -> Workload {
        let mut workload = Workload::by_kind(kind).expect("a kind");
        workload.set_arrivals(arrivals);
        workload
    }

    #[test]
    fn a_workload_survives_being_written_and_what_it_does_not_know_is_refused() {
        for kind in Workload::KINDS {
            let workload = of_kind(kind, Arrivals::default());
            let text = serde_json::to_string(&workload).unwrap();
            assert_eq!(serde_json::from_str::<Workload>(&text).unwrap(), workload);
            let short = format!(r#"{{"kind": "{kind}"}}"#);
            assert_eq!(serde_json::from_str::<Workload>(&short).unwrap(), workload);
            let wrong = format!(r#"{{"kind": "{kind}", "colour": 1}}"#);
            let why = serde_json::from_str::<Workload>(&wrong).unwrap_err().to_string();
            assert!(why.contains("colour"), "{why}");
        }
        assert_eq!(Workload::by_kind("best"), None);
    }

    #[test]
    fn settings_that_make_no_sense_are_named_with_their_kind() {
        let text = r#"{"kind": "unshared", "input_tokens": {"min": 0, "max": 5}}"#;
        let why = generate(&serde_json::from_str(text).unwrap(), 0).unwrap_err().to_string();
        assert!(why.starts_with("workload unshared: input_tokens: must be"), "{why}");
        let text = r#"{"kind": "shared-prefix", "block_tokens": 0}"#;
        let why = generate(&serde_json::from_str(text).unwrap(), 0).unwrap_err().to_string();
        assert!(why.starts_with("workload shared-prefix: block_tokens is 0"), "{why}");
    }

    #[test]
    fn a_trace_of_so_many_seconds_ends_then_whatever_its_sessions_would_do() {
        let poisson = |seconds| Arrivals::Poisson { rate: 2.0, count: None, seconds: Some(seconds) };
        for kind in Workload::KINDS {
            let trace = generate(&of_kind(kind, poisson(600.0)), 0).unwrap();
            let last_s = trace.requests.iter().map(|request| request.arrival_s).fold(0.0, f64::max);
            assert!((500.0..600.0).contains(&last_s), "{kind}: {last_s} s");
            for (index, request) in (0..).zip(&trace.requests) {
                assert!(request.after.is_none_or(|after| after < index), "{kind}: {index}");
                assert!(request.base.is_none_or(|base| base < index), "{kind}: {index}");
            }
        }
        let trace = generate(&of_kind("chat", poisson(600.0)), 0).unwrap();
        assert!(trace.notes.iter().any(|note| note.contains("left out")), "{:?}", trace.notes);
        let trace = generate(&of_kind("unshared", poisson(600.0)), 0).unwrap();
        assert!(!trace.notes.iter().any(|note| note.contains("left out")), "{:?}", trace.notes);
    }

    /// How often each pair of lengths comes.
    fn lengths(trace: &Trace) -> BTreeMap<(u32, u32), usize> {
        let mut counts = BTreeMap::new();
        for request in &trace.requests {
            *counts.entry((request.input_tokens, request.output_tokens)).or_default() += 1;
        }
        counts
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10))]

        /// Invariant: A seed generates one workload; the arrival process changes arrival times only.
        #[test]
        fn a_seed_gives_one_trace_and_arrivals_change_only_arrivals(seed: u64, count in 1u32..60) {
            for kind in Workload::KINDS {
                let closed = of_kind(kind, Arrivals::Closed { count });
                let trace = generate(&closed, seed).unwrap();
                prop_assert_eq!(&trace, &generate(&closed, seed).unwrap());
                prop_assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
                let first = |request: &&TraceRequest| request.after.is_none();
                let starts: BTreeSet<u32> = trace.requests.iter().filter(first).map(|r| r.session).collect();
                prop_assert_eq!(starts.len(), count as usize, "{}", kind);
                // Times reorder requests, but what is asked in all stays.
                let poisson = Arrivals::Poisson { rate: 2.0, count: Some(count), seconds: None };
                let timed = generate(&of_kind(kind, poisson), seed).unwrap();
                prop_assert_eq!(lengths(&trace), lengths(&timed));
                // A longer one contains all requests of a shorter one.
                let longer = generate(&of_kind(kind, Arrivals::Closed { count: count + 7 }), seed).unwrap();
                let longer = lengths(&longer);
                prop_assert!(lengths(&trace).iter().all(|(length, n)| longer.get(length).is_some_and(|m| m >= n)));
                for (index, request) in (0..).zip(&timed.requests) {
                    prop_assert!(request.after.is_none_or(|after| after < index));
                    prop_assert!(request.base.is_none_or(|base| base < index && request.shared_blocks > 0));
                    prop_assert!(request.shared_blocks <= timed.prompt_blocks(index));
                }
            }
        }
    }
}
