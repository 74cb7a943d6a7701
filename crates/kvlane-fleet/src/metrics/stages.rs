//! Metrics of the time that each stage of a request takes before its response begins.

use kvlane_wire::server_timing::{Stage, Stages};

use super::histogram::Histogram;
use super::labels::StageLabels;
use super::table::Requests;

/// The histograms of one pool, looked up once.
pub struct PoolStages([Histogram; Stage::ALL.len()]);

// === impl PoolStages ===

impl PoolStages {
    pub(super) fn new(requests: &Requests, model: &str) -> Self {
        Self(Stage::ALL.map(|stage| {
            let labels = StageLabels { model: model.into(), stage: stage.name() };
            requests.stage.get_or_create(&labels).clone()
        }))
    }

    /// Records a request whose response has begun.
    pub fn observe(&self, stages: &Stages) {
        for (stage, micros) in stages.iter() {
            self.0[stage as usize].observe(micros as f64 / 1e6);
        }
    }
}
