//! kvlane's own format, to which other formats are converted.
//!
//! ```json
//! {"kvlane_trace":1,"block_tokens":512,"requests":12031,"notes":["..."]}
//! {"t":12.345678,"in":6758,"out":500,"s":3,"after":17,"think":9.2,"base":17,"shared":13}
//! ```
//!
//! The first line is a header, then there is a line for each request, in order of arrival. Requests are numbered from
//! 0. Omitted keys mean: `s`, the next new session; `after`, no predecessor; `think`, sent at `t`; `end`,
//! unknown; `base` and `shared`, no shared prefix; `adapter`, none. See [`TraceRequest`] for their meaning. A prompt is a branch of another, so a line has
//! a few bytes however long its prompt is.

use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use kvlane_core::request::AnswerEnd;
use serde::{Deserialize, Serialize};
use serde_json::Number;

use super::lines::{Fault, Lines, json, needed, time, tokens};
use super::{Draft, Options, TraceError};
use crate::trace::{Trace, TraceRequest};

/// The version that is written and read.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Header {
    kvlane_trace: u32,
    block_tokens: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    requests: Option<u64>,
    #[serde(default)]
    notes: Vec<String>,
}

/// The fields as they come; each is checked on its own, so that an error can name it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    t: Option<Number>,
    r#in: Option<Number>,
    out: Option<Number>,
    s: Option<u32>,
    after: Option<u32>,
    think: Option<Number>,
    end: Option<AnswerEnd>,
    base: Option<u32>,
    shared: Option<u32>,
    adapter: Option<u32>,
}

pub(super) fn begins(head: &str) -> bool {
    head.starts_with('{') && head.lines().next().is_some_and(|line| line.contains("\"kvlane_trace\""))
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let wrong = |field, why: String| TraceError::Line { line: 1, field, why };
    let Some((_, bytes)) = lines.next()? else { return Err(TraceError::Empty) };
    let header: Header = serde_json::from_slice(bytes).map_err(|why| wrong("header", why.to_string()))?;
    if header.kvlane_trace != VERSION {
        let why = format!("version {} of the format, this kvlane reads {VERSION}", header.kvlane_trace);
        return Err(wrong("kvlane_trace", why));
    }
    if header.block_tokens == 0 {
        return Err(wrong("block_tokens", "must be at least 1".to_owned()));
    }
    let mut draft = Draft::new(&Options { block_tokens: Some(header.block_tokens), ..options.clone() }, 1);
    draft.timed = false;
    header.notes.into_iter().for_each(|note| draft.builder.note(note));
    let mut sessions = 0;
    lines.each(|_, bytes| {
        let request = request(json(bytes)?, &draft, sessions)?;
        sessions = sessions.max(request.session + 1);
        draft.branch(request)?;
        Ok(())
    })?;
    let read = draft.builder.len() as u64;
    if let Some(expected) = header.requests.filter(|&expected| expected != read) {
        let why = format!("the file has {read} requests, its header says {expected}");
        if !options.skip_bad {
            let source = io::Error::new(io::ErrorKind::UnexpectedEof, why);
            return Err(TraceError::Read { line: lines.line(), source });
        }
        draft.builder.note(why);
    }
    Ok(draft)
}

/// One line's request, after those of `draft`, which have `sessions` sessions.
fn request(line: Line, draft: &Draft, sessions: u32) -> Result<TraceRequest, Fault> {
    let index = draft.builder.len();
    let earlier = |field, value: Option<u32>| match value.filter(|&value| value as usize >= index) {
        Some(value) => {
            Err(Fault::Field(field, format!("{value} is not an earlier request; this one is {index}")))
        }
        None => Ok(value),
    };
    let session = line.s.unwrap_or(sessions);
    if session > sessions || session == u32::MAX {
        return Err(Fault::Field("s", format!("{session} skips a number: the next session is {sessions}")));
    }
    let think_s = line.think.map(|think| time("think", &think, "seconds")).transpose()?;
    let request = TraceRequest {
        arrival_s: time("t", &needed("t", line.t)?, "seconds")?,
        input_tokens: tokens("in", line.r#in, 1)?,
        output_tokens: tokens("out", line.out, 0)?,
        session,
        after: earlier("after", line.after)?,
        think_s: think_s.map(|think_s| think_s as f32).filter(|_| line.after.is_some()),
        end: line.end.unwrap_or_default(),
        base: earlier("base", line.base)?,
        shared_blocks: line.shared.unwrap_or(0),
        adapter: line.adapter,
    };
    let block_tokens = draft.builder.block_tokens();
    if let Some(base) = request.base {
        let TraceRequest { input_tokens, output_tokens, .. } = draft.builder.requests()[base as usize];
        let most = request.input_tokens.min(input_tokens + output_tokens).div_ceil(block_tokens);
        if !(1..=most).contains(&request.shared_blocks) {
            let why = format!(
                "{} blocks, but request {base} and this one can share 1 to {most}",
                request.shared_blocks
            );
            return Err(Fault::Field("shared", why));
        }
    } else if request.shared_blocks > 0 {
        return Err(Fault::Field("base", "missing, although `shared` is set".to_owned()));
    }
    Ok(request)
}

/// Writes a trace. Arrivals are rounded to microseconds.
///
/// # Errors
///
/// What the output says.
pub fn write(trace: &Trace, mut out: impl Write) -> io::Result<()> {
    let header = Header {
        kvlane_trace: VERSION,
        block_tokens: trace.block_tokens,
        requests: Some(trace.requests.len() as u64),
        notes: trace.notes.clone(),
    };
    serde_json::to_writer(&mut out, &header)?;
    out.write_all(b"\n")?;
    let mut sessions = 0;
    for request in &trace.requests {
        let TraceRequest {
            arrival_s,
            input_tokens,
            output_tokens,
            session,
            after,
            think_s,
            end,
            base,
            shared_blocks,
            adapter,
        } = request;
        write!(out, "{{\"t\":{},\"in\":{input_tokens},\"out\":{output_tokens}", Micros(*arrival_s))?;
        if *session != sessions {
            write!(out, ",\"s\":{session}")?;
        }
        sessions = sessions.max(session.saturating_add(1));
        if let Some(after) = after {
            write!(out, ",\"after\":{after}")?;
        }
        if let Some(think_s) = think_s {
            write!(out, ",\"think\":{think_s}")?;
        }
        match end {
            AnswerEnd::Unknown => {}
            AnswerEnd::ToolCalls => out.write_all(b",\"end\":\"tool_calls\"")?,
            AnswerEnd::Complete => out.write_all(b",\"end\":\"complete\"")?,
        }
        if let Some(base) = base {
            write!(out, ",\"base\":{base},\"shared\":{shared_blocks}")?;
        }
        if let Some(adapter) = adapter {
            write!(out, ",\"adapter\":{adapter}")?;
        }
        out.write_all(b"}\n")?;
    }
    out.flush()
}

/// Writes a trace to a file, with gzip if its name ends in `.gz`.
///
/// # Errors
///
/// What the system says.
pub fn save(trace: &Trace, path: &Path) -> io::Result<()> {
    let file = BufWriter::new(File::create(path)?);
    if path.extension().is_some_and(|extension| extension == "gz") {
        let mut gzip = BufWriter::new(GzEncoder::new(file, Compression::default()));
        write(trace, &mut gzip)?;
        return gzip.into_inner().map_err(io::IntoInnerError::into_error)?.finish()?.flush();
    }
    write(trace, file)
}

/// Seconds, with as many decimals as they have microseconds.
pub(super) struct Micros(pub(super) f64);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let micros = (self.0 * 1e6).round() as u64;
        let (whole, rest) = (micros / 1_000_000, micros % 1_000_000);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let rest = format!("{rest:06}");
        write!(f, "{whole}.{}", rest.trim_end_matches('0'))
    }
}
