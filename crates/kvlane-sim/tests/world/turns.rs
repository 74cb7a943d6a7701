//! The next turn of a conversation.

use kvlane_core::request::AnswerEnd;
use kvlane_core::rng::Rng;
use kvlane_trace::trace::{Builder, TraceRequest};

use crate::BLOCK_TOKENS;

/// Adds a turn after the one `before`, which is given by its index and its length with the answer.
pub(crate) fn add(
    builder: &mut Builder,
    rng: &mut Rng,
    arrival_s: f64,
    session: u32,
    before: &mut Option<(u32, u32)>,
) {
    let (base, length) = before.map_or((None, 0), |(index, length)| (Some(index), length));
    let request = TraceRequest {
        arrival_s,
        input_tokens: length + 40 + rng.below(300) as u32,
        output_tokens: 1 + rng.below(60) as u32,
        session,
        after: base,
        think_s: base.map(|_| rng.unit() as f32),
        end: AnswerEnd::Unknown,
        base,
        shared_blocks: length / BLOCK_TOKENS,
        adapter: None,
    };
    let index = builder.branch(request).expect("room");
    *before = Some((index, request.input_tokens + request.output_tokens));
}
