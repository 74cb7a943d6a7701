//! `kvlane`: an HTTP gateway in front of OpenAI-compatible LLM servers.

mod cli;
mod commands;
mod config;

use std::io::{IsTerminal as _, Write as _};

use kvlane_gateway::config::{Log, LogFormat};
use kvlane_gateway::mode::Mode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use self::cli::{Cli, Command, Format};

/// Requests allocate and free on one relay thread; this allocator is optimized for that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    let Cli { log_level, log_format, command } = Cli::read();
    let Some(command) = command else { return cli::begin() };
    let quiet = match &command {
        Command::Doctor(_) => true,
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.is_quiet(),
        _ => false,
    };
    let said = match &command {
        Command::Serve(args) | Command::Epp(args) => args.log(),
        _ => Log::default(),
    };
    let default = if quiet { "warn" } else { "info" };
    let log_level = match log_level.as_deref().or(said.level.as_deref()).unwrap_or(default) {
        // As Python calls them.
        "warning" => "warn",
        "critical" => "error",
        level => level,
    };
    let json = match log_format {
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
        log.with_ansi(has_colours()).with_target(false).init();
    }
    let serves = matches!(command, Command::Serve(_) | Command::Epp(_));
    let done = match command {
        Command::Serve(args) => commands::serve::run(&args, Mode::Gateway, json),
        Command::Epp(args) => commands::serve::run(&args, Mode::Picker, json),
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.run(),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Key(command) => commands::key::run(&command),
        Command::Check(args) => commands::check::run(&args),
        Command::Migrate(args) => commands::migrate::run(&args),
        Command::Config { schema } => commands::check::print_example(schema),
        Command::Completions { shell } => commands::shell::print_completions(shell),
        Command::Man { dir } => commands::shell::write_pages(&dir),
    };
    match done {
        Ok(code) => code,
        // `kvlane config | head`: the reader has what it wants.
        Err(error) if !serves && is_closed_output(&error) => std::process::ExitCode::SUCCESS,
        Err(error) if json => {
            tracing::error!(error = told_once(&error), "kvlane failed");
            std::process::ExitCode::FAILURE
        }
        Err(error) => fail(&error),
    }
}

/// Whether stderr is a terminal that shows colours, and the user has not declined them: <https://no-color.org>.
fn has_colours() -> bool {
    let declined = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::stderr().is_terminal() && !declined
}

/// Prints why the program ends, whatever the log level is.
fn fail(error: &anyhow::Error) -> std::process::ExitCode {
    // If stderr is closed, the error cannot be reported.
    let _ = writeln!(std::io::stderr(), "error: {}", told_once(error));
    std::process::ExitCode::FAILURE
}

/// Whether what reads the output of a command has closed it.
fn is_closed_output(error: &anyhow::Error) -> bool {
    let is_closed = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    error.root_cause().downcast_ref().is_some_and(is_closed)
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
