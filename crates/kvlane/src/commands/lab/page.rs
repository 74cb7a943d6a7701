//! Output of a command's report: an HTML page, and its charts as files.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use kvlane_lab::report::Page;

/// Flags shared by all commands with a report.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PageArgs {
    /// Write a self-contained HTML report.
    #[arg(long, visible_alias = "report", value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write each chart of the report as an SVG file into this directory, created if necessary.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
}

// === impl PageArgs ===

impl PageArgs {
    /// Whether a report was requested.
    pub(crate) fn wanted(&self) -> bool {
        self.html.is_some() || self.plots.is_some()
    }

    /// Checks that the report can be written, before the work rather than after it. An existing file is kept until
    /// there is a result to replace it.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(path) = &self.html {
            let opened = File::options().create(true).append(true).open(path);
            opened.with_context(|| format!("--html {}", path.display()))?;
        }
        if let Some(dir) = &self.plots {
            fs::create_dir_all(dir).with_context(|| format!("--plots {}", dir.display()))?;
        }
        Ok(())
    }

    /// Writes the requested outputs; the page is made only if needed.
    pub(crate) fn write(&self, page: impl FnOnce() -> Page) -> Result<()> {
        if !self.wanted() {
            return Ok(());
        }
        let page = Page { command: Some(command(std::env::args().skip(1))), ..page() };
        if let Some(path) = &self.html {
            fs::write(path, page.to_html()).with_context(|| format!("--html {}", path.display()))?;
        }
        if let Some(dir) = &self.plots {
            for (name, svg) in page.plots() {
                let path = dir.join(name);
                fs::write(&path, svg).with_context(|| format!("--plots {}", path.display()))?;
            }
        }
        Ok(())
    }
}

/// Flags whose value is a secret, or may contain one: a report can be passed on.
const SECRET: [&str; 2] = ["--api-key", "--header"];

/// A command line of this program as a shell takes it, without the values of secrets.
fn command(args: impl Iterator<Item = String>) -> String {
    let mut line = "kvlane".to_owned();
    let mut hidden = false;
    for arg in args {
        let flag = arg.split_once('=').map_or(&*arg, |(flag, _)| flag);
        let is_secret = SECRET.contains(&flag);
        let shown = match (hidden, is_secret && arg != flag) {
            (true, _) => "...".to_owned(),
            (false, true) => format!("{flag}=..."),
            (false, false) => quoted(&without_password(&arg)),
        };
        hidden = !hidden && is_secret && arg == flag;
        line.extend([" ", &shown]);
    }
    line
}

/// A URL without its user and password; any other word as it is.
fn without_password(word: &str) -> String {
    let parts = word.split_once("://").and_then(|(scheme, rest)| {
        let end = rest.find('/').unwrap_or(rest.len());
        let at = rest[..end].rfind('@')?;
        Some(format!("{scheme}://...@{}", &rest[at + 1..]))
    });
    parts.unwrap_or_else(|| word.to_owned())
}

/// A word of a shell's command line.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:=,@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(args: &[&str]) -> String {
        command(args.iter().map(|arg| (*arg).to_owned()))
    }

    #[test]
    fn a_command_can_be_given_to_a_shell_again() {
        assert_eq!(
            line(&["report", "a.jsonl", "--title", "A day's <b>"]),
            "kvlane report a.jsonl --title 'A day'\\''s <b>'"
        );
        assert_eq!(line(&["simulate", "--policy=a,b", ""]), "kvlane simulate --policy=a,b ''");
    }

    #[test]
    fn a_command_tells_no_secret() {
        let args = [
            "replay",
            "http://me:pass@gpu:8000/v1",
            "--api-key",
            "sk-1",
            "--header=x: sk-2",
            "--header",
            "--api-key",
        ];
        let said = line(&[&args[..], &["--seed", "1"]].concat());
        assert_eq!(
            said,
            "kvlane replay http://...@gpu:8000/v1 --api-key ... --header=... --header ... --seed 1"
        );
    }
}
