//! The Qwen-Bailian format: one JSON object on a line.
//!
//! ```json
//! {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
//!  "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091]}
//! ```
//!
//! (On one line.) `timestamp` is in seconds, a block has 16 tokens, a request is a turn after the one whose `chat_id`
//! is its `parent_chat_id`, -1 for none. The last block is partial where the length is no multiple of 16, and its id
//! may be another one in the next turn, so only the ids of full blocks count. Origin:
//! alibaba-edu/qwen-bailian-usagetraces-anon.

use std::collections::HashMap;
use std::io::BufRead;

use serde::Deserialize;
use serde_json::Number;

use super::lines::{Fault, Lines, json, needed, time, tokens};
use super::{Draft, Options, TraceError};
use crate::trace::TraceRequest;

/// Tokens of a block of the public traces.
const BLOCK_TOKENS: u32 = 16;

/// The fields as they come; each is checked on its own, so that an error can name it.
#[derive(Deserialize)]
struct Line {
    chat_id: Option<i64>,
    parent_chat_id: Option<i64>,
    timestamp: Option<Number>,
    input_length: Option<Number>,
    output_length: Option<Number>,
    hash_ids: Option<Vec<u64>>,
}

pub(super) fn begins(head: &str) -> bool {
    head.starts_with('{') && head.contains("\"chat_id\"")
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let mut draft = Draft::new(options, BLOCK_TOKENS);
    let block_tokens = draft.builder.block_tokens();
    // The request of each chat id.
    let mut chats: HashMap<i64, u32> = HashMap::new();
    let mut sessions = 0;
    lines.each(|_, bytes| {
        let line: Line = json(bytes)?;
        let chat_id = needed("chat_id", line.chat_id)?;
        let arrival_s = time("timestamp", &needed("timestamp", line.timestamp)?, "seconds")?;
        let input_tokens = tokens("input_length", line.input_length, 1)?;
        let output_tokens = tokens("output_length", line.output_length, 0)?;
        let ids = needed("hash_ids", line.hash_ids)?;
        let full = (input_tokens / block_tokens) as usize;
        if ids.len() < full || ids.len() > full + 1 {
            let why = format!(
                "{} ids, but {input_tokens} tokens in blocks of {block_tokens} need {full} or one more",
                ids.len()
            );
            return Err(Fault::Field("hash_ids", why));
        }
        let after = line.parent_chat_id.and_then(|parent| chats.get(&parent)).copied();
        let session = after.map_or(sessions, |after| draft.builder.requests()[after as usize].session);
        let request = TraceRequest {
            arrival_s,
            input_tokens,
            output_tokens,
            session,
            after,
            ..TraceRequest::default()
        };
        let index = draft.push(request, &ids[..full])?;
        sessions += u32::from(after.is_none());
        chats.insert(chat_id, index);
        Ok(())
    })?;
    Ok(draft)
}
