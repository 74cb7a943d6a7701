//! What one request experienced in a world.

use kvlane_core::decision::Rejection;
use kvlane_core::time::Nanos;

/// What one request experienced. Times count from the start of the world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Its place in the trace.
    pub request: u32,
    /// The request that began its conversation: itself, perhaps.
    pub root: u32,
    /// Where it was served last, as a place in the fleet; `None` if nowhere.
    pub endpoint: Option<u16>,
    /// How often it was tried: once, and once more for each endpoint that failed it.
    pub attempts: u8,
    /// When it was sent.
    pub due: Nanos,
    /// When its first token came.
    pub first_token: Option<Nanos>,
    /// When it was over.
    pub end: Nanos,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens the engine found in its cache.
    pub cached_tokens: u32,
    /// Prompt tokens whose keys and values came from another engine.
    pub moved_tokens: u32,
    /// Prompt tokens a cache that never forgets would have held.
    pub reusable_tokens: u32,
    /// Answer tokens received.
    pub output_tokens: u32,
    /// Why it was not answered in full.
    pub failure: Option<Failure>,
}

/// Why a request was not answered in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The router refused it.
    Rejected(Rejection),
    /// The engine refused it.
    Refused(&'static str),
    /// Its endpoint died, or did not answer in time, and nobody was left to try or an answer had begun.
    Broken,
    /// Every endpoint that could be tried was too busy.
    Busy,
    /// The client gave up.
    TimedOut,
}

// === impl Outcome ===

impl Outcome {
    /// Whether it was answered in full.
    pub fn is_ok(&self) -> bool {
        self.failure.is_none()
    }

    /// Prompt tokens that had to be computed.
    pub fn uncached_tokens(&self) -> u32 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }

    /// Seconds to the first token.
    pub fn ttft_s(&self) -> Option<f64> {
        self.first_token.map(|first| (first - self.due).as_secs_f64())
    }

    /// Mean seconds between two tokens; needs at least two.
    pub fn tpot_s(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|&gaps| gaps > 0)?;
        self.first_token.map(|first| (self.end - first).as_secs_f64() / f64::from(gaps))
    }

    /// Seconds to the end.
    pub fn e2e_s(&self) -> f64 {
        (self.end - self.due).as_secs_f64()
    }
}
