//! The environment of a run: engines with empty caches and a new router, both ready.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Uri};
use kvlane_trace::generate;
use kvlane_trace::record::Record;
use kvlane_trace::trace::Trace;

use super::machine::cores;
use super::process::{Process, free_ports};
use super::run::{Place, RunError};
use super::template::{self, EnginePlace, TemplateError, Values};
use super::workload::Source;
use super::{Arm, Flush, Job, Matrix, Ready, cache_reset};
use crate::client::Target;
use crate::replay::{ReplayConfig, replay};

/// Interval of readiness checks.
const POLL: Duration = Duration::from_millis(50);
/// Timeout of a readiness check.
const ASK_MAX: Duration = Duration::from_secs(5);
/// Maximum bytes read of an answer to one, such as a metrics page.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Warm-up requests in a second.
const WARM_UP_RATE: f64 = 40.0;
/// Attempts to start a router: its port may have been taken in the meantime.
const STARTS: usize = 3;

/// Why a run is discarded.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{what}: {why}")]
    Command { what: String, why: TemplateError },
    #[error("{what} cannot be started: {why}")]
    Start { what: String, why: io::Error },
    #[error("{0}")]
    Ended(String),
    #[error("{what} was not ready within {within_s} s: {why}")]
    NotReady { what: String, within_s: f64, why: String },
    #[error("the caches of {url} cannot be emptied: {why}")]
    Flush { url: String, why: String },
    #[error("{0}")]
    Replay(#[from] crate::replay::ReplayError),
    #[error("the client was the bottleneck: {0}; lower the load or the speed")]
    Late(String),
}

/// State shared by all runs.
pub(super) struct Stage<'a> {
    pub(super) matrix: &'a Matrix,
    pub(super) place: &'a Place,
    pub(super) arms: Vec<Arm>,
    pub(super) source: &'a Source,
    api_key: Option<String>,
    warm_up: Arc<Trace>,
}

/// Running engines and a router.
pub(super) struct Fleet {
    engines: Vec<Process>,
    places: Vec<EnginePlace>,
}

/// A running router.
pub(super) struct Serving {
    pub(super) process: Option<Process>,
    pub(super) url: String,
}

// === impl Stage ===

impl<'a> Stage<'a> {
    pub(super) fn new(matrix: &'a Matrix, place: &'a Place, source: &'a Source) -> Result<Self, RunError> {
        let file = |path: &Path, why| RunError::File { path: path.display().to_string(), why };
        std::fs::create_dir_all(&place.scratch).map_err(|why| file(&place.scratch, why))?;
        let api_key = match &matrix.client.api_key_env {
            Some(name) => Some(std::env::var(name).map_err(|_| RunError::NoKey(name.clone()))?),
            None => None,
        };
        Ok(Self {
            matrix,
            place,
            arms: matrix.arms()?,
            source,
            api_key,
            warm_up: Arc::new(warm_up(matrix.warm_up.requests)),
        })
    }

    pub(super) fn replay(&self, url: &str, trace: Arc<Trace>, seed: u64) -> ReplayConfig {
        ReplayConfig {
            base_url: url.to_owned(),
            model: self.matrix.model.clone(),
            trace,
            seed,
            request_timeout: Duration::from_secs_f64(self.matrix.client.request_timeout_s),
            ignore_eos: self.matrix.client.ignore_eos,
            api_key: self.api_key.clone(),
            ..ReplayConfig::default()
        }
    }

    /// Placeholders of every command.
    fn values(&self, job: &Job, directory: &Path) -> Values {
        let mut values = Values::default();
        values.set("kvlane", self.place.kvlane.to_string_lossy());
        values.set("directory", directory.to_string_lossy());
        values.set("model", &*self.matrix.model);
        values.set("speed", self.matrix.workload.speed.to_string());
        values.set("seed", job.seed.to_string());
        values.set("cores", cores().to_string());
        values
    }

    /// Engines with empty caches.
    pub(super) async fn engines(&self, job: &Job, directory: &Path) -> Result<Fleet, Failure> {
        let fleet = &self.matrix.fleet;
        let Some(command) = &fleet.command else {
            let place = |url: &String| EnginePlace {
                url: url.trim_end_matches('/').to_owned(),
                ports: BTreeMap::new(),
            };
            let mut found = Fleet { engines: Vec::new(), places: fleet.urls.iter().map(place).collect() };
            self.flush(&mut found, job, directory).await?;
            return Ok(found);
        };
        for start_n in 1.. {
            match self.started(command, job, directory).await {
                // Another program may have taken a port; others are tried.
                Err(Failure::Ended(_)) if start_n < STARTS => {}
                done => return done,
            }
        }
        unreachable!("the last start returns")
    }

    /// Engines that are ready.
    async fn started(&self, command: &str, job: &Job, directory: &Path) -> Result<Fleet, Failure> {
        let fleet = &self.matrix.fleet;
        let mut found = Fleet { engines: Vec::new(), places: Vec::new() };
        let names = template::port_names([command]);
        // All at once: a port that one of them has not yet bound would be free for the next.
        let of_one = 1 + names.len();
        let free = free_ports(of_one * fleet.engines as usize).map_err(|why| start("the fleet", why))?;
        for (index, free) in free.chunks(of_one).enumerate() {
            let what = format!("engine {index}");
            let mut values = self.values(job, directory);
            values.set("index", index.to_string());
            let (url, ports) = ports(&mut values, &names, free);
            let words = self.words(&what, command, &values)?;
            let log = directory.join(format!("engine-{index}.log"));
            found.engines.push(self.start(&what, &words, log)?);
            found.places.push(EnginePlace { url, ports });
        }
        for index in 0..found.places.len() {
            let url = join(&found.places[index].url, &fleet.ready);
            self.until_ready(&format!("engine {index}"), &url, &mut found, None).await?;
        }
        Ok(found)
    }

    async fn flush(&self, fleet: &mut Fleet, job: &Job, directory: &Path) -> Result<(), Failure> {
        let (path, needs) = match &self.matrix.fleet.flush {
            None | Some(Flush::Nothing) => return Ok(()),
            Some(Flush::Engine(name)) => match cache_reset(name) {
                Some(reset) => (reset.path, reset.needs),
                None => {
                    let why = "no path that empties its cache is known".to_owned();
                    return Err(Failure::Flush { url: name.clone(), why });
                }
            },
            Some(Flush::Post(path)) => (path.as_str(), None),
            Some(Flush::Command(command)) => {
                let of_engines = template::names(command)
                    .into_iter()
                    .any(|name| ["url", "address", "index"].contains(&name));
                let times = if of_engines { fleet.places.len() } else { 1 };
                for place in fleet.places.iter().take(times) {
                    let mut values = self.values(job, directory);
                    values.engines = if of_engines { vec![place.clone()] } else { fleet.places.clone() };
                    let words = self.words("fleet.flush.command", command, &values)?;
                    let fail = |why: String| Failure::Flush { url: place.url.clone(), why };
                    let mut process =
                        self.start("fleet.flush.command", &words, directory.join("flush.log"))?;
                    let deadline = Instant::now() + self.ready_timeout();
                    let status = loop {
                        match process.status().map_err(|why| fail(why.to_string()))? {
                            Some(status) => break status,
                            None if Instant::now() > deadline => {
                                return Err(fail("it did not exit after a kill".to_owned()));
                            }
                            None => tokio::time::sleep(POLL).await,
                        }
                    };
                    if !status.success() {
                        return Err(fail(format!("{status}: {}", process.end_of_log())));
                    }
                }
                return Ok(());
            }
        };
        for place in &fleet.places {
            let url = format!("{}/{}", place.url, path.trim_start_matches('/'));
            let answered = ask(Method::POST, &url).await;
            let fail = |why: String| Failure::Flush { url: place.url.clone(), why };
            match answered {
                Ok(200..300) => {}
                Ok(404) => {
                    let hint = needs.map_or_else(String::new, |needs| format!("; {needs}"));
                    return Err(fail(format!("POST {path} answered 404{hint}")));
                }
                Ok(status) => return Err(fail(format!("POST {path} answered {status}"))),
                Err(why) => return Err(fail(why)),
            }
        }
        Ok(())
    }

    /// A new router, ready to serve.
    pub(super) async fn router(
        &self,
        arm: &Arm,
        fleet: &mut Fleet,
        job: &Job,
        directory: &Path,
    ) -> Result<Serving, Failure> {
        let router = &arm.router;
        let timeout = self.ready_timeout();
        if let Some(url) = &router.url {
            let url = url.trim_end_matches('/').to_owned();
            if let Some(ready) = &router.ready {
                self.until_ready(&arm.name, &join(&url, ready), fleet, None).await?;
            }
            return Ok(Serving { process: None, url });
        }
        let config = router.config.as_deref().unwrap_or_default();
        let ready = router.ready.clone().unwrap_or_default();
        let command = format!("{} {}", router.command.as_deref().unwrap_or_default(), router.args);
        let names = template::port_names([command.as_str(), config, ready.0.as_str()]);
        let log = directory.join("router.log");
        let deadline = Instant::now() + timeout;
        for start_n in 1.. {
            let mut values = self.values(job, directory);
            values.engines = fleet.places.clone();
            values.plain.insert("policy".to_owned(), arm.policy.clone());
            let program = router.program.clone().unwrap_or_default();
            values.set("program", self.path(template::file(&program, &values).trim_end()));
            values.set("config", directory.join("router.conf").to_string_lossy());
            let free = free_ports(1 + names.len()).map_err(|why| start(&arm.name, why))?;
            let (url, _) = ports(&mut values, &names, &free);
            let text = template::file(config, &values);
            std::fs::write(directory.join("router.conf"), text).map_err(|why| start(&arm.name, why))?;
            let words = self.words(&arm.name, &command, &values)?;
            let mut process = self.start(&arm.name, &words, log.clone())?;
            let ready = join(&url, &Ready(template::file(&ready.0, &values).trim_end().to_owned()));
            match self.until_ready(&arm.name, &ready, fleet, Some(&mut process)).await {
                Ok(()) => return Ok(Serving { process: Some(process), url }),
                // Another program may have taken its port; another one is tried.
                Err(Failure::Ended(_)) if start_n < STARTS && Instant::now() < deadline => {}
                Err(failure) => return Err(failure),
            }
        }
        unreachable!("the last start returns")
    }

    /// Sends short requests until a whole set succeeds: the router has found its engines, and connections are open.
    pub(super) async fn warm(&self, router: &mut Serving, fleet: &mut Fleet) -> Result<(), Failure> {
        if self.warm_up.requests.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + self.ready_timeout();
        loop {
            // Different text each time, unlike that of any run.
            let seed =
                0xFFFF_0000_0000_0000 ^ deadline.saturating_duration_since(Instant::now()).as_micros() as u64;
            let report = replay(self.replay(&router.url, self.warm_up.clone(), seed), |_, _| ()).await?;
            if report.records.iter().all(Record::is_ok) {
                return Ok(());
            }
            router.check(fleet)?;
            if Instant::now() > deadline {
                return Err(Failure::NotReady {
                    what: "the router".to_owned(),
                    within_s: self.matrix.warm_up.ready_timeout_s,
                    why: report.first_errors.first().cloned().unwrap_or_default(),
                });
            }
            tokio::time::sleep(POLL * 4).await;
        }
    }

    fn ready_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.matrix.warm_up.ready_timeout_s)
    }

    async fn until_ready(
        &self,
        what: &str,
        url: &str,
        fleet: &mut Fleet,
        mut process: Option<&mut Process>,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + self.ready_timeout();
        loop {
            let answered = ask(Method::GET, url).await;
            if matches!(answered, Ok(200..300)) {
                return Ok(());
            }
            if let Some(why) = process.as_mut().and_then(|process| process.ended()).or_else(|| fleet.ended())
            {
                return Err(Failure::Ended(why));
            }
            if Instant::now() > deadline {
                let why = answered.map_or_else(|why| why, |status| format!("{url} answered {status}"));
                let within_s = self.matrix.warm_up.ready_timeout_s;
                let said = process.map_or(String::new(), |process| format!("; {}", process.end_of_log()));
                return Err(Failure::NotReady { what: what.to_owned(), within_s, why: why + &said });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    pub(super) fn words(&self, what: &str, command: &str, values: &Values) -> Result<Vec<String>, Failure> {
        let mut words = template::command(command, values)
            .map_err(|why| Failure::Command { what: what.to_owned(), why })?;
        words[0] = self.path(&words[0]);
        Ok(words)
    }

    /// A program by its path: relative to the matrix's file, if it has a slash.
    pub(super) fn path(&self, program: &str) -> String {
        match program.contains('/') && !program.starts_with('/') {
            true => self.place.directory.join(program).to_string_lossy().into_owned(),
            false => program.to_owned(),
        }
    }

    fn start(&self, what: &str, words: &[String], log: PathBuf) -> Result<Process, Failure> {
        Process::start(what, words, &self.place.directory, log).map_err(|why| start(what, why))
    }
}

// === impl Fleet ===

impl Fleet {
    fn ended(&mut self) -> Option<String> {
        self.engines.iter_mut().find_map(Process::ended)
    }
}

// === impl Serving ===

impl Serving {
    /// Whether router and engines still run.
    pub(super) fn check(&mut self, fleet: &mut Fleet) -> Result<(), Failure> {
        let ended = self.process.as_mut().and_then(Process::ended).or_else(|| fleet.ended());
        ended.map_or(Ok(()), |why| Err(Failure::Ended(why)))
    }
}

fn start(what: &str, why: io::Error) -> Failure {
    Failure::Start { what: what.to_owned(), why }
}

/// Fills `{port}` and the named ports with free ones; returns the address of the first.
fn ports(values: &mut Values, names: &[&str], free: &[u16]) -> (String, BTreeMap<String, u16>) {
    values.set("port", free[0].to_string());
    let named: BTreeMap<String, u16> =
        names.iter().map(ToString::to_string).zip(free[1..].iter().copied()).collect();
    for (name, port) in &named {
        values.set(&format!("port:{name}"), port.to_string());
    }
    (format!("http://127.0.0.1:{}", free[0]), named)
}

/// A path of a server, or a complete URL.
fn join(url: &str, ready: &Ready) -> String {
    match ready.0.starts_with("http") {
        true => ready.0.clone(),
        false => format!("{url}/{}", ready.0.trim_start_matches('/')),
    }
}

/// The status of a server's answer.
async fn ask(method: Method, url: &str) -> Result<u16, String> {
    let answered = async {
        let uri: Uri = url.parse().map_err(|error: http::uri::InvalidUri| error.to_string())?;
        let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let target = Target::new(url.strip_suffix(path).unwrap_or(url), None, HeaderMap::new())?;
        target.ask(method, path, ASK_MAX, ANSWER_BYTES_MAX).await
    };
    match answered.await {
        Ok((status, _)) => Ok(status.as_u16()),
        Err(why) => Err(format!("{url}: {why}")),
    }
}

/// Short requests without shared prefixes.
fn warm_up(count: u32) -> Trace {
    let arrivals =
        generate::Arrivals::Poisson { rate: WARM_UP_RATE, count: Some(count.max(1)), seconds: None };
    let short = generate::Spread::fixed(32);
    let config = generate::unshared::Config {
        input_tokens: short,
        output_tokens: generate::Spread::fixed(2),
        arrivals,
        ..generate::unshared::Config::default()
    };
    // Settings of this file make sense.
    let trace = generate::generate(&generate::Workload::Unshared(config), 0).unwrap_or_default();
    if count == 0 { Trace::default() } else { trace }
}
