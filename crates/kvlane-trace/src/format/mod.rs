//! Readers, one file for each format, and their common code.
//!
//! A file's format is detected from its beginning, and gzip from its first bytes. A reader turns lines into requests
//! in the order of the file; here they become a [`Trace`]: in order of arrival, with a coarse clock spread out and
//! missing sessions inferred. All changes are in the trace's notes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use crate::session;
use crate::trace::{Builder, Trace, TraceRequest};

mod azure;
mod bailian;
mod burstgpt;
mod clock;
mod csv;
mod files;
mod gateway;
mod lines;
pub mod mooncake;
pub mod normal;
mod recording;
mod weka;

use lines::{Fault, Lines};

/// Declares the formats: the module, the variant of [`Format`], the name.
macro_rules! formats {
    ($($module:ident $variant:ident $name:literal $doc:literal;)*) => {
        /// A trace format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Format {
            $(#[doc = $doc] $variant,)*
        }

        impl Format {
            /// All formats, in the order in which they are tried.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The format of a file with this beginning: its first line, or a large part of it.
            pub fn detect(head: &[u8]) -> Option<Self> {
                let head = String::from_utf8_lossy(head);
                let head = head.trim_start_matches('\u{feff}').trim_start();
                $(if $module::begins(head) {
                    return Some(Self::$variant);
                })*
                None
            }

            fn read<R: BufRead>(self, lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
                match self {
                    $(Self::$variant => $module::read(lines, options),)*
                }
            }
        }
    };
}

formats! {
    normal Normal "normal" "kvlane's own: what the others are imported into.";
    weka Weka "weka" "Sessions of a coding agent from Weka's kv-cache-tester, as published or packed.";
    bailian Bailian "bailian" "Qwen-Bailian JSONL.";
    gateway Gateway "gateway" "What the gateway has recorded.";
    recording Recording "recording" "The records of a replay.";
    mooncake Mooncake "mooncake" "Mooncake JSONL, with the further fields of AIPerf and Dynamo.";
    azure Azure "azure" "Azure's CSV of 2023 and 2024.";
    burstgpt BurstGpt "burstgpt" "BurstGPT's CSV.";
}

/// Maximum requests read of a file.
pub const REQUESTS_MAX: usize = 64_000_000;

/// Bytes from which a format is detected.
const HEAD_BYTES: u64 = 64 * 1024;

/// Whether to spread arrivals that share a tick of a coarse clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jitter {
    /// If all times are multiples of 100 ms or more and some are equal.
    #[default]
    Auto,
    /// Never: the file's times unchanged.
    Off,
}

/// Options for reading a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The file's format; `None` detects it.
    pub format: Option<Format>,
    /// Tokens of a block, if the file does not say. `None` uses that of the format's public traces.
    pub block_tokens: Option<u32>,
    /// Handling of a coarse clock.
    pub jitter: Jitter,
    /// Random seed: jitter, and arrivals that the file lacks.
    pub seed: u64,
    /// Skip invalid lines, and note their number, instead of failing at the first.
    pub skip_bad: bool,
    /// Drop the order of turns: every request is sent at its arrival time.
    pub open_loop: bool,
    /// Mean number of sessions that start per second, if the file has no start times.
    pub session_rate: f64,
    /// Let sessions share their tools and system prompt if the file's ids are local to a session but these have the
    /// same length in both.
    pub shared_head: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            format: None,
            block_tokens: None,
            jitter: Jitter::Auto,
            seed: 0,
            skip_bad: false,
            open_loop: false,
            session_rate: 0.1,
            shared_head: true,
        }
    }
}

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open trace {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There is no such file, and no trace of this name.
    #[error("neither a file nor the name of a trace that comes with kvlane: {meant}")]
    Absent {
        /// Which names there are.
        meant: String,
    },
    /// Reading failed, or a gzip stream is damaged or cut short.
    #[error("cannot read trace after line {line}: {source}")]
    Read {
        /// The last line that was read whole.
        line: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The format is unknown.
    #[error("no known trace format begins like this: {head:?}; set the format to one of {}", names())]
    Unknown {
        /// The beginning of the file.
        head: String,
    },
    /// A line is not a request.
    #[error("trace line {line}, {field}: {why}")]
    Line {
        /// The line, counted from 1.
        line: u64,
        /// The field at fault, or `line` for the line as a whole.
        field: &'static str,
        /// The cause.
        why: String,
    },
    /// The trace has more requests than the reader takes.
    #[error("trace has more than {max} requests; cut it first")]
    TooLong {
        /// The limit.
        max: usize,
    },
    /// There is no request.
    #[error("the trace contains no request")]
    Empty,
}

/// Requests in the order of the file.
struct Draft {
    builder: Builder,
    /// Whether the times come from the file and have to be checked.
    timed: bool,
    /// Whether the file has no sessions, but blocks from which they can be inferred.
    infer_sessions: bool,
}

/// Reads a file, plain or gzip, detected from its first bytes. Of a directory, its `.json` or `.kvrec` files, by
/// name.
pub fn open(path: &Path, options: &Options) -> Result<Trace, TraceError> {
    let failed = |source| TraceError::Open { path: path.to_owned(), source };
    if path.is_dir() {
        return read(BufReader::new(files::Files::of(path).map_err(failed)?), options);
    }
    read(BufReader::new(File::open(path).map_err(failed)?), options)
}

/// Reads a trace, plain or gzip. Blank lines are skipped.
pub fn read(mut input: impl BufRead, options: &Options) -> Result<Trace, TraceError> {
    let failed = |source| TraceError::Read { line: 0, source };
    if input.fill_buf().map_err(failed)?.starts_with(&[0x1f, 0x8b]) {
        let whole = |source: io::Error| match source.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(source.kind(), "the gzip stream is cut short"),
            kind => io::Error::new(kind, format!("the gzip stream is damaged: {source}")),
        };
        read_plain(BufReader::new(flate2::bufread::MultiGzDecoder::new(input)), options).map_err(|error| {
            match error {
                TraceError::Read { line, source } => TraceError::Read { line, source: whole(source) },
                error => error,
            }
        })
    } else {
        read_plain(input, options)
    }
}

fn read_plain(mut input: impl BufRead, options: &Options) -> Result<Trace, TraceError> {
    let mut head = Vec::new();
    let begun = input.by_ref().take(HEAD_BYTES).read_to_end(&mut head);
    let format = match options.format.or_else(|| Format::detect(&head)) {
        Some(format) => format,
        None => {
            begun.map_err(|source| TraceError::Read { line: 0, source })?;
            if head.trim_ascii().is_empty() {
                return Err(TraceError::Empty);
            }
            let line = head.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
            return Err(TraceError::Unknown {
                head: String::from_utf8_lossy(line).chars().take(60).collect(),
            });
        }
    };
    // An error in the beginning is reported after the complete lines.
    let rest: Box<dyn BufRead + '_> = match begun {
        Ok(_) => Box::new(input),
        Err(source) => Box::new(BufReader::new(Failed(Some(source)))),
    };
    let mut lines = Lines::new(Cursor::new(head).chain(rest), options.skip_bad);
    let draft = format.read(&mut lines, options)?;
    finish(draft, lines.skipped(), options)
}

fn finish(draft: Draft, skipped: Option<String>, options: &Options) -> Result<Trace, TraceError> {
    let Draft { builder, timed, infer_sessions } = draft;
    let mut trace = builder.finish();
    trace.notes.extend(skipped);
    if trace.requests.is_empty() {
        return Err(TraceError::Empty);
    }
    let in_order = |requests: &[TraceRequest]| requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s);
    if !in_order(&trace.requests) {
        let mut order: Vec<u32> = (0..trace.requests.len() as u32).collect();
        let arrival_s = |index: u32| trace.requests[index as usize].arrival_s;
        order.sort_by(|&a, &b| arrival_s(a).total_cmp(&arrival_s(b)));
        trace = trace.select(order);
        if timed {
            trace.notes.push("requests were out of order and are sorted by time".to_owned());
        }
    }
    if timed {
        clock::settle(&mut trace, options);
    }
    if infer_sessions {
        session::infer(&mut trace);
    }
    if options.open_loop {
        trace.requests.iter_mut().for_each(|request| (request.after, request.think_s) = (None, None));
    }
    Ok(trace)
}

fn names() -> String {
    Format::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
}

/// Reads nothing but an error.
struct Failed(Option<io::Error>);

impl Read for Failed {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        self.0.take().map_or(Ok(0), Err)
    }
}

// === impl Format ===

impl Format {
    /// The format of this name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name() == name)
    }
}

// === impl Draft ===

impl Draft {
    fn new(options: &Options, block_tokens: u32) -> Self {
        let builder = Builder::new(options.block_tokens.unwrap_or(block_tokens));
        Self { builder, timed: true, infer_sessions: false }
    }

    fn push(&mut self, request: TraceRequest, ids: &[u64]) -> Result<u32, Fault> {
        if self.builder.len() >= REQUESTS_MAX {
            return Err(Fault::TooLong);
        }
        self.builder.push(request, ids).ok_or(Fault::TooLong)
    }

    fn branch(&mut self, request: TraceRequest) -> Result<u32, Fault> {
        if self.builder.len() >= REQUESTS_MAX {
            return Err(Fault::TooLong);
        }
        self.builder.branch(request).ok_or(Fault::TooLong)
    }
}
