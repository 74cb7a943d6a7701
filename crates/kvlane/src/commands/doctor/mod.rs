//! `kvlane doctor`: checks whether engines provide everything that exact cache knowledge needs.
//!
//! The doctor queries each engine's configuration and feeds, sends it one small request twice, and listens to its
//! events meanwhile: the stored and reused blocks that it reports must match the prediction. Each row of the report
//! has a finding and a remedy.

mod check;
mod engine;
mod events;
mod feed;
mod fleet;
mod pairs;
mod request;
mod show;
mod tokens;
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{ArgAction, Args};
use kvlane_core::disaggregation::Role;
use kvlane_fleet::tokenize::hub::{Hub, is_id};
use kvlane_http::client::Client;
use kvlane_http::secret::Secret;
use kvlane_tokens::{Source, Tokenizer};
use kvlane_wire::disaggregation::Connector;

use self::check::{Checks, Verdict};
use self::engine::Facts;
use self::workers::{Access, Configured, Engine};

/// Engines checked at a time.
const AT_A_TIME: usize = 8;
/// Exit codes beside 0.
const FAILURES: u8 = 1;
const USAGE: u8 = 2;

#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// The engines: `http://host:port`.
    #[arg(required_unless_present_any = ["config", "prefill", "decode"], value_name = "URL")]
    urls: Vec<String>,
    /// An engine that computes prompts for others, and its bootstrap port if it is SGLang's. Repeatable.
    #[arg(long, num_args = 1..=2, value_names = ["URL", "BOOTSTRAP_PORT"], action = ArgAction::Append)]
    prefill: Vec<String>,
    /// An engine that decodes answers whose prompt another has computed. Repeatable.
    #[arg(long, num_args = 1.., value_name = "URL")]
    decode: Vec<String>,
    /// How engines pass KV blocks on: that of the configuration by default; with `--prefill` or `--decode` sglang if there is
    /// a bootstrap port, else nixl.
    #[arg(long, value_name = "CONNECTOR", value_parser = connector)]
    kv_connector: Option<Connector>,
    /// Configuration of a gateway: its workers are examined, too, and those that its sources of discovery name.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// URL of a gateway in front of them, to check its view: its metrics port, or its clients' port on loopback.
    #[arg(long, value_name = "URL")]
    gateway: Option<String>,
    /// The key to send to the engines.
    #[arg(long, env = "KVLANE_WORKER_API_KEY", hide_env_values = true, value_name = "KEY")]
    worker_api_key: Option<Secret>,
    /// A header field to send to the engines with each request, as in `--header 'x-tenant: ops'`. Repeatable.
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// The certificate of the CA of the engines' `https` (PEM), if the system does not trust it (`tls.upstream_ca`).
    #[arg(long, visible_alias = "ca", value_name = "FILE")]
    upstream_ca: Option<PathBuf>,
    /// The key to send to the gateway: of a viewer or admin.
    #[arg(long, env = "KVLANE_ADMIN_API_KEY", hide_env_values = true, value_name = "KEY")]
    admin_api_key: Option<Secret>,
    /// The model's tokenizer, as the gateway uses it: its directory, or a tokenizer file in it.
    #[arg(long, visible_alias = "model-path", value_name = "PATH")]
    tokenizer_path: Option<PathBuf>,
    /// A file with a chat template that replaces the model's own.
    #[arg(long, value_name = "FILE", requires = "tokenizer_path")]
    chat_template: Option<PathBuf>,
    /// KV event port of engines that do not announce it; rank n publishes n higher.
    #[arg(long, value_name = "PORT")]
    kv_events_port: Option<u16>,
    /// Replay port of these engines.
    #[arg(long, value_name = "PORT", requires = "kv_events_port")]
    kv_events_replay_port: Option<u16>,
    /// Timeout in seconds of each answer, and of each wait for events.
    #[arg(long, default_value_t = 5.0, value_parser = seconds)]
    timeout_secs: f64,
    /// Only query, without a request to the model.
    #[arg(long)]
    no_request: bool,
    /// Write the report as JSON to a file, or to stdout without one, instead of the table.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Settings of the checks.
pub(super) struct Way {
    tokenizer: Option<Tokenizer>,
    kv_events_port: Option<u16>,
    kv_events_replay_port: Option<u16>,
    patience: Duration,
    sends: bool,
    /// How engines pass KV blocks on, if two of them share requests.
    connector: Option<Connector>,
}

/// Facts about one engine, and the results of its checks.
pub(super) struct Examined {
    url: String,
    facts: Facts,
    checks: Checks,
}

/// The whole report.
pub(super) struct Report {
    /// About the configuration's workers and sources, if there is one.
    discovery: Option<Checks>,
    engines: Vec<Examined>,
    fleet: Checks,
    gateway: Option<Checks>,
}

fn connector(text: &str) -> Result<Connector, String> {
    Connector::named(text).ok_or_else(|| {
        let names = Connector::ALL.map(Connector::name).join(", ");
        format!("no KV connector: use one of {names}")
    })
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(secs) if (0.001..=3600.0).contains(&secs) => Ok(secs),
        _ => Err("must be a number of seconds from 0.001 to 3600".into()),
    }
}

/// Runs it.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let mut way = match Way::new(args) {
        Ok(way) => way,
        Err(error) => return usage(&error),
    };
    let access = Access {
        key: args.worker_api_key.as_ref(),
        fields: &args.header,
        authority: args.upstream_ca.as_deref(),
        limit: way.patience,
    };
    let engines = engines_of(args, &access);
    let gateway = args.gateway.as_ref().map(|url| match &args.admin_api_key {
        Some(key) => {
            let client = Client::at(url, way.patience)?;
            client.with_key(key).map_err(|error| format!("--admin-api-key: {error}"))
        }
        None => Client::at(url, way.patience),
    });
    let configured = args.config.as_ref().map(|path| Configured::read(path, access.authority)).transpose();
    let (mut engines, gateway, configured) = match (engines, gateway.transpose(), configured) {
        (Ok(engines), Ok(gateway), Ok(configured)) => (engines, gateway, configured),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => return usage(&error),
    };
    if let Some(configured) = &configured {
        way.connector = way.connector.or(configured.connector());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        let discovery = match configured {
            Some(configured) => Some(configured.add(&mut engines, &access).await),
            None => None,
        };
        Report { discovery, ..examine(&engines, gateway.as_ref(), &way).await }
    });
    show::write(&report, args.json.as_deref())?;
    Ok(if report.count(Verdict::Fail) > 0 { ExitCode::from(FAILURES) } else { ExitCode::SUCCESS })
}

/// The engines of the command line.
fn engines_of(args: &DoctorArgs, access: &Access<'_>) -> Result<Vec<Engine>, String> {
    let engine = |url: &String, role| Ok::<_, String>(Engine { role, ..Engine::at(url, access)? });
    let mut engines = Vec::new();
    for said in &args.prefill {
        match (said.parse::<u16>(), engines.last_mut()) {
            // The second value of the flag.
            (Ok(port), Some(Engine { bootstrap_port, .. })) => *bootstrap_port = Some(port),
            (Ok(_), None) => return Err(format!("--prefill {said}: the URL comes first")),
            (Err(_), _) => engines.push(engine(said, Role::Prefill)?),
        }
    }
    for url in &args.decode {
        engines.push(engine(url, Role::Decode)?);
    }
    for url in &args.urls {
        engines.push(engine(url, Role::Both)?);
    }
    Ok(engines)
}

/// The command line cannot be executed.
fn usage(error: &str) -> Result<ExitCode> {
    use std::io::Write as _;
    // If stderr is closed, the error cannot be reported.
    let _ = writeln!(std::io::stderr(), "error: {error}");
    Ok(ExitCode::from(USAGE))
}

async fn examine(engines: &[Engine], gateway: Option<&Client>, way: &Way) -> Report {
    let mut examined = Vec::new();
    for some in engines.chunks(AT_A_TIME) {
        let mut asked: Vec<_> = some.iter().map(|engine| Box::pin(engine::examine(engine, way))).collect();
        // They wait concurrently and are reported in order.
        let together = std::future::poll_fn(|cx| {
            asked.retain_mut(|one| match one.as_mut().poll(cx) {
                std::task::Poll::Ready(done) => {
                    examined.push(done);
                    false
                }
                std::task::Poll::Pending => true,
            });
            if asked.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        });
        together.await;
    }
    let place = |one: &Examined| engines.iter().position(|engine| engine.client.url() == one.url);
    examined.sort_by_key(place);
    let mut fleet = fleet::compare(&examined);
    fleet.0.extend(pairs::compare(engines, &examined, way).await.0);
    let gateway = match gateway {
        Some(gateway) => Some(fleet::gateway(gateway, &examined).await),
        None => None,
    };
    Report { discovery: None, engines: examined, fleet, gateway }
}

// === impl Way ===

impl Way {
    fn new(args: &DoctorArgs) -> Result<Self, String> {
        let tokenizer = match &args.tokenizer_path {
            Some(path) => {
                let path = match path.to_str() {
                    Some(id) if is_id(path) && !path.exists() => {
                        Hub::of_environment(false).find(id).ok_or_else(|| {
                            format!("--tokenizer-path: {id} is neither a path nor in the Hugging Face cache")
                        })?
                    }
                    _ => path.clone(),
                };
                let source = Source { path, chat_template: args.chat_template.clone() };
                let loaded = Tokenizer::load(&source, &kvlane_tokens::Config::default());
                Some(loaded.map_err(|error| format!("--tokenizer-path: {error}"))?)
            }
            None => None,
        };
        Ok(Self {
            tokenizer,
            kv_events_port: args.kv_events_port,
            kv_events_replay_port: args.kv_events_replay_port,
            patience: Duration::from_secs_f64(args.timeout_secs),
            sends: !args.no_request,
            connector: args.kv_connector.or_else(|| {
                let has_port = args.prefill.iter().any(|said| said.parse::<u16>().is_ok());
                (!args.prefill.is_empty() || !args.decode.is_empty()).then(|| Connector::implied(has_port))
            }),
        })
    }
}

// === impl Report ===

impl Report {
    fn count(&self, verdict: Verdict) -> usize {
        let engines = self.engines.iter().map(|examined| &examined.checks);
        let others = self.discovery.iter().chain([&self.fleet]).chain(&self.gateway);
        engines.chain(others).map(|checks| checks.count(verdict)).sum()
    }
}
