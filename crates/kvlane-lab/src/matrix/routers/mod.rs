//! Comparison of routers on one fleet: a matrix of routers, loads and seeds.
//!
//! One run has one router, one load and one seed: the engines start with empty caches, the router is new, and the
//! requests of that load and seed are sent through it. Every router gets the same requests, so that each request can
//! be compared with itself ([`crate::statistics::paired`]). Changes of the machine over time must not affect one router
//! alone: runs of one load and seed are adjacent, in a random order.
//!
//! [`Matrix`] is the file, [`run`] executes it, [`judge`] computes results, [`show`] prints them.

pub mod judge;
mod machine;
pub mod process;
pub mod ready;
pub mod run;
pub mod show;
mod stage;
pub mod store;
pub mod template;
pub mod workload;

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvlane_core::rng::Rng;
use kvlane_trace::generate;
use kvlane_wire::engine::{self, CacheReset, ENGINES};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::jobs::twice;

/// Maximum engines started by a matrix.
pub const ENGINES_MAX: u32 = 256;
/// Maximum runs of a matrix.
pub const RUNS_MAX: usize = 10_000;

/// The contents of a bench file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// A description for the report.
    #[serde(default)]
    pub about: String,
    /// The engines behind every router.
    pub fleet: Fleet,
    /// The `model` of every request.
    #[serde(default = "model")]
    pub model: String,
    /// Requests.
    pub workload: Workload,
    /// Loads.
    pub loads: Loads,
    /// One run of each router and load for each seed. A seed draws the requests and their times.
    #[serde(default = "seeds")]
    pub seeds: Vec<u32>,
    /// The routers.
    pub routers: Vec<Router>,
    /// The router that the others are compared with; default: the first. With several policies, as `router/policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ours: Option<String>,
    /// Bounds by figure (such as `ttft_mean_s`): up to which load does each router stay within them?
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub within: BTreeMap<String, f64>,
    /// Seed of the order of the runs.
    #[serde(default)]
    pub order_seed: u64,
    /// Warm-up before figures count.
    #[serde(default)]
    pub warm_up: WarmUp,
    /// Client settings.
    #[serde(default)]
    pub client: Client,
}

/// The engines behind every router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fleet {
    /// Number of engines, each started by `command`.
    pub engines: u32,
    /// Command of an engine. Engines are restarted for every run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Running engines, as `http://host:port`, instead of `engines` and `command`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// How their caches are emptied before every run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush: Option<Flush>,
    /// The path that answers 200 when an engine is ready.
    pub ready: Ready,
}

/// How running engines' caches are emptied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Flush {
    /// `POST` to this path.
    Post(String),
    /// A command, once for each engine that it names (`{url}`, `{address}`, `{index}`), else once.
    Command(String),
    /// Not at all: caches are as after the previous run. Only for engines without a cache.
    Nothing,
    /// As the engine of this name does it.
    #[serde(untagged)]
    Engine(String),
}

/// A path, or a complete URL, that answers 200 when the program is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ready(pub String);

/// Requests: one of `trace` and `generate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// A trace of any format that `kvlane trace import` reads, relative to the matrix's file, or one that comes with kvlane:
    /// `mooncake-conversation`, `weka-agentic` or `azure-conversation`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// A generated workload, as in `kvlane trace generate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generate: Option<generate::Workload>,
    /// Length of the window in which requests are sent, in trace seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_s: Option<f64>,
    /// Start of the window in the trace. Without it, drawn from the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_s: Option<f64>,
    /// Trace seconds per wall-clock second. More than 1 only for engines that are faster by the same factor:
    /// `{speed}` in their command. Figures are in trace seconds.
    #[serde(default = "one")]
    pub speed: f64,
}

/// Loads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Loads {
    /// Factors on the rate at which a trace's conversations begin; for generated workloads, conversations per second.
    /// The pace within a conversation does not change.
    Rate(Vec<f64>),
    /// Number of conversations that begin together.
    Sessions(Vec<u32>),
}

/// A router: a [built-in](ready) one, or any other by its command.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Router {
    /// Its name in tables.
    pub router: String,
    /// The built-in router whose settings are its defaults; by default the one of its name, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub like: Option<String>,
    /// Path of its program: `{program}` in its command. Relative to the matrix's file, if it has a slash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Its command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// More words for the command, at its end.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub args: String,
    /// Values of `{policy}`: each is compared as a separate router.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<String>,
    /// Contents of a configuration file, whose path is `{config}` in the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// URL of a running router, instead of a command. It keeps its state from run to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The path, or the complete URL, that answers 200 when it is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    /// Command that prints its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Warm-up before figures count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmUp {
    /// Number of short requests, unlike any other, that must succeed in a row.
    pub requests: u32,
    /// Seconds of the trace at the start whose requests are sent, but not counted.
    pub window_s: f64,
    /// Timeout for engines and routers to become ready.
    pub ready_timeout_s: f64,
}

/// Client settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    /// Timeout of a request, in seconds.
    pub request_timeout_s: f64,
    /// Request answers of exactly the trace's length (`ignore_eos`).
    pub ignore_eos: bool,
    /// Maximum lateness of this client in wall-clock seconds, at the 99th percentile, of requests and of its own
    /// tasks; runs above it are discarded, because the client was the bottleneck.
    pub lag_p99_max_s: f64,
    /// Maximum share of CPU time used by this client; runs above it are discarded.
    pub cpu_share_max: f64,
    /// Environment variable with the API key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
}

/// An invalid matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {why}")]
pub struct MatrixError {
    /// The key.
    pub key: String,
    /// The cause and the remedy.
    pub why: String,
}

/// One column of a matrix: a router with one policy and all settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    /// `router`, or `router/policy` if it has several.
    pub name: String,
    /// The router.
    pub router: Router,
    /// The value of `{policy}`.
    pub policy: Option<String>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The arm's name.
    pub router: String,
    /// The load, in the unit of [`Loads`].
    pub load: f64,
    /// The seed.
    pub seed: u32,
}

fn model() -> String {
    "mock".to_owned()
}

fn seeds() -> Vec<u32> {
    vec![1]
}

fn one() -> f64 {
    1.0
}

impl Default for Ready {
    fn default() -> Self {
        Self("/health".to_owned())
    }
}

impl Default for WarmUp {
    fn default() -> Self {
        Self { requests: 16, window_s: 0.0, ready_timeout_s: 120.0 }
    }
}

impl Default for Client {
    fn default() -> Self {
        Self {
            request_timeout_s: 1800.0,
            ignore_eos: true,
            lag_p99_max_s: 0.05,
            cpu_share_max: 0.9,
            api_key_env: None,
        }
    }
}

// === impl Matrix ===

/// Maximum rate, number of sessions, time in seconds or bound. A `Duration` of this many seconds is valid.
const POSITIVE_MAX: f64 = 1e10;

impl Matrix {
    /// Validates the matrix.
    ///
    /// # Errors
    /// The first invalid key, with the remedy.
    pub fn check(&self) -> Result<(), MatrixError> {
        let fail = |key: &str, why: String| Err(MatrixError { key: key.to_owned(), why });
        let positive = |key: &str, value: f64| match value > 0.0 && value <= POSITIVE_MAX {
            true => Ok(()),
            false => {
                fail(key, format!("{value} is out of range: must be above 0 and at most {POSITIVE_MAX:e}"))
            }
        };
        self.fleet.check()?;
        self.workload.check(&self.loads)?;
        match &self.loads {
            Loads::Rate(rates) => rates.iter().try_for_each(|rate| positive("loads.rate", *rate))?,
            Loads::Sessions(counts) => {
                counts.iter().try_for_each(|count| positive("loads.sessions", f64::from(*count)))?;
            }
        }
        let loads = self.loads.values();
        if let Some(twice) = twice(loads.iter().map(|load| load.to_bits())) {
            return fail("loads", format!("{} occurs twice", f64::from_bits(twice)));
        }
        if loads.is_empty() {
            return fail("loads", "at least one is required".to_owned());
        }
        if let Some(twice) = twice(&self.seeds) {
            return fail("seeds", format!("{twice} occurs twice"));
        }
        if self.seeds.is_empty() {
            return fail("seeds", "at least one is required".to_owned());
        }
        let arms = self.arms()?;
        if arms.is_empty() {
            return fail("routers", "at least one is required".to_owned());
        }
        let names: Vec<&str> = arms.iter().map(|arm| arm.name.as_str()).collect();
        if let Some(ours) = self.ours.as_deref().filter(|ours| !names.contains(ours)) {
            return fail("ours", format!("unknown router '{ours}': known are {}", names.join(", ")));
        }
        let figures = judge::FIGURES;
        for (figure, bound) in &self.within {
            if !figures.contains(&figure.as_str()) {
                return fail(
                    "within",
                    format!("unknown figure '{figure}': known are {}", figures.join(", ")),
                );
            }
            positive(&format!("within.{figure}"), *bound)?;
        }
        if !(0.0..1e9).contains(&self.warm_up.window_s) {
            return fail("warm_up.window_s", format!("{} is not a valid time", self.warm_up.window_s));
        }
        if self.workload.window_s.is_some_and(|window_s| window_s <= self.warm_up.window_s) {
            return fail(
                "warm_up.window_s",
                "must be less than workload.window_s: otherwise no request would count".to_owned(),
            );
        }
        positive("warm_up.ready_timeout_s", self.warm_up.ready_timeout_s)?;
        positive("client.request_timeout_s", self.client.request_timeout_s)?;
        positive("client.lag_p99_max_s", self.client.lag_p99_max_s)?;
        positive("client.cpu_share_max", self.client.cpu_share_max)?;
        let runs = names.len() * self.seeds.len() * loads.len();
        if runs > RUNS_MAX {
            return fail("routers", format!("{runs} runs, the maximum is {RUNS_MAX}"));
        }
        Ok(())
    }

    /// The routers, one for each of their policies, with built-in settings filled in.
    ///
    /// # Errors
    /// If a router has no command, or two have the same name.
    pub fn arms(&self) -> Result<Vec<Arm>, MatrixError> {
        let mut arms: Vec<Arm> = Vec::new();
        for router in &self.routers {
            let router = ready::filled_in(router)?;
            let name = router.router.clone();
            match router.policies.as_slice() {
                [] => arms.push(Arm { name, router, policy: None }),
                [policy] => arms.push(Arm { name, policy: Some(policy.clone()), router: router.clone() }),
                several => arms.extend(several.iter().map(|policy| Arm {
                    name: format!("{name}/{policy}"),
                    router: router.clone(),
                    policy: Some(policy.clone()),
                })),
            }
        }
        match twice(arms.iter().map(|arm| arm.name.as_str())) {
            Some(twice) => Err(MatrixError {
                key: "routers".to_owned(),
                why: format!("'{twice}' occurs twice: rename one of them"),
            }),
            None => Ok(arms),
        }
    }

    /// The name of the arm that the others are compared with.
    pub fn ours(&self) -> Option<String> {
        let first = || Some(self.arms().ok()?.first()?.name.clone());
        self.ours.clone().or_else(first)
    }

    /// All runs in order: loads and seeds are shuffled, and the routers within each of them.
    ///
    /// # Errors
    /// As [`Self::arms`].
    pub fn order(&self) -> Result<Vec<Job>, MatrixError> {
        let mut rng = Rng::new(self.order_seed);
        let mut shuffle = |count: usize| {
            let mut order: Vec<usize> = (0..count).collect();
            (1..count).rev().for_each(|place| order.swap(place, rng.below(place + 1)));
            order
        };
        let arms = self.arms()?;
        let loads = self.loads.values();
        let cells: Vec<(f64, u32)> =
            loads.iter().flat_map(|&load| self.seeds.iter().map(move |&seed| (load, seed))).collect();
        let mut jobs = Vec::with_capacity(cells.len() * arms.len());
        for cell in shuffle(cells.len()) {
            let (load, seed) = cells[cell];
            jobs.extend(shuffle(arms.len()).into_iter().map(|arm| Job {
                router: arms[arm].name.clone(),
                load,
                seed,
            }));
        }
        Ok(jobs)
    }
}

// === impl Flush ===

impl Flush {
    fn is_known(&self) -> bool {
        match self {
            Self::Engine(name) => cache_reset(name).is_some(),
            Self::Post(_) | Self::Command(_) | Self::Nothing => true,
        }
    }
}

/// How the cache of the engine of this name is emptied.
fn cache_reset(name: &str) -> Option<&'static CacheReset> {
    engine::named(name)?.cache_reset.as_ref()
}

// === impl Fleet ===

impl Fleet {
    fn check(&self) -> Result<(), MatrixError> {
        let fail = |key: &str, why: &str| Err(MatrixError { key: key.to_owned(), why: why.to_owned() });
        match (&self.command, self.urls.is_empty()) {
            (Some(_), false) => return fail("fleet", "set either command or urls"),
            (None, true) => return fail("fleet", "set engines and command, or urls"),
            (Some(_), true) if !(1..=ENGINES_MAX).contains(&self.engines) => {
                return fail("fleet.engines", &format!("{}: must be 1 to {ENGINES_MAX}", self.engines));
            }
            (Some(_), true) if self.flush.is_some() => {
                return fail("fleet.flush", "engines started for each run have empty caches: remove it");
            }
            (None, false) if self.engines != 0 => {
                return fail("fleet.engines", "urls determine the number: remove it");
            }
            (None, false) if !self.flush.as_ref().is_some_and(Flush::is_known) => {
                let engines = ENGINES.iter().filter(|kind| kind.cache_reset.is_some());
                let names: Vec<&str> = engines.map(|kind| kind.name).collect();
                let why =
                    format!("must be {}, {{post: PATH}}, {{command: WORDS}}, or nothing", names.join(", "));
                return fail("fleet.flush", &why);
            }
            _ => {}
        }
        for url in &self.urls {
            if !url.starts_with("http://") || url.trim_end_matches('/').matches('/').count() != 2 {
                return fail("fleet.urls", &format!("'{url}' is not http://host:port"));
            }
        }
        Ok(())
    }
}

// === impl Workload ===

impl Workload {
    fn check(&self, loads: &Loads) -> Result<(), MatrixError> {
        let fail = |key: &str, why: String| Err(MatrixError { key: key.to_owned(), why });
        let rate = matches!(loads, Loads::Rate(_));
        match (&self.trace, &self.generate) {
            (Some(_), Some(_)) | (None, None) => {
                return fail("workload", "set either trace or generate".to_owned());
            }
            (None, Some(_)) if rate && self.window_s.is_none() => {
                return fail("workload.window_s", "needed: for how long requests are generated".to_owned());
            }
            (None, Some(_)) if self.start_s.is_some() => {
                return fail("workload.start_s", "only for traces".to_owned());
            }
            _ => {}
        }
        if !rate && (self.window_s.is_some() || self.start_s.is_some()) {
            return fail(
                "workload",
                "remove window_s and start_s: loads.sessions determines the requests".to_owned(),
            );
        }
        if self.start_s.is_some() && self.window_s.is_none() {
            return fail("workload.start_s", "window_s is needed as well".to_owned());
        }
        for (key, value, from) in [("window_s", self.window_s, 1e-3), ("start_s", self.start_s, 0.0)] {
            if let Some(value) = value.filter(|value| !(from..1e9).contains(value)) {
                return fail(&format!("workload.{key}"), format!("{value} is not a valid time"));
            }
        }
        if !(1e-3..=1e6).contains(&self.speed) {
            return fail("workload.speed", format!("{}: must be 1, or the engines' speed-up", self.speed));
        }
        Ok(())
    }
}

// === impl Loads ===

impl Loads {
    /// The loads as numbers, in the file's order.
    pub fn values(&self) -> Vec<f64> {
        match self {
            Self::Rate(rates) => rates.clone(),
            Self::Sessions(counts) => counts.iter().map(|&count| f64::from(count)).collect(),
        }
    }

    /// Unit of the loads, for the axis of a plot.
    pub fn unit(&self, generated: bool) -> &'static str {
        match (self, generated) {
            (Self::Rate(_), false) => "times the trace's rate",
            (Self::Rate(_), true) => "conversations per second",
            (Self::Sessions(_), _) => "conversations at a time",
        }
    }
}

// === impl Router ===

/// A router as a map in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    router: String,
    like: Option<String>,
    program: Option<String>,
    command: Option<String>,
    #[serde(default)]
    args: String,
    #[serde(default)]
    policies: Vec<String>,
    config: Option<String>,
    url: Option<String>,
    ready: Option<Ready>,
    version: Option<String>,
}

impl<'de> Deserialize<'de> for Router {
    /// A name alone, or a map.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Router;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("the name of a built-in router, or a map with the key `router`")
            }

            fn visit_str<E>(self, name: &str) -> Result<Router, E> {
                Ok(Router { router: name.to_owned(), ..Router::default() })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Router, A::Error> {
                let Fields { router, like, program, command, args, policies, config, url, ready, version } =
                    Fields::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Router { router, like, program, command, args, policies, config, url, ready, version })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A small valid matrix, in JSON, for tests to change.
    fn good() -> serde_json::Value {
        serde_json::json!({
            "fleet": {"engines": 2, "command": "engine --port {port}"},
            "workload": {"generate": {"kind": "chat"}, "window_s": 10},
            "loads": {"rate": [1, 2]},
            "seeds": [1, 2, 3],
            "routers": ["kvlane", {"router": "mine", "command": "mine {port} {workers} {policy}", "policies": ["a", "b"]}],
        })
    }

    fn read(value: serde_json::Value) -> Matrix {
        serde_json::from_value(value).expect("a matrix")
    }

    /// The error of the matrix after `change`.
    fn refused(change: impl FnOnce(&mut serde_json::Value)) -> String {
        let mut value = good();
        change(&mut value);
        match serde_json::from_value::<Matrix>(value) {
            Ok(matrix) => matrix.check().expect_err("it makes sense").to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_router_with_policies_is_one_column_for_each() {
        let matrix = read(good());
        assert_eq!(matrix.check(), Ok(()));
        let arms = matrix.arms().unwrap();
        let names: Vec<&str> = arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names, ["kvlane", "mine/a", "mine/b"]);
        assert_eq!(arms[1].policy.as_deref(), Some("a"));
        assert_eq!(matrix.ours().as_deref(), Some("kvlane"));
    }

    #[test]
    fn every_run_is_in_the_order_once_and_those_of_a_load_and_seed_follow_one_another() {
        let matrix = read(good());
        let order = matrix.order().unwrap();
        assert_eq!(order.len(), 3 * 2 * 3);
        for cell in order.chunks(3) {
            assert!(cell.iter().all(|job| (job.load, job.seed) == (cell[0].load, cell[0].seed)), "{order:?}");
        }
        let mut names: Vec<String> =
            order.iter().map(|job| format!("{} {} {}", job.router, job.load, job.seed)).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 18);
    }

    #[test]
    fn the_order_is_drawn_by_its_seed() {
        let of = |order_seed: u64| Matrix { order_seed, ..read(good()) }.order().unwrap();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        let first: BTreeSet<String> = (0..20).map(|seed| of(seed)[0].router.clone()).collect();
        assert_eq!(first.len(), 3, "every router is the first one at times");
    }

    #[test]
    fn what_makes_no_sense_is_named_with_what_would() {
        let set = |path: &'static str, to: serde_json::Value| {
            move |value: &mut serde_json::Value| *value.pointer_mut(path).expect(path) = to
        };
        let add = |path: &'static str, key: &'static str, to: serde_json::Value| {
            move |value: &mut serde_json::Value| {
                value.pointer_mut(path).expect(path).as_object_mut().expect(path).insert(key.into(), to);
            }
        };
        for (said, word) in [
            (refused(add("", "routes", 1.into())), "routes"),
            (refused(set("/seeds", serde_json::json!([]))), "seeds: at least one is required"),
            (refused(set("/seeds", serde_json::json!([1, 1]))), "seeds: 1 occurs twice"),
            (refused(set("/loads/rate", serde_json::json!([0]))), "loads.rate: 0"),
            (refused(set("/loads/rate", serde_json::json!([]))), "loads: at least one is required"),
            (refused(set("/routers", serde_json::json!([]))), "routers: at least one is required"),
            (refused(set("/routers", serde_json::json!(["kvlane", "kvlane"]))), "'kvlane' occurs twice"),
            (refused(set("/routers", serde_json::json!(["ngnix"]))), "ngnix"),
            (refused(set("/routers/1", serde_json::json!({"router": "x", "comand": ""}))), "comand"),
            (refused(add("", "ours", "theirs".into())), "known are kvlane, mine/a, mine/b"),
            (refused(add("", "within", serde_json::json!({"ttft": 1}))), "ttft_mean_s"),
            (refused(set("/fleet/engines", 0.into())), "fleet.engines: 0"),
            (refused(add("/fleet", "flush", "vllm".into())), "empty caches"),
            (
                refused(set("/fleet", serde_json::json!({"urls": ["http://a:1"]}))),
                "must be vllm, sglang, {post",
            ),
            (
                refused(set("/fleet", serde_json::json!({"urls": ["http://a:1"], "flush": "vlm"}))),
                "must be vllm, sglang, {post",
            ),
            (
                refused(set("/fleet", serde_json::json!({"urls": ["a:1"], "flush": "vllm"}))),
                "http://host:port",
            ),
            (refused(set("/fleet", serde_json::json!({}))), "set engines"),
            (refused(add("/workload", "trace", "x".into())), "set either"),
            (refused(set("/workload", serde_json::json!({"generate": {"kind": "chat"}}))), "for how long"),
            (refused(add("/workload", "speed", 0.into())), "workload.speed"),
            (refused(set("/loads", serde_json::json!({"sessions": [4]}))), "remove window_s"),
            (refused(add("", "warm_up", serde_json::json!({"window_s": 10}))), "no request would count"),
        ] {
            assert!(said.contains(word), "{word}: {said}");
        }
    }

    #[test]
    fn a_matrix_survives_json() {
        let matrix = read(good());
        assert_eq!(read(serde_json::to_value(&matrix).unwrap()), matrix);
    }
}
