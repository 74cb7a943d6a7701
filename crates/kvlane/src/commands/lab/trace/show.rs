//! Output of a command: text to the terminal, JSON and a page to files.

use std::fs::File;
use std::io::{Stdout, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use kvlane_lab::report::Page;
use serde::Serialize;

use crate::commands::lab::page::PageArgs;

/// The output files.
#[derive(Args, Clone, Debug)]
pub(super) struct Show {
    /// Write the figures as JSON to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

/// These files, open.
pub(super) struct Files {
    json: Option<Json>,
    page: PageArgs,
}

enum Json {
    File(File),
    Stdout(Stdout),
}

/// Name of a trace: its file's name.
pub(super) fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

// === impl Show ===

impl Show {
    /// Opens the files, to detect one that cannot be written before the work rather than after it.
    pub(super) fn open(&self) -> Result<Files> {
        let create =
            |path: &PathBuf| File::create(path).with_context(|| format!("--json {}", path.display()));
        let json = match &self.json {
            Some(path) if path.as_os_str() == "-" => Some(Json::Stdout(std::io::stdout())),
            path => path.as_ref().map(create).transpose()?.map(Json::File),
        };
        self.page.check()?;
        Ok(Files { json, page: self.page.clone() })
    }
}

// === impl Files ===

impl Files {
    /// Prints text to stdout, or to stderr if the JSON goes to stdout.
    pub(super) fn tell(&self, text: &str) -> Result<()> {
        match self.json {
            Some(Json::Stdout(_)) => writeln!(std::io::stderr(), "{text}")?,
            _ => writeln!(std::io::stdout(), "{text}")?,
        }
        Ok(())
    }

    /// Writes the JSON, if requested.
    pub(super) fn json(&mut self, figures: &impl Serialize) -> Result<()> {
        let text = |figures| serde_json::to_string_pretty(figures);
        match &mut self.json {
            Some(Json::File(file)) => writeln!(file, "{}", text(figures)?)?,
            Some(Json::Stdout(out)) => writeln!(out, "{}", text(figures)?)?,
            None => {}
        }
        Ok(())
    }

    /// Writes the page, if requested.
    pub(super) fn page(&self, page: impl FnOnce() -> Page) -> Result<()> {
        self.page.write(page)
    }
}
