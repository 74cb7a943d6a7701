//! A request in the engine.

use kvlane_core::block::BlockHash;
use kvlane_core::time::Nanos;

use super::request::EngineRequest;
use super::wheel::Seat;
use crate::pool::BlockId;

/// The order of a sequence that does not run.
pub(super) const NOWHERE: u64 = 0;

/// Report context of a sequence that never reports.
const NEVER: u32 = u32::MAX;

/// A request's state. While it decodes, its progress follows from the step number alone, see [`Sequence::decode`].
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) request: EngineRequest,
    /// The admission under which it runs, or [`NOWHERE`].
    pub(super) order: u64,
    /// Output tokens so far. While it decodes: their number when decoding started.
    pub(super) generated: u32,
    /// Tokens, of prompt and answer, that are computed in `blocks`. While it decodes: their number when decoding
    /// started.
    pub(super) computed: u32,
    /// Maximum of `computed` while it did not decode.
    pub(super) computed_max: u32,
    /// Tokens after `computed` that come from another tier or engine.
    pub(super) coming: u32,
    /// Arrival time of those from host memory.
    pub(super) loaded_at: Nanos,
    /// Arrival time of all of them.
    pub(super) ready_at: Nanos,
    /// Prompt tokens of the step in progress; 0 while it decodes.
    pub(super) chunk: u32,
    /// Prompt tokens found at the first admission; `None` before it.
    pub(super) cached_tokens: Option<u32>,
    pub(super) blocks: Vec<BlockId>,
    /// While it decodes: the step number at which it would have had no token, had it always decoded.
    origin: Option<u64>,
    /// The context in whose step the next report is due.
    report_at: u32,
}

// === impl Sequence ===

impl Sequence {
    pub(super) fn new(request: EngineRequest, blocks: Vec<BlockId>) -> Self {
        Self {
            request,
            order: NOWHERE,
            generated: 0,
            computed: 0,
            computed_max: 0,
            coming: 0,
            loaded_at: Nanos::ZERO,
            ready_at: Nanos::ZERO,
            chunk: 0,
            cached_tokens: None,
            blocks,
            origin: None,
            report_at: NEVER,
        }
    }

    /// Tokens to compute until the next output token is known. Not for one that decodes.
    pub(super) fn target(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }

    /// Hashes of the blocks that it may take from a cache: full ones, and never all tokens, because the last one's
    /// output is needed.
    pub(super) fn reusable(&self, block_tokens: u32) -> impl Iterator<Item = BlockHash> {
        let blocks = (self.target() - 1) / block_tokens;
        (0..blocks).map(|index| self.request.block(index))
    }

    /// Blocks missing for `tokens` tokens.
    pub(super) fn missing(&self, tokens: u32, block_tokens: u32) -> u32 {
        tokens.div_ceil(block_tokens).saturating_sub(self.blocks.len() as u32)
    }

    /// Starts decoding at step `tick`: in each step its context grows by one. Returns the number of steps to its
    /// first wake-up.
    pub(super) fn decode(&mut self, tick: u64, block_tokens: u32, token_every: u32) -> u32 {
        debug_assert_eq!(self.computed + 1, self.target(), "all but its last token is computed");
        self.origin = Some(tick.wrapping_sub(u64::from(self.computed)));
        let further = self.generated - 1;
        self.report_at = match token_every {
            0 => NEVER,
            every => (self.computed - 1).saturating_add(every - further % every),
        };
        self.wake_at(self.computed, block_tokens) - self.computed
    }

    /// Its context before step `tick`, if it decodes: prompt and answer without the last token.
    pub(super) fn context(&self, tick: u64) -> Option<u32> {
        self.origin.map(|origin| tick.wrapping_sub(origin) as u32)
    }

    /// Output tokens of a decoding sequence with this context.
    pub(super) fn generated_at(&self, context: u32) -> u32 {
        context - self.request.prompt_tokens + 1
    }

    /// Stops decoding before step `tick`. Returns its context if it did decode.
    pub(super) fn stop(&mut self, tick: u64) -> Option<u32> {
        let context = self.context(tick)?;
        self.origin = None;
        self.generated = self.generated_at(context);
        self.computed = context;
        self.computed_max = self.computed_max.max(context);
        Some(context)
    }

    /// The context at which its blocks are full.
    pub(super) fn full_at(&self, block_tokens: u32) -> u32 {
        (self.blocks.len() as u32).saturating_mul(block_tokens)
    }

    /// The context in whose step it ends.
    pub(super) fn end_at(&self) -> u32 {
        self.request.prompt_tokens + self.request.output_tokens - 2
    }

    /// The next context, `context` or later, in whose step it ends or reports.
    pub(super) fn due_at(&self) -> u32 {
        self.end_at().min(self.report_at)
    }

    /// Records a report, if one is due in the step with this context.
    pub(super) fn report(&mut self, context: u32, token_every: u32) -> bool {
        let due = context == self.report_at;
        if due {
            self.report_at = context.saturating_add(token_every);
        }
        due
    }

    /// The next context, `context` or later, in whose step it takes a block, fills one, reports or ends.
    pub(super) fn wake_at(&self, context: u32, block_tokens: u32) -> u32 {
        let full = self.full_at(block_tokens);
        let block = if context == full { full } else { full - 1 };
        block.min(self.due_at())
    }

    /// Its seat, while it runs.
    pub(super) fn seat(&self, at: u32) -> Seat {
        Seat { order: self.order, at }
    }
}
