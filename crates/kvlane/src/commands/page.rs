//! Where a command's report goes: a page to open in a browser, and its charts as files.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use kvlane_trace::report::Page;

/// The flags, the same for every command that has a report.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PageArgs {
    /// Write a report to open in a browser: one file with tables and charts that needs nothing else.
    #[arg(long, visible_alias = "report", value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write each chart of the report as an SVG file into this directory, which is made if need be.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
}

// === impl PageArgs ===

impl PageArgs {
    /// Whether anybody wants a report.
    pub(crate) fn wanted(&self) -> bool {
        self.html.is_some() || self.plots.is_some()
    }

    /// Makes sure that it can be written: that is better known before the work than after it. What is in the file stays
    /// until there is something to replace it with.
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

    /// Writes what somebody wants; the page is made only then.
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
