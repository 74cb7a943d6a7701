//! `kvlane serve` and `kvlane epp`: the gateway, or the endpoint picker, until SIGINT or SIGTERM. SIGHUP, or a file of its configuration that changes, reloads it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use kvlane_fleet::file_watch::Watch;
use kvlane_gateway::config::Config;
use kvlane_gateway::serve::{Cut, Mode, Serving};
use tokio::signal::unix::{SignalKind, signal};

use crate::config::ConfigArgs;

/// Runs it.
pub(crate) fn run(args: &ConfigArgs, mode: Mode) -> Result<ExitCode> {
    kvlane_fleet::panics::watch();
    // Before the configuration is read, so that no change is missed.
    let mut watch = Watch::new(args.file().into_iter().collect());
    let config = args.load()?;
    watch.look_at(files(args, &config));
    tracing::info!(config = %serde_json::to_string(&config)?, "configuration");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let serving = match mode {
            Mode::Gateway => Serving::start(config).context("cannot start the gateway")?,
            Mode::Picker => Serving::start_picker(config).context("cannot start the endpoint picker")?,
        };
        let (address, metrics) = (serving.address, serving.metrics_address);
        match serving.health_address {
            None => tracing::info!(clients = %address, %metrics, "serving"),
            Some(health) => tracing::info!(grpc = %address, %health, %metrics, "picking endpoints"),
        }
        loop {
            let interval = serving.config().server.reload_interval;
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => {}
                () = watch.changed(interval) => {}
            }
            watch.reads();
            match args.load() {
                Ok(config) => {
                    watch.look_at(files(args, &config));
                    // The cause has been logged there.
                    let _ = serving.reload(config);
                }
                Err(error) => serving.refuse_reload(&format!("{error:#}")),
            }
        }
        tracing::info!(
            "shutting down: no new connections, waiting for requests in flight (a second signal cuts them)"
        );
        let again = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let Cut { requests, connections } = serving.shut_down_or(again).await;
        if requests > 0 {
            tracing::warn!(requests, "stopped: requests in flight were cut");
            return Ok(ExitCode::FAILURE);
        }
        if connections > 0 {
            tracing::info!(connections, "stopped: connections without a request in flight were closed");
        }
        tracing::info!("stopped");
        Ok(ExitCode::SUCCESS)
    })
}

/// The files that the configuration depends on.
fn files(args: &ConfigArgs, config: &Config) -> Vec<PathBuf> {
    args.file().into_iter().chain(config.files()).collect()
}
