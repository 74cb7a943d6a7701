//! What is known about the sources of discovery, apart from their workers.

use std::collections::{BTreeMap, BTreeSet};

use kvlane_fleet::worker::WorkerId;
use kvlane_fleet::worker::config::WorkerSpec;

/// What is known about the sources, apart from their workers.
#[derive(Default)]
pub(super) struct Discovered {
    pub(super) sources: BTreeMap<&'static str, Known>,
    /// Workers of the configuration whose URLs are those of workers that a source named first.
    pub(super) claimed: Vec<WorkerSpec>,
}

/// What is known about a source, apart from its workers.
#[derive(Default)]
pub(super) struct Known {
    /// The workers that drain because the source says that they are about to end.
    pub(super) terminating: BTreeSet<WorkerId>,
    /// URL and key of the engines that an operator has removed.
    pub(super) dismissed: BTreeSet<(String, String)>,
}
