//! Prints what Kubernetes discovery publishes, a JSON line for each change of the workers or of the source's status, to
//! look at a cluster with the eyes of the gateway:
//!
//! ```sh
//! cargo run -p kvlane-k8s --example watch -- '{"selector": "app=vllm", "kubeconfig": "/etc/kubeconfig"}'
//! ```
//!
//! The argument is the section `discovery.kubernetes` of the configuration.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use kvlane_fleet::Fleet;
use kvlane_fleet::clock::{Clock, unix_time};
use kvlane_fleet::discovery::Targets;
use kvlane_fleet::discovery::config::Kubernetes;
use kvlane_fleet::settings::Settings;
use kvlane_fleet::tokenize::{Tokenizers, Tokens};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How often the status is looked at.
const STATUS: Duration = Duration::from_millis(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(config) = std::env::args().nth(1) else {
        return Err("usage: watch '{\"selector\": \"app=vllm\"}'".into());
    };
    let mut config: Kubernetes = serde_json::from_str(&config)?;
    config.enabled = true;
    let tokenizers = Tokenizers::start(&Tokens::default(), &Default::default())?;
    let drained = tokio::sync::mpsc::unbounded_channel().0;
    let fleet =
        Arc::new(Fleet::new(Settings::default(), Arc::default(), Clock::start(1.0), tokenizers, drained));
    let (source, mut seen) = fleet.discovery.source("kubernetes", fleet.clock);
    let stop = CancellationToken::new();
    let discovery = kvlane_k8s::run(config, source, Arc::clone(&fleet), stop);
    let print = async {
        let (mut targets, mut published, mut last) = (Arc::new(Targets::default()), 0, Value::Null);
        loop {
            if let Ok(Some(changed)) = timeout(STATUS, seen.next()).await {
                targets = changed;
                published += 1;
            }
            let status = seen.status();
            let workers = |terminating: bool| {
                let some = targets.workers.iter().filter(|worker| worker.terminating == terminating);
                some.map(|worker| worker.spec.url.as_str()).collect::<Vec<_>>()
            };
            let (staying, leaving) = (workers(false), workers(true));
            // Of many workers, the first few say which they are.
            let line = json!({
                "published": published,
                "workers": staying.len(),
                "terminating": leaving.len(),
                "first": staying.iter().chain(&leaving).take(3).collect::<Vec<_>>(),
                "specs": targets.workers.iter().take(1).map(|worker| &worker.spec).collect::<Vec<_>>(),
                "problems": targets.problems.iter().take(5).collect::<Vec<_>>(),
                "problem": status.problem,
                "objectives": **fleet.discovery.objectives.load(),
            });
            if line != last {
                let age = status.confirmed.map(|at| (fleet.clock.now().0.saturating_sub(at.0)) as f64 / 1e9);
                let stamped = json!({"unix": unix_time(), "age_s": age, "status": line});
                writeln!(std::io::stdout(), "{stamped}")?;
                last = line;
            }
        }
    };
    tokio::select! {
        () = discovery => Ok(()),
        ended = print => ended,
    }
}
