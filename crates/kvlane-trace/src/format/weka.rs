//! Sessions of a coding agent, as Weka's kv-cache-tester records them: one JSON object for each session.
//!
//! ```json
//! {"id": "trace_0003", "block_size": 64, "hash_id_scope": "local", "tool_tokens": 12974, "system_tokens": 2771,
//!  "requests": [{"t": 0.0, "in": 16564, "out": 244, "think_time": 0.0, "api_time": 7.27, "hash_ids": [1, 2, 3]}]}
//! ```
//!
//! One session on a line, or a file for each, which may be indented; a directory of them is read as one trace. The
//! packed form has `"blocks": [[first id, count], ...]` in place of `hash_ids`. Only full blocks have ids. Origin:
//! callanjfox/kv-cache-tester, `traces/`.
//!
//! A session contains the times of its requests relative to its start, in `t`, but not its start: starts are drawn
//! from a Poisson process. A request is sent `think_time` after the previous answer. A sub-agent is an entry among
//! the requests with its own requests, whose times count from its start; its own `t` is its end (in the published
//! sessions `t` minus `duration_ms` is the end of the previous request, to the second). It becomes a separate
//! session, started by the previous request.
//!
//! Ids are local to a session, yet sessions of one version of the client begin with the same tools and system prompt.
//! Sessions whose `tool_tokens` and `system_tokens` agree are therefore given the same blocks for them, unless the
//! options say otherwise. Forks of a session, known by the lengths of their first four requests, are left out.

use std::collections::{HashMap, HashSet};
use std::io::BufRead;

use kvlane_core::request::AnswerEnd;
use kvlane_core::rng::Rng;
use serde::Deserialize;
use serde_json::Number;

use super::lines::{Fault, Lines, json, needed, time, tokens};
use super::{Draft, Options, TraceError};
use crate::generate::exponential;
use crate::trace::TraceRequest;

/// Tokens of a block where a session does not say.
const BLOCK_TOKENS: u32 = 64;

/// Number of requests whose lengths identify a fork of a session.
const FORK_REQUESTS: usize = 4;

/// Most blocks of a prompt: 64 million tokens in blocks of 64.
const BLOCKS_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
struct Session {
    block_size: Option<Number>,
    tool_tokens: Option<u32>,
    system_tokens: Option<u32>,
    requests: Option<Vec<Entry>>,
}

/// A request or a sub-agent, by what it has; each field is checked on its own, so that an error can name it.
#[derive(Deserialize)]
struct Entry {
    t: Option<Number>,
    r#in: Option<Number>,
    out: Option<Number>,
    think_time: Option<Number>,
    api_time: Option<Number>,
    stop: Option<String>,
    hash_ids: Option<Vec<u64>>,
    blocks: Option<Vec<(u64, u64)>>,
    duration_ms: Option<Number>,
    tool_tokens: Option<u32>,
    system_tokens: Option<u32>,
    requests: Option<Vec<Entry>>,
}

/// A request of a session or of one of its sub-agents, checked.
struct Turn {
    /// Since the session's start.
    t: f64,
    /// When its answer ended.
    end: f64,
    request: TraceRequest,
    ids: Vec<u64>,
    /// The agent it belongs to, counted within the session; 0 is the session itself.
    agent: usize,
}

/// Settings for one session.
#[derive(Default)]
struct Flat {
    turns: Vec<Turn>,
    /// Tokens of the tools and of the system prompt of each agent.
    heads: Vec<(u32, u32)>,
}

pub(super) fn begins(head: &str) -> bool {
    head.starts_with('{') && head.contains("\"hash_id_scope\"")
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    if !(options.session_rate.is_finite() && options.session_rate > 0.0) {
        let why = format!("invalid session rate {}: must be above 0", options.session_rate);
        return Err(TraceError::Line { line: 0, field: "options", why });
    }
    let mut draft = Draft::new(options, BLOCK_TOKENS);
    draft.timed = false;
    let mut reader = Reader {
        options,
        rng: Rng::new(options.seed),
        now_s: 0.0,
        seen: HashSet::new(),
        heads: HashMap::new(),
        sessions: 0,
        locals: 0,
    };
    let mut forks = 0u64;
    // An indented session is many lines, of which only the last is an unindented brace.
    let mut indented: Vec<u8> = Vec::new();
    lines.each(|_, bytes| {
        if !indented.is_empty() || bytes == b"{" {
            indented.extend_from_slice(bytes);
            indented.push(b'\n');
            if bytes != b"}" {
                return if indented.len() <= SESSION_BYTES_MAX {
                    Ok(())
                } else {
                    Err(Fault::Field("line", "the session is not closed".to_owned()))
                };
            }
        }
        let whole = std::mem::take(&mut indented);
        let session: Session = json(if whole.is_empty() { bytes } else { &whole })?;
        forks += u64::from(!reader.session(session, &mut draft)?);
        Ok(())
    })?;
    if !indented.is_empty() {
        return Err(TraceError::Line {
            line: lines.line(),
            field: "line",
            why: "the session is not closed".to_owned(),
        });
    }
    let Options { seed, session_rate, .. } = options;
    draft
        .builder
        .note(format!("sessions start at {session_rate} per second on average (Poisson, seed {seed})"));
    if forks > 0 {
        draft.builder.note(format!("left out {forks} sessions that are forks of another one"));
    }
    if options.shared_head {
        let note = "sessions with equally long tools and system prompts are assumed to share them";
        draft.builder.note(note.to_owned());
    }
    Ok(draft)
}

/// Longest indented session, in bytes.
const SESSION_BYTES_MAX: usize = 256 * 1024 * 1024;

struct Reader<'a> {
    options: &'a Options,
    rng: Rng,
    /// When the last session started.
    now_s: f64,
    /// Beginnings of sessions.
    seen: HashSet<Vec<(u32, u32)>>,
    /// A number for each pair of lengths of tools and system prompt.
    heads: HashMap<(u32, u32), u64>,
    /// Sessions so far, sub-agents included.
    sessions: u32,
    /// Sessions of the file so far.
    locals: u64,
}

// === impl Reader ===

impl Reader<'_> {
    /// Adds a session. False if it is a fork of another.
    fn session(&mut self, session: Session, draft: &mut Draft) -> Result<bool, Fault> {
        let block_tokens = draft.builder.block_tokens();
        if let Some(size) = session.block_size.filter(|size| size.as_u64() != Some(u64::from(block_tokens))) {
            return Err(Fault::Field(
                "block_size",
                format!("{size}, but the trace is read in blocks of {block_tokens}"),
            ));
        }
        let mut flat = Flat::default();
        let head = (session.tool_tokens.unwrap_or(0), session.system_tokens.unwrap_or(0));
        flat.agent(head, needed("requests", session.requests)?, 0.0, None, block_tokens)?;
        let Flat { mut turns, heads } = flat;
        let own = turns.iter().filter(|turn| turn.agent == 0);
        let begin: Vec<_> = own
            .take(FORK_REQUESTS)
            .map(|turn| (turn.request.input_tokens, turn.request.output_tokens))
            .collect();
        if begin.is_empty() {
            return Err(Fault::Field("requests", "at least one is required".to_owned()));
        }
        if !self.seen.insert(begin) {
            return Ok(false);
        }
        self.now_s += exponential(&mut self.rng) / self.options.session_rate;
        let first = draft.builder.len() as u32;
        // The ids with which each agent's first long enough prompt begins.
        let mut begins: Vec<Option<Vec<u64>>> = heads.iter().map(|_| None).collect();
        for turn in &mut turns {
            let (tool_tokens, system_tokens) = heads[turn.agent];
            let head_blocks = (u64::from(tool_tokens) + u64::from(system_tokens)) / u64::from(block_tokens);
            let begin = &mut begins[turn.agent];
            if begin.is_none() && turn.ids.len() as u64 >= head_blocks {
                *begin = Some(turn.ids[..head_blocks as usize].to_vec());
            }
            let next = self.heads.len() as u64;
            let head = *self.heads.entry(heads[turn.agent]).or_insert(next);
            let common =
                turn.ids.iter().zip(begin.iter().flatten()).take_while(|(id, begin)| id == begin).count();
            let shared = if self.options.shared_head { common } else { 0 };
            for (position, id) in turn.ids.iter_mut().enumerate() {
                // Shared ids have their head's number, others their session's, in the upper half.
                *id = if position < shared {
                    (1 << 63) | head << 32 | position as u64
                } else {
                    self.locals << 32 | (*id & u64::from(u32::MAX))
                };
            }
            turn.request.arrival_s = self.now_s + turn.t;
            turn.request.session = self.sessions + turn.agent as u32;
            turn.request.after = turn.request.after.map(|after| first + after);
            draft.push(turn.request, &turn.ids)?;
        }
        self.sessions += heads.len() as u32;
        self.locals += 1;
        Ok(true)
    }
}

// === impl Flat ===

impl Flat {
    /// Adds an agent's requests, whose times count from `start`, and those of its sub-agents. `parent` is the request
    /// that started it.
    fn agent(
        &mut self,
        head: (u32, u32),
        entries: Vec<Entry>,
        start: f64,
        parent: Option<u32>,
        block_tokens: u32,
    ) -> Result<(), Fault> {
        let agent = self.heads.len();
        self.heads.push(head);
        let mut before = parent;
        for entry in entries {
            let t = start + time("t", &needed("t", entry.t)?, "seconds")?;
            if let Some(requests) = entry.requests {
                if self.heads.len() >= AGENTS_MAX {
                    return Err(Fault::Field("requests", format!("more than {AGENTS_MAX} sub-agents")));
                }
                let duration =
                    entry.duration_ms.map(|ms| time("duration_ms", &ms, "milliseconds")).transpose()?;
                let head = (entry.tool_tokens.unwrap_or(0), entry.system_tokens.unwrap_or(0));
                let began = (t - duration.unwrap_or(0.0) / 1e3).max(start);
                self.agent(head, requests, began, before, block_tokens)?;
                continue;
            }
            let seconds =
                |field, value: Option<Number>| value.map(|value| time(field, &value, "seconds")).transpose();
            let think = seconds("think_time", entry.think_time)?;
            let end = t + seconds("api_time", entry.api_time)?.unwrap_or(0.0);
            let ids = ids(entry.hash_ids, entry.blocks)?;
            let input_tokens = tokens("in", entry.r#in, 1)?;
            if ids.len() as u64 > u64::from(input_tokens.div_ceil(block_tokens)) {
                let why = format!("{} ids for {input_tokens} tokens in blocks of {block_tokens}", ids.len());
                return Err(Fault::Field("hash_ids", why));
            }
            // Some have no think time, and a sub-agent's first request does not contain its parent's answer.
            let first = before == parent;
            let gap = |before: u32| (t - self.turns[before as usize].end).max(0.0);
            let think_s = before.map(|before| think.filter(|_| !first).unwrap_or_else(|| gap(before)) as f32);
            let request = TraceRequest {
                input_tokens,
                output_tokens: tokens("out", entry.out, 0)?,
                after: before,
                think_s,
                end: match entry.stop.as_deref() {
                    Some("tool_use") => AnswerEnd::ToolCalls,
                    Some("end_turn" | "max_tokens" | "stop_sequence") => AnswerEnd::Complete,
                    _ => AnswerEnd::Unknown,
                },
                ..TraceRequest::default()
            };
            before = Some(self.turns.len() as u32);
            self.turns.push(Turn { t, end, request, ids, agent });
        }
        Ok(())
    }
}

/// Most agents of a session.
const AGENTS_MAX: usize = 10_000;

fn ids(listed: Option<Vec<u64>>, packed: Option<Vec<(u64, u64)>>) -> Result<Vec<u64>, Fault> {
    if let Some(ids) = listed {
        return Ok(ids);
    }
    let packed = needed("hash_ids", packed)?;
    let count = packed.iter().try_fold(0u64, |count, (_, more)| count.checked_add(*more));
    let fits = packed.iter().all(|(first, count)| first.checked_add(*count).is_some());
    match count.filter(|&count| count <= BLOCKS_MAX && fits) {
        Some(_) => Ok(packed.into_iter().flat_map(|(first, count)| first..first + count).collect()),
        None => Err(Fault::Field("blocks", format!("more than {BLOCKS_MAX} blocks"))),
    }
}
