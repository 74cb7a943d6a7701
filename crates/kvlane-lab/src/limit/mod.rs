//! How far from the limit: the best placement that a search finds with the whole trace known, and times that no placement
//! goes below.
//!
//! A router places each request when it arrives. [`search`] places all of them at once, and tries again many thousand
//! times: each assignment of requests to engines is simulated. The optimum is between what it finds and [`bounds`].

mod bound;
mod search;

pub use bound::{Bounds, bounds};
pub(crate) use search::mean;
pub use search::{Found, Moves, Problem, search};
