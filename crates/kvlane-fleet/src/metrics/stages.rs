//! Metrics of the time that each stage of a request takes before its response begins.

use kvlane_wire::server_timing::{Stage, Stages};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;

use super::histogram::Histogram;
use super::labels::HistogramFamily;
use super::table::Registration;

/// Upper bounds in seconds: from the time of parsing to that of a long prompt in a long queue.
const STAGE_BUCKETS: [f64; 17] = [
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0,
    10.0, 60.0, 300.0,
];

/// One stage of a model's requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabels {
    model: String,
    stage: &'static str,
}

/// Times of all pools.
pub(super) struct StageMetrics(HistogramFamily<StageLabels>);

/// The histograms of one pool, looked up once.
pub struct PoolStages([Histogram; Stage::ALL.len()]);

// === impl StageMetrics ===

impl Default for StageMetrics {
    fn default() -> Self {
        Self(Family::new_with_constructor(|| Histogram::new(STAGE_BUCKETS)))
    }
}

impl StageMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("stage", self.0.clone());
    }

    pub(super) fn pool(&self, model: &str) -> PoolStages {
        PoolStages(Stage::ALL.map(|stage| {
            let labels = StageLabels { model: model.into(), stage: stage.name() };
            self.0.get_or_create(&labels).clone()
        }))
    }
}

// === impl PoolStages ===

impl PoolStages {
    /// Records a request whose response has begun.
    pub fn observe(&self, stages: &Stages) {
        for (stage, micros) in stages.iter() {
            self.0[stage as usize].observe(micros as f64 / 1e6);
        }
    }
}
