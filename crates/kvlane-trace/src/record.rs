//! The result of one request of a replay, and the JSONL format of a run.
//!
//! Times are seconds since the start of the replay on the client's clock. Latencies count from `scheduled_s`, the
//! time scheduled by the trace, so a client that falls behind shows up as latency rather than hiding it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// One request of a replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The request's position in the replayed trace.
    pub id: u64,
    /// Scheduled time, in seconds since the start of the replay.
    pub scheduled_s: f64,
    /// Time of sending.
    pub sent_s: f64,
    /// Arrival of its first token, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_s: Option<f64>,
    /// Its end, successful or not.
    pub end_s: f64,
    /// Prompt tokens, as counted by the engine if reported.
    pub prompt_tokens: u32,
    /// Prompt tokens from the engine's cache, if reported; of a split request, from that of the engine that computed the
    /// prompt, if the router reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// Answer tokens received.
    pub output_tokens: u32,
    /// The endpoint that served it, if the router reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The endpoint that computed its prompt, if that was another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_endpoint: Option<String>,
    /// HTTP status, 0 if there was no answer.
    pub status: u16,
    /// Its conversation in the replayed trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<u32>,
    /// The earlier request whose prompt (or prompt and answer) its prompt began with, by its `id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Number of shared tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_tokens: Option<u32>,
    /// Why it failed, as a short class such as `connect`, `status`, `reset`, `timeout` or `truncated`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Prompt tokens that an infinite cache would have held: those shared with the beginning of an earlier prompt or
    /// answer of the trace. The upper bound of `cached_tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reusable_tokens: Option<u32>,
    /// The earlier request whose end it waited for, by its `id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Seconds from that end until it was due, if the trace contains them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub think_s: Option<f64>,
    /// Gaps between its output tokens on arrival.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gaps: Option<Gaps>,
    /// Seconds spent in each stage, by the names in the router's `Server-Timing` header.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub stages_s: BTreeMap<String, f64>,
    /// The router's reason for the placement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Number of attempts, if the server or the simulator reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// The request id at the router.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// Seconds between the output tokens of one answer: inter-token latency (ITL). Tokens that arrive together have no gap
/// between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gaps {
    /// The median.
    pub p50_s: f64,
    /// What 99 % do not exceed.
    pub p99_s: f64,
    /// The longest.
    pub max_s: f64,
}

// === impl Record ===

impl Record {
    /// Whether it was answered in full.
    pub fn is_ok(&self) -> bool {
        self.error.is_none() && (200..300).contains(&self.status)
    }

    /// Seconds from when it was due to its first token.
    pub fn ttft_s(&self) -> Option<f64> {
        self.first_token_s.map(|first| first - self.scheduled_s)
    }

    /// Seconds from when it was due to its end.
    pub fn e2e_s(&self) -> f64 {
        self.end_s - self.scheduled_s
    }

    /// Mean seconds between two output tokens; needs at least two.
    pub fn tpot_s(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|&gaps| gaps > 0)?;
        self.first_token_s.map(|first| (self.end_s - first) / f64::from(gaps))
    }

    /// Seconds by which the client sent it late.
    pub fn lag_s(&self) -> f64 {
        self.sent_s - self.scheduled_s
    }
}

/// Longest line [`read`] accepts, in bytes.
const LINE_BYTES_MAX: u64 = 64 * 1024;

/// Writes records as JSON, one on a line.
pub fn write(records: &[Record], mut out: impl Write) -> io::Result<()> {
    for record in records {
        serde_json::to_writer(&mut out, record)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// Reads what [`write()`] wrote. Blank lines are skipped; any other line that is no record is an error that names it.
pub fn read(mut input: impl BufRead) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        if io::Read::take(&mut input, LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let record = serde_json::from_slice(&line).map_err(|why| {
            io::Error::new(io::ErrorKind::InvalidData, format!("records line {number}: {why}"))
        })?;
        records.push(record);
    }
    Ok(records)
}

/// Reads a file that [`write()`] wrote, which must have a record.
///
/// # Errors
/// The file and what is wrong with it.
pub fn open(path: &Path) -> io::Result<Vec<Record>> {
    let named = |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", path.display()));
    let records = File::open(path).and_then(|file| read(BufReader::new(file))).map_err(named)?;
    if records.is_empty() {
        return Err(named(io::Error::new(io::ErrorKind::InvalidData, "contains no records")));
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            id: 3,
            scheduled_s: 1.0,
            sent_s: 1.25,
            first_token_s: Some(2.0),
            end_s: 4.0,
            prompt_tokens: 100,
            cached_tokens: Some(64),
            output_tokens: 5,
            endpoint: Some("a".into()),
            prefill_endpoint: Some("engine-2".into()),
            status: 200,
            session: Some(1),
            base: Some(2),
            shared_tokens: Some(64),
            error: None,
            reusable_tokens: Some(80),
            after: Some(2),
            think_s: Some(0.5),
            gaps: Some(Gaps { p50_s: 0.01, p99_s: 0.02, max_s: 0.03 }),
            stages_s: BTreeMap::from([("queue".into(), 0.001)]),
            reason: Some("overlap".into()),
            attempts: Some(1),
            request_id: Some("r-1".into()),
        }
    }

    #[test]
    fn latencies_count_from_the_scheduled_time() {
        let record = record();
        assert_eq!(record.ttft_s(), Some(1.0));
        assert_eq!(record.e2e_s(), 3.0);
        assert_eq!(record.tpot_s(), Some(0.5));
        assert_eq!(record.lag_s(), 0.25);
    }

    #[test]
    fn a_single_token_has_no_time_between_tokens() {
        assert_eq!(Record { output_tokens: 1, ..record() }.tpot_s(), None);
        assert_eq!(Record { output_tokens: 0, ..record() }.tpot_s(), None);
    }

    #[test]
    fn an_answer_that_broke_off_is_not_ok_whatever_its_status() {
        assert!(record().is_ok());
        assert!(!Record { error: Some("truncated".into()), ..record() }.is_ok());
        assert!(!Record { status: 503, ..record() }.is_ok());
        assert!(!Record { status: 0, ..record() }.is_ok());
    }

    #[test]
    fn records_survive_being_written_and_read() {
        let failed = Record {
            first_token_s: None,
            cached_tokens: None,
            endpoint: None,
            error: Some("reset".into()),
            ..record()
        };
        let records = [record(), failed];
        let mut bytes = Vec::new();
        write(&records, &mut bytes).unwrap();
        bytes.extend_from_slice(b"\n");
        assert_eq!(read(&bytes[..]).unwrap(), records);
    }

    #[test]
    fn a_line_of_the_first_fields_alone_is_a_record_and_is_written_as_short() {
        let line = r#"{"id":3,"scheduled_s":1.0,"sent_s":1.0,"end_s":2.0,"prompt_tokens":9,"output_tokens":0,"status":503}"#;
        let records = read(line.as_bytes()).unwrap();
        assert!(records[0].stages_s.is_empty() && records[0].gaps.is_none());
        let mut bytes = Vec::new();
        write(&records, &mut bytes).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap().trim_end(), line);
    }

    #[test]
    fn a_broken_line_is_named() {
        let mut bytes = Vec::new();
        write(&[record()], &mut bytes).unwrap();
        bytes.extend_from_slice(b"{\"id\":");
        assert!(read(&bytes[..]).unwrap_err().to_string().contains("line 2"));
    }

    #[test]
    fn a_line_without_end_is_refused_instead_of_filling_memory() {
        let bytes = vec![b'1'; 2 * LINE_BYTES_MAX as usize];
        assert!(read(&bytes[..]).is_err());
    }
}
