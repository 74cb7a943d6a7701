//! Inference engines: what kvlane knows of each. One file per engine.
//!
//! A metrics page is recognised by the names on it, and a model by its `owned_by`, so an endpoint's engine need not be
//! configured.

mod adapters;
mod cache;
pub mod calls;
mod feed;
mod intervals;
mod kind;
mod llamacpp;
mod load;
mod progress;
mod sglang;
mod tokenize;
mod vllm;

pub use adapters::adapter_report;
pub use cache::{PrefixCache, block_tokens, prefix_caches};
pub use feed::{FeedError, FeedSource, RANKS_MAX, resolve};
pub use intervals::{TokenIntervals, token_intervals};
pub use kind::{AdapterPaths, Advice, CacheReset, EngineKind, FeedQuery, PrefixCaching, Settings};
pub(crate) use kind::{CardNames, ComputedNames, UsageObject};
pub use load::{load_report, load_reports};
pub use progress::progress;
pub use tokenize::{Tokenize, Tokenized};

use serde_json::Value;

/// Every kind of engine.
pub static ENGINES: &[&EngineKind] = &[
    &vllm::ENGINE,
    &sglang::ENGINE,
    &llamacpp::ENGINE,
    #[cfg(test)]
    &tests::ENGINE,
];

/// The engine whose forms an unknown one is assumed to have, as other servers copy them.
pub static ASSUMED: &EngineKind = &vllm::ENGINE;

/// The engine of an entry of a model list, by its `owned_by`.
pub fn of_card(card: &Value) -> Option<&'static EngineKind> {
    let owner = card["owned_by"].as_str()?;
    ENGINES.iter().copied().find(|kind| kind.owner == owner)
}

/// The engine with this name.
pub fn named(name: &str) -> Option<&'static EngineKind> {
    ENGINES.iter().copied().find(|kind| kind.name == name)
}

/// How the engine of an entry of a model list tokenizes.
pub fn tokenize(card: Option<&Value>) -> &'static Tokenize {
    &card.and_then(of_card).unwrap_or(ASSUMED).tokenize
}

/// What to tell the operator of an engine.
pub fn advice(kind: Option<&EngineKind>, text: impl Fn(&Advice) -> Option<&'static str>) -> &'static str {
    kind.and_then(|kind| text(&kind.advice)).or_else(|| text(&ASSUMED.advice)).unwrap_or_default()
}

#[cfg(test)]
mod tests;
