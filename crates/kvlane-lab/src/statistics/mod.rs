//! Statistics of measurements: summaries, histograms, confidence intervals, paired comparison, curves over load.

pub mod ci;
pub mod curve;
pub mod draws;
pub mod histogram;
pub mod paired;
pub mod spread;
pub mod summary;
