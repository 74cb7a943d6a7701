//! Panics of the process.

use std::sync::atomic::Ordering;

use super::labels::PanicLabel;
use super::table::Gateway;
use crate::panics;

/// Panics counted by [`crate::panics`].
#[derive(Debug, Default)]
pub struct PanicMetrics(pub(super) Gateway);

// === impl PanicMetrics ===

impl PanicMetrics {
    /// Copies the counts of every kind of thread.
    pub fn read(&self) {
        for (thread, count) in panics::counts() {
            self.0.panics.get_or_create(&PanicLabel { thread }).inner().store(count, Ordering::Relaxed);
        }
    }
}
