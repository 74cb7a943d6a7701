//! `kvlane`: an HTTP gateway in front of OpenAI-compatible LLM servers.

mod commands;
mod config;

use std::io::{IsTerminal as _, Write as _};

use clap::{Parser, Subcommand, ValueEnum};
use kvlane_gateway::config::{Log, LogFormat};
use kvlane_gateway::mode::Mode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Requests allocate and free on one relay thread; this allocator is optimized for that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// HTTP gateway in front of OpenAI-compatible LLM servers. It sends each request to the server where its prefix is in
/// the KV cache, weighed against the load there.
#[derive(Parser)]
#[command(name = "kvlane", version, max_term_width = 110)]
struct Cli {
    /// Log level of stderr: error, warn, info, debug, trace, or a filter like `kvlane_gateway=debug` [default: info;
    /// demo, doctor and replay: warn].
    #[arg(long, global = true, env = "KVLANE_LOG")]
    log_level: Option<String>,
    /// Log format: `text`, or `json` with one object per line [default: text].
    #[arg(long, global = true, env = "KVLANE_LOG_FORMAT", value_enum)]
    log_format: Option<Format>,
    #[command(subcommand)]
    command: Command,
}

/// Log formats.
#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Run the gateway.
    Serve(Box<config::ConfigArgs>),
    /// Run the endpoint picker: Envoy, or another data plane, sends the requests (docs/kubernetes.md).
    Epp(Box<config::ConfigArgs>),
    #[cfg(feature = "lab")]
    #[command(flatten)]
    Lab(Box<commands::lab::Command>),
    /// Check whether engines provide everything that exact cache knowledge needs.
    Doctor(Box<commands::doctor::DoctorArgs>),
    /// Generate or hash an API key.
    #[command(subcommand)]
    Key(commands::key::KeyCommand),
    /// Validate the configuration that `serve` would use, and print it.
    Check(Box<config::ConfigArgs>),
    /// Turn the configuration of another router into one of kvlane's.
    Migrate(commands::migrate::MigrateArgs),
    /// Print a configuration file with every key, its default and its meaning.
    Config {
        /// Print the file's JSON schema instead, for editors.
        #[arg(long)]
        schema: bool,
    },
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    let quiet = match &cli.command {
        Command::Doctor(_) => true,
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.is_quiet(),
        _ => false,
    };
    let said = match &cli.command {
        Command::Serve(args) | Command::Epp(args) => args.log(),
        _ => Log::default(),
    };
    let default = if quiet { "warn" } else { "info" };
    let log_level = match cli.log_level.as_deref().or(said.level.as_deref()).unwrap_or(default) {
        // As Python calls them.
        "warning" => "warn",
        "critical" => "error",
        level => level,
    };
    let json = match cli.log_format {
        Some(format) => matches!(format, Format::Json),
        None => said.format == LogFormat::Json,
    };
    // A single word is a level; the filter would take any other word for a module's name.
    if !log_level.contains(['=', ',']) && log_level.parse::<LevelFilter>().is_err() {
        return fail(&anyhow::anyhow!(
            "--log-level {log_level}: must be error, warn, info, debug, trace, or module=level"
        ));
    }
    // The NATS client logs each attempt to connect; what changes there is logged by the exchange between replicas.
    let most = match log_level.contains("async_nats") {
        true => log_level.to_owned(),
        false => format!("{log_level},async_nats=off"),
    };
    let filter = match EnvFilter::try_new(most) {
        Ok(filter) => filter,
        Err(error) => return fail(&anyhow::anyhow!("--log-level {log_level}: {error}")),
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json {
        log.json().flatten_event(true).with_current_span(false).with_span_list(false).init();
    } else {
        log.with_ansi(std::io::stderr().is_terminal()).with_target(false).init();
    }
    let done = match cli.command {
        Command::Serve(args) => commands::serve::run(&args, Mode::Gateway),
        Command::Epp(args) => commands::serve::run(&args, Mode::Picker),
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.run(),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Key(command) => commands::key::run(&command),
        Command::Check(args) => commands::check::run(&args),
        Command::Migrate(args) => commands::migrate::run(&args),
        Command::Config { schema } => commands::check::print_example(schema),
    };
    match done {
        Ok(code) => code,
        Err(error) if json => {
            tracing::error!(error = told_once(&error), "kvlane failed");
            std::process::ExitCode::FAILURE
        }
        Err(error) => fail(&error),
    }
}

/// Prints why the program ends, whatever the log level is.
fn fail(error: &anyhow::Error) -> std::process::ExitCode {
    // If stderr is closed, the error cannot be reported.
    let _ = writeln!(std::io::stderr(), "error: {}", told_once(error));
    std::process::ExitCode::FAILURE
}

/// An error with its causes. A cause that an error already contains is not repeated.
fn told_once(error: &anyhow::Error) -> String {
    let mut told = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !told.contains(&cause) {
            if !told.is_empty() {
                told.push_str(": ");
            }
            told.push_str(&cause);
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    #[test]
    fn a_cause_that_is_told_is_not_told_again() {
        let cause = std::io::Error::other("no such file");
        let error = anyhow::Error::new(cause).context("cannot open x: no such file");
        assert_eq!(super::told_once(&error), "cannot open x: no such file");
        let error = Err::<(), _>(std::io::Error::other("no such file")).context("x").unwrap_err();
        assert_eq!(super::told_once(&error), "x: no such file");
    }
}
