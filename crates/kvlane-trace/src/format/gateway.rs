//! Recordings of the gateway: requests in order of arrival, their lengths, and shared prefixes.
//!
//! A request is one of a client, whatever attempts it took: its answer is that of the last attempt. A turn waits for
//! the previous one in its session, if that had ended, with the gap as think time. Recordings do not contain answers,
//! so if a prompt contains an earlier one in full and is longer than that with its answer, it is assumed to continue
//! with the answer, as conversations do. Shared prefixes are known to 128 tokens or a block.
//!
//! Lost are: prompts without a token count (requests for paths without a prompt are left out), the part of a request
//! before the recording begins, and prefixes shared with prompts that the recorder had evicted.

use std::collections::HashMap;
use std::io::BufRead;

use kvlane_core::recording::file::{Frame, Frames};
use kvlane_core::recording::{Entries, Entry, shared_blocks};
use kvlane_core::request::{AdapterKey, AnswerEnd, RequestId, RequestKey, SchedulingRequest, SessionKey};
use kvlane_core::scheduler::Input;
use kvlane_core::time::Nanos;

use super::lines::{Fault, Lines, TOKENS_MAX};
use super::{Draft, Options, TraceError};
use crate::trace::TraceRequest;

/// Tokens of a block where the options do not say.
const BLOCK_TOKENS: u32 = 16;

pub(super) fn begins(head: &str) -> bool {
    head.starts_with("kvlane recording ")
}

/// State of the requests of a recording.
#[derive(Default)]
struct Reading {
    requests: Vec<Seen>,
    /// Of the gateway's current run, by the ids of attempts.
    attempts: HashMap<RequestId, usize>,
    names: HashMap<RequestKey, usize>,
    /// Time of the gateway's start.
    origin_s: f64,
    models: Vec<String>,
    left_out: u64,
    damaged: u64,
}

/// A request.
struct Seen {
    at_s: f64,
    prompt_tokens: u32,
    block_tokens: u32,
    session: Option<SessionKey>,
    adapter: Option<AdapterKey>,
    /// Tokens observed, and their number as reported by the engine.
    seen_tokens: u32,
    output_tokens: Option<u32>,
    end_s: Option<f64>,
    /// The earlier request with which its prompt shares a prefix, and the length of the prefix in tokens.
    base: Option<(usize, u32)>,
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<R>, options: &Options) -> Result<Draft, TraceError> {
    let bytes = lines.rest()?;
    let line = |why: String| TraceError::Line { line: 1, field: "recording", why };
    let frames = Frames::new(&bytes).ok_or_else(|| line("another version of kvlane wrote it".into()))?;
    let mut reading = Reading::default();
    for frame in frames {
        reading.take(frame);
    }
    if let [one, other, ..] = &reading.models[..] {
        return Err(line(format!("the recordings are of {one} and {other}: select those of one model")));
    }
    let mut draft = Draft::new(options, BLOCK_TOKENS);
    draft.timed = false;
    reading.into_draft(&mut draft).map_err(|fault| match fault {
        Fault::TooLong => TraceError::TooLong { max: super::REQUESTS_MAX },
        Fault::Field(_, why) => line(why),
    })?;
    Ok(draft)
}

// === impl Reading ===

impl Reading {
    fn take(&mut self, frame: Frame<'_>) {
        match frame {
            Frame::Head(head) => {
                if head.origin_unix_s != self.origin_s {
                    // Another run of the gateway has other ids.
                    (self.attempts, self.names) = Default::default();
                    self.origin_s = head.origin_unix_s;
                }
                if !self.models.contains(&head.model) {
                    self.models.push(head.model);
                }
            }
            Frame::Segment { bytes, .. } => {
                for entry in Entries::new(bytes) {
                    match entry {
                        Ok((at, Entry::Input(input))) => self.told(at, input),
                        Ok(_) => {}
                        Err(_) => self.damaged += 1,
                    }
                }
            }
            Frame::Prompts(shared) => {
                for one in shared {
                    let place = |id| self.attempts.get(&id).copied();
                    if let (Some(own), Some((base, units))) = (place(one.request), one.base)
                        && let Some(base) = place(base).filter(|base| *base < own)
                    {
                        let unit = self.requests[own].unit_tokens();
                        self.requests[own].base = Some((base, units.saturating_mul(unit)));
                    }
                }
            }
            Frame::Damaged(_) | Frame::Torn(_) => self.damaged += 1,
        }
    }

    fn told(&mut self, at: Nanos, input: Input) {
        let at_s = self.origin_s + at.as_secs_f64();
        let place = |id: &RequestId| self.attempts.get(id).copied();
        match input {
            Input::Arrived { request, block_tokens, .. } => self.arrived(at_s, &request, block_tokens),
            Input::FirstToken { request } => {
                if let Some(place) = place(&request) {
                    let seen = &mut self.requests[place];
                    seen.seen_tokens = seen.seen_tokens.max(1);
                }
            }
            Input::Tokens { request, count } => {
                if let Some(place) = place(&request) {
                    let seen = &mut self.requests[place];
                    seen.seen_tokens = seen.seen_tokens.saturating_add(count);
                }
            }
            Input::Wrote { request, output_tokens } => {
                if let Some(place) = place(&request) {
                    self.requests[place].output_tokens = Some(output_tokens);
                }
            }
            Input::Finished { request } => {
                if let Some(place) = place(&request) {
                    self.requests[place].end_s = Some(at_s);
                }
            }
            _ => {}
        }
    }

    fn arrived(&mut self, at_s: f64, request: &SchedulingRequest, block_tokens: u32) {
        if request.attempt > 0 || request.hedge.is_some() {
            let known = request.name.and_then(|name| self.names.get(&name)).copied();
            if let Some(place) = known {
                self.attempts.insert(request.id, place);
                // Its answer starts again.
                self.requests[place].seen_tokens = 0;
            }
            return;
        }
        if request.prompt_tokens == 0 || request.prompt_tokens > TOKENS_MAX {
            self.left_out += 1;
            return;
        }
        let place = self.requests.len();
        self.attempts.insert(request.id, place);
        request.name.iter().for_each(|&name| _ = self.names.insert(name, place));
        self.requests.push(Seen {
            at_s,
            prompt_tokens: request.prompt_tokens,
            block_tokens,
            session: request.session,
            adapter: request.adapter,
            seen_tokens: 0,
            output_tokens: None,
            end_s: None,
            base: None,
        });
    }

    fn into_draft(self, draft: &mut Draft) -> Result<(), Fault> {
        let Self { requests, left_out, damaged, .. } = self;
        let first_s = requests.iter().map(|seen| seen.at_s).fold(f64::INFINITY, f64::min);
        let trace_block = draft.builder.block_tokens();
        draft.infer_sessions = requests.iter().all(|seen| seen.session.is_none());
        let mut sessions: HashMap<SessionKey, (u32, usize)> = HashMap::new();
        let mut adapters: HashMap<AdapterKey, u32> = HashMap::new();
        let (mut count, mut go_on, mut unfinished) = (0, 0u64, 0u64);
        for (place, seen) in requests.iter().enumerate() {
            let before = seen.session.and_then(|key| sessions.get(&key)).copied();
            let session = before.map_or(count, |(session, _)| session);
            count += u32::from(session == count);
            seen.session.iter().for_each(|&key| _ = sessions.insert(key, (session, place)));
            let over =
                |(_, turn): &(u32, usize)| requests[*turn].end_s.is_some_and(|end_s| end_s <= seen.at_s);
            let turn = before.filter(over).map(|(_, turn)| turn);
            let think_s = turn.and_then(|turn| Some((seen.at_s - requests[turn].end_s?).max(0.0) as f32));
            let shared_tokens = seen.base.map(|(base, shared)| {
                let of = &requests[base];
                let whole = shared >= of.prompt_tokens / of.unit_tokens() * of.unit_tokens();
                let with_answer = of.prompt_tokens.saturating_add(of.answer_tokens());
                if whole && shared > 0 && seen.prompt_tokens > with_answer {
                    go_on += 1;
                    with_answer
                } else {
                    shared
                }
            });
            unfinished += u64::from(seen.end_s.is_none());
            let known = adapters.len() as u32;
            let adapter = seen.adapter.map(|key| *adapters.entry(key).or_insert(known));
            draft.branch(TraceRequest {
                arrival_s: seen.at_s - first_s,
                input_tokens: seen.prompt_tokens,
                output_tokens: seen.answer_tokens(),
                session,
                after: turn.map(|turn| turn as u32),
                think_s,
                end: AnswerEnd::Unknown,
                base: seen.base.map(|(base, _)| base as u32),
                shared_blocks: shared_tokens.unwrap_or(0) / trace_block,
                adapter,
            })?;
        }
        let mut note = |count: u64, what: &str| {
            if count > 0 {
                draft.builder.note(format!("{count} {what}"));
            }
        };
        note(go_on, "prompts begin with all of an earlier one and are taken to go on with its answer");
        note(
            unfinished,
            "requests were not over when the recording ended: their answers are as long as what was seen",
        );
        note(left_out, "requests without a counted prompt are left out");
        note(damaged, "parts of the recording are damaged or cut off, and left out");
        Ok(())
    }
}

// === impl Seen ===

impl Seen {
    /// Unit of shared prefixes, in tokens.
    fn unit_tokens(&self) -> u32 {
        shared_blocks(self.block_tokens).saturating_mul(self.block_tokens).max(1)
    }

    /// At least one, and at most the maximum of a trace.
    fn answer_tokens(&self) -> u32 {
        self.output_tokens.unwrap_or(self.seen_tokens).clamp(1, TOKENS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use kvlane_core::block::ChainSeed;
    use kvlane_core::index::approx;
    use kvlane_core::policy::PolicyConfig;
    use kvlane_core::recording::file::{Head, add, begin};
    use kvlane_core::recording::{Recorder, Sharing};
    use kvlane_core::router::{Config, Router, Scratch};
    use kvlane_core::scheduler;

    use super::*;
    use crate::format::{self, Format};

    /// A recording of what `play` does with a router of two endpoints.
    fn recorded(play: impl FnOnce(&Router)) -> Vec<u8> {
        let head = Head {
            schema: "kvlane.recording/1".into(),
            model: "m".into(),
            version: "0".into(),
            origin_unix_s: 1e9,
            begun: Nanos::ZERO,
        };
        let file = Arc::new(Mutex::new((begin(&head), Sharing::new(1000))));
        let router = Router::new(Config {
            scheduler: scheduler::Config::new(PolicyConfig::by_name("least_load").expect("one")),
            index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
            exact: None,
            block_tokens: 16,
        });
        let sink = Arc::clone(&file);
        router.record(Some(Recorder::new(move |segment| {
            let (file, sharing) = &mut *sink.lock().expect("no panic");
            add(file, &segment, &sharing.of_segment(&segment));
        })));
        router.join(Nanos(1), "e".into(), true, false, &mut Vec::new());
        play(&router);
        router.record(None);
        let (file, _) = &*file.lock().expect("no panic");
        file.clone()
    }

    fn arrive(router: &Router, at_s: u64, id: u64, request: SchedulingRequest, prompt: &[u8]) {
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(prompt, 16, &mut chain);
        let request = SchedulingRequest { id: RequestId(id), prompt_tokens: prompt.len() as u32, ..request };
        let (mut scratch, mut out) = (Scratch::default(), Vec::new());
        router.arrive(Nanos::from_secs(at_s), request, &chain, &mut scratch, &mut out);
    }

    fn answered(router: &Router, at_s: u64, id: u64, output_tokens: u32) {
        let (now, request) = (Nanos::from_secs(at_s), RequestId(id));
        router.progress(now, request, true, 16, &mut Vec::new());
        router.step(now, Input::Wrote { request, output_tokens }, &mut Vec::new());
        router.step(now, Input::Finished { request }, &mut Vec::new());
    }

    fn in_session(key: u64) -> SchedulingRequest {
        SchedulingRequest { session: Some(SessionKey(key)), ..SchedulingRequest::new(RequestId(0), 1) }
    }

    /// Invariant: A recording is a workload, with its turns and shared prefixes.
    #[test]
    fn a_recording_is_a_workload_with_its_turns_and_what_prompts_share() {
        let prompt: Vec<u8> = (0..4096u32).map(|n| (n % 251) as u8).collect();
        let file = recorded(|router| {
            arrive(router, 10, 1, in_session(7), &prompt[..1024]);
            answered(router, 12, 1, 200);
            arrive(router, 15, 2, in_session(7), &prompt[..2048]);
            // Another one begins like the first, and asks in between.
            arrive(router, 16, 3, in_session(8), &[&prompt[..300], &[9; 400][..]].concat());
            answered(router, 17, 3, 5);
            answered(router, 18, 2, 7);
            router.step(Nanos::from_secs(19), Input::Tick, &mut Vec::new());
        });
        assert_eq!(Format::detect(&file), Some(Format::Gateway));
        let trace = format::read(&file[..], &Options::default()).expect("a trace");
        let told: Vec<_> = trace
            .requests
            .iter()
            .map(|r| (r.arrival_s, r.input_tokens, r.output_tokens, r.session, r.after, r.think_s))
            .collect();
        assert_eq!(
            told,
            [
                (0.0, 1024, 200, 0, None, None),
                (5.0, 2048, 7, 0, Some(0), Some(3.0)),
                (6.0, 700, 5, 1, None, None),
            ]
        );
        let shared: Vec<_> = trace.requests.iter().map(|r| (r.base, r.shared_blocks * 16)).collect();
        assert_eq!(shared, [(None, 0), (Some(0), 1216), (Some(0), 256)], "answer included, to 128 tokens");
        assert!(trace.notes[0].starts_with("1 prompts begin with all"), "{:?}", trace.notes);
    }

    #[test]
    fn a_retry_is_no_request_of_its_own_and_a_torn_file_is_good_up_to_there() {
        let named = |attempt| SchedulingRequest { attempt, name: Some(RequestKey(5)), ..in_session(1) };
        let file = recorded(|router| {
            arrive(router, 1, 1, named(0), &[1; 500]);
            router.step(Nanos::from_secs(2), Input::Finished { request: RequestId(1) }, &mut Vec::new());
            arrive(router, 3, 2, named(1), &[1; 500]);
            answered(router, 9, 2, 33);
        });
        let trace = format::read(&file[..], &Options::default()).expect("a trace");
        assert_eq!(trace.requests.len(), 1);
        assert_eq!(trace.requests[0].output_tokens, 33);
        let torn = [&file[..], &file[..file.len() - 3]].concat();
        let trace = format::read(&torn[..], &Options::default()).expect("a trace");
        assert!(trace.notes.last().expect("said").contains("damaged"), "{:?}", trace.notes);
    }
}
