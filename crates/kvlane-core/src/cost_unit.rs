//! The unit of the costs that a policy explains its decisions with.

/// What the costs of a policy's rows count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostUnit {
    /// Seconds of work.
    Seconds,
    /// Tokens.
    Tokens,
    /// Requests in flight.
    Requests,
    /// A score: products, weighted sums, or another unit in each case.
    Score,
}

// === impl CostUnit ===

impl CostUnit {
    /// The name in answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Seconds => "seconds",
            Self::Tokens => "tokens",
            Self::Requests => "requests",
            Self::Score => "score",
        }
    }
}
