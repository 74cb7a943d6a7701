//! All that is known of the cluster, and the workers that follow from it. Reads no clock and sends no request.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use kvlane_core::disaggregation::Role;
use kvlane_fleet::catalogue::{ModelSpec, TargetSpec};
use kvlane_fleet::discovery::config::Kubernetes;
use tokio::time::Instant;

use crate::assembly::{Assembled, Engine, assemble};
use crate::collection::{
    Collection, Kind, OBJECTIVES, OLD_OBJECTIVES, OLD_REWRITES, PODS, POOLS, REWRITES, SERVICES, SLICES,
};
use crate::objects::{Any, Deletion, Objective, Pod, Pool, Rewrite, Service, Slice};
use crate::pods::{Context, listed};
use crate::slices;
use crate::watch::{OBJECTS_MAX, Report};

/// How much later than its grace period a pod counts as gone: the kubelet needs a moment for its last words.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// The label of an EndpointSlice that names its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Priorities of objectives beyond these are taken for these.
const PRIORITIES: std::ops::RangeInclusive<i64> = -100..=100;

/// All that is known of the cluster.
pub(crate) struct State {
    config: Kubernetes,
    views: Vec<View>,
    /// Keys of the engines that have been ready.
    joined: HashSet<String>,
}

/// Pods of one namespace by one way.
struct View {
    namespace: String,
    way: Way,
    pods: BTreeMap<String, Known>,
    /// Whether all pods were ever listed.
    knows_pods: bool,
    slices: BTreeMap<String, Slice>,
    /// Whether all slices were ever listed.
    knows_slices: bool,
    /// The Service, or what is known of it.
    service: Asked<Service>,
    /// The InferencePool.
    pool: Asked<Pool>,
    objectives: BTreeMap<String, Objective>,
    /// From the group before.
    old_objectives: BTreeMap<String, Objective>,
    rewrites: BTreeMap<String, Rewrite>,
    /// From the group before.
    old_rewrites: BTreeMap<String, Rewrite>,
}

/// How pods are named.
#[derive(Clone, Debug)]
enum Way {
    /// By labels.
    Labels { key: &'static str, selector: String, role: Option<Role> },
    /// By a Service.
    Service(String),
    /// By an InferencePool.
    Pool(String),
}

/// A pod.
struct Known {
    pod: Pod,
    /// When it is gone, whether that is reported or not.
    leaves: Option<Instant>,
}

/// An object that names pods.
#[derive(Clone, Debug, Default, PartialEq)]
enum Asked<T> {
    /// Nothing is known yet.
    #[default]
    Unknown,
    /// There is none of this name.
    None,
    /// It may not be read.
    Denied,
    /// It.
    There(T),
}

/// A watch: a place in `State::views`, and a kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchId {
    /// The view.
    pub(crate) view: usize,
    /// The kind of objects.
    pub(crate) kind: &'static Kind,
}

/// A watch that should run.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Which.
    pub(crate) id: WatchId,
    /// What it watches.
    pub(crate) collection: Collection,
    /// Whether discovery does without it.
    pub(crate) optional: bool,
}

/// The time, by the clock that deadlines use and by that of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    /// Of this process.
    pub(crate) instant: Instant,
    /// Seconds since 1970.
    pub(crate) unix: f64,
}

// === impl State ===

impl State {
    /// Nothing is known yet. `namespace` is where pods are looked for if the configuration does not say it.
    pub(crate) fn new(config: Kubernetes, namespace: &str) -> Self {
        let mut ways = Vec::new();
        let named = [
            ("selector", &config.selector, None),
            ("prefill_selector", &config.prefill_selector, Some(Role::Prefill)),
            ("decode_selector", &config.decode_selector, Some(Role::Decode)),
        ];
        for (key, selector, role) in named {
            ways.extend(selector.clone().map(|selector| Way::Labels { key, selector, role }));
        }
        ways.extend(config.service.clone().map(Way::Service));
        ways.extend(config.inference_pool.clone().map(Way::Pool));
        let mut namespaces = config.namespaces.clone();
        if namespaces.is_empty() {
            namespaces.push(namespace.to_owned());
        }
        namespaces.sort_unstable();
        namespaces.dedup();
        let views = namespaces
            .iter()
            .flat_map(|namespace| ways.iter().map(|way| View::new(namespace.clone(), way.clone())))
            .collect();
        Self { config, views, joined: HashSet::new() }
    }

    /// The watches that what is known calls for.
    pub(crate) fn wanted(&self) -> Vec<Wanted> {
        self.views.iter().enumerate().flat_map(|(place, view)| view.wanted(place)).collect()
    }

    /// Takes in what a watch reports.
    pub(crate) fn apply(&mut self, id: WatchId, report: Report, now: Now) {
        let Some(view) = self.views.get_mut(id.view) else { return };
        match report {
            Report::Listed(objects) => view.replace(id.kind, objects, now),
            Report::Changed(object) => view.change(id.kind, object, now),
            Report::Gone(name) => view.remove(id.kind, &name),
            Report::Absent(_) => view.deny(id.kind),
            Report::Contact | Report::Failed(_) => {}
        }
    }

    /// Whether any part is known: before that, there is nothing to be said.
    pub(crate) fn is_known(&self) -> bool {
        self.views.iter().any(View::is_known)
    }

    /// All workers.
    pub(crate) fn targets(&mut self, now: Instant) -> Assembled {
        let (mut engines, mut problems) = (Vec::new(), Vec::new());
        for view in self.views.iter().filter(|view| view.is_known()) {
            view.engines(&self.config.ports, &mut engines, &mut problems);
        }
        assemble(engines, problems, &mut self.joined, now)
    }

    /// The priorities of all InferenceObjectives of the pools.
    pub(crate) fn objectives(&self) -> BTreeMap<String, i8> {
        let mut priorities = BTreeMap::new();
        for view in &self.views {
            let Way::Pool(pool) = &view.way else { continue };
            let all = view.old_objectives.values().chain(view.objectives.values());
            for objective in all.filter(|objective| objective.pool.as_ref().is_none_or(|of| of == pool)) {
                let priority = objective.priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
                priorities.insert(objective.name.clone(), i8::try_from(priority).unwrap_or(0));
            }
        }
        priorities
    }

    /// The names of models by all InferenceModelRewrites of the pools, and what of those has no effect.
    pub(crate) fn rewrites(&self) -> (BTreeMap<String, ModelSpec>, Vec<String>) {
        let (mut models, mut problems) = (BTreeMap::new(), Vec::new());
        for view in &self.views {
            let Way::Pool(pool) = &view.way else { continue };
            let of_pool = |rewrite: &&Rewrite| rewrite.pool.as_ref().is_none_or(|of| of == pool);
            let mut all: Vec<_> =
                view.rewrites.values().chain(view.old_rewrites.values()).filter(of_pool).collect();
            all.sort_by_key(|rewrite| rewrite.created);
            for (rewrite, rule) in
                all.iter().flat_map(|rewrite| rewrite.rules.iter().map(move |rule| (rewrite, rule)))
            {
                if rule.models.iter().all(String::is_empty) {
                    problems.push(format!(
                        "the InferenceModelRewrite {} has a rule for all models, which has no effect: name the models",
                        rewrite.name
                    ));
                }
                let target = |(model, weight): &(String, u32)| TargetSpec::new(model, *weight);
                let spec =
                    ModelSpec { targets: rule.targets.iter().map(target).collect(), ..ModelSpec::default() };
                for name in rule.models.iter().filter(|name| !name.is_empty()) {
                    // The oldest applies, and of that the first rule.
                    models.entry(name.clone()).or_insert_with(|| spec.clone());
                }
            }
        }
        (models, problems)
    }
}

// === impl WatchId ===

impl WatchId {
    /// Whether it is about InferenceModelRewrites, of either group.
    pub(crate) fn is_rewrites(self) -> bool {
        std::ptr::eq(self.kind, &REWRITES) || std::ptr::eq(self.kind, &OLD_REWRITES)
    }

    /// Whether it is about what does not name workers, and is in one of two groups.
    pub(crate) fn is_extra(self) -> bool {
        self.is_rewrites() || std::ptr::eq(self.kind, &OBJECTIVES) || std::ptr::eq(self.kind, &OLD_OBJECTIVES)
    }
}

impl PartialEq for WatchId {
    fn eq(&self, other: &Self) -> bool {
        self.view == other.view && std::ptr::eq(self.kind, other.kind)
    }
}

// === impl View ===

impl View {
    fn new(namespace: String, way: Way) -> Self {
        Self {
            namespace,
            way,
            pods: BTreeMap::new(),
            knows_pods: false,
            slices: BTreeMap::new(),
            knows_slices: false,
            service: Asked::Unknown,
            pool: Asked::Unknown,
            objectives: BTreeMap::new(),
            old_objectives: BTreeMap::new(),
            rewrites: BTreeMap::new(),
            old_rewrites: BTreeMap::new(),
        }
    }

    /// Whether it is known which engines there are.
    fn is_known(&self) -> bool {
        match (&self.way, &self.pool) {
            (Way::Labels { .. }, _) => self.knows_pods,
            (Way::Service(_), _) => self.knows_slices,
            (Way::Pool(_), Asked::There(pool)) => self.knows_pods || pool.selector.is_empty(),
            (Way::Pool(_), pool) => *pool == Asked::None,
        }
    }

    fn wanted(&self, place: usize) -> Vec<Wanted> {
        let watch = |kind: &'static Kind, labels: Option<String>, name: Option<&str>, optional| Wanted {
            id: WatchId { view: place, kind },
            collection: Collection {
                kind,
                namespace: self.namespace.clone(),
                labels: labels.filter(|labels| !labels.is_empty()),
                name: name.map(str::to_owned),
            },
            optional,
        };
        match &self.way {
            Way::Labels { selector, .. } => vec![watch(&PODS, Some(selector.clone()), None, false)],
            Way::Service(name) => {
                let of_service = Some(format!("{SERVICE_NAME}={name}"));
                let mut all = vec![
                    watch(&SLICES, of_service, None, false),
                    // Only to know which pods it selects, to read their annotations.
                    watch(&SERVICES, None, Some(name), true),
                ];
                let selector = match &self.service {
                    Asked::Unknown | Asked::None => None,
                    Asked::Denied => Some(String::new()),
                    Asked::There(service) => Some(joined(&service.selector)),
                };
                all.extend(selector.map(|selector| watch(&PODS, Some(selector), None, true)));
                all
            }
            Way::Pool(name) => {
                let mut all = vec![watch(&POOLS, None, Some(name), false)];
                if let Asked::There(pool) = &self.pool
                    && !pool.selector.is_empty()
                {
                    all.push(watch(&PODS, Some(joined(&pool.selector)), None, false));
                }
                let extra = [&OBJECTIVES, &OLD_OBJECTIVES, &REWRITES, &OLD_REWRITES];
                all.extend(extra.map(|kind| watch(kind, None, None, true)));
                all
            }
        }
    }

    /// These are all objects of a kind.
    fn replace(&mut self, kind: &'static Kind, objects: Vec<Any>, now: Now) {
        let before = if std::ptr::eq(kind, &PODS) { std::mem::take(&mut self.pods) } else { BTreeMap::new() };
        // The pods of a Service or InferencePool that is there, as before, are not forgotten.
        let is_anchor = std::ptr::eq(kind, &SERVICES) || std::ptr::eq(kind, &POOLS);
        if !is_anchor || objects.is_empty() {
            self.clear(kind);
        }
        self.knows_pods |= std::ptr::eq(kind, &PODS);
        self.knows_slices |= std::ptr::eq(kind, &SLICES);
        for object in objects {
            match object {
                Any::Pod(pod) => {
                    let known = Known::new(pod, |name| before.get(name), now);
                    self.pods.insert(known.pod.name.clone(), known);
                }
                object => self.change(kind, object, now),
            }
        }
    }

    /// An object is new, or another than before.
    fn change(&mut self, kind: &'static Kind, object: Any, now: Now) {
        match object {
            // The next list fails, and says what to do.
            Any::Pod(pod) if is_full(&self.pods, &pod.name) => {}
            Any::Slice(slice) if is_full(&self.slices, &slice.name) => {}
            Any::Rewrite(rewrite) if is_full(self.rewrites_of(kind), &rewrite.name) => {}
            Any::Objective(objective) if is_full(self.objectives_of(kind), &objective.name) => {}
            Any::Pod(pod) => {
                let known = Known::new(pod, |name| self.pods.get(name), now);
                self.pods.insert(known.pod.name.clone(), known);
            }
            Any::Slice(slice) => {
                self.slices.insert(slice.name.clone(), slice);
            }
            Any::Service(service) => self.service = Asked::There(service),
            Any::Pool(pool) => {
                if pool.selector.is_empty() {
                    self.clear(&PODS);
                }
                self.pool = Asked::There(pool);
            }
            Any::Objective(objective) => {
                self.objectives_of(kind).insert(objective.name.clone(), objective);
            }
            Any::Rewrite(rewrite) => {
                self.rewrites_of(kind).insert(rewrite.name.clone(), rewrite);
            }
        }
    }

    /// The object of this name is gone.
    fn remove(&mut self, kind: &'static Kind, name: &str) {
        if std::ptr::eq(kind, &PODS) {
            self.pods.remove(name);
        } else if std::ptr::eq(kind, &SLICES) {
            self.slices.remove(name);
        } else if std::ptr::eq(kind, &OBJECTIVES) || std::ptr::eq(kind, &OLD_OBJECTIVES) {
            self.objectives_of(kind).remove(name);
        } else if std::ptr::eq(kind, &REWRITES) || std::ptr::eq(kind, &OLD_REWRITES) {
            self.rewrites_of(kind).remove(name);
        } else {
            self.clear(kind);
        }
    }

    /// There is no object of a kind.
    fn clear(&mut self, kind: &'static Kind) {
        if std::ptr::eq(kind, &PODS) {
            self.pods.clear();
        } else if std::ptr::eq(kind, &SLICES) {
            self.slices.clear();
        } else if std::ptr::eq(kind, &SERVICES) {
            self.service = Asked::None;
            self.pods.clear();
        } else if std::ptr::eq(kind, &POOLS) {
            self.pool = Asked::None;
            (self.pods, self.knows_pods) = (BTreeMap::new(), false);
        } else if std::ptr::eq(kind, &REWRITES) || std::ptr::eq(kind, &OLD_REWRITES) {
            self.rewrites_of(kind).clear();
        } else {
            self.objectives_of(kind).clear();
        }
    }

    /// Objects of a kind may not be read, or are not known to the API server.
    fn deny(&mut self, kind: &'static Kind) {
        if std::ptr::eq(kind, &SERVICES) {
            self.service = Asked::Denied;
        } else {
            self.clear(kind);
        }
    }

    fn objectives_of(&mut self, kind: &'static Kind) -> &mut BTreeMap<String, Objective> {
        if std::ptr::eq(kind, &OBJECTIVES) { &mut self.objectives } else { &mut self.old_objectives }
    }

    fn rewrites_of(&mut self, kind: &'static Kind) -> &mut BTreeMap<String, Rewrite> {
        if std::ptr::eq(kind, &REWRITES) { &mut self.rewrites } else { &mut self.old_rewrites }
    }

    /// The engines that it names.
    fn engines(&self, ports: &[u16], engines: &mut Vec<Engine>, problems: &mut Vec<String>) {
        let (namespace, before) = (self.namespace.as_str(), engines.len());
        let context = Context { namespace, ports, ports_key: "discovery.kubernetes.ports", role: None };
        match &self.way {
            Way::Labels { key, selector, role } => {
                let context = Context { role: *role, ..context };
                self.pod_engines(&context, engines, problems);
                if self.pods.is_empty() {
                    problems.push(format!(
                        "no pod in namespace {namespace} has the labels `{selector}`: check \
                         discovery.kubernetes.{key} and .namespaces against `kubectl get pods -n {namespace} \
                         --show-labels`"
                    ));
                }
            }
            Way::Service(name) => {
                let pods: HashMap<&str, (&Pod, Option<Instant>)> =
                    self.pods.values().map(|known| (known.pod.uid.as_str(), (&known.pod, known.leaves))).collect();
                slices::engines(&context, self.slices.values(), &pods, engines, problems);
                if self.service == Asked::None {
                    problems.push(format!(
                        "there is no Service {name} in namespace {namespace}: check discovery.kubernetes.service and \
                         .namespaces"
                    ));
                } else if engines.len() == before {
                    problems.push(format!(
                        "the Service {name} in namespace {namespace} has no endpoints: check its selector against \
                         `kubectl get pods -n {namespace} --show-labels`"
                    ));
                }
            }
            Way::Pool(name) => match &self.pool {
                Asked::There(pool) => {
                    let context = Context { ports: &pool.ports, ports_key: "its spec.targetPorts", ..context };
                    self.pod_engines(&context, engines, problems);
                    problems.extend(self.pool_problem(name, pool));
                }
                _ => problems.push(format!(
                    "there is no InferencePool {name} in namespace {namespace}: create it, or check \
                     discovery.kubernetes.inference_pool and .namespaces against `kubectl get inferencepools -A`"
                )),
            },
        }
    }

    fn pod_engines(&self, context: &Context<'_>, engines: &mut Vec<Engine>, problems: &mut Vec<String>) {
        for known in self.pods.values() {
            context.engines(&known.pod, known.leaves, engines, problems);
        }
        problems.extend(self.undeclared(context));
    }

    /// A port that no pod declares is used all the same, because nothing makes pods declare their ports; but it is rather a
    /// mistake.
    fn undeclared(&self, context: &Context<'_>) -> Option<String> {
        let pods = || self.pods.values().map(|known| &known.pod);
        let example = pods().find(|pod| !pod.ports.is_empty())?;
        let declares = |pod: &Pod, number: u16| {
            pod.ports.is_empty() || pod.ports.iter().any(|port| port.number == number)
        };
        let port = context.ports.iter().find(|port| !pods().any(|pod| declares(pod, **port)))?;
        let declared: Vec<u16> = example.ports.iter().map(|port| port.number).collect();
        Some(format!(
            "no pod in namespace {} declares the port {port}, which is used all the same; pod {} declares {}: check {}",
            context.namespace,
            example.name,
            listed(&declared),
            context.ports_key
        ))
    }

    fn pool_problem(&self, name: &str, pool: &Pool) -> Option<String> {
        let said = format!("the InferencePool {name} in namespace {}", self.namespace);
        if pool.selector.is_empty() {
            return Some(format!("{said} selects nothing: set its spec.selector.matchLabels"));
        }
        if pool.protocol.as_deref() == Some("kubernetes.io/h2c") {
            return Some(format!(
                "{said} has the appProtocol kubernetes.io/h2c: its engines are sent HTTP/1.1, which they must accept, too"
            ));
        }
        self.pods.is_empty().then(|| {
            format!(
                "{said} selects no pod: no pod has the labels `{}`; check its spec.selector against `kubectl get pods -n \
                 {} --show-labels`",
                joined(&pool.selector),
                self.namespace
            )
        })
    }
}

// === impl Known ===

impl Known {
    fn new<'a>(pod: Pod, before: impl FnOnce(&str) -> Option<&'a Self>, now: Now) -> Self {
        let before = before(&pod.name).filter(|before| before.pod.uid == pod.uid);
        let leaves = pod.deletion.map(|deletion| {
            let leaves = now.instant + left(deletion, now.unix) + LAST_WORDS;
            before.and_then(|before| before.leaves).map_or(leaves, |earlier| leaves.min(earlier))
        });
        Self { pod, leaves }
    }
}

/// What is left of a pod's grace. The clocks of the cluster and of this machine may differ, so that it is never more than
/// the whole grace period.
fn left(deletion: Deletion, unix: f64) -> Duration {
    let grace = deletion.grace as f64;
    let left = deletion.at.map_or(grace, |at| at as f64 - unix);
    Duration::from_secs_f64(left.clamp(0.0, grace))
}

/// Whether there is no room for another object of this name.
fn is_full<T>(objects: &BTreeMap<String, T>, name: &str) -> bool {
    objects.len() >= OBJECTS_MAX && !objects.contains_key(name)
}

/// A label selector for all of these labels.
fn joined(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}
