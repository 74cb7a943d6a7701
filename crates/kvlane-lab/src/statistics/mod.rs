//! Statistics of measurements: summaries, histograms, confidence intervals, paired comparison and its verdict, curves
//! over load.

pub mod cached;
pub mod ci;
pub mod curve;
pub mod draws;
pub mod histogram;
pub mod paired;
pub mod spread;
pub mod summary;
pub mod verdict;
