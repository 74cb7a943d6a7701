//! Routers against each other on one fleet: a matrix of routers, loads and seeds.
//!
//! One run takes one router, one load and one seed: the engines begin with empty caches, the router begins anew, and the
//! requests of that load and seed are sent through it. Every router gets the same requests, so that each of them can be
//! compared with itself ([`kvlane_trace::paired`]). A machine that gets slower or busier over an hour must not do so to
//! one router alone: runs of one load and seed follow one another, and in which order is drawn.
//!
//! [`Matrix`] is what a file says, [`run`] carries it out, [`judge`] says what was found, [`show`] shows it.

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

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use kvlane_core::rng::Rng;
use kvlane_trace::generate;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

/// Engines that a matrix may start.
pub const ENGINES_MAX: u32 = 256;
/// Runs that a matrix may have.
pub const RUNS_MAX: usize = 10_000;

/// What a file says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// What it is about, for whoever reads the report.
    #[serde(default)]
    pub about: String,
    /// The engines behind every router.
    pub fleet: Fleet,
    /// The `model` of every request.
    #[serde(default = "model")]
    pub model: String,
    /// What is sent.
    pub workload: Workload,
    /// How much of it.
    pub loads: Loads,
    /// One run of each router and load for each seed. A seed draws the requests and their times.
    #[serde(default = "seeds")]
    pub seeds: Vec<u32>,
    /// Who is compared.
    pub routers: Vec<Router>,
    /// The router that the others are compared with; the first one if it is not said. With several policies, as
    /// `router/policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ours: Option<String>,
    /// Bounds by figure (such as `ttft_mean_s`): up to which load does each router keep within them?
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub within: BTreeMap<String, f64>,
    /// Draws the order of the runs.
    #[serde(default)]
    pub order_seed: u64,
    /// What happens before the figures count.
    #[serde(default)]
    pub warm_up: WarmUp,
    /// How requests are sent.
    #[serde(default)]
    pub client: Client,
}

/// The engines behind every router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fleet {
    /// How many are started, each by `command`.
    pub engines: u32,
    /// Starts one. Engines are started anew for every run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Those that run already, as `http://host:port`, instead of `engines` and `command`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// How the caches of those are emptied before every run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush: Option<Flush>,
    /// The path that answers 200 when an engine is ready.
    pub ready: Ready,
}

/// How engines that keep running forget what they hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Flush {
    /// `POST /reset_prefix_cache`; vLLM has it with `VLLM_SERVER_DEV_MODE=1`.
    Vllm,
    /// `POST /flush_cache`.
    Sglang,
    /// `POST` to this path.
    Post(String),
    /// A command, once for each engine that it names (`{url}`, `{address}`, `{index}`), else once.
    Command(String),
    /// Not at all: caches are as the run before left them. Only for engines without a cache.
    Nothing,
}

/// A path, or a whole URL, that answers 200 once something is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ready(pub String);

/// What is sent: one of `trace` and `generate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// A trace of any format that `kvlane trace import` reads; relative to the matrix's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// A workload that is made, as `kvlane trace generate` makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generate: Option<generate::Workload>,
    /// For how long requests are sent, in the trace's seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_s: Option<f64>,
    /// Where in the trace the window begins. Without it every seed draws a place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_s: Option<f64>,
    /// The trace's seconds per second. More than 1 only for engines that are as much faster than those they imitate:
    /// `{speed}` in their command. Figures are in the trace's seconds.
    #[serde(default = "one")]
    pub speed: f64,
}

/// How much is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Loads {
    /// Factors on the rate at which a trace's conversations begin; of what is generated, conversations per second.
    /// What happens within a conversation keeps its pace.
    Rate(Vec<f64>),
    /// Conversations that begin together: how many go on at a time.
    Sessions(Vec<u32>),
}

/// A router: one of those that are [ready-made](ready), or any other by its command.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Router {
    /// Its name in tables.
    pub router: String,
    /// The ready-made router whose settings it has where it says nothing else; the one of its own name, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub like: Option<String>,
    /// Where its program is: what `{program}` is in its command. Relative to the matrix's file, if it has a slash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Starts it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// More words for the command, at its end.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub args: String,
    /// What `{policy}` is, one after the other: each is compared as a router of its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<String>,
    /// A file to be written for it, whose path is `{config}` in the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// Where it runs already, instead of a command. It keeps what it knows from run to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The path, or the whole URL, that answers 200 when it is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    /// Prints its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// What happens before the figures count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmUp {
    /// Short requests, unlike any other, until the router answers so many in a row well.
    pub requests: u32,
    /// Requests that are due in the first so many seconds of the trace are sent, but not counted.
    pub window_s: f64,
    /// How long engines and routers may take to get ready.
    pub ready_timeout_s: f64,
}

/// How requests are sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    /// A request that is not over after this many seconds has failed.
    pub request_timeout_s: f64,
    /// Ask for answers of exactly the trace's length (`ignore_eos`).
    pub ignore_eos: bool,
    /// A run in which this client was later than this, in seconds of the clock, does not count: the client was the
    /// bottleneck. The 99th percentile counts, of when requests left and of when the client came to what was due.
    pub lag_p99_max_s: f64,
    /// Nor does one in which it used more than this share of the CPU time that it could have had.
    pub cpu_share_max: f64,
    /// The variable of the environment that has the API key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
}

/// What is wrong with a matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {why}")]
pub struct MatrixError {
    /// The key.
    pub key: String,
    /// What is wrong, and what would be right.
    pub why: String,
}

/// One column of a matrix: a router with one policy, all of its settings filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    /// `router`, or `router/policy` where it has several.
    pub name: String,
    /// The router.
    pub router: Router,
    /// What `{policy}` is.
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

/// The largest rate, number of sessions, time in seconds or bound. A `Duration` of as many seconds can be made.
const POSITIVE_MAX: f64 = 1e10;

impl Matrix {
    /// Whether it makes sense.
    ///
    /// # Errors
    /// The first key that does not, and what would.
    pub fn check(&self) -> Result<(), MatrixError> {
        let fail = |key: &str, why: String| Err(MatrixError { key: key.to_owned(), why });
        let positive = |key: &str, value: f64| match value > 0.0 && value <= POSITIVE_MAX {
            true => Ok(()),
            false => {
                fail(key, format!("{value} is out of range: take more than 0, at most {POSITIVE_MAX:e}"))
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
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.loads.values().into_iter().find(|load| !seen.insert(load.to_bits())) {
            return fail("loads", format!("{twice} is there twice"));
        }
        if seen.is_empty() {
            return fail("loads", "there is none".to_owned());
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.seeds.iter().find(|seed| !seen.insert(**seed)) {
            return fail("seeds", format!("{twice} is there twice"));
        }
        if seen.is_empty() {
            return fail("seeds", "there is none".to_owned());
        }
        let arms = self.arms()?;
        if arms.is_empty() {
            return fail("routers", "there is none".to_owned());
        }
        let names: Vec<&str> = arms.iter().map(|arm| arm.name.as_str()).collect();
        if let Some(ours) = self.ours.as_deref().filter(|ours| !names.contains(ours)) {
            return fail("ours", format!("there is no router '{ours}': take one of {}", names.join(", ")));
        }
        let figures = judge::FIGURES;
        for (figure, bound) in &self.within {
            if !figures.contains(&figure.as_str()) {
                return fail(
                    "within",
                    format!("there is no figure '{figure}': take of {}", figures.join(", ")),
                );
            }
            positive(&format!("within.{figure}"), *bound)?;
        }
        if !(0.0..1e9).contains(&self.warm_up.window_s) {
            return fail("warm_up.window_s", format!("{} is no time", self.warm_up.window_s));
        }
        if self.workload.window_s.is_some_and(|window_s| window_s <= self.warm_up.window_s) {
            return fail(
                "warm_up.window_s",
                "it is as long as workload.window_s: nothing would count".to_owned(),
            );
        }
        positive("warm_up.ready_timeout_s", self.warm_up.ready_timeout_s)?;
        positive("client.request_timeout_s", self.client.request_timeout_s)?;
        positive("client.lag_p99_max_s", self.client.lag_p99_max_s)?;
        positive("client.cpu_share_max", self.client.cpu_share_max)?;
        let runs = names.len() * self.seeds.len() * self.loads.values().len();
        if runs > RUNS_MAX {
            return fail("routers", format!("{runs} runs are more than {RUNS_MAX}"));
        }
        Ok(())
    }

    /// The routers, one for each of their policies, with all that ready-made ones bring.
    ///
    /// # Errors
    /// A router that nobody knows how to start, or two of one name.
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
        let mut seen = BTreeSet::new();
        match arms.iter().find(|arm| !seen.insert(arm.name.as_str())) {
            Some(twice) => Err(MatrixError {
                key: "routers".to_owned(),
                why: format!("'{}' is there twice: call one of them something else", twice.name),
            }),
            None => Ok(arms),
        }
    }

    /// The name of the arm that the others are compared with.
    pub fn ours(&self) -> Option<String> {
        let first = || Some(self.arms().ok()?.first()?.name.clone());
        self.ours.clone().or_else(first)
    }

    /// All runs in their order: loads and seeds are shuffled, and for each of them the routers are.
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

// === impl Fleet ===

impl Fleet {
    fn check(&self) -> Result<(), MatrixError> {
        let fail = |key: &str, why: &str| Err(MatrixError { key: key.to_owned(), why: why.to_owned() });
        match (&self.command, self.urls.is_empty()) {
            (Some(_), false) => return fail("fleet", "give a command or urls, one of the two"),
            (None, true) => return fail("fleet", "give engines and their command, or urls"),
            (Some(_), true) if !(1..=ENGINES_MAX).contains(&self.engines) => {
                return fail("fleet.engines", &format!("{}: take 1 to {ENGINES_MAX}", self.engines));
            }
            (Some(_), true) if self.flush.is_some() => {
                return fail("fleet.flush", "engines that are started for each run have nothing to flush");
            }
            (None, false) if self.engines != 0 => {
                return fail("fleet.engines", "urls say how many there are: leave it out");
            }
            (None, false) if self.flush.is_none() => {
                return fail(
                    "fleet.flush",
                    "say how caches are emptied: vllm, sglang, {post: PATH}, {command: WORDS}, or nothing",
                );
            }
            _ => {}
        }
        for url in &self.urls {
            if !url.starts_with("http://") || url.trim_end_matches('/').matches('/').count() != 2 {
                return fail("fleet.urls", &format!("'{url}' is no http://host:port"));
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
                return fail("workload", "give a trace or generate, one of the two".to_owned());
            }
            (None, Some(_)) if rate && self.window_s.is_none() => {
                return fail("workload.window_s", "say for how long requests are generated".to_owned());
            }
            (None, Some(_)) if self.start_s.is_some() => {
                return fail("workload.start_s", "it is for traces".to_owned());
            }
            _ => {}
        }
        if !rate && (self.window_s.is_some() || self.start_s.is_some()) {
            return fail(
                "workload",
                "loads.sessions says what is sent: leave out window_s and start_s".to_owned(),
            );
        }
        if self.start_s.is_some() && self.window_s.is_none() {
            return fail("workload.start_s", "say window_s as well".to_owned());
        }
        for (key, value, from) in [("window_s", self.window_s, 1e-3), ("start_s", self.start_s, 0.0)] {
            if let Some(value) = value.filter(|value| !(from..1e9).contains(value)) {
                return fail(&format!("workload.{key}"), format!("{value} is no time"));
            }
        }
        if !(1e-3..=1e6).contains(&self.speed) {
            return fail(
                "workload.speed",
                format!("{}: take 1, or how much faster the engines are", self.speed),
            );
        }
        Ok(())
    }
}

// === impl Loads ===

impl Loads {
    /// The loads as numbers, in the order of the file.
    pub fn values(&self) -> Vec<f64> {
        match self {
            Self::Rate(rates) => rates.clone(),
            Self::Sessions(counts) => counts.iter().map(|&count| f64::from(count)).collect(),
        }
    }

    /// What they are, for the axis of a plot.
    pub fn unit(&self, generated: bool) -> &'static str {
        match (self, generated) {
            (Self::Rate(_), false) => "times the trace's rate",
            (Self::Rate(_), true) => "conversations per second",
            (Self::Sessions(_), _) => "conversations at a time",
        }
    }
}

// === impl Router ===

/// A router as a map has it.
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
                out.write_str("the name of a ready-made router, or a map with the key router")
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
    use super::*;

    /// A small matrix that makes sense, in JSON, for tests to change.
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

    /// What is said of the matrix once `change` has been made to it.
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
            (refused(set("/seeds", serde_json::json!([]))), "seeds: there is none"),
            (refused(set("/seeds", serde_json::json!([1, 1]))), "seeds: 1 is there twice"),
            (refused(set("/loads/rate", serde_json::json!([0]))), "loads.rate: 0"),
            (refused(set("/loads/rate", serde_json::json!([]))), "loads: there is none"),
            (refused(set("/routers", serde_json::json!([]))), "routers: there is none"),
            (refused(set("/routers", serde_json::json!(["kvlane", "kvlane"]))), "'kvlane' is there twice"),
            (refused(set("/routers", serde_json::json!(["ngnix"]))), "ngnix"),
            (refused(set("/routers/1", serde_json::json!({"router": "x", "comand": ""}))), "comand"),
            (refused(add("", "ours", "theirs".into())), "take one of kvlane, mine/a, mine/b"),
            (refused(add("", "within", serde_json::json!({"ttft": 1}))), "ttft_mean_s"),
            (refused(set("/fleet/engines", 0.into())), "fleet.engines: 0"),
            (refused(add("/fleet", "flush", "vllm".into())), "nothing to flush"),
            (
                refused(set("/fleet", serde_json::json!({"urls": ["http://a:1"]}))),
                "say how caches are emptied",
            ),
            (
                refused(set("/fleet", serde_json::json!({"urls": ["a:1"], "flush": "vllm"}))),
                "http://host:port",
            ),
            (refused(set("/fleet", serde_json::json!({}))), "give engines"),
            (refused(add("/workload", "trace", "x".into())), "one of the two"),
            (refused(set("/workload", serde_json::json!({"generate": {"kind": "chat"}}))), "for how long"),
            (refused(add("/workload", "speed", 0.into())), "workload.speed"),
            (refused(set("/loads", serde_json::json!({"sessions": [4]}))), "leave out window_s"),
            (refused(add("", "warm_up", serde_json::json!({"window_s": 10}))), "nothing would count"),
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
