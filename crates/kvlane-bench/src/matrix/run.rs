//! Carries a matrix out: starts engines and router, empties caches, warms up, sends, ends what was started.
//!
//! A run that cannot be had (a router that does not start, a client that was late) is noted with its reason, and the
//! matrix goes on: one broken router must not cost an hour of measuring the others.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Uri};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kvlane_trace::generate;
use kvlane_trace::record::Record;
use kvlane_trace::trace::Trace;

use super::judge::{Named, Recorded, Report, Run};
use super::process::{Process, free_ports};
use super::template::{self, EnginePlace, TemplateError, Values};
use super::workload::{Source, SourceError};
use super::{Arm, Flush, Job, Matrix, MatrixError, Ready};
use crate::replay::{ReplayConfig, ReplayReport, replay};

/// How often it is asked whether something is ready.
const POLL: Duration = Duration::from_millis(50);
/// How long one such question may take.
const ASK_MAX: Duration = Duration::from_secs(5);
/// How long a program may take to tell its version.
const VERSION_MAX: Duration = Duration::from_secs(30);
/// Warm-up requests in a second.
const WARM_UP_RATE: f64 = 40.0;
/// Failures of a run whose words are kept.
const ERRORS_KEPT_MAX: usize = 4;
/// How many times a router is started: its port may have been taken between being found free and being used.
const STARTS: usize = 3;

/// Where a matrix is carried out.
#[derive(Clone, Debug)]
pub struct Place {
    /// Paths of the matrix are relative to this.
    pub directory: PathBuf,
    /// For logs and for files that routers are given. Made if need be.
    pub scratch: PathBuf,
    /// What `{kvlane}` is.
    pub kvlane: PathBuf,
}

/// What happens meanwhile.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A run begins.
    Begins {
        /// Its place in the order, from 0.
        place: usize,
        /// How many there are.
        of: usize,
        /// Which.
        job: &'a Job,
        /// Requests it will send.
        requests: usize,
    },
    /// So many of its requests have ended.
    Sent(usize),
    /// It is over.
    Ended(&'a Recorded),
}

/// Why a matrix cannot be carried out at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It makes no sense.
    #[error(transparent)]
    Matrix(#[from] MatrixError),
    /// There are no requests to send.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A file that cannot be written or read.
    #[error("{path}: {why}")]
    File {
        /// Its path.
        path: String,
        /// Why not.
        why: io::Error,
    },
    /// The variable of the environment is not there.
    #[error("client.api_key_env: the variable {0} is not set")]
    NoKey(String),
}

/// Why a run does not count.
#[derive(Debug, thiserror::Error)]
enum Failure {
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
    #[error(
        "the client was the bottleneck: it sent late by {lag_s:.3} s at the 99th percentile, {max_s} s is the most; lower the load or the speed"
    )]
    Late { lag_s: f64, max_s: f64 },
}

/// Everything that runs have in common.
struct Stage<'a> {
    matrix: &'a Matrix,
    place: &'a Place,
    arms: Vec<Arm>,
    source: Source,
    client: Client<HttpConnector, Full<Bytes>>,
    api_key: Option<String>,
    warm_up: Arc<Trace>,
}

/// Engines and a router that serve.
struct Fleet {
    engines: Vec<Process>,
    places: Vec<EnginePlace>,
}

/// A router that serves.
struct Serving {
    process: Option<Process>,
    url: String,
}

/// Carries out every run of a matrix, in its order, and judges them. Runs that `kept` has already are not run again.
///
/// # Errors
/// A matrix that makes no sense, or whose trace or files are not there. A run that fails is part of the report.
pub async fn run(
    matrix: &Matrix,
    place: &Place,
    mut kept: impl FnMut(&Job) -> Option<Recorded>,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Report, RunError> {
    matrix.check()?;
    let stage = Stage::new(matrix, place)?;
    let order = matrix.order()?;
    let versions = stage.versions().await;
    let began = Instant::now();
    let mut recorded: Vec<Recorded> = Vec::with_capacity(order.len());
    for (n, job) in order.iter().enumerate() {
        if let Some(kept) = kept(job) {
            recorded.push(kept);
            continue;
        }
        let requests = stage.requests(job)?;
        progress(Progress::Begins { place: n, of: order.len(), job, requests: requests.requests.len() });
        let began_s = began.elapsed().as_secs_f64();
        let mut one = stage.one(job, n, requests, &mut |sent| progress(Progress::Sent(sent))).await?;
        (one.run.place, one.run.began_s) = (n, began_s);
        progress(Progress::Ended(&one));
        recorded.push(one);
    }
    Ok(Report::new(matrix, stage.source.is_generated(), versions, machine(), &recorded))
}

// === impl Stage ===

impl<'a> Stage<'a> {
    fn new(matrix: &'a Matrix, place: &'a Place) -> Result<Self, RunError> {
        let file = |path: &Path, why| RunError::File { path: path.display().to_string(), why };
        std::fs::create_dir_all(&place.scratch).map_err(|why| file(&place.scratch, why))?;
        let source = Source::read(&matrix.workload, &place.directory)?;
        let api_key = match &matrix.client.api_key_env {
            Some(name) => Some(std::env::var(name).map_err(|_| RunError::NoKey(name.clone()))?),
            None => None,
        };
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Ok(Self {
            matrix,
            place,
            arms: matrix.arms()?,
            source,
            client: Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector),
            api_key,
            warm_up: Arc::new(warm_up(matrix.warm_up.requests)),
        })
    }

    fn requests(&self, job: &Job) -> Result<Trace, SourceError> {
        self.source.requests(&self.matrix.workload, &self.matrix.loads, job.load, job.seed)
    }

    /// One run. What goes wrong with it is in it.
    async fn one(
        &self,
        job: &Job,
        place: usize,
        requests: Trace,
        sent: &mut dyn FnMut(usize),
    ) -> Result<Recorded, RunError> {
        let directory = self.place.scratch.join(format!("run-{place}"));
        let file = |why| RunError::File { path: directory.display().to_string(), why };
        std::fs::create_dir_all(&directory).map_err(file)?;
        let mut run = Run {
            job: job.clone(),
            place,
            began_s: 0.0,
            wall_s: 0.0,
            requests: 0,
            errors_by_class: BTreeMap::new(),
            first_errors: Vec::new(),
            client_lag_p99_s: None,
            router_cpu_s: None,
            router_rss_bytes: None,
            failure: None,
        };
        match self.measure(job, &directory, requests, &mut run, sent).await {
            Ok(records) => {
                // Logs of what went well are of no use, and may be large.
                let _ = std::fs::remove_dir_all(&directory);
                Ok(Recorded { run, records })
            }
            Err(failure) => {
                run.failure = Some(format!("{failure} (logs: {})", directory.display()));
                Ok(Recorded { run, records: Vec::new() })
            }
        }
    }

    async fn measure(
        &self,
        job: &Job,
        directory: &Path,
        requests: Trace,
        run: &mut Run,
        sent: &mut dyn FnMut(usize),
    ) -> Result<Vec<Record>, Failure> {
        let Some(arm) = self.arms.iter().find(|arm| arm.name == job.router) else {
            return Err(Failure::Ended(format!("there is no router '{}'", job.router)));
        };
        let mut fleet = self.engines(job, directory).await?;
        let mut router = self.router(arm, &mut fleet, job, directory).await?;
        self.warm(&mut router, &mut fleet).await?;
        let before = router.process.as_ref().and_then(Process::usage);
        let config = self.replay(&router.url, Arc::new(requests), job.seed.into());
        let ReplayReport { records, wall_s, client_lag_s, first_errors, .. } =
            replay(config, |ended, _| sent(ended)).await?;
        let after = router.process.as_ref().and_then(Process::usage);
        router.check(&mut fleet)?;
        if let (Some(before), Some(after)) = (before, after) {
            run.router_cpu_s = Some((after.cpu_s - before.cpu_s).max(0.0));
            run.router_rss_bytes = Some(after.rss_bytes);
        }
        run.wall_s = wall_s;
        run.client_lag_p99_s = client_lag_s.map(|lag| lag.p99);
        run.first_errors = first_errors.into_iter().take(ERRORS_KEPT_MAX).collect();
        let from_s = self.matrix.warm_up.window_s / self.matrix.workload.speed;
        let records: Vec<Record> =
            records.into_iter().filter(|record| record.scheduled_s >= from_s).collect();
        run.requests = records.len() as u64;
        for record in records.iter().filter(|record| !record.is_ok()) {
            let class = record.error.clone().unwrap_or_else(|| "status".to_owned());
            *run.errors_by_class.entry(class).or_default() += 1;
        }
        let max_s = self.matrix.client.lag_p99_max_s;
        match run.client_lag_p99_s.filter(|lag_s| *lag_s > max_s) {
            Some(lag_s) => Err(Failure::Late { lag_s, max_s }),
            None => Ok(records),
        }
    }

    fn replay(&self, url: &str, trace: Arc<Trace>, seed: u64) -> ReplayConfig {
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

    /// What every command may name.
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
    async fn engines(&self, job: &Job, directory: &Path) -> Result<Fleet, Failure> {
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
        let mut found = Fleet { engines: Vec::new(), places: Vec::new() };
        let names = template::port_names([command.as_str()]);
        for index in 0..fleet.engines {
            let what = format!("engine {index}");
            let mut values = self.values(job, directory);
            values.set("index", index.to_string());
            let (url, ports) = ports(&mut values, &names).map_err(|why| start(&what, why))?;
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
        let path = match &self.matrix.fleet.flush {
            None | Some(Flush::Nothing) => return Ok(()),
            Some(Flush::Vllm) => "/reset_prefix_cache",
            Some(Flush::Sglang) => "/flush_cache",
            Some(Flush::Post(path)) => path,
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
                                return Err(fail("it does not end".to_owned()));
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
            let answered = self.ask(Method::POST, &url).await;
            let fail = |why: String| Failure::Flush { url: place.url.clone(), why };
            match answered {
                Ok(200..300) => {}
                Ok(404) => {
                    let hint = match &self.matrix.fleet.flush {
                        Some(Flush::Vllm) => "; vLLM has this path only with VLLM_SERVER_DEV_MODE=1",
                        _ => "",
                    };
                    return Err(fail(format!("POST {path} answered 404{hint}")));
                }
                Ok(status) => return Err(fail(format!("POST {path} answered {status}"))),
                Err(why) => return Err(fail(why)),
            }
        }
        Ok(())
    }

    /// A router that knows nothing yet, ready to serve.
    async fn router(
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
            values.set("program", self.path(&template::file(&program, &values).trim_end().to_owned()));
            values.set("config", directory.join("router.conf").to_string_lossy());
            let (url, _) = ports(&mut values, &names).map_err(|why| start(&arm.name, why))?;
            let text = template::file(config, &values);
            std::fs::write(directory.join("router.conf"), text).map_err(|why| start(&arm.name, why))?;
            let words = self.words(&arm.name, &command, &values)?;
            let mut process = self.start(&arm.name, &words, log.clone())?;
            let ready = join(&url, &Ready(template::file(&ready.0, &values).trim_end().to_owned()));
            match self.until_ready(&arm.name, &ready, fleet, Some(&mut process)).await {
                Ok(()) => return Ok(Serving { process: Some(process), url }),
                // Somebody may have taken its port; another one is tried.
                Err(Failure::Ended(_)) if start_n < STARTS && Instant::now() < deadline => {}
                Err(failure) => return Err(failure),
            }
        }
        unreachable!("the last start returns")
    }

    /// Sends short requests until all of a set were answered well: the router has found its engines, and connections are
    /// open.
    async fn warm(&self, router: &mut Serving, fleet: &mut Fleet) -> Result<(), Failure> {
        if self.warm_up.requests.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + self.ready_timeout();
        loop {
            // Other text each time, and none that a run has.
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
            let answered = self.ask(Method::GET, url).await;
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

    /// The status of an answer.
    async fn ask(&self, method: Method, url: &str) -> Result<u16, String> {
        let uri: Uri = url.parse().map_err(|error| format!("{url}: {error}"))?;
        let mut request = Request::new(Full::default());
        (*request.method_mut(), *request.uri_mut()) = (method, uri);
        let answer = async {
            let answer = self.client.request(request).await.map_err(|error| error.to_string())?;
            let status = answer.status().as_u16();
            answer.into_body().collect().await.map_err(|error| error.to_string())?;
            Ok(status)
        };
        match tokio::time::timeout(ASK_MAX, answer).await {
            Ok(answered) => answered.map_err(|why: String| format!("{url}: {why}")),
            Err(_) => Err(format!("{url}: no answer within {ASK_MAX:?}")),
        }
    }

    fn words(&self, what: &str, command: &str, values: &Values) -> Result<Vec<String>, Failure> {
        let mut words = template::command(command, values)
            .map_err(|why| Failure::Command { what: what.to_owned(), why })?;
        words[0] = self.path(&words[0]);
        Ok(words)
    }

    /// A program by its path: relative to the matrix's file, if it has a slash.
    fn path(&self, program: &str) -> String {
        match program.contains('/') && !program.starts_with('/') {
            true => self.place.directory.join(program).to_string_lossy().into_owned(),
            false => program.to_owned(),
        }
    }

    fn start(&self, what: &str, words: &[String], log: PathBuf) -> Result<Process, Failure> {
        Process::start(what, words, &self.place.directory, log).map_err(|why| start(what, why))
    }

    /// The routers with what they call their versions.
    async fn versions(&self) -> Vec<Named> {
        let mut found = Vec::new();
        let mut values = Values::default();
        values.set("kvlane", self.place.kvlane.to_string_lossy());
        for arm in &self.arms {
            let program = arm.router.program.clone().unwrap_or_default();
            values.set("program", self.path(template::file(&program, &values).trim_end()));
            let words =
                arm.router.version.as_ref().and_then(|text| self.words("version", text, &values).ok());
            let version = match words {
                Some(words) => version(words).await,
                None => None,
            };
            found.push(Named { router: arm.name.clone(), version });
        }
        found
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
    fn check(&mut self, fleet: &mut Fleet) -> Result<(), Failure> {
        let ended = self.process.as_mut().and_then(Process::ended).or_else(|| fleet.ended());
        ended.map_or(Ok(()), |why| Err(Failure::Ended(why)))
    }
}

fn start(what: &str, why: io::Error) -> Failure {
    Failure::Start { what: what.to_owned(), why }
}

/// Sets `{port}` and the ports that are named; returns the address of the first.
fn ports(values: &mut Values, names: &[&str]) -> io::Result<(String, BTreeMap<String, u16>)> {
    let free = free_ports(1 + names.len())?;
    values.set("port", free[0].to_string());
    let named: BTreeMap<String, u16> =
        names.iter().map(ToString::to_string).zip(free[1..].iter().copied()).collect();
    for (name, port) in &named {
        values.set(&format!("port:{name}"), port.to_string());
    }
    Ok((format!("http://127.0.0.1:{}", free[0]), named))
}

/// A path of a server, or a URL that stands for itself.
fn join(url: &str, ready: &Ready) -> String {
    match ready.0.starts_with("http") {
        true => ready.0.clone(),
        false => format!("{url}/{}", ready.0.trim_start_matches('/')),
    }
}

/// Short requests that have nothing in common.
fn warm_up(count: u32) -> Trace {
    let arrivals =
        generate::Arrivals::Poisson { rate: WARM_UP_RATE, count: Some(count.max(1)), seconds: None };
    let short = generate::Spread::fixed(32);
    let config = generate::unshared::Config {
        input_tokens: short.clone(),
        output_tokens: generate::Spread::fixed(2),
        arrivals,
        ..generate::unshared::Config::default()
    };
    // Settings of this file make sense.
    let trace = generate::generate(&generate::Workload::Unshared(config), 0).unwrap_or_default();
    if count == 0 { Trace::default() } else { trace }
}

/// What a program says of its version: the first word that has two dots, else its first line.
async fn version(words: Vec<String>) -> Option<String> {
    let asked = tokio::task::spawn_blocking(move || Command::new(&words[0]).args(&words[1..]).output().ok());
    let output = tokio::time::timeout(VERSION_MAX, asked).await.ok()?.ok()??;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let is_version = |word: &&str| {
        let word = word.rsplit('/').next().unwrap_or(word);
        word.starts_with(|c: char| c.is_ascii_digit()) && word.matches('.').count() >= 2
    };
    let word = said.split_whitespace().find(is_version).and_then(|word| word.rsplit('/').next());
    word.or_else(|| said.lines().next()).map(str::to_owned)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine that sends.
fn machine() -> BTreeMap<String, String> {
    let mut found = BTreeMap::from([
        ("cores".to_owned(), cores().to_string()),
        ("system".to_owned(), format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
    ]);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    found.extend(cpu.map(|cpu| ("cpu".to_owned(), cpu)));
    found
}
