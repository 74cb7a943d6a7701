//! Runs the watches, and publishes what follows from them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvlane_fleet::Fleet;
use kvlane_fleet::catalogue::ModelSpec;
use kvlane_fleet::clock::unix_time;
use kvlane_fleet::discovery::Source;
use kvlane_fleet::discovery::config::Kubernetes;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::collection::{Collection, PODS, POOLS, SERVICES, SLICES};
use crate::objects::{Objective, Pod, Pool, Rewrite, Service, Slice};
use crate::state::{Now, State, Wanted, WatchId};
use crate::watch::{Report, Watch, pause_unreachable};

/// The least time between two publications. The first change of many is published at once, the rest together.
const PUBLISH: Duration = Duration::from_millis(50);
/// How long the first publication waits for a watch that cannot say what there is.
const PATIENCE: Duration = Duration::from_secs(10);
/// Reports that wait to be taken in.
const REPORTS_MAX: usize = 1024;
/// Watches whose problems are told at once.
const PROBLEMS_MAX: usize = 3;

/// A report, and of which watch.
struct Message {
    id: WatchId,
    /// Of watches with one id, which one after the other watch different labels.
    generation: u64,
    report: Report,
}

/// Discovery while it runs.
struct Discovery {
    access: Arc<Access>,
    source: Source,
    fleet: Arc<Fleet>,
    state: State,
    watches: Vec<Running>,
    tasks: JoinSet<()>,
    sender: mpsc::Sender<Message>,
    generation: u64,
    /// Something has changed since the last publication.
    changed: bool,
    published: Option<Instant>,
    /// When the next worker leaves though nothing is reported.
    next: Option<Instant>,
    /// What was last found not to be right.
    problems: Vec<String>,
    /// The names of models that InferenceModelRewrites lead on, as they were last found.
    rewrites: BTreeMap<String, ModelSpec>,
    /// What is wrong with some of them.
    wrong: Vec<String>,
    /// The source was last said to have a problem.
    failing: bool,
}

/// A watch that runs.
struct Running {
    wanted: Wanted,
    generation: u64,
    task: AbortHandle,
    /// It has reported what there is.
    reported: bool,
    /// Until when it is waited for.
    awaited: Instant,
    /// It was in contact since the source was last confirmed.
    contact: bool,
    /// Why it does not know what there is at present.
    problem: Option<String>,
    /// Why there is nothing to watch.
    absent: Option<String>,
}

/// Watches what the configuration names, and publishes the workers, until it is stopped.
pub async fn run(config: Kubernetes, source: Source, fleet: Arc<Fleet>, stop: CancellationToken) {
    let access = Access::new(config.kubeconfig.clone());
    stop.run_until_cancelled(discover(config, access, source, fleet)).await;
}

pub(crate) async fn discover(config: Kubernetes, access: Access, source: Source, fleet: Arc<Fleet>) {
    let mut failures = 0;
    let namespace = loop {
        match access.client().await {
            Ok((client, _)) => break client.default_namespace().to_owned(),
            Err(problem) => fail(&source, problem),
        }
        sleep(pause_unreachable(failures)).await;
        failures += 1;
    };
    let (sender, mut receiver) = mpsc::channel(REPORTS_MAX);
    let mut discovery = Discovery {
        access: Arc::new(access),
        source,
        fleet,
        state: State::new(config, &namespace),
        watches: Vec::new(),
        tasks: JoinSet::new(),
        sender,
        generation: 0,
        changed: false,
        published: None,
        next: None,
        problems: Vec::new(),
        rewrites: BTreeMap::new(),
        wrong: Vec::new(),
        failing: false,
    };
    discovery.start_and_stop();
    loop {
        let wake = discovery.wake();
        tokio::select! {
            message = receiver.recv() => match message {
                Some(message) => {
                    discovery.take(message);
                    // What else is there goes into the same publication.
                    for _ in 0..REPORTS_MAX {
                        let Ok(message) = receiver.try_recv() else { break };
                        discovery.take(message);
                    }
                }
                None => return,
            },
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            Some(ended) = discovery.tasks.join_next() => {
                // A watch ends when it is stopped, or by a panic, with which all begins anew.
                if let Err(error) = ended
                    && let Ok(panic) = error.try_into_panic()
                {
                    std::panic::resume_unwind(panic);
                }
            }
        }
        discovery.publish();
    }
}

// === impl Discovery ===

impl Discovery {
    /// When something is to be done though nothing is reported.
    fn wake(&self) -> Option<Instant> {
        let now = Instant::now();
        if let Some(settles) = self.settles()
            && settles > now
        {
            return Some(settles);
        }
        let publish = self.published.filter(|_| self.changed).map(|at| at + PUBLISH);
        publish.into_iter().chain(self.next).min()
    }

    fn take(&mut self, message: Message) {
        let Message { id, generation, report } = message;
        let Some(watch) =
            self.watches.iter_mut().find(|watch| watch.wanted.id == id && watch.generation == generation)
        else {
            return;
        };
        watch.reported |= !matches!(report, Report::Contact | Report::Failed(_));
        match &report {
            Report::Failed(problem) => watch.problem = Some(problem.clone()),
            Report::Absent(why) => {
                (watch.problem, watch.contact) = (None, true);
                let news = watch.absent.as_ref() != Some(why);
                watch.absent = Some(why.clone());
                // InferenceObjectives and InferenceModelRewrites are in one of two groups, or in none.
                let is_told = |watch: &Running| !watch.wanted.id.is_extra() || watch.absent.is_some();
                if news && self.watches.iter().filter(|watch| watch.wanted.id.view == id.view).all(is_told) {
                    tracing::info!(why, "Kubernetes discovery goes on without something optional");
                }
            }
            Report::Contact => watch.contact = true,
            Report::Listed(_) | Report::Changed(_) | Report::Gone(_) => {
                (watch.problem, watch.contact, watch.absent) = (None, true, None);
            }
        }
        if matches!(report, Report::Contact | Report::Failed(_)) {
            return;
        }
        self.state.apply(id, report, Now { instant: Instant::now(), unix: unix_time() });
        self.changed = true;
        if std::ptr::eq(id.kind, &POOLS) || std::ptr::eq(id.kind, &SERVICES) {
            self.start_and_stop();
        }
    }

    /// Starts watches that are wanted, and stops others.
    fn start_and_stop(&mut self) {
        let wanted = self.state.wanted();
        let is_wanted = |running: &Running| {
            let same = |other: &Wanted| {
                other.id == running.wanted.id && other.collection == running.wanted.collection
            };
            wanted.iter().any(same)
        };
        self.watches.retain(|running| {
            let keeps = is_wanted(running);
            if !keeps {
                running.task.abort();
            }
            keeps
        });
        for wanted in wanted {
            if self.watches.iter().any(|running| running.wanted.id == wanted.id) {
                continue;
            }
            self.generation += 1;
            let task = self.start(wanted.id, wanted.collection.clone(), wanted.optional);
            self.watches.push(Running {
                wanted,
                generation: self.generation,
                task,
                reported: false,
                awaited: Instant::now() + PATIENCE,
                contact: false,
                problem: None,
                absent: None,
            });
        }
    }

    fn start(&mut self, id: WatchId, collection: Collection, optional: bool) -> AbortHandle {
        let (access, sender, generation) = (Arc::clone(&self.access), self.sender.clone(), self.generation);
        let message = move |report| Message { id, generation, report };
        let watch = Watch { access, collection, optional, message };
        match id.kind {
            kind if std::ptr::eq(kind, &PODS) => self.tasks.spawn(watch.run::<Pod, _>(sender)),
            kind if std::ptr::eq(kind, &SLICES) => self.tasks.spawn(watch.run::<Slice, _>(sender)),
            kind if std::ptr::eq(kind, &SERVICES) => self.tasks.spawn(watch.run::<Service, _>(sender)),
            kind if std::ptr::eq(kind, &POOLS) => self.tasks.spawn(watch.run::<Pool, _>(sender)),
            _ if id.is_rewrites() => self.tasks.spawn(watch.run::<Rewrite, _>(sender)),
            kind => {
                debug_assert!(id.is_extra(), "{kind:?}");
                self.tasks.spawn(watch.run::<Objective, _>(sender))
            }
        }
    }

    /// When the last watch that is waited for has said what there is, or has had its time. Before that, workers would be missing; and a source that is started again, as by a reload, may have
    /// published them.
    fn settles(&self) -> Option<Instant> {
        let is_awaited = |watch: &&Running| !watch.reported && !watch.wanted.id.is_extra();
        self.watches.iter().filter(is_awaited).map(|watch| watch.awaited).max()
    }

    /// Publishes what has changed, if it is time, and says how current it is.
    fn publish(&mut self) {
        let now = Instant::now();
        if self.settles().is_some_and(|settles| settles > now) {
            self.failing |= self.tell_problem();
            return;
        }
        let is_due = self.changed && self.published.is_none_or(|published| now >= published + PUBLISH);
        if is_due || self.next.is_some_and(|next| now >= next) {
            let mut assembled = self.state.targets(now);
            self.next = assembled.next;
            let (rewrites, mut wrong) = self.state.rewrites();
            if self.rewrites != rewrites {
                self.wrong = self.fleet.find_models(rewrites.clone());
                tracing::info!(models = rewrites.len(), "names of InferenceModelRewrites changed");
                self.rewrites = rewrites;
            }
            wrong.extend_from_slice(&self.wrong);
            assembled.targets.problems.append(&mut wrong);
            // No workers is not the same as not knowing.
            if self.state.is_known() {
                let problems = &assembled.targets.problems;
                for problem in problems.iter().filter(|problem| !self.problems.contains(problem)) {
                    tracing::warn!(problem, "Kubernetes discovery found something that is not right");
                }
                self.problems.clone_from(problems);
                self.source.put(assembled.targets);
            }
            let objectives = self.state.objectives();
            if **self.fleet.discovery.objectives.load() != objectives {
                tracing::info!(objectives = objectives.len(), "priorities of InferenceObjectives changed");
                self.fleet.discovery.objectives.store(Arc::new(objectives));
            }
            self.changed = false;
            self.published = Some(now);
        }
        if self.tell_problem() {
            self.failing = true;
            return;
        }
        // Each watch has been in contact since the last time; one that was back last has just listed all there is.
        if self.failing || self.watches.iter().all(|watch| watch.contact || watch.absent.is_some()) {
            for watch in &mut self.watches {
                watch.contact = false;
            }
            self.source.confirm();
            if std::mem::take(&mut self.failing) {
                tracing::info!("Kubernetes discovery is in contact again");
            }
        }
    }

    /// Says why not all is known at present, if so.
    fn tell_problem(&self) -> bool {
        let mut problems: Vec<&str> =
            self.watches.iter().filter_map(|watch| watch.problem.as_deref()).collect();
        problems.sort_unstable();
        problems.dedup();
        let more = problems.len().saturating_sub(PROBLEMS_MAX);
        problems.truncate(PROBLEMS_MAX);
        let mut told = problems.join("; ");
        if more > 0 {
            told.push_str(&format!("; and {more} more problems"));
        }
        if told.is_empty() {
            return false;
        }
        fail(&self.source, told);
        true
    }
}

fn fail(source: &Source, problem: String) {
    if source.fail(problem.clone()) {
        tracing::warn!(problem, "Kubernetes discovery failed; the fleet stays as it was");
    }
}
