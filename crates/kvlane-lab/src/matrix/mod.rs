//! Comparisons over a grid of conditions: [`policies`] in virtual time, and [`routers`] on real engines.

pub(crate) mod jobs;
pub mod policies;
pub mod routers;
