//! One request from its departure to its end, and its record.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::Full;
use kvlane_trace::record::{Gaps, Record};
use kvlane_wire::server_timing;
use kvlane_wire::sse::SseScanner;

use super::ErrorClass;
use crate::client::{self, SendError, Target, describe};
use crate::statistics::histogram::Histogram;

/// Maximum bytes of an error answer, and characters of a header, that are kept.
const DETAIL_BYTES_MAX: usize = 200;

/// Maximum gaps of one answer that are kept; later ones only count for the maximum.
const GAPS_MAX: usize = 1 << 20;

/// A request that is ready to send, and its record.
pub(super) struct Departure {
    pub(super) request: Request<Full<Bytes>>,
    pub(super) record: Record,
}

/// Its result.
pub(super) struct Arrival {
    pub(super) record: Record,
    /// Between its tokens.
    pub(super) gaps: Histogram,
    /// Its failure, as text.
    pub(super) failure: Option<String>,
}

/// Between the tokens of one answer.
#[derive(Default)]
struct Rhythm {
    last: Option<Instant>,
    gaps: Vec<Duration>,
    /// Tokens that arrived together with the previous one.
    together: u64,
    max: Duration,
}

/// A class and a message.
type Failure = (ErrorClass, String);

/// Sends it and reads its answer to the end.
pub(super) async fn travel(
    target: Arc<Target>,
    departure: Departure,
    start: Instant,
    timeout: Duration,
) -> Arrival {
    let Departure { request, mut record } = departure;
    record.sent_s = start.elapsed().as_secs_f64();
    let mut rhythm = Rhythm::default();
    let outcome =
        tokio::time::timeout(timeout, exchange(&target, request, start, &mut record, &mut rhythm)).await;
    record.end_s = start.elapsed().as_secs_f64();
    let gaps = rhythm.histogram();
    record.gaps = rhythm.gaps();
    let failure = match outcome {
        Ok(Ok(())) => return Arrival { record, gaps, failure: None },
        Ok(Err(failure)) => failure,
        Err(_) => (ErrorClass::Timeout, format!("not finished after {} s", timeout.as_secs_f64())),
    };
    record.error = Some(failure.0.name().into());
    Arrival { record, gaps, failure: Some(format!("{}: {}", failure.0.name(), failure.1)) }
}

/// Fills the record as data arrives, so that it survives a timeout.
async fn exchange(
    target: &Arc<Target>,
    request: Request<Full<Bytes>>,
    start: Instant,
    record: &mut Record,
    rhythm: &mut Rhythm,
) -> Result<(), Failure> {
    let reset = |error: hyper::Error| (ErrorClass::Reset, format!("after headers: {}", describe(&error)));
    let (answer, connection) = target.send(request).await.map_err(|error| match error {
        SendError::Connect(why) => (ErrorClass::Connect, why),
        SendError::Broken(why) => (ErrorClass::Reset, why),
    })?;
    let status = answer.status();
    record.status = status.as_u16();
    note(answer.headers(), record);
    let mut body = answer.into_body();
    if status != StatusCode::OK {
        return Err((
            ErrorClass::Status,
            format!("{} {}", status.as_u16(), client::beginning(body, DETAIL_BYTES_MAX).await),
        ));
    }
    let mut scanner = SseScanner::new();
    while let Some(data) = client::next(&mut body).await.map_err(reset)? {
        let tokens = scanner.push(&data);
        if tokens > 0 {
            let now = Instant::now();
            record.first_token_s.get_or_insert_with(|| (now - start).as_secs_f64());
            rhythm.beat(now, tokens);
        }
        record.output_tokens = u32::try_from(scanner.tokens()).unwrap_or(u32::MAX);
    }
    scanner.finish();
    if let Some(usage) = scanner.usage() {
        record.prompt_tokens = usage.prompt_tokens;
        record.output_tokens = usage.completion_tokens;
        // An engine that decodes what another has computed may report fetched tokens as cached.
        record.cached_tokens = record.cached_tokens.or(usage.cached_tokens);
    }
    let target = Arc::clone(target);
    tokio::spawn(async move { target.give_back(connection).await });
    if scanner.has_failed() {
        let detail = format!("the stream reported an error after {} tokens", scanner.tokens());
        return Err((ErrorClass::Failed, detail));
    }
    if !scanner.is_done() {
        let detail = format!("the stream ended without [DONE] after {} tokens", scanner.tokens());
        return Err((ErrorClass::Truncated, detail));
    }
    Ok(())
}

/// Reads stages and placement from an answer's head.
fn note(headers: &HeaderMap, record: &mut Record) {
    let text = |name: &str| -> Option<String> {
        Some(headers.get(name)?.to_str().ok()?.chars().take(DETAIL_BYTES_MAX).collect())
    };
    record.endpoint = text("x-router-backend");
    record.prefill_endpoint = text("x-router-prefill");
    record.cached_tokens = text("x-router-prefill-cached-tokens").and_then(|tokens| tokens.parse().ok());
    record.reason = text("x-router-reason");
    record.request_id = text("x-request-id");
    let mut stages_s = BTreeMap::new();
    for value in headers.get_all("server-timing") {
        for (name, seconds) in server_timing::parse(value.to_str().unwrap_or_default()) {
            *stages_s.entry(name.chars().take(DETAIL_BYTES_MAX).collect()).or_default() += seconds;
        }
    }
    record.stages_s = stages_s;
}

// === impl Rhythm ===

impl Rhythm {
    /// Records the arrival of tokens.
    fn beat(&mut self, now: Instant, tokens: u32) {
        self.together += u64::from(tokens) - 1;
        if let Some(last) = self.last.replace(now) {
            let gap = now - last;
            self.max = self.max.max(gap);
            if self.gaps.len() < GAPS_MAX {
                self.gaps.push(gap);
            }
        }
    }

    fn histogram(&self) -> Histogram {
        let mut all = Histogram::default();
        all.add(0.0, self.together);
        self.gaps.iter().for_each(|gap| all.add(gap.as_secs_f64(), 1));
        all
    }

    /// Nearest ranks, those without a gap at the front.
    fn gaps(mut self) -> Option<Gaps> {
        self.gaps.sort_unstable();
        let count = self.together + self.gaps.len() as u64;
        let rank = |percent: u64| {
            let rank = (count * percent).div_ceil(100).max(1);
            match rank.checked_sub(self.together + 1) {
                None => 0.0,
                Some(at) => self.gaps[at as usize].as_secs_f64(),
            }
        };
        (count > 0).then(|| Gaps { p50_s: rank(50), p99_s: rank(99), max_s: self.max.as_secs_f64() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_between_tokens_and_none_between_those_that_came_together() {
        let start = Instant::now();
        let gaps = |beats: &[(u64, u32)]| {
            let mut rhythm = Rhythm::default();
            for &(at_ms, tokens) in beats {
                rhythm.beat(start + Duration::from_millis(at_ms), tokens);
            }
            assert_eq!(
                rhythm.histogram().count(),
                beats.iter().map(|beat| u64::from(beat.1)).sum::<u64>().saturating_sub(1)
            );
            rhythm.gaps()
        };
        assert_eq!(gaps(&[]), None);
        assert_eq!(gaps(&[(5, 1)]), None);
        assert_eq!(gaps(&[(5, 1), (15, 1)]), Some(Gaps { p50_s: 0.01, p99_s: 0.01, max_s: 0.01 }));
        assert_eq!(gaps(&[(5, 1), (15, 1), (45, 1)]), Some(Gaps { p50_s: 0.01, p99_s: 0.03, max_s: 0.03 }));
        assert_eq!(gaps(&[(5, 3), (45, 2)]), Some(Gaps { p50_s: 0.0, p99_s: 0.04, max_s: 0.04 }));
    }

    #[test]
    fn stages_of_several_headers_add_up() {
        let mut headers = HeaderMap::new();
        headers.append("server-timing", "queue;dur=1.5, engine;dur=20".parse().expect("a value"));
        headers.append("server-timing", "queue;dur=0.5".parse().expect("a value"));
        headers.append("x-router-reason", "overlap".parse().expect("a value"));
        headers.append("x-router-prefill", "http://p:1".parse().expect("a value"));
        headers.append("x-router-prefill-cached-tokens", "7".parse().expect("a value"));
        let mut record = Record::default();
        note(&headers, &mut record);
        assert_eq!(record.stages_s, BTreeMap::from([("engine".into(), 0.02), ("queue".into(), 0.002)]));
        assert_eq!(record.reason.as_deref(), Some("overlap"));
        assert_eq!((record.prefill_endpoint.as_deref(), record.cached_tokens), (Some("http://p:1"), Some(7)));
    }
}
