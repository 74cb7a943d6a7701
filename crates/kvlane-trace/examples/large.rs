//! Writes a large trace of a coding assistant, to measure what reading, statistics and sampling cost:
//!
//! ```text
//! cargo run --release -p kvlane-trace --example large -- 2100000 large.jsonl.gz
//! ```
//!
//! Sessions of 20 turns on average begin with one of 40 system prompts of 16K tokens; each turn adds a tool result to
//! the prompt and answer before. Prompts come to 37K tokens (72 blocks) on average, answers to 550.

use std::error::Error;

use kvlane_core::rng::Rng;
use kvlane_trace::format::normal;
use kvlane_trace::trace::{Builder, TraceRequest};

const BLOCK_TOKENS: u32 = 512;
const HEAD_TOKENS: u32 = 16 * 1024;
const HEADS: usize = 40;
const TURNS_MEAN: f64 = 20.0;
const GAP_MEAN_S: f64 = 60.0;
const RATE: f64 = 24.0;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [count, path] = arguments.as_slice() else { return Err("usage: large REQUESTS FILE".into()) };
    let count: usize = count.parse()?;
    let mut rng = Rng::new(1);
    let mut exponential = |mean: f64| -mean * (1.0 - rng.unit()).ln();
    let mut turns: Vec<(f64, u32)> = Vec::with_capacity(count);
    let mut start_s = 0.0;
    for session in 0.. {
        if turns.len() >= count {
            break;
        }
        start_s += exponential(TURNS_MEAN / RATE);
        let mut at_s = start_s;
        for _ in 0..(exponential(TURNS_MEAN).ceil() as usize).min(count - turns.len()) {
            turns.push((at_s, session));
            at_s += exponential(GAP_MEAN_S);
        }
    }
    turns.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut builder = Builder::new(BLOCK_TOKENS);
    let mut before: Vec<Option<u32>> = Vec::new();
    let mut heads: [Option<u32>; HEADS] = [None; HEADS];
    for (arrival_s, session) in turns {
        let place = session as usize;
        before.resize(before.len().max(place + 1), None);
        let output_tokens = (exponential(550.0) as u32).max(1);
        let (base, shared_tokens, added) = match before[place] {
            Some(turn) => {
                let TraceRequest { input_tokens, output_tokens, .. } = builder.requests()[turn as usize];
                (Some(turn), input_tokens + output_tokens, exponential(300.0) as u32)
            }
            None => (heads[place % HEADS], HEAD_TOKENS, exponential(4000.0) as u32 + 1),
        };
        let request = TraceRequest {
            arrival_s,
            input_tokens: shared_tokens + added,
            output_tokens,
            session,
            after: before[place],
            base,
            shared_blocks: shared_tokens / BLOCK_TOKENS,
            ..TraceRequest::default()
        };
        let index = builder.branch(request).ok_or("too many requests")?;
        before[place] = Some(index);
        heads[place % HEADS].get_or_insert(index);
    }
    normal::save(&builder.finish(), path.as_ref())?;
    Ok(())
}
