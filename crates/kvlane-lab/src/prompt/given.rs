//! Real prompts, one JSON object per line.
//!
//! A line has one of `messages` (a conversation), `prompt` (a text) and `body` (a whole request, as in OpenAI's batch
//! files), and may have `arrival_s` (or `timestamp`, in milliseconds, as in Mooncake's traces), `session`, `think_s` and
//! `output_tokens`. Lines of one session are its turns, in their order.

use std::collections::HashMap;
use std::io::BufRead;

use kvlane_core::rng::Rng;
use kvlane_trace::trace::{Builder, Trace, TraceRequest};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Most lines of a file.
pub const PROMPTS_MAX: usize = 1_000_000;
/// Longest line, in bytes.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of text per token if there is no count.
const BYTES_PER_TOKEN: usize = 4;

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// The contents.
    pub prompt: Prompt,
    /// Arrival time, in seconds from the start.
    pub arrival_s: Option<f64>,
    /// Its conversation.
    pub session: Option<String>,
    /// Seconds from the end of the previous turn to this one.
    pub think_s: Option<f32>,
    /// Length of the answer.
    pub output_tokens: Option<u32>,
}

/// Contents of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// The messages of a chat.
    Messages(Value),
    /// The prompt of a completion: a text or token ids.
    Text(Value),
    /// A body: `messages` make it a chat.
    Body(Map<String, Value>),
}

/// A line as it is written.
#[derive(Deserialize)]
struct Line {
    messages: Option<Value>,
    prompt: Option<Value>,
    body: Option<Map<String, Value>>,
    arrival_s: Option<f64>,
    timestamp: Option<f64>,
    session: Option<Value>,
    think_s: Option<f32>,
    output_tokens: Option<u32>,
}

/// Why a file of prompts cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GivenError {
    /// It cannot be read.
    #[error("cannot read prompts: {0}")]
    Read(#[from] std::io::Error),
    /// A line is not a prompt.
    #[error("prompts, line {line}: {why}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// The cause.
        why: String,
    },
    /// The file is empty.
    #[error("the file contains no prompt")]
    Empty,
    /// There are no arrival times.
    #[error("prompt {0} has no `arrival_s` or `timestamp`; add one to all prompts, or use a rate or a trace")]
    Untimed(usize),
    /// An invalid rate.
    #[error("a rate of {0} conversations per second; must be above 0")]
    Rate(f64),
}

/// Reads a file.
///
/// # Errors
///
/// The first invalid line, by its number.
pub fn read(mut input: impl BufRead) -> Result<Vec<Given>, GivenError> {
    let mut all = Vec::new();
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        if std::io::Read::take(&mut input, LINE_BYTES_MAX).read_until(b'\n', &mut bytes)? == 0 {
            break;
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let given = parse(&bytes).map_err(|why| GivenError::Line { line, why })?;
        if all.len() == PROMPTS_MAX {
            return Err(GivenError::Line { line, why: format!("more than {PROMPTS_MAX} prompts") });
        }
        all.push(given);
    }
    if all.is_empty() { Err(GivenError::Empty) } else { Ok(all) }
}

fn parse(bytes: &[u8]) -> Result<Given, String> {
    if bytes.len() as u64 >= LINE_BYTES_MAX {
        return Err(format!("longer than {LINE_BYTES_MAX} bytes"));
    }
    let line: Line = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let prompt = match (line.messages, line.prompt, line.body) {
        (Some(messages @ Value::Array(_)), None, None) => Prompt::Messages(messages),
        (Some(_), None, None) => return Err("`messages` is not a list".into()),
        (None, Some(prompt), None) => Prompt::Text(prompt),
        (None, None, Some(body)) if body.contains_key("messages") || body.contains_key("prompt") => {
            Prompt::Body(body)
        }
        (None, None, Some(_)) => return Err("`body` has neither `messages` nor `prompt`".into()),
        (None, None, None) => return Err("set one of `messages`, `prompt` and `body`".into()),
        _ => return Err("set only one of `messages`, `prompt` and `body`".into()),
    };
    let arrival_s = line.arrival_s.or(line.timestamp.map(|millis| millis / 1e3));
    if let Some(wrong) = arrival_s.filter(|seconds| !(0.0..=3.2e7).contains(seconds)) {
        return Err(format!("it arrives at {wrong} s; arrivals must be at least 0 s"));
    }
    if let Some(wrong) = line.think_s.filter(|seconds| !(0.0..=3.2e7).contains(seconds)) {
        return Err(format!("a think time of {wrong} s; think times must be at least 0 s"));
    }
    let session = match line.session {
        None | Some(Value::Null) => None,
        Some(Value::String(session)) => Some(session),
        Some(Value::Number(number)) => Some(number.to_string()),
        Some(_) => return Err("`session` is neither text nor a number".into()),
    };
    let Line { think_s, output_tokens, .. } = line;
    Ok(Given { prompt, arrival_s, session, think_s, output_tokens })
}

/// The trace of prompts: arrival time and predecessor of each. The prompts are put in the trace's order. With a rate,
/// conversations begin at random times, and turns without a think time follow at once; otherwise the prompts contain
/// their times.
///
/// # Errors
///
/// If a prompt has no time and there is no rate.
pub fn trace(prompts: &mut Vec<Given>, rate: Option<f64>, seed: u64) -> Result<Trace, GivenError> {
    if let Some(rate) = rate {
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(GivenError::Rate(rate));
        }
        let mut rng = Rng::new(seed);
        let mut now_s = 0.0;
        let mut began: HashMap<String, f64> = HashMap::new();
        for given in prompts.iter_mut() {
            let mut next_s = || {
                now_s -= (1.0 - rng.unit()).ln() / rate;
                now_s
            };
            given.arrival_s = Some(match &given.session {
                Some(session) => *began.entry(session.clone()).or_insert_with(next_s),
                None => next_s(),
            });
        }
    } else if let Some(index) = prompts.iter().position(|given| given.arrival_s.is_none()) {
        return Err(GivenError::Untimed(index + 1));
    }
    let arrival_s = |given: &Given| given.arrival_s.unwrap_or_default();
    prompts.sort_by(|a, b| arrival_s(a).total_cmp(&arrival_s(b)));
    let mut builder = Builder::new(1);
    let mut sessions = 0;
    let mut known: HashMap<&str, (u32, u32)> = HashMap::new();
    for (index, given) in (0u32..).zip(&*prompts) {
        let before = given.session.as_deref().and_then(|session| known.get(session)).copied();
        let (session, after) = match before {
            Some((session, after)) => (session, Some(after)),
            None => {
                sessions += 1;
                (sessions - 1, None)
            }
        };
        if let Some(name) = &given.session {
            known.insert(name, (session, index));
        }
        let input_tokens = given.prompt.bytes().div_ceil(BYTES_PER_TOKEN).clamp(1, 1 << 24) as u32;
        let request = TraceRequest {
            arrival_s: arrival_s(given),
            input_tokens,
            output_tokens: given.output_tokens.unwrap_or(0),
            session,
            after,
            think_s: given.think_s.filter(|_| after.is_some()),
            ..TraceRequest::default()
        };
        builder.push(request, &[]);
    }
    Ok(builder.finish())
}

// === impl Prompt ===

impl Prompt {
    /// Approximate bytes of its text.
    fn bytes(&self) -> usize {
        fn text(value: &Value) -> usize {
            match value {
                Value::String(text) => text.len(),
                // A token id stands for a few bytes.
                Value::Number(_) => BYTES_PER_TOKEN,
                Value::Array(all) => all.iter().map(text).sum(),
                Value::Object(all) => all.get("content").or(all.get("text")).map_or(0, text),
                Value::Null | Value::Bool(_) => 0,
            }
        }
        match self {
            Self::Messages(value) | Self::Text(value) => text(value),
            Self::Body(body) => body.get("messages").or(body.get("prompt")).map_or(0, text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"{"messages":[{"role":"user","content":"hello there"}],"session":"a","arrival_s":3,"output_tokens":7}

{"prompt":"once upon","timestamp":1500}
{"body":{"messages":[],"max_tokens":4},"session":"a","arrival_s":9,"think_s":2.5}
{"prompt":[1,2,3,4,5],"session":5,"arrival_s":2}
"#;

    #[test]
    fn lines_become_a_trace_in_order_of_arrival_whose_turns_wait() {
        let mut prompts = read(LINES.as_bytes()).expect("four prompts");
        let trace = trace(&mut prompts, None, 0).expect("all are timed");
        let arrivals: Vec<f64> = trace.requests.iter().map(|request| request.arrival_s).collect();
        assert_eq!(arrivals, [1.5, 2.0, 3.0, 9.0]);
        let lengths: Vec<u32> = trace.requests.iter().map(|request| request.input_tokens).collect();
        assert_eq!(lengths, [3, 5, 3, 1]);
        let last = trace.requests[3];
        assert_eq!((last.session, last.after, last.think_s), (2, Some(2), Some(2.5)));
        assert_eq!(trace.requests[2].output_tokens, 7);
        assert!(matches!(&prompts[3].prompt, Prompt::Body(body) if body["max_tokens"] == 4));
    }

    #[test]
    fn a_rate_spreads_conversations_and_leaves_their_turns_together() {
        let mut prompts = Vec::new();
        for line in 0..4000 {
            let text = format!(r#"{{"prompt":"x","session":{}}}"#, line / 2);
            prompts.extend(read(text.as_bytes()).expect("a prompt"));
        }
        assert!(matches!(trace(&mut prompts.clone(), None, 0), Err(GivenError::Untimed(1))));
        assert!(matches!(trace(&mut prompts.clone(), Some(0.0), 0), Err(GivenError::Rate(_))));
        let made = trace(&mut prompts, Some(10.0), 1).expect("a rate");
        assert!(
            (180.0..220.0).contains(&made.span_s()),
            "2000 conversations, ten in a second: {}",
            made.span_s()
        );
        let turns = made.requests.iter().filter(|request| request.after.is_some());
        assert_eq!(turns.count(), 2000);
        assert!(made.requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
    }

    #[test]
    fn a_line_that_is_no_prompt_is_named() {
        for (line, word) in [
            ("{", "EOF"),
            ("{}", "set one of"),
            (r#"{"prompt":"a","messages":[]}"#, "set only one of"),
            (r#"{"messages":"a"}"#, "not a list"),
            (r#"{"body":{}}"#, "neither"),
            (r#"{"prompt":"a","arrival_s":-1}"#, "-1 s"),
            (r#"{"prompt":"a","think_s":-1}"#, "-1 s"),
            (r#"{"prompt":"a","session":[]}"#, "session"),
        ] {
            let text = format!("{{\"prompt\":\"good\"}}\n{line}\n");
            let error = read(text.as_bytes()).expect_err("a bad line").to_string();
            assert!(error.contains("line 2") && error.contains(word), "{error}");
        }
        assert!(matches!(read(&b"\n"[..]), Err(GivenError::Empty)));
    }
}
