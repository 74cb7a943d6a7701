//! Flags that divide a command's runs among machines.

use std::path::PathBuf;

use clap::Args;
use kvlane_lab::part::{Part, PartError, Share};

/// Index of a pod of an Indexed Job of Kubernetes, from 0.
const JOB_INDEX: &str = "JOB_COMPLETION_INDEX";

/// Flags shared by all commands with runs that several machines can share.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PartArgs {
    /// Make only the runs of part I of N, as in `2/8`, and write their results to --part-file instead of showing them.
    /// `job/N` is the part of a pod of an Indexed Job of Kubernetes.
    #[arg(long, value_name = "I/N", value_parser = part, conflicts_with = "merge")]
    part: Option<Part>,
    /// The file for the part's results [default: stdout].
    #[arg(long, value_name = "FILE", requires = "part")]
    part_file: Option<PathBuf>,
    /// Make no runs: read the results of all parts, in any order, and show them as if all runs had been made here. The
    /// other flags must be those of the parts. A directory stands for all files in it.
    #[arg(long, value_name = "FILE|DIR", num_args = 1..)]
    merge: Vec<PathBuf>,
}

// === impl PartArgs ===

impl PartArgs {
    /// The runs to make.
    pub(crate) fn share(&self) -> Share {
        match self.part {
            Some(part) => Share::Part(part, self.part_file.clone().unwrap_or_else(|| "-".into())),
            None if self.merge.is_empty() => Share::Whole,
            None => Share::Merge(self.merge.clone()),
        }
    }

    /// Whether the command shows results, rather than writing those of a part.
    pub(crate) fn shows(&self) -> bool {
        self.part.is_none()
    }
}

fn part(text: &str) -> Result<Part, PartError> {
    let index = || std::env::var(JOB_INDEX).ok()?.parse::<u32>().ok()?.checked_add(1);
    match text.strip_prefix("job/") {
        Some(of) => {
            let form = || PartError::Form(format!("{text}, where {JOB_INDEX} is not a number"));
            format!("{}/{of}", index().ok_or_else(form)?).parse()
        }
        None => text.parse(),
    }
}
