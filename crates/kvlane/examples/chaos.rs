//! Tests a fleet of real processes under open-loop load and faults: `chaos script`, `chaos soak`, `chaos crowd`, see
//! [`kvlane_lab::chaos`]. Exits with code 1 if a promise was broken.
//!
//! Build the gateway first: `cargo build --release -p kvlane`.

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use kvlane_lab::chaos::{Experiment, run};

#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    experiment: Experiment,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let broken = run(&Options::parse().experiment)?;
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
