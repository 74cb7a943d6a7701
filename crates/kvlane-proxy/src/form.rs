//! How much of a form is held: as far as its field `model`.

use kvlane_wire::multipart::{FieldScanner, Search};

/// Most bytes that are held of a form. A form whose field `model` does not begin within them names no model.
const HELD_BYTES_MAX: usize = 1 << 20;

/// Limits of a form.
pub(super) struct Limits {
    /// Of a body that is held whole by other means.
    pub(super) payload_bytes: usize,
    /// Of the whole form.
    pub(super) upload_bytes: u64,
    /// Of what is held of it.
    held_bytes: usize,
}

/// What is known of a form by its beginning.
pub(super) struct Beginning {
    scanner: FieldScanner,
    /// Whether the field `model` may still come.
    searches: bool,
}

// === impl Limits ===

impl Limits {
    /// Of forms where other bodies have at most `payload_bytes`.
    pub(super) fn new(payload_bytes: usize, upload_bytes: u64) -> Self {
        Self { payload_bytes, upload_bytes, held_bytes: HELD_BYTES_MAX.min(payload_bytes) }
    }

    /// Most bytes that are held of a form of this length.
    pub(super) fn most_held(&self, length: Option<u64>) -> usize {
        let length = length.and_then(|length| usize::try_from(length).ok());
        length.map_or(self.held_bytes, |length| length.min(self.held_bytes))
    }
}

// === impl Beginning ===

impl Beginning {
    /// Of a form whose parts are separated by `boundary`.
    pub(super) fn new(boundary: &str) -> Self {
        Self { scanner: FieldScanner::new(boundary, "model"), searches: true }
    }

    /// Reads the next piece.
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.searches = self.searches && self.scanner.push(piece) == Search::More;
    }

    /// Whether these bytes are enough of a form of this length. A form of unknown length may end soon, and is then held
    /// whole.
    pub(super) fn is_enough(&self, come: usize, length: Option<u64>, limits: &Limits) -> bool {
        let is_large = length.is_some_and(|length| length > limits.held_bytes as u64);
        come >= limits.held_bytes || (is_large && !self.searches)
    }
}
