//! Discovery against a small API server, in paused time.

mod model;
mod outages;
mod pools;
mod readiness;
mod selectors;
mod services;
mod socket;

use std::sync::Arc;
use std::time::Duration;

use kvlane_fleet::Fleet;
use kvlane_fleet::clock::Clock;
use kvlane_fleet::discovery::config::Kubernetes;
use kvlane_fleet::discovery::{Seen, Status, Targets};
use kvlane_fleet::settings::Settings;
use kvlane_fleet::tokenize::{Tokenizers, Tokens};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::access::Access;
use crate::collection::PODS;
use crate::run::discover;
use crate::testing::Server;

/// A gateway that discovers.
struct World {
    server: Server,
    fleet: Arc<Fleet>,
    seen: Seen,
    /// What was published last.
    targets: Targets,
    /// How often.
    published: usize,
    tasks: JoinSet<()>,
}

impl World {
    fn new(server: &Server, config: Kubernetes) -> Self {
        Self::with(server, config, Access::given(server.client()))
    }

    fn with(server: &Server, config: Kubernetes, access: Access) -> Self {
        let tokenizers = Tokenizers::start(&Tokens::default(), &Default::default()).expect("threads");
        let drained = tokio::sync::mpsc::unbounded_channel().0;
        let fleet =
            Arc::new(Fleet::new(Settings::default(), Arc::default(), Clock::start(1.0), tokenizers, drained));
        let (source, seen) = fleet.discovery.source("kubernetes", fleet.clock);
        let mut tasks = JoinSet::new();
        tasks.spawn(discover(config, access, source, Arc::clone(&fleet)));
        let (server, targets, published) = (server.clone(), Targets::default(), 0);
        Self { server, fleet, seen, targets, published, tasks }
    }

    /// Waits until it is so.
    async fn until(&mut self, what: &str, is_so: impl Fn(&Targets, &Status) -> bool) -> Duration {
        let began = Instant::now();
        loop {
            if is_so(&self.targets, &self.seen.status()) {
                return began.elapsed();
            }
            assert!(!self.tasks.is_empty() && self.tasks.try_join_next().is_none(), "discovery has ended");
            let status = self.seen.status();
            assert!(
                began.elapsed() < Duration::from_secs(600),
                "{what}: {:?} {status:?} {:?}",
                self.urls(),
                self.server.asked().iter().rev().take(4).collect::<Vec<_>>()
            );
            if let Ok(Some(targets)) = timeout(Duration::from_millis(5), self.seen.next()).await {
                self.targets = (*targets).clone();
                self.published += 1;
            }
        }
    }

    /// Waits until these are the workers, in this order; `!` stands before those that take no new requests.
    async fn until_urls(&mut self, urls: &[&str]) -> Duration {
        self.until(&format!("{urls:?}"), |targets, status| {
            status.confirmed.is_some() && told(targets) == urls
        })
        .await
    }

    async fn until_problem(&mut self, part: &str) -> Duration {
        self.until(part, |_, status| status.problem.as_ref().is_some_and(|problem| problem.contains(part)))
            .await
    }

    /// Waits until it names a problem that contains this.
    async fn until_left_out(&mut self, part: &str) -> Duration {
        self.until(part, |targets, _| targets.problems.iter().any(|problem| problem.contains(part))).await
    }

    fn urls(&self) -> Vec<String> {
        told(&self.targets)
    }

    fn problems(&self) -> Vec<&str> {
        self.targets.problems.iter().map(String::as_str).collect()
    }
}

fn told(targets: &Targets) -> Vec<String> {
    let told = |target: &kvlane_fleet::discovery::Target| {
        let mark = if target.terminating { "!" } else { "" };
        format!("{mark}{}", target.spec.url.trim_start_matches("http://"))
    };
    targets.workers.iter().map(told).collect()
}

/// Pods with the label `app=llm`.
fn by_selector() -> Kubernetes {
    Kubernetes { enabled: true, selector: Some("app=llm".into()), ..Kubernetes::default() }
}

/// A pod that is ready, with the label `app=llm` and one port, 8000.
fn pod(name: &str, ip: &str) -> Value {
    json!({
        "metadata": {
            "name": name, "uid": format!("uid-{name}"), "labels": {"app": "llm"}, "annotations": {},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {"containers": [{"name": "engine", "image": "vllm", "ports": [{"containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": ip, "conditions": [
            {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"},
        ]},
    })
}

fn with(mut object: Value, change: impl FnOnce(&mut Value)) -> Value {
    change(&mut object);
    object
}

fn set_ready(pod: &mut Value, is_ready: bool) {
    pod["status"]["conditions"][1]["status"] = if is_ready { "True" } else { "False" }.into();
}

/// A pod that is asked to end within `grace` seconds.
fn set_deleted(pod: &mut Value, grace: u64) {
    let ends = k8s_openapi::jiff::Timestamp::now() + Duration::from_secs(grace);
    set_ends(pod, grace, ends);
}

/// A pod that is asked to end within `grace` seconds, which are over at `ends`.
fn set_ends(pod: &mut Value, grace: u64, ends: k8s_openapi::jiff::Timestamp) {
    pod["metadata"]["deletionTimestamp"] = ends.to_string().into();
    pod["metadata"]["deletionGracePeriodSeconds"] = grace.into();
}

/// A server with so many pods, at 10.0.0.1 and on.
fn server_with(pods: usize) -> Server {
    let server = Server::new();
    for n in 1..=pods {
        server.set(&PODS, "serving", pod(&format!("p{n:04}"), &format!("10.0.{}.{}", n / 250, n % 250)));
    }
    server
}
