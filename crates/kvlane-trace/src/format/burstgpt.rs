//! The BurstGPT format: comma-separated values.
//!
//! ```csv
//! Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
//! 5,1,2.5,ChatGPT,472,18,490,Conversation log
//! ```
//!
//! `Timestamp` is in seconds. The older files have neither `Session ID` nor `Elapsed time`. There are no block ids: a
//! turn's prompt is taken to begin with the prompt and the answer of the turn before, as far as it is long enough, in
//! full blocks; rows without a session share nothing. Lengths are the file's. Origin: HPMLL/BurstGPT.

use std::collections::HashMap;
use std::io::BufRead;

use super::csv::Columns;
use super::lines::{Fault, Lines, text_tokens};
use super::{Draft, Options, TraceError};
use crate::trace::TraceRequest;

const TIMESTAMP: &str = "Timestamp";
const SESSION_ID: &str = "Session ID";
const REQUEST_TOKENS: &str = "Request tokens";
const RESPONSE_TOKENS: &str = "Response tokens";

/// Tokens of a block where the options do not say: vLLM's.
const BLOCK_TOKENS: u32 = 16;

pub(super) fn begins(head: &str) -> bool {
    head.lines().next().is_some_and(|line| line.contains(REQUEST_TOKENS) && line.contains(TIMESTAMP))
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let columns = Columns::read(lines, &[TIMESTAMP, REQUEST_TOKENS, RESPONSE_TOKENS])?;
    let place = |name| columns.place(name).unwrap_or_default();
    let (timestamp, input, output) = (place(TIMESTAMP), place(REQUEST_TOKENS), place(RESPONSE_TOKENS));
    let session_id = columns.place(SESSION_ID);
    let mut draft = Draft::new(options, BLOCK_TOKENS);
    let block_tokens = draft.builder.block_tokens();
    // The last turn of each session.
    let mut turns: HashMap<String, u32> = HashMap::new();
    let mut sessions = 0;
    lines.each(|_, bytes| {
        let values = columns.split(bytes)?;
        let time = values[timestamp].parse().ok().filter(|time| (0.0..1e15).contains(time));
        let arrival_s: f64 = time.ok_or_else(|| {
            Fault::Field(TIMESTAMP, format!("{:?} is not a time in seconds", values[timestamp]))
        })?;
        let input_tokens = text_tokens(REQUEST_TOKENS, values[input], 1)?;
        let output_tokens = text_tokens(RESPONSE_TOKENS, values[output], 0)?;
        let id = session_id.map(|at| values[at]).filter(|id| !["", "-1", "None", "nan"].contains(id));
        let after = id.and_then(|id| turns.get(id)).copied();
        let before = after.map(|after| draft.builder.requests()[after as usize]);
        let history = before.map_or(0, |before| before.input_tokens + before.output_tokens);
        let request = TraceRequest {
            arrival_s,
            input_tokens,
            output_tokens,
            session: before.map_or(sessions, |before| before.session),
            after,
            base: after,
            shared_blocks: history.min(input_tokens) / block_tokens,
            ..TraceRequest::default()
        };
        let index = draft.branch(request)?;
        sessions += u32::from(after.is_none());
        if let Some(id) = id {
            turns.insert(id.to_owned(), index);
        }
        Ok(())
    })?;
    if !turns.is_empty() {
        draft
            .builder
            .note("a turn's prompt is taken to begin with the prompt and answer before it".to_owned());
    }
    Ok(draft)
}
