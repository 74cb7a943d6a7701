//! The records of a replay, one JSON object on a line: see [`Record`].
//!
//! A record contains a request's due time, the lengths of prompt and answer, and of its position in the replayed
//! trace [`Record::session`], [`Record::after`], [`Record::think_s`], [`Record::base`] and [`Record::shared_tokens`].
//! Lost are: the original pace of a replay with a speed factor (times are the replay's), and the full length of
//! failed answers (they have the received length). Prompts have the length counted by the engine, its chat template
//! included.

use std::collections::HashMap;
use std::io::BufRead;

use kvlane_core::request::AnswerEnd;

use super::lines::{Fault, Lines, json};
use super::{Draft, Options, TraceError};
use crate::record::Record;
use crate::trace::TraceRequest;

/// Tokens of a block where the options do not say: shared tokens are counted in these.
const BLOCK_TOKENS: u32 = 16;

pub(super) fn begins(head: &str) -> bool {
    head.starts_with('{') && head.contains("\"scheduled_s\"")
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let mut draft = Draft::new(options, BLOCK_TOKENS);
    let block_tokens = draft.builder.block_tokens();
    // Where the records of the replayed trace are here, and its sessions.
    let mut places: HashMap<u64, u32> = HashMap::new();
    let mut sessions: HashMap<u32, u32> = HashMap::new();
    let (mut count, mut failed) = (0, 0u64);
    lines.each(|_, bytes| {
        let record: Record = json(bytes)?;
        if !(0.0..1e15).contains(&record.scheduled_s) {
            return Err(Fault::Field(
                "scheduled_s",
                format!("{} is not a time in seconds", record.scheduled_s),
            ));
        }
        let fits = |tokens: u32| tokens <= super::lines::TOKENS_MAX;
        if record.prompt_tokens == 0 || !fits(record.prompt_tokens) {
            return Err(Fault::Field(
                "prompt_tokens",
                format!("{} is not a valid prompt length", record.prompt_tokens),
            ));
        }
        if !fits(record.output_tokens) {
            return Err(Fault::Field(
                "output_tokens",
                format!("{} is not a valid answer length", record.output_tokens),
            ));
        }
        let session = match record.session {
            Some(session) => *sessions.entry(session).or_insert(count),
            None => count,
        };
        // A broken answer is shorter than the one with which the replayed trace continued.
        let base = record.base.and_then(|base| places.get(&base)).copied();
        let there_is = base.map_or(0, |base| {
            let TraceRequest { input_tokens, output_tokens, .. } = draft.builder.requests()[base as usize];
            input_tokens.saturating_add(output_tokens).div_ceil(block_tokens)
        });
        let after = record.after.and_then(|after| places.get(&after)).copied();
        let think_s = record.think_s.filter(|_| after.is_some());
        if let Some(wrong) = think_s.filter(|seconds| !(0.0..1e15).contains(seconds)) {
            return Err(Fault::Field("think_s", format!("{wrong} is not a time in seconds")));
        }
        let request = TraceRequest {
            arrival_s: record.scheduled_s,
            input_tokens: record.prompt_tokens,
            output_tokens: record.output_tokens,
            session,
            after,
            think_s: think_s.map(|seconds| seconds as f32),
            end: AnswerEnd::Unknown,
            base,
            shared_blocks: (record.shared_tokens.unwrap_or(0) / block_tokens).min(there_is),
            adapter: None,
        };
        let index = draft.branch(request)?;
        count += u32::from(session == count);
        failed += u64::from(!record.is_ok());
        places.insert(record.id, index);
        Ok(())
    })?;
    draft.timed = false;
    if failed > 0 {
        draft
            .builder
            .note(format!("{failed} requests had failed; their answers are as long as what was received"));
    }
    Ok(draft)
}
