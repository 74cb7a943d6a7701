//! The sources of discovery of a running gateway: started, changed and stopped as the configuration says.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use kvlane_control::Controller;
use kvlane_control::discovery::{dns, file};
use kvlane_fleet::Fleet;
use kvlane_fleet::discovery::config::{Discovery, Kubernetes};
use kvlane_fleet::discovery::{DNS, FILE, KUBERNETES, Seen, Source};
use kvlane_fleet::panics::persist;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The sources, and where they run.
pub(crate) struct Sources {
    fleet: Arc<Fleet>,
    controller: Arc<Controller>,
    runtime: Handle,
    stop: CancellationToken,
    tasks: TaskTracker,
    running: Mutex<BTreeMap<&'static str, Running>>,
}

/// What a source is asked for.
#[derive(Clone, Debug, PartialEq)]
enum Wanted {
    File(PathBuf),
    Dns(Vec<String>),
    Kubernetes(Kubernetes),
}

/// A source that has been started.
struct Running {
    /// None: it has been switched off, and its workers leave.
    wanted: Option<Wanted>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

// === impl Sources ===

impl Sources {
    /// No sources yet. They will run on `runtime`, until `stop`.
    pub(crate) fn new(
        fleet: Arc<Fleet>,
        controller: Arc<Controller>,
        runtime: Handle,
        stop: CancellationToken,
    ) -> Self {
        let (tasks, running) = (TaskTracker::new(), Mutex::default());
        Self { fleet, controller, runtime, stop, tasks, running }
    }

    /// Starts, restarts and stops sources. One whose settings are unchanged goes on. The workers of one that is
    /// switched off leave; those of one that is changed stay until it has published.
    pub(crate) fn configure(&self, config: &Discovery) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, wanted) in wanted(config) {
            let before = running.remove(name);
            if before.as_ref().map_or(wanted.is_none(), |before| before.wanted == wanted) {
                running.extend(before.map(|before| (name, before)));
                continue;
            }
            running.insert(name, self.start(name, wanted, before));
        }
    }

    /// Starts a source, or takes its workers away, once `before` has ended.
    fn start(&self, name: &'static str, wanted: Option<Wanted>, before: Option<Running>) -> Running {
        let stop = self.stop.child_token();
        let before = before.map(|before| {
            before.stop.cancel();
            before.task
        });
        let source = match &wanted {
            Some(wanted) => {
                tracing::info!(source = name, ?wanted, "discovery started");
                Some((wanted.clone(), self.fleet.discovery.source(name, self.fleet.clock)))
            }
            None => {
                tracing::info!(source = name, "discovery stopped; its workers leave");
                self.fleet.discovery.forget(name);
                None
            }
        };
        let (fleet, controller, ends) = (Arc::clone(&self.fleet), Arc::clone(&self.controller), stop.clone());
        let work = async move {
            if let Some(before) = before {
                // Its last change of the fleet precedes the first of this one.
                let _ = before.await;
            }
            match source {
                Some((wanted, (source, seen))) => {
                    tokio::select! {
                        () = work(name, wanted, source, seen, fleet, controller, ends.clone()) => {}
                        () = ends.cancelled() => {}
                    }
                }
                None => controller.withdraw(name),
            }
        };
        let task = self.tasks.spawn_on(work, &self.runtime);
        Running { wanted, stop, task }
    }
}

/// Each source, with what it is asked for.
fn wanted(config: &Discovery) -> [(&'static str, Option<Wanted>); 3] {
    let Discovery { kubernetes, dns, workers_file, .. } = config;
    [
        (FILE, workers_file.clone().map(Wanted::File)),
        (DNS, (!dns.is_empty()).then(|| Wanted::Dns(dns.clone()))),
        (KUBERNETES, kubernetes.enabled.then(|| Wanted::Kubernetes(kubernetes.clone()))),
    ]
}

/// Runs a source, and applies what it publishes.
async fn work(
    name: &'static str,
    wanted: Wanted,
    source: Source,
    seen: Seen,
    fleet: Arc<Fleet>,
    controller: Arc<Controller>,
    stop: CancellationToken,
) {
    let title = format!("discovery by {name}");
    let follow = persist(&title, || Arc::clone(&controller).follow(seen.clone()));
    let run = persist(&title, || {
        let (wanted, source) = (wanted.clone(), source.clone());
        let (fleet, stop) = (Arc::clone(&fleet), stop.clone());
        async move {
            match wanted {
                Wanted::File(path) => file::run(path, source).await,
                Wanted::Dns(urls) => dns::run_with_system(urls, source).await,
                Wanted::Kubernetes(config) => kubernetes(config, source, fleet, stop).await,
            }
        }
    });
    tokio::join!(follow, run);
}

#[cfg(feature = "kubernetes")]
async fn kubernetes(config: Kubernetes, source: Source, fleet: Arc<Fleet>, stop: CancellationToken) {
    kvlane_k8s::run(config, source, fleet, stop).await;
}

/// A configuration that enables it is rejected.
#[cfg(not(feature = "kubernetes"))]
async fn kubernetes(_: Kubernetes, _: Source, _: Arc<Fleet>, _: CancellationToken) {}
