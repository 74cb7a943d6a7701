//! Comparisons over a grid of conditions: [`policies`] in virtual time, and [`routers`] on real engines.

pub mod policies;
pub mod routers;
