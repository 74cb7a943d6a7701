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
        let page = page();
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
