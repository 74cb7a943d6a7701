//! The module `kvlane._core` of the Python package: simulations, records and reports as the commands make them, and the
//! router that the gateway and the simulator drive.
//!
//! Arguments are checked here. What takes long runs without Python's global lock. `python/kvlane` has the types that
//! users see, and frames and plots.

mod error;
mod prompt;
mod records;
mod router;
mod simulate;

use pyo3::prelude::*;

/// The binary's allocator: a simulation takes as long here as there.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Native part of kvlane.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::records::{Records, Report, read_records, report};
    #[pymodule_export]
    use super::router::{Applied, Decision, Endpoint, Router};
    #[pymodule_export]
    use super::simulate::{Simulated, simulate};

    /// The version of kvlane.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
