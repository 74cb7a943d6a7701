//! The command line: its commands, their help, and what is said to a wrong one.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kvlane_core::suggest::is_near;

use crate::{commands, config};

/// The exit code when the arguments are wrong, as clap's.
const USAGE: u8 = 2;

/// What `kvlane` says without arguments.
const BEGIN: &str = "\
kvlane is a gateway in front of OpenAI-compatible LLM servers (vLLM, SGLang, llama.cpp).

In front of your servers:  kvlane serve --worker-urls http://127.0.0.1:8000 http://127.0.0.1:8001
Without a GPU:             kvlane demo --keep
Every command:             kvlane --help
";

/// HTTP gateway in front of OpenAI-compatible LLM servers. It sends each request to the server where its prefix is in
/// the KV cache, weighed against the load there.
#[derive(Parser)]
#[command(name = "kvlane", version, max_term_width = 110)]
pub(crate) struct Cli {
    /// Log level of stderr: error, warn, info, debug, trace, or a filter like `kvlane_gateway=debug` [default: info;
    /// demo, doctor and replay: warn].
    #[arg(long, global = true, env = "KVLANE_LOG")]
    pub(crate) log_level: Option<String>,
    /// Log format: `text`, or `json` with one object per line [default: text].
    #[arg(long, global = true, env = "KVLANE_LOG_FORMAT", value_enum, hide_short_help = true)]
    pub(crate) log_format: Option<Format>,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// Log formats.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

#[derive(Subcommand)]
pub(crate) enum Command {
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
    /// Print the completions of a shell: `source <(kvlane completions bash)`.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the man pages to a directory.
    Man {
        /// The directory, as in `~/.local/share/man/man1`; it is made if it is missing.
        dir: PathBuf,
    },
}

/// Examples of commands, in their help.
const EXAMPLES: &[(&str, &str)] = &[
    (
        "serve",
        "  kvlane serve --worker-urls http://10.0.0.7:8000 http://10.0.0.8:8000\n  \
           kvlane serve --config kvlane.yaml --host 0.0.0.0 --api-keys-file keys\n  \
           kvlane serve --selector app=vllm --model-path /models/llama-3.1-8b",
    ),
    ("check", "  kvlane check --config kvlane.yaml"),
    (
        "doctor",
        "  kvlane doctor http://10.0.0.7:8000 http://10.0.0.8:8000\n  \
           kvlane doctor --config kvlane.yaml --gateway http://127.0.0.1:29000",
    ),
    ("migrate", "  kvlane migrate launch.sh > kvlane.yaml\n  kvlane migrate nginx.conf > kvlane.yaml"),
    ("key", "  kvlane key new alice >> keys"),
    ("config", "  kvlane config > kvlane.yaml"),
    (
        "completions",
        "  source <(kvlane completions bash)\n  kvlane completions fish > ~/.config/fish/completions/kvlane.fish",
    ),
    ("man", "  kvlane man ~/.local/share/man/man1"),
    ("demo", "  kvlane demo\n  kvlane demo --keep    # a live dashboard"),
    ("mock-engine", "  kvlane mock-engine --port 8000 --preset llama-3.1-8b@h100"),
    (
        "simulate",
        "  kvlane simulate --trace mooncake-conversation --preset llama-3.3-70b@h100x4 --engines 8 --policy fleet_cost,cache_aware\n  \
           kvlane simulate --list",
    ),
    ("replay", "  kvlane replay http://127.0.0.1:30000 --trace YOUR.jsonl --report report.html"),
    ("explain", "  kvlane explain recordings --worst 5"),
    ("report", "  kvlane report before.jsonl after.jsonl --html report.html"),
    ("bench", "  kvlane bench --example > bench.yaml && kvlane bench bench.yaml --html report.html"),
    ("roofline", "  kvlane roofline --preset qwen3-32b@h100x2"),
    ("calibrate", "  kvlane calibrate http://10.0.0.7:8000 --preset qwen3-32b@h100x2 --out timing.json"),
];

// === impl Cli ===

impl Cli {
    /// The command line of this process. If it is wrong, or asks for help, the process ends here.
    pub(crate) fn read() -> Self {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(std::env::args_os());
        let read = matches
            .and_then(|matches| Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command)));
        read.unwrap_or_else(|error| mended(error).exit())
    }
}

/// All commands: `--help` shows the main flags of each and examples, `--help-all` every flag.
pub(crate) fn command() -> clap::Command {
    let mut command = Cli::command();
    for (name, examples) in EXAMPLES {
        if command.find_subcommand(name).is_some() {
            command =
                command.mut_subcommand(name, |command| command.after_help(format!("Examples:\n{examples}")));
        }
    }
    with_help(command)
}

/// The command and those below it, with their flags for help.
fn with_help(command: clap::Command) -> clap::Command {
    let shows_all = command.get_arguments().any(Arg::is_hide_short_help_set);
    let short = match shows_all {
        true => "Print the main flags; --help-all prints every flag",
        false => "Print help",
    };
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).help(short);
    let all = Arg::new("help-all").long("help-all").action(ArgAction::HelpLong).help("Print every flag");
    let command = command.disable_help_flag(true).arg(help.display_order(900)).arg(all.display_order(901));
    command.mut_subcommands(with_help)
}

/// An error of the arguments, with a suggestion that fits.
fn mended(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(said)) = error.get(ContextKind::InvalidArg).cloned() else { return error };
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    if let Some(ContextValue::String(suggested)) = error.get(ContextKind::SuggestedArg)
        && !is_near(&said, suggested)
    {
        error.remove(ContextKind::SuggestedArg);
        let tip = StyledStr::from("`--help-all` prints every flag");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// Says how to begin.
pub(crate) fn begin() -> ExitCode {
    // If stderr is closed, nobody reads it.
    let _ = std::io::stderr().write_all(BEGIN.as_bytes());
    ExitCode::from(USAGE)
}
