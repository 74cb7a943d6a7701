//! The exact index beside Dynamo's, on the same streams in the same run. See README.md.

mod allocated;
mod cpu;
mod index;
mod stream;

use std::hint::black_box;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::Overlap;

use crate::index::{Index, Kvlane, Threaded};
use crate::stream::{BATCH, Stream};

#[global_allocator]
static ALLOCATOR: allocated::Counting = allocated::Counting;

/// What one index did on one stream.
#[derive(Clone, Default)]
struct Figures {
    name: &'static str,
    blocks_per_s: f64,
    lookup_p50: Duration,
    lookup_p99: Duration,
    /// All answers summed: equal for all who are right.
    found: u64,
}

fn time<I: Index>(stream: &Stream, with_lookups: bool) -> Figures {
    let mut index = I::new();
    let took = index.apply(stream);
    let mut figures = Figures { name: I::NAME, ..Figures::default() };
    figures.blocks_per_s = stream.blocks.len() as f64 / took.as_secs_f64();
    if with_lookups {
        let prompts: Vec<I::Prompt> = stream.prompts.iter().map(|prompt| I::prompt(prompt)).collect();
        let mut times = Vec::with_capacity(4 * prompts.len());
        for round in 0..4 {
            for prompt in &prompts {
                let start = Instant::now();
                let found = black_box(index.lookup(black_box(prompt)));
                times.push(start.elapsed());
                figures.found += if round == 0 { found } else { 0 };
            }
        }
        (figures.lookup_p50, figures.lookup_p99, _) = percentiles(&mut times);
    }
    figures
}

fn bytes<I: Index>(stream: &Stream) -> f64 {
    allocated::start();
    let before = allocated::bytes();
    let mut index = I::new();
    index.apply(stream);
    let bytes = allocated::bytes() - before;
    drop(index);
    allocated::stop();
    bytes as f64 / stream.held as f64
}

fn percentiles(times: &mut [Duration]) -> (Duration, Duration, Duration) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    (at(0.5), at(0.99), at(0.999))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn race(what: &str, stream: &Stream, rounds: usize, full: bool) -> Result<()> {
    type Run = fn(&Stream, bool) -> Figures;
    type Bytes = fn(&Stream) -> f64;
    let all: [(Run, Bytes); 4] = [
        (time::<Kvlane>, bytes::<Kvlane>),
        (time::<RadixTree>, bytes::<RadixTree>),
        (time::<Threaded<ConcurrentRadixTreeCompressed>>, bytes::<Threaded<ConcurrentRadixTreeCompressed>>),
        (time::<Threaded<PositionalIndexer>>, bytes::<Threaded<PositionalIndexer>>),
    ];
    let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); all.len()];
    for round in 0..rounds {
        // Nobody is always the first.
        for at in 0..all.len() {
            let at = (at + round) % all.len();
            runs[at].push(all[at].0(stream, full));
        }
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "\n{what}: {} events, {} blocks, {} held at the end",
        stream.changes.len(),
        stream.blocks.len(),
        stream.held
    )?;
    writeln!(out, "{:40} {:>12} {:>12} {:>12} {:>12}", "", "M blocks/s", "lookup p50", "p99", "B per block")?;
    for ((_, bytes), runs) in all.iter().zip(&runs) {
        let of = |figure: fn(&Figures) -> f64| median(runs.iter().map(figure).collect());
        let rate = of(|run| run.blocks_per_s / 1e6);
        write!(out, "{:40} {rate:>12.1}", runs[0].name)?;
        if full {
            let p50 = of(|run| run.lookup_p50.as_secs_f64() * 1e6);
            let p99 = of(|run| run.lookup_p99.as_secs_f64() * 1e6);
            write!(out, " {p50:>9.2} us {p99:>9.2} us {:>12.1}", bytes(stream))?;
        }
        writeln!(out)?;
    }
    let found: Vec<u64> = runs.iter().map(|runs| runs[0].found).collect();
    ensure!(found.iter().all(|all| *all == found[0]), "all find the same prefixes: {found:?}");
    Ok(())
}

/// Lookups while another thread applies the same blocks for 256 further endpoints, as fast as it can or at `blocks_per_s`,
/// and lets them go again, over and over.
fn beside_events(stream: &Stream, blocks_per_s: Option<f64>) -> Result<()> {
    const LOOKUPS: usize = 20_000;
    let mut kvlane = Kvlane::new();
    kvlane.apply(stream);
    let prompts: Vec<_> = stream.prompts.iter().map(|prompt| Kvlane::prompt(prompt)).collect();
    let (index, done) = (&kvlane.index, AtomicBool::new(false));
    let (mut times, mut overlap) = (Vec::with_capacity(LOOKUPS), Overlap::default());
    let rate = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let (start, mut applied) = (Instant::now(), 0);
            'all: loop {
                for change in &stream.changes {
                    if done.load(Relaxed) {
                        break 'all;
                    }
                    applied += index::store(index, 256, change, stream);
                    let due = blocks_per_s.map(|rate| Duration::from_secs_f64(applied as f64 / rate));
                    if let Some(early) = due.and_then(|due| due.checked_sub(start.elapsed())) {
                        std::thread::sleep(early);
                    }
                }
                (256..512).for_each(|slot| index.remove_endpoint(EndpointId::new(slot, 0)));
            }
            applied as f64 / start.elapsed().as_secs_f64()
        });
        for prompt in prompts.iter().cycle().take(LOOKUPS) {
            let start = Instant::now();
            index.lookup(black_box(prompt), &mut overlap);
            times.push(start.elapsed());
            std::thread::sleep(Duration::from_micros(100));
        }
        done.store(true, Relaxed);
        writer.join().expect("it does not panic")
    });
    let (p50, p99, p999) = percentiles(&mut times);
    let rate = rate / 1e6;
    writeln!(
        std::io::stdout(),
        "lookups beside {rate:.2} M blocks/s applied: p50 {p50:.2?}, p99 {p99:.2?}, p99.9 {p999:.2?}"
    )?;
    Ok(())
}

/// What chaining a prompt of 8,192 blocks costs, which is no part of the lookups above.
fn chaining(stream: &Stream) -> Result<()> {
    let mut times: Vec<Duration> = Vec::new();
    for prompt in &stream.prompts {
        let start = Instant::now();
        black_box(index::chain(black_box(prompt)));
        times.push(start.elapsed());
    }
    let (p50, p99, _) = percentiles(&mut times);
    writeln!(std::io::stdout(), "chaining the hashes of 8,192 blocks: p50 {p50:.2?}, p99 {p99:.2?}")?;
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.first().map_or(Ok(5), |rounds| rounds.parse())?;
    if arguments.get(1).is_some_and(|only| only == "profile") {
        let stream = Stream::plain(arguments[2].parse()?, false);
        for _ in 0..rounds {
            writeln!(
                std::io::stdout(),
                "{:.1}",
                time::<Kvlane>(&stream, arguments.len() > 3).blocks_per_s / 1e6
            )?;
        }
        return Ok(());
    }
    let traces: Vec<PathBuf> = arguments.iter().skip(1).map(PathBuf::from).collect();
    let plain = Stream::plain(BATCH, false);
    race("256 prompts of 8,192 blocks on 2 of 256 endpoints, batches of 16", &plain, rounds, true)?;
    chaining(&plain)?;
    beside_events(&plain, None)?;
    beside_events(&plain, Some(128_000.0))?;
    race("the same, endpoints in turn", &Stream::plain(BATCH, true), rounds, false)?;
    race("the same, one by one", &Stream::plain(1, false), rounds, false)?;
    let own = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../crates/kvlane-lab/assets/mooncake-conversation.trace.jsonl.gz");
    for path in [own].iter().chain(&traces) {
        let stream = Stream::of_trace(path, 16, 4096, 2_000_000)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        race(&format!("{name} on 16 endpoints of 4,096 blocks, with evictions"), &stream, rounds, true)?;
    }
    Ok(())
}
