//! `kvlane serve`: the gateway until SIGINT or SIGTERM.

use std::process::ExitCode;

use anyhow::{Context, Result};
use kvlane_live::serve::Serving;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::ConfigArgs;

/// Runs it.
pub(crate) fn run(args: &ConfigArgs) -> Result<ExitCode> {
    let config = args.load()?;
    tracing::info!(config = %serde_json::to_string(&config)?, "configuration");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let serving = Serving::start(config).context("the gateway cannot start")?;
        tracing::info!(clients = %serving.address, metrics = %serving.metrics_address, "serving");
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!(
            "stopping: no new connections, requests in flight may end (a second signal ends them)"
        );
        let ended = tokio::select! {
            ended = serving.shut_down() => ended,
            _ = terminate.recv() => false,
            _ = interrupt.recv() => false,
        };
        if !ended {
            tracing::warn!("requests in flight were cut");
            return Ok(ExitCode::FAILURE);
        }
        tracing::info!("stopped");
        Ok(ExitCode::SUCCESS)
    })
}
