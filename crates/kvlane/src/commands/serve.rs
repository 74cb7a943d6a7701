//! `kvlane serve` and `kvlane epp`: the gateway, or the endpoint picker, until SIGINT or SIGTERM. SIGHUP, or a file of its configuration that changes, reloads it.

use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;

use anyhow::{Context, Result};
use kvlane_fleet::file_watch::Watch;
use kvlane_gateway::config::Config;
use kvlane_gateway::inherited::Inherited;
use kvlane_gateway::mode::Mode;
use kvlane_gateway::serve::{Cut, Serving};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::service_manager::ServiceManager;
use super::summary::Summary;
use crate::config::{ConfigArgs, document};

/// Runs it. The log is for programs if it is `json`.
pub(crate) fn run(args: &ConfigArgs, mode: Mode, json: bool) -> Result<ExitCode> {
    // No thread runs yet.
    let inherited = Inherited::take().context("cannot use the sockets of the service manager")?;
    let manager = ServiceManager::of_environment();
    kvlane_fleet::panics::watch();
    // Before the configuration is read, so that no change is missed.
    let mut watch = Watch::new(args.file().into_iter().collect());
    let config = args.load()?;
    args.warn();
    watch.look_at(files(args, &config));
    tracing::info!(changed = %document::changed(&config), "configuration");
    tracing::debug!(config = %serde_json::to_string(&config)?, "whole configuration");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let serving = Serving::start_on(mode, config, inherited).context(match mode {
            Mode::Gateway => "cannot start the gateway",
            Mode::Picker => "cannot start the endpoint picker",
        })?;
        let mut watched = JoinSet::new();
        if let Some(interval) = manager.watchdog {
            let (manager, relays) = (manager.clone(), serving.relay_threads());
            watched.spawn(async move {
                loop {
                    sleep(interval / 2).await;
                    relays.respond().await;
                    manager.notify("WATCHDOG=1");
                }
            });
        }
        let (address, metrics) = (serving.address, serving.metrics_address);
        match serving.health_address {
            None => tracing::info!(clients = %address, %metrics, "serving"),
            Some(health) => tracing::info!(grpc = %address, %health, %metrics, "picking endpoints"),
        }
        let (mut opened, mut is_open) = (pin!(serving.opened()), false);
        let (mut probed, mut summary) = (pin!(serving.fleet.start.probed()), None);
        loop {
            let interval = serving.config().server.reload_interval;
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => {}
                () = watch.changed(interval) => {}
                () = &mut opened, if !is_open => {
                    is_open = true;
                    manager.notify("READY=1");
                    // Workers have come up since.
                    if summary == Some(0) {
                        summary = Some(Summary::of(&serving, mode).tell(json));
                    }
                    continue;
                }
                () = &mut probed, if summary.is_none() => {
                    summary = Some(Summary::of(&serving, mode).tell(json));
                    continue;
                }
            }
            watch.reads();
            if is_open {
                manager.notify("RELOADING=1");
            }
            match args.load() {
                Ok(config) => {
                    watch.look_at(files(args, &config));
                    // The cause has been logged there.
                    let _ = serving.reload(config);
                }
                Err(error) => serving.refuse_reload(&format!("{error:#}")),
            }
            if is_open {
                manager.notify("READY=1");
            }
        }
        manager.notify("STOPPING=1");
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
