//! What a recording costs: drives a router as a gateway would, with and without a tape, and says how many bytes a request
//! takes, how much more CPU time its inputs, and how long it takes to live through it again. The file is left for
//! `kvlane explain`.
//!
//! `cargo run --release -p kvlane-trace --example recording -- --requests 1000000 --out big.kvrec`

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::cache_accuracy;
use kvlane_core::index::approx;
use kvlane_core::load::LoadReport;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::recording::file::{Frame, Frames, Head, add, begin};
use kvlane_core::recording::{Recorder, Replay, Segment, Sharing};
use kvlane_core::request::{RequestId, RequestKey, SchedulingRequest, SessionKey};
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input, Output, TOKENS_TOLD};
use kvlane_core::time::Nanos;

type Failure = Box<dyn std::error::Error>;

/// Endpoints, conversations that go on at a time, and requests in flight.
const ENDPOINTS: u16 = 8;
const SESSIONS: usize = 500;
const IN_FLIGHT: usize = 200;
/// Tokens of a mean answer, and of a block.
const OUTPUT_TOKENS: usize = 250;
const BLOCK_TOKENS: u32 = 16;

fn main() -> Result<(), Failure> {
    let (mut requests, mut out, mut policy) =
        (100_000u64, String::from("big.kvrec"), String::from("fleet_cost"));
    let mut args = std::env::args().skip(1);
    while let (Some(flag), Some(value)) = (args.next(), args.next()) {
        match &*flag {
            "--requests" => requests = value.parse()?,
            "--out" => out = value,
            "--policy" => policy = value,
            other => return Err(format!("{other}: take --requests, --out, --policy").into()),
        }
    }
    let policy = PolicyConfig::by_name(&policy).ok_or("there is no such policy")?;
    let without_s = drive(requests, &policy, None)?;
    let (send, receive) = sync_channel::<Segment>(32);
    let mut file = File::create(&out)?;
    let head = Head {
        schema: "kvlane.recording/1".into(),
        model: "m".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        origin_unix_s: 1.7e9,
        begun: Nanos::ZERO,
    };
    let writer = std::thread::spawn(move || -> Result<(u64, f64), std::io::Error> {
        let (mut bytes, mut sharing, mut busy_s) = (begin(&head), Sharing::new(1 << 19), 0.0);
        let mut len = 0;
        while let Ok(segment) = receive.recv() {
            let started_s = cpu_s();
            add(&mut bytes, &segment, &sharing.of_segment(&segment));
            file.write_all(&bytes)?;
            len += bytes.len() as u64;
            bytes.clear();
            busy_s += cpu_s() - started_s;
        }
        Ok((len, busy_s))
    });
    // Here nothing may be lost, so a full channel is waited for.
    let tape = Recorder::new(move |segment| _ = send.send(segment));
    let with_s = drive(requests, &policy, Some(tape))?;
    let (len, writing_s) = writer.join().map_err(|_| "the writer broke")??;
    let each = |s: f64| s * 1e9 / requests as f64;
    writeln!(
        std::io::stdout(),
        "{requests} requests: {:.0} ns each without, {:.0} ns with a tape, {:.0} ns to write; {:.1} MB, {:.1} bytes each",
        each(without_s),
        each(with_s),
        each(writing_s),
        len as f64 / 1e6,
        len as f64 / requests as f64
    )?;
    let (started, started_s) = (Instant::now(), cpu_s());
    let bytes = std::fs::read(&out)?;
    let mut replay = Replay::new(None);
    for frame in Frames::new(&bytes).ok_or("no recording")? {
        if let Frame::Segment { number, bytes } = frame {
            replay.segment(number, bytes, |_| false, |_| true);
        }
    }
    let tally = replay.tally();
    writeln!(
        std::io::stdout(),
        "lived through again in {:.2} s ({:.2} s of CPU): {} inputs, {} of {} placements as recorded",
        started.elapsed().as_secs_f64(),
        cpu_s() - started_s,
        tally.inputs,
        tally.same,
        tally.placed
    )?;
    Ok(())
}

/// Seconds that this thread has been on a CPU: others on the machine do not count.
fn cpu_s() -> f64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    told.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// Sends that many requests through a router: the seconds that it took.
fn drive(requests: u64, policy: &PolicyConfig, tape: Option<Recorder>) -> Result<f64, Failure> {
    let router = Router::new(router::Config {
        scheduler: scheduler::Config { receipts: 1024, ..scheduler::Config::new(policy.clone()) },
        index: approx::Config { memory_bytes_max: 256 << 20, ttl: Nanos::from_secs(1800) },
        exact: None,
        block_tokens: BLOCK_TOKENS,
    });
    let taped = tape.is_some();
    router.record(tape);
    let (mut out, mut scratch): (Vec<Output>, _) = (Vec::new(), Scratch::default());
    let mut endpoints = Vec::new();
    for n in 0..ENDPOINTS {
        let name = format!("http://10.0.0.{n}:8000").into();
        endpoints.push(router.join(Nanos(1), name, true, false, &mut out).ok_or("room")?);
    }
    // Conversations with a common system prompt, each turn longer by what was said.
    let mut rng = Rng::new(7);
    let mut system = Vec::new();
    ChainSeed::new("m", None, None).chain(
        &[7; 64 * BLOCK_TOKENS as usize],
        BLOCK_TOKENS as usize,
        &mut system,
    );
    let mut sessions: Vec<(u64, Vec<BlockHash>)> = Vec::new();
    for n in 0..SESSIONS as u64 {
        sessions.push((n, system.clone()));
    }
    let mut next_session = SESSIONS as u64;
    let mut flying: VecDeque<(RequestId, u32)> = VecDeque::new();
    let mut now = Nanos::from_micros(10);
    let started_s = cpu_s();
    for n in 0..requests {
        let id = RequestId(n + 1);
        let at = rng.below(SESSIONS);
        let (session, chain) = &mut sessions[at];
        for _ in 0..24 + rng.below(40) {
            chain.push(BlockHash(rng.next_u64()));
        }
        let request = SchedulingRequest {
            session: Some(SessionKey(session.wrapping_mul(0x9E37_79B9_7F4A_7C15))),
            name: Some(RequestKey(rng.next_u64())),
            output_tokens_max: Some(2048),
            ..SchedulingRequest::new(id, chain.len() as u32 * BLOCK_TOKENS + rng.below(16) as u32)
        };
        let prompt_tokens = request.prompt_tokens;
        now += Nanos::from_micros(500 + rng.below(1000) as u64);
        router.arrive(now, request, chain, &mut scratch, &mut out);
        if chain.len() > 500 {
            (*session, *chain) = (next_session, system.clone());
            next_session += 1;
        }
        flying.push_back((id, prompt_tokens));
        if flying.len() > IN_FLIGHT
            && let Some((request, prompt_tokens)) = flying.pop_front()
        {
            let output_tokens = (OUTPUT_TOKENS / 2 + rng.below(OUTPUT_TOKENS)) as u32;
            router.progress(now, request, true, 0, &mut out);
            for _ in 0..(output_tokens - 1) / TOKENS_TOLD {
                now += Nanos::from_micros(1 + rng.below(60) as u64);
                // Answers come side by side: lots of others in between.
                let other = flying.get(rng.below(flying.len())).map_or(request, |(other, _)| *other);
                let whose = if rng.below(2) == 0 { request } else { other };
                router.progress(now, whose, false, TOKENS_TOLD, &mut out);
            }
            router.step(now, Input::Wrote { request, output_tokens }, &mut out);
            let reported = cache_accuracy::ReportedReuse { prompt_tokens, cached_tokens: prompt_tokens / 2 };
            router.step(now, Input::Answered { request, reported }, &mut out);
            router.step(now, Input::Succeeded { request }, &mut out);
            router.step(now, Input::Finished { request }, &mut out);
        }
        if n.is_multiple_of(1000) {
            for &endpoint in &endpoints {
                let reported = LoadReport {
                    running: 20,
                    waiting: 1,
                    kv_usage_ratio: 0.5,
                    kv_capacity_tokens: Some(400_000),
                };
                router.step(now, Input::Reported { endpoint, reported }, &mut out);
            }
        }
        out.clear();
    }
    let took_s = cpu_s() - started_s;
    if taped {
        router.record(None);
    }
    Ok(took_s)
}
