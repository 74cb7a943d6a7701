//! Endpoint speed: a linear model of what an engine's work takes, whose terms are fitted to measured times.
//!
//! [`Rates`] start as those of the configured machine, or of typical hardware. Each answer then corrects them: those of
//! the pool in all their terms ([`Fit`]), and two factors of its endpoint, one for prefill and one for decoding
//! ([`Pace`]). So an unconfigured machine is known after a few dozen answers of whatever kind, and mixed GPUs, slow
//! nodes and throttled nodes get rates of their own.

mod filter;
mod fit;
mod model;
mod told;

pub use self::fit::Pace;
pub(crate) use self::fit::{Fit, Measured, Prefilled, SAMPLES_MAX};
pub use self::model::Rates;
pub(crate) use self::model::{COMPUTED_MAX, Part, STEP_TOKENS, Work, chunks};
pub use self::told::OwnMeasures;
pub(crate) use self::told::Told;
