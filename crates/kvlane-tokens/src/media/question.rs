//! What an engine is asked about an image.

use serde_json::json;

/// An image of a size whose tokens are unknown: an engine's `/tokenize` can tell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    pub(super) size: Size,
    /// Messages with this image alone, as JSON.
    pub(super) messages: serde_json::Value,
}

/// What the tokens of an image depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Size {
    Pixels(u32, u32),
    /// Of an image whose header cannot be read: its name.
    OfImage(String),
}

// === impl NewImage ===

impl NewImage {
    /// The body of the question for an engine's `/tokenize`.
    pub fn question(&self, model: &str) -> serde_json::Value {
        json!({"model": model, "messages": self.messages})
    }
}
