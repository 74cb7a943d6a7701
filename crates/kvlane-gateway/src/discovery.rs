//! The sources of discovery of a running gateway: started, changed and stopped as the configuration says; and one
//! question to the sources of a configuration, without a gateway.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvlane_control::Controller;
use kvlane_control::discovery::{dns, file};
use kvlane_fleet::Fleet;
use kvlane_fleet::clock::Clock;
use kvlane_fleet::discovery::config::{Discovery, Kubernetes};
use kvlane_fleet::discovery::{DNS, FILE, KUBERNETES, Seen, Source, Targets};
use kvlane_fleet::panics::persist;
use kvlane_fleet::timings::Timings;
use kvlane_fleet::tokenize::{Tokenizers, Tokens};
use kvlane_fleet::worker::config::WorkerSpec;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;

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

/// What a source of a configuration names at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The source's name.
    pub source: &'static str,
    /// The workers that it names and that are not about to end.
    pub workers: Vec<WorkerSpec>,
    /// What cannot be resolved or read, or was left out, and why.
    pub problems: Vec<String>,
}

/// Asks each source of a configuration once which workers there are; a Kubernetes API server gets `within` to answer.
///
/// # Errors
/// The threads that a source needs cannot be started.
pub async fn find_once(config: &Config, within: Duration) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for (source, wanted) in wanted(&config.discovery) {
        let (targets, mut problems) = match wanted {
            None => continue,
            Some(Wanted::File(path)) => match file::read(&path) {
                Ok(targets) => (targets, Vec::new()),
                Err(problem) => (Targets::default(), vec![format!("{}: {problem}", path.display())]),
            },
            Some(Wanted::Dns(urls)) => dns::resolve_once(&urls).await,
            Some(Wanted::Kubernetes(kubernetes)) => watched_once(config, kubernetes, within).await?,
        };
        problems.extend(targets.problems);
        let stays = targets.workers.into_iter().filter(|target| !target.terminating);
        found.push(Found { source, workers: stays.map(|target| target.spec).collect(), problems });
    }
    Ok(found)
}

/// What a Kubernetes API server names first.
async fn watched_once(
    config: &Config,
    wanted: Kubernetes,
    within: Duration,
) -> io::Result<(Targets, Vec<String>)> {
    let tokenizers = Tokenizers::start(&Tokens::default(), &BTreeMap::new())?;
    let (drained, _) = mpsc::unbounded_channel();
    let settings = config.fleet_settings(Timings::default());
    let clock = Clock::start(1.0);
    let fleet = Arc::new(Fleet::new(settings, Arc::default(), clock, tokenizers, drained));
    let (source, mut seen) = fleet.discovery.source(KUBERNETES, clock);
    let stop = CancellationToken::new();
    let targets = tokio::select! {
        targets = timeout(within, seen.next()) => targets.ok().flatten(),
        () = kubernetes(wanted, source, Arc::clone(&fleet), stop.clone()) => None,
    };
    stop.cancel();
    let status = seen.status();
    let problem = match &targets {
        None => Some(status.problem.unwrap_or_else(|| format!("no answer within {within:?}"))),
        Some(_) => status.problem,
    };
    let targets = targets.map(|targets| Targets::clone(&targets)).unwrap_or_default();
    Ok((targets, problem.into_iter().collect()))
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
