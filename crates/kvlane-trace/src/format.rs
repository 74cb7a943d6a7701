//! Readers and writers, one file for each format, and the one error they share.

use std::io;
use std::path::PathBuf;

pub mod mooncake;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open trace {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Reading failed, or a gzip stream is damaged.
    #[error("cannot read trace after line {line}: {source}")]
    Read {
        /// The last line that was read whole.
        line: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A line is not a request.
    #[error("trace line {line}, {field}: {why}")]
    Line {
        /// The line, counted from 1.
        line: u64,
        /// The field at fault, or `line` for the line as a whole.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The trace has more requests than the reader takes.
    #[error("trace has more than {max} requests; cut it first")]
    TooLong {
        /// The limit.
        max: usize,
    },
    /// There is no request in it.
    #[error("trace holds no request")]
    Empty,
}
