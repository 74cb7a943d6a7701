//! The Mooncake format: one JSON object on a line, sorted by time.
//!
//! ```json
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49]}
//! ```
//!
//! `timestamp` is in milliseconds since the start. A block is 512 tokens unless the options say otherwise, and
//! `hash_ids` has one id for each started block; equal ids mean equal prompts up to there. Origin:
//! kvcache-ai/Mooncake, `FAST25-release/traces`. Dynamo and AIPerf write the same fields and further ones, which are
//! ignored here.
//!
//! The conversation trace's clock ticks every 3 s, so ten requests arrive at once, then none for 3 s. Replayed like
//! that a trace measures its own clock. The reader notices and spreads the arrivals of a tick evenly over it, in the
//! order of the file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

use serde::Deserialize;

use super::TraceError;
use crate::request::{Trace, TraceRequest};
use crate::sample::unit;

/// Most requests of one trace; the longest public one (BurstGPT 3) has 5.3 million.
const REQUESTS_MAX: usize = 8_000_000;

/// Longest line in bytes: 4 million tokens in blocks of 16 need less.
const LINE_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// A clock that ticks at least this coarsely, in microseconds, is not one to replay.
const QUANTUM_US_MIN: u64 = 100_000;

/// Fewer distinct times than this say nothing about the clock.
const DISTINCT_TIMES_MIN: usize = 32;

/// Timestamps beyond this many milliseconds count from 1970, not from the trace's start: it is September 2001.
const UNIX_MS_MIN: f64 = 1e12;

/// Whether to spread arrivals that a coarse clock has lumped together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jitter {
    /// If all times are multiples of 100 ms or more and some are equal.
    #[default]
    Auto,
    /// Never: the file's times as they are.
    Off,
}

/// How to read a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Tokens of a block. The public Mooncake traces have 512.
    pub block_tokens: u32,
    /// What to do about a coarse clock.
    pub jitter: Jitter,
    /// Seed of the jitter.
    pub seed: u64,
    /// Leave out lines that are no request, and note how many, instead of failing at the first.
    pub skip_bad: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { block_tokens: 512, jitter: Jitter::Auto, seed: 0, skip_bad: false }
    }
}

/// Reads a file, plain or gzip; which of the two, its first bytes tell.
pub fn open(path: &Path, options: &Options) -> Result<Trace, TraceError> {
    let failed = |source| TraceError::Open { path: path.to_owned(), source };
    let mut file = BufReader::new(File::open(path).map_err(failed)?);
    if file.fill_buf().map_err(failed)?.starts_with(&[0x1f, 0x8b]) {
        read(BufReader::new(flate2::bufread::MultiGzDecoder::new(file)), options)
    } else {
        read(file, options)
    }
}

/// Reads a trace. Blank lines are skipped.
pub fn read(mut input: impl BufRead, options: &Options) -> Result<Trace, TraceError> {
    let block_tokens = options.block_tokens.max(1);
    let mut trace = Trace { block_tokens, requests: Vec::new(), notes: Vec::new() };
    let mut skipped: Option<(u64, TraceError)> = None;
    let mut bytes = Vec::new();
    for line in 1u64.. {
        let failed = |source| TraceError::Read { line: line - 1, source };
        bytes.clear();
        if input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).map_err(failed)? == 0 {
            break;
        }
        if bytes.len() as u64 == LINE_BYTES_MAX && bytes.last() != Some(&b'\n') {
            let why = format!("longer than {LINE_BYTES_MAX} bytes");
            return Err(TraceError::Line { line, field: "line", why });
        }
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        match request(&bytes, block_tokens) {
            Ok(_) if trace.requests.len() == REQUESTS_MAX => {
                return Err(TraceError::TooLong { max: REQUESTS_MAX });
            }
            Ok(request) => trace.requests.push(request),
            Err((field, why)) => {
                let error = TraceError::Line { line, field, why };
                if !options.skip_bad {
                    return Err(error);
                }
                let (count, _) = skipped.get_or_insert((0, error));
                *count += 1;
            }
        }
    }
    if let Some((count, first)) = skipped {
        trace.notes.push(format!("skipped {count} bad lines, the first: {first}"));
    }
    if trace.requests.is_empty() {
        return Err(TraceError::Empty);
    }
    settle_clock(&mut trace, options);
    Ok(trace)
}

/// Writes a trace, without its notes. Times are rounded to microseconds.
pub fn write(trace: &Trace, mut out: impl Write) -> io::Result<()> {
    for request in &trace.requests {
        let micros = (request.arrival_s * 1e6).round() as u64;
        let (millis, rest) = (micros / 1000, micros % 1000);
        let fraction = if rest == 0 { String::new() } else { format!(".{rest:03}") };
        write!(
            out,
            "{{\"timestamp\": {millis}{fraction}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": ",
            request.input_tokens, request.output_tokens
        )?;
        serde_json::to_writer(&mut out, &request.blocks)?;
        out.write_all(b"}\n")?;
    }
    out.flush()
}

/// The fields as they come; each is checked on its own, so that an error can name it.
#[derive(Deserialize)]
struct Line {
    timestamp: Option<serde_json::Number>,
    input_length: Option<serde_json::Number>,
    output_length: Option<serde_json::Number>,
    hash_ids: Option<Vec<u64>>,
}

/// One line's request, or the field at fault and why.
fn request(bytes: &[u8], block_tokens: u32) -> Result<TraceRequest, (&'static str, String)> {
    let line: Line = serde_json::from_slice(bytes).map_err(|why| ("line", why.to_string()))?;
    let timestamp = line.timestamp.ok_or_else(|| ("timestamp", missing()))?;
    let millis = timestamp.as_f64().filter(|ms| ms.is_finite() && (0.0..1e15).contains(ms));
    let millis = millis.ok_or_else(|| ("timestamp", format!("{timestamp} is no time in milliseconds")))?;
    let input_tokens = tokens("input_length", line.input_length, 1)?;
    let output_tokens = tokens("output_length", line.output_length, 0)?;
    let blocks = line.hash_ids.ok_or_else(|| ("hash_ids", missing()))?;
    let expected = input_tokens.div_ceil(block_tokens) as usize;
    if blocks.len() != expected {
        let why = format!(
            "{} ids, but {input_tokens} tokens in blocks of {block_tokens} need {expected}",
            blocks.len()
        );
        return Err(("hash_ids", why));
    }
    Ok(TraceRequest { arrival_s: millis / 1e3, input_tokens, output_tokens, blocks })
}

fn missing() -> String {
    "missing".to_owned()
}

fn tokens(
    field: &'static str,
    value: Option<serde_json::Number>,
    min: u32,
) -> Result<u32, (&'static str, String)> {
    let value = value.ok_or_else(|| (field, missing()))?;
    let count = value.as_u64().and_then(|count| u32::try_from(count).ok()).filter(|&count| count >= min);
    count.ok_or_else(|| (field, format!("{value} is no number of tokens from {min} to {}", u32::MAX)))
}

/// Makes the arrivals start near zero, come in order and, where asked, not in lumps. Notes what it changes.
fn settle_clock(trace: &mut Trace, options: &Options) {
    let Trace { requests, notes, .. } = trace;
    if !requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s) {
        requests.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
        notes.push("requests were out of order and are sorted by time".to_owned());
    }
    let first_s = requests[0].arrival_s;
    if first_s * 1e3 >= UNIX_MS_MIN {
        requests.iter_mut().for_each(|request| request.arrival_s -= first_s);
        notes.push(format!("times count from the first request, at Unix time {first_s:.3} s"));
    }
    if options.jitter == Jitter::Off {
        return;
    }
    let Some(quantum_s) = quantum_s(requests) else { return };
    let mut offsets = Vec::new();
    let mut index = 0;
    for lump in requests.chunk_by_mut(|a, b| a.arrival_s == b.arrival_s) {
        offsets.clear();
        offsets.extend((index..).take(lump.len()).map(|i| unit(options.seed, i) * quantum_s));
        offsets.sort_unstable_by(f64::total_cmp);
        index += lump.len() as u64;
        for (request, offset) in lump.iter_mut().zip(&offsets) {
            request.arrival_s += offset;
        }
    }
    notes.push(format!(
        "times are multiples of {quantum_s} s; arrivals are spread evenly over it (seed {})",
        options.seed
    ));
}

/// The tick of the clock in seconds, if it is coarse: a common divisor of all times, some of them equal.
fn quantum_s(sorted: &[TraceRequest]) -> Option<f64> {
    let mut quantum = 0;
    let mut distinct = 0;
    for lump in sorted.chunk_by(|a, b| a.arrival_s == b.arrival_s) {
        let micros = lump[0].arrival_s * 1e6;
        if (micros - micros.round()).abs() > 0.01 {
            return None;
        }
        quantum = gcd(quantum, micros.round() as u64);
        distinct += 1;
    }
    let coarse = quantum >= QUANTUM_US_MIN && distinct >= DISTINCT_TIMES_MIN && distinct < sorted.len();
    coarse.then(|| quantum as f64 / 1e6)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OFF: Options = Options { block_tokens: 512, jitter: Jitter::Off, seed: 0, skip_bad: false };

    fn line(timestamp: u64, input: u32, ids: &[u64]) -> String {
        format!(
            "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": 7, \"hash_ids\": {ids:?}}}\n"
        )
    }

    /// The error of a trace whose second line is `bad`.
    fn check_bad(bad: &str, expect: &str) {
        let text = format!("{}{bad}\n{}", line(0, 512, &[1]), line(1, 513, &[1, 2]));
        let error = read(text.as_bytes(), &OFF).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains(expect), "{error}");
        let trace = read(text.as_bytes(), &Options { skip_bad: true, ..OFF }).unwrap();
        assert_eq!(trace.requests.len(), 2);
        assert!(trace.notes[0].contains("1 bad") && trace.notes[0].contains(expect), "{:?}", trace.notes);
    }

    #[test]
    fn a_line_becomes_a_request() {
        let text = "\n{\"timestamp\": 27482, \"input_length\": 600, \"output_length\": 52, \"hash_ids\": [46, 47], \
                    \"session_id\": \"x\", \"delay\": null}\r\n\n";
        let trace = read(text.as_bytes(), &Options::default()).unwrap();
        let expected =
            TraceRequest { arrival_s: 27.482, input_tokens: 600, output_tokens: 52, blocks: vec![46, 47] };
        assert_eq!(trace.requests, [expected]);
        assert_eq!(trace.notes, [""; 0]);
        assert_eq!((trace.span_s(), trace.input_tokens(), trace.output_tokens()), (27.482, 600, 52));
    }

    #[test]
    fn a_bad_line_is_named_with_its_field() {
        check_bad("{}", "timestamp: missing");
        check_bad("not json", "line: ");
        check_bad("{\"timestamp\": 1", "line: ");
        check_bad(&line(5, 512, &[1]).replace("512", "0"), "input_length: 0 is no number of tokens from 1");
        check_bad(&line(5, 512, &[1]).replace("512", "1.5"), "input_length: 1.5");
        check_bad(&line(5, 512, &[1]).replace("512", "4294967296"), "input_length: 4294967296");
        check_bad(&line(5, 512, &[1]).replace("7,", "-7,"), "output_length: -7");
        check_bad(&line(5, 512, &[1]).replace("timestamp\": 5", "timestamp\": -5"), "timestamp: -5");
        check_bad(&line(5, 513, &[1]), "hash_ids: 1 ids, but 513 tokens in blocks of 512 need 2");
        check_bad(&line(5, 512, &[1]).replace("hash_ids", "ids"), "hash_ids: missing");
        check_bad(&line(5, 512, &[1]).replace("[1]", "[-1]"), "line: ");
        check_bad("\u{fffd}", "line: ");
    }

    #[test]
    fn a_trace_without_requests_is_an_error() {
        assert!(matches!(read(&b"\n \n"[..], &OFF), Err(TraceError::Empty)));
        let skip = Options { skip_bad: true, ..OFF };
        assert!(matches!(read(&b"{}\n"[..], &skip), Err(TraceError::Empty)));
    }

    #[test]
    fn a_line_that_does_not_end_is_refused_at_the_limit() {
        let text = vec![b'['; LINE_BYTES_MAX as usize + 10];
        let skip = Options { skip_bad: true, ..OFF };
        assert!(matches!(read(&text[..], &skip), Err(TraceError::Line { line: 1, .. })));
    }

    #[test]
    fn requests_out_of_order_are_sorted_and_noted() {
        let text = [line(2000, 9, &[1]), line(1000, 8, &[2]), line(1000, 7, &[3])].concat();
        let trace = read(text.as_bytes(), &Options::default()).unwrap();
        let lengths: Vec<u32> = trace.requests.iter().map(|request| request.input_tokens).collect();
        assert_eq!(lengths, [8, 7, 9], "equal times keep the order of the file");
        assert_eq!(trace.notes.len(), 1);
    }

    #[test]
    fn unix_times_count_from_the_first_request() {
        let text = [line(1_700_000_000_000, 9, &[1]), line(1_700_000_001_500, 8, &[2])].concat();
        let trace = read(text.as_bytes(), &Options::default()).unwrap();
        assert_eq!((trace.requests[0].arrival_s, trace.requests[1].arrival_s), (0.0, 1.5));
        assert_eq!(trace.notes.len(), 1);
    }

    fn coarse(tick_ms: u64) -> String {
        (0..200).map(|i| line(i / 4 * tick_ms, 100 + i as u32, &[i])).collect()
    }

    #[test]
    fn a_coarse_clock_is_spread_over_its_tick_in_the_order_of_the_file() {
        let trace = read(coarse(3000).as_bytes(), &Options { seed: 5, ..Options::default() }).unwrap();
        for (i, request) in trace.requests.iter().enumerate() {
            assert_eq!(request.input_tokens, 100 + i as u32);
            let tick_s = (i / 4) as f64 * 3.0;
            assert!((tick_s..tick_s + 3.0).contains(&request.arrival_s), "{i}: {}", request.arrival_s);
        }
        assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s < b.arrival_s));
        let next_tick_s = trace.requests[4].arrival_s - 3.0;
        assert!((next_tick_s - trace.requests[0].arrival_s).abs() > 1e-3, "each tick has offsets of its own");
        assert!(trace.notes[0].contains("multiples of 3 s"), "{:?}", trace.notes);
        let again = read(coarse(3000).as_bytes(), &Options { seed: 5, ..Options::default() }).unwrap();
        assert_eq!(again, trace);
        let other = read(coarse(3000).as_bytes(), &Options { seed: 6, ..Options::default() }).unwrap();
        assert_ne!(other.requests, trace.requests);
    }

    #[test]
    fn a_clock_that_is_fine_or_known_to_be_wanted_is_left_alone() {
        let regular: String = (0..200).map(|i| line(i * 500, 100, &[i])).collect();
        for (text, options, fifth_s) in [
            (coarse(99), Options::default(), 0.099),
            (coarse(3000), OFF, 3.0),
            (regular, Options::default(), 2.0),
        ] {
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
        let expected = Trace::open(&plain, &Options::default()).unwrap();
        assert_eq!(Trace::open(&packed, &Options::default()).unwrap(), expected);

        std::fs::write(&packed, &gzip[..gzip.len() / 2]).unwrap();
        assert!(matches!(Trace::open(&packed, &Options::default()), Err(TraceError::Read { .. })));
        let nowhere = directory.path().join("c");
        assert!(matches!(Trace::open(&nowhere, &OFF), Err(TraceError::Open { .. })));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            rows in prop::collection::vec((0u64..1 << 40, 1u32..5000, 0u32..3000, any::<u64>()), 1..40),
        ) {
            let mut requests: Vec<TraceRequest> = rows
                .into_iter()
                .map(|(micros, input_tokens, output_tokens, id)| TraceRequest {
                    arrival_s: micros as f64 / 1e6,
                    input_tokens,
                    output_tokens,
                    blocks: (0..u64::from(input_tokens.div_ceil(16))).map(|i| id.wrapping_add(i)).collect(),
                })
                .collect();
            requests.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
            let trace = Trace { block_tokens: 16, requests, notes: Vec::new() };
            let mut text = Vec::new();
            write(&trace, &mut text).unwrap();
            let back = read(&text[..], &Options { block_tokens: 16, ..OFF }).unwrap();
            prop_assert_eq!(back.requests.len(), trace.requests.len());
            for (a, b) in back.requests.iter().zip(&trace.requests) {
                prop_assert!((a.arrival_s - b.arrival_s).abs() < 1e-6);
                prop_assert_eq!((a.input_tokens, a.output_tokens), (b.input_tokens, b.output_tokens));
                prop_assert_eq!(&a.blocks, &b.blocks);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), skip_bad: bool) {
            let options = Options { skip_bad, ..Options::default() };
            if let Ok(trace) = read(&bytes[..], &options) {
                prop_assert!(!trace.requests.is_empty());
            }
        }

        #[test]
        fn every_truncated_line_is_refused(cut in 1usize..80) {
            let whole = line(5, 600, &[1, 2]);
            let cut = cut.min(whole.len() - 3);
            prop_assert!(read(&whole.as_bytes()[..cut], &OFF).is_err());
        }
    }
}
