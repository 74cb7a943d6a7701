//! The Mooncake format: one JSON object on a line, sorted by time.
//!
//! ```json
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49]}
//! ```
//!
//! `timestamp` is in milliseconds since the start. A block is 512 tokens unless the options say otherwise, and
//! `hash_ids` has one id for each started block; equal ids mean equal prompts up to there. Without `hash_ids` a prompt
//! shares nothing. Origin: kvcache-ai/Mooncake, `FAST25-release/traces`.
//!
//! NVIDIA's AIPerf and Dynamo write the same fields and two more: `session_id`, any string or number, and `delay`, the
//! milliseconds from the end of the session's turn before to this one, which then needs no `timestamp`. Other fields
//! are ignored.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};

use serde::Deserialize;
use serde_json::Number;

use super::lines::{Fault, Lines, json, needed, time, tokens};
use super::{Draft, Options, TraceError};
use crate::trace::{Trace, TraceRequest};

/// Tokens of a block of the public traces.
const BLOCK_TOKENS: u32 = 512;

/// The fields as they come; each is checked on its own, so that an error can name it.
#[derive(Deserialize)]
struct Line {
    timestamp: Option<Number>,
    input_length: Option<Number>,
    output_length: Option<Number>,
    hash_ids: Option<Vec<u64>>,
    session_id: Option<SessionId>,
    delay: Option<Number>,
}

#[derive(Deserialize, PartialEq, Eq, Hash)]
#[serde(untagged)]
enum SessionId {
    Number(i64),
    Text(String),
}

pub(super) fn begins(head: &str) -> bool {
    head.starts_with('{') && head.contains("\"input_length\"")
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS).max(1);
    let mut draft = Draft::new(options, block_tokens);
    // The session and the last turn of each id.
    let mut turns: HashMap<SessionId, (u32, u32)> = HashMap::new();
    let (mut sessions, mut with_ids) = (0, false);
    lines.each(|_, bytes| {
        let line: Line = json(bytes)?;
        let before = line.session_id.as_ref().and_then(|id| turns.get(id)).copied();
        let delay_s =
            line.delay.map(|delay| time("delay", &delay, "milliseconds")).transpose()?.map(|ms| ms / 1e3);
        let delay_s = delay_s.filter(|_| before.is_some());
        let arrival_s = match (line.timestamp, before, delay_s) {
            (Some(timestamp), ..) => time("timestamp", &timestamp, "milliseconds")? / 1e3,
            (None, Some((_, turn)), Some(delay_s)) => {
                draft.builder.requests()[turn as usize].arrival_s + delay_s
            }
            (None, ..) => needed("timestamp", None)?,
        };
        let input_tokens = tokens("input_length", line.input_length, 1)?;
        let output_tokens = tokens("output_length", line.output_length, 0)?;
        let expected = input_tokens.div_ceil(block_tokens) as usize;
        let ids = line.hash_ids.unwrap_or_default();
        if !ids.is_empty() && ids.len() != expected {
            let why = format!(
                "{} ids, but {input_tokens} tokens in blocks of {block_tokens} need {expected}",
                ids.len()
            );
            return Err(Fault::Field("hash_ids", why));
        }
        let request = TraceRequest {
            arrival_s,
            input_tokens,
            output_tokens,
            session: before.map_or(sessions, |(session, _)| session),
            after: before.map(|(_, turn)| turn),
            think_s: delay_s.map(|delay_s| delay_s as f32),
            ..TraceRequest::default()
        };
        let index = draft.push(request, &ids)?;
        sessions += u32::from(before.is_none());
        if let Some(id) = line.session_id {
            turns.insert(id, (request.session, index));
        }
        with_ids |= !ids.is_empty();
        Ok(())
    })?;
    draft.infer_sessions = turns.is_empty() && with_ids;
    Ok(draft)
}

/// Writes a trace, without its notes and what it knows of sessions. Times are rounded to microseconds, block ids count
/// from 0.
///
/// # Errors
///
/// What the output says.
pub fn write(trace: &Trace, mut out: impl Write) -> io::Result<()> {
    let first_ids = first_ids(trace);
    let mut ids: Vec<u64> = Vec::new();
    for (index, request) in trace.requests.iter().enumerate() {
        let micros = (request.arrival_s * 1e6).round() as u64;
        let (millis, rest) = (micros / 1000, micros % 1000);
        let fraction = if rest == 0 { String::new() } else { format!(".{rest:03}") };
        write!(
            out,
            "{{\"timestamp\": {millis}{fraction}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": ",
            request.input_tokens, request.output_tokens
        )?;
        ids.clear();
        ids.resize(trace.prompt_blocks(index as u32) as usize, 0);
        for (owner, from, to) in trace.runs(index as u32) {
            for position in from..to {
                ids[position as usize] = first_ids[owner as usize].wrapping_add(u64::from(position));
            }
        }
        serde_json::to_writer(&mut out, &ids)?;
        out.write_all(b"}\n")?;
    }
    out.flush()
}

/// What to add to a block's position to have its id, for each owner: ids count the blocks of all requests, those of
/// their answers included that another prompt begins with. Less than 0 wraps around and comes back.
fn first_ids(trace: &Trace) -> Vec<u64> {
    let mut ends: Vec<u32> =
        (0..trace.requests.len() as u32).map(|index| trace.prompt_blocks(index)).collect();
    for request in &trace.requests {
        if let Some(base) = request.base {
            let end = &mut ends[base as usize];
            *end = (*end).max(request.shared_blocks);
        }
    }
    let mut next = 0u64;
    let first = |(request, end): (&TraceRequest, u32)| {
        let from = if request.base.is_some() { request.shared_blocks } else { 0 };
        let first = next.wrapping_sub(u64::from(from));
        next += u64::from(end.saturating_sub(from));
        first
    };
    trace.requests.iter().zip(ends).map(first).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::{Format, Jitter, open};
    use crate::session;
    use crate::trace::Builder;

    fn mooncake() -> Options {
        Options { format: Some(Format::Mooncake), ..Options::default() }
    }

    fn off() -> Options {
        Options { jitter: Jitter::Off, ..mooncake() }
    }

    fn read(input: impl BufRead, options: &Options) -> Result<Trace, TraceError> {
        crate::format::read(input, options)
    }

    fn line(timestamp: u64, input: u32, ids: &[u64]) -> String {
        format!(
            "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": 7, \"hash_ids\": {ids:?}}}\n"
        )
    }

    /// The error of a trace whose second line is `bad`.
    fn check_bad(bad: &str, expect: &str) {
        let text = format!("{}{bad}\n{}", line(0, 512, &[1]), line(1, 513, &[1, 2]));
        let error = read(text.as_bytes(), &off()).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains(expect), "{error}");
        let trace = read(text.as_bytes(), &Options { skip_bad: true, ..off() }).unwrap();
        assert_eq!(trace.requests.len(), 2);
        assert!(trace.notes[0].contains("1 invalid") && trace.notes[0].contains(expect), "{:?}", trace.notes);
    }

    #[test]
    fn a_line_becomes_a_request() {
        let text = "\n{\"timestamp\": 27482, \"input_length\": 600, \"output_length\": 52, \"hash_ids\": [46, 47], \
                    \"session_id\": \"x\", \"delay\": null, \"text\": {}}\r\n\n";
        let trace = read(text.as_bytes(), &mooncake()).unwrap();
        let expected = TraceRequest {
            arrival_s: 27.482,
            input_tokens: 600,
            output_tokens: 52,
            ..TraceRequest::default()
        };
        assert_eq!(trace.requests, [expected]);
        assert_eq!(trace.notes, [""; 0]);
        assert_eq!((trace.span_s(), trace.input_tokens(), trace.output_tokens()), (27.482, 600, 52));
    }

    #[test]
    fn a_bad_line_is_named_with_its_field() {
        check_bad("{}", "timestamp: missing");
        check_bad("not json", "line: ");
        check_bad("{\"timestamp\": 1", "line: ");
        check_bad(
            &line(5, 512, &[1]).replace("512", "0"),
            "input_length: 0 is not a number of tokens from 1",
        );
        check_bad(&line(5, 512, &[1]).replace("512", "1.5"), "input_length: 1.5");
        check_bad(&line(5, 512, &[1]).replace("512", "4294967296"), "input_length: 4294967296");
        check_bad(&line(5, 512, &[1]).replace("7,", "-7,"), "output_length: -7");
        check_bad(&line(5, 512, &[1]).replace("timestamp\": 5", "timestamp\": -5"), "timestamp: -5");
        check_bad(&line(5, 513, &[1]), "hash_ids: 1 ids, but 513 tokens in blocks of 512 need 2");
        check_bad(&line(5, 512, &[1]).replace("hash_ids", "delay"), "line: ");
        check_bad(&line(5, 512, &[1]).replace("[1]", "[-1]"), "line: ");
        check_bad("\u{fffd}", "line: ");
    }

    #[test]
    fn a_trace_without_requests_is_an_error() {
        assert!(matches!(read(&b"\n \n"[..], &off()), Err(TraceError::Empty)));
        let skip = Options { skip_bad: true, ..off() };
        assert!(matches!(read(&b"{}\n"[..], &skip), Err(TraceError::Empty)));
    }

    #[test]
    fn requests_out_of_order_are_sorted_and_noted() {
        let text = [line(2000, 9, &[1]), line(1000, 8, &[2]), line(1000, 7, &[3])].concat();
        let trace = read(text.as_bytes(), &mooncake()).unwrap();
        let lengths: Vec<u32> = trace.requests.iter().map(|request| request.input_tokens).collect();
        assert_eq!(lengths, [8, 7, 9], "equal times keep the order of the file");
        assert_eq!(trace.notes.len(), 1);
    }

    #[test]
    fn unix_times_count_from_the_first_request() {
        let text = [line(1_700_000_000_000, 9, &[1]), line(1_700_000_001_500, 8, &[2])].concat();
        let trace = read(text.as_bytes(), &mooncake()).unwrap();
        assert_eq!((trace.requests[0].arrival_s, trace.requests[1].arrival_s), (0.0, 1.5));
        assert_eq!(trace.notes.len(), 1);
    }

    fn coarse(tick_ms: u64) -> String {
        (0..200).map(|i| line(i / 4 * tick_ms, 100 + i as u32, &[i])).collect()
    }

    #[test]
    fn a_coarse_clock_is_spread_over_its_tick_in_the_order_of_the_file() {
        let trace = read(coarse(3000).as_bytes(), &Options { seed: 5, ..mooncake() }).unwrap();
        for (i, request) in trace.requests.iter().enumerate() {
            assert_eq!(request.input_tokens, 100 + i as u32);
            let tick_s = (i / 4) as f64 * 3.0;
            assert!((tick_s..tick_s + 3.0).contains(&request.arrival_s), "{i}: {}", request.arrival_s);
        }
        assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s < b.arrival_s));
        let next_tick_s = trace.requests[4].arrival_s - 3.0;
        assert!((next_tick_s - trace.requests[0].arrival_s).abs() > 1e-3, "each tick has offsets of its own");
        assert!(trace.notes[0].contains("multiples of 3 s"), "{:?}", trace.notes);
        let again = read(coarse(3000).as_bytes(), &Options { seed: 5, ..mooncake() }).unwrap();
        assert_eq!(again, trace);
        let other = read(coarse(3000).as_bytes(), &Options { seed: 6, ..mooncake() }).unwrap();
        assert_ne!(other.requests, trace.requests);
    }

    #[test]
    fn a_clock_that_is_fine_or_known_to_be_wanted_is_left_alone() {
        let regular: String = (0..200).map(|i| line(i * 500, 100, &[i])).collect();
        for (text, options, fifth_s) in
            [(coarse(99), mooncake(), 0.099), (coarse(3000), off(), 3.0), (regular, mooncake(), 2.0)]
        {
            let trace = read(text.as_bytes(), &options).unwrap();
            assert_eq!(trace.requests[4].arrival_s, fifth_s);
            assert_eq!(trace.notes, [""; 0]);
        }
    }

    #[test]
    fn gzip_is_known_by_its_first_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let (plain, packed) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&plain, coarse(1000)).unwrap();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(coarse(1000).as_bytes()).unwrap();
        let gzip = gzip.finish().unwrap();
        std::fs::write(&packed, &gzip).unwrap();
        let expected = open(&plain, &mooncake()).unwrap();
        assert_eq!(open(&packed, &mooncake()).unwrap(), expected);

        std::fs::write(&packed, &gzip[..gzip.len() / 2]).unwrap();
        assert!(matches!(open(&packed, &mooncake()), Err(TraceError::Read { .. })));
        let nowhere = directory.path().join("c");
        assert!(matches!(open(&nowhere, &off()), Err(TraceError::Open { .. })));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            rows in prop::collection::vec((0u64..1 << 40, 1u32..5000, 0u32..3000, any::<u64>()), 1..40),
        ) {
            let mut rows = rows;
            rows.sort_unstable();
            let mut builder = Builder::new(16);
            for (micros, input_tokens, output_tokens, id) in rows {
                let arrival_s = micros as f64 / 1e6;
                let ids: Vec<u64> = (0..u64::from(input_tokens.div_ceil(16))).map(|i| i * 1000 + (id >> (i % 60)) % 3).collect();
                builder.push(TraceRequest { arrival_s, input_tokens, output_tokens, ..TraceRequest::default() }, &ids);
            }
            let mut trace = builder.finish();
            session::infer(&mut trace);
            let mut text = Vec::new();
            write(&trace, &mut text).unwrap();
            let back = read(&text[..], &Options { block_tokens: Some(16), ..off() }).unwrap();
            prop_assert_eq!(back.requests.len(), trace.requests.len());
            for (a, b) in back.requests.iter().zip(&trace.requests) {
                prop_assert!((a.arrival_s - b.arrival_s).abs() < 1e-6);
                prop_assert_eq!(*a, TraceRequest { arrival_s: a.arrival_s, ..*b });
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), skip_bad: bool) {
            let options = Options { skip_bad, ..mooncake() };
            if let Ok(trace) = read(&bytes[..], &options) {
                prop_assert!(!trace.requests.is_empty());
            }
        }

        #[test]
        fn every_truncated_line_is_refused(cut in 1usize..80) {
            let whole = line(5, 600, &[1, 2]);
            let cut = cut.min(whole.len() - 3);
            prop_assert!(read(&whole.as_bytes()[..cut], &off()).is_err());
        }
    }
}
