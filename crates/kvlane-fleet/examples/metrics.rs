//! Writes `docs/metrics.md` to standard output.

use std::io::Write as _;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(kvlane_fleet::metrics::table::markdown().as_bytes())
}
