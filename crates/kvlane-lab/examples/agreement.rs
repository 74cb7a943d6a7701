//! One engine in real time beside the same engine in virtual time.
//!
//! `agreement TRACE [SPEED]...` replays a trace over HTTP onto one mock engine, at each speed in turn (1 if none is
//! given), then plays it through a simulated world of one engine, and prints the times to first token of both, in the
//! trace's seconds. The differences are effects of real time that the model lacks: HTTP, timers, a busy machine. Requests
//! are sent by the clock in both, without waiting for predecessors, and have the length counted by the mock engine, its
//! chat template included. The third column is a world in which requests are sent at the client's actual times.
//!
//! Use a trace whose arrivals are spread. Of requests that arrive at the same instant the shortest is the first to be
//! read, parsed and enqueued by a server, and overtakes the others; a world enqueues them in the trace's order.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kvlane_core::index::approx;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_core::{router, scheduler};
use kvlane_lab::replay::{ReplayConfig, replay};
use kvlane_lab::statistics::summary::Percentiles;
use kvlane_mock::{MockConfig, MockEngine};
use kvlane_sim::fault::EventFeed;
use kvlane_sim::{
    Drive, EngineConfig, GatewaysConfig, Hints, Outcome, Plan, Send, TransferConfig, World, WorldConfig,
};
use kvlane_trace::format::Options;
use kvlane_trace::record::Record;
use kvlane_trace::trace::Trace;

type Failure = Box<dyn Error>;

/// How much of the trace is sent: its first seconds, one in so many of its sessions. That is what one engine keeps up
/// with of the Mooncake conversations.
const SECONDS: f64 = 600.0;
const SESSIONS: u32 = 4;
/// The engine.
const PRESET: &str = "qwen2.5-7b@h100";

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, speeds @ ..] = &args[..] else { return Err("agreement TRACE [SPEED]...".into()) };
    let whole = kvlane_trace::format::open(Path::new(path), &Options::default())?;
    let taken = |index: &u32| {
        let request = &whole.requests[*index as usize];
        request.arrival_s < SECONDS && request.session % SESSIONS == 0
    };
    let mut trace = whole.select((0..whole.requests.len() as u32).filter(taken));
    for request in &mut trace.requests {
        (request.after, request.think_s) = (None, None);
        request.output_tokens = request.output_tokens.max(1);
    }
    let trace = Arc::new(trace);
    let speeds: Vec<f64> = speeds.iter().map(|speed| speed.parse()).collect::<Result<_, _>>()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut out = std::io::stdout();
    writeln!(out, "{} requests over {:.0} s onto {PRESET}", trace.requests.len(), trace.span_s())?;
    for speed in if speeds.is_empty() { vec![1.0] } else { speeds } {
        let records = runtime.block_on(real(&trace, speed))?;
        let outcomes = simulated(&trace, &records, 0.0)?;
        let as_sent = simulated(&trace, &records, speed)?;
        let mut lags: Vec<f64> = records.iter().map(|record| record.lag_s() * 1e3).collect();
        let lag_ms = Percentiles::of(&mut lags).ok_or("no request")?;
        let ttft_s = |record: &Record| record.ttft_s().map(|s| s * speed);
        let both: Vec<(f64, f64)> = records
            .iter()
            .zip(&outcomes)
            .filter_map(|(record, outcome)| Some((ttft_s(record)?, outcome.ttft_s()?)))
            .collect();
        let cached = |tokens: &mut dyn Iterator<Item = u32>| tokens.map(u64::from).sum::<u64>();
        let found = cached(&mut records.iter().filter_map(|record| record.cached_tokens));
        let expected = cached(&mut outcomes.iter().map(|outcome| outcome.cached_tokens));
        writeln!(
            out,
            "\nspeed {speed}: {} answered by both; client late by {:.2} ms (p50), {:.2} ms (p99) of wall clock; \
             cached tokens {found} and {expected}, answer tokens {} and {}, ends {:.1} and {:.1} s",
            both.len(),
            lag_ms.p50,
            lag_ms.p99,
            cached(&mut records.iter().map(|record| record.output_tokens)),
            cached(&mut outcomes.iter().map(|outcome| outcome.output_tokens)),
            records.iter().map(|record| record.end_s * speed).fold(0.0, f64::max),
            outcomes.iter().map(|outcome| outcome.end.as_secs_f64()).fold(0.0, f64::max),
        )?;
        let (mut real, mut virtual_s): (Vec<f64>, Vec<f64>) = both.iter().copied().unzip();
        let mut late_ms: Vec<f64> = both.iter().map(|(real, model)| (real - model) / speed * 1e3).collect();
        // Counted from the trace's time, as the others are.
        let since_due =
            |(outcome, record): (&Outcome, &Record)| Some(outcome.ttft_s()? + record.lag_s() * speed);
        let mut as_sent: Vec<f64> = as_sent.iter().zip(&records).filter_map(since_due).collect();
        let of = |samples: &mut Vec<f64>| Percentiles::of(samples).ok_or("nothing was answered");
        let (real, model, sent, late) =
            (of(&mut real)?, of(&mut virtual_s)?, of(&mut as_sent)?, of(&mut late_ms)?);
        writeln!(out, "TTFT, s     real  virtual  difference  as sent  difference")?;
        for (name, real, model, sent) in [
            ("mean", real.mean, model.mean, sent.mean),
            ("p50", real.p50, model.p50, sent.p50),
            ("p90", real.p90, model.p90, sent.p90),
            ("p99", real.p99, model.p99, sent.p99),
        ] {
            let off = |than: f64| (real / than - 1.0) * 100.0;
            writeln!(
                out,
                "{name:5}   {real:8.4} {model:8.4}  {:+8.2} % {sent:8.4}  {:+8.2} %",
                off(model),
                off(sent)
            )?;
        }
        writeln!(
            out,
            "a request is later by {:.2} ms (p50), {:.2} ms (p90) of wall clock",
            late.p50, late.p90
        )?;
    }
    Ok(())
}

/// Replays the trace onto a mock engine in this process.
async fn real(trace: &Arc<Trace>, speed: f64) -> Result<Vec<Record>, Failure> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let engine =
        MockEngine::start(MockConfig { preset: PRESET.into(), speed, ..MockConfig::default() }, listener)?;
    let config = ReplayConfig {
        base_url: format!("http://{}", engine.addr()),
        trace: trace.clone(),
        speed,
        ..ReplayConfig::default()
    };
    let report = replay(config, |_, _| ()).await?;
    engine.shutdown().await;
    Ok(report.records)
}

/// Plays the trace through a world of one engine that is configured as a mock engine is by default. Requests are sent
/// as late as the client sent them, times `lateness`.
fn simulated(trace: &Trace, records: &[Record], lateness: f64) -> Result<Vec<Outcome>, Failure> {
    let mock = MockConfig::default();
    let engine = EngineConfig {
        max_num_seqs: mock.max_num_seqs,
        max_num_batched_tokens: mock.max_num_batched_tokens,
        ..EngineConfig::vllm(TimingModel::preset(PRESET)?, mock.block_size, mock.gpu_memory_utilization)
    };
    let mut trace = trace.clone();
    for (request, record) in trace.requests.iter_mut().zip(records) {
        request.input_tokens = record.prompt_tokens.max(request.input_tokens);
        request.arrival_s += record.lag_s() * lateness;
    }
    let plan = Plan::new(&trace);
    let requests = 0..trace.requests.len() as u32;
    let mut world = World::new(WorldConfig {
        router: router::Config {
            scheduler: scheduler::Config {
                seed: 1,
                ..scheduler::Config::new(PolicyConfig::by_name("round_robin").ok_or("no such policy")?)
            },
            index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
            exact: None,
            block_tokens: engine.block_tokens,
        },
        engines: vec![engine],
        parts: Vec::new(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: None,
        link: TransferConfig::default(),
        routing_delay: Nanos::ZERO,
        reports: None,
        events: EventFeed::default(),
        faults: Vec::new(),
        health_delay: Nanos::ZERO,
        attempts_max: 1,
        rules: None,
        reloaded: None,
        hints: Hints::default(),
        client_timeout: None,
        seed: 1,
        stopwatch: None,
    });
    let send = Send { trace: &trace, plan: &plan, requests, origin_s: 0.0, drive: Drive::Open { load: 1.0 } };
    Ok(world.run(&send, |_| ()).outcomes)
}
