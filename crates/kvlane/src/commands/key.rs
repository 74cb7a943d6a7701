//! `kvlane key`: keys for `auth.keys` and `auth.keys_file`.

use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use kvlane_http::secret::KeyHash;
use kvlane_proxy::auth::{Role, check_name};

/// Maximum length of a key to hash: longer ones are rejected by the gateway.
const KEY_BYTES_MAX: u64 = 16 << 10;

/// The subcommands.
#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Generate a key: prints it once, to stderr, and the line to store, to stdout.
    New(KeyArgs),
    /// Hash an existing key: reads it from stdin, prints the line to store.
    Hash(KeyArgs),
}

/// The client of the key.
#[derive(Args)]
pub(crate) struct KeyArgs {
    /// The client's name in limits, logs and metrics.
    name: String,
    /// The client's role: user (use models), viewer (read the admin API and metrics), admin (everything).
    #[arg(long, default_value = "user")]
    role: String,
    /// Let the client name the tenant of its requests.
    #[arg(long)]
    trusted: bool,
}

/// Runs it.
pub(crate) fn run(command: &KeyCommand) -> Result<ExitCode> {
    let (KeyCommand::New(args) | KeyCommand::Hash(args)) = command;
    check_name(&args.name).map_err(|problem| anyhow!(problem))?;
    let Some(role) = Role::by_name(&args.role) else {
        bail!("--role {}: must be user, viewer or admin", args.role);
    };
    let hash = match command {
        KeyCommand::New(_) => {
            let (key, hash) = KeyHash::new_key().map_err(|problem| anyhow!(problem))?;
            // Not to stdout, which may go to a file.
            writeln!(std::io::stderr(), "key (shown only here): {key}")?;
            hash
        }
        KeyCommand::Hash(_) => {
            let mut key = String::new();
            std::io::stdin().take(KEY_BYTES_MAX).read_to_string(&mut key)?;
            match key.trim() {
                "" => bail!("no key on stdin: use `kvlane key hash NAME < FILE`"),
                key => KeyHash::of(key),
            }
        }
    };
    let trusted = if args.trusted { " trusted" } else { "" };
    writeln!(std::io::stdout(), "{} {} {}{trusted}", args.name, role.name(), hash.to_hex())?;
    Ok(ExitCode::SUCCESS)
}
