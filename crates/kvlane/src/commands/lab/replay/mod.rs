//! `kvlane replay`: sends a trace or real prompts to a server at their arrival times, and measures the answers.

mod show;

use std::fs::File;
use std::io::{BufReader, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_lab::client::{Target, Tls};
use kvlane_lab::engine_caches::{self, EngineCache};
use kvlane_lab::prompt::{Words, WordsError, given};
use kvlane_lab::replay::{Bounds, models};
use kvlane_lab::{Api, Prompts, ReplayConfig, replay};
use kvlane_tokens::{Config as TokensConfig, Source, Tokenizer};
use kvlane_trace::record;
use kvlane_trace::trace::Trace;
use kvlane_wire::engine::PrefixCache;
use serde_json::{Map, Value};
use tokio::sync::Notify;

use self::show::Found;
use super::page::PageArgs;
use super::trace::ReadArgs;

/// Exit code if the client was the bottleneck.
const BOTTLENECK: u8 = 3;
/// Exit code at the second interrupt, as in shells.
const INTERRUPTED: i32 = 130;

/// Flags of the replay.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReplayArgs {
    /// The server, as http://host:port or https://host: a gateway or engine with OpenAI's API.
    url: String,
    /// A trace file, in any format that `kvlane trace` reads, or one that comes with kvlane: `mooncake-conversation`,
    /// `weka-agentic` or `azure-conversation`. Prompts are generated from its block ids: equal ids are equal text.
    #[arg(long, value_name = "FILE", required_unless_present = "prompts")]
    trace: Option<PathBuf>,
    /// Real prompts, one JSON object per line with `messages`, `prompt` or `body`. With --trace they are sent at its
    /// times, otherwise at their own `arrival_s` or `timestamp`, or at a --rate.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// With --prompts: conversations that begin per second, at random times.
    #[arg(long, value_name = "PER_SECOND", conflicts_with = "trace")]
    rate: Option<f64>,
    /// Number of requests to send, from the first.
    #[arg(long, value_name = "N")]
    requests: Option<u32>,
    /// Factor on the rate at which conversations begin. The pace within a conversation does not change.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    speed: f64,
    /// The model of every request [default: the only one that the server has].
    #[arg(long)]
    model: Option<String>,
    /// The API to use.
    #[arg(long, value_enum, default_value_t = ApiArg::Chat)]
    api: ApiArg,
    /// Length of answers: `exact` requests the trace's length and `ignore_eos`, `max` only sets `max_tokens`, `none`
    /// sets neither [default: exact; with --prompts: max].
    #[arg(long, value_enum)]
    lengths: Option<Lengths>,
    /// Generate prompts from the model's own tokens: its directory or its tokenizer.json. Each block of the trace
    /// then has exactly its number of tokens.
    #[arg(long, value_name = "DIR|FILE", conflicts_with = "prompts")]
    tokenizer: Option<PathBuf>,
    /// Seed of the text; another seed generates text that no cache holds.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// API key, sent as a bearer token.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// A further header of every request; repeatable.
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// A further field of every body, as in `temperature=0`; a value that is not JSON is text. Repeatable.
    #[arg(long, value_name = "NAME=JSON", value_parser = field)]
    field: Vec<(String, Value)>,
    /// An engine behind the server, as http://host:port: its own prefix cache counters, read from its /metrics before
    /// and after, are shown. Repeatable.
    #[arg(long, value_name = "URL")]
    engine: Vec<String>,
    /// CA certificates for an https server, in PEM [default: the system's].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Timeout of a request.
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    timeout_secs: u64,
    /// Maximum lateness of this client in milliseconds, at the 99th percentile, for its figures to count.
    #[arg(long, default_value_t = Bounds::default().late_s * 1e3, value_name = "MILLISECONDS")]
    late_max_ms: f64,
    /// Maximum share of CPU time used by this client, in percent, for its figures to count.
    #[arg(long, default_value_t = Bounds::default().cpu_share * 100.0, value_name = "PERCENT")]
    cpu_max_percent: f64,
    /// Show the figures even if this client was the bottleneck.
    #[arg(long)]
    despite_client: bool,
    /// Write a record for each request, one JSON object per line.
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// Write the figures as JSON (schema kvlane.replay/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    read: ReadArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ApiArg {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lengths {
    Exact,
    Max,
    None,
}

/// Why a tokenizer yields no words.
#[derive(Debug, thiserror::Error)]
enum PickError {
    #[error(transparent)]
    Words(#[from] WordsError),
    #[error("the tokenizer fails on `{0}`: {1}")]
    Unknown(String, String),
}

/// Runs it.
pub(crate) fn run(args: &ReplayArgs) -> Result<ExitCode> {
    ensure!(args.speed > 0.0 && args.speed.is_finite(), "--speed {}: must be above 0", args.speed);
    ensure!(args.late_max_ms > 0.0, "--late-max-ms {}: must be above 0", args.late_max_ms);
    ensure!(args.cpu_max_percent > 0.0, "--cpu-max-percent {}: must be above 0", args.cpu_max_percent);
    let (trace, prompts) = args.load()?;
    ensure!(!trace.requests.is_empty(), "the trace contains no request");
    // Detect a file that cannot be written before the run, not after it. An existing file is kept until there is a
    // result to replace it.
    let json = args.json.as_deref().filter(|path| path.as_os_str() != "-");
    for (flag, path) in [("--records", args.records.as_deref()), ("--json", json)] {
        let Some(path) = path else { continue };
        let opened = File::options().create(true).append(true).open(path);
        opened.with_context(|| format!("{flag} {}", path.display()))?;
    }
    args.page.check()?;
    let mut config = args.config(trace, prompts)?;
    if args.speed != 1.0 {
        args.tell(&format!(
            "note: conversations begin {} times as fast as in the trace, while turns keep their think times; so the \
             load differs from the trace's",
            args.speed
        ))?;
    }
    for note in &config.trace.notes {
        args.tell(&format!("note: {note}"))?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let engines = args.engines()?;
    let (report, caches) = runtime.block_on(async {
        let before = read_caches(&engines).await.context("--engine")?;
        if config.model.is_empty() && !args.keeps_models(&config.prompts) {
            config.model = model(&config).await?;
        }
        let bar = ProgressBar::with_draw_target(
            Some(config.trace.requests.len() as u64),
            ProgressDrawTarget::stderr(),
        );
        bar.set_style(ProgressStyle::with_template("{bar:48} {pos}/{len} answered  {elapsed}")?);
        tokio::spawn(stop_when_told(config.stop.clone()));
        let report = replay(config.clone(), |done, _| bar.set_position(done as u64)).await?;
        bar.finish_and_clear();
        let caches = match read_caches(&engines).await {
            Ok(after) => caches_between(&before, &after),
            Err(why) => {
                args.tell(&format!("note: {why}; its prefix cache is not shown"))?;
                Vec::new()
            }
        };
        anyhow::Ok((report, caches))
    })?;
    if let Some(path) = &args.records {
        let file = std::io::BufWriter::new(File::create(path)?);
        record::write(&report.records, file).context("--records")?;
    }
    if report.unfinished > 0 {
        args.tell(&format!(
            "note: interrupted; {} requests had not ended and are left out",
            report.unfinished
        ))?;
    }
    let bounds = Bounds { late_s: args.late_max_ms / 1e3, cpu_share: args.cpu_max_percent / 100.0 };
    let why = report.client.bottleneck(&bounds);
    if !why.is_empty() {
        let verdict = format!("this client was the bottleneck: {}", why.join("; "));
        if !args.despite_client {
            args.tell(&format!(
                "{verdict}. Its figures would describe the client, not the server, so they are not shown{}. Run it on a machine with \
                 no other load, at a lower rate, or with --despite-client",
                if args.records.is_some() { ", only the records are written" } else { "" },
            ))?;
            return Ok(ExitCode::from(BOTTLENECK));
        }
        args.tell(&format!("note: {verdict}"))?;
    }
    let sent = args.trace.as_deref().or(args.prompts.as_deref());
    let found = Found::new(&config, &report, sent, why, caches);
    for error in &report.first_errors {
        args.tell(error)?;
    }
    match (json, &args.json) {
        (None, Some(_)) => writeln!(std::io::stdout(), "{}", found.to_json()?)?,
        (path, _) => {
            if let Some(path) = path {
                std::fs::write(path, format!("{}\n", found.to_json()?)).context("--json")?;
            }
            write!(std::io::stdout(), "{}", found.to_text())?;
        }
    }
    args.page.write(|| found.page(&report.records))?;
    let answered = report.records.iter().any(record::Record::is_ok);
    Ok(if answered && report.unfinished == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The first interrupt ends the replay, the second one the program.
async fn stop_when_told(stop: Arc<Notify>) {
    // If no signal handler can be installed, an interrupt ends the program.
    if tokio::signal::ctrl_c().await.is_ok() {
        stop.notify_one();
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(INTERRUPTED);
        }
    }
}

/// An engine's counters, by its address.
type Caches = Vec<(String, Vec<(u32, PrefixCache)>)>;

async fn read_caches(engines: &[(String, Target)]) -> Result<Caches> {
    let mut caches = Vec::new();
    for (engine, target) in engines {
        let counters = engine_caches::read(engine, target).await.map_err(anyhow::Error::msg)?;
        caches.push((engine.clone(), counters));
    }
    Ok(caches)
}

fn caches_between(before: &Caches, after: &Caches) -> Vec<EngineCache> {
    let pairs = before.iter().zip(after);
    pairs.flat_map(|((engine, was), (_, is))| engine_caches::between(engine, was, is)).collect()
}

/// The model that the server has.
async fn model(config: &ReplayConfig) -> Result<String> {
    match models(config).await?.as_slice() {
        [only] => Ok(only.clone()),
        [] => bail!("the server lists no models; set --model"),
        several => bail!("the server has the models {}; select one with --model", several.join(", ")),
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':').context("a header must be NAME: VALUE")?;
    Ok((name.trim().parse().context("its name")?, value.trim().parse().context("its value")?))
}

fn field(text: &str) -> Result<(String, Value)> {
    let (name, value) = text.split_once('=').context("a field must be NAME=VALUE")?;
    ensure!(!name.is_empty(), "a field needs a name");
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
}

// === impl ReplayArgs ===

impl ReplayArgs {
    /// The requests to send, and the source of prompts.
    fn load(&self) -> Result<(Trace, Prompts)> {
        let open = |path: &PathBuf| self.read.open(path, self.seed).context("--trace");
        let mut trace = self.trace.as_ref().map(open).transpose()?;
        let prompts = match &self.prompts {
            Some(path) => {
                let flag = || format!("--prompts {}", path.display());
                let file = File::open(path).with_context(flag)?;
                let mut prompts = given::read(BufReader::new(file)).with_context(flag)?;
                if trace.is_none() {
                    trace = Some(given::trace(&mut prompts, self.rate, self.seed).with_context(flag)?);
                }
                Prompts::Given(prompts.into())
            }
            None => Prompts::Words(self.words()?),
        };
        let mut trace = trace.context("--trace or --prompts is required")?;
        if let Some(first) = self.requests {
            trace = trace.select(0..first.min(trace.requests.len() as u32));
        }
        Ok((trace, prompts))
    }

    fn words(&self) -> Result<Words> {
        let Some(path) = &self.tokenizer else { return Ok(Words::default()) };
        let flag = || format!("--tokenizer {}", path.display());
        let tokenizer = Tokenizer::load(&Source::at(path), &TokensConfig::default()).with_context(flag)?;
        let mut ids = Vec::new();
        let count = |text: &str| {
            ids.clear();
            let encoded = tokenizer.text(text, false, &mut ids);
            encoded.map_err(|why| PickError::Unknown(text.to_owned(), why.to_string()))?;
            Ok::<usize, PickError>(ids.len())
        };
        Words::pick(count).with_context(flag)
    }

    fn config(&self, trace: Trace, prompts: Prompts) -> Result<ReplayConfig> {
        let lengths = self.lengths.unwrap_or(match prompts {
            Prompts::Words(_) => Lengths::Exact,
            Prompts::Given(_) => Lengths::Max,
        });
        let tls = self.tls(&self.url)?;
        Ok(ReplayConfig {
            base_url: self.url.clone(),
            model: self.model.clone().unwrap_or_default(),
            trace: Arc::new(trace),
            speed: self.speed,
            seed: self.seed,
            request_timeout: Duration::from_secs(self.timeout_secs),
            ignore_eos: lengths == Lengths::Exact,
            tell_lengths: lengths != Lengths::None,
            api_key: self.api_key.clone().filter(|key| !key.is_empty()),
            prompts,
            api: match self.api {
                ApiArg::Chat => Api::Chat,
                ApiArg::Completions => Api::Completions,
            },
            headers: self.header.clone(),
            fields: self.field.iter().cloned().collect::<Map<_, _>>(),
            tls,
            stop: Arc::default(),
        })
    }

    /// CAs for an https server.
    fn tls(&self, url: &str) -> Result<Option<Tls>> {
        if !url.starts_with("https:") {
            return Ok(None);
        }
        let tls = kvlane_http::tls::client(self.ca.as_deref());
        Ok(Some(tls.map_err(|error| anyhow::anyhow!("--ca: {}", error.problem))?))
    }

    /// The engines whose caches are shown.
    fn engines(&self) -> Result<Vec<(String, Target)>> {
        let target = |url: &String| {
            let target = Target::new(url, self.tls(url)?, HeaderMap::new());
            Ok((url.clone(), target.map_err(|why| anyhow::anyhow!("--engine {url}: {why}"))?))
        };
        self.engine.iter().map(target).collect()
    }

    /// Whether every prompt names its model.
    fn keeps_models(&self, prompts: &Prompts) -> bool {
        let said = |given: &given::Given| matches!(&given.prompt, given::Prompt::Body(body) if body.contains_key("model"));
        self.field.iter().any(|(name, _)| name == "model")
            || matches!(prompts, Prompts::Given(all) if all.iter().all(said))
    }

    /// Prints a message to stderr.
    fn tell(&self, text: &str) -> Result<()> {
        if std::io::stderr().is_terminal() {
            // A progress bar may occupy this line.
            write!(std::io::stderr(), "\r")?;
        }
        Ok(writeln!(std::io::stderr(), "{text}")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_and_a_field_are_read_as_people_write_them() {
        let (name, value) = header("X-Tenant:  a: b ").expect("a header");
        assert_eq!((name.as_str(), value.to_str().expect("text")), ("x-tenant", "a: b"));
        assert!(header("x-tenant").is_err() && header("x tenant: a").is_err());
        assert_eq!(field("temperature=0.5").expect("a field"), ("temperature".into(), 0.5.into()));
        assert_eq!(field("stop=a=b").expect("a field"), ("stop".into(), "a=b".into()));
        assert!(field("=1").is_err() && field("stop").is_err());
    }
}
