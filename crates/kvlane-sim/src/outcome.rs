//! The result of one request in a world.

use std::collections::BTreeMap;

use kvlane_core::decision::Rejection;
use kvlane_core::time::Nanos;
use kvlane_trace::record::Record;
use kvlane_trace::trace::Trace;

/// The result of one request. Times count from the start of the world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Its index in the trace.
    pub request: u32,
    /// The first request of its conversation, possibly itself.
    pub root: u32,
    /// The endpoint that served it last, as an index in the fleet; `None` if it was never placed.
    pub endpoint: Option<u16>,
    /// Number of attempts: one, plus one for each endpoint that failed.
    pub attempts: u8,
    /// Number of times that its client sent it again, because its gateway died. Attempts are counted anew then.
    pub resent: u8,
    /// Time at which it was sent.
    pub due: Nanos,
    /// Time of its first token.
    pub first_token: Option<Nanos>,
    /// Time of its end.
    pub end: Nanos,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens the engine found in its cache.
    pub cached_tokens: u32,
    /// Prompt tokens whose KV blocks came from another engine.
    pub moved_tokens: u32,
    /// Prompt tokens that an infinite cache would have held.
    pub reusable_tokens: u32,
    /// Answer tokens received.
    pub output_tokens: u32,
    /// Its course, if its last attempt was split between two endpoints.
    pub split: Option<Split>,
    /// Why it was not answered in full.
    pub failure: Option<Failure>,
}

/// The course of a request whose prompt one endpoint computes for another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// The endpoint that computes the prompt, as an index in the fleet.
    pub prefill: u16,
    /// Time at which the prompt is computed.
    pub computed: Option<Nanos>,
    /// Time at which its KV blocks are where it is decoded.
    pub arrived: Option<Nanos>,
}

/// Why a request was not answered in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The router refused it.
    Rejected(Rejection),
    /// The engine refused it.
    Refused(&'static str),
    /// Its endpoint died or timed out, or its gateway died, and there was no other one to try or an answer had begun.
    Broken,
    /// Every endpoint that could be tried was busy.
    Busy,
    /// The client gave up.
    TimedOut,
}

// === impl Outcome ===

impl Outcome {
    /// Whether it was answered in full.
    pub fn is_ok(&self) -> bool {
        self.failure.is_none()
    }

    /// Prompt tokens that had to be computed.
    pub fn uncached_tokens(&self) -> u32 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }

    /// Seconds to the first token.
    pub fn ttft_s(&self) -> Option<f64> {
        self.first_token.map(|first| (first - self.due).as_secs_f64())
    }

    /// Mean seconds between two tokens; needs at least two.
    pub fn tpot_s(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|&gaps| gaps > 0)?;
        self.first_token.map(|first| (self.end - first).as_secs_f64() / f64::from(gaps))
    }

    /// Seconds from the computed prompt to the arrival of its KV blocks, if it was split: the wait for blocks and for the
    /// link included.
    pub fn transfer_s(&self) -> Option<f64> {
        let Split { computed, arrived, .. } = self.split?;
        Some((arrived? - computed?).as_secs_f64())
    }

    /// Seconds to the end.
    pub fn e2e_s(&self) -> f64 {
        (self.end - self.due).as_secs_f64()
    }

    /// Seconds of the stages of a split request, by the names of the gateway's `Server-Timing`: `prefill`, from its arrival
    /// until its prompt was computed, and `transfer`.
    fn stages_s(&self) -> BTreeMap<String, f64> {
        let computed = self.split.and_then(|split| split.computed);
        let prefill = computed.map(|computed| ("prefill", (computed - self.due).as_secs_f64()));
        let transfer = self.transfer_s().map(|transfer_s| ("transfer", transfer_s));
        prefill.into_iter().chain(transfer).map(|(name, secs)| (name.to_owned(), secs)).collect()
    }

    /// The record that a replay of `trace` started at `start` would write. Endpoints are named by their index, and a
    /// request is sent when it is due.
    pub fn record(&self, trace: &Trace, start: Nanos) -> Record {
        let since = |at: Nanos| (at - start).as_secs_f64();
        let asked = trace.requests[self.request as usize];
        Record {
            id: u64::from(self.request),
            scheduled_s: since(self.due),
            sent_s: since(self.due),
            first_token_s: self.first_token.map(since),
            end_s: since(self.end),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.is_ok().then_some(self.cached_tokens),
            output_tokens: self.output_tokens,
            endpoint: self.endpoint.map(|place| format!("engine-{place}")),
            prefill_endpoint: self.split.map(|split| format!("engine-{}", split.prefill)),
            status: self.failure.map_or(200, Failure::status),
            session: Some(asked.session),
            base: asked.base.map(u64::from),
            shared_tokens: asked.base.map(|_| asked.shared_blocks.saturating_mul(trace.block_tokens)),
            error: self.failure.map(|failure| failure.class().to_owned()),
            reusable_tokens: Some(self.reusable_tokens),
            after: asked.after.filter(|&after| after < self.request).map(u64::from),
            think_s: asked.think_s.map(f64::from),
            attempts: Some(u32::from(self.attempts)),
            stages_s: self.stages_s(),
            ..Record::default()
        }
    }
}

// === impl Failure ===

impl Failure {
    /// The HTTP status that a gateway would answer; 0 if the client has disconnected.
    fn status(self) -> u16 {
        match self {
            Self::Rejected(_) | Self::Busy => 503,
            Self::Refused(_) => 400,
            Self::Broken => 502,
            Self::TimedOut => 0,
        }
    }

    /// Its class, as named in records.
    fn class(self) -> &'static str {
        match self {
            Self::Rejected(_) | Self::Busy | Self::Refused(_) => "status",
            Self::Broken => "reset",
            Self::TimedOut => "timeout",
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::{Builder, TraceRequest};

    use super::*;

    #[test]
    fn a_record_has_the_latencies_of_its_outcome_and_the_trace_s_place_in_it() {
        let mut builder = Builder::new(16);
        let request = TraceRequest { input_tokens: 40, output_tokens: 5, ..TraceRequest::default() };
        builder.push(TraceRequest { session: 3, ..request }, &[1, 2]).expect("room");
        let turn = TraceRequest { session: 3, after: Some(0), think_s: Some(2.5), ..request };
        builder.push(turn, &[1, 2, 3]).expect("room");
        let trace = builder.finish();
        let at = Nanos::from_secs;
        let outcome = Outcome {
            request: 1,
            root: 0,
            endpoint: Some(2),
            attempts: 2,
            resent: 0,
            due: at(12),
            first_token: Some(at(13)),
            end: at(17),
            prompt_tokens: 40,
            cached_tokens: 16,
            moved_tokens: 0,
            reusable_tokens: 32,
            output_tokens: 5,
            split: Some(Split {
                prefill: 1,
                computed: Some(Nanos::from_millis(12_250)),
                arrived: Some(Nanos::from_millis(12_750)),
            }),
            failure: None,
        };
        let record = outcome.record(&trace, at(10));
        assert_eq!((record.id, record.scheduled_s, record.endpoint.as_deref()), (1, 2.0, Some("engine-2")));
        assert_eq!(
            (record.ttft_s(), record.e2e_s(), record.tpot_s()),
            (outcome.ttft_s(), 5.0, outcome.tpot_s())
        );
        assert_eq!((record.session, record.after, record.think_s), (Some(3), Some(0), Some(2.5)));
        assert_eq!(
            (record.base, record.shared_tokens, record.reusable_tokens),
            (Some(0), Some(32), Some(32))
        );
        assert_eq!((record.cached_tokens, record.attempts), (Some(16), Some(2)));
        assert_eq!((record.stages_s["prefill"], record.stages_s["transfer"]), (0.25, 0.5));
        assert!(record.is_ok());
        for (failure, status, class) in [
            (Failure::Rejected(Rejection::QueueFull), 503, "status"),
            (Failure::Broken, 502, "reset"),
            (Failure::TimedOut, 0, "timeout"),
        ] {
            let record = Outcome { failure: Some(failure), ..outcome }.record(&trace, at(10));
            assert_eq!(
                (record.status, record.error.as_deref(), record.is_ok()),
                (status, Some(class), false)
            );
        }
    }
}
